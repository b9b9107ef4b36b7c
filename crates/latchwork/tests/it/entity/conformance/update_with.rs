//! Read, change, write: in one process no caller loses a race; a race against another handle is retried as often as the
//! caller said.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use latchwork::entity::{Add, ChangeError, Draft, Entities, EntityError, TypeSpec, Update};
use latchwork::store::{ErrorKind, Rev};
use serde_json::{Value, json};

use super::{assert_sound, fill, generation, get};
use crate::backends::{Bench, on_every_backend};

on_every_backend!(
    update_with_writes_the_draft_of_the_closure,
    retries_are_spent_on_lost_races_and_counted,
    a_removal_meanwhile_is_an_unknown_id,
    an_error_of_the_closure_is_returned_and_nothing_is_written,
    the_closure_changes_only_data_and_metadata,
    many_tasks_of_one_process_never_conflict,
    updates_and_update_with_share_an_entity,
    two_handles_lose_nothing,
    a_dropped_future_loses_nothing_and_blocks_no_other,
    a_caller_that_stays_needs_no_retry_when_others_leave,
    a_caller_that_is_not_polled_delays_no_other,
    bad_drafts_are_refused_and_block_no_other,
    a_refusal_among_many_calls_concerns_no_other_call,
);

/// Runs a future to its end on another thread, from a closure that cannot await.
fn elsewhere<T: Send>(work: impl Future<Output = T> + Send) -> T {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            runtime.block_on(work)
        });
        thread.join().unwrap()
    })
}

fn increment(draft: &mut Draft) {
    draft.data["n"] = json!(draft.data["n"].as_u64().unwrap() + 1);
}

async fn counter(bench: &Bench) -> Entities {
    let entities = bench.entities().await;
    fill(&entities, "t", [("a", json!({"n": 0}))]).await;
    entities
}

async fn update_with_writes_the_draft_of_the_closure(bench: Bench) {
    let entities = counter(&bench).await;
    entities.update(Update::new("a").metadata(json!({"m": 1}))).await.unwrap();
    let at = generation(&entities).await;
    let rev = entities.update_with("a", 0, |draft| {
        assert_eq!((draft.id.as_str(), &*draft.entity_type, draft.rev), ("a", "t", Rev(2)));
        assert_eq!((&draft.data, &Value::Object(draft.metadata.clone())), (&json!({"n": 0}), &json!({"m": 1})));
        increment(draft);
        draft.metadata.insert("k".into(), json!(null));
        draft.metadata.remove("m");
    });
    assert_eq!(rev.await.unwrap(), Rev(3));
    let entity = get(&entities, "a").await;
    assert_eq!(
        (entity.rev, entity.data, Value::Object(entity.metadata)),
        (Rev(3), json!({"n": 1}), json!({"k": null}))
    );
    assert_eq!(generation(&entities).await, at + 1);
    let given = entities.try_update_with("a", 0, |draft| -> Result<u64, ()> {
        increment(draft);
        Ok(draft.data["n"].as_u64().unwrap() * 100)
    });
    assert_eq!(given.await.unwrap(), (Rev(4), 200));
}

async fn retries_are_spent_on_lost_races_and_counted(bench: Bench) {
    let entities = counter(&bench).await;
    let other = Entities::on(entities.store()).await.unwrap();
    // (the retries, how often another handle is faster, whether it lands)
    for (retries, faster, lands) in
        [(0, 0, true), (0, 1, false), (1, 1, true), (1, 2, false), (5, 5, true), (5, 6, false), (5, 100, false)]
    {
        let before = get(&entities, "a").await;
        let (mut ran, mut seen) = (0, Vec::new());
        let result = entities.update_with("a", retries, |draft| {
            ran += 1;
            seen.push(draft.rev.0);
            if ran <= faster {
                elsewhere(other.update_with("a", 0, increment)).unwrap();
            }
            increment(draft);
        });
        let result = result.await;
        let others = u64::from(ran.min(faster));
        let expected: Vec<u64> = (0..u64::from(ran)).map(|n| before.rev.0 + n).collect();
        assert_eq!(seen, expected, "each try starts from the newest rev");
        let after = get(&entities, "a").await;
        let count = |entity: &latchwork::entity::Entity| entity.data["n"].as_u64().unwrap();
        assert_eq!(count(&after), count(&before) + others + u64::from(lands));
        assert_eq!(after.rev.0, before.rev.0 + others + u64::from(lands));
        if lands {
            assert_eq!((result.unwrap(), ran), (after.rev, faster + 1));
            continue;
        }
        let error = result.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Conflict);
        let EntityError::RetriesSpent { id, tries } = error else { panic!("{error}") };
        assert_eq!((id.as_str(), tries, ran), ("a", retries + 1, retries + 1));
    }
}

