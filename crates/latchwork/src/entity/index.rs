//! The index entries of an entity: their keys. The value of each entry is the entity's id.
//!
//! A key is the type's name, a zero byte, the index's number, the encoded values of its fields and the id. The key of a
//! unique value has no id, so only one entity can have it. Index 0 is the list of all entities of a type. The last
//! index number is the index of subtypes.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::entity::document::EntityRecord;
use crate::entity::filter::Field;
use crate::entity::{EntityError, EntityId, Result};
use crate::json;

/// An index as it is declared and stored.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Index {
    /// Its number within the type. A number is never used twice.
    pub(crate) number: u16,
    pub(crate) unique: bool,
    pub(crate) state: IndexState,
    pub(crate) fields: Vec<Field>,
}

/// The state of an index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum IndexState {
    /// Writers maintain it, but it does not yet contain all entities that existed before.
    Building,
    /// It has an entry for every entity of its type.
    Ready,
    /// Writers no longer maintain it, and its entries are being cleared.
    Dropping,
}

/// An entity's entry in an index.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct IndexEntry {
    pub(crate) key: Vec<u8>,
    /// The number of the index.
    pub(crate) index: u16,
    /// True if only one entity may have the key.
    pub(crate) unique: bool,
}

/// The start of every key of an index.
pub(crate) fn prefix(entity_type: &str, number: u16) -> Vec<u8> {
    let mut key = Vec::with_capacity(entity_type.len() + 64);
    key.extend_from_slice(entity_type.as_bytes());
    key.push(0);
    key.extend_from_slice(&number.to_be_bytes());
    key
}

/// Reads the type and the number of the index from a key.
pub(crate) fn read_prefix(key: &[u8]) -> Option<(&str, u16)> {
    let end = key.iter().position(|byte| *byte == 0)?;
    let number = key.get(end + 1..end + 3)?;
    Some((std::str::from_utf8(&key[..end]).ok()?, u16::from_be_bytes([number[0], number[1]])))
}

/// The entry in the list of all entities of a type.
pub(crate) fn listed(entity_type: &str, id: &EntityId) -> Vec<u8> {
    let mut key = prefix(entity_type, 0);
    key.extend_from_slice(id.as_bytes());
    key
}

/// The number of the index of subtypes, which every type has. No declared index gets this number.
pub(crate) const SUBTYPES: u16 = u16::MAX;

/// The start of the keys of all entities with a type and a subtype.
pub(crate) fn subtype_prefix(entity_type: &str, subtype: &str) -> Vec<u8> {
    let mut key = prefix(entity_type, SUBTYPES);
    json::encode(&mut key, Some(&Value::String(subtype.into())));
    key
}

/// The entry of an entity in the index of subtypes, if the entity has a subtype.
pub(crate) fn subtyped(id: &EntityId, record: &EntityRecord) -> Option<IndexEntry> {
    let mut key = subtype_prefix(&record.entity_type, record.subtype.as_deref()?);
    key.extend_from_slice(id.as_bytes());
    Some(IndexEntry { key, index: SUBTYPES, unique: false })
}

impl Index {
    /// The fields as shown in messages.
    pub(crate) fn names(&self) -> String {
        let names: Vec<String> = self.fields.iter().map(ToString::to_string).collect();
        names.join(" and ")
    }

    /// True if writers maintain it.
    pub(crate) fn is_kept(&self) -> bool {
        self.state != IndexState::Dropping
    }

    pub(crate) fn entry(&self, id: &EntityId, record: &EntityRecord, key_bytes: usize) -> Result<IndexEntry> {
        let mut key = prefix(&record.entity_type, self.number);
        // As in SQL, a missing or null value is equal to no other.
        let mut unique = self.unique;
        for field in &self.fields {
            let value = field.find(&record.data, &record.metadata);
            unique &= value.is_some_and(|value| !value.is_null());
            json::encode(&mut key, value);
        }
        if !unique {
            key.extend_from_slice(id.as_bytes());
        }
        if key.len() > key_bytes {
            let (fields, length) = (self.names(), key.len());
            return Err(EntityError::IndexedTooLong { id: id.clone(), fields, length, limit: key_bytes });
        }
        Ok(IndexEntry { key, index: self.number, unique })
    }
}
