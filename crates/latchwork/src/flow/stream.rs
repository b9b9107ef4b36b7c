//! The stream of a request: its events in order, numbered without gaps. An event is stored by the commit that it tells
//! of, and read by any number of readers from any position. Removed with the request.

use std::collections::VecDeque;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::flow::error::Result;
use crate::flow::request::shown;
use crate::flow::state::ToldChange;
use crate::json::json_record;
use crate::record::Record;
use crate::state::Event;
use crate::store::{Bytes, Order, Rev, Timestamp, View};
use crate::workflow::ctx::step::read_failure;
use crate::workflow::engine::EngineInner;
use crate::workflow::engine::listen::News;
use crate::workflow::journal::place::BranchPath;
use crate::workflow::stored::kept::Kept;
use crate::workflow::stored::record::{EntryState, Kind, StoredStatus};
use crate::workflow::{ExecutionId, ExecutionState, Failure, WorkflowError};

/// How many events are read at once.
const PAGE: usize = 256;

/// Something that happened to a request.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
#[non_exhaustive]
pub enum FlowEvent {
    /// The request has begun.
    RequestStarted {
        /// The flow and its action, as `flow/action`.
        action: String,
    },
    /// The request has ended. This is the last event.
    RequestEnded {
        /// How.
        state: ExecutionState,
    },
    /// A block has begun or ended.
    Step {
        /// The path of the block.
        path: String,
        /// Its kind.
        kind: Kind,
        /// What happened.
        state: StepState,
        /// Why it has failed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        error: Option<String>,
    },
    /// The request has failed. Its end follows.
    Error {
        /// The path of the block that has failed.
        path: String,
        /// The code of the failure; empty if it has none.
        code: String,
        /// The failure in words.
        message: String,
    },
    /// A block that has ended has changed a state, or a block has changed a stored state.
    StateChange {
        /// The path of the block that the state belongs to. For a stored state `session`, `user`, `org` or `request`.
        scope: String,
        /// For a stored state the id of its session, user, organisation or request.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        of: Option<String>,
        /// The name of the operation; `several` if the event tells of many changes.
        operation: String,
        /// The path in the state; empty for the whole state.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        path: String,
        /// The argument, or the merge patch from the state before to the state after. Null for a change of a stored
        /// state if an event cannot hold it.
        delta: Value,
        /// How often the state had been changed then. Changes of blocks that run side by side are told as each block
        /// ends. For a stored state the rev after the commit, which changes of several callers may share.
        rev: u64,
    },
    /// The state of a sequencer that has ended.
    StateSnapshot {
        /// The path of the sequencer.
        scope: String,
        /// The state, without transient fields.
        state: Value,
    },
    /// A question was asked.
    Suspension {
        /// The id of the question.
        id: String,
        /// The path of the block that asks.
        path: String,
        /// Why.
        reason: String,
    },
    /// A question was answered, or its time was up.
    Answer {
        /// The path of the block that asked.
        path: String,
        /// Why it was asked.
        reason: String,
        /// The answer; none if the time was up.
        answer: Option<String>,
        /// The person or program that answered.
        by: Option<String>,
    },
}

json_record!(FlowEvent);

/// What happened to a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum StepState {
    /// It has begun.
    Begun,
    /// It has ended with an output.
    Completed,
    /// It has failed.
    Failed,
    /// It did not end: another block has decided the run. What it has changed stays.
    GivenUp,
}

/// An event and its number.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct NumberedEvent {
    /// Its position in the stream, counted from 0.
    pub number: u64,
    /// When it was committed.
    pub at: Timestamp,
    /// What happened.
    pub event: FlowEvent,
}

impl FlowEvent {
    pub(crate) fn step(path: &BranchPath, kind: Kind, state: StepState) -> FlowEvent {
        FlowEvent::Step { path: shown(path), kind, state, error: None }
    }

    /// The end of a block, as its trace records it.
    pub(crate) fn ended(path: &BranchPath, kind: Kind, state: &EntryState) -> FlowEvent {
        let (state, error) = match state {
            EntryState::Gave(text) => (StepState::Failed, Some(read_failure(text).message().to_string())),
            _ => (StepState::Completed, None),
        };
        FlowEvent::Step { path: shown(path), kind, state, error }
    }

    /// The failure of a request whose outermost block has this path.
    pub(crate) fn error(outermost: &BranchPath, failure: &Failure) -> FlowEvent {
        let path = failure.step().map_or_else(|| shown(outermost), str::to_string);
        FlowEvent::Error { path, code: failure.code().into(), message: failure.message().into() }
    }

    pub(crate) fn changed(owner: &BranchPath, told: ToldChange) -> FlowEvent {
        let ToldChange { operation, path, delta, rev, .. } = told;
        FlowEvent::StateChange { scope: shown(owner), of: None, operation: operation.into(), path, delta, rev }
    }

