//! Steps: results, retries, timeouts, failures and panics; ends and starts.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use latchwork::testing::TestEngine;
use latchwork::workflow::{Ctx, Engine, Failure, Retry, Workflow, WorkflowError, workflow};
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, thiserror::Error)]
#[error("only {left} left")]
struct Broke {
    left: u32,
}

/// Fails so many times, then gives the number of the attempt.
fn flaky(failures: u32, retry: Retry) -> Workflow<(), u32> {
    let tries = Arc::new(AtomicU32::new(0));
    workflow("flaky").run(move |ctx: Ctx, ()| {
        let (tries, retry) = (tries.clone(), retry.clone());
        async move {
            let step = ctx.run("try", async || match tries.fetch_add(1, Ordering::SeqCst) + 1 {
                attempt if attempt <= failures => Err(Failure::typed(Broke { left: attempt })),
                attempt => Ok(attempt),
            });
            step.retry(retry).await
        }
    })
}

#[tokio::test]
async fn a_step_is_tried_as_often_as_its_policy_says() {
    let retry = Retry::exponential().max_attempts(4);
    for (failures, expected) in [(0, Some(1)), (3, Some(4)), (4, None)] {
        let flaky = flaky(failures, retry.clone());
        let test = TestEngine::new(&flaky, 1).await.unwrap();
        let began = test.env().now();
        let result = test.complete(&flaky, ()).await;
        match (expected, result) {
            (Some(expected), Ok(attempt)) => assert_eq!(attempt, expected),
            (None, Err(WorkflowError::Failed { failure, .. })) => {
                assert_eq!(failure.get::<Broke>(), Some(Broke { left: 4 }), "the error comes back typed");
            }
            other => panic!("{other:?}"),
        }
        assert_eq!(test.bodies().len(), (failures + 1).min(4) as usize);
        let took = Duration::from_micros(test.env().now().0 - began.0);
        let most = Duration::from_secs([0, 1, 3, 7][failures.min(3) as usize]);
        assert!(took <= most && took >= most * 3 / 4, "{failures} failures took {took:?}");
    }
}

#[tokio::test]
async fn a_failure_that_is_not_retryable_is_not_tried_again() {
    let tries = Arc::new(AtomicU32::new(0));
    let counted = tries.clone();
    let once = workflow("once").run(move |ctx: Ctx, ()| {
        let tries = counted.clone();
        async move {
            ctx.run("try", async || {
                tries.fetch_add(1, Ordering::SeqCst);
                Err::<(), _>(Failure::new("no").not_retryable())
            })
            .await
        }
    });
    let test = TestEngine::new(&once, 1).await.unwrap();
    let failed = test.complete(&once, ()).await.unwrap_err();
    assert_eq!(failed.to_string().split(": ").last(), Some("no"));
    assert_eq!(tries.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn attempts_that_take_too_long_or_panic_are_failed_attempts() {
    let odd = workflow("odd").run(async |ctx: Ctx, how: u32| {
        let env = latchwork::store::Env::system();
        let _ = env;
        let step = ctx.run("try", async || {
            if how == 1 {
                std::future::pending::<()>().await;
            }
            assert!(how != 2, "how is 2");
            Ok::<_, Failure>(how)
        });
        step.timeout(Duration::from_secs(5)).retry(Retry::exponential().max_attempts(2)).await
    });
    for (how, expected) in [(0, None), (1, Some("the attempt took too long")), (2, Some("it panicked: how is 2"))] {
        let test = TestEngine::new(&odd, 1).await.unwrap();
        match (test.complete(&odd, how).await, expected) {
            (Ok(0), None) => {}
            (Err(WorkflowError::Failed { failure, .. }), Some(expected)) => {
                assert_eq!(failure.message(), expected);
                assert_eq!(test.bodies().len(), 2);
            }
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn a_second_start_of_an_id_is_refused_or_joins_as_asked() {
    let add = workflow("add").run(async |ctx: Ctx, n: u32| ctx.run("add", async || Ok::<_, Failure>(n + 1)).await);
    let other = workflow("other").run(async |_: Ctx, n: u32| Ok(n));
    let store = latchwork::store::Store::memory().await.unwrap();
    let engine = Engine::on(&store).register(&add).register(&other).start().await.unwrap();
    let first = engine.start(&add, 1).id("a").await.unwrap();
    let again = engine.start(&add, 10).id("a").await;
    assert!(matches!(again, Err(WorkflowError::AlreadyStarted { .. })), "{again:?}");
    assert_eq!(engine.start(&add, 10).id("a").or_join().await.unwrap().result().await.unwrap(), 2);
    assert_eq!(first.result().await.unwrap(), 2);
    let mixed = engine.start(&other, 1).id("a").or_join().await;
    assert!(matches!(mixed, Err(WorkflowError::OtherWorkflow { .. })), "{mixed:?}");
    // Many at once: one starts, all get the same.
    let mut starts = tokio::task::JoinSet::new();
    for n in 0..50 {
        let (engine, add) = (engine.clone(), add.clone());
        starts.spawn(async move { engine.start(&add, n).id("b").or_join().await.unwrap().result().await.unwrap() });
    }
    let results = starts.join_all().await;
    assert!(results.iter().all(|result| *result == results[0]), "{results:?}");
    let made = engine.start(&add, 5).await.unwrap();
    assert_eq!((made.id().len(), made.result().await.unwrap()), (36, 6));
    let missing = engine.handle(&add, "nobody").result().await;
    assert!(matches!(missing, Err(WorkflowError::NotFound { .. })));
    for id in ["".to_string(), "x".repeat(513)] {
        let refused = engine.start(&add, 1).id(id).await;
        assert!(matches!(refused, Err(WorkflowError::Name { .. })), "{refused:?}");
    }
}

#[tokio::test]
async fn any_error_passes_through_and_its_causes_are_told() {
    let failing = workflow("failing").run(async |ctx: Ctx, text: String| {
        let number = ctx.run("parse", async || text.parse::<u32>()).retry(Retry::never()).await?;
        Ok(number)
    });
    let test = TestEngine::new(&failing, 1).await.unwrap();
    assert_eq!(test.complete(&failing, "7".to_string()).await.unwrap(), 7);
    match test.complete(&failing, "x".to_string()).await {
        Err(WorkflowError::Failed { failure, .. }) => {
            assert_eq!(failure.message(), "invalid digit found in string");
            assert!(failure.kind().ends_with("ParseIntError"), "{}", failure.kind());
        }
        other => panic!("{other:?}"),
    }
}
