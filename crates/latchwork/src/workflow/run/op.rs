//! What the branches of an execution are doing, and their waits: for a commit, a message, a time.

use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

use crate::lock::LockRefused;
use crate::store::Timestamp;
use crate::workflow::Failure;
use crate::workflow::ctx::locks::Grant;
use crate::workflow::journal::place::{Path, Place};
use crate::workflow::run::{IDLE, Inbox, Next, Run, State};
use crate::workflow::stored::record::{Status, Wait, WaitsFor};

/// Why operations are cancelled in branches beside one that has failed.
pub(crate) const CALLED_OFF: &str = "a branch beside it has failed";

/// An operation that is under way.
pub(crate) struct Op {
    what: WaitsFor,
    since: Timestamp,
    until: Option<Timestamp>,
    /// Whether it only waits, for something that the store will tell of.
    waits: bool,
    /// Whether what it was to do in a commit could not be done.
    refused: bool,
    waker: Option<Waker>,
}

/// An operation that is under way, for those who do it.
#[derive(Clone)]
pub(crate) struct Doing {
    pub(crate) run: Arc<Run>,
    pub(crate) op: u64,
    /// The branch that it is in, if it is an operation of the code.
    within: Option<Path>,
    /// Whether it goes on though the execution is cancelled.
    is_shielded: bool,
    /// Whether it is done beside the code.
    is_aside: bool,
}

/// How a wait ended.
pub(crate) enum Waited<T> {
    Got(T),
    TimedOut,
    Cancelled,
}

/// What is to be done for an execution whose code waits.
pub(crate) enum Todo {
    Nothing,
    Commit(Next),
    /// Look at it again after so long.
    Later(Duration),
    /// Look at the messages again.
    Read,
    /// See whether the code has anything to do that it does not know of yet.
    MakeSure,
}

/// What was to be done in a commit together with others could not be.
#[derive(Debug)]
pub(crate) struct Refused;

/// An operation that is on the list until this is dropped.
pub(crate) struct Listed(pub(crate) Doing);

impl Listed {
    /// One that is not of the code.
    pub(crate) fn begin(run: &Arc<Run>, what: WaitsFor) -> Listed {
        Listed(Doing::begin(run, what, None))
    }
}

impl std::ops::Deref for Listed {
    type Target = Doing;

    fn deref(&self) -> &Doing {
        &self.0
    }
}

impl Drop for Listed {
    fn drop(&mut self) {
        self.0.ends();
    }
}

impl Doing {
    pub(crate) fn begin(run: &Arc<Run>, what: WaitsFor, within: Option<Path>) -> Doing {
        let since = run.env().now();
        let op = run.with(|state| {
            state.last_op += 1;
            let op = Op { what, since, until: None, waits: false, refused: false, waker: None };
            state.ops.insert(state.last_op, op);
            state.last_op
        });
        Doing { run: run.clone(), op, within, is_shielded: false, is_aside: false }
    }

    /// The same, which goes on though the execution is cancelled.
    pub(crate) fn shielded(self, is_shielded: bool) -> Doing {
        Doing { is_shielded, ..self }
    }

    /// One that is done beside the code.
    pub(crate) fn aside(run: &Arc<Run>) -> Doing {
        Doing { is_aside: true, ..Doing::begin(run, WaitsFor::Store, None) }
    }

    /// Takes it off the list.
    pub(crate) fn ends(&self) {
        self.run.with(|state| {
            state.stop_waiting(self.op);
            state.ops.remove(&self.op)
        });
        self.carried();
    }

    /// Whether it is to be given up: the execution is cancelled, or its branch, or a lock that it holds was taken away.
    pub(crate) fn is_cancelled(&self) -> bool {
        self.run.with(|state| self.is_given_up(state))
    }

    fn is_given_up(&self, state: &State) -> bool {
        let is_cancelled = |within: &Path| !self.is_shielded && state.cancelled(within).is_some();
        self.within.as_ref().is_some_and(|within| state.lost_lock().is_some() || is_cancelled(within))
    }

    /// The same, for those who have to be told when it becomes so.
    pub(crate) fn poll_cancelled(&self, context: &std::task::Context<'_>) -> bool {
        self.run.with(|state| {
            if let Some(op) = state.ops.get_mut(&self.op) {
                op.waker = Some(context.waker().clone());
            }
            self.is_given_up(state)
        })
    }

    /// Tells what is done now.
    pub(crate) fn does(&self, what: WaitsFor) {
        let now = self.run.env().now();
        self.run.with(|state| state.ops.get_mut(&self.op).map(|op| (op.what, op.since) = (what, now)));
    }

