//! Locks for code outside of workflows.

use std::future::pending;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{Either, select};
use tokio::sync::watch;

use crate::lock::error::{LockError, LockKind, Result};
use crate::lock::lane::{Answer, Ask, Ear, Gone, Heard, Want};
use crate::lock::service::Service;
use crate::lock::session::Session;
use crate::lock::{FencingToken, LockName};
use crate::node::session::LEASE;
use crate::node::{AGAIN, Node};
use crate::store::Store;

/// The locks of a store: for code outside of workflows, for sessions of one's own, and for operators.
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
    _stop: Option<Arc<StopOnDrop>>,
}

shown!(Locks, _it => );

/// A mutex or a semaphore, by its name. Nothing is stored until it is acquired.
///
/// A future of it owns what it needs, so it can be kept, spawned and joined:
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
/// let second = tokio::spawn(locks.mutex("nightly").acquire()); // waits in line
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

/// A read-write lock by its name. Nothing is stored until it is acquired.
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

/// How long a request waits in line.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Patience {
    /// Until it is granted.
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
    /// The locks of a store, without an engine. They are served on the runtime that this is called on, until the last
    /// handle is dropped.
    ///
    /// A lock that is released while an execution is next in line is granted when an engine starts on the store; beside
    /// an engine use [`Engine::locks`](crate::workflow::Engine::locks).
    pub async fn on(store: &Store) -> Result<Locks> {
        tokio::runtime::Handle::try_current().map_err(|_| LockError::NoRuntime)?;
        let node = Node::idle(store);
        let service = Service::on(&node).await?;
        service.sessions.end_previous().await?;
        service.begin_chores();
        Ok(Locks { _stop: Some(Arc::new(StopOnDrop(service.clone()))), service })
    }

    pub(crate) fn of(service: &Arc<Service>) -> Locks {
        Locks { service: service.clone(), _stop: None }
    }

    /// Ends all sessions that were begun here, and releases what they hold. To be called at the end of a program.
    pub fn shutdown(&self) -> impl Future<Output = Result<()>> + Send + use<> {
        let locks = self.clone();
        async move { Ok(locks.service.sessions.end_all().await?) }
    }
}

/// Stops the service of locks that no engine serves.
struct StopOnDrop(Arc<Service>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.node.stop();
        self.0.stop();
    }
}

impl Locks {
    fn lock(&self, name: LockName, kind: LockKind) -> Lock {
        Lock { service: self.service.clone(), name, kind, session: None, request: None }
    }

    /// The fencing token of a grant, from its parts: the lock's name and the token's number. It is not looked up; a
    /// commit that is guarded by a token that was never granted is refused.
    pub fn token(&self, name: impl Into<LockName>, number: u64) -> FencingToken {
        FencingToken { number, key: self.service.spaces.request(&name.into(), number) }
    }

    /// A mutex.
    pub fn mutex(&self, name: impl Into<LockName>) -> Lock {
        self.lock(name.into(), LockKind::Mutex)
    }

    /// A semaphore of so many permits.
    pub fn semaphore(&self, name: impl Into<LockName>, permits: u32) -> Lock {
        self.lock(name.into(), LockKind::Semaphore { permits })
    }

    /// A read-write lock: any number of readers or one writer, in the order in which they came.
    pub fn rw_lock(&self, name: impl Into<LockName>) -> ReadWriteLock {
        ReadWriteLock(self.lock(name.into(), LockKind::ReadWrite))
    }
}

impl Lock {
    /// Held by this session.
    pub fn by(mut self, session: &Session) -> Lock {
        self.session = Some(session.clone());
        self
    }

    /// Under this id: however often the session asks for it, it counts once.
    pub fn request(mut self, id: impl Into<String>) -> Lock {
        self.request = Some(id.into());
        self
    }

    /// Acquires the lock, or one permit, and waits for it as long as that takes. Requests are granted in the order in
    /// which they were made.
    pub fn acquire(&self) -> impl Future<Output = Result<LockGuard>> + Send + use<> {
        self.acquire_many(1)
    }

