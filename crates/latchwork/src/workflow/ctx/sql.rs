//! Steps with SQL of the user's own, on a store in PostgreSQL: the SQL and the record of the step are one transaction,
//! so the SQL takes effect exactly once. Retries, time limits and cancellation are those of every step.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::backoff::{doubled, jittered};
use crate::store::{Commit, Outcome, Postgres, SqlEnded, SqlError, SqlTransaction, SqlTx, StoreError};
use crate::workflow::Failure;
use crate::workflow::ctx::Ctx;
use crate::workflow::ctx::step::{Attempt, Body, Recorder, Step};
use crate::workflow::run::{CommitBy, CommitOutcome, NextState, Stop};
use crate::workflow::stored::record::{Entry, EntryState};

/// How often one attempt runs its SQL if deadlocks, serialization failures or lost connections roll it back.
const TRIES: u32 = 50;

/// The first and the longest pause between two runs.
const PAUSES: (Duration, Duration) = (Duration::from_millis(2), Duration::from_secs(1));

/// Why a step with SQL failed: the store is not in PostgreSQL.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[error(
    "the store is not in PostgreSQL, so SQL cannot be committed with a step; open the store with Store::connect, or \
     use ctx.transaction for entities and slots"
)]
pub struct NotPostgres;

/// A body that gets a transaction.
pub struct WithSql<F>(F);

impl Ctx {
    /// A step with SQL on the user's own tables, on a store in PostgreSQL. One transaction holds the SQL and the record
    /// of the step, so the SQL takes effect exactly once, whatever happens to the process or the server. The body may
    /// run more than once: what it does outside of `tx` is repeated then. After an error, and after a panic, the SQL is
    /// rolled back, and the step is tried again as [`Step::retry`] says. Deadlocks, serialization failures and lost
    /// connections are not counted: the body runs again.
    ///
    /// The transaction is at READ COMMITTED, on a connection of its own. [`Step::timeout`] also ends a statement that
    /// runs too long. On any other store the step fails with [`NotPostgres`].
    ///
    /// ```no_run
    /// use latchwork::store::SqlTx;
    /// use latchwork::workflow::{Ctx, Failure};
    ///
    /// async fn transfer(ctx: Ctx, (from, to, cents): (String, String, i64)) -> Result<i64, Failure> {
    ///     let left = ctx.sql("transfer", async |tx: SqlTx| {
    ///         let take = "UPDATE accounts SET cents = cents - $2 WHERE owner = $1 AND cents >= $2 RETURNING cents";
    ///         let left = tx.query_opt(take, &[&from, &cents]).await?.ok_or("not enough money")?;
    ///         tx.execute("UPDATE accounts SET cents = cents + $2 WHERE owner = $1", &[&to, &cents]).await?;
    ///         Ok(left.get::<_, i64>(0))
    ///     });
    ///     left.await
    /// }
    /// ```
    pub fn sql<F, Fut, T>(&self, name: &str, body: F) -> Step<'_, WithSql<F>>
    where
        F: Fn(SqlTx) -> Fut + Send + Sync,
        Fut: Future<Output = Result<T, Failure>> + Send,
        T: Serialize + DeserializeOwned + Send,
    {
        Step::new(self, name, WithSql(body))
    }
}

/// Why one run of the SQL has not landed.
enum SqlMiss {
    Failed(Failure),
    /// Another run may land.
    Again(Failure),
    /// Another commit has landed at the same moment. A run that does not count on being alone lands.
    Outrun(Failure),
    /// The database cannot be reached: no SQL has run.
    Away(StoreError),
    Stop(Stop),
}

impl SqlMiss {
    fn of(error: SqlError) -> SqlMiss {
        let miss = match &error {
            SqlError::Outrun => SqlMiss::Outrun,
            error if error.runs_again() => SqlMiss::Again,
            _ => SqlMiss::Failed,
        };
        miss(error.into())
    }
}

impl<F, Fut, T> Body for WithSql<F>
where
    F: Fn(SqlTx) -> Fut + Sync,
    Fut: Future<Output = Result<T, Failure>> + Send,
    T: Serialize + Send,
{
    type Output = T;

    const RECORDS: bool = true;

    fn run(&self, attempt: impl FnOnce() -> Attempt) -> impl Future<Output = Result<T, Failure>> + Send {
        // Before the future: what gives the attempt need not be sent to another thread.
        let attempt = attempt();
        self.attempted(attempt)
    }
}

