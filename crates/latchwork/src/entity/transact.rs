//! A transaction becomes one commit. Every requirement of an operation is a check of that commit, even if it is known
//! to fail. So the store's refusal lists all failures, as of one generation.

use std::collections::BTreeMap;

use crate::entity::op::{CheckedAdd, CheckedUpdate, EntityOp, Fence, Meta, Remove, Require};
use crate::entity::prepare::{Meaning, Prepared, PreparedOp, RevOf};
use crate::entity::view::ReadSet;
use crate::entity::{Entities, EntityError, EntityId, FailedOp, OpReceipt, Receipt, Result, Transaction};
use crate::store::{Actual, Check, Commit, Env, FailedCheck, Generation, Outcome, Receipt as Committed, Refusal};

/// How often a transaction is tried when other writers were faster and none of its own checks failed. In each try,
/// another writer has made progress.
pub(crate) const TRIES: u32 = 1000;

/// A transaction whose parts are known to be valid. Ids are made once, however often it is tried.
pub(crate) struct CheckedTransaction {
    pub(crate) ops: Vec<CheckedOp>,
    pub(crate) at_generation: Option<Generation>,
    pub(crate) reads: Vec<ReadSet>,
    pub(crate) fences: Vec<(Option<usize>, Fence)>,
    pub(crate) meta: Meta,
}

pub(crate) enum CheckedOp {
    Add(EntityId, CheckedAdd),
    Update(CheckedUpdate),
    Remove(Remove),
    Require(Require),
}

impl CheckedOp {
    pub(crate) fn id(&self) -> &EntityId {
        match self {
            CheckedOp::Add(id, _) => id,
            CheckedOp::Update(update) => &update.id,
            CheckedOp::Remove(remove) => &remove.id,
            CheckedOp::Require(require) => &require.id,
        }
    }

    fn adds_if_absent(&self) -> bool {
        matches!(self, CheckedOp::Add(_, add) if add.if_absent)
    }
}

impl CheckedTransaction {
    pub(crate) fn new(transaction: Transaction, env: &Env) -> Result<CheckedTransaction> {
        let Transaction { ops, at_generation, reads, fences, meta } = transaction;
        let mut written: BTreeMap<EntityId, usize> = BTreeMap::new();
        let mut checked = Vec::with_capacity(ops.len());
        for (index, op) in ops.into_iter().enumerate() {
            let op = match op {
                EntityOp::Add(add) => {
                    let add = add.checked(index)?;
                    CheckedOp::Add(add.id.clone().unwrap_or_else(|| env.uuid().into()), add)
                }
                EntityOp::Update(update) => CheckedOp::Update(update.checked()?),
                EntityOp::Remove(remove) => {
                    remove.id.validate()?;
                    CheckedOp::Remove(remove)
                }
                EntityOp::Require(require) => {
                    require.id.validate()?;
                    CheckedOp::Require(require)
                }
            };
            if !matches!(op, CheckedOp::Require(_)) {
                match written.get(op.id()) {
                    // After an add of the same id, an `if_absent` add writes nothing.
                    Some(&first) if op.adds_if_absent() && matches!(checked[first], CheckedOp::Add(..)) => {}
                    Some(&first) => {
                        return Err(EntityError::WrittenTwice { id: op.id().clone(), first, second: index });
                    }
                    None => drop(written.insert(op.id().clone(), index)),
                }
            }
            checked.push(op);
        }
        Ok(CheckedTransaction { ops: checked, at_generation, reads, fences, meta })
    }
}

impl Entities {
    /// Sends a transaction until it has landed, or until a check that its caller asked for has failed.
    pub(crate) async fn send(&self, transaction: CheckedTransaction) -> Result<Receipt> {
        for _ in 0..TRIES {
            let view = self.store().view().await?;
            let prepared = self.prepare(&view, &transaction).await?;
            drop(view);
            let Prepared { commit, meanings, ops, doomed } = prepared;
            match self.store().commit(commit).await? {
                // The reason for the expected failure is gone meanwhile.
                Outcome::Applied(_) if doomed => {}
                Outcome::Applied(receipt) => return Ok(answer(ops, receipt)),
                Outcome::Refused(refusal) => {
                    let failed = self.failures(refusal, &meanings, &ops).await?;
                    if !failed.is_empty() {
                        return Err(EntityError::Rejected { failed });
                    }
                }
            }
        }
        Err(EntityError::Contended { tries: TRIES })
    }

    /// The failures that a refusal means to the caller. Empty if a check failed that the caller did not ask for: then
    /// the transaction is tried again. Checks after those of the transaction belong to another layer.
    async fn failures(&self, refusal: Refusal, meanings: &[Meaning], ops: &[PreparedOp]) -> Result<Vec<FailedOp>> {
        let mut failed = Vec::with_capacity(refusal.failed.len());
        for check in refusal.failed {
            let Some(meaning) = meanings.get(check.index) else { continue };
            match self.failure(&check, meaning, ops).await? {
                Some(failure) => failed.push(failure),
                None => return Ok(Vec::new()),
            }
        }
        failed.sort_by_key(|failed| failed.op);
        Ok(failed)
    }

