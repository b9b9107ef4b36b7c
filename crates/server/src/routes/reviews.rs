//! Reviews over HTTP: questions of executions to people, and their decisions.

use axum::Extension;
use axum::extract::State;
use axum::http::Uri;
use axum::response::Response;
use latchwork::workflow::{Decision, Reviews, WorkflowError};
use utoipa_axum::routes;

use crate::access::{Caller, Role};
use crate::api::Namespace;
use crate::calls::Call;
use crate::group::Group;
use crate::wire::answers::NoSuchReview;
use crate::wire::page::{PageQuery, PageWire, page_answer};
use crate::wire::problem::{Problem, ProblemShape};
use crate::wire::request::{JsonBody, PathParams, QueryParams, json_answer};
use crate::wire::review::{NewDecision, ReviewQuery, ReviewWire};

pub(crate) fn group(namespace: &Namespace) -> Group {
    Group::new(namespace, "reviews")
        .reads(routes!(list_reviews))
        .reads(routes!(get_review))
        .changes(Role::Operate, routes!(decide_review))
}

/// Lists open reviews, by workflow and name, the oldest first.
#[utoipa::path(
    get,
    path = "/reviews",
    params(ReviewQuery),
    responses((status = 200, description = "A page of reviews.", body = PageWire<ReviewWire>))
)]
async fn list_reviews(
    State(namespace): State<Namespace>,
    QueryParams(ReviewQuery { workflow, name, after, limit }): QueryParams<ReviewQuery>,
    uri: Uri,
) -> Result<Response, Problem> {
    let page = PageQuery { after, limit };
    let reviews = workflow.into_iter().fold(namespace.engine().reviews(), Reviews::workflow);
    let reviews = name.into_iter().fold(reviews, Reviews::name);
    let found = reviews.limit(page.limit()?).after(page.cursor()?).await?;
    Ok(page_answer(&uri, found, ReviewWire::from))
}

/// Shows what a review asks, and its decision, if there is one.
#[utoipa::path(
    get,
    path = "/reviews/{id}",
    params(("id" = String, Path, description = "The id, with its special characters encoded.")),
    responses(
        (status = 200, description = "The review.", body = ReviewWire),
        NoSuchReview,
    )
)]
async fn get_review(
    State(namespace): State<Namespace>,
    PathParams(id): PathParams<String>,
) -> Result<Response, Problem> {
    Ok(json_answer(&ReviewWire::from(namespace.engine().review(id).describe().await?)))
}

/// Decides an open review, once.
#[utoipa::path(
    post,
    path = "/reviews/{id}/decision",
    params(("id" = String, Path)),
    request_body = NewDecision,
    responses(
        (status = 200, description = "The decision is stored.", body = ReviewWire),
        (status = 400, description = "The review does not offer the option, or does not take the value.",
            body = ProblemShape, content_type = "application/problem+json"),
        NoSuchReview,
        (status = 409, description = "It was decided before, which `decision` shows, or it is closed.",
            body = ProblemShape, content_type = "application/problem+json"),
    )
)]
async fn decide_review(
    State(namespace): State<Namespace>,
    PathParams(id): PathParams<String>,
    Extension(caller): Extension<Caller>,
    call: Call,
    JsonBody(NewDecision { option, by, reason, value }): JsonBody<NewDecision>,
) -> Result<Response, Problem> {
    let review = namespace.engine().review(id);
    let by = by.unwrap_or_else(|| caller.subject.to_string());
    // A review is decided once. A repeated attempt that finds its own decision has made it.
    let is_own = |made: &Decision| made.option == option && made.by == by && made.reason == reason;
    match review.decide_with(&option, &by, &reason, value).await {
        Err(WorkflowError::ReviewDecided { decision, .. }) if call.repeated_since().is_some() && is_own(&decision) => {}
        decided => drop(decided?),
    }
    Ok(json_answer(&ReviewWire::from(review.describe().await?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    use crate::routes::workflows::tests::{body, cut_off, namespace, read};
    use crate::wire::problem::ProblemCode;
    use latchwork::json;

    #[tokio::test]
    async fn a_decision_that_was_cut_off_is_found_again() {
        let (namespace, _) = namespace().await;
        let handle = namespace.engine().start_by_name("ask", json!(null)).id("a").await.unwrap();
        let review = loop {
            match namespace.engine().reviews().await.unwrap().items.pop() {
                Some(review) => break review.id,
                None => tokio::task::yield_now().await,
            }
        };
        let decide = |option: &'static str, call| {
            let caller = Extension(Caller { subject: "ada".into() });
            let decision = body(json!({"option": option}));
            decide_review(State(namespace.clone()), PathParams(review.clone()), caller, call, decision)
        };
        let [first, again] = cut_off(&namespace, 1, |call| decide("yes", call)).await;
        assert_eq!((first.0, &first.1["decision"]["by"], &first), (200, &json!("ada"), &again));
        assert_eq!(handle.result().await.unwrap(), json!("yes"));
        // A repeated attempt does not take the decision of another caller for its own.
        let (call, attempt) = Call::begin(namespace.calls(), 2).await;
        drop((call, attempt));
        let (call, _attempt) = Call::begin(namespace.calls(), 2).await;
        assert_eq!(decide("no", call).await.unwrap_err().code(), ProblemCode::ReviewDecided);
        assert_eq!(read(get_review(State(namespace.clone()), PathParams(review.clone())).await).await.1, first.1);
    }
}
