//! What can go wrong with state, and what each failure means to a caller.

use std::borrow::Cow;
use std::convert::Infallible;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::json::{JsonError, PathError};
use crate::record::unreadable;
use crate::store::{ErrorKind, Rev, StoreError};

/// The result of an operation on state.
pub type Result<T, E = StateError> = std::result::Result<T, E>;

/// Why an operation on state did not happen.
#[derive(Debug, Clone, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
#[allow(missing_docs)] // The fields are what the messages say.
pub enum StateError {
    /// An increment of something that is no number.
    #[error("{place} of {key} is {found}; only a number can be incremented")]
    NotANumber { key: String, place: String, found: Cow<'static, str> },
    /// A push to something that is no list.
    #[error("{place} of {key} is {found}; only a list can be added to or taken from")]
    NotAList { key: String, place: String, found: Cow<'static, str> },
    /// A path, a record or a patch through something that is no object.
    #[error("{place} of {key} is {found}; it must be an object")]
    NotAnObject { key: String, place: String, found: Cow<'static, str> },
    /// A number that would be too large to hold.
    #[error("{place} of {key} would be out of range")]
    OutOfRange { key: String, place: String },
    /// Another process changed the container each time.
    #[error(
        "{key} was changed from elsewhere each of the {attempts} times this was tried: expected at {}, it is at {}",
        shown(*expected), shown(*actual)
    )]
    ConcurrentModification { key: String, attempts: u32, expected: Option<Rev>, actual: Option<Rev> },
    /// The container was changed since the rev that the caller knows. Nothing was written.
    #[error("{key} is at rev {actual}, not at {expected}; read it again and decide anew")]
    RevisionConflict { key: String, expected: Rev, actual: Rev },
    /// A change that was to be made only if there is no state. Nothing was written.
    #[error("{key} has a state already, at rev {rev}")]
    AlreadyExists { key: String, rev: Rev },
    /// The budget of a mutation is spent.
    #[error("a mutation of {key} waited {waited:?} and ran {ran:?}, which is more than its budget: {outcome}")]
    ScopeMutationTimeout { key: String, waited: Duration, ran: Duration, outcome: TimeoutOutcome },
    /// A mutation from within a mutation of the same container, which would wait for itself.
    #[error("{key} is being mutated by this very task; make it one mutation")]
    ReentrantMutation { key: String },
    /// A state that does not fit the container's schema. Nothing was written.
    #[error("{key} does not fit its schema at {path}: {message}")]
    SchemaViolation { key: String, path: String, message: String },
    /// A schema that is none.
    #[error("the schema of {key} cannot be used: {message}")]
    Schema { key: String, message: String },
    /// A mutator that panicked. Nothing was written.
    #[error("the mutator of {key} panicked: {message}")]
    Panicked { key: String, message: String },
    /// A name that cannot be.
    #[error("{name:?} cannot name {what}: {reason}")]
    Name { what: Cow<'static, str>, name: String, reason: Cow<'static, str> },
    /// A value with something in it that JSON cannot hold, or nested too deeply.
    #[error("a value for {key}: {cause}")]
    Value { key: String, cause: JsonError },
    /// A path that cannot be read.
    #[error("{path:?} is no path: {cause}")]
    Path { path: String, cause: PathError },
    /// A state that does not fit the type it is read as. Of a change, nothing was written.
    #[error("{key} does not fit its type: {message}")]
    Mismatch { key: String, message: String },
    /// A change under a lock that its owner no longer holds. Nothing was written.
    #[error("{key} was not changed: {reason}")]
    Fenced { key: String, reason: String },
    /// A guard for a container that is in memory alone.
    #[error("{key} is in memory alone: no lock can guard it")]
    Unguardable { key: String },
    /// A value that is too large to store.
    #[error("{key} takes {length} bytes; the limit is {limit}")]
    TooLarge { key: String, length: usize, limit: usize },
    /// The queue ended without an answer, because the runtime did.
    #[error("the mutation of {key} was given up; whether it was applied is not known")]
    Abandoned { key: String },
    /// A stored record that cannot be read.
    #[error("{place} is damaged: it cannot be read")]
    Corrupt { place: String },
    /// A stored record of a version that this program does not know.
    #[error("{place} has version {found}; this program reads versions 1 to {supported}: use a newer program")]
    UnknownVersion { place: String, found: u8, supported: u8 },
    /// An idempotency key that was used before for another operation.
    #[error("idempotency key {once:?} of {key} was used before, for another call of {operation}")]
    OnceReused { key: String, once: String, operation: String },
    /// A watch from where what it tells would not be the same on a replay.
    #[error("{key} cannot be watched from within a workflow; watch it from outside, through the engine")]
    Unwatchable { key: String },
    /// A mutation outside of a runtime that could run its queue.
    #[error("mutations run on a tokio runtime; call this from within one")]
    NoRuntime,
    /// The store below. Read again, it is [`StoreError::Told`].
    #[error(transparent)]
    Store(#[from] StoreError),
}

fn shown(rev: Option<Rev>) -> String {
    rev.map_or("no rev".into(), |rev| format!("rev {rev}"))
}

/// What becomes of a mutation whose caller was told that its budget is spent.
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

/// Why a mutation did not happen: for a reason of the container's or of the mutator's own.
#[derive(Debug, Clone, thiserror::Error)]
pub enum MutationError<E> {
    /// It could not be run or written.
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
