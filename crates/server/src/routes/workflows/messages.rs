//! Messages to executions over HTTP: signals and updates. Each has an id, under which it counts once: the client's, or
//! that of the call.

use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::RETRY_AFTER;
use axum::response::{IntoResponse, Response};
use latchwork::Value;
use latchwork::workflow::{SendSignal, SendUpdate};

use crate::api::Namespace;
use crate::calls::Call;
use crate::spans;
use crate::wire::answers::NoSuchExecution;
use crate::wire::problem::{Problem, ProblemShape};
use crate::wire::request::{JsonBody, PathParams, QueryParams, json_answer, json_answer_at};
use crate::wire::wait::{WaitQuery, asked, within};
use crate::wire::workflow::UpdateWire;
use crate::wire::workflow::ask::{NewSignal, NewUpdate};

/// Sends a signal to an execution.
///
/// When it is answered, the signal is stored, and will be received once.
#[utoipa::path(
    post,
    path = "/workflows/{id}/signals",
    params(("id" = String, Path)),
    request_body = NewSignal,
    responses(
        (status = 204, description = "It is stored."),
        NoSuchExecution,
        (status = 409, description = "The execution has ended, or the id was used for another signal.",
            body = ProblemShape, content_type = "application/problem+json"),
    )
)]
pub(super) async fn signal_execution(
    State(namespace): State<Namespace>,
    PathParams(id): PathParams<String>,
    call: Call,
    JsonBody(NewSignal { name, payload, id: signal }): JsonBody<NewSignal>,
) -> Result<Response, Problem> {
    spans::link_to_execution(namespace.engine(), &id);
    let send = namespace.engine().signal(id, &name, &payload);
    // All attempts at a call send one signal: its id is that of the call.
    let signal = signal.or(call.id().map(|call| call.to_string()));
    signal.into_iter().fold(send, SendSignal::id).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// Sends an update to an execution, and waits for its answer.
///
/// An update that is not answered in time is answered later: send it again under its id to get the answer.
#[utoipa::path(
    post,
    path = "/workflows/{id}/updates",
    params(("id" = String, Path), WaitQuery),
    request_body = NewUpdate,
    responses(
        (status = 200, description = "The answer.", body = UpdateWire),
        (status = 202, description = "It is stored, and not answered yet.", body = UpdateWire,
            headers(("Retry-After" = u64))),
        NoSuchExecution,
        (status = 409, description = "It was refused, the execution has ended, or the id was used for another update.",
            body = ProblemShape, content_type = "application/problem+json"),
    )
)]
pub(super) async fn update_execution(
    State(namespace): State<Namespace>,
    PathParams(id): PathParams<String>,
    QueryParams(WaitQuery { wait }): QueryParams<WaitQuery>,
    call: Call,
    JsonBody(NewUpdate { name, request, id: update }): JsonBody<NewUpdate>,
) -> Result<Response, Problem> {
    let wait = asked(&namespace, wait.as_deref())?;
    spans::link_to_execution(namespace.engine(), &id);
    let send = namespace.engine().update::<Value>(id, &name, &request);
    // All attempts at a call send one update: its id is that of the call.
    let update = update.or(call.id().map(|call| call.to_string()));
    let sent = update.into_iter().fold(send, SendUpdate::id).send().await?;
    let answer = match wait {
        Some(wait) => within(&namespace, wait, sent.answer()).await.transpose()?,
        None => None,
    };
    let (id, answered) = (sent.id().to_string(), answer.is_some());
    let update = UpdateWire { id, answered, answer };
    match answered {
        true => Ok(json_answer(&update)),
        // With Retry-After, the answer is not kept for the Idempotency-Key: the next request waits again.
        false => Ok(([(RETRY_AFTER, "1")], json_answer_at(StatusCode::ACCEPTED, &update)).into_response()),
    }
}
