//! The context of a workflow's function: every operation that is recorded.

pub(crate) mod beats;
pub(crate) mod branches;
pub(crate) mod child;
pub(crate) mod label;
pub(crate) mod locks;
pub(crate) mod publish;
pub(crate) mod rate;
pub(crate) mod review;
pub(crate) mod saga;
pub(crate) mod signal;
pub(crate) mod slots;
#[cfg(feature = "postgres")]
pub(crate) mod sql;
pub(crate) mod step;
pub(crate) mod token;
pub(crate) mod transaction;
pub(crate) mod update;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::json;
use crate::store::{StoreError, Timestamp, Uuid};
use crate::workflow::ctx::slots::CtxState;
use crate::workflow::ctx::step::{Attempt, Plain, Step, WithAttempt};
use crate::workflow::engine::EngineInner;
use crate::workflow::journal::replay::{OpCall, shown_call};
use crate::workflow::run::{Branch, Run, WaitEnd, hash_text};
use crate::workflow::stored::record::{Entry, EntryState, Kind, WaitsFor};
use crate::workflow::{ExecutionId, Failure};

/// The context of an execution, or of one of its branches.
#[derive(Clone)]
pub struct Ctx {
    pub(crate) run: Arc<Run>,
    pub(crate) branch: Arc<Branch>,
    /// True if its operations continue when the execution is cancelled.
    pub(crate) is_shielded: bool,
}

shown!(Ctx, it => id: it.run.id);

pub(crate) fn hash(value: &(impl Serialize + ?Sized)) -> u64 {
    hash_text(&json::to_value(value).unwrap_or_default().to_string())
}

impl Ctx {
    pub(crate) fn engine(&self) -> &Arc<EngineInner> {
        &self.run.engine
    }

    /// The store is unavailable to a layer above: the execution stops where it is, and continues when it can.
    pub(crate) async fn stop_for_store<T>(&self, error: StoreError) -> T {
        self.run.stop_for(self.run.stops(error.into())).await
    }

    /// The execution's id.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// println!("{} begins", ctx.id());
    /// # Ok(()) }
    /// ```
    pub fn id(&self) -> &ExecutionId {
        &self.run.id
    }

    /// A step: its body runs at least once, and its result is recorded exactly once. `?` in the body takes any error.
    /// Await the step, after the settings that it needs.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{Ctx, Failure, Retry};
    /// # async fn charge(price: u64) -> std::io::Result<String> { Ok(String::new()) }
    /// async fn order(ctx: Ctx, price: u64) -> Result<String, Failure> {
    ///     ctx.run("charge", async || Ok(charge(price).await?))
    ///         .retry(Retry::exponential().max_attempts(5))
    ///         .timeout(Duration::from_secs(10))
    ///         .await
    /// }
    /// ```
    pub fn run<F, Fut, T>(&self, name: &str, body: F) -> Step<'_, Plain<F>>
    where
        F: Fn() -> Fut + Send + Sync,
        Fut: Future<Output = Result<T, Failure>> + Send,
        T: Serialize + DeserializeOwned + Send,
    {
        Step::new(self, name, Plain(body))
    }

    /// Like [`Ctx::run`], with a body that is given its [`Attempt`]: its number and its idempotency key.
    ///
    /// ```
    /// # use latchwork::store::Uuid;
    /// # use latchwork::workflow::{Attempt, Ctx, Failure};
    /// # async fn charge(price: u64, key: Uuid) -> std::io::Result<String> { Ok(String::new()) }
    /// async fn order(ctx: Ctx, price: u64) -> Result<String, Failure> {
    ///     ctx.run_with("charge", async |attempt: Attempt| Ok(charge(price, attempt.idempotency_key).await?)).await
    /// }
    /// ```
    pub fn run_with<F, Fut, T>(&self, name: &str, body: F) -> Step<'_, WithAttempt<F>>
    where
        F: Fn(Attempt) -> Fut + Send + Sync,
        Fut: Future<Output = Result<T, Failure>> + Send,
        T: Serialize + DeserializeOwned + Send,
    {
        Step::new(self, name, WithAttempt(body))
    }

