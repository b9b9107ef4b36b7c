//! What the user's SQL runs on: a handle of an open transaction that can neither commit nor roll back, and its errors.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use futures_util::future::try_join_all;
use tokio_postgres::error::SqlState;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Row, Statement};

use crate::StoreError;
use crate::postgres::link::told;
use crate::postgres::own::{OpenTransaction, Postgres, Slot};

/// A handle of an open transaction, for SQL on the user's own tables. It is cheap to clone, and its statements may run
/// side by side. It cannot commit or roll back: the transaction ends with the step that it belongs to. After that,
/// every statement fails.
///
/// Statements are prepared once on each connection, and their values are bound.
#[derive(Clone)]
pub struct SqlTx {
    pub(super) open: Arc<OpenTransaction>,
}

impl std::fmt::Debug for SqlTx {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SqlTx").finish_non_exhaustive()
    }
}

/// Why SQL of the user's own failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SqlError {
    /// The database refused a statement, or the connection was lost.
    #[error("{}", told(.0))]
    Database(tokio_postgres::Error),
    /// The database refused to commit: a constraint that is checked at the end, or an earlier statement had failed.
    #[error("the transaction could not be committed: {cause}")]
    #[allow(missing_docs)] // The message explains the fields.
    Commit { cause: Arc<str>, code: Option<SqlState>, runs_again: bool },
    /// The store could not be read or written in this transaction.
    #[error(transparent)]
    Store(StoreError),
    /// The connection was lost, and the transaction has not landed.
    #[error("the connection was lost before the transaction had landed")]
    Lost,
    /// Another commit has landed at the same moment as that of a [repeatable](crate::SqlTransaction::repeatable)
    /// transaction.
    #[error("another commit has landed at the same moment, and the transaction was rolled back; run its SQL again")]
    Outrun,
    /// The transaction has ended before this statement.
    #[error("the transaction has ended; its SQL runs only while the body of its step does")]
    Ended,
    /// The SQL contained `COMMIT` or `ROLLBACK`.
    #[error(
        "the SQL has ended its transaction itself; leave COMMIT and ROLLBACK out, and return an error to roll back. \
         What it has committed stays"
    )]
    EndedByBody,
    /// A query for one row found none, or more than one.
    #[error("the query found {found} rows, and one was expected")]
    #[allow(missing_docs)] // The message explains the field.
    RowCount { found: usize },
}

impl SqlError {
    /// The code of the database for the error.
    pub fn code(&self) -> Option<&SqlState> {
        match self {
            SqlError::Database(error) => error.code(),
            SqlError::Commit { code, .. } => code.as_ref(),
            _ => None,
        }
    }

    /// True if the same SQL may succeed when it is run again in a new transaction: after a serialization failure, a
    /// deadlock or a lost connection.
    pub fn runs_again(&self) -> bool {
        match self {
            SqlError::Database(error) => runs_again(error),
            SqlError::Commit { runs_again, .. } => *runs_again,
            SqlError::Store(error) => error.is_passing(),
            SqlError::Lost | SqlError::Outrun => true,
            SqlError::Ended | SqlError::EndedByBody | SqlError::RowCount { .. } => false,
        }
    }
}

/// Whether another transaction with the same SQL may succeed at once. A statement that took too long, or a lock that
/// was not waited for, is a failure like any other: only the caller knows what it means.
pub(super) fn runs_again(error: &tokio_postgres::Error) -> bool {
    let Some(code) = error.code() else { return error.is_closed() || is_io(error) };
    // Rolled back transactions, connection exceptions, a server that stops or starts, no free connection.
    matches!(&code.code()[..2], "40" | "08")
        || [
            SqlState::ADMIN_SHUTDOWN,
            SqlState::CRASH_SHUTDOWN,
            SqlState::CANNOT_CONNECT_NOW,
            SqlState::TOO_MANY_CONNECTIONS,
        ]
        .contains(code)
        || is_stale(error)
}

fn is_io(error: &tokio_postgres::Error) -> bool {
    std::error::Error::source(error).is_some_and(|source| source.is::<std::io::Error>())
}

/// Whether a prepared statement no longer fits its tables. It is prepared anew in the next transaction.
fn is_stale(error: &tokio_postgres::Error) -> bool {
    let says = |text: &str| error.as_db_error().is_some_and(|error| error.message().contains(text));
    error.code() == Some(&SqlState::FEATURE_NOT_SUPPORTED) && says("cached plan must not change result type")
}

/// How many prepared statements a connection keeps.
const MOST_STATEMENTS: usize = 200;

