//! Decides starts on one view: which are admitted, wait, are delayed or are rejected. Builds the part of a commit that
//! stores these decisions. The part checks each record that a decision depends on. It does not check the notes of
//! permits that were returned since: a returned permit only makes more room.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::lane::{Part, Tag};
use crate::record::Record;
use crate::store::{Bytes, Check, Key, Order, Range, Rev, Timestamp, View, Write};
use crate::workflow::admission::policy::{Policy, StartNeeds};
use crate::workflow::admission::stored::{Bucket, Gate, Gates, Partition};
use crate::workflow::engine::EngineInner;
use crate::workflow::run::{Run, with_record};
use crate::workflow::stored::kept::Inputs;
use crate::workflow::stored::record::{
    Admission, Execution, Keyed, Needed, StoredPosition, StoredStatus, Wait, WaitsFor, fetch,
};
use crate::workflow::{ExecutionId, Result, WorkflowError};

/// Names the checks of the records that a decision depends on.
pub(crate) const GATE: Tag = Tag("gate");

/// The decisions about starts on one view, and what a commit writes for them.
pub(crate) struct Book<'a> {
    pub(super) engine: &'a Arc<EngineInner>,
    pub(super) view: View,
    pub(super) now: Timestamp,
    /// Boxed, because a map reserves room for eleven entries and most books have one.
    gates: BTreeMap<Partition, Box<Open>>,
    buckets: BTreeMap<Partition, Filled>,
    /// Stored executions that a decision changes: the record before, its rev, and the record after.
    pub(super) changed: BTreeMap<ExecutionId, ChangedExecution>,
    /// Further writes and checks.
    pub(super) writes: BTreeMap<Key, Option<Bytes>>,
    pub(super) checks: Vec<Check>,
    /// The queues that got new starts.
    pub(super) queued: Vec<Partition>,
    /// By partition, the check that no other execution gathers under this key.
    pub(super) gatherings: BTreeMap<Partition, Check>,
    /// Partitions whose gathering execution begins or is replaced in this commit. Further starts wait for the next
    /// commit.
    pub(super) settled: BTreeSet<Partition>,
    /// The records under the idempotency keys of gathered starts.
    pub(super) keyed: BTreeMap<Key, Keyed>,
    /// New inputs of batches, and the number of the first of them.
    pub(super) inputs: BTreeMap<ExecutionId, (u32, Vec<String>)>,
}

/// A bucket after the decisions so far.
struct Filled {
    rev: Option<Rev>,
    bucket: Bucket,
    is_changed: bool,
}

/// A stored execution, before and after its change.
pub(super) struct ChangedExecution {
    pub(super) before: Execution,
    pub(super) rev: Rev,
    pub(super) after: Execution,
}

/// A gate after the decisions so far.
#[derive(Default)]
pub(super) struct Open {
    rev: Option<Rev>,
    pub(super) gate: Gate,
    /// Notes of returned permits, if they were read; and notes of positions in the queue that were left.
    ended: Option<Vec<Key>>,
    pub(super) left: Vec<Key>,
    pub(super) flows: BTreeMap<String, u64>,
    pub(super) is_changed: bool,
}

impl Open {
    /// The next number of a permit or a position.
    fn number(&mut self) -> u64 {
        self.gate.numbers += 1;
        self.is_changed = true;
        self.gate.numbers
    }

    /// Returns the gate as it is written, and the notes that this write deletes.
    fn settled(&self) -> (Gate, impl Iterator<Item = &Key>) {
        let few = |notes: &'_ [Key]| notes.len().min(MOST_NOTES);
        let ended = self.ended.as_deref().unwrap_or_default();
        let (ended, left) = (&ended[..few(ended)], &self.left[..few(&self.left)]);
        let held = self.gate.held.saturating_sub(ended.len() as u64);
        let waiting = self.gate.waiting.saturating_sub(left.len() as u64);
        (Gate { held, waiting, ..self.gate.clone() }, ended.iter().chain(left))
    }

