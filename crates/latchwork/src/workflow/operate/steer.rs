//! What operators do to executions: cancel, terminate, resume, wake, retry; and the answer to why one waits.

use std::collections::BTreeMap;
use std::future::IntoFuture;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::damage::{Scanned, scan_around};
use crate::lane::{Once, OnceCall, OnceFound, Part};
use crate::lock::Owner;
use crate::store::{Check, ErrorKind, Generation, Rev, Timestamp};
use crate::workflow::admission::QueuePosition;
use crate::workflow::engine::handle::Handle;
use crate::workflow::engine::post::Along;
use crate::workflow::engine::spans::Birth;
use crate::workflow::engine::supersede::Marked;
use crate::workflow::engine::{Engine, EngineInner};
use crate::workflow::operate::history::ExecutionState;
use crate::workflow::operate::status;
use crate::workflow::run::close::How;
use crate::workflow::run::{OpInProgress, RECORD, Run, Stop, with_record};
use crate::workflow::stored::kept::MessageBody;
use crate::workflow::stored::listed::{read_by_status, read_end};
use crate::workflow::stored::record::{Execution, StoredStatus, Supersede, Wait, WaitsFor, failure_text};
use crate::workflow::{Boxed, ExecutionId, Failure, Result, WorkflowError};

/// The code of the failure of an execution that was terminated.
pub(crate) const TERMINATED: &str = "latchwork.terminated";

/// The beginning of the message of that failure.
const TERMINATED_FOR: &str = "it was terminated: ";

/// The reason for which an execution was terminated.
pub(crate) fn terminated_for(failure: &Failure) -> &str {
    failure.message().strip_prefix(TERMINATED_FOR).unwrap_or(failure.message())
}

/// Why an execution does not continue: its state and what it waits for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Why {
    /// The execution's id.
    pub id: ExecutionId,
    /// The workflow's name.
    pub workflow: String,
    /// Its state.
    pub state: ExecutionState,
    /// When its record last changed. For an execution that has ended, this is its end.
    #[serde(rename = "changed_us")]
    pub changed: Timestamp,
    /// When it begins, if it was started to begin later.
    #[serde(rename = "begins_us")]
    pub begins: Option<Timestamp>,
    /// True if it is in memory.
    pub resident: bool,
    /// The reason, if its cancellation was requested.
    pub cancel: Option<String>,
    /// Why it cannot run here, if it is set aside.
    pub set_aside: Option<String>,
    /// What it does or waits for: one entry for each of its branches.
    pub waits: Vec<Wait>,
    /// Its position in a queue, if it waits for a permit.
    pub queue: Option<QueuePosition>,
}

impl Engine {
    /// Cancels an execution: the operations that it waits for, and its next operations, fail, so that it can clean up.
    /// An execution that has ended is an error. A second cancellation changes nothing.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// engine.cancel("order-7", "the customer has changed her mind").await?;
    /// # Ok(()) }
    /// ```
    pub async fn cancel(&self, id: impl Into<ExecutionId>, reason: &str) -> Result<()> {
        self.inner.cancel(&id.into(), reason).await
    }

    /// Ends an execution as failed, wherever it is. No more of its code runs.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// engine.terminate("order-7", "it was a test").await?;
    /// # Ok(()) }
    /// ```
    pub async fn terminate(&self, id: impl Into<ExecutionId>, reason: &str) -> Result<()> {
        self.inner.terminate(&id.into(), reason).await
    }

    /// Lets a parked execution continue, with the code that is registered now.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// for (id, reason) in engine.parked().await? {
    ///     println!("{id} was parked: {reason}");
    ///     engine.resume(id).await?;
    /// }
    /// # Ok(()) }
    /// ```
    pub fn resume(&self, id: impl Into<ExecutionId>) -> Steer {
        Steer { engine: self.clone(), id: id.into(), is_retry: false, once: None }
    }

    /// Loads a waiting execution at once, to see whether it can continue. If it must still wait, it is evicted again.
    /// An execution that begins later is not loaded before that time.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// engine.wake("order-7").await?;
    /// # Ok(()) }
    /// ```
    pub async fn wake(&self, id: impl Into<ExecutionId>) -> Result<()> {
        let id = id.into();
        let found = self.inner.read(&id).await?.filter(|(found, _)| found.status == StoredStatus::Waiting);
        let begins = found.and_then(|(found, _)| found.begins_us);
        if begins.is_some_and(|begins| begins > self.inner.store.env().now().0) {
            return Ok(());
        }
        self.inner.load(&id).await
    }

