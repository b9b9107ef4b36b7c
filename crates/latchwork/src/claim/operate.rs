//! What operators can read about claims, and what they can do with them. Nothing here runs an action: the janitor does.

use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use tokio::sync::Notify;

use crate::claim::action::StagedWrites;
use crate::claim::claims::{self, Claims};
use crate::claim::error::{ClaimError, Result};
use crate::claim::finish::{Firing, TransitionOutcome};
use crate::claim::ledger::{EndReason, Ledger, LedgerOutcome};
use crate::claim::outcome::{ClaimHolder, Reason};
use crate::claim::stored::{Claim, ClaimPhase, ClaimSpaces, EffectKey, Logged, LoggedKind, OutboxEffect};
use crate::entity::{EntityId, Standing};
use crate::lane::{Once, OnceFound, Part};
use crate::lock::{self, Owner};
use crate::node::session::Lease;
use crate::record::Record;
use crate::store::{Commit, Rev, Store, Timestamp, View};
use crate::workflow::Engine;

/// An open claim, as operators see it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct OpenClaim {
    /// The entity.
    pub entity: EntityId,
    /// The claim workflow.
    pub workflow: String,
    /// The key of the step.
    pub step: String,
    /// The action.
    pub action: Option<String>,
    /// The claiming status.
    pub claim_into: String,
    /// The status that the entity returns to if the claim is released.
    pub revert_to: String,
    /// The status that the step leads to.
    pub successful_state: String,
    /// The number of the fencing token.
    pub token: u64,
    /// The number of attempts of the action.
    pub attempts: u32,
    /// The holder of the claim.
    pub holder: ClaimHolder,
}

/// A change of an entity by a claim workflow.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Transition {
    /// The claim workflow.
    pub workflow: String,
    /// The key of the step.
    pub step: String,
    /// The status before. For a released claim this is the claiming status.
    pub from: String,
    /// The status after.
    pub to: String,
    /// The kind of the change.
    pub kind: TransitionKind,
    /// The requester that the step was fired for.
    pub requester: String,
    /// The actor that has made the change, if one was given.
    pub actor: Option<String>,
    /// The reason. Usually empty for a step that was fired and has succeeded.
    pub reason: String,
    /// The entity's rev after the change.
    pub rev: Rev,
    /// When the claim was made.
    #[serde(rename = "since_us")]
    pub since: Timestamp,
    /// When the change was made.
    #[serde(rename = "at_us")]
    pub at: Timestamp,
}

/// The kind of a change by a claim workflow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum TransitionKind {
    /// A step has succeeded.
    Done,
    /// A claim was released.
    Released,
    /// A claim began to wait for an operator.
    NeedsReview,
    /// The action of a claim was started again.
    Retried,
}

/// The claims in a store, for reading. It needs neither an engine nor a configuration.
#[derive(Clone)]
pub struct StoredClaims {
    pub(super) store: Store,
    pub(super) spaces: Option<ClaimSpaces>,
    sessions: Option<lock::name::LockSpaces>,
}

/// Reads and changes claims. It needs no configuration: each claim stores the terms it was made with.
#[derive(Clone)]
pub struct ClaimOperator {
    ledger: Arc<Ledger>,
    stored: StoredClaims,
    /// Wakes the janitor.
    nudge: Arc<Notify>,
    once: Option<Once>,
}

impl StoredClaims {
    /// The claims of a store. The store may be open for reading only.
    ///
    /// ```
    /// # use latchwork::claim::{Result, StoredClaims};
    /// # use latchwork::store::Store;
    /// # async fn example() -> Result<()> {
    /// let stored = StoredClaims::on(&Store::open_read_only("./data").await?).await?;
    /// # Ok(()) }
    /// ```
    pub async fn on(store: &Store) -> Result<StoredClaims> {
        let (spaces, sessions) = (ClaimSpaces::find(store).await?, lock::name::LockSpaces::find(store).await?);
        Ok(StoredClaims { store: store.clone(), spaces, sessions })
    }

