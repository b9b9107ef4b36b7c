//! The suite `postgres`: the store's speed in PostgreSQL as ratios to pgbench on the same server in the same run. Run
//! it with `cargo xtask bench postgres`. docs/BENCHMARKS.md contains the figures and explains each of them. The figures
//! of an engine are in the suite of the same name of the crate `latchwork`.

// Benchmarks measure the machine's own time.
#![allow(clippy::disallowed_methods)]

mod bloat;
mod floor;
mod own;
mod read;
#[path = "../store/report.rs"]
#[allow(dead_code)]
mod report;
#[path = "../../tests/it/server.rs"]
#[allow(dead_code)]
mod server;
mod watch;
mod write;

use latchwork_store::{PostgresOptions, Space, SpaceSpec, Store};
use report::Report;
use server::Server;
use tokio::runtime::Runtime;

/// The size of a value, as in the suite `store`.
const VALUE_BYTES: usize = 150;

/// A server of this suite's own, with its default durability, and what runs on it.
struct Bench {
    server: Server,
    runtime: Runtime,
    report: Report,
}

impl Bench {
    fn open(&self, schema: &str) -> (Store, Space) {
        self.runtime.block_on(async {
            let store = PostgresOptions::new().schema(schema).connect(&self.server.url).await.expect("a store");
            let space = store.space(SpaceSpec::new("bench")).await.expect("a space");
            (store, space)
        })
    }

    /// Runs a caller as a task of the runtime, as those of users are: only a task is on a thread that polls sockets.
    fn in_task<T: Send + 'static>(&self, caller: impl Future<Output = T> + Send + 'static) -> T {
        self.runtime.block_on(self.runtime.spawn(caller)).expect("the caller ends")
    }

    /// How many rounds are measured, and how long each takes, in seconds.
    fn rounds(&self) -> (usize, u64) {
        if self.report.quick { (1, 1) } else { (5, 4) }
    }
}

fn main() {
    let report = Report::from_arguments();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime can be started");
    let bench = Bench { server: Server::start_own(), runtime, report };
    floor::prepare(&bench);
    write::latency(&bench);
    write::rate(&bench);
    read::reads(&bench);
    watch::watch(&bench);
    own::own(&bench);
    bloat::bloat(&bench);
    let Bench { server, report, .. } = bench;
    drop(server);
    report.finish();
}
