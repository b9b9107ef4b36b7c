//! What can go wrong with entities, and what each failure means to a caller.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use crate::entity::filter::FilterError;
use crate::entity::{EntityId, FailedOp};
use crate::json::JsonError;
use crate::record::unreadable;
use crate::store::{ErrorKind, Generation, Rev, StoreError};

/// The result of an operation on entities.
pub type Result<T, E = EntityError> = std::result::Result<T, E>;

/// Why an operation on entities did not happen. Nothing was changed, unless it is the store that failed: then a commit
/// may or may not have landed.
#[derive(Debug, Clone, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
#[allow(missing_docs)] // The fields are what the messages say.
pub enum EntityError {
    /// The entity was changed since the rev that the caller knows.
    #[error("entity {id:?} is at rev {actual}, not at {expected}; read it again and decide anew")]
    RevisionConflict { id: EntityId, expected: Rev, actual: Rev },
    /// There is no such entity.
    #[error("there is no entity {id:?}")]
    NotFound { id: EntityId },
    /// An add of an id that is taken.
    #[error("entity {id:?} exists already, at rev {rev}; update it, or add with if_absent")]
    AlreadyExists { id: EntityId, rev: Rev },
    /// A value that must be unique belongs to another entity.
    #[error("{fields} of entity {id:?} must be unique among {entity_type:?}, and entity {owner:?} has the same")]
    UniqueViolation { id: EntityId, entity_type: String, fields: String, owner: EntityId },
    /// Something was committed since the generation that the caller knows.
    #[error("the store is at generation {actual}, not at {expected}; read again and decide anew")]
    GenerationConflict { expected: Generation, actual: Generation },
    /// Something that was read through a view has changed since.
    #[error("{what} has changed since it was read at generation {read_at}; read again and decide anew")]
    ReadChanged { what: String, read_at: Generation },
    /// A right that the write was guarded by is lost, such as a lock that was released or taken away.
    #[error("nothing was written: {reason}")]
    Fenced { reason: String },
    /// A transaction of which some checks failed: all of them, those on the whole transaction first, then in the order
    /// of the operations.
    #[error("the transaction was rejected: {}", failed.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Rejected { failed: Vec<FailedOp> },
    /// A read, change, write that lost every race it was allowed to run.
    #[error("entity {id:?} was changed by somebody else each of the {tries} times this was tried")]
    RetriesSpent { id: EntityId, tries: u32 },
    /// What was not asked to be checked moved too often for the operation to land.
    #[error("others wrote the same entities each of the {tries} times this was tried; try again later")]
    Contended { tries: u32 },
    /// A view that was used after it was let go.
    #[error("the view of generation {generation} was released; make a new one")]
    Released { generation: Generation },
    /// An id that cannot be.
    #[error("an id is 1 to {limit} bytes of text; this one has {length}")]
    Id { length: usize, limit: usize },
    /// The name of a type that cannot be.
    #[error("{name:?} cannot name a type: {reason}")]
    TypeName { name: String, reason: Cow<'static, str> },
    /// A subtype that cannot be.
    #[error("{subtype:?} cannot be a subtype: {reason}")]
    Subtype { subtype: String, reason: Cow<'static, str> },
    /// A document with something in it that JSON cannot hold, or nested too deeply.
    #[error("{part} of entity {id}: {cause}")]
    Document { id: String, part: Cow<'static, str>, cause: JsonError },
    /// Metadata that is no object.
    #[error("metadata of entity {id} is {found}; it must be an object")]
    Metadata { id: String, found: Cow<'static, str> },
    /// A document that is too large to store.
    #[error("entity {id:?} takes {length} bytes; the limit is {limit}")]
    DocumentTooLarge { id: EntityId, length: usize, limit: usize },
    /// A value that is too long for the index it belongs into.
    #[error("{fields} of entity {id:?} makes an index key of {length} bytes; the limit is {limit}")]
    IndexedTooLong { id: EntityId, fields: String, length: usize, limit: usize },
    /// Two operations of one transaction that write the same entity.
    #[error("operations {first} and {second} of the transaction write the same entity, {id:?}; make them one")]
    WrittenTwice { id: EntityId, first: usize, second: usize },
    /// A filter or an order that cannot be understood.
    #[error(transparent)]
    Filter(#[from] FilterError),
    /// A cursor that does not continue this query.
    #[error("this cursor cannot be used here: {reason}")]
    Cursor { reason: Cow<'static, str> },
    /// A query that asks for nothing.
    #[error("a query's limit must be at least 1")]
    Limit,
    /// A declaration that cannot be.
    #[error("the type {entity_type:?} cannot be declared so: {reason}")]
    Declaration { entity_type: String, reason: String },
    /// `add_if_missing` with an entity that its own query would not find.
    #[error("the entity to add does not match the query, so it would be added again each time")]
    AddDoesNotMatch,
    /// More was read through a view than one commit can check.
    #[error("the view has read {reads} entities and ranges; one commit checks at most {limit}: read less, by an index")]
    ReadSetTooLarge { reads: usize, limit: usize },
    /// `since` a view that is not older.
    #[error("generation {older} is not older than {newer}")]
    NotOlder { older: Generation, newer: Generation },
    /// A stored record that cannot be read.
    #[error("{place} is damaged: it cannot be read")]
    Corrupt { place: String },
    /// A stored record of a version that this program does not know.
    #[error("{place} has version {found}; this program reads versions 1 to {supported}: use a newer program")]
    UnknownVersion { place: String, found: u8, supported: u8 },
    /// A document that does not fit the type it is read as.
    #[error("data of entity {id:?} does not fit: {message}")]
    Mismatch { id: EntityId, message: String },
    /// The store below. Read again, it is [`StoreError::Told`].
    #[error(transparent)]
    Store(#[from] StoreError),
}

unreadable!(EntityError);

impl EntityError {
    /// The class of the failure.
    pub fn kind(&self) -> ErrorKind {
        use EntityError::*;
        match self {
            RevisionConflict { .. }
            | AlreadyExists { .. }
            | UniqueViolation { .. }
            | GenerationConflict { .. }
            | ReadChanged { .. }
            | Fenced { .. }
            | RetriesSpent { .. }
            | Contended { .. } => ErrorKind::Conflict,
            // What is not there will not be there on a retry either; anything else may.
            Rejected { failed } => {
                let missing = failed.iter().any(|failed| matches!(failed.error, NotFound { .. }));
                if missing { ErrorKind::NotFound } else { ErrorKind::Conflict }
            }
            NotFound { .. } => ErrorKind::NotFound,
            Released { .. }
            | Id { .. }
            | TypeName { .. }
            | Subtype { .. }
            | Document { .. }
            | Metadata { .. }
            | DocumentTooLarge { .. }
            | IndexedTooLong { .. }
            | WrittenTwice { .. }
            | Filter(_)
            | Cursor { .. }
            | Limit
            | Declaration { .. }
            | AddDoesNotMatch
            | ReadSetTooLarge { .. }
            | NotOlder { .. }
            | UnknownVersion { .. }
            | Mismatch { .. } => ErrorKind::Invalid,
            Corrupt { .. } => ErrorKind::Corrupt,
            Store(error) => error.kind(),
        }
    }

    pub(crate) fn corrupt(place: impl Into<String>) -> EntityError {
        EntityError::Corrupt { place: place.into() }
    }
}
