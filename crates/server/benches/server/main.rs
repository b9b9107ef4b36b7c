//! The suite `server`: the cost of HTTP in addition to the library, as ratios to the library's own figures on the same
//! store in the same run. Run it with `cargo xtask bench server`. docs/BENCHMARKS.md explains each of the figures.

// Benchmarks measure the machine's own time.
#![allow(clippy::disallowed_methods)]

mod client;
#[path = "../../../latchwork/benches/workflows/common.rs"]
#[allow(dead_code)]
mod common;
mod entities;
#[path = "../../../store/benches/store/floor.rs"]
#[allow(dead_code)]
mod floor;
mod kit;
#[path = "../../../store/benches/store/load.rs"]
#[allow(dead_code)]
mod load;
mod locks;
mod process;
#[path = "../../../latchwork/benches/workflows/rates.rs"]
#[allow(dead_code)]
mod rates;
#[path = "../../../store/benches/store/report.rs"]
#[allow(dead_code)]
mod report;
mod starts;
mod streams;
mod wire;

use common::{as_task, processor_seconds, runtime, steps_of, store};
use report::Report;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    if let ["client", kind, place, number] = words[..] {
        return client::run(kind, place, number);
    }
    let report = Report::from_arguments();
    let runtime = runtime();
    entities::updates(&runtime, &report);
    entities::overhead(&runtime, &report);
    locks::uncontended(&runtime, &report);
    starts::starts(&runtime, &report);
    streams::streams(&runtime, &report);
    process::memory(&runtime, &report);
    process::start(&report);
    report.finish();
}
