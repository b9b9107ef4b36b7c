//! Locks of code outside of workflows: sessions, leases, tokens, and what operators see and do.

use std::task::{Context, Poll};
use std::time::Duration;

use latchwork::lock::{LockError, LockKind, LockList, LockName, LockRefused, LockScope, Locks, Owner};
use latchwork::store::{Commit, ErrorKind, Order, Outcome, SpaceSpec, Store};
use latchwork::testing::TestEngine;
use latchwork::workflow::{Ctx, Engine, workflow};

async fn engine() -> Engine {
    Engine::on(&Store::memory().await.unwrap()).start().await.unwrap()
}

#[tokio::test]
async fn a_mutex_has_one_holder_and_goes_to_the_next_in_the_queue() {
    let engine = engine().await;
    let mutex = engine.mutex("account-42");
    let first = mutex.acquire().await.unwrap();
    assert!(mutex.try_acquire().await.unwrap().is_none());
    let waits = tokio::spawn({
        let mutex = mutex.clone();
        async move { mutex.acquire().await.unwrap() }
    });
    while engine.locks().inspect("account-42").await.unwrap().waiters.is_empty() {
        tokio::task::yield_now().await;
    }
    let number = first.token().number();
    assert!(first.release().await.unwrap());
    let second = waits.await.unwrap();
    assert!(second.token().number() > number);
    // Dropping the guard releases the lock.
    drop(second);
    let third = mutex.acquire().await.unwrap();
    third.release().await.unwrap();
    let state = engine.locks().inspect("account-42").await.unwrap();
    assert!(state.holders.is_empty() && state.waiters.is_empty());
}

#[tokio::test]
async fn permits_are_counted_and_no_request_is_overtaken() {
    let engine = engine().await;
    let semaphore = engine.semaphore("vendor", 3);
    let two = semaphore.acquire_many(2).await.unwrap();
    let one = semaphore.acquire().await.unwrap();
    let many = tokio::spawn({
        let semaphore = semaphore.clone();
        async move { semaphore.acquire_many(3).await.unwrap() }
    });
    while engine.locks().inspect("vendor").await.unwrap().waiters.is_empty() {
        tokio::task::yield_now().await;
    }
    // One permit is free, but the first request in the queue wants three.
    one.release().await.unwrap();
    assert!(semaphore.try_acquire().await.unwrap().is_none());
    let late = semaphore.clone().acquire_within(Duration::from_millis(20)).await.unwrap();
    assert!(late.is_none());
    two.release().await.unwrap();
    let many = many.await.unwrap();
    assert!(semaphore.try_acquire().await.unwrap().is_none());
    many.release().await.unwrap();
    assert!(semaphore.try_acquire().await.unwrap().is_some());
}

#[tokio::test]
async fn impossible_requests_are_refused_with_a_reason() {
    let engine = engine().await;
    let guard = engine.semaphore("vendor", 3).acquire().await.unwrap();
    let other = engine.semaphore("vendor", 4).acquire().await.unwrap_err();
    assert!(matches!(
        other,
        LockError::Refused(LockRefused::Capacity {
            stored: LockKind::Semaphore { permits: 3 },
            asked: LockKind::Semaphore { permits: 4 },
            ..
        })
    ));
    assert!(engine.rw_lock("vendor").read().await.is_err());
    for permits in [0, 4] {
        let many = engine.semaphore("vendor", 3).acquire_many(permits).await.unwrap_err();
        assert!(matches!(many, LockError::Refused(LockRefused::TooMany { .. })), "{many}");
    }
    assert!(engine.semaphore("none", 0).acquire().await.is_err());
    assert!(engine.semaphore("none", 3).acquire_many(4).await.is_err());
    // The refused requests have left nothing behind.
    let none = engine.mutex("none").acquire_within(Duration::MAX).await.unwrap().unwrap();
    none.release().await.unwrap();
    for name in ["".to_string(), "x".repeat(257)] {
        assert!(matches!(engine.mutex(name).acquire().await, Err(LockError::Name { .. })));
    }
    for lease in [Duration::ZERO, Duration::MAX] {
        let session = engine.locks().session().lease(lease).await;
        assert!(matches!(session, Err(LockError::Lease { .. })));
    }
    let used = engine.locks().remove("vendor").await.unwrap_err();
    assert!(matches!(used, LockError::InUse { owners: 1, .. }), "{used}");
    assert!(matches!(engine.locks().remove("unused").await, Err(LockError::NotFound { .. })));
    assert!(matches!(engine.locks().inspect("unused").await, Err(LockError::NotFound { .. })));
    guard.release().await.unwrap();
    engine.locks().remove("vendor").await.unwrap();
    engine.semaphore("vendor", 4).acquire().await.unwrap().release().await.unwrap();
}

