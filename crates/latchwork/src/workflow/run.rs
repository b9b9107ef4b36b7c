//! One execution in memory: its place in the journal, what is not committed yet, and why it stops. Its own task goes
//! through here for every operation; nobody else does.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};

use crate::store::{Check, Commit, Env, Key, Order, Outcome, Rev, StoreError, Timestamp};
use crate::workflow::engine::Inner;
use crate::workflow::record::{Entry, Execution, Kind, Status, journal_key, journal_prefix, timer_key};
use crate::workflow::{ExecutionId, Result, WorkflowError};

/// How many entries are read ahead in a replay.
const READ_AHEAD: usize = 64;

/// An execution that waits longer than this leaves memory.
pub(crate) const IDLE: Duration = Duration::from_secs(1);

pub(crate) struct Run {
    pub(crate) engine: Arc<Inner>,
    pub(crate) id: ExecutionId,
    state: Mutex<State>,
    stopped: Notify,
}

struct State {
    execution: Execution,
    /// `None` while it is not stored.
    rev: Option<Rev>,
    /// The place of the next operation.
    next: u32,
    /// What the journal holds from there on, as far as it was read.
    read: VecDeque<Entry>,
    /// Whether there is more to read.
    more: bool,
    /// Entries that no commit holds yet.
    pending: BTreeMap<u32, Entry>,
    stop: Option<Stop>,
    started: Option<oneshot::Sender<Result<()>>>,
}

/// Why an execution does not go on in this memory.
#[derive(Debug, Clone)]
pub(crate) enum Stop {
    /// It waits, and everything it needs to go on is stored.
    Suspended,
    /// It needs an operator.
    Parked(String),
    /// It was changed by somebody else, or this engine is no longer its owner.
    Fenced,
    /// The store does not serve.
    Failed(StoreError),
    /// There is an execution of that id.
    Taken,
}

impl Run {
    /// An execution that is about to be stored by its first commit; `started` is told when it is.
    pub(crate) fn new(
        engine: Arc<Inner>,
        id: ExecutionId,
        execution: Execution,
        started: oneshot::Sender<Result<()>>,
    ) -> Run {
        Run::with(engine, id, execution, None, Some(started))
    }

    /// An execution that is stored.
    pub(crate) fn stored(engine: Arc<Inner>, id: ExecutionId, execution: Execution, rev: Rev) -> Run {
        Run::with(engine, id, execution, Some(rev), None)
    }

    fn with(
        engine: Arc<Inner>,
        id: ExecutionId,
        execution: Execution,
        rev: Option<Rev>,
        started: Option<oneshot::Sender<Result<()>>>,
    ) -> Run {
        let (read, pending) = (VecDeque::new(), BTreeMap::new());
        let state = State { execution, rev, next: 0, read, more: rev.is_some(), pending, stop: None, started };
        Run { engine, id, state: Mutex::new(state), stopped: Notify::new() }
    }

    pub(crate) fn env(&self) -> &Env {
        self.engine.store.env()
    }

    pub(crate) fn execution(&self) -> Execution {
        self.state.lock().execution.clone()
    }

    /// Why it is to stop, if it is.
    pub(crate) fn stop(&self) -> Option<Stop> {
        self.state.lock().stop.clone()
    }

    pub(crate) async fn until_stopped(&self) {
        self.stopped.notified().await;
    }

    /// Ends the execution's stay in memory. Its future is never polled again.
    pub(crate) async fn stop_for<T>(&self, stop: Stop) -> T {
        self.set_stop(stop);
        std::future::pending().await
    }

    /// Notes why the execution stops, and tells whoever waits for its start.
    pub(crate) fn set_stop(&self, stop: Stop) {
        let started = {
            let mut state = self.state.lock();
            let first = state.stop.is_none();
            if first {
                state.stop = Some(stop.clone());
            }
            state.started.take().filter(|_| first)
        };
        if let Some(started) = started {
            let answer = match stop {
                Stop::Taken => Err(WorkflowError::AlreadyStarted { id: self.id.clone() }),
                Stop::Failed(error) => Err(error.into()),
                Stop::Fenced => Err(WorkflowError::Stopped),
                // It is stored as what it is.
                Stop::Suspended | Stop::Parked(_) => Ok(()),
            };
            let _ = started.send(answer);
        }
        self.stopped.notify_one();
    }

    /// The next operation's place, and what the journal holds there. What does not belong there parks the execution.
    pub(crate) async fn take(&self, kind: Kind, name: &str, argument: u64) -> (u32, Option<Entry>) {
        if let Err(stop) = self.read_ahead().await {
            return self.stop_for(stop).await;
        }
        let (place, found) = {
            let mut state = self.state.lock();
            let place = state.next;
            state.next += 1;
            (place, state.read.pop_front())
        };
        if let Some(found) = &found
            && (found.kind, found.name.as_str(), found.argument) != (kind, name, argument)
        {
            let other = if found.kind == kind && found.name == name { ", given something else" } else { "" };
            let reason = format!(
                "operation {place} is {kind} {name:?} in the code, and {} {:?} in the journal{other}",
                found.kind, found.name
            );
            return self.stop_for(Stop::Parked(reason)).await;
        }
        (place, found)
    }

