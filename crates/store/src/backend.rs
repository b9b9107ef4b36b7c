//! The interface between a [`crate::Store`] and its storage, for code that wraps a backend or implements a new one.
//! A backend checks, writes and remembers. It has no rules of its own: [`evaluate`] decides commits; [`generation_at`],
//! [`is_readable`] and [`Rules::forgets`] decide what is kept. Nothing here assumes that only one process uses the
//! storage.

use std::future::Future;

use crate::{Commit, Committed, Generation, Key, Outcome, Range, Result, SpaceId, Timestamp, Uuid, Version};

pub use crate::commit::Head;
pub use crate::evaluate::{Decision, Present, evaluate};
pub use crate::facts::{Facts, Needs};
pub use crate::memory::MemoryBackend;
pub use crate::retention::{Before, Pin, Retention, generation_at, is_readable};
pub use crate::space::Rules;

/// The future of a backend's answer.
pub type Answer<'a, T> = std::pin::Pin<Box<dyn Future<Output = Result<T>> + Send + 'a>>;

/// Storage for one store. Every read names the generation that it reads at. The caller has pinned that generation.
pub trait Backend: Send + Sync + 'static {
    /// Checks and writes as [`evaluate`] decides. Resolves once the state that the outcome is based on is durable; this
    /// also holds for a refusal. A commit with an id may be sent again after any failure.
    fn commit(&self, commit: Commit) -> Answer<'_, Outcome>;

    /// The newest generation that readers may see.
    fn latest(&self) -> Answer<'_, Generation>;

    /// Returns the version of a key at a generation. A tombstone is returned, too.
    fn get<'a>(&'a self, key: &'a Key, at: Generation) -> Answer<'a, Option<Version>>;

    /// Returns the newest version of a key. A tombstone is returned, too. A backend whose state is elsewhere needs one
    /// round trip for it, where a pin and a read take two.
    fn newest<'a>(&'a self, key: &'a Key) -> Answer<'a, Option<Version>> {
        Box::pin(async move {
            let pin = self.pin(None).await?;
            self.get(key, pin.generation()).await
        })
    }

    /// Returns the versions of the keys of a range at a generation.
    fn scan(&self, scan: Scan, at: Generation) -> Answer<'_, Vec<(Key, Version)>>;

    /// Returns the versions of a key that are not newer than a generation and are still kept, newest first.
    fn versions<'a>(&'a self, key: &'a Key, at: Generation, limit: usize) -> Answer<'a, Vec<Version>>;

    /// Returns the commits after a generation that touched a range, each with the changes in that range, oldest first.
    /// Fails with [`crate::StoreError::HistoryDropped`] if some of them are no longer kept.
    fn changes(&self, range: Range, after: Generation, limit: usize) -> Answer<'_, Changes>;

    /// Resolves to the latest generation once it is larger than `than`. The caller waits for changes of `space`: a
    /// backend may be late with generations that do not touch it.
    fn newer(&self, than: Generation, space: SpaceId) -> Answer<'_, Generation>;

    /// Finds the newest commit that is not later than `time`: the newest generation of the store, or the newest one
    /// that touched one of `spaces` above its floor. [`generation_at`] turns the answer into a generation.
    fn before(&self, time: Timestamp, spaces: Vec<(SpaceId, Generation)>) -> Answer<'_, Before>;

    /// Pins a generation, or the newest one, at which every space can be read. What is readable at the generation stays
    /// readable until the pin is dropped. The pin carries the generation at which a space was last declared, so that
    /// the caller knows whether the rules it has in memory are current.
    fn pin(&self, at: Option<Generation>) -> Answer<'_, Pin>;

    /// The oldest generation at which a space can be read, as far as this process knows. It only rises. Reads and
    /// checks are compared with its current value.
    fn floor(&self, space: SpaceId) -> Generation;

    /// Tells the backend the rules of a space and the generation of the declaration that they come from. Rules of an
    /// older declaration than the known one are ignored.
    fn declare(&self, space: SpaceId, rules: Rules, at: Generation);

    /// Raises the floors and drops a bounded slice of what lies below them. Returns whether more is left.
    fn maintain(&self) -> Answer<'_, bool>;

    /// Replaces everything with `contents`, as one commit with which history starts again. Returns its generation.
    fn replace(&self, contents: Contents) -> Answer<'_, Generation>;

    /// Reads everything and returns what is damaged.
    fn verify(&self) -> Answer<'_, Vec<Damage>>;

    /// Figures about the store.
    fn stats(&self) -> Answer<'_, Stats>;

    /// The store's identity, chosen at its creation. Its snapshots carry the same identity.
    fn identity(&self) -> u128;

    /// The id of this opening, if only one process can have the store open at a time. Work that an earlier opening
    /// started is over. `None` for a store that processes share.
    fn opening(&self) -> Option<Uuid> {
        None
    }

    /// True if several processes can have the storage open at once.
    fn is_shared(&self) -> bool {
        false
    }

    /// What this backend offers beside this trait, for code that knows its type.
    fn extension(&self) -> Option<&dyn std::any::Any> {
        None
    }

    /// Resolves when the store was closed or has stopped. A backend without openings may never resolve.
    fn ended(&self) -> Answer<'_, ()> {
        Box::pin(std::future::pending())
    }

    /// Makes everything durable and releases the storage. Every later call fails with [`crate::StoreError::Closed`].
    fn close(&self) -> Answer<'_, ()>;
}

