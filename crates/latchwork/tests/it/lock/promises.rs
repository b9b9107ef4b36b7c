//! The promises of locks, each by its label.

use std::sync::Arc;
use std::time::Duration;

use latchwork::lock::{LockError, LockRefused, Owner};
use latchwork::store::{Commit, Confirm, Outcome, SpaceSpec, Store};
use latchwork::testing::TestEngine;
use latchwork::workflow::{Ctx, Engine, Workflow, WorkflowError, workflow};
use parking_lot::Mutex;

const HOUR: Duration = Duration::from_secs(3600);

/// Acquires so many permits out of so many, for a second.
fn takes() -> Workflow<(u32, u32), u64> {
    workflow("takes").run(async |ctx: Ctx, (permits, of): (u32, u32)| {
        let guard = ctx.semaphore("s", of).acquire_many(permits).await?;
        ctx.sleep(Duration::from_secs(1)).await?;
        Ok(guard.token().number())
    })
}

/// L1: a hundred requests of different sizes never hold more permits than there are.
#[tokio::test]
async fn l1_granted_permits_never_exceed_the_capacity() {
    let takes = takes();
    let test = TestEngine::new(&takes, 1).await.unwrap();
    let engine = test.engine();
    let mut handles = Vec::new();
    for number in 0..100u32 {
        handles.push(engine.start(&takes, (1 + number % 5, 7)).id(format!("t{number}")).await.unwrap());
    }
    let watch = async {
        loop {
            let state = engine.locks().inspect("s").await.unwrap();
            let held: u32 = state.holders.iter().map(|holder| holder.permits).sum();
            assert_eq!(held, state.used);
            assert!(held <= 7);
            if state.used == 0 && state.waiting == 0 {
                return;
            }
            test.env().sleep(Duration::from_millis(100)).await;
        }
    };
    test.run(async {
        test.env().sleep(Duration::from_millis(10)).await;
        watch.await;
    })
    .await;
    for handle in handles {
        test.run(handle.result()).await.unwrap();
    }
}

/// L2: tokens rise over restarts, over the removal of the lock and over the restore of an older state.
#[tokio::test]
async fn l2_tokens_rise_across_restart_restore_and_removal() {
    let directory = tempfile::tempdir().unwrap();
    let snapshot = tempfile::tempdir().unwrap();
    let snapshot = snapshot.path().join("snapshot");
    let mut last = 0;
    let mut take = async |engine: &Engine| {
        let guard = engine.mutex("m").acquire().await.unwrap();
        let number = guard.token().number();
        assert!(number > last, "{number} after {last}");
        last = number;
        guard.release().await.unwrap();
    };
    let reopened = async || Engine::open(directory.path()).start().await.unwrap();
    let close = async |engine: Engine| {
        let store = engine.store().clone();
        drop(engine);
        store.close().await.unwrap();
    };
    let engine = reopened().await;
    take(&engine).await;
    engine.store().view().await.unwrap().persist(&snapshot).await.unwrap();
    take(&engine).await;
    take(&engine).await;
    close(engine).await;
    let engine = reopened().await;
    take(&engine).await;
    engine.locks().remove("m").await.unwrap();
    take(&engine).await;
    close(engine).await;
    let store = Store::open(directory.path()).await.unwrap();
    store.restore(&snapshot, Confirm::ReplaceEverything).await.unwrap();
    store.close().await.unwrap();
    let engine = reopened().await;
    take(&engine).await;
    take(&engine).await;
    close(engine).await;
}

/// L2: a token can guard any commit: the commit lands as long as the lock is held, and not afterwards.
#[tokio::test]
async fn l2_any_commit_can_be_guarded() {
    let engine = Engine::on(&Store::memory().await.unwrap()).start().await.unwrap();
    let key = engine.store().space(SpaceSpec::new("files")).await.unwrap().key("report");
    let guard = engine.mutex("report").acquire().await.unwrap();
    let token = guard.token().clone();
    let write = || engine.store().commit(Commit::new().guard(&token).put(&key, "x"));
    assert!(write().await.unwrap().is_applied());
    guard.release().await.unwrap();
    assert!(matches!(write().await.unwrap(), Outcome::Refused(_)));
    let _next = engine.mutex("report").acquire().await.unwrap();
    assert!(matches!(write().await.unwrap(), Outcome::Refused(_)));
}

