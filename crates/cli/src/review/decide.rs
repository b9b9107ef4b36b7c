//! `latch review decide`: decides a review, by an engine that runs nothing. The execution that waits for it is set
//! running, and goes on when an engine starts that runs it.

use std::path::Path;

use anyhow::Result;
use clap::Args;
use latchwork::store::Store;
use latchwork::workflow::{Engine, Executions};

use crate::output::Output;
use crate::review::fields::ReviewFields;
use crate::review::show::tell;

#[derive(Args)]
pub(crate) struct Decide {
    /// The review's id.
    id: String,
    /// The option that is chosen: one of those that the review offers.
    option: String,
    /// Who decides.
    #[arg(long, value_name = "NAME", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    by: String,
    /// Why.
    #[arg(long, value_name = "TEXT", default_value = "")]
    reason: String,
}

pub(crate) async fn run(decide: Decide, directory: &Path, output: &mut Output<'_>) -> Result<()> {
    // What is not there is found without anything being written.
    let store = Store::open_read_only(directory).await?;
    let found = Executions::on(&store).await?.review(&decide.id).await;
    store.close().await?;
    found?;
    let engine = Engine::open(directory).idle().start().await?;
    let review = engine.review(&decide.id);
    let decided = match review.decide(&decide.option, &decide.by, &decide.reason).await {
        Ok(_) => review.describe().await,
        Err(error) => Err(error),
    };
    let now = engine.store().env().now();
    engine.stop();
    engine.store().close().await?;
    let review = ReviewFields::of(decided?);
    output.one(&review, |text| tell(&review, now, text))
}
