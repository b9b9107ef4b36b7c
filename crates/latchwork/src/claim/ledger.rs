//! The commits of claims: claiming an entity, the transition, the release, and what goes with each. Everything here is
//! decided by the store; nothing is remembered.
//!
//! The fence of a claim is the rev of its entity. The commit that claims moves the rev to the claim's token, and every
//! end of the claim, and every other write of the entity, moves it on: a commit that checks the token lands only while
//! the claim holds. So each of these commits can be sent again when its answer was lost; it lands once.

use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::claim::error::{ClaimError, Result};
use crate::claim::finish::Firing;
use crate::claim::outbox::Outbox;
use crate::claim::stored::{Claim, Logged, LoggedKind, Phase, Spaces};
use crate::entity::{
    Add, Effect as OpEffect, Entities, EntityError, EntityId, Meta, OpReceipt, Revised, Standing, Transaction,
};
use crate::lane::{Part, Tag};
use crate::lock::Owner;
use crate::node::alarm::Alarms;
use crate::record::Record;
use crate::state::States;
use crate::store::{Check, Commit, Outcome, Rev, Store, Timestamp, View};
use crate::workflow::engine;
use crate::workflow::run::RECORD;

/// The session that is to hold the claim is there.
const SESSION: Tag = Tag("session");
/// There is no other claim.
const CLAIM: Tag = Tag("claim");

/// How often a commit is tried that others outran.
pub(crate) const TRIES: u32 = 1000;

/// How long to wait after the store did not serve.
pub(crate) const AGAIN: Duration = Duration::from_millis(50);

pub(crate) struct Ledger {
    pub(crate) store: Store,
    pub(crate) entities: Entities,
    pub(crate) states: States,
    pub(crate) spaces: Spaces,
    pub(crate) engine: Arc<engine::Inner>,
    /// Told of after-effects that have landed, if they are delivered here.
    pub(crate) outbox: Weak<Outbox>,
    /// Told of timers that have landed, if they are rung here.
    pub(crate) timers: Weak<Alarms>,
}

/// What became of a commit on an entity.
pub(crate) enum Sent {
    Landed(Standing),
    /// The entity was changed.
    Moved,
    /// The session is no more.
    SessionLost,
    /// There is a claim.
    Claimed,
    /// An execution that is to be started has an id that is taken.
    StartTaken,
}

impl Claim {
    /// Who changes the entity, and why, for the entity's history.
    pub(crate) fn meta(&self) -> Meta {
        let Claim { terms, actor, requester, .. } = self;
        let author = Some(actor.clone().unwrap_or_else(|| requester.clone()));
        Meta { author, reason: Some(format!("step {} of {}", terms.step(), terms.workflow)) }
    }
}

impl Ledger {
    pub(crate) async fn view(&self) -> Result<View> {
        Ok(self.store.view().await?)
    }

    /// The claim on an entity, and the rev of its record.
    pub(crate) async fn claim_on(&self, view: &View, entity: &EntityId) -> Result<Option<(Claim, Rev)>> {
        let Some(item) = view.get(&self.spaces.claim(entity)).await? else { return Ok(None) };
        let claim = Claim::decode(&item.value).map_err(|why| why.at(format!("the claim on entity {entity:?}")))?;
        Ok(Some((claim, item.rev)))
    }

    /// A commit had no answer: the executions and the timers that it has set, if it has landed, are looked for.
    pub(crate) fn unanswered(&self) {
        self.engine.node.doubt();
        self.timers.upgrade().iter().for_each(|timers| timers.look_again());
    }

    /// A claim that is still the same, with the rev of its record, and its entity, as of one moment. The entity is
    /// given only if it is at the claiming status.
    pub(crate) async fn still(&self, entity: &EntityId, claim: &Claim) -> Result<Option<(Rev, Option<Standing>)>> {
        let view = self.view().await?;
        let Some((found, rev)) = self.claim_on(&view, entity).await? else { return Ok(None) };
        if found != *claim {
            return Ok(None);
        }
        let claiming = claim.terms.claim_into.as_deref();
        let standing = self.entities.standing(&view, entity).await?;
        Ok(Some((rev, standing.filter(|standing| claim.terms.status(standing.data()) == claiming))))
    }

    /// Sends a change of an entity with a part of this layer's.
    pub(crate) async fn send(&self, revised: Revised, part: Part) -> Result<Sent> {
        let Revised { commit, understood, after } = revised;
        let (commit, placed, rest) = part.place_whole(commit);
        match self.store.commit(commit).await.inspect_err(|_| self.unanswered())? {
            Outcome::Applied(receipt) => {
                rest.land(placed.landing(&receipt));
                Ok(Sent::Landed(after))
            }
            Outcome::Refused(refusal) => {
                let sent = match () {
                    () if placed.has_failed(&refusal, SESSION) => Sent::SessionLost,
                    () if placed.has_failed(&refusal, CLAIM) => Sent::Claimed,
                    () if placed.has_failed(&refusal, RECORD) => Sent::StartTaken,
                    () => Sent::Moved,
                };
                rest.refuse(&placed, &refusal);
                // What is known of the entity's type is refreshed by this.
                match Box::pin(self.entities.explain_change(refusal, &understood)).await? {
                    Some(error) => Err(error.into()),
                    None => Ok(sent),
                }
            }
        }
    }

