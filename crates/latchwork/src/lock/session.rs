//! Sessions as callers hold them, and what the end of a session means for locks. Sessions themselves are in `node`.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use crate::damage::{Scanned, scan_around};
use crate::lock::error::{LockError, Result};
use crate::lock::lane::Ask;
use crate::lock::name::LockSpaces;
use crate::lock::service::Service;
use crate::lock::{Locks, Owner};
use crate::node::session::{self, Freeing, Holdings, LEASE, SessionOptions};
use crate::node::{NodeError, NodeNotice};
use crate::store::{ErrorKind, StoreError, Uuid};

/// The shortest and the longest lease.
const SHORTEST: Duration = Duration::from_millis(10);
const LONGEST: Duration = Duration::from_secs(366 * 24 * 3600);

/// Holds locks for code outside of workflows. When the last handle is dropped, all its locks are released, unless it is
/// [lasting](SessionBuilder::lasting).
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
/// let importer = locks.session().lease(Duration::from_secs(10)).label("importer").await?;
/// let guard = locks.mutex("import").by(&importer).acquire().await?;
/// assert!(importer.renew().await? && !importer.is_lost());
/// importer.end().await?;
/// guard.lost().await; // the lock ends with its session
/// # Ok(()) }
/// ```
#[derive(Clone)]
pub struct Session(pub(super) Arc<session::LocalSession>);

/// A session that has not begun yet. It begins when this is awaited.
#[must_use = "a session begins when this is awaited"]
pub struct SessionBuilder {
    service: Arc<Service>,
    terms: SessionOptions,
    lasting: Option<Uuid>,
}

impl Locks {
    /// Makes a session: its locks are released together, and lost together.
    ///
    /// ```
    /// # use latchwork::lock::{Locks, Result};
    /// # async fn example(locks: Locks) -> Result<()> {
    /// let session = locks.session().await?;
    /// let guard = locks.mutex("import").by(&session).acquire().await?;
    /// # Ok(()) }
    /// ```
    pub fn session(&self) -> SessionBuilder {
        SessionBuilder { service: self.service.clone(), terms: SessionOptions::new(LEASE), lasting: None }
    }
}

impl SessionBuilder {
    /// How long the session holds its locks after its last renewal, at least. The default is 30 s.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::lock::{Locks, Result};
    /// # async fn example(locks: Locks) -> Result<()> {
    /// let session = locks.session().lease(Duration::from_secs(10)).await?;
    /// # Ok(()) }
    /// ```
    pub fn lease(mut self, lease: Duration) -> SessionBuilder {
        self.terms.lease = lease;
        self
    }

    /// The label that operators see.
    ///
    /// ```
    /// # use latchwork::lock::{Locks, Result};
    /// # async fn example(locks: Locks) -> Result<()> {
    /// let session = locks.session().label("importer").await?;
    /// # Ok(()) }
    /// ```
    pub fn label(mut self, label: impl Into<String>) -> SessionBuilder {
        self.terms.label = label.into();
        self
    }

    /// The session is not renewed automatically: call [`Session::renew`] well within the lease.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::lock::{Locks, Result};
    /// # async fn example(locks: Locks) -> Result<()> {
    /// let session = locks.session().lease(Duration::from_secs(60)).renewed_by_hand().await?;
    /// assert!(session.renew().await?);
    /// # Ok(()) }
    /// ```
    pub fn renewed_by_hand(mut self) -> SessionBuilder {
        self.terms.renews = false;
        self
    }

    /// The session belongs to no process: it outlasts its handles and this process, for example for a client over a
    /// network. A client that knows its id finds it by [`Locks::lasting_session`] and renews it. It ends by
    /// [`Session::end`], or when it is not renewed. Begun again under the same id, it is the same session and keeps
    /// its terms.
    ///
    /// Choose an id that was never used, such as [`Env::uuid`](crate::store::Env::uuid) makes, and keep it secret from
    /// those who must not use the session.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::lock::Locks;
    /// # use latchwork::store::Store;
    /// # let store = Store::memory().await?;
    /// let id = store.env().uuid();
    /// let locks = Locks::on(&store).await?;
    /// drop(locks.session().label("client 7").lasting(id).await?);
    /// locks.shutdown().await?;
    ///
    /// let locks = Locks::on(&store).await?; // after a restart
    /// let session = locks.lasting_session(id).await?.expect("its lease is not over");
    /// assert!(session.renew().await?);
    /// # Ok(()) }
    /// ```
    pub fn lasting(mut self, id: Uuid) -> SessionBuilder {
        self.lasting = Some(id);
        self
    }

