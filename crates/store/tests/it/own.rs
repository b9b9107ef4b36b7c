//! Transactions of the user's own: SQL on other tables and a commit of the store, together or not at all.

// A server takes its own time.
#![allow(clippy::disallowed_methods)]

use std::time::Duration;

use latchwork_store::tokio_postgres::{Client, NoTls, connect};
use latchwork_store::*;

use crate::postgres::options;
use crate::power_loss::number;
use crate::server::Server;
use crate::wire::Wire;

/// A connection, and a table of the user's with one column.
async fn table(server: &Server, name: &str) -> (Client, String) {
    let (client, connection) = connect(&server.url, NoTls).await.unwrap();
    tokio::spawn(connection);
    let table = format!("public.t_{}_{name}", std::process::id());
    let create = format!("DROP TABLE IF EXISTS {table}; CREATE TABLE {table} (n bigint NOT NULL)");
    client.batch_execute(&create).await.unwrap();
    (client, table)
}

async fn count(client: &Client, table: &str) -> (i64, i64) {
    let query = format!("SELECT count(*), count(DISTINCT n) FROM {table}");
    let row = client.query_one(&query, &[]).await.unwrap();
    (row.get(0), row.get(1))
}

async fn begin(store: &Store) -> SqlTransaction {
    store.postgres().expect("the store is in PostgreSQL").begin().await.unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sql_and_commit_land_together_or_not_at_all() {
    let server = Server::start();
    let (client, table) = table(&server, "together").await;
    let insert = format!("INSERT INTO {table} VALUES ($1)");
    let store = options("together").connect(&server.url).await.unwrap();
    let space = store.space(SpaceSpec::new("work")).await.unwrap();
    let (key, before) = (space.key("k"), store.generation().await.unwrap());
    let commit = || Commit::new().absent(&key).put(&key, "1");

    let own = begin(&store).await;
    own.tx().execute(&insert, &[&1_i64]).await.unwrap();
    let SqlEnded::Applied(receipt) = own.commit(commit()).await.unwrap() else { panic!("it lands") };
    assert_eq!((receipt.generation, receipt.revs), (before.next(), vec![Some(Rev(1))]));
    assert_eq!(count(&client, &table).await.0, 1);
    assert_eq!(store.generation().await.unwrap(), receipt.generation, "this handle knows of it");

    let own = begin(&store).await;
    own.tx().execute(&insert, &[&2_i64]).await.unwrap();
    let SqlEnded::Refused(refusal) = own.commit(commit()).await.unwrap() else { panic!("it is refused") };
    assert_eq!(refusal.failed.len(), 1);
    let own = begin(&store).await;
    own.tx().execute(&insert, &[&3_i64]).await.unwrap();
    own.roll_back().await;
    let own = begin(&store).await;
    own.tx().execute(&insert, &[&4_i64]).await.unwrap();
    drop(own);
    assert_eq!(count(&client, &table).await.0, 1);

    // A commit that has landed under its id does not land again, and neither does the SQL with it. One that changes
    // nothing in the store lands with its SQL.
    let id = CommitId([7; 16]);
    for expected in [2, 2] {
        let own = begin(&store).await;
        own.tx().execute(&insert, &[&5_i64]).await.unwrap();
        assert!(matches!(own.commit(Commit::new().id(id).put(&key, "2")).await.unwrap(), SqlEnded::Applied(_)));
        assert_eq!(count(&client, &table).await.0, expected);
    }
    let own = begin(&store).await;
    own.tx().execute(&insert, &[&6_i64]).await.unwrap();
    assert!(matches!(own.commit(Commit::new()).await.unwrap(), SqlEnded::Applied(_)));
    assert_eq!(count(&client, &table).await.0, 3);
    assert_eq!(store.verify().await.unwrap(), []);
    store.close().await.unwrap();
    assert!(matches!(store.postgres().unwrap().begin().await, Err(StoreError::Closed)));
    assert!(Store::memory().await.unwrap().postgres().is_none());
}

/// `LATCHWORK_FAULTS` sets how many connections are cut. A transaction whose answer is lost has landed or not, and its
/// caller is told which.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_sql_is_lost_or_doubled_when_connections_are_cut() {
    let (server, faults) = (Server::start(), number("LATCHWORK_FAULTS", 400));
    let (client, table) = table(&server, "cut").await;
    let insert = format!("INSERT INTO {table} VALUES ($1)");
    let wire = Wire::to(&server, number("LATCHWORK_SEED", 1)).await;
    let store = options("own_cut").patience(Duration::from_secs(60)).connect(&wire.url).await.unwrap();
    let space = store.space(SpaceSpec::new("work")).await.unwrap();
    wire.break_from_now_on();
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..8_i64 {
        let (store, space, insert, wire) = (store.clone(), space.clone(), insert.clone(), wire.clone());
        tasks.spawn(async move {
            let (mut landed, mut again) = (0_i64, 0_u64);
            while wire.cuts() < faults {
                let number = task * 1_000_000 + landed;
                let key = space.key(number.to_be_bytes());
                let Ok(own) = store.postgres().unwrap().begin().await else { continue };
                // Half of them end in one round trip.
                let own = if landed % 2 == 0 { own.repeatable() } else { own };
                if own.tx().execute(&insert, &[&number]).await.is_err() {
                    again += 1;
                    continue;
                }
                match own.commit(Commit::new().absent(&key).put(&key, "1")).await.unwrap() {
                    SqlEnded::Applied(_) => landed += 1,
                    SqlEnded::RolledBack(error) => {
                        assert!(error.runs_again(), "{error}");
                        again += 1;
                    }
                    SqlEnded::Refused(refusal) => panic!("it had landed before, and was run again: {refusal}"),
                }
            }
            (landed, again)
        });
    }
    let (mut total, mut again) = (0, 0);
    for (landed, more) in tasks.join_all().await {
        (total, again) = (total + landed, again + more);
    }
    wire.mend();
    assert_eq!(count(&client, &table).await, (total, total), "what was answered is there once, and nothing else");
    let found = store.view().await.unwrap().scan(&space.all(), Order::Ascending, usize::MAX).await.unwrap();
    assert_eq!(found.len() as i64, total);
    assert!(total as u64 > faults / 2 && again > 0, "{total} transactions and {again} lost ones show nothing");
    println!("{total} transactions, {again} rolled back, {} connections cut", wire.cuts());
}

