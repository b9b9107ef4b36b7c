//! Rows of the user's own tables in the place of entities: how they are found, changed under their version, and
//! committed with the records of their claims in one transaction. The rules of claims are not here.
//!
//! A change is one conditional UPDATE, `WHERE id = … AND status = … AND version = …`, which raises the version by one.
//! The version of a row is what the rev of an entity is: the fence of its claim.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;

use crate::backoff::{doubled, jittered};
use crate::claim::config::ClaimWorkflow;
use crate::claim::error::{ActionError, ClaimError, Result};
use crate::claim::inspect::inspect;
use crate::entity::{EntityId, Standing};
use crate::store::tokio_postgres::types::{ToSql, Type};
use crate::store::{Commit, Outcome, Postgres, Rev, SqlEnded, SqlError, SqlTransaction, SqlTx, Store};
use crate::workflow::Boxed;

/// How often a transaction is tried that deadlocks or lost connections roll back.
const TRIES: u32 = 50;

/// The first and the longest pause between two tries.
const PAUSES: (Duration, Duration) = (Duration::from_millis(2), Duration::from_secs(1));

/// SQL of an action. It runs in the transaction of the final status, and again if that is rolled back.
pub(crate) type SqlWork = Arc<dyn Fn(SqlTx) -> Boxed<'static, std::result::Result<(), ActionError>> + Send + Sync>;

/// The tables of the claim workflows, by how the ids of their rows begin.
pub(crate) struct Rows {
    postgres: Postgres,
    tables: BTreeMap<String, Arc<RowTable>>,
}

/// The statements on a table. Each takes the id of the row as text.
pub(crate) struct RowTable {
    pub(crate) name: String,
    pub(crate) entity_type: String,
    pub(crate) status: String,
    /// Finds status, version, and the whole row as JSON.
    pub(crate) select: String,
    /// Finds the version, and locks the row.
    pub(crate) lock: String,
    /// Takes the id, the status before and after, and the version before. Returns the version.
    pub(crate) update: String,
}

/// A change of a row, or the condition that it did not change.
pub(crate) struct RowChange {
    table: Arc<RowTable>,
    row: String,
    kind: RowChangeKind,
}

enum RowChangeKind {
    Moves { from: String, to: String, version: i64 },
    Stays { version: Option<i64> },
}

impl Rows {
    /// Looks at the tables of all workflows. A table that cannot be used is an error.
    pub(crate) async fn boot(store: &Store, workflows: &[ClaimWorkflow]) -> Result<Option<Arc<Rows>>> {
        let mut tables = BTreeMap::new();
        let mut postgres = None;
        for workflow in workflows {
            let Some(table) = &workflow.meta.table else { continue };
            let wrong = |reason: String| ClaimError::Table {
                workflow: workflow.name.clone(),
                table: table.name.clone(),
                reason,
            };
            let found = store.postgres().ok_or_else(|| wrong("the store is not in PostgreSQL".into()))?;
            let inspected = inspect(&found, workflow, table).await?.map_err(wrong)?;
            tables.insert(table.prefix(), Arc::new(inspected));
            postgres = Some(found);
        }
        Ok(postgres.map(|postgres| Arc::new(Rows { postgres, tables })))
    }

    fn table<'a>(&self, id: &'a EntityId) -> Option<(&Arc<RowTable>, &'a str)> {
        self.tables.iter().find_map(|(prefix, table)| Some((table, id.strip_prefix(prefix.as_str())?)))
    }

    pub(crate) fn is_row(&self, id: &EntityId) -> bool {
        self.table(id).is_some()
    }

    fn known<'a>(&self, id: &'a EntityId) -> Result<(&Arc<RowTable>, &'a str)> {
        self.table(id).ok_or_else(|| ClaimError::NotFound { id: id.clone() })
    }

    /// The row of this id, as the last committed transaction has left it.
    pub(crate) async fn standing(&self, id: &EntityId) -> Result<Option<Standing>> {
        let (table, row) = self.known(id)?;
        if row.contains('\0') {
            return Ok(None);
        }
        let rows = match self.postgres.query(&table.select, &[(&row, Type::TEXT)]).await {
            Ok(rows) => rows,
            // The id is no value of the column's type, so no row has it.
            Err(error) if error.code().is_some_and(|code| code.code().starts_with("22")) => return Ok(None),
            Err(error) => return Err(failed(error)),
        };
        let Some(row) = rows.first() else { return Ok(None) };
        let (version, json): (i64, &str) = (row.get(1), row.get(2));
        let data: Value = serde_json::from_str(json).map_err(|_| ClaimError::Corrupt { place: format!("row {id}") })?;
        let Ok(rev) = u64::try_from(version) else {
            return Err(ClaimError::Row { id: id.clone(), reason: format!("its version is {version}, below zero") });
        };
        Ok(Some(Standing::of_row(id.clone(), Rev(rev), &table.entity_type, data)))
    }

    /// The change of a row to the status in `data`, and the row after it.
    pub(crate) fn revise(&self, standing: &Standing, data: Value) -> Result<(RowChange, Standing)> {
        let (table, row) = self.known(&standing.id)?;
        let status = |data: &Value| data.get(&table.status).and_then(Value::as_str).unwrap_or_default().to_string();
        let (from, to, version) = (status(standing.data()), status(&data), standing.rev.0 as i64);
        let kind = RowChangeKind::Moves { from, to, version };
        let after = Standing::of_row(standing.id.clone(), standing.rev.next(), &table.entity_type, data);
        Ok((RowChange { table: table.clone(), row: row.into(), kind }, after))
    }

    /// The condition that a row is still as it was found: at a version, or absent.
    pub(crate) fn unchanged(&self, id: &EntityId, rev: Option<Rev>) -> Result<RowChange> {
        let (table, row) = self.known(id)?;
        let kind = RowChangeKind::Stays { version: rev.map(|rev| rev.0 as i64) };
        Ok(RowChange { table: table.clone(), row: row.into(), kind })
    }
}