impl Slot {
    /// A statement of the user's, which is prepared once on this connection.
    async fn prepared(&self, text: &str) -> Result<Statement, tokio_postgres::Error> {
        let known = self.statements.lock().get(text).cloned();
        if let Some(known) = known {
            return Ok(known);
        }
        let statement = self.link.client().prepare(text).await?;
        // Behind a pooler, the next transaction may be on another connection of the server.
        if !self.is_pooled {
            let mut statements = self.statements.lock();
            if statements.len() >= MOST_STATEMENTS {
                statements.clear();
            }
            statements.insert(text.into(), statement.clone());
        }
        Ok(statement)
    }
}

fn used(slot: &Option<Slot>) -> Result<&Slot, SqlError> {
    slot.as_ref().ok_or(SqlError::Ended)
}

impl Postgres {
    /// Runs a query that only reads, outside of any transaction, with the types of its values: one round trip. If its
    /// connection was lost, it is run once more on a new one.
    pub async fn query(&self, text: &str, params: &[(&(dyn ToSql + Sync), Type)]) -> Result<Vec<Row>, SqlError> {
        let asked = self.shared.reading(|link| async move { link.client().query_typed(text, params).await });
        asked.await.map_err(SqlError::Store)?.map_err(SqlError::Database)
    }
}

impl SqlTx {
    fn told<T>(&self, slot: &Slot, answer: Result<T, tokio_postgres::Error>) -> Result<T, SqlError> {
        answer.map_err(|error| {
            if is_stale(&error) {
                slot.statements.lock().clear();
            }
            if runs_again(&error) {
                self.open.runs_again.store(true, Ordering::SeqCst);
            }
            SqlError::Database(error)
        })
    }

    /// Runs a statement, and returns how many rows it has changed.
    pub async fn execute(&self, text: &str, params: &[&(dyn ToSql + Sync)]) -> Result<u64, SqlError> {
        let slot = self.open.slot.read().await;
        let slot = used(&slot)?;
        let answer = slot.link.drive(async { slot.link.client().execute(&slot.prepared(text).await?, params).await });
        self.told(slot, answer.await)
    }

    /// Runs a query, and returns its rows.
    pub async fn query(&self, text: &str, params: &[&(dyn ToSql + Sync)]) -> Result<Vec<Row>, SqlError> {
        let slot = self.open.slot.read().await;
        let slot = used(&slot)?;
        let answer = slot.link.drive(async { slot.link.client().query(&slot.prepared(text).await?, params).await });
        self.told(slot, answer.await)
    }

    /// Runs statements one after the other, and returns the rows of each. They are sent together, which takes one round
    /// trip.
    pub async fn query_each(&self, statements: &[(&str, &[&(dyn ToSql + Sync)])]) -> Result<Vec<Vec<Row>>, SqlError> {
        let slot = self.open.slot.read().await;
        let slot = used(&slot)?;
        let answer = slot.link.drive(async {
            let mut prepared = Vec::with_capacity(statements.len());
            for (text, _) in statements {
                prepared.push(slot.prepared(text).await?);
            }
            let queries = statements.iter().zip(&prepared).map(|((_, params), statement)| {
                // It is sent in the first poll.
                slot.link.client().query(statement, params)
            });
            try_join_all(queries).await
        });
        self.told(slot, answer.await)
    }

    /// Runs a query that finds exactly one row.
    pub async fn query_one(&self, text: &str, params: &[&(dyn ToSql + Sync)]) -> Result<Row, SqlError> {
        self.query_opt(text, params).await?.ok_or(SqlError::RowCount { found: 0 })
    }

    /// Runs a query that finds one row or none.
    pub async fn query_opt(&self, text: &str, params: &[&(dyn ToSql + Sync)]) -> Result<Option<Row>, SqlError> {
        let mut rows = self.query(text, params).await?;
        match rows.len() {
            0 | 1 => Ok(rows.pop()),
            found => Err(SqlError::RowCount { found }),
        }
    }

    /// Runs a query with the types of its values, without preparing it: one round trip, also behind a pooler in
    /// transaction mode.
    pub async fn query_typed(&self, text: &str, params: &[(&(dyn ToSql + Sync), Type)]) -> Result<Vec<Row>, SqlError> {
        let slot = self.open.slot.read().await;
        let slot = used(&slot)?;
        self.told(slot, slot.link.drive(slot.link.client().query_typed(text, params)).await)
    }

    /// Runs several statements without values, separated by semicolons. Never put values into the text: bind them with
    /// [`SqlTx::execute`].
    pub async fn batch_execute(&self, text: &str) -> Result<(), SqlError> {
        let slot = self.open.slot.read().await;
        let slot = used(&slot)?;
        self.told(slot, slot.link.drive(slot.link.client().batch_execute(text)).await)
    }
}
