//! The janitor: finds claims whose owners are gone, and recovers them as their steps configure it.
//!
//! It sweeps the open claims; there are as many as running actions. It reads an entity only to end a claim on it.

use std::pin::pin;
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::future::{Either, select};
use futures_util::{StreamExt, stream};

use crate::claim::claims::{Action, ClaimsInner};
use crate::claim::config::{Janitor, Recovery};
use crate::claim::error::{ClaimError, Result};
use crate::claim::hold::HeldClaim;
use crate::claim::ledger::{EndReason, LedgerOutcome};
use crate::claim::stored::{Claim, ClaimPhase, LoggedKind};
use crate::damage::scan_around;
use crate::entity::EntityId;
use crate::lane::Part;
use crate::lock::Owner;
use crate::node::session::Lease;
use crate::record::Record;
use crate::store::{ErrorKind, Timestamp, View};
use crate::workflow::WorkflowError;

/// The number of claims that are read at once.
const PAGE: usize = 1000;

/// The number of claims that are ended at once.
const AT_ONCE: usize = 64;

/// The pause between sweeps if there are no open claims, on a store that other processes share.
const IDLE: Duration = Duration::from_secs(30);

/// The time limit for an answer of a module's janitor.
const PATIENCE: Duration = Duration::from_secs(60);

/// A pause is at least this many times as long as the sweep before it.
const SHARE: u32 = 20;

/// A claim whose owner is gone, as the janitor of a module gets it.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Abandoned {
    /// The workflow.
    pub workflow: String,
    /// The module that owns the workflow.
    pub module: String,
    /// The key of the step.
    pub step: String,
    /// The entity.
    pub entity: EntityId,
    /// The claiming status.
    pub claim_into: String,
    /// The status that the claim came from.
    pub revert_to: String,
    /// The requester that the step was fired for.
    pub requester: String,
    /// When the claim was made.
    pub since: Timestamp,
    /// The number of attempts of the action.
    pub attempts: u32,
    /// The recovery that the step configures.
    pub recovery: Recovery,
}

/// Sweeps until the engine ends.
pub(crate) async fn keep(claims: Weak<ClaimsInner>) {
    // A commit may land after the sweep that it woke the janitor for. So the janitor sweeps once more.
    let mut was_nudged = false;
    loop {
        let Some(inner) = claims.upgrade() else { return };
        let env = inner.ledger.store.env().clone();
        let (mut ended, nudge) = (inner.service().sessions.ended.subscribe(), inner.nudge.clone());
        ended.mark_unchanged();
        let began = env.monotonic();
        let pause = match inner.sweep().await {
            Ok(swept) if swept.open > 0 || was_nudged => Some(inner.sweep_every),
            Ok(_) if inner.ledger.store.opening().is_none() => Some(IDLE.max(inner.sweep_every)),
            Ok(_) => None,
            Err(_) if inner.ledger.engine.is_stopped() => return,
            Err(ClaimError::Store(error)) if error.is_final() => return,
            Err(error) => {
                tracing::warn!(%error, "janitor: the sweep of claims failed");
                Some(inner.sweep_every)
            }
        };
        if inner.ledger.store.opening().is_none() {
            // Another process may have written after-effects that this node must deliver.
            inner.outbox.look_again();
        }
        let took = env.monotonic().saturating_sub(began);
        let pause = pause.map(|pause| pause.max(took * SHARE));
        drop(inner);
        let mut sleep = pause.map(|pause| env.sleep(pause));
        let (mut nudged, mut over) = (std::pin::pin!(nudge.notified()), std::pin::pin!(ended.changed()));
        std::future::poll_fn(|context| {
            let is_due = sleep.as_mut().is_some_and(|sleep| sleep.as_mut().poll(context).is_ready());
            was_nudged = nudged.as_mut().poll(context).is_ready();
            let is_woken = was_nudged || over.as_mut().poll(context).is_ready();
            if is_due || is_woken { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
        })
        .await;
    }
}

/// The result of a sweep.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Swept {
    /// The number of open claims.
    pub open: usize,
    /// The number of abandoned claims among them. The sweep has tried to recover each of them.
    pub recovered: usize,
}

/// What a claim needs.
enum Needs {
    Nothing,
    Recovery(String),
    /// An operator has asked to run its action again.
    Retry,
}

