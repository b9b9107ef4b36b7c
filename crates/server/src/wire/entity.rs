//! Entities on the wire: their shapes, and what their errors become.

use axum::http::StatusCode;
use latchwork::entity::{
    Add, Direction, Effect, Entity, EntityError, FailedOp, Moment, OpReceipt, Query, Receipt, Remove, Revision,
    Transaction, TypeSpec, Update,
};
use latchwork::store::{Generation, Rev, Uuid};
use latchwork::{Map, Value};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::wire::problem::{Problem, ProblemCode};
use crate::wire::request::present;

/// An entity.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Entity)]
pub(crate) struct EntityWire {
    /// Unique among all entities of the namespace.
    id: String,
    #[serde(rename = "type")]
    entity_type: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    subtype: Option<String>,
    /// Any JSON.
    #[schema(value_type = Value)]
    data: Value,
    #[schema(value_type = Object)]
    metadata: Map<String, Value>,
    /// The number of writes. It is also the `ETag`: `"r42"`.
    #[serde(rename = "_rev")]
    rev: u64,
    created: MomentWire,
    changed: MomentWire,
}

/// The time of a commit.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Moment)]
pub(crate) struct MomentWire {
    /// In the order of the store.
    generation: u64,
    /// Microseconds since 1970.
    time_us: u64,
}

impl From<Moment> for MomentWire {
    fn from(moment: Moment) -> MomentWire {
        MomentWire { generation: moment.generation.0, time_us: moment.time.0 }
    }
}

impl From<Entity> for EntityWire {
    fn from(entity: Entity) -> EntityWire {
        let Entity { id, entity_type, subtype, data, metadata, rev, created, changed } = entity;
        EntityWire {
            id: id.to_string(),
            entity_type: entity_type.to_string(),
            subtype: subtype.map(|subtype| subtype.to_string()),
            data,
            metadata,
            rev: rev.0,
            created: created.into(),
            changed: changed.into(),
        }
    }
}

/// A version of an entity.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Revision)]
pub(crate) struct RevisionWire {
    rev: u64,
    committed: MomentWire,
    /// The entity from then on; null if it was removed.
    #[schema(required)]
    entity: Option<EntityWire>,
    #[serde(skip_serializing_if = "Option::is_none")]
    author: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

impl From<Revision> for RevisionWire {
    fn from(revision: Revision) -> RevisionWire {
        let Revision { rev, committed, entity, meta, .. } = revision;
        let reason = meta.reason.map(|reason| Note::read(&reason).0.to_string()).filter(|reason| !reason.is_empty());
        let (committed, entity) = (committed.into(), entity.map(EntityWire::from));
        RevisionWire { rev: rev.0, committed, entity, author: meta.author, reason }
    }
}

/// The reason that history keeps of a commit, and the call that made the commit. History has one text for both, so the
/// call stands at its end: `offer accepted [call 01890a5d…]`.
pub(crate) struct Note;

impl Note {
    pub(crate) fn write(reason: Option<&str>, call: &str) -> String {
        match reason {
            Some(reason) => format!("{reason} [call {call}]"),
            None => format!("[call {call}]"),
        }
    }

    /// The reason and the call.
    pub(crate) fn read(text: &str) -> (&str, Option<&str>) {
        let marked = text.strip_suffix(']').and_then(|text| text.rsplit_once("[call "));
        match marked.filter(|(_, call)| call.len() == 36 && call.parse::<Uuid>().is_ok()) {
            Some((reason, call)) => (reason.trim_end(), Some(call)),
            None => (text, None),
        }
    }
}

/// An entity to add.
#[derive(Debug, Clone, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewEntity {
    /// Without one, a UUID is generated.
    pub(crate) id: Option<String>,
    #[serde(rename = "type")]
    entity_type: String,
    subtype: Option<String>,
    #[serde(default)]
    #[schema(value_type = Value)]
    data: Value,
    #[serde(default)]
    #[schema(value_type = Object)]
    metadata: Map<String, Value>,
    /// If true, an entity that exists already is left as it is.
    #[serde(default)]
    if_absent: bool,
}

impl NewEntity {
    pub(crate) fn into_add(self) -> Add {
        let NewEntity { id, entity_type, subtype, data, metadata, if_absent } = self;
        let add = Add::new(entity_type).data(data).metadata(metadata).if_absent(if_absent);
        let add = id.into_iter().fold(add, Add::id);
        subtype.into_iter().fold(add, Add::subtype)
    }
}

