//! The conditional commit: what a caller sends, what it gets back, and what the store remembers of it.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use bytes::Bytes;

use crate::{Generation, Key, Range, Rev, Timestamp};

/// Names a commit, so that sending it again applies it once.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CommitId(pub [u8; 16]);

impl fmt::Display for CommitId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        uuid::Uuid::from_bytes(self.0).fmt(f)
    }
}

impl fmt::Debug for CommitId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Checks and writes that land together or not at all.
///
/// ```
/// # use latchwork_store::{Commit, Rev, Space};
/// # fn example(accounts: &Space) {
/// let transfer = Commit::new()
///     .at_rev(&accounts.key("alice"), Rev(3))
///     .absent(&accounts.key("bob"))
///     .put(&accounts.key("alice"), "70")
///     .put(&accounts.key("bob"), "30");
/// # }
/// ```
#[derive(Debug, Clone, Default)]
#[must_use = "a commit does nothing until it is given to Store::commit"]
pub struct Commit {
    pub(crate) id: Option<CommitId>,
    pub(crate) meta: Bytes,
    pub(crate) checks: Vec<Check>,
    pub(crate) writes: Vec<Write>,
    /// Of checks that stand for a right: their places, and what an error says once the right is lost.
    pub(crate) rights: Vec<(usize, Arc<str>)>,
    pub(crate) decided: Option<Decided>,
}

/// Tells how a commit was decided before its answer is there, which comes only once it is durable. So the next commit
/// on the same key can follow without waiting for the sync: if it is applied, so was the one before. Nothing may leave
/// the process on the strength of it. A backend that cannot tell early does not tell.
#[derive(Debug, Clone, Default)]
pub struct Decided(Arc<AtomicU8>);

impl Decided {
    /// For one commit.
    pub fn new() -> Decided {
        Decided::default()
    }

    /// Whether the checks held; `None` while that is not known.
    pub fn applies(&self) -> Option<bool> {
        match self.0.load(Ordering::Acquire) {
            0 => None,
            told => Some(told == 1),
        }
    }

    /// For backends: what will be answered if the store lives.
    pub fn tell(&self, applies: bool) {
        self.0.store(if applies { 1 } else { 2 }, Ordering::Release);
    }
}

/// Something that must hold for a commit to land.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Check {
    /// The key exists and was last written at this rev.
    AtRev(Key, Rev),
    /// The key does not exist.
    Absent(Key),
    /// The key exists, whatever it holds.
    Present(Key),
    /// Nothing was committed since this generation.
    AtGeneration(Generation),
    /// No key of the range was written after this generation.
    Unchanged(Range, Generation),
}

/// A right to write that can be lost, and is told of by something in the store.
pub trait Right {
    /// What holds as long as the right does.
    fn check(&self) -> Check;

    /// What an error says once the right is lost.
    fn lost(&self) -> String {
        "the right to write is lost".into()
    }
}

/// One change of one key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Write {
    /// Sets the value.
    Put(Key, Bytes),
    /// Sets the value, and in it, from this offset on, the commit's own generation and time: 16 bytes, big-endian.
    /// Otherwise a value could not hold them, as they are given when the commit is decided.
    PutStamped(Key, Bytes, usize),
    /// Removes the key; of a key that is not there, nothing.
    Delete(Key),
}

/// How many bytes a stamp takes.
pub(crate) const STAMP_BYTES: usize = 16;

/// The value with a stamp in it. Offsets are checked where commits come in.
pub(crate) fn stamped(value: &Bytes, offset: usize, generation: Generation, time: Timestamp) -> Bytes {
    let mut value = value.to_vec();
    value[offset..offset + 8].copy_from_slice(&generation.0.to_be_bytes());
    value[offset + 8..offset + STAMP_BYTES].copy_from_slice(&time.0.to_be_bytes());
    value.into()
}

impl Write {
    /// The key that is written.
    pub fn key(&self) -> &Key {
        match self {
            Write::Put(key, _) | Write::PutStamped(key, ..) | Write::Delete(key) => key,
        }
    }
}

impl Commit {
    /// A commit without checks and writes.
    pub fn new() -> Commit {
        Commit::default()
    }

    /// Names the commit: sent again under the same id, it is applied once and answers with the first receipt.
    pub fn id(mut self, id: CommitId) -> Commit {
        self.id = Some(id);
        self
    }

    /// Bytes kept beside the commit in history: who, why.
    pub fn meta(mut self, meta: impl Into<Bytes>) -> Commit {
        self.meta = meta.into();
        self
    }

    /// Adds a check.
    pub fn check(mut self, check: Check) -> Commit {
        self.checks.push(check);
        self
    }

    /// Adds a write.
    pub fn write(mut self, write: Write) -> Commit {
        self.writes.push(write);
        self
    }

    /// Lands only if `key` exists at `rev`.
    pub fn at_rev(self, key: &Key, rev: Rev) -> Commit {
        self.check(Check::AtRev(key.clone(), rev))
    }

    /// Lands only if `key` does not exist.
    pub fn absent(self, key: &Key) -> Commit {
        self.check(Check::Absent(key.clone()))
    }

    /// Requires that the key exists.
    pub fn present(self, key: &Key) -> Commit {
        self.check(Check::Present(key.clone()))
    }

    /// Lands only as long as a right to write is held, such as a lock. Once it is lost, the refusal says so.
    pub fn guard(mut self, right: &impl Right) -> Commit {
        self.rights.push((self.checks.len(), right.lost().into()));
        self.check(right.check())
    }

    /// Lands only if nothing at all was committed after `generation`.
    pub fn at_generation(self, generation: Generation) -> Commit {
        self.check(Check::AtGeneration(generation))
    }

