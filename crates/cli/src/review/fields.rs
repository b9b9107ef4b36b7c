//! The fields of reviews in JSON.

use std::borrow::Cow;

use latchwork::workflow::{Decision, ExecutionId, ReviewDescription, ReviewState};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::time::Time;

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ReviewFields {
    pub(crate) id: String,
    pub(crate) execution: ExecutionId,
    pub(crate) workflow: String,
    pub(crate) name: String,
    pub(crate) state: Cow<'static, str>,
    pub(crate) question: Value,
    pub(crate) options: Vec<String>,
    pub(crate) opened_at: Time,
    pub(crate) until: Option<Time>,
    pub(crate) decision: Option<DecisionFields>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct DecisionFields {
    pub(crate) option: String,
    pub(crate) by: String,
    pub(crate) reason: String,
    pub(crate) at: Time,
}

impl DecisionFields {
    fn of(decision: &Decision) -> DecisionFields {
        let Decision { option, by, reason, .. } = decision.clone();
        DecisionFields { option, by, reason, at: Time(decision.at) }
    }
}

impl ReviewFields {
    pub(crate) fn of(review: ReviewDescription) -> ReviewFields {
        let (state, decision) = match &review.state {
            ReviewState::Decided(decision) => ("decided".into(), Some(DecisionFields::of(decision))),
            ReviewState::Open => ("open".into(), None),
            _ => ("closed".into(), None),
        };
        let (opened_at, until) = (Time(review.opened), review.until.map(Time));
        let ReviewDescription { id, execution, workflow, name, question, options, .. } = review;
        ReviewFields { id, execution, workflow, name, state, question, options, opened_at, until, decision }
    }

    /// The question, for people: a text as it is, anything else as JSON.
    pub(crate) fn asked(&self) -> String {
        match &self.question {
            Value::String(text) => text.clone(),
            other => other.to_string(),
        }
    }
}
