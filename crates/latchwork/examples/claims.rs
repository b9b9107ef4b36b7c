//! The guide of docs/claims.md as one program: `cargo run -p latchwork --example claims`.

use std::time::Duration;

use latchwork::claim::{
    Abandoned, ActionCtx, AfterEffect, ClaimError, ClaimStep, ClaimWorkflow, Claims, DurableCall, Fired, Outcome,
    Recovery, durable_action,
};
use latchwork::entity::{Add, Entity};
use latchwork::store::Store;
use latchwork::workflow::{Ctx, Engine, Workflow, workflow};
use latchwork::{Value, json};

type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

const INVOICES: &str = r#"{
  "workflow": "invoice",
  "meta": { "owning_module": "billing", "entity_type": "invoice", "status_field": "status" },
  "status_types": ["sent", "paying", "paid", "overdue"],
  "steps": [
    {
      "step_id": 20,
      "step_key": "apply_payment",
      "status": "sent",
      "action": { "admin": "ApplyPayment" },
      "guards": { "admin": [{ "guard": "has_amount", "reason": "a payment needs an amount" }] },
      "successful_claim_state": { "admin": ["paying", "sent"] },
      "successful_state": { "admin": "paid" },
      "success_after_effect": { "admin": ["SendReceipt", "TellBooks"] },
      "lease": "30s",
      "recovery": "revert"
    },
    {
      "step_id": 30,
      "step_key": "mark_overdue",
      "status": "sent",
      "successful_state": { "system": "overdue" },
      "timer": { "after": "30d", "requester": "system" }
    }
  ]
}"#;

#[derive(Debug, PartialEq, thiserror::Error)]
#[error("the bank is closed until {until}")]
struct BankClosed {
    until: u32,
}

async fn apply_payment(ctx: ActionCtx) -> std::result::Result<Outcome, BankClosed> {
    let amount = ctx.input()["amount"].as_i64().unwrap_or_default();
    if amount <= 0 {
        return Ok(Outcome::rejection("the amount is not positive"));
    }
    if amount > 1000 {
        return Ok(Outcome::failure("the card was refused"));
    }
    bank_transfers(amount, &ctx.key()).await?;
    ctx.add(Add::new("payment").data(json!({"invoice": ctx.entity().id, "amount": amount})));
    ctx.merge_data(json!({"paid_by": ctx.requester()}));
    Ok(Outcome::output(json!({"paid": amount})))
}

async fn bank_transfers(amount: i64, key: &str) -> std::result::Result<(), BankClosed> {
    match amount {
        8 => Err(BankClosed { until: 8 }),
        _ => {
            println!("the bank transfers {amount}, under the key {key}");
            Ok(())
        }
    }
}

fn has_amount(_invoice: &Entity, input: &Value) -> std::result::Result<(), String> {
    match input["amount"].is_i64() {
        true => Ok(()),
        false => Err("there is no amount".into()),
    }
}

async fn send_receipt(paid: AfterEffect) -> std::result::Result<(), String> {
    println!("a receipt for {}, under the key {}", &*paid.entity, paid.key);
    Ok(())
}

/// The commit of the transition starts this workflow.
fn tell_books() -> Workflow<AfterEffect, ()> {
    workflow("tell-books").run(async |ctx: Ctx, paid: AfterEffect| {
        ctx.run("book", async || {
            println!("{} is booked", &*paid.entity);
            Ok(())
        })
        .await
    })
}

async fn firing(claims: &Claims) -> Result {
    claims.add("invoice", Add::new("invoice").id("i-1").data(json!({"status": "sent"}))).await?;
    let fire = claims.fire("invoice", "apply_payment", "i-1").by("admin").actor("ann").input(json!({"amount": 7}));
    match fire.await? {
        Fired::Done(done) => println!("from {} to {}, rev {}: {}", done.from, done.to, done.rev, done.output),
        Fired::ClaimFailed(taken) => println!("another operation is in progress: {:?}", taken.holder),
        fired => println!("{}", json!(fired)),
    }
    // The second call is refused: the invoice is not at `sent` any more.
    let again = claims.fire("invoice", "apply_payment", "i-1").by("admin").input(json!({"amount": 7})).await?;
    assert!(again.is_refused());
    Ok(())
}

