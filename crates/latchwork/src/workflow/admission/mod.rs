//! Admission decides which starts of a workflow run, wait, are gathered or are rejected, as its definition says.
//!
//! The commit that starts an execution, or takes it out of a queue, also takes its permit. The commit that ends the
//! execution returns it. So a limit is never exceeded and no permit leaks. No counts are kept in memory: each decision
//! is made on a view, and the commit checks the records that the decision depends on.

mod book;
mod gather;
mod lane;
pub(crate) mod policy;
mod queue;
mod starter;
pub(crate) mod stored;
mod tidy;

use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tokio::sync::{Notify, oneshot};

use crate::lane::{Lanes, Part, Turn};
use crate::node::Node;
use crate::store::{Commit, ErrorKind, Order, Outcome, StoreError, View};
use crate::workflow::definition::Definition;
use crate::workflow::engine::spans::Birth;
use crate::workflow::engine::{Engine, EngineInner};
use crate::workflow::stored::record::{Admission, Execution, StoredStatus};
use crate::workflow::{ExecutionId, Result, WorkflowError};

use book::gate_at;
pub(crate) use book::{Book, Ruling};
pub(crate) use gather::list;
use lane::{AdmissionJob, EndJob, StartJob, Starter};
pub(crate) use policy::{Policy, StartNeeds};
pub(crate) use starter::StoredStart;
use stored::{Gate, Gates, Partition};
pub(crate) use tidy::keep;

/// The pause after the store did not serve.
const AGAIN: Duration = Duration::from_millis(100);

/// A start that was accepted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Started {
    pub(crate) id: ExecutionId,
    /// The number of its input in a batch.
    pub(crate) item: Option<u32>,
}

impl From<ExecutionId> for Started {
    fn from(id: ExecutionId) -> Started {
        Started { id, item: None }
    }
}

/// The lane that commits the end of an execution, and the limits whose permits the execution holds.
pub(crate) struct EndLane {
    lane: Partition,
    permits: Vec<Partition>,
}

/// How much of a limit is used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct LimitUse {
    /// How many executions hold a permit.
    pub used: u64,
    /// How many executions wait for one.
    pub waiting: u64,
}

/// The position of an execution that waits for a permit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct QueuePosition {
    /// The limit's key, or the workflow's name.
    pub key: String,
    /// How many executions are before it, at most 10,000.
    pub ahead: u64,
    /// How many executions hold a permit.
    pub used: u64,
    /// How many may hold one, as of the last admission.
    pub limit: u32,
}

/// How many positions of a queue are counted.
const COUNTED: usize = 10_000;

impl QueuePosition {
    pub(crate) async fn of(
        gates: &Gates,
        view: &View,
        id: &ExecutionId,
        execution: &Execution,
    ) -> Result<Option<QueuePosition>> {
        let admission = execution.admission.as_ref().filter(|_| !execution.status.is_terminal());
        let Some((partition, position)) = admission.and_then(|it| it.queued(&execution.workflow)) else {
            return Ok(None);
        };
        let (gate, LimitUse { used, .. }) = limit_use(gates, view, &partition).await?;
        let before = gates.queue_from(&partition, gate.head).before(&gates.position(&partition, position, id));
        let ahead = match before.is_empty() {
            true => 0,
            false => view.scan(&before, Order::Ascending, COUNTED).await?.len() as u64,
        };
        let key = partition.key().unwrap_or(partition.workflow()).to_string();
        Ok(Some(QueuePosition { key, ahead, used, limit: gate.limit }))
    }
}

/// Reads from a view how much of a limit is used.
async fn limit_use(gates: &Gates, view: &View, partition: &Partition) -> Result<(Gate, LimitUse)> {
    let Some((gate, _, ended, left)) = gate_at(gates, view, partition).await? else { return Ok(Default::default()) };
    let used = gate.held.saturating_sub(ended.len() as u64);
    let waiting = gate.waiting.saturating_sub(left.len() as u64);
    Ok((gate, LimitUse { used, waiting }))
}

/// Admits starts.
pub(crate) struct Admissions {
    engine: OnceLock<Weak<EngineInner>>,
    node: Arc<Node>,
    lanes: Lanes<Admissions>,
    /// Limits with returned permits, and buckets in use. Their records may no longer be needed.
    used: Mutex<BTreeSet<Partition>>,
    untidy: Notify,
}

impl Admissions {
    pub(crate) fn new(node: &Arc<Node>) -> Arc<Admissions> {
        Arc::new(Admissions {
            engine: OnceLock::new(),
            node: node.clone(),
            lanes: Lanes::default(),
            used: Mutex::default(),
            untidy: Notify::new(),
        })
    }

    /// Sets the engine to serve.
    pub(crate) fn serve(&self, engine: Weak<EngineInner>) {
        let _ = self.engine.set(engine);
    }

    fn engine(&self) -> Option<Arc<EngineInner>> {
        self.engine.get()?.upgrade()
    }

