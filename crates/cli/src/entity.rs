//! `latch entity`: entities, through the API of a server or of the store that the command opens.

mod read;
mod types;
mod write;

use anyhow::Result;
use clap::Subcommand;

use crate::api::{self, Need};
use crate::client::Client;
use crate::output::Output;
use crate::target::Target;

#[derive(Subcommand)]
pub(crate) enum Entity {
    /// Shows an entity, as it is or as it was.
    Get(read::Get),
    /// Finds entities by their types and contents.
    Find(Box<read::Find>),
    /// Lists the versions of an entity that are kept, the newest first.
    History(read::History),
    /// Adds an entity.
    Add(write::Add),
    /// Replaces the contents of an entity; with --new, adds it.
    Put(write::Put),
    /// Changes parts of an entity. What is not given stays as it is.
    Patch(write::Patch),
    /// Removes an entity.
    Remove(write::Remove),
    /// Does all operations of a transaction, or none.
    Transact(write::Transact),
    /// Adds the indexes and unique values that a type needs and does not have.
    Declare(types::Declare),
    /// Removes indexes and unique values of a type.
    Undeclare(types::Declare),
}

pub(crate) async fn run(command: Entity, target: &Target, output: &mut Output<'_>) -> Result<()> {
    let need = match command {
        Entity::Get(_) | Entity::Find(_) | Entity::History(_) => Need::Look,
        _ => Need::Change,
    };
    api::with(target, need, async |client| call(command, client, output).await).await
}

async fn call(command: Entity, client: &Client, output: &mut Output<'_>) -> Result<()> {
    match command {
        Entity::Get(get) => read::get(get, client, output).await,
        Entity::Find(find) => read::find(*find, client, output).await,
        Entity::History(history) => read::history(history, client, output).await,
        Entity::Add(add) => write::add(add, client, output).await,
        Entity::Put(put) => write::put(put, client, output).await,
        Entity::Patch(patch) => write::patch(patch, client, output).await,
        Entity::Remove(remove) => write::remove(remove, client, output).await,
        Entity::Transact(transact) => write::transact(transact, client, output).await,
        Entity::Declare(declare) => types::declare(declare, client, output).await,
        Entity::Undeclare(declare) => types::undeclare(declare, client, output).await,
    }
}
