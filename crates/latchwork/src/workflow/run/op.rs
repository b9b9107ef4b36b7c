//! An operation in progress, as its own code sees it: its waits for a commit, a message or a time.

use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use crate::store::Timestamp;
use crate::workflow::Failure;
use crate::workflow::journal::place::{BranchPath, Place};
use crate::workflow::run::{Run, RunState};
use crate::workflow::stored::record::WaitsFor;

/// An operation in progress.
#[derive(Clone)]
pub(crate) struct Doing {
    pub(crate) run: Arc<Run>,
    pub(crate) op: u64,
    /// The branch of the operation, if it is an operation of the code.
    within: Option<BranchPath>,
    /// True if it continues when the execution is cancelled.
    is_shielded: bool,
    /// True if it runs beside the code.
    is_aside: bool,
}

/// How a wait ended.
pub(crate) enum WaitEnd<T> {
    Got(T),
    TimedOut,
    Cancelled,
}

/// The operation's part of a shared commit was refused.
#[derive(Debug)]
pub(crate) struct Refused;

/// An operation in progress; dropping this ends it.
pub(crate) struct OpInProgress(pub(crate) Doing);

impl OpInProgress {
    /// Begins an operation that is not one of the code.
    pub(crate) fn begin(run: &Arc<Run>, what: WaitsFor) -> OpInProgress {
        OpInProgress(Doing::begin(run, what, None))
    }
}

impl std::ops::Deref for OpInProgress {
    type Target = Doing;

    fn deref(&self) -> &Doing {
        &self.0
    }
}

impl Drop for OpInProgress {
    fn drop(&mut self) {
        self.0.ends();
    }
}

impl Doing {
    pub(crate) fn begin(run: &Arc<Run>, what: WaitsFor, within: Option<BranchPath>) -> Doing {
        let since = run.env().now();
        let op = run.with(|state| state.ops.begin(what, since));
        Doing { run: run.clone(), op, within, is_shielded: false, is_aside: false }
    }

    /// Sets whether the operation continues when the execution is cancelled.
    pub(crate) fn shielded(self, is_shielded: bool) -> Doing {
        Doing { is_shielded, ..self }
    }

    /// Begins an operation that runs beside the code.
    pub(crate) fn aside(run: &Arc<Run>) -> Doing {
        Doing { is_aside: true, ..Doing::begin(run, WaitsFor::Store, None) }
    }

    pub(crate) fn ends(&self) {
        self.run.with(|state| state.ops.end(self.op));
        self.carried();
    }

    /// True if it has to stop: the execution or its branch is cancelled, or a lock that it holds was taken away.
    pub(crate) fn is_cancelled(&self) -> bool {
        self.run.with(|state| self.is_given_up(state))
    }

    fn is_given_up(&self, state: &RunState) -> bool {
        let is_cancelled = |within: &BranchPath| !self.is_shielded && state.cancelled(within).is_some();
        self.within.as_ref().is_some_and(|within| state.guards.lost().is_some() || is_cancelled(within))
    }

    /// Like `is_cancelled`; the caller is woken when that changes.
    pub(crate) fn poll_cancelled(&self, context: &std::task::Context<'_>) -> bool {
        self.run.with(|state| {
            state.ops.set_waker(self.op, context.waker());
            self.is_given_up(state)
        })
    }

    /// Sets what the operation does now.
    pub(crate) fn does(&self, what: WaitsFor) {
        let now = self.run.env().now();
        self.run.with(|state| state.ops.does(self.op, what, now));
    }

    /// Waits until `look` finds something, the time has come, or the operation is cancelled. The execution may leave
    /// memory meanwhile.
    pub(crate) async fn wait<T>(
        &self,
        what: WaitsFor,
        since: Timestamp,
        until: Option<Timestamp>,
        mut look: impl FnMut(&mut RunState) -> Option<T>,
    ) -> WaitEnd<T> {
        let began = self.run.env().now();
        let since = self.run.with(|state| {
            // The execution may have been out of memory during this wait.
            let before = state.known.stored().waits.iter().find(|before| before.what == what);
            let since = before.map_or(since, |before| since.min(before.since));
            state.ops.start_waiting(self.op, &what, since, until);
            state.want_all();
            since
        });
        let left = until.map(|until| Duration::from_micros(until.0.saturating_sub(began.0)));
        let mut sleep = left.filter(|left| !left.is_zero()).map(|left| self.run.env().sleep(left));
        let waited = std::future::poll_fn(|context| {
            let mut state = self.run.state.lock();
            if state.residency.is_stopping() {
                return Poll::Pending;
            }
            if let Some(found) = look(&mut state) {
                return Poll::Ready(WaitEnd::Got(found));
            }
            if self.is_given_up(&state) {
                return Poll::Ready(WaitEnd::Cancelled);
            }
            state.ops.set_waker(self.op, context.waker());
            drop(state);
            let is_over = match &mut sleep {
                Some(sleep) => sleep.as_mut().poll(context).is_ready(),
                None => until.is_some(),
            };
            if is_over { Poll::Ready(WaitEnd::TimedOut) } else { Poll::Pending }
        });
        let waited = waited.await;
        self.run.with(|state| state.ops.stop_waiting(self.op));
        let took = self.run.env().now().0.saturating_sub(since.0);
        self.run.engine.metrics.waited(&what, Duration::from_micros(took));
        waited
    }