    /// Claims an entity. With `replaces`, the claim takes the place of one whose record is at that rev.
    pub(crate) async fn claim(
        &self,
        standing: &Standing,
        claim: &Claim,
        replaces: Option<Rev>,
        part: Part,
    ) -> Result<Sent> {
        let (terms, key) = (&claim.terms, self.spaces.claim(&standing.id));
        let claiming = terms.claim_into.as_ref().unwrap_or(&terms.from);
        let data = terms.with_status(standing.data(), claiming);
        let revised = self.entities.revise(standing, data, &claim.meta()).await?;
        let part = match replaces {
            Some(rev) => part.at_rev(CLAIM, &key, rev),
            None => part.absent(CLAIM, &key),
        };
        let part = match &claim.owner {
            Owner::Session(id) if claim.phase == Phase::Held => {
                part.check(SESSION, Check::Present(self.engine.locks.spaces.session(*id)))
            }
            _ => part,
        };
        self.send(revised, part.put(&key, claim.encode())).await
    }

    /// Adds an entity with a part of this layer's.
    pub(crate) async fn add(&self, add: Add, part: Part) -> Result<OpReceipt> {
        let checked = self.entities.checked(Transaction::new().add(add))?;
        let mut part = Some(part);
        for _ in 0..TRIES {
            let prepared = self.entities.prepare(&self.view().await?, &checked).await?;
            let (is_doomed, adds) = (prepared.doomed, prepared.ops.iter().any(|op| op.effect == OpEffect::Added));
            let (commit, understood) = prepared.split();
            // An entity that is there already, and may be, is left as it is.
            let (commit, placed) = match part.as_ref().filter(|_| !is_doomed && adds) {
                Some(part) => {
                    let (commit, placed) = part.place(commit);
                    (commit, Some(placed))
                }
                None => (commit, None),
            };
            match self.store.commit(commit).await.inspect_err(|_| self.unanswered())? {
                Outcome::Applied(_) if is_doomed => {}
                Outcome::Applied(receipt) => {
                    if let (Some(placed), Some(part)) = (placed, part.take()) {
                        part.land(placed.landing(&receipt));
                    }
                    let done = understood.answer(receipt).ops.pop();
                    return done.ok_or(ClaimError::Stopped);
                }
                Outcome::Refused(refusal) => {
                    if let Err(EntityError::Rejected { mut failed }) = self.entities.outrun(refusal, &understood).await
                    {
                        return Err(failed.remove(0).error.into());
                    }
                }
            }
        }
        Err(EntityError::Contended { tries: TRIES }.into())
    }

    /// The end of a claim's record, if there is one.
    pub(crate) fn ends(&self, claim: &Claim, entity: &EntityId) -> Part {
        match claim.terms.claim_into {
            Some(_) => Part::default().delete(&self.spaces.claim(entity)),
            None => Part::default(),
        }
    }

    /// Ends a claim and takes its entity back to the status it came from, unless somebody else has moved it from the
    /// claiming status. Gives whether the claim was still there.
    pub(crate) async fn release(&self, entity: &EntityId, claim: &Claim, why: &Why) -> Result<bool> {
        for _ in 0..TRIES {
            let view = self.view().await?;
            let Some((found, rev)) = self.claim_on(&view, entity).await? else { return Ok(false) };
            if (found.id, found.token) != (claim.id, claim.token) {
                return Ok(false);
            }
            let standing = self.entities.standing(&view, entity).await?;
            drop(view);
            if self.end(entity, &found, rev, standing, why).await? {
                return Ok(true);
            }
        }
        Err(ClaimError::Contended { id: entity.clone(), tries: TRIES })
    }

    /// One try of [`Ledger::release`].
    async fn end(
        &self,
        entity: &EntityId,
        claim: &Claim,
        rev: Rev,
        standing: Option<Standing>,
        why: &Why,
    ) -> Result<bool> {
        let terms = &claim.terms;
        let part = self.dropping(entity, rev);
        let claiming = terms.claim_into.as_deref();
        let rev_found = standing.as_ref().map(|standing| standing.rev);
        let claimed = standing.filter(|standing| terms.status(standing.data()) == claiming);
        let Some(standing) = claimed else {
            // An operator has moved it on, or has removed it: there is nothing left but the record of the claim.
            let part = part.check(CLAIM, self.entities.as_found(entity, rev_found));
            let (commit, ..) = part.place_whole(Commit::new());
            return Ok(self.store.commit(commit).await?.is_applied());
        };
        self.send_revert(claim, &standing, part, why).await
    }

