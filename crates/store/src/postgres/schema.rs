//! The tables of a store in PostgreSQL, and every statement on them. One schema holds one store. Statements name the
//! schema, so they work behind a pooler that gives each transaction another connection.

use tokio_postgres::types::Type;

use crate::{Result, StoreError};

/// Settings, each with a word before its name, with which the server plans a prepared statement of the store once, and
/// looks each key up in an index. Otherwise it plans the statement that writes each time, which takes longer than to
/// execute it; and a plan that is made while a table is small must also be good when it is large.
pub(super) fn plans(word: &str) -> String {
    // A scan that has no alternative counts as so dear that the statement would be compiled.
    let off =
        ["jit", "enable_seqscan", "enable_hashjoin", "enable_mergejoin"].map(|setting| format!("{setting} = off"));
    let settings = off.into_iter().chain(["plan_cache_mode = force_generic_plan".into()]);
    settings.map(|setting| format!("SET {word} {setting};")).collect()
}

/// The version of the tables. A program refuses a store with a higher one.
pub(super) const VERSION: i32 = 4;

/// A statement: its text, and the types of its parameters.
pub(super) struct Sql {
    pub(super) text: String,
    pub(super) types: &'static [Type],
}

/// The types of parameters: a list, or in square brackets the name of one.
macro_rules! types {
    (($($type:ident),*)) => { &[$(Type::$type),*] };
    ([$list:ident]) => { $list };
}

