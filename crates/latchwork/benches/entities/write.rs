//! Changing entities: many entities concurrently, one entity by many tasks, and many entities in one transaction.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use latchwork::entity::{Add, Entities, Transaction, Update};
use latchwork::store::{Rev, SpaceSpec, Store};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use crate::load::{self, KEYS, callers};
use crate::report::{Figure, Report, median};

/// About as large as the values of the suite `store`.
pub(crate) fn document(number: u64) -> Value {
    json!({"number": number, "name": "an entity of middling size", "text": "x".repeat(80)})
}

fn id(index: usize) -> String {
    format!("{index:0>40}")
}

/// A new store with entities.
async fn filled(directory: &std::path::Path, count: usize) -> Entities {
    let entities = Entities::open(directory).await.expect("entities");
    let numbers: Vec<usize> = (0..count).collect();
    for some in numbers.chunks(1000) {
        let adds = some.iter().map(|index| Add::new("thing").id(id(*index)).data(document(0)));
        entities.add_many(adds).await.expect("a batch");
    }
    entities
}

/// One task's entities, with the revs that it last saw.
struct Updater {
    entities: Vec<(String, Rev)>,
    random: fastrand::Rng,
}

fn run_updates(runtime: &Runtime, entities: &Entities, updaters: &mut Vec<Updater>, duration: Duration) -> f64 {
    let stop = Arc::new(AtomicBool::new(false));
    let seen = Arc::new(AtomicU64::new(0));
    let begin = Instant::now();
    let tasks: Vec<_> = std::mem::take(updaters)
        .into_iter()
        .map(|mut updater| {
            let (entities, stop, seen) = (entities.clone(), stop.clone(), seen.clone());
            runtime.spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    let at = updater.random.usize(..updater.entities.len());
                    let (id, rev) = &mut updater.entities[at];
                    let update = Update::new(id.as_str()).data(document(rev.0)).if_rev(*rev);
                    *rev = entities.update(update).await.expect("no other task writes this entity");
                    seen.fetch_add(1, Ordering::Relaxed);
                }
                updater
            })
        })
        .collect();
    std::thread::sleep(duration);
    let rate = seen.load(Ordering::Relaxed) as f64 / begin.elapsed().as_secs_f64();
    stop.store(true, Ordering::Relaxed);
    runtime.block_on(async {
        for task in tasks {
            updaters.push(task.await.expect("an updater"));
        }
    });
    rate
}

/// Updates with `if_rev` by 256 tasks, each on its own entities, against the store's rate with 256 callers.
pub(crate) fn updates(runtime: &Runtime, report: &Report) {
    if !report.wants("entities.update.256") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let entities = runtime.block_on(filled(&directory.path().join("entities"), KEYS));
    let (store, space) = bare(runtime, &directory.path().join("store"));
    let mut callers = callers(&space, 256);
    let each = KEYS / 256;
    let mut updaters: Vec<Updater> = (0..256)
        .map(|task| Updater {
            entities: (task * each..(task + 1) * each).map(|index| (id(index), Rev(1))).collect(),
            random: fastrand::Rng::with_seed(task as u64),
        })
        .collect();
    let (duration, rounds) = if report.quick { (Duration::from_secs(1), 1) } else { (Duration::from_secs(3), 5) };
    let (mut ours, mut floors) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        floors.push(load::run(runtime, &store, &mut callers, duration, &Arc::default()));
        ours.push(run_updates(runtime, &entities, &mut updaters, duration));
    }
    let (value, floor) = (median(ours), median(floors));
    report.add(Figure { name: "entities.update.256", value, unit: "updates/s", floor, target: "≥ 0.7" });
}

fn bare(runtime: &Runtime, directory: &std::path::Path) -> (Store, latchwork::store::Space) {
    runtime.block_on(async {
        let store = Store::open(directory).await.expect("a store");
        let space = store.space(SpaceSpec::new("bench")).await.expect("a space");
        (store, space)
    })
}

/// 64 tasks increment a number in one entity, against the store's rate with one caller. Every increment must be
/// applied.
pub(crate) fn hot(runtime: &Runtime, report: &Report) {
    const TASKS: usize = 64;
    if !report.wants("entities.hot.64") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let entities = runtime.block_on(Entities::open(directory.path().join("entities"))).expect("entities");
    let counter = Add::new("counter").id("counter").data(json!({"value": 0}));
    runtime.block_on(entities.add(counter)).expect("an add");
    let (store, space) = bare(runtime, &directory.path().join("store"));
    let mut callers = callers(&space, 1);
    let (duration, rounds) = if report.quick { (Duration::from_secs(1), 1) } else { (Duration::from_secs(3), 5) };
    let (mut ours, mut floors) = (Vec::new(), Vec::new());
    let mut landed = 0;
    for _ in 0..rounds {
        floors.push(load::run(runtime, &store, &mut callers, duration, &Arc::default()));
        let stop = Arc::new(AtomicBool::new(false));
        let begin = Instant::now();
        let tasks: Vec<_> = (0..TASKS)
            .map(|_| {
                let (entities, stop) = (entities.clone(), stop.clone());
                runtime.spawn(async move {
                    let mut done = 0u64;
                    while !stop.load(Ordering::Relaxed) {
                        let increment = |draft: &mut latchwork::entity::Draft| {
                            draft.data["value"] = json!(draft.data["value"].as_u64().expect("a number") + 1);
                        };
                        entities.update_with("counter", 5, increment).await.expect("an increment");
                        done += 1;
                    }
                    done
                })
            })
            .collect();
        std::thread::sleep(duration);
        stop.store(true, Ordering::Relaxed);
        let done: u64 = runtime.block_on(async {
            let mut done = 0;
            for task in tasks {
                done += task.await.expect("a task");
            }
            done
        });
        ours.push(done as f64 / begin.elapsed().as_secs_f64());
        landed += done;
    }
    let counted = runtime.block_on(entities.get("counter")).expect("a read").expect("the counter");
    assert_eq!(counted.data["value"], json!(landed), "every increment lands");
    assert_eq!(counted.rev, Rev(landed + 1), "with a rev of its own");
    let (value, floor) = (median(ours), median(floors));
    report.add(Figure { name: "entities.hot.64", value, unit: "increments/s", floor, target: "≥ 3" });
}

/// The time of a transaction of 100 updates, against a transaction of one update.
pub(crate) fn transactions(runtime: &Runtime, report: &Report) {
    if !report.wants("entities.transact.100") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    runtime.block_on(async {
        let entities = filled(&directory.path().join("entities"), 10_000).await;
        let mut random = fastrand::Rng::with_seed(1);
        let (mut ones, mut hundreds) = (Vec::new(), Vec::new());
        for round in 0..if report.quick { 100 } else { 2000 } {
            for (ops, times) in [(1, &mut ones), (100, &mut hundreds)] {
                let start = random.usize(..9_900);
                let transaction = (start..start + ops).fold(Transaction::new(), |transaction, index| {
                    transaction.update(Update::new(id(index)).data(document(round)))
                });
                let begin = Instant::now();
                entities.transact(transaction).await.expect("a transaction");
                times.push(begin.elapsed().as_secs_f64() * 1e6);
            }
        }
        let (value, floor) = (median(hundreds), median(ones));
        report.add(Figure { name: "entities.transact.100", value, unit: "µs", floor, target: "≤ 15" });
    });
}
