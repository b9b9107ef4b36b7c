//! Firing a step over HTTP. The id of a call under an `Idempotency-Key` is the library's key of the firing: the claim
//! carries it, and the commit that ends the firing keeps its outcome. So the next attempt finds what the one before has
//! done, or that its action still runs.

use std::future::IntoFuture;

use axum::Extension;
use axum::extract::State;
use axum::response::Response;
use latchwork::claim::{Fire, Fired};

use crate::access::Caller;
use crate::api::Namespace;
use crate::calls::Call;
use crate::routes::claims::{REQUESTER, token_name, unknown_workflow};
use crate::wire::claim::fired::{FireRequest, FiredWire, FiringWire, fired_answer, running_answer};
use crate::wire::problem::{Problem, ProblemShape};
use crate::wire::request::{JsonBody, PathParams, QueryParams};
use crate::wire::wait::{self, WaitQuery};

/// Fires a step for an entity: claims the entity, runs the action, and makes the transition. Of several callers at the
/// same time, the action runs for one. Waits for the action, by default as long as a request may wait. If the time is
/// up, the action goes on: the same request under the same Idempotency-Key asks for its outcome.
#[utoipa::path(
    post,
    path = "/claims/{entity}/fire",
    params(("entity" = String, Path), WaitQuery),
    request_body = FireRequest,
    responses(
        (status = 200, description = "The transition was made.", body = FiredWire),
        (status = 202, description = "The action still runs.", body = FiringWire, headers(("Retry-After" = String))),
        (status = 404, description = "There is no such entity, workflow or step.", body = ProblemShape,
            content_type = "application/problem+json"),
        (status = 409, description = "`claimed`: another caller holds the claim, see `holder`. `not-permitted`: the \
            step cannot be fired now, see `reasons`. `claim-lost` or `revision-conflict`: the entity was changed while \
            the action ran, and nothing of it was committed.", body = ProblemShape,
            content_type = "application/problem+json"),
        (status = 422, description = "`action-failed` or `action-rejected`: the action refuses, and the claim was \
            released.", body = ProblemShape, content_type = "application/problem+json"),
        (status = 500, description = "`action-error`: the action has ended with an error, and the claim was released.",
            body = ProblemShape, content_type = "application/problem+json"),
    )
)]
pub(super) async fn fire_step(
    State(namespace): State<Namespace>,
    PathParams(entity): PathParams<String>,
    QueryParams(WaitQuery { wait }): QueryParams<WaitQuery>,
    Extension(caller): Extension<Caller>,
    call: Call,
    JsonBody(asked): JsonBody<FireRequest>,
) -> Result<Response, Problem> {
    let FireRequest { workflow, step, requester, actor, input } = asked;
    let time = wait::asked(&namespace, wait.as_deref())?.unwrap_or(namespace.limits().wait);
    let claims = namespace.claims().ok_or_else(|| unknown_workflow(&workflow))?;
    let fire =
        claims.fire(&workflow, &step, entity.as_str()).by(requester.as_deref().unwrap_or(REQUESTER)).input(input);
    let actor = actor.or_else(|| token_name(&caller));
    let fire = actor.into_iter().fold(fire, |fire, actor| fire.actor(actor));
    let fire = call.once().into_iter().fold(fire, Fire::once);
    match wait::within(&namespace, time, fire.into_future()).await {
        // Of an earlier attempt. It may wait for the janitor or for an operator.
        Some(Ok(Fired::Running(_))) => Ok(running_answer(entity, workflow, step)),
        Some(fired) => fired_answer(&entity, fired?),
        None => Ok(running_answer(entity, workflow, step)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::sync::Arc;

    use latchwork::{Value, json};
    use tokio::sync::Semaphore;

    use crate::routes::claims::stored;
    use crate::routes::claims::tests::{body, caller, namespace};

    async fn fire(namespace: &Namespace, step: &str, call: Call) -> Result<(u16, Value), Problem> {
        let asked = serde_json::from_value(json!({"workflow": "invoice", "step": step})).unwrap();
        let (path, query) = (PathParams("i".to_string()), QueryParams(WaitQuery::default()));
        let answer = fire_step(State(namespace.clone()), path, query, caller(), call, JsonBody(asked)).await?;
        Ok((answer.status().as_u16(), body(answer).await))
    }

    #[tokio::test]
    async fn a_transition_that_landed_before_its_process_died_is_not_made_again() {
        let namespace = namespace(&Arc::new(Semaphore::new(0))).await;
        let (call, attempt) = Call::begin(namespace.calls(), 1).await;
        let (_, first) = fire(&namespace, "remind", call).await.unwrap();
        assert_eq!(first["is_recovered"], false);
        drop(attempt);
        // Another caller does the same in between.
        fire(&namespace, "remind", Call::default()).await.unwrap();
        let (call, _attempt) = Call::begin(namespace.calls(), 1).await;
        let (status, again) = fire(&namespace, "remind", call).await.unwrap();
        assert_eq!((status, &again["rev"], &again["is_recovered"]), (200, &first["rev"], &json!(true)));
        let history = stored(&namespace).await.unwrap().history("i").await.unwrap();
        assert_eq!(history.items.len(), 2, "each caller has made one transition");
        assert_eq!(history.items[1].actor.as_deref(), Some("billing"));
    }

    #[tokio::test]
    async fn an_action_that_still_runs_is_not_started_again() {
        let gate = Arc::new(Semaphore::new(0));
        let namespace = namespace(&gate).await;
        for _ in 0..3 {
            // Each attempt is cut off while the action of the first one runs.
            let (call, attempt) = Call::begin(namespace.calls(), 1).await;
            let (status, told) = fire(&namespace, "pay", call).await.unwrap();
            assert_eq!((status, &told["outcome"]), (202, &json!("running")));
            drop(attempt);
        }
        // Another caller is a loser of the race, and not told that its action runs.
        let (other, _attempt) = Call::begin(namespace.calls(), 2).await;
        let lost = fire(&namespace, "pay", other).await.unwrap_err();
        assert_eq!((lost.status(), lost.code().slug()), (409, "claimed"));
        gate.add_permits(1);
        while stored(&namespace).await.unwrap().get("i").await.unwrap().is_some() {
            tokio::task::yield_now().await;
        }
        let (call, _attempt) = Call::begin(namespace.calls(), 1).await;
        let (status, done) = fire(&namespace, "pay", call).await.unwrap();
        assert_eq!((status, &done["to"], &done["is_recovered"]), (200, &json!("paid"), &json!(true)));
        assert_eq!(done["output"], 7);
    }

    #[tokio::test]
    async fn an_action_that_has_refused_is_not_run_again() {
        let namespace = namespace(&Arc::new(Semaphore::new(0))).await;
        for step in ["refuse", "fail"] {
            let (call, attempt) = Call::begin(namespace.calls(), step.len() as u8).await;
            let first = fire(&namespace, step, call).await.unwrap_err();
            assert_eq!((first.status(), first.detail()), (422, "1"), "{step}");
            drop(attempt);
            let (call, _attempt) = Call::begin(namespace.calls(), step.len() as u8).await;
            let again = fire(&namespace, step, call).await.unwrap_err();
            assert_eq!((again.code(), again.detail()), (first.code(), "1"), "{step}: the action ran again");
        }
    }
}
