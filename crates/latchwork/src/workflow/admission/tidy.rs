//! Clearing away what tells nothing any more: limits of which nothing is held and for which none waits, and buckets that
//! are full. A key that is not in use takes no space.

use std::sync::{Arc, Weak};
use std::time::Duration;

use crate::lane::Part;
use crate::record::Record;
use crate::store::{Commit, Key, Order, Outcome, View};
use crate::workflow::Result;
use crate::workflow::admission::Admissions;
use crate::workflow::admission::book::GATE;
use crate::workflow::admission::policy::Asked;
use crate::workflow::admission::stored::{Bucket, Gate, Gates, Partition};
use crate::workflow::engine::Inner;
use crate::workflow::record::fetch;

/// How long what is not in use stays at least: it may be used again.
const PAUSE: Duration = Duration::from_secs(10);

/// How many partitions are cleared away by one commit.
const TOGETHER: usize = 64;

impl Admissions {
    /// A partition may be of no use any more, or soon.
    pub(super) fn note(&self, partition: Partition) {
        let mut used = self.used.lock();
        let was_empty = used.is_empty();
        used.insert(partition);
        drop(used);
        if was_empty {
            self.untidy.notify_one();
        }
    }

    /// The same of the bucket of a start.
    pub(super) fn note_used(&self, workflow: &str, asked: &Asked) {
        if let Some(key) = &asked.bucket {
            self.note(Partition::new(workflow, key.as_deref()));
        }
    }

    /// Clears away what a partition has left, unless it is in use. Gives those that are to be looked at again.
    async fn clear(&self, engine: &Inner, partitions: &[Partition]) -> Result<Vec<Partition>> {
        let view = engine.store.view().await?;
        let (mut parts, mut later) = (Vec::new(), Vec::new());
        for partition in partitions {
            let (part, is_filling) = clearing(engine, &view, partition).await?;
            parts.extend(part);
            later.extend(is_filling.then(|| partition.clone()));
        }
        drop(view);
        let all = parts.iter().fold(Commit::new(), |commit, part| part.place(commit).0);
        if parts.is_empty() || matches!(engine.store.commit(all).await?, Outcome::Applied(_)) {
            return Ok(later);
        }
        // Some of them are in use again.
        for part in parts {
            let _ = engine.store.commit(part.place(Commit::new()).0).await?;
        }
        Ok(later)
    }

    /// Notes all limits in the shards of this node: an earlier process may have left some.
    async fn note_all(&self, engine: &Inner) -> Result<()> {
        for shard in self.node.owned() {
            let mut rest = engine.spaces.gates().gates(shard);
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

/// What clears a partition away, if it is not in use; and whether its bucket is being filled.
async fn clearing(engine: &Inner, view: &View, partition: &Partition) -> Result<(Option<Part>, bool)> {
    let gates = engine.spaces.gates();
    let place = || format!("limit {partition:?}");
    let mut part = Part::default();
    if let Some((gate, item)) = fetch::<Gate>(view, &gates.gate(partition), place).await? {
        let beside = [gates.ended(partition, gate.life), gates.left(partition, gate.life)];
        let [ended, left] = [view.get(&beside[0]).await?, view.get(&beside[1]).await?];
        let count = |item: &Option<crate::store::Item>| item.as_ref().map_or(0, |item| item.rev.0);
        if gate.admitted == count(&ended) && gate.queued == gate.taken + count(&left) {
            part = part.at_rev(GATE, &gates.gate(partition), item.rev).delete(&gates.gate(partition));
            let there = beside.iter().zip([ended, left]).filter_map(|(key, item)| Some((key, item?)));
            part = there.fold(part, |part, (key, item)| part.at_rev(GATE, key, item.rev).delete(key));
            let flows = view.scan(&gates.flows(partition), Order::Ascending, 1000).await?;
            part = flows.iter().fold(part, |part, (key, item)| part.at_rev(GATE, key, item.rev).delete(key));
        }
    }
    let key: Key = gates.bucket(partition);
    let mut is_filling = false;
    if let Some(item) = view.get(&key).await? {
        let bucket = Bucket::decode(&item.value).map_err(|why| why.at(place()))?;
        is_filling = bucket.full_us > engine.store.env().now().0;
        if !is_filling {
            part = part.at_rev(GATE, &key, item.rev).delete(&key);
        }
    }
    let is_any = !part.writes().is_empty();
    Ok((is_any.then_some(part), is_filling))
}

/// Clears away what is not in use, some time after it was.
pub(crate) async fn keep(engine: Weak<Inner>, admissions: Arc<Admissions>) {
    let Some(inner) = engine.upgrade() else { return };
    if let Err(error) = admissions.note_all(&inner).await {
        tracing::warn!(%error, "limits that are not in use could not be looked for");
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
                Err(error) => tracing::debug!(%error, "limits that are not in use stay for a while"),
            }
        }
    }
}
