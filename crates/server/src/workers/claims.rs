//! Claim actions and after-effects that workers do. The claim is held by this process and renewed while the worker is
//! at it; what the worker answers is committed together with the final status.

use std::time::Duration;

use latchwork::claim::{
    ActionCtx, ActionError, ActionFailure, AfterEffect, ClaimLost, ClaimsBuilder, Outcome, Rejection,
};
use latchwork::{Value, json};
use serde::Deserialize;

use crate::tasks::{NewTask, Put, TaskCall, TaskError, TaskState, Tasks, key_of};
use crate::wire::claim::effect::EffectWire;
use crate::wire::claim::unmarked;
use crate::workers::call::{Assignment, CallFailed, NextCall};
use crate::workers::endpoint::Endpoint;
use crate::workers::{Reached, Worker, Workers};

/// The longest time that the delivery of an after-effect waits because its endpoint asks for it.
const LONGEST: Duration = Duration::from_secs(60);

/// What a worker answers for an action. An answer without `outcome` is a success.
#[derive(Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
struct ActionAnswer {
    #[serde(default)]
    outcome: OutcomeWord,
    #[serde(default)]
    output: Value,
    /// A merge patch for the data of the entity.
    data: Option<Value>,
    message: Option<String>,
    code: Option<String>,
    field: Option<String>,
}

#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum OutcomeWord {
    #[default]
    Success,
    Failure,
    Rejection,
}

impl Workers {
    /// Registers the actions and after-effects with claims.
    pub fn serve(&self, claims: ClaimsBuilder) -> ClaimsBuilder {
        let claims = self.actions.iter().fold(claims, |claims, (name, worker)| {
            let (name, worker) = (name.clone(), worker.clone());
            claims.action(name.clone(), move |ctx| act(worker.clone(), name.clone(), ctx))
        });
        self.after_effects.iter().fold(claims, |claims, (name, worker)| {
            let worker = worker.clone();
            claims.after_effect(name.clone(), move |effect| deliver(worker.clone(), effect))
        })
    }
}

async fn act(worker: Worker, name: String, ctx: ActionCtx) -> Result<Outcome, ActionError> {
    let entity = ctx.entity();
    let data = &entity.data;
    // Nothing that another attempt under the same claim would see otherwise: a task is put once.
    let input = json!({
        "entity": {"id": entity.id, "type": entity.entity_type, "data": data},
        "step": ctx.step(),
        "requester": ctx.requester(),
        "actor": unmarked(ctx.actor().map(Into::into)),
        "input": ctx.input(),
    });
    let answered = match &worker.reached {
        Reached::Endpoint(endpoint) => call(&worker, endpoint, name, &ctx, input).await?,
        Reached::Tasks(tasks, kind) => wait_for_task(&worker, tasks, kind, &ctx, input).await?,
    };
    let answer = match answered {
        Ok(answer) => answer,
        Err(failed) => return Ok(Outcome::Failure(failed)),
    };
    understood(answer, &ctx)
}

/// Makes the outcome of an answer.
fn understood(answer: Value, ctx: &ActionCtx) -> Result<Outcome, ActionError> {
    let answer = match answer {
        Value::Null => ActionAnswer::default(),
        answer => ActionAnswer::deserialize(answer)
            .map_err(|error| format!("the answer of the worker is not that of an action: {error}"))?,
    };
    let ActionAnswer { outcome, output, data, message, code, field } = answer;
    let message = message.unwrap_or_else(|| "the worker gave no reason".into());
    Ok(match outcome {
        OutcomeWord::Success => {
            data.into_iter().for_each(|patch| ctx.merge_data(patch));
            Outcome::output(output)
        }
        OutcomeWord::Failure => Outcome::Failure(ActionFailure { message, code }),
        OutcomeWord::Rejection => Outcome::Rejection(Rejection { message, field }),
    })
}

/// What a worker answers, or why it does not do the work; an error if it is not known whether it has.
type Acted = Result<Result<Value, ActionFailure>, ActionError>;

