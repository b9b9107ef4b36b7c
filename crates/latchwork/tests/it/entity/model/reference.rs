//! Entities as they are promised, in a naive form: a list of versions for each id, and every question answered by
//! looking through all of them. Nothing here knows indexes, keys or commits.

use std::collections::{BTreeMap, BTreeSet};

use latchwork::entity::{Effect, Entity, EntityError, FailedOp, Moment, OpReceipt};
use latchwork::store::{Generation, Rev, Timestamp};
use serde_json::{Map, Value};

use super::filter::{Asked, Place, combined};

#[derive(Debug, Clone, PartialEq)]
pub(super) struct Doc {
    pub(super) entity_type: &'static str,
    pub(super) data: Value,
    pub(super) metadata: Map<String, Value>,
}

/// A version of one entity; without a document, its removal.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Version {
    pub(super) rev: u64,
    pub(super) at: Moment,
    pub(super) doc: Option<Doc>,
    pub(super) created: Moment,
    pub(super) author: Option<String>,
}

/// An index as declared.
pub(super) type Fields = (Vec<&'static str>, bool);

#[derive(Debug, Clone)]
pub(super) enum Op {
    Add { id: String, doc: Doc, if_absent: bool },
    Update { id: String, data: Option<Value>, metadata: Option<(Map<String, Value>, bool)>, if_rev: Option<u64> },
    Remove { id: String, if_rev: Option<u64> },
    Exists { id: String },
    AtRev { id: String, rev: u64 },
    Absent { id: String },
}

impl Op {
    pub(super) fn id(&self) -> &String {
        match self {
            Op::Add { id, .. } | Op::Update { id, .. } | Op::Remove { id, .. } => id,
            Op::Exists { id } | Op::AtRev { id, .. } | Op::Absent { id } => id,
        }
    }

    pub(super) fn writes(&self) -> bool {
        matches!(self, Op::Add { .. } | Op::Update { .. } | Op::Remove { .. })
    }
}

pub(super) type State = BTreeMap<String, Vec<Version>>;

/// What a restore brings back.
#[derive(Debug, Clone)]
pub(super) struct Snapshot {
    entities: State,
    declared: BTreeMap<&'static str, Vec<Fields>>,
}

pub(super) struct Reference {
    pub(super) entities: State,
    pub(super) declared: BTreeMap<&'static str, Vec<Fields>>,
    /// The declarations after each generation that changed them.
    past_declared: Vec<(u64, BTreeMap<&'static str, Vec<Fields>>)>,
    pub(super) generation: u64,
    /// The oldest generation that can be read.
    pub(super) floor: u64,
    pub(super) time: u64,
    /// When each generation was committed.
    times: BTreeMap<u64, u64>,
    /// When something was last declared or undeclared on a type, even without success.
    pub(super) redeclared: BTreeMap<&'static str, u64>,
    /// Generations at which an index was half built or half cleared.
    half: BTreeSet<u64>,
}

/// The result of a transaction that landed.
pub(super) struct Landed {
    pub(super) changed: bool,
    pub(super) ops: Vec<OpReceipt>,
}

/// How many entities an index adds or removes in one commit.
const BATCH: u64 = 200;

impl Reference {
    /// The state after the three commits that declare the spaces.
    pub(super) fn new(now: u64) -> Reference {
        Reference {
            entities: State::new(),
            declared: BTreeMap::new(),
            past_declared: Vec::new(),
            generation: 3,
            floor: 0,
            time: now,
            times: (1..=3).map(|generation| (generation, now)).collect(),
            redeclared: BTreeMap::new(),
            half: BTreeSet::new(),
        }
    }

    fn tick(&mut self, now: u64) -> Moment {
        self.generation += 1;
        self.time = self.time.max(now);
        self.times.insert(self.generation, self.time);
        Moment { generation: Generation(self.generation), time: Timestamp(self.time) }
    }

    pub(super) fn version(&self, id: &str, at: u64) -> Option<&Version> {
        self.entities.get(id)?.iter().rev().find(|version| version.at.generation.0 <= at)
    }

    pub(super) fn doc(&self, id: &str, at: u64) -> Option<&Doc> {
        self.version(id, at)?.doc.as_ref()
    }

    /// The rev of an entity that exists now.
    pub(super) fn rev(&self, id: &str) -> Option<u64> {
        self.rev_at(id, self.generation)
    }

    pub(super) fn rev_at(&self, id: &str, at: u64) -> Option<u64> {
        self.version(id, at).filter(|version| version.doc.is_some()).map(|version| version.rev)
    }

    pub(super) fn entity(&self, id: &str, at: u64) -> Option<Entity> {
        self.version(id, at).and_then(|version| entity(id, version))
    }

    /// Everything that a query finds after a position, without limit.
    pub(super) fn find(&self, asked: &Asked, at: u64, after: Option<&Place>) -> Vec<(Place, Entity)> {
        let mut found = Vec::new();
        for id in self.entities.keys() {
            let Some(doc) = self.doc(id, at).filter(|doc| asked.matches(doc)) else { continue };
            let place = asked.place(id, doc);
            if after.is_none_or(|after| asked.order(&place, after).is_gt()) {
                found.extend(self.entity(id, at).map(|entity| (place, entity)));
            }
        }
        found.sort_by(|(a, _), (b, _)| asked.order(a, b));
        found
    }

    pub(super) fn touched(&self, after: u64, until: u64) -> Vec<String> {
        let within = |version: &Version| version.at.generation.0 > after && version.at.generation.0 <= until;
        let touched = self.entities.iter().filter(|(_, versions)| versions.iter().any(within));
        touched.map(|(id, _)| id.clone()).collect()
    }

    /// True if an entity was of a type at any time.
    pub(super) fn was_ever(&self, id: &str, entity_type: &str) -> bool {
        let mut docs = self.entities.get(id).into_iter().flatten().filter_map(|version| version.doc.as_ref());
        docs.any(|doc| doc.entity_type == entity_type)
    }

    /// The generation that a time refers to.
    pub(super) fn generation_at(&self, time: u64) -> Option<u64> {
        if time >= self.time {
            return Some(self.generation);
        }
        // The time of a restore itself is not found once something was committed after it.
        let kept = self.times.range(self.floor + 1..).take_while(|(_, at)| **at <= time);
        kept.last().map(|(generation, _)| *generation).or((self.floor == 0).then_some(0))
    }

    /// The declarations on a type at a generation.
    pub(super) fn declared_at(&self, entity_type: &str, at: u64) -> Vec<Fields> {
        let held = self.past_declared.iter().rev().find(|(generation, _)| *generation <= at);
        held.and_then(|(_, declared)| declared.get(entity_type)).cloned().unwrap_or_default()
    }

    /// The first two operations that write the same entity.
    fn written_twice(ops: &[Op]) -> Option<EntityError> {
        let mut written: BTreeMap<&String, usize> = BTreeMap::new();
        for (second, op) in ops.iter().enumerate().filter(|(_, op)| op.writes()) {
            match written.get(op.id()) {
                Some(first) => {
                    let idle = matches!(op, Op::Add { if_absent: true, .. }) && matches!(ops[*first], Op::Add { .. });
                    if !idle {
                        let (id, first) = (op.id().as_str().into(), *first);
                        return Some(EntityError::WrittenTwice { id, first, second });
                    }
                }
                None => drop(written.insert(op.id(), second)),
            }
        }
        None
    }

    /// The error of an operation by itself.
    fn refused(&self, op: &Op) -> Option<EntityError> {
        let (id, found) = (op.id(), self.rev(op.id()));
        let missing = || Some(EntityError::NotFound { id: id.as_str().into() });
        let at_rev = |wanted: Option<u64>| match (wanted, found) {
            (_, None) => missing(),
            (Some(expected), Some(actual)) if expected != actual => {
                let (expected, actual) = (Rev(expected), Rev(actual));
                Some(EntityError::RevisionConflict { id: id.as_str().into(), expected, actual })
            }
            _ => None,
        };
        match op {
            Op::Add { if_absent: true, .. } => None,
            Op::Add { .. } | Op::Absent { .. } => {
                found.map(|rev| EntityError::AlreadyExists { id: id.as_str().into(), rev: Rev(rev) })
            }
            Op::Update { if_rev, .. } | Op::Remove { if_rev, .. } => at_rev(*if_rev),
            Op::Exists { .. } => at_rev(None),
            Op::AtRev { rev, .. } => at_rev(Some(*rev)),
        }
    }

    /// The document after an operation; the outer `None` if the operation writes nothing.
    fn after(&self, op: &Op) -> Option<Option<Doc>> {
        let before = self.doc(op.id(), self.generation);
        match op {
            Op::Add { doc, .. } => before.is_none().then(|| Some(doc.clone())),
            Op::Update { data, metadata, .. } => {
                let mut doc = before?.clone();
                if let Some(data) = data {
                    doc.data = data.clone();
                }
                match metadata {
                    Some((new, true)) => doc.metadata = new.clone(),
                    Some((patch, false)) => {
                        for (key, value) in patch {
                            match value {
                                Value::Null => drop(doc.metadata.remove(key)),
                                value => drop(doc.metadata.insert(key.clone(), value.clone())),
                            }
                        }
                    }
                    None => {}
                }
                Some(Some(doc))
            }
            Op::Remove { .. } => Some(None),
            Op::Exists { .. } | Op::AtRev { .. } | Op::Absent { .. } => None,
        }
    }

    /// The operations that write, with the documents they leave. Operations that fail by themselves, or whose entity
    /// already exists, leave nothing.
    fn staged(&self, ops: &[Op]) -> Vec<(usize, String, Option<Doc>)> {
        let mut seen = BTreeSet::new();
        let mut staged = Vec::new();
        for (index, op) in ops.iter().enumerate().filter(|(_, op)| op.writes()) {
            if seen.insert(op.id()) && self.refused(op).is_none() {
                staged.extend(self.after(op).map(|doc| (index, op.id().clone(), doc)));
            }
        }
        staged
    }

    /// Every failed check, in the order of the operations; and the second right answer where there are two.
    pub(super) fn failures(&self, ops: &[Op], at_generation: Option<u64>) -> Vec<(FailedOp, Option<EntityError>)> {
        let mut failed = Vec::new();
        if let Some(expected) = at_generation.filter(|expected| *expected != self.generation) {
            let (expected, actual) = (Generation(expected), Generation(self.generation));
            failed.push((FailedOp { op: None, error: EntityError::GenerationConflict { expected, actual } }, None));
        }
        for (index, op) in ops.iter().enumerate() {
            failed.extend(self.refused(op).map(|error| (FailedOp { op: Some(index), error }, None)));
        }
        let staged = self.staged(ops);
        for (entity_type, indexes) in &self.declared {
            for (fields, unique) in indexes {
                if *unique {
                    failed.extend(self.unique_failures(entity_type, fields, &staged));
                }
            }
        }
        failed.sort_by_key(|(failed, _)| failed.op);
        failed
    }

    fn unique_failures(
        &self,
        entity_type: &str,
        fields: &[&'static str],
        staged: &[(usize, String, Option<Doc>)],
    ) -> Vec<(FailedOp, Option<EntityError>)> {
        let value = |doc: Option<&Doc>| combined(doc.filter(|doc| doc.entity_type == entity_type)?, fields);
        let mut failed = Vec::new();
        for (at, (op, id, doc)) in staged.iter().enumerate() {
            let taken = value(doc.as_ref());
            if taken.is_none() || taken == value(self.doc(id, self.generation)) {
                continue;
            }
            // The owner of the value after all earlier operations, and after all later ones as well.
            let earlier = staged[..at].iter().find(|(_, other, doc)| {
                value(doc.as_ref()) == taken && value(self.doc(other, self.generation)) != taken
            });
            let written = |other: &&String| staged.iter().find(|(_, id, _)| id == *other);
            let owner = self.entities.keys().find(|other| {
                let after = written(other).map_or(self.doc(other, self.generation), |(_, _, doc)| doc.as_ref());
                value(self.doc(other, self.generation)) == taken && value(after) == taken
            });
            let violation = |owner: &String| EntityError::UniqueViolation {
                id: id.as_str().into(),
                entity_type: entity_type.into(),
                fields: fields.join(" and "),
                owner: owner.as_str().into(),
            };
            let (mut owners, op) = (earlier.map(|(_, id, _)| id).into_iter().chain(owner).map(violation), Some(*op));
            if let Some(error) = owners.next() {
                failed.push((FailedOp { op, error }, owners.next()));
            }
        }
        failed
    }

    /// Makes all operations, or returns the error of an impossible transaction.
    pub(super) fn check(ops: &[Op]) -> Result<(), EntityError> {
        Reference::written_twice(ops).map_or(Ok(()), Err)
    }

    /// Makes operations that do not fail.
    pub(super) fn apply(&mut self, ops: &[Op], now: u64, author: Option<&str>) -> Landed {
        let staged = self.staged(ops);
        let changed = !staged.is_empty();
        let before: Vec<Option<u64>> = ops.iter().map(|op| self.rev(op.id())).collect();
        if changed {
            let at = self.tick(now);
            for (_, id, doc) in &staged {
                self.write(id, doc.clone(), at, author);
            }
        }
        let mut receipts = Vec::new();
        for (index, op) in ops.iter().enumerate() {
            let wrote = staged.iter().any(|(by, ..)| *by == index);
            let effect = match op {
                Op::Add { .. } if wrote => Effect::Added,
                Op::Add { .. } => Effect::Existing,
                Op::Update { .. } => Effect::Updated,
                Op::Remove { .. } => Effect::Removed,
                Op::Exists { .. } | Op::AtRev { .. } | Op::Absent { .. } => Effect::Checked,
            };
            let newest = || self.entities.get(op.id()).and_then(|versions| versions.last()).map(|last| last.rev);
            let rev = if op.writes() { newest() } else { before[index] }.unwrap_or(0);
            receipts.push(OpReceipt { id: op.id().as_str().into(), rev: Rev(rev), effect });
        }
        Landed { changed, ops: receipts }
    }

    fn write(&mut self, id: &str, doc: Option<Doc>, at: Moment, author: Option<&str>) {
        let versions = self.entities.entry(id.into()).or_default();
        let last = versions.last();
        let live = last.filter(|last| last.doc.is_some());
        let version = Version {
            rev: last.map_or(0, |last| last.rev) + 1,
            at,
            doc,
            created: live.map_or(at, |last| last.created),
            author: author.map(String::from),
        };
        versions.push(version);
    }
}

fn entity(id: &str, version: &Version) -> Option<Entity> {
    let doc = version.doc.as_ref()?;
    Some(Entity {
        id: id.into(),
        entity_type: doc.entity_type.into(),
        subtype: None,
        data: doc.data.clone(),
        metadata: doc.metadata.clone(),
        rev: Rev(version.rev),
        created: version.created,
        changed: version.at,
    })
}

/// Declarations, and the effect of a restore.
impl Reference {
    fn count(&self, entity_type: &str) -> u64 {
        let live = self.entities.keys().filter_map(|id| self.doc(id, self.generation));
        live.filter(|doc| doc.entity_type == entity_type).count() as u64
    }

    fn remember_declared(&mut self) {
        self.past_declared.push((self.generation, self.declared.clone()));
    }

    /// Two entities with the same unique combination.
    fn doubled(&self, entity_type: &'static str, fields: &[&'static str]) -> Option<(String, String)> {
        let mut owners: BTreeMap<String, &String> = BTreeMap::new();
        for id in self.entities.keys() {
            let doc = self.doc(id, self.generation).filter(|doc| doc.entity_type == entity_type);
            let Some(value) = doc.and_then(|doc| combined(doc, fields)) else { continue };
            if let Some(owner) = owners.insert(value, id) {
                return Some((owner.clone(), id.clone()));
            }
        }
        None
    }

    /// A commit for the intention, one for every batch of entities, and one that marks the index as ready. After a
    /// declaration that fails, the remaining ones of the same call are finished by the next declaration, so the model
    /// declares one at a time.
    pub(super) fn declare(&mut self, entity_type: &'static str, index: Fields, now: u64) -> Result<(), EntityError> {
        if self.declared.get(entity_type).is_some_and(|declared| declared.contains(&index)) {
            return Ok(());
        }
        let begin = self.generation;
        self.tick(now);
        if index.1
            && let Some((owner, id)) = self.doubled(entity_type, &index.0)
        {
            // Marked as to be dropped, and dropped.
            self.tick(now);
            self.tick(now);
            self.half.extend(begin + 1..self.generation);
            self.redeclared.insert(entity_type, self.generation);
            let (id, owner) = (id.as_str().into(), owner.as_str().into());
            return Err(EntityError::UniqueViolation {
                id,
                entity_type: entity_type.into(),
                fields: index.0.join(" and "),
                owner,
            });
        }
        for _ in 0..self.count(entity_type).div_ceil(BATCH) {
            self.tick(now);
        }
        self.tick(now);
        self.half.extend(begin + 1..self.generation);
        self.redeclared.insert(entity_type, self.generation);
        self.declared.entry(entity_type).or_default().push(index);
        self.remember_declared();
        Ok(())
    }

    pub(super) fn undeclare(&mut self, entity_type: &'static str, index: &Fields, now: u64) {
        let Some(declared) = self.declared.get_mut(entity_type) else { return };
        let before = declared.len();
        declared.retain(|declared| declared != index);
        if declared.len() == before {
            return;
        }
        self.tick(now);
        let begin = self.generation;
        self.remember_declared();
        for _ in 0..self.count(entity_type).div_ceil(BATCH) {
            self.tick(now);
        }
        self.tick(now);
        self.half.extend(begin..self.generation);
        self.redeclared.insert(entity_type, self.generation);
    }

    /// True if no index was half built or half cleared at a generation.
    pub(super) fn is_settled(&self, at: u64) -> bool {
        !self.half.contains(&at)
    }

    pub(super) fn snapshot(&self, at: u64) -> Snapshot {
        let newest =
            |versions: &Vec<Version>| versions.iter().rev().find(|version| version.at.generation.0 <= at).cloned();
        let entities = self.entities.iter().filter_map(|(id, versions)| Some((id.clone(), vec![newest(versions)?])));
        let held = self.past_declared.iter().rev().find(|(generation, _)| *generation <= at);
        Snapshot { entities: entities.collect(), declared: held.map(|(_, held)| held.clone()).unwrap_or_default() }
    }

    /// History starts again. Unchanged entities keep their version; all others get a rev above all earlier ones.
    pub(super) fn restore(&mut self, snapshot: &Snapshot, now: u64) -> Generation {
        let at = self.tick(now);
        let ids: BTreeSet<String> = self.entities.keys().chain(snapshot.entities.keys()).cloned().collect();
        let current = std::mem::take(&mut self.entities);
        for id in ids {
            let old = current.get(&id).and_then(|versions| versions.last());
            let new = snapshot.entities.get(&id).and_then(|versions| versions.last());
            let version = match (old, new) {
                (Some(old), Some(new)) if old.rev == new.rev => old.clone(),
                (Some(old), None) if old.doc.is_none() => old.clone(),
                (old, new) => {
                    let doc = new.and_then(|new| new.doc.clone());
                    let revs = old.into_iter().chain(new).map(|version| version.rev);
                    let created = new.map_or(at, |new| new.created);
                    let rev = revs.max().unwrap_or(0) + 1;
                    Version { rev, at, doc, created, author: None }
                }
            };
            self.entities.insert(id, vec![version]);
        }
        self.declared = snapshot.declared.clone();
        (self.floor, self.past_declared) = (self.generation, vec![(self.generation, self.declared.clone())]);
        self.times = BTreeMap::from([(self.generation, self.time)]);
        at.generation
    }

    /// The author of a version; unknown for versions from before history began.
    pub(super) fn author(&self, version: &Version) -> Option<String> {
        version.author.clone().filter(|_| version.at.generation.0 > self.floor)
    }
}
