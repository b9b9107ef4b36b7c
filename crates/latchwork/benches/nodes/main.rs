//! The suite `nodes`: several processes on one PostgreSQL. Run it with `cargo xtask bench nodes`. docs/BENCHMARKS.md
//! contains the figures and explains each of them.

// Benchmarks measure the machine's own time.
#![allow(clippy::disallowed_methods)]

mod calls;
mod idle;
mod moves;
mod process;
mod rates;
#[path = "../../../store/benches/store/report.rs"]
#[allow(dead_code)]
mod report;
#[path = "../../../store/tests/it/server.rs"]
#[allow(dead_code)]
mod server;

use report::Report;

fn main() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime can be started");
    if runtime.block_on(process::play()) {
        return;
    }
    let report = Report::from_arguments();
    rates::rates(&runtime, &report);
    moves::moves(&runtime, &report);
    calls::calls(&runtime, &report);
    idle::idle(&runtime, &report);
    report.finish();
}
