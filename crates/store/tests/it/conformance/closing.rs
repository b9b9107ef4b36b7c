//! Closing a store, verifying a healthy one, and its figures.

use latchwork_store::{Commit, Confirm, ErrorKind, Generation, History, Order, Rev, SpaceSpec, StoreError, Timestamp};

use super::{apply, delete, put, refuse, settle, space};
use crate::backends::{Bench, on_every_backend};

on_every_backend!(
    every_call_on_a_closed_store_fails_as_closed,
    closing_ends_a_watch_that_waits,
    commits_in_progress_when_the_store_closes_are_applied_or_fail_as_closed,
    a_healthy_store_has_no_damage,
    figures_add_up,
);

async fn every_call_on_a_closed_store_fails_as_closed(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    let key = space.key("k");
    put(&store, &key, "1").await;
    let view = store.view().await.unwrap();
    let snapshot = bench.path("snapshot");
    view.persist(&snapshot).await.unwrap();
    let mut watch = store.watch(space.all(), Generation(0)).await.unwrap();
    let handle = store.clone();
    store.close().await.unwrap();
    let failures = [
        ("commit", handle.commit(Commit::new().put(&key, "2")).await.err()),
        ("a refused commit", handle.commit(Commit::new().at_rev(&key, Rev(9))).await.err()),
        ("view", handle.view().await.err()),
        ("view_at", handle.view_at(Generation(1)).await.err()),
        ("view_at_time", handle.view_at_time(Timestamp(0)).await.err()),
        ("get", view.get(&key).await.err()),
        ("scan", view.scan(&space.all(), Order::Ascending, 1).await.err()),
        ("history", view.history(&key, 1).await.err()),
        ("changes", view.changes_since(&space.all(), Generation(0), 1).await.err()),
        ("persist", view.persist(bench.path("second")).await.err()),
        ("watch", handle.watch(space.all(), Generation(0)).await.err()),
        ("next", watch.next().await.err()),
        ("space", handle.space(SpaceSpec::new("a")).await.err()),
        ("spaces", handle.spaces().await.err()),
        ("generation", handle.generation().await.err()),
        ("maintain", handle.maintain().await.err()),
        ("restore", handle.restore(&snapshot, Confirm::ReplaceEverything).await.err()),
        ("verify", handle.verify().await.err()),
        ("stats", handle.stats().await.err()),
        ("close", handle.close().await.err()),
    ];
    for (call, failure) in failures {
        assert!(matches!(failure, Some(StoreError::Closed)), "{call}: {failure:?}");
        assert_eq!(failure.map(|failure| failure.kind()), Some(ErrorKind::Unavailable));
    }
}

async fn closing_ends_a_watch_that_waits(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    let mut watch = store.watch(space.all(), Generation(0)).await.unwrap();
    let waiting = tokio::spawn(async move { watch.next().await });
    for _ in 0..10 {
        tokio::task::yield_now().await;
    }
    assert!(!waiting.is_finished());
    store.close().await.unwrap();
    assert!(matches!(waiting.await.unwrap(), Err(StoreError::Closed)));
}

async fn commits_in_progress_when_the_store_closes_are_applied_or_fail_as_closed(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    let mut commits = tokio::task::JoinSet::new();
    for number in 0..50 {
        let (store, commit) = (store.clone(), Commit::new().put(&space.key(format!("{number}")), "1"));
        commits.spawn(async move { (number, store.commit(commit).await) });
    }
    tokio::task::yield_now().await;
    store.close().await.unwrap();
    let mut applied = Vec::new();
    for (number, outcome) in commits.join_all().await {
        match outcome {
            Ok(outcome) => applied.push((number, outcome.applied().unwrap())),
            Err(error) => assert!(matches!(error, StoreError::Closed), "{error}"),
        }
    }
    if bench.is_durable() {
        drop(store);
        let view = bench.open().await.view().await.unwrap();
        for (number, receipt) in applied {
            let item = view.get(&space.key(format!("{number}"))).await.unwrap().unwrap();
            assert_eq!(item.generation, receipt.generation);
        }
    }
}

async fn a_healthy_store_has_no_damage(bench: Bench) {
    let store = bench.open().await;
    assert_eq!(store.verify().await.unwrap(), []);
    let spaces = [
        space(&store, "a", History::None).await,
        space(&store, "b", History::Generations(5)).await,
        space(&store, "c", History::Forever).await,
    ];
    for round in 0..40_u32 {
        for space in &spaces {
            put(&store, &space.key(format!("{}", round % 7)), &"x".repeat(500)).await;
            delete(&store, &space.key(format!("{}", (round + 3) % 7))).await;
        }
        match round % 10 {
            3 => assert_eq!(store.verify().await.unwrap(), []),
            8 => settle(&store).await,
            _ => {}
        }
    }
    settle(&store).await;
    assert_eq!(store.verify().await.unwrap(), []);
}

async fn figures_add_up(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    let before = store.stats().await.unwrap();
    for number in 0..10 {
        put(&store, &space.key(format!("{}", number % 5)), "1").await;
    }
    for _ in 0..3 {
        refuse(&store, Commit::new().absent(&space.key("1"))).await;
    }
    apply(&store, Commit::new().delete(&space.key("never"))).await;
    settle(&store).await;
    let after = store.stats().await.unwrap();
    assert_eq!(after.generation, store.generation().await.unwrap());
    assert_eq!((after.applied - before.applied, after.refused - before.refused), (10, 3));
    assert_eq!((after.keys, after.past_versions, after.pins), (6, 5, 0), "five keys and the space's declaration");
    if bench.is_durable() {
        assert!(after.groups > 0 && after.groups <= after.applied, "{after:?}");
        assert!(after.index_bytes > 0 && after.overlay_bytes == 0, "{after:?}");
        assert_eq!(after.log_bytes > 0, !bench.is_remote(), "{after:?}");
    }
}
