//! The fields of claims in JSON, which are stable, and the words for people. docs/cli.md lists the fields.

use std::borrow::Cow;
use std::time::Duration;

use latchwork::claim::{ClaimHolder, DeadLetter, OpenClaim, Transition, TransitionKind};
use latchwork::entity::EntityId;
use latchwork::store::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::time::Time;

/// A claim.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct ClaimFields {
    pub(crate) entity: EntityId,
    pub(crate) workflow: String,
    pub(crate) step: String,
    pub(crate) action: Option<String>,
    /// The status while the claim holds, after it is released, and after the transition.
    pub(crate) claim_into: String,
    pub(crate) revert_to: String,
    pub(crate) successful_state: String,
    pub(crate) token: u64,
    /// How often the action has begun.
    pub(crate) attempts: u32,
    /// The session or the execution that holds the claim.
    pub(crate) owner: String,
    pub(crate) requester: String,
    pub(crate) actor: Option<String>,
    pub(crate) since: Time,
    /// `None` for an execution.
    lease_left_ms: Option<u64>,
    /// Why an operator must look at it.
    pub(crate) needs_review: Option<String>,
}

impl ClaimFields {
    pub(crate) fn of(claim: OpenClaim) -> ClaimFields {
        let ClaimHolder { owner, requester, actor, since, lease_left, needs_review, .. } = claim.holder;
        let ms = |left: Duration| u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
        ClaimFields {
            entity: claim.entity,
            workflow: claim.workflow,
            step: claim.step,
            action: claim.action,
            claim_into: claim.claim_into,
            revert_to: claim.revert_to,
            successful_state: claim.successful_state,
            token: claim.token,
            attempts: claim.attempts,
            owner,
            requester,
            actor,
            since: Time(since),
            lease_left_ms: lease_left.map(ms),
            needs_review,
        }
    }

    /// For example `the claim on entity "i-7" (step "pay" of workflow "invoice", token 2, 3m 2s ago)`.
    pub(crate) fn words(&self, now: Timestamp) -> String {
        let ClaimFields { entity, workflow, step, token, .. } = self;
        let since = self.since.relative_to(now);
        format!("the claim on entity {:?} (step {step:?} of workflow {workflow:?}, token {token}, {since})", &**entity)
    }

    /// The holder, or that the claim needs review.
    pub(crate) fn holder(&self) -> String {
        match &self.needs_review {
            Some(_) => "needs review".into(),
            None => self.owner.clone(),
        }
    }

    pub(crate) fn lease(&self, now: Timestamp) -> String {
        match self.lease_left_ms {
            _ if self.needs_review.is_some() => String::new(),
            None => String::new(),
            Some(0) => "over".into(),
            Some(left) => format!("ends {}", Time(now.plus(Duration::from_millis(left))).relative_to(now)),
        }
    }
}

/// One change that a claim workflow made to an entity.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct TransitionFields {
    /// `done`, `released`, `needs_review` or `retried`.
    pub(crate) kind: Cow<'static, str>,
    pub(crate) workflow: String,
    pub(crate) step: String,
    pub(crate) from: String,
    pub(crate) to: String,
    pub(crate) requester: String,
    pub(crate) actor: Option<String>,
    pub(crate) reason: String,
    rev: u64,
    since: Time,
    pub(crate) at: Time,
}

impl TransitionFields {
    pub(crate) fn of(transition: Transition) -> TransitionFields {
        TransitionFields {
            kind: word(transition.kind).into(),
            workflow: transition.workflow,
            step: transition.step,
            from: transition.from,
            to: transition.to,
            requester: transition.requester,
            actor: transition.actor,
            reason: transition.reason,
            rev: transition.rev.0,
            since: Time(transition.since),
            at: Time(transition.at),
        }
    }

    pub(crate) fn kind(&self) -> &str {
        match &*self.kind {
            "needs_review" => "review",
            kind => kind,
        }
    }
}

fn word(kind: TransitionKind) -> &'static str {
    match kind {
        TransitionKind::Done => "done",
        TransitionKind::Released => "released",
        TransitionKind::NeedsReview => "needs_review",
        TransitionKind::Retried => "retried",
        _ => "",
    }
}

/// An after-effect that could not be delivered.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct DeadFields {
    pub(crate) key: String,
    pub(crate) name: String,
    workflow: String,
    step: String,
    pub(crate) entity: EntityId,
    entity_type: String,
    from: String,
    to: String,
    requester: String,
    actor: Option<String>,
    input: Value,
    output: Value,
    /// When the transition was made.
    transition_at: Time,
    pub(crate) attempts: u32,
    pub(crate) error: String,
    /// The approximate time of the last attempt.
    pub(crate) at: Time,
}

impl DeadFields {
    pub(crate) fn of(letter: DeadLetter) -> DeadFields {
        let effect = letter.effect;
        DeadFields {
            key: effect.key,
            name: effect.name,
            workflow: effect.workflow,
            step: effect.step,
            entity: effect.entity,
            entity_type: effect.entity_type,
            from: effect.from,
            to: effect.to,
            requester: effect.requester,
            actor: effect.actor,
            input: effect.input,
            output: effect.output,
            transition_at: Time(effect.at),
            attempts: letter.attempts,
            error: letter.error,
            at: Time(letter.at),
        }
    }
}
