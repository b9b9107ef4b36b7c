//! The engine: owns executions, starts them, finds them again after a restart, and lets go of those that wait.

use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::task::AbortHandle;

use crate::store::{Check, Commit, Key, Order, Rev, Space, SpaceSpec, Store, Timestamp};
use crate::workflow::ctx::{Ctx, panicked};
use crate::workflow::definition::{Definition, Running, Workflow};
use crate::workflow::record::{Execution, Status, failure_text, timer_key};
use crate::workflow::run::{Run, Stop};
use crate::workflow::timers::{self, Timers};
use crate::workflow::{ExecutionId, Failure, Result, WorkflowError};

/// How many shards executions are spread over. Each has an owner, whose commits check that it still is.
const SHARDS: u64 = 64;

/// How many executions are found at once when the engine starts.
const BATCH: usize = 256;

/// Runs workflows.
///
/// Handles are cheap to clone. When the last one is dropped, or [`Engine::stop`] is called, executions stop where they
/// are; the next engine on the same store goes on with them.
#[derive(Clone)]
pub struct Engine {
    pub(crate) inner: Arc<Inner>,
    _stop: Arc<StopOnDrop>,
}

struct StopOnDrop(Arc<Inner>);

impl Drop for StopOnDrop {
    fn drop(&mut self) {
        self.0.stop();
    }
}

/// An engine that is about to start.
#[must_use = "an engine does nothing until it is started"]
pub struct EngineBuilder {
    source: Source,
    definitions: Vec<Arc<Definition>>,
    on_step: Option<OnStep>,
}

/// Told of every attempt at a step, before its body runs.
pub(crate) type OnStep = Arc<dyn Fn(&ExecutionId, &str) + Send + Sync>;

enum Source {
    Directory(PathBuf),
    Store(Store),
}

pub(crate) struct Inner {
    pub(crate) store: Store,
    pub(crate) spaces: Spaces,
    definitions: HashMap<String, Arc<Definition>>,
    pub(crate) on_step: Option<OnStep>,
    /// The rev of each shard's record, which tells that this engine owns it.
    shards: Vec<(Key, Rev)>,
    /// Executions in memory.
    residents: Mutex<HashMap<ExecutionId, Option<AbortHandle>>>,
    /// Those who wait for an end.
    waiting: Mutex<HashMap<ExecutionId, Arc<Notify>>>,
    /// Told whenever an execution was stored or has left memory.
    begun: Arc<Notify>,
    /// Executions that cannot run here as things are, and why: others need not wait for that.
    set_aside: Mutex<BTreeMap<ExecutionId, String>>,
    pub(crate) timers: Arc<Timers>,
    waker: Mutex<Option<AbortHandle>>,
    stopped: std::sync::atomic::AtomicBool,
}

/// Where everything is kept.
pub(crate) struct Spaces {
    /// id → execution
    pub(crate) executions: Space,
    /// id, place → entry
    pub(crate) journal: Space,
    /// Ids of executions that were running at their last commit.
    pub(crate) active: Space,
    /// due time, id
    pub(crate) timers: Space,
    /// id → reason
    pub(crate) parked: Space,
    /// time of the end, id
    pub(crate) ended: Space,
    /// number → owner
    shards: Space,
}

impl Spaces {
    async fn declare(store: &Store) -> Result<Spaces> {
        let space = |name: &'static str| store.space(SpaceSpec::new(name));
        Ok(Spaces {
            executions: space("workflow.executions").await?,
            journal: space("workflow.journal").await?,
            active: space("workflow.active").await?,
            timers: space("workflow.timers").await?,
            parked: space("workflow.parked").await?,
            ended: space("workflow.ended").await?,
            shards: space("workflow.shards").await?,
        })
    }
}

impl EngineBuilder {
    /// Makes a workflow known, so that its executions can run here.
    pub fn register<I, O>(mut self, workflow: &Workflow<I, O>) -> EngineBuilder {
        self.definitions.push(workflow.definition.clone());
        self
    }

    /// Has every attempt at a step told, by the execution's id and the step's name, before its body runs.
    pub fn on_step(mut self, told: impl Fn(&ExecutionId, &str) + Send + Sync + 'static) -> EngineBuilder {
        self.on_step = Some(Arc::new(told));
        self
    }

