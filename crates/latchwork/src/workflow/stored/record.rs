//! What is stored of executions: the records and their keys.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::node::write_text;
use crate::record::{self, Record, Unreadable, stored};
use crate::store::{Bytes, Item, Key, Order, Range, Space, StoreError, Timestamp, Uuid, View};
use crate::workflow::journal::place::{Path, Place};
use crate::workflow::{ExecutionId, Failure, WorkflowError};

/// An execution.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub(crate) struct Execution {
    /// The name of the definition.
    pub(crate) workflow: String,
    pub(crate) status: Status,
    /// JSON text.
    pub(crate) input: String,
    /// When it is to be ended for having taken too long; microseconds.
    pub(crate) deadline_us: Option<u64>,
    /// The timer that is set for it, which goes with the next commit.
    pub(crate) timer_us: Option<u64>,
    pub(crate) started_us: u64,
    /// How often it was continued as new. Each time the journal starts anew.
    pub(crate) run: u32,
    /// How often an operator has let it go on. Each time, a step that was begun as often as it may be has one more try.
    pub(crate) resumes: u32,
    /// The idempotency key of its start.
    pub(crate) key: Option<String>,
    /// The first operation, if that is a step and has no record of its own.
    pub(crate) intent: Option<Intent>,
    /// The last operations with their places, if they came with the end and are small: they have no records of
    /// their own.
    pub(crate) tail: Vec<(Place, Entry)>,
    /// What it waits for, while it is out of memory.
    pub(crate) waits: Vec<Wait>,
    /// The execution that has started it.
    pub(crate) parent: Option<Parent>,
    /// Why it is to be cancelled, if it is.
    pub(crate) cancel: Option<String>,
    pub(crate) labels: Labels,
    /// The execution whose results it has kept, if it is a fork.
    pub(crate) forked: Option<String>,
    /// When it is to be removed, if it has ended; microseconds.
    pub(crate) removal_us: Option<u64>,
    /// When it begins, if it was started to do so later; microseconds.
    pub(crate) begins_us: Option<u64>,
    /// Whether it has started children.
    pub(crate) has_children: bool,
    /// Whether it has asked for locks.
    pub(crate) has_locks: bool,
    /// The schedule that has started it.
    pub(crate) schedule: Option<String>,
    /// How it was admitted, if its workflow has limits.
    pub(crate) admission: Option<Box<Admission>>,
    /// Whether another start takes its place when it ends, and how it is made to.
    pub(crate) superseded: Option<Supersede>,
    /// Whether it has opened reviews.
    pub(crate) has_reviews: bool,
}

/// What becomes of an execution whose place another start of its id takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Supersede {
    /// It is cancelled, and may clean up. Then the other takes its place.
    Cancel,
    /// It is ended at once, without any more of its code being run.
    Terminate,
}

/// How an execution was admitted under the limits of its workflow.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub(crate) struct Admission {
    /// The limits that it needs a permit of, in the order in which it takes them.
    pub(crate) gates: Vec<Needed>,
    /// How many of the permits it holds. They are given back with its end.
    pub(crate) passed: u8,
    /// Its place in the line for the next of them, if it waits there.
    pub(crate) ticket: Option<Ticket>,
    /// What it gathers until it begins.
    pub(crate) gathers: Option<Gathers>,
}

/// A limit that an execution needs a permit of.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct Needed {
    /// None for that of the workflow as a whole. It is computed once, at the start.
    pub(crate) key: Option<String>,
    /// The number of its permit, if it holds one.
    pub(crate) permit: u64,
}

/// A place in a line. The lowest is served first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default, Serialize, Deserialize)]
pub(crate) struct Ticket {
    pub(crate) rank: u64,
    /// In the order in which they came.
    pub(crate) number: u64,
}

/// What an execution gathers that has not begun.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Gathers {
    /// The key under which starts are gathered.
    pub(crate) key: Option<String>,
    /// When the first of them came; microseconds.
    pub(crate) since_us: u64,
    /// For a batch: how many inputs there are, and how many bytes they take. They are kept beside.
    pub(crate) batch: Option<(u32, u64)>,
}

