//! The file backend: a commit log that is synced for every group, and an index that follows it. Opening a directory
//! reads the index and then the end of the log. docs/format.md describes both.

mod directory;
mod fold;
mod frame;
mod heads;
mod index;
mod layers;
mod log;
mod overlay;
mod read_only;
mod writer;

use std::future::ready;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;

use self::directory::{Completeness, INDEX_FILE};
use self::fold::Folder;
use self::frame::PAGE;
use self::index::Index;
use self::layers::Layers;
use self::log::Log;
use self::overlay::Overlay;
use self::read_only::ReadOnly;
use self::writer::{FileWriter, Parts};
use crate::backend::{Answer, Backend, Before, Changes, Contents, Damage, Pin, Retention, Rules, Scan, Stats};
use crate::disk::{DirectoryLock, Disk, Open, RealDisk, ShadowDisk};
use crate::{
    Commit, Env, Generation, Key, Limits, Outcome, Range, Result, SpaceId, Store, StoreError, Timestamp, Uuid, Version,
};

/// A group that has reached this size is written before more commits are added.
const GROUP_BYTES: u64 = 4 << 20;

/// A frame stores its length in four bytes.
const LARGEST_FRAME: u64 = u32::MAX as u64;

/// How a data directory is opened.
#[derive(Debug, Clone)]
pub struct FileOptions {
    env: Env,
    disk: Arc<dyn Disk>,
    limits: Limits,
    segment_bytes: u64,
    overlay_bytes: u64,
    cache_bytes: usize,
    fold_interval: Duration,
    background: bool,
    #[cfg(feature = "testing")]
    sabotage: Option<Sabotage>,
}

/// Ways to break the store on purpose, to prove that the tests notice it.
#[cfg(feature = "testing")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sabotage {
    /// Groups are written but not synced.
    SkipSync,
    /// Commits are answered and visible when they are decided, and are written with the next ones.
    AnswerBeforeSync,
    /// Commits are answered when they are decided, and become visible later.
    AnswerBeforeSeen,
    /// Every commit is applied as if all its checks held.
    SkipChecks,
}

impl Default for FileOptions {
    fn default() -> FileOptions {
        FileOptions {
            env: Env::system(),
            disk: Arc::new(RealDisk),
            limits: Limits::default(),
            segment_bytes: 16 << 20,
            overlay_bytes: 32 << 20,
            cache_bytes: 64 << 20,
            fold_interval: Duration::from_secs(1),
            background: true,
            #[cfg(feature = "testing")]
            sabotage: None,
        }
    }
}

impl FileOptions {
    /// The defaults.
    ///
    /// ```
    /// # use latchwork_store::{FileOptions, Result};
    /// # async fn example() -> Result<()> {
    /// let store = FileOptions::new().open("./data").await?;
    /// # Ok(()) }
    /// ```
    pub fn new() -> FileOptions {
        FileOptions::default()
    }

    /// The source of time and randomness.
    ///
    /// ```
    /// # use latchwork_store::{Env, FileOptions, Result};
    /// # async fn example() -> Result<()> {
    /// let (env, clock) = Env::seeded(7);
    /// let store = FileOptions::new().env(env).open("./data").await?;
    /// # Ok(()) }
    /// ```
    pub fn env(mut self, env: Env) -> FileOptions {
        self.env = env;
        self
    }

    /// The disk that holds the files.
    ///
    /// ```
    /// # use latchwork_store::disk::RealDisk;
    /// # use latchwork_store::{FileOptions, Result};
    /// # async fn example() -> Result<()> {
    /// let store = FileOptions::new().disk(RealDisk).open("./data").await?;
    /// # Ok(()) }
    /// ```
    pub fn disk(mut self, disk: impl Disk) -> FileOptions {
        self.disk = Arc::new(disk);
        self
    }

    pub(crate) fn shared_disk(mut self, disk: Arc<dyn Disk>) -> FileOptions {
        self.disk = disk;
        self
    }

    /// The largest sizes that the store accepts.
    ///
    /// ```
    /// # use latchwork_store::{FileOptions, Limits, Result};
    /// # async fn example() -> Result<()> {
    /// let mut limits = Limits::default();
    /// limits.value_bytes = 64 << 10;
    /// let store = FileOptions::new().limits(limits).open("./data").await?;
    /// # Ok(()) }
    /// ```
    pub fn limits(mut self, limits: Limits) -> FileOptions {
        self.limits = limits;
        self
    }

