//! Steps of workflows that workers do. The journal records the result of a step once; until then, the execution waits
//! out of memory for a task, or calls an endpoint in a step of the library.

use std::sync::Arc;

use latchwork::store::ErrorKind;
use latchwork::workflow::{Attempt, Ctx, Failure, Retry, Workflow, workflow};
use latchwork::{Map, Value, json};
use serde::Serialize;

use crate::tasks::{NewTask, TaskCall, TaskError, Tasks};
use crate::workers::call::{Assignment, CallFailed, NextCall};
use crate::workers::endpoint::{Endpoint, EndpointLimits};
use crate::workers::{Reached, Worker};

/// The workflow whose steps are done by workers, one after the other.
pub(super) fn workflow_of(name: String, steps: Vec<(String, Worker)>) -> Workflow<Value, Value> {
    let steps: Arc<[(String, Worker)]> = steps.into();
    workflow(name).run(move |ctx: Ctx, input: Value| {
        let steps = steps.clone();
        async move {
            let (mut results, mut last) = (Map::new(), Value::Null);
            for (step, worker) in &*steps {
                last = worker.run(&ctx, step, &json!({"input": input, "results": results})).await?;
                results.insert(step.clone(), last.clone());
            }
            Ok(last)
        }
    })
}

impl Worker {
    /// Has the worker do a step of a workflow. The result is recorded once; the worker may be asked more than once,
    /// always under the same idempotency key.
    ///
    /// ```
    /// # use latchwork::{Value, json};
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # use latchwork_server::Worker;
    /// async fn order(ctx: Ctx, billing: Worker, price: u64) -> Result<Value, Failure> {
    ///     billing.run(&ctx, "charge", &json!({"price": price})).await
    /// }
    /// ```
    pub async fn run(&self, ctx: &Ctx, step: &str, input: &(impl Serialize + Sync)) -> Result<Value, Failure> {
        let input = serde_json::to_value(input)?;
        match &self.reached {
            Reached::Endpoint(endpoint) => self.call(endpoint, ctx, step, input).await,
            Reached::Tasks(tasks, kind) => wait_for_task(tasks, kind, ctx, step, input).await,
        }
    }

    async fn call(&self, endpoint: &Endpoint, ctx: &Ctx, step: &str, input: Value) -> Result<Value, Failure> {
        let EndpointLimits { attempts, pause, longest_pause, .. } = endpoint.limits();
        let retry = Retry::exponential().max_attempts(attempts).first_pause(pause).longest_pause(longest_pause);
        let body = |attempt: Attempt| {
            // Attempts are counted before they begin, so their number is a fencing token for the step.
            let (key, attempt, token) = (attempt.idempotency_key.to_string(), attempt.number, attempt.number.into());
            let work = Assignment { kind: step.into(), key, attempt, token, input: input.clone() };
            async move {
                let failed = match endpoint.call(&self.env, &work).await {
                    Ok(answer) => return Ok(answer),
                    Err(failed) => failed,
                };
                if let NextCall::Again(Some(pause)) = failed.next {
                    self.env.sleep(pause).await;
                }
                Err(failure(failed))
            }
        };
        ctx.run_with(step, body).input(&input).retry(retry).await
    }
}

fn failure(failed: CallFailed) -> Failure {
    let CallFailed { message, code, next } = failed;
    let failure = Failure::new(message).with_code(code);
    if next == NextCall::Never { failure.not_retryable() } else { failure }
}

/// A store that cannot answer now can answer later. Everything else stays as it is.
fn put_failure(error: TaskError) -> Failure {
    let is_temporary = match &error {
        TaskError::Contended => true,
        TaskError::Store(error) => error.kind() == ErrorKind::Unavailable,
        _ => false,
    };
    if is_temporary { error.into() } else { Failure::from(error).not_retryable() }
}

/// Puts a task, and waits until the keeper of the tasks tells its end. The token of the wait names the task, so a
/// replay puts the same one.
async fn wait_for_task(tasks: &Tasks, kind: &str, ctx: &Ctx, step: &str, input: Value) -> Result<Value, Failure> {
    let end = ctx.completion::<Value>(step).await;
    let token = end.token();
    let id = format!("step-{}", token.split('/').next().unwrap_or_default());
    let put = |attempt: Attempt| {
        let mut new = NewTask::new(id.clone(), kind, input.clone());
        (new.key, new.completion) = (attempt.idempotency_key.to_string(), Some(token.clone()));
        async move { tasks.put(new, &TaskCall::default()).await.map(drop).map_err(put_failure) }
    };
    ctx.run_with(step, put).input(&input).retry(Retry::exponential()).await?;
    let ended = end.wait().await;
    if ended.as_ref().is_err_and(Failure::is_cancelled) {
        let withdraw = async || match tasks.cancel(&id, "the execution was cancelled", &TaskCall::default()).await {
            Err(TaskError::Ended { .. } | TaskError::NotFound { .. }) => Ok(()),
            cancelled => cancelled.map(drop).map_err(Failure::from),
        };
        ctx.shielded().run("withdraw", withdraw).await?;
    }
    ended
}
