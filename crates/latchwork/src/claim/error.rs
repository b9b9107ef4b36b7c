//! What can go wrong with claims, and what each failure means to a caller.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use serde_json::{Value, json};

use crate::claim::finding::Finding;
use crate::entity::{EntityError, EntityId};
use crate::json::JsonError;
use crate::lock::LockError;
use crate::record::unreadable;
use crate::state::StateError;
use crate::store::{ErrorKind, StoreError};
use crate::workflow::WorkflowError;

/// The result of an operation on claims.
pub type Result<T, E = ClaimError> = std::result::Result<T, E>;

/// Why something about claims could not be done. What a caller has to expect, such as a lost race or a failure that an
/// action returns, is no error but a [`Fired`](crate::claim::Fired).
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // The fields are what the messages say.
pub enum ClaimError {
    /// The configuration breaks rules: all of them.
    #[error("the configuration of claim workflows is wrong:\n{}", lines(findings))]
    Config { findings: Vec<Finding> },
    /// Claiming statuses that nothing frees after a crash.
    #[error("claiming statuses without a janitor: {}", lines(missing))]
    Uncovered { missing: Vec<Uncovered> },
    /// A workflow that was not configured.
    #[error("there is no claim workflow {name:?}; configured are {known:?}")]
    UnknownWorkflow { name: String, known: Vec<String> },
    /// A step that the workflow does not have.
    #[error("claim workflow {workflow:?} has no step {step:?}; its steps are {known:?}")]
    UnknownStep { workflow: String, step: String, known: Vec<String> },
    /// There is no such entity.
    #[error("there is no entity {id:?}")]
    NotFound { id: EntityId },
    /// An entity of another type than the workflow's.
    #[error("entity {id:?} is a {found:?}; claim workflow {workflow:?} is for entities of type {expected:?}")]
    WrongType { id: EntityId, workflow: String, expected: String, found: String },
    /// An entity whose data have no status where the workflow looks for it.
    #[error("entity {id:?} has no status: its data have no text at {field:?}")]
    NoStatus { id: EntityId, field: String },
    /// An entity that is to be added at a status it cannot start at.
    #[error("entities of claim workflow {workflow:?} start at {allowed:?}, and this one is at {found:?}")]
    NotInitial { workflow: String, found: String, allowed: Vec<String> },
    /// The action has failed with an error, or has panicked. The claim was released.
    #[error("action {action:?} has failed: {error}")]
    Action { action: String, error: ActionError },
    /// The execution that runs the action has not come to its end.
    #[error("execution {id:?} of action {action:?} has ended without a result: {error}")]
    Execution { action: String, id: String, error: Box<WorkflowError> },
    /// An entity that no claim is on.
    #[error("no claim is on entity {id:?}")]
    NotClaimed { id: EntityId },
    /// A claim that cannot be treated so as it is.
    #[error("the claim on entity {id:?} {reason}")]
    NotInReview { id: EntityId, reason: String },
    /// An after-effect that is not among the dead letters.
    #[error("there is no dead letter {key:?}")]
    NoDeadLetter { key: String },
    /// An input or an output that JSON cannot hold.
    #[error("{what} cannot be stored: {cause}")]
    Json { what: &'static str, cause: JsonError },
    /// Others wrote the same entity each time.
    #[error("entity {id:?} was changed by somebody else each of the {tries} times this was tried; try again later")]
    Contended { id: EntityId, tries: u32 },
    /// Claims that are to start on an engine on which there are some.
    #[error("claims are served on this engine already: give all workflows to one `Claims::on`")]
    AlreadyStarted,
    /// The engine has stopped.
    #[error("the engine has stopped")]
    Stopped,
    /// A stored record that cannot be read.
    #[error("{place} is damaged: it cannot be read")]
    Corrupt { place: String },
    /// A stored record of a version that this program does not know.
    #[error("{place} has version {found}; this program reads versions 1 to {supported}: use a newer one")]
    UnknownVersion { place: String, found: u8, supported: u8 },
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
    /// The store below.
    #[error(transparent)]
    Store(#[from] StoreError),
}

unreadable!(ClaimError);

fn lines(all: &[impl fmt::Display]) -> String {
    all.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
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
    pub fn kind(&self) -> ErrorKind {
        use ClaimError::*;
        match self {
            Config { .. }
            | Uncovered { .. }
            | WrongType { .. }
            | NoStatus { .. }
            | NotInitial { .. }
            | Json { .. }
            | AlreadyStarted
            | UnknownVersion { .. } => ErrorKind::Invalid,
            UnknownWorkflow { .. } | UnknownStep { .. } | NotFound { .. } | NotClaimed { .. } | NoDeadLetter { .. } => {
                ErrorKind::NotFound
            }
            Action { .. } | Execution { .. } | NotInReview { .. } | Contended { .. } => ErrorKind::Conflict,
            Stopped => ErrorKind::Unavailable,
            Corrupt { .. } => ErrorKind::Corrupt,
            Entity(error) => error.kind(),
            State(error) => error.kind(),
            Lock(error) => error.kind(),
            Workflow(error) => error.kind(),
            Store(error) => error.kind(),
        }
    }

    /// Whether the store does not serve at the moment.
    pub(crate) fn is_passing(&self) -> bool {
        matches!(self, ClaimError::Store(error) if error.is_passing())
    }

    /// As JSON: the error of an action is the word `error`, beside `failure` and `rejection` of a
    /// [`Fired`](crate::claim::Fired).
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

/// A claiming status that nothing frees after a crash.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Uncovered {
    /// The workflow that declares it.
    pub workflow: String,
    /// The module that was to bring a janitor.
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

/// The error that an action ended with, unchanged, or its panic.
#[derive(Clone)]
pub struct ActionError(Inner);

#[derive(Clone)]
enum Inner {
    Error(Arc<dyn std::error::Error + Send + Sync>),
    Panic(Arc<str>),
}

impl ActionError {
    pub(crate) fn new(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> ActionError {
        ActionError(Inner::Error(error.into().into()))
    }

    pub(crate) fn panicked(message: &str) -> ActionError {
        ActionError(Inner::Panic(message.into()))
    }

    /// Whether it is a panic.
    pub fn has_panicked(&self) -> bool {
        matches!(self.0, Inner::Panic(_))
    }

    /// The action's own error, if it is of that type.
    pub fn downcast_ref<E: std::error::Error + 'static>(&self) -> Option<&E> {
        match &self.0 {
            Inner::Error(error) => error.downcast_ref(),
            Inner::Panic(_) => None,
        }
    }

    /// The action's own error; of a panic, none.
    pub fn inner(&self) -> Option<&(dyn std::error::Error + Send + Sync + 'static)> {
        match &self.0 {
            Inner::Error(error) => Some(&**error),
            Inner::Panic(_) => None,
        }
    }
}

impl fmt::Display for ActionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Inner::Error(error) => error.fmt(f),
            Inner::Panic(message) => write!(f, "it panicked: {message}"),
        }
    }
}

impl fmt::Debug for ActionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Inner::Error(error) => error.fmt(f),
            Inner::Panic(message) => f.debug_tuple("Panic").field(message).finish(),
        }
    }
}

/// What a panic says.
pub(crate) fn panicked(panic: &(dyn Any + Send)) -> ActionError {
    ActionError::panicked(&crate::panic::message_of(panic))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_claim_that_is_not_as_it_has_to_be_is_a_conflict() {
        let error = ClaimError::NotInReview { id: "i".into(), reason: "does not wait for an operator".into() };
        assert_eq!(error.kind(), ErrorKind::Conflict, "the same request may be right later");
    }
}
