//! Runs whole engines on virtual time, one after the other and at times beside each other on one store, with faults
//! from a seed, until every execution has ended.

use std::collections::BTreeMap;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::task::{AbortHandle, JoinSet};

use super::fault::Life;
use super::faults::{Faults, LifeCommand, Seeded, World};
use super::lists;
use super::trace::{TraceEvent, TraceKind};
use crate::store::backend::Backend;
use crate::store::disk::RealDisk;
use crate::store::{Env, Item, Key, Limits, Order, Store, StoreError};
use crate::workflow::stored::listed::{LISTED, Lists, RUNNING, read_by_status, read_end};
use crate::workflow::{Engine, EngineBuilder, ExecutionId, Result, Status, Workflow, WorkflowError};

/// How many turns all tasks get before time advances.
const TURNS: usize = 24;

/// After this many rounds in which no task waits for a time, no task ever will.
const IDLE_ROUNDS: usize = 32;

/// The largest number of rounds of a simulation.
const ROUNDS: usize = 200_000;

/// A simulation of workflows under faults: crashes, restarts, pauses with a second engine, lost answers, slow commits
/// and jumps of the clock, all from a seed. The same seed makes exactly the same run.
///
/// ```
/// use std::time::Duration;
///
/// use latchwork::testing::Simulation;
/// use latchwork::workflow::{Ctx, Failure, Retry, workflow};
///
/// let order = workflow("order").run(async |ctx: Ctx, price: u64| {
///     // A crash counts as an attempt, and there may be many of them here.
///     let often = Retry::exponential().max_attempts(100);
///     ctx.run("charge", async || Ok(price)).retry(often.clone()).await?;
///     ctx.sleep(Duration::from_secs(3600)).await?;
///     ctx.run("ship", async || Ok(format!("shipped for {price}"))).retry(often).await
/// });
/// for seed in 0..20 {
///     let simulation = Simulation::new(seed).register(&order).start(&order, "a", 7).start(&order, "b", 8);
///     let report = simulation.run();
///     report.assert_settled();
///     assert_eq!(report.output::<String>("b").unwrap(), "shipped for 8", "{report}");
/// }
/// ```
pub struct Simulation {
    seed: u64,
    faults: Faults,
    timeout: Duration,
    register: Vec<Register>,
    clients: Vec<Client>,
    looks: Vec<LookFn>,
}

type LookFn = Box<dyn FnOnce(Engine) -> Called + Send>;
type Register = Arc<dyn Fn(EngineBuilder) -> EngineBuilder + Send + Sync>;
type Client = Arc<dyn Fn(Caller) -> Called + Send + Sync>;
type Called = Pin<Box<dyn Future<Output = Result<()>> + Send>>;

/// A caller that uses the engine in one of its lives.
#[derive(Clone)]
pub struct Caller {
    engine: Engine,
    world: Arc<World>,
    life: u32,
}

impl Caller {
    /// The engine of this life.
    ///
    /// ```
    /// # use latchwork::testing::Caller;
    /// # use latchwork::workflow::Result;
    /// # async fn example(caller: Caller) -> Result<()> {
    /// let handle = caller.engine().start_by_name("double", 4).id("a").or_join().await?;
    /// # Ok(()) }
    /// ```
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The number of this life, from 1.
    ///
    /// ```
    /// # use latchwork::testing::Caller;
    /// # fn example(caller: Caller) {
    /// println!("the engine was started {} times", caller.life());
    /// # }
    /// ```
    pub fn life(&self) -> u32 {
        self.life
    }

    /// The environment: time and randomness.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::testing::Caller;
    /// # use latchwork::workflow::Result;
    /// # async fn example(caller: Caller) -> Result<()> {
    /// caller.env().sleep(Duration::from_secs(60)).await;
    /// # Ok(()) }
    /// ```
    pub fn env(&self) -> &Env {
        &self.world.env
    }

    /// Adds a note to the trace.
    ///
    /// ```
    /// # use latchwork::testing::Caller;
    /// # fn example(caller: Caller) {
    /// caller.note("the customer waits");
    /// # }
    /// ```
    pub fn note(&self, text: impl Into<String>) {
        self.world.note(self.life, TraceKind::Note(text.into()));
    }

