//! What can be wrong with schedules.

use std::time::Duration;

use crate::store::ErrorKind;

/// Why something could not be done with a schedule.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // The fields are what the messages say.
pub enum ScheduleError {
    /// A name that cannot be.
    #[error("{name:?} cannot be the name of a schedule: {reason}")]
    Name { name: String, reason: &'static str },
    /// A cron expression that cannot be read. The place is counted in bytes from 0.
    #[error("cron expression {text:?}, at byte {at}: {reason}")]
    Cron { text: String, at: usize, reason: String },
    /// A schedule that has no occurrence at all.
    #[error("schedule {name:?} never fires: no time is meant by it between its start and its end")]
    NeverFires { name: String },
    /// A zone that is not in the time zone database.
    #[error("there is no time zone {zone:?}; write an IANA name such as Europe/Berlin")]
    Zone { zone: String },
    /// An interval of zero, or less than a second.
    #[error("an interval of {interval:?} is too short; the shortest is one second")]
    Interval { interval: Duration },
    /// A zone for an interval.
    #[error("schedule {name:?} has an interval, which is the same in all time zones")]
    ZoneOfInterval { name: String },
    /// Occurrences would overtake each other.
    #[error("a jitter of {jitter:?} is longer than the interval of {interval:?}")]
    Jitter { jitter: Duration, interval: Duration },
    /// An end that is not after the start.
    #[error("schedule {name:?} ends before it starts")]
    EndBeforeStart { name: String },
    /// A schedule for which no workflow was given.
    #[error("schedule {name:?} has no workflow to start")]
    NoWorkflow { name: String },
    /// A backfill of too many occurrences.
    #[error("a backfill of schedule {name:?} has more than {limit} occurrences between its start and its end")]
    BackfillTooLarge { name: String, limit: u64 },
    /// A backfill that cannot be.
    #[error("schedule {name:?} cannot be backfilled: {reason}")]
    Backfill { name: String, reason: &'static str },
    /// Too many requests of operators that were not seen to.
    #[error("schedule {name:?} has {count} {what} already that were not seen to yet")]
    Busy { name: String, what: &'static str, count: usize },
    /// There is no such schedule.
    #[error("there is no schedule {name:?}")]
    NotFound { name: String },
}

impl ScheduleError {
    /// The class of the failure.
    pub fn kind(&self) -> ErrorKind {
        match self {
            ScheduleError::NotFound { .. } => ErrorKind::NotFound,
            ScheduleError::Busy { .. } => ErrorKind::Conflict,
            _ => ErrorKind::Invalid,
        }
    }
}