    /// Adds a position to the queue.
    pub(super) fn enqueue(&mut self, rank: u64) -> StoredPosition {
        self.gate.waiting += 1;
        self.gate.highest = self.gate.highest.max(rank);
        let position = StoredPosition { rank, number: self.number() };
        self.gate.head = self.gate.head.min(position);
        position
    }

    /// The number of permits that are held; an upper bound until the notes are read.
    fn used(&self) -> u64 {
        self.gate.held.saturating_sub(self.ended.as_ref().map_or(0, Vec::len) as u64)
    }

    pub(super) fn waiting(&self) -> u64 {
        self.gate.waiting.saturating_sub(self.left.len() as u64)
    }
}

/// The decision about a start.
#[derive(Debug)]
pub(crate) enum Ruling {
    /// The execution is stored: it runs, waits in a queue or for a time, or gathers. In a batch, the number is that of
    /// its input.
    Starts(Option<u32>),
    /// The start joins an execution that gathers. In a batch, the number is that of its input.
    Joins(ExecutionId, Option<u32>),
    Rejected(WorkflowError),
    /// It cannot be decided in this commit.
    Later,
}

/// How many notes of each kind one commit deletes.
const MOST_NOTES: usize = 500;

/// Returns the notes of a range. Reads nothing if `most` is 0.
async fn notes(view: &View, range: &Range, most: u64) -> Result<Vec<Key>> {
    if most == 0 {
        return Ok(Vec::new());
    }
    Ok(view.scan(range, Order::Ascending, usize::MAX).await?.into_iter().map(|(key, _)| key).collect())
}

async fn fetch_gate(gates: &Gates, view: &View, at: &Partition) -> Result<Option<(Gate, Rev)>> {
    let found = fetch::<Gate>(view, &gates.gate(at), || format!("limit {at:?}")).await?;
    Ok(found.map(|(gate, item)| (gate, item.rev)))
}

/// Reads a gate and its notes from a view.
pub(super) async fn gate_at(
    gates: &Gates,
    view: &View,
    at: &Partition,
) -> Result<Option<(Gate, Rev, Vec<Key>, Vec<Key>)>> {
    let Some((gate, rev)) = fetch_gate(gates, view, at).await? else { return Ok(None) };
    let [ended, left] = gates.notes(at);
    let (ended, left) = (notes(view, &ended, gate.held).await?, notes(view, &left, gate.waiting).await?);
    Ok(Some((gate, rev, ended, left)))
}

impl<'a> Book<'a> {
    pub(crate) async fn new(engine: &'a Arc<EngineInner>) -> Result<Book<'a>> {
        let view = engine.store.view().await?;
        Ok(Book {
            engine,
            view,
            now: engine.store.env().now(),
            gates: BTreeMap::new(),
            buckets: BTreeMap::new(),
            changed: BTreeMap::new(),
            writes: BTreeMap::new(),
            checks: Vec::new(),
            queued: Vec::new(),
            gatherings: BTreeMap::new(),
            settled: BTreeSet::new(),
            keyed: BTreeMap::new(),
            inputs: BTreeMap::new(),
        })
    }

    pub(super) fn keys(&self) -> &'a Gates {
        self.engine.spaces.gates()
    }

    /// True if there is nothing to commit.
    pub(crate) fn is_unchanged(&self) -> bool {
        let is_changed = self.gates.values().any(|open| open.is_changed);
        let is_changed = is_changed || self.buckets.values().any(|filled| filled.is_changed);
        !is_changed && self.changed.is_empty() && self.writes.is_empty()
    }

