//! Versioned entities: JSON documents with an id, a type and a rev. They are changed under conditions, found by their
//! contents, and readable as they were at any generation that is kept.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use latchwork::entity::{Add, Entities, Query, TypeSpec, field};
//! use latchwork::store::Store;
//! use latchwork::json;
//!
//! let entities = Entities::on(&Store::memory().await?).await?;
//! entities.declare(TypeSpec::new("person").unique(["data.email"])).await?;
//!
//! let by_email = Query::of("person").filter(field("data.email").equals("ada@example.org"));
//! let ada = Add::new("person").data(json!({"email": "ada@example.org", "visits": 0}));
//! let first = entities.add_if_missing(&by_email, ada.clone()).await?;
//! let again = entities.add_if_missing(&by_email, ada).await?;
//! assert!(first.was_added() && !again.was_added() && first.id == again.id);
//!
//! // Read, change, write: tried again when another writer was faster, at most five times.
//! let before = entities.now().await?;
//! entities.update_with(&first.id, 5, |ada| ada.data["visits"] = json!(1)).await?;
//! assert_eq!(before.get(&first.id).await?.unwrap().data["visits"], 0);
//! assert_eq!(entities.find(&by_email).await?.items[0].data["visits"], 1);
//! # Ok(()) }
//! ```

mod build;
mod declare;
mod document;
mod error;
mod filter;
mod index;
mod lane;
mod op;
mod plan;
mod prepare;
mod query;
mod revise;
mod run;
mod transact;
mod verify;
mod view;
#[cfg(feature = "postgres")]
mod written;

use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;

use crate::page::Page;
use crate::store::{Confirm, Generation, History, Key, Range, Rev, Space, SpaceSpec, Store, View};

pub use declare::TypeSpec;
pub use document::{Entity, EntityId, ID_BYTES, Moment};
pub use error::{EntityError, Result};
pub use filter::{FieldRef, Filter, FilterError, FilterProblem, field};
pub use lane::{ChangeError, Draft};
pub use op::{Add, Effect, FailedOp, Meta, OpReceipt, Receipt, Remove, Transaction, Update};
pub use query::{Access, Direction, Explained, Plan, Query};
pub use view::{AsOf, EntityView, Revision, Revisions};

pub(crate) use revise::{Revised, Standing};
pub(crate) use transact::CheckedTransaction;
#[cfg(feature = "postgres")]
pub(crate) use transact::Understood;
#[cfg(feature = "postgres")]
pub(crate) use written::{NotWritten, WrittenTransaction};

use declare::{Declarations, Declared};
use lane::{EntityLanes, backoff};
use transact::TRIES;

/// The entities of a store. Handles are cheap to clone and share their state.
#[derive(Clone)]
pub struct Entities {
    inner: Arc<EntitiesInner>,
}

struct EntitiesInner {
    store: Store,
    /// id → record
    entities: Space,
    /// type, index, values and id → id
    index: Space,
    /// type → declaration
    types: Space,
    declarations: Declarations,
    lanes: EntityLanes,
}

impl Entities {
    /// Opens the entities in a data directory, which is created if it is missing.
    ///
    /// ```
    /// # use latchwork::entity::{Entities, Result};
    /// # use latchwork::store::Store;
    /// # async fn example(store: Store) -> Result<()> {
    /// let entities = Entities::open("./data").await?;
    /// # Ok(()) }
    /// ```
    pub async fn open(directory: impl AsRef<Path>) -> Result<Entities> {
        Entities::on(&Store::open(directory).await?).await
    }

    /// Opens the entities of a store. All history stays readable, unless the store has entities with another history.
    ///
    /// ```
    /// # use latchwork::entity::{Entities, Result};
    /// # use latchwork::store::Store;
    /// # async fn example(store: Store) -> Result<()> {
    /// let entities = Entities::on(&store).await?;
    /// # Ok(()) }
    /// ```
    pub async fn on(store: &Store) -> Result<Entities> {
        let known = store.spaces().await?;
        let history = known.iter().all(|space| space.name() != ENTITIES).then_some(History::Forever);
        Entities::with(store, history).await
    }