    /// Records in the trace that a start was acknowledged.
    ///
    /// ```
    /// # use latchwork::testing::Caller;
    /// # use latchwork::workflow::Result;
    /// # async fn example(caller: Caller) -> Result<()> {
    /// let handle = caller.engine().start_by_name("double", 4).id("a").or_join().await?;
    /// caller.started(handle.id());
    /// # Ok(()) }
    /// ```
    pub fn started(&self, id: &ExecutionId) {
        self.world.note(self.life, TraceKind::Started(id.clone()));
    }
}

impl Simulation {
    /// A simulation from a seed, with all faults.
    ///
    /// ```
    /// # use latchwork::testing::Simulation;
    /// # use latchwork::workflow::{Ctx, workflow};
    /// # let double = workflow("double").run(async |_: Ctx, number: u64| Ok(2 * number));
    /// Simulation::new(1).register(&double).start(&double, "a", 4).run().assert_settled();
    /// ```
    pub fn new(seed: u64) -> Simulation {
        let (faults, timeout) = (Faults::default(), Duration::from_secs(30 * 86_400));
        Simulation { seed, faults, timeout, register: Vec::new(), clients: Vec::new(), looks: Vec::new() }
    }

    /// Sets the faults that may happen.
    ///
    /// ```
    /// # use latchwork::testing::{Faults, Simulation};
    /// # use latchwork::workflow::{Ctx, workflow};
    /// # let double = workflow("double").run(async |_: Ctx, number: u64| Ok(2 * number));
    /// let mut faults = Faults::none();
    /// faults.crashes = true;
    /// faults.lives = 3;
    /// Simulation::new(1).faults(faults).register(&double).start(&double, "a", 4).run().assert_settled();
    /// ```
    pub fn faults(mut self, faults: Faults) -> Simulation {
        self.faults = faults;
        self
    }

    /// Sets how much virtual time the simulation may take until everything has ended: 30 days by default.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::testing::Simulation;
    /// # use latchwork::workflow::{Ctx, workflow};
    /// # let double = workflow("double").run(async |_: Ctx, number: u64| Ok(2 * number));
    /// let simulation = Simulation::new(1).timeout(Duration::from_secs(90 * 86_400));
    /// simulation.register(&double).start(&double, "a", 4).run().assert_settled();
    /// ```
    pub fn timeout(mut self, timeout: Duration) -> Simulation {
        self.timeout = timeout;
        self
    }

    /// Registers a workflow with every engine.
    ///
    /// ```
    /// # use latchwork::testing::Simulation;
    /// # use latchwork::workflow::{Ctx, workflow};
    /// # let double = workflow("double").run(async |_: Ctx, number: u64| Ok(2 * number));
    /// Simulation::new(1).register(&double).start(&double, "a", 4).run().assert_settled();
    /// ```
    pub fn register<I: 'static, O: 'static>(mut self, workflow: &Workflow<I, O>) -> Simulation {
        let workflow = workflow.clone();
        self.register.push(Arc::new(move |engine| engine.register(&workflow)));
        self
    }

    /// Adds a caller that starts an execution, or joins it, and waits for its result, in every life until it has it.
    ///
    /// ```
    /// # use latchwork::testing::Simulation;
    /// # use latchwork::workflow::{Ctx, workflow};
    /// # let double = workflow("double").run(async |_: Ctx, number: u64| Ok(2 * number));
    /// let report = Simulation::new(1).register(&double).start(&double, "a", 4).start(&double, "b", 5).run();
    /// assert_eq!(report.output::<u64>("b").unwrap(), 10);
    /// ```
    pub fn start<I, O>(self, workflow: &Workflow<I, O>, id: impl Into<ExecutionId>, input: I) -> Simulation
    where
        I: Serialize + Clone + Send + Sync + 'static,
        O: DeserializeOwned + Send + 'static,
    {
        let (workflow, id) = (workflow.clone(), id.into());
        self.client(move |caller| {
            let start = caller.engine.start(&workflow, input.clone()).id(&id).or_join();
            async move {
                let handle = start.await?;
                caller.started(handle.id());
                match handle.result().await {
                    Err(error @ (WorkflowError::Stopped | WorkflowError::Store(_))) => Err(error),
                    _ => Ok(()),
                }
            }
        })
    }

