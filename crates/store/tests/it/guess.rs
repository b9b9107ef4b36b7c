//! A process that has made the last commit decides the next one on what it knows, without a look at the tables. Here it
//! is wrong about that: in each test one thing has changed of which it has not heard.

// A server takes its own time.
#![allow(clippy::disallowed_methods)]

use std::time::Duration;

use latchwork_store::tokio_postgres::{Client, NoTls, connect};
use latchwork_store::*;

use crate::postgres::options;
use crate::server::Server;
use crate::wire::Wire;

pub(crate) async fn admin(server: &Server) -> Client {
    let (client, connection) = connect(&server.url, NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

pub(crate) async fn apply(store: &Store, commit: Commit) -> Receipt {
    store.commit(commit).await.unwrap().applied().unwrap()
}

/// Two handles, as two processes have them, and a space. Their clocks stand still, so all commits have one time.
async fn two(server: &Server, schema: &str) -> (Store, Store, Space) {
    let opened = |seed| options(schema).env(Env::seeded(seed).0).without_upkeep();
    let first = opened(1).connect(&server.url).await.unwrap();
    let second = opened(2).connect(&server.url).await.unwrap();
    let space = first.space(SpaceSpec::new("a").history(History::Forever)).await.unwrap();
    second.space(SpaceSpec::new("a").history(History::Forever)).await.unwrap();
    (first, second, space)
}

/// The other handle writes keys that this one has written, deleted or never seen.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_of_another_process_counts_although_this_one_has_not_heard_of_it() {
    let server = Server::start();
    let (first, second, space) = two(&server, "others").await;
    let [written, deleted, new] = ["written", "deleted", "new"].map(|key| space.key(key));
    apply(&first, Commit::new().put(&written, "1").put(&deleted, "1")).await;
    apply(&first, Commit::new().delete(&deleted)).await;
    for (round, key) in [&written, &deleted, &new].into_iter().enumerate() {
        // The first handle has made the last commit, so it guesses.
        let own = apply(&first, Commit::new().put(&space.key("own"), "1")).await;
        let receipt = apply(&second, Commit::new().put(key, "2")).await;
        assert_eq!(receipt.generation, own.generation.next());
        let refused = match round {
            0 => first.commit(Commit::new().at_rev(key, Rev(1)).put(key, "3")).await.unwrap(),
            _ => first.commit(Commit::new().absent(key).put(key, "3")).await.unwrap(),
        };
        let Outcome::Refused(refusal) = refused else { panic!("{refused:?}") };
        assert_eq!(refusal.generation, receipt.generation);
        let next = apply(&first, Commit::new().put(key, "4")).await;
        assert_eq!(next.revs, [receipt.revs[0].map(Rev::next)]);
    }
    assert_eq!(first.verify().await.unwrap(), []);
}

/// What is forgotten leaves the head as it is. A guess of the old tombstone would store a version without its past.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_tombstone_that_was_forgotten_is_not_guessed() {
    let server = Server::start();
    let store = options("forgets").without_upkeep().connect(&server.url).await.unwrap();
    let space = store.space(SpaceSpec::new("once").history(History::None).keys_used_once()).await.unwrap();
    let key = space.key("k");
    apply(&store, Commit::new().put(&key, "1")).await;
    apply(&store, Commit::new().delete(&key)).await;
    let last = apply(&store, Commit::new().put(&space.key("other"), "1")).await;
    let keys = store.stats().await.unwrap().keys;
    while store.maintain().await.unwrap() {}
    assert_eq!(store.stats().await.unwrap().keys, keys - 1, "the tombstone is forgotten");
    let receipt = apply(&store, Commit::new().put(&key, "2")).await;
    assert_eq!(receipt.generation, last.generation.next());
    let fresh = options("forgets").without_upkeep().connect(&server.url).await.unwrap();
    let item = fresh.view().await.unwrap().get(&key).await.unwrap().unwrap();
    assert_eq!((receipt.revs, item.rev), (vec![Some(item.rev)], item.rev));
    assert_eq!(item.rev, Rev(1), "nothing was known of the key");
    assert_eq!(store.verify().await.unwrap(), []);
}

