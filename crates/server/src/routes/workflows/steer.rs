//! What operators do to executions over HTTP: cancel, terminate, resume, retry, fork. A repeated call that finds its
//! own effect is answered like the first one; a resume and a retry are made once by the library.

use axum::extract::State;
use axum::http::StatusCode;
use axum::http::header::LOCATION;
use axum::response::{IntoResponse, Response};
use latchwork::workflow::{Description, ExecutionState, Steer, WorkflowError};

use crate::api::Namespace;
use crate::calls::Call;
use crate::routes::entities::encoded;
use crate::routes::workflows::still_kept;
use crate::wire::answers::NoSuchExecution;
use crate::wire::problem::{Problem, ProblemCode, ProblemShape};
use crate::wire::request::{JsonBody, PathParams, json_answer_at};
use crate::wire::workflow::StartedWire;
use crate::wire::workflow::ask::{Because, NewFork};

/// The code and the message of the failure of an execution that was terminated.
const TERMINATED: &str = "latchwork.terminated";
const TERMINATED_FOR: &str = "it was terminated: ";

/// Answers a request. If an attempt is repeated, an error may mean that an earlier attempt has taken effect: `is_done`
/// decides that by the execution.
async fn steered(
    namespace: &Namespace,
    id: &str,
    call: &Call,
    done: Result<(), WorkflowError>,
    is_done: impl FnOnce(&Description) -> bool,
) -> Result<Response, Problem> {
    match done {
        Err(error @ WorkflowError::Ended { .. }) if call.repeated_since().is_some() => {
            let found = namespace.engine().describe(id).await?;
            if !is_done(&found) {
                return Err(error.into());
            }
        }
        done => done?,
    }
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// Fails if another execution has taken the id since the first attempt: what became of the earlier execution is
/// not known, and the other must not be ended.
async fn is_the_same(namespace: &Namespace, id: &str, call: &Call) -> Result<(), Problem> {
    let Some(began) = call.repeated_from() else { return Ok(()) };
    match namespace.engine().describe(id).await {
        Ok(found) if found.started > began => {
            let detail = "the first request was cut off, and another execution was started under the id since then";
            Err(Problem::new(ProblemCode::OutcomeUnknown, detail).with("id", id))
        }
        // The change itself tells what is wrong.
        _ => Ok(()),
    }
}

/// Cancels an execution, which may clean up before it ends.
#[utoipa::path(
    post,
    path = "/workflows/{id}/cancel",
    params(("id" = String, Path)),
    request_body = Because,
    responses(
        (status = 204, description = "Its cancellation is stored. A second one changes nothing."),
        NoSuchExecution,
        (status = 409, description = "It has ended.", body = ProblemShape, content_type = "application/problem+json"),
    )
)]
pub(super) async fn cancel_execution(
    State(namespace): State<Namespace>,
    PathParams(id): PathParams<String>,
    call: Call,
    JsonBody(because): JsonBody<Because>,
) -> Result<Response, Problem> {
    let reason = because.reason()?;
    is_the_same(&namespace, &id, &call).await?;
    let done = namespace.engine().cancel(id.as_str(), &reason).await;
    // The execution keeps its cancellation, also after its end. A second one would have changed nothing.
    let is_done = |found: &Description| matches!(found.state, ExecutionState::Cancelled(_)) || found.cancel.is_some();
    steered(&namespace, &id, &call, done, is_done).await
}

