//! Reads and watches of a store on a server while connections are lost, answers stay away, notifications do not come,
//! and clocks disagree.

// A server takes its own time.
#![allow(clippy::disallowed_methods)]

use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use futures_util::FutureExt;
use latchwork_store::tokio_postgres::{Client, NoTls, connect};
use latchwork_store::*;

use crate::postgres::options;
use crate::server::Server;
use crate::wire::Wire;

async fn admin(server: &Server) -> Client {
    let (client, connection) = connect(&server.url, NoTls).await.unwrap();
    tokio::spawn(connection);
    client
}

/// Every connection of the store is ended while none is in use; what is read next knows nothing of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_go_on_when_their_connections_are_lost() {
    let (server, name) = (Server::start(), format!("reads_{}", std::process::id()));
    let admin = admin(&server).await;
    let url = format!("{} application_name={name}", server.url);
    let store = options("reads").connections(4).connect(&url).await.unwrap();
    let space = store.space(SpaceSpec::new("a").history(History::Forever)).await.unwrap();
    let (key, all) = (space.key("k"), space.all());
    let first = store.commit(Commit::new().put(&key, "1")).await.unwrap().applied().unwrap();
    let end = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = $1";
    let open = "SELECT count(*) FROM pg_stat_activity WHERE application_name = $1";
    for round in 0..30 {
        // Each connection for reads is opened again before it is lost: callers that come together use several.
        while admin.query_one(open, &[&name]).await.unwrap().get::<_, i64>(0) < 4 {
            let callers: tokio::task::JoinSet<_> = (0..16)
                .map(|_| {
                    let store = store.clone();
                    async move { store.generation().await.unwrap() }
                })
                .collect();
            callers.join_all().await;
        }
        let view = store.view().await.unwrap();
        let ended = admin.query_one(end, &[&name]).await.unwrap().get::<_, i64>(0);
        assert!(ended >= 4, "{ended} connections are lost");
        match round % 5 {
            0 => assert!(view.get(&key).await.unwrap().is_some()),
            1 => assert_eq!(view.scan(&all, Order::Ascending, 9).await.unwrap().len(), 1),
            2 => assert_eq!(view.history(&key, 9).await.unwrap().len(), 1),
            3 => assert_eq!(store.view().await.unwrap().generation(), first.generation),
            _ => assert_eq!(store.postgres().unwrap().outbox_due(&[1], 0, 9).await.unwrap(), []),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_says_nothing_holds_no_read_for_longer_than_the_patience() {
    let server = Server::start();
    let wire = Wire::to(&server, 1).await;
    let store = options("silent").connections(1).patience(Duration::from_secs(1)).connect(&wire.url).await.unwrap();
    let space = store.space(SpaceSpec::new("a")).await.unwrap();
    let key = space.key("k");
    store.commit(Commit::new().put(&key, "1")).await.unwrap().applied().unwrap();
    let view = store.view().await.unwrap();
    wire.be_silent(true);
    // The second finds the connection gone, and the server says nothing to a new one.
    for _ in 0..2 {
        let (read, all) = (view.get(&key), space.all());
        let read = tokio::time::timeout(Duration::from_secs(20), read).await.expect("it ends");
        assert_eq!(read.unwrap_err().kind(), ErrorKind::Unavailable);
        let scan = view.scan(&all, Order::Ascending, 9);
        let scan = tokio::time::timeout(Duration::from_secs(20), scan).await.expect("it ends");
        assert_eq!(scan.unwrap_err().kind(), ErrorKind::Unavailable);
    }
    wire.be_silent(false);
    assert_eq!(view.get(&key).await.unwrap().unwrap().value, "1");
}

/// A store with one connection for reads, and ten keys that were overwritten once.
async fn with_one_connection(schema: &str) -> (Server, Store, View, Vec<Key>) {
    let server = Server::start();
    let store = options(schema).connections(1).connect(&server.url).await.unwrap();
    let space = store.space(SpaceSpec::new("a").history(History::Forever)).await.unwrap();
    let keys: Vec<Key> = (0..10).map(|number| space.key(format!("{number}"))).collect();
    let put = |value: &'static str| keys.iter().fold(Commit::new(), |commit, key| commit.put(key, value));
    store.commit(put("old")).await.unwrap().applied().unwrap();
    let view = store.view().await.unwrap();
    store.commit(put("new")).await.unwrap().applied().unwrap();
    (server, store, view, keys)
}

/// A caller that waits for an answer polls the connection. It must not be needed for the answers of others.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_read_that_is_not_polled_holds_up_no_other_read() {
    let (_server, store, old, keys) = with_one_connection("held").await;
    let (view, mut rounds) = (store.view().await.unwrap(), 0);
    for round in 0..200 {
        let (key, is_held_again) = (keys[round % keys.len()].clone(), round % 2 == 0);
        let mut held = pin!(view.get(&key));
        // The server may be so fast that it is ready at once.
        if poll_fn(|context| Poll::Ready(held.as_mut().poll(context))).await.is_ready() {
            continue;
        }
        rounds += 1;
        let (store, other) = (store.clone(), keys[0].clone());
        let others = tokio::spawn(async move {
            let view = store.view().await.unwrap();
            assert_eq!(view.get(&other).await.unwrap().unwrap().value, "new");
        });
        if is_held_again {
            // It may be ready by now.
            let polled = poll_fn(|context| Poll::Ready(held.as_mut().poll(context))).await;
            tokio::time::timeout(Duration::from_secs(10), others).await.expect("it is not held up").unwrap();
            if polled.is_pending() {
                assert_eq!(held.await.unwrap().unwrap().value, "new");
            }
        } else {
            tokio::time::timeout(Duration::from_secs(10), others).await.expect("it is not held up").unwrap();
        }
    }
    assert!(rounds >= 20, "{rounds} reads were held");
    assert_eq!(old.get(&keys[3]).await.unwrap().unwrap().value, "old");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_that_are_dropped_at_any_moment_hold_up_no_other_read() {
    let (_server, store, old, keys) = with_one_connection("dropped").await;
    let old = Arc::new(old);
    let mut callers = tokio::task::JoinSet::new();
    for caller in 0..8 {
        let (store, old, keys, mut random) =
            (store.clone(), old.clone(), keys.clone(), fastrand::Rng::with_seed(caller));
        callers.spawn(async move {
            for _ in 0..300 {
                let key = random.choice(&keys).unwrap();
                let new = store.view().await.unwrap();
                let (view, wanted) = if random.bool() { (&*old, "old") } else { (&new, "new") };
                let most = Duration::from_micros(random.u64(1..2000));
                match random.bool() {
                    true => assert_eq!(view.get(key).await.unwrap().unwrap().value, wanted),
                    false => drop(tokio::time::timeout(most, view.get(key)).await),
                }
                // Now and then the connection rests, and is used by one caller alone.
                if random.u8(..) < 8 {
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
            }
        });
    }
    let done = async { while callers.join_next().await.transpose().unwrap().is_some() {} };
    tokio::time::timeout(Duration::from_secs(60), done).await.expect("no read is held up");
}

/// The server still works for a caller that has gone. The next ones do not wait for that.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_read_that_was_given_up_holds_up_no_later_read() {
    let server = Server::start();
    let store = options("given_up").connections(2).connect(&server.url).await.unwrap();
    let (space, postgres) = (store.space(SpaceSpec::new("a")).await.unwrap(), store.postgres().unwrap());
    let key = space.key("k");
    store.commit(Commit::new().put(&key, "1")).await.unwrap().applied().unwrap();
    let slow = postgres.query("SELECT pg_sleep(30)", &[]);
    tokio::time::timeout(Duration::from_millis(200), slow).await.expect_err("it takes long");
    for _ in 0..10 {
        let read = async { store.view().await.unwrap().get(&key).await.unwrap() };
        let item = tokio::time::timeout(Duration::from_secs(10), read).await.expect("it waits for no other read");
        assert_eq!(item.unwrap().value, "1");
    }
}

/// A caller that has polled a connection itself gives it back: the task that stays then sees that the store is gone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_is_gone_leaves_no_connection_behind() {
    let (server, name) = (Server::start(), format!("left_{}", std::process::id()));
    let admin = admin(&server).await;
    let open = "SELECT count(*) FROM pg_stat_activity WHERE application_name = $1";
    let url = format!("{} application_name={name}", server.url);
    let store = options("left").connections(4).connect(&url).await.unwrap();
    let space = store.space(SpaceSpec::new("a")).await.unwrap();
    let key = space.key("k");
    let callers: tokio::task::JoinSet<_> = (0..16)
        .map(|_| {
            let (store, key) = (store.clone(), key.clone());
            async move { store.view().await.unwrap().get(&key).await.unwrap() }
        })
        .collect();
    callers.join_all().await;
    // Each is the last and only caller of its connection.
    store.commit(Commit::new().put(&key, "1")).await.unwrap().applied().unwrap();
    assert_eq!(store.view().await.unwrap().get(&key).await.unwrap().unwrap().value, "1");
    assert!(admin.query_one(open, &[&name]).await.unwrap().get::<_, i64>(0) >= 3, "it has connections");
    store.close().await.unwrap();
    drop((store, space));
    let ended = async {
        while admin.query_one(open, &[&name]).await.unwrap().get::<_, i64>(0) > 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), ended).await.expect("all connections end");
}

