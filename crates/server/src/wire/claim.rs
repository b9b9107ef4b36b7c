//! Claims on the wire: their shapes, and what their errors become. The fields of claims, transitions and dead letters
//! are those that the command prints. What a firing becomes is in `fired.rs`; after-effects are in `effect.rs`, and
//! what is found in configurations in `finding.rs`.

pub(crate) mod effect;
pub(crate) mod finding;
pub(crate) mod fired;

use latchwork::claim::{ClaimError, ClaimHolder, OpenClaim, Permitted, Reason, Transition, TransitionKind};
use serde::{Deserialize, Serialize};
use utoipa::{IntoParams, ToSchema};

use crate::wire::claim::finding::wrong_configuration;
use crate::wire::entity::Note;
use crate::wire::problem::{Problem, ProblemCode};
use crate::wire::time::{TimeWire, millis};

/// An open claim.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
#[schema(as = Claim)]
pub(crate) struct ClaimWire {
    pub(crate) entity: String,
    workflow: String,
    step: String,
    #[schema(required)]
    action: Option<String>,
    /// The status while the claim holds.
    pub(crate) claim_into: String,
    /// The status after the claim is released.
    pub(crate) revert_to: String,
    /// The status after the transition.
    pub(crate) successful_state: String,
    /// The number of the fencing token.
    token: u64,
    /// How often the action has begun.
    attempts: u32,
    /// The session or the execution that holds the claim.
    owner: String,
    requester: String,
    #[schema(required)]
    actor: Option<String>,
    since: TimeWire,
    /// The rest of the lease. Null for an execution, which has no lease.
    #[schema(required)]
    lease_left_ms: Option<u64>,
    /// Why the claim waits for an operator, if it does.
    #[schema(required)]
    needs_review: Option<String>,
}

impl From<OpenClaim> for ClaimWire {
    fn from(claim: OpenClaim) -> ClaimWire {
        let OpenClaim { entity, workflow, step, action, claim_into, revert_to, successful_state, .. } = claim;
        let ClaimHolder { owner, requester, actor, since, lease_left, needs_review, .. } = claim.holder;
        ClaimWire {
            entity: entity.to_string(),
            workflow,
            step,
            action,
            claim_into,
            revert_to,
            successful_state,
            token: claim.token,
            attempts: claim.attempts,
            owner,
            requester,
            actor: unmarked(actor),
            since: since.into(),
            lease_left_ms: lease_left.map(millis),
            needs_review,
        }
    }
}

/// A text without the mark of the call that wrote it. Nothing is left of a text that is only a mark.
pub(crate) fn unmarked(text: Option<String>) -> Option<String> {
    text.map(|text| Note::read(&text).0.to_string()).filter(|text| !text.is_empty())
}

/// A change of an entity by a claim workflow.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Transition)]
pub(crate) struct TransitionWire {
    kind: TransitionWord,
    workflow: String,
    step: String,
    from: String,
    to: String,
    requester: String,
    #[schema(required)]
    actor: Option<String>,
    reason: String,
    /// The entity's rev after the change.
    rev: u64,
    /// When the claim was made.
    since: TimeWire,
    /// When the change was made.
    at: TimeWire,
}

/// The kind of a change by a claim workflow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub(crate) enum TransitionWord {
    /// A step has succeeded.
    Done,
    /// A claim was released.
    Released,
    /// A claim began to wait for an operator.
    NeedsReview,
    /// The action of a claim was started again.
    Retried,
    /// A kind that this server does not know.
    Other,
}

impl From<TransitionKind> for TransitionWord {
    fn from(kind: TransitionKind) -> TransitionWord {
        match kind {
            TransitionKind::Done => TransitionWord::Done,
            TransitionKind::Released => TransitionWord::Released,
            TransitionKind::NeedsReview => TransitionWord::NeedsReview,
            TransitionKind::Retried => TransitionWord::Retried,
            _ => TransitionWord::Other,
        }
    }
}

