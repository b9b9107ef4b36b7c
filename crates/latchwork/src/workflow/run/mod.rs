//! One execution in memory. `RunState` holds its machines, each of which owns its fields: the record, the journal, the
//! operations, the attempts, the inbox, the guards, the published values, what is stored beside the journal, and
//! the residency. `Run` passes each event to the machines that it concerns. The execution's own task drives it. Callers
//! from outside also use this interface.

mod beside;
mod board;
mod branch;
pub(crate) mod close;
mod decide;
pub(crate) mod drive;
pub(crate) mod driver;
mod guards;
mod inbox;
mod journal;
mod known;
mod op;
mod ops;
mod published;
mod residency;
mod seat;
mod state;
pub(crate) mod unbegun;

use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use serde::Serialize;
use tokio::sync::{Notify, oneshot};

use crate::entity::EntityError;
use crate::json;
use crate::lane::Part;
use crate::record::BadRecord;
use crate::state::StateError;
use crate::store::{Commit, Env, ErrorKind, Key, Outcome, Receipt, Refusal, Rev, StoreError, Timestamp};
use crate::workflow::admission::StartNeeds;
use crate::workflow::definition::Definition;
use crate::workflow::engine::EngineInner;
use crate::workflow::journal::place::{BranchPath, Place};
use crate::workflow::stored::kept::Kept;
use crate::workflow::stored::keys::{id_key, run_key};
use crate::workflow::stored::record::{Entry, Execution, StoredStatus, Wait};
use crate::workflow::{Boxed, ExecutionId, Failure, Result, WorkflowError};

pub(crate) use beside::MOST_BESIDE;
pub(crate) use board::{Boarded, KEYED, OpEffect, RECORD, RefusalVerdict, with_record};
pub(crate) use branch::Branch;
pub(crate) use decide::Todo;
use inbox::Inbox;
pub(crate) use inbox::{Address, Received};
use known::KnownRecord;
pub(crate) use op::{Doing, OpInProgress, WaitEnd};
pub(crate) use ops::CALLED_OFF;
pub(crate) use residency::Probation;
pub(crate) use seat::{Note, Seat};
pub(crate) use state::RunState;

/// An execution that waits longer than this is evicted.
pub(crate) const IDLE: Duration = Duration::from_secs(1);

/// How many bytes of a stored value are reserved for everything except the caller's own data.
pub(crate) const ROOM: usize = 256 << 10;

pub(crate) struct Run {
    pub(crate) engine: Arc<EngineInner>,
    pub(crate) id: ExecutionId,
    /// The key of its record.
    key: Key,
    pub(crate) definition: Arc<Definition>,
    state: Mutex<RunState>,
    /// Makes the driver look for work.
    nudge: Notify,
}

/// A commit of an operation's own, and the channel for its outcome.
pub(crate) struct Submitted {
    pub(crate) commit: Commit,
    pub(crate) boarded: Boarded,
    pub(crate) by: Option<CommitBy>,
    pub(crate) answer: oneshot::Sender<CommitOutcome>,
}

/// A commit that is made in another way than through the store, for an operation that has a transaction of its own.
pub(crate) struct CommitBy {
    /// The operation. If the commit does not land, its entry is dropped.
    pub(crate) place: Place,
    pub(crate) commit: Box<dyn FnOnce(Commit) -> Boxed<'static, CommittedBy> + Send>,
}

/// What came of such a commit. `None` if the transaction was rolled back, and the commit with it.
pub(crate) type CommittedBy = Result<Option<Outcome>, StoreError>;

/// The outcome of a commit.
pub(crate) enum CommitOutcome {
    Landed(Receipt),
    /// Refused for a reason that does not concern the execution itself.
    Refused(Refusal),
    Stopped(Stop),
    /// The operation's own transaction was rolled back, and the commit with it.
    RolledBack,
}

