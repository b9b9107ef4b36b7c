//! The commits of claims: the claim, the transition, the release, and what goes with each. The store decides everything
//! here; the ledger remembers nothing.
//!
//! The fence of a claim is the rev of its entity. The commit that claims moves the rev to the claim's token. Every end
//! of the claim, and every other write of the entity, moves the rev again. So a commit that checks the token lands only
//! while the claim holds. Each of these commits can be sent again if its answer was lost: it lands once.

use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::future::try_join;
use serde::Serialize;
use serde_json::Value;

use crate::claim::error::{ClaimError, Result};
use crate::claim::finish::Firing;
use crate::claim::outbox::EffectOutbox;
use crate::claim::rows::{self, RowChange, Rows, SqlWork};
use crate::claim::stored::{Claim, ClaimPhase, ClaimSpaces, Logged, LoggedKind};
use crate::claim::table::ROWS;
use crate::entity::{
    Add, Effect as OpEffect, Entities, EntityError, EntityId, Meta, OpReceipt, Revised, Standing, Transaction,
};
use crate::lane::{ONCE, OnceCall, Part, Tag};
use crate::lock::Owner;
use crate::node::alarm::Alarms;
use crate::record::Record;
use crate::state::States;
use crate::store::{Check, Commit, Outcome, Rev, Store, Timestamp, View};
use crate::workflow::engine;
use crate::workflow::run::RECORD;

/// Tag of the check that the session that will hold the claim exists.
const SESSION: Tag = Tag("session");
/// Tag of the check that there is no other claim, or that the claim's record is still at the known rev.
const CLAIM: Tag = Tag("claim");

/// The maximum number of attempts to commit if other commits are faster.
pub(crate) const TRIES: u32 = 1000;

/// The pause before a retry, if the store was unavailable.
pub(crate) const AGAIN: Duration = Duration::from_millis(50);

pub(crate) struct Ledger {
    pub(crate) store: Store,
    pub(crate) entities: Entities,
    pub(crate) states: States,
    pub(crate) spaces: ClaimSpaces,
    pub(crate) engine: Arc<engine::EngineInner>,
    /// Delivers after-effects, if they are delivered in this process. It is notified when they have landed.
    pub(crate) outbox: Weak<EffectOutbox>,
    /// Rings timers, if they are rung in this process. It is notified when they have landed.
    pub(crate) timers: Weak<Alarms>,
    /// The user's own tables, if there are claim workflows on any.
    pub(crate) rows: Option<Arc<Rows>>,
}

/// A change of the status of an entity or a row that is about to be sent.
pub(crate) enum LedgerChange {
    Entity(Box<Revised>),
    Row(RowChange, Standing, Meta),
}

/// The result of a commit on an entity.
pub(crate) enum LedgerOutcome {
    Landed(Standing),
    /// The entity was changed.
    Moved,
    /// The session does not exist any more.
    SessionLost,
    /// The entity has a claim.
    Claimed,
    /// The id of an execution to start is taken.
    StartTaken,
    /// The change was made before under the same idempotency key, or its caller has lost its right.
    NotOnce,
}

impl Claim {
    /// The author and the reason of a change, for the entity's history.
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

    /// A commit had no answer. If it has landed, the executions and timers that it has set must be looked for in the
    /// store.
    pub(crate) fn unanswered(&self) {
        self.engine.node.doubt();
        self.timers.upgrade().iter().for_each(|timers| timers.look_again());
    }

    /// If the entity still has this same claim, returns the rev of the claim's record and the entity, both from one
    /// view. The entity is `None` if it is not at the claiming status.
    pub(crate) async fn still(&self, entity: &EntityId, claim: &Claim) -> Result<Option<(Rev, Option<Standing>)>> {
        let view = self.view().await?;
        let Some((found, rev)) = self.claim_on(&view, entity).await? else { return Ok(None) };
        if found != *claim {
            return Ok(None);
        }
        let claiming = claim.terms.claim_into.as_deref();
        let standing = self.standing(&view, entity).await?;
        Ok(Some((rev, standing.filter(|standing| claim.terms.status(standing.data()) == claiming))))
    }

