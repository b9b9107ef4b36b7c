//! Actions that are durable workflows: the execution owns the claim. After a restart it continues, and the claim does
//! not revert.

use std::future::Future;
use std::sync::{Arc, Weak};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::claim::action::StagedWrites;
use crate::claim::claims::ClaimsInner;
use crate::claim::error::{ActionError, ClaimError, Result};
use crate::claim::fire::FireCall;
use crate::claim::ledger::{EndReason, Ledger, LedgerOutcome};
use crate::claim::outbox::Expected;
use crate::claim::outcome::{ActionFailure, Fired, Lost, Outcome, Rejection, Transitioned};
use crate::claim::stored::{Claim, ClaimSpaces, EffectKey, LoggedKind, Terms};
use crate::entity::{Entity, EntityId, Standing, Update};
use crate::lane::Part;
use crate::lock::Owner;
use crate::store::Rev;
use crate::workflow::{Ctx, ExecutionId, Failure, Tx, Workflow, WorkflowError, workflow};

/// An action that is a durable workflow. Register its [`DurableAction::workflow`] with the engine, and the action with
/// [`ClaimsBuilder::durable_action`](crate::claim::ClaimsBuilder::durable_action).
#[derive(Clone)]
pub struct DurableAction {
    workflow: Workflow<DurableCall, DurableFired>,
}

/// The input of a durable action.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DurableCall {
    /// The entity, as it is while the action runs.
    pub entity: Entity,
    /// The requester that the step was fired for.
    pub requester: String,
    /// The actor that has fired the step, if one was given.
    pub actor: Option<String>,
    /// The input that the step was fired with.
    pub input: Value,
    /// The number of the claim's fencing token.
    pub token: u64,
    /// The number of this attempt, counted from 1.
    pub attempt: u32,
    claim: uuid::Uuid,
}

/// The result of a firing: as the execution of a durable action returns it, and as it is kept under an idempotency key.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[doc(hidden)]
pub enum DurableFired {
    Done { from: String, to: String, rev: u64, output: Value },
    Failure(ActionFailure),
    Rejection(Rejection),
    Lost(String),
}

/// Returns a durable action: an `async fn(ctx, call) -> Result<Outcome, Failure>` that runs as a workflow with this
/// name. A failure releases the claim, like the error of any other action.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use latchwork::claim::{Claims, ClaimWorkflow, DurableCall, Outcome, ClaimStep, durable_action};
/// use latchwork::entity::Add;
/// use latchwork::store::Store;
/// use latchwork::workflow::{Ctx, Engine, Failure};
/// use latchwork::json;
///
/// let close = durable_action("CloseBilling", async |ctx: Ctx, call: DurableCall| {
///     ctx.run("collect", async || Ok(7)).await?;
///     Ok(Outcome::output(call.input))
/// });
/// let engine = Engine::on(&Store::memory().await?).register(close.workflow()).start().await?;
/// let billing = ClaimWorkflow::new("billing", "billing", "period")
///     .statuses(["approved", "closing", "closed"])
///     .step(ClaimStep::new(20, "close", "approved", "closed").claimed("closing").action("CloseBilling"));
/// let claims = Claims::on(&engine).workflow(billing).durable_action(&close).start().await?;
///
/// claims.add("billing", Add::new("period").id("may").data(json!({"status": "approved"}))).await?;
/// assert!(claims.fire("billing", "close", "may").await?.is_done());
/// # Ok(()) }
/// ```
pub fn durable_action<F, Fut>(name: impl Into<String>, action: F) -> DurableAction
where
    F: Fn(Ctx, DurableCall) -> Fut + Send + Sync + 'static,
    Fut: Future<Output = std::result::Result<Outcome, Failure>> + Send + 'static,
{
    let action = Arc::new(action);
    let workflow = workflow(name).run(move |ctx: Ctx, call: DurableCall| {
        let action = action.clone();
        async move {
            let acted = action(ctx.clone(), call.clone()).await;
            conclude(&ctx, &call, acted).await
        }
    });
    DurableAction { workflow }
}

