//! Executions in sentences for people: `Display` for states, waits, operations and answers to `why`. The command prints
//! these sentences. If the current time is known, they also give times relative to it.

use std::fmt;

use serde_json::{Value, json};

use crate::store::{Timestamp, Uuid};
use crate::words::{relative, time};
use crate::workflow::operate::history::{ExecutionState, Operation, OperationState};
use crate::workflow::operate::list::Listed;
use crate::workflow::operate::steer::Why;
use crate::workflow::stored::record::{Kind, Wait, WaitsFor};

impl fmt::Display for WaitsFor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            WaitsFor::Timer => f.write_str("the end of a sleep"),
            WaitsFor::Retry(step) => write!(f, "the next attempt at step {step:?}"),
            WaitsFor::Signal(name) => write!(f, "signal {name:?}"),
            WaitsFor::Update(name) => write!(f, "update {name:?}"),
            WaitsFor::Child(id) => write!(f, "the end of child {id:?}"),
            WaitsFor::Completion(name) => write!(f, "the completion of {name:?} by its token"),
            WaitsFor::Published(name) => write!(f, "a value that it publishes itself as {name:?}"),
            WaitsFor::Lock(name) => write!(f, "lock {name:?}"),
            WaitsFor::Step(name) => write!(f, "step {name:?}, which runs"),
            WaitsFor::Store => f.write_str("the store"),
            WaitsFor::Admission(key) => write!(f, "a permit of the limit for {key:?}"),
            WaitsFor::Review(name) => write!(f, "the decision of review {name:?}"),
        }
    }
}

/// A wait, with the current time if it is known.
struct WaitInWords<'a> {
    wait: &'a Wait,
    now: Option<Timestamp>,
    /// True if the end of the wait is the begin of the execution.
    is_start: bool,
}

impl fmt::Display for WaitInWords<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let WaitInWords { wait, now, is_start } = self;
        match is_start {
            true => f.write_str("its beginning")?,
            false => write!(f, "{}", wait.what)?,
        }
        let is_timed = matches!(wait.what, WaitsFor::Timer | WaitsFor::Retry(_));
        match (wait.until, now) {
            (Some(until), Some(now)) if is_timed => {
                let is_due = if until <= *now { "was due" } else { "is due" };
                return write!(f, ", which {is_due} {}, at {}", relative(until, *now), time(until));
            }
            (Some(until), None) if is_timed => return write!(f, ", due at {}", time(until)),
            _ => {}
        }
        write!(f, ", since {}{}", time(wait.since), aside(wait.since, *now))?;
        match wait.until {
            Some(until) => write!(f, ", until {} at most{}", time(until), aside(until, *now)),
            None => Ok(()),
        }
    }
}

/// Such as ` (3m 12s ago)`. Empty if the current time is not known.
fn aside(time: Timestamp, now: Option<Timestamp>) -> String {
    now.map(|now| format!(" ({})", relative(time, now))).unwrap_or_default()
}

/// Such as `signal "approve", since 2026-11-30 12:00:00 UTC`.
impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        WaitInWords { wait: self, now: None, is_start: false }.fmt(f)
    }
}

/// Such as `failed: the card was refused`.
impl fmt::Display for ExecutionState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ExecutionState::Running => f.write_str("running"),
            ExecutionState::Waiting => f.write_str("waiting"),
            ExecutionState::Parked(reason) => write!(f, "parked: {reason}"),
            ExecutionState::Completed(_) => f.write_str("completed"),
            ExecutionState::Failed(failure) => write!(f, "failed: {failure}"),
            ExecutionState::TimedOut => f.write_str("timed out"),
            ExecutionState::Cancelled(reason) => write!(f, "cancelled: {reason}"),
        }
    }
}

/// Such as `order-7 of workflow "order": waiting for signal "approve", since 2026-11-30 12:00:00 UTC`.
impl fmt::Display for Listed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of workflow {:?}: {}", self.id, self.workflow, self.state)?;
        for (number, wait) in self.waits.iter().enumerate() {
            write!(f, "{} {wait}", if number == 0 { " for" } else { ", and for" })?;
        }
        match &self.cancel {
            Some(reason) if !self.status().is_end() => write!(f, ", to be cancelled: {reason}"),
            _ => Ok(()),
        }
    }
}

impl Why {
    /// The sentences for people: the state of the execution, whether its cancellation was requested, whether it cannot
    /// run here, and then one sentence for each of [`Why::waits`].
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// for sentence in engine.why("order-7").await?.sentences(engine.store().env().now()) {
    ///     println!("{sentence}");
    /// }
    /// # Ok(()) }
    /// ```
    pub fn sentences(&self, now: Timestamp) -> Vec<String> {
        self.told(Some(now))
    }