    /// The claim on an entity.
    ///
    /// ```
    /// # use latchwork::claim::{Result, StoredClaims};
    /// # async fn example(stored: StoredClaims) -> Result<()> {
    /// if let Some(claim) = stored.get("i-1").await? {
    ///     println!("{} is held by {}", claim.entity, claim.holder.owner);
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn get(&self, entity: impl Into<EntityId>) -> Result<Option<OpenClaim>> {
        let (entity, Some(spaces)) = (entity.into(), &self.spaces) else { return Ok(None) };
        let view = self.store.view().await?;
        let Some(item) = view.get(&spaces.claim(&entity)).await? else { return Ok(None) };
        let claim = Claim::decode(&item.value).map_err(|why| why.at(format!("the claim on entity {entity:?}")))?;
        Ok(Some(self.open(&view, entity, claim).await?))
    }

    pub(super) async fn open(&self, view: &View, entity: EntityId, claim: Claim) -> Result<OpenClaim> {
        let holder = holder(view, self.sessions.as_ref(), self.store.env().now(), &claim).await?;
        let terms = &claim.terms;
        Ok(OpenClaim {
            entity,
            workflow: terms.workflow.clone(),
            step: terms.step_key.clone(),
            action: terms.action.clone(),
            claim_into: terms.claim_into.clone().unwrap_or_default(),
            revert_to: terms.from.clone(),
            successful_state: terms.into.clone(),
            token: claim.token,
            attempts: claim.attempts,
            holder,
        })
    }
}

pub(super) fn transition(logged: Logged, rev: Rev) -> Transition {
    Transition {
        workflow: logged.workflow,
        step: logged.step_key,
        from: logged.from,
        to: logged.to,
        kind: match logged.kind {
            LoggedKind::Done => TransitionKind::Done,
            LoggedKind::Released => TransitionKind::Released,
            LoggedKind::Review => TransitionKind::NeedsReview,
            LoggedKind::Retried => TransitionKind::Retried,
        },
        requester: logged.requester,
        actor: logged.actor,
        reason: logged.reason,
        rev,
        since: Timestamp(logged.since_us),
        at: Timestamp(logged.at_us),
    }
}

/// Returns the holder of a claim, with the rest of its lease.
async fn holder(
    view: &View,
    sessions: Option<&lock::name::LockSpaces>,
    now: Timestamp,
    claim: &Claim,
) -> Result<ClaimHolder> {
    let (owner, lease_left) = match &claim.owner {
        Owner::Session(id) => {
            let item = match sessions {
                Some(sessions) => view.get(&sessions.session(*id)).await?,
                None => None,
            };
            let lease = item.and_then(|item| Lease::decode(&item.value).ok());
            let left = lease.as_ref().map_or(0, |lease| {
                let until = lease.renewed_us.saturating_add(lease.lease_us);
                until.saturating_sub(now.0).min(lease.lease_us)
            });
            let label = lease.map_or_else(|| "a process that is gone".into(), |lease| lease.label);
            (format!("{label}, session {id}"), Some(Duration::from_micros(left)))
        }
        Owner::Execution(id) => (format!("execution {id:?}"), None),
    };
    let needs_review = match &claim.phase {
        ClaimPhase::Review(reason) => Some(reason.clone()),
        _ => None,
    };
    Ok(ClaimHolder {
        owner,
        requester: claim.requester.clone(),
        actor: claim.actor.clone(),
        step: claim.terms.step(),
        since: Timestamp(claim.since_us),
        lease_left,
        needs_review,
    })
}

impl Ledger {
    /// Returns the holder of a claim, with the rest of its lease.
    pub(crate) async fn holder(&self, view: &View, claim: &Claim) -> Result<ClaimHolder> {
        holder(view, Some(&self.engine.locks.spaces), self.store.env().now(), claim).await
    }
}