/// A commit under an id lands with SQL on another connection, and is sent again alone; and the other way round.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_id_that_has_landed_elsewhere_is_found() {
    let server = Server::start();
    let (first, second, space) = two(&server, "ids").await;
    let key = space.key("k");
    for (number, other) in [&first, &second].into_iter().enumerate() {
        let commit = Commit::new().id(first.commit_id()).put(&key, number.to_string());
        apply(&first, Commit::new().put(&space.key("own"), "1")).await;
        let own = other.postgres().unwrap().begin().await.unwrap();
        let SqlEnded::Applied(landed) = own.commit(commit.clone()).await.unwrap() else { panic!("it lands") };
        assert!(!landed.repeated);
        for _ in 0..2 {
            let again = apply(&first, commit.clone()).await;
            assert_eq!((again.repeated, again.generation), (true, landed.generation));
        }
        let own = first.postgres().unwrap().begin().await.unwrap().repeatable();
        let again = match own.commit(commit).await.unwrap() {
            SqlEnded::RolledBack(SqlError::Outrun) => continue,
            again => again,
        };
        assert!(matches!(again, SqlEnded::Applied(Receipt { repeated: true, .. })), "{again:?}");
    }
}

/// While the SQL runs, another commit lands. The transaction fails as a whole, and its repetition lands once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repeatable_transaction_that_is_outrun_leaves_nothing_and_lands_when_it_is_run_again() {
    let (server, table) = (Server::start(), format!("public.outrun_{}", std::process::id()));
    let client = admin(&server).await;
    client.batch_execute(&format!("CREATE TABLE {table} (n bigint)")).await.unwrap();
    let count = async || {
        let rows = client.query_one(&format!("SELECT count(*) FROM {table}"), &[]).await.unwrap();
        rows.get::<_, i64>(0)
    };
    let (first, second, space) = two(&server, "outrun").await;
    let insert = format!("INSERT INTO {table} VALUES (1)");
    let run = async || {
        let own = first.postgres().unwrap().begin().await.unwrap().repeatable();
        own.tx().execute(&insert, &[]).await.unwrap();
        own
    };
    let key = space.key("k");
    let commit = || Commit::new().absent(&key).put(&key, "1");
    apply(&first, Commit::new().put(&space.key("own"), "1")).await;
    let own = run().await;
    apply(&second, Commit::new().put(&space.key("other"), "1")).await;
    let ended = own.commit(commit()).await.unwrap();
    let SqlEnded::RolledBack(error) = ended else { panic!("{ended:?}") };
    assert!(matches!(error, SqlError::Outrun) && error.runs_again());
    assert_eq!(count().await, 0);
    assert!(matches!(run().await.commit(commit()).await.unwrap(), SqlEnded::Applied(_)));
    assert_eq!(count().await, 1);
    // From now on the guess is right, and the transaction has one round trip less. What is refused is refused.
    assert!(matches!(run().await.commit(Commit::new().put(&key, "2")).await.unwrap(), SqlEnded::Applied(_)));
    assert!(matches!(run().await.commit(commit()).await.unwrap(), SqlEnded::Refused(_)));
    assert_eq!(count().await, 2);
    assert_eq!(first.verify().await.unwrap(), []);
}