#[tokio::test]
async fn readers_share_and_writers_do_not_and_neither_starves() {
    let engine = engine().await;
    let lock = engine.rw_lock("config");
    let (a, b) = (lock.read().await.unwrap(), lock.read().await.unwrap());
    assert!(lock.try_write().await.unwrap().is_none());
    let writer = tokio::spawn({
        let lock = lock.clone();
        async move { lock.write().await.unwrap() }
    });
    while engine.locks().inspect("config").await.unwrap().waiters.is_empty() {
        tokio::task::yield_now().await;
    }
    // Readers that come later do not overtake the writer.
    assert!(lock.try_read().await.unwrap().is_none());
    let readers: Vec<_> = (0..3)
        .map(|_| {
            let lock = lock.clone();
            tokio::spawn(async move { lock.read().await.unwrap() })
        })
        .collect();
    while engine.locks().inspect("config").await.unwrap().waiters.len() < 4 {
        tokio::task::yield_now().await;
    }
    a.release().await.unwrap();
    b.release().await.unwrap();
    let writer = writer.await.unwrap();
    assert!(lock.clone().read_within(Duration::from_millis(5)).await.unwrap().is_none());
    writer.release().await.unwrap();
    let mut held = Vec::new();
    for reader in readers {
        held.push(reader.await.unwrap());
    }
    assert_eq!(engine.locks().inspect("config").await.unwrap().holders.len(), 3);
    assert!(lock.try_write().await.unwrap().is_none());
    drop(held);
    lock.write().await.unwrap().release().await.unwrap();
}

#[tokio::test]
async fn a_request_whose_caller_is_gone_leaves_the_queue() {
    let engine = engine().await;
    let mutex = engine.mutex("m");
    let held = mutex.acquire().await.unwrap();
    for _ in 0..3 {
        let waits = tokio::time::timeout(Duration::from_millis(5), mutex.acquire()).await;
        assert!(waits.is_err());
    }
    while !engine.locks().inspect("m").await.unwrap().waiters.is_empty() {
        tokio::task::yield_now().await;
    }
    held.release().await.unwrap();
    mutex.acquire().await.unwrap().release().await.unwrap();
}

/// The store refuses a stale holder, whatever that holder believes.
#[tokio::test]
async fn a_session_that_is_not_renewed_loses_its_locks_and_its_token_is_refused() {
    let test = TestEngine::build(1).start().await.unwrap();
    let engine = test.engine();
    let space = engine.store().space(SpaceSpec::new("accounts")).await.unwrap();
    let lease = Duration::from_secs(10);
    let paused = engine.locks().session().lease(lease).renewed_by_hand().await.unwrap();
    let stale = engine.mutex("m").by(&paused).acquire().await.unwrap();
    let write = |guard: &latchwork::lock::LockGuard, value: &str| {
        let commit = Commit::new().guard(guard.token()).put(&space.key("balance"), value.to_string());
        engine.store().commit(commit)
    };
    assert!(write(&stale, "1").await.unwrap().is_applied());
    test.run(test.env().sleep(Duration::from_secs(7))).await;
    assert!(paused.renew().await.unwrap());
    let next = tokio::spawn({
        let mutex = engine.mutex("m");
        async move { mutex.acquire().await.unwrap() }
    });
    test.run(test.env().sleep(Duration::from_secs(9))).await;
    assert!(!next.is_finished() && !stale.is_lost());
    let next = test.run(next).await.unwrap();
    test.run(stale.lost()).await;
    assert!(stale.is_lost() && !paused.renew().await.unwrap());
    assert!(next.token().number() > stale.token().number());
    assert!(matches!(write(&stale, "2").await.unwrap(), Outcome::Refused(_)));
    assert!(write(&next, "3").await.unwrap().is_applied());
    // Its late release frees no other grant.
    assert!(!stale.release().await.unwrap());
    assert!(write(&next, "4").await.unwrap().is_applied());
    let late = engine.mutex("other").by(&paused).acquire().await.unwrap_err();
    assert!(matches!(late, LockError::SessionLost { .. }), "{late}");
}

