//! One execution in memory: what is stored of it, what is not committed yet, what its branches are doing, and why it
//! stops. Its own task drives it; callers who want something of it come by here, too.

mod board;
mod branch;
pub(crate) mod close;
pub(crate) mod drive;
mod inbox;
mod op;
mod pending;
mod seat;
pub(crate) mod unbegun;

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use serde::Serialize;
use tokio::sync::{Notify, oneshot};

use crate::entity::EntityError;
use crate::json;
use crate::lock::LockName;
use crate::record::BadRecord;
use crate::state::StateError;
use crate::store::{Commit, Env, ErrorKind, Key, Outcome, Receipt, Refusal, Rev, StoreError, Timestamp};
use crate::workflow::admission::Asked;
use crate::workflow::ctx::locks::{Dropped, Holding};
use crate::workflow::ctx::saga::Undos;
use crate::workflow::definition::Definition;
use crate::workflow::engine::Inner;
use crate::workflow::journal::place::{Path, Place};
use crate::workflow::stored::kept::{Kept, Published};
use crate::workflow::stored::record::{Entry, Execution, Labels, Status, Wait, WaitsFor, id_key, run_key};
use crate::workflow::{ExecutionId, Failure, Result, WorkflowError};

pub(crate) use board::{Boarded, Effect, KEYED, RECORD, Verdict, turn};
pub(crate) use branch::Branch;
pub(crate) use inbox::{Address, Inbox, Received};
use op::Op;
pub(crate) use op::{CALLED_OFF, Doing, Listed, Todo, Waited};
use pending::{Draft, Pending};
pub(crate) use seat::{Note, Seat};

/// An execution that waits longer than this leaves memory.
pub(crate) const IDLE: Duration = Duration::from_secs(1);

/// How much of a value is left to everything but what the caller has put there.
pub(crate) const ROOM: usize = 256 << 10;

pub(crate) struct Run {
    pub(crate) engine: Arc<Inner>,
    pub(crate) id: ExecutionId,
    /// The key of its record.
    key: Key,
    pub(crate) definition: Arc<Definition>,
    state: Mutex<State>,
    /// Has the one who drives it look at what there is to do.
    nudge: Notify,
}

