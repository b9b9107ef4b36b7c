//! Read, change, write of one entity by many tasks of this process. They go through the entity's lane one after the
//! other, each on what the one before it has decided and without waiting until that is durable: so their commits share
//! syncs, and they lose races only to writers elsewhere.

use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::{Map, Value};

use crate::backoff::{doubled, jittered};
use crate::entity::document::Record;
use crate::entity::op::object;
use crate::entity::prepare::Change;
use crate::entity::{Entities, EntityError, EntityId, Result};
use crate::json;
use crate::record::Record as _;
use crate::store::{Commit, Decided, Env, Outcome, Rev};

/// An entity while it is being changed.
#[derive(Debug, Clone, PartialEq)]
pub struct Draft {
    /// Its name.
    pub id: EntityId,
    /// What kind of thing it is.
    pub entity_type: Arc<str>,
    /// The rev that the change starts from.
    pub rev: Rev,
    /// What it says; what this holds afterwards is written.
    pub data: Value,
    /// What is said of it; what this holds afterwards is written.
    pub metadata: Map<String, Value>,
}

/// Why a change did not happen: for a reason of the entity's or of the change's own.
#[derive(Debug, Clone, thiserror::Error)]
pub enum ChangeError<E> {
    /// It could not be read or written.
    #[error(transparent)]
    Entity(#[from] EntityError),
    /// The change itself refused.
    #[error("{0}")]
    Refused(E),
}

/// The lanes in use.
#[derive(Default)]
pub(crate) struct Lanes {
    busy: Mutex<HashMap<EntityId, Arc<Lane>>>,
}

/// What the last one in the lane has left: the entity as it will be, if its commit is decided and nothing else came.
type Lane = tokio::sync::Mutex<Option<(Rev, Record)>>;

/// The right to go next in a lane.
type Turn<'a> = tokio::sync::MutexGuard<'a, Option<(Rev, Record)>>;

/// What became of one try.
enum Attempt<'a, T> {
    Landed(Rev, T),
    /// Somebody else was faster.
    Outrun(Turn<'a>),
    /// It went by what is no longer so, though nobody has written the entity since.
    Stale(Turn<'a>),
}

/// A place in a lane; the lane goes away with its last one.
struct Place<'a> {
    lanes: &'a Lanes,
    id: &'a EntityId,
    lane: Arc<Lane>,
}

impl Lanes {
    fn enter<'a>(&'a self, id: &'a EntityId) -> Place<'a> {
        let lane = self.busy.lock().entry(id.clone()).or_default().clone();
        Place { lanes: self, id, lane }
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.busy.lock().is_empty()
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        let mut busy = self.lanes.busy.lock();
        // The map's and this one: nobody can get another while the map is locked.
        if Arc::strong_count(&self.lane) == 2 {
            busy.remove(self.id);
        }
    }
}

impl Entities {
    /// Changes an entity on its newest state; runs `change` again on newer state when somebody else was faster.
    pub(crate) async fn change<T, E>(
        &self,
        id: &EntityId,
        retries: u32,
        mut change: impl FnMut(&mut Draft) -> Result<T, E>,
    ) -> Result<(Rev, T), ChangeError<E>> {
        id.validate()?;
        let place = self.lanes().enter(id);
        let mut tries = 0;
        let mut turn = place.lane.lock().await;
        loop {
            tries += 1;
            turn = match self.attempt(id, turn, &mut change).await? {
                Attempt::Landed(rev, value) => return Ok((rev, value)),
                Attempt::Stale(turn) => {
                    tries -= 1;
                    turn
                }
                Attempt::Outrun(_) if tries > retries => {
                    return Err(EntityError::RetriesSpent { id: id.clone(), tries }.into());
                }
                Attempt::Outrun(turn) if tries == 1 => turn,
                Attempt::Outrun(turn) => {
                    drop(turn);
                    self.store().env().sleep(backoff(tries, self.store().env())).await;
                    place.lane.lock().await
                }
            };
        }
    }