/// The execution that has started another, and what its end means for that.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Parent {
    pub(crate) id: ExecutionId,
    pub(crate) close: Close,
    /// The one that nobody has started so, and that is the first of all its ancestors.
    pub(crate) root: ExecutionId,
    /// Tells this child from others that the parent, or one that had its id before, has started under the same id.
    pub(crate) birth: u64,
}

/// What becomes of a child when its parent ends before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Close {
    /// The child is cancelled.
    #[default]
    Cancel,
    /// The parent does not end before the child has.
    Await,
    /// The child goes on by itself.
    Abandon,
}

/// What executions can be found by.
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
    /// A time, in microseconds since 1970.
    Time(u64),
}

/// Something that an execution waits for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Wait {
    /// What it is.
    pub what: WaitsFor,
    /// Since when, in microseconds since 1970.
    pub since_us: u64,
    /// Until when at the most, in microseconds since 1970.
    pub until_us: Option<u64>,
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
    /// Somebody who completes what was asked for under this name.
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
    /// A person who decides the review of this name.
    Review(String),
}

impl WaitsFor {
    /// Whether it is told of by a message.
    pub(crate) fn is_message(&self) -> bool {
        use WaitsFor::{Child, Completion, Lock, Review, Signal, Update};
        matches!(self, Signal(_) | Update(_) | Child(_) | Completion(_) | Lock(_) | Review(_))
    }

    /// The same, without a name where messages do not tell it.
    pub(crate) fn without_name(&self) -> WaitsFor {
        match self {
            // A decision completes what waits for it, as a token does.
            WaitsFor::Completion(_) | WaitsFor::Review(_) => WaitsFor::Completion(String::new()),
            WaitsFor::Retry(_) => WaitsFor::Retry(String::new()),
            other => other.clone(),
        }
    }
}

/// How an execution is.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub(crate) enum Status {
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

impl Status {
    pub(crate) fn is_terminal(&self) -> bool {
        !matches!(self, Status::Running | Status::Waiting | Status::Parked(_))
    }
}

impl Execution {
    /// One that is about to start.
    pub(crate) fn new(workflow: impl Into<String>, input: String, started: Timestamp) -> Execution {
        Execution { workflow: workflow.into(), input, started_us: started.0, ..Execution::default() }
    }
}

/// An operation in an execution's journal.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Entry {
    pub(crate) kind: Kind,
    pub(crate) name: Arc<str>,
    /// A hash of what the operation was given.
    pub(crate) argument: u64,
    /// When the code came to it; microseconds.
    pub(crate) since_us: u64,
    /// How often the body was begun.
    pub(crate) attempts: u32,
    /// The last attempts that failed.
    pub(crate) failures: Vec<FailedAttempt>,
    /// What the last attempt has told of itself; JSON text.
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

/// Stands for whatever an operation is given: in a fork, whose input is another.
pub(crate) const ANYTHING: u64 = u64::MAX;

