//! Reviews on the wire, as `latch review` prints them.

use latchwork::Value;
use latchwork::workflow::{Decision, ReviewDescription, ReviewState};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::wire::time::TimeWire;

/// A question to a person.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Review)]
pub(crate) struct ReviewWire {
    id: String,
    /// The execution that waits for the decision.
    execution: String,
    workflow: String,
    name: String,
    /// `open`, `decided` or `closed`.
    state: &'static str,
    #[schema(value_type = Value)]
    question: Value,
    /// The options to choose from.
    options: Vec<String>,
    opened_at: TimeWire,
    /// Until when the execution waits for it.
    #[schema(required)]
    until: Option<TimeWire>,
    #[schema(required)]
    decision: Option<DecisionWire>,
}

/// The decision of a review.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Decision)]
pub(crate) struct DecisionWire {
    option: String,
    /// The person or program that decided.
    by: String,
    reason: String,
    at: TimeWire,
}

impl From<&Decision> for DecisionWire {
    fn from(decision: &Decision) -> DecisionWire {
        let Decision { option, by, reason, at, .. } = decision.clone();
        DecisionWire { option, by, reason, at: at.into() }
    }
}

impl From<ReviewDescription> for ReviewWire {
    fn from(review: ReviewDescription) -> ReviewWire {
        let (state, decision) = match &review.state {
            ReviewState::Decided(decision) => ("decided", Some(decision.into())),
            ReviewState::Open => ("open", None),
            _ => ("closed", None),
        };
        let (opened_at, until) = (review.opened.into(), review.until.map(TimeWire));
        let (id, execution, workflow, name) = (review.id, review.execution.to_string(), review.workflow, review.name);
        let (question, options) = (review.question, review.options);
        ReviewWire { id, execution, workflow, name, state, question, options, opened_at, until, decision }
    }
}

/// Which open reviews are listed.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ReviewQuery {
    /// Only reviews of this workflow.
    pub(crate) workflow: Option<String>,
    /// Only reviews of this name.
    pub(crate) name: Option<String>,
    /// Continues after an earlier page: its `next`.
    pub(crate) after: Option<String>,
    /// The number of items of a page: 1 to 1000, by default 100.
    #[param(minimum = 1, maximum = 1000)]
    pub(crate) limit: Option<usize>,
}

/// A decision to make.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewDecision {
    /// One of the options that the review offers.
    pub(crate) option: String,
    /// The person or program that decides. By default the name of the token.
    pub(crate) by: Option<String>,
    #[serde(default)]
    pub(crate) reason: String,
    /// The value of the answer, for a question of a flow that asks for one.
    #[schema(value_type = Option<Value>)]
    pub(crate) value: Option<Value>,
}