    /// Acquires several permits at once.
    pub fn acquire_many(&self, permits: u32) -> impl Future<Output = Result<LockGuard>> + Send + use<> {
        let lock = self.clone();
        async move { lock.take(permits, Patience::Endless).await?.ok_or(LockError::Stopped) }
    }

    /// Acquires the lock, or one permit, if that takes no longer than `limit`. Otherwise the request is withdrawn, and
    /// the answer is `None`.
    pub fn acquire_within(&self, limit: Duration) -> impl Future<Output = Result<Option<LockGuard>>> + Send + use<> {
        self.acquire_many_within(1, limit)
    }

    /// Acquires several permits at once, if that takes no longer than `limit`.
    pub fn acquire_many_within(
        &self,
        permits: u32,
        limit: Duration,
    ) -> impl Future<Output = Result<Option<LockGuard>>> + Send + use<> {
        self.clone().taken(permits, Patience::Within(limit))
    }

    /// Acquires the lock, or one permit, if that is possible at once. Otherwise the answer is `None`.
    pub fn try_acquire(&self) -> impl Future<Output = Result<Option<LockGuard>>> + Send + use<> {
        self.try_acquire_many(1)
    }

    /// Acquires several permits at once, if that is possible without waiting.
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
            Some(request) => [&[1], request.as_bytes()].concat(),
            None => [&[0], &env.uuid().as_bytes()[..]].concat(),
        };
        if id.len() > 257 {
            return Err(LockError::Name { name: self.name.to_string(), reason: "a request's id is at most 256 bytes" });
        }
        // A limit beyond the end of the clock is no limit.
        let until = patience.limit().and_then(|limit| env.monotonic().checked_add(limit));
        let mut is_known = self.request.is_some();
        loop {
            let session = match &self.session {
                Some(session) => session.clone(),
                None => self.service.own_session(LEASE).await?,
            };
            let ear: Ear = Arc::new(watch::Sender::new(Heard::Waits));
            let mut asked = Asked { lock: self, session, id: id.clone(), ear: ear.clone(), is_over: false };
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
                Ok(Answer::Granted(ticket)) => return Ok(Some(asked.granted(ticket, ear))),
                Ok(Answer::Queued(ticket)) => match asked.wait(ticket, ear, until).await {
                    Ok(Waited::Granted(guard)) => return Ok(Some(guard)),
                    Ok(Waited::TooLong) => return Ok(None),
                    Ok(Waited::LetGo) => {}
                    // It goes to the end of the line, with another.
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
                    // It may have landed.
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

/// A request that was made. If nobody waits for it any more, it is taken away.
struct Asked<'a> {
    lock: &'a Lock,
    session: Session,
    id: Vec<u8>,
    /// Hears what becomes of it.
    ear: Ear,
    is_over: bool,
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        if !self.is_over {
            self.ear.send_replace(Heard::Gone(Gone::LetGo));
            let (name, owner) = (self.lock.name.clone(), self.session.owner());
            self.lock.service.abandon(name, owner, std::mem::take(&mut self.id), self.ear.clone());
        }
    }
}

/// What a wait has come to.
enum Waited {
    Granted(LockGuard),
    TooLong,
    /// Somebody else who has made the same request does not want it any more.
    LetGo,
}

impl Asked<'_> {
    fn granted(mut self, ticket: u64, ear: Ear) -> LockGuard {
        self.is_over = true;
        let Lock { service, name, .. } = self.lock;
        let token = FencingToken { number: ticket, key: service.spaces.request(name, ticket) };
        let (service, lock) = (service.clone(), name.clone());
        LockGuard { service, lock, session: self.session.clone(), token, ear, is_released: false }
    }

    async fn wait(mut self, ticket: u64, ear: Ear, until: Option<Duration>) -> Result<Waited> {
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
            // Somebody else who has made the same request waits on.
            if service.is_left_to_others(&self.lock.name, ticket, &ear) {
                self.is_over = true;
                return Ok(Waited::TooLong);
            }
            match service.ask(&self.lock.name, Ask::Withdraw { ticket }, None).await? {
                Answer::Granted(_) => return Ok(Waited::Granted(self.granted(ticket, ear))),
                Answer::Withdrawn => {
                    self.is_over = true;
                    return Ok(Waited::TooLong);
                }
                _ => {}
            }
        }
        let heard = ear.borrow().clone();
        if let Heard::Granted = heard {
            return Ok(Waited::Granted(self.granted(ticket, ear)));
        }
        self.is_over = true;
        match heard {
            Heard::Gone(Gone::Refused(why)) => Err(why.into()),
            Heard::Gone(Gone::LetGo) => Ok(Waited::LetGo),
            _ if service.node.is_stopped() => Err(LockError::Stopped),
            _ => Err(LockError::SessionLost { session: self.session.id().to_string() }),
        }
    }
}