/// L3: a later request is not granted first, even if it would fit and the earlier request does not.
#[tokio::test]
async fn l3_no_request_is_overtaken() {
    let order = Arc::new(Mutex::new(Vec::new()));
    let takes = workflow("takes").run({
        let order = order.clone();
        move |ctx: Ctx, (number, permits): (u32, u32)| {
            let order = order.clone();
            async move {
                let guard = ctx.semaphore("s", 3).acquire_many(permits).await?;
                order.lock().push((guard.token().number(), number));
                ctx.sleep(Duration::from_secs(u64::from(number % 3))).await?;
                guard.release().await
            }
        }
    });
    let test = TestEngine::new(&takes, 1).await.unwrap();
    let mut handles = Vec::new();
    for number in 0..60 {
        let permits = 1 + (number * 7) % 3;
        handles.push(test.engine().start(&takes, (number, permits)).id(format!("t{number}")).await.unwrap());
        test.run(test.env().sleep(Duration::from_millis(5))).await;
    }
    for handle in handles {
        test.run(handle.result()).await.unwrap();
    }
    let mut order = order.lock().clone();
    order.sort();
    order.dedup();
    let numbers: Vec<u32> = order.iter().map(|(_, number)| *number).collect();
    assert_eq!(numbers, (0..60).collect::<Vec<_>>());
}

/// L4: a retry of any call changes nothing; a late retry of a release frees no other grant.
#[tokio::test]
async fn l4_a_late_release_never_frees_a_newer_grant() {
    let engine = Engine::on(&Store::memory().await.unwrap()).start().await.unwrap();
    let session = engine.locks().session().await.unwrap();
    let mutex = engine.mutex("m").by(&session);
    let first = mutex.clone().request("one").acquire().await.unwrap();
    let again = mutex.clone().request("one").acquire().await.unwrap();
    assert_eq!(first.token(), again.token());
    assert!(first.release().await.unwrap());
    let second = mutex.clone().request("two").acquire().await.unwrap();
    assert!(!again.release().await.unwrap());
    assert_eq!(engine.locks().inspect("m").await.unwrap().holders[0].token, second.token().number());
    assert!(second.release().await.unwrap());
}

/// L5: the commit that grants the lock to the next waiter passes over waiters whose session has expired.
#[tokio::test]
async fn l5_the_dead_are_passed_over() {
    let test = TestEngine::build(1).start().await.unwrap();
    let engine = test.engine();
    let held = engine.mutex("m").acquire().await.unwrap();
    let lease = Duration::from_secs(5);
    let dies = engine.locks().session().lease(lease).renewed_by_hand().await.unwrap();
    let dead = tokio::spawn({
        let mutex = engine.mutex("m").by(&dies);
        async move { mutex.acquire().await }
    });
    test.run(test.env().sleep(Duration::from_secs(1))).await;
    let alive = tokio::spawn({
        let mutex = engine.mutex("m");
        async move { mutex.acquire().await }
    });
    test.run(test.env().sleep(Duration::from_secs(1))).await;
    assert_eq!(engine.locks().inspect("m").await.unwrap().waiters.len(), 2);
    test.run(test.env().sleep(Duration::from_secs(5))).await;
    assert!(matches!(dead.await.unwrap(), Err(LockError::SessionLost { .. })));
    assert_eq!(engine.locks().inspect("m").await.unwrap().waiters.len(), 1);
    held.release().await.unwrap();
    alive.await.unwrap().unwrap().release().await.unwrap();
}

/// L6: leases do not depend on the time of day.
#[tokio::test]
async fn l6_a_lease_is_a_lower_bound_by_a_clock_that_only_goes_forward() {
    let test = TestEngine::build(1).start().await.unwrap();
    let engine = test.engine();
    let lease = Duration::from_secs(10);
    let session = engine.locks().session().lease(lease).renewed_by_hand().await.unwrap();
    let held = engine.mutex("m").by(&session).acquire().await.unwrap();
    let began = test.env().monotonic();
    let next = test.run(engine.mutex("m").acquire()).await.unwrap();
    assert!(test.env().monotonic() - began >= lease);
    assert!(held.is_lost());
    next.release().await.unwrap();
}

/// L7: a release of many permits wakes as many waiters as fit, in one commit.
#[tokio::test]
async fn l7_a_release_wakes_as_many_as_it_freed_permits() {
    let takes = takes();
    let test = TestEngine::new(&takes, 1).await.unwrap();
    let engine = test.engine();
    let all = engine.semaphore("s", 5).acquire_many(5).await.unwrap();
    for number in 0..8 {
        engine.start(&takes, (1, 5)).id(format!("t{number}")).await.unwrap();
    }
    test.run(test.env().sleep(HOUR)).await;
    assert_eq!(engine.residents(), 0);
    let before = engine.store().generation().await.unwrap();
    all.release().await.unwrap();
    let state = engine.locks().inspect("s").await.unwrap();
    assert_eq!((state.holders.len(), state.waiters.len()), (5, 3));
    let view = engine.store().view().await.unwrap();
    assert!(view.generation() >= before.next());
    for number in 0..8 {
        let handle = engine.handle(&takes, format!("t{number}"));
        test.run(handle.result()).await.unwrap();
    }
}

