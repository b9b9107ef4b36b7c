//! The guide of docs/workflows/errors.md as one program: `cargo run -p latchwork --example errors`.

use std::time::Duration;

use latchwork::store::Store;
use latchwork::workflow::{Ctx, Engine, Failure, Retry, Workflow, WorkflowError, workflow};
use serde::{Deserialize, Serialize};

type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

#[derive(Debug, Serialize, Deserialize, thiserror::Error)]
#[error("{missing} are missing")]
struct Broke {
    missing: u64,
}

/// Pays, and returns the goods if the payment fails.
fn pay() -> Workflow<u64, String> {
    workflow("pay").run(async |ctx: Ctx, price: u64| {
        ctx.run("reserve", async || Ok(())).await?;
        let paid = ctx.run("charge", async || match price.checked_sub(100) {
            // Another attempt would not help.
            Some(missing) if missing > 0 => Err(Failure::typed(Broke { missing }).not_retryable()),
            _ => Ok(price),
        });
        match paid.await {
            Ok(paid) => Ok(format!("paid {paid}")),
            Err(failure) => {
                ctx.run("release", async || Ok(())).await?;
                Err(failure)
            }
        }
    })
}

/// Any error passes through `?`.
fn parse() -> Workflow<String, u32> {
    workflow("parse").run(async |ctx: Ctx, text: String| {
        let number = ctx.run("parse", async || Ok(text.parse::<u32>()?)).retry(Retry::never()).await?;
        assert!(number != 13, "13 is not supported");
        Ok(number)
    })
}

/// Sleeps long enough to leave memory, after a step of this name.
fn plan(step: &'static str) -> Workflow<(), String> {
    workflow("plan").run(move |ctx: Ctx, ()| async move {
        let done = ctx.run(step, async || Ok("done".to_string())).await?;
        ctx.sleep(Duration::from_millis(1200)).await?;
        Ok(done)
    })
}

/// The same by newer code, which knows the older version.
fn changed_plan() -> Workflow<(), String> {
    workflow("plan").run(async |ctx: Ctx, ()| {
        let name = if ctx.version("name", 1..=2).await == 1 { "draw" } else { "sketch" };
        let done = ctx.run(name, async || Ok("done".to_string())).await?;
        ctx.sleep(Duration::from_millis(1200)).await?;
        Ok(format!("{done} by {name}"))
    })
}

#[tokio::main]
async fn main() -> Result {
    failures().await?;
    panics().await?;
    changes().await
}

async fn failures() -> Result {
    let (pay, parse) = (pay(), parse());
    let engine = Engine::on(&Store::memory().await?).register(&pay).register(&parse).start().await?;
    println!("{}", engine.start(&pay, 80).await?.result().await?);
    match engine.start(&pay, 150).id("expensive").await?.result().await {
        Err(WorkflowError::Failed { failure, .. }) => println!("typed: {:?}", failure.get::<Broke>()),
        other => drop(other?),
    }
    println!("steps of the failed execution: {:?}", engine.history("expensive").await?.steps());
    match engine.start(&parse, "x".to_string()).await?.result().await {
        Err(error @ WorkflowError::Failed { .. }) => println!("{:?}: {error}", error.kind()),
        other => drop(other?),
    }
    Ok(())
}

/// A panic of the workflow's own code parks the execution; other executions are not affected.
async fn panics() -> Result {
    let parse = parse();
    let engine = Engine::on(&Store::memory().await?).register(&parse).start().await?;
    // The panic prints its message, which is expected here.
    std::panic::set_hook(Box::new(|_| {}));
    let unlucky = engine.start(&parse, "13".to_string()).id("unlucky").await?;
    while engine.residents() > 0 {
        engine.store().env().sleep(Duration::from_millis(1)).await;
    }
    drop(std::panic::take_hook());
    for (id, reason) in engine.parked().await? {
        println!("{id} is parked: {reason}");
    }
    engine.terminate("unlucky", "it is not needed").await?;
    println!("{}", unlucky.result().await.err().ok_or("it was terminated")?);
    Ok(())
}

/// Code that changes under a running execution.
async fn changes() -> Result {
    let (old, renamed, changed) = (plan("draw"), plan("sketch"), changed_plan());
    let store = Store::memory().await?;
    let engine = Engine::on(&store).register(&old).start().await?;
    engine.start(&old, ()).id("p").await?;
    while engine.residents() > 0 {
        engine.store().env().sleep(Duration::from_millis(1)).await;
    }
    engine.stop();

    // The next deploy renames the step. The engine does not guess.
    let engine = Engine::on(&store).register(&renamed).start().await?;
    engine.wake("p").await?;
    match engine.handle(&renamed, "p").result().await {
        Err(WorkflowError::Parked { reason, .. }) => println!("parked: {reason}"),
        other => println!("not parked: {other:?}"),
    }
    engine.stop();

    // The deploy after that knows both names.
    let engine = Engine::on(&store).register(&changed).start().await?;
    engine.resume("p").await?;
    let new = engine.start(&changed, ()).await?;
    println!("resumed: {}", engine.handle(&changed, "p").result().await?);
    println!("new: {}", new.result().await?);
    Ok(())
}
