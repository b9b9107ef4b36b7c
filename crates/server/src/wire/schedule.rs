//! Schedules on the wire, as `latch schedule` prints them.

use std::time::Duration;

use latchwork::Value;
use latchwork::workflow::{Fires, Overlap, RunCause, RunOutcome, Schedule, ScheduleDescription, ScheduleRun};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::wire::problem::{Problem, ProblemCode};
use crate::wire::time::{TimeWire, millis};
use crate::wire::when::GivenTime;

/// A schedule.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Schedule)]
pub(crate) struct ScheduleWire {
    name: String,
    /// The cron expression, if it has one.
    #[schema(required)]
    cron: Option<String>,
    /// The time zone of the cron expression.
    #[schema(required)]
    zone: Option<String>,
    /// The interval, if it has one.
    #[schema(required)]
    every_ms: Option<u64>,
    jitter_ms: u64,
    #[schema(required)]
    start: Option<TimeWire>,
    #[schema(required)]
    end: Option<TimeWire>,
    /// `skip`, `queue_one`, `queue_all`, `cancel_running` or `allow`.
    #[schema(value_type = OverlapWord)]
    overlap: Overlap,
    catch_up_ms: u64,
    workflow: String,
    #[schema(value_type = Value)]
    input: Value,
    created: TimeWire,
    changed: TimeWire,
    /// Why it is paused, or null.
    #[schema(required)]
    paused: Option<String>,
    #[schema(required)]
    paused_since: Option<TimeWire>,
    /// The next occurrence.
    #[schema(required)]
    next: Option<TimeWire>,
    /// Its executions that have not ended: the first 100.
    running: Vec<String>,
    /// How many occurrences wait.
    waiting: u64,
    /// How many backfills are not finished.
    backfills: u64,
    started: u64,
    skipped: u64,
    missed: u64,
    rejected: u64,
    /// Why a due occurrence cannot start, or null.
    #[schema(required)]
    stalled: Option<String>,
}

impl From<ScheduleDescription> for ScheduleWire {
    fn from(found: ScheduleDescription) -> ScheduleWire {
        let (cron, zone, every_ms) = match found.fires {
            Fires::Cron { expression, zone } => (Some(expression), Some(zone), None),
            Fires::Every { interval } => (None, None, Some(millis(interval))),
            _ => (None, None, None),
        };
        ScheduleWire {
            name: found.name,
            cron,
            zone,
            every_ms,
            jitter_ms: millis(found.jitter),
            start: found.start.map(TimeWire),
            end: found.end.map(TimeWire),
            overlap: found.overlap,
            catch_up_ms: millis(found.catch_up),
            workflow: found.workflow,
            input: found.input,
            created: found.created.into(),
            changed: found.changed.into(),
            paused: found.paused,
            paused_since: found.paused_since.map(TimeWire),
            next: found.next.map(TimeWire),
            running: found.running.iter().map(ToString::to_string).collect(),
            waiting: found.waiting,
            backfills: found.backfills,
            started: found.counts.started,
            skipped: found.counts.skipped,
            missed: found.counts.missed,
            rejected: found.counts.rejected,
            stalled: found.stalled,
        }
    }
}

/// What a schedule does while one of its executions runs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
#[schema(as = Overlap)]
pub(crate) enum OverlapWord {
    /// Nothing is started.
    #[default]
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

impl From<OverlapWord> for Overlap {
    fn from(word: OverlapWord) -> Overlap {
        match word {
            OverlapWord::Skip => Overlap::Skip,
            OverlapWord::QueueOne => Overlap::QueueOne,
            OverlapWord::QueueAll => Overlap::QueueAll,
            OverlapWord::CancelRunning => Overlap::CancelRunning,
            OverlapWord::Allow => Overlap::Allow,
        }
    }
}

/// What a schedule starts, and when. It has either `cron` or `every_ms`.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewSchedule {
    /// The name of the workflow that it starts.
    workflow: String,
    #[serde(default)]
    #[schema(value_type = Value)]
    input: Value,
    /// A cron expression of five fields, or of six fields that begin with the second.
    cron: Option<String>,
    /// The time zone of the cron expression, by its IANA name; UTC by default.
    zone: Option<String>,
    /// An interval.
    every_ms: Option<u64>,
    /// Delays each occurrence by a time of at most this.
    jitter_ms: Option<u64>,
    /// Fires from this time on.
    start: Option<GivenTime>,
    /// Fires until this time.
    end: Option<GivenTime>,
    #[serde(default)]
    overlap: OverlapWord,
    /// How late an occurrence may start if no engine ran at its due time; 10 minutes by default.
    catch_up_ms: Option<u64>,
}

