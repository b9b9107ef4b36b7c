//! One execution in memory. `State` holds its machines, each of which owns its fields: the record, the journal, the
//! operations, the inbox, the guards, what it has published, its reviews, and its residency. `Run` passes what happens to
//! the machines it concerns. The execution's own task drives it; callers from outside come by here as well.

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
use crate::workflow::admission::Asked;
use crate::workflow::ctx::beats::Attempts;
use crate::workflow::ctx::locks::Grant;
use crate::workflow::ctx::saga::Undos;
use crate::workflow::definition::Definition;
use crate::workflow::engine::Inner;
use crate::workflow::journal::place::{Path, Place};
use crate::workflow::stored::kept::Kept;
use crate::workflow::stored::record::{Entry, Execution, Labels, Status, Wait, id_key, run_key};
use crate::workflow::{ExecutionId, Failure, Result, WorkflowError};

pub(crate) use board::{Boarded, Effect, KEYED, RECORD, Verdict, turn};
pub(crate) use branch::Branch;
pub(crate) use decide::Todo;
use guards::Guards;
use inbox::Inbox;
pub(crate) use inbox::{Address, Received};
use journal::Journal;
use known::Known;
pub(crate) use op::{Doing, Listed, Waited};
pub(crate) use ops::CALLED_OFF;
use ops::Operations;
use published::{OpenReviews, Publishing};
pub(crate) use residency::Probation;
use residency::Residency;
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
    /// Has the driver look at what there is to do.
    nudge: Notify,
}

