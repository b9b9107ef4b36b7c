//! Locks for code outside of workflows.

use std::future::pending;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{Either, select};
use tokio::sync::watch;

use crate::lock::error::{LockError, LockKind, Result};
use crate::lock::lane::{Ask, Ear, Gone, Heard, LockAnswer, Want};
use crate::lock::service::Service;
use crate::lock::session::Session;
use crate::lock::{FencingToken, LockName};
use crate::node::session::LEASE;
use crate::node::{AGAIN, Node};
use crate::store::Store;

/// The locks of a store: for code outside of workflows, for explicit sessions, and for operators.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use latchwork::lock::Locks;
/// use latchwork::store::Store;
///
/// let locks = Locks::on(&Store::memory().await?).await?;
/// let guard = locks.mutex("account-42").acquire().await?;
/// assert!(locks.mutex("account-42").try_acquire().await?.is_none());
/// guard.release().await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Locks {
    pub(crate) service: Arc<Service>,
    _stop: Option<Arc<StopServiceOnDrop>>,
}

shown!(Locks, _it => );

/// A mutex or a semaphore by name. Nothing is stored until it is acquired.
///
/// The futures of this type own what they need, so they can be stored, spawned and joined:
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
///
/// use latchwork::lock::Locks;
/// use latchwork::store::Store;
///
/// let locks = Locks::on(&Store::memory().await?).await?;
/// let first = locks.mutex("nightly").acquire().await?;
/// let second = tokio::spawn(locks.mutex("nightly").acquire()); // waits in the queue
/// let third = locks.mutex("nightly").acquire_within(Duration::from_millis(1)).await?;
/// assert!(third.is_none()); // it was not granted in time
/// first.release().await?;
/// second.await??.release().await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
#[must_use = "nothing is acquired until it is asked for"]
pub struct Lock {
    service: Arc<Service>,
    name: LockName,
    kind: LockKind,
    session: Option<Session>,
    request: Option<String>,
}

/// A read-write lock by name. Nothing is stored until it is acquired.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use std::time::Duration;
///
/// use latchwork::lock::Locks;
/// use latchwork::store::Store;
///
/// let locks = Locks::on(&Store::memory().await?).await?;
/// let (first, second) = (locks.rw_lock("config").read().await?, locks.rw_lock("config").read().await?);
/// assert!(locks.rw_lock("config").write_within(Duration::from_millis(1)).await?.is_none());
/// first.release().await?;
/// second.release().await?;
/// locks.rw_lock("config").write().await?.release().await?;
/// # Ok(()) }
/// ```
#[derive(Clone)]
#[must_use = "nothing is acquired until it is asked for"]
pub struct ReadWriteLock(Lock);

/// How long a request waits in the queue.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Patience {
    /// Until the request is granted.
    Endless,
    /// For this time.
    Within(Duration),
    /// Not at all.
    None,
}

impl Patience {
    pub(crate) fn waits(self) -> bool {
        !matches!(self, Patience::None)
    }

    pub(crate) fn limit(self) -> Option<Duration> {
        match self {
            Patience::Within(limit) => Some(limit),
            Patience::Endless | Patience::None => None,
        }
    }
}

impl Locks {
    /// Opens the locks of a store without an engine. They are served on the current runtime until the last handle is
    /// dropped.
    ///
    /// If a lock is released and the next waiter is an execution, the lock is granted when an engine starts on the
    /// store. Beside an engine, use [`Engine::locks`](crate::workflow::Engine::locks).
    ///
    /// ```
    /// # use latchwork::lock::{Locks, Result};
    /// # use latchwork::store::Store;
    /// # async fn example(store: Store) -> Result<()> {
    /// let locks = Locks::on(&store).await?;
    /// # Ok(()) }
    /// ```
    pub async fn on(store: &Store) -> Result<Locks> {
        tokio::runtime::Handle::try_current().map_err(|_| LockError::NoRuntime)?;
        let node = Node::idle(store).await?;
        let service = Service::on(&node).await?;
        service.sessions.end_previous().await?;
        service.begin_chores();
        service.overhear();
        Ok(Locks { _stop: Some(Arc::new(StopServiceOnDrop(service.clone()))), service })
    }

    pub(crate) fn served_by(service: &Arc<Service>) -> Locks {
        Locks { service: service.clone(), _stop: None }
    }

