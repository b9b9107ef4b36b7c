//! The suite `messages`: the cost of messages to executions, as ratios to the figures of the store and of workflows in
//! the same run. Run it with `cargo xtask bench messages`. docs/BENCHMARKS.md contains the figures and explains each of
//! them.

// Benchmarks measure the machine's own time.
#![allow(clippy::disallowed_methods)]

mod children;
#[path = "../workflows/common.rs"]
#[allow(dead_code)]
mod common;
#[path = "../../../store/benches/store/floor.rs"]
#[allow(dead_code)]
mod floor;
mod list;
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
mod senders;

use common::{as_task, in_turns, runtime, steps_of, store};
use report::Report;

fn main() {
    let report = Report::from_arguments();
    let runtime = runtime();
    one::signal(&runtime, &report);
    one::update(&runtime, &report);
    senders::hot(&runtime, &report);
    children::children(&runtime, &report);
    list::list(&runtime, &report);
    report.finish();
}
