//! Firings on the wire: what is asked for, the transition that was made, and the problem of each other outcome.

use std::time::Duration;

use axum::http::StatusCode;
use axum::http::header::{HeaderValue, RETRY_AFTER};
use axum::response::{IntoResponse, Response};
use latchwork::Value;
use latchwork::claim::{ClaimFailed, Conflict, Fired, Lost, NotPermitted, Transitioned};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::wire::claim::{HolderWire, ReasonWire};
use crate::wire::problem::{Problem, ProblemCode};
use crate::wire::request::{json_answer, json_answer_at};

/// The pause before a client asks again for a firing that is under way.
const AGAIN: Duration = Duration::from_secs(1);

/// A step to fire.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct FireRequest {
    /// The claim workflow.
    pub(crate) workflow: String,
    /// The key of the step.
    pub(crate) step: String,
    /// The requester that the step is fired for; by default `system`.
    pub(crate) requester: Option<String>,
    /// The person or program that fires it, for the history. By default the name of the token.
    pub(crate) actor: Option<String>,
    /// The parameters of the action.
    #[serde(default)]
    #[schema(value_type = Value)]
    pub(crate) input: Value,
}

/// A transition that was made.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Fired)]
pub(crate) struct FiredWire {
    pub(crate) outcome: FiredWord,
    /// The status before.
    from: String,
    /// The status after.
    to: String,
    /// The entity's rev after the transition.
    rev: u64,
    /// The output of the action.
    #[schema(value_type = Value)]
    output: Value,
    /// True if an earlier request under the same Idempotency-Key made the transition, and its answer was lost.
    is_recovered: bool,
}

/// How far a firing is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum FiredWord {
    /// The transition is durable.
    Done,
    /// The action still runs.
    Running,
}

/// A firing that is under way.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Firing)]
pub(crate) struct FiringWire {
    outcome: FiredWord,
    entity: String,
    workflow: String,
    step: String,
}

/// Answers with a transition, or with the problem that there is none.
pub(crate) fn fired_answer(entity: &str, fired: Fired) -> Result<Response, Problem> {
    let problem = Problem::new;
    Err(match fired {
        Fired::Done(Transitioned { from, to, rev, output, repeated: is_recovered, .. }) => {
            let outcome = FiredWord::Done;
            return Ok(json_answer(&FiredWire { outcome, from, to, rev: rev.0, output, is_recovered }));
        }
        Fired::ClaimFailed(ClaimFailed { status, holder, .. }) => {
            let detail = match &holder {
                Some(holder) => format!("entity {entity:?} is claimed by {} for step {}", holder.owner, holder.step),
                None => format!("another caller was faster; entity {entity:?} is at {status:?}"),
            };
            let holder = holder.map(HolderWire::from);
            problem(ProblemCode::Claimed, detail)
                .with("entity_status", status)
                .with("holder", holder)
                .retry_after(AGAIN)
        }
        Fired::Conflict(Conflict { status, expected, .. }) => {
            let detail = format!("entity {entity:?} was changed while the action ran, and nothing of it was committed");
            problem(ProblemCode::RevisionConflict, detail)
                .with("entity_status", status)
                .with("expected_rev", expected.0)
        }
        Fired::Failure(failure) => {
            problem(ProblemCode::ActionFailed, failure.message).with("failure_code", failure.code)
        }
        Fired::Rejection(rejection) => {
            problem(ProblemCode::ActionRejected, rejection.message).with("field", rejection.field)
        }
        Fired::NotPermitted(NotPermitted { status, reasons, .. }) => {
            let words: Vec<String> = reasons.iter().map(ToString::to_string).collect();
            let reasons: Vec<ReasonWire> = reasons.into_iter().map(ReasonWire::from).collect();
            problem(ProblemCode::NotPermitted, words.join("; ")).with("entity_status", status).with("reasons", reasons)
        }
        Fired::Lost(Lost { reason, .. }) => problem(ProblemCode::ClaimLost, reason),
        other => Problem::internal(&format!("an outcome of a firing has no answer: {other:?}")),
    })
}

/// Answers that the action still runs. The answer is not kept under an Idempotency-Key: the same request asks again.
pub(crate) fn running_answer(entity: String, workflow: String, step: String) -> Response {
    let outcome = FiredWord::Running;
    let mut answer =
        json_answer_at(StatusCode::ACCEPTED, &FiringWire { outcome, entity, workflow, step }).into_response();
    answer.headers_mut().insert(RETRY_AFTER, HeaderValue::from(AGAIN.as_secs()));
    answer
}
