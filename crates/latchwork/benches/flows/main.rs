//! The suite `flows`: the cost of blocks, checkpoints, streams and boards, as ratios to workflows and to the store in
//! the same run. Run it with `cargo xtask bench flows`. docs/BENCHMARKS.md contains the figures and explains each of
//! them.

// Benchmarks measure the machine's own time.
#![allow(clippy::disallowed_methods)]

#[path = "../workflows/asleep.rs"]
#[allow(dead_code)]
mod asleep;
#[path = "../workflows/common.rs"]
#[allow(dead_code)]
mod common;
#[path = "../../../store/benches/store/floor.rs"]
#[allow(dead_code)]
mod floor;
#[path = "../../../store/benches/store/load.rs"]
#[allow(dead_code)]
mod load;
mod one;
#[path = "../workflows/rates.rs"]
#[allow(dead_code)]
mod rates;
#[path = "../../../store/benches/store/report.rs"]
#[allow(dead_code)]
mod report;
mod several;
mod suspended;

use common::{child, given, measured, processor_seconds, runtime, steps_of, store};
use report::Report;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let mut words = arguments.iter().map(String::as_str);
    match words.next() {
        Some("child-fall-asleep") => return asleep::child_fall_asleep(words),
        Some("child-asleep") => return asleep::child_asleep(words),
        Some("child-suspend") => return suspended::child_suspend(words),
        Some("child-suspended") => return suspended::child_suspended(words),
        _ => {}
    }
    let report = Report::from_arguments();
    let runtime = runtime();
    one::steps(&runtime, &report);
    one::boundary(&runtime, &report);
    one::rounds(&runtime, &report);
    one::resume(&runtime, &report);
    several::stream(&runtime, &report);
    several::board(&runtime, &report);
    several::ephemeral(&runtime, &report);
    suspended::suspended(&report);
    report.finish();
}
