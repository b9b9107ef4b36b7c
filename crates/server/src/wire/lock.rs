//! Locks and sessions on the wire: their shapes, as `latch lock` prints them, and what their errors become.

use latchwork::lock::{
    ForcedRelease, LockError, LockKind, LockName, LockRefused, LockScope, LockState, LockSummary, Owner, Requested,
    SessionState, StandingRequest,
};
use latchwork::store::Uuid;
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::wire::problem::{Problem, ProblemCode};
use crate::wire::time::{TimeWire, duration, millis};

/// Which lock of a name is meant. Without a parameter, the lock of the whole store.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ScopeQuery {
    /// The lock is shared by the executions of this workflow.
    pub(crate) workflow: Option<String>,
    /// The lock is shared by this execution and all its descendants.
    pub(crate) tree: Option<String>,
}

impl ScopeQuery {
    pub(crate) fn scope(self) -> Result<Option<LockScope>, Problem> {
        match (self.workflow, self.tree) {
            (None, None) => Ok(None),
            (Some(workflow), None) => Ok(Some(LockScope::Workflow(workflow))),
            (None, Some(root)) => Ok(Some(LockScope::Tree(root.into()))),
            (Some(_), Some(_)) => Err(Problem::new(ProblemCode::InvalidQuery, "workflow and tree exclude each other")),
        }
    }

    /// The lock of this name.
    pub(crate) fn lock(self, name: String) -> Result<LockName, Problem> {
        Ok(LockName { scope: self.scope()?.unwrap_or(LockScope::Global), name })
    }
}

/// The name of a lock, and what shares it.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = LockName)]
pub(crate) struct LockNameWire {
    name: String,
    /// The workflow whose executions share it, or null.
    #[schema(required)]
    workflow: Option<String>,
    /// The execution that shares it with its descendants, or null.
    #[schema(required)]
    tree: Option<String>,
}

impl From<&LockName> for LockNameWire {
    fn from(lock: &LockName) -> LockNameWire {
        let (mut workflow, mut tree) = (None, None);
        match &lock.scope {
            LockScope::Workflow(name) => workflow = Some(name.clone()),
            LockScope::Tree(root) => tree = Some(root.to_string()),
            _ => {}
        }
        LockNameWire { name: lock.name.clone(), workflow, tree }
    }
}

/// A lock.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Lock)]
pub(crate) struct LockWire {
    #[serde(flatten)]
    name: LockNameWire,
    kind: LockKindWord,
    /// How many permits the lock has; null for a read-write lock.
    #[schema(required)]
    permits: Option<u32>,
    /// How many permits are held; a writer counts as one.
    used: u32,
    /// True if the holder excludes all others.
    exclusive: bool,
    /// How many requests wait.
    waiting: u64,
}

/// The kind of a lock.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum LockKindWord {
    Mutex,
    Semaphore,
    ReadWrite,
}

impl LockWire {
    fn new(name: &LockName, kind: LockKind, used: u32, waiting: u64) -> LockWire {
        let (kind, permits) = match kind {
            LockKind::Mutex => (LockKindWord::Mutex, Some(1)),
            LockKind::Semaphore { permits } => (LockKindWord::Semaphore, Some(permits)),
            _ => (LockKindWord::ReadWrite, None),
        };
        let is_written = permits.is_none() && used == u32::MAX;
        let exclusive = is_written || (permits == Some(1) && used == 1);
        let used = if is_written { 1 } else { used };
        LockWire { name: name.into(), kind, permits, used, exclusive, waiting }
    }
}

impl From<LockSummary> for LockWire {
    fn from(lock: LockSummary) -> LockWire {
        LockWire::new(&lock.name, lock.kind, lock.used, lock.waiting)
    }
}

/// A lock with its holders and waiters.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = LockShown)]
pub(crate) struct LockShownWire {
    #[serde(flatten)]
    lock: LockWire,
    /// The oldest grant first.
    holders: Vec<LockRequestWire>,
    /// The first thousand, in the order in which they will be granted the lock.
    waiters: Vec<LockRequestWire>,
    /// The releases that operators have forced, the newest first.
    forced: Vec<ForcedWire>,
}

impl From<LockState> for LockShownWire {
    fn from(state: LockState) -> LockShownWire {
        let shown = |requests: &[Requested]| requests.iter().map(|it| LockRequestWire::of(it, state.kind)).collect();
        LockShownWire {
            lock: LockWire::new(&state.name, state.kind, state.used, state.waiting),
            holders: shown(&state.holders),
            waiters: shown(&state.waiters),
            forced: state.forced.iter().map(ForcedWire::from).collect(),
        }
    }
}

