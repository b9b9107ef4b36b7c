//! Executions as callers see them: waiting for their results.

use std::future::Future;
use std::marker::PhantomData;
use std::sync::Arc;

use serde::de::{DeserializeOwned, Deserializer, Error as _, IgnoredAny, SeqAccess, Visitor};
use serde_json::Value;

use crate::workflow::ctx::step::read_failure;
use crate::workflow::definition::Workflow;
use crate::workflow::engine::listen::News;
use crate::workflow::engine::{Engine, EngineInner};
use crate::workflow::stored::record::StoredStatus;
use crate::workflow::{ExecutionId, Result, WorkflowError};

/// An execution, as a caller sees it.
pub struct Handle<O> {
    pub(crate) engine: Arc<EngineInner>,
    id: ExecutionId,
    /// The workflow that the execution must belong to, if that is checked.
    asked: Option<Arc<str>>,
    /// The number of its input in a batch.
    item: Option<u32>,
    output: PhantomData<fn() -> O>,
}

impl<O> Clone for Handle<O> {
    fn clone(&self) -> Handle<O> {
        let Handle { engine, id, asked, item, output } = self;
        Handle { engine: engine.clone(), id: id.clone(), asked: asked.clone(), item: *item, output: *output }
    }
}

impl Engine {
    /// The handle of an execution that was started before, by this engine or an earlier one.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::store::Timestamp;
    /// # use latchwork::workflow::{Engine, Result, Workflow};
    /// # async fn example(engine: Engine, order: Workflow<u32, u32>, tomorrow: Timestamp) -> Result<()> {
    /// let result = engine.handle(&order, "order-7").result().await?;
    /// # Ok(()) }
    /// ```
    pub fn handle<I, O>(&self, workflow: &Workflow<I, O>, id: impl Into<ExecutionId>) -> Handle<O> {
        Handle::new(self.inner.clone(), id.into(), Some(workflow.name().into()))
    }

    /// The handle of an execution that was started before, of any workflow. Its result is JSON.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::store::Timestamp;
    /// # use latchwork::workflow::{Engine, Result, Workflow};
    /// # async fn example(engine: Engine, order: Workflow<u32, u32>, tomorrow: Timestamp) -> Result<()> {
    /// let result: serde_json::Value = engine.handle_by_id("order-7").result().await?;
    /// # Ok(()) }
    /// ```
    pub fn handle_by_id(&self, id: impl Into<ExecutionId>) -> Handle<Value> {
        Handle::new(self.inner.clone(), id.into(), None)
    }
}

impl<O> Handle<O> {
    pub(crate) fn new(engine: Arc<EngineInner>, id: ExecutionId, asked: Option<Arc<str>>) -> Handle<O> {
        Handle { engine, id, asked, item: None, output: PhantomData }
    }

    /// The same handle for this input of a batch.
    pub(crate) fn with_item(self, item: Option<u32>) -> Handle<O> {
        Handle { item, ..self }
    }

    /// The execution's id.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::store::Store;
    /// # use latchwork::workflow::{Ctx, Engine, workflow};
    /// # let double = workflow("double").run(async |_: Ctx, n: u64| Ok(n * 2));
    /// # let engine = Engine::on(&Store::memory().await?).register(&double).start().await?;
    /// let handle = engine.start(&double, 21).id("double-21").await?;
    /// assert_eq!(handle.id().to_string(), "double-21");
    /// # Ok(()) }
    /// ```
    pub fn id(&self) -> &ExecutionId {
        &self.id
    }

    /// The number of its input in a batch, from 0 on. None if the workflow has no batches.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use std::time::Duration;
    /// # use latchwork::store::Store;
    /// # use latchwork::workflow::{Batch, Ctx, Engine, Workflow, workflow};
    /// # let double = workflow("double").batch(Batch::new(100, Duration::from_millis(5)));
    /// # let double: Workflow<u64, u64> =
    /// #     double.run(async |_: Ctx, numbers: Vec<u64>| Ok(numbers.iter().map(|n| n * 2).collect()));
    /// # let engine = Engine::on(&Store::memory().await?).register(&double).start().await?;
    /// assert_eq!(engine.start(&double, 21).await?.item(), Some(0));
    /// # Ok(()) }
    /// ```
    pub fn item(&self) -> Option<u32> {
        self.item
    }

    /// The same for another input of the batch.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result, Workflow};
    /// # async fn example(engine: Engine, send: Workflow<u32, u32>) -> Result<()> {
    /// let output = engine.handle(&send, "batch-1").of_item(3).result().await?;
    /// # Ok(()) }
    /// ```
    pub fn of_item(self, item: u32) -> Handle<O> {
        Handle { item: Some(item), ..self }
    }
}

impl<O: DeserializeOwned> Handle<O> {
    /// Waits for the end and returns the output, or the error. Can be called from any task, before or after the end.
    ///
    /// An execution that is parked, or set aside because this program cannot run it, waits for an operator. Then this
    /// returns [`WorkflowError::Parked`] with the reason. [`Handle::result_through_parks`] continues to wait.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::store::Store;
    /// use latchwork::workflow::{Ctx, Engine, Failure, WorkflowError, workflow};
    ///
    /// async fn greet(ctx: Ctx, name: String) -> Result<String, Failure> {
    ///     ctx.run("greeting", async || Ok(format!("Hello, {name}!"))).await
    /// }
    /// let greet = workflow("greet").run(greet);
    /// # let engine = Engine::on(&Store::memory().await?).register(&greet).start().await?;
    /// let handle = engine.start(&greet, "Ada".to_string()).await?;
    /// match handle.result().await {
    ///     Ok(greeting) => println!("{greeting}"),
    ///     Err(WorkflowError::Failed { failure, .. }) => println!("step {:?} failed", failure.step()),
    ///     Err(WorkflowError::Parked { id, reason }) => println!("{id} waits for an operator: {reason}"),
    ///     Err(error) => return Err(error.into()),
    /// }
    /// # Ok(()) }
    /// ```
    pub fn result(&self) -> impl Future<Output = Result<O>> + Send + use<O> {
        self.clone().ended(Parks::Tell)
    }

