//! Reads schedules from a store. It needs no engine, runs nothing and writes nothing. Engines read with the same code.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::error::ScheduleError;
use super::plan::SchedulePlan;
use super::stored::{Cause, PastRun, ScheduleRecord, ScheduleSpaces, When, read_running};
use super::{Counts, Overlap};
use crate::record::Record;
use crate::store::{Order, Store, Timestamp, View};
use crate::workflow::operate::history::value;
use crate::workflow::stored::record::fetch;
use crate::workflow::{ExecutionId, Result, WorkflowError};

/// How many running executions a description lists.
const TOLD: usize = 100;

/// The schedules in a store, without an engine that fires them. Works on [`Store::open_read_only`].
#[derive(Clone)]
pub struct StoredSchedules {
    pub(super) store: Store,
    /// `None` if no engine that knows schedules has used the store.
    pub(super) spaces: Option<ScheduleSpaces>,
}

/// When a schedule fires.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Fires {
    /// By a cron expression in a time zone.
    Cron {
        /// The expression as it was given.
        expression: String,
        /// The IANA name.
        zone: String,
    },
    /// At an interval.
    Every {
        /// The interval, in microseconds.
        interval_us: u64,
    },
}

/// Everything known about a schedule except its past runs. Times are in microseconds since 1970.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ScheduleDescription {
    /// Its name.
    pub name: String,
    /// When it fires.
    pub fires: Fires,
    /// The longest jitter of an occurrence, in microseconds.
    pub jitter_us: u64,
    /// There is no occurrence before this time.
    pub start_us: Option<u64>,
    /// There is no occurrence after this time.
    pub end_us: Option<u64>,
    /// What happens to an occurrence while an execution runs.
    pub overlap: Overlap,
    /// How late an occurrence may start, in microseconds.
    pub catch_up_us: u64,
    /// The workflow that it starts.
    pub workflow: String,
    /// The input of that workflow.
    pub input: Value,
    /// When it was created.
    pub created_us: u64,
    /// When it was last put.
    pub changed_us: u64,
    /// Why it is paused, if it is.
    pub paused: Option<String>,
    /// Since when it is paused.
    pub paused_us: Option<u64>,
    /// The next occurrence. None if there are no more, or the schedule is paused.
    pub next_us: Option<u64>,
    /// Its executions that have not ended: the first 100.
    pub running: Vec<ExecutionId>,
    /// How many occurrences wait for the end of an execution, or for the keeper.
    pub waiting: u64,
    /// How many backfills are not finished.
    pub backfills: u64,
    /// The outcomes of its occurrences since it was created.
    pub counts: Counts,
    /// Why a due occurrence cannot start, for instance because no program has registered the workflow.
    pub stalled: Option<String>,
}

/// The outcome of an occurrence.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum RunOutcome {
    /// Its execution was started.
    Started,
    /// Nothing was started, for this reason.
    Skipped(String),
    /// It waits for the end of an execution.
    Queued,
    /// No engine was running in time for this occurrence and those after it.
    Missed {
        /// How many were missed. The count ends at 10,000.
        count: u64,
        /// All of them were before this time, in microseconds since 1970.
        before_us: u64,
    },
    /// The workflow did not accept the start, for this reason.
    Rejected(String),
    /// Its execution was started, and these executions were cancelled for it.
    CancelledPrevious(Vec<String>),
}

impl RunOutcome {
    /// True if an execution was started.
    pub fn is_start(&self) -> bool {
        matches!(self, RunOutcome::Started | RunOutcome::CancelledPrevious(_))
    }
}

/// The cause of an occurrence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum RunCause {
    /// The time of the schedule.
    Time,
    /// A trigger.
    Trigger,
    /// A backfill.
    Backfill,
}

/// A past run: an occurrence and its outcome. An occurrence that had to wait has two past runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ScheduleRun {
    /// The execution that was started for it, if one was.
    pub id: ExecutionId,
    /// The time that it was scheduled for, in microseconds since 1970.
    pub time_us: u64,
    /// When this was recorded, in microseconds since 1970.
    pub at_us: u64,
    /// The cause of this occurrence.
    pub cause: RunCause,
    /// The outcome.
    pub outcome: RunOutcome,
}

impl StoredSchedules {
    /// The schedules in a store.
    pub async fn on(store: &Store) -> Result<StoredSchedules> {
        Ok(StoredSchedules { store: store.clone(), spaces: ScheduleSpaces::find(store).await? })
    }

    /// Returns a schedule; none if no schedule has this name.
    pub async fn get(&self, name: &str) -> Result<Option<ScheduleDescription>> {
        let Some(spaces) = &self.spaces else { return Ok(None) };
        let view = self.store.view().await?;
        match fetch::<ScheduleRecord>(&view, &spaces.schedule(name), || place(name)).await? {
            Some((stored, _)) => Ok(Some(describe(spaces, &view, name, stored).await?)),
            None => Ok(None),
        }
    }

