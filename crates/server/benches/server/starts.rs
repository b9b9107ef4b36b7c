//! Workflows that are started over HTTP and waited for.

use std::time::Duration;

use latchwork::workflow::Engine;
use latchwork_server::Api;
use tokio::runtime::Runtime;

use crate::client::CONNECTIONS;
use crate::kit::{Clients, serve};
use crate::rates::{best_in_flight, run, settle};
use crate::report::{Figure, Report, median};
use crate::{processor_seconds, steps_of};

/// Executions of one step over 64 connections, each started and waited for by one request, against the library's on the
/// same engine with its best number in flight, as `workflows.starts` measures them. Also with a request of its own for
/// each result.
pub(crate) fn starts(runtime: &Runtime, report: &Report) {
    if !report.wants("server.start.64") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let several = steps_of("several", 1);
    let engine = runtime.block_on(Engine::open(directory.path()).register(&several).start()).expect("an engine");
    let (server, place) = serve(runtime, Api::on(&engine));
    let mut clients = Clients::start("start", &place, 0);
    let mut asking = Clients::start("start-and-ask", &place, 0);
    let (seconds, rounds) = if report.quick { (1, 1) } else { (3, 5) };
    let duration = Duration::from_secs(seconds);
    let best = best_in_flight(runtime, &engine, &several, duration / 2);
    let (mut ours, mut asked, mut same, mut floors) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let (mut costs, mut client_costs) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        settle(&engine);
        floors.push(run(runtime, &engine, &several, best, duration));
        settle(&engine);
        same.push(run(runtime, &engine, &several, CONNECTIONS, duration));
        settle(&engine);
        let before = processor_seconds();
        let round = clients.round(&duration.as_millis().to_string());
        costs.push((processor_seconds() - before) * 1e6 / round.figure);
        client_costs.push(round.used * 1e6 / round.figure);
        ours.push(round.figure / round.seconds);
        settle(&engine);
        let round = asking.round(&duration.as_millis().to_string());
        asked.push(round.figure / round.seconds);
    }
    drop((clients, asking));
    runtime.block_on(server.shutdown()).expect("an end");
    let (ours, floor, unit) = (median(ours), median(floors), "executions/s");
    let figure = |name, value, floor, target| Figure { name, value, unit, floor, target };
    report.add(figure("server.start.64", ours, floor, "≥ 0.4"));
    report.add(figure("server.start.64.same", ours, median(same), "report"));
    report.add(figure("server.start.64.two", median(asked), floor, "report"));
    let (value, floor) = (median(client_costs), median(costs));
    let unit = "µs of processor per execution";
    report.add(Figure { name: "server.start.64.client", value, unit, floor, target: "report" });
}
