//! One caller does not block others: neither by a long check nor by a loop of short operations.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use latchwork_store::disk::sim::SimDisk;
use latchwork_store::disk::{DirectoryLock, Disk, DiskFile, Lock, Open};
use latchwork_store::*;
use parking_lot::Mutex;

/// How long a test waits for something that must happen before it reports a hang.
const HANGS: Duration = Duration::from_secs(20);

/// A simulated disk. Once it is armed, the next read of the index waits until the test releases it.
#[derive(Debug, Clone, Default)]
struct Gate {
    disk: SimDisk,
    next: Arc<Mutex<Option<Stop>>>,
}

/// A read signals on the first channel that it waits, and waits for the second.
type Stop = (mpsc::Sender<()>, mpsc::Receiver<()>);

#[derive(Debug)]
struct GatedFile(Arc<dyn DiskFile>, Gate, bool);

impl Gate {
    /// The first channel signals that a read waits; the second releases it.
    fn arm(&self) -> (mpsc::Receiver<()>, mpsc::Sender<()>) {
        let ((reached, at_read), (go_on, may_go_on)) = (mpsc::channel(), mpsc::channel());
        *self.next.lock() = Some((reached, may_go_on));
        (at_read, go_on)
    }
}

impl Disk for Gate {
    fn create_directory(&self, path: &Path) -> io::Result<()> {
        self.disk.create_directory(path)
    }
    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        self.disk.list(path)
    }
    fn open(&self, path: &Path, how: Open) -> io::Result<Arc<dyn DiskFile>> {
        Ok(Arc::new(GatedFile(self.disk.open(path, how)?, self.clone(), path.ends_with("index.redb"))))
    }
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.disk.rename(from, to)
    }
    fn remove(&self, path: &Path) -> io::Result<()> {
        self.disk.remove(path)
    }
    fn sync_directory(&self, path: &Path) -> io::Result<()> {
        self.disk.sync_directory(path)
    }
    fn lock(&self, path: &Path, how: Lock) -> Result<Box<dyn DirectoryLock>, io::Result<String>> {
        self.disk.lock(path, how)
    }
}

impl DiskFile for GatedFile {
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let waits = if self.2 { self.1.next.lock().take() } else { None };
        if let Some((reached, may_go_on)) = waits {
            reached.send(()).unwrap();
            may_go_on.recv_timeout(HANGS).map_err(io::Error::other)?;
        }
        self.0.read_at(offset, bytes)
    }
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.0.write_at(offset, bytes)
    }
    fn length(&self) -> io::Result<u64> {
        self.0.length()
    }
    fn set_length(&self, length: u64) -> io::Result<()> {
        self.0.set_length(length)
    }
    fn sync(&self) -> io::Result<()> {
        self.0.sync()
    }
}

/// A read set over a large range is checked in the index, row by row. The check is paused in the middle; another caller
/// can commit meanwhile.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_check_of_a_range_does_not_delay_other_commits() {
    let gate = Gate::default();
    let open = || FileOptions::new().disk(gate.clone()).cache_bytes(1 << 20).without_threads().open("/d");
    let store = open().await.unwrap();
    let space = store.space(SpaceSpec::new("a").history(History::Forever)).await.unwrap();
    let fill = async |prefix: &str, count: usize| {
        let keys = (0..count).map(|number| space.key(format!("{prefix}{number:05}")));
        let commit = keys.fold(Commit::new(), |commit, key| commit.put(&key, vec![0; 200]));
        store.commit(commit).await.unwrap().applied().unwrap().generation
    };
    let since = fill("range", 4000).await;
    for _ in 0..2000 {
        fill("other", 1).await;
    }
    store.close().await.unwrap();
    let store = open().await.unwrap();
    let (at_read, go_on) = gate.arm();
    let long = Commit::new().unchanged(&space.prefix("range"), since).put(&space.key("long"), "1");
    let long = tokio::spawn({
        let store = store.clone();
        async move { store.commit(long).await.unwrap().is_applied() }
    });
    at_read.recv_timeout(HANGS).expect("the index is read");
    let other = store.commit(Commit::new().put(&space.key("range00007"), "2"));
    assert!(tokio::time::timeout(HANGS / 2, other).await.expect("it does not wait").unwrap().is_applied());
    go_on.send(()).unwrap();
    assert!(!long.await.unwrap(), "the check sees the commit that was made meanwhile");
    let view = store.view().await.unwrap();
    let long = Commit::new().unchanged(&space.prefix("range"), view.generation()).put(&space.key("long"), "1");
    assert!(store.commit(long).await.unwrap().is_applied());
}

