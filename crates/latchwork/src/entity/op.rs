//! Operations: adds, updates, removes and checks, alone or as one transaction. They are only descriptions; nothing here
//! knows the store. An invalid value is kept until the operation is sent, so that building needs no `?`.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::entity::document::{EntityRecord, Moment};
use crate::entity::view::ReadSet;
use crate::entity::{EntityError, EntityId, EntityView, Result};
use crate::json::{self, JsonError};
use crate::store::{Check, Generation, Rev, Right, Timestamp};

/// A given document, or why it is invalid.
type GivenDocument = Result<Value, JsonError>;

/// The longest name of a type, in bytes.
const TYPE_BYTES: usize = 128;

pub(crate) fn check_type_name(name: &str) -> Result<()> {
    let refuse = |reason: &'static str| Err(EntityError::TypeName { name: name.into(), reason: reason.into() });
    match name.len() {
        0 => refuse("it is empty"),
        length if length > TYPE_BYTES => refuse("it is longer than 128 bytes"),
        // A NUL ends the name in keys.
        _ if name.contains('\0') => refuse("it contains a NUL"),
        _ => Ok(()),
    }
}

pub(crate) fn check_subtype(subtype: &str) -> Result<()> {
    check_type_name(subtype).map_err(|error| match error {
        EntityError::TypeName { name, reason } => EntityError::Subtype { subtype: name, reason },
        error => error,
    })
}

/// A right that must exist for an operation to land.
#[derive(Debug, Clone)]
pub(crate) struct Fence {
    /// The error text if the right is lost.
    pub(crate) lost: String,
    pub(crate) check: Check,
}

impl Fence {
    fn of(right: &impl Right) -> Fence {
        Fence { lost: right.lost(), check: right.check() }
    }
}

/// Adds an entity.
#[derive(Debug, Clone)]
#[must_use = "an operation does nothing until it is sent"]
pub struct Add {
    pub(crate) entity_type: Arc<str>,
    pub(crate) id: Option<EntityId>,
    subtype: Option<Arc<str>>,
    data: GivenDocument,
    metadata: GivenDocument,
    pub(crate) if_absent: Option<bool>,
    pub(crate) fences: Vec<Fence>,
}

impl Add {
    /// Adds an entity of this type. Without an id, it gets a UUIDv7.
    ///
    /// ```
    /// # use latchwork::entity::Add;
    /// # use latchwork::json;
    /// let ada = Add::new("person").data(json!({"name": "Ada"}));
    /// ```
    pub fn new(entity_type: impl Into<Arc<str>>) -> Add {
        let empty = || Ok(Value::Object(Map::new()));
        let (entity_type, data, fences) = (entity_type.into(), Ok(Value::Null), Vec::new());
        Add { entity_type, id: None, subtype: None, data, metadata: empty(), if_absent: None, fences }
    }

    /// Sets the subtype: a text of 1 to 128 bytes beside the type. Finds can use it without a declared index.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use latchwork::entity::{Add, Entities, Query, Update};
    /// use latchwork::store::Store;
    ///
    /// let entities = Entities::on(&Store::memory().await?).await?;
    /// entities.add(Add::new("document").subtype("draft").id("d-1")).await?;
    /// entities.update(Update::new("d-1").subtype("invoice")).await?;
    ///
    /// let found = entities.find_explained(Query::of("document").subtype("invoice")).await?;
    /// assert_eq!(found.page.items[0].id, "d-1");
    /// assert!(!found.plan.scans());
    /// # Ok(()) }
    /// ```
    pub fn subtype(mut self, subtype: impl Into<Arc<str>>) -> Add {
        self.subtype = Some(subtype.into());
        self
    }

    /// Sets the id.
    ///
    /// ```
    /// # use latchwork::entity::Add;
    /// let ada = Add::new("person").id("ada");
    /// ```
    pub fn id(mut self, id: impl Into<EntityId>) -> Add {
        self.id = Some(id.into());
        self
    }

    /// Sets the data: any value that serde can write as JSON.
    ///
    /// ```
    /// # use latchwork::entity::Add;
    /// # use latchwork::json;
    /// let ada = Add::new("person").data(json!({"name": "Ada"}));
    /// ```
    pub fn data(mut self, data: impl Serialize) -> Add {
        self.data = json::to_value(&data);
        self
    }