    /// The size of a log segment. A commit must fit into one.
    ///
    /// ```
    /// # use latchwork_store::{FileOptions, Result};
    /// # async fn example() -> Result<()> {
    /// let store = FileOptions::new().segment_bytes(64 << 20).open("./data").await?;
    /// # Ok(()) }
    /// ```
    pub fn segment_bytes(mut self, bytes: u64) -> FileOptions {
        self.segment_bytes = bytes;
        self
    }

    /// The approximate memory for commits that are not folded into the index yet. Under load up to three times as much
    /// is in use; then writers wait.
    ///
    /// ```
    /// # use latchwork_store::{FileOptions, Result};
    /// # async fn example() -> Result<()> {
    /// let store = FileOptions::new().overlay_bytes(8 << 20).open("./data").await?;
    /// # Ok(()) }
    /// ```
    pub fn overlay_bytes(mut self, bytes: u64) -> FileOptions {
        self.overlay_bytes = bytes;
        self
    }

    /// The size of the index's cache in memory.
    ///
    /// ```
    /// # use latchwork_store::{FileOptions, Result};
    /// # async fn example() -> Result<()> {
    /// let store = FileOptions::new().cache_bytes(256 << 20).open("./data").await?;
    /// # Ok(()) }
    /// ```
    pub fn cache_bytes(mut self, bytes: usize) -> FileOptions {
        self.cache_bytes = bytes;
        self
    }

    /// The longest time until a commit is folded into the index. A full overlay is folded earlier.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork_store::{FileOptions, Result};
    /// # async fn example() -> Result<()> {
    /// let store = FileOptions::new().fold_interval(Duration::from_millis(100)).open("./data").await?;
    /// # Ok(()) }
    /// ```
    pub fn fold_interval(mut self, interval: Duration) -> FileOptions {
        self.fold_interval = interval;
        self
    }

    /// Starts no threads: callers sync their own commits, and [`Store::maintain`] folds them into the index. For tests
    /// that must be deterministic.
    ///
    /// ```
    /// # use latchwork_store::{FileOptions, Result};
    /// # async fn example() -> Result<()> {
    /// let store = FileOptions::new().without_threads().open("./data").await?;
    /// while store.maintain().await? {}
    /// # Ok(()) }
    /// ```
    pub fn without_threads(mut self) -> FileOptions {
        self.background = false;
        self
    }

    /// Breaks the store on purpose.
    ///
    /// ```
    /// # use latchwork_store::{FileOptions, Result, Sabotage};
    /// # async fn example() -> Result<()> {
    /// let broken = FileOptions::new().sabotage(Sabotage::SkipSync).open("./data").await?;
    /// # Ok(()) }
    /// ```
    #[cfg(feature = "testing")]
    pub fn sabotage(mut self, sabotage: Sabotage) -> FileOptions {
        self.sabotage = Some(sabotage);
        self
    }

    /// Opens the directory, or creates it.
    ///
    /// ```
    /// # use latchwork_store::{FileOptions, Result};
    /// # async fn example() -> Result<()> {
    /// let store = FileOptions::new().open("./data").await?;
    /// # Ok(()) }
    /// ```
    pub async fn open(self, directory: impl AsRef<Path>) -> Result<Store> {
        let (env, limits, disk) = (self.env.clone(), self.limits, self.disk.clone());
        let backend = Arc::new(self.open_backend(directory.as_ref())?);
        Store::with_backend(backend, env, limits, disk).await
    }

