//! `latch workflow`: looks at executions, in a store that it opens read-only, or through the server that has it open.
//! It runs and changes nothing.

mod fields;
mod history;
mod list;
mod show;
mod why;

use anyhow::Result;
use clap::Subcommand;
use latchwork::lock::StoredLocks;
use latchwork::store::{Env, Store};
use latchwork::workflow::Executions;

use crate::client::Client;
use crate::output::Output;
use crate::target::{Looked, Target};

#[derive(Subcommand)]
pub(crate) enum Workflow {
    /// Lists executions, the newest first.
    List(Box<list::List>),
    /// Shows all details of an execution, and its last events.
    Show(show::Show),
    /// Explains exactly what an execution waits for.
    Why(why::Why),
    /// Writes the histories of executions, to files or as lines to the output, for `latchwork::testing::replay` to
    /// check new code against.
    History(history::History),
}

pub(crate) async fn run(command: Workflow, target: &Target, output: &mut Output<'_>) -> Result<()> {
    match target.look().await? {
        Looked::Store(store) => {
            let done = look(command, &store, output).await;
            store.close().await?;
            done
        }
        Looked::Server(client) => ask(command, &client, output).await,
    }
}

async fn look(command: Workflow, store: &Store, output: &mut Output<'_>) -> Result<()> {
    let executions = Executions::on(store).await?;
    let now = store.env().now();
    match command {
        Workflow::List(list) => list::run(*list, &executions, now, output).await,
        Workflow::Show(show) => show::run(show, &executions, now, output).await,
        Workflow::Why(why) => why::run(why, &executions, &StoredLocks::on(store).await?, now, output).await,
        Workflow::History(history) => history::run(history, store, output).await,
    }
}

async fn ask(command: Workflow, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let now = Env::system().now();
    match command {
        Workflow::List(list) => list::ask(*list, client, now, output).await,
        Workflow::Show(show) => show::ask(show, client, now, output).await,
        Workflow::Why(why) => why::ask(why, client, output).await,
        Workflow::History(history) => history::ask(history, client, output).await,
    }
}
