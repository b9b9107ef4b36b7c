//! Tasks as the next commit of a board will leave them. Several jobs may change a task one after the other, and one
//! write holds the result. It decides what is checked and written, and not what happens to a task.

use std::collections::BTreeMap;

use crate::flow::board::stored::StoredBoard;
use crate::flow::board::task::{ClaimedTask, Task, TaskState};
use crate::record::Record;
use crate::store::{Bytes, Commit, Key, Receipt, Rev};

/// A task, as it is stored and as it will be.
pub(super) struct TaskDraft {
    rev: Rev,
    /// Its key in the list of ready or leased tasks, as stored.
    listed: Option<Key>,
    pub(super) task: Task,
    is_changed: bool,
    /// The place of its record among the writes of the commit.
    write: Option<usize>,
}

#[derive(Default)]
pub(super) struct TaskDrafts(BTreeMap<String, TaskDraft>);

impl TaskDrafts {
    pub(super) fn has(&self, id: &str) -> bool {
        self.0.contains_key(id)
    }

    pub(super) fn get(&self, id: &str) -> Option<&Task> {
        self.0.get(id).map(|draft| &draft.task)
    }

    /// Adds a task as it is stored at a rev. A commit that changes it checks that rev.
    pub(super) fn add(&mut self, board: &StoredBoard, task: Task, rev: Rev) {
        let listed = board.listed_key(&task);
        self.0.entry(task.id.clone()).or_insert(TaskDraft { rev, listed, task, is_changed: false, write: None });
    }

    /// Changes a task that was added. Returns it as it will be.
    pub(super) fn change(&mut self, id: &str, change: impl FnOnce(&mut Task)) -> Option<&Task> {
        let draft = self.0.get_mut(id)?;
        change(&mut draft.task);
        draft.is_changed = true;
        Some(&draft.task)
    }

    /// The commit of all changes; `None` if there is none.
    pub(super) fn commit(&mut self, board: &StoredBoard) -> Option<Commit> {
        let mut commit = Commit::new();
        for draft in self.0.values_mut().filter(|draft| draft.is_changed) {
            let key = board.task_key(&draft.task.id);
            draft.write = Some(commit.writes().len());
            commit = commit.at_rev(&key, draft.rev).put(&key, draft.task.encode());
            let listed = board.listed_key(&draft.task);
            if listed != draft.listed {
                commit = draft.listed.iter().fold(commit, Commit::delete);
                commit = listed.iter().fold(commit, |commit, key| commit.put(key, Bytes::new()));
            }
        }
        (!commit.writes().is_empty()).then_some(commit)
    }

    /// The commit has landed.
    pub(super) fn landed(&mut self, board: &StoredBoard, receipt: &Receipt) {
        let mut heads = board.heads.lock();
        for draft in self.0.values_mut() {
            let Some(rev) = draft.write.and_then(|write| receipt.revs.get(write).copied().flatten()) else { continue };
            draft.rev = rev;
            match &draft.task.state {
                TaskState::Ready => heads.became_ready(&board.ready_key(&draft.task)),
                TaskState::Claimed { until, .. } => heads.leased(*until),
                _ => {}
            }
        }
    }

    /// A task as it is stored now.
    pub(super) fn claimed(&self, id: &str) -> Option<ClaimedTask> {
        self.0.get(id).map(|draft| ClaimedTask { task: draft.task.clone(), rev: draft.rev })
    }
}
