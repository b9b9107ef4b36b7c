//! Writes of entities by a call. Every commit of a call under an `Idempotency-Key` carries the id of the call in its
//! note and is guarded by the right of its attempt. So the next attempt finds in the history of the entity whether the
//! one before has landed, and an attempt that was taken over cannot land any more.

use axum::http::StatusCode;
use latchwork::Page;
use latchwork::entity::{Effect, Entity, EntityError, EntityView, OpReceipt, Revision, Transaction};
use latchwork::store::{ErrorKind, Generation, Rev, StoreError};

use crate::access::{Caller, LOCAL_SUBJECT};
use crate::api::Namespace;
use crate::calls::Call;
use crate::wire::entity::{EffectWire, EffectWord, EntityContent, EntityOp, EntityTransaction, Note, ReceiptWire};
use crate::wire::etag::Tags;
use crate::wire::problem::{Problem, ProblemCode};

/// How often a replacement of any rev is tried while other writers are faster.
const TRIES: usize = 16;
/// The number of versions that are read at once.
const VERSIONS: usize = 100;

/// The writes of one call.
pub(crate) struct Write<'a> {
    pub(crate) namespace: &'a Namespace,
    pub(crate) caller: &'a Caller,
    pub(crate) call: &'a Call,
}

impl Write<'_> {
    /// Commits a transaction of one operation.
    pub(crate) async fn commit(&self, transaction: Transaction) -> Result<OpReceipt, EntityError> {
        match self.namespace.entities().transact(self.signed(transaction, None, None)).await {
            Ok(mut receipt) => Ok(receipt.ops.remove(0)),
            Err(EntityError::Rejected { mut failed }) if !failed.is_empty() => Err(failed.remove(0).error),
            Err(error) => Err(error),
        }
    }

    /// Adds who writes, and the marks of the call.
    fn signed(&self, mut transaction: Transaction, author: Option<&str>, reason: Option<&str>) -> Transaction {
        let token = Some(&*self.caller.subject).filter(|subject| *subject != LOCAL_SUBJECT);
        if let Some(author) = author.or(token) {
            transaction = transaction.author(author);
        }
        if let Some(right) = self.call.right() {
            transaction = transaction.guard(right);
        }
        match (self.call.id(), reason) {
            (Some(call), reason) => transaction.reason(Note::write(reason, &call.to_string())),
            (None, Some(reason)) => transaction.reason(reason),
            (None, None) => transaction,
        }
    }

    /// Replaces an entity that exists.
    pub(crate) async fn replace(&self, id: &str, tags: &Tags, content: EntityContent) -> Result<OpReceipt, Problem> {
        for _ in 0..TRIES {
            let found = self.namespace.entities().get(id).await?;
            let found = found.ok_or_else(|| no_match(id, None))?;
            if !tags.match_strongly(found.rev) {
                return Err(no_match(id, Some(found.rev)));
            }
            if *found.entity_type != content.entity_type {
                let detail = format!("entity {id:?} has type {:?}, which cannot change", found.entity_type);
                return Err(Problem::new(ProblemCode::Conflict, detail).with("entity_type", &*found.entity_type));
            }
            let update = content.clone().into_update(id).if_rev(found.rev);
            match self.commit(Transaction::new().update(update)).await {
                Err(EntityError::RevisionConflict { .. } | EntityError::NotFound { .. }) if *tags == Tags::Any => {}
                written => return written.map_err(precondition_failed),
            }
        }
        Err(Problem::new(ProblemCode::Contended, "other writers wrote the same entity during each try"))
    }

    /// The rev that tags stand for; `None` for any rev of an entity that exists.
    pub(crate) async fn rev(&self, id: &str, tags: &Tags) -> Result<Option<Rev>, Problem> {
        if let (Tags::Any, rev) | (_, rev @ Some(_)) = (tags, tags.single()) {
            return Ok(rev);
        }
        let found = self.namespace.entities().get(id).await?;
        match found.ok_or_else(|| EntityError::NotFound { id: id.into() })? {
            Entity { rev, .. } if tags.match_strongly(rev) => Ok(Some(rev)),
            Entity { rev, .. } => Err(no_match(id, Some(rev))),
        }
    }

    /// Does a transaction, unless an earlier attempt has done it.
    pub(crate) async fn transact(&self, mut asked: EntityTransaction) -> Result<ReceiptWire, Problem> {
        if let Some(call) = self.call.id() {
            asked.name_new_entities(call);
        }
        for op in &asked.ops {
            if let Some((landed, _)) = self.landed_version(op.id().unwrap_or_default()).await? {
                return self.receipt_of(&asked.ops, landed.committed.generation).await;
            }
        }
        let (author, reason) = (asked.author.take(), asked.reason.take());
        let transaction = self.signed(asked.into_transaction(), author.as_deref(), reason.as_deref());
        Ok(self.namespace.entities().transact(transaction).await?.into())
    }

    /// What an earlier attempt has done to this entity.
    pub(crate) async fn landed(&self, id: &str) -> Result<Option<OpReceipt>, Problem> {
        let landed = self.landed_version(id).await?;
        Ok(landed.map(|(revision, effect)| OpReceipt { id: id.into(), rev: revision.rev, effect }))
    }

    /// The version of an entity that an earlier attempt has written.
    async fn landed_version(&self, id: &str) -> Result<Option<(Revision, Effect)>, Problem> {
        let (Some(call), Some(since)) = (self.call.id(), self.call.repeated_since()) else { return Ok(None) };
        let (view, call) = (self.namespace.entities().now().await?, call.to_string());
        let mut after = None;
        loop {
            let page = match view.history(id).limit(VERSIONS).after(after).await {
                Ok(page) => page,
                // An id that cannot be one has no history; the write says what is wrong with it.
                Err(error) if error.kind() == ErrorKind::Invalid => return Ok(None),
                Err(error) => return Err(error.into()),
            };
            let Page { items, next } = page;
            for revision in items {
                if revision.committed.generation <= since {
                    return Ok(None);
                }
                let reason = revision.meta.reason.as_deref().unwrap_or_default();
                if Note::read(reason).1 == Some(call.as_str()) {
                    let effect = effect_of(&revision);
                    return Ok(Some((revision, effect)));
                }
            }
            if next.is_none() {
                return self.has_history(id, since).await.map(|()| None);
            }
            after = next;
        }
    }

    /// Fails if what was written since then may have been forgotten.
    async fn has_history(&self, id: &str, since: Generation) -> Result<(), Problem> {
        // A view alone does not tell: what is kept differs from space to space.
        let read = async { self.namespace.entities().as_of(since).await?.get(id).await };
        match read.await {
            Ok(_) => Ok(()),
            Err(EntityError::Store(StoreError::HistoryDropped { .. })) => {
                let detail = "the first request was cut off, and the history that would show its effect is not kept; \
                              read the entity, and use a new Idempotency-Key";
                Err(Problem::new(ProblemCode::OutcomeUnknown, detail))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// The receipt of a transaction that landed at this generation.
    async fn receipt_of(&self, ops: &[EntityOp], generation: Generation) -> Result<ReceiptWire, Problem> {
        let view = self.namespace.entities().as_of(generation).await?;
        let (mut effects, mut time_us) = (Vec::new(), 0);
        for op in ops {
            let id = op.id().unwrap_or_default();
            let newest = newest(&view, id).await?;
            let written = newest.as_ref().filter(|newest| newest.committed.generation == generation);
            let effect = match (written, op) {
                (Some(revision), _) => {
                    time_us = revision.committed.time.0;
                    effect_of(revision)
                }
                (None, EntityOp::Add(_)) => Effect::Existing,
                (None, _) => Effect::Checked,
            };
            // Of a requirement, an entity that does not exist has rev 0.
            let rev = newest.filter(|newest| effect == Effect::Removed || newest.entity.is_some());
            let rev = rev.map_or(0, |newest| newest.rev.0);
            effects.push(EffectWire { id: id.into(), rev, effect: EffectWord::from(effect) });
        }
        Ok(ReceiptWire { generation: generation.0, time_us, ops: effects })
    }
}

async fn newest(view: &EntityView, id: &str) -> Result<Option<Revision>, Problem> {
    Ok(view.history(id).limit(1).await?.items.pop())
}

/// What the commit of a version did.
fn effect_of(revision: &Revision) -> Effect {
    match &revision.entity {
        None => Effect::Removed,
        Some(entity) if entity.created.generation == revision.committed.generation => Effect::Added,
        Some(_) => Effect::Updated,
    }
}

/// No tag of `If-Match` is the present rev.
fn no_match(id: &str, current: Option<Rev>) -> Problem {
    let detail = match current {
        Some(rev) => format!("entity {id:?} is at rev {rev}, which If-Match does not name"),
        None => format!("there is no entity {id:?}"),
    };
    let problem = Problem::new(ProblemCode::RevisionConflict, detail).at_status(StatusCode::PRECONDITION_FAILED);
    problem.with("id", id).with("current_rev", current.map(|rev| rev.0))
}

/// The problem of a change whose condition was a header.
pub(crate) fn precondition_failed(error: EntityError) -> Problem {
    let is_condition = matches!(error, EntityError::RevisionConflict { .. } | EntityError::AlreadyExists { .. });
    let problem = Problem::from(error);
    if is_condition { problem.at_status(StatusCode::PRECONDITION_FAILED) } else { problem }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    use crate::access::Access;
    use crate::api::{Api, Closing};
    use crate::limits::Limits;
    use latchwork::entity::{Add, Entities, Remove, Update};
    use latchwork::store::{History, Store};
    use latchwork::workflow::Engine;
    use latchwork::{Value, json};

    async fn namespace(store: &Store) -> Namespace {
        let engine = Engine::on(store).start().await.unwrap();
        let closing = Closing::new(tokio::sync::watch::Sender::new(false));
        Api::on(&engine).into_namespace("default", Access::local(), Limits::default(), closing)
    }

    fn caller() -> Caller {
        Caller { subject: Arc::from("billing") }
    }

    fn ops(ops: Value) -> EntityTransaction {
        serde_json::from_value(json!({"ops": ops, "reason": "monthly"})).unwrap()
    }

    #[tokio::test]
    async fn a_write_that_landed_before_its_process_died_is_found() {
        let namespace = namespace(&Store::memory().await.unwrap()).await;
        let caller = caller();
        for (key, transaction, effect) in [
            (1, Transaction::new().add(Add::new("t").id("a")), Effect::Added),
            (2, Transaction::new().update(Update::new("a").data(2).if_rev(Rev(1))), Effect::Updated),
            (3, Transaction::new().remove(Remove::new("a").if_rev(Rev(2))), Effect::Removed),
        ] {
            let (call, attempt) = Call::begin(namespace.calls(), key).await;
            let write = Write { namespace: &namespace, caller: &caller, call: &call };
            assert_eq!(write.landed("a").await.unwrap(), None);
            let receipt = write.commit(transaction).await.unwrap();
            assert_eq!(receipt.effect, effect);
            drop(attempt);
            let (call, attempt) = Call::begin(namespace.calls(), key).await;
            // Another writer does not hide it.
            let other = namespace.entities().add(Add::new("t").id("a").if_absent(true)).await;
            assert!(other.is_ok());
            let write = Write { namespace: &namespace, caller: &caller, call: &call };
            assert_eq!(write.landed("a").await.unwrap(), Some(receipt));
            assert_eq!(write.landed("b").await.unwrap(), None);
            drop(attempt);
        }
    }

    #[tokio::test]
    async fn an_attempt_that_was_taken_over_writes_nothing() {
        let namespace = namespace(&Store::memory().await.unwrap()).await;
        let caller = caller();
        let (old, attempt) = Call::begin(namespace.calls(), 1).await;
        drop(attempt);
        let (new, _attempt) = Call::begin(namespace.calls(), 1).await;
        let add = || Transaction::new().add(Add::new("t").id("a"));
        let late = Write { namespace: &namespace, caller: &caller, call: &old }.commit(add()).await;
        assert!(matches!(late, Err(EntityError::Fenced { .. })), "{late:?}");
        let write = Write { namespace: &namespace, caller: &caller, call: &new };
        assert_eq!(write.landed("a").await.unwrap(), None);
        assert!(write.commit(add()).await.unwrap().was_added());
    }

    #[tokio::test]
    async fn a_transaction_that_landed_has_its_receipt_again() {
        let namespace = namespace(&Store::memory().await.unwrap()).await;
        let (caller, entities) = (caller(), namespace.entities().clone());
        for id in ["b", "c", "d", "e"] {
            entities.add(Add::new("t").id(id)).await.unwrap();
        }
        let asked = || {
            ops(json!([
                {"require_exists": {"id": "b"}}, {"require_absent": {"id": "z"}}, {"add": {"type": "t"}},
                {"update": {"id": "c", "data": 1, "if_rev": 1}}, {"remove": {"id": "d"}},
                {"add": {"type": "t", "id": "e", "if_absent": true}},
            ]))
        };
        let (call, attempt) = Call::begin(namespace.calls(), 1).await;
        let first = Write { namespace: &namespace, caller: &caller, call: &call }.transact(asked()).await.unwrap();
        drop(attempt);
        entities.update(Update::new("b").data(7)).await.unwrap();
        entities.update(Update::new("c").data(7)).await.unwrap();
        let (call, _attempt) = Call::begin(namespace.calls(), 1).await;
        let again = Write { namespace: &namespace, caller: &caller, call: &call }.transact(asked()).await.unwrap();
        assert_eq!(json!(again), json!(first));
        let history = entities.now().await.unwrap().history("c").await.unwrap();
        assert_eq!(history.items.len(), 3, "the transaction landed once");
        assert_eq!(history.items[1].meta.author.as_deref(), Some("billing"));
    }

    #[tokio::test]
    async fn a_write_that_history_no_longer_shows_is_not_repeated() {
        let store = Store::memory().await.unwrap();
        Entities::with_history(&store, History::None).await.unwrap();
        let namespace = namespace(&store).await;
        let caller = caller();
        let (call, attempt) = Call::begin(namespace.calls(), 1).await;
        let write = Write { namespace: &namespace, caller: &caller, call: &call };
        write.commit(Transaction::new().add(Add::new("t").id("a"))).await.unwrap();
        drop(attempt);
        namespace.entities().remove("a").await.unwrap();
        // The engine lets go of the view that it has recovered from.
        while store.stats().await.unwrap().pins > 0 {
            tokio::task::yield_now().await;
        }
        while store.maintain().await.unwrap() {}
        let (call, _attempt) = Call::begin(namespace.calls(), 1).await;
        let write = Write { namespace: &namespace, caller: &caller, call: &call };
        let problem = write.landed("a").await.unwrap_err();
        assert_eq!(problem.code(), ProblemCode::OutcomeUnknown);
    }
}