/// Declares the statements of the backend: a name, the types of its parameters, and its text, in which `{s}` stands for
/// the schema.
macro_rules! statements {
    ($($(#[$doc:meta])* $name:ident $types:tt = $text:expr;)*) => {
        /// Every statement of the backend, for one schema.
        pub(super) struct Statements {
            pub(super) schema: String,
            pub(super) channel: String,
            $($(#[$doc])* pub(super) $name: Sql,)*
        }

        impl Statements {
            pub(super) fn of(schema: &str) -> Statements {
                Statements {
                    schema: schema.into(),
                    channel: format!("latchwork_{schema}"),
                    $($name: Sql { text: $text.replace("{s}", schema), types: types!($types) },)*
                }
            }
        }
    };
}

/// The versions of a range that are visible at a generation, in an order.
const VISIBLE: &str = "SELECT key, rev, generation, time_us, value FROM (
   (SELECT key, rev, generation, time_us, value FROM {s}.current
     WHERE key >= $1 AND key < $2 AND generation <= $3 AND ($5 OR value IS NOT NULL)
     ORDER BY key {order} LIMIT $4)
   UNION ALL
   (SELECT key, rev, generation, time_us, value FROM {s}.past
     WHERE key >= $1 AND key < $2 AND generation <= $3 AND until > $3 AND ($5 OR value IS NOT NULL)
       AND (SELECT generation FROM {s}.head) > $3
     ORDER BY key {order} LIMIT $4)
 ) AS visible ORDER BY key {order} LIMIT $4";

macro_rules! sync {
    () => {
        "CASE WHEN current_setting('synchronous_commit') <> 'remote_apply' THEN
           set_config('synchronous_commit', 'on', true) END"
    };
}

/// What a transaction of the store needs whatever the defaults of the role are: an answer means that the commit is
/// durable, and a default that waits for more is kept; a process that is gone without a word gives its locks back.
pub(super) const SETTINGS: &str = concat!("set_config('idle_in_transaction_session_timeout', '10s', true), ", sync!());

/// The lock that writers wait for in a queue.
const QUEUE: &str = "pg_advisory_xact_lock(hashtextextended('latchwork.head.{s}', 0))";

/// The part of it that a transaction needs which is one statement.
const SYNC: &str = sync!();

/// The same after the user's SQL, which does not make the commit less durable than every commit is, but may ask for
/// more.
pub(super) const OWN_SYNC: &str = "CASE WHEN current_setting('synchronous_commit') <> 'remote_apply' THEN
   CASE WHEN set_config('synchronous_commit', NULL, true) <> 'remote_apply' THEN
     set_config('synchronous_commit', 'on', true) END END";

/// Whether a group may be written as it was decided: the head is where the group expects it, and each key that was not
/// read under the lock of the head has the guessed version as its newest. The statement waits for a transaction that
/// moves the head, and then compares again. The head that is expected was seen before the statement was sent, so what
/// is found is exactly what was there with this head.
///
/// A group that moves along expects no time: the head may be a later one. It was locked by a statement before this one,
/// so what is found is what is there now. If the writer was told that the group has not landed, its row says so.
const AS_DECIDED: &str = "(h.generation = $27 AND h.time_us = $28 OR $28 IS NULL AND h.generation >= $27
   AND NOT EXISTS (SELECT 1 FROM {s}.writers AS w WHERE w.writer = $22 AND w.number >= $23))
   AND NOT EXISTS (SELECT 1 FROM unnest($29::bytea[], $30::bigint[]) AS g (key, rev)
     WHERE coalesce((SELECT CASE WHEN c.value IS NULL THEN -c.rev ELSE c.rev END
       FROM {s}.current AS c WHERE c.key = g.key), 0) <> g.rev)";

/// The part of [`AS_DECIDED`] that compares the head.
pub(super) const AS_EXPECTED: &str = "(h.generation = $27 AND h.time_us = $28 OR ";

/// The types of the parameters of [`written!`].
const WRITTEN: &[Type] = types! {(
    BYTEA_ARRAY, INT8_ARRAY, BYTEA_ARRAY, INT8_ARRAY, INT8_ARRAY, INT8_ARRAY, BYTEA_ARRAY, INT8_ARRAY,
    BYTEA_ARRAY, INT8_ARRAY, INT8_ARRAY, INT8_ARRAY, BYTEA_ARRAY,
    INT8_ARRAY, INT8_ARRAY, INT8_ARRAY, BYTEA_ARRAY, BYTEA_ARRAY,
    INT8, INT8, INT8, UUID, INT8, TEXT, TEXT, UUID,
    INT8, INT8, BYTEA_ARRAY, INT8_ARRAY, TEXT, FLOAT8, INT8
)};

/// Everything that a group writes, if it is still [as decided](AS_DECIDED): the head, the overwritten versions, the new
/// ones, the keys of each commit and the number of the transaction. All parts see what was there before. A group with
/// the name of a transaction is written only in that one. The generations of a group that moves along are as far behind
/// the head as it was decided, and its commits have one time.
macro_rules! written {
    ($sync:ident, $answer:expr) => {
        format!(
            "WITH advance AS (
           UPDATE {{s}}.head AS h SET generation = h.generation - $27 + $19, time_us = greatest(h.time_us, $20),
             declared = coalesce($21, h.declared)
           WHERE {AS_DECIDED} AND ($31::text IS NULL OR current_setting('latchwork.own', true) = $31)
           RETURNING h.generation - $19 + {IN_TIME} AS moved, CASE WHEN $28 IS NULL THEN h.time_us END AS at,
             h.generation, h.time_us
         ), kept AS (
           INSERT INTO {{s}}.past (key, generation, rev, time_us, value, until)
           SELECT c.key, c.generation, c.rev, c.time_us, c.value, n.until + a.moved
           FROM advance AS a, unnest($1::bytea[], $2::bigint[]) AS n (key, until)
             JOIN {{s}}.current AS c ON c.key = n.key
           UNION ALL
           SELECT b.key, b.generation + a.moved, b.rev, coalesce(a.at, b.time_us), b.value, b.until + a.moved
           FROM advance AS a, unnest($3::bytea[], $4::bigint[], $5::bigint[], $6::bigint[], $7::bytea[], $8::bigint[])
             AS b (key, generation, rev, time_us, value, until)
         ), put AS (
           INSERT INTO {{s}}.current (key, rev, generation, time_us, value)
           SELECT n.key, n.rev, n.generation + a.moved, coalesce(a.at, n.time_us), n.value
           FROM advance AS a, unnest($9::bytea[], $10::bigint[], $11::bigint[], $12::bigint[], $13::bytea[])
             AS n (key, rev, generation, time_us, value)
           ON CONFLICT (key) DO UPDATE SET rev = excluded.rev, generation = excluded.generation,
             time_us = excluded.time_us, value = excluded.value
         ), touch AS (
           INSERT INTO {{s}}.touched (space, generation, time_us, meta, keys)
           SELECT t.space, t.generation + a.moved, coalesce(a.at, t.time_us), t.meta, t.keys
           FROM advance AS a, unnest($14::bigint[], $15::bigint[], $16::bigint[], $17::bytea[], $18::bytea[])
             AS t (space, generation, time_us, meta, keys)
         ), landed AS (
           INSERT INTO {{s}}.writers (writer, number, seen, generation, time_us)
           SELECT $22, $23, clock_timestamp(), a.generation, a.time_us FROM advance AS a
           ON CONFLICT (writer) DO UPDATE SET number = excluded.number, seen = excluded.seen,
             generation = excluded.generation, time_us = excluded.time_us
         )
         SELECT {}, {NOTIFIED}{}",
            $sync, $answer
        )
    };
}

/// 0, or an error if the time is over in which the group may land: later, the caller has been told that the outcome is
/// not known, and may have looked. It is evaluated when the head is locked.
const IN_TIME: &str = "CASE WHEN extract(epoch FROM clock_timestamp())::float8 > $32
   THEN 1 / (h.generation - h.generation) ELSE 0 END";

/// Other processes are notified, if there are any, and if one of them watches what a large group touches. One that
/// comes later asks for the newest generation when it listens; in the worst case it polls.
const NOTIFIED: &str = "CASE WHEN EXISTS (SELECT 1 FROM {s}.pins WHERE process <> $26
   AND ($33::bigint IS NULL OR watched & $33 <> 0)) THEN pg_notify($24, (
   SELECT concat_ws(' ', $27 + 1 + a.moved, a.generation, a.time_us, $25::text) FROM advance AS a)) END";

