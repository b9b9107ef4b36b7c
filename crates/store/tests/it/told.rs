//! Which processes are told of a group of commits: a small one is told to all, a large one to those that watch what it
//! touches. Every handle here has connections and a writer of its own, as a process has.

// A server takes its own time.
#![allow(clippy::disallowed_methods)]

use std::time::Duration;

use latchwork_store::tokio_postgres::{AsyncMessage, Client, NoTls, connect};
use latchwork_store::*;

use crate::guess::{admin, apply};
use crate::postgres::options;
use crate::server::Server;

/// More than a group needs to be large.
const MANY: usize = 200;

/// The notifications of a store, as text.
async fn heard(server: &Server, schema: &str) -> (Client, tokio::sync::mpsc::UnboundedReceiver<String>) {
    let (client, mut connection) = connect(&server.url, NoTls).await.unwrap();
    let (told, hears) = tokio::sync::mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Some(Ok(message)) = std::future::poll_fn(|context| connection.poll_message(context)).await {
            if let AsyncMessage::Notification(note) = message {
                let _ = told.send(note.payload().to_string());
            }
        }
    });
    client.batch_execute(&format!("LISTEN latchwork_{schema}")).await.unwrap();
    (client, hears)
}

/// Commits that are made together: the first ones may be in small groups. Gives the newest generation.
async fn crowd(store: &Store, space: &Space) -> Generation {
    let mut callers = tokio::task::JoinSet::new();
    for caller in 0..MANY {
        let (store, key) = (store.clone(), space.key(format!("{caller}")));
        callers.spawn(async move { apply(&store, Commit::new().put(&key, "1")).await.generation });
    }
    callers.join_all().await.into_iter().max().unwrap()
}

