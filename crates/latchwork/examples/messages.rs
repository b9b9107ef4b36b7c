//! The guide of docs/workflows/messages.md as one program: `cargo run -p latchwork --example messages`.

use std::time::Duration;

use latchwork::json;
use latchwork::store::Store;
use latchwork::workflow::{Ctx, Engine, Failure, Handle, Workflow, WorkflowError, workflow};
use parking_lot::Mutex;

type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Collects the items of a basket until a checkout, or until no message has arrived for a while.
fn basket() -> Workflow<(), Vec<String>> {
    workflow("basket").run(async |ctx: Ctx, ()| {
        let mut items = Vec::new();
        while let Some(item) = ctx.receive::<Option<String>>("put").timeout(Duration::from_millis(300)).await? {
            // No more messages will arrive.
            let Some(item) = item else { break };
            items.push(item);
        }
        Ok(items)
    })
}

/// An account that receives updates and answers them.
fn account() -> Workflow<u64, u64> {
    let account = workflow("account").validate("add", |published, amount: &i64| {
        let sum: u64 = published.get("sum").unwrap_or(0);
        match sum.checked_add_signed(*amount) {
            Some(_) => Ok(()),
            None => Err(Failure::new(format!("the sum is only {sum}"))),
        }
    });
    account.run(async |ctx: Ctx, goal: u64| {
        let mut sum = 0u64;
        ctx.publish("sum", &sum).await?;
        while sum < goal {
            let request = ctx.receive_update::<i64, u64>("add").await?;
            let Some(after) = sum.checked_add_signed(request.value) else {
                request.refuse(Failure::new("the sum is too small by now")).await;
                continue;
            };
            sum = after;
            ctx.publish("sum", &sum).await?;
            request.answer(&sum).await?;
        }
        Ok(sum)
    })
}

/// The reviewer's inbox, which receives the token.
static MAIL: Mutex<Vec<String>> = Mutex::new(Vec::new());

async fn mail(text: &str, token: &str) -> std::result::Result<(), Failure> {
    println!("please look at {text:?}");
    MAIL.lock().push(token.into());
    Ok(())
}

/// Asks a reviewer outside, who answers with a token.
fn review() -> Workflow<String, String> {
    workflow("review").run(async |ctx: Ctx, text: String| {
        let verdict = ctx.completion::<bool>("verdict").await;
        let token = verdict.token();
        ctx.run("ask", async || mail(&text, &token).await).await?;
        Ok(match verdict.wait_within(Duration::from_secs(3600)).await? {
            Some(true) => "accepted",
            Some(false) => "rejected",
            None => "not reviewed",
        }
        .to_string())
    })
}

/// Counts the numbers that it receives, and continues as new after every second number.
fn counter() -> Workflow<u64, u64> {
    workflow("counter").run(async |ctx: Ctx, mut sum: u64| {
        for _ in 0..2 {
            match ctx.receive::<u64>("number").await? {
                0 => return Ok(sum),
                number => sum += number,
            }
        }
        ctx.publish("sum", &sum).await?;
        ctx.continue_as_new(sum).await
    })
}

/// Asks a person whether to refund money.
fn refund() -> Workflow<u64, String> {
    workflow("refund").run(async |ctx: Ctx, amount: u64| {
        let question = json!({"order": 7, "amount": amount});
        let decision = ctx.review("refund", &question, ["approve", "reject"]).await?;
        Ok(format!("{}: {}, because {}", decision.by, decision.option, decision.reason))
    })
}

#[tokio::main]
async fn main() -> Result {
    let (basket, account, review, counter, refund) = (basket(), account(), review(), counter(), refund());
    let engine = Engine::on(&Store::memory().await?).register(&basket).register(&account);
    let engine = engine.register(&review).register(&counter).register(&refund).start().await?;
    signals(&engine, &basket).await?;
    updates(&engine.start(&account, 10).id("account").await?).await?;
    tokens(&engine, &engine.start(&review, "a poem".to_string()).await?).await?;

    reviews(&engine, &engine.start(&refund, 80).await?).await?;

    let handle = engine.start(&counter, 0).id("counter").await?;
    for number in [1, 2, 3, 4, 5, 0] {
        handle.signal("number", &number).await?;
    }
    println!("the sum is {}, in run {}", handle.result().await?, engine.history("counter").await?.run);
    Ok(())
}

async fn signals(engine: &Engine, basket: &Workflow<(), Vec<String>>) -> Result {
    let handle = engine.start(basket, ()).id("basket").await?;
    handle.signal("put", &Some("tea")).id("click-1").await?;
    // A sender without an answer sends the same message again: it counts once.
    engine.signal("basket", "put", &Some("tea")).id("click-1").await?;
    match engine.signal("basket", "put", &Some("milk")).id("click-1").await {
        Err(WorkflowError::MessageReused { message, .. }) => println!("{message} was another signal"),
        other => other?,
    }
    handle.signal("put", &None::<String>).await?;
    println!("in the basket: {:?}", handle.result().await?);
    match handle.signal("put", &Some("cake")).await {
        Err(WorkflowError::Ended { id }) => println!("{id} has ended"),
        other => other?,
    }

    // The first sender starts it. All messages are received.
    for item in ["bread", "butter"] {
        engine.start(basket, ()).id("shared").signal("put", &Some(item)).await?;
    }
    let shared = engine.handle(basket, "shared");
    println!("after a while of nothing: {:?}", shared.result().await?);
    Ok(())
}

async fn updates(account: &Handle<u64>) -> Result {
    println!("the sum is {} now", account.update::<u64>("add", &4).id("u1").await?);
    println!("the same answer: {}", account.update::<u64>("add", &4).id("u1").await?);
    match account.update::<u64>("add", &-5).await {
        Err(WorkflowError::UpdateRefused { failure, .. }) => println!("refused: {failure}"),
        other => drop(other?),
    }
    println!("published: {:?}", account.query::<u64>("sum").await?);

    // Sent now, and answered later.
    let sent = account.update::<u64>("add", &6).send().await?;
    println!("at least ten: {}", account.wait_until("sum", |sum: &u64| *sum >= 10).await?);
    println!("answered: {}, ended: {}", sent.answer().await?, account.result().await?);
    println!("still published: {:?}", account.query::<u64>("sum").await?);
    Ok(())
}

async fn tokens(engine: &Engine, review: &Handle<String>) -> Result {
    while MAIL.lock().is_empty() {
        engine.store().env().sleep(Duration::from_millis(1)).await;
    }
    let token = MAIL.lock().remove(0);
    engine.complete(&token, &true).await?;
    match engine.complete(&token, &false).await {
        Err(WorkflowError::TokenUsed { .. }) => println!("a token is used once"),
        other => other?,
    }
    println!("{}", review.result().await?);
    Ok(())
}

async fn reviews(engine: &Engine, refund: &Handle<String>) -> Result {
    while engine.reviews().name("refund").await?.items.is_empty() {
        engine.store().env().sleep(Duration::from_millis(1)).await;
    }
    for review in engine.reviews().name("refund").await? {
        engine.review(&review.id).decide("approve", "ada@example.org", "the parcel was lost").await?;
        match engine.review(&review.id).decide("reject", "bob@example.org", "").await {
            Err(WorkflowError::ReviewDecided { decision, .. }) => println!("{} was faster", decision.by),
            other => drop(other?),
        }
    }
    println!("{}", refund.result().await?);
    Ok(())
}
