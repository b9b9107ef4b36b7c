//! The stream of a request. The id of an event is its number, and a reader continues after the last one that it has
//! seen.

use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use futures_util::stream::{self, StreamExt};
use latchwork::flow::{Events, NumberedEvent};

use crate::api::Namespace;
use crate::routes::flows::{described, registered};
use crate::wire::flow::{EventsQuery, dropped_events, future_event, sse_event};
use crate::wire::problem::{Problem, ProblemShape};
use crate::wire::request::{PathParams, QueryParams};
use crate::wire::sse::{position, sse_answer};

/// Streams the events of a request as server-sent events, from the first one or after a known one, until the request
/// ends. The `id` of an event is its number; `Last-Event-ID` continues after it. The events are kept as long as the
/// request is.
#[utoipa::path(
    get,
    path = "/flows/{flow}/requests/{id}/events",
    params(
        ("flow" = String, Path),
        ("id" = String, Path),
        EventsQuery,
        ("Last-Event-ID" = Option<u64>, Header, description = "The number of the last event that was seen."),
    ),
    responses(
        (status = 200, description = "The stream. The name of an event is its `type`.", body = String,
            content_type = "text/event-stream"),
        (status = 204, description = "The known event is the end of the request: there are no more."),
        (status = 400, description = "`future-event`: there is no such event yet.", body = ProblemShape,
            content_type = "application/problem+json"),
        (status = 404, description = "The flow has no such request, or it was removed with its events.",
            body = ProblemShape, content_type = "application/problem+json"),
        (status = 410, description = "`history-dropped`: the events after this one are no longer kept.",
            body = ProblemShape, content_type = "application/problem+json"),
    )
)]
pub(super) async fn stream_events(
    State(namespace): State<Namespace>,
    PathParams((flow, id)): PathParams<(String, String)>,
    QueryParams(EventsQuery { after }): QueryParams<EventsQuery>,
    headers: HeaderMap,
) -> Result<Response, Problem> {
    let seen = position(&headers, after)?;
    let (_, description) = described(&namespace, &flow, &id).await?;
    let request = registered(&namespace, &flow)?.request(id.as_str());
    let last = request.last_event().await?;
    if let Some(seen) = seen {
        match last {
            Some(last) if seen < last => {}
            Some(last) if seen == last && description.status().is_end() => {
                return Ok(StatusCode::NO_CONTENT.into_response());
            }
            Some(last) if seen == last => {}
            last => return Err(future_event(seen, last)),
        }
    }
    let mut events = seen.map_or_else(|| request.events(), |seen| request.events_after(seen));
    let upcoming = seen.map_or(0, |seen| seen.saturating_add(1));
    // The first event is there if it is not the upcoming one: it tells whether those before it are kept.
    let first = match last.is_some_and(|last| upcoming <= last) {
        true => events.next().await?,
        false => None,
    };
    if let Some(first) = first.as_ref().filter(|first| first.number > upcoming) {
        return Err(dropped_events(first.number));
    }
    let first = stream::iter(first.map(|first| sse_event(&first)));
    Ok(sse_answer(&namespace, first.chain(stream::try_unfold(events, next))))
}

type Told = (crate::wire::sse::SseEvent, Events);

async fn next(mut events: Events) -> Result<Option<Told>, Problem> {
    let told = |event: NumberedEvent| sse_event(&event);
    match events.next().await? {
        Some(event) => Ok(Some((told(event)?, events))),
        None => Ok(None),
    }
}
