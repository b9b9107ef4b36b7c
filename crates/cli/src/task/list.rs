//! `latch task list` and `show`.

use std::time::Duration;

use anyhow::Result;
use clap::Args;
use clap::builder::PossibleValuesParser;
use latchwork::Value;

use crate::client::{ApiCall, Client, encoded};
use crate::output::{Exit, Output, Problem};
use crate::paging::Paging;
use crate::shown::{Field, How, about, table, word};
use crate::time::{duration, exact};

const LISTED: [Field; 7] = [
    ("ID", "/id", How::Plain),
    ("KIND", "/kind", How::Plain),
    ("STATE", "/state", How::State),
    ("PUT", "/put_at", How::Time),
    ("ATTEMPT", "/attempt", How::Plain),
    ("WORKER", "/worker", How::Plain),
    ("FAILURE", "/failure/message", How::Bad),
];

pub(super) const ABOUT: [Field; 16] = [
    ("id", "/id", How::Plain),
    ("kind", "/kind", How::Plain),
    ("state", "/state", How::State),
    ("input", "/input", How::Json),
    ("output", "/output", How::Json),
    ("failure", "/failure/message", How::Bad),
    ("code", "/failure/code", How::Plain),
    ("details", "/failure/details", How::Json),
    ("reason", "/reason", How::Plain),
    ("attempt", "/attempt", How::Plain),
    ("of at most", "/attempts", How::Plain),
    ("token", "/token", How::Plain),
    ("worker", "/worker", How::Plain),
    ("lease until", "/lease_until", How::Time),
    ("put", "/put_at", How::Time),
    ("ended", "/ended_at", How::Time),
];

/// The longest wait of one request.
const MOST: Duration = Duration::from_secs(30);
/// The same in this process, where changes of other processes are noticed between two requests.
const HERE: Duration = Duration::from_secs(1);

#[derive(Args)]
pub(crate) struct List {
    /// Only tasks of this kind.
    #[arg(long)]
    kind: Option<String>,
    /// Only tasks in this state.
    #[arg(long, value_parser = PossibleValuesParser::new(["open", "leased", "done", "failed", "cancelled"]))]
    state: Option<String>,
    #[command(flatten)]
    paging: Paging,
}

#[derive(Args)]
pub(crate) struct Show {
    /// The task's id.
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    id: String,
    /// Waits until it has ended, at most this long.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    wait: Option<Duration>,
}

pub(super) async fn list(list: List, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let now = client.env().now();
    let mut filter = Vec::new();
    filter.extend(list.kind.map(|kind| ("kind", kind)));
    filter.extend(list.state.map(|state| ("state", state)));
    let read = async |limit, after| client.page::<Value>("/tasks", &filter, limit, after).await;
    list.paging.write("tasks", output, |found: &[Value]| table(found, &LISTED, now), read).await
}

pub(super) async fn show(show: Show, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let path = format!("/tasks/{}", encoded(&show.id));
    let most = if client.is_here() { HERE } else { MOST };
    let until = show.wait.map(|wait| client.env().monotonic() + wait);
    let task = loop {
        let left = until.map(|until| until.saturating_sub(client.env().monotonic()));
        let left = left.filter(|left| !left.is_zero() && !client.is_alone());
        let task = client.call(ApiCall::get(&path).maybe("wait", left.map(|left| exact(left.min(most))))).await?;
        if left.is_none() || !task["ended_at"].is_null() {
            break task;
        }
    };
    tell(&task, client, output)?;
    if show.wait.is_some() && task["ended_at"].is_null() {
        let why = format!("task {:?} has not ended: it is {}", show.id, word(&task, "state"));
        return Err(Problem::new(Exit::Busy, why).into());
    }
    Ok(())
}

/// Prints a task.
pub(super) fn tell(task: &Value, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let now = client.env().now();
    output.one(task, |text| about(text, task, &ABOUT, now))
}
