//! After-effects over HTTP: those that are not delivered yet, and those that could not be delivered.

use axum::extract::State;
use axum::http::Uri;
use axum::response::Response;

use crate::api::Namespace;
use crate::calls::Call;
use crate::routes::claims::{operator, stored};
use crate::wire::claim::effect::{DeadWire, EffectWire, RedeliveredWire};
use crate::wire::page::{PageQuery, PageWire, page_answer};
use crate::wire::problem::{Problem, ProblemShape};
use crate::wire::request::{PathParams, QueryParams, json_answer};

/// Lists the after-effects that are not delivered yet. Their order has no meaning.
#[utoipa::path(
    get,
    path = "/claim-outbox",
    params(PageQuery),
    responses((status = 200, description = "A page of after-effects.", body = PageWire<EffectWire>))
)]
pub(super) async fn list_undelivered(
    State(namespace): State<Namespace>,
    QueryParams(page): QueryParams<PageQuery>,
    uri: Uri,
) -> Result<Response, Problem> {
    let list = stored(&namespace).await?.undelivered();
    Ok(page_answer(&uri, list.limit(page.limit()?).after(page.cursor()?).await?, EffectWire::from))
}

/// Lists the after-effects that could not be delivered, in the order of their entities.
#[utoipa::path(
    get,
    path = "/claim-outbox/dead",
    params(PageQuery),
    responses((status = 200, description = "A page of dead letters.", body = PageWire<DeadWire>))
)]
pub(super) async fn list_dead_letters(
    State(namespace): State<Namespace>,
    QueryParams(page): QueryParams<PageQuery>,
    uri: Uri,
) -> Result<Response, Problem> {
    let list = stored(&namespace).await?.dead_letters();
    Ok(page_answer(&uri, list.limit(page.limit()?).after(page.cursor()?).await?, DeadWire::from))
}

/// Delivers a dead letter again, with its attempts reset. The next program that has its handler does it.
#[utoipa::path(
    post,
    path = "/claim-outbox/dead/{key}/retry",
    params(("key" = String, Path, description = "The key, as the list shows it.")),
    responses(
        (status = 200, description = "It is in the outbox again.", body = RedeliveredWire),
        (status = 404, description = "There is no such dead letter.", body = ProblemShape,
            content_type = "application/problem+json"),
    )
)]
pub(super) async fn retry_dead_letter(
    State(namespace): State<Namespace>,
    PathParams(key): PathParams<String>,
    call: Call,
) -> Result<Response, Problem> {
    operator(&namespace, &call).await?.redeliver(&key).await?;
    Ok(json_answer(&RedeliveredWire { key }))
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::sync::Arc;

    use latchwork::claim::{AfterEffect, ClaimStep, ClaimWorkflow, Claims};
    use latchwork::entity::Add;
    use latchwork::json;
    use latchwork::store::Store;
    use latchwork::workflow::Engine;
    use tokio::sync::Semaphore;

    use crate::access::Access;
    use crate::api::{Api, Closing};
    use crate::limits::Limits;
    use crate::wire::problem::ProblemCode;

    /// A namespace whose after-effect is given up after each attempt.
    async fn namespace(prints: &Arc<Semaphore>) -> Namespace {
        let engine = Engine::on(&Store::memory().await.unwrap()).start().await.unwrap();
        let pay = ClaimStep::new(10, "pay", "sent", "paid").after("Print");
        let invoice = ClaimWorkflow::new("invoice", "billing", "invoice").statuses(["sent", "paid"]).step(pay);
        let prints = prints.clone();
        let print = move |_: AfterEffect| {
            prints.add_permits(1);
            std::future::ready(Err::<(), _>("no paper"))
        };
        let claims = Claims::on(&engine).workflow(invoice).after_effect("Print", print).after_effect_attempts(1);
        let claims = claims.start().await.unwrap();
        claims.add("invoice", Add::new("invoice").id("i").data(json!({"status": "sent"}))).await.unwrap();
        assert!(claims.fire("invoice", "pay", "i").await.unwrap().is_done());
        let closing = Closing::new(tokio::sync::watch::Sender::new(false));
        Api::on(&engine).claims(&claims).into_namespace("default", Access::local(), Limits::default(), closing)
    }

    #[tokio::test]
    async fn a_letter_that_was_given_up_again_is_not_delivered_by_a_repeated_call() {
        let prints = Arc::new(Semaphore::new(0));
        let namespace = namespace(&prints).await;
        let retry = async |call| {
            let key = PathParams("i:2:0".to_string());
            retry_dead_letter(State(namespace.clone()), key, call).await
        };
        let dead = async || {
            let stored = stored(&namespace).await.unwrap();
            while stored.dead_letters().await.unwrap().items.is_empty() {
                tokio::task::yield_now().await;
            }
        };
        dead().await;
        let (call, attempt) = Call::begin(namespace.calls(), 1).await;
        assert_eq!(retry(call).await.unwrap().status(), 200);
        drop(attempt);
        prints.acquire_many(2).await.unwrap().forget();
        dead().await;
        let (call, _attempt) = Call::begin(namespace.calls(), 1).await;
        assert_eq!(retry(call).await.unwrap().status(), 200);
        dead().await;
        assert_eq!(prints.available_permits(), 0, "it was delivered once more");
        // A call that was cut off before its effect has it when it is repeated.
        let (old, attempt) = Call::begin(namespace.calls(), 2).await;
        drop(attempt);
        let (call, _attempt) = Call::begin(namespace.calls(), 2).await;
        assert_eq!(retry(old).await.unwrap_err().code(), ProblemCode::KeyInUse);
        assert_eq!(retry(call).await.unwrap().status(), 200);
        prints.acquire().await.unwrap().forget();
    }
}
