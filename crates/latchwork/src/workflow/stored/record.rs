//! The stored records of executions and the keys of these records.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::record::{self, Record, Unreadable, stored};
use crate::store::{Bytes, Item, Key, Order, Range, Space, StoreError, Timestamp, Uuid, View};
use crate::workflow::definition::FIRST_VERSION;
use crate::workflow::journal::place::Place;
use crate::workflow::{ExecutionId, Failure, WorkflowError};

/// An execution.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub(crate) struct Execution {
    /// The name of the definition.
    pub(crate) workflow: String,
    pub(crate) status: StoredStatus,
    /// JSON text.
    pub(crate) input: String,
    /// When it times out; microseconds.
    pub(crate) deadline_us: Option<u64>,
    /// The timer that is set for it. The next commit of the running execution deletes it.
    pub(crate) timer_us: Option<u64>,
    pub(crate) started_us: u64,
    /// How often it was continued as new. Each run has a journal of its own.
    pub(crate) run: u32,
    /// How often an operator has resumed it. Each resume allows one more attempt of a step that has used all its
    /// attempts.
    pub(crate) resumes: u32,
    /// The idempotency key of its start.
    pub(crate) key: Option<String>,
    /// The first operation, if it is a step and has no entry of its own.
    pub(crate) intent: Option<Intent>,
    /// The last operations with their places, if they were committed with the end and are small: they have no entries
    /// of their own.
    pub(crate) tail: Vec<(Place, Entry)>,
    /// What it waits for while it is out of memory.
    pub(crate) waits: Vec<Wait>,
    /// The execution that started it.
    pub(crate) parent: Option<Parent>,
    /// Why it is to be cancelled, if it is.
    pub(crate) cancel: Option<String>,
    pub(crate) labels: Labels,
    /// The execution that it was forked from.
    pub(crate) forked: Option<String>,
    /// When it is due for removal, if it has ended; microseconds.
    pub(crate) removal_us: Option<u64>,
    /// When it begins, if it was started to begin later; microseconds.
    pub(crate) begins_us: Option<u64>,
    /// True if it has started children.
    pub(crate) has_children: bool,
    /// True if it has requested locks.
    pub(crate) has_locks: bool,
    /// The schedule that started it.
    pub(crate) schedule: Option<String>,
    /// How it was admitted, if its workflow has limits.
    pub(crate) admission: Option<Box<Admission>>,
    /// Set if another start takes its place when it ends; says how it is ended.
    pub(crate) superseded: Option<Supersede>,
    /// True if it has opened reviews.
    pub(crate) has_reviews: bool,
    /// The version of the definition that it was started under.
    pub(crate) version: u32,
    /// The node that runs it, if its owner has lent it to a node that can.
    pub(crate) runner: Option<Uuid>,
}

/// What happens to an execution when another start of its id takes its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Supersede {
    /// It is cancelled, and may clean up. Then the other start takes its place.
    Cancel,
    /// It is ended at once, and its code does not run any more.
    Terminate,
}

/// How an execution was admitted under the limits of its workflow.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub(crate) struct Admission {
    /// The limits that it needs a permit of, in the order in which it takes the permits.
    pub(crate) gates: Vec<Needed>,
    /// How many of the permits it holds. Its end gives them back.
    pub(crate) passed: u8,
    /// Its position in the queue for the next permit, if it waits there.
    pub(crate) position: Option<StoredPosition>,
    /// What it gathers until it begins.
    pub(crate) gathers: Option<Gathers>,
}

/// A limit that an execution needs a permit of.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct Needed {
    /// The key of the limit; none for the limit of the whole workflow. It is computed once, at the start.
    pub(crate) key: Option<String>,
    /// The number of its permit, if it holds one.
    pub(crate) permit: u64,
}

/// A position in a queue. The lowest is served first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
pub(crate) struct StoredPosition {
    pub(crate) rank: u64,
    /// In order of arrival.
    pub(crate) number: u64,
}

/// What an execution that has not begun gathers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Gathers {
    /// The key under which starts are gathered.
    pub(crate) key: Option<String>,
    /// When the first start was gathered; microseconds.
    pub(crate) since_us: u64,
    /// For a batch: how many inputs there are, and how many bytes they take. The inputs have records of their own.
    pub(crate) batch: Option<(u32, u64)>,
}

/// The parent of an execution, and what the parent's end means for it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Parent {
    pub(crate) id: ExecutionId,
    pub(crate) close: Close,
    /// The root of the tree: the ancestor that has no parent.
    pub(crate) root: ExecutionId,
    /// Distinguishes this child from other children that were started under the same id, also by an earlier parent.
    pub(crate) birth: u64,
}

