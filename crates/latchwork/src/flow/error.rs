//! The errors of flows: what is wrong with a flow when it is built, why a call fails, and the failures that the verbs
//! themselves make while a request runs.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::page::CursorError;
use crate::record::unreadable;
use crate::store::StoreError;
use crate::workflow::{Decision, Failure, WorkflowError};

/// The result of a call.
pub type Result<T, E = FlowError> = std::result::Result<T, E>;

/// Why a flow cannot be built, or why a call fails. Paths are names of blocks from the outside in, such as
/// `research/planner`.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // The fields are what the messages say.
pub enum FlowError {
    /// A name is not valid.
    #[error("{name:?} cannot be the name of {what}: it must have 1 to 128 bytes, without `>`, and no `?` at its end")]
    Name { what: &'static str, name: String },
    /// Two blocks of a chain have the same name.
    #[error("sequencer {sequencer:?} has two blocks of the name {name:?}; give one another name with `named`")]
    DuplicateName { sequencer: String, name: String },
    /// A verb that needs blocks has none.
    #[error("`{verb}` in {sequencer:?} has no blocks")]
    NoBlocks { sequencer: String, verb: &'static str },
    /// Two blocks need the same field with different types.
    #[error("field {field:?} of the {scope} state is {first_type} in block {first:?} and {second_type} in {second:?}")]
    Conflict {
        scope: Box<str>,
        field: Box<str>,
        first: Box<str>,
        first_type: Box<str>,
        second: Box<str>,
        second_type: Box<str>,
    },
    /// A block needs a field that the sequencer's state does not have.
    #[error("block {block:?} needs field {field:?}, which the state of sequencer {sequencer:?} does not have")]
    MissingField { field: String, block: String, sequencer: String },
    /// A block needs state, and no sequencer around it declares any.
    #[error("block {block:?} needs field {field:?}, and no sequencer around it declares state")]
    NoState { field: String, block: String },
    /// A type that is used as state is not a struct with named fields.
    #[error("the state of {block:?} must be a struct with named fields")]
    NotAStruct { block: String },
    /// A block needs the state of a block that is neither before it nor around it.
    #[error("block {block:?} needs the state of {target:?}, which is neither before it nor around it")]
    UnknownTarget { block: String, target: String },
    /// A block needs the state of a block around it whose name is not unique there.
    #[error("block {block:?} needs the state of {target:?}, and several blocks around it have that name")]
    AmbiguousTarget { block: String, target: String },
    /// A value does not have the type that it is used as.
    #[error("`{verb}` in {sequencer:?} gives {found}, and the sequencer gives {expected}")]
    OtherType { sequencer: String, verb: &'static str, found: &'static str, expected: &'static str },
    /// A loop goes back to a block that is not before it.
    #[error("`loop_back` in {sequencer:?} goes back to {target:?}, which is not before it")]
    NoSuchBlock { sequencer: String, target: String },
    /// Blocks are nested so deeply that the path of one is too long to be stored.
    #[error("the path of block {block:?} takes {length} bytes; the limit is {limit}")]
    TooDeep { block: String, length: usize, limit: usize },
    /// The flow has no such action.
    #[error("flow {flow:?} has no action {action:?}; it has {known:?}")]
    UnknownAction { flow: String, action: String, known: Vec<String> },
    /// Two actions of a flow have the same name.
    #[error("flow {flow:?} has two actions of the name {action:?}")]
    DuplicateAction { flow: String, action: String },
    /// There is no such question.
    #[error("there is no question {id:?}")]
    UnknownQuestion { id: String },
    /// The answer is not among those that are allowed.
    #[error("{answer:?} is not an allowed answer; allowed are {allowed:?}")]
    NotAllowed { answer: String, allowed: Vec<String> },
    /// The value of an answer does not fit the schema. The question stays open.
    #[error("the answer does not fit the schema of the question: {reason}")]
    BadAnswer { reason: String, value: Value },
    /// Another caller was faster.
    #[error("the question was answered by {:?}: {}", decision.by, decision.option)]
    Answered { decision: Box<Decision> },
    /// The request no longer waits for an answer: the time is up, or the request has ended.
    #[error("question {id:?} is closed")]
    Closed { id: String },
    /// The request has no session, user or organisation.
    #[error("the request has no {scope}")]
    NoScope { scope: &'static str },
    /// The engine below.
    #[error(transparent)]
    Workflow(#[from] WorkflowError),
}

/// A failure that a verb makes while a request runs. [`Failure::get`] returns it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
#[allow(missing_docs)] // The fields are what the messages say.
pub enum BlockError {
    /// No case of a branch or router matches.
    #[error("{path}: no case matches")]
    NoMatch { path: String },
    /// A router has chosen a block that it does not have.
    #[error("{path}: there is no block {chosen:?}")]
    NoSuchBlock { path: String, chosen: String },
    /// A loop has gone round too often.
    #[error("{path}: the loop has gone round {rounds} times; set `most_rounds` if that is right")]
    Endless { path: String, rounds: u32 },
    /// The value of `for_each` is not a list.
    #[error("{path}: `for_each` needs a list, and the value is {found}")]
    NotAList { path: String, found: String },
    /// A condition does not hold, and no work is left that could change that.
    #[error("{path}: the condition does not hold, and no work is left that could change that")]
    NeverHolds { path: String },
    /// The state is too large to be stored.
    #[error("{path}: the state takes {bytes} bytes; the limit is {limit}")]
    StateTooLarge { path: String, bytes: usize, limit: usize },
    /// The block is in no sequencer that declares state.
    #[error("{path}: there is no such state here")]
    NoState { path: String },
    /// The time of a question is up.
    #[error("{path}: question {reason:?} was not answered in time")]
    Unanswered { path: String, reason: String },
    /// An answer does not fit what the code expects.
    #[error("{path}: the answer to {reason:?} does not fit: {message}")]
    AnswerMisfit { path: String, reason: String, message: String },
    /// A value does not have the type that it is used as, which a built flow excludes.
    #[error("{path}: a value has another type than expected")]
    OtherType { path: String },
}

pub(crate) fn failed(error: BlockError) -> Failure {
    Failure::typed(error).not_retryable()
}

unreadable!(BoardError);

/// The result of an operation on a board.
pub type BoardResult<T> = std::result::Result<T, BoardError>;

/// Why an operation on a board fails.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // The fields are what the messages say.
pub enum BoardError {
    /// A name or id is not valid.
    #[error("{name:?} cannot be the name of a board or task: it is empty or too long")]
    Name { name: String },
    /// There is a task of this id already.
    #[error("there is a task {task:?} already")]
    TaskExists { task: String },
    /// There is no such task.
    #[error("there is no task {task:?}")]
    UnknownTask { task: String },
    /// Tasks depend on each other in a circle.
    #[error("task {task:?} depends on itself, through others")]
    Cycle { task: String },
    /// The lease is over, and the claim was taken away.
    #[error("the claim of task {task:?} was lost: its lease was over")]
    ClaimLost { task: String },
    /// The call was made outside of a tokio runtime.
    #[error("a board works on a tokio runtime; call this from within one")]
    NoRuntime,
    /// A stored task cannot be read.
    #[error("{place} cannot be read")]
    Corrupt { place: String },
    /// A newer program has stored a task.
    #[error("{place} has version {found}; this program reads versions 1 to {supported}: use a newer program")]
    UnknownVersion { place: String, found: u8, supported: u8 },
    /// A cursor does not fit the list.
    #[error(transparent)]
    Cursor(#[from] CursorError),
    /// The store below.
    #[error(transparent)]
    Store(#[from] StoreError),
}