/// A holder or a waiter of a lock.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = LockOwner)]
pub(crate) struct LockOwnerWire {
    #[schema(required)]
    execution: Option<String>,
    #[schema(required, value_type = Option<String>, format = "uuid")]
    session: Option<Uuid>,
    /// The label of the session.
    #[schema(required)]
    label: Option<String>,
}

impl LockOwnerWire {
    fn of(owner: &Owner, label: Option<&str>) -> LockOwnerWire {
        let (mut execution, mut session) = (None, None);
        match owner {
            Owner::Execution(id) => execution = Some(id.to_string()),
            Owner::Session(id) => session = Some(*id),
            _ => {}
        }
        LockOwnerWire { execution, session, label: label.map(Into::into) }
    }
}

/// A request for a lock, granted or waiting.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = LockRequest)]
pub(crate) struct LockRequestWire {
    #[serde(flatten)]
    owner: LockOwnerWire,
    /// The fencing token; of a waiter, its token once the lock is granted.
    token: u64,
    /// How many permits; a writer counts as one.
    permits: u32,
    exclusive: bool,
    /// The time of the request.
    since: TimeWire,
    #[schema(required)]
    granted_at: Option<TimeWire>,
    /// The position in the queue, from 0.
    #[schema(required)]
    position: Option<u64>,
    #[schema(required)]
    lease_renewed_at: Option<TimeWire>,
    /// When the session expires if it is not renewed.
    #[schema(required)]
    lease_until: Option<TimeWire>,
}

impl LockRequestWire {
    pub(crate) fn of(request: &Requested, kind: LockKind) -> LockRequestWire {
        let is_written = kind == LockKind::ReadWrite && request.permits == u32::MAX;
        LockRequestWire {
            owner: LockOwnerWire::of(&request.owner, request.label.as_deref()),
            token: request.token,
            permits: if is_written { 1 } else { request.permits },
            exclusive: is_written || kind == LockKind::Mutex,
            since: request.since.into(),
            granted_at: request.granted.map(TimeWire),
            position: request.position,
            lease_renewed_at: request.lease.map(|lease| TimeWire(lease.renewed)),
            lease_until: request.lease.map(|lease| TimeWire(lease.until())),
        }
    }

    /// A request that an operator has released.
    fn forced(forced: &ForcedRelease, kind: LockKind) -> LockRequestWire {
        let is_written = kind == LockKind::ReadWrite && forced.permits == u32::MAX;
        LockRequestWire {
            owner: LockOwnerWire::of(&forced.owner, None),
            token: forced.token,
            permits: if is_written { 1 } else { forced.permits },
            exclusive: is_written || kind == LockKind::Mutex,
            since: forced.since.into(),
            granted_at: forced.granted.map(TimeWire),
            position: None,
            lease_renewed_at: None,
            lease_until: None,
        }
    }
}

/// A release that an operator has forced.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ForcedRelease)]
pub(crate) struct ForcedWire {
    #[serde(flatten)]
    owner: LockOwnerWire,
    token: u64,
    /// True if it was held; false if it was waited for.
    was_held: bool,
    at: TimeWire,
    reason: String,
}

impl From<&ForcedRelease> for ForcedWire {
    fn from(forced: &ForcedRelease) -> ForcedWire {
        ForcedWire {
            owner: LockOwnerWire::of(&forced.owner, None),
            token: forced.token,
            was_held: forced.was_held,
            at: forced.at.into(),
            reason: forced.reason.clone(),
        }
    }
}

/// What a forced release has done.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = LockForced)]
pub(crate) struct LockForcedWire {
    #[serde(flatten)]
    lock: LockNameWire,
    /// The request before the release.
    released: LockRequestWire,
    reason: String,
    /// The requests that were granted since.
    granted: Vec<LockRequestWire>,
    /// How many wait now.
    waiting: u64,
}

impl LockForcedWire {
    /// From the state before, if the request was still in it, and the state after.
    pub(crate) fn of(before: &LockState, after: &LockState, token: u64) -> Option<LockForcedWire> {
        let forced = after.forced.iter().find(|forced| forced.token == token)?;
        let kind = after.kind;
        let known = before.holders.iter().chain(&before.waiters).find(|request| request.token == token);
        let released = known.map(|request| LockRequestWire::of(request, kind));
        let granted = after.holders.iter().filter(|holder| holder.granted.is_some_and(|since| since >= forced.at));
        Some(LockForcedWire {
            lock: (&after.name).into(),
            released: released.unwrap_or_else(|| LockRequestWire::forced(forced, kind)),
            reason: forced.reason.clone(),
            granted: granted.map(|holder| LockRequestWire::of(holder, kind)).collect(),
            waiting: after.waiting,
        })
    }
}