    /// The slots of the store. A change from here and the record of that change are one commit, so neither a crash nor
    /// a replay makes the change twice.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// let number = ctx.state().global::<u64>("orders").increment(1).await?.value;
    /// # Ok(()) }
    /// ```
    pub fn state(&self) -> CtxState {
        CtxState::new(self.clone())
    }

    /// Starts the execution anew with another input, under the same id and with an empty journal, so that the journal
    /// of an endless loop does not grow for ever. The new run can receive messages that were not received yet. Await
    /// this and return its result; it never returns to the code.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// async fn sum_up(ctx: Ctx, sum: u64) -> Result<u64, Failure> {
    ///     match ctx.receive::<u64>("number").await? {
    ///         0 => Ok(sum),
    ///         number => ctx.continue_as_new(sum + number).await,
    ///     }
    /// }
    /// ```
    pub async fn continue_as_new<T>(&self, input: impl Serialize) -> Result<T, Failure> {
        if self.here().path.is_named() {
            let message = "a block of a flow cannot continue as new: its request is the run of the whole flow";
            return Err(Failure::new(message).with_code("latchwork.continue_as_new").not_retryable());
        }
        let input = self.run.text("the next input", &input)?;
        self.expect_no_more(&self.here(), "the code continues as new").await;
        self.run.effect().await;
        self.operation(WaitsFor::Store, |doing| async move {
            if self.run.with(|state| !state.known.is_stored()) {
                let _ = doing.flush().await;
            }
            self.run.with(|state| state.residency.continue_with(input));
            std::future::pending().await
        })
        .await
    }

    /// The context of the function itself.
    pub(crate) fn root(run: &Arc<Run>) -> Ctx {
        Ctx { run: run.clone(), branch: Branch::root(run), is_shielded: false }
    }

    /// The context of a branch.
    pub(crate) fn on(&self, branch: Arc<Branch>) -> Ctx {
        Ctx { run: self.run.clone(), branch, is_shielded: self.is_shielded }
    }

    /// A context at the same place in the code whose operations continue when the execution is cancelled: for cleanup.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// if let Err(failure) = ctx.sleep(Duration::from_secs(3600)).await {
    ///     ctx.shielded().run("give back", async || Ok(())).await?;
    ///     return Err(failure);
    /// }
    /// # Ok(()) }
    /// ```
    pub fn shielded(&self) -> Ctx {
        Ctx { is_shielded: true, ..self.clone() }
    }

    /// True if the execution or this branch is to be cancelled, and this context is not shielded. The next operation
    /// that can fail then does so; this call is for code that needs to know earlier.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// for page in 0..100 {
    ///     if ctx.is_cancelled().await {
    ///         break;
    ///     }
    ///     println!("page {page}");
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn is_cancelled(&self) -> bool {
        self.value(Kind::IsCancelled, "", |run| {
            !self.is_shielded && run.with(|state| state.cancelled(&self.here().path).is_some())
        })
        .await
    }

    /// The branch of an operation: the branch whose code is polled, whichever context the operation is called on. So
    /// guards and children can be moved into branches and out of them.
    pub(crate) fn here(&self) -> Arc<Branch> {
        Branch::polled(&self.run).map_or_else(|| self.branch.clone(), |(branch, _)| branch)
    }

    /// Marks an operation as in progress. Returns its branch.
    pub(crate) async fn begins(&self) -> Arc<Branch> {
        // After continue-as-new or a stop, no operation begins.
        if self.run.with(|state| state.residency.continues() || state.residency.is_stopping()) {
            return std::future::pending().await;
        }
        let here = self.here();
        if !here.begins() {
            let reason = "an operation began while another was in progress or had been dropped before its end; \
                          await one before the next, or run each in its own branch by ctx.join or ctx.race";
            self.run.park(reason).await
        }
        here
    }

    /// Parks the execution unless the code of the branch ends where its journal ends.
    pub(crate) async fn expect_end(&self) {
        self.expect_no_more(&self.branch, &format!("the code of branch {} has ended", self.branch.path)).await
    }

    /// Parks the execution if the journal holds another entry of a branch.
    async fn expect_no_more(&self, branch: &Branch, what: &str) {
        if let Some(Entry { kind, name, .. }) = self.peek(branch).await {
            self.run.engine.rehearsal.differ(branch.reached(), shown_call(kind, &name), what);
            self.run.park(format!("{what}, and the journal continues with {kind} {name:?}")).await
        }
    }

