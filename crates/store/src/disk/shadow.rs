//! A disk whose files are read from another disk and written to memory. It opens a directory that must not change.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;

use parking_lot::Mutex;

use super::{DirectoryLock, Disk, DiskFile, Lock, Open};

/// Reads from another disk and changes nothing there.
#[derive(Debug)]
pub(crate) struct ShadowDisk(pub(crate) Arc<dyn Disk>);

impl Disk for ShadowDisk {
    fn create_directory(&self, _path: &Path) -> io::Result<()> {
        Ok(())
    }

    fn list(&self, path: &Path) -> io::Result<Vec<String>> {
        self.0.list(path)
    }

    fn open(&self, path: &Path, how: Open) -> io::Result<Arc<dyn DiskFile>> {
        match how {
            Open::Existing | Open::ReadOnly => Ok(Arc::new(ShadowFile::over(self.0.open(path, Open::ReadOnly)?)?)),
            Open::Fresh => Err(io::ErrorKind::ReadOnlyFilesystem.into()),
        }
    }

    fn rename(&self, _from: &Path, _to: &Path) -> io::Result<()> {
        Err(io::ErrorKind::ReadOnlyFilesystem.into())
    }

    fn remove(&self, _path: &Path) -> io::Result<()> {
        // An opening that may write removes the file later.
        Ok(())
    }

    fn sync_directory(&self, _path: &Path) -> io::Result<()> {
        Ok(())
    }

    fn lock(&self, path: &Path, _how: Lock) -> Result<Box<dyn DirectoryLock>, io::Result<String>> {
        self.0.lock(path, Lock::Shared)
    }
}

const BLOCK: u64 = 4096;

/// Reads from a file and writes to memory. So a file can be opened, repaired and checked without being changed.
#[derive(Debug)]
pub(crate) struct ShadowFile {
    base: Arc<dyn DiskFile>,
    state: Mutex<Shadow>,
}

#[derive(Debug)]
struct Shadow {
    length: u64,
    /// How many bytes of the base are still visible. A truncation hides the rest.
    base_length: u64,
    blocks: BTreeMap<u64, Box<[u8]>>,
}

impl ShadowFile {
    pub(crate) fn over(base: Arc<dyn DiskFile>) -> io::Result<ShadowFile> {
        let length = base.length()?;
        let state = Shadow { length, base_length: length, blocks: BTreeMap::new() };
        Ok(ShadowFile { base, state: Mutex::new(state) })
    }

    fn base_block(&self, state: &Shadow, block: u64) -> io::Result<Box<[u8]>> {
        let mut bytes = vec![0; BLOCK as usize].into_boxed_slice();
        let start = block * BLOCK;
        let there = state.base_length.saturating_sub(start).min(BLOCK);
        self.base.read_at(start, &mut bytes[..there as usize])?;
        Ok(bytes)
    }
}

/// Splits `[offset, offset + length)` by block. Returns for each part the block, the start within it and the length.
fn parts(offset: u64, length: usize) -> impl Iterator<Item = (u64, usize, usize)> {
    let end = offset + length as u64;
    let mut at = offset;
    std::iter::from_fn(move || {
        (at < end).then(|| {
            let (block, start) = (at / BLOCK, at % BLOCK);
            let length = (BLOCK - start).min(end - at);
            at += length;
            (block, start as usize, length as usize)
        })
    })
}

impl DiskFile for ShadowFile {
    fn length(&self) -> io::Result<u64> {
        Ok(self.state.lock().length)
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        let state = self.state.lock();
        if offset + out.len() as u64 > state.length {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let mut filled = 0;
        for (block, start, length) in parts(offset, out.len()) {
            let target = &mut out[filled..filled + length];
            match state.blocks.get(&block) {
                Some(bytes) => target.copy_from_slice(&bytes[start..start + length]),
                None => target.copy_from_slice(&self.base_block(&state, block)?[start..start + length]),
            }
            filled += length;
        }
        Ok(())
    }

    fn set_length(&self, length: u64) -> io::Result<()> {
        let mut state = self.state.lock();
        if length < state.length {
            state.base_length = state.base_length.min(length);
            state.blocks.split_off(&length.div_ceil(BLOCK));
            if let Some(bytes) = state.blocks.get_mut(&(length / BLOCK)) {
                bytes[(length % BLOCK) as usize..].fill(0);
            }
        }
        state.length = length;
        Ok(())
    }

    fn sync(&self) -> io::Result<()> {
        Ok(())
    }

    fn write_at(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        let mut state = self.state.lock();
        let mut taken = 0;
        for (block, start, length) in parts(offset, data.len()) {
            let mut bytes = match state.blocks.remove(&block) {
                Some(bytes) => bytes,
                None => self.base_block(&state, block)?,
            };
            bytes[start..start + length].copy_from_slice(&data[taken..taken + length]);
            state.blocks.insert(block, bytes);
            taken += length;
        }
        state.length = state.length.max(offset + data.len() as u64);
        Ok(())
    }
}
