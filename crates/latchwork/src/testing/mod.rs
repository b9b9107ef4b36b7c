//! The test kit for your workflows: time that passes by itself, and crashes at every commit. Needs the feature
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
//! // Called once for each run, so that no run sees what an earlier run has left in a fake.
//! let order = || {
//!     workflow("order").run(async |ctx: Ctx, price: u64| {
//!         ctx.run("charge", async || Ok(price)).await?;
//!         ctx.sleep(Duration::from_secs(3600)).await?;
//!         ctx.run("ship", async || Ok("shipped".to_string())).await
//!     })
//! };
//! // A crash right before and right after each commit, and then recovery: the outcome is always the same.
//! let crashes = crash_everywhere(order, 7, async |outcome| {
//!     assert_eq!(outcome.result.as_ref().unwrap(), "shipped");
//! })
//! .await;
//! assert!(crashes >= 8);
//! # }
//! ```

mod admitted;
mod audit;
mod course;
mod crashes;
mod fault;
mod faults;
mod lists;
mod locks;
mod replay;
mod simulation;
mod trace;

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;

use futures_util::future::select;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::store::backend::MemoryBackend;
use crate::store::disk::RealDisk;
use crate::store::{Env, Limits, Store, Timestamp, VirtualClock};
use crate::workflow::engine::rehearsal::{Driven, Mock};
use crate::workflow::{Engine, EngineBuilder, ExecutionId, Failure, Handle, History, Result, Workflow, WorkflowError};

pub use crashes::{CrashOutcome, Crashes, crash_everywhere};
pub use fault::{Crash, Side};
pub use faults::Faults;
pub use replay::{Mismatch, replay};
pub use simulation::{Caller, Report, Simulation};
pub use trace::{TraceEvent, TraceKind};

use course::Course;
use fault::{CrashAt, Life};

/// How many turns all other tasks get before time advances.
const TURNS: usize = 64;

/// An engine in memory. Its time jumps to the next timer as soon as no task has anything else to do.
pub struct TestEngine {
    engine: Engine,
    clock: Arc<VirtualClock>,
    env: Env,
    course: Arc<Course>,
    time: Arc<Driven>,
}

/// A test engine before its start.
#[must_use = "an engine does nothing until it is started"]
pub struct TestEngineBuilder {
    seed: u64,
    set_up: Vec<Prepare>,
}

/// Adds a workflow or a mock to the builder of an engine. Each life of a test starts its own engine.
type Prepare = Box<dyn Fn(EngineBuilder) -> EngineBuilder + Send + Sync>;

fn registering<I: 'static, O: 'static>(workflow: Workflow<I, O>) -> Prepare {
    Box::new(move |builder| builder.register(&workflow))
}

fn mocking(step: &str, mock: Mock) -> Prepare {
    let step = step.to_string();
    Box::new(move |builder| builder.rehearse(|test| drop(test.mocks.insert(step.clone(), mock.clone()))))
}

fn as_mock<T: Serialize>(mock: impl Fn(u32) -> std::result::Result<T, Failure> + Send + Sync + 'static) -> Mock {
    let text = |error: crate::json::JsonError| Failure::no_json("the mock's result", &error);
    Arc::new(move |attempt| crate::json::to_value(&mock(attempt)?).map_err(text))
}

impl TestEngineBuilder {
    /// Registers a workflow.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::testing::TestEngine;
    /// # use latchwork::workflow::{Ctx, workflow};
    /// # let order = workflow("order").run(async |ctx: Ctx, price: u64| {
    /// #     ctx.run("charge", async || Ok(price)).await
    /// # });
    /// let test = TestEngine::build(1).register(&order).start().await?;
    /// assert_eq!(test.complete(&order, 7).await?, 7);
    /// # Ok(()) }
    /// ```
    pub fn register<I: 'static, O: 'static>(mut self, workflow: &Workflow<I, O>) -> TestEngineBuilder {
        self.set_up.push(registering(workflow.clone()));
        self
    }

