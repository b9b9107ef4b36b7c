//! Transactions as JSON, for a request that is made now and carried out later. What holds only now, a right or a read
//! set, cannot be written.

use std::sync::Arc;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use crate::entity::op::{EntityOp, Require, Required};
use crate::entity::{Add, EntityError, EntityId, Meta, Remove, Result, Transaction, Update};
use crate::store::Rev;

/// A transaction as it is written.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct WrittenTransaction {
    ops: Vec<WrittenOp>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    author: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
enum WrittenOp {
    Add {
        id: EntityId,
        #[serde(rename = "type")]
        entity_type: Arc<str>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        subtype: Option<Arc<str>>,
        data: Value,
        #[serde(default, skip_serializing_if = "Map::is_empty")]
        metadata: Map<String, Value>,
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        if_absent: bool,
    },
    Update {
        id: EntityId,
        /// Null removes it.
        #[serde(default, deserialize_with = "given", skip_serializing_if = "Option::is_none")]
        subtype: Option<Option<Arc<str>>>,
        #[serde(default, deserialize_with = "given", skip_serializing_if = "Option::is_none")]
        data: Option<Value>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        metadata: Option<Map<String, Value>>,
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        replace_metadata: bool,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        if_rev: Option<u64>,
    },
    Remove {
        id: EntityId,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        if_rev: Option<u64>,
    },
    Exists {
        id: EntityId,
    },
    AtRev {
        id: EntityId,
        rev: u64,
    },
    Absent {
        id: EntityId,
    },
}

/// Tells a null from a field that is missing.
fn given<'de, T: Deserialize<'de>, D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Option<T>, D::Error> {
    T::deserialize(deserializer).map(Some)
}

/// Why a transaction cannot be written.
#[derive(Debug)]
pub(crate) enum NotWritten {
    /// It depends on something that can only be checked now.
    OnlyNow(&'static str),
    Invalid(EntityError),
}

impl From<EntityError> for NotWritten {
    fn from(error: EntityError) -> NotWritten {
        NotWritten::Invalid(error)
    }
}

impl WrittenTransaction {
    /// Writes a transaction. An entity that is added without an id gets one from `new_id`.
    pub(crate) fn of(
        transaction: Transaction,
        mut new_id: impl FnMut() -> EntityId,
    ) -> std::result::Result<WrittenTransaction, NotWritten> {
        if !transaction.fences.is_empty() {
            return Err(NotWritten::OnlyNow("a right that may be lost, such as a lock"));
        }
        if !transaction.reads.is_empty() {
            return Err(NotWritten::OnlyNow("what was read through a view"));
        }
        if transaction.at_generation.is_some() {
            return Err(NotWritten::OnlyNow("the generation of the store"));
        }
        let Meta { author, reason } = transaction.meta;
        let ops: Result<Vec<WrittenOp>> = transaction.ops.into_iter().map(|op| written(op, &mut new_id)).collect();
        Ok(WrittenTransaction { ops: ops?, author, reason })
    }

    /// The first entity that it is about.
    pub(crate) fn name(&self) -> &str {
        self.ops.first().map_or("", |op| match op {
            WrittenOp::Add { id, .. }
            | WrittenOp::Update { id, .. }
            | WrittenOp::Remove { id, .. }
            | WrittenOp::Exists { id }
            | WrittenOp::AtRev { id, .. }
            | WrittenOp::Absent { id } => id,
        })
    }

    /// The transaction that was written.
    pub(crate) fn read(self) -> Transaction {
        let mut transaction = Transaction::new();
        (transaction.meta.author, transaction.meta.reason) = (self.author, self.reason);
        self.ops.into_iter().fold(transaction, read)
    }
}

fn written(op: EntityOp, new_id: &mut impl FnMut() -> EntityId) -> Result<WrittenOp> {
    Ok(match op {
        EntityOp::Add(mut add) => {
            let id = add.id.take().unwrap_or_else(new_id);
            add.id = Some(id.clone());
            let checked = add.checked(0)?;
            let subtype = checked.subtype.clone();
            WrittenOp::Add {
                id,
                subtype,
                entity_type: checked.entity_type,
                data: checked.data,
                metadata: checked.metadata,
                if_absent: checked.if_absent,
            }
        }
        EntityOp::Update(update) => {
            let checked = update.checked()?;
            WrittenOp::Update {
                id: checked.id,
                subtype: checked.subtype,
                data: checked.data,
                metadata: checked.metadata,
                replace_metadata: checked.replace_metadata,
                if_rev: checked.if_rev.map(|rev| rev.0),
            }
        }
        EntityOp::Remove(Remove { id, if_rev, .. }) => {
            id.validate()?;
            WrittenOp::Remove { id, if_rev: if_rev.map(|rev| rev.0) }
        }
        EntityOp::Require(Require { id, what }) => {
            id.validate()?;
            match what {
                Required::Exists => WrittenOp::Exists { id },
                Required::AtRev(rev) => WrittenOp::AtRev { id, rev: rev.0 },
                Required::Absent => WrittenOp::Absent { id },
            }
        }
    })
}

fn read(transaction: Transaction, op: WrittenOp) -> Transaction {
    match op {
        WrittenOp::Add { id, entity_type, subtype, data, metadata, if_absent } => {
            let add = Add::new(entity_type).id(id).data(data).metadata(metadata).if_absent(if_absent);
            transaction.add(match subtype {
                Some(subtype) => add.subtype(subtype),
                None => add,
            })
        }
        WrittenOp::Update { id, subtype, data, metadata, replace_metadata, if_rev } => {
            let mut update = Update::new(id);
            update = match subtype {
                Some(Some(subtype)) => update.subtype(subtype),
                Some(None) => update.without_subtype(),
                None => update,
            };
            if let Some(data) = data {
                update = update.data(data);
            }
            update = match metadata {
                Some(metadata) if replace_metadata => update.replace_metadata(metadata),
                Some(metadata) => update.metadata(metadata),
                None => update,
            };
            transaction.update(match if_rev {
                Some(rev) => update.if_rev(Rev(rev)),
                None => update,
            })
        }
        WrittenOp::Remove { id, if_rev } => transaction.remove(match if_rev {
            Some(rev) => Remove::new(id).if_rev(Rev(rev)),
            None => Remove::new(id),
        }),
        WrittenOp::Exists { id } => transaction.require_exists(id),
        WrittenOp::AtRev { id, rev } => transaction.require_rev(id, Rev(rev)),
        WrittenOp::Absent { id } => transaction.require_absent(id),
    }
}
