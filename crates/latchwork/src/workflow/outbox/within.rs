//! Requests inside the user's own transaction: each is one row in the outbox. No row of the store is locked, so the
//! transaction may stay open as long as it needs to.

use std::future::IntoFuture;
use std::marker::PhantomData;

use serde::Serialize;
use serde_json::value::RawValue;

use crate::entity::{Add, EntityId, NotWritten, Remove, Transaction, Update, WrittenTransaction};
use crate::json;
use crate::workflow::engine::check_name;
use crate::workflow::outbox::request::{OutboxRequest, SignalRequest, StartRequest};
use crate::workflow::outbox::{Outbox, OutboxError, UserTransaction};
use crate::workflow::run::ROOM;
use crate::workflow::{Boxed, Engine, ExecutionId, Workflow, WorkflowError};

/// The user's own transaction, in which executions are started, signals sent and entities changed.
#[must_use = "nothing is written until a request is awaited"]
pub struct InTransaction<X> {
    outbox: Result<Outbox, OutboxError>,
    transaction: X,
}

impl Engine {
    /// Writes a request into the user's own transaction on the database of the store: it is done after that transaction
    /// was committed, exactly once, and leaves nothing if it is rolled back.
    ///
    /// ```no_run
    /// # async fn example(engine: latchwork::workflow::Engine, ship: latchwork::workflow::Workflow<i64, ()>,
    /// #     mut client: latchwork::store::tokio_postgres::Client) -> Result<(), Box<dyn std::error::Error>> {
    /// let tx = client.transaction().await?;
    /// tx.execute("INSERT INTO orders (id) VALUES ($1)", &[&7_i64]).await?;
    /// let id = engine.in_transaction(&tx).start(&ship, 7).id("ship-7").await?;
    /// engine.in_transaction(&tx).signal("warehouse", "order", &7).await?;
    /// tx.commit().await?;
    /// # Ok(()) }
    /// ```
    pub fn in_transaction<X: UserTransaction>(&self, transaction: X) -> InTransaction<X> {
        InTransaction { outbox: self.outbox(), transaction }
    }
}

impl Outbox {
    /// The same as [`Engine::in_transaction`], for a process without an engine.
    pub fn in_transaction<X: UserTransaction>(&self, transaction: X) -> InTransaction<X> {
        InTransaction { outbox: Ok(self.clone()), transaction }
    }
}

/// A start in the user's own transaction that is about to be written.
#[must_use = "nothing is written until this is awaited"]
pub struct StartInTransaction<'a, X> {
    within: InTransaction<X>,
    workflow: String,
    input: Result<Box<RawValue>, OutboxError>,
    id: Option<ExecutionId>,
    join: bool,
    /// How long the transaction is borrowed.
    borrowed: PhantomData<&'a ()>,
}

impl<X: UserTransaction> InTransaction<X> {
    /// Starts an execution. Without [`StartInTransaction::id`], it gets a new id, which is returned.
    pub fn start<'a, I: Serialize, O>(self, workflow: &Workflow<I, O>, input: I) -> StartInTransaction<'a, X>
    where
        X: 'a,
    {
        self.start_by_name(workflow.name(), input)
    }

    /// Starts an execution of the workflow of this name. Whether the workflow is registered and the input fits is known
    /// only when an engine does it: if not, the request fails and stays in the outbox.
    pub fn start_by_name<'a>(self, workflow: &str, input: impl Serialize) -> StartInTransaction<'a, X>
    where
        X: 'a,
    {
        let (input, workflow) = (self.raw("the input of an execution", &input), workflow.into());
        StartInTransaction { within: self, workflow, input, id: None, join: false, borrowed: PhantomData }
    }

    /// Sends a signal to an execution. If there is no such execution by then, or it has ended, the request fails.
    pub async fn signal(
        self,
        execution: impl Into<ExecutionId>,
        name: &str,
        payload: &(impl Serialize + ?Sized),
    ) -> Result<(), OutboxError> {
        let (execution, payload) = (execution.into(), self.raw("the payload of a signal", payload)?);
        check_name("the id of an execution", &execution).map_err(OutboxError::Workflow)?;
        check_name("the name of a signal", name).map_err(OutboxError::Workflow)?;
        self.write(OutboxRequest::Signal(SignalRequest { execution, name: name.into(), payload })).await
    }

