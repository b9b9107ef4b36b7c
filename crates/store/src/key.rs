//! Keys, ranges, and the counters [`Rev`], [`Generation`] and [`SpaceId`]. An encoded key starts with its space, so
//! that one ordered map holds every space.

use std::fmt;
use std::ops::Bound;

use bytes::{BufMut, Bytes, BytesMut};
use serde::{Deserialize, Serialize};

/// How often a key was written, deletes included. It starts at 1 and is never reused.
///
/// It compares with a plain number, and is one in JSON:
///
/// ```
/// use latchwork_store::Rev;
///
/// assert!(Rev(1) == 1 && Rev(2) > 1);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Rev(pub u64);

/// The number of a commit in the store's order. 0 is the empty store.
/// It compares with a plain number, and is one in JSON.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Generation(pub u64);

/// Lets a counter be made from a plain number and be compared with one, from both sides.
macro_rules! as_number {
    ($($counter:ty),*) => {$(
        impl From<u64> for $counter {
            fn from(number: u64) -> Self {
                Self(number)
            }
        }

        impl From<$counter> for u64 {
            fn from(counter: $counter) -> u64 {
                counter.0
            }
        }

        impl PartialEq<u64> for $counter {
            fn eq(&self, number: &u64) -> bool {
                self.0 == *number
            }
        }

        impl PartialEq<$counter> for u64 {
            fn eq(&self, counter: &$counter) -> bool {
                *self == counter.0
            }
        }

        impl PartialOrd<u64> for $counter {
            fn partial_cmp(&self, number: &u64) -> Option<std::cmp::Ordering> {
                self.0.partial_cmp(number)
            }
        }

        impl PartialOrd<$counter> for u64 {
            fn partial_cmp(&self, counter: &$counter) -> Option<std::cmp::Ordering> {
                self.partial_cmp(&counter.0)
            }
        }
    )*};
}

as_number!(Rev, Generation, crate::Timestamp);

/// The number of a space, which stands for its name in keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SpaceId(pub u32);

impl Generation {
    /// The generation after this one.
    ///
    /// ```
    /// # use latchwork_store::Generation;
    /// assert_eq!(Generation(6).next(), Generation(7));
    /// ```
    pub fn next(self) -> Generation {
        Generation(self.0 + 1)
    }
}

impl Rev {
    /// The rev after this one.
    ///
    /// ```
    /// # use latchwork_store::Rev;
    /// assert_eq!(Rev(1).next(), Rev(2));
    /// ```
    pub fn next(self) -> Rev {
        Rev(self.0 + 1)
    }
}

impl fmt::Display for Rev {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for Generation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Display for SpaceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.0)
    }
}

pub(crate) const SPACE_BYTES: usize = 4;

/// The name of one value: a space and a string of bytes. [`crate::Space::key`] creates it.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(Bytes);

impl Key {
    /// A key from its parts, as [`Key::space`] and [`Key::bytes`] have told them. [`Space::key`](crate::Space::key)
    /// is the usual way to one.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork_store::{History, SpaceSpec, Store};
    /// # let store = Store::memory().await?;
    /// # let accounts = store.space(SpaceSpec::new("accounts").history(History::Forever)).await?;
    /// # let alice = accounts.key("alice");
    /// assert_eq!(latchwork_store::Key::from_parts(alice.space(), alice.bytes()), alice);
    /// # Ok(()) }
    /// ```
    pub fn from_parts(space: SpaceId, bytes: impl AsRef<[u8]>) -> Key {
        Key::new(space, bytes.as_ref())
    }

    pub(crate) fn new(space: SpaceId, bytes: &[u8]) -> Key {
        let mut encoded = BytesMut::with_capacity(SPACE_BYTES + bytes.len());
        encoded.put_u32(space.0);
        encoded.put_slice(bytes);
        Key(encoded.freeze())
    }

    /// Decodes a key from its stored form; `None` if it is too short.
    pub(crate) fn from_encoded(encoded: Bytes) -> Option<Key> {
        (encoded.len() >= SPACE_BYTES).then_some(Key(encoded))
    }

    /// The stored form: four bytes of space, then the key's own bytes.
    pub(crate) fn encoded(&self) -> &[u8] {
        &self.0
    }

    /// The space the key lies in.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork_store::{History, SpaceSpec, Store};
    /// # let store = Store::memory().await?;
    /// # let accounts = store.space(SpaceSpec::new("accounts").history(History::Forever)).await?;
    /// # let alice = accounts.key("alice");
    /// assert_eq!(alice.space(), accounts.id());
    /// # Ok(()) }
    /// ```
    pub fn space(&self) -> SpaceId {
        SpaceId(u32::from_be_bytes([self.0[0], self.0[1], self.0[2], self.0[3]]))
    }

