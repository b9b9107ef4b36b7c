//! The reference model of the crash tests: everything that was ever committed, by generation. It does not know how the
//! store works. The list alone says what a store must contain at a generation.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use latchwork_store::*;

/// The change of a key by a commit: new rev and value.
pub type Written = (Key, Rev, Option<Vec<u8>>);

/// One generation.
#[derive(Debug, Clone)]
pub struct Entry {
    pub generation: u64,
    pub time: Timestamp,
    pub changes: Vec<Written>,
    /// The space that this generation declared.
    pub declares: Option<(Space, History)>,
    /// The commit's id, the commit itself to send it again, and its answer.
    pub named: Option<(CommitId, Commit, Vec<Option<Rev>>)>,
    /// For a restore: the ids whose receipts it kept. It drops the receipts of commits after the snapshot.
    pub restored: Option<BTreeSet<CommitId>>,
}

impl Entry {
    pub fn new(generation: u64, time: Timestamp) -> Entry {
        Entry { generation, time, changes: Vec::new(), declares: None, named: None, restored: None }
    }
}

/// A version of a key: rev, generation of the write, value.
pub type Held = (Rev, u64, Option<Vec<u8>>);

#[derive(Debug, Clone, Default)]
pub struct Ledger {
    entries: Vec<Entry>,
    keys: BTreeMap<Key, Vec<Held>>,
}

impl Ledger {
    pub fn push(&mut self, entry: Entry) {
        assert_eq!(entry.generation, self.last() + 1, "generations have no gaps");
        for (key, rev, value) in &entry.changes {
            self.keys.entry(key.clone()).or_default().push((*rev, entry.generation, value.clone()));
        }
        self.entries.push(entry);
    }

    pub fn last(&self) -> u64 {
        self.entries.last().map_or(0, |entry| entry.generation)
    }

    /// The entries up to a generation.
    pub fn until(&self, generation: u64) -> &[Entry] {
        &self.entries[..self.entries.partition_point(|entry| entry.generation <= generation)]
    }

    /// The time of a generation.
    pub fn time(&self, generation: u64) -> Timestamp {
        self.until(generation).last().map_or(Timestamp(0), |entry| entry.time)
    }

    /// A copy of the ledger that ends at `generation`.
    pub fn cut(&self, generation: u64) -> Ledger {
        let mut cut = Ledger::default();
        self.until(generation).iter().cloned().for_each(|entry| cut.push(entry));
        cut
    }

    /// The version of a key, tombstones included.
    pub fn held(&self, key: &Key, at: u64) -> Option<&Held> {
        let versions = self.keys.get(key)?;
        versions[..versions.partition_point(|(_, generation, _)| *generation <= at)].last()
    }

    /// Every key that was written up to a generation, with its version.
    pub fn state(&self, at: u64) -> impl DoubleEndedIterator<Item = (&Key, &Held)> {
        self.keys.keys().filter_map(move |key| Some((key, self.held(key, at)?)))
    }

    /// The keys of a space that had a value, in order.
    pub fn live(&self, space: &Space, at: u64) -> Vec<(Key, Item)> {
        let inside = self.state(at).filter(|(key, _)| key.space() == space.id());
        let live = inside.filter_map(|(key, (rev, generation, value))| {
            let (value, time) = (value.clone()?.into(), self.time(*generation));
            Some((key.clone(), Item { rev: *rev, generation: Generation(*generation), time, value }))
        });
        live.collect()
    }

    /// The spaces that were declared.
    pub fn spaces(&self, at: u64) -> Vec<&(Space, History)> {
        self.until(at).iter().filter_map(|entry| entry.declares.as_ref()).collect()
    }

    /// The generation of the last restore.
    pub fn anew(&self, at: u64) -> u64 {
        let restores = self.until(at).iter().filter(|entry| entry.restored.is_some());
        restores.map(|entry| entry.generation).next_back().unwrap_or(0)
    }

    /// The commits with an id whose receipts a store at this generation must have.
    pub fn named(&self, at: u64) -> Vec<&Entry> {
        let anew = self.anew(at);
        let kept = self.until(anew).last().and_then(|entry| entry.restored.as_ref());
        let known = self.until(at).iter().filter(|entry| match &entry.named {
            Some((id, ..)) => entry.generation > anew || kept.is_some_and(|kept| kept.contains(id)),
            None => false,
        });
        known.collect()
    }

    /// The highest floor that a space's rules allow if the store is at `at` and its clock not later than `now`.
    pub fn highest_floor(&self, history: History, at: u64, now: Timestamp) -> u64 {
        let by_rule = match history {
            History::None => at,
            History::Generations(count) => at.saturating_sub(count),
            History::For(duration) => {
                let early = self.until(at).iter().rev().find(|entry| entry.time <= now.minus(duration));
                early.map_or(0, |entry| entry.generation)
            }
            History::Forever => 0,
        };
        by_rule.max(self.anew(at))
    }
}

/// The spaces of every workload. The names of spaces whose keys are used once start with `once`.
pub fn specs() -> Vec<(SpaceSpec, History)> {
    let histories = [
        ("plain", History::None),
        ("some", History::Generations(20)),
        ("timed", History::For(Duration::from_millis(300))),
        ("all", History::Forever),
    ];
    let kept = histories.map(|(name, history)| (SpaceSpec::new(name).history(history), history));
    let once = [("once", History::None), ("once kept", History::Generations(8))];
    let once = once.map(|(name, history)| (SpaceSpec::new(name).history(history).keys_used_once(), history));
    kept.into_iter().chain(once).collect()
}

/// The number of spaces whose keys are not used once. They come first.
pub const KEPT_SPACES: usize = 4;

/// The change of a key by a restore, if it changes.
pub fn restored(current: &Held, wanted: Option<&Held>) -> Option<(Rev, Option<Vec<u8>>)> {
    match wanted {
        Some(wanted) if wanted == current => None,
        None if current.2.is_none() => None,
        Some((rev, _, value)) => Some(((*rev).max(current.0).next(), value.clone())),
        None => Some((current.0.next(), None)),
    }
}
