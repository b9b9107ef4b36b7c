//! The conditional commit: what a caller sends, what the store answers, and what the store remembers of it. The rules
//! that decide a commit are in `evaluate`.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

use bytes::Bytes;

use crate::{Generation, Key, Range, Rev, Timestamp};

/// The id of a commit. A commit that is sent again under the same id is applied only once.
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

/// Checks and writes. If all checks hold, all writes are applied; otherwise none is.
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
    pub(crate) is_urgent: bool,
}

/// Shows how a commit was decided before the commit is durable and answered. So a caller can send the next commit on
/// the same key without waiting for the sync: if the second is applied, the first is applied, too. Nothing may leave
/// the process because of an early decision. A backend that cannot decide early never sets it.
#[derive(Debug, Clone, Default)]
pub struct Decided(Arc<AtomicU8>);

impl Decided {
    /// Creates an undecided value for one commit.
    ///
    /// ```
    /// # use latchwork_store::Decided;
    /// assert_eq!(Decided::new().applies(), None);
    /// ```
    pub fn new() -> Decided {
        Decided::default()
    }

    /// Returns whether the checks held; `None` while that is not known.
    ///
    /// ```
    /// # use latchwork_store::Decided;
    /// let decided = Decided::new();
    /// decided.tell(false);
    /// assert_eq!(decided.applies(), Some(false));
    /// ```
    pub fn applies(&self) -> Option<bool> {
        match self.0.load(Ordering::Acquire) {
            0 => None,
            told => Some(told == 1),
        }
    }

    /// Called by a backend: sets what the answer will be, unless the store stops before it.
    ///
    /// ```
    /// # use latchwork_store::Decided;
    /// let decided = Decided::new();
    /// decided.tell(true);
    /// assert_eq!(decided.applies(), Some(true));
    /// ```
    pub fn tell(&self, applies: bool) {
        self.0.store(if applies { 1 } else { 2 }, Ordering::Release);
    }
}

/// A condition that must hold for a commit to be applied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Check {
    /// The key exists and was last written at this rev.
    AtRev(Key, Rev),
    /// The key does not exist.
    Absent(Key),
    /// The key exists, with any value.
    Present(Key),
    /// Nothing was committed since this generation.
    AtGeneration(Generation),
    /// No key of the range was written after this generation.
    Unchanged(Range, Generation),
}

/// A right to write that can be lost, such as a lock. The store holds a record of it.
pub trait Right {
    /// The check that holds as long as the right exists.
    fn check(&self) -> Check;

    /// What an error says once the right is lost.
    fn lost(&self) -> String {
        "the right to write is lost".into()
    }
}

/// One write of one key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Write {
    /// Sets the value.
    Put(Key, Bytes),
    /// Sets the value. The 16 bytes from this offset on become the commit's own generation and time, big-endian. A
    /// caller cannot write them itself, because they are known only when the commit is decided.
    PutStamped(Key, Bytes, usize),
    /// Removes the key. Does nothing if the key does not exist.
    Delete(Key),
}

/// The length of a stamp.
pub(crate) const STAMP_BYTES: usize = 16;

/// Returns the value with a stamp in it. The offset was checked when the commit was received.
pub(crate) fn stamped(value: &Bytes, offset: usize, generation: Generation, time: Timestamp) -> Bytes {
    let mut value = value.to_vec();
    value[offset..offset + 8].copy_from_slice(&generation.0.to_be_bytes());
    value[offset + 8..offset + STAMP_BYTES].copy_from_slice(&time.0.to_be_bytes());
    value.into()
}

impl Write {
    /// The key that is written.
    ///
    /// ```
    /// # use latchwork_store::{Key, SpaceId, Write};
    /// let alice = Key::from_parts(SpaceId(16), "alice");
    /// assert_eq!(Write::Delete(alice.clone()).key(), &alice);
    /// ```
    pub fn key(&self) -> &Key {
        match self {
            Write::Put(key, _) | Write::PutStamped(key, ..) | Write::Delete(key) => key,
        }
    }
}