    /// The next entry of a branch in the journal.
    async fn peek(&self, branch: &Branch) -> Option<Entry> {
        match branch.peek(&self.run).await {
            Ok(next) => next,
            Err(stop) => self.run.stop_for(stop).await,
        }
    }

    /// Waits. A long wait uses no memory. After a restart, only the remaining time is waited.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// ctx.sleep(Duration::from_secs(3600)).await?;
    /// # Ok(()) }
    /// ```
    pub async fn sleep(&self, duration: Duration) -> Result<(), Failure> {
        let argument = hash(&u64::try_from(duration.as_micros()).unwrap_or(u64::MAX));
        self.wait(argument, |now| now.plus(duration)).await
    }

    /// Waits until a time of day.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// let due = ctx.now().await.plus(Duration::from_secs(3600));
    /// ctx.run("remind", async || Ok(())).await?;
    /// ctx.sleep_until(due).await?;
    /// # Ok(()) }
    /// ```
    pub async fn sleep_until(&self, time: Timestamp) -> Result<(), Failure> {
        self.wait(hash(&time.0), |_| time).await
    }

    async fn wait(&self, argument: u64, until: impl FnOnce(Timestamp) -> Timestamp) -> Result<(), Failure> {
        let call = OpCall { kind: Kind::Sleep, name: "", argument };
        self.replay(WaitsFor::Timer, call, |mut operation| async move {
            if operation.is_new {
                operation.unless_cancelled()?;
                operation.put(EntryState::Until(until(operation.since()).0));
            }
            self.run.effect().await;
            let EntryState::Until(until) = operation.entry.state else {
                let place = &operation.place;
                let reason = format!("operation {place} is a sleep, and the journal has no end time for it");
                return self.run.park(reason).await;
            };
            let (since, until) = (operation.since(), Some(Timestamp(until)));
            match operation.doing.wait(WaitsFor::Timer, since, until, |_| None::<()>).await {
                WaitEnd::Cancelled => return Err(operation.cancelled()),
                _ => operation.done(&()),
            }
            Ok(())
        })
        .await
    }

    /// The time of day; the same on every replay.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// let due = ctx.now().await.plus(Duration::from_secs(3600));
    /// # Ok(()) }
    /// ```
    pub async fn now(&self) -> Timestamp {
        Timestamp(self.value(Kind::Now, "", |run| run.env().now().0).await)
    }

    /// A new id; the same on every replay.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// let ticket = ctx.uuid().await;
    /// # Ok(()) }
    /// ```
    pub async fn uuid(&self) -> Uuid {
        let value = self.value(Kind::Uuid, "", |run| run.env().uuid().as_u128().to_string()).await;
        Uuid::from_u128(value.parse().unwrap_or(0))
    }

    /// A random number; the same on every replay.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// let percent = ctx.random().await % 100;
    /// # Ok(()) }
    /// ```
    pub async fn random(&self) -> u64 {
        self.value(Kind::Random, "", |run| run.env().random()).await
    }

    /// The version of the code that an execution follows, for code that changes while executions run. An execution that
    /// reaches this call for the first time gets the last version of the range. On a replay it gets the recorded
    /// version; if it passed this place before the call existed, it gets the first version.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// let name = if ctx.version("name", 1..=2).await == 1 { "draw" } else { "sketch" };
    /// ctx.run(name, async || Ok(())).await?;
    /// # Ok(()) }
    /// ```
    pub async fn version(&self, change: &str, range: std::ops::RangeInclusive<u32>) -> u32 {
        // The execution passed this place before the call existed.
        let next = self.peek(&self.here()).await;
        if next.is_some_and(|entry| (entry.kind, &*entry.name) != (Kind::Version, change)) {
            return *range.start();
        }
        let version = self.value(Kind::Version, change, |_| *range.end()).await;
        if range.contains(&version) {
            return version;
        }
        let (first, last) = range.into_inner();
        let reason = format!("it follows version {version} of {change:?}, and the code supports {first} to {last}");
        self.run.park(reason).await
    }
}
