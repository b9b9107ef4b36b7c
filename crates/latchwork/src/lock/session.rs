//! Sessions: what is held by code outside of workflows is held by a session, as long as its lease is renewed.
//!
//! Whether a lease is over is for others to say, by a clock that only goes forward: they have seen the same rev of the
//! session's record for as long as the lease. So no jump of a clock ends one early, and after a restart everybody has a
//! full lease again.

use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;

use crate::errand::Awaited;
use crate::lock::error::{LockError, Result};
use crate::lock::lane::Ask;
use crate::lock::service::AGAIN;
use crate::lock::stored::Lease;
use crate::lock::{Locks, Owner};
use crate::record::Record;
use crate::store::{Commit, ErrorKind, Order, Outcome, Rev, StoreError, Uuid};
use crate::workflow::engine::Inner;

/// How long a lease is unless something else is said.
pub(crate) const LEASE: Duration = Duration::from_secs(30);

/// The shortest and the longest lease there can be.
const SHORTEST: Duration = Duration::from_millis(10);
const LONGEST: Duration = Duration::from_secs(366 * 24 * 3600);

/// Holds locks for code outside of workflows. When the last handle is dropped, everything it holds is released.
#[derive(Clone)]
pub struct Session {
    pub(crate) shared: Arc<Shared>,
}

pub(crate) struct Shared {
    engine: Arc<Inner>,
    pub(crate) id: Uuid,
    lease: Duration,
    /// Whether it is lost.
    lost: watch::Sender<bool>,
    /// When the last renewal that has landed was begun, by the clock that only goes forward.
    renewed: Mutex<Duration>,
}

/// A session that is about to begin.
#[must_use = "a session begins when this is awaited"]
pub struct SessionBuilder {
    engine: Arc<Inner>,
    lease: Duration,
    label: String,
    renews: bool,
    /// Whether it ends by itself when nothing is held by it.
    is_shared: bool,
}

/// A session as others see it.
pub(crate) struct Watched {
    rev: Rev,
    lease: Duration,
    /// Since when it was seen at that rev.
    since: Duration,
}

impl Locks {
    /// A session of its own: its locks are released together, and lost together.
    pub fn session(&self) -> SessionBuilder {
        SessionBuilder::new(self.engine.clone())
    }
}

impl SessionBuilder {
    fn new(engine: Arc<Inner>) -> SessionBuilder {
        let label = format!("process {}", std::process::id());
        SessionBuilder { engine, lease: LEASE, label, renews: true, is_shared: false }
    }

    /// How long it holds what it holds after its last renewal, at the least: 30 s unless this is said.
    pub fn lease(mut self, lease: Duration) -> SessionBuilder {
        self.lease = lease;
        self
    }

    /// What operators see of it.
    pub fn label(mut self, label: impl Into<String>) -> SessionBuilder {
        self.label = label.into();
        self
    }

    /// It is not renewed by itself: [`Session::renew`] has to be called well within the lease.
    pub fn renewed_by_hand(mut self) -> SessionBuilder {
        self.renews = false;
        self
    }

    /// Begins the session.
    pub async fn begin(self) -> Result<Session> {
        let runtime = self.engine.runtime.clone();
        Awaited::to_its_end(&runtime, self.begun()).await.unwrap_or(Err(LockError::Stopped))
    }

    async fn begun(self) -> Result<Session> {
        let SessionBuilder { engine, lease, label, renews, is_shared } = self;
        match lease {
            lease if lease < SHORTEST => return Err(LockError::Lease { lease, reason: "it is shorter than 10 ms" }),
            lease if lease > LONGEST => return Err(LockError::Lease { lease, reason: "it is longer than a year" }),
            _ => {}
        }
        if label.len() > 512 {
            let reason = "the session's label is longer than 512 bytes";
            return Err(LockError::Name { name: label, reason });
        }
        if engine.is_stopped() {
            return Err(LockError::Stopped);
        }
        let env = engine.store.env();
        let (id, now, began) = (env.uuid(), env.now().0, env.monotonic());
        let record = Lease { label, lease_us: lease.as_micros() as u64, since_us: now, renewed_us: now };
        let key = engine.locks.spaces.session(id);
        let commit = Commit::new().check(engine.shard_of(id.as_bytes())).put(&key, record.encode());
        let receipt = engine.store.commit(commit).await?.applied().map_err(|_| LockError::Stopped)?;
        let (lost, renewed) = (watch::Sender::new(false), Mutex::new(began));
        engine.locks.begun.lock().insert(id);
        let shared = Arc::new(Shared { engine: engine.clone(), id, lease, lost, renewed });
        if renews {
            engine.runtime.spawn(keep(Arc::downgrade(&shared), is_shared));
        } else {
            let rev = receipt.revs.first().copied().flatten().unwrap_or_default();
            engine.watch(id, Watched { rev, lease, since: env.monotonic() });
        }
        Ok(Session { shared })
    }
}

