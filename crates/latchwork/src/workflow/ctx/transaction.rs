//! Transactions: one commit writes the changed entities and slots together with the record that this was done.

use std::future::{Future, IntoFuture};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::backoff::{doubled, jittered};
use crate::entity::{Add, Entity, EntityError, EntityId, EntityView, Query, Remove, Transaction, Update};
use crate::lane::Part;
use crate::page::Page;
use crate::state::{Slot, StagedSlots};
use crate::store::{Outcome, Right};
use crate::workflow::ctx::slots::CtxState;
use crate::workflow::ctx::step::caught;
use crate::workflow::ctx::{Ctx, hash};
use crate::workflow::journal::replay::{Journaled, OpCall};
use crate::workflow::run::{CommitOutcome, NextState, Run, Stop};
use crate::workflow::stored::record::{Entry, EntryState, Kind, WaitsFor};
use crate::workflow::{Boxed, Failure};

/// How often a transaction that lost its race is tried. Each time, another writer succeeded.
const TRIES: u32 = 1000;

/// The first and the longest pause between two tries.
const PAUSES: (Duration, Duration) = (Duration::from_micros(500), Duration::from_millis(100));

/// A running transaction. All its reads see one moment. All its writes are made at its end, or none of them. It is
/// cheap to clone.
#[derive(Clone)]
pub struct Tx {
    inner: Arc<TransactionInner>,
    slots: CtxState,
}

struct TransactionInner {
    view: EntityView,
    writes: Mutex<Option<Transaction>>,
    staged: Arc<StagedSlots>,
    /// The parts that other layers add to the commit.
    parts: Mutex<Vec<Part>>,
}

impl Tx {
    /// Returns the entity of this id, as it was when the transaction began. If the entity has changed when the
    /// transaction ends, the transaction runs again.
    ///
    /// ```
    /// # use latchwork::workflow::{Failure, Tx};
    /// # async fn example(tx: Tx) -> Result<(), Failure> {
    /// let stock = tx.get("stock").await?.ok_or("there is no stock")?;
    /// # Ok(()) }
    /// ```
    pub async fn get(&self, id: impl Into<EntityId>) -> Result<Option<Entity>, EntityError> {
        self.inner.view.get(id).await
    }

    /// Returns the entities that a query selects, as of the begin of the transaction.
    ///
    /// ```
    /// # use latchwork::entity::Query;
    /// # use latchwork::workflow::{Failure, Tx};
    /// # async fn example(tx: Tx) -> Result<(), Failure> {
    /// let people = tx.find(&Query::of("person").limit(10)).await?.items;
    /// # Ok(()) }
    /// ```
    pub async fn find(&self, query: &Query) -> Result<Page<Entity>, EntityError> {
        self.inner.view.find(query).await
    }

    fn write(&self, write: impl FnOnce(Transaction) -> Transaction) {
        let mut writes = self.inner.writes.lock();
        *writes = Some(write(writes.take().unwrap_or_default()));
    }

    /// Adds an entity.
    ///
    /// ```
    /// # use latchwork::entity::Add;
    /// # use latchwork::json;
    /// # use latchwork::workflow::{Failure, Tx};
    /// # async fn example(tx: Tx) -> Result<(), Failure> {
    /// tx.add(Add::new("order").id("order-7").data(json!({"pieces": 2})));
    /// # Ok(()) }
    /// ```
    pub fn add(&self, add: Add) {
        self.write(|writes| writes.add(add));
    }

    /// Changes an entity. A transaction writes an entity at most once.
    ///
    /// ```
    /// # use latchwork::entity::Update;
    /// # use latchwork::json;
    /// # use latchwork::workflow::{Failure, Tx};
    /// # async fn example(tx: Tx) -> Result<(), Failure> {
    /// tx.update(Update::new("order-7").data(json!({"pieces": 3})));
    /// # Ok(()) }
    /// ```
    pub fn update(&self, update: Update) {
        self.write(|writes| writes.update(update));
    }

