//! For tests of one's own workflows: time that passes by itself, and crashes at every commit. Needs the feature
//! `testing`.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() {
//! use std::time::Duration;
//!
//! use latchwork::testing::crash_everywhere;
//! use latchwork::workflow::{Ctx, Failure, workflow};
//!
//! let order = workflow("order").run(async |ctx: Ctx, price: u64| {
//!     ctx.run("charge", async || Ok(price)).await?;
//!     ctx.sleep(Duration::from_secs(3600)).await?;
//!     ctx.run("ship", async || Ok("shipped".to_string())).await
//! });
//! // A crash right before and right after each commit, and then recovery: the outcome is always the same.
//! let crashes = crash_everywhere(&order, 7, |outcome| {
//!     assert_eq!(outcome.result.as_ref().unwrap(), "shipped");
//! })
//! .await;
//! assert!(crashes >= 8);
//! # }
//! ```

mod admitted;
mod audit;
mod fault;
mod faults;
mod lists;
mod locks;
mod replay;
mod simulation;
mod trace;

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;

use futures_util::future::select;
use parking_lot::Mutex;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::store::backend::MemoryBackend;
use crate::store::disk::RealDisk;
use crate::store::{Env, Limits, Store, Timestamp, VirtualClock};
use crate::workflow::engine::rehearsal::Mock;
use crate::workflow::{Engine, EngineBuilder, ExecutionId, Failure, Handle, History, Result, Workflow, WorkflowError};

pub use fault::{Crash, Side};
pub use faults::Faults;
pub use replay::{Mismatch, replay};
pub use simulation::{Caller, Report, Simulation};
pub use trace::{Event, What};

use fault::{CrashAt, Life};

/// How often everybody else gets a turn before time goes on.
const TURNS: usize = 64;

/// An engine in memory, on time that jumps to the next timer whenever nobody has anything else to do.
pub struct TestEngine {
    engine: Engine,
    clock: Arc<VirtualClock>,
    env: Env,
    bodies: Arc<Mutex<Vec<String>>>,
}

/// What became of an execution that met a crash.
#[derive(Debug)]
#[non_exhaustive]
pub struct CrashOutcome<O> {
    /// Where the crash was.
    pub crash: Crash,
    /// What the execution came to after it.
    pub result: Result<O>,
    /// The names of the steps whose bodies ran, in order, over both lives.
    pub bodies: Vec<String>,
}

/// A test engine that is about to start.
#[must_use = "an engine does nothing until it is started"]
pub struct TestEngineBuilder {
    seed: u64,
    set_up: SetUp,
}

/// Registers workflows and mocks, again and again if need be.
type SetUp = Vec<Box<dyn Fn(EngineBuilder) -> EngineBuilder + Send + Sync>>;

impl TestEngineBuilder {
    /// Makes a workflow known.
    pub fn register<I: 'static, O: 'static>(mut self, workflow: &Workflow<I, O>) -> TestEngineBuilder {
        let workflow = workflow.clone();
        self.set_up.push(Box::new(move |builder| builder.register(&workflow)));
        self
    }

    /// Has this run in place of the body of every step of that name. It is given the number of the attempt, from 1.
    pub fn mock<T: Serialize>(
        mut self,
        step: &str,
        mock: impl Fn(u32) -> std::result::Result<T, Failure> + Send + Sync + 'static,
    ) -> TestEngineBuilder {
        let text = |error: crate::json::JsonError| Failure::no_json("the mock's result", &error);
        let mock: Mock = Arc::new(move |attempt| crate::json::to_value(&mock(attempt)?).map_err(text));
        let step = step.to_string();
        self.set_up.push(Box::new(move |builder| {
            builder.rehearse(|test| drop(test.mocks.insert(step.clone(), mock.clone())))
        }));
        self
    }

    /// Starts the engine.
    pub async fn start(self) -> Result<TestEngine> {
        let (env, clock) = Env::seeded(self.seed);
        let memory = Arc::new(MemoryBackend::new(env.clone()));
        let life = Arc::new(Life::new(memory, None));
        let bodies = Arc::default();
        let engine = engine(&life, &env, &self.set_up, &bodies).await?;
        Ok(TestEngine { engine, clock, env, bodies })
    }
}

impl TestEngine {
    /// An engine on which more can be said than a workflow. The seed decides about all chance.
    pub fn build(seed: u64) -> TestEngineBuilder {
        TestEngineBuilder { seed, set_up: Vec::new() }
    }