/// An error if a group for a transaction of the user's own was not written: a division by zero, or a logarithm of zero
/// if its transaction has ended before. So what was sent after it is not done either.
const OR_FAIL: &str = ", CASE WHEN current_setting('latchwork.own', true) = $31 THEN 1 / (SELECT count(*) FROM advance)
   ELSE ln((SELECT count(*) FROM advance)::float8)::bigint END";

/// The newest versions of keys, with the values of those in a range.
const HEADS: &str = "SELECT key, rev, generation, time_us, value IS NOT NULL,
   CASE WHEN key >= $2 AND key < $3 THEN value END FROM {s}.current WHERE key = ANY($1)";

statements! {
    opened() =
        "SELECT version, identity FROM {s}.store";
    has_schema(TEXT) =
        "SELECT 1 FROM pg_namespace WHERE nspname = $1";
    /// Writers queue before they lock the head: the queue wakes one of them when it is its turn. A row wakes all that
    /// wait for its lock, because the holder has changed it. The row is locked last. Also gives the transaction a name,
    /// and settles what a transaction of the writer needs: see [`SETTINGS`].
    queue_and_lock(TEXT) =
        format!("WITH queued AS MATERIALIZED (SELECT {SETTINGS}, set_config('latchwork.own', $1, true), {QUEUE})
         SELECT h.generation, h.time_us FROM queued, {{s}}.head AS h FOR UPDATE OF h");
    /// Also settles what a transaction of the store needs.
    lock_head() =
        format!("SELECT generation, time_us, {SETTINGS} FROM {{s}}.head FOR UPDATE");
    /// Finds no row outside of the transaction of this name.
    lock_own_head(TEXT) =
        "SELECT generation, time_us FROM {s}.head
         WHERE current_setting('latchwork.own', true) = $1 FOR UPDATE";
    /// After it, no group can land that expects the head as it was before.
    outdate() =
        "UPDATE {s}.head SET time_us = time_us + 1 RETURNING generation, time_us";
    /// After it, no group of a writer can land that moves along and has this number or a lower one. If the group with
    /// this number has landed, it does nothing. The next number is of no group.
    give_up(UUID, INT8) =
        "INSERT INTO {s}.writers AS w (writer, number, seen) VALUES ($1, $2 + 1, clock_timestamp())
         ON CONFLICT (writer) DO UPDATE SET number = excluded.number, seen = excluded.seen WHERE w.number < $2";
    heads(BYTEA_ARRAY, BYTEA, BYTEA) =
        HEADS;
    /// The same, if a group was not written.
    heads_unless(BYTEA_ARRAY, BYTEA, BYTEA, UUID, INT8) =
        format!("{HEADS} AND NOT EXISTS (SELECT 1 FROM {{s}}.writers WHERE writer = $4 AND number = $5)");
    range(BYTEA, BYTEA, INT8) =
        "SELECT key, generation FROM {s}.current
         WHERE key >= $1 AND key < $2 AND generation > $3 ORDER BY key LIMIT 1";
    /// What was written in spaces after a generation.
    since(INT8_ARRAY, INT8, INT8) =
        "SELECT generation, keys FROM {s}.touched WHERE space = ANY($1) AND generation > $2 LIMIT $3";
    floors() =
        "SELECT space, generation FROM {s}.floors";
    /// Also whether anything lies below.
    floors_due() =
        "SELECT f.space, f.generation, EXISTS (
           SELECT 1 FROM {s}.touched AS t WHERE t.space = f.space AND t.generation <= f.generation)
         FROM {s}.floors AS f";
    /// Gives a row if the group was written, with the generation and time of its last commit, and the server's time.
    write[WRITTEN] =
        written!(SYNC, ", generation, time_us, extract(epoch FROM clock_timestamp())::float8 FROM advance");
    /// An error if the group was not written.
    write_or_fail[WRITTEN] =
        written!(OWN_SYNC, OR_FAIL);
    put(BYTEA_ARRAY, INT8_ARRAY, INT8_ARRAY, INT8_ARRAY, BYTEA_ARRAY) =
        "INSERT INTO {s}.current (key, rev, generation, time_us, value)
         SELECT * FROM unnest($1::bytea[], $2::bigint[], $3::bigint[], $4::bigint[], $5::bytea[])
         ON CONFLICT (key) DO UPDATE SET rev = excluded.rev, generation = excluded.generation,
           time_us = excluded.time_us, value = excluded.value";
    touch(INT8_ARRAY, INT8_ARRAY, INT8_ARRAY, BYTEA_ARRAY, BYTEA_ARRAY) =
        "INSERT INTO {s}.touched (space, generation, time_us, meta, keys)
         SELECT * FROM unnest($1::bigint[], $2::bigint[], $3::bigint[], $4::bytea[], $5::bytea[])";
    advance(INT8, INT8, INT8) =
        "UPDATE {s}.head SET generation = $1, time_us = $2, declared = $3";
    notify(TEXT, TEXT) =
        "SELECT pg_notify($1, $2)";
    group(UUID, INT8) =
        "INSERT INTO {s}.writers (writer, number, seen) VALUES ($1, $2, clock_timestamp())
         ON CONFLICT (writer) DO UPDATE SET number = excluded.number, seen = excluded.seen";
    /// One row, which also has the server's time. The rest of it is null for a writer that is not known.
    landed(UUID) =
        "SELECT w.number, w.generation, w.time_us, extract(epoch FROM clock_timestamp())::float8
         FROM (SELECT 1) AS one LEFT JOIN {s}.writers AS w ON w.writer = $1";
    new_id() =
        "SELECT gen_random_uuid(), extract(epoch FROM clock_timestamp())::float8";
    head() =
        "SELECT generation, declared FROM {s}.head";
    /// One row: the newest version, or none, and the floor of the space, if it has one. The value of a version above
    /// the generation is left out.
    newest(BYTEA, INT8, INT8) =
        "SELECT c.rev, c.generation, c.time_us, CASE WHEN c.generation <= $2 THEN c.value END,
           (SELECT generation FROM {s}.floors WHERE space = $3)
         FROM (SELECT 1) AS one LEFT JOIN {s}.current AS c ON c.key = $1";
    /// The version that was overwritten after a generation. A key may have very many older ones.
    overwritten(BYTEA, INT8) =
        "SELECT key, rev, generation, time_us, value FROM (
           SELECT key, rev, generation, time_us, value, until FROM {s}.past
           WHERE key = $1 AND generation <= $2 ORDER BY generation DESC LIMIT 1
         ) AS last WHERE until > $2";
    floor(INT8) =
        "SELECT generation FROM {s}.floors WHERE space = $1";
    scan_up(BYTEA, BYTEA, INT8, INT8, BOOL) =
        VISIBLE.replace("{order}", "ASC");
    scan_down(BYTEA, BYTEA, INT8, INT8, BOOL) =
        VISIBLE.replace("{order}", "DESC");
    versions(BYTEA, INT8, INT8) =
        "SELECT key, rev, generation, time_us, value FROM (
           SELECT key, rev, generation, time_us, value FROM {s}.current WHERE key = $1 AND generation <= $2
           UNION ALL
           (SELECT key, rev, generation, time_us, value FROM {s}.past WHERE key = $1 AND generation <= $2
            ORDER BY generation DESC LIMIT $3)
         ) AS versions ORDER BY generation DESC LIMIT $3";
    /// At least one row, whose generation is null without a commit. Each has the floor of the space, if there is one.
    touched(INT8, INT8, INT8, INT8) =
        "SELECT t.generation, t.time_us, t.meta, t.keys, (SELECT generation FROM {s}.floors WHERE space = $1)
         FROM (SELECT 1) AS one LEFT JOIN (
           SELECT generation, time_us, meta, keys FROM {s}.touched
           WHERE space = $1 AND generation > $2 AND generation <= $3 ORDER BY generation LIMIT $4
         ) AS t ON true ORDER BY t.generation";
    /// Each row has the floor of the space, if it has one.
    changed(BYTEA_ARRAY, INT8_ARRAY, INT8) =
        "SELECT c.key, c.rev, c.generation, c.time_us, c.value, (SELECT generation FROM {s}.floors WHERE space = $3)
         FROM unnest($1::bytea[], $2::bigint[]) AS n (key, generation)
         JOIN {s}.current AS c ON c.key = n.key AND c.generation = n.generation
         UNION ALL
         SELECT p.key, p.rev, p.generation, p.time_us, p.value, (SELECT generation FROM {s}.floors WHERE space = $3)
         FROM unnest($1::bytea[], $2::bigint[]) AS n (key, generation)
         JOIN {s}.past AS p ON p.key = n.key AND p.generation = n.generation";
    before(INT8, INT8_ARRAY, INT8_ARRAY) =
        "SELECT h.generation, h.time_us <= $1, (
           SELECT max(last.generation) FROM unnest($2::bigint[], $3::bigint[]) AS s (space, floor),
             LATERAL (SELECT generation FROM {s}.touched AS t
               WHERE t.space = s.space AND t.time_us <= $1 AND t.generation > s.floor
               ORDER BY t.time_us DESC, t.generation DESC LIMIT 1) AS last)
         FROM {s}.head AS h";
    /// The lock comes first: no process raises floors meanwhile. A renewal whose caller has gone may run after a later
    /// one: it does nothing then. Gives the newest generation, how many other processes use the store, how many of them
    /// have a smaller id, and whether the row is new.
    renew(UUID, INT8, INT8, FLOAT8, INT8, INT8) =
        "WITH lock AS MATERIALIZED (SELECT 1 FROM {s}.store FOR SHARE)
         INSERT INTO {s}.pins AS own (process, oldest, views, renewed, lease, watched, number)
         SELECT $1, $2, $3, clock_timestamp(), make_interval(secs => $4), $5, $6 FROM lock
         ON CONFLICT (process) DO UPDATE SET oldest = excluded.oldest, views = excluded.views,
           renewed = excluded.renewed, lease = excluded.lease, watched = excluded.watched, number = excluded.number
         WHERE own.number < excluded.number
         RETURNING (SELECT generation FROM {s}.head),
           (SELECT count(*) FROM {s}.pins AS p WHERE p.process <> $1 AND p.renewed + p.lease >= clock_timestamp()),
           (SELECT count(*) FROM {s}.pins AS p WHERE p.process < $1 AND p.renewed + p.lease >= clock_timestamp()),
           own.xmax = 0";
    forgettable(BYTEA_ARRAY, INT8, BOOL) =
        "SELECT count(*) FROM {s}.current WHERE key = ANY($1) AND generation <= $2 AND ($3 OR value IS NULL)";
    unpin(UUID) =
        "DELETE FROM {s}.pins WHERE process = $1";
    expire() =
        "DELETE FROM {s}.pins WHERE renewed + lease < clock_timestamp()";
    /// A statement of its own: what follows sees everything that was committed before the lock was taken.
    lock_store() =
        format!("SELECT 1, {SETTINGS} FROM {{s}}.store FOR UPDATE");
    oldest() =
        "SELECT h.generation, h.time_us, (SELECT min(oldest) FROM {s}.pins) FROM {s}.head AS h";
    raise(INT8_ARRAY, INT8_ARRAY) =
        "INSERT INTO {s}.floors AS f (space, generation) SELECT * FROM unnest($1::bigint[], $2::bigint[])
         ON CONFLICT (space) DO UPDATE SET generation = greatest(f.generation, excluded.generation)
         RETURNING space, generation";
    below(INT8, INT8, INT8) =
        "SELECT generation, keys FROM {s}.touched WHERE space = $1 AND generation <= $2
         ORDER BY generation LIMIT $3";
    drop_past(BYTEA_ARRAY, INT8) =
        "DELETE FROM {s}.past WHERE key = ANY($1) AND until <= $2";
    /// A row that a writer is changing at this moment is left: the writer's commit touches it again.
    forget(BYTEA_ARRAY, INT8, BOOL) =
        "DELETE FROM {s}.current WHERE key IN (
           SELECT key FROM {s}.current
           WHERE key = ANY($1) AND generation <= $2 AND ($3 OR value IS NULL) FOR UPDATE SKIP LOCKED)";
    drop_touched(INT8, INT8_ARRAY) =
        "DELETE FROM {s}.touched WHERE space = $1 AND generation = ANY($2)";
    /// How many rows the tables hold that commits write to, as the server estimates it.
    estimate() =
        "SELECT coalesce(sum(greatest(reltuples, 0)), 0)::float8 FROM pg_catalog.pg_class
         WHERE oid IN ('{s}.past'::regclass, '{s}.touched'::regclass, '{s}.current'::regclass)";
    /// An outcome that is asked for later than that is [not known](super::landed::Landed).
    forget_writers() =
        "DELETE FROM {s}.writers WHERE seen < clock_timestamp() - interval '1 day'";
    views_elsewhere(UUID) =
        "SELECT coalesce(sum(views), 0)::bigint FROM {s}.pins
         WHERE process <> $1 AND renewed + lease >= clock_timestamp()";
    time() =
        "SELECT extract(epoch FROM clock_timestamp())::float8";
    silent(UUID, FLOAT8) =
        "SELECT 1 FROM {s}.pins WHERE process <> $1 AND renewed + lease >= clock_timestamp()
           AND extract(epoch FROM renewed)::float8 < $2 LIMIT 1";
    pause() =
        "SELECT pg_sleep(0.02)";
    all(BYTEA, INT8) =
        "SELECT key, rev, generation, time_us, value FROM {s}.current WHERE key >= $1 ORDER BY key LIMIT $2";
    delete(BYTEA_ARRAY) =
        "DELETE FROM {s}.current WHERE key = ANY($1)";
    /// Used by programs of users, which know text only.
    outbox_put(TEXT, TEXT, TEXT, TEXT) =
        "INSERT INTO {s}.outbox (id, shard, kind, body) VALUES ($1::text::uuid, $2::text::integer, $3, $4)";
    outbox_due(INT4_ARRAY, INT8, INT8) =
        "SELECT id, kind, body, (extract(epoch FROM at) * 1000000)::bigint, failed, shard, position FROM {s}.outbox
         WHERE failed IS NULL AND shard = ANY($1) AND position > $2 ORDER BY position LIMIT $3";
    outbox_failed(UUID, INT8) =
        "SELECT id, kind, body, (extract(epoch FROM at) * 1000000)::bigint, failed, shard, position FROM {s}.outbox
         WHERE failed IS NOT NULL AND id > $1 ORDER BY id LIMIT $2";
    outbox_fail(UUID, TEXT) =
        "UPDATE {s}.outbox SET failed = $2 WHERE id = $1 RETURNING id";
    outbox_retry(UUID) =
        "UPDATE {s}.outbox SET failed = NULL, position = nextval('{s}.outbox_positions')
         WHERE id = $1 AND failed IS NOT NULL RETURNING id, pg_notify('latchwork_{s}', 'outbox')";
    outbox_remove(UUID) =
        "DELETE FROM {s}.outbox WHERE id = $1 RETURNING id";
    outbox_take(UUID) =
        "DELETE FROM {s}.outbox WHERE id = $1 AND failed IS NULL";
    stats() =
        "SELECT (SELECT generation FROM {s}.head), (SELECT count(*) FROM {s}.current),
           (SELECT count(*) FROM {s}.past), (SELECT sum(pg_total_relation_size(c.oid))::bigint
             FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
             WHERE n.nspname = '{s}' AND c.relkind = 'r')";
    verify() =
        "SELECT 'current', key, 'its generation is above that of the store' FROM {s}.current
           WHERE generation > (SELECT generation FROM {s}.head)
         UNION ALL
         SELECT 'current', key, 'its key has no space' FROM {s}.current WHERE length(key) < 4
         UNION ALL
         SELECT 'current', key, 'its rev or generation is not positive' FROM {s}.current
           WHERE rev < 1 OR generation < 1
         UNION ALL
         SELECT 'past', p.key, 'it ends where no version begins' FROM {s}.past AS p
           WHERE NOT EXISTS (SELECT 1 FROM {s}.current AS c WHERE c.key = p.key AND c.generation = p.until)
             AND NOT EXISTS (SELECT 1 FROM {s}.past AS n WHERE n.key = p.key AND n.generation = p.until)
             AND p.until > coalesce((SELECT f.generation FROM {s}.floors AS f WHERE f.space =
               (get_byte(p.key, 0)::bigint << 24) + (get_byte(p.key, 1)::bigint << 16)
               + (get_byte(p.key, 2)::bigint << 8) + get_byte(p.key, 3)::bigint), 0)
         LIMIT 1000";
}

