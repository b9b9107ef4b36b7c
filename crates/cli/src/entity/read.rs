//! `latch entity get`, `find` and `history`: entities as they are, and as they were.

use anyhow::Result;
use clap::Args;
use latchwork::{Cursor, Page, Value, json};

use crate::client::{ApiCall, Client, encoded, object};
use crate::given::{self, AsOf};
use crate::output::Output;
use crate::paging::Paging;
use crate::shown::{Field, How, about, document, table, word};

/// The fields of one entity, before its data.
const ABOUT: [Field; 7] = [
    ("id", "/id", How::Plain),
    ("type", "/type", How::Plain),
    ("subtype", "/subtype", How::Plain),
    ("rev", "/_rev", How::Plain),
    ("created", "/created/time_us", How::Time),
    ("changed", "/changed/time_us", How::Time),
    ("metadata", "/metadata", How::Json),
];

const LISTED: [Field; 6] = [
    ("ID", "/id", How::Plain),
    ("TYPE", "/type", How::Plain),
    ("SUBTYPE", "/subtype", How::Plain),
    ("REV", "/_rev", How::Plain),
    ("CHANGED", "/changed/time_us", How::Time),
    ("DATA", "/data", How::Json),
];

const VERSIONS: [Field; 6] = [
    ("REV", "/rev", How::Plain),
    ("GENERATION", "/committed/generation", How::Plain),
    ("WHEN", "/committed/time_us", How::Time),
    ("AUTHOR", "/author", How::Plain),
    ("REASON", "/reason", How::Plain),
    ("DATA", "/shown", How::Plain),
];

#[derive(Args)]
pub(crate) struct Get {
    /// The entity's id.
    id: String,
    /// As it was after this generation of the store, or at this time.
    #[arg(long, value_name = "GENERATION|TIME", value_parser = given::time_or_generation)]
    as_of: Option<AsOf>,
}

#[derive(Args)]
pub(crate) struct Find {
    /// Only entities of this type. Without it, all entities are read.
    #[arg(long = "type", value_name = "TYPE")]
    entity_type: Option<String>,
    /// Only entities of this subtype.
    #[arg(long)]
    subtype: Option<String>,
    /// A condition: JSON, @FILE or -. For example '{"data.age": {"at_least": 18}}'.
    #[arg(long = "where", value_name = "JSON", value_parser = given::json)]
    condition: Option<Value>,
    /// Orders by this field, for example data.age; data.age:descending begins with the largest. It may be given several
    /// times.
    #[arg(long, value_name = "FIELD", value_parser = order)]
    order: Vec<Value>,
    /// As they were after this generation of the store, or at this time.
    #[arg(long, value_name = "GENERATION|TIME", value_parser = given::time_or_generation)]
    as_of: Option<AsOf>,
    /// Tells how the query would be answered: by which index, or by a scan.
    #[arg(long)]
    explain: bool,
    #[command(flatten)]
    paging: Paging,
}

#[derive(Args)]
pub(crate) struct History {
    /// The entity's id.
    id: String,
    #[command(flatten)]
    paging: Paging,
}

fn order(text: &str) -> Result<Value, String> {
    let (path, descending) = match text.split_once(':') {
        None | Some((_, "ascending")) => (text.trim_end_matches(":ascending"), false),
        Some((path, "descending")) => (path, true),
        Some(_) => return Err("write FIELD, FIELD:ascending or FIELD:descending".into()),
    };
    Ok(json!({"path": path, "descending": descending}))
}

fn at(call: ApiCall, as_of: Option<AsOf>) -> ApiCall {
    match as_of {
        Some(AsOf::Generation(generation)) => call.query("as_of", generation),
        Some(AsOf::Time(us)) => call.query("as_of_us", us),
        None => call,
    }
}

pub(crate) async fn get(get: Get, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let call = ApiCall::get(format!("/entities/{}", encoded(&get.id)));
    let found = client.call(at(call, get.as_of)).await?;
    let now = client.env().now();
    output.one(&found, |text| {
        about(text, &found, &ABOUT, now);
        text.line("");
        document(text, &found["data"]);
    })
}

pub(crate) async fn find(find: Find, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let Find { entity_type, subtype, condition, order, as_of, explain, paging } = find;
    let query = object([
        ("type", entity_type.map(Value::from)),
        ("subtype", subtype.map(Value::from)),
        ("filter", condition),
        ("order", Some(order.into())),
    ]);
    if explain {
        let plan = client.call(ApiCall::search("/entities:explain").body(query)).await?;
        return output.one(&plan, |text| text.line(word(&plan, "plan")));
    }
    let now = client.env().now();
    let read = async |limit: usize, after: Option<Cursor>| {
        let call = ApiCall::search("/entities:find").body(query.clone());
        let call = at(call, as_of).query("limit", limit).maybe("after", after);
        Ok::<Page<Value>, anyhow::Error>(serde_json::from_value(client.call(call).await?)?)
    };
    paging.write("entities", output, |found: &[Value]| table(found, &LISTED, now), read).await
}

pub(crate) async fn history(history: History, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let (path, now) = (format!("/entities/{}/history", encoded(&history.id)), client.env().now());
    let read = async |limit, after| client.page::<Value>(&path, &[], limit, after).await;
    let drawn = |found: &[Value]| {
        let shown = |version: &Value| {
            let shown = version.pointer("/entity/data").map_or("removed".into(), Value::to_string);
            let mut version = version.clone();
            version["shown"] = shown.into();
            version
        };
        table(&found.iter().map(shown).collect::<Vec<_>>(), &VERSIONS, now)
    };
    history.paging.write("versions", output, drawn, read).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_order_is_a_field_and_a_direction() {
        assert_eq!(order("data.age"), Ok(json!({"path": "data.age", "descending": false})));
        assert_eq!(order("data.age:ascending"), Ok(json!({"path": "data.age", "descending": false})));
        assert_eq!(order("data.age:descending"), Ok(json!({"path": "data.age", "descending": true})));
        assert!(order("data.age:up").is_err());
    }
}
