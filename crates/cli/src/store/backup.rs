//! `latch store backup`: a snapshot of a store in a new directory, while programs go on using the store.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::Args;
use latchwork::store::{Env, Store};
use serde::Serialize;

use crate::output::{Exit, Output, Problem};
use crate::progress::{bytes, shown, size_of};
use crate::target::{Looked, Target};
use crate::time::exact;
use crate::unpack;

#[derive(Args)]
pub(crate) struct Backup {
    /// The directory to write to. It must be empty or missing.
    directory: PathBuf,
    /// Reads the backup afterwards, and reports damage.
    #[arg(long)]
    verify: bool,
}

#[derive(Serialize)]
struct BackedUp {
    directory: String,
    /// The generation of the store that the backup holds.
    generation: u64,
    bytes: u64,
    took_ms: u64,
    /// True if the backup was read afterwards, and is sound.
    verified: bool,
}

pub(crate) async fn run(backup: Backup, target: &Target, output: &mut Output<'_>) -> Result<()> {
    let (env, directory) = (Env::system(), backup.directory.as_path());
    let began = env.monotonic();
    let written = || format!(", {} written", bytes(size_of(directory)));
    let work = write(target, directory);
    let generation = shown(output.format(), "Writing the backup", written, work).await?;
    if backup.verify {
        shown(output.format(), "Reading the backup", String::new, check(directory)).await?;
    }
    let took = env.monotonic().saturating_sub(began);
    let done = BackedUp {
        directory: directory.display().to_string(),
        generation,
        bytes: size_of(directory),
        took_ms: took.as_millis() as u64,
        verified: backup.verify,
    };
    output.one(&done, |text| {
        let size = bytes(done.bytes);
        let sound = if done.verified { ", which is sound" } else { "" };
        let took = exact(std::time::Duration::from_millis(done.took_ms));
        text.line(format!("Generation {generation} is in {}{sound}: {size} in {took}.", done.directory));
    })
}

/// Writes the backup. Returns its generation.
async fn write(target: &Target, directory: &Path) -> Result<u64> {
    match target.look().await? {
        Looked::Store(store) => {
            let view = store.view().await?;
            let generation = view.generation();
            let written = view.persist(directory).await;
            drop(view);
            store.close().await?;
            written?;
            Ok(generation.0)
        }
        Looked::Server(client) => {
            let answer = client.download("/store/backup").await?;
            let generation = answer.header("latchwork-generation").and_then(|text| text.parse().ok());
            unpack::into_directory(answer, directory).await?;
            generation.context("the server did not say which generation the backup holds")
        }
    }
}

/// Reads the whole backup.
async fn check(directory: &Path) -> Result<()> {
    let store = Store::open_read_only(directory).await?;
    let damage = store.verify().await;
    store.close().await?;
    match damage?.first() {
        None => Ok(()),
        Some(first) => {
            let why = format!("the backup in {} is damaged: {}: {}", directory.display(), first.place, first.detail);
            Err(Problem::new(Exit::Failed, why).into())
        }
    }
}