    /// The key's bytes within its space.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork_store::{History, SpaceSpec, Store};
    /// # let store = Store::memory().await?;
    /// # let accounts = store.space(SpaceSpec::new("accounts").history(History::Forever)).await?;
    /// # let alice = accounts.key("alice");
    /// assert_eq!(alice.bytes(), b"alice");
    /// # Ok(()) }
    /// ```
    pub fn bytes(&self) -> &[u8] {
        &self.0[SPACE_BYTES..]
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 80;
        let bytes = self.bytes();
        let tail = if bytes.len() > SHOWN { "…" } else { "" };
        write!(f, "{}/{}{tail}", self.space(), bytes[..bytes.len().min(SHOWN)].escape_ascii())
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl std::borrow::Borrow<[u8]> for Key {
    fn borrow(&self) -> &[u8] {
        &self.0
    }
}

/// The keys of one space from `start` (included) to `end` (excluded).
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Range {
    start: Bytes,
    end: Bytes,
}

impl Range {
    pub(crate) fn of_space(space: SpaceId) -> Range {
        Range::of_prefix(space, &[])
    }

    pub(crate) fn of_prefix(space: SpaceId, prefix: &[u8]) -> Range {
        let start = Key::new(space, prefix).0;
        let end = successor_of_prefix(&start);
        Range { start, end }
    }

    pub(crate) fn between(space: SpaceId, start: Bound<&[u8]>, end: Bound<&[u8]>) -> Range {
        let whole = Range::of_space(space);
        let start = match start {
            Bound::Unbounded => whole.start,
            Bound::Included(bytes) => Key::new(space, bytes).0,
            Bound::Excluded(bytes) => just_after(Key::new(space, bytes).encoded()),
        };
        let end = match end {
            Bound::Unbounded => whole.end,
            Bound::Excluded(bytes) => Key::new(space, bytes).0,
            Bound::Included(bytes) => just_after(Key::new(space, bytes).encoded()),
        };
        Range { start, end }
    }

    /// Every key of every space.
    pub(crate) fn everything() -> Range {
        Range { start: Bytes::from_static(&[0; SPACE_BYTES]), end: Bytes::from_static(&[0xff; SPACE_BYTES]) }
    }

    /// The space the range lies in.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork_store::{History, SpaceSpec, Store};
    /// # let store = Store::memory().await?;
    /// # let accounts = store.space(SpaceSpec::new("accounts").history(History::Forever)).await?;
    /// # let alice = accounts.key("alice");
    /// assert_eq!(accounts.all().space(), accounts.id());
    /// # Ok(()) }
    /// ```
    pub fn space(&self) -> SpaceId {
        SpaceId(u32::from_be_bytes([self.start[0], self.start[1], self.start[2], self.start[3]]))
    }

    /// The spaces whose keys may lie in the range: one space, unless the range covers everything.
    pub(crate) fn spaces(&self) -> std::ops::RangeInclusive<SpaceId> {
        let mut last = [0; SPACE_BYTES];
        let known = self.end.len().min(SPACE_BYTES);
        last[..known].copy_from_slice(&self.end[..known]);
        self.space()..=SpaceId(u32::from_be_bytes(last)).max(self.space())
    }

    /// The part of the range behind `key`. A forward scan continues with it.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork_store::{History, SpaceSpec, Store};
    /// # let store = Store::memory().await?;
    /// # let accounts = store.space(SpaceSpec::new("accounts").history(History::Forever)).await?;
    /// # let alice = accounts.key("alice");
    /// let rest = accounts.all().after(&alice);
    /// assert!(!rest.contains(&alice) && rest.contains(&accounts.key("bob")));
    /// # Ok(()) }
    /// ```
    pub fn after(&self, key: &Key) -> Range {
        Range { start: self.start.clone().max(just_after(key.encoded())), end: self.end.clone() }
    }

    /// The part of the range before `key`. A backward scan continues with it.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork_store::{History, SpaceSpec, Store};
    /// # let store = Store::memory().await?;
    /// # let accounts = store.space(SpaceSpec::new("accounts").history(History::Forever)).await?;
    /// # let alice = accounts.key("alice");
    /// let rest = accounts.all().before(&accounts.key("bob"));
    /// assert!(rest.contains(&alice) && !rest.contains(&accounts.key("bob")));
    /// # Ok(()) }
    /// ```
    pub fn before(&self, key: &Key) -> Range {
        Range { start: self.start.clone(), end: self.end.clone().min(key.0.clone()) }
    }

    /// The part of the range up to and including `key`: what a forward scan that ended at `key` has read.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork_store::{History, SpaceSpec, Store};
    /// # let store = Store::memory().await?;
    /// # let accounts = store.space(SpaceSpec::new("accounts").history(History::Forever)).await?;
    /// # let alice = accounts.key("alice");
    /// let read = accounts.all().through(&alice);
    /// assert!(read.contains(&alice) && !read.contains(&accounts.key("bob")));
    /// # Ok(()) }
    /// ```
    pub fn through(&self, key: &Key) -> Range {
        Range { start: self.start.clone(), end: self.end.clone().min(just_after(key.encoded())) }
    }

    /// The part of the range from `key` on, `key` included: what a backward scan that ended at `key` has read.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork_store::{History, SpaceSpec, Store};
    /// # let store = Store::memory().await?;
    /// # let accounts = store.space(SpaceSpec::new("accounts").history(History::Forever)).await?;
    /// # let alice = accounts.key("alice");
    /// let read = accounts.all().from(&accounts.key("bob"));
    /// assert!(!read.contains(&alice) && read.contains(&accounts.key("bob")));
    /// # Ok(()) }
    /// ```
    pub fn from(&self, key: &Key) -> Range {
        Range { start: self.start.clone().max(key.0.clone()), end: self.end.clone() }
    }

    /// True if `key` lies in the range.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork_store::{History, SpaceSpec, Store};
    /// # let store = Store::memory().await?;
    /// # let accounts = store.space(SpaceSpec::new("accounts").history(History::Forever)).await?;
    /// # let alice = accounts.key("alice");
    /// assert!(accounts.prefix("a").contains(&alice));
    /// # Ok(()) }
    /// ```
    pub fn contains(&self, key: &Key) -> bool {
        self.start <= key.0 && key.0 < self.end
    }

    /// True if no key can lie in the range.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork_store::{History, SpaceSpec, Store};
    /// # let store = Store::memory().await?;
    /// # let accounts = store.space(SpaceSpec::new("accounts").history(History::Forever)).await?;
    /// # let alice = accounts.key("alice");
    /// assert!(accounts.range("a".."a").is_empty());
    /// # Ok(()) }
    /// ```
    pub fn is_empty(&self) -> bool {
        self.start >= self.end
    }

    pub(crate) fn start(&self) -> &[u8] {
        &self.start
    }

    pub(crate) fn end(&self) -> &[u8] {
        &self.end
    }

    /// The length of the longer bound of the range, to compare with the limit of keys.
    pub(crate) fn bound_length(&self) -> usize {
        self.start.len().max(self.end.len()).saturating_sub(SPACE_BYTES)
    }
}

impl fmt::Display for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let own = |bytes: &Bytes| bytes[SPACE_BYTES.min(bytes.len())..].escape_ascii().to_string();
        write!(f, "{}/[{} .. {})", self.space(), own(&self.start), own(&self.end))
    }
}

