//! `latch review`: looks at reviews, and decides one, in a store or through the server that has it open. It runs no
//! workflow: the execution that waits for the decision continues when an engine starts.

mod decide;
mod fields;
mod list;
mod show;

use anyhow::Result;
use clap::Subcommand;
use latchwork::store::{Env, Store};
use latchwork::workflow::Executions;

use crate::client::Client;
use crate::output::Output;
use crate::target::{Looked, Target};

#[derive(Subcommand)]
pub(crate) enum Review {
    /// Lists open reviews by workflow and name, the oldest first.
    List(list::List),
    /// Shows what a review asks, and its decision, if there is one.
    Show(show::Show),
    /// Decides an open review, once.
    Decide(decide::Decide),
}

pub(crate) async fn run(command: Review, target: &Target, output: &mut Output<'_>) -> Result<()> {
    let store = match target.look().await? {
        Looked::Server(client) => return ask(command, &client, output).await,
        Looked::Store(store) => store,
    };
    let looked = look(&command, &store, output).await;
    store.close().await?;
    looked?;
    match command {
        Review::Decide(decide) => decide::run(decide, target.store("review decide")?, output).await,
        Review::List(_) | Review::Show(_) => Ok(()),
    }
}

async fn look(command: &Review, store: &Store, output: &mut Output<'_>) -> Result<()> {
    let executions = Executions::on(store).await?;
    let now = store.env().now();
    match command {
        Review::List(list) => list::run(list, &executions, now, output).await,
        Review::Show(show) => show::run(show, &executions, now, output).await,
        // A missing review is found without a write.
        Review::Decide(decide) => decide.look(&executions).await,
    }
}

/// The same through a server.
async fn ask(command: Review, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let now = Env::system().now();
    match command {
        Review::List(list) => list::ask(&list, client, now, output).await,
        Review::Show(show) => show::ask(&show, client, now, output).await,
        Review::Decide(decide) => decide::ask(decide, client, now, output).await,
    }
}