    /// Lands only if nothing in `range` was written after `since`.
    pub fn unchanged(self, range: &Range, since: Generation) -> Commit {
        self.check(Check::Unchanged(range.clone(), since))
    }

    /// Sets a value.
    pub fn put(self, key: &Key, value: impl Into<Bytes>) -> Commit {
        self.write(Write::Put(key.clone(), value.into()))
    }

    /// Sets a value that holds, in the 16 bytes from `offset` on, the commit's own generation and time (big-endian).
    pub fn put_stamped(self, key: &Key, value: impl Into<Bytes>, offset: usize) -> Commit {
        self.write(Write::PutStamped(key.clone(), value.into(), offset))
    }

    /// Removes a key.
    pub fn delete(self, key: &Key) -> Commit {
        self.write(Write::Delete(key.clone()))
    }

    /// Has `decided` told as soon as the commit is decided.
    pub fn tell(mut self, decided: &Decided) -> Commit {
        self.decided = Some(decided.clone());
        self
    }

    /// The checks, in the order in which a refusal counts them.
    pub fn checks(&self) -> &[Check] {
        &self.checks
    }

    /// The writes, in the order in which a receipt counts them.
    pub fn writes(&self) -> &[Write] {
        &self.writes
    }
}

/// What became of a commit.
#[derive(Debug, Clone, PartialEq, Eq)]
#[must_use = "a commit may have been refused"]
pub enum Outcome {
    /// Every check held and the writes are durable.
    Applied(Receipt),
    /// A check did not hold; nothing was changed.
    Refused(Refusal),
}

impl Outcome {
    /// The receipt, or the refusal as an error.
    pub fn applied(self) -> Result<Receipt, Refusal> {
        match self {
            Outcome::Applied(receipt) => Ok(receipt),
            Outcome::Refused(refusal) => Err(refusal),
        }
    }

    /// Whether the commit landed.
    pub fn is_applied(&self) -> bool {
        matches!(self, Outcome::Applied(_))
    }
}

/// The proof that a commit landed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Receipt {
    /// The generation the commit took; of a commit without an id that changed nothing, the one its checks held at.
    pub generation: Generation,
    /// When it was committed, by the store's clock, which never goes back.
    pub time: Timestamp,
    /// For each write its new rev; `None` where a delete found nothing to delete.
    pub revs: Vec<Option<Rev>>,
    /// Whether this answers a commit id that had been applied before.
    pub repeated: bool,
}

impl Receipt {
    /// Whether the commit changed any key.
    pub fn changed(&self) -> bool {
        self.revs.iter().any(Option::is_some)
    }
}

/// Why a commit was refused: every check that did not hold, in the commit's order.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("refused at generation {generation}: {}", failed.iter().map(|f| f.to_string()).collect::<Vec<_>>().join("; "))]
pub struct Refusal {
    /// The generation of the store at which the checks were made.
    pub generation: Generation,
    /// The checks that failed.
    pub failed: Vec<FailedCheck>,
}

/// A check that did not hold, with what was found instead.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FailedCheck {
    /// The check's place among the commit's checks.
    pub index: usize,
    /// What was expected.
    pub check: Check,
    /// What was found.
    pub actual: Actual,
    /// What there is to say of it, if the check stands for a right that is lost.
    pub right: Option<Arc<str>>,
}

/// What a failed check found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Actual {
    /// The key exists, at this rev.
    AtRev(Rev),
    /// The key does not exist.
    Absent,
    /// The store's generation.
    AtGeneration(Generation),
    /// A key of the range was written, last at this generation. There may be more of them.
    Changed(Key, Generation),
}

impl fmt::Display for FailedCheck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(lost) = &self.right {
            return f.write_str(lost);
        }
        match &self.check {
            Check::AtRev(key, rev) => write!(f, "{key} expected at rev {rev}, ")?,
            Check::Absent(key) => write!(f, "{key} expected absent, ")?,
            Check::Present(key) => write!(f, "{key} expected to be there, ")?,
            Check::AtGeneration(generation) => write!(f, "store expected at generation {generation}, ")?,
            Check::Unchanged(range, since) => write!(f, "{range} expected unchanged since generation {since}, ")?,
        }
        match &self.actual {
            Actual::AtRev(rev) => write!(f, "is at rev {rev}"),
            Actual::Absent => write!(f, "is absent"),
            Actual::AtGeneration(generation) => write!(f, "is at generation {generation}"),
            Actual::Changed(key, generation) => write!(f, "{key} was written at generation {generation}"),
        }
    }
}

/// A commit as the store remembers it: what the log holds and what a watch delivers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Committed {
    /// Its place in the store's order.
    pub generation: Generation,
    /// When it was committed.
    pub time: Timestamp,
    /// What the caller wanted kept beside it.
    pub meta: Bytes,
    /// The keys it changed. A watch shows those in its range.
    pub changes: Vec<Change>,
}

/// One key's part in a commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// The key.
    pub key: Key,
    /// Its rev from this commit on.
    pub rev: Rev,
    /// Its value from this commit on; `None` if it was deleted.
    pub value: Option<Bytes>,
}

/// What a key holds: a value, or the trace of a deleted one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Version {
    /// How often the key has been written.
    pub rev: Rev,
    /// The generation of the write.
    pub generation: Generation,
    /// When it was committed, by the store's clock.
    pub time: Timestamp,
    /// The value; `None` for a deleted key.
    pub value: Option<Bytes>,
}

impl Version {
    pub(crate) fn head(&self) -> Head {
        Head { rev: self.rev, generation: self.generation, live: self.value.is_some() }
    }
}

/// A version without its value: all that a check needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    /// How often the key has been written.
    pub rev: Rev,
    /// The generation of the last write.
    pub generation: Generation,
    /// Whether that write left a value.
    pub live: bool,
}