/// The longest result of an operation, in bytes, that can be part of another record; and how many operations can.
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

    /// How many bytes it takes, about.
    pub(crate) fn bytes(&self) -> usize {
        let text = match &self.state {
            EntryState::Done(text) | EntryState::Gave(text) | EntryState::Failed { failure: text, .. } => text.len(),
            EntryState::Saw { state, .. } => state.as_ref().map_or(0, String::len),
            EntryState::Begun | EntryState::Anew | EntryState::Until(_) | EntryState::Queued { .. } => 0,
        };
        text + self.progress.as_ref().map_or(0, String::len) + 128
    }

    /// Whether it takes so little that it can be part of another record.
    pub(crate) fn is_small(&self) -> bool {
        self.failures.is_empty() && matches!(&self.state, EntryState::Done(text) if text.len() <= SMALL)
    }

    /// Whether this may be what it was given.
    pub(crate) fn is_given(&self, argument: u64) -> bool {
        self.argument == argument || self.argument == ANYTHING
    }

    /// Whether it is a step that is begun for the first time: then the record of what comes before it can tell of it.
    pub(crate) fn is_intent(&self) -> bool {
        self.kind == Kind::Step && self.attempts == 1 && self.state == EntryState::Begun && self.failures.is_empty()
    }

    /// The record of an operation, and of the intent to do the next.
    pub(crate) fn encode_with(&self, next: Option<&Entry>) -> Bytes {
        record::write::<Told>(&(self, next.map(Intent::of)))
    }

    /// The operation that a record tells of, and the one that was to be next, if it tells of that.
    pub(crate) fn decode_with(bytes: &[u8]) -> Result<(Entry, Option<Entry>), Unreadable> {
        let Told(entry, next) = Told::decode(bytes)?;
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

/// What an operation is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Kind {
    /// A step, whose body runs outside.
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
    /// A look whether the execution is cancelled.
    IsCancelled,
    /// A read or change of a slot.
    Slot,
    /// A transaction.
    Transaction,
    /// Branches that all are waited for.
    Join,
    /// Branches of which the first to end is the one that counts.
    Race,
    /// The receipt of a signal.
    Signal,
    /// The receipt of an update.
    Update,
    /// The answer to an update.
    Answer,
    /// A value for those who ask.
    Publish,
    /// A look at a published value, or a wait for one.
    Published,
    /// The start of a child.
    Child,
    /// The end of a child.
    ChildEnd,
    /// A signal to another execution, or its cancellation.
    Send,
    /// A token by which somebody else completes something.
    Token,
    /// What was completed by a token.
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
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // As it is stored, in words.
        let name = serde_json::to_string(self).unwrap_or_default();
        f.write_str(&name.trim_matches('"').replace('_', " "))
    }
}

/// How far an operation is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum EntryState {
    /// The body was begun, as often as is counted.
    Begun,
    /// The last attempt failed; the next is due then, in microseconds. The failure is JSON text.
    Failed { failure: String, next_us: u64 },
    /// Waits until then, in microseconds.
    Until(u64),
    /// JSON text.
    Done(String),
    /// The failure is JSON text.
    Gave(String),
    /// The state that was read, JSON text, and its rev. What the code made of it, it makes again.
    Saw { rev: Option<u64>, state: Option<String> },
    /// Waits for a lock under this ticket, until then at the most, in microseconds.
    Queued { ticket: u64, until_us: Option<u64> },
    /// A lock that the source of a fork held: it is acquired anew, however long that takes.
    Anew,
}

/// A step that is begun for the first time, in the record of the operation before it. It has a record of its own from
/// its end on, or from its second attempt.
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

    /// That of the first operation, if it is a step, of an execution that a commit of another's sets running: the body
    /// runs without a commit before it. If the process ends before that, the attempt counts all the same.
    pub(crate) fn of_first(since: Timestamp) -> Intent {
        Intent { name: "".into(), argument: ANYTHING, since_us: since.0 }
    }

    /// Since when a step may be under way that is not known.
    pub(crate) fn since_of_first(&self) -> Option<u64> {
        (self.name.is_empty() && self.argument == ANYTHING).then_some(self.since_us)
    }

    /// What the journal would hold of it; nothing if it is not known.
    pub(crate) fn into_entry(self) -> Option<Entry> {
        if self.since_of_first().is_some() {
            return None;
        }
        let entry = Entry::new(Kind::Step, self.name, self.argument, Timestamp(self.since_us), EntryState::Begun);
        Some(Entry { attempts: 1, ..entry })
    }
}

/// What is to be removed when its time has come.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum Removal {
    /// The execution and everything it has left.
    Execution,
    /// The journals of all runs before this one.
    Before(u32),
}

/// A start that was given an idempotency key.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Keyed {
    pub(crate) id: String,
    /// A hash of what it was started with.
    pub(crate) input: u64,
    /// Which input of a batch it is.
    pub(crate) item: Option<u32>,
}

