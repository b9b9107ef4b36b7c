//! From operations to a commit: checks with what each of them means, and the writes of records and index entries.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::entity::declare::{Declaration, Declared};
use crate::entity::document::EntityRecord;
use crate::entity::index::{self, IndexEntry, IndexState, listed};
use crate::entity::op::{CheckedAdd, Fence, Required};
use crate::entity::transact::{CheckedOp, CheckedTransaction};
use crate::entity::{Effect, Entities, EntityError, EntityId, Result};
use crate::lane::as_found;
use crate::record::Record as _;
use crate::store::{Check, Commit, Generation, Item, Key, Rev, View};

/// A rev that no key ever has: a check for it fails and returns the actual rev.
const NO_REV: Rev = Rev(0);

/// The meaning of a check of the commit.
#[derive(Debug, Clone)]
pub(crate) enum Meaning {
    /// From the caller: the generation of the store.
    Generation,
    /// From the caller: a right still exists, for one operation or for all.
    Right { op: Option<usize>, lost: String },
    /// From the caller: something that was read has not changed.
    Read { what: String, at: Generation },
    /// From an operation: the entity is at this rev.
    AtRev { op: usize },
    /// From an operation: the entity exists.
    Exists { op: usize },
    /// From an operation: the entity does not exist.
    Absent { op: usize },
    /// From an operation: no other entity has this value.
    Unique { op: usize, fields: String },
    /// From an operation, and known to fail: the same transaction gives the value to another entity.
    UniqueWithin { op: usize, fields: String, owner: EntityId, freed: bool },
    /// What was read to prepare the commit is still true. The caller did not ask for this check: if it fails, the
    /// transaction is tried again.
    Fresh,
    /// The known declaration of a type is still valid.
    Declared(Arc<str>),
}

/// A prepared commit, with everything needed to understand its answer.
pub(crate) struct Prepared {
    pub(crate) commit: Commit,
    pub(crate) meanings: Vec<Meaning>,
    pub(crate) ops: Vec<PreparedOp>,
    /// True if a check is known to fail; then the commit has checks only.
    pub(crate) doomed: bool,
}

pub(crate) struct PreparedOp {
    pub(crate) id: EntityId,
    /// Shown in a unique violation.
    pub(crate) entity_type: Option<Arc<str>>,
    pub(crate) effect: Effect,
    pub(crate) rev: RevOf,
}

/// Where the rev of a receipt comes from.
#[derive(Clone, Copy)]
pub(crate) enum RevOf {
    /// Nothing is written.
    Known(Rev),
    /// A write of the commit, by its index.
    Write(usize),
    /// An earlier operation, by its index.
    Op(usize),
}

/// A change of one entity.
pub(crate) struct EntityChange {
    pub(crate) op: usize,
    pub(crate) id: EntityId,
    pub(crate) before: Option<EntityRecord>,
    pub(crate) after: Option<EntityRecord>,
}

/// The same, borrowed from a caller that still uses the records.
#[derive(Clone, Copy)]
pub(crate) struct Changing<'a> {
    pub(crate) op: usize,
    pub(crate) id: &'a EntityId,
    pub(crate) before: Option<&'a EntityRecord>,
    pub(crate) after: Option<&'a EntityRecord>,
}

impl EntityChange {
    fn lent(&self) -> Changing<'_> {
        Changing { op: self.op, id: &self.id, before: self.before.as_ref(), after: self.after.as_ref() }
    }
}

impl Changing<'_> {
    /// The record with the entity's type, which never changes.
    fn record(&self) -> Option<&EntityRecord> {
        self.after.or(self.before)
    }
}

/// Builds the commit: checks with their meanings, and writes.
struct Preparing<'a> {
    entities: &'a Entities,
    commit: Commit,
    meanings: Vec<Meaning>,
    doomed: bool,
    changes: Vec<EntityChange>,
}

impl Preparing<'_> {
    fn new(entities: &Entities, commit: Commit) -> Preparing<'_> {
        Preparing { entities, commit, meanings: Vec::new(), doomed: false, changes: Vec::new() }
    }

    fn check(&mut self, check: Check, meaning: Meaning) {
        self.commit = std::mem::take(&mut self.commit).check(check);
        self.meanings.push(meaning);
    }

    fn doomed(&mut self, key: &Key, meaning: Meaning) {
        self.check(Check::AtRev(key.clone(), NO_REV), meaning);
        self.doomed = true;
    }

    /// The check of an operation on an existing entity.
    fn existing(&mut self, op: usize, key: &Key, if_rev: Option<Rev>, found: Option<Rev>) -> bool {
        match (if_rev, found) {
            (_, None) => self.doomed(key, Meaning::Exists { op }),
            (Some(rev), Some(found)) => {
                self.check(Check::AtRev(key.clone(), rev), Meaning::AtRev { op });
                self.doomed |= rev != found;
                return rev == found;
            }
            (None, Some(found)) => {
                self.check(Check::AtRev(key.clone(), found), Meaning::Fresh);
                return true;
            }
        }
        false
    }
}

