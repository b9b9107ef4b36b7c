//! `latch entity add`, `put`, `patch`, `remove` and `transact`: changes of entities, under conditions on their revs.

use anyhow::Result;
use clap::{ArgGroup, Args};
use hyper::Method;
use latchwork::{Value, json};

use crate::ask::confirm;
use crate::client::{ApiCall, Client, Condition, encoded, object};
use crate::given;
use crate::output::{Exit, Output, Problem};
use crate::shown::{Field, How, table, word};

const EFFECTS: [Field; 3] = [("ID", "/id", How::Plain), ("EFFECT", "/effect", How::State), ("REV", "/rev", How::Plain)];

/// What an entity holds.
#[derive(Args)]
struct Contents {
    /// The subtype.
    #[arg(long)]
    subtype: Option<String>,
    /// The data: JSON, @FILE, or - for the standard input.
    #[arg(long, value_name = "JSON", value_parser = given::json)]
    data: Option<Value>,
    /// The metadata: an object.
    #[arg(long, value_name = "JSON", value_parser = given::json)]
    metadata: Option<Value>,
}

#[derive(Args)]
pub(crate) struct Add {
    /// The type of the entity.
    #[arg(long = "type", value_name = "TYPE")]
    entity_type: String,
    /// The id; a new one without this.
    #[arg(long)]
    id: Option<String>,
    #[command(flatten)]
    contents: Contents,
    /// Leaves an entity as it is that exists already.
    #[arg(long, requires = "id")]
    if_absent: bool,
}

#[derive(Args)]
#[command(group = ArgGroup::new("condition").args(["if_rev", "new"]))]
pub(crate) struct Put {
    /// The entity's id.
    id: String,
    /// The type of the entity. It never changes.
    #[arg(long = "type", value_name = "TYPE")]
    entity_type: String,
    #[command(flatten)]
    contents: Contents,
    /// Replaces it only if it is at this rev. Without this, it is replaced whatever its rev is.
    #[arg(long, value_name = "REV")]
    if_rev: Option<u64>,
    /// Adds it, and never replaces it.
    #[arg(long)]
    new: bool,
}

#[derive(Args)]
pub(crate) struct Patch {
    /// The entity's id.
    id: String,
    #[command(flatten)]
    contents: Contents,
    /// Removes the subtype.
    #[arg(long, conflicts_with = "subtype")]
    no_subtype: bool,
    /// Changes it only if it is at this rev.
    #[arg(long, value_name = "REV")]
    if_rev: Option<u64>,
}

#[derive(Args)]
pub(crate) struct Remove {
    /// The entity's id.
    id: String,
    /// Removes it only if it is at this rev.
    #[arg(long, value_name = "REV")]
    if_rev: Option<u64>,
    /// Does not ask for confirmation.
    #[arg(long)]
    yes: bool,
}

#[derive(Args)]
pub(crate) struct Transact {
    /// The operations: JSON, @FILE or -. For example '[{"update": {"id": "a", "data": 1, "if_rev": 3}}]', or the object
    /// with `ops` and other fields that the API takes.
    #[arg(value_name = "JSON", value_parser = given::json)]
    ops: Value,
    /// The reason, which stays in the history.
    #[arg(long, value_name = "TEXT")]
    reason: Option<String>,
    /// The author, for the history.
    #[arg(long, value_name = "NAME")]
    author: Option<String>,
}

fn at(if_rev: Option<u64>) -> Condition {
    if_rev.map_or(Condition::Exists, Condition::Rev)
}

/// Prints what one operation has done.
fn tell(done: &Value, output: &mut Output<'_>) -> Result<()> {
    output.one(done, |text| {
        let (id, rev) = (word(done, "id"), &done["rev"]);
        text.line(match word(done, "effect") {
            "existing" => format!("Entity {id:?} existed before, and is left at rev {rev}."),
            effect => format!("Entity {id:?} is {effect}; its rev is {rev}."),
        });
    })
}

pub(crate) async fn add(add: Add, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let Add { entity_type, id, contents, if_absent } = add;
    let body = object([
        ("type", Some(entity_type.into())),
        ("id", id.map(Value::from)),
        ("subtype", contents.subtype.map(Value::from)),
        ("data", contents.data),
        ("metadata", contents.metadata),
        ("if_absent", Some(if_absent.into())),
    ]);
    tell(&client.call(ApiCall::post("/entities").body(body)).await?, output)
}

pub(crate) async fn put(put: Put, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let Put { id, entity_type, contents, if_rev, new } = put;
    let body = object([
        ("type", Some(entity_type.into())),
        ("subtype", contents.subtype.map(Value::from)),
        ("data", contents.data),
        ("metadata", contents.metadata),
    ]);
    let condition = if new { Condition::Absent } else { at(if_rev) };
    let call = ApiCall::change(Method::PUT, format!("/entities/{}", encoded(&id))).body(body);
    tell(&client.call(call.condition(Some(condition))).await?, output)
}

pub(crate) async fn patch(patch: Patch, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let Patch { id, contents, no_subtype, if_rev } = patch;
    let subtype = if no_subtype { Some(Value::Null) } else { contents.subtype.map(Value::from) };
    let body = object([("subtype", subtype), ("data", contents.data), ("metadata", contents.metadata)]);
    if body.as_object().is_some_and(|fields| fields.is_empty()) {
        let why = "nothing is changed: give --data, --metadata, --subtype or --no-subtype";
        return Err(Problem::new(Exit::Usage, why).into());
    }
    let call = ApiCall::change(Method::PATCH, format!("/entities/{}", encoded(&id))).body(body);
    tell(&client.call(call.condition(Some(at(if_rev)))).await?, output)
}

pub(crate) async fn remove(remove: Remove, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let Remove { id, if_rev, yes } = remove;
    confirm(&format!("Remove entity {id:?}?"), yes, "nothing was removed")?;
    let call = ApiCall::change(Method::DELETE, format!("/entities/{}", encoded(&id)));
    tell(&client.call(call.condition(Some(at(if_rev)))).await?, output)
}

pub(crate) async fn transact(transact: Transact, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let Transact { ops, reason, author } = transact;
    let mut body = if ops.is_array() { json!({"ops": ops}) } else { ops };
    if let Some(fields) = body.as_object_mut() {
        let more = [("reason", reason), ("author", author)];
        fields.extend(more.into_iter().filter_map(|(name, value)| Some((name.to_string(), value?.into()))));
    }
    let done = client.call(ApiCall::post("/entities:transact").body(body)).await?;
    let now = client.env().now();
    output.one(&done, |text| {
        text.line(format!("The transaction is generation {}.", done["generation"]));
        text.table(table(done["ops"].as_array().map(Vec::as_slice).unwrap_or_default(), &EFFECTS, now));
    })
}
