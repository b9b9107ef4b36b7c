//! What jobs mean for the tasks of a board, by one view: which tasks are claimed, in which order, which claims end, and
//! which tasks become ready by that. It writes nothing: the changes are drafts, and hints count once they are stored.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::flow::board::draft::TaskDrafts;
use crate::flow::board::head::HeadLook;
use crate::flow::board::lane::{BoardAsk, BoardBatch, BoardJob, ClaimEnd, PlannedAnswer};
use crate::flow::board::stored::{StoredBoard, What};
use crate::flow::board::task::{ClaimedTask, Task, TaskState};
use crate::flow::error::{BoardError, BoardResult};
use crate::store::{Key, Order, Range, Timestamp, View};

/// How many leases are looked at for one commit.
const LOOK: usize = 64;

pub(super) struct BoardPlan<'a> {
    board: &'a StoredBoard,
    view: View,
    now: Timestamp,
    drafts: TaskDrafts,
    look: HeadLook,
    /// The ready tasks that can be claimed next: of the view, and those that the drafts make ready.
    ready: BTreeMap<Key, ReadySource>,
    /// The ready tasks of the view that were not read yet.
    rest: Option<Range>,
    /// True if more leases are over than one commit ends.
    has_more_leases: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ReadySource {
    View,
    Draft,
}

