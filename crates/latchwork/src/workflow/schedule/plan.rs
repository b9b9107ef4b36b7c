//! When a schedule fires, as pure functions: occurrences from a cron expression in a time zone or from an interval, and
//! the delay of each by jitter. This file knows no record and no clock.
//!
//! Changes of the clock: an expression that names hours fires once for each local time. A skipped local time fires at
//! the first moment after the gap. A repeated local time fires the first time. An expression that leaves the hour open
//! (`*`, `*/2`) follows the clock: it fires at every moment that shows a matching time. So it neither pauses for an
//! hour nor repeats one. Intervals use absolute time.

use jiff::Timestamp as Instant;
use jiff::tz::{AmbiguousOffset, TimeZone};
use xxhash_rust::xxh3::xxh3_64;

use super::cron::Cron;
use super::error::ScheduleError;
use super::stored::{Timing, When};
use crate::store::Timestamp;

const SECOND: u64 = 1_000_000;

/// The occurrences of a schedule.
pub(crate) struct SchedulePlan {
    name: String,
    times: Times,
    jitter_us: u64,
    start_us: u64,
    end_us: u64,
}

enum Times {
    Cron(Box<Cron>, TimeZone),
    /// Times that are `every_us` apart. One of them is `anchor_us`.
    Every {
        every_us: u64,
        anchor_us: u64,
    },
}

impl SchedulePlan {
    pub(crate) fn of(name: &str, timing: &Timing) -> Result<SchedulePlan, ScheduleError> {
        let times = match &timing.when {
            When::Cron { expression, zone } => {
                let cron = Cron::read(expression)?;
                let found = TimeZone::get(zone).map_err(|_| ScheduleError::Zone { zone: zone.clone() })?;
                Times::Cron(Box::new(cron), found)
            }
            When::Every { every_us } => {
                Times::Every { every_us: (*every_us).max(SECOND), anchor_us: timing.start_us.unwrap_or(0) }
            }
        };
        let (start_us, end_us) = (timing.start_us.unwrap_or(0), timing.end_us.unwrap_or(u64::MAX));
        Ok(SchedulePlan { name: name.into(), times, jitter_us: timing.jitter_us, start_us, end_us })
    }

    /// The first occurrence after a time.
    pub(crate) fn after(&self, time: Timestamp) -> Option<Timestamp> {
        self.from(Timestamp(time.0.checked_add(1)?))
    }

    /// The first occurrence at a time or after it.
    pub(crate) fn from(&self, time: Timestamp) -> Option<Timestamp> {
        let from = time.0.max(self.start_us);
        let found = match &self.times {
            Times::Every { every_us, anchor_us } => {
                let steps = from.saturating_sub(*anchor_us).div_ceil(*every_us);
                anchor_us.checked_add(steps.checked_mul(*every_us)?)?
            }
            Times::Cron(cron, zone) => {
                let second = i64::try_from(from.div_ceil(SECOND)).ok()?;
                let from = Instant::from_second(second).ok()?;
                let found = if cron.is_every_hour { shown(cron, zone, from) } else { once(cron, zone, from) };
                u64::try_from(found?.as_second()).ok()?.checked_mul(SECOND)?
            }
        };
        // Times beyond the end of the calendar are not returned.
        Some(Timestamp(found)).filter(|found| found.0 <= self.end_us && instant(*found).is_some())
    }

    /// When an occurrence starts: delayed by its jitter, but before the next occurrence. The result is the same each
    /// time.
    pub(crate) fn due(&self, time: Timestamp) -> Timestamp {
        if self.jitter_us == 0 {
            return time;
        }
        let gap = self.after(time).map_or(u64::MAX, |next| next.0 - time.0);
        let hash = xxh3_64(format!("{}\0{}", self.name, time.0).as_bytes());
        Timestamp(time.0.saturating_add(hash % self.jitter_us.saturating_add(1).min(gap)))
    }

    /// The longest jitter of any occurrence.
    pub(crate) fn jitter_us(&self) -> u64 {
        self.jitter_us
    }

    /// Counts the occurrences at or after `from` and before `to`, up to `most`.
    pub(crate) fn count(&self, from: Timestamp, to: Timestamp, most: u64) -> u64 {
        if let Times::Every { every_us, .. } = &self.times {
            let Some(first) = self.from(from).filter(|first| *first < to) else { return 0 };
            let last = to.0.min(self.end_us.saturating_add(1)) - 1;
            return ((last - first.0) / every_us + 1).min(most);
        }
        let (mut next, mut count) = (self.from(from), 0);
        while let Some(found) = next.filter(|found| *found < to && count < most) {
            count += 1;
            next = self.after(found);
        }
        count
    }
}

fn instant(time: Timestamp) -> Option<Instant> {
    Instant::from_microsecond(i64::try_from(time.0).ok()?).ok()
}

/// A time as RFC 3339, in UTC.
pub(crate) fn written(time: Timestamp) -> String {
    instant(time).unwrap_or(Instant::MAX).to_string()
}

/// Returns the first moment, at or after `from`, at which the clock of the zone shows a matching time.
fn shown(cron: &Cron, zone: &TimeZone, from: Instant) -> Option<Instant> {
    let mut from = from;
    loop {
        let offset = zone.to_offset(from);
        let change = zone.following(from).next().map(|change| change.timestamp());
        let found = cron.next(offset.to_datetime(from)).and_then(|found| offset.to_timestamp(found).ok());
        match (found, change) {
            (Some(found), change) if change.is_none_or(|change| found < change) => return Some(found),
            (Some(_), Some(change)) => from = change,
            _ => return None,
        }
    }
}

