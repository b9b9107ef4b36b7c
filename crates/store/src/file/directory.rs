//! The files of a data directory, and how an empty directory becomes a store or a snapshot. The contents of the log and
//! the index are written elsewhere.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use super::FileOptions;
use super::frame::PAGE;
use super::index::{Index, Progress};
use super::log::{Log, LogFiles};
use crate::codec;
use crate::disk::{self, DirectoryLock, Disk, Lock, Open};
use crate::space::{SPACES, SpaceRecord};
use crate::{Env, Generation, Key, Result, StoreError, Timestamp, Version};

const FORMAT: u32 = 1;
const FORMAT_FILE: &str = "FORMAT";
const LOCK_FILE: &str = "LOCK";
/// The files that may lie in a directory in which a store is created.
const OWN_FILES: [&str; 4] = [LOCK_FILE, "FORMAT.new", "spare.new", "lost+found"];
pub(super) const INDEX_FILE: &str = "index.redb";

impl FileOptions {
    pub(super) fn lock(&self, directory: &Path) -> Result<Box<dyn DirectoryLock>> {
        let path = directory.join(LOCK_FILE);
        self.disk.lock(&path, Lock::Exclusive).map_err(|failure| match failure {
            Ok(owner) => StoreError::Locked { path: directory.into(), owner },
            Err(cause) => StoreError::io("lock", path, cause),
        })
    }

    /// Returns the store's identity, or `None` if no store was created in the directory yet.
    pub(super) fn read_format(&self, directory: &Path) -> Result<Option<u128>> {
        let path = directory.join(FORMAT_FILE);
        let contents = match disk::read_whole(&*self.disk, &path) {
            Ok(contents) => contents,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                let names = self.disk.list(directory).map_err(|cause| StoreError::io("list", directory, cause))?;
                if names.iter().any(|name| name == INDEX_FILE || name.starts_with("log-")) {
                    let reason = "it holds an index or a log, but no FORMAT file";
                    return Err(StoreError::NotAStore { path: directory.into(), reason });
                }
                // A mistyped path must not create a store among other files.
                let foreign = |name: &&String| !name.starts_with('.') && !OWN_FILES.contains(&name.as_str());
                if names.iter().any(|name| foreign(&name)) {
                    let reason = "it holds other files and no store; a new one needs an empty or missing directory";
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
        match format.stage {
            Completeness::Creating => Ok(None),
            Completeness::Complete => Ok(Some(format.identity)),
            Completeness::Snapshot => {
                let reason = "it is an incomplete snapshot; remove it";
                Err(StoreError::NotAStore { path: directory.into(), reason })
            }
        }
    }

    /// Creates a store in an empty directory. Until it is complete, the FORMAT file says what is being created.
    pub(super) fn create(
        &self,
        directory: &Path,
        identity: u128,
        generation: Generation,
        stage: Completeness,
        fill: &mut dyn FnMut(&Index) -> Result<()>,
    ) -> Result<()> {
        let write_format = |stage| {
            let format = Format { version: FORMAT, stage, identity };
            let written = disk::write_whole(&*self.disk, directory, FORMAT_FILE, &format.encode());
            written.map_err(|cause| StoreError::io("write", directory.join(FORMAT_FILE), cause))
        };
        write_format(stage)?;
        let created = self.create_files(directory, identity, generation, fill);
        if let Err(error) = created {
            // FORMAT stays and says that the directory is incomplete.
            let names = self.disk.list(directory).unwrap_or_default().into_iter();
            for name in names.filter(|name| name == INDEX_FILE || name.starts_with("log-")) {
                let _ = self.disk.remove(&directory.join(name));
            }
            return Err(error);
        }
        write_format(Completeness::Complete)
    }

    /// Creates all files except FORMAT.
    fn create_files(
        &self,
        directory: &Path,
        identity: u128,
        generation: Generation,
        fill: &mut dyn FnMut(&Index) -> Result<()>,
    ) -> Result<()> {
        let (log, pages) = Log::create(&self.log_files(directory, identity))?;
        let progress = Progress { applied: generation, time: self.env.now(), log, pages };
        let index = Index::create(
            self.open_index(directory, Open::Fresh)?,
            directory.join(INDEX_FILE),
            self.cache_bytes,
            progress,
        )?;
        fill(&index)?;
        drop(index);
        let synced = self.disk.sync_directory(directory);
        synced.map_err(|cause| StoreError::io("sync", directory, cause))
    }

    pub(super) fn open_index(&self, directory: &Path, how: Open) -> Result<Arc<dyn disk::DiskFile>> {
        let path = directory.join(INDEX_FILE);
        self.disk.open(&path, how).map_err(|cause| match cause.kind() {
            std::io::ErrorKind::NotFound => StoreError::corrupt(path.display().to_string(), "the file is missing"),
            _ => StoreError::io("open", path, cause),
        })
    }

    pub(super) fn log_files(&self, directory: &Path, identity: u128) -> LogFiles {
        let (disk, directory) = (self.disk.clone(), directory.to_path_buf());
        LogFiles { disk, directory, identity, segment_bytes: self.segment_bytes }
    }
}

/// How complete a directory is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Completeness {
    /// A store is being created. It is empty, and opening it creates it again.
    Creating = 0,
    /// The store or snapshot is complete.
    Complete = 1,
    /// A snapshot is being written. It must not be opened as an empty store.
    Snapshot = 2,
}

/// The contents of the FORMAT file.
#[derive(Debug, PartialEq, Eq)]
struct Format {
    version: u32,
    stage: Completeness,
    identity: u128,
}

impl Format {
    const MAGIC: &[u8; 8] = b"LATCHWRK";

