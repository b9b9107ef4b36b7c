//! Claims over HTTP. The rules are the library's; `fire.rs` fires steps, `outbox.rs` serves after-effects, and
//! `configuration.rs` looks at configurations.

mod configuration;
mod fire;
mod outbox;

use axum::Extension;
use axum::extract::State;
use axum::http::Uri;
use axum::response::Response;
use latchwork::Page;
use latchwork::claim::{ClaimError, ClaimOperator, StoredClaims, Transition};
use utoipa_axum::routes;

use crate::access::{Caller, LOCAL_SUBJECT, Role};
use crate::api::Namespace;
use crate::calls::Call;
use crate::group::Group;
use crate::wire::answers::{NotClaimed, NotInReview};
use crate::wire::claim::{
    ChangedWire, ClaimChange, ClaimWire, ClaimsQuery, PermittedQuery, PermittedWire, ShowQuery, ShownWire,
    TransitionWire,
};
use crate::wire::entity::Note;
use crate::wire::page::{PageQuery, PageWire, page_answer};
use crate::wire::problem::{Problem, ProblemCode, ProblemShape};
use crate::wire::request::{JsonBody, PathParams, QueryParams, json_answer};

/// The number of changes that are shown with a claim, by default and at most.
const EVENTS: usize = 10;
const MOST_EVENTS: usize = 1000;
/// The number of changes that are read at once.
const TRANSITIONS: usize = 100;
/// The requester and the operator, if none is named.
const REQUESTER: &str = "system";
const OPERATOR: &str = "operator";

pub(crate) fn group(namespace: &Namespace) -> Group {
    Group::new(namespace, "claims")
        .reads(routes!(list_claims))
        .reads(routes!(show_claim))
        .reads(routes!(claim_history))
        .reads(routes!(permitted_steps))
        .changes(Role::Operate, routes!(fire::fire_step))
        .changes(Role::Admin, routes!(release_claim))
        .changes(Role::Admin, routes!(retry_claim))
        .changes(Role::Admin, routes!(complete_claim))
        .reads(routes!(outbox::list_undelivered))
        .reads(routes!(outbox::list_dead_letters))
        .changes(Role::Admin, routes!(outbox::retry_dead_letter))
        .reads(routes!(configuration::claim_schema))
        .reads(routes!(configuration::validate_claims))
        .reads(routes!(configuration::draw_claims))
}

async fn stored(namespace: &Namespace) -> Result<StoredClaims, Problem> {
    Ok(StoredClaims::on(namespace.engine().store()).await?)
}

/// An operator whose change is made once for the call.
async fn operator(namespace: &Namespace, call: &Call) -> Result<ClaimOperator, Problem> {
    let operator = match namespace.claims() {
        Some(claims) => claims.operate().await?,
        None => ClaimOperator::on(namespace.engine()).await?,
    };
    Ok(call.once().into_iter().fold(operator, ClaimOperator::once))
}

/// Lists open claims in the order of their entities.
#[utoipa::path(
    get,
    path = "/claims",
    params(ClaimsQuery),
    responses((status = 200, description = "A page of open claims.", body = PageWire<ClaimWire>))
)]
async fn list_claims(
    State(namespace): State<Namespace>,
    QueryParams(ClaimsQuery { needs_review, after, limit }): QueryParams<ClaimsQuery>,
    uri: Uri,
) -> Result<Response, Problem> {
    let page = PageQuery { after, limit };
    let list = stored(&namespace).await?.list();
    let list = if needs_review { list.needs_review() } else { list };
    Ok(page_answer(&uri, list.limit(page.limit()?).after(page.cursor()?).await?, ClaimWire::from))
}

