//! Starts under idempotency keys; runs that continue as new; and what is removed some time after the end.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use latchwork::store::{Order, Store};
use latchwork::testing::{TestEngine, crash_everywhere};
use latchwork::workflow::{Attempt, Ctx, Engine, Failure, Retry, WorkflowError, workflow};

async fn stored(store: &Store, space: &'static str) -> usize {
    let spaces = store.spaces().await.unwrap();
    let space = spaces.into_iter().find(|known| known.name() == space).unwrap();
    store.view().await.unwrap().scan(&space.all(), Order::Ascending, 10_000).await.unwrap().len()
}

async fn settle() {
    for _ in 0..1000 {
        tokio::task::yield_now().await;
    }
}

/// A client that got no answer sends its start again, many times at once: one execution is started.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_start_under_an_idempotency_key_starts_once() {
    let bodies = Arc::new(AtomicU32::new(0));
    let add = {
        let bodies = bodies.clone();
        workflow("add").run(move |ctx: Ctx, n: u32| {
            let bodies = bodies.clone();
            async move {
                let step = ctx.run("add", async || Ok(bodies.fetch_add(1, Ordering::SeqCst) + n));
                step.await
            }
        })
    };
    let other = workflow("other").run(async |_: Ctx, n: u32| Ok(n));
    let store = Store::memory().await.unwrap();
    let engine = Engine::on(&store).register(&add).register(&other).start().await.unwrap();
    let mut starts = tokio::task::JoinSet::new();
    for _ in 0..30 {
        let (engine, add) = (engine.clone(), add.clone());
        starts.spawn(async move {
            let handle = engine.start(&add, 10).idempotency_key("k").await.unwrap();
            (handle.id().clone(), handle.result().await.unwrap())
        });
    }
    let all = starts.join_all().await;
    assert!(all.iter().all(|one| *one == all[0]), "{all:?}");
    assert_eq!((all[0].1, bodies.load(Ordering::SeqCst)), (10, 1));
    let reused = engine.start(&add, 11).idempotency_key("k").await;
    assert!(matches!(reused, Err(WorkflowError::KeyReused { .. })), "{reused:?}");
    // Each workflow has its own keys, and an id that is taken is refused whatever the key.
    assert_eq!(engine.start(&other, 3).idempotency_key("k").await.unwrap().result().await.unwrap(), 3);
    let taken = engine.start(&add, 10).idempotency_key("l").id(&all[0].0).await;
    assert!(matches!(taken, Err(WorkflowError::AlreadyStarted { .. })), "{taken:?}");
    let refused = engine.start(&add, 1).idempotency_key("").await;
    assert!(matches!(refused, Err(WorkflowError::Name { .. })), "{refused:?}");
}

#[tokio::test]
async fn the_key_of_a_step_is_the_same_for_every_attempt_and_for_no_other_step() {
    let keys = workflow("keys").run(async |ctx: Ctx, ()| {
        let mut keys = Vec::new();
        for _ in 0..3 {
            let step = ctx.run_with("charge", async |attempt: Attempt| match attempt.number {
                1 => Err(Failure::new(attempt.idempotency_key.to_string())),
                _ => Ok(attempt.idempotency_key.to_string()),
            });
            keys.push(step.retry(Retry::exponential().max_attempts(2)).await?);
        }
        Ok(keys)
    });
    let test = TestEngine::new(&keys, 1).await.unwrap();
    let handle = test.engine().start(&keys, ()).id("one").await.unwrap();
    let first = test.run(handle.result()).await.unwrap();
    let second = test.complete(&keys, ()).await.unwrap();
    let history = test.history("one").await.unwrap();
    assert_eq!(history.operations.len(), 3);
    for (operation, key) in history.operations.iter().zip(&first) {
        assert_eq!(&operation.failures[0].message, key, "the first attempt had the same");
    }
    let mut all: Vec<&String> = first.iter().chain(&second).collect();
    all.sort();
    all.dedup();
    assert_eq!(all.len(), 6);
}

/// A loop that runs for long keeps a journal only of its current run.
#[tokio::test]
async fn a_run_that_is_continued_as_new_starts_with_an_empty_journal() {
    let count = workflow("count").run(async |ctx: Ctx, (from, sum): (u64, u64)| {
        let mut sum = sum;
        for number in from..from + 10 {
            sum += ctx.run("add", async || Ok(number)).await?;
        }
        if from + 10 < 100 {
            return ctx.continue_as_new((from + 10, sum)).await;
        }
        Ok(sum)
    });
    let test = TestEngine::new(&count, 1).await.unwrap();
    let handle = test.engine().start(&count, (0, 0)).id("c").await.unwrap();
    assert_eq!(test.run(handle.result()).await.unwrap(), 4950);
    settle().await;
    assert_eq!(test.bodies().len(), 100);
    assert!(stored(test.engine().store(), "workflow.journal").await <= 10, "of the last run alone");
    let history = test.history("c").await.unwrap();
    assert_eq!((history.run, history.operations.len()), (9, 10));
    let crashes = crash_everywhere(
        || count.clone(),
        (0, 0),
        async |outcome| {
            assert_eq!(outcome.result.as_ref().unwrap(), &4950, "{:?}", outcome.crash);
        },
    );
    assert!(crashes.await > 200);
}

