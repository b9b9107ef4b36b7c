//! What operators can read and change of locks.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::lane::{Once, OnceFound, OnceSpace};
use crate::lock::error::{LockError, LockKind, Result};
use crate::lock::lane::Ask;
use crate::lock::name::{LockSpaces, read_ticket};
use crate::lock::stored::{Forced, Head, LockRequest, Ticket};
use crate::lock::{LockName, LockScope, Locks, Owner};
use crate::node::session::Lease;
use crate::page::{Asked, Page, Records, mark, paged};
use crate::record::Record;
use crate::store::{Item, Key, Order, Store, Timestamp, View};

/// A lock, in a list.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LockSummary {
    /// Its name.
    pub name: LockName,
    /// Its kind.
    pub kind: LockKind,
    /// The number of permits that are taken. A writer of a read-write lock takes all of them.
    pub used: u32,
    /// The number of waiters.
    pub waiting: u64,
}

/// A page of the locks that were ever used, in the order of their names, that is about to be read.
#[derive(Clone)]
#[must_use = "nothing is read until this is awaited"]
pub struct LockList {
    stored: StoredLocks,
    scope: Option<LockScope>,
    is_held: bool,
    asked: Asked,
}

paged!(LockList => LockSummary, LockError);

impl LockList {
    /// Only locks of this scope.
    ///
    /// ```
    /// # use latchwork::lock::{LockScope, Locks, Result};
    /// # async fn example(locks: Locks) -> Result<()> {
    /// let of_imports = locks.list().scope(LockScope::Workflow("import".into())).await?;
    /// # Ok(()) }
    /// ```
    pub fn scope(mut self, scope: impl Into<Option<LockScope>>) -> LockList {
        self.scope = scope.into();
        self
    }

    /// Only locks that are held.
    ///
    /// ```
    /// # use latchwork::lock::{Locks, Result};
    /// # async fn example(locks: Locks) -> Result<()> {
    /// for lock in locks.list().held().await? {
    ///     println!("{}: {} waiting", lock.name, lock.waiting);
    /// }
    /// # Ok(()) }
    /// ```
    pub fn held(mut self) -> LockList {
        self.is_held = true;
        self
    }

    async fn page(self) -> Result<Page<LockSummary>> {
        let LockList { stored, scope, is_held, asked } = self;
        let mark = mark(&(&scope, is_held));
        asked.position(mark)?;
        let Some(spaces) = &stored.spaces else { return Ok(Page::default()) };
        let view = stored.store.view().await?;
        let range = spaces.heads.prefix(scope.as_ref().map_or_else(Vec::new, LockScope::bytes));
        let order = Order::Ascending;
        let records = Records { view: &view, space: &spaces.heads, range, order, skips_damage: false };
        let read = |key: &Key, item: &Item| -> Result<Option<LockSummary>> {
            let name = LockName::read_head(key).ok_or_else(|| LockError::Corrupt { place: format!("{key}") })?;
            let head = Head::decode(&item.value).map_err(|why| why.at(format!("lock {:?}", name.to_string())))?;
            let summary = |kind| LockSummary { name, kind, used: head.used, waiting: head.waiting };
            Ok(head.kind.filter(|_| !is_held || head.used > 0).map(summary))
        };
        asked.scan(mark, records, read).await
    }
}

/// Everything about a lock.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LockState {
    /// Its name.
    pub name: LockName,
    /// Its kind.
    pub kind: LockKind,
    /// The number of permits that are taken.
    pub used: u32,
    /// The number of waiters. `waiters` may hold only the first of them.
    pub waiting: u64,
    /// The holders, the oldest grant first.
    pub holders: Vec<Requested>,
    /// The waiters, in the order in which they will be granted the lock.
    pub waiters: Vec<Requested>,
    /// The releases that operators have forced, the newest first.
    pub forced: Vec<ForcedRelease>,
}

/// A request for a lock, held or waiting.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Requested {
    /// Its owner.
    pub owner: Owner,
    /// The label of the session, if the owner is one.
    pub label: Option<String>,
    /// The number of the fencing token. For a waiter, the number that it will be granted.
    pub token: u64,
    /// The number of permits.
    pub permits: u32,
    /// When the request was made.
    #[serde(rename = "since_us")]
    pub since: Timestamp,
    /// When it was granted, if it was.
    #[serde(rename = "granted_us")]
    pub granted: Option<Timestamp>,
    /// The number of waiters before it in the queue.
    pub position: Option<u64>,
    /// The lease of the session, if the owner is one.
    pub lease: Option<LeaseState>,
}

