//! Transactions: entities and slots are read, changed, and written in one commit with the record that it was done.

use std::future::{Future, IntoFuture};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::backoff::{doubled, jittered};
use crate::entity::{Add, Entity, EntityError, EntityId, EntityView, Page, Query, Remove, Transaction, Update};
use crate::lane::Part;
use crate::state::{Slot, Staged};
use crate::store::{Outcome, Right};
use crate::workflow::ctx::slots::CtxState;
use crate::workflow::ctx::step::caught;
use crate::workflow::ctx::{Ctx, hash};
use crate::workflow::journal::replay::{Call, Journaled};
use crate::workflow::run::{Next, Run, Sent, Stop};
use crate::workflow::stored::record::{Entry, EntryState, Kind, WaitsFor};
use crate::workflow::{Boxed, Failure};

/// How often a transaction is tried that lost its race. Each time another writer got through.
const TRIES: u32 = 1000;

/// The first and the longest pause between two tries.
const PAUSES: (Duration, Duration) = (Duration::from_micros(500), Duration::from_millis(100));

/// A transaction at work: what it reads is as of one moment, and what it writes is written at its end, all of it or
/// nothing. It is cheap to clone.
#[derive(Clone)]
pub struct Tx {
    inner: Arc<Inner>,
    slots: CtxState,
}

struct Inner {
    view: EntityView,
    writes: Mutex<Option<Transaction>>,
    staged: Arc<Staged>,
    /// What other layers add to the commit.
    parts: Mutex<Vec<Part>>,
}

impl Tx {
    /// The entity of this id, as it was when the transaction began. If it is another when it ends, the transaction is
    /// run again.
    pub async fn get(&self, id: impl Into<EntityId>) -> Result<Option<Entity>, EntityError> {
        self.inner.view.get(id).await
    }

    /// The entities that a query asks for, as [`Tx::get`] gives them.
    pub async fn find(&self, query: &Query) -> Result<Page, EntityError> {
        self.inner.view.find(query).await
    }

    fn write(&self, write: impl FnOnce(Transaction) -> Transaction) {
        let mut writes = self.inner.writes.lock();
        *writes = Some(write(writes.take().unwrap_or_default()));
    }

    /// Adds an entity.
    pub fn add(&self, add: Add) {
        self.write(|writes| writes.add(add));
    }

    /// Changes an entity. A transaction writes an entity at most once.
    pub fn update(&self, update: Update) {
        self.write(|writes| writes.update(update));
    }

    /// Removes an entity.
    pub fn remove(&self, remove: impl Into<Remove>) {
        self.write(|writes| writes.remove(remove));
    }

    /// Has the transaction fail if there is no such entity.
    pub fn require_exists(&self, id: impl Into<EntityId>) {
        self.write(|writes| writes.require_exists(id));
    }

    /// Has the transaction fail if there is such an entity.
    pub fn require_absent(&self, id: impl Into<EntityId>) {
        self.write(|writes| writes.require_absent(id));
    }

    /// Has the transaction fail once this right is lost, such as that of a lock's token. Locks that the execution holds
    /// are checked without it.
    pub fn guard(&self, right: &impl Right) {
        self.write(|writes| writes.guard(right));
    }

    /// What the transaction reads, for another layer. That has to see to it that what it reads is checked.
    pub(crate) fn view(&self) -> Result<Arc<crate::store::View>, EntityError> {
        self.inner.view.pinned()
    }

    /// Adds a layer's part to the commit. If a check of the part fails, the transaction is run again.
    pub(crate) fn part(&self, part: Part) {
        self.inner.parts.lock().push(part);
    }

    /// A slot that all code on the store shares. The transaction sees what it has itself written to slots.
    pub fn global<T: Serialize + DeserializeOwned>(&self, key: &str) -> Slot<T> {
        self.slots.global(key)
    }

    /// A slot that all executions of this workflow share.
    pub fn workflow<T: Serialize + DeserializeOwned>(&self, key: &str) -> Slot<T> {
        self.slots.workflow(key)
    }

    /// A slot of this execution.
    pub fn execution<T: Serialize + DeserializeOwned>(&self, key: &str) -> Slot<T> {
        self.slots.execution(key)
    }

    /// A slot that this execution shares with its family.
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
    /// A transaction: entities and slots are changed in one commit with the record of it, so what it does, it does
    /// exactly once. If what the body has read was changed meanwhile, the body runs again, so it must do nothing but
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
    /// What the body is given, so that a replay can tell when it is given something else.
    pub fn input(mut self, input: &impl Serialize) -> Self {
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
            let call = Call { kind: Kind::Transaction, name: &self.name, argument: self.argument };
            self.ctx.replay(WaitsFor::Store, call, |operation| self.execute(operation)).await
        })
    }
}

/// Why a try has come to nothing.
enum Miss {
    Failed(Failure),
    /// Another writer was faster.
    Outrun,
    Stop(Stop),
}

impl Miss {
    /// What an error of the entities' means: the store's stops the execution, and so does one for which a newer program
    /// is needed; the others are the transaction's.
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
            // The body is run once, and what it did is committed.
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
        let message = format!("others were faster each of the {TRIES} times this was tried");
        Err(operation.gave(Failure::new(message).with_code("latchwork.contended")))
    }
}

async fn begin(run: &Arc<Run>) -> Result<Tx, EntityError> {
    let view = run.engine.entities.now().await?;
    let staged = Arc::new(Staged::new(view.pinned()?, run.engine.store.limits().value_bytes));
    let slots = CtxState::with(run.clone(), staged.clone());
    Ok(Tx { inner: Arc::new(Inner { view, writes: Mutex::default(), staged, parts: Mutex::default() }), slots })
}

/// Commits what a transaction did, with everything that waits to be.
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
        // That it is done goes into this commit and into no other, though this future may be dropped before.
        let done = Entry { state: EntryState::Done(text), ..operation.entry.clone() };
        run.put_for_carrier(&operation.place, done, None);
        let (commit, boarded) = run.board(commit, Next::Runs);
        match run.submit(commit, boarded).await {
            Sent::Landed(receipt) => {
                placed.into_iter().for_each(|(place, rest)| rest.land(place.landing(&receipt)));
                return Ok(());
            }
            Sent::Refused(refusal) => refusal,
            Sent::Stopped(stop) => return Err(Miss::Stop(stop)),
        }
    };
    Err(entities.outrun(refusal, &understood).await.map_or_else(miss, |()| Miss::Outrun))
}
