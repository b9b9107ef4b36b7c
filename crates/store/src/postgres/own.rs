//! Transactions of the user's own: the user's SQL runs first, on a connection of its own; then a commit of the store is
//! decided and written in the same transaction. Both land, or neither. The row with the generation is locked only for
//! the last two round trips, as the writer locks it. Knows nothing of what the commit is for.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use futures_util::future::{try_join, try_join3};
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, RwLock, Semaphore};
use tokio_postgres::{CancelToken, Statement};

use crate::postgres::known::Guessed;
use crate::postgres::link::{Link, Param, failed, is_refusal, told};
use crate::postgres::sql::{SqlError, SqlTx, runs_again};
use crate::postgres::writer::{DecidedGroup, FIRST_PAUSE, Job, LAST_PAUSE, Scope, Trouble, decide, gather, write};
use crate::postgres::{PostgresBackend, Shared};
use crate::{Commit, Outcome, Receipt, Refusal, Result, Store, StoreError, Uuid};

/// How the user's transaction begins. The name of the transaction is a setting that ends with it: so a `COMMIT` in the
/// user's SQL is noticed.
const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;";

/// What earlier SQL left on the connection does not count, and the connection string does. Behind a pooler, a
/// connection of the server may come from another program: there, this comes before each transaction.
const RESET: &str = "SET SESSION AUTHORIZATION DEFAULT; RESET ROLE; RESET ALL;";

/// What ends the user's part. Constraints that wait for the end are checked before the store's row is locked, with the
/// role that the user's SQL has chosen; the store writes with its own. A body does not make the commit less durable
/// than every commit is, but may ask for more. From here on, a process that is gone without a word holds no lock for
/// long.
const USER_ENDS: &str = "SET CONSTRAINTS ALL IMMEDIATE; SET SESSION AUTHORIZATION DEFAULT; RESET ROLE;
     SELECT set_config('idle_in_transaction_session_timeout', '10s', true),
       CASE WHEN current_setting('synchronous_commit') <> 'remote_apply' THEN
         CASE WHEN set_config('synchronous_commit', NULL, true) <> 'remote_apply' THEN
           set_config('synchronous_commit', 'on', true) END END";

/// What the user's SQL may leave on a connection that no transaction takes along.
const CLEAN: &str = "SELECT pg_advisory_unlock_all(); CLOSE ALL; UNLISTEN *; DISCARD TEMP";

/// The connections of the user's transactions that no transaction uses.
pub(super) struct Slots {
    free: Mutex<Vec<Slot>>,
    permits: Arc<Semaphore>,
}

/// A connection, and the row that tells which of its transactions has landed last.
pub(super) struct Slot {
    pub(super) link: Link,
    /// The user's statements that are prepared on it.
    pub(super) statements: Mutex<HashMap<Box<str>, Statement>>,
    pub(super) is_pooled: bool,
    id: Uuid,
    number: i64,
}

impl Slots {
    pub(super) fn new(limit: usize) -> Slots {
        Slots { free: Mutex::default(), permits: Arc::new(Semaphore::new(limit)) }
    }

    /// No further transaction begins.
    pub(super) fn close(&self) {
        self.permits.close();
        self.free.lock().clear();
    }

    fn give_back(&self, slot: Slot) {
        if !self.permits.is_closed() {
            self.free.lock().push(slot);
        }
    }
}

/// The database that holds a store, for transactions of the user's own: see [`Store::postgres`].
#[derive(Clone)]
pub struct Postgres {
    store: Store,
    pub(super) shared: Arc<Shared>,
}

impl std::fmt::Debug for Postgres {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Postgres").field("schema", &self.schema()).finish_non_exhaustive()
    }
}

impl Store {
    /// The database of a store in PostgreSQL. `None` for every other store.
    pub fn postgres(&self) -> Option<Postgres> {
        let backend = self.backend().extension()?.downcast_ref::<PostgresBackend>()?;
        Some(Postgres { store: self.clone(), shared: backend.shared.clone() })
    }
}

impl Postgres {
    /// The schema that holds the store.
    pub fn schema(&self) -> &str {
        &self.shared.sql.schema
    }

