//! First steps of executions that another commit sets running: the commit counts the first attempt, so the body runs at
//! once. Without a crash no attempt is counted that was not run, and one attempt is enough.

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

/// The numbers of the attempts that were run.
type Attempts = Arc<Mutex<Vec<u32>>>;

/// Its first operation is a step that is tried once.
async fn once<T: Clone + Serialize + DeserializeOwned + Send + Sync>(
    ctx: Ctx,
    input: T,
    attempts: Attempts,
) -> Result<T, Failure> {
    let step = ctx.run_with("once", async |attempt: Attempt| {
        attempts.lock().push(attempt.number);
        Ok::<_, Failure>(input.clone())
    });
    step.retry(Retry::never()).await
}

fn single(builder: WorkflowBuilder, attempts: &Attempts) -> Workflow<u32, u32> {
    let attempts = attempts.clone();
    builder.run(move |ctx: Ctx, n: u32| once(ctx, n, attempts.clone()))
}

/// Waits until it is told to go on, if its input is 0; then the step.
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

/// Many starts, some of which are admitted while they are still about to wait in the line.
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

/// The time of a batch is over, and it is about to begin, when the start comes that fills it.
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

/// The commit that admits it has landed, and is not answered yet, when a message has it taken up.
#[tokio::test]
async fn one_that_is_taken_up_before_its_admission_is_answered_is_tried_once() {
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

/// An engine that runs nothing admits the next in line. The engine that runs it tries it for the first time.
#[tokio::test]
async fn one_that_an_idle_engine_admits_is_tried_once() {
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

/// What is stored of the next in line, or of the limit, is damaged: the execution before it ends all the same.
#[tokio::test]
async fn one_whose_successor_in_line_is_damaged_ends() {
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

/// A step that is under way is told of, however its execution was set running.
#[tokio::test]
async fn a_first_step_that_takes_long_is_told_of() {
    let builder = workflow("long").concurrency(1).when_full(Queue::new());
    let long = builder.run(async |ctx: Ctx, n: u32| {
        let step = ctx.run("long", async || {
            if n == 1 {
                std::future::pending::<()>().await;
            }
            tokio::task::yield_now().await;
            Ok::<_, Failure>(n)
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
