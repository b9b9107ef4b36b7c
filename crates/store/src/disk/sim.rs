//! A disk in memory that behaves as badly as disks may. It records every write and sync, builds the images a power
//! loss could leave at any point of that record, and fails when told to.
//!
//! What it supposes of a real disk: a write reaches the medium in sectors of 512 bytes, each whole or not at all and
//! in any order until its file is synced; names of a directory change in order, and are sure after a sync of it.

use std::collections::BTreeMap;
use std::fmt;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;

use super::{DirectoryLock, Disk, DiskFile, Open};

/// What reaches the medium whole or not at all.
pub const SECTOR: usize = 512;

/// Something a program did to the disk, or a note of the test between two of them.
#[derive(Debug, Clone)]
pub enum Event {
    /// A name was given to a new, empty file.
    Create(PathBuf, FileId),
    /// A name changed.
    Rename(PathBuf, PathBuf),
    /// A name was removed.
    Remove(PathBuf),
    /// The names of a directory became sure.
    SyncDirectory(PathBuf),
    /// Bytes were written.
    Write(FileId, u64, Arc<[u8]>),
    /// A length was set.
    SetLength(FileId, u64),
    /// Contents and length of a file became sure.
    Sync(FileId),
    /// Said by the test through [`SimDisk::note`].
    Note(u64),
}

/// A file, whatever its name.
pub type FileId = usize;

/// What is about to be done, asked of the fault function.
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
}

/// How an attempt goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Fault {
    /// With this error, and nothing done.
    Error(ErrorKind),
    /// With an error, after half of the bytes were written.
    ShortWrite,
}

type Faults = Box<dyn FnMut(Attempt, &Path) -> Option<Fault> + Send>;

/// The simulated disk. Clones share it.
#[derive(Clone, Default)]
pub struct SimDisk {
    state: Arc<Mutex<State>>,
}

#[derive(Default)]
struct State {
    medium: Medium,
    locks: BTreeMap<PathBuf, ()>,
    recording: Option<Vec<Event>>,
    faults: Option<Faults>,
}

/// Names and contents.
#[derive(Default, Clone)]
struct Medium {
    names: BTreeMap<PathBuf, FileId>,
    files: Vec<Vec<u8>>,
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

    /// Starts to record events from the present contents on, which count as synced.
    pub fn record(&self) -> Recording {
        let mut state = self.state.lock();
        state.recording = Some(Vec::new());
        Recording { start: state.medium.clone(), events: Vec::new(), disk: self.clone() }
    }

    /// Adds a note to the recording, at this point of it.
    pub fn note(&self, note: u64) {
        self.state.lock().push(Event::Note(note));
    }

    /// Lets `faults` decide about every attempt from now on.
    pub fn set_faults(&self, faults: impl FnMut(Attempt, &Path) -> Option<Fault> + Send + 'static) {
        self.state.lock().faults = Some(Box::new(faults));
    }

    /// Lets everything succeed again.
    pub fn clear_faults(&self) {
        self.state.lock().faults = None;
    }

    /// The names of all files with their lengths.
    pub fn files(&self) -> Vec<(PathBuf, u64)> {
        let state = self.state.lock();
        state.medium.names.iter().map(|(name, id)| (name.clone(), state.medium.files[*id].len() as u64)).collect()
    }

    /// Changes bytes behind the store's back.
    pub fn damage(&self, path: &Path, change: impl FnOnce(&mut Vec<u8>)) {
        let mut state = self.state.lock();
        if let Some(id) = state.medium.names.get(path).copied() {
            change(&mut state.medium.files[id]);
        }
    }

    /// A disk with the same contents that goes its own way.
    pub fn copy(&self) -> SimDisk {
        SimDisk::holding(self.state.lock().medium.clone())
    }

    fn holding(medium: Medium) -> SimDisk {
        SimDisk { state: Arc::new(Mutex::new(State { medium, ..State::default() })) }
    }
}

impl fmt::Debug for SimDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SimDisk")
    }
}