/// The direction of a scan.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// From the smallest key on.
    Ascending,
    /// From the largest key on.
    Descending,
}

/// The arguments of a backend's scan.
#[derive(Debug, Clone)]
pub struct Scan {
    /// The keys to read.
    pub range: Range,
    /// The direction.
    pub order: Order,
    /// The largest number of records to return.
    pub limit: usize,
    /// The scan ends with the record that brings the sum of bytes to this number.
    pub bytes: usize,
    /// Whether tombstones are returned and counted.
    pub with_deleted: bool,
}

impl Scan {
    /// The limits of the scan, before any record is counted.
    pub fn room(&self) -> Room {
        Room { records: self.limit, bytes: self.bytes }
    }
}

/// What is left of the limits of a batch of records: a number of records and, because records may be large, of bytes.
#[derive(Debug, Clone, Copy)]
pub struct Room {
    records: usize,
    bytes: usize,
}

impl Room {
    /// The approximate size of a record without its key and value.
    const RECORD: usize = 64;

    /// Room for any number of records of `bytes` bytes in total.
    pub(crate) fn of_bytes(bytes: usize) -> Room {
        Room { records: usize::MAX, bytes }
    }

    /// True if there is room for another record.
    pub fn is_left(&self) -> bool {
        self.records > 0 && self.bytes > 0
    }

    /// Counts a record.
    pub fn take(&mut self, key: &Key, version: &Version) {
        let bytes = Self::RECORD + key.encoded().len() + version.value.as_ref().map_or(0, |value| value.len());
        (self.records, self.bytes) = (self.records.saturating_sub(1), self.bytes.saturating_sub(bytes));
    }
}

/// A part of the stream of commits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Changes {
    /// The commits found.
    pub commits: Vec<Committed>,
    /// `commits` is complete up to this generation.
    pub through: Generation,
}

/// The contents of a snapshot: every key with its version, in key order.
pub struct Contents {
    /// The generation the snapshot was taken at.
    pub generation: Generation,
    /// The time of the last commit in it: no record is younger.
    pub time: Timestamp,
    /// The identity of the store it was taken from.
    pub identity: u128,
    /// The records.
    pub records: Box<dyn Iterator<Item = Result<(Key, Version)>> + Send>,
}

/// One damage that [`Backend::verify`] found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    /// File, table or key.
    pub place: String,
    /// What is wrong with it.
    pub detail: String,
}

/// Figures about a store. The counts of commits, groups and log bytes start at zero when the store is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Stats {
    /// The newest generation.
    pub generation: Generation,
    /// Keys with a value or a tombstone in the index. Commits that are not folded into the index yet are not counted.
    pub keys: u64,
    /// Overwritten and deleted versions that are still kept.
    pub past_versions: u64,
    /// Commits that were applied.
    pub applied: u64,
    /// Commits that were refused.
    pub refused: u64,
    /// Groups of commits that shared a sync.
    pub groups: u64,
    /// Bytes in memory that are not folded into the index yet.
    pub overlay_bytes: u64,
    /// Bytes written to the log.
    pub log_bytes: u64,
    /// The size of the index file.
    pub index_bytes: u64,
    /// Open views.
    pub pins: u64,
}
