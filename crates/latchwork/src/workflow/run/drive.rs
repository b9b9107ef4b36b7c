//! An execution's stay in memory: its future is driven until it ends, waits, or may not go on; then that is committed.

use std::collections::hash_map::Entry;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use parking_lot::Mutex;
use tracing::Instrument;

use crate::backoff::jittered;
use crate::state::Quiet;
use crate::store::{Commit, ErrorKind};
use crate::workflow::ctx::Ctx;
use crate::workflow::ctx::step::panicked;
use crate::workflow::definition::Running;
use crate::workflow::engine::deadlock::Suspect;
use crate::workflow::engine::{Inner, Resident};
use crate::workflow::run::{Branch, Next, Run, Sent, Stop, Todo};
use crate::workflow::stored::record::{Status, Wait, failure_text};
use crate::workflow::{Boxed, Failure};

/// How long it takes at the most until an execution is taken up again that could not be committed.
const AGAIN: Duration = Duration::from_millis(200);

/// How often code that has woken itself is polled again before others have their turn: most often once is enough, and
/// to stand in line for that is dear.
const AT_ONCE: u32 = 2;

/// The length of an output, in bytes, that has room beside any input.
const TINY: usize = 64;

/// How an execution's stay in memory ended.
#[derive(Debug)]
pub(crate) enum Ended {
    Finished(Result<String, Failure>),
    Panicked(Failure),
    TimedOut,
    Stopped,
}

impl Inner {
    /// Runs an execution that is about to be stored in a task of its own, unless its id is in memory.
    pub(crate) fn spawn(self: &Arc<Inner>, run: Arc<Run>) -> bool {
        self.spawn_unless_resident(run, false)
    }

    /// Runs an execution that is stored in a task of its own. If its id is in memory, possibly for a start that is then
    /// refused, the execution is looked at again when that has left.
    pub(crate) fn spawn_stored(self: &Arc<Inner>, run: Arc<Run>) {
        self.spawn_unless_resident(run, true);
    }

    fn spawn_unless_resident(self: &Arc<Inner>, run: Arc<Run>, is_stored: bool) -> bool {
        let mut residents = self.residents.lock();
        if self.is_stopped() || self.idle {
            return false;
        }
        let id = run.id.clone();
        let vacant = match residents.entry(id.clone()) {
            Entry::Vacant(vacant) => vacant,
            Entry::Occupied(mut resident) => {
                resident.get_mut().missed |= is_stored;
                return false;
            }
        };
        run.with(|state| state.is_fresh |= self.unbegun.take(&id, &state.execution));
        let span = tracing::info_span!("execution", workflow = run.definition.name, %id);
        let Some(runtime) = self.node.runtime.handle() else { return false };
        let task = runtime.spawn(drive(run.clone()).instrument(span));
        // It leaves by this lock, so it cannot be gone before it is noted.
        vacant.insert(Resident { task: task.abort_handle(), run, missed: false });
        self.metrics.residents(residents.len());
        true
    }
}

async fn drive(run: Arc<Run>) {
    let root = loop {
        let ctx = Ctx::root(&run);
        let ended = live(&run, ctx.clone()).await;
        settle(&ctx, ended).await;
        match run.stop() {
            Some(Stop::Continued) => run.begin_anew(),
            _ => break ctx,
        }
    };
    drop(root);
    let inner = &run.engine;
    let is_parked = run.with(|state| matches!(state.execution.status, Status::Parked(_)));
    let (missed, left) = {
        let mut residents = inner.residents.lock();
        (residents.remove(&run.id).is_some_and(|resident| resident.missed), residents.len())
    };
    inner.metrics.residents(left);
    run.leave();
    inner.begun.notify_waiters();
    let stop = run.stop();
    tracing::debug!(?stop, "left memory");
    match stop {
        Some(Stop::Suspended(timer)) => timer.into_iter().for_each(|timer| inner.timers.set(&run.id, timer)),
        Some(Stop::Failed(error)) if error.is_passing() => {
            tracing::warn!(%error, "could not be committed");
            return take_up(&run, true).await;
        }
        Some(Stop::Changed) => return take_up(&run, true).await,
        // The owner goes on with it; here it cannot.
        Some(Stop::Fenced) => {
            inner.node.lose(run.id.as_bytes());
            inner.ended(&run.id, None);
        }
        stop => {
            inner.forced.lock().remove(&run.id);
            match stop {
                Some(Stop::SetAside(reason)) => inner.put_aside(&run.id, reason),
                Some(Stop::Failed(error)) if error.kind() == ErrorKind::Corrupt => {
                    inner.put_aside(&run.id, format!("its records are damaged: {error}"));
                }
                Some(Stop::Failed(error)) => tracing::warn!(%error, "could not be committed"),
                // That could not be stored.
                Some(Stop::Parked(reason)) if !is_parked => inner.put_aside(&run.id, reason),
                _ => {}
            }
            inner.ended(&run.id, run.ended_as());
        }
    }
    if missed {
        take_up(&run, false).await;
    }
}

