//! The suite `state`: the speed of containers as ratios to the store, a bare mutex or plain values in the same run. Run
//! it with `cargo xtask bench state`. docs/BENCHMARKS.md contains the figures and explains each of them.

// Benchmarks measure the machine's own time.
#![allow(clippy::disallowed_methods)]

#[path = "../../../store/benches/store/floor.rs"]
#[allow(dead_code)]
mod floor;
#[path = "../../../store/benches/store/load.rs"]
#[allow(dead_code)]
mod load;
#[path = "../../../store/benches/store/report.rs"]
#[allow(dead_code)]
mod report;

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use latchwork::state::{Container, States};
use latchwork::store::{SpaceSpec, Store};
use tokio::runtime::Runtime;

use load::callers;
use report::{Figure, Report, median, resident_mb};

fn main() {
    let report = Report::from_arguments();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime can be started");
    // Measured first, while the process uses little memory.
    idle(&runtime, &report);
    stored(&runtime, &report, "state.hot.256", "≥ 2", |states, _| states.session("hot"));
    stored(&runtime, &report, "state.spread.256", "≥ 0.7", |states, task| states.session(&format!("s-{task}")));
    memory(&runtime, &report);
    report.finish();
}

fn rounds(report: &Report) -> (Duration, usize) {
    if report.quick { (Duration::from_secs(1), 1) } else { (Duration::from_secs(3), 5) }
}

/// Runs tasks that each do `work` again and again. Returns how often per second and how often in total it was done.
fn rate<W, F>(runtime: &Runtime, tasks: usize, duration: Duration, work: impl Fn(usize) -> W) -> (f64, u64)
where
    W: Fn() -> F + Send + 'static,
    F: Future<Output = ()> + Send,
{
    let stop = Arc::new(AtomicBool::new(false));
    let begin = Instant::now();
    let tasks: Vec<_> = (0..tasks)
        .map(|task| {
            let (work, stop) = (work(task), stop.clone());
            runtime.spawn(async move {
                let mut done = 0u64;
                while !stop.load(Ordering::Relaxed) {
                    work().await;
                    done += 1;
                }
                done
            })
        })
        .collect();
    std::thread::sleep(duration);
    stop.store(true, Ordering::Relaxed);
    let done = runtime.block_on(async {
        let mut done = 0;
        for task in tasks {
            done += task.await.expect("a task");
        }
        done
    });
    (done as f64 / begin.elapsed().as_secs_f64(), done)
}

/// Increments of stored counters by 256 tasks, against the store's rate with 256 callers.
fn stored(
    runtime: &Runtime,
    report: &Report,
    name: &str,
    target: &str,
    container: impl Fn(&States, usize) -> Container,
) {
    if !report.wants(name) {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let states = runtime.block_on(States::open(directory.path().join("state"))).expect("states");
    let (store, space) = runtime.block_on(async {
        let store = Store::open(directory.path().join("store")).await.expect("a store");
        let space = store.space(SpaceSpec::new("bench")).await.expect("a space");
        (store, space)
    });
    let mut callers = callers(&space, 256);
    let (duration, rounds) = rounds(report);
    let (mut ours, mut floors) = (Vec::new(), Vec::new());
    let mut landed = 0;
    for _ in 0..rounds {
        floors.push(load::run(runtime, &store, &mut callers, duration, &Arc::default()));
        let (rate, done) = rate(runtime, 256, duration, |task| {
            let container = container(&states, task);
            move || {
                let container = container.clone();
                async move {
                    container.inc_state("count", 1).await.expect("an increment");
                }
            }
        });
        ours.push(rate);
        landed += done;
    }
    let counted: u64 = runtime.block_on(async {
        let mut counted = std::collections::BTreeMap::new();
        for task in 0..256 {
            let container = container(&states, task);
            let state = container.get().await.expect("a read").expect("a state");
            counted.insert(container.name().to_string(), state["count"].as_u64().expect("a count"));
        }
        counted.values().sum()
    });
    assert_eq!(counted, landed, "every increment lands");
    let (value, floor) = (median(ours), median(floors));
    report.add(Figure { name, value, unit: "increments/s", floor, target });
}

/// Increments of one container in memory by 64 tasks, against a bare mutex around an integer.
fn memory(runtime: &Runtime, report: &Report) {
    if !report.wants("state.memory.64") {
        return;
    }
    let states = runtime.block_on(async { States::on(&Store::memory().await.expect("a store")).await });
    let container = states.expect("states").sequencer("bench");
    let bare = Arc::new(tokio::sync::Mutex::new(0u64));
    let (duration, rounds) = rounds(report);
    let (mut ours, mut floors) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let bare_rate = rate(runtime, 64, duration, |_| {
            let bare = bare.clone();
            move || {
                let bare = bare.clone();
                async move { *bare.lock().await += 1 }
            }
        });
        floors.push(bare_rate.0);
        let our_rate = rate(runtime, 64, duration, |_| {
            let container = container.clone();
            move || {
                let container = container.clone();
                async move {
                    container.inc_state("count", 1).await.expect("an increment");
                }
            }
        });
        ours.push(our_rate.0);
    }
    let (value, floor) = (median(ours), median(floors));
    report.add(Figure { name: "state.memory.64", value, unit: "increments/s", floor, target: "≥ 0.2" });
}

/// The memory of 100,000 idle containers in addition to their states. A mutator has changed each container once.
fn idle(runtime: &Runtime, report: &Report) {
    const COUNT: usize = 100_000;
    if !report.wants("state.idle") {
        return;
    }
    let states = runtime.block_on(async { States::on(&Store::memory().await.expect("a store")).await });
    let states = states.expect("states");
    let name: Arc<str> = "bench".into();
    let state = || latchwork::json!({"count": 1});
    // Warms up the allocator and the runtime, so that the memory that they keep counts for neither side.
    let (bare, full) = runtime.block_on(async {
        let warm: Vec<_> = (0..1000).map(|_| states.sequencer(name.clone())).collect();
        for container in &warm {
            container.atomic_state(move |_| async move { Ok::<_, ()>(Some(state())) }).await.expect("a mutation");
        }
        let before = resident_mb();
        let values: Vec<_> = (0..COUNT).map(|_| state()).collect();
        let bare = resident_mb() - before;
        let before = resident_mb();
        let containers: Vec<_> = (0..COUNT).map(|_| states.sequencer(name.clone())).collect();
        for container in &containers {
            container.atomic_state(move |_| async move { Ok::<_, ()>(Some(state())) }).await.expect("a mutation");
        }
        let full = resident_mb() - before;
        drop((values, containers, warm));
        (bare, full)
    });
    let bytes = (full - bare) * 1e6 / COUNT as f64;
    report.add(Figure { name: "state.idle", value: bytes, unit: "bytes", floor: 100.0, target: "≤ 1" });
}
