//! `latch lock`: looks at the locks in a data directory that no process has open, and forces the release of one. It
//! runs no workflow: an execution that gets a lock continues when an engine starts.

pub(crate) mod fields;
mod list;
mod release;
mod show;

use anyhow::Result;
use clap::{Args, Subcommand};
use latchwork::lock::{LockName, LockScope, StoredLocks};

use crate::output::Output;
use crate::store::StoreArgument;

#[derive(Subcommand)]
pub(crate) enum Lock {
    /// Lists locks by their names, global locks first.
    List(list::List),
    /// Shows the holders and the waiters of a lock, and its forced releases.
    Show(show::Show),
    /// Forces the release of a lock, or removes a request from its queue.
    Release(release::Release),
}

/// The scope of a lock.
#[derive(Args)]
pub(crate) struct Scope {
    /// The lock is shared by the executions of this workflow.
    #[arg(long, value_name = "WORKFLOW")]
    workflow: Option<String>,
    /// The lock is shared by this execution and all its descendants.
    #[arg(long, value_name = "ID", conflicts_with = "workflow")]
    tree: Option<String>,
}

impl Scope {
    fn scope(&self) -> Option<LockScope> {
        let workflow = self.workflow.clone().map(LockScope::Workflow);
        workflow.or_else(|| self.tree.as_deref().map(|root| LockScope::Tree(root.into())))
    }

    /// The lock of this name.
    fn name(&self, name: &str) -> LockName {
        LockName { scope: self.scope().unwrap_or(LockScope::Global), name: name.into() }
    }
}

pub(crate) async fn run(command: Lock, argument: &StoreArgument, output: &mut Output<'_>) -> Result<()> {
    let store = argument.look().await?;
    let locks = StoredLocks::on(&store).await?;
    let now = store.env().now();
    let done = match command {
        Lock::List(list) => list::run(list, &locks, output).await,
        Lock::Show(show) => show::run(show, &locks, now, output).await,
        Lock::Release(release) => {
            let asked = release::look(&release, &locks, now).await;
            store.close().await?;
            return release::run(release, asked?, argument, output).await;
        }
    };
    store.close().await?;
    done
}
