//! The suite `entities`: the speed of entities as ratios to the store's figures in the same run. Run it with
//! `cargo xtask bench entities`. docs/BENCHMARKS.md contains the figures and explains each of them.

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

mod find;
mod write;

use report::Report;

fn main() {
    let report = Report::from_arguments();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime can be started");
    write::updates(&runtime, &report);
    write::hot(&runtime, &report);
    find::finds(&runtime, &report);
    write::transactions(&runtime, &report);
    report.finish();
}
