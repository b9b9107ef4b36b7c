//! `latch schedule create`: creates a schedule, or changes one.

use std::time::Duration;

use anyhow::Result;
use clap::{Args, ValueEnum};
use latchwork::Value;
use latchwork::store::Timestamp;
use latchwork::workflow::{Overlap, Schedule};
use serde::Serialize;

use crate::client::{Client, encoded};
use crate::output::{Exit, Output, Problem};
use crate::schedule::change::operate;
use crate::schedule::fields::{ScheduleFields, millis};
use crate::store::StoreArgument;
use crate::time::{Time, absolute, duration};

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

/// What a server is asked to put.
#[derive(Serialize)]
struct NewSchedule {
    workflow: String,
    input: Value,
    #[serde(skip_serializing_if = "Option::is_none")]
    cron: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    zone: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    every_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    jitter_ms: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    start: Option<Time>,
    #[serde(skip_serializing_if = "Option::is_none")]
    end: Option<Time>,
    overlap: Overlap,
    #[serde(skip_serializing_if = "Option::is_none")]
    catch_up_ms: Option<u64>,
}

impl Policy {
    fn overlap(self) -> Overlap {
        match self {
            Policy::Skip => Overlap::Skip,
            Policy::QueueOne => Overlap::QueueOne,
            Policy::QueueAll => Overlap::QueueAll,
            Policy::CancelRunning => Overlap::CancelRunning,
            Policy::Allow => Overlap::Allow,
        }
    }
}

impl Create {
    fn input(&self) -> Result<Value> {
        let wrong = |error| Problem::new(Exit::Usage, format!("--input is not JSON: {error}"));
        Ok(serde_json::from_str(&self.input).map_err(wrong)?)
    }

    fn schedule(self) -> Result<Schedule> {
        let input = self.input()?;
        let schedule = match (self.cron, self.every) {
            (Some(expression), _) => Schedule::cron(self.name, expression),
            (None, every) => Schedule::every(self.name, every.unwrap_or_default()),
        };
        let schedule = schedule.workflow_by_name(&self.workflow, input).overlap(self.overlap.overlap());
        let schedule = self.zone.into_iter().fold(schedule, Schedule::zone);
        let schedule = self.jitter.into_iter().fold(schedule, Schedule::jitter);
        let schedule = self.start.into_iter().fold(schedule, Schedule::start);
        let schedule = self.end.into_iter().fold(schedule, Schedule::end);
        Ok(self.catch_up.into_iter().fold(schedule, Schedule::catch_up))
    }

    fn asked(self) -> Result<NewSchedule> {
        Ok(NewSchedule {
            input: self.input()?,
            workflow: self.workflow,
            cron: self.cron,
            zone: self.zone,
            every_ms: self.every.map(millis),
            jitter_ms: self.jitter.map(millis),
            start: self.start.map(Time),
            end: self.end.map(Time),
            overlap: self.overlap.overlap(),
            catch_up_ms: self.catch_up.map(millis),
        })
    }
}

pub(crate) async fn run(create: Create, store: &StoreArgument, output: &mut Output<'_>) -> Result<()> {
    let schedule = create.schedule()?;
    let (put, now) = operate(store, async |schedules, now| Ok((schedules.put(schedule).await?, now))).await?;
    tell(&ScheduleFields::of(put), now, output)
}

/// The same through a server.
pub(crate) async fn ask(create: Create, client: &Client, now: Timestamp, output: &mut Output<'_>) -> Result<()> {
    let path = format!("/schedules/{}", encoded(&create.name));
    tell(&client.put(&path, &create.asked()?).await?, now, output)
}

fn tell(put: &ScheduleFields, now: Timestamp, output: &mut Output<'_>) -> Result<()> {
    output.one(put, |text| {
        let ScheduleFields { name, workflow, .. } = put;
        text.line(format!("Schedule {name:?} starts workflow {workflow:?}: {}.", put.when()));
        match put.next {
            Some(next) => text.line(format!("It fires {}, at {}.", next.relative_to(now), next.short())),
            None => text.line("It does not fire: it is paused or has ended."),
        }
    })
}
