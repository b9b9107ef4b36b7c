//! `latch workflow`: executions. The older commands look at a store that is opened read-only, or ask the server that
//! has it open; all others use the API. No execution runs in this process.

pub(crate) mod fields;
mod history;
mod limit;
mod list;
mod message;
pub(crate) mod result;
mod show;
mod start;
mod steer;
mod timeline;
mod why;

use anyhow::Result;
use clap::Subcommand;
use latchwork::lock::StoredLocks;
use latchwork::store::{Env, Store};
use latchwork::workflow::Executions;

use crate::api::{self, Need};
use crate::client::Client;
use crate::output::Output;
use crate::target::{Looked, Target};
use crate::workflow::steer::Steering;

#[derive(Subcommand)]
pub(crate) enum Workflow {
    /// Lists executions, the newest first.
    List(Box<list::List>),
    /// Shows all details of an execution, when its operations ran, and its last events.
    Show(show::Show),
    /// Explains exactly what an execution waits for.
    Why(why::Why),
    /// Writes the histories of executions, to files or as lines to the output, for `latchwork::testing::replay` to
    /// check new code against.
    History(history::History),
    /// Starts an execution, through a program that has registered the workflow.
    Start(Box<start::Start>),
    /// Shows how an execution has ended, and waits for its end.
    Result(result::GetResult),
    /// Sends a signal to an execution.
    Signal(message::Signal),
    /// Sends an update to an execution, and waits for its answer.
    Update(message::Update),
    /// Shows what an execution has published of itself.
    Query(message::Query),
    /// Cancels an execution, which may clean up before it ends.
    Cancel(steer::Because),
    /// Ends an execution as failed, wherever it is. No more of its code runs.
    Terminate(steer::Because),
    /// Lets a parked execution continue, with the code that is registered now.
    Resume(steer::One),
    /// Makes the next attempt of a step now that waits for it.
    Retry(steer::One),
    /// Starts a new execution that keeps what another has recorded before a place, and runs the rest again.
    Fork(steer::ForkFrom),
    /// Shows how much of a limit of a workflow is used.
    Limit(limit::Limit),
}

impl Workflow {
    /// What the command does with its target; `None` for those that look at a store themselves.
    fn need(&self) -> Option<Need> {
        match self {
            Workflow::List(_) | Workflow::Show(_) | Workflow::Why(_) | Workflow::History(_) => None,
            Workflow::Query(_) | Workflow::Limit(_) => Some(Need::Look),
            Workflow::Result(_) => Some(Need::Follow),
            _ => Some(Need::Change),
        }
    }
}

pub(crate) async fn run(command: Workflow, target: &Target, output: &mut Output<'_>) -> Result<()> {
    if let Some(need) = command.need() {
        return api::with(target, need, async |client| call(command, client, output).await).await;
    }
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
        _ => Ok(()),
    }
}

async fn ask(command: Workflow, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let now = Env::system().now();
    match command {
        Workflow::List(list) => list::ask(*list, client, now, output).await,
        Workflow::Show(show) => show::ask(show, client, now, output).await,
        Workflow::Why(why) => why::ask(why, client, output).await,
        Workflow::History(history) => history::ask(history, client, output).await,
        _ => Ok(()),
    }
}

async fn call(command: Workflow, client: &Client, output: &mut Output<'_>) -> Result<()> {
    match command {
        Workflow::Start(start) => start::run(*start, client, output).await,
        Workflow::Result(asked) => result::run(asked, client, output).await,
        Workflow::Signal(signal) => message::signal(signal, client, output).await,
        Workflow::Update(update) => message::update(update, client, output).await,
        Workflow::Query(query) => message::query(query, client, output).await,
        Workflow::Cancel(because) => steer::because(Steering::Cancel, because, client, output).await,
        Workflow::Terminate(because) => steer::because(Steering::Terminate, because, client, output).await,
        Workflow::Resume(one) => steer::one(Steering::Resume, one, client, output).await,
        Workflow::Retry(one) => steer::one(Steering::Retry, one, client, output).await,
        Workflow::Fork(fork) => steer::fork(fork, client, output).await,
        Workflow::Limit(limit) => limit::run(limit, client, output).await,
        Workflow::List(_) | Workflow::Show(_) | Workflow::Why(_) | Workflow::History(_) => Ok(()),
    }
}
