//! `latch schedule pause`, `resume`, `trigger` and `delete`, through an engine that runs nothing.

use anyhow::Result;
use clap::Args;
use latchwork::store::Timestamp;
use latchwork::workflow::Schedules;
use serde_json::json;

use crate::output::Output;
use crate::store::StoreArgument;

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

pub(crate) async fn pause(pause: Pause, store: &StoreArgument, output: &mut Output<'_>) -> Result<()> {
    let Pause { name, reason } = &pause;
    operate(store, async |schedules, _| schedules.pause(name, reason).await).await?;
    output.one(&json!({"name": name, "paused": reason}), |text| text.line(format!("Schedule {name:?} is paused.")))
}

pub(crate) async fn resume(named: Named, store: &StoreArgument, output: &mut Output<'_>) -> Result<()> {
    let name = &named.name;
    let next = operate(store, async |schedules, _| {
        schedules.resume(name).await?;
        schedules.next(name, 1).await
    });
    let next = next.await?.first().map(|next| crate::time::Time(*next));
    output.one(&json!({"name": name, "next": next}), |text| match next {
        Some(next) => text.line(format!("Schedule {name:?} fires next at {}.", next.short())),
        None => text.line(format!("Schedule {name:?} has ended.")),
    })
}

pub(crate) async fn trigger(named: Named, store: &StoreArgument, output: &mut Output<'_>) -> Result<()> {
    let name = &named.name;
    let id = operate(store, async |schedules, _| schedules.trigger(name).await).await?;
    output.one(&json!({"name": name, "id": id}), |text| {
        text.line(format!("Schedule {name:?} fires when an engine starts; the execution is {:?}.", &*id));
    })
}

pub(crate) async fn delete(named: Named, store: &StoreArgument, output: &mut Output<'_>) -> Result<()> {
    let name = &named.name;
    operate(store, async |schedules, _| schedules.delete(name).await).await?;
    output.one(&json!({"name": name}), |text| text.line(format!("Schedule {name:?} is deleted.")))
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
