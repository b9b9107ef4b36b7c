//! Transactions of the user's own: the user's SQL runs first, on a connection of its own; then a commit of the store is
//! decided and written in the same transaction. Both land, or neither. The row with the generation is locked only for
//! the last two round trips, as the writer locks it. Knows nothing of what the commit is for.

use std::collections::HashMap;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::Poll;
use std::time::Duration;

use futures_util::future::{try_join, try_join4};
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, RwLock, Semaphore};
use tokio_postgres::error::SqlState;
use tokio_postgres::{CancelToken, Statement};

use crate::backend::Facts;
use crate::postgres::group::{Scope, write};
use crate::postgres::known::Guessed;
use crate::postgres::landed::{Landed, ServerClock};
use crate::postgres::link::{Boxed, Link, Param, failed, is_refusal, told};
use crate::postgres::schema::{OWN_SYNC, plans};
use crate::postgres::sql::{SqlError, SqlTx, runs_again};
use crate::postgres::writer::{Answered, DecidedGroup, FIRST_PAUSE, Job, LAST_PAUSE, Last, Trouble, decide, gather};
use crate::postgres::{PostgresBackend, Shared};
use crate::{Commit, Outcome, Receipt, Refusal, Result, Store, StoreError, Uuid};

/// How the user's transaction begins. The name of the transaction is a setting that ends with it: so a `COMMIT` in the
/// user's SQL is noticed.
const BEGIN: &str = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE;";

/// What earlier SQL left on the connection does not count, and the connection string does. Behind a pooler, a
/// connection of the server may come from another program: there, this comes before each transaction.
const RESET: &str = "SET SESSION AUTHORIZATION DEFAULT; RESET ROLE; RESET ALL;";