    /// Adds a caller that uses the engine. It is called in every life until it has returned once. It is called again if
    /// it returns that the engine has stopped or that the store failed. Every other error is in the report.
    ///
    /// ```
    /// # use latchwork::testing::{Caller, Simulation};
    /// # use latchwork::workflow::{Ctx, workflow};
    /// # let double = workflow("double").run(async |_: Ctx, number: u64| Ok(2 * number));
    /// let simulation = Simulation::new(1).register(&double).client(|caller: Caller| async move {
    ///     let handle = caller.engine().start_by_name("double", 4).id("a").or_join().await?;
    ///     let result = handle.result().await?;
    ///     caller.note(format!("the result is {result}"));
    ///     Ok(())
    /// });
    /// simulation.run().assert_settled();
    /// ```
    pub fn client<F, Fut>(mut self, client: F) -> Simulation
    where
        F: Fn(Caller) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<()>> + Send + 'static,
    {
        self.clients.push(Arc::new(move |caller| Box::pin(client(caller))));
        self
    }

    /// Looks at the store at the end of the simulation, through an engine without workflows. An error is in the report.
    ///
    /// ```
    /// # use latchwork::testing::Simulation;
    /// # use latchwork::workflow::{Ctx, Engine, workflow};
    /// # let double = workflow("double").run(async |_: Ctx, number: u64| Ok(2 * number));
    /// let simulation = Simulation::new(1).register(&double).start(&double, "a", 4);
    /// let simulation = simulation.afterwards(|engine: Engine| async move {
    ///     assert!(engine.describe("a").await?.status().is_end());
    ///     Ok(())
    /// });
    /// simulation.run().assert_settled();
    /// ```
    pub fn afterwards<F, Fut>(mut self, look: F) -> Simulation
    where
        F: FnOnce(Engine) -> Fut + Send + 'static,
        Fut: Future<Output = Result<()>> + Send + 'static,
    {
        self.looks.push(Box::new(move |engine| Box::pin(look(engine))));
        self
    }

    /// Runs the simulation on a runtime of its own. Do not call it from inside of an asynchronous runtime.
    ///
    /// ```
    /// # use latchwork::testing::Simulation;
    /// # use latchwork::workflow::{Ctx, workflow};
    /// # let double = workflow("double").run(async |_: Ctx, number: u64| Ok(2 * number));
    /// let report = Simulation::new(1).register(&double).start(&double, "a", 4).run();
    /// println!("{} engines were started", report.lives);
    /// ```
    pub fn run(self) -> Report {
        let runtime = tokio::runtime::Builder::new_current_thread().build();
        let runtime = runtime.expect("a runtime without threads and files can be made");
        runtime.block_on(Lives::new(self).run())
    }
}

/// A life that has begun: its store, and the task that holds its engine and callers.
struct Begun {
    life: Arc<Life<Seeded>>,
    task: AbortHandle,
    /// How many of its callers have not finished.
    calls: Arc<AtomicUsize>,
}

/// A simulation that runs.
struct Lives {
    simulation: Simulation,
    world: Arc<World>,
    /// The store as it is behind the gates, which no engine uses.
    outside: Option<Store>,
    done: Arc<Mutex<BTreeMap<usize, Result<()>>>>,
    begun: Vec<Begun>,
    rounds: usize,
    misfiled: Vec<String>,
}

impl Lives {
    fn new(simulation: Simulation) -> Lives {
        Lives {
            world: Arc::new(World::new(simulation.seed, simulation.faults.clone())),
            simulation,
            outside: None,
            done: Arc::default(),
            begun: Vec::new(),
            rounds: 0,
            misfiled: Vec::new(),
        }
    }

    async fn run(mut self) -> Report {
        let memory = self.world.memory.clone() as Arc<dyn Backend>;
        let env = self.world.env.clone();
        self.outside = Store::with_backend(memory, env, Limits::default(), Arc::new(RealDisk)).await.ok();
        if let Some(store) = &self.outside {
            // An engine declares its spaces, so that the lives find a store that is not new.
            drop(Engine::on(store).start().await);
            let known = store.spaces().await.unwrap_or_default();
            let known = known.into_iter().map(|space| (space.id(), space.name().to_string()));
            self.world.spaces.lock().extend(known);
        }
        let faulty = self.world.lives();
        let mut stuck = None;
        for number in 1.. {
            let is_last = number > faulty;
            self.begin(number, is_last);
            match self.pass(!is_last).await {
                Ok(Some(signal)) => {
                    self.check_lists().await;
                    self.end(signal).await;
                }
                Ok(None) => break,
                Err(reason) => {
                    stuck = Some(reason);
                    break;
                }
            }
        }
        self.report(stuck).await
    }