async fn a_removal_meanwhile_is_an_unknown_id(bench: Bench) {
    let entities = counter(&bench).await;
    let other = Entities::on(entities.store()).await.unwrap();
    let result = entities.update_with("a", 5, |draft| {
        drop(elsewhere(other.remove("a")));
        increment(draft);
    });
    let error = result.await.unwrap_err();
    assert!(matches!(&error, EntityError::NotFound { id } if id == "a"), "{error}");
    assert!(entities.get("a").await.unwrap().is_none(), "it does not come back");
    // Removed and added again, it is another entity with another rev.
    fill(&entities, "t", [("a", json!({"n": 10}))]).await;
    let mut first = true;
    let result = entities.update_with("a", 5, |draft| {
        if std::mem::take(&mut first) {
            elsewhere(async {
                other.remove("a").await.unwrap();
                fill(&other, "t", [("a", json!({"n": 50}))]).await;
            });
        }
        increment(draft);
    });
    result.await.unwrap();
    assert_eq!(get(&entities, "a").await.data, json!({"n": 51}));
}

#[derive(Debug, PartialEq)]
enum Refusal {
    TooPoor { has: u64 },
}

async fn an_error_of_the_closure_is_returned_and_nothing_is_written(bench: Bench) {
    let entities = counter(&bench).await;
    let (before, at) = (get(&entities, "a").await, generation(&entities).await);
    let result = entities.try_update_with("a", 5, |draft| {
        increment(draft);
        Err::<(), _>(Refusal::TooPoor { has: draft.data["n"].as_u64().unwrap() })
    });
    assert!(matches!(result.await, Err(ChangeError::Refused(Refusal::TooPoor { has: 1 }))));
    assert_eq!((get(&entities, "a").await, generation(&entities).await), (before, at));
    let missing = entities.try_update_with("b", 5, |_| Ok::<_, Refusal>(())).await;
    assert!(matches!(missing, Err(ChangeError::Entity(EntityError::NotFound { id })) if id == "b"));
    entities.update_with("a", 0, increment).await.unwrap();
}

async fn the_closure_changes_only_data_and_metadata(bench: Bench) {
    let entities = counter(&bench).await;
    let rev = entities.update_with("a", 0, |draft| {
        (draft.id, draft.entity_type, draft.rev) = ("b".into(), "other".into(), Rev(99));
        draft.data = json!({"n": 5});
    });
    assert_eq!(rev.await.unwrap(), Rev(2));
    let entity = get(&entities, "a").await;
    assert_eq!((&*entity.entity_type, entity.rev, entity.data), ("t", Rev(2), json!({"n": 5})));
    assert!(entities.get("b").await.unwrap().is_none());
    assert_sound(&entities).await;
}

async fn many_tasks_of_one_process_never_conflict(bench: Bench) {
    for retries in 0..5 {
        let entities = Entities::on(&bench.open_at(&bench.path(&format!("store-{retries}"))).await).await.unwrap();
        entities.declare(TypeSpec::new("t").index(["data.n"]).unique(["data.n"])).await.unwrap();
        fill(&entities, "t", [("a", json!({"n": 0}))]).await;
        let at = generation(&entities).await;
        let tasks = (0..64).map(|_| {
            let entities = entities.clone();
            tokio::spawn(async move {
                let mut revs = Vec::new();
                for _ in 0..4 {
                    revs.push(entities.update_with("a", retries, increment).await.unwrap().0);
                }
                revs
            })
        });
        let mut revs = Vec::new();
        for task in tasks.collect::<Vec<_>>() {
            let own = task.await.unwrap();
            assert!(own.is_sorted());
            revs.extend(own);
        }
        revs.sort();
        assert_eq!(revs, (2..=257).collect::<Vec<u64>>(), "every increment has a rev of its own");
        let entity = get(&entities, "a").await;
        assert_eq!((entity.rev, entity.data, generation(&entities).await), (Rev(257), json!({"n": 256}), at + 256));
        assert_sound(&entities).await;
    }
}

