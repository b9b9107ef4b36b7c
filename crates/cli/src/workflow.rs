//! `latch workflow`: looks at the executions in a data directory that no process has open. It runs and changes nothing:
//! it opens the directory read-only.

mod fields;
mod history;
mod list;
mod show;
mod why;

use anyhow::Result;
use clap::Subcommand;
use latchwork::lock::StoredLocks;
use latchwork::workflow::Executions;

use crate::output::Output;
use crate::store::StoreArgument;

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

pub(crate) async fn run(command: Workflow, store: &StoreArgument, output: &mut Output<'_>) -> Result<()> {
    let store = store.look().await?;
    let executions = Executions::on(&store).await?;
    let now = store.env().now();
    let done = match command {
        Workflow::List(list) => list::run(*list, &executions, now, output).await,
        Workflow::Show(show) => show::run(show, &executions, now, output).await,
        Workflow::Why(why) => why::run(why, &executions, &StoredLocks::on(&store).await?, now, output).await,
        Workflow::History(history) => history::run(history, &store, output).await,
    };
    store.close().await?;
    done
}
