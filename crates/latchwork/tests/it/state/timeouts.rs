//! The budget of a mutation, on virtual time: the error must say what really becomes of the mutation.

use std::sync::Arc;
use std::time::Duration;

use latchwork::json;
use latchwork::state::{Container, MutationError, StateError, States, TimeoutOutcome};
use latchwork::store::{Env, Limits, Store, VirtualClock};

async fn states() -> (States, Arc<VirtualClock>) {
    let (env, clock) = Env::seeded(1);
    let store = Store::memory_with(env, Limits::default()).await.unwrap();
    (States::on(&store).await.unwrap(), clock)
}

/// A mutation that takes so long, on the virtual clock.
fn slow(container: &Container, seconds: u64) -> tokio::task::JoinHandle<Result<(), MutationError<()>>> {
    let container = container.clone();
    tokio::spawn(async move {
        let env = container.env().clone();
        let mutated = container.atomic_state(move |state| {
            let sleep = env.sleep(Duration::from_secs(seconds));
            async move {
                sleep.await;
                let mut state = state.unwrap();
                state["slow"] = json!(true);
                Ok(Some(state))
            }
        });
        mutated.await.map(|_| ())
    })
}

async fn settle() {
    for _ in 0..50 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn a_mutation_that_has_not_started_is_withdrawn_and_never_applied() {
    let (states, clock) = states().await;
    for container in [states.session("s"), states.sequencer("q")] {
        let blocking = slow(&container.clone().mutation_timeout(None), 100);
        settle().await;
        let waiting = tokio::spawn({
            let container = container.clone().mutation_timeout(Duration::from_secs(10));
            async move { container.inc_state("n", 1).await }
        });
        settle().await;
        clock.advance(Duration::from_secs(10));
        match waiting.await.unwrap().unwrap_err() {
            StateError::ScopeMutationTimeout { waited, ran, outcome, .. } => {
                assert_eq!((waited, ran), (Duration::from_secs(10), Duration::ZERO));
                assert_eq!(outcome, TimeoutOutcome::Withdrawn);
            }
            other => panic!("{other}"),
        }
        clock.advance(Duration::from_secs(90));
        blocking.await.unwrap().unwrap();
        settle().await;
        assert_eq!(container.get().await.unwrap().unwrap(), json!({"slow": true}));
    }
}

#[tokio::test]
async fn a_mutation_that_has_started_may_still_be_applied_and_is() {
    let (states, clock) = states().await;
    for container in [states.session("s"), states.sequencer("q")] {
        let first = slow(&container.clone().mutation_timeout(None), 4);
        settle().await;
        let second = slow(&container, 60);
        settle().await;
        clock.advance(Duration::from_secs(4));
        first.await.unwrap().unwrap();
        settle().await;
        clock.advance(Duration::from_secs(26));
        match second.await.unwrap().unwrap_err() {
            MutationError::State(StateError::ScopeMutationTimeout { waited, ran, outcome, .. }) => {
                assert_eq!((waited, ran), (Duration::from_secs(4), Duration::from_secs(26)));
                assert_eq!(outcome, TimeoutOutcome::MayCommit);
            }
            other => panic!("{other:?}"),
        }
        let (_, before) = container.read().await.unwrap();
        clock.advance(Duration::from_secs(34));
        settle().await;
        // The first mutation set the same value, so the second changes nothing; it still went through the queue.
        assert_eq!(container.read().await.unwrap().1, before);
        container.inc_state("after", 1).await.unwrap();
    }
}

/// Stands for a double increment after a retry: the caller learns that the change may be applied, sends it again, and
/// it is applied once.
#[tokio::test]
async fn a_retry_under_the_same_idempotency_key_is_applied_once() {
    let (states, clock) = states().await;
    let session = states.session("s");
    let count = |session: Container| {
        tokio::spawn(async move {
            let env = session.env().clone();
            let session = session.once("order-7");
            let mutated = session.atomic_state(move |state| {
                let sleep = env.sleep(Duration::from_secs(40));
                async move {
                    sleep.await;
                    let mut state = state.unwrap();
                    state["n"] = json!(state["n"].as_u64().unwrap_or(0) + 1);
                    Ok::<_, ()>(Some(state))
                }
            });
            mutated.await
        })
    };
    let first = count(session.clone());
    settle().await;
    clock.advance(Duration::from_secs(30));
    let outcome = first.await.unwrap();
    assert!(matches!(
        outcome,
        Err(MutationError::State(StateError::ScopeMutationTimeout { outcome: TimeoutOutcome::MayCommit, .. }))
    ));
    let again = count(session.clone());
    settle().await;
    clock.advance(Duration::from_secs(10));
    let answer = again.await.unwrap().unwrap();
    assert_eq!((answer.value["n"].as_u64(), answer.changed), (Some(1), true));
    let later = count(session.clone()).await.unwrap().unwrap();
    assert!(later.repeated && later.value == answer.value && later.rev == answer.rev, "the same answer each time");
    assert_eq!(session.get().await.unwrap().unwrap(), json!({"n": 1}));
    let other = session.clone().once("order-7").inc_state("n", 1).await.unwrap_err();
    assert!(matches!(other, StateError::OnceReused { .. }), "{other}");
    let first = session.clone().once("k").inc_state("n", 1).await.unwrap();
    let again = session.clone().once("k").inc_state("n", 1).await.unwrap();
    assert!(!first.repeated && again.repeated && again.value == first.value);
    for other in [session.clone().once("k").inc_state("n", 2), session.clone().once("k").inc_state("m", 1)] {
        assert!(matches!(other.await, Err(StateError::OnceReused { .. })), "other arguments");
    }
}

/// Answers are kept for a day and then removed, a few with each new answer.
#[tokio::test]
async fn idempotency_keys_are_forgotten_after_a_day() {
    let (states, clock) = states().await;
    let session = states.session("s");
    let once = |key: &str| session.clone().once(key);
    for number in 0..20 {
        once(&format!("k{number}")).inc_state("n", 1).await.unwrap();
    }
    clock.advance(Duration::from_secs(24 * 3600 - 1));
    assert_eq!(once("k0").inc_state("n", 1).await.unwrap().value, json!(1), "still known");
    clock.advance(Duration::from_secs(2));
    let keys = states.store().spaces().await.unwrap().into_iter().find(|space| space.name() == "state.once").unwrap();
    for number in 0..5 {
        once(&format!("new{number}")).inc_state("n", 1).await.unwrap();
    }
    let view = states.store().view().await.unwrap();
    let left = view.scan(&keys.all(), latchwork::store::Order::Ascending, 1000).await.unwrap().len();
    assert_eq!(left, 5 * 2, "only the new ones");
    assert_eq!(once("k0").inc_state("n", 1).await.unwrap().value, json!(26), "applied again");
}
