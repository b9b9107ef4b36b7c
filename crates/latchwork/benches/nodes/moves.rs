//! How fast work moves: after a kill, at an orderly stop, and with very many executions.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use latchwork::node::Nodes;
use latchwork::store::Store;
use tokio::runtime::Runtime;

use crate::process::{LEASE, Process, Told, beats, hangs, node, store};
use crate::report::{Figure, Report};
use crate::server::Server;

/// When each execution last began a body in this process.
type Begun = Arc<std::sync::Mutex<BTreeMap<u64, Instant>>>;

fn telling(begun: &Begun) -> Told {
    let begun = begun.clone();
    Arc::new(move |n| {
        begun.lock().expect("no panic").insert(n, Instant::now());
    })
}

async fn until(what: &str, limit: Duration, holds: impl AsyncFn() -> bool) {
    let began = Instant::now();
    while !holds().await {
        assert!(began.elapsed() < limit, "{what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}

async fn shares(store: &Store) -> Vec<usize> {
    let nodes = Nodes::on(store).list().await.unwrap_or_default();
    nodes.iter().map(|node| node.shards.len()).collect()
}

pub(crate) fn moves(runtime: &Runtime, report: &Report) {
    for (name, kills) in [("nodes.failover", true), ("nodes.handover", false)] {
        if report.wants(name) {
            let seconds = runtime.block_on(moved(kills, if report.quick { 50 } else { 500 }));
            let (floor, target) = if kills { (LEASE.as_secs_f64(), "≤ 1.5") } else { (1.0, "≤ 1") };
            report.add(Figure { name, value: seconds, unit: "s", floor, target });
        }
    }
    if report.wants("nodes.takeover") {
        let count = if report.quick { 3_000 } else { 100_000 };
        let (value, floor) = runtime.block_on(takeover(count));
        report.add(Figure { name: "nodes.takeover", value, unit: "executions/s", floor, target: "≥ 0.8" });
    }
}

/// Two nodes run executions that beat. One of them ends; the seconds until all executions have beaten here.
async fn moved(kills: bool, count: u64) -> f64 {
    let server = Server::start_own();
    let store = store(&server.url, "bench").await;
    let begun = Begun::default();
    let beats = beats(telling(&begun));
    let engine = node(&store, "here").register(&beats).start().await.expect("an engine");
    let mut other = Process::start("serve", &server.url, "bench", 0).ready();
    until("two halves", Duration::from_secs(60), async || shares(&store).await == [32, 32]).await;
    for n in 0..count {
        engine.start(&beats, n).id(format!("b{n}")).await.expect("a start");
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    let ended = Instant::now();
    if kills {
        other.kill();
    } else {
        other.dismiss();
    }
    until("every execution beats here", Duration::from_secs(120), async || {
        let begun = begun.lock().expect("no panic");
        begun.len() as u64 == count && begun.values().all(|last| *last > ended)
    })
    .await;
    let took = ended.elapsed().as_secs_f64();
    engine.stop();
    took
}

/// Executions a second that begin again: taken over by a live node, and recovered by an engine that starts.
async fn takeover(count: u64) -> (f64, f64) {
    let server = Server::start_own();
    let mut rates = Vec::new();
    for is_live in [false, true] {
        let schema = format!("bench_{is_live}");
        let store = store(&server.url, &schema).await;
        let begun = Begun::default();
        let hangs = hangs(telling(&begun));
        let mut other = Process::start("hangs", &server.url, &schema, count).ready();
        let builder = || node(&store, "here").register(&hangs);
        let live = if is_live {
            let engine = builder().start().await.expect("an engine");
            Nodes::on(&store).drain("here", true).await.expect("it drains");
            until("all is elsewhere", Duration::from_secs(60), async || shares(&store).await.contains(&64)).await;
            begun.lock().expect("no panic").clear();
            Some(engine)
        } else {
            None
        };
        other.kill();
        let engine = match live {
            Some(engine) => engine,
            None => {
                tokio::time::sleep(LEASE * 2).await;
                builder().start().await.expect("an engine")
            }
        };
        until("all are back", Duration::from_secs(600), async || begun.lock().expect("no panic").len() as u64 == count)
            .await;
        let (first, last) = {
            let begun = begun.lock().expect("no panic");
            (begun.values().min().copied(), begun.values().max().copied())
        };
        let took = last.zip(first).map_or(0.0, |(last, first)| (last - first).as_secs_f64());
        rates.push(count as f64 / took);
        engine.stop();
    }
    (rates[1], rates[0])
}