impl<'a> BoardPlan<'a> {
    pub(super) async fn begin(board: &'a StoredBoard) -> BoardResult<BoardPlan<'a>> {
        let look = board.heads.lock().look();
        let (view, now) = (board.store.view().await?, board.store.env().now());
        let (drafts, ready) = (TaskDrafts::default(), BTreeMap::new());
        Ok(BoardPlan { board, view, now, drafts, look, ready, rest: None, has_more_leases: false })
    }

    /// Does the jobs: first what ends claims, because that makes tasks ready. Returns jobs that must wait for the next
    /// commit.
    pub(super) async fn make(mut self, jobs: Vec<BoardJob>) -> (BoardBatch, Vec<BoardJob>) {
        let (mut done, mut claims) = (Vec::with_capacity(jobs.len()), Vec::new());
        for job in jobs {
            let planned = match &job.ask {
                BoardAsk::End { claimed, end } => self.end(claimed, end, job.reads).await,
                BoardAsk::Claim { .. } | BoardAsk::Reclaim { .. } => {
                    claims.push(job);
                    continue;
                }
            };
            done.push((job, planned.unwrap_or_else(PlannedAnswer::Refused)));
        }
        let left = match claims.is_empty() {
            true => Vec::new(),
            false => self.claim_all(claims, &mut done).await,
        };
        (BoardBatch { jobs: done, drafts: self.drafts, look: self.look }, left)
    }

    /// Reads a task, unless a job before has. Returns false if there is none.
    async fn load(&mut self, id: &str) -> BoardResult<bool> {
        if self.drafts.has(id) {
            return Ok(true);
        }
        let found = self.board.find(&self.view, id).await?;
        Ok(found.map(|(task, rev)| self.drafts.add(self.board, task, rev)).is_some())
    }

    fn change(&mut self, id: &str, change: impl FnOnce(&mut Task)) {
        if let Some(task) = self.drafts.change(id, change)
            && task.state == TaskState::Ready
        {
            self.ready.insert(self.board.ready_key(task), ReadySource::Draft);
        }
    }

    /// The end of a claim. The caller knows its task and the rev, so the task is read only if the commit was refused.
    async fn end(&mut self, claimed: &ClaimedTask, end: &ClaimEnd, reads: bool) -> BoardResult<PlannedAnswer> {
        let id = &claimed.task.id;
        if !reads {
            self.drafts.add(self.board, claimed.task.clone(), claimed.rev);
        } else if !self.load(id).await? {
            return Err(BoardError::UnknownTask { task: id.clone() });
        }
        let Some(task) = self.drafts.get(id).filter(|task| task.is_claim(&claimed.task)) else {
            return Err(claimed.lost());
        };
        match end {
            ClaimEnd::Completed(output) => {
                let needed_by = task.needed_by.clone();
                for next in &needed_by {
                    if !self.load(next).await? {
                        return Err(BoardError::UnknownTask { task: next.clone() });
                    }
                }
                self.change(id, |task| task.state = TaskState::Completed(output.clone()));
                needed_by.iter().for_each(|next| self.change(next, Task::one_less));
            }
            ClaimEnd::GivenBack { error, attempts } => self.give_back(id, error, *attempts),
            ClaimEnd::Renewed(lease) => {
                let later = self.now.plus(*lease);
                if matches!(&task.state, TaskState::Claimed { until, .. } if *until != later) {
                    self.change(id, |task| task.renew(later));
                }
            }
        }
        Ok(PlannedAnswer::Task(id.clone()))
    }

    fn give_back(&mut self, id: &str, error: &str, attempts: u32) {
        self.change(id, |task| {
            let is_last = task.attempts >= attempts;
            task.state = if is_last { TaskState::Failed(error.into()) } else { TaskState::Ready };
        });
    }

    /// Takes claims away whose lease is over, then claims. Returns the jobs that must wait for the next commit.
    async fn claim_all(&mut self, jobs: Vec<BoardJob>, done: &mut Vec<(BoardJob, PlannedAnswer)>) -> Vec<BoardJob> {
        let is_reclaim = |job: &BoardJob| matches!(job.ask, BoardAsk::Reclaim { .. });
        let attempts = jobs.first().map_or(1, |job| match &job.ask {
            BoardAsk::Claim { attempts, .. } | BoardAsk::Reclaim { attempts } => *attempts,
            BoardAsk::End { .. } => 1,
        });
        let now = self.board.store.env().monotonic();
        let looks_at_all = self.board.heads.lock().is_stale(now) || jobs.iter().any(is_reclaim);
        let wanted = jobs.iter().filter(|job| !is_reclaim(job)).count();
        let mut taken_away = match self.begin_claims(looks_at_all.then_some(now), attempts).await {
            Ok(count) => count,
            Err(error) => {
                done.extend(jobs.into_iter().map(|job| (job, PlannedAnswer::Refused(error.clone()))));
                return Vec::new();
            }
        };
        let (mut left, mut is_blocked) = (Vec::new(), false);
        for job in jobs {
            let BoardAsk::Claim { worker, lease, .. } = &job.ask else {
                done.push((job, PlannedAnswer::TakenAway(std::mem::take(&mut taken_away))));
                continue;
            };
            let mut next = self.claim(worker, *lease, wanted, &mut is_blocked).await;
            if matches!(next, Ok(None)) && self.look.looked.is_none() {
                // Nothing is ready from the head on. Only a look at all keys can say that nothing is ready.
                next = match self.begin_claims(Some(now), attempts).await {
                    Ok(_) => self.claim(worker, *lease, wanted, &mut is_blocked).await,
                    Err(error) => Err(error),
                };
            }
            match next {
                Ok(Some(id)) => done.push((job, PlannedAnswer::Task(id))),
                Ok(None) if self.has_more_leases => left.push(job),
                Ok(None) => done.push((job, PlannedAnswer::Nothing)),
                Err(error) => done.push((job, PlannedAnswer::Refused(error))),
            }
        }
        left
    }

    /// Looks for leases that are over and sets where ready tasks are read from: from the heads on, or at all keys.
    /// Returns the number of claims that were taken away.
    async fn begin_claims(&mut self, all: Option<Duration>, attempts: u32) -> BoardResult<usize> {
        let ready = self.board.range(What::Ready);
        let (from, lease) = {
            let heads = self.board.heads.lock();
            (heads.ready().cloned(), heads.lease())
        };
        self.rest = Some(match (all, from) {
            (None, Some(from)) => ready.from(&from),
            _ => ready,
        });
        let leases = match all {
            Some(_) => self.board.range(What::Leased),
            None if lease <= self.now => self.board.leased_from(lease),
            None => return Ok(0),
        };
        let count = self.take_away(leases, attempts).await?;
        self.look.looked = all;
        Ok(count)
    }

    async fn take_away(&mut self, leases: Range, attempts: u32) -> BoardResult<usize> {
        let found = self.view.scan(&leases, Order::Ascending, LOOK).await?;
        let (is_full, mut count) = (found.len() == LOOK, 0);
        // The times of leases end before the largest number.
        let mut first = Timestamp(u64::MAX);
        for (until, id) in found.iter().filter_map(|(key, _)| self.board.lease(key)) {
            if until > self.now {
                first = until;
                break;
            }
            if is_full {
                first = until;
            }
            let now = self.now;
            let is_over = |task: &Task| matches!(task.state, TaskState::Claimed { until, .. } if until <= now);
            if self.load(&id).await? && self.drafts.get(&id).is_some_and(is_over) {
                self.give_back(&id, "its lease is over", attempts);
                count += 1;
            }
        }
        self.look.lease = Some(first);
        self.has_more_leases = first <= self.now && count > 0;
        Ok(count)
    }

    /// Claims the next ready task. `is_blocked` is set if a task before it cannot be read: the head stays there.
    async fn claim(
        &mut self,
        worker: &str,
        lease: Duration,
        page: usize,
        is_blocked: &mut bool,
    ) -> BoardResult<Option<String>> {
        loop {
            if let Some(rest) = self.rest.take_if(|_| !self.ready.values().any(|source| *source == ReadySource::View)) {
                let found = self.view.scan(&rest, Order::Ascending, page).await?;
                if found.len() == page {
                    self.rest = found.last().map(|(last, _)| rest.after(last));
                }
                self.ready.extend(found.into_iter().map(|(key, _)| (key, ReadySource::View)));
            }
            let Some((key, source)) = self.ready.pop_first() else { return Ok(None) };
            let id = self.board.ready_id(&key);
            let has_task = match self.load(&id).await {
                Ok(has_task) => has_task,
                Err(error) => {
                    *is_blocked = true;
                    return Err(error);
                }
            };
            if !has_task || self.drafts.get(&id).is_none_or(|task| task.state != TaskState::Ready) {
                continue;
            }
            if source == ReadySource::View && !*is_blocked {
                self.look.ready = Some(key);
            }
            let until = self.now.plus(lease);
            self.change(&id, |task| task.claim(worker, until));
            return Ok(Some(id));
        }
    }
}
