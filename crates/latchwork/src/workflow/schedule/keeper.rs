//! The keeper of schedules. When a schedule is due, or an execution of it has ended, the keeper does what `decide.rs`
//! says. One commit starts the execution, moves the schedule to its next occurrence and records the outcome. The commit
//! checks the rev of the schedule's record, so each occurrence is handled exactly once, even after a crash.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt, stream};
use tokio::task::JoinSet;

use super::decide::{Deed, decide, due};
use super::plan::SchedulePlan;
use super::stored::{KEPT_RUNS, Occurrence, PastRun, ScheduleRecord, ScheduleSpaces, read_due, read_running};
use super::{RunOutcome, SCHEDULE};
use crate::lane::Part;
use crate::node::alarm::{Alarms, Due, Keeper};
use crate::node::{ExecutionId, Node};
use crate::record::Record;
use crate::store::{ErrorKind, Key, Order, Rev, Timestamp};
use crate::workflow::engine::EngineInner;
use crate::workflow::stored::record::{fetch, fetch_execution};
use crate::workflow::{Result, WorkflowError};

/// How many schedules a task handles at once: their commits share syncs.
const AT_ONCE: usize = 1024;

/// How many tasks handle the schedules that are due together, and how few of them are not worth another task.
const TASKS: usize = 4;
const LEAST_SHARE: usize = 16;

/// Whether a schedule was handled, and the notices of it that must still be deleted.
type SeenTo = (bool, (String, Vec<Key>));

/// How many commits are made for one schedule before other schedules get a turn.
const MOST_COMMITS: usize = 64;

/// How many running executions one commit cancels.
const MOST_CANCELLED: usize = 64;

/// The state of an engine for schedules.
pub(crate) struct Scheduling {
    pub(crate) spaces: ScheduleSpaces,
    pub(crate) alarms: Arc<Alarms>,
}

/// How late a schedule is at most after the clock was set forward.
const LATEST: Duration = Duration::from_secs(1);

impl Scheduling {
    pub(crate) fn new(node: &Arc<Node>, spaces: ScheduleSpaces) -> Scheduling {
        Scheduling { alarms: Alarms::on_time(node, &spaces.due, LATEST), spaces }
    }
}

/// Fires schedules.
pub(crate) struct FireSchedules;

impl Keeper for FireSchedules {
    type Engine = EngineInner;

    fn alarms(engine: &EngineInner) -> &Arc<Alarms> {
        &engine.scheduling.alarms
    }

    const BATCH: usize = TASKS * AT_ONCE;

    async fn ring(engine: &Arc<EngineInner>, due: Vec<Due>, damaged: Vec<Key>) -> bool {
        damaged.iter().for_each(|key| tracing::error!(%key, "an alarm of a schedule is damaged; it is skipped"));
        let mut schedules: BTreeMap<String, Vec<Key>> = BTreeMap::new();
        for Due { id, key, .. } in due {
            let (name, is_notice) = read_due(&id);
            let notices = schedules.entry(name.into()).or_default();
            notices.extend(is_notice.then_some(key));
        }
        let seen_to = engine.see_to_all(schedules).await;
        let is_done = seen_to.iter().all(|(is_done, _)| *is_done);
        let left = seen_to.into_iter().map(|(_, left)| left).filter(|(_, notices)| !notices.is_empty()).collect();
        engine.forget(left).await && is_done
    }
}

/// A schedule as it was read, with everything else that a decision needs.
struct ReadSchedule {
    before: ScheduleRecord,
    rev: Rev,
    plan: SchedulePlan,
    now: Timestamp,
    running: Vec<ExecutionId>,
}

/// The result of a decision.
enum AfterDecision {
    /// The commit has landed, or another commit changed the schedule. The schedule must be looked at again.
    Again,
    /// There is nothing more to do now.
    Rests,
}

impl EngineInner {
    /// The part for the commit that ends an execution: it reports the end to the schedule.
    pub(crate) fn ending_scheduled(self: &Arc<EngineInner>, schedule: &str, id: &ExecutionId) -> Part {
        let (spaces, now) = (&self.scheduling.spaces, self.store.env().now());
        let part = self.node.for_schedule(schedule).delete(&spaces.running(schedule, id));
        let (alarms, name) = (self.scheduling.alarms.clone(), ExecutionId::from(schedule));
        let part = part.put(&spaces.notice(schedule, now, id), Vec::new());
        part.then(move |_| alarms.set(&name, now))
    }

