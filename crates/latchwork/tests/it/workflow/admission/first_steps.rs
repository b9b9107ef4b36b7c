//! First steps of executions that another execution's commit sets running: that commit counts the first attempt, so the
//! body runs at once. Without a crash, no attempt is counted that did not run, so one allowed attempt is enough.

use std::sync::Arc;
use std::time::Duration;

use latchwork::store::Store;
use latchwork::testing::Side;
use latchwork::workflow::{
    Attempt, Batch, Ctx, Engine, ExecutionState, Failure, Queue, Retry, Workflow, WorkflowBuilder, workflow,
};
use parking_lot::Mutex;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::settle;
use crate::lock::turnstile::{Harm, Stage};

const SECOND: Duration = Duration::from_secs(1);

/// The numbers of the attempts that have run.
type Attempts = Arc<Mutex<Vec<u32>>>;

/// The first operation is a step with one attempt.
async fn once<T: Clone + Serialize + DeserializeOwned + Send + Sync>(
    ctx: Ctx,
    input: T,
    attempts: Attempts,
) -> Result<T, Failure> {
    let step = ctx.run_with("once", async |attempt: Attempt| {
        attempts.lock().push(attempt.number);
        Ok(input.clone())
    });
    step.retry(Retry::never()).await
}

fn single(builder: WorkflowBuilder, attempts: &Attempts) -> Workflow<u32, u32> {
    let attempts = attempts.clone();
    builder.run(move |ctx: Ctx, n: u32| once(ctx, n, attempts.clone()))
}

/// With input 0, waits for the signal "end"; with any other input, runs the step.
fn gated(attempts: &Attempts) -> Workflow<u32, u32> {
    let attempts = attempts.clone();
    workflow("gated").concurrency(1).when_full(Queue::new()).run(move |ctx: Ctx, n: u32| {
        let attempts = attempts.clone();
        async move {
            if n == 0 {
                ctx.receive::<()>("end").await?;
                return Ok(0);
            }
            once(ctx, n, attempts).await
        }
    })
}

/// Many starts. Some are admitted while their call still expects them to wait in the queue.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn of_many_starts_each_is_tried_once() {
    let attempts = Attempts::default();
    let single = single(workflow("single").concurrency(2).when_full(Queue::new()), &attempts);
    let store = Store::memory().await.unwrap();
    let engine = Engine::on(&store).register(&single).start().await.unwrap();
    let mut callers = Vec::new();
    for caller in 0..8 {
        let (engine, single) = (engine.clone(), single.clone());
        callers.push(tokio::spawn(async move {
            for n in 0..100 {
                let id = format!("{caller}-{n}");
                let handle = engine.start(&single, n).id(&*id).await.unwrap();
                let done = tokio::time::timeout(10 * SECOND, handle.result()).await;
                assert!(matches!(done, Ok(Ok(given)) if given == n), "{id}: {done:?} {:?}", engine.why(&*id).await);
            }
        }));
    }
    for caller in callers {
        caller.await.unwrap();
    }
    let attempts = attempts.lock();
    assert!(attempts.len() == 800 && attempts.iter().all(|number| *number == 1), "{attempts:?}");
}

/// The race: the time of a batch is over and it is about to begin, when the start that fills it comes.
#[tokio::test]
async fn a_batch_that_is_filled_as_it_begins_is_tried_once() {
    let (attempts, batch) = (Attempts::default(), Batch::new(2, 10 * SECOND));
    let seen = attempts.clone();
    let batched = workflow("batched").batch(batch);
    let batched = batched.run(move |ctx: Ctx, numbers: Vec<u32>| once(ctx, numbers, seen.clone()));
    let stage = Stage::new(|builder| builder.register(&batched)).await;
    let engine = stage.engine.clone();
    let first = engine.start(&batched, 1).id("b").await.unwrap();
    stage.turns().await;
    stage.hold_to("workflow.executions", Side::Before).await;
    stage.pass(11 * SECOND).await;
    stage.turns().await;
    let second = engine.start(&batched, 2).await.unwrap();
    assert_eq!(second.id(), first.id());
    stage.turns().await;
    stage.open();
    stage.pass(SECOND).await;
    stage.turns().await;
    let state = engine.why("b").await.unwrap().state;
    assert!(matches!(state, ExecutionState::Completed(_)), "{state:?}");
    assert_eq!(*attempts.lock(), [1]);
}