/// The lease of a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct LeaseState {
    /// When it was last renewed.
    #[serde(rename = "renewed_us")]
    pub renewed: Timestamp,
    /// How long the lease is valid after a renewal, at least.
    #[serde(rename = "length_us", with = "crate::micros")]
    pub length: Duration,
}

impl LeaseState {
    /// Until when the lease is valid without another renewal.
    ///
    /// ```
    /// # use latchwork::lock::{Locks, Result};
    /// # async fn example(locks: Locks) -> Result<()> {
    /// for holder in locks.inspect("nightly").await?.holders {
    ///     if let Some(lease) = holder.lease {
    ///         println!("{:?} holds it until {}", holder.label, lease.until());
    ///     }
    /// }
    /// # Ok(()) }
    /// ```
    pub fn until(&self) -> Timestamp {
        self.renewed.plus(self.length)
    }
}

/// A release that an operator has forced.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ForcedRelease {
    /// The owner that held the lock or waited for it.
    pub owner: Owner,
    /// The number of the fencing token.
    pub token: u64,
    /// True if the lock was held, and not only waited for.
    pub was_held: bool,
    /// The number of permits.
    pub permits: u32,
    /// When the request was made.
    #[serde(rename = "since_us")]
    pub since: Timestamp,
    /// When it was granted, if it was.
    #[serde(rename = "granted_us")]
    pub granted: Option<Timestamp>,
    /// When it was forced.
    #[serde(rename = "at_us")]
    pub at: Timestamp,
    /// The operator's reason.
    pub reason: String,
}

/// The most waiters that are returned.
const MOST_WAITERS: usize = 1000;

/// The most forced releases that are returned.
const MOST_FORCED: usize = 100;

/// The locks in a store that no service serves, for example with [`Store::open_read_only`]. Only reads.
///
/// ```
/// # use latchwork::lock::{Result, StoredLocks};
/// # use latchwork::store::Store;
/// # async fn example() -> Result<()> {
/// let locks = StoredLocks::on(&Store::open_read_only("./data").await?).await?;
/// for lock in locks.list().held().await? {
///     println!("{} is held by {:?}", lock.name, locks.inspect(&lock.name).await?.holders);
/// }
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct StoredLocks {
    store: Store,
    /// `None` if the store was never used for locks.
    spaces: Option<LockSpaces>,
}

shown!(StoredLocks, _it => );

impl StoredLocks {
    /// The locks in a store.
    ///
    /// ```
    /// # use latchwork::lock::{Result, StoredLocks};
    /// # use latchwork::store::{Store, Uuid};
    /// # async fn example(store: Store, session: Uuid) -> Result<()> {
    /// let locks = StoredLocks::on(&store).await?;
    /// # Ok(()) }
    /// ```
    pub async fn on(store: &Store) -> Result<StoredLocks> {
        Ok(StoredLocks { store: store.clone(), spaces: LockSpaces::find(store).await? })
    }

    /// The locks that were ever used, in the order of their names. Await it for a page.
    ///
    /// ```
    /// # use latchwork::lock::{Result, StoredLocks};
    /// # use latchwork::store::{Store, Uuid};
    /// # async fn example(store: Store, session: Uuid) -> Result<()> {
    /// let locks = StoredLocks::on(&store).await?;
    /// println!("{} locks", locks.list().limit(1000).await?.items.len());
    /// # Ok(()) }
    /// ```
    pub fn list(&self) -> LockList {
        LockList { stored: self.clone(), scope: None, is_held: false, asked: Asked::of("locks") }
    }

    /// Everything about a lock, with the first thousand waiters.
    ///
    /// ```
    /// # use latchwork::lock::{Result, StoredLocks};
    /// # use latchwork::store::{Store, Uuid};
    /// # async fn example(store: Store, session: Uuid) -> Result<()> {
    /// let locks = StoredLocks::on(&store).await?;
    /// println!("held by {:?}", locks.inspect("nightly").await?.holders);
    /// # Ok(()) }
    /// ```
    pub fn inspect<N: Into<LockName>>(&self, name: N) -> impl Future<Output = Result<LockState>> + Send + use<N> {
        self.clone().inspected(name.into())
    }

