//! Former bugs of containers and slots.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use latchwork::state::{Container, MutationError, StateError, States};
use latchwork::store::{Limits, Store};
use latchwork::{Value, json};

use super::{both, states};

/// Polls a call for the first time, which puts it into its queue.
async fn queued<T>(call: impl Future<Output = T> + Send + 'static) -> tokio::task::JoinHandle<T>
where
    T: Send + 'static,
{
    let task = tokio::spawn(call);
    tokio::task::yield_now().await;
    task
}

/// Keeps a container's queue busy until the test lets it continue.
async fn blocked(container: &Container) -> (tokio::sync::oneshot::Sender<()>, tokio::task::JoinHandle<()>) {
    let (go, gate) = tokio::sync::oneshot::channel::<()>();
    let gate = Arc::new(parking_lot::Mutex::new(Some(gate)));
    let container = container.clone();
    let blocking = queued(async move {
        let mutated = container.atomic_state(move |state| {
            let gate = gate.lock().take();
            async move {
                if let Some(gate) = gate {
                    gate.await.unwrap();
                }
                Ok::<_, ()>(state)
            }
        });
        mutated.await.unwrap();
    });
    let blocking = blocking.await;
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    (go, blocking)
}

/// The race: a queue that has just become empty ends while the next job comes. No caller is given up, and no job is
/// lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_queue_that_ends_takes_no_job_with_it() {
    for container in both().await {
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..4 {
            let container = container.clone();
            tasks.spawn(async move {
                for _ in 0..20_000 {
                    let counted = container.atomic_state(|state| async move {
                        let mut state = state.unwrap();
                        state["n"] = json!(state["n"].as_u64().unwrap_or(0) + 1);
                        Ok::<_, ()>(Some(state))
                    });
                    counted.await.unwrap();
                }
            });
        }
        tasks.join_all().await;
        assert_eq!(container.get().await.unwrap().unwrap()["n"], 80_000, "of {}", container.name());
    }
}

struct PanicsWhenDropped;

impl Drop for PanicsWhenDropped {
    fn drop(&mut self) {
        panic!("dropped");
    }
}

struct Ready {
    state: Option<Value>,
    _held: Option<PanicsWhenDropped>,
}

impl Future for Ready {
    type Output = Result<Option<Value>, ()>;

    fn poll(mut self: Pin<&mut Self>, _: &mut std::task::Context<'_>) -> std::task::Poll<Self::Output> {
        std::task::Poll::Ready(Ok(self.state.take()))
    }
}

#[derive(Debug, Clone, Copy)]
enum Dropped {
    Mutator,
    Future,
    Withdrawn,
}

/// A panic in the drop of a mutator, or of its future, affects that mutator only.
#[tokio::test]
async fn panics_in_drops_do_not_disturb_the_neighbours() {
    for dropped in [Dropped::Mutator, Dropped::Future, Dropped::Withdrawn] {
        for container in both().await {
            let (go, blocking) = blocked(&container).await;
            let before = queued({
                let container = container.clone();
                async move { container.inc_state("n", 1).await }
            });
            let before = before.await;
            let wrong = queued({
                let (container, held) = (container.clone(), PanicsWhenDropped);
                async move {
                    let mut held = Some(held);
                    if let Dropped::Future = dropped {
                        let mutated = container.atomic_state(move |state| Ready { state, _held: held.take() }).await;
                        return drop(mutated);
                    }
                    let mutated = container.atomic_state(move |state| {
                        let _ = &held;
                        async move { Ok::<_, ()>(state) }
                    });
                    drop(mutated.await);
                }
            });
            let wrong = wrong.await;
            let after = queued({
                let container = container.clone();
                async move { container.inc_state("n", 1).await }
            });
            let after = after.await;
            if let Dropped::Withdrawn = dropped {
                wrong.abort();
            }
            tokio::task::yield_now().await;
            go.send(()).unwrap();
            let name = container.name();
            blocking.await.unwrap();
            before.await.unwrap().unwrap_or_else(|error| panic!("{dropped:?} of {name}, before: {error}"));
            after.await.unwrap().unwrap_or_else(|error| panic!("{dropped:?} of {name}, after: {error}"));
            assert_eq!(container.get().await.unwrap().unwrap(), json!({"n": 2}), "{dropped:?} of {name}");
        }
    }
}

