//! Sessions: a session is a record that a process renews for as long as its code is alive. It holds locks and claims
//! for as long as its lease is renewed. This file does not know what a session holds: [`Holdings`] is all that it sees
//! of that.

mod lasting;

use std::collections::{BTreeMap, BTreeSet};
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::{Notify, watch};

use super::lease::{LeaseVerdict, Watch};
use super::{AGAIN, Node, NodeError, SHARD, woken_or_after};
use crate::damage::scan_around;
use crate::lane::{Part, Tag};
use crate::record::{Record, Unreadable, stored};
use crate::store::{Check, Commit, ErrorKind, Key, Outcome, Receipt, Rev, Space, SpaceSpec, Store, StoreError, Uuid};

type Result<T, E = NodeError> = std::result::Result<T, E>;

/// Tag of the check that the session's record exists, or is still at the known rev.
const PRESENT: Tag = Tag("present");

/// The default lease.
pub(crate) const LEASE: Duration = Duration::from_secs(30);

/// The name of the space of sessions.
pub(crate) const SESSIONS: &str = "lock.sessions";

/// The stored record of a session.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Lease {
    /// A label for people.
    pub(crate) label: String,
    pub(crate) lease_us: u64,
    pub(crate) since_us: u64,
    pub(crate) renewed_us: u64,
    /// The opening of the store in which the session began. Only set if a single process can have the store open. Of a
    /// lasting session, [`LASTING`].
    pub(crate) opening: Option<Uuid>,
}

stored!(Lease);

/// Stands in place of an opening for a session that belongs to no process.
pub(crate) const LASTING: Uuid = Uuid::nil();

/// Declares the space of sessions: id → lease.
pub(crate) async fn declare(store: &Store) -> Result<Space, StoreError> {
    store.space(SpaceSpec::new(SESSIONS).keys_used_once()).await
}

/// What sessions hold.
pub(crate) trait Holdings: Send + Sync {
    /// A session is lost. Notifies the code in this process that holds something through it.
    fn lost(&self, session: Uuid);

    /// Frees everything that a session holds whose record is gone or cannot be read.
    fn free(self: Arc<Self>, session: Uuid) -> Freeing;
}

pub(crate) type Freeing = Pin<Box<dyn Future<Output = Result<()>> + Send>>;

/// The sessions of this process, and what it knows of the sessions of other processes.
pub(crate) struct Sessions {
    node: Arc<Node>,
    space: Space,
    holdings: Weak<dyn Holdings>,
    /// The sessions of this process, by their leases. Claims share them, and so does code without a session of its own.
    own: Mutex<BTreeMap<Duration, Arc<LocalSession>>>,
    /// Held while a shared session is begun.
    beginning: tokio::sync::Mutex<()>,
    /// The sessions that were begun here and have not ended.
    begun: Mutex<BTreeSet<Uuid>>,
    /// The lasting sessions that were used here and have not ended.
    lasting: Mutex<BTreeSet<Uuid>>,
    /// Sessions that no task in this process renews. They end if they are not renewed.
    watched: Mutex<Watch>,
    watches: Notify,
    /// Counts the sessions that were seen to end. The layers above then free what such a session held there.
    pub(crate) ended: watch::Sender<u64>,
}

/// A session that was begun here, or a lasting one that is used here. Only a lasting session outlasts its last handle.
pub(crate) struct LocalSession {
    sessions: Arc<Sessions>,
    pub(crate) id: Uuid,
    lease: Duration,
    is_lasting: bool,
    is_lost: watch::Sender<bool>,
    /// When the last successful renewal was begun, by the clock that only goes forward.
    renewed: Mutex<Duration>,
}

/// The properties of a new session.
pub(crate) struct SessionOptions {
    pub(crate) lease: Duration,
    pub(crate) label: String,
    /// A task renews the session.
    pub(crate) renews: bool,
    /// The session ends when nothing uses it.
    is_shared: bool,
}