    /// Starts an engine and its callers.
    fn begin(&mut self, number: u32, is_calm: bool) {
        let life = Arc::new(Life::through(self.world.memory.clone(), Seeded::new(&self.world, number, is_calm)));
        let waiting =
            self.simulation.clients.iter().cloned().enumerate().filter(|(n, _)| !self.done.lock().contains_key(n));
        let waiting: Vec<_> = waiting.collect();
        let calls = Arc::new(AtomicUsize::new(waiting.len()));
        let (world, register, done) = (self.world.clone(), self.simulation.register.clone(), self.done.clone());
        let task = tokio::spawn(live(life.clone(), number, world, register, waiting, done, calls.clone()));
        self.begun.push(Begun { life, task: task.abort_handle(), calls });
    }

    /// Ends the newest life, or leaves it running, and waits until the next one begins.
    async fn end(&mut self, signal: LifeCommand) {
        let number = self.begun.len() as u32;
        let Some(newest) = self.begun.last() else { return };
        match signal {
            LifeCommand::Gone => newest.task.abort(),
            LifeCommand::Stop => {
                newest.task.abort();
                self.world.note(number, TraceKind::Stopped);
            }
            LifeCommand::Supersede => self.world.note(number, TraceKind::Superseded),
        }
        let world = self.world.clone();
        let downtime = world.duration(Duration::from_millis(1), 16);
        let next = tokio::spawn(async move { world.env.sleep(downtime).await });
        while !next.is_finished() {
            self.round().await;
        }
    }

    /// Gives all tasks their turns. Then time advances to the next timer, if that is not too far.
    async fn round(&mut self) {
        self.rounds += 1;
        for _ in 0..TURNS {
            tokio::task::yield_now().await;
        }
        let next = self.world.clock.next_deadline().map(|next| next.saturating_sub(self.world.env.monotonic()));
        // Ended executions are removed after days. The report still needs them.
        let Some(next) = next.filter(|next| *next < REMOVED) else { return };
        self.world.clock.advance(next);
    }

    /// Lets time pass until the newest life must end, or everything has ended.
    async fn pass(&mut self, heeds_signals: bool) -> std::result::Result<Option<LifeCommand>, String> {
        let mut idle = 0;
        loop {
            for _ in 0..TURNS {
                let signal = self.begun.last().and_then(|newest| newest.life.gate.take_signal());
                if let Some(signal) = signal.filter(|signal| heeds_signals || *signal == LifeCommand::Gone) {
                    return Ok(Some(signal));
                }
                // An older engine that was paused during its start has become the owner. The newest process is
                // restarted, as its supervisor would do.
                if self.world.is_fenced(self.begun.len() as u32) {
                    return Ok(Some(LifeCommand::Supersede));
                }
                tokio::task::yield_now().await;
            }
            if self.is_over().await {
                return Ok(None);
            }
            self.rounds += 1;
            match self.world.clock.next_deadline() {
                Some(next) => {
                    idle = 0;
                    self.world.clock.advance(next.saturating_sub(self.world.env.monotonic()));
                }
                None => idle += 1,
            }
            if idle > IDLE_ROUNDS {
                return Err(format!("no task waits for a time: {}", self.left_over().await));
            }
            if self.rounds > ROUNDS || self.world.env.monotonic() > self.simulation.timeout {
                return Err(format!("it takes too long: {}", self.left_over().await));
            }
        }
    }

    /// True if all callers have finished, all executions have ended and no process is paused. The newest engine is the
    /// owner and has no callers left, so nothing will be started.
    async fn is_over(&self) -> bool {
        self.done.lock().len() == self.simulation.clients.len()
            && self.begun.last().is_some_and(|newest| newest.calls.load(Ordering::SeqCst) == 0)
            && self.world.is_owner(self.begun.len() as u32)
            && !self.begun.iter().any(|begun| begun.life.gate.is_frozen())
            && self.unfinished().await.is_empty()
    }

    async fn left_over(&self) -> String {
        let waiting = self.simulation.clients.len() - self.done.lock().len();
        let unfinished = self.unfinished().await;
        format!("{waiting} callers wait; unfinished {unfinished:?}")
    }

