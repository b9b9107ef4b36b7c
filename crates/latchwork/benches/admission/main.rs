//! The suite `admission`: the cost of limits, queues, debounce, batches and schedules, as ratios to the figures of
//! workflows, locks and the store in the same run. Run it with `cargo xtask bench admission`. docs/BENCHMARKS.md
//! contains the figures and explains each of them.

// Benchmarks measure the machine's own time.
#![allow(clippy::disallowed_methods)]

#[path = "../workflows/common.rs"]
#[allow(dead_code)]
mod common;
#[path = "../../../store/benches/store/floor.rs"]
#[allow(dead_code)]
mod floor;
mod idle;
#[path = "../../../store/benches/store/load.rs"]
#[allow(dead_code)]
mod load;
mod one;
mod queue;
#[path = "../workflows/rates.rs"]
#[allow(dead_code)]
mod rates;
#[path = "../../../store/benches/store/report.rs"]
#[allow(dead_code)]
mod report;
mod schedules;
mod starts;
#[path = "../locks/turns.rs"]
#[allow(dead_code)]
mod turns;

use common::{as_task, child, given, in_turns, measured, processor_seconds, runtime, steps_in, steps_of, store};
use latchwork::workflow::Engine;
use report::Report;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let mut words = arguments.iter().map(String::as_str);
    match words.next() {
        Some("child-limited") => return idle::child_use(words, true),
        Some("child-free") => return idle::child_use(words, false),
        Some("child-idle") => return idle::child_idle(words),
        Some("child-schedule") => return schedules::child_schedule(words),
        Some("child-scheduled") => return schedules::child_scheduled(words),
        _ => {}
    }
    let report = Report::from_arguments();
    let runtime = runtime();
    starts::limit(&runtime, &report);
    queue::hot(&runtime, &report);
    queue::queue(&runtime, &report);
    queue::depth(&runtime, &report);
    one::reject(&runtime, &report);
    one::debounce(&runtime, &report);
    starts::batch(&runtime, &report);
    idle::idle(&report);
    schedules::at_rest(&report);
    schedules::late(&runtime, &report);
    report.finish();
}

/// The number of commits of an engine so far.
async fn commits(engine: &Engine) -> u64 {
    engine.store().generation().await.expect("a generation").0
}

/// Prints the number of commits for each of `count` operations, if `LATCHWORK_STATS` is set.
fn tell_commits(name: &str, what: &str, commits: u64, count: f64) {
    if std::env::var_os("LATCHWORK_STATS").is_some() {
        eprintln!("{name}: {:.3} commits for each {what}", commits as f64 / count);
    }
}