impl SessionOptions {
    pub(crate) fn new(lease: Duration) -> SessionOptions {
        SessionOptions { lease, label: format!("process {}", std::process::id()), renews: true, is_shared: false }
    }
}

impl Drop for LocalSession {
    fn drop(&mut self) {
        if self.is_lasting || self.is_lost() || self.sessions.node.is_stopped() {
            return;
        }
        let (sessions, id) = (self.sessions.clone(), self.id);
        self.sessions.node.runtime.spawn(async move { sessions.end_at_last(id).await });
    }
}

impl LocalSession {
    pub(crate) fn is_lost(&self) -> bool {
        *self.is_lost.borrow()
    }

    /// Ends the session, and frees what it holds.
    pub(crate) async fn end(&self) -> Result<()> {
        self.lose();
        self.leave();
        self.sessions.end(self.id, None).await
    }

    /// The session is lost, and with it everything that it holds.
    fn lose(&self) {
        self.is_lost.send_replace(true);
        self.sessions.lose(self.id);
    }

    /// No task renews the session any more. It ends when its lease expires, unless it is ended before.
    fn leave(&self) {
        self.sessions.watch(self.id, Rev::default(), self.lease, *self.renewed.lock());
    }

    /// Renews the lease. Returns `false` if it is lost.
    pub(crate) async fn renew(&self) -> Result<bool> {
        let Sessions { node, watched, .. } = &*self.sessions;
        let (env, key) = (node.store.env(), self.sessions.key(self.id));
        let began = env.monotonic();
        let Some(item) = node.store.get(&key).await? else {
            self.lose();
            return Ok(false);
        };
        let Ok(record) = Lease::decode(&item.value) else {
            tracing::error!(session = %self.id, "the session's record is damaged: the session is lost");
            self.lose();
            self.leave();
            return Ok(false);
        };
        let record = Lease { renewed_us: env.now().0, ..record };
        let part = node.for_any(self.id.as_bytes()).check(PRESENT, Check::Present(key.clone()));
        // A lease must not end because other commits wait.
        match self.sessions.commit(Commit::new().urgent(), part.put(&key, record.encode())).await? {
            Ok(receipt) => {
                *self.renewed.lock() = began;
                watched.lock().renew(self.id, first_rev(&receipt), env.monotonic());
                Ok(true)
            }
            Err(_) => {
                self.lose();
                Ok(false)
            }
        }
    }
}

fn first_rev(receipt: &Receipt) -> Rev {
    receipt.revs.first().copied().flatten().unwrap_or_default()
}

/// Renews a session until it is lost or no longer used.
async fn keep(session: Weak<LocalSession>, is_shared: bool) {
    let Some(lease) = session.upgrade().map(|session| session.lease) else { return };
    loop {
        let Some(env) = session.upgrade().map(|session| session.sessions.node.store.env().clone()) else { return };
        env.sleep(lease / 3).await;
        let Some(session) = session.upgrade() else { return };
        if session.is_lost() || session.sessions.node.is_stopped() {
            return;
        }
        if is_shared && session.sessions.retire(&session) {
            return session.sessions.end_at_last(session.id).await;
        }
        while let Err(error) = session.renew().await {
            // Other processes may take over after a full lease without a renewal.
            let since = env.monotonic().saturating_sub(*session.renewed.lock());
            if since >= lease || matches!(error, NodeError::Store(StoreError::Closed)) {
                tracing::warn!(session = %session.id, %error, "the session is lost: its lease could not be renewed");
                session.lose();
                return session.leave();
            }
            env.sleep(AGAIN.min(lease / 10)).await;
        }
    }
}

impl Sessions {
    pub(crate) fn new(node: &Arc<Node>, space: &Space, holdings: Weak<dyn Holdings>) -> Arc<Sessions> {
        Arc::new(Sessions {
            node: node.clone(),
            space: space.clone(),
            holdings,
            own: Mutex::default(),
            beginning: tokio::sync::Mutex::default(),
            begun: Mutex::default(),
            lasting: Mutex::default(),
            watched: Mutex::default(),
            watches: Notify::new(),
            ended: watch::Sender::new(0),
        })
    }

