//! Locks for callers that come and go, for example clients over a network: a request that keeps its place in the queue
//! while no call waits for it, and a grant that is held without a guard. Only its session, its release or an operator
//! ends it.

use std::future::pending;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::select;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::lock::error::{LockError, LockKind, Result};
use crate::lock::lane::{Ask, Ear, Gone, Heard, LockAnswer, Want};
use crate::lock::locks::request_id;
use crate::lock::operate::LeaseState;
use crate::lock::service::Service;
use crate::lock::{FencingToken, LockName, Locks, Session};
use crate::node::AGAIN;
use crate::store::{Timestamp, Uuid};

/// A request of a session that stands until it is released, also while no caller waits for it. See [`Locks::stand`].
#[derive(Debug, Clone)]
#[must_use = "nothing is requested until it is made"]
pub struct StandingRequest {
    id: String,
    /// `None` for all.
    permits: Option<u32>,
    /// How long its caller waits; `None` if it must not wait in the queue.
    wait: Option<Duration>,
}

impl StandingRequest {
    /// A request for one permit, under an id that the session uses for nothing else at the same time. However often it
    /// is made, it counts once. It is granted at once or not at all.
    ///
    /// ```
    /// # use latchwork::lock::StandingRequest;
    /// let request = StandingRequest::new("file-7");
    /// ```
    pub fn new(id: impl Into<String>) -> StandingRequest {
        StandingRequest { id: id.into(), permits: Some(1), wait: None }
    }

    /// Requests several permits of a semaphore at once.
    ///
    /// ```
    /// # use latchwork::lock::StandingRequest;
    /// let request = StandingRequest::new("file-7").permits(2);
    /// ```
    pub fn permits(mut self, permits: u32) -> StandingRequest {
        self.permits = Some(permits);
        self
    }

    /// Requests all permits: a read-write lock for writing.
    ///
    /// ```
    /// # use latchwork::lock::StandingRequest;
    /// let request = StandingRequest::new("file-7").exclusive();
    /// ```
    pub fn exclusive(mut self) -> StandingRequest {
        self.permits = None;
        self
    }

    /// Enters the queue if need be, and waits this long for the grant. Afterwards the request stays in the queue: make
    /// it again to go on waiting.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::lock::StandingRequest;
    /// let request = StandingRequest::new("file-7").wait(Duration::from_secs(30));
    /// ```
    pub fn wait(mut self, limit: Duration) -> StandingRequest {
        self.wait = Some(limit);
        self
    }
}

/// What became of a standing request.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
#[must_use = "the lock may not have been granted"]
pub enum StandingOutcome {
    /// The session holds the lock under this token.
    Granted(FencingToken),
    /// The request waits in the queue. The token will be valid once it is granted; by its number, the request can be
    /// released before.
    Waits(FencingToken),
    /// The lock is held, and the request does not wait in the queue.
    Busy,
}

impl Locks {
    /// Makes a standing request for a session, or looks what has become of it. The lock is held without a guard: until
    /// [`Locks::release`], or the end of the session. A caller that gives up changes nothing: make the request again.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use std::time::Duration;
    ///
    /// use latchwork::lock::{LockKind, Locks, StandingOutcome, StandingRequest};
    /// use latchwork::store::Store;
    ///
    /// let locks = Locks::on(&Store::memory().await?).await?;
    /// let (a, b) = (locks.session().await?, locks.session().await?);
    /// let request = StandingRequest::new("r").wait(Duration::from_millis(5));
    /// let StandingOutcome::Granted(token) = locks.stand(&a, "import", LockKind::Mutex, request.clone()).await? else {
    ///     panic!("the lock is free")
    /// };
    /// // The wait ends, and the request keeps its place in the queue.
    /// let waits = locks.stand(&b, "import", LockKind::Mutex, request.clone()).await?;
    /// assert!(matches!(waits, StandingOutcome::Waits(_)));
    /// assert!(locks.release(&a, "import", token.number()).await?);
    /// assert!(matches!(locks.stand(&b, "import", LockKind::Mutex, request).await?, StandingOutcome::Granted(_)));
    /// # Ok(()) }
    /// ```
    pub fn stand<N: Into<LockName>>(
        &self,
        session: &Session,
        name: N,
        kind: LockKind,
        request: StandingRequest,
    ) -> impl Future<Output = Result<StandingOutcome>> + Send + use<N> {
        standing(self.service.clone(), session.clone(), name.into(), kind, request)
    }

    /// Releases the lock that the session holds under this token, or removes its request from the queue. Returns
    /// `false` if the session has no such request.
    ///
    /// ```
    /// # use latchwork::lock::{FencingToken, Locks, Result, Session};
    /// # async fn example(locks: Locks, session: Session, token: FencingToken) -> Result<()> {
    /// if !locks.release(&session, "import", token.number()).await? {
    ///     println!("the lock was lost before");
    /// }
    /// # Ok(()) }
    /// ```
    pub fn release<N: Into<LockName>>(
        &self,
        session: &Session,
        name: N,
        token: u64,
    ) -> impl Future<Output = Result<bool>> + Send + use<N> {
        let (service, owner, name) = (self.service.clone(), session.owner(), name.into());
        async move {
            name.check()?;
            let answer = service.ask(&name, Ask::LetGo { owner, ticket: token }, None).await?;
            Ok(matches!(answer, LockAnswer::Released(true)))
        }
    }

