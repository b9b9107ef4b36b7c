//! The driver polls the code of an execution until it ends, waits or has to stop, and sends commits and reads
//! meanwhile. It decides nothing itself: [`act`] and [`Run::todo`] return what comes next.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use parking_lot::Mutex;

use crate::state::Quiet;
use crate::store::{Commit, Sleep};
use crate::workflow::ctx::Ctx;
use crate::workflow::ctx::step::panicked;
use crate::workflow::definition::RunningExecution;
use crate::workflow::engine::deadlock::Suspect;
use crate::workflow::run::{Branch, CommitOutcome, NextState, Run, Stop, Submitted, Todo};
use crate::workflow::stored::record::Wait;
use crate::workflow::{Boxed, Failure};

/// How often the code is polled at most before other tasks run. In most cases the second poll is enough, and yielding
/// to other tasks takes long.
const POLLS: u32 = 3;

/// How an execution's stay in memory ended.
#[derive(Debug)]
pub(crate) enum ResidencyEnd {
    Finished(Result<String, Failure>),
    Panicked(Failure),
    TimedOut,
    Stopped,
}

/// What the driver sees after it has polled everything.
#[derive(Debug, Clone, Copy, Default)]
struct DriverView {
    /// True if a commit or a read has just finished.
    has_landed: bool,
    /// True while a commit or a read is in flight.
    is_busy: bool,
    is_stopping: bool,
    /// Whether the code has ended, and whether its deadline has passed.
    has_ended: bool,
    is_late: bool,
    /// Whether the code was woken, and how often it may still be polled.
    is_woken: bool,
    polls: u32,
}

/// What the driver does next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Act {
    /// The stay in memory ends; the run holds the reason.
    Stop,
    End,
    TimeOut,
    /// Poll everything again.
    Again,
    /// Let other tasks run, and poll everything again.
    Yield,
    /// Do the work of an execution whose code waits.
    Todo,
}

fn act(seen: &DriverView) -> Act {
    // The driver waits for everything in flight: how the execution ends depends on the outcome. If the outcome is a
    // stop, neither the code's result nor its deadline counts.
    match seen {
        DriverView { is_busy: false, is_stopping: true, .. } => Act::Stop,
        DriverView { is_busy: false, has_ended: true, .. } => Act::End,
        DriverView { is_busy: false, is_late: true, .. } => Act::TimeOut,
        DriverView { is_woken: true, polls: 0, .. } => Act::Yield,
        DriverView { is_woken: true, .. } | DriverView { has_landed: true, .. } => Act::Again,
        _ => Act::Todo,
    }
}

/// The waker of the code. It remembers whether the code was woken.
struct Woken {
    is_woken: AtomicBool,
    driver: Mutex<Waker>,
}

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.is_woken.store(true, Ordering::SeqCst);
        self.driver.lock().wake_by_ref();
    }
}

/// A commit or a read that is in flight.
struct Flight {
    future: Boxed<'static, ()>,
    kind: FlightKind,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum FlightKind {
    /// The commit of an operation.
    Submitted,
    /// A commit or a read of the execution's own; at most one is in flight.
    Own,
    /// A commit of the execution's own with which it leaves memory. Its code is not polled meanwhile.
    Leaving,
}

/// How long the code has had nothing to do.
#[derive(Default)]
struct CodeRest {
    /// Since when, by the monotonic clock; and when to look again.
    since: Option<Duration>,
    later: Option<(Duration, Sleep)>,
    /// A yield to other tasks, which may wake the code; and whether they have run.
    turn: Option<Boxed<'static, ()>>,
    is_sure: bool,
}

struct Driver<'a> {
    run: &'a Arc<Run>,
    root: Arc<Branch>,
    /// The code, until it has ended.
    code: Option<Quiet<RunningExecution>>,
    woken: Arc<Woken>,
    waker: Waker,
    ended: Option<ResidencyEnd>,
    flights: Vec<Flight>,
    deadline: Option<Sleep>,
    is_late: bool,
    rest: CodeRest,
}

/// Drives the code until it ends or has to stop.
pub(crate) async fn live(run: &Arc<Run>, ctx: Ctx) -> ResidencyEnd {
    let now = run.env().now();
    let deadline = run.with(|state| state.known.stored().deadline_us);
    let left = deadline.map(|deadline| Duration::from_micros(deadline.saturating_sub(now.0)));
    let left = left.filter(|_| !run.engine.rehearsal.is_replay());
    if left.is_some_and(|left| left.is_zero()) {
        return ResidencyEnd::TimedOut;
    }
    let root = ctx.branch.clone();
    let begin = || (run.definition.begin)(ctx, &run.input());
    let running: RunningExecution = match std::panic::catch_unwind(AssertUnwindSafe(begin)) {
        Ok(Ok(running)) => running,
        Ok(Err(failure)) => return ResidencyEnd::Finished(Err(failure)),
        Err(panic) => return ResidencyEnd::Panicked(panicked(&*panic)),
    };
    let woken = Arc::new(Woken { is_woken: AtomicBool::new(true), driver: Mutex::new(Waker::noop().clone()) });
    let mut driver = Driver {
        run,
        root,
        // `Quiet` also guards the drop of the code, which runs the workflow's own destructors.
        code: Some(Quiet::new(running)),
        waker: woken.clone().into(),
        woken,
        ended: None,
        flights: Vec::new(),
        deadline: left.map(|left| run.env().sleep(left)),
        is_late: false,
        rest: CodeRest::default(),
    };
    let mut nudged = std::pin::pin!(run.until_nudged());
    std::future::poll_fn(|context| {
        driver.woken.driver.lock().clone_from(context.waker());
        while nudged.as_mut().poll(context).is_ready() {
            nudged.set(run.until_nudged());
        }
        driver.poll(context)
    })
    .await
}

