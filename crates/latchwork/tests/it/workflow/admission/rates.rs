//! Rate limits: a bucket of tokens, on the time of the commit that starts.

use std::time::Duration;

use latchwork::testing::TestEngine;
use latchwork::workflow::{Ctx, RateLimit, WorkflowError, workflow};

/// A full bucket allows a burst; then there is one token each `per / max`.
#[tokio::test]
async fn starts_beyond_the_rate_are_rejected_and_told_when_to_try_again() {
    let limit = RateLimit::new(4, Duration::from_secs(2)).by(|key: &String| key.clone());
    let rated = workflow("rated").rate_limit(limit).run(async |_: Ctx, key: String| Ok(key));
    let test = TestEngine::new(&rated, 1).await.unwrap();
    let start = || test.engine().start(&rated, "k".into());
    for _ in 0..4 {
        start().await.unwrap();
    }
    let retry_after = match start().await {
        Err(WorkflowError::RateLimited { workflow, key, max, per, retry_after }) => {
            assert_eq!((&*workflow, &*key, max, per), ("rated", "k", 4, Duration::from_secs(2)));
            retry_after
        }
        other => panic!("{other:?}"),
    };
    assert!(retry_after <= Duration::from_millis(500) && !retry_after.is_zero(), "{retry_after:?}");
    test.engine().start(&rated, "other".into()).await.unwrap();
    test.run(test.env().sleep(retry_after)).await;
    start().await.unwrap();
    assert!(start().await.is_err());
    // After a long time it is full again, and holds no more than it did.
    test.run(test.env().sleep(Duration::from_secs(1000))).await;
    for _ in 0..4 {
        start().await.unwrap();
    }
    assert!(start().await.is_err());
}

#[tokio::test]
async fn starts_beyond_the_rate_are_delayed_in_their_order() {
    let limit = RateLimit::new(1, Duration::from_secs(10)).delay();
    let rated = workflow("rated").rate_limit(limit).run(async |ctx: Ctx, _: u32| Ok(ctx.now().await.0));
    let test = TestEngine::new(&rated, 1).await.unwrap();
    let began = test.env().now().0;
    let mut handles = Vec::new();
    for n in 0..5 {
        handles.push(test.engine().start(&rated, n).await.unwrap());
    }
    let mut times = Vec::new();
    for handle in handles {
        times.push((test.run(handle.result()).await.unwrap() - began) / 1_000_000);
    }
    assert_eq!(times, [0, 10, 20, 30, 40]);
}

/// What another limit rejects takes no token.
#[tokio::test]
async fn a_rejected_start_takes_no_token() {
    let both = workflow("rated").rate_limit(RateLimit::new(2, Duration::from_secs(100))).concurrency(1);
    let rated = both.run(async |ctx: Ctx, (): ()| ctx.receive::<()>("end").await);
    let test = TestEngine::new(&rated, 1).await.unwrap();
    let first = test.engine().start(&rated, ()).id("a").await.unwrap();
    for _ in 0..5 {
        assert!(matches!(test.engine().start(&rated, ()).await, Err(WorkflowError::LimitReached { .. })));
    }
    test.engine().signal("a", "end", &()).await.unwrap();
    test.run(first.result()).await.unwrap();
    let second = test.engine().start(&rated, ()).id("b").await.unwrap();
    test.engine().signal("b", "end", &()).await.unwrap();
    test.run(second.result()).await.unwrap();
    assert!(matches!(test.engine().start(&rated, ()).await, Err(WorkflowError::RateLimited { .. })));
}