/// The guess is sent together with the end of the transaction: what goes wrong there is still told as what it is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repeatable_transaction_says_why_it_cannot_land() {
    let (server, table) = (Server::start(), format!("public.says_{}", std::process::id()));
    let client = admin(&server).await;
    let create = format!("CREATE TABLE {table} (n bigint UNIQUE DEFERRABLE INITIALLY DEFERRED)");
    client.batch_execute(&create).await.unwrap();
    let (first, _, space) = two(&server, "says").await;
    let [key, own_key] = ["k", "own"].map(|key| space.key(key));
    let commit = || Commit::new().absent(&key).put(&key, "1");
    let begin = async || {
        apply(&first, Commit::new().put(&own_key, "1")).await;
        first.postgres().unwrap().begin().await.unwrap().repeatable()
    };
    let own = begin().await;
    for _ in 0..2 {
        own.tx().execute(&format!("INSERT INTO {table} VALUES (7)"), &[]).await.unwrap();
    }
    let ended = own.commit(commit()).await.unwrap();
    let SqlEnded::RolledBack(SqlError::Commit { cause, runs_again: false, .. }) = &ended else { panic!("{ended:?}") };
    assert!(cause.contains("duplicate key"), "{cause}");

    // The same error as that of a wrong guess.
    let fails = format!(
        "CREATE FUNCTION {table}_fails() RETURNS trigger LANGUAGE plpgsql AS
           $$ BEGIN PERFORM 1 / 0; RETURN NULL; END $$;
         CREATE CONSTRAINT TRIGGER fails AFTER INSERT ON {table} DEFERRABLE INITIALLY DEFERRED
           FOR EACH ROW WHEN (NEW.n = 9) EXECUTE FUNCTION {table}_fails()"
    );
    client.batch_execute(&fails).await.unwrap();
    let own = begin().await;
    own.tx().execute(&format!("INSERT INTO {table} VALUES (9)"), &[]).await.unwrap();
    let ended = own.commit(commit()).await.unwrap();
    assert!(matches!(&ended, SqlEnded::RolledBack(SqlError::Commit { runs_again: false, .. })), "{ended:?}");

    // So does a cursor that outlives its transaction, at the very end.
    let own = begin().await;
    own.tx()
        .batch_execute("DECLARE c CURSOR WITH HOLD FOR SELECT 1 / (n - n) FROM generate_series(1, 2) AS n")
        .await
        .unwrap();
    let ended = own.commit(commit()).await.unwrap();
    assert!(matches!(&ended, SqlEnded::RolledBack(SqlError::Commit { runs_again: false, .. })), "{ended:?}");

    let own = begin().await;
    own.tx().execute("SELECT 1 / 0", &[]).await.unwrap_err();
    let ended = own.commit(commit()).await.unwrap();
    assert!(matches!(&ended, SqlEnded::RolledBack(SqlError::Commit { runs_again: false, .. })), "{ended:?}");

    let own = begin().await;
    own.tx().execute(&format!("INSERT INTO {table} VALUES (8)"), &[]).await.unwrap();
    own.tx().batch_execute("COMMIT").await.unwrap();
    let ended = own.commit(commit()).await.unwrap();
    assert!(matches!(&ended, SqlEnded::RolledBack(SqlError::EndedByBody)), "{ended:?}");

    // A limit of the body's own ends its constraint.
    let slow = format!(
        "CREATE FUNCTION {table}_slow() RETURNS trigger LANGUAGE plpgsql AS
           $$ BEGIN PERFORM pg_sleep(30); RETURN NULL; END $$;
         CREATE CONSTRAINT TRIGGER slow AFTER INSERT ON {table} DEFERRABLE INITIALLY DEFERRED
           FOR EACH ROW WHEN (NEW.n = 10) EXECUTE FUNCTION {table}_slow()"
    );
    client.batch_execute(&slow).await.unwrap();
    let own = begin().await;
    let body = format!("SET LOCAL statement_timeout = '100ms'; INSERT INTO {table} VALUES (10)");
    own.tx().batch_execute(&body).await.unwrap();
    let ended = own.commit(commit()).await.unwrap();
    let SqlEnded::RolledBack(error @ SqlError::Commit { runs_again: false, .. }) = &ended else { panic!("{ended:?}") };
    assert_eq!(error.code().map(|code| code.code()), Some("57014"));

    assert!(first.view().await.unwrap().get(&key).await.unwrap().is_none());
}

/// The next transaction finds the connection as good as new: its role, settings, locks and temporary tables are gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repeatable_transaction_leaves_its_connection_clean() {
    let server = Server::start();
    let (first, _, space) = two(&server, "clean").await;
    let [key, own_key] = ["k", "own"].map(|key| space.key(key));
    let begin = async || {
        apply(&first, Commit::new().put(&own_key, "1")).await;
        first.postgres().unwrap().begin().await.unwrap().repeatable()
    };
    let own = begin().await;
    let leave = "SELECT pg_advisory_lock(7); SET latchwork.kept = 'x'; CREATE TEMP TABLE left_behind (n int)";
    own.tx().batch_execute(leave).await.unwrap();
    let pid = async |own: &SqlTransaction| own.tx().query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get(0);
    let before: i32 = pid(&own).await;
    assert!(matches!(own.commit(Commit::new().absent(&key).put(&key, "1")).await.unwrap(), SqlEnded::Applied(_)));
    let own = begin().await;
    assert_eq!(pid(&own).await, before, "it is the same connection");
    let left = "SELECT (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND objid = 7)
                  + (current_setting('latchwork.kept', true) = 'x')::int
                  + (to_regclass('pg_temp.left_behind') IS NOT NULL)::int";
    assert_eq!(own.tx().query_one(left, &[]).await.unwrap().get::<_, i64>(0), 0);
    own.roll_back().await;
}

