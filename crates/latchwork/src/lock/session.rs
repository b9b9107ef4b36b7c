//! Sessions: what is held by code outside of workflows is held by a session, as long as its lease is renewed.
//!
//! Whether a lease is over is for others to say, by a clock that only goes forward: they have seen the same rev of the
//! session's record for as long as the lease. So no jump of a clock ends one early, and after a restart everybody has a
//! full lease again.

use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::watch;

use crate::damage::{Scanned, scan_around};
use crate::lane::{Part, Tag};
use crate::lock::error::{LockError, Result};
use crate::lock::lane::Ask;
use crate::lock::name::Spaces;
use crate::lock::service::{AGAIN, Service};
use crate::lock::stored::Lease;
use crate::lock::{Locks, Owner};
use crate::node::SHARD;
use crate::record::{Record, Unreadable};
use crate::store::{Check, Commit, ErrorKind, Outcome, Receipt, Rev, StoreError, Uuid};

/// The session is as it is known, or there at all.
const PRESENT: Tag = Tag("present");

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
    service: Arc<Service>,
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
    service: Arc<Service>,
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
        SessionBuilder::new(self.service.clone())
    }
}

impl SessionBuilder {
    fn new(service: Arc<Service>) -> SessionBuilder {
        let label = format!("process {}", std::process::id());
        SessionBuilder { service, lease: LEASE, label, renews: true, is_shared: false }
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
        let runtime = self.service.node.runtime.clone();
        runtime.run(self.begun()).await.unwrap_or(Err(LockError::Stopped))
    }

    async fn begun(self) -> Result<Session> {
        let SessionBuilder { service, lease, label, renews, is_shared } = self;
        match lease {
            lease if lease < SHORTEST => return Err(LockError::Lease { lease, reason: "it is shorter than 10 ms" }),
            lease if lease > LONGEST => return Err(LockError::Lease { lease, reason: "it is longer than a year" }),
            _ => {}
        }
        if label.len() > 512 {
            let reason = "the session's label is longer than 512 bytes";
            return Err(LockError::Name { name: label, reason });
        }
        if service.node.is_stopped() {
            return Err(LockError::Stopped);
        }
        let env = service.node.store.env();
        let (id, now, began) = (env.uuid(), env.now().0, env.monotonic());
        let (lease_us, opening) = (lease.as_micros() as u64, service.node.store.opening());
        let record = Lease { label, lease_us, since_us: now, renewed_us: now, opening };
        let key = service.spaces.session(id);
        let part = service.node.for_any(id.as_bytes()).put(&key, record.encode());
        let receipt = service.session_commit(part).await?.map_err(|_| LockError::Stopped)?;
        let (lost, renewed) = (watch::Sender::new(false), Mutex::new(began));
        service.begun.lock().insert(id);
        let shared = Arc::new(Shared { service: service.clone(), id, lease, lost, renewed });
        if renews {
            service.node.runtime.spawn(keep(Arc::downgrade(&shared), is_shared));
        } else {
            let rev = receipt.revs.first().copied().flatten().unwrap_or_default();
            service.watch(id, Watched { rev, lease, since: env.monotonic() });
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
        self.shared.service.end_session(self.shared.id, None).await
    }
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session").field("id", &self.shared.id).finish_non_exhaustive()
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if *self.lost.borrow() || self.service.node.is_stopped() {
            return;
        }
        let (service, id) = (self.service.clone(), self.id);
        self.service.node.runtime.spawn(async move { service.end_session_at_last(id).await });
    }
}

impl Shared {
    pub(crate) fn owner(&self) -> Owner {
        Owner::Session(self.id)
    }

    /// It is lost, and so is what it holds.
    fn lose(&self) {
        self.lost.send_replace(true);
        self.service.lose(self.id);
    }

    /// Nobody renews it any more: unless it is ended before, it ends when it has not been renewed for its lease.
    fn leave(&self) {
        let (rev, since) = (Rev::default(), *self.renewed.lock());
        self.service.watch(self.id, Watched { rev, lease: self.lease, since });
    }

