//! Executions on the wire: the shapes of what is read. They are the JSON that `latch workflow` prints. What clients
//! send is in `ask.rs` and `list.rs`, the events of a history in `event.rs`, the answer to why one waits in `why.rs`,
//! and the mapping of errors in `failed.rs`.

pub(crate) mod ask;
pub(crate) mod event;
mod failed;
pub(crate) mod list;
pub(crate) mod why;

use std::collections::{BTreeMap, BTreeSet};

use latchwork::workflow::{
    Attribute, Close, Description, ExecutionState, Failure, Handle, LimitUse, Listed, Status, Wait, WaitsFor,
};
use latchwork::{Map, Value};
use serde::Serialize;
use utoipa::ToSchema;

use crate::wire::time::TimeWire;
use crate::wire::workflow::event::EventWire;

/// How an execution ended, or why it is parked. Fields that do not belong to its status are null.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Outcome)]
pub(crate) struct OutcomeWire {
    /// Why it is parked, or was cancelled.
    #[schema(required)]
    reason: Option<String>,
    /// What it returned, if it has completed.
    #[schema(required, value_type = Option<Value>)]
    output: Option<Value>,
    #[schema(required)]
    failure: Option<FailureWire>,
}

/// A failure of a workflow, of a step, or of an update.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Failure)]
pub(crate) struct FailureWire {
    message: String,
    /// The code that the program has set, or the name of the error's type.
    code: String,
    retryable: bool,
    /// The value of the error.
    #[schema(value_type = Value)]
    details: Value,
}

impl FailureWire {
    pub(crate) fn of(failure: &Failure) -> FailureWire {
        FailureWire {
            message: failure.message().into(),
            code: failure.code().into(),
            retryable: failure.is_retryable(),
            details: failure.details().unwrap_or_default(),
        }
    }
}

impl OutcomeWire {
    pub(crate) fn of(state: &ExecutionState) -> OutcomeWire {
        let mut outcome = OutcomeWire { reason: None, output: None, failure: None };
        match state {
            ExecutionState::Parked(reason) | ExecutionState::Cancelled(reason) => outcome.reason = Some(reason.clone()),
            ExecutionState::Completed(output) => outcome.output = Some(output.clone()),
            ExecutionState::Failed(failure) => outcome.failure = Some(FailureWire::of(failure)),
            _ => {}
        }
        outcome
    }
}