    /// Opens the entities of a store, with this history from now on. What it does not cover is dropped.
    ///
    /// ```
    /// # use latchwork::entity::{Entities, Result};
    /// # use latchwork::store::{History, Store};
    /// # async fn example(store: Store) -> Result<()> {
    /// let entities = Entities::with_history(&store, History::Generations(100_000)).await?;
    /// # Ok(()) }
    /// ```
    pub async fn with_history(store: &Store, history: History) -> Result<Entities> {
        Entities::with(store, Some(history)).await
    }

    async fn with(store: &Store, history: Option<History>) -> Result<Entities> {
        let spec = |name| history.into_iter().fold(SpaceSpec::new(name), SpaceSpec::history);
        // The space of entities is declared last: if it exists, the others exist, too, with the same history.
        let types = store.space(spec(TYPES)).await?;
        let index = store.space(spec(INDEX)).await?;
        let entities = store.space(spec(ENTITIES)).await?;
        let (declarations, lanes) = (Declarations::default(), EntityLanes::default());
        let inner = EntitiesInner { store: store.clone(), entities, index, types, declarations, lanes };
        Ok(Entities { inner: Arc::new(inner) })
    }

    /// The store below.
    ///
    /// ```
    /// # use latchwork::entity::{Entities, Result};
    /// # async fn example(entities: Entities) -> Result<()> {
    /// let generation = entities.store().generation().await?;
    /// # Ok(()) }
    /// ```
    pub fn store(&self) -> &Store {
        &self.inner.store
    }

    /// Adds an entity. If it exists, this fails, or with `if_absent` leaves it as it is; the receipt tells which.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::entity::{Add, Entities};
    /// # use latchwork::json;
    /// # use latchwork::store::{Rev, Store};
    /// # let entities = Entities::on(&Store::memory().await?).await?;
    /// let added = entities.add(Add::new("person").id("ada").data(json!({"name": "Ada"}))).await?;
    /// assert_eq!((added.id.as_str(), added.rev), ("ada", Rev(1)));
    /// # Ok(()) }
    /// ```
    pub fn add(&self, add: Add) -> impl Future<Output = Result<OpReceipt>> + Send + use<> {
        self.clone().added(add)
    }

    async fn added(self, add: Add) -> Result<OpReceipt> {
        if let (Some(true), Some(id), true) = (add.if_absent, add.id.clone(), add.fences.is_empty()) {
            id.validate()?;
            if let Some(item) = self.inner.store.get(&self.key(&id)).await? {
                // An invalid add is refused even if the entity exists.
                add.checked(0)?;
                return Ok(OpReceipt { id, rev: item.rev, effect: Effect::Existing });
            }
        }
        self.single(Transaction::new().add(add)).await
    }

    /// Adds entities, all or none of them. An existing entity makes it fail, unless its item sets `if_absent`.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::entity::{Add, Entities};
    /// # use latchwork::store::Store;
    /// # let entities = Entities::on(&Store::memory().await?).await?;
    /// let people = ["ada", "bob"].map(|id| Add::new("person").id(id));
    /// assert_eq!(entities.add_many(people).await?.ops.len(), 2);
    /// # Ok(()) }
    /// ```
    pub fn add_many<I: IntoIterator<Item = Add>>(
        &self,
        items: I,
    ) -> impl Future<Output = Result<Receipt>> + Send + use<I> {
        self.transact(items.into_iter().fold(Transaction::new(), Transaction::add))
    }

    /// Adds those entities that do not exist, all or none of them. An item's own `if_absent` has precedence.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::entity::{Add, Effect, Entities};
    /// # use latchwork::json;
    /// # use latchwork::store::Store;
    /// # let entities = Entities::on(&Store::memory().await?).await?;
    /// # entities.add(Add::new("person").id("ada").data(json!({"visits": 0}))).await?;
    /// let people = ["ada", "bob"].map(|id| Add::new("person").id(id));
    /// let receipt = entities.add_many_if_absent(people).await?;
    /// assert_eq!(receipt.ops[0].effect, Effect::Existing);
    /// assert_eq!(receipt.ops[1].effect, Effect::Added);
    /// # Ok(()) }
    /// ```
    pub fn add_many_if_absent<I: IntoIterator<Item = Add>>(
        &self,
        items: I,
    ) -> impl Future<Output = Result<Receipt>> + Send + use<I> {
        let flagged = |item: Add| {
            let if_absent = item.if_absent.unwrap_or(true);
            item.if_absent(if_absent)
        };
        self.transact(items.into_iter().map(flagged).fold(Transaction::new(), Transaction::add))
    }

