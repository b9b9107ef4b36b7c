//! An entity as callers see it, and its stored record.

use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::entity::{EntityError, Result};
use crate::id::text_id;
use crate::json;
use crate::record::{self, BadRecord, Record as _};
use crate::store::{Bytes, Generation, Item, Rev, Timestamp, Uuid};

/// The longest id, in bytes.
pub const ID_BYTES: usize = 512;

text_id!(
    /// Makes the id of an entity: any text of 1 to 512 bytes.
    EntityId
);

impl EntityId {
    /// The text.
    ///
    /// ```
    /// # use latchwork::entity::EntityId;
    /// assert_eq!(EntityId::from("order-7").as_str(), "order-7");
    /// ```
    pub fn as_str(&self) -> &str {
        &self.0
    }

    pub(crate) fn validate(&self) -> Result<()> {
        match self.0.len() {
            1..=ID_BYTES => Ok(()),
            length => Err(EntityError::Id { length, limit: ID_BYTES }),
        }
    }

    /// Reads the id from a stored index entry or key.
    pub(crate) fn from_stored(bytes: &[u8]) -> Result<EntityId> {
        match std::str::from_utf8(bytes) {
            Ok(text) => Ok(text.into()),
            Err(_) => Err(EntityError::corrupt(format!("the id {}", bytes.escape_ascii()))),
        }
    }
}

impl AsRef<[u8]> for EntityId {
    fn as_ref(&self) -> &[u8] {
        self.0.as_bytes()
    }
}

impl From<Uuid> for EntityId {
    fn from(uuid: Uuid) -> EntityId {
        uuid.to_string().into()
    }
}

impl PartialEq<str> for EntityId {
    fn eq(&self, other: &str) -> bool {
        &*self.0 == other
    }
}

impl PartialEq<&str> for EntityId {
    fn eq(&self, other: &&str) -> bool {
        &*self.0 == *other
    }
}

/// The time of a commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Moment {
    /// The generation, in the store's order.
    pub generation: Generation,
    /// The time, by the store's clock.
    pub time: Timestamp,
}

/// A versioned document.
///
/// As JSON it has `id`, `type`, `subtype` if it has one, `data`, `metadata`, `_rev`, `created` and `changed`. Without a
/// `_rev` it reads as rev 1.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Entity {
    /// Its id, unique among all entities of the store.
    pub id: EntityId,
    /// Its type.
    #[serde(rename = "type")]
    pub entity_type: Arc<str>,
    /// Its subtype, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub subtype: Option<Arc<str>>,
    /// Its data.
    pub data: Value,
    /// Its metadata.
    #[serde(default)]
    pub metadata: Map<String, Value>,
    /// The number of writes. It starts at 1, rises with every change and never returns to an earlier value, also not
    /// after the entity was removed and added again.
    #[serde(rename = "_rev", default = "first_rev")]
    pub rev: Rev,
    /// When it was added.
    #[serde(with = "MomentJson", default)]
    pub created: Moment,
    /// When it was last changed.
    #[serde(with = "MomentJson", default)]
    pub changed: Moment,
}

impl Entity {
    /// The data as a value of your own type.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::entity::{Add, Entities};
    /// # use latchwork::json;
    /// # use latchwork::store::Store;
    /// # let entities = Entities::on(&Store::memory().await?).await?;
    /// # entities.add(Add::new("person").id("ada").data(json!({"visits": 0}))).await?;
    /// # use std::collections::BTreeMap;
    /// let ada = entities.get("ada").await?.unwrap();
    /// let data: BTreeMap<String, u32> = ada.parse()?;
    /// assert_eq!(data["visits"], 0);
    /// # Ok(()) }
    /// ```
    pub fn parse<T: DeserializeOwned>(&self) -> Result<T> {
        T::deserialize(&self.data)
            .map_err(|error| EntityError::Mismatch { id: self.id.clone(), message: error.to_string() })
    }

    pub(crate) fn decode(id: EntityId, item: &Item) -> Result<Entity> {
        Ok(EntityRecord::of(&id, &item.value)?.into_entity(
            id,
            item.rev,
            Moment { generation: item.generation, time: item.time },
        ))
    }
}

fn first_rev() -> Rev {
    Rev(1)
}

/// The JSON form of a moment.
#[derive(Serialize, Deserialize)]
#[serde(remote = "Moment")]
struct MomentJson {
    generation: Generation,
    #[serde(rename = "time_us")]
    time: Timestamp,
}

