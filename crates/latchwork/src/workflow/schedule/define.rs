//! A schedule as a program describes it before it is stored: what it starts, when, and what happens on overlap.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::error::ScheduleError;
use super::plan::SchedulePlan;
use super::stored::{Timing, When};
use crate::json::{self, JsonError};
use crate::micros;
use crate::store::Timestamp;
use crate::workflow::Workflow;

/// The default of how late an occurrence may start.
const DEFAULT_CATCH_UP: Duration = Duration::from_secs(600);

/// The longest name, in bytes. The name followed by a time is the id of an execution.
const LONGEST_NAME: usize = 400;

/// What happens to an occurrence while an execution of the schedule runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Overlap {
    /// Nothing is started.
    #[default]
    Skip,
    /// It waits for the end of the execution. While one occurrence waits, further ones are skipped.
    QueueOne,
    /// It waits for the end of the execution, behind earlier occurrences. At most 1,000 wait; further ones are
    /// rejected.
    QueueAll,
    /// One commit cancels the running execution and starts the next one. The next one does not wait for the end of the
    /// cancelled execution, which may still clean up.
    CancelRunning,
    /// It starts beside the running execution.
    Allow,
}

/// The description of a schedule, for [`crate::workflow::Schedules::put`].
///
/// ```
/// # use std::time::Duration;
/// # use latchwork::workflow::{Ctx, Engine, Overlap, Result, Schedule, workflow};
/// # async fn example(engine: Engine) -> Result<()> {
/// let report = workflow("report").run(async |_: Ctx, region: String| Ok(region));
/// let nightly = Schedule::cron("nightly", "0 2 * * *").zone("Europe/Berlin").jitter(Duration::from_secs(60));
/// let nightly = nightly.overlap(Overlap::QueueOne).catch_up(Duration::from_secs(6 * 3600));
/// engine.schedules().put(nightly.workflow(&report, "eu".to_string())).await?;
/// # Ok(()) }
/// ```
#[derive(Debug, Clone)]
#[must_use = "a schedule does nothing until it is put"]
pub struct Schedule {
    pub(super) name: String,
    when: GivenTiming,
    zone: Option<String>,
    jitter: Duration,
    start: Option<Timestamp>,
    end: Option<Timestamp>,
    pub(super) overlap: Overlap,
    pub(super) catch_up: Duration,
    /// The workflow's name, and the input as JSON text.
    pub(super) target: Option<(String, Result<String, JsonError>)>,
}

#[derive(Debug, Clone)]
enum GivenTiming {
    Cron(String),
    Every(Duration),
}

impl Schedule {
    fn new(name: impl Into<String>, when: GivenTiming) -> Schedule {
        Schedule {
            name: name.into(),
            when,
            zone: None,
            jitter: Duration::ZERO,
            start: None,
            end: None,
            overlap: Overlap::default(),
            catch_up: DEFAULT_CATCH_UP,
            target: None,
        }
    }

    /// A schedule with a cron expression: five fields, or six that begin with the second. The time zone is UTC unless
    /// one is set. docs/workflows/schedules.md describes the expressions.
    ///
    /// ```
    /// # use latchwork::workflow::Schedule;
    /// let nightly = Schedule::cron("nightly", "0 2 * * *").workflow_by_name("report", "eu");
    /// ```
    pub fn cron(name: impl Into<String>, expression: impl Into<String>) -> Schedule {
        Schedule::new(name, GivenTiming::Cron(expression.into()))
    }

    /// A schedule with an interval, counted from its start time. Without a start time it counts from 1970, so that an
    /// interval of one hour fires on the hour. The shortest interval is one second.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::Schedule;
    /// let hourly = Schedule::every("hourly", Duration::from_secs(3600)).workflow_by_name("report", "eu");
    /// ```
    pub fn every(name: impl Into<String>, interval: Duration) -> Schedule {
        Schedule::new(name, GivenTiming::Every(interval))
    }

    /// The time zone of the cron expression, by its IANA name.
    ///
    /// ```
    /// # use latchwork::workflow::Schedule;
    /// let nightly = Schedule::cron("nightly", "0 2 * * *").zone("Europe/Berlin");
    /// ```
    pub fn zone(mut self, zone: impl Into<String>) -> Schedule {
        self.zone = Some(zone.into());
        self
    }

    /// Delays each occurrence by up to `jitter`, but never beyond the next occurrence. The delay is a hash of the
    /// schedule's name and the time.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::Schedule;
    /// let nightly = Schedule::cron("nightly", "0 2 * * *").jitter(Duration::from_secs(60));
    /// ```
    pub fn jitter(mut self, jitter: Duration) -> Schedule {
        self.jitter = jitter;
        self
    }