    /// Returns the entity with this id, as it is now.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::entity::{Add, Entities};
    /// # use latchwork::json;
    /// # use latchwork::store::Store;
    /// # let entities = Entities::on(&Store::memory().await?).await?;
    /// # entities.add(Add::new("person").id("ada").data(json!({"visits": 0}))).await?;
    /// assert_eq!(entities.get("ada").await?.unwrap().data["visits"], 0);
    /// assert!(entities.get("bob").await?.is_none());
    /// # Ok(()) }
    /// ```
    pub fn get<I: Into<EntityId>>(&self, id: I) -> impl Future<Output = Result<Option<Entity>>> + Send + use<I> {
        self.clone().got(id.into())
    }

    async fn got(self, id: EntityId) -> Result<Option<Entity>> {
        id.validate()?;
        let item = self.inner.store.get(&self.key(&id)).await?;
        item.map(|item| Entity::decode(id, &item)).transpose()
    }

    /// Changes an entity and returns its new rev.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::entity::{Add, Entities, Update};
    /// # use latchwork::json;
    /// # use latchwork::store::{Rev, Store};
    /// # let entities = Entities::on(&Store::memory().await?).await?;
    /// # entities.add(Add::new("person").id("ada").data(json!({"visits": 0}))).await?;
    /// let rev = entities.update(Update::new("ada").data(json!({"visits": 1}))).await?;
    /// assert_eq!(rev, Rev(2));
    /// # Ok(()) }
    /// ```
    pub fn update(&self, update: Update) -> impl Future<Output = Result<Rev>> + Send + use<> {
        self.clone().updated(update)
    }

    async fn updated(self, update: Update) -> Result<Rev> {
        if update.if_rev.is_some() || !update.fences.is_empty() {
            return Ok(self.single(Transaction::new().update(update)).await?.rev);
        }
        let update = update.checked()?;
        let id = update.id.clone();
        let apply = move |draft: &mut Draft| update.apply(&mut draft.data, &mut draft.metadata, &mut draft.subtype);
        self.update_with(id, TRIES, apply).await.map_err(|error| match error {
            EntityError::RetriesSpent { tries, .. } => EntityError::Contended { tries },
            error => error,
        })
    }

    /// Changes entities, all or none of them.
    ///
    /// ```
    /// # use latchwork::entity::{Entities, Result, Update};
    /// # use latchwork::json;
    /// # async fn example(entities: Entities) -> Result<()> {
    /// let both = ["ada", "bob"].map(|id| Update::new(id).metadata(json!({"checked": true})));
    /// entities.update_many(both).await?;
    /// # Ok(()) }
    /// ```
    pub fn update_many<I: IntoIterator<Item = Update>>(
        &self,
        items: I,
    ) -> impl Future<Output = Result<Receipt>> + Send + use<I> {
        self.transact(items.into_iter().fold(Transaction::new(), Transaction::update))
    }

    /// Reads an entity, changes it and writes it, if no other writer has written it meanwhile. Otherwise reads it
    /// again, at most `retries` more times. `change` may run several times and must have no other effect.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::entity::{Add, Entities};
    /// # use latchwork::json;
    /// # use latchwork::store::Store;
    /// # let entities = Entities::on(&Store::memory().await?).await?;
    /// # entities.add(Add::new("person").id("ada").data(json!({"visits": 0}))).await?;
    /// entities.update_with("ada", 5, |ada| ada.data["visits"] = json!(1)).await?;
    /// assert_eq!(entities.get("ada").await?.unwrap().data["visits"], 1);
    /// # Ok(()) }
    /// ```
    pub fn update_with<I: Into<EntityId>, F: FnMut(&mut Draft)>(
        &self,
        id: I,
        retries: u32,
        mut change: F,
    ) -> impl Future<Output = Result<Rev>> + use<I, F> {
        let (entities, id) = (self.clone(), id.into());
        async move {
            let change = |draft: &mut Draft| {
                change(draft);
                Ok::<(), Infallible>(())
            };
            match entities.change(&id, retries, change).await {
                Ok((rev, ())) => Ok(rev),
                Err(ChangeError::Entity(error)) => Err(error),
                Err(ChangeError::Refused(never)) => match never {},
            }
        }
    }