/// An entity without the fields that the store itself adds.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct EntityRecord {
    pub(crate) entity_type: Arc<str>,
    pub(crate) subtype: Option<Arc<str>>,
    /// Zero in a record that is about to be added: the store puts it in.
    pub(crate) created: Moment,
    pub(crate) data: Value,
    pub(crate) metadata: Map<String, Value>,
}

/// The encoding of a record, after a byte for the version and the time of the add. Version 2 has the subtype behind it.
#[derive(Serialize, Deserialize)]
struct EncodedEntity<'a> {
    entity_type: &'a str,
    /// JSON text.
    data: &'a [u8],
    /// JSON text of an object, or nothing for an empty one.
    metadata: &'a [u8],
}

impl EntityRecord {
    /// The offset of the time of the add in an encoded record: generation and time, 16 bytes.
    pub(crate) const STAMP: usize = 1;

    /// Reads the stored record of the entity with this id.
    pub(crate) fn of(id: &EntityId, stored: &[u8]) -> Result<EntityRecord, BadRecord> {
        EntityRecord::decode(stored).map_err(|why| why.at(format!("entity {id:?}")))
    }

    pub(crate) fn into_entity(self, id: EntityId, rev: Rev, changed: Moment) -> Entity {
        let EntityRecord { entity_type, subtype, created, data, metadata } = self;
        Entity { id, entity_type, subtype, data, metadata, rev, created, changed }
    }
}

/// The versions of a record without and with a subtype.
const PLAIN: u8 = 1;
const SUBTYPED: u8 = 2;

impl crate::record::Record for EntityRecord {
    const VERSION: u8 = SUBTYPED;

    fn encode(&self) -> Bytes {
        let json = "JSON values with string keys can be written";
        let data = serde_json::to_vec(&self.data).expect(json);
        let metadata =
            if self.metadata.is_empty() { Vec::new() } else { serde_json::to_vec(&self.metadata).expect(json) };
        let stored = EncodedEntity { entity_type: &self.entity_type, data: &data, metadata: &metadata };
        let mut out = Vec::with_capacity(data.len() + metadata.len() + self.entity_type.len() + 32);
        out.push(if self.subtype.is_some() { SUBTYPED } else { PLAIN });
        out.extend_from_slice(&self.created.generation.0.to_be_bytes());
        out.extend_from_slice(&self.created.time.0.to_be_bytes());
        let written = "a record can be written to memory";
        let out = postcard::to_extend(&stored, out).expect(written);
        match &self.subtype {
            Some(subtype) => postcard::to_extend(&**subtype, out).expect(written).into(),
            None => out.into(),
        }
    }

    fn read(version: u8, fields: &[u8]) -> Option<EntityRecord> {
        let (generation, rest) = fields.split_first_chunk::<8>()?;
        let (time, rest) = rest.split_first_chunk::<8>()?;
        let (generation, time) = (u64::from_be_bytes(*generation), u64::from_be_bytes(*time));
        let created = Moment { generation: Generation(generation), time: Timestamp(time) };
        let (stored, rest): (EncodedEntity<'_>, _) = postcard::take_from_bytes(rest).ok()?;
        let subtype = match version {
            PLAIN if rest.is_empty() => None,
            SUBTYPED => Some(record::read_all::<&str>(rest)?.into()),
            _ => return None,
        };
        let metadata = if stored.metadata.is_empty() { Map::new() } else { json::parse_stored(stored.metadata)? };
        Some(EntityRecord {
            entity_type: stored.entity_type.into(),
            subtype,
            created,
            data: json::parse_stored(stored.data)?,
            metadata,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_record_comes_back_as_it_was_stored() {
        let deep = (0..127).fold(json!(1), |inner, _| json!([inner]));
        for data in [json!(null), json!({"a": [1, 2.5, "x"], "b": -0.0}), json!(u64::MAX), json!(5e-324), deep] {
            for created in [Moment::default(), Moment { generation: Generation(3), time: Timestamp(u64::MAX) }] {
                for metadata in [Map::new(), Map::from_iter([("k".to_string(), json!({"n": null}))])] {
                    for subtype in [None, Some("s".into())] {
                        let (data, metadata) = (data.clone(), metadata.clone());
                        let record = EntityRecord { entity_type: "t".into(), subtype, created, data, metadata };
                        assert_eq!(record.encode()[0], if record.subtype.is_some() { 2 } else { 1 });
                        assert_eq!(EntityRecord::decode(&record.encode()), Ok(record));
                    }
                }
            }
        }
        assert!(EntityRecord::decode(&[1, 0]).is_err());
    }
}
