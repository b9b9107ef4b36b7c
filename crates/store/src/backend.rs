//! What stands behind a [`crate::Store`], for those who put something between the two or bring a backend of their own.
//! A backend checks, writes and remembers. It has no rules of its own: [`evaluate`] decides commits, [`generation_at`],
//! [`is_readable`] and [`Rules::forgets`] what is kept. Nothing here supposes that only one process uses the storage.

use std::future::Future;

use crate::{Commit, Committed, Generation, Key, Outcome, Range, Result, SpaceId, Timestamp, Uuid, Version};

pub use crate::commit::Head;
pub use crate::evaluate::{Decision, Present, evaluate};
pub use crate::facts::{Facts, Needs};
pub use crate::memory::MemoryBackend;
pub use crate::retention::{Before, Pin, Retention, generation_at, is_readable};
pub use crate::space::Rules;

/// The answer of a backend, when it comes.
pub type Answer<'a, T> = std::pin::Pin<Box<dyn Future<Output = Result<T>> + Send + 'a>>;

/// Storage for one store. Reads name the generation they are made at; the caller has it pinned.
pub trait Backend: Send + Sync + 'static {
    /// Checks and writes as [`evaluate`] decides. Resolves when the outcome, a refusal as well, rests on
    /// durable state only. A commit with an id may be sent again after any failure.
    fn commit(&self, commit: Commit) -> Answer<'_, Outcome>;

    /// The newest generation that readers may see.
    fn latest(&self) -> Answer<'_, Generation>;

    /// What a key held at a generation, the trace of a delete included.
    fn get<'a>(&'a self, key: &'a Key, at: Generation) -> Answer<'a, Option<Version>>;

    /// What the keys of a range held at a generation.
    fn scan(&self, scan: Scan, at: Generation) -> Answer<'_, Vec<(Key, Version)>>;

    /// The versions of a key up to a generation that are still kept, newest first.
    fn versions<'a>(&'a self, key: &'a Key, at: Generation, limit: usize) -> Answer<'a, Vec<Version>>;

    /// The commits after a generation that touched a range, each with the changes in that range, oldest first.
    /// Fails with [`crate::StoreError::HistoryDropped`] where it cannot know them all.
    fn changes(&self, range: Range, after: Generation, limit: usize) -> Answer<'_, Changes>;

    /// Resolves to the latest generation once it is larger than `than`.
    fn newer(&self, than: Generation) -> Answer<'_, Generation>;

    /// What is known of the commits up to `time`: the newest generation, or the newest that touched one of `spaces`
    /// above its floor. [`generation_at`] makes a generation of it.
    fn before(&self, time: Timestamp, spaces: Vec<(SpaceId, Generation)>) -> Answer<'_, Before>;

    /// Pins a generation, or the newest one, at which then every space can be read. What can be read at it stays so
    /// until the pin is dropped. The pin tells when a space was last declared: so rules in memory are known to be
    /// current.
    fn pin(&self, at: Option<Generation>) -> Answer<'_, Pin>;

    /// The oldest generation at which a space can be read, as far as it is known here. It only rises; reads and checks
    /// are held against the present one.
    fn floor(&self, space: SpaceId) -> Generation;

    /// Tells the rules of a space, and the generation of the declaration they are from. Older ones than those known do
    /// not count.
    fn declare(&self, space: SpaceId, rules: Rules, at: Generation);

    /// Raises the floors and drops a bounded slice of what lies below them. Tells whether more is left.
    fn maintain(&self) -> Answer<'_, bool>;

    /// Replaces everything by `contents` as one commit that starts history anew, and gives its generation.
    fn replace(&self, contents: Contents) -> Answer<'_, Generation>;

    /// Reads everything and tells what is damaged.
    fn verify(&self) -> Answer<'_, Vec<Damage>>;

    /// Figures about the store.
    fn stats(&self) -> Answer<'_, Stats>;

    /// The store's identity, given at its creation. A snapshot carries it.
    fn identity(&self) -> u128;

    /// Names this opening of a store that only one process can have open at a time: whatever another opening has begun
    /// is over. None of a store that processes share.
    fn opening(&self) -> Option<Uuid> {
        None
    }

    /// Returns when the store was closed or has stopped. A backend without openings need not tell.
    fn ended(&self) -> Answer<'_, ()> {
        Box::pin(std::future::pending())
    }

    /// Makes everything safe and lets go of the storage. Every later call fails with [`crate::StoreError::Closed`].
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

/// A scan as a backend gets it.
#[derive(Debug, Clone)]
pub struct Scan {
    /// The keys looked at.
    pub range: Range,
    /// From which end.
    pub order: Order,
    /// How many are wanted at the most.
    pub limit: usize,
    /// How many bytes are wanted: the record that brings the sum to this is the last.
    pub bytes: usize,
    /// Whether traces of deleted keys count.
    pub with_deleted: bool,
}

impl Scan {
    /// What the scan has room for.
    pub fn room(&self) -> Room {
        Room { records: self.limit, bytes: self.bytes }
    }
}

/// What is left of the limits of a batch of records. Records may be large, so they are not only counted.
#[derive(Debug, Clone, Copy)]
pub struct Room {
    records: usize,
    bytes: usize,
}

impl Room {
    /// What a record takes beside its key and value, about.
    const RECORD: usize = 64;

    /// Room for records of so many bytes together.
    pub(crate) fn of_bytes(bytes: usize) -> Room {
        Room { records: usize::MAX, bytes }
    }

    /// Whether another record is wanted.
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
    /// Nothing in the range was left out up to here.
    pub through: Generation,
}

/// The contents of a snapshot: every key, in order, with what it holds.
pub struct Contents {
    /// The generation the snapshot was taken at.
    pub generation: Generation,
    /// When the last of it was committed: no record is younger.
    pub time: Timestamp,
    /// The identity of the store it was taken from.
    pub identity: u128,
    /// The records.
    pub records: Box<dyn Iterator<Item = Result<(Key, Version)>> + Send>,
}

/// Something that [`Backend::verify`] found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Damage {
    /// File, table or key.
    pub place: String,
    /// What is wrong with it.
    pub detail: String,
}

/// Figures about a store. Counts of work are since it was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Stats {
    /// The newest generation.
    pub generation: Generation,
    /// Keys with a value or the trace of one, as far as the index has taken them.
    pub keys: u64,
    /// Overwritten and deleted versions that are still kept.
    pub past_versions: u64,
    /// Commits that were applied.
    pub applied: u64,
    /// Commits that were refused.
    pub refused: u64,
    /// Groups of commits that shared a sync.
    pub groups: u64,
    /// Bytes in memory that the index has not taken yet.
    pub overlay_bytes: u64,
    /// Bytes written to the log.
    pub log_bytes: u64,
    /// The size of the index file.
    pub index_bytes: u64,
    /// Open views.
    pub pins: u64,
}