    /// Changes entities. If a condition does not hold by then, the request fails, and none of the changes is made.
    pub async fn entities(self, transaction: Transaction) -> Result<(), OutboxError> {
        let env = self.outbox.as_ref().map(|outbox| outbox.store.env().clone()).ok();
        let new_id = || EntityId::from(env.as_ref().map(|env| env.uuid().to_string()).unwrap_or_default());
        let written = WrittenTransaction::of(transaction, new_id).map_err(|not| match not {
            NotWritten::OnlyNow(what) => OutboxError::OnlyNow { what },
            NotWritten::Invalid(error) => OutboxError::Entity(error),
        })?;
        self.write(OutboxRequest::Entities(written)).await
    }

    /// Adds an entity.
    #[allow(clippy::should_implement_trait)] // An operation of its own, not a sum.
    pub async fn add(self, add: Add) -> Result<(), OutboxError> {
        self.entities(Transaction::new().add(add)).await
    }

    /// Changes an entity.
    pub async fn update(self, update: Update) -> Result<(), OutboxError> {
        self.entities(Transaction::new().update(update)).await
    }

    /// Removes an entity.
    pub async fn remove(self, remove: impl Into<Remove>) -> Result<(), OutboxError> {
        self.entities(Transaction::new().remove(remove)).await
    }

    /// A value as JSON, if it can be stored.
    fn raw(&self, what: &'static str, value: &(impl Serialize + ?Sized)) -> Result<Box<RawValue>, OutboxError> {
        let json = json::to_value(value).map_err(|cause| OutboxError::Json { what, cause })?;
        let text = json.to_string();
        let limits = self.outbox.as_ref().map(|outbox| *outbox.store.limits()).unwrap_or_default();
        let (length, limit) = (text.len(), limits.value_bytes.saturating_sub(ROOM));
        if length > limit {
            return Err(OutboxError::Workflow(WorkflowError::PayloadTooLong { what, length, limit }));
        }
        RawValue::from_string(text).map_err(|error| OutboxError::Database { cause: error.into() })
    }

    async fn write(self, request: OutboxRequest) -> Result<(), OutboxError> {
        let outbox = self.outbox?;
        let body = request.write().map_err(|error| OutboxError::Database { cause: error.into() })?;
        let id = outbox.store.env().uuid().to_string();
        let values = [id, request.shard().to_string(), request.kind().to_string(), body];
        let written = self.transaction.insert(outbox.postgres.outbox_insert(), values).await;
        written.map_err(|cause| OutboxError::Database { cause })
    }
}

impl<X> StartInTransaction<'_, X> {
    /// Sets the id. If it is taken by then, the request fails.
    pub fn id(mut self, id: impl Into<ExecutionId>) -> Self {
        self.id = Some(id.into());
        self
    }

    /// Leaves an execution of this id as it is if there is one by then, whatever its input was.
    pub fn or_join(mut self) -> Self {
        self.join = true;
        self
    }
}

impl<'a, X: UserTransaction + 'a> IntoFuture for StartInTransaction<'a, X> {
    type Output = Result<ExecutionId, OutboxError>;
    type IntoFuture = Boxed<'a, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            let StartInTransaction { within, workflow, input, id, join, .. } = self;
            let id = match (id, &within.outbox) {
                (Some(id), _) => id,
                (None, Ok(outbox)) => outbox.store.env().uuid().to_string().into(),
                (None, Err(_)) => return within.outbox.map(|_| ExecutionId::from("")),
            };
            check_name("the id of an execution", &id).map_err(OutboxError::Workflow)?;
            check_name("the name of a workflow", &workflow).map_err(OutboxError::Workflow)?;
            let start = StartRequest { workflow, id: id.clone(), input: input?, join };
            within.write(OutboxRequest::Start(start)).await?;
            Ok(id)
        })
    }
}
