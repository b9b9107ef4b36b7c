//! A task board: tasks with dependencies, and workers that claim them under a lease. Every change is one conditional
//! commit, so no task is done by two workers. A pattern for flows and for programs without one: it needs a store only.

mod draft;
mod head;
mod lane;
mod plan;
mod stored;
mod task;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;

use crate::flow::board::lane::{BoardAnswer, BoardAsk, ClaimEnd};
use crate::flow::board::stored::{StoredBoard, What, read_task};
use crate::flow::board::task::in_order;
use crate::flow::error::{BoardError, BoardResult};
use crate::page::{Asked, MOST, Page, Records, mark, paged};
use crate::record::Record;
use crate::store::{Bytes, Commit, Order, Range, Rev, Store, View};
use crate::workflow::stored::record::next_page;

pub use task::{BoardState, ClaimedTask, Dispatch, NewTask, Task, TaskState};

/// How many writes a commit that adds tasks has.
const WRITES: usize = 1000;

/// A board. Handles are cheap to clone.
#[derive(Clone)]
pub struct Board {
    stored: Arc<StoredBoard>,
    dispatch: Dispatch,
    attempts: u32,
}

shown!(Board, it => name: it.stored.name);

impl Board {
    /// The board of this name. Tasks are claimed in order of arrival, and tried three times.
    ///
    /// ```
    /// # use latchwork::flow::{Board, BoardResult, Dispatch};
    /// # use latchwork::store::Store;
    /// # async fn example(store: Store) -> BoardResult<()> {
    /// let board = Board::open(&store, "crawl").await?;
    /// # Ok(()) }
    /// ```
    pub async fn open(store: &Store, name: &str) -> BoardResult<Board> {
        let stored = Arc::new(StoredBoard::open(store, name).await?);
        Ok(Board { stored, dispatch: Dispatch::default(), attempts: 3 })
    }

    /// Sets the order of claims. It counts for tasks that are added from now on.
    ///
    /// ```
    /// # use latchwork::flow::{Board, BoardResult, Dispatch};
    /// # use latchwork::store::Store;
    /// # async fn example(store: Store) -> BoardResult<()> {
    /// let board = Board::open(&store, "crawl").await?.dispatch(Dispatch::Priority);
    /// # Ok(()) }
    /// ```
    pub fn dispatch(mut self, dispatch: Dispatch) -> Board {
        self.dispatch = dispatch;
        self
    }

    /// Sets how often a task may be claimed before it has failed for good.
    ///
    /// ```
    /// # use latchwork::flow::{Board, BoardResult, Dispatch};
    /// # use latchwork::store::Store;
    /// # async fn example(store: Store) -> BoardResult<()> {
    /// let board = Board::open(&store, "crawl").await?.attempts(5);
    /// # Ok(()) }
    /// ```
    pub fn attempts(mut self, attempts: u32) -> Board {
        self.attempts = attempts.max(1);
        self
    }

    /// Adds tasks. A dependency is a task of the board or of the same call. Up to 500 tasks are one commit, all or
    /// none; of more, each task comes after those that it depends on.
    ///
    /// ```
    /// # use latchwork::flow::{Board, BoardResult, NewTask};
    /// # async fn example(board: Board) -> BoardResult<()> {
    /// board.add([NewTask::new("fetch", 1), NewTask::new("parse", 2).after("fetch")]).await?;
    /// # Ok(()) }
    /// ```
    pub async fn add(&self, tasks: impl IntoIterator<Item = NewTask>) -> BoardResult<()> {
        let new: Vec<NewTask> = tasks.into_iter().collect();
        for some in in_order(new)?.chunks(WRITES / 2) {
            while !self.add_some(some).await? {}
        }
        Ok(())
    }

