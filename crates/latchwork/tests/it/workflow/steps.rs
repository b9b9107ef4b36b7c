//! Steps: results, retries, timeouts, failures and panics; ends and starts.

use std::error::Error;
use std::future::IntoFuture;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use latchwork::testing::{TestEngine, crash_everywhere};
use latchwork::workflow::{Ctx, Engine, Failure, Retry, Tx, Workflow, WorkflowError, workflow};
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, thiserror::Error)]
#[error("only {left} left")]
struct Broke {
    left: u32,
}

/// Fails so many times, then returns the number of the attempt.
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
            Ok(how)
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
    let add = workflow("add").run(async |ctx: Ctx, n: u32| ctx.run("add", async || Ok(n + 1)).await);
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
    // Many starts at once: one of them creates the execution, and all get the same result.
    let mut starts = tokio::task::JoinSet::new();
    for n in 0..50 {
        let (engine, add) = (engine.clone(), add.clone());
        starts.spawn(async move { engine.start(&add, n).id("b").or_join().await.unwrap().result().await.unwrap() });
    }
    let results = starts.join_all().await;
    assert!(results.iter().all(|result| *result == results[0]), "{results:?}");
    let made = engine.start(&add, 5).await.unwrap();
    assert_eq!((made.id().len(), made.result().await.unwrap()), (36, 6));
    let missing = engine.handle(&add, "missing").result().await;
    assert!(matches!(missing, Err(WorkflowError::NotFound { .. })));
    for id in ["".to_string(), "x".repeat(513)] {
        let refused = engine.start(&add, 1).id(id).await;
        assert!(matches!(refused, Err(WorkflowError::Name { .. })), "{refused:?}");
    }
}

// One workflow that meets every kind of error, in steps and between them. None of its bodies names an error type.
#[tokio::test]
async fn the_question_mark_takes_every_kind_of_error() {
    async fn by(kind: &str) -> Result<(), Failure> {
        let boxed = || -> Result<(), Box<dyn Error + Send + Sync>> { Err("boxed".into()) };
        let causes = || anyhow::Context::context(Err::<(), _>(std::fmt::Error), "anyhow");
        match kind {
            "std" => "x".parse::<u32>().map(drop)?,
            "boxed" => boxed()?,
            "anyhow" => causes()?,
            "str" => Err("text")?,
            "string" => Err(String::from("text"))?,
            "failure" => Err(Failure::new("a failure").with_code("own"))?,
            "error" => Err(Failure::new("a failure").with_code("own").not_retryable().into_error())?,
            _ => Err(Box::<dyn Error + Send + Sync>::from(Failure::new("a failure").with_code("own").into_error()))?,
        }
        Ok(())
    }
    let failing = workflow("failing").run(async |ctx: Ctx, (kind, in_step): (String, bool)| {
        if in_step {
            ctx.run("step", async || {
                by(&kind).await?;
                Ok(())
            })
            .retry(Retry::never())
            .await?;
        }
        by(&kind).await?;
        Ok(())
    });
    let test = TestEngine::new(&failing, 1).await.unwrap();
    for (kind, code, message) in [
        ("std", "ParseIntError", "invalid digit found in string"),
        ("boxed", "", "boxed"),
        ("anyhow", "", "anyhow: an error occurred when formatting an argument"),
        ("str", "", "text"),
        ("string", "", "text"),
        ("failure", "own", "a failure"),
        ("error", "own", "a failure"),
        ("boxed failure", "own", "a failure"),
    ] {
        for in_step in [true, false] {
            let failed = test.complete(&failing, (kind.to_string(), in_step)).await;
            let Err(WorkflowError::Failed { failure, .. }) = failed else { panic!("{failed:?}") };
            assert_eq!((failure.code(), failure.message()), (code, message), "{kind}");
            assert_eq!(failure.step(), in_step.then_some("step"));
            assert_eq!(failure.is_retryable(), kind != "error");
        }
    }
}

// The failure is recorded, comes back on a replay, is handed on by a second step, and ends the execution.
#[tokio::test]
async fn a_failure_names_the_step_it_came_from() {
    let failing = workflow("failing").run(async |ctx: Ctx, in_transaction: bool| {
        let failed = match in_transaction {
            true => ctx.transaction("take", async |_: Tx| Err::<(), _>("sold out".into())).await,
            false => ctx.run("take", async || Err(Failure::new("sold out").not_retryable())).await,
        };
        let failure = failed.unwrap_err();
        ctx.sleep(Duration::from_secs(3600)).await?;
        ctx.run("tell", async || Err::<(), _>(failure.clone().not_retryable())).await
    });
    for in_transaction in [true, false] {
        let crashes = crash_everywhere(
            || failing.clone(),
            in_transaction,
            async |outcome| {
                let Err(WorkflowError::Failed { failure, .. }) = &outcome.result else {
                    panic!("{:?}", outcome.result)
                };
                assert_eq!(failure.step(), Some("take"));
                assert_eq!((failure.to_string(), failure.message()), ("step \"take\": sold out".into(), "sold out"));
            },
        );
        assert!(crashes.await > 4);
    }
}

#[tokio::test]
async fn any_error_passes_through_with_its_causes() {
    let failing = workflow("failing").run(async |ctx: Ctx, text: String| {
        let number = ctx.run("parse", async || Ok(text.parse::<u32>()?)).retry(Retry::never()).await?;
        Ok(number)
    });
    let test = TestEngine::new(&failing, 1).await.unwrap();
    assert_eq!(test.complete(&failing, "7".to_string()).await.unwrap(), 7);
    match test.complete(&failing, "x".to_string()).await {
        Err(WorkflowError::Failed { failure, .. }) => {
            assert_eq!(failure.message(), "invalid digit found in string");
            assert_eq!(failure.code(), "ParseIntError");
        }
        other => panic!("{other:?}"),
    }
}

