//! The stored records of limits: gates, queues, buckets, and gathering executions; and their keys. Each key begins with
//! the shard of its partition, so that the owner of the shard can scan its queues.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::node::{read_text, shard_key, shard_of, write_text};
use crate::record::stored;
use crate::store::{Commit, Item, Key, Order, Outcome, Range, Space, Store};
use crate::workflow::stored::record::{Admission, StoredPosition};
use crate::workflow::{ExecutionId, Result};

/// The names of the spaces: the records that decisions depend on, and what is stored beside them.
pub(crate) const GATES: &str = "workflow.gates";
pub(crate) const ADMISSION: &str = "workflow.admission";

/// A space without keys. It is declared once all gates and buckets of earlier programs have markers.
pub(crate) const MARKED: &str = "workflow.marked";

/// How many gates and buckets of earlier programs one commit marks.
const MARKED_TOGETHER: usize = 256;

/// What a limit is for: a workflow, or a key of one.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Partition(Arc<[u8]>);

impl Partition {
    pub(crate) fn new(workflow: &str, key: Option<&str>) -> Partition {
        let mut bytes = Vec::with_capacity(workflow.len() + key.map_or(0, str::len) + 5);
        write_text(&mut bytes, workflow);
        bytes.push(key.is_some().into());
        key.iter().for_each(|key| write_text(&mut bytes, key));
        Partition(bytes.into())
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    pub(crate) fn workflow(&self) -> &str {
        read_text(&self.0).map_or("", |(workflow, _)| workflow)
    }

    /// The key; none for the limit of the whole workflow.
    pub(crate) fn key(&self) -> Option<&str> {
        let (_, rest) = read_text(&self.0)?;
        Some(read_text(rest.strip_prefix(&[1])?)?.0)
    }

    /// Reads the partition at the beginning of these bytes. Returns it and the rest.
    fn read(bytes: &[u8]) -> Option<(Partition, &[u8])> {
        let (_, rest) = read_text(bytes)?;
        let rest = match rest.split_first()? {
            (0, rest) => rest,
            (_, rest) => read_text(rest)?.1,
        };
        Some((Partition(bytes[..bytes.len() - rest.len()].into()), rest))
    }
}

/// The record of a limit. A permit that is returned becomes a note beside the gate, so that an end need not read the
/// gate. The next commit that writes the gate counts the notes and deletes them.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct Gate {
    /// The limit at the last admission.
    pub(crate) limit: u32,
    /// How many executions hold a permit, and how many wait in the queue. The notes must be subtracted.
    pub(crate) held: u64,
    pub(crate) waiting: u64,
    /// The last number of a permit or a position.
    pub(crate) numbers: u64,
    /// The highest rank that was taken from the queue, and the highest that was put into it.
    pub(crate) round: u64,
    pub(crate) highest: u64,
    /// No position in the queue is before this one. So a scan does not pass over positions that were served.
    pub(crate) head: StoredPosition,
}

/// The last rank in a queue of one of the keys that are served in turn.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct FairKey {
    pub(crate) last: u64,
}

/// A bucket of a rate limit: the time at which it is full again, in microseconds.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct Bucket {
    pub(crate) full_us: u64,
}

/// The execution that now gathers starts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Gathering {
    pub(crate) id: ExecutionId,
}

stored!(Gate => [b"\0\0"], FairKey, Bucket, Gathering);

/// The kinds of keys. The byte follows the shard.
const GATE: u8 = b'g';
const ENDED: u8 = b'e';
const LEFT: u8 = b'l';
const POSITION: u8 = b'q';
const FLOW: u8 = b'f';
const BUCKET: u8 = b'r';
const DEBOUNCE: u8 = b'p';
const BATCH: u8 = b'b';
const MARKER: u8 = b'm';

/// What a key belongs to.
#[cfg(feature = "testing")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KeyKind {
    Gate,
    Ended,
    Left,
    Position,
    Bucket,
    /// The marker of a gate, and of a bucket.
    GateMarker,
    BucketMarker,
    Other,
}

