//! One execution in memory: its place in the journal, what is not committed yet, and why it stops. Its own task goes
//! through here for every operation; nobody else does.

mod board;

use std::collections::VecDeque;
use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};

use crate::store::{Commit, Env, ErrorKind, Key, Order, Outcome, Rev, StoreError, Timestamp};
use crate::workflow::definition::Definition;
use crate::workflow::engine::Inner;
use crate::workflow::record::{Entry, Execution, Intent, Kind, Status, journal_key, journal_prefix, read_place};
use crate::workflow::{ExecutionId, Failure, Result, WorkflowError};

pub(crate) use board::Boarded;

/// How many entries are read ahead in a replay.
const READ_AHEAD: usize = 64;

/// An execution that waits longer than this leaves memory.
pub(crate) const IDLE: Duration = Duration::from_secs(1);

/// How much of a value is left to everything but what the caller has put there.
const ROOM: usize = 256 << 10;

pub(crate) struct Run {
    pub(crate) engine: Arc<Inner>,
    pub(crate) id: ExecutionId,
    /// The key of its record.
    key: Key,
    pub(crate) definition: Arc<Definition>,
    state: Mutex<State>,
    stopped: Notify,
    /// Told when its first commit has landed.
    stored: Notify,
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
    /// What is next if there is no more.
    intent: Option<Entry>,
    /// Entries that no commit holds yet, with their places. A handful at most.
    pending: Vec<(u32, Entry)>,
    /// How often it was taken up by now without coming to anything.
    taken_up: u32,
    probation: Option<Probation>,
    /// Whether its own task waits for a commit.
    commits: bool,
    /// Whether an operation is under way, or was given up half-way.
    operates: bool,
    stop: Option<Stop>,
    started: Option<oneshot::Sender<Result<()>>>,
    /// What it is to be from its first commit on, once an operation waits for that.
    first: Option<Next>,
}

/// Held until an execution has come to something.
pub(crate) type Probation = tokio::sync::mpsc::Sender<()>;

/// Why an execution does not go on in this memory.
#[derive(Debug, Clone)]
pub(crate) enum Stop {
    /// It waits until then, and everything it needs to go on is stored.
    Suspended(Timestamp),
    /// It goes on with an empty journal.
    Continued,
    /// It needs an operator.
    Parked(String),
    /// This engine is no longer its owner.
    Fenced,
    /// It was changed by somebody else, who may be this very engine.
    Changed,
    /// The store does not serve.
    Failed(StoreError),
    /// There is an execution of that id.
    Taken,
    /// It has come to the end of a journal that is only to be replayed.
    Replayed,
}

/// What an execution is from a commit on.
pub(crate) enum Next {
    Runs,
    /// Out of memory until then.
    Waits(Timestamp),
    /// It is parked, or has ended.
    Rests(Status),
    /// Anew, with this input.
    Continues(String),
}

impl Run {
    /// An execution that is about to be stored by its first commit; `started` is told when it is.
    pub(crate) fn new(
        engine: Arc<Inner>,
        definition: Arc<Definition>,
        id: ExecutionId,
        execution: Execution,
        started: oneshot::Sender<Result<()>>,
    ) -> Run {
        let mut run = Run::stored(engine, definition, id, execution, Rev(0));
        let state = run.state.get_mut();
        (state.rev, state.more, state.started) = (None, false, Some(started));
        run
    }

    /// An execution that is stored.
    pub(crate) fn stored(
        engine: Arc<Inner>,
        definition: Arc<Definition>,
        id: ExecutionId,
        execution: Execution,
        rev: Rev,
    ) -> Run {
        let intent = execution.intent.clone().map(Intent::into_entry);
        let state = State {
            execution,
            rev: Some(rev),
            next: 0,
            read: VecDeque::new(),
            more: true,
            intent,
            pending: Vec::new(),
            taken_up: 0,
            probation: None,
            commits: false,
            operates: false,
            stop: None,
            started: None,
            first: None,
        };
        let key = engine.spaces.executions.key(id.as_bytes());
        Run { engine, id, key, definition, state: Mutex::new(state), stopped: Notify::new(), stored: Notify::new() }
    }

