//! A task board: tasks with dependencies, and workers that claim them under a lease. Every change is one conditional
//! commit, so no task is done by two workers. A pattern for flows and for programs without one: it needs a store only.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::flow::error::{BoardError, BoardResult};
use crate::json::json_record;
use crate::node::write_text;
use crate::page::{Asked, MOST, Page, Records, mark, paged};
use crate::record::Record;
use crate::store::{Bytes, Commit, Item, Key, Order, Outcome, Range, Rev, Space, SpaceSpec, Store, Timestamp};
use crate::workflow::stored::record::next_page;

/// How many tasks are looked at to claim one.
const LOOK: usize = 64;

/// How many writes a commit that adds tasks has.
const WRITES: usize = 1000;

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
    needed_by: Vec<String>,
    rank: u64,
    number: u64,
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
}

json_record!(Task);

impl ClaimedTask {
    fn lost(&self) -> BoardError {
        BoardError::ClaimLost { task: self.task.id.clone() }
    }
}

impl Task {
    /// True if this is the same claim of the task.
    fn is_claim(&self, claimed: &Task) -> bool {
        (&self.state, self.attempts) == (&claimed.state, claimed.attempts)
    }
}

/// A board. Handles are cheap to clone.
#[derive(Clone)]
pub struct Board {
    store: Store,
    space: Space,
    name: Arc<str>,
    dispatch: Dispatch,
    attempts: u32,
    /// Tasks that callers of this process are about to claim.
    taken: Arc<Mutex<BTreeSet<Key>>>,
}

shown!(Board, it => name: it.name);