impl Session {
    /// Names it.
    pub fn id(&self) -> Uuid {
        self.shared.id
    }

    /// Renews the lease. `false` if it is lost: others may have had everything since.
    pub async fn renew(&self) -> Result<bool> {
        self.shared.renew().await
    }

    /// Whether it is lost.
    pub fn is_lost(&self) -> bool {
        *self.shared.lost.borrow()
    }

    /// Ends the session: releases everything it holds, and withdraws what it waits for.
    pub async fn end(self) -> Result<()> {
        self.shared.lose();
        self.shared.leave();
        self.shared.engine.end_session(self.shared.id, None).await
    }
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").field("id", &self.shared.id).finish_non_exhaustive()
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if *self.lost.borrow() || self.engine.is_stopped() {
            return;
        }
        let (engine, id) = (self.engine.clone(), self.id);
        self.engine.runtime.spawn(async move { engine.end_session_at_last(id).await });
    }
}

impl Shared {
    pub(crate) fn owner(&self) -> Owner {
        Owner::Session(self.id)
    }

    /// It is lost, and so is what it holds.
    fn lose(&self) {
        self.lost.send_replace(true);
        self.engine.locks.lose(self.id);
    }

    /// Nobody renews it any more: unless it is ended before, it ends when it has not been renewed for its lease.
    fn leave(&self) {
        let (rev, since) = (Rev::default(), *self.renewed.lock());
        self.engine.watch(self.id, Watched { rev, lease: self.lease, since });
    }

    async fn renew(&self) -> Result<bool> {
        let engine = &self.engine;
        let (env, key) = (engine.store.env(), engine.locks.spaces.session(self.id));
        let began = env.monotonic();
        let item = engine.store.view().await?.get(&key).await?;
        let Some(record) = item.and_then(|item| Lease::decode(&item.value).ok()) else {
            self.lose();
            return Ok(false);
        };
        let record = Lease { renewed_us: env.now().0, ..record };
        let commit = Commit::new().present(&key).check(engine.shard_of(self.id.as_bytes()));
        match engine.store.commit(commit.put(&key, record.encode())).await? {
            Outcome::Applied(receipt) => {
                *self.renewed.lock() = began;
                let rev = receipt.revs.first().copied().flatten().unwrap_or_default();
                if let Some(watched) = engine.locks.watched.lock().get_mut(&self.id) {
                    (watched.rev, watched.since) = (rev, env.monotonic());
                }
                Ok(true)
            }
            Outcome::Refused(_) => {
                self.lose();
                Ok(false)
            }
        }
    }
}

/// Renews a session until it is lost or nobody wants it any more.
async fn keep(session: Weak<Shared>, is_shared: bool) {
    let Some(lease) = session.upgrade().map(|session| session.lease) else { return };
    loop {
        let Some(env) = session.upgrade().map(|session| session.engine.store.env().clone()) else { return };
        env.sleep(lease / 3).await;
        let Some(session) = session.upgrade() else { return };
        if *session.lost.borrow() || session.engine.is_stopped() {
            return;
        }
        if is_shared && session.engine.retire(&session) {
            return session.engine.end_session_at_last(session.id).await;
        }
        while let Err(error) = session.renew().await {
            // Others may take over from then on.
            let since = env.monotonic().saturating_sub(*session.renewed.lock());
            if since >= lease || matches!(error, LockError::Store(StoreError::Closed)) {
                tracing::warn!(session = %session.id, %error, "the lease could not be renewed");
                session.lose();
                return session.leave();
            }
            env.sleep(AGAIN.min(lease / 10)).await;
        }
    }
}

