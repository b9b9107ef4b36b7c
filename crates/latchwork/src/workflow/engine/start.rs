//! Starting executions.

use std::future::IntoFuture;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde_json::Value;
use tokio::sync::oneshot;

use crate::json::{self, JsonError};
use crate::lane::Part;
use crate::record::Record;
use crate::store::Timestamp;
use crate::workflow::admission::{StartNeeds, Started, StoredStart};
use crate::workflow::ctx::signal::{SendSignal, written};
use crate::workflow::definition::{Definition, Workflow};
use crate::workflow::engine::handle::Handle;
use crate::workflow::engine::{Engine, EngineInner, check_name};
use crate::workflow::run::{Run, hash_text, largest};
use crate::workflow::stored::kept::{Delivered, Message, MessageBody};
use crate::workflow::stored::keys::keyed_key;
use crate::workflow::stored::record::{Attribute, Execution, Keyed, Labels, StoredStatus, Supersede, fetch};
use crate::workflow::{Boxed, ExecutionId, Result, WorkflowError};

/// A start that is about to be awaited.
#[must_use = "nothing starts until this is awaited"]
pub struct Start<O> {
    start: UntypedStart,
    output: PhantomData<fn() -> O>,
}

/// The options of a start, without types.
struct UntypedStart {
    /// The definition, if the caller has given it.
    definition: Option<Arc<Definition>>,
    engine: Engine,
    workflow: String,
    /// As JSON text.
    input: Result<String, JsonError>,
    id: Option<ExecutionId>,
    key: Option<String>,
    join: bool,
    restart: bool,
    begins: Begins,
    signal: Option<(String, Result<String>, Option<String>)>,
    labels: Labels,
    supersede: Option<Supersede>,
}

/// When an execution begins.
enum Begins {
    Now,
    After(Duration),
    At(Timestamp),
}

impl Engine {
    /// Starts an execution. When the awaited start returns, the execution is stored and survives any crash.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::store::Timestamp;
    /// # use latchwork::workflow::{Engine, Result, Workflow};
    /// # async fn example(engine: Engine, order: Workflow<u32, u32>, tomorrow: Timestamp) -> Result<()> {
    /// let result = engine.start(&order, 7).id("order-7").await?.result().await?;
    /// # Ok(()) }
    /// ```
    pub fn start<I: Serialize, O>(&self, workflow: &Workflow<I, O>, input: I) -> Start<O> {
        let mut start = self.start_as(workflow.name(), &input);
        start.start.definition = Some(workflow.definition.clone());
        start
    }

    /// Starts an execution of the workflow of this name. The input, as JSON, must fit the workflow's input type. An
    /// input that does not fit is refused, and nothing is started.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::store::Store;
    /// # use latchwork::workflow::{Ctx, Engine, workflow};
    /// use serde_json::json;
    /// # let add = workflow("add").run(async |_: Ctx, (a, b): (u64, u64)| Ok(a + b));
    /// # let engine = Engine::on(&Store::memory().await?).register(&add).start().await?;
    /// let handle = engine.start_by_name("add", json!([1, 2])).id("add-1").await?;
    /// assert_eq!(handle.result().await?, json!(3));
    /// let refused = engine.start_by_name("add", json!([1, "2"])).await.unwrap_err();
    /// assert!(refused.to_string().contains("the value at [1] does not fit"));
    /// # Ok(()) }
    /// ```
    pub fn start_by_name(&self, workflow: &str, input: impl Serialize) -> Start<Value> {
        self.start_as(workflow, &input)
    }

    fn start_as<O>(&self, workflow: &str, input: &(impl Serialize + ?Sized)) -> Start<O> {
        let start = UntypedStart {
            engine: self.clone(),
            workflow: workflow.into(),
            input: json::to_value(input).map(|input| input.to_string()),
            id: None,
            key: None,
            join: false,
            restart: false,
            begins: Begins::Now,
            signal: None,
            labels: Labels::default(),
            supersede: None,
            definition: None,
        };
        Start { start, output: PhantomData }
    }
}

impl<O> Start<O> {
    /// Sets the id. Without one, the engine creates a UUIDv7. A start with an id that is taken is refused.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::store::Timestamp;
    /// # use latchwork::workflow::{Engine, Result, Workflow};
    /// # async fn example(engine: Engine, order: Workflow<u32, u32>, tomorrow: Timestamp) -> Result<()> {
    /// engine.start(&order, 7).id("order-7").await?;
    /// # Ok(()) }
    /// ```
    pub fn id(mut self, id: impl Into<ExecutionId>) -> Start<O> {
        self.start.id = Some(id.into());
        self
    }

