//! Checks the limits as commits change them, in the store's order. It counts the permits in use from the records of
//! executions and compares them with the gates. Queues must be served in order.

use std::collections::{BTreeMap, BTreeSet};

use crate::record::Record;
use crate::store::{Key, Write};
use crate::workflow::ExecutionId;
use crate::workflow::admission::stored::{Gate, Gates, KeyKind, Partition};
use crate::workflow::engine::EXECUTIONS;
use crate::workflow::stored::record::{Execution, StoredPosition};

/// What the store holds about limits, and the violations found so far.
#[derive(Default)]
pub(crate) struct Admitted {
    limits: BTreeMap<Partition, AuditedLimit>,
    /// The permits of executions that have not ended.
    held: BTreeMap<ExecutionId, BTreeSet<Partition>>,
    pub(crate) wrong: Vec<String>,
}

#[derive(Default)]
struct AuditedLimit {
    gate: Gate,
    /// Whether a gate and a bucket are stored. `is_marked` says the same of their markers.
    is_stored: [bool; 2],
    is_marked: [bool; 2],
    ended: BTreeSet<Key>,
    left: BTreeSet<Key>,
    queue: BTreeSet<(StoredPosition, ExecutionId)>,
    holders: BTreeSet<ExecutionId>,
}

/// What one commit changes in the queue and the holders of a limit.
#[derive(Default)]
struct Changes {
    added: BTreeSet<(StoredPosition, ExecutionId)>,
    taken: BTreeSet<(StoredPosition, ExecutionId)>,
    begun: BTreeSet<ExecutionId>,
}

impl Admitted {
    /// Takes in a commit that landed: its writes to executions and limits, with the names of their spaces.
    pub(crate) fn landed(&mut self, writes: &[(String, Write)]) {
        let mut changes: BTreeMap<Partition, Changes> = BTreeMap::new();
        for (space, write) in writes {
            match (space != EXECUTIONS, write) {
                (true, write) => self.limit(write, &mut changes),
                (false, Write::Put(key, value)) => {
                    if let (Some(id), Ok(execution)) = (id_of(key), Execution::decode(value)) {
                        self.execution(id, &execution, &mut changes);
                    }
                }
                (false, write) => {
                    let gone = id_of(write.key()).into_iter();
                    gone.for_each(|id| self.execution(id, &Execution::default(), &mut changes));
                }
            }
        }
        for (partition, changes) in changes {
            self.judge(&partition, &changes);
        }
    }

    fn limit(&mut self, write: &Write, changes: &mut BTreeMap<Partition, Changes>) {
        let Some((kind, partition)) = Gates::read_kind(write.key()) else { return };
        let limit = self.limits.entry(partition.clone()).or_default();
        let changes = changes.entry(partition).or_default();
        match (kind, write) {
            (KeyKind::Gate, Write::Put(_, value)) => limit.gate = Gate::decode(value).unwrap_or_default(),
            (KeyKind::Gate, _) => limit.gate = Gate::default(),
            (KeyKind::Ended, Write::Put(key, _)) => drop(limit.ended.insert(key.clone())),
            (KeyKind::Ended, write) => drop(limit.ended.remove(write.key())),
            (KeyKind::Left, Write::Put(key, _)) => drop(limit.left.insert(key.clone())),
            (KeyKind::Left, write) => drop(limit.left.remove(write.key())),
            (KeyKind::Position, write) => {
                let Some(position) = Gates::read_position(write.key()) else { return };
                if matches!(write, Write::Put(..)) {
                    limit.queue.insert(position.clone());
                    changes.added.insert(position);
                } else {
                    limit.queue.remove(&position);
                    changes.taken.insert(position);
                }
            }
            (KeyKind::Bucket | KeyKind::GateMarker | KeyKind::BucketMarker | KeyKind::Other, _) => {}
        }
        let is_put = matches!(write, Write::Put(..));
        match kind {
            KeyKind::Gate => limit.is_stored[0] = is_put,
            KeyKind::Bucket => limit.is_stored[1] = is_put,
            KeyKind::GateMarker => limit.is_marked[0] = is_put,
            KeyKind::BucketMarker => limit.is_marked[1] = is_put,
            _ => {}
        }
    }