    /// Opens the directory read-only and changes nothing there: neither files nor names. It must contain a store that
    /// no process has open for writing. Other processes may open it read-only at the same time. Commits fail with
    /// [`StoreError::ReadOnly`].
    ///
    /// ```
    /// # use latchwork_store::{FileOptions, Result};
    /// # async fn example() -> Result<()> {
    /// let store = FileOptions::new().open_read_only("./data").await?;
    /// # Ok(()) }
    /// ```
    pub async fn open_read_only(self, directory: impl AsRef<Path>) -> Result<Store> {
        use std::io::ErrorKind::{NotADirectory, NotFound};
        let (env, limits, disk) = (self.env.clone(), self.limits, self.disk.clone());
        let path = directory.as_ref();
        let is_none = |cause: &std::io::Error| matches!(cause.kind(), NotFound | NotADirectory);
        let backend = self.open_snapshot(path).map_err(|error| match error {
            StoreError::Io { action: "read" | "list", cause, .. } if is_none(&cause) => {
                StoreError::NotAStore { path: path.into(), reason: "there is no such directory" }
            }
            error => error,
        })?;
        Store::with_backend(Arc::new(ReadOnly(backend)), env, limits, disk).await
    }

    /// Opens the directory as a backend, without a [`Store`].
    pub(crate) fn open_backend(self, directory: &Path) -> Result<FileBackend> {
        self.validate()?;
        let failed = |action| move |cause| StoreError::io(action, directory, cause);
        self.disk.create_directory(directory).map_err(failed("create"))?;
        let lock = self.lock(directory)?;
        let identity = match self.read_format(directory)? {
            Some(identity) => identity,
            None => {
                let identity = u128::from(self.env.random()) << 64 | u128::from(self.env.random());
                self.create(directory, identity, Generation(0), Completeness::Creating, &mut |_| Ok(()))?;
                identity
            }
        };
        self.open_existing(directory, identity, lock)
    }

    /// Opens a directory to read all of it, and changes nothing there. It must already contain a store.
    pub(crate) fn open_snapshot(self, directory: &Path) -> Result<FileBackend> {
        if self.read_format(directory)?.is_none() {
            let reason = "it holds no store: no FORMAT file says that it is complete";
            return Err(StoreError::NotAStore { path: directory.into(), reason });
        }
        let disk: Arc<dyn Disk> = Arc::new(ShadowDisk(self.disk.clone()));
        self.shared_disk(disk).without_threads().open_backend(directory)
    }

    /// The largest size of a commit in a segment: its bytes, the lengths, revs and receipt entries of its operations,
    /// and the trailer.
    fn largest_commit(&self) -> u64 {
        let Limits { commit_bytes, operations, .. } = self.limits;
        (operations as u64).saturating_mul(40).saturating_add(commit_bytes as u64).saturating_add(3 * PAGE as u64)
    }

    fn validate(&self) -> Result<()> {
        let Limits { commit_bytes, operations, .. } = self.limits;
        let (segment, least) = (self.segment_bytes, self.largest_commit());
        let what = if !segment.is_multiple_of(PAGE as u64) {
            format!("segment_bytes is {segment}, which is not a multiple of {PAGE}")
        } else if segment < least {
            format!(
                "segment_bytes is {segment}; commits of {commit_bytes} bytes and {operations} operations need {least}"
            )
        } else if least > LARGEST_FRAME - GROUP_BYTES {
            format!("commits of {commit_bytes} bytes and {operations} operations are larger than the log can hold")
        } else {
            return Ok(());
        };
        Err(StoreError::Option { what })
    }

