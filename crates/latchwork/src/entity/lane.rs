//! Read-change-write of one entity by many tasks of this process. They go through the entity's lane one after the
//! other. Each starts from the state that the one before it has decided, and does not wait until that is durable. So
//! their commits share syncs, and they lose races only to writers elsewhere.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::future::{Future, poll_fn};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::Shared;
use parking_lot::Mutex;
use serde_json::{Map, Value};
use tokio::sync::oneshot;

use crate::backoff::{doubled, jittered};
use crate::entity::document::EntityRecord;
use crate::entity::op::{check_subtype, object};
use crate::entity::prepare::EntityChange;
use crate::entity::transact::Understood;
use crate::entity::{Entities, EntityError, EntityId, Result};
use crate::json;
use crate::store::{self, Commit, Decided, Env, Key, Outcome, Rev};

/// An entity while it is being changed.
#[derive(Debug, Clone, PartialEq)]
pub struct Draft {
    /// Its id.
    pub id: EntityId,
    /// Its type.
    pub entity_type: Arc<str>,
    /// Its subtype. The value after the change is written.
    pub subtype: Option<Arc<str>>,
    /// The rev that the change starts from.
    pub rev: Rev,
    /// Its data. The value after the change is written.
    pub data: Value,
    /// Its metadata. The value after the change is written.
    pub metadata: Map<String, Value>,
}

/// Why a change did not happen: the entity failed, or the change itself refused.
#[derive(Debug, Clone, thiserror::Error)]
pub enum ChangeError<E> {
    /// The entity could not be read or written.
    #[error(transparent)]
    Entity(#[from] EntityError),
    /// The change itself refused.
    #[error("{0}")]
    Refused(E),
}

/// The lanes in use.
#[derive(Default)]
pub(crate) struct EntityLanes {
    /// Each with the number of callers in it.
    busy: Mutex<HashMap<EntityId, (usize, Arc<Lane>)>>,
}

/// The lane of one entity.
#[derive(Default)]
struct Lane {
    /// Held by the caller that takes a turn, within one poll.
    gate: Mutex<()>,
    state: Mutex<LaneState>,
}

#[derive(Default)]
struct LaneState {
    /// True while a caller has the turn.
    is_taken: bool,
    /// The rest of the turn's work, if it takes more than one poll.
    rest: Option<Rest>,
    left: KnownEntity,
    /// The number of commits that were sent in turns. A read before the last of them may be out of date.
    sent: u64,
}

/// The entity as the last commit leaves it, if that commit is decided and no other writer is known to have written
/// since.
type KnownEntity = Option<(Rev, EntityRecord)>;

/// The right to go next in a lane. A turn usually ends in the poll in which it began. If it must wait, every caller in
/// the lane can continue it, and it makes progress as long as any of them is polled. So a caller that is not polled
/// delays no other caller.
struct EntityTurn {
    lane: Arc<Lane>,
    left: KnownEntity,
    sent: u64,
}

/// The result of one try.
enum TryOutcome<T> {
    Landed(Rev, T),
    /// Another writer was faster.
    Outrun,
    /// It used something out of date, though the entity was not written since.
    Stale,
}

/// A commit that is decided, or that is answered because its store does not report the decision earlier.
struct SentCommit {
    understood: Understood,
    answer: Pin<Box<dyn Future<Output = store::Result<Outcome>> + Send>>,
}

/// The rest of a turn's work, which any caller can do.
type Rest = Shared<Pin<Box<dyn Future<Output = ()> + Send>>>;

/// The result of an attempt to take a turn.
enum TurnOutcome<T, E> {
    /// Another turn has work left.
    Later(Option<Rest>),
    /// The entity must be read. The number is how many commits were sent in turns before.
    Unread(u64),
    Refused(ChangeError<E>),
    /// A commit on its way. Either it is decided, or the rest of the turn's work comes first.
    Sent {
        rev: Rev,
        changed: Result<T, ChangeError<E>>,
        sent: Result<Result<SentCommit>, Unsent>,
    },
}

/// The work until a commit is decided, and the channel for the decision.
type Unsent = (Rest, oneshot::Receiver<Result<SentCommit>>);

/// A caller's place in a lane. The lane is removed with the last place.
struct LanePlace<'a> {
    lanes: &'a EntityLanes,
    id: &'a EntityId,
    lane: Arc<Lane>,
}

impl EntityLanes {
    fn enter<'a>(&'a self, id: &'a EntityId) -> LanePlace<'a> {
        let mut busy = self.busy.lock();
        let (callers, lane) = busy.entry(id.clone()).or_default();
        *callers += 1;
        LanePlace { lanes: self, id, lane: lane.clone() }
    }

    #[cfg(test)]
    pub(crate) fn is_empty(&self) -> bool {
        self.busy.lock().is_empty()
    }
}