    fn told(&self, now: Option<Timestamp>) -> Vec<String> {
        let mut sentences = vec![self.told_state(now)];
        let cancel = self.cancel.iter().filter(|_| !self.status().is_end());
        sentences.extend(cancel.map(|reason| format!("Its cancellation was requested: {reason}")));
        sentences.extend(self.set_aside.iter().map(|reason| format!("It cannot run here: {reason}")));
        sentences.extend(self.waits.iter().map(|wait| {
            let is_start = wait.what == WaitsFor::Timer && wait.until.is_some() && wait.until == self.begins;
            let told = WaitInWords { wait, now, is_start };
            let queue = self.queue.as_ref().filter(|_| matches!(wait.what, WaitsFor::Admission(_)));
            let queue = queue.map(|it| {
                let (used, limit, ahead) = (it.used, it.limit, it.ahead);
                format!(" {used} of {limit} permits are taken, and {ahead} starts are before it in the queue.")
            });
            format!("It waits for {told}.{}", queue.unwrap_or_default())
        }));
        sentences
    }

    fn told_state(&self, now: Option<Timestamp>) -> String {
        let name = format!("Execution {:?} of workflow {:?}", &*self.id, self.workflow);
        let ended = now.map_or(format!("at {}", time(self.changed)), |now| relative(self.changed, now));
        match &self.state {
            ExecutionState::Parked(reason) => format!("{name} is parked and waits for an operator: {reason}"),
            ExecutionState::Failed(failure) => format!("{name} waits for nothing: it failed {ended}: {failure}"),
            ExecutionState::Cancelled(reason) => {
                format!("{name} waits for nothing: it was cancelled {ended}: {reason}")
            }
            ExecutionState::Completed(_) => format!("{name} waits for nothing: it completed {ended}."),
            ExecutionState::TimedOut => format!("{name} waits for nothing: it timed out {ended}."),
            _ if self.resident => format!("{name} is in memory."),
            ExecutionState::Waiting => format!("{name} is {}, out of memory.", self.status()),
            ExecutionState::Running => {
                format!("{name} continues as soon as a process that has its workflow opens this store.")
            }
        }
    }
}

/// The state of the execution and one sentence for each wait, each on its own line.
impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.told(None).join("\n"))
    }
}

/// Such as `done: 42`.
impl fmt::Display for OperationState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            OperationState::Begun => f.write_str("begun"),
            OperationState::Retrying { failure, next } => {
                write!(f, "failed, to be tried again at {}: {failure}", time(*next))
            }
            OperationState::Until(until) => write!(f, "until {}", time(*until)),
            OperationState::Done(value) => write!(f, "done: {value}"),
            OperationState::Failed(failure) => write!(f, "failed: {failure}"),
            OperationState::Saw { state: Some(state), .. } => write!(f, "saw {state}"),
            OperationState::Saw { state: None, .. } => f.write_str("saw nothing"),
            OperationState::Queued { token, .. } => write!(f, "waits for token {token}"),
        }
    }
}

impl Operation {
    /// True if it is a wait that ended because its time was up.
    ///
    /// ```
    /// # use latchwork::workflow::{History, Kind};
    /// # fn example(history: History) {
    /// let is_late = history.find(Kind::Signal, "approve").is_some_and(|wait| wait.is_timed_out());
    /// # }
    /// ```
    pub fn is_timed_out(&self) -> bool {
        let is_wait = !matches!(self.kind, Kind::Step | Kind::Transaction);
        is_wait && matches!(&self.state, OperationState::Failed(failure) if failure.is_time())
    }

    /// The value that it returned or read. Values that the library itself recorded get names for their parts.
    ///
    /// ```
    /// # use latchwork::workflow::History;
    /// # fn example(history: History) {
    /// for operation in &history.operations {
    ///     println!("{} {:?}: {:?}", operation.kind, operation.name, operation.labelled());
    /// }
    /// # }
    /// ```
    pub fn labelled(&self) -> Option<Value> {
        let value = match &self.state {
            OperationState::Done(value) => value,
            OperationState::Saw { rev, state } => return Some(json!({ "value": state, "rev": rev })),
            _ => return None,
        };
        let parts = value.as_array().map_or(&[][..], Vec::as_slice);
        let uuid = |number: &Value| {
            let number = number.as_str().map_or_else(|| number.to_string(), Into::into);
            number.parse().map_or(value.clone(), |number| json!(Uuid::from_u128(number).to_string()))
        };
        Some(match (self.kind, parts) {
            (Kind::Uuid, _) => uuid(value),
            (Kind::Now, _) => value.as_u64().map_or(value.clone(), |us| json!(time(Timestamp(us)))),
            (Kind::Lock, _) if value.is_u64() => json!({ "token": value }),
            (Kind::Unlock, [token, was_held, at]) => json!({ "token": token, "was_held": was_held, "acquired_at": at }),
            (Kind::Slot, [value, rev, changed]) => json!({ "value": value, "rev": rev, "changed": changed }),
            (Kind::Review, [token, until]) => {
                let until = until.as_u64().map(|until| time(Timestamp(until)));
                json!({ "token": token, "until": until })
            }
            (Kind::Join | Kind::Race, [branch, begun]) => json!({ "branch": branch, "begun": begun }),
            _ => value.clone(),
        })
    }
}
