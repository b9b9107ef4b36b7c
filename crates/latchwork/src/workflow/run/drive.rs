//! An execution's stay in memory: the driver runs its code until it ends, waits or has to stop; then that is committed.

use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::time::Duration;

use tracing::Instrument;

use crate::backoff::jittered;
use crate::store::ErrorKind;
use crate::workflow::Failure;
use crate::workflow::ctx::Ctx;
use crate::workflow::engine::{EngineInner, Resident};
use crate::workflow::run::driver::{ResidencyEnd, live};
use crate::workflow::run::{NextState, Run, Stop};
use crate::workflow::stored::record::{StoredStatus, failure_text};

/// The longest pause before an execution is loaded again whose commit failed.
const AGAIN: Duration = Duration::from_millis(200);

/// An output of up to this many bytes fits beside any input.
const TINY: usize = 64;

impl EngineInner {
    /// Runs an execution that its first commit will store, in its own task, unless its id is in memory.
    pub(crate) fn spawn(self: &Arc<EngineInner>, run: Arc<Run>) -> bool {
        self.spawn_unless_resident(run, false)
    }

    /// Runs a stored execution in its own task. If its id is in memory, possibly for a start that is refused later, the
    /// engine looks at the execution again when that id has left memory.
    pub(crate) fn spawn_stored(self: &Arc<EngineInner>, run: Arc<Run>) {
        self.spawn_unless_resident(run, true);
    }

    fn spawn_unless_resident(self: &Arc<EngineInner>, run: Arc<Run>, is_stored: bool) -> bool {
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
        run.with(|state| {
            if self.unbegun.take(&id, state.known.stored()) {
                state.residency.set_fresh();
            }
        });
        let span = self.span_of(&run);
        let Some(runtime) = self.node.runtime.handle() else { return false };
        let task = runtime.spawn(drive(run.clone()).instrument(span));
        // The task removes itself under this lock, so it cannot be gone before it is inserted.
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
    let is_parked = run.with(|state| matches!(state.known.stored().status, StoredStatus::Parked(_)));
    let stop = run.stop();
    let is_again =
        matches!(&stop, Some(Stop::Changed)) || matches!(&stop, Some(Stop::Failed(error)) if error.is_passing());
    let (missed, left) = {
        let mut residents = inner.residents.lock();
        let missed = residents.remove(&run.id).is_some_and(|resident| resident.missed);
        // If it is loaded again, the load finds out whether this node may still run it.
        if !missed && !is_again {
            inner.node.host(&run.id, false);
        }
        (missed, residents.len())
    };
    inner.metrics.residents(left);
    run.leave();
    inner.begun.notify_waiters();
    tracing::debug!(?stop, "left memory");
    match stop {
        Some(Stop::Suspended(timer)) => timer.into_iter().for_each(|timer| inner.timers.set(&run.id, timer)),
        Some(Stop::Failed(error)) if error.is_passing() => {
            tracing::warn!(%error, "the execution could not be committed and is loaded again");
            return load_again(&run, true).await;
        }
        Some(Stop::Changed) => return load_again(&run, true).await,
        // The owner continues it; this engine cannot.
        Some(Stop::Fenced) => {
            inner.node.lose(run.id.as_bytes());
            inner.ended(&run.id, None, false);
        }
        stop => {
            inner.forced.lock().remove(&run.id);
            match stop {
                Some(Stop::SetAside(reason)) => inner.put_aside(&run.id, reason),
                Some(Stop::Failed(error)) if error.kind() == ErrorKind::Corrupt => {
                    inner.put_aside(&run.id, format!("its records are damaged: {error}"));
                }
                Some(Stop::Failed(error)) => tracing::warn!(%error, "the execution could not be committed"),
                // The park could not be stored.
                Some(Stop::Parked(reason)) if !is_parked => inner.put_aside(&run.id, reason),
                _ => {}
            }
            let ended = run.ended_as();
            let is_over = ended.is_some() && run.with(|state| state.residency.succeeded().is_none());
            inner.ended(&run.id, ended, run.is_end_told());
            if is_over {
                inner.forget_callers(&run.id);
            }
        }
    }
    if missed {
        load_again(&run, false).await;
    }
}

/// Loads an execution again, and retries as long as the store is unavailable. With `fence`, its last commit may still
/// be in flight, and is kept from landing.
async fn load_again(run: &Run, fence: bool) {
    let inner = &run.engine;
    loop {
        let loaded = if fence { inner.load_fenced(&run.id).await } else { inner.load(&run.id).await };
        match loaded.or_else(|error| inner.unless_passing(&run.id, error)) {
            Ok(()) => break,
            Err(_) if inner.is_stopped() => break,
            Err(_) => run.env().sleep(jittered(AGAIN, 0.5, run.env())).await,
        }
    }
    // The execution may have ended with its last commit. What others have changed, their commits have told.
    inner.ended(&run.id, None, !fence);
}

/// Commits how the execution ended.
async fn settle(ctx: &Ctx, ended: ResidencyEnd) {
    let run = &ctx.run;
    let status = match ended {
        ResidencyEnd::Stopped => match run.stop() {
            Some(Stop::Parked(reason)) => StoredStatus::Parked(reason),
            Some(Stop::Terminated(status)) => status,
            _ => return,
        },
        ResidencyEnd::Panicked(failure) => StoredStatus::Parked(failure.message().to_string()),
        ResidencyEnd::TimedOut => StoredStatus::TimedOut,
        ResidencyEnd::Finished(result) => match ctx.branch.peek(run).await {
            Ok(None) => finished(run, result),
            Ok(Some(entry)) => StoredStatus::Parked(format!(
                "the code has ended, and the journal continues with {} {:?}",
                entry.kind, entry.name
            )),
            Err(Stop::Parked(reason)) => StoredStatus::Parked(reason),
            Err(stop) => return run.set_stop(stop),
        },
    };
    if let StoredStatus::Parked(reason) = &status {
        tracing::warn!(reason, "parked");
    }
    let ended = match run.close(NextState::Rests(status)).await {
        Err(Stop::Parked(reason)) => {
            // What cannot be stored is left out, so that the reason can be stored.
            run.forget_pending();
            run.close(NextState::Rests(StoredStatus::Parked(reason))).await
        }
        ended => ended,
    };
    if let Err(stop) = ended {
        run.replace_stop(stop);
    }
}

/// The status of an execution whose code has ended. An output that is too large to be stored is a failure.
fn finished(run: &Run, result: Result<String, Failure>) -> StoredStatus {
    // Input and output are in one record. An output of up to `TINY` bytes always fits: its status takes no more room
    // than a status without an output. A finalizer relies on this if the input and the output of its execution have the
    // maximal size.
    let result = result.and_then(|output| match output.len() {
        0..=TINY => Ok(output),
        length => run.fits("the output with the input", length + run.input().len()).map(|()| output),
    });
    match result {
        Ok(output) => StoredStatus::Completed(output),
        Err(failure) => match (failure.is_cancelled(), run.with(|state| state.known.cancel().map(str::to_string))) {
            (true, Some(reason)) => StoredStatus::Cancelled(reason),
            _ => StoredStatus::Failed(failure_text(&failure)),
        },
    }
}