/// A commit of a new key is told not to have landed, and then reaches the server.
pub(crate) async fn arrive_late(server: &Server, wire: &Wire, store: &Store, key: &Key) {
    let (client, schema) = (admin(server).await, store.postgres().unwrap().schema().to_string());
    // What is sent again is refused. What arrives late would not be.
    let refuse = format!(
        "CREATE FUNCTION {schema}.refuses() RETURNS trigger LANGUAGE plpgsql AS
           $$ BEGIN RAISE EXCEPTION 'not now'; END $$;
         CREATE TRIGGER refuses BEFORE INSERT ON {schema}.current EXECUTE FUNCTION {schema}.refuses()"
    );
    client.batch_execute(&refuse).await.unwrap();
    wire.hold_next();
    let failed = store.commit(Commit::new().absent(key).put(key, "1")).await.unwrap_err();
    assert!(matches!(failed, StoreError::Server { .. }) && failed.to_string().contains("not now"), "{failed}");
    client.batch_execute(&format!("DROP TRIGGER refuses ON {schema}.current")).await.unwrap();
    wire.release().await;
}

/// The statement of a commit reaches the server after its connection was given up, after its outcome was looked up, and
/// after its caller was told that it has not landed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_commit_that_arrives_late_writes_nothing() {
    let server = Server::start();
    let wire = Wire::to(&server, 1).await;
    let store = options("late").without_upkeep().connect(&wire.url).await.unwrap();
    let space = store.space(SpaceSpec::new("a")).await.unwrap();
    let key = space.key("k");
    apply(&store, Commit::new().put(&space.key("own"), "1")).await;
    let last = apply(&store, Commit::new().put(&space.key("own"), "2")).await;
    arrive_late(&server, &wire, &store, &key).await;
    let fresh = options("late").without_upkeep().connect(&server.url).await.unwrap();
    assert_eq!(fresh.generation().await.unwrap(), last.generation);
    assert!(fresh.get(&key).await.unwrap().is_none());
}

/// The same for the end of a transaction of the user's own: its SQL has run, and is held open by the server.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transaction_whose_end_arrives_late_is_rolled_back() {
    let (server, table) = (Server::start(), format!("public.late_{}", std::process::id()));
    let client = admin(&server).await;
    client.batch_execute(&format!("CREATE TABLE {table} (n bigint)")).await.unwrap();
    let wire = Wire::to(&server, 1).await;
    let store = options("late_own").without_upkeep().connect(&wire.url).await.unwrap();
    let space = store.space(SpaceSpec::new("a")).await.unwrap();
    let key = space.key("k");
    let last = apply(&store, Commit::new().put(&space.key("own"), "1")).await;
    let own = store.postgres().unwrap().begin().await.unwrap().repeatable();
    own.tx().execute(&format!("INSERT INTO {table} VALUES (1)"), &[]).await.unwrap();
    wire.hold_next();
    let ended = own.commit(Commit::new().absent(&key).put(&key, "1")).await.unwrap();
    assert!(matches!(&ended, SqlEnded::RolledBack(SqlError::Lost)), "{ended:?}");
    wire.release().await;
    let ended = async {
        let open =
            "SELECT count(*) FROM pg_stat_activity WHERE state LIKE 'idle in transaction%' AND datname IS NOT NULL
                      AND query NOT LIKE '%pg_stat_activity%' AND query LIKE '%latchwork%'";
        while client.query_one(open, &[]).await.unwrap().get::<_, i64>(0) > 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), ended).await.expect("the server ends the transaction");
    assert_eq!(client.query_one(&format!("SELECT count(*) FROM {table}"), &[]).await.unwrap().get::<_, i64>(0), 0);
    let fresh = options("late_own").without_upkeep().connect(&server.url).await.unwrap();
    assert_eq!(fresh.generation().await.unwrap(), last.generation);
    assert!(fresh.view().await.unwrap().get(&key).await.unwrap().is_none());
}