/// The function that notifies is replaced by one that only counts.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_notification_that_is_lost_only_delays_a_watch() {
    let (server, fake) = (Server::start(), format!("fake_{}", std::process::id()));
    let admin = admin(&server).await;
    let text = format!(
        "CREATE SCHEMA {fake}; CREATE TABLE {fake}.lost (payload text);
         CREATE FUNCTION {fake}.pg_notify(text, text) RETURNS void LANGUAGE sql AS
           $$ INSERT INTO {fake}.lost VALUES ($2) $$"
    );
    admin.batch_execute(&text).await.unwrap();
    let watching = options("unheard_of").connect(&server.url).await.unwrap();
    let space = watching.space(SpaceSpec::new("a").history(History::Forever)).await.unwrap();
    let mut watch = watching.watch(space.all(), watching.generation().await.unwrap()).await.unwrap();
    let silent = format!("{} options='-c search_path={fake},pg_catalog'", server.url);
    let silent = options("unheard_of").connect(&silent).await.unwrap();
    for number in ["1", "2"] {
        // The watch has looked, and waits.
        let watched = tokio::spawn(async move { (watch.next().await.unwrap(), watch) });
        tokio::time::sleep(Duration::from_millis(200)).await;
        let commit = Commit::new().put(&space.key("k"), number);
        let receipt = silent.commit(commit).await.unwrap().applied().unwrap();
        let next = tokio::time::timeout(Duration::from_secs(30), watched).await.expect("it comes").unwrap();
        assert_eq!(next.0.generation, receipt.generation);
        watch = next.1;
    }
    let lost = format!("SELECT count(*) FROM {fake}.lost");
    assert_eq!(admin.query_one(&lost, &[]).await.unwrap().get::<_, i64>(0), 2, "no notification was sent");
}