/// What ends the user's part: constraints that wait for the end are checked before the store's row is locked, with the
/// role that the user's SQL has chosen; the store writes with its own. From here on, a process that is gone without a
/// word holds no lock for long.
const USER_ENDS: &str = "SET CONSTRAINTS ALL IMMEDIATE; SET SESSION AUTHORIZATION DEFAULT; RESET ROLE;
     SET LOCAL idle_in_transaction_session_timeout = '10s';";

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
    /// What its last transaction has left is being removed.
    cleaning: Mutex<Option<Boxed<Answered<()>>>>,
    /// The user's statements that are prepared on it.
    pub(super) statements: Mutex<HashMap<Box<str>, Statement>>,
    pub(super) is_pooled: bool,
    /// How the store's statements are planned.
    plans: String,
    id: Uuid,
    number: i64,
    clock: ServerClock,
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

    /// The connection of a transaction that failed.
    fn give_back_after(&self, slot: Slot, error: &tokio_postgres::Error) {
        if !is_without_statements(error.code()) {
            self.give_back(slot);
        }
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
            let mut slot = match free {
                Some(slot) if slot.link.is_closed() => continue,
                Some(slot) => slot,
                None => self.shared.open_slot().await?,
            };
            let name = self.shared.env.uuid().to_string();
            let reset = if self.shared.is_pooled { RESET } else { "" };
            let begin = format!("{reset} {BEGIN} SET LOCAL latchwork.own = '{name}'");
            let cleaning = slot.cleaning.get_mut().take();
            // The server does one after the other.
            let begun = async {
                match cleaning {
                    Some(cleaning) => try_join(cleaning, slot.link.run(&begin)).await.map(drop),
                    None => slot.link.run(&begin).await,
                }
            };
            match self.shared.in_time(slot.link.drive(begun)).await? {
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
        let link = self.in_time(self.open_own()).await??;
        let row = self.new_id(&link).await?;
        // A server that does not know a setting plans as it likes.
        let plans = plans("LOCAL");
        let is_known = !self.is_pooled && link.run(&plans).await.is_ok();
        let plans = if is_known { plans } else { String::new() };
        Ok(Slot {
            link,
            cleaning: Mutex::default(),
            statements: Mutex::default(),
            is_pooled: self.is_pooled,
            plans,
            id: row.get(0),
            number: 0,
            clock: ServerClock::read(&self.env, &row, 1),
        })
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

/// Whether the user's SQL has dropped the statements that are prepared on the connection.
fn is_without_statements(code: Option<&SqlState>) -> bool {
    code == Some(&SqlState::INVALID_SQL_STATEMENT_NAME)
}

/// Why a commit was not decided, and whether the server has said nothing.
struct NotDecided {
    error: SqlError,
    is_silent: bool,
}

/// Ends a transaction after some work. What the user's SQL has left on the connection is removed right after that: this
/// is sent with the end, and the caller does not wait for it.
async fn end(
    link: &Link,
    cleaning: &mut Option<Boxed<Answered<()>>>,
    how: &str,
    work: impl Future<Output = Answered<()>>,
) -> Answered<()> {
    let mut clean = link.run_apart(format!("{RESET} {CLEAN}"));
    let mut cleaned = None;
    let ended = link.drive(async {
        let mut ended = pin!(try_join(work, link.run(how)));
        poll_fn(|context| {
            let polled = ended.as_mut().poll(context);
            // It is sent in the first poll, too.
            if cleaned.is_none()
                && let Poll::Ready(done) = clean.as_mut().poll(context)
            {
                cleaned = Some(done);
            }
            polled
        })
        .await
    });
    let ended = ended.await;
    *cleaning = Some(match cleaned {
        Some(cleaned) => Box::pin(std::future::ready(cleaned)),
        None => clean,
    });
    ended.map(drop)
}

/// An open transaction. If it is dropped before its end, a running statement is cancelled and everything is rolled
/// back.
#[must_use = "a transaction that is dropped is rolled back"]
pub struct SqlTransaction {
    postgres: Postgres,
    open: Arc<OpenTransaction>,
    /// Held as long as the connection is in use.
    permit: Option<OwnedSemaphorePermit>,
    is_repeatable: bool,
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
        SqlTransaction { postgres: postgres.clone(), open: Arc::new(open), permit: Some(permit), is_repeatable: false }
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

    /// Says that the caller runs its SQL again in a new transaction if this one fails with an error that
    /// [may pass](SqlError::runs_again). If other commits are rare, the end of the transaction is a round trip shorter
    /// then. If one lands at the same moment, this transaction is rolled back with [`SqlError::Outrun`].
    pub fn repeatable(mut self) -> SqlTransaction {
        self.is_repeatable = true;
        self
    }

    /// Ends the transaction without its changes.
    pub async fn roll_back(mut self) {
        let Some(slot) = self.open.slot.write().await.take() else { return };
        let _in_use = self.permit.take();
        self.postgres.shared.roll_back(slot).await;
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
        let _in_use = self.permit.take();
        let ended = shared.end_own(slot, &self.open.name, commit, self.is_repeatable).await;
        if let Ok(SqlEnded::Applied(receipt)) = &ended {
            self.postgres.store.has_landed(receipt.generation);
        }
        ended
    }
}

impl Shared {
    /// Rolls back, and keeps the connection if it is still good.
    async fn roll_back(&self, mut slot: Slot) {
        let Slot { link, cleaning, .. } = &mut slot;
        if let Ok(Ok(())) = self.in_time(end(link, cleaning.get_mut(), "ROLLBACK", std::future::ready(Ok(())))).await {
            self.slots.give_back(slot);
        }
    }

    async fn end_own(&self, mut slot: Slot, name: &str, commit: Commit, is_repeatable: bool) -> Result<SqlEnded> {
        if self.is_closed() {
            self.roll_back(slot).await;
            return Err(StoreError::Closed);
        }
        slot.number += 1;
        let job = [Job::alone(commit)];
        let guess = if is_repeatable { self.known.lock().sure_guess(&job) } else { None };
        if let Some(guess) = guess {
            let (mut facts, versions) = (guess.facts, guess.versions);
            let decided = decide(self, &job, &mut facts, guess.last);
            if decided.is_to_land() && !decided.applied.is_empty() {
                return self.end_guessed(slot, name, decided, versions).await;
            }
        }
        let (mut facts, last) = match self.gather_own(&slot, name, &job).await {
            Ok(gathered) => gathered,
            Err(NotDecided { error, is_silent }) => {
                if !is_silent && !is_without_statements(error.code()) {
                    self.roll_back(slot).await;
                }
                return Ok(SqlEnded::RolledBack(error));
            }
        };
        let decided = decide(self, &job, &mut facts, last);
        if !decided.is_to_land() {
            // A commit that has landed before under the same id: so has the SQL that was with it.
            self.roll_back(slot).await;
            return self.told_own(decided);
        }
        let (id, number, sent) = (slot.id, slot.number, slot.clock.after(&self.env, Duration::ZERO));
        match self.in_time(self.write_own(&mut slot, name, &decided)).await {
            Ok(Ok(())) => {
                self.slots.give_back(slot);
                self.told_own(decided)
            }
            Ok(Err(error)) if is_refusal(&error) => {
                self.slots.give_back_after(slot, &error);
                Ok(SqlEnded::RolledBack(SqlError::of(&error)))
            }
            _ => {
                // The server may hold the lock that the look-up waits for, as long as it sees the connection.
                drop(slot);
                self.look_up_own((id, number, sent), decided).await
            }
        }
    }

    /// Ends the user's part, locks the head, and reads what the commit is decided on.
    async fn gather_own(&self, slot: &Slot, name: &str, job: &[Job]) -> std::result::Result<(Facts, Last), NotDecided> {
        let (is_open, cause, link) = (AtomicBool::new(true), Mutex::new(None), &slot.link);
        let told = |error: &tokio_postgres::Error| *cause.lock() = Some(SqlError::of(error));
        let ends = format!("{USER_ENDS} {} SELECT {OWN_SYNC}", slot.plans);
        let begin = async { link.run(&ends).await.inspect_err(told) };
        let lock = async {
            let head = link.query(&self.sql.lock_own_head, &[&name]).await.inspect_err(told)?;
            is_open.store(!head.is_empty(), Ordering::SeqCst);
            Ok(head)
        };
        let gathered = self.in_time(link.drive(gather(self, link, job, (begin, lock)))).await;
        let not_decided = |error: SqlError, is_silent: bool| Err(NotDecided { error, is_silent });
        match gathered {
            _ if !is_open.load(Ordering::SeqCst) => not_decided(SqlError::EndedByBody, false),
            Ok(Ok(gathered)) => Ok(gathered),
            Ok(Err(Trouble::Failed(error) | Trouble::Rejected(error) | Trouble::Unknown(error, _))) => {
                not_decided(cause.lock().take().unwrap_or(SqlError::Store(error)), false)
            }
            Err(error) => not_decided(SqlError::Store(error), true),
        }
    }

    /// Ends the user's part, writes a group that was decided on a guess, and commits, in one round trip. A guess that
    /// is wrong is an error for the server, so everything is rolled back.
    async fn end_guessed(
        &self,
        mut slot: Slot,
        name: &str,
        decided: DecidedGroup,
        versions: Guessed,
    ) -> Result<SqlEnded> {
        let (id, number, sent) = (slot.id, slot.number, slot.clock.after(&self.env, Duration::ZERO));
        let Slot { link, cleaning, plans, .. } = &mut slot;
        let scope = Scope { writer: (id, number), name: Some(name), versions: &versions, deadline: None };
        let ends = format!("{USER_ENDS} {plans}");
        // Only an error of the store's own statement says something about the guess.
        let is_of_store = AtomicBool::new(false);
        let written = write(self, link, &self.sql.write_or_fail, &decided, scope);
        let written = async { written.await.inspect_err(|_| is_of_store.store(true, Ordering::SeqCst)) };
        let work = try_join(link.run(&ends), written);
        let error = match self.in_time(end(link, cleaning.get_mut(), "COMMIT", async { work.await.map(drop) })).await {
            Ok(Ok(())) => {
                self.slots.give_back(slot);
                self.known.lock().guessed_right(false);
                return self.told_own(decided);
            }
            Ok(Err(error)) if is_refusal(&error) => error,
            _ => {
                drop(slot);
                return self.look_up_own((id, number, sent), decided).await;
            }
        };
        self.slots.give_back_after(slot, &error);
        let code = error.code().filter(|_| is_of_store.load(Ordering::SeqCst));
        Ok(SqlEnded::RolledBack(match code {
            Some(code) if *code == SqlState::DIVISION_BY_ZERO => {
                let mut known = self.known.lock();
                known.guessed_head_wrong();
                known.guessed_keys_wrong(&versions);
                SqlError::Outrun
            }
            Some(code) if *code == SqlState::INVALID_ARGUMENT_FOR_LOG => SqlError::EndedByBody,
            _ => SqlError::of(&error),
        }))
    }

    async fn write_own(&self, slot: &mut Slot, name: &str, decided: &DecidedGroup) -> Answered<()> {
        let Slot { link, cleaning, id, number, .. } = slot;
        let (id, number, versions) = (*id, *number, Guessed::default());
        let landed: [Param<'_>; 2] = [&id, &number];
        let written = async {
            if decided.applied.is_empty() {
                return link.query(&self.sql.group, &landed).await.map(drop);
            }
            let scope = Scope { writer: (id, number), name: Some(name), versions: &versions, deadline: None };
            write(self, link, &self.sql.write_or_fail, decided, scope).await.map(drop)
        };
        end(link, cleaning.get_mut(), "COMMIT", written).await
    }

    /// Looks whether a transaction has landed whose answer was lost. As long as that is not known, the caller must not
    /// run the user's SQL again, so there is no limit but the end of the store. The lock waits until the transaction
    /// has ended: it held the same lock when its last statements were sent.
    async fn look_up_own(&self, (id, number, sent): (Uuid, i64, f64), decided: DecidedGroup) -> Result<SqlEnded> {
        let mut pause = FIRST_PAUSE;
        loop {
            let asked = async {
                let link = self.open().await?;
                let ask = async {
                    let begun = try_join(link.run(super::writer::BEGIN), link.query(&self.sql.lock_head, &[]));
                    let asked: [Param<'_>; 1] = [&id];
                    let landed = link.query(&self.sql.landed, &asked);
                    // What was sent may be executed later: it no longer finds what it was decided with.
                    let outdated = link.query(&self.sql.outdate, &[]);
                    let (_, _, landed, ()) = try_join4(begun, outdated, landed, link.run("COMMIT")).await?;
                    Ok::<_, tokio_postgres::Error>(landed.first().map(Landed::of))
                };
                ask.await.map_err(|error| failed("read from", &error))
            };
            match self.in_time(asked).await {
                Ok(Ok(Some(landed))) if landed.has(number, sent)? => return self.told_own(decided),
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
