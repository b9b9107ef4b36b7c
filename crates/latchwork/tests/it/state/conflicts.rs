//! Two handles with queues of their own on one store: like two processes, they can only compare and swap.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use latchwork::json;
use latchwork::state::{MutationError, StateError, States};
use latchwork::store::{Env, Limits, Rev, Store};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_handles_that_increment_one_counter_lose_nothing() {
    let home = tempfile::tempdir().unwrap();
    for store in [Store::memory().await.unwrap(), Store::open(home.path().join("data")).await.unwrap()] {
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..2 {
            let states = States::on(&store).await.unwrap();
            for task in 0..20 {
                let session = states.session("s").attempts(1000).pause(Duration::from_micros(100));
                tasks.spawn(async move {
                    for _ in 0..25 {
                        if task % 2 == 0 {
                            session.inc_state("n", 1).await.unwrap();
                        } else {
                            let counted = session.atomic_state(|state| async move {
                                let mut state = state.unwrap();
                                state["n"] = json!(state["n"].as_u64().unwrap_or(0) + 1);
                                tokio::task::yield_now().await;
                                Ok::<_, ()>(Some(state))
                            });
                            counted.await.unwrap();
                        }
                    }
                });
            }
        }
        tasks.join_all().await;
        let states = States::on(&store).await.unwrap();
        assert_eq!(states.session("s").get().await.unwrap().unwrap(), json!({"n": 1000}));
    }
}

/// Conflict injection: inside the mutator, another handle changes the container, so many times.
#[tokio::test]
async fn the_retry_schedule_is_as_promised_and_the_mutator_sees_fresh_state() {
    for conflicts in 0..6u32 {
        let (env, clock) = Env::seeded(u64::from(conflicts));
        let store = Store::memory_with(env.clone(), Limits::default()).await.unwrap();
        let (ours, theirs) = (States::on(&store).await.unwrap(), States::on(&store).await.unwrap());
        let ran = Arc::new(AtomicU32::new(0));
        let call = tokio::spawn({
            let (session, intruder, ran) = (ours.session("s"), theirs.session("s"), ran.clone());
            async move {
                let mutated = session.atomic_state(move |state| {
                    let (intruder, run) = (intruder.clone(), ran.fetch_add(1, Ordering::SeqCst));
                    async move {
                        let mut state = state.unwrap();
                        assert_eq!(state["theirs"].as_u64().unwrap_or(0), u64::from(run), "not fresh");
                        if run < conflicts {
                            // Another process, so this is not a re-entry.
                            tokio::spawn(async move { intruder.inc_state("theirs", 1).await }).await.unwrap().unwrap();
                        }
                        state["ours"] = json!(true);
                        Ok::<_, ()>(Some(state))
                    }
                });
                mutated.await
            }
        });
        let mut pauses = Vec::new();
        while !call.is_finished() {
            for _ in 0..50 {
                tokio::task::yield_now().await;
            }
            // The budgets end much later; a near deadline is a pause between attempts.
            if let Some(next) = clock.next_deadline().map(|next| next - env.monotonic())
                && next < Duration::from_secs(1)
            {
                pauses.push(next);
                clock.advance(next);
            }
        }
        let most = [10, 20, 40].map(Duration::from_millis);
        assert_eq!(pauses.len(), conflicts.min(3) as usize);
        for (pause, most) in pauses.iter().zip(most) {
            assert!(*pause <= most && *pause >= most / 2, "{pauses:?}");
        }
        match call.await.unwrap() {
            Ok(changed) => assert!(conflicts < 4 && changed.rev == Rev(u64::from(conflicts) + 1)),
            Err(MutationError::State(StateError::ConcurrentModification { attempts, expected, actual, .. })) => {
                assert!(conflicts >= 4 && attempts == 4);
                assert_eq!((expected, actual), (Some(Rev(3)), Some(Rev(4))));
            }
            other => panic!("{other:?}"),
        }
    }
}