#[tokio::test]
async fn a_lock_is_held_as_long_as_its_session_renews_itself() {
    let test = TestEngine::build(2).start().await.unwrap();
    let engine = test.engine();
    let guard = engine.mutex("m").acquire().await.unwrap();
    test.run(test.env().sleep(Duration::from_secs(24 * 3600))).await;
    assert!(!guard.is_lost());
    assert!(engine.mutex("m").try_acquire().await.unwrap().is_none());
    assert!(guard.release().await.unwrap());
    // A session that holds nothing is not renewed.
    test.run(test.env().sleep(Duration::from_secs(3600))).await;
    let generation = engine.store().generation().await.unwrap();
    test.run(test.env().sleep(Duration::from_secs(3600))).await;
    assert_eq!(engine.store().generation().await.unwrap(), generation);
    engine.mutex("m").acquire().await.unwrap().release().await.unwrap();
}

#[tokio::test]
async fn a_request_id_counts_once() {
    let engine = engine().await;
    let session = engine.locks().session().await.unwrap();
    let semaphore = engine.semaphore("s", 2).by(&session).request("r1");
    let first = semaphore.acquire().await.unwrap();
    let again = semaphore.acquire().await.unwrap();
    assert_eq!(first.token(), again.token());
    let other = engine.semaphore("s", 2).by(&session).acquire().await.unwrap();
    assert!(first.release().await.unwrap());
    assert!(!again.release().await.unwrap());
    assert_eq!(engine.locks().inspect("s").await.unwrap().used, 1);
    drop(other);
    session.end().await.unwrap();
    assert_eq!(engine.locks().inspect("s").await.unwrap().used, 0);
}

#[tokio::test]
async fn operators_see_holders_and_waiters_and_can_force_a_release() {
    let engine = engine().await;
    let session = engine.locks().session().label("importer").await.unwrap();
    let held = engine.mutex("m").by(&session).acquire().await.unwrap();
    let waits = tokio::spawn({
        let mutex = engine.mutex("m");
        async move { mutex.acquire().await }
    });
    while engine.locks().inspect("m").await.unwrap().waiters.is_empty() {
        tokio::task::yield_now().await;
    }
    let state = engine.locks().inspect("m").await.unwrap();
    let holder = &state.holders[0];
    assert_eq!((holder.owner.clone(), holder.label.as_deref()), (Owner::Session(session.id()), Some("importer")));
    assert_eq!(holder.token, held.token().number());
    assert!(holder.granted >= Some(holder.since) && holder.lease.is_some());
    assert_eq!((state.waiters[0].position, state.waiting), (Some(0), 1));
    engine.locks().force_release("m", holder.token, "the importer hangs").await.unwrap();
    held.lost().await;
    let next = waits.await.unwrap().unwrap();
    let state = engine.locks().inspect("m").await.unwrap();
    assert_eq!(state.holders[0].token, next.token().number());
    assert_eq!((state.forced[0].reason.as_str(), state.forced[0].was_held), ("the importer hangs", true));
    let error = engine.locks().force_release("m", holder.token, "again").await.unwrap_err();
    assert!(matches!(error, LockError::NoSuchToken { .. }), "{error}");
    // A forced waiter gets an error.
    let waits = tokio::spawn({
        let mutex = engine.mutex("m");
        async move { mutex.acquire().await }
    });
    while engine.locks().inspect("m").await.unwrap().waiters.is_empty() {
        tokio::task::yield_now().await;
    }
    let waiter = engine.locks().inspect("m").await.unwrap().waiters[0].token;
    engine.locks().force_release("m", waiter, "not now").await.unwrap();
    let refused = waits.await.unwrap().unwrap_err();
    assert!(matches!(&refused, LockError::Refused(LockRefused::Forced { reason, .. }) if reason == "not now"));
}