impl ReadWriteLock {
    /// Held by this session.
    pub fn by(self, session: &Session) -> ReadWriteLock {
        ReadWriteLock(self.0.by(session))
    }

    /// Under this id: however often the session asks for it, it counts once.
    pub fn request(self, id: impl Into<String>) -> ReadWriteLock {
        ReadWriteLock(self.0.request(id))
    }

    /// Acquires it beside other readers.
    pub fn read(&self) -> impl Future<Output = Result<LockGuard>> + Send + use<> {
        self.0.acquire_many(1)
    }

    /// Acquires it alone.
    pub fn write(&self) -> impl Future<Output = Result<LockGuard>> + Send + use<> {
        self.0.acquire_many(self.0.kind.capacity())
    }

    /// Acquires it beside other readers, if that takes no longer than `limit`.
    pub fn read_within(&self, limit: Duration) -> impl Future<Output = Result<Option<LockGuard>>> + Send + use<> {
        self.0.acquire_many_within(1, limit)
    }

    /// Acquires it alone, if that takes no longer than `limit`.
    pub fn write_within(&self, limit: Duration) -> impl Future<Output = Result<Option<LockGuard>>> + Send + use<> {
        self.0.acquire_many_within(self.0.kind.capacity(), limit)
    }

    /// Acquires it beside other readers, if that is possible at once.
    pub fn try_read(&self) -> impl Future<Output = Result<Option<LockGuard>>> + Send + use<> {
        self.0.try_acquire_many(1)
    }

    /// Acquires it alone, if that is possible at once.
    pub fn try_write(&self) -> impl Future<Output = Result<Option<LockGuard>>> + Send + use<> {
        self.0.try_acquire_many(self.0.kind.capacity())
    }
}

/// A lock that is held. Dropping it releases it soon; [`LockGuard::release`] returns when it is released.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use latchwork::lock::Locks;
/// use latchwork::store::Store;
///
/// let locks = Locks::on(&Store::memory().await?).await?;
/// let guard = locks.semaphore("vendor", 3).acquire_many(2).await?;
/// let token = guard.token().clone(); // for code that writes on behalf of the holder
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
    /// The token of this grant: larger than that of every earlier one. Guard commits with it, or hand its number on.
    pub fn token(&self) -> &FencingToken {
        &self.token
    }

    /// The lock's name.
    pub fn name(&self) -> &LockName {
        &self.lock
    }

    /// The session that holds it.
    pub fn session(&self) -> &Session {
        &self.session
    }

    /// Whether it is known to be lost.
    pub fn is_lost(&self) -> bool {
        matches!(*self.ear.borrow(), Heard::Gone(_))
    }

    /// Returns when the lock is lost: the lease was not renewed in time, an operator has forced its release, or the
    /// engine has stopped.
    pub async fn lost(&self) {
        let mut heard = self.ear.subscribe();
        let _ = heard.wait_for(|heard| matches!(heard, Heard::Gone(_))).await;
    }

    /// Releases the lock: whoever is next has it when this returns. Gives whether it was still held.
    pub async fn release(mut self) -> Result<bool> {
        let ask = Ask::Release { ticket: self.token.number, id: None };
        let answer = self.service.ask(&self.lock, ask, None).await?;
        self.is_released = true;
        Ok(matches!(answer, Answer::Released(true)))
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
