//! Latency, commits per second, and a long run.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use latchwork_store::{Space, SpaceSpec, Store};
use tokio::runtime::Runtime;

use crate::floor::Floor;
use crate::load::{self, PAYLOAD_BYTES, callers};
use crate::report::{Figure, Report, bytes_written, median, resident_mb};

pub(crate) fn opened(runtime: &Runtime, directory: &std::path::Path) -> (Store, Space) {
    runtime.block_on(async {
        let store = Store::open(directory).await.expect("a store");
        let space = store.space(SpaceSpec::new("bench")).await.expect("a space");
        (store, space)
    })
}

/// Measures one caller. Store and floor take turns, so that a slow moment of the machine affects both.
pub(crate) fn latency(runtime: &Runtime, report: &mut Report) {
    if !report.wants("store.latency.1") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let floor = Floor::create(&directory.path().join("floor"));
    let (store, space) = opened(runtime, &directory.path().join("store"));
    let (mut caller, mut floor_caller) = (callers(&space, 1).remove(0), callers(&space, 1).remove(0));
    let rounds = if report.quick { 10 } else { 100 };
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    let (our_times, floor_times) = (&mut ours, &mut theirs);
    runtime.block_on(async move {
        let mut bytes = Vec::new();
        for _ in 0..rounds {
            for _ in 0..100 {
                let begin = Instant::now();
                caller.commit(&store).await;
                our_times.push(begin.elapsed().as_secs_f64() * 1e6);
            }
            for _ in 0..100 {
                let begin = Instant::now();
                floor_caller.append(&floor, &mut bytes).await;
                floor_times.push(begin.elapsed().as_secs_f64() * 1e6);
            }
        }
        floor.close();
    });
    let (value, floor) = (median(ours), median(theirs));
    report.add(Figure { name: "store.latency.1", value, unit: "µs", floor, target: "≤ 1.3" });
}

pub(crate) fn rates(runtime: &Runtime, report: &mut Report) {
    let wanted = [(16, "≥ 0.7"), (256, "≥ 0.5"), (4096, "≥ 0.5")];
    for (count, target) in wanted {
        let name = format!("store.rate.{count}");
        if !report.wants(&name) {
            continue;
        }
        let directory = tempfile::tempdir().expect("a directory");
        let floor = Floor::create(&directory.path().join("floor"));
        let (store, space) = opened(runtime, &directory.path().join("store"));
        let (mut floor_callers, mut callers) = (callers(&space, count), callers(&space, count));
        let seen = Arc::new(AtomicU64::new(0));
        let (rounds, length) = if report.quick { (2, 1) } else { (5, 3) };
        let length = Duration::from_secs(length);
        load::run(runtime, &store, &mut callers, length, &seen);
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            theirs.push(load::run_floor(runtime, &floor, &mut floor_callers, length));
            ours.push(load::run(runtime, &store, &mut callers, length, &seen));
        }
        floor.close();
        let (value, floor) = (median(ours), median(theirs));
        report.add(Figure { name: &name, value, unit: "commits/s", floor, target });
        if std::env::var_os("LATCHWORK_STATS").is_some() {
            eprintln!("{:?}", runtime.block_on(store.stats()));
        }
    }
}

/// Runs 256 callers for two minutes. Shows whether the rate falls, whether memory grows, and how much is written.
pub(crate) fn sustained(runtime: &Runtime, report: &mut Report) {
    if !report.wants("store.sustained.256") && !report.wants("store.bytes") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let (store, space) = opened(runtime, &directory.path().join("store"));
    let mut callers = callers(&space, 256);
    let seen = Arc::new(AtomicU64::new(0));
    let seconds = if report.quick { 12 } else { 120 };
    let ticks = std::thread::spawn({
        let seen = seen.clone();
        move || {
            let mut ticks = vec![(Instant::now(), 0, resident_mb())];
            for _ in 0..seconds {
                std::thread::sleep(Duration::from_secs(1));
                ticks.push((Instant::now(), seen.load(Ordering::Relaxed), resident_mb()));
            }
            ticks
        }
    });
    let written = bytes_written();
    load::run(runtime, &store, &mut callers, Duration::from_secs(seconds), &seen);
    let written = bytes_written() - written;
    let commits = seen.load(Ordering::Relaxed) as f64;
    let ticks = ticks.join().expect("the ticks");
    let rate = |from: usize, to: usize| {
        let ((begin, before, _), (end, after, _)) = (ticks[from], ticks[to]);
        (after - before) as f64 / (end - begin).as_secs_f64()
    };
    let (first, last) = (seconds as usize / 12, seconds as usize);
    let value = rate(last - last / 4, last);
    let floor = rate(0, first);
    report.add(Figure { name: "store.sustained.256", value, unit: "commits/s", floor, target: "≥ 0.8" });
    let memory = |from: usize, to: usize| ticks[from..=to].iter().map(|tick| tick.2).fold(0.0, f64::max);
    let (value, floor) = (memory(last - last / 4, last), memory(0, first));
    report.add(Figure { name: "store.sustained.memory", value, unit: "MB resident", floor, target: "bounded" });
    let (value, floor) = (written / commits, PAYLOAD_BYTES as f64);
    report.add(Figure { name: "store.bytes", value, unit: "bytes/commit", floor, target: "report" });
}
