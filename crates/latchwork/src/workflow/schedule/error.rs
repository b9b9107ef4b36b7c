//! The errors of schedules.

use std::time::Duration;

use crate::store::ErrorKind;

/// Why an operation on a schedule failed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // The fields are what the messages say.
pub enum ScheduleError {
    /// The name is not allowed.
    #[error("{name:?} cannot be the name of a schedule: {reason}")]
    Name { name: String, reason: &'static str },
    /// The cron expression cannot be parsed. `at` is the byte offset, counted from 0.
    #[error("cron expression {text:?}, at byte {at}: {reason}")]
    Cron { text: String, at: usize, reason: String },
    /// The schedule has no occurrence.
    #[error("schedule {name:?} never fires: it has no occurrence between its start and its end")]
    NeverFires { name: String },
    /// The zone is not in the time zone database.
    #[error("there is no time zone {zone:?}; write an IANA name such as Europe/Berlin")]
    Zone { zone: String },
    /// The interval is shorter than a second.
    #[error("an interval of {interval:?} is too short; the shortest is one second")]
    Interval { interval: Duration },
    /// An interval was given a time zone.
    #[error("schedule {name:?} has an interval, which is the same in all time zones")]
    ZoneOfInterval { name: String },
    /// The jitter is so long that occurrences could overtake each other.
    #[error("a jitter of {jitter:?} is longer than the interval of {interval:?}")]
    Jitter { jitter: Duration, interval: Duration },
    /// The end is not after the start.
    #[error("schedule {name:?} ends before it starts")]
    EndBeforeStart { name: String },
    /// No workflow was given.
    #[error("schedule {name:?} has no workflow to start")]
    NoWorkflow { name: String },
    /// The backfill has too many occurrences.
    #[error("a backfill of schedule {name:?} has more than {limit} occurrences between its start and its end")]
    BackfillTooLarge { name: String, limit: u64 },
    /// The range of the backfill is not allowed.
    #[error("schedule {name:?} cannot be backfilled: {reason}")]
    Backfill { name: String, reason: &'static str },
    /// Too many requests of operators wait.
    #[error("schedule {name:?} already has {count} waiting {what}")]
    Busy { name: String, what: &'static str, count: usize },
    /// There is no such schedule.
    #[error("there is no schedule {name:?}")]
    NotFound { name: String },
}

impl ScheduleError {
    /// The class of the failure.
    ///
    /// ```
    /// # use latchwork::store::ErrorKind;
    /// # use latchwork::workflow::ScheduleError;
    /// let error = ScheduleError::NotFound { name: "nightly".into() };
    /// assert_eq!(error.kind(), ErrorKind::NotFound);
    /// ```
    pub fn kind(&self) -> ErrorKind {
        match self {
            ScheduleError::NotFound { .. } => ErrorKind::NotFound,
            ScheduleError::Busy { .. } => ErrorKind::Conflict,
            _ => ErrorKind::Invalid,
        }
    }
}
