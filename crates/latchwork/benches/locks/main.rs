//! The suite `locks`: the cost of locks as ratios to the store's figures in the same run. Run it with
//! `cargo xtask bench locks`. docs/BENCHMARKS.md contains the figures and explains each of them.

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
#[path = "../../../store/benches/store/report.rs"]
#[allow(dead_code)]
mod report;
mod turns;

use common::{as_task, child, given, in_turns, measured, runtime, store};
use report::Report;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let mut words = arguments.iter().map(String::as_str);
    match words.next() {
        Some("child-use") => return idle::child_use(words),
        Some("child-idle") => return idle::child_idle(words),
        _ => {}
    }
    let report = Report::from_arguments();
    let runtime = runtime();
    turns::uncontended(&runtime, &report);
    turns::contended(&runtime, &report);
    turns::waiters(&runtime, &report);
    idle::idle(&report);
    report.finish();
}