    /// True if the error of one schedule is permanent, so that the keeper continues with the others.
    fn is_lasting(&self, name: &str, error: &WorkflowError) -> bool {
        if error.kind() == ErrorKind::Unavailable {
            return self.is_stopped();
        }
        tracing::error!(schedule = name, %error, "a schedule could not be handled");
        true
    }

    /// Does everything for schedules that are due, in several tasks, so that more than one processor works. Each task
    /// handles many at once. Returns for each schedule whether it was handled, and the notices that must still be
    /// deleted.
    async fn see_to_all(self: &Arc<EngineInner>, schedules: BTreeMap<String, Vec<Key>>) -> Vec<SeenTo> {
        let mut schedules: Vec<_> = schedules.into_iter().collect();
        let share = schedules.len().div_ceil(TASKS).max(LEAST_SHARE);
        let mut tasks = JoinSet::new();
        while !schedules.is_empty() {
            let (engine, share) = (self.clone(), schedules.split_off(schedules.len().saturating_sub(share)));
            tasks.spawn(async move {
                let seen_to = share.into_iter().map(|(name, notices)| engine.see_to_one(name, notices));
                stream::iter(seen_to).buffer_unordered(AT_ONCE).collect::<Vec<_>>().await
            });
        }
        let mut seen_to = Vec::new();
        while let Some(share) = tasks.join_next().await {
            // Schedules whose task has panicked ring again.
            seen_to.extend(share.unwrap_or_else(|_| vec![(false, (String::new(), Vec::new()))]));
        }
        seen_to
    }

    async fn see_to_one(self: &Arc<EngineInner>, name: String, notices: Vec<Key>) -> SeenTo {
        match self.see_to(&name, notices).await {
            Ok(left) => (true, (name, left)),
            Err(error) => (self.is_lasting(&name, &error), (name, Vec::new())),
        }
    }

    /// Does everything for a schedule that is due. Returns the notices that must still be deleted.
    async fn see_to(self: &Arc<EngineInner>, name: &str, mut notices: Vec<Key>) -> Result<Vec<Key>> {
        for _ in 0..MOST_COMMITS {
            let Some(look) = self.look_at(name).await? else { return Ok(notices) };
            if let AfterDecision::Rests = self.act(name, &look, &mut notices).await? {
                return Ok(notices);
            }
        }
        // The schedule still has a due alarm. It rings again.
        self.scheduling.alarms.set(&name.into(), Timestamp(0));
        Ok(Vec::new())
    }

    async fn look_at(&self, name: &str) -> Result<Option<ReadSchedule>> {
        let (spaces, view) = (&self.scheduling.spaces, self.store.view().await?);
        let found = fetch::<ScheduleRecord>(&view, &spaces.schedule(name), || format!("schedule {name:?}")).await?;
        let Some((before, item)) = found else { return Ok(None) };
        let running = view.scan(&spaces.all_running(name), Order::Ascending, MOST_CANCELLED).await?;
        let running = running.iter().filter_map(|(key, _)| read_running(key)).collect();
        let plan = SchedulePlan::of(name, &before.timing).map_err(WorkflowError::Schedule)?;
        Ok(Some(ReadSchedule { before, rev: item.rev, plan, now: self.store.env().now(), running }))
    }

    /// Deletes the notices of schedules that have nothing more to do, all in one commit. Returns false if that failed;
    /// then the notices ring again.
    async fn forget(&self, left: Vec<(String, Vec<Key>)>) -> bool {
        if left.is_empty() {
            return true;
        }
        let part_of = |(name, notices): &(String, Vec<Key>), part| {
            notices.iter().fold(part, Part::delete).and(self.node.for_schedule(name))
        };
        let all = left.iter().fold(Part::default(), |part, left| part_of(left, part));
        match self.send(all).await {
            Ok(_) => return true,
            Err(error) if error.kind() == ErrorKind::Unavailable => return self.is_stopped(),
            // A notice is damaged. The other notices are deleted without it.
            Err(_) => {}
        }
        let mut is_done = true;
        for left in &left {
            let sent = self.send(part_of(left, Part::default())).await;
            is_done &= sent.map_or_else(|error| self.is_lasting(&left.0, &error), |_| true);
        }
        is_done
    }