/// A mutator that awaits has read the state of the mutator before it. If that state is refused, the later mutator has
/// read a state that never existed, so it must run again.
#[tokio::test]
async fn a_refused_large_state_is_seen_by_no_mutator() {
    let states = states().await;
    let session = states.session("s");
    let (go, blocking) = blocked(&session).await;
    let large = queued({
        let session = session.clone();
        async move { session.patch_state(json!({"large": "x".repeat(5 << 20), "leaked": true})).await }
    });
    let large = large.await;
    let waits = queued({
        let session = session.clone();
        async move {
            let mutated = session.atomic_state(|state| async move {
                tokio::task::yield_now().await;
                let mut state = state.unwrap();
                state.as_object_mut().unwrap().remove("large");
                state["n"] = json!(1);
                Ok::<_, ()>(Some(state))
            });
            mutated.await
        }
    });
    let waits = waits.await;
    go.send(()).unwrap();
    blocking.await.unwrap();
    assert!(matches!(large.await.unwrap().unwrap_err(), StateError::TooLarge { .. }));
    waits.await.unwrap().unwrap();
    assert_eq!(session.get().await.unwrap().unwrap(), json!({"n": 1}));
}

/// Each change fits alone; together they are more than a commit holds.
#[tokio::test]
async fn neighbours_that_are_too_much_for_one_commit_are_committed_apart() {
    let session = states().await.session("s");
    let (go, blocking) = blocked(&session).await;
    let mut calls = Vec::new();
    for number in 0..10 {
        let session = session.clone();
        calls.push(
            queued(async move {
                let text = format!("{number}").repeat(1 << 20);
                session.set_state(json!({ "text": text })).await.map(|changed| changed.changed)
            })
            .await,
        );
    }
    go.send(()).unwrap();
    blocking.await.unwrap();
    for call in calls {
        assert!(call.await.unwrap().unwrap());
    }
    assert_eq!(session.get().await.unwrap().unwrap()["text"], "9".repeat(1 << 20));
}

/// The same with answers, which are stored beside the change.
#[tokio::test]
async fn answers_that_are_too_much_for_one_commit_are_committed_apart() {
    let session = states().await.session("s");
    session.set_state(json!({"text": "x".repeat(1 << 20)})).await.unwrap();
    let (go, blocking) = blocked(&session).await;
    let mut calls = Vec::new();
    for number in 0..12 {
        let session = session.clone().once(format!("{number}"));
        calls.push(queued(async move { session.patch_state(json!({ "n": number })).await }).await);
    }
    go.send(()).unwrap();
    blocking.await.unwrap();
    for call in calls {
        call.await.unwrap().unwrap();
    }
    assert_eq!(session.get().await.unwrap().unwrap()["n"], 11);
}

/// A key that is too long is an error of its caller only.
#[tokio::test]
async fn an_idempotency_key_that_is_too_long_does_not_disturb_the_neighbours() {
    let limit = Limits::default().key_bytes;
    for length in limit - 60..limit + 10 {
        let session = states().await.session("s");
        let (go, blocking) = blocked(&session).await;
        let counts = |session: Container| queued(async move { session.inc_state("n", 1).await });
        let before = counts(session.clone()).await;
        let long = counts(session.clone().once("k".repeat(length))).await;
        let after = counts(session.clone()).await;
        go.send(()).unwrap();
        blocking.await.unwrap();
        let applied = 2 + u64::from(long.await.unwrap().is_ok());
        before.await.unwrap().unwrap_or_else(|error| panic!("{length}, before: {error}"));
        after.await.unwrap().unwrap_or_else(|error| panic!("{length}, after: {error}"));
        assert_eq!(session.get().await.unwrap().unwrap()["n"], applied);
    }
}

