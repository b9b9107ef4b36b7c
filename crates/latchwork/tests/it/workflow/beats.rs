//! Heartbeats of attempts that are over: they return an error and have no other effect.

use std::sync::Arc;
use std::time::Duration;

use latchwork::store::{Env, Store};
use latchwork::testing::TestEngine;
use latchwork::workflow::{Attempt, Ctx, Engine, ExecutionState, Failure, Retry, Workflow, workflow};
use parking_lot::Mutex;
use tokio::sync::oneshot;

const SECOND: Duration = Duration::from_secs(1);

/// Sends the first attempt out of the body to the test.
type Hands = Arc<Mutex<Option<oneshot::Sender<Attempt>>>>;

fn hands() -> (Hands, oneshot::Receiver<Attempt>) {
    let (sender, receiver) = oneshot::channel();
    (Arc::new(Mutex::new(Some(sender))), receiver)
}

async fn settle() {
    for _ in 0..200 {
        tokio::task::yield_now().await;
    }
}

/// The attempt belongs to a run that has continued as new; the step of the next run is at the same place.
#[tokio::test]
async fn a_heartbeat_of_an_earlier_run_is_an_error() {
    let store = Store::memory().await.unwrap();
    let (hands, handed) = hands();
    let runs = workflow("runs").run(move |ctx: Ctx, number: u32| {
        let hands = hands.clone();
        async move {
            let hands = &hands;
            ctx.run_with(&format!("step {number}"), async |attempt: Attempt| {
                if number > 0 {
                    return std::future::pending().await;
                }
                let _ = hands.lock().take().unwrap().send(attempt);
                Ok(())
            })
            .await?;
            ctx.continue_as_new::<()>(number + 1).await
        }
    });
    let engine = Engine::on(&store).register(&runs).start().await.unwrap();
    engine.start(&runs, 0).id("r").await.unwrap();
    let attempt = handed.await.unwrap();
    settle().await;
    attempt.heartbeat(&"of run 0").await.unwrap_err();
    engine.stop();
    let engine = Engine::on(&store).register(&runs).start().await.unwrap();
    settle().await;
    assert_eq!(engine.why("r").await.unwrap().state, ExecutionState::Running);
}

#[tokio::test]
async fn progress_is_not_taken_over_from_an_earlier_run() {
    let (hands, handed) = hands();
    let (fails, failing) = oneshot::channel::<()>();
    let failing = Arc::new(tokio::sync::Mutex::new(Some(failing)));
    let runs = workflow("runs").run(move |ctx: Ctx, number: u32| {
        let (hands, failing) = (hands.clone(), failing.clone());
        async move {
            let (hands, failing) = (&hands, &failing);
            let copies = async |attempt: Attempt| {
                if number == 0 {
                    let _ = hands.lock().take().unwrap().send(attempt);
                    return Ok(None);
                }
                if attempt.number == 1 {
                    let _ = failing.lock().await.take().unwrap().await;
                    return Err(Failure::new("broke"));
                }
                Ok(attempt.progress::<u32>())
            };
            let retry = Retry::exponential().first_pause(Duration::from_millis(1));
            let from = ctx.run_with("copy", copies).retry(retry).await?;
            if number == 0 { ctx.continue_as_new(1).await } else { Ok(from) }
        }
    });
    let test = TestEngine::new(&runs, 1).await.unwrap();
    let handle = test.engine().start(&runs, 0).await.unwrap();
    let attempt = handed.await.unwrap();
    settle().await;
    attempt.heartbeat(&90).await.unwrap_err();
    fails.send(()).unwrap();
    assert_eq!(test.run(handle.result()).await.unwrap(), None);
}

/// A body that leaves a task behind, which sends a heartbeat after the step is over.
fn beats(env: Arc<Mutex<Option<Env>>>, told: Arc<Mutex<Vec<bool>>>, way: u32) -> Workflow<(), ()> {
    let timeout = if way == 3 { 2 * SECOND } else { 1000 * SECOND };
    workflow("beats").timeout(timeout).run(move |ctx: Ctx, ()| {
        let (env, told) = (env.lock().clone().unwrap(), told.clone());
        async move {
            let (env, told) = (&env, &told);
            let works = async move |ctx: Ctx| {
                let step = ctx.run_with("works", async |attempt: Attempt| {
                    let (env, told) = (env.clone(), told.clone());
                    tokio::spawn(async move {
                        env.sleep(5 * SECOND).await;
                        let is_error = attempt.heartbeat(&"dead").await.is_err();
                        told.lock().push(is_error);
                    });
                    std::future::pending::<Result<(), Failure>>().await
                });
                if way == 0 { step.timeout(2 * SECOND).retry(Retry::never()).await } else { step.await }
            };
            match way {
                1 => drop(ctx.select((works, async |ctx: Ctx| ctx.sleep(2 * SECOND).await)).await),
                _ => drop(works(ctx.clone()).await),
            }
            ctx.shielded()
                .run("idle", async || {
                    env.sleep(10 * SECOND).await;
                    Ok(())
                })
                .await
        }
    })
}

/// The attempt took too long, its branch lost, the execution was terminated, timed out or was cancelled, or the engine
/// was stopped.
#[tokio::test]
async fn a_heartbeat_of_an_attempt_that_was_given_up_is_an_error() {
    for way in 0..6 {
        let (env, told) = (Arc::default(), Arc::default());
        let beats = beats(Arc::clone(&env), Arc::clone(&told), way);
        let test = TestEngine::new(&beats, 1).await.unwrap();
        *env.lock() = Some(test.env().clone());
        test.engine().start(&beats, ()).id("b").await.unwrap();
        test.run(test.env().sleep(2 * SECOND)).await;
        match way {
            2 => test.engine().terminate("b", "enough").await.unwrap(),
            4 => test.run(test.engine().cancel("b", "enough")).await.unwrap(),
            5 => test.engine().stop(),
            _ => {}
        }
        test.run(test.env().sleep(60 * SECOND)).await;
        assert_eq!(*told.lock(), [true], "way {way}");
    }
}
