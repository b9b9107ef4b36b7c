//! Deletes records that are no longer needed: gates without holders and waiters, and full buckets. A key that is not in
//! use leaves only the rev of its gate. A starting engine finds the records of earlier engines by their markers, so
//! that it does not scan over these revs.

use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::lane::Part;
use crate::record::Record;
use crate::store::{Commit, Key, Order, Outcome, SpaceSpec, Store, View};
use crate::workflow::Result;
use crate::workflow::admission::Admissions;
use crate::workflow::admission::book::{GATE, gate_at};
use crate::workflow::admission::policy::StartNeeds;
use crate::workflow::admission::stored::{Bucket, Gate, Gates, MARKED, Partition};
use crate::workflow::engine::{EngineInner, EngineSpaces};

/// How long an unused record stays at least: it may be used again.
const PAUSE: Duration = Duration::from_secs(10);

/// How many partitions one commit clears, and how many records of each at most.
const TOGETHER: usize = 16;
const MOST: usize = 250;

impl Admissions {
    /// Notes a partition whose records may not be needed now or soon.
    pub(super) fn note(&self, partition: Partition) {
        let mut used = self.used.lock();
        let was_empty = used.is_empty();
        used.insert(partition);
        drop(used);
        if was_empty {
            self.untidy.notify_one();
        }
    }

    /// The same for the bucket of a start.
    pub(super) fn note_used(&self, workflow: &str, asked: &StartNeeds) {
        if let Some(key) = &asked.bucket {
            self.note(Partition::new(workflow, key.as_deref()));
        }
    }

    /// Deletes the records of partitions that are not in use. Returns the partitions to look at again.
    async fn clear(self: &Arc<Admissions>, engine: &EngineInner, partitions: &[Partition]) -> Result<Vec<Partition>> {
        let view = engine.store.view().await?;
        let (mut parts, mut later) = (Vec::new(), Vec::new());
        for partition in partitions {
            let Clearing { part, is_again, waits } = clearing(engine, &view, partition).await?;
            parts.extend(part);
            later.extend(is_again.then(|| partition.clone()));
            if waits {
                self.look_at(partition);
            }
        }
        drop(view);
        let all = parts.iter().fold(Commit::new(), |commit, part| part.place(commit).0);
        if parts.is_empty() || matches!(engine.store.commit(all).await?, Outcome::Applied(_)) {
            return Ok(later);
        }
        // Some of the partitions are in use again, so each gets its own commit.
        for part in parts {
            let _ = engine.store.commit(part.place(Commit::new()).0).await?;
        }
        Ok(later)
    }

    /// Notes all limits and buckets in the shards of this node: an earlier process may have left some.
    async fn note_all(&self, engine: &EngineInner) -> Result<()> {
        for shard in self.node.owned() {
            let mut rest = engine.spaces.gates().markers(shard);
            loop {
                let found = engine.store.view().await?.scan(&rest, Order::Ascending, 1000).await?;
                let Some((last, _)) = found.last() else { break };
                rest = rest.after(last);
                found.iter().filter_map(|(key, _)| Gates::read_partition(key)).for_each(|it| self.note(it));
            }
        }
        Ok(())
    }
}

impl EngineSpaces {
    /// Returns the spaces once all gates and buckets have markers. Those of earlier programs get them once.
    pub(crate) async fn marked(self, store: &Store) -> Result<EngineSpaces> {
        if store.spaces().await?.iter().all(|space| space.name() != MARKED) {
            self.gates().mark_all(store).await?;
            store.space(SpaceSpec::new(MARKED)).await?;
        }
        Ok(self)
    }
}

/// The work for one partition.
struct Clearing {
    /// Deletes its records, if it is not in use.
    part: Option<Part>,
    /// True if it must be looked at again: its bucket is not full yet, or records are left.
    is_again: bool,
    /// True if executions wait in its queue.
    waits: bool,
}

/// Decides what to delete of a partition.
async fn clearing(engine: &EngineInner, view: &View, partition: &Partition) -> Result<Clearing> {
    let gates = engine.spaces.gates();
    let place = || format!("limit {partition:?}");
    let mut part = Part::default();
    let (mut waits, mut is_rest) = (false, false);
    if let Some((gate, rev, ended, left)) = gate_at(gates, view, partition).await? {
        waits = gate.waiting > left.len() as u64;
        let is_used = waits || gate.held > ended.len() as u64;
        let flows = view.scan(&gates.flows(partition), Order::Ascending, MOST).await?;
        if ended.len() + left.len() >= MOST {
            // Starts do not read the notes while permits are free, so the notes are deleted here.
            let ended = &ended[..ended.len().min(MOST)];
            let left = &left[..left.len().min(MOST - ended.len())];
            let held = gate.held.saturating_sub(ended.len() as u64);
            let waiting = gate.waiting.saturating_sub(left.len() as u64);
            part = part.at_rev(GATE, &gates.gate(partition), rev);
            part = part.put(&gates.gate(partition), Gate { held, waiting, ..gate }.encode());
            part = ended.iter().chain(left).fold(part, Part::delete);
            is_rest = true;
        } else if !is_used {
            // No permit is held, so no end can come. A start would write the gate and fail the check.
            part = part.at_rev(GATE, &gates.gate(partition), rev);
            is_rest = flows.len() >= MOST;
            if !is_rest {
                part = part.delete(&gates.gate(partition)).delete(&gates.marker(&gates.gate(partition)));
                part = ended.iter().chain(&left).fold(part, Part::delete);
            }
            part = flows.iter().map(|(key, _)| key).fold(part, Part::delete);
        }
    }
    let key: Key = gates.bucket(partition);
    let mut is_again = is_rest;
    if let Some(item) = view.get(&key).await? {
        let bucket = Bucket::decode(&item.value).map_err(|why| why.at(place()))?;
        let is_full = bucket.full_us <= engine.store.env().now().0;
        is_again |= !is_full;
        if is_full {
            part = part.at_rev(GATE, &key, item.rev).delete(&key).delete(&gates.marker(&key));
        }
    }
    let is_any = !part.writes().is_empty();
    Ok(Clearing { part: is_any.then_some(part), is_again, waits })
}

/// Deletes unused records, some time after their last use.
pub(crate) async fn keep(engine: Weak<EngineInner>, admissions: Arc<Admissions>) {
    let Some(inner) = engine.upgrade() else { return };
    if let Err(error) = admissions.note_all(&inner).await {
        tracing::warn!(%error, "unused limits could not be listed");
    }
    let env = inner.store.env().clone();
    drop(inner);
    loop {
        if admissions.used.lock().is_empty() {
            admissions.untidy.notified().await;
            continue;
        }
        env.sleep(PAUSE).await;
        let used: Vec<Partition> = std::mem::take(&mut *admissions.used.lock()).into_iter().collect();
        for some in used.chunks(TOGETHER) {
            let Some(inner) = engine.upgrade() else { return };
            match admissions.clear(&inner, some).await {
                Ok(later) => later.into_iter().for_each(|partition| admissions.note(partition)),
                Err(error) => {
                    tracing::debug!(%error, "unused limits could not be deleted, retrying");
                    some.iter().for_each(|partition| admissions.note(partition.clone()));
                }
            }
        }
    }
}