    pub(super) async fn open(&mut self, partition: &Partition) -> Result<&mut Open> {
        if !self.gates.contains_key(partition) {
            let mut open = Open::default();
            if let Some((gate, rev)) = fetch_gate(self.keys(), &self.view, partition).await? {
                let [_, left] = self.keys().notes(partition);
                open.left = notes(&self.view, &left, gate.waiting).await?;
                (open.rev, open.gate) = (Some(rev), gate);
            }
            self.gates.insert(partition.clone(), Box::new(open));
        }
        Ok(self.gates.get_mut(partition).expect("it was opened"))
    }

    /// How many more permits of a limit can be granted, up to `wanted`. The notes are read only if the room is too
    /// small without them: a returned permit only makes more room.
    pub(super) async fn room(&mut self, policy: &Policy, partition: &Partition, wanted: u64) -> Result<u64> {
        let most = policy.most(partition).map_or(u64::MAX, u64::from);
        let open = self.open(partition).await?;
        if open.ended.is_none() && most.saturating_sub(open.used()) < wanted {
            let held = open.gate.held;
            let [ended, _] = self.keys().notes(partition);
            let ended = notes(&self.view, &ended, held).await?;
            self.open(partition).await?.ended = Some(ended);
        }
        Ok(most.saturating_sub(self.open(partition).await?.used()).min(wanted))
    }

    /// True if a limit has room for one more execution and its queue is empty.
    async fn has_room(&mut self, policy: &Policy, partition: &Partition) -> Result<bool> {
        Ok(self.open(partition).await?.waiting() == 0 && self.room(policy, partition, 1).await? > 0)
    }

    /// Returns the index of the first limit that a start would not pass.
    pub(super) async fn first_full(
        &mut self,
        policy: &Policy,
        workflow: &str,
        gates: &[Option<String>],
    ) -> Result<usize> {
        for (place, key) in gates.iter().enumerate() {
            if !self.has_room(policy, &Partition::new(workflow, key.as_deref())).await? {
                return Ok(place);
            }
        }
        Ok(gates.len())
    }

    /// Decides a start. The caller passes in `first` the record that the execution has without any limits. If the
    /// execution starts, `first` is then the record to store.
    pub(crate) async fn decide(
        &mut self,
        policy: &Policy,
        asked: &StartNeeds,
        id: &ExecutionId,
        first: &mut Execution,
    ) -> Result<Ruling> {
        match first.key.take_if(|_| asked.gathers.is_some()) {
            Some(key) => self.decide_keyed(policy, asked, id, first, &key).await,
            None => self.decide_new(policy, asked, id, first).await,
        }
    }

    /// Decides a start that is not known under an idempotency key.
    pub(super) async fn decide_new(
        &mut self,
        policy: &Policy,
        asked: &StartNeeds,
        id: &ExecutionId,
        first: &mut Execution,
    ) -> Result<Ruling> {
        let workflow = first.workflow.clone();
        if let Some(joined) = self.join(policy, asked, &workflow, first).await? {
            return Ok(joined);
        }
        let full = self.first_full(policy, &workflow, &asked.gates).await?;
        let (passed, waits) = asked.gates.split_at(full);
        if let Some(key) = waits.first()
            && let Some(rejected) = self.full(policy, &Partition::new(&workflow, key.as_deref())).await?
        {
            return Ok(Ruling::Rejected(rejected));
        }
        match self.take_token(policy, asked, &workflow).await? {
            Err(rejected) => return Ok(Ruling::Rejected(rejected)),
            Ok(begins) => begins.into_iter().for_each(|begins| first.begin_at(self.now, begins)),
        }
        let mut gates: Vec<Needed> = asked.gates.iter().map(|key| Needed { key: key.clone(), permit: 0 }).collect();
        for needed in &mut gates[..passed.len()] {
            needed.permit = self.pass(policy, &Partition::new(&workflow, needed.key.as_deref())).await?;
        }
        let mut admission = Admission { gates, passed: full as u8, position: None, gathers: None };
        self.gather(policy, asked, id, first, &mut admission);
        if !waits.is_empty() {
            self.queue(policy, &workflow, id, first, &mut admission, (asked.priority, asked.flow.as_deref())).await?;
        }
        first.admission = Some(Box::new(admission));
        let is_batch = asked.gathers.is_some() && policy.batch.is_some();
        Ok(Ruling::Starts(is_batch.then_some(0)))
    }