/// L8: three executions wait in a cycle. One of them fails with the deadlock, and the others continue.
#[tokio::test]
async fn l8_a_cycle_of_executions_is_reported_and_not_waited_out() {
    let cyclic = workflow("cycle").run(async |ctx: Ctx, number: u32| {
        let _mine = ctx.mutex(format!("m{number}")).acquire().await?;
        ctx.sleep(Duration::from_secs(10)).await?;
        let _next = ctx.mutex(format!("m{}", (number + 1) % 3)).acquire().await?;
        Ok(())
    });
    for seed in 0..20 {
        let test = TestEngine::new(&cyclic, seed).await.unwrap();
        let engine = test.engine();
        let mut handles = Vec::new();
        for number in 0..3 {
            handles.push(engine.start(&cyclic, number).id(format!("c{number}")).await.unwrap());
        }
        let mut told = 0;
        for handle in handles {
            match test.run(handle.result()).await {
                Ok(()) => {}
                Err(WorkflowError::Failed { failure, .. }) => {
                    let Some(LockRefused::Deadlock { cycle, .. }) = failure.get() else { panic!("{failure}") };
                    assert_eq!(cycle.len(), 3, "{failure}");
                    let is_in_it = |number: u32| {
                        let id = Owner::Execution(format!("c{number}").as_str().into());
                        cycle.iter().any(|link| link.waiter == id)
                    };
                    assert!((0..3).all(is_in_it), "{failure}");
                    told += 1;
                }
                other => panic!("{other:?}"),
            }
        }
        assert_eq!(told, 1);
    }
}

/// L8: a caller outside waits for the permit that an execution holds, and the execution's next request waits behind
/// that caller.
#[tokio::test]
async fn l8_a_cycle_through_the_queue_is_found() {
    let more = workflow("more").run(async |ctx: Ctx, ()| {
        let _one = ctx.semaphore("s", 3).acquire().await?;
        ctx.sleep(Duration::from_secs(10)).await?;
        let _more = ctx.semaphore("s", 3).acquire().await?;
        Ok(())
    });
    let test = TestEngine::new(&more, 1).await.unwrap();
    let handle = test.engine().start(&more, ()).id("m").await.unwrap();
    test.run(test.env().sleep(Duration::from_secs(5))).await;
    let all = tokio::spawn({
        let semaphore = test.engine().semaphore("s", 3);
        async move { semaphore.acquire_many(3).await }
    });
    let Err(WorkflowError::Failed { failure, .. }) = test.run(handle.result()).await else { panic!("no deadlock") };
    assert!(matches!(failure.get(), Some(LockRefused::Deadlock { .. })), "{failure}");
    test.run(all).await.unwrap().unwrap().release().await.unwrap();
}

/// L8: an execution that waits for itself is a deadlock; a wait that ends by itself is not.
#[tokio::test]
async fn l8_a_wait_that_can_still_end_is_not_a_deadlock() {
    let itself = workflow("itself").run(async |ctx: Ctx, ()| {
        let _read = ctx.rw_lock("rw").read().await?;
        let write = ctx.rw_lock("rw").write_within(HOUR).await?;
        assert!(write.is_none());
        let _never = ctx.rw_lock("rw").write().await?;
        Ok(())
    });
    let test = TestEngine::new(&itself, 1).await.unwrap();
    let handle = test.engine().start(&itself, ()).id("i").await.unwrap();
    let Err(WorkflowError::Failed { failure, .. }) = test.run(handle.result()).await else { panic!("no deadlock") };
    assert!(matches!(failure.get(), Some(LockRefused::Deadlock { cycle, .. }) if cycle.len() == 1), "{failure}");
    // Of two permits, one is held by an execution that will release it.
    let semaphore = workflow("semaphore").run(async |ctx: Ctx, waits: bool| {
        let _one = ctx.semaphore("s", 2).acquire().await?;
        if waits {
            let _two = ctx.semaphore("s", 2).acquire().await?;
            return Ok(());
        }
        ctx.sleep(HOUR).await?;
        Ok(())
    });
    let test = TestEngine::new(&semaphore, 1).await.unwrap();
    let sleeps = test.engine().start(&semaphore, false).id("sleeps").await.unwrap();
    let waits = test.engine().start(&semaphore, true).id("waits").await.unwrap();
    test.run(waits.result()).await.unwrap();
    test.run(sleeps.result()).await.unwrap();
}
