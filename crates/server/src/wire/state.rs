//! State on the wire: containers, slots and their changes, and what their errors become.

use latchwork::Value;
use latchwork::state::{Change, Changed, Event, Slots, StateError, States, TimeoutOutcome};
use latchwork::store::Rev;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::wire::problem::{Problem, ProblemCode};
use crate::wire::time::TimeWire;

/// What a container belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum StateScope {
    Request,
    Session,
    User,
    Org,
}

/// A container.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = State)]
pub(crate) struct StateWire {
    pub(crate) scope: StateScope,
    pub(crate) id: String,
    /// The number of its commits. It is also the `ETag`: `"r42"`.
    pub(crate) rev: u64,
    /// Any JSON.
    #[schema(value_type = Value)]
    pub(crate) state: Value,
}

/// Which slot of a name is meant. Without a parameter, the slot of the whole store.
#[derive(Debug, Clone, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct SlotQuery {
    /// The executions of this workflow share it.
    pub(crate) workflow: Option<String>,
    /// It belongs to this execution.
    pub(crate) execution: Option<String>,
    /// This execution shares it with all its descendants.
    pub(crate) tree: Option<String>,
}

impl SlotQuery {
    pub(crate) fn slots(&self, states: &States) -> Result<Slots, Problem> {
        match (&self.workflow, &self.execution, &self.tree) {
            (None, None, None) => Ok(states.global()),
            (Some(workflow), None, None) => Ok(states.workflow(workflow)),
            (None, Some(execution), None) => Ok(states.execution(execution)),
            (None, None, Some(root)) => Ok(states.tree(root)),
            _ => Err(Problem::new(ProblemCode::InvalidQuery, "workflow, execution and tree exclude each other")),
        }
    }
}

/// A slot.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Slot)]
pub(crate) struct SlotWire {
    pub(crate) name: String,
    #[schema(required)]
    pub(crate) workflow: Option<String>,
    #[schema(required)]
    pub(crate) execution: Option<String>,
    #[schema(required)]
    pub(crate) tree: Option<String>,
    /// The number of its commits. It is also the `ETag`: `"r42"`.
    pub(crate) rev: u64,
    /// Any JSON.
    #[schema(value_type = Value)]
    pub(crate) value: Value,
}

/// The lock that guards a change.
#[derive(Debug, Clone, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct FenceQuery {
    /// The change lands only while this lock is held under the fencing token `token`.
    pub(crate) lock: Option<String>,
    /// The fencing token of the lock `lock`.
    pub(crate) token: Option<u64>,
}

/// Which slot is changed, and the lock that guards the change.
#[derive(Debug, Clone, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct SlotChangeQuery {
    /// The executions of this workflow share it.
    workflow: Option<String>,
    /// It belongs to this execution.
    execution: Option<String>,
    /// This execution shares it with all its descendants.
    tree: Option<String>,
    /// The change lands only while this lock is held under the fencing token `token`.
    lock: Option<String>,
    /// The fencing token of the lock `lock`.
    token: Option<u64>,
}

impl SlotChangeQuery {
    pub(crate) fn parts(self) -> (SlotQuery, FenceQuery) {
        let SlotChangeQuery { workflow, execution, tree, lock, token } = self;
        (SlotQuery { workflow, execution, tree }, FenceQuery { lock, token })
    }
}

/// Adds to a number.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct IncrementState {
    /// The place of the number, such as `cart.items`; without it, the whole state. A missing number counts as zero.
    #[serde(default)]
    pub(crate) path: String,
    /// By default 1.
    #[schema(value_type = Option<f64>)]
    pub(crate) by: Option<serde_json::Number>,
}

/// Adds to the end of a list.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct PushState {
    /// The place of the list; without it, the whole state. A missing list is created.
    #[serde(default)]
    pub(crate) path: String,
    #[schema(value_type = Value)]
    pub(crate) value: Value,
}

/// Sets an entry of a record.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SetRecord {
    /// The place of the record; without it, the whole state. A missing record is created.
    #[serde(default)]
    pub(crate) path: String,
    pub(crate) entry: String,
    #[schema(value_type = Value)]
    pub(crate) value: Value,
}

