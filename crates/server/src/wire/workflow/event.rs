//! The events of an execution on the wire: its operations, as `latch workflow show` prints them.

use latchwork::Value;
use latchwork::workflow::{Operation, OperationState};
use serde::Serialize;
use utoipa::ToSchema;

use crate::wire::time::TimeWire;
use crate::wire::workflow::FailureWire;

/// An event of an execution: an operation and its state.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ExecutionEvent)]
pub(crate) struct EventWire {
    /// Where the operation stands: its branch and its number.
    pub(crate) place: String,
    kind: String,
    #[schema(required)]
    name: Option<String>,
    /// `begun`, `retrying`, `until`, `done`, `failed`, `timed_out`, `saw` or `queued`.
    state: &'static str,
    since: TimeWire,
    pub(crate) recorded_at: TimeWire,
    attempts: u32,
    #[schema(required, value_type = Option<Value>)]
    value: Option<Value>,
    #[schema(required)]
    failure: Option<FailureWire>,
    /// When the next attempt is due, or until when it waits or waited.
    #[schema(required)]
    due_at: Option<TimeWire>,
    /// The last attempts that failed.
    attempt_failures: Vec<AttemptFailureWire>,
    /// The progress that the last attempt has reported.
    #[schema(required, value_type = Option<Value>)]
    progress: Option<Value>,
}

/// An attempt that failed.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = AttemptFailure)]
struct AttemptFailureWire {
    attempt: u32,
    at: TimeWire,
    message: String,
}

/// The place of an operation in its execution.
pub(crate) fn place(operation: &Operation) -> String {
    format!("{}{}", operation.branch, operation.place)
}

impl From<&Operation> for EventWire {
    fn from(operation: &Operation) -> EventWire {
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
        let attempts = operation.failures.iter().map(|failed| AttemptFailureWire {
            attempt: failed.attempt,
            at: failed.at.into(),
            message: failed.message.clone(),
        });
        EventWire {
            place: place(operation),
            kind: operation.kind.to_string().replace(' ', "_"),
            name: Some(operation.name.clone()).filter(|name| !name.is_empty()),
            state,
            since: operation.since.into(),
            recorded_at: operation.recorded.into(),
            attempts: operation.attempts,
            value: operation.labelled(),
            failure: failed.map(FailureWire::of),
            due_at: due.map(TimeWire),
            attempt_failures: attempts.collect(),
            progress: operation.progress.clone(),
        }
    }
}