    /// Starts the engine: it goes on with everything that was running, and wakes what waits when it is due.
    pub async fn start(self) -> Result<Engine> {
        let store = match self.source {
            Source::Directory(directory) => Store::open(directory).await?,
            Source::Store(store) => store,
        };
        let mut definitions = HashMap::new();
        for definition in self.definitions {
            check_name("the name of a workflow", &definition.name)?;
            let name = definition.name.clone();
            if definitions.insert(name.clone(), definition).is_some() {
                return Err(WorkflowError::RegisteredTwice { name });
            }
        }
        let spaces = Spaces::declare(&store).await?;
        let shards = own_shards(&store, &spaces.shards).await?;
        let inner = Arc::new(Inner {
            store,
            spaces,
            definitions,
            on_step: self.on_step,
            shards,
            residents: Mutex::default(),
            waiting: Mutex::default(),
            begun: Arc::default(),
            set_aside: Mutex::default(),
            timers: Arc::default(),
            waker: Mutex::default(),
            stopped: Default::default(),
        });
        inner.recover().await?;
        let waker = tokio::spawn(timers::wake(Arc::downgrade(&inner)));
        *inner.waker.lock() = Some(waker.abort_handle());
        Ok(Engine { _stop: Arc::new(StopOnDrop(inner.clone())), inner })
    }
}

/// Becomes the owner of all shards: whoever was it before is refused from now on.
async fn own_shards(store: &Store, space: &Space) -> Result<Vec<(Key, Rev)>> {
    let keys: Vec<Key> = (0..SHARDS).map(|shard| space.key(shard.to_be_bytes())).collect();
    let owner = store.env().uuid().to_string();
    let commit = keys.iter().fold(Commit::new(), |commit, key| commit.put(key, owner.clone()));
    let receipt = store.commit(commit).await?.applied().map_err(|_| WorkflowError::Stopped)?;
    Ok(keys.into_iter().zip(receipt.revs.into_iter().map(Option::unwrap_or_default)).collect())
}

pub(crate) fn check_name(what: &'static str, name: &str) -> Result<()> {
    let refuse = |reason| Err(WorkflowError::Name { what, name: name.into(), reason });
    match name.len() {
        0 => refuse("it is empty"),
        513.. => refuse("it is longer than 512 bytes"),
        _ => Ok(()),
    }
}

impl Engine {
    /// An engine on a data directory, which is created if it is missing.
    pub fn open(directory: impl AsRef<Path>) -> EngineBuilder {
        EngineBuilder { source: Source::Directory(directory.as_ref().into()), definitions: Vec::new(), on_step: None }
    }

    /// An engine on a store, beside other things in it.
    pub fn on(store: &Store) -> EngineBuilder {
        EngineBuilder { source: Source::Store(store.clone()), definitions: Vec::new(), on_step: None }
    }

    /// The store below.
    pub fn store(&self) -> &Store {
        &self.inner.store
    }

    /// Stops all executions where they are. The next engine on the same store goes on with them.
    pub fn stop(&self) {
        self.inner.stop();
    }

    /// How many executions are in memory.
    pub fn residents(&self) -> usize {
        self.inner.residents.lock().len()
    }

    /// The executions that wait for an operator, with the reasons.
    pub async fn parked(&self) -> Result<Vec<(ExecutionId, String)>> {
        let view = self.inner.store.view().await?;
        let found = view.scan(&self.inner.spaces.parked.all(), Order::Ascending, usize::MAX).await?;
        let set_aside = self.inner.set_aside.lock().clone();
        let parked = found.into_iter().map(|(key, item)| {
            (String::from_utf8_lossy(key.bytes()).as_ref().into(), String::from_utf8_lossy(&item.value).into_owned())
        });
        Ok(parked.chain(set_aside).collect())
    }

    /// Lets a parked execution go on, by the code that is registered now.
    pub async fn resume(&self, id: impl Into<ExecutionId>) -> Result<()> {
        let id = id.into();
        self.unpark(&id, Status::Running).await?;
        self.inner.pick_up(&id).await
    }

    /// Takes an execution that waits into memory at once, to see whether it can go on; if it has to wait, it leaves.
    pub async fn wake(&self, id: impl Into<ExecutionId>) -> Result<()> {
        self.inner.pick_up(&id.into()).await
    }

    /// Ends a parked execution as failed.
    pub async fn terminate(&self, id: impl Into<ExecutionId>, reason: &str) -> Result<()> {
        let id = id.into();
        let failure = Failure::new(format!("it was terminated: {reason}"));
        self.unpark(&id, Status::Failed(failure_text(&failure))).await?;
        self.inner.ended(&id);
        Ok(())
    }

