//! The keeper of a namespace's tasks: takes leases away that are over, wakes workers when a pause is over or another
//! process has put something, tells executions of the ends that they wait for, and removes what ended long ago. It
//! rests while there is nothing to do.

use std::sync::Weak;
use std::time::Duration;

use latchwork::store::{ErrorKind, Order};
use latchwork::workflow::{Engine, Failure, WorkflowError};

use crate::tasks::rules::Change;
use crate::tasks::stored::{Task, TaskKeys, TaskState};
use crate::tasks::{TaskCall, TaskError, Tasks};

/// The pause between two looks while something is pending.
const LOOK: Duration = Duration::from_millis(250);
/// The longest pause: what another process has put is noticed after it, if no worker waits here.
const REST: Duration = Duration::from_secs(10);
/// How long an ended task is kept. For so long a repeated put of its id does not run it again.
pub(crate) const KEPT: Duration = Duration::from_secs(7 * 24 * 60 * 60);
/// How much one look does of each kind of work.
const SLICE: usize = 64;

/// The tasks, as long as the namespace lives, and its engine.
pub(crate) trait Kept: Send + Sync + 'static {
    fn tasks(&self) -> &Tasks;
    fn engine(&self) -> &Engine;
}

/// Keeps the tasks until the namespace is gone or its store has ended.
pub(crate) async fn keep<K: Kept>(namespace: Weak<K>) {
    loop {
        let Some(kept) = namespace.upgrade() else { return };
        let (tasks, engine) = (kept.tasks().clone(), kept.engine().clone());
        drop(kept);
        let is_busy = match tasks.look(&engine).await {
            Ok(is_busy) => is_busy,
            Err(error) => {
                tracing::warn!(%error, "tasks could not be looked at; trying again");
                true
            }
        };
        let store = &tasks.0.store;
        let waits = async {
            tokio::select! {
                () = tasks.waiting().asked_to_look(), if !is_busy => {}
                () = tasks.waiting().asked_to_tell() => {}
                () = store.env().sleep(if is_busy { LOOK } else { REST }) => {}
            }
        };
        drop(engine);
        tokio::select! {
            () = waits => {}
            () = store.ended() => return,
        }
    }
}

impl Tasks {
    /// Does what is due. True if more will be due.
    pub(crate) async fn look(&self, engine: &Engine) -> Result<bool, TaskError> {
        // A store without tasks is left as it is.
        let Some(keys) = self.known_keys().await? else { return Ok(false) };
        self.sweep().await?;
        self.wake_workers(keys).await?;
        self.wake_callers().await?;
        self.tell_all(keys, engine).await?;
        self.remove_old(keys).await?;
        let waiting = self.waiting();
        let view = self.0.store.view().await?;
        let first = view.scan(&keys.orders(), Order::Ascending, 1).await?;
        let untold = view.scan(&keys.untold(), Order::Ascending, 1).await?;
        let is_pending = first.iter().chain(&untold).any(|(place, _)| TaskKeys::is_pending(place));
        Ok(is_pending || !waiting.kinds().is_empty() || !waiting.watched().is_empty())
    }

    async fn wake_workers(&self, keys: &TaskKeys) -> Result<(), TaskError> {
        let view = self.0.store.view().await?;
        for kind in self.waiting().kinds() {
            for _ in view.scan(&keys.due(&kind, self.now()), Order::Ascending, SLICE).await? {
                self.waiting().wake(&kind);
            }
        }
        Ok(())
    }

    /// Callers here whose tasks have ended in another process.
    async fn wake_callers(&self) -> Result<(), TaskError> {
        for id in self.waiting().watched() {
            if self.get(&id).await.is_ok_and(|task| task.ended().is_some()) {
                self.waiting().wake_callers(&id);
            }
        }
        Ok(())
    }

    async fn tell_all(&self, keys: &TaskKeys, engine: &Engine) -> Result<(), TaskError> {
        let view = self.0.store.view().await?;
        for (place, _) in view.scan(&keys.untold(), Order::Ascending, SLICE).await? {
            let Some(id) = TaskKeys::untold_id(&place) else { continue };
            let task = match self.get(&id).await {
                Ok(task) => task,
                Err(TaskError::NotFound { .. }) => continue,
                Err(error @ TaskError::Damaged { .. }) => {
                    tracing::error!(%error, "an execution is not told of the end of a task");
                    continue;
                }
                Err(error) => return Err(error),
            };
            if tell(engine, &task).await {
                let told = |task: &mut Task, _| {
                    task.told = true;
                    Ok(Change::Changed)
                };
                self.change(&id, &TaskCall::default(), told).await?;
            }
        }
        Ok(())
    }

    async fn remove_old(&self, keys: &TaskKeys) -> Result<(), TaskError> {
        let view = self.0.store.view().await?;
        let old = keys.ended_before(self.now().minus(KEPT));
        for (place, _) in view.scan(&old, Order::Ascending, SLICE).await? {
            let Some(id) = TaskKeys::timed_id(&place) else { continue };
            let Some((task, item)) = self.find(keys, &view, &id).await? else { continue };
            // An execution that was not told yet needs it.
            if keys.places(&task).len() > 1 {
                continue;
            }
            let record = keys.record(&id);
            let commit = latchwork::store::Commit::new().at_rev(&record, item.rev).delete(&record).delete(&place);
            // A refusal means that another process has removed it.
            let _ = self.0.store.commit(commit).await?.is_applied();
        }
        Ok(())
    }
}

/// Tells the execution that waits for a task of its end. False if that has to be tried again.
async fn tell(engine: &Engine, task: &Task) -> bool {
    let Some(token) = &task.completion else { return true };
    let told = match &task.state {
        TaskState::Done { output, .. } => engine.complete(token, output).await,
        TaskState::Failed { .. } => {
            let failure = task.failure.clone();
            let (message, code) = failure.map_or(Default::default(), |failure| (failure.message, failure.code));
            let failure = Failure::new(message).not_retryable();
            engine.fail(token, code.into_iter().fold(failure, Failure::with_code)).await
        }
        TaskState::Cancelled { reason, .. } => {
            let message = format!("the task was cancelled: {reason}");
            engine.fail(token, Failure::new(message).not_retryable().with_code("task-cancelled")).await
        }
        TaskState::Open { .. } | TaskState::Leased { .. } => return true,
    };
    match told {
        Ok(()) => true,
        // An earlier attempt has told it.
        Err(WorkflowError::TokenUsed { .. }) => true,
        Err(error) if error.kind() == ErrorKind::Unavailable => {
            tracing::warn!(%error, task = task.id, "an execution could not be told of the end of a task; trying again");
            false
        }
        // The execution has ended, was removed or continues as new: it does not wait any more.
        Err(error) => {
            tracing::info!(%error, task = task.id, "the execution does not wait for the task any more");
            true
        }
    }
}
