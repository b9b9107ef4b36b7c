//! Containers in memory: they use only the lane. No other process can change them, so nothing is checked and nothing is
//! tried again. An idle container is little more than its state.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::Value;
use tokio::sync::mpsc::UnboundedSender;

use crate::lane::{LanePlan, Lanes, Runtime};
use crate::state::batch::KnownState;
use crate::state::definition::ContainerDefinition;
use crate::state::op::{Event, StateOp};
use crate::state::queue::{Changed, Identity, JobWork, Ran, Settled, StateJob, drive, start};
use crate::state::watch::Change;
use crate::state::{Result, StateError};
use crate::store::{Commit, Env, Generation, Receipt, Refusal, Rev, Store, StoreError};

/// A container without a store.
pub(crate) struct Memory {
    name: Arc<str>,
    inner: Mutex<MemoryInner>,
}

struct MemoryInner {
    /// `Some(None)`: it was removed. `None`: it was never written.
    state: Option<Option<Value>>,
    rev: Rev,
    /// `None` while there are no jobs and no watchers.
    busy: Option<Box<BusyMemory>>,
}

#[derive(Default)]
struct BusyMemory {
    /// The number of jobs in the lane.
    jobs: usize,
    watchers: Vec<UnboundedSender<Change>>,
}

/// The lanes of containers in memory.
pub(crate) struct Memories {
    store: Store,
    runtime: Runtime,
    lanes: Lanes<Memories>,
}

impl Memories {
    pub(crate) fn new(store: &Store) -> Memories {
        Memories { store: store.clone(), runtime: Runtime::here(), lanes: Lanes::default() }
    }

    /// Puts a job into a container's lane.
    pub(crate) fn submit(self: &Arc<Memories>, memory: &Arc<Memory>, job: StateJob) -> Result<()> {
        memory.inner.lock().busy.get_or_insert_default().jobs += 1;
        let queued = Queued { memory: memory.clone(), job: Some(job) };
        Lanes::submit(self, &memory.address(), queued).map_err(|_| StateError::NoRuntime)
    }
}

/// A job in the lane of a container.
pub(crate) struct Queued {
    memory: Arc<Memory>,
    job: Option<StateJob>,
}

impl Drop for Queued {
    fn drop(&mut self) {
        // A job holds values of the caller, which must not be dropped while the mutex is held.
        drop(self.job.take());
        let mut inner = self.memory.inner.lock();
        inner.busy.iter_mut().for_each(|busy| busy.jobs -= 1);
        inner.rest();
    }
}

impl LanePlan for Memories {
    /// The container's address, which is unique while the container exists.
    type Key = usize;
    type Job = Queued;
    type Known = ();
    type Batch = Infallible;

    const MOST: usize = 1;

    fn lanes(&self) -> &Lanes<Memories> {
        &self.lanes
    }

    fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    fn store(&self) -> &Store {
        &self.store
    }

    async fn plan(
        self: &Arc<Memories>,
        _: &usize,
        _: &mut (),
        jobs: &mut VecDeque<Queued>,
        _: usize,
    ) -> Option<(Commit, Infallible)> {
        let mut queued = jobs.pop_front()?;
        let job = queued.job.take().filter(|job| job.progress.start(self.store.env()))?;
        queued.memory.work(job, self.store.env()).await;
        None
    }

    fn size(never: &Infallible) -> usize {
        match *never {}
    }

    fn landed(self: &Arc<Memories>, _: &usize, _: &mut (), never: Infallible, _: &Receipt) {
        match never {}
    }

    async fn refused(
        self: &Arc<Memories>,
        _: &usize,
        _: &mut (),
        never: Infallible,
        _: Refusal,
        _: &mut VecDeque<Queued>,
    ) {
        match never {}
    }

    fn split(self: &Arc<Memories>, _: &mut (), never: Infallible, _: &mut VecDeque<Queued>) {
        match never {}
    }

    fn failed(self: &Arc<Memories>, _: &mut (), never: Infallible, _: StoreError, _: &mut VecDeque<Queued>) {
        match never {}
    }
}

impl Memory {
    pub(crate) fn new(name: Arc<str>) -> Memory {
        Memory { name, inner: Mutex::new(MemoryInner { state: None, rev: Rev(0), busy: None }) }
    }

    pub(crate) fn name(&self) -> &Arc<str> {
        &self.name
    }

    pub(crate) fn identity(self: &Arc<Memory>) -> Identity {
        Identity::Memory(self.address())
    }

    /// The state and its rev; `None` if it was never written.
    pub(crate) fn read(&self) -> KnownState {
        let inner = self.inner.lock();
        let rev = inner.state.is_some().then_some(inner.rev);
        KnownState { rev, state: inner.state.clone().flatten() }
    }

