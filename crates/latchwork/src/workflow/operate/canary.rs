//! The canary: replays the histories of executions that have not ended against the code of this program, before it
//! takes work. Each history is copied into a store in memory and replayed there, so nothing is written to the store
//! that is checked. What a replay does at an operation is decided in `run` and `journal`.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{Either, select};
use serde::Serialize;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::store::{Commit, Env, ErrorKind, Rev, Store, StoreError, View};
use crate::workflow::ctx::Ctx;
use crate::workflow::definition::{Definition, Definitions};
use crate::workflow::engine::rehearsal::JournalDifference;
use crate::workflow::engine::{Engine, EngineBuilder, EngineSpaces, StoreSource};
use crate::workflow::journal::replay::shown_call;
use crate::workflow::run::driver::{ResidencyEnd, live};
use crate::workflow::run::{Run, Stop};
use crate::workflow::stored::keys::{id_key, run_key};
use crate::workflow::stored::record::{Execution, StoredStatus, fetch_execution, next_page};
use crate::workflow::{Boxed, ExecutionFilter, ExecutionId, Executions, Failure, Result, Status, WorkflowError};

/// How many executions, or records of one, are read at once.
const PAGE: usize = 500;

/// How long the replay of one history may take, unless the caller says otherwise.
const TIMEOUT: Duration = Duration::from_secs(10);

/// How a replay ended.
#[cfg_attr(not(feature = "testing"), allow(dead_code))] // The canary needs no result.
pub(crate) enum ReplayEnd {
    /// The code does not fit the journal, for this reason.
    Differs(String),
    /// The code has come to what the journal does not hold, and would continue there.
    Continues,
    /// The code has ended with this result, where the journal ends.
    Finished(Result<String, Failure>),
}

/// Runs the code of an execution on its journal. The engine of the run only replays.
pub(crate) async fn replayed(run: &Arc<Run>) -> ReplayEnd {
    let ctx = Ctx::root(run);
    match live(run, ctx.clone()).await {
        ResidencyEnd::Panicked(failure) => ReplayEnd::Differs(failure.message().to_string()),
        ResidencyEnd::TimedOut => ReplayEnd::Continues,
        ResidencyEnd::Stopped => match run.stop() {
            Some(Stop::Parked(reason) | Stop::SetAside(reason)) => ReplayEnd::Differs(reason),
            _ => ReplayEnd::Continues,
        },
        ResidencyEnd::Finished(result) => match ctx.branch.peek(run).await {
            Ok(Some(entry)) => {
                let journal = shown_call(entry.kind, &entry.name);
                let reason =
                    format!("the code has ended, and the journal continues with {} {:?}", entry.kind, entry.name);
                run.engine.rehearsal.differ(ctx.branch.reached(), journal, "the code has ended");
                ReplayEnd::Differs(reason)
            }
            Ok(None) => ReplayEnd::Finished(result),
            Err(_) => ReplayEnd::Differs("its journal cannot be read".into()),
        },
    }
}

/// What the canary has found.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
#[non_exhaustive]
pub struct CanaryReport {
    /// How many histories were replayed.
    pub replayed: usize,
    /// The executions whose histories do not fit. An engine with this code would park them.
    pub misfits: Vec<Misfit>,
    /// How many running executions of the registered workflows have a version that this program does not continue.
    /// They are left to other nodes, and were not replayed.
    pub other_versions: usize,
    /// True if there are more running executions than were to be replayed.
    pub has_more: bool,
}

/// An execution whose history does not fit the code.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Misfit {
    /// The execution.
    pub id: ExecutionId,
    /// Its workflow.
    pub workflow: String,
    /// The version that it was started under.
    pub version: u32,
    /// The place in the code where the two differ: the number of the operation, in a branch with the path of that. None
    /// if they do not differ at an operation, such as when the code panics.
    pub place: Option<String>,
    /// The operation that the journal holds there.
    pub journal: Option<String>,
    /// What the code does there.
    pub code: Option<String>,
    /// All of this in words, as an operator would read it of the parked execution.
    pub reason: String,
}

impl CanaryReport {
    /// True if every history that was replayed fits.
    ///
    /// ```
    /// # use latchwork::workflow::CanaryReport;
    /// # fn example(report: CanaryReport) {
    /// assert!(report.fits(), "{:?}", report.misfits);
    /// # }
    /// ```
    pub fn fits(&self) -> bool {
        self.misfits.is_empty()
    }
}

