//! Operations on many executions: everything that a filter selects is cancelled, terminated, signalled or retried.

use std::future::Future;

use futures_util::{StreamExt, stream};
use serde::Serialize;

use crate::workflow::engine::Engine;
use crate::workflow::operate::filter::ExecutionFilter;
use crate::workflow::{ExecutionId, Result, WorkflowError};

/// How many executions are read at once, and how many are changed at once.
const PAGE: usize = 500;
const AT_ONCE: usize = 32;

/// How many failures a report lists.
const TOLD: usize = 1000;

/// An operation on many executions that has not started.
#[derive(Clone)]
#[must_use = "nothing is done until an operation is called"]
pub struct Bulk {
    engine: Engine,
    filter: ExecutionFilter,
    is_dry: bool,
    operation: Option<String>,
}

/// The result of an operation on many executions.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct BulkReport {
    /// How many executions the filter selected.
    pub matched: u64,
    /// For how many the operation succeeded.
    pub done: u64,
    /// How many were skipped: they had ended already, or, for a retry, did not wait for one.
    pub passed_over: u64,
    /// For how many the operation failed.
    pub failures: u64,
    /// The first 1000 failures, with the reasons.
    pub failed: Vec<(ExecutionId, WorkflowError)>,
}

impl Engine {
    /// Does the same to all executions that a filter selects and that exist by now.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, ExecutionFilter, Status, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// let parked = ExecutionFilter::new().workflow("order").is(Status::Parked);
    /// let report = engine.bulk(parked.clone()).dry_run().retry().await?;
    /// println!("this would have {} executions try again", report.matched);
    /// engine.bulk(parked).retry().await?;
    /// # Ok(()) }
    /// ```
    pub fn bulk(&self, filter: ExecutionFilter) -> Bulk {
        Bulk { engine: self.clone(), filter, is_dry: false, operation: None }
    }
}

impl Bulk {
    /// Only counts the selected executions.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, ExecutionFilter, Result};
    /// # async fn example(engine: Engine, orders: ExecutionFilter) -> Result<()> {
    /// let report = engine.bulk(orders).dry_run().cancel("the shop is closed").await?;
    /// println!("this would cancel {} executions", report.matched);
    /// # Ok(()) }
    /// ```
    pub fn dry_run(mut self) -> Bulk {
        self.is_dry = true;
        self
    }

    /// Sets an id: a signal that is sent again under the same id counts once for each execution.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, ExecutionFilter, Result};
    /// # async fn example(engine: Engine, orders: ExecutionFilter) -> Result<()> {
    /// engine.bulk(orders).operation("reminder of monday").signal("remind", "please pay").await?;
    /// # Ok(()) }
    /// ```
    pub fn operation(mut self, id: impl Into<String>) -> Bulk {
        self.operation = Some(id.into());
        self
    }

    /// Cancels them.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, ExecutionFilter, Result};
    /// # async fn example(engine: Engine, orders: ExecutionFilter) -> Result<()> {
    /// let report = engine.bulk(orders).cancel("the shop is closed").await?;
    /// println!("{} of {} are cancelled", report.done, report.matched);
    /// # Ok(()) }
    /// ```
    pub async fn cancel(self, reason: &str) -> Result<BulkReport> {
        let engine = &self.engine;
        self.each(|id| async move { engine.cancel(id, reason).await }).await
    }

    /// Ends them as failed; their code does not run any more.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, ExecutionFilter, Result};
    /// # async fn example(engine: Engine, orders: ExecutionFilter) -> Result<()> {
    /// engine.bulk(orders).terminate("they were a test").await?;
    /// # Ok(()) }
    /// ```
    pub async fn terminate(self, reason: &str) -> Result<BulkReport> {
        let engine = &self.engine;
        self.each(|id| async move { engine.terminate(id, reason).await }).await
    }

    /// Sends a signal to each of them.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, ExecutionFilter, Result};
    /// # async fn example(engine: Engine, orders: ExecutionFilter) -> Result<()> {
    /// engine.bulk(orders).signal("remind", "please pay").await?;
    /// # Ok(()) }
    /// ```
    pub async fn signal(self, name: &str, payload: &(impl Serialize + ?Sized)) -> Result<BulkReport> {
        let engine = &self.engine;
        let operation = self.operation.clone().unwrap_or_else(|| engine.store().env().uuid().to_string());
        let signal_id = format!("bulk:{operation}");
        self.each(|id| engine.signal(id, name, payload).id(&signal_id).into_future()).await
    }

    /// Retries at once the steps that wait for their next attempt, and resumes the executions that are parked.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, ExecutionFilter, Result};
    /// # async fn example(engine: Engine, orders: ExecutionFilter) -> Result<()> {
    /// let report = engine.bulk(orders).retry().await?;
    /// println!("{} try again, {} did not wait for it", report.done, report.passed_over);
    /// # Ok(()) }
    /// ```
    pub async fn retry(self) -> Result<BulkReport> {
        let engine = &self.engine;
        self.each(|id| async move { engine.retry_now(id).await }).await
    }

    async fn each<F>(&self, act: impl Fn(ExecutionId) -> F) -> Result<BulkReport>
    where
        F: Future<Output = Result<()>>,
    {
        // Executions that start from now on are not selected: the loop would not end.
        let filter = self.filter.clone().started(..=self.engine.store().env().now());
        let (mut report, mut cursor) = (BulkReport::default(), None);
        loop {
            let page = self.engine.list(filter.clone()).ascending().limit(PAGE).after(cursor).await?;
            report.matched += page.items.len() as u64;
            if !self.is_dry {
                let ids: Vec<ExecutionId> = page.items.into_iter().map(|found| found.id).collect();
                let act = &act;
                let acts = ids.into_iter().map(|id| async move { (id.clone(), act(id).await) });
                let mut acts = stream::iter(acts).buffered(AT_ONCE);
                while let Some((id, outcome)) = acts.next().await {
                    report.add(id, outcome)?;
                }
            }
            cursor = page.next;
            if cursor.is_none() {
                return Ok(report);
            }
        }
    }
}

impl BulkReport {
    fn add(&mut self, id: ExecutionId, outcome: Result<()>) -> Result<()> {
        use WorkflowError::{Ended, NotFound, NotRetrying, Stopped};
        match outcome {
            Ok(()) => self.done += 1,
            // The engine has stopped: all other operations would fail, too.
            Err(Stopped) => return Err(Stopped),
            Err(Ended { .. } | NotFound { .. } | NotRetrying { .. }) => self.passed_over += 1,
            Err(error) => {
                self.failures += 1;
                if self.failed.len() < TOLD {
                    self.failed.push((id, error));
                }
            }
        }
        Ok(())
    }
}
