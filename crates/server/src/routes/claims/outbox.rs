//! After-effects over HTTP: those that are not delivered yet, and those that could not be delivered.

use axum::extract::State;
use axum::http::Uri;
use axum::response::Response;
use latchwork::claim::ClaimError;

use crate::api::Namespace;
use crate::calls::Call;
use crate::routes::claims::{operator, stored};
use crate::wire::claim::effect::{DeadWire, EffectWire, RedeliveredWire};
use crate::wire::page::{PageQuery, PageWire, page_answer};
use crate::wire::problem::{Problem, ProblemCode, ProblemShape};
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
///
/// A repeated call finds no dead letter if the first one put it back. Nothing in the store tells that from a letter
/// that another operator put back, so the answer says that the outcome is not known. Nothing is delivered twice: the
/// letter is in one place, and its key is stable.
#[utoipa::path(
    post,
    path = "/claim-outbox/dead/{key}/retry",
    params(("key" = String, Path, description = "The key, as the list shows it.")),
    responses(
        (status = 200, description = "It is in the outbox again.", body = RedeliveredWire),
        (status = 404, description = "There is no such dead letter.", body = ProblemShape,
            content_type = "application/problem+json"),
        (status = 409, description = "The first request was cut off, and the letter is no longer dead.",
            body = ProblemShape, content_type = "application/problem+json"),
    )
)]
pub(super) async fn retry_dead_letter(
    State(namespace): State<Namespace>,
    PathParams(key): PathParams<String>,
    call: Call,
) -> Result<Response, Problem> {
    match operator(&namespace).await?.redeliver(&key).await {
        Ok(()) => Ok(json_answer(&RedeliveredWire { key })),
        Err(ClaimError::NoDeadLetter { .. }) if call.repeated_since().is_some() => {
            let detail = "the first request was cut off, and there is no such dead letter any more; if it was there \
                          before, it was delivered again";
            Err(Problem::new(ProblemCode::OutcomeUnknown, detail).with("key", key))
        }
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    use std::sync::Arc;

    use tokio::sync::Semaphore;

    use crate::routes::claims::tests::namespace;

    #[tokio::test]
    async fn a_letter_that_is_gone_when_the_call_is_repeated_is_not_said_to_be_unknown() {
        let namespace = namespace(&Arc::new(Semaphore::new(0))).await;
        let retry = async |call| {
            let key = PathParams("k".to_string());
            retry_dead_letter(State(namespace.clone()), key, call).await.unwrap_err().code()
        };
        let (call, attempt) = Call::begin(namespace.calls(), 1).await;
        assert_eq!(retry(call).await, ProblemCode::NotFound);
        drop(attempt);
        let (call, _attempt) = Call::begin(namespace.calls(), 1).await;
        assert_eq!(retry(call).await, ProblemCode::OutcomeUnknown);
    }
}