#[derive(Default)]
pub(crate) struct State {
    /// As it is stored.
    pub(crate) execution: Execution,
    /// `None` while it is not stored.
    pub(crate) rev: Option<Rev>,
    /// Whether it has started children, asked for locks, and opened reviews, with what is not committed yet.
    pub(crate) has_children: bool,
    pub(crate) has_locks: bool,
    pub(crate) has_reviews: bool,
    /// The reviews that its code has opened and still waits for, by where it did: their keys as open ones.
    pub(crate) reviews: BTreeMap<Place, Key>,
    /// Those that were given up, and are closed with the next commit.
    closed: Vec<Key>,
    /// How it is to be found from the next commit on, and whether it is to be cancelled.
    labels: Labels,
    pub(crate) cancel: Option<String>,
    /// What no commit holds yet. A handful at most.
    pending: BTreeMap<Place, Pending>,
    /// What code that is being polled has come to since. No commit may hold it yet.
    draft: Draft,
    is_polled: bool,
    /// The operations beside the code that wait until it was polled.
    asides: Vec<u64>,
    pending_bytes: usize,
    /// No stamp of what is pending is before this.
    first_pending: u64,
    /// The last stamp that was given, and the last that is to be durable.
    pub(crate) stamps: u64,
    wanted: u64,
    /// Whether the record is to be written, though nothing is pending.
    wants_record: bool,
    /// The commits on their way, and the first stamp of each.
    flying: BTreeMap<u64, u64>,
    boardings: u64,
    /// The branches that were given up while commits were on their way.
    lost: Vec<Path>,
    /// The forks of which a branch has failed, and which it was: those beside it are cancelled.
    called_off: Vec<(Place, usize)>,
    /// The sagas under way.
    pub(crate) sagas: Vec<Weak<Undos>>,
    /// The operation that has a commit of its own on its way: meanwhile there is no other.
    carrier: Option<u64>,
    ops: BTreeMap<u64, Op>,
    last_op: u64,
    /// Those of them that only wait, by what they wait for.
    waiting: BTreeMap<WaitsFor, Vec<u64>>,
    waits: usize,
    /// What was sent to it, if that was looked at.
    inbox: Option<Inbox>,
    /// How often something was delivered, as far as it was told; and how many receipts were committed.
    told_count: u64,
    receipts: u64,
    /// The attempts under way, and what they have told of themselves.
    pub(crate) beats: BTreeMap<Place, (u32, Option<String>)>,
    /// What it has published, if that was looked at, with what is not committed yet.
    pub(crate) published: Option<Publishes>,
    /// The locks that its code has guards of, by the keys of the requests; and what was let go of.
    pub(crate) held: BTreeMap<Key, Holding>,
    /// The locks under which the code came to what is not committed yet, though it has let go of the guards.
    pub(crate) left: Vec<Key>,
    pub(crate) dropped: Vec<Dropped>,
    /// The locks of which something is being released that was dropped, each as often.
    pub(crate) leaving: Vec<LockName>,
    /// Whether there is nothing in its journal.
    pub(crate) is_fresh: bool,
    /// Commits of operations' own.
    submitted: Vec<Submitted>,
    /// The input to go on with, anew.
    pub(crate) continues: Option<String>,
    /// How often it was taken up by now without coming to anything.
    taken_up: u32,
    probation: Option<Probation>,
    stop: Option<Stop>,
    /// Whether nobody drives it any more.
    has_left: bool,
    started: Option<oneshot::Sender<Result<()>>>,
    /// What its start asks for, if its first commit is to be admitted.
    pub(crate) asked: Option<Asked>,
    /// What it has come to, if another has taken its place.
    succeeded: Option<Status>,
}

/// What an execution publishes.
#[derive(Default)]
pub(crate) struct Publishes {
    pub(crate) values: Published,
    /// Whether no commit holds it as it is.
    pub(crate) is_new: bool,
}

/// A commit of an operation's own, and who waits for what becomes of it.
pub(crate) struct Submitted {
    pub(crate) commit: Commit,
    pub(crate) boarded: Boarded,
    pub(crate) answer: oneshot::Sender<Sent>,
}

/// What became of a commit.
pub(crate) enum Sent {
    Landed(Receipt),
    /// For a reason that is not the execution's own.
    Refused(Refusal),
    Stopped(Stop),
}

/// Held until an execution has come to something.
pub(crate) type Probation = tokio::sync::mpsc::Sender<()>;

/// Why an execution does not go on in this memory.
#[derive(Debug, Clone)]
pub(crate) enum Stop {
    /// It waits, until then at the most, and everything it needs to go on is stored.
    Suspended(Option<Timestamp>),
    /// It goes on with an empty journal.
    Continued,
    /// It needs an operator.
    Parked(String),
    /// A newer program has stored something of it that this one cannot read. Nothing is stored of that.
    SetAside(String),
    /// An operator has ended it, as this.
    Terminated(Status),
    /// This engine is no longer its owner.
    Fenced,
    /// It was changed by somebody else, who may be this very engine.
    Changed,
    /// The store does not serve.
    Failed(StoreError),
    /// There is an execution of that id.
    Taken,
    /// Its start is not admitted.
    Rejected(WorkflowError),
    /// It has come to the end of a journal that is only to be replayed.
    Replayed,
}

impl Stop {
    /// What cannot be read needs a newer program.
    pub(crate) fn unknown_version(bad: BadRecord) -> Stop {
        Stop::SetAside(WorkflowError::from(bad).to_string())
    }
}

/// What an execution is from a commit on.
#[derive(Debug, Clone)]
pub(crate) enum Next {
    Runs,
    /// Out of memory, until then at the most.
    Waits(Option<Timestamp>, Vec<Wait>),
    /// It is parked, or has ended.
    Rests(Status),
    /// Anew, with this input.
    Continues(String),
    /// It has ended as this, and another takes its place, whose record this is.
    Succeeds(Status, Box<Execution>),
}