/// The whole content of an entity.
#[derive(Debug, Clone, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct EntityContent {
    /// The type never changes: of an entity that exists, it must be the same.
    #[serde(rename = "type")]
    pub(crate) entity_type: String,
    subtype: Option<String>,
    #[serde(default)]
    #[schema(value_type = Value)]
    data: Value,
    #[serde(default)]
    #[schema(value_type = Object)]
    metadata: Map<String, Value>,
}

impl EntityContent {
    pub(crate) fn into_add(self, id: &str) -> Add {
        let EntityContent { entity_type, subtype, data, metadata } = self;
        let add = Add::new(entity_type).id(id).data(data).metadata(metadata);
        subtype.into_iter().fold(add, Add::subtype)
    }

    pub(crate) fn into_update(self, id: &str) -> Update {
        let EntityContent { subtype, data, metadata, .. } = self;
        let update = Update::new(id).data(data).replace_metadata(metadata);
        match subtype {
            Some(subtype) => update.subtype(subtype),
            None => update.without_subtype(),
        }
    }
}

/// A change of an entity. What is missing stays as it is.
#[derive(Debug, Clone, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct EntityChange {
    /// Null removes the subtype.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<String>)]
    subtype: Option<Option<String>>,
    /// Replaces the data.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Value)]
    data: Option<Value>,
    /// Merged into the metadata as a JSON merge patch (RFC 7396): null removes.
    #[schema(value_type = Option<Object>)]
    metadata: Option<Map<String, Value>>,
}

impl EntityChange {
    pub(crate) fn into_update(self, id: &str) -> Update {
        let EntityChange { subtype, data, metadata } = self;
        let update = data.into_iter().fold(Update::new(id), Update::data);
        let update = metadata.into_iter().fold(update, Update::metadata);
        match subtype {
            Some(Some(subtype)) => update.subtype(subtype),
            Some(None) => update.without_subtype(),
            None => update,
        }
    }
}

/// Which entities are wanted.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct EntityQuery {
    /// Without a type, all entities are read.
    #[serde(rename = "type")]
    entity_type: Option<String>,
    subtype: Option<String>,
    /// A condition, such as `{"data.age": {"at_least": 18}}`.
    #[schema(value_type = Option<Object>)]
    filter: Option<Value>,
    #[serde(default)]
    order: Vec<EntityOrder>,
}

/// One part of an order.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct EntityOrder {
    /// Such as `data.age`.
    path: String,
    #[serde(default)]
    descending: bool,
}

impl EntityQuery {
    pub(crate) fn into_query(self) -> Query {
        let EntityQuery { entity_type, subtype, filter, order } = self;
        let query = entity_type.map_or_else(Query::all, Query::of);
        let query = subtype.into_iter().fold(query, Query::subtype);
        let query = filter.into_iter().fold(query, Query::filter);
        order.into_iter().fold(query, |query, EntityOrder { path, descending }| {
            let direction = if descending { Direction::Descending } else { Direction::Ascending };
            query.order_by(&path, direction)
        })
    }
}

/// At which point in time entities are read.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct AsOfQuery {
    /// As this generation of the store left it.
    pub(crate) as_of: Option<u64>,
    /// As it was at this time, in microseconds since 1970.
    pub(crate) as_of_us: Option<u64>,
}

/// How a find is answered.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Plan)]
pub(crate) struct PlanWire {
    /// The plan in words.
    pub(crate) plan: String,
    /// True if no index helps.
    pub(crate) scans: bool,
}

/// Operations that land together or not at all.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct EntityTransaction {
    #[schema(max_items = 10000)]
    pub(crate) ops: Vec<EntityOp>,
    /// The transaction lands only if nothing was committed to the store after this generation.
    if_at_generation: Option<u64>,
    /// Kept by history. By default the name of the token.
    pub(crate) author: Option<String>,
    /// Kept by history.
    pub(crate) reason: Option<String>,
}

/// One operation of a transaction.
#[derive(Debug, Clone, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum EntityOp {
    /// Adds an entity.
    Add(NewEntity),
    /// Changes an entity.
    Update(UpdateOp),
    /// Removes an entity.
    Remove(RemoveOp),
    /// The transaction lands only if the entity exists.
    RequireExists(RequireOp),
    /// The transaction lands only if the entity is at this rev.
    RequireRev(RequireRevOp),
    /// The transaction lands only if the entity does not exist.
    RequireAbsent(RequireOp),
}

