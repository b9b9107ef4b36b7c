//! Callers that give up in the middle, or are not polled for a while: the engine completes what they have begun, and no
//! other caller waits for them.

use std::pin::Pin;
use std::task::{Context, Waker};
use std::time::Duration;

use latchwork::testing::Side;
use latchwork::workflow::{Ctx, Engine, ExecutionState, Workflow, workflow};

use crate::lock::turnstile::{Stage, tokens};

const SECOND: Duration = Duration::from_secs(1);

type Call = Pin<Box<dyn Future<Output = ()> + Send>>;

/// Receives a signal, or waits for a completion, or acquires a lock, as the input says. Returns what it received.
fn waits() -> Workflow<String, String> {
    workflow("waits").run(async |ctx: Ctx, what: String| match &*what {
        "signal" => ctx.receive::<String>("s").await,
        "completion" => {
            let completion = ctx.completion::<String>("c").await;
            ctx.publish("token", &completion.token()).await?;
            completion.wait().await
        }
        "lock" => {
            let _guard = ctx.mutex("m").acquire().await?;
            ctx.receive::<String>("s").await
        }
        _ => {
            ctx.run("tells", async || Ok(())).await?;
            ctx.receive::<String>("s").timeout(SECOND).await.map(|_| "done".into())
        }
    })
}

/// Begins a call that commits to a space, and drops it after the commit has landed, or right before.
async fn give_up(stage: &Stage, space: &str, side: Side, call: impl FnOnce(Engine) -> Call) {
    stage.hold_to(space, side).await;
    let mut call = call(stage.engine.clone());
    for _ in 0..20 {
        let _ = call.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        stage.turns().await;
    }
    drop(call);
    stage.open();
    stage.pass(SECOND).await;
}

async fn ended(stage: &Stage, id: &str) -> ExecutionState {
    for _ in 0..3 {
        stage.pass(5 * SECOND).await;
    }
    stage.engine.why(id).await.unwrap().state
}

fn completed(text: &str) -> ExecutionState {
    ExecutionState::Completed(text.into())
}

/// The receiver is out of memory, so the engine must load it though the sender is gone.
#[tokio::test]
async fn a_message_is_received_though_its_sender_has_given_up() {
    for side in [Side::Before, Side::After] {
        let waits = waits();
        let stage = Stage::new(|builder| builder.register(&waits)).await;
        for what in ["signal", "completion", "cancel"] {
            let input = what.replace("cancel", "signal");
            stage.engine.start(&waits, input).id(what).await.unwrap();
        }
        stage.pass(5 * SECOND).await;
        assert_eq!(stage.engine.residents(), 0);
        let signal =
            |engine: Engine| -> Call { Box::pin(async move { engine.signal("signal", "s", &"hello").await.unwrap() }) };
        give_up(&stage, "workflow.kept", side, signal).await;
        assert_eq!(ended(&stage, "signal").await, completed("hello"), "{side:?}");
        let token: String = stage.engine.query("completion", "token").await.unwrap().unwrap();
        let complete =
            |engine: Engine| -> Call { Box::pin(async move { engine.complete(&token, &"there").await.unwrap() }) };
        give_up(&stage, "workflow.kept", side, complete).await;
        assert_eq!(ended(&stage, "completion").await, completed("there"), "{side:?}");
        let cancel =
            |engine: Engine| -> Call { Box::pin(async move { engine.cancel("cancel", "enough").await.unwrap() }) };
        give_up(&stage, "workflow.executions", side, cancel).await;
        assert_eq!(ended(&stage, "cancel").await, ExecutionState::Cancelled("enough".into()), "{side:?}");
    }
}

#[tokio::test]
async fn starts_and_ends_are_completed_though_the_caller_has_given_up() {
    for side in [Side::Before, Side::After] {
        let waits = waits();
        let stage = Stage::new(|builder| builder.register(&waits)).await;
        let (with, later) = (waits.clone(), waits.clone());
        let signals = move |engine: Engine| -> Call {
            Box::pin(async move {
                engine.start(&with, "signal".into()).id("with").signal("s", &"first").await.unwrap();
            })
        };
        give_up(&stage, "workflow.kept", side, signals).await;
        assert_eq!(ended(&stage, "with").await, completed("first"), "{side:?}");
        let delays = move |engine: Engine| -> Call {
            Box::pin(async move {
                engine.start(&later, "".into()).id("later").delay(2 * SECOND).await.unwrap();
            })
        };
        give_up(&stage, "workflow.executions", side, delays).await;
        assert_eq!(ended(&stage, "later").await, completed("done"), "{side:?}");
        let forks = move |engine: Engine| -> Call {
            Box::pin(async move {
                engine.fork("later").at_step("tells").id("forked").await.unwrap();
            })
        };
        give_up(&stage, "workflow.executions", side, forks).await;
        assert_eq!(ended(&stage, "forked").await, completed("done"), "{side:?}");
        // Two executions request one lock; the holder is terminated.
        for id in ["holds", "next"] {
            stage.engine.start(&waits, "lock".into()).id(id).await.unwrap();
            stage.pass(5 * SECOND).await;
        }
        let terminates =
            |engine: Engine| -> Call { Box::pin(async move { engine.terminate("holds", "enough").await.unwrap() }) };
        give_up(&stage, "workflow.executions", side, terminates).await;
        stage.engine.signal("next", "s", &"mine").await.unwrap();
        assert_eq!(ended(&stage, "next").await, completed("mine"), "{side:?}");
    }
}

