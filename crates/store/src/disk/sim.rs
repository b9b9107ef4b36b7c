//! A disk in memory that shows every failure that a real disk may show. It records every write and sync, builds the
//! images that a power loss could leave at any point of that recording, and returns errors on request.
//!
//! It assumes of a real disk: a write reaches the medium in sectors of 512 bytes, each sector whole or not at all, in
//! any order until the file is synced. The names of a directory change in order and are durable after a sync of it.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;

use self::medium::Medium;
use super::{DirectoryLock, Disk, DiskFile, Lock, Open};

mod medium;
mod recording;

pub use self::recording::{Recording, Walk};

/// The unit that reaches the medium whole or not at all.
pub const SECTOR: usize = 512;

/// One change or sync of the disk, or a note that the test adds between two of them.
#[derive(Debug, Clone)]
pub enum Event {
    /// A new, empty file was created under a name.
    Create(PathBuf, FileId),
    /// A file was renamed.
    Rename(PathBuf, PathBuf),
    /// A file was removed.
    Remove(PathBuf),
    /// The names of a directory became durable.
    SyncDirectory(PathBuf),
    /// Bytes were written.
    Write(FileId, u64, Arc<[u8]>),
    /// A length was set.
    SetLength(FileId, u64),
    /// Contents and length of a file became durable.
    Sync(FileId),
    /// The test added a note through [`SimDisk::note`].
    Note(u64),
}

impl Event {
    /// The directory whose names the event changed.
    fn directory(&self) -> Option<&Path> {
        match self {
            Event::Create(path, _) | Event::Rename(_, path) | Event::Remove(path) => path.parent(),
            _ => None,
        }
    }
}

/// Identifies a file, independent of its name.
pub type FileId = usize;

/// The operation that is about to happen. The fault function decides whether it fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attempt {
    /// Writing bytes.
    Write,
    /// Changing a length.
    SetLength,
    /// Syncing a file.
    Sync,
    /// Syncing a directory.
    SyncDirectory,
    /// Creating a file.
    Create,
    /// Renaming a file.
    Rename,
    /// Removing a file.
    Remove,
}

/// How an attempt fails.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// With this error, and without any effect.
    Error(ErrorKind),
    /// With an error, after half of the bytes were written.
    ShortWrite,
}

type Faults = Box<dyn FnMut(Attempt, &Path) -> Option<Fault> + Send>;

/// The simulated disk. Clones share it.
#[derive(Clone, Default)]
pub struct SimDisk {
    state: Arc<Mutex<SimState>>,
    /// Not part of the state, so that a slow fault function does not block readers.
    faults: Arc<Mutex<Option<Faults>>>,
}

#[derive(Default)]
struct SimState {
    medium: Medium,
    locks: BTreeMap<PathBuf, ()>,
    recording: Option<Vec<Event>>,
}

/// Which unsynced writes an image keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loss {
    /// None of them.
    Everything,
    /// All of them.
    Nothing,
    /// Whole writes at random.
    SomeWrites(u64),
    /// Sectors of writes at random: torn pages.
    SomeSectors(u64),
}

impl SimDisk {
    /// An empty disk.
    pub fn new() -> SimDisk {
        SimDisk::default()
    }

    /// Starts to record events. The current contents count as synced.
    pub fn record(&self) -> Recording {
        let mut state = self.state.lock();
        state.recording = Some(Vec::new());
        Recording::new(state.medium.clone(), self.clone())
    }

    /// Adds a note to the recording.
    pub fn note(&self, note: u64) {
        self.state.lock().push(Event::Note(note));
    }

    /// From now on `faults` decides about every attempt.
    pub fn set_faults(&self, faults: impl FnMut(Attempt, &Path) -> Option<Fault> + Send + 'static) {
        *self.faults.lock() = Some(Box::new(faults));
    }

    /// From now on every attempt succeeds again.
    pub fn clear_faults(&self) {
        *self.faults.lock() = None;
    }

