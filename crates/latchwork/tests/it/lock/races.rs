//! Two things at the very same moment: a waiter gives up while it is granted the lock, another process is faster, or a
//! grant goes to an owner that no longer exists.

use std::task::Poll;
use std::time::Duration;

use latchwork::lock::{LockError, LockGuard, LockRefused, Owner, Result};
use latchwork::store::Commit;
use latchwork::testing::Side;
use latchwork::workflow::{Ctx, Workflow, WorkflowError, workflow};
use tokio::task::JoinHandle;

use super::turnstile::{Stage, tokens};

const LIMIT: Duration = Duration::from_secs(60);
const HOUR: Duration = Duration::from_secs(3600);
const SIDES: [Side; 2] = [Side::Before, Side::After];

/// A held mutex, a request that waits for it with a time limit, and the ticket of that request.
type Contended = (LockGuard, JoinHandle<Result<Option<LockGuard>>>, u64);

async fn contended(stage: &Stage) -> Contended {
    let mutex = stage.engine.mutex("m");
    let held = mutex.acquire().await.unwrap();
    let waits = stage.begins(async move { mutex.acquire_within(LIMIT).await }).await;
    let (holders, waiters) = tokens(&stage.state("m").await);
    assert_eq!((holders, waiters.len()), (vec![held.token().number()], 1));
    (held, waits, waiters[0])
}

async fn acquired(stage: &Stage, lock: latchwork::lock::Lock) -> JoinHandle<Result<LockGuard>> {
    stage.begins(async move { lock.acquire().await }).await
}

#[tokio::test]
async fn a_caller_whose_time_is_up_while_it_is_granted_the_lock_holds_it() {
    for side in SIDES {
        let stage = Stage::new(|builder| builder).await;
        let (held, waits, ticket) = contended(&stage).await;
        stage.hold(side);
        let released = stage.begins(held.release()).await;
        // The caller's time is up, but its withdrawal waits behind the commit of the release.
        stage.pass(LIMIT).await;
        assert!(!waits.is_finished());
        stage.open();
        assert!(stage.done(released).await.unwrap());
        let guard = stage.done(waits).await.unwrap().expect("it was granted the lock in time");
        assert_eq!(guard.token().number(), ticket);
        assert_eq!(tokens(&stage.state("m").await), (vec![ticket], vec![]));
        assert!(!guard.is_lost());
        assert!(guard.release().await.unwrap());
        assert_eq!(tokens(&stage.state("m").await), (vec![], vec![]));
    }
}

/// The release and the withdrawal share a commit, in either order.
#[tokio::test]
async fn a_release_and_a_withdrawal_in_one_commit_come_one_after_the_other() {
    for is_released_first in [true, false] {
        let stage = Stage::new(|builder| builder).await;
        let (held, waits, ticket) = contended(&stage).await;
        // Another commit is on its way, so that the two come together.
        stage.hold(Side::Before);
        let next = acquired(&stage, stage.engine.mutex("m")).await;
        let released = if is_released_first {
            let released = stage.begins(held.release()).await;
            stage.pass(LIMIT).await;
            released
        } else {
            stage.pass(LIMIT).await;
            stage.begins(held.release()).await
        };
        assert!(!waits.is_finished() && !released.is_finished() && !next.is_finished());
        stage.open();
        assert!(stage.done(released).await.unwrap());
        let guard = stage.done(waits).await.unwrap();
        assert_eq!(guard.as_ref().map(|guard| guard.token().number()), is_released_first.then_some(ticket));
        if let Some(guard) = guard {
            assert!(!next.is_finished());
            assert_eq!(tokens(&stage.state("m").await).0, [ticket]);
            assert!(guard.release().await.unwrap());
        }
        let next = stage.done(next).await.unwrap();
        assert_eq!(tokens(&stage.state("m").await), (vec![next.token().number()], vec![]));
    }
}