    /// Begins a transaction on a connection of its own, at READ COMMITTED. It waits while as many transactions are open
    /// as [`crate::PostgresOptions::transactions`] allows.
    ///
    /// ```no_run
    /// # async fn example(store: latchwork_store::Store) -> Result<(), Box<dyn std::error::Error>> {
    /// use latchwork_store::{Commit, SpaceSpec, SqlEnded};
    ///
    /// let bookings = store.space(SpaceSpec::new("bookings")).await?;
    /// let transaction = store.postgres().ok_or("the store is not in PostgreSQL")?.begin().await?;
    /// transaction.tx().execute("UPDATE seats SET free = free - 1 WHERE flight = $1", &[&7]).await?;
    /// let commit = Commit::new().absent(&bookings.key("7/ada")).put(&bookings.key("7/ada"), "1A");
    /// match transaction.commit(commit).await? {
    ///     SqlEnded::Applied(receipt) => println!("both have landed, with generation {}", receipt.generation),
    ///     SqlEnded::Refused(refusal) => println!("no seat was taken: {refusal}"),
    ///     SqlEnded::RolledBack(error) => println!("no seat was taken, and nothing was booked: {error}"),
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn begin(&self) -> Result<SqlTransaction> {
        if self.shared.is_closed() {
            return Err(StoreError::Closed);
        }
        let permits = self.shared.slots.permits.clone();
        let permit = permits.acquire_owned().await.map_err(|_| StoreError::Closed)?;
        loop {
            let free = self.shared.slots.free.lock().pop();
            let is_new = free.is_none();
            let slot = match free {
                Some(slot) if slot.link.is_closed() => continue,
                Some(slot) => slot,
                None => self.shared.open_slot().await?,
            };
            let name = self.shared.env.uuid().to_string();
            let reset = if self.shared.is_pooled { RESET } else { "" };
            let begin = format!("{reset} {BEGIN} SET LOCAL latchwork.own = '{name}'");
            match self.shared.in_time(slot.link.drive(slot.link.run(&begin))).await? {
                Ok(()) => return Ok(SqlTransaction::new(self, slot, name, permit)),
                Err(error) if is_new => return Err(failed("begin a transaction on", &error)),
                // The connection was lost while it was not in use.
                Err(_) => {}
            }
        }
    }
}

impl Shared {
    async fn open_slot(&self) -> Result<Slot> {
        let link = self.in_time(self.open()).await??;
        let rows = link.query(&self.sql.new_id, &[]).await.map_err(|error| failed("read from", &error))?;
        let id = rows.first().map(|row| row.get(0)).ok_or_else(|| StoreError::corrupt("a new id", "there is none"))?;
        Ok(Slot { link, statements: Mutex::default(), is_pooled: self.is_pooled, id, number: 0 })
    }
}

/// What a transaction and its handles share.
pub(super) struct OpenTransaction {
    /// Taken when the transaction ends, after the statements that still run.
    pub(super) slot: RwLock<Option<Slot>>,
    /// True once a statement has failed for a reason that another run of the same SQL may not meet.
    pub(super) runs_again: AtomicBool,
    cancel: CancelToken,
    name: String,
}

/// An open transaction. If it is dropped before its end, a running statement is cancelled and everything is rolled
/// back.
#[must_use = "a transaction that is dropped is rolled back"]
pub struct SqlTransaction {
    postgres: Postgres,
    open: Arc<OpenTransaction>,
    /// Held as long as the connection is in use.
    permit: Option<OwnedSemaphorePermit>,
}

/// How a transaction ended.
#[derive(Debug)]
pub enum SqlEnded {
    /// The user's changes and the commit have landed together.
    Applied(Receipt),
    /// A check of the commit failed. Everything was rolled back.
    Refused(Refusal),
    /// The transaction could not be committed. Everything was rolled back.
    RolledBack(SqlError),
}

impl std::fmt::Debug for SqlTransaction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SqlTransaction").field("name", &self.open.name).finish_non_exhaustive()
    }
}

impl Drop for SqlTransaction {
    fn drop(&mut self) {
        let Some(permit) = self.permit.take() else { return };
        let (open, shared) = (self.open.clone(), self.postgres.shared.clone());
        // A statement may run on the server whose future was dropped. The connection is not used again: the request to
        // cancel may arrive late.
        if let Ok(runtime) = tokio::runtime::Handle::try_current() {
            runtime.spawn(async move {
                shared.address.cancel(&open.cancel).await;
                drop(open.slot.write().await.take());
                drop(permit);
            });
        }
    }
}