    async fn failure(&self, check: &FailedCheck, meaning: &Meaning, ops: &[PreparedOp]) -> Result<Option<FailedOp>> {
        let whole = |error: EntityError| Ok(Some(FailedOp { op: None, error }));
        let at = |op: usize, error: EntityError| Ok(Some(FailedOp { op: Some(op), error }));
        let id = |op: usize| ops[op].id.clone();
        match (meaning, &check.check, &check.actual) {
            (Meaning::Generation, Check::AtGeneration(expected), Actual::AtGeneration(actual)) => {
                whole(EntityError::GenerationConflict { expected: *expected, actual: *actual })
            }
            (Meaning::Read { what, at }, ..) => whole(EntityError::ReadChanged { what: what.clone(), read_at: *at }),
            (Meaning::Right { op, lost }, ..) => {
                Ok(Some(FailedOp { op: *op, error: EntityError::Fenced { reason: lost.clone() } }))
            }
            (Meaning::AtRev { op }, Check::AtRev(_, expected), Actual::AtRev(actual)) => {
                at(*op, EntityError::RevisionConflict { id: id(*op), expected: *expected, actual: *actual })
            }
            (Meaning::AtRev { op } | Meaning::Exists { op }, _, Actual::Absent) => {
                at(*op, EntityError::NotFound { id: id(*op) })
            }
            (Meaning::Absent { op }, _, Actual::AtRev(rev)) => {
                at(*op, EntityError::AlreadyExists { id: id(*op), rev: *rev })
            }
            (Meaning::UniqueWithin { op, fields, owner, freed }, Check::AtRev(key, _), _) => {
                // A stored owner is named before the one in this transaction, unless the transaction frees the value.
                let has = if *freed { None } else { self.store().get(key).await? };
                let owner = has.map_or(Ok(owner.clone()), |has| EntityId::from_stored(&has.value))?;
                at(*op, violation(&ops[*op], fields.clone(), owner))
            }
            (Meaning::Unique { op, fields }, Check::Absent(key), _) => {
                let owner = self.store().get(key).await?;
                let Some(owner) = owner else { return Ok(None) };
                let owner = EntityId::from_stored(&owner.value)?;
                // An entity does not violate its own value: another writer has written it meanwhile.
                if owner == ops[*op].id {
                    return Ok(None);
                }
                at(*op, violation(&ops[*op], fields.clone(), owner))
            }
            (Meaning::Declared(entity_type), ..) => {
                self.refresh(entity_type).await?;
                Ok(None)
            }
            _ => Ok(None),
        }
    }

    /// Returns if a transaction was refused because something that it has read has changed. Any other failed check is
    /// returned as the error. Checks after its own belong to another layer, and stand for something that was read.
    pub(crate) async fn outrun(&self, refusal: Refusal, prepared: &Understood) -> Result<()> {
        if refusal.failed.iter().any(|failed| failed.index >= prepared.meanings.len()) {
            return Ok(());
        }
        let failed = self.failures(refusal, &prepared.meanings, &prepared.ops).await?;
        let has_read = failed.iter().any(|failed| matches!(failed.error, EntityError::ReadChanged { .. }));
        if !has_read && !failed.is_empty() {
            return Err(EntityError::Rejected { failed });
        }
        Ok(())
    }

    /// Why a change was refused; `None` if another writer was faster.
    pub(crate) async fn explain_change(&self, refusal: Refusal, prepared: &Understood) -> Result<Option<EntityError>> {
        let failed = self.failures(refusal, &prepared.meanings, &prepared.ops).await?;
        Ok(failed.into_iter().next().map(|failed| failed.error))
    }
}

/// What is kept of a prepared commit while it is on its way.
#[derive(Default)]
pub(crate) struct Understood {
    meanings: Vec<Meaning>,
    ops: Vec<PreparedOp>,
}

impl Understood {
    /// The receipt of a commit that has landed.
    pub(crate) fn answer(self, committed: Committed) -> Receipt {
        answer(self.ops, committed)
    }

    /// True if only checks of declarations have failed.
    pub(crate) fn only_undeclared(&self, refusal: &Refusal) -> bool {
        refusal.failed.iter().all(|failed| matches!(self.meanings[failed.index], Meaning::Declared(_)))
    }
}

impl Prepared {
    pub(crate) fn split(self) -> (Commit, Understood) {
        (self.commit, Understood { meanings: self.meanings, ops: self.ops })
    }
}

fn violation(op: &PreparedOp, fields: String, owner: EntityId) -> EntityError {
    let entity_type = op.entity_type.as_deref().unwrap_or_default().to_string();
    EntityError::UniqueViolation { id: op.id.clone(), entity_type, fields, owner }
}

fn answer(ops: Vec<PreparedOp>, committed: Committed) -> Receipt {
    let mut receipts: Vec<OpReceipt> = Vec::with_capacity(ops.len());
    for PreparedOp { id, effect, rev, .. } in ops {
        let rev = match rev {
            RevOf::Known(rev) => rev,
            RevOf::Write(write) => committed.revs.get(write).copied().flatten().unwrap_or_default(),
            RevOf::Op(op) => receipts[op].rev,
        };
        receipts.push(OpReceipt { id, rev, effect });
    }
    Receipt { generation: committed.generation, time: committed.time, ops: receipts }
}