impl ClaimOperator {
    /// An operator for the claims in the store of an engine. The engine may be
    /// [idle](crate::workflow::EngineBuilder::idle).
    ///
    /// ```
    /// # use latchwork::claim::{ClaimOperator, Result};
    /// # use latchwork::workflow::Engine;
    /// # async fn example(engine: Engine) -> Result<()> {
    /// let operator = ClaimOperator::on(&engine).await?;
    /// # Ok(()) }
    /// ```
    pub async fn on(engine: &Engine) -> Result<ClaimOperator> {
        let inner = &engine.inner;
        if let Some(claims) = claims::ClaimsInner::on(inner) {
            return ClaimOperator::with(claims.ledger.clone(), claims.nudge.clone()).await;
        }
        let ledger = Arc::new(Ledger::alone(inner, ClaimSpaces::declare(&inner.store).await?));
        ClaimOperator::with(ledger, Arc::default()).await
    }

    async fn with(ledger: Arc<Ledger>, nudge: Arc<Notify>) -> Result<ClaimOperator> {
        let stored = StoredClaims::on(&ledger.store).await?;
        Ok(ClaimOperator { ledger, stored, nudge, once: None })
    }

    /// Sets the idempotency key of the change that is made through the returned operator: take one for each change.
    ///
    /// ```
    /// # use latchwork::claim::{ClaimOperator, Result};
    /// # async fn example(operator: ClaimOperator) -> Result<()> {
    /// operator.once("request-7").release("i-1", "ada@example.org", "the bank does not answer").await?;
    /// # Ok(()) }
    /// ```
    pub fn once(mut self, once: impl Into<Once>) -> ClaimOperator {
        self.once = Some(once.into());
        self
    }

    /// Looks whether this change was made before under the idempotency key, if there is one.
    async fn find<A: DeserializeOwned>(&self, change: &impl Serialize) -> Result<OnceFound<A>> {
        let engine = &self.ledger.engine;
        Ok(engine.once.find(&self.ledger.store, self.once.as_ref(), change).await?)
    }

    /// The claims, for reading.
    ///
    /// ```
    /// # use latchwork::claim::{ClaimOperator, Result};
    /// # async fn example(operator: ClaimOperator) -> Result<()> {
    /// let claim = operator.stored().get("i-1").await?;
    /// # Ok(()) }
    /// ```
    pub fn stored(&self) -> &StoredClaims {
        &self.stored
    }

    async fn claim_on(&self, entity: &EntityId) -> Result<(Claim, Rev)> {
        let found = self.ledger.claim_on(&self.ledger.view().await?, entity).await?;
        found.ok_or_else(|| ClaimError::NotClaimed { id: entity.clone() })
    }

    /// Ends the claim on an entity. The entity returns to the status it came from. An action that still runs cannot
    /// change anything any more.
    ///
    /// ```
    /// # use latchwork::claim::{ClaimOperator, Result};
    /// # async fn example(operator: ClaimOperator) -> Result<()> {
    /// operator.release("i-1", "ada@example.org", "the bank does not answer").await?;
    /// # Ok(()) }
    /// ```
    pub async fn release(&self, entity: impl Into<EntityId>, actor: &str, reason: &str) -> Result<()> {
        let entity = entity.into();
        let call = match self.find(&("claim.release", &entity, actor, reason)).await? {
            OnceFound::Answered(()) => return Ok(()),
            OnceFound::Anew(call) => call,
        };
        let (claim, _) = self.claim_on(&entity).await?;
        let why = EndReason::by(actor, reason).answered(&call, &());
        match self.ledger.release(&entity, &claim, &why).await? {
            true => Ok(()),
            false => Err(ClaimError::NotClaimed { id: entity }),
        }
    }

    /// Makes the program that has the action run it again, for a claim that waits for an operator.
    ///
    /// ```
    /// # use latchwork::claim::{ClaimOperator, Result};
    /// # async fn example(operator: ClaimOperator) -> Result<()> {
    /// operator.retry("i-1", "ada@example.org", "the bank has no such payment").await?;
    /// # Ok(()) }
    /// ```
    pub async fn retry(&self, entity: impl Into<EntityId>, actor: &str, reason: &str) -> Result<()> {
        let entity = entity.into();
        let call = match self.find(&("claim.retry", &entity, actor, reason)).await? {
            OnceFound::Answered(()) => return Ok(()),
            OnceFound::Anew(call) => call,
        };
        let (claim, rev, standing) = self.in_review(&entity).await?;
        let again = Claim { token: standing.rev.next().0, phase: ClaimPhase::Retry, ..claim.clone() };
        let why = EndReason::by(actor, reason).answered(&call, &());
        let kind = LoggedKind::Review;
        let sent = self.ledger.take_over(&standing, (&claim, rev), &again, kind, &why, Part::default()).await?;
        self.nudge.notify_one();
        match sent {
            LedgerOutcome::Landed(_) => Ok(()),
            _ => Err(ClaimError::Contended { id: entity, tries: 1 }),
        }
    }