#[tokio::test]
async fn a_caller_whose_time_is_up_while_an_operator_removes_its_request_gets_that_error() {
    for side in SIDES {
        let stage = Stage::new(|builder| builder).await;
        let (held, waits, ticket) = contended(&stage).await;
        stage.hold(side);
        let locks = stage.engine.locks();
        let forced = stage.begins(async move { locks.force_release("m", ticket, "enough").await }).await;
        stage.pass(LIMIT).await;
        assert!(!waits.is_finished());
        stage.open();
        stage.done(forced).await.unwrap();
        let told = stage.done(waits).await.unwrap_err();
        assert!(matches!(told, LockError::Refused(LockRefused::Forced { .. })), "{told}");
        assert_eq!(tokens(&stage.state("m").await), (vec![held.token().number()], vec![]));
    }
}

/// A session gets an error. An execution has a token that is refused, as with a forced release after the grant.
#[tokio::test]
async fn a_request_granted_and_forced_in_one_commit_does_not_hold_the_lock() {
    for is_execution in [false, true] {
        let patient = patient();
        let stage = Stage::new(|builder| builder.register(&patient)).await;
        let mutex = stage.engine.mutex("m");
        let held = mutex.acquire().await.unwrap();
        let waits = if is_execution {
            stage.engine.start(&patient, ()).id("p").await.unwrap();
            stage.pass(Duration::from_secs(1)).await;
            None
        } else {
            Some(acquired(&stage, mutex.clone()).await)
        };
        let ticket = tokens(&stage.state("m").await).1[0];
        stage.hold(Side::Before);
        let next = acquired(&stage, mutex).await;
        let released = stage.begins(held.release()).await;
        let locks = stage.engine.locks();
        let forced = stage.begins(async move { locks.force_release("m", ticket, "enough").await }).await;
        stage.open();
        assert!(stage.done(released).await.unwrap());
        stage.done(forced).await.unwrap();
        if let Some(waits) = waits {
            let told = stage.done(waits).await.unwrap_err();
            assert!(matches!(told, LockError::Refused(LockRefused::Forced { .. })), "{told}");
        }
        let next = stage.done(next).await.unwrap();
        let state = stage.state("m").await;
        assert_eq!(tokens(&state), (vec![next.token().number()], vec![]));
        assert_eq!((state.forced[0].token, state.forced[0].was_held), (ticket, true));
    }
}

/// It also makes room for the requests behind it.
#[tokio::test]
async fn a_caller_that_gives_up_leaves_the_queue() {
    let stage = Stage::new(|builder| builder).await;
    let semaphore = stage.engine.semaphore("s", 3);
    let two = semaphore.acquire_many(2).await.unwrap();
    let all = stage.begins(semaphore.acquire_many_within(3, LIMIT)).await;
    let one = acquired(&stage, semaphore).await;
    let ticket = tokens(&stage.state("s").await).1[1];
    assert!(!one.is_finished());
    stage.pass(LIMIT).await;
    assert!(stage.done(all).await.unwrap().is_none());
    let one = stage.done(one).await.unwrap();
    assert_eq!(tokens(&stage.state("s").await), (vec![two.token().number(), ticket], vec![]));
    assert_eq!(one.token().number(), ticket);
}

/// Returns the token if the lock was granted, an hour later.
fn patient() -> Workflow<(), Option<u64>> {
    workflow("patient").run(async |ctx: Ctx, ()| {
        let guard = ctx.mutex("m").acquire_within(LIMIT).await?;
        ctx.sleep(HOUR).await?;
        Ok(guard.map(|guard| guard.token().number()))
    })
}

