//! The queues of limits: puts executions into them, and admits the first ones when there is room. Each decision changes
//! the book that it is made in. Which starts must wait is decided in `book.rs`.

use crate::record::Record;
use crate::store::{Bytes, ErrorKind, Item, Key, Order, Timestamp};
use crate::workflow::admission::book::{Book, ChangedExecution};
use crate::workflow::admission::policy::Policy;
use crate::workflow::admission::stored::{FairKey, Gates, Partition};
use crate::workflow::stored::record::{
    Admission, Execution, StoredPosition, StoredStatus, Wait, WaitsFor, fetch, fetch_execution,
};
use crate::workflow::{ExecutionId, Result};

/// What was found at a position in a queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum FoundAtPosition {
    Admitted,
    /// No execution waits there.
    Empty,
    /// A newer program has stored the execution. The position stays.
    Unknown,
}

/// What one look at a queue has done.
#[derive(Debug, Clone, Copy, Default)]
struct Served {
    admitted: usize,
    /// True if a position was admitted or deleted.
    is_changed: bool,
    /// True if a position stays before those that were served.
    has_left_one: bool,
}

/// How many positions one look at a queue reads beyond those for which there is room. Executions that a newer program
/// has stored are passed over, up to this number.
const MOST_PASSED_OVER: usize = 64;