impl SqlTransaction {
    fn new(postgres: &Postgres, slot: Slot, name: String, permit: OwnedSemaphorePermit) -> SqlTransaction {
        let cancel = slot.link.cancel_token();
        let open = OpenTransaction { slot: RwLock::new(Some(slot)), runs_again: AtomicBool::new(false), cancel, name };
        SqlTransaction { postgres: postgres.clone(), open: Arc::new(open), permit: Some(permit) }
    }

    pub(super) fn postgres(&self) -> &Postgres {
        &self.postgres
    }

    /// A handle for the user's SQL.
    pub fn tx(&self) -> SqlTx {
        SqlTx { open: self.open.clone() }
    }

    /// True if a statement has failed for a reason that another run of the same SQL may not meet: a serialization
    /// failure, a deadlock, a lost connection.
    pub fn runs_again(&self) -> bool {
        self.open.runs_again.load(Ordering::SeqCst)
    }

    /// Ends the transaction without its changes.
    pub async fn roll_back(mut self) {
        let Some(slot) = self.open.slot.write().await.take() else { return };
        let permit = self.permit.take();
        self.postgres.shared.roll_back(slot, permit).await;
    }

    /// Decides the commit and writes it in this transaction, and commits both. A connection that is lost meanwhile does
    /// not leave the outcome open: it is looked up, until it is known or the store is closed. Dropping the future does
    /// not roll back.
    pub async fn commit(self, commit: Commit) -> Result<SqlEnded> {
        tokio::spawn(self.end(commit)).await.unwrap_or(Err(StoreError::Closed))
    }

    async fn end(mut self, commit: Commit) -> Result<SqlEnded> {
        if let Err(error) = self.postgres.store.accepts(&commit).await {
            self.roll_back().await;
            return Err(error);
        }
        let Some(slot) = self.open.slot.write().await.take() else { return Ok(SqlEnded::RolledBack(SqlError::Ended)) };
        let shared = self.postgres.shared.clone();
        let permit = self.permit.take();
        shared.end_own(slot, &self.open.name, commit, permit).await
    }
}

impl Shared {
    /// Rolls back, and keeps the connection if it is still good.
    async fn roll_back(self: &Arc<Self>, slot: Slot, permit: Option<OwnedSemaphorePermit>) {
        if let Ok(Ok(())) = self.in_time(slot.link.drive(slot.link.run("ROLLBACK"))).await {
            self.clean(slot, permit);
        }
    }

    /// Cleans a connection that is in no transaction, and keeps it. No caller waits for that.
    fn clean(self: &Arc<Self>, slot: Slot, permit: Option<OwnedSemaphorePermit>) {
        let shared = self.clone();
        tokio::spawn(async move {
            let clean = format!("{RESET} {CLEAN}");
            if let Ok(Ok(())) = shared.in_time(slot.link.run(&clean)).await {
                shared.slots.give_back(slot);
            }
            drop(permit);
        });
    }

    async fn end_own(
        self: &Arc<Self>,
        mut slot: Slot,
        name: &str,
        commit: Commit,
        permit: Option<OwnedSemaphorePermit>,
    ) -> Result<SqlEnded> {
        if self.is_closed() {
            self.roll_back(slot, permit).await;
            return Err(StoreError::Closed);
        }
        slot.number += 1;
        let job = [Job::alone(commit)];
        let (is_open, cause) = (AtomicBool::new(true), Mutex::new(None));
        let link = &slot.link;
        let told = |error: &tokio_postgres::Error| *cause.lock() = Some(SqlError::of(error));
        let begin = async { link.run(USER_ENDS).await.inspect_err(told) };
        let lock = async {
            let head = link.query(&self.sql.lock_own_head, &[&name]).await.inspect_err(told)?;
            is_open.store(!head.is_empty(), Ordering::SeqCst);
            Ok(head)
        };
        let gathered = self.in_time(link.drive(gather(self, link, &job, (begin, lock)))).await;
        let (mut facts, last) = match gathered {
            _ if !is_open.load(Ordering::SeqCst) => {
                self.roll_back(slot, permit).await;
                return Ok(SqlEnded::RolledBack(SqlError::EndedByBody));
            }
            Ok(Ok(gathered)) => gathered,
            Ok(Err(Trouble::Failed(error) | Trouble::Rejected(error) | Trouble::Unknown(error, _))) => {
                self.roll_back(slot, permit).await;
                return Ok(SqlEnded::RolledBack(cause.lock().take().unwrap_or(SqlError::Store(error))));
            }
            Err(error) => return Ok(SqlEnded::RolledBack(SqlError::Store(error))),
        };
        let decided = decide(self, &job, &mut facts, last);
        let is_to_land = matches!(&decided.answers[..], [Ok(Outcome::Applied(receipt))] if !receipt.repeated);
        if !is_to_land {
            // A commit that has landed before under the same id: so has the SQL that was with it.
            self.roll_back(slot, permit).await;
            return self.told_own(decided);
        }
        match self.in_time(slot.link.drive(self.write_own(&slot, name, &decided))).await {
            Ok(Ok(())) => {
                self.clean(slot, permit);
                self.told_own(decided)
            }
            Ok(Err(error)) if is_refusal(&error) => {
                self.roll_back(slot, permit).await;
                Ok(SqlEnded::RolledBack(SqlError::of(&error)))
            }
            _ => self.look_up_own((slot.id, slot.number), decided).await,
        }
    }

