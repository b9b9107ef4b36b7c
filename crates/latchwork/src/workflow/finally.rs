//! Finalizers: code that runs after any end of an execution. It is an execution of its own, which the commit that ends
//! the other starts.

use std::future::Future;
use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::lane::Part;
use crate::workflow::child::How;
use crate::workflow::ctx::Ctx;
use crate::workflow::definition::{Definition, Workflow, workflow};
use crate::workflow::engine::Inner;
use crate::workflow::record::{Execution, Labels, Status, shortened};
use crate::workflow::run::{hash_text, turn};
use crate::workflow::steer::{TERMINATED, terminated_for};
use crate::workflow::step::read_failure;
use crate::workflow::{ExecutionId, Failure, Result};

/// The longest output, in bytes, that a finalizer is told of though the commit is large.
const SMALL: usize = 64 << 10;

/// How an execution has ended, for its finalizer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Finished<I> {
    /// The execution.
    pub id: ExecutionId,
    /// What it was started with, or continued with.
    pub input: I,
    /// What it has come to.
    pub outcome: FinishedAs,
}

/// What an execution has come to.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum FinishedAs {
    /// It has completed with this output. Without one, if the output was too large to be stored once more: then the
    /// execution itself is to be asked.
    Completed(Option<Value>),
    /// It has failed.
    Failed(Failure),
    /// It was cancelled, for this reason.
    Cancelled(String),
    /// It has taken longer than it may.
    TimedOut,
    /// An operator has ended it, for this reason.
    Terminated(String),
}

impl<I, O> Workflow<I, O> {
    /// Has this run after any end of an execution: completed, failed, cancelled, timed out or terminated. It is an
    /// execution of its own, of the workflow `NAME.finally`, that is started by the commit that ends the other; so it
    /// is never missed, and never delays the result. It is registered with its workflow. To be said once, before that.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure, Finished, FinishedAs, workflow};
    /// let order = workflow("order")
    ///     .run(async |_: Ctx, cart: String| Ok(cart.len()))
    ///     .finally(async |ctx: Ctx, finished: Finished<String>| {
    ///         if let FinishedAs::Terminated(reason) = &finished.outcome {
    ///             ctx.run("tell", async || Ok::<_, Failure>(println!("{}: {reason}", finished.input))).await?;
    ///         }
    ///         Ok(())
    ///     });
    /// assert_eq!(order.name(), "order");
    /// ```
    #[must_use = "the workflow with its finalizer is to be registered"]
    pub fn finally<F, Fut>(self, function: F) -> Workflow<I, O>
    where
        F: Fn(Ctx, Finished<I>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), Failure>> + Send + 'static,
        I: DeserializeOwned + Serialize,
    {
        let name = format!("{}.finally", self.name());
        let finalizer = workflow(name).keep(self.definition.keep).run(function);
        // The first that was said stays.
        let _ = self.definition.finalizer.set(finalizer.definition);
        self
    }
}

impl Inner {
    /// The finalizer of a workflow, if it has one and that can run here.
    pub(crate) fn finalizer(&self, workflow: &str) -> Option<&Arc<Definition>> {
        let finalizer = self.definition(workflow)?.finalizer.get()?;
        self.definition(&finalizer.name)
    }

    /// What goes with the end of an execution: the start of its finalizer, if its workflow has one.
    pub(crate) async fn finalizing(
        self: &Arc<Inner>,
        id: &ExecutionId,
        before: &Execution,
        status: &Status,
        how: How,
    ) -> Result<Option<Part>> {
        let Some(finalizer) = self.finalizer(&before.workflow) else { return Ok(None) };
        let its = self.free_id(id, before.started_us).await?;
        let now = self.store.env().now();
        let input = told(id, &before.input, status, how.is_large);
        let mut first = finalizer.first_record(input, Labels::default(), now, now);
        let (part, _) = turn(self, self.at_record(&its, None), &its, None, &mut first, None);
        let engine = self.clone();
        Ok(Some(self.waking(part, &its).then(move |_| engine.metrics.started(&first.workflow))))
    }

    /// An id for the finalizer: the same whenever the end is tried again, unless another execution has it. Another one
    /// that had the same id may have begun at the same time.
    async fn free_id(&self, id: &ExecutionId, started_us: u64) -> Result<ExecutionId> {
        let start = hash_text(&format!("{id}/{started_us}"));
        for number in 0_u64.. {
            let again = if number == 0 { String::new() } else { format!("-{number}") };
            let its = ExecutionId::from(format!("{}.finally-{start:016x}{again}", shortened(id, 400)));
            if self.get(&self.record_of(&its)).await?.is_none() {
                return Ok(its);
            }
        }
        unreachable!("there are more numbers than executions")
    }
}

/// A [`Finished`] as JSON text.
fn told(id: &ExecutionId, input: &str, status: &Status, is_large: bool) -> String {
    let text = |text: &str| Value::from(text).to_string();
    let outcome = match status {
        Status::Completed(output) if is_large && output.len() > SMALL => r#"{"completed":null}"#.to_string(),
        Status::Completed(output) => format!(r#"{{"completed":{output}}}"#),
        Status::Failed(failure) => match read_failure(failure) {
            failure if failure.code() == TERMINATED => {
                format!(r#"{{"terminated":{}}}"#, text(terminated_for(&failure)))
            }
            _ => format!(r#"{{"failed":{failure}}}"#),
        },
        Status::Cancelled(reason) => format!(r#"{{"cancelled":{}}}"#, text(shortened(reason, SMALL))),
        _ => r#""timed_out""#.to_string(),
    };
    format!(r#"{{"id":{},"input":{input},"outcome":{outcome}}}"#, text(id))
}