/// The keys of the records of limits.
#[derive(Clone)]
pub(crate) struct Gates {
    /// Records whose revs are checked. A record can be deleted and written again. Its revs are never used again, so a
    /// decision on the earlier record cannot pass its check.
    pub(crate) gates: Space,
    /// Notes, queues and markers. A deleted key leaves no tombstone here, so a scan does not pass over any.
    pub(crate) beside: Space,
}

impl Gates {
    fn bytes(kind: u8, partition: &Partition) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(partition.0.len() + 32);
        bytes.extend_from_slice(&shard_key(shard_of(&partition.0)));
        bytes.push(kind);
        bytes.extend_from_slice(&partition.0);
        bytes
    }

    pub(crate) fn gate(&self, partition: &Partition) -> Key {
        self.gates.key(Gates::bytes(GATE, partition))
    }

    fn note(&self, kind: u8, partition: &Partition, number: u64) -> Key {
        self.beside.key([&Gates::bytes(kind, partition)[..], &number.to_be_bytes()].concat())
    }

    /// The note that a permit was returned.
    pub(crate) fn ended(&self, partition: &Partition, permit: u64) -> Key {
        self.note(ENDED, partition, permit)
    }

    /// The note that a position in the queue was left.
    pub(crate) fn left(&self, partition: &Partition, position: StoredPosition) -> Key {
        self.note(LEFT, partition, position.number)
    }

    /// All notes of either kind.
    pub(crate) fn notes(&self, partition: &Partition) -> [Range; 2] {
        [ENDED, LEFT].map(|kind| self.beside.prefix(Gates::bytes(kind, partition)))
    }

    pub(crate) fn flow(&self, partition: &Partition, flow: &str) -> Key {
        let mut bytes = Gates::bytes(FLOW, partition);
        bytes.extend_from_slice(flow.as_bytes());
        self.beside.key(bytes)
    }

    /// All keys that are served in turn.
    pub(crate) fn flows(&self, partition: &Partition) -> Range {
        self.beside.prefix(Gates::bytes(FLOW, partition))
    }

    pub(crate) fn bucket(&self, partition: &Partition) -> Key {
        self.gates.key(Gates::bytes(BUCKET, partition))
    }

    /// The execution that gathers, for a batch or for a debounce. A workflow that had batches may have a debounce now.
    pub(crate) fn gathering(&self, partition: &Partition, is_batch: bool) -> Key {
        self.gates.key(Gates::bytes(if is_batch { BATCH } else { DEBOUNCE }, partition))
    }

    /// A position in a queue.
    pub(crate) fn position(&self, partition: &Partition, position: StoredPosition, id: &ExecutionId) -> Key {
        let mut bytes = Gates::bytes(POSITION, partition);
        bytes.extend_from_slice(&position.rank.to_be_bytes());
        bytes.extend_from_slice(&position.number.to_be_bytes());
        bytes.extend_from_slice(id.as_bytes());
        self.beside.key(bytes)
    }

    /// All positions in a queue, the next to be served first.
    pub(crate) fn queue(&self, partition: &Partition) -> Range {
        self.beside.prefix(Gates::bytes(POSITION, partition))
    }

    /// The positions in a queue from `head` on.
    pub(crate) fn queue_from(&self, partition: &Partition, head: StoredPosition) -> Range {
        self.queue(partition).from(&self.position(partition, head, &"".into()))
    }

    /// A key behind all positions in a queue: no id has such a byte.
    pub(crate) fn end_of_queue(&self, partition: &Partition) -> Key {
        self.beside.key([&Gates::bytes(POSITION, partition)[..], &[0xff; 17]].concat())
    }

    /// All queues of a shard.
    pub(crate) fn queues(&self, shard: u16) -> Range {
        self.beside.prefix([&shard_key(shard)[..], &[POSITION]].concat())
    }

    pub(crate) fn markers(&self, shard: u16) -> Range {
        self.beside.prefix([&shard_key(shard)[..], &[MARKER]].concat())
    }

    /// The marker of a gate or a bucket. It exists exactly as long as the gate or the bucket does.
    pub(crate) fn marker(&self, of: &Key) -> Key {
        let (shard, rest) = of.bytes().split_at(2);
        self.beside.key([shard, &[MARKER], rest].concat())
    }

    /// Reads the partition from the key of a gate, a bucket, a marker or a position.
    pub(crate) fn read_partition(key: &Key) -> Option<Partition> {
        let bytes = key.bytes().get(2..)?;
        let bytes = bytes.strip_prefix(&[MARKER]).unwrap_or(bytes);
        Partition::read(bytes.get(1..)?).map(|(partition, _)| partition)
    }

    /// Writes markers for gates and buckets that earlier programs have stored without one.
    pub(crate) async fn mark_all(&self, store: &Store) -> Result<()> {
        let mut rest = self.gates.all();
        loop {
            let found = store.view().await?.scan(&rest, Order::Ascending, MARKED_TOGETHER).await?;
            let Some((last, _)) = found.last() else { return Ok(()) };
            let last = last.clone();
            let found = found.into_iter().filter(|(key, _)| matches!(key.bytes().get(2), Some(&(GATE | BUCKET))));
            let mark = |commit: Commit, (key, item): (Key, Item)| {
                commit.at_rev(&key, item.rev).put(&self.marker(&key), Vec::new())
            };
            // Another process may have changed one of them meanwhile. Then they are read again.
            if let Outcome::Applied(_) = store.commit(found.fold(Commit::new(), mark)).await? {
                rest = rest.after(&last);
            }
        }
    }

    /// Reads what a key belongs to.
    #[cfg(feature = "testing")]
    pub(crate) fn read_kind(key: &Key) -> Option<(KeyKind, Partition)> {
        let kind = match *key.bytes().get(2)? {
            GATE => KeyKind::Gate,
            ENDED => KeyKind::Ended,
            LEFT => KeyKind::Left,
            POSITION => KeyKind::Position,
            BUCKET => KeyKind::Bucket,
            MARKER if key.bytes().get(3) == Some(&GATE) => KeyKind::GateMarker,
            MARKER => KeyKind::BucketMarker,
            _ => KeyKind::Other,
        };
        Some((kind, Gates::read_partition(key)?))
    }

    /// Reads the position and the execution from the key of a position.
    pub(crate) fn read_position(key: &Key) -> Option<(StoredPosition, ExecutionId)> {
        let (_, rest) = Partition::read(key.bytes().get(3..)?)?;
        let (rank, rest) = rest.split_first_chunk::<8>()?;
        let (number, id) = rest.split_first_chunk::<8>()?;
        let position = StoredPosition { rank: u64::from_be_bytes(*rank), number: u64::from_be_bytes(*number) };
        Some((position, std::str::from_utf8(id).ok()?.into()))
    }
}

