//! Operations and transactions of the world.

use latchwork::entity::{
    Add, ChangeError, Draft, EntityError, FailedOp, OpReceipt, Receipt, Remove, Transaction, Update,
};
use latchwork::store::{Generation, Rev, Timestamp};
use serde_json::Value;

use super::super::command;
use super::super::filter::Asked;
use super::super::reference::{Doc, Op, Reference};
use super::{Compared, Looked, World, revs, same, told};

/// Stands for an id that is generated when the entity is added.
const NEW: &str = "(new)";

impl World {
    /// An operation for the reference. Ids that will be generated get a name by the operation's number.
    fn op(&self, op: &command::Op, number: usize, absent: bool) -> Op {
        match op {
            command::Op::Add { id, doc, if_absent } => {
                let if_absent = if_absent.unwrap_or(absent) && id.is_some();
                let id = id.map_or(format!("{NEW}{number}"), |id| self.id(id));
                Op::Add { id, doc: doc.clone(), if_absent }
            }
            command::Op::Update { id, data, metadata, if_rev } => {
                let id = self.id(*id);
                let if_rev = if_rev.map(|off| self.rev(&id, off));
                Op::Update { id, data: data.clone(), metadata: metadata.clone(), if_rev }
            }
            command::Op::Remove { id, if_rev } => {
                let id = self.id(*id);
                let if_rev = if_rev.map(|off| self.rev(&id, off));
                Op::Remove { id, if_rev }
            }
            command::Op::Exists(id) => Op::Exists { id: self.id(*id) },
            command::Op::AtRev(id, off) => {
                let id = self.id(*id);
                let rev = self.rev(&id, *off);
                Op::AtRev { id, rev }
            }
            command::Op::Absent(id) => Op::Absent { id: self.id(*id) },
        }
    }

    fn ops(&self, ops: &[command::Op], absent: bool) -> Vec<Op> {
        ops.iter().enumerate().map(|(number, op)| self.op(op, number, absent)).collect()
    }

    /// The receipts of a call as the reference would write them: generated ids are adopted.
    fn adopt(&mut self, ops: &mut [Op], receipts: &[OpReceipt]) {
        for (op, receipt) in ops.iter_mut().zip(receipts) {
            if let Op::Add { id, .. } = op
                && id.starts_with(NEW)
            {
                *id = receipt.id.to_string();
                self.made.push(id.clone());
            }
        }
    }

    /// The text with unknown ids replaced by a placeholder.
    fn unnamed(&self, text: String) -> String {
        let mut parts = Vec::new();
        for part in text.split('"') {
            let unknown = uuid(part) && !self.made.iter().any(|made| made == part);
            parts.push(if unknown || part.starts_with(NEW) { NEW } else { part });
        }
        parts.join("\"")
    }

    fn shown(&self, failed: &FailedOp) -> String {
        self.unnamed(format!("{failed:?}"))
    }

    /// Compares a call of one operation. If it fails, it returns its first failure.
    fn compare_single<T>(
        &mut self,
        what: &str,
        found: Result<T, EntityError>,
        mut op: Op,
        receipt: impl Fn(&T) -> Option<OpReceipt>,
        rev: impl Fn(&T) -> Rev,
    ) -> Compared {
        let failures = self.reference.failures(std::slice::from_ref(&op), None);
        if let Some((failed, _)) = failures.first() {
            let error = self.unnamed(format!("{:?}", failed.error));
            return same(what, found.map(|_| ()).map_err(|error| self.unnamed(format!("{error:?}"))), Err(error));
        }
        let found = told(found)?;
        let got = receipt(&found);
        if let Some(got) = &got {
            self.adopt(std::slice::from_mut(&mut op), std::slice::from_ref(got));
        }
        let landed = self.reference.apply(&[op], self.env.now().0, None);
        same(what, rev(&found), landed.ops[0].rev)?;
        same(what, got.unwrap_or_else(|| landed.ops[0].clone()), landed.ops[0].clone())
    }

