//! Tasks: work that is put once and done by workers in any language, under leases. Every operation is one conditional
//! commit on the store, so it holds for all processes that share it. This folder knows no HTTP; `rules.rs` says what an
//! operation makes of one task, `keeper.rs` does what no caller waits for.

mod keeper;
mod rules;
mod stored;
#[cfg(test)]
mod tests;
mod waiting;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use latchwork::Value;
use latchwork::store::{Bytes, Commit, Item, Key, Order, Right, Store, StoreError, Timestamp, View};
use parking_lot::Mutex;
use sha2::{Digest as _, Sha256};
use tokio::sync::OnceCell;

use crate::calls::{Call, StoredAnswer};

pub(crate) use keeper::{Kept, keep};
pub(crate) use rules::Lease;
pub(crate) use stored::{Task, TaskFailure, TaskRetry, TaskState};

use rules::Change;
use stored::{StoredGuard, TaskKeys};
use waiting::Waiting;

/// How often an operation that lost a race is run again.
const TRIES: usize = 32;
/// Bytes of input that one call takes at most, unless a single task has more.
const TAKEN_BYTES: usize = 1 << 20;
/// The number of leases that one look takes away.
const SWEPT: usize = 64;

/// Why an operation on a task was not done.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TaskError {
    #[error("there is no task {id:?}")]
    NotFound { id: String },
    #[error("task {id:?} exists with another kind, input or key")]
    Exists { id: String },
    #[error("the token holds no lease of task {id:?}, which is {state}")]
    LeaseLost { id: String, state: &'static str },
    #[error("task {id:?} has ended: it is {state}")]
    Ended { id: String, state: &'static str },
    #[error("other callers were faster each time")]
    Contended,
    #[error("the record of task {id:?} is damaged")]
    Damaged { id: String },
    #[error("the record of task {id:?} cannot be written: {cause}")]
    Unwritable { id: String, cause: serde_json::Error },
    #[error("the answer of a change of tasks cannot be stored")]
    Answer,
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// The call that a change belongs to, and its answer for the tasks that it has changed. The answer is stored by the
/// commit of the change, so a call that is repeated finds it, or has changed nothing.
#[derive(Clone, Default)]
pub(crate) struct TaskCall(Option<(Call, TaskAnswer)>);

/// Makes the answer of the tasks.
type TaskAnswer = fn(&[Task]) -> StoredAnswer;

impl TaskCall {
    pub(crate) fn of(call: &Call, answer: TaskAnswer) -> TaskCall {
        TaskCall(Some((call.clone(), answer)))
    }

    fn answered(&self, commit: Commit, tasks: &[Task]) -> Result<Commit, TaskError> {
        match &self.0 {
            Some((call, answer)) => call.answered(commit, &answer(tasks)).ok_or(TaskError::Answer),
            None => Ok(commit),
        }
    }

    fn has_landed(&self) {
        self.0.iter().for_each(|(call, _)| call.has_landed());
    }
}

/// A task that is about to be put.
#[derive(Debug, Clone)]
pub(crate) struct NewTask {
    pub(crate) id: String,
    pub(crate) kind: String,
    pub(crate) input: Value,
    pub(crate) key: String,
    pub(crate) retry: TaskRetry,
    pub(crate) delay: Duration,
    pub(crate) completion: Option<String>,
    pub(crate) guard: Option<StoredGuard>,
}

impl NewTask {
    pub(crate) fn new(id: impl Into<String>, kind: impl Into<String>, input: Value) -> NewTask {
        let id: String = id.into();
        let (key, retry) = (key_of(&id), TaskRetry::default());
        NewTask { key, id, kind: kind.into(), input, retry, delay: Duration::ZERO, completion: None, guard: None }
    }

    /// The task is worth doing only as long as this right holds.
    pub(crate) fn guard(mut self, right: Option<&impl Right>) -> NewTask {
        self.guard = right.and_then(|right| StoredGuard::of(&right.check()));
        self
    }

    fn at(self, now: Timestamp) -> Task {
        let NewTask { id, kind, input, key, retry, delay, completion, guard } = self;
        let state = TaskState::Open { due: now.plus(delay) };
        let (attempt, token, failure, told) = (0, 0, None, false);
        Task { id, kind, input, key, put_at: now, retry, attempt, token, state, failure, completion, told, guard }
    }
}

/// An idempotency key that stands for this text: the text itself if it has visible ASCII characters only and is short
/// enough for a header, otherwise a hash of it.
pub(crate) fn key_of(text: &str) -> String {
    let is_key = (1..=255).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic());
    if is_key { text.into() } else { Sha256::digest(text).iter().map(|byte| format!("{byte:02x}")).collect() }
}

impl Default for TaskRetry {
    /// Five attempts, one second apart at first, and one minute at most.
    fn default() -> TaskRetry {
        TaskRetry { attempts: 5, pause_us: 1_000_000, longest_us: 60_000_000 }
    }
}

/// What became of a put.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Put {
    New(Task),
    /// It was put before. This is how it is now.
    Known(Task),
}

