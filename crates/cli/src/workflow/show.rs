//! `latch workflow show`: all details of an execution, and its last events, as a timeline and with their results.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::Result;
use clap::Args;
use latchwork::Cursor;
use latchwork::store::Timestamp;
use latchwork::workflow::{Close, Description, ExecutionId, Executions, Operation, Status};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::client::{Client, encoded};
use crate::output::{Cell, Output, Table, Text, Tone, shortened};
use crate::paging::PAGE;
use crate::time::Time;
use crate::workflow::fields::{EventFields, Outcome, WaitFields, attributes, status_cell};
use crate::workflow::{fields, timeline};

/// The longest text of a value in a table.
const LETTERS: usize = 400;

#[derive(Args)]
pub(crate) struct Show {
    /// The execution's id.
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    id: String,
    /// Shows this many of the last events.
    #[arg(long, default_value_t = 10, value_name = "N")]
    events: usize,
}

#[derive(Serialize, Deserialize)]
struct Shown {
    id: ExecutionId,
    workflow: String,
    status: Status,
    #[serde(flatten)]
    outcome: Outcome,
    input: Value,
    run: u32,
    resumes: u32,
    idempotency_key: Option<String>,
    started_at: Time,
    changed_at: Time,
    ended_at: Option<Time>,
    deadline_at: Option<Time>,
    removal_at: Option<Time>,
    waits: Vec<WaitFields>,
    cancel_reason: Option<String>,
    tags: BTreeSet<String>,
    attributes: BTreeMap<String, Value>,
    parent: Option<ExecutionId>,
    on_parent_end: Option<Close>,
    children: Vec<ExecutionId>,
    forked_from: Option<ExecutionId>,
    published: BTreeMap<String, Value>,
    /// The number of all events. A server does not count them if none is to be shown.
    event_count: Option<usize>,
    events: Vec<EventFields>,
}

/// The operations that were recorded last, oldest first, and the number of all.
async fn last(executions: &Executions, id: &ExecutionId, most: usize) -> Result<(Vec<Operation>, usize)> {
    let (mut last, mut count, mut after): (Vec<Operation>, usize, Option<Cursor>) = (Vec::new(), 0, None);
    loop {
        let page = executions.operations(id).limit(PAGE).after(after.take()).await?;
        count += page.items.len();
        last.extend(page.items);
        last.sort_by_key(|operation| operation.recorded);
        last.drain(..last.len().saturating_sub(most));
        after = page.next;
        if after.is_none() {
            return Ok((last, count));
        }
    }
}

pub(crate) async fn run(show: Show, executions: &Executions, now: Timestamp, output: &mut Output<'_>) -> Result<()> {
    let found = executions.describe(show.id).await?;
    let (events, count) = last(executions, &found.id, show.events).await?;
    let shown = Shown::new(found, &events, count);
    output.one(&shown, |text| shown.write(text, now))
}

/// The same from a server.
pub(crate) async fn ask(show: Show, client: &Client, now: Timestamp, output: &mut Output<'_>) -> Result<()> {
    let path = format!("/workflows/{}", encoded(&show.id));
    let mut shown: Shown = client.get(&path, &[("events", show.events.to_string())]).await?;
    shown.events = shown.events.into_iter().map(EventFields::completed).collect();
    output.one(&shown, |text| shown.write(text, now))
}

impl Shown {
    fn new(found: Description, events: &[Operation], event_count: usize) -> Shown {
        let status = found.status();
        let changed_at = Time(found.changed);
        Shown {
            status,
            outcome: Outcome::of(&found.state),
            input: found.input,
            run: found.run,
            resumes: found.resumes,
            idempotency_key: found.idempotency_key,
            started_at: Time(found.started),
            changed_at,
            ended_at: status.is_end().then_some(changed_at),
            deadline_at: found.deadline.map(Time),
            removal_at: found.removal_at.map(Time),
            waits: found.waits.iter().map(WaitFields::of).collect(),
            cancel_reason: found.cancel,
            tags: found.tags,
            attributes: attributes(&found.attributes),
            parent: found.parent,
            on_parent_end: found.close,
            children: found.children,
            forked_from: found.forked,
            published: found.published,
            event_count: Some(event_count),
            events: events.iter().map(EventFields::of).collect(),
            id: found.id,
            workflow: found.workflow,
        }
    }