/// All records of an execution are removed with it, and its id and key are free again.
#[tokio::test]
async fn an_execution_that_has_ended_is_removed_after_its_time_with_all_its_records() {
    let leaves = workflow("leaves").keep(Duration::from_secs(60)).run(async |ctx: Ctx, steps: u32| {
        for _ in 0..steps {
            ctx.run("step", async || Ok("x".repeat(100))).await?;
        }
        ctx.state().execution::<u32>("own").set(steps).await?;
        ctx.sleep(Duration::from_secs(5)).await?;
        if steps == 3 { Err(Failure::new("failed")) } else { Ok(steps) }
    });
    let test = TestEngine::new(&leaves, 1).await.unwrap();
    let (engine, store) = (test.engine(), test.engine().store().clone());
    for (id, steps) in [("a", 1), ("b", 3), ("c", 2500)] {
        let start = engine.start(&leaves, steps).id(id).idempotency_key(id).await;
        let _ = test.run(start.unwrap().result()).await;
    }
    assert!(engine.handle(&leaves, "c").result().await.is_ok(), "it is there for its time");
    assert!(stored(&store, "workflow.journal").await > 2500);
    let asleep = engine.start(&leaves, 2).id("later").await.unwrap();
    test.run(test.env().sleep(Duration::from_secs(61))).await;
    settle().await;
    for id in ["a", "b", "c"] {
        let gone = engine.handle(&leaves, id).result().await;
        assert!(matches!(gone, Err(WorkflowError::NotFound { .. })), "{id}: {gone:?}");
    }
    assert_eq!(asleep.result().await.unwrap(), 2, "this one ended later");
    test.run(test.env().sleep(Duration::from_secs(61))).await;
    settle().await;
    for space in ["executions", "journal", "listed", "running", "kept", "timers", "removals", "keys"] {
        let name: &'static str = format!("workflow.{space}").leak();
        assert_eq!(stored(&store, name).await, 0, "{space}");
    }
    assert_eq!(stored(&store, "state").await, 0);
    let again = engine.start(&leaves, 1).id("a").idempotency_key("a").await.unwrap();
    assert_eq!(test.run(again.result()).await.unwrap(), 1);
}

/// A function that first waits for something outside of the engine is started as well.
#[tokio::test]
async fn a_start_does_not_wait_for_the_first_operation() {
    let go = Arc::new(tokio::sync::Notify::new());
    let waits = {
        let go = go.clone();
        workflow("waits").run(move |ctx: Ctx, ()| {
            let go = go.clone();
            async move {
                go.notified().await;
                ctx.run("step", async || Ok(7)).await
            }
        })
    };
    let test = TestEngine::new(&waits, 1).await.unwrap();
    let handle = test.engine().start(&waits, ()).id("w").await.unwrap();
    go.notify_one();
    assert_eq!(handle.result().await.unwrap(), 7);
    let large = workflow("large").run(async |_: Ctx, text: String| Ok(text.len()));
    let test = TestEngine::new(&large, 1).await.unwrap();
    let refused = test.engine().start(&large, "x".repeat(5 << 20)).await;
    assert!(matches!(refused, Err(WorkflowError::InputTooLong { .. })), "{refused:?}");
}

/// The race: both starts are under way when the first commit of one of them lands. The first operation differs by case.
#[tokio::test]
async fn two_starts_at_once_under_one_key_start_one_execution() {
    for way in 0..6 {
        let one = workflow("one").run(async |ctx: Ctx, way: u32| {
            match way {
                0 => {}
                1 => ctx.sleep(Duration::from_millis(500)).await?,
                2 => ctx.sleep(Duration::from_secs(5)).await?,
                3 => ctx.run("step", async || Ok(())).await?,
                4 => ctx.receive::<()>("signal").await?,
                _ => drop(ctx.mutex("m").acquire().await?),
            }
            Ok(way)
        });
        let test = TestEngine::new(&one, 1).await.unwrap();
        let start = || tokio::spawn(test.engine().start(&one, way).idempotency_key("k").into_future());
        let (a, b) = (start(), start());
        assert_eq!(a.await.unwrap().unwrap().id(), b.await.unwrap().unwrap().id(), "way {way}");
    }
}

/// The signal goes to the execution that was started under the key.
#[tokio::test]
async fn a_start_with_a_signal_under_a_known_key_sends_it() {
    let basket = workflow("basket").run(async |ctx: Ctx, ()| {
        let mut got: Vec<u32> = Vec::new();
        while let Some(number) = ctx.receive("put").timeout(Duration::from_secs(10)).await? {
            got.push(number);
        }
        Ok(got)
    });
    let test = TestEngine::new(&basket, 1).await.unwrap();
    for number in [1, 2] {
        test.engine().start(&basket, ()).id("x").idempotency_key("k").signal("put", &number).await.unwrap();
    }
    let handle = test.engine().start(&basket, ()).idempotency_key("k").signal("put", &3).await.unwrap();
    assert_eq!(test.run(handle.result()).await.unwrap(), [1, 2, 3]);
}