/// The change of an entity in a transaction.
#[derive(Debug, Clone, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct UpdateOp {
    id: String,
    /// Null removes the subtype.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Option<String>)]
    subtype: Option<Option<String>>,
    /// Replaces the data.
    #[serde(default, deserialize_with = "present")]
    #[schema(value_type = Value)]
    data: Option<Value>,
    /// Merged into the metadata.
    #[schema(value_type = Option<Object>)]
    metadata: Option<Map<String, Value>>,
    /// The rev at which the entity must be.
    if_rev: Option<u64>,
}

/// The removal of an entity in a transaction.
#[derive(Debug, Clone, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct RemoveOp {
    id: String,
    /// The rev at which the entity must be.
    if_rev: Option<u64>,
}

/// A requirement on an entity that is not written.
#[derive(Debug, Clone, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct RequireOp {
    id: String,
}

/// A requirement on the rev of an entity that is not written.
#[derive(Debug, Clone, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct RequireRevOp {
    id: String,
    rev: u64,
}

impl EntityOp {
    /// The entity that is meant; `None` for an add without an id.
    pub(crate) fn id(&self) -> Option<&str> {
        match self {
            EntityOp::Add(add) => add.id.as_deref(),
            EntityOp::Update(update) => Some(&update.id),
            EntityOp::Remove(remove) => Some(&remove.id),
            EntityOp::RequireExists(require) | EntityOp::RequireAbsent(require) => Some(&require.id),
            EntityOp::RequireRev(require) => Some(&require.id),
        }
    }

    fn add_to(self, transaction: Transaction) -> Transaction {
        match self {
            EntityOp::Add(add) => transaction.add(add.into_add()),
            EntityOp::Update(UpdateOp { id, subtype, data, metadata, if_rev }) => {
                let update = EntityChange { subtype, data, metadata }.into_update(&id);
                transaction.update(if_rev.map(Rev).into_iter().fold(update, Update::if_rev))
            }
            EntityOp::Remove(RemoveOp { id, if_rev }) => {
                transaction.remove(if_rev.map(Rev).into_iter().fold(Remove::new(id), Remove::if_rev))
            }
            EntityOp::RequireExists(RequireOp { id }) => transaction.require_exists(id),
            EntityOp::RequireRev(RequireRevOp { id, rev }) => transaction.require_rev(id, Rev(rev)),
            EntityOp::RequireAbsent(RequireOp { id }) => transaction.require_absent(id),
        }
    }
}

impl EntityTransaction {
    /// Gives ids to the adds that have none: the same for each attempt at the call.
    pub(crate) fn name_new_entities(&mut self, call: Uuid) {
        for (index, op) in self.ops.iter_mut().enumerate() {
            if let EntityOp::Add(NewEntity { id: id @ None, .. }) = op {
                *id = Some(format!("{call}-{index}"));
            }
        }
    }

    /// The operations and their condition, without author and reason.
    pub(crate) fn into_transaction(self) -> Transaction {
        let transaction = self.ops.into_iter().fold(Transaction::new(), |all, op| op.add_to(all));
        self.if_at_generation.map(Generation).into_iter().fold(transaction, Transaction::if_at_generation)
    }
}

/// The proof that a transaction landed.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = EntityReceipt)]
pub(crate) struct ReceiptWire {
    pub(crate) generation: u64,
    /// Microseconds since 1970.
    pub(crate) time_us: u64,
    /// The effect of each operation, in their order.
    pub(crate) ops: Vec<EffectWire>,
}

impl From<Receipt> for ReceiptWire {
    fn from(receipt: Receipt) -> ReceiptWire {
        let Receipt { generation, time, ops } = receipt;
        ReceiptWire { generation: generation.0, time_us: time.0, ops: ops.into_iter().map(EffectWire::from).collect() }
    }
}

/// The effect of one operation.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = EntityEffect)]
pub(crate) struct EffectWire {
    pub(crate) id: String,
    /// The rev from this commit on. Of a requirement, the rev that was found; 0 if the entity did not exist.
    pub(crate) rev: u64,
    pub(crate) effect: EffectWord,
}

/// What an operation did.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum EffectWord {
    Added,
    Existing,
    Updated,
    Removed,
    Checked,
}

impl From<OpReceipt> for EffectWire {
    fn from(receipt: OpReceipt) -> EffectWire {
        let OpReceipt { id, rev, effect } = receipt;
        EffectWire { id: id.to_string(), rev: rev.0, effect: effect.into() }
    }
}