    fn encode(&self) -> Vec<u8> {
        let mut out = Self::MAGIC.to_vec();
        out.extend_from_slice(&self.version.to_le_bytes());
        out.push(self.stage as u8);
        out.extend_from_slice(&self.identity.to_le_bytes());
        out.extend_from_slice(&codec::checksum(0, &out).to_le_bytes());
        out
    }

    /// Reads any version: every version starts with the magic and the version number and ends with a checksum.
    fn decode(bytes: &[u8]) -> Option<Format> {
        let (body, checksum) = bytes.split_last_chunk::<8>()?;
        if codec::checksum(0, body) != u64::from_le_bytes(*checksum) {
            return None;
        }
        let rest = body.strip_prefix(Self::MAGIC)?;
        let version = u32::from_le_bytes(rest.get(..4)?.try_into().ok()?);
        if version > FORMAT {
            return Some(Format { version, stage: Completeness::Complete, identity: 0 });
        }
        let identity = u128::from_le_bytes(rest.get(5..)?.try_into().ok()?);
        let stage = match rest[4] {
            0 => Completeness::Creating,
            1 => Completeness::Complete,
            2 => Completeness::Snapshot,
            _ => return None,
        };
        Some(Format { version, stage, identity })
    }
}

/// Writes a directory that opens as a store at `generation` with the records that `next` returns. If that fails, its
/// files are removed.
pub(crate) fn write_snapshot(
    disk: Arc<dyn Disk>,
    env: Env,
    directory: &Path,
    identity: u128,
    generation: Generation,
    mut next: impl FnMut() -> Result<Vec<(Key, Version)>>,
) -> Result<()> {
    // A snapshot has no commits in its log, so its segment has one page. A store that is opened from it creates
    // segments of the usual size.
    let options = FileOptions { disk, env, segment_bytes: PAGE as u64, ..FileOptions::default() };
    let failed = |cause| StoreError::io("create", directory, cause);
    options.disk.create_directory(directory).map_err(failed)?;
    let check_empty = || match options.disk.list(directory).map_err(failed)?.iter().any(|name| name != LOCK_FILE) {
        true => Err(StoreError::NotEmpty { path: directory.into() }),
        false => Ok(()),
    };
    check_empty()?;
    // Another process may write a snapshot to the same directory, or open a store there, at the same time.
    let _lock = options.lock(directory)?;
    check_empty()?;
    let written = options.create(directory, identity, generation, Completeness::Snapshot, &mut |index| {
        let (mut spaces, mut time) = (BTreeMap::new(), Timestamp(0));
        loop {
            let records = next()?;
            if records.is_empty() {
                return index.set_beginning(&spaces, time);
            }
            // The clock of a store that is opened from the snapshot must not go back.
            time = records.iter().map(|(_, version)| version.time).fold(time, Timestamp::max);
            // Every declared space gets a floor, also an empty one: it may have had records before.
            let declared = records.iter().filter(|(key, _)| key.space() == SPACES);
            let declared = declared.filter_map(|(_, version)| SpaceRecord::decode(version.value.as_ref()?));
            spaces.extend(declared.map(|record| (record.id, generation)));
            spaces.insert(SPACES, generation);
            index.import(&records)?;
        }
    });
    if written.is_err() {
        let mut names = options.disk.list(directory).unwrap_or_default();
        // The lock file is removed last: until then no other process can use the directory.
        names.sort_by_key(|name| name == LOCK_FILE);
        for name in names {
            // If files cannot be removed, FORMAT still says that the snapshot is incomplete.
            let _ = options.disk.remove(&directory.join(name));
        }
    }
    written
}
