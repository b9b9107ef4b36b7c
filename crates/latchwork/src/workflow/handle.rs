//! Starting executions, and waiting for what they come to.

use std::future::{Future, IntoFuture};
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::oneshot;

use crate::json;
use crate::record::Record;
use crate::store::Timestamp;
use crate::workflow::definition::{Definition, Workflow};
use crate::workflow::engine::{Engine, Inner, Waiter, check_name};
use crate::workflow::kept::{Delivered, Letter, Message};
use crate::workflow::record::{Attribute, Execution, Keyed, Labels, Status, Wait, WaitsFor, keyed_key};
use crate::workflow::run::{RECORD, Run, hash_text, largest, turn};
use crate::workflow::signal::{Signal, written};
use crate::workflow::{ExecutionId, Failure, Result, WorkflowError};

/// A start that is about to be awaited.
#[must_use = "nothing starts until this is awaited"]
pub struct Start<I, O> {
    engine: Engine,
    workflow: Workflow<I, O>,
    input: I,
    id: Option<ExecutionId>,
    key: Option<String>,
    join: bool,
    restart: bool,
    begins: Begins,
    signal: Option<(String, Result<String>, Option<String>)>,
    labels: Labels,
}

/// When an execution begins.
enum Begins {
    Now,
    After(Duration),
    At(Timestamp),
}

/// An execution, seen from outside.
pub struct Handle<O> {
    pub(crate) engine: Arc<Inner>,
    id: ExecutionId,
    /// The workflow that it is to be one of, if that is not known.
    asked: Option<Arc<str>>,
    output: PhantomData<fn() -> O>,
}

impl<O> Clone for Handle<O> {
    fn clone(&self) -> Handle<O> {
        let Handle { engine, id, asked, output } = self;
        Handle { engine: engine.clone(), id: id.clone(), asked: asked.clone(), output: *output }
    }
}

impl Engine {
    /// Starts an execution. Await it: when that returns, the execution is stored and survives anything.
    pub fn start<I, O>(&self, workflow: &Workflow<I, O>, input: I) -> Start<I, O> {
        Start {
            engine: self.clone(),
            workflow: workflow.clone(),
            input,
            id: None,
            key: None,
            join: false,
            restart: false,
            begins: Begins::Now,
            signal: None,
            labels: Labels::default(),
        }
    }

    /// An execution that was started before, here or in an earlier life.
    pub fn handle<I, O>(&self, workflow: &Workflow<I, O>, id: impl Into<ExecutionId>) -> Handle<O> {
        let asked = Some(workflow.name().into());
        Handle { engine: self.inner.clone(), id: id.into(), asked, output: PhantomData }
    }
}

impl Engine {
    /// An execution of whatever workflow.
    pub(crate) fn handle_of_any(&self, id: &ExecutionId) -> Handle<serde_json::Value> {
        Handle { engine: self.inner.clone(), id: id.clone(), asked: None, output: PhantomData }
    }
}

impl<I, O> Start<I, O> {
    /// Under this id; without one, a UUIDv7 is made. An id that is taken is refused.
    pub fn id(mut self, id: impl Into<ExecutionId>) -> Start<I, O> {
        self.id = Some(id.into());
        self
    }

    /// Under this idempotency key: however often a start of this workflow is sent under one key, it starts once, and
    /// all get the same execution, until that is removed some time after its end. With another input it is an error.
    pub fn idempotency_key(mut self, key: impl Into<String>) -> Start<I, O> {
        self.key = Some(key.into());
        self
    }

    /// Joins the execution of that id if there is one, whatever its input was.
    pub fn or_join(mut self) -> Start<I, O> {
        self.join = true;
        self
    }

    /// Starts anew if there is an execution of that id and it has ended: what is left of it is removed. One that has
    /// not ended is joined or refused as without this.
    pub fn or_restart(mut self) -> Start<I, O> {
        self.restart = true;
        self
    }

    /// After so long. Until then the execution waits, and costs no memory.
    pub fn delay(mut self, delay: Duration) -> Start<I, O> {
        self.begins = Begins::After(delay);
        self
    }

    /// At this time. Until then the execution waits, and costs no memory.
    pub fn at(mut self, time: Timestamp) -> Start<I, O> {
        self.begins = Begins::At(time);
        self
    }