impl Run {
    /// An execution that is stored, unless there is no rev: then its first commit stores it.
    pub(crate) fn new(
        engine: Arc<Inner>,
        definition: Arc<Definition>,
        id: ExecutionId,
        execution: Execution,
        rev: Option<Rev>,
    ) -> Run {
        let (labels, cancel) = (execution.labels.clone(), execution.cancel.clone());
        let (has_children, has_locks, has_reviews) =
            (execution.has_children, execution.has_locks, execution.has_reviews);
        let state = State {
            execution,
            rev,
            has_children,
            has_locks,
            has_reviews,
            labels,
            cancel,
            first_pending: u64::MAX,
            ..State::default()
        };
        let key = engine.record_of(&id);
        Run { engine, id, key, definition, state: Mutex::new(state), nudge: Notify::new() }
    }

    /// The same, whose starter is told when it is stored.
    pub(crate) fn starting(mut self, started: oneshot::Sender<Result<()>>) -> Run {
        let state = self.state.get_mut();
        (state.is_fresh, state.started) = (true, Some(started));
        self
    }

    /// The same, whose first commit is to be admitted.
    pub(crate) fn asking(mut self, asked: Option<Asked>) -> Run {
        self.state.get_mut().asked = asked;
        self
    }

    /// The same, of which no code has run yet. Messages may have come.
    pub(crate) fn not_begun(mut self) -> Run {
        self.state.get_mut().is_fresh = true;
        self
    }

    /// The same, taken up so often by now without coming to anything.
    pub(crate) fn taken_up(mut self, count: u32, probation: Option<Probation>) -> Run {
        let state = self.state.get_mut();
        (state.taken_up, state.probation) = (count, probation);
        self
    }

    /// The same, of which is known that it has done nothing yet.
    pub(crate) fn fresh(mut self) -> Run {
        let state = self.state.get_mut();
        // Whoever sends it something from now on tells it.
        (state.is_fresh, state.inbox) = (true, Some(Inbox::default()));
        self
    }

    pub(crate) fn env(&self) -> &Env {
        self.engine.store.env()
    }

