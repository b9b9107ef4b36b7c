//! `latch schedule`: looks at schedules, and changes them, in a store or through the server that has it open. It starts
//! nothing: an occurrence that is due, or was triggered, starts when an engine with the workflow starts.

mod backfill;
mod change;
mod create;
pub(crate) mod fields;
mod list;
mod show;

use anyhow::Result;
use clap::Subcommand;
use latchwork::store::{Env, Store};
use latchwork::workflow::StoredSchedules;

use crate::api::{self, Need};
use crate::client::Client;
use crate::output::Output;
use crate::target::{Looked, Target};

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
    /// Starts the occurrences of a past range, as the overlap policy says.
    Backfill(backfill::Backfill),
    /// Deletes a schedule and its past runs. Executions that it has started continue.
    Delete(change::Named),
}

pub(crate) async fn run(command: Schedule, target: &Target, output: &mut Output<'_>) -> Result<()> {
    let command = match command {
        Schedule::Backfill(backfill) => {
            return api::with(target, Need::Change, async |client| backfill::run(backfill, client, output).await).await;
        }
        command => command,
    };
    let store = match target.look().await? {
        Looked::Server(client) => return ask(command, &client, output).await,
        Looked::Store(store) => store,
    };
    let looked = look(&command, &store, output).await;
    store.close().await?;
    looked?;
    // What changes something opens the store again, in another way.
    match command {
        Schedule::List(_) | Schedule::Show(_) | Schedule::Backfill(_) => Ok(()),
        Schedule::Create(create) => create::run(create, target.store("schedule create")?, output).await,
        Schedule::Pause(pause) => change::pause(pause, target.store("schedule pause")?, output).await,
        Schedule::Resume(named) => change::resume(named, target.store("schedule resume")?, output).await,
        Schedule::Trigger(named) => change::trigger(named, target.store("schedule trigger")?, output).await,
        Schedule::Delete(named) => change::delete(named, target.store("schedule delete")?, output).await,
    }
}

/// The commands that change nothing.
async fn look(command: &Schedule, store: &Store, output: &mut Output<'_>) -> Result<()> {
    let now = store.env().now();
    match command {
        Schedule::List(list) => list::run(list, &StoredSchedules::on(store).await?, now, output).await,
        Schedule::Show(show) => show::run(show, &StoredSchedules::on(store).await?, now, output).await,
        _ => Ok(()),
    }
}

/// The same through a server.
async fn ask(command: Schedule, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let now = Env::system().now();
    match command {
        Schedule::List(list) => list::ask(&list, client, now, output).await,
        Schedule::Show(show) => show::ask(&show, client, now, output).await,
        Schedule::Create(create) => create::ask(create, client, now, output).await,
        Schedule::Pause(pause) => change::ask_pause(pause, client, output).await,
        Schedule::Resume(named) => change::ask_resume(named, client, output).await,
        Schedule::Trigger(named) => change::ask_trigger(named, client, output).await,
        Schedule::Delete(named) => change::ask_delete(named, client, output).await,
        Schedule::Backfill(_) => Ok(()),
    }
}
