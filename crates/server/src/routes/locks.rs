//! Locks over HTTP: the group, and what operators see and do. Clients hold locks through sessions that they renew, and
//! through requests that keep their place in the queue from call to call.

mod acquire;
mod sessions;
#[cfg(test)]
mod tests;

use axum::extract::State;
use axum::http::{StatusCode, Uri};
use axum::response::{IntoResponse, Response};
use latchwork::lock::{LockError, LockState, Session};
use latchwork::store::Uuid;
use serde::Deserialize;
use utoipa::IntoParams;
use utoipa_axum::routes;

use crate::access::Role;
use crate::api::Namespace;
use crate::calls::Call;
use crate::group::Group;
use crate::wire::answers::NoSuchLock;
use crate::wire::lock::{ForceRelease, LockForcedWire, LockShownWire, LockWire, ScopeQuery, session_lost};
use crate::wire::page::{PageQuery, PageWire, page_answer};
use crate::wire::problem::{Problem, ProblemCode, ProblemShape};
use crate::wire::request::{JsonBody, PathParams, QueryParams, json_answer};

pub(crate) fn group(namespace: &Namespace) -> Group {
    Group::new(namespace, "locks")
        .reads(routes!(list_locks))
        .reads(routes!(show_lock))
        .reads(routes!(sessions::show_session))
        .changes(Role::Operate, routes!(sessions::begin_session))
        .changes(Role::Operate, routes!(sessions::renew_session))
        .changes(Role::Operate, routes!(sessions::end_session))
        .changes(Role::Operate, routes!(acquire::acquire_lock))
        .changes(Role::Operate, routes!(acquire::release_lock))
        .changes(Role::Admin, routes!(force_release_lock))
        .changes(Role::Admin, routes!(remove_lock))
}

/// The session of a client.
async fn session(namespace: &Namespace, id: Uuid) -> Result<Session, Problem> {
    namespace.engine().locks().lasting_session(id).await?.ok_or_else(|| session_lost(id))
}

/// Which locks are listed.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
struct LockQuery {
    /// Only locks that are shared by the executions of this workflow.
    workflow: Option<String>,
    /// Only locks that are shared by this execution and its descendants.
    tree: Option<String>,
    /// Only locks that are held.
    #[serde(default)]
    held: bool,
    /// Continues after an earlier page: its `next`.
    after: Option<String>,
    /// The number of items of a page: 1 to 1000, by default 100.
    #[param(minimum = 1, maximum = 1000)]
    limit: Option<usize>,
}

/// Lists the locks that were ever used, by their names, global locks first.
#[utoipa::path(
    get,
    path = "/locks",
    params(LockQuery),
    responses((status = 200, description = "A page of locks.", body = PageWire<LockWire>))
)]
async fn list_locks(
    State(namespace): State<Namespace>,
    QueryParams(query): QueryParams<LockQuery>,
    uri: Uri,
) -> Result<Response, Problem> {
    let LockQuery { workflow, tree, held, after, limit } = query;
    let (page, list) = (PageQuery { after, limit }, namespace.engine().locks().list());
    let list = if held { list.held() } else { list };
    let list = list.scope(ScopeQuery { workflow, tree }.scope()?);
    let found = list.limit(page.limit()?).after(page.cursor()?).await?;
    Ok(page_answer(&uri, found, LockWire::from))
}

/// Shows the holders and the waiters of a lock, and its forced releases.
#[utoipa::path(
    get,
    path = "/locks/{name}",
    params(("name" = String, Path, description = "The name, with its special characters encoded."), ScopeQuery),
    responses(
        (status = 200, description = "The lock.", body = LockShownWire),
        NoSuchLock,
    )
)]
async fn show_lock(
    State(namespace): State<Namespace>,
    PathParams(name): PathParams<String>,
    QueryParams(scope): QueryParams<ScopeQuery>,
) -> Result<Response, Problem> {
    let state = namespace.engine().locks().inspect(scope.lock(name)?).await?;
    Ok(json_answer(&LockShownWire::from(state)))
}

/// Releases a grant, or removes a request from the queue, of any owner.
///
/// Its owner notices: a waiting call is answered by a problem, and a write that the token guards is refused.
#[utoipa::path(
    post,
    path = "/locks/{name}/force-release",
    params(("name" = String, Path), ScopeQuery),
    request_body = ForceRelease,
    responses(
        (status = 200, description = "It is released.", body = LockForcedWire),
        (status = 404, description = "There is no such lock, or no such token.", body = ProblemShape,
            content_type = "application/problem+json"),
    )
)]
async fn force_release_lock(
    State(namespace): State<Namespace>,
    PathParams(name): PathParams<String>,
    QueryParams(scope): QueryParams<ScopeQuery>,
    call: Call,
    JsonBody(ForceRelease { token, reason }): JsonBody<ForceRelease>,
) -> Result<Response, Problem> {
    if reason.is_empty() {
        return Err(Problem::new(ProblemCode::InvalidBody, "reason: give one; it stays in the lock's history"));
    }
    let (locks, name) = (namespace.engine().locks(), scope.lock(name)?);
    let before = locks.inspect(&name).await?;
    match locks.force_release(&name, token, &reason).await {
        // A token is never used again: an earlier attempt has released it.
        Err(LockError::NoSuchToken { .. })
            if call.repeated_since().is_some() && has_forced(&before, token, &reason) => {}
        released => released?,
    }
    let after = locks.inspect(&name).await?;
    let shown = LockForcedWire::of(&before, &after, token);
    let shown = shown.ok_or_else(|| Problem::internal("a forced release has left no trace"))?;
    Ok(json_answer(&shown))
}

fn has_forced(state: &LockState, token: u64, reason: &str) -> bool {
    state.forced.iter().any(|forced| forced.token == token && forced.reason == reason)
}

/// Removes a lock that has no holder and no waiter, so that it can be used as another kind. Its tokens go on.
#[utoipa::path(
    delete,
    path = "/locks/{name}",
    params(("name" = String, Path), ScopeQuery),
    responses(
        (status = 204, description = "It is removed."),
        NoSuchLock,
        (status = 409, description = "It is in use.", body = ProblemShape,
            content_type = "application/problem+json"),
    )
)]
async fn remove_lock(
    State(namespace): State<Namespace>,
    PathParams(name): PathParams<String>,
    QueryParams(scope): QueryParams<ScopeQuery>,
    call: Call,
) -> Result<Response, Problem> {
    let (locks, name) = (namespace.engine().locks(), scope.lock(name)?);
    match call.once() {
        Some(once) => locks.remove_once(name, once).await?,
        None => locks.remove(name).await?,
    }
    Ok(StatusCode::NO_CONTENT.into_response())
}