/// The kinds of keys of a board.
#[derive(Clone, Copy)]
#[repr(u8)]
enum What {
    /// id → task
    Task,
    /// rank, number, id → nothing: a task that can be claimed
    Ready,
    /// end of the lease, id → nothing: a task that is claimed
    Leased,
    /// The number of the next task.
    Next,
}

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
        let space = store.space(SpaceSpec::new("flow.board")).await?;
        if name.is_empty() || name.len() > 256 {
            return Err(BoardError::Name { name: name.into() });
        }
        let (store, taken) = (store.clone(), Arc::default());
        Ok(Board { store, space, name: name.into(), dispatch: Dispatch::default(), attempts: 3, taken })
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

    fn bytes(&self, what: What, rest: &[u8]) -> Vec<u8> {
        let mut key = Vec::new();
        write_text(&mut key, &self.name);
        key.push(what as u8);
        key.extend_from_slice(rest);
        key
    }

    fn range(&self, what: What) -> Range {
        self.space.prefix(self.bytes(what, &[]))
    }

    fn task_key(&self, id: &str) -> Key {
        self.space.key(self.bytes(What::Task, id.as_bytes()))
    }

    fn ready_key(&self, task: &Task) -> Key {
        let order = [task.rank.to_be_bytes(), task.number.to_be_bytes()].concat();
        self.space.key(self.bytes(What::Ready, &[&order[..], task.id.as_bytes()].concat()))
    }

    fn leased_key(&self, until: Timestamp, id: &str) -> Key {
        self.space.key(self.bytes(What::Leased, &[&until.0.to_be_bytes()[..], id.as_bytes()].concat()))
    }

    async fn find(&self, id: &str) -> BoardResult<Option<(Task, Rev)>> {
        let Some(item) = self.store.view().await?.get(&self.task_key(id)).await? else { return Ok(None) };
        let task = Task::decode(&item.value).map_err(|why| why.at(format!("task {id:?}")))?;
        Ok(Some((task, item.rev)))
    }

    async fn known(&self, id: &str) -> BoardResult<(Task, Rev)> {
        self.find(id).await?.ok_or_else(|| BoardError::UnknownTask { task: id.into() })
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
        let counter = self.space.key(self.bytes(What::Next, &[]));
        let found = self.store.view().await?.get(&counter).await?;
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
                    let (task, rev) = self.known(before).await?;
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
        for (task, rev) in tasks.values() {
            let key = self.task_key(&task.id);
            commit = match rev {
                Some(rev) => commit.at_rev(&key, *rev),
                None => commit.absent(&key),
            };
            commit = commit.put(&key, task.encode());
            if rev.is_none() && task.state == TaskState::Ready {
                commit = commit.put(&self.ready_key(task), Bytes::new());
            }
        }
        commit = commit.put(&counter, (next + new.len() as u64).to_be_bytes().to_vec());
        if self.store.commit(commit).await?.is_applied() {
            return Ok(true);
        }
        for new in new {
            if self.find(&new.id).await?.is_some() {
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
        self.reclaim().await?;
        loop {
            let ready = self.store.view().await?.scan(&self.range(What::Ready), Order::Ascending, LOOK).await?;
            if ready.is_empty() {
                return Ok(None);
            }
            let Some(free) = ready.into_iter().find_map(|(key, _)| Taking::begin(&self.taken, key)) else {
                // Other callers of this process are about to claim all of them.
                tokio::task::yield_now().await;
                continue;
            };
            if let Some(claimed) = self.claim_at(&free.key, worker, lease).await? {
                return Ok(Some(claimed));
            }
        }
    }

    /// Claims the task of a key. `None` if another worker was faster.
    async fn claim_at(&self, key: &Key, worker: &str, lease: Duration) -> BoardResult<Option<ClaimedTask>> {
        let id = key.bytes().get(self.bytes(What::Ready, &[]).len() + 16..).unwrap_or_default();
        let Some((mut task, rev)) = self.find(&String::from_utf8_lossy(id)).await? else { return Ok(None) };
        if task.state != TaskState::Ready {
            return Ok(None);
        }
        let until = self.store.env().now().plus(lease);
        task.state = TaskState::Claimed { by: worker.into(), until };
        task.attempts += 1;
        let own = self.task_key(&task.id);
        let commit = Commit::new().at_rev(&own, rev).put(&own, task.encode()).delete(key);
        let commit = commit.put(&self.leased_key(until, &task.id), Bytes::new());
        Ok(match self.store.commit(commit).await? {
            Outcome::Applied(_) => Some(ClaimedTask { task }),
            Outcome::Refused(_) => None,
        })
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
        loop {
            let (now, rev) = self.known(&claimed.task.id).await?;
            let TaskState::Claimed { by, .. } = now.state.clone() else { return Err(claimed.lost()) };
            if !now.is_claim(&claimed.task) {
                return Err(claimed.lost());
            }
            let until = self.store.env().now().plus(lease);
            let after = Task { state: TaskState::Claimed { by, until }, ..now };
            if claimed.task.state == after.state {
                return Ok(());
            }
            let commit = self.ended(&claimed.task, rev, &after);
            let commit = commit.put(&self.leased_key(until, &after.id), Bytes::new());
            if self.store.commit(commit).await?.is_applied() {
                claimed.task = after;
                return Ok(());
            }
        }
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
        let ClaimedTask { task } = claimed;
        let mut done = task.clone();
        done.state = TaskState::Completed(output.into());
        loop {
            // Tasks may have been added behind it since it was claimed.
            let (now, rev) = self.known(&task.id).await?;
            if !now.is_claim(&task) {
                return Err(BoardError::ClaimLost { task: task.id.clone() });
            }
            done.needed_by.clone_from(&now.needed_by);
            let mut commit = self.ended(&task, rev, &done);
            for id in &now.needed_by {
                let (mut next, its) = self.known(id).await?;
                next.left = next.left.saturating_sub(1);
                if next.left == 0 {
                    next.state = TaskState::Ready;
                    commit = commit.put(&self.ready_key(&next), Bytes::new());
                }
                let key = self.task_key(id);
                commit = commit.at_rev(&key, its).put(&key, next.encode());
            }
            if self.store.commit(commit).await?.is_applied() {
                return Ok(());
            }
        }
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
        match self.give_back(&claimed.task, error).await? {
            true => Ok(()),
            false => Err(BoardError::ClaimLost { task: claimed.task.id }),
        }
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
        let now = self.store.env().now();
        let leased = self.store.view().await?.scan(&self.range(What::Leased), Order::Ascending, LOOK).await?;
        let mut count = 0;
        for (key, _) in leased {
            let rest = key.bytes().get(self.bytes(What::Leased, &[]).len()..).unwrap_or_default();
            let Some((until, id)) = rest.split_first_chunk::<8>() else { continue };
            if Timestamp(u64::from_be_bytes(*until)) > now {
                break;
            }
            if let Some((task, _)) = self.find(&String::from_utf8_lossy(id)).await?
                && matches!(task.state, TaskState::Claimed { until, .. } if until <= now)
            {
                count += usize::from(self.give_back(&task, "its lease is over").await?);
            }
        }
        Ok(count)
    }

    /// Ends a claim without success. False if the claim was lost.
    async fn give_back(&self, claimed: &Task, error: &str) -> BoardResult<bool> {
        loop {
            let (now, rev) = self.known(&claimed.id).await?;
            if !now.is_claim(claimed) {
                return Ok(false);
            }
            let is_last = now.attempts >= self.attempts;
            let state = if is_last { TaskState::Failed(error.into()) } else { TaskState::Ready };
            let after = Task { state, ..now };
            let mut commit = self.ended(claimed, rev, &after);
            if !is_last {
                commit = commit.put(&self.ready_key(&after), Bytes::new());
            }
            if self.store.commit(commit).await?.is_applied() {
                return Ok(true);
            }
        }
    }

    /// The commit that ends a claim.
    fn ended(&self, claimed: &Task, rev: Rev, after: &Task) -> Commit {
        let key = self.task_key(&after.id);
        let commit = Commit::new().at_rev(&key, rev).put(&key, after.encode());
        match &claimed.state {
            TaskState::Claimed { until, .. } => commit.delete(&self.leased_key(*until, &claimed.id)),
            _ => commit,
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
        let view = self.store.view().await?;
        for what in [What::Ready, What::Leased] {
            if !view.scan(&self.range(what), Order::Ascending, 1).await?.is_empty() {
                return Ok(BoardState::Open);
            }
        }
        let mut rest = self.range(What::Task);
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

shown!(Tasks, it => board: it.board.name);

impl Tasks {
    async fn page(self) -> BoardResult<Page<Task>> {
        let Tasks { board, asked } = self;
        let view = &board.store.view().await?;
        let range = board.range(What::Task);
        let records = Records { view, space: &board.space, range, order: Order::Ascending, skips_damage: false };
        asked.scan(mark(&board.name), records, |key, item| read_task(key, item).map(Some)).await
    }
}

/// A task that a caller of this process is about to claim. Others leave it alone meanwhile.
struct Taking<'a> {
    taken: &'a Mutex<BTreeSet<Key>>,
    key: Key,
}

impl<'a> Taking<'a> {
    fn begin(taken: &'a Mutex<BTreeSet<Key>>, key: Key) -> Option<Taking<'a>> {
        taken.lock().insert(key.clone()).then(|| Taking { taken, key })
    }
}

impl Drop for Taking<'_> {
    fn drop(&mut self) {
        self.taken.lock().remove(&self.key);
    }
}

fn read_task(key: &Key, item: &Item) -> BoardResult<Task> {
    Task::decode(&item.value).map_err(|why| why.at(format!("task {key}")).into())
}

/// The tasks, each after those of them that it depends on.
fn in_order(new: Vec<NewTask>) -> BoardResult<Vec<NewTask>> {
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
