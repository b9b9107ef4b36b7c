//! Names of locks, their owners, and the keys of their stored records.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::lock::error::{LockError, Result};
use crate::node::session::{self, SESSIONS};
use crate::node::{ExecutionId, read_text, shard_key, shard_of, write_text};
use crate::store::{Check, Key, Range, Right, Space, SpaceId, SpaceSpec, Store, StoreError, Uuid};

/// The name of a lock, and the scope in which it is the same lock.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct LockName {
    /// The scope that shares the lock.
    pub scope: LockScope,
    /// The name: 1 to 256 bytes.
    pub name: String,
}

/// The scope that shares a lock of a name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum LockScope {
    /// All code that uses the store.
    Global,
    /// All executions of the workflow of this name.
    Workflow(String),
    /// An execution that was not started as a child, with all its descendants.
    Tree(ExecutionId),
}

impl LockScope {
    /// The scope as a part of keys. The encoding of one scope is never a prefix of another.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let (kind, scope): (u8, &str) = match self {
            LockScope::Global => (0, ""),
            LockScope::Workflow(workflow) => (1, workflow),
            LockScope::Tree(root) => (2, root),
        };
        let mut bytes = vec![kind];
        write_text(&mut bytes, scope);
        bytes
    }
}

impl LockName {
    /// A lock that all code shares.
    ///
    /// ```
    /// # use latchwork::lock::LockName;
    /// assert_eq!(LockName::global("nightly"), LockName::from("nightly"));
    /// ```
    pub fn global(name: impl Into<String>) -> LockName {
        LockName { scope: LockScope::Global, name: name.into() }
    }

    /// A lock that the executions of a workflow share.
    ///
    /// ```
    /// # use latchwork::lock::LockName;
    /// let name = LockName::of_workflow("import", "files");
    /// assert_eq!(name.to_string(), "files of workflow import");
    /// ```
    pub fn of_workflow(workflow: impl Into<String>, name: impl Into<String>) -> LockName {
        LockName { scope: LockScope::Workflow(workflow.into()), name: name.into() }
    }

    /// A lock that an execution shares with all its descendants.
    ///
    /// ```
    /// # use latchwork::lock::LockName;
    /// let name = LockName::of_tree("import-7", "files");
    /// assert_eq!(name.to_string(), "files of execution import-7");
    /// ```
    pub fn of_tree(root: impl Into<ExecutionId>, name: impl Into<String>) -> LockName {
        LockName { scope: LockScope::Tree(root.into()), name: name.into() }
    }

    pub(crate) fn check(&self) -> Result<()> {
        let refuse = |reason| Err(LockError::Name { name: self.to_string(), reason });
        match (self.name.len(), &self.scope) {
            (0, _) => refuse("it is empty"),
            (257.., _) => refuse("it is longer than 256 bytes"),
            (_, LockScope::Workflow(scope)) if scope.is_empty() || scope.len() > 512 => {
                refuse("the name of the workflow must have 1 to 512 bytes")
            }
            (_, LockScope::Tree(scope)) if scope.is_empty() || scope.len() > 512 => {
                refuse("the id of the execution must have 1 to 512 bytes")
            }
            _ => Ok(()),
        }
    }

    fn read_scope(bytes: &[u8]) -> Option<(LockScope, &[u8])> {
        let (kind, rest) = bytes.split_first()?;
        let (scope, rest) = read_text(rest)?;
        let scope = match kind {
            0 => LockScope::Global,
            1 => LockScope::Workflow(scope.into()),
            2 => LockScope::Tree(scope.into()),
            _ => return None,
        };
        Some((scope, rest))
    }

    /// The name as a part of keys. The encoding of one name is never a prefix of another.
    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.scope.bytes();
        write_text(&mut bytes, &self.name);
        bytes
    }

    /// Reads what [`LockName::bytes`] has written. Returns the name and the rest.
    pub(crate) fn read(bytes: &[u8]) -> Option<(LockName, &[u8])> {
        let (scope, rest) = LockName::read_scope(bytes)?;
        let (name, rest) = read_text(rest)?;
        Some((LockName { scope, name: name.into() }, rest))
    }

    /// The name as a whole key, in the order of names.
    pub(crate) fn head_bytes(&self) -> Vec<u8> {
        [&self.scope.bytes(), self.name.as_bytes()].concat()
    }

    /// Reads the name from the key of a head.
    pub(crate) fn read_head(key: &Key) -> Option<LockName> {
        let (scope, name) = LockName::read_scope(key.bytes())?;
        Some(LockName { scope, name: std::str::from_utf8(name).ok()?.into() })
    }
}

impl fmt::Display for LockName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.scope {
            LockScope::Global => f.write_str(&self.name),
            LockScope::Workflow(workflow) => write!(f, "{} of workflow {workflow}", self.name),
            LockScope::Tree(root) => write!(f, "{} of execution {root}", self.name),
        }
    }
}

impl From<&str> for LockName {
    fn from(name: &str) -> LockName {
        LockName::global(name)
    }
}

impl From<String> for LockName {
    fn from(name: String) -> LockName {
        LockName::global(name)
    }
}