/// Takes an execution up again, however long the store does not serve. With `fence` its last commit may still be on its
/// way, and is kept from landing.
async fn take_up(run: &Run, fence: bool) {
    let inner = &run.engine;
    loop {
        let taken = if fence { inner.pick_up_fenced(&run.id).await } else { inner.pick_up(&run.id).await };
        match taken.or_else(|error| inner.unless_passing(&run.id, error)) {
            Ok(()) => break,
            Err(_) if inner.is_stopped() => break,
            Err(_) => run.env().sleep(jittered(AGAIN, 0.5, run.env())).await,
        }
    }
    // It may have ended with that commit.
    inner.ended(&run.id, None);
}

/// Tells whether the code has anything to do: it is woken through here.
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

/// Something on its way to the store or from it.
type Flight = Boxed<'static, ()>;

struct Driver<'a> {
    run: &'a Arc<Run>,
    root: Arc<Branch>,
    /// The code, until it has ended.
    running: Option<Quiet<Running>>,
    ended: Option<Ended>,
    woken: Arc<Woken>,
    waker: Waker,
    flights: Vec<Flight>,
    /// Whether one of them is of the execution's own, and whether with that it leaves memory.
    is_own: Arc<AtomicBool>,
    is_leaving: bool,
    deadline: Option<crate::store::Sleep>,
    is_late: bool,
    /// Since when there was nothing to do, by the clock that only goes forward; and when to look again.
    idle_since: Option<Duration>,
    later: Option<(Duration, crate::store::Sleep)>,
    /// Everybody else has their turn, to see whether the code is woken by that; and whether they had.
    turn: Option<Flight>,
    is_sure: bool,
}