    /// Decides a start, and stores it if it is accepted. Returns none if the starter itself stopped it.
    pub(crate) async fn start(
        self: &Arc<Admissions>,
        definition: &Definition,
        asked: StartNeeds,
        id: &ExecutionId,
        first: Execution,
        starter: Starter,
    ) -> Result<Option<Started>> {
        let lane = definition.policy.lane_of(&definition.name, &asked);
        let (answer, answered) = oneshot::channel();
        let job = StartJob { asked, id: id.clone(), first, decided: None, starter, answer };
        Lanes::submit(self, &lane, AdmissionJob::Start(Box::new(job))).map_err(|_| WorkflowError::Stopped)?;
        answered.await.ok().transpose()
    }

    /// The lane that commits the end of an execution, if other executions may wait for its permits. The same commit
    /// then admits the next of them.
    pub(crate) fn lane_of_end(&self, before: &Execution) -> Option<EndLane> {
        let engine = self.engine()?;
        let policy = &engine.definition(&before.workflow)?.policy;
        let permits: Vec<Partition> =
            before.admission.iter().flat_map(|it| it.held(&before.workflow)).map(|(it, _)| it).collect();
        let lane = policy.lane(permits.first().filter(|_| policy.queues())?);
        permits.iter().all(|partition| policy.lane(partition) == lane).then_some(EndLane { lane, permits })
    }

    /// Commits the end of an execution and admits the next execution of the queue with it. Returns none if the lane
    /// cannot serve.
    pub(crate) async fn end(
        self: &Arc<Admissions>,
        EndLane { lane, permits }: EndLane,
        commit: Commit,
    ) -> Option<Result<Outcome, StoreError>> {
        let (answer, answered) = oneshot::channel();
        let job = EndJob { permits, commit, first: (0, 0), answer };
        Lanes::submit(self, &lane, AdmissionJob::End(Box::new(job))).ok()?;
        answered.await.ok()
    }

    /// Keeps the lane of a start from making commits while the start is decided elsewhere.
    pub(crate) async fn turn(self: &Arc<Admissions>, definition: &Definition, asked: &StartNeeds) -> Option<Turn> {
        Lanes::turn(self, &definition.policy.lane_of(&definition.name, asked)).await
    }

    /// Admits the next execution of a queue if there is room.
    fn look_at(self: &Arc<Admissions>, queue: &Partition) {
        let definition = self.engine().and_then(|engine| engine.definition(queue.workflow()).cloned());
        if let Some(definition) = definition {
            let _ = Lanes::submit(self, &definition.policy.lane(queue), AdmissionJob::Next(queue.clone()));
        }
    }

    /// Turns decisions into a part of a commit that is made elsewhere. After that commit, the queues are looked at: a
    /// start that entered one may have missed a permit that was returned meanwhile.
    pub(crate) fn looking_later(self: &Arc<Admissions>, book: Book<'_>) -> Part {
        let (admissions, queues) = (self.clone(), book.queued.clone());
        book.into_part().then(move |_| queues.iter().for_each(|queue| admissions.look_at(queue)))
    }

    /// Called when permits were returned or positions in queues were left.
    fn given_back(self: &Arc<Admissions>, partitions: &[Partition]) {
        let Some(engine) = self.engine() else { return };
        for partition in partitions {
            let definition = engine.definition(partition.workflow());
            if definition.is_some_and(|definition| definition.policy.queues()) {
                self.look_at(partition);
            }
            self.note(partition.clone());
        }
    }

    /// Looks at all queues in the shards of this node. An earlier process may have crashed between the end of an
    /// execution and the admission of the next, and a limit may have been raised.
    pub(crate) async fn look_at_all(self: &Arc<Admissions>) -> Result<()> {
        let Some(engine) = self.engine() else { return Ok(()) };
        let gates = engine.spaces.gates();
        for shard in self.node.owned() {
            let mut rest = gates.queues(shard);
            while let Some((key, _)) = engine.store.view().await?.scan(&rest, Order::Ascending, 1).await?.pop() {
                rest = rest.after(&key);
                if let Some(queue) = Gates::read_partition(&key) {
                    self.look_at(&queue);
                    rest = rest.after(&gates.end_of_queue(&queue));
                }
            }
        }
        Ok(())
    }
}

/// Looks at all queues once. Retries as long as the store does not serve.
pub(crate) async fn look_once(engine: Weak<EngineInner>) {
    while let Some(inner) = engine.upgrade().filter(|inner| !inner.is_stopped()) {
        match inner.admissions.look_at_all().await {
            Err(error) if error.kind() == ErrorKind::Unavailable => {}
            Err(error) => return tracing::error!(%error, "not all queues of starts could be looked at"),
            Ok(()) => return,
        }
        let pause = inner.store.env().sleep(AGAIN);
        drop(inner);
        pause.await;
    }
}

impl EngineInner {
    /// What the end of an execution returns: its permits, and its position in a queue.
    pub(crate) fn giving_back(self: &Arc<EngineInner>, id: &ExecutionId, before: &Execution) -> Option<Part> {
        let admission: &Admission = before.admission.as_deref()?;
        let (gates, admissions) = (self.spaces.gates(), self.admissions.clone());
        let (mut part, mut partitions) = (Part::default(), Vec::new());
        for (partition, permit) in admission.held(&before.workflow) {
            part = part.put(&gates.ended(&partition, permit), Vec::new());
            partitions.push(partition);
        }
        if let Some((partition, position)) = admission.queued(&before.workflow) {
            part = part
                .delete(&gates.position(&partition, position, id))
                .put(&gates.left(&partition, position), Vec::new());
            partitions.push(partition);
        }
        let is_any = !partitions.is_empty();
        is_any.then(|| part.then(move |_| admissions.given_back(&partitions)))
    }