/// A session to begin.
#[derive(Debug, Default, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewSession {
    /// How long the session holds its locks after its last renewal, at least: `30s`, `500ms`. By default 30 s.
    #[schema(example = "30s")]
    lease: Option<String>,
    /// The label that operators see. By default the name of the token.
    pub(crate) label: Option<String>,
}

impl NewSession {
    pub(crate) fn lease(&self) -> Result<Option<std::time::Duration>, Problem> {
        let read = |text: &String| {
            let wrong =
                || Problem::new(ProblemCode::InvalidBody, format!("lease: {text:?} is not a duration: write 30s"));
            duration(text).ok_or_else(wrong)
        };
        self.lease.as_ref().map(read).transpose()
    }
}

/// A session: it holds locks as long as it is renewed.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Session)]
pub(crate) struct SessionWire {
    #[schema(value_type = String, format = "uuid")]
    id: Uuid,
    label: String,
    /// When it began.
    since: TimeWire,
    lease_ms: u64,
    lease_renewed_at: TimeWire,
    /// Until when it holds its locks if it is not renewed. Renew it well before.
    lease_until: TimeWire,
}

impl From<SessionState> for SessionWire {
    fn from(state: SessionState) -> SessionWire {
        SessionWire {
            id: state.id,
            label: state.label,
            since: state.since.into(),
            lease_ms: millis(state.lease.length),
            lease_renewed_at: state.lease.renewed.into(),
            lease_until: state.lease.until().into(),
        }
    }
}

/// A session, with what it holds and waits for.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = SessionShown)]
pub(crate) struct SessionShownWire {
    #[serde(flatten)]
    session: SessionWire,
    locks: Vec<SessionLockWire>,
}

/// A lock that a session holds or waits for.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = SessionLock)]
pub(crate) struct SessionLockWire {
    #[serde(flatten)]
    lock: LockNameWire,
    /// The fencing token; if it waits, its token once the lock is granted.
    token: u64,
}

impl SessionShownWire {
    pub(crate) fn new(state: SessionState, locks: Vec<(LockName, u64)>) -> SessionShownWire {
        let locks = locks.into_iter().map(|(lock, token)| SessionLockWire { lock: (&lock).into(), token });
        SessionShownWire { session: state.into(), locks: locks.collect() }
    }
}

/// How a lock is wanted. The first request for a name decides whether it is a mutex, a semaphore or a read-write lock.
#[derive(Debug, Clone, Copy, Default, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum LockMode {
    /// One holder at a time.
    #[default]
    Mutex,
    /// Some of a number of permits.
    Semaphore,
    /// A read-write lock, shared with other readers.
    Read,
    /// A read-write lock, alone.
    Write,
}

/// A request for a lock.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct AcquireLock {
    /// The session that shall hold the lock.
    #[schema(value_type = String, format = "uuid")]
    pub(crate) session: Uuid,
    /// The id of the request, at most 256 bytes: however often the session makes a request under it, it counts once,
    /// until it is released. Without one, the server makes one; the answer has it.
    pub(crate) request: Option<String>,
    #[serde(default)]
    mode: LockMode,
    /// How many permits the semaphore has: all its callers say the same.
    #[schema(minimum = 1)]
    capacity: Option<u32>,
    /// How many permits of the semaphore are wanted. By default 1.
    #[schema(minimum = 1)]
    permits: Option<u32>,
}

impl AcquireLock {
    /// The kind of the lock, and what is wanted of it under this id.
    pub(crate) fn wanted(&self, id: String) -> Result<(LockKind, StandingRequest), Problem> {
        let wrong = |detail: &str| Err(Problem::new(ProblemCode::InvalidBody, detail));
        let request = StandingRequest::new(id);
        match (self.mode, self.capacity, self.permits) {
            (LockMode::Mutex, None, None) => Ok((LockKind::Mutex, request)),
            (LockMode::Read, None, None) => Ok((LockKind::ReadWrite, request)),
            (LockMode::Write, None, None) => Ok((LockKind::ReadWrite, request.exclusive())),
            (LockMode::Semaphore, Some(capacity), permits) => {
                Ok((LockKind::Semaphore { permits: capacity }, request.permits(permits.unwrap_or(1))))
            }
            (LockMode::Semaphore, None, _) => wrong("capacity: a semaphore needs the number of its permits"),
            _ => wrong("capacity and permits belong to mode semaphore"),
        }
    }
}