fn nested(depth: usize) -> Value {
    (0..depth).fold(json!(1), |inner, _| json!({ "a": inner }))
}

/// If a container may hold a value, an answer and an event may hold it as well, though they wrap it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn answers_and_events_are_as_deep_as_states() {
    let states = states().await;
    for depth in [100, 120, 124, 127, 128] {
        let session = states.session(&format!("{depth}"));
        let mut watch = session.watch(states.store().generation().await.unwrap()).await.unwrap();
        let first = session.clone().once("k").set_state(nested(depth)).await.unwrap();
        let named = session.clone().once("k");
        let again = named.set_state(nested(depth));
        let again = tokio::time::timeout(Duration::from_secs(5), again).await.expect("it hangs").unwrap();
        assert_eq!((again.value, again.rev), (first.value, first.rev));
        let change = watch.next().await.unwrap().unwrap();
        assert_eq!(change.events.len(), 1, "at depth {depth}");
        assert_eq!(change.events[0].delta, nested(depth));
    }
}

/// No operation leads to a state that could not be set.
#[tokio::test]
async fn a_path_makes_no_state_that_is_nested_too_deeply() {
    let path = |depth: usize| vec!["a"; depth].join(".");
    for container in both().await {
        container.inc_state(&path(128), 1).await.unwrap();
        container.delete_state().await.unwrap();
        let refused = [
            container.inc_state(&path(129), 1).await,
            container.push_state(&path(128), 1).await,
            container.set_state_record(&path(100), "a", nested(100)).await,
            container.inc_state(&path(3000), 1).await,
        ];
        for refused in refused {
            assert!(matches!(refused, Err(StateError::Value { .. })), "{:?}", refused.map(|changed| changed.rev));
        }
        assert_eq!(container.get().await.unwrap(), None);
    }
}

/// Containers of the same name in two stores are different containers.
#[tokio::test]
async fn a_container_of_the_same_name_in_another_store_is_another_container() {
    let (here, there) = (states().await.session("s"), states().await.session("s"));
    let mutated = here.atomic_state(move |state| {
        let there = there.clone();
        async move { there.inc_state("n", 1).await.map(|_| state) }
    });
    assert!(mutated.await.is_ok());
}

/// An error means that nothing was written; a slot never holds a value that does not fit its type.
#[tokio::test]
async fn a_slot_is_never_given_what_does_not_fit_its_type() {
    let states = states().await;
    let small = states.global().slot::<u8>("small");
    small.set(250).await.unwrap();
    assert!(matches!(small.increment(10).await, Err(StateError::Mismatch { .. })));
    assert!(matches!(small.increment(-251).await, Err(StateError::Mismatch { .. })));
    assert_eq!(small.get().await.unwrap(), Some(250));
    let list = states.global().slot::<Vec<u8>>("list");
    list.append(1).await.unwrap();
    assert_eq!(list.get().await.unwrap(), Some(vec![1]));
    let object = states.global().slot::<std::collections::BTreeMap<String, u8>>("object");
    object.merge(json!({"a": 1})).await.unwrap();
    assert!(object.merge(json!({"a": "x"})).await.is_err());
    assert!(object.merge(7).await.is_err());
    assert_eq!(object.get().await.unwrap().unwrap().len(), 1);
}

#[tokio::test]
async fn a_slot_that_is_set_again_under_a_key_answers_the_same() {
    let slot = states().await.global().slot::<u8>("slot");
    let first = slot.clone().once("k").set(1).await.unwrap();
    let again = slot.clone().once("k").set(1).await.unwrap();
    assert!(again.repeated && (again.value, again.rev) == (first.value, first.rev));
    assert!(matches!(slot.once("k").set(2).await, Err(StateError::OnceReused { .. })));
}