impl NewSchedule {
    pub(crate) fn into_schedule(self, name: &str) -> Result<Schedule, Problem> {
        let schedule = match (self.cron, self.every_ms) {
            (Some(expression), None) => Schedule::cron(name, expression),
            (None, Some(ms)) => Schedule::every(name, Duration::from_millis(ms)),
            _ => return Err(Problem::new(ProblemCode::InvalidBody, "a schedule has either cron or every_ms")),
        };
        let schedule = schedule.workflow_by_name(&self.workflow, self.input).overlap(self.overlap.into());
        let schedule = self.zone.into_iter().fold(schedule, Schedule::zone);
        let schedule = self.jitter_ms.map(Duration::from_millis).into_iter().fold(schedule, Schedule::jitter);
        let schedule = self.start.into_iter().fold(schedule, |schedule, time| schedule.start(time.0));
        let schedule = self.end.into_iter().fold(schedule, |schedule, time| schedule.end(time.0));
        Ok(self.catch_up_ms.map(Duration::from_millis).into_iter().fold(schedule, Schedule::catch_up))
    }
}

/// A past run: an occurrence and its outcome.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ScheduleRun)]
pub(crate) struct RunWire {
    /// The execution that was started for it, if one was.
    id: String,
    /// The time that it was scheduled for.
    time: TimeWire,
    /// When this was recorded.
    at: TimeWire,
    /// `time`, `trigger` or `backfill`.
    #[schema(value_type = String)]
    cause: RunCause,
    /// `started`, `skipped`, `queued`, `missed`, `rejected` or `cancelled_previous`.
    outcome: &'static str,
    #[schema(required)]
    reason: Option<String>,
    /// How many occurrences were missed.
    #[schema(required)]
    missed: Option<u64>,
    /// The executions that were cancelled for it.
    cancelled: Vec<String>,
}

impl From<ScheduleRun> for RunWire {
    fn from(run: ScheduleRun) -> RunWire {
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
        let (id, time, at) = (run.id.to_string(), run.time.into(), run.at.into());
        RunWire { id, time, at, cause: run.cause, outcome, reason, missed, cancelled }
    }
}

/// A schedule, the times when it fires next, and its last runs.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ScheduleShown {
    pub(crate) schedule: ScheduleWire,
    /// The next times, without jitter; none if it is paused.
    pub(crate) next: Vec<TimeWire>,
    /// The last runs, the newest first.
    pub(crate) runs: Vec<RunWire>,
}

/// How much of a schedule is shown.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ShowQuery {
    /// How many of the next times: 0 to 1000, by default 5.
    #[param(maximum = 1000)]
    pub(crate) next: Option<usize>,
    /// How many of the past runs: 0 to 100, by default 10.
    #[param(maximum = 100)]
    pub(crate) runs: Option<usize>,
}

/// Which schedules are listed.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ScheduleQuery {
    /// Only schedules that are paused.
    #[serde(default)]
    #[param(required = false)]
    pub(crate) paused: bool,
    /// Continues after an earlier page: its `next`.
    pub(crate) after: Option<String>,
    /// The number of items of a page: 1 to 1000, by default 100.
    #[param(minimum = 1, maximum = 1000)]
    pub(crate) limit: Option<usize>,
}

/// The occurrences that are started now: those at or after `from` and before `to`.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct NewBackfill {
    pub(crate) from: GivenTime,
    pub(crate) to: GivenTime,
}

/// A schedule that was paused.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct SchedulePaused {
    pub(crate) name: String,
    /// The reason.
    pub(crate) paused: String,
}

/// A schedule that was resumed.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ScheduleResumed {
    pub(crate) name: String,
    /// When it fires next; null if it has ended.
    #[schema(required)]
    pub(crate) next: Option<TimeWire>,
}

/// A schedule that was triggered.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ScheduleTriggered {
    pub(crate) name: String,
    /// The execution that this soon starts, if the overlap policy allows it.
    pub(crate) id: String,
}

/// A schedule that is backfilled.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ScheduleBackfilled {
    pub(crate) name: String,
    pub(crate) occurrences: u64,
}

/// A schedule that was deleted.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct ScheduleDeleted {
    pub(crate) name: String,
}