    async fn renew(&self) -> Result<bool> {
        let service = &self.service;
        let (env, key) = (service.node.store.env(), service.spaces.session(self.id));
        let began = env.monotonic();
        let Some(item) = service.node.store.view().await?.get(&key).await? else {
            self.lose();
            return Ok(false);
        };
        let Ok(record) = Lease::decode(&item.value) else {
            tracing::error!(session = %self.id, "the record of a session is damaged, and the session is lost");
            self.lose();
            self.leave();
            return Ok(false);
        };
        let record = Lease { renewed_us: env.now().0, ..record };
        let part = service.node.for_any(self.id.as_bytes()).check(PRESENT, Check::Present(key.clone()));
        match service.session_commit(part.put(&key, record.encode())).await? {
            Ok(receipt) => {
                *self.renewed.lock() = began;
                let rev = receipt.revs.first().copied().flatten().unwrap_or_default();
                if let Some(watched) = service.watched.lock().get_mut(&self.id) {
                    (watched.rev, watched.since) = (rev, env.monotonic());
                }
                Ok(true)
            }
            Err(_) => {
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
        let Some(env) = session.upgrade().map(|session| session.service.node.store.env().clone()) else { return };
        env.sleep(lease / 3).await;
        let Some(session) = session.upgrade() else { return };
        if *session.lost.borrow() || session.service.node.is_stopped() {
            return;
        }
        if is_shared && session.service.retire(&session) {
            return session.service.end_session_at_last(session.id).await;
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

impl Service {
    /// The session of this process with that lease.
    pub(crate) async fn own_session(self: &Arc<Service>, lease: Duration) -> Result<Session> {
        if let Some(session) = self.own(lease) {
            return Ok(session);
        }
        // In a task: a caller that has begun it and is not polled keeps no other caller from it.
        let service = self.clone();
        let begun = self.node.runtime.run(async move {
            let _beginning = service.beginning.lock().await;
            if let Some(session) = service.own(lease) {
                return Ok(session);
            }
            let begins = SessionBuilder { is_shared: true, lease, ..SessionBuilder::new(service.clone()) };
            let session = begins.begun().await?;
            let before = service.own.lock().insert(lease, session.clone());
            drop(before);
            if service.node.is_stopped() {
                service.stop();
                return Err(LockError::Stopped);
            }
            Ok(session)
        });
        begun.await.unwrap_or(Err(LockError::Stopped))
    }

    /// Sends a commit about a session. Gives what the check stands for that has failed, if one has.
    async fn session_commit(&self, part: Part) -> Result<std::result::Result<Receipt, Tag>> {
        let (commit, placed, rest) = part.place_whole(Commit::new());
        match self.node.store.commit(commit).await? {
            Outcome::Applied(receipt) => Ok(Ok(receipt)),
            Outcome::Refused(refusal) => {
                let is_fenced = placed.has_failed(&refusal, SHARD);
                rest.refuse(&placed, &refusal);
                Ok(Err(if is_fenced { SHARD } else { PRESENT }))
            }
        }
    }

    /// Gives up a session of this process that nothing uses.
    fn retire(&self, session: &Arc<Shared>) -> bool {
        // Whoever takes it does so under this lock.
        let mut own = self.own.lock();
        // Guards, and those who wait for one, have a handle each; here are two.
        let is_unused = Arc::strong_count(session) <= 2;
        if is_unused {
            // There is another handle, so it does not end by this.
            drop(own.extract_if(.., |_, own| own.id() == session.id).next());
            session.lost.send_replace(true);
        }
        is_unused
    }

    fn watch(&self, session: Uuid, watched: Watched) {
        self.watched.lock().insert(session, watched);
        self.watches.notify_one();
    }

    /// Has a session of another process end if it is not renewed, from now on for its lease.
    pub(crate) fn watch_other(&self, session: Uuid, rev: Rev, lease: Duration) {
        if !self.begun.lock().contains(&session) && !self.watched.lock().contains_key(&session) {
            self.watch(session, Watched { rev, lease, since: self.node.store.env().monotonic() });
        }
    }

    /// Ends all sessions that were begun here, and frees what they hold.
    pub(crate) async fn end_sessions(self: &Arc<Service>) -> Result<()> {
        let own = std::mem::take(&mut *self.own.lock());
        drop(own);
        let begun = self.begun.lock().clone();
        let mut ended = Ok(());
        for id in begun {
            ended = self.end_session(id, None).await.and(ended);
        }
        ended
    }

    /// Ends a session, if it is still at this rev, and frees what it holds.
    async fn end_session(self: &Arc<Service>, id: Uuid, rev: Option<Rev>) -> Result<()> {
        let key = self.spaces.session(id);
        let mut part = self.node.for_any(id.as_bytes()).delete(&key);
        if let Some(rev) = rev {
            part = part.at_rev(PRESENT, &key, rev);
        }
        match self.session_commit(part).await? {
            Ok(_) => {}
            Err(SHARD) => return Err(LockError::Stopped),
            // It was renewed.
            Err(_) => return Ok(()),
        }
        self.free_session(id).await?;
        self.watched.lock().remove(&id);
        self.begun.lock().remove(&id);
        Ok(())
    }

    /// Frees what a session holds that is no more.
    async fn free_session(self: &Arc<Service>, id: Uuid) -> Result<()> {
        self.lose(id);
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
    async fn end_session_at_last(self: &Arc<Service>, id: Uuid) {
        self.at_last("a session could not be ended", || self.end_session(id, None)).await;
    }

    /// Ends the sessions of earlier openings of a store that only one process can have open: their process is gone.
    pub(crate) async fn end_previous(self: &Arc<Service>) -> Result<()> {
        let Some(opening) = self.node.store.opening() else { return Ok(()) };
        let (space, view) = (&self.spaces.sessions, self.node.store.view().await?);
        let found = scan_around(&view, space, &space.all(), usize::MAX).await?.found;
        drop(view);
        for (key, item) in found {
            let record = Lease::decode(&item.value).ok();
            let is_over = record.and_then(|record| record.opening).is_some_and(|its| its != opening);
            if let Some(id) = Uuid::from_slice(key.bytes()).ok().filter(|_| is_over) {
                self.unless_damaged(self.end_session(id, Some(item.rev)).await)?;
            }
        }
        Ok(())
    }

    /// Sessions that another process has begun, or an earlier one, are given a full lease from now on.
    async fn watch_sessions(self: &Arc<Service>) -> Result<()> {
        let spaces = &self.spaces;
        let view = self.node.store.view().await?;
        let sessions = scan_around(&view, &spaces.sessions, &spaces.sessions.all(), usize::MAX).await?;
        // They were seen now, and not before it was looked.
        let now = self.node.store.env().monotonic();
        let found = sessions.found.iter().map(|(key, item)| (key, item.rev, Lease::decode(&item.value)));
        let damaged = sessions.damaged.iter().map(|key| (key, Rev::default(), Err(Unreadable::Damaged)));
        for (key, rev, record) in found.chain(damaged) {
            let lease = match record {
                Ok(record) => Duration::from_micros(record.lease_us),
                // The program that has begun it knows how long its lease is.
                Err(why) if why.is_version() => continue,
                Err(_) => {
                    tracing::error!(%key, "a session is damaged, and ends after the usual lease");
                    LEASE
                }
            };
            match Uuid::from_slice(key.bytes()) {
                Ok(id) => drop(self.watched.lock().insert(id, Watched { rev, lease, since: now })),
                Err(_) => tracing::error!(%key, "the key of a session is damaged and is passed over"),
            }
        }
        // A session that is no more may have left something, if the process ended just then.
        let sessions = self.spaces.owned.prefix([1]);
        let mut owners: Vec<Uuid> = Vec::new();
        for (key, _) in scan_around(&view, &spaces.owned, &sessions, usize::MAX).await?.found {
            let id = key.bytes().get(1..17).and_then(|id| Uuid::from_slice(id).ok());
            owners.extend(id.filter(|id| owners.last() != Some(id)));
        }
        drop(view);
        for owner in owners {
            if !self.watched.lock().contains_key(&owner) {
                self.unless_damaged(self.free_session(owner).await)?;
            }
        }
        for shard in self.node.served() {
            self.finish(shard).await?;
        }
        Ok(())
    }

    /// Goes on with the releases of a shard that an earlier process has begun.
    async fn finish(self: &Arc<Service>, shard: u16) -> Result<()> {
        let (view, space) = (self.node.store.view().await?, &self.spaces.unfinished);
        let Scanned { found, damaged } =
            scan_around(&view, space, &self.spaces.unfinished_in(shard), usize::MAX).await?;
        drop(view);
        damaged.iter().for_each(|key| tracing::error!(%key, "the note of an unfinished release is damaged"));
        for (key, _) in found {
            match Spaces::read_unfinished(&key) {
                Some(lock) => self.unless_damaged(self.ask(&lock, Ask::Grant, None).await)?,
                None => self.free_left(key),
            }
        }
        Ok(())
    }
}

/// Tells guards that they are lost when the store was closed or has stopped.
pub(crate) async fn end_with_store(service: Weak<Service>) {
    let Some(store) = service.upgrade().map(|service| service.node.store.clone()) else { return };
    store.ended().await;
    service.upgrade().iter().for_each(|service| service.lose_all());
}

/// Ends sessions that are not renewed.
pub(crate) async fn sweep(service: Weak<Service>) {
    let Some(env) = service.upgrade().map(|service| service.node.store.env().clone()) else { return };
    loop {
        let Some(inner) = service.upgrade() else { return };
        match inner.watch_sessions().await {
            Ok(()) => break,
            Err(_) if inner.node.is_stopped() => return,
            Err(error) if error.kind() == ErrorKind::Unavailable => {}
            Err(error) => {
                tracing::error!(%error, "not all sessions of before the start are known");
                break;
            }
        }
        drop(inner);
        env.sleep(AGAIN).await;
    }
    loop {
        let Some(inner) = service.upgrade() else { return };
        let now = env.monotonic();
        let due = inner.watched.lock().iter().map(|(id, watched)| (watched.since + watched.lease, *id)).min();
        if let Some((_, id)) = due.filter(|(due, _)| *due <= now) {
            match inner.look_at(id).await {
                Ok(()) => {}
                Err(_) if inner.node.is_stopped() => return,
                Err(error) if error.kind() == ErrorKind::Unavailable => {
                    drop(inner);
                    env.sleep(AGAIN).await;
                }
                Err(error) => inner.leave_damaged(id, error).await,
            }
            continue;
        }
        let mut watches = std::pin::pin!(inner.watches.notified());
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

impl Service {
    /// A session whose record cannot be read cannot be renewed either. It loses what it holds, and its record stays.
    async fn leave_damaged(self: &Arc<Service>, id: Uuid, error: LockError) {
        tracing::error!(session = %id, %error, "a session is damaged, and has lost its locks");
        self.at_last("a damaged session's locks could not be released", || self.free_session(id)).await;
        self.watched.lock().remove(&id);
        self.begun.lock().remove(&id);
    }

    /// Looks whether a session was renewed; if not, it ends.
    async fn look_at(self: &Arc<Service>, id: Uuid) -> Result<()> {
        let item = self.node.store.view().await?.get(&self.spaces.session(id)).await?;
        let now = self.node.store.env().monotonic();
        let is_over = {
            let mut watched = self.watched.lock();
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
                self.watched.lock().remove(&id);
                Ok(())
            }
        }
    }
}
