//! Threads and runtimes: an engine works on the runtime where it was started, whichever thread calls it.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use latchwork::lock::LockError;
use latchwork::store::{ErrorKind, Store};
use latchwork::testing::{Side, TestEngine};
use latchwork::workflow::{Ctx, Engine, Workflow, WorkflowError, workflow};
use tokio::sync::{Notify, oneshot};

use crate::lock::letting_go::within_an_hour;
use crate::lock::turnstile::{Stage, tokens};

/// Runs a closure on a thread without a runtime, and waits until it is done.
async fn on_a_plain_thread<T: Send + 'static>(what: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, is_done) = oneshot::channel();
    std::thread::spawn(move || done.send(what()).ok());
    is_done.await.unwrap()
}

/// Runs a future on this thread, without a runtime.
fn polled<T>(future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    loop {
        if let Poll::Ready(done) = future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            return done;
        }
        std::thread::yield_now();
    }
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

fn nothing() -> Workflow<(), ()> {
    workflow("nothing").run(async |_: Ctx, ()| Ok(()))
}

/// Another request waits, so the session that both share does not end by itself.
#[tokio::test]
async fn a_guard_that_is_dropped_on_a_plain_thread_is_released() {
    let test = TestEngine::new(&nothing(), 1).await.unwrap();
    let held = test.engine().mutex("m").acquire().await.unwrap();
    let mutex = test.engine().mutex("m");
    let next = tokio::spawn(async move { mutex.acquire().await });
    on_a_plain_thread(move || drop(held)).await;
    let next = within_an_hour(&test, next).await.unwrap().unwrap();
    let session = test.engine().locks().session().await.unwrap();
    let other = test.engine().mutex("other").by(&session).acquire().await.unwrap();
    // The last handle of the session is dropped with the guard.
    on_a_plain_thread(move || drop((other, session))).await;
    drop(within_an_hour(&test, test.engine().mutex("other").acquire()).await.unwrap());
    assert!(next.release().await.unwrap());
}

/// A caller that gives up has begun a commit that other callers share.
#[tokio::test]
async fn a_call_that_is_given_up_on_a_plain_thread_leaves_no_other_call_behind() {
    let stage = Stage::new(|builder| builder).await;
    // From here on there is a session.
    assert!(stage.engine.mutex("m").acquire().await.unwrap().release().await.unwrap());
    stage.hold(Side::Before);
    let mutex = stage.engine.mutex("m");
    let mut first = Box::pin(async move { mutex.acquire().await });
    assert!(first.as_mut().poll(&mut Context::from_waker(Waker::noop())).is_pending());
    let mutex = stage.engine.mutex("m");
    let second = stage.begins(async move { mutex.acquire().await }).await;
    on_a_plain_thread(move || drop(first)).await;
    stage.open();
    let second = stage.done(second).await.unwrap();
    assert_eq!(tokens(&stage.state("m").await), (vec![second.token().number()], vec![]));
}

#[tokio::test]
async fn an_execution_outlives_the_runtime_of_its_caller() {
    let goes_on = Arc::new(Notify::new());
    let waits = workflow("waits").run({
        let goes_on = goes_on.clone();
        move |ctx: Ctx, ()| {
            let goes_on = goes_on.clone();
            async move {
                let body = || async {
                    goes_on.notified().await;
                    Ok(7)
                };
                ctx.run("wait", body).await
            }
        }
    });
    let test = TestEngine::new(&waits, 1).await.unwrap();
    let engine = test.engine().clone();
    let handle = on_a_plain_thread(move || runtime().block_on(async { engine.start(&waits, ()).await.unwrap() })).await;
    goes_on.notify_one();
    assert_eq!(within_an_hour(&test, handle.result()).await.unwrap(), 7);
}

/// Calls from a thread without a runtime are served as well.
#[tokio::test(flavor = "multi_thread", worker_threads = 1)]
async fn a_caller_without_a_runtime_is_served() {
    let store = Store::memory().await.unwrap();
    let adds = workflow("adds").run(async |ctx: Ctx, number: u32| {
        let more: u32 = ctx.receive("more").await?;
        Ok(number + more)
    });
    let engine = Engine::on(&store).register(&adds).start().await.unwrap();
    let sum = on_a_plain_thread(move || {
        let guard = polled(engine.mutex("m").acquire()).unwrap();
        let handle = polled(engine.start(&adds, 1).into_future()).unwrap();
        polled(handle.signal("more", &2).into_future()).unwrap();
        assert!(polled(guard.release()).unwrap());
        polled(handle.result()).unwrap()
    });
    assert_eq!(sum.await, 3);
}

#[test]
fn an_engine_ends_with_its_runtime_and_does_not_start_without_one() {
    let nothing = nothing();
    let store = polled(Store::memory()).unwrap();
    let refused = polled(Engine::on(&store).register(&nothing).start()).unwrap_err();
    assert!(matches!(refused, WorkflowError::NoRuntime), "{refused}");
    assert_eq!(refused.kind(), ErrorKind::Invalid);
    let first = runtime();
    let engine = first.block_on(Engine::on(&store).register(&nothing).start()).unwrap();
    drop(first);
    let second = runtime();
    let started = second.block_on(async { engine.start(&nothing, ()).await.map(drop) });
    assert!(matches!(started, Err(WorkflowError::Stopped)), "{started:?}");
    let locked = second.block_on(async { engine.mutex("m").acquire().await.map(drop) });
    assert!(matches!(locked, Err(LockError::Stopped)), "{locked:?}");
    let engine = second.block_on(Engine::on(&store).register(&nothing).start()).unwrap();
    second.block_on(async { engine.start(&nothing, ()).await.unwrap().result().await.unwrap() });
}