    fn key(&self, id: Uuid) -> Key {
        self.space.key(id.as_bytes())
    }

    /// Begins a session. It is begun even if the caller drops this future.
    pub(crate) async fn begin(self: &Arc<Sessions>, terms: SessionOptions) -> Result<Arc<LocalSession>> {
        let sessions = self.clone();
        self.node.runtime.run(async move { sessions.begun(terms).await }).await.unwrap_or(Err(NodeError::Stopped))
    }

    async fn begun(self: &Arc<Sessions>, terms: SessionOptions) -> Result<Arc<LocalSession>> {
        let SessionOptions { lease, label, renews, is_shared } = terms;
        if self.node.is_stopped() {
            return Err(NodeError::Stopped);
        }
        let env = self.node.store.env();
        let (id, now, began) = (env.uuid(), env.now().0, env.monotonic());
        let (lease_us, opening) = (lease.as_micros() as u64, self.node.store.opening());
        let record = Lease { label, lease_us, since_us: now, renewed_us: now, opening };
        let part = self.node.for_any(id.as_bytes()).put(&self.key(id), record.encode());
        let receipt = self.commit(Commit::new(), part).await?.map_err(|_| NodeError::Stopped)?;
        let (is_lost, renewed) = (watch::Sender::new(false), Mutex::new(began));
        self.begun.lock().insert(id);
        let session = Arc::new(LocalSession { sessions: self.clone(), id, lease, is_lasting: false, is_lost, renewed });
        if renews {
            self.node.runtime.spawn(keep(Arc::downgrade(&session), is_shared));
        } else {
            self.watch(id, first_rev(&receipt), lease, env.monotonic());
        }
        Ok(session)
    }

    /// Returns the session of this process with that lease. Begins it if there is none.
    pub(crate) async fn own(self: &Arc<Sessions>, lease: Duration) -> Result<Arc<LocalSession>> {
        if let Some(session) = self.known_own(lease) {
            return Ok(session);
        }
        // In a task, so that a caller that stops polling does not keep the lock and block other callers.
        let sessions = self.clone();
        let begun = self.node.runtime.run(async move {
            let _beginning = sessions.beginning.lock().await;
            if let Some(session) = sessions.known_own(lease) {
                return Ok(session);
            }
            let session = sessions.begun(SessionOptions { is_shared: true, ..SessionOptions::new(lease) }).await?;
            let before = sessions.own.lock().insert(lease, session.clone());
            drop(before);
            if sessions.node.is_stopped() {
                sessions.stop();
                return Err(NodeError::Stopped);
            }
            Ok(session)
        });
        begun.await.unwrap_or(Err(NodeError::Stopped))
    }

    fn known_own(&self, lease: Duration) -> Option<Arc<LocalSession>> {
        self.own.lock().get(&lease).filter(|own| !own.is_lost()).cloned()
    }

    /// Forgets a session of this process that was lost.
    pub(crate) fn forget_own(&self, lost: Uuid) {
        // Dropped without the lock: the last handle ends the session.
        let lost = self.own.lock().extract_if(.., |_, own| own.id == lost).next();
        drop(lost);
    }

    /// Gives up a shared session if nothing uses it. Returns true if it did.
    fn retire(&self, session: &Arc<LocalSession>) -> bool {
        // Callers that want the session take it under this lock.
        let mut own = self.own.lock();
        // Each guard and each waiting caller has a handle. Two handles are ours: the argument, and the one in `own`.
        let is_unused = Arc::strong_count(session) <= 2;
        if is_unused {
            // The caller of this function keeps a handle, so this drop does not end the session.
            drop(own.extract_if(.., |_, own| own.id == session.id).next());
            session.is_lost.send_replace(true);
        }
        is_unused
    }

    /// Gives up the shared sessions of this process. Each ends when nothing uses it.
    pub(crate) fn stop(&self) {
        let own = std::mem::take(&mut *self.own.lock());
        drop(own);
    }

