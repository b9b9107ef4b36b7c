//! `latch schedule show`: a schedule, the times when it fires next, and its past runs.

use anyhow::Result;
use clap::Args;
use latchwork::store::Timestamp;
use latchwork::workflow::{ScheduleError, StoredSchedules, WorkflowError};
use serde::{Deserialize, Serialize};

use crate::client::{Client, encoded};
use crate::output::{Cell, Output, Table, Text, Tone, shortened};
use crate::paging::first;
use crate::schedule::fields::{RunFields, ScheduleFields};
use crate::time::Time;

/// The most next times that a server shows.
const MOST_NEXT: u32 = 1000;

#[derive(Args)]
pub(crate) struct Show {
    /// The schedule's name.
    name: String,
    /// Shows this many of the next times.
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u32).range(..=10_000))]
    next: u32,
    /// Shows this many of the past runs.
    #[arg(long, default_value_t = 10, value_name = "N")]
    runs: u32,
}

#[derive(Serialize, Deserialize)]
struct Shown {
    schedule: ScheduleFields,
    next: Vec<Time>,
    runs: Vec<RunFields>,
}

pub(crate) async fn run(
    show: &Show,
    schedules: &StoredSchedules,
    now: Timestamp,
    output: &mut Output<'_>,
) -> Result<()> {
    let missing = || WorkflowError::from(ScheduleError::NotFound { name: show.name.clone() });
    let schedule = ScheduleFields::of(schedules.get(&show.name).await?.ok_or_else(missing)?);
    let next = schedules.next(&show.name, show.next as usize).await?.into_iter().map(Time).collect();
    let runs = first(show.runs as usize, async |limit, after| {
        Ok(schedules.runs(&show.name).limit(limit).after(after).await?.map(RunFields::of))
    })
    .await?;
    let shown = Shown { schedule, next, runs };
    output.one(&shown, |text| tell(&shown, now, text))
}

/// The same from a server, which shows fewer at once.
pub(crate) async fn ask(show: &Show, client: &Client, now: Timestamp, output: &mut Output<'_>) -> Result<()> {
    let path = format!("/schedules/{}", encoded(&show.name));
    let query = [("next", show.next.min(MOST_NEXT).to_string()), ("runs", "0".to_string())];
    let mut shown: Shown = client.get(&path, &query).await?;
    shown.runs = first(show.runs as usize, async |limit, after| {
        client.page::<RunFields>(&format!("{path}/runs"), &[], limit, after).await
    })
    .await?;
    output.one(&shown, |text| tell(&shown, now, text))
}

fn tell(shown: &Shown, now: Timestamp, text: &mut Text) {
    let schedule = &shown.schedule;
    let (name, workflow) = (&schedule.name, &schedule.workflow);
    text.line(format!("Schedule {name:?} starts workflow {workflow:?}: {}.", schedule.when()));
    text.line(format!("Its input is {}.", shortened(&schedule.input.to_string(), 200)));
    match (&schedule.paused, schedule.paused_since, schedule.next) {
        (Some(reason), Some(since), _) => {
            text.line(format!("It was paused {} and starts nothing: {reason}", since.relative_to(now)));
        }
        (.., Some(next)) => text.line(format!("It fires {}, at {}.", next.relative_to(now), next.short())),
        _ => text.line("It has ended."),
    }
    if let Some(reason) = &schedule.stalled {
        text.line(format!("It is due but starts nothing: {reason}"));
    }
    schedule.running.iter().for_each(|id| text.line(format!("Execution {:?} runs.", &**id)));
    if schedule.waiting > 0 {
        text.line(format!("{} occurrences wait.", schedule.waiting));
    }
    let ScheduleFields { started, skipped, missed, rejected, .. } = schedule;
    text.line(format!(
        "Occurrences so far: {started} started, {skipped} skipped, {missed} missed, {rejected} rejected."
    ));
    if shown.next.len() > 1 {
        let next: Vec<String> = shown.next.iter().map(|time| time.short()).collect();
        text.line(format!("Next: {}.", next.join(", ")));
    }
    if shown.runs.is_empty() {
        return;
    }
    text.line("");
    let mut table = Table::new(&["TIME", "DONE", "OUTCOME", "EXECUTION", "DETAILS"]);
    for run in &shown.runs {
        let tone = match &*run.outcome {
            "started" | "cancelled_previous" => Tone::Good,
            "missed" | "rejected" => Tone::Bad,
            _ => Tone::Dim,
        };
        table.row([
            run.time.short().into(),
            run.at.relative_to(now).into(),
            Cell::new(run.outcome.replace('_', " "), tone),
            run.id.to_string().into(),
            shortened(&run.details(), 80).into(),
        ]);
    }
    text.table(table);
}