    async fn unpark(&self, id: &ExecutionId, status: Status) -> Result<()> {
        let inner = &self.inner;
        let (execution, rev) = inner.read(id).await?.ok_or_else(|| WorkflowError::NotFound { id: id.clone() })?;
        let Status::Parked(_) = execution.status else { return Err(WorkflowError::NotParked { id: id.clone() }) };
        let key = inner.spaces.executions.key(id.as_bytes());
        let mut commit = Commit::new().check(inner.shard_check(id)).at_rev(&key, rev);
        commit = commit.delete(&inner.spaces.parked.key(id.as_bytes()));
        if status == Status::Running {
            commit = commit.put(&inner.spaces.active.key(id.as_bytes()), Vec::new());
        }
        if status.is_terminal() {
            commit = commit.put(&inner.spaces.ended.key(timer_key(inner.store.env().now(), id)), Vec::new());
        }
        commit = commit.put(&key, Execution { status, ..execution }.encode());
        let outcome = inner.store.commit(commit).await?;
        outcome.applied().map(|_| ()).map_err(|_| WorkflowError::NotParked { id: id.clone() })
    }
}

impl std::fmt::Debug for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").finish_non_exhaustive()
    }
}

/// How an execution's stay in memory ended.
enum Ended {
    Finished(std::result::Result<String, Failure>),
    Panicked(Failure),
    TimedOut,
    Stopped,
}

impl Inner {
    fn stop(&self) {
        self.stopped.store(true, std::sync::atomic::Ordering::SeqCst);
        if let Some(waker) = self.waker.lock().take() {
            waker.abort();
        }
        let residents = std::mem::take(&mut *self.residents.lock());
        let mut residents: Vec<_> = residents.into_iter().collect();
        residents.sort_by(|a, b| a.0.cmp(&b.0));
        residents.into_iter().filter_map(|(_, task)| task).for_each(|task| task.abort());
        let waiting: Vec<_> = std::mem::take(&mut *self.waiting.lock()).into_values().collect();
        waiting.iter().for_each(|waiting| waiting.notify_waiters());
        self.begun.notify_waiters();
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(std::sync::atomic::Ordering::SeqCst)
    }

    pub(crate) fn timers_handle(&self) -> Arc<Timers> {
        self.timers.clone()
    }

    /// That this engine owns the execution.
    pub(crate) fn shard_check(&self, id: &ExecutionId) -> Check {
        let shard = xxhash_rust::xxh3::xxh3_64(id.as_bytes()) % SHARDS;
        let (key, rev) = &self.shards[shard as usize];
        Check::AtRev(key.clone(), *rev)
    }

    pub(crate) fn definition(&self, name: &str) -> Option<&Arc<Definition>> {
        self.definitions.get(name)
    }

    pub(crate) async fn read(&self, id: &ExecutionId) -> Result<Option<(Execution, Rev)>> {
        let item = self.store.view().await?.get(&self.spaces.executions.key(id.as_bytes())).await?;
        let Some(item) = item else { return Ok(None) };
        let damaged = || WorkflowError::corrupt(format!("execution {id:?}"));
        Ok(Some((Execution::decode(&item.value).ok_or_else(damaged)?, item.rev)))
    }

    /// Goes on with everything that was running.
    async fn recover(self: &Arc<Inner>) -> Result<()> {
        let mut rest = self.spaces.active.all();
        loop {
            let found = self.store.view().await?.scan(&rest, Order::Ascending, BATCH).await?;
            let Some((last, _)) = found.last() else { return Ok(()) };
            rest = rest.after(last);
            for (key, _) in &found {
                let Ok(id) = std::str::from_utf8(key.bytes()) else { continue };
                self.pick_up(&id.into()).await?;
            }
        }
    }

    /// Takes an execution into memory, if it is not there and is to run.
    pub(crate) async fn pick_up(self: &Arc<Inner>, id: &ExecutionId) -> Result<()> {
        if self.is_stopped() || self.residents.lock().contains_key(id) {
            return Ok(());
        }
        let found = match self.read(id).await {
            Err(error @ WorkflowError::Corrupt { .. }) => {
                self.set_aside.lock().insert(id.clone(), error.to_string());
                return Ok(());
            }
            found => found?,
        };
        let Some((execution, rev)) = found else { return Ok(()) };
        if execution.status.is_terminal() || matches!(execution.status, Status::Parked(_)) {
            return Ok(());
        }
        let Some(definition) = self.definition(&execution.workflow).cloned() else {
            let reason = format!("workflow {:?} is not registered", execution.workflow);
            self.set_aside.lock().insert(id.clone(), reason);
            return Ok(());
        };
        self.spawn(Arc::new(Run::stored(self.clone(), id.clone(), execution, rev)), definition);
        Ok(())
    }

