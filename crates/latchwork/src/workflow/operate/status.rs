//! The state of an execution in one word: for lists, filters, descriptions, finalizers and the command.
//! [`ExecutionState`] has the details, such as the output or the reason.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::workflow::engine::finally::{Finished, FinishedAs};
use crate::workflow::operate::executions::Description;
use crate::workflow::operate::history::{ExecutionState, History};
use crate::workflow::operate::list::Listed;
use crate::workflow::operate::steer::Why;
use crate::workflow::stored::record::{self, Execution, Wait, WaitsFor};
use crate::workflow::{Result, WorkflowError};

/// The state of an execution, in one word.
///
/// ```
/// use latchwork::workflow::Status;
///
/// assert_eq!(Status::TimedOut.to_string(), "timed out");
/// assert_eq!(Status::TimedOut.name(), "timed_out");
/// assert_eq!("timed_out".parse::<Status>().unwrap(), Status::TimedOut);
/// assert!(Status::TimedOut.is_end() && !Status::Parked.is_end());
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[repr(u8)]
pub enum Status {
    /// Running, or about to run.
    Running = 1,
    /// Out of memory, and waits only for a time: a sleep, or the next attempt of a step.
    Asleep,
    /// Out of memory, and waits for something else than a time. In a filter, this selects executions that are asleep as
    /// well.
    Waiting,
    /// Waits for an operator.
    Parked,
    /// Completed with an output.
    Completed,
    /// Failed, or was terminated.
    Failed,
    /// Ran longer than its time limit.
    TimedOut,
    /// Was cancelled.
    Cancelled,
}

impl Status {
    /// All statuses.
    pub const ALL: [Status; 8] = [
        Status::Running,
        Status::Asleep,
        Status::Waiting,
        Status::Parked,
        Status::Completed,
        Status::Failed,
        Status::TimedOut,
        Status::Cancelled,
    ];

    /// Its name in JSON and on the command line.
    ///
    /// ```
    /// # use latchwork::workflow::Status;
    /// assert_eq!(Status::TimedOut.name(), "timed_out");
    /// ```
    pub fn name(self) -> &'static str {
        match self {
            Status::Running => "running",
            Status::Asleep => "asleep",
            Status::Waiting => "waiting",
            Status::Parked => "parked",
            Status::Completed => "completed",
            Status::Failed => "failed",
            Status::TimedOut => "timed_out",
            Status::Cancelled => "cancelled",
        }
    }

    /// True if the execution has ended.
    ///
    /// ```
    /// # use latchwork::workflow::Status;
    /// assert!(Status::Failed.is_end());
    /// assert!(!Status::Parked.is_end());
    /// ```
    pub fn is_end(self) -> bool {
        matches!(self, Status::Completed | Status::Failed | Status::TimedOut | Status::Cancelled)
    }

    /// The status of the record of an execution.
    pub(crate) fn of(execution: &Execution) -> Status {
        match &execution.status {
            record::StoredStatus::Running => Status::Running,
            record::StoredStatus::Waiting => Status::while_waiting(&execution.waits),
            record::StoredStatus::Parked(_) => Status::Parked,
            record::StoredStatus::Completed(_) => Status::Completed,
            record::StoredStatus::Failed(_) => Status::Failed,
            record::StoredStatus::TimedOut => Status::TimedOut,
            record::StoredStatus::Cancelled(_) => Status::Cancelled,
        }
    }

    fn of_state(state: &ExecutionState, waits: &[Wait]) -> Status {
        match state {
            ExecutionState::Running => Status::Running,
            ExecutionState::Waiting => Status::while_waiting(waits),
            ExecutionState::Parked(_) => Status::Parked,
            ExecutionState::Completed(_) => Status::Completed,
            ExecutionState::Failed(_) => Status::Failed,
            ExecutionState::TimedOut => Status::TimedOut,
            ExecutionState::Cancelled(_) => Status::Cancelled,
        }
    }

    fn while_waiting(waits: &[Wait]) -> Status {
        let is_timed = |wait: &Wait| matches!(wait.what, WaitsFor::Timer | WaitsFor::Retry(_));
        if waits.iter().all(is_timed) { Status::Asleep } else { Status::Waiting }
    }

    /// The statuses that a filter for this status selects.
    pub(crate) fn meant(self) -> &'static [Status] {
        match self {
            Status::Waiting => &[Status::Asleep, Status::Waiting],
            other => std::slice::from_ref(&Status::ALL[other as usize - 1]),
        }
    }
}

/// In words.
impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(if *self == Status::TimedOut { "timed out" } else { self.name() })
    }
}

impl FromStr for Status {
    type Err = WorkflowError;

    fn from_str(text: &str) -> Result<Status> {
        let found = Status::ALL.into_iter().find(|status| status.name() == text);
        found.ok_or_else(|| WorkflowError::List { reason: format!("{text:?} is not a status") })
    }
}

impl Listed {
    /// Its state, in one word.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, ExecutionFilter, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// for execution in engine.list(ExecutionFilter::new()).await? {
    ///     println!("{} is {}", execution.id, execution.status());
    /// }
    /// # Ok(()) }
    /// ```
    pub fn status(&self) -> Status {
        Status::of_state(&self.state, &self.waits)
    }
}

impl Description {
    /// Its state, in one word.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// let is_over = engine.describe("order-7").await?.status().is_end();
    /// # Ok(()) }
    /// ```
    pub fn status(&self) -> Status {
        Status::of_state(&self.state, &self.waits)
    }
}

impl Why {
    /// Its state, in one word.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// println!("order-7 is {}", engine.why("order-7").await?.status());
    /// # Ok(()) }
    /// ```
    pub fn status(&self) -> Status {
        Status::of_state(&self.state, &self.waits)
    }
}

impl History {
    /// Its state, in one word. A history does not contain waits, so an execution out of memory is always waiting.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// let is_over = engine.history("order-7").await?.status().is_end();
    /// # Ok(()) }
    /// ```
    pub fn status(&self) -> Status {
        match self.state {
            ExecutionState::Waiting => Status::Waiting,
            _ => Status::of_state(&self.state, &[]),
        }
    }
}

impl<I> Finished<I> {
    /// How it has ended, in one word.
    ///
    /// ```
    /// # use latchwork::workflow::{Finished, Status};
    /// # fn example(finished: Finished<String>) {
    /// if finished.status() == Status::Failed {
    ///     println!("{} has failed or was terminated", finished.id);
    /// }
    /// # }
    /// ```
    pub fn status(&self) -> Status {
        match self.outcome {
            FinishedAs::Completed(_) => Status::Completed,
            FinishedAs::Failed(_) | FinishedAs::Terminated(_) => Status::Failed,
            FinishedAs::Cancelled(_) => Status::Cancelled,
            FinishedAs::TimedOut => Status::TimedOut,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_json_and_are_read_back() {
        for (place, status) in Status::ALL.into_iter().enumerate() {
            assert_eq!(status as usize, place + 1, "keys of lists hold these numbers");
            assert_eq!(serde_json::to_value(status).unwrap(), status.name());
            assert_eq!(status.name().parse::<Status>().ok(), Some(status));
            assert!(status.meant().contains(&status));
        }
        assert!("happy".parse::<Status>().is_err());
    }
}
