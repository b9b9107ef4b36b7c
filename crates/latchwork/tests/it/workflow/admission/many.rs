//! Ten thousand keys at once, with a limit of one each.

use std::time::Duration;

use latchwork::store::Order;
use latchwork::testing::TestEngine;
use latchwork::workflow::{Ctx, WorkflowError, workflow};

const KEYS: u32 = 10_000;

/// A little longer than an unused limit stays before it is deleted.
const CLEARED: Duration = Duration::from_secs(60);

/// The number of records of limits.
async fn stored(test: &TestEngine) -> usize {
    let store = test.engine().store();
    let (view, mut found) = (store.view().await.unwrap(), 0);
    for space in store.spaces().await.unwrap() {
        if ["workflow.gates", "workflow.admission"].contains(&space.name()) {
            found += view.scan(&space.all(), Order::Ascending, usize::MAX).await.unwrap().len();
        }
    }
    found
}

#[tokio::test]
async fn ten_thousand_keys_each_hold_their_own_limit_and_leave_nothing() {
    let held = workflow("held").concurrency_by(1, |n: &u32| n.to_string()).run(async |ctx: Ctx, n: u32| {
        ctx.receive::<()>("end").await?;
        Ok(n)
    });
    let test = TestEngine::new(&held, 1).await.unwrap();
    let engine = test.engine();
    let start = |n: u32| engine.start(&held, n);
    let (mut first, mut second) = (tokio::task::JoinSet::new(), tokio::task::JoinSet::new());
    for n in 0..KEYS {
        first.spawn(start(n).id(n.to_string()).into_future());
    }
    let handles: Vec<_> = test.run(first.join_all()).await.into_iter().map(|start| start.unwrap()).collect();
    for n in 0..KEYS {
        second.spawn(start(n).into_future());
    }
    let mut keys = Vec::new();
    for rejected in test.run(second.join_all()).await {
        match rejected {
            Err(WorkflowError::LimitReached { key, limit: 1, .. }) => keys.push(key.parse::<u32>().unwrap()),
            other => panic!("its key is in use: {other:?}"),
        }
    }
    keys.sort();
    assert!(keys.into_iter().eq(0..KEYS), "each key has rejected one start");
    assert!(stored(&test).await >= KEYS as usize);
    for handle in &handles {
        engine.signal(handle.id(), "end", &()).await.unwrap();
    }
    for handle in &handles {
        assert_eq!(test.run(handle.result()).await.unwrap().to_string(), handle.id().to_string());
    }
    test.run(test.env().sleep(CLEARED)).await;
    assert_eq!(stored(&test).await, 0, "a key that is not in use takes no room");
    // Each key can be used again.
    for n in [0, KEYS / 2, KEYS - 1] {
        let again = start(n).await.unwrap();
        engine.signal(again.id(), "end", &()).await.unwrap();
        assert_eq!(test.run(again.result()).await.unwrap(), n);
    }
}
