//! Lets redb read and write its file through the store's [`DiskFile`].

use std::io;
use std::sync::Arc;

use redb::StorageBackend;

use crate::disk::DiskFile;

/// Passes redb's calls on to a [`DiskFile`].
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