impl ClaimsInner {
    /// Looks at all open claims, and recovers those whose owners are gone.
    pub(crate) async fn sweep(self: &Arc<ClaimsInner>) -> Result<Swept> {
        let (ledger, mut swept) = (&self.ledger, Swept::default());
        let space = &ledger.spaces.claims;
        let mut rest = space.all();
        loop {
            let view = ledger.view().await?;
            let scanned = scan_around(&view, space, &rest, PAGE).await?;
            scanned.damaged.iter().for_each(|key| tracing::error!(%key, "claim is damaged: release its entity"));
            swept.open += scanned.found.len();
            let mut needy = Vec::new();
            for (key, item) in &scanned.found {
                let entity = std::str::from_utf8(key.bytes()).map(EntityId::from);
                let (Ok(entity), Ok(claim)) = (entity, Claim::decode(&item.value)) else {
                    tracing::error!(%key, "claim cannot be read: damaged, or written by a newer program");
                    continue;
                };
                match self.needs(&view, &claim).await {
                    Ok(Needs::Nothing) => {}
                    Ok(needs) => needy.push((entity, claim, needs)),
                    Err(ClaimError::Store(error)) if error.kind() != ErrorKind::Corrupt => return Err(error.into()),
                    // A problem with one owner must not stop the recovery of other claims.
                    Err(error) => tracing::error!(%entity, %error, "the owner of the claim cannot be read"),
                }
            }
            drop(view);
            swept.recovered += needy.len();
            let recover = |(entity, claim, needs)| self.recover(entity, claim, needs);
            stream::iter(needy).map(recover).buffer_unordered(AT_ONCE).collect::<Vec<()>>().await;
            match scanned.keys().max().filter(|_| scanned.found.len() == PAGE) {
                Some(last) => rest = rest.after(last),
                None => return Ok(swept),
            }
        }
    }

    /// Returns what a claim needs: nothing if its owner is alive.
    async fn needs(&self, view: &View, claim: &Claim) -> Result<Needs> {
        match claim.phase {
            ClaimPhase::Held => {}
            ClaimPhase::Review(_) => return Ok(Needs::Nothing),
            ClaimPhase::Retry => return Ok(Needs::Retry),
        }
        let service = self.service();
        match &claim.owner {
            Owner::Session(id) => {
                let item = view.get(&service.spaces.session(*id)).await?;
                let Some(item) = item else { return Ok(Needs::Recovery("its process is gone".into())) };
                if service.sessions.has_begun(*id) {
                    let is_held = service.held.lock().contains(&(claim.id, claim.token));
                    return Ok(match is_held {
                        true => Needs::Nothing,
                        false => Needs::Recovery("its action has ended without a release".into()),
                    });
                }
                let lease = Lease::decode(&item.value).map_or(claim.terms.lease_us, |lease| lease.lease_us);
                service.sessions.watch_other(*id, item.rev, Duration::from_micros(lease));
                Ok(Needs::Nothing)
            }
            Owner::Execution(id) => match self.ledger.engine.has_ended(id).await {
                Ok(false) => Ok(Needs::Nothing),
                Ok(true) | Err(WorkflowError::NotFound { .. }) => {
                    Ok(Needs::Recovery(format!("execution {id:?} has ended without a result")))
                }
                Err(error) => Err(error.into()),
            },
        }
    }

    /// Recovers one claim. A later sweep repeats what fails now.
    async fn recover(self: &Arc<ClaimsInner>, entity: EntityId, claim: Claim, needs: Needs) {
        let recovered = match needs {
            Needs::Nothing => Ok(()),
            Needs::Retry => self.retry(&entity, &claim, &EndReason::new("an operator has asked for it")).await,
            Needs::Recovery(reason) => {
                let why = EndReason::by("janitor", &reason);
                match self.policy(&entity, &claim).await {
                    None => Ok(()),
                    Some(Recovery::Revert) => self.ledger.release(&entity, &claim, &why).await.map(drop),
                    Some(Recovery::NeedsReview) => self.put_to_review(&entity, &claim, &why).await,
                    Some(Recovery::Retry) if claim.attempts >= claim.terms.most_attempts => {
                        let reason = format!("{}, and the action was begun {} times", why.reason, claim.attempts);
                        self.put_to_review(&entity, &claim, &EndReason { reason, ..why.clone() }).await
                    }
                    Some(Recovery::Retry) => self.retry(&entity, &claim, &why).await,
                }
            }
        };
        if let Err(error) = recovered {
            tracing::warn!(%entity, %error, "claim could not be recovered yet");
        }
    }

