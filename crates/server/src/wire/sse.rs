//! Streams of server-sent events. The `id` of an event is its position in the log, and `Last-Event-ID` continues after
//! it. What is streamed, and which positions there are, is the business of the route.

use std::convert::Infallible;
use std::time::Duration;

use axum::http::HeaderMap;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream::{self, Stream, StreamExt};
use latchwork::Value;

use crate::api::Namespace;
use crate::wire::problem::{Problem, ProblemCode};

/// How long a stream is silent at most.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// The pause that a client makes before it connects again.
const RETRY: Duration = Duration::from_secs(2);

/// One event of a stream.
#[derive(Debug, Clone)]
pub(crate) struct SseEvent {
    /// Where the stream continues after this event.
    pub(crate) position: u64,
    /// The type of the event, if the stream has several.
    pub(crate) name: Option<String>,
    pub(crate) data: Value,
}

/// The position after which a client wants to continue: `Last-Event-ID`, or the parameter `after` of a client that
/// cannot set headers. The header wins: a browser sends it when it connects again with the same address.
pub(crate) fn position(headers: &HeaderMap, after: Option<u64>) -> Result<Option<u64>, Problem> {
    let Some(header) = headers.get("last-event-id") else { return Ok(after) };
    let position = header.to_str().ok().and_then(|text| text.trim().parse().ok());
    let wrong = || Problem::new(ProblemCode::InvalidHeader, "Last-Event-ID is the id of an event: a number");
    position.map(Some).ok_or_else(wrong)
}

/// Answers with a stream. It ends with the events, after a problem, or when the server shuts down; a client that
/// connects again then continues after its last event. A problem is an event `problem` with the document as data.
pub(crate) fn sse_answer<S>(namespace: &Namespace, events: S) -> Response
where
    S: Stream<Item = Result<SseEvent, Problem>> + Send + 'static,
{
    let hello = Event::default().retry(RETRY);
    let events = events.scan(false, |has_failed, event| {
        let shown = match event {
            _ if *has_failed => None,
            Ok(event) => Some(written(event)),
            Err(problem) => {
                *has_failed = true;
                Some(Event::default().event("problem").data(problem.document().to_string()))
            }
        };
        std::future::ready(shown)
    });
    let events = stream::iter([hello]).chain(events).take_until(namespace.closing()).map(Ok::<_, Infallible>);
    let mut answer = Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response();
    // Proxies that buffer would hold events back.
    answer.headers_mut().insert("x-accel-buffering", axum::http::HeaderValue::from_static("no"));
    answer
}

fn written(event: SseEvent) -> Event {
    let SseEvent { position, name, data } = event;
    let written = Event::default().id(position.to_string()).data(data.to_string());
    name.into_iter().fold(written, |written, name| written.event(name))
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;

    #[test]
    fn the_last_event_id_wins_over_the_parameter() {
        let mut headers = HeaderMap::new();
        assert_eq!(position(&headers, Some(3)).unwrap(), Some(3));
        headers.insert("last-event-id", HeaderValue::from_static("7"));
        assert_eq!(position(&headers, Some(3)).unwrap(), Some(7));
        for wrong in ["", "-1", "seven", "99999999999999999999"] {
            headers.insert("last-event-id", HeaderValue::from_str(wrong).unwrap());
            assert_eq!(position(&headers, None).unwrap_err().code(), ProblemCode::InvalidHeader);
        }
    }

    #[tokio::test]
    async fn a_stream_names_positions_and_ends_after_a_problem() {
        let engine = latchwork::workflow::Engine::on(&latchwork::store::Store::memory().await.unwrap());
        let engine = engine.start().await.unwrap();
        let closing = crate::api::Closing::new(tokio::sync::watch::Sender::new(false));
        let (access, limits) = (crate::access::Access::local(), crate::limits::Limits::default());
        let namespace = crate::api::Api::on(&engine).into_namespace("default", access, limits, closing.clone());
        let event = |position| SseEvent { position, name: Some("changed".into()), data: latchwork::json!({"a": 1}) };
        let failed = Problem::new(ProblemCode::HistoryDropped, "gone");
        let events = stream::iter([Ok(event(7)), Err(failed), Ok(event(8))]);
        let answer = sse_answer(&namespace, events);
        assert_eq!(answer.headers()["content-type"], "text/event-stream");
        let text = axum::body::to_bytes(answer.into_body(), 10_000).await.unwrap();
        let text = String::from_utf8(text.to_vec()).unwrap();
        let events: Vec<&str> = text.split("\n\n").collect();
        assert_eq!(events[0], "retry: 2000");
        assert!(events[1].contains("id: 7") && events[1].contains("event: changed"), "{text}");
        assert!(events[1].contains("data: {\"a\":1}"), "{text}");
        assert!(events[2].contains("event: problem") && events[2].contains("history-dropped"), "{text}");
        assert_eq!(events[3..], [""], "{text}");

        // A stream without end ends with the server.
        let answer = sse_answer(&namespace, stream::pending());
        closing.send_replace(true);
        axum::body::to_bytes(answer.into_body(), 10_000).await.unwrap();
    }
}
