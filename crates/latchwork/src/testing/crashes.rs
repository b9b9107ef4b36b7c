//! Crashes of a workflow at every one of its commits. The first run has no crash. It shows how many commits the
//! workflow makes, and which path the code takes. Every other run must take the same path up to its crash.

use std::future::Future;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::course::{Course, difference};
use super::fault::{Crash, CrashAt, Life, Side};
use super::{Prepare, TURNS, as_mock, engine, lists, mocking, outcome, registering, while_time_passes};
use crate::entity::Entities;
use crate::state::States;
use crate::store::backend::MemoryBackend;
use crate::store::disk::RealDisk;
use crate::store::{Env, Limits, Store, VirtualClock};
use crate::workflow::{Engine, Failure, Result, Workflow, WorkflowError};

/// The id of the execution. The second life starts it again if the crash left no trace of it.
const ID: &str = "execution";

/// What happened to an execution that met a crash.
#[derive(Debug)]
#[non_exhaustive]
pub struct CrashOutcome<O> {
    /// Where the crash was.
    pub crash: Crash,
    /// The result of the execution after the crash.
    pub result: Result<O>,
    /// The names of the steps whose bodies ran, in order, in both lives.
    pub bodies: Vec<String>,
    engine: Engine,
}

impl<O> CrashOutcome<O> {
    /// The engine that recovered the execution. It still runs, and time passes while the check waits.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// # use latchwork::testing::crash_everywhere;
    /// # use latchwork::workflow::{Ctx, Workflow, workflow};
    /// # fn order() -> Workflow<u64, u64> {
    /// #     workflow("order").run(async |ctx: Ctx, price: u64| {
    /// #         ctx.run("charge", async || Ok(price)).await
    /// #     })
    /// # }
    /// crash_everywhere(order, 7, async |outcome| {
    ///     assert!(outcome.engine().history("execution").await.is_ok());
    /// })
    /// .await;
    /// # }
    /// ```
    pub fn engine(&self) -> &Engine {
        &self.engine
    }

    /// The entities after the run.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// # use latchwork::testing::crash_everywhere;
    /// # use latchwork::workflow::{Ctx, Workflow, workflow};
    /// # fn order() -> Workflow<u64, u64> {
    /// #     workflow("order").run(async |ctx: Ctx, price: u64| {
    /// #         ctx.run("charge", async || Ok(price)).await
    /// #     })
    /// # }
    /// crash_everywhere(order, 7, async |outcome| {
    ///     assert!(outcome.entities().get("account-1").await.unwrap().is_none());
    /// })
    /// .await;
    /// # }
    /// ```
    pub fn entities(&self) -> &Entities {
        self.engine.entities()
    }

    /// The slots and containers after the run.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// # use latchwork::testing::crash_everywhere;
    /// # use latchwork::workflow::{Ctx, Workflow, workflow};
    /// # fn order() -> Workflow<u64, u64> {
    /// #     workflow("order").run(async |ctx: Ctx, price: u64| {
    /// #         ctx.run("charge", async || Ok(price)).await
    /// #     })
    /// # }
    /// crash_everywhere(order, 7, async |outcome| {
    ///     let income = outcome.states().global().slot::<u64>("income").get().await.unwrap();
    ///     assert_eq!(income, None, "{}", outcome.crash);
    /// })
    /// .await;
    /// # }
    /// ```
    pub fn states(&self) -> &States {
        self.engine.states()
    }

    /// The store after the run.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// # use latchwork::testing::crash_everywhere;
    /// # use latchwork::workflow::{Ctx, Workflow, workflow};
    /// # fn order() -> Workflow<u64, u64> {
    /// #     workflow("order").run(async |ctx: Ctx, price: u64| {
    /// #         ctx.run("charge", async || Ok(price)).await
    /// #     })
    /// # }
    /// crash_everywhere(order, 7, async |outcome| {
    ///     assert!(!outcome.store().spaces().await.unwrap().is_empty());
    /// })
    /// .await;
    /// # }
    /// ```
    pub fn store(&self) -> &Store {
        self.engine.store()
    }
}

