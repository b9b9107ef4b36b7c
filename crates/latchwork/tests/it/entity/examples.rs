//! The example programs under load: many tasks race, in memory and on files. And a process that runs all three programs
//! is killed again and again, at any moment. Everything that it reported as done is done, once.
//!
//! `LATCHWORK_KILLS` sets how often it is killed, `LATCHWORK_SEED` when.

// A test ends where something unexpected happens.
#![allow(clippy::unwrap_used)]

// The `main` functions of the programs are unused here, and no other module uses their public items.
#[allow(dead_code, unreachable_pub)]
#[path = "../../../examples/add_if_missing.rs"]
mod add_if_missing;
#[allow(dead_code, unreachable_pub)]
#[path = "../../../examples/counter.rs"]
mod counter;
#[allow(dead_code, unreachable_pub)]
#[path = "../../../examples/lock_document.rs"]
mod lock_document;

mod kill;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use latchwork::entity::{Add, Entities, EntityError, Query, Update};
use latchwork::store::{Env, Limits, Rev, Store};
use serde_json::json;

/// Runs a race in memory and on files, with threads.
macro_rules! race {
    ($($race:ident),* $(,)?) => {$(
        mod $race {
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn memory() {
                super::$race(super::in_memory().await).await;
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn file() {
                let home = tempfile::tempdir().unwrap();
                super::$race(super::Entities::open(home.path()).await.unwrap()).await;
            }
        }
    )*};
}

race! {
    the_programs_run_and_run_again,
    the_lock_never_has_two_holders,
    no_increment_is_lost_and_none_counts_twice,
    one_rev_has_one_winner_and_ninety_nine_conflicts,
    an_address_belongs_to_one_entity,
    an_address_belongs_to_one_entity_without_an_index,
}

async fn in_memory() -> Entities {
    Entities::on(&Store::memory().await.expect("a store in memory")).await.expect("entities in memory")
}

/// Runs so many tasks to their ends.
async fn all<F: Future<Output: Send + 'static> + Send + 'static>(
    tasks: u32,
    task: impl Fn(u32) -> F,
) -> Vec<F::Output> {
    let mut ended = Vec::new();
    for task in (0..tasks).map(|number| tokio::spawn(task(number))).collect::<Vec<_>>() {
        ended.push(task.await.expect("the task ends"));
    }
    ended
}

async fn assert_well(entities: &Entities) {
    assert_eq!(entities.verify().await.expect("it can be read"), []);
}

async fn the_programs_run_and_run_again(entities: Entities) {
    for _ in 0..2 {
        lock_document::run(&entities, 3, 2).await.unwrap();
        counter::run(&entities, 10).await.unwrap();
        add_if_missing::run(&entities, 5).await.unwrap();
    }
    assert_eq!(entities.find(&Query::of("person")).await.unwrap().items.len(), 10);
    assert_well(&entities).await;
}

async fn the_lock_never_has_two_holders(entities: Entities) {
    lock_document::bootstrap(&entities).await.unwrap();
    let (held, tokens) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    all(12, |worker| {
        let (entities, held, tokens) = (entities.clone(), held.clone(), tokens.clone());
        async move {
            let (mut times, name) = (0, format!("worker {worker}"));
            while times < 8 {
                match lock_document::try_acquire(&entities, &name, Duration::from_secs(600)).await.unwrap() {
                    Some(rev) => {
                        assert!(!held.swap(true, Ordering::SeqCst), "two hold the lock");
                        assert!(tokens.swap(rev.0, Ordering::SeqCst) < rev.0, "a later holder has a larger rev");
                        tokio::task::yield_now().await;
                        assert!(held.swap(false, Ordering::SeqCst));
                        assert!(lock_document::release(&entities, rev).await.unwrap());
                        times += 1;
                    }
                    None => tokio::task::yield_now().await,
                }
            }
        }
    })
    .await;
    // One write to create it, and two for each of the 12 × 8 times.
    assert_eq!(tokens.load(Ordering::SeqCst), 2 * 12 * 8);
    assert_well(&entities).await;
}

#[tokio::test]
async fn an_expired_lock_goes_to_the_next_and_cannot_be_released_by_its_former_holder() {
    let (env, clock) = Env::seeded(1);
    let store = Store::memory_with(env, Limits::default()).await.unwrap();
    let entities = Entities::on(&store).await.unwrap();
    assert!(lock_document::bootstrap(&entities).await.unwrap());
    assert!(!lock_document::bootstrap(&entities).await.unwrap());
    let ttl = Duration::from_secs(30);
    let first = lock_document::try_acquire(&entities, "one", ttl).await.unwrap().unwrap();
    clock.advance(Duration::from_secs(29));
    assert_eq!(lock_document::try_acquire(&entities, "two", ttl).await.unwrap(), None);
    clock.advance(Duration::from_secs(1));
    let second = lock_document::try_acquire(&entities, "two", ttl).await.unwrap().unwrap();
    assert!(second > first);
    assert!(!lock_document::release(&entities, first).await.unwrap());
    assert!(lock_document::release(&entities, second).await.unwrap());
}

async fn no_increment_is_lost_and_none_counts_twice(entities: Entities) {
    counter::bootstrap(&entities, "shared").await.unwrap();
    let landed = all(40, |number| {
        let entities = entities.clone();
        async move {
            let mut landed = 0;
            for _ in 0..10 {
                if number % 4 == 0 {
                    // Increments by hand are outside the queue, and may run out of attempts. They add 1000 each, so
                    // that a lost one cannot be hidden by increments of the other kind.
                    landed += 1000 * i64::from(counter::increment_by_hand(&entities, "shared", 1000, 5).await.is_ok());
                } else {
                    // Each lost race is won by an increment by hand, and there are at most a hundred of these.
                    counter::increment(&entities, "shared", 1, 100).await.unwrap();
                    landed += 1;
                }
            }
            landed
        }
    })
    .await;
    let sum: i64 = landed.into_iter().sum();
    let increments = sum / 1000 + sum % 1000;
    assert!(sum % 1000 == 300, "all increments in the queue land");
    assert_eq!(counter::value(&entities, "shared").await.unwrap(), sum);
    assert_eq!(
        entities.get("shared").await.unwrap().unwrap().rev,
        Rev(1 + increments as u64),
        "a rev for every increment"
    );
    assert_well(&entities).await;
}

async fn one_rev_has_one_winner_and_ninety_nine_conflicts(entities: Entities) {
    entities.add(Add::new("document").id("one").data(json!(null))).await.unwrap();
    let before = entities.store().generation().await.unwrap();
    let ended = all(100, |number| {
        let entities = entities.clone();
        async move { entities.update(Update::new("one").data(json!(number)).if_rev(Rev(1))).await }
    })
    .await;
    let conflict = |error: &EntityError| match error {
        EntityError::RevisionConflict { id, expected, actual } => {
            (&**id, *expected, *actual) == ("one", Rev(1), Rev(2))
        }
        _ => false,
    };
    assert_eq!(ended.iter().filter(|ended| matches!(ended, Ok(Rev(2)))).count(), 1);
    assert_eq!(ended.iter().filter(|ended| ended.as_ref().is_err_and(conflict)).count(), 99);
    assert_eq!(entities.store().generation().await.unwrap(), before.next(), "refusals take no generation");
}

/// All tasks add the same few addresses, while another task writes unrelated entities.
async fn add_the_same(entities: &Entities) {
    const ADDRESSES: u32 = 10;
    let done = Arc::new(AtomicBool::new(false));
    counter::bootstrap(entities, "unrelated").await.unwrap();
    let unrelated = {
        let (entities, done) = (entities.clone(), done.clone());
        tokio::spawn(async move {
            while !done.load(Ordering::SeqCst) {
                counter::increment(&entities, "unrelated", 1, 5).await.unwrap();
                entities.add(Add::new("person").metadata(json!({"email": null}))).await.unwrap();
                tokio::task::yield_now().await;
            }
        })
    };
    let ended = all(16, |number| {
        let entities = entities.clone();
        async move {
            let mut ids = Vec::new();
            for address in 0..ADDRESSES {
                let email = format!("{}@example.org", (address + number) % ADDRESSES);
                let (id, added) = add_if_missing::by_unique_email(&entities, "Ada", &email).await.unwrap();
                ids.push((email, id.to_string(), added));
            }
            ids
        }
    })
    .await;
    done.store(true, Ordering::SeqCst);
    unrelated.await.unwrap();
    let mut owners: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for (email, id, _) in ended.iter().flatten() {
        owners.entry(email.clone()).or_default().insert(id.clone());
    }
    assert!(owners.values().all(|ids| ids.len() == 1), "{owners:?}");
    assert_eq!(ended.iter().flatten().filter(|(.., added)| *added).count(), ADDRESSES as usize);
    let query = Query::of("person").filter(latchwork::entity::field("metadata.email").starts_with("")).limit(1000);
    assert_eq!(entities.find(&query).await.unwrap().items.len(), ADDRESSES as usize);
    assert_well(entities).await;
}

async fn an_address_belongs_to_one_entity(entities: Entities) {
    add_if_missing::declare(&entities).await.unwrap();
    add_the_same(&entities).await;
}

/// Without an index the whole type counts as read, so unrelated people cause conflicts; but no person is added twice.
async fn an_address_belongs_to_one_entity_without_an_index(entities: Entities) {
    let ended = all(6, |number| {
        let entities = entities.clone();
        async move {
            let email = format!("{}@example.org", number % 2);
            // Each refused commit lost to an add of another task, and there are six adds in all.
            let one = add_if_missing::by_generation(&entities, "Ada", &email, 10).await.unwrap();
            let (two, added) = add_if_missing::by_unique_email(&entities, "Ada", &email).await.unwrap();
            assert!(one == two && !added);
            (email, one.to_string())
        }
    })
    .await;
    assert_eq!(ended.into_iter().collect::<BTreeSet<_>>().len(), 2);
    assert_eq!(entities.find(&Query::of("person")).await.unwrap().items.len(), 2);
    assert_well(&entities).await;
}
