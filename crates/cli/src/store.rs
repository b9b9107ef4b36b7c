//! `latch store`: backups, restores, checks and figures of a whole store.

mod argument;
mod backup;
mod restore;
mod stats;
mod verify;

use anyhow::Result;
use clap::Subcommand;

use crate::output::Output;
use crate::target::Target;

pub(crate) use argument::{DEFAULT_DIRECTORY, StoreArgument, is_database, quoted};

#[derive(Subcommand)]
pub(crate) enum StoreCommand {
    /// Writes a snapshot of the store into a new directory. A backup can be opened as a store, and restored.
    Backup(backup::Backup),
    /// Replaces everything in the store by a snapshot.
    Restore(restore::Restore),
    /// Reads everything in the store, and reports all damage.
    Verify,
    /// Shows figures about the store.
    Stats,
}

pub(crate) async fn run(command: StoreCommand, target: &Target, output: &mut Output<'_>) -> Result<()> {
    match command {
        StoreCommand::Backup(backup) => backup::run(backup, target, output).await,
        StoreCommand::Restore(restore) => restore::run(restore, target, output).await,
        StoreCommand::Verify => verify::run(target, output).await,
        StoreCommand::Stats => stats::run(target, output).await,
    }
}
