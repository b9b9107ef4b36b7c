//! The names and contents of a simulated disk. Contents are blocks that copies share, so that another image of a disk
//! costs little. This file knows nothing of syncs and faults.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use super::{Event, FileId};

const BLOCK: usize = 4096;

type Block = Arc<[u8; BLOCK]>;

/// Names and contents.
#[derive(Default, Clone)]
pub(super) struct Medium {
    pub(super) names: BTreeMap<PathBuf, FileId>,
    files: Vec<Arc<FileContents>>,
}

/// The bytes of one file. In the last block, bytes behind the length are zero.
#[derive(Default, Clone)]
pub(super) struct FileContents {
    length: usize,
    blocks: Vec<Block>,
}

impl Medium {
    /// The id of the next new file.
    pub(super) fn next_id(&self) -> FileId {
        self.files.len()
    }

    pub(super) fn contents(&self, id: FileId) -> &FileContents {
        &self.files[id]
    }

    /// Applies an event to the names.
    pub(super) fn rename(&mut self, event: &Event) {
        match event {
            Event::Create(path, id) => {
                self.names.insert(path.clone(), *id);
                self.file(*id);
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
    }

    /// Applies an event to the contents.
    pub(super) fn change(&mut self, event: &Event) {
        match event {
            Event::Write(file, offset, bytes) => self.write(*file, *offset, bytes),
            Event::SetLength(file, length) => self.file(*file).set_length(*length as usize),
            _ => {}
        }
    }

    pub(super) fn write(&mut self, file: FileId, offset: u64, bytes: &[u8]) {
        self.file(file).write(offset as usize, bytes);
    }

    pub(super) fn replace(&mut self, file: FileId, bytes: &[u8]) {
        let contents = self.file(file);
        contents.set_length(0);
        contents.write(0, bytes);
    }

    fn file(&mut self, id: FileId) -> &mut FileContents {
        if self.files.len() <= id {
            self.files.resize(id + 1, Arc::default());
        }
        Arc::make_mut(&mut self.files[id])
    }
}

impl FileContents {
    pub(super) fn length(&self) -> usize {
        self.length
    }

    pub(super) fn to_vec(&self) -> Vec<u8> {
        let mut bytes = self.blocks.iter().flat_map(|block| block.iter().copied()).collect::<Vec<_>>();
        bytes.truncate(self.length);
        bytes
    }

    /// Fills `out` from `offset` on; returns `false` if the file is too short.
    pub(super) fn read(&self, offset: usize, out: &mut [u8]) -> bool {
        if offset.checked_add(out.len()).is_none_or(|end| end > self.length) {
            return false;
        }
        let mut at = 0;
        while at < out.len() {
            let start = (offset + at) % BLOCK;
            let length = (BLOCK - start).min(out.len() - at);
            out[at..at + length].copy_from_slice(&self.blocks[(offset + at) / BLOCK][start..start + length]);
            at += length;
        }
        true
    }

    fn write(&mut self, offset: usize, bytes: &[u8]) {
        self.set_length(self.length.max(offset + bytes.len()));
        let mut at = 0;
        while at < bytes.len() {
            let start = (offset + at) % BLOCK;
            let length = (BLOCK - start).min(bytes.len() - at);
            let block = Arc::make_mut(&mut self.blocks[(offset + at) / BLOCK]);
            block[start..start + length].copy_from_slice(&bytes[at..at + length]);
            at += length;
        }
    }

    fn set_length(&mut self, length: usize) {
        if length < self.length && !length.is_multiple_of(BLOCK) {
            Arc::make_mut(&mut self.blocks[length / BLOCK])[length % BLOCK..].fill(0);
        }
        if self.blocks.len() != length.div_ceil(BLOCK) {
            let zeros = Arc::new([0; BLOCK]);
            self.blocks.resize(length.div_ceil(BLOCK), zeros);
        }
        self.length = length;
    }
}
