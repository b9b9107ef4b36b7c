//! The queue: order, neighbours that fail, callers that go away, re-entry, and what watchers receive.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use latchwork::json;
use latchwork::state::{MutationError, StateError, States};
use latchwork::store::Store;
use parking_lot::Mutex;

use super::{both, states};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_mutators_run_one_at_a_time_in_the_order_they_came() {
    for container in both().await {
        let (ran, inside) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicUsize::new(0)));
        let mut calls = Vec::new();
        for number in 0..1000 {
            let (ran, inside) = (ran.clone(), inside.clone());
            let call = container.clone().mutation_timeout(None);
            let mut call = Box::pin(async move {
                call.atomic_state(move |state| {
                    let (ran, inside) = (ran.clone(), inside.clone());
                    async move {
                        assert_eq!(inside.fetch_add(1, Ordering::SeqCst), 0, "two at a time");
                        for _ in 0..fastrand::usize(..4) {
                            tokio::task::yield_now().await;
                        }
                        ran.lock().push(number);
                        inside.fetch_sub(1, Ordering::SeqCst);
                        let mut state = state.unwrap();
                        state["last"] = json!(number);
                        Ok::<_, ()>(Some(state))
                    }
                })
                .await
                .unwrap()
            });
            // The first poll puts the call into the queue.
            let first = std::future::poll_fn(|context| std::task::Poll::Ready(call.as_mut().poll(context))).await;
            calls.push((call, first));
        }
        for (number, (call, first)) in calls.into_iter().enumerate() {
            let changed = match first {
                std::task::Poll::Ready(changed) => changed,
                std::task::Poll::Pending => call.await,
            };
            assert_eq!(changed.value["last"], number, "of {}", container.name());
        }
        assert_eq!(*ran.lock(), (0..1000).collect::<Vec<_>>());
    }
}

/// Stands for a mutator with a bug between others without bugs: each caller gets its own answer.
#[tokio::test]
async fn errors_and_panics_of_one_do_not_disturb_its_neighbours() {
    for container in both().await {
        let calls = (0..30).map(|number| {
            let container = container.clone();
            async move {
                let mutated = container.atomic_state(move |state| {
                    assert!(number % 3 != 1, "mutator {number} panics");
                    async move {
                        tokio::task::yield_now().await;
                        assert!(number % 3 != 2 || number % 2 == 0, "mutator {number} panics later");
                        let mut state = state.unwrap();
                        state["sum"] = json!(state["sum"].as_i64().unwrap_or(0) + number);
                        if number % 5 == 0 { Err(number) } else { Ok(Some(state)) }
                    }
                });
                (number, mutated.await)
            }
        });
        let mut calls: tokio::task::JoinSet<_> = calls.collect();
        let mut sum = 0;
        while let Some(call) = calls.join_next().await {
            let (number, mutated) = call.unwrap();
            let panics = number % 3 == 1 || number % 3 == 2 && number % 2 == 1;
            match mutated {
                Ok(_) if !panics && number % 5 != 0 => sum += number,
                Err(MutationError::Refused(refused)) if !panics => assert_eq!((refused, number % 5), (number, 0)),
                Err(MutationError::State(StateError::Panicked { message, .. })) if panics => {
                    assert!(message.contains(&format!("mutator {number} panics")), "{message}");
                }
                other => panic!("{number}: {other:?}"),
            }
        }
        assert_eq!(container.get().await.unwrap().unwrap()["sum"], sum);
    }
}