    /// Ends all sessions that were begun here, and releases what they hold. Call it at the end of a program.
    ///
    /// ```
    /// # use latchwork::lock::{Locks, Result};
    /// # async fn example(locks: Locks) -> Result<()> {
    /// locks.shutdown().await?;
    /// # Ok(()) }
    /// ```
    pub fn shutdown(&self) -> impl Future<Output = Result<()>> + Send + use<> {
        let locks = self.clone();
        async move { Ok(locks.service.sessions.end_all().await?) }
    }
}

/// Stops a lock service that has no engine, with the last handle.
struct StopServiceOnDrop(Arc<Service>);

impl Drop for StopServiceOnDrop {
    fn drop(&mut self) {
        self.0.node.stop();
        self.0.stop();
    }
}

impl Locks {
    fn lock(&self, name: LockName, kind: LockKind) -> Lock {
        Lock { service: self.service.clone(), name, kind, session: None, request: None }
    }

    /// Makes the fencing token of a grant from the lock's name and the token's number, as [`LockGuard::token`] gave it.
    /// The token is not looked up. A commit that it guards is refused once the grant is over. Do not guess numbers: a
    /// request that still waits has a number, too.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::lock::Locks;
    /// # use latchwork::store::Store;
    /// # let locks = Locks::on(&Store::memory().await?).await?;
    /// let guard = locks.mutex("nightly").acquire().await?;
    /// let number = guard.token().number(); // sent to another program
    /// assert_eq!(locks.token("nightly", number), *guard.token());
    /// # Ok(()) }
    /// ```
    pub fn token(&self, name: impl Into<LockName>, number: u64) -> FencingToken {
        FencingToken { number, key: self.service.spaces.request(&name.into(), number) }
    }

    /// A mutex.
    ///
    /// ```
    /// # use latchwork::lock::{Locks, Result};
    /// # async fn example(locks: Locks) -> Result<()> {
    /// let guard = locks.mutex("account-42").acquire().await?;
    /// # Ok(()) }
    /// ```
    pub fn mutex(&self, name: impl Into<LockName>) -> Lock {
        self.lock(name.into(), LockKind::Mutex)
    }

    /// A semaphore with this number of permits.
    ///
    /// ```
    /// # use latchwork::lock::{Locks, Result};
    /// # async fn example(locks: Locks) -> Result<()> {
    /// let guard = locks.semaphore("vendor", 3).acquire().await?;
    /// # Ok(()) }
    /// ```
    pub fn semaphore(&self, name: impl Into<LockName>, permits: u32) -> Lock {
        self.lock(name.into(), LockKind::Semaphore { permits })
    }

    /// A read-write lock: any number of readers or one writer, granted in the order of the requests.
    ///
    /// ```
    /// # use latchwork::lock::{Locks, Result};
    /// # async fn example(locks: Locks) -> Result<()> {
    /// let guard = locks.rw_lock("config").read().await?;
    /// # Ok(()) }
    /// ```
    pub fn rw_lock(&self, name: impl Into<LockName>) -> ReadWriteLock {
        ReadWriteLock(self.lock(name.into(), LockKind::ReadWrite))
    }
}

impl Lock {
    /// Acquires for this session.
    ///
    /// ```
    /// # use latchwork::lock::{Locks, Result, Session};
    /// # async fn example(locks: Locks, importer: Session) -> Result<()> {
    /// let guard = locks.mutex("import").by(&importer).acquire().await?;
    /// # Ok(()) }
    /// ```
    pub fn by(mut self, session: &Session) -> Lock {
        self.session = Some(session.clone());
        self
    }

    /// Sets the id of the request. However often the session makes a request with this id, it counts once.
    ///
    /// ```
    /// # use latchwork::lock::{Locks, Result, Session};
    /// # async fn example(locks: Locks, importer: Session) -> Result<()> {
    /// let guard = locks.mutex("import").by(&importer).request("file-7").acquire().await?;
    /// # Ok(()) }
    /// ```
    pub fn request(mut self, id: impl Into<String>) -> Lock {
        self.request = Some(id.into());
        self
    }

