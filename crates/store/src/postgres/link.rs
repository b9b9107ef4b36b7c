//! Connections to the server: opening them, running statements on them, and what their errors mean. Knows no table.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::Arc;

use futures_util::future::try_join_all;
use tokio_postgres::config::SslMode;
use tokio_postgres::error::{Severity, SqlState};
use tokio_postgres::tls::MakeTlsConnect;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{CancelToken, Client, Config, Connection, Row, Socket, Statement};
use tokio_postgres_rustls::MakeRustlsConnect;

use crate::postgres::drive::Driver;
use crate::postgres::schema::Sql;
use crate::{ServerFault, StoreError};

/// Where the server is, and how it is reached.
#[derive(Clone)]
pub(super) struct Address {
    pub(super) config: Config,
    pub(super) tls: MakeRustlsConnect,
}

/// The side of a connection that a task has to serve.
pub(super) type Wire = Connection<Socket, <MakeRustlsConnect as MakeTlsConnect<Socket>>::Stream>;

impl Address {
    /// Opens a connection.
    pub(super) async fn connect(&self) -> Result<(Client, Wire), StoreError> {
        let mut connected = self.config.connect(self.tls.clone()).await;
        // TLS is preferred, not required.
        if self.config.get_ssl_mode() == SslMode::Prefer && connected.as_ref().err().is_some_and(may_do_without_tls) {
            let mut plain = self.config.clone();
            plain.ssl_mode(SslMode::Disable);
            connected = plain.connect(self.tls.clone()).await;
        }
        connected.map_err(|error| failed("connect to", &error))
    }

    /// Asks the server to end the statement that runs on a connection. Without an answer, the end of the connection
    /// ends it.
    pub(super) async fn cancel(&self, token: &CancelToken) {
        let _ = token.cancel_query(self.tls.clone()).await;
    }
}

/// Whether a connection without TLS may succeed where one with TLS did not.
fn may_do_without_tls(error: &tokio_postgres::Error) -> bool {
    is_of_tls(error) || error.code() == Some(&SqlState::INVALID_AUTHORIZATION_SPECIFICATION)
}

fn is_of_tls(error: &tokio_postgres::Error) -> bool {
    // The library has no other sign of it.
    error.as_db_error().is_none() && error.to_string().starts_with("error performing TLS handshake")
}

/// A connection. Statements that are polled together are sent together, in the order in which they are first polled.
pub(super) struct Link {
    client: Arc<Client>,
    /// By the address of the statement. Empty behind a pooler: there, prepared statements would belong to connections
    /// that are not ours. A statement that is not here is sent with its text.
    prepared: HashMap<usize, Statement>,
    driver: Arc<Driver>,
}

pub(super) type Boxed<T> = Pin<Box<dyn Future<Output = T> + Send>>;

pub(super) type Param<'a> = &'a (dyn ToSql + Sync);

impl Link {
    /// Opens a connection, which a task of the present runtime polls, and prepares statements on it.
    pub(super) async fn open(address: &Address, statements: &[&Sql]) -> Result<Link, StoreError> {
        let (client, connection) = address.connect().await?;
        let driver = Driver::start(connection);
        let mut link = Link { client: Arc::new(client), prepared: HashMap::new(), driver };
        link.prepare(statements).await?;
        Ok(link)
    }

    /// Prepares statements, all in one round trip.
    pub(super) async fn prepare(&mut self, statements: &[&Sql]) -> Result<(), StoreError> {
        let prepared = statements.iter().map(|sql| self.client.prepare_typed(&sql.text, sql.types));
        let prepared = try_join_all(prepared).await.map_err(|error| failed("prepare a statement on", &error))?;
        self.prepared.extend(statements.iter().map(|sql| place(sql)).zip(prepared));
        Ok(())
    }

    pub(super) fn has_prepared(&self, sql: &Sql) -> bool {
        self.prepared.contains_key(&place(sql))
    }

    pub(super) fn is_closed(&self) -> bool {
        self.client.is_closed()
    }

    /// Whether no caller waits for an answer on it, and the server has nothing left to do for one that has gone.
    pub(super) fn is_idle(&self) -> bool {
        self.driver.is_idle()
    }

