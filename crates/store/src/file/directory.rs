//! What a data directory consists of, and how an empty one becomes a store or a snapshot.

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
/// What may lie in a directory that is about to become a store.
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

    /// The store's identity, or `None` if the directory has yet to become one.
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
                // A name that was mistyped should not fill somebody's directory with files.
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
            Stage::Creating => Ok(None),
            Stage::Complete => Ok(Some(format.identity)),
            Stage::Snapshot => {
                let reason = "it was to become a snapshot and is not complete; remove it";
                Err(StoreError::NotAStore { path: directory.into(), reason })
            }
        }
    }

    /// Makes an empty directory a store. Until it is complete, the FORMAT file says what it is to become.
    pub(super) fn create(
        &self,
        directory: &Path,
        identity: u128,
        generation: Generation,
        stage: Stage,
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
            // FORMAT stays and says that the rest is missing.
            let names = self.disk.list(directory).unwrap_or_default().into_iter();
            for name in names.filter(|name| name == INDEX_FILE || name.starts_with("log-")) {
                let _ = self.disk.remove(&directory.join(name));
            }
            return Err(error);
        }
        write_format(Stage::Complete)
    }

    /// Everything but FORMAT.
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

/// How far a directory has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// A store is being created. Nothing is in it yet, and opening it starts over.
    Creating = 0,
    /// It is what it was to become.
    Complete = 1,
    /// A snapshot is being written. It is not to be taken for an empty store.
    Snapshot = 2,
}

/// The first file of a data directory.
#[derive(Debug, PartialEq, Eq)]
struct Format {
    version: u32,
    stage: Stage,
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

    /// Reads any version: each starts with magic and version and ends with a checksum, whatever lies between.
    fn decode(bytes: &[u8]) -> Option<Format> {
        let (body, checksum) = bytes.split_last_chunk::<8>()?;
        if codec::checksum(0, body) != u64::from_le_bytes(*checksum) {
            return None;
        }
        let rest = body.strip_prefix(Self::MAGIC)?;
        let version = u32::from_le_bytes(rest.get(..4)?.try_into().ok()?);
        if version > FORMAT {
            return Some(Format { version, stage: Stage::Complete, identity: 0 });
        }
        let identity = u128::from_le_bytes(rest.get(5..)?.try_into().ok()?);
        let stage = match rest[4] {
            0 => Stage::Creating,
            1 => Stage::Complete,
            2 => Stage::Snapshot,
            _ => return None,
        };
        Some(Format { version, stage, identity })
    }
}

/// Writes a directory that opens as a store with the records of `next` in it, at `generation`. What is left of a failed
/// one is removed.
pub(crate) fn write_snapshot(
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
    let check_empty = || match options.disk.list(directory).map_err(failed)?.iter().any(|name| name != LOCK_FILE) {
        true => Err(StoreError::NotEmpty { path: directory.into() }),
        false => Ok(()),
    };
    check_empty()?;
    // Somebody else may be about to write a snapshot to the same place, or to open a store there.
    let _lock = options.lock(directory)?;
    check_empty()?;
    let written = options.create(directory, identity, generation, Stage::Snapshot, &mut |index| {
        let (mut spaces, mut time) = (BTreeMap::new(), Timestamp(0));
        loop {
            let records = next()?;
            if records.is_empty() {
                return index.set_beginning(&spaces, time);
            }
            // A store that goes on from here must not go back in time.
            time = records.iter().map(|(_, version)| version.time).fold(time, Timestamp::max);
            // A space that is empty here may not have been so before.
            let declared = records.iter().filter(|(key, _)| key.space() == SPACES);
            let declared = declared.filter_map(|(_, version)| SpaceRecord::decode(version.value.as_ref()?));
            spaces.extend(declared.map(|record| (record.id, generation)));
            spaces.insert(SPACES, generation);
            index.import(&records)?;
        }
    });
    if written.is_err() {
        let mut names = options.disk.list(directory).unwrap_or_default();
        // The lock's file last: until then the directory is ours.
        names.sort_by_key(|name| name == LOCK_FILE);
        for name in names {
            // What cannot be removed says itself that it is not complete.
            let _ = options.disk.remove(&directory.join(name));
        }
    }
    written
}