    /// Like [`Handle::result`], for callers that can wait for an operator: while the execution is parked or set aside,
    /// this waits until it is resumed and ends, or is terminated.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::store::Timestamp;
    /// # use latchwork::workflow::{Engine, Result, Workflow};
    /// # async fn example(engine: Engine, order: Workflow<u32, u32>, tomorrow: Timestamp) -> Result<()> {
    /// let result = engine.handle(&order, "order-7").result_through_parks().await?;
    /// # Ok(()) }
    /// ```
    pub fn result_through_parks(&self) -> impl Future<Output = Result<O>> + Send + use<O> {
        self.clone().ended(Parks::Wait)
    }

    async fn ended(self, parks: Parks) -> Result<O> {
        let output = self.engine.output(&self.id, self.asked.as_deref(), parks).await?;
        match self.item {
            Some(item) => read_item(&self.id, &output, item),
            None => read_as(&self.id, &output),
        }
    }
}

/// What a wait for a result does if the execution is parked.
#[derive(Clone, Copy, PartialEq)]
enum Parks {
    /// It returns the reason as an error.
    Tell,
    /// It continues to wait.
    Wait,
}

impl EngineInner {
    /// Waits for the end of an execution and returns its output.
    pub(crate) async fn result_of<T: DeserializeOwned>(&self, id: &ExecutionId) -> Result<T> {
        read_as(id, &self.output(id, None, Parks::Tell).await?)
    }
}

/// Reads one output of a batch from the JSON text of all outputs. Skips the others.
fn read_item<T: DeserializeOwned>(id: &ExecutionId, text: &str, item: u32) -> Result<T> {
    struct Nth<T>(u32, PhantomData<T>);

    impl<'de, T: serde::Deserialize<'de>> Visitor<'de> for Nth<T> {
        type Value = T;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            write!(f, "a list with an output {}", self.0)
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut outputs: A) -> Result<T, A::Error> {
            for _ in 0..self.0 {
                if outputs.next_element::<IgnoredAny>()?.is_none() {
                    break;
                }
            }
            let found =
                outputs.next_element()?.ok_or_else(|| A::Error::custom(format!("there is no output {}", self.0)));
            while outputs.next_element::<IgnoredAny>()?.is_some() {}
            found
        }
    }

    let read = serde_json::Deserializer::from_str(text).deserialize_seq(Nth(item, PhantomData));
    read.map_err(|error| WorkflowError::Mismatch { id: id.clone(), message: error.to_string() })
}

/// Reads the output of an execution, JSON text, as a value of this type.
pub(crate) fn read_as<T: DeserializeOwned>(id: &ExecutionId, text: &str) -> Result<T> {
    serde_json::from_str(text).map_err(|error| WorkflowError::Mismatch { id: id.clone(), message: error.to_string() })
}

impl EngineInner {
    /// Waits for the end of an execution and returns the output as JSON text. If `asked` is given, the execution must
    /// belong to that workflow.
    async fn output(&self, id: &ExecutionId, mut asked: Option<&str>, parks: Parks) -> Result<String> {
        let look = |ended: Option<StoredStatus>| {
            // The workflow is checked only once.
            let asked = asked.take();
            async move {
                let (status, execution) = match (ended, asked) {
                    (Some(status), None) => (status, None),
                    // A resident execution has not ended. There is nothing to read until it leaves memory.
                    (None, None) if self.is_resident(id) && !self.is_stopped() => return Ok(None),
                    (ended, asked) => {
                        let (execution, _) = self.known(id).await?;
                        if let Some(asked) = asked.filter(|asked| *asked != execution.workflow) {
                            let (id, asked) = (id.clone(), asked.into());
                            return Err(WorkflowError::OtherWorkflow { id, asked, found: execution.workflow });
                        }
                        // Another execution may have this id now, so the status from the notification counts.
                        (ended.unwrap_or_else(|| execution.status.clone()), Some(execution))
                    }
                };
                if status.is_terminal() {
                    return outcome(id, &status).map(Some);
                }
                if parks == Parks::Wait || self.is_resident(id) {
                    return Ok(None);
                }
                let aside = || self.set_aside.lock().get(id).cloned();
                let reason = match status {
                    StoredStatus::Parked(reason) => Some(reason),
                    // The owner may be another node: what it would find, this one finds as well.
                    StoredStatus::Running => aside().or_else(|| self.why_left(id, &execution?)),
                    _ => aside(),
                };
                reason.map_or(Ok(None), |reason| Err(WorkflowError::Parked { id: id.clone(), reason }))
            }
        };
        self.listen(id, News::End, look).await
    }
}

/// The result of an execution that has this status.
fn outcome(id: &ExecutionId, status: &StoredStatus) -> Result<String> {
    let id = id.clone();
    match status {
        StoredStatus::Completed(output) => Ok(output.clone()),
        StoredStatus::Failed(text) => Err(WorkflowError::Failed { id, failure: read_failure(text) }),
        StoredStatus::TimedOut => Err(WorkflowError::TimedOut { id }),
        StoredStatus::Cancelled(reason) => Err(WorkflowError::Cancelled { id, reason: reason.clone() }),
        StoredStatus::Running | StoredStatus::Waiting | StoredStatus::Parked(_) => Err(WorkflowError::Stopped),
    }
}

shown!(Handle<O>, it => id: it.id);