    /// The names of all files with their lengths.
    pub fn files(&self) -> Vec<(PathBuf, u64)> {
        let state = self.state.lock();
        state.medium.names.iter().map(|(name, id)| (name.clone(), state.medium.contents(*id).length() as u64)).collect()
    }

    /// The current name of a file from an event.
    pub fn name(&self, file: FileId) -> Option<PathBuf> {
        let state = self.state.lock();
        state.medium.names.iter().find(|(_, id)| **id == file).map(|(name, _)| name.clone())
    }

    /// Changes bytes of a file without any event, as damage to the medium does.
    pub fn damage(&self, path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
        let mut state = self.state.lock();
        if let Some(id) = state.medium.names.get(path).copied() {
            let mut bytes = state.medium.contents(id).to_vec();
            change(&mut bytes);
            state.medium.replace(id, &bytes);
        }
    }

    /// Returns an independent disk with the same contents.
    pub fn copy(&self) -> SimDisk {
        SimDisk::holding(self.state.lock().medium.clone())
    }

    fn holding(medium: Medium) -> SimDisk {
        SimDisk { state: Arc::new(Mutex::new(SimState { medium, ..SimState::default() })), faults: Arc::default() }
    }
}

impl fmt::Debug for SimDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SimDisk")
    }
}

impl SimState {
    fn push(&mut self, event: Event) {
        if let Some(recording) = &mut self.recording {
            recording.push(event);
        }
    }
}

impl SimDisk {
    fn fault(&self, attempt: Attempt, path: &Path) -> Option<Fault> {
        self.faults.lock().as_mut().and_then(|faults| faults(attempt, path))
    }

    fn attempt(&self, attempt: Attempt, path: &Path) -> io::Result<()> {
        self.fault(attempt, path).map_or(Ok(()), |fault| Err(failure(fault)))
    }
}

fn failure(fault: Fault) -> io::Error {
    match fault {
        Fault::Error(kind) => io::Error::new(kind, "the simulated disk fails on request"),
        Fault::ShortWrite => io::Error::new(ErrorKind::WriteZero, "the simulated disk wrote only a part"),
    }
}

impl Disk for SimDisk {
    fn create_directory(&self, _path: &Path) -> io::Result<()> {
        Ok(())
    }

    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        let state = self.state.lock();
        let inside = state.medium.names.keys().filter(|name| name.parent() == Some(path));
        Ok(inside.filter_map(|name| Some(name.file_name()?.to_string_lossy().into_owned())).collect())
    }

    fn open(&self, path: &Path, how: Open) -> io::Result<Arc<dyn DiskFile>> {
        if how == Open::Fresh {
            self.attempt(Attempt::Create, path)?;
        }
        let mut state = self.state.lock();
        let id = match (state.medium.names.get(path).copied(), how) {
            (Some(id), Open::Existing | Open::ReadOnly) => id,
            (None, Open::Existing | Open::ReadOnly) => return Err(ErrorKind::NotFound.into()),
            (_, Open::Fresh) => {
                let id = state.medium.next_id();
                let create = Event::Create(path.to_path_buf(), id);
                state.medium.rename(&create);
                state.push(create);
                id
            }
        };
        Ok(Arc::new(SimFile { disk: self.clone(), id, path: path.to_path_buf() }))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.attempt(Attempt::Rename, to)?;
        let mut state = self.state.lock();
        if !state.medium.names.contains_key(from) {
            return Err(ErrorKind::NotFound.into());
        }
        let event = Event::Rename(from.to_path_buf(), to.to_path_buf());
        state.medium.rename(&event);
        state.push(event);
        Ok(())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.attempt(Attempt::Remove, path)?;
        let mut state = self.state.lock();
        let event = Event::Remove(path.to_path_buf());
        state.medium.rename(&event);
        state.push(event);
        Ok(())
    }

    fn sync_directory(&self, path: &Path) -> io::Result<()> {
        self.attempt(Attempt::SyncDirectory, path)?;
        let mut state = self.state.lock();
        state.push(Event::SyncDirectory(path.to_path_buf()));
        Ok(())
    }

    fn lock(&self, path: &Path, _how: Lock) -> Result<Box<dyn DirectoryLock>, io::Result<String>> {
        let mut state = self.state.lock();
        if state.locks.insert(path.to_path_buf(), ()).is_some() {
            return Err(Ok(std::process::id().to_string()));
        }
        Ok(Box::new(SimLock { disk: self.clone(), path: path.to_path_buf() }))
    }
}