/// A check of running executions that is about to be made.
#[must_use = "nothing is checked until this is awaited"]
pub struct CheckRunning {
    source: StoreSource,
    definitions: Vec<Arc<Definition>>,
    limit: usize,
    timeout: Duration,
}

shown!(CheckRunning, it => limit: it.limit);

impl EngineBuilder {
    /// The canary: replays the histories of running executions of the registered workflows, at most `limit` of them and
    /// the oldest first, and reports which do not fit this code. Call it before [`EngineBuilder::start`], so that a new
    /// version of a program takes no work that it would park.
    ///
    /// The check changes nothing: it writes nothing to the store, owns no shard, and runs no body of a step, of a
    /// transaction or of a flow's handler. Each history is replayed as far as it goes; what the code does after that
    /// may have changed. Other programs may work on the store meanwhile. Executions that are parked are not looked at.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// use latchwork::store::Store;
    /// use latchwork::workflow::{Ctx, Engine, workflow};
    ///
    /// let store = Store::memory().await?; // or Store::connect("postgres://…")
    /// let old = workflow("order").run(async |ctx: Ctx, price: u64| {
    ///     ctx.run("charge", async || Ok(())).await?;
    ///     ctx.receive::<u64>("paid").await.map(|paid| paid == price)
    /// });
    /// let engine = Engine::on(&store).register(&old).start().await?;
    /// engine.start(&old, 42).id("order-7").await?;
    /// # while engine.describe("order-7").await?.waits.is_empty() {
    /// #     tokio::task::yield_now().await;
    /// # }
    ///
    /// let new = workflow("order").run(async |ctx: Ctx, price: u64| {
    ///     ctx.run("reserve", async || Ok(())).await?; // was not here before
    ///     ctx.run("charge", async || Ok(())).await?;
    ///     ctx.receive::<u64>("paid").await.map(|paid| paid == price)
    /// });
    /// let builder = Engine::on(&store).register(&new);
    /// let report = builder.check_running(1000).await?;
    /// assert_eq!(report.misfits[0].id, "order-7".into());
    /// assert_eq!(report.misfits[0].journal.as_deref(), Some("step \"charge\""));
    /// assert_eq!(report.misfits[0].code.as_deref(), Some("step \"reserve\""));
    /// if report.fits() {
    ///     builder.start().await?;
    /// }
    /// # Ok(()) }
    /// ```
    pub fn check_running(&self, limit: usize) -> CheckRunning {
        let (source, definitions) = (self.source.clone(), self.definitions.clone());
        CheckRunning { source, definitions, limit, timeout: TIMEOUT }
    }
}

impl CheckRunning {
    /// How long the replay of one history may take at most; the default is 10 seconds. Code that takes longer is
    /// reported. If it blocks its thread, the thread goes on until the code ends or the process does.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{EngineBuilder, Result};
    /// # async fn example(builder: EngineBuilder) -> Result<()> {
    /// let report = builder.check_running(1000).timeout(Duration::from_secs(1)).await?;
    /// # Ok(()) }
    /// ```
    pub fn timeout(mut self, timeout: Duration) -> CheckRunning {
        self.timeout = timeout;
        self
    }

    async fn check(self) -> Result<CanaryReport> {
        Handle::try_current().map_err(|_| WorkflowError::NoRuntime)?;
        let definitions = Definitions::new(self.definitions.clone())?;
        let running = ExecutionFilter::new().is(Status::Running).is(Status::Waiting);
        let filter = definitions.names().fold(running, |filter, name| filter.workflow(name));
        let mut report = CanaryReport::default();
        let Some(store) = self.source.to_read().await?.filter(|_| !self.definitions.is_empty()) else {
            return Ok(report);
        };
        let executions = Executions::on(&store).await?;
        let Some(spaces) = &executions.spaces else { return Ok(report) };
        let mut cursor = None;
        loop {
            let page = executions.list(filter.clone()).ascending().limit(PAGE).after(cursor).await?;
            for id in page.items.into_iter().map(|listed| listed.id) {
                // One view: the execution may go on meanwhile, on another node.
                let view = store.view().await?;
                let Some((execution, _)) = fetch_execution(&view, &spaces.executions, &id).await? else { continue };
                let is_running = matches!(execution.status, StoredStatus::Running | StoredStatus::Waiting);
                let definition = definitions.of_version(&execution.workflow, execution.version);
                match definition {
                    _ if !is_running => {}
                    None => report.other_versions += 1,
                    Some(_) if report.replayed == self.limit => {
                        report.has_more = true;
                        return Ok(report);
                    }
                    Some(definition) => {
                        report.replayed += 1;
                        let copied = Copied { store: &store, view: &view, spaces, id, execution };
                        report.misfits.extend(self.examine(copied, definition).await?);
                    }
                }
            }
            cursor = page.next;
            if cursor.is_none() {
                return Ok(report);
            }
        }
    }

