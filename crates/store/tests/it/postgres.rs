//! What only a store on a server can go through: connections that are cut at any moment, a server that is restarted,
//! and several processes at once. Every handle here has connections and a writer of its own, as a process has.

// A server and a lease take their own time.
#![allow(clippy::disallowed_methods)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use latchwork_store::*;

use crate::power_loss::number;
use crate::server::Server;
use crate::wire::{Cut, Wire};

pub(crate) fn options(schema: &str) -> PostgresOptions {
    PostgresOptions::new().schema(format!("t_{}_{schema}", std::process::id())).connections(2)
}

/// Commits of which each writes a key of its own that must be absent: one that is lost leaves no key, one that lands
/// twice would be refused or leave a second rev.
async fn write_all(store: &Store, space: &Space, task: u64, is_enough: impl Fn() -> bool) -> Result<u64, String> {
    let mut count = 0;
    while !is_enough() {
        let key = space.key(format!("{task}/{count}"));
        let commit = Commit::new().absent(&key).put(&key, count.to_string());
        let outcome = store.commit(commit).await.map_err(|error| error.to_string())?;
        let receipt = outcome.applied().map_err(|refusal| format!("no other caller writes this key: {refusal}"))?;
        if receipt.revs != [Some(Rev(1))] {
            return Err(format!("{:?} instead of rev 1", receipt.revs));
        }
        count += 1;
    }
    Ok(count)
}

/// Cuts so many connections while commits are made. Says what is wrong with what is stored then.
async fn cut(options: PostgresOptions, server: &Server, faults: u64) -> Result<(), String> {
    let wire = Wire::to(server, number("LATCHWORK_SEED", 1)).await;
    let broken = options.clone().patience(Duration::from_secs(60));
    let store = broken.connect(&wire.url).await.unwrap();
    let space = store.space(SpaceSpec::new("work")).await.unwrap();
    wire.break_from_now_on();
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..8 {
        let (store, space, wire) = (store.clone(), space.clone(), wire.clone());
        tasks.spawn(async move { write_all(&store, &space, task, || wire.cuts() >= faults).await });
    }
    let total: u64 = tasks.join_all().await.into_iter().sum::<Result<u64, String>>()?;
    wire.mend();
    let whole = options.connect(&server.url).await.unwrap();
    let view = whole.view().await.unwrap();
    let found = view.scan(&space.all(), Order::Ascending, usize::MAX).await.unwrap();
    if found.len() as u64 != total || found.iter().any(|(_, item)| item.rev != Rev(1)) {
        return Err(format!("{total} commits were answered, and {} keys are there", found.len()));
    }
    if view.generation() != Generation(total + 1) {
        return Err(format!("{total} commits took {} generations", view.generation().0 - 1));
    }
    assert!(total > 50, "{total} commits show nothing");
    for cut in Cut::ALL {
        assert!(wire.cuts_of(cut) > 0, "{cut:?} has happened");
        println!("{:?}: {}", cut, wire.cuts_of(cut));
    }
    println!("{total} commits, {} connections cut", wire.cuts());
    Ok(())
}

/// `LATCHWORK_FAULTS` sets how many connections are cut.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_commit_is_lost_or_doubled_when_connections_are_cut() {
    let (server, faults) = (Server::start(), number("LATCHWORK_FAULTS", 100));
    cut(options("cut"), &server, faults).await.unwrap();
}

/// Tests of the tests: a store that is broken on purpose is noticed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_sends_again_without_looking_is_caught() {
    let server = Server::start();
    let broken = options("again").sabotage(PostgresSabotage::SendAgain);
    println!("{}", cut(broken, &server, 400).await.expect_err("a commit lands twice"));
}

#[tokio::test]
async fn a_store_that_drops_receipts_is_caught() {
    let server = Server::start();
    let twice = async |options: PostgresOptions| {
        let store = options.connect(&server.url).await.unwrap();
        let space = store.space(SpaceSpec::new("work")).await.unwrap();
        let commit = Commit::new().id(store.commit_id()).put(&space.key("k"), "1");
        store.commit(commit.clone()).await.unwrap().applied().unwrap();
        let again = store.commit(commit).await.unwrap().applied().unwrap();
        again.repeated
    };
    assert!(twice(options("receipts")).await);
    assert!(!twice(options("receipts").sabotage(PostgresSabotage::DropReceipts)).await);
}