    /// Sets an idempotency key. All starts of this workflow under one key start one execution, and all callers get its
    /// handle, until the execution is removed some time after its end. A start with the same key and another input is
    /// an error.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::store::Timestamp;
    /// # use latchwork::workflow::{Engine, Result, Workflow};
    /// # async fn example(engine: Engine, order: Workflow<u32, u32>, tomorrow: Timestamp) -> Result<()> {
    /// engine.start(&order, 7).idempotency_key("cart-9").await?;
    /// # Ok(()) }
    /// ```
    pub fn idempotency_key(mut self, key: impl Into<String>) -> Start<O> {
        self.start.key = Some(key.into());
        self
    }

    /// Joins the execution of this id if it exists, whatever its input was.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::store::Timestamp;
    /// # use latchwork::workflow::{Engine, Result, Workflow};
    /// # async fn example(engine: Engine, order: Workflow<u32, u32>, tomorrow: Timestamp) -> Result<()> {
    /// let handle = engine.start(&order, 7).id("order-7").or_join().await?;
    /// # Ok(()) }
    /// ```
    pub fn or_join(mut self) -> Start<O> {
        self.start.join = true;
        self
    }

    /// Starts again if an execution of this id exists and has ended: the ended execution is removed first. An execution
    /// that has not ended is joined or refused as without this option.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::store::Timestamp;
    /// # use latchwork::workflow::{Engine, Result, Workflow};
    /// # async fn example(engine: Engine, order: Workflow<u32, u32>, tomorrow: Timestamp) -> Result<()> {
    /// let handle = engine.start(&order, 7).id("order-7").or_restart().await?;
    /// # Ok(()) }
    /// ```
    pub fn or_restart(mut self) -> Start<O> {
        self.start.restart = true;
        self
    }

    /// Begins after `delay`. Until then the execution waits and uses no memory.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::store::Timestamp;
    /// # use latchwork::workflow::{Engine, Result, Workflow};
    /// # async fn example(engine: Engine, order: Workflow<u32, u32>, tomorrow: Timestamp) -> Result<()> {
    /// engine.start(&order, 7).delay(Duration::from_secs(3600)).await?;
    /// # Ok(()) }
    /// ```
    pub fn delay(mut self, delay: Duration) -> Start<O> {
        self.start.begins = Begins::After(delay);
        self
    }

    /// Begins at this time. Until then the execution waits and uses no memory.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::store::Timestamp;
    /// # use latchwork::workflow::{Engine, Result, Workflow};
    /// # async fn example(engine: Engine, order: Workflow<u32, u32>, tomorrow: Timestamp) -> Result<()> {
    /// engine.start(&order, 7).at(tomorrow).await?;
    /// # Ok(()) }
    /// ```
    pub fn at(mut self, time: Timestamp) -> Start<O> {
        self.start.begins = Begins::At(time);
        self
    }

    /// Sends a signal in the same commit. If an execution of this id exists and has not ended, the signal is sent to it
    /// and the start joins it.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::store::Timestamp;
    /// # use latchwork::workflow::{Engine, Result, Workflow};
    /// # async fn example(engine: Engine, order: Workflow<u32, u32>, tomorrow: Timestamp) -> Result<()> {
    /// engine.start(&order, 7).id("order-7").signal("paid", &42).await?;
    /// # Ok(()) }
    /// ```
    pub fn signal(mut self, name: &str, payload: &(impl Serialize + ?Sized)) -> Start<O> {
        let payload = written(&self.start.engine.inner, "the payload of a signal", payload);
        self.start.signal = Some((name.into(), payload, None));
        self
    }

    /// Sets the id of this signal. A signal that is sent several times under one id is delivered once.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::store::Timestamp;
    /// # use latchwork::workflow::{Engine, Result, Workflow};
    /// # async fn example(engine: Engine, order: Workflow<u32, u32>, tomorrow: Timestamp) -> Result<()> {
    /// engine.start(&order, 7).id("order-7").signal("paid", &42).signal_id("payment-1").await?;
    /// # Ok(()) }
    /// ```
    pub fn signal_id(mut self, id: impl Into<String>) -> Start<O> {
        let id = id.into();
        if let Some((_, _, signal_id)) = &mut self.start.signal {
            *signal_id = Some(id);
        }
        self
    }

