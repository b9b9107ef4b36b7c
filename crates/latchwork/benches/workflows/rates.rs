//! Many executions at once: steps and starts per second, against the store's rate with 256 callers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use latchwork::workflow::{Engine, Workflow};
use tokio::runtime::Runtime;

use crate::load::{self, callers};
use crate::report::{Figure, Report, median};
use crate::{steps_of, store};

/// The numbers of concurrent executions that are tried first. The best of them is measured.
pub(crate) const IN_FLIGHT: [usize; 3] = [256, 1024, 4096];

/// Steps per second of executions of ten steps. Returns the rate.
pub(crate) fn steps(runtime: &Runtime, report: &Report) -> Option<f64> {
    // Recovery is compared with this rate.
    let is_wanted = report.wants("workflows.steps") || report.wants("workflows.recovery");
    is_wanted.then(|| rate(runtime, report, 10, "workflows.steps", "steps/s", "≥ 1"))
}

/// Executions of one step: two commits each.
pub(crate) fn starts(runtime: &Runtime, report: &Report) {
    if report.wants("workflows.starts") {
        rate(runtime, report, 1, "workflows.starts", "executions/s", "≥ 0.4");
    }
}

/// Measures executions of `steps` steps and the store's callers in turn.
fn rate(runtime: &Runtime, report: &Report, steps: u64, name: &str, unit: &str, target: &str) -> f64 {
    let directory = tempfile::tempdir().expect("a directory");
    let several = steps_of("several", steps);
    let opened = Engine::open(directory.path().join("engine")).register(&several).start();
    let engine = runtime.block_on(opened).expect("an engine");
    let (store, space) = runtime.block_on(store(&directory.path().join("store")));
    let mut callers = callers(&space, 256);
    let (rounds, seconds) = if report.quick { (1, 1) } else { (5, 3) };
    let duration = Duration::from_secs(seconds);
    let best = best_in_flight(runtime, &engine, &several, duration / 2);
    load::run(runtime, &store, &mut callers, duration / 2, &Arc::default());
    let (mut ours, mut floors) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        settle(&engine);
        floors.push(load::run(runtime, &store, &mut callers, duration, &Arc::default()));
        settle(&engine);
        ours.push(run(runtime, &engine, &several, best, duration) * steps as f64);
    }
    let (value, floor) = (median(ours), median(floors));
    report.add(Figure { name, value, unit, floor, target });
    value
}

/// Folds everything into the index, so that neither side works while the other is measured.
pub(crate) fn settle(engine: &Engine) {
    assert_eq!(engine.residents(), 0, "ended executions leave memory");
    std::thread::sleep(Duration::from_millis(1500));
}

/// Keeps a number of executions running for a while. Returns how many ended per second.
pub(crate) fn run(
    runtime: &Runtime,
    engine: &Engine,
    several: &Workflow<u64, u64>,
    in_flight: usize,
    duration: Duration,
) -> f64 {
    let (stop, seen) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let begun = Arc::new(AtomicU64::new(0));
    let begin = Instant::now();
    let tasks: Vec<_> = (0..in_flight)
        .map(|_| {
            let (engine, several, stop, seen) = (engine.clone(), several.clone(), stop.clone(), seen.clone());
            let begun = begun.clone();
            runtime.spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    // The limit's key comes from the input, so each execution gets another input.
                    let number = begun.fetch_add(1, Ordering::Relaxed);
                    let handle = engine.start(&several, number).await.expect("a start");
                    handle.result().await.expect("a result");
                    seen.fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    std::thread::sleep(duration);
    stop.store(true, Ordering::Relaxed);
    runtime.block_on(async {
        for task in tasks {
            task.await.expect("a task");
        }
    });
    // All executions that began have ended. They count, and so does their time.
    seen.load(Ordering::Relaxed) as f64 / begin.elapsed().as_secs_f64()
}

/// Returns the number of concurrent executions with the highest rate.
pub(crate) fn best_in_flight(
    runtime: &Runtime,
    engine: &Engine,
    several: &Workflow<u64, u64>,
    each: Duration,
) -> usize {
    let tried = IN_FLIGHT.map(|in_flight| {
        settle(engine);
        (run(runtime, engine, several, in_flight, each), in_flight)
    });
    if std::env::var_os("LATCHWORK_STATS").is_some() {
        eprintln!("{} by concurrent executions: {tried:.0?}", several.name());
    }
    tried.iter().max_by(|a, b| a.0.total_cmp(&b.0)).map_or(IN_FLIGHT[0], |(_, in_flight)| *in_flight)
}
