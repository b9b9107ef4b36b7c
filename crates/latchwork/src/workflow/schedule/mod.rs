//! Schedules start executions by a cron expression or at intervals.
//!
//! A schedule is a record with its next occurrence, and an alarm for it. When it is due, one commit starts the
//! execution, moves the schedule to its next occurrence and records the outcome. docs/workflows/schedules.md is the
//! guide.

mod cron;
mod decide;
mod define;
mod error;
pub(crate) mod keeper;
mod plan;
mod read;
pub(crate) mod stored;

use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

pub use define::{Overlap, Schedule};
pub use error::ScheduleError;
pub use read::{
    Fires, RunCause, RunOutcome, ScheduleDescription, ScheduleList, ScheduleRun, ScheduleRuns, StoredSchedules,
};

use crate::lane::{Once, OnceFound, Part, Tag};
use crate::store::{Order, Rev, Timestamp};
use crate::workflow::engine::{Engine, EngineInner};
use crate::workflow::run::largest;
use crate::workflow::stored::record::fetch;
use crate::workflow::{ExecutionId, Result, WorkflowError};
use crate::{json, micros};
use decide::due;
use plan::SchedulePlan;
use read::place;
use stored::{Backfill, Cause, Occurrence, Paused, ScheduleRecord};

/// Names the check that a schedule has not changed since it was read.
const SCHEDULE: Tag = Tag("schedule");

/// How many occurrences a backfill may have.
const MOST_BACKFILLED: u64 = 10_000;

/// How many backfills, and how many triggers, may wait.
const MOST_BACKFILLS: usize = 16;
const MOST_TRIGGERS: usize = 1000;

/// The space for everything but the input in a schedule's record, in bytes.
const ROOM: usize = 64 << 10;

/// Counts the outcomes of a schedule's occurrences since it was created.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Counts {
    /// An execution was started.
    pub started: u64,
    /// Nothing was started, because an execution ran.
    pub skipped: u64,
    /// No engine was running in time.
    pub missed: u64,
    /// The workflow did not accept the start.
    pub rejected: u64,
}

impl Counts {
    fn add(&mut self, outcome: &RunOutcome) {
        match outcome {
            RunOutcome::Started | RunOutcome::CancelledPrevious(_) => self.started += 1,
            RunOutcome::Skipped(_) => self.skipped += 1,
            RunOutcome::Missed { count, .. } => self.missed += count,
            RunOutcome::Rejected(_) => self.rejected += 1,
            RunOutcome::Queued => {}
        }
    }
}

/// The schedules of an engine.
#[derive(Clone)]
pub struct Schedules {
    engine: Arc<EngineInner>,
    once: Option<Once>,
}

impl Engine {
    /// The schedules of this engine.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// for schedule in engine.schedules().list().await? {
    ///     println!("{}: next at {:?}", schedule.name, schedule.next);
    /// }
    /// # Ok(()) }
    /// ```
    pub fn schedules(&self) -> Schedules {
        Schedules { engine: self.inner.clone(), once: None }
    }
}

impl Schedules {
    /// Sets the idempotency key of the change that is made through the returned handle: take one handle for each
    /// change. The change is made once, and asking again returns the same answer.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// let id = engine.schedules().once("request-7").trigger("hourly").await?;
    /// # Ok(()) }
    /// ```
    pub fn once(mut self, once: impl Into<Once>) -> Schedules {
        self.once = Some(once.into());
        self
    }