#[cfg(test)]
impl Put {
    pub(crate) fn task(self) -> Task {
        match self {
            Put::New(task) | Put::Known(task) => task,
        }
    }
}

/// The tasks of a store. Handles are cheap to clone; those of one process that serve the same store should be clones,
/// so that a worker that waits is woken at once.
#[derive(Clone)]
pub(crate) struct Tasks(Arc<Inner>);

struct Inner {
    store: Store,
    keys: OnceCell<TaskKeys>,
    waiting: Waiting,
    /// The tasks that a call of this process is about to take, so that two calls do not race for one.
    taking: Mutex<BTreeSet<String>>,
}

/// The tasks that a call is about to take.
struct Taking<'a> {
    tasks: &'a Tasks,
    ids: Vec<String>,
}

impl Taking<'_> {
    /// False if another call of this process is about to take it.
    fn add(&mut self, id: &str) -> bool {
        let is_new = self.tasks.0.taking.lock().insert(id.into());
        if is_new {
            self.ids.push(id.into());
        }
        is_new
    }
}

impl Drop for Taking<'_> {
    fn drop(&mut self) {
        let mut taking = self.tasks.0.taking.lock();
        self.ids.iter().for_each(|id| {
            taking.remove(id);
        });
    }
}

/// What a worker asks for.
#[derive(Debug, Clone)]
pub(crate) struct Take {
    pub(crate) kinds: Vec<String>,
    pub(crate) most: usize,
    pub(crate) lease: Lease,
}

impl Tasks {
    pub(crate) fn on(store: &Store) -> Tasks {
        let (waiting, taking) = (Waiting::default(), Mutex::default());
        Tasks(Arc::new(Inner { store: store.clone(), keys: OnceCell::new(), waiting, taking }))
    }

    pub(crate) fn waiting(&self) -> &Waiting {
        &self.0.waiting
    }

    fn now(&self) -> Timestamp {
        self.0.store.env().now()
    }

    async fn keys(&self) -> Result<&TaskKeys, StoreError> {
        self.0.keys.get_or_try_init(|| TaskKeys::declare(&self.0.store)).await
    }

    /// Puts a task, once: if there is one of this id, it must have the same kind, input and key. A guard is renewed.
    pub(crate) async fn put(&self, new: NewTask, call: &TaskCall) -> Result<Put, TaskError> {
        let keys = self.keys().await?;
        for _ in 0..TRIES {
            let view = self.0.store.view().await?;
            if let Some((known, item)) = self.find(keys, &view, &new.id).await? {
                if (&known.kind, &known.input, &known.key) != (&new.kind, &new.input, &new.key) {
                    return Err(TaskError::Exists { id: new.id });
                }
                if known.guard == new.guard || known.ended().is_some() {
                    return Ok(Put::Known(known));
                }
                let task = Task { guard: new.guard.clone(), ..known.clone() };
                if self.replace(keys, (&known, &item), &task, &TaskCall::default()).await? {
                    return Ok(Put::Known(task));
                }
                continue;
            }
            let task = new.clone().at(self.now());
            let record = keys.record(&task.id);
            let mut commit = Commit::new().absent(&record).put(&record, encoded(&task)?);
            for place in keys.places(&task) {
                commit = commit.put(&place, Bytes::new());
            }
            commit = call.answered(commit, std::slice::from_ref(&task))?;
            if self.0.store.commit(commit).await?.is_applied() {
                call.has_landed();
                self.0.waiting.arrived(&task.kind);
                return Ok(Put::New(task));
            }
        }
        Err(TaskError::Contended)
    }