    /// Replaces the execution of this id if it has not ended: it is made to end, and this execution follows it. A crash
    /// cannot leave this half done. An execution that has ended is removed. Callers that wait for the replaced
    /// execution get the error that it was cancelled or terminated.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result, Supersede, Workflow};
    /// # async fn example(engine: Engine, report: Workflow<u32, u32>) -> Result<()> {
    /// engine.start(&report, 7).id("report").supersede(Supersede::Cancel).await?;
    /// # Ok(()) }
    /// ```
    pub fn supersede(mut self, how: Supersede) -> Start<O> {
        self.start.supersede = Some(how);
        self
    }

    /// Adds a tag. Lists can filter by it.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::store::Timestamp;
    /// # use latchwork::workflow::{Engine, Result, Workflow};
    /// # async fn example(engine: Engine, order: Workflow<u32, u32>, tomorrow: Timestamp) -> Result<()> {
    /// engine.start(&order, 7).tag("urgent").await?;
    /// # Ok(()) }
    /// ```
    pub fn tag(mut self, tag: impl Into<String>) -> Start<O> {
        self.start.labels.tags.insert(tag.into());
        self
    }

    /// Adds a search attribute. Lists can filter by it.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::store::Timestamp;
    /// # use latchwork::workflow::{Engine, Result, Workflow};
    /// # async fn example(engine: Engine, order: Workflow<u32, u32>, tomorrow: Timestamp) -> Result<()> {
    /// engine.start(&order, 7).attribute("customer", "Ada").await?;
    /// # Ok(()) }
    /// ```
    pub fn attribute(mut self, name: impl Into<String>, value: impl Into<Attribute>) -> Start<O> {
        self.start.labels.attributes.insert(name.into(), value.into());
        self
    }
}

impl<O: 'static> IntoFuture for Start<O> {
    type Output = Result<Handle<O>>;
    type IntoFuture = Boxed<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        let engine = self.start.engine.inner.clone();
        let started = self.start.execute();
        Box::pin(async move {
            let Started { id, item } = started.await?;
            Ok(Handle::new(engine, id, None).with_item(item))
        })
    }
}

/// How many ids are tried to find one in a shard of this node.
const MOST_IDS: usize = 64;

impl EngineInner {
    /// A new id, of an execution that this node owns if it owns any.
    fn new_id(&self) -> ExecutionId {
        let new = || ExecutionId::from(self.store.env().uuid().to_string());
        let mut id = new();
        for _ in 0..MOST_IDS {
            if self.node.owns(&id) {
                break;
            }
            id = new();
        }
        id
    }

    /// Returns the definition of this name, and the input if it can be stored.
    pub(crate) fn accept(
        &self,
        name: &str,
        given: Option<&Arc<Definition>>,
        input: Result<String, JsonError>,
    ) -> Result<(Arc<Definition>, String)> {
        let definition = self.accepted(name, given)?;
        let input = input.map_err(|cause| WorkflowError::Input { workflow: name.into(), cause })?;
        match (input.len(), largest(self)) {
            (length, limit) if length > limit => {
                Err(WorkflowError::InputTooLong { workflow: name.into(), length, limit })
            }
            _ => Ok((definition, input)),
        }
    }
}

/// Adds a signal to a start.
fn with_signal(
    engine: &EngineInner,
    id: &ExecutionId,
    mut part: Part,
    (name, payload, signal_id): &(String, String, Option<String>),
) -> Part {
    let (kept, env) = (engine.kept(id), engine.store.env());
    if let Some(signal_id) = signal_id {
        part = part.put(&kept.signal(signal_id), Delivered::signal(name, payload).encode());
    }
    let body = MessageBody::Signal { name: name.clone(), payload: payload.clone() };
    let message = Message { at_us: env.now().0, body };
    part.put(&kept.count(), Vec::new()).put(&kept.message(env.uuid()), message.encode())
}

impl EngineInner {
    /// The definition that a start uses: the registered one. If nodes share the store, another node may run the
    /// workflow. Then the given one says what a start needs, or else the record of that node. Rules for starts are
    /// decided where the workflow is registered.
    pub(crate) fn accepted(&self, name: &str, given: Option<&Arc<Definition>>) -> Result<Arc<Definition>> {
        let missing = || WorkflowError::NotRegistered { name: name.into() };
        if let Some(definition) = self.definition(name) {
            return Ok(definition.clone());
        }
        if let Some(given) = given.filter(|given| self.node.is_shared() && given.policy.is_empty()) {
            return Ok(given.clone());
        }
        match self.node.known_elsewhere(name).ok_or_else(missing)? {
            known if known.has_rules => Err(WorkflowError::RulesElsewhere { name: name.into() }),
            known => Ok(Arc::new(Definition::elsewhere(name, &known))),
        }
    }
}