/// The user's SQL runs before any row of the store is locked.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sql_that_takes_its_time_holds_up_no_commit() {
    let server = Server::start();
    let (client, table) = table(&server, "slow").await;
    let store = options("slow_sql").connect(&server.url).await.unwrap();
    let space = store.space(SpaceSpec::new("work")).await.unwrap();
    let key = |number: usize| space.key(format!("{number}"));
    let own = begin(&store).await;
    own.tx().execute(&format!("INSERT INTO {table} VALUES (1)"), &[]).await.unwrap();
    let pid: i32 = own.tx().query_one("SELECT pg_backend_pid()", &[]).await.unwrap().get(0);
    let locks = "SELECT count(*) FROM pg_locks AS l JOIN pg_class AS c ON c.oid = l.relation
                 JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE l.pid = $1 AND n.nspname = $2";
    let schema = store.postgres().unwrap().schema().to_string();
    assert_eq!(client.query_one(locks, &[&pid, &schema]).await.unwrap().get::<_, i64>(0), 0);
    assert!(client.query_one(locks, &[&pid, &"public"]).await.unwrap().get::<_, i64>(0) > 0, "its own table is locked");
    let mut last = None;
    for number in 0..20 {
        let commit = store.commit(Commit::new().absent(&key(number)).put(&key(number), "1"));
        let outcome = tokio::time::timeout(Duration::from_secs(10), commit).await.expect("it waits for no SQL");
        last = Some(outcome.unwrap().applied().unwrap().generation);
    }
    let commit = Commit::new().absent(&key(20)).put(&key(20), "1");
    let SqlEnded::Applied(receipt) = own.commit(commit).await.unwrap() else { panic!("it lands") };
    assert_eq!(Some(receipt.generation), last.map(Generation::next), "it takes its generation when it lands");
    assert_eq!(count(&client, &table).await.0, 1);
}

/// Tables of the first version are brought up to date.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_of_an_older_program_gets_its_outbox() {
    let server = Server::start();
    let (client, _) = table(&server, "older").await;
    let store = options("older").connect(&server.url).await.unwrap();
    let postgres = store.postgres().unwrap();
    let schema = postgres.schema().to_string();
    store.close().await.unwrap();
    let older = format!(
        "DROP TABLE {schema}.outbox; DROP SEQUENCE {schema}.outbox_positions;
         DROP FUNCTION {schema}.outbox_numbered(); UPDATE {schema}.store SET version = 1;
         ALTER TABLE {schema}.writers DROP COLUMN generation, DROP COLUMN time_us"
    );
    client.batch_execute(&older).await.unwrap();
    let store = options("older").connect(&server.url).await.unwrap();
    let postgres = store.postgres().unwrap();
    let values = [Uuid::from_u128(1).to_string(), "3".to_string(), "k".to_string(), "{}".to_string()];
    client.execute(postgres.outbox_insert(), &[&values[0], &values[1], &values[2], &values[3]]).await.unwrap();
    let due = postgres.outbox_due(&[3], 0, 10).await.unwrap();
    assert_eq!((due.len(), due[0].id, due[0].kind.as_str()), (1, Uuid::from_u128(1), "k"));
    assert_eq!(postgres.outbox_due(&[4], 0, 10).await.unwrap(), []);
    let space = store.space(SpaceSpec::new("a")).await.unwrap();
    for _ in 0..3 {
        store.commit(Commit::new().put(&space.key("k"), "1")).await.unwrap().applied().unwrap();
    }
}
