//! Point reads: of the newest generation, beside writers, and of the past.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use latchwork_store::{Commit, Generation, History, Key, SpaceSpec, Store, View};
use redb::{Database, ReadableDatabase, TableDefinition};
use tokio::runtime::Runtime;

use crate::load::{self, KEY_BYTES, KEYS, VALUE_BYTES, callers};
use crate::report::{Figure, Report, median};

const BARE: TableDefinition<'_, &[u8], &[u8]> = TableDefinition::new("bare");

pub(crate) fn reads(runtime: &Runtime, report: &mut Report) {
    if report.wants("store.read.present") || report.wants("store.read.beside_writers") {
        present(runtime, report);
    }
    if report.wants("store.read.past") {
        past(runtime, report);
    }
}

fn name(index: usize) -> String {
    format!("{index:0>KEY_BYTES$}")
}

/// Reads random keys through one view after another for `duration`. Returns reads per second.
async fn read_for(store: &Store, keys: &[Key], duration: Duration) -> f64 {
    let mut random = fastrand::Rng::with_seed(1);
    let begin = Instant::now();
    let mut done = 0u64;
    while begin.elapsed() < duration {
        let view = store.view().await.expect("a view");
        for _ in 0..1000 {
            let key = &keys[random.usize(..keys.len())];
            assert!(view.get(key).await.expect("a read").is_some());
        }
        done += 1000;
    }
    done as f64 / begin.elapsed().as_secs_f64()
}

fn present(runtime: &Runtime, report: &mut Report) {
    let directory = tempfile::tempdir().expect("a directory");
    let (store, space) = crate::write::opened(runtime, &directory.path().join("store"));
    let keys: Vec<Key> = (0..KEYS).map(|index| space.key(name(index))).collect();
    runtime.block_on(async {
        for keys in keys.chunks(1000) {
            let put = keys.iter().fold(Commit::new(), |commit, key| commit.put(key, vec![7; VALUE_BYTES]));
            assert!(store.commit(put).await.expect("a commit").is_applied());
        }
        while store.maintain().await.expect("maintenance") {}
        // Once more: what was folded last may still be in memory, and the figure is about reads from the index.
        store.maintain().await.expect("maintenance");
    });
    let bare = Bare::create(&directory.path().join("bare"));
    let duration = Duration::from_secs(if report.quick { 1 } else { 2 });
    let rounds = if report.quick { 1 } else { 5 };
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        theirs.push(bare.read_for(duration));
        ours.push(runtime.block_on(read_for(&store, &keys, duration)));
    }
    let (value, floor) = (median(ours), median(theirs));
    report.add(Figure { name: "store.read.present", value, unit: "reads/s", floor, target: "≥ 0.6" });

    let seen = Arc::new(AtomicU64::new(0));
    let stop = Arc::new(AtomicBool::new(false));
    let reader = std::thread::spawn({
        let (store, stop) = (store.clone(), stop.clone());
        move || {
            let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
            let mut rates = Vec::new();
            while !stop.load(Ordering::Relaxed) {
                rates.push(runtime.block_on(read_for(&store, &keys, Duration::from_secs(1))));
            }
            rates
        }
    });
    // Writers do not know the revs of the existing keys, so they write other keys in their own space.
    let writers = runtime.block_on(store.space(SpaceSpec::new("writers"))).expect("a space");
    let mut writers = callers(&writers, 256);
    let seconds = if report.quick { 3 } else { 12 };
    load::run(runtime, &store, &mut writers, Duration::from_secs(seconds), &seen);
    stop.store(true, Ordering::Relaxed);
    let mut rates = reader.join().expect("the reader");
    rates.truncate(seconds as usize);
    let beside = median(rates);
    let target = "≥ 0.4";
    report.add(Figure { name: "store.read.beside_writers", value: beside, unit: "reads/s", floor: value, target });
}

/// A plain redb file with the same keys and values.
struct Bare {
    db: Database,
}

