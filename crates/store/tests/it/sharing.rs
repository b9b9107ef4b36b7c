//! What processes that share a database owe each other: conditions on ranges, views that a restore must not drop,
//! leases that are renewed in time. Every handle here has connections and a writer of its own, as a process has.

// A server and a lease take their own time.
#![allow(clippy::disallowed_methods)]

use std::time::Duration;

use latchwork_store::*;

use crate::server::Server;

fn schema(name: &str) -> String {
    format!("t_{}_{name}", std::process::id())
}

fn options(name: &str) -> PostgresOptions {
    PostgresOptions::new().schema(schema(name)).connections(2)
}

async fn admin(server: &Server) -> tokio_postgres::Client {
    let (client, connection) = tokio_postgres::connect(&server.url, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

/// Processes that start together on a new database: one creates the tables, the others find them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_schema_that_many_open_at_once_is_created_once() {
    let server = Server::start();
    let mut opened = tokio::task::JoinSet::new();
    for _ in 0..8 {
        let (options, url) = (options("at_once"), server.url.clone());
        opened.spawn(async move { options.connect(&url).await.unwrap() });
    }
    let stores = opened.join_all().await;
    let identity = format!("SELECT count(*) FROM {}.store", schema("at_once"));
    assert_eq!(admin(&server).await.query_one(&identity, &[]).await.unwrap().get::<_, i64>(0), 1);
    let space = stores[0].space(SpaceSpec::new("a")).await.unwrap();
    for store in &stores {
        store.commit(Commit::new().put(&space.key("k"), "1")).await.unwrap().applied().unwrap();
    }
    let item = stores[7].view().await.unwrap().get(&space.key("k")).await.unwrap().unwrap();
    assert_eq!(item.rev, Rev(8), "all of them have the same store");
}

/// What names a process does not come from its environment: a test may run two processes with one seed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_with_the_same_random_numbers_are_told_apart() {
    let server = Server::start();
    let open = || options("same_seed").env(Env::seeded(1).0).connect(&server.url);
    // The first one also draws the identity of the store.
    open().await.unwrap().close().await.unwrap();
    let stores = [open().await.unwrap(), open().await.unwrap()];
    let space = stores[0].space(SpaceSpec::new("a")).await.unwrap();
    for store in &stores {
        store.commit(Commit::new().put(&space.key("k"), "1")).await.unwrap().applied().unwrap();
        while store.maintain().await.unwrap() {}
    }
    let asked = format!("SELECT count(*) FROM {}.pins", schema("same_seed"));
    assert_eq!(admin(&server).await.query_one(&asked, &[]).await.unwrap().get::<_, i64>(0), 2);
}

/// A new program opens a store of an older one, which works on. Its transactions lock the tables in any order.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tables_of_an_older_program_are_extended_while_it_runs() {
    let (server, schema) = (Server::start(), schema("extended"));
    options("extended").connect(&server.url).await.unwrap().close().await.unwrap();
    let make_old = format!(
        "ALTER TABLE {schema}.writers DROP COLUMN generation, DROP COLUMN time_us;
         ALTER TABLE {schema}.pins DROP COLUMN watched, DROP COLUMN number;
         UPDATE {schema}.store SET version = 2;"
    );
    let client = admin(&server).await;
    for _ in 0..5 {
        client.batch_execute(&make_old).await.unwrap();
        let (stop, stopped) = tokio::sync::watch::channel(false);
        let mut old = tokio::task::JoinSet::new();
        for number in 0..4 {
            let (client, stopped) = (admin(&server).await, stopped.clone());
            let land = format!(
                "INSERT INTO {schema}.writers (writer, number, seen) VALUES (gen_random_uuid(), 2, clock_timestamp());"
            );
            let look = format!("SELECT count(*) FROM {schema}.pins; SELECT pg_sleep(0.002);");
            let both = if number % 2 == 0 { [&land, &look] } else { [&look, &land] };
            let both = format!("BEGIN; {} {} COMMIT", both[0], both[1]);
            old.spawn(async move {
                while !*stopped.borrow() {
                    client.batch_execute(&both).await.unwrap();
                }
            });
        }
        let mut opened = tokio::task::JoinSet::new();
        for _ in 0..4 {
            let (options, url) = (options("extended"), server.url.clone());
            opened.spawn(async move { options.connect(&url).await.unwrap() });
        }
        let stores = opened.join_all().await;
        let space = stores[0].space(SpaceSpec::new("a")).await.unwrap();
        for store in &stores {
            store.commit(Commit::new().put(&space.key("k"), "1")).await.unwrap().applied().unwrap();
        }
        stop.send_replace(true);
        old.join_all().await;
        for store in stores {
            store.close().await.unwrap();
        }
    }
}