    /// With a signal, in the same commit. If there is an execution of that id and it has not ended, that is sent the
    /// signal and joined.
    pub fn signal(mut self, name: &str, payload: &impl Serialize) -> Start<I, O> {
        let payload = written(&self.engine.inner, "the payload of a signal", payload);
        self.signal = Some((name.into(), payload, None));
        self
    }

    /// The id of that signal: however often it is sent, it counts once.
    pub fn signal_id(mut self, id: impl Into<String>) -> Start<I, O> {
        let id = id.into();
        if let Some((_, _, signal_id)) = &mut self.signal {
            *signal_id = Some(id);
        }
        self
    }

    /// With this tag, that it is found by.
    pub fn tag(mut self, tag: impl Into<String>) -> Start<I, O> {
        self.labels.tags.insert(tag.into());
        self
    }

    /// With this search attribute, that it is found by.
    pub fn attribute(mut self, name: impl Into<String>, value: impl Into<Attribute>) -> Start<I, O> {
        self.labels.attributes.insert(name.into(), value.into());
        self
    }
}

impl<I, O> IntoFuture for Start<I, O>
where
    I: Serialize + Send + 'static,
    O: Send + 'static,
{
    type Output = Result<Handle<O>>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.execute())
    }
}

impl<I: Serialize, O> Start<I, O> {
    async fn execute(self) -> Result<Handle<O>> {
        let inner = self.engine.inner.clone();
        let name = self.workflow.name().to_string();
        let definition = inner.definition(&name).cloned();
        let definition = definition.ok_or_else(|| WorkflowError::NotRegistered { name: name.clone() })?;
        let input = json::to_value(&self.input);
        let input = input.map_err(|cause| WorkflowError::Input { workflow: name.clone(), cause })?.to_string();
        let (length, limit) = (input.len(), largest(&inner));
        if length > limit {
            return Err(WorkflowError::InputTooLong { workflow: name, length, limit });
        }
        self.labels.check().map_err(|failure| WorkflowError::Labels { reason: failure.message().into() })?;
        if inner.is_stopped() || inner.idle {
            return Err(WorkflowError::Stopped);
        }
        let signal = match self.signal {
            Some((name, payload, signal_id)) => {
                check_name("the name of a signal", &name)?;
                signal_id.iter().try_for_each(|id| check_name("the id of a signal", id))?;
                Some((name, payload?, signal_id))
            }
            None => None,
        };
        let now = inner.store.env().now();
        let begins = match self.begins {
            Begins::Now => now,
            Begins::After(delay) => now.plus(delay),
            Begins::At(time) => time,
        };
        let mut execution = Execution {
            deadline_us: definition.timeout.map(|timeout| begins.max(now).plus(timeout).0),
            key: self.key,
            labels: self.labels,
            ..Execution::new(&name, input, now)
        };
        if begins > now {
            let wait = Wait { what: WaitsFor::Timer, since_us: now.0, until_us: Some(begins.0) };
            (execution.status, execution.timer_us, execution.waits) = (Status::Waiting, Some(begins.0), vec![wait]);
            execution.begins_us = Some(begins.0);
        }
        let is_given = self.id.is_some();
        let id = self.id.unwrap_or_else(|| inner.store.env().uuid().to_string().into());
        check_name("the id of an execution", &id)?;
        let starting = Starting { inner, id, execution, definition, signal, join: self.join, restart: self.restart };
        if let Some(key) = &starting.execution.key {
            check_name("an idempotency key", key)?;
            if let Some(handle) = starting.keyed(key).await? {
                return Ok(handle);
            }
        }
        starting.start(is_given).await
    }
}

/// A start whose parts were found to be good.
struct Starting {
    inner: Arc<Inner>,
    id: ExecutionId,
    execution: Execution,
    definition: Arc<Definition>,
    signal: Option<(String, String, Option<String>)>,
    join: bool,
    restart: bool,
}