    /// Acquires the lock, or one permit. Waits until the request is granted. Requests are granted in the order in which
    /// they were made.
    ///
    /// ```
    /// # use latchwork::lock::{Locks, Result};
    /// # async fn example(locks: Locks) -> Result<()> {
    /// let guard = locks.mutex("account-42").acquire().await?;
    /// println!("token {}", guard.token().number());
    /// guard.release().await?;
    /// # Ok(()) }
    /// ```
    pub fn acquire(&self) -> impl Future<Output = Result<LockGuard>> + Send + use<> {
        self.acquire_many(1)
    }

    /// Acquires several permits at once.
    ///
    /// ```
    /// # use latchwork::lock::{Locks, Result};
    /// # async fn example(locks: Locks) -> Result<()> {
    /// let guard = locks.semaphore("vendor", 3).acquire_many(2).await?;
    /// # Ok(()) }
    /// ```
    pub fn acquire_many(&self, permits: u32) -> impl Future<Output = Result<LockGuard>> + Send + use<> {
        let lock = self.clone();
        async move { lock.take(permits, Patience::Endless).await?.ok_or(LockError::Stopped) }
    }

    /// Acquires the lock, or one permit, if that takes no longer than `limit`. Otherwise the request is withdrawn, and
    /// this returns `None`.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::lock::{Locks, Result};
    /// # async fn example(locks: Locks) -> Result<()> {
    /// match locks.mutex("account-42").acquire_within(Duration::from_secs(5)).await? {
    ///     Some(guard) => println!("token {}", guard.token().number()),
    ///     None => println!("it is still held"),
    /// }
    /// # Ok(()) }
    /// ```
    pub fn acquire_within(&self, limit: Duration) -> impl Future<Output = Result<Option<LockGuard>>> + Send + use<> {
        self.acquire_many_within(1, limit)
    }

    /// Acquires several permits at once, if that takes no longer than `limit`.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::lock::{Locks, Result};
    /// # async fn example(locks: Locks) -> Result<()> {
    /// let guard = locks.semaphore("vendor", 3).acquire_many_within(2, Duration::from_secs(5)).await?;
    /// # Ok(()) }
    /// ```
    pub fn acquire_many_within(
        &self,
        permits: u32,
        limit: Duration,
    ) -> impl Future<Output = Result<Option<LockGuard>>> + Send + use<> {
        self.clone().taken(permits, Patience::Within(limit))
    }

    /// Acquires the lock, or one permit, if that is possible at once. Otherwise returns `None`.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::lock::Locks;
    /// # use latchwork::store::Store;
    /// # let locks = Locks::on(&Store::memory().await?).await?;
    /// let guard = locks.mutex("account-42").try_acquire().await?;
    /// assert!(guard.is_some());
    /// assert!(locks.mutex("account-42").try_acquire().await?.is_none());
    /// # Ok(()) }
    /// ```
    pub fn try_acquire(&self) -> impl Future<Output = Result<Option<LockGuard>>> + Send + use<> {
        self.try_acquire_many(1)
    }

    /// Acquires several permits at once, if that is possible without waiting.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::lock::Locks;
    /// # use latchwork::store::Store;
    /// # let locks = Locks::on(&Store::memory().await?).await?;
    /// let guard = locks.semaphore("vendor", 3).try_acquire_many(2).await?;
    /// assert!(guard.is_some());
    /// assert!(locks.semaphore("vendor", 3).try_acquire_many(2).await?.is_none());
    /// # Ok(()) }
    /// ```
    pub fn try_acquire_many(&self, permits: u32) -> impl Future<Output = Result<Option<LockGuard>>> + Send + use<> {
        self.clone().taken(permits, Patience::None)
    }

    async fn taken(self, permits: u32, patience: Patience) -> Result<Option<LockGuard>> {
        self.take(permits, patience).await
    }