/// Removes an entry of a record.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct DeleteRecord {
    /// The place of the record; without it, the whole state.
    #[serde(default)]
    pub(crate) path: String,
    pub(crate) entry: String,
}

/// What a change has done.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
#[schema(as = StateChanged)]
pub(crate) struct ChangedWire {
    /// The rev from this change on. Changes of several callers can share a commit, and then have the same rev.
    pub(crate) rev: u64,
    /// False if the state was like this before.
    pub(crate) changed: bool,
    /// The result: of an increment the sum, of a push the length, of a patch the state, of an entry its value.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Value>)]
    pub(crate) value: Option<Value>,
}

impl ChangedWire {
    pub(crate) fn with_value(changed: Changed) -> ChangedWire {
        ChangedWire { rev: changed.rev.0, changed: changed.changed, value: Some(changed.value) }
    }

    pub(crate) fn bare(changed: &Changed) -> ChangedWire {
        ChangedWire { rev: changed.rev.0, changed: changed.changed, value: None }
    }
}

/// An event of a watched container or slot: its state, and how it became so.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = StateChange)]
pub(crate) struct ChangeWire {
    rev: u64,
    /// When it was committed; null for the state at the begin of the stream.
    #[schema(required)]
    time: Option<TimeWire>,
    /// The operations, in order.
    #[schema(value_type = Vec<Object>)]
    events: Vec<Event>,
    /// Null if it was removed.
    #[schema(value_type = Value)]
    state: Option<Value>,
}

impl ChangeWire {
    pub(crate) fn now(state: Option<Value>, rev: Rev) -> ChangeWire {
        ChangeWire { rev: rev.0, time: None, events: Vec::new(), state }
    }
}

impl From<Change> for ChangeWire {
    fn from(change: Change) -> ChangeWire {
        let Change { rev, time, events, state, .. } = change;
        ChangeWire { rev: rev.0, time: Some(time.into()), events, state }
    }
}

/// A rev for a client; null for something that was never written.
fn shown(rev: Rev) -> Option<u64> {
    (rev.0 > 0).then_some(rev.0)
}

/// There is no such state: it was never written, or was removed.
pub(crate) fn missing(name: &str, rev: Rev) -> Problem {
    let problem = Problem::new(ProblemCode::NotFound, format!("there is no {name}"));
    problem.with("current_rev", shown(rev))
}

/// No tag of `If-Match` is the present rev.
pub(crate) fn no_match(name: &str, actual: Rev) -> Problem {
    let detail = match shown(actual) {
        Some(rev) => format!("{name} is at rev {rev}, which If-Match does not name"),
        None => format!("there is no {name}"),
    };
    Problem::new(ProblemCode::RevisionConflict, detail).with("current_rev", shown(actual))
}

impl From<StateError> for Problem {
    fn from(error: StateError) -> Problem {
        let detail = error.to_string();
        let problem = |code| Problem::new(code, detail.clone());
        match &error {
            StateError::Store(store) => store.clone().into(),
            StateError::RevisionConflict { expected, actual, .. } => problem(ProblemCode::RevisionConflict)
                .with("expected_rev", expected.0)
                .with("current_rev", shown(*actual)),
            StateError::AlreadyExists { rev, .. } => problem(ProblemCode::AlreadyExists).with("current_rev", rev.0),
            StateError::ConcurrentModification { .. } => problem(ProblemCode::Contended),
            StateError::Fenced { .. } => problem(ProblemCode::Fenced),
            StateError::TooLarge { limit, .. } => problem(ProblemCode::TooLarge).with("limit_bytes", limit),
            StateError::OnceReused { .. } => problem(ProblemCode::KeyReused),
            StateError::ScopeMutationTimeout { outcome, .. } => {
                let may_land = *outcome == TimeoutOutcome::MayCommit;
                problem(ProblemCode::Unavailable).with("may_land", may_land)
            }
            // Not a fault of the client.
            StateError::Panicked { .. }
            | StateError::NoRuntime
            | StateError::Unguardable { .. }
            | StateError::Unwatchable { .. }
            | StateError::ReentrantMutation { .. }
            | StateError::UnknownVersion { .. }
            | StateError::Schema { .. } => Problem::internal(&detail),
            _ => Problem::of_kind(error.kind(), &error),
        }
    }
}