impl State {
    fn push(&mut self, event: Event) {
        if let Some(recording) = &mut self.recording {
            recording.push(event);
        }
    }

    fn attempt(&mut self, attempt: Attempt, path: &Path) -> Option<Fault> {
        self.faults.as_mut().and_then(|faults| faults(attempt, path))
    }
}

/// Events from a known state on.
pub struct Recording {
    start: Medium,
    events: Vec<Event>,
    disk: SimDisk,
}

impl Recording {
    /// Ends the recording and keeps what was recorded.
    pub fn stop(mut self) -> Recording {
        self.events = self.disk.state.lock().recording.take().unwrap_or_default();
        self
    }

    /// What happened.
    pub fn events(&self) -> &[Event] {
        &self.events
    }

    /// A disk as a power loss right before event number `point` could leave it.
    pub fn image(&self, point: usize, loss: Loss) -> SimDisk {
        let mut image = Image::new(&self.start, loss);
        for event in &self.events[..point] {
            image.replay(event);
        }
        SimDisk::holding(image.crash())
    }
}

/// Replays events while keeping apart what is sure and what is not.
struct Image {
    sure: Medium,
    /// Names as the running program saw them, and the changes to them that no directory sync covers yet.
    unsure_names: Vec<Event>,
    /// Writes and lengths that no sync of their file covers yet, in order.
    unsure: Vec<(FileId, Event)>,
    loss: Loss,
    random: fastrand::Rng,
}

impl Image {
    fn new(start: &Medium, loss: Loss) -> Image {
        let seed = match loss {
            Loss::SomeWrites(seed) | Loss::SomeSectors(seed) => seed,
            Loss::Everything | Loss::Nothing => 0,
        };
        let random = fastrand::Rng::with_seed(seed);
        Image { sure: start.clone(), unsure_names: Vec::new(), unsure: Vec::new(), loss, random }
    }

    fn replay(&mut self, event: &Event) {
        match event {
            Event::Create(..) | Event::Rename(..) | Event::Remove(..) => self.unsure_names.push(event.clone()),
            Event::SyncDirectory(_) => {
                for event in std::mem::take(&mut self.unsure_names) {
                    self.sure.rename(&event);
                }
            }
            Event::Write(file, ..) | Event::SetLength(file, _) => self.unsure.push((*file, event.clone())),
            Event::Sync(file) => {
                let (synced, rest) = std::mem::take(&mut self.unsure).into_iter().partition(|(id, _)| id == file);
                self.unsure = rest;
                let synced: Vec<(FileId, Event)> = synced;
                for (_, event) in synced {
                    self.sure.change(&event);
                }
            }
            Event::Note(_) => {}
        }
    }

    fn crash(mut self) -> Medium {
        let names = std::mem::take(&mut self.unsure_names);
        let kept = match self.loss {
            Loss::Everything => 0,
            Loss::Nothing => names.len(),
            Loss::SomeWrites(_) | Loss::SomeSectors(_) => self.random.usize(..=names.len()),
        };
        for event in &names[..kept] {
            self.sure.rename(event);
        }
        for (_, event) in std::mem::take(&mut self.unsure) {
            match (self.loss, &event) {
                (Loss::Everything, _) => {}
                (Loss::Nothing, _) => self.sure.change(&event),
                (Loss::SomeSectors(_), Event::Write(file, offset, bytes)) => self.tear(*file, *offset, bytes),
                (Loss::SomeWrites(_) | Loss::SomeSectors(_), _) => {
                    if self.random.bool() {
                        self.sure.change(&event);
                    }
                }
            }
        }
        self.sure
    }

    /// Keeps some of a write's sectors.
    fn tear(&mut self, file: FileId, offset: u64, bytes: &[u8]) {
        let mut at = 0;
        while at < bytes.len() {
            let in_sector = SECTOR - (offset as usize + at) % SECTOR;
            let end = bytes.len().min(at + in_sector);
            if self.random.bool() {
                self.sure.write(file, offset + at as u64, &bytes[at..end]);
            }
            at = end;
        }
    }
}

