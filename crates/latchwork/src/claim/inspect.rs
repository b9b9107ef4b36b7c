//! Looks at a table of the user's own before its claim workflow starts: what is missing or would break a claim is
//! found here, with a reason that says what to do. Changes nothing.

use crate::claim::config::ClaimWorkflow;
use crate::claim::error::Result;
use crate::claim::rows::RowTable;
use crate::claim::table::{UserTable, quoted};
use crate::json::Path;
use crate::store::tokio_postgres::Row;
use crate::store::tokio_postgres::types::Type;
use crate::store::{Postgres, SqlError, SqlTx};
use crate::workflow::outbox::unavailable;

/// What the catalogue says of a column.
struct Column {
    type_name: String,
    /// The category: `S` text, `N` number, `E` enum.
    category: String,
    is_required: bool,
    is_generated: bool,
}

const RELATION: &str = "SELECT c.oid::bigint, c.relkind::text, has_table_privilege(c.oid, 'SELECT'),
   has_table_privilege(c.oid, 'UPDATE'), row_security_active(c.oid),
   (SELECT string_agg(r.rulename, ', ') FROM pg_catalog.pg_rewrite AS r
     WHERE r.ev_class = c.oid AND r.ev_type = '2' AND r.ev_enabled <> 'D')
   FROM pg_catalog.pg_class AS c WHERE c.oid = to_regclass($1)";

const COLUMN: &str = "SELECT format_type(a.atttypid, a.atttypmod), t.typcategory::text, a.attnotnull,
   a.attgenerated <> '' FROM pg_catalog.pg_attribute AS a JOIN pg_catalog.pg_type AS t ON t.oid = a.atttypid
   WHERE a.attrelid = $1::bigint::oid AND a.attname = $2 AND a.attnum > 0 AND NOT a.attisdropped";

const UNIQUE: &str = "SELECT 1 FROM pg_catalog.pg_index AS i
   JOIN pg_catalog.pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
   WHERE i.indrelid = $1::bigint::oid AND i.indisunique AND i.indisvalid AND i.indnkeyatts = 1 AND i.indpred IS NULL
     AND a.attname = $2";

/// Those of the table and of its partitions, before and after an update, for rows and for statements.
const TRIGGERS: &str = "SELECT DISTINCT t.tgname::text, pg_get_functiondef(t.tgfoid)
   FROM pg_catalog.pg_trigger AS t WHERE NOT t.tgisinternal AND t.tgenabled IN ('O', 'A') AND t.tgtype & 16 = 16
     AND (t.tgrelid = $1::bigint::oid
       OR t.tgrelid IN (SELECT relid FROM pg_partition_tree($1::bigint::oid::regclass)))
   ORDER BY 1";

async fn ask(
    postgres: &Postgres,
    text: &str,
    params: &[(&(dyn crate::store::tokio_postgres::types::ToSql + Sync), Type)],
) -> Result<Vec<Row>> {
    Ok(postgres.query(text, params).await.map_err(|error: SqlError| unavailable(&error))?)
}

/// Looks at a table. The inner error says why it cannot be used.
pub(crate) async fn inspect(
    postgres: &Postgres,
    workflow: &ClaimWorkflow,
    table: &UserTable,
) -> Result<std::result::Result<RowTable, String>> {
    let (name, status) = match names(workflow, table) {
        Ok(names) => names,
        Err(reason) => return Ok(Err(reason)),
    };
    let found = ask(postgres, RELATION, &[(&name, Type::TEXT)]).await?;
    let Some(relation) = found.first() else {
        return Ok(Err("there is no such table; names are taken as they are written, also in upper case".into()));
    };
    let (oid, kind): (i64, &str) = (relation.get(0), relation.get(1));
    if !matches!(kind, "r" | "p") {
        let what = match kind {
            "v" => "a view",
            "m" => "a materialized view",
            "f" => "a foreign table",
            _ => "no table",
        };
        return Ok(Err(format!("it is {what}; a claim needs the table itself, whose rows it can lock")));
    }
    for (column, right) in [(2, "SELECT"), (3, "UPDATE")] {
        if !relation.get::<_, bool>(column) {
            return Ok(Err(format!("this program has no right to {right} it; GRANT {right} to its role")));
        }
    }
    if let Some(reason) = hidden(relation) {
        return Ok(Err(reason));
    }
    let mut columns = Vec::new();
    for column in [&table.id, &status, &table.version] {
        let found = ask(postgres, COLUMN, &[(&oid, Type::INT8), (column, Type::TEXT)]).await?;
        let Some(row) = found.first() else { return Ok(Err(format!("it has no column {column:?}"))) };
        let (type_name, category) = (row.get(0), row.get(1));
        columns.push(Column { type_name, category, is_required: row.get(2), is_generated: row.get(3) });
    }
    let unique = ask(postgres, UNIQUE, &[(&oid, Type::INT8), (&table.id, Type::TEXT)]).await?;
    if unique.is_empty() {
        let reason =
            format!("column {:?} is not unique; a claim would change several rows. Add a unique index", table.id);
        return Ok(Err(reason));
    }
    let built = match build(table, &name, &status, &columns, workflow) {
        Ok(built) => built,
        Err(reason) => return Ok(Err(reason)),
    };
    Ok(match probe(postgres, oid, &name, (table, &status), &built).await? {
        Some(reason) => Err(reason),
        None => Ok(built),
    })
}

/// Why an update may change no row, or other rows than it names.
fn hidden(relation: &Row) -> Option<String> {
    if relation.get(4) {
        let what = "row level security applies to this program's role, so a claim may lose sight of its row; use a \
                    role with BYPASSRLS, or the owner of the table";
        return Some(what.into());
    }
    let rules: Option<&str> = relation.get(5);
    rules.map(|rules| {
        format!("a rule ({rules}) rewrites updates; a claim needs the table itself. Use a trigger instead")
    })
}

