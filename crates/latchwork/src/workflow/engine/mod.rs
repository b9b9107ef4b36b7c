//! The engine: owns executions, starts them, loads them after a restart, and evicts those that wait.

pub(crate) mod deadlock;
pub(crate) mod elsewhere;
pub(crate) mod finally;
pub(crate) mod handle;
pub(crate) mod listen;
pub(crate) mod metrics;
pub(crate) mod post;
pub(crate) mod recover;
pub(crate) mod rehearsal;
pub(crate) mod remove;
pub(crate) mod spans;
pub(crate) mod start;
pub(crate) mod supersede;

use std::any::Any;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc};
use tokio::task::AbortHandle;

use crate::entity::Entities;
use crate::lane::{Lanes, OnceSpace};
use crate::lock;
use crate::lock::service::Service;
use crate::node::alarm::{self, Alarms};
use crate::node::{Node, NodeEvents, NodeOptions};
use crate::state::States;
use crate::store::{Item, Key, Rev, Space, SpaceSpec, Store, StoreError};
use crate::workflow::admission::stored::{ADMISSION, GATES, Gates};
use crate::workflow::admission::{self, Admissions};
use crate::workflow::definition::{Definition, Definitions, Workflow};
use crate::workflow::engine::deadlock::Suspect;
use crate::workflow::engine::listen::Listeners;
use crate::workflow::engine::metrics::Metrics;
use crate::workflow::engine::rehearsal::Rehearsal;
use crate::workflow::run::unbegun::Unbegun;
use crate::workflow::run::{Run, Stop};
use crate::workflow::schedule::keeper::{FireSchedules, Scheduling};
use crate::workflow::schedule::stored::ScheduleSpaces;
use crate::workflow::stored::kept::Kept;
use crate::workflow::stored::listed::{LISTED, Lists, RUNNING};
use crate::workflow::stored::record::{Execution, decode_execution};
use crate::workflow::{ExecutionId, Result, WorkflowError};

/// Runs workflows.
///
/// Handles are cheap to clone. When the last one is dropped, or [`Engine::stop`] is called, executions stop where they
/// are; the next engine on the same store continues them.
#[derive(Clone)]
pub struct Engine {
    pub(crate) inner: Arc<EngineInner>,
    _stop: Arc<StopEngineOnDrop>,
}

struct StopEngineOnDrop(Arc<EngineInner>);

impl Drop for StopEngineOnDrop {
    fn drop(&mut self) {
        self.0.stop_and_leave();
    }
}

/// Stops an engine that still exists when its runtime ends: none of its tasks would run any more.
struct StopWithRuntime(Weak<EngineInner>);

impl StopWithRuntime {
    /// Never ends by itself.
    async fn wait(self) {
        std::future::pending().await
    }
}

impl Drop for StopWithRuntime {
    fn drop(&mut self) {
        if let Some(inner) = self.0.upgrade().filter(|inner| !inner.is_stopped()) {
            inner.stop();
        }
    }
}

/// An engine that is about to start.
#[must_use = "an engine does nothing until it is started"]
pub struct EngineBuilder {
    pub(crate) source: StoreSource,
    name: Option<Arc<str>>,
    pub(crate) definitions: Vec<Arc<Definition>>,
    on_step: Option<OnStep>,
    most_crashes: u32,
    rehearsal: Rehearsal,
    idle: bool,
    node: Option<NodeOptions>,
}

/// Called for every attempt at a step, before its body runs.
pub(crate) type OnStep = Arc<dyn Fn(&ExecutionId, &str) + Send + Sync>;

#[derive(Clone)]
pub(crate) enum StoreSource {
    Directory(PathBuf),
    Store(Store),
}