impl DurableAction {
    /// The workflow, to be registered with the engine.
    ///
    /// ```
    /// # use latchwork::claim::DurableAction;
    /// # use latchwork::store::Store;
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(store: Store, close: DurableAction) -> Result<()> {
    /// let engine = Engine::on(&store).register(close.workflow()).start().await?;
    /// # Ok(()) }
    /// ```
    pub fn workflow(&self) -> &Workflow<DurableCall, DurableFired> {
        &self.workflow
    }

    pub(crate) fn name(&self) -> &str {
        self.workflow.name()
    }
}

impl std::fmt::Debug for DurableAction {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DurableAction").field("name", &self.name()).finish_non_exhaustive()
    }
}

impl DurableFired {
    /// The same for the caller of the firing, or for a repeated call of it.
    pub(crate) fn into_fired(self, entity: &EntityId, repeated: bool) -> Fired {
        match self {
            DurableFired::Done { from, to, rev, output } => {
                Fired::Done(Transitioned { from, to, rev: Rev(rev), output, repeated })
            }
            DurableFired::Failure(failure) => Fired::Failure(failure),
            DurableFired::Rejection(rejection) => Fired::Rejection(rejection),
            DurableFired::Lost(reason) => Fired::Lost(Lost { entity: entity.clone(), reason }),
        }
    }
}

/// A transition that an execution has made.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct MadeTransition {
    from: String,
    to: String,
    rev: u64,
    /// The number of its after-effects.
    effects: u16,
}

/// Ends the claim of an execution with the result of its action, in a transaction of the execution.
async fn conclude(
    ctx: &Ctx,
    call: &DurableCall,
    acted: std::result::Result<Outcome, Failure>,
) -> std::result::Result<DurableFired, Failure> {
    let engine = ctx.engine();
    let inner = ClaimsInner::on(engine);
    let own = match &inner {
        Some(_) => None,
        // The engine has started before the claims. Their records can be written all the same.
        None => {
            let spaces = match ClaimSpaces::declare(&engine.store).await {
                Ok(spaces) => spaces,
                Err(error) => ctx.stop_for_store(error).await,
            };
            Some(Ledger::alone(engine, spaces))
        }
    };
    let ledger = inner.as_ref().map(|inner| &*inner.ledger).or(own.as_ref());
    let ledger = ledger.ok_or_else(|| Failure::new("claims were not started on this engine"))?;
    let output = match &acted {
        Ok(Outcome::Success { output }) => Some(output.clone()),
        _ => None,
    };
    let why = match &acted {
        Ok(Outcome::Success { .. }) => String::new(),
        Ok(Outcome::Failure(failure)) => format!("the action failed: {}", failure.message),
        Ok(Outcome::Rejection(rejection)) => format!("the action rejected it: {}", rejection.message),
        Err(failure) => format!("the action ended with an error: {}", failure.message()),
    };
    let kept = match &acted {
        Ok(Outcome::Failure(failure)) => Some(DurableFired::Failure(failure.clone())),
        Ok(Outcome::Rejection(rejection)) => Some(DurableFired::Rejection(rejection.clone())),
        _ => None,
    };
    let expected = Mutex::new(None);
    // The transaction also runs if the execution is cancelled: otherwise nothing would end the claim.
    let shielded = ctx.shielded();
    let ended = shielded.transaction("claim", |tx: Tx| {
        let (output, why, kept, expected) = (output.clone(), why.clone(), &kept, &expected);
        async move {
            match ledger.conclude(&tx, call, output, (&why, kept), expected).await {
                // If the store is unavailable, the execution stops and its journal records nothing.
                Err(ClaimError::Store(error)) => ctx.stop_for_store(error).await,
                concluded => concluded.map_err(|error| Failure::new(error.to_string())),
            }
        }
    });
    let ended: Option<MadeTransition> = ended.await?;
    let expected = expected.into_inner();
    if let Some(ended) = &ended {
        match (expected, ClaimsInner::on(engine)) {
            (Some(expected), _) => expected.landed(),
            // The transaction landed before this replay. If the claims have not started yet, they read the outbox at
            // their start.
            (None, claims) => {
                let key = |number| EffectKey { entity: call.entity.id.clone(), rev: Rev(ended.rev), number };
                let keys = (0..ended.effects).map(key);
                claims.iter().for_each(|claims| keys.clone().for_each(|key| claims.outbox.look_at(key)));
            }
        }
    }
    let lost = || DurableFired::Lost("the claim was taken away while the action ran".into());
    match acted {
        Ok(Outcome::Success { output }) => Ok(ended
            .map_or_else(lost, |MadeTransition { from, to, rev, .. }| DurableFired::Done { from, to, rev, output })),
        Ok(Outcome::Failure(failure)) => Ok(DurableFired::Failure(failure)),
        Ok(Outcome::Rejection(rejection)) => Ok(DurableFired::Rejection(rejection)),
        Err(failure) => Err(failure),
    }
}

