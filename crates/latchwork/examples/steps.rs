//! The guide of docs/workflows/steps.md as one program: `cargo run -p latchwork --example steps`.

use std::collections::BTreeMap;
use std::time::Duration;

use latchwork::entity::{Add, Update};
use latchwork::json;
use latchwork::store::{Store, Uuid};
use latchwork::workflow::{Attempt, Ctx, Engine, Failure, Kind, Retry, Tx, Workflow, WorkflowError, workflow};
use parking_lot::Mutex;

type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

/// A bank: its charges, by idempotency key.
static CHARGED: Mutex<BTreeMap<Uuid, u64>> = Mutex::new(BTreeMap::new());

/// Charges once for each key, no matter how often it is called. The answer to the first call is lost.
async fn charge(amount: u64, attempt: Attempt) -> std::result::Result<u64, Failure> {
    println!("attempt {} of the charge", attempt.number);
    CHARGED.lock().entry(attempt.idempotency_key).or_insert(amount);
    if attempt.number == 1 { Err(Failure::new("no answer")) } else { Ok(amount) }
}

/// Charges, counts the order in a slot, and takes the goods out of the stock in a transaction.
fn order() -> Workflow<u64, String> {
    workflow("order").run(async |ctx: Ctx, amount: u64| {
        let paid = ctx
            .run_with("charge", async |attempt: Attempt| charge(amount, attempt).await)
            .input(&amount)
            .retry(Retry::exponential().max_attempts(5).first_pause(Duration::from_millis(10)))
            .timeout(Duration::from_secs(30))
            .total_timeout(Duration::from_secs(3600))
            .await?;

        let number = ctx.state().global::<u64>("orders").increment(1).await?.value;
        ctx.state().execution::<String>("stage").set("paid".into()).await?;

        let left = ctx.transaction("take", async |tx: Tx| {
            let stock = tx.get("stock").await?.ok_or_else(|| Failure::new("there is no stock"))?;
            let left = stock.data["pieces"].as_u64().unwrap_or(0).checked_sub(1);
            let left = left.ok_or_else(|| Failure::new("sold out"))?;
            tx.update(Update::new("stock").data(json!({"pieces": left})));
            tx.workflow::<u64>("sold").increment(1).await?;
            Ok(left)
        });
        let left = left.await?;
        Ok(format!("order {number}: paid {paid}, {left} left"))
    })
}

/// Adds numbers, ten in each run, so that its journal never holds more than ten steps.
fn sum() -> Workflow<(u64, u64), u64> {
    workflow("sum").run(async |ctx: Ctx, (from, mut sum): (u64, u64)| {
        for number in from..from + 10 {
            sum += ctx.run("read", async || Ok(number)).await?;
        }
        if from + 10 < 100 {
            return ctx.continue_as_new((from + 10, sum)).await;
        }
        Ok(sum)
    })
}

#[tokio::main]
async fn main() -> Result {
    let (order, sum) = (order(), sum());
    // Engine::open(directory) keeps it in files.
    let engine = Engine::on(&Store::memory().await?).register(&order).register(&sum).start().await?;
    engine.entities().add(Add::new("stock").id("stock").data(json!({"pieces": 2}))).await?;

    let handle = engine.start(&order, 42).id("order-1").await?;
    println!("{}", handle.result().await?);
    println!("the bank has charged {:?}", CHARGED.lock().values().collect::<Vec<_>>());
    let history = engine.history("order-1").await?;
    let charge = history.find(Kind::Step, "charge").ok_or("it was charged")?;
    println!("{} attempts, the first of which failed: {}", charge.attempts, charge.failures[0].message);

    starts(&engine, &order).await?;

    let handle = engine.start(&sum, (0, 0)).await?;
    println!("the sum is {}", handle.result().await?);
    let history = engine.history(handle.id()).await?;
    println!("run {} has {} operations", history.run, history.operations.len());
    Ok(())
}

async fn starts(engine: &Engine, order: &Workflow<u64, String>) -> Result {
    match engine.start(order, 42).id("order-1").await {
        Err(WorkflowError::AlreadyStarted { id }) => println!("{id} is taken"),
        other => drop(other?),
    }
    let joined = engine.start(order, 42).id("order-1").or_join().await?;
    println!("joined: {}", joined.result().await?);

    // A caller without an answer sends the same start again.
    let first = engine.start(order, 7).idempotency_key("cart-9").await?;
    let again = engine.start(order, 7).idempotency_key("cart-9").await?;
    println!("the same execution: {}", first.id() == again.id());
    println!("{}", again.result().await?);
    match engine.start(order, 8).idempotency_key("cart-9").await {
        Err(WorkflowError::KeyReused { key, .. }) => println!("{key} was used with another input"),
        other => drop(other?),
    }
    Ok(())
}