    /// Lets an execution that pauses before the next attempt of a step try at once. A parked execution is resumed.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// engine.retry_now("order-7").await?;
    /// # Ok(()) }
    /// ```
    pub fn retry_now(&self, id: impl Into<ExecutionId>) -> Steer {
        Steer { engine: self.clone(), id: id.into(), is_retry: true, once: None }
    }

    /// Returns the executions that wait for an operator, with the reasons.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// for (id, reason) in engine.parked().await? {
    ///     println!("{id}: {reason}");
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn parked(&self) -> Result<Vec<(ExecutionId, String)>> {
        // The engine finds some of them to be parked only when it loads them.
        let _ = self.inner.found.subscribe().wait_for(|found| *found).await;
        let view = self.inner.store.view().await?;
        let (space, range) = self.inner.spaces.lists.with_status(status::Status::Parked);
        let Scanned { found, damaged } = scan_around(&view, space, &range, usize::MAX).await?;
        let set_aside = self.inner.set_aside.lock().clone();
        let mut parked: BTreeMap<ExecutionId, String> = set_aside;
        let reasons = found.iter().map(|(key, item)| (key, String::from_utf8_lossy(&item.value).into_owned()));
        let damaged = damaged.iter().map(|key| (key, format!("its record {key} is damaged: it cannot be read")));
        for (key, reason) in reasons.chain(damaged) {
            if let Some((_, id)) = read_by_status(key.bytes()).and_then(|(_, rest)| read_end(rest)) {
                parked.insert(id, reason);
            }
        }
        Ok(parked.into_iter().collect())
    }

    /// Returns exactly what an execution waits for.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// println!("{}", engine.why("order-7").await?);
    /// # Ok(()) }
    /// ```
    pub async fn why(&self, id: impl Into<ExecutionId>) -> Result<Why> {
        let id = id.into();
        let resident = self.inner.resident(&id);
        let doing = resident.as_ref().map(|run| run.with(|state| state.ops.doing()));
        let view = self.inner.store.view().await?;
        let stored = self.inner.stored();
        let (_, execution, changed) = stored.read(&view, &id).await?;
        let gates = self.inner.spaces.gates();
        let queue = QueuePosition::of(gates, &view, &id, &execution).await?;
        let doing = doing.filter(|_| matches!(execution.status, StoredStatus::Running | StoredStatus::Waiting));
        let set_aside = self.inner.set_aside.lock().get(&id).cloned();
        let why = Why { resident: resident.is_some(), set_aside, queue, ..Why::stored(id, execution, changed) };
        Ok(Why { waits: doing.unwrap_or(why.waits), ..why })
    }
}

/// A resume of an execution, or a retry of its step, that is about to be made.
#[must_use = "nothing is done until this is awaited"]
pub struct Steer {
    engine: Engine,
    id: ExecutionId,
    is_retry: bool,
    once: Option<Once>,
}

shown!(Steer, it => id: it.id);

impl Steer {
    /// Sets an idempotency key: the execution is resumed once, however often this is asked for.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// engine.resume("order-7").once("request-7").await?;
    /// # Ok(()) }
    /// ```
    pub fn once(mut self, once: impl Into<Once>) -> Steer {
        self.once = Some(once.into());
        self
    }

    async fn run(self) -> Result<()> {
        let Steer { engine, id, is_retry, once } = &self;
        let inner = &engine.inner;
        loop {
            let change = (if *is_retry { "retry" } else { "resume" }, id);
            let call = match inner.once.find(&inner.store, once.as_ref(), &change).await? {
                OnceFound::Answered(()) => return Ok(()),
                OnceFound::Anew(call) => call,
            };
            let is_done = match is_retry {
                true => engine.retry_step(id, &call).await?,
                false => inner.resume(id, &call).await?,
            };
            if is_done {
                return Ok(());
            }
        }
    }
}

impl IntoFuture for Steer {
    type Output = Result<()>;
    type IntoFuture = Boxed<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.run())
    }
}

impl Engine {
    /// One attempt of a retry. Returns false if another commit was faster.
    async fn retry_step(&self, id: &ExecutionId, call: &OnceCall) -> Result<bool> {
        let why = self.why(id).await?;
        match why.state {
            ExecutionState::Parked(_) => return self.inner.resume(id, call).await,
            ExecutionState::Running | ExecutionState::Waiting => {}
            _ => return Err(WorkflowError::Ended { id: id.clone() }),
        }
        if !why.waits.iter().any(|wait| matches!(wait.what, WaitsFor::Retry(_))) {
            return Err(WorkflowError::NotRetrying { id: id.clone() });
        }
        self.inner.deliver(id, MessageBody::RetryNow, Along::with(call.checks_and_writes(&()))).await
    }
}