/// Without the lock, two processes decide on the same state: an update is lost, or a generation is taken twice.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_reads_the_generation_without_its_lock_is_caught() {
    let server = Server::start();
    for (name, is_broken) in [("locked", false), ("unlocked", true)] {
        let opened = || match is_broken {
            true => options(name).sabotage(PostgresSabotage::SkipLock),
            false => options(name),
        };
        let first = opened().connect(&server.url).await.unwrap();
        let space = first.space(SpaceSpec::new("counters")).await.unwrap();
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..4 {
            let (store, key) = (opened().connect(&server.url).await.unwrap(), space.key("k"));
            tasks.spawn(async move {
                let mut raised = 0;
                for _ in 0..100 {
                    let item = store.view().await?.get(&key).await?;
                    let before: u64 =
                        item.as_ref().map_or(0, |item| String::from_utf8_lossy(&item.value).parse().unwrap());
                    let commit = match &item {
                        Some(item) => Commit::new().at_rev(&key, item.rev),
                        None => Commit::new().absent(&key),
                    };
                    let commit = commit.put(&key, (before + 1).to_string());
                    raised += u64::from(store.commit(commit).await?.is_applied());
                }
                Ok::<u64, StoreError>(raised)
            });
        }
        let raised: Result<u64> = tasks.join_all().await.into_iter().sum();
        let item = first.view().await.unwrap().get(&space.key("k")).await.unwrap().unwrap();
        let stored: u64 = String::from_utf8_lossy(&item.value).parse().unwrap();
        let is_right = raised.as_ref().is_ok_and(|raised| *raised == stored);
        assert_eq!(is_right, !is_broken, "raised {raised:?}, stored {stored}");
    }
}

/// The server is stopped and started again while commits are made; those on their way are looked up.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_commit_is_lost_or_doubled_when_the_server_is_killed() {
    let mut server = Server::start_own();
    let kills = number("LATCHWORK_KILLS", 3);
    let store = options("killed").patience(Duration::from_secs(120)).connect(&server.url).await.unwrap();
    let space = store.space(SpaceSpec::new("work")).await.unwrap();
    let is_over = Arc::new(AtomicBool::new(false));
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..8 {
        let (store, space, is_over) = (store.clone(), space.clone(), is_over.clone());
        tasks.spawn(async move { write_all(&store, &space, task, || is_over.load(Ordering::SeqCst)).await.unwrap() });
    }
    for _ in 0..kills {
        tokio::time::sleep(Duration::from_millis(700)).await;
        server.kill_and_start();
    }
    is_over.store(true, Ordering::SeqCst);
    let total: u64 = tasks.join_all().await.iter().sum();
    let found = store.view().await.unwrap().scan(&space.all(), Order::Ascending, usize::MAX).await.unwrap();
    assert_eq!(found.len() as u64, total);
    assert!(found.iter().all(|(_, item)| item.rev == Rev(1)) && total > 0);
}

/// Four handles, each with its own writer, and a watch on a fifth: it sees every generation once and in order. A space
/// of counters that all of them raise tells that no update was lost. `LATCHWORK_COMMITS` sets how many.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watch_sees_the_commits_of_all_processes_once_and_in_order() {
    let (server, commits) = (Server::start(), number("LATCHWORK_COMMITS", 2000));
    let watching = options("watched").connect(&server.url).await.unwrap();
    let spec = SpaceSpec::new("counters").history(History::Forever);
    let space = watching.space(spec).await.unwrap();
    let begun = watching.generation().await.unwrap();
    let mut watch = watching.watch(space.all(), begun).await.unwrap();
    let mut tasks = tokio::task::JoinSet::new();
    for process in 0..4 {
        let store = options("watched").connect(&server.url).await.unwrap();
        for task in 0..8_u64 {
            let (store, space) = (store.clone(), space.clone());
            tasks.spawn(async move {
                let key = space.key(format!("{}", task % 3));
                for _ in 0..commits / 32 {
                    raise(&store, &key).await;
                }
                process
            });
        }
    }
    let expected = commits / 32 * 32;
    let mut last = begun;
    for _ in 0..expected {
        let committed = tokio::time::timeout(Duration::from_secs(120), watch.next()).await.unwrap().unwrap();
        assert_eq!(committed.generation, last.next(), "no generation is missing, and none comes twice");
        last = committed.generation;
    }
    tasks.join_all().await;
    let view = watching.view().await.unwrap();
    let mut sum = 0;
    for (_, item) in view.scan(&space.all(), Order::Ascending, 10).await.unwrap() {
        sum += String::from_utf8_lossy(&item.value).parse::<u64>().unwrap();
    }
    assert_eq!(sum, expected, "no update was lost");
}

