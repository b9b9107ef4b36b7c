//! Encodes and decodes the records of the index. Every record starts with a checksum over itself and its key, because
//! redb checks its pages only on request. docs/format.md lists the records.

use bytes::Bytes;

use super::super::frame::Position;
use super::Failure;
use crate::codec::{self, Reader, put_number, put_string};
use crate::commit::Head;
use crate::{Change, Committed, Generation, Key, Rev, SpaceId, Timestamp, Version};

/// How far the index has followed the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::file) struct Progress {
    /// Everything up to this generation is in the index.
    pub(in crate::file) applied: Generation,
    /// The time of the last folded commit.
    pub(in crate::file) time: Timestamp,
    /// Where the log continues.
    pub(in crate::file) log: Position,
    /// The number of pages of that segment; 0 if it is not known.
    pub(in crate::file) pages: u64,
}

/// What the index keeps of a commit in one space.
pub(super) struct Row {
    pub(super) time: Timestamp,
    pub(super) meta: Bytes,
    pub(super) touched: Vec<(Key, Rev, bool)>,
}

pub(super) fn decode_key(encoded: &[u8]) -> Result<Key, Failure> {
    let key = Key::from_encoded(Bytes::copy_from_slice(encoded));
    key.ok_or_else(|| Failure::Record("a key is too short".into()))
}

/// The checksum, then what it covers: whether there is a value, rev, generation, time, and the value.
pub(super) fn encode_version(
    key: &Key,
    rev: Rev,
    (generation, time): (Generation, Timestamp),
    value: Option<&Bytes>,
) -> Vec<u8> {
    let mut out = Vec::with_capacity(32 + value.map_or(0, |value| value.len()));
    out.extend_from_slice(&[0; 4]);
    out.push(u8::from(value.is_some()));
    put_number(&mut out, rev.0);
    put_number(&mut out, generation.0);
    put_number(&mut out, time.0);
    out.extend_from_slice(value.map_or(&[][..], |value| value));
    seal(&mut out, codec::checksum(0, key.encoded()));
    out
}

pub(super) fn decode_version(key: &[u8], record: &[u8]) -> Result<Version, Failure> {
    let (head, mut rest) = split_version(key, record)?;
    let time = codec::get_number(&mut rest).map(Timestamp).ok_or_else(|| unreadable(key))?;
    let value = head.live.then(|| Bytes::copy_from_slice(rest));
    Ok(Version { rev: head.rev, generation: head.generation, time, value })
}

/// Decodes only the head of a version.
pub(super) fn decode_head(key: &[u8], record: &[u8]) -> Result<Head, Failure> {
    split_version(key, record).map(|(head, _)| head)
}

/// Returns a version's head and the undecoded rest: time and value.
fn split_version<'a>(key: &[u8], record: &'a [u8]) -> Result<(Head, &'a [u8]), Failure> {
    let read = || {
        let mut body = opened(record, codec::checksum(0, key))?;
        let (live, rest) = body.split_first()?;
        body = rest;
        let rev = Rev(codec::get_number(&mut body)?);
        let generation = Generation(codec::get_number(&mut body)?);
        Some((Head { rev, generation, live: *live != 0 }, body))
    };
    read().ok_or_else(|| unreadable(key))
}

fn unreadable(key: &[u8]) -> Failure {
    Failure::Record(format!("the record of key {} is not what was written", key.escape_ascii()))
}

fn row_seed(space: u32, generation: u64) -> u64 {
    codec::checksum(u64::from(space), &generation.to_le_bytes())
}

pub(super) fn encode_row(space: SpaceId, commit: &Committed, changes: &[&Change]) -> Vec<u8> {
    let mut out = vec![0; 4];
    put_number(&mut out, commit.time.0);
    put_string(&mut out, &commit.meta);
    put_number(&mut out, changes.len() as u64);
    for change in changes {
        put_string(&mut out, change.key.bytes());
        put_number(&mut out, change.rev.0 << 1 | u64::from(change.value.is_some()));
    }
    seal(&mut out, row_seed(space.0, commit.generation.0));
    out
}

pub(super) fn decode_row(space: u32, generation: u64, record: &[u8]) -> Result<Row, Failure> {
    let wrong = || Failure::Record(format!("the row of generation {generation} in space #{space} cannot be read"));
    let body = opened(record, row_seed(space, generation)).ok_or_else(wrong)?;
    let read = || {
        let mut reader = Reader(Bytes::copy_from_slice(body));
        let (time, meta) = (Timestamp(reader.number()?), reader.string()?);
        let count = reader.number()?;
        let mut touched = Vec::with_capacity(count.min(1024) as usize);
        for _ in 0..count {
            let key = Key::new(SpaceId(space), &reader.string()?);
            let rev = reader.number()?;
            touched.push((key, Rev(rev >> 1), rev & 1 == 1));
        }
        reader.end()?;
        Some(Row { time, meta, touched })
    };
    read().ok_or_else(wrong)
}

pub(super) fn encode_floor(space: SpaceId, floor: Generation) -> Vec<u8> {
    let mut out = vec![0; 4];
    put_number(&mut out, floor.0);
    seal(&mut out, u64::from(space.0));
    out
}

pub(super) fn decode_floor(space: SpaceId, record: &[u8]) -> Result<Generation, Failure> {
    let wrong = || Failure::Record(format!("the floor of space {space} cannot be read"));
    let mut body = opened(record, u64::from(space.0)).ok_or_else(wrong)?;
    codec::get_number(&mut body).map(Generation).ok_or_else(wrong)
}

