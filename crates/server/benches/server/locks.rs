//! A lock that is acquired and released over HTTP, against the library's on the same store.

use std::time::Instant;

use latchwork::workflow::Engine;
use latchwork_server::Api;
use tokio::runtime::Runtime;

use crate::as_task;
use crate::kit::{Clients, serve};
use crate::report::{Figure, Report, median};

/// The locks of each side, used in turn.
const NAMES: usize = 10;

/// Acquires and releases a mutex without waiters: two requests of one connection, against two calls of the library, as
/// `locks.uncontended` measures them.
pub(crate) fn uncontended(runtime: &Runtime, report: &Report) {
    if !report.wants("server.lock") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let engine = runtime.block_on(Engine::open(directory.path()).start()).expect("an engine");
    let (server, place) = serve(runtime, Api::on(&engine));
    let mut clients = Clients::start("lock", &place, NAMES);
    let (times, rounds) = if report.quick { (20, 10) } else { (20, 100) };
    let (mut ours, mut floors) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let engine = engine.clone();
        floors.push(as_task(runtime, async move {
            let mut taken = Vec::new();
            for number in 0..times {
                let mutex = engine.mutex(format!("m{}", number % NAMES));
                let begin = Instant::now();
                let guard = mutex.acquire().await.expect("a lock");
                guard.release().await.expect("a release");
                taken.push(begin.elapsed().as_secs_f64() * 1e6);
            }
            median(taken)
        }));
        ours.push(clients.round(&times.to_string()).figure);
    }
    drop(clients);
    runtime.block_on(server.shutdown()).expect("an end");
    let (value, floor) = (median(ours), median(floors));
    report.add(Figure { name: "server.lock", value, unit: "µs", floor, target: "≤ 1.5" });
}