#[tokio::test]
async fn a_caller_that_goes_away_before_its_turn_takes_its_mutation_with_it() {
    for container in both().await {
        let (release, gate) = tokio::sync::oneshot::channel::<()>();
        let gate = Arc::new(Mutex::new(Some(gate)));
        let blocking = tokio::spawn({
            let container = container.clone();
            async move {
                container
                    .atomic_state(move |state| {
                        let gate = gate.lock().take();
                        async move {
                            if let Some(gate) = gate {
                                gate.await.unwrap();
                            }
                            Ok::<_, ()>(state)
                        }
                    })
                    .await
            }
        });
        tokio::task::yield_now().await;
        tokio::task::yield_now().await;
        let gone = tokio::spawn({
            let container = container.clone();
            async move { container.inc_state("gone", 1).await }
        });
        let stays = tokio::spawn({
            let container = container.clone();
            async move { container.inc_state("stays", 1).await }
        });
        tokio::task::yield_now().await;
        gone.abort();
        assert!(gone.await.unwrap_err().is_cancelled());
        release.send(()).unwrap();
        blocking.await.unwrap().unwrap();
        stays.await.unwrap().unwrap();
        assert_eq!(container.get().await.unwrap().unwrap(), json!({"stays": 1}));
    }
}

/// A re-entry would wait for itself. It is found through calls, through other containers and through a second handle.
#[tokio::test]
async fn a_container_that_is_being_mutated_refuses_the_same_task_and_no_other() {
    let states = states().await;
    for container in [states.session("s"), states.target("t")] {
        let other = states.user("u");
        let (inner, between) = (container.clone().attempts(9), other.clone());
        let mutated = container.atomic_state(move |state| {
            let (inner, between) = (inner.clone(), between.clone());
            async move {
                let direct = inner.inc_state("n", 1).await.unwrap_err();
                assert!(matches!(direct, StateError::ReentrantMutation { .. }), "{direct}");
                // Reads, and changes of other containers, are no mutations of this one.
                inner.get().await.unwrap();
                let around = between.atomic_state(move |state| {
                    let inner = inner.clone();
                    async move {
                        let error = inner.set_state(json!({})).await.unwrap_err();
                        assert!(matches!(error, StateError::ReentrantMutation { .. }), "{error}");
                        let mut state = state.unwrap_or_else(|| json!({}));
                        state["nested"] = json!(true);
                        Ok::<_, ()>(Some(state))
                    }
                });
                around.await.unwrap();
                Ok::<_, ()>(state)
            }
        });
        assert!(!mutated.await.unwrap().changed);
        assert_eq!(other.get().await.unwrap().unwrap()["nested"], true);
        other.delete_state().await.unwrap();
        container.inc_state("n", 1).await.unwrap();
    }
}

#[tokio::test]
async fn a_change_that_changes_nothing_commits_nothing_and_says_so() {
    let states = states().await;
    let store = states.store().clone();
    let session = states.session("s");
    session.patch_state(json!({"a": {"b": 1}, "l": [1]})).await.unwrap();
    let (generation, (_, rev)) = (store.generation().await.unwrap(), session.read().await.unwrap());
    let unchanged = [
        session.patch_state(json!({"a": {"b": 1}})).await.unwrap(),
        session.patch_state(json!({"x": null})).await.unwrap(),
        session.inc_state("a.b", 0).await.unwrap(),
        session.set_state_record("a", "b", 1).await.unwrap(),
        session.delete_state_record("a", "c").await.unwrap(),
        session.set_state(json!({"a": {"b": 1}, "l": [1]})).await.unwrap(),
        session.atomic_state(|state| async move { Ok::<_, ()>(state) }).await.unwrap(),
    ];
    for changed in unchanged {
        assert!(!changed.changed && changed.rev == rev, "{changed:?}");
    }
    assert_eq!(store.generation().await.unwrap(), generation);
    assert!(session.inc_state("a.b", 1).await.unwrap().rev > rev);
}