impl Entities {
    pub(crate) async fn prepare(&self, view: &View, transaction: &CheckedTransaction) -> Result<Prepared> {
        let mut preparing = Preparing::new(self, Commit::new().meta(transaction.meta.encode()));
        if let Some(generation) = transaction.at_generation {
            preparing.check(Check::AtGeneration(generation), Meaning::Generation);
        }
        for reads in &transaction.reads {
            for (check, what) in reads.checks(self) {
                preparing.check(check, Meaning::Read { what, at: reads.generation });
            }
        }
        for (op, Fence { lost, check }) in &transaction.fences {
            preparing.check(check.clone(), Meaning::Right { op: *op, lost: lost.clone() });
        }
        let mut ops = Vec::with_capacity(transaction.ops.len());
        let mut added: BTreeMap<&EntityId, usize> = BTreeMap::new();
        for (index, op) in transaction.ops.iter().enumerate() {
            let first = match op {
                CheckedOp::Add(id, _) => *added.entry(id).or_insert(index),
                _ => index,
            };
            ops.push(preparing.op(view, index, op, first).await?);
        }
        let changes = std::mem::take(&mut preparing.changes);
        preparing.finish(ops, &changes.iter().map(EntityChange::lent).collect::<Vec<_>>()).await
    }

    /// Prepares one change of one entity, which is at a known rev, as a commit of its own.
    pub(crate) async fn prepare_change(&self, change: EntityChange, rev: Rev) -> Result<Prepared> {
        self.prepare_changing(change.lent(), rev).await
    }

    /// The same for a caller that still uses the records.
    pub(crate) async fn prepare_changing(&self, change: Changing<'_>, rev: Rev) -> Result<Prepared> {
        let mut preparing = Preparing::new(self, Commit::new());
        let key = self.key(change.id);
        preparing.check(Check::AtRev(key, rev), Meaning::Fresh);
        let entity_type = change.after.map(|record| record.entity_type.clone());
        let op = PreparedOp { id: change.id.clone(), entity_type, effect: Effect::Updated, rev: RevOf::Write(0) };
        preparing.finish(vec![op], &[change]).await
    }
}

impl Preparing<'_> {
    /// Adds an operation's checks and notes its change.
    async fn op(&mut self, view: &View, index: usize, op: &CheckedOp, first: usize) -> Result<PreparedOp> {
        let (id, key) = (op.id().clone(), self.entities.key(op.id()));
        let item = view.get(&key).await?;
        let found = item.as_ref().map(|item| item.rev);
        let mut done =
            PreparedOp { id: id.clone(), entity_type: None, effect: Effect::Checked, rev: RevOf::Known(NO_REV) };
        // The record before the operation, if the operation needs it.
        let before = |item: Option<Item>| item.map(|item| EntityRecord::of(&id, &item.value)).transpose();
        match op {
            CheckedOp::Add(_, add) => {
                done.entity_type = Some(add.entity_type.clone());
                if first < index {
                    (done.effect, done.rev) = (Effect::Existing, RevOf::Op(first));
                } else {
                    self.add(index, &key, add, found, &mut done);
                }
            }
            CheckedOp::Update(update) => {
                done.effect = Effect::Updated;
                if self.existing(index, &key, update.if_rev, found)
                    && let Some(record) = before(item)?
                {
                    let mut after = record.clone();
                    update.apply(&mut after.data, &mut after.metadata, &mut after.subtype);
                    done.entity_type = Some(record.entity_type.clone());
                    self.changes.push(EntityChange {
                        op: index,
                        id: id.clone(),
                        before: Some(record),
                        after: Some(after),
                    });
                }
            }
            CheckedOp::Remove(remove) => {
                done.effect = Effect::Removed;
                if self.existing(index, &key, remove.if_rev, found)
                    && let Some(record) = before(item)?
                {
                    self.changes.push(EntityChange { op: index, id: id.clone(), before: Some(record), after: None });
                }
            }
            CheckedOp::Require(require) => {
                done.rev = RevOf::Known(found.unwrap_or(NO_REV));
                match require.what {
                    Required::Absent => self.check(Check::Absent(key), Meaning::Absent { op: index }),
                    Required::AtRev(rev) => drop(self.existing(index, &key, Some(rev), found)),
                    Required::Exists => drop(self.existing(index, &key, None, found)),
                }
            }
        }
        Ok(done)
    }

    fn add(&mut self, op: usize, key: &Key, add: &CheckedAdd, found: Option<Rev>, done: &mut PreparedOp) {
        match found {
            Some(rev) if add.if_absent => {
                self.check(Check::AtRev(key.clone(), rev), Meaning::Fresh);
                (done.effect, done.rev) = (Effect::Existing, RevOf::Known(rev));
            }
            Some(_) => {
                self.check(Check::Absent(key.clone()), Meaning::Absent { op });
                self.doomed = true;
            }
            None => {
                let meaning = if add.if_absent { Meaning::Fresh } else { Meaning::Absent { op } };
                self.check(Check::Absent(key.clone()), meaning);
                done.effect = Effect::Added;
                let after = add.clone().into_record();
                self.changes.push(EntityChange { op, id: done.id.clone(), before: None, after: Some(after) });
            }
        }
    }
}