impl StoreSource {
    /// The store, for reading only. `None` if there is no data directory yet.
    pub(crate) async fn to_read(&self) -> Result<Option<Store>> {
        match self {
            StoreSource::Store(store) => Ok(Some(store.clone())),
            StoreSource::Directory(directory) => match Store::open_read_only(directory).await {
                Err(StoreError::NotAStore { .. }) => Ok(None),
                found => Ok(Some(found?)),
            },
        }
    }
}

pub(crate) struct EngineInner {
    /// What its spans and log lines call it.
    pub(crate) name: Option<Arc<str>>,
    pub(crate) store: Store,
    /// True if the engine has opened the store.
    pub(crate) owns_store: bool,
    pub(crate) spaces: EngineSpaces,
    pub(crate) states: States,
    pub(crate) entities: Entities,
    pub(crate) definitions: Definitions,
    pub(crate) on_step: Option<OnStep>,
    /// How often in a row an execution may crash the process before it is parked.
    pub(crate) most_crashes: u32,
    pub(crate) rehearsal: Rehearsal,
    /// True if no execution is loaded.
    pub(crate) idle: bool,
    pub(crate) node: Arc<Node>,
    /// Executions in memory.
    pub(crate) residents: Mutex<HashMap<ExecutionId, Resident>>,
    /// Executions that are about to be loaded for the first time.
    pub(crate) unbegun: Unbegun,
    /// The callers that wait for news of executions.
    listening: Listeners,
    /// Messages to the same execution share commits.
    pub(crate) lanes: Lanes<EngineInner>,
    /// The answers of changes under idempotency keys.
    pub(crate) once: OnceSpace,
    pub(crate) locks: Arc<Service>,
    /// Decides which starts run.
    pub(crate) admissions: Arc<Admissions>,
    /// Executions that have begun to wait for a lock.
    pub(crate) suspects: mpsc::UnboundedSender<Suspect>,
    pub(crate) metrics: Metrics,
    /// Notified whenever an execution was stored or has left memory.
    pub(crate) begun: Notify,
    /// Executions that cannot run here at present, and why. They do not stop the other executions.
    pub(crate) set_aside: Mutex<BTreeMap<ExecutionId, String>>,
    /// Executions whose locks were taken away while they were in memory.
    pub(crate) forced: Mutex<BTreeSet<ExecutionId>>,
    pub(crate) timers: Arc<Alarms>,
    pub(crate) removals: Arc<Alarms>,
    pub(crate) scheduling: Scheduling,
    /// True once every running execution has been found.
    pub(crate) found: tokio::sync::watch::Sender<bool>,
    /// Executions of this node of which callers on other nodes want news, and the channel to the task that tells them.
    pub(crate) remote: Mutex<BTreeSet<ExecutionId>>,
    pub(crate) news: mpsc::UnboundedSender<ExecutionId>,
    /// No news that no commit has told came with a later generation.
    pub(crate) untold: AtomicU64,
    /// What the layer above serves on this engine, at most one at a time. This layer does not know what it is.
    pub(crate) above: Mutex<Option<Weak<dyn Any + Send + Sync>>>,
}

/// An execution in memory.
pub(crate) struct Resident {
    pub(crate) task: AbortHandle,
    pub(crate) run: Arc<Run>,
    /// True if it has to be loaded again when it leaves memory, because it may have missed a change.
    pub(crate) missed: bool,
}

/// The names of the spaces.
pub(crate) const EXECUTIONS: &str = "workflow.executions";
pub(crate) const JOURNAL: &str = "workflow.journal";
pub(crate) const KEPT: &str = "workflow.kept";
pub(crate) const TIMERS: &str = "workflow.timers";
pub(crate) const REMOVALS: &str = "workflow.removals";
pub(crate) const REVIEWS: &str = "workflow.reviews";
const KEYS: &str = "workflow.keys";

/// The names of all spaces, in the order in which they are declared.
const NAMES: [&str; 11] =
    [EXECUTIONS, JOURNAL, LISTED, RUNNING, KEPT, TIMERS, REMOVALS, KEYS, REVIEWS, ADMISSION, GATES];