#[tokio::test]
async fn locks_are_listed_in_pages() {
    let engine = engine().await;
    for name in ["aaa", "b", "c", "d", "e"] {
        engine.mutex(name).acquire().await.unwrap().release().await.unwrap();
    }
    engine.mutex(LockName::of_workflow("w", "a")).acquire().await.unwrap().release().await.unwrap();
    let (mut names, mut after) = (Vec::new(), None);
    loop {
        let page = engine.locks().list().limit(2).after(after).await.unwrap();
        assert!(page.items.len() <= 2);
        names.extend(page.items.into_iter().map(|lock| lock.name.to_string()));
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    assert_eq!(names, ["aaa", "b", "c", "d", "e", "a of workflow w"]);
    let list = |list: LockList| async { list.await.unwrap().map(|lock| lock.name.to_string()).items };
    let of_workflow = || engine.locks().list().scope(LockScope::Workflow("w".into()));
    assert_eq!(list(of_workflow()).await, ["a of workflow w"]);
    assert!(list(engine.locks().list().scope(LockScope::Workflow("v".into()))).await.is_empty());
    let held = engine.mutex("d").acquire().await.unwrap();
    assert_eq!(list(engine.locks().list().held().limit(1)).await, ["d"]);
    assert!(list(of_workflow().held()).await.is_empty());
    held.release().await.unwrap();
}

/// The lock file of the directory shows that the holder's process is gone: the next process waits for no lease.
#[tokio::test]
async fn sessions_end_when_the_next_process_opens_the_directory() {
    let directory = tempfile::tempdir().unwrap();
    let engine = Engine::open(directory.path()).start().await.unwrap();
    let session = engine.locks().session().lease(Duration::from_secs(3600)).await.unwrap();
    let held = engine.mutex("m").by(&session).acquire().await.unwrap();
    let number = held.token().number();
    let dead = tokio::spawn({
        let mutex = engine.mutex("m");
        async move { mutex.acquire().await.map(drop) }
    });
    while engine.locks().inspect("m").await.unwrap().waiters.is_empty() {
        tokio::task::yield_now().await;
    }
    // The process ends without releasing anything, and a waiting caller ends with it.
    engine.stop();
    assert!(held.is_lost());
    assert!(dead.await.unwrap().is_err());
    drop((held, session));
    let store = engine.store().clone();
    drop(engine);
    store.close().await.unwrap();
    let engine = Engine::open(directory.path()).start().await.unwrap();
    let next = engine.mutex("m").try_acquire().await.unwrap().expect("the mutex is free");
    assert!(next.token().number() > number);
}

/// On a store that processes may share, a restart gives every session a full lease again: another process may own it.
#[tokio::test]
async fn a_restart_on_a_shared_store_gives_sessions_a_full_lease_again() {
    let store = Store::memory().await.unwrap();
    let engine = Engine::on(&store).start().await.unwrap();
    let session = engine.locks().session().lease(Duration::from_millis(500)).await.unwrap();
    let held = engine.mutex("m").by(&session).acquire().await.unwrap();
    let number = held.token().number();
    engine.stop();
    assert!(held.is_lost());
    drop((held, session));
    drop(engine);
    let engine = Engine::on(&store).start().await.unwrap();
    assert_eq!(engine.locks().inspect("m").await.unwrap().holders[0].token, number);
    let next = engine.mutex("m").acquire().await.unwrap();
    assert!(next.token().number() > number);
}

/// The store is closed while a guard is held. The guard is lost at once, not when its lease is next renewed.
#[tokio::test]
async fn a_guard_is_lost_when_its_store_is_closed() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path()).await.unwrap();
    let locks = Locks::on(&store).await.unwrap();
    let guard = locks.mutex("m").acquire().await.unwrap();
    store.close().await.unwrap();
    tokio::time::timeout(Duration::from_secs(5), guard.lost()).await.expect("the guard is not lost");
}

