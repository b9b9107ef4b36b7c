//! The span of a request. Probes and what a machine reads every few seconds have none.

use axum::extract::{MatchedPath, Request};
use axum::http::Method;
use axum::middleware::Next;
use axum::response::Response;
use tracing::{Instrument, Span};

use crate::router::API_ROUTES;

/// The header of W3C Trace Context.
const TRACEPARENT: &str = "traceparent";

/// Answers a request within a span, if traces are made.
pub(crate) async fn request(request: Request, next: Next) -> Response {
    let span = span_of(&request);
    if span.is_disabled() {
        return next.run(request).await;
    }
    let answer = next.run(request).instrument(span.clone()).await;
    span.record("status", answer.status().as_u16());
    answer
}

fn span_of(request: &Request) -> Span {
    let route = request.extensions().get::<MatchedPath>().map(MatchedPath::as_str);
    if route.is_some_and(|route| route.ends_with("/healthz") || route.ends_with("/readyz")) {
        return Span::none();
    }
    // Which route of the API it is, is known when its namespace has matched it.
    let route = route.filter(|route| !route.ends_with(API_ROUTES));
    // Two of them are none.
    let mut told = request.headers().get_all(TRACEPARENT).iter();
    let traceparent = told.next().filter(|_| told.next().is_none()).and_then(|text| text.to_str().ok());
    tracing::debug_span!(
        "request",
        method = known_method(request.method()),
        route,
        path = request.uri().path(),
        traceparent,
        namespace = tracing::field::Empty,
        execution = tracing::field::Empty,
        link = tracing::field::Empty,
        status = tracing::field::Empty,
    )
}

/// The request is for this route of a namespace. Both addresses of a namespace have one route.
pub(crate) fn matched(namespace: &str, request: &Request) {
    let span = Span::current();
    if span.is_disabled() {
        return;
    }
    span.record("namespace", namespace);
    if let Some(route) = request.extensions().get::<MatchedPath>() {
        span.record("route", format!("/v1{}", route.as_str()));
    }
}

/// A client may invent methods, but no names of spans and no labels of metrics.
pub(crate) fn known_method(method: &Method) -> &'static str {
    match *method {
        Method::GET => "GET",
        Method::HEAD => "HEAD",
        Method::POST => "POST",
        Method::PUT => "PUT",
        Method::PATCH => "PATCH",
        Method::DELETE => "DELETE",
        Method::OPTIONS => "OPTIONS",
        _ => "_OTHER",
    }
}
