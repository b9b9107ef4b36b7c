//! `latch workflow list`: executions by status, by what they wait for, or by their labels.

use anyhow::Result;
use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use latchwork::store::{Env, Timestamp};
use latchwork::workflow::{Attribute, ExecutionFilter, Executions, Status, WaitsFor};

use crate::client::Client;
use crate::output::{Cell, Exit, Format, Output, Problem, Table, Tone, shortened};
use crate::paging::Paging;
use crate::time;
use crate::workflow::fields::{EventFields, ListedFields, status_cell};
use crate::workflow::why::open;

#[derive(Args)]
pub(crate) struct List {
    /// Only executions of this workflow. If given several times: of any of these.
    #[arg(long = "type", visible_alias = "workflow", value_name = "WORKFLOW")]
    workflows: Vec<String>,
    /// Only executions of this status. If given several times, or with commas: of any of these. `waiting` includes
    /// those that are asleep.
    #[arg(long, value_delimiter = ',', value_parser = status())]
    status: Vec<Status>,
    /// Only executions that wait for this: timer, retry:STEP, signal:NAME, update:NAME, child:ID, completion:NAME,
    /// published:NAME, lock:NAME or review:NAME. If given several times: for any of these.
    #[arg(long, value_name = "WHAT", value_parser = |text: &str| Typed::read(text, waits_for))]
    waits_for: Vec<Typed<WaitsFor>>,
    /// Only executions with this tag. If given several times: with all of these.
    #[arg(long = "tag", value_name = "TAG")]
    tags: Vec<String>,
    /// Only executions with this attribute: NAME=VALUE, or >=, <=, > or < in place of =. A value is true, false, a
    /// number, time:2026-11-30T12:00:00Z, or a text, in double quotes if it could be one of the others.
    #[arg(long = "attribute", value_name = "NAME=VALUE", value_parser = |text: &str| Typed::read(text, attribute))]
    attributes: Vec<Typed<Asked>>,
    /// Only executions that were started at this time or later: RFC 3339, a date in UTC, or how long ago (90m, 2d).
    #[arg(long, value_name = "TIME", value_parser = time_text)]
    since: Option<String>,
    /// Only executions that were started before this time.
    #[arg(long, value_name = "TIME", value_parser = time_text)]
    until: Option<String>,
    #[command(flatten)]
    paging: Paging,
    /// The oldest first; with limits on an attribute, the lowest value first.
    #[arg(long)]
    ascending: bool,
    /// The newest first; with limits on an attribute, the highest value first.
    #[arg(long, conflicts_with = "ascending")]
    descending: bool,
}

/// A value, and the text that it was read from: a server reads the same text.
#[derive(Debug, Clone)]
struct Typed<T> {
    text: String,
    value: T,
}

impl<T> Typed<T> {
    fn read(text: &str, read: impl Fn(&str) -> Result<T, String>) -> Result<Typed<T>, String> {
        Ok(Typed { text: text.into(), value: read(text)? })
    }
}

/// Reads the name of a status.
fn status() -> impl TypedValueParser<Value = Status> {
    PossibleValuesParser::new(Status::ALL.map(Status::name)).try_map(|name| name.parse::<Status>())
}

/// Checks a time, and keeps its text: it is relative to the moment when the command runs.
fn time_text(text: &str) -> Result<String, String> {
    time::parse(text, Env::system().now()).map(|_| text.to_string())
}

/// A condition on an attribute.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Asked {
    pub(crate) name: String,
    pub(crate) sign: &'static str,
    pub(crate) value: Attribute,
}