    /// Like [`Entities::update_with`], with a change that returns a value or refuses. If it refuses, nothing is
    /// written.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::entity::{Add, ChangeError, Entities};
    /// # use latchwork::json;
    /// # use latchwork::store::Store;
    /// # let entities = Entities::on(&Store::memory().await?).await?;
    /// # entities.add(Add::new("person").id("ada").data(json!({"visits": 0}))).await?;
    /// let refused = entities.try_update_with("ada", 5, |ada| match ada.data["visits"].as_u64() {
    ///     Some(0) | None => Err("never visited"),
    ///     Some(visits) => Ok(visits),
    /// });
    /// assert!(matches!(refused.await, Err(ChangeError::Refused("never visited"))));
    /// # Ok(()) }
    /// ```
    pub fn try_update_with<T, E, I: Into<EntityId>, F: FnMut(&mut Draft) -> Result<T, E>>(
        &self,
        id: I,
        retries: u32,
        change: F,
    ) -> impl Future<Output = Result<(Rev, T), ChangeError<E>>> + use<T, E, I, F> {
        let (entities, id) = (self.clone(), id.into());
        async move { entities.change(&id, retries, change).await }
    }

    /// Removes an entity and returns the rev of its removal.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::entity::{Add, Entities};
    /// # use latchwork::json;
    /// # use latchwork::store::Store;
    /// # let entities = Entities::on(&Store::memory().await?).await?;
    /// # entities.add(Add::new("person").id("ada").data(json!({"visits": 0}))).await?;
    /// entities.remove("ada").await?;
    /// assert!(entities.get("ada").await?.is_none());
    /// # Ok(()) }
    /// ```
    pub fn remove<R: Into<Remove>>(&self, remove: R) -> impl Future<Output = Result<Rev>> + Send + use<R> {
        let (entities, transaction) = (self.clone(), Transaction::new().remove(remove));
        async move { Ok(entities.single(transaction).await?.rev) }
    }

    /// Does all operations of a transaction in one commit, or none. If it fails, the error lists every check that
    /// failed.
    ///
    /// ```
    /// # use latchwork::entity::{Entities, Result, Transaction, Update};
    /// # use latchwork::json;
    /// # async fn example(entities: Entities) -> Result<()> {
    /// let transfer = Transaction::new()
    ///     .update(Update::new("alice").data(json!({"balance": 70})))
    ///     .update(Update::new("bob").data(json!({"balance": 30})));
    /// let receipt = entities.transact(transfer).await?;
    /// # Ok(()) }
    /// ```
    pub fn transact(&self, transaction: Transaction) -> impl Future<Output = Result<Receipt>> + Send + use<> {
        let entities = self.clone();
        async move { entities.send(entities.checked(transaction)?).await }
    }

    /// Does a transaction whose parts are known to be valid.
    pub(crate) fn checked(&self, transaction: Transaction) -> Result<CheckedTransaction> {
        for reads in &transaction.reads {
            reads.validate(self.inner.store.limits().operations)?;
        }
        CheckedTransaction::new(transaction, self.inner.store.env())
    }

    async fn single(&self, transaction: Transaction) -> Result<OpReceipt> {
        match self.transact(transaction).await {
            Ok(mut receipt) => Ok(receipt.ops.remove(0)),
            Err(EntityError::Rejected { mut failed }) => Err(failed.remove(0).error),
            Err(error) => Err(error),
        }
    }

    /// Returns the first entity that a query finds; if there is none, adds one. However many callers try at once, only
    /// one adds it: the add lands only if the range that the query has read has not changed. With an index for the
    /// query that range is very small, and other writers do not disturb.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::entity::{Add, Entities, Query, field};
    /// # use latchwork::json;
    /// # use latchwork::store::Store;
    /// # let entities = Entities::on(&Store::memory().await?).await?;
    /// let by_email = Query::of("person").filter(field("data.email").equals("ada@example.org"));
    /// let ada = Add::new("person").data(json!({"email": "ada@example.org"}));
    /// assert!(entities.add_if_missing(&by_email, ada.clone()).await?.was_added());
    /// assert!(!entities.add_if_missing(&by_email, ada).await?.was_added());
    /// # Ok(()) }
    /// ```
    pub fn add_if_missing<Q: Into<Query>>(
        &self,
        query: Q,
        add: Add,
    ) -> impl Future<Output = Result<OpReceipt>> + Send + use<Q> {
        self.clone().added_if_missing(query.into().limit(1), add)
    }