    async fn write_own(
        &self,
        slot: &Slot,
        name: &str,
        decided: &DecidedGroup,
    ) -> std::result::Result<(), tokio_postgres::Error> {
        let number: [Param<'_>; 2] = [&slot.id, &slot.number];
        let written = async {
            if decided.applied.is_empty() {
                return slot.link.query(&self.sql.group, &number).await.map(drop);
            }
            let scope = Scope { writer: (slot.id, slot.number), own: Some(name) };
            write(self, &slot.link, decided, &Guessed::default(), scope).await.map(drop)
        };
        try_join(written, slot.link.run("COMMIT")).await.map(drop)
    }

    /// Looks whether a transaction has landed whose answer was lost. As long as that is not known, the caller must not
    /// run the user's SQL again, so there is no limit but the end of the store. The lock waits until the transaction
    /// has ended: it held the same lock when its last statements were sent.
    async fn look_up_own(&self, (id, number): (Uuid, i64), decided: DecidedGroup) -> Result<SqlEnded> {
        let mut pause = FIRST_PAUSE;
        loop {
            let asked = async {
                let link = self.open().await?;
                let ask = async {
                    let begun = try_join(link.run(super::writer::BEGIN), link.query(&self.sql.lock_head, &[]));
                    let asked: [Param<'_>; 1] = [&id];
                    let landed = link.query(&self.sql.landed, &asked);
                    let (_, landed, ()) = try_join3(begun, landed, link.run("COMMIT")).await?;
                    Ok::<_, tokio_postgres::Error>(landed.first().map(|row| row.get::<_, i64>(0)))
                };
                ask.await.map_err(|error| failed("read from", &error))
            };
            match self.in_time(asked).await {
                Ok(Ok(last)) if last == Some(number) => return self.told_own(decided),
                Ok(Ok(_)) => return Ok(SqlEnded::RolledBack(SqlError::Lost)),
                Ok(Err(error)) | Err(error) if self.is_closed() => {
                    return Err(StoreError::Uncertain { cause: error.to_string().into() });
                }
                Ok(Err(error)) | Err(error) => drop(error),
            }
            self.env.sleep(pause).await;
            pause = (pause * 2).min(LAST_PAUSE);
        }
    }

    /// The answer to a decided commit that has landed, or has nothing to land.
    fn told_own(&self, mut decided: DecidedGroup) -> Result<SqlEnded> {
        let counters = &self.counters;
        if let Some(last) = decided.applied.last() {
            counters.applied.fetch_add(1, Ordering::Relaxed);
            counters.groups.fetch_add(1, Ordering::Relaxed);
            self.known.lock().landed(&decided.applied, decided.after);
            self.saw(last.generation);
        }
        match decided.answers.pop().unwrap_or(Err(StoreError::Closed))? {
            Outcome::Applied(receipt) => Ok(SqlEnded::Applied(receipt)),
            Outcome::Refused(refusal) => {
                counters.refused.fetch_add(1, Ordering::Relaxed);
                Ok(SqlEnded::Refused(refusal))
            }
        }
    }
}

impl SqlError {
    fn of(error: &tokio_postgres::Error) -> SqlError {
        SqlError::Commit { cause: told(error), code: error.code().cloned(), runs_again: runs_again(error) }
    }
}