    /// Returns false if another caller was faster.
    async fn add_some(&self, new: &[NewTask]) -> BoardResult<bool> {
        let (stored, counter) = (&self.stored, self.stored.counter());
        let view = stored.store.view().await?;
        let found = view.get(&counter).await?;
        let next = found.as_ref().and_then(|item| item.value[..].try_into().ok()).map_or(0, u64::from_be_bytes);
        let mut commit = match &found {
            Some(item) => Commit::new().at_rev(&counter, item.rev),
            None => Commit::new().absent(&counter),
        };
        let mut tasks: BTreeMap<String, (Task, Option<Rev>)> = BTreeMap::new();
        for (number, new) in (next..).zip(new) {
            let (mut left, mut rank) = (0, 0);
            for before in &new.after {
                if !tasks.contains_key(before) {
                    let (task, rev) = stored.known(&view, before).await?;
                    tasks.insert(before.clone(), (task, Some(rev)));
                }
                let Some((task, _)) = tasks.get_mut(before) else { continue };
                rank = rank.max(task.rank + 1);
                if !matches!(task.state, TaskState::Completed(_)) {
                    left += 1;
                    task.needed_by.push(new.id.clone());
                }
            }
            let rank = match self.dispatch {
                Dispatch::Arrival => 0,
                Dispatch::Topology => rank,
                Dispatch::Priority => u64::from(u32::MAX - new.priority),
            };
            let state = if left == 0 { TaskState::Ready } else { TaskState::Waiting };
            let NewTask { id, input, after, .. } = new.clone();
            let task =
                Task { id: id.clone(), input, after, left, attempts: 0, state, needed_by: Vec::new(), rank, number };
            tasks.insert(id, (task, None));
        }
        let mut became_ready = Vec::new();
        for (task, rev) in tasks.values() {
            let key = stored.task_key(&task.id);
            commit = match rev {
                Some(rev) => commit.at_rev(&key, *rev),
                None => commit.absent(&key),
            };
            commit = commit.put(&key, task.encode());
            if rev.is_none() && task.state == TaskState::Ready {
                let key = stored.ready_key(task);
                commit = commit.put(&key, Bytes::new());
                became_ready.push(key);
            }
        }
        commit = commit.put(&counter, (next + new.len() as u64).to_be_bytes().to_vec());
        if stored.store.commit(commit).await?.is_applied() {
            let mut heads = stored.heads.lock();
            became_ready.iter().for_each(|key| heads.became_ready(key));
            return Ok(true);
        }
        let view = stored.store.view().await?;
        for new in new {
            if stored.find(&view, &new.id).await?.is_some() {
                return Err(BoardError::TaskExists { task: new.id.clone() });
            }
        }
        Ok(false)
    }

    /// Claims the next task for a worker, for as long as the lease. Claims whose lease is over are taken away first.
    /// `None` if no task is ready.
    ///
    /// ```
    /// # use latchwork::flow::{Board, BoardResult};
    /// # async fn example(board: Board) -> BoardResult<()> {
    /// let lease = std::time::Duration::from_secs(60);
    /// while let Some(task) = board.claim("worker-1", lease).await? {
    ///     println!("{}", task.task.input);
    ///     board.complete(task, "done").await?;
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn claim(&self, worker: &str, lease: Duration) -> BoardResult<Option<ClaimedTask>> {
        let ask = BoardAsk::Claim { worker: worker.into(), lease, attempts: self.attempts };
        match self.stored.ask(ask).await? {
            BoardAnswer::Task(claimed) => Ok(claimed),
            BoardAnswer::TakenAway(_) => Ok(None),
        }
    }

    /// Ends a claim, or lets it last longer. Returns the task after that.
    async fn end(&self, claimed: ClaimedTask, end: ClaimEnd) -> BoardResult<Option<ClaimedTask>> {
        match self.stored.ask(BoardAsk::End { claimed, end }).await? {
            BoardAnswer::Task(claimed) => Ok(claimed),
            BoardAnswer::TakenAway(_) => Ok(None),
        }
    }

    /// Extends the lease of a claimed task, from now on. Fails if the claim was lost.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::flow::{Board, BoardResult, ClaimedTask};
    /// # async fn example(board: Board, mut claimed: ClaimedTask) -> BoardResult<()> {
    /// board.renew(&mut claimed, Duration::from_secs(60)).await?;
    /// # Ok(()) }
    /// ```
    pub async fn renew(&self, claimed: &mut ClaimedTask, lease: Duration) -> BoardResult<()> {
        if let Some(renewed) = self.end(claimed.clone(), ClaimEnd::Renewed(lease)).await? {
            *claimed = renewed;
        }
        Ok(())
    }

