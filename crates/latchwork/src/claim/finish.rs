//! Transitions: one commit holds the action's writes, the final status, the log entry, the after-effects and the end of
//! the claim.

use std::sync::Arc;

use serde_json::Value;

use crate::claim::action::StagedWrites;
use crate::claim::durable::DurableFired;
use crate::claim::error::{ClaimError, Result};
use crate::claim::ledger::{AGAIN, Ledger, LedgerOutcome, TRIES, log};
use crate::claim::outbox::Expected;
use crate::claim::stored::{Claim, EffectKey, EffectTerms, Logged, LoggedKind, OutboxEffect};
use crate::claim::timers;
use crate::entity::{CheckedTransaction, EntityError, Standing, Update};
use crate::lane::{ONCE, OnceCall, Part};
use crate::node::{NodeNotice, shard_of};
use crate::record::Record;
use crate::state;
use crate::store::{Outcome, Rev, Timestamp};
use crate::workflow::WorkflowError;
use crate::workflow::run::RECORD;

/// The result of one attempt to commit a transition.
#[derive(PartialEq, Eq)]
enum Tried {
    Landed,
    Refused,
    StartTaken,
    /// It was made before under the same idempotency key, or its caller has lost its right.
    NotOnce,
}

/// The result of a transition.
pub(crate) enum TransitionOutcome {
    Done(Rev),
    /// The entity was changed before the commit.
    Moved,
}

/// A firing whose action runs, or has run.
pub(crate) struct Firing {
    /// The claim. It is not stored if the step is not claimed.
    pub(crate) claim: Claim,
    pub(crate) standing: Standing,
    /// A reason for the log. Empty if there is none.
    pub(crate) reason: String,
    /// The idempotency keys under which the transition is asked for: that of the firing, and that of an operator who
    /// makes it. Only the firing's caller gets the output.
    pub(crate) once: OnceCall,
    pub(crate) by: OnceCall,
}

impl Ledger {
    /// A firing that holds its claim.
    pub(crate) async fn firing(&self, claim: Claim, standing: Standing) -> Result<Firing> {
        let (once, by) = (self.once_of(&claim).await?, OnceCall::default());
        Ok(Firing { claim, standing, reason: String::new(), once, by })
    }

    /// True if the transition of this firing has landed although its answer was lost.
    async fn has_landed(&self, firing: &Firing) -> Result<bool> {
        let key = self.spaces.logged(&firing.standing.id, Rev(firing.claim.token).next());
        let Some(item) = self.view().await?.get(&key).await? else { return Ok(false) };
        let logged = Logged::decode(&item.value).map_err(|why| why.at("the log of claims"))?;
        Ok(logged.claim == firing.claim.id && logged.kind == LoggedKind::Done)
    }

    /// Commits the transition: the action's writes, the final status, the after-effects and the end of the claim. While
    /// the store does not answer, the commit is sent again, but not longer than one lease.
    pub(crate) async fn finish(
        &self,
        firing: &Firing,
        staged: &StagedWrites,
        output: &Value,
    ) -> Result<TransitionOutcome> {
        staged.check()?;
        let is_row = self.row_of(&firing.standing.id)?.is_some();
        if is_row && staged.data.is_some() {
            let reason = "an action changes a row by ctx.sql, not by set_data or merge_data".into();
            return Err(ClaimError::Row { id: firing.standing.id.clone(), reason });
        }
        let env = self.store.env();
        let (until, now) = (env.monotonic() + firing.claim.terms.lease(), env.now());
        let expected = self.expect_effects(firing, output, now);
        let checked = match staged.is_alone() {
            true => None,
            false => {
                let update = Update::new(firing.standing.id.clone()).data(self.final_data(firing, staged));
                let update = update.if_rev(firing.standing.rev);
                let others = staged.others.clone();
                Some(self.entities.checked(if is_row { others } else { others.update(update) })?)
            }
        };
        let mut tries = 0;
        loop {
            tries += 1;
            let sent = match &checked {
                None => self.finish_alone(firing, staged, output, now).await,
                Some(checked) => Box::pin(self.finish_with_others(firing, staged, checked, output, now)).await,
            };
            let (is_taken, is_over) = match sent {
                Ok(Tried::Landed) => break,
                Ok(tried) => (tried == Tried::StartTaken, tried == Tried::NotOnce),
                Err(error) if error.is_passing() && env.monotonic() < until => {
                    env.sleep(AGAIN).await;
                    continue;
                }
                Err(error) => return Err(error),
            };
            let found = self.standing(&self.view().await?, &firing.standing.id).await?;
            if is_over || found.is_none_or(|found| found.rev != firing.standing.rev) {
                if !self.has_landed(firing).await? {
                    expected.into_iter().for_each(Expected::refused);
                    return Ok(TransitionOutcome::Moved);
                }
                self.unanswered();
                break;
            }
            if let Some(start) = staged.starts.first().filter(|_| is_taken) {
                return Err(WorkflowError::AlreadyStarted { id: start.id.clone() }.into());
            }
            if self.engine.is_stopped() {
                return Err(ClaimError::Stopped);
            }
            if tries == TRIES {
                return Err(ClaimError::Contended { id: firing.standing.id.clone(), tries });
            }
        }
        expected.into_iter().for_each(Expected::landed);
        Ok(TransitionOutcome::Done(firing.standing.rev.next()))
    }

