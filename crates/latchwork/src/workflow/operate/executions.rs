//! The executions in a store, for programs that only read: this needs no engine, runs nothing and writes nothing. An
//! engine uses the same code.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::store::{Order, Store, Timestamp, View};
use crate::workflow::admission::QueuePosition;
use crate::workflow::engine::{Engine, EngineInner, EngineSpaces};
use crate::workflow::operate::history::{ExecutionState, value};
use crate::workflow::stored::kept::Kept;
use crate::workflow::stored::record::{Attribute, Close, Execution, Wait, fetch_execution};
use crate::workflow::{ExecutionFilter, ExecutionId, List, Operations, Result, Why, WorkflowError};

/// The executions in a store, without an engine that runs them: on [`Store::open_read_only`], for instance.
///
/// ```
/// # use latchwork::store::Store;
/// # use latchwork::workflow::{Executions, ExecutionFilter, Status, Result};
/// # async fn example() -> Result<()> {
/// let executions = Executions::on(&Store::open_read_only("./data").await?).await?;
/// for parked in executions.list(ExecutionFilter::new().is(Status::Parked)).await? {
///     println!("{} {:?}", parked.id, executions.describe(&parked.id).await?.input);
/// }
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Executions {
    pub(crate) store: Store,
    /// `None` if no engine has ever opened the store.
    pub(crate) spaces: Option<EngineSpaces>,
}

/// Everything that is known of an execution except its operations.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Description {
    /// Its id.
    pub id: ExecutionId,
    /// The workflow's name.
    pub workflow: String,
    /// Its state, with its output or failure if it has ended.
    pub state: ExecutionState,
    /// How often it was continued as new.
    pub run: u32,
    /// How often an operator has resumed it.
    pub resumes: u32,
    /// The input it was started or continued with.
    pub input: Value,
    /// When it was started.
    #[serde(rename = "started_us")]
    pub started: Timestamp,
    /// When its record was last changed: for an execution that has ended, its end.
    #[serde(rename = "changed_us")]
    pub changed: Timestamp,
    /// When it times out.
    #[serde(rename = "deadline_us")]
    pub deadline: Option<Timestamp>,
    /// When it is due for removal, if it has ended.
    #[serde(rename = "removal_us")]
    pub removal_at: Option<Timestamp>,
    /// The idempotency key of its start.
    pub idempotency_key: Option<String>,
    /// What it waits for, if it is out of memory.
    pub waits: Vec<Wait>,
    /// Its tags.
    pub tags: BTreeSet<String>,
    /// Its search attributes.
    pub attributes: BTreeMap<String, Attribute>,
    /// The execution that started it, if it has a parent.
    pub parent: Option<ExecutionId>,
    /// What happens to it when its parent ends first.
    pub close: Option<Close>,
    /// The children that it has started and that have not ended.
    pub children: Vec<ExecutionId>,
    /// The execution that it was forked from, if it is a fork.
    pub forked: Option<ExecutionId>,
    /// The schedule that started it, if a schedule did.
    pub schedule: Option<String>,
    /// The reason, if its cancellation was requested.
    pub cancel: Option<String>,
    /// Its published values, by name.
    pub published: BTreeMap<String, Value>,
}

impl Executions {
    /// The executions in a store.
    ///
    /// ```
    /// # use latchwork::store::Store;
    /// # use latchwork::workflow::{Executions, Result};
    /// # async fn example() -> Result<()> {
    /// let executions = Executions::on(&Store::open_read_only("./data").await?).await?;
    /// # Ok(()) }
    /// ```
    pub async fn on(store: &Store) -> Result<Executions> {
        Ok(Executions { store: store.clone(), spaces: EngineSpaces::find(store).await? })
    }

    /// Lists executions by their state, waits and labels, as [`Engine::list`] does.
    ///
    /// ```
    /// # use latchwork::workflow::{ExecutionFilter, Executions, Result, Status};
    /// # async fn example(executions: Executions) -> Result<()> {
    /// for execution in executions.list(ExecutionFilter::new().is(Status::Parked)).await? {
    ///     println!("{execution}");
    /// }
    /// # Ok(()) }
    /// ```
    pub fn list(&self, filter: ExecutionFilter) -> List {
        List::new(self.clone(), filter)
    }