    /// The executions of a status, with the details from the list.
    async fn listed(&self, status: Status) -> Vec<(ExecutionId, String)> {
        let Some(store) = &self.outside else { return Vec::new() };
        let spaces = store.spaces().await.unwrap_or_default();
        let space = |name: &str| spaces.iter().find(|known| known.name() == name).cloned();
        let (Some(listed), Some(running)) = (space(LISTED), space(RUNNING)) else { return Vec::new() };
        let Ok(view) = store.view().await else { return Vec::new() };
        let lists = Lists { listed, running };
        let (_, range) = lists.with_status(status);
        let found = view.scan(&range, Order::Ascending, usize::MAX).await.unwrap_or_default();
        let id = |key: &Key| read_end(read_by_status(key.bytes())?.1).map(|(_, id)| id);
        let note = |item: &Item| String::from_utf8_lossy(&item.value).into_owned();
        found.into_iter().filter_map(|(key, item)| id(&key).map(|id| (id, note(&item)))).collect()
    }

    /// The executions of some statuses.
    async fn ids(&self, statuses: &[Status]) -> Vec<ExecutionId> {
        let mut ids = Vec::new();
        for status in statuses {
            ids.extend(self.listed(*status).await.into_iter().map(|(id, _)| id));
        }
        ids
    }

    async fn unfinished(&self) -> Vec<ExecutionId> {
        self.ids(&[Status::Running, Status::Asleep, Status::Waiting]).await
    }

    /// Records where lists and records differ. They must never differ.
    async fn check_lists(&mut self) {
        let Some(store) = &self.outside else { return };
        let found = lists::differences(store).await;
        self.misfiled.extend(found.unwrap_or_else(|error| vec![error.to_string()]));
    }

    async fn report(mut self, stuck: Option<String>) -> Report {
        // Engines that lost their ownership get time to do harm, and commits on their way get time to land.
        for _ in 0..IDLE_ROUNDS {
            self.round().await;
        }
        let unfinished = self.unfinished().await;
        let parked = self.listed(Status::Parked).await;
        if stuck.is_none() {
            self.world.audit.lock().settled();
            self.world.admitted.lock().settled();
        }
        self.begun.iter().for_each(|begun| begun.task.abort());
        self.check_lists().await;
        let (mut results, mut looked) = (BTreeMap::new(), Vec::new());
        // An engine without workflows reads the results.
        if let Some(store) = &self.outside
            && let Ok(engine) = Engine::on(store).start().await
        {
            for id in self.ids(&[Status::Completed, Status::Failed, Status::TimedOut, Status::Cancelled]).await {
                results.insert(id.clone(), engine.handle_by_id(&id).result().await);
            }
            for look in std::mem::take(&mut self.simulation.looks) {
                looked.push(look(engine.clone()).await);
            }
        }
        let number = self.begun.len() as u32;
        for (id, result) in &results {
            let text = result.as_ref().map_or_else(|error| error.to_string(), Value::to_string);
            self.world.note(number, TraceKind::Result(id.clone(), text));
        }
        let done = std::mem::take(&mut *self.done.lock());
        let errors = done.into_values().chain(looked).filter_map(Result::err).collect();
        let events = self.world.trace.take();
        let mut misfiled = self.misfiled;
        misfiled.append(&mut self.world.audit.lock().wrong);
        misfiled.append(&mut self.world.admitted.lock().wrong);
        Report {
            seed: self.simulation.seed,
            lives: number,
            events,
            results,
            unfinished,
            parked,
            errors,
            misfiled,
            stuck,
        }
    }
}

/// One life: starts an engine and runs the callers that have not finished.
async fn live(
    life: Arc<Life<Seeded>>,
    number: u32,
    world: Arc<World>,
    register: Vec<Register>,
    clients: Vec<(usize, Client)>,
    done: Arc<Mutex<BTreeMap<usize, Result<()>>>>,
    calls_left: Arc<AtomicUsize>,
) {
    let engine = match engine(&life, number, &world, &register).await {
        Ok(engine) => engine,
        Err(error) => {
            world.note(number, TraceKind::NoEngine(error.to_string()));
            return life.gate.die();
        }
    };
    world.note(number, TraceKind::Engine);
    let mut calls = JoinSet::new();
    for (place, client) in clients {
        let caller = Caller { engine: engine.clone(), world: world.clone(), life: number };
        calls.spawn(call(caller, place, client, done.clone()));
    }
    while calls.join_next().await.is_some() {
        calls_left.fetch_sub(1, Ordering::SeqCst);
    }
    // All callers have finished. The engine continues to run.
    std::future::pending::<()>().await;
    drop(engine);
}