impl Book<'_> {
    /// Puts an execution into the queue of the next limit that it must pass.
    pub(super) async fn queue(
        &mut self,
        policy: &Policy,
        workflow: &str,
        id: &ExecutionId,
        execution: &mut Execution,
        admission: &mut Admission,
        (priority, flow): (i32, Option<&str>),
    ) -> Result<()> {
        let key = admission.gates.get(usize::from(admission.passed)).and_then(|needed| needed.key.clone());
        let partition = Partition::new(workflow, key.as_deref());
        let rank = self.rank(policy, &partition, priority, flow).await?;
        let open = self.open(&partition).await?;
        let position = open.enqueue(rank);
        self.wait_in_queue(policy, &partition, id, execution, admission, position);
        Ok(())
    }

    fn wait_in_queue(
        &mut self,
        policy: &Policy,
        partition: &Partition,
        id: &ExecutionId,
        execution: &mut Execution,
        admission: &mut Admission,
        position: StoredPosition,
    ) {
        admission.position = Some(position);
        self.writes.insert(self.keys().position(partition, position, id), Some(Bytes::new()));
        let until = policy.queue_timeout().map(|timeout| Timestamp(execution.started_us).plus(timeout));
        let what = WaitsFor::Admission(partition.key().unwrap_or(partition.workflow()).into());
        execution.waits = vec![Wait { what, since: self.now, until }];
        let timer_us = until.map(|until| until.0);
        (execution.status, execution.timer_us, execution.deadline_us) = (StoredStatus::Waiting, timer_us, None);
        if !self.queued.contains(partition) {
            self.queued.push(partition.clone());
        }
    }

    /// The rank of a start that enters a queue now. It never changes, because all waiting starts age at the same rate.
    async fn rank(&mut self, policy: &Policy, at: &Partition, priority: i32, flow: Option<&str>) -> Result<u64> {
        let priority = i64::from(priority);
        let Some(flow) = flow else {
            // Behind all earlier starts, whatever their ranks are.
            let Some(ageing) = policy.ageing() else { return Ok(self.open(at).await?.gate.highest) };
            // The start counts as if it had come earlier.
            let ahead = i128::from(priority) * ageing.as_micros() as i128;
            return Ok((i128::from(self.now.0) - ahead).clamp(0, i128::from(u64::MAX)) as u64);
        };
        if !self.open(at).await?.flows.contains_key(flow) {
            let key = self.keys().flow(at, flow);
            let found = fetch::<FairKey>(&self.view, &key, || format!("key {flow:?} of a fair queue")).await?;
            self.open(at).await?.flows.insert(flow.into(), found.map_or(0, |(flow, _)| flow.last));
        }
        let open = self.open(at).await?;
        let last = open.flows.get_mut(flow).expect("it was opened");
        // Each key gets one start per round.
        *last = (*last).max(open.gate.round).saturating_add(1);
        let (rank, record) = (*last, FairKey { last: *last }.encode());
        self.writes.insert(self.keys().flow(at, flow), Some(record));
        Ok(rank.saturating_add_signed(-priority))
    }

    /// Admits the first executions of a queue: as many as there is room for, and at most `most`. Returns true if the
    /// queue may have more.
    pub(crate) async fn admit_next(&mut self, policy: &Policy, partition: &Partition, most: usize) -> Result<bool> {
        let wanted = self.open(partition).await?.waiting().min(most as u64);
        let room = self.room(policy, partition, wanted).await? as usize;
        if room == 0 {
            return Ok(false);
        }
        let from = self.keys().queue_from(partition, self.open(partition).await?.gate.head);
        let mut queue = self.view.scan(&from, Order::Ascending, room).await?;
        if queue.len() < room {
            queue = self.view.scan(&self.keys().queue(partition), Order::Ascending, room).await?;
        }
        if queue.len() < room {
            // Positions were lost to damage. The count is corrected, so that new starts do not wait for them.
            let open = self.open(partition).await?;
            open.gate.waiting = (open.left.len() + queue.len()) as u64;
            open.is_changed = true;
        }
        let mut served = self.admit_from(policy, partition, &queue, room, Served::default()).await?;
        let passed_over = room - served.admitted;
        if let Some((last, _)) = queue.last().filter(|_| passed_over > 0 && queue.len() == room) {
            let rest = self.keys().queue(partition).after(last);
            let further = self.view.scan(&rest, Order::Ascending, passed_over + MOST_PASSED_OVER).await?;
            served = self.admit_from(policy, partition, &further, room, served).await?;
        }
        // Without a change, a further look would find the same.
        Ok(served.is_changed && (queue.len() == most || served.admitted < room))
    }

    /// Admits executions at these positions, in this order, until as many are admitted as there is room for.
    async fn admit_from(
        &mut self,
        policy: &Policy,
        partition: &Partition,
        queue: &[(Key, Item)],
        room: usize,
        mut served: Served,
    ) -> Result<Served> {
        for (key, _) in queue {
            if served.admitted == room {
                break;
            }
            let found = Gates::read_position(key);
            let admitted = match &found {
                Some((position, id)) => self.admit(policy, partition, *position, id).await?,
                None => FoundAtPosition::Empty,
            };
            match admitted {
                FoundAtPosition::Admitted => served.admitted += 1,
                FoundAtPosition::Empty => {
                    tracing::error!(%key, "a position in a queue belongs to no execution; it is deleted")
                }
                FoundAtPosition::Unknown => {
                    served.has_left_one = true;
                    continue;
                }
            }
            served.is_changed = true;
            self.writes.insert(key.clone(), None);
            let open = self.open(partition).await?;
            open.gate.waiting = open.gate.waiting.saturating_sub(1);
            if let Some((StoredPosition { rank, number }, _)) = found {
                open.gate.round = open.gate.round.max(rank);
                // A position that stays is before all others, so the head does not move past it.
                if !served.has_left_one {
                    open.gate.head = StoredPosition { rank, number: number + 1 };
                }
            }
            open.is_changed = true;
        }
        Ok(served)
    }

    /// Admits an execution from a queue: it takes the permit and continues to the next limit if there is one.
    async fn admit(
        &mut self,
        policy: &Policy,
        at: &Partition,
        position: StoredPosition,
        id: &ExecutionId,
    ) -> Result<FoundAtPosition> {
        let found = match fetch_execution(&self.view, &self.engine.spaces.executions, id).await {
            Err(error) if error.kind() == ErrorKind::Corrupt => return Ok(FoundAtPosition::Empty),
            Err(error) if error.is_unknown_version() => return Ok(FoundAtPosition::Unknown),
            found => found?,
        };
        let its = |execution: &Execution| execution.admission.as_ref()?.queued(&execution.workflow);
        let is_its = |it: &Execution| its(it) == Some((at.clone(), position)) && it.status == StoredStatus::Waiting;
        let Some((before, item)) = found.filter(|(found, _)| is_its(found)) else { return Ok(FoundAtPosition::Empty) };
        let permit = self.pass(policy, at).await?;
        let mut after = before.clone();
        let mut admission = after.admission.take().unwrap_or_default();
        admission.gates[usize::from(admission.passed)].permit = permit;
        (admission.position, admission.passed) = (None, admission.passed + 1);
        let rest = admission.gates.iter().skip(admission.passed.into()).map(|needed| needed.key.clone());
        let rest: Vec<Option<String>> = rest.collect();
        let further = self.first_full(policy, &after.workflow, &rest).await?;
        for key in &rest[..further] {
            let permit = self.pass(policy, &Partition::new(&before.workflow, key.as_deref())).await?;
            admission.gates[usize::from(admission.passed)].permit = permit;
            admission.passed += 1;
        }
        match rest.get(further) {
            Some(key) => {
                // The rank in the last queue also counts in the next queue. Rounds of different queues cannot be
                // compared.
                let next = Partition::new(&before.workflow, key.as_deref());
                let open = self.open(&next).await?;
                let rank = if policy.is_fair() { open.gate.highest } else { position.rank };
                let position = open.enqueue(rank);
                self.wait_in_queue(policy, &next, id, &mut after, &mut admission, position);
            }
            None => {
                after.let_begin(self.now, self.engine.timeout_of(&before.workflow));
                if after.status == StoredStatus::Running {
                    self.end_gathering(id, &mut after, &mut admission).await?;
                }
            }
        }
        after.admission = Some(admission);
        self.changed.insert(id.clone(), ChangedExecution { before, rev: item.rev, after });
        Ok(FoundAtPosition::Admitted)
    }
}
