//! The fields of executions in JSON, which are stable, and the words for people. docs/cli.md lists the fields.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use latchwork::store::Timestamp;
use latchwork::words;
use latchwork::workflow::{
    Attribute, ExecutionId, ExecutionState, Failure, Listed, Operation, OperationState, Status, Wait, WaitsFor,
};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::output::{Cell, Tone};
use crate::time::Time;

/// A status in a table.
pub(crate) fn status_cell(status: Status) -> Cell {
    let tone = match status {
        Status::Completed => Tone::Good,
        Status::Failed | Status::TimedOut => Tone::Bad,
        Status::Parked => Tone::Attention,
        Status::Cancelled | Status::Asleep => Tone::Dim,
        Status::Running | Status::Waiting => Tone::Plain,
    };
    Cell::new(status.to_string(), tone)
}

/// The outcome of an execution.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Outcome {
    /// Why it is parked, or was cancelled.
    pub(crate) reason: Option<String>,
    pub(crate) output: Option<Value>,
    pub(crate) failure: Option<FailureFields>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct FailureFields {
    pub(crate) message: String,
    code: String,
    retryable: bool,
    details: Value,
}

impl FailureFields {
    pub(crate) fn of(failure: &Failure) -> FailureFields {
        // The value of an error is shown as its JSON only.
        let mut written = serde_json::to_value(failure).unwrap_or_default();
        FailureFields {
            message: failure.message().into(),
            code: failure.code().into(),
            retryable: failure.is_retryable(),
            details: written.get_mut("details").map(Value::take).unwrap_or_default(),
        }
    }
}

impl Outcome {
    pub(crate) fn of(state: &ExecutionState) -> Outcome {
        let mut outcome = Outcome { reason: None, output: None, failure: None };
        match state {
            ExecutionState::Parked(reason) | ExecutionState::Cancelled(reason) => outcome.reason = Some(reason.clone()),
            ExecutionState::Completed(output) => outcome.output = Some(output.clone()),
            ExecutionState::Failed(failure) => outcome.failure = Some(FailureFields::of(failure)),
            _ => {}
        }
        outcome
    }
}

/// Something that an execution waits for.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct WaitFields {
    #[serde(rename = "for")]
    pub(crate) what: Cow<'static, str>,
    pub(crate) name: Option<String>,
    pub(crate) since: Time,
    pub(crate) until: Option<Time>,
}

/// The word for a wait, and the name of what is waited for.
pub(crate) fn waited(what: &WaitsFor) -> (&'static str, Option<&str>) {
    match what {
        WaitsFor::Timer => ("timer", None),
        WaitsFor::Retry(name) => ("retry", Some(name)),
        WaitsFor::Signal(name) => ("signal", Some(name)),
        WaitsFor::Update(name) => ("update", Some(name)),
        WaitsFor::Child(name) => ("child", Some(name)),
        WaitsFor::Completion(name) => ("completion", Some(name)),
        WaitsFor::Published(name) => ("published", Some(name)),
        WaitsFor::Lock(name) => ("lock", Some(name)),
        WaitsFor::Review(name) => ("review", Some(name)),
        WaitsFor::Admission(name) => ("admission", Some(name)),
        WaitsFor::Step(name) => ("step", Some(name)),
        _ => ("store", None),
    }
}

impl WaitFields {
    pub(crate) fn of(wait: &Wait) -> WaitFields {
        let (what, name) = waited(&wait.what);
        let (since, until) = (Time(wait.since), wait.until.map(Time));
        WaitFields { what: what.into(), name: name.map(Into::into), since, until }
    }

    /// For example `timer in 3m 2s` or `signal:approve, at most until in 3m 2s`.
    pub(crate) fn words(&self, now: Timestamp) -> String {
        let name = self.name.as_ref().map(|name| format!(":{name}")).unwrap_or_default();
        match (&*self.what, self.until) {
            ("timer" | "retry", Some(until)) => format!("{}{name} {}", self.what, due(until, now)),
            (what, Some(until)) if until.0 <= now => format!("{what}{name}, {}", due(until, now)),
            (what, Some(until)) => format!("{what}{name}, at most until {}", until.relative_to(now)),
            (what, None) => format!("{what}{name}"),
        }
    }
}

/// When something is due: `in 3m 2s`. Nothing happens while no process runs, so it can be late: `overdue by 3m 2s`.
pub(crate) fn due(time: Time, now: Timestamp) -> String {
    match now.0.checked_sub(time.0.0) {
        Some(late) => format!("overdue by {}", words::span(late)),
        None => time.relative_to(now),
    }
}

/// Attributes as plain JSON; times as RFC 3339.
pub(crate) fn attributes(attributes: &BTreeMap<String, Attribute>) -> BTreeMap<String, Value> {
    let plain = |attribute: &Attribute| match attribute {
        Attribute::Boolean(value) => (*value).into(),
        Attribute::Integer(value) => (*value).into(),
        Attribute::Real(value) => (*value).into(),
        Attribute::Text(value) => value.as_str().into(),
        Attribute::Time(time) => Time(*time).to_string().into(),
        _ => Value::Null,
    };
    attributes.iter().map(|(name, attribute)| (name.clone(), plain(attribute))).collect()
}

