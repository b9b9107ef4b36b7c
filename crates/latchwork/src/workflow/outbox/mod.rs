//! The outbox of a store in PostgreSQL: requests that the user's own transactions write, and that an engine does once
//! those are committed. This file owns its errors and what operators see of it.

mod clients;
pub(crate) mod drain;
mod request;
mod within;

use serde::Serialize;

use crate::json::JsonError;
use crate::page::{Asked, CursorError, Page, mark, paged};
use crate::store::{ErrorKind, OutboxRow, Postgres, SqlError, Store, StoreError, Timestamp, Uuid};
use crate::workflow::{Engine, NotPostgres, WorkflowError};

pub use clients::UserTransaction;
pub use within::{InTransaction, StartInTransaction};

/// Why a request could not be written to the outbox, or the outbox could not be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // The messages explain the fields.
pub enum OutboxError {
    /// The store is not in PostgreSQL.
    #[error("{NotPostgres}")]
    NotPostgres,
    /// A name or an id that is not allowed, or a payload that is too long.
    #[error(transparent)]
    Workflow(WorkflowError),
    /// A value that JSON cannot hold.
    #[error("{what}: {cause}")]
    Json { what: &'static str, cause: JsonError },
    /// An operation on an entity that is not valid.
    #[error(transparent)]
    Entity(crate::entity::EntityError),
    /// A condition that can only be checked now.
    #[error(
        "a change of entities in the outbox cannot depend on {what}: it is made later. Use if_rev, or make the change \
         without the outbox"
    )]
    OnlyNow { what: &'static str },
    /// The database refused the row. The user's transaction has failed, too.
    #[error("the request could not be written to the outbox: {cause}")]
    Database {
        #[source]
        cause: Box<dyn std::error::Error + Send + Sync>,
    },
    /// There is no such request: it was done or removed.
    #[error("there is no failed request {id} in the outbox; it was done, retried or removed")]
    NotFound { id: Uuid },
    /// A cursor does not fit the list.
    #[error(transparent)]
    Cursor(#[from] CursorError),
    /// An error of the store.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl OutboxError {
    /// The class of the failure.
    pub fn kind(&self) -> ErrorKind {
        match self {
            OutboxError::NotPostgres
            | OutboxError::Json { .. }
            | OutboxError::OnlyNow { .. }
            | OutboxError::Cursor(_) => ErrorKind::Invalid,
            OutboxError::Workflow(error) => error.kind(),
            OutboxError::Entity(error) => error.kind(),
            OutboxError::Database { .. } => ErrorKind::Unavailable,
            OutboxError::NotFound { .. } => ErrorKind::NotFound,
            OutboxError::Store(error) => error.kind(),
        }
    }
}

/// An error of the database as one of the store: the same statement may succeed later.
pub(crate) fn unavailable(error: &SqlError) -> StoreError {
    StoreError::Told { kind: ErrorKind::Unavailable, message: error.to_string().into() }
}

/// The outbox of a store in PostgreSQL.
///
/// A request is one row that the user's transaction inserts, beside the user's own changes. If that transaction is
/// rolled back, nothing of it is left. If it is committed, an engine on the store does what the request asks for, in
/// the transaction that removes the row: exactly once. Requests for the same execution or entity are done in the order
/// in which their transactions were committed.
#[derive(Debug, Clone)]
pub struct Outbox {
    store: Store,
    postgres: Postgres,
}

/// A request that could not be done. It stays in the outbox until it is retried or removed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct FailedRequest {
    /// Its id.
    pub id: Uuid,
    /// What it asks for: `start`, `signal` or `entities`.
    pub kind: String,
    /// The request, as JSON text.
    pub request: String,
    /// When the transaction that wrote it began.
    #[serde(rename = "at_us")]
    pub at: Timestamp,
    /// Why it could not be done.
    pub error: String,
}

impl From<OutboxRow> for FailedRequest {
    fn from(row: OutboxRow) -> FailedRequest {
        let OutboxRow { id, kind, body, at, failed, .. } = row;
        FailedRequest { id, kind, request: body, at, error: failed.unwrap_or_default() }
    }
}

impl Outbox {
    /// The outbox of a store. It needs no engine: any process that has the store open can write requests and list those
    /// that have failed.
    pub fn on(store: &Store) -> Result<Outbox, OutboxError> {
        let postgres = store.postgres().ok_or(OutboxError::NotPostgres)?;
        Ok(Outbox { store: store.clone(), postgres })
    }

    /// The requests that could not be done, by id. Await it for a page of them.
    ///
    /// ```no_run
    /// # use latchwork::workflow::{Outbox, OutboxError};
    /// # async fn example(outbox: Outbox) -> Result<(), OutboxError> {
    /// for request in outbox.failed().await? {
    ///     println!("{}: {} failed: {}", request.id, request.kind, request.error);
    ///     outbox.retry(request.id).await?;
    /// }
    /// # Ok(()) }
    /// ```
    pub fn failed(&self) -> FailedRequests {
        FailedRequests { postgres: self.postgres.clone(), asked: Asked::of("failed requests") }
    }

    /// Lets a failed request be done again, after all others.
    pub async fn retry(&self, id: Uuid) -> Result<(), OutboxError> {
        if self.postgres.outbox_retry(id).await? { Ok(()) } else { Err(OutboxError::NotFound { id }) }
    }

    /// Removes a request that was not done.
    pub async fn remove(&self, id: Uuid) -> Result<(), OutboxError> {
        if self.postgres.outbox_remove(id).await? { Ok(()) } else { Err(OutboxError::NotFound { id }) }
    }
}

/// A page of failed requests that is about to be read.
#[derive(Clone)]
#[must_use = "nothing is read until this is awaited"]
pub struct FailedRequests {
    postgres: Postgres,
    asked: Asked,
}

paged!(FailedRequests => FailedRequest, OutboxError);

shown!(FailedRequests, it => of: it.postgres);

impl FailedRequests {
    async fn page(self) -> Result<Page<FailedRequest>, OutboxError> {
        let mark = mark(&());
        let after = match self.asked.position(mark)? {
            Some(position) => Some(Uuid::from_slice(position).map_err(|_| self.asked.unknown())?),
            None => None,
        };
        let rows = self.postgres.outbox_failed(after, self.asked.limit + 1).await?;
        let found = rows.into_iter().map(|row| (row.id.as_bytes().to_vec(), FailedRequest::from(row)));
        Ok(self.asked.page(mark, found.collect()))
    }
}

impl Engine {
    /// The outbox of the engine's store.
    pub fn outbox(&self) -> Result<Outbox, OutboxError> {
        Outbox::on(self.store())
    }
}