    fn open_existing(self, directory: &Path, identity: u128, lock: Box<dyn DirectoryLock>) -> Result<FileBackend> {
        // A killed process may have left names that are not durable yet. Commits that are acknowledged from here on
        // rely on these names.
        let synced = self.disk.sync_directory(directory);
        synced.map_err(|cause| StoreError::io("sync", directory, cause))?;
        let file = self.open_index(directory, Open::Existing)?;
        if file.length().map_err(|cause| StoreError::io("measure", directory.join(INDEX_FILE), cause))? == 0 {
            return Err(StoreError::corrupt(directory.join(INDEX_FILE).display().to_string(), "the file is empty"));
        }
        let group_bytes = (self.segment_bytes - self.largest_commit()).min(GROUP_BYTES) as usize;
        let index_file = file.clone();
        let index = Index::open_file(file, directory.join(INDEX_FILE), self.cache_bytes)?;
        let reader = index.reader()?;
        let progress = reader.progress;
        let replayed = Log::open(self.log_files(directory, identity), &progress)?;
        let (mut generation, mut time) = (progress.applied, progress.time);
        let changes = replayed.commits.iter().map(|commit| commit.changes.len()).sum();
        let active = Overlay::new(self.env.random(), changes);
        for commit in replayed.commits {
            (generation, time) = (commit.generation, commit.time);
            active.insert(commit);
        }
        let floors = index.floors()?;
        if let Some((space, floor)) = floors.iter().find(|(_, floor)| **floor > generation) {
            let detail = format!("the history of space {space} begins at {floor}, but the store is at {generation}");
            return Err(StoreError::corrupt(directory.join(INDEX_FILE).display().to_string(), detail));
        }
        #[allow(unused_mut)]
        let mut writer = FileWriter::new(Parts {
            env: self.env,
            retention: Retention::new(floors),
            layers: Layers { active: Arc::new(active), frozen: None, index: Arc::new(reader) },
            log: replayed.log,
            overlay_bytes: self.overlay_bytes,
            group_bytes,
            background: self.background,
            generation,
            time,
        });
        #[cfg(feature = "testing")]
        {
            writer.sabotage = self.sabotage;
            writer.log.lock().skip_sync = self.sabotage == Some(Sabotage::SkipSync);
        }
        let index = Mutex::new(Some(index));
        let (writer, lock) = (Arc::new(writer), Mutex::new(Some(lock)));
        FileBackend::start(Folder { writer, index, index_file, interval: self.fold_interval, identity, lock })
    }
}

pub(crate) use self::directory::write_snapshot;

/// A store in a directory.
pub(crate) struct FileBackend {
    folder: Arc<Folder>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    /// The id of this opening. The lock of the directory proves that all other openings are over.
    opening: Uuid,
}

impl FileBackend {
    fn start(folder: Folder) -> Result<FileBackend> {
        let opening = folder.writer.env.uuid();
        let backend = FileBackend { folder: Arc::new(folder), threads: Mutex::default(), opening };
        if backend.writer().background {
            let (writer, folder) = (backend.folder.writer.clone(), backend.folder.clone());
            backend.spawn("latchwork-sync", move || writer.sync_groups())?;
            backend.spawn("latchwork-fold", move || folder.run())?;
        }
        Ok(backend)
    }

    fn spawn(&self, name: &str, work: impl FnOnce() + Send + 'static) -> Result<()> {
        let thread = std::thread::Builder::new().name(name.into()).spawn(work);
        let thread = thread.map_err(|cause| StoreError::io("start a thread for", PathBuf::from(name), cause))?;
        self.threads.lock().push(thread);
        Ok(())
    }

    fn writer(&self) -> &FileWriter {
        &self.folder.writer
    }

    /// The newest generation that readers may see.
    pub(crate) fn visible(&self) -> Generation {
        self.writer().visible()
    }

    /// The time of the last commit.
    pub(crate) fn time(&self) -> Timestamp {
        self.writer().lock_stage().time
    }

    /// A scan that needs no runtime.
    pub(crate) fn scan_now(&self, scan: &Scan, at: Generation) -> Result<Vec<(Key, Version)>> {
        self.reading(scan.range.space(), at, |layers| layers.scan(scan, at))
    }

    fn reading<T>(&self, space: SpaceId, at: Generation, read: impl FnOnce(&Layers) -> Result<T>) -> Result<T> {
        let writer = self.writer();
        writer.check()?;
        // Load the layers first: they keep what they contain, even if a floor rises after this line.
        let layers = writer.layers.load();
        writer.retention.check(space, at)?;
        read(&layers)
    }

    /// Runs work that may take long in a separate thread, so that it does not block the caller's thread. The work
    /// continues if the caller stops waiting. The directory stays locked until the work is done.
    fn aside<T: Send + 'static>(&self, work: impl FnOnce(&Folder) -> Result<T> + Send + 'static) -> Answer<'_, T> {
        let folder = self.folder.clone();
        if !self.writer().background {
            return Box::pin(ready(work(&folder)));
        }
        let (done, result) = oneshot::channel();
        let thread = std::thread::Builder::new().name("latchwork-aside".into()).spawn(move || {
            let result = work(&folder);
            drop(folder);
            // The caller may have stopped waiting.
            let _ = done.send(result);
        });
        match thread {
            Err(cause) => Box::pin(ready(Err(StoreError::io("start a thread for", "latchwork-aside", cause)))),
            Ok(_) => Box::pin(async { result.await.unwrap_or(Err(StoreError::Closed)) }),
        }
    }
}