/// Eight tasks loop over operations that complete without waiting, on a runtime with two threads. A ninth task must get
/// the chance to end them.
fn check_not_starved<F>(name: &'static str, file: bool, operation: impl Fn(Store, Space) -> F + Send + Copy + 'static)
where
    F: Future<Output = ()> + Send + 'static,
{
    let (done, ended) = mpsc::channel();
    std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_time().build().unwrap();
        runtime.block_on(async {
            let store = match file {
                true => FileOptions::new().disk(SimDisk::new()).without_threads().open("/d").await.unwrap(),
                false => Store::memory().await.unwrap(),
            };
            let space = store.space(SpaceSpec::new("a").history(History::Forever)).await.unwrap();
            store.commit(Commit::new().put(&space.key("k"), "1")).await.unwrap().applied().unwrap();
            let over = Arc::new(AtomicBool::new(false));
            let mut tasks = tokio::task::JoinSet::new();
            for _ in 0..8 {
                let (store, space, over) = (store.clone(), space.clone(), over.clone());
                tasks.spawn(async move {
                    while !over.load(Ordering::SeqCst) {
                        operation(store.clone(), space.clone()).await;
                    }
                });
            }
            tokio::task::yield_now().await;
            tasks.spawn(async move { over.store(true, Ordering::SeqCst) });
            tasks.join_all().await;
        });
        done.send(()).unwrap();
    });
    assert!(ended.recv_timeout(HANGS).is_ok(), "{name} starves the runtime, file: {file}");
}

#[test]
fn a_loop_of_operations_lets_other_tasks_run() {
    check_not_starved("commit", false, async |store, space| {
        store.commit(Commit::new().put(&space.key("k"), "2")).await.unwrap().applied().unwrap();
    });
    check_not_starved("refused commit", false, async |store, space| {
        assert!(!store.commit(Commit::new().absent(&space.key("k"))).await.unwrap().is_applied());
    });
    for file in [false, true] {
        check_not_starved("answered commit", file, async |store, space| {
            store.commit(Commit::new().present(&space.key("k"))).await.unwrap().applied().unwrap();
        });
        check_not_starved("view", file, async |store, _| drop(store.view().await.unwrap()));
        check_not_starved("generation", file, async |store, _| {
            assert!(store.generation().await.unwrap() >= Generation(2));
        });
        check_not_starved("space", file, async |store, _| drop(store.space(SpaceSpec::new("a")).await.unwrap()));
        check_not_starved("watch", file, async |store, space| {
            let mut watch = store.watch(space.all(), Generation(1)).await.unwrap();
            watch.next().await.unwrap();
        });
    }
}

/// One view is read in a loop, so only the reads themselves can let other tasks run.
#[test]
fn a_loop_of_reads_lets_other_tasks_run() {
    for file in [false, true] {
        check_not_starved("get", file, async |store, space| {
            let view = store.view_at(Generation(2)).await.unwrap();
            for _ in 0..1000 {
                view.get(&space.key("k")).await.unwrap().unwrap();
                view.scan(&space.all(), Order::Ascending, 10).await.unwrap();
                view.history(&space.key("k"), 1).await.unwrap();
                view.changes_since(&space.all(), Generation(1), 1).await.unwrap();
            }
        });
    }
}

/// A small executor within a task. It never lets the runtime renew the task's budget.
#[tokio::test]
async fn a_loop_that_polls_by_hand_ends() {
    let store = Store::memory().await.unwrap();
    let key = store.space(SpaceSpec::new("a")).await.unwrap().key("k");
    let mut work = std::pin::pin!(async {
        for _ in 0..500 {
            store.commit(Commit::new().put(&key, "1")).await.unwrap().applied().unwrap();
            store.view().await.unwrap().get(&key).await.unwrap().unwrap();
        }
    });
    let mut context = std::task::Context::from_waker(std::task::Waker::noop());
    let polls = (0..10_000).take_while(|_| work.as_mut().poll(&mut context).is_pending()).count();
    assert!((1..10_000).contains(&polls), "{polls}");
}