/// A caller terminates an execution that is out of memory and holds a lock. The caller then gives up, or is not polled
/// any more. Callers that wait for the execution's end still get it, and the lock is free.
#[tokio::test]
async fn a_caller_that_gives_up_its_terminate_delays_no_other_caller() {
    for (side, drops) in [(Side::Before, true), (Side::After, true), (Side::Before, false), (Side::After, false)] {
        let waits = waits();
        let stage = Stage::new(|builder| builder.register(&waits)).await;
        let handle = stage.engine.start(&waits, "lock".into()).id("x").await.unwrap();
        stage.pass(5 * SECOND).await;
        assert_eq!(stage.engine.residents(), 0);
        let result = tokio::spawn(async move { handle.result().await.is_err() });
        stage.turns().await;
        stage.hold_to("workflow.executions", side).await;
        let engine = stage.engine.clone();
        let mut call: Call = Box::pin(async move { engine.terminate("x", "enough").await.unwrap() });
        for _ in 0..20 {
            let _ = call.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            stage.turns().await;
        }
        let call = (!drops).then_some(call);
        stage.open();
        stage.pass(SECOND).await;
        assert!(stage.done(result).await, "{side:?}");
        let mutex = stage.engine.mutex("m");
        let other = stage.begins(async move { mutex.try_acquire().await.unwrap().is_some() }).await;
        assert!(stage.done(other).await, "{side:?}");
        drop(call);
    }
}

/// A caller has begun to acquire a lock, and is not polled while it does something else.
#[tokio::test]
async fn a_caller_that_is_not_polled_keeps_no_other_from_a_lock() {
    for has_session in [true, false] {
        let stage = Stage::new(|builder| builder).await;
        match has_session {
            true => stage.hold(Side::Before),
            false => stage.hold_to("lock.sessions", Side::Before).await,
        }
        if has_session {
            let session = stage.engine.semaphore("other", 2);
            stage.open_next();
            drop(stage.begins(async move { session.acquire().await }).await);
            stage.hold(Side::Before);
        }
        let permits = stage.engine.semaphore("s", 2);
        let mut first = Box::pin(async move { permits.acquire().await });
        assert!(first.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
        stage.turns().await;
        let permits = stage.engine.semaphore("s", 2);
        let second = stage.begins(async move { permits.acquire().await }).await;
        stage.open();
        stage.pass(SECOND).await;
        let second = stage.done(second).await.unwrap();
        let first = first.await.unwrap();
        let mut both = vec![first.token().number(), second.token().number()];
        both.sort();
        assert_eq!(tokens(&stage.state("s").await), (both, vec![]));
    }
}

#[tokio::test]
async fn a_caller_that_is_not_polled_keeps_no_other_from_sending() {
    let waits = waits();
    let stage = Stage::new(|builder| builder.register(&waits)).await;
    stage.engine.start(&waits, "signal".into()).id("x").await.unwrap();
    stage.pass(SECOND / 10).await;
    stage.hold_to("workflow.kept", Side::Before).await;
    let engine = stage.engine.clone();
    let mut first = Box::pin(async move { engine.signal("x", "other", &"a").await });
    assert!(first.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    let engine = stage.engine.clone();
    let second = stage.begins(async move { engine.signal("x", "s", &"b").await }).await;
    stage.open();
    stage.pass(SECOND).await;
    stage.done(second).await.unwrap();
    first.await.unwrap();
    assert_eq!(ended(&stage, "x").await, completed("b"));
}

/// The request has landed and its answer is lost. Then the caller gives up.
#[tokio::test]
async fn a_request_whose_answer_is_lost_is_withdrawn_with_its_caller() {
    let stage = Stage::new(|builder| builder).await;
    let kept = stage.engine.mutex("kept").acquire().await.unwrap();
    stage.lose_answer();
    let mutex = stage.engine.mutex("m");
    let first = tokio::spawn(async move { mutex.acquire().await });
    stage.turns().await;
    first.abort();
    stage.pass(10 * SECOND).await;
    assert_eq!(tokens(&stage.state("m").await), (vec![], vec![]));
    assert!(kept.release().await.unwrap());
}

/// An engine that was stopped begins nothing, because new work would keep the store open.
#[tokio::test]
async fn a_lock_of_a_dropped_engine_cannot_be_acquired() {
    let directory = tempfile::tempdir().unwrap();
    for _ in 0..2 {
        let engine = Engine::open(directory.path()).start().await.unwrap();
        let mutex = engine.mutex("m");
        drop(engine);
        mutex.acquire().await.unwrap_err();
        drop(mutex);
        // Lets the engine's remaining tasks end.
        for _ in 0..100 {
            tokio::task::yield_now().await;
        }
    }
}