    /// Sets the time before which there is no occurrence.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::store::Timestamp;
    /// # use latchwork::workflow::Schedule;
    /// # fn example(tomorrow: Timestamp) {
    /// let hourly = Schedule::every("hourly", Duration::from_secs(3600)).start(tomorrow);
    /// # }
    /// ```
    pub fn start(mut self, start: Timestamp) -> Schedule {
        self.start = Some(start);
        self
    }

    /// Sets the time after which there is no occurrence.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::store::Timestamp;
    /// # use latchwork::workflow::Schedule;
    /// # fn example(tomorrow: Timestamp) {
    /// let hourly = Schedule::every("hourly", Duration::from_secs(3600)).end(tomorrow);
    /// # }
    /// ```
    pub fn end(mut self, end: Timestamp) -> Schedule {
        self.end = Some(end);
        self
    }

    /// Sets what happens to an occurrence while an execution of the schedule runs. The default is to skip it.
    ///
    /// ```
    /// # use latchwork::workflow::{Overlap, Schedule};
    /// let nightly = Schedule::cron("nightly", "0 2 * * *").overlap(Overlap::QueueOne);
    /// ```
    pub fn overlap(mut self, overlap: Overlap) -> Schedule {
        self.overlap = overlap;
        self
    }

    /// Sets how late an occurrence may start if no engine was running when it was due. The default is ten minutes, the
    /// minimum is ten seconds. A later occurrence counts as missed.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::Schedule;
    /// let nightly = Schedule::cron("nightly", "0 2 * * *").catch_up(Duration::from_secs(6 * 3600));
    /// ```
    pub fn catch_up(mut self, window: Duration) -> Schedule {
        self.catch_up = window;
        self
    }

    /// Starts executions of this workflow with this input.
    ///
    /// ```
    /// # use latchwork::workflow::{Schedule, Workflow};
    /// # fn example(report: Workflow<String, ()>) {
    /// let nightly = Schedule::cron("nightly", "0 2 * * *").workflow(&report, "eu".to_string());
    /// # }
    /// ```
    pub fn workflow<I: Serialize, O>(self, workflow: &Workflow<I, O>, input: I) -> Schedule {
        self.workflow_by_name(workflow.name(), input)
    }

    /// Starts executions of the workflow of this name. The input, as JSON, must fit the workflow.
    ///
    /// ```
    /// # use latchwork::workflow::Schedule;
    /// let nightly = Schedule::cron("nightly", "0 2 * * *").workflow_by_name("report", "eu");
    /// ```
    pub fn workflow_by_name(mut self, workflow: &str, input: impl Serialize) -> Schedule {
        let input = json::to_value(&input).map(|input| input.to_string());
        self.target = Some((workflow.into(), input));
        self
    }

    /// Returns when the schedule fires, or why that is impossible.
    pub(super) fn timing(&self) -> Result<(Timing, SchedulePlan), ScheduleError> {
        let name = || self.name.clone();
        check_name(&self.name)?;
        let when = match &self.when {
            GivenTiming::Cron(expression) => {
                let zone = self.zone.clone().unwrap_or_else(|| "UTC".into());
                When::Cron { expression: expression.clone(), zone }
            }
            GivenTiming::Every(_) if self.zone.is_some() => return Err(ScheduleError::ZoneOfInterval { name: name() }),
            GivenTiming::Every(interval) if *interval < Duration::from_secs(1) => {
                return Err(ScheduleError::Interval { interval: *interval });
            }
            GivenTiming::Every(interval) if self.jitter > *interval => {
                return Err(ScheduleError::Jitter { jitter: self.jitter, interval: *interval });
            }
            GivenTiming::Every(interval) => When::Every { every_us: micros::of(*interval) },
        };
        if let (Some(start), Some(end)) = (self.start, self.end)
            && end <= start
        {
            return Err(ScheduleError::EndBeforeStart { name: name() });
        }
        let [start_us, end_us] = [self.start, self.end].map(|time| time.map(|time| time.0));
        let timing = Timing { jitter_us: micros::of(self.jitter), start_us, end_us, ..Timing::new(when) };
        let plan = SchedulePlan::of(&self.name, &timing)?;
        match plan.from(Timestamp(0)) {
            Some(_) => Ok((timing, plan)),
            None => Err(ScheduleError::NeverFires { name: name() }),
        }
    }
}

pub(super) fn check_name(name: &str) -> Result<(), ScheduleError> {
    let refuse = |reason| Err(ScheduleError::Name { name: name.into(), reason });
    match name.len() {
        0 => refuse("it is empty"),
        _ if name.len() > LONGEST_NAME => refuse("it is longer than 400 bytes"),
        _ if name.contains(char::is_control) => refuse("it holds a control character"),
        _ => Ok(()),
    }
}