    /// Sets the metadata: a JSON object.
    ///
    /// ```
    /// # use latchwork::entity::Add;
    /// # use latchwork::json;
    /// let ada = Add::new("person").metadata(json!({"source": "web"}));
    /// ```
    pub fn metadata(mut self, metadata: impl Serialize) -> Add {
        self.metadata = json::to_value(&metadata);
        self
    }

    /// If true, an entity that exists already is left as it is, and its id is returned. In a batch, this has precedence
    /// over the batch's own setting. It has no effect without an explicit id.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::entity::{Add, Effect, Entities};
    /// # use latchwork::json;
    /// # use latchwork::store::Store;
    /// # let entities = Entities::on(&Store::memory().await?).await?;
    /// # entities.add(Add::new("person").id("ada").data(json!({"visits": 0}))).await?;
    /// let again = entities.add(Add::new("person").id("ada").if_absent(true)).await?;
    /// assert_eq!(again.effect, Effect::Existing);
    /// # Ok(()) }
    /// ```
    pub fn if_absent(mut self, if_absent: bool) -> Add {
        self.if_absent = Some(if_absent);
        self
    }

    /// The operation lands only while this right exists, for example the token of a lock that is held.
    ///
    /// ```
    /// # use latchwork::entity::{Add, Entities, Result};
    /// # use latchwork::lock::LockGuard;
    /// # async fn example(entities: Entities, guard: LockGuard) -> Result<()> {
    /// entities.add(Add::new("report").id("today").guard(guard.token())).await?;
    /// # Ok(()) }
    /// ```
    pub fn guard(mut self, right: &impl Right) -> Add {
        self.fences.push(Fence::of(right));
        self
    }

    pub(crate) fn checked(self, op: usize) -> Result<CheckedAdd> {
        check_type_name(&self.entity_type)?;
        self.subtype.as_deref().map_or(Ok(()), check_subtype)?;
        self.id.as_ref().map_or(Ok(()), EntityId::validate)?;
        // An entity without an id yet is shown by its operation.
        let shown = self.id.as_ref().map_or(format!("(new, operation {op})"), |id| format!("{id:?}"));
        let data = document(self.data, &shown, "data")?;
        let metadata = object(document(self.metadata, &shown, "metadata")?, &shown)?;
        let if_absent = self.if_absent.unwrap_or(false) && self.id.is_some();
        let Add { entity_type, subtype, id, .. } = self;
        Ok(CheckedAdd { entity_type, subtype, id, data, metadata, if_absent })
    }
}

fn document(given: GivenDocument, id: &str, part: &'static str) -> Result<Value> {
    given.map_err(|cause| EntityError::Document { id: id.into(), part: part.into(), cause })
}

pub(crate) fn object(value: Value, id: &str) -> Result<Map<String, Value>> {
    let found = match value {
        Value::Object(map) => return Ok(map),
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(_) => "a number",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
    };
    Err(EntityError::Metadata { id: id.into(), found: found.into() })
}

/// Changes an entity.
#[derive(Debug, Clone)]
#[must_use = "an operation does nothing until it is sent"]
pub struct Update {
    pub(crate) id: EntityId,
    /// `Some(None)` removes the subtype.
    subtype: Option<Option<Arc<str>>>,
    data: Option<GivenDocument>,
    metadata: Option<GivenDocument>,
    replace_metadata: bool,
    pub(crate) if_rev: Option<Rev>,
    pub(crate) fences: Vec<Fence>,
}

impl Update {
    /// Changes the entity with this id. Fields that are not set stay as they are.
    ///
    /// ```
    /// # use latchwork::entity::Update;
    /// # use latchwork::json;
    /// let visit = Update::new("ada").data(json!({"visits": 1}));
    /// ```
    pub fn new(id: impl Into<EntityId>) -> Update {
        let (id, fences) = (id.into(), Vec::new());
        Update { id, subtype: None, data: None, metadata: None, replace_metadata: false, if_rev: None, fences }
    }

    /// Changes the subtype. See [`Add::subtype`].
    ///
    /// ```
    /// # use latchwork::entity::Update;
    /// let sent = Update::new("d-1").subtype("invoice");
    /// ```
    pub fn subtype(mut self, subtype: impl Into<Arc<str>>) -> Update {
        self.subtype = Some(Some(subtype.into()));
        self
    }