const PROGRESS_SEED: u64 = 0x4c57;
const SEGMENT_SEED: u64 = 0x4c53;

pub(super) fn encode_progress(progress: &Progress) -> Vec<u8> {
    let Progress { applied, time, log, .. } = progress;
    let mut out = vec![0; 4];
    for number in [applied.0, time.0, log.segment, log.page, log.chain] {
        put_number(&mut out, number);
    }
    seal(&mut out, PROGRESS_SEED);
    out
}

/// Encodes the number of pages of the segment in which the log continues.
pub(super) fn encode_segment(progress: &Progress) -> Vec<u8> {
    let mut out = vec![0; 4];
    put_number(&mut out, progress.log.segment);
    put_number(&mut out, progress.pages);
    seal(&mut out, SEGMENT_SEED);
    out
}

/// Adds the number of pages, if the record is about the same segment.
pub(super) fn with_segment(progress: Progress, record: &[u8]) -> Option<Progress> {
    let mut body = opened(record, SEGMENT_SEED)?;
    let (segment, pages) = (codec::get_number(&mut body)?, codec::get_number(&mut body)?);
    Some(if segment == progress.log.segment { Progress { pages, ..progress } } else { progress })
}

pub(super) fn decode_progress(record: Bytes) -> Option<Progress> {
    let mut reader = Reader(Bytes::copy_from_slice(opened(&record, PROGRESS_SEED)?));
    let (applied, time) = (Generation(reader.number()?), Timestamp(reader.number()?));
    let log = Position { segment: reader.number()?, page: reader.number()?, chain: reader.number()? };
    reader.end()?;
    Some(Progress { applied, time, log, pages: 0 })
}

/// Writes the checksum of the rest into the first four bytes.
fn seal(record: &mut [u8], seed: u64) {
    let checksum = codec::checksum(seed, &record[4..]) as u32;
    record[..4].copy_from_slice(&checksum.to_le_bytes());
}

/// Returns the bytes behind the checksum, if the checksum is correct.
fn opened(record: &[u8], seed: u64) -> Option<&[u8]> {
    let (checksum, body) = record.split_at_checked(4)?;
    (codec::checksum(seed, body) as u32 == u32::from_le_bytes(checksum.try_into().ok()?)).then_some(body)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn flipped(record: &[u8]) -> impl Iterator<Item = Vec<u8>> {
        (0..record.len() * 8).map(|bit| {
            let mut record = record.to_vec();
            record[bit / 8] ^= 1 << (bit % 8);
            record
        })
    }

    #[test]
    fn a_version_is_read_back_and_a_damaged_or_misplaced_one_is_not() {
        let key = Key::new(SpaceId(16), b"key");
        for value in [None, Some(Bytes::new()), Some(Bytes::from_static(b"value"))] {
            let (rev, generation, time) = (Rev(300), Generation(70_000), Timestamp(1_767_225_600_000_000));
            let record = encode_version(&key, rev, (generation, time), value.as_ref());
            let version = decode_version(key.encoded(), &record).ok().unwrap();
            assert_eq!(version, Version { rev, generation, time, value });
            assert_eq!(decode_head(key.encoded(), &record).ok().unwrap(), version.head());
            assert!(flipped(&record).all(|record| decode_version(key.encoded(), &record).is_err()));
            assert!(decode_version(Key::new(SpaceId(16), b"kez").encoded(), &record).is_err());
        }
    }

    #[test]
    fn a_row_is_read_back_and_a_damaged_or_misplaced_one_is_not() {
        let change =
            |key: &str, rev, value| Change { key: Key::new(SpaceId(16), key.as_bytes()), rev: Rev(rev), value };
        let changes = vec![change("a", 1, Some(Bytes::from_static(b"v"))), change("b", 9, None)];
        let (generation, time, meta) = (Generation(7), Timestamp(1_767_225_600_000_000), Bytes::from_static(b"why"));
        let commit = Committed { generation, time, meta: meta.clone(), changes };
        let record = encode_row(SpaceId(16), &commit, &commit.changes.iter().collect::<Vec<_>>());
        let row = decode_row(16, 7, &record).ok().unwrap();
        let touched = commit.changes.iter().map(|change| (change.key.clone(), change.rev, change.value.is_some()));
        assert_eq!((row.time, row.meta, row.touched), (time, meta, touched.collect()));
        assert!(flipped(&record).all(|record| decode_row(16, 7, &record).is_err()));
        assert!(decode_row(17, 7, &record).is_err() && decode_row(16, 8, &record).is_err());
    }

    #[test]
    fn progress_is_read_back_and_a_damaged_one_is_not() {
        let log = Position { segment: 3, page: 17, chain: u64::MAX };
        let progress = Progress { applied: Generation(9), time: Timestamp(5), log, pages: 4096 };
        let (record, segment) = (encode_progress(&progress), encode_segment(&progress));
        let bare = decode_progress(record.clone().into()).unwrap();
        assert_eq!((bare.pages, with_segment(bare, &segment)), (0, Some(progress)));
        assert!(flipped(&record).all(|record| decode_progress(record.into()).is_none()));
        assert!(flipped(&segment).all(|segment| with_segment(bare, &segment).is_none()));
        let elsewhere = Progress { log: Position { segment: 4, ..log }, ..bare };
        assert_eq!(with_segment(elsewhere, &segment), Some(elsewhere), "the record is about another segment");
    }
}
