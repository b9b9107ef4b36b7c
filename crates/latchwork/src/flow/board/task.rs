//! The tasks of a board, as callers give and see them, and as they are stored.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::flow::error::{BoardError, BoardResult};
use crate::json::json_record;
use crate::store::{Rev, Timestamp};

/// In which order tasks that are ready are claimed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Dispatch {
    /// In the order in which they were added.
    #[default]
    Arrival,
    /// Tasks with fewer tasks before them first.
    Topology,
    /// Tasks of a higher priority first.
    Priority,
}

/// A task that is about to be added.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct NewTask {
    /// Its id, unique on the board.
    pub id: String,
    /// What a worker is given.
    pub input: Value,
    /// The tasks that have to be completed before.
    pub after: Vec<String>,
    /// For [`Dispatch::Priority`].
    pub priority: u32,
}

impl NewTask {
    /// A task without dependencies.
    ///
    /// ```
    /// # use latchwork::flow::NewTask;
    /// let task = NewTask::new("fetch", "https://example.org");
    /// ```
    pub fn new(id: impl Into<String>, input: impl Into<Value>) -> NewTask {
        NewTask { id: id.into(), input: input.into(), after: Vec::new(), priority: 0 }
    }

    /// Adds a task that has to be completed before.
    ///
    /// ```
    /// # use latchwork::flow::NewTask;
    /// let task = NewTask::new("parse", ()).after("fetch");
    /// ```
    pub fn after(mut self, task: impl Into<String>) -> NewTask {
        self.after.push(task.into());
        self
    }

    /// Sets the priority.
    ///
    /// ```
    /// # use latchwork::flow::NewTask;
    /// let task = NewTask::new("fetch", ()).priority(9);
    /// ```
    pub fn priority(mut self, priority: u32) -> NewTask {
        self.priority = priority;
        self
    }
}

/// A task, as the board shows it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Task {
    /// Its id.
    pub id: String,
    /// What a worker is given.
    pub input: Value,
    /// The tasks before it.
    pub after: Vec<String>,
    /// How many of them are not completed.
    pub left: u32,
    /// How often it was claimed.
    pub attempts: u32,
    /// Its state.
    pub state: TaskState,
    /// The tasks that wait for it.
    pub(super) needed_by: Vec<String>,
    pub(super) rank: u64,
    pub(super) number: u64,
}

/// The state of a task.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum TaskState {
    /// Other tasks come first.
    Waiting,
    /// It can be claimed.
    Ready,
    /// A worker has claimed it.
    Claimed {
        /// The worker.
        by: String,
        /// The end of the lease.
        until: Timestamp,
    },
    /// It is done.
    Completed(Value),
    /// It has failed as often as it may.
    Failed(String),
}

/// How a board is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum BoardState {
    /// There is work, or a worker is at it.
    Open,
    /// All tasks are completed.
    AllCompleted,
    /// No task can be claimed any more, because others have failed.
    BlockedByFailures,
}

/// A claimed task. Only the holder of the claim can complete or fail it.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ClaimedTask {
    /// The task.
    pub task: Task,
    /// The rev of its record: as long as it is that, the claim lasts, and no task was added behind this one.
    pub(super) rev: Rev,
}

json_record!(Task);

impl ClaimedTask {
    pub(super) fn lost(&self) -> BoardError {
        BoardError::ClaimLost { task: self.task.id.clone() }
    }
}

impl Task {
    /// True if this is the same claim of the task.
    pub(super) fn is_claim(&self, claimed: &Task) -> bool {
        (&self.state, self.attempts) == (&claimed.state, claimed.attempts)
    }

    pub(super) fn claim(&mut self, worker: &str, until: Timestamp) {
        self.state = TaskState::Claimed { by: worker.into(), until };
        self.attempts += 1;
    }

    pub(super) fn renew(&mut self, later: Timestamp) {
        if let TaskState::Claimed { until, .. } = &mut self.state {
            *until = later;
        }
    }

    /// A task before this one is completed.
    pub(super) fn one_less(&mut self) {
        self.left = self.left.saturating_sub(1);
        if self.left == 0 && self.state == TaskState::Waiting {
            self.state = TaskState::Ready;
        }
    }
}

/// The tasks, each after those of them that it depends on.
pub(super) fn in_order(new: Vec<NewTask>) -> BoardResult<Vec<NewTask>> {
    let ids: BTreeSet<String> = new.iter().map(|task| task.id.clone()).collect();
    if let Some(task) = new.iter().find(|task| task.id.is_empty() || task.id.len() > 512) {
        return Err(BoardError::Name { name: task.id.clone() });
    }
    if ids.len() < new.len() {
        let mut seen = BTreeSet::new();
        let twice = new.iter().find(|task| !seen.insert(&task.id)).map(|task| task.id.clone());
        return Err(BoardError::TaskExists { task: twice.unwrap_or_default() });
    }
    let mut behind: BTreeMap<String, Vec<usize>> = BTreeMap::new();
    let mut left: Vec<usize> = Vec::with_capacity(new.len());
    for (index, task) in new.iter().enumerate() {
        let own: BTreeSet<&String> = task.after.iter().filter(|before| ids.contains(*before)).collect();
        left.push(own.len());
        own.into_iter().for_each(|before| behind.entry(before.clone()).or_default().push(index));
    }
    let mut ready: Vec<usize> = (0..new.len()).rev().filter(|index| left[*index] == 0).collect();
    let (mut new, mut ordered): (Vec<Option<NewTask>>, _) = (new.into_iter().map(Some).collect(), Vec::new());
    while let Some(index) = ready.pop() {
        let Some(mut task) = new[index].take() else { continue };
        for next in behind.get(&task.id).into_iter().flatten().rev() {
            left[*next] -= 1;
            if left[*next] == 0 {
                ready.push(*next);
            }
        }
        task.after.sort();
        task.after.dedup();
        ordered.push(task);
    }
    match new.into_iter().flatten().next() {
        Some(task) => Err(BoardError::Cycle { task: task.id }),
        None => Ok(ordered),
    }
}