/// Drives the future until it ends or is to stop.
pub(crate) async fn live(run: &Arc<Run>, ctx: Ctx) -> Ended {
    let now = run.env().now();
    let deadline = run.with(|state| state.execution.deadline_us);
    let left = deadline.map(|deadline| Duration::from_micros(deadline.saturating_sub(now.0)));
    if left.is_some_and(|left| left.is_zero()) && !run.engine.rehearsal.is_replay() {
        return Ended::TimedOut;
    }
    let root = ctx.branch.clone();
    let begin = || (run.definition.begin)(ctx, &run.input());
    let running: Running = match std::panic::catch_unwind(AssertUnwindSafe(begin)) {
        Ok(Ok(running)) => running,
        Ok(Err(failure)) => return Ended::Finished(Err(failure)),
        Err(panic) => return Ended::Panicked(panicked(&*panic)),
    };
    let woken = Arc::new(Woken { is_woken: AtomicBool::new(true), driver: Mutex::new(Waker::noop().clone()) });
    let mut driver = Driver {
        run,
        root,
        // It is dropped with everything that it holds, which is the workflow's own.
        running: Some(Quiet::new(running)),
        ended: None,
        waker: woken.clone().into(),
        woken,
        flights: Vec::new(),
        is_own: Arc::default(),
        is_leaving: false,
        deadline: left.filter(|_| !run.engine.rehearsal.is_replay()).map(|left| run.env().sleep(left)),
        is_late: false,
        idle_since: None,
        later: None,
        turn: None,
        is_sure: false,
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
    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Ended> {
        let mut again = AT_ONCE;
        loop {
            if !self.is_leaving() && self.woken.is_woken.swap(false, Ordering::SeqCst) {
                (self.idle_since, self.later) = (None, None);
                (self.turn, self.is_sure) = (None, false);
                self.poll_code();
            }
            // What became of a commit may be that it is to stop: then it is not for its deadline to say how it ends.
            let has_landed = self.poll_flights(context);
            if self.run.stop().is_some() {
                // What it came to after it was to stop, by dropping the future that was told so, does not count.
                self.running = None;
                self.ended = Some(Ended::Stopped);
            }
            if let Some(limit) = &mut self.deadline
                && limit.as_mut().poll(context).is_ready()
            {
                (self.deadline, self.is_late) = (None, true);
            }
            // What is on its way is waited for: what it leaves is what the end goes by.
            if self.flights.is_empty() && !self.run.is_carrying() {
                if let Some(ended) = self.ended.take() {
                    return Poll::Ready(ended);
                }
                if self.is_late {
                    return Poll::Ready(Ended::TimedOut);
                }
            }
            if !self.is_leaving() && self.woken.is_woken.load(Ordering::SeqCst) {
                if again > 0 {
                    again -= 1;
                    continue;
                }
                // Others have their turn, too.
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
            if !has_landed && !self.decide(context) {
                return Poll::Pending;
            }
        }
    }

    /// Whether it is about to leave memory, as it is.
    fn is_leaving(&self) -> bool {
        self.is_leaving && self.is_own.load(Ordering::SeqCst)
    }

    fn poll_code(&mut self) {
        let Some(running) = &mut self.running else { return };
        let mut context = Context::from_waker(&self.waker);
        self.run.begin_poll();
        let poll = || self.root.poll(self.run, false, || running.get().as_mut().poll(&mut context));
        let polled = std::panic::catch_unwind(AssertUnwindSafe(poll));
        self.run.end_poll();
        self.ended = match polled {
            Ok(Poll::Pending) => return,
            Ok(Poll::Ready(ended)) => Some(Ended::Finished(ended)),
            Err(panic) => Some(Ended::Panicked(panicked(&*panic))),
        };
        self.running = None;
    }

    /// Whether anything has come back.
    fn poll_flights(&mut self, context: &mut Context<'_>) -> bool {
        let before = self.flights.len();
        self.flights.retain_mut(|flight| flight.as_mut().poll(context).is_pending());
        self.flights.len() < before
    }

    /// Does what is to be done. Gives whether there was anything.
    fn decide(&mut self, context: &mut Context<'_>) -> bool {
        let submitted = self.run.submitted();
        if !submitted.is_empty() {
            for submitted in submitted {
                let run = self.run.clone();
                self.flights.push(Box::pin(async move {
                    let sent = run.send(submitted.commit, submitted.boarded).await;
                    let _ = submitted.answer.send(sent);
                }));
            }
            return true;
        }
        if self.ended.is_some() || self.is_own.load(Ordering::SeqCst) {
            return false;
        }
        self.run.release_dropped();
        let now = self.run.env().monotonic();
        let idle = now.saturating_sub(*self.idle_since.get_or_insert(now));
        match self.run.todo(idle, self.is_sure) {
            Todo::Nothing => false,
            Todo::Later(pause) => {
                let due = now.saturating_add(pause);
                let later = self.later.take().filter(|(set, _)| *set <= due);
                let (due, mut sleep) = later.unwrap_or_else(|| (due, self.run.env().sleep(pause)));
                let is_over = sleep.as_mut().poll(context).is_ready();
                self.later = (!is_over).then_some((due, sleep));
                is_over
            }
            Todo::MakeSure => {
                // What the code has yielded for is due before this.
                let turn = self.turn.get_or_insert_with(|| Box::pin(tokio::task::yield_now()));
                self.is_sure = turn.as_mut().poll(context).is_ready();
                self.is_sure
            }
            Todo::Commit(next) => {
                self.is_leaving = !matches!(next, Next::Runs);
                self.fly(commit(self.run.clone(), next));
                true
            }
            Todo::Read => {
                let run = self.run.clone();
                self.fly(async move {
                    if let Err(stop) = run.read_inbox().await {
                        run.set_stop(stop);
                    }
                });
                true
            }
        }
    }

    fn fly(&mut self, flight: impl Future<Output = ()> + Send + 'static) {
        let is_own = self.is_own.clone();
        is_own.store(true, Ordering::SeqCst);
        self.flights.push(Box::pin(async move {
            flight.await;
            is_own.store(false, Ordering::SeqCst);
        }));
    }
}

/// Commits what there is.
async fn commit(run: Arc<Run>, next: Next) {
    let stop = match &next {
        Next::Waits(until, _) => Some(Stop::Suspended(*until)),
        Next::Continues(_) => Some(Stop::Continued),
        Next::Runs | Next::Rests(_) | Next::Succeeds(..) => None,
    };
    let waits_for_others = matches!(&next, Next::Waits(_, waits) if waits.iter().any(Wait::is_for_others));
    let continues = matches!(next, Next::Continues(_));
    if continues && run.with(|state| state.has_locks || state.has_reviews) {
        // What it holds, and what it has asked for, is not the next run's.
        return run.set_stop(run.close(next).await.err().unwrap_or(Stop::Continued));
    }
    let sent = match run.with(|state| state.asked.take()) {
        Some(asked) => run.send_admitted(asked, next).await,
        None => {
            let (commit, boarded) = run.board(Commit::new(), next);
            run.send(commit, boarded).await
        }
    };
    match sent {
        Sent::Landed(_) => {
            // Other branches may have ended since it has begun to wait.
            if waits_for_others && run.with(|state| state.has_locks) {
                let suspect = Suspect { id: run.id.clone(), is_child: false };
                let _ = run.engine.suspects.send(suspect);
            }
            stop.into_iter().for_each(|stop| run.set_stop(stop));
        }
        Sent::Stopped(stop) => run.set_stop(stop),
        // It is taken up again, and comes by here again.
        Sent::Refused(_) if continues => run.set_stop(Stop::Changed),
        Sent::Refused(_) => {}
    }
}

/// Commits how it ended.
async fn settle(ctx: &Ctx, ended: Ended) {
    let run = &ctx.run;
    let status = match ended {
        Ended::Stopped => match run.stop() {
            Some(Stop::Parked(reason)) => Status::Parked(reason),
            Some(Stop::Terminated(status)) => status,
            _ => return,
        },
        Ended::Panicked(failure) => Status::Parked(failure.message().to_string()),
        Ended::TimedOut => Status::TimedOut,
        Ended::Finished(result) => match ctx.branch.peek(run).await {
            Ok(None) => finished(run, result),
            Ok(Some(entry)) => Status::Parked(format!(
                "the code has ended, and the journal goes on with {} {:?}",
                entry.kind, entry.name
            )),
            Err(Stop::Parked(reason)) => Status::Parked(reason),
            Err(stop) => return run.set_stop(stop),
        },
    };
    if let Status::Parked(reason) = &status {
        tracing::warn!(reason, "parked");
    }
    let ended = match run.close(Next::Rests(status)).await {
        Err(Stop::Parked(reason)) => {
            // What cannot be stored is left out, so that the reason can be.
            run.forget_pending();
            run.close(Next::Rests(Status::Parked(reason))).await
        }
        ended => ended,
    };
    if let Err(stop) = ended {
        run.replace_stop(stop);
    }
}

/// What an execution has come to. An output that is too large to be stored is a failure.
fn finished(run: &Run, result: Result<String, Failure>) -> Status {
    // They are in one record. What takes no more than its end does without an output has room in any case: so does the
    // finalizer of an execution whose input and output are as large as can be.
    let result = result.and_then(|output| match output.len() {
        0..=TINY => Ok(output),
        length => run.fits("the output with the input", length + run.input().len()).map(|()| output),
    });
    match result {
        Ok(output) => Status::Completed(output),
        Err(failure) => match (failure.is_cancelled(), run.with(|state| state.cancel.clone())) {
            (true, Some(reason)) => Status::Cancelled(reason),
            _ => Status::Failed(failure_text(&failure)),
        },
    }
}