    /// Makes everything so far durable. Returns when that has happened, or when this operation's part was refused.
    pub(crate) async fn flush(&self) -> Result<(), Refused> {
        let stamp = self.run.with(RunState::want_all);
        self.until(|state| {
            if state.ops.take_refused(self.op) {
                return Some(Err(Refused));
            }
            state.is_durable(stamp).then_some(Ok(()))
        })
        .await
    }

    /// Makes everything so far durable, until the next commit has room for more records and events beside the journal.
    pub(crate) async fn make_room(&self) {
        let stamp = self.run.with(RunState::want_all);
        self.until(|state| {
            let has_room = state.is_durable(stamp) && !state.is_full_beside();
            if !has_room {
                // Records and events alone ask for no commit.
                state.known.want();
            }
            has_room.then_some(())
        })
        .await
    }

    /// Asks for the execution to be stored, and waits until it is.
    pub(crate) async fn stored(&self) {
        self.until(RunState::is_stored_or_wants).await
    }

    /// Makes everything so far durable, for a caller outside of the workflow. None if the execution left memory before
    /// that.
    pub(crate) async fn flushed(&self) -> Option<()> {
        let stamp = self.run.with(RunState::want_all);
        self.outside(|state| state.is_durable(stamp).then_some(())).await
    }

    /// Waits until no commit of the execution is in flight.
    pub(crate) async fn arrived(&self) {
        self.until(|state| state.journal.has_arrived().then_some(())).await
    }

    /// Waits, from outside of the workflow, until `look` finds something. None if the execution has left memory.
    pub(crate) async fn outside<T>(&self, mut look: impl FnMut(&mut RunState) -> Option<T>) -> Option<T> {
        self.until(|state| match look(state) {
            None if !state.residency.has_left() => None,
            found => Some(found),
        })
        .await
    }

    /// Waits until no commit of the execution is in flight, and prevents other commits until [`Doing::carried`]: for an
    /// operation that has a commit of its own. So the commits of an execution land in the order in which its code made
    /// their contents.
    pub(crate) async fn carry(&self) {
        self.until(|state| {
            // The code is being polled: its draft is incomplete, unless the code itself asks for this commit.
            if self.is_aside && state.is_polled {
                state.ops.wait_for_poll(self.op);
                return None;
            }
            state.is_stored_or_wants()?;
            state.journal.carry(self.op).then(|| state.release())
        })
        .await
    }

    /// Calls `look` whenever the operation is woken, until it finds something.
    pub(crate) async fn until<T>(&self, mut look: impl FnMut(&mut RunState) -> Option<T>) -> T {
        std::future::poll_fn(|context| {
            let mut state = self.run.state.lock();
            if let Some(found) = look(&mut state) {
                return Poll::Ready(found);
            }
            state.ops.set_waker(self.op, context.waker());
            Poll::Pending
        })
        .await
    }

    /// The operation's own commit is finished.
    pub(crate) fn carried(&self) {
        let is_to_look = self.run.with(|state| {
            if !state.journal.stop_carrying(self.op) {
                return false;
            }
            state.ops.wake_busy();
            // While the code is polled, the driver looks for work after the poll.
            !state.is_polled
        });
        if is_to_look {
            self.run.nudge();
        }
    }
}

impl Run {
    /// Cancels the branches of a fork beside the failed one: they end, and their work can be undone.
    pub(crate) fn call_off(&self, fork: &Place, failed: usize) {
        self.with(|state| state.ops.call_off(fork, failed));
    }

    /// The failure of an operation that is cancelled.
    pub(crate) fn why_cancelled(&self, place: &Place) -> Failure {
        self.with(|state| match state.guards.lost() {
            Some(lost) => Failure::typed(lost.clone()).not_retryable(),
            None => Failure::from_cancel(state.cancelled(&place.branch).unwrap_or_default().to_string()),
        })
    }

    /// The branches of a fork have ended or were dropped.
    pub(crate) fn is_past(&self, fork: &Place) {
        self.with(|state| state.ops.pass(fork));
    }
}
