//! A store in PostgreSQL and tables of a user beside it, in schemas of the test's own.

use std::time::Duration;

use latchwork::store::tokio_postgres::{self, Client, NoTls};
use latchwork::store::{PostgresOptions, Store};

use crate::server::Server;

/// Where a test keeps its store and its tables.
pub(crate) struct Place {
    pub(crate) url: String,
    pub(crate) schema: String,
}

impl Place {
    pub(crate) fn new(server: &Server, name: &str) -> Place {
        Place { url: server.url.clone(), schema: format!("t_{}_{name}", std::process::id()) }
    }

    pub(crate) fn options(&self) -> PostgresOptions {
        PostgresOptions::new().schema(&self.schema).lease(Duration::from_secs(2))
    }

    pub(crate) async fn store(&self) -> Store {
        self.options().connect(&self.url).await.unwrap()
    }

    /// The name of a table of the user's.
    pub(crate) fn table(&self, name: &str) -> String {
        format!("{}_user.{name}", self.schema)
    }

    /// A connection of the user's. The first one creates the schema of the user's tables.
    pub(crate) async fn client(&self) -> Client {
        let client = connect(&self.url).await;
        client.batch_execute(&format!("CREATE SCHEMA IF NOT EXISTS {}_user", self.schema)).await.unwrap();
        client
    }
}

pub(crate) async fn connect(url: &str) -> Client {
    let (client, connection) = tokio_postgres::connect(url, NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

/// The single number that a query finds.
pub(crate) async fn number(client: &Client, query: &str) -> i64 {
    client.query_one(query, &[]).await.unwrap().get(0)
}