async fn engine(life: &Arc<Life<Seeded>>, number: u32, world: &Arc<World>, register: &[Register]) -> Result<Engine> {
    let store = Store::with_backend(life.clone(), world.env.clone(), Limits::default(), Arc::new(RealDisk)).await?;
    let told = world.clone();
    // Crashes come from the simulation, so they must not park an execution.
    let builder = Engine::on(&store).rehearse(|test| test.is_strict = true).most_crashes(u32::MAX);
    let builder = register.iter().fold(builder, |builder, register| register(builder));
    let builder = builder.on_step(move |id, step| {
        let run = told.trace.count_body(id, step);
        told.note(number, TraceKind::Body { id: id.clone(), step: step.into(), run });
    });
    builder.start().await
}

/// The shortest time until something that has ended is removed.
const REMOVED: Duration = Duration::from_secs(24 * 60 * 60);

/// How long a caller waits before it tries again.
const AGAIN: Duration = Duration::from_millis(100);

/// Calls a client until it has finished or the engine has stopped.
async fn call(caller: Caller, place: usize, client: Client, done: Arc<Mutex<BTreeMap<usize, Result<()>>>>) {
    loop {
        match client(caller.clone()).await {
            Err(WorkflowError::Store(StoreError::Uncertain { .. })) => caller.world.env.sleep(AGAIN).await,
            Err(WorkflowError::Stopped | WorkflowError::Store(_)) => return,
            ended => {
                done.lock().entry(place).or_insert(ended);
                return;
            }
        }
    }
}

/// The result of a simulation. Its `Display` is the trace.
#[derive(Debug)]
#[non_exhaustive]
pub struct Report {
    /// The seed.
    pub seed: u64,
    /// How many engines were started.
    pub lives: u32,
    /// Everything that happened, in order.
    pub events: Vec<TraceEvent>,
    /// The result of every execution that ended.
    pub results: BTreeMap<ExecutionId, Result<Value>>,
    /// Executions that should have ended and did not.
    pub unfinished: Vec<ExecutionId>,
    /// Executions that are parked, with the reasons.
    pub parked: Vec<(ExecutionId, String)>,
    /// Errors that callers could not recover from.
    pub errors: Vec<WorkflowError>,
    /// Where lists of executions, timers or families did not agree with the records of executions, and where locks or
    /// limits broke a promise.
    pub misfiled: Vec<String>,
    /// Why the simulation was given up, if it was: some caller or execution would have waited forever.
    pub stuck: Option<String>,
}

impl Report {
    /// The output of an execution, or why there is none.
    ///
    /// ```
    /// # use latchwork::testing::Simulation;
    /// # use latchwork::workflow::{Ctx, workflow};
    /// # let double = workflow("double").run(async |_: Ctx, number: u64| Ok(2 * number));
    /// let report = Simulation::new(1).register(&double).start(&double, "a", 4).run();
    /// assert_eq!(report.output::<u64>("a").unwrap(), 8);
    /// ```
    pub fn output<O: DeserializeOwned>(&self, id: impl Into<ExecutionId>) -> Result<O> {
        let id = id.into();
        let result = self.results.get(&id).cloned().unwrap_or(Err(WorkflowError::NotFound { id: id.clone() }))?;
        O::deserialize(result).map_err(|error| WorkflowError::Mismatch { id, message: error.to_string() })
    }

    /// Asserts that every execution has ended, none is parked and no caller waits.
    ///
    /// # Panics
    ///
    /// If this is not true. The message contains the trace.
    ///
    /// ```
    /// # use latchwork::testing::Simulation;
    /// # use latchwork::workflow::{Ctx, workflow};
    /// # let double = workflow("double").run(async |_: Ctx, number: u64| Ok(2 * number));
    /// let report = Simulation::new(1).register(&double).start(&double, "a", 4).run();
    /// report.assert_settled();
    /// ```
    pub fn assert_settled(&self) {
        let is_settled =
            self.stuck.is_none() && self.unfinished.is_empty() && self.parked.is_empty() && self.errors.is_empty();
        assert!(
            is_settled && self.misfiled.is_empty(),
            "{self}\nseed {}: stuck {:?}, unfinished {:?}, parked {:?}, errors {:?}, misfiled {:?}",
            self.seed,
            self.stuck,
            self.unfinished,
            self.parked,
            self.errors,
            self.misfiled
        );
    }
}

impl std::fmt::Display for Report {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        writeln!(f, "seed {}", self.seed)?;
        self.events.iter().try_for_each(|event| writeln!(f, "{event}"))
    }
}