/// Adds one to a counter, by compare and swap.
async fn raise(store: &Store, key: &Key) {
    loop {
        let item = store.view().await.unwrap().get(key).await.unwrap();
        let before: u64 = item.as_ref().map_or(0, |item| String::from_utf8_lossy(&item.value).parse().unwrap());
        let commit = match &item {
            Some(item) => Commit::new().at_rev(key, item.rev),
            None => Commit::new().absent(key),
        };
        if store.commit(commit.put(key, (before + 1).to_string())).await.unwrap().is_applied() {
            return;
        }
    }
}

#[tokio::test]
async fn what_cannot_be_opened_says_why() {
    let server = Server::start();
    let refused = |result: Result<Store>| match result {
        Ok(_) => panic!("it opens"),
        Err(error) => (error.kind(), error.to_string()),
    };
    let (kind, said) = refused(Store::connect("postgres://[").await);
    assert!(kind == ErrorKind::Invalid && said.contains("connection string"), "{said}");
    let nowhere = options("x").patience(Duration::ZERO).connect("host=127.0.0.1 port=1 user=x").await;
    let (kind, said) = refused(nowhere);
    assert!(kind == ErrorKind::Unavailable && said.contains("connect"), "{said}");
    let (kind, said) = refused(PostgresOptions::new().schema("a; drop schema public").connect(&server.url).await);
    assert!(kind == ErrorKind::Invalid && said.contains("schema name"), "{said}");
    let (kind, said) = refused(options("x").connections(0).connect(&server.url).await);
    assert!(kind == ErrorKind::Invalid && said.contains("connections"), "{said}");
    let read_only = format!("{} options='-c default_transaction_read_only=on'", server.url);
    let (kind, said) = refused(options("readonly").connect(&read_only).await);
    assert!(kind == ErrorKind::Unavailable && said.contains("does not allow writes"), "{said}");
}

#[tokio::test]
async fn a_store_of_a_newer_program_is_refused() {
    let server = Server::start();
    let schema = format!("t_{}_newer", std::process::id());
    options("newer").connect(&server.url).await.unwrap().close().await.unwrap();
    let (client, connection) = tokio_postgres::connect(&server.url, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    client.batch_execute(&format!("UPDATE {schema}.store SET version = 99")).await.unwrap();
    let refused = options("newer").connect(&server.url).await.unwrap_err();
    assert!(matches!(refused, StoreError::NewerFormat { found: 99, .. }), "{refused}");
}

/// A view of a process that died keeps history no longer than its lease.
#[tokio::test]
async fn a_view_of_a_dead_process_keeps_history_for_its_lease_only() {
    let server = Server::start();
    let url = server.url.clone();
    let open = || options("leased").lease(Duration::from_secs(1)).connect(&server.url);
    let living = open().await.unwrap();
    let space = living.space(SpaceSpec::new("a")).await.unwrap();
    let key = space.key("k");
    living.commit(Commit::new().put(&key, "1")).await.unwrap().applied().unwrap();
    let (dying, dies) = std::sync::mpsc::channel();
    let (viewed, views) = tokio::sync::oneshot::channel();
    // A process is a runtime here: when that is gone, nothing of it does anything any more.
    let other = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let opened = options("leased").lease(Duration::from_secs(1)).connect(&url);
        let view = runtime.block_on(async { opened.await.unwrap().view().await.unwrap() });
        viewed.send(view.generation()).unwrap();
        dies.recv().unwrap();
        runtime.shutdown_background();
        std::mem::forget(view);
    });
    let at = views.await.unwrap();
    living.commit(Commit::new().put(&key, "2")).await.unwrap().applied().unwrap();
    tokio::time::sleep(Duration::from_millis(2500)).await;
    while living.maintain().await.unwrap() {}
    let seen = living.view_at(at).await.unwrap().get(&key).await.unwrap().unwrap();
    assert_eq!(seen.value, "1", "the view is protected while its process lives");
    dying.send(()).unwrap();
    other.join().unwrap();
    tokio::time::sleep(Duration::from_millis(2500)).await;
    while living.maintain().await.unwrap() {}
    assert_eq!(living.stats().await.unwrap().past_versions, 0);
}
