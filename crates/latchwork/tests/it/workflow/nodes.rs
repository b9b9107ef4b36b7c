//! Several engines on one store, in one process: which engine owns what, and what the others may do.

use std::time::Duration;

use latchwork::store::{Commit, Order, Store};
use latchwork::workflow::{Ctx, Engine, Workflow, workflow};

fn waits() -> Workflow<(), u64> {
    workflow("waits").run(async |ctx: Ctx, ()| {
        let guard = ctx.mutex("m").acquire().await?;
        let number = ctx.receive::<u64>("go").await?;
        guard.release().await?;
        ctx.run("step", async || Ok(())).await?;
        Ok(number)
    })
}

async fn in_time<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(60), future).await.expect("it hangs")
}

/// An operator's engine starts beside a running engine, does something, and ends: the running engine continues.
#[tokio::test]
async fn an_engine_that_only_operates_takes_over_nothing() {
    let store = Store::memory().await.unwrap();
    let waits = waits();
    let engine = Engine::on(&store).register(&waits).start().await.unwrap();
    let handle = engine.start(&waits, ()).id("a").await.unwrap();
    while engine.locks().inspect("m").await.is_err() {
        tokio::task::yield_now().await;
    }
    let held = engine.mutex("other").acquire().await.unwrap();
    let operator = Engine::on(&store).idle().start().await.unwrap();
    assert!(operator.mutex("other").try_acquire().await.unwrap().is_none());
    operator.locks().inspect("m").await.unwrap();
    operator.shutdown().await.unwrap();
    drop(operator);
    engine.signal("a", "go", &7u64).await.unwrap();
    assert_eq!(in_time(handle.result()).await.unwrap(), 7);
    assert!(!held.is_lost() && held.release().await.unwrap());
}

/// Another owner takes one shard: the executions in it leave this engine, and all others continue.
#[tokio::test]
async fn a_lost_shard_takes_no_other_with_it() {
    let store = Store::memory().await.unwrap();
    let waits = workflow("waits").run(async |ctx: Ctx, ()| Ok(ctx.receive::<u64>("go").await?));
    let engine = Engine::on(&store).register(&waits).start().await.unwrap();
    let mut handles = Vec::new();
    for number in 0..200 {
        handles.push(engine.start(&waits, ()).id(format!("e{number}")).await.unwrap());
    }
    let space = store.spaces().await.unwrap().into_iter().find(|space| space.name() == "node.shards").unwrap();
    let shards = store.view().await.unwrap().scan(&space.all(), Order::Ascending, 100).await.unwrap();
    // Another owner moves the epoch of one shard.
    let (key, item) = &shards[5];
    store.commit(Commit::new().put(key, item.value.clone())).await.unwrap().applied().unwrap();
    let (mut done, mut lost) = (0, 0);
    for (number, handle) in handles.iter().enumerate() {
        match engine.signal(handle.id(), "go", &(number as u64)).await {
            Ok(()) => {
                assert_eq!(in_time(handle.result()).await.unwrap(), number as u64);
                done += 1;
            }
            Err(_) => lost += 1,
        }
    }
    assert!(lost > 0 && lost < 20, "{lost} of 200 are in one of 64 shards");
    assert_eq!(done + lost, 200);
}