    /// Takes tasks that are due, those that have been due for longest first. None if there are none.
    pub(crate) async fn take(&self, take: &Take, call: &TaskCall) -> Result<Vec<Task>, TaskError> {
        let keys = self.keys().await?;
        self.sweep().await?;
        for _ in 0..TRIES {
            let view = self.0.store.view().await?;
            let mut taking = Taking { tasks: self, ids: Vec::new() };
            let found = self.candidates(keys, &view, take, &mut taking).await?;
            if found.is_empty() {
                return Ok(Vec::new());
            }
            let (now, token) = (self.now(), view.generation().0);
            let (mut commit, mut taken) = (Commit::new(), Vec::with_capacity(found.len()));
            for (before, item) in found {
                let mut task = before.clone();
                task.take(&take.lease, token, now);
                commit = guarded(self.change_of(keys, commit, (&before, &item), &task)?, &task);
                taken.push(task);
            }
            if self.0.store.commit(call.answered(commit, &taken)?).await?.is_applied() {
                call.has_landed();
                return Ok(taken);
            }
        }
        Err(TaskError::Contended)
    }

    /// The tasks that can be taken. One whose guard is lost is cancelled instead.
    async fn candidates(
        &self,
        keys: &TaskKeys,
        view: &View,
        take: &Take,
        taking: &mut Taking<'_>,
    ) -> Result<Vec<(Task, Item)>, TaskError> {
        let now = self.now();
        let mut places = BTreeMap::new();
        // Those that other calls of this process are about to take come first, and are passed over.
        let most = take.most + self.0.taking.lock().len();
        for kind in &take.kinds {
            for (place, _) in view.scan(&keys.due(kind, now), Order::Ascending, most).await? {
                TaskKeys::open_at(kind, &place).map(|at| places.insert(at, ()));
            }
        }
        let (mut found, mut bytes) = (Vec::new(), 0);
        for (_, id) in places.into_keys() {
            if found.len() == take.most || bytes >= TAKEN_BYTES {
                break;
            }
            if !taking.add(&id) {
                continue;
            }
            let (task, item) = match self.find(keys, view, &id).await {
                Ok(Some(found)) => found,
                Ok(None) => continue,
                // Other tasks must not wait for an operator.
                Err(error @ TaskError::Damaged { .. }) => {
                    tracing::error!(%error, "a task is passed over");
                    continue;
                }
                Err(error) => return Err(error),
            };
            if !guard_holds(view, &task).await? {
                self.drop_unguarded(&id).await?;
            } else if task.is_due(now) && (found.is_empty() || bytes + item.value.len() <= TAKEN_BYTES) {
                bytes += item.value.len();
                found.push((task, item));
            }
        }
        Ok(found)
    }

    async fn drop_unguarded(&self, id: &str) -> Result<(), TaskError> {
        let reason = "the right that it depends on is lost";
        match self.change(id, &TaskCall::default(), |task, now| task.cancel(reason, now)).await {
            Err(TaskError::Ended { .. } | TaskError::NotFound { .. }) => Ok(()),
            cancelled => cancelled.map(drop),
        }
    }

    /// The worker is alive.
    pub(crate) async fn renew(
        &self,
        id: &str,
        token: u64,
        length: Option<Duration>,
        call: &TaskCall,
    ) -> Result<Task, TaskError> {
        self.change(id, call, |task, now| task.renew(token, length, now)).await
    }

    pub(crate) async fn complete(
        &self,
        id: &str,
        token: u64,
        output: &Value,
        call: &TaskCall,
    ) -> Result<Task, TaskError> {
        self.change(id, call, |task, now| task.complete(token, output, now)).await
    }