impl Medium {
    fn rename(&mut self, event: &Event) {
        match event {
            Event::Create(path, id) => {
                self.names.insert(path.clone(), *id);
            }
            Event::Rename(from, to) => {
                if let Some(id) = self.names.remove(from) {
                    self.names.insert(to.clone(), id);
                }
            }
            Event::Remove(path) => {
                self.names.remove(path);
            }
            _ => {}
        }
        if let Event::Create(_, id) = event {
            self.file(*id);
        }
    }

    fn change(&mut self, event: &Event) {
        match event {
            Event::Write(file, offset, bytes) => self.write(*file, *offset, bytes),
            Event::SetLength(file, length) => self.file(*file).resize(*length as usize, 0),
            _ => {}
        }
    }

    fn write(&mut self, file: FileId, offset: u64, bytes: &[u8]) {
        let contents = self.file(file);
        let end = offset as usize + bytes.len();
        if contents.len() < end {
            contents.resize(end, 0);
        }
        contents[offset as usize..end].copy_from_slice(bytes);
    }

    fn file(&mut self, id: FileId) -> &mut Vec<u8> {
        if self.files.len() <= id {
            self.files.resize(id + 1, Vec::new());
        }
        &mut self.files[id]
    }
}

fn failure(fault: Fault) -> io::Error {
    match fault {
        Fault::Error(kind) => io::Error::new(kind, "the simulated disk was told to fail"),
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
        let mut state = self.state.lock();
        let id = match (state.medium.names.get(path).copied(), how) {
            (Some(id), Open::Existing) => id,
            (None, Open::Existing) => return Err(ErrorKind::NotFound.into()),
            (_, Open::Fresh) => {
                let id = state.medium.files.len();
                let create = Event::Create(path.to_path_buf(), id);
                state.medium.rename(&create);
                state.push(create);
                id
            }
        };
        Ok(Arc::new(SimFile { disk: self.clone(), id, path: path.to_path_buf() }))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
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
        let mut state = self.state.lock();
        let event = Event::Remove(path.to_path_buf());
        state.medium.rename(&event);
        state.push(event);
        Ok(())
    }

    fn sync_directory(&self, path: &Path) -> io::Result<()> {
        let mut state = self.state.lock();
        if let Some(fault) = state.attempt(Attempt::SyncDirectory, path) {
            return Err(failure(fault));
        }
        state.push(Event::SyncDirectory(path.to_path_buf()));
        Ok(())
    }

    fn lock(&self, path: &Path) -> Result<Box<dyn DirectoryLock>, io::Result<String>> {
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
        let contents = &state.medium.files[self.id];
        let offset = offset as usize;
        let found = offset.checked_add(bytes.len()).and_then(|end| contents.get(offset..end));
        bytes.copy_from_slice(found.ok_or_else(|| io::Error::from(ErrorKind::UnexpectedEof))?);
        Ok(())
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let mut state = self.disk.state.lock();
        let fault = state.attempt(Attempt::Write, &self.path);
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
        Ok(self.disk.state.lock().medium.files[self.id].len() as u64)
    }

    fn set_length(&self, length: u64) -> io::Result<()> {
        let mut state = self.disk.state.lock();
        if let Some(fault) = state.attempt(Attempt::SetLength, &self.path) {
            return Err(failure(fault));
        }
        let event = Event::SetLength(self.id, length);
        state.medium.change(&event);
        state.push(event);
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        let mut state = self.disk.state.lock();
        if let Some(fault) = state.attempt(Attempt::Sync, &self.path) {
            return Err(failure(fault));
        }
        state.push(Event::Sync(self.id));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contents(disk: &SimDisk, path: &str) -> Option<Vec<u8>> {
        let state = disk.state.lock();
        state.medium.names.get(Path::new(path)).map(|id| state.medium.files[*id].clone())
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
