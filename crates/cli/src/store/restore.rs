//! `latch store restore`: replaces everything in a store by a snapshot. It works on a store alone: a server that is
//! running would keep what it has read before.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use latchwork::store::{Confirm, Generation, Store};
use serde::Serialize;

use crate::ask::confirm;
use crate::output::Output;
use crate::progress::shown;
use crate::target::Target;

#[derive(Args)]
pub(crate) struct Restore {
    /// The directory of the snapshot: a backup, or the data directory of a store that no process has open.
    snapshot: PathBuf,
    /// Does not ask for confirmation.
    #[arg(long)]
    yes: bool,
}

#[derive(Serialize)]
struct Restored {
    store: String,
    snapshot: String,
    /// The generation of the snapshot in its own store.
    snapshot_generation: u64,
    /// The generation of the store after the restore, which is higher than all before.
    generation: u64,
}

pub(crate) async fn run(restore: Restore, target: &Target, output: &mut Output<'_>) -> Result<()> {
    let argument = target.store("store restore")?;
    // A wrong snapshot must not leave an empty store behind.
    let snapshot = Store::open_read_only(&restore.snapshot).await?;
    let snapshot_generation = snapshot.generation().await;
    snapshot.close().await?;
    let snapshot_generation = snapshot_generation?;
    let store = argument.open().await?;
    let work = async {
        if store.generation().await? > Generation(0) {
            let (to, from) = (argument, restore.snapshot.display());
            confirm(&format!("Replace everything in {to} by {from}?"), restore.yes, "nothing was replaced")?;
        }
        let replaced = store.restore(&restore.snapshot, Confirm::ReplaceEverything);
        Ok(shown(output.format(), "Restoring", String::new, replaced).await?)
    };
    let generation: Result<Generation> = work.await;
    store.close().await?;
    let done = Restored {
        store: argument.to_string(),
        snapshot: restore.snapshot.display().to_string(),
        snapshot_generation: snapshot_generation.0,
        generation: generation?.0,
    };
    output.one(&done, |text| {
        let Restored { store, snapshot, snapshot_generation, generation } = &done;
        text.line(format!("{store} holds what {snapshot} holds, generation {snapshot_generation} there."));
        text.line(format!("Its own generation is {generation} now."));
    })
}