    async fn take(&self, permits: u32, patience: Patience) -> Result<Option<LockGuard>> {
        self.name.check()?;
        let env = self.service.node.store.env();
        let id = match &self.request {
            Some(request) => request_id(&self.name, request)?,
            None => [&[0], &env.uuid().as_bytes()[..]].concat(),
        };
        // A limit beyond the end of the clock counts as no limit.
        let until = patience.limit().and_then(|limit| env.monotonic().checked_add(limit));
        let mut is_known = self.request.is_some();
        loop {
            let session = match &self.session {
                Some(session) => session.clone(),
                None => self.service.own_session(LEASE).await?,
            };
            let ear: Ear = Arc::new(watch::Sender::new(Heard::Waits));
            let mut asked = SentRequest { lock: self, session, id: id.clone(), ear: ear.clone(), is_over: false };
            let want = Want {
                owner: asked.session.owner(),
                kind: self.kind,
                permits,
                id: id.clone(),
                is_known,
                waits: patience.waits(),
                is_reentrant: false,
                ear: Some(ear.clone()),
            };
            let answer = self.service.ask(&self.name, Ask::Acquire(want), None).await;
            match answer {
                Ok(LockAnswer::Granted(ticket)) => return Ok(Some(asked.granted(ticket, ear))),
                Ok(LockAnswer::Queued(ticket)) => match asked.wait(ticket, ear, until).await {
                    Ok(LockWaitEnd::Granted(guard)) => return Ok(Some(guard)),
                    Ok(LockWaitEnd::TooLong) => return Ok(None),
                    Ok(LockWaitEnd::LetGo) => {}
                    // The request goes to the end of the queue, with a new session.
                    Err(LockError::SessionLost { .. }) if self.session.is_none() => is_known = self.request.is_some(),
                    Err(error) => return Err(error),
                },
                Ok(_) => {
                    asked.is_over = true;
                    return Ok(None);
                }
                Err(LockError::SessionLost { .. }) if self.session.is_none() => {
                    asked.is_over = true;
                    is_known = self.request.is_some();
                    self.service.sessions.forget_own(asked.session.id());
                }
                Err(LockError::Store(error)) if error.is_passing() => {
                    // The commit may have landed.
                    is_known = true;
                    if until.is_some_and(|until| until <= env.monotonic()) {
                        return Err(error.into());
                    }
                    env.sleep(AGAIN).await;
                    asked.is_over = true;
                }
                Err(error) => {
                    asked.is_over = !matches!(error, LockError::Store(_));
                    return Err(error);
                }
            }
        }
    }
}

/// The name of a session's request, for an id that its caller chose.
pub(super) fn request_id(lock: &LockName, id: &str) -> Result<Vec<u8>> {
    match id.len() {
        ..=256 => Ok([&[1], id.as_bytes()].concat()),
        _ => Err(LockError::Name { name: lock.to_string(), reason: "a request's id is longer than 256 bytes" }),
    }
}

/// A request that was made. If its caller gives up, it is abandoned.
struct SentRequest<'a> {
    lock: &'a Lock,
    session: Session,
    id: Vec<u8>,
    /// Notified of what becomes of the request.
    ear: Ear,
    is_over: bool,
}

impl Drop for SentRequest<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            self.ear.send_replace(Heard::Gone(Gone::LetGo));
            let (name, owner) = (self.lock.name.clone(), self.session.owner());
            self.lock.service.abandon(name, owner, std::mem::take(&mut self.id), self.ear.clone());
        }
    }
}

/// The result of a wait.
enum LockWaitEnd {
    Granted(LockGuard),
    TooLong,
    /// Another caller of the same request has released it.
    LetGo,
}

impl SentRequest<'_> {
    fn granted(mut self, ticket: u64, ear: Ear) -> LockGuard {
        self.is_over = true;
        let Lock { service, name, .. } = self.lock;
        let token = FencingToken { number: ticket, key: service.spaces.request(name, ticket) };
        let (service, lock) = (service.clone(), name.clone());
        LockGuard { service, lock, session: self.session.clone(), token, ear, is_released: false }
    }

    async fn wait(mut self, ticket: u64, ear: Ear, until: Option<Duration>) -> Result<LockWaitEnd> {
        let service = &self.lock.service;
        let env = service.node.store.env();
        let mut heard = ear.subscribe();
        let is_in_time = {
            let told = pin!(heard.wait_for(|heard| !matches!(heard, Heard::Waits)));
            let too_late = pin!(async {
                match until {
                    Some(until) => env.sleep(until.saturating_sub(env.monotonic())).await,
                    None => pending().await,
                }
            });
            let first = select(told, too_late).await;
            matches!(first, Either::Left(_))
        };
        if !is_in_time {
            // Another caller of the same request still waits.
            if service.is_left_to_others(&self.lock.name, ticket, &ear) {
                self.is_over = true;
                return Ok(LockWaitEnd::TooLong);
            }
            match service.ask(&self.lock.name, Ask::Withdraw { ticket }, None).await? {
                LockAnswer::Granted(_) => return Ok(LockWaitEnd::Granted(self.granted(ticket, ear))),
                LockAnswer::Withdrawn => {
                    self.is_over = true;
                    return Ok(LockWaitEnd::TooLong);
                }
                _ => {}
            }
        }
        let heard = ear.borrow().clone();
        if let Heard::Granted = heard {
            return Ok(LockWaitEnd::Granted(self.granted(ticket, ear)));
        }
        self.is_over = true;
        match heard {
            Heard::Gone(Gone::Refused(why)) => Err(why.into()),
            Heard::Gone(Gone::LetGo) => Ok(LockWaitEnd::LetGo),
            _ if service.node.is_stopped() => Err(LockError::Stopped),
            _ => Err(LockError::SessionLost { session: self.session.id().to_string() }),
        }
    }
}