    /// Returns the error if a start that finds the limit reached is rejected; none if it waits.
    async fn full(&mut self, policy: &Policy, partition: &Partition) -> Result<Option<WorkflowError>> {
        let workflow = partition.workflow().to_string();
        let key = partition.key().unwrap_or(&workflow).to_string();
        if !policy.queues() {
            let limit = policy.most(partition).unwrap_or_default();
            return Ok(Some(WorkflowError::LimitReached { workflow, key, limit }));
        }
        let waiting = self.open(partition).await?.waiting();
        let depth = policy.depth().filter(|depth| waiting >= u64::from(*depth));
        Ok(depth.map(|depth| WorkflowError::QueueFull { workflow, key, depth }))
    }

    /// Takes a permit of a limit. Returns the number of the permit.
    pub(super) async fn pass(&mut self, policy: &Policy, partition: &Partition) -> Result<u64> {
        let open = self.open(partition).await?;
        open.gate.limit = policy.most(partition).unwrap_or(u32::MAX);
        open.gate.held += 1;
        Ok(open.number())
    }

    /// Returns a permit of a limit in this commit.
    pub(super) async fn give_back(&mut self, partition: &Partition) -> Result<()> {
        let open = self.open(partition).await?;
        (open.gate.held, open.is_changed) = (open.gate.held.saturating_sub(1), true);
        Ok(())
    }

    /// Takes a token from the bucket of a rate limit. Returns when the execution may begin, if that is not now.
    async fn take_token(
        &mut self,
        policy: &Policy,
        asked: &StartNeeds,
        workflow: &str,
    ) -> Result<Result<Option<Timestamp>, WorkflowError>> {
        let (Some((max, per, delays)), Some(key)) = (policy.bucket(), &asked.bucket) else { return Ok(Ok(None)) };
        let partition = Partition::new(workflow, key.as_deref());
        if !self.buckets.contains_key(&partition) {
            let place = || format!("the bucket of workflow {workflow:?}");
            let found = fetch::<Bucket>(&self.view, &self.keys().bucket(&partition), place).await?;
            let (bucket, rev) = found.map(|(bucket, item)| (bucket, item.rev)).unzip();
            let filled = Filled { rev, bucket: bucket.unwrap_or_default(), is_changed: false };
            self.buckets.insert(partition.clone(), filled);
        }
        let filled = self.buckets.get_mut(&partition).expect("it was opened");
        // A token comes back after `per / max`. The bucket has a token if, after it is taken, the bucket is full again
        // within `per`.
        let per_us = per.as_micros() as u64;
        let full_us = filled.bucket.full_us.max(self.now.0).saturating_add(per_us / u64::from(max));
        let begins_us = full_us.saturating_sub(per_us);
        if begins_us > self.now.0 && !delays {
            let retry_after = std::time::Duration::from_micros(begins_us - self.now.0);
            let key = key.clone().unwrap_or_else(|| workflow.into());
            return Ok(Err(WorkflowError::RateLimited { workflow: workflow.into(), key, max, per, retry_after }));
        }
        (filled.bucket.full_us, filled.is_changed) = (full_us, true);
        Ok(Ok(Some(Timestamp(begins_us)).filter(|begins| *begins > self.now)))
    }