    fn execution(&mut self, id: ExecutionId, execution: &Execution, changes: &mut BTreeMap<Partition, Changes>) {
        let admission = execution.admission.as_ref().filter(|_| !execution.status.is_terminal());
        let now: BTreeSet<Partition> =
            admission.map(|it| it.held(&execution.workflow).map(|(held, _)| held).collect()).unwrap_or_default();
        let before = self.held.remove(&id).unwrap_or_default();
        for partition in before.difference(&now) {
            self.limits.entry(partition.clone()).or_default().holders.remove(&id);
            changes.entry(partition.clone()).or_default();
        }
        for partition in now.difference(&before) {
            self.limits.entry(partition.clone()).or_default().holders.insert(id.clone());
            changes.entry(partition.clone()).or_default().begun.insert(id.clone());
        }
        if !now.is_empty() {
            self.held.insert(id, now);
        }
    }

    fn judge(&mut self, partition: &Partition, changes: &Changes) {
        let limit = self.limits.entry(partition.clone()).or_default();
        let mut complain = |what: String| self.wrong.push(format!("limit {partition:?}: {what}"));
        let (held, waiting) = (limit.holders.len() as u64, limit.queue.len() as u64);
        let gate = &limit.gate;
        let (ended, left) = (limit.ended.len() as u64, limit.left.len() as u64);
        if gate.held.checked_sub(ended) != Some(held) {
            complain(format!("{held} executions hold a permit, but the gate counts {} and {ended} ended", gate.held));
        }
        if gate.waiting.checked_sub(left) != Some(waiting) {
            complain(format!("{waiting} wait, but the gate counts {} and {left} left", gate.waiting));
        }
        for (what, kind) in [("gate", 0), ("bucket", 1)] {
            match (limit.is_stored[kind], limit.is_marked[kind]) {
                (true, false) => complain(format!("the {what} has no marker")),
                (false, true) => complain(format!("a marker is left, but no {what}")),
                _ => {}
            }
        }
        if !changes.begun.is_empty() && held > u64::from(gate.limit) {
            complain(format!("{:?} hold a permit, but the limit is {}", limit.holders, gate.limit));
        }
        // An admitted execution must stand before all that still wait. Positions that this commit added do not count.
        let first = limit.queue.difference(&changes.added).next();
        for (position, id) in changes.taken.iter().filter(|(_, id)| changes.begun.contains(id)) {
            if first.is_some_and(|(first, _)| first < position) {
                complain(format!("{id} was admitted before {first:?}"));
            }
        }
        let jumped = changes.begun.iter().find(|id| !changes.taken.iter().any(|(_, taken)| taken == *id));
        if let Some((id, first)) = jumped.zip(first) {
            complain(format!("{id} was admitted while {first:?} waits"));
        }
    }

    /// Checks the end of a simulation, when nothing runs any more.
    pub(crate) fn settled(&mut self) {
        for (partition, limit) in &self.limits {
            if !limit.queue.is_empty() && (limit.holders.len() as u64) < u64::from(limit.gate.limit) {
                self.wrong.push(format!("limit {partition:?}: {:?} could be admitted", limit.queue.first()));
            }
        }
    }
}