    /// Returns a claim that waits for an operator, the rev of its record, and its entity. Fails if the claim does not
    /// hold the entity any more.
    async fn in_review(&self, entity: &EntityId) -> Result<(Claim, Rev, Standing)> {
        let refuse = |reason: &str| Err(ClaimError::NotInReview { id: entity.clone(), reason: reason.into() });
        let (claim, _) = self.claim_on(entity).await?;
        if !matches!(claim.phase, ClaimPhase::Review(_)) {
            return refuse("does not wait for an operator: release it, or let its action end");
        }
        match self.ledger.still(entity, &claim).await? {
            Some((rev, Some(standing))) if standing.rev.0 == claim.token => Ok((claim, rev, standing)),
            _ => refuse("has lost its hold, because the entity was changed by hand: release it"),
        }
    }

    /// Makes the transition of a claim that waits for an operator, if the operator knows that the action took effect.
    /// The action does not run; the after-effects are delivered.
    ///
    /// ```
    /// # use latchwork::claim::{ClaimOperator, Result};
    /// # async fn example(operator: ClaimOperator) -> Result<()> {
    /// let rev = operator.complete("i-1", "ada@example.org", "the bank has the payment").await?;
    /// # Ok(()) }
    /// ```
    pub async fn complete(&self, entity: impl Into<EntityId>, actor: &str, reason: &str) -> Result<Rev> {
        let entity = entity.into();
        let by = match self.find(&("claim.complete", &entity, actor, reason)).await? {
            OnceFound::Answered(rev) => return Ok(rev),
            OnceFound::Anew(call) => call,
        };
        let (claim, _, standing) = self.in_review(&entity).await?;
        let claim = Claim { actor: Some(actor.into()), ..claim };
        let firing = Firing { reason: reason.into(), by, ..self.ledger.firing(claim, standing).await? };
        // In a task that also finishes if the caller drops this future: the answer of the commit starts the
        // after-effects.
        let ledger = self.ledger.clone();
        let finishing = async move { ledger.finish(&firing, &StagedWrites::default(), &Value::Null).await };
        let finished = self.ledger.engine.node.runtime.run(finishing).await;
        match finished.unwrap_or(Err(ClaimError::Stopped))? {
            TransitionOutcome::Done(rev) => Ok(rev),
            TransitionOutcome::Moved => Err(ClaimError::Contended { id: entity, tries: 1 }),
        }
    }

    /// Puts a dead letter back into the outbox, with no attempts counted.
    ///
    /// ```
    /// # use latchwork::claim::{ClaimOperator, Result};
    /// # async fn example(operator: ClaimOperator) -> Result<()> {
    /// for letter in operator.stored().dead_letters().await? {
    ///     operator.redeliver(&letter.effect.key).await?;
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn redeliver(&self, key: &str) -> Result<()> {
        let missing = || ClaimError::NoDeadLetter { key: key.into() };
        let call = match self.find(&("claim.redeliver", key)).await? {
            OnceFound::Answered(()) => return Ok(()),
            OnceFound::Anew(call) => call,
        };
        let named = EffectKey::parse(key).ok_or_else(missing)?;
        let ledger = &self.ledger;
        let (dead, outbox) = (ledger.spaces.dead(&named), ledger.spaces.effect(&named));
        let item = ledger.view().await?.get(&dead).await?.ok_or_else(missing)?;
        let effect = OutboxEffect::decode(&item.value).map_err(|why| why.at(format!("dead letter {key}")))?;
        let effect = OutboxEffect { attempts: 0, due_us: 0, error: None, ..effect };
        let commit = Commit::new().at_rev(&dead, item.rev).delete(&dead).put(&outbox, effect.encode());
        let (commit, ..) = call.answered(&()).place_whole(commit);
        if !ledger.store.commit(commit).await?.is_applied() {
            return Err(missing());
        }
        ledger.outbox.upgrade().iter().for_each(|outbox| outbox.look_at(named.clone()));
        Ok(())
    }
}

