//! Health and readiness, for what starts and watches the server. They need no token and tell nothing about data.

use std::time::Duration;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use latchwork::json;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;

use crate::router::Hub;
use crate::wire::problem::{Problem, ProblemCode, ProblemShape};
use crate::wire::request::json_answer;

/// The time in which a store must answer.
const PATIENCE: Duration = Duration::from_secs(2);

/// The routes of health, beside those of the namespaces.
pub(crate) fn health() -> OpenApiRouter<Hub> {
    OpenApiRouter::new().routes(routes!(healthz)).routes(routes!(readyz))
}

/// The process runs and answers.
#[utoipa::path(get, path = "/healthz", responses((status = 200, description = "It runs.", body = Object)))]
async fn healthz() -> Response {
    json_answer(&json!({"status": "ok"}))
}

/// The server takes work: it does not shut down, and every store answers.
#[utoipa::path(
    get,
    path = "/readyz",
    responses(
        (status = 200, description = "It takes work.", body = Object),
        (status = 503, description = "It does not take work.", body = ProblemShape,
            content_type = "application/problem+json"),
    )
)]
async fn readyz(State(hub): State<Hub>) -> Result<Response, Problem> {
    if hub.is_closing() {
        return Err(Problem::new(ProblemCode::Unavailable, "the server shuts down"));
    }
    for namespace in hub.namespaces() {
        let store = namespace.engine().store();
        tokio::select! {
            answered = store.generation() => {
                answered?;
            }
            () = namespace.env().sleep(PATIENCE) => {
                return Err(Problem::new(ProblemCode::Unavailable, "a store does not answer"));
            }
        }
    }
    Ok(json_answer(&json!({"status": "ready"})).into_response())
}
