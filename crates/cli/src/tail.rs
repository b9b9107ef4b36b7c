//! `latch tail`: follows an execution, or the stream of a request of a flow, until it ends. It knows the events of the
//! streams, and leaves to the client that a connection breaks.

use std::collections::BTreeSet;

use anyhow::Result;
use clap::Args;
use latchwork::{Value, json};
use nix::sys::signal::Signal;

use crate::api::{self, Need};
use crate::client::{ApiCall, Client, StreamEvent, encoded};
use crate::output::{Ended, Exit, Format, Output, Problem, note, shortened};
use crate::shown::word;
use crate::signals::{Signals, exit_code};
use crate::target::Target;
use crate::time::{Time, absolute};
use crate::workflow::fields::EventFields;
use crate::workflow::result::{check_completed, is_end};

/// The longest text of a value.
const LETTERS: usize = 120;

/// The signals that end it.
const ENDS: [Signal; 2] = [Signal::SIGINT, Signal::SIGTERM];

#[derive(Args)]
pub(crate) struct Tail {
    /// The id of the execution, or of the request of a flow.
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    id: String,
    /// Continues after this position, which every event in JSON has. Events of that moment may be shown again.
    #[arg(long, value_name = "POSITION")]
    from: Option<u64>,
    /// Follows the operations of the execution, also if it is a request of a flow.
    #[arg(long)]
    operations: bool,
}

/// What is followed.
struct Follower<'a, 'w> {
    output: &'a mut Output<'w>,
    is_flow: bool,
    /// The events so far, for the format that prints them together.
    all: Vec<Value>,
    /// What was told of the last position: a stream that continues there tells it again.
    last: (u64, BTreeSet<(String, String)>),
    standing: Value,
    position: Option<u64>,
}

pub(crate) async fn run(tail: Tail, target: &Target, output: &mut Output<'_>) -> Result<()> {
    api::with(target, Need::Follow, async |client| {
        let path = format!("/workflows/{}", encoded(&tail.id));
        let found = client.call(ApiCall::get(&path).query("events", 0)).await?;
        let path = match flow(&tail, &found, client).await? {
            Some(flow) => format!("/flows/{}/requests/{}/events", encoded(&flow), encoded(&tail.id)),
            None => format!("{path}/events"),
        };
        let mut follower = Follower {
            output: &mut *output,
            is_flow: path.starts_with("/flows/"),
            all: Vec::new(),
            last: (0, BTreeSet::new()),
            standing: Value::Null,
            position: tail.from,
        };
        let mut events = client.events(&path, &[], tail.from);
        // Until here, a signal ends the process by itself.
        let mut signals = Signals::listen(&ENDS)?;
        let ended = loop {
            let event = tokio::select! {
                event = events.next() => event,
                signal = signals.next() => break Err(interrupted(signal, events.position())),
            };
            let event = match event {
                Ok(Some(event)) => event,
                Ok(None) => break Ok(()),
                // What was found before an error is printed, too.
                Err(error) => break Err(error),
            };
            if follower.take(event)? {
                break Ok(());
            }
            // In a directory that this command has opened, nothing happens.
            if !follower.standing.is_null() && client.is_alone() {
                break Ok(());
            }
        };
        follower.end()?;
        ended?;
        let standing = client.call(ApiCall::get(format!("/workflows/{}/result", encoded(&tail.id)))).await?;
        let status = word(&standing, "status");
        if client.is_alone() && !is_end(status) {
            let why =
                format!("{:?} is {status}, and no process runs it: start your program, and follow it then", tail.id);
            return Err(Problem::new(Exit::Busy, why).with("status", status).into());
        }
        check_completed(&standing)
    })
    .await
}

