//! `latch workflow cancel`, `terminate`, `resume`, `retry` and `fork`: what operators do to executions.

use anyhow::Result;
use clap::Args;
use latchwork::{Value, json};

use crate::api::explained;
use crate::ask::confirm;
use crate::client::{ApiCall, Client, encoded, object};
use crate::given;
use crate::output::Output;
use crate::shown::word;

/// A change that needs a reason.
#[derive(Args)]
pub(crate) struct Because {
    /// The execution's id.
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    id: String,
    /// The reason, which the execution keeps.
    #[arg(long, value_name = "TEXT", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    reason: String,
    /// Does not ask for confirmation.
    #[arg(long)]
    yes: bool,
}

/// One execution.
#[derive(Args)]
pub(crate) struct One {
    /// The execution's id.
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    id: String,
}

#[derive(Args)]
pub(crate) struct ForkFrom {
    /// The id of the execution that is forked.
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    id: String,
    /// The place of the first operation that runs again, as `workflow show` prints it: 3, or 3.1/0.
    #[arg(long, value_name = "PLACE", conflicts_with = "at_step")]
    at: Option<String>,
    /// The first step of this name is the first operation that runs again. Without --at and --at-step, all run again.
    #[arg(long, value_name = "STEP")]
    at_step: Option<String>,
    /// Another input: JSON, @FILE, or - for the standard input.
    #[arg(long, value_name = "JSON", value_parser = given::json)]
    input: Option<Value>,
    /// The id of the new execution; a new one without this.
    #[arg(long, value_name = "ID")]
    new_id: Option<String>,
}

/// What is done to an execution: the last part of the path of its route, and how it is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Steering {
    Cancel,
    Terminate,
    Resume,
    Retry,
}

impl Steering {
    fn path(self) -> &'static str {
        match self {
            Steering::Cancel => "cancel",
            Steering::Terminate => "terminate",
            Steering::Resume => "resume",
            Steering::Retry => "retry",
        }
    }

    fn told(self, id: &str, is_here: bool) -> String {
        let then = if is_here { " when a program runs it" } else { "" };
        match self {
            Steering::Cancel => format!("The cancellation of execution {id:?} is stored. It cleans up and ends{then}."),
            Steering::Terminate => format!("Execution {id:?} has ended: it was terminated."),
            Steering::Resume => format!("Execution {id:?} is no longer parked. It continues{then}."),
            Steering::Retry if is_here => format!("The next attempt of execution {id:?} is due{then}."),
            Steering::Retry => format!("Execution {id:?} makes its next attempt now."),
        }
    }
}

pub(crate) async fn because(how: Steering, because: Because, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let Because { id, reason, yes } = because;
    let path = format!("/workflows/{}", encoded(&id));
    if !yes {
        let found = client.call(ApiCall::get(&path).query("events", 0)).await?;
        let status = word(&found, "status").replace('_', " ");
        let mut verb = how.path().to_string();
        verb[..1].make_ascii_uppercase();
        let question =
            format!("{verb} execution {id:?} of workflow {:?}, which is {status}?", word(&found, "workflow"));
        confirm(&question, yes, "nothing was changed")?;
    }
    client.call(ApiCall::post(format!("{path}/{}", how.path())).body(json!({"reason": reason}))).await?;
    output.one(&json!({"id": id, "reason": reason}), |text| text.line(how.told(&id, client.is_here())))
}

pub(crate) async fn one(how: Steering, one: One, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let id = one.id;
    client.call(ApiCall::post(format!("/workflows/{}/{}", encoded(&id), how.path()))).await?;
    output.one(&json!({"id": id}), |text| text.line(how.told(&id, client.is_here())))
}

pub(crate) async fn fork(fork: ForkFrom, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let ForkFrom { id, at, at_step, input, new_id } = fork;
    let text = |text: Option<String>| text.map(Value::from);
    let body = object([("at", text(at)), ("at_step", text(at_step)), ("input", input), ("id", text(new_id))]);
    let started = client.call(ApiCall::post(format!("/workflows/{}/fork", encoded(&id))).body(body)).await;
    let started = started.map_err(|error| explained(error, client))?;
    output.one(&started, |text| {
        text.line(format!("Execution {:?} is started, as a fork of {id:?}.", word(&started, "id")));
    })
}