impl UntypedStart {
    async fn execute(self) -> Result<Started> {
        let (inner, name) = (self.engine.inner.clone(), self.workflow);
        let (definition, input) = inner.accept(&name, self.definition.as_ref(), self.input)?;
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
        if definition.policy.gather().is_some() {
            let (workflow, reason) =
                (name.clone(), "its starts are gathered, so a start cannot have its own signal or time");
            let is_alone = signal.is_some() || !matches!(self.begins, Begins::Now);
            if is_alone {
                return Err(WorkflowError::Start { workflow, reason });
            }
        }
        let is_gathered = definition.policy.gather().is_some();
        if self.supersede.is_some() && (self.key.is_some() || signal.is_some() || self.join || is_gathered) {
            let reason =
                "a start that supersedes cannot have an idempotency key or a signal, cannot join and is not gathered";
            return Err(WorkflowError::Start { workflow: name, reason });
        }
        let now = inner.store.env().now();
        let begins = match self.begins {
            Begins::Now => now,
            Begins::After(delay) => now.plus(delay),
            Begins::At(time) => time,
        };
        let first = definition.first_record(input, self.labels, now, begins);
        let execution = Execution { key: self.key, ..first };
        let is_given = self.id.is_some();
        let id = self.id.unwrap_or_else(|| inner.new_id());
        check_name("the id of an execution", &id)?;
        let (join, restart, supersede) = (self.join, self.restart || self.supersede.is_some(), self.supersede);
        let starting = CheckedStart { inner, id, execution, definition, signal, join, restart, supersede };
        starting.execution.key.iter().try_for_each(|key| check_name("an idempotency key", key))?;
        match starting.keyed().await? {
            Some(started) => Ok(started),
            None => starting.start(is_given).await,
        }
    }
}

/// A start whose options were checked.
struct CheckedStart {
    inner: Arc<EngineInner>,
    id: ExecutionId,
    execution: Execution,
    definition: Arc<Definition>,
    signal: Option<(String, String, Option<String>)>,
    join: bool,
    restart: bool,
    supersede: Option<Supersede>,
}

// Every start allocates the future of `execute`. The futures of rare cases are boxed, so that it stays small.
impl CheckedStart {
    async fn start(&self, is_given: bool) -> Result<Started> {
        let inner = &self.inner;
        // Usually no other start uses this id, and there is nothing to wait for. A gathered start need not get its own
        // id.
        let is_gathered = self.definition.policy.gather().is_some() || self.supersede.is_some();
        if is_given
            && !is_gathered
            && let Some(started) = Box::pin(self.existing()).await?
        {
            return Ok(started);
        }
        // Only the input of a new execution must fit. A repeated start or a join does not use its input.
        self.definition.check(&self.execution.input)?;
        let asked = self.definition.asked(&self.execution.input)?;
        loop {
            if is_given
                && let Some(how) = self.supersede
                && Box::pin(inner.take_place(&self.id, &self.execution, asked.as_ref(), how)).await?
            {
                return Ok(self.id.clone().into());
            }
            let mut begun = std::pin::pin!(inner.begun.notified());
            begun.as_mut().enable();
            let first = self.first(&asked).await;
            if let Ok(Some(started)) = first {
                inner.metrics.started(&self.execution.workflow);
                return Ok(started);
            }
            // Another start of this id is on its way or has just landed. A start that joins needs no permit.
            if let Some(started) = self.keyed().await? {
                return Ok(started);
            }
            if first.is_ok() || self.join {
                match Box::pin(self.existing()).await {
                    Err(WorkflowError::AlreadyStarted { .. }) if self.supersede.is_some() => {}
                    Err(error) => return Err(error),
                    Ok(Some(started)) => return Ok(started),
                    Ok(None) => {}
                }
            }
            first?;
            if inner.is_stopped() {
                return Err(WorkflowError::Stopped);
            }
            if inner.is_resident(&self.id) {
                begun.await;
            }
        }
    }

    /// Returns the execution that was started under this key, if it exists. The signal is sent to it.
    async fn keyed(&self) -> Result<Option<Started>> {
        match &self.execution.key {
            Some(key) => Box::pin(self.keyed_under(key)).await,
            None => Ok(None),
        }
    }