impl Starting {
    async fn start<O>(self, is_given: bool) -> Result<Handle<O>> {
        let inner = &self.inner;
        // Most often nobody else starts it, and there is nothing to wait for.
        if is_given && let Some(handle) = self.existing().await? {
            return Ok(handle);
        }
        loop {
            let begun = inner.begun();
            let mut begun = std::pin::pin!(begun.notified());
            begun.as_mut().enable();
            if self.first().await? {
                inner.metrics.started(&self.execution.workflow);
                return Ok(self.handle(self.id.clone()));
            }
            // Somebody starts it at this very moment, or has just done so.
            if let Some(key) = &self.execution.key
                && let Some(handle) = self.keyed(key).await?
            {
                return Ok(handle);
            }
            if let Some(handle) = self.existing().await? {
                return Ok(handle);
            }
            if inner.is_stopped() {
                return Err(WorkflowError::Stopped);
            }
            if inner.is_resident(&self.id) {
                begun.await;
            }
        }
    }

    /// The execution that was started under that key, if there is one. The signal goes to that.
    async fn keyed<O>(&self, key: &str) -> Result<Option<Handle<O>>> {
        let Execution { workflow, input, .. } = &self.execution;
        let Some(id) = keyed(&self.inner, workflow, key, input).await? else { return Ok(None) };
        if let Some(signal) = self.signal(&id) {
            signal.send().await?;
        }
        Ok(Some(self.handle(id)))
    }

    /// What is to be sent to one that has been started.
    fn signal(&self, id: &ExecutionId) -> Option<Signal> {
        let (name, payload, signal_id) = self.signal.clone()?;
        Some(Signal { engine: self.inner.clone(), id: id.clone(), name, payload: Ok(payload), signal_id })
    }

    fn handle<O>(&self, id: ExecutionId) -> Handle<O> {
        Handle { engine: self.inner.clone(), id, asked: None, output: PhantomData }
    }

    /// Starts it, unless there is one of that id or under that key.
    async fn first(&self) -> Result<bool> {
        if self.signal.is_none() && self.execution.status == Status::Running {
            return first(&self.inner, &self.id, &self.execution, &self.definition).await;
        }
        let (inner, id) = (&self.inner, &self.id);
        let mut execution = self.execution.clone();
        let key = inner.spaces.executions.key(id.as_bytes());
        let part = inner.node.for_any(id.as_bytes()).absent(RECORD, &key).put(&key, execution.encode());
        let (mut part, _) = turn(inner, part, id, None, &mut execution, None);
        if let Some((name, payload, signal_id)) = self.signal.clone() {
            let (kept, env) = (inner.kept(id), inner.store.env());
            if let Some(signal_id) = signal_id {
                part = part.put(&kept.signal(&signal_id), Delivered::signal(&name, &payload).encode());
            }
            let message = Message { at_us: env.now().0, body: Letter::Signal { name, payload } };
            part = part.put(&kept.count(), Vec::new()).put(&kept.message(env.uuid()), message.encode());
        }
        let part = match execution.timer_us {
            Some(timer) => {
                let (timers, id) = (inner.timers.clone(), id.clone());
                part.then(move |_| timers.set(&id, Timestamp(timer)))
            }
            None => inner.waking(part, id),
        };
        inner.perform(part).await
    }

    /// The execution of that id, if there is one and it is to be joined. One that is to be replaced is removed.
    async fn existing<O>(&self) -> Result<Option<Handle<O>>> {
        let (inner, id) = (&self.inner, &self.id);
        let Some((found, _)) = inner.read(id).await? else { return Ok(None) };
        let is_other = found.workflow != self.execution.workflow;
        let other = || WorkflowError::OtherWorkflow {
            id: id.clone(),
            asked: self.execution.workflow.clone(),
            found: found.workflow.clone(),
        };
        if found.status.is_terminal() {
            if self.restart {
                if is_other {
                    return Err(other());
                }
                inner.purge(id).await?;
                return Ok(None);
            }
        } else if let Some(signal) = self.signal(id) {
            if is_other {
                return Err(other());
            }
            return match signal.send().await {
                Ok(_) => Ok(Some(self.handle(id.clone()))),
                // It has ended at this very moment.
                Err(WorkflowError::Ended { .. } | WorkflowError::NotFound { .. }) => Box::pin(self.existing()).await,
                Err(error) => Err(error),
            };
        }
        match (self.join && self.signal.is_none(), is_other) {
            (true, false) => Ok(Some(self.handle(id.clone()))),
            (true, true) => Err(other()),
            (false, _) if self.signal.is_some() => Err(WorkflowError::Ended { id: id.clone() }),
            (false, _) => Err(WorkflowError::AlreadyStarted { id: id.clone() }),
        }
    }
}

