//! `latch schedule list`: schedules by their names.

use anyhow::Result;
use clap::Args;
use latchwork::store::Timestamp;
use latchwork::workflow::StoredSchedules;

use crate::client::Client;
use crate::output::{Cell, Output, Table, Tone, shortened};
use crate::paging::Paging;
use crate::schedule::fields::ScheduleFields;

#[derive(Args)]
pub(crate) struct List {
    /// Only schedules that are paused.
    #[arg(long)]
    paused: bool,
    #[command(flatten)]
    paging: Paging,
}

pub(crate) async fn run(
    list: &List,
    schedules: &StoredSchedules,
    now: Timestamp,
    output: &mut Output<'_>,
) -> Result<()> {
    let schedules = if list.paused { schedules.list().paused() } else { schedules.list() };
    list.paging
        .write(
            "schedules",
            output,
            |found| table(found, now),
            async |limit, after| Ok(schedules.clone().limit(limit).after(after).await?.map(ScheduleFields::of)),
        )
        .await
}

/// The same from a server.
pub(crate) async fn ask(list: &List, client: &Client, now: Timestamp, output: &mut Output<'_>) -> Result<()> {
    let query: Vec<_> = list.paused.then(|| ("paused", "true".to_string())).into_iter().collect();
    list.paging
        .write(
            "schedules",
            output,
            |found| table(found, now),
            async |limit, after| client.page::<ScheduleFields>("/schedules", &query, limit, after).await,
        )
        .await
}

fn table(found: &[ScheduleFields], now: Timestamp) -> Table {
    let mut table = Table::new(&["NAME", "WORKFLOW", "WHEN", "NEXT", "RUNNING", "STARTED", "SKIPPED", "MISSED"]);
    for schedule in found {
        let tone = match (&schedule.stalled, &schedule.paused) {
            (Some(_), _) => Tone::Bad,
            (_, Some(_)) => Tone::Attention,
            _ => Tone::Plain,
        };
        table.row([
            schedule.name.clone().into(),
            schedule.workflow.clone().into(),
            shortened(&schedule.when(), 60).into(),
            Cell::new(schedule.state(now), tone),
            schedule.running.len().to_string().into(),
            schedule.started.to_string().into(),
            schedule.skipped.to_string().into(),
            Cell::new(schedule.missed.to_string(), if schedule.missed > 0 { Tone::Attention } else { Tone::Dim }),
        ]);
    }
    table
}
