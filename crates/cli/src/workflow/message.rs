//! `latch workflow signal`, `update` and `query`: messages to an execution, and what it shows of itself.

use std::time::Duration;

use anyhow::Result;
use clap::Args;
use latchwork::{Value, json};

use crate::api::explained;
use crate::client::{ApiCall, Client, encoded};
use crate::given;
use crate::output::{Exit, Output, Problem, Table, shortened};
use crate::shown::{document, word};
use crate::time::{duration, exact};

/// The longest value in a table.
const LETTERS: usize = 100;
/// The longest wait of one request.
const MOST: Duration = Duration::from_secs(30);

#[derive(Args)]
pub(crate) struct Signal {
    /// The execution's id.
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    id: String,
    /// The name of the signal.
    name: String,
    /// Its payload: JSON, @FILE, or - for the standard input.
    #[arg(value_name = "JSON", value_parser = given::json, default_value = "null")]
    payload: Value,
    /// The id of the signal: however often it is sent under one id, it counts once.
    #[arg(long, value_name = "ID")]
    signal_id: Option<String>,
}

#[derive(Args)]
pub(crate) struct Update {
    /// The execution's id.
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    id: String,
    /// The name of the update.
    name: String,
    /// The request: JSON, @FILE, or - for the standard input.
    #[arg(value_name = "JSON", value_parser = given::json, default_value = "null")]
    request: Value,
    /// The id of the update: however often it is sent under one id, it counts once, and has one answer.
    #[arg(long, value_name = "ID")]
    update_id: Option<String>,
    /// Waits for the answer at most this long.
    #[arg(long, value_name = "TIME", default_value = "30s", value_parser = duration)]
    wait: Duration,
}

#[derive(Args)]
pub(crate) struct Query {
    /// The execution's id.
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    id: String,
    /// The name of the value; all values without this.
    name: Option<String>,
}

pub(crate) async fn signal(signal: Signal, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let Signal { id, name, payload, signal_id } = signal;
    let body = json!({"name": name, "payload": payload, "id": signal_id});
    client.call(ApiCall::post(format!("/workflows/{}/signals", encoded(&id))).body(body)).await?;
    output.one(&json!({"id": id, "signal": name}), |text| {
        text.line(format!("Signal {name:?} to execution {id:?} is stored."));
    })
}

/// The update is sent once, under its id. Each further request asks for the answer.
pub(crate) async fn update(update: Update, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let Update { id, name, request, update_id, wait } = update;
    // In a directory that this command has opened, no execution answers.
    let wait = if client.is_alone() { Duration::ZERO } else { wait };
    let until = client.env().monotonic() + wait;
    let mut update_id = update_id.unwrap_or_else(|| client.env().uuid().to_string());
    // Answers that other processes give are noticed between two requests.
    let most = if client.is_here() { Duration::from_secs(1) } else { MOST };
    let answer = loop {
        let left = until.saturating_sub(client.env().monotonic());
        let body = json!({"name": name, "request": request, "id": update_id});
        let call = ApiCall::search(format!("/workflows/{}/updates", encoded(&id))).body(body);
        let answer = client.call(call.query("wait", exact(left.min(most)))).await;
        let answer = answer.map_err(|error| explained(error, client))?;
        if answer["answered"] == true || left.is_zero() {
            break answer;
        }
        update_id = word(&answer, "id").into();
    };
    output.one(&answer, |text| match answer["answered"] == true {
        true => document(text, &answer["answer"]),
        false => text.line(format!("Update {name:?} is stored, and not answered yet; its id is {update_id}.")),
    })?;
    match answer["answered"] == true {
        true => Ok(()),
        false => {
            let why = format!("update {name:?} was not answered in time; ask again with --update-id {update_id}");
            Err(Problem::new(Exit::Busy, why).with("id", update_id).into())
        }
    }
}

pub(crate) async fn query(query: Query, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let path = format!("/workflows/{}/published", encoded(&query.id));
    match &query.name {
        Some(name) => {
            let found = client.call(ApiCall::get(format!("{path}/{}", encoded(name)))).await?;
            output.one(&found, |text| document(text, &found["value"]))
        }
        None => {
            let found = client.call(ApiCall::get(path)).await?;
            let values = found.as_object().into_iter().flatten();
            output.one(&found, |text| {
                let mut table = Table::new(&["NAME", "VALUE"]);
                for (name, value) in values {
                    table.row([name.clone().into(), shortened(&value.to_string(), LETTERS).into()]);
                }
                text.table(table);
            })
        }
    }
}