    async fn added_if_missing(self, query: Query, add: Add) -> Result<OpReceipt> {
        let wanted = add.clone().checked(0)?;
        if !query.checked()?.matches(&wanted.into_record()) {
            return Err(EntityError::AddDoesNotMatch);
        }
        for tries in 1..=TRIES {
            let view = self.now().await?;
            if let Some(found) = view.find(&query).await?.items.pop() {
                return Ok(OpReceipt { id: found.id, rev: found.rev, effect: Effect::Existing });
            }
            match self.transact(Transaction::new().add(add.clone()).if_unchanged(&view)).await {
                Ok(mut receipt) => return Ok(receipt.ops.remove(0)),
                Err(EntityError::Rejected { mut failed }) => {
                    // Any other failed check may be a consequence of the change.
                    if failed.iter().all(|failed| failed.op.is_some()) {
                        return Err(failed.remove(0).error);
                    }
                }
                Err(error) => return Err(error),
            }
            drop(view);
            if tries > 1 {
                self.inner.store.env().sleep(backoff(tries, self.inner.store.env())).await;
            }
        }
        Err(EntityError::Contended { tries: TRIES })
    }

    /// Returns the entities that a query asks for, as they are now.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::entity::{Add, Entities, Query, field};
    /// # use latchwork::json;
    /// # use latchwork::store::Store;
    /// # let entities = Entities::on(&Store::memory().await?).await?;
    /// # entities.add(Add::new("person").id("ada").data(json!({"visits": 0}))).await?;
    /// let new = Query::of("person").filter(field("data.visits").equals(0));
    /// assert_eq!(entities.find(new).await?.items[0].id, "ada");
    /// # Ok(()) }
    /// ```
    pub fn find<Q: Into<Query>>(&self, query: Q) -> impl Future<Output = Result<Page<Entity>>> + Send + use<Q> {
        let found = self.find_explained(query);
        async move { Ok(found.await?.page) }
    }

    /// Returns the entities that a query asks for, as they are now, and how they were found.
    ///
    /// ```
    /// # use latchwork::entity::{Entities, Query, Result};
    /// # async fn example(entities: Entities) -> Result<()> {
    /// let found = entities.find_explained(Query::of("person").limit(10)).await?;
    /// println!("{}, {} entities read", found.plan, found.examined);
    /// # Ok(()) }
    /// ```
    pub fn find_explained<Q: Into<Query>>(&self, query: Q) -> impl Future<Output = Result<Explained>> + Send + use<Q> {
        let (entities, query) = (self.clone(), query.into());
        async move {
            let view = entities.inner.store.view().await?;
            EntityView::passing(entities, view).find_explained(&query).await
        }
    }

    /// Returns how a query would be answered now.
    ///
    /// ```
    /// # use latchwork::entity::{Entities, Query, Result, field};
    /// # async fn example(entities: Entities) -> Result<()> {
    /// let plan = entities.explain(Query::of("person").filter(field("data.city").equals("Paris"))).await?;
    /// println!("{plan}");
    /// # Ok(()) }
    /// ```
    pub fn explain<Q: Into<Query>>(&self, query: Q) -> impl Future<Output = Result<Plan>> + Send + use<Q> {
        let (entities, query) = (self.clone(), query.into());
        async move {
            let view = entities.inner.store.view().await?;
            EntityView::passing(entities, view).explain(&query).await
        }
    }

    /// Returns a view of the present.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::entity::{Add, Entities};
    /// # use latchwork::json;
    /// # use latchwork::store::Store;
    /// # let entities = Entities::on(&Store::memory().await?).await?;
    /// # entities.add(Add::new("person").id("ada").data(json!({"visits": 0}))).await?;
    /// let before = entities.now().await?;
    /// entities.remove("ada").await?;
    /// assert!(before.get("ada").await?.is_some());
    /// # Ok(()) }
    /// ```
    pub fn now(&self) -> impl Future<Output = Result<EntityView>> + Send + use<> {
        let entities = self.clone();
        async move {
            let view = entities.inner.store.view().await?;
            Ok(EntityView::new(entities, view))
        }
    }