/// Seats are taken by tasks of four processes: each counts the seats of a room, and takes one if there are fewer than
/// five. Without the check of the range, two that counted at the same time would take the last seat.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_range_that_another_process_changed_is_noticed() {
    const ROOMS: u64 = 30;
    let server = Server::start();
    let first = options("seats").connect(&server.url).await.unwrap();
    let space = first.space(SpaceSpec::new("seats")).await.unwrap();
    let mut tasks = tokio::task::JoinSet::new();
    for process in 0..4 {
        let store = options("seats").connect(&server.url).await.unwrap();
        for task in 0..4 {
            let (store, space) = (store.clone(), space.clone());
            tasks.spawn(async move {
                let mut taken = 0;
                for room in 0..ROOMS {
                    for seat in 0..3 {
                        let all = space.prefix(format!("{room}/"));
                        let view = store.view().await.unwrap();
                        let count = view.scan(&all, Order::Ascending, usize::MAX).await.unwrap().len();
                        if count >= 5 {
                            continue;
                        }
                        let key = space.key(format!("{room}/{process}.{task}.{seat}"));
                        let commit = Commit::new().unchanged(&all, view.generation()).put(&key, "");
                        taken += u64::from(store.commit(commit).await.unwrap().is_applied());
                    }
                }
                taken
            });
        }
    }
    let taken: u64 = tasks.join_all().await.iter().sum();
    let view = first.view().await.unwrap();
    let mut all = 0;
    for room in 0..ROOMS {
        let seats = view.scan(&space.prefix(format!("{room}/")), Order::Ascending, usize::MAX).await.unwrap().len();
        assert!(seats <= 5, "room {room} has {seats} seats");
        all += seats as u64;
    }
    assert_eq!(all, taken);
    assert!(all > ROOMS, "{all} seats show nothing");
}

/// A process that has not heard of a commit yet checks a range that the commit changed.
#[tokio::test]
async fn a_commit_that_was_not_heard_of_counts_for_a_range() {
    let server = Server::start();
    let open = || options("unheard").behind_pooler().connect(&server.url);
    let (one, other) = (open().await.unwrap(), open().await.unwrap());
    let space = one.space(SpaceSpec::new("a")).await.unwrap();
    let at = other.view().await.unwrap();
    let (small, large) = (space.key("b"), space.key("c"));
    one.commit(Commit::new().put(&large, "1")).await.unwrap().applied().unwrap();
    let second = one.commit(Commit::new().put(&small, "1")).await.unwrap().applied().unwrap();
    let unchanged = Commit::new().unchanged(&space.all(), at.generation()).put(&space.key("x"), "1");
    let Outcome::Refused(refusal) = other.commit(unchanged).await.unwrap() else { panic!("it has changed") };
    let [FailedCheck { actual: Actual::Changed(key, generation), .. }] = &refusal.failed[..] else {
        panic!("{refusal:?}")
    };
    assert_eq!((key, generation), (&small, &second.generation), "the first key of the range that has changed");
    let elsewhere = Commit::new().unchanged(&space.prefix("y"), at.generation()).put(&space.key("x"), "1");
    assert!(other.commit(elsewhere).await.unwrap().is_applied());
}

/// The view is opened after its process has last written its row, so only a question shows it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restore_counts_the_views_that_other_processes_have_open_now() {
    let (server, home) = (Server::start(), tempfile::tempdir().unwrap());
    let (one, other) = (options("asked"), options("asked"));
    let (one, other) = (one.connect(&server.url).await.unwrap(), other.connect(&server.url).await.unwrap());
    let space = one.space(SpaceSpec::new("a")).await.unwrap();
    one.commit(Commit::new().put(&space.key("k"), "1")).await.unwrap().applied().unwrap();
    let snapshot = home.path().join("snapshot");
    one.view().await.unwrap().persist(&snapshot).await.unwrap();
    let view = other.view().await.unwrap();
    let refused = one.restore(&snapshot, Confirm::ReplaceEverything).await;
    assert!(matches!(refused, Err(StoreError::ViewsOpen { views: 1 })), "{refused:?}");
    assert!(view.get(&space.key("k")).await.unwrap().is_some(), "the view is whole");
    drop(view);
    one.restore(&snapshot, Confirm::ReplaceEverything).await.unwrap();
    // A process that is gone holds up a restore for its lease at the most.
    let gone = options("asked").lease(Duration::from_secs(1)).connect(&server.url).await.unwrap();
    std::mem::forget(gone.view().await.unwrap());
    gone.close().await.unwrap();
    one.restore(&snapshot, Confirm::ReplaceEverything).await.unwrap();
}

