//! Watching a container or a slot as a stream of events. The position of an event is the generation of its commit.

use std::time::Duration;

use axum::extract::State;
use axum::http::HeaderMap;
use axum::response::Response;
use futures_util::stream::{self, StreamExt};
use latchwork::json;
use latchwork::state::{Container, StateWatch};
use latchwork::store::Generation;
use serde::Deserialize;
use utoipa::IntoParams;

use crate::api::Namespace;
use crate::routes::state::container;
use crate::routes::state::slots::slot;
use crate::wire::problem::{Problem, ProblemShape};
use crate::wire::request::{PathParams, QueryParams};
use crate::wire::sse::{SseEvent, position, sse_answer};
use crate::wire::state::{ChangeWire, SlotQuery, StateScope};

/// Where a stream begins.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct WatchQuery {
    /// The position after which the stream begins: the id of an event. Without one, the first event is the state as it
    /// is now.
    after: Option<u64>,
}

/// How long a stream waits for its first event before it begins.
const PATIENCE: Duration = Duration::from_millis(100);

/// Which slot is watched, and where the stream begins.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(super) struct SlotWatchQuery {
    /// The executions of this workflow share it.
    workflow: Option<String>,
    /// It belongs to this execution.
    execution: Option<String>,
    /// This execution shares it with all its descendants.
    tree: Option<String>,
    /// The position after which the stream begins: the id of an event. Without one, the first event is the value as it
    /// is now.
    after: Option<u64>,
}

/// Watches a state: every commit that changes it is one event `change`, whose data is a `StateChange`.
#[utoipa::path(
    get,
    path = "/state/{scope}/{id}/watch",
    params(
        ("scope" = StateScope, Path),
        ("id" = String, Path),
        WatchQuery,
        ("Last-Event-ID" = Option<String>, Header, description = "Continues after this event."),
    ),
    responses(
        (status = 200, description = "The stream.", body = ChangeWire, content_type = "text/event-stream"),
        (status = 400, description = "The position is one of the future.", body = ProblemShape,
            content_type = "application/problem+json"),
        (status = 410, description = "The history after the position is no longer kept: begin without one.",
            body = ProblemShape, content_type = "application/problem+json"),
    )
)]
pub(super) async fn watch_state(
    State(namespace): State<Namespace>,
    PathParams((scope, id)): PathParams<(StateScope, String)>,
    QueryParams(WatchQuery { after }): QueryParams<WatchQuery>,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    watched(&namespace, container(&namespace, scope, &id), position(&headers, after)?).await
}

/// Watches a slot: every commit that changes it is one event `change`, whose data is a `StateChange`.
#[utoipa::path(
    get,
    path = "/slots/{name}/watch",
    params(
        ("name" = String, Path),
        SlotWatchQuery,
        ("Last-Event-ID" = Option<String>, Header, description = "Continues after this event."),
    ),
    responses(
        (status = 200, description = "The stream.", body = ChangeWire, content_type = "text/event-stream"),
        (status = 400, description = "The position is one of the future.", body = ProblemShape,
            content_type = "application/problem+json"),
        (status = 410, description = "The history after the position is no longer kept: begin without one.",
            body = ProblemShape, content_type = "application/problem+json"),
    )
)]
pub(super) async fn watch_slot(
    State(namespace): State<Namespace>,
    PathParams(name): PathParams<String>,
    QueryParams(SlotWatchQuery { workflow, execution, tree, after }): QueryParams<SlotWatchQuery>,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let slot = slot(&namespace, &name, &SlotQuery { workflow, execution, tree })?;
    watched(&namespace, slot, position(&headers, after)?).await
}

async fn watched(namespace: &Namespace, container: Container, after: Option<u64>) -> Result<Response, Problem> {
    let (from, first) = match after {
        Some(after) => (Generation(after), None),
        None => {
            // In this order: a change in between is in both.
            let now = namespace.engine().store().generation().await?;
            let (state, rev) = container.read().await?;
            (now, Some(event(now, &ChangeWire::now(state, rev))))
        }
    };
    let mut watch = container.watch(from).await?;
    let first = match first {
        Some(now) => Some(now),
        None => first_change(namespace, from, &mut watch).await?,
    };
    let changes = stream::unfold(Some(watch), next);
    Ok(sse_answer(namespace, stream::iter(first).map(Ok).chain(changes)))
}

/// The first change after a known position, if it comes soon. History that is no longer kept is found by reading it,
/// and belongs into the status of the answer.
async fn first_change(
    namespace: &Namespace,
    from: Generation,
    watch: &mut StateWatch,
) -> Result<Option<SseEvent>, Problem> {
    if namespace.engine().store().generation().await? <= from {
        return Ok(None);
    }
    tokio::select! {
        biased;
        change = watch.next() => Ok(change?.map(|change| event(change.generation, &ChangeWire::from(change)))),
        // A watch may be dropped while it waits, and loses nothing.
        () = namespace.env().sleep(PATIENCE) => Ok(None),
    }
}

async fn next(watch: Option<StateWatch>) -> Option<(Result<SseEvent, Problem>, Option<StateWatch>)> {
    let mut watch = watch?;
    match watch.next().await {
        Ok(Some(change)) => Some((Ok(event(change.generation, &ChangeWire::from(change))), Some(watch))),
        Ok(None) => None,
        Err(error) => Some((Err(error.into()), None)),
    }
}

fn event(position: Generation, change: &ChangeWire) -> SseEvent {
    SseEvent { position: position.0, name: Some("change".into()), data: json!(change) }
}