    /// The connection itself, for statements of the user's own.
    pub(super) fn client(&self) -> &Client {
        &self.client
    }

    pub(super) fn cancel_token(&self) -> CancelToken {
        self.client.cancel_token()
    }

    /// Does work with this connection, and polls the connection meanwhile: its answers need no other task. Statements
    /// of the work that are polled together are still sent together.
    pub(super) async fn drive<T>(&self, work: impl Future<Output = T>) -> T {
        self.driver.drive(work).await
    }

    /// Runs a statement. It is sent in the first poll.
    pub(super) async fn query(&self, sql: &Sql, params: &[Param<'_>]) -> Result<Vec<Row>, tokio_postgres::Error> {
        match self.prepared.get(&place(sql)) {
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

    /// The same, as a future that may be kept: nothing else of the link is needed for it.
    pub(super) fn run_apart(&self, text: String) -> Boxed<Result<(), tokio_postgres::Error>> {
        let client = self.client.clone();
        Box::pin(async move { client.batch_execute(&text).await })
    }
}

/// The error of a statement.
pub(super) fn failed(action: &'static str, error: &tokio_postgres::Error) -> StoreError {
    StoreError::Server { action, cause: told(error), fault: fault(error) }
}

/// What the server said, or why it could not be asked.
pub(super) fn told(error: &tokio_postgres::Error) -> Arc<str> {
    match error.as_db_error() {
        Some(answer) => {
            let detail = answer.detail().map(|detail| format!(" ({detail})")).unwrap_or_default();
            format!("{}{detail} [{}]", answer.message(), answer.code().code()).into()
        }
        None => {
            let reason = std::error::Error::source(error).map(|source| format!(": {source}")).unwrap_or_default();
            format!("{error}{reason}").into()
        }
    }
}

/// What kind of failure it is.
fn fault(error: &tokio_postgres::Error) -> ServerFault {
    let Some(code) = error.code() else {
        return match is_of_tls(error) {
            true => ServerFault::Tls,
            false if has_said(error, "does not allow writes") => ServerFault::ReadOnly,
            false => ServerFault::Unreachable,
        };
    };
    match code.code() {
        "25006" => ServerFault::ReadOnly,
        "42501" => ServerFault::NoRights,
        "57014" | "55P03" => ServerFault::Cancelled,
        "22021" | "22P05" => ServerFault::Encoding,
        // A connection is refused because its encoding cannot be converted.
        "0A000" if has_said(error, "conversion between") => ServerFault::Encoding,
        "22023" if has_said(error, "client_encoding") => ServerFault::Encoding,
        code => match &code[..2] {
            "08" | "57" => ServerFault::Unreachable,
            "28" => ServerFault::NoRights,
            "53" => ServerFault::NoResources,
            "22" | "23" => ServerFault::Data,
            _ => ServerFault::Other,
        },
    }
}

fn has_said(error: &tokio_postgres::Error, words: &str) -> bool {
    let answer = error.as_db_error().is_some_and(|answer| answer.message().contains(words));
    answer || std::error::Error::source(error).is_some_and(|source| source.to_string().contains(words))
}

/// Whether a table, or the schema that it is in, does not exist.
pub(super) fn is_missing(error: &tokio_postgres::Error) -> bool {
    error.code().is_some_and(|code| [SqlState::UNDEFINED_TABLE, SqlState::INVALID_SCHEMA_NAME].contains(code))
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
    // A pooler may report a lost connection as an error like any other; that of a statement that was cancelled is none.
    let may_be_lost = |code: &SqlState| matches!(&code.code()[..2], "08" | "57") && *code != SqlState::QUERY_CANCELED;
    let may_be_lost = error.code().is_some_and(may_be_lost);
    severity == Some(Severity::Error) && !may_be_lost
}

/// Whether the connection is gone: it broke, or the server has ended it. A statement that was cancelled is none.
pub(super) fn is_lost(error: &tokio_postgres::Error) -> bool {
    error.code().is_none_or(|code| code.code().starts_with("08") || code.code().starts_with("57P"))
}

fn place(sql: &Sql) -> usize {
    std::ptr::from_ref(sql).addr()
}
