//! Containers in memory: the queue alone. Nobody else can move them, so nothing is checked and nothing is tried again.
//! An idle one is little more than its state.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::Value;
use tokio::sync::mpsc::UnboundedSender;

use crate::state::batch::Known;
use crate::state::op::{Event, Op, difference};
use crate::state::queue::{Body, Changed, Identity, Job, Ran, Settled, drive, start};
use crate::state::watch::Change;
use crate::state::{Result, StateError};
use crate::store::{Env, Generation, Rev};

/// A container without a store.
pub(crate) struct Memory {
    name: Arc<str>,
    inner: Mutex<Inner>,
}

struct Inner {
    /// `None` within: it was removed. `None` without: it was never written.
    state: Option<Option<Value>>,
    rev: Rev,
    /// Nothing while nobody waits or watches.
    busy: Option<Box<Busy>>,
}

#[derive(Default)]
struct Busy {
    /// What waits, while a worker is at it.
    queue: Option<VecDeque<Job>>,
    watchers: Vec<UnboundedSender<Change>>,
}

impl Memory {
    pub(crate) fn new(name: Arc<str>) -> Memory {
        Memory { name, inner: Mutex::new(Inner { state: None, rev: Rev(0), busy: None }) }
    }

    pub(crate) fn name(&self) -> &Arc<str> {
        &self.name
    }

    pub(crate) fn identity(self: &Arc<Memory>) -> Identity {
        Identity::Memory(Arc::as_ptr(self) as usize)
    }

    /// The state and its rev; `None` if it was never written.
    pub(crate) fn read(&self) -> Known {
        let inner = self.inner.lock();
        let rev = inner.state.is_some().then_some(inner.rev);
        Known { rev, state: inner.state.clone().flatten() }
    }

    pub(crate) fn watch(&self, watcher: UnboundedSender<Change>) {
        self.inner.lock().busy.get_or_insert_default().watchers.push(watcher);
    }

    /// Does an operation on the spot if nobody is before it.
    pub(crate) fn apply_now(&self, job: &Job, op: &Op, env: &Env) -> Option<Result<Changed>> {
        let mut inner = self.inner.lock();
        inner.queue().is_none().then(|| inner.apply(&self.name, job, op, env))
    }

    /// Puts a job into the queue.
    pub(crate) fn submit(self: &Arc<Memory>, job: Job, env: &Env) -> Result<()> {
        let runtime = tokio::runtime::Handle::try_current().map_err(|_| StateError::NoRuntime)?;
        let mut inner = self.inner.lock();
        if let Some(queue) = inner.queue() {
            queue.push_back(job);
            return Ok(());
        }
        inner.busy.get_or_insert_default().queue = Some(VecDeque::from([job]));
        drop(inner);
        runtime.spawn(Worker { memory: self.clone(), env: env.clone(), ended: false }.run());
        Ok(())
    }
}

impl Inner {
    fn queue(&mut self) -> Option<&mut VecDeque<Job>> {
        self.busy.as_mut()?.queue.as_mut()
    }

    /// Lets go of the queue, and of all that is needed only while somebody waits or watches. Gives what was in it.
    fn end_queue(&mut self) -> Option<VecDeque<Job>> {
        let busy = self.busy.as_mut()?;
        let left = busy.queue.take();
        if busy.watchers.is_empty() {
            self.busy = None;
        }
        left
    }
}

impl Inner {
    fn reads(&self, job: &Job) -> Option<Value> {
        self.state.clone().unwrap_or_else(|| job.definition.initial.clone())
    }

    fn apply(&mut self, name: &str, job: &Job, op: &Op, env: &Env) -> Result<Changed> {
        let was_written = self.state.is_some();
        let mut state = self.state.take().unwrap_or_else(|| job.definition.initial.clone());
        let before = job.definition.may_refuse().then(|| state.clone());
        let mut came_to = op.apply(name, &mut state).map(|(value, changed)| {
            // What is set or removed for the first time is written, though it may read as before.
            (value, changed || !was_written && op.writes_always())
        });
        if let Ok((_, true)) = came_to
            && let Err(error) = job.definition.check(name, state.as_ref())
        {
            came_to = Err(error);
            state = before.flatten();
        }
        let changed = matches!(came_to, Ok((_, true)));
        self.state = (was_written || changed).then_some(state);
        let (value, changed) = came_to?;
        if changed {
            self.tell(|| op.event(job.operation), env);
        }
        Ok(Changed { value, rev: self.rev, changed, repeated: false })
    }

    fn take_over(&mut self, name: &str, job: &Job, after: Option<Value>, env: &Env) -> Result<Changed> {
        let before = self.reads(job);
        let changed = before != after;
        let value = after.clone().unwrap_or_default();
        if changed {
            if let Some(after) = &after {
                crate::json::check(after).map_err(|cause| StateError::Value { key: name.into(), cause })?;
            }
            job.definition.check(name, after.as_ref())?;
            let delta = || difference(before.as_ref(), after.as_ref());
            let event = || Event { operation: job.operation.into(), path: String::new(), delta: delta(), times: 1 };
            self.state = Some(after.clone());
            self.tell(event, env);
        }
        Ok(Changed { value, rev: self.rev, changed, repeated: false })
    }

    /// Counts a change and tells those who watch.
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
        if busy.watchers.is_empty() && busy.queue.is_none() {
            self.busy = None;
        }
    }
}

struct Worker {
    memory: Arc<Memory>,
    env: Env,
    /// Whether the queue was let go of. One that is there from then on is another worker's.
    ended: bool,
}

impl Drop for Worker {
    /// A worker ends by itself when nothing is left. If it ends because the runtime does, those who wait are told by
    /// the end of their jobs.
    fn drop(&mut self) {
        if !self.ended {
            // Jobs hold what is the callers' own; it is not to be dropped under the lock.
            let left = self.memory.inner.lock().end_queue();
            drop(left);
        }
    }
}

impl Worker {
    async fn run(mut self) {
        while let Some(job) = self.next() {
            if job.progress.start(&self.env) {
                self.work(job).await;
            }
        }
    }

    /// The next job. When there is none, the queue is gone.
    fn next(&mut self) -> Option<Job> {
        let mut inner = self.memory.inner.lock();
        let job = inner.queue().and_then(VecDeque::pop_front);
        if job.is_none() {
            inner.end_queue();
            self.ended = true;
        }
        job
    }

    async fn work(&self, mut job: Job) {
        let settled = match &mut job.body {
            Body::Op(op, _) => {
                let op = op.clone();
                self.memory.inner.lock().apply(&self.memory.name, &job, &op, &self.env)
            }
            Body::Mutator(mutator) => {
                let held = job.held.and(self.memory.identity());
                let state = {
                    let inner = self.memory.inner.lock();
                    inner.state.clone().unwrap_or_else(|| job.definition.initial.clone())
                };
                let ran = match start(&mut **mutator, state, &held) {
                    Ok(mut running) => drive(&mut running, held, false).await,
                    Err(message) => Ran::Panicked(message),
                };
                let key = self.memory.name.to_string();
                match ran {
                    Ran::Ended(Ok(after)) => {
                        self.memory.inner.lock().take_over(&self.memory.name, &job, after, &self.env)
                    }
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