    /// Removes an entity.
    ///
    /// ```
    /// # use latchwork::workflow::{Failure, Tx};
    /// # async fn example(tx: Tx) -> Result<(), Failure> {
    /// tx.remove("order-7");
    /// # Ok(()) }
    /// ```
    pub fn remove(&self, remove: impl Into<Remove>) {
        self.write(|writes| writes.remove(remove));
    }

    /// Makes the transaction fail if the entity does not exist.
    ///
    /// ```
    /// # use latchwork::workflow::{Failure, Tx};
    /// # async fn example(tx: Tx) -> Result<(), Failure> {
    /// tx.require_exists("customer-1");
    /// # Ok(()) }
    /// ```
    pub fn require_exists(&self, id: impl Into<EntityId>) {
        self.write(|writes| writes.require_exists(id));
    }

    /// Makes the transaction fail if the entity exists.
    ///
    /// ```
    /// # use latchwork::workflow::{Failure, Tx};
    /// # async fn example(tx: Tx) -> Result<(), Failure> {
    /// tx.require_absent("order-7");
    /// # Ok(()) }
    /// ```
    pub fn require_absent(&self, id: impl Into<EntityId>) {
        self.write(|writes| writes.require_absent(id));
    }

    /// Makes the transaction fail if this right is lost, such as the right of a lock's token. Locks that the execution
    /// holds are checked without it.
    ///
    /// ```
    /// # use latchwork::lock::FencingToken;
    /// # use latchwork::workflow::{Failure, Tx};
    /// # async fn example(tx: Tx, token: FencingToken) -> Result<(), Failure> {
    /// tx.guard(&token);
    /// # Ok(()) }
    /// ```
    pub fn guard(&self, right: &impl Right) {
        self.write(|writes| writes.guard(right));
    }

    /// The view that the transaction reads, for another layer. That layer must make sure that what it reads is checked.
    pub(crate) fn view(&self) -> Result<Arc<crate::store::View>, EntityError> {
        self.inner.view.pinned()
    }

    /// Adds a layer's part to the commit. If a check of the part fails, the transaction runs again.
    pub(crate) fn part(&self, part: Part) {
        self.inner.parts.lock().push(part);
    }

    /// A slot that all code on the store shares. The transaction sees its own writes to slots.
    ///
    /// ```
    /// # use latchwork::workflow::{Failure, Tx};
    /// # async fn example(tx: Tx) -> Result<(), Failure> {
    /// let number = tx.global::<u64>("orders").increment(1).await?.value;
    /// # Ok(()) }
    /// ```
    pub fn global<T: Serialize + DeserializeOwned>(&self, key: &str) -> Slot<T> {
        self.slots.global(key)
    }

    /// A slot that all executions of this workflow share.
    ///
    /// ```
    /// # use latchwork::workflow::{Failure, Tx};
    /// # async fn example(tx: Tx) -> Result<(), Failure> {
    /// tx.workflow::<u64>("sold").increment(1).await?;
    /// # Ok(()) }
    /// ```
    pub fn workflow<T: Serialize + DeserializeOwned>(&self, key: &str) -> Slot<T> {
        self.slots.workflow(key)
    }

    /// A slot of this execution.
    ///
    /// ```
    /// # use latchwork::workflow::{Failure, Tx};
    /// # async fn example(tx: Tx) -> Result<(), Failure> {
    /// tx.execution::<String>("stage").set("paid".into()).await?;
    /// # Ok(()) }
    /// ```
    pub fn execution<T: Serialize + DeserializeOwned>(&self, key: &str) -> Slot<T> {
        self.slots.execution(key)
    }

    /// A slot that this execution shares with its tree.
    ///
    /// ```
    /// # use latchwork::workflow::{Failure, Tx};
    /// # async fn example(tx: Tx) -> Result<(), Failure> {
    /// tx.tree::<u64>("budget").initial(100).increment(-7).await?;
    /// # Ok(()) }
    /// ```
    pub fn tree<T: Serialize + DeserializeOwned>(&self, key: &str) -> Slot<T> {
        self.slots.tree(key)
    }
}

