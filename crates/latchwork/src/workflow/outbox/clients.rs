//! The database clients whose transactions can write to the outbox: `tokio-postgres`, the transaction of `ctx.sql`, and
//! `sqlx` behind its feature. This is the only file that knows them.

use std::future::Future;

use crate::store::SqlTx;
use crate::store::tokio_postgres;
use crate::store::tokio_postgres::types::ToSql;

/// Why a client could not write.
type ClientCause = Box<dyn std::error::Error + Send + Sync>;

/// A transaction of the user's own, in which one row is inserted. It is implemented for references to transactions of
/// `tokio-postgres`, for mutable references to those of `sqlx` (feature `sqlx`), and for the transaction of `ctx.sql`.
pub trait UserTransaction: Send {
    /// Runs a statement with four values, which are text.
    fn insert(self, statement: &str, values: [String; 4]) -> impl Future<Output = Result<(), ClientCause>> + Send;
}

macro_rules! of_tokio_postgres {
    ($($client:ty),*) => {$(
        impl UserTransaction for &$client {
            async fn insert(self, statement: &str, [a, b, c, d]: [String; 4]) -> Result<(), ClientCause> {
                let values: [&(dyn ToSql + Sync); 4] = [&a, &b, &c, &d];
                self.execute(statement, &values).await?;
                Ok(())
            }
        }
    )*};
}
of_tokio_postgres!(tokio_postgres::Transaction<'_>, tokio_postgres::Client, SqlTx);

#[cfg(feature = "sqlx")]
impl UserTransaction for &mut sqlx::PgConnection {
    async fn insert(self, statement: &str, [a, b, c, d]: [String; 4]) -> Result<(), ClientCause> {
        sqlx::query(statement).bind(a).bind(b).bind(c).bind(d).execute(self).await?;
        Ok(())
    }
}

#[cfg(feature = "sqlx")]
impl UserTransaction for &mut sqlx::Transaction<'_, sqlx::Postgres> {
    async fn insert(self, statement: &str, values: [String; 4]) -> Result<(), ClientCause> {
        UserTransaction::insert(&mut **self, statement, values).await
    }
}