/// A firing that does not succeed leaves the invoice as it was.
async fn outcomes(claims: &Claims) -> Result {
    claims.add("invoice", Add::new("invoice").id("i-2").data(json!({"status": "sent"}))).await?;
    let fire =
        |amount: i64| claims.fire("invoice", "apply_payment", "i-2").by("admin").input(json!({"amount": amount}));
    assert!(matches!(fire(-1).await?, Fired::Rejection(_)));
    assert!(matches!(fire(5000).await?, Fired::Failure(_)));
    match fire(8).await {
        Err(ClaimError::Action { error, .. }) => assert_eq!(error.downcast_ref(), Some(&BankClosed { until: 8 })),
        fired => panic!("the bank is closed: {fired:?}"),
    }
    assert!(matches!(fire(9).await?, Fired::Done(_)));
    Ok(())
}

async fn permitted(claims: &Claims) -> Result {
    let permitted = claims.permitted("invoice", "i-1", "admin").await?;
    for (step, reasons) in permitted.others {
        let reasons: Vec<String> = reasons.iter().map(ToString::to_string).collect();
        println!("{step} is not possible: {}", reasons.join("; "));
    }
    Ok(())
}

async fn operating(claims: &Claims) -> Result {
    let operator = claims.operate().await?;
    for claim in operator.stored().list().await? {
        println!("{} is at {}, held by {}", &*claim.entity, claim.claim_into, claim.holder.owner);
    }
    for transition in operator.stored().history("i-2").limit(10).await? {
        println!("{:?}: {} to {}, {}", transition.kind, transition.from, transition.to, transition.reason);
    }
    for letter in operator.stored().dead_letters().await? {
        operator.redeliver(&letter.effect.key).await?;
    }
    Ok(())
}

/// An action that is a durable workflow.
async fn durable(store: &Store) -> Result {
    let close = durable_action("CloseBilling", async |ctx: Ctx, call: DurableCall| {
        let sum = ctx.run("sum up", async || Ok(120)).await?;
        ctx.sleep(Duration::from_millis(20)).await?;
        Ok(Outcome::output(json!({"period": call.entity.id, "sum": sum})))
    });
    let billing = ClaimWorkflow::new("billing", "billing", "period")
        .statuses(["approved", "closing", "closed"])
        .step(ClaimStep::new(20, "close", "approved", "closed").claimed("closing").action("CloseBilling"));
    let engine = Engine::on(store).register(close.workflow()).start().await?;
    let claims = Claims::on(&engine).workflow(billing).durable_action(&close).start().await?;
    claims.add("billing", Add::new("period").id("may").data(json!({"status": "approved"}))).await?;
    let fired = claims.fire("billing", "close", "may").await?;
    println!("{}", json!(fired));
    engine.shutdown().await?;
    Ok(())
}

/// A module that decides what happens to claims whose process is gone.
async fn modules(store: &Store) -> Result {
    let engine = Engine::on(store).start().await?;
    let owned = INVOICES.replace(r#""status_field": "status""#, r#""status_field": "status", "janitor": "module""#);
    let builder = || {
        Claims::on(&engine)
            .configure(owned.as_str())
            .action("ApplyPayment", apply_payment)
            .guard("has_amount", has_amount)
            .after_effect("SendReceipt", send_receipt)
            .after_effect("TellBooks", send_receipt)
    };
    match builder().start().await {
        Err(error @ ClaimError::Uncovered { .. }) => println!("{error}"),
        started => panic!("the module has no janitor: {started:?}"),
    }
    for declared in builder().declared("billing") {
        println!("{} declares {}", declared.workflow, declared.claim_into);
    }
    let claims = builder().cover("billing", async |claim: Abandoned| match claim.attempts {
        1 => Recovery::Revert,
        _ => Recovery::NeedsReview,
    });
    claims.start().await?;
    engine.shutdown().await?;
    Ok(())
}

async fn starting(store: &Store) -> Result {
    let tell_books = tell_books();
    let engine = Engine::on(store).register(&tell_books).start().await?;
    let claims = Claims::on(&engine)
        .configure(INVOICES)
        .action("ApplyPayment", apply_payment)
        .non_idempotent("ApplyPayment")
        .guard("has_amount", has_amount)
        .after_effect("SendReceipt", send_receipt)
        .after_effect_workflow("TellBooks", &tell_books)
        .start()
        .await?;
    firing(&claims).await?;
    outcomes(&claims).await?;
    permitted(&claims).await?;
    operating(&claims).await?;
    while claims.undelivered() > 0 {
        store.env().sleep(Duration::from_millis(5)).await;
    }
    engine.shutdown().await?;
    Ok(())
}

/// All parts of the guide, one after the other.
pub async fn run() -> Result {
    starting(&Store::memory().await?).await?; // or Engine::open("./data")
    durable(&Store::memory().await?).await?;
    modules(&Store::memory().await?).await
}

#[tokio::main]
async fn main() -> Result {
    run().await
}