/// A set counts as a write, even of the value that would have been read anyway.
#[tokio::test]
async fn a_slot_that_was_set_or_deleted_reads_as_no_initial_value_any_more() {
    let slots = states().await.global();
    slots.slot::<u8>("a").initial(1).set(1).await.unwrap();
    assert_eq!(slots.slot::<u8>("a").initial(2).get().await.unwrap(), Some(1));
    slots.slot::<u8>("b").delete().await.unwrap();
    assert_eq!(slots.slot::<u8>("b").initial(2).get().await.unwrap(), None);
}

/// "Its defaults are the initial state, if none is given."
#[tokio::test]
async fn a_given_initial_state_goes_before_the_defaults_of_a_schema() {
    let states = states().await;
    let schema = json!({"properties": {"n": {"default": 1}}});
    for user in [
        states.user("u").initial(json!({"n": 5})).schema(&schema),
        states.user("u").schema(&schema).initial(json!({"n": 5})),
    ] {
        assert_eq!(user.get().await.unwrap().unwrap(), json!({"n": 5}));
    }
    assert_eq!(states.user("u").schema(&schema).get().await.unwrap().unwrap(), json!({"n": 1}));
}

/// A mutation that is too large costs its neighbours a few more runs, not as many as there are neighbours.
#[tokio::test]
async fn neighbours_of_a_too_large_mutation_are_run_a_few_times_only() {
    let session = states().await.session("s");
    let (go, blocking) = blocked(&session).await;
    let runs = Arc::new(AtomicU32::new(0));
    let mut calls = Vec::new();
    for number in 0..256 {
        let (session, runs) = (session.clone(), runs.clone());
        calls.push(
            queued(async move {
                let mutated = session.atomic_state(move |state| {
                    runs.fetch_add(1, Ordering::SeqCst);
                    let mut state = state.unwrap();
                    state["n"] = json!(number);
                    if number == 255 {
                        state["large"] = json!("x".repeat(5 << 20));
                    }
                    std::future::ready(Ok::<_, ()>(Some(state)))
                });
                mutated.await.map(|_| ())
            })
            .await,
        );
    }
    go.send(()).unwrap();
    blocking.await.unwrap();
    let mut failed = 0;
    for call in calls {
        match call.await.unwrap() {
            Ok(()) => {}
            Err(MutationError::State(StateError::TooLarge { .. })) => failed += 1,
            Err(error) => panic!("{error:?}"),
        }
    }
    assert_eq!((failed, session.get().await.unwrap().unwrap()), (1, json!({"n": 254})));
    let runs = runs.load(Ordering::SeqCst);
    assert!(runs < 256 * 10, "{runs} runs of 256 mutators");
}

/// Two handles send the same mutation, and one is faster each time: both get the same answer, whatever their budget.
#[tokio::test]
async fn the_same_key_through_two_handles_at_once_is_applied_once() {
    fn count(session: &Container, faster: Option<Container>) -> impl Future<Output = Value> + Send + 'static {
        let session = session.clone().attempts(1).once("k");
        async move {
            let counted = session.atomic_state(move |state| {
                let faster = faster.clone();
                async move {
                    if let Some(faster) = faster {
                        tokio::spawn(Box::pin(count(&faster, None)) as Pin<Box<dyn Future<Output = _> + Send>>)
                            .await
                            .unwrap();
                    }
                    let mut state = state.unwrap();
                    state["n"] = json!(state["n"].as_u64().unwrap_or(0) + 1);
                    Ok::<_, ()>(Some(state))
                }
            });
            counted.await.unwrap().value
        }
    }
    let store = Store::memory().await.unwrap();
    let [ours, theirs] = [States::on(&store).await.unwrap(), States::on(&store).await.unwrap()];
    let answer = count(&ours.session("s"), Some(theirs.session("s"))).await;
    assert_eq!(answer, json!({"n": 1}));
    assert_eq!(ours.session("s").get().await.unwrap().unwrap(), answer);
}