    async fn keyed_under(&self, key: &str) -> Result<Option<Started>> {
        let (inner, Execution { workflow, input, .. }) = (&self.inner, &self.execution);
        let place = inner.spaces.keys.key(keyed_key(workflow, key));
        let found = fetch::<Keyed>(&inner.store.view().await?, &place, || format!("idempotency key {key:?}")).await?;
        let Some((found, _)) = found else { return Ok(None) };
        let id = ExecutionId::from(found.id);
        if found.input != hash_text(input) {
            return Err(WorkflowError::KeyReused { key: key.into(), id });
        }
        if let Some(signal) = self.signal(&id) {
            signal.send().await?;
        }
        Ok(Some(Started { id, item: found.item }))
    }

    /// The signal for an execution that was started before.
    fn signal(&self, id: &ExecutionId) -> Option<SendSignal> {
        let (name, payload, signal_id) = self.signal.clone()?;
        Some(SendSignal { engine: self.inner.clone(), id: id.clone(), name, payload: Ok(payload), signal_id })
    }

    /// Starts the execution, unless the id or the key is taken.
    async fn first(&self, asked: &Option<StartNeeds>) -> Result<Option<Started>> {
        let (inner, id) = (&self.inner, &self.id);
        let runs = match asked {
            Some(asked) => Box::pin(inner.would_run(&self.definition, asked)).await?,
            None => true,
        };
        let execution = self.execution.clone();
        let is_here = inner.node.owns(id) && inner.definition_of(&execution).is_some();
        if self.signal.is_none() && execution.status == StoredStatus::Running && runs && is_here {
            let (started, answer) = oneshot::channel();
            let run = Run::new(inner.clone(), self.definition.clone(), id.clone(), execution, None);
            if !inner.spawn(Arc::new(run.starting(started).asking(asked.clone()))) {
                return Ok(None);
            }
            return match answer.await {
                Ok(Ok(())) => Ok(Some(id.clone().into())),
                Ok(Err(WorkflowError::AlreadyStarted { .. })) | Err(_) => Ok(None),
                // The shard was lost; the execution is stored for its owner.
                Ok(Err(WorkflowError::Stopped)) if inner.node.is_shared() && !inner.is_stopped() => Ok(None),
                Ok(Err(error)) => Err(error),
            };
        }
        Box::pin(self.store_first(asked, execution)).await
    }

    /// Stores the execution, which is not in memory yet.
    async fn store_first(&self, asked: &Option<StartNeeds>, execution: Execution) -> Result<Option<Started>> {
        let (inner, id) = (&self.inner, &self.id);
        let (engine, receiver, signal) = (inner.clone(), id.clone(), self.signal.clone());
        let stored = StoredStart::new(inner, id, move |part| match &signal {
            Some(signal) => with_signal(&engine, &receiver, part, signal),
            None => part,
        });
        match asked {
            Some(asked) => {
                let admissions = &inner.admissions;
                let started =
                    admissions.start(&self.definition, asked.clone(), id, execution, Box::new(stored)).await?;
                // The commit was refused: the id is taken, or this engine no longer owns its shard.
                let is_lost = started.is_none() && !inner.node.owns(id) && !inner.node.is_shared();
                if is_lost { Err(WorkflowError::Stopped) } else { Ok(started) }
            }
            None => Ok(inner.perform(stored.part(&execution)).await?.then(|| id.clone().into())),
        }
    }

    /// Returns the execution of this id if it exists and the start joins it. Removes an execution that is to be
    /// replaced.
    async fn existing(&self) -> Result<Option<Started>> {
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
                self.definition.check(&self.execution.input)?;
                inner.purge(id).await?;
                return Ok(None);
            }
        } else if let Some(signal) = self.signal(id) {
            if is_other {
                return Err(other());
            }
            return match signal.send().await {
                Ok(_) => Ok(Some(id.clone().into())),
                // The execution ended at this very moment.
                Err(WorkflowError::Ended { .. } | WorkflowError::NotFound { .. }) => Box::pin(self.existing()).await,
                Err(error) => Err(error),
            };
        }
        match (self.join && self.signal.is_none(), is_other) {
            (true, false) => Ok(Some(id.clone().into())),
            (true, true) => Err(other()),
            (false, _) if self.signal.is_some() => Err(WorkflowError::Ended { id: id.clone() }),
            (false, _) => Err(WorkflowError::AlreadyStarted { id: id.clone() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::Store;
    use crate::workflow::{Ctx, workflow};

    #[tokio::test]
    async fn the_future_of_a_start_is_small() {
        let echo = workflow("echo").run(async |_: Ctx, input: u64| Ok(input));
        let engine = Engine::on(&Store::memory().await.unwrap()).register(&echo).start().await.unwrap();
        let bytes = size_of_val(&engine.start(&echo, 7).start.execute());
        assert!(bytes <= 4096, "{bytes} bytes");
    }
}
