//! `latch review decide`: decides a review, through an engine that runs nothing. The waiting execution becomes running
//! in the store, and continues when an engine starts that has the workflow.

use clap::Args;
use latchwork::store::Timestamp;
use latchwork::workflow::Executions;
use serde::Serialize;
use serde_json::Value;

use crate::client::{Client, encoded};
use crate::output::Output;
use crate::review::fields::ReviewFields;
use crate::review::show::tell;
use crate::store::StoreArgument;

#[derive(Args)]
pub(crate) struct Decide {
    /// The review's id.
    id: String,
    /// The chosen option, which must be one that the review offers.
    option: String,
    /// The name of the person who decides.
    #[arg(long, value_name = "NAME", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    by: String,
    /// The reason.
    #[arg(long, value_name = "TEXT", default_value = "")]
    reason: String,
    /// The value of the answer, as JSON, for a question of a flow that asks for one.
    #[arg(long, value_name = "JSON", value_parser = json)]
    value: Option<Value>,
}

fn json(text: &str) -> Result<Value, String> {
    serde_json::from_str(text).map_err(|error| error.to_string())
}

/// The decision, as a server takes it.
#[derive(Serialize)]
struct NewDecision {
    option: String,
    by: String,
    reason: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    value: Option<Value>,
}

impl Decide {
    pub(crate) async fn look(&self, executions: &Executions) -> anyhow::Result<()> {
        executions.review(&self.id).await?;
        Ok(())
    }
}

pub(crate) async fn run(decide: Decide, store: &StoreArgument, output: &mut Output<'_>) -> anyhow::Result<()> {
    let engine = store.operate().await?;
    let review = engine.review(&decide.id);
    let decided = review.decide_with(&decide.option, &decide.by, &decide.reason, decide.value);
    let decided = match decided.await {
        Ok(_) => review.describe().await,
        Err(error) => Err(error),
    };
    let now = engine.store().env().now();
    engine.stop();
    engine.store().close().await?;
    let review = ReviewFields::of(decided?);
    output.one(&review, |text| tell(&review, now, text))
}

/// The same through a server.
pub(crate) async fn ask(
    decide: Decide,
    client: &Client,
    now: Timestamp,
    output: &mut Output<'_>,
) -> anyhow::Result<()> {
    let Decide { id, option, by, reason, value } = decide;
    let decision = NewDecision { option, by, reason, value };
    let review: ReviewFields = client.post(&format!("/reviews/{}/decision", encoded(&id)), &[], &decision).await?;
    output.one(&review, |text| tell(&review, now, text))
}