    async fn begin(self) -> Result<Session> {
        check_lease(self.terms.lease)?;
        if self.terms.label.len() > 512 {
            let reason = "the session's label is longer than 512 bytes";
            return Err(LockError::Name { name: self.terms.label, reason });
        }
        let sessions = &self.service.sessions;
        match self.lasting {
            None => Ok(Session(sessions.begin(self.terms).await?)),
            Some(id) => {
                let lost = || LockError::SessionLost { session: id.to_string() };
                sessions.begin_lasting(id, self.terms).await?.map(Session).ok_or_else(lost)
            }
        }
    }
}

impl IntoFuture for SessionBuilder {
    type Output = Result<Session>;
    type IntoFuture = Pin<Box<dyn Future<Output = Self::Output> + Send>>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.begin())
    }
}

fn check_lease(lease: Duration) -> Result<()> {
    match lease {
        lease if lease < SHORTEST => Err(LockError::Lease { lease, reason: "it is shorter than 10 ms" }),
        lease if lease > LONGEST => Err(LockError::Lease { lease, reason: "it is longer than a year" }),
        _ => Ok(()),
    }
}

impl Session {
    /// The id of the session.
    ///
    /// ```
    /// # use latchwork::lock::{Result, Session};
    /// # async fn example(session: Session) -> Result<()> {
    /// println!("session {}", session.id());
    /// # Ok(()) }
    /// ```
    pub fn id(&self) -> Uuid {
        self.0.id
    }

    pub(crate) fn owner(&self) -> Owner {
        Owner::Session(self.id())
    }

    /// Renews the lease. Returns `false` if the session is lost: other owners may have held its locks since.
    ///
    /// ```
    /// # use latchwork::lock::{Result, Session};
    /// # async fn example(session: Session) -> Result<()> {
    /// if !session.renew().await? {
    ///     println!("other owners may have held its locks since");
    /// }
    /// # Ok(()) }
    /// ```
    pub fn renew(&self) -> impl Future<Output = Result<bool>> + Send + use<> {
        let session = self.clone();
        async move { Ok(session.0.renew().await?) }
    }

    /// True if the session is lost.
    ///
    /// ```
    /// # use latchwork::lock::{Result, Session};
    /// # async fn example(session: Session) -> Result<()> {
    /// if session.is_lost() {
    ///     println!("other owners may hold its locks");
    /// }
    /// # Ok(()) }
    /// ```
    pub fn is_lost(&self) -> bool {
        self.0.is_lost()
    }

    /// Ends the session: releases everything it holds, and withdraws its waiting requests.
    ///
    /// ```
    /// # use latchwork::lock::{Result, Session};
    /// # async fn example(session: Session) -> Result<()> {
    /// session.end().await?;
    /// # Ok(()) }
    /// ```
    pub async fn end(self) -> Result<()> {
        Ok(self.0.end().await?)
    }
}

shown!(Session, it => id: it.id());

impl Holdings for Service {
    fn lost(&self, session: Uuid) {
        self.lose(session);
    }

    fn free(self: Arc<Service>, session: Uuid) -> Freeing {
        Box::pin(async move {
            match self.free_session(session).await {
                Err(LockError::Store(error)) => Err(error.into()),
                Err(LockError::Stopped) => Err(NodeError::Stopped),
                Err(error) => {
                    tracing::warn!(%session, %error, "some locks of a session could not be released");
                    Ok(())
                }
                Ok(()) => Ok(()),
            }
        })
    }
}

impl Service {
    /// The session of this process that has this lease.
    pub(crate) async fn own_session(&self, lease: Duration) -> Result<Session> {
        check_lease(lease)?;
        Ok(Session(self.sessions.own(lease).await?))
    }

