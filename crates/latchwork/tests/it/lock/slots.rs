//! Locks on slots: from outside, inside workflows that crash at every commit, and both at once.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use latchwork::json;
use latchwork::lock::{DurableMutex, DurableSemaphore, LockRecord, LockSetupError, SlotLockError, initial_lock_record};
use latchwork::state::{Slot, StateError, States};
use latchwork::store::{ErrorKind, Rev, Store, Timestamp};
use latchwork::testing::{Crashes, TestEngine, crash_everywhere};
use latchwork::workflow::{Ctx, Engine, Tx, Workflow, workflow};
use serde_json::Value;

const HOUR: Duration = Duration::from_secs(3600);
const NOW: Timestamp = Timestamp(1_000_000);

fn later(seconds: u64) -> Timestamp {
    NOW.plus(Duration::from_secs(seconds))
}

async fn states() -> States {
    States::on(&Store::memory().await.unwrap()).await.unwrap()
}

async fn rev(slot: &Slot<LockRecord>) -> Rev {
    slot.container().read().await.unwrap().1
}

#[test]
fn an_impossible_lock_is_refused_when_it_is_made() {
    let new = DurableSemaphore::new;
    assert_eq!(new(0, HOUR), Err(LockSetupError::NoPermits));
    assert_eq!(new(1, Duration::ZERO), Err(LockSetupError::LeaseTooShort(Duration::ZERO)));
    let short = Duration::from_nanos(999);
    assert_eq!(DurableMutex::new(short), Err(LockSetupError::LeaseTooShort(short)));
    assert_eq!(new(1, Duration::MAX), Err(LockSetupError::LeaseTooLong(Duration::MAX)));
    assert!(new(u32::MAX, Duration::from_micros(u64::MAX)).is_ok());
    let default = DurableSemaphore::default();
    assert_eq!((default.permits(), default.lease()), (1, Duration::from_secs(30)));
    assert_eq!(DurableMutex::default().lease(), Duration::from_secs(30));
}

#[tokio::test]
async fn a_call_with_a_bad_lease_or_without_a_holder_is_refused() {
    let slot = states().await.global().slot::<LockRecord>("lock");
    let mutex = DurableMutex::default();
    let refused = mutex.try_acquire(&slot, "", NOW, None).await;
    assert!(matches!(refused, Err(SlotLockError::NoHolder)), "{refused:?}");
    assert!(matches!(mutex.renew(&slot, "", NOW, None).await, Err(SlotLockError::NoHolder)));
    assert!(matches!(mutex.release(&slot, "", NOW).await, Err(SlotLockError::NoHolder)));
    for lease in [Duration::ZERO, Duration::MAX] {
        for refused in [
            mutex.try_acquire(&slot, "a", NOW, Some(lease)).await.map(drop),
            mutex.renew(&slot, "a", NOW, Some(lease)).await.map(drop),
        ] {
            let error = refused.unwrap_err();
            assert!(matches!(error, SlotLockError::Lease(_)), "{error:?}");
            assert_eq!(error.kind(), ErrorKind::Invalid);
        }
    }
    assert_eq!(mutex.inspect(&slot).await.unwrap(), None);
}