impl Inner {
    /// The session of those who have none of their own.
    pub(crate) async fn own_session(self: &Arc<Inner>) -> Result<Session> {
        if let Some(session) = self.locks.own() {
            return Ok(session);
        }
        // In a task, so that whoever has begun it and is not polled keeps nobody from it.
        let engine = self.clone();
        let begun = self.runtime.spawn(async move {
            let _beginning = engine.locks.beginning.lock().await;
            if let Some(session) = engine.locks.own() {
                return Ok(session);
            }
            let session = SessionBuilder { is_shared: true, ..SessionBuilder::new(engine.clone()) }.begun().await?;
            *engine.locks.own.lock() = Some(session.clone());
            if engine.is_stopped() {
                engine.locks.stop();
                return Err(LockError::Stopped);
            }
            Ok(session)
        });
        begun.await.unwrap_or(Err(LockError::Stopped))
    }

    /// Gives up the session of those who have none of their own, if nobody uses it.
    fn retire(&self, session: &Arc<Shared>) -> bool {
        // Whoever takes it does so under this lock.
        let mut own = self.locks.own.lock();
        // Guards, and those who wait for one, have a handle each; here are two.
        let is_unused = Arc::strong_count(session) <= 2;
        if is_unused {
            // There is another handle, so it does not end by this.
            drop(own.take_if(|own| own.id() == session.id));
            session.lost.send_replace(true);
        }
        is_unused
    }

    fn watch(&self, session: Uuid, watched: Watched) {
        self.locks.watched.lock().insert(session, watched);
        self.locks.watches.notify_one();
    }

    /// Ends all sessions that were begun here, and frees what they hold.
    pub(crate) async fn end_sessions(self: &Arc<Inner>) -> Result<()> {
        let own = self.locks.own.lock().take();
        drop(own);
        let begun = self.locks.begun.lock().clone();
        let mut ended = Ok(());
        for id in begun {
            ended = self.end_session(id, None).await.and(ended);
        }
        ended
    }

    /// Ends a session, if it is still at this rev, and frees what it holds.
    async fn end_session(self: &Arc<Inner>, id: Uuid, rev: Option<Rev>) -> Result<()> {
        let key = self.locks.spaces.session(id);
        let mut commit = Commit::new().check(self.shard_of(id.as_bytes())).delete(&key);
        if let Some(rev) = rev {
            commit = commit.at_rev(&key, rev);
        }
        match self.store.commit(commit).await? {
            Outcome::Applied(_) => {}
            Outcome::Refused(refusal) if refusal.failed.iter().any(|failed| failed.index == 0) => {
                self.fenced();
                return Err(LockError::Stopped);
            }
            // It was renewed.
            Outcome::Refused(_) => return Ok(()),
        }
        self.free_session(id).await?;
        self.locks.watched.lock().remove(&id);
        self.locks.begun.lock().remove(&id);
        Ok(())
    }

    /// Frees what a session holds that is no more.
    async fn free_session(self: &Arc<Inner>, id: Uuid) -> Result<()> {
        self.locks.lose(id);
        let owner = Owner::Session(id);
        for (lock, requests) in self.requests_of(&owner).await? {
            for (ticket, _) in requests {
                self.unless_damaged(self.ask(&lock, Ask::Release { ticket, id: None }, None).await)?;
            }
        }
        Ok(())
    }

    /// What a lock whose records are damaged holds is left as it is: others are not to suffer from it.
    pub(super) fn unless_damaged<T>(&self, done: Result<T>) -> Result<()> {
        match done {
            Err(error) if error.kind() == ErrorKind::Corrupt || matches!(error, LockError::UnknownVersion { .. }) => {
                tracing::error!(%error, "a lock could not be released");
                Ok(())
            }
            done => done.map(drop),
        }
    }

    /// Ends a session, however long the store does not serve.
    async fn end_session_at_last(self: &Arc<Inner>, id: Uuid) {
        self.at_last("a session could not be ended", || self.end_session(id, None)).await;
    }