impl<F, Fut, T> WithSql<F>
where
    F: Fn(SqlTx) -> Fut + Sync,
    Fut: Future<Output = Result<T, Failure>> + Send,
    T: Serialize + Send,
{
    /// Runs the SQL until it has landed or failed.
    async fn attempted(&self, attempt: Attempt) -> Result<T, Failure> {
        let recorder = attempt.recorder.as_ref().ok_or("the attempt cannot record its result")?;
        let run = recorder.run();
        let postgres = run.engine.store.postgres().ok_or_else(|| Failure::typed(NotPostgres).not_retryable())?;
        let (mut tries, mut pauses, mut is_alone) = (0, 0, true);
        loop {
            tries += 1;
            pauses += 1;
            match self.once(&postgres, recorder, is_alone).await {
                Ok(value) => return Ok(value),
                Err(SqlMiss::Failed(failure)) => return Err(failure),
                Err(SqlMiss::Outrun(_)) if is_alone => {
                    is_alone = false;
                    continue;
                }
                Err(SqlMiss::Outrun(failure)) => return Err(failure),
                Err(SqlMiss::Again(failure)) if tries >= TRIES => return Err(failure),
                Err(SqlMiss::Again(failure)) => tracing::debug!(%failure, "SQL was rolled back, and runs again"),
                Err(SqlMiss::Away(error)) => {
                    tries -= 1;
                    tracing::warn!(%error, "SQL of a step waits for the database");
                }
                Err(SqlMiss::Stop(stop)) => return run.stop_for(stop).await,
            }
            let pause = doubled(PAUSES.0, pauses).min(PAUSES.1);
            run.env().sleep(jittered(pause, 0.5, run.env())).await;
        }
    }
}

impl<F, Fut, T> WithSql<F>
where
    F: Fn(SqlTx) -> Fut,
    Fut: Future<Output = Result<T, Failure>>,
    T: Serialize,
{
    /// Runs the SQL once, and commits it with the record of the step.
    async fn once(&self, postgres: &Postgres, recorder: &Recorder, is_alone: bool) -> Result<T, SqlMiss> {
        let transaction = postgres.begin().await.map_err(|error| match error.is_passing() {
            true => SqlMiss::Away(error),
            false => SqlMiss::Stop(recorder.run().failed(error)),
        })?;
        let transaction = if is_alone { transaction.repeatable() } else { transaction };
        let value = match (self.0)(transaction.tx()).await {
            Ok(value) => value,
            Err(failure) => {
                let miss = if transaction.runs_again() { SqlMiss::Again } else { SqlMiss::Failed };
                transaction.roll_back().await;
                return Err(miss(failure));
            }
        };
        let text = recorder.run().text("the result", &value);
        let text = text.map_err(|failure| SqlMiss::Failed(failure.not_retryable()))?;
        recorder.record(transaction, text).await?;
        Ok(value)
    }
}

impl Recorder {
    /// Commits a transaction with the record that the step is done. From here on, only the outcome of the commit
    /// counts: neither a time limit nor a cancellation may leave it open whether the SQL took effect.
    async fn record(&self, transaction: SqlTransaction, text: String) -> Result<(), SqlMiss> {
        let run = self.run();
        let doing = &self.doing;
        while run.is_full() {
            let _ = doing.flush().await;
        }
        let committing = self.committing();
        doing.carry().await;
        let done = Entry { state: EntryState::Done(text), progress: None, ..self.entry.clone() };
        run.put_for_carrier(&self.place, done, None);
        let (commit, boarded) = run.board(Commit::new(), NextState::Runs);
        let failed = Arc::new(Mutex::new(None));
        let sent = run.submit_by(commit, boarded, Some(within(transaction, self, failed.clone()))).await;
        doing.carried();
        match sent {
            CommitOutcome::Landed(_) => {
                committing.recorded();
                Ok(())
            }
            CommitOutcome::RolledBack => Err(SqlMiss::of(failed.lock().take().unwrap_or(SqlError::Lost))),
            // The rest of the commit concerned other operations, which act on the refusal.
            CommitOutcome::Refused(refusal) => Err(SqlMiss::Again(Failure::new(refusal.to_string()))),
            CommitOutcome::Stopped(stop) => Err(SqlMiss::Stop(stop)),
        }
    }
}

/// Commits within a transaction of the user's.
fn within(transaction: SqlTransaction, recorder: &Recorder, failed: Arc<Mutex<Option<SqlError>>>) -> CommitBy {
    let commit = move |commit: Commit| -> crate::workflow::Boxed<'static, _> {
        Box::pin(async move {
            Ok(match transaction.commit(commit).await? {
                SqlEnded::Applied(receipt) => Some(Outcome::Applied(receipt)),
                SqlEnded::Refused(refusal) => Some(Outcome::Refused(refusal)),
                SqlEnded::RolledBack(error) => {
                    *failed.lock() = Some(error);
                    None
                }
            })
        })
    };
    CommitBy { place: recorder.place.clone(), commit: Box::new(commit) }
}