/// Shows the claim on an entity, and the last changes of the entity by claim workflows.
#[utoipa::path(
    get,
    path = "/claims/{entity}",
    params(("entity" = String, Path, description = "The id, with its special characters encoded."), ShowQuery),
    responses(
        (status = 200, description = "The claim, if there is one, and the changes.", body = ShownWire),
        (status = 404, description = "There is no claim, and there was no change.", body = ProblemShape,
            content_type = "application/problem+json"),
    )
)]
async fn show_claim(
    State(namespace): State<Namespace>,
    PathParams(entity): PathParams<String>,
    QueryParams(ShowQuery { events }): QueryParams<ShowQuery>,
) -> Result<Response, Problem> {
    let events = events.unwrap_or(EVENTS);
    if events > MOST_EVENTS {
        let detail = format!("0 to {MOST_EVENTS} changes can be shown, not {events}");
        return Err(Problem::new(ProblemCode::InvalidQuery, detail));
    }
    let stored = stored(&namespace).await?;
    let claim = stored.get(entity.as_str()).await?.map(ClaimWire::from);
    let history = stored.history(entity.as_str()).limit(events.max(1)).await?;
    if claim.is_none() && history.items.is_empty() {
        let detail = format!("entity {entity:?} has no claim, and no claim workflow has changed it");
        return Err(Problem::new(ProblemCode::NotFound, detail).with("id", entity));
    }
    let history = history.items.into_iter().take(events).map(TransitionWire::from).collect();
    Ok(json_answer(&ShownWire { entity, claim, history }))
}

/// Lists the changes of an entity by claim workflows, newest first.
#[utoipa::path(
    get,
    path = "/claims/{entity}/history",
    params(("entity" = String, Path), PageQuery),
    responses((status = 200, description = "A page of changes.", body = PageWire<TransitionWire>))
)]
async fn claim_history(
    State(namespace): State<Namespace>,
    PathParams(entity): PathParams<String>,
    QueryParams(page): QueryParams<PageQuery>,
    uri: Uri,
) -> Result<Response, Problem> {
    let history = stored(&namespace).await?.history(entity);
    Ok(page_answer(&uri, history.limit(page.limit()?).after(page.cursor()?).await?, TransitionWire::from))
}

/// Tells which steps a requester can fire for an entity, and every reason against the others. Guards see no input.
#[utoipa::path(
    get,
    path = "/claims/{entity}/permitted",
    params(("entity" = String, Path), PermittedQuery),
    responses(
        (status = 200, description = "The steps.", body = PermittedWire),
        (status = 404, description = "There is no such entity or workflow.", body = ProblemShape,
            content_type = "application/problem+json"),
    )
)]
async fn permitted_steps(
    State(namespace): State<Namespace>,
    PathParams(entity): PathParams<String>,
    QueryParams(PermittedQuery { workflow, requester }): QueryParams<PermittedQuery>,
) -> Result<Response, Problem> {
    let claims = namespace.claims().ok_or_else(|| unknown_workflow(&workflow))?;
    let permitted = claims.permitted(&workflow, entity, requester.as_deref().unwrap_or(REQUESTER)).await?;
    Ok(json_answer(&PermittedWire::from(permitted)))
}

/// The program has no claims.
fn unknown_workflow(workflow: &str) -> Problem {
    ClaimError::UnknownWorkflow { name: workflow.into(), known: Vec::new() }.into()
}

/// What an operator does to a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operation {
    Release,
    Retry,
    Complete,
}

/// Ends the claim on an entity, which goes back to the status that it came from. An action that still runs cannot
/// change anything any more.
#[utoipa::path(
    post,
    path = "/claims/{entity}/release",
    params(("entity" = String, Path)),
    request_body = ClaimChange,
    responses(
        (status = 200, description = "It was released.", body = ChangedWire),
        NotClaimed,
    )
)]
async fn release_claim(
    State(namespace): State<Namespace>,
    PathParams(entity): PathParams<String>,
    Extension(caller): Extension<Caller>,
    call: Call,
    JsonBody(change): JsonBody<ClaimChange>,
) -> Result<Response, Problem> {
    operate(&namespace, entity, &caller, &call, change, Operation::Release).await
}

/// Makes the program that has the action run it again, for a claim that waits for an operator.
#[utoipa::path(
    post,
    path = "/claims/{entity}/retry",
    params(("entity" = String, Path)),
    request_body = ClaimChange,
    responses(
        (status = 200, description = "The action will run again.", body = ChangedWire),
        NotClaimed,
        NotInReview,
    )
)]
async fn retry_claim(
    State(namespace): State<Namespace>,
    PathParams(entity): PathParams<String>,
    Extension(caller): Extension<Caller>,
    call: Call,
    JsonBody(change): JsonBody<ClaimChange>,
) -> Result<Response, Problem> {
    operate(&namespace, entity, &caller, &call, change, Operation::Retry).await
}