    pub(crate) fn kept(&self) -> Kept<'_> {
        self.engine.kept(&self.id)
    }

    /// Something of its state.
    pub(crate) fn with<T>(&self, look: impl FnOnce(&mut State) -> T) -> T {
        look(&mut self.state.lock())
    }

    pub(crate) fn input(&self) -> String {
        self.state.lock().execution.input.clone()
    }

    /// The first of its ancestors; itself if it has none.
    pub(crate) fn root(&self) -> ExecutionId {
        let root = self.with(|state| state.execution.parent.as_ref().map(|parent| parent.root.clone()));
        root.unwrap_or_else(|| self.id.clone())
    }

    /// What it has come to, if that is stored.
    pub(crate) fn ended_as(&self) -> Option<Status> {
        let state = self.state.lock();
        let ended = (state.rev.is_some() && state.execution.status.is_terminal()).then_some(&state.execution.status);
        state.succeeded.as_ref().or(ended).cloned()
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

    pub(crate) async fn until_nudged(&self) {
        self.nudge.notified().await;
    }

    pub(crate) fn nudge(&self) {
        self.nudge.notify_one();
    }

    /// Ends the execution's stay in memory. Its future is never polled again.
    pub(crate) async fn stop_for<T>(&self, stop: Stop) -> T {
        self.set_stop(stop);
        std::future::pending().await
    }

    /// Ends the execution's stay in memory until an operator has looked at it.
    pub(crate) async fn park<T>(&self, reason: impl Into<String>) -> T {
        self.stop_for(Stop::Parked(reason.into())).await
    }

    /// What another layer has given. An error ends the execution's stay in memory.
    pub(crate) async fn or_stop<T, E: Into<WorkflowError>>(&self, given: Result<T, E>) -> T {
        match given {
            Ok(value) => value,
            Err(error) => self.stop_for(self.stops(error.into())).await,
        }
    }

    /// Notes why the execution stops, and tells whoever waits for its start.
    pub(crate) fn set_stop(&self, stop: Stop) {
        let started = {
            let mut state = self.state.lock();
            state.stop.get_or_insert_with(|| stop.clone());
            // One that is parked, or ended by an operator, is told of when that is stored.
            if let Stop::Parked(_) | Stop::Terminated(_) = stop { None } else { state.started.take() }
        };
        if let Some(started) = started {
            let answer = match stop {
                Stop::Taken => Err(WorkflowError::AlreadyStarted { id: self.id.clone() }),
                Stop::Failed(error) => Err(error.into()),
                Stop::Fenced => Err(WorkflowError::Stopped),
                Stop::Rejected(error) => Err(error),
                // It is stored as what it is.
                _ => Ok(()),
            };
            let _ = started.send(answer);
        }
        self.nudge();
    }

    /// Where something happens that did not before: a journal that is only to be replayed has come to its end.
    pub(crate) async fn effect(&self) {
        if self.engine.rehearsal.is_replay() {
            self.stop_for(Stop::Replayed).await
        }
    }

    /// Has the driver send a commit of an operation's own. It goes though the operation be dropped.
    pub(crate) async fn submit(&self, commit: Commit, boarded: Boarded) -> Sent {
        let (answer, answered) = oneshot::channel();
        self.state.lock().submitted.push(Submitted { commit, boarded, answer });
        self.nudge();
        match answered.await {
            Ok(sent) => sent,
            // Nobody drives it any more.
            Err(_) => std::future::pending().await,
        }
    }

    /// Whether an operation has a commit of its own on its way.
    pub(crate) fn is_carrying(&self) -> bool {
        self.state.lock().carrier.is_some()
    }

    /// The commits that operations want sent.
    pub(crate) fn submitted(&self) -> Vec<Submitted> {
        std::mem::take(&mut self.state.lock().submitted)
    }

    /// Makes everything so far durable, with what the execution is from then on.
    pub(crate) async fn commit(&self, next: Next) -> Result<(), Stop> {
        let (commit, boarded) = self.board(Commit::new(), next);
        match self.send(commit, boarded).await {
            Sent::Landed(_) => Ok(()),
            Sent::Refused(_) => Err(Stop::Changed),
            Sent::Stopped(stop) => Err(stop),
        }
    }

    /// Sends a commit, and measures how long that takes.
    pub(crate) async fn measured(&self, commit: Commit) -> Result<Outcome, StoreError> {
        let began = self.env().monotonic();
        let outcome = self.engine.store.commit(commit).await;
        self.engine.metrics.committed(self.env().monotonic().saturating_sub(began));
        outcome
    }

    /// Sends a commit, and has everybody know what became of it.
    pub(crate) async fn send(&self, commit: Commit, boarded: Boarded) -> Sent {
        match self.measured(commit).await {
            Ok(Outcome::Applied(receipt)) => {
                self.landed(boarded, &receipt);
                Sent::Landed(receipt)
            }
            Ok(Outcome::Refused(refusal)) => match self.refused(boarded, &refusal) {
                Verdict::Stop(stop) => Sent::Stopped(stop),
                Verdict::Again => Sent::Refused(refusal),
            },
            Err(error) => {
                self.put_back(boarded);
                self.engine.node.doubt();
                Sent::Stopped(self.failed(error))
            }
        }
    }

    /// What an error of the store's means: what cannot be stored or read will not be the next time either.
    pub(crate) fn failed(&self, error: StoreError) -> Stop {
        let is_stored = self.state.lock().rev.is_some();
        match error.kind() {
            ErrorKind::Invalid if is_stored => Stop::Parked(format!("it cannot be stored: {error}")),
            ErrorKind::Corrupt if is_stored => Stop::Parked(format!("its records are damaged: {error}")),
            _ => Stop::Failed(error),
        }
    }

    /// What an error of another layer means: one of the store's, or one that stays until something is done about it.
    pub(crate) fn stops(&self, error: WorkflowError) -> Stop {
        match error {
            WorkflowError::Store(error)
            | WorkflowError::State(StateError::Store(error))
            | WorkflowError::Entity(EntityError::Store(error)) => self.failed(error),
            WorkflowError::Stopped => Stop::Fenced,
            error if error.is_unknown_version() => Stop::SetAside(error.to_string()),
            error => Stop::Parked(error.to_string()),
        }
    }

    /// Why it stops after all.
    pub(crate) fn replace_stop(&self, stop: Stop) {
        self.state.lock().stop = None;
        self.set_stop(stop);
    }

    /// Has it cancelled, from its next commit on, which is to be soon.
    pub(crate) fn ask_cancel(&self, reason: &str) {
        let mut state = self.state.lock();
        state.cancel.get_or_insert_with(|| reason.into());
        state.wants_record = true;
        state.wake(|_, _| true);
        drop(state);
        self.nudge();
    }

    /// Somebody has written into its record that it is to be cancelled.
    pub(crate) fn cancelled(&self, before: Rev, after: Option<Rev>, execution: Execution) {
        let mut state = self.state.lock();
        if state.rev != Some(before) {
            // What is stored of it is newer than what it knows: it has to see that.
            drop(state);
            return self.doubt();
        }
        state.rev = after;
        state.cancel = state.cancel.take().or(execution.cancel.clone());
        state.execution = execution;
        state.wake(|_, _| true);
        drop(state);
        self.nudge();
    }

    /// Something may have been done to it that it was not told of: it looks whether it is stored as it knows.
    pub(crate) fn doubt(&self) {
        self.with(|state| {
            state.wants_record |= state.rev.is_some();
            state.inbox.iter_mut().for_each(Inbox::set_stale);
        });
        self.nudge();
    }

    /// It is no longer driven: whoever waits for something of it has to look elsewhere.
    pub(crate) fn leave(&self) {
        let mut state = self.state.lock();
        state.has_left = true;
        state.wake(|_, _| true);
    }

    /// Goes on with an empty journal, as it was stored to.
    pub(crate) fn begin_anew(&self) {
        let mut state = self.state.lock();
        (state.stop, state.is_fresh) = (None, true);
        // The code's operations are gone with it; what is left is of those who want something from outside.
        state.carrier = None;
        state.held.clear();
        state.left.clear();
        state.dropped.clear();
        state.reviews.clear();
        state.beats.clear();
    }

    /// A value as JSON text that is not too large to be stored.
    pub(crate) fn text(&self, what: &str, value: &impl Serialize) -> Result<String, Failure> {
        let json = json::to_value(value).map_err(|error| Failure::no_json(what, &error))?;
        let text = json.to_string();
        self.fits(what, text.len())?;
        Ok(text)
    }

    /// Refuses what is too large to be stored.
    pub(crate) fn fits(&self, what: &str, length: usize) -> Result<(), Failure> {
        let limit = largest(&self.engine);
        if length <= limit {
            return Ok(());
        }
        let message = format!("{what} takes {length} bytes as JSON; the limit is {limit}");
        Err(Failure::new(message).with_code("latchwork.too_large").not_retryable())
    }
}

impl State {
    /// Notes how far an attempt is, unless it is over.
    pub(crate) fn beat(&mut self, place: &Place, run: u32, begun: &Entry, progress: String) -> bool {
        let is_run = self.execution.run == run;
        match self.beats.get_mut(place) {
            Some((attempt, heard)) if is_run && *attempt == begun.attempts => {
                *heard = Some(progress.clone());
                self.put(place, Entry { progress: Some(progress), ..begun.clone() }, None);
                // Whoever drives it may look before the attempt waits for that.
                self.want_all();
                true
            }
            _ => false,
        }
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
        None => space.prefix(id_key(id)),
        Some(run) => space.range(run_key(id, 0)..run_key(id, run)),
    }
}