    async fn free_session(self: &Arc<Service>, id: Uuid) -> Result<()> {
        for (lock, requests) in self.requests_of(&Owner::Session(id)).await? {
            for (ticket, _) in requests {
                self.unless_damaged(self.ask(&lock, Ask::Release { ticket, id: None }, None).await)?;
            }
        }
        Ok(())
    }

    /// Logs an error of a damaged lock and continues, so that one damaged lock does not hold up others.
    pub(super) fn unless_damaged<T>(&self, done: Result<T>) -> Result<()> {
        match done {
            Err(error) if error.kind() == ErrorKind::Corrupt || matches!(error, LockError::UnknownVersion { .. }) => {
                tracing::error!(%error, "a lock could not be released");
                Ok(())
            }
            done => done.map(drop),
        }
    }

    /// The background work of locks: sessions that are not renewed end, the locks of earlier processes are released,
    /// and guards are notified when the store was closed or has stopped.
    pub(crate) fn begin_chores(self: &Arc<Service>) {
        let service = self.clone();
        self.node.chore(async move {
            let what = "the locks of earlier processes could not be released";
            service.node.at_last(what, LockError::kind, || service.finish_all()).await;
        });
        self.node.chore(self.sessions.clone().sweep());
        let (store, service) = (self.node.store.clone(), Arc::downgrade(self));
        self.node.chore(async move {
            store.ended().await;
            service.upgrade().iter().for_each(|service| service.lose_all());
        });
    }

    /// Notifies the callers of this process of what other processes do with their requests, if there is no engine that
    /// does.
    pub(crate) fn overhear(self: &Arc<Service>) {
        let service = Arc::downgrade(self);
        let heard = move |notice: Option<NodeNotice>| {
            let Some(service) = service.upgrade() else { return };
            let is_its = match notice {
                Some(NodeNotice::Session(session)) => service.sessions.is_used(session),
                Some(_) => false,
                None => true,
            };
            if is_its {
                service.count_heard();
                let runtime = service.node.runtime.clone();
                runtime.spawn(async move { service.listen_at_last().await });
            }
        };
        self.node.chore(self.node.clone().overhear(heard));
    }

    /// Finds out what has become of the requests of this process, and retries as long as the store is unavailable.
    pub(crate) async fn listen_at_last(self: &Arc<Service>) {
        self.node.at_last("requests for locks could not be read", StoreError::kind, || self.listen_again()).await;
    }

    /// Continues the releases that an earlier process has begun.
    pub(crate) async fn finish_all(self: &Arc<Service>) -> Result<()> {
        for session in self.sessions_gone().await? {
            self.unless_damaged(self.free_session(session).await)?;
        }
        for shard in self.node.served() {
            self.finish(shard).await?;
        }
        Ok(())
    }

    /// The sessions that have ended and still own requests: their process died while it ended them.
    async fn sessions_gone(&self) -> Result<Vec<Uuid>> {
        let (spaces, view) = (&self.spaces, self.node.store.view().await?);
        let mut gone = Vec::new();
        let mut last = None;
        for (key, _) in scan_around(&view, &spaces.owned, &spaces.owned.prefix([1]), usize::MAX).await?.found {
            let id = key.bytes().get(1..17).and_then(|id| Uuid::from_slice(id).ok());
            let Some(id) = id.filter(|id| last != Some(*id)) else { continue };
            last = Some(id);
            // A session with a damaged record counts as alive: it ends after a lease.
            match view.get(&spaces.session(id)).await {
                Err(error) if error.kind() == ErrorKind::Corrupt => {}
                item => gone.extend(item?.is_none().then_some(id)),
            }
        }
        Ok(gone)
    }

    /// The same for the notes in a shard.
    async fn finish(self: &Arc<Service>, shard: u16) -> Result<()> {
        let (view, space) = (self.node.store.view().await?, &self.spaces.unfinished);
        let Scanned { found, damaged } =
            scan_around(&view, space, &self.spaces.unfinished_in(shard), usize::MAX).await?;
        drop(view);
        damaged.iter().for_each(|key| tracing::error!(%key, "the note of an unfinished release is damaged"));
        for (key, _) in found {
            match LockSpaces::read_unfinished(&key) {
                Some(lock) => self.unless_damaged(self.ask(&lock, Ask::Grant, None).await)?,
                None => self.free_left(key),
            }
        }
        Ok(())
    }
}
