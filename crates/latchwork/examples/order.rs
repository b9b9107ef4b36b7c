//! An order that survives being killed: `cargo run -p latchwork --example order -- ./data`, Ctrl+C or kill -9, again.

use std::time::Duration;

use latchwork::workflow::{Ctx, Engine, Failure, workflow};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let directory = std::env::args().nth(1).unwrap_or_else(|| "./order-data".into());
    let order = workflow("order").run(async |ctx: Ctx, price: u64| {
        let receipt = ctx.run("charge", async || {
            println!("charging {price}");
            Ok::<_, Failure>(format!("receipt for {price}"))
        });
        let receipt = receipt.await?;
        println!("waiting five seconds; kill me");
        ctx.sleep(Duration::from_secs(5)).await?;
        ctx.run("ship", async || {
            println!("shipping");
            Ok::<_, Failure>(())
        })
        .await?;
        Ok(receipt)
    });
    let engine = Engine::open(&directory).register(&order).start().await?;
    let handle = engine.start(&order, 42).id("order-1").or_join().await?;
    println!("{}", handle.result().await?);
    Ok(())
}
