//! The suite `claims`: the cost of running an action once, as ratios to the store's figures in the same run. Run it
//! with `cargo xtask bench claims`. docs/BENCHMARKS.md contains the figures and explains each of them.

// Benchmarks measure the machine's own time.
#![allow(clippy::disallowed_methods)]

#[path = "../workflows/common.rs"]
#[allow(dead_code)]
mod common;
#[path = "../../../store/benches/store/floor.rs"]
#[allow(dead_code)]
mod floor;
mod kit;
mod left;
mod live;
#[path = "../../../store/benches/store/load.rs"]
#[allow(dead_code)]
mod load;
mod one;
mod rates;
#[path = "../../../store/benches/store/report.rs"]
#[allow(dead_code)]
mod report;

use common::{as_task, child, given, in_turns, kill_when_ready, processor_seconds, ready, runtime, store};
use report::Report;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let mut words = arguments.iter().map(String::as_str);
    if words.next() == Some("child-claims") {
        return left::child_claims(words);
    }
    let report = Report::from_arguments();
    let runtime = runtime();
    one::transition(&runtime, &report);
    rates::rates(&runtime, &report);
    one::race(&runtime, &report);
    one::refused(&runtime, &report);
    live::heartbeat(&runtime, &report);
    left::sweep(&runtime, &report);
    left::recovery(&runtime, &report);
    report.finish();
}
