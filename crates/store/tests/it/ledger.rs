//! The reference model of the crash tests: everything that was ever committed, by generation. It knows nothing of
//! how the store works; what a store must hold at a generation follows from the list alone.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use latchwork_store::*;

/// What a commit made of a key.
pub type Written = (Key, Rev, Option<Vec<u8>>);

/// One generation.
#[derive(Debug, Clone)]
pub struct Entry {
    pub generation: u64,
    pub time: Timestamp,
    pub changes: Vec<Written>,
    /// The space this generation declared.
    pub declares: Option<(Space, History)>,
    /// The commit's id, with the commit to send again and its answer.
    pub named: Option<(CommitId, Commit, Vec<Option<Rev>>)>,
    /// The ids whose answers are known from here on: a restore forgets those that came after the snapshot.
    pub restored: Option<BTreeSet<CommitId>>,
}

impl Entry {
    pub fn new(generation: u64, time: Timestamp) -> Entry {
        Entry { generation, time, changes: Vec::new(), declares: None, named: None, restored: None }
    }
}

/// What a key held: rev, generation of the write, value.
pub type Held = (Rev, u64, Option<Vec<u8>>);

#[derive(Debug, Clone, Default)]
pub struct Ledger {
    entries: Vec<Entry>,
    keys: BTreeMap<Key, Vec<Held>>,
}

impl Ledger {
    pub fn push(&mut self, entry: Entry) {
        assert_eq!(entry.generation, self.last() + 1, "generations are dense");
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

    /// When a generation was committed.
    pub fn time(&self, generation: u64) -> Timestamp {
        self.until(generation).last().map_or(Timestamp(0), |entry| entry.time)
    }

    /// The same ledger as if nothing had happened after `generation`.
    pub fn cut(&self, generation: u64) -> Ledger {
        let mut cut = Ledger::default();
        self.until(generation).iter().cloned().for_each(|entry| cut.push(entry));
        cut
    }

    /// What a key held, traces of deletes included.
    pub fn held(&self, key: &Key, at: u64) -> Option<&Held> {
        let versions = self.keys.get(key)?;
        versions[..versions.partition_point(|(_, generation, _)| *generation <= at)].last()
    }

    /// Every key that was ever written up to a generation with what it held.
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

    /// Named commits whose answers a store at this generation must know.
    pub fn named(&self, at: u64) -> Vec<&Entry> {
        let anew = self.anew(at);
        let kept = self.until(anew).last().and_then(|entry| entry.restored.as_ref());
        let known = self.until(at).iter().filter(|entry| match &entry.named {
            Some((id, ..)) => entry.generation > anew || kept.is_some_and(|kept| kept.contains(id)),
            None => false,
        });
        known.collect()
    }

    /// The highest floor that a space's rules allow when the store is at `at` and its clock nowhere beyond `now`.
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

/// The spaces of every workload. Keys of spaces where they are used once start with `once`.
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

/// How many of them are not of that kind; they come first.
pub const KEPT_SPACES: usize = 4;

/// What a restore makes of a key, if anything.
pub fn restored(current: &Held, wanted: Option<&Held>) -> Option<(Rev, Option<Vec<u8>>)> {
    match wanted {
        Some(wanted) if wanted == current => None,
        None if current.2.is_none() => None,
        Some((rev, _, value)) => Some(((*rev).max(current.0).next(), value.clone())),
        None => Some((current.0.next(), None)),
    }
}