#[tokio::test]
async fn an_execution_whose_time_is_up_while_it_is_granted_the_lock_holds_it() {
    for side in SIDES {
        let patient = patient();
        let stage = Stage::new(|builder| builder.register(&patient)).await;
        let held = stage.engine.mutex("m").acquire().await.unwrap();
        let handle = stage.engine.start(&patient, ()).id("p").await.unwrap();
        stage.pass(Duration::from_secs(1)).await;
        let ticket = tokens(&stage.state("m").await).1[0];
        stage.hold(side);
        let released = stage.begins(held.release()).await;
        stage.pass(LIMIT).await;
        stage.open();
        assert!(stage.done(released).await.unwrap());
        assert_eq!(tokens(&stage.state("m").await), (vec![ticket], vec![]));
        stage.pass(2 * HOUR).await;
        let result = stage.begins(async move { handle.result().await }).await;
        assert_eq!(stage.done(result).await.unwrap(), Some(ticket));
        assert_eq!(tokens(&stage.state("m").await), (vec![], vec![]));
    }
}

#[tokio::test]
async fn an_execution_that_gives_up_leaves_the_queue() {
    let patient = patient();
    let stage = Stage::new(|builder| builder.register(&patient)).await;
    let held = stage.engine.mutex("m").acquire().await.unwrap();
    let handle = stage.engine.start(&patient, ()).id("p").await.unwrap();
    stage.pass(Duration::from_secs(1)).await;
    let next = acquired(&stage, stage.engine.mutex("m")).await;
    let (holders, waiters) = tokens(&stage.state("m").await);
    stage.pass(LIMIT).await;
    assert_eq!(tokens(&stage.state("m").await), (holders, vec![waiters[1]]));
    assert!(held.release().await.unwrap());
    assert_eq!(stage.done(next).await.unwrap().token().number(), waiters[1]);
    stage.pass(2 * HOUR).await;
    let result = stage.begins(async move { handle.result().await }).await;
    assert_eq!(stage.done(result).await.unwrap(), None);
}

#[tokio::test]
async fn an_execution_cancelled_while_it_is_granted_the_lock_releases_it() {
    for side in SIDES {
        let patient = patient();
        let stage = Stage::new(|builder| builder.register(&patient)).await;
        let held = stage.engine.mutex("m").acquire().await.unwrap();
        let handle = stage.engine.start(&patient, ()).id("p").await.unwrap();
        stage.pass(Duration::from_secs(1)).await;
        let next = acquired(&stage, stage.engine.mutex("m")).await;
        let ticket = tokens(&stage.state("m").await).1[1];
        stage.hold(side);
        let released = stage.begins(held.release()).await;
        stage.engine.cancel("p", "enough").await.unwrap();
        stage.pass(Duration::from_secs(1)).await;
        stage.open();
        assert!(stage.done(released).await.unwrap());
        let result = stage.begins(async move { handle.result().await }).await;
        let told = stage.done(result).await.unwrap_err();
        assert!(matches!(told, WorkflowError::Cancelled { .. }), "{told}");
        assert_eq!(stage.done(next).await.unwrap().token().number(), ticket);
        assert_eq!(tokens(&stage.state("m").await), (vec![ticket], vec![]));
    }
}

/// What an engine remembers about a lock is out of date: another engine has acquired the lock, or has released it.
#[tokio::test]
async fn another_process_that_was_faster_is_not_overlooked() {
    let stage = Stage::new(|builder| builder).await;
    let other = stage.second().await;
    let (first, second) = (stage.engine.mutex("m"), other.mutex("m"));
    let mut last = 0;
    let mut check = |guard: &LockGuard| {
        assert!(guard.token().number() > last);
        last = guard.token().number();
    };
    for _ in 0..3 {
        for (one, other) in [(&first, &second), (&second, &first)] {
            // This engine remembers that the lock was held, and reads it again before it waits.
            let guard = stage.done(acquired(&stage, one.clone()).await).await.unwrap();
            check(&guard);
            // The other engine remembers that the lock was free.
            assert!(other.try_acquire().await.unwrap().is_none(), "two hold the lock");
            assert_eq!(tokens(&stage.state("m").await), (vec![guard.token().number()], vec![]));
            assert!(guard.release().await.unwrap());
            assert_eq!(tokens(&stage.state("m").await), (vec![], vec![]));
        }
    }
}

