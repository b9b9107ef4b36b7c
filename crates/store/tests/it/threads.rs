//! What the store's own threads do while callers go on, and when they end.

use std::time::Duration;

use latchwork_store::disk::sim::SimDisk;
use latchwork_store::*;

use crate::backends::small_limits;

fn options(disk: &SimDisk) -> FileOptions {
    FileOptions::new().disk(disk.clone()).limits(small_limits()).segment_bytes(256 << 10)
}

async fn put(store: &Store, key: &Key) {
    store.commit(Commit::new().put(key, "value")).await.unwrap().applied().unwrap();
}

#[tokio::test]
async fn commits_that_come_all_the_time_are_folded_all_the_same() {
    let store = options(&SimDisk::new()).fold_interval(Duration::from_millis(100)).open("/d").await.unwrap();
    let space = store.space(SpaceSpec::new("a")).await.unwrap();
    let committing = async {
        while store.stats().await.unwrap().keys == 0 {
            put(&store, &space.key("k")).await;
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(3), committing).await.expect("something is folded");
}

#[tokio::test]
async fn dropping_a_store_does_not_wait_until_all_dropped_history_is_cleared_away() {
    let disk = SimDisk::new();
    let store = options(&disk).fold_interval(Duration::from_millis(1)).open("/d").await.unwrap();
    let space = store.space(SpaceSpec::new("a")).await.unwrap();
    let view = store.view().await.unwrap();
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..100 {
        let (store, key) = (store.clone(), space.key(format!("{task}")));
        tasks.spawn(async move {
            for _ in 0..500 {
                put(&store, &key).await;
            }
        });
    }
    tasks.join_all().await;
    while store.maintain().await.unwrap() {}
    let past = store.stats().await.unwrap().past_versions;
    drop(view);
    // The thread is at it from here on.
    put(&store, &space.key("k")).await;
    while store.stats().await.unwrap().past_versions >= past {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    drop(store);
    let store = options(&disk).without_threads().open("/d").await.unwrap();
    assert!(store.stats().await.unwrap().past_versions > 0);
}
