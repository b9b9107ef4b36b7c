//! The suite `postgres`, the part of it that needs an engine. Run it with `cargo xtask bench postgres`, which runs the
//! part of the store before it. docs/BENCHMARKS.md contains the figures and explains each of them.

// Benchmarks measure the machine's own time.
#![allow(clippy::disallowed_methods)]

mod idle;
mod own;
#[path = "../../../store/benches/store/report.rs"]
#[allow(dead_code)]
mod report;
#[path = "../../../store/tests/it/server.rs"]
#[allow(dead_code)]
mod server;

use report::Report;

fn main() {
    let report = Report::from_arguments();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime can be started");
    idle::idle(&runtime, &report);
    own::own(&runtime, &report);
    report.finish();
}