    /// Creates a schedule, or changes the schedule of this name. After a change, handled occurrences are not handled
    /// again, a pause stays, and waiting occurrences start with the new workflow and input. The next occurrence is the
    /// first after now. If the times did not change, the next occurrence does not change either.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use std::time::Duration;
    /// # use latchwork::store::Store;
    /// # use latchwork::workflow::{Ctx, Engine, Schedule, workflow};
    /// # let report = workflow("report").run(async |_: Ctx, region: String| Ok(region));
    /// # let engine = Engine::on(&Store::memory().await?).register(&report).start().await?;
    /// let hourly = Schedule::every("hourly", Duration::from_secs(3600));
    /// let put = engine.schedules().put(hourly.workflow(&report, "eu".to_string())).await?;
    /// assert_eq!(put.workflow, "report");
    /// # Ok(()) }
    /// ```
    pub async fn put(&self, schedule: Schedule) -> Result<ScheduleDescription> {
        let (timing, plan) = schedule.timing()?;
        let (name, overlap, catch_up_us) = (schedule.name, schedule.overlap, micros::of(schedule.catch_up));
        let target = schedule.target.ok_or_else(|| ScheduleError::NoWorkflow { name: name.clone() })?;
        let asked = (&timing, overlap, catch_up_us, &target.0, target.1.as_ref().ok());
        let asked = json::to_value(&("schedule.put", &name, asked)).unwrap_or_default();
        if let OnceFound::Answered(put) = self.find(&asked).await? {
            return Ok(put);
        }
        let (workflow, input) = self.accept(target)?;
        loop {
            let call = match self.find(&asked).await? {
                OnceFound::Answered(put) => return Ok(put),
                OnceFound::Anew(call) => call,
            };
            let (now, found) = (self.engine.store.env().now(), self.read(&name).await?);
            let before = found.as_ref().map(|(before, _)| before);
            let last_us = before.and_then(|before| before.last_us);
            let next_us = match before {
                Some(before) if before.timing == timing => before.next_us,
                _ => plan.after(now.max(Timestamp(last_us.unwrap_or(0)))).map(|next| next.0),
            };
            let mut after = before.cloned().unwrap_or_else(|| ScheduleRecord::new(&timing, now));
            (after.timing, after.overlap, after.catch_up_us) = (timing.clone(), overlap, catch_up_us);
            (after.workflow, after.input) = (workflow.clone(), input.clone());
            // Later than its creation, so that the two are told apart.
            let changed_us = before.map_or(now.0, |before| now.0.max(before.created_us + 1));
            (after.changed_us, after.next_us, after.stalled) = (changed_us, next_us, None);
            let is_left = |it: &Backfill| plan.from(Timestamp(it.from_us)).is_some_and(|time| time.0 < it.to_us);
            after.backfills.retain(is_left);
            let before = found.as_ref().map(|(before, rev)| (before, *rev));
            let put = self.stored().description(&name, after.clone()).await?;
            if self.change(&name, before, after, (&plan, now), call.answered(&put)).await? {
                return Ok(put);
            }
        }
    }

    /// Pauses a schedule until it is resumed. Occurrences in this time are skipped; waiting occurrences stay. Triggers
    /// and backfills of operators still start executions.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use std::time::Duration;
    /// # use latchwork::store::Store;
    /// # use latchwork::workflow::{Ctx, Engine, Schedule, workflow};
    /// # let report = workflow("report").run(async |_: Ctx, region: String| Ok(region));
    /// # let engine = Engine::on(&Store::memory().await?).register(&report).start().await?;
    /// # let hourly = Schedule::every("hourly", Duration::from_secs(3600)).workflow(&report, "eu".to_string());
    /// # engine.schedules().put(hourly).await?;
    /// engine.schedules().pause("hourly", "the disk is full").await?;
    /// assert!(engine.schedules().next("hourly", 3).await?.is_empty());
    /// # Ok(()) }
    /// ```
    pub async fn pause(&self, name: &str, reason: &str) -> Result<()> {
        self.update(name, ("schedule.pause", reason), |schedule, _, now| {
            let paused = || Paused { reason: reason.into(), since_us: now.0 };
            schedule.paused.get_or_insert_with(paused).reason = reason.into();
            Ok(())
        })
        .await
    }

    /// Resumes a paused schedule from the first occurrence after now. Returns its next occurrence, if there are more.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// engine.schedules().resume("hourly").await?;
    /// # Ok(()) }
    /// ```
    pub async fn resume(&self, name: &str) -> Result<Option<Timestamp>> {
        self.update(name, ("schedule.resume", ()), |schedule, plan, now| {
            if schedule.paused.take().is_some() {
                let last = Timestamp(schedule.last_us.unwrap_or(0)).max(now);
                schedule.next_us = plan.after(last).map(|next| next.0);
            }
            Ok(schedule.next_us.map(Timestamp))
        })
        .await
    }

    /// Fires a schedule now, as its overlap policy says. Returns the id of the execution that this soon starts. It may
    /// start none: the past runs show the outcome. If this engine is idle, the next engine starts it.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// let id = engine.schedules().trigger("hourly").await?;
    /// # Ok(()) }
    /// ```
    pub async fn trigger(&self, name: &str) -> Result<ExecutionId> {
        self.update(name, ("schedule.trigger", ()), |schedule, _, now| {
            let count = schedule.triggers.len();
            if count >= MOST_TRIGGERS {
                return Err(ScheduleError::Busy { name: name.into(), what: "triggers", count });
            }
            schedule.triggered += 1;
            let occurrence = Occurrence { time_us: now.0, cause: Cause::Trigger(schedule.triggered) };
            schedule.triggers.push(occurrence.clone());
            Ok(occurrence.execution(name))
        })
        .await
    }