impl Commit {
    /// A commit without checks and writes.
    ///
    /// ```
    /// # use latchwork_store::{Commit, Key};
    /// # fn example(alice: &Key) {
    /// let commit = Commit::new().put(alice, "100");
    /// # }
    /// ```
    pub fn new() -> Commit {
        Commit::default()
    }

    /// Sets the commit's id. A commit that is sent again under the same id is applied once and returns the first
    /// receipt.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork_store::{Commit, History, SpaceSpec, Store};
    /// # let store = Store::memory().await?;
    /// # let accounts = store.space(SpaceSpec::new("accounts").history(History::Forever)).await?;
    /// # let alice = accounts.key("alice");
    /// let deposit = Commit::new().id(store.commit_id()).put(&alice, "100");
    /// store.commit(deposit.clone()).await?.applied()?;
    /// assert!(store.commit(deposit).await?.applied()?.repeated);
    /// # Ok(()) }
    /// ```
    pub fn id(mut self, id: CommitId) -> Commit {
        self.id = Some(id);
        self
    }

    /// Lets the commit pass commits that wait. Use it to renew a lease, which must not end because of a long queue. A
    /// store in PostgreSQL has such a queue; other stores treat all commits alike.
    pub fn urgent(mut self) -> Commit {
        self.is_urgent = true;
        self
    }

    /// Sets bytes that history keeps with the commit, for example an author and a reason.
    ///
    /// ```
    /// # use latchwork_store::{Commit, Key};
    /// # fn example(alice: &Key) {
    /// let commit = Commit::new().put(alice, "100").meta("by carol");
    /// # }
    /// ```
    pub fn meta(mut self, meta: impl Into<Bytes>) -> Commit {
        self.meta = meta.into();
        self
    }

    /// Adds a check.
    ///
    /// ```
    /// # use latchwork_store::{Check, Commit, Key};
    /// # fn example(alice: &Key) {
    /// let commit = Commit::new().check(Check::Present(alice.clone())).put(alice, "100");
    /// # }
    /// ```
    pub fn check(mut self, check: Check) -> Commit {
        self.checks.push(check);
        self
    }

    /// Adds a write.
    ///
    /// ```
    /// # use latchwork_store::{Commit, Key, Write};
    /// # fn example(alice: &Key) {
    /// let commit = Commit::new().write(Write::Delete(alice.clone()));
    /// # }
    /// ```
    pub fn write(mut self, write: Write) -> Commit {
        self.writes.push(write);
        self
    }

    /// Checks that `key` exists at `rev`.
    ///
    /// ```
    /// # use latchwork_store::{Commit, Key, Rev};
    /// # fn example(alice: &Key) {
    /// let commit = Commit::new().at_rev(alice, Rev(3)).put(alice, "70");
    /// # }
    /// ```
    pub fn at_rev(self, key: &Key, rev: Rev) -> Commit {
        self.check(Check::AtRev(key.clone(), rev))
    }

    /// Checks that `key` does not exist.
    ///
    /// ```
    /// # use latchwork_store::{Commit, Key};
    /// # fn example(alice: &Key) {
    /// let commit = Commit::new().absent(alice).put(alice, "100");
    /// # }
    /// ```
    pub fn absent(self, key: &Key) -> Commit {
        self.check(Check::Absent(key.clone()))
    }

    /// Checks that `key` exists.
    ///
    /// ```
    /// # use latchwork_store::{Commit, Key};
    /// # fn example(alice: &Key) {
    /// let commit = Commit::new().present(alice).delete(alice);
    /// # }
    /// ```
    pub fn present(self, key: &Key) -> Commit {
        self.check(Check::Present(key.clone()))
    }

    /// Lands only as long as a right to write is held, such as a lock. Once it is lost, the refusal says so.
    ///
    /// ```
    /// # use latchwork_store::{Commit, Key, Right};
    /// # fn example(alice: &Key, lock: &impl Right) {
    /// let commit = Commit::new().guard(lock).put(alice, "70");
    /// # }
    /// ```
    pub fn guard(mut self, right: &impl Right) -> Commit {
        self.rights.push((self.checks.len(), right.lost().into()));
        self.check(right.check())
    }

