//! What can go wrong with workflows, from the outside.

use std::time::Duration;

use crate::entity::EntityError;
use crate::json::JsonError;
use crate::lock::LockError;
use crate::node::NodeError;
use crate::record::unreadable;
use crate::state::StateError;
use crate::store::{ErrorKind, StoreError};
use crate::workflow::{Decision, ExecutionId, Failure, RateLimitError, ScheduleError};

/// The result of an operation on workflows.
pub type Result<T, E = WorkflowError> = std::result::Result<T, E>;

/// Why a call to the engine did not do what it was asked.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // The fields are what the messages say.
pub enum WorkflowError {
    /// The workflow itself failed.
    #[error("execution {id:?} failed: {failure}")]
    Failed { id: ExecutionId, failure: Failure },
    /// The workflow took longer than it may.
    #[error("execution {id:?} timed out")]
    TimedOut { id: ExecutionId },
    /// The execution is parked, or set aside because this program cannot run it. It waits for an operator.
    #[error("execution {id:?} is parked and waits for an operator: {reason}")]
    Parked { id: ExecutionId, reason: String },
    /// A start under an id that is taken.
    #[error("execution {id:?} exists already; choose another id, or join it")]
    AlreadyStarted { id: ExecutionId },
    /// The workflow was cancelled.
    #[error("execution {id:?} was cancelled: {reason}")]
    Cancelled { id: ExecutionId, reason: String },
    /// Something was asked of an execution that has ended.
    #[error("execution {id:?} has ended; nothing can be sent to it any more")]
    Ended { id: ExecutionId },
    /// A message under an id that another one was sent under.
    #[error("a message {message:?} was sent to execution {id:?} before, and it was another one")]
    MessageReused { id: ExecutionId, message: String },
    /// An update that was refused, by the workflow or before it came there.
    #[error("execution {id:?} has refused the update: {failure}")]
    UpdateRefused { id: ExecutionId, failure: Failure },
    /// A token that nobody has given out, or for something that is no more.
    #[error("token {token:?} is not known")]
    UnknownToken { token: String },
    /// A token that was used.
    #[error("token {token:?} was used before")]
    TokenUsed { token: String },
    /// A review that was never opened, or whose execution was removed or has begun anew.
    #[error("review {review:?} is not known")]
    UnknownReview { review: String },
    /// A review that was decided before.
    #[error("review {review:?} was decided before: {:?}, by {}", decision.option, decision.by)]
    ReviewDecided { review: String, decision: Box<Decision> },
    /// A review that is no longer waited for: its time is up, or its execution has ended or gone on without it.
    #[error("review {review:?} is closed, and was not decided")]
    ReviewClosed { review: String },
    /// A decision for something that cannot be chosen.
    #[error("review {review:?} offers {}, and not {option:?}", offered.join(", "))]
    NotOffered { review: String, option: String, offered: Vec<String> },
    /// An execution that pauses before no attempt.
    #[error("execution {id:?} does not wait for another attempt")]
    NotRetrying { id: ExecutionId },
    /// A fork that cannot be.
    #[error("execution {id:?} cannot be forked at {at}: {reason}")]
    Fork { id: ExecutionId, at: String, reason: String },
    /// Tags or attributes that cannot be.
    #[error("{reason}")]
    Labels { reason: String },
    /// A list that cannot be asked for.
    #[error("executions cannot be listed: {reason}")]
    List { reason: String },
    /// A payload with something in it that JSON cannot hold.
    #[error("{what}: {cause}")]
    Payload { what: &'static str, cause: JsonError },
    /// A payload that is too long.
    #[error("{what} takes {length} bytes as JSON; the limit is {limit}")]
    PayloadTooLong { what: &'static str, length: usize, limit: usize },
    /// There is no such execution.
    #[error("there is no execution {id:?}")]
    NotFound { id: ExecutionId },
    /// An execution of another workflow than was asked for.
    #[error("execution {id:?} is one of workflow {found:?}, not of {asked:?}")]
    OtherWorkflow { id: ExecutionId, asked: String, found: String },
    /// An operation that needs a parked execution.
    #[error("execution {id:?} is not parked")]
    NotParked { id: ExecutionId },
    /// A workflow that was not registered.
    #[error("workflow {name:?} is not registered with this engine; register it before the engine starts")]
    NotRegistered { name: String },
    /// Two definitions of one name.
    #[error("workflow {name:?} was registered twice")]
    RegisteredTwice { name: String },
    /// A name or an id that cannot be.
    #[error("{name:?} cannot be {what}: {reason}")]
    Name { what: &'static str, name: String, reason: &'static str },
    /// An input with something in it that JSON cannot hold, or that does not fit the workflow's input type.
    #[error("the input of workflow {workflow:?}: {cause}")]
    Input { workflow: String, cause: JsonError },
    /// An input that leaves no room for what the execution comes to.
    #[error("the input of workflow {workflow:?} takes {length} bytes as JSON; the limit is {limit}")]
    InputTooLong { workflow: String, length: usize, limit: usize },
    /// An output, an answer or a published value that does not fit the type it is read as.
    #[error("what execution {id:?} gave does not fit: {message}")]
    Mismatch { id: ExecutionId, message: String },
    /// A stored record that cannot be read.
    #[error("{place} is damaged: it cannot be read")]
    Corrupt { place: String },
    /// A stored record of a version that this program does not know.
    #[error("{place} has version {found}; this program reads versions 1 to {supported}: use a newer one")]
    UnknownVersion { place: String, found: u8, supported: u8 },
    /// The engine was stopped.
    #[error("the engine has stopped, or another one has taken over; ask the one that runs now")]
    Stopped,
    /// An engine that was to start where nothing could run it.
    #[error("an engine runs on a tokio runtime; start it from within one")]
    NoRuntime,
    /// A start under an idempotency key that was used with another input.
    #[error("idempotency key {key:?} was used before to start execution {id:?}, with another input")]
    KeyReused { key: String, id: ExecutionId },
    /// A start that its workflow's limit does not admit. `key` is the limit's key, or the workflow's name.
    #[error("workflow {workflow:?} runs {limit} of {limit} times for {key:?}; no more is admitted")]
    LimitReached { workflow: String, key: String, limit: u32 },
    /// A start that found as many waiting as may wait.
    #[error("{depth} starts of workflow {workflow:?} wait for {key:?}; no more may wait")]
    QueueFull { workflow: String, key: String, depth: u32 },
    /// A start that came too soon after others.
    #[error(
        "workflow {workflow:?} is started {max} times in {per:?} for {key:?} at the most; try again in {retry_after:?}"
    )]
    RateLimited { workflow: String, key: String, max: u32, per: Duration, retry_after: Duration },
    /// A definition whose limits or finalizer cannot be meant.
    #[error("workflow {workflow:?} cannot be registered: {reason}")]
    Policy { workflow: String, reason: String },
    /// A key, or a priority, that the definition could not compute from the input.
    #[error("workflow {workflow:?} cannot be started: {what} cannot be used: {reason}")]
    Key { workflow: String, what: &'static str, reason: String },
    /// Something that a start was asked for and that its workflow does not allow.
    #[error("workflow {workflow:?} cannot be started so: {reason}")]
    Start { workflow: String, reason: &'static str },
    /// A schedule.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    /// A rate limit that cannot be.
    #[error(transparent)]
    RateLimit(#[from] RateLimitError),
    /// A lock.
    #[error(transparent)]
    Lock(LockError),
    /// The state in the store below.
    #[error(transparent)]
    State(#[from] StateError),
    /// The entities in the store below.
    #[error(transparent)]
    Entity(#[from] EntityError),
    /// The store below.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl From<LockError> for WorkflowError {
    fn from(error: LockError) -> WorkflowError {
        match error {
            LockError::Store(error) => error.into(),
            LockError::Stopped => WorkflowError::Stopped,
            error => WorkflowError::Lock(error),
        }
    }
}

unreadable!(WorkflowError);

impl From<NodeError> for WorkflowError {
    fn from(error: NodeError) -> WorkflowError {
        match error {
            NodeError::Store(error) => error.into(),
            NodeError::Record(record) => record.into(),
            NodeError::Stopped => WorkflowError::Stopped,
        }
    }
}

impl WorkflowError {
    /// The class of the failure.
    pub fn kind(&self) -> ErrorKind {
        use WorkflowError::*;
        match self {
            Failed { .. }
            | TimedOut { .. }
            | Cancelled { .. }
            | Ended { .. }
            | Parked { .. }
            | AlreadyStarted { .. }
            | NotParked { .. }
            | NotRetrying { .. }
            | UpdateRefused { .. }
            | TokenUsed { .. }
            | LimitReached { .. }
            | QueueFull { .. }
            | RateLimited { .. }
            | ReviewDecided { .. }
            | ReviewClosed { .. }
            | Fork { .. } => ErrorKind::Conflict,
            NotFound { .. } | UnknownToken { .. } | UnknownReview { .. } => ErrorKind::NotFound,
            OtherWorkflow { .. }
            | NotRegistered { .. }
            | RegisteredTwice { .. }
            | Name { .. }
            | KeyReused { .. }
            | Input { .. }
            | InputTooLong { .. }
            | MessageReused { .. }
            | List { .. }
            | Labels { .. }
            | Payload { .. }
            | PayloadTooLong { .. }
            | Mismatch { .. }
            | UnknownVersion { .. }
            | Policy { .. }
            | Key { .. }
            | Start { .. }
            | RateLimit(_)
            | NotOffered { .. }
            | NoRuntime => ErrorKind::Invalid,
            Corrupt { .. } => ErrorKind::Corrupt,
            Stopped => ErrorKind::Unavailable,
            Schedule(error) => error.kind(),
            Lock(error) => error.kind(),
            State(error) => error.kind(),
            Entity(error) => error.kind(),
            Store(error) => error.kind(),
        }
    }

    /// Whether a start is not admitted by the limits of its workflow.
    pub fn is_rejection(&self) -> bool {
        use WorkflowError::*;
        matches!(self, LimitReached { .. } | QueueFull { .. } | RateLimited { .. })
    }

    /// Whether a newer program is needed.
    pub(crate) fn is_unknown_version(&self) -> bool {
        use WorkflowError::*;
        matches!(
            self,
            UnknownVersion { .. }
                | Lock(LockError::UnknownVersion { .. })
                | State(StateError::UnknownVersion { .. })
                | Entity(EntityError::UnknownVersion { .. })
        )
    }

    pub(crate) fn corrupt(place: impl Into<String>) -> WorkflowError {
        WorkflowError::Corrupt { place: place.into() }
    }
}
