//! The state of one running block: in memory, changed by one mutation at a time in the order of the calls. It keeps two
//! versions: what readers see, and what a checkpoint may hold, which has the changes of ended blocks only. The rules of
//! the operations are those of `state`. It does not know where checkpoints are stored.

use std::future::Future;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use futures_util::future::{Either, select};
use parking_lot::Mutex;
use serde_json::Value;

use crate::flow::checkpoint::{Checkpoint, applied, apply_held};
use crate::flow::delta::delta;
use crate::flow::schema::Shape;
use crate::state::{Changed, HeldContainers, Identity, StateError, StateOp, TimeoutOutcome, difference};
use crate::store::{Env, Rev};
use crate::workflow::Failure;
use crate::workflow::journal::place::BranchPath;

pub(crate) struct StateCell {
    /// The block instance that it belongs to.
    pub(crate) path: BranchPath,
    /// The name, for messages.
    name: String,
    shape: Arc<Shape>,
    /// Whether checkpoints are made of it, and whether the stream tells of it.
    is_durable: bool,
    is_told: bool,
    /// How many bytes a checkpoint may have.
    limit: usize,
    /// Held by the mutation that runs. Tasks get it in the order in which they asked.
    turn: tokio::sync::Mutex<()>,
    versions: Mutex<Versions>,
}

struct Versions {
    /// What readers see.
    live: Value,
    rev: u64,
    /// What a checkpoint holds: the changes of blocks that have ended. And those of them that do not fit without
    /// changes of other blocks.
    saved: Value,
    held: Vec<Vec<StateOp>>,
    /// Held changes of an earlier life that readers do not see yet.
    unseen: Vec<Vec<StateOp>>,
    /// The changes of blocks that have not ended, in order.
    since: Vec<Made>,
}

/// A change by a block that has not ended.
struct Made {
    /// The block whose trace will cover the change.
    by: BranchPath,
    ops: Vec<StateOp>,
}

/// A change, as the stream tells of it.
pub(crate) struct ToldChange {
    pub(crate) operation: &'static str,
    pub(crate) path: String,
    pub(crate) delta: Value,
    pub(crate) rev: u64,
    /// The state before and after it, without transient fields.
    pub(crate) before: Value,
    pub(crate) after: Value,
}

/// The answer of a mutation, and what the stream tells of it: nothing if only transient fields have changed, or if the
/// stream does not tell of the state.
pub(crate) type CellAnswer = (Changed, Option<ToldChange>);