/// Calls an endpoint until it answers, as long as the claim is held.
async fn call(worker: &Worker, endpoint: &Endpoint, kind: String, ctx: &ActionCtx, input: Value) -> Acted {
    // Without a claim there is nothing to fence; the rev of the entity rises, too.
    let token = ctx.token().map_or(ctx.entity().rev.0, |token| token.number());
    let mut work = Assignment { kind, key: ctx.key(), attempt: 1, token, input };
    loop {
        let CallFailed { message, code, next } = tokio::select! {
            answered = endpoint.call(&worker.env, &work) => match answered {
                Ok(answer) => return Ok(Ok(answer)),
                Err(failed) => failed,
            },
            lost = until_lost(worker, ctx) => return Err(lost.into()),
        };
        let pause = match next {
            NextCall::Never => return Ok(Err(ActionFailure { message, code: Some(code) })),
            NextCall::Again(_) if work.attempt >= endpoint.limits().attempts => return Err(message.into()),
            NextCall::Again(asked) => endpoint.pause(work.attempt, &worker.env).max(asked.unwrap_or_default()),
        };
        tracing::warn!(action = work.kind, attempt = work.attempt, cause = message, "a call failed; trying again");
        tokio::select! {
            () = worker.env.sleep(pause) => {}
            lost = until_lost(worker, ctx) => return Err(lost.into()),
        }
        work.attempt += 1;
    }
}

/// Resolves when the claim is lost.
async fn until_lost(worker: &Worker, ctx: &ActionCtx) -> ClaimLost {
    loop {
        worker.env.sleep(ctx.lease() / 3).await;
        if let Err(lost) = ctx.heartbeat().await {
            return lost;
        }
    }
}

/// Puts a task that is worth doing as long as the claim is held, and waits for its end. If this process dies, the next
/// attempt under the same claim finds the same task.
async fn wait_for_task(worker: &Worker, tasks: &Tasks, kind: &str, ctx: &ActionCtx, input: Value) -> Acted {
    let key = ctx.key();
    let mut new = NewTask::new(format!("action-{key}"), kind, input).guard(ctx.token());
    new.key = key;
    let id = new.id.clone();
    let ended = tokio::select! {
        ended = async { tasks.put(new, &TaskCall::default()).await?; tasks.ended(&id).await } => ended?,
        lost = until_lost(worker, ctx) => {
            withdraw(tasks, &id).await;
            return Err(lost.into());
        }
    };
    match ended.state {
        TaskState::Done { output, .. } => Ok(Ok(output)),
        TaskState::Cancelled { reason, .. } => Err(format!("the task was cancelled: {reason}").into()),
        _ => {
            let failure = ended.failure.map(|failure| ActionFailure { message: failure.message, code: failure.code });
            let unknown = || ActionFailure { message: "the task has failed".into(), code: None };
            Ok(Err(failure.unwrap_or_else(unknown)))
        }
    }
}

/// Ends a task that is not worth doing any more. If that fails, its guard keeps it from being taken.
async fn withdraw(tasks: &Tasks, id: &str) {
    match tasks.cancel(id, "the claim is lost", &TaskCall::default()).await {
        Ok(_) | Err(TaskError::Ended { .. } | TaskError::NotFound { .. }) => {}
        Err(error) => tracing::warn!(%error, task = id, "a task of a lost claim was not cancelled"),
    }
}

async fn deliver(worker: Worker, effect: AfterEffect) -> Result<(), String> {
    let (key, attempt, token, kind) = (key_of(&effect.key), effect.attempt, effect.rev, effect.name.clone());
    let input = serde_json::to_value(EffectWire::from(effect)).map_err(|error| error.to_string())?;
    match &worker.reached {
        Reached::Endpoint(endpoint) => {
            let work = Assignment { kind, key, attempt, token, input };
            let Err(CallFailed { message, next, .. }) = endpoint.call(&worker.env, &work).await else { return Ok(()) };
            // The outbox tries again after a pause of its own.
            if let NextCall::Again(Some(pause)) = next {
                worker.env.sleep(pause.min(LONGEST)).await;
            }
            Err(message)
        }
        Reached::Tasks(tasks, kind) => {
            let mut new = NewTask::new(format!("effect-{key}"), kind, input);
            new.key = key;
            tasks.put(new, &TaskCall::default()).await.map(|_: Put| ()).map_err(|error| error.to_string())
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_of_an_action_is_strict_about_its_fields() {
        let read = |json: Value| ActionAnswer::deserialize(json);
        let plain = read(json!({"output": 7, "data": {"paid": true}})).unwrap();
        assert_eq!(
            (plain.outcome, plain.output, plain.data),
            (OutcomeWord::Success, json!(7), Some(json!({"paid": true})))
        );
        assert_eq!(read(json!({"outcome": "rejection", "message": "m", "field": "f"})).unwrap().field.unwrap(), "f");
        for wrong in [json!({"outcome": "perhaps"}), json!({"ouput": 1}), json!(7)] {
            assert!(read(wrong).is_err());
        }
    }
}
