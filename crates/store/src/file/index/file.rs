//! redb's view of a file: the store's own seam, or a shadow of it that takes writes into memory.

use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;

use parking_lot::Mutex;
use redb::StorageBackend;

use crate::disk::DiskFile;

/// Hands redb's calls to the seam.
#[derive(Debug)]
pub(super) struct IndexFile(pub(super) Arc<dyn DiskFile>);

impl StorageBackend for IndexFile {
    fn len(&self) -> io::Result<u64> {
        self.0.length()
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
        self.0.read_at(offset, out)
    }

    fn set_len(&self, length: u64) -> io::Result<()> {
        self.0.set_length(length)
    }

    fn sync_data(&self) -> io::Result<()> {
        self.0.sync()
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
        self.0.write_at(offset, data)
    }
}

const BLOCK: u64 = 4096;

/// Reads from a file and writes to memory, so that a second handle can open, repair and check the file as it lies
/// there, while the first has it open.
#[derive(Debug)]
pub(super) struct ShadowFile {
    base: Arc<dyn DiskFile>,
    state: Mutex<Shadow>,
}

#[derive(Debug)]
struct Shadow {
    length: u64,
    /// What of the base still shows.
    base_length: u64,
    blocks: BTreeMap<u64, Box<[u8]>>,
}

impl ShadowFile {
    pub(super) fn over(base: Arc<dyn DiskFile>) -> io::Result<ShadowFile> {
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

/// The parts of `[offset, offset + length)` by block: block, start within it, length.
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

impl StorageBackend for ShadowFile {
    fn len(&self) -> io::Result<u64> {
        Ok(self.state.lock().length)
    }

    fn read(&self, offset: u64, out: &mut [u8]) -> io::Result<()> {
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

    fn set_len(&self, length: u64) -> io::Result<()> {
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

    fn sync_data(&self) -> io::Result<()> {
        Ok(())
    }

    fn write(&self, offset: u64, data: &[u8]) -> io::Result<()> {
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