/// An entry that a transaction makes.
struct NewEntry {
    op: usize,
    id: EntityId,
    guard: EntryCheck,
}

/// The check that makes an entry safe to write.
#[derive(Clone, Copy, PartialEq, Eq)]
enum EntryCheck {
    /// The entity's rev, which is checked anyway.
    Entity,
    /// The entry does not exist; otherwise the value is not unique.
    Unique,
    /// The entry does not exist; otherwise another writer was faster.
    Fresh,
}

/// How an index that is being built affects a change. During that time two entities may have the same value although it
/// must be unique, and only one of them has the entry; and an entity that existed before may have no entry.
#[derive(Default)]
struct Building {
    /// Entries that belong to another entity and must stay.
    foreign: Vec<Vec<u8>>,
    /// Entries that must be made although the values do not change.
    missing: Vec<(IndexEntry, EntryCheck)>,
}

/// The index entries of all changes of a transaction together: one entity may take an entry that another gives up.
#[derive(Default)]
struct Moves {
    freed: BTreeSet<Vec<u8>>,
    taken: BTreeMap<Vec<u8>, NewEntry>,
    /// Values that two entities of the transaction take: the later operation, the entry and the owner.
    twice: Vec<(usize, IndexEntry, EntityId)>,
}

impl Moves {
    fn add(&mut self, change: &Changing<'_>, old: Vec<IndexEntry>, new: Vec<IndexEntry>, building: Building) {
        let kept = |entry: &IndexEntry, others: &[IndexEntry]| others.iter().any(|other| other.key == entry.key);
        let given_up = old.iter().filter(|entry| !kept(entry, &new) && !building.foreign.contains(&entry.key));
        self.freed.extend(given_up.map(|entry| entry.key.clone()));
        for (entry, guard) in building.missing {
            self.take(change, entry, guard);
        }
        for entry in new.into_iter().filter(|entry| !kept(entry, &old)) {
            let guard = if entry.unique { EntryCheck::Unique } else { EntryCheck::Entity };
            self.take(change, entry, guard);
        }
    }

    fn take(&mut self, change: &Changing<'_>, entry: IndexEntry, guard: EntryCheck) {
        match self.taken.get(&entry.key) {
            Some(first) => self.twice.push((change.op, entry, first.id.clone())),
            None => drop(self.taken.insert(entry.key, NewEntry { op: change.op, id: change.id.clone(), guard })),
        }
    }
}

/// The entries of a record in every index that writers maintain.
fn entries(
    declaration: &Declaration,
    id: &EntityId,
    record: Option<&EntityRecord>,
    key_bytes: usize,
) -> Result<Vec<IndexEntry>> {
    let Some(record) = record else { return Ok(Vec::new()) };
    declaration.kept().map(|index| index.entry(id, record, key_bytes)).collect()
}