    /// True if a start would run at once. Returns the error of a start that would be rejected. Commits nothing.
    pub(crate) async fn would_run(
        self: &Arc<EngineInner>,
        definition: &Definition,
        asked: &StartNeeds,
    ) -> Result<bool> {
        if asked.gathers.is_some() {
            return Ok(false);
        }
        let mut first = Execution { workflow: definition.name.clone(), ..Execution::default() };
        let mut book = Book::new(self).await?;
        match book.decide(&definition.policy, asked, &ExecutionId::from(""), &mut first).await? {
            Ruling::Rejected(error) => Err(error),
            _ => Ok(first.status == StoredStatus::Running),
        }
    }

    /// Decides a start whose commit is made elsewhere. Returns the part for that commit, and the turn that keeps other
    /// starts of the same limits undecided until the commit is answered.
    pub(crate) async fn admitting(
        self: &Arc<EngineInner>,
        definition: &Definition,
        asked: &StartNeeds,
        id: &ExecutionId,
        first: &mut Execution,
    ) -> Result<(Part, Option<Turn>)> {
        let turn = self.admissions.turn(definition, asked).await;
        let mut book = Book::new(self).await?;
        match book.decide(&definition.policy, asked, id, first).await? {
            Ruling::Rejected(error) => Err(error),
            _ => Ok((self.admissions.looking_later(book), turn)),
        }
    }

    /// Ends an execution that waits in a queue. None of its code runs.
    pub(crate) async fn leave_queue(
        self: &Arc<EngineInner>,
        id: &ExecutionId,
        before: Execution,
        rev: crate::store::Rev,
        status: StoredStatus,
        tells_parent: bool,
    ) -> Result<Part> {
        use crate::workflow::run::close::How;
        let mut ended = before.clone();
        if !tells_parent {
            ended.parent = None;
        }
        let closing =
            self.closing(id, &ended, Some(&status), How { from_store: true, is_alone: true, ..How::default() }).await?;
        let mut after = Execution { status: status.clone(), timer_us: None, waits: Vec::new(), ..before.clone() };
        let part = self.at_record(id, Some(rev));
        let (part, due) = crate::workflow::run::with_record(self, part, id, Some(&before), &mut after, None);
        let part = closing.parts.into_iter().fold(part, Part::and);
        let (engine, id, birth) = (self.clone(), id.clone(), Birth::of(&before));
        Ok(part.then(move |_| {
            due.into_iter().for_each(|due| engine.removals.set(&id, due));
            engine.tell_end(&id, &birth, &status);
            engine.ended(&id, Some(status), false);
            engine.forget_callers(&id);
        }))
    }

    /// Ends an execution whose time in a queue is over.
    pub(crate) fn time_out_in_queue(
        self: &Arc<EngineInner>,
        id: &ExecutionId,
        before: Execution,
        rev: crate::store::Rev,
    ) {
        let (engine, id) = (self.clone(), id.clone());
        self.node.runtime.spawn(async move {
            let part = engine.leave_queue(&id, before, rev, StoredStatus::TimedOut, true).await;
            let left = match part {
                Ok(part) => engine.send(part).await.map(|sent| sent.is_some()),
                Err(error) => Err(error),
            };
            match left {
                Ok(true) => {}
                // It was admitted or changed meanwhile, so it is looked at again.
                Ok(false) => engine.spawn_load(&id),
                Err(error) => {
                    tracing::warn!(%id, %error, "an execution could not leave its queue yet, retrying");
                    engine.timers.look_again();
                }
            }
        });
    }
}

impl Engine {
    /// How much of a workflow's limit is used: of this key, or of the workflow as a whole.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::store::Store;
    /// # use latchwork::workflow::{Ctx, Engine, workflow};
    /// let nightly = workflow("nightly").concurrency(1).run(async |ctx: Ctx, (): ()| {
    ///     ctx.sleep(std::time::Duration::from_secs(3600)).await
    /// });
    /// # let engine = Engine::on(&Store::memory().await?).register(&nightly).start().await?;
    /// engine.start(&nightly, ()).await?;
    /// assert_eq!(engine.limit_use("nightly", None).await?.used, 1);
    /// let error = engine.start(&nightly, ()).await.unwrap_err();
    /// assert_eq!(error.to_string(), "workflow \"nightly\" runs 1 of 1 times for \"nightly\"; the limit is reached");
    /// # Ok(()) }
    /// ```
    pub async fn limit_use(&self, workflow: &str, key: Option<&str>) -> Result<LimitUse> {
        let (view, gates) = (self.inner.store.view().await?, self.inner.spaces.gates());
        Ok(limit_use(gates, &view, &Partition::new(workflow, key)).await?.1)
    }
}