    async fn inspected(self, name: LockName) -> Result<LockState> {
        name.check()?;
        let missing = || LockError::NotFound { lock: name.to_string() };
        let spaces = self.spaces.as_ref().ok_or_else(missing)?;
        let view = self.store.view().await?;
        let head = view.get(&spaces.head(&name)).await?.ok_or_else(missing)?;
        let head = Head::decode(&head.value).map_err(|why| why.at(format!("lock {:?}", name.to_string())))?;
        let kind = head.kind.ok_or_else(missing)?;
        let (mut holders, mut waiters, mut forced) = (Vec::new(), Vec::new(), Vec::new());
        let limit = usize::try_from(head.used).unwrap_or(usize::MAX).saturating_add(MOST_WAITERS);
        for (key, item) in view.scan(&spaces.requests_from(&name, 0), Order::Ascending, limit).await? {
            let (_, token) = read_ticket(&key).ok_or_else(|| LockError::Corrupt { place: format!("{key}") })?;
            let request = LockRequest::decode(&item.value).map_err(|why| why.at(format!("{key}")))?;
            let position = request.granted_us.is_none().then_some(waiters.len() as u64);
            let requested = requested(&view, spaces, token, request, position).await?;
            if requested.granted.is_some() { holders.push(requested) } else { waiters.push(requested) }
        }
        let range = spaces.forced.prefix(name.bytes());
        for (key, item) in view.scan(&range, Order::Descending, MOST_FORCED).await? {
            if let (Some((_, token)), Ok(Forced { request, at_us, reason })) =
                (read_ticket(&key), Forced::decode(&item.value))
            {
                let LockRequest { owner, permits, since_us, granted_us, .. } = request;
                let (since, granted) = (Timestamp(since_us), granted_us.map(Timestamp));
                let (was_held, at) = (granted.is_some(), Timestamp(at_us));
                forced.push(ForcedRelease { owner, token, was_held, permits, since, granted, at, reason });
            }
        }
        let (used, waiting) = (head.used, head.waiting);
        Ok(LockState { name, kind, used, waiting, holders, waiters, forced })
    }

    /// Everything that an owner holds or waits for, each with its token.
    ///
    /// ```
    /// # use latchwork::lock::{Owner, Result, StoredLocks};
    /// # use latchwork::store::{Store, Uuid};
    /// # async fn example(store: Store, session: Uuid) -> Result<()> {
    /// for (lock, token) in StoredLocks::on(&store).await?.of(&Owner::Session(session)).await? {
    ///     println!("{lock} under token {token}");
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn of(&self, owner: &Owner) -> Result<Vec<(LockName, u64)>> {
        let Some(spaces) = &self.spaces else { return Ok(Vec::new()) };
        let found = self.store.view().await?.scan(&spaces.owned_by(owner), Order::Ascending, usize::MAX).await?;
        let read = |(key, item): (Key, Item)| {
            let Ticket(ticket) = Ticket::decode(&item.value).map_err(|why| why.at(format!("{key}")))?;
            let corrupt = || LockError::Corrupt { place: format!("{key}") };
            LockSpaces::read_owned(owner, &key).map(|(lock, _)| (lock, ticket)).ok_or_else(corrupt)
        };
        let mut found = found.into_iter().map(read).collect::<Result<Vec<_>>>()?;
        // A request that was entered again has several ids.
        found.dedup();
        Ok(found)
    }
}

async fn requested(
    view: &View,
    spaces: &LockSpaces,
    token: u64,
    request: LockRequest,
    position: Option<u64>,
) -> Result<Requested> {
    let LockRequest { owner, permits, since_us, granted_us, .. } = request;
    let (since, granted) = (Timestamp(since_us), granted_us.map(Timestamp));
    let lease = match &owner {
        Owner::Session(id) => view.get(&spaces.session(*id)).await?,
        Owner::Execution(_) => None,
    };
    let lease = lease.and_then(|item| Lease::decode(&item.value).ok());
    let label = lease.as_ref().map(|lease| lease.label.clone());
    let lease = lease.map(|lease| {
        let (renewed, length) = (Timestamp(lease.renewed_us), Duration::from_micros(lease.lease_us));
        LeaseState { renewed, length }
    });
    Ok(Requested { owner, label, token, permits, since, granted, position, lease })
}

impl Locks {
    /// The stored locks of this service, for reading.
    fn stored(&self) -> StoredLocks {
        StoredLocks { store: self.service.node.store.clone(), spaces: Some(self.service.spaces.clone()) }
    }

    /// The locks that were ever used, in the order of their names. Await it for a page.
    ///
    /// ```
    /// # use latchwork::lock::{Locks, Result};
    /// # async fn example(locks: Locks) -> Result<()> {
    /// for lock in locks.list().limit(10).await? {
    ///     println!("{} is {}", lock.name, lock.kind);
    /// }
    /// # Ok(()) }
    /// ```
    pub fn list(&self) -> LockList {
        self.stored().list()
    }