    /// Checks that nothing at all was committed after `generation`.
    ///
    /// ```
    /// # use latchwork_store::{Commit, Generation, Key};
    /// # fn example(alice: &Key) {
    /// let commit = Commit::new().at_generation(Generation(12)).put(alice, "70");
    /// # }
    /// ```
    pub fn at_generation(self, generation: Generation) -> Commit {
        self.check(Check::AtGeneration(generation))
    }

    /// Checks that nothing in `range` was written after `since`.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork_store::{Commit, History, Order, SpaceSpec, Store};
    /// # let store = Store::memory().await?;
    /// # let accounts = store.space(SpaceSpec::new("accounts").history(History::Forever)).await?;
    /// # let alice = accounts.key("alice");
    /// # store.commit(Commit::new().put(&alice, "100")).await?.applied()?;
    /// let view = store.view().await?;
    /// let count = view.scan(&accounts.all(), Order::Ascending, 1_000).await?.len();
    /// let commit = Commit::new().unchanged(&accounts.all(), view.generation());
    /// store.commit(commit.put(&accounts.key("count"), count.to_string())).await?.applied()?;
    /// # Ok(()) }
    /// ```
    pub fn unchanged(self, range: &Range, since: Generation) -> Commit {
        self.check(Check::Unchanged(range.clone(), since))
    }

    /// Sets a value.
    ///
    /// ```
    /// # use latchwork_store::{Commit, Key};
    /// # fn example(alice: &Key) {
    /// let commit = Commit::new().put(alice, "100");
    /// # }
    /// ```
    pub fn put(self, key: &Key, value: impl Into<Bytes>) -> Commit {
        self.write(Write::Put(key.clone(), value.into()))
    }

    /// Sets a value. The 16 bytes from `offset` on become the commit's own generation and time (big-endian).
    ///
    /// ```
    /// # use latchwork_store::{Commit, Key};
    /// # fn example(alice: &Key) {
    /// let commit = Commit::new().put_stamped(alice, vec![0u8; 16], 0);
    /// # }
    /// ```
    pub fn put_stamped(self, key: &Key, value: impl Into<Bytes>, offset: usize) -> Commit {
        self.write(Write::PutStamped(key.clone(), value.into(), offset))
    }

    /// Removes a key.
    ///
    /// ```
    /// # use latchwork_store::{Commit, Key};
    /// # fn example(alice: &Key) {
    /// let commit = Commit::new().delete(alice);
    /// # }
    /// ```
    pub fn delete(self, key: &Key) -> Commit {
        self.write(Write::Delete(key.clone()))
    }

    /// Asks the backend to set `decided` as soon as the commit is decided.
    ///
    /// ```
    /// # use latchwork_store::{Commit, Decided, Key};
    /// # fn example(alice: &Key) {
    /// let decided = Decided::new();
    /// let commit = Commit::new().put(alice, "100").tell(&decided);
    /// # }
    /// ```
    pub fn tell(mut self, decided: &Decided) -> Commit {
        self.decided = Some(decided.clone());
        self
    }

    /// The checks, in the order of [`FailedCheck::index`].
    ///
    /// ```
    /// # use latchwork_store::{Check, Commit, Key, SpaceId};
    /// # let alice = Key::from_parts(SpaceId(16), "alice");
    /// assert_eq!(Commit::new().absent(&alice).checks(), [Check::Absent(alice)]);
    /// ```
    pub fn checks(&self) -> &[Check] {
        &self.checks
    }

    /// The writes, in the order of [`Receipt::revs`].
    ///
    /// ```
    /// # use latchwork_store::{Commit, Key, SpaceId, Write};
    /// # let alice = Key::from_parts(SpaceId(16), "alice");
    /// assert_eq!(Commit::new().delete(&alice).writes(), [Write::Delete(alice)]);
    /// ```
    pub fn writes(&self) -> &[Write] {
        &self.writes
    }
}