impl ReadWriteLock {
    /// Acquires for this session.
    ///
    /// ```
    /// # use latchwork::lock::{Locks, Result, Session};
    /// # async fn example(locks: Locks, importer: Session) -> Result<()> {
    /// let guard = locks.rw_lock("config").by(&importer).read().await?;
    /// # Ok(()) }
    /// ```
    pub fn by(self, session: &Session) -> ReadWriteLock {
        ReadWriteLock(self.0.by(session))
    }

    /// Sets the id of the request. However often the session makes a request with this id, it counts once.
    ///
    /// ```
    /// # use latchwork::lock::{Locks, Result, Session};
    /// # async fn example(locks: Locks, importer: Session) -> Result<()> {
    /// let guard = locks.rw_lock("config").by(&importer).request("reload-7").write().await?;
    /// # Ok(()) }
    /// ```
    pub fn request(self, id: impl Into<String>) -> ReadWriteLock {
        ReadWriteLock(self.0.request(id))
    }

    /// Acquires the lock for reading, shared with other readers.
    ///
    /// ```
    /// # use latchwork::lock::{Locks, Result};
    /// # async fn example(locks: Locks) -> Result<()> {
    /// let guard = locks.rw_lock("config").read().await?;
    /// # Ok(()) }
    /// ```
    pub fn read(&self) -> impl Future<Output = Result<LockGuard>> + Send + use<> {
        self.0.acquire_many(1)
    }

    /// Acquires the lock for writing, alone.
    ///
    /// ```
    /// # use latchwork::lock::{Locks, Result};
    /// # async fn example(locks: Locks) -> Result<()> {
    /// let guard = locks.rw_lock("config").write().await?;
    /// # Ok(()) }
    /// ```
    pub fn write(&self) -> impl Future<Output = Result<LockGuard>> + Send + use<> {
        self.0.acquire_many(self.0.kind.capacity())
    }

    /// Acquires the lock for reading, if that takes no longer than `limit`.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::lock::{Locks, Result};
    /// # async fn example(locks: Locks) -> Result<()> {
    /// let guard = locks.rw_lock("config").read_within(Duration::from_secs(5)).await?;
    /// # Ok(()) }
    /// ```
    pub fn read_within(&self, limit: Duration) -> impl Future<Output = Result<Option<LockGuard>>> + Send + use<> {
        self.0.acquire_many_within(1, limit)
    }

    /// Acquires the lock for writing, if that takes no longer than `limit`.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::lock::{Locks, Result};
    /// # async fn example(locks: Locks) -> Result<()> {
    /// let guard = locks.rw_lock("config").write_within(Duration::from_secs(5)).await?;
    /// # Ok(()) }
    /// ```
    pub fn write_within(&self, limit: Duration) -> impl Future<Output = Result<Option<LockGuard>>> + Send + use<> {
        self.0.acquire_many_within(self.0.kind.capacity(), limit)
    }

    /// Acquires the lock for reading, if that is possible at once.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::lock::Locks;
    /// # use latchwork::store::Store;
    /// # let locks = Locks::on(&Store::memory().await?).await?;
    /// let first = locks.rw_lock("config").try_read().await?;
    /// let second = locks.rw_lock("config").try_read().await?;
    /// assert!(first.is_some() && second.is_some());
    /// # Ok(()) }
    /// ```
    pub fn try_read(&self) -> impl Future<Output = Result<Option<LockGuard>>> + Send + use<> {
        self.0.try_acquire_many(1)
    }