    /// Removes the subtype.
    ///
    /// ```
    /// # use latchwork::entity::Update;
    /// let plain = Update::new("d-1").without_subtype();
    /// ```
    pub fn without_subtype(mut self) -> Update {
        self.subtype = Some(None);
        self
    }

    /// Replaces the data.
    ///
    /// ```
    /// # use latchwork::entity::Update;
    /// # use latchwork::json;
    /// let visit = Update::new("ada").data(json!({"visits": 1}));
    /// ```
    pub fn data(mut self, data: impl Serialize) -> Update {
        self.data = Some(json::to_value(&data));
        self
    }

    /// Merges this into the metadata, as a JSON merge patch does (RFC 7396): objects are merged, `null` removes.
    ///
    /// ```
    /// # use latchwork::entity::Update;
    /// # use latchwork::json;
    /// let checked = Update::new("ada").metadata(json!({"checked": true, "source": null}));
    /// ```
    pub fn metadata(mut self, metadata: impl Serialize) -> Update {
        (self.metadata, self.replace_metadata) = (Some(json::to_value(&metadata)), false);
        self
    }

    /// Replaces the metadata.
    ///
    /// ```
    /// # use latchwork::entity::Update;
    /// # use latchwork::json;
    /// let checked = Update::new("ada").replace_metadata(json!({"checked": true}));
    /// ```
    pub fn replace_metadata(mut self, metadata: impl Serialize) -> Update {
        (self.metadata, self.replace_metadata) = (Some(json::to_value(&metadata)), true);
        self
    }

    /// The operation lands only if the entity is at this rev.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::entity::{Add, Entities, EntityError, Update};
    /// # use latchwork::json;
    /// # use latchwork::store::{Rev, Store};
    /// # let entities = Entities::on(&Store::memory().await?).await?;
    /// # entities.add(Add::new("person").id("ada").data(json!({"visits": 0}))).await?;
    /// let late = entities.update(Update::new("ada").data(json!({"visits": 1})).if_rev(Rev(7))).await;
    /// assert!(matches!(late, Err(EntityError::RevisionConflict { .. })));
    /// # Ok(()) }
    /// ```
    pub fn if_rev(mut self, rev: Rev) -> Update {
        self.if_rev = Some(rev);
        self
    }

    /// The operation lands only while this right exists, for example the token of a lock that is held.
    ///
    /// ```
    /// # use latchwork::entity::{Entities, Result, Update};
    /// # use latchwork::json;
    /// # use latchwork::lock::LockGuard;
    /// # async fn example(entities: Entities, guard: LockGuard) -> Result<()> {
    /// entities.update(Update::new("today").data(json!({"pages": 3})).guard(guard.token())).await?;
    /// # Ok(()) }
    /// ```
    pub fn guard(mut self, right: &impl Right) -> Update {
        self.fences.push(Fence::of(right));
        self
    }

    pub(crate) fn checked(self) -> Result<CheckedUpdate> {
        self.id.validate()?;
        self.subtype.iter().flatten().try_for_each(|subtype| check_subtype(subtype))?;
        let shown = format!("{:?}", self.id);
        let data = self.data.map(|data| document(data, &shown, "data")).transpose()?;
        let metadata = self.metadata.map(|given| object(document(given, &shown, "metadata")?, &shown)).transpose()?;
        let Update { id, subtype, replace_metadata, if_rev, .. } = self;
        Ok(CheckedUpdate { id, subtype, data, metadata, replace_metadata, if_rev })
    }
}

/// Removes an entity.
#[derive(Debug, Clone)]
#[must_use = "an operation does nothing until it is sent"]
pub struct Remove {
    pub(crate) id: EntityId,
    pub(crate) if_rev: Option<Rev>,
    fences: Vec<Fence>,
}

impl Remove {
    /// Removes the entity with this id.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::entity::{Add, Entities, Remove};
    /// # use latchwork::json;
    /// # use latchwork::store::Store;
    /// # let entities = Entities::on(&Store::memory().await?).await?;
    /// # entities.add(Add::new("person").id("ada").data(json!({"visits": 0}))).await?;
    /// entities.remove(Remove::new("ada")).await?;
    /// # Ok(()) }
    /// ```
    pub fn new(id: impl Into<EntityId>) -> Remove {
        Remove { id: id.into(), if_rev: None, fences: Vec::new() }
    }