    /// A new view, and the entity or the row of this id. The row is read at the same time as the view is opened.
    pub(crate) async fn find(&self, id: &EntityId) -> Result<(View, Option<Standing>)> {
        if let Some(rows) = self.row_of(id)? {
            return try_join(self.view(), rows.standing(id)).await;
        }
        let view = self.view().await?;
        let standing = self.entities.standing(&view, id).await?;
        Ok((view, standing))
    }

    /// The entity or the row of this id.
    pub(crate) async fn standing(&self, view: &View, id: &EntityId) -> Result<Option<Standing>> {
        match self.row_of(id)? {
            Some(rows) => rows.standing(id).await,
            None => Ok(self.entities.standing(view, id).await?),
        }
    }

    /// The tables, if this is the id of a row.
    pub(crate) fn row_of(&self, id: &EntityId) -> Result<Option<&Arc<Rows>>> {
        if !id.starts_with(ROWS) {
            return Ok(None);
        }
        let rows = self.rows.as_ref().filter(|rows| rows.is_row(id));
        let reason = "no claim workflow of this program is on its table; use the program that configures it";
        rows.map(Some).ok_or_else(|| ClaimError::Row { id: id.clone(), reason: reason.into() })
    }

    /// The change of an entity's data, or of the status of a row.
    pub(crate) async fn revise(&self, standing: &Standing, data: Value, meta: &Meta) -> Result<LedgerChange> {
        Ok(match self.row_of(&standing.id)? {
            Some(rows) => {
                let (row, after) = rows.revise(standing, data)?;
                LedgerChange::Row(row, after, meta.clone())
            }
            None => LedgerChange::Entity(Box::new(self.entities.revise(standing, data, meta).await?)),
        })
    }

    /// Commits, in one transaction with a change of a row and the SQL of an action if there are any. Returns `None` if
    /// the row is not as expected.
    pub(crate) async fn commit(
        &self,
        commit: Commit,
        row: Option<&RowChange>,
        (sql, action): (&[SqlWork], &str),
    ) -> Result<Option<Outcome>> {
        let committed = match row.is_none() && sql.is_empty() {
            true => self.store.commit(commit).await.map(Some).map_err(ClaimError::from),
            false => Box::pin(rows::commit(&self.store, &commit, row, sql, action)).await,
        };
        committed.inspect_err(|_| self.unanswered())
    }

    /// Sends a change of an entity together with a part of this layer.
    pub(crate) async fn send(&self, change: LedgerChange, part: Part) -> Result<LedgerOutcome> {
        self.send_with(change, part, (&[], "")).await
    }

    /// The same, with the SQL of an action, and the name of the action.
    pub(crate) async fn send_with(
        &self,
        change: LedgerChange,
        part: Part,
        sql: (&[SqlWork], &str),
    ) -> Result<LedgerOutcome> {
        let (commit, understood, after, row) = match change {
            LedgerChange::Entity(revised) => (revised.commit, Some(revised.understood), revised.after, None),
            LedgerChange::Row(row, after, meta) => (Commit::new().meta(meta.encode()), None, after, Some(row)),
        };
        let (commit, placed, rest) = part.place_whole(commit);
        let Some(outcome) = self.commit(commit, row.as_ref(), sql).await? else { return Ok(LedgerOutcome::Moved) };
        match outcome {
            Outcome::Applied(receipt) => {
                rest.land(placed.landing(&receipt));
                Ok(LedgerOutcome::Landed(after))
            }
            Outcome::Refused(refusal) => {
                let sent = match () {
                    () if placed.has_failed(&refusal, ONCE) => LedgerOutcome::NotOnce,
                    () if placed.has_failed(&refusal, SESSION) => LedgerOutcome::SessionLost,
                    () if placed.has_failed(&refusal, CLAIM) => LedgerOutcome::Claimed,
                    () if placed.has_failed(&refusal, RECORD) => LedgerOutcome::StartTaken,
                    () => LedgerOutcome::Moved,
                };
                rest.refuse(&placed, &refusal);
                let Some(understood) = understood else { return Ok(sent) };
                // This also refreshes what is known of the entity's type.
                match Box::pin(self.entities.explain_change(refusal, &understood)).await? {
                    Some(error) => Err(error.into()),
                    None => Ok(sent),
                }
            }
        }
    }