/// The spaces of an engine.
#[derive(Clone)]
pub(crate) struct EngineSpaces {
    /// id → execution
    pub(crate) executions: Space,
    /// id, run, place → entry
    pub(crate) journal: Space,
    pub(crate) lists: Lists,
    /// id, kind → the other records of an execution
    pub(crate) kept: Space,
    /// shard, due time, id → how often it was loaded for it without making progress
    pub(crate) timers: Space,
    /// shard, due time, id → what is to be removed
    pub(crate) removals: Space,
    /// workflow, idempotency key → the execution started under it
    pub(crate) keys: Space,
    /// workflow, name, token, id → nothing: a review that is open. `None` in a store of an earlier program.
    pub(crate) reviews: Option<Space>,
    /// `None` in a store of an earlier program.
    pub(crate) limits: Option<Gates>,
}

impl EngineSpaces {
    pub(crate) async fn declare(store: &Store) -> Result<EngineSpaces> {
        // No check uses the rev of a removed record, so removed keys leave nothing behind; gates are the exception.
        for name in NAMES {
            let spec = SpaceSpec::new(name);
            store.space(if name == GATES { spec } else { spec.keys_used_once() }).await?;
        }
        EngineSpaces::find(store).await?.expect("all spaces were declared").marked(store).await
    }

    /// The stored limits, in a store that an engine has opened.
    pub(crate) fn gates(&self) -> &Gates {
        self.limits.as_ref().expect("an engine has declared all spaces")
    }

    /// The spaces of a store. None if no engine has ever opened it.
    pub(crate) async fn find(store: &Store) -> Result<Option<EngineSpaces>> {
        let known = store.spaces().await?;
        let space = |name: &str| known.iter().find(|space| space.name() == name).cloned();
        let find = || {
            Some(EngineSpaces {
                executions: space(EXECUTIONS)?,
                journal: space(JOURNAL)?,
                lists: Lists { listed: space(LISTED)?, running: space(RUNNING)? },
                kept: space(KEPT)?,
                timers: space(TIMERS)?,
                removals: space(REMOVALS)?,
                keys: space(KEYS)?,
                reviews: space(REVIEWS),
                limits: space(GATES).zip(space(ADMISSION)).map(|(gates, beside)| Gates { gates, beside }),
            })
        };
        Ok(find())
    }
}

impl EngineBuilder {
    fn new(source: StoreSource) -> EngineBuilder {
        let (definitions, rehearsal) = (Vec::new(), Rehearsal::default());
        let (name, on_step, node) = (None, None, None);
        EngineBuilder { source, name, definitions, on_step, most_crashes: 10, rehearsal, idle: false, node }
    }