/// How many commits the largest group had that was told before the group of the last commit.
async fn largest_told(hears: &mut tokio::sync::mpsc::UnboundedReceiver<String>, last: Generation) -> u64 {
    let mut largest = 0;
    loop {
        let payload = hears.recv().await.unwrap();
        let numbers: Vec<u64> = payload.split(' ').map(|number| number.parse().unwrap()).collect();
        largest = largest.max(numbers[1] - numbers[0] + 1);
        if numbers[1] >= last.0 {
            return largest;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_large_group_is_told_if_another_process_watches_what_it_touches() {
    let server = Server::start();
    let writer = options("told_groups").connect(&server.url).await.unwrap();
    let other = options("told_groups").connect(&server.url).await.unwrap();
    let schema = writer.postgres().unwrap().schema().to_string();
    let watched = writer.space(SpaceSpec::new("watched").history(History::Forever)).await.unwrap();
    let plain = writer.space(SpaceSpec::new("plain").history(History::Forever)).await.unwrap();
    let (_client, mut hears) = heard(&server, &schema).await;
    let mut largest = async |space: &Space| {
        crowd(&writer, space).await;
        // A small group is told whatever it touches.
        let last = apply(&writer, Commit::new().put(&plain.key("last"), "1")).await.generation;
        tokio::time::timeout(Duration::from_secs(30), largest_told(&mut hears, last)).await.expect("it is told")
    };
    assert!(largest(&watched).await < 16, "no process watches it");
    let mut watch = other.watch(watched.all(), other.generation().await.unwrap()).await.unwrap();
    let watching = tokio::spawn(async move {
        let mut count = 0;
        while count < MANY {
            count += watch.next().await.unwrap().changes.len();
        }
        watch.next().await
    });
    // The row of the other process is written when its watch begins to wait.
    let asked = format!("SELECT count(*) FROM {schema}.pins WHERE watched <> 0");
    let client = admin(&server).await;
    while client.query_one(&asked, &[]).await.unwrap().get::<_, i64>(0) == 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert!(largest(&plain).await < 16, "no process watches that space");
    assert!(largest(&watched).await >= 16, "another process watches it");
    assert!(!watching.is_finished(), "it has received everything, and waits again");
    watching.abort();
}

/// A caller that has given up waiting leaves a statement behind, which the server may run after a later one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_row_that_was_written_for_a_caller_that_has_gone_does_not_replace_a_newer_one() {
    let server = Server::start();
    let store = options("told_rows").lease(Duration::from_secs(3600)).connect(&server.url).await.unwrap();
    let schema = store.postgres().unwrap().schema().to_string();
    let space = store.space(SpaceSpec::new("a").history(History::Forever)).await.unwrap();
    let key = space.key("k");
    let older = apply(&store, Commit::new().put(&key, "1")).await.generation;
    let newer = apply(&store, Commit::new().put(&key, "2")).await.generation;
    let client = admin(&server).await;
    for round in 0..20 {
        apply(&store, Commit::new().put(&key, "3")).await;
        // The row pins nothing old.
        while store.maintain().await.unwrap() {}
        client.batch_execute(&format!("BEGIN; SELECT 1 FROM {schema}.store FOR UPDATE")).await.unwrap();
        let given_up = tokio::time::timeout(Duration::from_millis(5), store.view_at(newer)).await;
        assert!(given_up.is_err(), "the row waits for a lock");
        let viewing = tokio::spawn({
            let store = store.clone();
            async move { store.view_at(older).await.unwrap() }
        });
        tokio::time::sleep(Duration::from_millis(20)).await;
        client.batch_execute("COMMIT").await.unwrap();
        let view = viewing.await.unwrap();
        tokio::time::sleep(Duration::from_millis(20)).await;
        let asked = format!("SELECT oldest FROM {schema}.pins");
        let oldest = client.query_one(&asked, &[]).await.unwrap().get::<_, i64>(0);
        assert_eq!(oldest as u64, older.0, "round {round}: the view is not pinned");
        drop(view);
    }
}

/// The statement that writes a group has begun before the watch was known, so it tells no process; it ends after that.
/// The clock of the watching process stands still, so it does not poll.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watch_does_not_miss_a_group_that_was_written_when_it_began() {
    let server = Server::start();
    let writer = options("told_late").connect(&server.url).await.unwrap();
    let (env, _clock) = Env::seeded(1);
    let other = options("told_late").env(env).connect(&server.url).await.unwrap();
    let schema = writer.postgres().unwrap().schema().to_string();
    let space = writer.space(SpaceSpec::new("a").history(History::Forever)).await.unwrap();
    let client = admin(&server).await;
    // A large group waits for this lock while it is written.
    let lock = i64::from(std::process::id()) << 8 | 1;
    let hold = format!(
        "CREATE FUNCTION {schema}.holds() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
           IF NEW.generation > OLD.generation + 15 THEN PERFORM pg_advisory_xact_lock({lock}); END IF;
           RETURN NULL; END $$;
         CREATE TRIGGER holds AFTER UPDATE ON {schema}.head FOR EACH ROW EXECUTE FUNCTION {schema}.holds();
         SELECT pg_advisory_lock({lock})"
    );
    client.batch_execute(&hold).await.unwrap();
    let after = other.generation().await.unwrap();
    let writing = tokio::spawn({
        let (writer, space) = (writer.clone(), space.clone());
        async move { crowd(&writer, &space).await }
    });
    let asking = admin(&server).await;
    let count = async |asked: String| asking.query_one(&asked, &[]).await.unwrap().get::<_, i64>(0);
    let until_there_is = async |asked: String| {
        while count(asked.clone()).await == 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let key = lock & 0xffff_ffff;
    until_there_is(format!(
        "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype = 'advisory' AND objid = {key}"
    ))
    .await;
    let mut watch = other.watch(space.all(), after).await.unwrap();
    let watching = tokio::spawn(async move {
        let mut count = 0;
        while count < MANY {
            count += watch.next().await.unwrap().changes.len();
        }
    });
    until_there_is(format!("SELECT count(*) FROM {schema}.pins WHERE watched <> 0")).await;
    client.batch_execute(&format!("SELECT pg_advisory_unlock({lock})")).await.unwrap();
    tokio::time::timeout(Duration::from_secs(30), watching).await.expect("all commits are delivered").unwrap();
    writing.await.unwrap();
}
