//! What one caller may take from the others: neither a long check nor a loop of short operations stops them.

use std::io;
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::time::Duration;

use latchwork_store::disk::sim::SimDisk;
use latchwork_store::disk::{DirectoryLock, Disk, DiskFile, Lock, Open};
use latchwork_store::*;
use parking_lot::Mutex;

/// How long a test waits for what must happen before it says that it hangs.
const HANGS: Duration = Duration::from_secs(20);

/// A simulated disk whose next read of the index, once it is armed, waits until it may go on.
#[derive(Debug, Clone, Default)]
struct Gate {
    disk: SimDisk,
    next: Arc<Mutex<Option<(mpsc::Sender<()>, mpsc::Receiver<()>)>>>,
}

#[derive(Debug)]
struct GatedFile(Arc<dyn DiskFile>, Gate, bool);

impl Gate {
    /// The first of these tells that a read waits, the other lets it go on.
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

/// A read set over a large range has to be looked up in the index, row by row. The reader of the range stands still in
/// the middle of that; the other caller commits all the same.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_long_check_of_a_range_keeps_no_other_commit_waiting() {
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
    assert!(!long.await.unwrap(), "what was written meanwhile counts");
    let view = store.view().await.unwrap();
    let long = Commit::new().unchanged(&space.prefix("range"), view.generation()).put(&space.key("long"), "1");
    assert!(store.commit(long).await.unwrap().is_applied());
}
