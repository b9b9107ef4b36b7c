//! Connections to the server: opening them, running statements on them, and what their errors mean. Knows no table.

use std::collections::HashMap;
use std::sync::Arc;

use tokio_postgres::error::{Severity, SqlState};
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, Config, NoTls, Row, Statement};

use crate::StoreError;
use crate::postgres::schema::Sql;

/// A connection. Statements that are polled together are sent together, in the order in which they are first polled.
pub(super) struct Link {
    client: Client,
    /// By the address of the statement. Empty behind a pooler: there, prepared statements would belong to connections
    /// that are not ours. A statement that is not here is sent with its text.
    prepared: HashMap<usize, Statement>,
}

pub(super) type Param<'a> = &'a (dyn ToSql + Sync);

impl Link {
    /// Opens a connection, which a task of the present runtime serves, and prepares statements on it.
    pub(super) async fn open(config: &Config, statements: &[&Sql]) -> Result<Link, StoreError> {
        let (client, connection) = config.connect(NoTls).await.map_err(|error| failed("connect to", &error))?;
        tokio::spawn(async move {
            // The client gets the errors of its connection.
            let _ = connection.await;
        });
        let mut prepared = HashMap::with_capacity(statements.len());
        for sql in statements {
            let statement = client.prepare_typed(&sql.text, sql.types).await;
            prepared.insert(address(sql), statement.map_err(|error| failed("prepare a statement on", &error))?);
        }
        Ok(Link { client, prepared })
    }

    pub(super) fn is_closed(&self) -> bool {
        self.client.is_closed()
    }

    /// Runs a statement. It is sent in the first poll.
    pub(super) async fn query(&self, sql: &Sql, params: &[Param<'_>]) -> Result<Vec<Row>, tokio_postgres::Error> {
        match self.prepared.get(&address(sql)) {
            Some(statement) => self.client.query(statement, params).await,
            None => {
                let typed: Vec<(Param<'_>, Type)> = params.iter().copied().zip(sql.types.iter().cloned()).collect();
                self.client.query_typed(&sql.text, &typed).await
            }
        }
    }

    /// Runs a statement without parameters and results, such as `BEGIN`.
    pub(super) async fn run(&self, text: &str) -> Result<(), tokio_postgres::Error> {
        self.client.batch_execute(text).await
    }
}

/// The error of a statement.
pub(super) fn failed(action: &'static str, error: &tokio_postgres::Error) -> StoreError {
    let cause: Arc<str> = match error.as_db_error() {
        Some(answer) => {
            let detail = answer.detail().map(|detail| format!(" ({detail})")).unwrap_or_default();
            format!("{}{detail} [{}]", answer.message(), answer.code().code()).into()
        }
        None => {
            let reason = std::error::Error::source(error).map(|source| format!(": {source}")).unwrap_or_default();
            format!("{error}{reason}").into()
        }
    };
    StoreError::Server { action, cause, is_invalid: is_invalid(error) }
}

/// Whether the request itself was wrong: data that the database does not take. Everything else is a condition of the
/// server, which may pass.
fn is_invalid(error: &tokio_postgres::Error) -> bool {
    error.code().is_some_and(|code| matches!(&code.code()[..2], "22" | "23"))
}

/// Whether the same statement may succeed soon: the server could not be reached, is starting or stopping, has no free
/// connection or gave up on time. Missing rights, a read-only server and the like stay until something is done.
pub(super) fn is_passing(error: &tokio_postgres::Error) -> bool {
    let Some(code) = error.code() else { return true };
    let class = &code.code()[..2];
    // Connection exceptions, rolled back transactions, no resources, operator intervention.
    matches!(class, "08" | "40" | "53" | "57" | "58") || *code == SqlState::LOCK_NOT_AVAILABLE
}

/// Whether the server has said that it did not do what it was asked, and goes on serving the connection: the
/// transaction was rolled back. After any other error it may have been committed.
pub(super) fn is_refusal(error: &tokio_postgres::Error) -> bool {
    let severity = error.as_db_error().and_then(|answer| answer.parsed_severity());
    // A pooler may report a lost connection as an error like any other.
    let is_lost = error.code().is_some_and(|code| matches!(&code.code()[..2], "08" | "57"));
    severity == Some(Severity::Error) && !is_lost
}

fn address(sql: &Sql) -> usize {
    std::ptr::from_ref(sql).addr()
}