impl EngineInner {
    /// One attempt to resume a parked execution. Returns false if another commit was faster.
    async fn resume(self: &Arc<EngineInner>, id: &ExecutionId, call: &OnceCall) -> Result<bool> {
        let (before, rev) = self.known(id).await?;
        if !matches!(before.status, StoredStatus::Parked(_)) {
            return Err(WorkflowError::NotParked { id: id.clone() });
        }
        let resumes = before.resumes + 1;
        let mut after = Execution { status: StoredStatus::Running, resumes, ..before.clone() };
        let (part, _) = with_record(self, self.at_record(id, Some(rev)), id, Some(&before), &mut after, None);
        if !self.perform(self.waking(part.and(call.answered(&())), id)).await? {
            return Ok(false);
        }
        self.load(id).await.map(|()| true)
    }
}

impl Why {
    /// The answer from the store alone.
    pub(crate) fn stored(id: ExecutionId, execution: Execution, changed: Timestamp) -> Why {
        Why {
            id,
            workflow: execution.workflow,
            state: ExecutionState::of(&execution.status),
            changed,
            begins: execution.begins_us.map(Timestamp),
            resident: false,
            cancel: execution.cancel,
            set_aside: None,
            waits: execution.waits,
            queue: None,
        }
    }
}

impl<O> Handle<O> {
    /// Cancels the execution, as [`Engine::cancel`] does.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result, Workflow};
    /// # async fn example(engine: Engine, order: Workflow<u32, u32>) -> Result<()> {
    /// engine.handle(&order, "order-7").cancel("the customer has changed her mind").await?;
    /// # Ok(()) }
    /// ```
    pub async fn cancel(&self, reason: &str) -> Result<()> {
        self.engine.cancel(self.id(), reason).await
    }

    /// Ends the execution, as [`Engine::terminate`] does.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result, Workflow};
    /// # async fn example(engine: Engine, order: Workflow<u32, u32>) -> Result<()> {
    /// engine.handle(&order, "order-7").terminate("it was a test").await?;
    /// # Ok(()) }
    /// ```
    pub async fn terminate(&self, reason: &str) -> Result<()> {
        self.engine.terminate(self.id(), reason).await
    }
}

/// The end of an execution that is not in memory.
pub(crate) struct Ending<'a> {
    /// Its record, and the rev of the record.
    pub(crate) before: Execution,
    pub(crate) rev: Rev,
    pub(crate) status: &'a StoredStatus,
    /// The first record of the execution that replaces it, unless that is already stored.
    pub(crate) successor: Option<&'a Execution>,
    /// True if an earlier try was too large for one commit.
    pub(crate) is_large: bool,
}

impl EngineInner {
    /// Ends an execution in a task of its own, because the caller may be dropped or may not be polled. Until the task
    /// is done, only this task changes the locks of the execution.
    pub(crate) async fn terminate(self: &Arc<EngineInner>, id: &ExecutionId, reason: &str) -> Result<()> {
        let (engine, id, reason) = (self.clone(), id.clone(), reason.to_string());
        let terminated = self.node.runtime.run(async move { engine.terminate_now(&id, &reason, None, false).await });
        terminated.await.unwrap_or(Err(WorkflowError::Stopped))
    }

    /// Ends a resident execution. Returns true if it has ended with this status.
    async fn terminate_resident(&self, run: &Arc<Run>, status: &StoredStatus) -> Result<bool> {
        // A commit that is on its way lands first. Then the execution ends.
        run.set_stop(Stop::Terminated(status.clone()));
        let doing = OpInProgress::begin(run, WaitsFor::Store);
        doing.outside(|_| None::<()>).await;
        if self.is_stopped() {
            return Err(WorkflowError::Stopped);
        }
        Ok(run.ended_as().as_ref() == Some(status))
    }

