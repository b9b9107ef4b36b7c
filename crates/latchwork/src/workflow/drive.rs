//! An execution's stay in memory: its future is driven until it ends, waits, or may not go on; then that is committed.

use std::collections::hash_map::Entry;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use tracing::Instrument;

use crate::backoff::jittered;
use crate::state::Quiet;
use crate::store::{ErrorKind, StoreError};
use crate::workflow::Failure;
use crate::workflow::ctx::Ctx;
use crate::workflow::definition::Running;
use crate::workflow::engine::{Inner, Resident};
use crate::workflow::record::{Status, failure_text};
use crate::workflow::run::{Next, Run, Stop};
use crate::workflow::step::panicked;

/// How long it takes at the most until an execution is taken up again that could not be committed.
const AGAIN: Duration = Duration::from_millis(200);

/// How an execution's stay in memory ended.
#[derive(Debug)]
pub(crate) enum Ended {
    Finished(std::result::Result<String, Failure>),
    Panicked(Failure),
    TimedOut,
    Stopped,
}

impl Inner {
    /// Runs an execution in a task of its own, unless it runs already.
    pub(crate) fn spawn(self: &Arc<Inner>, run: Arc<Run>) -> bool {
        let mut residents = self.residents.lock();
        if self.is_stopped() {
            return false;
        }
        let id = run.id.clone();
        let Entry::Vacant(vacant) = residents.entry(id.clone()) else { return false };
        let span = tracing::info_span!("execution", workflow = run.definition.name, %id);
        let task = tokio::spawn(drive(run).instrument(span));
        // It leaves by this lock, so it cannot be gone before it is noted.
        vacant.insert(Resident { task: task.abort_handle(), missed: false });
        true
    }
}

async fn drive(run: Arc<Run>) {
    loop {
        let ended = live(&run).await;
        settle(&run, ended).await;
        match run.stop() {
            Some(Stop::Continued) => run.begin_anew(),
            _ => break,
        }
    }
    let inner = &run.engine;
    let missed = inner.residents.lock().remove(&run.id).is_some_and(|resident| resident.missed);
    inner.begun().notify_waiters();
    let stop = run.stop();
    tracing::debug!(?stop, "left memory");
    match stop {
        Some(Stop::Suspended(timer)) => inner.timers.set(timer),
        Some(Stop::Failed(error)) => return again(&run, error).await,
        Some(Stop::Changed) => return take_up(&run, true).await,
        // Whoever is the owner now goes on with it; here nobody can.
        Some(Stop::Fenced) => {
            tracing::warn!("another engine has taken over; this one stops");
            inner.stop();
        }
        _ => inner.ended(&run.id, run.ended_as()),
    }
    if missed {
        take_up(&run, false).await;
    }
}

/// The store did not serve, and whether the last commit has landed is not known. What is stored tells: the execution is
/// taken up again from there.
async fn again(run: &Run, error: StoreError) {
    tracing::warn!(%error, "could not be committed");
    if matches!(error, StoreError::Closed | StoreError::Stopped { .. }) || error.kind() != ErrorKind::Unavailable {
        return run.engine.ended(&run.id, None);
    }
    take_up(run, true).await;
}

/// Takes an execution up again, however long the store does not serve. With `fence` its last commit may still be on its
/// way, and is kept from landing.
async fn take_up(run: &Run, fence: bool) {
    let inner = &run.engine;
    loop {
        let taken = if fence { inner.pick_up_fenced(&run.id).await } else { inner.pick_up(&run.id).await };
        match taken {
            Ok(()) => break,
            Err(error) if inner.is_stopped() || error.kind() != ErrorKind::Unavailable => break,
            Err(_) => run.env().sleep(jittered(AGAIN, 0.5, run.env())).await,
        }
    }
    // It may have ended with that commit.
    inner.ended(&run.id, None);
}