/// Something that an execution waits for.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Wait)]
pub(crate) struct WaitWire {
    /// `timer`, `retry`, `signal`, `update`, `child`, `completion`, `published`, `lock`, `review`, `admission`, `step`
    /// or `store`.
    #[serde(rename = "for")]
    what: &'static str,
    /// The name of what it waits for.
    #[schema(required)]
    name: Option<String>,
    since: TimeWire,
    /// Until when at most.
    #[schema(required)]
    until: Option<TimeWire>,
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

impl From<&Wait> for WaitWire {
    fn from(wait: &Wait) -> WaitWire {
        let (what, name) = waited(&wait.what);
        WaitWire { what, name: name.map(Into::into), since: wait.since.into(), until: wait.until.map(TimeWire) }
    }
}

/// Attributes as plain JSON; times as RFC 3339.
fn attributes(attributes: &BTreeMap<String, Attribute>) -> Map<String, Value> {
    let plain = |attribute: &Attribute| match attribute {
        Attribute::Boolean(value) => (*value).into(),
        Attribute::Integer(value) => (*value).into(),
        Attribute::Real(value) => (*value).into(),
        Attribute::Text(value) => value.as_str().into(),
        Attribute::Time(time) => TimeWire(*time).to_string().into(),
        _ => Value::Null,
    };
    attributes.iter().map(|(name, attribute)| (name.clone(), plain(attribute))).collect()
}

/// An execution in a list.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ListedExecution)]
pub(crate) struct ListedWire {
    id: String,
    workflow: String,
    /// `running`, `asleep`, `waiting`, `parked`, `completed`, `failed`, `timed_out` or `cancelled`.
    status: &'static str,
    #[serde(flatten)]
    outcome: OutcomeWire,
    started_at: TimeWire,
    waits: Vec<WaitWire>,
    tags: BTreeSet<String>,
    #[schema(value_type = Object)]
    attributes: Map<String, Value>,
    /// The execution that started it.
    #[schema(required)]
    parent: Option<String>,
    #[schema(required)]
    forked_from: Option<String>,
    /// Why its cancellation was requested.
    #[schema(required)]
    cancel_reason: Option<String>,
}

impl From<Listed> for ListedWire {
    fn from(listed: Listed) -> ListedWire {
        ListedWire {
            status: listed.status().name(),
            outcome: OutcomeWire::of(&listed.state),
            started_at: listed.started.into(),
            waits: listed.waits.iter().map(WaitWire::from).collect(),
            attributes: attributes(&listed.attributes),
            id: listed.id.to_string(),
            workflow: listed.workflow,
            tags: listed.tags,
            parent: listed.parent.map(|id| id.to_string()),
            forked_from: listed.forked.map(|id| id.to_string()),
            cancel_reason: listed.cancel,
        }
    }
}

/// An execution with all its details.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Execution)]
pub(crate) struct ExecutionWire {
    id: String,
    workflow: String,
    /// `running`, `asleep`, `waiting`, `parked`, `completed`, `failed`, `timed_out` or `cancelled`.
    status: &'static str,
    #[serde(flatten)]
    outcome: OutcomeWire,
    #[schema(value_type = Value)]
    input: Value,
    /// How often it was continued as new.
    run: u32,
    /// How often it was resumed.
    resumes: u32,
    #[schema(required)]
    idempotency_key: Option<String>,
    started_at: TimeWire,
    changed_at: TimeWire,
    #[schema(required)]
    ended_at: Option<TimeWire>,
    #[schema(required)]
    deadline_at: Option<TimeWire>,
    /// When it is removed from the store.
    #[schema(required)]
    removal_at: Option<TimeWire>,
    waits: Vec<WaitWire>,
    /// Why its cancellation was requested.
    #[schema(required)]
    cancel_reason: Option<String>,
    tags: BTreeSet<String>,
    #[schema(value_type = Object)]
    attributes: Map<String, Value>,
    #[schema(required)]
    parent: Option<String>,
    /// What happens to it when its parent ends first.
    #[schema(required, value_type = Option<String>)]
    on_parent_end: Option<Close>,
    children: Vec<String>,
    #[schema(required)]
    forked_from: Option<String>,
    /// What it shows of itself, by name.
    #[schema(value_type = Object)]
    published: Map<String, Value>,
    /// The number of all events; null if no events were asked for.
    #[schema(required)]
    event_count: Option<usize>,
    /// The events that were recorded last, the oldest first.
    events: Vec<EventWire>,
}

impl ExecutionWire {
    pub(crate) fn new(found: Description, event_count: Option<usize>, events: Vec<EventWire>) -> ExecutionWire {
        let status = found.status();
        ExecutionWire {
            status: status.name(),
            outcome: OutcomeWire::of(&found.state),
            input: found.input,
            run: found.run,
            resumes: found.resumes,
            idempotency_key: found.idempotency_key,
            started_at: found.started.into(),
            changed_at: found.changed.into(),
            ended_at: status.is_end().then_some(found.changed.into()),
            deadline_at: found.deadline.map(TimeWire),
            removal_at: found.removal_at.map(TimeWire),
            waits: found.waits.iter().map(WaitWire::from).collect(),
            cancel_reason: found.cancel,
            tags: found.tags,
            attributes: attributes(&found.attributes),
            parent: found.parent.map(|id| id.to_string()),
            on_parent_end: found.close,
            children: found.children.iter().map(ToString::to_string).collect(),
            forked_from: found.forked.map(|id| id.to_string()),
            published: found.published.into_iter().collect(),
            event_count,
            events,
            id: found.id.to_string(),
            workflow: found.workflow,
        }
    }
}

/// Where an execution stands: the answer to a wait for its result, and the state in a stream.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
#[schema(as = ExecutionStanding)]
pub(crate) struct StandingWire {
    id: String,
    workflow: String,
    /// `running`, `asleep`, `waiting`, `parked`, `completed`, `failed`, `timed_out` or `cancelled`.
    status: &'static str,
    /// Its outcome as in the execution itself: `reason`, `output` and `failure`.
    #[serde(flatten)]
    #[schema(value_type = OutcomeWire)]
    outcome: Value,
}

impl StandingWire {
    /// An execution, or an input of a batch, that has completed.
    pub(crate) fn completed(id: &str, workflow: &str, output: Value) -> StandingWire {
        StandingWire::new(id, workflow, Status::Completed, &ExecutionState::Completed(output))
    }

    fn new(id: &str, workflow: &str, status: Status, state: &ExecutionState) -> StandingWire {
        let outcome = serde_json::to_value(OutcomeWire::of(state)).unwrap_or_default();
        StandingWire { id: id.into(), workflow: workflow.into(), status: status.name(), outcome }
    }
}

impl From<&Description> for StandingWire {
    fn from(found: &Description) -> StandingWire {
        StandingWire::new(&found.id, &found.workflow, found.status(), &found.state)
    }
}

/// An execution that was started or joined.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = StartedExecution)]
pub(crate) struct StartedWire {
    pub(crate) id: String,
    /// The number of the input in a batch, if the workflow gathers batches.
    #[schema(required)]
    item: Option<u32>,
    /// How it has ended; of a batch, with the output of this input. Null if the call does not wait, or if the execution
    /// has not ended, or is parked.
    #[schema(required)]
    result: Option<StandingWire>,
}

impl StartedWire {
    pub(crate) fn new(handle: &Handle<Value>, result: Option<StandingWire>) -> StartedWire {
        StartedWire { id: handle.id().to_string(), item: handle.item(), result }
    }
}

/// An update.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Update)]
pub(crate) struct UpdateWire {
    /// The id under which the same update can be sent again for its answer.
    pub(crate) id: String,
    /// False if the answer is not known yet.
    pub(crate) answered: bool,
    #[schema(required, value_type = Option<Value>)]
    pub(crate) answer: Option<Value>,
}

/// A published value.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = PublishedValue)]
pub(crate) struct PublishedWire {
    pub(crate) name: String,
    #[schema(value_type = Value)]
    pub(crate) value: Value,
}

/// How much of a limit is used.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = LimitUse)]
pub(crate) struct LimitWire {
    workflow: String,
    /// The key of the limit; null for the limit of the workflow as a whole.
    #[schema(required)]
    key: Option<String>,
    /// How many executions hold a permit.
    used: u64,
    /// How many executions wait for one.
    waiting: u64,
}

impl LimitWire {
    pub(crate) fn new(workflow: String, key: Option<String>, found: LimitUse) -> LimitWire {
        LimitWire { workflow, key, used: found.used, waiting: found.waiting }
    }
}
