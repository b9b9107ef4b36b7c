//! The file backend: a commit log that is synced for every group, and an index that follows it. Opening a directory
//! reads the index and then the end of the log; docs/format.md draws both.

mod fold;
mod frame;
mod index;
mod index_file;
mod layers;
mod log;
mod overlay;
mod writer;

use std::collections::BTreeMap;
use std::future::ready;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;

use self::fold::Folder;
use self::frame::PAGE;
use self::index::{Index, Progress};
use self::layers::Layers;
use self::log::{Log, LogFiles};
use self::overlay::Overlay;
use self::writer::{Parts, Writer};
use crate::backend::{Answer, Backend, Changes, Contents, Damage, Scan, Stats};
use crate::codec;
use crate::disk::{self, DirectoryLock, Disk, Open, RealDisk};
use crate::{
    Commit, Env, Generation, Key, Limits, Outcome, Range, Result, Retention, SpaceId, Store, StoreError, Timestamp,
    Version,
};

const FORMAT: u32 = 1;
const FORMAT_FILE: &str = "FORMAT";
const LOCK_FILE: &str = "LOCK";
const INDEX_FILE: &str = "index.redb";
/// A group that has grown to this size is written before more is added.
const GROUP_BYTES: u64 = 4 << 20;

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

/// Ways to break the store on purpose, so that tests can show that they would notice.
#[cfg(feature = "testing")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sabotage {
    /// Groups are written but not synced.
    SkipSync,
    /// Commits are answered when they are decided, and written when the next one comes.
    AnswerBeforeSync,
    /// Every commit counts as if all its checks held.
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
    pub fn new() -> FileOptions {
        FileOptions::default()
    }

    /// Where time and chance come from.
    pub fn env(mut self, env: Env) -> FileOptions {
        self.env = env;
        self
    }

    /// Where files lie.
    pub fn disk(mut self, disk: impl Disk) -> FileOptions {
        self.disk = Arc::new(disk);
        self
    }

    pub(crate) fn shared_disk(mut self, disk: Arc<dyn Disk>) -> FileOptions {
        self.disk = disk;
        self
    }

    /// The largest sizes taken.
    pub fn limits(mut self, limits: Limits) -> FileOptions {
        self.limits = limits;
        self
    }

    /// The size of a log file. A commit must fit into one.
    pub fn segment_bytes(mut self, bytes: u64) -> FileOptions {
        self.segment_bytes = bytes;
        self
    }

    /// About how much memory commits may take before the index has them. Up to three times that is in use under
    /// load; then writers wait.
    pub fn overlay_bytes(mut self, bytes: u64) -> FileOptions {
        self.overlay_bytes = bytes;
        self
    }

    /// How much of the index is kept in memory.
    pub fn cache_bytes(mut self, bytes: usize) -> FileOptions {
        self.cache_bytes = bytes;
        self
    }

    /// How long commits stay out of the index at the most, unless there are many.
    pub fn fold_interval(mut self, interval: Duration) -> FileOptions {
        self.fold_interval = interval;
        self
    }

    /// Starts no threads: callers sync their own commits, and [`Store::maintain`] moves them into the index. For
    /// tests that must run the same every time.
    pub fn without_threads(mut self) -> FileOptions {
        self.background = false;
        self
    }

    /// Breaks the store.
    #[cfg(feature = "testing")]
    pub fn sabotage(mut self, sabotage: Sabotage) -> FileOptions {
        self.sabotage = Some(sabotage);
        self
    }

    /// Opens the directory, or creates it.
    pub async fn open(self, directory: impl AsRef<Path>) -> Result<Store> {
        let (env, limits, disk) = (self.env.clone(), self.limits, self.disk.clone());
        let backend = Arc::new(self.open_backend(directory.as_ref())?);
        Store::with_backend(backend, env, limits, disk).await
    }

    /// Opens the directory without a [`Store`] in front.
    pub(crate) fn open_backend(self, directory: &Path) -> Result<FileBackend> {
        self.validate()?;
        let failed = |action| move |cause| StoreError::io(action, directory, cause);
        self.disk.create_directory(directory).map_err(failed("create"))?;
        let lock = self.lock(directory)?;
        let identity = match self.read_format(directory)? {
            Some(identity) => identity,
            None => {
                let identity = u128::from(self.env.random()) << 64 | u128::from(self.env.random());
                self.create(directory, identity, Generation(0), &mut |_| Ok(()))?;
                identity
            }
        };
        self.open_existing(directory, identity, lock)
    }

    /// Opens a directory for reading all of it. It must be a store already.
    pub(crate) fn open_snapshot(self, directory: &Path) -> Result<FileBackend> {
        if self.read_format(directory)?.is_none() {
            let reason = "it has no FORMAT file that says that it is complete";
            return Err(StoreError::NotAStore { path: directory.into(), reason });
        }
        self.without_threads().open_backend(directory)
    }

    /// The most that one commit takes in a frame: its bytes, and for each operation lengths, revs and a place in the
    /// receipt.
    fn largest_commit(&self) -> u64 {
        (self.limits.commit_bytes + 40 * self.limits.operations + 2 * PAGE) as u64
    }

    fn validate(&self) -> Result<()> {
        let Limits { commit_bytes, operations, .. } = self.limits;
        let (segment, least) = (self.segment_bytes, self.largest_commit());
        let what = if !segment.is_multiple_of(PAGE as u64) {
            format!("segment_bytes is {segment}, which is no multiple of {PAGE}")
        } else if segment < least {
            format!(
                "segment_bytes is {segment}; commits of {commit_bytes} bytes and {operations} operations need {least}"
            )
        } else {
            return Ok(());
        };
        Err(StoreError::Option { what })
    }

    fn lock(&self, directory: &Path) -> Result<Box<dyn DirectoryLock>> {
        let path = directory.join(LOCK_FILE);
        self.disk.lock(&path).map_err(|failure| match failure {
            Ok(owner) => StoreError::Locked { path: directory.into(), owner },
            Err(cause) => StoreError::io("lock", path, cause),
        })
    }

    /// The store's identity, or `None` if the directory has yet to become one.
    fn read_format(&self, directory: &Path) -> Result<Option<u128>> {
        let path = directory.join(FORMAT_FILE);
        let contents = match disk::read_whole(&*self.disk, &path) {
            Ok(contents) => contents,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let names = self.disk.list(directory).map_err(|cause| StoreError::io("list", directory, cause))?;
                if names.iter().any(|name| name == INDEX_FILE || name.starts_with("log-")) {
                    let reason = "it holds an index or a log, but no FORMAT file";
                    return Err(StoreError::NotAStore { path: directory.into(), reason });
                }
                return Ok(None);
            }
            Err(cause) => return Err(StoreError::io("read", path, cause)),
        };
        let damaged = || StoreError::corrupt(path.display().to_string(), "it is not what was written");
        let format = Format::decode(&contents).ok_or_else(damaged)?;
        if format.version > FORMAT {
            let (path, found) = (directory.into(), format.version);
            return Err(StoreError::NewerFormat { path, found, supported: FORMAT });
        }
        Ok(format.complete.then_some(format.identity))
    }

    /// Makes an empty directory a store. Until the FORMAT file says that it is complete, opening starts over.
    fn create(
        &self,
        directory: &Path,
        identity: u128,
        generation: Generation,
        fill: &mut dyn FnMut(&Index) -> Result<()>,
    ) -> Result<()> {
        let write_format = |complete| {
            let format = Format { version: FORMAT, complete, identity };
            let written = disk::write_whole(&*self.disk, directory, FORMAT_FILE, &format.encode());
            written.map_err(|cause| StoreError::io("write", directory.join(FORMAT_FILE), cause))
        };
        write_format(false)?;
        let log = Log::create(&self.log_files(directory, identity))?;
        let progress = Progress { applied: generation, time: self.env.now(), log };
        let index = Index::create(
            self.open_index(directory, Open::Fresh)?,
            directory.join(INDEX_FILE),
            self.cache_bytes,
            progress,
        )?;
        fill(&index)?;
        drop(index);
        let synced = self.disk.sync_directory(directory);
        synced.map_err(|cause| StoreError::io("sync", directory, cause))?;
        write_format(true)
    }

    fn open_index(&self, directory: &Path, how: Open) -> Result<Arc<dyn disk::DiskFile>> {
        let path = directory.join(INDEX_FILE);
        self.disk.open(&path, how).map_err(|cause| match cause.kind() {
            std::io::ErrorKind::NotFound => StoreError::corrupt(path.display().to_string(), "the file is missing"),
            _ => StoreError::io("open", path, cause),
        })
    }

    fn log_files(&self, directory: &Path, identity: u128) -> LogFiles {
        let (disk, directory) = (self.disk.clone(), directory.to_path_buf());
        LogFiles { disk, directory, identity, segment_bytes: self.segment_bytes }
    }

    fn open_existing(self, directory: &Path, identity: u128, lock: Box<dyn DirectoryLock>) -> Result<FileBackend> {
        // A process that was killed may have left names that are in place and not yet sure. What is acknowledged from
        // here on relies on them.
        let synced = self.disk.sync_directory(directory);
        synced.map_err(|cause| StoreError::io("sync", directory, cause))?;
        let file = self.open_index(directory, Open::Existing)?;
        if file.length().map_err(|cause| StoreError::io("measure", directory.join(INDEX_FILE), cause))? == 0 {
            return Err(StoreError::corrupt(directory.join(INDEX_FILE).display().to_string(), "the file is empty"));
        }
        let group_bytes = (self.segment_bytes - self.largest_commit()).min(GROUP_BYTES) as usize;
        let index = Index::open_file(file, directory.join(INDEX_FILE), self.cache_bytes)?;
        let reader = index.reader()?;
        let progress = reader.progress;
        let replayed = Log::open(self.log_files(directory, identity), progress.log, progress.applied)?;
        let (mut generation, mut time) = (progress.applied, progress.time);
        let active = Overlay::default();
        for commit in replayed.commits {
            (generation, time) = (commit.generation, commit.time);
            active.insert(commit);
        }
        let floors = index.floors()?;
        if let Some((space, floor)) = floors.iter().find(|(_, floor)| **floor > generation) {
            let detail = format!("history of space {space} begins at {floor}, and the store is at {generation}");
            return Err(StoreError::corrupt(directory.join(INDEX_FILE).display().to_string(), detail));
        }
        #[allow(unused_mut)]
        let mut writer = Writer::new(Parts {
            env: self.env,
            retention: Retention::new(floors),
            layers: Layers { active: Arc::new(active), frozen: None, recent: None, index: Arc::new(reader) },
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
        let folder = Folder { writer: Arc::new(writer), index, interval: self.fold_interval, identity };
        FileBackend::start(Arc::new(folder), lock)
    }
}

/// The first file of a data directory.
#[derive(Debug, PartialEq, Eq)]
struct Format {
    version: u32,
    complete: bool,
    identity: u128,
}

impl Format {
    const MAGIC: &[u8; 8] = b"LATCHWRK";

    fn encode(&self) -> Vec<u8> {
        let mut out = Self::MAGIC.to_vec();
        out.extend_from_slice(&self.version.to_le_bytes());
        out.push(u8::from(self.complete));
        out.extend_from_slice(&self.identity.to_le_bytes());
        out.extend_from_slice(&codec::checksum(0, &out).to_le_bytes());
        out
    }

    /// Reads any version: each starts with magic and version and ends with a checksum, whatever lies between.
    fn decode(bytes: &[u8]) -> Option<Format> {
        let (body, checksum) = bytes.split_last_chunk::<8>()?;
        if codec::checksum(0, body) != u64::from_le_bytes(*checksum) {
            return None;
        }
        let rest = body.strip_prefix(Self::MAGIC)?;
        let version = u32::from_le_bytes(rest.get(..4)?.try_into().ok()?);
        if version > FORMAT {
            return Some(Format { version, complete: true, identity: 0 });
        }
        let identity = u128::from_le_bytes(rest.get(5..)?.try_into().ok()?);
        Some(Format { version, complete: rest[4] != 0, identity })
    }
}

/// A store in a directory.
pub(crate) struct FileBackend {
    folder: Arc<Folder>,
    threads: Mutex<Vec<JoinHandle<()>>>,
    lock: Mutex<Option<Box<dyn DirectoryLock>>>,
}

impl FileBackend {
    fn start(folder: Arc<Folder>, lock: Box<dyn DirectoryLock>) -> Result<FileBackend> {
        let backend = FileBackend { folder, threads: Mutex::default(), lock: Mutex::new(Some(lock)) };
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

    fn writer(&self) -> &Writer {
        &self.folder.writer
    }

    /// The newest generation that readers may see.
    pub(crate) fn visible(&self) -> Generation {
        self.writer().visible()
    }

    /// A scan that needs no runtime.
    pub(crate) fn scan_now(&self, scan: &Scan, at: Generation) -> Result<Vec<(Key, Version)>> {
        self.reading(scan.range.space(), at, |layers| layers.scan(scan, at))
    }

    fn reading<T>(&self, space: SpaceId, at: Generation, read: impl FnOnce(&Layers) -> Result<T>) -> Result<T> {
        let writer = self.writer();
        writer.check()?;
        // The layers first: a floor that rises after this line does not take from them.
        let layers = writer.layers.load();
        writer.retention.check(space, at)?;
        read(&layers)
    }

    fn end_threads(&self) {
        for thread in std::mem::take(&mut *self.threads.lock()) {
            // A thread that panicked has already stopped the store's service by never syncing again.
            let _ = thread.join();
        }
    }

    fn close_now(&self) -> Result<()> {
        self.writer().check()?;
        self.writer().begin_closing()?;
        self.end_threads();
        let folded = loop {
            match self.folder.fold() {
                Ok(true) => {}
                Ok(false) => break Ok(()),
                Err(error) => break Err(error),
            }
        };
        self.writer().set_closed();
        // The index writes to its file when it goes, so it must be gone before another process may have the directory.
        self.folder.index.lock().take();
        self.lock.lock().take();
        folded
    }
}

impl Drop for FileBackend {
    fn drop(&mut self) {
        // What is acknowledged is in the log; there is nothing to save, only threads to end.
        let _ = self.writer().begin_closing();
        self.end_threads();
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

    fn newer(&self, than: Generation) -> Answer<'_, Generation> {
        Box::pin(self.writer().newer(than))
    }

    fn generation_at(&self, time: Timestamp) -> Answer<'_, Generation> {
        let found = self.writer().check().and_then(|()| {
            let layers = self.writer().layers.load();
            let found = self.folder.generation_at(&layers, time)?;
            found.map_err(|oldest| StoreError::TimeDropped { asked: time, oldest })
        });
        Box::pin(ready(found))
    }

    fn retention(&self) -> &Arc<Retention> {
        &self.writer().retention
    }

    fn maintain(&self) -> Answer<'_, bool> {
        Box::pin(ready(self.folder.fold()))
    }

    fn replace(&self, contents: Contents) -> Answer<'_, Generation> {
        Box::pin(ready(self.folder.replace(contents)))
    }

    fn verify(&self) -> Answer<'_, Vec<Damage>> {
        Box::pin(ready(self.writer().check().and_then(|()| self.folder.verify())))
    }

    fn stats(&self) -> Answer<'_, Stats> {
        let stats = self.writer().check().and_then(|()| {
            let writer = self.writer();
            let index = self.folder.index.lock();
            let index = index.as_ref().ok_or(StoreError::Closed)?;
            let (keys, past_versions, index_bytes) = index.sizes(&writer.layers.load().index)?;
            let pins = writer.retention.pins() as u64;
            Ok(Stats { keys, past_versions, index_bytes, pins, ..writer.stats() })
        });
        Box::pin(ready(stats))
    }

    fn identity(&self) -> u128 {
        self.folder.identity
    }

    fn close(&self) -> Answer<'_, ()> {
        Box::pin(ready(self.close_now()))
    }
}

/// Writes a directory that opens as a store with `records` in it, at `generation`.
pub(crate) fn write_store(
    disk: Arc<dyn Disk>,
    env: Env,
    directory: &Path,
    identity: u128,
    generation: Generation,
    mut next: impl FnMut() -> Result<Vec<(Key, Version)>>,
) -> Result<()> {
    // A snapshot has no commits to log: one page says so. A store that goes on from it makes segments of its own size.
    let options = FileOptions { disk, env, segment_bytes: PAGE as u64, ..FileOptions::default() };
    let failed = |cause| StoreError::io("create", directory, cause);
    options.disk.create_directory(directory).map_err(failed)?;
    if !options.disk.list(directory).map_err(failed)?.is_empty() {
        return Err(StoreError::NotEmpty { path: directory.into() });
    }
    options.create(directory, identity, generation, &mut |index| {
        let mut spaces = BTreeMap::new();
        loop {
            let records = next()?;
            if records.is_empty() {
                return index.set_floors(&spaces);
            }
            spaces.extend(records.iter().map(|(key, _)| (key.space(), generation)));
            index.import(&records)?;
        }
    })
}