/// The quoted name of the table, and the column of the status.
fn names(workflow: &ClaimWorkflow, table: &UserTable) -> std::result::Result<(String, String), String> {
    let field = &workflow.meta.status_field;
    let path = Path::parse(field).map_err(|error| format!("{field:?} is no column: {error}"))?;
    let [status] = path.segments() else {
        return Err(format!("the status field {field:?} must be the name of a column"));
    };
    for column in [&table.id, status, &table.version] {
        quoted(column)?;
    }
    Ok((table.quoted()?, status.clone()))
}

/// The statements on the table.
fn build(
    table: &UserTable,
    name: &str,
    status: &str,
    columns: &[Column],
    workflow: &ClaimWorkflow,
) -> std::result::Result<RowTable, String> {
    let [id_type, status_type, version_type] = columns else { return Err("its columns cannot be read".into()) };
    if !matches!(&*status_type.category, "S" | "E") {
        return Err(format!("column {status:?} is a {}; a status is a text or an enum", status_type.type_name));
    }
    if !matches!(&*version_type.type_name, "bigint" | "integer" | "smallint") || !version_type.is_required {
        let (column, found) = (&table.version, &version_type.type_name);
        return Err(format!("column {column:?} is {found}; a version is a bigint NOT NULL"));
    }
    if let Some((column, _)) =
        [(status, status_type), (&*table.version, version_type)].iter().find(|it| it.1.is_generated)
    {
        return Err(format!("column {column:?} is generated, and cannot be set"));
    }
    let (id, state, version) = (quoted(&table.id)?, quoted(status)?, quoted(&table.version)?);
    let (of_id, of_state) = (format!("$1::text::{}", id_type.type_name), &status_type.type_name);
    Ok(RowTable {
        name: table.name.clone(),
        entity_type: workflow.meta.entity_type.clone(),
        status: status.into(),
        select: format!(
            "SELECT t.{state}::text, t.{version}::bigint, to_jsonb(t)::text FROM {name} AS t WHERE t.{id} = {of_id}"
        ),
        lock: format!("SELECT {version}::bigint FROM {name} WHERE {id} = {of_id} FOR UPDATE"),
        update: format!(
            "UPDATE {name} SET {state} = $3::text::{of_state}, {version} = {version} + 1 WHERE {id} = {of_id} \
             AND {state} = $2::text::{of_state} AND {version} = $4::bigint RETURNING {version}::bigint"
        ),
    })
}

/// Looks for a trigger that changes the version. A row is changed on trial, as a claim changes it, and rolled back; if
/// there is none, the functions of the triggers are read.
async fn probe(
    postgres: &Postgres,
    oid: i64,
    name: &str,
    (table, status): (&UserTable, &str),
    built: &RowTable,
) -> Result<Option<String>> {
    let triggers = ask(postgres, TRIGGERS, &[(&oid, Type::INT8)]).await?;
    if triggers.is_empty() {
        return Ok(None);
    }
    let names: Vec<&str> = triggers.iter().map(|row| row.get(0)).collect();
    let what = |said: String| {
        format!(
            "a trigger ({}) changes the version: {said}. Let claims raise the version, or use another column",
            names.join(", ")
        )
    };
    let column = |name: &str| quoted(name).unwrap_or_default();
    let (id, state, version) = (column(&table.id), column(status), column(&table.version));
    let trial = format!(
        "UPDATE {name} AS t SET {version} = t.{version} + 1, {state} = t.{state} FROM (SELECT {id}, {version} AS \
         before FROM {name} LIMIT 1 FOR UPDATE SKIP LOCKED) AS one WHERE t.{id} = one.{id} RETURNING t.{id}::text, \
         one.before::bigint"
    );
    let transaction = postgres.begin().await?;
    let tried = try_one(&transaction.tx(), &trial, &built.lock).await;
    transaction.roll_back().await;
    match tried {
        Ok(Some((before, after))) => {
            let found = after.map_or("nothing".into(), |after| after.to_string());
            Ok((after != Some(before + 1)).then(|| what(format!("{before} became {found}"))))
        }
        Ok(None) => {
            let found = triggers.iter().find(|row| sets(row.get::<_, Option<&str>>(1).unwrap_or_default(), table));
            Ok(found.map(|row| what(format!("{:?} assigns it", row.get::<_, &str>(0)))))
        }
        Err(error) => Ok(Some(format!("a row of it cannot be changed on trial: {error}"))),
    }
}

/// Changes a row, lets the triggers run that wait for the end, and gives its version before and after.
async fn try_one(tx: &SqlTx, trial: &str, lock: &str) -> std::result::Result<Option<(i64, Option<i64>)>, SqlError> {
    let Some(row) = tx.query_opt(trial, &[]).await? else { return Ok(None) };
    let (id, before): (&str, i64) = (row.get(0), row.get(1));
    tx.batch_execute("SET CONSTRAINTS ALL IMMEDIATE").await?;
    let after = tx.query_opt(lock, &[&id]).await?;
    Ok(Some((before, after.map(|row| row.get(0)))))
}

/// Whether the text of a trigger's function assigns the version, to the new row or by an update of its own.
fn sets(text: &str, table: &UserTable) -> bool {
    let text: String = text.to_lowercase().chars().filter(|it| !it.is_whitespace() && *it != '"').collect();
    let version = table.version.to_lowercase();
    let own = ["begin", "then", "else", ";"].iter().any(|start| text.contains(&format!("{start}new.{version}=")));
    own || [format!("new.{version}:="), format!("set{version}="), format!(",{version}=")]
        .iter()
        .any(|it| text.contains(it))
}