    /// The same, taken up so often by now without coming to anything.
    pub(crate) fn taken_up(mut self, count: u32, probation: Option<Probation>) -> Run {
        let state = self.state.get_mut();
        (state.taken_up, state.probation) = (count, probation);
        self
    }

    pub(crate) fn env(&self) -> &Env {
        self.engine.store.env()
    }

    pub(crate) fn input(&self) -> String {
        self.state.lock().execution.input.clone()
    }

    /// When it is to have ended.
    pub(crate) fn deadline(&self) -> Option<Timestamp> {
        self.state.lock().execution.deadline_us.map(Timestamp)
    }

    /// How often an operator has let it go on.
    pub(crate) fn resumes(&self) -> u32 {
        self.state.lock().execution.resumes
    }

    /// What it has come to, if that is stored.
    pub(crate) fn ended_as(&self) -> Option<Status> {
        let state = self.state.lock();
        (state.rev.is_some() && state.execution.status.is_terminal()).then(|| state.execution.status.clone())
    }

    /// Tells this run of the execution from every other, also from one that has had the same id.
    pub(crate) fn number(&self) -> (u64, u32) {
        let state = self.state.lock();
        (state.execution.started_us, state.execution.run)
    }

    /// Why it is to stop, if it is.
    pub(crate) fn stop(&self) -> Option<Stop> {
        self.state.lock().stop.clone()
    }

    pub(crate) async fn until_stopped(&self) {
        self.stopped.notified().await;
    }

    /// Whether its own task waits for a commit.
    pub(crate) fn commits(&self) -> bool {
        self.state.lock().commits
    }