/// The name of a schema must be plain: it is part of every statement.
pub(super) fn check_name(schema: &str) -> Result<()> {
    let is_first = |byte: u8| byte.is_ascii_lowercase() || byte == b'_';
    let is_plain = schema.bytes().all(|byte| is_first(byte) || byte.is_ascii_digit());
    let is_own = !schema.starts_with("pg_");
    match schema.as_bytes() {
        [first, ..] if is_first(*first) && is_plain && is_own && schema.len() <= 48 => Ok(()),
        _ => Err(StoreError::Option {
            what: format!(
                "the schema name {schema:?}: a schema name has 1 to 48 lower-case letters, digits and underscores, \
                 and starts neither with a digit nor with pg_"
            ),
        }),
    }
}

/// What tables of an older program lack that cannot be created beside what is there. It runs before [`create`], each in
/// a transaction of its own: running processes lock these tables and others, in another order. An older program that
/// still runs is told of every group.
pub(super) fn extend(schema: &str) -> [String; 2] {
    [
        format!(
            "ALTER TABLE IF EXISTS {schema}.writers ADD COLUMN IF NOT EXISTS generation bigint,
               ADD COLUMN IF NOT EXISTS time_us bigint"
        ),
        format!(
            "ALTER TABLE IF EXISTS {schema}.pins ADD COLUMN IF NOT EXISTS watched bigint NOT NULL DEFAULT -1,
               ADD COLUMN IF NOT EXISTS number bigint NOT NULL DEFAULT 0"
        ),
    ]
}