/// Starts an execution, unless one of that id is in memory or stored, or one under its key.
async fn first(
    inner: &Arc<Inner>,
    id: &ExecutionId,
    execution: &Execution,
    definition: &Arc<Definition>,
) -> Result<bool> {
    let (started, answer) = oneshot::channel();
    let run = Run::new(inner.clone(), definition.clone(), id.clone(), execution.clone(), started);
    if !inner.spawn(Arc::new(run)) {
        return Ok(false);
    }
    match answer.await {
        Ok(Ok(())) => Ok(true),
        Ok(Err(WorkflowError::AlreadyStarted { .. })) | Err(_) => Ok(false),
        Ok(Err(error)) => Err(error),
    }
}

/// The execution that was started under an idempotency key, if one was.
async fn keyed(inner: &Inner, workflow: &str, key: &str, input: &str) -> Result<Option<ExecutionId>> {
    let place = inner.spaces.keys.key(keyed_key(workflow, key));
    let Some(item) = inner.store.view().await?.get(&place).await? else { return Ok(None) };
    let found = Keyed::decode(&item.value).map_err(|why| why.at(format!("idempotency key {key:?}")))?;
    let id = ExecutionId::from(found.id);
    if found.input == hash_text(input) { Ok(Some(id)) } else { Err(WorkflowError::KeyReused { key: key.into(), id }) }
}

impl<O> Handle<O> {
    /// The execution's id.
    pub fn id(&self) -> &ExecutionId {
        &self.id
    }
}

impl<O: DeserializeOwned> Handle<O> {
    /// Waits for the end and gives the output, or why there is none. From any task, before or after the end. One that
    /// is parked has not ended: this waits until it is resumed and ends, or is terminated.
    pub async fn result(&self) -> Result<O> {
        let mut asked = self.asked.as_deref();
        loop {
            let (waiter, wait) = self.engine.waiting(&self.id);
            let waiting = Waiting { engine: &self.engine, id: &self.id, waiter };
            // What runs here has not ended: there is nothing to read until it has left.
            if asked.is_some() || !self.engine.is_resident(&self.id) || self.engine.is_stopped() {
                let found = self.engine.read(&self.id).await?;
                let (execution, _) = found.ok_or_else(|| WorkflowError::NotFound { id: self.id.clone() })?;
                if let Some(asked) = asked.take().filter(|asked| *asked != execution.workflow) {
                    let (id, asked) = (self.id.clone(), asked.into());
                    return Err(WorkflowError::OtherWorkflow { id, asked, found: execution.workflow });
                }
                if execution.status.is_terminal() {
                    return self.output(&execution.status);
                }
                if self.engine.is_stopped() {
                    return Err(WorkflowError::Stopped);
                }
            }
            wait.await;
            if let Some(status) = waiting.waiter.ended.get() {
                return self.output(status);
            }
        }
    }

    /// What an execution has come to.
    fn output(&self, status: &Status) -> Result<O> {
        let id = self.id.clone();
        match status {
            Status::Completed(output) => {
                serde_json::from_str(output).map_err(|error| WorkflowError::Mismatch { id, message: error.to_string() })
            }
            Status::Failed(text) => {
                let failure = serde_json::from_str(text).unwrap_or_else(|_| Failure::new(text));
                Err(WorkflowError::Failed { id, failure })
            }
            Status::TimedOut => Err(WorkflowError::TimedOut { id }),
            Status::Cancelled(reason) => Err(WorkflowError::Cancelled { id, reason: reason.clone() }),
            Status::Running | Status::Waiting | Status::Parked(_) => Err(WorkflowError::Stopped),
        }
    }
}

/// Somebody who waits for an execution's end.
struct Waiting<'a> {
    engine: &'a Inner,
    id: &'a ExecutionId,
    waiter: Arc<Waiter>,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.engine.forget_waiting(self.id, &self.waiter);
    }
}

impl<O> std::fmt::Debug for Handle<O> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Handle").field("id", &self.id).finish_non_exhaustive()
    }
}