impl From<Transition> for TransitionWire {
    fn from(transition: Transition) -> TransitionWire {
        let Transition { workflow, step, from, to, kind, requester, actor, reason, rev, since, at, .. } = transition;
        TransitionWire {
            kind: kind.into(),
            workflow,
            step,
            from,
            to,
            requester,
            actor: unmarked(actor),
            reason: unmarked(Some(reason)).unwrap_or_default(),
            rev: rev.0,
            since: since.into(),
            at: at.into(),
        }
    }
}

/// The claim on an entity, and the last changes of the entity by claim workflows, newest first.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ClaimShown)]
pub(crate) struct ShownWire {
    pub(crate) entity: String,
    #[schema(required)]
    pub(crate) claim: Option<ClaimWire>,
    pub(crate) history: Vec<TransitionWire>,
}

/// How a claim is shown.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ShowQuery {
    /// The number of changes: 0 to 1000, by default 10.
    #[param(minimum = 0, maximum = 1000)]
    pub(crate) events: Option<usize>,
}

/// Which open claims are listed.
#[derive(Debug, Default, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct ClaimsQuery {
    /// Only claims that wait for an operator.
    #[serde(default)]
    pub(crate) needs_review: bool,
    /// Continues after an earlier page of the same list: its `next`.
    pub(crate) after: Option<String>,
    /// The number of items of a page: 1 to 1000, by default 100.
    #[param(minimum = 1, maximum = 1000)]
    pub(crate) limit: Option<usize>,
}

/// What an operator says about a change of a claim.
#[derive(Debug, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ClaimChange {
    /// Kept in the history of the entity.
    #[schema(min_length = 1)]
    pub(crate) reason: String,
    /// The name of the operator, for the history. By default the name of the token, or `operator`.
    pub(crate) actor: Option<String>,
}

/// A change of a claim by an operator.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ClaimChanged)]
pub(crate) struct ChangedWire {
    pub(crate) entity: String,
    /// The claim before the change. Null if an earlier attempt at the same call had made the change.
    #[schema(required)]
    pub(crate) claim: Option<ClaimWire>,
    /// The entity's status after the change.
    pub(crate) status: String,
    pub(crate) reason: String,
    pub(crate) actor: String,
}

/// Which steps are asked about.
#[derive(Debug, Deserialize, IntoParams)]
#[serde(deny_unknown_fields)]
#[into_params(parameter_in = Query)]
pub(crate) struct PermittedQuery {
    /// The claim workflow.
    pub(crate) workflow: String,
    /// The requester that would fire a step; by default `system`.
    pub(crate) requester: Option<String>,
}

/// The steps that a requester can fire for an entity.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Permitted)]
pub(crate) struct PermittedWire {
    /// The entity's status.
    status: String,
    /// The keys of the steps that can be fired.
    steps: Vec<String>,
    /// All other steps.
    others: Vec<RefusedStep>,
}

/// A step that cannot be fired.
#[derive(Debug, Serialize, ToSchema)]
pub(crate) struct RefusedStep {
    step: String,
    reasons: Vec<ReasonWire>,
}

impl From<Permitted> for PermittedWire {
    fn from(permitted: Permitted) -> PermittedWire {
        let Permitted { status, steps, others, .. } = permitted;
        let refused = |(step, reasons): (String, Vec<Reason>)| RefusedStep {
            step,
            reasons: reasons.into_iter().map(ReasonWire::from).collect(),
        };
        PermittedWire { status, steps, others: others.into_iter().map(refused).collect() }
    }
}

/// Why a step cannot be fired.
#[derive(Debug, Serialize, ToSchema)]
#[serde(rename_all = "snake_case", tag = "reason")]
#[schema(as = ClaimReason)]
pub(crate) enum ReasonWire {
    /// The entity is not at the step's status.
    Status { expected: Vec<String> },
    /// The entity is claimed.
    Claimed { holder: Option<HolderWire> },
    /// The step is not for this requester.
    Requester { allowed: Vec<String> },
    /// A guard refuses.
    Guard { guard: String, message: String },
    /// A reason that this server does not know, in words.
    Other { message: String },
}