    /// Claims an entity. With `replaces`, the claim replaces another claim whose record is at that rev.
    pub(crate) async fn claim(
        &self,
        standing: &Standing,
        claim: &Claim,
        replaces: Option<Rev>,
        part: Part,
    ) -> Result<LedgerOutcome> {
        let (terms, key) = (&claim.terms, self.spaces.claim(&standing.id));
        let claiming = terms.claim_into.as_ref().unwrap_or(&terms.from);
        let data = terms.with_status(standing.data(), claiming);
        let revised = self.revise(standing, data, &claim.meta()).await?;
        let part = match replaces {
            Some(rev) => part.at_rev(CLAIM, &key, rev),
            None => part.absent(CLAIM, &key),
        };
        let part = match &claim.owner {
            Owner::Session(id) if claim.phase == ClaimPhase::Held => {
                part.check(SESSION, Check::Present(self.engine.locks.spaces.session(*id)))
            }
            _ => part,
        };
        self.send(revised, part.put(&key, claim.encode())).await
    }

    /// Adds an entity together with a part of this layer.
    pub(crate) async fn add(&self, add: Add, part: Part) -> Result<OpReceipt> {
        let checked = self.entities.checked(Transaction::new().add(add))?;
        let mut part = Some(part);
        for _ in 0..TRIES {
            let prepared = self.entities.prepare(&self.view().await?, &checked).await?;
            let (is_doomed, adds) = (prepared.doomed, prepared.ops.iter().any(|op| op.effect == OpEffect::Added));
            let (commit, understood) = prepared.split();
            // If the entity exists already and the call allows that, it stays as it is.
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

    /// Returns the part that deletes a claim's record, if the claim is stored.
    pub(crate) fn ends(&self, claim: &Claim, entity: &EntityId) -> Part {
        match claim.terms.claim_into {
            Some(_) => Part::default().delete(&self.spaces.claim(entity)),
            None => Part::default(),
        }
    }

    /// Ends a claim and returns its entity to the status it came from. If another caller has moved the entity from the
    /// claiming status, its status stays. Returns false if the claim had already ended.
    pub(crate) async fn release(&self, entity: &EntityId, claim: &Claim, why: &EndReason) -> Result<bool> {
        for _ in 0..TRIES {
            let view = self.view().await?;
            let Some((found, rev)) = self.claim_on(&view, entity).await? else { return Ok(false) };
            if (found.id, found.token) != (claim.id, claim.token) {
                return Ok(false);
            }
            let standing = self.standing(&view, entity).await?;
            drop(view);
            if self.end(entity, &found, rev, standing, why).await? {
                return Ok(true);
            }
        }
        Err(ClaimError::Contended { id: entity.clone(), tries: TRIES })
    }

    /// One attempt of [`Ledger::release`].
    async fn end(
        &self,
        entity: &EntityId,
        claim: &Claim,
        rev: Rev,
        standing: Option<Standing>,
        why: &EndReason,
    ) -> Result<bool> {
        let terms = &claim.terms;
        let part = self.dropping(entity, rev);
        let claiming = terms.claim_into.as_deref();
        let rev_found = standing.as_ref().map(|standing| standing.rev);
        let claimed = standing.filter(|standing| terms.status(standing.data()) == claiming);
        let Some(standing) = claimed else {
            // An operator has moved or removed the entity: only the record of the claim is left.
            let (row, part) = match self.row_of(entity)? {
                Some(rows) => (Some(rows.unchanged(entity, rev_found)?), part),
                None => (None, part.check(CLAIM, self.entities.as_found(entity, rev_found))),
            };
            let (commit, ..) = part.and(why.kept()).place_whole(Commit::new());
            let committed = self.commit(commit, row.as_ref(), (&[], "")).await?;
            return Ok(committed.is_some_and(|outcome| outcome.is_applied()));
        };
        self.send_revert(claim, &standing, part, why).await
    }

    /// Releases the claim of a firing whose action has ended without success. While the store is unavailable, it
    /// retries for at most one lease. After that the janitor releases the claim.
    pub(crate) async fn give_up(&self, firing: &Firing, why: &EndReason) -> Result<bool> {
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

    /// Reverts an entity without reading it first. Returns false if it has changed since the claim.
    async fn revert(&self, firing: &Firing, why: &EndReason) -> Result<bool> {
        let Firing { claim, standing, .. } = firing;
        self.send_revert(claim, standing, self.ends(claim, &standing.id), why).await
    }

    /// Returns an entity to the status that its claim came from.
    async fn send_revert(&self, claim: &Claim, standing: &Standing, part: Part, why: &EndReason) -> Result<bool> {
        let terms = &claim.terms;
        let meta = Meta { author: why.actor.clone(), reason: Some(why.reason.clone()) };
        let data = terms.with_status(standing.data(), &terms.from);
        let revised = self.revise(standing, data, &meta).await?;
        let part = part.and(self.log_release(claim, standing, why));
        match self.send(revised, part).await? {
            LedgerOutcome::Landed(_) => Ok(true),
            LedgerOutcome::NotOnce => Err(ClaimError::Contended { id: standing.id.clone(), tries: 1 }),
            _ => Ok(false),
        }
    }

    fn log_release(&self, claim: &Claim, standing: &Standing, why: &EndReason) -> Part {
        let logged = log(claim, LoggedKind::Released, self.store.env().now(), why.reason.clone());
        let logged = Logged { to: claim.terms.from.clone(), actor: why.actor.clone(), ..logged };
        let part = Part::default().put(&self.spaces.logged(&standing.id, standing.rev.next()), logged.encode());
        part.and(why.kept())
    }

    /// What keeps the answer of a firing, if its claim has an idempotency key.
    pub(crate) async fn once_of(&self, claim: &Claim) -> Result<OnceCall> {
        Ok(match &claim.once {
            Some(once) => self.engine.once.begun(&self.store, &once.key, once.fingerprint).await?,
            None => OnceCall::default(),
        })
    }

    /// Returns the part that deletes the record of a claim, if it is still at this rev.
    pub(crate) fn dropping(&self, entity: &EntityId, rev: Rev) -> Part {
        let key = self.spaces.claim(entity);
        Part::default().at_rev(CLAIM, &key, rev).delete(&key)
    }

    /// Returns the part that goes with the release of a claim whose record is at this rev.
    pub(crate) fn releasing(&self, claim: &Claim, standing: &Standing, rev: Rev, why: &EndReason) -> Part {
        self.dropping(&standing.id, rev).and(self.log_release(claim, standing, why))
    }

    /// Replaces a claim whose record is at a rev by another claim with the same claiming status. The commit moves the
    /// rev of the entity, so the previous owner is fenced.
    pub(crate) async fn take_over(
        &self,
        standing: &Standing,
        before: (&Claim, Rev),
        claim: &Claim,
        kind: LoggedKind,
        why: &EndReason,
        part: Part,
    ) -> Result<LedgerOutcome> {
        let status = claim.terms.claim_into.clone().unwrap_or_default();
        let logged = log(before.0, kind, self.store.env().now(), why.reason.clone());
        let logged = Logged { from: status.clone(), to: status, actor: why.actor.clone(), ..logged };
        let part = part.put(&self.spaces.logged(&standing.id, standing.rev.next()), logged.encode()).and(why.kept());
        self.claim(standing, claim, Some(before.1), part).await
    }
}

/// Why a claim ends, and the actor that has ended it.
#[derive(Debug, Clone, Default)]
pub(crate) struct EndReason {
    pub(crate) reason: String,
    pub(crate) actor: Option<String>,
    /// The answer that the commit keeps, if the end is asked for under an idempotency key.
    pub(crate) answer: (OnceCall, Value),
}

impl EndReason {
    pub(crate) fn new(reason: impl Into<String>) -> EndReason {
        EndReason { reason: reason.into(), ..EndReason::default() }
    }

    pub(crate) fn by(actor: &str, reason: &str) -> EndReason {
        EndReason { reason: reason.into(), actor: Some(actor.into()), ..EndReason::default() }
    }

    pub(crate) fn answered(self, call: &OnceCall, answer: &impl Serialize) -> EndReason {
        if !call.has_key() {
            return self;
        }
        let answer = serde_json::to_value(answer).unwrap_or_default();
        EndReason { answer: (call.clone(), answer), ..self }
    }

    fn kept(&self) -> Part {
        let (call, answer) = &self.answer;
        call.answered(answer)
    }
}

/// Returns a log entry about a claim. The caller sets the status that it leads to.
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