    /// The operation lands only if the entity is at this rev.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::entity::{Add, Entities, Remove};
    /// # use latchwork::json;
    /// # use latchwork::store::{Rev, Store};
    /// # let entities = Entities::on(&Store::memory().await?).await?;
    /// # entities.add(Add::new("person").id("ada").data(json!({"visits": 0}))).await?;
    /// assert!(entities.remove(Remove::new("ada").if_rev(Rev(7))).await.is_err());
    /// # Ok(()) }
    /// ```
    pub fn if_rev(mut self, rev: Rev) -> Remove {
        self.if_rev = Some(rev);
        self
    }

    /// The operation lands only while this right exists, for example the token of a lock that is held.
    ///
    /// ```
    /// # use latchwork::entity::{Entities, Remove, Result};
    /// # use latchwork::lock::LockGuard;
    /// # async fn example(entities: Entities, guard: LockGuard) -> Result<()> {
    /// entities.remove(Remove::new("today").guard(guard.token())).await?;
    /// # Ok(()) }
    /// ```
    pub fn guard(mut self, right: &impl Right) -> Remove {
        self.fences.push(Fence::of(right));
        self
    }
}

impl<T: Into<EntityId>> From<T> for Remove {
    fn from(id: T) -> Remove {
        Remove::new(id)
    }
}

/// A requirement on an entity that a transaction does not write.
#[derive(Debug, Clone)]
pub(crate) struct Require {
    pub(crate) id: EntityId,
    pub(crate) what: Required,
}

#[derive(Debug, Clone, Copy)]
pub(crate) enum Required {
    Exists,
    AtRev(Rev),
    Absent,
}

/// An operation of a transaction.
#[derive(Debug, Clone)]
pub(crate) enum EntityOp {
    Add(Add),
    Update(Update),
    Remove(Remove),
    Require(Require),
}

/// Operations that land together or not at all.
///
/// ```
/// # use latchwork::entity::{Add, Remove, Transaction, Update};
/// # use latchwork::store::Rev;
/// # use latchwork::json;
/// let transfer = Transaction::new()
///     .update(Update::new("alice").data(json!({"balance": 70})).if_rev(Rev(3)))
///     .update(Update::new("bob").data(json!({"balance": 30})).if_rev(Rev(1)))
///     .remove(Remove::new("offer-7"))
///     .require_exists("bank")
///     .author("carol")
///     .reason("offer accepted");
/// ```
#[derive(Debug, Clone, Default)]
#[must_use = "a transaction does nothing until it is sent"]
pub struct Transaction {
    pub(crate) ops: Vec<EntityOp>,
    pub(crate) at_generation: Option<Generation>,
    pub(crate) reads: Vec<ReadSet>,
    /// With the operation that each belongs to; `None` if it belongs to the whole transaction.
    pub(crate) fences: Vec<(Option<usize>, Fence)>,
    pub(crate) meta: Meta,
}

impl Transaction {
    /// Makes an empty transaction.
    ///
    /// ```
    /// # use latchwork::entity::{Add, Transaction};
    /// let transaction = Transaction::new().add(Add::new("person").id("ada"));
    /// ```
    pub fn new() -> Transaction {
        Transaction::default()
    }

    fn op(mut self, op: EntityOp) -> Transaction {
        self.ops.push(op);
        self
    }

    /// Takes the fences of the next operation.
    fn fenced(mut self, fences: &mut Vec<Fence>) -> Transaction {
        let op = Some(self.ops.len());
        self.fences.extend(fences.drain(..).map(|fence| (op, fence)));
        self
    }

    /// Adds an entity.
    ///
    /// ```
    /// # use latchwork::entity::{Add, Transaction};
    /// let transaction = Transaction::new().add(Add::new("person").id("ada"));
    /// ```
    #[allow(clippy::should_implement_trait)] // An operation of its own, not a sum.
    pub fn add(self, mut add: Add) -> Transaction {
        self.fenced(&mut add.fences).op(EntityOp::Add(add))
    }

    /// Changes an entity.
    ///
    /// ```
    /// # use latchwork::entity::{Transaction, Update};
    /// # use latchwork::json;
    /// let transaction = Transaction::new().update(Update::new("ada").data(json!({"visits": 1})));
    /// ```
    pub fn update(self, mut update: Update) -> Transaction {
        self.fenced(&mut update.fences).op(EntityOp::Update(update))
    }