#[tokio::test]
async fn every_operation_works_from_outside() {
    let slot = states().await.global().slot("lock").initial(initial_lock_record());
    let pair = DurableSemaphore::new(2, Duration::from_secs(10)).unwrap();
    let acquire = async |holder, now| pair.try_acquire(&slot, holder, now, None).await.unwrap();
    let granted = acquire("a", NOW).await;
    assert_eq!((granted.acquired, granted.position, granted.token), (true, None, Some(1)));
    assert_eq!(acquire("b", NOW).await.token, Some(2));
    let waits = acquire("c", NOW).await;
    assert_eq!((waits.acquired, waits.position, waits.token), (false, Some(0), None));
    assert_eq!(acquire("d", later(1)).await.position, Some(1));
    assert!(pair.renew(&slot, "a", later(9), None).await.unwrap());
    assert!(!pair.renew(&slot, "c", later(9), None).await.unwrap(), "it waits");
    // By now the lease of b has expired, and c has lost its position.
    assert!(!pair.renew(&slot, "b", later(10), None).await.unwrap());
    assert_eq!(acquire("d", later(10)).await.token, Some(3));
    assert_eq!(acquire("b", later(10)).await.position, Some(0));
    let record = pair.inspect(&slot).await.unwrap().unwrap();
    assert_eq!(record.holders.iter().map(|held| &*held.holder_id).collect::<Vec<_>>(), ["a", "d"]);
    assert!(pair.release(&slot, "b", later(10)).await.unwrap(), "its place");
    assert!(pair.release(&slot, "a", later(10)).await.unwrap());
    assert!(!pair.release(&slot, "a", later(10)).await.unwrap());
    // A lease of its own.
    let granted = pair.try_acquire(&slot, "e", later(10), Some(HOUR)).await.unwrap();
    assert_eq!(granted.token, Some(4));
    let record = pair.inspect(&slot).await.unwrap().unwrap();
    assert_eq!(record.holders[1].lease_expires_at, later(3610));
}

#[tokio::test]
async fn a_call_that_changes_nothing_writes_nothing() {
    let states = states().await;
    let mutex = DurableMutex::default();
    let bare = states.global().slot::<LockRecord>("bare");
    let first = states.global().slot("first").initial(initial_lock_record());
    let held = states.global().slot("held");
    mutex.try_acquire(&held, "a", NOW, None).await.unwrap();
    // Other code has stored a note beside the record.
    let noted = json!({"holders": [], "waiters": [], "last_token": 7, "note": "mine"});
    let written = states.global().slot::<Value>("noted");
    written.set(noted.clone()).await.unwrap();
    let before = states.store().generation().await.unwrap();
    for slot in [&bare, &first, &held, &states.global().slot("noted")] {
        assert!(!mutex.release(slot, "stranger", later(99)).await.unwrap());
        assert!(!mutex.renew(slot, "stranger", later(99), None).await.unwrap());
        mutex.inspect(slot).await.unwrap();
    }
    assert!(!mutex.renew(&held, "a", later(30), None).await.unwrap());
    assert!(mutex.renew(&held, "a", NOW, None).await.unwrap(), "it is held, though not for longer");
    assert_eq!(mutex.try_acquire(&held, "a", NOW, None).await.unwrap().token, Some(1));
    assert_eq!(states.store().generation().await.unwrap(), before);
    assert_eq!((rev(&bare).await, mutex.inspect(&bare).await.unwrap()), (Rev(0), None));
    assert_eq!(written.get().await.unwrap(), Some(noted));
    let granted = mutex.try_acquire(&states.global().slot("noted"), "a", NOW, None).await.unwrap();
    assert_eq!(granted.token, Some(8));
}

#[tokio::test]
async fn a_value_that_is_no_record_is_an_error_and_stays_as_it_is() {
    let states = states().await;
    let mutex = DurableMutex::default();
    let (slot, raw) = (states.global().slot::<LockRecord>("lock"), states.global().slot::<Value>("lock"));
    let holder = json!({"holder_id": "a", "lease_expires_at": -1, "token": 1, "since": 0});
    for wrong in [
        json!(null),
        json!(7),
        json!({}),
        json!({"holders": [], "waiters": []}),
        json!({"holders": [holder], "waiters": [], "last_token": 1}),
        json!({"holders": [], "waiters": ["b"], "last_token": 1}),
    ] {
        raw.set(wrong.clone()).await.unwrap();
        for result in [
            mutex.try_acquire(&slot, "a", NOW, None).await.map(drop),
            mutex.release(&slot, "a", NOW).await.map(drop),
            mutex.renew(&slot, "a", NOW, None).await.map(drop),
            mutex.inspect(&slot).await.map(drop),
        ] {
            assert!(matches!(result, Err(SlotLockError::State(StateError::Mismatch { .. }))), "{wrong}: {result:?}");
        }
        assert_eq!(raw.get().await.unwrap(), Some(wrong));
    }
    raw.set(json!({"holders": [], "waiters": [], "last_token": u64::MAX})).await.unwrap();
    let error = mutex.try_acquire(&slot, "a", NOW, None).await.unwrap_err();
    assert!(matches!(error, SlotLockError::TokensSpent(_)), "{error:?}");
    assert_eq!(error.kind(), ErrorKind::Corrupt);
}