async fn updates_and_update_with_share_an_entity(bench: Bench) {
    let entities = counter(&bench).await;
    let tasks = (0..60u64).map(|n| {
        let entities = entities.clone();
        tokio::spawn(async move {
            match n % 3 {
                0 => drop(entities.update_with("a", 0, increment).await.unwrap()),
                1 => drop(entities.update(Update::new("a").metadata(json!({format!("m{n}"): n}))).await.unwrap()),
                _ => {
                    drop(entities.update_with("a", 0, |draft| drop(draft.metadata.insert("w".into(), json!(n)))).await)
                }
            }
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.unwrap();
    }
    let entity = get(&entities, "a").await;
    assert_eq!((entity.rev, entity.data, entity.metadata.len()), (Rev(61), json!({"n": 20}), 21));
}

async fn two_handles_lose_nothing(bench: Bench) {
    let entities = counter(&bench).await;
    let landed = Arc::new(AtomicU64::new(0));
    let tasks = (0..8).map(|_| {
        let (store, landed) = (entities.store().clone(), landed.clone());
        tokio::spawn(async move {
            let own = Entities::on(&store).await.unwrap();
            for _ in 0..10 {
                match own.update_with("a", 20, increment).await {
                    Ok(_) => drop(landed.fetch_add(1, Ordering::SeqCst)),
                    Err(EntityError::RetriesSpent { tries: 21, .. }) => {}
                    Err(error) => panic!("{error}"),
                }
            }
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.unwrap();
    }
    let (entity, landed) = (get(&entities, "a").await, landed.load(Ordering::SeqCst));
    assert_eq!((entity.data, entity.rev.0), (json!({"n": landed}), landed + 1));
    assert!(landed > 0);
}

/// Polls a future so many times, and then gives up.
async fn for_polls<F: Future>(future: F, polls: usize) -> Option<F::Output> {
    let mut future = Box::pin(future);
    let mut left = polls;
    std::future::poll_fn(move |context| {
        if left == 0 {
            return std::task::Poll::Ready(None);
        }
        left -= 1;
        match future.as_mut().poll(context) {
            std::task::Poll::Ready(output) => std::task::Poll::Ready(Some(output)),
            std::task::Poll::Pending => {
                // The task is polled again at once, since a drop can come at any time.
                context.waker().wake_by_ref();
                std::task::Poll::Pending
            }
        }
    })
    .await
}

async fn a_dropped_future_loses_nothing_and_blocks_no_other(bench: Bench) {
    let entities = counter(&bench).await;
    let random = Arc::new(chance::Random::new(11));
    let (acknowledged, dropped) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let tasks = (0..32).map(|task| {
        let (entities, random) = (entities.clone(), random.clone());
        let (acknowledged, dropped) = (acknowledged.clone(), dropped.clone());
        tokio::spawn(async move {
            for _ in 0..10 {
                // Some callers wait to the end, and must succeed, however many others leave.
                let polls = if task % 4 == 0 { usize::MAX } else { random.below(40) };
                match for_polls(entities.update_with("a", 50, increment), polls).await {
                    Some(result) => drop((result.unwrap(), acknowledged.fetch_add(1, Ordering::SeqCst))),
                    None => drop(dropped.fetch_add(1, Ordering::SeqCst)),
                }
                tokio::task::yield_now().await;
            }
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.unwrap();
    }
    entities.update_with("a", 5, increment).await.unwrap();
    let (acknowledged, dropped) = (acknowledged.load(Ordering::SeqCst) + 1, dropped.load(Ordering::SeqCst));
    assert_eq!(acknowledged + dropped, 321);
    let entity = get(&entities, "a").await;
    let landed = entity.data["n"].as_u64().unwrap();
    assert_eq!(entity.rev.0, landed + 1, "each write is one increment");
    assert!((acknowledged..=acknowledged + dropped).contains(&landed), "{landed} of {acknowledged} and {dropped}");
    assert_sound(&entities).await;
}

async fn a_caller_that_stays_needs_no_retry_when_others_leave(bench: Bench) {
    let entities = counter(&bench).await;
    for polls in 1..12 {
        let leaving = for_polls(entities.update_with("a", 0, increment), polls);
        let (_, stayed) = tokio::join!(leaving, entities.update_with("a", 0, increment));
        assert!(stayed.is_ok(), "after {polls} polls: {}", stayed.unwrap_err());
    }
}

/// Many callers are polled until the task has used up its budget, so some stop in the middle of their change. No caller
/// is polled again, and none is dropped.
async fn a_caller_that_is_not_polled_delays_no_other(bench: Bench) {
    let entities = counter(&bench).await;
    let mut stuck: Vec<_> = (0..400).map(|_| Box::pin(entities.update_with("a", 400, increment))).collect();
    let landed = std::future::poll_fn(|context| {
        let landed = stuck.iter_mut().filter_map(|call| match call.as_mut().poll(context) {
            std::task::Poll::Ready(rev) => Some(rev.unwrap()),
            std::task::Poll::Pending => None,
        });
        std::task::Poll::Ready(landed.count() as u64)
    });
    let landed = landed.await;
    assert!(landed < 400, "some calls are in the middle of their change");
    let other = tokio::spawn({
        let entities = entities.clone();
        async move { entities.update_with("a", 400, increment).await }
    });
    let rev = tokio::time::timeout(std::time::Duration::from_secs(60), other).await.expect("it is delayed");
    assert!(rev.unwrap().unwrap().0 > landed + 1);
    drop(stuck);
    assert_sound(&entities).await;
}

mod chance {
    //! A random source that tasks share.

    use std::sync::Mutex;

    pub(super) struct Random(Mutex<fastrand::Rng>);

    impl Random {
        pub(super) fn new(seed: u64) -> Random {
            Random(Mutex::new(fastrand::Rng::with_seed(seed)))
        }

        pub(super) fn below(&self, end: usize) -> usize {
            self.0.lock().unwrap().usize(..end)
        }
    }
}

async fn bad_drafts_are_refused_and_block_no_other(bench: Bench) {
    let entities = counter(&bench).await;
    let (before, at) = (get(&entities, "a").await, generation(&entities).await);
    let deep = (0..129).fold(json!(1), |inner, _| json!([inner]));
    let result = entities.update_with("a", 3, |draft| draft.data = deep.clone()).await;
    assert!(matches!(&result, Err(EntityError::Document { part, .. }) if part == "data"), "{result:?}");
    let result = entities.update_with("a", 3, |draft| drop(draft.metadata.insert("m".into(), deep.clone()))).await;
    assert!(matches!(&result, Err(EntityError::Document { part, .. }) if part == "metadata"), "{result:?}");
    let large = "x".repeat(bench.limits.value_bytes);
    let result = entities.update_with("a", 3, |draft| draft.data = json!(large)).await;
    assert!(matches!(&result, Err(EntityError::DocumentTooLarge { .. })), "{result:?}");
    assert_eq!((get(&entities, "a").await, generation(&entities).await), (before, at));
    entities.update_with("a", 0, increment).await.unwrap();
}

async fn a_refusal_among_many_calls_concerns_no_other_call(bench: Bench) {
    let entities = bench.entities().await;
    entities.declare(TypeSpec::new("t").unique(["data.u"])).await.unwrap();
    fill(&entities, "t", [("a", json!({"n": 0})), ("owner", json!({"u": "taken"}))]).await;
    let tasks = (0..60).map(|n| {
        let entities = entities.clone();
        tokio::spawn(async move {
            let result = entities.update_with("a", 0, |draft| {
                increment(draft);
                match n % 3 {
                    0 => draft.data["u"] = json!("taken"),
                    1 => draft.data["u"] = json!(n),
                    _ => {}
                }
            });
            match (n % 3, result.await) {
                (0, Err(EntityError::UniqueViolation { owner, .. })) if owner == "owner" => {}
                (0, other) => panic!("{other:?}"),
                (_, other) => drop(other.unwrap()),
            }
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.unwrap();
    }
    assert_eq!((get(&entities, "a").await.data["n"].clone(), get(&entities, "a").await.rev), (json!(40), Rev(41)));
    let gone = entities.remove("owner").await.unwrap();
    assert_eq!(gone, Rev(2));
    entities.add(Add::new("t").data(json!({"u": "taken"}))).await.unwrap();
    assert_sound(&entities).await;
}
