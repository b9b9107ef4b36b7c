//! The index follows the log in the background, also while commits never pause. Writers wait when the index cannot keep
//! up.

use std::time::Duration;

use latchwork_store::{Commit, FileOptions, Space, SpaceSpec, Store};

async fn opened(options: FileOptions) -> (tempfile::TempDir, Store, Space) {
    let directory = tempfile::tempdir().unwrap();
    let store = options.open(directory.path()).await.unwrap();
    let space = store.space(SpaceSpec::new("a")).await.unwrap();
    (directory, store, space)
}

async fn put(store: &Store, space: &Space, number: usize) {
    let put = Commit::new().put(&space.key(format!("{number:08}")), vec![7; 100]);
    assert!(store.commit(put).await.unwrap().is_applied());
}

#[tokio::test]
async fn an_overlay_is_folded_in_time_while_commits_never_pause() {
    // The overlay never becomes full, so only the interval makes it fold.
    let options = FileOptions::new().overlay_bytes(1 << 30).fold_interval(Duration::from_millis(300));
    let (_directory, store, space) = opened(options).await;
    for number in 0..20_000 {
        put(&store, &space, number).await;
        if number % 100 == 0 && store.stats().await.unwrap().keys > 100 {
            return;
        }
    }
    panic!("nothing was folded: {:?}", store.stats().await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn memory_is_bounded_while_many_write_more_than_it_holds() {
    const OVERLAY: u64 = 256 << 10;
    let (_directory, store, space) = opened(FileOptions::new().overlay_bytes(OVERLAY)).await;
    let tasks: Vec<_> = (0..32)
        .map(|task| {
            let (store, space) = (store.clone(), space.clone());
            tokio::spawn(async move {
                let mut largest = 0;
                for number in 0..400 {
                    put(&store, &space, task * 1000 + number).await;
                    largest = largest.max(store.stats().await.unwrap().overlay_bytes);
                }
                largest
            })
        })
        .collect();
    let mut largest = 0;
    for task in tasks {
        largest = largest.max(task.await.unwrap());
    }
    // Two overlays, and the commits that were staged before the limit was noticed.
    assert!(largest < 3 * OVERLAY, "{largest} bytes");
    assert_eq!(store.generation().await.unwrap().0, 1 + 32 * 400);
    while store.maintain().await.unwrap() {}
    assert_eq!(store.stats().await.unwrap().keys, 1 + 32 * 400);
}