    /// Replays one history. Returns what does not fit. An error of the store ends the check, except for damage of this
    /// execution's records.
    async fn examine(&self, copied: Copied<'_>, definition: &Arc<Definition>) -> Result<Option<Misfit>> {
        let (id, workflow) = (copied.id.clone(), copied.execution.workflow.clone());
        let version = copied.execution.version;
        let (reason, differs) = match self.replay(copied, definition).await {
            Ok(None) => return Ok(None),
            Ok(Some(found)) => found,
            Err(error) if error.kind() == ErrorKind::Corrupt => (error.to_string(), None),
            Err(error) => return Err(error),
        };
        let (place, journal, code) = match differs {
            Some(JournalDifference { place, journal, code }) => (Some(place), Some(journal), Some(code)),
            None => (None, None, None),
        };
        Ok(Some(Misfit { id, workflow, version, place, journal, code, reason }))
    }

    async fn replay(
        &self,
        copied: Copied<'_>,
        definition: &Arc<Definition>,
    ) -> Result<Option<(String, Option<JournalDifference>)>> {
        // The clock of this environment stands still: nothing in the replay waits for a time.
        let (env, _) = Env::seeded(0);
        let memory = Store::memory_with(env, *copied.store.limits()).await?;
        let engine = Engine::to_replay(&memory, self.definitions.clone()).await?;
        let run = copied.into_run(&engine, definition).await?;
        if let Err(error) = definition.check_whole(&run.input()) {
            return Ok(Some((error.to_string(), None)));
        }
        let (tell, told) = oneshot::channel();
        let (replaying, runtime) = (run.clone(), Handle::current());
        // A thread of its own, because the code may block it.
        let thread = std::thread::Builder::new().name("latchwork-canary".into());
        let begun = thread.spawn(move || drop(tell.send(runtime.block_on(replayed(&replaying)))));
        begun.map_err(|cause| StoreError::Io {
            action: "start a thread",
            path: PathBuf::new(),
            cause: Arc::new(cause),
        })?;
        let ended = match select(told, Env::system().sleep(self.timeout)).await {
            Either::Left((ended, _)) => ended.unwrap_or_else(|_| ReplayEnd::Differs("its replay panicked".into())),
            Either::Right(_) => {
                run.set_stop(Stop::Replayed);
                let limit = self.timeout;
                ReplayEnd::Differs(format!("the code does not come to the end of the journal within {limit:?}"))
            }
        };
        Ok(match ended {
            ReplayEnd::Differs(reason) => Some((reason, run.engine.rehearsal.differs.lock().take())),
            ReplayEnd::Continues | ReplayEnd::Finished(_) => None,
        })
    }
}

impl IntoFuture for CheckRunning {
    type Output = Result<CanaryReport>;
    type IntoFuture = Boxed<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.check())
    }
}

/// The records of an execution as they are in one view of the store.
struct Copied<'a> {
    store: &'a Store,
    view: &'a View,
    spaces: &'a EngineSpaces,
    id: ExecutionId,
    execution: Execution,
}

impl Copied<'_> {
    /// Copies the journal and the other records of the execution into the store of an engine that replays it.
    async fn into_run(self, engine: &Engine, definition: &Arc<Definition>) -> Result<Arc<Run>> {
        let Copied { view, spaces, id, mut execution, .. } = self;
        let inner = &engine.inner;
        let journal = (spaces.journal.prefix(run_key(&id, execution.run)), &inner.spaces.journal);
        let kept = (spaces.kept.prefix(id_key(&id)), &inner.spaces.kept);
        for (mut rest, space) in [journal, kept] {
            while let Some(found) = next_page(view, &mut rest, PAGE).await? {
                for (key, item) in found {
                    let copied = inner.store.commit(Commit::new().put(&space.key(key.bytes()), item.value)).await?;
                    copied.applied().map_err(|_| WorkflowError::Stopped)?;
                }
            }
        }
        if execution.is_batch() {
            execution.input = inner.gathered(&id).await?;
        }
        Ok(Arc::new(Run::new(inner.clone(), definition.clone(), id, execution, Some(Rev(1)))))
    }
}