impl From<&LockName> for LockName {
    fn from(name: &LockName) -> LockName {
        name.clone()
    }
}

/// The owner of a request: it holds a lock or waits for it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Owner {
    /// An execution. It holds a lock until it releases the lock or ends.
    Execution(ExecutionId),
    /// A session. It holds a lock until it releases the lock or does not renew its lease.
    Session(Uuid),
}

impl fmt::Display for Owner {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Owner::Execution(id) => write!(f, "execution {id}"),
            Owner::Session(id) => write!(f, "session {id}"),
        }
    }
}

/// Tells a grant of a lock from every other grant of the same name: a later grant has a larger number, whatever happens
/// in between. Pass it to the code that writes for the holder; a commit with [`Commit::guard`] is refused when the lock
/// is no longer held.
///
/// A token can be stored and sent. [`Locks::token`] makes one from its parts.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use latchwork::lock::{FencingToken, Locks};
/// use latchwork::store::{Commit, SpaceSpec, Store};
///
/// let store = Store::memory().await?;
/// let locks = Locks::on(&store).await?;
/// let guard = locks.mutex("nightly").acquire().await?;
/// let text = serde_json::to_string(guard.token())?;
///
/// let token: FencingToken = serde_json::from_str(&text)?;
/// assert_eq!(token, *guard.token());
/// assert_eq!(token, locks.token("nightly", token.number()));
///
/// let report = store.space(SpaceSpec::new("reports")).await?.key("today");
/// store.commit(Commit::new().guard(&token).put(&report, "done")).await?.applied()?;
/// guard.release().await?;
/// let late = store.commit(Commit::new().guard(&token).put(&report, "late")).await?.applied();
/// assert!(late.unwrap_err().to_string().contains("lock \"nightly\" is not held under token"));
/// # Ok(()) }
/// ```
///
/// [`Commit::guard`]: crate::store::Commit::guard
/// [`Locks::token`]: crate::lock::Locks::token
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "StoredToken", try_from = "StoredToken")]
pub struct FencingToken {
    pub(crate) number: u64,
    pub(crate) key: Key,
}

/// A token as it is stored and sent.
#[derive(Serialize, Deserialize)]
struct StoredToken {
    lock: LockName,
    number: u64,
    /// The space of requests, in the store of the lock.
    space: u32,
}

impl FencingToken {
    /// The number, for other systems: they refuse a number that is smaller than the largest they have seen.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::lock::Locks;
    /// # use latchwork::store::Store;
    /// # let locks = Locks::on(&Store::memory().await?).await?;
    /// assert_eq!(locks.token("nightly", 7).number(), 7);
    /// # Ok(()) }
    /// ```
    pub fn number(&self) -> u64 {
        self.number
    }

    /// The lock that was granted.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::lock::{LockName, Locks};
    /// # use latchwork::store::Store;
    /// # let locks = Locks::on(&Store::memory().await?).await?;
    /// assert_eq!(locks.token("nightly", 7).lock(), LockName::global("nightly"));
    /// # Ok(()) }
    /// ```
    pub fn lock(&self) -> LockName {
        let lock = read_ticket(&self.key).map(|(lock, _)| lock);
        lock.expect("a token is made from the name of a lock")
    }
}

impl From<FencingToken> for StoredToken {
    fn from(token: FencingToken) -> StoredToken {
        StoredToken { lock: token.lock(), number: token.number, space: token.key.space().0 }
    }
}

impl TryFrom<StoredToken> for FencingToken {
    type Error = LockError;

    fn try_from(StoredToken { lock, number, space }: StoredToken) -> Result<FencingToken> {
        lock.check()?;
        Ok(FencingToken { number, key: Key::from_parts(SpaceId(space), ticket_key(&lock, number)) })
    }
}

impl fmt::Display for FencingToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.number.fmt(f)
    }
}

impl Right for FencingToken {
    fn check(&self) -> Check {
        Check::Present(self.key.clone())
    }

    fn lost(&self) -> String {
        format!("lock {:?} is not held under token {self}", self.lock().to_string())
    }
}

/// The spaces of the lock layer.
#[derive(Clone)]
pub(crate) struct LockSpaces {
    /// lock → head. Tickets are made from revs of heads, so these revs must never start again.
    pub(crate) heads: Space,
    /// lock, ticket → request
    pub(crate) requests: Space,
    /// owner, lock, request's id → ticket
    pub(crate) owned: Space,
    /// session → lease
    pub(crate) sessions: Space,
    /// lock, ticket → the request that an operator has released, and the reason
    pub(crate) forced: Space,
    /// shard, lock → nothing: a lock with more to grant than one commit could hold
    pub(crate) unfinished: Space,
}

/// The names of spaces.
pub(crate) const HEADS: &str = "lock.heads";
pub(crate) const REQUESTS: &str = "lock.requests";
pub(crate) const OWNED: &str = "lock.owned";
pub(crate) const FORCED: &str = "lock.forced";
pub(crate) const UNFINISHED: &str = "lock.unfinished";

