//! Entities over HTTP: updates by many connections, and what one read costs in addition.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use latchwork::entity::{Add, Entities, Update};
use latchwork::store::Rev;
use latchwork::workflow::Engine;
use latchwork_server::Api;
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use crate::client::CONNECTIONS;
use crate::kit::{Clients, serve};
use crate::report::{Figure, Report, median};
use crate::{as_task, processor_seconds};

/// The document of the suite `entities`.
pub(crate) fn document(number: u64) -> Value {
    json!({"number": number, "name": "an entity of middling size", "text": "x".repeat(80)})
}

pub(crate) fn id(index: usize) -> String {
    format!("{index:0>40}")
}

/// A new engine with entities.
fn filled(runtime: &Runtime, directory: &std::path::Path, count: usize) -> Engine {
    runtime.block_on(async {
        let engine = Engine::open(directory).start().await.expect("an engine");
        let numbers: Vec<usize> = (0..count).collect();
        for some in numbers.chunks(1000) {
            let adds = some.iter().map(|index| Add::new("thing").id(id(*index)).data(document(0)));
            engine.entities().add_many(adds).await.expect("a batch");
        }
        engine
    })
}

/// One task's entities of the library, with the revs that it last saw.
struct Updater {
    entities: Vec<(String, Rev)>,
    random: fastrand::Rng,
}

/// Updates per second of tasks that call the library.
fn library(runtime: &Runtime, entities: &Entities, updaters: &mut Vec<Updater>, duration: Duration) -> f64 {
    let (stop, seen) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let begin = Instant::now();
    let tasks: Vec<_> = std::mem::take(updaters)
        .into_iter()
        .map(|mut updater| {
            let (entities, stop, seen) = (entities.clone(), stop.clone(), seen.clone());
            runtime.spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    let at = updater.random.usize(..updater.entities.len());
                    let (id, rev) = &mut updater.entities[at];
                    let update = Update::new(id.as_str()).data(document(rev.0)).if_rev(*rev);
                    *rev = entities.update(update).await.expect("no other task writes this entity");
                    seen.fetch_add(1, Ordering::Relaxed);
                }
                updater
            })
        })
        .collect();
    std::thread::sleep(duration);
    let rate = seen.load(Ordering::Relaxed) as f64 / begin.elapsed().as_secs_f64();
    stop.store(true, Ordering::Relaxed);
    runtime.block_on(async {
        for task in tasks {
            updaters.push(task.await.expect("an updater"));
        }
    });
    rate
}

/// Updates with `If-Match` over 64 connections that are kept alive, against 64 tasks that call the library on the same
/// store. Clients and tasks have entities of their own.
pub(crate) fn updates(runtime: &Runtime, report: &Report) {
    if !report.wants("server.update.64") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let each = if report.quick { 100 } else { 780 };
    let engine = filled(runtime, directory.path(), 2 * CONNECTIONS * each);
    let (server, place) = serve(runtime, Api::on(&engine));
    let mut clients = Clients::start("update", &place, each);
    let mut updaters: Vec<Updater> = (CONNECTIONS..2 * CONNECTIONS)
        .map(|task| Updater {
            entities: (task * each..(task + 1) * each).map(|index| (id(index), Rev(1))).collect(),
            random: fastrand::Rng::with_seed(task as u64),
        })
        .collect();
    let (seconds, rounds) = if report.quick { (1, 1) } else { (3, 5) };
    let (mut ours, mut floors) = (Vec::new(), Vec::new());
    let (mut costs, mut client_costs) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        floors.push(library(runtime, engine.entities(), &mut updaters, Duration::from_secs(seconds)));
        let before = processor_seconds();
        let round = clients.round(&(seconds * 1000).to_string());
        costs.push((processor_seconds() - before) * 1e6 / round.figure);
        client_costs.push(round.used * 1e6 / round.figure);
        ours.push(round.figure / round.seconds);
    }
    drop(clients);
    runtime.block_on(server.shutdown()).expect("an end");
    let (value, floor) = (median(ours), median(floors));
    report.add(Figure { name: "server.update.64", value, unit: "updates/s", floor, target: "≥ 0.5" });
    let (value, floor) = (median(client_costs), median(costs));
    let unit = "µs of processor per update";
    report.add(Figure { name: "server.update.64.client", value, unit, floor, target: "report" });
}

/// The bound of [`overhead`], in microseconds.
const OVERHEAD: f64 = 300.0;

/// The median of a read over HTTP on one connection, less the median of the library's.
pub(crate) fn overhead(runtime: &Runtime, report: &Report) {
    if !report.wants("server.overhead") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let count = if report.quick { 1_000 } else { 10_000 };
    let engine = filled(runtime, directory.path(), count);
    let (server, place) = serve(runtime, Api::on(&engine));
    let mut clients = Clients::start("get", &place, count);
    let (times, rounds) = if report.quick { (200, 1) } else { (5_000, 5) };
    let (mut ours, mut floors) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let entities = engine.entities().clone();
        floors.push(as_task(runtime, async move {
            let mut random = fastrand::Rng::with_seed(2);
            let mut taken = Vec::with_capacity(times);
            for _ in 0..times {
                let begin = Instant::now();
                entities.get(id(random.usize(..count))).await.expect("a get").expect("it is there");
                taken.push(begin.elapsed().as_secs_f64() * 1e6);
            }
            median(taken)
        }));
        ours.push(clients.round(&times.to_string()).figure);
    }
    drop(clients);
    runtime.block_on(server.shutdown()).expect("an end");
    let (http, get) = (median(ours), median(floors));
    let figure = |value, floor, target| Figure { name: "server.overhead", value, unit: "µs", floor, target };
    report.add(figure(http - get, OVERHEAD, "≤ 1"));
    report.add(Figure { name: "server.overhead.get", ..figure(http, get, "report") });
}