impl Bare {
    fn create(path: &std::path::Path) -> Bare {
        let db = redb::Builder::new().set_cache_size(64 << 20).create(path).expect("a database");
        let transaction = db.begin_write().expect("a transaction");
        {
            let mut table = transaction.open_table(BARE).expect("a table");
            for index in 0..KEYS {
                table.insert(name(index).as_bytes(), [7; VALUE_BYTES].as_slice()).expect("an insert");
            }
        }
        transaction.commit().expect("a commit");
        Bare { db }
    }

    fn read_for(&self, duration: Duration) -> f64 {
        let table = self.db.begin_read().expect("a transaction").open_table(BARE).expect("a table");
        let keys: Vec<String> = (0..KEYS).map(name).collect();
        let mut random = fastrand::Rng::with_seed(1);
        let begin = Instant::now();
        let mut done = 0u64;
        while begin.elapsed() < duration {
            for _ in 0..1000 {
                let key = keys[random.usize(..keys.len())].as_bytes();
                let value = table.get(key).expect("a read").map(|value| value.value().to_vec());
                assert!(value.is_some());
            }
            done += 1000;
        }
        done as f64 / begin.elapsed().as_secs_f64()
    }
}

/// Overwrites a thousand keys a hundred thousand times and reads them as they were at the start.
fn past(runtime: &Runtime, report: &mut Report) {
    const GENERATIONS: u64 = 100_000;
    let directory = tempfile::tempdir().expect("a directory");
    runtime.block_on(async {
        let store = Store::open(directory.path().join("store")).await.expect("a store");
        let space = store.space(SpaceSpec::new("bench").history(History::Forever)).await.expect("a space");
        let keys: Vec<Key> = (0..1000).map(|index| space.key(name(index))).collect();
        let put = |index: usize| Commit::new().put(&keys[index % keys.len()], vec![7; VALUE_BYTES]);
        for index in 0..keys.len() {
            assert!(store.commit(put(index)).await.expect("a commit").is_applied());
        }
        let old = store.generation().await.expect("a generation");
        let next = Arc::new(AtomicU64::new(0));
        let tasks: Vec<_> = (0..256)
            .map(|_| {
                let (store, next, keys) = (store.clone(), next.clone(), keys.clone());
                tokio::spawn(async move {
                    loop {
                        let index = next.fetch_add(1, Ordering::Relaxed);
                        if index >= GENERATIONS {
                            return;
                        }
                        let key = &keys[index as usize % keys.len()];
                        let put = Commit::new().put(key, vec![7; VALUE_BYTES]);
                        assert!(store.commit(put).await.expect("a commit").is_applied());
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.expect("a writer");
        }
        while store.maintain().await.expect("maintenance") {}
        store.maintain().await.expect("maintenance");
        let now = store.generation().await.expect("a generation");
        assert!(now.0 - old.0 >= GENERATIONS, "the past is far enough back");
        let (mut pasts, mut presents) = (Vec::new(), Vec::new());
        for _ in 0..if report.quick { 1 } else { 5 } {
            presents.push(read_cost(&store, &keys, now).await);
            pasts.push(read_cost(&store, &keys, old).await);
        }
        let (value, floor) = (median(pasts), median(presents));
        report.add(Figure { name: "store.read.past", value, unit: "ns/read", floor, target: "≤ 3" });
    });
}

async fn read_cost(store: &Store, keys: &[Key], at: Generation) -> f64 {
    const READS: usize = 200_000;
    let view: View = store.view_at(at).await.expect("a view");
    let mut random = fastrand::Rng::with_seed(1);
    let begin = Instant::now();
    for _ in 0..READS {
        let key = &keys[random.usize(..keys.len())];
        let item = view.get(key).await.expect("a read").expect("it was there");
        assert!(item.generation <= at);
    }
    begin.elapsed().as_nanos() as f64 / READS as f64
}