    /// An engine with one workflow. The seed decides about all chance.
    pub async fn new<I: 'static, O: 'static>(workflow: &Workflow<I, O>, seed: u64) -> Result<TestEngine> {
        TestEngine::build(seed).register(workflow).start().await
    }

    /// What happened to an execution so far, to be compared with what should have.
    pub async fn history(&self, id: impl Into<ExecutionId>) -> Result<History> {
        self.engine.history(id).await
    }

    /// The engine itself.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The environment, for the time.
    pub fn env(&self) -> &Env {
        &self.env
    }

    /// Sets the time of day, forwards or backwards, as an operator or NTP would. Nobody is told: what is due by then is
    /// seen to some time later.
    pub fn set_time(&self, now: Timestamp) {
        self.clock.jump_to(now);
    }

    /// The names of the steps whose bodies ran so far, in order.
    pub fn bodies(&self) -> Vec<String> {
        self.bodies.lock().clone()
    }

    /// Waits for something while time passes by itself.
    pub async fn run<T>(&self, future: impl Future<Output = T>) -> T {
        while_time_passes(&self.clock, &self.env, future).await
    }

    /// Starts an execution and waits for what it comes to, while time passes by itself. If it is parked, that is an
    /// error: there is no operator.
    pub async fn complete<I, O>(&self, workflow: &Workflow<I, O>, input: I) -> Result<O>
    where
        I: Serialize + Send + 'static,
        O: DeserializeOwned + Send + 'static,
    {
        self.run(async {
            let handle = self.engine.start(workflow, input).await?;
            outcome(&self.engine, &handle).await
        })
        .await
    }
}

async fn engine(
    life: &Arc<Life<CrashAt>>,
    env: &Env,
    set_up: &SetUp,
    bodies: &Arc<Mutex<Vec<String>>>,
) -> Result<Engine> {
    let store = Store::with_backend(life.clone(), env.clone(), Limits::default(), Arc::new(RealDisk)).await?;
    let bodies = bodies.clone();
    let builder = Engine::on(&store)
        .rehearse(|test| test.is_strict = true)
        .on_step(move |_, name| bodies.lock().push(name.into()));
    set_up.iter().fold(builder, |builder, set_up| set_up(builder)).start().await
}

/// What an execution comes to, which may be that it is parked.
async fn outcome<O: DeserializeOwned>(engine: &Engine, handle: &Handle<O>) -> Result<O> {
    let parked = async {
        loop {
            let parked = engine.parked().await?.into_iter().find(|(id, _)| id == handle.id());
            if let Some((id, reason)) = parked {
                return Err(WorkflowError::Parked { id, reason });
            }
            for _ in 0..TURNS {
                tokio::task::yield_now().await;
            }
        }
    };
    select(pin!(handle.result()), pin!(parked)).await.factor_first().0
}

