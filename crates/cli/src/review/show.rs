//! `latch review show`: what a review asks, and its decision.

use anyhow::Result;
use clap::Args;
use latchwork::store::Timestamp;
use latchwork::workflow::Executions;

use crate::client::{Client, encoded};
use crate::output::{Output, Text};
use crate::review::fields::ReviewFields;

#[derive(Args)]
pub(crate) struct Show {
    /// The review's id.
    id: String,
}

pub(crate) async fn run(show: &Show, executions: &Executions, now: Timestamp, output: &mut Output<'_>) -> Result<()> {
    let review = ReviewFields::of(executions.review(&show.id).await?);
    output.one(&review, |text| tell(&review, now, text))
}

/// The same from a server.
pub(crate) async fn ask(show: &Show, client: &Client, now: Timestamp, output: &mut Output<'_>) -> Result<()> {
    let review: ReviewFields = client.get(&format!("/reviews/{}", encoded(&show.id)), &[]).await?;
    output.one(&review, |text| tell(&review, now, text))
}

pub(crate) fn tell(review: &ReviewFields, now: Timestamp, text: &mut Text) {
    let ReviewFields { name, execution, workflow, state, opened_at, .. } = review;
    text.line(format!("Review {name:?} of execution {execution:?}, workflow {workflow:?}: {state}."));
    text.line(format!("Opened {} ({}).", opened_at.short(), opened_at.relative_to(now)));
    if let Some(until) = review.until {
        text.line(format!("Deadline: {} ({}).", until.short(), until.relative_to(now)));
    }
    text.line(format!("Question: {}", review.asked()));
    text.line(format!("Options: {}", review.options.join(", ")));
    if let Some(decision) = &review.decision {
        let reason = if decision.reason.is_empty() { String::new() } else { format!(": {}", decision.reason) };
        let when = decision.at.relative_to(now);
        text.line(format!("Decided {when} by {}: {:?}{reason}", decision.by, decision.option));
    }
}
