//! After-effects on the wire: those that are not delivered yet, and dead letters.

use latchwork::Value;
use latchwork::claim::{AfterEffect, DeadLetter};
use serde::Serialize;
use utoipa::ToSchema;

use crate::wire::claim::unmarked;
use crate::wire::time::TimeWire;

/// An after-effect.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = AfterEffect)]
pub(crate) struct EffectWire {
    /// Unique and stable: its receiver can tell by it whether it has seen the after-effect before.
    key: String,
    name: String,
    workflow: String,
    step: String,
    entity: String,
    entity_type: String,
    from: String,
    to: String,
    requester: String,
    #[schema(required)]
    actor: Option<String>,
    /// The input of the step.
    #[schema(value_type = Value)]
    input: Value,
    /// The output of the action.
    #[schema(value_type = Value)]
    output: Value,
    /// When the transition was made.
    transition_at: TimeWire,
}

impl From<AfterEffect> for EffectWire {
    fn from(effect: AfterEffect) -> EffectWire {
        let AfterEffect { key, name, workflow, step, entity, entity_type, from, to, requester, actor, .. } = effect;
        EffectWire {
            key,
            name,
            workflow,
            step,
            entity: entity.to_string(),
            entity_type,
            from,
            to,
            requester,
            actor: unmarked(actor),
            input: effect.input,
            output: effect.output,
            transition_at: effect.at.into(),
        }
    }
}

/// An after-effect that could not be delivered.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = DeadLetter)]
pub(crate) struct DeadWire {
    #[serde(flatten)]
    effect: EffectWire,
    attempts: u32,
    /// The error of the last attempt.
    error: String,
    /// The approximate time of the last attempt.
    at: TimeWire,
}

impl From<DeadLetter> for DeadWire {
    fn from(letter: DeadLetter) -> DeadWire {
        let DeadLetter { effect, attempts, error, at, .. } = letter;
        DeadWire { effect: effect.into(), attempts, error, at: at.into() }
    }
}

/// A dead letter that is delivered again.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Redelivered)]
pub(crate) struct RedeliveredWire {
    pub(crate) key: String,
}
