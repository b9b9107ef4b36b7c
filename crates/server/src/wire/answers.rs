//! Problems that several routes describe alike in the OpenAPI document. Each set is named in the `responses` of a
//! route, beside what only that route answers. Nothing here is sent.

use std::collections::BTreeMap;

use utoipa::IntoResponses;
use utoipa::openapi::{Content, Ref, RefOr, Response, ResponseBuilder};

use crate::wire::problem::PROBLEM_JSON;

/// A problem in the document.
pub(crate) fn problem(description: &str) -> Response {
    let content = Content::builder().schema(Some(RefOr::Ref(Ref::from_schema_name("Problem")))).build();
    ResponseBuilder::new().description(description).content(PROBLEM_JSON, content).build()
}

macro_rules! problem_sets {
    ($($set:ident { $($status:literal: $description:literal),+ })+) => {$(
        pub(crate) struct $set;

        impl IntoResponses for $set {
            fn responses() -> BTreeMap<String, RefOr<Response>> {
                BTreeMap::from([$((stringify!($status).to_string(), problem($description).into())),+])
            }
        }
    )+};
}

problem_sets! {
    StateRefused {
        409: "The lock that guards the change is not held.",
        412: "The condition does not hold."
    }
    ConditionFailed { 412: "The condition does not hold." }
    ConditionMissing { 428: "There is no condition." }
    NoSuchEntity { 404: "There is no such entity." }
    NoSuchState { 404: "There is no such state." }
    NoSuchSlot { 404: "There is no such slot." }
    NoSuchLock { 404: "There is no such lock." }
    NoSession { 410: "The session has ended, or never was." }
    NoSuchExecution { 404: "There is no such execution." }
    NoSuchReview { 404: "There is no such review." }
    NoSuchSchedule { 404: "There is no such schedule." }
    NoSuchAction { 404: "There is no such flow or action." }
    NoSuchRequest { 404: "The flow has no such request." }
    NoSuchQuestion { 404: "The flow has no such question." }
    NotClaimed { 404: "The entity is not claimed." }
    NotInReview { 409: "The claim does not wait for an operator." }
    NoSuchTask { 404: "There is no such task." }
    LeaseLost { 409: "`lease-lost`: the token does not hold the task any more." }
    NoSuchNode { 404: "There is no such node." }
}