#[tokio::test]
async fn an_attempt_that_is_sent_again_under_its_name_is_answered_the_same() {
    let slot = states().await.global().slot::<LockRecord>("lock");
    let mutex = DurableMutex::default();
    for now in [NOW, later(5)] {
        let granted = mutex.try_acquire(&slot.clone().once("try-1"), "a", now, None).await.unwrap();
        assert_eq!(granted.token, Some(1));
    }
    assert_eq!(mutex.inspect(&slot).await.unwrap().unwrap().holders[0].lease_expires_at, later(30));
    let other = mutex.try_acquire(&slot.clone().once("try-1"), "b", NOW, None).await;
    assert!(matches!(other, Err(SlotLockError::NotInAnswer { .. })), "{other:?}");
    let other = mutex.release(&slot.clone().once("try-1"), "a", NOW).await;
    assert!(matches!(other, Err(SlotLockError::State(StateError::OnceReused { .. }))), "{other:?}");
}

/// Handles of two queues on one store: they race for the slot, and each loses some races.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_clients_contend_and_no_more_than_the_permits_are_inside() {
    let store = Store::memory().await.unwrap();
    let (inside, done) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let mut tasks = tokio::task::JoinSet::new();
    for number in 0..6 {
        let (store, inside, done) = (store.clone(), inside.clone(), done.clone());
        tasks.spawn(async move {
            let states = States::on(&store).await.unwrap().attempts(u32::MAX);
            let slot = states.global().slot::<LockRecord>("lock");
            let (pair, me) = (DurableSemaphore::new(2, HOUR).unwrap(), format!("task-{number}"));
            let mut last = None;
            for _ in 0..10 {
                let token = loop {
                    let attempt = pair.try_acquire(&slot, &me, store.env().now(), None).await.unwrap();
                    match attempt.token {
                        Some(token) => break token,
                        None => tokio::task::yield_now().await,
                    }
                };
                assert!(Some(token) > last);
                last = Some(token);
                assert!(inside.fetch_add(1, Ordering::SeqCst) < 2);
                tokio::task::yield_now().await;
                inside.fetch_sub(1, Ordering::SeqCst);
                assert!(pair.release(&slot, &me, store.env().now()).await.unwrap());
                done.fetch_add(1, Ordering::SeqCst);
            }
        });
    }
    tasks.join_all().await;
    assert_eq!(done.load(Ordering::SeqCst), 60);
    let slot = States::on(&store).await.unwrap().global().slot::<LockRecord>("lock");
    assert_eq!(slot.get().await.unwrap(), Some(LockRecord { last_token: 60, ..initial_lock_record() }));
}

/// Every operation inside a workflow, with all its answers.
fn every_operation() -> Workflow<(), Value> {
    workflow("every").run(async |ctx: Ctx, ()| {
        let mutex = DurableMutex::new(HOUR)?;
        let slot = ctx.state().workflow::<LockRecord>("lock");
        let (me, now) = (ctx.id().clone(), ctx.now().await);
        let never = mutex.release(&slot, &me, now).await?;
        let before = mutex.inspect(&slot).await?.is_none();
        let first = mutex.try_acquire(&slot, &me, now, None).await?;
        let behind = mutex.try_acquire(&slot, "behind", now, None).await?;
        let third = mutex.try_acquire(&slot, "third", now, Some(HOUR * 3)).await?;
        ctx.sleep(Duration::from_secs(60)).await?;
        let again = mutex.try_acquire(&slot, &me, ctx.now().await, None).await?;
        let renewals = [
            mutex.renew(&slot, &me, ctx.now().await, Some(HOUR * 2)).await?,
            mutex.renew(&slot, "behind", ctx.now().await, None).await?,
        ];
        let wrong = mutex.try_acquire(&slot, &me, now, Some(Duration::ZERO)).await.is_err();
        ctx.sleep(HOUR * 3).await?;
        let over = mutex.renew(&slot, &me, ctx.now().await, None).await?;
        // The leases of "behind" and "third" have expired.
        let taken = mutex.try_acquire(&slot, "new", ctx.now().await, None).await?;
        let last = mutex.try_acquire(&slot, &me, ctx.now().await, None).await?;
        let now = ctx.now().await;
        // The release is part of a transaction.
        let released = ctx.transaction("pay", async |tx: Tx| {
            tx.global::<u64>("paid").increment(1).await?;
            Ok(DurableMutex::default().release(&tx.workflow("lock"), "new", now).await?)
        });
        let released = [released.await?, mutex.release(&slot, "new", now).await?];
        let end = mutex.try_acquire(&slot, &me, now, None).await?;
        let record = mutex.inspect(&slot).await?;
        let names: Vec<String> =
            record.iter().flat_map(|record| &record.holders).map(|held| held.holder_id.clone()).collect();
        let paid = ctx.state().global::<u64>("paid").get().await?;
        let grants = [first, again, taken, end].map(|attempt| attempt.token);
        let places = [behind, third, last].map(|attempt| attempt.position);
        Ok(json!({
            "grants": grants, "places": places, "said": [never, before, wrong, over], "renewals": renewals,
            "released": released, "holders": names, "paid": paid,
        }))
    })
}

