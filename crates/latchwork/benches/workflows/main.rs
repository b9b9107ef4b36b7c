//! The suite `workflows`: the cost of durable execution in addition to its commits, as ratios to the store's figures in
//! the same run. Run it with `cargo xtask bench workflows`. docs/BENCHMARKS.md contains the figures and explains each
//! of them.

// Benchmarks measure the machine's own time.
#![allow(clippy::disallowed_methods)]

mod asleep;
mod common;
#[path = "../../../store/benches/store/floor.rs"]
#[allow(dead_code)]
mod floor;
#[path = "../../../store/benches/store/load.rs"]
#[allow(dead_code)]
mod load;
mod one;
mod rates;
mod recovery;
#[path = "../../../store/benches/store/report.rs"]
#[allow(dead_code)]
mod report;

use common::{
    as_task, child, given, in_turns, kill_when_ready, measured, processor_seconds, ready, runtime, steps_of, store,
};
use report::Report;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let mut words = arguments.iter().map(String::as_str);
    match words.next() {
        Some("child-fall-asleep") => return asleep::child_fall_asleep(words),
        Some("child-asleep") => return asleep::child_asleep(words),
        Some("child-unfinished") => return recovery::child_unfinished(words),
        _ => {}
    }
    let report = Report::from_arguments();
    let runtime = runtime();
    one::sequential(&runtime, &report);
    one::long(&runtime, &report);
    let steps = rates::steps(&runtime, &report);
    rates::starts(&runtime, &report);
    recovery::recovery(&runtime, &report, steps);
    asleep::asleep(&report);
    report.finish();
}
