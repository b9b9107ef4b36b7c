//! Files of the operating system. This file only passes calls on; it knows nothing of the log or the index.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, Read, Write};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use super::{DirectoryLock, Disk, DiskFile, Lock, Open};

/// Files of the operating system.
#[derive(Debug, Clone, Copy, Default)]
pub struct RealDisk;

#[derive(Debug)]
struct RealFile(File);

#[derive(Debug)]
struct RealLock {
    _file: Option<File>,
}

impl DirectoryLock for RealLock {}

impl Disk for RealDisk {
    fn create_directory(&self, path: &Path) -> io::Result<()> {
        match std::fs::metadata(path) {
            Ok(found) if found.is_dir() => return Ok(()),
            Ok(_) => return Err(io::Error::new(io::ErrorKind::NotADirectory, "it is a file, not a directory")),
            Err(_) => {}
        }
        // A new directory is durable only once its name in the parent directory is.
        let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
        self.create_directory(parent)?;
        match std::fs::create_dir(path) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => {}
            made => made?,
        }
        self.sync_directory(parent)
    }

    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        let names = std::fs::read_dir(path)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
        names.collect()
    }

    fn open(&self, path: &Path, how: Open) -> io::Result<Arc<dyn DiskFile>> {
        let fresh = how == Open::Fresh;
        let written = how != Open::ReadOnly;
        let file = OpenOptions::new().read(true).write(written).create(fresh).truncate(fresh).open(path)?;
        Ok(Arc::new(RealFile(file)))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        std::fs::rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        std::fs::remove_file(path)
    }

    fn sync_directory(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }

    fn lock(&self, path: &Path, how: Lock) -> Result<Box<dyn DirectoryLock>, io::Result<String>> {
        let open = match how {
            Lock::Exclusive => OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path),
            Lock::Shared => File::open(path),
        };
        let mut file = match open {
            Err(error) if how == Lock::Shared && error.kind() == io::ErrorKind::NotFound => {
                return Ok(Box::new(RealLock { _file: None }));
            }
            open => open.map_err(Err)?,
        };
        let locked = match how {
            Lock::Exclusive => file.try_lock(),
            Lock::Shared => file.try_lock_shared(),
        };
        match locked {
            Ok(()) => {}
            Err(TryLockError::WouldBlock) => {
                let mut owner = String::new();
                let read = file.read_to_string(&mut owner);
                return Err(read.map(|_| owner.trim().to_string()));
            }
            Err(TryLockError::Error(error)) => return Err(Err(error)),
        }
        if how == Lock::Exclusive {
            let owner = format!("{}\n", std::process::id());
            file.set_len(0).and_then(|()| file.write_all(owner.as_bytes())).map_err(Err)?;
        }
        Ok(Box::new(RealLock { _file: Some(file) }))
    }
}

impl DiskFile for RealFile {
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.0.read_exact_at(bytes, offset)
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.0.write_all_at(bytes, offset)
    }

    fn length(&self) -> io::Result<u64> {
        Ok(self.0.metadata()?.len())
    }

    fn set_length(&self, length: u64) -> io::Result<()> {
        self.0.set_len(length)
    }

    fn sync(&self) -> io::Result<()> {
        self.0.sync_data()
    }
}
