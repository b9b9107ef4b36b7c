//! The guide of docs/workflows/operating.md as one program: `cargo run -p latchwork --example operating`.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use latchwork::store::Store;
use latchwork::workflow::{
    Attribute, Ctx, Engine, ExecutionFilter, ExecutionState, Executions, Failure, Retry, Status, WaitsFor, Workflow,
    WorkflowError, workflow,
};
use metrics::{Counter, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use parking_lot::Mutex;
use serde_json::{Value, json};

type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

const HOUR: Duration = Duration::from_secs(3600);

/// True if the bank can be reached.
static BANK: AtomicBool = AtomicBool::new(false);

/// Pays, waits for an approval, and ships.
fn order() -> Workflow<i64, String> {
    workflow("order").run(async |ctx: Ctx, price: i64| {
        ctx.set_attribute("price", price).await?;
        let charge = ctx.run("charge", async || match BANK.load(Ordering::SeqCst) {
            true => Ok(price),
            false => Err(Failure::new("the bank cannot be reached")),
        });
        let hourly = Retry::exponential().first_pause(HOUR).longest_pause(HOUR);
        let paid = charge.retry(hourly).await?;
        ctx.tag("paid").await?;
        let by = ctx.receive::<String>("approve").await?;
        ctx.untag("paid").await?;
        ctx.run("ship", async || Ok(format!("shipped for {paid}, approved by {by}"))).await
    })
}

/// Panics until it is repaired.
fn broken(is_repaired: bool) -> Workflow<(), u32> {
    workflow("broken").run(move |ctx: Ctx, ()| async move {
        let number = ctx.run("number", async || Ok(7)).await?;
        assert!(is_repaired, "this case is not handled");
        Ok(number)
    })
}

/// Counts counters, as an exporter would.
#[derive(Clone, Default)]
struct Counted(Arc<Mutex<BTreeMap<String, Arc<AtomicU64>>>>);

impl Recorder for Counted {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}

    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        let labels: Vec<_> = key.labels().map(|label| format!("{}={:?}", label.key(), label.value())).collect();
        let name = format!("{}{{{}}}", key.name(), labels.join(","));
        Counter::from_arc(self.0.lock().entry(name).or_default().clone())
    }

    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }

    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

#[tokio::main]
async fn main() -> Result {
    // Set it before the engine starts. In a service this is the recorder of an exporter.
    let counted = Counted::default();
    metrics::set_global_recorder(counted.clone())?;

    let (order, store) = (order(), Store::memory().await?);
    let engine = Engine::on(&store).register(&order).register(&broken(false)).start().await?;
    for (id, price) in [("o1", 10), ("o2", 250), ("o3", 40)] {
        engine.start(&order, price).id(id).tag("vip").attribute("shop", "north").await?;
    }
    until(&engine, "o3", |waits| matches!(waits, WaitsFor::Retry(_))).await?;
    why(&engine).await?;
    look(&store).await?;
    lists(&engine).await?;
    bulk(&engine, &order).await?;
    fork(&engine, &order).await?;
    starts(&engine, &order).await?;
    by_name(&engine).await?;
    let engine = parked(engine, &store, &order).await?;
    pages(&engine).await?;
    for (name, count) in counted.0.lock().iter().filter(|(_, count)| count.load(Ordering::SeqCst) > 0) {
        println!("{name} {}", count.load(Ordering::SeqCst));
    }
    Ok(())
}

/// Waits until an execution waits for something of this kind.
async fn until(engine: &Engine, id: &str, is_it: impl Fn(&WaitsFor) -> bool) -> Result {
    while !engine.why(id).await?.waits.iter().any(|wait| is_it(&wait.what)) {
        engine.store().env().sleep(Duration::from_millis(1)).await;
    }
    Ok(())
}

async fn why(engine: &Engine) -> Result {
    let why = engine.why("o1").await?;
    println!("{why}");
    for wait in &why.waits {
        println!("o1 waits for {wait}; for a time: {}", wait.until.is_some());
    }
    Ok(())
}

async fn look(store: &Store) -> Result {
    let executions = Executions::on(store).await?;
    let one = executions.describe("o1").await?;
    println!("o1 was started with {}, and is tagged {:?}", one.input, one.tags);
    Ok(())
}

