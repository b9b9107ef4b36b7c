//! What callers of one process want of a board, as jobs of its lane: the claims and ends of claims that come while a
//! commit is on its way share the next one. What a job means for tasks is decided in `plan`.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::sync::oneshot;

use crate::flow::board::draft::TaskDrafts;
use crate::flow::board::head::HeadLook;
use crate::flow::board::plan::BoardPlan;
use crate::flow::board::stored::StoredBoard;
use crate::flow::board::task::ClaimedTask;
use crate::flow::error::{BoardError, BoardResult};
use crate::lane::{LanePlan, Lanes, Runtime};
use crate::store::{Commit, Receipt, Refusal, Store, StoreError};

/// What a caller wants.
pub(super) enum BoardAsk {
    Claim {
        worker: String,
        lease: Duration,
        attempts: u32,
    },
    End {
        claimed: ClaimedTask,
        end: ClaimEnd,
    },
    /// Takes claims away whose lease is over.
    Reclaim {
        attempts: u32,
    },
}

/// What becomes of a claim.
pub(super) enum ClaimEnd {
    Completed(Value),
    /// The task is given back. It may be claimed `attempts` times in all.
    GivenBack {
        error: String,
        attempts: u32,
    },
    /// It lasts longer.
    Renewed(Duration),
}

/// What a caller gets.
pub(super) enum BoardAnswer {
    /// The task of a claim, if there is one.
    Task(Option<ClaimedTask>),
    /// The number of claims that were taken away.
    TakenAway(usize),
}

/// What a caller will get, once the commit has landed.
pub(super) enum PlannedAnswer {
    Task(String),
    Nothing,
    TakenAway(usize),
    Refused(BoardError),
}

pub(super) struct BoardJob {
    pub(super) ask: BoardAsk,
    /// True if a commit was refused that relied on what the caller knew of its claim.
    pub(super) reads: bool,
    answer: oneshot::Sender<BoardResult<BoardAnswer>>,
}

/// Jobs that share a commit.
pub(super) struct BoardBatch {
    pub(super) jobs: Vec<(BoardJob, PlannedAnswer)>,
    pub(super) drafts: TaskDrafts,
    pub(super) look: HeadLook,
}

/// How often the commit of the first jobs was refused in a row.
#[derive(Default)]
pub(super) struct RefusedInARow(u32);

impl BoardJob {
    pub(super) fn fail(self, error: BoardError) {
        let _ = self.answer.send(Err(error));
    }
}

impl BoardBatch {
    /// All changes are stored. Answers the jobs.
    fn settle(mut self, board: &StoredBoard, receipt: Option<&Receipt>) {
        board.heads.lock().looked(self.look);
        receipt.into_iter().for_each(|receipt| self.drafts.landed(board, receipt));
        for (job, planned) in self.jobs {
            let answer = match planned {
                PlannedAnswer::Task(id) => Ok(BoardAnswer::Task(self.drafts.claimed(&id))),
                PlannedAnswer::Nothing => Ok(BoardAnswer::Task(None)),
                PlannedAnswer::TakenAway(count) => Ok(BoardAnswer::TakenAway(count)),
                PlannedAnswer::Refused(error) => Err(error),
            };
            let _ = job.answer.send(answer);
        }
    }

    fn put_back(self, jobs: &mut VecDeque<BoardJob>) {
        self.jobs.into_iter().rev().for_each(|(job, _)| jobs.push_front(job));
    }
}

impl StoredBoard {
    /// Puts what a caller wants into the lane, and waits for the answer.
    pub(super) async fn ask(self: &Arc<StoredBoard>, ask: BoardAsk) -> BoardResult<BoardAnswer> {
        let (answer, answered) = oneshot::channel();
        let job = BoardJob { ask, reads: false, answer };
        Lanes::submit(self, &(), job).map_err(|_| BoardError::NoRuntime)?;
        answered.await.map_err(|_| BoardError::NoRuntime)?
    }
}

impl LanePlan for StoredBoard {
    type Key = ();
    type Job = BoardJob;
    type Known = RefusedInARow;
    type Batch = BoardBatch;

    const MOST: usize = 128;

    fn lanes(&self) -> &Lanes<StoredBoard> {
        &self.lanes
    }

    fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    fn store(&self) -> &Store {
        &self.store
    }

    async fn plan(
        self: &Arc<StoredBoard>,
        (): &(),
        refused: &mut RefusedInARow,
        jobs: &mut VecDeque<BoardJob>,
        most: usize,
    ) -> Option<(Commit, BoardBatch)> {
        // Another process is faster again and again: a smaller commit meets fewer of its changes.
        let most = (most.min(jobs.len()) >> refused.0.min(7)).max(1);
        let mut taken = Vec::with_capacity(most);
        while taken.len() < most
            && let Some(job) = jobs.pop_front()
        {
            if !job.answer.is_closed() {
                taken.push(job);
            }
        }
        if taken.is_empty() {
            return None;
        }
        let plan = match BoardPlan::begin(self).await {
            Ok(plan) => plan,
            Err(error) => {
                taken.into_iter().for_each(|job| job.fail(error.clone()));
                return None;
            }
        };
        let (mut batch, left) = plan.make(taken).await;
        left.into_iter().rev().for_each(|job| jobs.push_front(job));
        match batch.drafts.commit(self) {
            Some(commit) => Some((commit, batch)),
            None => {
                batch.settle(self, None);
                None
            }
        }
    }

    fn size(batch: &BoardBatch) -> usize {
        batch.jobs.len()
    }

    fn landed(self: &Arc<StoredBoard>, (): &(), refused: &mut RefusedInARow, batch: BoardBatch, receipt: &Receipt) {
        refused.0 = 0;
        batch.settle(self, Some(receipt));
    }

    async fn refused(
        self: &Arc<StoredBoard>,
        (): &(),
        refused: &mut RefusedInARow,
        mut batch: BoardBatch,
        _: Refusal,
        jobs: &mut VecDeque<BoardJob>,
    ) {
        refused.0 += 1;
        batch.jobs.iter_mut().for_each(|(job, _)| job.reads = true);
        batch.put_back(jobs);
    }

    fn split(self: &Arc<StoredBoard>, _: &mut RefusedInARow, batch: BoardBatch, jobs: &mut VecDeque<BoardJob>) {
        batch.put_back(jobs);
    }

    fn failed(
        self: &Arc<StoredBoard>,
        _: &mut RefusedInARow,
        batch: BoardBatch,
        error: StoreError,
        _: &mut VecDeque<BoardJob>,
    ) {
        // The commit may have landed all the same.
        self.heads.lock().forget();
        batch.jobs.into_iter().for_each(|(job, _)| job.fail(error.clone().into()));
    }
}
