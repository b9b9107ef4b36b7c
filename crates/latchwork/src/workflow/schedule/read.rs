//! Reads schedules from a store. It needs no engine, runs nothing and writes nothing. Engines read with the same code.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::error::ScheduleError;
use super::plan::SchedulePlan;
use super::stored::{Cause, PastRun, ScheduleRecord, ScheduleSpaces, When, read_running};
use super::{Counts, Overlap};
use crate::page::{Asked, Page, Records, mark, paged};
use crate::record::Record;
use crate::store::{Item, Key, Order, Store, Timestamp, View};
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
        /// The interval.
        #[serde(rename = "interval_us", with = "crate::micros")]
        interval: Duration,
    },
}

/// Everything known about a schedule except its past runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ScheduleDescription {
    /// Its name.
    pub name: String,
    /// When it fires.
    pub fires: Fires,
    /// The longest jitter of an occurrence.
    #[serde(rename = "jitter_us", with = "crate::micros")]
    pub jitter: Duration,
    /// There is no occurrence before this time.
    #[serde(rename = "start_us")]
    pub start: Option<Timestamp>,
    /// There is no occurrence after this time.
    #[serde(rename = "end_us")]
    pub end: Option<Timestamp>,
    /// What happens to an occurrence while an execution runs.
    pub overlap: Overlap,
    /// How late an occurrence may start.
    #[serde(rename = "catch_up_us", with = "crate::micros")]
    pub catch_up: Duration,
    /// The workflow that it starts.
    pub workflow: String,
    /// The input of that workflow.
    pub input: Value,
    /// When it was created.
    #[serde(rename = "created_us")]
    pub created: Timestamp,
    /// When it was last put.
    #[serde(rename = "changed_us")]
    pub changed: Timestamp,
    /// Why it is paused, if it is.
    pub paused: Option<String>,
    /// Since when it is paused.
    #[serde(rename = "paused_us")]
    pub paused_since: Option<Timestamp>,
    /// The next occurrence. None if there are no more, or the schedule is paused.
    #[serde(rename = "next_us")]
    pub next: Option<Timestamp>,
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
        /// All of them were before this time.
        #[serde(rename = "before_us")]
        before: Timestamp,
    },
    /// The workflow did not accept the start, for this reason.
    Rejected(String),
    /// Its execution was started, and these executions were cancelled for it.
    CancelledPrevious(Vec<String>),
}

impl RunOutcome {
    /// True if an execution was started.
    ///
    /// ```
    /// # use latchwork::workflow::RunOutcome;
    /// assert!(RunOutcome::Started.is_start());
    /// assert!(!RunOutcome::Queued.is_start());
    /// ```
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
    /// The time that it was scheduled for.
    #[serde(rename = "time_us")]
    pub time: Timestamp,
    /// When this was recorded.
    #[serde(rename = "at_us")]
    pub at: Timestamp,
    /// The cause of this occurrence.
    pub cause: RunCause,
    /// The outcome.
    pub outcome: RunOutcome,
}

impl StoredSchedules {
    /// The schedules in a store.
    ///
    /// ```
    /// # use latchwork::store::Store;
    /// # use latchwork::workflow::{Result, StoredSchedules};
    /// # async fn example() -> Result<()> {
    /// let schedules = StoredSchedules::on(&Store::open_read_only("./data").await?).await?;
    /// # Ok(()) }
    /// ```
    pub async fn on(store: &Store) -> Result<StoredSchedules> {
        Ok(StoredSchedules { store: store.clone(), spaces: ScheduleSpaces::find(store).await? })
    }

    /// Returns a schedule; none if no schedule has this name.
    ///
    /// ```
    /// # use latchwork::workflow::{Result, StoredSchedules};
    /// # async fn example(schedules: StoredSchedules) -> Result<()> {
    /// if let Some(hourly) = schedules.get("hourly").await? {
    ///     println!("{} executions were started", hourly.counts.started);
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn get(&self, name: &str) -> Result<Option<ScheduleDescription>> {
        let Some(spaces) = &self.spaces else { return Ok(None) };
        let view = self.store.view().await?;
        match fetch::<ScheduleRecord>(&view, &spaces.schedule(name), || place(name)).await? {
            Some((stored, _)) => Ok(Some(describe(spaces, &view, name, stored).await?)),
            None => Ok(None),
        }
    }

    /// The schedules, in the order of their names. Await it for a page.
    ///
    /// ```
    /// # use latchwork::workflow::{Result, StoredSchedules};
    /// # async fn example(schedules: StoredSchedules) -> Result<()> {
    /// for schedule in schedules.list().await? {
    ///     println!("{}: next at {:?}", schedule.name, schedule.next);
    /// }
    /// # Ok(()) }
    /// ```
    pub fn list(&self) -> ScheduleList {
        ScheduleList { stored: self.clone(), is_paused: false, asked: Asked::of("schedules") }
    }

    /// The past runs of a schedule, the newest first; the last 100 are kept. Await it for a page.
    ///
    /// ```
    /// # use latchwork::workflow::{Result, StoredSchedules};
    /// # async fn example(schedules: StoredSchedules) -> Result<()> {
    /// for run in schedules.runs("hourly").limit(10).await? {
    ///     println!("{}: {:?}", run.id, run.outcome);
    /// }
    /// # Ok(()) }
    /// ```
    pub fn runs(&self, name: impl Into<String>) -> ScheduleRuns {
        ScheduleRuns { stored: self.clone(), name: name.into(), asked: Asked::of("past runs") }
    }

