//! `latch state put`, `patch`, `increment`, `push`, `set-record`, `delete-record` and `remove`: each is one operation
//! of the API, under a condition and the guard of a lock if they are given.

use anyhow::Result;
use clap::{ArgGroup, Args};
use hyper::Method;
use latchwork::{Value, json};

use crate::ask::confirm;
use crate::client::{ApiCall, Client, Condition};
use crate::given;
use crate::output::Output;
use crate::shown::document;
use crate::state::Place;

/// On what a change depends.
#[derive(Args)]
struct Terms {
    /// Changes it only if it is at this rev.
    #[arg(long, value_name = "REV")]
    if_rev: Option<u64>,
    /// Changes it only while this lock is held under --token.
    #[arg(long, value_name = "NAME", requires = "token")]
    lock: Option<String>,
    /// The fencing token of the lock.
    #[arg(long, value_name = "N", requires = "lock")]
    token: Option<u64>,
}

#[derive(Args)]
#[command(group = ArgGroup::new("condition").args(["if_rev", "new"]))]
pub(crate) struct Put {
    #[command(flatten)]
    place: Place,
    /// The state: JSON, @FILE, or - for the standard input.
    #[arg(value_name = "JSON", value_parser = given::json)]
    state: Value,
    /// Creates it, and never replaces it. Without this, it is replaced, and must exist.
    #[arg(long)]
    new: bool,
    #[command(flatten)]
    terms: Terms,
}

#[derive(Args)]
pub(crate) struct Patch {
    #[command(flatten)]
    place: Place,
    /// What is merged into it: JSON, @FILE, or - for the standard input.
    #[arg(value_name = "JSON", value_parser = given::json)]
    patch: Value,
    #[command(flatten)]
    terms: Terms,
}

#[derive(Args)]
pub(crate) struct Increment {
    #[command(flatten)]
    place: Place,
    /// The place of the number in the state, for example cart.items; without it, the whole state.
    #[arg(value_name = "PATH", default_value = "")]
    path: String,
    /// What is added.
    #[arg(long, value_name = "NUMBER", value_parser = given::json, default_value = "1", allow_hyphen_values = true)]
    by: Value,
    #[command(flatten)]
    terms: Terms,
}

#[derive(Args)]
pub(crate) struct Push {
    #[command(flatten)]
    place: Place,
    /// The element: JSON, @FILE, or - for the standard input.
    #[arg(value_name = "JSON", value_parser = given::json)]
    value: Value,
    /// The place of the list in the state; without it, the whole state.
    #[arg(long = "at", value_name = "PATH", default_value = "")]
    path: String,
    #[command(flatten)]
    terms: Terms,
}

#[derive(Args)]
pub(crate) struct SetRecord {
    #[command(flatten)]
    place: Place,
    /// The name of the entry.
    entry: String,
    /// Its value: JSON, @FILE, or - for the standard input.
    #[arg(value_name = "JSON", value_parser = given::json)]
    value: Value,
    /// The place of the record in the state; without it, the whole state.
    #[arg(long = "at", value_name = "PATH", default_value = "")]
    path: String,
    #[command(flatten)]
    terms: Terms,
}

#[derive(Args)]
pub(crate) struct DeleteRecord {
    #[command(flatten)]
    place: Place,
    /// The name of the entry.
    entry: String,
    /// The place of the record in the state; without it, the whole state.
    #[arg(long = "at", value_name = "PATH", default_value = "")]
    path: String,
    #[command(flatten)]
    terms: Terms,
}

#[derive(Args)]
pub(crate) struct Remove {
    #[command(flatten)]
    place: Place,
    #[command(flatten)]
    terms: Terms,
    /// Does not ask for confirmation.
    #[arg(long)]
    yes: bool,
}

/// A request to a state.
struct Request<'a> {
    place: &'a Place,
    terms: &'a Terms,
    method: Method,
    /// The last part of the path, with its slash.
    verb: &'static str,
}

impl Request<'_> {
    async fn send(self, body: Option<Value>, otherwise: Option<Condition>, client: &Client) -> Result<Value> {
        let Request { place, terms, method, verb } = self;
        let call = ApiCall::change(method, format!("{}{verb}", place.path()));
        let call = place.query()?.into_iter().fold(call, |call, (name, value)| call.query(name, value));
        let call = call.maybe("lock", terms.lock.as_ref()).maybe("token", terms.token);
        let call = call.condition(terms.if_rev.map(Condition::Rev).or(otherwise));
        client.call(body.into_iter().fold(call, ApiCall::body)).await
    }
}

/// Prints what a change has done.
fn tell(place: &Place, done: &Value, output: &mut Output<'_>) -> Result<()> {
    output.one(done, |text| {
        let rev = &done["rev"];
        text.line(match done["changed"] == false {
            true => format!("{place} was like this before, at rev {rev}."),
            false => format!("{place} is at rev {rev}."),
        });
        if let Some(value) = done.get("value") {
            document(text, value);
        }
    })
}

pub(super) async fn put(put: Put, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let Put { place, state, new, terms } = put;
    let condition = if new { Condition::Absent } else { Condition::Exists };
    let request = Request { place: &place, terms: &terms, method: Method::PUT, verb: "" };
    tell(&place, &request.send(Some(state), Some(condition), client).await?, output)
}

pub(super) async fn patch(patch: Patch, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let Patch { place, patch, terms } = patch;
    let request = Request { place: &place, terms: &terms, method: Method::PATCH, verb: "" };
    tell(&place, &request.send(Some(patch), None, client).await?, output)
}

/// An operation of its own route.
async fn operate(
    place: &Place,
    terms: &Terms,
    verb: &'static str,
    body: Value,
    client: &Client,
    output: &mut Output<'_>,
) -> Result<()> {
    let request = Request { place, terms, method: Method::POST, verb };
    tell(place, &request.send(Some(body), None, client).await?, output)
}

pub(super) async fn increment(increment: Increment, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let Increment { place, path, by, terms } = increment;
    operate(&place, &terms, "/increment", json!({"path": path, "by": by}), client, output).await
}

pub(super) async fn push(push: Push, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let Push { place, value, path, terms } = push;
    operate(&place, &terms, "/push", json!({"path": path, "value": value}), client, output).await
}

pub(super) async fn set_record(set: SetRecord, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let SetRecord { place, entry, value, path, terms } = set;
    place.has_records()?;
    operate(&place, &terms, "/set-record", json!({"path": path, "entry": entry, "value": value}), client, output).await
}

pub(super) async fn delete_record(delete: DeleteRecord, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let DeleteRecord { place, entry, path, terms } = delete;
    place.has_records()?;
    operate(&place, &terms, "/delete-record", json!({"path": path, "entry": entry}), client, output).await
}

pub(super) async fn remove(remove: Remove, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let Remove { place, terms, yes } = remove;
    confirm(&format!("Remove {place}?"), yes, "nothing was removed")?;
    let request = Request { place: &place, terms: &terms, method: Method::DELETE, verb: "" };
    let done = request.send(None, Some(Condition::Exists), client).await?;
    output.one(&done, |text| text.line(format!("{place} is removed.")))
}