    fn write(&self, text: &mut Text, now: Timestamp) {
        let mut table = Table::new(&[]);
        let mut row = |name: &str, cell: Cell| table.row([Cell::new(name, Tone::Dim), cell]);
        let json = |value: &Value| Cell::from(shortened(&value.to_string(), LETTERS));
        let time = |time: Time| Cell::from(format!("{} ({})", time.short(), time.relative_to(now)));
        row("id", self.id.to_string().into());
        row("workflow", self.workflow.clone().into());
        row("status", status_cell(self.status));
        self.outcome.reason.iter().for_each(|reason| row("reason", reason.clone().into()));
        self.outcome.failure.iter().for_each(|failure| row("failure", Cell::new(failure.message.clone(), Tone::Bad)));
        row("input", json(&self.input));
        self.outcome.output.iter().for_each(|output| row("output", json(output)));
        self.cancel_reason.iter().for_each(|reason| row("to be cancelled", reason.clone().into()));
        self.waits.iter().for_each(|wait| row("waits for", wait.words(now).into()));
        row("started", time(self.started_at));
        let times = [("ended", self.ended_at), ("deadline", self.deadline_at), ("to be removed", self.removal_at)];
        for (name, at) in times {
            at.into_iter().for_each(|at| row(name, time(at)));
        }
        if self.ended_at.is_none() {
            row("changed", time(self.changed_at));
        }
        row("run", self.run.to_string().into());
        if self.resumes > 0 {
            row("resumed", format!("{} times", self.resumes).into());
        }
        self.idempotency_key.iter().for_each(|key| row("idempotency key", key.clone().into()));
        self.tags.iter().for_each(|tag| row("tag", tag.clone().into()));
        for (name, value) in &self.attributes {
            row("attribute", format!("{name} = {value}").into());
        }
        self.parent.iter().for_each(|parent| row("parent", parent.to_string().into()));
        self.children.iter().for_each(|child| row("child", child.to_string().into()));
        self.forked_from.iter().for_each(|forked| row("forked from", forked.to_string().into()));
        for (name, value) in &self.published {
            row("published", shortened(&format!("{name} = {value}"), LETTERS).into());
        }
        text.table(table);
        if !self.events.is_empty() {
            text.line("");
            let count = self.event_count.unwrap_or(self.events.len());
            text.line(format!("The last {} of {count} events:", self.events.len()));
            timeline::write(text, &self.events, self.ended_at.map_or(now, |ended| ended.0));
            text.line("");
            text.table(self.event_table(now));
        }
    }

    fn event_table(&self, now: Timestamp) -> Table {
        let mut table = Table::new(&["PLACE", "EVENT", "STATE", "RECORDED", "ATTEMPTS", "DETAIL"]);
        for event in &self.events {
            let state = match &*event.state {
                state @ "failed" => Cell::new(state, Tone::Bad),
                "timed_out" => Cell::new("timed out", Tone::Attention),
                state @ "retrying" => Cell::new(state, Tone::Attention),
                state => state.into(),
            };
            let due = event.due_at.map(|due| match &*event.state {
                "retrying" => fields::due(due, now),
                _ => due.relative_to(now),
            });
            let detail = match (&event.failure, &event.shown, due) {
                (Some(failure), _, Some(due)) => format!("next {due}: {}", failure.message),
                (Some(failure), ..) => failure.message.clone(),
                (None, Some(value), _) => value.clone(),
                (None, None, due) => due.unwrap_or_default(),
            };
            let attempts = if event.attempts > 0 { event.attempts.to_string() } else { String::new() };
            table.row([
                event.place.clone().into(),
                event.words().into(),
                state,
                Cell::new(event.recorded_at.relative_to(now), Tone::Dim),
                attempts.into(),
                shortened(&detail, 60).into(),
            ]);
        }
        table
    }
}
