//! The bytes of the commit log. A frame holds the commits of one group; one write and one sync make it durable.
//! docs/format.md describes it.
//!
//! A frame starts on a page and is padded to whole pages, so that no write ever touches a page that was synced
//! before. It contains its own position and the checksum of the frame before it, so that stale bytes are never read as
//! a valid frame.

use std::sync::Arc;

use bytes::Bytes;

use crate::codec::{self, Reader, put_number, put_optional, put_string};
use crate::{Change, Committed, Generation, Key, Rev, Timestamp};

pub(super) const PAGE: usize = 4096;
pub(super) const HEADER: usize = 64;
const MAGIC: u32 = u32::from_le_bytes(*b"LWF1");
const TRAILER_MAGIC: u32 = u32::from_le_bytes(*b"LWT1");
/// How many bytes of its page a trailer uses.
const TRAILER: usize = 40;

/// The position of a frame and the checksum that it must be chained to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Position {
    pub(super) segment: u64,
    pub(super) page: u64,
    /// The checksum of the frame before.
    pub(super) chain: u64,
}

/// The fixed part of a frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Header {
    checksum: u64,
    pub(super) at: Position,
    pub(super) length: u32,
    pub(super) count: u32,
    pub(super) first: Generation,
    /// The newest generation that was durable when this frame was written.
    pub(super) durable: Generation,
}

impl Header {
    pub(super) fn decode(page: &[u8]) -> Option<Header> {
        let word = |at: usize| Some(u64::from_le_bytes(page.get(at..at + 8)?.try_into().ok()?));
        let half = |at: usize| Some(u32::from_le_bytes(page.get(at..at + 4)?.try_into().ok()?));
        if half(0)? != MAGIC {
            return None;
        }
        Some(Header {
            length: half(4)?,
            checksum: word(8)?,
            at: Position { chain: word(16)?, segment: word(24)?, page: word(32)? },
            first: Generation(word(40)?),
            durable: Generation(word(48)?),
            count: half(56)?,
        })
    }

    /// The number of pages of the frame.
    pub(super) fn pages(&self) -> u64 {
        (HEADER + self.length as usize).div_ceil(PAGE) as u64
    }

    /// True if the checksum of `frame`, header included, is correct for this store.
    pub(super) fn fits(&self, frame: &[u8], identity: u128) -> bool {
        frame.get(..HEADER + self.length as usize).is_some_and(|frame| frame_checksum(frame, identity) == self.checksum)
    }

    /// The position of the frame after this one in the same segment.
    pub(super) fn after(&self) -> Position {
        Position { page: self.at.page + self.pages(), chain: self.checksum, ..self.at }
    }
}

/// The last page of a segment. It says that the log continues in the next segment and how long that is. A frame is
/// valid only together with the frame before it, but it stays valid if the trailer between them is damaged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Trailer {
    /// Its position, with the checksum of the last frame.
    pub(super) at: Position,
    /// The number of pages of the next segment.
    pub(super) next_pages: u32,
}

impl Trailer {
    pub(super) fn encode(&self, identity: u128) -> Vec<u8> {
        let mut page = vec![0; PAGE];
        page[0..4].copy_from_slice(&TRAILER_MAGIC.to_le_bytes());
        page[4..8].copy_from_slice(&self.next_pages.to_le_bytes());
        page[16..24].copy_from_slice(&self.at.chain.to_le_bytes());
        page[24..32].copy_from_slice(&self.at.segment.to_le_bytes());
        page[32..40].copy_from_slice(&self.at.page.to_le_bytes());
        let checksum = frame_checksum(&page[..TRAILER], identity);
        page[8..16].copy_from_slice(&checksum.to_le_bytes());
        page
    }

    pub(super) fn decode(page: &[u8], identity: u128) -> Option<Trailer> {
        let word = |at: usize| Some(u64::from_le_bytes(page.get(at..at + 8)?.try_into().ok()?));
        let half = |at: usize| Some(u32::from_le_bytes(page.get(at..at + 4)?.try_into().ok()?));
        let at = Position { chain: word(16)?, segment: word(24)?, page: word(32)? };
        let right = half(0)? == TRAILER_MAGIC && word(8)? == frame_checksum(&page[..TRAILER], identity);
        right.then_some(Trailer { at, next_pages: half(4)? })
    }
}

fn frame_checksum(frame: &[u8], identity: u128) -> u64 {
    // Covers everything behind the checksum. The length is part of the seed, and without the magic no frame is found.
    let seed = identity as u64 ^ u64::from(u32::from_le_bytes([frame[4], frame[5], frame[6], frame[7]]));
    codec::checksum(seed, &frame[16..])
}

/// Collects the commits of one group.
#[derive(Debug)]
pub(super) struct Frame {
    bytes: Vec<u8>,
    first: Generation,
    count: u32,
}

impl Frame {
    pub(super) fn new() -> Frame {
        Frame { bytes: vec![0; HEADER], first: Generation(0), count: 0 }
    }

    pub(super) fn push(&mut self, commit: &Committed) {
        if self.count == 0 {
            self.first = commit.generation;
        }
        self.count += 1;
        encode_commit(&mut self.bytes, commit);
    }

    pub(super) fn count(&self) -> u32 {
        self.count
    }

    pub(super) fn length(&self) -> usize {
        self.bytes.len()
    }

    /// The generation of its last commit. The generations in a frame have no gaps.
    pub(super) fn last(&self) -> Generation {
        Generation(self.first.0 + u64::from(self.count) - 1)
    }