/// The answer to a commit.
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
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork_store::{Commit, History, Rev, SpaceSpec, Store};
    /// # let store = Store::memory().await?;
    /// # let accounts = store.space(SpaceSpec::new("accounts").history(History::Forever)).await?;
    /// # let alice = accounts.key("alice");
    /// let receipt = store.commit(Commit::new().put(&alice, "100")).await?.applied()?;
    /// assert_eq!(receipt.revs, [Some(Rev(1))]);
    /// # Ok(()) }
    /// ```
    pub fn applied(self) -> Result<Receipt, Refusal> {
        match self {
            Outcome::Applied(receipt) => Ok(receipt),
            Outcome::Refused(refusal) => Err(refusal),
        }
    }

    /// True if the commit was applied.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork_store::{Commit, History, SpaceSpec, Store};
    /// # let store = Store::memory().await?;
    /// # let accounts = store.space(SpaceSpec::new("accounts").history(History::Forever)).await?;
    /// # let alice = accounts.key("alice");
    /// assert!(store.commit(Commit::new().put(&alice, "100")).await?.is_applied());
    /// assert!(!store.commit(Commit::new().absent(&alice)).await?.is_applied());
    /// # Ok(()) }
    /// ```
    pub fn is_applied(&self) -> bool {
        matches!(self, Outcome::Applied(_))
    }
}

/// The proof that a commit was applied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Receipt {
    /// The commit's generation. A commit without an id that changed nothing gets the generation at which its checks
    /// held.
    pub generation: Generation,
    /// The time of the commit by the store's clock, which never goes back.
    pub time: Timestamp,
    /// The new rev of each write; `None` if a delete found no key to delete.
    pub revs: Vec<Option<Rev>>,
    /// True if a commit with this id had been applied before. This is then the receipt of that first commit.
    pub repeated: bool,
}

impl Receipt {
    /// True if the commit changed a key.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork_store::{Commit, History, SpaceSpec, Store};
    /// # let store = Store::memory().await?;
    /// # let accounts = store.space(SpaceSpec::new("accounts").history(History::Forever)).await?;
    /// # let alice = accounts.key("alice");
    /// let receipt = store.commit(Commit::new().delete(&alice)).await?.applied()?;
    /// assert!(!receipt.changed()); // there was nothing to delete
    /// # Ok(()) }
    /// ```
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
    /// The check's index among the commit's checks.
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
    /// This key of the range was written, last at this generation. Other keys may have been written, too.
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

/// A commit as the store remembers it. The log stores it and a watch returns it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Committed {
    /// Its number in the store's order of commits.
    pub generation: Generation,
    /// When it was committed.
    pub time: Timestamp,
    /// The bytes that the caller gave to [`Commit::meta`].
    pub meta: Bytes,
    /// The keys it changed. A watch returns only those in its range.
    pub changes: Vec<Change>,
}

/// The change of one key in a commit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Change {
    /// The key.
    pub key: Key,
    /// The key's new rev.
    pub rev: Rev,
    /// The key's new value; `None` if it was deleted.
    pub value: Option<Bytes>,
}

/// One version of a key: a value, or the tombstone of a deleted key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Version {
    /// How often the key has been written.
    pub rev: Rev,
    /// The generation of the write.
    pub generation: Generation,
    /// When it was committed, by the store's clock.
    pub time: Timestamp,
    /// The value; `None` for a tombstone.
    pub value: Option<Bytes>,
}

impl Version {
    pub(crate) fn head(&self) -> Head {
        Head { rev: self.rev, generation: self.generation, live: self.value.is_some() }
    }
}

/// A version without its value. It is all that a check needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Head {
    /// How often the key has been written.
    pub rev: Rev,
    /// The generation of the last write.
    pub generation: Generation,
    /// True if that write set a value; false if it deleted the key.
    pub live: bool,
}
