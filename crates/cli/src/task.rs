//! `latch task`: the tasks of workers in any language. A shell can be such a worker: it takes a task, renews its lease,
//! and completes or fails it under its token.

mod list;
mod work;

use anyhow::Result;
use clap::Subcommand;

use crate::api::{self, Need};
use crate::client::Client;
use crate::output::Output;
use crate::target::Target;

#[derive(Subcommand)]
pub(crate) enum Task {
    /// Lists tasks by their ids.
    List(list::List),
    /// Shows a task.
    Show(list::Show),
    /// Puts a task, once if it has an id.
    Put(Box<work::Put>),
    /// Takes tasks for a worker, the oldest first.
    Take(work::Take),
    /// Renews the lease of a task that was taken.
    Heartbeat(work::Heartbeat),
    /// Completes a task that was taken. Its first result counts.
    Complete(work::Complete),
    /// Tells that the attempt at a task has failed.
    Fail(work::Fail),
    /// Ends a task that shall not be done.
    Cancel(work::Cancel),
}

pub(crate) async fn run(command: Task, target: &Target, output: &mut Output<'_>) -> Result<()> {
    let need = match command {
        Task::List(_) => Need::Look,
        Task::Show(_) => Need::Follow,
        _ => Need::Change,
    };
    api::with(target, need, async |client| call(command, client, output).await).await
}

async fn call(command: Task, client: &Client, output: &mut Output<'_>) -> Result<()> {
    match command {
        Task::List(list) => list::list(list, client, output).await,
        Task::Show(show) => list::show(show, client, output).await,
        Task::Put(put) => work::put(*put, client, output).await,
        Task::Take(take) => work::take(take, client, output).await,
        Task::Heartbeat(beat) => work::heartbeat(beat, client, output).await,
        Task::Complete(complete) => work::complete(complete, client, output).await,
        Task::Fail(fail) => work::fail(fail, client, output).await,
        Task::Cancel(cancel) => work::cancel(cancel, client, output).await,
    }
}