/// Renewals use one connection, however many there are.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn renewals_keep_their_connection() {
    let server = Server::start();
    let name = format!("keeper_{}", std::process::id());
    let url = format!("{} application_name={name}", server.url);
    let store = options("kept").lease(Duration::from_secs(1)).connect(&url).await.unwrap();
    let admin = admin(&server).await;
    let connections = async || {
        let asked = "SELECT pid FROM pg_stat_activity WHERE application_name = $1 ORDER BY pid";
        let rows = admin.query(asked, &[&name]).await.unwrap();
        rows.iter().map(|row| row.get::<_, i32>(0)).collect::<Vec<_>>()
    };
    let renewed = async || {
        let asked = format!("SELECT extract(epoch FROM max(renewed))::float8 FROM {}.pins", schema("kept"));
        admin.query_one(&asked, &[]).await.unwrap().get::<_, f64>(0)
    };
    store.view().await.unwrap();
    tokio::time::sleep(Duration::from_millis(300)).await;
    let (before, at) = (connections().await, renewed().await);
    let mut seen = std::collections::BTreeSet::new();
    for _ in 0..75 {
        tokio::time::sleep(Duration::from_millis(20)).await;
        seen.extend(connections().await);
    }
    assert!(renewed().await > at + 0.7, "the lease is renewed");
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), before, "no connection was opened");
}

/// One of the processes that share a store cleans up after so many commits, however many processes there are.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_clean_up_in_turn() {
    let server = Server::start();
    let client = admin(&server).await;
    let mut stores = Vec::new();
    for _ in 0..4 {
        stores.push(options("turns").connect(&server.url).await.unwrap());
    }
    let space = stores[0].space(SpaceSpec::new("a")).await.unwrap();
    let schema = schema("turns");
    let note = format!(
        "CREATE TABLE {schema}.noted (at timestamptz DEFAULT now());
         CREATE FUNCTION {schema}.notes() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
           INSERT INTO {schema}.noted DEFAULT VALUES;
           RETURN NULL; END $$;
         CREATE TRIGGER notes AFTER INSERT ON {schema}.floors EXECUTE FUNCTION {schema}.notes()"
    );
    client.batch_execute(&note).await.unwrap();
    // All processes know of each other. Leases are not renewed while this test runs.
    for store in &stores {
        while store.maintain().await.unwrap() {}
    }
    client.batch_execute(&format!("DELETE FROM {schema}.noted")).await.unwrap();
    let mut writers = tokio::task::JoinSet::new();
    // The groups are small, so all processes hear of them.
    for writer in 0..12 {
        let (store, key) = (stores[0].clone(), space.key(format!("{writer}")));
        writers.spawn(async move {
            for _ in 0..1000 {
                store.commit(Commit::new().put(&key, "1")).await.unwrap().applied().unwrap();
            }
        });
    }
    writers.join_all().await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    let asked = format!("SELECT count(*) FROM {schema}.noted");
    let cleaned: i64 = client.query_one(&asked, &[]).await.unwrap().get(0);
    // Six turns. A slice that has left something is followed by another one.
    assert!((4..=14).contains(&cleaned), "{cleaned} times after 12,000 commits");
}

/// A lease that is renewed while thousands of commits wait is renewed with the next group of commits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_urgent_commit_passes_those_that_wait() {
    const MANY: usize = 20_000;
    let server = Server::start();
    let store = options("urgent").connect(&server.url).await.unwrap();
    let space = store.space(SpaceSpec::new("a")).await.unwrap();
    let put = |number: usize| Commit::new().put(&space.key(format!("{number}")), vec![0; 100]);
    let mut waiting = tokio::task::JoinSet::new();
    let (sent, all) = tokio::sync::watch::channel(0);
    for number in 0..MANY {
        let (store, commit, sent) = (store.clone(), put(number), sent.clone());
        waiting.spawn(async move {
            let answer = store.commit(commit);
            sent.send_modify(|sent| *sent += 1);
            answer.await.unwrap().applied().unwrap().generation
        });
    }
    drop(sent);
    let mut all = all;
    all.wait_for(|sent| *sent == MANY).await.unwrap();
    let urgent = store.commit(put(MANY).urgent()).await.unwrap().applied().unwrap().generation;
    let after = waiting.join_all().await.into_iter().filter(|generation| *generation > urgent).count();
    assert!(after > MANY / 4, "{after} commits that were sent before it came after it");
}