    pub(super) async fn add(&mut self, op: &command::Op) -> Compared {
        let command::Op::Add { if_absent, .. } = op else { return Ok(()) };
        let op = self.op(op, 0, false);
        let found = self.entities().add(add(&op, *if_absent)).await;
        self.compare_single("add", found, op, |receipt| Some(receipt.clone()), |receipt| receipt.rev)
    }

    pub(super) async fn update(&mut self, op: &command::Op) -> Compared {
        let op = self.op(op, 0, false);
        let found = self.entities().update(update(&op)).await;
        self.compare_single("update", found, op, |_| None, |rev| *rev)
    }

    pub(super) async fn remove(&mut self, op: &command::Op) -> Compared {
        let op = self.op(op, 0, false);
        let found = self.entities().remove(remove(&op)).await;
        self.compare_single("remove", found, op, |_| None, |rev| *rev)
    }

    pub(super) async fn update_with(&mut self, id: &str, doc: &Doc, refuse: bool) -> Compared {
        let mut seen = None;
        let change = |draft: &mut Draft| {
            seen = Some((draft.rev.0, draft.data.clone(), draft.metadata.clone()));
            draft.data = doc.data.clone();
            draft.metadata = doc.metadata.clone();
            if refuse { Err("no") } else { Ok("yes") }
        };
        let found = self.entities().try_update_with(id, 3, change).await;
        let before = self.reference.version(id, self.reference.generation);
        let before = before.and_then(|version| Some((version.rev, version.doc.as_ref()?)));
        let before = before.map(|(rev, doc)| (rev, doc.data.clone(), doc.metadata.clone()));
        same("the draft", &seen, &before)?;
        if refuse && before.is_some() {
            let refused = matches!(found, Err(ChangeError::Refused("no")));
            return same("a change that refuses", refused, true);
        }
        let found = found.map_err(|error| match error {
            ChangeError::Entity(error) => error,
            ChangeError::Refused(why) => panic!("the change said {why} without a draft"),
        });
        let (data, metadata) = (Some(doc.data.clone()), Some((doc.metadata.clone(), true)));
        let op = Op::Update { id: id.into(), data, metadata, if_rev: None };
        self.compare_single("update_with", found, op, |_| None, |(rev, _)| *rev)
    }

    pub(super) async fn add_many(&mut self, items: &[command::Op], if_absent: bool) -> Compared {
        let ops = self.ops(items, if_absent);
        let adds = items.iter().zip(&ops).map(|(item, op)| match item {
            command::Op::Add { if_absent, .. } => add(op, *if_absent),
            other => panic!("{other:?} is no add"),
        });
        let found = match if_absent {
            true => self.entities().add_many_if_absent(adds.collect::<Vec<_>>()).await,
            false => self.entities().add_many(adds.collect::<Vec<_>>()).await,
        };
        self.compare("add_many", found, ops, None, None, None)
    }

    pub(super) async fn update_many(&mut self, items: &[command::Op]) -> Compared {
        let ops = self.ops(items, false);
        let found = self.entities().update_many(ops.iter().map(update).collect::<Vec<_>>()).await;
        self.compare("update_many", found, ops, None, None, None)
    }

    pub(super) async fn transact(
        &mut self,
        items: &[command::Op],
        at_generation: Option<i8>,
        unchanged: Option<u8>,
        author: Option<u8>,
    ) -> Compared {
        let ops = self.ops(items, false);
        let at_generation = at_generation.map(|back| self.ago(i64::from(back)));
        let unchanged = unchanged.and_then(|view| self.number(view));
        let author = author.map(|author| format!("author {author}"));
        let mut transaction = Transaction::new();
        for (item, op) in items.iter().zip(&ops) {
            transaction = match (item, op) {
                (command::Op::Add { if_absent, .. }, op) => transaction.add(add(op, *if_absent)),
                (_, Op::Update { .. }) => transaction.update(update(op)),
                (_, Op::Remove { .. }) => transaction.remove(remove(op)),
                (_, Op::Exists { id }) => transaction.require_exists(id),
                (_, Op::AtRev { id, rev }) => transaction.require_rev(id, revs(*rev)),
                (_, op) => transaction.require_absent(op.id()),
            };
        }
        if let Some(generation) = at_generation {
            transaction = transaction.if_at_generation(Generation(generation));
        }
        if let Some(view) = unchanged {
            transaction = transaction.if_unchanged(&self.views[view].view);
        }
        if let Some(author) = &author {
            transaction = transaction.author(author);
        }
        let found = self.entities().transact(transaction).await;
        self.compare("transact", found, ops, at_generation, unchanged, author)
    }

