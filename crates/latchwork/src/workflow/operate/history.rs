//! The history of an execution: every operation of its journal with its times, attempts and outcome. It can be written
//! to a file as JSON, and new code can be checked against it.

use std::collections::BTreeMap;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::record::{Record, Unreadable};
use crate::store::{Generation, Item, Key, Space, Store, Timestamp, View};
use crate::workflow::ctx::step::read_failure;
use crate::workflow::engine::{Engine, EngineSpaces};
use crate::workflow::journal::place::{BranchPath, Place};
use crate::workflow::stored::keys::{read_place, run_key};
use crate::workflow::stored::record::{
    Entry, EntryState, Execution, Intent, Kind, StoredStatus, fetch_execution, next_page,
};
use crate::workflow::{ExecutionId, Failure, Result, WorkflowError};

/// How many operations one read returns.
const BATCH: usize = 1000;

/// The history of an execution so far.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct History {
    /// The execution's id.
    pub id: String,
    /// The workflow's name.
    pub workflow: String,
    /// The input that it was started or continued with.
    pub input: Value,
    /// When it was started.
    #[serde(rename = "started_us")]
    pub started: Timestamp,
    /// When its record last changed. For an execution that has ended, this is its end.
    #[serde(rename = "changed_us")]
    pub changed: Timestamp,
    /// How often it was continued as new. Earlier runs are not kept.
    pub run: u32,
    /// Its state.
    pub state: ExecutionState,
    /// The operations in the order of the code.
    pub operations: Vec<Operation>,
}

/// The state of an execution.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ExecutionState {
    /// Running, or about to run.
    Running,
    /// Out of memory until a timer is due.
    Waiting,
    /// Waits for an operator, for this reason.
    Parked(String),
    /// Completed with this output.
    Completed(Value),
    /// Failed.
    Failed(Failure),
    /// Ran longer than its time limit.
    TimedOut,
    /// Was cancelled, for this reason.
    Cancelled(String),
}

/// An operation of an execution.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Operation {
    /// The branch of the code that it is in, such as `4.1/` for the second branch of the fork at place 4. Empty for the
    /// function itself.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub branch: String,
    /// Its place in the branch, counted from 0.
    pub place: u32,
    /// Its kind.
    pub kind: Kind,
    /// Its name, if it has one.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub name: String,
    /// A hash of its input.
    #[serde(default, skip_serializing_if = "is_default")]
    pub argument: u64,
    /// When the code reached it.
    #[serde(rename = "since_us")]
    pub since: Timestamp,
    /// When its last record was committed.
    #[serde(rename = "recorded_us")]
    pub recorded: Timestamp,
    /// How often its body was started.
    #[serde(default, skip_serializing_if = "is_default")]
    pub attempts: u32,
    /// The last attempts that failed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failures: Vec<AttemptFailure>,
    /// The progress that the last attempt reported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub progress: Option<Value>,
    /// Its state.
    pub state: OperationState,
}

/// An attempt that failed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct AttemptFailure {
    /// Which attempt, counted from 1.
    pub attempt: u32,
    /// When it failed.
    #[serde(rename = "at_us")]
    pub at: Timestamp,
    /// The message of the failure.
    pub message: String,
}

/// The state of an operation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum OperationState {
    /// Its body was started.
    Begun,
    /// The last attempt failed. There will be another one.
    Retrying {
        /// Why it failed.
        failure: Failure,
        /// When the next attempt is due.
        #[serde(rename = "next_us")]
        next: Timestamp,
    },
    /// It waits, or waited, until then.
    Until(Timestamp),
    /// It returned this value.
    Done(Value),
    /// It failed, and is not tried again.
    Failed(Failure),
    /// It read this state of a slot.
    Saw {
        /// The slot's rev; `None` if it was never written.
        rev: Option<u64>,
        /// `None` if the slot had no value.
        state: Option<Value>,
    },
    /// It waits for a lock.
    Queued {
        /// The fencing token that it will get.
        token: u64,
        /// The latest end of the wait.
        #[serde(rename = "until_us")]
        until: Option<Timestamp>,
    },
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

pub(crate) fn value(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|_| Value::String(text.into()))
}

