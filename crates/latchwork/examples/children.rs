//! The guide of docs/workflows/children.md as one program: `cargo run -p latchwork --example children`.

use std::time::Duration;

use latchwork::store::Store;
use latchwork::workflow::{
    ChildTimedOut, Close, Ctx, Engine, ExecutionState, Failure, First2, Retry, Workflow, workflow,
};
use serde::{Deserialize, Serialize};

type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

#[derive(Debug, Serialize, Deserialize, thiserror::Error)]
#[error("{item} is sold out")]
struct SoldOut {
    item: String,
}

/// Packs one item, if it is in stock.
fn pack() -> Workflow<String, String> {
    workflow("pack").run(async |ctx: Ctx, item: String| {
        let packed = ctx.run("pack", async || match &*item {
            "cake" => Err(Failure::typed(SoldOut { item: item.clone() }).not_retryable()),
            _ => Ok(format!("packed {item}")),
        });
        packed.await
    })
}

/// Waits for an address, with a time limit.
fn courier() -> Workflow<(), String> {
    let courier = workflow("courier").timeout(Duration::from_secs(2));
    courier.run(async |ctx: Ctx, ()| ctx.receive::<String>("address").await)
}

/// Packs all items in children, and sends a courier.
fn order() -> Workflow<Vec<String>, String> {
    workflow("order").run(async |ctx: Ctx, items: Vec<String>| {
        let first = ctx.child(&pack(), items[0].clone()).await?;

        let courier = ctx.child(&courier(), ()).id(format!("courier of {}", ctx.id())).tag("courier").start().await?;
        let rest = ctx.try_map(&items[1..], 4, async |ctx: Ctx, item| ctx.child(&pack(), item.clone()).await);
        let rest = match rest.await {
            Ok(rest) => rest,
            Err(failure) => {
                courier.cancel("there is nothing to bring").await?;
                return match failure.get::<SoldOut>() {
                    Some(SoldOut { item }) => Ok(format!("{first}, but no {item}")),
                    None => Err(failure),
                };
            }
        };
        courier.signal("address", "1 Main Street").await?;
        let address = courier.result().await?;
        Ok(format!("{first}, {} to {address}", rest.join(", ")))
    })
}

/// Starts a child that continues by itself, and a child that takes too long.
fn hasty() -> Workflow<(), String> {
    workflow("hasty").run(async |ctx: Ctx, ()| {
        ctx.child(&courier(), ()).id("on its own").close(Close::Abandon).start().await?;
        let late = ctx.child(&courier(), ()).id("late").await;
        let failure = late.err().ok_or_else(|| Failure::new("it has an address"))?;
        Ok(format!("timed out: {:?}", failure.get::<ChildTimedOut>().map(|late| late.id)))
    })
}

async fn ask_price(shop: &str) -> std::result::Result<u64, Failure> {
    Ok(10 * shop.len() as u64)
}

/// Does several things at once, in branches.
fn branches() -> Workflow<Vec<String>, String> {
    workflow("branches").run(async |ctx: Ctx, shops: Vec<String>| {
        let (stock, price) = ctx
            .try_join((
                async |ctx: Ctx| ctx.run("stock", async || Ok(3u64)).await,
                async |ctx: Ctx| {
                    ctx.sleep(Duration::from_millis(10)).await?;
                    ctx.run("price", async || ask_price("shop").await).retry(Retry::never()).await
                },
            ))
            .await?;

        let prices =
            ctx.try_map(&shops, 2, async |ctx: Ctx, shop| ctx.run("ask", async || ask_price(shop).await).await);
        let prices = prices.await?;

        let waits = [50u64, 10, 30];
        let (fastest, _) = ctx.race(waits, async |ctx: Ctx, ms| ctx.sleep(Duration::from_millis(ms)).await).await;

        let first = ctx.select((
            async |ctx: Ctx| ctx.receive::<String>("answer").await,
            async |ctx: Ctx| ctx.sleep(Duration::from_millis(100)).await,
        ));
        let answer = match first.await {
            First2::First(answer) => answer?,
            First2::Second(slept) => {
                slept?;
                "no answer".to_string()
            }
        };
        Ok(format!("{stock} at {price}, {prices:?}, number {fastest} was first, {answer}"))
    })
}

/// One branch waits for the progress of another.
fn progress() -> Workflow<(), u64> {
    workflow("progress").run(async |ctx: Ctx, ()| {
        let (half, all) = ctx
            .try_join((
                async |ctx: Ctx| ctx.wait_until("done", |done: &u64| *done >= 5).await,
                async |ctx: Ctx| {
                    for done in 1..=10u64 {
                        ctx.run("work", async || Ok(())).await?;
                        ctx.publish("done", &done).await?;
                    }
                    Ok(10)
                },
            ))
            .await?;
        Ok(half + all)
    })
}

#[tokio::main]
async fn main() -> Result {
    let (order, hasty, branches, progress) = (order(), hasty(), branches(), progress());
    let engine = Engine::on(&Store::memory().await?).register(&order).register(&pack()).register(&courier());
    let engine = engine.register(&hasty).register(&branches).register(&progress).start().await?;

    let items = |items: &[&str]| items.iter().map(ToString::to_string).collect::<Vec<_>>();
    let order_1 = engine.start(&order, items(&["tea", "milk", "bread"])).id("order-1").await?;
    println!("{}", order_1.result().await?);
    let order_2 = engine.start(&order, items(&["tea", "cake"])).id("order-2").await?;
    println!("{}", order_2.result().await?);
    println!("its courier: {:?}", engine.handle(&courier(), "courier of order-2").result().await);

    println!("{}", engine.start(&hasty, ()).await?.result().await?);
    let state = engine.history("on its own").await?.state;
    println!("the other child was cancelled with it: {}", matches!(state, ExecutionState::Cancelled(_)));

    println!("{}", engine.start(&branches, items(&["a", "bb", "ccc"])).id("b").await?.result().await?);
    for operation in engine.history("b").await?.operations.iter().take(4) {
        println!("  {}{} {} {}", operation.branch, operation.place, operation.kind, operation.name);
    }
    println!("{}", engine.start(&progress, ()).await?.result().await?);
    Ok(())
}