#[derive(Debug)]
struct SimLock {
    disk: SimDisk,
    path: PathBuf,
}

impl DirectoryLock for SimLock {}

impl Drop for SimLock {
    fn drop(&mut self) {
        self.disk.state.lock().locks.remove(&self.path);
    }
}

struct SimFile {
    disk: SimDisk,
    id: FileId,
    path: PathBuf,
}

impl fmt::Debug for SimFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SimFile({})", self.path.display())
    }
}

impl DiskFile for SimFile {
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let state = self.disk.state.lock();
        let read = state.medium.contents(self.id).read(offset as usize, bytes);
        if read { Ok(()) } else { Err(ErrorKind::UnexpectedEof.into()) }
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let fault = self.disk.fault(Attempt::Write, &self.path);
        let mut state = self.disk.state.lock();
        let written = match fault {
            None => bytes,
            Some(Fault::ShortWrite) => &bytes[..bytes.len() / 2],
            Some(Fault::Error(_)) => &[],
        };
        if !written.is_empty() {
            state.medium.write(self.id, offset, written);
            state.push(Event::Write(self.id, offset, written.into()));
        }
        fault.map_or(Ok(()), |fault| Err(failure(fault)))
    }

    fn length(&self) -> io::Result<u64> {
        Ok(self.disk.state.lock().medium.contents(self.id).length() as u64)
    }

    fn set_length(&self, length: u64) -> io::Result<()> {
        self.disk.attempt(Attempt::SetLength, &self.path)?;
        let mut state = self.disk.state.lock();
        let event = Event::SetLength(self.id, length);
        state.medium.change(&event);
        state.push(event);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        self.disk.attempt(Attempt::Sync, &self.path)?;
        let mut state = self.disk.state.lock();
        state.push(Event::Sync(self.id));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contents(disk: &SimDisk, path: &str) -> Option<Vec<u8>> {
        let state = disk.state.lock();
        state.medium.names.get(Path::new(path)).map(|id| state.medium.contents(*id).to_vec())
    }

    #[test]
    fn an_image_keeps_what_was_synced_and_loses_what_was_not() {
        let disk = SimDisk::new();
        let recording = disk.record();
        let file = disk.open(Path::new("/d/a"), Open::Fresh).unwrap();
        file.write_at(0, b"sure").unwrap();
        file.sync().unwrap();
        disk.sync_directory(Path::new("/d")).unwrap();
        file.write_at(4, b"late").unwrap();
        let recording = recording.stop();
        let end = recording.events().len();
        let at = |point, loss| contents(&recording.image(point, loss), "/d/a");
        assert_eq!(at(end, Loss::Everything), Some(b"sure".to_vec()));
        assert_eq!(at(end, Loss::Nothing), Some(b"surelate".to_vec()));
        assert_eq!(at(3, Loss::Everything), None, "the name was not yet synced");
    }

    #[test]
    fn a_torn_write_keeps_whole_sectors() {
        let disk = SimDisk::new();
        let file = disk.open(Path::new("/d/a"), Open::Fresh).unwrap();
        file.set_length(4096).unwrap();
        let recording = disk.record();
        file.write_at(0, &[7; 4096]).unwrap();
        let recording = recording.stop();
        let torn = (0..32).map(|seed| contents(&recording.image(1, Loss::SomeSectors(seed)), "/d/a").unwrap());
        let torn: Vec<_> = torn.filter(|image| image.contains(&0) && image.contains(&7)).collect();
        assert!(torn.len() > 16);
        assert!(torn.iter().all(|image| image.chunks(SECTOR).all(|s| s.iter().all(|byte| byte == &s[0]))));
    }
}