    fn final_data(&self, firing: &Firing, staged: &StagedWrites) -> Value {
        let data = staged.data.as_ref().unwrap_or(firing.standing.data());
        firing.claim.terms.with_status(data, &firing.claim.terms.into)
    }

    async fn finish_alone(
        &self,
        firing: &Firing,
        staged: &StagedWrites,
        output: &Value,
        now: Timestamp,
    ) -> Result<Tried> {
        let part = self.finishing(firing, staged, output, now).await?;
        let data = self.final_data(firing, staged);
        let revised = self.revise(&firing.standing, data, &firing.claim.meta()).await?;
        Ok(match self.send_with(revised, part, staged.sql_of(&firing.claim)).await? {
            LedgerOutcome::Landed(_) => Tried::Landed,
            LedgerOutcome::StartTaken => Tried::StartTaken,
            LedgerOutcome::NotOnce => Tried::NotOnce,
            _ => Tried::Refused,
        })
    }

    async fn finish_with_others(
        &self,
        firing: &Firing,
        staged: &StagedWrites,
        checked: &CheckedTransaction,
        output: &Value,
        now: Timestamp,
    ) -> Result<Tried> {
        let view = Arc::new(self.view().await?);
        let prepared = self.entities.prepare(&view, checked).await?;
        let is_doomed = prepared.doomed;
        let (mut commit, understood) = prepared.split();
        let meta = firing.claim.meta();
        let mut placed = None;
        if !is_doomed {
            commit = commit.meta(meta.encode());
            let slots = Arc::new(state::StagedSlots::new(view, self.store.limits().value_bytes));
            for change in &staged.slots {
                change(slots.clone()).await?;
            }
            commit = slots.board(commit).await;
            let (place, rest);
            (commit, place, rest) = self.finishing(firing, staged, output, now).await?.place_whole(commit);
            placed = Some((place, rest));
        }
        let row = match self.row_of(&firing.standing.id)?.filter(|_| !is_doomed) {
            Some(rows) => Some(rows.revise(&firing.standing, self.final_data(firing, staged))?.0),
            None => None,
        };
        let sql = if is_doomed { (&[][..], "") } else { staged.sql_of(&firing.claim) };
        let Some(outcome) = self.commit(commit, row.as_ref(), sql).await? else { return Ok(Tried::Refused) };
        match outcome {
            Outcome::Applied(receipt) => {
                let Some((place, rest)) = placed else { return Ok(Tried::Refused) };
                rest.land(place.landing(&receipt));
                Ok(Tried::Landed)
            }
            Outcome::Refused(refusal) => {
                let mut tried = Tried::Refused;
                if let Some((place, rest)) = placed {
                    if place.has_failed(&refusal, ONCE) {
                        tried = Tried::NotOnce;
                    } else if place.has_failed(&refusal, RECORD) {
                        tried = Tried::StartTaken;
                    }
                    rest.refuse(&place, &refusal);
                }
                match self.entities.outrun(refusal, &understood).await {
                    Ok(()) => Ok(tried),
                    // If another caller has changed the action's own entity, the claim is lost.
                    Err(EntityError::Rejected { failed }) => {
                        let own = &firing.standing.id;
                        let is_own = |error: &EntityError| match error {
                            EntityError::RevisionConflict { id, .. } | EntityError::NotFound { id } => id == own,
                            _ => false,
                        };
                        match failed.iter().any(|failed| is_own(&failed.error)) {
                            true => Ok(Tried::Refused),
                            false => Err(EntityError::Rejected { failed }.into()),
                        }
                    }
                    Err(error) => Err(error.into()),
                }
            }
        }
    }