    /// The name of the engine in its spans, for a program that runs several. It is not stored.
    ///
    /// ```
    /// # use latchwork::store::Store;
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(store: &Store) -> Result<()> {
    /// let engine = Engine::on(store).name("billing").start().await?;
    /// assert_eq!(engine.name(), Some("billing"));
    /// # Ok(()) }
    /// ```
    pub fn name(mut self, name: impl Into<Arc<str>>) -> EngineBuilder {
        self.name = Some(name.into());
        self
    }

    /// Registers a workflow, so that its executions can run here.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::store::Store;
    /// # use latchwork::workflow::{Ctx, Engine, workflow};
    /// let double = workflow("double").run(async |_: Ctx, n: u64| Ok(n * 2));
    /// let engine = Engine::on(&Store::memory().await?).register(&double).start().await?;
    /// assert_eq!(engine.start(&double, 21).await?.result().await?, 42);
    /// # Ok(()) }
    /// ```
    pub fn register<I, O>(mut self, workflow: &Workflow<I, O>) -> EngineBuilder {
        self.definitions.push(workflow.definition.clone());
        self.definitions.extend(workflow.definition.finalizer.get().cloned());
        self
    }

    /// Calls `told` with the execution's id and the step's name for every attempt at a step, before its body runs.
    ///
    /// ```
    /// # use latchwork::store::Store;
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(store: &Store) -> Result<()> {
    /// let engine = Engine::on(store).on_step(|id, step| println!("{id}: {step}")).start().await?;
    /// # Ok(()) }
    /// ```
    pub fn on_step(mut self, told: impl Fn(&ExecutionId, &str) + Send + Sync + 'static) -> EngineBuilder {
        self.on_step = Some(Arc::new(told));
        self
    }

    /// Makes the engine run as a test requests.
    #[cfg(feature = "testing")]
    pub(crate) fn rehearse(mut self, ask: impl FnOnce(&mut Rehearsal)) -> EngineBuilder {
        ask(&mut self.rehearsal);
        self
    }

    /// How often in a row an execution may crash the process before it is parked; the default is ten. The engine counts
    /// how often the execution was loaded after a restart without having made progress since the restart before. So
    /// that other executions are not counted with the cause of a crash, the engine loads suspects a few at a time, and
    /// in the end alone.
    ///
    /// ```
    /// # use latchwork::store::Store;
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(store: &Store) -> Result<()> {
    /// let engine = Engine::on(store).most_crashes(3).start().await?;
    /// # Ok(()) }
    /// ```
    pub fn most_crashes(mut self, crashes: u32) -> EngineBuilder {
        self.most_crashes = crashes.max(1);
        self
    }

    /// Shares the store with other engines: they divide the executions among them. An engine on PostgreSQL always does;
    /// this sets the name of its node, or its lease. See [`node`](crate::node).
    ///
    /// ```
    /// # use latchwork::node::NodeOptions;
    /// # use latchwork::store::Store;
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(store: &Store) -> Result<()> {
    /// let engine = Engine::on(store).node(NodeOptions::new().name("billing-1")).start().await?;
    /// # Ok(()) }
    /// ```
    pub fn node(mut self, options: NodeOptions) -> EngineBuilder {
        self.node = Some(options);
        self
    }

    /// Makes the engine load no execution, wake nothing and remove nothing: for operators who change something, such as
    /// a lock, and end. Executions that such a change makes running are recorded as running, and run in the next
    /// engine.
    ///
    /// ```
    /// # use latchwork::store::Store;
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(store: &Store) -> Result<()> {
    /// let operator = Engine::on(store).idle().start().await?;
    /// operator.locks().force_release("printer", 7, "its holder hangs").await?;
    /// # Ok(()) }
    /// ```
    pub fn idle(mut self) -> EngineBuilder {
        self.idle = true;
        self
    }

    /// Starts the engine: it continues everything that was running, and wakes waiting executions when they are due.
    ///
    /// ```
    /// # use latchwork::store::Store;
    /// # use latchwork::workflow::{Engine, Result, Workflow};
    /// # async fn example(store: &Store, order: Workflow<u32, u32>) -> Result<()> {
    /// let engine = Engine::on(store).register(&order).start().await?;
    /// # Ok(()) }
    /// ```
    pub async fn start(self) -> Result<Engine> {
        tokio::runtime::Handle::try_current().map_err(|_| WorkflowError::NoRuntime)?;
        let (store, owns_store) = match self.source {
            StoreSource::Directory(directory) => (Store::open(directory).await?, true),
            StoreSource::Store(store) => (store, false),
        };
        let definitions = Definitions::new(self.definitions)?;
        let metrics = Metrics::new(definitions.names());
        let (spaces, schedules) = (EngineSpaces::declare(&store).await?, ScheduleSpaces::declare(&store).await?);
        let (states, entities) = (States::on(&store).await?, Entities::on(&store).await?);
        // An engine that only operates owns no shards and replaces no other engine.
        let node = match self.node.or(store.is_shared().then(NodeOptions::new)) {
            _ if self.idle => Node::idle(&store).await?,
            Some(options) => Node::member(&store, options, definitions.versions()).await?,
            None => Node::owner(&store).await?,
        };
        // Other nodes must not count on a node that does not come to work.
        let locks = Service::on(&node).await.inspect_err(|_| node.abandon())?;
        let admissions = Admissions::new(&node);
        let (timers, removals) = (Alarms::recovered(&node, &spaces.timers), Alarms::new(&node, &spaces.removals));
        let scheduling = Scheduling::new(&node, schedules);
        let (suspects, suspected) = mpsc::unbounded_channel();
        let (news, told) = mpsc::unbounded_channel();
        let inner = Arc::new(EngineInner {
            name: self.name,
            node,
            store,
            owns_store,
            spaces,
            states,
            entities,
            definitions,
            on_step: self.on_step,
            most_crashes: self.most_crashes,
            rehearsal: self.rehearsal,
            idle: self.idle,
            residents: Mutex::default(),
            unbegun: Unbegun::default(),
            listening: Mutex::default(),
            lanes: Lanes::default(),
            once: OnceSpace::default(),
            locks,
            admissions,
            suspects,
            metrics,
            begun: Notify::new(),
            set_aside: Mutex::default(),
            forced: Mutex::default(),
            timers,
            removals,
            scheduling,
            found: tokio::sync::watch::Sender::new(self.idle),
            remote: Mutex::default(),
            news,
            untold: AtomicU64::new(0),
            above: Mutex::default(),
        });
        let executions: Weak<dyn lock::owners::OwningExecutions> = Arc::<EngineInner>::downgrade(&inner);
        inner.locks.serve(executions);
        inner.admissions.serve(Arc::downgrade(&inner));
        if inner.idle {
            inner.locks.overhear();
        }
        let runs = !inner.rehearsal.is_replay() && !inner.idle;
        if runs && let Err(error) = inner.begin(suspected, told).await {
            // Other nodes must not count on this one.
            inner.stop_and_leave();
            return Err(error);
        }
        Ok(Engine { _stop: Arc::new(StopEngineOnDrop(inner.clone())), inner })
    }
}

impl EngineInner {
    /// Starts the engine's own tasks.
    async fn begin(
        self: &Arc<EngineInner>,
        suspected: mpsc::UnboundedReceiver<Suspect>,
        told: mpsc::UnboundedReceiver<ExecutionId>,
    ) -> Result<()> {
        self.locks.sessions.end_previous().await?;
        let (node, weak) = (&self.node, || Arc::downgrade(self));
        if node.is_shared() {
            node.chore(elsewhere::tell_news(weak(), told));
            let events: Weak<dyn NodeEvents> = weak();
            node.take_part(events).await?;
            self.found.send_replace(true);
        } else {
            let running = self.store.view().await?;
            node.chore(recover::recover(weak(), node.owned(), Some(running)));
        }
        node.chore(recover::doubt(weak()));
        node.chore(alarm::keep::<recover::Wake>(weak()));
        node.chore(alarm::keep::<remove::RemoveDue>(weak()));
        node.chore(alarm::keep::<FireSchedules>(weak()));
        node.chore(StopWithRuntime(weak()).wait());
        node.chore(let_go(weak()));
        self.locks.begin_chores();
        node.chore(deadlock::watch(weak(), suspected));
        node.chore(admission::keep(weak(), self.admissions.clone()));
        node.chore(admission::look_once(weak()));
        #[cfg(feature = "postgres")]
        if let Some(postgres) = self.store.postgres() {
            node.chore(crate::workflow::outbox::drain::keep(weak(), postgres));
        }
        Ok(())
    }
}

/// Whenever shards were lost, stops the executions in them.
async fn let_go(engine: Weak<EngineInner>) {
    loop {
        let Some(node) = engine.upgrade().map(|engine| engine.node.clone()) else { return };
        let owns_any = node.has_lost().await;
        engine.upgrade().iter().for_each(|engine| engine.let_go(owns_any));
    }
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
    /// Releases everything that code outside of workflows holds here, stops all executions where they are, and closes
    /// the store if the engine has opened it. Call this at the end of a program: locks of guards that are dropped at
    /// that time would not be released, and the next process that wants such a lock would have to wait until the lease
    /// expires.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// engine.shutdown().await?;
    /// # Ok(()) }
    /// ```
    pub async fn shutdown(&self) -> lock::Result<()> {
        let ended = self.inner.locks.sessions.end_all().await.map_err(Into::into);
        // The other nodes need not wait for the lease of this one.
        let left = self.inner.node.leave().await.map_err(lock::LockError::from);
        let ended = ended.and(left);
        self.inner.stop();
        if self.inner.owns_store {
            match self.inner.store.close().await {
                Ok(()) | Err(StoreError::Closed) => {}
                Err(error) => return ended.and(Err(error.into())),
            }
        }
        ended
    }

    /// An engine on a data directory, which is created if it is missing.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result, Workflow};
    /// # async fn example(order: Workflow<u32, u32>) -> Result<()> {
    /// let engine = Engine::open("./data").register(&order).start().await?;
    /// # Ok(()) }
    /// ```
    pub fn open(directory: impl AsRef<Path>) -> EngineBuilder {
        EngineBuilder::new(StoreSource::Directory(directory.as_ref().into()))
    }

    /// An engine on a store, which may hold other data too.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::store::Store;
    /// # use latchwork::workflow::Engine;
    /// let store = Store::memory().await?;
    /// let engine = Engine::on(&store).start().await?;
    /// # Ok(()) }
    /// ```
    pub fn on(store: &Store) -> EngineBuilder {
        EngineBuilder::new(StoreSource::Store(store.clone()))
    }

    /// An engine that only replays journals, on a store that is used for nothing else.
    pub(crate) async fn to_replay(store: &Store, definitions: Vec<Arc<Definition>>) -> Result<Engine> {
        let mut builder = EngineBuilder { definitions, ..Engine::on(store) };
        builder.rehearsal.is_replay = true;
        builder.start().await
    }

    /// The name that the engine was given, if it has one.
    pub fn name(&self) -> Option<&str> {
        self.inner.name.as_deref()
    }

    /// The store that the engine uses.
    ///
    /// ```
    /// # use latchwork::store::SpaceSpec;
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// let reports = engine.store().space(SpaceSpec::new("reports")).await?;
    /// # Ok(()) }
    /// ```
    pub fn store(&self) -> &Store {
        &self.inner.store
    }

    /// The state in that store: slots of executions and all others, from outside.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::store::Store;
    /// # use latchwork::workflow::Engine;
    /// # let engine = Engine::on(&Store::memory().await?).start().await?;
    /// let orders = engine.states().global().slot::<u64>("orders");
    /// assert_eq!(orders.increment(1).await?.value, 1);
    /// # Ok(()) }
    /// ```
    pub fn states(&self) -> &States {
        &self.inner.states
    }

    /// The entities in that store.
    ///
    /// ```
    /// # use latchwork::entity::Add;
    /// # use latchwork::json;
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// let ada = engine.entities().add(Add::new("person").data(json!({"name": "Ada"}))).await?;
    /// # Ok(()) }
    /// ```
    pub fn entities(&self) -> &Entities {
        &self.inner.entities
    }

    /// Stops all executions where they are. The next engine on the same store continues them.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::store::Store;
    /// # use latchwork::workflow::{Ctx, Engine, WorkflowError, workflow};
    /// # let double = workflow("double").run(async |_: Ctx, n: u64| Ok(n * 2));
    /// # let engine = Engine::on(&Store::memory().await?).register(&double).start().await?;
    /// engine.stop();
    /// assert!(matches!(engine.start(&double, 21).await, Err(WorkflowError::Stopped)));
    /// # Ok(()) }
    /// ```
    pub fn stop(&self) {
        self.inner.stop_and_leave();
    }

    /// How many executions are in memory.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::store::Store;
    /// # use latchwork::workflow::Engine;
    /// # let engine = Engine::on(&Store::memory().await?).start().await?;
    /// assert_eq!(engine.residents(), 0);
    /// # Ok(()) }
    /// ```
    pub fn residents(&self) -> usize {
        self.inner.residents.lock().len()
    }
}

shown!(Engine, _it => );

impl EngineInner {
    /// Stops the engine. If it shares the store, its work is given to the other nodes by a task that ends later. If the
    /// process ends first, they take over when the lease is over.
    fn stop_and_leave(&self) {
        if !self.is_stopped() {
            self.node.abandon();
        }
        self.stop();
    }

    pub(crate) fn stop(&self) {
        self.node.stop();
        self.found.send_replace(true);
        let residents = std::mem::take(&mut *self.residents.lock());
        let mut residents: Vec<_> = residents.into_iter().collect();
        residents.sort_by(|a, b| a.0.cmp(&b.0));
        for (_, resident) in residents {
            resident.task.abort();
            resident.run.leave();
        }
        self.tell_all();
        self.begun.notify_waiters();
        self.locks.stop();
    }

    /// Stops executions whose shards another engine owns. Without any shards, the whole engine stops.
    fn let_go(&self, owns_any: bool) {
        if !owns_any {
            tracing::warn!("another engine has taken over; this one stops");
            return self.stop();
        }
        let lost = |id: &ExecutionId| !self.node.owns(id) && !self.node.is_guest(id);
        let residents: Vec<Arc<Run>> = self.residents.lock().values().map(|resident| resident.run.clone()).collect();
        residents.iter().filter(|run| lost(&run.id)).for_each(|run| run.set_stop(Stop::Fenced));
        self.tell_all();
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.node.is_stopped()
    }

    /// The keys of an execution's other records.
    pub(crate) fn kept<'a>(&'a self, id: &'a ExecutionId) -> Kept<'a> {
        Kept::new(&self.spaces.kept, id)
    }

    /// An execution that is in memory.
    pub(crate) fn resident(&self, id: &ExecutionId) -> Option<Arc<Run>> {
        self.residents.lock().get(id).map(|resident| resident.run.clone())
    }

    /// The newest registered definition of a workflow: new executions are started under it.
    pub(crate) fn definition(&self, name: &str) -> Option<&Arc<Definition>> {
        self.definitions.newest(name)
    }

    /// The registered definition that continues an execution.
    pub(crate) fn definition_of(&self, execution: &Execution) -> Option<&Arc<Definition>> {
        self.definitions.of_version(&execution.workflow, execution.version)
    }

    /// The newest record under a key.
    pub(crate) async fn get(&self, key: &Key) -> Result<Option<Item>> {
        Ok(self.store.get(key).await?)
    }

    pub(crate) async fn read(&self, id: &ExecutionId) -> Result<Option<(Execution, Rev)>> {
        let Some(item) = self.get(&self.spaces.executions.key(id.as_bytes())).await? else { return Ok(None) };
        Ok(Some((decode_execution(&item, id)?, item.rev)))
    }

    /// An execution that must exist.
    pub(crate) async fn known(&self, id: &ExecutionId) -> Result<(Execution, Rev)> {
        self.read(id).await?.ok_or_else(|| WorkflowError::NotFound { id: id.clone() })
    }

    /// True if an execution has ended. A resident execution has not, and is not read.
    pub(crate) async fn has_ended(&self, id: &ExecutionId) -> Result<bool> {
        Ok(!self.is_resident(id) && self.known(id).await?.0.status.is_terminal())
    }

    /// True if an execution is in memory. It leaves memory after its last commit and before callers are notified.
    pub(crate) fn is_resident(&self, id: &ExecutionId) -> bool {
        self.residents.lock().contains_key(id)
    }
}
