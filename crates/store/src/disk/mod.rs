//! The interface between the store and its files. The log and the index use files only through it, so that both also
//! run on a simulated disk that loses power, tears pages, fills up and fails.

use std::fmt::Debug;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

mod real;
mod shadow;
#[cfg(feature = "testing")]
pub mod sim;

pub use real::RealDisk;
pub(crate) use shadow::{ShadowDisk, ShadowFile};

/// A place for directories and files.
pub trait Disk: Debug + Send + Sync + 'static {
    /// Creates a directory and its parents, if they are missing.
    fn create_directory(&self, path: &Path) -> io::Result<()>;
    /// Returns the names in a directory; fails with kind `NotFound` if the directory does not exist.
    fn list(&self, path: &Path) -> io::Result<Vec<String>>;
    /// Opens a file for reading and writing.
    fn open(&self, path: &Path, how: Open) -> io::Result<Arc<dyn DiskFile>>;
    /// Renames a file and replaces any file that has the new name.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;
    /// Removes a file.
    fn remove(&self, path: &Path) -> io::Result<()>;
    /// Makes the created, renamed and removed names of a directory durable.
    fn sync_directory(&self, path: &Path) -> io::Result<()>;
    /// Acquires the lock of the file at `path` until the guard is dropped. `Err(Ok(owner))` names the process that
    /// holds it.
    fn lock(&self, path: &Path, how: Lock) -> Result<Box<dyn DirectoryLock>, io::Result<String>>;
}

/// How a file is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Open {
    /// The file must exist.
    Existing,
    /// The file must exist and will not be written.
    ReadOnly,
    /// The file is created, or emptied if it exists.
    Fresh,
}

/// How a directory is locked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lock {
    /// Excludes every other lock.
    Exclusive,
    /// Excludes only exclusive locks. It writes nothing: if the lock file does not exist, no process has the directory
    /// open.
    Shared,
}

/// An open file.
pub trait DiskFile: Debug + Send + Sync + 'static {
    /// Fills `bytes` from `offset` on; fails if the file ends before.
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()>;
    /// Writes all of `bytes` at `offset`.
    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()>;
    /// The length.
    fn length(&self) -> io::Result<u64>;
    /// Truncates the file or extends it with zeros.
    fn set_length(&self, length: u64) -> io::Result<()>;
    /// Makes contents and length durable.
    fn sync(&self) -> io::Result<()>;
}

/// Held while a data directory is in use.
pub trait DirectoryLock: Debug + Send + Sync {}

/// Writes a small file atomically: after a crash it is complete or absent.
pub(crate) fn write_whole(disk: &dyn Disk, directory: &Path, name: &str, contents: &[u8]) -> io::Result<()> {
    let temporary: PathBuf = directory.join(format!("{name}.new"));
    let file = disk.open(&temporary, Open::Fresh)?;
    file.write_at(0, contents)?;
    file.sync()?;
    disk.rename(&temporary, &directory.join(name))?;
    disk.sync_directory(directory)
}

/// Reads a whole file.
pub(crate) fn read_whole(disk: &dyn Disk, path: &Path) -> io::Result<Vec<u8>> {
    let file = disk.open(path, Open::ReadOnly)?;
    let mut contents = vec![0; usize::try_from(file.length()?).unwrap_or(usize::MAX)];
    file.read_at(0, &mut contents)?;
    Ok(contents)
}