    /// Waits until there is what is looked for, or the time has come, or the execution is cancelled. Meanwhile, the
    /// execution may leave memory.
    pub(crate) async fn wait<T>(
        &self,
        what: WaitsFor,
        since: Timestamp,
        until: Option<Timestamp>,
        mut look: impl FnMut(&mut State) -> Option<T>,
    ) -> Waited<T> {
        let began = self.run.env().now();
        let since = self.run.with(|state| {
            // It may have been out of memory meanwhile.
            let before = state.execution.waits.iter().find(|before| before.what == what);
            let since = before.map_or(since, |before| since.min(Timestamp(before.since_us)));
            state.start_waiting(self.op, &what, since, until);
            state.want_all();
            since
        });
        let left = until.map(|until| Duration::from_micros(until.0.saturating_sub(began.0)));
        let mut sleep = left.filter(|left| !left.is_zero()).map(|left| self.run.env().sleep(left));
        let waited = std::future::poll_fn(|context| {
            let mut state = self.run.state.lock();
            if state.stop.is_some() {
                return Poll::Pending;
            }
            if let Some(found) = look(&mut state) {
                return Poll::Ready(Waited::Got(found));
            }
            if self.is_given_up(&state) {
                return Poll::Ready(Waited::Cancelled);
            }
            if let Some(op) = state.ops.get_mut(&self.op) {
                op.waker = Some(context.waker().clone());
            }
            drop(state);
            let is_over = match &mut sleep {
                Some(sleep) => sleep.as_mut().poll(context).is_ready(),
                None => until.is_some(),
            };
            if is_over { Poll::Ready(Waited::TimedOut) } else { Poll::Pending }
        });
        let waited = waited.await;
        self.run.with(|state| state.stop_waiting(self.op));
        let took = self.run.env().now().0.saturating_sub(since.0);
        self.run.engine.metrics.waited(&what, Duration::from_micros(took));
        waited
    }

    /// Makes everything so far durable. Returns only when that has happened, or when what this operation was to do
    /// cannot be done.
    pub(crate) async fn flush(&self) -> Result<(), Refused> {
        let stamp = self.run.with(State::want_all);
        self.until(|state| {
            let is_durable = state.rev.is_some() && state.is_durable(stamp);
            let is_refused = state.ops.get_mut(&self.op).is_some_and(|op| std::mem::take(&mut op.refused));
            if is_refused { Some(Err(Refused)) } else { is_durable.then_some(Ok(())) }
        })
        .await
    }

    /// Waits until the execution is stored, and has it be so.
    pub(crate) async fn stored(&self) {
        self.until(|state| {
            state.wants_record |= state.rev.is_none();
            state.rev.is_some().then_some(())
        })
        .await
    }

    /// The same, from outside of the workflow; nothing if the execution has left memory before.
    pub(crate) async fn flushed(&self) -> Option<()> {
        let stamp = self.run.with(State::want_all);
        self.outside(|state| (state.rev.is_some() && state.is_durable(stamp)).then_some(())).await
    }

    /// Waits until no commit of the execution's is on its way.
    pub(crate) async fn arrived(&self) {
        self.until(|state| state.flying.is_empty().then_some(())).await
    }

    /// Waits, from outside of the workflow, until there is what is looked for; nothing if the execution has left
    /// memory.
    pub(crate) async fn outside<T>(&self, mut look: impl FnMut(&mut State) -> Option<T>) -> Option<T> {
        self.until(|state| match look(state) {
            None if !state.has_left => None,
            found => Some(found),
        })
        .await
    }

    /// Waits until no commit of the execution's is on its way, and keeps all others from starting until
    /// [`Doing::carried`]: for those whose commits are their own. So commits of an execution land in the order in which
    /// its code came to what they hold.
    pub(crate) async fn carry(&self) {
        self.until(|state| {
            let is_free = state.rev.is_some() && state.flying.is_empty() && state.carrier.is_none();
            // What the code that is polled has come to by now is half of something, unless it is the code that asks.
            if self.is_aside && state.is_polled {
                state.asides.push(self.op);
                return None;
            }
            state.wants_record |= state.rev.is_none();
            is_free.then(|| {
                state.carrier = Some(self.op);
                state.release();
            })
        })
        .await
    }

    /// Looks again whenever the operation is woken, until there is what is looked for.
    pub(crate) async fn until<T>(&self, mut look: impl FnMut(&mut State) -> Option<T>) -> T {
        std::future::poll_fn(|context| {
            let mut state = self.run.state.lock();
            if let Some(found) = look(&mut state) {
                return Poll::Ready(found);
            }
            if let Some(op) = state.ops.get_mut(&self.op) {
                op.waker = Some(context.waker().clone());
            }
            Poll::Pending
        })
        .await
    }