/// Why an execution stops running in this memory.
#[derive(Debug, Clone)]
pub(crate) enum Stop {
    /// It waits, at most until this time. Everything it needs to continue is stored.
    Suspended(Option<Timestamp>),
    /// It continues as new, with an empty journal.
    Continued,
    /// It needs an operator.
    Parked(String),
    /// A newer program has stored something that this one cannot read. The stop itself is not stored.
    SetAside(String),
    /// An operator has ended it with this status.
    Terminated(StoredStatus),
    /// This engine is no longer its owner.
    Fenced,
    /// Its record was changed by another commit, possibly one of this engine.
    Changed,
    /// The store is unavailable.
    Failed(StoreError),
    /// An execution with this id exists already.
    Taken,
    /// Its start was not admitted.
    Rejected(WorkflowError),
    /// An engine that only replays a journal has reached its end.
    Replayed,
}

impl Stop {
    /// A record of an unknown version sets the execution aside: it needs a newer program.
    pub(crate) fn unknown_version(bad: BadRecord) -> Stop {
        Stop::SetAside(WorkflowError::from(bad).to_string())
    }
}

/// The state of an execution after a commit.
#[derive(Debug, Clone)]
pub(crate) enum NextState {
    Runs,
    /// Out of memory, at most until this time.
    Waits(Option<Timestamp>, Vec<Wait>),
    /// It is parked, or has ended.
    Rests(StoredStatus),
    /// It continues as new, with this input.
    Continues(String),
    /// It has ended with this status, and another execution takes its place. The second field is the record of that
    /// one.
    Succeeds(StoredStatus, Box<Execution>),
}

impl Run {
    /// Creates the run of a stored execution. Without a rev, the execution is not stored: its first commit stores it.
    pub(crate) fn new(
        engine: Arc<EngineInner>,
        definition: Arc<Definition>,
        id: ExecutionId,
        execution: Execution,
        rev: Option<Rev>,
    ) -> Run {
        let state = RunState { known: KnownRecord::new(execution, rev), ..RunState::default() };
        let key = engine.record_of(&id);
        Run { engine, id, key, definition, state: Mutex::new(state), nudge: Notify::new() }
    }

    /// Sets the channel that notifies the caller when the execution is stored.
    pub(crate) fn starting(mut self, started: oneshot::Sender<Result<()>>) -> Run {
        self.state.get_mut().residency.start(started);
        self
    }

    /// Sets the admission that the first commit needs.
    pub(crate) fn asking(mut self, asked: Option<StartNeeds>) -> Run {
        self.state.get_mut().residency.ask(asked);
        self
    }

    /// Marks an execution whose code has not run yet. Its inbox may hold messages.
    pub(crate) fn not_begun(mut self) -> Run {
        self.state.get_mut().residency.set_fresh();
        self
    }

    /// Sets how often the execution was loaded without making progress.
    pub(crate) fn loaded(mut self, count: u32, probation: Option<Probation>) -> Run {
        self.state.get_mut().residency.load(count, probation);
        self
    }

    /// Marks an execution whose journal and inbox are empty. From now on, senders notify it of each delivery.
    pub(crate) fn fresh(mut self) -> Run {
        let state = self.state.get_mut();
        state.residency.set_fresh();
        state.inbox = Inbox::empty();
        self
    }

    pub(crate) fn env(&self) -> &Env {
        self.engine.store.env()
    }