/// The race: the commit that admits the execution has landed but is not answered yet, when a message makes the engine
/// load the execution.
#[tokio::test]
async fn an_execution_loaded_before_its_admission_is_answered_is_tried_once() {
    let attempts = Attempts::default();
    let gated = gated(&attempts);
    let stage = Stage::new(|builder| builder.register(&gated)).await;
    let engine = stage.engine.clone();
    engine.start(&gated, 0).id("a").await.unwrap();
    engine.start(&gated, 1).id("b").await.unwrap();
    stage.turns().await;
    stage.hold_to("workflow.gates", Side::After).await;
    engine.signal("a", "end", &()).await.unwrap();
    stage.turns().await;
    let signals = engine.clone();
    let signals = stage.begins(async move { signals.signal("b", "hello", &()).await }).await;
    stage.turns().await;
    stage.open();
    stage.turns().await;
    stage.done(signals).await.unwrap();
    stage.pass(SECOND).await;
    let state = engine.why("b").await.unwrap().state;
    assert!(matches!(state, ExecutionState::Completed(_)), "{state:?}");
    assert_eq!(*attempts.lock(), [1]);
}

/// An idle engine admits the next execution in the queue. The engine that runs it makes the first attempt.
#[tokio::test]
async fn an_execution_that_an_idle_engine_admits_is_tried_once() {
    let attempts = Attempts::default();
    let gated = gated(&attempts);
    let store = Store::memory().await.unwrap();
    let engine = Engine::on(&store).register(&gated).start().await.unwrap();
    engine.start(&gated, 0).id("a").await.unwrap();
    engine.start(&gated, 1).id("b").await.unwrap();
    settle().await;
    engine.stop();
    settle().await;
    let idle = Engine::on(&store).register(&gated).idle().start().await.unwrap();
    idle.terminate("a", "enough").await.unwrap();
    settle().await;
    assert_eq!(idle.why("b").await.unwrap().state, ExecutionState::Running);
    let engine = Engine::on(&store).register(&gated).start().await.unwrap();
    let done = tokio::time::timeout(SECOND, engine.handle(&gated, "b").result()).await;
    assert!(matches!(done, Ok(Ok(1))), "{done:?} {:?}", engine.why("b").await);
    assert_eq!(*attempts.lock(), [1]);
}

/// A record of the next execution in the queue, or of the limit, is damaged: the running execution still ends.
#[tokio::test]
async fn an_execution_ends_though_the_next_in_the_queue_is_damaged() {
    let all = [("executions", "exec-b"), ("listed", "exec-b"), ("admission", "exec-b"), ("gates", "gated")];
    for ((space, of), harm) in all.into_iter().flat_map(|it| Harm::ALL.map(|harm| (it, harm))) {
        let gated = gated(&Attempts::default());
        let stage = Stage::new(|builder| builder.register(&gated)).await;
        let engine = stage.engine.clone();
        engine.start(&gated, 0).id("exec-a").await.unwrap();
        engine.start(&gated, 1).id("exec-b").await.unwrap();
        stage.turns().await;
        stage.damage(&format!("workflow.{space}"), of.as_bytes(), harm).await;
        engine.signal("exec-a", "end", &()).await.unwrap();
        stage.pass(SECOND).await;
        let state = engine.why("exec-a").await.unwrap().state;
        assert!(matches!(state, ExecutionState::Completed(_)), "{space}: {state:?}");
    }
}

/// The history shows a step that is running, however its execution was set running.
#[tokio::test]
async fn a_first_step_that_takes_long_is_in_the_history() {
    let builder = workflow("long").concurrency(1).when_full(Queue::new());
    let long = builder.run(async |ctx: Ctx, n: u32| {
        let step = ctx.run("long", async || {
            if n == 1 {
                std::future::pending::<()>().await;
            }
            tokio::task::yield_now().await;
            Ok(n)
        });
        step.await
    });
    let stage = Stage::new(|builder| builder.register(&long)).await;
    let engine = stage.engine.clone();
    engine.start(&long, 0).id("a").await.unwrap();
    engine.start(&long, 1).id("b").await.unwrap();
    stage.pass(SECOND).await;
    stage.turns().await;
    let history = engine.history("b").await.unwrap();
    assert_eq!(history.operations.len(), 1, "{history:?}");
}