/// Both engines have read that the lock is free, and one commits first. The lock may be new or used before.
#[tokio::test]
async fn another_process_that_is_faster_while_a_commit_is_on_its_way_has_the_lock() {
    for is_new in [true, false] {
        let stage = Stage::new(|builder| builder).await;
        let other = stage.second().await;
        let (first, second) = (stage.engine.mutex("m"), other.mutex("m"));
        if !is_new {
            first.acquire().await.unwrap().release().await.unwrap();
        }
        stage.hold(Side::Before);
        let late = stage.begins(async move { first.try_acquire().await }).await;
        let guard = second.try_acquire().await.unwrap().expect("it is free");
        stage.open();
        assert!(stage.done(late).await.unwrap().is_none(), "two hold the lock");
        assert_eq!(tokens(&stage.state("m").await), (vec![guard.token().number()], vec![]));
    }
}

/// A release grants the lock to the first waiter of a queue that another process has added to.
#[tokio::test]
async fn waiters_of_another_process_keep_their_positions() {
    let stage = Stage::new(|builder| builder).await;
    let other = stage.second().await;
    let (first, second) = (stage.engine.mutex("m"), other.mutex("m"));
    let held = first.acquire().await.unwrap();
    let near = acquired(&stage, first).await;
    let far = acquired(&stage, second).await;
    let waiters = tokens(&stage.state("m").await).1;
    assert_eq!(waiters.len(), 2);
    assert!(held.release().await.unwrap());
    let near = stage.done(near).await.unwrap();
    assert_eq!(near.token().number(), waiters[0]);
    assert_eq!(tokens(&stage.state("m").await), (vec![waiters[0]], vec![waiters[1]]));
    assert!(near.release().await.unwrap());
    assert_eq!(tokens(&stage.state("m").await), (vec![waiters[1]], vec![]));
    assert!(!far.is_finished(), "a waiter of another process is not notified by this process");
}

/// A session has ended and its requests are not removed yet, when another holder releases the lock. The grant goes past
/// that session.
#[tokio::test]
async fn a_session_that_has_ended_is_passed_over_by_the_grant() {
    let stage = Stage::new(|builder| builder).await;
    let held = stage.engine.mutex("m").acquire().await.unwrap();
    let dead = stage.engine.locks().session().lease(HOUR).renewed_by_hand().await.unwrap();
    let waits = acquired(&stage, stage.engine.mutex("m").by(&dead)).await;
    let alive = stage.engine.locks().session().lease(HOUR).renewed_by_hand().await.unwrap();
    let next = acquired(&stage, stage.engine.mutex("m").by(&alive)).await;
    let waiters = tokens(&stage.state("m").await).1;
    assert_eq!(waiters.len(), 2);
    // Another process has found the lease expired, and has not removed the session's requests yet.
    let session = stage.space("lock.sessions").await.key(dead.id().as_bytes());
    assert!(stage.engine.store().commit(Commit::new().delete(&session)).await.unwrap().is_applied());
    let released = stage.begins(held.release()).await;
    assert!(stage.done(released).await.unwrap());
    let state = stage.state("m").await;
    assert_eq!(tokens(&state), (vec![waiters[1]], vec![]));
    assert_eq!(state.holders[0].owner, Owner::Session(alive.id()));
    assert_eq!(stage.done(next).await.unwrap().token().number(), waiters[1]);
    let told = stage.done(waits).await.unwrap_err();
    assert!(matches!(told, LockError::SessionLost { .. }), "{told}");
}

