//! `latch review`: looks at the reviews in a data directory that no process has open, and decides one. It runs no
//! workflow: the execution that waits for the decision continues when an engine starts.

mod decide;
mod fields;
mod list;
mod show;

use anyhow::Result;
use clap::Subcommand;
use latchwork::workflow::Executions;

use crate::output::Output;
use crate::store::StoreArgument;

#[derive(Subcommand)]
pub(crate) enum Review {
    /// Lists open reviews by workflow and name, the oldest first.
    List(list::List),
    /// Shows what a review asks, and its decision, if there is one.
    Show(show::Show),
    /// Decides an open review, once.
    Decide(decide::Decide),
}

pub(crate) async fn run(command: Review, store: &StoreArgument, output: &mut Output<'_>) -> Result<()> {
    let command = match command {
        Review::Decide(decide) => return decide::run(decide, store, output).await,
        command => command,
    };
    let store = store.look().await?;
    let executions = Executions::on(&store).await?;
    let now = store.env().now();
    let done = match command {
        Review::List(list) => list::run(list, &executions, now, output).await,
        Review::Show(show) => show::run(show, &executions, now, output).await,
        Review::Decide(_) => Ok(()),
    };
    store.close().await?;
    done
}
