//! The guide of docs/workflows/waiting.md as one program: `cargo run -p latchwork --example waiting`.

use std::time::Duration;

use latchwork::store::Store;
use latchwork::workflow::{Ctx, Engine, Workflow, WorkflowError, workflow};

type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Chooses values once, waits for a moment in memory and for longer out of it.
fn reminder() -> Workflow<String, String> {
    workflow("reminder").keep(Duration::from_millis(200)).run(async |ctx: Ctx, text: String| {
        let (began, ticket, lucky) = (ctx.now().await, ctx.uuid().await, ctx.random().await % 100);
        println!("ticket {ticket}, lucky number {lucky}");
        ctx.sleep(Duration::from_millis(50)).await?;
        ctx.sleep_until(began.plus(Duration::from_millis(1300))).await?;
        ctx.rate_limit("vendor", 10, Duration::from_secs(1)).acquire().await?;
        let sent = ctx.run("remind", async || Ok(format!("{text} ({lucky})"))).await?;
        Ok(sent)
    })
}

/// Would wait for a day, but may take only a tenth of a second.
fn late() -> Workflow<(), ()> {
    workflow("late").timeout(Duration::from_millis(100)).run(async |ctx: Ctx, ()| {
        ctx.sleep(Duration::from_secs(86_400)).await?;
        Ok(())
    })
}

#[tokio::main]
async fn main() -> Result {
    let (reminder, late) = (reminder(), late());
    let store = Store::memory().await?;
    let engine = Engine::on(&store).register(&reminder).register(&late).start().await?;

    engine.start(&reminder, "tea".to_string()).id("tea").await?;
    store.env().sleep(Duration::from_millis(300)).await;
    println!("{} executions in memory while it waits", engine.residents());

    match engine.start(&late, ()).await?.result().await {
        Err(WorkflowError::TimedOut { .. }) => println!("the other execution has timed out"),
        other => other?,
    }

    // As if the process had ended: the next engine on the same store continues, and the time in between has passed.
    engine.stop();
    let engine = Engine::on(&store).register(&reminder).register(&late).start().await?;
    println!("reminded: {}", engine.handle(&reminder, "tea").result().await?);

    // It is kept for a fifth of a second after its end.
    store.env().sleep(Duration::from_millis(400)).await;
    match engine.handle(&reminder, "tea").result().await {
        Err(WorkflowError::NotFound { id }) => println!("{id} was removed"),
        other => drop(other?),
    }
    Ok(())
}
