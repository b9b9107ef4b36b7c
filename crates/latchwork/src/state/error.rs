//! The errors of state, and what each means to a caller.

use std::borrow::Cow;
use std::convert::Infallible;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::json::{JsonError, PathError};
use crate::record::unreadable;
use crate::store::{ErrorKind, Rev, StoreError};

/// The result of an operation on state.
pub type Result<T, E = StateError> = std::result::Result<T, E>;

/// Why an operation on state failed.
#[derive(Debug, Clone, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
#[allow(missing_docs)] // The fields are what the messages say.
pub enum StateError {
    /// An increment of a value that is not a number.
    #[error("{place} of {key} is {found}; only a number can be incremented")]
    NotANumber { key: String, place: String, found: Cow<'static, str> },
    /// An operation on a list found a value that is not a list.
    #[error("{place} of {key} is {found}; only a list can be added to or taken from")]
    NotAList { key: String, place: String, found: Cow<'static, str> },
    /// A path, a record or a patch leads through a value that is not an object.
    #[error("{place} of {key} is {found}; it must be an object")]
    NotAnObject { key: String, place: String, found: Cow<'static, str> },
    /// The number would be too large to store.
    #[error("{place} of {key} would be out of range")]
    OutOfRange { key: String, place: String },
    /// Another process changed the container during each attempt.
    #[error(
        "{key} was changed by another process during each of {attempts} attempts: expected at {}, found at {}",
        shown(*expected), shown(*actual)
    )]
    ConcurrentModification { key: String, attempts: u32, expected: Option<Rev>, actual: Option<Rev> },
    /// The container was changed since the rev that the caller knows. Nothing was written.
    #[error("{key} is at rev {actual}, not at {expected}; read it again and retry")]
    RevisionConflict { key: String, expected: Rev, actual: Rev },
    /// The change required that there is no state. Nothing was written.
    #[error("{key} has a state already, at rev {rev}")]
    AlreadyExists { key: String, rev: Rev },
    /// The mutation did not end within its budget.
    #[error("a mutation of {key} waited {waited:?} and ran {ran:?}, longer than its budget: {outcome}")]
    ScopeMutationTimeout { key: String, waited: Duration, ran: Duration, outcome: TimeoutOutcome },
    /// The mutation was made from within a mutation of the same container, and would wait for itself.
    #[error("{key} is already being mutated by this task; make it one mutation")]
    ReentrantMutation { key: String },
    /// The state does not fit the container's schema. Nothing was written.
    #[error("{key} does not fit its schema at {path}: {message}")]
    SchemaViolation { key: String, path: String, message: String },
    /// The schema is invalid.
    #[error("the schema of {key} cannot be used: {message}")]
    Schema { key: String, message: String },
    /// The mutator panicked. Nothing was written.
    #[error("the mutator of {key} panicked: {message}")]
    Panicked { key: String, message: String },
    /// The name is invalid.
    #[error("{name:?} cannot be the name of {what}: {reason}")]
    Name { what: Cow<'static, str>, name: String, reason: Cow<'static, str> },
    /// The value contains something that JSON cannot hold, or is nested too deeply.
    #[error("a value for {key}: {cause}")]
    Value { key: String, cause: JsonError },
    /// The path cannot be read.
    #[error("{path:?} is not a path: {cause}")]
    Path { path: String, cause: PathError },
    /// The state does not fit the type it is read as. If this was a change, nothing was written.
    #[error("{key} does not fit its type: {message}")]
    Mismatch { key: String, message: String },
    /// The lock that guards the change is no longer held. Nothing was written.
    #[error("{key} was not changed: {reason}")]
    Fenced { key: String, reason: String },
    /// A container that exists only in memory cannot be guarded.
    #[error("{key} exists only in memory: no lock can guard it")]
    Unguardable { key: String },
    /// The value is too large to store.
    #[error("{key} takes {length} bytes; the limit is {limit}")]
    TooLarge { key: String, length: usize, limit: usize },
    /// The runtime ended before the mutation was answered.
    #[error("the mutation of {key} was not answered; it is unknown whether it was applied")]
    Abandoned { key: String },
    /// A stored record cannot be read.
    #[error("{place} is damaged: it cannot be read")]
    Corrupt { place: String },
    /// A stored record has a version that this program does not know.
    #[error("{place} has version {found}; this program reads versions 1 to {supported}: use a newer program")]
    UnknownVersion { place: String, found: u8, supported: u8 },
    /// The idempotency key was used before for another operation.
    #[error("idempotency key {once:?} of {key} was used before, for another call of {operation}")]
    OnceReused { key: String, once: String, operation: String },
    /// A container cannot be watched where the result would differ on a replay.
    #[error("{key} cannot be watched from within a workflow; watch it from outside, through the engine")]
    Unwatchable { key: String },
    /// The mutation was made outside of a tokio runtime.
    #[error("mutations run on a tokio runtime; call this from within one")]
    NoRuntime,
    /// The store below. Read again, it is [`StoreError::Told`].
    #[error(transparent)]
    Store(#[from] StoreError),
}

fn shown(rev: Option<Rev>) -> String {
    rev.map_or("no rev".into(), |rev| format!("rev {rev}"))
}

/// What happens to a mutation that did not end within its budget.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TimeoutOutcome {
    /// It had not started, and never will.
    Withdrawn,
    /// It had started, and may still be applied. Give it an idempotency key to be able to ask again.
    MayCommit,
}

impl std::fmt::Display for TimeoutOutcome {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            TimeoutOutcome::Withdrawn => "it was withdrawn",
            TimeoutOutcome::MayCommit => "it may still be applied",
        })
    }
}

/// Why a mutation did not happen: the container failed, or the mutator refused.
#[derive(Debug, Clone, thiserror::Error)]
pub enum MutationError<E> {
    /// The mutation could not be run or written.
    #[error(transparent)]
    State(#[from] StateError),
    /// The mutator refused.
    #[error("{0}")]
    Refused(E),
}

impl MutationError<Infallible> {
    /// The error of a mutation that cannot refuse.
    pub(crate) fn unrefused(self) -> StateError {
        match self {
            MutationError::State(error) => error,
            MutationError::Refused(never) => match never {},
        }
    }
}

unreadable!(StateError);

impl StateError {
    /// The class of the failure.
    ///
    /// ```
    /// # use latchwork::state::StateError;
    /// # use latchwork::store::ErrorKind;
    /// assert_eq!(StateError::NoRuntime.kind(), ErrorKind::Invalid);
    /// ```
    pub fn kind(&self) -> ErrorKind {
        use StateError::*;
        match self {
            ConcurrentModification { .. } | Fenced { .. } => ErrorKind::Conflict,
            RevisionConflict { .. } | AlreadyExists { .. } => ErrorKind::Conflict,
            ScopeMutationTimeout { .. } | Abandoned { .. } => ErrorKind::Unavailable,
            Corrupt { .. } => ErrorKind::Corrupt,
            Store(error) => error.kind(),
            NotANumber { .. }
            | NotAList { .. }
            | NotAnObject { .. }
            | OutOfRange { .. }
            | ReentrantMutation { .. }
            | SchemaViolation { .. }
            | Schema { .. }
            | Panicked { .. }
            | Name { .. }
            | Value { .. }
            | Path { .. }
            | Mismatch { .. }
            | TooLarge { .. }
            | OnceReused { .. }
            | Unwatchable { .. }
            | Unguardable { .. }
            | UnknownVersion { .. }
            | NoRuntime => ErrorKind::Invalid,
        }
    }
}