    /// Starts the occurrences at or after `from` and before `to`, at most 10,000, one after the other. If overlaps are
    /// allowed, all start at once. An occurrence whose execution still exists is not started again. Returns the number
    /// of occurrences.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::store::Timestamp;
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine, now: Timestamp) -> Result<()> {
    /// let yesterday = now.minus(Duration::from_secs(86_400));
    /// let count = engine.schedules().backfill("hourly", yesterday, now).await?;
    /// # Ok(()) }
    /// ```
    pub async fn backfill(&self, name: &str, from: Timestamp, to: Timestamp) -> Result<u64> {
        let wrong = |reason| ScheduleError::Backfill { name: name.into(), reason };
        self.update(name, ("schedule.backfill", (from, to)), |schedule, plan, now| {
            match (from < to, to <= now) {
                (false, _) => return Err(wrong("its end is not after its start")),
                (_, false) => return Err(wrong("its end is in the future")),
                _ => {}
            }
            let count = schedule.backfills.len();
            if count >= MOST_BACKFILLS {
                return Err(ScheduleError::Busy { name: name.into(), what: "backfills", count });
            }
            match plan.count(from, to, MOST_BACKFILLED + 1) {
                0 => Ok(0),
                count if count > MOST_BACKFILLED => {
                    Err(ScheduleError::BackfillTooLarge { name: name.into(), limit: MOST_BACKFILLED })
                }
                count => {
                    schedule.backfills.push(Backfill { from_us: from.0, to_us: to.0 });
                    Ok(count)
                }
            }
        })
        .await
    }

    /// Deletes a schedule with its past runs and waiting occurrences. Executions that it has started continue.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// engine.schedules().delete("hourly").await?;
    /// # Ok(()) }
    /// ```
    pub async fn delete(&self, name: &str) -> Result<()> {
        let spaces = &self.engine.scheduling.spaces;
        loop {
            let call = match self.find(&("schedule.delete", name)).await? {
                OnceFound::Answered(()) => return Ok(()),
                OnceFound::Anew(call) => call,
            };
            let view = self.engine.store.view().await?;
            let Some((before, rev)) = self.read(name).await? else {
                return Err(ScheduleError::NotFound { name: name.into() }.into());
            };
            let runs = view.scan(&spaces.all_runs(name), Order::Ascending, usize::MAX).await?;
            let key = spaces.schedule(name);
            let mut part = self.engine.node.for_schedule(name).at_rev(SCHEDULE, &key, rev).delete(&key);
            if let Some(due) = before.due_us {
                part = part.delete(&spaces.alarm(name, Timestamp(due)));
            }
            let part = runs.iter().fold(part, |part, (key, _)| part.delete(key));
            if self.engine.perform(part.and(call.answered(&()))).await? {
                return Ok(());
            }
        }
    }

    /// Returns a schedule; none if no schedule has this name.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// if let Some(hourly) = engine.schedules().get("hourly").await? {
    ///     println!("{} executions were started", hourly.counts.started);
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn get(&self, name: &str) -> Result<Option<ScheduleDescription>> {
        self.stored().get(name).await
    }

    /// The schedules, in the order of their names. Await it for a page.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// for schedule in engine.schedules().list().paused().await? {
    ///     println!("{}: {:?}", schedule.name, schedule.paused);
    /// }
    /// # Ok(()) }
    /// ```
    pub fn list(&self) -> ScheduleList {
        self.stored().list()
    }

    /// The past runs of a schedule, the newest first; the last 100 are kept. Await it for a page.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// for run in engine.schedules().runs("hourly").limit(10).await? {
    ///     println!("{}: {:?}", run.id, run.outcome);
    /// }
    /// # Ok(()) }
    /// ```
    pub fn runs(&self, name: impl Into<String>) -> ScheduleRuns {
        self.stored().runs(name)
    }

    /// Returns at most `count` of the next times at which a schedule fires; none if it is paused. Without jitter.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use std::time::Duration;
    /// # use latchwork::store::Store;
    /// # use latchwork::workflow::{Ctx, Engine, Schedule, workflow};
    /// # let report = workflow("report").run(async |_: Ctx, region: String| Ok(region));
    /// # let engine = Engine::on(&Store::memory().await?).register(&report).start().await?;
    /// # let hourly = Schedule::every("hourly", Duration::from_secs(3600)).workflow(&report, "eu".to_string());
    /// # engine.schedules().put(hourly).await?;
    /// let next = engine.schedules().next("hourly", 2).await?;
    /// assert_eq!(next[1].since(next[0]), Duration::from_secs(3600));
    /// # Ok(()) }
    /// ```
    pub async fn next(&self, name: &str, count: usize) -> Result<Vec<Timestamp>> {
        self.stored().next(name, count).await
    }
}