/// An execution without a record gets nothing; an execution that is alive gets the lock it waits for.
#[tokio::test]
async fn an_execution_without_a_record_is_passed_over_by_the_grant() {
    let patient = patient();
    let stage = Stage::new(|builder| builder.register(&patient)).await;
    let held = stage.engine.mutex("m").acquire().await.unwrap();
    for id in ["dead", "alive"] {
        stage.engine.start(&patient, ()).id(id).await.unwrap();
        stage.pass(Duration::from_secs(1)).await;
    }
    let next = acquired(&stage, stage.engine.mutex("m")).await;
    assert_eq!(stage.engine.residents(), 0);
    let waiters = tokens(&stage.state("m").await).1;
    assert_eq!(waiters.len(), 3);
    let record = stage.space("workflow.executions").await.key("dead");
    assert!(stage.engine.store().commit(Commit::new().delete(&record)).await.unwrap().is_applied());
    let released = stage.begins(held.release()).await;
    assert!(stage.done(released).await.unwrap());
    let state = stage.state("m").await;
    assert_eq!(tokens(&state), (vec![waiters[1]], vec![waiters[2]]));
    assert_eq!(state.holders[0].owner, Owner::Execution("alive".into()));
    stage.pass(2 * HOUR).await;
    assert_eq!(stage.done(next).await.unwrap().token().number(), waiters[2]);
}

/// L8: the store fails at the very moment of the search for a cycle. The cycle is found when the store answers again.
#[tokio::test]
async fn l8_a_store_that_does_not_answer_hides_no_cycle() {
    let wants = workflow("wants").run(async |ctx: Ctx, ()| ctx.mutex("m").acquire().await.map(drop));
    let holds = workflow("holds").run({
        let wants = wants.clone();
        move |ctx: Ctx, ()| {
            let wants = wants.clone();
            async move {
                let _held = ctx.mutex("m").acquire().await?;
                let child = ctx.child(&wants, ()).id("child").start().await?;
                ctx.sleep(LIMIT).await?;
                child.result().await
            }
        }
    });
    let stage = Stage::new(|builder| builder.register(&wants).register(&holds)).await;
    let handle = stage.engine.start(&holds, ()).await.unwrap();
    let result = stage.begins(async move { handle.result().await }).await;
    stage.pass(Duration::from_secs(10)).await;
    assert_eq!(stage.engine.residents(), 0);
    // The holder begins to wait for its child, whose record cannot be read.
    stage.break_off(Some(stage.space("workflow.executions").await.key("child")));
    stage.pass(LIMIT).await;
    assert!(!result.is_finished());
    stage.break_off(None);
    stage.pass(Duration::from_secs(1)).await;
    let told = stage.done(result).await.unwrap_err();
    assert!(told.to_string().contains("never end"), "{told}");
}

/// A caller has requested a lock and is not polled any more, as in the losing arm of a `select!`. The execution that
/// holds the lock still ends, and other requests are granted.
#[tokio::test]
async fn a_caller_that_is_not_polled_delays_no_end_and_no_other_caller() {
    for side in SIDES {
        let patient = patient();
        let stage = Stage::new(|builder| builder.register(&patient)).await;
        stage.engine.start(&patient, ()).id("p").await.unwrap();
        stage.pass(Duration::from_secs(1)).await;
        stage.hold(side);
        let mutex = stage.engine.mutex("m");
        let mut still = Box::pin(mutex.acquire());
        for _ in 0..20 {
            let is_pending = std::future::poll_fn(|context| Poll::Ready(still.as_mut().poll(context).is_pending()));
            assert!(is_pending.await);
            tokio::task::yield_now().await;
        }
        stage.open();
        let engine = stage.engine.clone();
        let ended = stage.begins(async move { engine.terminate("p", "enough").await }).await;
        stage.done(ended).await.unwrap();
        let other = acquired(&stage, stage.engine.mutex("other")).await;
        stage.done(other).await.unwrap().release().await.unwrap();
        assert!(still.await.unwrap().release().await.unwrap());
    }
}