/// What happens to a child when its parent ends first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Close {
    /// The child is cancelled.
    #[default]
    Cancel,
    /// The parent does not end before the child has.
    Await,
    /// The child continues on its own.
    Abandon,
}

/// The tags and attributes that executions can be found by.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub(crate) struct Labels {
    pub(crate) tags: BTreeSet<String>,
    pub(crate) attributes: BTreeMap<String, Attribute>,
}

/// The value of a search attribute.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Attribute {
    /// Yes or no.
    Boolean(bool),
    /// A whole number.
    Integer(i64),
    /// A number.
    Real(f64),
    /// A text.
    Text(String),
    /// A time.
    Time(Timestamp),
}

/// Something that an execution waits for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Wait {
    /// What it is.
    pub what: WaitsFor,
    /// Since when.
    #[serde(rename = "since_us")]
    pub since: Timestamp,
    /// Until when at most.
    #[serde(rename = "until_us")]
    pub until: Option<Timestamp>,
}

/// What an execution can wait for.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum WaitsFor {
    /// A time.
    Timer,
    /// The next attempt at a step of this name, after one that failed.
    Retry(String),
    /// A signal of this name.
    Signal(String),
    /// An update of this name.
    Update(String),
    /// The end of this child.
    Child(String),
    /// A completion of the token that was created under this name.
    Completion(String),
    /// A value that it publishes itself, under this name.
    Published(String),
    /// The lock of this name.
    Lock(String),
    /// The body of a step that runs.
    Step(String),
    /// A transaction, a change of a slot, or a commit.
    Store,
    /// A permit of a limit of its workflow: this is the limit's key, or the workflow's name.
    Admission(String),
    /// The decision of the review of this name.
    Review(String),
}

impl WaitsFor {
    /// True if a message ends this wait.
    pub(crate) fn is_message(&self) -> bool {
        use WaitsFor::{Child, Completion, Lock, Review, Signal, Update};
        matches!(self, Signal(_) | Update(_) | Child(_) | Completion(_) | Lock(_) | Review(_))
    }

    /// Drops the name if messages do not carry it.
    pub(crate) fn without_name(&self) -> WaitsFor {
        match self {
            // A decision completes a review as a token completes its wait.
            WaitsFor::Completion(_) | WaitsFor::Review(_) => WaitsFor::Completion(String::new()),
            WaitsFor::Retry(_) => WaitsFor::Retry(String::new()),
            other => other.clone(),
        }
    }
}

/// The status of an execution.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub(crate) enum StoredStatus {
    #[default]
    Running,
    /// Out of memory until the timer fires.
    Waiting,
    /// Waits for an operator. The reason is text.
    Parked(String),
    /// JSON text.
    Completed(String),
    /// JSON text of a [`Failure`].
    Failed(String),
    TimedOut,
    /// The reason is text.
    Cancelled(String),
}

impl StoredStatus {
    pub(crate) fn is_terminal(&self) -> bool {
        !matches!(self, StoredStatus::Running | StoredStatus::Waiting | StoredStatus::Parked(_))
    }
}

impl Execution {
    /// The record of a new execution.
    pub(crate) fn new(workflow: impl Into<String>, input: String, started: Timestamp) -> Execution {
        let version = FIRST_VERSION;
        Execution { workflow: workflow.into(), input, started_us: started.0, version, ..Execution::default() }
    }
}

/// An operation in an execution's journal.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Entry {
    pub(crate) kind: Kind,
    pub(crate) name: Arc<str>,
    /// A hash of the operation's arguments.
    pub(crate) argument: u64,
    /// When the code called it first; microseconds.
    pub(crate) since_us: u64,
    /// How often the body was begun.
    pub(crate) attempts: u32,
    /// The last attempts that failed.
    pub(crate) failures: Vec<FailedAttempt>,
    /// The progress that the last attempt has reported; JSON text.
    pub(crate) progress: Option<String>,
    pub(crate) state: EntryState,
}

/// An attempt that failed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct FailedAttempt {
    pub(crate) attempt: u32,
    pub(crate) at_us: u64,
    /// What went wrong, as text.
    pub(crate) message: String,
}

/// Stands for any arguments: used in a fork, whose input differs.
pub(crate) const ANYTHING: u64 = u64::MAX;

/// The longest result, in bytes, of an operation that is stored inside another record; and how many such operations a
/// record holds.
const SMALL: usize = 1024;
pub(crate) const TAIL: usize = 16;

/// How many failed attempts are kept.
const FAILURES: usize = 8;

