//! `latch workflow start`: starts an execution, through a program that has registered the workflow.

use std::time::Duration;

use anyhow::Result;
use clap::{Args, ValueEnum};
use latchwork::store::Timestamp;
use latchwork::workflow::Attribute;
use latchwork::{Map, Value, json};

use crate::api::explained;
use crate::client::{ApiCall, Client, encoded};
use crate::given;
use crate::output::Output;
use crate::schedule::fields::millis;
use crate::shown::word;
use crate::time::{Time, absolute, duration};
use crate::workflow::list::attribute;
use crate::workflow::result::{Waiting, check_completed};

#[derive(Args)]
pub(crate) struct Start {
    /// The name of the workflow.
    workflow: String,
    /// The input: JSON, @FILE, or - for the standard input.
    #[arg(long, value_name = "JSON", value_parser = given::json, default_value = "null")]
    input: Value,
    /// The id of the execution; a new one without this.
    #[arg(long)]
    id: Option<String>,
    /// Starts one execution of the workflow for all starts under this key.
    #[arg(long, value_name = "KEY")]
    idempotency_key: Option<String>,
    /// A tag, by which executions are listed. It may be given several times.
    #[arg(long = "tag", value_name = "TAG")]
    tags: Vec<String>,
    /// A search attribute, NAME=VALUE, with values as for `workflow list`. It may be given several times.
    #[arg(long = "attribute", value_name = "NAME=VALUE", value_parser = named_value)]
    attributes: Vec<(String, Value)>,
    /// Begins after this time, for example 90s.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    delay: Option<Duration>,
    /// Begins at this time.
    #[arg(long, value_name = "TIME", value_parser = absolute, conflicts_with = "delay")]
    at: Option<Timestamp>,
    /// Joins the execution of this id if there is one, whatever its input was.
    #[arg(long, requires = "id")]
    join: bool,
    /// Starts again if the execution of this id has ended.
    #[arg(long, requires = "id")]
    restart: bool,
    /// Takes the place of the execution of this id, which is made to end.
    #[arg(long, value_enum, value_name = "HOW", requires = "id")]
    supersede: Option<Supersede>,
    #[command(flatten)]
    wait: Waiting,
}

/// How an execution is made to end for another one.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Supersede {
    /// It may clean up.
    Cancel,
    /// No more of its code runs.
    Terminate,
}

/// An attribute as the API reads it.
fn named_value(text: &str) -> Result<(String, Value), String> {
    let asked = attribute(text)?;
    if asked.sign != "=" {
        return Err("write NAME=VALUE".into());
    }
    let value = match asked.value {
        Attribute::Boolean(value) => value.into(),
        Attribute::Integer(value) => value.into(),
        Attribute::Real(value) => value.into(),
        Attribute::Text(value) => value.into(),
        Attribute::Time(time) => json!({"time": Time(time)}),
        _ => return Err("this value is not known".into()),
    };
    Ok((asked.name, value))
}

impl Start {
    fn body(&self) -> Value {
        let attributes: Map<String, Value> = self.attributes.iter().cloned().collect();
        json!({
            "workflow": self.workflow,
            "input": self.input,
            "id": self.id,
            "idempotency_key": self.idempotency_key,
            "tags": self.tags,
            "attributes": attributes,
            "delay_ms": self.delay.map(millis),
            "begins_at": self.at.map(Time),
            "join": self.join,
            "restart": self.restart,
            "supersede": self.supersede.map(|how| match how {
                Supersede::Cancel => "cancel",
                Supersede::Terminate => "terminate",
            }),
        })
    }
}

pub(crate) async fn run(start: Start, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let started = client.call(ApiCall::post("/workflows").body(start.body())).await;
    let started = started.map_err(|error| explained(error, client))?;
    let id = word(&started, "id").to_string();
    if !start.wait.is_given() {
        return output.one(&started, |text| {
            text.line(format!("Execution {id:?} of workflow {:?} is started.", start.workflow));
        });
    }
    let standing = start.wait.standing(&format!("/workflows/{}/result", encoded(&id)), &[], client).await?;
    start.wait.tell(&standing, output)?;
    check_completed(&standing)
}
