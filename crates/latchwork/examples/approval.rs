//! A refund that a person approves. Kill the program (`kill -9`) while it waits for the answer, and run it again: the
//! order is not looked up again, the same question is open, and the request continues with the answer.
//!
//!     cargo run -p latchwork --example approval --features flow        # asks, and waits
//!     cargo run -p latchwork --example approval --features flow -- 25  # approves a refund of 25

use std::error::Error;
use std::path::Path;

use latchwork::flow::{AnswerKind, Flow, FlowError, flow, handler, sequencer};
use latchwork::json;
use latchwork::workflow::Engine;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

#[derive(Default, Serialize, Deserialize, JsonSchema)]
struct Refund {
    paid: u32,
    refunded: u32,
}

/// What the answer to the question has to be.
#[derive(Serialize, Deserialize, JsonSchema)]
struct Approval {
    amount: u32,
}

fn refunds() -> Result<Flow, FlowError> {
    let look_up = handler("look-up").needs::<Refund>().tap(async |ctx, order: String| {
        println!("look up {order}");
        ctx.sequencer().patch(json!({"paid": 40})).await
    });
    let approval = handler("approval").needs::<Refund>().run(async |ctx, order: String| {
        let paid = ctx.sequencer().state().paid;
        let question = ctx.suspend("approve-refund").message(format!("How much of {paid} is refunded for {order}?"));
        let answer = question.schema_of::<Approval>().allow([AnswerKind::Submit, AnswerKind::Reject]).await?;
        Ok(match answer.kind {
            AnswerKind::Submit => answer.read::<Approval>()?.amount,
            _ => 0,
        })
    });
    let pay = handler("pay").needs::<Refund>().run(async |ctx, amount: u32| {
        ctx.run_once("pay", async || {
            println!("pay {amount}");
            Ok(())
        })
        .await?;
        ctx.sequencer().inc([("refunded", amount)]).await?;
        Ok(ctx.sequencer().state())
    });
    let refund = sequencer("refund").state::<Refund>().tap(&look_up).step(&approval).step(&pay).build()?;
    flow("refunds").action("refund", refund).build()
}

/// Makes the request, or continues with it. With an amount, it answers the question.
pub async fn run(directory: &Path, amount: Option<u32>) -> Result<(), Box<dyn Error>> {
    let refunds = refunds()?;
    let engine = Engine::open(directory).flow(&refunds).start().await?;
    let flows = engine.flow(&refunds);
    let request = flows.run("refund", "order-7").idempotency_key("order-7").await?;
    let question = loop {
        if let Some(question) = request.suspensions().await?.pop() {
            break question;
        }
        engine.store().env().sleep(std::time::Duration::from_millis(5)).await;
    };
    println!("asked: {}", question.message);
    if let Some(amount) = amount {
        let wrong = flows.answer(&question.id, AnswerKind::Submit, json!({"amount": "all of it"}), "ada").await;
        println!("refused: {}", wrong.is_err());
        flows.answer(&question.id, AnswerKind::Submit, Approval { amount }, "ada").await?;
    }
    let refund: Refund = request.result().await?;
    println!("refunded {} of {}", refund.refunded, refund.paid);
    engine.shutdown().await?;
    Ok(())
}

#[allow(dead_code)] // Unused where a test runs the example.
#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let directory = std::env::temp_dir().join("latchwork-approval");
    let amount = std::env::args().nth(1).map(|amount| amount.parse()).transpose()?;
    run(&directory, amount).await?;
    std::fs::remove_dir_all(directory)?;
    Ok(())
}