    /// An attempt has failed. `again` is `None` if no other attempt makes sense; a pause in it replaces that of the
    /// task.
    pub(crate) async fn fail(
        &self,
        id: &str,
        token: u64,
        failure: &TaskFailure,
        again: Option<Option<Duration>>,
        call: &TaskCall,
    ) -> Result<Task, TaskError> {
        self.change(id, call, |task, now| task.fail(token, failure, again, now)).await
    }

    pub(crate) async fn cancel(&self, id: &str, reason: &str, call: &TaskCall) -> Result<Task, TaskError> {
        self.change(id, call, |task, now| task.cancel(reason, now)).await
    }

    pub(crate) async fn get(&self, id: &str) -> Result<Task, TaskError> {
        let keys = self.keys().await?;
        let found = self.find(keys, &self.0.store.view().await?, id).await?;
        found.map(|(task, _)| task).ok_or_else(|| TaskError::NotFound { id: id.into() })
    }

    /// Waits until a task has ended.
    pub(crate) async fn ended(&self, id: &str) -> Result<Task, TaskError> {
        let mut change = self.0.waiting.watch(id);
        loop {
            let task = self.get(id).await?;
            if task.ended().is_some() {
                return Ok(task);
            }
            change.next().await;
        }
    }

    /// The tasks by id, after this one, and where the next page begins. It looks at ten times as many records as the
    /// page has, so that a filter that selects few of them does not take long.
    pub(crate) async fn list(
        &self,
        after: Option<&str>,
        limit: usize,
        is_wanted: impl Fn(&Task) -> bool,
    ) -> Result<(Vec<Task>, Option<String>), TaskError> {
        let keys = self.keys().await?;
        let view = self.0.store.view().await?;
        let mut range = keys.records();
        if let Some(after) = after {
            range = range.after(&keys.record(after));
        }
        let (page, looked) = (limit.max(100), limit.saturating_mul(10).max(1000));
        let (mut found, mut seen) = (Vec::new(), 0);
        loop {
            let records = view.scan(&range, Order::Ascending, page).await?;
            let is_last = records.len() < page;
            for (key, item) in records {
                let id = String::from_utf8_lossy(key.bytes()).into_owned();
                let task = Task::decode(&item.value).ok_or_else(|| TaskError::Damaged { id: id.clone() })?;
                if is_wanted(&task) {
                    found.push(task);
                }
                seen += 1;
                if found.len() == limit || seen == looked {
                    return Ok((found, Some(id)));
                }
                range = range.after(&key);
            }
            if is_last {
                return Ok((found, None));
            }
        }
    }

    async fn find(&self, keys: &TaskKeys, view: &View, id: &str) -> Result<Option<(Task, Item)>, TaskError> {
        // No task has an id that no key can have.
        if id.is_empty() || id.len() > self.0.store.limits().key_bytes {
            return Ok(None);
        }
        let Some(item) = view.get(&keys.record(id)).await? else { return Ok(None) };
        let task = Task::decode(&item.value).ok_or_else(|| TaskError::Damaged { id: id.into() })?;
        Ok(Some((task, item)))
    }

    /// Changes one task.
    async fn change(
        &self,
        id: &str,
        call: &TaskCall,
        change: impl Fn(&mut Task, Timestamp) -> Result<Change, TaskError>,
    ) -> Result<Task, TaskError> {
        let keys = self.keys().await?;
        for _ in 0..TRIES {
            let view = self.0.store.view().await?;
            let found = self.find(keys, &view, id).await?;
            let (before, item) = found.ok_or_else(|| TaskError::NotFound { id: id.into() })?;
            let mut task = before.clone();
            if change(&mut task, self.now())? == Change::Same {
                return Ok(before);
            }
            if depends_on_guard(&task) && !guard_holds(&view, &before).await? {
                self.drop_unguarded_boxed(id).await?;
                continue;
            }
            if self.replace(keys, (&before, &item), &task, call).await? {
                return Ok(task);
            }
        }
        Err(TaskError::Contended)
    }