    async fn act(
        self: &Arc<EngineInner>,
        name: &str,
        look: &ReadSchedule,
        notices: &mut Vec<Key>,
    ) -> Result<AfterDecision> {
        let Some((deed, after)) = decide(&look.before, &look.plan, look.now, !look.running.is_empty()) else {
            return self.rest(name, look, notices).await;
        };
        let (occurrence, outcome, part) = match deed {
            Deed::Note { occurrence, outcome } => (occurrence, outcome, Part::default()),
            Deed::Start { occurrence, cancels } => match self.starts(name, look, &occurrence, cancels).await? {
                Starts::With(outcome, part) => (occurrence, outcome, part),
                Starts::Not(outcome) => (occurrence, outcome, Part::default()),
                Starts::Stalls(reason) => return self.stall(name, look, reason, notices).await,
            },
        };
        let starts = outcome.is_start();
        let run = PastRun { occurrence, at_us: look.now.0, outcome };
        let (part, due) = self.deed(name, look, after.clone(), run.clone(), part, notices);
        let (landed, due) = match self.send(part).await {
            Err(error) if starts && error.kind() != ErrorKind::Unavailable => {
                let run = PastRun { outcome: RunOutcome::Rejected(error.to_string()), ..run };
                let (part, due) = self.deed(name, look, after, run, Part::default(), notices);
                (self.send(part).await?, due)
            }
            sent => (sent?, due),
        };
        if landed.is_none() {
            return Ok(AfterDecision::Again);
        }
        notices.clear();
        // The commit has set the next alarm. An execution that ended since then has left a notice.
        Ok(if due.is_some_and(|due| due <= look.now) { AfterDecision::Again } else { AfterDecision::Rests })
    }

    /// Builds the commit of a decision: the outcome of an occurrence, and the part that belongs to it. Also returns
    /// when the schedule is due next.
    fn deed(
        &self,
        name: &str,
        look: &ReadSchedule,
        mut after: ScheduleRecord,
        run: PastRun,
        part: Part,
        notices: &[Key],
    ) -> (Part, Option<Timestamp>) {
        let spaces = &self.scheduling.spaces;
        after.counts.add(&run.outcome);
        after.stalled = None;
        let mut part = part.put(&spaces.run(name, after.runs), run.encode());
        if let Some(old) = after.runs.checked_sub(KEPT_RUNS) {
            part = part.delete(&spaces.run(name, old));
        }
        after.runs += 1;
        let is_running = !look.running.is_empty() || run.outcome.is_start();
        let due = due(&after, &look.plan, look.now, is_running);
        after.due_us = due.map(|due| due.0);
        let part = notices.iter().fold(part, Part::delete);
        (self.changing(name, Some((&look.before, look.rev)), &after).and(part), due)
    }

    /// Called when there is nothing to do for a schedule now.
    async fn rest(&self, name: &str, look: &ReadSchedule, notices: &mut Vec<Key>) -> Result<AfterDecision> {
        let ReadSchedule { before, rev, plan, now, running } = look;
        let due = due(before, plan, *now, !running.is_empty());
        let due_us = due.map(|due| due.0);
        if due_us != before.due_us {
            let after = ScheduleRecord { due_us, ..before.clone() };
            return self.change_at_rest(name, (before, *rev), &after, notices).await;
        }
        // The clock may have been set back since the alarm rang.
        due.iter().for_each(|due| self.scheduling.alarms.set(&name.into(), *due));
        Ok(AfterDecision::Rests)
    }

    /// Called when this program cannot start the workflow of a schedule. The occurrence and its alarm stay, so that the
    /// next engine that knows the workflow finds them.
    async fn stall(
        &self,
        name: &str,
        look: &ReadSchedule,
        reason: String,
        notices: &mut Vec<Key>,
    ) -> Result<AfterDecision> {
        let ReadSchedule { before, rev, .. } = look;
        if before.stalled.as_ref() == Some(&reason) {
            return Ok(AfterDecision::Rests);
        }
        tracing::error!(schedule = name, reason, "a schedule is due but cannot start its workflow");
        let after = ScheduleRecord { stalled: Some(reason), ..before.clone() };
        self.change_at_rest(name, (before, *rev), &after, notices).await
    }