    /// Its own commit is done with.
    pub(crate) fn carried(&self) {
        let is_to_look = self.run.with(|state| {
            if state.carrier != Some(self.op) {
                return false;
            }
            state.carrier = None;
            state.wake(|_, waits| !waits);
            // Whoever polls the code looks for what is to be done when it has been.
            !state.is_polled
        });
        if is_to_look {
            self.run.nudge();
        }
    }
}

impl Run {
    /// Has the branches of a fork cancelled that are beside the one that has failed: they come to their end, and what
    /// they have done can be undone.
    pub(crate) fn call_off(&self, fork: &Place, failed: usize) {
        let mut state = self.state.lock();
        state.called_off.push((fork.clone(), failed));
        state.wake(|_, _| true);
    }

    /// Why an operation is given up.
    pub(crate) fn why_cancelled(&self, place: &Place) -> Failure {
        self.with(|state| match state.lost_lock() {
            Some(lost) => Failure::typed(lost.clone()).not_retryable(),
            None => Failure::from_cancel(state.cancelled(&place.branch).unwrap_or_default().to_string()),
        })
    }

    /// The branches of a fork have ended, or were given up.
    pub(crate) fn is_past(&self, fork: &Place) {
        self.state.lock().called_off.retain(|(other, _)| other != fork);
    }
}

impl State {
    /// Everything so far is to be durable. Gives its last stamp.
    pub(crate) fn want_all(&mut self) -> u64 {
        self.wanted = self.stamps;
        self.stamps
    }

    /// Why what is done in a branch is cancelled, if it is.
    pub(crate) fn cancelled(&self, branch: &Path) -> Option<&str> {
        let is_called_off =
            |(fork, failed): &(Place, usize)| fork.beside(branch).is_some_and(|beside| beside != *failed);
        let beside = || self.called_off.iter().any(is_called_off).then_some(CALLED_OFF);
        self.cancel.as_deref().or_else(beside)
    }

    /// Why a lock was taken away that the code still has a guard of, if one was.
    pub(crate) fn lost_lock(&self) -> Option<&LockRefused> {
        self.held.values().find_map(|holding| match &holding.grant {
            Grant::Lost(why) => Some(why),
            Grant::Held | Grant::Past => None,
        })
    }

    /// Whether it is to stop.
    pub(crate) fn is_over(&self) -> bool {
        self.stop.is_some()
    }

    /// Whether nobody drives it any more.
    pub(crate) fn has_left(&self) -> bool {
        self.has_left
    }

    /// Whether all that its branches do is wait.
    pub(crate) fn only_waits(&self) -> bool {
        !self.ops.is_empty() && self.waits == self.ops.len()
    }

    /// Whether everything up to a stamp is durable.
    fn is_durable(&self, stamp: u64) -> bool {
        let is_empty = self.pending.is_empty() && self.draft.is_empty();
        (is_empty || self.first_pending > stamp) && self.flying.values().all(|first| *first > stamp)
    }

    /// Whether its record does not say that it runs, and how.
    pub(crate) fn is_to_be_written(&self) -> bool {
        let stored = &self.execution;
        stored.status != Status::Running
            || stored.timer_us.is_some()
            || stored.labels != self.labels
            || stored.cancel != self.cancel
            || stored.has_children != self.has_children
            || stored.has_locks != self.has_locks
            || stored.has_reviews != self.has_reviews
            || !self.closed.is_empty()
    }

    fn start_waiting(&mut self, number: u64, what: &WaitsFor, since: Timestamp, until: Option<Timestamp>) {
        self.stop_waiting(number);
        let Some(op) = self.ops.get_mut(&number) else { return };
        (op.what, op.since, op.until, op.waits) = (what.clone(), since, until, true);
        self.waits += 1;
        self.waiting.entry(what.without_name()).or_default().push(number);
    }

    fn stop_waiting(&mut self, number: u64) {
        let Some(op) = self.ops.get_mut(&number).filter(|op| op.waits) else { return };
        (op.waits, op.until) = (false, None);
        self.waits -= 1;
        let what = op.what.without_name();
        if let Some(waiting) = self.waiting.get_mut(&what) {
            waiting.retain(|waits| *waits != number);
            if waiting.is_empty() {
                self.waiting.remove(&what);
            }
        }
    }

    /// Has those look whether they can go on that wait for this.
    pub(crate) fn wake_waiting(&self, what: &WaitsFor) {
        let waiting = self.waiting.get(what).into_iter().flatten().filter_map(|op| self.ops.get(op));
        waiting.filter_map(|op| op.waker.as_ref()).for_each(Waker::wake_by_ref);
    }

