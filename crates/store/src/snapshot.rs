//! Snapshots: writes one view as a data directory, and reads it back to replace the contents of a store.

use std::path::Path;
use std::sync::Arc;

use tokio::sync::{mpsc, oneshot};

use crate::backend::{Backend, Contents, Order, Scan};
use crate::disk::Disk;
use crate::file::{FileBackend, write_snapshot};
use crate::space::RECEIPTS;
use crate::{FileOptions, Generation, Key, Range, Result, SpaceId, Store, StoreError, Version};

/// The approximate size of a batch of records. It is in bytes because a record has a few bytes or several megabytes.
pub(crate) const BATCH_BYTES: usize = 1 << 20;

type Batch = Vec<(Key, Version)>;

/// Writes the contents of `store` at `generation`, which the caller has pinned. A separate thread writes the files, so
/// that the caller's thread can do other work.
pub(crate) async fn write(store: &Store, generation: Generation, directory: &Path) -> Result<()> {
    let (batches, mut incoming) = mpsc::channel::<Batch>(4);
    let (done, written) = oneshot::channel();
    let (disk, env, identity) = (store.disk().clone(), store.env().clone(), store.backend().identity());
    let path = directory.to_path_buf();
    let spawned = std::thread::Builder::new().name("latchwork-persist".into()).spawn(move || {
        // The sender ends the stream with an empty batch. A channel that closes without one means that it failed.
        let next = || incoming.blocking_recv().ok_or(StoreError::Closed);
        let _ = done.send(write_snapshot(disk, env, &path, identity, generation, next));
    });
    spawned.map_err(|cause| StoreError::io("start a thread for", directory, cause))?;
    let sent = send_all(store, generation, &batches).await;
    drop(batches);
    // If both sides failed, the writer's error is the cause: its failure also ends the sending.
    match written.await {
        Ok(Err(error)) if !matches!(error, StoreError::Closed) => Err(error),
        Ok(Ok(())) => sent,
        _ => sent.and(Err(StoreError::Closed)),
    }
}

async fn send_all(store: &Store, generation: Generation, batches: &mpsc::Sender<Batch>) -> Result<()> {
    for space in store.stored_spaces().await? {
        let mut range = Range::of_space(space);
        loop {
            let batch = match store.backend().scan(batch_of(range.clone()), generation).await {
                // Receipts expire, also in a view of the past.
                Err(StoreError::HistoryDropped { .. }) if space == RECEIPTS => Vec::new(),
                batch => batch?,
            };
            let Some((last, _)) = batch.last() else { break };
            range = range.after(last);
            if batches.send(batch).await.is_err() {
                return Ok(());
            }
        }
    }
    let _ = batches.send(Vec::new()).await;
    Ok(())
}

/// A scan for one batch of a range, tombstones included.
fn batch_of(range: Range) -> Scan {
    Scan { range, order: Order::Ascending, limit: usize::MAX, bytes: BATCH_BYTES, with_deleted: true }
}

/// Opens a snapshot, or any data directory that no process has open, to read all of it.
pub(crate) fn read(disk: &Arc<dyn Disk>, directory: &Path) -> Result<Contents> {
    let backend = FileOptions::new().shared_disk(disk.clone()).open_snapshot(directory)?;
    let (generation, time) = (backend.visible(), backend.time());
    let identity = backend.identity();
    Ok(Contents { generation, time, identity, records: Box::new(RecordReader::new(backend, generation)) })
}

/// Iterates over the records of a store that does not change, in key order.
struct RecordReader {
    backend: FileBackend,
    generation: Generation,
    rest: Range,
    batch: std::vec::IntoIter<(Key, Version)>,
}

impl RecordReader {
    fn new(backend: FileBackend, generation: Generation) -> RecordReader {
        RecordReader { backend, generation, rest: Range::everything(), batch: Vec::new().into_iter() }
    }
}

impl Iterator for RecordReader {
    type Item = Result<(Key, Version)>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.batch.len() == 0 {
            match self.backend.scan_now(&batch_of(self.rest.clone()), self.generation) {
                Ok(batch) => self.batch = batch.into_iter(),
                Err(error) => return Some(Err(error)),
            }
            if let Some((last, _)) = self.batch.as_slice().last() {
                self.rest = self.rest.after(last);
            }
        }
        self.batch.next().map(Ok)
    }
}

/// The store's own spaces, which are part of every snapshot.
pub(crate) const OWN_SPACES: [SpaceId; 2] = [crate::space::SPACES, RECEIPTS];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::sim::SimDisk;
    use crate::{Commit, SpaceSpec};

    #[tokio::test]
    async fn batches_are_cut_by_bytes_and_a_large_record_is_alone() {
        let files = FileOptions::new().disk(SimDisk::new()).without_threads().open("/d").await.unwrap();
        for store in [Store::memory().await.unwrap(), files] {
            let space = store.space(SpaceSpec::new("a")).await.unwrap();
            for number in 0..40 {
                let bytes = if number == 20 { 3 << 20 } else { 200 << 10 };
                let put = Commit::new().put(&space.key([number]), vec![number; bytes]);
                store.commit(put).await.unwrap().applied().unwrap();
            }
            let (mut range, mut read, mut batches) = (space.all(), 0, 0);
            loop {
                let batch = store.backend().scan(batch_of(range.clone()), Generation(41)).await.unwrap();
                let Some((last, _)) = batch.last() else { break };
                range = range.after(last);
                let bytes: usize = batch[..batch.len() - 1].iter().map(|(_, version)| value_bytes(version)).sum();
                assert!(bytes < BATCH_BYTES, "{} records of {bytes} bytes before the last", batch.len());
                (read, batches) = (read + batch.len(), batches + 1);
            }
            assert_eq!(read, 40);
            assert!(batches < 10, "{batches}");
        }
    }

    fn value_bytes(version: &Version) -> usize {
        version.value.as_ref().map_or(0, |value| value.len())
    }
}