/// The clock of the process that watches stands still, so it never polls.
#[tokio::test]
async fn a_commit_is_notified_if_other_processes_use_the_store_and_only_then() {
    let (server, fake) = (Server::start(), format!("alone_{}", std::process::id()));
    let admin = admin(&server).await;
    let text = format!(
        "CREATE SCHEMA {fake}; CREATE TABLE {fake}.sent (payload text);
         CREATE FUNCTION {fake}.pg_notify(text, text) RETURNS void LANGUAGE sql AS
           $$ INSERT INTO {fake}.sent VALUES ($2); SELECT pg_catalog.pg_notify($1, $2) $$"
    );
    admin.batch_execute(&text).await.unwrap();
    let writing = format!("{} options='-c search_path={fake},pg_catalog'", server.url);
    let writing = options("notified").connect(&writing).await.unwrap();
    let space = writing.space(SpaceSpec::new("a").history(History::Forever)).await.unwrap();
    let put = || Commit::new().put(&space.key("k"), "1");
    writing.commit(put()).await.unwrap().applied().unwrap();
    let sent = async || {
        let sent = format!("SELECT count(*) FROM {fake}.sent");
        admin.query_one(&sent, &[]).await.unwrap().get::<_, i64>(0)
    };
    assert_eq!(sent().await, 0);
    let watching = options("notified").env(Env::seeded(1).0).connect(&server.url).await.unwrap();
    let mut watch = watching.watch(space.all(), watching.generation().await.unwrap()).await.unwrap();
    let watched = tokio::spawn(async move { watch.next().await.unwrap() });
    tokio::time::sleep(Duration::from_millis(200)).await;
    let receipt = writing.commit(put()).await.unwrap().applied().unwrap();
    let next = tokio::time::timeout(Duration::from_secs(30), watched).await.expect("it is notified").unwrap();
    assert_eq!((next.generation, sent().await), (receipt.generation, 1));
}