    /// Sends a commit about a session. Returns the tag of the failed check if the commit is refused.
    async fn commit(&self, commit: Commit, part: Part) -> Result<Result<Receipt, Tag>> {
        let (commit, placed, rest) = part.place_whole(commit);
        match self.node.store.commit(commit).await? {
            Outcome::Applied(receipt) => Ok(Ok(receipt)),
            Outcome::Refused(refusal) => {
                let is_fenced = placed.has_failed(&refusal, SHARD);
                rest.refuse(&placed, &refusal);
                Ok(Err(if is_fenced { SHARD } else { PRESENT }))
            }
        }
    }

    /// True if the session was begun here and has not ended. No other process uses it.
    pub(crate) fn has_begun(&self, id: Uuid) -> bool {
        self.begun.lock().contains(&id)
    }

    fn watch(&self, id: Uuid, rev: Rev, lease: Duration, since: Duration) {
        self.watched.lock().see(id, rev, lease, since);
        self.watches.notify_one();
    }

    /// Watches a session of another process. It ends if it is not renewed within its lease, counted from now.
    pub(crate) fn watch_other(&self, id: Uuid, rev: Rev, lease: Duration) {
        if !self.has_begun(id) && !self.watched.lock().has(id) {
            self.watch(id, rev, lease, self.node.store.env().monotonic());
        }
    }

    fn forget(&self, id: Uuid) {
        self.watched.lock().forget(id);
        self.lasting.lock().remove(&id);
        self.begun.lock().remove(&id);
    }

    fn lose(&self, id: Uuid) {
        self.holdings.upgrade().iter().for_each(|holdings| holdings.lost(id));
        self.ended.send_modify(|ended| *ended += 1);
    }

    /// Frees everything that an ended session holds.
    async fn free(&self, id: Uuid) -> Result<()> {
        self.lose(id);
        self.holdings.upgrade().ok_or(NodeError::Stopped)?.free(id).await
    }

    /// Ends a session and frees what it holds. With a rev, only if the record is still at that rev.
    async fn end(&self, id: Uuid, rev: Option<Rev>) -> Result<()> {
        let key = self.key(id);
        let mut part = self.node.for_any(id.as_bytes()).delete(&key);
        if let Some(rev) = rev {
            part = part.at_rev(PRESENT, &key, rev);
        }
        match self.commit(Commit::new(), part).await? {
            Ok(_) => {}
            Err(SHARD) => return Err(NodeError::Stopped),
            // The session was renewed.
            Err(_) => return Ok(()),
        }
        self.free(id).await?;
        self.forget(id);
        Ok(())
    }

    /// Ends a session, and retries for as long as the store is unavailable.
    async fn end_at_last(&self, id: Uuid) {
        self.node.at_last("session could not be ended", NodeError::kind, || self.end(id, None)).await;
    }

    /// Ends all sessions that were begun here, and frees what they hold.
    pub(crate) async fn end_all(&self) -> Result<()> {
        self.stop();
        let begun = self.begun.lock().clone();
        let mut ended = Ok(());
        for id in begun {
            ended = self.end(id, None).await.and(ended);
        }
        ended
    }

    /// Ends the sessions of earlier openings, if a single process can have the store open: their processes are gone.
    pub(crate) async fn end_previous(&self) -> Result<()> {
        let Some(opening) = self.node.store.opening() else { return Ok(()) };
        let view = self.node.store.view().await?;
        let found = scan_around(&view, &self.space, &self.space.all(), usize::MAX).await?.found;
        drop(view);
        for (key, item) in found {
            let record = Lease::decode(&item.value).ok();
            let is_over = |its: Uuid| its != opening && its != LASTING;
            let is_over = record.and_then(|record| record.opening).is_some_and(is_over);
            if let Some(id) = Uuid::from_slice(key.bytes()).ok().filter(|_| is_over) {
                match self.end(id, Some(item.rev)).await {
                    Err(error) if error.kind() == ErrorKind::Corrupt => {
                        tracing::error!(session = %id, %error, "session of an earlier opening could not be ended");
                    }
                    ended => ended?,
                }
            }
        }
        Ok(())
    }