impl Ledger {
    /// Returns a ledger that writes records of claims, but has no outbox and no timers in memory.
    pub(crate) fn alone(engine: &Arc<crate::workflow::engine::EngineInner>, spaces: ClaimSpaces) -> Ledger {
        Ledger {
            store: engine.store.clone(),
            entities: engine.entities.clone(),
            states: engine.states.clone(),
            spaces,
            engine: engine.clone(),
            outbox: Weak::new(),
            timers: Weak::new(),
            rows: None,
        }
    }

    /// Adds the end of a claim to a transaction: the transition if there is an output, otherwise the release. Returns
    /// the statuses and the rev of the transition. Returns `None` if the claim is released, or was taken away before.
    async fn conclude(
        &self,
        tx: &Tx,
        call: &DurableCall,
        output: Option<Value>,
        (why, kept): (&str, &Option<DurableFired>),
        expected: &Mutex<Option<Expected>>,
    ) -> Result<Option<MadeTransition>> {
        let view = tx.view()?;
        let id = &call.entity.id;
        let Some((claim, rev)) = self.claim_on(&view, id).await? else { return Ok(None) };
        if (claim.id, claim.token) != (call.claim, call.token) {
            return Ok(None);
        }
        // This read makes the transaction check the entity's rev. If the entity changes meanwhile, the transaction runs
        // again.
        tx.get(id.clone()).await?;
        let standing = self.entities.standing(&view, id).await?;
        let terms = claim.terms.clone();
        let claiming = terms.claim_into.as_deref();
        let standing = standing.filter(|standing| terms.status(standing.data()) == claiming);
        let changed = "the entity was changed while the action ran";
        let (rev_before, mut ends) = (rev, EndReason::new(if why.is_empty() { changed } else { why }));
        if let Some(fired) = kept {
            ends = ends.answered(&self.once_of(&claim).await?, fired);
        }
        let Some(standing) = standing else {
            tx.part(self.dropping(id, rev_before));
            return Ok(None);
        };
        let Some(output) = output.filter(|_| standing.rev.0 == claim.token) else {
            let data = terms.with_status(standing.data(), &terms.from);
            tx.update(Update::new(id.clone()).data(data).if_rev(standing.rev));
            tx.part(self.releasing(&claim, &standing, rev_before, &ends));
            return Ok(None);
        };
        let firing = self.firing(claim, standing).await?;
        let data = terms.with_status(firing.standing.data(), &terms.into);
        tx.update(Update::new(id.clone()).data(data).if_rev(firing.standing.rev));
        let now = self.store.env().now();
        *expected.lock() = self.expect_effects(&firing, &output, now);
        let part = self.finishing(&firing, &StagedWrites::default(), &output, now).await?;
        tx.part(part);
        let (from, to, rev) = (terms.from.clone(), terms.into.clone(), firing.standing.rev.next().0);
        Ok(Some(MadeTransition { from, to, rev, effects: terms.effects.len() as u16 }))
    }
}

impl ClaimsInner {
    fn durable_call(&self, claim: &Claim, entity: Entity) -> DurableCall {
        DurableCall {
            entity,
            requester: claim.requester.clone(),
            actor: claim.actor.clone(),
            input: serde_json::from_str(&claim.input).unwrap_or_default(),
            token: claim.token,
            attempt: claim.attempts,
            claim: claim.id,
        }
    }