    /// Removes an entity.
    ///
    /// ```
    /// # use latchwork::entity::{Remove, Transaction};
    /// # use latchwork::store::Rev;
    /// let transaction = Transaction::new().remove("offer-7").remove(Remove::new("offer-8").if_rev(Rev(2)));
    /// ```
    pub fn remove(self, remove: impl Into<Remove>) -> Transaction {
        let mut remove = remove.into();
        self.fenced(&mut remove.fences).op(EntityOp::Remove(remove))
    }

    /// The transaction lands only if the entity exists.
    ///
    /// ```
    /// # use latchwork::entity::Transaction;
    /// let transaction = Transaction::new().require_exists("bank").remove("offer-7");
    /// ```
    pub fn require_exists(self, id: impl Into<EntityId>) -> Transaction {
        self.op(EntityOp::Require(Require { id: id.into(), what: Required::Exists }))
    }

    /// The transaction lands only if the entity is at this rev.
    ///
    /// ```
    /// # use latchwork::entity::Transaction;
    /// # use latchwork::store::Rev;
    /// let transaction = Transaction::new().require_rev("bank", Rev(3)).remove("offer-7");
    /// ```
    pub fn require_rev(self, id: impl Into<EntityId>, rev: Rev) -> Transaction {
        self.op(EntityOp::Require(Require { id: id.into(), what: Required::AtRev(rev) }))
    }

    /// The transaction lands only if the entity does not exist.
    ///
    /// ```
    /// # use latchwork::entity::Transaction;
    /// let transaction = Transaction::new().require_absent("veto-7").remove("offer-7");
    /// ```
    pub fn require_absent(self, id: impl Into<EntityId>) -> Transaction {
        self.op(EntityOp::Require(Require { id: id.into(), what: Required::Absent }))
    }

    /// The transaction lands only if nothing at all was committed to the store after this generation.
    ///
    /// ```
    /// # use latchwork::entity::Transaction;
    /// # use latchwork::store::Generation;
    /// let transaction = Transaction::new().if_at_generation(Generation(12)).remove("offer-7");
    /// ```
    pub fn if_at_generation(mut self, generation: Generation) -> Transaction {
        self.at_generation = Some(generation);
        self
    }

    /// The transaction lands only if nothing that was read through the view so far has changed: entities by their ids,
    /// and for every find the part of the index or of the type that it has read.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::entity::{Add, Entities, Query, Transaction};
    /// # use latchwork::json;
    /// # use latchwork::store::Store;
    /// # let entities = Entities::on(&Store::memory().await?).await?;
    /// # entities.add(Add::new("person").id("ada").data(json!({"visits": 0}))).await?;
    /// let view = entities.now().await?;
    /// let people = view.find(&Query::of("person")).await?.items.len();
    /// let count = Add::new("count").id("people").data(people);
    /// entities.transact(Transaction::new().add(count).if_unchanged(&view)).await?;
    /// # Ok(()) }
    /// ```
    pub fn if_unchanged(mut self, view: &EntityView) -> Transaction {
        self.reads.push(view.read_set());
        self
    }

    /// The transaction lands only while this right exists, for example the token of a lock that is held.
    ///
    /// ```
    /// # use latchwork::entity::{Entities, Result, Transaction};
    /// # use latchwork::lock::LockGuard;
    /// # async fn example(entities: Entities, guard: LockGuard) -> Result<()> {
    /// let transaction = Transaction::new().remove("offer-7").guard(guard.token());
    /// entities.transact(transaction).await?;
    /// # Ok(()) }
    /// ```
    pub fn guard(mut self, right: &impl Right) -> Transaction {
        self.fences.push((None, Fence::of(right)));
        self
    }

    /// Sets the author, which history keeps.
    ///
    /// ```
    /// # use latchwork::entity::Transaction;
    /// let transaction = Transaction::new().remove("offer-7").author("carol");
    /// ```
    pub fn author(mut self, author: impl Into<String>) -> Transaction {
        self.meta.author = Some(author.into());
        self
    }

    /// Sets the reason, which history keeps.
    ///
    /// ```
    /// # use latchwork::entity::Transaction;
    /// let transaction = Transaction::new().remove("offer-7").reason("offer accepted");
    /// ```
    pub fn reason(mut self, reason: impl Into<String>) -> Transaction {
        self.meta.reason = Some(reason.into());
        self
    }
}