/// A change is never decided on a stale cache. The handle has just written, so it knows the state; then another handle
/// changes the state. A change that would be a no-op on the known state must be decided on the new state.
#[tokio::test]
async fn a_change_without_effect_is_decided_on_fresh_state() {
    let store = Store::memory().await.unwrap();
    let (ours, theirs) = (States::on(&store).await.unwrap(), States::on(&store).await.unwrap());
    let (session, intruder) = (ours.session("s"), theirs.session("s"));
    let (go, gate) = tokio::sync::oneshot::channel::<()>();
    let gate = Arc::new(parking_lot::Mutex::new(Some(gate)));
    // Keeps the queue and its cached state alive while the other handle writes.
    let first = tokio::spawn({
        let session = session.clone();
        async move {
            session.set_state(json!({"n": 1})).await.unwrap();
            let mutated = session.atomic_state(move |state| {
                let gate = gate.lock().take();
                async move {
                    if let Some(gate) = gate {
                        gate.await.unwrap();
                    }
                    Ok::<_, ()>(state)
                }
            });
            mutated.await.unwrap()
        }
    });
    while intruder.get().await.unwrap().unwrap() != json!({"n": 1}) {
        tokio::task::yield_now().await;
    }
    intruder.set_state(json!({"n": 2})).await.unwrap();
    let second = tokio::spawn({
        let session = session.clone();
        async move { session.set_state(json!({"n": 1})).await.unwrap() }
    });
    tokio::task::yield_now().await;
    go.send(()).unwrap();
    first.await.unwrap();
    assert!(second.await.unwrap().changed, "the state was 2 by then");
    assert_eq!(session.get().await.unwrap().unwrap(), json!({"n": 1}));
}

#[tokio::test]
async fn refusals_of_a_mutator_are_about_fresh_state_too() {
    let store = Store::memory().await.unwrap();
    let (ours, theirs) = (States::on(&store).await.unwrap(), States::on(&store).await.unwrap());
    ours.session("s").set_state(json!({"balance": 5})).await.unwrap();
    let intruder = theirs.session("s");
    let ran = Arc::new(AtomicU32::new(0));
    let session = ours.session("s");
    let paid = session.atomic_state(move |state| {
        let (intruder, run) = (intruder.clone(), ran.fetch_add(1, Ordering::SeqCst));
        async move {
            let balance = state.unwrap()["balance"].as_i64().unwrap();
            if run == 0 {
                tokio::spawn(async move { intruder.set_state(json!({"balance": 50})).await }).await.unwrap().unwrap();
            }
            if balance < 10 { Err("not enough") } else { Ok(Some(json!({"balance": balance - 10}))) }
        }
    });
    assert_eq!(paid.await.unwrap().value, json!({"balance": 40}));
}

/// A caller that loses the race again and again keeps trying at a steady pace. With pauses that always double, it
/// would hardly try at all, while newer callers succeed at once.
#[tokio::test]
async fn a_caller_that_loses_many_races_is_not_left_behind() {
    const OUTRUN: u32 = 40;
    for (pause, longest) in [(10, 40), (1000, 1000)] {
        let (env, clock) = Env::seeded(1);
        let store = Store::memory_with(env, Limits::default()).await.unwrap();
        let other = States::on(&store).await.unwrap().session("s");
        let session = States::on(&store).await.unwrap().session("s").mutation_timeout(None);
        let session = session.attempts(u32::MAX).pause(Duration::from_millis(pause));
        let runs = Arc::new(AtomicU32::new(0));
        let outrun = tokio::spawn({
            let runs = runs.clone();
            async move {
                let mutated = session.atomic_state(move |state| {
                    let (other, run) = (other.clone(), runs.fetch_add(1, Ordering::SeqCst));
                    async move {
                        if run < OUTRUN {
                            // A separate task stands for another process.
                            let faster = tokio::spawn(async move { other.inc_state("n", 1).await });
                            faster.await.unwrap().unwrap();
                        }
                        let mut state = state.unwrap_or_else(|| json!({}));
                        state["through"] = json!(true);
                        Ok::<_, ()>(Some(state))
                    }
                });
                mutated.await.map(drop).unwrap();
            }
        });
        let mut waited = 0;
        while !outrun.is_finished() {
            for _ in 0..20 {
                tokio::task::yield_now().await;
            }
            clock.advance(Duration::from_millis(1));
            waited += 1;
            assert!(waited < u64::from(OUTRUN) * longest, "it has not succeeded after {runs:?} runs");
        }
        assert_eq!(runs.load(Ordering::SeqCst), OUTRUN + 1);
        assert!(waited > u64::from(OUTRUN) * pause / 4, "{waited} ms");
    }
}