    /// Has operations look whether they can go on.
    pub(crate) fn wake(&self, which: impl Fn(&WaitsFor, bool) -> bool) {
        let woken = self.ops.values().filter(|op| which(&op.what, op.waits));
        woken.filter_map(|op| op.waker.as_ref()).for_each(Waker::wake_by_ref);
    }

    /// Has those go on who are beside the code, and wait until it was polled.
    pub(super) fn wake_asides(&mut self) {
        let asides = std::mem::take(&mut self.asides);
        let asides = asides.into_iter().filter_map(|op| self.ops.get(&op));
        asides.filter_map(|op| op.waker.as_ref()).for_each(Waker::wake_by_ref);
    }

    pub(crate) fn refuse(&mut self, op: u64) {
        if let Some(op) = self.ops.get_mut(&op) {
            op.refused = true;
            op.waker.iter().for_each(Waker::wake_by_ref);
        }
    }

    /// What its operations wait for, or do.
    pub(crate) fn doing(&self) -> Vec<Wait> {
        let wait =
            |op: &Op| Wait { what: op.what.clone(), since_us: op.since.0, until_us: op.until.map(|until| until.0) };
        self.ops.values().map(wait).collect()
    }
}

impl Run {
    /// What is to be done now that the code waits. `idle` is for how long it has by now; `is_sure` tells whether it is
    /// certain that the code has nothing to do.
    pub(crate) fn todo(&self, idle: Duration, is_sure: bool) -> Todo {
        let now = self.env().now();
        let mut state = self.state.lock();
        // One commit at a time.
        if state.stop.is_some() || state.carrier.is_some() || !state.flying.is_empty() || !state.submitted.is_empty() {
            return Todo::Nothing;
        }
        let patience = state.inbox.as_ref().and_then(|inbox| inbox.patience(self.env().monotonic()));
        if state.inbox.as_ref().is_some_and(Inbox::is_stale) || patience.is_some_and(|left| left.is_zero()) {
            return Todo::Read;
        }
        match (state.todo(now, idle, is_sure), patience) {
            (Todo::Nothing, Some(left)) => Todo::Later(left),
            (Todo::Later(pause), Some(left)) => Todo::Later(pause.min(left)),
            (todo, _) => todo,
        }
    }
}

impl State {
    /// The same, when all messages are known and no commit is on its way.
    fn todo(&mut self, now: Timestamp, idle: Duration, is_sure: bool) -> Todo {
        if let Some(input) = self.continues.take() {
            return Todo::Commit(Next::Continues(input));
        }
        let is_stored = self.rev.is_some();
        if !self.only_waits() {
            let is_wanted = self.wants_record || !self.pending.is_empty() && self.first_pending <= self.wanted;
            return match (is_wanted, is_stored) {
                (true, _) => Todo::Commit(Next::Runs),
                // A first step that takes long is to be seen from outside, though it needs no commit to be run.
                (false, true) if self.pending.values().any(|pending| pending.entry.is_intent()) => {
                    if idle < IDLE {
                        Todo::Later(IDLE.saturating_sub(idle))
                    } else {
                        Todo::Commit(Next::Runs)
                    }
                }
                (false, true) => Todo::Nothing,
                // It waits for something of its own; whoever has started it need not.
                (false, false) if is_sure => Todo::Commit(Next::Runs),
                (false, false) => Todo::MakeSure,
            };
        }
        if !is_sure {
            return Todo::MakeSure;
        }
        let until = self.ops.values().filter_map(|op| op.until).min();
        let is_soon = until.is_some_and(|until| until <= now.plus(IDLE));
        let is_timer = until.is_some() && !self.ops.values().any(|op| op.what.is_message());
        let is_settled = is_stored && self.pending.is_empty() && !self.is_to_be_written();
        // One that was woken for nothing goes where it was.
        let has_waited = is_stored && self.pending.is_empty() && self.execution.status == Status::Waiting;
        // One that was taken up after a crash says at once that it waits: until then it counts as a suspect.
        let has_idled = idle >= IDLE || self.taken_up > 0;
        if !is_soon && (is_timer || has_waited || is_settled && has_idled) {
            let until = until.into_iter().chain(self.execution.deadline_us.map(Timestamp)).min();
            return Todo::Commit(Next::Waits(until, self.doing()));
        }
        match is_settled {
            false => Todo::Commit(Next::Runs),
            true if is_soon => Todo::Nothing,
            true => Todo::Later(IDLE.saturating_sub(idle)),
        }
    }
}