    /// Returns a view of the past: of a generation, or of everything that was committed up to a time.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::entity::{Add, Entities};
    /// # use latchwork::json;
    /// # use latchwork::store::Store;
    /// # let entities = Entities::on(&Store::memory().await?).await?;
    /// # entities.add(Add::new("person").id("ada").data(json!({"visits": 0}))).await?;
    /// let before = entities.store().generation().await?;
    /// entities.remove("ada").await?;
    /// assert!(entities.as_of(before).await?.get("ada").await?.is_some());
    /// # Ok(()) }
    /// ```
    pub fn as_of<W: Into<AsOf>>(&self, when: W) -> impl Future<Output = Result<EntityView>> + Send + use<W> {
        let (entities, when) = (self.clone(), when.into());
        async move {
            let view = match when {
                AsOf::Generation(generation) => entities.inner.store.view_at(generation).await?,
                AsOf::Time(time) => entities.inner.store.view_at_time(time).await?,
            };
            Ok(EntityView::new(entities, view))
        }
    }

    /// Replaces everything in the store, not only the entities, by a snapshot that [`EntityView::persist`] wrote. Revs
    /// and generations continue above all earlier ones.
    ///
    /// ```
    /// # use latchwork::entity::{Entities, Result};
    /// # use latchwork::store::Confirm;
    /// # async fn example(entities: Entities) -> Result<()> {
    /// entities.restore("./backup", Confirm::ReplaceEverything).await?;
    /// # Ok(()) }
    /// ```
    pub fn restore<P: AsRef<Path>>(
        &self,
        snapshot: P,
        confirm: Confirm,
    ) -> impl Future<Output = Result<Generation>> + Send + use<P> {
        let (store, snapshot) = (self.inner.store.clone(), snapshot.as_ref().to_path_buf());
        async move { Ok(store.restore(snapshot, confirm).await?) }
    }

    pub(crate) fn lanes(&self) -> &EntityLanes {
        &self.inner.lanes
    }

    pub(crate) fn key(&self, id: &EntityId) -> Key {
        self.inner.entities.key(id.as_bytes())
    }

    /// The range of all records.
    pub(crate) fn all(&self) -> Range {
        self.inner.entities.all()
    }

    /// The range of one record.
    pub(crate) fn only(&self, id: &EntityId) -> Range {
        self.inner.entities.range(id.as_bytes()..=id.as_bytes())
    }

    pub(crate) fn index_key(&self, key: &[u8]) -> Key {
        self.inner.index.key(key)
    }

    pub(crate) fn index_range(&self, start: &[u8], end: &[u8]) -> Range {
        self.inner.index.range(start..end)
    }

    pub(crate) fn index_prefix(&self, prefix: &[u8]) -> Range {
        self.inner.index.prefix(prefix)
    }

    pub(crate) fn type_key(&self, entity_type: &str) -> Key {
        self.inner.types.key(entity_type)
    }

    /// The declaration of a type as it was last known. Writers check it.
    pub(crate) async fn declared(&self, entity_type: &str) -> Result<Declared> {
        match self.inner.declarations.known(entity_type) {
            Some(known) => Ok(known),
            None => self.refresh(entity_type).await,
        }
    }

    /// The current declaration of a type.
    pub(crate) async fn refresh(&self, entity_type: &str) -> Result<Declared> {
        let view = self.inner.store.view().await?;
        let declared = self.declared_at(&view, entity_type).await?;
        self.inner.declarations.remember(entity_type, declared.clone());
        Ok(declared)
    }

    /// The declaration of a type at a generation.
    pub(crate) async fn declared_at(&self, view: &View, entity_type: &str) -> Result<Declared> {
        let item = view.get(&self.type_key(entity_type)).await?;
        self.inner.declarations.read(entity_type, item)
    }
}

/// The names of the spaces.
const ENTITIES: &str = "entities";
const INDEX: &str = "entity.index";
const TYPES: &str = "entity.types";

shown!(Entities, _it => );
