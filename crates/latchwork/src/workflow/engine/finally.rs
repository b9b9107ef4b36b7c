//! Finalizers: code that runs after any end of an execution. A finalizer is an execution of its own, started by the
//! commit that ends the first one.

use std::future::Future;
use std::sync::Arc;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::lane::Part;
use crate::workflow::ctx::Ctx;
use crate::workflow::ctx::step::read_failure;
use crate::workflow::definition::{Definition, Workflow, workflow};
use crate::workflow::engine::EngineInner;
use crate::workflow::operate::steer::{TERMINATED, terminated_for};
use crate::workflow::run::close::How;
use crate::workflow::run::{ROOM, hash_text, largest, with_record};
use crate::workflow::stored::record::{Execution, Labels, StoredStatus, shortened};
use crate::workflow::{ExecutionId, Failure, Result};

/// The longest output, in bytes, that a finalizer receives though the commit is large.
const SMALL: usize = 64 << 10;

/// How an execution has ended, for its finalizer.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Finished<I> {
    /// The execution.
    pub id: ExecutionId,
    /// The input it was started or continued with.
    pub input: I,
    /// How it ended.
    pub outcome: FinishedAs,
}

/// How an execution has ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum FinishedAs {
    /// It has completed with this output. None if the output was too large to be stored a second time in the commit
    /// that ends the execution; the store's own limits rule that out. In that case, read the result of the execution
    /// itself.
    Completed(Option<Value>),
    /// It has failed.
    Failed(Failure),
    /// It was cancelled, for this reason.
    Cancelled(String),
    /// It has exceeded its time limit.
    TimedOut,
    /// An operator has ended it, for this reason.
    Terminated(String),
}

impl<I, O> Workflow<I, O> {
    /// Runs `function` after any end of an execution: completed, failed, cancelled, timed out or terminated. The
    /// finalizer is an execution of its own, of the workflow `NAME.finally`. The commit that ends the first execution
    /// starts it, so it is never missed and never delays the result. It is registered together with its workflow. Call
    /// this once, before the registration: a second finalizer is an error at the registration. A workflow with batches
    /// uses [`Workflow::finally_batch`].
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure, Finished, FinishedAs, workflow};
    /// let order = workflow("order")
    ///     .run(async |_: Ctx, cart: String| Ok(cart.len()))
    ///     .finally(async |ctx: Ctx, finished: Finished<String>| {
    ///         if let FinishedAs::Terminated(reason) = &finished.outcome {
    ///             ctx.run("tell", async || Ok(println!("{}: {reason}", finished.input))).await?;
    ///         }
    ///         Ok(())
    ///     });
    /// assert_eq!(order.name(), "order");
    /// ```
    #[must_use = "the workflow with its finalizer has to be registered"]
    pub fn finally<F, Fut>(self, function: F) -> Workflow<I, O>
    where
        F: Fn(Ctx, Finished<I>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), Failure>> + Send + 'static,
        I: DeserializeOwned + Serialize,
    {
        self.with_finalizer(function, false)
    }

    /// Like [`Workflow::finally`], for a workflow with batches: the finalizer receives the input of the function, a
    /// list. If a batch has ended before it began, the list holds the inputs that were gathered until then.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::workflow::{Batch, Ctx, Finished, workflow};
    /// let send = workflow("send")
    ///     .batch(Batch::new(100, Duration::from_millis(200)))
    ///     .run(async |_: Ctx, mails: Vec<String>| Ok(mails))
    ///     .finally_batch(async |_: Ctx, finished: Finished<Vec<String>>| {
    ///         println!("{} mails: {:?}", finished.input.len(), finished.outcome);
    ///         Ok(())
    ///     });
    /// ```
    #[must_use = "the workflow with its finalizer has to be registered"]
    pub fn finally_batch<F, Fut>(self, function: F) -> Workflow<I, O>
    where
        F: Fn(Ctx, Finished<Vec<I>>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), Failure>> + Send + 'static,
        I: DeserializeOwned + Serialize,
    {
        self.with_finalizer(function, true)
    }

    fn with_finalizer<T, F, Fut>(self, function: F, is_batch: bool) -> Workflow<I, O>
    where
        F: Fn(Ctx, Finished<T>) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<(), Failure>> + Send + 'static,
        T: DeserializeOwned + Serialize,
    {
        let name = format!("{}.finally", self.name());
        let finalizer = workflow(name).keep(self.definition.keep).run(function);
        let wrong = match (is_batch, self.definition.policy.batch.is_some()) {
            (false, true) => Some("it has batches, so its finalizer is set with `finally_batch`"),
            (true, false) => Some("it has no batches, so its finalizer is set with `finally`"),
            _ => self.definition.finalizer.set(finalizer.definition).err().map(|_| "it has two finalizers"),
        };
        // The registration reports the first error.
        if let Some(wrong) = wrong {
            let _ = self.definition.wrong.set(wrong);
        }
        self
    }
}

