//! Starting executions, and waiting for what they come to.

use std::future::{Future, IntoFuture};
use std::marker::PhantomData;
use std::pin::Pin;
use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::oneshot;

use crate::json;
use crate::workflow::definition::{Definition, Workflow};
use crate::workflow::engine::{Engine, Inner, Waiter, check_name};
use crate::workflow::record::{Execution, Keyed, Status, keyed_key};
use crate::workflow::run::{Run, hash_text, largest};
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
}

/// An execution, seen from outside.
pub struct Handle<O> {
    engine: Arc<Inner>,
    id: ExecutionId,
    /// The workflow that it is to be one of, if that is not known.
    asked: Option<Arc<str>>,
    output: PhantomData<fn() -> O>,
}

impl Engine {
    /// Starts an execution. Await it: when that returns, the execution is stored and survives anything.
    pub fn start<I, O>(&self, workflow: &Workflow<I, O>, input: I) -> Start<I, O> {
        Start { engine: self.clone(), workflow: workflow.clone(), input, id: None, key: None, join: false }
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
        if inner.is_stopped() {
            return Err(WorkflowError::Stopped);
        }
        if let Some(key) = &self.key {
            check_name("an idempotency key", key)?;
            if let Some(id) = keyed(&inner, &name, key, &input).await? {
                return Ok(Handle { engine: inner, id, asked: None, output: PhantomData });
            }
        }
        let id = match self.id {
            Some(id) => {
                check_name("the id of an execution", &id)?;
                if let Some((found, _)) = inner.read(&id).await? {
                    return existing(inner, id, &name, found, self.join);
                }
                id
            }
            None => inner.store.env().uuid().to_string().into(),
        };
        let now = inner.store.env().now();
        let execution = Execution {
            deadline_us: definition.timeout.map(|timeout| now.plus(timeout).0),
            workflow: name.clone(),
            status: Status::Running,
            input,
            timer_us: None,
            started_us: now.0,
            run: 0,
            resumes: 0,
            key: self.key,
            intent: None,
            tail: Vec::new(),
        };
        // Most often nobody else starts it, and there is nothing to wait for.
        if first(&inner, &id, &execution, &definition).await? {
            return Ok(Handle { engine: inner, id, asked: None, output: PhantomData });
        }
        loop {
            let begun = inner.begun();
            let mut begun = std::pin::pin!(begun.notified());
            begun.as_mut().enable();
            if first(&inner, &id, &execution, &definition).await? {
                return Ok(Handle { engine: inner, id, asked: None, output: PhantomData });
            }
            // Somebody starts it at this very moment, or has just done so.
            if let Some(key) = &execution.key
                && let Some(id) = keyed(&inner, &name, key, &execution.input).await?
            {
                return Ok(Handle { engine: inner, id, asked: None, output: PhantomData });
            }
            if let Some((found, _)) = inner.read(&id).await? {
                return existing(inner, id, &name, found, self.join);
            }
            if inner.is_stopped() {
                return Err(WorkflowError::Stopped);
            }
            begun.await;
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
    let damaged = || WorkflowError::corrupt(format!("idempotency key {key:?}"));
    let found = Keyed::decode(&item.value).ok_or_else(damaged)?;
    let id = ExecutionId::from(found.id);
    if found.input == hash_text(input) { Ok(Some(id)) } else { Err(WorkflowError::KeyReused { key: key.into(), id }) }
}

fn existing<O>(inner: Arc<Inner>, id: ExecutionId, asked: &str, found: Execution, join: bool) -> Result<Handle<O>> {
    if !join {
        return Err(WorkflowError::AlreadyStarted { id });
    }
    if found.workflow != asked {
        return Err(WorkflowError::OtherWorkflow { id, asked: asked.into(), found: found.workflow });
    }
    Ok(Handle { engine: inner, id, asked: None, output: PhantomData })
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
