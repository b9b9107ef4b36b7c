//! What is stored of limits: gates, lines, buckets, and starts that are gathered; and their keys. All keys start with
//! the shard of their partition: its owner goes through the lines.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use crate::node::{read_text, shard_key, shard_of, write_text};
use crate::record::stored;
use crate::store::{Commit, Item, Key, Order, Outcome, Range, Space, Store};
use crate::workflow::stored::record::{Admission, Ticket};
use crate::workflow::{ExecutionId, Result};

/// The names of the spaces: of what decisions go by, and of what stands beside it.
pub(crate) const GATES: &str = "workflow.gates";
pub(crate) const ADMISSION: &str = "workflow.admission";

/// A space without keys. It is declared when all gates and buckets that earlier programs have stored have markers.
pub(crate) const MARKED: &str = "workflow.marked";

/// How many gates and buckets of earlier programs are marked by one commit.
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

    /// The key; none for the limit of the workflow as a whole.
    pub(crate) fn key(&self) -> Option<&str> {
        let (_, rest) = read_text(&self.0)?;
        Some(read_text(rest.strip_prefix(&[1])?)?.0)
    }

    /// What stands in front of other bytes.
    fn read(bytes: &[u8]) -> Option<(Partition, &[u8])> {
        let (_, rest) = read_text(bytes)?;
        let rest = match rest.split_first()? {
            (0, rest) => rest,
            (_, rest) => read_text(rest)?.1,
        };
        Some((Partition(bytes[..bytes.len() - rest.len()].into()), rest))
    }
}

/// The record of a limit. What was given back since it was written is told by notes beside it: so an end needs no look
/// at the gate. The next commit that writes the gate takes them into account, and away.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct Gate {
    /// How many it let through at once when it did last.
    pub(crate) limit: u32,
    /// How many hold a permit, and how many wait in the line, less the notes.
    pub(crate) held: u64,
    pub(crate) waiting: u64,
    /// The last number that was given to a permit or a place.
    pub(crate) numbers: u64,
    /// The highest rank that was taken from the line, and the highest that was given.
    pub(crate) round: u64,
    pub(crate) highest: u64,
    /// No place in the line is before this one. Those that were served are not walked over again.
    pub(crate) head: Ticket,
}

/// The last rank that was given in a line to one of the keys that are served in turn.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Flow {
    pub(crate) last: u64,
}

/// A bucket of a rate limit, by the time at which it is full again; microseconds.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(crate) struct Bucket {
    pub(crate) full_us: u64,
}

/// The execution that gathers starts at present.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Gathering {
    pub(crate) id: ExecutionId,
}

stored!(Gate => [b"\0\0"], Flow, Bucket, Gathering);

/// The kinds of keys, behind the shard.
const GATE: u8 = b'g';
const ENDED: u8 = b'e';
const LEFT: u8 = b'l';
const LINE: u8 = b'q';
const FLOW: u8 = b'f';
const BUCKET: u8 = b'r';
const DEBOUNCE: u8 = b'p';
const BATCH: u8 = b'b';
const MARKER: u8 = b'm';

/// What a key is of.
#[cfg(feature = "testing")]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Gate,
    Ended,
    Left,
    Line,
    Bucket,
    /// Of a gate, and of a bucket.
    GateMarker,
    BucketMarker,
    Other,
}

/// The keys of what is stored of limits.
#[derive(Clone)]
pub(crate) struct Gates {
    /// Records whose revs are checked. They are deleted and made again, and a decision that rests on one from before
    /// must not pass: so their revs are never used again.
    pub(crate) gates: Space,
    /// Notes, lines and markers. Nothing is left of the keys that are deleted here, so a scan walks over none of them.
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

    /// A note that a permit was given back.
    pub(crate) fn ended(&self, partition: &Partition, permit: u64) -> Key {
        self.note(ENDED, partition, permit)
    }

