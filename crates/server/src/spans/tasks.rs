//! The span of a task: from the time at which it was put to its end, in the trace of what waits for it. Its identity
//! follows from the task, so that a worker that takes the task is told the span before it exists.

use crate::api::DEFAULT;
use crate::spans::context::{Sampler, SpanContext};
use crate::spans::sampler;
use crate::tasks::{Task, TaskState};

/// The span that has put the task and waits for it, if it is known.
fn owner(sampler: Sampler, namespace: &str, task: &Task) -> Option<SpanContext> {
    // A token of an execution ends with its id.
    let execution = task.completion.as_deref().and_then(|token| token.split_once('/'));
    match execution {
        Some((_, id)) => Some(sampler.execution(namespace, id)),
        // The key of a claim action is the id of the claim.
        None => task.guard.is_some().then(|| sampler.action(namespace, &task.key, 1)),
    }
}

fn context(sampler: Sampler, namespace: &str, task: &Task) -> SpanContext {
    match owner(sampler, namespace, task) {
        Some(owner) => owner.named("task", &task.id),
        None => sampler.root(namespace, "task", &task.id),
    }
}

/// The `traceparent` under which a worker does a task, if traces are made. The name is that of the engine.
pub(crate) fn traceparent_of_task(engine: Option<&str>, task: &Task) -> Option<String> {
    sampler().map(|sampler| context(sampler, engine.unwrap_or(DEFAULT), task).to_string())
}

/// Tells that the commit has landed with which a task ends.
pub(crate) fn task_ended(engine: Option<&str>, task: &Task) {
    let Some(sampler) = sampler() else { return };
    let namespace = engine.unwrap_or(DEFAULT);
    let failure = task.failure.as_ref().map(|failure| failure.message.as_str());
    tracing::debug!(
        name: "task.ended",
        parent: None,
        namespace,
        id = task.id,
        kind = task.kind,
        status = task.word(),
        attempt = task.attempt,
        started_us = task.put_at.0,
        owner = owner(sampler, namespace, task).map(tracing::field::display),
        context = %context(sampler, namespace, task),
        error = failure.filter(|_| matches!(task.state, TaskState::Failed { .. })),
        "a task has ended"
    );
}