async fn lists(engine: &Engine) -> Result {
    // The list shows what executions wait for if they are out of memory.
    while engine.residents() > 0 {
        engine.store().env().sleep(Duration::from_millis(10)).await;
    }
    let stuck = ExecutionFilter::new().workflow("order").waits_for(WaitsFor::Retry("charge".into()));
    let expensive = stuck.clone().tag("vip").at_least("price", 40);
    let page = engine.list(expensive).descending().limit(10).await?;
    for execution in &page {
        println!("{} is worth {:?}", execution.id, execution.attributes.get("price"));
    }
    assert_eq!(page.items[0].attributes["price"], Attribute::Integer(250));

    // Page by page, the oldest first.
    let (mut cursor, mut ids) = (None, Vec::new());
    loop {
        let page = engine.list(stuck.clone()).ascending().limit(2).after(cursor).await?;
        ids.extend(page.items.into_iter().map(|execution| execution.id));
        cursor = page.next;
        if cursor.is_none() {
            break;
        }
    }
    println!("stuck: {ids:?}");
    Ok(())
}

async fn bulk(engine: &Engine, order: &Workflow<i64, String>) -> Result {
    BANK.store(true, Ordering::SeqCst);
    engine.retry_now("o1").await?;
    let stuck = ExecutionFilter::new().workflow("order").waits_for(WaitsFor::Retry("charge".into()));
    let report = engine.bulk(stuck.clone()).dry_run().retry().await?;
    println!("{} would be tried again", report.matched);
    let report = engine.bulk(stuck).retry().await?;
    println!("{} were, {} failed", report.done, report.failures);

    for id in ["o1", "o2", "o3"] {
        until(engine, id, |waits| matches!(waits, WaitsFor::Signal(_))).await?;
    }
    let paid = ExecutionFilter::new().workflow("order").attribute("shop", "north").less_than("price", 100);
    let report = engine.bulk(paid.clone()).operation("monday").signal("approve", "Ada").await?;
    println!("{} were approved", report.done);
    println!("{}", engine.handle(order, "o1").result().await?);
    println!("{}", engine.handle(order, "o3").result().await?);
    let report = engine
        .bulk(ExecutionFilter::new().tag("vip").is(Status::Running).is(Status::Waiting))
        .cancel("closing time")
        .await?;
    println!("{} was cancelled: {:?}", report.done, engine.handle(order, "o2").result().await.err());
    Ok(())
}

async fn fork(engine: &Engine, order: &Workflow<i64, String>) -> Result {
    // The fork keeps the charge, and does not charge again.
    let id = engine.fork("o1").at_step("ship").id("o1-again").await?;
    println!("{}", engine.handle(order, &id).result().await?);
    Ok(())
}

async fn starts(engine: &Engine, order: &Workflow<i64, String>) -> Result {
    match engine.start(order, 1).id("o1").await {
        Err(WorkflowError::AlreadyStarted { id }) => println!("{id} is taken"),
        other => drop(other?),
    }
    let joined = engine.start(order, 1).id("o1").or_join().await?;
    println!("joined: {}", joined.result().await?);
    let restarted = engine.start(order, 1).id("o1").or_restart().delay(Duration::from_millis(20)).await?;
    restarted.signal("approve", "Bob").await?;
    println!("restarted: {}", restarted.result().await?);
    Ok(())
}

async fn by_name(engine: &Engine) -> Result {
    engine.start_by_name("order", json!(25)).id("o4").idempotency_key("cart-9").await?;
    engine.signal("o4", "approve", &json!("Eve")).await?;
    let result: Value = engine.handle_by_id("o4").result().await?;
    println!("as JSON: {result}");
    if let Err(refused) = engine.start_by_name("order", json!({"price": 25})).await {
        println!("{refused}");
    }
    Ok(())
}

async fn parked(engine: Engine, store: &Store, order: &Workflow<i64, String>) -> Result<Engine> {
    std::panic::set_hook(Box::new(|_| {}));
    engine.start(&broken(false), ()).id("b").await?;
    while !matches!(engine.why("b").await?.state, ExecutionState::Parked(_)) {
        engine.store().env().sleep(Duration::from_millis(1)).await;
    }
    drop(std::panic::take_hook());
    for execution in engine.list(ExecutionFilter::new().is(Status::Parked)).await? {
        println!("{}: {:?}", execution.id, execution.state);
    }
    engine.stop();

    let repaired = broken(true);
    let engine = Engine::on(store).register(order).register(&repaired).start().await?;
    engine.resume("b").await?;
    println!("resumed: {}", engine.handle(&repaired, "b").result().await?);
    Ok(engine)
}

async fn pages(engine: &Engine) -> Result {
    let page = engine.operations("o3").limit(3).await?;
    for operation in &page {
        println!("  {} {} {:?} {:?}", operation.place, operation.kind, operation.name, operation.state);
    }
    let rest = engine.operations("o3").after(page.next).await?;
    println!("  and {} more", rest.items.len());
    Ok(())
}