impl From<Reason> for ReasonWire {
    fn from(reason: Reason) -> ReasonWire {
        match reason {
            Reason::Status { expected } => ReasonWire::Status { expected },
            Reason::Claimed { holder } => ReasonWire::Claimed { holder: holder.map(|holder| (*holder).into()) },
            Reason::Requester { allowed } => ReasonWire::Requester { allowed },
            Reason::Guard { guard, message } => ReasonWire::Guard { guard, message },
            other => ReasonWire::Other { message: other.to_string() },
        }
    }
}

/// The holder of a claim.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = ClaimHolder)]
pub(crate) struct HolderWire {
    owner: String,
    requester: String,
    #[schema(required)]
    actor: Option<String>,
    step: String,
    since: TimeWire,
    #[schema(required)]
    lease_left_ms: Option<u64>,
    #[schema(required)]
    needs_review: Option<String>,
}

impl From<ClaimHolder> for HolderWire {
    fn from(holder: ClaimHolder) -> HolderWire {
        let ClaimHolder { owner, requester, actor, step, since, lease_left, needs_review, .. } = holder;
        let (actor, since, lease_left_ms) = (unmarked(actor), since.into(), lease_left.map(millis));
        HolderWire { owner, requester, actor, step, since, lease_left_ms, needs_review }
    }
}

impl From<ClaimError> for Problem {
    fn from(error: ClaimError) -> Problem {
        let problem = |code| Problem::new(code, error.to_string());
        match &error {
            ClaimError::Store(store) => store.clone().into(),
            ClaimError::Once(once) => once.clone().into(),
            ClaimError::Entity(entity) => entity.clone().into(),
            ClaimError::Cursor(cursor) => cursor.clone().into(),
            ClaimError::Workflow(below) => below.clone().into(),
            ClaimError::Lock(below) => below.clone().into(),
            ClaimError::State(below) => below.clone().into(),
            ClaimError::Config { findings } => wrong_configuration(findings.clone()),
            ClaimError::UnknownWorkflow { known, .. } | ClaimError::UnknownStep { known, .. } => {
                problem(ProblemCode::NotFound).with("known", known)
            }
            ClaimError::NotFound { id } | ClaimError::NotClaimed { id } => {
                problem(ProblemCode::NotFound).with("id", &**id)
            }
            ClaimError::NoDeadLetter { key } => problem(ProblemCode::NotFound).with("key", key),
            ClaimError::NotInReview { id, .. } => problem(ProblemCode::Conflict).with("id", &**id),
            ClaimError::Contended { .. } => problem(ProblemCode::Contended),
            ClaimError::Action { action, error: cause } => {
                tracing::error!(action, error = %cause, "the action of a claim has ended with an error");
                action_error(action).with("panicked", cause.has_panicked())
            }
            ClaimError::Execution { action, id, error: cause } => {
                tracing::error!(action, id, error = %cause, "the execution of a claim has ended without a result");
                action_error(action).with("execution", id)
            }
            _ => Problem::of_kind(error.kind(), &error),
        }
    }
}

/// The message of the error may name what a client must not see.
fn action_error(action: &str) -> Problem {
    let detail = format!(
        "action {action:?} has ended with an error, and changed nothing; the log of the server names the error"
    );
    Problem::new(ProblemCode::ActionError, detail).with("action", action)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mark_of_a_call_is_not_shown() {
        let marked = |text: &str| unmarked(Some(format!("{text}[call 01890a5d-ac96-774b-bcce-b302099a8057]")));
        assert_eq!(marked("ada "), Some("ada".into()));
        assert_eq!(marked(""), None);
        assert_eq!(unmarked(Some("ada".into())), Some("ada".into()));
        assert_eq!(unmarked(None), None);
    }

    #[test]
    fn the_message_of_an_actions_error_stays_in_the_log() {
        let problem = action_error("Pay");
        assert_eq!((problem.status(), problem.code()), (500, ProblemCode::ActionError));
    }
}