impl Entry {
    pub(crate) fn new(
        kind: Kind,
        name: impl Into<Arc<str>>,
        argument: u64,
        since: Timestamp,
        state: EntryState,
    ) -> Entry {
        let (name, since_us, failures) = (name.into(), since.0, Vec::new());
        Entry { kind, name, argument, since_us, attempts: 0, failures, progress: None, state }
    }

    /// Approximately how many bytes it takes.
    pub(crate) fn bytes(&self) -> usize {
        let text = match &self.state {
            EntryState::Done(text) | EntryState::Gave(text) | EntryState::Failed { failure: text, .. } => text.len(),
            EntryState::Saw { state, .. } => state.as_ref().map_or(0, String::len),
            EntryState::Begun | EntryState::Anew | EntryState::Until(_) | EntryState::Queued { .. } => 0,
        };
        text + self.progress.as_ref().map_or(0, String::len) + 128
    }

    /// True if it is small enough to be stored inside another record.
    pub(crate) fn is_small(&self) -> bool {
        self.failures.is_empty() && matches!(&self.state, EntryState::Done(text) if text.len() <= SMALL)
    }

    /// True if these can be the operation's arguments.
    pub(crate) fn is_given(&self, argument: u64) -> bool {
        self.argument == argument || self.argument == ANYTHING
    }

    /// True for a step that has begun for the first time: the record before it can store it as an intent.
    pub(crate) fn is_intent(&self) -> bool {
        self.kind == Kind::Step && self.attempts == 1 && self.state == EntryState::Begun && self.failures.is_empty()
    }

    /// Encodes an operation, with the intent to do the next.
    pub(crate) fn encode_with(&self, next: Option<&Entry>) -> Bytes {
        record::write::<JournalRecord>(&(self, next.map(Intent::of)))
    }

    /// Decodes an operation, with the next one if the record stores it as an intent.
    pub(crate) fn decode_with(bytes: &[u8]) -> Result<(Entry, Option<Entry>), Unreadable> {
        let JournalRecord(entry, next) = JournalRecord::decode(bytes)?;
        Ok((entry, next.and_then(Intent::into_entry)))
    }

    pub(crate) fn failed(&mut self, failure: &Failure, at: Timestamp) {
        if self.failures.len() == FAILURES {
            self.failures.remove(0);
        }
        let message = shortened(failure.message(), 1024).to_string();
        self.failures.push(FailedAttempt { attempt: self.attempts, at_us: at.0, message });
    }
}

/// The kind of an operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Kind {
    /// A step, whose body runs outside of the journal.
    Step,
    /// A wait for a time.
    Sleep,
    /// The time of day.
    Now,
    /// A new id.
    Uuid,
    /// A random number.
    Random,
    /// The choice of a version of the code.
    Version,
    /// A check whether the execution is cancelled.
    IsCancelled,
    /// A read or change of a slot.
    Slot,
    /// A transaction.
    Transaction,
    /// Branches that are all awaited.
    Join,
    /// Branches of which only the first to end counts.
    Race,
    /// The receipt of a signal.
    Signal,
    /// The receipt of an update.
    Update,
    /// The answer to an update.
    Answer,
    /// A published value.
    Publish,
    /// A read of a published value, or a wait for one.
    Published,
    /// The start of a child.
    Child,
    /// The end of a child.
    ChildEnd,
    /// A signal to another execution, or its cancellation.
    Send,
    /// A token that code outside of the workflow completes.
    Token,
    /// The result that completed a token.
    Completion,
    /// A change of tags or attributes.
    Label,
    /// The acquisition of a lock.
    Lock,
    /// The release of a lock.
    Unlock,
    /// The opening of a review.
    Review,
    /// How a review was decided.
    Decision,
    /// A block of a flow with a body.
    Handler,
    /// A block of a flow that is a chain of blocks.
    Sequencer,
    /// A block of a flow that chooses another block.
    Router,
    /// A block of a flow that is repeated, or done for each of several items.
    Loop,
    /// What a function between the blocks of a flow has chosen.
    Choice,
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // The stored name, with spaces.
        let name = serde_json::to_string(self).unwrap_or_default();
        f.write_str(&name.trim_matches('"').replace('_', " "))
    }
}

/// The state of an operation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum EntryState {
    /// The body has begun, as often as `attempts` says.
    Begun,
    /// The last attempt failed; the next is due at this time, in microseconds. The failure is JSON text.
    Failed { failure: String, next_us: u64 },
    /// Waits until this time, in microseconds.
    Until(u64),
    /// JSON text.
    Done(String),
    /// The failure is JSON text.
    Gave(String),
    /// The state that was read, as JSON text, and its rev. A replay computes the rest again.
    Saw { rev: Option<u64>, state: Option<String> },
    /// Waits for a lock under this ticket, at most until this time, in microseconds.
    Queued { ticket: u64, until_us: Option<u64> },
    /// A lock that the source of a fork held: the fork acquires it again, however long that takes.
    Anew,
}

