//! `latch schedule pause`, `resume`, `trigger` and `delete`, through an engine that runs nothing.

use anyhow::Result;
use clap::Args;
use latchwork::store::Timestamp;
use latchwork::workflow::{ExecutionId, Schedules};
use serde::{Deserialize, Serialize};
use serde_json::json;

use crate::client::{Client, encoded};
use crate::output::Output;
use crate::store::StoreArgument;
use crate::time::Time;

#[derive(Args)]
pub(crate) struct Named {
    /// The schedule's name.
    name: String,
}

#[derive(Args)]
pub(crate) struct Pause {
    /// The schedule's name.
    name: String,
    /// The reason, which is shown while the schedule is paused.
    #[arg(long, value_name = "TEXT", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    reason: String,
}

/// A schedule that is paused.
#[derive(Serialize, Deserialize)]
struct Paused {
    name: String,
    paused: String,
}

/// A schedule that was resumed.
#[derive(Serialize, Deserialize)]
struct Resumed {
    name: String,
    next: Option<Time>,
}

/// A schedule that was triggered.
#[derive(Serialize, Deserialize)]
struct Triggered {
    name: String,
    id: ExecutionId,
}

/// A schedule that was deleted.
#[derive(Serialize, Deserialize)]
struct Deleted {
    name: String,
}

pub(crate) async fn pause(pause: Pause, store: &StoreArgument, output: &mut Output<'_>) -> Result<()> {
    let Pause { name, reason: paused } = pause;
    operate(store, async |schedules, _| schedules.pause(&name, &paused).await).await?;
    Paused { name, paused }.tell(output)
}

pub(crate) async fn resume(named: Named, store: &StoreArgument, output: &mut Output<'_>) -> Result<()> {
    let name = named.name;
    let next = operate(store, async |schedules, _| {
        schedules.resume(&name).await?;
        schedules.next(&name, 1).await
    });
    let next = next.await?.first().map(|next| Time(*next));
    Resumed { name, next }.tell(output)
}

pub(crate) async fn trigger(named: Named, store: &StoreArgument, output: &mut Output<'_>) -> Result<()> {
    let name = named.name;
    let id = operate(store, async |schedules, _| schedules.trigger(&name).await).await?;
    Triggered { name, id }.tell("when an engine starts", output)
}

pub(crate) async fn delete(named: Named, store: &StoreArgument, output: &mut Output<'_>) -> Result<()> {
    let name = named.name;
    operate(store, async |schedules, _| schedules.delete(&name).await).await?;
    Deleted { name }.tell(output)
}

fn path(name: &str, verb: &str) -> String {
    format!("/schedules/{}{verb}", encoded(name))
}

/// The same through a server, as for the others below.
pub(crate) async fn ask_pause(pause: Pause, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let because = json!({"reason": pause.reason});
    client.post::<Paused>(&path(&pause.name, "/pause"), &[], &because).await?.tell(output)
}

pub(crate) async fn ask_resume(named: Named, client: &Client, output: &mut Output<'_>) -> Result<()> {
    client.post::<Resumed>(&path(&named.name, "/resume"), &[], &()).await?.tell(output)
}

pub(crate) async fn ask_trigger(named: Named, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let triggered: Triggered = client.post(&path(&named.name, "/trigger"), &[], &()).await?;
    triggered.tell("now, if a node has its workflow", output)
}

pub(crate) async fn ask_delete(named: Named, client: &Client, output: &mut Output<'_>) -> Result<()> {
    client.delete::<Deleted>(&path(&named.name, "")).await?.tell(output)
}

impl Paused {
    fn tell(&self, output: &mut Output<'_>) -> Result<()> {
        output.one(self, |text| text.line(format!("Schedule {:?} is paused.", self.name)))
    }
}

impl Resumed {
    fn tell(&self, output: &mut Output<'_>) -> Result<()> {
        let Resumed { name, next } = self;
        output.one(self, |text| match next {
            Some(next) => text.line(format!("Schedule {name:?} fires next at {}.", next.short())),
            None => text.line(format!("Schedule {name:?} has ended.")),
        })
    }
}

impl Triggered {
    fn tell(&self, when: &str, output: &mut Output<'_>) -> Result<()> {
        let Triggered { name, id } = self;
        output.one(self, |text| {
            text.line(format!("Schedule {name:?} fires {when}; the execution is {:?}.", &**id));
        })
    }
}

impl Deleted {
    fn tell(&self, output: &mut Output<'_>) -> Result<()> {
        output.one(self, |text| text.line(format!("Schedule {:?} is deleted.", self.name)))
    }
}

/// Makes a change through an engine that runs nothing, and closes the data directory. It does not create a directory
/// that does not exist.
pub(crate) async fn operate<T>(
    store: &StoreArgument,
    does: impl AsyncFnOnce(&Schedules, Timestamp) -> latchwork::workflow::Result<T>,
) -> Result<T> {
    let engine = store.operate().await?;
    let done = does(&engine.schedules(), engine.store().env().now()).await;
    engine.stop();
    engine.store().close().await?;
    Ok(done?)
}
