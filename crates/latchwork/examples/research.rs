//! A research pipeline: a planner writes a plan into the state of its sequencer, an executor works through it step by
//! step, and a person approves the findings. Kill it at any time and run it again: it continues where it was.
//!
//!     cargo run -p latchwork --example research --features flow            # asks, and waits for the answer
//!     cargo run -p latchwork --example research --features flow -- approve # answers

use std::collections::BTreeMap;
use std::error::Error;

use latchwork::flow::{AnswerKind, Flow, FlowError, Transient, flow, handler, sequencer};
use latchwork::json;
use latchwork::workflow::Engine;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

#[derive(Default, Serialize, Deserialize, JsonSchema)]
struct Research {
    plan: Vec<String>,
    current_step: u32,
    findings: BTreeMap<String, String>,
    /// Lives in memory only.
    last_claimed: Transient<bool>,
}

/// The part of the state that the planner needs.
#[derive(Serialize, Deserialize, JsonSchema)]
struct PlanPart {
    plan: Vec<String>,
    current_step: u32,
}

#[derive(Serialize, Deserialize, JsonSchema)]
struct StepPart {
    plan: Vec<String>,
    current_step: u32,
    findings: BTreeMap<String, String>,
}

fn research() -> Result<Flow, FlowError> {
    let planner = handler("planner").needs::<PlanPart>().tap(async |ctx, _topic: String| {
        ctx.sequencer().patch(json!({"plan": ["search", "analyze", "summarize"], "current_step": 0})).await
    });
    let executor = handler("executor").needs::<StepPart>().tap(async |ctx, topic: String| {
        let StepPart { plan, current_step, .. } = ctx.sequencer().state();
        let step = plan.get(current_step as usize).cloned().unwrap_or_default();
        println!("step {current_step}: {step}");
        let finding = ctx.run_once("ask a model", async || Ok(format!("what {step} says of {topic}"))).await?;
        ctx.sequencer()
            .patch(json!({"findings": {format!("step-{current_step}"): finding}, "last_claimed": true}))
            .await?;
        ctx.sequencer().inc([("current_step", 1)]).await
    });
    let approval = handler("approval").run(async |ctx, findings: BTreeMap<String, String>| {
        let answer = ctx.suspend("approve-findings").message("Are these findings good?").data(&findings).await?;
        Ok(if answer.is_approved() { findings } else { BTreeMap::new() })
    });
    let research = sequencer("research-pipeline")
        .state::<Research>()
        .tap(&planner)
        .do_while(|_, ctx| ctx.state().current_step < 3, &executor)
        .map(|_, ctx| ctx.state().findings)
        .step(&approval)
        .build()?;
    flow("research").action("run", research).build()
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let directory = std::env::temp_dir().join("latchwork-research");
    let research = research()?;
    let engine = Engine::open(&directory).flow(&research).start().await?;
    let flows = engine.flow(&research);
    let started = flows.run("run", "durable locks").session("s-1").idempotency_key("the only one").await?;
    let question = loop {
        if let Some(question) = started.suspensions().await?.pop() {
            break Some(question);
        }
        if matches!(
            engine.history(started.id().clone()).await?.state,
            latchwork::workflow::ExecutionState::Completed(_)
        ) {
            break None;
        }
        tokio::task::yield_now().await;
    };
    if let Some(question) = question {
        println!("{} {}", question.message, question.data);
        if std::env::args().nth(1).as_deref() != Some("approve") {
            println!("kill or end this program, and run it again with `approve`");
            engine.shutdown().await?;
            return Ok(());
        }
        flows.answer(&question.id, AnswerKind::Approve, (), "ada").await?;
    }
    let findings: BTreeMap<String, String> = started.result().await?;
    println!("{findings:#?}");
    let mut events = started.events();
    while let Some(event) = events.next().await? {
        println!("{:>3} {}", event.number, serde_json::to_string(&event.event)?);
    }
    engine.shutdown().await?;
    std::fs::remove_dir_all(directory)?;
    Ok(())
}