/// Locks without an engine: exclusion, the queue, operators. Requests of executions are left to an engine.
#[tokio::test]
async fn locks_stand_alone() {
    let store = Store::memory().await.unwrap();
    let locks = Locks::on(&store).await.unwrap();
    let first = locks.mutex("m").acquire().await.unwrap();
    assert!(locks.mutex("m").try_acquire().await.unwrap().is_none());
    let next = tokio::spawn({
        let mutex = locks.mutex("m");
        async move { mutex.acquire().await.unwrap() }
    });
    while locks.inspect("m").await.unwrap().waiting == 0 {
        tokio::task::yield_now().await;
    }
    drop(first);
    let next = next.await.unwrap();
    locks.force_release("m", next.token().number(), "enough").await.unwrap();
    next.lost().await;
    locks.shutdown().await.unwrap();

    let waits = workflow("waits").run(async |ctx: Ctx, ()| {
        let guard = ctx.mutex("m").acquire().await?;
        let number = guard.token().number();
        guard.release().await?;
        Ok(number)
    });
    let held = locks.mutex("m").acquire().await.unwrap();
    let engine = Engine::on(&store).register(&waits).start().await.unwrap();
    engine.start(&waits, ()).id("w").await.unwrap();
    while engine.locks().inspect("m").await.unwrap().waiting == 0 {
        tokio::task::yield_now().await;
    }
    engine.stop();
    let ticket = locks.inspect("m").await.unwrap().waiters[0].token;
    let error = locks.force_release("m", ticket, "enough").await.unwrap_err();
    assert!(matches!(error, LockError::NeedsEngine { .. }), "{error}");
    assert!(held.release().await.unwrap());
    assert!(locks.mutex("m").try_acquire().await.unwrap().is_none(), "an execution is before it in the queue");
    let engine = Engine::on(&store).register(&waits).start().await.unwrap();
    let handle = engine.handle(&waits, "w");
    let number = tokio::time::timeout(Duration::from_secs(20), handle.result()).await.expect("it hangs").unwrap();
    assert_eq!(number, ticket);
}

#[tokio::test]
async fn a_request_id_stands_for_one_number_of_permits() {
    let engine = engine().await;
    let session = engine.locks().session().await.unwrap();
    let _mine = engine.rw_lock("rw").by(&session).request("r").read().await.unwrap();
    let _other = engine.rw_lock("rw").read().await.unwrap();
    let error = engine.rw_lock("rw").by(&session).request("r").write().await.unwrap_err();
    assert!(matches!(error, LockError::Refused(LockRefused::Reused { before: 1, .. })), "{error}");
    let _one = engine.semaphore("s", 3).by(&session).request("q").acquire().await.unwrap();
    let error = engine.semaphore("s", 3).by(&session).request("q").acquire_many(3).await.unwrap_err();
    assert!(error.to_string().contains("for 1 permits of lock \"s\", and now for 3"), "{error}");
}

/// Two callers have made the same request, and one of them gives up: in time, or at once. The other keeps its position
/// in the queue.
#[tokio::test]
async fn a_caller_that_gives_up_a_shared_request_leaves_it_to_the_other_callers() {
    for drops in [false, true] {
        let engine = engine().await;
        let session = engine.locks().session().await.unwrap();
        let held = engine.mutex("m").acquire().await.unwrap();
        let mine = || engine.mutex("m").by(&session).request("r");
        let until = async |count: u64| {
            while engine.locks().inspect("m").await.unwrap().waiting < count {
                tokio::task::yield_now().await;
            }
        };
        let lock = mine();
        let patient = tokio::spawn(async move { lock.acquire().await.unwrap() });
        until(1).await;
        let lock = engine.mutex("m");
        let third = tokio::spawn(async move { lock.acquire().await.unwrap() });
        until(2).await;
        if drops {
            let lock = mine();
            let twin = tokio::spawn(async move { lock.acquire().await.map(drop) });
            for _ in 0..200 {
                tokio::task::yield_now().await;
            }
            twin.abort();
            assert!(twin.await.unwrap_err().is_cancelled());
        } else {
            let taken = mine().acquire_within(Duration::from_millis(20)).await.unwrap();
            assert!(taken.is_none());
        }
        held.release().await.unwrap();
        let patient = patient.await.unwrap();
        assert!(!third.is_finished());
        assert!(patient.release().await.unwrap());
        drop(third.await.unwrap());
    }
}

