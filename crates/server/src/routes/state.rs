//! State over HTTP: containers of a scope, and slots. Both are changed alike; `change.rs` carries out what a request
//! asks for, with its condition and its idempotency.

mod change;
mod slots;
#[cfg(test)]
mod tests;
mod watch;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::http::StatusCode;
use axum::http::header::ETAG;
use axum::response::{IntoResponse, Response};
use latchwork::Value;
use latchwork::state::Container;
use utoipa_axum::routes;

use crate::access::Role;
use crate::api::Namespace;
use crate::calls::Call;
use crate::group::Group;
use crate::routes::state::change::StateChange;
use crate::wire::answers::{ConditionMissing, NoSuchState, StateRefused};
use crate::wire::etag::{etag, is_known};
use crate::wire::problem::Problem;
use crate::wire::request::{JsonBody, PathParams, QueryParams, json_answer};
use crate::wire::state::{
    ChangedWire, DeleteRecord, FenceQuery, IncrementState, PushState, SetRecord, StateScope, StateWire, missing,
};

pub(crate) fn group(namespace: &Namespace) -> Group {
    Group::new(namespace, "state")
        .reads(routes!(get_state))
        .reads(routes!(watch::watch_state))
        .changes(Role::Operate, routes!(put_state, patch_state, remove_state))
        .changes(Role::Operate, routes!(increment_state))
        .changes(Role::Operate, routes!(push_state))
        .changes(Role::Operate, routes!(set_state_record))
        .changes(Role::Operate, routes!(delete_state_record))
        .reads(routes!(slots::get_slot))
        .reads(routes!(watch::watch_slot))
        .changes(Role::Operate, routes!(slots::put_slot, slots::patch_slot, slots::remove_slot))
        .changes(Role::Operate, routes!(slots::increment_slot))
        .changes(Role::Operate, routes!(slots::push_slot))
}

/// The container that a path names.
fn container(namespace: &Namespace, scope: StateScope, id: &str) -> Container {
    let states = namespace.engine().states();
    match scope {
        StateScope::Request => states.request(id),
        StateScope::Session => states.session(id),
        StateScope::User => states.user(id),
        StateScope::Org => states.org(id),
    }
}

/// Reads the state of a request, a session, a user or an organisation.
///
/// State that was never written, or was removed, is answered by 404.
#[utoipa::path(
    get,
    path = "/state/{scope}/{id}",
    params(
        ("scope" = StateScope, Path),
        ("id" = String, Path, description = "The id, with its special characters encoded."),
        ("If-None-Match" = Option<String>, Header, description = "A known rev: the answer to it is 304."),
    ),
    responses(
        (status = 200, description = "The state.", body = StateWire, headers(("ETag" = String))),
        (status = 304, description = "The state is still at the known rev."),
        NoSuchState,
    )
)]
async fn get_state(
    State(namespace): State<Namespace>,
    PathParams((scope, id)): PathParams<(StateScope, String)>,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let container = container(&namespace, scope, &id);
    let (state, rev) = container.read().await?;
    let Some(state) = state.filter(|_| rev.0 > 0) else { return Err(missing(container.name(), rev)) };
    if is_known(&headers, rev)? {
        return Ok((StatusCode::NOT_MODIFIED, [(ETAG, etag(rev))]).into_response());
    }
    let shown = StateWire { scope, id, rev: rev.0, state };
    Ok(([(ETAG, etag(rev))], json_answer(&shown)).into_response())
}

/// Replaces a state, or creates it. The body is the state.
#[utoipa::path(
    put,
    path = "/state/{scope}/{id}",
    params(
        ("scope" = StateScope, Path),
        ("id" = String, Path),
        FenceQuery,
        ("If-Match" = Option<String>, Header, description = "The rev that was read, or * for any."),
        ("If-None-Match" = Option<String>, Header, description = "* to create it, and never to replace it."),
    ),
    request_body = Value,
    responses(
        (status = 200, description = "It was replaced.", body = ChangedWire, headers(("ETag" = String))),
        (status = 201, description = "It was created.", body = ChangedWire, headers(("ETag" = String))),
        StateRefused,
        ConditionMissing,
    )
)]
async fn put_state(
    State(namespace): State<Namespace>,
    PathParams((scope, id)): PathParams<(StateScope, String)>,
    QueryParams(fence): QueryParams<FenceQuery>,
    call: Call,
    headers: HeaderMap,
    JsonBody(state): JsonBody<Value>,
) -> Result<Response, Problem> {
    let container = container(&namespace, scope, &id);
    StateChange::new(&namespace, container, &call, &fence)?.put(&headers, state).await
}

/// Merges into a state as a JSON merge patch (RFC 7396): objects are merged, null removes. A missing state is created.
///
/// Patches of several callers accumulate, so no condition is needed; one with revs is possible.
#[utoipa::path(
    patch,
    path = "/state/{scope}/{id}",
    params(
        ("scope" = StateScope, Path),
        ("id" = String, Path),
        FenceQuery,
        ("If-Match" = Option<String>, Header, description = "The rev that was read."),
        ("If-None-Match" = Option<String>, Header, description = "* to create it only."),
    ),
    request_body = Object,
    responses(
        (status = 200, description = "It was merged: `value` is the state.", body = ChangedWire),
        StateRefused,
    )
)]
async fn patch_state(
    State(namespace): State<Namespace>,
    PathParams((scope, id)): PathParams<(StateScope, String)>,
    QueryParams(fence): QueryParams<FenceQuery>,
    call: Call,
    headers: HeaderMap,
    JsonBody(patch): JsonBody<Value>,
) -> Result<Response, Problem> {
    let container = container(&namespace, scope, &id);
    let change = StateChange::new(&namespace, container, &call, &fence)?;
    change.operate(&headers, |container| container.patch_state(&patch)).await
}

