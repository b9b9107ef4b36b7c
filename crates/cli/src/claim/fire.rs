//! `latch claim fire`, `permitted` and `outbox`: what programs do with claim workflows. Actions and guards are in the
//! programs that register them, so the first two need one that serves its API.

use std::time::Duration;

use anyhow::Result;
use clap::Args;
use latchwork::Value;

use crate::api::explained;
use crate::client::{ApiCall, Client, encoded, object};
use crate::given;
use crate::output::{Exit, Output, Problem};
use crate::paging::Paging;
use crate::shown::{Field, How, document, table, word};
use crate::time::{duration, exact};

const UNDELIVERED: [Field; 6] = [
    ("KEY", "/key", How::Plain),
    ("NAME", "/name", How::Plain),
    ("ENTITY", "/entity", How::Plain),
    ("STEP", "/step", How::Plain),
    ("TO", "/to", How::Plain),
    ("TRANSITION", "/transition_at", How::Time),
];

#[derive(Args)]
pub(crate) struct Fire {
    /// The entity's id.
    entity: String,
    /// The claim workflow.
    #[arg(long, value_name = "NAME")]
    workflow: String,
    /// The step.
    step: String,
    /// The role that the step is fired for; `system` by default.
    #[arg(long, value_name = "ROLE")]
    requester: Option<String>,
    /// The person or program that fires it, for the history.
    #[arg(long, value_name = "NAME")]
    actor: Option<String>,
    /// The parameters of the action: JSON, @FILE, or - for the standard input.
    #[arg(long, value_name = "JSON", value_parser = given::json, default_value = "null")]
    input: Value,
    /// Waits for the action at most this long, up to 60s. After that it goes on.
    #[arg(long, value_name = "TIME", value_parser = duration, default_value = "60s")]
    wait: Duration,
}

#[derive(Args)]
pub(crate) struct Permitted {
    /// The entity's id.
    entity: String,
    /// The claim workflow.
    #[arg(long, value_name = "NAME")]
    workflow: String,
    /// The role that would fire a step; `system` by default.
    #[arg(long, value_name = "ROLE")]
    requester: Option<String>,
}

#[derive(Args)]
pub(crate) struct Outbox {
    #[command(flatten)]
    paging: Paging,
}

pub(super) async fn fire(fire: Fire, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let Fire { entity, workflow, step, requester, actor, input, wait } = fire;
    let body = object([
        ("workflow", Some(workflow.into())),
        ("step", Some(step.clone().into())),
        ("requester", requester.map(Value::from)),
        ("actor", actor.map(Value::from)),
        ("input", Some(input)),
    ]);
    let call = ApiCall::post(format!("/claims/{}/fire", encoded(&entity))).query("wait", exact(wait)).body(body);
    let done = client.call(call).await.map_err(|error| explained(error, client))?;
    output.one(&done, |text| match word(&done, "outcome") {
        "done" => {
            let (from, to) = (word(&done, "from"), word(&done, "to"));
            text.line(format!("Entity {entity:?} went from {from:?} to {to:?}; its rev is {}.", done["rev"]));
            if !done["output"].is_null() {
                document(text, &done["output"]);
            }
        }
        _ => text.line(format!("The action of step {step:?} still runs; latch claim show tells its end.")),
    })?;
    match word(&done, "outcome") {
        "done" => Ok(()),
        _ => Err(Problem::new(Exit::Busy, format!("the action of step {step:?} has not ended in time")).into()),
    }
}

pub(super) async fn permitted(permitted: Permitted, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let Permitted { entity, workflow, requester } = permitted;
    let call = ApiCall::get(format!("/claims/{}/permitted", encoded(&entity))).query("workflow", workflow);
    let found = client.call(call.maybe("requester", requester)).await.map_err(|error| explained(error, client))?;
    output.one(&found, |text| {
        text.line(format!("Entity {entity:?} is at {:?}.", word(&found, "status")));
        for step in found["steps"].as_array().into_iter().flatten() {
            text.line(format!("{} can be fired.", step.as_str().unwrap_or_default()));
        }
        for other in found["others"].as_array().into_iter().flatten() {
            let reasons = other["reasons"].as_array().into_iter().flatten().map(because);
            let reasons: Vec<String> = reasons.collect();
            text.line(format!("{} cannot: {}.", word(other, "step"), reasons.join("; ")));
        }
    })
}

/// Why a step cannot be fired.
fn because(reason: &Value) -> String {
    let words = |name: &str| {
        let words = reason[name].as_array().into_iter().flatten().filter_map(Value::as_str);
        words.collect::<Vec<_>>().join(" or ")
    };
    match word(reason, "reason") {
        "status" => format!("it needs the status {}", words("expected")),
        "claimed" => "the entity is claimed".into(),
        "requester" => format!("it is for {}", words("allowed")),
        "guard" => format!("guard {} refuses: {}", word(reason, "guard"), word(reason, "message")),
        _ => word(reason, "message").into(),
    }
}

pub(super) async fn outbox(outbox: Outbox, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let now = client.env().now();
    let read = async |limit, after| client.page::<Value>("/claim-outbox", &[], limit, after).await;
    outbox.paging.write("after_effects", output, |found: &[Value]| table(found, &UNDELIVERED, now), read).await
}

#[cfg(test)]
mod tests {
    use super::*;
    use latchwork::json;

    #[test]
    fn reasons_are_told_in_words() {
        for (reason, words) in [
            (json!({"reason": "status", "expected": ["sent", "late"]}), "it needs the status sent or late"),
            (json!({"reason": "claimed", "holder": null}), "the entity is claimed"),
            (json!({"reason": "requester", "allowed": ["admin"]}), "it is for admin"),
            (json!({"reason": "guard", "guard": "paid", "message": "no"}), "guard paid refuses: no"),
            (json!({"reason": "other", "message": "why"}), "why"),
        ] {
            assert_eq!(because(&reason), words);
        }
    }
}