    /// Returns the part that starts the execution of a claim.
    async fn execution_of(&self, standing: &Standing, claim: &Claim, workflow: &str) -> Result<Part> {
        let Owner::Execution(id) = &claim.owner else { return Err(ClaimError::Stopped) };
        let terms = &claim.terms;
        let claiming = terms.claim_into.as_deref().unwrap_or(&terms.from);
        let mut entity = standing.entity();
        entity.data = terms.with_status(&entity.data, claiming);
        entity.rev = Rev(claim.token);
        let input = serde_json::to_string(&self.durable_call(claim, entity));
        let input = input.map_err(|error| ClaimError::Corrupt { place: error.to_string() })?;
        Ok(self.ledger.engine.starting(&[(workflow, input, id.clone())]).await?)
    }

    /// Claims an entity for an execution that starts in the same commit, and waits for its end. Returns `None` if
    /// another caller was faster.
    pub(crate) async fn claim_for_execution(
        self: &Arc<ClaimsInner>,
        standing: &Standing,
        terms: &Arc<Terms>,
        call: &FireCall,
        workflow: &str,
    ) -> Result<Option<Fired>> {
        let owner = |id: &uuid::Uuid| Owner::Execution(ExecutionId::from(format!("{workflow}:{id}")));
        let claim = self.new_claim(standing, terms, call, Owner::Session(uuid::Uuid::nil()));
        let claim = Claim { owner: owner(&claim.id), ..claim };
        // A caller may have changed the entity while it was claimed. That claim does not hold the entity any more.
        let other = self.ledger.claim_on(&self.ledger.view().await?, &standing.id).await?;
        let replaces = other.map(|(_, rev)| rev);
        let starts = self.execution_of(standing, &claim, workflow).await?.and(call.begun.unanswered());
        // In a task that also finishes if the caller drops this future: the answer of the commit loads the execution.
        let (claims, before, claimed) = (self.clone(), standing.clone(), claim.clone());
        let sending = async move { claims.ledger.claim(&before, &claimed, replaces, starts).await };
        let sent = self.ledger.engine.node.runtime.run(sending).await.unwrap_or(Err(ClaimError::Stopped));
        match sent {
            // From now on the janitor looks whether the execution has ended without ending the claim.
            Ok(LedgerOutcome::Landed(_)) => self.nudge.notify_one(),
            Ok(_) => return Ok(None),
            Err(error) => {
                self.nudge.notify_one();
                let found = self.ledger.claim_on(&self.ledger.view().await?, &standing.id).await?;
                if found.is_none_or(|(found, _)| found != claim) {
                    return Err(error);
                }
            }
        }
        self.result_of(&claim, &standing.id).await.map(Some)
    }

    /// Waits for the result of a durable action.
    async fn result_of(&self, claim: &Claim, entity: &EntityId) -> Result<Fired> {
        let Owner::Execution(id) = &claim.owner else { return Err(ClaimError::Stopped) };
        let action = claim.terms.action.clone().unwrap_or_default();
        let fired = self.ledger.engine.result_of::<DurableFired>(id).await;
        match fired {
            Ok(fired) => Ok(fired.into_fired(entity, false)),
            Err(WorkflowError::Failed { failure, .. }) if failure.code() != "latchwork.terminated" => {
                Err(ClaimError::Action { action, error: ActionError::new(failure.message().to_string()) })
            }
            Err(error @ (WorkflowError::Stopped | WorkflowError::Store(_))) => Err(error.into()),
            Err(error) => Err(ClaimError::Execution { action, id: id.to_string(), error: Box::new(error) }),
        }
    }

    /// Starts the action of a claim again, as a new execution.
    pub(crate) async fn retry_as_execution(
        self: &Arc<ClaimsInner>,
        standing: &Standing,
        before: (&Claim, Rev),
        again: Claim,
        workflow: &str,
        why: &EndReason,
    ) -> Result<()> {
        let id = ExecutionId::from(format!("{workflow}:{}:{}", again.id, again.attempts));
        let again = Claim { owner: Owner::Execution(id), ..again };
        let starts = self.execution_of(standing, &again, workflow).await?;
        self.ledger.take_over(standing, before, &again, LoggedKind::Retried, why, starts).await.map(drop)
    }
}