fn expected() -> Value {
    json!({
        "grants": [1, 1, 2, 3], "places": [0, 1, 0], "said": [false, true, true, false], "renewals": [true, false],
        "released": [true, false], "holders": ["execution"], "paid": 1,
    })
}

#[tokio::test]
async fn a_crash_at_any_commit_changes_no_answer() {
    let crashes = crash_everywhere(every_operation, (), async |outcome| {
        assert_eq!(outcome.result.as_ref().unwrap(), &expected(), "{:?}", outcome.crash);
    })
    .await;
    assert!(crashes >= 20, "{crashes}");
}

/// Reads, waits and writes: if two contenders do this at once, one change is lost.
fn contender() -> Workflow<u64, (u64, Vec<u64>)> {
    workflow("contender").run(async |ctx: Ctx, times: u64| {
        let mutex = DurableMutex::new(Duration::from_secs(120))?;
        let (slot, sum) = (ctx.state().global::<LockRecord>("lock"), ctx.state().global::<u64>("sum").initial(0));
        let mut tokens = Vec::new();
        for _ in 0..times {
            let token = loop {
                match mutex.try_acquire(&slot, ctx.id(), ctx.now().await, None).await?.token {
                    Some(token) => break token,
                    None => ctx.sleep(Duration::from_secs(2)).await?,
                }
            };
            tokens.push(token);
            let read = sum.get().await?.unwrap_or(0);
            ctx.sleep(Duration::from_secs(5)).await?;
            sum.set(read + 1).await?;
            mutex.release(&slot, ctx.id(), ctx.now().await).await?;
        }
        // The caller outside has time to finish as well.
        for _ in 0..30 {
            if sum.get().await?.unwrap_or(0) >= 100 + times {
                break;
            }
            ctx.sleep(Duration::from_secs(2)).await?;
        }
        Ok((sum.get().await?.unwrap_or(0), tokens))
    })
}

/// Adds a hundred from outside, once. The sum shows whether that is done.
async fn outsider(engine: Engine) {
    let (states, mutex) = (engine.states(), DurableMutex::new(Duration::from_secs(120)).unwrap());
    let (slot, sum) = (states.global().slot::<LockRecord>("lock"), states.global().slot::<u64>("sum").initial(0));
    let env = states.store().env().clone();
    // A crash ends all of it.
    let _ = async {
        while !mutex.try_acquire(&slot, "outsider", env.now(), None).await?.acquired {
            env.sleep(Duration::from_secs(1)).await;
        }
        let read = sum.get().await?.unwrap_or(0);
        env.sleep(Duration::from_secs(7)).await;
        if read < 100 {
            sum.set(read + 100).await?;
        }
        mutex.release(&slot, "outsider", env.now()).await
    }
    .await;
}