/// A process that goes silent between two messages of the end must not hold the head for long.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_transaction_that_stops_at_its_end_is_ended_by_the_server() {
    let server = Server::start();
    let (first, _, space) = two(&server, "silent_end").await;
    let client = admin(&server).await;
    let schema = first.postgres().unwrap().schema().to_string();
    let note = format!(
        "CREATE TABLE {schema}.noted (setting text);
         CREATE FUNCTION {schema}.notes() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
           INSERT INTO {schema}.noted VALUES (current_setting('idle_in_transaction_session_timeout'));
           RETURN NULL; END $$;
         CREATE TRIGGER notes AFTER UPDATE ON {schema}.head EXECUTE FUNCTION {schema}.notes()"
    );
    for is_repeatable in [false, true] {
        apply(&first, Commit::new().put(&space.key("own"), "1")).await;
        let own = first.postgres().unwrap().begin().await.unwrap();
        let own = if is_repeatable { own.repeatable() } else { own };
        client.batch_execute(&note).await.unwrap();
        let ended = own.commit(Commit::new().put(&space.key("own"), "2")).await.unwrap();
        assert!(matches!(ended, SqlEnded::Applied(_)), "{ended:?}");
        let noted = client.query_one(&format!("SELECT setting FROM {schema}.noted"), &[]).await.unwrap();
        assert_eq!(noted.get::<_, &str>(0), "10s", "repeatable: {is_repeatable}");
        let forget =
            format!("DROP TRIGGER notes ON {schema}.head; DROP FUNCTION {schema}.notes; DROP TABLE {schema}.noted");
        client.batch_execute(&forget).await.unwrap();
    }
}

/// The commit writes a key without a check, and what this process knows of it is nothing, or old. It must not be outrun
/// for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_repeatable_transaction_is_not_outrun_twice_for_the_same_reason() {
    let server = Server::start();
    let (first, second, space) = two(&server, "twice").await;
    let end = async |key: &Key| {
        let own = first.postgres().unwrap().begin().await.unwrap().repeatable();
        own.commit(Commit::new().put(key, "2")).await.unwrap()
    };
    // Until the head is known again.
    let settle = async || {
        for _ in 0..3 {
            apply(&first, Commit::new().put(&space.key("own"), "1")).await;
        }
    };
    let [unknown, old] = ["unknown", "old"].map(|name| space.key(name));
    apply(&first, Commit::new().put(&old, "1")).await;
    apply(&second, Commit::new().put(&old, "1").put(&unknown, "1")).await;
    settle().await;
    assert!(matches!(end(&unknown).await, SqlEnded::Applied(_)), "what is not known is not guessed");
    settle().await;
    assert!(matches!(end(&old).await, SqlEnded::RolledBack(SqlError::Outrun)));
    settle().await;
    assert!(matches!(end(&old).await, SqlEnded::Applied(_)));
}

/// The body drops the statements that are prepared on its connection, also those of the store.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_without_its_statements_is_not_used_again() {
    let server = Server::start();
    let store = options("dealloc").transactions(1).without_upkeep().connect(&server.url).await.unwrap();
    let space = store.space(SpaceSpec::new("a")).await.unwrap();
    for is_repeatable in [false, true] {
        apply(&store, Commit::new().put(&space.key("own"), "1")).await;
        for drops in [true, false] {
            let own = store.postgres().unwrap().begin().await.unwrap();
            let own = if is_repeatable { own.repeatable() } else { own };
            if drops {
                own.tx().batch_execute("DEALLOCATE ALL").await.unwrap();
            }
            let ended = own.commit(Commit::new().put(&space.key("own"), "2")).await.unwrap();
            assert_eq!(matches!(ended, SqlEnded::Applied(_)), !drops, "{ended:?}");
        }
    }
}

/// The server thinks that a scan of a whole table soon finds a commit below a floor, and there may be none: in a table
/// of millions each slice of the clean-up would take seconds.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_clean_up_looks_commits_up_in_an_index() {
    let server = Server::start();
    let schema = format!("t_{}_cleaned", std::process::id());
    let store = options("cleaned").without_upkeep().connect(&server.url).await.unwrap();
    let space = store.space(SpaceSpec::new("a")).await.unwrap();
    let client = admin(&server).await;
    let many = format!(
        "INSERT INTO {schema}.touched SELECT 999999, g, g, '', '' FROM generate_series(1, 20000) AS g;
         ANALYZE {schema}.touched"
    );
    client.batch_execute(&many).await.unwrap();
    let scans = async || {
        let asked = "SELECT seq_scan, idx_scan FROM pg_stat_user_tables
            WHERE schemaname = $1 AND relname = 'touched'";
        let row = client.query_one(asked, &[&schema]).await.unwrap();
        (row.get::<_, i64>(0), row.get::<_, i64>(1))
    };
    // The server counts the scans of a connection now and then. Those of the opening are in the first count.
    let clean_up = async || {
        let looked_up = scans().await.1;
        while scans().await.1 < looked_up + 100 {
            apply(&store, Commit::new().put(&space.key("k"), "1")).await;
            while store.maintain().await.unwrap() {}
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        scans().await.0
    };
    assert_eq!(clean_up().await, clean_up().await);
}
