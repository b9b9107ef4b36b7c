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