    /// The recorded operations of an execution, page by page. Await it for a page.
    ///
    /// ```
    /// # use latchwork::workflow::{Executions, Result};
    /// # async fn example(executions: Executions) -> Result<()> {
    /// for operation in executions.operations("order-7").limit(20).await? {
    ///     println!("{} {:?}: {}", operation.kind, operation.name, operation.state);
    /// }
    /// # Ok(()) }
    /// ```
    pub fn operations(&self, id: impl Into<ExecutionId>) -> Operations {
        Operations::new(self.clone(), id.into())
    }

    /// Everything that is known of an execution except its operations.
    ///
    /// ```
    /// # use latchwork::workflow::{Executions, Result};
    /// # async fn example(executions: Executions) -> Result<()> {
    /// let order = executions.describe("order-7").await?;
    /// println!("{}, started with {}", order.status(), order.input);
    /// # Ok(()) }
    /// ```
    pub async fn describe(&self, id: impl Into<ExecutionId>) -> Result<Description> {
        let id = id.into();
        let view = self.store.view().await?;
        let (spaces, execution, changed) = self.read(&view, &id).await?;
        let kept = Kept::new(&spaces.kept, &id);
        let published = kept.fetch_published(&view).await?.map(|(published, _)| published).unwrap_or_default();
        let children = match execution.has_children {
            true => view.scan(&kept.children(), Order::Ascending, usize::MAX).await?,
            false => Vec::new(),
        };
        let children = children.iter().filter_map(|(key, _)| kept.read_child(key)).collect();
        let published = published.0.iter().map(|(name, text)| (name.clone(), value(text))).collect();
        Ok(Description { children, published, ..Description::new(id, execution, changed) })
    }

    /// What an execution waits for, as far as the store knows. This does not include what it does in a process's
    /// memory.
    ///
    /// ```
    /// # use latchwork::workflow::{Executions, Result};
    /// # async fn example(executions: Executions) -> Result<()> {
    /// println!("{}", executions.why("order-7").await?);
    /// # Ok(()) }
    /// ```
    pub async fn why(&self, id: impl Into<ExecutionId>) -> Result<Why> {
        let (id, view) = (id.into(), self.store.view().await?);
        let (spaces, execution, changed) = self.read(&view, &id).await?;
        let queue = match &spaces.limits {
            Some(gates) => QueuePosition::of(gates, &view, &id, &execution).await?,
            None => None,
        };
        Ok(Why { queue, ..Why::stored(id, execution, changed) })
    }

    /// An execution that must exist, and when its record was last changed.
    pub(crate) async fn read(&self, view: &View, id: &ExecutionId) -> Result<(&EngineSpaces, Execution, Timestamp)> {
        let missing = || WorkflowError::NotFound { id: id.clone() };
        let spaces = self.spaces.as_ref().ok_or_else(missing)?;
        let (execution, item) = fetch_execution(view, &spaces.executions, id).await?.ok_or_else(missing)?;
        Ok((spaces, execution, item.time))
    }
}

shown!(Executions, _it => );

impl EngineInner {
    /// The executions in this engine's store, for reading.
    pub(crate) fn stored(&self) -> Executions {
        Executions { store: self.store.clone(), spaces: Some(self.spaces.clone()) }
    }
}

impl Engine {
    /// Everything that is known of an execution except its operations.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// let order = engine.describe("order-7").await?;
    /// println!("{}, started with {}", order.status(), order.input);
    /// # Ok(()) }
    /// ```
    pub async fn describe(&self, id: impl Into<ExecutionId>) -> Result<Description> {
        self.inner.stored().describe(id).await
    }
}

impl Description {
    fn new(id: ExecutionId, execution: Execution, changed: Timestamp) -> Description {
        let parent = execution.parent;
        Description {
            id,
            workflow: execution.workflow,
            state: ExecutionState::of(&execution.status),
            run: execution.run,
            resumes: execution.resumes,
            input: value(&execution.input),
            started: Timestamp(execution.started_us),
            changed,
            deadline: execution.deadline_us.map(Timestamp),
            removal_at: execution.removal_us.map(Timestamp),
            idempotency_key: execution.key,
            waits: execution.waits,
            tags: execution.labels.tags,
            attributes: execution.labels.attributes,
            close: parent.as_ref().map(|parent| parent.close),
            parent: parent.map(|parent| parent.id),
            children: Vec::new(),
            forked: execution.forked.map(Into::into),
            schedule: execution.schedule,
            cancel: execution.cancel,
            published: BTreeMap::new(),
        }
    }
}