/// What became of a request for a lock.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = LockStanding)]
pub(crate) struct StandingWire {
    #[serde(flatten)]
    pub(crate) lock: LockNameWire,
    #[schema(value_type = String, format = "uuid")]
    pub(crate) session: Uuid,
    /// The id under which the request is made again.
    pub(crate) request: String,
    /// True if the session holds the lock. Otherwise the request waits in the queue.
    pub(crate) granted: bool,
    /// The fencing token: larger than that of every earlier grant of the lock. A request that waits has the token that
    /// it will be granted. With it, the request is released.
    pub(crate) token: u64,
    /// The number of requests before it in the queue; null if it is granted, or has more than a thousand before it.
    #[schema(required)]
    pub(crate) position: Option<u64>,
    /// A holder of the lock, if the request waits.
    #[schema(required)]
    pub(crate) holder: Option<LockRequestWire>,
    /// If the request waits: after this pause it is time to make it again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) retry_after_ms: Option<u64>,
}

/// What a session releases.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ReleaseLock {
    #[schema(value_type = String, format = "uuid")]
    pub(crate) session: Uuid,
    /// The token of the grant, or of the request that waits.
    pub(crate) token: u64,
}

/// What a release has done.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = LockReleased)]
pub(crate) struct ReleasedWire {
    #[serde(flatten)]
    pub(crate) lock: LockNameWire,
    pub(crate) token: u64,
    /// False if the session had no such request any more: an operator has released it, or it was released before.
    pub(crate) released: bool,
}

/// What an operator releases.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ForceRelease {
    /// The token of the holder or the waiter.
    pub(crate) token: u64,
    /// The reason, which stays in the lock's history.
    #[schema(min_length = 1, max_length = 4096)]
    pub(crate) reason: String,
}

/// The session has ended.
pub(crate) fn session_lost(session: impl std::fmt::Display) -> Problem {
    let detail = format!("session {session} has ended or was not renewed, and holds nothing; begin another one");
    Problem::new(ProblemCode::SessionLost, detail).with("session", session.to_string())
}

impl From<LockError> for Problem {
    fn from(error: LockError) -> Problem {
        let detail = error.to_string();
        let problem = |code| Problem::new(code, detail.clone());
        match &error {
            LockError::Store(store) => store.clone().into(),
            LockError::Once(once) => once.clone().into(),
            LockError::Cursor(cursor) => cursor.clone().into(),
            LockError::Refused(refused) => refused_request(refused, detail),
            LockError::SessionLost { session } => session_lost(session),
            LockError::NoSuchToken { lock, token } => {
                problem(ProblemCode::NotFound).with("lock", lock).with("token", token)
            }
            LockError::NotFound { lock } => problem(ProblemCode::NotFound).with("lock", lock),
            LockError::InUse { lock, owners } => {
                problem(ProblemCode::Conflict).with("lock", lock).with("owners", owners)
            }
            // It shuts down, or another engine has taken over.
            LockError::Stopped => Problem::unavailable(&error),
            // No fault of the client: the server runs on a runtime, with an engine; another record needs a newer one.
            LockError::NeedsEngine { .. } | LockError::NoRuntime | LockError::UnknownVersion { .. } => {
                Problem::internal(&detail)
            }
            _ => Problem::of_kind(error.kind(), &error),
        }
    }
}

fn refused_request(refused: &LockRefused, detail: String) -> Problem {
    let problem = |code, lock: &String| Problem::new(code, detail.clone()).with("lock", lock);
    match refused {
        LockRefused::Capacity { lock, stored, asked } => {
            problem(ProblemCode::LockKind, lock).with("stored", stored).with("asked", asked)
        }
        LockRefused::TooMany { lock, asked, capacity } => {
            problem(ProblemCode::Invalid, lock).with("asked", asked).with("capacity", capacity)
        }
        LockRefused::Reused { lock, before, asked } => {
            problem(ProblemCode::RequestReused, lock).with("before", before).with("asked", asked)
        }
        LockRefused::Forced { lock, reason } => problem(ProblemCode::LockForced, lock).with("reason", reason),
        // Only executions are told of these.
        _ => Problem::new(ProblemCode::Conflict, detail),
    }
}
