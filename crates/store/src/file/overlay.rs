//! The versions in memory that are not folded into the index yet. They are found by key, and sorted only when a scan
//! needs it. Readers and the writer do not wait for each other. An overlay also holds versions above the visible
//! generation; no reader asks for them.

use std::collections::{BTreeMap, HashMap};
use std::ops::Bound;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam_skiplist::SkipMap;
use parking_lot::{Mutex, RwLock};
use smallvec::SmallVec;

use super::heads::KeyHashes;
use crate::{Change, Committed, Generation, Key, Range, SpaceId, Timestamp, Version};

/// The approximate memory of a change beyond its own bytes.
const CHANGE_OVERHEAD: usize = 250;

/// The number of separately locked maps. The writer locks one at a time, so that readers of other keys continue.
const SHARDS: usize = 16;

type Chains = Vec<(Key, Arc<Chain>)>;

#[derive(Debug)]
pub(super) struct Overlay {
    chains: [RwLock<HashMap<Key, Arc<Chain>, KeyHashes>>; SHARDS],
    hashes: KeyHashes,
    /// Keys that are not in `ordered` yet, by space. Most keys are folded before a scan needs their order.
    unordered: Mutex<BTreeMap<SpaceId, Chains>>,
    ordered: SkipMap<Key, Arc<Chain>>,
    /// Locked while keys move from `unordered` to `ordered`.
    ordering: Mutex<()>,
    /// The commits of this overlay, in order, without gaps.
    commits: RwLock<Vec<Arc<Committed>>>,
    bytes: AtomicU64,
}

/// The versions of one key, oldest first. The lock is held only for short reads and writes.
#[derive(Debug)]
pub(super) struct Chain(RwLock<SmallVec<[VersionRef; 1]>>);

/// A version, stored as a reference to a change of a commit.
#[derive(Debug, Clone)]
struct VersionRef {
    commit: Arc<Committed>,
    change: u32,
}

impl VersionRef {
    fn generation(&self) -> Generation {
        self.commit.generation
    }

    fn change(&self) -> &Change {
        &self.commit.changes[self.change as usize]
    }

    fn version(&self) -> Version {
        let Change { rev, value, .. } = self.change();
        let Committed { generation, time, .. } = *self.commit;
        Version { rev: *rev, generation, time, value: value.clone() }
    }
}

impl Chain {
    fn last(&self) -> Option<Version> {
        self.0.read().last().map(VersionRef::version)
    }

    fn last_generation(&self) -> Option<Generation> {
        self.0.read().last().map(VersionRef::generation)
    }

    fn at(&self, at: Generation) -> Option<Version> {
        let links = self.0.read();
        links[..links.partition_point(|link| link.generation() <= at)].last().map(VersionRef::version)
    }

    /// The last `limit` versions that are not newer than `at`, newest first. A hot key has thousands of versions here.
    fn until(&self, at: Generation, limit: usize) -> Vec<Version> {
        let links = self.0.read();
        let until = links.partition_point(|link| link.generation() <= at);
        links[until.saturating_sub(limit)..until].iter().rev().map(VersionRef::version).collect()
    }

    /// The changes of this key with their generations, oldest first.
    pub(super) fn changes(&self) -> SmallVec<[(Generation, Arc<Committed>, usize); 1]> {
        let links = self.0.read();
        links.iter().map(|link| (link.generation(), link.commit.clone(), link.change as usize)).collect()
    }
}

impl Overlay {
    /// Creates an overlay for about `keys` keys.
    pub(super) fn new(seed: u64, keys: usize) -> Overlay {
        let hashes = KeyHashes(seed);
        let shard = || RwLock::new(HashMap::with_capacity_and_hasher(keys / SHARDS, hashes.clone()));
        Overlay {
            chains: std::array::from_fn(|_| shard()),
            hashes,
            unordered: Mutex::default(),
            ordered: SkipMap::new(),
            ordering: Mutex::default(),
            commits: RwLock::default(),
            bytes: AtomicU64::new(0),
        }
    }

    fn shard(&self, key: &Key) -> &RwLock<HashMap<Key, Arc<Chain>, KeyHashes>> {
        // The map uses the low and the top bits of the hash, so the shard uses bits in the middle.
        &self.chains[(self.hashes.hash(key) >> 32) as usize % SHARDS]
    }

    fn chain(&self, key: &Key) -> Option<Arc<Chain>> {
        self.shard(key).read().get(key).cloned()
    }

