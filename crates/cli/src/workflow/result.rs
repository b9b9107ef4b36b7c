//! `latch workflow result`: how an execution has ended. It also holds what every wait for an end has in common.

use std::time::Duration;

use anyhow::Result;
use clap::Args;
use latchwork::Value;

use crate::client::{ApiCall, Client, encoded};
use crate::output::{Exit, Output, Problem};
use crate::shown::{document, word};
use crate::time::{duration, exact};

/// The longest wait of one request: to a server, and in this process, where other processes are noticed between two.
const AT_SERVER: Duration = Duration::from_secs(30);
const HERE: Duration = Duration::from_secs(1);

#[derive(Args)]
pub(crate) struct GetResult {
    /// The execution's id.
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    id: String,
    /// Goes on waiting if it is parked.
    #[arg(long)]
    through_parks: bool,
    /// The output of this input of a batch, from 0.
    #[arg(long, value_name = "N")]
    item: Option<u32>,
    #[command(flatten)]
    wait: Waiting,
}

/// How long a command waits for an end.
#[derive(Args)]
pub(crate) struct Waiting {
    /// Waits until it has ended, at most this long, for example 30s.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    wait: Option<Duration>,
}

impl Waiting {
    pub(crate) fn is_given(&self) -> bool {
        self.wait.is_some()
    }

    /// The answer of this route, which is asked until the thing has ended, is parked, or the time is up.
    pub(crate) async fn standing(
        &self,
        path: &str,
        query: &[(&'static str, String)],
        client: &Client,
    ) -> Result<Value> {
        let most = if client.is_here() { HERE } else { AT_SERVER };
        let until = self.wait.map(|wait| client.env().monotonic() + wait);
        loop {
            let left = until.map(|until| until.saturating_sub(client.env().monotonic()));
            let asked = query.iter().fold(ApiCall::get(path), |asked, (name, value)| asked.query(name, value));
            let wait = left.filter(|left| !left.is_zero() && !client.is_alone()).map(|left| exact(left.min(most)));
            let standing = client.call(asked.maybe("wait", wait)).await?;
            let is_over = match word(&standing, "status") {
                "parked" => query.iter().all(|(name, _)| *name != "through_parks"),
                status => is_end(status),
            };
            if is_over || client.is_alone() || left.is_none_or(|left| left.is_zero()) {
                return Ok(standing);
            }
        }
    }

    /// Prints an outcome. For people, an output is printed alone, so that it can be passed on.
    pub(crate) fn tell(&self, standing: &Value, output: &mut Output<'_>) -> Result<()> {
        output.one(standing, |text| match word(standing, "status") {
            "completed" => document(text, standing.get("output").unwrap_or(&Value::Null)),
            status if is_end(status) => {}
            "parked" => text.line(format!("It is parked: {}", word(standing, "reason"))),
            status => text.line(format!("It has not ended: it is {status}.")),
        })?;
        let status = word(standing, "status");
        if self.is_given() && !is_end(status) {
            let why = format!("{:?} has not ended: it is {status}", word(standing, "id"));
            return Err(Problem::new(Exit::Busy, why).with("status", status).into());
        }
        Ok(())
    }
}

/// True if this is the status of something that has ended.
pub(crate) fn is_end(status: &str) -> bool {
    matches!(status, "completed" | "failed" | "timed_out" | "cancelled")
}

/// An execution that has ended, and not completed, is an error of its own.
pub(crate) fn check_completed(standing: &Value) -> Result<()> {
    let (id, status) = (word(standing, "id"), word(standing, "status"));
    let failure = standing.pointer("/failure/message").and_then(Value::as_str).unwrap_or_default();
    let why = match status {
        "failed" => format!("{id:?} has failed: {failure}"),
        "timed_out" => format!("{id:?} has timed out"),
        "cancelled" => format!("{id:?} was cancelled: {}", word(standing, "reason")),
        _ => return Ok(()),
    };
    Err(Problem::new(Exit::WorkflowFailed, why).with("id", id).with("status", status).into())
}

pub(crate) async fn run(asked: GetResult, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let mut query = Vec::new();
    if asked.through_parks {
        query.push(("through_parks", "true".to_string()));
    }
    query.extend(asked.item.map(|item| ("item", item.to_string())));
    let standing = asked.wait.standing(&format!("/workflows/{}/result", encoded(&asked.id)), &query, client).await?;
    asked.wait.tell(&standing, output)?;
    check_completed(&standing)
}