impl Admission {
    /// The limits whose permits it holds, and the numbers of the permits.
    pub(crate) fn held<'a>(&'a self, workflow: &'a str) -> impl Iterator<Item = (Partition, u64)> + 'a {
        let passed = self.gates.iter().take(self.passed.into());
        passed.map(move |it| (Partition::new(workflow, it.key.as_deref()), it.permit))
    }

    /// The limit in whose queue it waits, and its position there.
    pub(crate) fn queued(&self, workflow: &str) -> Option<(Partition, StoredPosition)> {
        let (position, gate) = (self.position?, self.gates.get(usize::from(self.passed))?);
        Some((Partition::new(workflow, gate.key.as_deref()), position))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partitions_are_read_as_they_are_written_and_none_starts_another() {
        let all = [("a", None), ("a", Some("")), ("a", Some("b")), ("a", Some("bc")), ("ab", None), ("ab", Some("c"))];
        let all = all.map(|(workflow, key)| (workflow, key, Partition::new(workflow, key)));
        for (workflow, key, partition) in &all {
            assert_eq!((partition.workflow(), partition.key()), (*workflow, *key));
            let behind = [partition.as_bytes(), b"rest"].concat();
            assert_eq!(Partition::read(&behind), Some((partition.clone(), &b"rest"[..])));
            let others = all.iter().filter(|(.., other)| other != partition);
            assert!(others.clone().count() == 5 && others.into_iter().all(|it| !it.2.0.starts_with(&partition.0)));
        }
    }
}