    /// Adds a commit.
    pub(super) fn insert(&self, commit: Arc<Committed>) {
        let mut bytes = commit.meta.len();
        for (index, change) in commit.changes.iter().enumerate() {
            bytes +=
                change.key.encoded().len() + change.value.as_ref().map_or(0, |value| value.len()) + CHANGE_OVERHEAD;
            let link = VersionRef { commit: commit.clone(), change: index as u32 };
            let shard = self.shard(&change.key);
            if let Some(chain) = shard.read().get(&change.key) {
                chain.0.write().push(link);
                continue;
            }
            let chain = Arc::new(Chain(RwLock::new(SmallVec::from_buf([link]))));
            shard.write().insert(change.key.clone(), chain.clone());
            self.unordered.lock().entry(change.key.space()).or_default().push((change.key.clone(), chain));
        }
        self.commits.write().push(commit);
        self.bytes.fetch_add(bytes as u64, Ordering::Release);
    }

    /// Counts the padding of frames. So the limit of memory also bounds the log that must be read after a crash.
    pub(super) fn charge(&self, bytes: usize) {
        self.bytes.fetch_add(bytes as u64, Ordering::Release);
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Acquire)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.commits.read().is_empty()
    }

    /// The last commit of this overlay.
    pub(super) fn last(&self) -> Option<Arc<Committed>> {
        self.commits.read().last().cloned()
    }

    /// The newest version of a key.
    pub(super) fn newest(&self, key: &Key) -> Option<Version> {
        self.chain(key)?.last()
    }

    /// The newest version of a key that is not newer than `at`.
    pub(super) fn at(&self, key: &Key, at: Generation) -> Option<Version> {
        self.chain(key)?.at(at)
    }

    /// The versions of a key that are not newer than `at`, newest first, at most `limit` of them.
    pub(super) fn versions(&self, key: &Key, at: Generation, limit: usize) -> Vec<Version> {
        self.chain(key).map(|chain| chain.until(at, limit)).unwrap_or_default()
    }

    /// Sorts the keys of the range's spaces and returns all sorted keys. They may include keys of other spaces.
    fn ordered(&self, range: &Range) -> &SkipMap<Key, Arc<Chain>> {
        let _ordering = self.ordering.lock();
        let unordered: Chains = {
            let mut unordered = self.unordered.lock();
            let spaces = unordered.range_mut(range.spaces());
            spaces.flat_map(|(_, keys)| std::mem::take(keys)).collect()
        };
        for (key, chain) in unordered {
            self.ordered.insert(key, chain);
        }
        &self.ordered
    }

    /// The keys of a range, in order.
    pub(super) fn keys<'a>(&'a self, range: &'a Range) -> impl DoubleEndedIterator<Item = Key> + 'a {
        self.ordered(range).range::<[u8], _>(bounds(range)).map(|entry| entry.key().clone())
    }

    /// Some key of the range that was written after `since`.
    pub(super) fn changed_since(&self, range: &Range, since: Generation) -> Option<(Key, Generation)> {
        if self.last().is_none_or(|last| last.generation <= since) {
            return None;
        }
        self.ordered(range).range::<[u8], _>(bounds(range)).find_map(|entry| {
            let generation = entry.value().last_generation()?;
            (generation > since).then(|| (entry.key().clone(), generation))
        })
    }

    /// The key of the range that was written last, if that was after `after`. Reads each commit after `after`.
    pub(super) fn changed_after(&self, range: &Range, after: Generation) -> Option<(Key, Generation)> {
        let commits = self.commits.read();
        let newer = commits.iter().rev().take_while(|commit| commit.generation > after);
        newer.into_iter().find_map(|commit| {
            let change = commit.changes.iter().find(|change| range.contains(&change.key))?;
            Some((change.key.clone(), commit.generation))
        })
    }

    /// Every key with its chain, in key order. No commit may be added any more.
    pub(super) fn sorted(&self) -> Chains {
        let mut chains = Vec::new();
        for shard in &self.chains {
            chains.extend(shard.read().iter().map(|(key, chain)| (key.clone(), chain.clone())));
        }
        chains.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        chains
    }

    /// The commits after `after`, oldest first, at most `limit`.
    pub(super) fn commits_after(&self, after: Generation, limit: usize) -> Vec<Arc<Committed>> {
        let commits = self.commits.read();
        let start = commits.partition_point(|commit| commit.generation <= after);
        commits[start..].iter().take(limit).cloned().collect()
    }

    /// The last commit that is not later than `time` and for which `counts` is true.
    pub(super) fn last_at(
        &self,
        time: Timestamp,
        visible: Generation,
        counts: impl Fn(&Committed) -> bool,
    ) -> Option<Generation> {
        let commits = self.commits.read();
        let end = commits.partition_point(|commit| commit.time <= time && commit.generation <= visible);
        commits[..end].iter().rev().find(|commit| counts(commit)).map(|commit| commit.generation)
    }
}

fn bounds(range: &Range) -> (Bound<&[u8]>, Bound<&[u8]>) {
    (Bound::Included(range.start()), Bound::Excluded(range.end()))
}
