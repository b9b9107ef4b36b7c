//! The fields of schedules in JSON, which are stable, and the words for people. docs/cli.md lists the fields.

use std::borrow::Cow;
use std::time::Duration;

use latchwork::Value;
use latchwork::store::Timestamp;
use latchwork::words;
use latchwork::workflow::{ExecutionId, Fires, Overlap, RunCause, RunOutcome, ScheduleDescription, ScheduleRun};
use serde::{Deserialize, Serialize};

use crate::time::Time;

/// A schedule.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ScheduleFields {
    pub(crate) name: String,
    /// The cron expression, if it has one.
    cron: Option<String>,
    zone: Option<String>,
    /// The interval in milliseconds, if it has one.
    every_ms: Option<u64>,
    jitter_ms: u64,
    start: Option<Time>,
    end: Option<Time>,
    /// `skip`, `queue_one`, `queue_all`, `cancel_running` or `allow`.
    pub(crate) overlap: Overlap,
    catch_up_ms: u64,
    pub(crate) workflow: String,
    pub(crate) input: Value,
    created: Time,
    changed: Time,
    /// Why it is paused, or `None`.
    pub(crate) paused: Option<String>,
    pub(crate) paused_since: Option<Time>,
    pub(crate) next: Option<Time>,
    pub(crate) running: Vec<ExecutionId>,
    pub(crate) waiting: u64,
    backfills: u64,
    pub(crate) started: u64,
    pub(crate) skipped: u64,
    pub(crate) missed: u64,
    pub(crate) rejected: u64,
    /// Why a due occurrence cannot start, or `None`.
    pub(crate) stalled: Option<String>,
}

pub(crate) fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

impl ScheduleFields {
    pub(crate) fn of(found: ScheduleDescription) -> ScheduleFields {
        let (cron, zone, every_ms) = match found.fires {
            Fires::Cron { expression, zone } => (Some(expression), Some(zone), None),
            Fires::Every { interval } => (None, None, Some(millis(interval))),
            _ => (None, None, None),
        };
        ScheduleFields {
            name: found.name,
            cron,
            zone,
            every_ms,
            jitter_ms: millis(found.jitter),
            start: found.start.map(Time),
            end: found.end.map(Time),
            overlap: found.overlap,
            catch_up_ms: millis(found.catch_up),
            workflow: found.workflow,
            input: found.input,
            created: Time(found.created),
            changed: Time(found.changed),
            paused: found.paused,
            paused_since: found.paused_since.map(Time),
            next: found.next.map(Time),
            running: found.running,
            waiting: found.waiting,
            backfills: found.backfills,
            started: found.counts.started,
            skipped: found.counts.skipped,
            missed: found.counts.missed,
            rejected: found.counts.rejected,
            stalled: found.stalled,
        }
    }

    /// For example `0 2 * * * (Europe/Berlin)`, or `every 1h 0m`.
    pub(crate) fn when(&self) -> String {
        match (&self.cron, &self.zone, self.every_ms) {
            (Some(cron), Some(zone), _) => format!("{cron} ({zone})"),
            (.., Some(every)) => format!("every {}", words::span(every * 1000)),
            _ => String::new(),
        }
    }

    /// When it fires next, or why it does not.
    pub(crate) fn state(&self, now: Timestamp) -> String {
        match (&self.paused, &self.stalled, self.next) {
            (Some(_), ..) => "paused".into(),
            (_, Some(_), _) => "stalled".into(),
            (.., Some(next)) => next.relative_to(now),
            _ => "ended".into(),
        }
    }
}

/// A past run.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct RunFields {
    /// The execution that was started for it, or `None`.
    pub(crate) id: ExecutionId,
    pub(crate) time: Time,
    pub(crate) at: Time,
    /// `time`, `trigger` or `backfill`.
    pub(crate) cause: RunCause,
    /// `started`, `skipped`, `queued`, `missed`, `rejected` or `cancelled_previous`.
    pub(crate) outcome: Cow<'static, str>,
    reason: Option<String>,
    /// How many occurrences were missed.
    missed: Option<u64>,
    /// The executions that were cancelled for it.
    cancelled: Vec<String>,
}

impl RunFields {
    pub(crate) fn of(run: ScheduleRun) -> RunFields {
        let (mut reason, mut missed, mut cancelled) = (None, None, Vec::new());
        let outcome = match run.outcome {
            RunOutcome::Started => "started",
            RunOutcome::Queued => "queued",
            RunOutcome::Skipped(why) => {
                reason = Some(why);
                "skipped"
            }
            RunOutcome::Rejected(why) => {
                reason = Some(why);
                "rejected"
            }
            RunOutcome::Missed { count, .. } => {
                missed = Some(count);
                "missed"
            }
            RunOutcome::CancelledPrevious(ids) => {
                cancelled = ids;
                "cancelled_previous"
            }
            _ => "unknown",
        };
        let (time, at) = (Time(run.time), Time(run.at));
        RunFields { id: run.id, time, at, cause: run.cause, outcome: outcome.into(), reason, missed, cancelled }
    }

    /// The details, for people.
    pub(crate) fn details(&self) -> String {
        match (&self.reason, self.missed) {
            (Some(reason), _) => reason.clone(),
            (_, Some(1)) => "no engine ran in time".into(),
            (_, Some(count)) => format!("{count} occurrences; no engine ran in time"),
            _ if !self.cancelled.is_empty() => format!("cancelled {}", self.cancelled.join(", ")),
            _ => String::new(),
        }
    }
}
