//! One pass through everything, on each backend.

use latchwork_store::disk::sim::SimDisk;
use latchwork_store::*;

async fn tour(store: Store, disk: bool) {
    let space = store.space(SpaceSpec::new("a").history(History::Forever)).await.unwrap();
    let bare = store.space(SpaceSpec::new("b")).await.unwrap();
    let key = space.key("x");
    let first = store.commit(Commit::new().absent(&key).put(&key, "1")).await.unwrap().applied().unwrap();
    for i in 0..50 {
        let c = Commit::new().put(&key, format!("{i}")).put(&bare.key(format!("k{i}")), "v");
        store.commit(c).await.unwrap().applied().unwrap();
        if i % 7 == 0 {
            store.maintain().await.unwrap();
        }
    }
    let old = store.view_at(first.generation).await.unwrap();
    assert_eq!(old.get(&key).await.unwrap().unwrap().value, "1");
    let now = store.view().await.unwrap();
    assert_eq!(now.scan(&bare.all(), Order::Descending, 100).await.unwrap().len(), 50);
    assert_eq!(now.history(&key, 100).await.unwrap().len(), 51);
    let mut watch = store.watch(space.all(), Generation(0)).await.unwrap();
    for _ in 0..51 {
        watch.next().await.unwrap();
    }
    assert_eq!(watch.position(), now.generation());
    assert_eq!(store.verify().await.unwrap(), []);
    if !disk {
        let dir = tempfile::tempdir().unwrap();
        now.persist(dir.path().join("s")).await.unwrap();
        drop((old, now));
        let generation = store.restore(dir.path().join("s"), Confirm::ReplaceEverything).await.unwrap();
        assert_eq!(store.generation().await.unwrap(), generation);
    }
}

#[tokio::test]
async fn memory() {
    tour(Store::memory().await.unwrap(), false).await;
}

#[tokio::test]
async fn file() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path().join("d")).await.unwrap();
    tour(store.clone(), false).await;
    store.close().await.unwrap();
    drop(store);
    let store = Store::open(dir.path().join("d")).await.unwrap();
    println!("{:?}", store.stats().await.unwrap());
}

#[tokio::test]
async fn simulated() {
    let disk = SimDisk::new();
    let options = || FileOptions::new().disk(disk.clone()).without_threads();
    let store = options().open("/d").await.unwrap();
    tour(store.clone(), true).await;
    drop(store);
    let store = options().open("/d").await.unwrap();
    println!("{:?} {:?}", store.stats().await.unwrap(), disk.files());
}
