//! The suite `store`: the store's speed as ratios to floors that are measured in the same run. Run it with
//! `cargo xtask bench store`. docs/BENCHMARKS.md contains the figures and explains each of them.

// Benchmarks measure the machine's own time.
#![allow(clippy::disallowed_methods)]

mod floor;
mod load;
mod open;
mod read;
mod report;
mod write;

use report::Report;

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).filter(|argument| argument != "--bench").collect();
    let mut words = arguments.iter().map(String::as_str);
    match words.next() {
        Some("child-load") => return open::child_load(words),
        Some("child-open") => return open::child_open(words),
        _ => {}
    }
    let mut report = Report::from_arguments();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime can be started");
    write::latency(&runtime, &mut report);
    write::rates(&runtime, &mut report);
    write::sustained(&runtime, &mut report);
    read::reads(&runtime, &mut report);
    open::open(&mut report);
    report.finish();
}