    /// Runs this in place of the body of every step of that name. It gets the number of the attempt, from 1.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::testing::TestEngine;
    /// # use latchwork::workflow::{Ctx, workflow};
    /// # let order = workflow("order").run(async |ctx: Ctx, price: u64| {
    /// #     ctx.run("charge", async || Ok(price)).await
    /// # });
    /// let test = TestEngine::build(1).register(&order).mock("charge", |_attempt| Ok(8u64)).start().await?;
    /// assert_eq!(test.complete(&order, 7).await?, 8);
    /// # Ok(()) }
    /// ```
    pub fn mock<T: Serialize>(
        mut self,
        step: &str,
        mock: impl Fn(u32) -> std::result::Result<T, Failure> + Send + Sync + 'static,
    ) -> TestEngineBuilder {
        self.set_up.push(mocking(step, as_mock(mock)));
        self
    }

    /// Starts the engine.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::testing::TestEngine;
    /// # use latchwork::workflow::{Ctx, workflow};
    /// # let order = workflow("order").run(async |ctx: Ctx, price: u64| {
    /// #     ctx.run("charge", async || Ok(price)).await
    /// # });
    /// let test = TestEngine::build(1).register(&order).start().await?;
    /// # Ok(()) }
    /// ```
    pub async fn start(self) -> Result<TestEngine> {
        let (env, clock) = Env::seeded(self.seed);
        let memory = Arc::new(MemoryBackend::new(env.clone()));
        let life = Arc::new(Life::new(memory, None));
        let (course, time) = (Arc::default(), Arc::<Driven>::default());
        let mut set_up = self.set_up;
        let driven = time.clone();
        set_up.push(Box::new(move |builder| builder.rehearse(|test| test.time = Some(driven.clone()))));
        let engine = engine(&life, &env, &set_up, &course).await?;
        Ok(TestEngine { engine, clock, env, course, time })
    }
}

impl TestEngine {
    /// Builds an engine with several workflows or with mocks. All random decisions follow from the seed.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::testing::TestEngine;
    /// # use latchwork::workflow::{Ctx, workflow};
    /// # let order = workflow("order").run(async |ctx: Ctx, price: u64| {
    /// #     ctx.run("charge", async || Ok(price)).await
    /// # });
    /// let test = TestEngine::build(1).register(&order).start().await?;
    /// # Ok(()) }
    /// ```
    pub fn build(seed: u64) -> TestEngineBuilder {
        TestEngineBuilder { seed, set_up: Vec::new() }
    }

    /// An engine with one workflow. All random decisions follow from the seed.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::testing::TestEngine;
    /// # use latchwork::workflow::{Ctx, workflow};
    /// # let order = workflow("order").run(async |ctx: Ctx, price: u64| {
    /// #     ctx.run("charge", async || Ok(price)).await
    /// # });
    /// let test = TestEngine::new(&order, 1).await?;
    /// assert_eq!(test.complete(&order, 7).await?, 7);
    /// # Ok(()) }
    /// ```
    pub async fn new<I: 'static, O: 'static>(workflow: &Workflow<I, O>, seed: u64) -> Result<TestEngine> {
        TestEngine::build(seed).register(workflow).start().await
    }

    /// The recorded history of an execution so far, to compare it with what you expect.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::testing::TestEngine;
    /// # use latchwork::workflow::{Ctx, workflow};
    /// # let order = workflow("order").run(async |ctx: Ctx, price: u64| {
    /// #     ctx.run("charge", async || Ok(price)).await
    /// # });
    /// # let test = TestEngine::new(&order, 1).await?;
    /// let handle = test.engine().start(&order, 7).id("order-7").await?;
    /// test.run(handle.result()).await?;
    /// assert_eq!(test.history("order-7").await?.steps(), ["charge"]);
    /// # Ok(()) }
    /// ```
    pub async fn history(&self, id: impl Into<ExecutionId>) -> Result<History> {
        self.engine.history(id).await
    }