    /// Whether it is not stored, and nothing is on its way that would.
    pub(crate) fn waits_unstored(&self) -> bool {
        let state = self.state.lock();
        let waits = !state.operates || state.first.is_some();
        state.rev.is_none() && !state.commits && waits && state.stop.is_none()
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
            state.stop.get_or_insert_with(|| stop.clone());
            // One that is parked is told of when that is stored.
            if let Stop::Parked(_) = stop { None } else { state.started.take() }
        };
        if let Some(started) = started {
            let answer = match stop {
                Stop::Taken => Err(WorkflowError::AlreadyStarted { id: self.id.clone() }),
                Stop::Failed(error) => Err(error.into()),
                Stop::Fenced => Err(WorkflowError::Stopped),
                // It is stored as what it is.
                Stop::Changed | Stop::Suspended(_) | Stop::Continued | Stop::Parked(_) | Stop::Replayed => Ok(()),
            };
            let _ = started.send(answer);
        }
        self.stopped.notify_one();
    }

    /// Does an operation. There is one at a time: if there were two, a replay could come to them in another order.
    pub(crate) async fn operation<T>(&self, operation: impl Future<Output = T>) -> T {
        let is_second = std::mem::replace(&mut self.state.lock().operates, true);
        if is_second {
            let reason = "an operation was begun while another was under way or had been given up half-way; \
                          await one before the next";
            return self.stop_for(Stop::Parked(reason.into())).await;
        }
        if self.engine.strict {
            tokio::task::yield_now().await;
        }
        let done = operation.await;
        self.state.lock().operates = false;
        done
    }

    /// The next operation's place, and what the journal holds there. What does not belong there parks the execution.
    pub(crate) async fn take(&self, kind: Kind, name: &str, argument: u64) -> (u32, Option<Entry>) {
        if let Err(stop) = self.read_ahead().await {
            return self.stop_for(stop).await;
        }
        // The future that was told to stop may have been dropped, and the code gone on.
        if self.state.lock().stop.is_some() {
            return std::future::pending().await;
        }
        let (place, found) = {
            let mut state = self.state.lock();
            let place = state.next;
            state.next += 1;
            (place, state.read.pop_front())
        };
        match &found {
            None => self.effect().await,
            Some(found) if (found.kind, &*found.name, found.argument) != (kind, name, argument) => {
                let other = if found.kind == kind && *found.name == *name { ", given something else" } else { "" };
                let reason = format!(
                    "operation {place} is {kind} {name:?} in the code, and {} {:?} in the journal{other}",
                    found.kind, found.name
                );
                return self.stop_for(Stop::Parked(reason)).await;
            }
            Some(_) => {}
        }
        (place, found)
    }

    /// Where something happens that did not before: a journal that is only to be replayed has come to its end.
    pub(crate) async fn effect(&self) {
        if self.engine.replays {
            self.stop_for(Stop::Replayed).await
        }
    }

    /// Sees to it that the next entry of the journal is in memory, if there is one.
    async fn read_ahead(&self) -> Result<(), Stop> {
        let (from, run) = {
            let state = self.state.lock();
            if !state.read.is_empty() || !state.more {
                return Ok(());
            }
            (state.next, state.execution.run)
        };
        let space = &self.engine.spaces.journal;
        let range = space.range(journal_key(&self.id, run, from)..journal_key(&self.id, run, u32::MAX));
        let view = self.engine.store.view().await.map_err(Stop::Failed)?;
        let found = view.scan(&range, Order::Ascending, READ_AHEAD).await.map_err(Stop::Failed)?;
        let mut state = self.state.lock();
        state.more = found.len() == READ_AHEAD;
        let (mut intent, mut expected) = (state.intent.take(), from);
        for (key, item) in found {
            let place = read_place(key.bytes());
            let decoded = Entry::decode_with(&item.value);
            let (Some(place), Some((entry, next))) = (place, decoded) else {
                return Err(Stop::Parked(format!("the journal is damaged behind operation {from}")));
            };
            // A step that was begun and never ended, because the code has dropped it.
            if expected < place
                && let Some(begun) = intent.take()
            {
                state.read.push_back(begun);
                expected += 1;
            }
            if expected < place {
                // What comes before the gap may still be read.
                if expected == from {
                    let reason = format!("the journal does not tell of operation {from}, which the code has dropped");
                    return Err(Stop::Parked(reason));
                }
                state.more = true;
                return Ok(());
            }
            state.read.push_back(entry);
            (intent, expected) = (next, place + 1);
        }
        match state.more {
            true => state.intent = intent,
            // Whatever came after it has a record of its own.
            false => state.read.extend(intent),
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
        let pending = &mut self.state.lock().pending;
        match pending.iter_mut().rev().find(|(pending, _)| *pending == place) {
            Some((_, pending)) => *pending = entry,
            None => pending.push((place, entry)),
        }
    }

    /// Keeps an entry no longer.
    pub(crate) fn take_back(&self, place: u32) {
        self.state.lock().pending.retain(|(pending, _)| *pending != place);
    }

    /// Makes everything so far durable. Returns only if that has happened.
    pub(crate) async fn flush(&self) {
        if !self.is_stored() {
            self.until_stored(Next::Runs).await;
            // From another task, something may have come too late for it.
            if self.state.lock().pending.is_empty() {
                return;
            }
        }
        if let Err(stop) = self.commit(Next::Runs).await {
            self.stop_for::<()>(stop).await;
        }
    }

    /// Makes sure that the execution is stored, for those whose commits are not its own task's.
    pub(crate) async fn ensure_stored(&self) {
        if !self.is_stored() {
            self.until_stored(Next::Runs).await;
        }
    }

    fn is_stored(&self) -> bool {
        self.state.lock().rev.is_some()
    }

    /// Waits for the first commit. It is not sent from here, where the workflow could drop it and nobody would know
    /// what became of it: the one who drives the workflow sends it as soon as the workflow waits.
    async fn until_stored(&self, first: Next) {
        self.state.lock().first = Some(first);
        loop {
            let mut stored = std::pin::pin!(self.stored.notified());
            stored.as_mut().enable();
            if self.is_stored() {
                return;
            }
            stored.await;
        }
    }

    /// What it is to be from its first commit on.
    pub(crate) fn first(&self) -> Next {
        self.state.lock().first.take().unwrap_or(Next::Runs)
    }

    /// Makes everything so far durable, and leaves memory until then, or until the execution is to have ended.
    pub(crate) async fn suspend<T>(&self, until: Timestamp) -> T {
        let timer = self.deadline().map_or(until, |deadline| deadline.min(until));
        if !self.is_stored() {
            self.until_stored(Next::Waits(timer)).await;
            return self.stop_for(Stop::Suspended(timer)).await;
        }
        if let Err(stop) = self.commit(Next::Waits(timer)).await {
            return self.stop_for(stop).await;
        }
        self.stop_for(Stop::Suspended(timer)).await
    }

    /// Makes everything so far durable, with what the execution is from then on.
    pub(crate) async fn commit(&self, next: Next) -> Result<(), Stop> {
        let (commit, boarded) = self.board(Commit::new(), next);
        self.send(commit, boarded).await
    }

    /// Sends a commit that holds nothing that may be refused but what is the execution's own.
    async fn send(&self, commit: Commit, boarded: Boarded) -> Result<(), Stop> {
        match self.store(commit).await {
            Ok(Outcome::Applied(receipt)) => {
                self.landed(boarded, &receipt);
                Ok(())
            }
            Ok(Outcome::Refused(refusal)) => Err(self.refused(boarded, &refusal).unwrap_or(Stop::Fenced)),
            Err(error) => {
                self.put_back(boarded);
                Err(self.failed(error))
            }
        }
    }

    /// Sends a commit. If this is dropped before the answer is there, the execution stops, and is taken up again from
    /// what is stored then.
    pub(crate) async fn store(&self, commit: Commit) -> std::result::Result<Outcome, StoreError> {
        struct Sent<'a> {
            run: &'a Run,
            is_answered: bool,
        }
        impl Drop for Sent<'_> {
            fn drop(&mut self) {
                let mut state = self.run.state.lock();
                state.commits = false;
                let is_stored = state.rev.is_some();
                drop(state);
                // The first is dropped only with the whole task.
                if !self.is_answered && is_stored {
                    self.run.set_stop(Stop::Changed);
                }
            }
        }
        self.state.lock().commits = true;
        let mut sent = Sent { run: self, is_answered: false };
        let outcome = self.engine.store.commit(commit).await;
        sent.is_answered = true;
        outcome
    }

    /// What an error of the store's means: what cannot be stored will not be the next time either.
    pub(crate) fn failed(&self, error: StoreError) -> Stop {
        let is_stored = self.state.lock().rev.is_some();
        match error.kind() {
            ErrorKind::Invalid if is_stored => Stop::Parked(format!("it cannot be stored: {error}")),
            _ => Stop::Failed(error),
        }
    }

    /// Why it stops after all.
    pub(crate) fn replace_stop(&self, stop: Stop) {
        self.state.lock().stop = None;
        self.set_stop(stop);
    }

    /// Goes on with an empty journal, as it was stored to.
    pub(crate) fn begin_anew(&self) {
        let mut state = self.state.lock();
        (state.stop, state.operates) = (None, false);
    }

    /// Refuses what is too large to be stored.
    pub(crate) fn fits(&self, what: &str, length: usize) -> std::result::Result<(), Failure> {
        let limit = largest(&self.engine);
        if length <= limit {
            return Ok(());
        }
        let message = format!("{what} takes {length} bytes as JSON; the limit is {limit}");
        Err(Failure::new(message).not_retryable())
    }

    /// What no commit holds is not to be.
    pub(crate) fn forget_pending(&self) {
        self.state.lock().pending.clear();
    }
}

pub(crate) fn hash_text(text: &str) -> u64 {
    xxhash_rust::xxh3::xxh3_64(text.as_bytes())
}

/// The longest value of a caller's, in bytes: everything else that a record holds has to fit beside it.
pub(crate) fn largest(engine: &Inner) -> usize {
    engine.store.limits().value_bytes.saturating_sub(ROOM)
}

/// The range of an execution's journal, of all its runs or of those before one.
pub(crate) fn journal_range(engine: &Inner, id: &ExecutionId, before: Option<u32>) -> crate::store::Range {
    let space = &engine.spaces.journal;
    match before {
        None => space.prefix(journal_prefix(id)),
        Some(run) => space.range(journal_key(id, 0, 0)..journal_key(id, run, 0)),
    }
}
