//! The runtime that a container's lane works on, and changes under a lock's token.

use std::task::Poll;
use std::time::Duration;

use latchwork::lock::Locks;
use latchwork::state::{StateError, States};
use latchwork::store::{ErrorKind, Store};
use latchwork::workflow::{Ctx, Engine, workflow};

fn single_threaded() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

/// The runtime of a slot's first caller stops: an execution that uses the slot still continues.
#[test]
fn a_slot_is_served_though_the_runtime_of_its_first_caller_has_stopped() {
    let home = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let counts =
        workflow("counts").run(async |ctx: Ctx, ()| Ok(ctx.state().global::<u64>("n").increment(1).await?.value));
    let engine =
        home.block_on(async { Engine::on(&Store::memory().await.unwrap()).register(&counts).start().await.unwrap() });
    let still = single_threaded();
    let slot = engine.states().global().slot::<u64>("n");
    let mut first = Box::pin(slot.increment(1));
    let polled = still.block_on(std::future::poll_fn(|context| Poll::Ready(first.as_mut().poll(context))));
    let counted = home.block_on(async {
        let handle = engine.start(&counts, ()).await.unwrap();
        tokio::time::timeout(Duration::from_secs(60), handle.result()).await.expect("it hangs").unwrap()
    });
    assert_eq!(counted, 2);
    // The lane may have finished before the first poll.
    let changed = match polled {
        Poll::Ready(changed) => changed,
        Poll::Pending => still.block_on(first),
    };
    assert_eq!(changed.unwrap().value, 1);
}

/// The runtime that states were opened on has ended: the lane works on the caller's runtime.
#[test]
fn states_outlive_the_runtime_that_they_were_opened_on() {
    let first = single_threaded();
    let states = first.block_on(async { States::on(&Store::memory().await.unwrap()).await.unwrap() });
    drop(first);
    for container in [states.session("s"), states.sequencer("q")] {
        let twice = async {
            container.inc_state("n", 1).await.unwrap();
            let mutated = container.atomic_state(|state| async move { Ok::<_, ()>(state) }).await.unwrap();
            assert!(!mutated.changed);
        };
        single_threaded().block_on(twice);
    }
}

/// A change under the token of a lock lands while the lock is held, and never afterwards.
#[tokio::test]
async fn a_change_under_a_token_is_refused_once_the_lock_is_released() {
    let store = Store::memory().await.unwrap();
    let (locks, states) = (Locks::on(&store).await.unwrap(), States::on(&store).await.unwrap());
    let guard = locks.mutex("m").acquire().await.unwrap();
    let slot = states.global().slot::<u64>("n");
    let guarded = slot.clone().guard(guard.token());
    let session = states.session("s").guard(guard.token());
    assert_eq!(guarded.increment(1).await.unwrap().value, 1);
    session.inc_state("n", 1).await.unwrap();
    let number = guard.token().number();
    guard.release().await.unwrap();
    for refused in [guarded.increment(1).await.map(drop), session.inc_state("n", 1).await.map(drop)] {
        let error = refused.unwrap_err();
        assert!(matches!(error, StateError::Fenced { .. }), "{error}");
        assert!(error.to_string().ends_with(&format!("lock \"m\" is not held under token {number}")), "{error}");
        assert_eq!(error.kind(), ErrorKind::Conflict);
    }
    // Changes without a token that share the commit are not refused with it.
    let (with, without) = tokio::join!(guarded.increment(1), slot.increment(1));
    assert!(with.is_err());
    assert_eq!(without.unwrap().value, 2);
    let memory = states.sequencer("q").guard(locks.mutex("m").acquire().await.unwrap().token());
    assert!(matches!(memory.inc_state("n", 1).await.unwrap_err(), StateError::Unguardable { .. }));
}
