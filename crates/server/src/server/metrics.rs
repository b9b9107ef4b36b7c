//! The metrics of the process: the route that shows them, and the counts of requests. It knows no route, and no format
//! but the media type: what a recorder has gathered is rendered elsewhere.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::header::CONTENT_TYPE;
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use latchwork::store::Env;
use metrics::{counter, histogram};

use crate::access::{Access, Role, check_host};
use crate::spans::known_method;
use crate::wire::problem::Problem;

/// The media type of the text format of Prometheus.
const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Renders the metrics.
pub(crate) type Render = Arc<dyn Fn() -> String + Send + Sync>;

struct Exposition {
    render: Render,
    access: Access,
    namespaces: Vec<String>,
}

/// Adds `/metrics`, and counts all requests.
pub(crate) fn serve(router: Router, render: Render, access: Access, namespaces: Vec<String>, env: &Env) -> Router {
    let exposition = Arc::new(Exposition { render, access, namespaces });
    let route = get(show).with_state(exposition);
    router.route("/metrics", route).layer(middleware::from_fn_with_state(env.clone(), count))
}

async fn show(State(exposition): State<Arc<Exposition>>, request: Request) -> Result<Response, Problem> {
    let (parts, _) = request.into_parts();
    check_host(&exposition.access, &parts)?;
    for name in &exposition.namespaces {
        exposition.access.admit(&parts, Role::Read, name)?;
    }
    Ok(([(CONTENT_TYPE, TEXT)], (exposition.render)()).into_response())
}

async fn count(State(env): State<Env>, request: Request, next: Next) -> Response {
    let (method, began) = (known_method(request.method()), env.monotonic());
    let path = request.uri().path().to_string();
    let answer = next.run(request).await;
    let (status, took) = (answer.status().as_u16(), env.monotonic().saturating_sub(began));
    counter!("latchwork_http_requests_total", "method" => method, "status" => status.to_string()).increment(1);
    histogram!("latchwork_http_request_seconds", "method" => method).record(took.as_secs_f64());
    // The query may hold data. The path names things, as the log of any server does.
    tracing::debug!(method, path, status, took_ms = took.as_millis() as u64, "answered");
    answer
}