/// Makes the transition of a claim that waits for an operator, without running its action: for an action that took
/// effect.
#[utoipa::path(
    post,
    path = "/claims/{entity}/complete",
    params(("entity" = String, Path)),
    request_body = ClaimChange,
    responses(
        (status = 200, description = "The transition was made.", body = ChangedWire),
        NotClaimed,
        NotInReview,
    )
)]
async fn complete_claim(
    State(namespace): State<Namespace>,
    PathParams(entity): PathParams<String>,
    Extension(caller): Extension<Caller>,
    call: Call,
    JsonBody(change): JsonBody<ClaimChange>,
) -> Result<Response, Problem> {
    operate(&namespace, entity, &caller, &call, change, Operation::Complete).await
}

/// Makes an operator's change. The reason in the history carries the id of the call, so that the next attempt finds
/// whether this one has landed.
async fn operate(
    namespace: &Namespace,
    entity: String,
    caller: &Caller,
    call: &Call,
    change: ClaimChange,
    operation: Operation,
) -> Result<Response, Problem> {
    let ClaimChange { reason, actor } = change;
    if reason.is_empty() {
        return Err(Problem::new(ProblemCode::Invalid, "a change of a claim needs a reason"));
    }
    let actor = actor.or_else(|| token_name(caller)).unwrap_or_else(|| OPERATOR.into());
    let operator = operator(namespace, call).await?;
    if let Some(landed) = landed(operator.stored(), &entity, call).await? {
        return Ok(json_answer(&ChangedWire { entity, claim: None, status: landed.to, reason, actor }));
    }
    let missing = || ClaimError::NotClaimed { id: entity.as_str().into() };
    let claim = ClaimWire::from(operator.stored().get(entity.as_str()).await?.ok_or_else(missing)?);
    let told = call.id().map_or_else(|| reason.clone(), |call| Note::write(Some(&reason), &call.to_string()));
    let status = match operation {
        Operation::Release => {
            operator.release(entity.as_str(), &actor, &told).await?;
            claim.revert_to.clone()
        }
        Operation::Retry => {
            operator.retry(entity.as_str(), &actor, &told).await?;
            claim.claim_into.clone()
        }
        Operation::Complete => {
            operator.complete(entity.as_str(), &actor, &told).await?;
            claim.successful_state.clone()
        }
    };
    Ok(json_answer(&ChangedWire { entity, claim: Some(claim), status, reason, actor }))
}

/// The name of the token, if there is one.
fn token_name(caller: &Caller) -> Option<String> {
    Some(&*caller.subject).filter(|subject| *subject != LOCAL_SUBJECT).map(Into::into)
}

