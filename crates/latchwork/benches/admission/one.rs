//! One key at a time: a start that is rejected, and starts that replace the pending start.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use latchwork::store::{Commit, SpaceSpec};
use latchwork::workflow::{Ctx, Debounce, Engine, Workflow, WorkflowError, workflow};
use tokio::runtime::Runtime;

use crate::load::{self, callers};
use crate::report::{Figure, Report, median};
use crate::{as_task, commits, steps_in, store, tell_commits};

/// A start whose key is in use, against a read of one key of the same store.
pub(crate) fn reject(runtime: &Runtime, report: &Report) {
    const KEYS: u64 = 100;
    if !report.wants("admission.reject") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let (path, rounds) = (directory.path().to_path_buf(), if report.quick { 10 } else { 100 });
    let (ours, floors) = as_task(runtime, async move {
        let limited = workflow("limited").concurrency_by(1, |number: &u64| number.to_string());
        let limited = limited.run(async |ctx: Ctx, _: u64| ctx.receive::<u64>("end").await);
        let engine = Engine::open(path).register(&limited).start().await.expect("an engine");
        let store = engine.store().clone();
        let space = store.space(SpaceSpec::new("bench")).await.expect("a space");
        for number in 0..KEYS {
            engine.start(&limited, number).await.expect("a start");
            let put = Commit::new().put(&space.key(number.to_string()), vec![7; load::VALUE_BYTES]);
            assert!(store.commit(put).await.expect("a commit").is_applied());
        }
        while store.maintain().await.expect("maintenance") {}
        let before = commits(&engine).await;
        let (mut ours, mut floors) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            let begin = Instant::now();
            for number in 0..KEYS {
                let view = store.view().await.expect("a view");
                assert!(view.get(&space.key(number.to_string())).await.expect("a get").is_some());
            }
            floors.push(begin.elapsed().as_secs_f64() * 1e6 / KEYS as f64);
            let begin = Instant::now();
            for number in 0..KEYS {
                let rejected = engine.start(&limited, number).await;
                assert!(matches!(rejected, Err(WorkflowError::LimitReached { .. })), "{rejected:?}");
            }
            ours.push(begin.elapsed().as_secs_f64() * 1e6 / KEYS as f64);
        }
        tell_commits("admission.reject", "start", commits(&engine).await - before, (rounds as u64 * KEYS) as f64);
        (ours, floors)
    });
    let (value, floor) = (median(ours), median(floors));
    report.add(Figure { name: "admission.reject", value, unit: "µs", floor, target: "≤ 5" });
}

/// Callers that start one key again and again, and each start replaces the pending one; in turn with the store's
/// callers.
pub(crate) fn debounce(runtime: &Runtime, report: &Report) {
    if !report.wants("admission.debounce") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let hour = Debounce::new(Duration::from_secs(3600)).by(|_: &u64| "key");
    let debounced = steps_in(workflow("debounced").debounce(hour), 1);
    let opened = Engine::open(directory.path().join("engine")).register(&debounced).start();
    let engine = runtime.block_on(opened).expect("an engine");
    let (store, space) = runtime.block_on(store(&directory.path().join("store")));
    let mut callers = callers(&space, 256);
    let (rounds, seconds) = if report.quick { (1, 1) } else { (5, 3) };
    let duration = Duration::from_secs(seconds);
    let (mut ours, mut floors) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        std::thread::sleep(Duration::from_millis(1500));
        floors.push(load::run(runtime, &store, &mut callers, duration, &Arc::default()));
        std::thread::sleep(Duration::from_millis(1500));
        ours.push(replace(runtime, &engine, &debounced, duration));
    }
    let (value, floor) = (median(ours), median(floors));
    report.add(Figure { name: "admission.debounce", value, unit: "calls/s", floor, target: "≥ 0.5" });
}

/// Makes callers replace the pending start for `duration`. Returns calls per second.
fn replace(runtime: &Runtime, engine: &Engine, debounced: &Workflow<u64, u64>, duration: Duration) -> f64 {
    const CALLERS: u64 = 64;
    let before = runtime.block_on(commits(engine));
    let pending = runtime.block_on(async { engine.start(debounced, 0).await.expect("a start").id().clone() });
    let (stop, seen) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let begin = Instant::now();
    let tasks: Vec<_> = (0..CALLERS)
        .map(|caller| {
            let (engine, debounced, pending) = (engine.clone(), debounced.clone(), pending.clone());
            let (stop, seen) = (stop.clone(), seen.clone());
            runtime.spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    let handle = engine.start(&debounced, caller).await.expect("a start");
                    assert_eq!(*handle.id(), pending, "it has replaced the pending start");
                    seen.fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    std::thread::sleep(duration);
    stop.store(true, Ordering::Relaxed);
    runtime.block_on(async {
        for task in tasks {
            task.await.expect("a caller");
        }
    });
    let (count, took) = (seen.load(Ordering::Relaxed) as f64, begin.elapsed().as_secs_f64());
    tell_commits("admission.debounce", "call", runtime.block_on(commits(engine)) - before, count);
    count / took
}
