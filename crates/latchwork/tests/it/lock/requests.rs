//! Requests under an id that the caller chose: however often they are made, given up and made again, one caller holds
//! the lock.

use std::pin::Pin;
use std::task::Poll;
use std::time::Duration;

use latchwork::lock::{Lock, LockGuard};
use latchwork::store::Store;
use latchwork::workflow::Engine;

/// Runs a test in memory and on files.
macro_rules! on_both {
    ($($test:ident),* $(,)?) => {$(
        mod $test {
            #[tokio::test]
            async fn memory() {
                super::$test(super::Engine::on(&super::Store::memory().await.unwrap()).start().await.unwrap()).await;
            }

            #[tokio::test]
            async fn file() {
                let home = tempfile::tempdir().unwrap();
                super::$test(super::Engine::open(home.path()).start().await.unwrap()).await;
            }
        }
    )*};
}

on_both! {
    a_granted_request_that_was_dropped_and_is_made_again_is_held,
    a_guard_that_was_dropped_and_a_request_that_is_made_again_do_not_cross,
    a_dropped_guard_gives_way_to_the_queue_before_the_same_request_is_granted_again,
}

async fn waiting(engine: &Engine, count: u64) {
    while engine.locks().inspect("m").await.unwrap().waiting != count {
        tokio::task::yield_now().await;
    }
}

/// Polls once.
async fn is_pending<F: Future>(future: &mut Pin<Box<F>>) -> bool {
    std::future::poll_fn(|context| Poll::Ready(future.as_mut().poll(context).is_pending())).await
}

/// Gives all calls that have begun the time to land, and then checks: the guard's lock is held.
async fn assert_held(engine: &Engine, guard: LockGuard) {
    engine.store().env().sleep(Duration::from_millis(30)).await;
    assert!(engine.mutex("m").try_acquire().await.unwrap().is_none(), "two callers are inside");
    assert!(!guard.is_lost());
    assert!(guard.release().await.unwrap());
}

/// The race: a queued caller is granted the lock and dropped before it is polled again; the same request is made again
/// while the first is being withdrawn.
async fn a_granted_request_that_was_dropped_and_is_made_again_is_held(engine: Engine) {
    for _ in 0..20 {
        let held = engine.mutex("m").acquire().await.unwrap();
        let lock: Lock = engine.mutex("m").request("r");
        let mut queued = Box::pin(lock.acquire());
        while engine.locks().inspect("m").await.unwrap().waiting == 0 {
            assert!(is_pending(&mut queued).await);
            tokio::task::yield_now().await;
        }
        held.release().await.unwrap();
        drop(queued);
        let guard = lock.acquire().await.unwrap();
        assert_held(&engine, guard).await;
    }
}

/// The race: a guard is dropped, which releases the lock a moment later; the same request is made again before that.
async fn a_guard_that_was_dropped_and_a_request_that_is_made_again_do_not_cross(engine: Engine) {
    for _ in 0..20 {
        let lock = engine.mutex("m").request("r");
        drop(lock.acquire().await.unwrap());
        let guard = lock.acquire().await.unwrap();
        assert_held(&engine, guard).await;
    }
}

/// The same with another caller in the queue, which came before the request that is made again.
async fn a_dropped_guard_gives_way_to_the_queue_before_the_same_request_is_granted_again(engine: Engine) {
    let lock = engine.mutex("m").request("r");
    let first = lock.acquire().await.unwrap();
    let before = first.token().number();
    let next = tokio::spawn({
        let lock = engine.mutex("m");
        async move { lock.acquire().await.unwrap() }
    });
    waiting(&engine, 1).await;
    drop(first);
    let again = tokio::spawn(async move { lock.acquire().await.unwrap() });
    let next = next.await.unwrap();
    waiting(&engine, 1).await;
    assert!(!again.is_finished());
    let between = next.token().number();
    next.release().await.unwrap();
    let again = again.await.unwrap();
    assert!(before < between && between < again.token().number());
    assert_held(&engine, again).await;
}
