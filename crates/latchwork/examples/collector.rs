//! A collector: gathers items until it has enough of them, or has waited long enough, and then passes on the batch. It
//! never ends: after some batches it continues as new, so that its journal stays short, and keeps the items that it has
//! not passed on.
//!
//!     cargo run -p latchwork --example collector

use std::time::Duration;

use latchwork::store::Store;
use latchwork::workflow::{Ctx, Engine, Failure, Workflow, workflow};
use serde::{Deserialize, Serialize};

/// The settings of a collector, and its state at the beginning of a run.
#[derive(Clone, Serialize, Deserialize)]
pub struct Collector {
    /// A batch is passed on when it has this many items,
    pub size: usize,
    /// or when its first item has waited this long.
    pub wait_ms: u64,
    /// After this many batches it continues as new.
    pub batches: u32,
    /// How many batches it has passed on so far, over all runs.
    pub done: u64,
}

/// Collects forever.
pub fn collector() -> Workflow<Collector, ()> {
    workflow("collector").run(async |ctx: Ctx, collector: Collector| {
        let mut done = collector.done;
        for _ in 0..collector.batches {
            let batch = collect(&ctx, &collector).await?;
            // The body may run more than once, so the batch has a unique number.
            ctx.run("flush", async || flush(done, &batch).await).input(&(done, &batch)).await?;
            done += 1;
            ctx.publish("done", &done).await?;
        }
        // The next run receives the items that were sent meanwhile.
        ctx.continue_as_new(Collector { done, ..collector }).await
    })
}

/// The next batch: at least one item, and at most as many as a batch may have.
async fn collect(ctx: &Ctx, collector: &Collector) -> Result<Vec<String>, Failure> {
    // It waits for the first item without a limit. It is out of memory meanwhile.
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

/// Passes on a batch. The receiver must remember the number, and accept each number once.
async fn flush(number: u64, batch: &[String]) -> Result<(), Failure> {
    println!("batch {number}: {}", batch.join(", "));
    Ok(())
}

/// Sends ten items, and waits until they are passed on.
#[tokio::main]
pub async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let collector = collector();
    let engine = Engine::on(&Store::memory().await?).register(&collector).start().await?;
    let start = Collector { size: 4, wait_ms: 300, batches: 2, done: 0 };
    // Each sender starts the collector, unless it runs.
    for number in 0..10 {
        let item = format!("item {number}");
        let handle = engine.start(&collector, start.clone()).id("collector").signal("item", &item);
        handle.signal_id(format!("item-{number}")).await?;
    }
    // Two batches of four by size, and one of two by time.
    engine.handle(&collector, "collector").wait_until("done", |done: &u64| *done == 3).await?;
    println!("{:?} batches, and it waits for more", engine.query::<u64>("collector", "done").await?);
    engine.terminate("collector", "the example is over").await?;
    Ok(())
}
