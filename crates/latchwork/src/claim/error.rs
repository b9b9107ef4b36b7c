//! The errors of claims, and what each of them means to a caller. Losing a race is not an error: it is a value of
//! `outcome.rs`.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use serde_json::{Value, json};

use crate::claim::finding::Finding;
use crate::entity::{EntityError, EntityId};
use crate::json::JsonError;
use crate::lane::OnceError;
use crate::lock::LockError;
use crate::page::CursorError;
use crate::record::unreadable;
use crate::state::StateError;
use crate::store::{ErrorKind, StoreError};
use crate::workflow::WorkflowError;

/// The result of an operation on claims.
pub type Result<T, E = ClaimError> = std::result::Result<T, E>;

/// Why an operation on claims failed. A result that a caller must expect, such as a lost race or a failure that an
/// action returns, is not an error but a [`Fired`](crate::claim::Fired).
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // The messages name the fields.
pub enum ClaimError {
    /// The configuration breaks rules. All findings are listed.
    #[error("the configuration of claim workflows is wrong:\n{}", lines(findings))]
    Config { findings: Vec<Finding> },
    /// Claiming statuses that no janitor covers.
    #[error("claiming statuses without a janitor: {}", lines(missing))]
    Uncovered { missing: Vec<Uncovered> },
    /// No such workflow is configured.
    #[error("there is no claim workflow {name:?}; configured are {known:?}")]
    UnknownWorkflow { name: String, known: Vec<String> },
    /// The workflow has no such step.
    #[error("claim workflow {workflow:?} has no step {step:?}; its steps are {known:?}")]
    UnknownStep { workflow: String, step: String, known: Vec<String> },
    /// The entity does not exist.
    #[error("there is no entity {id:?}")]
    NotFound { id: EntityId },
    /// The entity has another type than the workflow's entities.
    #[error("entity {id:?} is a {found:?}; claim workflow {workflow:?} is for entities of type {expected:?}")]
    WrongType { id: EntityId, workflow: String, expected: String, found: String },
    /// The entity's data have no status at the workflow's status field.
    #[error("entity {id:?} has no status: its data have no text at {field:?}")]
    NoStatus { id: EntityId, field: String },
    /// An entity was to be added at a status that is not initial.
    #[error("entities of claim workflow {workflow:?} start at {allowed:?}, but this entity is at {found:?}")]
    NotInitial { workflow: String, found: String, allowed: Vec<String> },
    /// The action returned an error or panicked. The claim was released.
    #[error("action {action:?} has failed: {error}")]
    Action { action: String, error: ActionError },
    /// The execution that runs the action ended without a result.
    #[error("execution {id:?} of action {action:?} ended without a result: {error}")]
    Execution { action: String, id: String, error: Box<WorkflowError> },
    /// The entity is not claimed.
    #[error("entity {id:?} is not claimed")]
    NotClaimed { id: EntityId },
    /// The state of the claim does not allow the operation.
    #[error("the claim on entity {id:?} {reason}")]
    NotInReview { id: EntityId, reason: String },
    /// No dead letter has this key.
    #[error("there is no dead letter {key:?}")]
    NoDeadLetter { key: String },
    /// The cursor does not continue this list.
    #[error(transparent)]
    Cursor(#[from] CursorError),
    /// JSON cannot hold an input or an output.
    #[error("{what} cannot be stored: {cause}")]
    Json { what: &'static str, cause: JsonError },
    /// Other callers wrote the entity between each read and commit.
    #[error("entity {id:?} was changed by other callers during each of {tries} attempts; try again later")]
    Contended { id: EntityId, tries: u32 },
    /// A table of the user's own cannot be used.
    #[error("claim workflow {workflow:?} cannot work on table {table:?}: {reason}")]
    Table { workflow: String, table: String, reason: String },
    /// A row of a user's own table cannot be used as asked.
    #[error("row {id:?}: {reason}")]
    Row { id: EntityId, reason: String },
    /// Claims were already started on this engine.
    #[error("claims were already started on this engine: pass all workflows to one `Claims::on`")]
    AlreadyStarted,
    /// The engine has stopped.
    #[error("the engine has stopped")]
    Stopped,
    /// A stored record cannot be read.
    #[error("{place} is damaged: it cannot be read")]
    Corrupt { place: String },
    /// This program does not know the version of a stored record.
    #[error("{place} has version {found}; this program reads versions 1 to {supported}: use a newer program")]
    UnknownVersion { place: String, found: u8, supported: u8 },
    /// The idempotency key does not allow the change.
    #[error(transparent)]
    Once(OnceError),
    /// An entity could not be written.
    #[error(transparent)]
    Entity(EntityError),
    /// A slot could not be written.
    #[error(transparent)]
    State(#[from] StateError),
    /// A session could not be begun.
    #[error(transparent)]
    Lock(LockError),
    /// An execution could not be started.
    #[error(transparent)]
    Workflow(WorkflowError),
    /// An error of the store.
    #[error(transparent)]
    Store(#[from] StoreError),
}

unreadable!(ClaimError);

fn lines(all: &[impl fmt::Display]) -> String {
    all.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

impl From<OnceError> for ClaimError {
    fn from(error: OnceError) -> ClaimError {
        match error {
            OnceError::Store(error) => error.into(),
            error => ClaimError::Once(error),
        }
    }
}

impl From<EntityError> for ClaimError {
    fn from(error: EntityError) -> ClaimError {
        match error {
            EntityError::Store(error) => error.into(),
            error => ClaimError::Entity(error),
        }
    }
}

impl From<LockError> for ClaimError {
    fn from(error: LockError) -> ClaimError {
        match error {
            LockError::Store(error) => error.into(),
            LockError::Stopped => ClaimError::Stopped,
            error => ClaimError::Lock(error),
        }
    }
}

impl From<WorkflowError> for ClaimError {
    fn from(error: WorkflowError) -> ClaimError {
        match error {
            WorkflowError::Store(error) => error.into(),
            WorkflowError::Stopped => ClaimError::Stopped,
            error => ClaimError::Workflow(error),
        }
    }
}

impl ClaimError {
    /// The class of the failure.
    ///
    /// ```
    /// # use latchwork::claim::ClaimError;
    /// # use latchwork::store::ErrorKind;
    /// assert_eq!(ClaimError::Stopped.kind(), ErrorKind::Unavailable);
    /// ```
    pub fn kind(&self) -> ErrorKind {
        use ClaimError::*;
        match self {
            Config { .. }
            | Uncovered { .. }
            | WrongType { .. }
            | NoStatus { .. }
            | NotInitial { .. }
            | Table { .. }
            | Row { .. }
            | Json { .. }
            | AlreadyStarted
            | Cursor(_)
            | UnknownVersion { .. } => ErrorKind::Invalid,
            UnknownWorkflow { .. } | UnknownStep { .. } | NotFound { .. } | NotClaimed { .. } | NoDeadLetter { .. } => {
                ErrorKind::NotFound
            }
            Action { .. } | Execution { .. } | NotInReview { .. } | Contended { .. } => ErrorKind::Conflict,
            Stopped => ErrorKind::Unavailable,
            Corrupt { .. } => ErrorKind::Corrupt,
            Once(error) => error.kind(),
            Entity(error) => error.kind(),
            State(error) => error.kind(),
            Lock(error) => error.kind(),
            Workflow(error) => error.kind(),
            Store(error) => error.kind(),
        }
    }

    /// True if the error is temporary: the store is unavailable at the moment.
    pub(crate) fn is_passing(&self) -> bool {
        matches!(self, ClaimError::Store(error) if error.is_passing())
    }

    /// Returns the error as JSON. `outcome` is the word `error`, where a [`Fired`](crate::claim::Fired) has words such
    /// as `failure` and `rejection`.
    ///
    /// ```
    /// # use latchwork::claim::ClaimError;
    /// assert_eq!(ClaimError::Stopped.to_json()["outcome"], "error");
    /// ```
    pub fn to_json(&self) -> Value {
        match self {
            ClaimError::Action { action, error } => {
                let (message, panicked) = (error.to_string(), error.has_panicked());
                json!({"outcome": "error", "action": action, "message": message, "panicked": panicked})
            }
            error => json!({"outcome": "error", "message": error.to_string()}),
        }
    }
}

/// A claiming status that no janitor covers.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Uncovered {
    /// The workflow that declares it.
    pub workflow: String,
    /// The module that must register a janitor.
    pub module: String,
    /// The claiming status.
    pub status: String,
}

impl fmt::Display for Uncovered {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Uncovered { workflow, module, status } = self;
        write!(
            f,
            "workflow {workflow:?} declares {status:?}, and module {module:?} has not registered a janitor for it"
        )
    }
}

/// The error that an action returned, unchanged, or its panic.
#[derive(Clone)]
pub struct ActionError(ActionCause);

#[derive(Clone)]
enum ActionCause {
    Error(Arc<dyn std::error::Error + Send + Sync>),
    Panic(Arc<str>),
}

impl ActionError {
    pub(crate) fn new(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> ActionError {
        ActionError(ActionCause::Error(error.into().into()))
    }

    pub(crate) fn panicked(message: &str) -> ActionError {
        ActionError(ActionCause::Panic(message.into()))
    }

    /// True if the action panicked.
    ///
    /// ```
    /// # use latchwork::claim::ClaimError;
    /// # fn example(error: ClaimError) {
    /// if let ClaimError::Action { error, .. } = &error {
    ///     println!("it panicked: {}", error.has_panicked());
    /// }
    /// # }
    /// ```
    pub fn has_panicked(&self) -> bool {
        matches!(self.0, ActionCause::Panic(_))
    }

    /// The action's own error, if it has this type.
    ///
    /// ```
    /// # use latchwork::claim::ActionError;
    /// # fn example(error: ActionError) {
    /// if let Some(error) = error.downcast_ref::<std::io::Error>() {
    ///     println!("{:?}", error.kind());
    /// }
    /// # }
    /// ```
    pub fn downcast_ref<E: std::error::Error + 'static>(&self) -> Option<&E> {
        match &self.0 {
            ActionCause::Error(error) => error.downcast_ref(),
            ActionCause::Panic(_) => None,
        }
    }

    /// The action's own error. `None` after a panic.
    ///
    /// ```
    /// # use latchwork::claim::ActionError;
    /// # fn example(error: ActionError) {
    /// if let Some(error) = error.inner() {
    ///     println!("the action has returned: {error}");
    /// }
    /// # }
    /// ```
    pub fn inner(&self) -> Option<&(dyn std::error::Error + Send + Sync + 'static)> {
        match &self.0 {
            ActionCause::Error(error) => Some(&**error),
            ActionCause::Panic(_) => None,
        }
    }
}

/// `?` turns any error into one, so an action may return `Result<Outcome, ActionError>`. It is not an
/// `std::error::Error` itself, because each of these is turned into one.
impl<E: Into<Box<dyn std::error::Error + Send + Sync>>> From<E> for ActionError {
    fn from(error: E) -> ActionError {
        ActionError::new(error)
    }
}

impl fmt::Display for ActionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            ActionCause::Error(error) => error.fmt(f),
            ActionCause::Panic(message) => write!(f, "it panicked: {message}"),
        }
    }
}

impl fmt::Debug for ActionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            ActionCause::Error(error) => error.fmt(f),
            ActionCause::Panic(message) => f.debug_tuple("Panic").field(message).finish(),
        }
    }
}

/// Returns the message of a panic as an error.
pub(crate) fn panicked(panic: &(dyn Any + Send)) -> ActionError {
    ActionError::panicked(&crate::panic::message_of(panic))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_operation_that_the_state_of_a_claim_does_not_allow_is_a_conflict() {
        let error = ClaimError::NotInReview { id: "i".into(), reason: "does not wait for an operator".into() };
        assert_eq!(error.kind(), ErrorKind::Conflict, "the same request may be right later");
    }
}
