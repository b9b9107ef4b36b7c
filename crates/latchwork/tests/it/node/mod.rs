//! Several nodes on one store. Here they are engines in one process, on a store in memory; `processes.rs` has real
//! processes on PostgreSQL.

// Leases and deaths take real time here; `simulation.rs` has virtual time.
#![allow(clippy::disallowed_methods)]

mod between;
mod calls;
mod canary;
mod held;
mod membership;
mod postgres;
mod processes;
mod simulation;
mod told;
mod versions;
mod wire;
mod wrong;

use std::future::IntoFuture;
use std::time::Duration;

use latchwork::node::{NodeInfo, NodeOptions, Nodes};
use latchwork::store::Store;
use latchwork::workflow::{Ctx, Engine, EngineBuilder, Workflow, workflow};

/// A short lease, so that deaths are noticed soon. A busy machine may take a live node for dead; it joins again.
const LEASE: Duration = Duration::from_millis(600);

async fn in_time<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(60), future).await.expect("it hangs")
}

fn named(store: &Store, name: &str) -> EngineBuilder {
    Engine::on(store).node(NodeOptions::new().name(name).lease(LEASE))
}

/// Waits for a signal under a lock, then runs a step.
fn waits() -> Workflow<u64, u64> {
    workflow("waits").run(async |ctx: Ctx, base: u64| {
        let number = ctx.receive::<u64>("go").await?;
        ctx.run("step", async || Ok(base + number)).await
    })
}

/// A node that can die without a word, as a process that is killed.
struct Doomed {
    engine: Engine,
    runtime: tokio::runtime::Runtime,
}

impl Doomed {
    /// Runs something on the runtime that dies with the node.
    async fn run<T: Send + 'static>(&self, future: impl Future<Output = T> + Send + 'static) -> T {
        self.runtime.spawn(future).await.unwrap()
    }

    fn kill(self) {
        self.runtime.shutdown_background();
        std::mem::forget(self.engine);
    }
}

async fn doomed(builder: EngineBuilder) -> Doomed {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let engine = runtime.spawn(async move { builder.start().await.unwrap() }).await.unwrap();
    Doomed { engine, runtime }
}

/// Waits until the nodes are as asked.
async fn until(store: &Store, what: &str, holds: impl Fn(&[NodeInfo]) -> bool) -> Vec<NodeInfo> {
    let nodes = Nodes::on(store);
    for _ in 0..3000 {
        let listed = nodes.list().await.unwrap();
        if holds(&listed) {
            return listed;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("{what}: {:?}", nodes.list().await.unwrap());
}

fn shares(nodes: &[NodeInfo]) -> Vec<usize> {
    nodes.iter().map(|node| node.shards.len()).collect()
}