impl Drop for LanePlace<'_> {
    fn drop(&mut self) {
        let mut busy = self.lanes.busy.lock();
        let Entry::Occupied(mut lane) = busy.entry(self.id.clone()) else { return };
        lane.get_mut().0 -= 1;
        if lane.get().0 == 0 {
            lane.remove();
            drop(busy);
            // No caller is left to do it. It holds the lane, and would keep it forever.
            let rest = self.lane.state.lock().rest.take();
            drop(rest);
        }
    }
}

impl Lane {
    fn turn(self: &Arc<Lane>) -> Option<EntityTurn> {
        let mut state = self.state.lock();
        let is_taken = std::mem::replace(&mut state.is_taken, true);
        (!is_taken).then(|| EntityTurn { lane: self.clone(), left: state.left.take(), sent: state.sent })
    }
}

impl Drop for EntityTurn {
    fn drop(&mut self) {
        let free = LaneState { is_taken: false, rest: None, left: self.left.take(), sent: self.sent };
        let over = std::mem::replace(&mut *self.lane.state.lock(), free);
        drop(over);
    }
}

impl Entities {
    /// Changes an entity in its newest state; runs `change` again on newer state if another writer was faster.
    pub(crate) async fn change<T, E>(
        &self,
        id: &EntityId,
        retries: u32,
        mut change: impl FnMut(&mut Draft) -> Result<T, E>,
    ) -> Result<(Rev, T), ChangeError<E>> {
        id.validate()?;
        let place = self.lanes().enter(id);
        let mut tries = 1;
        loop {
            match self.attempt(id, &place.lane, &mut change).await? {
                TryOutcome::Landed(rev, value) => return Ok((rev, value)),
                TryOutcome::Stale => continue,
                TryOutcome::Outrun if tries > retries => {
                    return Err(EntityError::RetriesSpent { id: id.clone(), tries }.into());
                }
                TryOutcome::Outrun if tries == 1 => {}
                TryOutcome::Outrun => self.store().env().sleep(backoff(tries, self.store().env())).await,
            }
            tries += 1;
        }
    }

    /// Changes the entity once, from the state that the lane remembers or from a read.
    async fn attempt<T, E>(
        &self,
        id: &EntityId,
        lane: &Arc<Lane>,
        change: &mut impl FnMut(&mut Draft) -> Result<T, E>,
    ) -> Result<TryOutcome<T>, ChangeError<E>> {
        let mut read = None;
        let (rev, changed, sent) = loop {
            match poll_fn(|context| Poll::Ready(self.take_turn(id, lane, &mut read, change, context))).await {
                TurnOutcome::Later(Some(rest)) => rest.await,
                TurnOutcome::Later(None) => {}
                TurnOutcome::Unread(sent) => read = Some((sent, self.newest(id).await?)),
                TurnOutcome::Refused(refused) => return Err(refused),
                TurnOutcome::Sent { rev, changed, sent } => break (rev, changed, sent),
            }
        };
        let SentCommit { understood, answer } = match sent {
            Ok(sent) => sent?,
            Err((rest, sent)) => {
                rest.await;
                sent.await.expect("the decision is sent before the rest ends")?
            }
        };
        let refusal = match (answer.await.map_err(EntityError::from)?, changed) {
            (Outcome::Applied(_), Ok(value)) => return Ok(TryOutcome::Landed(rev.next(), value)),
            (Outcome::Applied(_), Err(refused)) => return Err(refused),
            (Outcome::Refused(_), Err(_)) => return Ok(TryOutcome::Stale),
            (Outcome::Refused(refusal), Ok(_)) => refusal,
        };
        let undeclared = understood.only_undeclared(&refusal);
        match self.explain_change(refusal, &understood).await? {
            Some(error) => Err(error.into()),
            None if undeclared => Ok(TryOutcome::Stale),
            None => Ok(TryOutcome::Outrun),
        }
    }

    /// Takes a turn: runs the change and sends its commit. Only callers on other threads wait for this.
    fn take_turn<T, E>(
        &self,
        id: &EntityId,
        lane: &Arc<Lane>,
        read: &mut Option<(u64, (Rev, EntityRecord))>,
        change: &mut impl FnMut(&mut Draft) -> Result<T, E>,
        context: &mut Context<'_>,
    ) -> TurnOutcome<T, E> {
        let _gate = lane.gate.lock();
        let Some(turn) = lane.turn() else { return TurnOutcome::Later(lane.state.lock().rest.clone()) };
        let read = read.take().filter(|(sent, _)| *sent == turn.sent);
        let ((rev, record), is_durable) = match (&turn.left, read) {
            (Some(left), _) => (left.clone(), false),
            (None, Some((_, read))) => (read, true),
            (None, None) => return TurnOutcome::Unread(turn.sent),
        };
        let mut draft = Draft::of(id, rev, &record);
        let changed = change(&mut draft).map_err(ChangeError::Refused);
        let changed = changed.and_then(|value| Ok((value, draft.into_record(&record)?)));
        let (changed, change) = match changed {
            Ok((value, after)) => {
                (Ok(value), Some(EntityChange { op: 0, id: id.clone(), before: Some(record), after: Some(after) }))
            }
            Err(refused) if is_durable => return TurnOutcome::Refused(refused),
            // The change may have refused a state that does not become durable. The answer waits until that state is
            // durable.
            Err(refused) => (Err(refused), None),
        };
        let mut deciding = Box::pin(self.clone().decided(turn, self.key(id), rev, change));
        let sent = match deciding.as_mut().poll(context) {
            Poll::Ready(sent) => Ok(sent),
            Poll::Pending => {
                let (tell, told) = oneshot::channel();
                let rest: Pin<Box<dyn Future<Output = ()> + Send>> =
                    Box::pin(async move { drop(tell.send(deciding.await)) });
                let rest = rest.shared();
                lane.state.lock().rest = Some(rest.clone());
                Err((rest, told))
            }
        };
        TurnOutcome::Sent { rev, changed, sent }
    }