    /// Sessions that an earlier process has left are given a full lease again.
    async fn watch_sessions(self: &Arc<Inner>) -> Result<()> {
        let spaces = &self.locks.spaces;
        let view = self.store.view().await?;
        let sessions = view.scan(&spaces.sessions.all(), Order::Ascending, usize::MAX).await?;
        // They were seen now, and not before it was looked.
        let now = self.store.env().monotonic();
        for (key, item) in sessions {
            if let (Ok(id), Ok(record)) = (Uuid::from_slice(key.bytes()), Lease::decode(&item.value)) {
                let lease = Duration::from_micros(record.lease_us);
                self.locks.watched.lock().insert(id, Watched { rev: item.rev, lease, since: now });
            }
        }
        // A session that is no more may have left something, if the process ended just then.
        let sessions = self.locks.spaces.owned.prefix([1]);
        let mut owners: Vec<Uuid> = Vec::new();
        for (key, _) in view.scan(&sessions, Order::Ascending, usize::MAX).await? {
            let id = key.bytes().get(1..17).and_then(|id| Uuid::from_slice(id).ok());
            owners.extend(id.filter(|id| owners.last() != Some(id)));
        }
        drop(view);
        for owner in owners {
            if !self.locks.watched.lock().contains_key(&owner) {
                self.free_session(owner).await?;
            }
        }
        for (key, _) in self.store.view().await?.scan(&spaces.unfinished.all(), Order::Ascending, usize::MAX).await? {
            match crate::lock::LockName::read(key.bytes()) {
                Some((lock, _)) => self.unless_damaged(self.ask(&lock, Ask::Grant, None).await)?,
                None => self.free_left(key),
            }
        }
        Ok(())
    }
}

/// Ends sessions that are not renewed.
pub(crate) async fn sweep(engine: Weak<Inner>) {
    let Some(env) = engine.upgrade().map(|engine| engine.store.env().clone()) else { return };
    loop {
        let Some(inner) = engine.upgrade() else { return };
        match inner.watch_sessions().await {
            Ok(()) => break,
            Err(_) if inner.is_stopped() => return,
            Err(_) => {}
        }
        drop(inner);
        env.sleep(AGAIN).await;
    }
    loop {
        let Some(inner) = engine.upgrade() else { return };
        let now = env.monotonic();
        let due = inner.locks.watched.lock().iter().map(|(id, watched)| (watched.since + watched.lease, *id)).min();
        if let Some((_, id)) = due.filter(|(due, _)| *due <= now) {
            if inner.look_at(id).await.is_err() {
                drop(inner);
                env.sleep(AGAIN).await;
            }
            continue;
        }
        let mut watches = std::pin::pin!(inner.locks.watches.notified());
        let mut sleep = due.map(|(due, _)| env.sleep(due.saturating_sub(now)));
        std::future::poll_fn(|context| {
            let is_due = sleep.as_mut().is_some_and(|sleep| sleep.as_mut().poll(context).is_ready());
            if is_due || watches.as_mut().poll(context).is_ready() {
                return std::task::Poll::Ready(());
            }
            std::task::Poll::Pending
        })
        .await;
    }
}

impl Inner {
    /// Looks whether a session was renewed; if not, it ends.
    async fn look_at(self: &Arc<Inner>, id: Uuid) -> Result<()> {
        let item = self.store.view().await?.get(&self.locks.spaces.session(id)).await?;
        let now = self.store.env().monotonic();
        let is_over = {
            let mut watched = self.locks.watched.lock();
            match (watched.get_mut(&id), item) {
                (None, _) => return Ok(()),
                (Some(known), Some(item)) if known.rev != item.rev => {
                    (known.rev, known.since) = (item.rev, now);
                    return Ok(());
                }
                // It was renewed while it was looked.
                (Some(known), Some(_)) if known.since + known.lease > now => return Ok(()),
                (Some(known), Some(_)) => Some(known.rev),
                (Some(_), None) => None,
            }
        };
        match is_over {
            Some(rev) => {
                tracing::info!(session = %id, "a session was not renewed, and has lost its locks");
                self.end_session(id, Some(rev)).await
            }
            None => {
                self.free_session(id).await?;
                self.locks.watched.lock().remove(&id);
                Ok(())
            }
        }
    }
}
