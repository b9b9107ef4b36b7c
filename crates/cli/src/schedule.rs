//! `latch schedule`: looks at the schedules in a data directory that no process has open, and changes them. It starts
//! nothing: an occurrence that is due, or was triggered, starts when an engine with the workflow starts.

mod change;
mod create;
mod fields;
mod list;
mod show;

use anyhow::Result;
use clap::Subcommand;
use latchwork::workflow::StoredSchedules;

use crate::output::Output;
use crate::store::StoreArgument;

#[derive(Subcommand)]
pub(crate) enum Schedule {
    /// Lists schedules by their names.
    List(list::List),
    /// Shows a schedule, the times when it fires next, and its past runs.
    Show(show::Show),
    /// Creates a schedule, or changes the schedule of that name. It does not check that the workflow exists and accepts
    /// the input: that is found when the schedule fires.
    Create(create::Create),
    /// Pauses a schedule: it starts nothing until it is resumed.
    Pause(change::Pause),
    /// Resumes a paused schedule, from the next occurrence.
    Resume(change::Named),
    /// Makes a schedule fire when the next engine starts.
    Trigger(change::Named),
    /// Deletes a schedule and its past runs. Executions that it has started continue.
    Delete(change::Named),
}

pub(crate) async fn run(command: Schedule, store: &StoreArgument, output: &mut Output<'_>) -> Result<()> {
    match command {
        Schedule::Create(create) => create::run(create, store, output).await,
        Schedule::Pause(pause) => change::pause(pause, store, output).await,
        Schedule::Resume(named) => change::resume(named, store, output).await,
        Schedule::Trigger(named) => change::trigger(named, store, output).await,
        Schedule::Delete(named) => change::delete(named, store, output).await,
        looks => look(looks, store, output).await,
    }
}

/// The commands that change nothing.
async fn look(command: Schedule, store: &StoreArgument, output: &mut Output<'_>) -> Result<()> {
    let store = store.look().await?;
    let schedules = StoredSchedules::on(&store).await?;
    let now = store.env().now();
    let done = match command {
        Schedule::List(list) => list::run(list, &schedules, now, output).await,
        Schedule::Show(show) => show::run(show, &schedules, now, output).await,
        _ => Ok(()),
    };
    store.close().await?;
    done
}
