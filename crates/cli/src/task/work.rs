//! `latch task put`, `take`, `heartbeat`, `complete`, `fail` and `cancel`: the life of a task.

use std::time::Duration;

use anyhow::Result;
use clap::Args;
use latchwork::{Value, json};

use crate::ask::confirm;
use crate::client::{ApiCall, Client, encoded, object};
use crate::given;
use crate::output::{Exit, Format, Output, Problem};
use crate::shown::about;
use crate::task::list::{ABOUT, tell};
use crate::time::{duration, exact};

/// The longest wait of one request.
const MOST: Duration = Duration::from_secs(30);

#[derive(Args)]
pub(crate) struct Put {
    /// What a worker has to be able to do.
    kind: String,
    /// The input: JSON, @FILE, or - for the standard input.
    #[arg(long, value_name = "JSON", value_parser = given::json, default_value = "null")]
    input: Value,
    /// Puts it once: a task of this id, kind and input is put at most once. A new id without this.
    #[arg(long)]
    id: Option<String>,
    /// The idempotency key that the worker passes on; the id by default.
    #[arg(long)]
    key: Option<String>,
    /// How often it may be taken; 5 by default.
    #[arg(long, value_name = "N")]
    attempts: Option<u32>,
    /// The pause after the first attempt that fails; it doubles with each attempt.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pause: Option<Duration>,
    /// The longest pause.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    longest_pause: Option<Duration>,
    /// It can be taken after this time.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    delay: Option<Duration>,
}

#[derive(Args)]
pub(crate) struct Take {
    /// The kinds of tasks that are taken.
    #[arg(required = true)]
    kinds: Vec<String>,
    /// Takes at most this many.
    #[arg(long, value_name = "N", default_value_t = 1)]
    max: usize,
    /// How long the worker may be silent before another one gets the task; 30s by default.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    lease: Option<Duration>,
    /// The name of the worker, for operators.
    #[arg(long, value_name = "NAME")]
    worker: Option<String>,
    /// Waits for a task at most this long.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    wait: Option<Duration>,
}

/// A task that was taken.
#[derive(Args)]
struct Taken {
    /// The task's id.
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    id: String,
    /// The token under which it was taken.
    #[arg(long, value_name = "N")]
    token: u64,
}

#[derive(Args)]
pub(crate) struct Heartbeat {
    #[command(flatten)]
    taken: Taken,
    /// The lease from now on; by default it is as long as before.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    lease: Option<Duration>,
}

#[derive(Args)]
pub(crate) struct Complete {
    #[command(flatten)]
    taken: Taken,
    /// The result: JSON, @FILE, or - for the standard input.
    #[arg(long, value_name = "JSON", value_parser = given::json, default_value = "null")]
    result: Value,
}

#[derive(Args)]
pub(crate) struct Fail {
    #[command(flatten)]
    taken: Taken,
    /// What went wrong.
    #[arg(long, value_name = "TEXT")]
    message: String,
    /// A code for programs.
    #[arg(long)]
    code: Option<String>,
    /// More about it: JSON, @FILE, or - for the standard input.
    #[arg(long, value_name = "JSON", value_parser = given::json)]
    details: Option<Value>,
    /// No other attempt makes sense: the task has failed for good.
    #[arg(long)]
    not_retryable: bool,
    /// The pause before the next attempt, in place of that of the task.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pause: Option<Duration>,
}

#[derive(Args)]
pub(crate) struct Cancel {
    /// The task's id.
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    id: String,
    /// The reason, which stays with the task.
    #[arg(long, value_name = "TEXT", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    reason: String,
    /// Does not ask for confirmation.
    #[arg(long)]
    yes: bool,
}

fn length(time: Option<Duration>) -> Option<Value> {
    time.map(|time| exact(time).into())
}

pub(super) async fn put(put: Put, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let Put { kind, input, id, key, attempts, pause, longest_pause, delay } = put;
    let body = object([
        ("kind", Some(kind.into())),
        ("input", Some(input)),
        ("id", id.map(Value::from)),
        ("key", key.map(Value::from)),
        ("attempts", attempts.map(Value::from)),
        ("pause", length(pause)),
        ("longest_pause", length(longest_pause)),
        ("delay", length(delay)),
    ]);
    tell(&client.call(ApiCall::post("/tasks").body(body)).await?, client, output)
}

pub(super) async fn take(take: Take, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let Take { kinds, max, lease, worker, wait } = take;
    let body = object([
        ("kinds", Some(kinds.into())),
        ("max", Some(max.into())),
        ("lease", length(lease)),
        ("worker", worker.map(Value::from)),
    ]);
    let until = wait.map(|wait| client.env().monotonic() + wait);
    let taken = loop {
        let left = until.map(|until| until.saturating_sub(client.env().monotonic()));
        let left = left.filter(|left| !left.is_zero());
        let asked = ApiCall::post("/tasks:take").body(body.clone());
        let taken = client.call(asked.maybe("wait", left.map(|left| exact(left.min(MOST))))).await?;
        if left.is_none() || taken["tasks"].as_array().is_none_or(|tasks| !tasks.is_empty()) {
            break taken;
        }
    };
    let tasks = taken["tasks"].as_array().map(Vec::as_slice).unwrap_or_default();
    if output.format() == Format::Jsonl {
        tasks.iter().try_for_each(|task| output.line(task))?;
    } else {
        let now = client.env().now();
        output.one(&taken, |text| {
            for (index, task) in tasks.iter().enumerate() {
                if index > 0 {
                    text.line("");
                }
                about(text, task, &ABOUT, now);
            }
        })?;
    }
    match tasks.is_empty() {
        true => Err(Problem::new(Exit::Busy, "there is no task to take now").into()),
        false => Ok(()),
    }
}

async fn change(taken: &Taken, verb: &str, mut body: Value, client: &Client, output: &mut Output<'_>) -> Result<()> {
    body["token"] = taken.token.into();
    let call = ApiCall::post(format!("/tasks/{}/{verb}", encoded(&taken.id))).body(body);
    tell(&client.call(call).await?, client, output)
}

pub(super) async fn heartbeat(beat: Heartbeat, client: &Client, output: &mut Output<'_>) -> Result<()> {
    change(&beat.taken, "heartbeat", object([("lease", length(beat.lease))]), client, output).await
}

pub(super) async fn complete(complete: Complete, client: &Client, output: &mut Output<'_>) -> Result<()> {
    change(&complete.taken, "complete", json!({"output": complete.result}), client, output).await
}

pub(super) async fn fail(fail: Fail, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let Fail { taken, message, code, details, not_retryable, pause } = fail;
    let body = object([
        ("message", Some(message.into())),
        ("code", code.map(Value::from)),
        ("details", details),
        ("retryable", Some((!not_retryable).into())),
        ("pause", length(pause)),
    ]);
    change(&taken, "fail", body, client, output).await
}

pub(super) async fn cancel(cancel: Cancel, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let Cancel { id, reason, yes } = cancel;
    confirm(&format!("Cancel task {id:?}?"), yes, "nothing was cancelled")?;
    let call = ApiCall::post(format!("/tasks/{}/cancel", encoded(&id))).body(json!({"reason": reason}));
    tell(&client.call(call).await?, client, output)
}