    /// Ends an execution. If another execution replaces it, `successor` is the first record of that one, unless it is
    /// already stored. A marked execution is ended only while it has its mark: the next execution of its id is another
    /// one.
    pub(crate) async fn terminate_now(
        self: &Arc<EngineInner>,
        id: &ExecutionId,
        reason: &str,
        successor: Option<Execution>,
        mut is_marked: bool,
    ) -> Result<()> {
        let failure = Failure::new(format!("{TERMINATED_FOR}{reason}")).with_code(TERMINATED);
        let status = StoredStatus::Failed(failure_text(&failure));
        let (mut is_tried, mut is_large) = (false, false);
        loop {
            match self.mark_if_need_be(id, successor.as_ref().filter(|_| !is_marked)).await? {
                None => {}
                Some(Marked::Given) => return Ok(()),
                Some(Marked::Refused) => continue,
                Some(Marked::Ends) => is_marked = true,
            }
            let resident = self.resident(id);
            // The execution may have ended by itself. Then the resident execution is already its successor.
            if is_marked && self.known(id).await?.0.superseded.is_none() {
                return Ok(());
            }
            if let Some(run) = resident {
                is_tried = true;
                match self.terminate_resident(&run, &status).await? {
                    true => return Ok(()),
                    false => continue,
                }
            }
            // The execution may be loaded meanwhile and record more that belongs to its end. That does not change its
            // record, so the commit also checks these other records.
            let view = self.store.view().await?;
            let (mut before, rev) = self.known(id).await?;
            if is_marked && before.superseded.is_none() || is_tried && self.is_followed(&before, successor.as_ref()) {
                return Ok(());
            }
            before.superseded = before.superseded.or(successor.as_ref().map(|_| Supersede::Terminate));
            if before.status.is_terminal() {
                // The answer to the commit may have been lost.
                let is_done = is_tried && before.status == status;
                return if is_done { Ok(()) } else { Err(WorkflowError::Ended { id: id.clone() }) };
            }
            let ending = Ending { before, rev, status: &status, successor: successor.as_ref(), is_large };
            match self.end_stored(id, view.generation(), ending).await {
                Err(error) if error.kind() == ErrorKind::Invalid && !is_large => is_large = true,
                Ok(false) => {}
                ended => return ended.map(drop),
            }
        }
    }

    /// Ends an execution that is not in memory, as it was at this generation. Returns false if it has changed since.
    pub(crate) async fn end_stored(
        self: &Arc<EngineInner>,
        id: &ExecutionId,
        known: Generation,
        Ending { before, rev, status, successor, is_large }: Ending<'_>,
    ) -> Result<bool> {
        let how = How { from_store: true, is_large, is_alone: true };
        let mut closing = self.closing(id, &before, Some(status), how).await?;
        let ended = Execution { status: status.clone(), timer_us: None, waits: Vec::new(), ..before.clone() };
        let first = self.succession(id, &before, &mut closing.parts, successor).await?;
        let mut after = first.unwrap_or(ended);
        let requests = self.locks.spaces.owned_by(&Owner::Execution(id.clone()));
        let unchanged = |range| Check::Unchanged(range, known);
        let part = self.at_record(id, Some(rev)).check(RECORD, unchanged(requests));
        let part = part.check(RECORD, unchanged(self.kept(id).children()));
        let part = part.check(RECORD, unchanged(self.kept(id).reviews()));
        let (part, due) = with_record(self, part, id, Some(&before), &mut after, None);
        let part = closing.parts.drain(..).fold(part, Part::and);
        if !self.perform(part).await? {
            return Ok(false);
        }
        due.into_iter().for_each(|due| self.removals.set(id, due));
        self.set_aside.lock().remove(id);
        if !after.status.is_terminal() {
            self.spawn_load(id);
        }
        self.tell_end(id, &Birth::of(&before), status);
        self.ended(id, Some(status.clone()), false);
        if after.status.is_terminal() {
            self.forget_callers(id);
        }
        Ok(true)
    }

    pub(crate) async fn cancel(self: &Arc<EngineInner>, id: &ExecutionId, reason: &str) -> Result<()> {
        loop {
            if let Some(run) = self.resident(id) {
                let doing = OpInProgress::begin(&run, WaitsFor::Store);
                run.ask_cancel(reason);
                // The cancellation is stored by the next commit of the execution.
                let is_done = doing.outside(|state| {
                    let stored = state.known.stored();
                    let is_cancelled = stored.cancel.is_some();
                    let is_known = is_cancelled || stored.status.is_terminal();
                    (state.known.is_stored() && is_known).then_some(is_cancelled)
                });
                match is_done.await {
                    Some(true) => return Ok(()),
                    Some(false) => return Err(WorkflowError::Ended { id: id.clone() }),
                    None if self.is_stopped() => return Err(WorkflowError::Stopped),
                    // The execution has left memory. The stored record decides.
                    None => {}
                }
            }
            let Some(part) = self.cancelling(id, reason, true).await? else { return Ok(()) };
            if self.perform(part).await? {
                return Ok(());
            }
        }
    }
}

impl Wait {
    /// True if only another execution can end the wait: a lock or a child, without a time limit.
    pub(crate) fn is_for_others(&self) -> bool {
        matches!(self.what, WaitsFor::Lock(_) | WaitsFor::Child(_)) && self.until.is_none()
    }
}