fn waits_for(text: &str) -> Result<WaitsFor, String> {
    let known = "timer, retry:STEP, signal:NAME, update:NAME, child:ID, completion:NAME, published:NAME, lock:NAME, \
                 review:NAME or admission:KEY";
    match text.split_once(':').map_or((text, ""), |(what, name)| (what, name)) {
        ("timer", "") => Ok(WaitsFor::Timer),
        (_, "") => Err(format!("write {known}")),
        ("retry", name) => Ok(WaitsFor::Retry(name.into())),
        ("signal", name) => Ok(WaitsFor::Signal(name.into())),
        ("update", name) => Ok(WaitsFor::Update(name.into())),
        ("child", name) => Ok(WaitsFor::Child(name.into())),
        ("completion", name) => Ok(WaitsFor::Completion(name.into())),
        ("published", name) => Ok(WaitsFor::Published(name.into())),
        ("lock", name) => Ok(WaitsFor::Lock(name.into())),
        ("review", name) => Ok(WaitsFor::Review(name.into())),
        ("admission", name) => Ok(WaitsFor::Admission(name.into())),
        _ => Err(format!("write {known}")),
    }
}

pub(crate) fn attribute(text: &str) -> Result<Asked, String> {
    let at = text.find(['=', '<', '>']).filter(|at| *at > 0).ok_or("write NAME=VALUE")?;
    let (name, rest) = text.split_at(at);
    let signs = [">=", "<=", "=", ">", "<"];
    let sign = signs.into_iter().find(|sign| rest.starts_with(sign)).ok_or("write NAME=VALUE")?;
    let rest = &rest[sign.len()..];
    if rest.starts_with(['=', '<', '>']) {
        let signs = signs.join(" ");
        return Err(format!("the sign must be one of {signs}; write a text that begins with one of them in quotes"));
    }
    Ok(Asked { name: name.into(), sign, value: value(rest)? })
}

fn value(text: &str) -> Result<Attribute, String> {
    if let Some(time) = text.strip_prefix("time:") {
        return time::absolute(time).map(Attribute::from);
    }
    Ok(match serde_json::from_str::<serde_json::Value>(text) {
        Ok(serde_json::Value::Bool(value)) => value.into(),
        Ok(serde_json::Value::String(value)) => value.into(),
        Ok(serde_json::Value::Number(number)) => match (number.as_i64(), number.as_f64()) {
            (Some(number), _) => number.into(),
            (None, Some(number)) => number.into(),
            (None, None) => text.into(),
        },
        _ => text.into(),
    })
}

impl List {
    fn filter(&self, now: Timestamp) -> Result<ExecutionFilter> {
        let mut filter = ExecutionFilter::new();
        for name in &self.workflows {
            filter = filter.workflow(name);
        }
        for status in &self.status {
            filter = filter.is(*status);
        }
        for what in &self.waits_for {
            filter = filter.waits_for(what.value.clone());
        }
        for tag in &self.tags {
            filter = filter.tag(tag);
        }
        for Asked { name, sign, value } in self.attributes.iter().map(|asked| &asked.value) {
            let value = value.clone();
            filter = match *sign {
                ">=" => filter.at_least(name, value),
                "<=" => filter.at_most(name, value),
                ">" => filter.greater_than(name, value),
                "<" => filter.less_than(name, value),
                _ => filter.attribute(name, value),
            };
        }
        let time = |text: &str| time::parse(text, now).map_err(|why| Problem::new(Exit::Usage, why));
        if let Some(since) = &self.since {
            filter = filter.started(time(since)?..);
        }
        if let Some(until) = &self.until {
            filter = filter.started(..time(until)?);
        }
        Ok(filter)
    }

    /// The filter as parameters of a query.
    fn query(&self) -> Vec<(&'static str, String)> {
        let mut query = Vec::new();
        query.extend(self.workflows.iter().map(|name| ("workflow", name.clone())));
        query.extend(self.status.iter().map(|status| ("status", status.name().to_string())));
        query.extend(self.waits_for.iter().map(|what| ("waits_for", what.text.clone())));
        query.extend(self.tags.iter().map(|tag| ("tag", tag.clone())));
        query.extend(self.attributes.iter().map(|asked| ("attribute", asked.text.clone())));
        query.extend(self.since.iter().map(|since| ("since", since.clone())));
        query.extend(self.until.iter().map(|until| ("until", until.clone())));
        if self.ascending {
            query.push(("order", "ascending".into()));
        } else if self.descending {
            query.push(("order", "descending".into()));
        }
        query
    }
}