/// Creates the schema and its tables. It runs under an advisory lock, in one transaction.
pub(super) fn create(schema: &str, identity: &str, with_schema: bool) -> String {
    let schema_too = if with_schema { format!("CREATE SCHEMA IF NOT EXISTS {schema};") } else { String::new() };
    format!(
        "SELECT pg_advisory_xact_lock(hashtext('latchwork.{schema}'));
         {schema_too}
         CREATE TABLE IF NOT EXISTS {schema}.store (
           one boolean PRIMARY KEY DEFAULT true CHECK (one), version integer NOT NULL, identity text NOT NULL);
         CREATE TABLE IF NOT EXISTS {schema}.head (
           one boolean PRIMARY KEY DEFAULT true CHECK (one), generation bigint NOT NULL, time_us bigint NOT NULL,
           declared bigint NOT NULL) WITH (fillfactor = 10);
         CREATE TABLE IF NOT EXISTS {schema}.current (
           key bytea PRIMARY KEY, rev bigint NOT NULL, generation bigint NOT NULL, time_us bigint NOT NULL,
           value bytea) WITH (fillfactor = 80);
         CREATE TABLE IF NOT EXISTS {schema}.past (
           key bytea NOT NULL, generation bigint NOT NULL, rev bigint NOT NULL, time_us bigint NOT NULL, value bytea,
           until bigint NOT NULL, PRIMARY KEY (key, generation));
         CREATE TABLE IF NOT EXISTS {schema}.touched (
           space bigint NOT NULL, generation bigint NOT NULL, time_us bigint NOT NULL, meta bytea NOT NULL,
           keys bytea NOT NULL, PRIMARY KEY (space, generation));
         CREATE INDEX IF NOT EXISTS touched_time ON {schema}.touched (space, time_us, generation);
         CREATE TABLE IF NOT EXISTS {schema}.floors (space bigint PRIMARY KEY, generation bigint NOT NULL);
         CREATE TABLE IF NOT EXISTS {schema}.pins (
           process uuid PRIMARY KEY, oldest bigint NOT NULL, views bigint NOT NULL, renewed timestamptz NOT NULL,
           lease interval NOT NULL, watched bigint NOT NULL DEFAULT -1, number bigint NOT NULL DEFAULT 0);
         CREATE TABLE IF NOT EXISTS {schema}.writers (
           writer uuid PRIMARY KEY, number bigint NOT NULL, seen timestamptz NOT NULL, generation bigint,
           time_us bigint);
         CREATE TABLE IF NOT EXISTS {schema}.outbox (
           id uuid PRIMARY KEY, position bigint, shard integer NOT NULL, kind text NOT NULL, body text NOT NULL,
           at timestamptz NOT NULL DEFAULT now(), failed text);
         CREATE SEQUENCE IF NOT EXISTS {schema}.outbox_positions;
         CREATE INDEX IF NOT EXISTS outbox_due ON {schema}.outbox (position) WHERE failed IS NULL;
         CREATE OR REPLACE FUNCTION {schema}.outbox_numbered() RETURNS trigger LANGUAGE plpgsql
           SECURITY DEFINER SET search_path = pg_catalog AS $body$
           BEGIN
             UPDATE {schema}.outbox SET position = nextval('{schema}.outbox_positions') WHERE id = NEW.id;
             PERFORM pg_notify('latchwork_{schema}', 'outbox');
             RETURN NULL;
           END $body$;
         DROP TRIGGER IF EXISTS outbox_numbered ON {schema}.outbox;
         CREATE CONSTRAINT TRIGGER outbox_numbered AFTER INSERT ON {schema}.outbox
           DEFERRABLE INITIALLY DEFERRED FOR EACH ROW EXECUTE FUNCTION {schema}.outbox_numbered();
         INSERT INTO {schema}.store (version, identity) VALUES ({VERSION}, '{identity}') ON CONFLICT DO NOTHING;
         UPDATE {schema}.store SET version = {VERSION} WHERE version < {VERSION};
         INSERT INTO {schema}.head (generation, time_us, declared) VALUES (0, 0, 0) ON CONFLICT DO NOTHING;"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_plain_name_can_be_a_schema() {
        for name in ["latchwork", "a", "_x9", "app_2"] {
            assert!(check_name(name).is_ok(), "{name}");
        }
        let long = "a".repeat(49);
        for name in ["", "9a", "pg_temp", "Upper", "a-b", "a\"b", "a;drop schema x", "ä", &long] {
            assert!(matches!(check_name(name), Err(StoreError::Option { .. })), "{name}");
        }
    }
}