impl Preparing<'_> {
    /// Makes the writes of all changes, and the checks that these need.
    async fn finish(mut self, mut ops: Vec<PreparedOp>, changes: &[Changing<'_>]) -> Result<Prepared> {
        let declared = self.declared(changes).await?;
        let key_bytes = self.entities.store().limits().key_bytes;
        let mut moves = Moves::default();
        for change in changes {
            let (id, Some(record)) = (change.id, change.record()) else { continue };
            let entity_type = &record.entity_type;
            let list = || IndexEntry { key: listed(entity_type, id), index: 0, unique: false };
            let (mut old, mut new, mut building) = (Vec::new(), Vec::new(), Building::default());
            if let Some(Some((_, declaration))) = declared.get(entity_type) {
                old = entries(declaration, id, change.before, key_bytes)?;
                new = entries(declaration, id, change.after, key_bytes)?;
                building = self.building(declaration, id, &old, &new).await?;
            }
            old.extend(change.before.and_then(|before| index::subtyped(id, before)));
            new.extend(change.after.and_then(|after| index::subtyped(id, after)));
            match (change.before, change.after) {
                (None, Some(_)) => new.push(list()),
                (Some(_), None) => old.push(list()),
                _ => {}
            }
            moves.add(change, old, new, building);
        }
        self.unique_checks(&mut moves, &declared, &ops);
        if !self.doomed {
            self.write(changes, moves, &mut ops)?;
        }
        Ok(Prepared { commit: self.commit, meanings: self.meanings, ops, doomed: self.doomed })
    }

    /// The declarations of all types that are written, with checks that they are still valid.
    async fn declared(&mut self, changes: &[Changing<'_>]) -> Result<BTreeMap<Arc<str>, Declared>> {
        let mut declared = BTreeMap::new();
        for change in changes {
            let Some(record) = change.record() else { continue };
            let entity_type = &record.entity_type;
            if declared.contains_key(entity_type) {
                continue;
            }
            let known = self.entities.declared(entity_type).await?;
            let check = as_found(self.entities.type_key(entity_type), known.as_ref().map(|(rev, _)| *rev));
            self.check(check, Meaning::Declared(entity_type.clone()));
            declared.insert(entity_type.clone(), known);
        }
        Ok(declared)
    }

    async fn building(
        &mut self,
        declaration: &Declaration,
        id: &EntityId,
        old: &[IndexEntry],
        new: &[IndexEntry],
    ) -> Result<Building> {
        let mut building = Building::default();
        for entry in old {
            if declaration.by_number(entry.index).is_none_or(|index| index.state != IndexState::Building) {
                continue;
            }
            let stays = new.contains(entry);
            if !entry.unique {
                building.missing.extend(stays.then(|| (entry.clone(), EntryCheck::Entity)));
                continue;
            }
            let key = self.entities.index_key(&entry.key);
            match self.entities.store().get(&key).await? {
                Some(item) => {
                    self.check(Check::AtRev(key, item.rev), Meaning::Fresh);
                    if item.value != id.as_bytes() {
                        building.foreign.push(entry.key.clone());
                    }
                }
                None if stays => building.missing.push((entry.clone(), EntryCheck::Fresh)),
                None => {
                    self.check(Check::Absent(key), Meaning::Fresh);
                    building.foreign.push(entry.key.clone());
                }
            }
        }
        Ok(building)
    }

    fn unique_checks(&mut self, moves: &mut Moves, declared: &BTreeMap<Arc<str>, Declared>, ops: &[PreparedOp]) {
        let fields = |op: usize, number: u16| {
            let declared = ops[op].entity_type.as_ref().and_then(|entity_type| declared.get(entity_type));
            let index = declared.and_then(|known| known.as_ref()?.1.by_number(number).cloned());
            index.map(|index| index.names()).unwrap_or_default()
        };
        for (op, entry, owner) in std::mem::take(&mut moves.twice) {
            let key = self.entities.index_key(&entry.key);
            let freed = moves.freed.contains(&entry.key);
            self.doomed(&key, Meaning::UniqueWithin { op, fields: fields(op, entry.index), owner, freed });
        }
        for (key, taken) in &moves.taken {
            // An entry that the same transaction frees is guarded by the rev of the entity that frees it.
            if moves.freed.contains(key) {
                continue;
            }
            let meaning = match taken.guard {
                EntryCheck::Entity => continue,
                EntryCheck::Fresh => Meaning::Fresh,
                EntryCheck::Unique => {
                    let number = index::read_prefix(key).map_or(0, |(_, number)| number);
                    Meaning::Unique { op: taken.op, fields: fields(taken.op, number) }
                }
            };
            self.check(Check::Absent(self.entities.index_key(key)), meaning);
        }
    }

    fn write(&mut self, changes: &[Changing<'_>], mut moves: Moves, ops: &mut [PreparedOp]) -> Result<()> {
        let limit = self.entities.store().limits().value_bytes;
        let mut commit = std::mem::take(&mut self.commit);
        for change in changes {
            ops[change.op].rev = RevOf::Write(commit.writes().len());
            let key = self.entities.key(change.id);
            commit = match change.after {
                Some(record) => {
                    let value = record.encode();
                    if value.len() > limit {
                        let (id, length) = (change.id.clone(), value.len());
                        return Err(EntityError::DocumentTooLarge { id, length, limit });
                    }
                    match change.before {
                        Some(_) => commit.put(&key, value),
                        None => commit.put_stamped(&key, value, EntityRecord::STAMP),
                    }
                }
                None => commit.delete(&key),
            };
        }
        for (key, taken) in moves.taken {
            moves.freed.remove(&key);
            commit = commit.put(&self.entities.index_key(&key), taken.id.as_bytes().to_vec());
        }
        for key in moves.freed {
            commit = commit.delete(&self.entities.index_key(&key));
        }
        self.commit = commit;
        Ok(())
    }
}
