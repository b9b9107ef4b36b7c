//! `latch schedule create`: creates a schedule, or changes one.

use std::time::Duration;

use anyhow::Result;
use clap::{Args, ValueEnum};
use latchwork::Value;
use latchwork::store::Timestamp;
use latchwork::workflow::{Overlap, Schedule};

use crate::output::{Exit, Output, Problem};
use crate::schedule::change::operate;
use crate::schedule::fields::ScheduleFields;
use crate::store::StoreArgument;
use crate::time::{absolute, duration};

#[derive(Args)]
pub(crate) struct Create {
    /// The schedule's name.
    name: String,
    /// The name of the workflow that it starts.
    #[arg(long, value_name = "NAME")]
    workflow: String,
    /// The input of the workflow, as JSON.
    #[arg(long, value_name = "JSON", default_value = "null")]
    input: String,
    /// Fires by this cron expression of five fields, or of six fields that begin with the second.
    #[arg(long, value_name = "EXPRESSION", required_unless_present = "every", conflicts_with = "every")]
    cron: Option<String>,
    /// The time zone of the cron expression, by its IANA name; UTC by default.
    #[arg(long, value_name = "ZONE", requires = "cron")]
    zone: Option<String>,
    /// Fires in this interval, for example 90s or 1h.
    #[arg(long, value_name = "INTERVAL", value_parser = duration)]
    every: Option<Duration>,
    /// Delays each occurrence by a random time of at most this.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    jitter: Option<Duration>,
    /// Fires from this time on.
    #[arg(long, value_name = "TIME", value_parser = absolute)]
    start: Option<Timestamp>,
    /// Fires until this time.
    #[arg(long, value_name = "TIME", value_parser = absolute)]
    end: Option<Timestamp>,
    /// What happens to an occurrence while an execution of the schedule runs.
    #[arg(long, value_enum, default_value = "skip")]
    overlap: Policy,
    /// How late an occurrence may start if no engine ran at its due time; 10m by default.
    #[arg(long, value_name = "TIME", value_parser = duration)]
    catch_up: Option<Duration>,
}

/// An overlap policy on the command line.
#[derive(Debug, Clone, Copy, ValueEnum)]
enum Policy {
    /// Nothing is started.
    Skip,
    /// One occurrence waits for the end of the execution.
    QueueOne,
    /// All occurrences wait in a queue.
    QueueAll,
    /// The execution is cancelled.
    CancelRunning,
    /// Executions run beside each other.
    Allow,
}

impl Create {
    fn schedule(self) -> Result<Schedule> {
        let wrong = |error| Problem::new(Exit::Usage, format!("--input is not JSON: {error}"));
        let input: Value = serde_json::from_str(&self.input).map_err(wrong)?;
        let schedule = match (self.cron, self.every) {
            (Some(expression), _) => Schedule::cron(self.name, expression),
            (None, every) => Schedule::every(self.name, every.unwrap_or_default()),
        };
        let schedule = schedule.workflow_by_name(&self.workflow, input).overlap(match self.overlap {
            Policy::Skip => Overlap::Skip,
            Policy::QueueOne => Overlap::QueueOne,
            Policy::QueueAll => Overlap::QueueAll,
            Policy::CancelRunning => Overlap::CancelRunning,
            Policy::Allow => Overlap::Allow,
        });
        let schedule = self.zone.into_iter().fold(schedule, Schedule::zone);
        let schedule = self.jitter.into_iter().fold(schedule, Schedule::jitter);
        let schedule = self.start.into_iter().fold(schedule, Schedule::start);
        let schedule = self.end.into_iter().fold(schedule, Schedule::end);
        Ok(self.catch_up.into_iter().fold(schedule, Schedule::catch_up))
    }
}

pub(crate) async fn run(create: Create, store: &StoreArgument, output: &mut Output<'_>) -> Result<()> {
    let schedule = create.schedule()?;
    let (put, now) = operate(store, async |schedules, now| Ok((schedules.put(schedule).await?, now))).await?;
    let put = ScheduleFields::of(put);
    output.one(&put, |text| {
        let ScheduleFields { name, workflow, .. } = &put;
        text.line(format!("Schedule {name:?} starts workflow {workflow:?}: {}.", put.when()));
        match put.next {
            Some(next) => text.line(format!("It fires {}, at {}.", next.relative_to(now), next.short())),
            None => text.line("It does not fire: it is paused or has ended."),
        }
    })
}