/// An error of the database outside of the user's SQL.
fn failed(error: SqlError) -> ClaimError {
    match error {
        SqlError::Store(error) => error.into(),
        error => crate::workflow::outbox::unavailable(&error).into(),
    }
}

/// Why a transaction has not landed.
enum RowMiss {
    /// The row is not as expected.
    Moved,
    /// Another commit has landed at the same moment. An attempt that does not count on being alone lands.
    Outrun,
    Again(ClaimError),
    Failed(ClaimError),
}

/// Commits in one transaction: the SQL of an action, the change of a row, and a commit of the store. Returns `None` if
/// the row is not as expected.
pub(crate) async fn commit(
    store: &Store,
    commit: &Commit,
    row: Option<&RowChange>,
    sql: &[SqlWork],
    action: &str,
) -> Result<Option<Outcome>> {
    let unavailable =
        || ClaimError::Action { action: action.into(), error: ActionError::new(crate::workflow::NotPostgres) };
    let postgres = store.postgres().ok_or_else(unavailable)?;
    let (mut tries, mut is_alone) = (0, true);
    loop {
        tries += 1;
        let transaction = postgres.begin().await?;
        let transaction = if is_alone { transaction.repeatable() } else { transaction };
        let error = match attempt(transaction, commit.clone(), row, sql, action).await {
            Ok(outcome) => return Ok(Some(outcome)),
            Err(RowMiss::Outrun) => {
                is_alone = false;
                continue;
            }
            Err(RowMiss::Moved) => return Ok(None),
            Err(RowMiss::Failed(error)) => return Err(error),
            Err(RowMiss::Again(error)) => error,
        };
        if tries >= TRIES {
            return Err(error);
        }
        let pause = doubled(PAUSES.0, tries).min(PAUSES.1);
        store.env().sleep(jittered(pause, 0.5, store.env())).await;
    }
}

async fn attempt(
    transaction: SqlTransaction,
    commit: Commit,
    row: Option<&RowChange>,
    sql: &[SqlWork],
    action: &str,
) -> std::result::Result<Outcome, RowMiss> {
    if let Err(miss) = prepare(&transaction, row, sql, action).await {
        transaction.roll_back().await;
        return Err(miss);
    }
    match transaction.commit(commit).await.map_err(|error| RowMiss::Failed(error.into()))? {
        SqlEnded::Applied(receipt) => Ok(Outcome::Applied(receipt)),
        SqlEnded::Refused(refusal) => Ok(Outcome::Refused(refusal)),
        SqlEnded::RolledBack(error) => Err(missed(error, action)),
    }
}

/// Runs the SQL, and changes the row.
async fn prepare(
    transaction: &SqlTransaction,
    row: Option<&RowChange>,
    sql: &[SqlWork],
    action: &str,
) -> std::result::Result<(), RowMiss> {
    for work in sql {
        if let Err(error) = work(transaction.tx()).await {
            let error = ClaimError::Action { action: action.into(), error };
            return Err(if transaction.runs_again() { RowMiss::Again(error) } else { RowMiss::Failed(error) });
        }
    }
    let Some(change) = row else { return Ok(()) };
    change.make(&transaction.tx(), action).await
}

fn missed(error: SqlError, action: &str) -> RowMiss {
    match error {
        SqlError::Store(error) => RowMiss::Failed(error.into()),
        SqlError::Outrun => RowMiss::Outrun,
        error if error.runs_again() => RowMiss::Again(failed(error)),
        error => RowMiss::Failed(ClaimError::Action { action: action.into(), error: ActionError::new(error) }),
    }
}

impl RowChange {
    async fn make(&self, tx: &SqlTx, action: &str) -> std::result::Result<(), RowMiss> {
        let id = || EntityId::from(format!("{}:{}", self.table.name, self.row));
        match &self.kind {
            RowChangeKind::Moves { from, to, version } => {
                // A trigger that runs after the update changes what the update has returned.
                let statements: [(&str, &[&(dyn ToSql + Sync)]); 2] =
                    [(&self.table.update, &[&self.row, from, to, version]), (&self.table.lock, &[&self.row])];
                let rows = tx.query_each(&statements).await.map_err(|error| missed(error, action))?;
                let [changed, found] = [0, 1].map(|at: usize| rows[at].first().map(|row| row.get::<_, i64>(0)));
                let returned = changed.ok_or(RowMiss::Moved)?;
                if returned == version + 1 && found == Some(returned) {
                    return Ok(());
                }
                let found = found.map_or("nothing".into(), |found| found.to_string());
                let reason = format!("a trigger has set its version to {found} instead of {}", version + 1);
                Err(RowMiss::Failed(ClaimError::Row { id: id(), reason }))
            }
            RowChangeKind::Stays { version } => {
                let found =
                    tx.query_opt(&self.table.lock, &[&self.row]).await.map_err(|error| missed(error, action))?;
                let found = found.map(|row| row.get::<_, i64>(0));
                if found == *version { Ok(()) } else { Err(RowMiss::Moved) }
            }
        }
    }
}
