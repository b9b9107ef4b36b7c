//! `latch lock`: looks at locks, forces the release of one, and runs a command under one: in a store, or through the
//! server that has it open. It runs no workflow: an execution that gets a lock continues when an engine runs.

pub(crate) mod fields;
mod list;
mod release;
pub(crate) mod run;
mod session;
mod show;

use anyhow::Result;
use clap::{Args, Subcommand};
use latchwork::lock::{LockName, LockScope, StoredLocks};
use latchwork::store::{Env, Store};

use crate::lock::fields::RequestFields;
use crate::lock::session::LockCall;
use crate::output::Output;
use crate::target::{Looked, Target};

#[derive(Subcommand)]
pub(crate) enum Lock {
    /// Lists locks by their names, global locks first.
    List(list::List),
    /// Shows the holders and the waiters of a lock, and its forced releases.
    Show(show::Show),
    /// Runs a command while it holds a lock. The command is terminated if the lock is lost. The exit code is that of
    /// the command.
    #[command(after_help = run::EXIT_CODES)]
    Run(Box<run::Run>),
    /// Forces the release of a lock, or removes a request from its queue.
    Release(release::Release),
    /// Removes a lock that has no holder and no waiter, so that it can be used as another kind.
    Remove(session::Remove),
    /// Acquires a lock for a session that a script renews itself. Where a command runs under the lock, use `run`.
    Acquire(Box<session::Acquire>),
    /// Releases a lock of a session, or takes its request back.
    Withdraw(session::Withdraw),
    /// Begins, shows, renews and ends sessions, which hold locks.
    Session {
        #[command(subcommand)]
        command: session::SessionCommand,
    },
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

    /// The scope as parameters of a query.
    fn query(&self) -> Vec<(&'static str, String)> {
        let workflow = self.workflow.iter().map(|workflow| ("workflow", workflow.clone()));
        workflow.chain(self.tree.iter().map(|root| ("tree", root.clone()))).collect()
    }

    /// The lock of this name.
    fn name(&self, name: &str) -> LockName {
        LockName { scope: self.scope().unwrap_or(LockScope::Global), name: name.into() }
    }
}

pub(crate) async fn run(command: Lock, target: &Target, output: &mut Output<'_>) -> Result<()> {
    let command = match command {
        Lock::Run(run) => return run::run(*run, target, output).await,
        Lock::Remove(remove) => return session::run(LockCall::Remove(remove), target, output).await,
        Lock::Acquire(acquire) => return session::run(LockCall::Acquire(*acquire), target, output).await,
        Lock::Withdraw(withdraw) => return session::run(LockCall::Withdraw(withdraw), target, output).await,
        Lock::Session { command } => return session::run(LockCall::Session(command), target, output).await,
        command => command,
    };
    match target.look().await? {
        Looked::Store(store) => {
            let done = look(&command, &store, output).await;
            store.close().await?;
            match (command, done?) {
                // What changes something opens the store again, in another way.
                (Lock::Release(release), Some(asked)) => {
                    release::run(release, asked, target.store("lock release")?, output).await
                }
                _ => Ok(()),
            }
        }
        Looked::Server(client) => {
            let now = Env::system().now();
            match command {
                Lock::List(list) => list::ask(list, &client, output).await,
                Lock::Show(show) => show::ask(show, &client, now, output).await,
                Lock::Release(release) => release::ask(release, &client, now, output).await,
                _ => Ok(()),
            }
        }
    }
}

/// Looks at the locks of a store. Returns the request that is to be released.
async fn look(command: &Lock, store: &Store, output: &mut Output<'_>) -> Result<Option<RequestFields>> {
    let locks = StoredLocks::on(store).await?;
    let now = store.env().now();
    match command {
        Lock::List(list) => list::run(list, &locks, output).await.map(|()| None),
        Lock::Show(show) => show::run(show, &locks, now, output).await.map(|()| None),
        Lock::Release(release) => release::look(release, &locks, now).await.map(Some),
        _ => Ok(None),
    }
}