/// A step that has begun for the first time, stored in the record of the operation before it. It gets an entry of its
/// own when it ends or begins its second attempt.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Intent {
    name: Arc<str>,
    argument: u64,
    since_us: u64,
}

impl Intent {
    pub(crate) fn of(entry: &Entry) -> Intent {
        Intent { name: entry.name.clone(), argument: entry.argument, since_us: entry.since_us }
    }

    /// The intent of the first operation, if it is a step; the step is not known yet. The commit that makes an
    /// execution running stores it, and the body then runs without a further commit. The attempt counts even if the
    /// process ends before it.
    pub(crate) fn of_first(since: Timestamp) -> Intent {
        Intent { name: "".into(), argument: ANYTHING, since_us: since.0 }
    }

    /// When an unknown first step may have begun, if this is its intent.
    pub(crate) fn since_of_first(&self) -> Option<u64> {
        (self.name.is_empty() && self.argument == ANYTHING).then_some(self.since_us)
    }

    /// The entry of the step; none if the step is unknown.
    pub(crate) fn into_entry(self) -> Option<Entry> {
        if self.since_of_first().is_some() {
            return None;
        }
        let entry = Entry::new(Kind::Step, self.name, self.argument, Timestamp(self.since_us), EntryState::Begun);
        Some(Entry { attempts: 1, ..entry })
    }
}

/// What is removed at its due time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum Removal {
    /// The execution and all its stored data.
    Execution,
    /// The journals of all runs before this one.
    Before(u32),
}

/// A start under an idempotency key.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Keyed {
    pub(crate) id: String,
    /// A hash of its input.
    pub(crate) input: u64,
    /// The index of its input in a batch.
    pub(crate) item: Option<u32>,
}

/// A record of the journal: an operation, and the intent to do the next.
#[derive(Serialize, Deserialize)]
struct JournalRecord(Entry, Option<Intent>);

stored!(Execution => [b"\0\0\0\0", b"", b"\x01\0"], Removal, Keyed => [b"\0"], JournalRecord => [b"", b""]);

/// The record under a key, in a view. A record that cannot be read is an error that names its place.
pub(crate) async fn fetch<R: Record>(
    view: &View,
    key: &Key,
    place: impl FnOnce() -> String,
) -> Result<Option<(R, Item)>, WorkflowError> {
    let Some(item) = view.get(key).await? else { return Ok(None) };
    Ok(Some((decode(&item, place)?, item)))
}

fn decode<R: Record>(item: &Item, place: impl FnOnce() -> String) -> Result<R, WorkflowError> {
    Ok(R::decode(&item.value).map_err(|why| why.at(place()))?)
}

/// The record of an execution.
pub(crate) fn decode_execution(item: &Item, id: &ExecutionId) -> Result<Execution, WorkflowError> {
    decode(item, || format!("execution {id:?}"))
}

/// The next records of a range; `rest` becomes the remaining range. None if there are no more.
pub(crate) async fn next_page(
    view: &View,
    rest: &mut Range,
    most: usize,
) -> Result<Option<Vec<(Key, Item)>>, StoreError> {
    let found = view.scan(rest, Order::Ascending, most).await?;
    let Some((last, _)) = found.last() else { return Ok(None) };
    *rest = rest.after(last);
    Ok(Some(found))
}

/// The record of an execution, in a view.
pub(crate) async fn fetch_execution(
    view: &View,
    executions: &Space,
    id: &ExecutionId,
) -> Result<Option<(Execution, Item)>, WorkflowError> {
    fetch(view, &executions.key(id.as_bytes()), || format!("execution {id:?}")).await
}

/// The longest stored text of a failure, in bytes.
const FAILURE_BYTES: usize = 64 << 10;

pub(crate) fn failure_text(failure: &Failure) -> String {
    let text = |failure: &Failure| serde_json::to_string(failure).expect("a failure can be written as JSON");
    let whole = text(failure);
    if whole.len() <= FAILURE_BYTES { whole } else { text(&failure.shortened(FAILURE_BYTES / 8)) }
}

/// The beginning of a text, at most this many bytes long.
pub(crate) fn shortened(text: &str, bytes: usize) -> &str {
    &text[..text.floor_char_boundary(bytes)]
}
