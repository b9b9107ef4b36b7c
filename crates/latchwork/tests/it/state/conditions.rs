//! Changes under a condition: at a rev, or of a container that has no state.

use futures_util::future::join_all;
use latchwork::json;
use latchwork::state::{Container, StateError, States};
use latchwork::store::{ErrorKind, Rev, Store};

use super::{both, states};

#[tokio::test]
async fn a_change_at_a_rev_is_made_only_at_that_rev() {
    for container in both().await {
        let (_, rev) = container.read().await.unwrap();
        assert_eq!(rev, 0, "nothing was ever written");
        let first = container.clone().if_rev(rev).set_state(json!({"n": 1})).await.unwrap();
        assert_eq!(first.rev, 1);
        let late = container.clone().if_rev(rev).inc_state("n", 1).await.unwrap_err();
        assert!(
            matches!(late, StateError::RevisionConflict { expected: Rev(0), actual: Rev(1), .. })
                && late.kind() == ErrorKind::Conflict,
            "{late}"
        );
        let early = container.clone().if_rev(7).delete_state().await.unwrap_err();
        assert!(matches!(early, StateError::RevisionConflict { expected: Rev(7), actual: Rev(1), .. }), "{early}");
        let ran = container.clone().if_rev(0).atomic_state(|_| async { Err::<_, &str>("it was run") }).await;
        assert!(ran.unwrap_err().to_string().contains("is at rev 1, not at 0"));
        assert_eq!(container.get().await.unwrap(), Some(json!({"n": 1})));
        let second = container.clone().if_rev(first.rev).inc_state("n", 1).await.unwrap();
        assert_eq!((second.value, second.rev), (json!(2), Rev(2)));
    }
}

#[tokio::test]
async fn a_change_of_an_absent_container_is_made_once() {
    for container in both().await {
        container.clone().if_absent().set_state(json!({"by": "first"})).await.unwrap();
        let late = container.clone().if_absent().set_state(json!({"by": "second"})).await.unwrap_err();
        assert!(matches!(late, StateError::AlreadyExists { rev: Rev(1), .. }), "{late}");
        container.delete_state().await.unwrap();
        container.clone().if_absent().set_state(json!({"by": "third"})).await.unwrap();
        assert_eq!(container.get().await.unwrap(), Some(json!({"by": "third"})));
    }
    let slot = states().await.global().slot::<u64>("n").initial(7);
    assert_eq!(slot.clone().if_absent().increment(1).await.unwrap().value, 8, "an initial value is not written");
    assert!(slot.clone().if_absent().set(9).await.is_err());
    let (value, rev) = slot.read().await.unwrap();
    assert_eq!((value, rev), (Some(8), Rev(1)));
    assert_eq!(slot.clone().if_rev(rev).set(9).await.unwrap().rev, 2);
}

/// Of callers with the same rev, one makes its change; callers without a condition are not affected.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn callers_that_share_a_commit_are_not_refused_with_a_neighbour() {
    for round in 0..50 {
        let states = states().await;
        let session = || states.session("s");
        session().set_state(json!({"n": 0, "won": 0})).await.unwrap();
        let rev = session().read().await.unwrap().1;
        let plain = (0..20).map(|_| tokio::spawn(session().inc_state("n", 1)));
        let bound = (0..20).map(|_| tokio::spawn(session().if_rev(rev).inc_state("won", 1)));
        let (mut plain, mut bound): (Vec<_>, Vec<_>) = (plain.collect(), bound.collect());
        if round % 2 == 0 {
            std::mem::swap(&mut plain, &mut bound);
        }
        let all = join_all(plain.into_iter().chain(bound)).await;
        let refused = all.into_iter().filter_map(|done| done.unwrap().err()).collect::<Vec<_>>();
        for error in &refused {
            let is_conflict = matches!(error, StateError::RevisionConflict { expected, actual, .. }
                if *expected == rev && *actual > rev);
            assert!(is_conflict, "{error}");
        }
        let state = session().get().await.unwrap().unwrap();
        assert_eq!(state["n"], json!(20), "every caller without a condition was served");
        let won = state["won"].as_u64().unwrap();
        assert!(won <= 1 && refused.len() as u64 == 20 - won, "{won} won, {} were refused", refused.len());
    }
}

