//! Calls that cross nodes, against commits of the same store.

use std::time::{Duration, Instant};

use latchwork::node::Nodes;
use latchwork::store::{Commit, SpaceSpec, Store};
use tokio::runtime::Runtime;

use crate::process::{Process, answers, node, store, ten};
use crate::report::{Figure, Report};
use crate::server::Server;

pub(crate) fn calls(runtime: &Runtime, report: &Report) {
    let rounds = if report.quick { 30 } else { 500 };
    if report.wants("nodes.remote_signal") {
        let (value, floor) = runtime.block_on(remote_signal(rounds));
        report.add(Figure { name: "nodes.remote_signal", value, unit: "µs", floor, target: "≤ 3" });
    }
    if report.wants("nodes.lock") {
        let (value, floor) = runtime.block_on(lock(rounds));
        report.add(Figure { name: "nodes.lock", value, unit: "µs", floor, target: "≤ 3" });
    }
}

fn median(mut times: Vec<Duration>) -> f64 {
    times.sort_unstable();
    times[times.len() / 2].as_secs_f64() * 1e6
}

/// The median of two commits, one after the other.
async fn two_commits(store: &Store, rounds: usize) -> f64 {
    let space = store.space(SpaceSpec::new("floor").keys_used_once()).await.expect("a space");
    let mut times = Vec::new();
    for _ in 0..rounds {
        let began = Instant::now();
        for _ in 0..2 {
            let key = space.key(store.env().uuid().as_bytes());
            assert!(store.commit(Commit::new().put(&key, "x")).await.expect("a commit").is_applied());
        }
        times.push(began.elapsed());
    }
    median(times)
}

/// An update is sent here, and answered by an execution that the other node owns.
async fn remote_signal(rounds: usize) -> (f64, f64) {
    let server = Server::start_own();
    let store = store(&server.url, "bench").await;
    let other = Process::start("serve", &server.url, "bench", 0).ready();
    let engine = node(&store, "here").start().await.expect("an engine");
    Nodes::on(&store).drain("here", true).await.expect("it drains");
    while !Nodes::on(&store).get("here").await.expect("a node").shards.is_empty() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let answers = answers();
    let handle = engine.start(&answers, 1).id("a").await.expect("a start");
    let mut times = Vec::new();
    for n in 0..rounds as u64 {
        let began = Instant::now();
        let answer: u64 = handle.update("add", &n).await.expect("an answer");
        assert_eq!(answer, n + 1);
        times.push(began.elapsed());
    }
    let floor = two_commits(&store, rounds).await;
    drop(other);
    engine.stop();
    (median(times), floor)
}

/// Two nodes take one lock in turn. The time of a hand-over: half of the time from an own release to the next own turn.
/// The other node waits at every own release, so it has a turn in between.
async fn lock(rounds: usize) -> (f64, f64) {
    let server = Server::start_own();
    let store = store(&server.url, "bench").await;
    let engine = node(&store, "here").register(&ten()).start().await.expect("an engine");
    let floor = two_commits(&store, rounds).await;
    let other = Process::start("locks", &server.url, "bench", 0).ready();
    let (lock, mut times) = (engine.mutex("bench"), Vec::new());
    let mut released: Option<Instant> = None;
    for _ in 0..rounds {
        let guard = lock.clone().acquire().await.expect("the lock");
        times.extend(released.map(|released| released.elapsed() / 2));
        while engine.locks().inspect("bench").await.expect("the lock is held").waiters.is_empty() {
            tokio::task::yield_now().await;
        }
        released = Some(Instant::now());
        guard.release().await.expect("a release");
    }
    drop(other);
    engine.stop();
    (median(times), floor)
}
