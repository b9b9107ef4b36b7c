//! Decides what a schedule does next: a pure function of its record, the time, and whether an execution of it runs. It
//! decides one occurrence at a time. The keeper commits each decision and asks again.

use std::time::Duration;

use super::plan::SchedulePlan;
use super::stored::{Backfill, Cause, Occurrence, ScheduleRecord};
use super::{Overlap, RunOutcome};
use crate::store::Timestamp;

/// How many occurrences may wait for the end of an execution.
pub(crate) const MOST_WAITING: usize = 1000;

/// An occurrence that is at most this late is never missed, whatever its schedule says: the store may be slow.
const LEAST_CATCH_UP: Duration = Duration::from_secs(10);

/// How many missed occurrences are counted at most.
const MOST_MISSED: u64 = 10_000;

/// What to do for a schedule.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Deed {
    /// Start an execution. If `cancels`, also cancel the executions of the schedule that run.
    Start { occurrence: Occurrence, cancels: bool },
    /// Record an occurrence, and start nothing for it now.
    Note { occurrence: Occurrence, outcome: RunOutcome },
}

/// Returns what a schedule does next, and its record after that. None if there is nothing to do now.
pub(crate) fn decide(
    before: &ScheduleRecord,
    plan: &SchedulePlan,
    now: Timestamp,
    is_running: bool,
) -> Option<(Deed, ScheduleRecord)> {
    let is_free = !is_running || before.overlap == Overlap::Allow;
    if let (true, Some(place)) = (is_free, first_waiting(before)) {
        let mut after = before.clone();
        let occurrence = after.waiting.remove(place);
        return Some((Deed::Start { occurrence, cancels: false }, after));
    }
    if !before.triggers.is_empty() {
        let mut after = before.clone();
        let occurrence = after.triggers.remove(0);
        return Some(arrive(after, occurrence, is_running));
    }
    let next = before.next_us.map(Timestamp).filter(|_| before.paused.is_none());
    if let Some(next) = next.filter(|next| plan.due(*next) <= now) {
        return Some(occur(before, plan, next, now, is_running));
    }
    if is_free && !before.backfills.is_empty() {
        return backfill(before, plan);
    }
    None
}

/// When the keeper must look at a schedule again. The end of an execution makes it look at once.
pub(crate) fn due(
    schedule: &ScheduleRecord,
    plan: &SchedulePlan,
    now: Timestamp,
    is_running: bool,
) -> Option<Timestamp> {
    let is_free = !is_running || schedule.overlap == Overlap::Allow;
    let has_more = first_waiting(schedule).is_some() || !schedule.backfills.is_empty();
    if !schedule.triggers.is_empty() || (is_free && has_more) {
        return Some(now);
    }
    schedule.next_us.filter(|_| schedule.paused.is_none()).map(|next| plan.due(Timestamp(next)))
}

/// The index of the first waiting occurrence that may start. A paused schedule starts only what an operator requested.
fn first_waiting(schedule: &ScheduleRecord) -> Option<usize> {
    let may = |waiting: &Occurrence| schedule.paused.is_none() || waiting.cause != Cause::Time;
    schedule.waiting.iter().position(may)
}

/// Handles the next occurrence: it is due, or it and those after it were missed.
fn occur(
    before: &ScheduleRecord,
    plan: &SchedulePlan,
    next: Timestamp,
    now: Timestamp,
    is_running: bool,
) -> (Deed, ScheduleRecord) {
    let mut after = before.clone();
    let window = Duration::from_micros(before.catch_up_us).max(LEAST_CATCH_UP);
    let horizon = now.minus(window).minus(Duration::from_micros(plan.jitter_us()));
    if next >= horizon {
        (after.last_us, after.next_us) = (Some(next.0), plan.after(next).map(|next| next.0));
        return arrive(after, Occurrence { time_us: next.0, cause: Cause::Time }, is_running);
    }
    let count = plan.count(next, horizon, MOST_MISSED);
    // A missed occurrence never comes again, even if the clock is set back.
    after.last_us = Some(horizon.0 - 1);
    after.next_us = plan.from(horizon).map(|next| next.0);
    let outcome = RunOutcome::Missed { count, before: horizon };
    (Deed::Note { occurrence: Occurrence { time_us: next.0, cause: Cause::Time }, outcome }, after)
}

/// Applies the overlap policy to an occurrence.
fn arrive(mut after: ScheduleRecord, occurrence: Occurrence, is_running: bool) -> (Deed, ScheduleRecord) {
    let start = |cancels| Deed::Start { occurrence: occurrence.clone(), cancels };
    let note = |outcome| Deed::Note { occurrence: occurrence.clone(), outcome };
    let skip = |reason: &str| note(RunOutcome::Skipped(reason.into()));
    let is_behind = is_running || first_waiting(&after).is_some();
    let deed = match after.overlap {
        Overlap::Allow => start(false),
        Overlap::CancelRunning => start(is_running),
        Overlap::Skip if is_running => skip("an execution of the schedule runs"),
        Overlap::QueueOne if is_behind && !after.waiting.is_empty() => {
            skip("an execution of the schedule runs, and an occurrence waits for its end")
        }
        Overlap::QueueAll if is_behind && after.waiting.len() >= MOST_WAITING => {
            note(RunOutcome::Rejected(format!("{MOST_WAITING} occurrences are waiting already")))
        }
        Overlap::QueueOne | Overlap::QueueAll if is_behind => {
            after.waiting.push(occurrence.clone());
            note(RunOutcome::Queued)
        }
        Overlap::Skip | Overlap::QueueOne | Overlap::QueueAll => start(false),
    };
    (deed, after)
}

/// The next occurrence of a backfill. A backfill skips and cancels nothing: it waits until no execution runs.
fn backfill(before: &ScheduleRecord, plan: &SchedulePlan) -> Option<(Deed, ScheduleRecord)> {
    let mut after = before.clone();
    while let Some(Backfill { from_us, to_us }) = after.backfills.first().cloned() {
        let Some(found) = plan.from(Timestamp(from_us)).filter(|found| found.0 < to_us) else {
            after.backfills.remove(0);
            continue;
        };
        match plan.after(found).filter(|next| next.0 < to_us) {
            Some(next) => after.backfills[0].from_us = next.0,
            None => drop(after.backfills.remove(0)),
        }
        let occurrence = Occurrence { time_us: found.0, cause: Cause::Backfill };
        return Some((Deed::Start { occurrence, cancels: false }, after));
    }
    None
}