    /// Sends a change, or checks that the entity is at a rev. Gives the turn back when the commit is decided.
    async fn decided(
        self,
        mut turn: EntityTurn,
        key: Key,
        rev: Rev,
        change: Option<EntityChange>,
    ) -> Result<SentCommit> {
        let next = match &change {
            Some(change) => change.after.clone().map(|after| (rev.next(), after)),
            None => turn.left.clone(),
        };
        // If this returns before it has sent anything, the lane still remembers its state.
        let (commit, understood) = match change {
            Some(change) => self.prepare_change(change, rev).await?.split(),
            None => (Commit::new().at_rev(&key, rev), Understood::default()),
        };
        turn.left = None;
        turn.sent += 1;
        let decided = Decided::new();
        let (store, commit) = (self.store().clone(), commit.tell(&decided));
        let mut answer = Box::pin(async move { store.commit(commit).await });
        let answer = match until_decided(&mut answer, &decided).await {
            Poll::Pending if decided.applies() == Some(true) => {
                turn.left = next;
                return Ok(SentCommit { understood, answer });
            }
            // Refused. When the refusal is durable, the state that caused it can be read.
            Poll::Pending => answer.await,
            Poll::Ready(answer) => answer,
        };
        if matches!(answer, Ok(Outcome::Applied(_))) {
            turn.left = next;
        }
        Ok(SentCommit { understood, answer: Box::pin(std::future::ready(answer)) })
    }

    /// The entity as a new view reads it.
    async fn newest(&self, id: &EntityId) -> Result<(Rev, EntityRecord)> {
        let item = self.store().get(&self.key(id)).await?;
        let item = item.ok_or_else(|| EntityError::NotFound { id: id.clone() })?;
        Ok((item.rev, EntityRecord::of(id, &item.value)?))
    }
}

impl Draft {
    fn of(id: &EntityId, rev: Rev, record: &EntityRecord) -> Draft {
        let EntityRecord { entity_type, subtype, data, metadata, .. } = record.clone();
        Draft { id: id.clone(), entity_type, subtype, rev, data, metadata }
    }

    /// The change can set only data, metadata and the subtype.
    fn into_record(self, before: &EntityRecord) -> Result<EntityRecord> {
        let Draft { id, subtype, data, metadata, .. } = self;
        subtype.as_deref().map_or(Ok(()), check_subtype)?;
        let refuse =
            |part: &'static str, cause| EntityError::Document { id: format!("{id:?}"), part: part.into(), cause };
        json::check(&data).map_err(|cause| refuse("data", cause))?;
        let metadata = Value::Object(metadata);
        json::check(&metadata).map_err(|cause| refuse("metadata", cause))?;
        let metadata = object(metadata, &id)?;
        Ok(EntityRecord { entity_type: before.entity_type.clone(), subtype, created: before.created, data, metadata })
    }
}

/// Polls a commit until it is decided, or until it is answered if the store does not report the decision.
async fn until_decided<F: Future + Unpin>(commit: &mut F, decided: &Decided) -> Poll<F::Output> {
    poll_fn(|context| match Pin::new(&mut *commit).poll(context) {
        Poll::Ready(outcome) => Poll::Ready(Poll::Ready(outcome)),
        Poll::Pending if decided.applies().is_some() => Poll::Ready(Poll::Pending),
        Poll::Pending => Poll::Pending,
    })
    .await
}

/// A random pause that grows with every try: at most 1, 2, 4 … 32 ms.
pub(crate) fn backoff(tries: u32, env: &Env) -> Duration {
    jittered(doubled(Duration::from_millis(1), tries.min(6)), 0.0, env)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use crate::entity::{Add, Entities, EntityError, Query, Transaction, Update};
    use crate::store::Store;

    #[tokio::test]
    async fn a_lane_is_removed_with_its_last_caller() {
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

    /// The futures of all calls are `Send`, so that tasks can move between threads.
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
            view.history("a").await.unwrap();
            view.since(&view).await.unwrap();
            view.get("a").await.unwrap();
        });
    }
}