/// Runs a workflow once for each of its commits with a crash right before it, and once with a crash right after it.
/// Each time a new engine recovers the execution, and the check gets the outcome. Returns the number of crashes.
///
/// The first argument makes the workflow. It is called once for each run, so a fake that it makes is new in each run.
/// The crash does not affect the fake, as it would not affect a service outside of the process. Use a current-thread
/// runtime, as `#[tokio::test]` makes it: then all runs take the same path.
///
/// # Panics
///
/// If a run takes another path than the first run, which has no crash: other operations, or another number of commits.
/// In that case the runs would not crash at every commit of the code. The cause is state that runs share, or a decision
/// that depends on something that is not recorded. [`Crashes::any_path`] allows it.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// use std::sync::atomic::{AtomicU32, Ordering};
///
/// use latchwork::testing::crash_everywhere;
/// use latchwork::workflow::{Ctx, Failure, workflow};
///
/// let order = || {
///     let calls = AtomicU32::new(0); // a bank that is busy at first, in every run
///     let charge = move |price: u64| match calls.fetch_add(1, Ordering::SeqCst) {
///         0 => Err(Failure::new("busy")),
///         _ => Ok(price),
///     };
///     let charge = std::sync::Arc::new(charge);
///     workflow("order").run(move |ctx: Ctx, price: u64| {
///         let charge = charge.clone();
///         async move {
///             let paid = ctx.run("charge", async || charge(price)).await?;
///             Ok(ctx.state().global::<u64>("income").increment(paid).await?.value)
///         }
///     })
/// };
/// crash_everywhere(order, 7, async |outcome| {
///     assert_eq!(outcome.result.as_ref().unwrap(), &7);
///     let income = outcome.states().global().slot::<u64>("income").get().await.unwrap();
///     assert_eq!(income, Some(7));
/// })
/// .await;
/// # }
/// ```
pub async fn crash_everywhere<I, O>(
    workflow: impl FnMut() -> Workflow<I, O>,
    input: I,
    check: impl AsyncFnMut(&CrashOutcome<O>),
) -> u64
where
    I: Serialize + Clone + Send + 'static,
    O: DeserializeOwned + Send + 'static,
{
    Crashes::of(workflow, input).run(check).await
}

/// Like [`crash_everywhere`], for a workflow that gets messages, starts other workflows, or needs data or mocks.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() {
/// use latchwork::entity::Add;
/// use latchwork::json;
/// use latchwork::testing::Crashes;
/// use latchwork::workflow::{Ctx, Engine, Failure, workflow};
///
/// let order = || {
///     workflow("order").run(async |ctx: Ctx, price: u64| {
///         ctx.run("charge", async || Err::<u64, _>(Failure::new("there is no bank in a test"))).await?;
///         ctx.receive::<String>("approve").await
///     })
/// };
/// let crashes = Crashes::of(order, 7)
///     .mock("charge", |_attempt| Ok(7u64))
///     .set_up(async |engine: Engine| {
///         engine.entities().add(Add::new("account").id("ada").data(json!({"balance": 7}))).await.unwrap();
///     })
///     .outside(async |engine: Engine| {
///         let _ = engine.signal("execution", "approve", "Ada").id("click-1").await;
///     });
/// crashes
///     .run(async |outcome| {
///         assert_eq!(outcome.result.as_ref().unwrap(), "Ada");
///         assert!(outcome.entities().get("ada").await.unwrap().is_some());
///     })
///     .await;
/// # }
/// ```
#[must_use = "nothing crashes until it is run"]
pub struct Crashes<'a, I, O> {
    workflow: Box<dyn FnMut() -> Workflow<I, O> + 'a>,
    input: I,
    others: Vec<Box<dyn FnMut() -> Prepare + 'a>>,
    set_up: Scene<'a>,
    outside: Scene<'a>,
    allows_any_path: bool,
}

/// What a test does with an engine from outside of the workflow.
type Scene<'a> = Box<dyn Fn(Engine) -> Pin<Box<dyn Future<Output = ()> + 'a>> + 'a>;

fn nothing<'a>() -> Scene<'a> {
    Box::new(|_| Box::pin(std::future::ready(())))
}

