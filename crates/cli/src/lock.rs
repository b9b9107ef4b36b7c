//! `latch lock`: looks at the locks in a data directory that no process has open, and has somebody let go of one. No
//! workflow is run: whoever is given a lock goes on when an engine starts.

pub(crate) mod fields;
mod list;
mod release;
mod show;

use std::path::Path;

use anyhow::Result;
use clap::{Args, Subcommand};
use latchwork::lock::{LockName, LockScope, StoredLocks};
use latchwork::store::Store;

use crate::output::Output;

#[derive(Subcommand)]
pub(crate) enum Lock {
    /// Lists locks by their names, those that everybody shares first.
    List(list::List),
    /// Shows who holds a lock, who waits for it, and who was made to let go of it.
    Show(show::Show),
    /// Has somebody let go of a lock, or of a place in its line, whether it is done with it or not.
    Release(release::Release),
}

/// Who shares the lock of a name.
#[derive(Args)]
pub(crate) struct Scope {
    /// Among the locks that the executions of this workflow share.
    #[arg(long, value_name = "WORKFLOW")]
    workflow: Option<String>,
    /// Among the locks that this execution shares with its children and theirs.
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

pub(crate) async fn run(command: Lock, directory: &Path, output: &mut Output<'_>) -> Result<()> {
    let store = Store::open_read_only(directory).await?;
    let locks = StoredLocks::on(&store).await?;
    let now = store.env().now();
    let done = match command {
        Lock::List(list) => list::run(list, &locks, output).await,
        Lock::Show(show) => show::run(show, &locks, now, output).await,
        Lock::Release(release) => {
            let asked = release::look(&release, &locks, now).await;
            store.close().await?;
            return release::run(release, asked?, directory, output).await;
        }
    };
    store.close().await?;
    done
}
