//! `latch flow list`, `run`, `show`, `result` and `checkpoints`.

use anyhow::Result;
use clap::Args;
use latchwork::Value;

use crate::client::{ApiCall, Client, encoded, object};
use crate::given;
use crate::output::Output;
use crate::shown::{Field, How, about, document, table, word};
use crate::workflow::result::{Waiting, check_completed};

const FLOWS: [Field; 2] = [("FLOW", "/name", How::Plain), ("ACTIONS", "/actions", How::Words)];

const ABOUT: [Field; 13] = [
    ("id", "/id", How::Plain),
    ("flow", "/flow", How::Plain),
    ("action", "/action", How::Plain),
    ("status", "/status", How::State),
    ("reason", "/reason", How::Plain),
    ("failure", "/failure/message", How::Bad),
    ("input", "/input", How::Json),
    ("output", "/output", How::Json),
    ("session", "/session", How::Plain),
    ("user", "/user", How::Plain),
    ("org", "/org", How::Plain),
    ("started", "/started_at", How::Time),
    ("changed", "/changed_at", How::Time),
];

/// A request to a flow.
#[derive(Args)]
pub(crate) struct One {
    /// The name of the flow.
    flow: String,
    /// The id of the request.
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    id: String,
}

impl One {
    fn path(&self) -> String {
        format!("/flows/{}/requests/{}", encoded(&self.flow), encoded(&self.id))
    }
}

#[derive(Args)]
pub(crate) struct Run {
    /// The name of the flow.
    flow: String,
    /// The name of the action.
    action: String,
    /// The input: JSON, @FILE, or - for the standard input.
    #[arg(long, value_name = "JSON", value_parser = given::json, default_value = "null")]
    input: Value,
    /// The id of the request; a new one without this.
    #[arg(long)]
    id: Option<String>,
    /// The session that it belongs to.
    #[arg(long)]
    session: Option<String>,
    /// The user that it is for.
    #[arg(long)]
    user: Option<String>,
    /// The organisation that it is for.
    #[arg(long)]
    org: Option<String>,
    #[command(flatten)]
    wait: Waiting,
}

#[derive(Args)]
pub(crate) struct GetResult {
    #[command(flatten)]
    request: One,
    #[command(flatten)]
    wait: Waiting,
}

pub(super) async fn list(client: &Client, output: &mut Output<'_>) -> Result<()> {
    let page: latchwork::Page<Value> = client.get("/flows", &[]).await?;
    let now = client.env().now();
    output.many("flows", &page.items, None, |found| table(found, &FLOWS, now))
}

pub(super) async fn run(run: Run, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let Run { flow, action, input, id, session, user, org, wait } = run;
    let text = |text: Option<String>| text.map(Value::from);
    let body = object([
        ("input", Some(input)),
        ("id", text(id)),
        ("session", text(session)),
        ("user", text(user)),
        ("org", text(org)),
    ]);
    let path = format!("/flows/{}/actions/{}", encoded(&flow), encoded(&action));
    let started = client.call(ApiCall::post(path).body(body)).await?;
    let request = One { flow, id: word(&started, "id").into() };
    if wait.is_given() {
        return outcome(&request, &wait, client, output).await;
    }
    output.one(&started, |text| {
        text.line(format!("Request {:?} to action {action:?} of flow {:?} is stored.", request.id, request.flow));
    })
}

async fn outcome(request: &One, wait: &Waiting, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let standing = wait.standing(&format!("{}/result", request.path()), &[], client).await?;
    wait.tell(&standing, output)?;
    check_completed(&standing)
}

pub(super) async fn result(asked: GetResult, client: &Client, output: &mut Output<'_>) -> Result<()> {
    outcome(&asked.request, &asked.wait, client, output).await
}

pub(super) async fn show(one: One, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let found = client.call(ApiCall::get(one.path())).await?;
    let now = client.env().now();
    output.one(&found, |text| about(text, &found, &ABOUT, now))
}

pub(super) async fn checkpoints(one: One, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let found = client.call(ApiCall::get(format!("{}/checkpoints", one.path()))).await?;
    output.one(&found, |text| {
        for (path, state) in found["checkpoints"].as_object().into_iter().flatten() {
            text.line(format!("{path}:"));
            document(text, state);
        }
    })
}