    /// Acquires the lock for writing, if that is possible at once.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::lock::Locks;
    /// # use latchwork::store::Store;
    /// # let locks = Locks::on(&Store::memory().await?).await?;
    /// let reader = locks.rw_lock("config").read().await?;
    /// assert!(locks.rw_lock("config").try_write().await?.is_none());
    /// # Ok(()) }
    /// ```
    pub fn try_write(&self) -> impl Future<Output = Result<Option<LockGuard>>> + Send + use<> {
        self.0.try_acquire_many(self.0.kind.capacity())
    }
}

/// A lock that is held. Dropping the guard releases the lock soon; [`LockGuard::release`] returns when it is released.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use latchwork::lock::Locks;
/// use latchwork::store::Store;
///
/// let locks = Locks::on(&Store::memory().await?).await?;
/// let guard = locks.semaphore("vendor", 3).acquire_many(2).await?;
/// let token = guard.token().clone(); // for code that writes for the holder
/// assert!(token.number() > 0 && !guard.is_lost());
/// assert!(guard.release().await?);
/// # Ok(()) }
/// ```
#[must_use = "a lock is released when its guard is dropped"]
pub struct LockGuard {
    service: Arc<Service>,
    lock: LockName,
    session: Session,
    token: FencingToken,
    ear: Ear,
    is_released: bool,
}

shown!(LockGuard, it => lock: it.lock, token: it.token.number);

impl LockGuard {
    /// The token of this grant, larger than that of every earlier grant. Guard commits with it, or pass its number on.
    ///
    /// ```
    /// # use latchwork::lock::LockGuard;
    /// # use latchwork::store::{Commit, Key};
    /// # fn example(guard: LockGuard, report: Key) {
    /// let commit = Commit::new().guard(guard.token()).put(&report, "done");
    /// # }
    /// ```
    pub fn token(&self) -> &FencingToken {
        &self.token
    }

    /// The lock's name.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::lock::{LockName, Locks};
    /// # use latchwork::store::Store;
    /// # let locks = Locks::on(&Store::memory().await?).await?;
    /// let guard = locks.mutex("nightly").acquire().await?;
    /// assert_eq!(guard.name(), &LockName::global("nightly"));
    /// # Ok(()) }
    /// ```
    pub fn name(&self) -> &LockName {
        &self.lock
    }

    /// The session that holds it.
    ///
    /// ```
    /// # use latchwork::lock::{LockGuard, Result};
    /// # async fn example(guard: LockGuard) -> Result<()> {
    /// println!("held by session {}", guard.session().id());
    /// # Ok(()) }
    /// ```
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// True if the lock is known to be lost.
    ///
    /// ```
    /// # use latchwork::lock::{LockGuard, Result};
    /// # async fn example(guard: LockGuard) -> Result<()> {
    /// if guard.is_lost() {
    ///     println!("another owner may hold the lock");
    /// }
    /// # Ok(()) }
    /// ```
    pub fn is_lost(&self) -> bool {
        matches!(*self.ear.borrow(), Heard::Gone(_))
    }

    /// Returns when the lock is lost: the lease was not renewed in time, an operator has released the lock, or the
    /// engine has stopped.
    ///
    /// ```
    /// # use latchwork::lock::{LockGuard, Result};
    /// # async fn example(guard: LockGuard) -> Result<()> {
    /// guard.lost().await;
    /// println!("another owner may hold the lock");
    /// # Ok(()) }
    /// ```
    pub async fn lost(&self) {
        let mut heard = self.ear.subscribe();
        let _ = heard.wait_for(|heard| matches!(heard, Heard::Gone(_))).await;
    }

    /// Releases the lock: when this returns, the next waiter holds it. Returns true if it was still held.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::lock::Locks;
    /// # use latchwork::store::Store;
    /// # let locks = Locks::on(&Store::memory().await?).await?;
    /// let guard = locks.mutex("nightly").acquire().await?;
    /// assert!(guard.release().await?);
    /// # Ok(()) }
    /// ```
    pub async fn release(mut self) -> Result<bool> {
        let ask = Ask::Release { ticket: self.token.number, id: None };
        let answer = self.service.ask(&self.lock, ask, None).await?;
        self.is_released = true;
        Ok(matches!(answer, LockAnswer::Released(true)))
    }
}

impl Drop for LockGuard {
    fn drop(&mut self) {
        if self.is_released || self.service.node.is_stopped() {
            return;
        }
        self.service.release_at_last(self.lock.clone(), self.token.number, self.session.clone());
    }
}