/// The flow whose stream is followed, if the execution is a request of one that is registered there.
async fn flow(tail: &Tail, found: &Value, client: &Client) -> Result<Option<String>> {
    let named = word(found, "workflow").strip_prefix("flow:").and_then(|name| name.split_once('/'));
    let Some((flow, _)) = named.filter(|_| !tail.operations) else { return Ok(None) };
    let path = format!("/flows/{}/requests/{}", encoded(flow), encoded(&tail.id));
    match client.call(ApiCall::get(path)).await {
        Ok(_) => Ok(Some(flow.into())),
        Err(error) if error.downcast_ref::<Problem>().is_some_and(|problem| problem.exit == Exit::NotFound) => {
            note(&format!("flow {flow:?} is not registered there: these are the operations of the request"));
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

/// A signal ends this process as it would have without its being listened to. The next process can continue.
fn interrupted(signal: Signal, position: Option<u64>) -> anyhow::Error {
    if let Some(position) = position {
        note(&format!("to continue: --from {position}"));
    }
    Ended(exit_code(signal)).into()
}

impl Follower<'_, '_> {
    /// Tells of an event. True if it is the last one.
    fn take(&mut self, event: StreamEvent) -> Result<bool> {
        if self.is_known(&event) {
            return Ok(false);
        }
        self.position = Some(event.position);
        let is_last = match event.name.as_str() {
            "status" if !self.is_flow => {
                self.standing = event.data.clone();
                is_end(word(&event.data, "status"))
            }
            "request_ended" => true,
            _ => false,
        };
        let line = json!({"position": event.position, "event": event.name, "data": event.data});
        match self.output.format() {
            Format::Json => self.all.push(line),
            Format::Jsonl => self.output.line(&line)?,
            Format::Table => {
                let said = if self.is_flow { of_flow(&event) } else { of_execution(&event) };
                self.output.one(&(), |text| text.line(said))?;
            }
        }
        self.output.flush()?;
        Ok(is_last)
    }

    /// True if the same was told before: at a position at which the stream continued, or as the present status.
    fn is_known(&mut self, event: &StreamEvent) -> bool {
        if event.name == "status" && event.data == self.standing {
            return true;
        }
        if self.last.0 != event.position {
            self.last = (event.position, BTreeSet::new());
        }
        let mark = |name: &str| word(&event.data, name).to_string();
        let is_operation = event.name == "event" && !self.is_flow;
        is_operation && !self.last.1.insert((mark("place"), mark("recorded_at")))
    }

    /// Prints what belongs together.
    fn end(&mut self) -> Result<()> {
        if self.output.format() == Format::Json {
            let all = json!({"events": self.all, "position": self.position});
            self.output.one(&all, |_| {})?;
        }
        self.output.flush()
    }
}

/// The line of an event of an execution: an operation, or the status.
fn of_execution(event: &StreamEvent) -> String {
    if event.name == "status" {
        let status = word(&event.data, "status").replace('_', " ");
        let about = ["/failure/message", "/reason", "/output"].map(|place| event.data.pointer(place));
        let about = about.into_iter().flatten().find(|found| !found.is_null()).map(plain);
        let about = about.map(|about| format!(": {}", shortened(&about, LETTERS))).unwrap_or_default();
        return format!("{} the execution is {status}{about}", " ".repeat(23));
    }
    let Ok(operation) = serde_json::from_value::<EventFields>(event.data.clone()) else {
        return event.data.to_string();
    };
    let operation = operation.completed();
    let about = match (&operation.failure, &operation.shown, operation.due_at) {
        (Some(failure), ..) => format!(": {}", failure.message),
        (None, Some(value), _) => format!(": {value}"),
        (None, None, Some(due)) => format!(" {}", due.short()),
        (None, None, None) => String::new(),
    };
    let state = operation.state.replace('_', " ");
    let attempts = if operation.attempts > 1 { format!(" (attempt {})", operation.attempts) } else { String::new() };
    let line = format!("{} {} {state}{attempts}{about}", operation.recorded_at.short(), operation.words());
    shortened(&line, LETTERS)
}

/// The line of an event of a flow: its time, its type and its fields.
fn of_flow(event: &StreamEvent) -> String {
    let time = absolute(word(&event.data, "at")).map(|time| Time(time).short()).unwrap_or_default();
    let fields = event.data.as_object().into_iter().flatten();
    let fields = fields.filter(|(name, value)| !["at", "number", "type"].contains(&name.as_str()) && !value.is_null());
    let fields: Vec<String> = fields.map(|(name, value)| format!("{name} {}", plain(value))).collect();
    shortened(&format!("{time} {} {}", event.name.replace('_', " "), fields.join(", ")), LETTERS)
}

fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), Into::into)
}