    pub(crate) fn kept(&self) -> Kept<'_> {
        self.engine.kept(&self.id)
    }

    /// Calls `look` with the locked state.
    pub(crate) fn with<T>(&self, look: impl FnOnce(&mut RunState) -> T) -> T {
        look(&mut self.state.lock())
    }

    pub(crate) fn input(&self) -> String {
        self.state.lock().known.stored().input.clone()
    }

    /// The root of its tree; the execution itself if it has no parent.
    pub(crate) fn root(&self) -> ExecutionId {
        let root = self.with(|state| state.known.stored().parent.as_ref().map(|parent| parent.root.clone()));
        root.unwrap_or_else(|| self.id.clone())
    }

    /// The status it has ended with, if that is stored.
    pub(crate) fn ended_as(&self) -> Option<StoredStatus> {
        let state = self.state.lock();
        let status = &state.known.stored().status;
        let ended = (state.known.is_stored() && status.is_terminal()).then_some(status);
        state.residency.succeeded().or(ended).cloned()
    }

    /// True if its end has told callers on other nodes of it.
    pub(crate) fn is_end_told(&self) -> bool {
        self.ended_as().is_some() && self.with(|state| state.residency.is_told())
    }

    /// Distinguishes this run from every other run, also from a run of an earlier execution with the same id.
    pub(crate) fn number(&self) -> (u64, u32) {
        let state = self.state.lock();
        (state.known.stored().started_us, state.known.stored().run)
    }

    /// Why it has to stop, if it has to.
    pub(crate) fn stop(&self) -> Option<Stop> {
        self.state.lock().residency.stopping().cloned()
    }

    pub(crate) fn is_stopping(&self) -> bool {
        self.state.lock().residency.is_stopping()
    }

    pub(crate) async fn until_nudged(&self) {
        self.nudge.notified().await;
    }

    pub(crate) fn nudge(&self) {
        self.nudge.notify_one();
    }

    /// Stops the execution. Its future is never polled again.
    pub(crate) async fn stop_for<T>(&self, stop: Stop) -> T {
        self.set_stop(stop);
        std::future::pending().await
    }

    /// Stops the execution until an operator has looked at it.
    pub(crate) async fn park<T>(&self, reason: impl Into<String>) -> T {
        self.stop_for(Stop::Parked(reason.into())).await
    }

    /// Returns the value that another layer returned. An error stops the execution.
    pub(crate) async fn or_stop<T, E: Into<WorkflowError>>(&self, given: Result<T, E>) -> T {
        match given {
            Ok(value) => value,
            Err(error) => self.stop_for(self.stops(error.into())).await,
        }
    }

    /// Sets why the execution stops, and notifies the caller that waits for its start.
    pub(crate) fn set_stop(&self, stop: Stop) {
        let started = self.state.lock().residency.stop(&self.id, stop);
        if let Some((started, answer)) = started {
            let _ = started.send(answer);
        }
        self.nudge();
    }

    /// Called before the first effect that the journal does not hold. In a replay the operation never goes on from
    /// here. Other branches do, until all code waits: the driver stops the replay then.
    pub(crate) async fn effect(&self) {
        if self.engine.rehearsal.is_replay() {
            self.engine.rehearsal.come_to_end();
            std::future::pending().await
        }
    }

    /// Parks the execution because its code and its journal differ at a place.
    pub(crate) async fn park_at<T>(&self, place: &Place, journal: String, code: String, reason: String) -> T {
        self.engine.rehearsal.differ(place, journal, code);
        self.park(reason).await
    }

    /// Asks the driver to send a commit of an operation's own. The commit is sent even if the operation is dropped.
    pub(crate) async fn submit(&self, commit: Commit, boarded: Boarded) -> CommitOutcome {
        self.submit_by(commit, boarded, None).await
    }

    /// Like [`Run::submit`]; with `by`, the commit is made in that way.
    pub(crate) async fn submit_by(&self, commit: Commit, boarded: Boarded, by: Option<CommitBy>) -> CommitOutcome {
        let (answer, answered) = oneshot::channel();
        self.state.lock().journal.submit(Submitted { commit, boarded, by, answer });
        self.nudge();
        match answered.await {
            Ok(sent) => sent,
            // The execution is no longer driven.
            Err(_) => std::future::pending().await,
        }
    }

    /// True while a commit of an operation's own is in flight.
    pub(crate) fn is_carrying(&self) -> bool {
        self.state.lock().journal.is_carried()
    }

    /// Takes the commits that operations have submitted.
    pub(crate) fn submitted(&self) -> Vec<Submitted> {
        self.state.lock().journal.take_submitted()
    }

    /// Makes everything so far durable, together with the state after the commit.
    pub(crate) async fn commit(&self, next: NextState) -> Result<(), Stop> {
        let (commit, boarded) = self.board(Commit::new(), next);
        match self.send(commit, boarded).await {
            CommitOutcome::Landed(_) => Ok(()),
            CommitOutcome::Refused(_) | CommitOutcome::RolledBack => Err(Stop::Changed),
            CommitOutcome::Stopped(stop) => Err(stop),
        }
    }

    /// Sends a commit and records its duration.
    pub(crate) async fn measured(&self, commit: Commit) -> Result<Outcome, StoreError> {
        self.timed(self.engine.store.commit(commit)).await
    }

    /// Records how long a commit takes.
    async fn timed<T>(&self, commit: impl Future<Output = T>) -> T {
        let began = self.env().monotonic();
        let outcome = commit.await;
        self.engine.metrics.committed(self.env().monotonic().saturating_sub(began));
        outcome
    }

    /// Sends a commit and applies its outcome to the execution.
    pub(crate) async fn send(&self, commit: Commit, boarded: Boarded) -> CommitOutcome {
        let outcome = self.measured(commit).await;
        self.answered(boarded, outcome.map(Some))
    }

    /// Sends a commit in its own way, and applies its outcome to the execution.
    pub(crate) async fn send_by(&self, commit: Commit, boarded: Boarded, by: CommitBy) -> CommitOutcome {
        let outcome = self.timed((by.commit)(commit)).await;
        let sent = self.answered(boarded, outcome);
        // At once: the entry must not be in any other commit.
        if !matches!(sent, CommitOutcome::Landed(_)) {
            self.take_back(&by.place);
        }
        sent
    }

    fn answered(&self, boarded: Boarded, outcome: CommittedBy) -> CommitOutcome {
        match outcome {
            Ok(Some(Outcome::Applied(receipt))) => {
                self.landed(boarded, &receipt);
                CommitOutcome::Landed(receipt)
            }
            Ok(Some(Outcome::Refused(refusal))) => match self.refused(boarded, &refusal) {
                RefusalVerdict::Stop(stop) => CommitOutcome::Stopped(stop),
                RefusalVerdict::Again => CommitOutcome::Refused(refusal),
            },
            Ok(None) => {
                self.put_back(boarded);
                CommitOutcome::RolledBack
            }
            Err(error) => {
                self.put_back(boarded);
                self.engine.node.doubt();
                CommitOutcome::Stopped(self.failed(error))
            }
        }
    }

    /// How an error of the store stops the execution. A value that cannot be stored or read now never can be: it parks.
    pub(crate) fn failed(&self, error: StoreError) -> Stop {
        let is_stored = self.state.lock().known.is_stored();
        match error.kind() {
            ErrorKind::Invalid if is_stored => Stop::Parked(format!("it cannot be stored: {error}")),
            ErrorKind::Corrupt if is_stored => Stop::Parked(format!("its records are damaged: {error}")),
            _ => Stop::Failed(error),
        }
    }

    /// How an error of another layer stops the execution. An error that is not the store's stays until an operator
    /// acts.
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

    /// Replaces the reason why it stops.
    pub(crate) fn replace_stop(&self, stop: Stop) {
        self.state.lock().residency.forget_stop();
        self.set_stop(stop);
    }

    /// Cancels it with its next commit, and asks for that commit soon.
    pub(crate) fn ask_cancel(&self, reason: &str) {
        self.with(|state| {
            state.known.ask_cancel(reason);
            state.ops.wake_all();
        });
        self.nudge();
    }

    /// Another commit has written into the record that the execution is cancelled.
    pub(crate) fn cancelled(&self, before: Rev, after: Option<Rev>, execution: Execution) {
        let is_known = self.with(|state| {
            let is_known = state.known.changed(before, after, execution);
            if is_known {
                state.ops.wake_all();
            }
            is_known
        });
        if !is_known {
            // The stored record is newer than the known one: the execution has to read it again.
            return self.doubt();
        }
        self.nudge();
    }

    /// The execution may have missed a notification. Its next commit checks that its record is still the known one.
    pub(crate) fn doubt(&self) {
        self.with(|state| {
            if state.known.is_stored() {
                state.known.want();
            }
            state.inbox.set_stale();
        });
        self.nudge();
    }

    /// The execution is no longer driven: callers that wait for it look elsewhere.
    pub(crate) fn leave(&self) {
        self.with(|state| {
            state.residency.leave();
            state.ops.wake_all();
        });
    }

    /// Continues as new, with an empty journal; the stored record already says so.
    pub(crate) fn begin_anew(&self) {
        self.with(RunState::begin_anew);
    }

    /// Keeps an entry for the next commit.
    pub(crate) fn put(&self, place: &Place, entry: Entry) {
        self.put_with(place, entry, None);
    }

    /// Keeps an entry for the next commit, with an effect of the same commit.
    pub(crate) fn put_with(&self, place: &Place, entry: Entry, effect: Option<OpEffect>) {
        self.with(|state| state.put(place, entry, effect));
    }

    /// Keeps an entry for a commit that the code waits for. That commit holds everything the code did before it.
    pub(crate) fn put_for_carrier(&self, place: &Place, entry: Entry, effect: Option<OpEffect>) {
        self.with(|state| state.journal.put(place, entry, effect));
    }

    /// The driver is about to poll the code.
    pub(crate) fn begin_poll(&self) {
        self.with(|state| state.is_polled = true);
    }

    /// The driver has polled the code, and the code waits.
    pub(crate) fn end_poll(&self) {
        self.with(|state| {
            state.is_polled = false;
            state.release();
            state.ops.wake_asides();
        });
    }

    /// Drops an entry whose commit failed.
    pub(crate) fn take_back(&self, place: &Place) {
        self.with(|state| state.journal.take_back(place));
    }

    /// A branch was dropped: its uncommitted entries are dropped too.
    pub(crate) fn give_up(&self, branch: &BranchPath) {
        // A replay does not reach the branch's compensations either.
        let sagas: Vec<_> = self.with(|state| state.sagas.iter().filter_map(Weak::upgrade).collect());
        for undos in sagas {
            let forgotten: Vec<_> = undos.lock().extract_if(.., |undo| undo.place.branch.is_within(branch)).collect();
            drop(forgotten);
        }
        self.with(|state| state.give_up(branch));
    }

    /// True if enough is pending to make a commit now.
    pub(crate) fn is_full(&self) -> bool {
        self.with(|state| state.is_full())
    }

    /// Drops pending effects of the code on keys that the end of the execution writes.
    pub(crate) fn forget_effects_on(&self, closing: &[Part]) {
        self.with(|state| state.journal.forget_effects_on(closing));
    }

    /// Drops reviews that no commit has opened. The commit that ends the execution or continues as new does not open
    /// them.
    pub(crate) fn forget_reviews(&self) {
        self.with(|state| state.journal.forget_reviews());
    }

    /// Drops all pending entries, and what would be stored together with them.
    pub(crate) fn forget_pending(&self) {
        self.with(|state| {
            state.journal.forget_pending();
            state.beside.forget();
        });
    }

    /// What to do while the code waits; see [`RunState::todo`].
    pub(crate) fn todo(&self, idle: Duration, is_sure: bool) -> Todo {
        let (now, monotonic) = (self.env().now(), self.env().monotonic());
        self.with(|state| state.todo(now, monotonic, idle, is_sure))
    }

    /// Encodes a value as JSON text, and checks that it is small enough to be stored.
    pub(crate) fn text(&self, what: &str, value: &(impl Serialize + ?Sized)) -> Result<String, Failure> {
        let json = json::to_value(value).map_err(|error| Failure::no_json(what, &error))?;
        let text = json.to_string();
        self.fits(what, text.len())?;
        Ok(text)
    }

    /// Refuses a value that is too large to be stored.
    pub(crate) fn fits(&self, what: &str, length: usize) -> Result<(), Failure> {
        let limit = largest(&self.engine);
        if length <= limit {
            return Ok(());
        }
        let message = format!("{what} takes {length} bytes as JSON; the limit is {limit}");
        Err(Failure::new(message).with_code("latchwork.too_large").not_retryable())
    }
}

pub(crate) fn hash_text(text: &str) -> u64 {
    xxhash_rust::xxh3::xxh3_64(text.as_bytes())
}

/// The longest value of a caller, in bytes. Everything else that a record holds has to fit beside it.
pub(crate) fn largest(engine: &EngineInner) -> usize {
    engine.store.limits().value_bytes.saturating_sub(ROOM)
}

/// The range of an execution's journal: of all its runs, or of the runs before one.
pub(crate) fn journal_range(engine: &EngineInner, id: &ExecutionId, before: Option<u32>) -> crate::store::Range {
    let space = &engine.spaces.journal;
    match before {
        None => space.prefix(id_key(id)),
        Some(run) => space.range(run_key(id, 0)..run_key(id, run)),
    }
}