impl ExecutionState {
    pub(crate) fn of(status: &StoredStatus) -> ExecutionState {
        match status {
            StoredStatus::Running => ExecutionState::Running,
            StoredStatus::Waiting => ExecutionState::Waiting,
            StoredStatus::Parked(reason) => ExecutionState::Parked(reason.clone()),
            StoredStatus::Completed(output) => ExecutionState::Completed(value(output)),
            StoredStatus::Failed(failure) => ExecutionState::Failed(read_failure(failure)),
            StoredStatus::TimedOut => ExecutionState::TimedOut,
            StoredStatus::Cancelled(reason) => ExecutionState::Cancelled(reason.clone()),
        }
    }
}

impl Engine {
    /// Returns the history of an execution so far.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// let history = engine.history("order-7").await?;
    /// println!("{:?}", history.steps());
    /// # Ok(()) }
    /// ```
    pub async fn history(&self, id: impl Into<ExecutionId>) -> Result<History> {
        let id = id.into();
        let found = History::of(self.store(), id.clone()).await?;
        found.ok_or(WorkflowError::NotFound { id })
    }
}

impl History {
    /// Returns the history of an execution so far, from a store. Needs no engine, and changes nothing.
    ///
    /// ```
    /// # use latchwork::store::Store;
    /// # use latchwork::workflow::{History, Result};
    /// # async fn example(store: Store) -> Result<()> {
    /// if let Some(history) = History::of(&store, "order-7").await? {
    ///     println!("{}", serde_json::to_string(&history).unwrap_or_default());
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn of(store: &Store, id: impl Into<ExecutionId>) -> Result<Option<History>> {
        let id = id.into();
        let Some(spaces) = EngineSpaces::find(store).await? else { return Ok(None) };
        let view = store.view().await?;
        let Some((execution, item)) = fetch_execution(&view, &spaces.executions, &id).await? else { return Ok(None) };
        let entries = entries(&view, &spaces.journal, &id, &execution, &item).await?;
        let operations = entries.into_iter().map(|(place, it)| Operation::new(&place, it.entry, it.time)).collect();
        Ok(Some(History::new(&id, execution, item.time, operations)))
    }

    /// Returns the ids of all executions in a store, and the names of their workflows.
    ///
    /// ```
    /// # use latchwork::store::Store;
    /// # use latchwork::workflow::{History, Result};
    /// # async fn example(store: Store) -> Result<()> {
    /// for (id, workflow) in History::ids(&store).await? {
    ///     println!("{id} of workflow {workflow}");
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn ids(store: &Store) -> Result<Vec<(ExecutionId, String)>> {
        let Some(spaces) = EngineSpaces::find(store).await? else { return Ok(Vec::new()) };
        let view = store.view().await?;
        let (mut rest, mut ids) = (spaces.executions.all(), Vec::new());
        while let Some(found) = next_page(&view, &mut rest, BATCH).await? {
            for (key, item) in &found {
                let id: ExecutionId = String::from_utf8_lossy(key.bytes()).as_ref().into();
                let execution = Execution::decode(&item.value).map_err(|why| why.at(format!("execution {id:?}")))?;
                ids.push((id, execution.workflow));
            }
        }
        Ok(ids)
    }

    fn new(id: &ExecutionId, execution: Execution, changed: Timestamp, operations: Vec<Operation>) -> History {
        History {
            id: id.to_string(),
            workflow: execution.workflow,
            input: value(&execution.input),
            started: Timestamp(execution.started_us),
            changed,
            run: execution.run,
            state: ExecutionState::of(&execution.status),
            operations,
        }
    }

    /// The names of the steps, in the order in which the code reached them.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// assert_eq!(engine.history("order-7").await?.steps(), ["charge", "ship"]);
    /// # Ok(()) }
    /// ```
    pub fn steps(&self) -> Vec<&str> {
        let steps = self.operations.iter().filter(|operation| operation.kind == Kind::Step);
        steps.map(|operation| operation.name.as_str()).collect()
    }

    /// The first operation of this kind and name.
    ///
    /// ```
    /// # use latchwork::workflow::{History, Kind};
    /// # fn example(history: History) {
    /// if let Some(charge) = history.find(Kind::Step, "charge") {
    ///     println!("{} attempts: {}", charge.attempts, charge.state);
    /// }
    /// # }
    /// ```
    pub fn find(&self, kind: Kind, name: &str) -> Option<&Operation> {
        self.operations.iter().find(|operation| (operation.kind, operation.name.as_str()) == (kind, name))
    }
}

/// The record of an operation in a journal, and when it was written.
pub(crate) struct RecordedEntry {
    pub(crate) entry: Entry,
    pub(crate) time: Timestamp,
    pub(crate) generation: Generation,
}