    /// Runs an execution in a task of its own, unless it runs already.
    pub(crate) fn spawn(self: &Arc<Inner>, run: Arc<Run>, definition: Arc<Definition>) -> bool {
        let id = run.id.clone();
        let mut residents = self.residents.lock();
        if self.is_stopped() || residents.contains_key(&id) {
            return false;
        }
        residents.insert(id.clone(), None);
        let task = tokio::spawn(drive(run, definition));
        residents.insert(id, Some(task.abort_handle()));
        true
    }

    /// Tells those who wait that an execution has come to its end.
    pub(crate) fn ended(&self, id: &ExecutionId) {
        if let Some(waiting) = self.waiting.lock().remove(id) {
            waiting.notify_waiters();
        }
    }

    /// Where to wait for executions to be stored.
    pub(crate) fn begun(&self) -> Arc<Notify> {
        self.begun.clone()
    }

    /// Where to wait for an execution's end.
    pub(crate) fn waiting(&self, id: &ExecutionId) -> Arc<Notify> {
        self.waiting.lock().entry(id.clone()).or_default().clone()
    }
}

/// An execution's stay in memory.
async fn drive(run: Arc<Run>, definition: Arc<Definition>) {
    let ended = live(&run, &definition).await;
    let inner = run.engine.clone();
    settle(&run, ended).await;
    inner.residents.lock().remove(&run.id);
    inner.begun.notify_waiters();
    inner.ended(&run.id);
}

async fn live(run: &Arc<Run>, definition: &Definition) -> Ended {
    let execution = run.execution();
    let now = run.env().now();
    let left = execution.deadline_us.map(|deadline| Duration::from_micros(deadline.saturating_sub(now.0)));
    if left.is_some_and(|left| left.is_zero()) {
        return Ended::TimedOut;
    }
    let ctx = Ctx { run: run.clone() };
    let begin = || (definition.begin)(ctx, &execution.input);
    let mut running: Running = match std::panic::catch_unwind(AssertUnwindSafe(begin)) {
        Ok(Ok(running)) => running,
        Ok(Err(failure)) => return Ended::Finished(Err(failure)),
        Err(panic) => return Ended::Panicked(panicked(&*panic)),
    };
    let mut deadline = left.map(|left| run.env().sleep(left));
    let mut stopped = std::pin::pin!(run.until_stopped());
    std::future::poll_fn(|context| {
        match std::panic::catch_unwind(AssertUnwindSafe(|| running.as_mut().poll(context))) {
            Ok(Poll::Ready(ended)) => return Poll::Ready(Ended::Finished(ended)),
            Ok(Poll::Pending) => {}
            Err(panic) => return Poll::Ready(Ended::Panicked(panicked(&*panic))),
        }
        if stopped.as_mut().poll(context).is_ready() {
            return Poll::Ready(Ended::Stopped);
        }
        match deadline.as_mut().map(|deadline| deadline.as_mut().poll(context)) {
            Some(Poll::Ready(())) => Poll::Ready(Ended::TimedOut),
            _ => Poll::Pending,
        }
    })
    .await
}

/// Commits how it ended.
async fn settle(run: &Run, ended: Ended) {
    let status = match ended {
        Ended::Stopped => match run.stop() {
            Some(Stop::Parked(reason)) => Status::Parked(reason),
            _ => return,
        },
        Ended::Panicked(failure) => Status::Parked(failure.message().to_string()),
        Ended::TimedOut => Status::TimedOut,
        Ended::Finished(result) => match run.peek().await {
            Ok(None) => match result {
                Ok(output) => Status::Completed(output),
                Err(failure) => Status::Failed(failure_text(&failure)),
            },
            Ok(Some(entry)) => Status::Parked(format!(
                "the code has ended, and the journal goes on with {} {:?}",
                entry.kind, entry.name
            )),
            Err(Stop::Parked(reason)) => Status::Parked(reason),
            Err(stop) => return run.set_stop(stop),
        },
    };
    if let Err(stop) = run.commit(Some((status, None))).await {
        run.set_stop(stop);
    }
}

/// When an execution is to have ended.
pub(crate) fn deadline(definition: &Definition, now: Timestamp) -> Option<u64> {
    definition.timeout.map(|timeout| now.plus(timeout).0)
}
