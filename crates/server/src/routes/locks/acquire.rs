//! Acquiring and releasing a lock for a session of a client. A request stands in the store under its id, so a call that
//! is repeated, cut off or too late finds what has become of it.

use std::convert::Infallible;
use std::time::Duration;

use axum::extract::State;
use axum::http::header::RETRY_AFTER;
use axum::http::{HeaderValue, StatusCode};
use axum::response::Response;
use latchwork::lock::{LockError, LockKind, LockName, LockState, Locks, Session, StandingOutcome, StandingRequest};
use latchwork::store::Timestamp;
use serde::Deserialize;
use utoipa::IntoParams;

use crate::api::Namespace;
use crate::calls::Call;
use crate::routes::locks::session;
use crate::wire::lock::{
    AcquireLock, LockRequestWire, ReleaseLock, ReleasedWire, ScopeQuery, StandingWire, session_lost,
};
use crate::wire::problem::{Problem, ProblemCode, ProblemShape};
use crate::wire::request::{JsonBody, PathParams, QueryParams, json_answer, json_answer_at};
use crate::wire::time::millis;
use crate::wire::wait::asked;

/// The longest and the shortest pause that a client is asked to make while the lock is held.
const PAUSE: Duration = Duration::from_secs(1);
const SHORTEST: Duration = Duration::from_millis(100);

/// Which lock is acquired, and how long the call waits.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct AcquireQuery {
    /// The lock is shared by the executions of this workflow.
    workflow: Option<String>,
    /// The lock is shared by this execution and all its descendants.
    tree: Option<String>,
    /// Waits at most this long, such as `30s` or `500ms`; at most 60 s. Without it, the request does not enter the
    /// queue. With `0s` it enters the queue, and the answer comes at once.
    wait: Option<String>,
}

#[cfg(test)]
impl AcquireQuery {
    pub(super) fn waiting(wait: &str) -> AcquireQuery {
        AcquireQuery { wait: Some(wait.into()), ..AcquireQuery::default() }
    }
}

/// Acquires a lock for a session: a mutex, permits of a semaphore, or a read-write lock for reading or writing.
///
/// Requests are granted in the order in which they entered the queue. While the call waits, it renews the session. If
/// the time is up, the answer is 202, and **the request keeps its place in the queue**: the same call under the same
/// `request` goes on waiting, and finds the grant also if it was made in between. A request ends when it is released,
/// with its session, or by an operator; not by a connection that breaks.
#[utoipa::path(
    post,
    path = "/locks/{name}/acquire",
    params(("name" = String, Path, description = "The name, with its special characters encoded."), AcquireQuery),
    request_body = AcquireLock,
    responses(
        (status = 200, description = "The session holds the lock.", body = StandingWire),
        (status = 202, description = "The time is up, and the request waits in the queue: make it again.",
            body = StandingWire, headers(("Retry-After" = String))),
        (status = 409, description = "`lock-held`: the lock is held, and the request does not wait; `holder` and \
            `retry_after_ms` tell more. `lock-kind`: the lock is of another kind. `lock-request-reused` and \
            `lock-forced`.",
            body = ProblemShape, content_type = "application/problem+json"),
        (status = 410, description = "The session has ended.", body = ProblemShape,
            content_type = "application/problem+json"),
    )
)]
pub(super) async fn acquire_lock(
    State(namespace): State<Namespace>,
    PathParams(name): PathParams<String>,
    QueryParams(AcquireQuery { workflow, tree, wait }): QueryParams<AcquireQuery>,
    call: Call,
    JsonBody(wanted): JsonBody<AcquireLock>,
) -> Result<Response, Problem> {
    let (name, wait) = (ScopeQuery { workflow, tree }.lock(name)?, asked(&namespace, wait.as_deref())?);
    // The library's id of the request is the client's own, or the call: the next attempt finds the same request.
    let id = wanted.request.clone().unwrap_or_else(|| call.id().unwrap_or_else(|| namespace.env().uuid()).to_string());
    let (kind, request) = wanted.wanted(id.clone())?;
    let session = session(&namespace, wanted.session).await?;
    let asked = AskedLock { namespace: &namespace, locks: namespace.engine().locks(), session, name, kind, request };
    let standing = match wait {
        None => asked.stand(asked.request.clone()).await,
        Some(limit) => asked.wait(limit).await,
    };
    match standing {
        Ok(StandingOutcome::Granted(token)) => Ok(json_answer(&asked.shown(id, true, token.number()))),
        Ok(StandingOutcome::Waits(token)) => asked.queued(id, token.number()).await,
        Ok(_) => Err(asked.busy().await?),
        Err(LockError::NoSuchToken { token, .. }) => {
            let detail = "another call of the session has released the request meanwhile";
            Err(Problem::new(ProblemCode::Conflict, detail).with("token", token))
        }
        Err(error) => Err(error.into()),
    }
}

/// A lock that is asked for.
struct AskedLock<'a> {
    namespace: &'a Namespace,
    locks: Locks,
    session: Session,
    name: LockName,
    kind: LockKind,
    request: StandingRequest,
}