/// Removes a state.
#[utoipa::path(
    delete,
    path = "/state/{scope}/{id}",
    params(
        ("scope" = StateScope, Path),
        ("id" = String, Path),
        FenceQuery,
        ("If-Match" = String, Header, description = "The rev that was read, or * for any."),
    ),
    responses(
        (status = 200, description = "It was removed.", body = ChangedWire),
        NoSuchState,
        StateRefused,
        ConditionMissing,
    )
)]
async fn remove_state(
    State(namespace): State<Namespace>,
    PathParams((scope, id)): PathParams<(StateScope, String)>,
    QueryParams(fence): QueryParams<FenceQuery>,
    call: Call,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let container = container(&namespace, scope, &id);
    StateChange::new(&namespace, container, &call, &fence)?.remove(&headers).await
}

/// Adds to a number in a state.
#[utoipa::path(
    post,
    path = "/state/{scope}/{id}/increment",
    params(
        ("scope" = StateScope, Path),
        ("id" = String, Path),
        FenceQuery,
        ("If-Match" = Option<String>, Header, description = "The rev that was read."),
    ),
    request_body = IncrementState,
    responses(
        (status = 200, description = "`value` is the sum.", body = ChangedWire),
        StateRefused,
    )
)]
async fn increment_state(
    State(namespace): State<Namespace>,
    PathParams((scope, id)): PathParams<(StateScope, String)>,
    QueryParams(fence): QueryParams<FenceQuery>,
    call: Call,
    headers: HeaderMap,
    JsonBody(IncrementState { path, by }): JsonBody<IncrementState>,
) -> Result<Response, Problem> {
    let container = container(&namespace, scope, &id);
    let (change, by) = (StateChange::new(&namespace, container, &call, &fence)?, by.unwrap_or(1.into()));
    change.operate(&headers, |container| container.inc_state(&path, by.clone())).await
}

/// Adds an element to the end of a list in a state.
#[utoipa::path(
    post,
    path = "/state/{scope}/{id}/push",
    params(
        ("scope" = StateScope, Path),
        ("id" = String, Path),
        FenceQuery,
        ("If-Match" = Option<String>, Header, description = "The rev that was read."),
    ),
    request_body = PushState,
    responses(
        (status = 200, description = "`value` is the length of the list.", body = ChangedWire),
        StateRefused,
    )
)]
async fn push_state(
    State(namespace): State<Namespace>,
    PathParams((scope, id)): PathParams<(StateScope, String)>,
    QueryParams(fence): QueryParams<FenceQuery>,
    call: Call,
    headers: HeaderMap,
    JsonBody(PushState { path, value }): JsonBody<PushState>,
) -> Result<Response, Problem> {
    let container = container(&namespace, scope, &id);
    let change = StateChange::new(&namespace, container, &call, &fence)?;
    change.operate(&headers, |container| container.push_state(&path, value.clone())).await
}

/// Sets an entry of a record in a state.
#[utoipa::path(
    post,
    path = "/state/{scope}/{id}/set-record",
    params(
        ("scope" = StateScope, Path),
        ("id" = String, Path),
        FenceQuery,
        ("If-Match" = Option<String>, Header, description = "The rev that was read."),
    ),
    request_body = SetRecord,
    responses(
        (status = 200, description = "`value` is the value of the entry.", body = ChangedWire),
        StateRefused,
    )
)]
async fn set_state_record(
    State(namespace): State<Namespace>,
    PathParams((scope, id)): PathParams<(StateScope, String)>,
    QueryParams(fence): QueryParams<FenceQuery>,
    call: Call,
    headers: HeaderMap,
    JsonBody(SetRecord { path, entry, value }): JsonBody<SetRecord>,
) -> Result<Response, Problem> {
    let container = container(&namespace, scope, &id);
    let change = StateChange::new(&namespace, container, &call, &fence)?;
    change.operate(&headers, |container| container.set_state_record(&path, &entry, value.clone())).await
}

/// Removes an entry of a record in a state.
#[utoipa::path(
    post,
    path = "/state/{scope}/{id}/delete-record",
    params(
        ("scope" = StateScope, Path),
        ("id" = String, Path),
        FenceQuery,
        ("If-Match" = Option<String>, Header, description = "The rev that was read."),
    ),
    request_body = DeleteRecord,
    responses(
        (status = 200, description = "`value` is the value that was removed; null if there was none.",
            body = ChangedWire),
        StateRefused,
    )
)]
async fn delete_state_record(
    State(namespace): State<Namespace>,
    PathParams((scope, id)): PathParams<(StateScope, String)>,
    QueryParams(fence): QueryParams<FenceQuery>,
    call: Call,
    headers: HeaderMap,
    JsonBody(DeleteRecord { path, entry }): JsonBody<DeleteRecord>,
) -> Result<Response, Problem> {
    let container = container(&namespace, scope, &id);
    let change = StateChange::new(&namespace, container, &call, &fence)?;
    change.operate(&headers, |container| container.delete_state_record(&path, &entry)).await
}
