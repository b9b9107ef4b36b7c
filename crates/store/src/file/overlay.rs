//! What is newer than the index: an ordered map in memory from keys to their versions. Readers and the one writer
//! share it without waiting for each other; versions above the visible generation are there but nobody asks for them.

use std::ops::Bound;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crossbeam_skiplist::SkipMap;
use parking_lot::RwLock;
use smallvec::SmallVec;

use crate::{Committed, Generation, Key, Range, Version};

/// What a change costs in memory beyond its own bytes, roughly.
const CHANGE_OVERHEAD: usize = 300;

#[derive(Debug, Default)]
pub(super) struct Overlay {
    keys: SkipMap<Key, Chain>,
    /// The commits in here, in order, without gaps.
    commits: RwLock<Vec<Arc<Committed>>>,
    bytes: AtomicU64,
}

/// The versions of one key, oldest first. The lock is held for a copy of one version at a time.
#[derive(Debug, Default)]
struct Chain(RwLock<SmallVec<[Version; 1]>>);

impl Overlay {
    pub(super) fn insert(&self, committed: Arc<Committed>) {
        let mut bytes = committed.meta.len();
        for change in &committed.changes {
            bytes +=
                change.key.encoded().len() + change.value.as_ref().map_or(0, |value| value.len()) + CHANGE_OVERHEAD;
            let version = Version { rev: change.rev, generation: committed.generation, value: change.value.clone() };
            match self.keys.get(&change.key) {
                Some(entry) => entry.value().0.write().push(version),
                None => {
                    self.keys.insert(change.key.clone(), Chain(RwLock::new(SmallVec::from_buf([version]))));
                }
            }
        }
        self.commits.write().push(committed);
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    /// Counts the padding of frames, so that the log that must be read after a crash is bounded as memory is.
    pub(super) fn charge(&self, bytes: usize) {
        self.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// The generation of the last commit in here.
    pub(super) fn last(&self) -> Option<Generation> {
        self.commits.read().last().map(|commit| commit.generation)
    }

    /// The newest version of a key.
    pub(super) fn newest<T>(&self, key: &Key, read: impl FnOnce(&Version) -> T) -> Option<T> {
        let entry = self.keys.get(key)?;
        let chain = entry.value().0.read();
        chain.last().map(read)
    }

    /// The newest version of a key that is not newer than `at`.
    pub(super) fn at(&self, key: &Key, at: Generation) -> Option<Version> {
        let entry = self.keys.get(key)?;
        let chain = entry.value().0.read();
        chain[..chain.partition_point(|version| version.generation <= at)].last().cloned()
    }

    /// All versions of a key, oldest first.
    pub(super) fn versions(&self, key: &Key) -> Vec<Version> {
        self.keys.get(key).map(|entry| entry.value().0.read().to_vec()).unwrap_or_default()
    }

    /// The keys of a range, in order.
    pub(super) fn keys<'a>(&'a self, range: &'a Range) -> impl DoubleEndedIterator<Item = Key> + 'a {
        self.keys.range::<[u8], _>(bounds(range)).map(|entry| entry.key().clone())
    }

    /// Some key of the range that was written after `since`.
    pub(super) fn changed_since(&self, range: &Range, since: Generation) -> Option<(Key, Generation)> {
        if self.last().is_none_or(|last| last <= since) {
            return None;
        }
        self.keys.range::<[u8], _>(bounds(range)).find_map(|entry| {
            let generation = entry.value().0.read().last()?.generation;
            (generation > since).then(|| (entry.key().clone(), generation))
        })
    }

    /// Every key with its versions, in order of the keys.
    pub(super) fn chains(&self) -> impl Iterator<Item = (Key, SmallVec<[Version; 1]>)> + '_ {
        self.keys.iter().map(|entry| (entry.key().clone(), entry.value().0.read().clone()))
    }

    /// The commits after `after`, oldest first, at most `limit`.
    pub(super) fn commits_after(&self, after: Generation, limit: usize) -> Vec<Arc<Committed>> {
        let commits = self.commits.read();
        let start = commits.partition_point(|commit| commit.generation <= after);
        commits[start..].iter().take(limit).cloned().collect()
    }

    /// The last commit not later than `time` that `counts`.
    pub(super) fn last_at(
        &self,
        time: crate::Timestamp,
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
