//! Many entities at once: transitions per second against the store's rate, and after-effects per second against
//! transitions per second.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;

use crate::kit::{Kit, TELL, TURN};
use crate::load::{self, KEYS, callers};
use crate::report::{Figure, Report, median};
use crate::{processor_seconds, store};

const CALLERS: usize = 256;

/// One caller's entities, and the number of transitions that it has made with each.
struct Caller {
    entities: Vec<(usize, u64)>,
    random: fastrand::Rng,
}

fn all_callers() -> Vec<Caller> {
    let each = KEYS / CALLERS;
    let caller = |number: usize| Caller {
        entities: (number * each..(number + 1) * each).map(|entity| (entity, 0)).collect(),
        random: fastrand::Rng::with_seed(number as u64),
    };
    (0..CALLERS).map(caller).collect()
}

/// Makes callers run transitions for `duration`. Returns transitions per second; with after-effects, until the last of
/// them is delivered and removed.
fn run(runtime: &Runtime, kit: &Kit, workflow: &'static str, callers: &mut Vec<Caller>, duration: Duration) -> f64 {
    let (stop, seen) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let begin = Instant::now();
    let tasks: Vec<_> = std::mem::take(callers)
        .into_iter()
        .map(|mut caller| {
            let (kit, stop, seen) = (kit.clone(), stop.clone(), seen.clone());
            runtime.spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    let at = caller.random.usize(..caller.entities.len());
                    let (entity, times) = &mut caller.entities[at];
                    kit.turn(workflow, *entity, *times).await;
                    *times += 1;
                    seen.fetch_add(1, Ordering::Relaxed);
                }
                caller
            })
        })
        .collect();
    std::thread::sleep(duration);
    stop.store(true, Ordering::Relaxed);
    runtime.block_on(async {
        for task in tasks {
            callers.push(task.await.expect("a caller"));
        }
        while kit.claims.undelivered() > 0 {
            tokio::time::sleep(Duration::from_micros(200)).await;
        }
    });
    // All transitions that began have ended. They count, and so does their time.
    seen.load(Ordering::Relaxed) as f64 / begin.elapsed().as_secs_f64()
}

/// Runs a measurement that returns a rate. If `LATCHWORK_STATS` is set, prints its processor time, which is more
/// reliable than the rate while other work runs.
fn told(what: &str, run: impl FnOnce() -> f64) -> f64 {
    let (begin, before) = (Instant::now(), processor_seconds());
    let rate = run();
    if std::env::var_os("LATCHWORK_STATS").is_some() {
        let each = (processor_seconds() - before) * 1e6 / (rate * begin.elapsed().as_secs_f64());
        eprintln!("claims.rate.256: {each:.1} µs of the processor for each {what}, {rate:.0} a second");
    }
    rate
}

/// Asserts that every entity has the status that its caller left. Returns the number of transitions.
async fn verify(kit: &Kit, workflow: &str, callers: &[Caller]) -> usize {
    for (entity, times) in callers.iter().flat_map(|caller| &caller.entities) {
        let status = if times.is_multiple_of(2) { "a" } else { "b" };
        assert_eq!(kit.at(workflow, *entity).await, (status.into(), 1 + 2 * times));
    }
    callers.iter().flat_map(|caller| &caller.entities).map(|(_, times)| *times as usize).sum()
}

/// Measures in turn: transitions by 256 callers on their own entities; the same with one after-effect each; and the
/// store's callers.
pub(crate) fn rates(runtime: &Runtime, report: &Report) {
    let wants_outbox = report.wants("claims.outbox");
    if !report.wants("claims.rate.256") && !wants_outbox {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let kit = runtime.block_on(Kit::open(&directory.path().join("claims")));
    runtime.block_on(kit.fill(TURN, KEYS));
    runtime.block_on(kit.fill(TELL, KEYS));
    let (store, space) = runtime.block_on(store(&directory.path().join("store")));
    let (mut turning, mut telling, mut bare) = (all_callers(), all_callers(), callers(&space, CALLERS));
    let (duration, rounds) = if report.quick { (Duration::from_secs(1), 1) } else { (Duration::from_secs(3), 5) };
    let (mut turns, mut tells, mut floors) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        runtime.block_on(kit.settle());
        floors.push(told("commit", || load::run(runtime, &store, &mut bare, duration, &Arc::default())));
        turns.push(told("transition", || run(runtime, &kit, TURN, &mut turning, duration)));
        if wants_outbox {
            runtime.block_on(kit.settle());
            tells.push(told("transition and after-effect", || run(runtime, &kit, TELL, &mut telling, duration)));
        }
    }
    runtime.block_on(async {
        let (turned, told) = (verify(&kit, TURN, &turning).await, verify(&kit, TELL, &telling).await);
        assert_eq!(kit.seen.bodies(), turned + told, "each action has run once");
        assert_eq!(kit.seen.told.load(Ordering::SeqCst), told, "each after-effect was delivered once");
        assert_eq!(kit.keys("claim.outbox").await.len(), 0, "all of them are removed");
    });
    let (value, floor) = (median(turns), median(floors));
    report.add(Figure { name: "claims.rate.256", value, unit: "transitions/s", floor, target: "≥ 0.3" });
    if wants_outbox {
        let (value, floor) = (median(tells), value);
        report.add(Figure { name: "claims.outbox", value, unit: "after-effects/s", floor, target: "≥ 0.8" });
    }
}