impl EngineInner {
    /// The finalizer of a workflow, if it has one that is registered here.
    pub(crate) fn finalizer(&self, workflow: &str) -> Option<&Arc<Definition>> {
        let finalizer = self.definition(workflow)?.finalizer.get()?;
        self.definition(&finalizer.name)
    }

    /// The start of an execution's finalizer, as a part of the commit that ends the execution; none without a
    /// finalizer.
    pub(crate) async fn finalizing(
        self: &Arc<EngineInner>,
        id: &ExecutionId,
        before: &Execution,
        status: &StoredStatus,
        how: How,
    ) -> Result<Option<Part>> {
        let Some(finalizer) = self.finalizer(&before.workflow) else { return Ok(None) };
        let its = self.free_id(id, before.started_us).await?;
        let now = self.store.env().now();
        // The inputs of a batch that has not begun have records of their own.
        let gathered = if before.is_batch() { Some(self.gathered(id).await?) } else { None };
        let input = gathered.as_deref().unwrap_or(&before.input);
        let leaves_out = how.is_large && !self.has_room(before, status);
        let input = told(id, input, status, leaves_out);
        let mut first = finalizer.first_record(input, Labels::default(), now, now);
        let (part, _) = with_record(self, self.at_record(&its, None), &its, None, &mut first, None);
        let engine = self.clone();
        Ok(Some(self.waking(part, &its).then(move |_| engine.metrics.started(&first.workflow))))
    }

    /// True if one commit has room for everything that may be large: the record that stays, the record of the
    /// finalizer, and the message to the parent. If the end is large, everything else is committed before.
    fn has_room(&self, before: &Execution, status: &StoredStatus) -> bool {
        let output = if let StoredStatus::Completed(output) = status { output.len() } else { 0 };
        let both = before.input.len() + output;
        let left = if before.superseded.is_some() { largest(self) } else { both };
        let told = before.parent.as_ref().map_or(0, |_| output);
        left + both + told + ROOM <= self.store.limits().commit_bytes
    }

    /// An id for the finalizer: the same whenever the end is tried again, unless another execution has it. An earlier
    /// execution with the same id may have started at the same time.
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
fn told(id: &ExecutionId, input: &str, status: &StoredStatus, leaves_out: bool) -> String {
    let text = |text: &str| Value::from(text).to_string();
    let outcome = match status {
        StoredStatus::Completed(output) if leaves_out && output.len() > SMALL => r#"{"completed":null}"#.to_string(),
        StoredStatus::Completed(output) => format!(r#"{{"completed":{output}}}"#),
        StoredStatus::Failed(failure) => match read_failure(failure) {
            failure if failure.code() == TERMINATED => {
                format!(r#"{{"terminated":{}}}"#, text(terminated_for(&failure)))
            }
            _ => format!(r#"{{"failed":{failure}}}"#),
        },
        StoredStatus::Cancelled(reason) => format!(r#"{{"cancelled":{}}}"#, text(shortened(reason, SMALL))),
        _ => r#""timed_out""#.to_string(),
    };
    format!(r#"{{"id":{},"input":{input},"outcome":{outcome}}}"#, text(id))
}