impl<'a, I, O> Crashes<'a, I, O>
where
    I: Serialize + Clone + Send + 'static,
    O: DeserializeOwned + Send + 'static,
{
    /// Crashes of this workflow, started with this input under the id `execution`. The first argument makes the
    /// workflow, once for each run.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// # use latchwork::testing::Crashes;
    /// # use latchwork::workflow::{Ctx, Workflow, workflow};
    /// # fn order() -> Workflow<u64, u64> {
    /// #     workflow("order").run(async |ctx: Ctx, price: u64| {
    /// #         ctx.run("charge", async || Ok(price)).await
    /// #     })
    /// # }
    /// Crashes::of(order, 7)
    ///     .run(async |outcome| assert_eq!(outcome.result.as_ref().unwrap(), &7))
    ///     .await;
    /// # }
    /// ```
    pub fn of(workflow: impl FnMut() -> Workflow<I, O> + 'a, input: I) -> Crashes<'a, I, O> {
        let (workflow, others) = (Box::new(workflow), Vec::new());
        Crashes { workflow, input, others, set_up: nothing(), outside: nothing(), allows_any_path: false }
    }

    /// Registers another workflow, which is made once for each run.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// # use latchwork::testing::Crashes;
    /// # use latchwork::workflow::{Ctx, Workflow, workflow};
    /// # fn order() -> Workflow<u64, u64> {
    /// #     workflow("order").run(async |ctx: Ctx, price: u64| {
    /// #         ctx.run("charge", async || Ok(price)).await
    /// #     })
    /// # }
    /// let crashes = Crashes::of(order, 7).register(|| {
    ///     workflow("mail").run(async |_: Ctx, address: String| Ok(address.len())) // a child of the order, for example
    /// });
    /// crashes.run(async |outcome| assert!(outcome.result.is_ok())).await;
    /// # }
    /// ```
    pub fn register<A: 'static, B: 'static>(
        mut self,
        mut workflow: impl FnMut() -> Workflow<A, B> + 'a,
    ) -> Crashes<'a, I, O> {
        self.others.push(Box::new(move || registering(workflow())));
        self
    }

    /// Runs this in place of the body of every step of that name. It gets the number of the attempt, from 1. Its result
    /// must depend on that number only, because all runs share it.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// # use latchwork::testing::Crashes;
    /// # use latchwork::workflow::{Ctx, Workflow, workflow};
    /// # fn order() -> Workflow<u64, u64> {
    /// #     workflow("order").run(async |ctx: Ctx, price: u64| {
    /// #         ctx.run("charge", async || Ok(price)).await
    /// #     })
    /// # }
    /// let crashes = Crashes::of(order, 7).mock("charge", |_attempt| Ok(8u64));
    /// crashes.run(async |outcome| assert_eq!(outcome.result.as_ref().unwrap(), &8)).await;
    /// # }
    /// ```
    pub fn mock<T: Serialize>(
        mut self,
        step: &str,
        mock: impl Fn(u32) -> std::result::Result<T, Failure> + Send + Sync + 'static,
    ) -> Crashes<'a, I, O> {
        let (step, mock) = (step.to_string(), as_mock(mock));
        self.others.push(Box::new(move || mocking(&step, mock.clone())));
        self
    }

    /// Runs once in each run before the execution is started, for example to add entities and slots that it needs. No
    /// crash happens during it.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// # use latchwork::testing::Crashes;
    /// # use latchwork::workflow::{Ctx, Engine, Workflow, workflow};
    /// # fn order() -> Workflow<u64, u64> {
    /// #     workflow("order").run(async |ctx: Ctx, price: u64| {
    /// #         ctx.run("charge", async || Ok(price)).await
    /// #     })
    /// # }
    /// let crashes = Crashes::of(order, 7).set_up(async |engine: Engine| {
    ///     engine.states().global().slot::<u64>("income").set(41).await.unwrap();
    /// });
    /// crashes.run(async |outcome| assert!(outcome.result.is_ok())).await;
    /// # }
    /// ```
    pub fn set_up<F>(mut self, set_up: impl Fn(Engine) -> F + 'a) -> Crashes<'a, I, O>
    where
        F: Future<Output = ()> + 'a,
    {
        self.set_up = Box::new(move |engine| Box::pin(set_up(engine)));
        self
    }

    /// What callers do while the execution runs, from the start of each life. It is done in both lives of a run, so
    /// messages need ids.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// # use latchwork::testing::Crashes;
    /// # use latchwork::workflow::{Ctx, Engine, Workflow, workflow};
    /// # fn approval() -> Workflow<(), String> {
    /// #     workflow("approval").run(async |ctx: Ctx, _: ()| {
    /// #         ctx.receive::<String>("approve").await
    /// #     })
    /// # }
    /// let crashes = Crashes::of(approval, ()).outside(async |engine: Engine| {
    ///     let _ = engine.signal("execution", "approve", "Ada").id("click-1").await;
    /// });
    /// crashes.run(async |outcome| assert_eq!(outcome.result.as_ref().unwrap(), "Ada")).await;
    /// # }
    /// ```
    pub fn outside<F>(mut self, outside: impl Fn(Engine) -> F + 'a) -> Crashes<'a, I, O>
    where
        F: Future<Output = ()> + 'a,
    {
        self.outside = Box::new(move |engine| Box::pin(outside(engine)));
        self
    }

    /// Allows runs to take different paths: for bodies that do real I/O, or on a runtime of several threads. Runs then
    /// continue until one of them ends before its crash, and the number of crashes may differ.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// # use latchwork::testing::Crashes;
    /// # use latchwork::workflow::{Ctx, Workflow, workflow};
    /// # fn order() -> Workflow<u64, u64> {
    /// #     workflow("order").run(async |ctx: Ctx, price: u64| {
    /// #         ctx.run("charge", async || Ok(price)).await
    /// #     })
    /// # }
    /// Crashes::of(order, 7).any_path().run(async |outcome| assert!(outcome.result.is_ok())).await;
    /// # }
    /// ```
    pub fn any_path(mut self) -> Crashes<'a, I, O> {
        self.allows_any_path = true;
        self
    }

    /// Crashes at every commit, and passes each outcome to the check. Returns the number of crashes.
    ///
    /// # Panics
    ///
    /// If a run takes another path than the first run; see [`crash_everywhere`].
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() {
    /// # use latchwork::testing::Crashes;
    /// # use latchwork::workflow::{Ctx, Workflow, workflow};
    /// # fn order() -> Workflow<u64, u64> {
    /// #     workflow("order").run(async |ctx: Ctx, price: u64| {
    /// #         ctx.run("charge", async || Ok(price)).await
    /// #     })
    /// # }
    /// let crashes = Crashes::of(order, 7).run(async |outcome| assert!(outcome.result.is_ok())).await;
    /// println!("the order has survived {crashes} crashes");
    /// # }
    /// ```
    pub async fn run(mut self, mut check: impl AsyncFnMut(&CrashOutcome<O>)) -> u64 {
        let first = self.fresh().live_through(&self, None).await;
        let commits = if self.allows_any_path { u64::MAX } else { first.commits };
        let mut crashes = 0;
        for commit in 1..=commits {
            for side in [Side::Before, Side::After] {
                let crash = Crash { commit, side };
                let run = self.fresh();
                let lived = run.live_through(&self, Some(crash)).await;
                if !self.allows_any_path {
                    assert_same_path(crash, &first, &lived);
                } else if !lived.has_crashed {
                    return crashes;
                }
                let outcome = run.recover(&self, crash).await;
                while_time_passes(&run.clock, &run.env, check(&outcome)).await;
                outcome.engine.stop();
                crashes += 1;
            }
        }
        crashes
    }

    /// A new run with its own store. Everything that is made once for each run is made here.
    fn fresh(&mut self) -> OneRun<I, O> {
        // All runs use the same seed, so that they differ only by their crashes.
        let (env, clock) = Env::seeded(1);
        let memory = Arc::new(MemoryBackend::new(env.clone()));
        let workflow = (self.workflow)();
        let mut prepare = vec![registering(workflow.clone())];
        prepare.extend(self.others.iter_mut().map(|other| other()));
        OneRun { workflow, prepare, env, clock, memory, course: Arc::default() }
    }
}

/// What the first life of a run did.
struct Lived {
    /// Bodies and commits up to the crash.
    lines: Vec<String>,
    commits: u64,
    has_crashed: bool,
}

fn assert_same_path(crash: Crash, first: &Lived, this: &Lived) {
    let differs = difference(&first.lines, &this.lines).or_else(|| {
        let ended = format!("ended after {} commits", this.commits);
        (!this.has_crashed).then(|| (format!("made {} commits", first.commits), ended))
    });
    if let Some((expected, found)) = differs {
        panic!(
            "{crash}: this run took another path than the first run, which has no crash.\n  \
             first run: {expected}\n  this run:  {found}\n\
             Do runs share state? Make fakes and counters inside of the closure that makes the workflow. \
             Crashes::any_path() allows different paths."
        );
    }
}

/// One run: a life that crashes, and a life that recovers.
struct OneRun<I, O> {
    workflow: Workflow<I, O>,
    prepare: Vec<Prepare>,
    env: Env,
    clock: Arc<VirtualClock>,
    memory: Arc<MemoryBackend>,
    course: Arc<Course>,
}

impl<I, O> OneRun<I, O>
where
    I: Serialize + Clone + Send + 'static,
    O: DeserializeOwned + Send + 'static,
{
    /// The first life, up to its crash or to the end of the execution.
    async fn live_through(&self, plan: &Crashes<'_, I, O>, crash: Option<Crash>) -> Lived {
        // Tasks of the previous run may still have turns left, which would change the order of turns in this run.
        for _ in 0..TURNS {
            tokio::task::yield_now().await;
        }
        let idle = Arc::new(Life::new(self.memory.clone(), None));
        let prepared = engine(&idle, &self.env, &self.prepare, &self.course).await;
        let prepared = prepared.expect("the engine of a test starts");
        while_time_passes(&self.clock, &self.env, (plan.set_up)(prepared.clone())).await;
        prepared.stop();
        drop(prepared);
        let life = Arc::new(Life::recorded(self.memory.clone(), crash, &self.course));
        let lived = while_time_passes(&self.clock, &self.env, self.live(plan, &life)).await;
        let has_crashed = life.has_crashed();
        let result = lived.and_then(|(engine, result)| {
            engine.stop();
            result
        });
        assert!(has_crashed || !matches!(result, Err(WorkflowError::Store(_))), "the store fails without a crash");
        let mut lines = self.course.end();
        if has_crashed {
            // Bodies may begin after the crash, before the life is dropped.
            lines.truncate(1 + lines.iter().rposition(|line| line.starts_with("commit ")).unwrap_or_default());
        }
        Lived { lines, commits: life.commits(), has_crashed }
    }

    /// The second life.
    async fn recover(&self, plan: &Crashes<'_, I, O>, crash: Crash) -> CrashOutcome<O> {
        let life = Arc::new(Life::new(self.memory.clone(), None));
        self.check_lists(&life, crash).await;
        let lived = while_time_passes(&self.clock, &self.env, self.live(plan, &life)).await;
        let (engine, result) = lived.expect("an engine starts after a crash");
        self.check_lists(&life, crash).await;
        CrashOutcome { crash, result, bodies: self.course.bodies(), engine }
    }

    /// Checks that lists agree with the records of executions, wherever the crash was.
    async fn check_lists(&self, life: &Arc<Life<CrashAt>>, crash: Crash) {
        let store = Store::with_backend(life.clone(), self.env.clone(), Limits::default(), Arc::new(RealDisk)).await;
        let store = store.expect("a store in memory can be opened");
        let differences = lists::differences(&store).await.expect("a store in memory can be read");
        assert!(differences.is_empty(), "{crash}: {}", differences.join("\n"));
    }

    /// One life: it starts the execution, or joins it if an earlier life has started it, and runs the callers.
    async fn live(&self, plan: &Crashes<'_, I, O>, life: &Arc<Life<CrashAt>>) -> Result<(Engine, Result<O>)> {
        let engine = engine(life, &self.env, &self.prepare, &self.course).await?;
        // The commits that an engine makes when it starts do not belong to the workflow.
        let spaces = engine.store().spaces().await?;
        life.begin(spaces.into_iter().map(|space| (space.id(), space.name().to_string())).collect());
        let start = async {
            let handle = engine.start(&self.workflow, plan.input.clone()).id(ID).or_join().await?;
            let mut outside = Some((plan.outside)(engine.clone()));
            let mut ended = pin!(outcome(&engine, &handle));
            // After a crash no answer arrives.
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
        };
        let result = start.await;
        Ok((engine, result))
    }
}