impl fmt::Debug for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

fn just_after(encoded: &[u8]) -> Bytes {
    let mut next = BytesMut::with_capacity(encoded.len() + 1);
    next.put_slice(encoded);
    next.put_u8(0);
    next.freeze()
}

/// Returns the smallest string that is greater than every string with this prefix. A prefix of only 0xff cannot occur:
/// it starts with the number of a space, and no space has a number that large.
fn successor_of_prefix(prefix: &[u8]) -> Bytes {
    let kept = prefix.iter().rposition(|byte| *byte != 0xff).expect("a space's number is below u32::MAX");
    let mut end = BytesMut::from(&prefix[..=kept]);
    end[kept] += 1;
    end.freeze()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(bytes: &[u8]) -> Key {
        Key::new(SpaceId(7), bytes)
    }

    #[test]
    fn a_prefix_of_0xff_ends_with_its_space() {
        let range = Range::of_prefix(SpaceId(7), &[0xff, 0xff]);
        assert!(range.contains(&key(&[0xff, 0xff])));
        assert!(range.contains(&key(&[0xff, 0xff, 0xff, 0xff])));
        assert!(!range.contains(&key(&[0xff, 0xfe])));
        assert!(!range.contains(&Key::new(SpaceId(8), b"")));
    }

    #[test]
    fn the_rest_of_a_range_excludes_the_key_it_was_cut_at() {
        let range = Range::of_space(SpaceId(7));
        let cut = key(b"b");
        assert!(!range.after(&cut).contains(&cut) && range.after(&cut).contains(&key(b"b\0")));
        assert!(!range.before(&cut).contains(&cut) && range.before(&cut).contains(&key(b"a\xff")));
    }

    #[test]
    fn a_range_knows_the_spaces_it_may_touch() {
        assert!(Range::of_space(SpaceId(7)).spaces().contains(&SpaceId(7)));
        assert!(Range::of_prefix(SpaceId(0xffff), b"a").spaces().contains(&SpaceId(0xffff)));
        assert!(
            Range::everything().spaces().contains(&SpaceId(0)) && Range::everything().spaces().contains(&SpaceId(9))
        );
        assert!(!Range::of_prefix(SpaceId(7), b"a").spaces().contains(&SpaceId(6)));
    }

    #[test]
    fn bounds_of_a_range_may_be_open_closed_or_missing() {
        let range = Range::between(SpaceId(7), Bound::Excluded(b"a"), Bound::Included(b"c"));
        assert!(!range.contains(&key(b"a")) && range.contains(&key(b"c")) && !range.contains(&key(b"c\0")));
        assert!(Range::between(SpaceId(7), Bound::Included(b"d"), Bound::Excluded(b"d")).is_empty());
        assert_eq!(Range::between(SpaceId(7), Bound::Unbounded, Bound::Unbounded), Range::of_space(SpaceId(7)));
    }
}