/// The second caller of a request gives up before it was answered, and then the first gives up as well: the queue is
/// empty.
#[tokio::test]
async fn a_request_that_all_callers_have_given_up_is_removed() {
    let engine = engine().await;
    let holder = engine.mutex("m").acquire().await.unwrap();
    let session = engine.locks().session().await.unwrap();
    let twin = engine.mutex("m").by(&session).request("r");
    let mut waits = Box::pin(twin.acquire());
    let mut poll = |context: &mut Context<'_>| Poll::Ready(waits.as_mut().poll(context).is_pending());
    while engine.locks().inspect("m").await.unwrap().waiting == 0 {
        assert!(std::future::poll_fn(&mut poll).await);
        tokio::task::yield_now().await;
    }
    let mut gives_up = Box::pin(twin.acquire());
    assert!(std::future::poll_fn(|context| Poll::Ready(gives_up.as_mut().poll(context).is_pending())).await);
    drop(gives_up);
    let settle = || engine.store().env().sleep(Duration::from_millis(20));
    settle().await;
    assert_eq!(engine.locks().inspect("m").await.unwrap().waiting, 1);
    drop(waits);
    while engine.locks().inspect("m").await.unwrap().waiting > 0 {
        settle().await;
    }
    holder.release().await.unwrap();
    assert!(engine.mutex("m").acquire().await.unwrap().release().await.unwrap());
}

/// The record of one lock cannot be read: an acquire returns that error, and the sessions of an earlier process still
/// end.
#[tokio::test]
async fn a_damaged_lock_keeps_no_session_alive() {
    let store = Store::memory().await.unwrap();
    let engine = Engine::on(&store).start().await.unwrap();
    let lease = Duration::from_millis(50);
    for lock in ["a", "b"] {
        let session = engine.locks().session().lease(lease).await.unwrap();
        std::mem::forget((engine.mutex(lock).by(&session).acquire().await.unwrap(), session));
    }
    engine.stop();
    let heads = store.spaces().await.unwrap().into_iter().find(|space| space.name() == "lock.heads").unwrap();
    let (key, _) = store.view().await.unwrap().scan(&heads.all(), Order::Ascending, 1).await.unwrap().remove(0);
    store.commit(Commit::new().put(&key, vec![255; 3])).await.unwrap().applied().unwrap();
    let engine = Engine::on(&store).start().await.unwrap();
    let guard = engine.mutex("b").acquire_within(Duration::from_secs(20)).await.unwrap();
    assert!(guard.unwrap().release().await.unwrap());
    assert_eq!(engine.mutex("a").acquire().await.unwrap_err().kind(), ErrorKind::Corrupt);
}

/// The locks of a session whose record is gone are released at the next start. A session of a newer program keeps its
/// locks, though its record cannot be read.
#[tokio::test]
async fn a_session_of_a_newer_program_keeps_its_locks_over_a_start() {
    let store = Store::memory().await.unwrap();
    let engine = Engine::on(&store).start().await.unwrap();
    let sessions = store.spaces().await.unwrap().into_iter().find(|space| space.name() == "lock.sessions").unwrap();
    let mut keys = Vec::new();
    for lock in ["newer", "gone"] {
        let session = engine.locks().session().await.unwrap();
        keys.push(sessions.key(session.id().as_bytes()));
        std::mem::forget((engine.mutex(lock).by(&session).acquire().await.unwrap(), session));
    }
    engine.stop();
    let change = Commit::new().put(&keys[0], vec![2, 0]).delete(&keys[1]);
    store.commit(change).await.unwrap().applied().unwrap();
    let engine = Engine::on(&store).start().await.unwrap();
    // Sessions are looked at in the order of their ids: the first one was, when the lock of the second is free.
    let guard = engine.mutex("gone").acquire_within(Duration::from_secs(20)).await.unwrap();
    assert!(guard.unwrap().release().await.unwrap());
    assert!(engine.mutex("newer").try_acquire().await.unwrap().is_none());
}