    /// Everything about a lock, with the first thousand waiters.
    ///
    /// ```
    /// # use latchwork::lock::{Locks, Result};
    /// # async fn example(locks: Locks) -> Result<()> {
    /// let nightly = locks.inspect("nightly").await?;
    /// println!("held by {:?}, {} waiting", nightly.holders, nightly.waiting);
    /// # Ok(()) }
    /// ```
    pub fn inspect<N: Into<LockName>>(&self, name: N) -> impl Future<Output = Result<LockState>> + Send + use<N> {
        self.stored().inspect(name)
    }

    /// Everything that an owner holds or waits for, each with its token.
    ///
    /// ```
    /// # use latchwork::lock::{Locks, Owner, Result, Session};
    /// # async fn example(locks: Locks, session: Session) -> Result<()> {
    /// for (lock, token) in locks.of(&Owner::Session(session.id())).await? {
    ///     println!("{lock} under token {token}");
    /// }
    /// # Ok(()) }
    /// ```
    pub fn of(&self, owner: &Owner) -> impl Future<Output = Result<Vec<(LockName, u64)>>> + Send + use<> {
        let (stored, owner) = (self.stored(), owner.clone());
        async move { stored.of(&owner).await }
    }

    /// Releases the grant of this token, or removes the request that waits under it. The reason stays in the lock's
    /// history. The owner is notified by [`LockGuard::lost`](crate::lock::LockGuard::lost), or notices when its token
    /// is refused.
    ///
    /// ```
    /// # use latchwork::lock::{Locks, Result};
    /// # async fn example(locks: Locks) -> Result<()> {
    /// for holder in locks.inspect("nightly").await?.holders {
    ///     locks.force_release("nightly", holder.token, "its host is gone").await?;
    /// }
    /// # Ok(()) }
    /// ```
    pub fn force_release<N: Into<LockName>>(
        &self,
        name: N,
        token: u64,
        reason: &str,
    ) -> impl Future<Output = Result<()>> + Send + use<N> {
        self.clone().forced(name.into(), token, reason.to_string())
    }

    async fn forced(self, name: LockName, token: u64, reason: String) -> Result<()> {
        name.check()?;
        if reason.len() > 4096 {
            return Err(LockError::Name { name: reason, reason: "the reason is longer than 4096 bytes" });
        }
        let ask = Ask::Force { ticket: token, reason };
        self.service.ask(&name, ask, None).await.map(drop)
    }

    /// Removes a lock that has no holder and no waiter. The next caller that uses the name may choose another kind. Its
    /// tokens continue above the earlier ones.
    ///
    /// ```
    /// # use latchwork::lock::{Locks, Result};
    /// # async fn example(locks: Locks) -> Result<()> {
    /// locks.remove("nightly").await?;
    /// # Ok(()) }
    /// ```
    pub fn remove<N: Into<LockName>>(&self, name: N) -> impl Future<Output = Result<()>> + Send + use<N> {
        self.clone().removed(name.into(), None)
    }

    /// The same under an idempotency key: if the lock is used again meanwhile, another call under the key does not
    /// remove it.
    ///
    /// ```
    /// # use latchwork::lock::{Locks, Result};
    /// # async fn example(locks: Locks) -> Result<()> {
    /// locks.remove_once("nightly", "request-7").await?;
    /// # Ok(()) }
    /// ```
    pub fn remove_once<N: Into<LockName>>(
        &self,
        name: N,
        once: impl Into<Once>,
    ) -> impl Future<Output = Result<()>> + Send {
        self.clone().removed(name.into(), Some(once.into()))
    }

    async fn removed(self, name: LockName, once: Option<Once>) -> Result<()> {
        name.check()?;
        let (answers, store) = (OnceSpace::default(), &self.service.node.store);
        let change = ("lock.remove", &name);
        let find = || answers.find(store, once.as_ref(), &change);
        let call = match find().await? {
            OnceFound::Answered(()) => return Ok(()),
            OnceFound::Anew(call) => call,
        };
        match self.service.ask(&name, Ask::Remove(call), None).await {
            // Another caller under the same key may have been faster.
            Err(error @ (LockError::Once(_) | LockError::NotFound { .. })) if once.is_some() => match find().await? {
                OnceFound::Answered(()) => Ok(()),
                OnceFound::Anew(_) => Err(error),
            },
            removed => removed.map(drop),
        }
    }
}