    /// Returns the finished bytes, in whole pages, and the position of the next frame.
    pub(super) fn seal(&mut self, at: Position, durable: Generation, identity: u128) -> (&[u8], Position) {
        let length = (self.bytes.len() - HEADER) as u32;
        let header = &mut self.bytes[..HEADER];
        header[0..4].copy_from_slice(&MAGIC.to_le_bytes());
        header[4..8].copy_from_slice(&length.to_le_bytes());
        header[16..24].copy_from_slice(&at.chain.to_le_bytes());
        header[24..32].copy_from_slice(&at.segment.to_le_bytes());
        header[32..40].copy_from_slice(&at.page.to_le_bytes());
        header[40..48].copy_from_slice(&self.first.0.to_le_bytes());
        header[48..56].copy_from_slice(&durable.0.to_le_bytes());
        header[56..60].copy_from_slice(&self.count.to_le_bytes());
        let checksum = frame_checksum(&self.bytes, identity);
        self.bytes[8..16].copy_from_slice(&checksum.to_le_bytes());
        let pages = self.bytes.len().div_ceil(PAGE);
        self.bytes.resize(pages * PAGE, 0);
        (&self.bytes, Position { segment: at.segment, page: at.page + pages as u64, chain: checksum })
    }

    /// Empties the frame. Its memory is reused unless it is unusually large.
    pub(super) fn clear(&mut self) {
        const KEPT: usize = 1 << 20;
        self.bytes.clear();
        self.bytes.shrink_to(KEPT);
        self.bytes.resize(HEADER, 0);
        self.count = 0;
    }
}

fn encode_commit(out: &mut Vec<u8>, commit: &Committed) {
    put_number(out, commit.time.0);
    put_string(out, &commit.meta);
    put_number(out, commit.changes.len() as u64);
    for change in &commit.changes {
        put_string(out, change.key.encoded());
        put_number(out, change.rev.0);
        put_optional(out, change.value.as_ref());
    }
}

/// Returns the commits of a frame whose checksum is correct; `None` if they cannot be decoded all the same.
pub(super) fn decode_commits(header: &Header, payload: Bytes) -> Option<Vec<Arc<Committed>>> {
    let mut reader = Reader(payload);
    let mut commits = Vec::with_capacity(header.count as usize);
    for index in 0..u64::from(header.count) {
        let time = Timestamp(reader.number()?);
        let meta = reader.string()?;
        let count = reader.number()?;
        let mut changes = Vec::with_capacity(count.min(1024) as usize);
        for _ in 0..count {
            let key = Key::from_encoded(reader.string()?)?;
            let rev = Rev(reader.number()?);
            changes.push(Change { key, rev, value: reader.optional()? });
        }
        commits.push(Arc::new(Committed { generation: Generation(header.first.0 + index), time, meta, changes }));
    }
    reader.end()?;
    Some(commits)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::SpaceId;

    const AT: Position = Position { segment: 3, page: 17, chain: 99 };

    fn commit(generation: u64) -> Committed {
        let key = |bytes: &[u8]| Key::new(SpaceId(16), bytes);
        let changes = vec![
            Change { key: key(b"a"), rev: Rev(generation), value: Some(Bytes::from(vec![7; 5000])) },
            Change { key: key(b"b"), rev: Rev(1), value: None },
        ];
        Committed { generation: Generation(generation), time: Timestamp(5), meta: Bytes::from_static(b"why"), changes }
    }

    #[test]
    fn a_frame_is_read_back_as_it_was_sealed() {
        let mut frame = Frame::new();
        frame.push(&commit(8));
        frame.push(&commit(9));
        let last = frame.last();
        let (bytes, next) = frame.seal(AT, Generation(7), 42);
        assert_eq!((bytes.len() % PAGE, last), (0, Generation(9)));
        let header = Header::decode(bytes).unwrap();
        assert!(header.fits(bytes, 42) && !header.fits(bytes, 43));
        assert_eq!((header.at, header.first, header.durable, header.after()), (AT, Generation(8), Generation(7), next));
        let payload = Bytes::copy_from_slice(&bytes[HEADER..HEADER + header.length as usize]);
        let commits = decode_commits(&header, payload).unwrap();
        assert_eq!(commits.iter().map(|c| (**c).clone()).collect::<Vec<_>>(), [commit(8), commit(9)]);
    }

    #[test]
    fn a_trailer_is_read_back_and_a_damaged_one_is_not() {
        let trailer = Trailer { at: AT, next_pages: 4096 };
        let page = trailer.encode(42);
        assert_eq!((Trailer::decode(&page, 42), Trailer::decode(&page, 43)), (Some(trailer), None));
        for bit in 0..TRAILER * 8 {
            let mut flipped = page.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Trailer::decode(&flipped, 42), None, "bit {bit}");
        }
    }

    #[test]
    fn a_frame_with_any_bit_flipped_is_not_a_frame() {
        let mut frame = Frame::new();
        frame.push(&Committed { changes: vec![], ..commit(8) });
        let length = frame.length();
        let (bytes, _) = frame.seal(AT, Generation(7), 42);
        for bit in 0..length * 8 {
            let mut flipped = bytes.to_vec();
            flipped[bit / 8] ^= 1 << (bit % 8);
            let valid = Header::decode(&flipped).is_some_and(|header| header.fits(&flipped, 42));
            assert!(!valid, "bit {bit}");
        }
    }
}
