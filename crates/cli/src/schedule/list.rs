//! `latch schedule list`: schedules by their names.

use anyhow::Result;
use clap::Args;
use latchwork::store::Timestamp;
use latchwork::workflow::StoredSchedules;

use crate::output::{Cell, Format, Output, Table, Tone, shortened};
use crate::schedule::fields::ScheduleFields;

/// The page size of reads.
const PAGE: usize = 1000;

#[derive(Args)]
pub(crate) struct List {
    /// Only schedules that are paused.
    #[arg(long)]
    paused: bool,
    /// Lists at most this many.
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u64).range(1..))]
    limit: u64,
    /// Lists all.
    #[arg(long, conflicts_with = "limit")]
    all: bool,
    /// Continues after an earlier list: its `next`, which is the name of a schedule.
    #[arg(long, value_name = "NAME")]
    after: Option<String>,
}

pub(crate) async fn run(
    list: List,
    schedules: &StoredSchedules,
    now: Timestamp,
    output: &mut Output<'_>,
) -> Result<()> {
    let mut after = list.after;
    let most = if list.all { usize::MAX } else { usize::try_from(list.limit).unwrap_or(usize::MAX) };
    let (mut found, mut told, mut last, mut next) = (Vec::new(), 0, None, None);
    'all: loop {
        let page = schedules.list(after.as_deref(), PAGE).await?;
        after = page.last().filter(|_| page.len() == PAGE).map(|schedule| schedule.name.clone());
        for schedule in page.into_iter().filter(|schedule| !list.paused || schedule.paused.is_some()) {
            if told == most {
                next = last;
                break 'all;
            }
            (told, last) = (told + 1, Some(schedule.name.clone()));
            found.push(ScheduleFields::of(schedule));
        }
        if after.is_none() {
            break;
        }
        if output.format() == Format::Jsonl {
            // Each page is written at once, so that a long list does not fill memory.
            found.drain(..).try_for_each(|schedule| output.line(&schedule))?;
        }
    }
    output.many("schedules", &found, next.as_deref(), |found| table(found, now))
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