    /// Commits a change of a schedule that has nothing more to do, and deletes its notices.
    async fn change_at_rest(
        &self,
        name: &str,
        before: (&ScheduleRecord, Rev),
        after: &ScheduleRecord,
        notices: &mut Vec<Key>,
    ) -> Result<AfterDecision> {
        let part = notices.iter().fold(self.changing(name, Some(before), after), Part::delete);
        if self.send(part).await?.is_none() {
            return Ok(AfterDecision::Again);
        }
        notices.clear();
        Ok(AfterDecision::Rests)
    }

    /// Starts an execution for an occurrence, and cancels the running executions if `cancels`.
    async fn starts(
        self: &Arc<EngineInner>,
        name: &str,
        look: &ReadSchedule,
        of: &Occurrence,
        cancels: bool,
    ) -> Result<Starts> {
        let (id, spaces) = (of.execution(name), &self.scheduling.spaces);
        match fetch_execution(&self.store.view().await?, &self.spaces.executions, &id).await {
            Ok(None) => {}
            Err(error) if error.kind() == ErrorKind::Unavailable => return Err(error),
            _ => return Ok(Starts::Not(RunOutcome::Skipped(format!("execution {id:?} was started before")))),
        }
        let start = (&*look.before.workflow, look.before.input.clone(), id.clone());
        let part = match self.starting_for(&[start], Some(name)).await {
            Ok(part) => part,
            Err(error @ (WorkflowError::NotRegistered { .. } | WorkflowError::RulesElsewhere { .. })) => {
                return Ok(Starts::Stalls(error.to_string()));
            }
            Err(error) if error.kind() == ErrorKind::Unavailable => return Err(error),
            Err(error) => return Ok(Starts::Not(RunOutcome::Rejected(error.to_string()))),
        };
        let mut part = part.put(&spaces.running(name, &id), Vec::new());
        let mut cancelled = Vec::new();
        let reason = format!("schedule {name:?} has started {id:?}");
        for running in look.running.iter().filter(|_| cancels) {
            match self.cancelling(running, &reason, true).await {
                // Two executions that wait in one queue cannot leave it in one commit.
                Ok(Some(cancelling)) if part.writes_any_of(&cancelling) => match self.cancel(running, &reason).await {
                    Ok(()) => cancelled.push(running.to_string()),
                    Err(WorkflowError::Ended { .. } | WorkflowError::NotFound { .. }) => {}
                    Err(error) => return Err(error),
                },
                Ok(Some(cancelling)) => {
                    part = part.and(cancelling);
                    cancelled.push(running.to_string());
                }
                Ok(None) | Err(WorkflowError::Ended { .. } | WorkflowError::NotFound { .. }) => {}
                Err(error) if error.kind() == ErrorKind::Unavailable => return Err(error),
                Err(error) => tracing::error!(id = %running, %error, "a damaged execution is not cancelled"),
            }
        }
        let outcome = match cancelled.is_empty() {
            true => RunOutcome::Started,
            false => RunOutcome::CancelledPrevious(cancelled),
        };
        Ok(Starts::With(outcome, part))
    }
}

/// Whether an occurrence starts an execution.
enum Starts {
    With(RunOutcome, Part),
    Not(RunOutcome),
    /// This program cannot start it.
    Stalls(String),
}

impl EngineInner {
    /// Changes a schedule's record and its alarm, as a part of a commit.
    pub(crate) fn changing(&self, name: &str, before: Option<(&ScheduleRecord, Rev)>, after: &ScheduleRecord) -> Part {
        let (spaces, key) = (&self.scheduling.spaces, self.scheduling.spaces.schedule(name));
        let mut part = self.node.for_schedule(name);
        part = match before {
            Some((_, rev)) => part.at_rev(SCHEDULE, &key, rev),
            None => part.absent(SCHEDULE, &key),
        };
        let old = before.and_then(|(before, _)| before.due_us);
        if old != after.due_us {
            part = old.iter().fold(part, |part, old| part.delete(&spaces.alarm(name, Timestamp(*old))));
            let new = after.due_us.map(|due| spaces.alarm(name, Timestamp(due)));
            part = new.iter().fold(part, |part, key| part.put(key, Vec::new()));
        }
        part = part.put(&key, after.encode());
        let (alarms, name) = (self.scheduling.alarms.clone(), ExecutionId::from(name));
        let due = after.due_us.map(Timestamp);
        part.then(move |_| due.iter().for_each(|due| alarms.set(&name, *due)))
    }
}
