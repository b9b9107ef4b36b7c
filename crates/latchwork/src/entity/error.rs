//! The errors of entities, and what each means to a caller.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

use crate::entity::filter::FilterError;
use crate::entity::{EntityId, FailedOp};
use crate::json::JsonError;
use crate::page::CursorError;
use crate::record::unreadable;
use crate::store::{ErrorKind, Generation, Rev, StoreError};

/// The result of an operation on entities.
pub type Result<T, E = EntityError> = std::result::Result<T, E>;

/// Why an operation on entities failed. Nothing was changed, unless the store failed: then the commit may or may not
/// have landed.
#[derive(Debug, Clone, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
#[allow(missing_docs)] // The fields are what the messages say.
pub enum EntityError {
    /// The entity was changed since the rev that the caller knows.
    #[error("entity {id:?} is at rev {actual}, not at {expected}; read it again and retry")]
    RevisionConflict { id: EntityId, expected: Rev, actual: Rev },
    /// The entity does not exist.
    #[error("there is no entity {id:?}")]
    NotFound { id: EntityId },
    /// The id of an add is taken.
    #[error("entity {id:?} exists already, at rev {rev}; update it, or add with if_absent")]
    AlreadyExists { id: EntityId, rev: Rev },
    /// A value that must be unique belongs to another entity.
    #[error("{fields} of entity {id:?} must be unique among {entity_type:?}, and entity {owner:?} has the same")]
    UniqueViolation { id: EntityId, entity_type: String, fields: String, owner: EntityId },
    /// Something was committed after the generation that the caller knows.
    #[error("the store is at generation {actual}, not at {expected}; read again and retry")]
    GenerationConflict { expected: Generation, actual: Generation },
    /// Something that was read through a view has changed.
    #[error("{what} has changed since it was read at generation {read_at}; read again and retry")]
    ReadChanged { what: String, read_at: Generation },
    /// A right that guards the write is lost, for example because a lock was released.
    #[error("nothing was written: {reason}")]
    Fenced { reason: String },
    /// Some checks of the transaction failed. Lists all of them: first those on the whole transaction, then those of
    /// the operations in their order.
    #[error("the transaction was rejected: {}", failed.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Rejected { failed: Vec<FailedOp> },
    /// A read-change-write lost every race that it was allowed to run.
    #[error("entity {id:?} was changed by another writer during each of {tries} tries")]
    RetriesSpent { id: EntityId, tries: u32 },
    /// Other writers moved the entities too often for the operation to land, though the caller asked for no check.
    #[error("other writers wrote the same entities during each of {tries} tries; try again later")]
    Contended { tries: u32 },
    /// The view was used after its release.
    #[error("the view of generation {generation} was released; make a new one")]
    Released { generation: Generation },
    /// The id is invalid.
    #[error("an id must have 1 to {limit} bytes; this one has {length}")]
    Id { length: usize, limit: usize },
    /// The name of the type is invalid.
    #[error("{name:?} cannot name a type: {reason}")]
    TypeName { name: String, reason: Cow<'static, str> },
    /// The subtype is invalid.
    #[error("{subtype:?} cannot be a subtype: {reason}")]
    Subtype { subtype: String, reason: Cow<'static, str> },
    /// The document contains something that JSON cannot hold, or is nested too deeply.
    #[error("{part} of entity {id}: {cause}")]
    Document { id: String, part: Cow<'static, str>, cause: JsonError },
    /// The metadata is not an object.
    #[error("metadata of entity {id} is {found}; it must be an object")]
    Metadata { id: String, found: Cow<'static, str> },
    /// The document is too large to store.
    #[error("entity {id:?} takes {length} bytes; the limit is {limit}")]
    DocumentTooLarge { id: EntityId, length: usize, limit: usize },
    /// The value is too long for its index.
    #[error("{fields} of entity {id:?} makes an index key of {length} bytes; the limit is {limit}")]
    IndexedTooLong { id: EntityId, fields: String, length: usize, limit: usize },
    /// Two operations of one transaction write the same entity.
    #[error("operations {first} and {second} of the transaction write the same entity, {id:?}; make them one")]
    WrittenTwice { id: EntityId, first: usize, second: usize },
    /// A filter or an order is malformed.
    #[error(transparent)]
    Filter(#[from] FilterError),
    /// The cursor does not continue this query.
    #[error(transparent)]
    Cursor(#[from] CursorError),
    /// The query asks for no results.
    #[error("a query's limit must be at least 1")]
    Limit,
    /// The declaration is invalid.
    #[error("the type {entity_type:?} cannot be declared so: {reason}")]
    Declaration { entity_type: String, reason: String },
    /// The entity of an `add_if_missing` does not match its own query.
    #[error("the entity to add does not match the query, so it would be added again each time")]
    AddDoesNotMatch,
    /// The view has read more than one commit can check.
    #[error("the view has read {reads} entities and ranges; one commit checks at most {limit}: read less, by an index")]
    ReadSetTooLarge { reads: usize, limit: usize },
    /// The view given to `since` is not older.
    #[error("generation {older} is not older than {newer}")]
    NotOlder { older: Generation, newer: Generation },
    /// A stored record cannot be read.
    #[error("{place} is damaged: it cannot be read")]
    Corrupt { place: String },
    /// A stored record has a version that this program does not know.
    #[error("{place} has version {found}; this program reads versions 1 to {supported}: use a newer program")]
    UnknownVersion { place: String, found: u8, supported: u8 },
    /// The document does not fit the type it is read as.
    #[error("data of entity {id:?} does not fit: {message}")]
    Mismatch { id: EntityId, message: String },
    /// The store below. Read again, it is [`StoreError::Told`].
    #[error(transparent)]
    Store(#[from] StoreError),
}

unreadable!(EntityError);

impl EntityError {
    /// The class of the failure.
    ///
    /// ```
    /// # use latchwork::entity::EntityError;
    /// # use latchwork::store::ErrorKind;
    /// let error = EntityError::NotFound { id: "ada".into() };
    /// assert_eq!(error.kind(), ErrorKind::NotFound);
    /// ```
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
            // A missing entity will be missing on a retry, too; any other failed check may pass then.
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
            | Cursor(_)
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