impl StateCell {
    pub(crate) fn new(
        path: BranchPath,
        shape: &Arc<Shape>,
        (is_durable, is_told): (bool, bool),
        Checkpoint { state, rev, held }: Checkpoint,
        limit: usize,
    ) -> StateCell {
        let (live, unseen) = (state.clone(), held.clone());
        let versions = Versions { live, rev, saved: state, held, unseen, since: Vec::new() };
        let name = format!("the state of {:?}", path.to_string().trim_end_matches('/'));
        StateCell {
            path,
            name,
            shape: shape.clone(),
            is_durable,
            is_told,
            limit,
            turn: tokio::sync::Mutex::new(()),
            versions: Mutex::new(versions),
        }
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    /// The state as readers see it.
    pub(crate) fn read(&self) -> Value {
        self.versions.lock().live.clone()
    }

    pub(crate) fn rev(&self) -> u64 {
        self.versions.lock().rev
    }

    /// The state without its transient fields, for the stream.
    pub(crate) fn shown(&self) -> Option<Value> {
        self.is_told.then(|| self.shape.durable(&self.versions.lock().live))
    }

    fn identity(self: &Arc<StateCell>) -> Identity {
        Identity::Memory(Arc::as_ptr(self) as usize)
    }

    /// Waits for the turn of a mutation. A mutation within a mutation of the same state would wait for itself.
    async fn turn(
        self: &Arc<StateCell>,
        env: &Env,
        budget: Option<Duration>,
    ) -> Result<(tokio::sync::MutexGuard<'_, ()>, HeldContainers), StateError> {
        let held = HeldContainers::by_this_task();
        if held.has(&self.identity()) {
            return Err(StateError::ReentrantMutation { key: self.name.clone() });
        }
        let turn = within(env, budget, self.turn.lock()).await;
        let late = |waited| StateError::ScopeMutationTimeout {
            key: self.name.clone(),
            waited,
            ran: Duration::ZERO,
            outcome: TimeoutOutcome::Withdrawn,
        };
        Ok((turn.map_err(late)?, held.and(self.identity())))
    }

    /// Applies operations, all or none of them.
    pub(crate) async fn apply(
        self: &Arc<StateCell>,
        env: &Env,
        budget: Option<Duration>,
        by: &BranchPath,
        operation: &'static str,
        ops: Vec<StateOp>,
    ) -> Result<CellAnswer, StateError> {
        for op in &ops {
            op.check().map_err(|cause| StateError::Value { key: self.name.clone(), cause })?;
        }
        let _turn = self.turn(env, budget).await?;
        let mut after = Some(self.read());
        let mut value = Value::Null;
        for op in &ops {
            value = op.apply(&self.name, &mut after)?.0;
        }
        self.become_of(by, operation, ops, after, value)
    }

    /// Runs a mutator on the state. If its time is up, it is dropped and changes nothing.
    pub(crate) async fn mutate<F>(
        self: &Arc<StateCell>,
        env: &Env,
        budget: Option<Duration>,
        by: &BranchPath,
        mutator: impl FnOnce(Value) -> F,
    ) -> Result<CellAnswer, Failure>
    where
        F: Future<Output = Result<Value, Failure>>,
    {
        let began = env.monotonic();
        let (_turn, held) = self.turn(env, budget).await?;
        let waited = env.monotonic().saturating_sub(began);
        let before = self.read();
        let running = held.during(mutator(before.clone()));
        let left = budget.map(|budget| budget.saturating_sub(waited));
        let late = |ran| StateError::ScopeMutationTimeout {
            key: self.name.clone(),
            waited,
            ran,
            outcome: TimeoutOutcome::Withdrawn,
        };
        let after = within(env, left, running).await.map_err(late)??;
        let ops = delta(&before, &after);
        Ok(self.become_of(by, "atomic_state", ops, Some(after.clone()), after)?)
    }

    /// Makes the change, if it changes anything and the result fits.
    fn become_of(
        &self,
        by: &BranchPath,
        operation: &'static str,
        ops: Vec<StateOp>,
        after: Option<Value>,
        value: Value,
    ) -> Result<CellAnswer, StateError> {
        let after = after.unwrap_or_default();
        let mut versions = self.versions.lock();
        if versions.live == after {
            let changed = Changed { value, rev: Rev(versions.rev), changed: false, repeated: false };
            return Ok((changed, None));
        }
        let misfit = |message| StateError::Mismatch { key: self.name.clone(), message };
        self.shape.check(&after).map_err(misfit)?;
        let length = self.shape.durable(&after).to_string().len();
        if self.is_durable && length > self.limit {
            return Err(StateError::TooLarge { key: self.name.clone(), length, limit: self.limit });
        }
        let rev = versions.rev + 1;
        let told = self.told(operation, &ops, (&versions.live, &after), rev);
        (versions.rev, versions.live) = (rev, after);
        versions.since.push(Made { by: by.clone(), ops });
        let Versions { live, unseen, .. } = &mut *versions;
        apply_held(&self.name, &self.shape, live, unseen);
        let changed = Changed { value, rev: Rev(rev), changed: true, repeated: false };
        Ok((changed, told))
    }

    /// What the stream tells of a change: the operation's argument without transient fields.
    fn told(
        &self,
        operation: &'static str,
        ops: &[StateOp],
        (before, after): (&Value, &Value),
        rev: u64,
    ) -> Option<ToldChange> {
        if !self.is_told {
            return None;
        }
        let (before, after) = (self.shape.durable(before), self.shape.durable(after));
        if before == after {
            return None;
        }
        let (path, delta) = match ops {
            [
                op @ (StateOp::Increment(..) | StateOp::Push(..) | StateOp::SetRecord(..) | StateOp::DeleteRecord(..)),
            ] if operation != "atomic_state" => {
                let event = op.event(operation);
                (event.path, event.delta)
            }
            _ => (String::new(), difference(Some(&before), Some(&after))),
        };
        Some(ToldChange { operation, path, delta, rev, before, after })
    }

    /// A block has ended: the checkpoint takes over its changes. Returns the new checkpoint, if it has changed.
    pub(crate) fn settle(&self, block: &BranchPath) -> Option<Checkpoint> {
        self.adopt(|by| by == block)
    }

    /// Blocks were given up, and do not run again: what they have changed stays.
    pub(crate) fn settle_where(&self, is_lost: impl Fn(&BranchPath) -> bool) -> Option<Checkpoint> {
        self.adopt(is_lost)
    }

    fn adopt(&self, is_over: impl Fn(&BranchPath) -> bool) -> Option<Checkpoint> {
        let mut versions = self.versions.lock();
        let Versions { live, rev, saved, held, unseen, since } = &mut *versions;
        let over: Vec<Made> = since.extract_if(.., |made| is_over(&made.by)).collect();
        if over.is_empty() {
            return None;
        }
        held.extend(over.into_iter().map(|made| made.ops));
        if since.is_empty() && unseen.is_empty() {
            // Once all blocks have ended, the order of the calls counts, as readers see it.
            saved.clone_from(live);
            held.clear();
        } else if applied(&self.name, &self.shape, saved, &held.concat()) {
            held.clear();
        } else {
            apply_held(&self.name, &self.shape, saved, held);
        }
        let (state, rev, held) = (self.shape.durable(saved), *rev, held.clone());
        self.is_durable.then_some(Checkpoint { state, rev, held })
    }
}

/// Runs a future within a time limit. Otherwise returns how long it has run.
async fn within<T>(env: &Env, limit: Option<Duration>, future: impl Future<Output = T>) -> Result<T, Duration> {
    let Some(limit) = limit else { return Ok(future.await) };
    let mut future = std::pin::pin!(future);
    // In most cases nothing has to be waited for, and no timer is set.
    let at_once = std::future::poll_fn(|context| Poll::Ready(future.as_mut().poll(context)));
    if let Poll::Ready(value) = at_once.await {
        return Ok(value);
    }
    match select(future, env.sleep(limit)).await {
        Either::Left((value, _)) => Ok(value),
        Either::Right(..) => Err(limit),
    }
}
