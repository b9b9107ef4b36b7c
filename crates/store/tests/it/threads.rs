//! The store's own threads: what they do while callers continue, and when they end.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use latchwork_store::disk::sim::{Attempt, SimDisk};
use latchwork_store::*;
use parking_lot::Mutex;

use crate::backends::small_limits;

fn options(disk: &SimDisk) -> FileOptions {
    FileOptions::new().disk(disk.clone()).limits(small_limits()).segment_bytes(256 << 10)
}

async fn put(store: &Store, key: &Key) {
    store.commit(Commit::new().put(key, "value")).await.unwrap().applied().unwrap();
}

#[tokio::test]
async fn dropping_a_store_does_not_wait_for_the_removal_of_old_history() {
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
    let oldest = view.generation();
    drop(view);
    put(&store, &space.key("k")).await;
    while store.oldest(&space) == oldest {
        tokio::task::yield_now().await;
    }
    // The fold thread is removing old history now.
    drop(store);
    let store = options(&disk).without_threads().open("/d").await.unwrap();
    assert!(store.stats().await.unwrap().past_versions > 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_restore_ends_while_commits_continue() {
    let home = tempfile::tempdir().unwrap();
    let (directory, snapshot) = (home.path().join("data"), home.path().join("snapshot"));
    let store = Store::open(directory).await.unwrap();
    let space = store.space(SpaceSpec::new("a")).await.unwrap();
    put(&store, &space.key("k")).await;
    store.view().await.unwrap().persist(&snapshot).await.unwrap();
    let ended = Arc::new(AtomicBool::new(false));
    let mut tasks = tokio::task::JoinSet::new();
    for task in 0..64 {
        let (store, key, ended) = (store.clone(), space.key(format!("{task}")), ended.clone());
        tasks.spawn(async move {
            while !ended.load(Ordering::SeqCst) {
                put(&store, &key).await;
            }
        });
    }
    for _ in 0..10 {
        let restore = store.restore(&snapshot, Confirm::ReplaceEverything);
        tokio::time::timeout(Duration::from_secs(5), restore).await.expect("it ends").unwrap();
    }
    ended.store(true, Ordering::SeqCst);
    tasks.join_all().await;
}

/// Makes the next sync of the index wait. The first channel signals that it waits; the second releases it.
fn stop_at_sync_of_index(disk: &SimDisk) -> (mpsc::Receiver<()>, mpsc::Sender<()>) {
    let (reached, at_sync) = mpsc::channel();
    let (go_on, may_go_on) = mpsc::channel();
    let mut first = Some((reached, may_go_on));
    disk.set_faults(move |attempt, path| {
        if attempt == Attempt::Sync
            && path == Path::new("/d/index.redb")
            && let Some((reached, may_go_on)) = first.take()
        {
            reached.send(()).unwrap();
            may_go_on.recv().unwrap();
        }
        None
    });
    (at_sync, go_on)
}

#[tokio::test]
async fn only_views_and_commits_wait_for_a_restore() {
    let disk = SimDisk::new();
    let store = options(&disk).open("/d").await.unwrap();
    let key = store.space(SpaceSpec::new("a")).await.unwrap().key("k");
    put(&store, &key).await;
    store.view().await.unwrap().persist("/s").await.unwrap();
    put(&store, &key).await;
    while store.maintain().await.unwrap() {}
    let (at_sync, go_on) = stop_at_sync_of_index(&disk);
    let restoring = tokio::spawn({
        let store = store.clone();
        async move { store.restore("/s", Confirm::ReplaceEverything).await }
    });
    tokio::task::spawn_blocking(move || at_sync.recv().unwrap()).await.unwrap();
    let viewing = tokio::spawn({
        let (store, key) = (store.clone(), key.clone());
        async move { store.view().await.unwrap().get(&key).await.unwrap().unwrap().generation }
    });
    let committing = tokio::spawn({
        let (store, key) = (store.clone(), key.clone());
        async move { store.commit(Commit::new().delete(&key)).await.unwrap().applied().unwrap().generation }
    });
    let before = store.stats().await.unwrap().generation;
    // This thread must not wait: it releases the sync.
    #[allow(clippy::disallowed_methods)]
    tokio::time::sleep(Duration::from_millis(20)).await;
    assert!(!viewing.is_finished() && !committing.is_finished());
    go_on.send(()).unwrap();
    let restored = restoring.await.unwrap().unwrap();
    assert_eq!(committing.await.unwrap(), restored.next());
    assert_eq!(viewing.await.unwrap(), restored);
    assert!(before < restored, "figures do not wait");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn a_changed_history_stays_while_other_tasks_list_the_spaces() {
    let store = Store::memory().await.unwrap();
    let declare = |history| store.space(SpaceSpec::new("a").history(history));
    declare(History::None).await.unwrap();
    let ended = Arc::new(AtomicBool::new(false));
    let mut listing = tokio::task::JoinSet::new();
    for _ in 0..3 {
        let (store, ended) = (store.clone(), ended.clone());
        listing.spawn(async move {
            while !ended.load(Ordering::SeqCst) {
                store.spaces().await.unwrap();
                tokio::task::yield_now().await;
            }
        });
    }
    for round in 0..20_000 {
        let space = declare(History::Forever).await.unwrap();
        tokio::task::yield_now().await;
        let watch = store.watch(space.all(), store.generation().await.unwrap()).await;
        assert!(watch.is_ok(), "round {round}: {:?}", watch.err());
        declare(History::None).await.unwrap();
    }
    ended.store(true, Ordering::SeqCst);
    listing.join_all().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn many_spaces_may_be_declared_concurrently() {
    for _ in 0..8 {
        let store = Store::memory().await.unwrap();
        let mut declaring = tokio::task::JoinSet::new();
        for number in 0..400 {
            let store = store.clone();
            declaring.spawn(async move { store.space(SpaceSpec::new(format!("{number}"))).await.unwrap().id() });
        }
        let numbers: std::collections::BTreeSet<_> = declaring.join_all().await.into_iter().collect();
        assert_eq!(numbers.len(), 400);
    }
}

/// Which threads made the syncs of the log, and what the syncs wait for.
struct Syncs {
    /// For each sync, whether the sync thread made it.
    aside: Arc<Mutex<Vec<bool>>>,
    /// How long each takes by the store's clock, in milliseconds.
    takes: Arc<AtomicU64>,
    /// Set when a sync waits. It ends when something is sent to `go_on`.
    waits: Arc<AtomicBool>,
    go_on: mpsc::Sender<()>,
}

fn watch_syncs(disk: &SimDisk, clock: Arc<VirtualClock>) -> Syncs {
    let (go_on, may_go_on) = mpsc::channel();
    let syncs = Syncs { aside: Arc::default(), takes: Arc::default(), waits: Arc::default(), go_on };
    let (aside, takes, waits) = (syncs.aside.clone(), syncs.takes.clone(), syncs.waits.clone());
    disk.set_faults(move |attempt, path| {
        if attempt != Attempt::Sync || !path.starts_with("/d/") || !path.to_string_lossy().contains("log-") {
            return None;
        }
        aside.lock().push(std::thread::current().name() == Some("latchwork-sync"));
        let takes = takes.load(Ordering::SeqCst);
        clock.advance(Duration::from_millis(takes));
        if takes > 0 && aside.lock().last() == Some(&true) {
            waits.store(true, Ordering::SeqCst);
            may_go_on.recv_timeout(Duration::from_secs(20)).expect("other tasks run during a slow sync");
        }
        None
    });
    syncs
}

/// One caller and one other task on a runtime with one thread. A slow sync ends only when the other task releases it.
#[tokio::test]
async fn a_lone_caller_makes_quick_syncs_itself_and_the_sync_thread_slow_ones() {
    let disk = SimDisk::new();
    let (env, clock) = Env::seeded(1);
    let syncs = watch_syncs(&disk, clock);
    let store = options(&disk).env(env).fold_interval(Duration::from_secs(3600)).open("/d").await.unwrap();
    syncs.aside.lock().clear();
    let key = store.space(SpaceSpec::new("a")).await.unwrap().key("k");
    put(&store, &key).await;
    put(&store, &key).await;
    assert_eq!(*syncs.aside.lock(), [true, false, false], "before the first measurement a sync may be slow");
    syncs.takes.store(10, Ordering::SeqCst);
    put(&store, &key).await;
    for _ in 0..5 {
        let (waits, go_on) = (syncs.waits.clone(), syncs.go_on.clone());
        let other = tokio::spawn(async move {
            while !waits.swap(false, Ordering::SeqCst) {
                tokio::task::yield_now().await;
            }
            go_on.send(()).unwrap();
        });
        put(&store, &key).await;
        other.await.unwrap();
    }
    assert_eq!(syncs.aside.lock()[3..], [false, true, true, true, true, true]);
    // The disk is fast again. Syncs of the sync thread are measured, too.
    syncs.takes.store(0, Ordering::SeqCst);
    for _ in 0..20 {
        put(&store, &key).await;
    }
    assert_eq!(syncs.aside.lock().last(), Some(&false));
}

#[tokio::test]
async fn without_threads_every_caller_makes_its_own_syncs() {
    let disk = SimDisk::new();
    let (env, clock) = Env::seeded(1);
    let syncs = watch_syncs(&disk, clock);
    syncs.takes.store(10, Ordering::SeqCst);
    let store = options(&disk).env(env).without_threads().open("/d").await.unwrap();
    let key = store.space(SpaceSpec::new("a")).await.unwrap().key("k");
    put(&store, &key).await;
    assert!(syncs.aside.lock().iter().all(|aside| !aside));
}

/// A chain of commits on one key. Each is sent when the one before it was decided, long before that is durable. All of
/// them are applied in order and share a sync.
#[tokio::test]
async fn a_commit_can_follow_a_decided_one_before_it_is_durable() {
    use std::task::Poll;

    let store = options(&SimDisk::new()).without_threads().open("/d").await.unwrap();
    let space = store.space(SpaceSpec::new("a")).await.unwrap();
    let key = space.key("k");
    put(&store, &key).await;
    let before = store.stats().await.unwrap().groups;
    let mut chain = Vec::new();
    for rev in 1..=20 {
        let decided = Decided::new();
        let commit = Commit::new().at_rev(&key, Rev(rev)).put(&key, "next").tell(&decided);
        let store = &store;
        let mut commit = Box::pin(async move { store.commit(commit).await });
        let first = std::future::poll_fn(|context| Poll::Ready(commit.as_mut().poll(context))).await;
        assert!(first.is_pending() && decided.applies() == Some(true), "{rev}");
        assert_eq!(store.generation().await.unwrap().0, 2, "nothing is durable yet");
        chain.push(commit);
    }
    let decided = Decided::new();
    let late = Commit::new().at_rev(&key, Rev(1)).put(&key, "late").tell(&decided);
    let mut late = Box::pin(store.commit(late));
    assert!(std::future::poll_fn(|context| Poll::Ready(late.as_mut().poll(context))).await.is_pending());
    assert_eq!(decided.applies(), Some(false));
    for (commit, rev) in chain.into_iter().zip(2..) {
        assert_eq!(commit.await.unwrap().applied().unwrap().revs, [Some(Rev(rev))]);
    }
    assert!(!late.await.unwrap().is_applied());
    assert_eq!(store.stats().await.unwrap().groups, before + 1);
}