/// Returns the first moment, at or after `from`, that belongs to a matching local time. Each local time has one moment.
fn once(cron: &Cron, zone: &TimeZone, from: Instant) -> Option<Instant> {
    let second = jiff::SignedDuration::from_secs(1);
    // If the clock was set forward at this very moment, the skipped local times belong to this moment.
    let mut local = zone.to_datetime(from.checked_sub(second).ok()?).checked_add(second).ok()?;
    loop {
        let found = cron.next(local)?;
        let moment = match zone.to_ambiguous_timestamp(found).offset() {
            AmbiguousOffset::Unambiguous { offset } => offset.to_timestamp(found).ok()?,
            AmbiguousOffset::Fold { before, .. } => before.to_timestamp(found).ok()?,
            AmbiguousOffset::Gap { before, .. } => {
                let inside = before.to_timestamp(found).ok()?.checked_add(second).ok()?;
                zone.preceding(inside).next()?.timestamp()
            }
        };
        if moment >= from {
            return Some(moment);
        }
        // This local time was repeated, and its moment was the first one.
        local = found.checked_add(second).ok()?;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn time(text: &str) -> Timestamp {
        Timestamp(text.parse::<Instant>().unwrap().as_microsecond() as u64)
    }

    fn cron(expression: &str, zone: &str) -> Timing {
        Timing::new(When::Cron { expression: expression.into(), zone: zone.into() })
    }

    fn fires(timing: &Timing, from: &str, to: &str) -> Vec<String> {
        let (plan, to) = (SchedulePlan::of("s", timing).unwrap(), time(to));
        let mut next = plan.from(time(from));
        let mut found = Vec::new();
        while let Some(time) = next.filter(|time| *time < to) {
            found.push(written(time));
            next = plan.after(time);
        }
        found
    }

    #[test]
    fn hours_that_are_named_fire_once_through_changes_of_the_clock() {
        // In Berlin, 02:00 to 03:00 is skipped on 29 March 2026, and comes twice on 25 October.
        let spring = fires(&cron("0,30 2 * * *", "Europe/Berlin"), "2026-03-28T12:00:00Z", "2026-03-30T12:00:00Z");
        assert_eq!(spring, ["2026-03-29T01:00:00Z", "2026-03-30T00:00:00Z", "2026-03-30T00:30:00Z"]);
        let autumn = fires(&cron("30 2 * * *", "Europe/Berlin"), "2026-10-24T12:00:00Z", "2026-10-26T12:00:00Z");
        assert_eq!(autumn, ["2026-10-25T00:30:00Z", "2026-10-26T01:30:00Z"]);
        // On Lord Howe the clock changes by half an hour. A local time in the gap fires at the first moment after it.
        let howe =
            fires(&cron("0,15,30 2 * * *", "Australia/Lord_Howe"), "2026-10-03T12:00:00Z", "2026-10-04T12:00:00Z");
        assert_eq!(howe, ["2026-10-03T15:30:00Z"]);
    }

    #[test]
    fn hours_that_are_left_open_follow_the_clock() {
        let autumn = fires(&cron("30 * * * *", "Europe/Berlin"), "2026-10-24T23:00:00Z", "2026-10-25T03:00:00Z");
        assert_eq!(autumn.len(), 4, "{autumn:?}");
        let spring = fires(&cron("30 * * * *", "Europe/Berlin"), "2026-03-28T23:00:00Z", "2026-03-29T03:00:00Z");
        assert_eq!(spring.len(), 4, "{spring:?}");
    }

    #[test]
    fn intervals_are_counted_and_not_walked_through() {
        let mut every = Timing::new(When::Every { every_us: SECOND });
        every.start_us = Some(500_000);
        let plan = SchedulePlan::of("s", &every).unwrap();
        assert_eq!(plan.from(Timestamp(0)), Some(Timestamp(500_000)));
        assert_eq!(plan.after(Timestamp(500_000)), Some(Timestamp(1_500_000)));
        assert_eq!(plan.count(Timestamp(0), Timestamp(2_500_000), 100), 2);
        assert_eq!(plan.count(Timestamp(0), Timestamp(2_500_001), 100), 3);
        assert_eq!(plan.count(Timestamp(0), Timestamp(u64::MAX), 1000), 1000);
    }

    #[test]
    fn jitter_is_the_same_each_time_and_never_reaches_the_next_occurrence() {
        let mut timing = cron("* * * * *", "UTC");
        timing.jitter_us = 3600 * SECOND;
        let plan = SchedulePlan::of("s", &timing).unwrap();
        let (mut next, mut offsets) = (plan.from(time("2026-01-01T00:00:00Z")), std::collections::BTreeSet::new());
        for _ in 0..1000 {
            let found = next.unwrap();
            next = plan.after(found);
            let due = plan.due(found);
            assert!(due >= found && Some(due) < next && due == plan.due(found));
            offsets.insert(due.0 - found.0);
        }
        assert!(offsets.len() > 900, "{}", offsets.len());
        let other = SchedulePlan::of("t", &timing).unwrap();
        assert_ne!(plan.due(time("2026-01-01T00:00:00Z")), other.due(time("2026-01-01T00:00:00Z")));
    }

    #[test]
    fn nothing_is_looked_for_beyond_the_calendar() {
        let every = Timing::new(When::Every { every_us: u64::MAX });
        for timing in [cron("0 0 * * *", "Europe/Berlin"), cron("* * * * *", "UTC"), every] {
            let plan = SchedulePlan::of("s", &timing).unwrap();
            for time in [Timestamp(u64::MAX), Timestamp(u64::MAX - 1), time("9999-12-30T00:00:00Z")] {
                plan.after(time);
                plan.due(time);
            }
        }
    }
}
