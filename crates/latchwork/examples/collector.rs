//! A collector: gathers what it is sent until there is enough of it, or it has waited long enough, and then hands on
//! the batch. It never ends: after some batches it goes on as new, so that its journal stays short, and takes along
//! what it has not handed on.
//!
//!     cargo run -p latchwork --example collector

use std::time::Duration;

use latchwork::store::Store;
use latchwork::workflow::{Ctx, Engine, Failure, Workflow, workflow};
use serde::{Deserialize, Serialize};

/// How a collector collects, and what it begins with.
#[derive(Clone, Serialize, Deserialize)]
pub struct Collector {
    /// A batch is handed on when it has so many items,
    pub size: usize,
    /// or when its first item has waited so long.
    pub wait_ms: u64,
    /// After so many batches it goes on as new.
    pub batches: u32,
    /// How many it has handed on by now, over all runs.
    pub done: u64,
}

/// Collects for ever.
pub fn collector() -> Workflow<Collector, ()> {
    workflow("collector").run(async |ctx: Ctx, collector: Collector| {
        let mut done = collector.done;
        for _ in 0..collector.batches {
            let batch = collect(&ctx, &collector).await?;
            // The body may run more than once, so the batch has a number that tells it from every other.
            ctx.run("flush", async || flush(done, &batch).await).input(&(done, &batch)).await?;
            done += 1;
            ctx.publish("done", &done).await?;
        }
        // Items that were sent meanwhile, and not received, are there for the next run.
        ctx.continue_as_new(Collector { done, ..collector }).await
    })
}

/// The next batch: at least one item, and at most as many as are wanted.
async fn collect(ctx: &Ctx, collector: &Collector) -> Result<Vec<String>, Failure> {
    // Without an item there is nothing to hand on, however long that takes: meanwhile it is out of memory.
    let mut batch = vec![ctx.receive::<String>("item").await?];
    let until = ctx.now().await.plus(Duration::from_millis(collector.wait_ms));
    while batch.len() < collector.size {
        let left = Duration::from_micros(until.0.saturating_sub(ctx.now().await.0));
        match ctx.receive::<String>("item").timeout(left).await? {
            Some(item) => batch.push(item),
            None => break,
        }
    }
    Ok(batch)
}

/// Hands on a batch. Whoever receives it has to know its number, and take each number once.
async fn flush(number: u64, batch: &[String]) -> Result<(), Failure> {
    println!("batch {number}: {}", batch.join(", "));
    Ok(())
}

/// Sends ten items, and waits until they were handed on.
#[tokio::main]
pub async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let collector = collector();
    let engine = Engine::on(&Store::memory().await?).register(&collector).start().await?;
    let start = Collector { size: 4, wait_ms: 300, batches: 2, done: 0 };
    // Whoever has an item starts the collector, unless it runs.
    for number in 0..10 {
        let item = format!("item {number}");
        let handle = engine.start(&collector, start.clone()).id("collector").signal("item", &item);
        handle.signal_id(format!("item-{number}")).await?;
    }
    // Two batches of four by their size, and one of two by its time.
    engine.handle(&collector, "collector").wait_until("done", |done: &u64| *done == 3).await?;
    println!("{:?} batches, and it waits for more", engine.query::<u64>("collector", "done").await?);
    engine.terminate("collector", "the example is over").await?;
    Ok(())
}