impl From<Effect> for EffectWord {
    fn from(effect: Effect) -> EffectWord {
        match effect {
            Effect::Added => EffectWord::Added,
            Effect::Existing => EffectWord::Existing,
            Effect::Updated => EffectWord::Updated,
            Effect::Removed => EffectWord::Removed,
            Effect::Checked => EffectWord::Checked,
        }
    }
}

/// The indexes that a type needs. Each is a list of fields, such as `["data.city", "data.age"]`.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct TypeDeclaration {
    /// No two entities of the type have the same values in all fields of one of these.
    #[serde(default)]
    unique: Vec<Vec<String>>,
    #[serde(default)]
    index: Vec<Vec<String>>,
}

impl TypeDeclaration {
    pub(crate) fn into_spec(self, name: String) -> TypeSpec {
        let spec = self.unique.into_iter().fold(TypeSpec::new(name), TypeSpec::unique);
        self.index.into_iter().fold(spec, TypeSpec::index)
    }
}

impl From<EntityError> for Problem {
    fn from(error: EntityError) -> Problem {
        let detail = error.to_string();
        let problem = |code| Problem::new(code, detail.clone());
        match &error {
            EntityError::Store(store) => store.clone().into(),
            EntityError::Cursor(cursor) => cursor.clone().into(),
            EntityError::RevisionConflict { id, expected, actual } => problem(ProblemCode::RevisionConflict)
                .with("id", id)
                .with("expected_rev", expected.0)
                .with("current_rev", actual.0),
            EntityError::NotFound { id } => problem(ProblemCode::NotFound).with("id", id),
            EntityError::AlreadyExists { id, rev } => {
                problem(ProblemCode::AlreadyExists).with("id", id).with("current_rev", rev.0)
            }
            EntityError::UniqueViolation { id, fields, owner, .. } => {
                problem(ProblemCode::UniqueViolation).with("id", id).with("fields", fields).with("owner", owner)
            }
            EntityError::GenerationConflict { expected, actual } => problem(ProblemCode::RevisionConflict)
                .with("expected_generation", expected.0)
                .with("current_generation", actual.0),
            EntityError::Fenced { .. } => problem(ProblemCode::Fenced),
            EntityError::Contended { .. } | EntityError::RetriesSpent { .. } => problem(ProblemCode::Contended),
            EntityError::DocumentTooLarge { .. } => problem(ProblemCode::TooLarge),
            EntityError::Rejected { failed } => {
                let is_missing = error.kind() == latchwork::store::ErrorKind::NotFound;
                let rejected = problem(ProblemCode::Rejected).with("failed", failures(failed));
                if is_missing { rejected.at_status(StatusCode::NOT_FOUND) } else { rejected }
            }
            _ => Problem::of_kind(error.kind(), &error),
        }
    }
}

/// Each failed check as a problem, with the operation that it belongs to.
fn failures(failed: &[FailedOp]) -> Vec<Value> {
    let shown = |failed: &FailedOp| Problem::from(failed.error.clone()).with("op", failed.op).document();
    failed.iter().map(shown).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_note_keeps_the_reason_and_the_call() {
        let call = "01890a5d-ac96-774b-bcce-b302099a8057";
        for reason in [None, Some("offer accepted"), Some("see [call me]")] {
            let text = Note::write(reason, call);
            assert_eq!(Note::read(&text), (reason.unwrap_or_default(), Some(call)));
        }
        assert_eq!(Note::read("see [call me]"), ("see [call me]", None));
    }

    #[test]
    fn a_field_that_is_null_is_not_a_field_that_is_missing() {
        let change: EntityChange = serde_json::from_str(r#"{"subtype": null, "data": null}"#).unwrap();
        assert_eq!((change.subtype, change.data), (Some(None), Some(Value::Null)));
        let change: EntityChange = serde_json::from_str("{}").unwrap();
        assert_eq!((change.subtype, change.data), (None, None));
        assert!(serde_json::from_str::<EntityChange>(r#"{"dat": 1}"#).is_err());
    }

    #[test]
    fn the_shape_is_the_json_of_the_library() {
        let entity: Entity = serde_json::from_value(latchwork::json!({
            "id": "ada", "type": "person", "subtype": "author", "data": {"x": 1}, "metadata": {"y": 2}, "_rev": 3,
            "created": {"generation": 4, "time_us": 5}, "changed": {"generation": 6, "time_us": 7},
        }))
        .unwrap();
        let expected = serde_json::to_value(&entity).unwrap();
        assert_eq!(serde_json::to_value(EntityWire::from(entity)).unwrap(), expected);
    }
}