/// The change that an earlier attempt at the call has made: its reason carries the id of the call.
async fn landed(stored: &StoredClaims, entity: &str, call: &Call) -> Result<Option<Transition>, Problem> {
    let (Some(id), Some(_)) = (call.id(), call.repeated_since()) else { return Ok(None) };
    let id = id.to_string();
    let is_its = |text: &str| Note::read(text).1 == Some(id.as_str());
    let mut after = None;
    loop {
        let Page { items, next } = stored.history(entity).limit(TRANSITIONS).after(after).await?;
        let mut found = items.into_iter();
        let found = found.find(|it| is_its(&it.reason));
        if found.is_some() || next.is_none() {
            return Ok(found);
        }
        after = next;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::sync::Arc;
    use std::sync::atomic::{AtomicU32, Ordering};
    use std::time::Duration;

    use axum::body::to_bytes;
    use latchwork::claim::{ActionCtx, ClaimStep, ClaimWorkflow, Claims, Outcome};
    use latchwork::entity::Add;
    use latchwork::store::Store;
    use latchwork::workflow::Engine;
    use latchwork::{Value, json};
    use tokio::sync::Semaphore;

    use crate::access::Access;
    use crate::api::{Api, Closing};
    use crate::limits::Limits;

    /// An invoice `i` that can be reminded of any number of times, and paid once the gate is open.
    pub(super) async fn namespace(gate: &Arc<Semaphore>) -> Namespace {
        let engine = Engine::on(&Store::memory().await.unwrap()).start().await.unwrap();
        let pay = ClaimStep::new(10, "pay", "sent", "paid").claimed("paying").action("Pay");
        let remind = ClaimStep::new(20, "remind", "sent", "sent").claimed("reminding").action("Remind");
        let invoice = ClaimWorkflow::new("invoice", "billing", "invoice");
        let refuse = ClaimStep::new(30, "refuse", "sent", "paid").claimed("refusing").action("Refuse");
        let fail = ClaimStep::new(40, "fail", "sent", "paid").claimed("failing").action("Fail");
        let invoice = invoice.statuses(["sent", "paying", "reminding", "refusing", "failing", "paid"]);
        let invoice = invoice.step(pay).step(remind).step(refuse).step(fail);
        let [refused, failed] = [Arc::new(AtomicU32::new(1)), Arc::new(AtomicU32::new(1))];
        let gate = gate.clone();
        let pay = move |_: ActionCtx| {
            let gate = gate.clone();
            async move {
                gate.acquire().await.unwrap().forget();
                Outcome::output(7)
            }
        };
        let claims = Claims::on(&engine).workflow(invoice).action("Pay", pay);
        let claims = claims.action("Remind", async |_: ActionCtx| Outcome::done());
        // Their messages say how often they were run.
        let claims = claims.action("Refuse", move |_: ActionCtx| {
            std::future::ready(Outcome::rejection(refused.fetch_add(1, Ordering::SeqCst).to_string()))
        });
        let claims = claims.action("Fail", move |_: ActionCtx| {
            std::future::ready(Outcome::failure(failed.fetch_add(1, Ordering::SeqCst).to_string()))
        });
        let claims = claims.start().await.unwrap();
        claims.add("invoice", Add::new("invoice").id("i").data(json!({"status": "sent"}))).await.unwrap();
        let closing = Closing::new(tokio::sync::watch::Sender::new(false));
        let limits = Limits { wait: Duration::from_millis(100), ..Limits::default() };
        Api::on(&engine).claims(&claims).into_namespace("default", Access::local(), limits, closing)
    }

    pub(super) fn caller() -> Extension<Caller> {
        Extension(Caller { subject: Arc::from("billing") })
    }

    pub(super) async fn body(answer: Response) -> Value {
        serde_json::from_slice(&to_bytes(answer.into_body(), 1 << 20).await.unwrap()).unwrap()
    }

    async fn release(namespace: &Namespace, call: Call) -> Result<Value, Problem> {
        let change = JsonBody(ClaimChange { reason: "why".into(), actor: None });
        let released = release_claim(State(namespace.clone()), PathParams("i".into()), caller(), call, change).await?;
        Ok(body(released).await)
    }

    #[tokio::test]
    async fn a_release_that_landed_before_its_process_died_is_found() {
        let namespace = namespace(&Arc::new(Semaphore::new(0))).await;
        let claims = namespace.claims().unwrap().clone();
        let hold = async || {
            tokio::spawn(std::future::IntoFuture::into_future(claims.fire("invoice", "pay", "i")));
            while stored(&namespace).await.unwrap().get("i").await.unwrap().is_none() {
                tokio::task::yield_now().await;
            }
        };
        hold().await;
        let (call, attempt) = Call::begin(namespace.calls(), 1).await;
        let first = release(&namespace, call).await.unwrap();
        assert_eq!((&first["status"], &first["actor"]), (&json!("sent"), &json!("billing")));
        drop(attempt);
        // Another caller has claimed the entity since then. Its claim stays.
        hold().await;
        let (call, _attempt) = Call::begin(namespace.calls(), 1).await;
        let again = release(&namespace, call).await.unwrap();
        assert_eq!(
            (&again["status"], &again["claim"], &again["reason"]),
            (&json!("sent"), &json!(null), &json!("why"))
        );
        assert!(stored(&namespace).await.unwrap().get("i").await.unwrap().is_some());
        let history = stored(&namespace).await.unwrap().history("i").await.unwrap();
        assert_eq!(history.items.len(), 1);
    }
}