impl LockSpaces {
    pub(crate) async fn declare(store: &Store) -> Result<LockSpaces, StoreError> {
        let used_once = |name: &'static str| store.space(SpaceSpec::new(name).keys_used_once());
        Ok(LockSpaces {
            heads: store.space(SpaceSpec::new(HEADS)).await?,
            requests: used_once(REQUESTS).await?,
            owned: used_once(OWNED).await?,
            sessions: session::declare(store).await?,
            forced: used_once(FORCED).await?,
            unfinished: used_once(UNFINISHED).await?,
        })
    }

    /// Returns the spaces if all of them were declared before.
    pub(crate) async fn find(store: &Store) -> Result<Option<LockSpaces>, StoreError> {
        let known = store.spaces().await?;
        let space = |name: &str| known.iter().find(|space| space.name() == name).cloned();
        let spaces = || {
            let (heads, requests, owned) = (space(HEADS)?, space(REQUESTS)?, space(OWNED)?);
            let (sessions, forced, unfinished) = (space(SESSIONS)?, space(FORCED)?, space(UNFINISHED)?);
            Some(LockSpaces { heads, requests, owned, sessions, forced, unfinished })
        };
        Ok(spaces())
    }

    pub(crate) fn head(&self, lock: &LockName) -> Key {
        self.heads.key(lock.head_bytes())
    }

    pub(crate) fn request(&self, lock: &LockName, ticket: u64) -> Key {
        self.requests.key(ticket_key(lock, ticket))
    }

    /// Requests from a ticket on.
    pub(crate) fn requests_from(&self, lock: &LockName, ticket: u64) -> Range {
        let end = [lock.bytes(), vec![0xff; 9]].concat();
        self.requests.range(ticket_key(lock, ticket)..end)
    }

    /// Requests up to a ticket.
    pub(crate) fn requests_until(&self, lock: &LockName, ticket: u64) -> Range {
        self.requests.range(ticket_key(lock, 0)..=ticket_key(lock, ticket))
    }

    pub(crate) fn forced(&self, lock: &LockName, ticket: u64) -> Key {
        self.forced.key(ticket_key(lock, ticket))
    }

    pub(crate) fn owned(&self, owner: &Owner, lock: &LockName, id: &[u8]) -> Key {
        LockSpaces::owned_key(&self.owned, owner, lock, id)
    }

    pub(crate) fn owned_key(space: &Space, owner: &Owner, lock: &LockName, id: &[u8]) -> Key {
        space.key([owner_key(owner), lock.bytes(), id.to_vec()].concat())
    }

    /// Everything that an owner holds or waits for.
    pub(crate) fn owned_by(&self, owner: &Owner) -> Range {
        self.owned.prefix(owner_key(owner))
    }

    /// Reads the lock and the request's id from a key of [`LockSpaces::owned`].
    pub(crate) fn read_owned(owner: &Owner, key: &Key) -> Option<(LockName, Vec<u8>)> {
        let (lock, id) = LockName::read(key.bytes().get(owner_key(owner).len()..)?)?;
        Some((lock, id.to_vec()))
    }

    /// The key of the note that there is more to grant on a lock.
    pub(crate) fn unfinished(&self, lock: &LockName) -> Key {
        let lock = lock.bytes();
        self.unfinished.key([&shard_key(shard_of(&lock)), &lock[..]].concat())
    }

    /// The key of the list of locks that an ended owner has left.
    pub(crate) fn left(&self, owner: &Owner, id: Uuid) -> Key {
        let shard = match owner {
            Owner::Execution(id) => shard_of(id.as_bytes()),
            Owner::Session(id) => shard_of(id.as_bytes()),
        };
        // No encoded name of a lock starts with this.
        self.unfinished.key([&shard_key(shard), &[255][..], id.as_bytes()].concat())
    }

    /// All notes of both kinds in a shard.
    pub(crate) fn unfinished_in(&self, shard: u16) -> Range {
        self.unfinished.prefix(shard_key(shard))
    }

    /// Reads the lock from the key of a note; `None` if the note is the list of an ended owner.
    pub(crate) fn read_unfinished(key: &Key) -> Option<LockName> {
        LockName::read(key.bytes().get(2..)?).map(|(lock, _)| lock)
    }

    pub(crate) fn session(&self, id: Uuid) -> Key {
        self.sessions.key(id.as_bytes())
    }
}

fn owner_key(owner: &Owner) -> Vec<u8> {
    match owner {
        Owner::Execution(id) => {
            let mut key = vec![0];
            write_text(&mut key, id);
            key
        }
        Owner::Session(id) => [&[1], &id.as_bytes()[..]].concat(),
    }
}

fn ticket_key(lock: &LockName, ticket: u64) -> Vec<u8> {
    [lock.bytes(), ticket.to_be_bytes().to_vec()].concat()
}

/// Reads the lock and the ticket from a key.
pub(crate) fn read_ticket(key: &Key) -> Option<(LockName, u64)> {
    let (lock, ticket) = LockName::read(key.bytes())?;
    Some((lock, u64::from_be_bytes(ticket.try_into().ok()?)))
}