impl AskedLock<'_> {
    async fn stand(&self, request: StandingRequest) -> Result<StandingOutcome, LockError> {
        self.locks.stand(&self.session, &self.name, self.kind, request).await
    }

    /// Waits for the grant, at most this long, and not beyond the shutdown of the server.
    async fn wait(&self, limit: Duration) -> Result<StandingOutcome, LockError> {
        tokio::select! {
            biased;
            standing = self.stand(self.request.clone().wait(limit)) => standing,
            () = self.namespace.closing() => self.stand(self.request.clone().wait(Duration::ZERO)).await,
            never = self.keep_alive() => match never {},
        }
    }

    /// Renews the session while the call waits: a client that waits is alive.
    async fn keep_alive(&self) -> Infallible {
        let state = self.session.state().await.ok().flatten();
        let Some(state) = state else { return std::future::pending().await };
        loop {
            self.namespace.env().sleep(state.lease.length / 3).await;
            // The waiting request itself is told if the session has ended.
            if let Err(error) = self.session.renew().await {
                tracing::warn!(%error, session = %state.id, "the session of a waiting request was not renewed");
            }
        }
    }

    fn shown(&self, request: String, granted: bool, token: u64) -> StandingWire {
        StandingWire {
            lock: (&self.name).into(),
            session: self.session.id(),
            request,
            granted,
            token,
            position: None,
            holder: None,
            retry_after_ms: None,
        }
    }

    /// The answer to a request that waits in the queue.
    async fn queued(&self, id: String, token: u64) -> Result<Response, Problem> {
        let state = self.locks.inspect(&self.name).await?;
        if state.holders.iter().any(|holder| holder.token == token) {
            return Ok(json_answer(&self.shown(id, true, token)));
        }
        let position = state.waiters.iter().find(|waiter| waiter.token == token).and_then(|waiter| waiter.position);
        let (holder, pause) = self.holder(&state);
        let retry_after_ms = Some(millis(pause));
        let shown = StandingWire { position, holder, retry_after_ms, ..self.shown(id, false, token) };
        let mut answer = json_answer_at(StatusCode::ACCEPTED, &shown);
        answer.headers_mut().insert(RETRY_AFTER, HeaderValue::from(pause.as_secs().max(1)));
        Ok(answer)
    }

    /// The problem of a lock that is held.
    async fn busy(&self) -> Result<Problem, Problem> {
        let problem = |pause| {
            let detail =
                format!("lock {:?} is held; try again later, or wait for it: ?wait=30s", self.name.to_string());
            Problem::new(ProblemCode::LockHeld, detail).with("lock", self.name.to_string()).retry_after(pause)
        };
        Ok(match self.locks.inspect(&self.name).await {
            Ok(state) => {
                let (holder, pause) = self.holder(&state);
                problem(pause).with("holder", holder).with("used", state.used).with("waiting", state.waiting)
            }
            // It was removed meanwhile.
            Err(LockError::NotFound { .. }) => problem(SHORTEST).with("holder", None::<LockRequestWire>),
            Err(error) => return Err(error.into()),
        })
    }

    /// The oldest holder, and when it is worth trying again.
    fn holder(&self, state: &LockState) -> (Option<LockRequestWire>, Duration) {
        let Some(holder) = state.holders.first() else { return (None, SHORTEST) };
        let now = self.namespace.env().now();
        let left = |until: Timestamp| Duration::from_micros(until.0.saturating_sub(now.0));
        let pause = holder.lease.map_or(PAUSE, |lease| left(lease.until()).clamp(SHORTEST, PAUSE));
        (Some(LockRequestWire::of(holder, state.kind)), pause)
    }
}

/// Releases a lock that a session holds, or withdraws a request that waits.
#[utoipa::path(
    post,
    path = "/locks/{name}/release",
    params(("name" = String, Path), ScopeQuery),
    request_body = ReleaseLock,
    responses(
        (status = 200, description = "The session does not hold it any more.", body = ReleasedWire),
        (status = 410, description = "The session has ended: it may have lost the lock before.", body = ProblemShape,
            content_type = "application/problem+json"),
    )
)]
pub(super) async fn release_lock(
    State(namespace): State<Namespace>,
    PathParams(name): PathParams<String>,
    QueryParams(scope): QueryParams<ScopeQuery>,
    call: Call,
    JsonBody(ReleaseLock { session: id, token }): JsonBody<ReleaseLock>,
) -> Result<Response, Problem> {
    let (locks, name) = (namespace.engine().locks(), scope.lock(name)?);
    let session = session(&namespace, id).await?;
    // A token is never used again, so a repeated release cannot release a later grant.
    let mut released = locks.release(&session, &name, token).await?;
    if !released {
        if session.state().await?.is_none() {
            return Err(session_lost(id));
        }
        // Of a session that lives, a request is removed by the session or by an operator.
        released = call.repeated_since().is_some() && !is_known(&locks, &name, token).await?;
    }
    Ok(json_answer(&ReleasedWire { lock: (&name).into(), token, released }))
}

/// True if another session has the token, or an operator has released it.
async fn is_known(locks: &Locks, name: &LockName, token: u64) -> Result<bool, Problem> {
    match locks.inspect(name).await {
        Ok(state) => {
            let is_used = state.holders.iter().chain(&state.waiters).any(|request| request.token == token);
            Ok(is_used || state.forced.iter().any(|forced| forced.token == token))
        }
        Err(LockError::NotFound { .. }) => Ok(false),
        Err(error) => Err(error.into()),
    }
}