    /// The one place where a change cancels a task by another change.
    fn drop_unguarded_boxed<'a>(
        &'a self,
        id: &'a str,
    ) -> std::pin::Pin<Box<dyn Future<Output = Result<(), TaskError>> + Send + 'a>> {
        Box::pin(self.drop_unguarded(id))
    }

    /// Replaces a record. False if another caller was faster.
    async fn replace(
        &self,
        keys: &TaskKeys,
        (before, item): (&Task, &Item),
        task: &Task,
        call: &TaskCall,
    ) -> Result<bool, TaskError> {
        let commit = self.change_of(keys, Commit::new(), (before, item), task)?;
        let mut commit = call.answered(commit, std::slice::from_ref(task))?;
        if depends_on_guard(task) {
            commit = guarded(commit, task);
        }
        let is_applied = self.0.store.commit(commit).await?.is_applied();
        if is_applied {
            call.has_landed();
            self.told_of(before, task);
        }
        Ok(is_applied)
    }

    /// Tells those in this process that wait for what has happened.
    fn told_of(&self, before: &Task, task: &Task) {
        match (&before.state, &task.state) {
            (TaskState::Open { .. }, TaskState::Open { .. }) => {}
            (_, TaskState::Open { due }) if *due <= self.now() => self.0.waiting.arrived(&task.kind),
            (_, TaskState::Open { .. }) => self.0.waiting.look_soon(),
            _ if task.ended().is_some() => self.0.waiting.has_ended(&task.id, task.completion.is_some()),
            _ => {}
        }
    }

    /// Adds the change of a record, and of its places in the orders, to a commit.
    fn change_of(
        &self,
        keys: &TaskKeys,
        commit: Commit,
        (before, item): (&Task, &Item),
        task: &Task,
    ) -> Result<Commit, TaskError> {
        let record = keys.record(&task.id);
        let (old, new): (BTreeSet<Key>, BTreeSet<Key>) =
            (keys.places(before).into_iter().collect(), keys.places(task).into_iter().collect());
        let mut commit = commit.at_rev(&record, item.rev).put(&record, encoded(task)?);
        for place in old.difference(&new) {
            commit = commit.delete(place);
        }
        for place in new.difference(&old) {
            commit = commit.put(place, Bytes::new());
        }
        Ok(commit)
    }

    /// Takes leases away that are over. Returns how many.
    pub(crate) async fn sweep(&self) -> Result<usize, TaskError> {
        let keys = self.keys().await?;
        let view = self.0.store.view().await?;
        let over = view.scan(&keys.over(self.now()), Order::Ascending, SWEPT).await?;
        let mut count = 0;
        for id in over.iter().filter_map(|(place, _)| TaskKeys::timed_id(place)) {
            match self.change(&id, &TaskCall::default(), |task, now| Ok(task.expire(now))).await {
                Ok(_) => count += 1,
                Err(TaskError::NotFound { .. } | TaskError::Contended) => {}
                Err(error @ TaskError::Damaged { .. }) => tracing::error!(%error, "a lease is not taken away"),
                Err(error) => return Err(error),
            }
        }
        Ok(count)
    }
}

/// True if a task in this state may only be stored while its guard holds: it is being done, or was.
fn depends_on_guard(task: &Task) -> bool {
    matches!(task.state, TaskState::Leased { .. } | TaskState::Done { .. })
}

fn guarded(commit: Commit, task: &Task) -> Commit {
    match &task.guard {
        Some(guard) => commit.at_rev(&guard.key(), guard.rev()),
        None => commit,
    }
}

async fn guard_holds(view: &View, task: &Task) -> Result<bool, StoreError> {
    let Some(guard) = &task.guard else { return Ok(true) };
    Ok(view.get(&guard.key()).await?.is_some_and(|item| item.rev == guard.rev()))
}

fn encoded(task: &Task) -> Result<Bytes, TaskError> {
    task.encode().map_err(|cause| TaskError::Unwritable { id: task.id.clone(), cause })
}