/// Drives the future until it ends or is to stop.
pub(crate) async fn live(run: &Arc<Run>) -> Ended {
    let now = run.env().now();
    let left = run.deadline().map(|deadline| Duration::from_micros(deadline.0.saturating_sub(now.0)));
    if left.is_some_and(|left| left.is_zero()) && !run.engine.replays {
        return Ended::TimedOut;
    }
    let ctx = Ctx { run: run.clone() };
    let begin = || (run.definition.begin)(ctx, &run.input());
    let running: Running = match std::panic::catch_unwind(AssertUnwindSafe(begin)) {
        Ok(Ok(running)) => running,
        Ok(Err(failure)) => return Ended::Finished(Err(failure)),
        Err(panic) => return Ended::Panicked(panicked(&*panic)),
    };
    // It is dropped with everything that it holds, which is the workflow's own.
    let mut running = Quiet::new(running);
    let mut deadline = left.filter(|_| !run.engine.replays).map(|left| run.env().sleep(left));
    let mut late = false;
    let mut stopped = std::pin::pin!(run.until_stopped());
    loop {
        let polled = std::future::poll_fn(|context| {
            let polled = std::panic::catch_unwind(AssertUnwindSafe(|| running.get().as_mut().poll(context)));
            // What it came to after it was to stop, by dropping the future that was told so, does not count.
            while stopped.as_mut().poll(context).is_ready() {
                if run.stop().is_some() {
                    return Poll::Ready(Some(Ended::Stopped));
                }
                // That was meant for the run before this.
                stopped.set(run.until_stopped());
            }
            match polled {
                Ok(Poll::Ready(ended)) => return Poll::Ready(Some(Ended::Finished(ended))),
                Ok(Poll::Pending) => {}
                Err(panic) => return Poll::Ready(Some(Ended::Panicked(panicked(&*panic)))),
            }
            if let Some(limit) = &mut deadline
                && limit.as_mut().poll(context).is_ready()
            {
                (deadline, late) = (None, true);
            }
            // What is on its way is waited for: what it leaves is what the end goes by.
            match late && !run.commits() {
                true => Poll::Ready(Some(Ended::TimedOut)),
                false if run.waits_unstored() => Poll::Ready(None),
                false => Poll::Pending,
            }
        });
        match polled.await {
            Some(ended) => return ended,
            // It waits for something of its own before its first operation; whoever started it need not.
            None => {
                if let Err(stop) = run.commit(run.first()).await {
                    run.set_stop(stop);
                    return Ended::Stopped;
                }
            }
        }
    }
}

/// Commits how it ended.
async fn settle(run: &Run, ended: Ended) {
    let status = match ended {
        Ended::Stopped => match run.stop() {
            Some(Stop::Parked(reason)) => Status::Parked(reason),
            _ => return,
        },
        Ended::Panicked(failure) => Status::Parked(failure.message().to_string()),
        Ended::TimedOut => Status::TimedOut,
        Ended::Finished(result) => match run.peek().await {
            Ok(None) => finished(run, result),
            Ok(Some(entry)) => Status::Parked(format!(
                "the code has ended, and the journal goes on with {} {:?}",
                entry.kind, entry.name
            )),
            Err(Stop::Parked(reason)) => Status::Parked(reason),
            Err(stop) => return run.set_stop(stop),
        },
    };
    let ended = run.commit(Next::Rests(status.clone())).await;
    let ended = match (ended, status) {
        (Err(Stop::Parked(reason)), _) => {
            // What cannot be stored is left out, so that the reason can be.
            run.forget_pending();
            run.commit(Next::Rests(Status::Parked(reason))).await
        }
        (ended, Status::Parked(reason)) => {
            tracing::warn!(reason, "parked");
            ended
        }
        (ended, _) => ended,
    };
    if let Err(stop) = ended {
        run.replace_stop(stop);
    }
}

/// What an execution has come to. An output that is too large to be stored is a failure.
fn finished(run: &Run, result: std::result::Result<String, Failure>) -> Status {
    // They are in one record.
    let result =
        result.and_then(|output| match run.fits("the output with the input", output.len() + run.input().len()) {
            Ok(()) => Ok(output),
            Err(failure) => Err(failure),
        });
    match result {
        Ok(output) => Status::Completed(output),
        Err(failure) => Status::Failed(failure_text(&failure)),
    }
}