    /// A note that a place in the line was left.
    pub(crate) fn left(&self, partition: &Partition, ticket: Ticket) -> Key {
        self.note(LEFT, partition, ticket.number)
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

    /// Which execution gathers, as a batch or for a debounce. A workflow that had batches may have a debounce by now.
    pub(crate) fn gathering(&self, partition: &Partition, is_batch: bool) -> Key {
        self.gates.key(Gates::bytes(if is_batch { BATCH } else { DEBOUNCE }, partition))
    }

    /// A place in a line.
    pub(crate) fn place(&self, partition: &Partition, ticket: Ticket, id: &ExecutionId) -> Key {
        let mut bytes = Gates::bytes(LINE, partition);
        bytes.extend_from_slice(&ticket.rank.to_be_bytes());
        bytes.extend_from_slice(&ticket.number.to_be_bytes());
        bytes.extend_from_slice(id.as_bytes());
        self.beside.key(bytes)
    }

    /// All places in a line, the first to be served first.
    pub(crate) fn line(&self, partition: &Partition) -> Range {
        self.beside.prefix(Gates::bytes(LINE, partition))
    }

    /// The places in a line from one on.
    pub(crate) fn line_from(&self, partition: &Partition, head: Ticket) -> Range {
        self.line(partition).from(&self.place(partition, head, &"".into()))
    }

    /// Behind all places in a line: no id has such a byte.
    pub(crate) fn end_of_line(&self, partition: &Partition) -> Key {
        self.beside.key([&Gates::bytes(LINE, partition)[..], &[0xff; 17]].concat())
    }

    /// All lines of a shard, and all its markers.
    pub(crate) fn lines(&self, shard: u16) -> Range {
        self.beside.prefix([&shard_key(shard)[..], &[LINE]].concat())
    }

    pub(crate) fn markers(&self, shard: u16) -> Range {
        self.beside.prefix([&shard_key(shard)[..], &[MARKER]].concat())
    }

    /// The marker of a gate or a bucket: it is there exactly as long as that is.
    pub(crate) fn marker(&self, of: &Key) -> Key {
        let (shard, rest) = of.bytes().split_at(2);
        self.beside.key([shard, &[MARKER], rest].concat())
    }

    /// The partition that the key of a gate, of a bucket, of a marker or of a place in a line is of.
    pub(crate) fn read_partition(key: &Key) -> Option<Partition> {
        let bytes = key.bytes().get(2..)?;
        let bytes = bytes.strip_prefix(&[MARKER]).unwrap_or(bytes);
        Partition::read(bytes.get(1..)?).map(|(partition, _)| partition)
    }

    /// Gives markers to gates and buckets that have none: earlier programs have stored them without.
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
            // One of them may have been changed meanwhile, by another process: then they are read again.
            if let Outcome::Applied(_) = store.commit(found.fold(Commit::new(), mark)).await? {
                rest = rest.after(&last);
            }
        }
    }

    /// What a key is of.
    #[cfg(feature = "testing")]
    pub(crate) fn read_kind(key: &Key) -> Option<(Kind, Partition)> {
        let kind = match *key.bytes().get(2)? {
            GATE => Kind::Gate,
            ENDED => Kind::Ended,
            LEFT => Kind::Left,
            LINE => Kind::Line,
            BUCKET => Kind::Bucket,
            MARKER if key.bytes().get(3) == Some(&GATE) => Kind::GateMarker,
            MARKER => Kind::BucketMarker,
            _ => Kind::Other,
        };
        Some((kind, Gates::read_partition(key)?))
    }

    /// Who stands at a place in a line.
    pub(crate) fn read_place(key: &Key) -> Option<(Ticket, ExecutionId)> {
        let (_, rest) = Partition::read(key.bytes().get(3..)?)?;
        let (rank, rest) = rest.split_first_chunk::<8>()?;
        let (number, id) = rest.split_first_chunk::<8>()?;
        let ticket = Ticket { rank: u64::from_be_bytes(*rank), number: u64::from_be_bytes(*number) };
        Some((ticket, std::str::from_utf8(id).ok()?.into()))
    }
}

impl Admission {
    /// The limits that it holds a permit of, and the numbers of the permits.
    pub(crate) fn held<'a>(&'a self, workflow: &'a str) -> impl Iterator<Item = (Partition, u64)> + 'a {
        let passed = self.gates.iter().take(self.passed.into());
        passed.map(move |it| (Partition::new(workflow, it.key.as_deref()), it.permit))
    }

    /// The limit in whose line it stands, and its place there.
    pub(crate) fn queued(&self, workflow: &str) -> Option<(Partition, Ticket)> {
        let (ticket, gate) = (self.ticket?, self.gates.get(usize::from(self.passed))?);
        Some((Partition::new(workflow, gate.key.as_deref()), ticket))
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