    /// The engine itself.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::testing::TestEngine;
    /// # use latchwork::workflow::{Ctx, workflow};
    /// # let order = workflow("order").run(async |ctx: Ctx, price: u64| {
    /// #     ctx.run("charge", async || Ok(price)).await
    /// # });
    /// # let test = TestEngine::new(&order, 1).await?;
    /// let handle = test.engine().start(&order, 7).await?;
    /// assert_eq!(test.run(handle.result()).await?, 7);
    /// # Ok(()) }
    /// ```
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The environment, which has the time.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use std::time::Duration;
    /// # use latchwork::testing::TestEngine;
    /// # use latchwork::workflow::{Ctx, workflow};
    /// # let order = workflow("order").run(async |ctx: Ctx, price: u64| {
    /// #     ctx.run("charge", async || Ok(price)).await
    /// # });
    /// # let test = TestEngine::new(&order, 1).await?;
    /// let before = test.env().now();
    /// test.run(test.env().sleep(Duration::from_secs(3600))).await;
    /// assert!(test.env().now().since(before) >= Duration::from_secs(3600));
    /// # Ok(()) }
    /// ```
    pub fn env(&self) -> &Env {
        &self.env
    }

    /// Sets the time of day, forwards or backwards, as an operator or NTP would. The engine is not notified: it finds
    /// some time later what is due by then.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use std::time::Duration;
    /// # use latchwork::testing::TestEngine;
    /// # use latchwork::workflow::{Ctx, workflow};
    /// # let order = workflow("order").run(async |ctx: Ctx, price: u64| {
    /// #     ctx.run("charge", async || Ok(price)).await
    /// # });
    /// # let test = TestEngine::new(&order, 1).await?;
    /// let tomorrow = test.env().now().plus(Duration::from_secs(86_400));
    /// test.set_time(tomorrow);
    /// assert!(test.env().now() >= tomorrow);
    /// # Ok(()) }
    /// ```
    pub fn set_time(&self, now: Timestamp) {
        self.clock.jump_to(now);
    }

    /// The names of the steps whose bodies ran so far, in order.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::testing::TestEngine;
    /// # use latchwork::workflow::{Ctx, workflow};
    /// # let order = workflow("order").run(async |ctx: Ctx, price: u64| {
    /// #     ctx.run("charge", async || Ok(price)).await
    /// # });
    /// # let test = TestEngine::new(&order, 1).await?;
    /// test.complete(&order, 7).await?;
    /// assert_eq!(test.bodies(), ["charge"]);
    /// # Ok(()) }
    /// ```
    pub fn bodies(&self) -> Vec<String> {
        self.course.bodies()
    }

    /// Runs a future while time passes by itself. Outside of this call time stands still: a caller that waits there for
    /// an execution panics after ten seconds of real time.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::testing::TestEngine;
    /// # use latchwork::workflow::{Ctx, workflow};
    /// # let order = workflow("order").run(async |ctx: Ctx, price: u64| {
    /// #     ctx.run("charge", async || Ok(price)).await
    /// # });
    /// # let test = TestEngine::new(&order, 1).await?;
    /// let handle = test.engine().start(&order, 7).await?;
    /// assert_eq!(test.run(handle.result()).await?, 7);
    /// # Ok(()) }
    /// ```
    pub async fn run<T>(&self, future: impl Future<Output = T>) -> T {
        let _driving = self.time.begin();
        while_time_passes(&self.clock, &self.env, future).await
    }

    /// Starts an execution and waits for its result, while time passes by itself. A parked execution is an error,
    /// because a test has no operator.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::testing::TestEngine;
    /// # use latchwork::workflow::{Ctx, workflow};
    /// # let order = workflow("order").run(async |ctx: Ctx, price: u64| {
    /// #     ctx.run("charge", async || Ok(price)).await
    /// # });
    /// # let test = TestEngine::new(&order, 1).await?;
    /// assert_eq!(test.complete(&order, 7).await?, 7);
    /// # Ok(()) }
    /// ```
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

async fn engine(life: &Arc<Life<CrashAt>>, env: &Env, set_up: &[Prepare], course: &Arc<Course>) -> Result<Engine> {
    let store = Store::with_backend(life.clone(), env.clone(), Limits::default(), Arc::new(RealDisk)).await?;
    let course = course.clone();
    let builder =
        Engine::on(&store).rehearse(|test| test.is_strict = true).on_step(move |id, step| course.body(id, step));
    set_up.iter().fold(builder, |builder, set_up| set_up(builder)).start().await
}

/// The result of an execution. A parked execution is an error.
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

/// Polls a future. Each time it and all other tasks have had their turns, time advances to the next timer.
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