    /// The [lasting session](crate::lock::SessionBuilder::lasting) of this id; `None` if it has ended or never began.
    ///
    /// ```
    /// # use latchwork::lock::{Locks, Result};
    /// # use latchwork::store::Uuid;
    /// # async fn example(locks: Locks, id: Uuid) -> Result<()> {
    /// match locks.lasting_session(id).await? {
    ///     Some(session) => drop(session.renew().await?),
    ///     None => println!("other owners may have held its locks since"),
    /// }
    /// # Ok(()) }
    /// ```
    pub fn lasting_session(&self, id: Uuid) -> impl Future<Output = Result<Option<Session>>> + Send + use<> {
        let sessions = self.service.sessions.clone();
        async move { Ok(sessions.lasting(id).await?.map(Session)) }
    }
}

/// A session, as it is stored.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SessionState {
    /// Its id.
    pub id: Uuid,
    /// The label that operators see.
    pub label: String,
    /// When it began.
    #[serde(rename = "since_us")]
    pub since: Timestamp,
    /// Its lease.
    pub lease: LeaseState,
}

impl Session {
    /// The session as it is stored; `None` if it has ended.
    ///
    /// ```
    /// # use latchwork::lock::{Result, Session};
    /// # async fn example(session: Session) -> Result<()> {
    /// if let Some(state) = session.state().await? {
    ///     println!("{} holds its locks until {} at least", state.label, state.lease.until());
    /// }
    /// # Ok(()) }
    /// ```
    pub fn state(&self) -> impl Future<Output = Result<Option<SessionState>>> + Send + use<> {
        let session = self.0.clone();
        async move {
            let record = session.record().await?;
            Ok(record.map(|record| SessionState {
                id: session.id,
                label: record.label,
                since: Timestamp(record.since_us),
                lease: LeaseState {
                    renewed: Timestamp(record.renewed_us),
                    length: Duration::from_micros(record.lease_us),
                },
            }))
        }
    }
}

/// A caller that listens to its request. Unlike a caller with a guard, it leaves the request as it is.
struct StandingListener {
    service: Arc<Service>,
    lock: LockName,
    ticket: Option<u64>,
    ear: Ear,
}

impl Drop for StandingListener {
    fn drop(&mut self) {
        self.service.unhear(&self.lock, self.ticket, &self.ear);
    }
}

async fn standing(
    service: Arc<Service>,
    session: Session,
    name: LockName,
    kind: LockKind,
    request: StandingRequest,
) -> Result<StandingOutcome> {
    name.check()?;
    let StandingRequest { id, permits, wait } = request;
    let id = request_id(&name, &id)?;
    let env = service.node.store.env();
    // A limit beyond the end of the clock counts as no limit.
    let until = wait.and_then(|limit| env.monotonic().checked_add(limit));
    loop {
        let ear: Ear = Arc::new(watch::Sender::new(Heard::Waits));
        let (service, lock) = (service.clone(), name.clone());
        let listener = StandingListener { service: service.clone(), lock, ticket: None, ear: ear.clone() };
        let want = Want {
            owner: session.owner(),
            kind,
            permits: permits.unwrap_or(kind.capacity()),
            id: id.clone(),
            is_known: true,
            waits: wait.is_some(),
            is_reentrant: false,
            ear: Some(ear),
        };
        let token = |ticket| FencingToken { number: ticket, key: service.spaces.request(&name, ticket) };
        match service.ask(&name, Ask::Acquire(want), None).await {
            Ok(LockAnswer::Granted(ticket)) => return Ok(StandingOutcome::Granted(token(ticket))),
            Ok(LockAnswer::Queued(ticket)) if wait.is_none() => return Ok(StandingOutcome::Waits(token(ticket))),
            Ok(LockAnswer::Queued(ticket)) => return listener.wait(&session, token(ticket), until).await,
            Ok(_) => return Ok(StandingOutcome::Busy),
            // The commit may have landed: the same request finds out.
            Err(LockError::Store(error)) if error.is_passing() => {
                if wait.is_none() || until.is_some_and(|until| until <= env.monotonic()) {
                    return Err(error.into());
                }
                env.sleep(AGAIN).await;
            }
            Err(error) => return Err(error),
        }
    }
}

impl StandingListener {
    /// Waits for the grant of a request that is in the queue.
    async fn wait(
        mut self,
        session: &Session,
        token: FencingToken,
        until: Option<Duration>,
    ) -> Result<StandingOutcome> {
        self.ticket = Some(token.number);
        let env = self.service.node.store.env();
        let mut heard = self.ear.subscribe();
        let told = pin!(heard.wait_for(|heard| !matches!(heard, Heard::Waits)));
        let too_late = pin!(async {
            match until {
                Some(until) => env.sleep(until.saturating_sub(env.monotonic())).await,
                None => pending().await,
            }
        });
        drop(select(told, too_late).await);
        let heard = self.ear.borrow().clone();
        match heard {
            Heard::Waits => Ok(StandingOutcome::Waits(token)),
            Heard::Granted => Ok(StandingOutcome::Granted(token)),
            Heard::Gone(Gone::Refused(why)) => Err(why.into()),
            // Another caller of the session has released it.
            Heard::Gone(Gone::LetGo) => {
                Err(LockError::NoSuchToken { lock: self.lock.to_string(), token: token.number })
            }
            Heard::Gone(Gone::SessionLost) if self.service.node.is_stopped() => Err(LockError::Stopped),
            Heard::Gone(Gone::SessionLost) => Err(LockError::SessionLost { session: session.id().to_string() }),
        }
    }
}