    /// A change of a stored state, as it is stored: in at most `limit` bytes.
    pub(crate) fn stored_change((scope, of): (&str, &str), change: Event, rev: Rev, limit: usize) -> Bytes {
        let Event { operation, path, delta, .. } = change;
        let mut event =
            FlowEvent::StateChange { scope: scope.into(), of: Some(of.into()), operation, path, delta, rev: rev.0 };
        let encoded = event.encode();
        match &mut event {
            FlowEvent::StateChange { delta, .. } if encoded.len() > limit => *delta = Value::Null,
            _ => return encoded,
        }
        event.encode()
    }
}

/// The events of a request, in order. A reader that is slow delays nothing; one that was interrupted continues after
/// the last number it has seen.
pub struct Events {
    engine: Arc<EngineInner>,
    id: ExecutionId,
    next: u64,
    read: VecDeque<NumberedEvent>,
    is_over: bool,
}

impl Events {
    pub(crate) fn new(engine: Arc<EngineInner>, id: ExecutionId, next: u64) -> Events {
        Events { engine, id, next, read: VecDeque::new(), is_over: false }
    }

    /// The next event. Waits for it if the request has not ended; `None` after the end.
    ///
    /// ```
    /// # use latchwork::flow::{AnswerKind, Flows, RequestHandle, Result};
    /// # async fn example(flows: Flows, request: RequestHandle) -> Result<()> {
    /// let mut events = request.events();
    /// while let Some(event) = events.next().await? {
    ///     println!("{} {:?}", event.number, event.event);
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn next(&mut self) -> Result<Option<NumberedEvent>> {
        loop {
            if let Some(event) = self.read.pop_front() {
                self.next = event.number + 1;
                self.is_over = matches!(event.event, FlowEvent::RequestEnded { .. });
                return Ok(Some(event));
            }
            if self.is_over {
                return Ok(None);
            }
            self.read = self.wait().await?.into();
            self.is_over = self.read.is_empty();
        }
    }

    /// Waits for more events. There are none if the reader continues after the last one.
    async fn wait(&self) -> Result<Vec<NumberedEvent>> {
        let (engine, id, next) = (&self.engine, &self.id, self.next);
        Ok(engine.listen(id, News::Stream, |_| page(engine, id, next)).await?)
    }
}

shown!(Events, it => id: it.id, next: it.next);

/// The events from a number on, in one view. `None` if there will be more.
async fn page(engine: &EngineInner, id: &ExecutionId, next: u64) -> Result<Option<Vec<NumberedEvent>>, WorkflowError> {
    let (view, kept) = (engine.store.view().await?, engine.kept(id));
    let mut events = Vec::new();
    for (key, item) in view.scan(&kept.events(next), Order::Ascending, PAGE).await? {
        let damaged = || WorkflowError::corrupt(format!("an event of execution {id:?}"));
        let number = kept.read_event(&key).ok_or_else(damaged)?;
        let event = FlowEvent::decode(&item.value);
        let event = event.map_err(|why| why.at(format!("event {number} of execution {id:?}")))?;
        events.push(NumberedEvent { number, at: item.time, event });
    }
    if !events.is_empty() {
        return Ok(Some(events));
    }
    let found = crate::workflow::stored::record::fetch_execution(&view, &engine.spaces.executions, id).await?;
    let Some((execution, item)) = found else { return Err(WorkflowError::NotFound { id: id.clone() }) };
    if !execution.status.is_terminal() {
        return Ok(None);
    }
    let number = upcoming(&view, &kept).await?;
    let ended = ended(number, item.time, &execution.status);
    Ok(Some(if number >= next { vec![ended] } else { Vec::new() }))
}

/// The number that follows those of the stored events. The end of a request has it: it is the execution's own record.
async fn upcoming(view: &View, kept: &Kept<'_>) -> Result<u64, WorkflowError> {
    let last = view.scan(&kept.events(0), Order::Descending, 1).await?;
    Ok(last.first().and_then(|(key, _)| kept.read_event(key)).map_or(0, |last| last + 1))
}

/// The number of the last event so far.
pub(crate) async fn last(engine: &EngineInner, id: &ExecutionId) -> Result<Option<u64>, WorkflowError> {
    let (view, kept) = (engine.store.view().await?, engine.kept(id));
    let found = crate::workflow::stored::record::fetch_execution(&view, &engine.spaces.executions, id).await?;
    let Some((execution, _)) = found else { return Err(WorkflowError::NotFound { id: id.clone() }) };
    let upcoming = upcoming(&view, &kept).await?;
    Ok(if execution.status.is_terminal() { Some(upcoming) } else { upcoming.checked_sub(1) })
}

fn ended(number: u64, time: Timestamp, status: &StoredStatus) -> NumberedEvent {
    NumberedEvent { number, at: time, event: FlowEvent::RequestEnded { state: ExecutionState::of(status) } }
}