impl Driver<'_> {
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<ResidencyEnd> {
        let mut polls = POLLS;
        loop {
            if !self.is_leaving() && self.woken.is_woken.swap(false, Ordering::SeqCst) {
                polls = polls.saturating_sub(1);
                self.rest = CodeRest::default();
                self.poll_code();
            }
            let has_landed = self.poll_flights(context);
            let is_stopping = self.run.is_stopping();
            if is_stopping {
                // What the code does while it is dropped does not count.
                self.code = None;
            }
            if let Some(limit) = &mut self.deadline
                && limit.as_mut().poll(context).is_ready()
            {
                (self.deadline, self.is_late) = (None, true);
            }
            match act(&self.seen(has_landed, is_stopping, polls)) {
                Act::Stop => return Poll::Ready(ResidencyEnd::Stopped),
                Act::End => return Poll::Ready(self.ended.take().unwrap_or(ResidencyEnd::Stopped)),
                Act::TimeOut => return Poll::Ready(ResidencyEnd::TimedOut),
                Act::Again => {}
                Act::Yield => {
                    context.waker().wake_by_ref();
                    return Poll::Pending;
                }
                Act::Todo => {
                    if !self.work(is_stopping, context) {
                        return Poll::Pending;
                    }
                }
            }
        }
    }

    fn seen(&self, has_landed: bool, is_stopping: bool, polls: u32) -> DriverView {
        DriverView {
            has_landed,
            is_busy: !self.flights.is_empty() || self.run.is_carrying(),
            is_stopping,
            has_ended: self.ended.is_some(),
            is_late: self.is_late,
            is_woken: !self.is_leaving() && self.woken.is_woken.load(Ordering::SeqCst),
            polls,
        }
    }

    /// True while a commit is in flight with which the execution leaves memory.
    fn is_leaving(&self) -> bool {
        self.flights.iter().any(|flight| flight.kind == FlightKind::Leaving)
    }

    fn poll_code(&mut self) {
        let Some(code) = &mut self.code else { return };
        let mut context = Context::from_waker(&self.waker);
        self.run.begin_poll();
        let poll = || self.root.poll(self.run, false, || code.get().as_mut().poll(&mut context));
        let polled = std::panic::catch_unwind(AssertUnwindSafe(poll));
        self.run.end_poll();
        self.ended = match polled {
            Ok(Poll::Pending) => return,
            Ok(Poll::Ready(ended)) => Some(ResidencyEnd::Finished(ended)),
            Err(panic) => Some(ResidencyEnd::Panicked(panicked(&*panic))),
        };
        self.code = None;
    }

    /// Returns whether anything has finished.
    fn poll_flights(&mut self, context: &mut Context<'_>) -> bool {
        let before = self.flights.len();
        self.flights.retain_mut(|flight| flight.future.as_mut().poll(context).is_pending());
        self.flights.len() < before
    }

    /// Does the work of an execution whose code waits. Returns whether there was any.
    fn work(&mut self, is_stopping: bool, context: &mut Context<'_>) -> bool {
        let submitted = self.run.submitted();
        if !submitted.is_empty() {
            for submitted in submitted {
                let run = self.run.clone();
                self.fly(FlightKind::Submitted, async move {
                    let Submitted { commit, boarded, by, answer } = submitted;
                    let sent = match by {
                        Some(by) => run.send_by(commit, boarded, by).await,
                        None => run.send(commit, boarded).await,
                    };
                    let _ = answer.send(sent);
                });
            }
            return true;
        }
        let is_own = |flight: &Flight| flight.kind != FlightKind::Submitted;
        if is_stopping || self.ended.is_some() || self.flights.iter().any(is_own) {
            return false;
        }
        if self.run.engine.rehearsal.is_at_end() {
            let is_over = self.rest.is_sure;
            if is_over {
                self.run.set_stop(Stop::Replayed);
            }
            return is_over || self.rest.poll_turn(context);
        }
        self.run.release_dropped();
        let now = self.run.env().monotonic();
        let idle = now.saturating_sub(*self.rest.since.get_or_insert(now));
        match self.run.todo(idle, self.rest.is_sure) {
            Todo::Nothing => false,
            Todo::Later(pause) => self.rest.poll_later(self.run, now, pause, context),
            Todo::MakeSure => self.rest.poll_turn(context),
            Todo::Commit(next) => {
                let kind = if let NextState::Runs = next { FlightKind::Own } else { FlightKind::Leaving };
                self.fly(kind, commit(self.run.clone(), next));
                true
            }
            Todo::Read => {
                let run = self.run.clone();
                self.fly(FlightKind::Own, async move {
                    if let Err(stop) = run.read_inbox().await {
                        run.set_stop(stop);
                    }
                });
                true
            }
        }
    }

    fn fly(&mut self, kind: FlightKind, future: impl Future<Output = ()> + Send + 'static) {
        self.flights.push(Flight { future: Box::pin(future), kind });
    }
}

