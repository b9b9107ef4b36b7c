//! The connections for reads, which all callers share: they are opened when they are needed, and replaced when they are
//! lost. Knows no table.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use tokio_postgres::Row;

use crate::postgres::Shared;
use crate::postgres::link::{Link, Param, failed, is_lost};
use crate::postgres::schema::Sql;
use crate::postgres::writer::Answered;
use crate::{Result, ServerFault, StoreError};

impl Shared {
    /// Runs statements that only read, on a connection that callers share. If it was lost, they are run once more on a
    /// new one. A server that says nothing holds no caller for longer than it would hold a commit.
    pub(super) async fn reading<T, F, Fut>(&self, run: F) -> Result<Answered<T>>
    where
        F: Fn(Arc<Link>) -> Fut,
        Fut: Future<Output = Answered<T>>,
    {
        let turn = self.next_reader();
        let mut is_last = self.is_frozen;
        loop {
            let link = match self.open_reader(turn) {
                Some(link) => link,
                None => self.in_time(self.reader(turn)).await??,
            };
            let error = match self.in_time(link.drive(run(link.clone()))).await {
                Ok(Err(error)) if is_lost(&error) => error,
                Ok(answered) => return Ok(answered),
                Err(silent) => {
                    self.give_up(turn, &link).await;
                    return Err(silent);
                }
            };
            self.give_up(turn, &link).await;
            if is_last {
                return Ok(Err(error));
            }
            is_last = true;
        }
    }

    /// The first connection that is idle: a caller that is alone uses the same one again, whose process the server's
    /// machine still has at hand. Otherwise one that is not open yet; callers take turns where there is none.
    fn next_reader(&self) -> usize {
        let first = |fits: fn(Option<&Arc<Link>>) -> bool| {
            let fits = |turn: &usize| self.readers[*turn].try_lock().is_ok_and(|reader| fits(reader.as_ref()));
            (0..self.readers.len()).find(fits)
        };
        let idle = first(|link| link.is_some_and(|link| link.is_idle()));
        let idle = idle.or_else(|| first(|link| link.is_none_or(|link| link.is_closed())));
        idle.unwrap_or_else(|| self.turn.fetch_add(1, Ordering::Relaxed) % self.readers.len())
    }

    /// Runs one statement that only reads.
    pub(super) async fn ask(&self, sql: &Sql, params: &[Param<'_>]) -> Result<Vec<Row>> {
        let answered = self.reading(|link| async move { link.query(sql, params).await }).await?;
        answered.map_err(|error| failed("read from", &error))
    }

    /// The next read opens another connection. That of a frozen store is all it has.
    async fn give_up(&self, turn: usize, lost: &Arc<Link>) {
        let mut reader = self.readers[turn].lock().await;
        if !self.is_frozen && reader.as_ref().is_some_and(|link| Arc::ptr_eq(link, lost)) {
            *reader = None;
        }
    }

    /// The connection, if it is open and no caller opens or replaces it at this moment.
    fn open_reader(&self, turn: usize) -> Option<Arc<Link>> {
        if self.is_closed() {
            return None;
        }
        let reader = self.readers[turn].try_lock().ok()?;
        reader.as_ref().filter(|link| !link.is_closed()).cloned()
    }

    pub(super) async fn reader(&self, turn: usize) -> Result<Arc<Link>> {
        if self.is_closed() {
            return Err(StoreError::Closed);
        }
        let mut reader = self.readers[turn].lock().await;
        match &*reader {
            Some(link) if !link.is_closed() => Ok(link.clone()),
            _ if self.is_frozen => {
                let cause = "the connection was lost; open the store again".into();
                Err(StoreError::Server { action: "read from", cause, fault: ServerFault::Unreachable })
            }
            _ => {
                let sql = &self.sql;
                let often =
                    [&sql.head, &sql.newest, &sql.floor, &sql.scan_up, &sql.scan_down, &sql.touched, &sql.changed];
                let link = self.open_for(&often).await?;
                Ok(reader.insert(Arc::new(link)).clone())
            }
        }
    }
}