/// What a record of the journal tells: an operation, and the intent to do the next.
#[derive(Serialize, Deserialize)]
struct Told(Entry, Option<Intent>);

stored!(Execution => [b"\0\0\0\0"], Removal, Keyed => [b"\0"], Told => [b""]);

/// The record under a key, as a view shows it. One that cannot be read is an error that tells its place.
pub(crate) async fn fetch<R: Record>(
    view: &View,
    key: &Key,
    place: impl FnOnce() -> String,
) -> Result<Option<(R, Item)>, WorkflowError> {
    let Some(item) = view.get(key).await? else { return Ok(None) };
    let record = R::decode(&item.value).map_err(|why| why.at(place()))?;
    Ok(Some((record, item)))
}

/// The next records of a range, which is then what is left of it. None if there are no more.
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

/// The record of an execution, as a view shows it.
pub(crate) async fn fetch_execution(
    view: &View,
    executions: &Space,
    id: &ExecutionId,
) -> Result<Option<(Execution, Item)>, WorkflowError> {
    fetch(view, &executions.key(id.as_bytes()), || format!("execution {id:?}")).await
}

/// The longest text that is kept of a failure, in bytes.
const FAILURE_BYTES: usize = 64 << 10;

pub(crate) fn failure_text(failure: &Failure) -> String {
    let text = |failure: &Failure| serde_json::to_string(failure).expect("a failure can be written as JSON");
    let whole = text(failure);
    if whole.len() <= FAILURE_BYTES { whole } else { text(&failure.shortened(FAILURE_BYTES / 8)) }
}

/// The beginning of a text, of at most so many bytes.
pub(crate) fn shortened(text: &str, bytes: usize) -> &str {
    &text[..text.floor_char_boundary(bytes)]
}

/// The key of a journal entry: the id's length and the id, the run, the place.
pub(crate) fn journal_key(id: &ExecutionId, run: u32, place: &Place) -> Vec<u8> {
    let mut key = branch_key(id, run, &place.branch);
    key.extend_from_slice(&place.number.to_be_bytes());
    key
}

/// What the journal keys of a branch start with.
pub(crate) fn branch_key(id: &ExecutionId, run: u32, branch: &Path) -> Vec<u8> {
    let mut key = run_key(id, run);
    branch.write(&mut key);
    key
}

/// What the journal keys of a run start with.
pub(crate) fn run_key(id: &ExecutionId, run: u32) -> Vec<u8> {
    let mut key = id_key(id);
    key.extend_from_slice(&run.to_be_bytes());
    key
}

/// The place that the key of a journal entry of this execution tells.
pub(crate) fn read_place(id: &ExecutionId, key: &[u8]) -> Option<Place> {
    Place::read(key.get(id.len() + 6..)?)
}

/// What all keys of an execution start with that go on with something else.
pub(crate) fn id_key(id: &ExecutionId) -> Vec<u8> {
    let mut key = Vec::with_capacity(id.len() + 32);
    write_text(&mut key, id);
    key
}

/// The key of an idempotency key of a workflow's starts.
pub(crate) fn keyed_key(workflow: &str, key: &str) -> Vec<u8> {
    let mut out = Vec::with_capacity(workflow.len() + key.len() + 2);
    write_text(&mut out, workflow);
    out.extend_from_slice(key.as_bytes());
    out
}

/// The key of an open review: the names of the workflow and of the review, its token, the execution's id.
pub(crate) fn review_key(workflow: &str, name: &str, token: Uuid, id: &ExecutionId) -> Vec<u8> {
    let mut key = Vec::with_capacity(workflow.len() + name.len() + id.len() + 20);
    write_text(&mut key, workflow);
    write_text(&mut key, name);
    key.extend_from_slice(token.as_bytes());
    key.extend_from_slice(id.as_bytes());
    key
}

/// How often an execution was taken up without coming to anything: the value of an alarm or of an active execution.
pub(crate) fn read_count(value: &[u8]) -> u32 {
    value.try_into().map_or(0, u32::from_be_bytes)
}