/// Drives a future; whenever it and everybody else has had their turns, time goes on to the next sleeper.
async fn while_time_passes<T>(clock: &VirtualClock, env: &Env, future: impl Future<Output = T>) -> T {
    let mut future = pin!(future);
    let mut turns = 0;
    std::future::poll_fn(|context| {
        if let Poll::Ready(value) = future.as_mut().poll(context) {
            return Poll::Ready(value);
        }
        turns += 1;
        if turns % TURNS == 0
            && let Some(next) = clock.next_deadline()
        {
            clock.advance(next.saturating_sub(env.monotonic()));
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await
}

/// Runs a workflow once for each of its commits with a crash right before it, and once with a crash right after it;
/// each time lets a new engine recover, and hands over what it came to. Gives the number of crashes. Runs on one thread
/// are the same every time.
pub async fn crash_everywhere<I, O>(workflow: &Workflow<I, O>, input: I, check: impl FnMut(&CrashOutcome<O>)) -> u64
where
    I: Serialize + Clone + Send + 'static,
    O: DeserializeOwned + Send + 'static,
{
    Crashes::of(workflow, input).run(check).await
}

/// Like [`crash_everywhere`], for a workflow that others talk to, or that starts others.
#[must_use = "nothing crashes until it is run"]
pub struct Crashes<I, O> {
    workflow: Workflow<I, O>,
    input: I,
    set_up: SetUp,
    outside: Outside,
}

/// What is done from outside while an execution runs.
type Outside = Box<dyn Fn(Engine) -> Pin<Box<dyn Future<Output = ()> + Send>> + Send + Sync>;

impl<I, O> Crashes<I, O>
where
    I: Serialize + Clone + Send + 'static,
    O: DeserializeOwned + Send + 'static,
{
    /// Crashes of this workflow, started with this input under the id `execution`.
    pub fn of(workflow: &Workflow<I, O>, input: I) -> Crashes<I, O> {
        let set_up = TestEngine::build(0).register(workflow).set_up;
        let outside: Outside = Box::new(|_| Box::pin(std::future::ready(())));
        Crashes { workflow: workflow.clone(), input, set_up, outside }
    }

    /// Makes another workflow known.
    pub fn register<A: 'static, B: 'static>(mut self, workflow: &Workflow<A, B>) -> Crashes<I, O> {
        let workflow = workflow.clone();
        self.set_up.push(Box::new(move |builder| builder.register(&workflow)));
        self
    }

    /// What others do meanwhile, in every life from the start of it: so it should be such as counts once.
    pub fn outside<F>(mut self, outside: impl Fn(Engine) -> F + Send + Sync + 'static) -> Crashes<I, O>
    where
        F: Future<Output = ()> + Send + 'static,
    {
        self.outside = Box::new(move |engine| Box::pin(outside(engine)));
        self
    }

    /// Crashes at every commit, and hands over what comes of it.
    pub async fn run(self, mut check: impl FnMut(&CrashOutcome<O>)) -> u64 {
        let (mut crashes, mut commit) = (0, 1);
        loop {
            let mut has_crashed = false;
            for side in [Side::Before, Side::After] {
                if let Some(outcome) = self.crash_once(Crash { commit, side }).await {
                    has_crashed = true;
                    crashes += 1;
                    check(&outcome);
                }
            }
            // The execution came to its end before so many commits.
            if !has_crashed {
                return crashes;
            }
            commit += 1;
        }
    }

    async fn crash_once(&self, crash: Crash) -> Option<CrashOutcome<O>> {
        let (env, clock) = Env::seeded(crash.commit);
        let memory = Arc::new(MemoryBackend::new(env.clone()));
        let bodies = Arc::default();
        // The engine's own commits when it starts are not the workflow's.
        let idle = Arc::new(Life::new(memory.clone(), None));
        drop(engine(&idle, &env, &self.set_up, &bodies).await.ok()?);
        let before = Arc::new(Life::new(memory.clone(), None));
        drop(engine(&before, &env, &self.set_up, &bodies).await.ok()?);
        let crash_at = Crash { commit: crash.commit + before.commits(), side: crash.side };
        let life = Arc::new(Life::new(memory.clone(), Some(crash_at)));
        let first = while_time_passes(&clock, &env, self.live(&life, &env, &bodies)).await;
        if !life.has_crashed() {
            assert!(
                first.is_ok() || !matches!(first, Err(WorkflowError::Store(_))),
                "without a crash nothing is in the way"
            );
            return None;
        }
        let life = Arc::new(Life::new(memory, None));
        self.check_lists(&life, &env, crash).await;
        let result = while_time_passes(&clock, &env, self.live(&life, &env, &bodies)).await;
        self.check_lists(&life, &env, crash).await;
        let bodies = bodies.lock().clone();
        Some(CrashOutcome { crash, result, bodies })
    }

    /// That lists agree with the executions themselves, whatever was the last commit.
    async fn check_lists(&self, life: &Arc<Life<CrashAt>>, env: &Env, crash: Crash) {
        let store = Store::with_backend(life.clone(), env.clone(), Limits::default(), Arc::new(RealDisk)).await;
        let store = store.expect("a store in memory can be opened");
        let differences = lists::differences(&store).await.expect("a store in memory can be read");
        assert!(differences.is_empty(), "{crash:?}: {}", differences.join("\n"));
    }

    /// One life: the execution is started, or joined if an earlier life has, and others do what they do.
    async fn live(&self, life: &Arc<Life<CrashAt>>, env: &Env, bodies: &Arc<Mutex<Vec<String>>>) -> Result<O> {
        let engine = engine(life, env, &self.set_up, bodies).await?;
        let handle = engine.start(&self.workflow, self.input.clone()).id(ID).or_join().await?;
        let mut outside = Some((self.outside)(engine.clone()));
        let mut ended = pin!(outcome(&engine, &handle));
        // A crash leaves nobody to tell of it.
        std::future::poll_fn(|context| {
            if let Some(others) = &mut outside
                && others.as_mut().poll(context).is_ready()
            {
                outside = None;
            }
            match ended.as_mut().poll(context) {
                Poll::Ready(result) => Poll::Ready(result),
                Poll::Pending if life.has_crashed() => Poll::Ready(Err(WorkflowError::Stopped)),
                Poll::Pending => Poll::Pending,
            }
        })
        .await
    }
}

/// The id under which an execution is started, and started again if the crash left no trace of it.
const ID: &str = "execution";