    /// Returns at most `count` of the next times at which a schedule fires; none if it is paused. Without jitter.
    ///
    /// ```
    /// # use latchwork::workflow::{Result, StoredSchedules};
    /// # async fn example(schedules: StoredSchedules) -> Result<()> {
    /// let next_three = schedules.next("hourly", 3).await?;
    /// # Ok(()) }
    /// ```
    pub async fn next(&self, name: &str, count: usize) -> Result<Vec<Timestamp>> {
        let (_, stored) = self.read(name).await?;
        let plan = SchedulePlan::of(name, &stored.timing).map_err(WorkflowError::Schedule)?;
        let first = stored.next_us.map(Timestamp).filter(|_| stored.paused.is_none());
        Ok(std::iter::successors(first, |time| plan.after(*time)).take(count).collect())
    }

    /// The description of a schedule whose record is this one.
    pub(super) async fn description(&self, name: &str, record: ScheduleRecord) -> Result<ScheduleDescription> {
        let missing = || ScheduleError::NotFound { name: name.into() };
        let (spaces, view) = (self.spaces.as_ref().ok_or_else(missing)?, self.store.view().await?);
        describe(spaces, &view, name, record).await
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

/// A page of schedules, in the order of their names, that is about to be read.
#[derive(Clone)]
#[must_use = "nothing is read until this is awaited"]
pub struct ScheduleList {
    stored: StoredSchedules,
    is_paused: bool,
    asked: Asked,
}

/// A page of the past runs of a schedule, the newest first, that is about to be read.
#[derive(Clone)]
#[must_use = "nothing is read until this is awaited"]
pub struct ScheduleRuns {
    stored: StoredSchedules,
    name: String,
    asked: Asked,
}

paged!(ScheduleList => ScheduleDescription, WorkflowError);
paged!(ScheduleRuns => ScheduleRun, WorkflowError);

impl ScheduleList {
    /// Only schedules that are paused.
    ///
    /// ```
    /// # use latchwork::workflow::{Result, StoredSchedules};
    /// # async fn example(schedules: StoredSchedules) -> Result<()> {
    /// for schedule in schedules.list().paused().await? {
    ///     println!("{}: {:?}", schedule.name, schedule.paused);
    /// }
    /// # Ok(()) }
    /// ```
    pub fn paused(mut self) -> ScheduleList {
        self.is_paused = true;
        self
    }

    async fn page(self) -> Result<Page<ScheduleDescription>> {
        let ScheduleList { stored, is_paused, asked } = self;
        let mark = mark(&is_paused);
        asked.position(mark)?;
        let Some(spaces) = &stored.spaces else { return Ok(Page::default()) };
        let view = stored.store.view().await?;
        let (space, range, order) = (&spaces.schedules, spaces.schedules.all(), Order::Ascending);
        let records = Records { view: &view, space, range, order, skips_damage: false };
        let read = |key: &Key, item: &Item| -> Result<Option<(String, ScheduleRecord)>> {
            let name = String::from_utf8_lossy(key.bytes()).into_owned();
            let found = ScheduleRecord::decode(&item.value).map_err(|why| why.at(place(&name)))?;
            Ok((!is_paused || found.paused.is_some()).then_some((name, found)))
        };
        let page = asked.scan(mark, records, read).await?;
        let mut items = Vec::with_capacity(page.items.len());
        for (name, found) in page.items {
            items.push(describe(spaces, &view, &name, found).await?);
        }
        Ok(Page { items, next: page.next })
    }
}

impl ScheduleRuns {
    async fn page(self) -> Result<Page<ScheduleRun>> {
        let ScheduleRuns { stored, name, asked } = self;
        let mark = mark(&name);
        asked.position(mark)?;
        let (view, _) = stored.read(&name).await?;
        let Some(spaces) = &stored.spaces else { return Ok(Page::default()) };
        let (space, range, order) = (&spaces.runs, spaces.all_runs(&name), Order::Descending);
        let records = Records { view: &view, space, range, order, skips_damage: false };
        let read = |_: &Key, item: &Item| -> Result<Option<ScheduleRun>> {
            let PastRun { occurrence, at_us, outcome } =
                PastRun::decode(&item.value).map_err(|why| why.at(format!("a past run of {}", place(&name))))?;
            let cause = match occurrence.cause {
                Cause::Time => RunCause::Time,
                Cause::Trigger(_) => RunCause::Trigger,
                Cause::Backfill => RunCause::Backfill,
            };
            let (id, time, at) = (occurrence.execution(&name), Timestamp(occurrence.time_us), Timestamp(at_us));
            Ok(Some(ScheduleRun { id, time, at, cause, outcome }))
        };
        asked.scan(mark, records, read).await
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
        When::Every { every_us } => Fires::Every { interval: Duration::from_micros(every_us) },
    };
    Ok(ScheduleDescription {
        name: name.into(),
        fires,
        jitter: Duration::from_micros(stored.timing.jitter_us),
        start: stored.timing.start_us.map(Timestamp),
        end: stored.timing.end_us.map(Timestamp),
        overlap: stored.overlap,
        catch_up: Duration::from_micros(stored.catch_up_us),
        workflow: stored.workflow,
        input: value(&stored.input),
        created: Timestamp(stored.created_us),
        changed: Timestamp(stored.changed_us),
        next: stored.next_us.filter(|_| stored.paused.is_none()).map(Timestamp),
        paused_since: stored.paused.as_ref().map(|paused| Timestamp(paused.since_us)),
        paused: stored.paused.map(|paused| paused.reason),
        running: running.iter().filter_map(|(key, _)| read_running(key)).collect(),
        waiting: (stored.waiting.len() + stored.triggers.len()) as u64,
        backfills: stored.backfills.len() as u64,
        counts: stored.counts,
        stalled: stored.stalled,
    })
}

shown!(StoredSchedules, _it => );