shown!(Tx, it => generation: it.inner.view.generation());

/// A transaction that is about to be awaited.
#[must_use = "a transaction does nothing until it is awaited"]
pub struct Transacting<'a, F> {
    ctx: &'a Ctx,
    name: String,
    body: F,
    argument: u64,
}

impl Ctx {
    /// A transaction: one commit changes entities and slots and records that this was done. So the transaction takes
    /// effect exactly once. If something that the body has read changed meanwhile, the body runs again. So it must only
    /// read and write through `tx`. After an error nothing is written, and the error is recorded.
    ///
    /// ```
    /// use latchwork::entity::Update;
    /// use latchwork::json;
    /// use latchwork::workflow::{Ctx, Failure, Tx};
    ///
    /// async fn take(ctx: Ctx, pieces: u64) -> Result<u64, Failure> {
    ///     let left = ctx.transaction("take", async |tx: Tx| {
    ///         let stock = tx.get("stock").await?.ok_or("there is no stock")?;
    ///         let left = stock.data["pieces"].as_u64().unwrap_or(0).checked_sub(pieces).ok_or("sold out")?;
    ///         tx.update(Update::new("stock").data(json!({"pieces": left})));
    ///         tx.workflow::<u64>("sold").increment(1).await?;
    ///         Ok(left)
    ///     });
    ///     left.await
    /// }
    /// ```
    pub fn transaction<F, Fut, T>(&self, name: &str, body: F) -> Transacting<'_, F>
    where
        F: Fn(Tx) -> Fut + Send + Sync,
        Fut: Future<Output = Result<T, Failure>> + Send,
        T: Serialize + DeserializeOwned + Send,
    {
        Transacting { ctx: self, name: name.into(), body, argument: 0 }
    }
}

impl<F> Transacting<'_, F> {
    /// Sets the input of the body, so that a replay can detect another input.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure, Tx};
    /// # async fn example(ctx: Ctx, pieces: u64) -> Result<(), Failure> {
    /// let take = ctx.transaction("take", async |tx: Tx| {
    ///     tx.workflow::<u64>("taken").increment(pieces).await?;
    ///     Ok(())
    /// });
    /// take.input(&pieces).await?;
    /// # Ok(()) }
    /// ```
    pub fn input(mut self, input: &(impl Serialize + ?Sized)) -> Self {
        self.argument = hash(input);
        self
    }
}

impl<'a, F, Fut, T> IntoFuture for Transacting<'a, F>
where
    F: Fn(Tx) -> Fut + Send + Sync + 'a,
    Fut: Future<Output = Result<T, Failure>> + Send + 'a,
    T: Serialize + DeserializeOwned + Send + 'a,
{
    type Output = Result<T, Failure>;
    type IntoFuture = Boxed<'a, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move {
            let call = OpCall { kind: Kind::Transaction, name: &self.name, argument: self.argument };
            self.ctx.replay(WaitsFor::Store, call, |operation| self.execute(operation)).await
        })
    }
}

/// Why a try failed.
enum Miss {
    Failed(Failure),
    /// Another writer was faster.
    Outrun,
    Stop(Stop),
}

impl Miss {
    /// Classifies an error of the entities. An error of the store, or a record of a newer program, stops the execution.
    /// Other errors are failures of the transaction.
    fn of(run: &Run, error: EntityError) -> Miss {
        match error {
            error @ (EntityError::Store(_) | EntityError::UnknownVersion { .. }) => Miss::Stop(run.stops(error.into())),
            error => Miss::Failed(Failure::refused(error)),
        }
    }
}