/// A replay could find two operations at once, or an operation that was given up half-way, in another order.
#[tokio::test]
async fn operations_that_overlap_park_the_execution() {
    let overlaps = workflow("overlaps").run(async |ctx: Ctx, how: u32| {
        if how == 0 {
            let (a, b) = (ctx.run("a", async || Ok(1)), ctx.run("b", async || Ok(2)));
            let both = tokio::join!(a.into_future(), b.into_future());
            return Ok(both.0? + both.1?);
        }
        let stuck = ctx.run("stuck", async || std::future::pending::<Result<u32, Failure>>().await);
        let mut stuck = stuck.into_future();
        // The operation is begun, and then dropped.
        for _ in 0..10 {
            let polled = std::future::poll_fn(|context| std::task::Poll::Ready(stuck.as_mut().poll(context)));
            assert!(polled.await.is_pending());
            tokio::task::yield_now().await;
        }
        drop(stuck);
        ctx.run("next", async || Ok(3)).await
    });
    for how in 0..2 {
        let test = TestEngine::new(&overlaps, 1).await.unwrap();
        match test.complete(&overlaps, how).await {
            Err(WorkflowError::Parked { reason, .. }) => assert!(reason.contains("await one before"), "{reason}"),
            other => panic!("{other:?}"),
        }
        assert!(!test.bodies().contains(&"next".to_string()));
    }
}

/// A restart long after the deadline: no further attempt is made.
#[tokio::test]
async fn a_deadline_lasts_over_restarts() {
    let slow = workflow("slow").run(async |ctx: Ctx, ()| {
        let step = ctx.run("slow", async || std::future::pending::<Result<u32, Failure>>().await);
        step.total_timeout(Duration::from_secs(60)).retry(Retry::exponential()).await
    });
    let (env, clock) = latchwork::store::Env::seeded(1);
    let store = latchwork::store::Store::memory_with(env, Default::default()).await.unwrap();
    let bodies = Arc::new(AtomicU32::new(0));
    for life in 0..2 {
        let counted = bodies.clone();
        let builder = Engine::on(&store).register(&slow);
        let builder = builder.on_step(move |_, _| {
            counted.fetch_add(1, Ordering::SeqCst);
        });
        let engine = builder.start().await.unwrap();
        if life == 0 {
            engine.start(&slow, ()).id("s").await.unwrap();
            for _ in 0..100 {
                tokio::task::yield_now().await;
            }
            engine.stop();
            clock.advance(Duration::from_secs(61));
            continue;
        }
        let failed = engine.handle(&slow, "s").result().await.unwrap_err();
        assert!(failed.to_string().contains("all attempts together took too long"), "{failed}");
    }
    assert_eq!(bodies.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn an_execution_of_another_workflow_is_a_typed_error() {
    let add = workflow("add").run(async |ctx: Ctx, n: u32| ctx.run("add", async || Ok(n + 1)).await);
    let test = TestEngine::new(&add, 1).await.unwrap();
    let handle = test.engine().start(&add, 1).await.unwrap();
    assert_eq!(handle.result().await.unwrap(), 2);
    let other = workflow("other").run(async |_: Ctx, n: u32| Ok(n));
    let asked = test.engine().handle(&other, handle.id()).result().await;
    assert!(matches!(asked, Err(WorkflowError::OtherWorkflow { .. })), "{asked:?}");
}

/// Notes the names and fields of spans.
#[derive(Clone, Default)]
struct Spans(Arc<std::sync::Mutex<Vec<String>>>);

impl tracing::Subscriber for Spans {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, span: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        struct Fields(String);
        impl tracing::field::Visit for Fields {
            fn record_debug(&mut self, field: &tracing::field::Field, value: &dyn std::fmt::Debug) {
                self.0 += &format!(" {field}={value:?}");
            }
        }
        let mut fields = Fields(span.metadata().name().into());
        span.record(&mut fields);
        let mut spans = self.0.lock().unwrap();
        spans.push(fields.0);
        tracing::span::Id::from_u64(spans.len() as u64)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}
    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}
    fn event(&self, _: &tracing::Event<'_>) {}
    fn enter(&self, _: &tracing::span::Id) {}
    fn exit(&self, _: &tracing::span::Id) {}
}

#[tokio::test]
async fn executions_and_attempts_are_spans() {
    let spans = Spans::default();
    // With only one subscriber, a thread of another test that reaches a span first could disable the span for all
    // tests.
    let _second = tracing::Dispatch::new(Spans::default());
    let _guard = tracing::subscriber::set_default(spans.clone());
    tracing::callsite::rebuild_interest_cache();
    let flaky = flaky(1, Retry::exponential().max_attempts(2));
    let test = TestEngine::new(&flaky, 1).await.unwrap();
    let handle = test.engine().start(&flaky, ()).id("f").await.unwrap();
    test.run(handle.result()).await.unwrap();
    let seen = spans.0.lock().unwrap().clone();
    assert!(seen.iter().any(|span| span == "execution workflow=\"flaky\" id=f"), "{seen:?}");
    let steps: Vec<&String> = seen.iter().filter(|span| span.starts_with("step")).collect();
    assert_eq!(steps, ["step name=\"try\" attempt=1", "step name=\"try\" attempt=2"]);
}