    /// Completes a claimed task: the tasks that waited for it alone are ready in the same commit.
    ///
    /// ```
    /// # use latchwork::flow::{Board, BoardResult};
    /// # async fn example(board: Board) -> BoardResult<()> {
    /// let lease = std::time::Duration::from_secs(60);
    /// while let Some(task) = board.claim("worker-1", lease).await? {
    ///     board.complete(task, "done").await?;
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn complete(&self, claimed: ClaimedTask, output: impl Into<Value>) -> BoardResult<()> {
        self.end(claimed, ClaimEnd::Completed(output.into())).await.map(drop)
    }

    /// Gives a claimed task back: it is ready again, or has failed for good.
    ///
    /// ```
    /// # use latchwork::flow::{Board, BoardResult};
    /// # async fn example(board: Board) -> BoardResult<()> {
    /// let lease = std::time::Duration::from_secs(60);
    /// while let Some(task) = board.claim("worker-1", lease).await? {
    ///     board.fail(task, "the server does not answer").await?;
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn fail(&self, claimed: ClaimedTask, error: &str) -> BoardResult<()> {
        let end = ClaimEnd::GivenBack { error: error.into(), attempts: self.attempts };
        self.end(claimed, end).await.map(drop)
    }

    /// Takes claims away whose lease is over. Returns how many.
    ///
    /// ```
    /// # use latchwork::flow::{Board, BoardResult};
    /// # async fn example(board: Board) -> BoardResult<()> {
    /// let taken_away = board.reclaim().await?;
    /// # Ok(()) }
    /// ```
    pub async fn reclaim(&self) -> BoardResult<usize> {
        match self.stored.ask(BoardAsk::Reclaim { attempts: self.attempts }).await? {
            BoardAnswer::TakenAway(count) => Ok(count),
            BoardAnswer::Task(_) => Ok(0),
        }
    }

    /// The tasks, by id. Await it for a page of them.
    ///
    /// ```
    /// # use latchwork::flow::{Board, BoardResult};
    /// # async fn example(board: Board) -> BoardResult<()> {
    /// for task in board.tasks().await? {
    ///     println!("{}: {:?}", task.id, task.state);
    /// }
    /// # Ok(()) }
    /// ```
    pub fn tasks(&self) -> Tasks {
        Tasks { board: self.clone(), asked: Asked::of("tasks") }
    }

    /// How the board is. It looks at all tasks only if none is ready and none is claimed.
    ///
    /// ```
    /// # use latchwork::flow::{Board, BoardResult, BoardState};
    /// # async fn example(board: Board) -> BoardResult<()> {
    /// if board.state().await? == BoardState::BlockedByFailures {
    ///     println!("tasks have failed for good");
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn state(&self) -> BoardResult<BoardState> {
        let stored = &self.stored;
        let heads = {
            let heads = stored.heads.lock();
            [heads.ready().map(|key| stored.range(What::Ready).from(key)), Some(stored.leased_from(heads.lease()))]
        };
        let view = stored.store.view().await?;
        // The heads are hints: if nothing is found from there on, all keys are looked at.
        let all = [What::Ready, What::Leased].map(|what| stored.range(what));
        for range in heads.into_iter().flatten().chain(all) {
            if has_any(&view, &range).await? {
                return Ok(BoardState::Open);
            }
        }
        let mut rest = stored.range(What::Task);
        while let Some(page) = next_page(&view, &mut rest, MOST).await? {
            for (key, item) in page {
                if !matches!(read_task(&key, &item)?.state, TaskState::Completed(_)) {
                    return Ok(BoardState::BlockedByFailures);
                }
            }
        }
        Ok(BoardState::AllCompleted)
    }
}

/// A page of the tasks of a board that is about to be read.
#[derive(Clone)]
#[must_use = "nothing is read until this is awaited"]
pub struct Tasks {
    board: Board,
    asked: Asked,
}

paged!(Tasks => Task, BoardError);

shown!(Tasks, it => board: it.board.stored.name);

impl Tasks {
    async fn page(self) -> BoardResult<Page<Task>> {
        let Tasks { board, asked } = self;
        let stored = &board.stored;
        let view = &stored.store.view().await?;
        let range = stored.range(What::Task);
        let records = Records { view, space: &stored.space, range, order: Order::Ascending, skips_damage: false };
        asked.scan(mark(&stored.name), records, |key, item| read_task(key, item).map(Some)).await
    }
}

async fn has_any(view: &View, range: &Range) -> BoardResult<bool> {
    Ok(!view.scan(range, Order::Ascending, 1).await?.is_empty())
}
