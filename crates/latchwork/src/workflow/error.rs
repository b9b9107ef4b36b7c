//! The errors that callers of workflows see.

use std::time::Duration;

use crate::entity::EntityError;
use crate::json::JsonError;
use crate::lane::OnceError;
use crate::lock::LockError;
use crate::node::NodeError;
use crate::page::CursorError;
use crate::record::unreadable;
use crate::state::StateError;
use crate::store::{ErrorKind, StoreError};
use crate::workflow::{Decision, ExecutionId, Failure, RateLimitError, ScheduleError};

/// The result of an operation on workflows.
pub type Result<T, E = WorkflowError> = std::result::Result<T, E>;

/// Why a call to the engine failed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // The fields are what the messages say.
pub enum WorkflowError {
    /// The workflow failed.
    #[error("execution {id:?} failed: {failure}")]
    Failed { id: ExecutionId, failure: Failure },
    /// The workflow ran longer than its time limit.
    #[error("execution {id:?} timed out")]
    TimedOut { id: ExecutionId },
    /// The execution is parked, or set aside because this program cannot run it. It waits for an operator.
    #[error("execution {id:?} is parked and waits for an operator: {reason}")]
    Parked { id: ExecutionId, reason: String },
    /// The id of the start is taken.
    #[error("execution {id:?} already exists; choose another id, or join it")]
    AlreadyStarted { id: ExecutionId },
    /// The workflow was cancelled.
    #[error("execution {id:?} was cancelled: {reason}")]
    Cancelled { id: ExecutionId, reason: String },
    /// The request needs an execution that has not ended.
    #[error("execution {id:?} has ended; it receives no more messages")]
    Ended { id: ExecutionId },
    /// The message's id was used before for another message.
    #[error("a message {message:?} was sent to execution {id:?} before with another content")]
    MessageReused { id: ExecutionId, message: String },
    /// The update was refused, by the workflow or before it was delivered.
    #[error("execution {id:?} refused the update: {failure}")]
    UpdateRefused { id: ExecutionId, failure: Failure },
    /// The token does not exist, or the operation that waited for it no longer exists.
    #[error("token {token:?} is not known")]
    UnknownToken { token: String },
    /// The token was used before.
    #[error("token {token:?} was used before")]
    TokenUsed { token: String },
    /// The review was never opened, or its execution was removed or started again.
    #[error("review {review:?} is not known")]
    UnknownReview { review: String },
    /// The review was decided before.
    #[error("review {review:?} was decided before: {:?}, by {}", decision.option, decision.by)]
    ReviewDecided { review: String, decision: Box<Decision> },
    /// The execution no longer waits for the review: its time is up, or the execution has ended or continued without
    /// it.
    #[error("review {review:?} is closed without a decision")]
    ReviewClosed { review: String },
    /// The review does not offer this option.
    #[error("review {review:?} offers {}, not {option:?}", offered.join(", "))]
    NotOffered { review: String, option: String, offered: Vec<String> },
    /// The value of a decision does not fit the schema of the review, which stays open.
    #[error("review {review:?} does not take this value for {option:?}: {reason}")]
    DecisionValue { review: String, option: String, reason: String },
    /// The execution does not pause before another attempt.
    #[error("execution {id:?} does not wait for another attempt")]
    NotRetrying { id: ExecutionId },
    /// The execution cannot be forked there.
    #[error("execution {id:?} cannot be forked at {at}: {reason}")]
    Fork { id: ExecutionId, at: String, reason: String },
    /// A tag or attribute is not allowed.
    #[error("{reason}")]
    Labels { reason: String },
    /// The list was asked for with wrong parameters.
    #[error("executions cannot be listed: {reason}")]
    List { reason: String },
    /// The cursor does not continue this list.
    #[error(transparent)]
    Cursor(#[from] CursorError),
    /// The payload contains a value that JSON cannot hold.
    #[error("{what}: {cause}")]
    Payload { what: &'static str, cause: JsonError },
    /// The payload is too long.
    #[error("{what} takes {length} bytes as JSON; the limit is {limit}")]
    PayloadTooLong { what: &'static str, length: usize, limit: usize },
    /// There is no such execution.
    #[error("there is no execution {id:?}")]
    NotFound { id: ExecutionId },
    /// The execution belongs to another workflow than the caller asked for.
    #[error("execution {id:?} belongs to workflow {found:?}, not to {asked:?}")]
    OtherWorkflow { id: ExecutionId, asked: String, found: String },
    /// The operation needs a parked execution.
    #[error("execution {id:?} is not parked")]
    NotParked { id: ExecutionId },
    /// The workflow is not registered.
    #[error("workflow {name:?} is not registered with this engine; register it before the engine starts")]
    NotRegistered { name: String },
    /// The workflow is registered on other nodes only, and it has rules that only they can decide: for its starts, such
    /// as a limit, or for an update.
    #[error(
        "workflow {name:?} is registered on other nodes only, and has rules for this; do it there, or register it here"
    )]
    RulesElsewhere { name: String },
    /// Two definitions of a workflow run executions of the same version.
    #[error("two registered definitions of workflow {name:?} run executions of version {version}")]
    RegisteredTwice { name: String, version: u32 },
    /// Another live node has the name of this one.
    #[error("another live node has the name {name:?}: give each node a name of its own, or none")]
    NodeNameTaken { name: String },
    /// The options of the node cannot be used.
    #[error("{reason}")]
    Node { reason: String },
    /// The name or the id is not allowed.
    #[error("{name:?} cannot be {what}: {reason}")]
    Name { what: &'static str, name: String, reason: &'static str },
    /// The input contains a value that JSON cannot hold, or does not fit the workflow's input type.
    #[error("the input of workflow {workflow:?}: {cause}")]
    Input { workflow: String, cause: JsonError },
    /// The input is too long: it leaves no room for the results of the execution.
    #[error("the input of workflow {workflow:?} takes {length} bytes as JSON; the limit is {limit}")]
    InputTooLong { workflow: String, length: usize, limit: usize },
    /// An output, an answer or a published value does not fit the type that it is read as.
    #[error("a value of execution {id:?} does not fit: {message}")]
    Mismatch { id: ExecutionId, message: String },
    /// A stored record cannot be read.
    #[error("{place} is damaged: it cannot be read")]
    Corrupt { place: String },
    /// A stored record has a version that this program does not know.
    #[error("{place} has version {found}; this program reads versions 1 to {supported}: use a newer program")]
    UnknownVersion { place: String, found: u8, supported: u8 },
    /// The engine was stopped.
    #[error("the engine has stopped, or another engine has taken over; use the engine that runs now")]
    Stopped,
    /// The engine was started outside of a tokio runtime.
    #[error("an engine needs a tokio runtime; start it inside one")]
    NoRuntime,
    /// The idempotency key was used before with another input.
    #[error("idempotency key {key:?} was used before to start execution {id:?}, with another input")]
    KeyReused { key: String, id: ExecutionId },
    /// The workflow's limit is reached. `key` is the limit's key, or the workflow's name.
    #[error("workflow {workflow:?} runs {limit} of {limit} times for {key:?}; the limit is reached")]
    LimitReached { workflow: String, key: String, limit: u32 },
    /// The queue of the limit is full.
    #[error("{depth} starts of workflow {workflow:?} wait for {key:?}; the queue is full")]
    QueueFull { workflow: String, key: String, depth: u32 },
    /// The rate limit does not allow this start now.
    #[error("workflow {workflow:?} may start at most {max} times in {per:?} for {key:?}; try again in {retry_after:?}")]
    RateLimited { workflow: String, key: String, max: u32, per: Duration, retry_after: Duration },
    /// The idempotency key does not allow the change.
    #[error(transparent)]
    Once(OnceError),
    /// The definition has limits or a finalizer that make no sense.
    #[error("workflow {workflow:?} cannot be registered: {reason}")]
    Policy { workflow: String, reason: String },
    /// The definition could not compute a key or a priority from the input.
    #[error("workflow {workflow:?} cannot be started: {what} cannot be used: {reason}")]
    Key { workflow: String, what: &'static str, reason: String },
    /// The start has an option that its workflow does not allow.
    #[error("workflow {workflow:?} cannot be started with these options: {reason}")]
    Start { workflow: String, reason: &'static str },
    /// An error of a schedule.
    #[error(transparent)]
    Schedule(#[from] ScheduleError),
    /// The rate limit is not allowed.
    #[error(transparent)]
    RateLimit(#[from] RateLimitError),
    /// An error of a lock.
    #[error(transparent)]
    Lock(LockError),
    /// An error of the state in the store.
    #[error(transparent)]
    State(#[from] StateError),
    /// An error of the entities in the store.
    #[error(transparent)]
    Entity(#[from] EntityError),
    /// An error of the store.
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

impl From<OnceError> for WorkflowError {
    fn from(error: OnceError) -> WorkflowError {
        match error {
            OnceError::Store(error) => error.into(),
            error => WorkflowError::Once(error),
        }
    }
}

impl From<NodeError> for WorkflowError {
    fn from(error: NodeError) -> WorkflowError {
        match error {
            NodeError::Store(error) => error.into(),
            NodeError::Record(record) => record.into(),
            NodeError::Stopped => WorkflowError::Stopped,
            NodeError::NameTaken { name } => WorkflowError::NodeNameTaken { name },
            error @ (NodeError::Name { .. } | NodeError::Lease { .. }) => {
                WorkflowError::Node { reason: error.to_string() }
            }
        }
    }
}

impl WorkflowError {
    /// The class of the failure.
    ///
    /// ```
    /// # use latchwork::store::ErrorKind;
    /// # use latchwork::workflow::WorkflowError;
    /// assert_eq!(WorkflowError::Stopped.kind(), ErrorKind::Unavailable);
    /// ```
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
            | NodeNameTaken { .. }
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
            | RulesElsewhere { .. }
            | RegisteredTwice { .. }
            | Node { .. }
            | Name { .. }
            | KeyReused { .. }
            | Input { .. }
            | InputTooLong { .. }
            | MessageReused { .. }
            | List { .. }
            | Cursor(_)
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
            | DecisionValue { .. }
            | NoRuntime => ErrorKind::Invalid,
            Corrupt { .. } => ErrorKind::Corrupt,
            Stopped => ErrorKind::Unavailable,
            Once(error) => error.kind(),
            Schedule(error) => error.kind(),
            Lock(error) => error.kind(),
            State(error) => error.kind(),
            Entity(error) => error.kind(),
            Store(error) => error.kind(),
        }
    }

    /// True if the limits of the workflow do not admit a start.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result, Workflow};
    /// # async fn example(engine: Engine, order: Workflow<u32, u32>) -> Result<()> {
    /// match engine.start(&order, 7).await {
    ///     Err(error) if error.is_rejection() => println!("try again later: {error}"),
    ///     started => drop(started?),
    /// }
    /// # Ok(()) }
    /// ```
    pub fn is_rejection(&self) -> bool {
        use WorkflowError::*;
        matches!(self, LimitReached { .. } | QueueFull { .. } | RateLimited { .. })
    }

    /// True if a newer program is needed.
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