/// The machines of an execution. None of them knows another; what an event means for several of them is said here.
#[derive(Default)]
pub(crate) struct State {
    pub(crate) known: Known,
    journal: Journal,
    pub(crate) ops: Operations,
    pub(crate) inbox: Inbox,
    pub(crate) guards: Guards,
    pub(crate) published: Publishing,
    pub(crate) reviews: OpenReviews,
    pub(crate) attempts: Attempts,
    pub(crate) residency: Residency,
    /// The sagas under way.
    sagas: Vec<Weak<Undos>>,
    /// Whether the code is being polled: what it comes to meanwhile is a draft in each machine.
    is_polled: bool,
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
        let state = State { known: Known::new(execution, rev), ..State::default() };
        let key = engine.record_of(&id);
        Run { engine, id, key, definition, state: Mutex::new(state), nudge: Notify::new() }
    }

    /// The same, whose caller is told when it is stored.
    pub(crate) fn starting(mut self, started: oneshot::Sender<Result<()>>) -> Run {
        self.state.get_mut().residency.start(started);
        self
    }

    /// The same, whose first commit is to be admitted.
    pub(crate) fn asking(mut self, asked: Option<Asked>) -> Run {
        self.state.get_mut().residency.ask(asked);
        self
    }

    /// The same, of which no code has run yet. Messages may have been sent to it.
    pub(crate) fn not_begun(mut self) -> Run {
        self.state.get_mut().residency.set_fresh();
        self
    }

    /// The same, loaded so often by now without making progress.
    pub(crate) fn taken_up(mut self, count: u32, probation: Option<Probation>) -> Run {
        self.state.get_mut().residency.load(count, probation);
        self
    }

    /// The same, whose journal and inbox are empty. Senders tell of each delivery from now on.
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

    /// Something of its state.
    pub(crate) fn with<T>(&self, look: impl FnOnce(&mut State) -> T) -> T {
        look(&mut self.state.lock())
    }

    pub(crate) fn input(&self) -> String {
        self.state.lock().known.stored().input.clone()
    }

    /// The first of its ancestors; itself if it has none.
    pub(crate) fn root(&self) -> ExecutionId {
        let root = self.with(|state| state.known.stored().parent.as_ref().map(|parent| parent.root.clone()));
        root.unwrap_or_else(|| self.id.clone())
    }

    /// What it has come to, if that is stored.
    pub(crate) fn ended_as(&self) -> Option<Status> {
        let state = self.state.lock();
        let status = &state.known.stored().status;
        let ended = (state.known.is_stored() && status.is_terminal()).then_some(status);
        state.residency.succeeded().or(ended).cloned()
    }

    /// Tells this run of the execution from every other, also from one that has had the same id.
    pub(crate) fn number(&self) -> (u64, u32) {
        let state = self.state.lock();
        (state.known.stored().started_us, state.known.stored().run)
    }

    /// Why it is to stop, if it is.
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
        let started = self.state.lock().residency.stop(&self.id, stop);
        if let Some((started, answer)) = started {
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
        self.state.lock().journal.submit(Submitted { commit, boarded, answer });
        self.nudge();
        match answered.await {
            Ok(sent) => sent,
            // Nobody drives it any more.
            Err(_) => std::future::pending().await,
        }
    }

    /// Whether an operation has a commit of its own on its way.
    pub(crate) fn is_carrying(&self) -> bool {
        self.state.lock().journal.is_carried()
    }

    /// The commits that operations want sent.
    pub(crate) fn submitted(&self) -> Vec<Submitted> {
        self.state.lock().journal.take_submitted()
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
        let is_stored = self.state.lock().known.is_stored();
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
        self.state.lock().residency.forget_stop();
        self.set_stop(stop);
    }

    /// Cancels it with its next commit, which is to be soon.
    pub(crate) fn ask_cancel(&self, reason: &str) {
        self.with(|state| {
            state.known.ask_cancel(reason);
            state.ops.wake_all();
        });
        self.nudge();
    }

    /// Another commit has written into its record that it is to be cancelled.
    pub(crate) fn cancelled(&self, before: Rev, after: Option<Rev>, execution: Execution) {
        let is_known = self.with(|state| {
            let is_known = state.known.changed(before, after, execution);
            if is_known {
                state.ops.wake_all();
            }
            is_known
        });
        if !is_known {
            // What is stored of it is newer than what is known here: it has to see that.
            return self.doubt();
        }
        self.nudge();
    }

    /// Something may have been done to it that it was not told of: it looks whether it is stored as it knows.
    pub(crate) fn doubt(&self) {
        self.with(|state| {
            if state.known.is_stored() {
                state.known.want();
            }
            state.inbox.set_stale();
        });
        self.nudge();
    }

    /// It is no longer driven: callers that wait for something of it look elsewhere.
    pub(crate) fn leave(&self) {
        self.with(|state| {
            state.residency.leave();
            state.ops.wake_all();
        });
    }

    /// Goes on with an empty journal, as it was stored to.
    pub(crate) fn begin_anew(&self) {
        self.with(State::begin_anew);
    }

    /// Keeps an entry for the next commit.
    pub(crate) fn put(&self, place: &Place, entry: Entry) {
        self.put_with(place, entry, None);
    }

    /// Keeps an entry for the next commit, with what is to be done in it.
    pub(crate) fn put_with(&self, place: &Place, entry: Entry, effect: Option<Effect>) {
        self.with(|state| state.put(place, entry, effect));
    }

    /// Keeps an entry for a commit that the code waits for, which holds everything the code came to before it.
    pub(crate) fn put_for_carrier(&self, place: &Place, entry: Entry, effect: Option<Effect>) {
        self.with(|state| state.journal.put(place, entry, effect));
    }

    /// The code is about to be polled.
    pub(crate) fn begin_poll(&self) {
        self.with(|state| state.is_polled = true);
    }

    /// The code was polled, and waits.
    pub(crate) fn end_poll(&self) {
        self.with(|state| {
            state.is_polled = false;
            state.release();
            state.ops.wake_asides();
        });
    }

    /// Drops an entry whose commit was not made.
    pub(crate) fn take_back(&self, place: &Place) {
        self.with(|state| state.journal.take_back(place));
    }

    /// A branch was given up: what it has not committed is dropped.
    pub(crate) fn give_up(&self, branch: &Path) {
        // A replay does not come by its compensations either.
        let sagas: Vec<_> = self.with(|state| state.sagas.iter().filter_map(Weak::upgrade).collect());
        for undos in sagas {
            let forgotten: Vec<_> = undos.lock().extract_if(.., |undo| undo.place.branch.is_within(branch)).collect();
            drop(forgotten);
        }
        self.with(|state| state.give_up(branch));
    }

    /// Whether so much is pending that it is time for a commit.
    pub(crate) fn is_full(&self) -> bool {
        self.with(|state| state.is_full())
    }

    /// The end of the execution writes these parts. What its code was about to do to the same keys is dropped.
    pub(crate) fn forget_effects_on(&self, closing: &[Part]) {
        self.with(|state| state.journal.forget_effects_on(closing));
    }

    /// A review that no commit has opened is not opened by the commit that ends the execution or begins it anew.
    pub(crate) fn forget_reviews(&self) {
        self.with(|state| state.journal.forget_reviews());
    }

    /// No entry is committed any more.
    pub(crate) fn forget_pending(&self) {
        self.with(|state| state.journal.forget_pending());
    }

    /// What is to be done now that the code waits; see [`State::todo`].
    pub(crate) fn todo(&self, idle: Duration, is_sure: bool) -> Todo {
        let (now, monotonic) = (self.env().now(), self.env().monotonic());
        self.with(|state| state.todo(now, monotonic, idle, is_sure))
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
    /// Keeps an entry for the next commit. While the code is polled, for the next commit after that.
    fn put(&mut self, place: &Place, entry: Entry, effect: Option<Effect>) {
        if self.is_polled {
            self.journal.draft(place, entry, effect);
        } else {
            self.journal.put(place, entry, effect);
        }
    }

    /// What the code has come to by now belongs together: the next commit takes it.
    fn release(&mut self) {
        self.journal.release();
        self.known.release();
        self.published.release();
        self.reviews.release();
    }

    /// The same, unless the code is being polled.
    fn release_unless_polled(&mut self) {
        if !self.is_polled {
            self.release();
        }
    }

    /// Gives the execution these labels.
    pub(crate) fn label(&mut self, labels: Labels) {
        self.known.label(labels);
        self.release_unless_polled();
    }

    /// Publishes a value, and tells the branches that wait for it.
    pub(crate) fn publish(&mut self, name: &str, text: String) {
        self.published.publish(name, text);
        self.release_unless_polled();
    }

    /// Closes a review with the next commit, which holds that it was given up.
    pub(crate) fn close_review(&mut self, key: Key) {
        self.reviews.close(key);
        self.release_unless_polled();
    }

    /// A branch was given up: what it has not committed is dropped.
    fn give_up(&mut self, branch: &Path) {
        let given_back = self.journal.give_up(branch);
        self.give_back(given_back);
        self.reviews.give_up(branch);
        self.release_unless_polled();
    }

    /// Messages were not received after all.
    fn give_back(&mut self, messages: Vec<Address>) {
        messages.into_iter().for_each(|address| self.inbox.give_back(address));
    }

    /// Notes a saga that is under way.
    pub(crate) fn begin_saga(&mut self, undos: &Arc<Undos>) {
        self.sagas.retain(|undos| undos.strong_count() > 0);
        self.sagas.push(Arc::downgrade(undos));
    }

    /// Everything so far is to be durable. Gives its last stamp.
    pub(crate) fn want_all(&mut self) -> u64 {
        self.journal.want_all()
    }

    /// Whether the execution is stored, with everything up to a stamp.
    fn is_durable(&self, stamp: u64) -> bool {
        self.known.is_stored() && self.journal.is_durable(stamp)
    }

    /// Something if the execution is stored; otherwise its first commit is wanted.
    fn is_stored_or_wants(&mut self) -> Option<()> {
        if !self.known.is_stored() {
            self.known.want();
        }
        self.known.is_stored().then_some(())
    }

    /// Whether so much is pending that it is time for a commit.
    pub(crate) fn is_full(&self) -> bool {
        self.journal.is_full()
    }

    /// Whether what is pending changes others.
    pub(crate) fn has_effects(&self) -> bool {
        self.journal.has_effects()
    }

    /// Whether the stored record differs from what the execution is.
    fn is_changed(&self) -> bool {
        self.known.is_changed() || self.reviews.is_closing()
    }

    /// Why operations of a branch are cancelled, if they are.
    pub(crate) fn cancelled(&self, branch: &Path) -> Option<&str> {
        self.known.cancel().or_else(|| self.ops.called_off(branch))
    }

    /// The code has one more guard of a grant.
    pub(crate) fn hold(&mut self, request: &Key, grant: Grant) {
        self.guards.hold(request, grant, self.journal.stamps());
    }

    /// The code has one guard less of a grant.
    pub(crate) fn leave(&mut self, request: &Key) {
        self.guards.leave(request, self.journal.stamps());
    }

    /// Notes how far an attempt is, unless it is over.
    pub(crate) fn beat(&mut self, place: &Place, run: u32, begun: &Entry, progress: String) -> bool {
        if self.known.stored().run != run || !self.attempts.beat(place, begun.attempts, &progress) {
            return false;
        }
        self.put(place, Entry { progress: Some(progress), ..begun.clone() }, None);
        // The driver may look before the attempt waits for that.
        self.want_all();
        true
    }

    /// Goes on with an empty journal. The operations of the code are gone with it; what is left are those from outside.
    fn begin_anew(&mut self) {
        self.residency.begin_anew();
        self.journal.begin_anew();
        self.guards.begin_anew();
        self.reviews.begin_anew();
        self.attempts.begin_anew();
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
