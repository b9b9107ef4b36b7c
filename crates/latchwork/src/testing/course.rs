//! What a run of the test kit did, in order: the bodies that ran and the commits that were made, each as one line of
//! text. Two runs of the same code took the same path if their lines are the same. Results and times are not part of a
//! line, because a body may return another value in each run.

use std::collections::BTreeMap;

use parking_lot::Mutex;

use crate::record::Record;
use crate::store::{Commit, SpaceId, Write};
use crate::workflow::ExecutionId;
use crate::workflow::engine::{EXECUTIONS, JOURNAL};
use crate::workflow::stored::record::{Entry, EntryState, Execution, Kind, StoredStatus};

type SpaceNames = BTreeMap<SpaceId, String>;

/// The bodies and commits of a run.
#[derive(Default)]
pub(crate) struct Course {
    bodies: Mutex<Vec<String>>,
    /// Present while lines are recorded: the names of spaces, and the lines so far.
    lines: Mutex<Option<(SpaceNames, Vec<String>)>>,
}

impl Course {
    /// Records that the body of a step begins.
    pub(crate) fn body(&self, id: &ExecutionId, step: &str) {
        self.bodies.lock().push(step.into());
        self.line(|_| format!("body of step {step:?} of execution {id:?}"));
    }

    /// Records that commit number `number` is sent.
    pub(crate) fn commit(&self, number: u64, commit: &Commit) {
        self.line(|spaces| format!("commit {number}: {}", told(spaces, commit)));
    }

    /// The names of the steps whose bodies ran so far, in order.
    pub(crate) fn bodies(&self) -> Vec<String> {
        self.bodies.lock().clone()
    }

    /// Records lines from now on.
    pub(crate) fn begin(&self, spaces: SpaceNames) {
        *self.lines.lock() = Some((spaces, Vec::new()));
    }

    /// Stops recording. Returns the lines.
    pub(crate) fn end(&self) -> Vec<String> {
        self.lines.lock().take().map(|(_, lines)| lines).unwrap_or_default()
    }

    fn line(&self, line: impl FnOnce(&SpaceNames) -> String) {
        if let Some((spaces, lines)) = &mut *self.lines.lock() {
            lines.push(line(spaces));
        }
    }
}

/// The first line in which a run that a crash cut off differs from the first run, for both runs.
pub(crate) fn difference(first: &[String], this: &[String]) -> Option<(String, String)> {
    let place = this.iter().enumerate().position(|(place, line)| first.get(place) != Some(line))?;
    let first = first.get(place).cloned().unwrap_or_else(|| "had ended".into());
    Some((first, this[place].clone()))
}

/// What a commit writes: operations by their names, everything else by the number of records in each space.
fn told(spaces: &SpaceNames, commit: &Commit) -> String {
    let (mut operations, mut counts) = (Vec::new(), BTreeMap::<&str, u32>::new());
    for write in commit.writes() {
        let space = spaces.get(&write.key().space()).map_or("?", String::as_str);
        match (space, write) {
            (JOURNAL, Write::Put(_, value)) => {
                if let Ok((entry, next)) = Entry::decode_with(value) {
                    operations.extend([Some(entry), next].into_iter().flatten().map(|entry| operation(&entry)));
                }
            }
            (EXECUTIONS, Write::Put(_, value)) => {
                if let Ok(execution) = Execution::decode(value) {
                    operations.extend(execution.tail.iter().map(|(_, entry)| operation(entry)));
                    operations.push(format!("execution {}", status(&execution.status)));
                }
            }
            _ => {}
        }
        *counts.entry(space).or_default() += 1;
    }
    let counts = counts.into_iter().map(|(space, count)| format!("{space} {count}"));
    operations.into_iter().chain(counts).collect::<Vec<_>>().join(", ")
}

fn operation(entry: &Entry) -> String {
    let state = match &entry.state {
        EntryState::Begun | EntryState::Anew => "begun",
        EntryState::Failed { .. } => "failed, to be tried again",
        EntryState::Until(_) => "waits for a time",
        EntryState::Done(_) => "done",
        EntryState::Gave(_) => "failed",
        EntryState::Saw { .. } => "read",
        EntryState::Queued { .. } => "waits for a lock",
    };
    match entry.kind {
        Kind::Step => format!("step {:?} {state} (attempt {})", entry.name, entry.attempts),
        kind => format!("{kind} {:?} {state}", entry.name),
    }
}

fn status(status: &StoredStatus) -> &'static str {
    match status {
        StoredStatus::Running => "runs",
        StoredStatus::Waiting => "waits",
        StoredStatus::Parked(_) => "is parked",
        StoredStatus::Completed(_) => "has completed",
        StoredStatus::Failed(_) => "has failed",
        StoredStatus::TimedOut => "has timed out",
        StoredStatus::Cancelled(_) => "is cancelled",
    }
}
