//! Rate limits: a bucket of tokens, at the time of the commit that starts the execution.

use std::time::Duration;

use latchwork::testing::TestEngine;
use latchwork::workflow::{Ctx, Debounce, RateLimit, WorkflowBuilder, WorkflowError, workflow};

/// A full bucket allows a burst; then there is one token each `per / max`.
#[tokio::test]
async fn starts_beyond_the_rate_are_rejected_with_the_time_to_try_again() {
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
    // After a long time the bucket is full again, and holds no more than before.
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

/// A start that another limit rejects takes no token.
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

/// A message that comes early, or an operator who wakes the execution, does not make it begin earlier: neither before
/// its token, nor before its requested delay, nor while it gathers.
#[tokio::test]
async fn no_message_makes_an_execution_begin_before_its_time() {
    let waits = |builder: WorkflowBuilder| {
        builder.run(async |ctx: Ctx, ()| {
            let began = ctx.now().await.0;
            ctx.receive::<()>("end").await?;
            Ok(began)
        })
    };
    let second = Duration::from_secs(1);
    let rated = waits(workflow("rated").rate_limit(RateLimit::new(1, 100 * second).delay()));
    let delayed = waits(workflow("delayed"));
    let debounced = waits(workflow("debounced").debounce(Debounce::new(100 * second)));
    let test = TestEngine::build(1).register(&rated).register(&delayed).register(&debounced).start().await.unwrap();
    let engine = test.engine();
    let began = test.env().now().0;
    engine.start(&rated, ()).id("at once").await.unwrap();
    engine.start(&rated, ()).id("rated").await.unwrap();
    engine.start(&delayed, ()).id("delayed").delay(100 * second).await.unwrap();
    engine.start(&debounced, ()).id("debounced").await.unwrap();
    let all = [("rated", &rated), ("delayed", &delayed), ("debounced", &debounced)];
    for (id, _) in all {
        engine.signal(id, "end", &()).await.unwrap();
        engine.wake(id).await.unwrap();
        test.run(test.env().sleep(second)).await;
    }
    for (id, workflow) in all {
        let handle = engine.handle(workflow, id);
        let seconds = (test.run(handle.result()).await.unwrap() - began) / 1_000_000;
        assert_eq!(seconds, 100, "{id}");
    }
}