/// An execution in a list.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ListedFields {
    pub(crate) id: ExecutionId,
    pub(crate) workflow: String,
    pub(crate) status: Status,
    #[serde(flatten)]
    pub(crate) outcome: Outcome,
    pub(crate) started_at: Time,
    pub(crate) waits: Vec<WaitFields>,
    pub(crate) tags: BTreeSet<String>,
    attributes: BTreeMap<String, Value>,
    parent: Option<ExecutionId>,
    forked_from: Option<ExecutionId>,
    pub(crate) cancel_reason: Option<String>,
    /// The operations that it was in when its process ended, for tables.
    #[serde(skip)]
    pub(crate) at_work: Vec<String>,
}

impl ListedFields {
    pub(crate) fn of(listed: Listed) -> ListedFields {
        ListedFields {
            status: listed.status(),
            outcome: Outcome::of(&listed.state),
            started_at: Time(listed.started),
            waits: listed.waits.iter().map(WaitFields::of).collect(),
            attributes: attributes(&listed.attributes),
            id: listed.id,
            workflow: listed.workflow,
            tags: listed.tags,
            parent: listed.parent,
            forked_from: listed.forked,
            cancel_reason: listed.cancel,
            at_work: Vec::new(),
        }
    }
}

/// The order in which the parts of a record are shown.
const PARTS: [&str; 7] = ["branch", "begun", "token", "until", "value", "rev", "changed"];

/// The kinds of operations whose results are the library's own.
const OWN: [&str; 8] = ["race", "join", "lock", "unlock", "slot", "review", "uuid", "now"];

/// The result of an operation, for people.
fn shown(operation: &Operation) -> Option<String> {
    // A value of null comes from a server as none.
    let value = operation.labelled().filter(|value| !value.is_null())?;
    let is_own = !matches!(&operation.state, OperationState::Done(given) if *given == value);
    Some(worded(value, is_own))
}

/// The library's own results are shown with the names of their parts: `value 3, rev 1, changed true`. Of a release, the
/// token tells which grant it was of.
fn worded(value: Value, is_own: bool) -> String {
    match value {
        Value::Object(parts) if is_own && parts.contains_key("was_held") => {
            let token = parts.get("token").cloned().unwrap_or_default();
            match parts["was_held"] == true {
                true => format!("token {token}"),
                false => format!("token {token}, which was lost before"),
            }
        }
        Value::Object(parts) if is_own => {
            let mut parts: Vec<(String, Value)> = parts.into_iter().collect();
            parts.sort_by_key(|(name, _)| PARTS.iter().position(|known| known == name));
            let parts = parts.iter().map(|(name, part)| format!("{} {part}", name.replace('_', " ")));
            parts.collect::<Vec<_>>().join(", ")
        }
        Value::String(text) if is_own => text,
        value => value.to_string(),
    }
}

/// An event of an execution: an operation and its state.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct EventFields {
    pub(crate) place: String,
    pub(crate) kind: String,
    pub(crate) name: Option<String>,
    pub(crate) state: Cow<'static, str>,
    pub(crate) since: Time,
    pub(crate) recorded_at: Time,
    pub(crate) attempts: u32,
    pub(crate) value: Option<Value>,
    pub(crate) failure: Option<FailureFields>,
    /// When the next attempt is due, or until when it waits or waited.
    pub(crate) due_at: Option<Time>,
    /// The value for people: the library's own records show the names of their parts.
    #[serde(skip)]
    pub(crate) shown: Option<String>,
    attempt_failures: Vec<AttemptFields>,
    progress: Option<Value>,
}

#[derive(Debug, Serialize, Deserialize)]
struct AttemptFields {
    attempt: u32,
    at: Time,
    message: String,
}

impl EventFields {
    pub(crate) fn of(operation: &Operation) -> EventFields {
        let (mut failed, mut due) = (None, None);
        let state = match &operation.state {
            OperationState::Begun => "begun",
            OperationState::Retrying { failure, next } => {
                (failed, due) = (Some(failure), Some(*next));
                "retrying"
            }
            OperationState::Until(until) => {
                due = Some(*until);
                "until"
            }
            OperationState::Done(_) => "done",
            OperationState::Failed(_) if operation.is_timed_out() => "timed_out",
            OperationState::Failed(failure) => {
                failed = Some(failure);
                "failed"
            }
            OperationState::Saw { .. } => "saw",
            OperationState::Queued { until, .. } => {
                due = *until;
                "queued"
            }
            _ => "unknown",
        };
        let attempts = operation.failures.iter().map(|failed| AttemptFields {
            attempt: failed.attempt,
            at: Time(failed.at),
            message: failed.message.clone(),
        });
        EventFields {
            place: format!("{}{}", operation.branch, operation.place),
            kind: operation.kind.to_string().replace(' ', "_"),
            name: Some(operation.name.clone()).filter(|name| !name.is_empty()),
            state: state.into(),
            since: Time(operation.since),
            recorded_at: Time(operation.recorded),
            attempts: operation.attempts,
            shown: shown(operation),
            value: operation.labelled(),
            failure: failed.map(FailureFields::of),
            due_at: due.map(Time),
            attempt_failures: attempts.collect(),
            progress: operation.progress.clone(),
        }
    }

    /// The same event as a server has sent it, with what tables need.
    pub(crate) fn completed(mut self) -> EventFields {
        let is_own = OWN.contains(&self.kind.as_str());
        self.shown = self.value.clone().map(|value| worded(value, is_own));
        self
    }

    /// For example `step charge`.
    pub(crate) fn words(&self) -> String {
        let kind = self.kind.replace('_', " ");
        self.name.as_ref().map_or(kind.clone(), |name| format!("{kind} {name:?}"))
    }
}
