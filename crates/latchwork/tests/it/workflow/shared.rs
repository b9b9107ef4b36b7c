//! What workflows share with the rest of the program: each execution, and each life of one, is given a clone.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use latchwork::testing::TestEngine;
use latchwork::workflow::{Batch, Ctx, Failure, Workflow, workflow};

/// A client that counts its calls. It is no `Clone`, so it is shared in an `Arc`.
#[derive(Default)]
struct Cards {
    calls: AtomicU32,
}

impl Cards {
    async fn charge(&self, price: u32) -> std::io::Result<u32> {
        Ok(price + self.calls.fetch_add(1, Ordering::SeqCst))
    }
}

async fn place(ctx: Ctx, cards: Arc<Cards>, price: u32) -> Result<u32, Failure> {
    ctx.run("charge", async || Ok(cards.charge(price).await?)).await?;
    ctx.sleep(Duration::from_secs(3600)).await?;
    ctx.run("charge again", async || Ok(cards.charge(price).await?)).await
}

#[tokio::test]
async fn a_plain_function_is_given_what_it_shares() {
    let cards = Arc::new(Cards::default());
    let order: Workflow<u32, u32> = workflow("order").with(cards.clone()).run(place);
    let test = TestEngine::new(&order, 1).await.unwrap();
    assert_eq!(test.complete(&order, 10).await.unwrap(), 11);
    assert_eq!(test.complete(&order, 10).await.unwrap(), 13);
    assert_eq!(cards.calls.load(Ordering::SeqCst), 4);
}

#[tokio::test]
async fn closures_and_batches_are_given_what_they_share_without_naming_types() {
    let cards = Arc::new(Cards::default());
    let order = workflow("order").timeout(Duration::from_secs(60)).with((cards.clone(), 5));
    let order = order.run(async |ctx, (cards, more), price: u32| {
        ctx.run("charge", async || Ok(cards.charge(price + more).await?)).await
    });
    let batch = workflow("batch").batch(Batch::new(10, Duration::from_millis(1))).with(cards);
    let batch = batch.run(async |ctx, cards, prices: Vec<u32>| {
        let sum = prices.iter().sum();
        let paid = ctx.run("charge", async || Ok(cards.charge(sum).await?)).await?;
        Ok(vec![paid; prices.len()])
    });
    let test = TestEngine::build(1).register(&order).register(&batch).start().await.unwrap();
    assert_eq!(test.complete(&order, 1).await.unwrap(), 6);
    assert_eq!(test.complete(&batch, 1).await.unwrap(), 2);
}