    fn compare(
        &mut self,
        what: &str,
        found: Result<Receipt, EntityError>,
        mut ops: Vec<Op>,
        at_generation: Option<u64>,
        unchanged: Option<usize>,
        author: Option<String>,
    ) -> Compared {
        if let Err(error) = Reference::check(&ops) {
            return same(what, told(found).map(|_| ()), told(Err(error)));
        }
        let expected = self.reference.failures(&ops, at_generation);
        let (must, may) = unchanged.map_or((false, false), |view| self.changed(&self.views[view]));
        let receipt = match found {
            Err(EntityError::Rejected { failed }) => {
                let (reads, failed): (Vec<_>, Vec<_>) =
                    failed.into_iter().partition(|failed| matches!(failed.error, EntityError::ReadChanged { .. }));
                if reads.is_empty() && failed.is_empty() {
                    return Err(format!("{what} was rejected for nothing"));
                }
                self.compare_reads(&reads, unchanged, may)?;
                same("whether what was read has changed", !reads.is_empty() || !must, true)?;
                return self.compare_failures(what, &failed, &expected);
            }
            Err(error) => return Err(format!("{what}: {error:?}, expected {expected:?}")),
            Ok(receipt) => receipt,
        };
        self.compare_failures(what, &[], &expected)?;
        same("whether what was read has changed, and the commit landed", must, false)?;
        self.adopt(&mut ops, &receipt.ops);
        let now = self.env.now().0;
        let landed = self.reference.apply(&ops, now, author.as_deref());
        let written = |id: &str| ops.iter().any(|op| op.writes() && op.id() == id);
        for ((found, expected), op) in receipt.ops.iter().zip(&landed.ops).zip(&ops) {
            // An entity that is required and written has two revs.
            if op.writes() || !written(op.id()) {
                same(what, found, expected)?;
            }
        }
        same("the number of receipts", receipt.ops.len(), ops.len())?;
        same("the receipt's generation", receipt.generation.0, self.reference.generation)?;
        if landed.changed { same("its time", receipt.time, Timestamp(self.reference.time)) } else { Ok(()) }
    }

    /// Failures of the same operation come in any order.
    fn compare_failures(
        &self,
        what: &str,
        found: &[FailedOp],
        expected: &[(FailedOp, Option<EntityError>)],
    ) -> Compared {
        let ops = |failed: &FailedOp| failed.op;
        same(what, found.iter().map(ops).collect::<Vec<_>>(), expected.iter().map(|(failed, _)| failed.op).collect())
            .map_err(|difference| format!("{difference}\n{found:?}\n{expected:?}"))?;
        let mut left: Vec<_> = expected.iter().collect();
        for failed in found {
            let other = |error: &EntityError| FailedOp { op: failed.op, error: error.clone() };
            let fits = |(expected, or): &&(FailedOp, Option<EntityError>)| {
                let or = or.as_ref().map(|error| self.shown(&other(error)));
                self.shown(failed) == self.shown(expected) || Some(self.shown(failed)) == or
            };
            let Some(at) = left.iter().position(fits) else {
                return Err(format!("{what}: {failed:?} is none of {left:?}"));
            };
            left.remove(at);
        }
        Ok(())
    }