    /// Changes the entity once, on what was left in the lane or on what can be read.
    async fn attempt<'a, T, E>(
        &self,
        id: &EntityId,
        mut turn: Turn<'a>,
        change: &mut impl FnMut(&mut Draft) -> Result<T, E>,
    ) -> Result<Attempt<'a, T>, ChangeError<E>> {
        // What was left stays there if this one gives up before it has decided anything.
        let ((rev, record), is_durable) = match &*turn {
            Some(left) => (left.clone(), false),
            None => (self.newest(id).await?, true),
        };
        let mut draft = Draft::of(id, rev, &record);
        let changed = change(&mut draft).map_err(ChangeError::Refused);
        let changed = changed.and_then(|value| Ok((value, draft.into_record(&record)?)));
        let (value, after) = match changed {
            Ok(changed) => changed,
            Err(refused) if is_durable || self.is_at(id, rev).await? => return Err(refused),
            // What it refused is not how things are.
            Err(_) => {
                *turn = None;
                return Ok(Attempt::Stale(turn));
            }
        };
        let next = (rev.next(), after.clone());
        let change = Change { op: 0, id: id.clone(), before: Some(record), after: Some(after) };
        let (commit, understood) = self.prepare_change(change, rev).await?.split();
        let decided = Decided::new();
        let mut commit = Box::pin(self.store().commit(commit.tell(&decided)));
        let outcome = match until_decided(&mut commit, &decided).await {
            Poll::Pending if decided.applies() == Some(true) => {
                *turn = Some(next);
                drop(turn);
                let outcome = commit.await.map_err(EntityError::from)?;
                // A backend that tells one thing and does another is no ground to go on from.
                outcome.applied().map_err(|_| EntityError::Contended { tries: 1 })?;
                return Ok(Attempt::Landed(rev.next(), value));
            }
            // Refused: when that is certain, the state it was decided on can be read.
            Poll::Pending => commit.await,
            Poll::Ready(outcome) => outcome,
        };
        *turn = None;
        match outcome.map_err(EntityError::from)? {
            Outcome::Applied(_) => {
                *turn = Some(next);
                Ok(Attempt::Landed(rev.next(), value))
            }
            Outcome::Refused(refusal) => {
                let undeclared = understood.only_undeclared(&refusal);
                match self.explain_change(refusal, &understood).await? {
                    Some(error) => Err(error.into()),
                    None if undeclared => Ok(Attempt::Stale(turn)),
                    None => Ok(Attempt::Outrun(turn)),
                }
            }
        }
    }

    /// Whether the entity is at a rev; answered when that is durable.
    async fn is_at(&self, id: &EntityId, rev: Rev) -> Result<bool> {
        Ok(self.store().commit(Commit::new().at_rev(&self.key(id), rev)).await?.is_applied())
    }

    /// The entity as everybody can read it.
    async fn newest(&self, id: &EntityId) -> Result<(Rev, Record)> {
        let item = self.store().view().await?.get(&self.key(id)).await?;
        let item = item.ok_or_else(|| EntityError::NotFound { id: id.clone() })?;
        let record = Record::decode(&item.value).map_err(|why| why.at(format!("entity {id:?}")))?;
        Ok((item.rev, record))
    }
}

impl Draft {
    fn of(id: &EntityId, rev: Rev, record: &Record) -> Draft {
        let Record { entity_type, data, metadata, .. } = record.clone();
        Draft { id: id.clone(), entity_type, rev, data, metadata }
    }

    /// Only data and metadata are the change's to choose.
    fn into_record(self, before: &Record) -> Result<Record> {
        let Draft { id, data, metadata, .. } = self;
        let refuse = |part, cause| EntityError::Document { id: format!("{id:?}"), part, cause };
        json::check(&data).map_err(|cause| refuse("data", cause))?;
        let metadata = Value::Object(metadata);
        json::check(&metadata).map_err(|cause| refuse("metadata", cause))?;
        let metadata = object(metadata, &id)?;
        Ok(Record { entity_type: before.entity_type.clone(), created: before.created, data, metadata })
    }
}

/// Drives a commit until it is known how it is decided, or further if that is not told.
async fn until_decided<F: Future + Unpin>(commit: &mut F, decided: &Decided) -> Poll<F::Output> {
    std::future::poll_fn(|context| match std::pin::Pin::new(&mut *commit).poll(context) {
        Poll::Ready(outcome) => Poll::Ready(Poll::Ready(outcome)),
        Poll::Pending if decided.applies().is_some() => Poll::Ready(Poll::Pending),
        Poll::Pending => Poll::Pending,
    })
    .await
}

/// A while of chance length, longer with every try: up to 1, 2, 4 … and 32 ms at the most.
pub(crate) fn backoff(tries: u32, env: &Env) -> Duration {
    jittered(doubled(Duration::from_millis(1), tries.min(6)), 0.0, env)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::entity::{Add, Entities, EntityError, Query, Transaction, Update};
    use crate::store::Store;

    #[tokio::test]
    async fn a_lane_goes_away_with_its_last_one() {
        let entities = Entities::on(&Store::memory().await.unwrap()).await.unwrap();
        entities.add(Add::new("t").id("a").data(json!(0))).await.unwrap();
        let tasks = (0..20).map(|task| {
            let entities = entities.clone();
            tokio::spawn(async move {
                let changed = entities.update_with("a", 5, |draft| draft.data = json!(task)).await;
                let missing = entities.update_with("b", 5, |draft| draft.data = json!(task)).await;
                assert!(changed.is_ok() && matches!(missing, Err(EntityError::NotFound { .. })));
            })
        });
        for task in tasks.collect::<Vec<_>>() {
            task.await.unwrap();
        }
        drop(entities.update_with("a", 5, |_| {}));
        assert!(entities.lanes().is_empty());
    }

    /// Whatever can be called can be called from a task that moves between threads.
    #[allow(dead_code, clippy::let_underscore_future)]
    fn every_future_can_be_sent(entities: &Entities) {
        fn send(_: impl Send) {}
        send(entities.add(Add::new("t")));
        send(entities.update(Update::new("t")));
        send(entities.update_with("a", 1, |_| {}));
        send(entities.transact(Transaction::new()));
        send(entities.add_if_missing(&Query::all(), Add::new("t")));
        send(entities.find(&Query::all()));
        send(entities.declare(crate::entity::TypeSpec::new("t")));
        send(entities.undeclare(crate::entity::TypeSpec::new("t")));
        send(async {
            let view = entities.now().await.unwrap();
            view.history("a", 1).await.unwrap();
            view.since(&view).await.unwrap();
            view.get("a").await.unwrap();
        });
    }
}