    /// Turns all decisions into a part of a commit.
    pub(crate) fn into_part(self) -> Part {
        let (engine, keys) = (self.engine, self.keys());
        let mut part = Part::default();
        for (partition, open) in self.gates.iter().filter(|(_, open)| open.is_changed) {
            let (gate, notes) = open.settled();
            part = put(part, keys, &keys.gate(partition), open.rev, gate.encode());
            part = notes.fold(part, Part::delete);
        }
        for (partition, filled) in self.buckets.iter().filter(|(_, filled)| filled.is_changed) {
            part = put(part, keys, &keys.bucket(partition), filled.rev, filled.bucket.encode());
        }
        for (id, (number, inputs)) in self.inputs {
            part = part.put(&engine.kept(&id).inputs_from(number), Inputs(inputs).encode());
        }
        part = self.checks.into_iter().fold(part, |part, check| part.check(GATE, check));
        for (key, value) in self.writes {
            part = part.write(match value {
                Some(value) => Write::Put(key, value),
                None => Write::Delete(key),
            });
        }
        self.changed.into_iter().fold(part, |part, (id, changed)| part.and(engine.changing_stored(id, changed)))
    }
}

/// Writes a gate or a bucket, and checks that it has not changed since it was read. A new one gets its marker.
fn put(part: Part, keys: &Gates, key: &Key, rev: Option<Rev>, value: Bytes) -> Part {
    let part = match rev {
        Some(rev) => part.at_rev(GATE, key, rev),
        None => part.absent(GATE, key).put(&keys.marker(key), Vec::new()),
    };
    part.put(key, value)
}

impl Execution {
    /// Delays the begin to this time, if that is later than the time known so far.
    pub(super) fn begin_at(&mut self, now: Timestamp, begins: Timestamp) {
        if begins <= now || self.begins_us.is_some_and(|known| known >= begins.0) {
            return;
        }
        let later = begins.0 - self.begins_us.unwrap_or(now.0).max(now.0);
        self.deadline_us = self.deadline_us.map(|deadline| deadline.saturating_add(later));
        self.waits = vec![Wait { what: WaitsFor::Timer, since: now, until: Some(begins) }];
        (self.status, self.timer_us, self.begins_us) = (StoredStatus::Waiting, Some(begins.0), Some(begins.0));
    }

    /// Called when the execution has all permits: it runs, or waits for the time at which it must begin.
    pub(super) fn let_begin(&mut self, now: Timestamp, timeout: Option<std::time::Duration>) {
        let begins = self.begins_us.take().map(Timestamp);
        let from = begins.unwrap_or(now).max(now);
        (self.status, self.waits, self.timer_us) = (StoredStatus::Running, Vec::new(), None);
        self.deadline_us = timeout.map(|timeout| from.plus(timeout).0);
        begins.into_iter().for_each(|begins| {
            let deadline = self.deadline_us.take();
            self.begin_at(now, begins);
            self.deadline_us = deadline;
        });
    }
}

impl EngineInner {
    /// The time limit of an execution, from its definition.
    pub(super) fn timeout_of(&self, workflow: &str) -> Option<std::time::Duration> {
        self.definition(workflow).and_then(|definition| definition.timeout)
    }

    /// Changes a stored execution that has not begun.
    fn changing_stored(self: &Arc<EngineInner>, id: ExecutionId, changed: ChangedExecution) -> Part {
        let ChangedExecution { before, rev, mut after } = changed;
        // First the part, then the question who owns it: so the part either checks the shard or notifies its owner.
        let first = self.at_record(&id, Some(rev));
        let is_begun = after.status == StoredStatus::Running && !self.idle && self.node.owns(&id);
        let definition = self.definition_of(&after).cloned().filter(|_| is_begun);
        let running = definition.map(|definition| (self.set_running(&id, &mut after), definition));
        let (part, _) = with_record(self, first, &id, Some(&before), &mut after, None);
        let engine = self.clone();
        part.then(move |landing| match (running, after.timer_us) {
            (Some((running, definition)), _) => {
                running.begin(Run::new(engine, definition, id, after, landing.last()).not_begun());
            }
            (None, _) if after.status == StoredStatus::Running => engine.spawn_load(&id),
            (None, Some(timer)) => engine.timers.set(&id, Timestamp(timer)),
            (None, None) => {}
        })
    }
}