/// The same from a server.
pub(crate) async fn ask(list: List, client: &Client, now: Timestamp, output: &mut Output<'_>) -> Result<()> {
    let query = list.query();
    list.paging
        .write(
            "executions",
            output,
            |found| table(found, now),
            async |limit, after| client.page::<ListedFields>("/workflows", &query, limit, after).await,
        )
        .await
}

pub(crate) async fn run(list: List, executions: &Executions, now: Timestamp, output: &mut Output<'_>) -> Result<()> {
    let mut found = executions.list(list.filter(now)?);
    if list.ascending {
        found = found.ascending();
    } else if list.descending {
        found = found.descending();
    }
    let is_table = output.format() == Format::Table;
    list.paging
        .write(
            "executions",
            output,
            |found| table(found, now),
            async |limit, after| {
                let page = found.clone().limit(limit).after(after).await?;
                let mut page = page.map(ListedFields::of);
                for listed in page.items.iter_mut().filter(|listed| is_table && listed.status == Status::Running) {
                    let open = open(executions, &listed.id).await?;
                    listed.at_work = open.iter().map(|operation| EventFields::of(operation).words()).collect();
                }
                Ok(page)
            },
        )
        .await
}

fn table(found: &[ListedFields], now: Timestamp) -> Table {
    let mut table = Table::new(&["ID", "WORKFLOW", "STATUS", "STARTED", "DETAIL", "TAGS"]);
    for execution in found {
        let tags: Vec<&str> = execution.tags.iter().map(String::as_str).collect();
        table.row([
            execution.id.to_string().into(),
            execution.workflow.clone().into(),
            status_cell(execution.status),
            Cell::new(execution.started_at.relative_to(now), Tone::Dim),
            shortened(&detail(execution, now), 60).into(),
            tags.join(", ").into(),
        ]);
    }
    table
}

/// The most important detail of an execution beside its status.
fn detail(execution: &ListedFields, now: Timestamp) -> String {
    let outcome = &execution.outcome;
    if let Some(failure) = &outcome.failure {
        return failure.message.clone();
    }
    if let Some(reason) = &outcome.reason {
        return reason.clone();
    }
    let waits: Vec<String> = execution.waits.iter().map(|wait| wait.words(now)).collect();
    match &execution.cancel_reason {
        Some(reason) if !execution.status.is_end() => format!("to be cancelled: {reason}"),
        _ if waits.is_empty() && !execution.at_work.is_empty() => format!("was in {}", execution.at_work.join(", ")),
        _ => waits.join("; "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_type_of_an_attribute_follows_from_its_text() {
        let check = |text: &str, name: &str, sign: &'static str, value: Attribute| {
            assert_eq!(attribute(text), Ok(Asked { name: name.into(), sign, value }), "{text}");
        };
        check("shop=north", "shop", "=", "north".into());
        check("shop=", "shop", "=", "".into());
        check("price=42", "price", "=", 42.into());
        check("price=\"42\"", "price", "=", "42".into());
        check("price>=4.5", "price", ">=", 4.5.into());
        check("price<-1", "price", "<", (-1).into());
        check("paid=true", "paid", "=", true.into());
        check("a=b=c", "a", "=", "b=c".into());
        check("sign=\">\"", "sign", "=", ">".into());
        check("due<time:1970-01-01T00:00:01Z", "due", "<", Timestamp(1_000_000).into());
        for wrong in ["shop", "=north", "", "due=time:soon", "due=time:2d", "price=>4", "price==4", "a<>b"] {
            assert!(attribute(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn waits_are_read() {
        assert_eq!(waits_for("timer"), Ok(WaitsFor::Timer));
        assert_eq!(waits_for("signal:a:b"), Ok(WaitsFor::Signal("a:b".into())));
        assert_eq!(waits_for("lock:account-42"), Ok(WaitsFor::Lock("account-42".into())));
        for wrong in ["", "signal", "signal:", "timer:x", "moon:full", "step:x"] {
            assert!(waits_for(wrong).is_err(), "{wrong}");
        }
    }
}