/// Ends an execution as failed, wherever it is.
///
/// No more of its code runs.
#[utoipa::path(
    post,
    path = "/workflows/{id}/terminate",
    params(("id" = String, Path)),
    request_body = Because,
    responses(
        (status = 204, description = "It has ended."),
        NoSuchExecution,
        (status = 409, description = "It had ended before.", body = ProblemShape,
            content_type = "application/problem+json"),
    )
)]
pub(super) async fn terminate_execution(
    State(namespace): State<Namespace>,
    PathParams(id): PathParams<String>,
    call: Call,
    JsonBody(because): JsonBody<Because>,
) -> Result<Response, Problem> {
    let reason = because.reason()?;
    is_the_same(&namespace, &id, &call).await?;
    let done = namespace.engine().terminate(id.as_str(), &reason).await;
    // The failure of a terminated execution names the reason.
    let is_done = |found: &Description| match &found.state {
        ExecutionState::Failed(failure) => {
            failure.code() == TERMINATED && failure.message().strip_prefix(TERMINATED_FOR) == Some(&reason)
        }
        _ => false,
    };
    steered(&namespace, &id, &call, done, is_done).await
}

/// Lets a parked execution continue, with the code that is registered now.
#[utoipa::path(
    post,
    path = "/workflows/{id}/resume",
    params(("id" = String, Path)),
    responses(
        (status = 204, description = "It continues."),
        NoSuchExecution,
        (status = 409, description = "It is not parked.", body = ProblemShape,
            content_type = "application/problem+json"),
    )
)]
pub(super) async fn resume_execution(
    State(namespace): State<Namespace>,
    PathParams(id): PathParams<String>,
    call: Call,
) -> Result<Response, Problem> {
    let resume = namespace.engine().resume(id);
    call.once().into_iter().fold(resume, Steer::once).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// Makes the next attempt of a step now that waits for it. A parked execution is resumed.
#[utoipa::path(
    post,
    path = "/workflows/{id}/retry",
    params(("id" = String, Path)),
    responses(
        (status = 204, description = "The attempt is made."),
        NoSuchExecution,
        (status = 409, description = "It does not wait for an attempt, or it has ended.", body = ProblemShape,
            content_type = "application/problem+json"),
    )
)]
pub(super) async fn retry_execution(
    State(namespace): State<Namespace>,
    PathParams(id): PathParams<String>,
    call: Call,
) -> Result<Response, Problem> {
    let retry = namespace.engine().retry_now(id);
    call.once().into_iter().fold(retry, Steer::once).await?;
    Ok(StatusCode::NO_CONTENT.into_response())
}

/// Forks an execution: a new one keeps what it has recorded before a place, and runs the rest again.
#[utoipa::path(
    post,
    path = "/workflows/{id}/fork",
    params(("id" = String, Path)),
    request_body = NewFork,
    responses(
        (status = 201, description = "The fork is started.", body = StartedWire, headers(("Location" = String))),
        NoSuchExecution,
        (status = 409, description = "It cannot be forked there, or the id is taken.", body = ProblemShape,
            content_type = "application/problem+json"),
    )
)]
pub(super) async fn fork_execution(
    State(namespace): State<Namespace>,
    PathParams(source): PathParams<String>,
    call: Call,
    JsonBody(asked): JsonBody<NewFork>,
) -> Result<Response, Problem> {
    let engine = namespace.engine();
    let input = asked.input.clone();
    if call.repeated_from().is_some()
        && let Ok(found) = engine.describe(source.as_str()).await
    {
        still_kept(&namespace, &call, &found.workflow)?;
    }
    // All attempts at a call fork under one id, the client's or that of the call, so that a later attempt finds the
    // fork of an earlier one.
    let id = match asked.into_fork(engine, &source, call.id())?.await {
        Err(WorkflowError::AlreadyStarted { id }) if call.repeated_since().is_some() => {
            let found = engine.describe(&*id).await?;
            let is_own = found.forked.as_deref() == Some(source.as_str()) && input.is_none_or(|it| it == found.input);
            if !is_own {
                return Err(WorkflowError::AlreadyStarted { id }.into());
            }
            id
        }
        forked => forked?,
    };
    let location = format!("../{}", encoded(&id));
    let started = StartedWire::new(&engine.handle_by_id(id), None);
    Ok(([(LOCATION, location)], json_answer_at(StatusCode::CREATED, &started)).into_response())
}
