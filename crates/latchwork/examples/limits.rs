//! The guide of docs/workflows/limits.md as one program: `cargo run -p latchwork --example limits`.

use std::time::Duration;

use latchwork::store::Store;
use latchwork::workflow::{
    Batch, Ctx, Debounce, Engine, Queue, RateLimit, Workflow, WorkflowBuilder, WorkflowError, workflow,
};
use serde::{Deserialize, Serialize};

type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

#[derive(Debug, Clone, Serialize, Deserialize)]
struct Import {
    customer: String,
    priority: i32,
}

fn of(customer: &str, priority: i32) -> Import {
    Import { customer: customer.into(), priority }
}

/// Waits for the signal that all data has arrived. Returns the customer.
fn import(limits: WorkflowBuilder) -> Workflow<Import, String> {
    limits.run(async |ctx: Ctx, import: Import| {
        ctx.receive::<()>("all there").await?;
        Ok(import.customer)
    })
}

/// Two for each customer and three in total: a start above that is rejected, and the error names the limit.
async fn at_once(store: &Store) -> Result {
    let limits = workflow("import").concurrency_by(2, |import: &Import| import.customer.clone()).concurrency(3);
    let import = import(limits);
    let engine = Engine::on(store).register(&import).start().await?;
    let first = engine.start(&import, of("ada", 0)).await?;
    engine.start(&import, of("ada", 0)).await?;
    match engine.start(&import, of("ada", 0)).await {
        Err(WorkflowError::LimitReached { workflow, key, limit }) => {
            println!("{workflow} for {key}: {limit} run already");
            assert_eq!((&*key, limit), ("ada", 2));
        }
        other => panic!("two imports of ada run: {other:?}"),
    }
    engine.start(&import, of("bob", 0)).await?;
    match engine.start(&import, of("cleo", 0)).await {
        Err(WorkflowError::LimitReached { key, limit, .. }) => assert_eq!((&*key, limit), ("import", 3)),
        other => panic!("three imports run: {other:?}"),
    }
    // The commit that ends an execution releases its permits.
    engine.signal(first.id(), "all there", &()).await?;
    first.result().await?;
    assert_eq!(engine.limit_use("import", Some("ada")).await?.used, 1);
    engine.start(&import, of("ada", 0)).await?;
    engine.shutdown().await?;
    Ok(())
}

/// One at a time; at most two others wait in a queue. A higher priority goes first.
async fn queued(store: &Store) -> Result {
    let queue = Queue::new().depth(2).priority(Duration::from_secs(60), |import: &Import| import.priority);
    let import = import(workflow("import").concurrency(1).when_full(queue));
    let engine = Engine::on(store).register(&import).start().await?;
    let start = |id: &str, priority| engine.start(&import, of(id, priority)).id(id);
    start("first", 0).await?;
    let (low, high) = (start("low", 0).await?, start("high", 1).await?);
    match start("late", 9).await {
        Err(WorkflowError::QueueFull { depth, .. }) => println!("{depth} wait already"),
        other => panic!("the queue is full: {other:?}"),
    }
    let place = engine.why(low.id()).await?.queue.expect("it waits");
    println!("before {}: {}", low.id(), place.ahead);
    assert_eq!((place.ahead, place.used, place.limit), (1, 1, 1));
    // A waiting execution can be sent signals. It receives them after it is admitted.
    for id in ["low", "high", "first"] {
        engine.signal(id, "all there", &()).await?;
    }
    assert_eq!((high.result().await?, low.result().await?), ("high".into(), "low".into()));
    let left = engine.limit_use("import", None).await?;
    assert_eq!((left.used, left.waiting), (0, 0));
    engine.shutdown().await?;
    Ok(())
}

/// Two at once, and one more each quarter of a second. One workflow rejects the others, and the other delays them.
async fn how_often(store: &Store) -> Result {
    let limit = || RateLimit::new(2, Duration::from_millis(500));
    let mail = workflow("mail").rate_limit(limit().by(|to: &String| to.clone()));
    let mail = mail.run(async |_: Ctx, to: String| Ok(to));
    let call = workflow("call").rate_limit(limit().delay()).run(async |_: Ctx, to: String| Ok(to));
    let engine = Engine::on(store).register(&mail).register(&call).start().await?;
    let start = || engine.start(&mail, "ada".to_string());
    start().await?;
    start().await?;
    match start().await {
        Err(WorkflowError::RateLimited { key, retry_after, .. }) => {
            println!("{key} gets the next mail in {} ms", retry_after.as_millis());
            store.env().sleep(retry_after).await;
        }
        other => panic!("there were two: {other:?}"),
    }
    start().await?;
    let began = store.env().now();
    let mut calls = Vec::new();
    for to in ["ada", "bob", "cleo"] {
        calls.push(engine.start(&call, to.to_string()).await?);
    }
    for call in calls {
        call.result().await?;
    }
    assert!(store.env().now() >= began.plus(Duration::from_millis(200)), "the third call was delayed");
    engine.shutdown().await?;
    Ok(())
}

/// Starts within a short time become one execution, with the last input.
async fn debounced(store: &Store) -> Result {
    let quiet = Debounce::new(Duration::from_millis(50)).max_wait(Duration::from_secs(60));
    let index = workflow("index").debounce(quiet.by(|(document, _): &(String, u32)| document.clone()));
    let index = index.run(async |_: Ctx, (_, version): (String, u32)| Ok(version));
    let engine = Engine::on(store).register(&index).start().await?;
    let start = |version| engine.start(&index, ("a".to_string(), version));
    let (first, last) = (start(1).await?, start(2).await?);
    assert_eq!(first.id(), last.id());
    assert_eq!((first.result().await?, last.result().await?), (2, 2));
    println!("version 2 was indexed, version 1 was not");
    engine.shutdown().await?;
    Ok(())
}

/// Inputs that are gathered: one execution for all of them, and a result for each.
async fn gathered(store: &Store) -> Result {
    let send = workflow("send").batch(Batch::new(3, Duration::from_millis(50)));
    let send = send.run(async |ctx: Ctx, mails: Vec<String>| {
        let receipt = |mail: &String| format!("{mail}, sent with {} others", mails.len() - 1);
        ctx.run("send", async || Ok(mails.iter().map(receipt).collect())).await
    });
    let engine = Engine::on(store).register(&send).start().await?;
    let start = |mail: &str| engine.start(&send, mail.to_string());
    let full = [start("a").await?, start("b").await?, start("c").await?];
    let rest = start("d").await?;
    println!("{}", full[1].result().await?);
    assert_eq!(full[2].result().await?, "c, sent with 2 others");
    assert_eq!(rest.result().await?, "d, sent with 0 others");
    // The position in the batch finds the output again after a restart.
    assert_eq!(full[0].item(), Some(0));
    assert_eq!(engine.handle(&send, full[0].id()).of_item(0).result().await?, "a, sent with 2 others");
    engine.shutdown().await?;
    Ok(())
}

/// All parts of the guide, one after the other.
pub async fn run() -> Result {
    at_once(&Store::memory().await?).await?; // or Engine::open("./data")
    queued(&Store::memory().await?).await?;
    how_often(&Store::memory().await?).await?;
    debounced(&Store::memory().await?).await?;
    gathered(&Store::memory().await?).await
}

#[tokio::main]
async fn main() -> Result {
    run().await
}