    /// Returns at most `limit` schedules in the order of their names, those after the name `after` if it is given.
    pub async fn list(&self, after: Option<&str>, limit: usize) -> Result<Vec<ScheduleDescription>> {
        let Some(spaces) = &self.spaces else { return Ok(Vec::new()) };
        let view = self.store.view().await?;
        let all = spaces.schedules.all();
        let rest = after.map_or_else(|| all.clone(), |after| all.after(&spaces.schedule(after)));
        let mut found = Vec::new();
        for (key, item) in view.scan(&rest, Order::Ascending, limit).await? {
            let name = String::from_utf8_lossy(key.bytes()).into_owned();
            let stored = ScheduleRecord::decode(&item.value).map_err(|why| why.at(place(&name)))?;
            found.push(describe(spaces, &view, &name, stored).await?);
        }
        Ok(found)
    }

    /// Returns the last runs of a schedule, the newest first. The last 100 are kept.
    pub async fn runs(&self, name: &str, limit: usize) -> Result<Vec<ScheduleRun>> {
        let (view, _) = self.read(name).await?;
        let Some(spaces) = &self.spaces else { return Ok(Vec::new()) };
        let found = view.scan(&spaces.all_runs(name), Order::Descending, limit).await?;
        let read = |item: &crate::store::Item| {
            let PastRun { occurrence, at_us, outcome } =
                PastRun::decode(&item.value).map_err(|why| why.at(format!("a past run of {}", place(name))))?;
            let cause = match occurrence.cause {
                Cause::Time => RunCause::Time,
                Cause::Trigger(_) => RunCause::Trigger,
                Cause::Backfill => RunCause::Backfill,
            };
            let (id, time_us) = (occurrence.execution(name), occurrence.time_us);
            Ok(ScheduleRun { id, time_us, at_us, cause, outcome })
        };
        found.iter().map(|(_, item)| read(item)).collect()
    }

    /// Returns at most `count` of the next times at which a schedule fires; none if it is paused. Without jitter.
    pub async fn next(&self, name: &str, count: usize) -> Result<Vec<Timestamp>> {
        let (_, stored) = self.read(name).await?;
        let plan = SchedulePlan::of(name, &stored.timing).map_err(WorkflowError::Schedule)?;
        let first = stored.next_us.map(Timestamp).filter(|_| stored.paused.is_none());
        Ok(std::iter::successors(first, |time| plan.after(*time)).take(count).collect())
    }

    /// Reads an existing schedule.
    async fn read(&self, name: &str) -> Result<(View, ScheduleRecord)> {
        let missing = || ScheduleError::NotFound { name: name.into() };
        let (spaces, view) = (self.spaces.as_ref().ok_or_else(missing)?, self.store.view().await?);
        let found = fetch::<ScheduleRecord>(&view, &spaces.schedule(name), || place(name)).await?;
        let (stored, _) = found.ok_or_else(missing)?;
        Ok((view, stored))
    }
}

/// The name of a schedule in errors about its record.
pub(super) fn place(name: &str) -> String {
    format!("schedule {name:?}")
}

async fn describe(
    spaces: &ScheduleSpaces,
    view: &View,
    name: &str,
    stored: ScheduleRecord,
) -> Result<ScheduleDescription> {
    let running = view.scan(&spaces.all_running(name), Order::Ascending, TOLD).await?;
    let fires = match stored.timing.when {
        When::Cron { expression, zone } => Fires::Cron { expression, zone },
        When::Every { every_us } => Fires::Every { interval_us: every_us },
    };
    Ok(ScheduleDescription {
        name: name.into(),
        fires,
        jitter_us: stored.timing.jitter_us,
        start_us: stored.timing.start_us,
        end_us: stored.timing.end_us,
        overlap: stored.overlap,
        catch_up_us: stored.catch_up_us,
        workflow: stored.workflow,
        input: value(&stored.input),
        created_us: stored.created_us,
        changed_us: stored.changed_us,
        next_us: stored.next_us.filter(|_| stored.paused.is_none()),
        paused_us: stored.paused.as_ref().map(|paused| paused.since_us),
        paused: stored.paused.map(|paused| paused.reason),
        running: running.iter().filter_map(|(key, _)| read_running(key)).collect(),
        waiting: (stored.waiting.len() + stored.triggers.len()) as u64,
        backfills: stored.backfills.len() as u64,
        counts: stored.counts,
        stalled: stored.stalled,
    })
}

impl ScheduleDescription {
    /// How late an occurrence may start.
    pub fn catch_up(&self) -> Duration {
        Duration::from_micros(self.catch_up_us)
    }

    /// The next occurrence. None if there are no more, or the schedule is paused.
    pub fn next(&self) -> Option<Timestamp> {
        self.next_us.map(Timestamp)
    }
}

impl ScheduleRun {
    /// The time that it was scheduled for.
    pub fn time(&self) -> Timestamp {
        Timestamp(self.time_us)
    }

    /// When this was recorded.
    pub fn at(&self) -> Timestamp {
        Timestamp(self.at_us)
    }
}

shown!(StoredSchedules, _it => );
