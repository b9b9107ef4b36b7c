//! For tests of one's own workflows: time that passes by itself, and crashes at every commit.
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
//!     ctx.run("charge", async || Ok::<_, Failure>(price)).await?;
//!     ctx.sleep(Duration::from_secs(3600)).await?;
//!     ctx.run("ship", async || Ok::<_, Failure>("shipped".to_string())).await
//! });
//! // A crash right before and right after each commit, and then recovery: the outcome is always the same.
//! let crashes = crash_everywhere(&order, 7, |outcome| {
//!     assert_eq!(outcome.result.as_ref().unwrap(), "shipped");
//! })
//! .await;
//! assert!(crashes >= 8);
//! # }
//! ```

mod fault;

use std::future::Future;
use std::sync::Arc;

use parking_lot::Mutex;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::store::backend::MemoryBackend;
use crate::store::disk::RealDisk;
use crate::store::{Env, Limits, Store, VirtualClock};
use crate::workflow::{Engine, Result, Workflow, WorkflowError};

pub use fault::{Crash, Side};

use fault::Life;

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

impl TestEngine {
    /// An engine with one workflow. The seed decides about all chance.
    pub async fn new<I, O>(workflow: &Workflow<I, O>, seed: u64) -> Result<TestEngine> {
        let (env, clock) = Env::seeded(seed);
        let memory = Arc::new(MemoryBackend::new(env.clone()));
        let life = Arc::new(Life::new(memory, None));
        let bodies = Arc::default();
        let engine = engine(&life, &env, workflow, &bodies).await?;
        Ok(TestEngine { engine, clock, env, bodies })
    }

    /// The engine itself.
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The environment, for the time.
    pub fn env(&self) -> &Env {
        &self.env
    }

    /// The names of the steps whose bodies ran so far, in order.
    pub fn bodies(&self) -> Vec<String> {
        self.bodies.lock().clone()
    }

    /// Waits for something while time passes by itself.
    pub async fn run<T>(&self, future: impl Future<Output = T>) -> T {
        while_time_passes(&self.clock, &self.env, future).await
    }

    /// Starts an execution and waits for what it comes to, while time passes by itself.
    pub async fn complete<I, O>(&self, workflow: &Workflow<I, O>, input: I) -> Result<O>
    where
        I: Serialize + Send + 'static,
        O: DeserializeOwned + Send + 'static,
    {
        self.run(async {
            let handle = self.engine.start(workflow, input).await?;
            handle.result().await
        })
        .await
    }
}

async fn engine<I, O>(
    life: &Arc<Life>,
    env: &Env,
    workflow: &Workflow<I, O>,
    bodies: &Arc<Mutex<Vec<String>>>,
) -> Result<Engine> {
    let store = Store::with_backend(life.clone(), env.clone(), Limits::default(), Arc::new(RealDisk)).await?;
    let bodies = bodies.clone();
    Engine::on(&store).register(workflow).on_step(move |_, name| bodies.lock().push(name.into())).start().await
}

/// Drives a future; whenever it and everybody else has had their turns, time goes on to the next sleeper.
async fn while_time_passes<T>(clock: &VirtualClock, env: &Env, future: impl Future<Output = T>) -> T {
    let mut future = std::pin::pin!(future);
    let mut turns = 0;
    std::future::poll_fn(|context| {
        if let std::task::Poll::Ready(value) = future.as_mut().poll(context) {
            return std::task::Poll::Ready(value);
        }
        turns += 1;
        if turns % TURNS == 0
            && let Some(next) = clock.next_deadline()
        {
            clock.advance(next.saturating_sub(env.monotonic()));
        }
        context.waker().wake_by_ref();
        std::task::Poll::Pending
    })
    .await
}

/// Runs a workflow once for each of its commits with a crash right before it, and once with a crash right after it;
/// each time lets a new engine recover, and hands over what it came to. Gives the number of crashes. Runs on one thread
/// are the same every time.
pub async fn crash_everywhere<I, O>(workflow: &Workflow<I, O>, input: I, mut check: impl FnMut(&CrashOutcome<O>)) -> u64
where
    I: Serialize + Clone + Send + 'static,
    O: DeserializeOwned + Send + 'static,
{
    let mut crashes = 0;
    let mut commit = 1;
    loop {
        let mut has_crashed = false;
        for side in [Side::Before, Side::After] {
            if let Some(outcome) = crash_once(workflow, input.clone(), Crash { commit, side }).await {
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

/// The id under which an execution is started, and started again if the crash left no trace of it.
const ID: &str = "execution";

async fn crash_once<I, O>(workflow: &Workflow<I, O>, input: I, crash: Crash) -> Option<CrashOutcome<O>>
where
    I: Serialize + Clone + Send + 'static,
    O: DeserializeOwned + Send + 'static,
{
    let (env, clock) = Env::seeded(crash.commit);
    let memory = Arc::new(MemoryBackend::new(env.clone()));
    let bodies = Arc::default();
    // The engine's own commits when it starts are not the workflow's.
    let idle = Arc::new(Life::new(memory.clone(), None));
    drop(engine(&idle, &env, workflow, &bodies).await.ok()?);
    let before = Arc::new(Life::new(memory.clone(), None));
    drop(engine(&before, &env, workflow, &bodies).await.ok()?);
    let crash_at = Crash { commit: crash.commit + before.commits(), side: crash.side };
    let life = Arc::new(Life::new(memory.clone(), Some(crash_at)));
    let first = while_time_passes(&clock, &env, async {
        let engine = engine(&life, &env, workflow, &bodies).await?;
        let handle = engine.start(workflow, input.clone()).id(ID).await?;
        let mut ended = std::pin::pin!(handle.result());
        // A crash leaves nobody to tell of it.
        std::future::poll_fn(|context| match ended.as_mut().poll(context) {
            std::task::Poll::Ready(result) => std::task::Poll::Ready(result),
            std::task::Poll::Pending if life.has_crashed() => std::task::Poll::Ready(Err(WorkflowError::Stopped)),
            std::task::Poll::Pending => std::task::Poll::Pending,
        })
        .await
    });
    let first = first.await;
    if !life.has_crashed() {
        assert!(
            first.is_ok() || !matches!(first, Err(WorkflowError::Store(_))),
            "without a crash nothing is in the way"
        );
        return None;
    }
    let life = Arc::new(Life::new(memory, None));
    let result = while_time_passes(&clock, &env, async {
        let engine = engine(&life, &env, workflow, &bodies).await?;
        engine.start(workflow, input).id(ID).or_join().await?.result().await
    });
    let result = result.await;
    let bodies = bodies.lock().clone();
    Some(CrashOutcome { crash, result, bodies })
}