    /// Releases the claim of a firing whose action has ended without success. While the store does not serve, it is
    /// tried for a lease at the most; what is left then is the janitor's.
    pub(crate) async fn give_up(&self, firing: &Firing, why: &Why) -> Result<bool> {
        let env = self.store.env();
        let until = env.monotonic() + firing.claim.terms.lease();
        let Firing { claim, standing, .. } = firing;
        loop {
            let released = match self.revert(firing, why).await {
                Ok(true) => return Ok(true),
                Ok(false) => self.release(&standing.id, claim, why).await,
                Err(error) => Err(error),
            };
            match released {
                Err(error) if error.is_passing() && env.monotonic() < until => env.sleep(AGAIN).await,
                released => return released,
            }
        }
    }

    /// Reverts an entity that stands as the claim has left it, without reading it.
    async fn revert(&self, firing: &Firing, why: &Why) -> Result<bool> {
        let Firing { claim, standing, .. } = firing;
        self.send_revert(claim, standing, self.ends(claim, &standing.id), why).await
    }

    /// Takes an entity back to the status that its claim came from.
    async fn send_revert(&self, claim: &Claim, standing: &Standing, part: Part, why: &Why) -> Result<bool> {
        let terms = &claim.terms;
        let meta = Meta { author: why.actor.clone(), reason: Some(why.reason.clone()) };
        let data = terms.with_status(standing.data(), &terms.from);
        let revised = self.entities.revise(standing, data, &meta).await?;
        let part = part.and(self.log_release(claim, standing, why));
        Ok(matches!(self.send(revised, part).await?, Sent::Landed(_)))
    }

    fn log_release(&self, claim: &Claim, standing: &Standing, why: &Why) -> Part {
        let logged = log(claim, LoggedKind::Released, self.store.env().now(), why.reason.clone());
        let logged = Logged { to: claim.terms.from.clone(), actor: why.actor.clone(), ..logged };
        Part::default().put(&self.spaces.logged(&standing.id, standing.rev.next()), logged.encode())
    }

    /// The end of the record of a claim that is at a rev.
    pub(crate) fn dropping(&self, entity: &EntityId, rev: Rev) -> Part {
        let key = self.spaces.claim(entity);
        Part::default().at_rev(CLAIM, &key, rev).delete(&key)
    }

    /// What goes with the release of a claim whose record is at a rev.
    pub(crate) fn releasing(&self, claim: &Claim, standing: &Standing, rev: Rev, why: &Why) -> Part {
        self.dropping(&standing.id, rev).and(self.log_release(claim, standing, why))
    }

    /// Puts a claim in the place of one whose record is at a rev, on the same claiming status. The entity gets another
    /// rev with it, so the owner before is fenced.
    pub(crate) async fn take_over(
        &self,
        standing: &Standing,
        before: (&Claim, Rev),
        claim: &Claim,
        kind: LoggedKind,
        why: &Why,
        part: Part,
    ) -> Result<Sent> {
        let status = claim.terms.claim_into.clone().unwrap_or_default();
        let logged = log(before.0, kind, self.store.env().now(), why.reason.clone());
        let logged = Logged { from: status.clone(), to: status, actor: why.actor.clone(), ..logged };
        let part = part.put(&self.spaces.logged(&standing.id, standing.rev.next()), logged.encode());
        self.claim(standing, claim, Some(before.1), part).await
    }
}

/// Why a claim ends, and who has ended it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Why {
    pub(crate) reason: String,
    pub(crate) actor: Option<String>,
}

impl Why {
    pub(crate) fn new(reason: impl Into<String>) -> Why {
        Why { reason: reason.into(), actor: None }
    }

    pub(crate) fn by(actor: &str, reason: &str) -> Why {
        Why { reason: reason.into(), actor: Some(actor.into()) }
    }
}

/// An entry of the log about a claim, without the status it leads to.
pub(crate) fn log(claim: &Claim, kind: LoggedKind, now: Timestamp, reason: String) -> Logged {
    let terms = &claim.terms;
    let from = match kind {
        LoggedKind::Done => Some(&terms.from),
        _ => terms.claim_into.as_ref(),
    };
    let from = from.cloned().unwrap_or_default();
    Logged {
        workflow: terms.workflow.clone(),
        step_id: terms.step_id,
        step_key: terms.step_key.clone(),
        from,
        to: String::new(),
        requester: claim.requester.clone(),
        actor: claim.actor.clone(),
        reason,
        kind,
        claim: claim.id,
        since_us: claim.since_us,
        at_us: now.0,
    }
}
