//! A thousand clients that follow one busy stream to its end.

use std::time::Instant;

use latchwork::flow::{AnswerKind, Flow, flow, handler, sequencer};
use latchwork::workflow::Engine;
use latchwork_server::Api;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::runtime::Runtime;

use crate::kit::{Clients, serve};
use crate::processor_seconds;
use crate::report::{Figure, Report, median};

/// The clients of the stream.
pub(crate) const CLIENTS: usize = 1000;
/// The bound: events per second and core.
const BOUND: f64 = 100_000.0;

#[derive(Default, Serialize, Deserialize, JsonSchema)]
struct Counted {
    total: u64,
}

/// A request that waits for its clients, and then changes its state ten times in each of `rounds` rounds.
fn busy(rounds: u64) -> Flow {
    let gate = handler("gate").run(async |ctx, value: u64| ctx.suspend("go").await.map(|_| value));
    let body = handler("body").needs::<Counted>().run(async |ctx, value: u64| {
        for _ in 0..10 {
            ctx.sequencer().inc([("total", 1)]).await?;
        }
        Ok(value + 1)
    });
    let busy = sequencer("busy").state::<Counted>().most_rounds(u32::MAX);
    let busy = busy.step(&gate).do_while(move |value, _| *value < rounds, &body);
    flow("busy").action("run", busy.build().expect("a sequencer")).build().expect("a flow")
}

/// Events that arrive, per second of the server's processor time, which includes the request itself. The floor of
/// `server.streams.library` are readers in the process of the server.
pub(crate) fn streams(runtime: &Runtime, report: &Report) {
    if !report.wants("server.streams") {
        return;
    }
    let (rounds, length) = if report.quick { (1, 10) } else { (3, 100) };
    let (mut per_core, mut per_second, mut floors) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        let directory = tempfile::tempdir().expect("a directory");
        let flow = busy(length);
        let engine = runtime.block_on(Engine::open(directory.path()).flow(&flow).start()).expect("an engine");
        floors.push(readers(runtime, &engine, &flow));
        let (server, place) = serve(runtime, Api::on(&engine).flow(&flow));
        let mut clients = Clients::start("follow", &place, CLIENTS);
        runtime.block_on(async { engine.flow(&flow).run("run", 0).id("http").await.expect("a request") });
        clients.begin("/v1/flows/busy/requests/http/events");
        clients.hear("open");
        let (before, began) = (processor_seconds(), Instant::now());
        go(runtime, &engine, &flow, "http");
        let round = clients.end();
        let (used, took) = (processor_seconds() - before, began.elapsed().as_secs_f64());
        if std::env::var_os("LATCHWORK_STATS").is_some() {
            eprintln!("server.streams: {} events in {took:.1} s; clients used {:.1} s", round.figure, round.used);
        }
        per_core.push(round.figure / used);
        per_second.push(round.figure / took);
        drop(clients);
        runtime.block_on(server.shutdown()).expect("an end");
    }
    let (value, unit) = (median(per_core), "events/s per core");
    let figure = |name, value, unit, floor, target| Figure { name, value, unit, floor, target };
    report.add(figure("server.streams", value, unit, BOUND, "≥ 1"));
    report.add(figure("server.streams.library", value, unit, median(floors), "report"));
    report.add(figure("server.streams.elapsed", median(per_second), "events/s", BOUND, "report"));
}

/// Opens the gate of a request.
fn go(runtime: &Runtime, engine: &Engine, flow: &Flow, id: &str) {
    runtime.block_on(async {
        let flows = engine.flow(flow);
        let request = flows.request(id);
        let question = loop {
            if let Some(question) = request.suspensions().await.expect("questions").into_iter().next() {
                break question;
            }
            tokio::task::yield_now().await;
        };
        flows.answer(&question.id, AnswerKind::Approve, (), "bench").await.expect("an answer");
    });
}

/// Events per second and core that readers in this process get.
fn readers(runtime: &Runtime, engine: &Engine, flow: &Flow) -> f64 {
    let request = runtime.block_on(async { engine.flow(flow).run("run", 0).id("library").await.expect("a request") });
    let readers: Vec<_> = (0..CLIENTS)
        .map(|_| {
            let mut events = request.events();
            runtime.spawn(async move {
                let mut next = 0;
                while let Some(event) = events.next().await.expect("an event") {
                    assert_eq!(event.number, next, "no number is missing");
                    next += 1;
                }
                next
            })
        })
        .collect();
    let before = processor_seconds();
    go(runtime, engine, flow, "library");
    let mut all = 0;
    runtime.block_on(async {
        for reader in readers {
            all += reader.await.expect("a reader");
        }
    });
    all as f64 / (processor_seconds() - before)
}