fn id_of(key: &Key) -> Option<ExecutionId> {
    std::str::from_utf8(key.bytes()).ok().map(Into::into)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{SpaceSpec, Store};
    use crate::workflow::admission::stored::{ADMISSION, Bucket, GATES};
    use crate::workflow::stored::record::{Admission, Needed, StoredStatus};

    /// The writes of starts and ends under a limit of one.
    struct Writes {
        executions: crate::store::Space,
        gates: Gates,
        at: Partition,
    }

    impl Writes {
        async fn new() -> Writes {
            let store = Store::memory().await.unwrap();
            let space = async |name: &str| store.space(SpaceSpec::new(name)).await.unwrap();
            let gates = Gates { gates: space(GATES).await, beside: space(ADMISSION).await };
            Writes { executions: space(EXECUTIONS).await, gates, at: Partition::new("w", None) }
        }

        fn gate(&self, held: u64) -> (String, Write) {
            let gate = Gate { limit: 1, held, ..Gate::default() };
            (GATES.into(), Write::Put(self.gates.gate(&self.at), gate.encode()))
        }

        fn marker(&self) -> (String, Write) {
            (ADMISSION.into(), Write::Put(self.gates.marker(&self.gates.gate(&self.at)), Vec::new().into()))
        }

        fn bucket(&self) -> [(String, Write); 2] {
            let key = self.gates.bucket(&self.at);
            let marker = Write::Put(self.gates.marker(&key), Vec::new().into());
            [(GATES.into(), Write::Put(key, Bucket::default().encode())), (ADMISSION.into(), marker)]
        }

        fn ended(&self) -> (String, Write) {
            (ADMISSION.into(), Write::Put(self.gates.ended(&self.at, 0), Vec::new().into()))
        }

        fn execution(&self, id: &str, status: StoredStatus) -> (String, Write) {
            let admission = Admission { gates: vec![Needed::default()], passed: 1, ..Admission::default() };
            let admission = Some(Box::new(admission));
            let execution = Execution { workflow: "w".into(), status, admission, ..Execution::default() };
            (EXECUTIONS.into(), Write::Put(self.executions.key(id), execution.encode()))
        }
    }

    fn wrong(commits: &[Vec<(String, Write)>]) -> Vec<String> {
        let mut admitted = Admitted::default();
        commits.iter().for_each(|commit| admitted.landed(commit));
        admitted.wrong.iter().filter_map(|wrong| Some(wrong.split_once("): ")?.1.to_string())).collect()
    }

    #[tokio::test]
    async fn a_permit_belongs_to_the_commit_of_its_start_and_of_its_end() {
        let w = Writes::new().await;
        let (runs, ends) = (w.execution("a", StoredStatus::Running), w.execution("a", StoredStatus::TimedOut));
        let wrong = |commits: &[Vec<(String, Write)>]| wrong(&[&[vec![w.marker(), w.gate(0)]], commits].concat());
        assert_eq!(wrong(&[vec![w.gate(1), runs.clone()], vec![w.ended(), ends.clone()]]), [""; 0]);
        let apart = wrong(&[vec![w.gate(1)], vec![runs.clone()]]);
        assert_eq!(apart, ["0 executions hold a permit, but the gate counts 1 and 0 ended"]);
        let leaked = wrong(&[vec![w.gate(1), runs.clone()], vec![ends.clone()]]);
        assert_eq!(leaked, ["0 executions hold a permit, but the gate counts 1 and 0 ended"]);
        let early = wrong(&[vec![w.gate(1), runs.clone()], vec![w.ended()]]);
        assert_eq!(early, ["1 executions hold a permit, but the gate counts 1 and 1 ended"]);
        let second = vec![w.gate(2), w.execution("b", StoredStatus::Running)];
        let too_many = wrong(&[vec![w.gate(1), runs], second]);
        assert_eq!(too_many, [r#"{"a", "b"} hold a permit, but the limit is 1"#]);
    }

    #[tokio::test]
    async fn a_gate_and_a_bucket_have_a_marker_exactly_as_long_as_they_are_stored() {
        let w = Writes::new().await;
        let delete = |(space, write): (String, Write)| (space, Write::Delete(write.key().clone()));
        let (gate, marker, [bucket, of_bucket]) = (w.gate(0), w.marker(), w.bucket());
        let both = [vec![gate.clone(), marker.clone()], vec![delete(gate.clone()), delete(marker.clone())]];
        assert_eq!(wrong(&both), [""; 0]);
        assert_eq!(wrong(&[vec![gate.clone()], vec![marker.clone()]]), ["the gate has no marker"]);
        let stays = [both[0].clone(), vec![delete(gate)]];
        assert_eq!(wrong(&stays), ["a marker is left, but no gate"]);
        assert_eq!(wrong(&[vec![bucket.clone()]]), ["the bucket has no marker"]);
        let stays = [vec![bucket.clone(), of_bucket], vec![delete(bucket)]];
        assert_eq!(wrong(&stays), ["a marker is left, but no bucket"]);
    }
}