    /// Sees to it that the next entry of the journal is in memory, if there is one.
    async fn read_ahead(&self) -> Result<(), Stop> {
        let from = {
            let state = self.state.lock();
            if !state.read.is_empty() || !state.more {
                return Ok(());
            }
            state.next
        };
        let space = &self.engine.spaces.journal;
        let mut end = journal_prefix(&self.id);
        end.extend_from_slice(&u32::MAX.to_be_bytes());
        let range = space.range(journal_key(&self.id, from)..end);
        let view = self.engine.store.view().await.map_err(Stop::Failed)?;
        let found = view.scan(&range, Order::Ascending, READ_AHEAD).await.map_err(Stop::Failed)?;
        let mut state = self.state.lock();
        state.more = found.len() == READ_AHEAD;
        for (_, item) in found {
            let Some(entry) = Entry::decode(&item.value) else {
                return Err(Stop::Parked(format!("the journal is damaged behind operation {from}")));
            };
            state.read.push_back(entry);
        }
        Ok(())
    }

    /// What the journal holds next, where the code has not come to it.
    pub(crate) async fn peek(&self) -> Result<Option<Entry>, Stop> {
        self.read_ahead().await?;
        Ok(self.state.lock().read.front().cloned())
    }

    /// Keeps an entry for the next commit.
    pub(crate) fn put(&self, place: u32, entry: Entry) {
        self.state.lock().pending.insert(place, entry);
    }

    /// Makes everything so far durable. Returns only if that has happened.
    pub(crate) async fn flush(&self) {
        if let Err(stop) = self.commit(None).await {
            self.stop_for::<()>(stop).await;
        }
    }

    /// Makes everything so far durable, with another status. With `timer`, also a timer.
    pub(crate) async fn commit(&self, status: Option<(Status, Option<Timestamp>)>) -> Result<(), Stop> {
        let (commit, after, entries) = self.prepared(status);
        let is_first = self.state.lock().rev.is_none();
        match self.engine.store.commit(commit).await {
            Ok(Outcome::Applied(receipt)) => {
                let mut state = self.state.lock();
                if let Some((execution, write)) = after {
                    state.execution = execution;
                    state.rev = receipt.revs.get(write).copied().flatten();
                }
                if let Some(started) = state.started.take() {
                    let _ = started.send(Ok(()));
                    self.engine.begun().notify_waiters();
                }
                Ok(())
            }
            Ok(Outcome::Refused(_)) if is_first => Err(Stop::Taken),
            Ok(Outcome::Refused(_)) => Err(Stop::Fenced),
            Err(error) => {
                // What was not committed is still to be.
                self.state.lock().pending.extend(entries);
                Err(Stop::Failed(error))
            }
        }
    }

    /// The commit of what is pending; with the execution's record, and the place of its write, if that changes.
    #[allow(clippy::type_complexity)] // Three things that belong together for a moment.
    fn prepared(
        &self,
        status: Option<(Status, Option<Timestamp>)>,
    ) -> (Commit, Option<(Execution, usize)>, BTreeMap<u32, Entry>) {
        let spaces = &self.engine.spaces;
        let mut state = self.state.lock();
        let entries = std::mem::take(&mut state.pending);
        let key = spaces.executions.key(self.id.as_bytes());
        let mut commit = Commit::new().check(self.engine.shard_check(&self.id));
        commit = match state.rev {
            Some(rev) => commit.check(Check::AtRev(key.clone(), rev)),
            None => commit.check(Check::Absent(key.clone())),
        };
        for (place, entry) in &entries {
            commit = commit.put(&spaces.journal.key(journal_key(&self.id, *place)), entry.encode());
        }
        let before = &state.execution;
        let (status, timer) = status.unwrap_or((Status::Running, None));
        let (is_stored, timer_us) = (state.rev.is_some(), timer.map(|timer| timer.0));
        if is_stored && status == before.status && timer_us == before.timer_us {
            return (commit, None, entries);
        }
        let was_active = is_stored && before.status == Status::Running;
        let is_active = status == Status::Running;
        let active: Key = spaces.active.key(self.id.as_bytes());
        commit = match (was_active, is_active) {
            (false, true) => commit.put(&active, Vec::new()),
            (true, false) => commit.delete(&active),
            _ => commit,
        };
        if let Some(old) = before.timer_us {
            commit = commit.delete(&spaces.timers.key(timer_key(Timestamp(old), &self.id)));
        }
        if let Some(timer) = timer {
            commit = commit.put(&spaces.timers.key(timer_key(timer, &self.id)), Vec::new());
        }
        if let Status::Parked(reason) = &status {
            commit = commit.put(&spaces.parked.key(self.id.as_bytes()), reason.clone());
        }
        if status.is_terminal() {
            let ended = timer_key(self.env().now(), &self.id);
            commit = commit.put(&spaces.ended.key(ended), Vec::new());
        }
        let execution = Execution { status, timer_us, ..before.clone() };
        let write = commit.writes().len();
        commit = commit.put(&key, execution.encode());
        (commit, Some((execution, write)), entries)
    }
}