/// What history keeps of a commit beside its changes.
#[derive(Debug, Clone, PartialEq, Eq, Default, serde::Serialize, serde::Deserialize)]
#[non_exhaustive]
pub struct Meta {
    /// The author.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub author: Option<String>,
    /// The reason.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

impl Meta {
    pub(crate) fn encode(&self) -> Vec<u8> {
        if *self == Meta::default() {
            return Vec::new();
        }
        serde_json::to_vec(self).expect("two strings can be written as JSON")
    }

    /// Commits of other layers may have other bytes here; those are ignored.
    pub(crate) fn decode(bytes: &[u8]) -> Meta {
        serde_json::from_slice(bytes).unwrap_or_default()
    }
}

/// The effect of one operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// The entity was added.
    Added,
    /// The entity existed already, and was left as it is.
    Existing,
    /// The entity was changed.
    Updated,
    /// The entity was removed.
    Removed,
    /// The requirement was true. Nothing was written.
    Checked,
}

/// One operation's part of a receipt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OpReceipt {
    /// The entity.
    pub id: EntityId,
    /// Its rev from this commit on. For a requirement, the rev at which the entity was found; zero if it was absent.
    pub rev: Rev,
    /// The effect on it.
    pub effect: Effect,
}

impl OpReceipt {
    /// True if this operation has added the entity.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::entity::{Add, Entities};
    /// # use latchwork::store::Store;
    /// # let entities = Entities::on(&Store::memory().await?).await?;
    /// assert!(entities.add(Add::new("person").id("ada")).await?.was_added());
    /// # Ok(()) }
    /// ```
    pub fn was_added(&self) -> bool {
        self.effect == Effect::Added
    }
}

/// The proof that a transaction landed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Receipt {
    /// The generation of the commit. If nothing was written, the generation at which the checks were true.
    pub generation: Generation,
    /// When it was committed.
    pub time: Timestamp,
    /// The effect of each operation, in their order.
    pub ops: Vec<OpReceipt>,
}

/// A check of a transaction that failed.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct FailedOp {
    /// The index of the operation in the transaction; `None` for a check of the whole transaction.
    pub op: Option<usize>,
    /// What was found.
    pub error: EntityError,
}

impl fmt::Display for FailedOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.op {
            Some(op) => write!(f, "operation {op}: {}", self.error),
            None => write!(f, "{}", self.error),
        }
    }
}

/// An add whose parts are known to be valid.
#[derive(Debug, Clone)]
pub(crate) struct CheckedAdd {
    pub(crate) entity_type: Arc<str>,
    pub(super) subtype: Option<Arc<str>>,
    pub(crate) id: Option<EntityId>,
    pub(crate) data: Value,
    pub(crate) metadata: Map<String, Value>,
    pub(crate) if_absent: bool,
}

impl CheckedAdd {
    pub(crate) fn into_record(self) -> EntityRecord {
        let CheckedAdd { entity_type, subtype, data, metadata, .. } = self;
        EntityRecord { entity_type, subtype, created: Moment::default(), data, metadata }
    }
}

/// An update whose parts are known to be valid.
#[derive(Debug, Clone)]
pub(crate) struct CheckedUpdate {
    pub(crate) id: EntityId,
    pub(super) subtype: Option<Option<Arc<str>>>,
    pub(crate) data: Option<Value>,
    pub(crate) metadata: Option<Map<String, Value>>,
    pub(crate) replace_metadata: bool,
    pub(crate) if_rev: Option<Rev>,
}

impl CheckedUpdate {
    /// The document after this update.
    pub(crate) fn apply(&self, data: &mut Value, metadata: &mut Map<String, Value>, subtype: &mut Option<Arc<str>>) {
        if let Some(new) = &self.subtype {
            subtype.clone_from(new);
        }
        if let Some(new) = &self.data {
            *data = new.clone();
        }
        match &self.metadata {
            Some(new) if self.replace_metadata => *metadata = new.clone(),
            Some(patch) => {
                let mut merged = Value::Object(std::mem::take(metadata));
                json::merge(&mut merged, &Value::Object(patch.clone()));
                if let Value::Object(merged) = merged {
                    *metadata = merged;
                }
            }
            None => {}
        }
    }
}