impl CodeRest {
    /// Returns whether the time to look again has come.
    fn poll_later(&mut self, run: &Run, now: Duration, pause: Duration, context: &mut Context<'_>) -> bool {
        let due = now.saturating_add(pause);
        let later = self.later.take().filter(|(set, _)| *set <= due);
        let (due, mut sleep) = later.unwrap_or_else(|| (due, run.env().sleep(pause)));
        let is_over = sleep.as_mut().poll(context).is_ready();
        self.later = (!is_over).then_some((due, sleep));
        is_over
    }

    /// Returns whether other tasks have run. Tasks that the code yielded to run before that.
    fn poll_turn(&mut self, context: &mut Context<'_>) -> bool {
        let turn = self.turn.get_or_insert_with(|| Box::pin(tokio::task::yield_now()));
        self.is_sure = turn.as_mut().poll(context).is_ready();
        self.is_sure
    }
}

/// Commits everything pending.
async fn commit(run: Arc<Run>, next: NextState) {
    let stop = match &next {
        NextState::Waits(until, _) => Some(Stop::Suspended(*until)),
        NextState::Continues(_) => Some(Stop::Continued),
        NextState::Runs | NextState::Rests(_) | NextState::Succeeds(..) => None,
    };
    let waits_for_others = matches!(&next, NextState::Waits(_, waits) if waits.iter().any(Wait::is_for_others));
    let continues = matches!(next, NextState::Continues(_));
    if continues && run.with(|state| state.known.has_locks() || state.known.has_reviews()) {
        // The locks and reviews of this run do not pass to the next run.
        return run.set_stop(run.close(next).await.err().unwrap_or(Stop::Continued));
    }
    let sent = match run.with(|state| state.residency.take_asked()) {
        Some(asked) => run.send_admitted(asked, next).await,
        None => {
            let (commit, boarded) = run.board(Commit::new(), next);
            run.send(commit, boarded).await
        }
    };
    match sent {
        CommitOutcome::Landed(_) => {
            // Other branches may have ended since this one began to wait.
            if waits_for_others && run.with(|state| state.known.has_locks()) {
                let suspect = Suspect { id: run.id.clone(), is_child: false };
                let _ = run.engine.suspects.send(suspect);
            }
            stop.into_iter().for_each(|stop| run.set_stop(stop));
        }
        CommitOutcome::Stopped(stop) => run.set_stop(stop),
        // The execution is loaded again, and tries to continue as new again.
        CommitOutcome::Refused(_) if continues => run.set_stop(Stop::Changed),
        CommitOutcome::Refused(_) | CommitOutcome::RolledBack => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_act_follows_from_what_the_driver_sees() {
        let quiet = DriverView { polls: 1, ..DriverView::default() };
        let busy = DriverView { is_busy: true, ..quiet };
        let table = [
            ("the code waits", quiet, Act::Todo),
            ("the code waits for a commit", busy, Act::Todo),
            ("the code was woken", DriverView { is_woken: true, ..quiet }, Act::Again),
            ("the code was woken during a commit", DriverView { is_woken: true, ..busy }, Act::Again),
            ("the code wakes itself again and again", DriverView { is_woken: true, polls: 0, ..quiet }, Act::Yield),
            ("a commit has landed", DriverView { has_landed: true, ..quiet }, Act::Again),
            ("the code has ended", DriverView { has_ended: true, ..quiet }, Act::End),
            ("the code has ended during a commit", DriverView { has_ended: true, ..busy }, Act::Todo),
            ("the time is up", DriverView { is_late: true, ..quiet }, Act::TimeOut),
            ("the time is up during a commit", DriverView { is_late: true, ..busy }, Act::Todo),
            (
                "the time is up, but the code has ended",
                DriverView { is_late: true, has_ended: true, ..quiet },
                Act::End,
            ),
            ("it has to stop", DriverView { is_stopping: true, ..quiet }, Act::Stop),
            ("it has to stop, and has ended", DriverView { is_stopping: true, has_ended: true, ..quiet }, Act::Stop),
            ("it has to stop during a commit", DriverView { is_stopping: true, ..busy }, Act::Todo),
        ];
        for (what, seen, expected) in table {
            assert_eq!(act(&seen), expected, "{what}");
        }
    }
}