    /// Returns what to do with a claim. `None` if this program cannot decide now.
    async fn policy(&self, entity: &EntityId, claim: &Claim) -> Option<Recovery> {
        let terms = &claim.terms;
        let meta = self.machines.get(&terms.workflow).map(|machine| &machine.config.meta);
        let Some(meta) = meta.filter(|meta| meta.janitor == Janitor::Module) else { return Some(terms.recovery) };
        // The workflow may have another owning module by now.
        let cover = self.covers.get(&terms.module).or_else(|| self.covers.get(&meta.owning_module))?.clone();
        let abandoned = Abandoned {
            workflow: terms.workflow.clone(),
            module: terms.module.clone(),
            step: terms.step_key.clone(),
            entity: entity.clone(),
            claim_into: terms.claim_into.clone().unwrap_or_default(),
            revert_to: terms.from.clone(),
            requester: claim.requester.clone(),
            since: Timestamp(claim.since_us),
            attempts: claim.attempts,
            recovery: terms.recovery,
        };
        // In its own task: a module's janitor that panics or never answers must not stop the recovery of other claims.
        let asked = pin!(self.ledger.engine.node.runtime.run(async move { cover(abandoned).await }));
        match select(asked, self.ledger.store.env().sleep(PATIENCE)).await {
            Either::Left((Some(recovery), _)) => Some(recovery),
            Either::Left((None, _)) => {
                tracing::error!(module = terms.module, %entity, "the module's janitor panicked");
                None
            }
            Either::Right(_) => {
                tracing::error!(module = terms.module, %entity, "the module's janitor does not answer");
                None
            }
        }
    }

    /// Makes a claim wait for an operator: it is not known whether the action took effect.
    pub(crate) async fn put_to_review(
        self: &Arc<ClaimsInner>,
        entity: &EntityId,
        claim: &Claim,
        why: &EndReason,
    ) -> Result<()> {
        let Some((rev, standing)) = self.ledger.still(entity, claim).await? else { return Ok(()) };
        let Some(standing) = standing else { return self.ledger.release(entity, claim, why).await.map(drop) };
        let (token, phase) = (standing.rev.next().0, ClaimPhase::Review(why.reason.clone()));
        let after = Claim { token, phase, ..claim.clone() };
        let kind = LoggedKind::Review;
        self.ledger.take_over(&standing, (claim, rev), &after, kind, why, Part::default()).await.map(drop)
    }

    /// Runs the action of a claim again, under a new token.
    async fn retry(self: &Arc<ClaimsInner>, entity: &EntityId, claim: &Claim, why: &EndReason) -> Result<()> {
        let name = claim.terms.action.as_deref().unwrap_or_default();
        let action = match self.actions.get(name).cloned() {
            // Another node, of another version of the program, may have the action: it sweeps this claim as well.
            None if self.ledger.engine.node.has_others() => {
                tracing::warn!(%entity, action = name, "no action for an abandoned claim here; left to other nodes");
                return Ok(());
            }
            action => action,
        };
        let Some(action) = action else {
            let reason = format!("{}, and this program has no action {name:?}", why.reason);
            return self.put_to_review(entity, claim, &EndReason { reason, ..why.clone() }).await;
        };
        let Some((rev, standing)) = self.ledger.still(entity, claim).await? else { return Ok(()) };
        let Some(standing) = standing else { return self.ledger.release(entity, claim, why).await.map(drop) };
        let (token, attempts) = (standing.rev.next().0, claim.attempts + 1);
        let again = Claim { token, attempts, phase: ClaimPhase::Held, ..claim.clone() };
        match action {
            Action::Plain(action) => {
                let session = self.service().own_session(claim.terms.lease()).await?;
                let again = Claim { owner: Owner::Session(session.id()), ..again };
                let held = HeldClaim::new(self, &again);
                let kind = LoggedKind::Retried;
                let sent = self.ledger.take_over(&standing, (claim, rev), &again, kind, why, Part::default()).await;
                let Ok(LedgerOutcome::Landed(standing)) = sent else {
                    // If the commit has landed without an answer, the next sweep treats the claim as abandoned. That
                    // is soon enough.
                    held.settled();
                    return sent.map(drop);
                };
                let (claims, firing) = (self.clone(), self.ledger.firing(again, standing).await?);
                self.ledger.engine.node.runtime.spawn(async move {
                    let entity = firing.standing.id.clone();
                    match claims.run(held, firing, session, action).await {
                        Ok(fired) => tracing::info!(%entity, ?fired, "the action of a claim ran again"),
                        Err(error) => tracing::warn!(%entity, %error, "the action of a claim ran again and failed"),
                    }
                });
                Ok(())
            }
            Action::Durable(workflow) => self.retry_as_execution(&standing, (claim, rev), again, &workflow, why).await,
        }
    }
}
