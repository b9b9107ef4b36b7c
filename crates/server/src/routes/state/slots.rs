//! Slots: named values that all code shares, or those of a workflow, an execution or a tree.

use axum::extract::State;
use axum::http::header::ETAG;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use latchwork::Value;
use latchwork::state::Container;

use crate::api::Namespace;
use crate::calls::Call;
use crate::routes::state::change::StateChange;
use crate::wire::answers::{ConditionMissing, NoSuchSlot, StateRefused};
use crate::wire::etag::{etag, is_known};
use crate::wire::problem::Problem;
use crate::wire::request::{JsonBody, PathParams, QueryParams, json_answer};
use crate::wire::state::{ChangedWire, IncrementState, PushState, SlotChangeQuery, SlotQuery, SlotWire, missing};

/// The slot of a name, as a container of JSON.
pub(super) fn slot(namespace: &Namespace, name: &str, query: &SlotQuery) -> Result<Container, Problem> {
    Ok(query.slots(namespace.engine().states())?.slot::<Value>(name).container().clone())
}

/// Reads a slot.
///
/// A slot that was never written, or was removed, is answered by 404.
#[utoipa::path(
    get,
    path = "/slots/{name}",
    params(
        ("name" = String, Path, description = "The name, with its special characters encoded."),
        SlotQuery,
        ("If-None-Match" = Option<String>, Header, description = "A known rev: the answer to it is 304."),
    ),
    responses(
        (status = 200, description = "The slot.", body = SlotWire, headers(("ETag" = String))),
        (status = 304, description = "The slot is still at the known rev."),
        NoSuchSlot,
    )
)]
pub(super) async fn get_slot(
    State(namespace): State<Namespace>,
    PathParams(name): PathParams<String>,
    QueryParams(query): QueryParams<SlotQuery>,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let slot = slot(&namespace, &name, &query)?;
    let (value, rev) = slot.read().await?;
    let value = value.ok_or_else(|| missing(slot.name(), rev))?;
    if is_known(&headers, rev)? {
        return Ok((StatusCode::NOT_MODIFIED, [(ETAG, etag(rev))]).into_response());
    }
    let SlotQuery { workflow, execution, tree } = query;
    let shown = SlotWire { name, workflow, execution, tree, rev: rev.0, value };
    Ok(([(ETAG, etag(rev))], json_answer(&shown)).into_response())
}

/// Replaces the value of a slot, or creates it. The body is the value.
#[utoipa::path(
    put,
    path = "/slots/{name}",
    params(
        ("name" = String, Path),
        SlotChangeQuery,
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
pub(super) async fn put_slot(
    State(namespace): State<Namespace>,
    PathParams(name): PathParams<String>,
    QueryParams(query): QueryParams<SlotChangeQuery>,
    call: Call,
    headers: HeaderMap,
    JsonBody(value): JsonBody<Value>,
) -> Result<Response, Problem> {
    let (query, fence) = query.parts();
    let slot = slot(&namespace, &name, &query)?;
    StateChange::new(&namespace, slot, &call, &fence)?.put(&headers, value).await
}

/// Merges into the object in a slot as a JSON merge patch (RFC 7396). A missing object is created.
#[utoipa::path(
    patch,
    path = "/slots/{name}",
    params(
        ("name" = String, Path),
        SlotChangeQuery,
        ("If-Match" = Option<String>, Header, description = "The rev that was read."),
        ("If-None-Match" = Option<String>, Header, description = "* to create it only."),
    ),
    request_body = Object,
    responses(
        (status = 200, description = "It was merged: `value` is the whole value.", body = ChangedWire),
        StateRefused,
    )
)]
pub(super) async fn patch_slot(
    State(namespace): State<Namespace>,
    PathParams(name): PathParams<String>,
    QueryParams(query): QueryParams<SlotChangeQuery>,
    call: Call,
    headers: HeaderMap,
    JsonBody(patch): JsonBody<Value>,
) -> Result<Response, Problem> {
    let (query, fence) = query.parts();
    let slot = slot(&namespace, &name, &query)?;
    let change = StateChange::new(&namespace, slot, &call, &fence)?;
    change.operate(&headers, |slot| slot.patch_state(&patch)).await
}

/// Removes the value of a slot.
#[utoipa::path(
    delete,
    path = "/slots/{name}",
    params(
        ("name" = String, Path),
        SlotChangeQuery,
        ("If-Match" = String, Header, description = "The rev that was read, or * for any."),
    ),
    responses(
        (status = 200, description = "It was removed.", body = ChangedWire),
        NoSuchSlot,
        StateRefused,
        ConditionMissing,
    )
)]
pub(super) async fn remove_slot(
    State(namespace): State<Namespace>,
    PathParams(name): PathParams<String>,
    QueryParams(query): QueryParams<SlotChangeQuery>,
    call: Call,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let (query, fence) = query.parts();
    let slot = slot(&namespace, &name, &query)?;
    StateChange::new(&namespace, slot, &call, &fence)?.remove(&headers).await
}

/// Adds to the number in a slot, or to one in its object.
#[utoipa::path(
    post,
    path = "/slots/{name}/increment",
    params(
        ("name" = String, Path),
        SlotChangeQuery,
        ("If-Match" = Option<String>, Header, description = "The rev that was read."),
    ),
    request_body = IncrementState,
    responses(
        (status = 200, description = "`value` is the sum.", body = ChangedWire),
        StateRefused,
    )
)]
pub(super) async fn increment_slot(
    State(namespace): State<Namespace>,
    PathParams(name): PathParams<String>,
    QueryParams(query): QueryParams<SlotChangeQuery>,
    call: Call,
    headers: HeaderMap,
    JsonBody(IncrementState { path, by }): JsonBody<IncrementState>,
) -> Result<Response, Problem> {
    let (query, fence) = query.parts();
    let slot = slot(&namespace, &name, &query)?;
    let (change, by) = (StateChange::new(&namespace, slot, &call, &fence)?, by.unwrap_or(1.into()));
    change.operate(&headers, |slot| slot.inc_state(&path, by.clone())).await
}

/// Adds an element to the end of the list in a slot, or of one in its object.
#[utoipa::path(
    post,
    path = "/slots/{name}/push",
    params(
        ("name" = String, Path),
        SlotChangeQuery,
        ("If-Match" = Option<String>, Header, description = "The rev that was read."),
    ),
    request_body = PushState,
    responses(
        (status = 200, description = "`value` is the length of the list.", body = ChangedWire),
        StateRefused,
    )
)]
pub(super) async fn push_slot(
    State(namespace): State<Namespace>,
    PathParams(name): PathParams<String>,
    QueryParams(query): QueryParams<SlotChangeQuery>,
    call: Call,
    headers: HeaderMap,
    JsonBody(PushState { path, value }): JsonBody<PushState>,
) -> Result<Response, Problem> {
    let (query, fence) = query.parts();
    let slot = slot(&namespace, &name, &query)?;
    let change = StateChange::new(&namespace, slot, &call, &fence)?;
    change.operate(&headers, |slot| slot.push_state(&path, value.clone())).await
}