impl RecordedEntry {
    fn by(item: &Item, entry: Entry) -> RecordedEntry {
        RecordedEntry { entry, time: item.time, generation: item.generation }
    }
}

/// Returns the entries in the journal of an execution, in the order of the code.
pub(crate) async fn entries(
    view: &View,
    journal: &Space,
    id: &ExecutionId,
    execution: &Execution,
    own: &Item,
) -> Result<Vec<(Place, RecordedEntry)>> {
    let mut entries = BTreeMap::new();
    let first = execution.intent.clone().and_then(Intent::into_entry);
    let first = first.map(|first| (BranchPath::default().at(0), RecordedEntry::by(own, first)));
    // A step that was started for the first time has no record of its own: the record before it holds its intent.
    let mut intents: Vec<(Place, RecordedEntry)> = first.into_iter().collect();
    let mut rest = journal.prefix(run_key(id, execution.run));
    while let Some(found) = next_page(view, &mut rest, BATCH).await? {
        for (key, item) in &found {
            let (place, entry, next) = read_entry(id, key, &item.value)?;
            intents.extend(next.map(|next| (place.branch.at(place.number + 1), RecordedEntry::by(item, next))));
            entries.insert(place, RecordedEntry::by(item, entry));
        }
    }
    for (place, entry) in &execution.tail {
        entries.insert(place.clone(), RecordedEntry::by(own, entry.clone()));
    }
    for (place, entry) in intents {
        entries.entry(place).or_insert(entry);
    }
    let mut entries: Vec<_> = entries.into_iter().collect();
    // Blocks are found by name: their order is that in which they were reached.
    let named = entries.iter().any(|(place, _)| place.branch.is_named());
    let since = |it: &RecordedEntry| if named { it.entry.since_us } else { 0 };
    entries.sort_by_cached_key(|(place, it)| (since(it), place.along()));
    Ok(entries)
}

/// Reads a record of the journal: the operation, and the intent of the next operation if the record holds one.
pub(crate) fn read_entry(id: &ExecutionId, key: &Key, value: &[u8]) -> Result<(Place, Entry, Option<Entry>)> {
    let damaged = || WorkflowError::corrupt(format!("an operation of execution {id:?}"));
    let place = read_place(id, key.bytes()).ok_or_else(damaged)?;
    let at = |why: Unreadable| why.at(format!("operation {place} of execution {id:?}"));
    let (entry, next) = Entry::decode_with(value).map_err(at)?;
    Ok((place, entry, next))
}

impl Operation {
    pub(crate) fn new(place: &Place, entry: Entry, recorded: Timestamp) -> Operation {
        let state = match entry.state {
            EntryState::Begun | EntryState::Anew => OperationState::Begun,
            EntryState::Failed { failure, next_us } => {
                OperationState::Retrying { failure: read_failure(&failure), next: Timestamp(next_us) }
            }
            EntryState::Until(until) => OperationState::Until(Timestamp(until)),
            EntryState::Done(text) => OperationState::Done(value(&text)),
            EntryState::Gave(failure) => OperationState::Failed(read_failure(&failure)),
            EntryState::Saw { rev, state } => OperationState::Saw { rev, state: state.as_deref().map(value) },
            EntryState::Queued { ticket, until_us } => {
                OperationState::Queued { token: ticket, until: until_us.map(Timestamp) }
            }
        };
        let failures = entry.failures.into_iter().map(|failed| AttemptFailure {
            attempt: failed.attempt,
            at: Timestamp(failed.at_us),
            message: failed.message,
        });
        Operation {
            branch: place.branch.to_string(),
            place: place.number,
            progress: entry.progress.as_deref().map(value),
            kind: entry.kind,
            name: entry.name.to_string(),
            argument: entry.argument,
            since: Timestamp(entry.since_us),
            recorded,
            attempts: entry.attempts,
            failures: failures.collect(),
            state,
        }
    }

    /// The value that it returned, if it is done and the value fits the type.
    ///
    /// ```
    /// # use latchwork::workflow::{History, Kind};
    /// # fn example(history: History) {
    /// let paid = history.find(Kind::Step, "charge").and_then(|charge| charge.value::<u64>());
    /// # }
    /// ```
    pub fn value<T: DeserializeOwned>(&self) -> Option<T> {
        match &self.state {
            OperationState::Done(value) => T::deserialize(value).ok(),
            _ => None,
        }
    }
}