/// The steps that a requester can fire for an entity.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct Permitted {
    /// The entity's status.
    pub status: String,
    /// The keys of the steps that can be fired.
    pub steps: Vec<String>,
    /// The keys of all other steps, each with the reasons why it cannot be fired.
    pub others: Vec<(String, Vec<Reason>)>,
}

impl Claims {
    /// Returns the operator's interface to these claims.
    ///
    /// ```
    /// # use latchwork::claim::{Claims, Result};
    /// # async fn example(claims: Claims) -> Result<()> {
    /// claims.operate().await?.release("i-1", "ada@example.org", "the bank does not answer").await?;
    /// # Ok(()) }
    /// ```
    pub async fn operate(&self) -> Result<ClaimOperator> {
        ClaimOperator::with(self.inner.ledger.clone(), self.inner.nudge.clone()).await
    }

    /// Makes the janitor look at all open claims now.
    ///
    /// ```
    /// # use latchwork::claim::{Claims, Result};
    /// # async fn example(claims: Claims) -> Result<()> {
    /// let swept = claims.sweep().await?;
    /// println!("{} of {} claims were abandoned", swept.recovered, swept.open);
    /// # Ok(()) }
    /// ```
    pub async fn sweep(&self) -> Result<crate::claim::Swept> {
        self.inner.sweep().await
    }

    /// Returns the steps of a workflow that a requester can fire for an entity, and every reason against the others.
    /// Guards are called without an input.
    ///
    /// ```
    /// # use latchwork::claim::{Claims, Result};
    /// # async fn example(claims: Claims) -> Result<()> {
    /// let permitted = claims.permitted("invoice", "i-1", "admin").await?;
    /// println!("at {}: {:?}", permitted.status, permitted.steps);
    /// # Ok(()) }
    /// ```
    pub async fn permitted(&self, workflow: &str, entity: impl Into<EntityId>, requester: &str) -> Result<Permitted> {
        let (inner, entity) = (&self.inner, entity.into());
        let machine = inner.machine(workflow)?;
        let entity = machine.entity(&entity);
        let view = inner.ledger.view().await?;
        let standing = inner.ledger.standing(&view, &entity).await?;
        let standing = standing.ok_or_else(|| ClaimError::NotFound { id: entity.clone() })?;
        let status = machine.status(&standing)?.to_string();
        let claim = inner.ledger.claim_on(&view, &entity).await?;
        let holder = match claim.filter(|(claim, _)| claim.token == standing.rev.0) {
            Some((claim, _)) => Some(Box::new(inner.holder(&view, &claim).await?)),
            None => None,
        };
        let is_claimed = holder.is_some() || machine.claiming.contains(&status);
        let document = standing.entity();
        let (mut steps, mut others) = (Vec::new(), Vec::new());
        for (at, step) in machine.config.steps.iter().enumerate() {
            let mut reasons = Vec::new();
            if is_claimed {
                reasons.push(Reason::Claimed { holder: holder.clone() });
            } else if step.status != status {
                reasons.push(Reason::Status { expected: vec![step.status.clone()] });
            }
            if machine.terms(at, requester).is_none() {
                reasons.push(Reason::Requester { allowed: machine.allowed(at) });
            }
            reasons.extend(inner.refusals(machine, at, requester, &document, &Value::Null));
            match reasons.is_empty() {
                true => steps.push(step.step_key.clone()),
                false => others.push((step.step_key.clone(), reasons)),
            }
        }
        Ok(Permitted { status, steps, others })
    }
}

impl std::fmt::Debug for StoredClaims {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("StoredClaims").finish_non_exhaustive()
    }
}

impl std::fmt::Debug for ClaimOperator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ClaimOperator").finish_non_exhaustive()
    }
}
