//! The questions of requests, and their answers. A question is a review of the engine. An answer under an
//! `Idempotency-Key` carries the id of the call in its reason, so that the next attempt finds whether it has landed.

use axum::Extension;
use axum::extract::State;
use axum::http::Uri;
use axum::response::Response;
use latchwork::Page;
use latchwork::flow::{FlowError, Suspension};
use latchwork::workflow::WorkflowError;

use crate::access::Caller;
use crate::api::Namespace;
use crate::calls::Call;
use crate::routes::flows::{described, registered};
use crate::wire::answers::{NoSuchAction, NoSuchQuestion, NoSuchRequest};
use crate::wire::entity::Note;
use crate::wire::flow::{NewAnswer, SuspensionWire};
use crate::wire::page::{PageQuery, PageWire, page_answer};
use crate::wire::problem::{Problem, ProblemShape};
use crate::wire::request::{JsonBody, PathParams, QueryParams, json_answer};

/// Lists the open questions of the requests to an action: by reason, then the oldest first.
#[utoipa::path(
    get,
    path = "/flows/{flow}/actions/{action}/suspensions",
    params(("flow" = String, Path), ("action" = String, Path), PageQuery),
    responses(
        (status = 200, description = "A page of questions.", body = PageWire<SuspensionWire>),
        NoSuchAction,
    )
)]
pub(super) async fn list_suspensions(
    State(namespace): State<Namespace>,
    PathParams((flow, action)): PathParams<(String, String)>,
    QueryParams(page): QueryParams<PageQuery>,
    uri: Uri,
) -> Result<Response, Problem> {
    let list = registered(&namespace, &flow)?.suspensions(&action);
    Ok(page_answer(&uri, list.limit(page.limit()?).after(page.cursor()?).await?, SuspensionWire::from))
}

/// Lists the open questions of a request. There are few: all of them are on one page.
#[utoipa::path(
    get,
    path = "/flows/{flow}/requests/{id}/suspensions",
    params(("flow" = String, Path), ("id" = String, Path)),
    responses(
        (status = 200, description = "All open questions.", body = PageWire<SuspensionWire>),
        NoSuchRequest,
    )
)]
pub(super) async fn request_suspensions(
    State(namespace): State<Namespace>,
    PathParams((flow, id)): PathParams<(String, String)>,
    uri: Uri,
) -> Result<Response, Problem> {
    described(&namespace, &flow, &id).await?;
    let items = registered(&namespace, &flow)?.request(id.as_str()).suspensions().await?;
    Ok(page_answer(&uri, Page { items, next: None }, SuspensionWire::from))
}

/// A question of this flow, open or not.
async fn suspension(namespace: &Namespace, flow: &str, id: &str) -> Result<Suspension, Problem> {
    let found = registered(namespace, flow)?.suspension(id).await?;
    described(namespace, flow, &found.request).await?;
    Ok(found)
}

/// Shows a question, open or not.
#[utoipa::path(
    get,
    path = "/flows/{flow}/suspensions/{id}",
    params(
        ("flow" = String, Path),
        ("id" = String, Path, description = "The id, with its special characters encoded."),
    ),
    responses(
        (status = 200, description = "The question.", body = SuspensionWire),
        NoSuchQuestion,
    )
)]
pub(super) async fn show_suspension(
    State(namespace): State<Namespace>,
    PathParams((flow, id)): PathParams<(String, String)>,
) -> Result<Response, Problem> {
    Ok(json_answer(&SuspensionWire::from(suspension(&namespace, &flow, &id).await?)))
}

/// Answers a question. One caller wins. An answer that does not fit leaves the question open.
#[utoipa::path(
    post,
    path = "/flows/{flow}/suspensions/{id}/answer",
    params(("flow" = String, Path), ("id" = String, Path)),
    request_body = NewAnswer,
    responses(
        (status = 200, description = "The question with its answer.", body = SuspensionWire),
        (status = 400, description = "The answer is not allowed, or its value does not fit the schema.",
            body = ProblemShape, content_type = "application/problem+json"),
        NoSuchQuestion,
        (status = 409, description = "The question was answered before, see `decision`, or is closed.",
            body = ProblemShape, content_type = "application/problem+json"),
    )
)]
pub(super) async fn answer_suspension(
    State(namespace): State<Namespace>,
    PathParams((flow, id)): PathParams<(String, String)>,
    Extension(caller): Extension<Caller>,
    call: Call,
    JsonBody(new): JsonBody<NewAnswer>,
) -> Result<Response, Problem> {
    let NewAnswer { answer, value, by, reason } = new;
    let found = suspension(&namespace, &flow, &id).await?;
    let mark = call.id().map(|call| call.to_string());
    let is_its = |reason: &str| mark.is_some() && Note::read(reason).1 == mark.as_deref();
    if found.decision.as_ref().is_some_and(|decision| is_its(&decision.reason)) {
        return Ok(json_answer(&SuspensionWire::from(found)));
    }
    let is_over = found.until.is_some_and(|until| until <= namespace.env().now());
    if found.decision.is_none() && is_over {
        return Err(FlowError::Closed { id }.into());
    }
    let told = match &mark {
        Some(mark) => Note::write(reason.as_deref(), mark),
        None => reason.unwrap_or_default(),
    };
    let by = by.unwrap_or_else(|| caller.subject.to_string());
    let decided = namespace.engine().review(id.as_str()).decide_with(answer.word(), &by, &told, Some(value)).await;
    match decided {
        Ok(_) => Ok(json_answer(&SuspensionWire::from(suspension(&namespace, &flow, &id).await?))),
        Err(WorkflowError::ReviewDecided { decision, .. }) => Err(FlowError::Answered { decision }.into()),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use latchwork::store::Store;
    use latchwork::{Value, json};
    use std::sync::Arc;

    use crate::routes::flows::tests::{body, namespace, run};
    use crate::wire::problem::ProblemCode;

    async fn answer(namespace: &Namespace, id: &str, call: Call) -> Result<Value, Problem> {
        let new = serde_json::from_value(json!({"answer": "approve", "reason": "so"})).unwrap();
        let (path, caller) = (PathParams(("texts".to_string(), id.to_string())), Caller { subject: Arc::from("ada") });
        let answer = answer_suspension(State(namespace.clone()), path, Extension(caller), call, JsonBody(new));
        Ok(body(answer.await?).await)
    }

    #[tokio::test]
    async fn an_answer_that_landed_before_its_process_died_is_found() {
        let namespace = namespace(&Store::memory().await.unwrap()).await;
        let request = run(&namespace, Call::default(), None).await.unwrap()["id"].as_str().unwrap().to_string();
        let flows = registered(&namespace, "texts").unwrap();
        let id = loop {
            match flows.request(request.as_str()).suspensions().await.unwrap().pop() {
                Some(open) => break open.id,
                None => tokio::task::yield_now().await,
            }
        };
        let (call, attempt) = Call::begin(namespace.calls(), 1).await;
        let first = answer(&namespace, &id, call).await.unwrap();
        assert_eq!((&first["decision"]["by"], &first["decision"]["reason"]), (&json!("ada"), &json!("so")));
        drop(attempt);
        let (call, _attempt) = Call::begin(namespace.calls(), 1).await;
        assert_eq!(answer(&namespace, &id, call).await.unwrap()["decision"], first["decision"]);
        // Another call is late.
        let (other, _attempt) = Call::begin(namespace.calls(), 2).await;
        let late = answer(&namespace, &id, other).await.unwrap_err();
        assert_eq!(late.code(), ProblemCode::ReviewDecided);
    }
}