impl Schedules {
    fn stored(&self) -> StoredSchedules {
        let spaces = self.engine.scheduling.spaces.clone();
        StoredSchedules { store: self.engine.store.clone(), spaces: Some(spaces) }
    }

    /// Looks whether this change was made before under the idempotency key, if there is one.
    async fn find<A: DeserializeOwned>(&self, change: &impl Serialize) -> Result<OnceFound<A>> {
        Ok(self.engine.once.find(&self.engine.store, self.once.as_ref(), change).await?)
    }

    /// Returns the workflow of a schedule and an input that it accepts. An engine that only operates knows no
    /// workflows.
    fn accept(&self, target: (String, Result<String, crate::JsonError>)) -> Result<(String, String)> {
        let (workflow, input) = target;
        let input = if self.engine.idle && self.engine.definition(&workflow).is_none() {
            crate::workflow::engine::check_name("the name of a workflow", &workflow)?;
            input.map_err(|cause| WorkflowError::Input { workflow: workflow.clone(), cause })?
        } else {
            let (definition, input) = self.engine.accept(&workflow, None, input)?;
            definition.check(&input)?;
            input
        };
        match (input.len(), largest(&self.engine).saturating_sub(ROOM)) {
            (length, limit) if length > limit => Err(WorkflowError::InputTooLong { workflow, length, limit }),
            _ => Ok((workflow, input)),
        }
    }

    async fn read(&self, name: &str) -> Result<Option<(ScheduleRecord, Rev)>> {
        let (view, key) = (self.engine.store.view().await?, self.engine.scheduling.spaces.schedule(name));
        let found = fetch::<ScheduleRecord>(&view, &key, || place(name)).await?;
        Ok(found.map(|(stored, item)| (stored, item.rev)))
    }

    /// Changes an existing schedule. Retries if other commits change it at the same time. `asked` names the change,
    /// with its arguments.
    async fn update<T: Serialize + DeserializeOwned>(
        &self,
        name: &str,
        asked: (&str, impl Serialize),
        change: impl Fn(&mut ScheduleRecord, &SchedulePlan, Timestamp) -> Result<T, ScheduleError>,
    ) -> Result<T> {
        loop {
            let call = match self.find(&(name, &asked)).await? {
                OnceFound::Answered(answer) => return Ok(answer),
                OnceFound::Anew(call) => call,
            };
            let Some((before, rev)) = self.read(name).await? else {
                return Err(ScheduleError::NotFound { name: name.into() }.into());
            };
            let (plan, now) = (SchedulePlan::of(name, &before.timing)?, self.engine.store.env().now());
            let mut after = before.clone();
            let answer = change(&mut after, &plan, now)?;
            let is_done = after == before && self.once.is_none();
            let kept = call.answered(&answer);
            if is_done || self.change(name, Some((&before, rev)), after, (&plan, now), kept).await? {
                return Ok(answer);
            }
        }
    }

    /// Commits a change of a schedule, and what belongs to it. Returns true if it has landed.
    async fn change(
        &self,
        name: &str,
        before: Option<(&ScheduleRecord, Rev)>,
        mut after: ScheduleRecord,
        (plan, now): (&SchedulePlan, Timestamp),
        part: Part,
    ) -> Result<bool> {
        // If an execution runs, the keeper will find nothing to do and set the right alarm.
        after.due_us = due(&after, plan, now, false).map(|due| due.0);
        self.engine.perform(self.engine.changing(name, before, &after).and(part)).await
    }
}

impl ScheduleRecord {
    /// The record of a new schedule.
    fn new(timing: &stored::Timing, now: Timestamp) -> ScheduleRecord {
        ScheduleRecord {
            timing: timing.clone(),
            overlap: Overlap::default(),
            catch_up_us: 0,
            workflow: String::new(),
            input: String::new(),
            created_us: now.0,
            changed_us: now.0,
            paused: None,
            next_us: None,
            last_us: None,
            due_us: None,
            triggers: Vec::new(),
            waiting: Vec::new(),
            backfills: Vec::new(),
            triggered: 0,
            runs: 0,
            counts: Counts::default(),
            stalled: None,
        }
    }
}

shown!(Schedules, _it => );