    pub(crate) fn watch(&self, watcher: UnboundedSender<Change>) {
        self.inner.lock().busy.get_or_insert_default().watchers.push(watcher);
    }

    /// Does an operation at once if no job is before it.
    pub(crate) fn apply_now(&self, job: &StateJob, op: &StateOp, env: &Env) -> Option<Result<Changed>> {
        let mut inner = self.inner.lock();
        inner.is_idle().then(|| inner.apply(&self.name, job, op, env))
    }

    fn address(self: &Arc<Memory>) -> usize {
        Arc::as_ptr(self) as usize
    }
}

impl MemoryInner {
    fn is_idle(&self) -> bool {
        self.busy.as_ref().is_none_or(|busy| busy.jobs == 0)
    }

    /// Drops everything that is needed only while there are jobs or watchers.
    fn rest(&mut self) {
        self.busy.take_if(|busy| busy.jobs == 0 && busy.watchers.is_empty());
    }
}

impl MemoryInner {
    fn reads(&self, definition: &ContainerDefinition) -> Option<Value> {
        self.state.clone().unwrap_or_else(|| definition.initial.clone())
    }

    /// Refuses a job whose condition is false.
    fn permits(&self, name: &str, job: &StateJob) -> Result<()> {
        let rev = self.state.is_some().then_some(self.rev);
        job.permits(name, rev, self.state.as_ref().is_some_and(Option::is_some))
    }

    fn apply(&mut self, name: &str, job: &StateJob, op: &StateOp, env: &Env) -> Result<Changed> {
        self.permits(name, job)?;
        let was_written = self.state.is_some();
        let mut state = self.state.take().unwrap_or_else(|| job.definition.initial.clone());
        let came_to = job.apply(op, name, was_written, &mut state);
        let changed = matches!(came_to, Ok((_, true)));
        self.state = (was_written || changed).then_some(state);
        let (value, changed) = came_to?;
        if changed {
            self.tell(|| op.event(job.operation), env);
        }
        Ok(Changed { value, rev: self.rev, changed, repeated: false })
    }

    fn take_over(&mut self, name: &str, job: &StateJob, after: Option<Value>, env: &Env) -> Result<Changed> {
        let before = self.reads(&job.definition);
        let changed = job.may_become(name, before.as_ref(), after.as_ref())?;
        let value = after.clone().unwrap_or_default();
        if changed {
            self.state = Some(after.clone());
            self.tell(|| job.event(before.as_ref(), after.as_ref()), env);
        }
        Ok(Changed { value, rev: self.rev, changed, repeated: false })
    }

    /// Counts a change and notifies watchers.
    fn tell(&mut self, event: impl FnOnce() -> Event, env: &Env) {
        self.rev = self.rev.next();
        let Some(busy) = &mut self.busy else { return };
        if busy.watchers.is_empty() {
            return;
        }
        let change = Change {
            rev: self.rev,
            generation: Generation(self.rev.0),
            time: env.now(),
            events: vec![event()],
            state: self.state.clone().flatten(),
        };
        busy.watchers.retain(|watcher| watcher.send(change.clone()).is_ok());
        self.rest();
    }
}

impl Memory {
    async fn work(self: &Arc<Memory>, mut job: StateJob, env: &Env) {
        let permitted = self.inner.lock().permits(&self.name, &job);
        if let Err(error) = permitted {
            return job.settle(Settled::Failed(error));
        }
        let settled = match &mut job.body {
            JobWork::Op(op, _) => {
                let op = op.clone();
                self.inner.lock().apply(&self.name, &job, &op, env)
            }
            JobWork::Mutator(mutator) => {
                let held = job.held.and(self.identity());
                let state = self.inner.lock().reads(&job.definition);
                let ran = match start(&mut **mutator, state, &held) {
                    Ok(mut running) => drive(&mut running, held, false).await,
                    Err(message) => Ran::Panicked(message),
                };
                let key = self.name.to_string();
                match ran {
                    Ran::Ended(Ok(after)) => self.inner.lock().take_over(&self.name, &job, after, env),
                    Ran::Ended(Err(refusal)) => {
                        job.settle(Settled::Refused(refusal));
                        return;
                    }
                    Ran::Panicked(message) => Err(StateError::Panicked { key, message }),
                    Ran::Waits => Err(StateError::Abandoned { key }),
                }
            }
        };
        job.settle(match settled {
            Ok(changed) => Settled::Done(changed),
            Err(error) => Settled::Failed(error),
        });
    }
}