    /// Watches the sessions of other processes and of earlier ones. Each has a full lease from now on.
    async fn watch_all(&self) -> Result<()> {
        let view = self.node.store.view().await?;
        let sessions = scan_around(&view, &self.space, &self.space.all(), usize::MAX).await?;
        drop(view);
        // The time is taken after the scan: the records were not seen before.
        let now = self.node.store.env().monotonic();
        let found = sessions.found.iter().map(|(key, item)| (key, item.rev, Lease::decode(&item.value)));
        let damaged = sessions.damaged.iter().map(|key| (key, Rev::default(), Err(Unreadable::Damaged)));
        for (key, rev, record) in found.chain(damaged) {
            let lease = match record {
                Ok(record) => Duration::from_micros(record.lease_us),
                // Only the program that has begun the session knows how long its lease is.
                Err(why) if why.is_version() => continue,
                Err(_) => {
                    tracing::error!(%key, "session record is damaged: the session ends after the default lease");
                    LEASE
                }
            };
            match Uuid::from_slice(key.bytes()) {
                // A session that is watched already keeps the time of which it was seen unchanged.
                Ok(id) if self.has_begun(id) || self.watched.lock().has(id) => {}
                Ok(id) => self.watched.lock().see(id, rev, lease, now),
                Err(_) => tracing::error!(%key, "session key is damaged: skipped"),
            }
        }
        Ok(())
    }

    /// A session whose record cannot be read cannot be renewed. It loses what it holds. Its record stays in the store.
    async fn leave_damaged(&self, id: Uuid, error: NodeError) {
        tracing::error!(session = %id, %error, "session record is damaged: the session has lost what it held");
        let what = "not everything that a damaged session held could be freed";
        self.node.at_last(what, NodeError::kind, || self.free(id)).await;
        self.forget(id);
    }

    /// Looks whether a session was renewed, and ends it if not.
    async fn look_at(&self, id: Uuid) -> Result<()> {
        let item = self.node.store.get(&self.key(id)).await?;
        let now = self.node.store.env().monotonic();
        let verdict = self.watched.lock().judge(id, item.map(|item| item.rev), now);
        match verdict {
            LeaseVerdict::Holds => Ok(()),
            LeaseVerdict::Over(rev) => {
                tracing::info!(session = %id, "session was not renewed: it has lost what it held");
                self.end(id, Some(rev)).await
            }
            LeaseVerdict::Gone => {
                self.free(id).await?;
                self.forget(id);
                Ok(())
            }
        }
    }

    /// Ends sessions that are not renewed, until the node stops.
    pub(crate) async fn sweep(self: Arc<Sessions>) {
        let env = self.node.store.env();
        let what = "sessions of other processes could not be read";
        // Other processes begin sessions at any time.
        let others = |now: Duration| self.node.store.is_shared().then(|| now.saturating_add(LEASE));
        self.node.at_last(what, NodeError::kind, || self.watch_all()).await;
        let mut all_again = others(env.monotonic());
        loop {
            let now = env.monotonic();
            if all_again.is_some_and(|again| again <= now) {
                self.node.at_last(what, NodeError::kind, || self.watch_all()).await;
                all_again = others(env.monotonic());
            }
            let next = self.watched.lock().next();
            let Some((_, id)) = next.filter(|(due, _)| *due <= now) else {
                let until = next.map(|(due, _)| due).into_iter().chain(all_again).min();
                woken_or_after(&self.watches, env, until.map(|due| due.saturating_sub(now))).await;
                continue;
            };
            match self.look_at(id).await {
                Ok(()) => {}
                Err(_) if self.node.is_stopped() => return,
                Err(error) if error.kind() == ErrorKind::Unavailable => env.sleep(AGAIN).await,
                Err(error) => self.leave_damaged(id, error).await,
            }
        }
    }
}