#[tokio::test]
async fn watchers_receive_every_change_with_operation_path_and_delta() {
    let states = states().await;
    for container in [states.session("s"), states.sequencer("q")] {
        let mut watch = container.watch(states.store().generation().await.unwrap()).await.unwrap();
        container.patch_state(json!({"a": 1})).await.unwrap();
        container.inc_state("a", 2).await.unwrap();
        container.inc_state("a", 0).await.unwrap();
        container.push_state("l", "x").await.unwrap();
        container.set_state_record("r", "k", 7).await.unwrap();
        container.delete_state_record("r", "k").await.unwrap();
        container.atomic_state(|_| async { Ok::<_, ()>(Some(json!({"a": 9}))) }).await.unwrap();
        container.delete_state().await.unwrap();
        let expected = [
            ("patch_state", "", json!({"a": 1}), json!({"a": 1})),
            ("inc_state", "a", json!(2), json!({"a": 3})),
            ("push_state", "l", json!(["x"]), json!({"a": 3, "l": ["x"]})),
            ("set_state_record", "r", json!({"k": 7}), json!({"a": 3, "l": ["x"], "r": {"k": 7}})),
            ("delete_state_record", "r", json!({"k": null}), json!({"a": 3, "l": ["x"], "r": {}})),
            ("atomic_state", "", json!({"a": 9, "l": null, "r": null}), json!({"a": 9})),
            ("delete_state", "", json!(null), json!(null)),
        ];
        for (number, (operation, path, delta, state)) in (1..).zip(expected) {
            let change = watch.next().await.unwrap().unwrap();
            let [event] = &change.events[..] else { panic!("{change:?}") };
            assert_eq!((event.operation.as_str(), event.path.as_str(), &event.delta), (operation, path, &delta));
            assert_eq!((change.rev.0, change.state.unwrap_or_default()), (number, state));
        }
    }
}

/// Neighbours share commits; still nothing is lost, and the events count every mutation.
#[tokio::test]
async fn neighbours_are_combined_and_watchers_receive_each_of_them() {
    let home = tempfile::tempdir().unwrap();
    let states = States::open(home.path().join("data")).await.unwrap();
    let session = states.session("s");
    let before = states.store().generation().await.unwrap();
    let calls = (0..500).map(|_| {
        let session = session.clone();
        async move { session.inc_state("n", 1).await.unwrap().value.as_u64().unwrap() }
    });
    let mut answers = calls.collect::<tokio::task::JoinSet<_>>().join_all().await;
    answers.sort();
    assert_eq!(answers, (1..=500).collect::<Vec<_>>(), "each caller has its own answer");
    let after = states.store().generation().await.unwrap();
    assert!(after.0 - before.0 < 250, "{} commits for 500 increments", after.0 - before.0);
    let mut watch = session.watch(before).await.unwrap();
    let mut told = 0;
    while told < 500 {
        let change = watch.next().await.unwrap().unwrap();
        told += change.events.iter().map(|event| event.times).sum::<u64>();
        assert_eq!(change.state.unwrap()["n"], told);
    }
}

#[tokio::test]
async fn invalid_values_are_refused_with_their_place() {
    let store = Store::memory().await.unwrap();
    let states = States::on(&store).await.unwrap();
    let session = states.session("s");
    session.patch_state(json!({"text": "x", "list": [], "record": {}})).await.unwrap();
    let before = store.generation().await.unwrap();
    let deep = (0..200).fold(json!(1), |inner, _| json!([inner]));
    let refused = [
        (session.inc_state("text", 1).await, "\"text\" of session \"s\" is a string; only a number"),
        (session.inc_state("", 1).await, "the state of session \"s\" is an object; only a number"),
        (session.push_state("text", 1).await, "\"text\" of session \"s\" is a string; only a list"),
        (session.set_state_record("list", "k", 1).await, "\"list\" of session \"s\" is a list; it must be an object"),
        (session.patch_state(7).await, "the patch of session \"s\" is a number; it must be an object"),
        (session.set_state(f64::NAN).await, "a value for session \"s\":"),
        (session.set_state(deep).await, "a value for session \"s\":"),
        (session.inc_state("a..b", 1).await, "\"a..b\" is not a path:"),
        (states.session("").set_state(1).await, "\"\" cannot be the name of a container or slot: it is empty"),
        (states.user(&"x".repeat(513)).set_state(1).await, "it is longer than 512 bytes"),
        (session.set_state("x".repeat(5 << 20)).await, "takes 5242884 bytes; the limit is 4194304"),
    ];
    for (answer, message) in refused {
        let error = answer.unwrap_err();
        assert!(error.to_string().contains(message), "{error}");
    }
    assert_eq!(store.generation().await.unwrap(), before);
}
