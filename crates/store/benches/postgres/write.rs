//! Commits: the latency of one caller, and the rate of many.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use latchwork_store::{Commit, Space, Store};

use crate::report::{Figure, median};
use crate::{Bench, VALUE_BYTES, floor};

/// Commits new keys for so long. Gives how many.
async fn insert_for(store: Store, space: Space, next: Arc<AtomicU64>, time: Duration) -> u64 {
    let (began, mut made) = (Instant::now(), 0);
    while began.elapsed() < time {
        let key = space.key(format!("{:0>40}", next.fetch_add(1, Ordering::Relaxed)));
        let commit = Commit::new().absent(&key).put(&key, vec![7; VALUE_BYTES]);
        assert!(store.commit(commit).await.expect("a commit").is_applied());
        made += 1;
    }
    made
}

pub(crate) fn latency(bench: &Bench) {
    if !bench.report.wants("postgres.latency.1") {
        return;
    }
    let ((store, space), next) = (bench.open("latency"), Arc::new(AtomicU64::new(0)));
    let (rounds, seconds) = bench.rounds();
    let (mut task, mut main, mut theirs) = (Vec::new(), Vec::new(), Vec::new());
    let inserts = |seconds| insert_for(store.clone(), space.clone(), next.clone(), Duration::from_secs(seconds));
    let average = |began: Instant, made: u64| began.elapsed().as_secs_f64() * 1e6 / made as f64;
    bench.in_task(inserts(1));
    for _ in 0..rounds {
        theirs.push(floor::insert(bench, 1, seconds).latency_us);
        let began = Instant::now();
        task.push(average(began, bench.in_task(inserts(seconds))));
        let began = Instant::now();
        main.push(average(began, bench.runtime.block_on(inserts(seconds))));
    }
    let (value, floor) = (median(task), median(theirs));
    bench.report.add(Figure { name: "postgres.latency.1", value, unit: "µs", floor, target: "≤ 2.5" });
    bench.report.add(Figure {
        name: "postgres.latency.main",
        value: median(main),
        unit: "µs",
        floor,
        target: "report",
    });
    bench.runtime.block_on(store.close()).expect("it closes");
}

pub(crate) fn rate(bench: &Bench) {
    if !bench.report.wants("postgres.rate.256") {
        return;
    }
    let ((store, space), next) = (bench.open("rate"), Arc::new(AtomicU64::new(0)));
    let (rounds, seconds) = bench.rounds();
    let run = |seconds: u64| {
        bench.runtime.block_on(async {
            let began = Instant::now();
            let mut callers = tokio::task::JoinSet::new();
            for _ in 0..256 {
                let (store, space, next) = (store.clone(), space.clone(), next.clone());
                callers.spawn(insert_for(store, space, next, Duration::from_secs(seconds)));
            }
            let made: u64 = callers.join_all().await.iter().sum();
            made as f64 / began.elapsed().as_secs_f64()
        })
    };
    run(1);
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        theirs.push(floor::insert(bench, 64, seconds).rate);
        ours.push(run(seconds));
    }
    let (value, floor) = (median(ours), median(theirs));
    bench.report.add(Figure { name: "postgres.rate.256", value, unit: "commits/s", floor, target: "≥ 1.5" });
    bench.runtime.block_on(store.close()).expect("it closes");
}