async fn add_one(container: Container) {
    let (mut state, mut rev) = container.read().await.unwrap();
    loop {
        let n = state.as_ref().and_then(|state| state["n"].as_u64()).unwrap_or(0);
        match container.clone().if_rev(rev).set_state(json!({"n": n + 1})).await {
            Ok(changed) => return assert_eq!(changed.value["n"], json!(n + 1)),
            Err(StateError::RevisionConflict { .. }) => (state, rev) = container.read().await.unwrap(),
            Err(error) => panic!("{error}"),
        }
    }
}

/// The rev of an answer names the state that the change has left, so a caller may continue from its own answer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn read_change_write_at_a_rev_loses_no_change() {
    let store = Store::memory().await.unwrap();
    // Like two processes: each has its own queue.
    let handles = [States::on(&store).await.unwrap(), States::on(&store).await.unwrap()];
    let tasks = (0..20).map(|task| {
        let session = handles[task % 2].session("s").attempts(1);
        tokio::spawn(async move {
            for _ in 0..10 {
                add_one(session.clone()).await;
            }
            // It continues from its own answer, as long as that is the newest state.
            let (state, rev) = session.read().await.unwrap();
            let first = session.clone().if_rev(rev).set_state(state.unwrap()).await;
            if let Ok(first) = first {
                let n = first.value["n"].as_u64().unwrap();
                let next = session.clone().if_rev(first.rev).set_state(json!({"n": n + 1})).await;
                return u64::from(next.is_ok_and(|next| next.changed));
            }
            0
        })
    });
    let more: u64 = join_all(tasks).await.into_iter().map(Result::unwrap).sum();
    let state = handles[0].session("s").get().await.unwrap();
    assert_eq!(state, Some(json!({"n": 200 + more})), "{more} went on from their own answers");
}

#[tokio::test]
async fn a_change_under_an_idempotency_key_is_answered_again_whatever_the_rev_is_now() {
    let session = states().await.session("s");
    let named = |rev: u64| session.clone().once("order-7").if_rev(rev).inc_state("n", 1);
    assert!(matches!(named(3).await.unwrap_err(), StateError::RevisionConflict { .. }));
    assert_eq!(named(0).await.unwrap().rev, 1, "a refusal leaves no answer");
    session.inc_state("n", 5).await.unwrap();
    let again = named(0).await.unwrap();
    assert_eq!((again.rev, again.repeated), (Rev(1), true));
    assert!(matches!(named(2).await.unwrap_err(), StateError::OnceReused { .. }), "another rev is another call");
    assert_eq!(session.get().await.unwrap().unwrap(), json!({"n": 6}));
}

#[tokio::test]
async fn an_error_of_state_is_the_same_when_it_is_read_again() {
    let session = states().await.session("s");
    session.inc_state("n", 1).await.unwrap();
    let errors = [
        session.clone().if_rev(7).inc_state("n", 1).await.unwrap_err(),
        session.clone().if_absent().inc_state("n", 1).await.unwrap_err(),
        session.push_state("n", 1).await.unwrap_err(),
        session.inc_state("a..b", 1).await.unwrap_err(),
        StateError::Store(latchwork::store::StoreError::Closed),
    ];
    for error in errors {
        let text = serde_json::to_string(&error).unwrap();
        let read: StateError = serde_json::from_str(&text).unwrap();
        assert_eq!((read.to_string(), read.kind()), (error.to_string(), error.kind()), "{text}");
        assert_eq!(serde_json::to_string(&read).unwrap(), text);
    }
}