    /// Failed reads come first, and name the view.
    fn compare_reads(&self, reads: &[FailedOp], unchanged: Option<usize>, may: bool) -> Compared {
        for failed in reads {
            let Some(view) = unchanged else { return Err(format!("nothing was read, and {failed} was found")) };
            let EntityError::ReadChanged { read_at, .. } = &failed.error else { continue };
            same("the view that was read", *read_at, self.views[view].view.generation())?;
            same("the operation of a read", failed.op, None)?;
        }
        same("whether something that was read may have changed", reads.is_empty() || may, true)
            .map_err(|difference| format!("{difference}\n{reads:?}"))
    }

    /// Whether the reads through a view must count as changed, and whether they may. A find reads the entities that it
    /// returns, and looks at others of the type.
    fn changed(&self, looked: &Looked) -> (bool, bool) {
        let (at, now) = (looked.view.generation().0, self.reference.generation);
        let moved = |(id, rev): &(String, Option<u64>)| self.reference.rev(id) != *rev;
        let mut must = looked.entities.iter().any(moved);
        let mut may = must;
        for (asked, after, gave, more) in &looked.finds {
            let present = self.reference.find(asked, now, after.as_ref());
            let same_more = (present.len() > asked.limit) == *more;
            let present = present.into_iter().take(asked.limit);
            let present: Vec<_> = present.map(|(_, entity)| (entity.id.to_string(), entity.rev.0)).collect();
            must |= present != *gave || !same_more;
            // Entities of the type that were touched, or an index that was declared or undeclared.
            let touched = self.reference.touched(at, now);
            may |= touched.iter().any(|id| asked.entity_type.is_none_or(|of| self.reference.was_ever(id, of)));
            let redeclared = asked.entity_type.and_then(|of| self.reference.redeclared.get(of));
            may |= redeclared.is_some_and(|redeclared| *redeclared > at);
        }
        (must, may || must)
    }

    pub(super) async fn add_if_missing(&mut self, asked: &Asked, op: &command::Op) -> Compared {
        let command::Op::Add { doc, if_absent, .. } = op else { return Ok(()) };
        let op = self.op(op, 0, false);
        let found = self.entities().add_if_missing(&asked.query(), add(&op, *if_absent)).await;
        if !asked.matches(doc) {
            return same("add_if_missing", told(found), told(Err(EntityError::AddDoesNotMatch)));
        }
        let first = self.reference.find(asked, self.reference.generation, None).into_iter().next();
        match first {
            Some((_, entity)) => {
                let effect = latchwork::entity::Effect::Existing;
                let expected = OpReceipt { id: entity.id, rev: entity.rev, effect };
                same("add_if_missing", told(found), Ok(expected))
            }
            None => {
                self.compare_single("add_if_missing", found, op, |receipt| Some(receipt.clone()), |receipt| receipt.rev)
            }
        }
    }
}

fn uuid(text: &str) -> bool {
    text.len() == 36 && text.bytes().filter(|byte| *byte == b'-').count() == 4
}

fn add(op: &Op, if_absent: Option<bool>) -> Add {
    let Op::Add { id, doc, .. } = op else { panic!("{op:?} is no add") };
    let add = Add::new(doc.entity_type).data(&doc.data).metadata(Value::Object(doc.metadata.clone()));
    let add = if_absent.into_iter().fold(add, Add::if_absent);
    if id.starts_with(NEW) { add } else { add.id(id) }
}

fn update(op: &Op) -> Update {
    let Op::Update { id, data, metadata, if_rev } = op else { panic!("{op:?} is no update") };
    let update = data.iter().fold(Update::new(id), Update::data);
    let update = match metadata {
        Some((metadata, true)) => update.replace_metadata(metadata),
        Some((metadata, false)) => update.metadata(metadata),
        None => update,
    };
    if_rev.iter().fold(update, |update, rev| update.if_rev(revs(*rev)))
}

fn remove(op: &Op) -> Remove {
    let Op::Remove { id, if_rev } = op else { panic!("{op:?} is no remove") };
    if_rev.iter().fold(Remove::new(id), |remove, rev| remove.if_rev(revs(*rev)))
}