impl<F> Transacting<'_, F> {
    async fn execute<Fut, T>(&self, mut operation: Journaled<'_>) -> Result<T, Failure>
    where
        F: Fn(Tx) -> Fut,
        Fut: Future<Output = Result<T, Failure>>,
        T: Serialize + DeserializeOwned,
    {
        let run = &self.ctx.run;
        operation.unless_cancelled()?;
        for tries in 1..=TRIES {
            operation.entry.attempts = tries;
            // Runs the body once, and commits its writes.
            let tried = async {
                let tx = begin(run).await.map_err(|error| Miss::of(run, error))?;
                let value = caught(|| (self.body)(tx.clone())).await.map_err(Miss::Failed)?;
                let text = run.text("the result", &value).map_err(Miss::Failed)?;
                let sent = send(&operation, &tx, text).await;
                operation.doing.carried();
                sent.inspect_err(|_| run.take_back(&operation.place))?;
                Ok(value)
            };
            match tried.await {
                Ok(value) => return Ok(value),
                Err(Miss::Failed(failure)) => return Err(operation.gave(failure)),
                Err(Miss::Stop(stop)) => return run.stop_for(stop).await,
                Err(Miss::Outrun) => {
                    let pause = doubled(PAUSES.0, tries).min(PAUSES.1);
                    run.env().sleep(jittered(pause, 0.5, run.env())).await;
                }
            }
        }
        let message = format!("another writer was faster in each of the {TRIES} tries");
        Err(operation.gave(Failure::new(message).with_code("latchwork.contended")))
    }
}

async fn begin(run: &Arc<Run>) -> Result<Tx, EntityError> {
    let view = run.engine.entities.now().await?;
    let staged = Arc::new(StagedSlots::new(view.pinned()?, run.engine.store.limits().value_bytes));
    let slots = CtxState::with(run.clone(), staged.clone());
    Ok(Tx {
        inner: Arc::new(TransactionInner { view, writes: Mutex::default(), staged, parts: Mutex::default() }),
        slots,
    })
}

/// Commits the writes of a transaction, together with everything else that waits for a commit.
async fn send(operation: &Journaled<'_>, tx: &Tx, text: String) -> Result<(), Miss> {
    let run = &operation.ctx.run;
    let entities = &run.engine.entities;
    let miss = |error: EntityError| Miss::of(run, error);
    let writes = tx.inner.writes.lock().take().unwrap_or_default();
    let checked = entities.checked(writes.if_unchanged(&tx.inner.view)).map_err(miss)?;
    let view = tx.inner.view.pinned().map_err(miss)?;
    let prepared = entities.prepare(&view, &checked).await.map_err(miss)?;
    let doomed = prepared.doomed;
    let (commit, understood) = prepared.split();
    let refusal = if doomed {
        match run.engine.store.commit(commit).await.map_err(|error| miss(error.into()))? {
            Outcome::Applied(_) => return Err(Miss::Outrun),
            Outcome::Refused(refusal) => refusal,
        }
    } else {
        let mut commit = tx.inner.staged.board(commit).await;
        let mut placed = Vec::new();
        for part in std::mem::take(&mut *tx.inner.parts.lock()) {
            let (place, rest);
            (commit, place, rest) = part.place_whole(commit);
            placed.push((place, rest));
        }
        operation.doing.carry().await;
        // The entry that it is done belongs in this commit only, even if this future is dropped before.
        let done = Entry { state: EntryState::Done(text), ..operation.entry.clone() };
        run.put_for_carrier(&operation.place, done, None);
        let (commit, boarded) = run.board(commit, NextState::Runs);
        match run.submit(commit, boarded).await {
            CommitOutcome::Landed(receipt) => {
                placed.into_iter().for_each(|(place, rest)| rest.land(place.landing(&receipt)));
                return Ok(());
            }
            CommitOutcome::Refused(refusal) => refusal,
            CommitOutcome::RolledBack => return Err(Miss::Outrun),
            CommitOutcome::Stopped(stop) => return Err(Miss::Stop(stop)),
        }
    };
    Err(entities.outrun(refusal, &understood).await.map_or_else(miss, |()| Miss::Outrun))
}