/// Waits until the given threads have ended.
fn end(threads: Vec<JoinHandle<()>>) {
    for thread in threads {
        // A thread that panicked has ended, too.
        let _ = thread.join();
    }
}

impl Drop for FileBackend {
    fn drop(&mut self) {
        // Every acknowledged commit is in the log, so only the threads have to end.
        let _ = self.writer().begin_closing();
        end(std::mem::take(&mut *self.threads.lock()));
        self.writer().set_closed();
    }
}

impl Backend for FileBackend {
    fn commit(&self, commit: Commit) -> Answer<'_, Outcome> {
        Box::pin(async move {
            let writer = self.writer();
            let outcome = writer.commit(commit).await?;
            if !writer.background && writer.layers.load().active.bytes() >= writer.overlay_bytes {
                self.folder.fold()?;
            }
            Ok(outcome)
        })
    }

    fn latest(&self) -> Answer<'_, Generation> {
        Box::pin(ready(self.writer().check().map(|()| self.writer().visible())))
    }

    fn get<'a>(&'a self, key: &'a Key, at: Generation) -> Answer<'a, Option<Version>> {
        Box::pin(ready(self.reading(key.space(), at, |layers| layers.at(key, at))))
    }

    fn scan(&self, scan: Scan, at: Generation) -> Answer<'_, Vec<(Key, Version)>> {
        Box::pin(ready(self.scan_now(&scan, at)))
    }

    fn versions<'a>(&'a self, key: &'a Key, at: Generation, limit: usize) -> Answer<'a, Vec<Version>> {
        let floor = self.writer().retention.floor(key.space());
        Box::pin(ready(self.reading(key.space(), at, |layers| layers.versions(key, at, floor, limit))))
    }

    fn changes(&self, range: Range, after: Generation, limit: usize) -> Answer<'_, Changes> {
        let visible = self.writer().visible();
        let changes = self.reading(range.space(), after, |layers| layers.changes(&range, after, visible, limit));
        Box::pin(ready(changes))
    }

    fn newer(&self, than: Generation, _: SpaceId) -> Answer<'_, Generation> {
        Box::pin(self.writer().newer(than))
    }

    fn before(&self, time: Timestamp, spaces: Vec<(SpaceId, Generation)>) -> Answer<'_, Before> {
        let known = self.writer().check();
        Box::pin(ready(known.and_then(|()| self.folder.before(&self.writer().layers.load(), time, &spaces))))
    }

    fn pin(&self, at: Option<Generation>) -> Answer<'_, Pin> {
        let writer = self.writer();
        let latest = || writer.check().map(|()| writer.visible());
        Box::pin(writer.retention.pin_at(at, latest, |than| Box::pin(writer.newer(than))))
    }

    fn floor(&self, space: SpaceId) -> Generation {
        self.writer().retention.floor(space)
    }

    fn declare(&self, space: SpaceId, rules: Rules, at: Generation) {
        self.writer().retention.declare(space, rules, at);
    }

    fn maintain(&self) -> Answer<'_, bool> {
        self.aside(|folder| folder.maintain())
    }

    fn replace(&self, contents: Contents) -> Answer<'_, Generation> {
        self.aside(|folder| folder.replace(contents))
    }

    fn verify(&self) -> Answer<'_, Vec<Damage>> {
        self.aside(|folder| folder.verify())
    }

    fn stats(&self) -> Answer<'_, Stats> {
        Box::pin(ready(self.folder.stats()))
    }

    fn identity(&self) -> u128 {
        self.folder.identity
    }

    fn opening(&self) -> Option<Uuid> {
        Some(self.opening)
    }

    fn ended(&self) -> Answer<'_, ()> {
        Box::pin(async {
            self.writer().ended().await;
            Ok(())
        })
    }

    fn close(&self) -> Answer<'_, ()> {
        if let Err(error) = self.writer().begin_closing() {
            return Box::pin(ready(Err(error)));
        }
        let threads = std::mem::take(&mut *self.threads.lock());
        self.aside(|folder| {
            end(threads);
            folder.close()
        })
    }
}
