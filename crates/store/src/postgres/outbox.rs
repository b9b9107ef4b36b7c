//! The outbox: rows that transactions of the user's own write, and that a layer above takes in order, each in the
//! transaction that does what the row asks for. So a row takes effect exactly once, if the transaction that wrote it is
//! committed. What a row means is not known here.
//!
//! The order of rows is that in which their transactions were committed, as far as one could have seen the other: a
//! trigger numbers the rows at the commit, while the transaction holds all its locks.

use std::time::Duration;

use tokio_postgres::Row;

use crate::postgres::link::{Param, failed};
use crate::postgres::own::Postgres;
use crate::postgres::schema::Sql;
use crate::{Result, SqlError, SqlTransaction, Timestamp, Uuid};

/// The text of the notification that there are rows.
pub(super) const NOTICE: &str = "outbox";

/// A row of the outbox.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct OutboxRow {
    /// Its id.
    pub id: Uuid,
    /// What it asks for; a word of the layer that reads it.
    pub kind: String,
    /// The request, as JSON text.
    pub body: String,
    /// When the transaction that wrote it began.
    pub at: Timestamp,
    /// Why it could not be done, if it was tried.
    pub failed: Option<String>,
    /// Its shard, as it was written.
    pub shard: i32,
    /// Its place in the order of all rows.
    pub position: i64,
}

fn read(row: &Row) -> OutboxRow {
    let at = row.get::<_, i64>(3);
    OutboxRow {
        id: row.get(0),
        kind: row.get(1),
        body: row.get(2),
        at: Timestamp(at as u64),
        failed: row.get(4),
        shard: row.get(5),
        position: row.get::<_, Option<i64>>(6).unwrap_or_default(),
    }
}

impl Postgres {
    /// The statement that writes a row, in any transaction on the database. Its four values are text: the id as a UUID,
    /// the number of the shard, the kind, and the request as JSON.
    pub fn outbox_insert(&self) -> &str {
        &self.shared.sql.outbox_put.text
    }

    /// Runs a statement that only reads, or that changes no more when it is run twice.
    async fn ask(&self, sql: &Sql, params: &[Param<'_>]) -> Result<Vec<Row>> {
        let asked = self.shared.reading(|link| async move { link.query(sql, params).await }).await?;
        asked.map_err(|error| failed("use the outbox in", &error))
    }

    /// Runs a statement that tells whether it has changed something. After a lost answer that is not known.
    async fn change(&self, sql: &Sql, id: Uuid) -> Result<bool> {
        let link = self.shared.in_time(self.shared.reader(0)).await??;
        let changed = self.shared.in_time(link.drive(link.query(sql, &[&id]))).await?;
        changed.map(|rows| !rows.is_empty()).map_err(|error| failed("use the outbox in", &error))
    }

    /// The oldest rows of these shards that have not failed, in order, after this position; 0 is before all of them.
    pub async fn outbox_due(&self, shards: &[i32], after: i64, limit: usize) -> Result<Vec<OutboxRow>> {
        let limit = limit as i64;
        Ok(self.ask(&self.shared.sql.outbox_due, &[&shards, &after, &limit]).await?.iter().map(read).collect())
    }

    /// The rows that have failed, after this one in the order of ids.
    pub async fn outbox_failed(&self, after: Option<Uuid>, limit: usize) -> Result<Vec<OutboxRow>> {
        let (after, limit) = (after.unwrap_or(Uuid::nil()), limit as i64);
        Ok(self.ask(&self.shared.sql.outbox_failed, &[&after, &limit]).await?.iter().map(read).collect())
    }

    /// Notes why a row could not be done. It stays until it is retried or removed. Returns whether there is such a row.
    pub async fn outbox_fail(&self, id: Uuid, reason: &str) -> Result<bool> {
        // PostgreSQL stores no NUL in a text.
        let reason = reason.replace('\0', "\u{fffd}");
        Ok(!self.ask(&self.shared.sql.outbox_fail, &[&id, &reason]).await?.is_empty())
    }

    /// Puts a failed row at the end of the outbox. Returns whether there is such a row.
    pub async fn outbox_retry(&self, id: Uuid) -> Result<bool> {
        self.change(&self.shared.sql.outbox_retry, id).await
    }

    /// Removes a row that nothing has been done for. Returns whether there was such a row.
    pub async fn outbox_remove(&self, id: Uuid) -> Result<bool> {
        self.change(&self.shared.sql.outbox_remove, id).await
    }

    /// Waits until there may be new rows. A notification that was lost only delays.
    pub async fn outbox_changed(&self) {
        let poll = if self.shared.is_pooled { Duration::from_secs(1) } else { Duration::from_secs(30) };
        tokio::select! {
            () = self.shared.outbox.notified() => {}
            () = self.shared.env.sleep(poll) => {}
        }
    }
}

impl SqlTransaction {
    /// Takes a row out of the outbox, if this transaction lands. Returns false if another transaction has taken it.
    pub async fn take_from_outbox(&self, id: Uuid) -> Result<bool, SqlError> {
        let remove = &self.postgres().shared.sql.outbox_take.text;
        Ok(self.tx().execute(remove, &[&id]).await? == 1)
    }
}
