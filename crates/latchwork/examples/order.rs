//! An order that survives a kill: run `cargo run -p latchwork --example order -- ./data`, press Ctrl+C or use kill -9,
//! and run it again.

use std::time::Duration;

use latchwork::workflow::{Ctx, Engine, Failure, Workflow, workflow};

/// A client for payments. Each execution gets a clone.
#[derive(Clone)]
struct Cards;

impl Cards {
    async fn charge(&self, price: u64) -> std::io::Result<String> {
        println!("charging {price}");
        Ok(format!("receipt for {price}"))
    }
}

async fn place(ctx: Ctx, cards: Cards, price: u64) -> Result<String, Failure> {
    let receipt = ctx.run("charge", async || Ok(cards.charge(price).await?)).await?;
    println!("waiting for five seconds; kill this process");
    ctx.sleep(Duration::from_secs(5)).await?;
    let ship = ctx.run("ship", async || {
        println!("shipping");
        Ok(())
    });
    ship.await?;
    Ok(receipt)
}

fn order(cards: Cards) -> Workflow<u64, String> {
    workflow("order").with(cards).run(place)
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let directory = std::env::args().nth(1).unwrap_or_else(|| "./order-data".into());
    let order = order(Cards);
    let engine = Engine::open(&directory).register(&order).start().await?;
    let handle = engine.start(&order, 42).id("order-1").or_join().await?;
    println!("{}", handle.result().await?);
    Ok(())
}
