//! Checks code against the recorded histories of its executions.

use std::sync::Arc;

use serde_json::Value;

use crate::store::{Commit, Env, Limits, Rev, Store};
use crate::workflow::journal::place::BranchPath;
use crate::workflow::operate::canary::{ReplayEnd, replayed};
use crate::workflow::run::Run;
use crate::workflow::stored::keys::journal_key;
use crate::workflow::stored::record::{Entry, EntryState, Execution, FailedAttempt, failure_text};
use crate::workflow::{Engine, ExecutionState, History, Operation, OperationState, Result, Workflow, WorkflowError};

/// Why code does not fit the recorded history of an execution.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("execution {id:?} would be parked: {reason}")]
#[non_exhaustive]
pub struct Mismatch {
    /// The execution's id.
    pub id: String,
    /// The reason, which names what the code does and what is recorded.
    pub reason: String,
}

/// Runs a workflow's code on a recorded history, up to its end, without running the body of any step. Fails where an
/// engine would park the execution, or if the code returns another result than the recorded one.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # use latchwork::testing::{TestEngine, replay};
/// # use latchwork::workflow::{Ctx, workflow};
/// # let order = workflow("order").run(async |ctx: Ctx, price: u64| {
/// #     ctx.run("charge", async || Ok(price)).await
/// # });
/// # let test = TestEngine::new(&order, 1).await?;
/// # let handle = test.engine().start(&order, 7).id("order-7").await?;
/// # test.run(handle.result()).await?;
/// let history = test.history("order-7").await?; // or read from a file, as JSON
/// replay(&history, &order).await?;
/// # Ok(()) }
/// ```
pub async fn replay<I, O>(history: &History, workflow: &Workflow<I, O>) -> std::result::Result<(), Mismatch> {
    let mismatch = |reason: String| Err(Mismatch { id: history.id.clone(), reason });
    if history.workflow != workflow.name() {
        return mismatch(format!("its workflow is {:?}, not {:?}", history.workflow, workflow.name()));
    }
    match ended(history, workflow).await {
        Ok(reason) => reason.map_or(Ok(()), mismatch),
        Err(error) => mismatch(format!("it cannot be replayed: {error}")),
    }
}

/// Returns what is wrong, if anything is.
async fn ended<I, O>(history: &History, workflow: &Workflow<I, O>) -> Result<Option<String>> {
    let (env, _) = Env::seeded(0);
    let store = Store::memory_with(env, Limits::default()).await?;
    let engine = Engine::to_replay(&store, vec![workflow.definition.clone()]).await?;
    let inner = &engine.inner;
    for operation in &history.operations {
        let Ok(branch) = operation.branch.parse::<BranchPath>() else {
            return Ok(Some(format!("there is no branch {:?}", operation.branch)));
        };
        let key = inner.spaces.journal.key(journal_key(
            &history.id.as_str().into(),
            history.run,
            &branch.at(operation.place),
        ));
        let stored = store.commit(Commit::new().put(&key, entry(operation).encode_with(None))).await?;
        stored.applied().map_err(|_| WorkflowError::Stopped)?;
    }
    let (definition, id) = (workflow.definition.clone(), history.id.as_str().into());
    let execution =
        Execution { run: history.run, ..Execution::new(&history.workflow, history.input.to_string(), history.started) };
    let run = Arc::new(Run::new(inner.clone(), definition, id, execution, Some(Rev(1))));
    Ok(match replayed(&run).await {
        ReplayEnd::Differs(reason) => Some(reason),
        ReplayEnd::Continues => match &history.state {
            ExecutionState::Completed(_) => Some("the code continues where the execution completed".into()),
            _ => None,
        },
        ReplayEnd::Finished(result) => other_end(history, &result.map_err(|failure| failure.message().to_string())),
    })
}

/// The journal entry of an operation in a history.
fn entry(operation: &Operation) -> Entry {
    let state = match &operation.state {
        OperationState::Begun => EntryState::Begun,
        OperationState::Retrying { failure, next } => {
            EntryState::Failed { failure: failure_text(failure), next_us: next.0 }
        }
        OperationState::Until(until) => EntryState::Until(until.0),
        OperationState::Done(value) => EntryState::Done(value.to_string()),
        OperationState::Failed(failure) => EntryState::Gave(failure_text(failure)),
        OperationState::Saw { rev, state } => {
            EntryState::Saw { rev: *rev, state: state.as_ref().map(Value::to_string) }
        }
        OperationState::Queued { token, until } => {
            EntryState::Queued { ticket: *token, until_us: until.map(|until| until.0) }
        }
    };
    let failures = operation.failures.iter().map(|failed| FailedAttempt {
        attempt: failed.attempt,
        at_us: failed.at.0,
        message: failed.message.clone(),
    });
    Entry {
        attempts: operation.attempts,
        failures: failures.collect(),
        progress: operation.progress.as_ref().map(Value::to_string),
        ..Entry::new(operation.kind, &*operation.name, operation.argument, operation.since, state)
    }
}

fn other_end(history: &History, result: &std::result::Result<String, String>) -> Option<String> {
    match (&history.state, result) {
        (ExecutionState::Completed(output), Ok(text)) => {
            let now: Value = serde_json::from_str(text).unwrap_or_default();
            (now != *output).then(|| format!("the code returns {now}, but the execution returned {output}"))
        }
        (ExecutionState::Completed(output), Err(message)) => {
            Some(format!("the code fails ({message}), but the execution returned {output}"))
        }
        (ExecutionState::Failed(failure), Ok(text)) => {
            Some(format!("the code returns {text}, but the execution failed: {failure}"))
        }
        _ => None,
    }
}