    /// Returns the part that goes with the final status: the end of the claim, the log entry, after-effects, timers and
    /// starts.
    pub(crate) async fn finishing(
        &self,
        firing: &Firing,
        staged: &StagedWrites,
        output: &Value,
        now: Timestamp,
    ) -> Result<Part> {
        let Firing { claim, standing, .. } = firing;
        let (terms, rev) = (&claim.terms, standing.rev.next());
        let mut part = self.ends(claim, &standing.id);
        let logged = Logged { to: terms.into.clone(), ..log(claim, LoggedKind::Done, now, firing.reason.clone()) };
        part = part.put(&self.spaces.logged(&standing.id, rev), logged.encode());
        if firing.once.has_key() {
            let (from, to) = (terms.from.clone(), terms.into.clone());
            part = part.and(firing.once.answered(&DurableFired::Done { from, to, rev: rev.0, output: output.clone() }));
        }
        part = part.and(firing.by.answered(&rev));
        let effects = self.effects(firing, output, now);
        let node = &self.engine.node;
        // Also if this node owns the shard: no check of this commit says that it still does.
        if !effects.is_empty() {
            part = node.noticed(part, || NodeNotice::Effects(shard_of(standing.id.as_bytes())));
        }
        for (key, effect) in effects {
            part = part.put(&self.spaces.effect(&key), effect.encode());
        }
        let mut starts = Vec::new();
        for (number, effect) in (0..).zip(&terms.effects) {
            let Some(workflow) = &effect.workflow else { continue };
            let key = EffectKey { entity: standing.id.clone(), rev, number };
            let told = self.effect(claim, &effect.name, output, now).told(&key);
            let input =
                serde_json::to_string(&told).map_err(|error| ClaimError::Corrupt { place: error.to_string() })?;
            starts.push((workflow.as_str(), input, key.execution(&effect.name)));
        }
        starts.extend(staged.starts.iter().map(|it| (it.workflow.as_str(), it.input.clone(), it.id.clone())));
        if !starts.is_empty() {
            part = part.and(self.engine.starting(&starts).await?);
        }
        Ok(timers::set(part, self, &terms.workflow, &terms.timers, (&standing.id, rev.0), now))
    }

    fn effect(&self, claim: &Claim, name: &str, output: &Value, now: Timestamp) -> OutboxEffect {
        let terms = &claim.terms;
        OutboxEffect {
            name: name.into(),
            workflow: terms.workflow.clone(),
            step_id: terms.step_id,
            step_key: terms.step_key.clone(),
            entity_type: terms.entity_type.clone(),
            from: terms.from.clone(),
            to: terms.into.clone(),
            requester: claim.requester.clone(),
            actor: claim.actor.clone(),
            input: claim.input.clone(),
            output: output.to_string(),
            at_us: now.0,
            attempts: 0,
            due_us: now.0,
            error: None,
        }
    }

    /// The after-effects of a transition that the outbox delivers, with their keys.
    fn effects(&self, firing: &Firing, output: &Value, now: Timestamp) -> Vec<(EffectKey, OutboxEffect)> {
        let (entity, rev) = (&firing.standing.id, firing.standing.rev.next());
        let numbered = (0..).zip(&firing.claim.terms.effects).filter(|(_, effect)| effect.workflow.is_none());
        let named = |(number, effect): (u16, &EffectTerms)| {
            let key = EffectKey { entity: entity.clone(), rev, number };
            (key, self.effect(&firing.claim, &effect.name, output, now))
        };
        numbered.map(named).collect()
    }

    /// Announces after-effects that are about to land. The outbox delivers those of one entity in the order of revs.
    pub(crate) fn expect_effects(&self, firing: &Firing, output: &Value, now: Timestamp) -> Option<Expected> {
        let effects = self.effects(firing, output, now);
        let outbox = self.outbox.upgrade().filter(|_| !effects.is_empty())?;
        Some(outbox.expect(effects))
    }
}