#[tokio::test]
async fn a_workflow_and_a_caller_outside_exclude_each_other_over_every_crash() {
    let crashes = Crashes::of(contender, 3).outside(outsider).run(async |outcome| {
        let (sum, tokens) = outcome.result.as_ref().unwrap();
        assert_eq!(*sum, 103, "{:?}", outcome.crash);
        assert!(tokens.is_sorted_by(|a, b| a < b), "{:?}: {tokens:?}", outcome.crash);
    });
    let crashes = crashes.await;
    assert!(crashes >= 20, "{crashes}");
}

/// Waits for a lock that another holder has. Returns its position at each attempt, and its token.
fn patient() -> Workflow<(), (Vec<usize>, u64)> {
    workflow("patient").run(async |ctx: Ctx, ()| {
        let (mutex, slot) = (DurableMutex::default(), ctx.state().global::<LockRecord>("lock"));
        let mut places = Vec::new();
        loop {
            let attempt = mutex.try_acquire(&slot, ctx.id(), ctx.now().await, None).await?;
            places.extend(attempt.position);
            if let Some(token) = attempt.token {
                return Ok((places, token));
            }
            ctx.sleep(Duration::from_secs(4)).await?;
        }
    })
}

#[tokio::test]
async fn the_permit_of_a_dead_holder_is_taken_over_when_its_lease_expires() {
    let patient = patient();
    let test = TestEngine::new(&patient, 1).await.unwrap();
    let (slot, mutex) = (test.engine().states().global().slot::<LockRecord>("lock"), DurableMutex::default());
    let start = test.env().now();
    mutex.try_acquire(&slot, "dead", start, Some(Duration::from_secs(10))).await.unwrap();
    let (places, token) = test.complete(&patient, ()).await.unwrap();
    assert_eq!((places, token), (vec![0, 0, 0], 2), "at 0, 4 and 8 s; at 12 s it is over");
    // The former holder gets `false`, and takes nothing from the new holder.
    let now = test.env().now();
    assert!(!mutex.renew(&slot, "dead", now, None).await.unwrap());
    assert!(!mutex.release(&slot, "dead", now).await.unwrap());
    assert_eq!(slot.get().await.unwrap().unwrap().holders[0].token, 2);
}

#[tokio::test]
async fn a_dead_waiter_is_dropped_when_its_lease_expires() {
    let patient = patient();
    let test = TestEngine::new(&patient, 1).await.unwrap();
    let (slot, mutex) = (test.engine().states().global().slot::<LockRecord>("lock"), DurableMutex::default());
    let env = test.env();
    mutex.try_acquire(&slot, "holder", env.now(), Some(Duration::from_secs(15))).await.unwrap();
    mutex.try_acquire(&slot, "dead", env.now(), Some(Duration::from_secs(5))).await.unwrap();
    let (places, token) = test.complete(&patient, ()).await.unwrap();
    assert_eq!((places, token), (vec![1, 1, 0, 0], 2), "at 0, 4, 8 and 12 s; at 16 s it is free");
}

/// A workflow reads a slot that holds no lock record and gets an error. A replay returns the same error, even if the
/// slot was repaired meanwhile.
#[tokio::test]
async fn a_workflow_gets_an_error_for_a_value_that_is_no_record() {
    let told = workflow("told").run(async |ctx: Ctx, ()| {
        let (mutex, slot) = (DurableMutex::default(), ctx.state().global::<LockRecord>("lock"));
        let told = match mutex.try_acquire(&slot, ctx.id(), ctx.now().await, None).await {
            Err(error) => error.to_string(),
            Ok(attempt) => format!("{attempt:?}"),
        };
        ctx.sleep(HOUR).await?;
        Ok(told)
    });
    let test = TestEngine::new(&told, 1).await.unwrap();
    let raw = test.engine().states().global().slot::<Value>("lock");
    raw.set(json!("nonsense")).await.unwrap();
    let handle = test.engine().start(&told, ()).await.unwrap();
    for _ in 0..1000 {
        tokio::task::yield_now().await;
    }
    assert_eq!(test.engine().residents(), 0, "it sleeps");
    raw.delete().await.unwrap();
    let message = test.run(handle.result()).await.unwrap();
    assert!(message.starts_with("slot \"lock\" does not fit its type"), "{message}");
}