/// The clocks of three clients are an hour and a day apart, and one of them is set back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn times_rise_with_generations_whatever_the_clocks_of_clients_say() {
    let server = Server::start();
    let mut stores = Vec::new();
    for seed in 1..=3 {
        let (env, clock) = Env::seeded(seed);
        let store = options("clocks").env(env).without_upkeep().connect(&server.url).await.unwrap();
        stores.push((store, clock));
    }
    let hour = Duration::from_secs(3600);
    stores[1].1.advance(hour);
    stores[2].1.advance(24 * hour);
    let space = stores[0].0.space(SpaceSpec::new("a").history(History::Forever)).await.unwrap();
    let mut last = (Generation(0), Timestamp(0));
    for round in 0..60_u64 {
        let (store, clock) = &stores[(round * 7 % 3) as usize];
        if round == 30 {
            stores[2].1.jump_to(Timestamp(1));
        }
        clock.advance(Duration::from_millis(1));
        let key = space.key("k");
        let receipt = match round % 2 {
            0 => store.commit(Commit::new().put(&key, "1")).await.unwrap().applied().unwrap(),
            _ => {
                let own = store.postgres().unwrap().begin().await.unwrap();
                let ended = own.commit(Commit::new().put(&key, "1")).await.unwrap();
                let SqlEnded::Applied(receipt) = ended else { panic!("{ended:?}") };
                receipt
            }
        };
        let item = store.view().await.unwrap().get(&key).await.unwrap().unwrap();
        assert_eq!(item.generation, receipt.generation);
        assert!(item.generation > last.0 && item.time >= last.1, "{:?} after {last:?}", (item.generation, item.time));
        last = (item.generation, item.time);
    }
    assert!(last.1 > Timestamp(0).plus(24 * hour));
}

/// The future is polled once, and dropped.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn dropping_the_future_of_a_commit_is_not_a_rollback() {
    let (server, name) = (Server::start(), format!("public.dropped_{}", std::process::id()));
    let admin = admin(&server).await;
    admin.batch_execute(&format!("CREATE TABLE {name} (n bigint)")).await.unwrap();
    let store = options("dropped").connect(&server.url).await.unwrap();
    let other = options("dropped").connect(&server.url).await.unwrap();
    // This handle has not seen the space yet, so it asks for it first.
    let space = other.space(SpaceSpec::new("a")).await.unwrap();
    for number in 0..10_i64 {
        let own = store.postgres().unwrap().begin().await.unwrap();
        own.tx().execute(&format!("INSERT INTO {name} VALUES ($1)"), &[&number]).await.unwrap();
        let commit = Commit::new().put(&space.key(number.to_string()), "1");
        assert!(own.commit(commit).now_or_never().is_none(), "it takes a while");
        let landed = async {
            while store.view().await.unwrap().get(&space.key(number.to_string())).await.unwrap().is_none() {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), landed).await.expect("it lands");
    }
    let count = admin.query_one(&format!("SELECT count(*) FROM {name}"), &[]).await.unwrap();
    assert_eq!(count.get::<_, i64>(0), 10);
}
