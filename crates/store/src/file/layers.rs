//! Reads through the layers: the active overlay, the frozen overlay that is being folded, and the index. Each layer
//! holds newer versions than the layers below it.

use std::cell::RefCell;
use std::iter::Peekable;
use std::sync::Arc;

use super::heads::Heads;
use super::index::IndexReader;
use super::overlay::Overlay;
use crate::backend::{Changes, Order, Present, Retention, Scan};
use crate::commit::Head;
use crate::{Committed, Generation, Key, Range, Result, Timestamp, Version};

/// A consistent set of layers. A reader loads it once for each operation.
pub(super) struct Layers {
    pub(super) active: Arc<Overlay>,
    pub(super) frozen: Option<Arc<Overlay>>,
    pub(super) index: Arc<IndexReader>,
}

/// How many commits one call reads at most to find those that touch a range.
const CHANGES_EFFORT: usize = 4096;

impl Layers {
    /// The overlays, newest first.
    fn overlays(&self) -> impl DoubleEndedIterator<Item = &Arc<Overlay>> {
        [Some(&self.active), self.frozen.as_ref()].into_iter().flatten().filter(|overlay| !overlay.is_empty())
    }

    /// The newest generation that the layers contain completely.
    fn latest(&self) -> Generation {
        let last = self.overlays().find_map(|overlay| overlay.last());
        last.map_or(self.index.progress.applied, |commit| commit.generation)
    }

    /// Some key of the range that was written after `since`.
    fn changed_since(&self, range: &Range, since: Generation) -> Result<Option<(Key, Generation)>> {
        if range.is_empty() {
            return Ok(None);
        }
        match self.overlays().find_map(|overlay| overlay.changed_since(range, since)) {
            Some(found) => Ok(Some(found)),
            None => self.index.changed_since(range, since),
        }
    }

    /// True if everything is folded into the index.
    pub(super) fn is_folded(&self) -> bool {
        self.active.is_empty() && self.frozen.is_none()
    }

    /// A copy of the layers, in which the caller replaces some.
    pub(super) fn copied(&self) -> Layers {
        Layers { active: self.active.clone(), frozen: self.frozen.clone(), index: self.index.clone() }
    }

    /// The last commit in memory that is not later than `time` and for which `counts` is true.
    pub(super) fn last_at(
        &self,
        time: Timestamp,
        visible: Generation,
        counts: impl Fn(&Committed) -> bool,
    ) -> Option<Generation> {
        self.overlays().find_map(|overlay| overlay.last_at(time, visible, &counts))
    }

    pub(super) fn at(&self, key: &Key, at: Generation) -> Result<Option<Version>> {
        match self.overlays().find_map(|overlay| overlay.at(key, at)) {
            Some(version) => Ok(Some(version)),
            None => self.index.at(key, at),
        }
    }

    fn newest(&self, key: &Key) -> Result<Option<Version>> {
        match self.overlays().find_map(|overlay| overlay.newest(key)) {
            Some(version) => Ok(Some(version)),
            None => self.index.newest(key),
        }
    }

    pub(super) fn versions(&self, key: &Key, at: Generation, floor: Generation, limit: usize) -> Result<Vec<Version>> {
        let mut versions: Vec<Version> = Vec::new();
        for overlay in self.overlays() {
            versions.extend(overlay.versions(key, at, limit.saturating_sub(versions.len())));
        }
        if versions.len() < limit {
            versions.extend(self.index.newest(key)?.filter(|version| version.generation <= at));
            versions.extend(self.index.past_versions(key, at, limit)?);
        }
        // The version that was current at the floor is kept. Older versions may already be removed.
        let kept = versions.iter().take_while(|version| version.generation > floor).count();
        versions.truncate((kept + 1).min(limit));
        Ok(versions)
    }

    pub(super) fn scan(&self, scan: &Scan, at: Generation) -> Result<Vec<(Key, Version)>> {
        let mut found = Vec::new();
        if scan.range.is_empty() {
            return Ok(found);
        }
        let descending = scan.order == Order::Descending;
        let mut sources: Vec<Source<'_>> = Vec::with_capacity(3);
        for overlay in self.overlays() {
            let keys = overlay.keys(&scan.range).map(|key| Ok((key, None)));
            sources.push(directed(keys, descending).peekable());
        }
        let indexed = self.index.range(&scan.range)?.map(|row| row.map(|(key, version)| (key, Some(version))));
        sources.push(directed(indexed, descending).peekable());
        let mut room = scan.room();
        while room.is_left() {
            let Some((key, indexed)) = next_key(&mut sources, descending)? else { break };
            let version = match self.overlays().find_map(|overlay| overlay.at(&key, at)) {
                Some(version) => Some(version),
                None => match indexed {
                    Some(version) if version.generation > at => self.index.past_at(&key, at)?,
                    indexed => indexed,
                },
            };
            if let Some(version) = version
                && (scan.with_deleted || version.value.is_some())
            {
                room.take(&key, &version);
                found.push((key, version));
            }
        }
        Ok(found)
    }

    pub(super) fn changes(
        &self,
        range: &Range,
        after: Generation,
        visible: Generation,
        limit: usize,
    ) -> Result<Changes> {
        if after >= visible || limit == 0 {
            return Ok(Changes { commits: Vec::new(), through: after });
        }
        let indexed = self.index.progress.applied;
        if after < indexed {
            let (commits, through) = self.index.changes(range, after, limit, CHANGES_EFFORT)?;
            return Ok(Changes { commits, through });
        }
        let mut changes = Changes { commits: Vec::new(), through: after };
        for overlay in self.overlays().rev() {
            for commit in overlay.commits_after(after, CHANGES_EFFORT) {
                if commit.generation > visible || changes.commits.len() >= limit {
                    return Ok(changes);
                }
                changes.through = commit.generation;
                let touched = commit.changes.iter().filter(|change| range.contains(&change.key));
                let touched: Vec<_> = touched.cloned().collect();
                if !touched.is_empty() {
                    let Committed { generation, time, ref meta, .. } = *commit;
                    changes.commits.push(Committed { generation, time, meta: meta.clone(), changes: touched });
                }
            }
            if overlay.last().is_some_and(|last| changes.through < last.generation) {
                break;
            }
        }
        Ok(changes)
    }
}

type Source<'a> = Peekable<Box<dyn Iterator<Item = Result<(Key, Option<Version>)>> + 'a>>;

fn directed<'a, T>(
    keys: impl DoubleEndedIterator<Item = T> + 'a,
    descending: bool,
) -> Box<dyn Iterator<Item = T> + 'a> {
    if descending { Box::new(keys.rev()) } else { Box::new(keys) }
}

/// Removes the next key from every source that has it. Returns it with the index's version, if there is one.
fn next_key(sources: &mut [Source<'_>], descending: bool) -> Result<Option<(Key, Option<Version>)>> {
    let mut next: Option<Key> = None;
    for source in sources.iter_mut() {
        match source.peek() {
            Some(Ok((key, _))) => {
                let better = |next: &Key| if descending { key > next } else { key < next };
                if next.as_ref().is_none_or(better) {
                    next = Some(key.clone());
                }
            }
            Some(Err(error)) => return Err(error.clone()),
            None => {}
        }
    }
    let Some(key) = next else { return Ok(None) };
    let mut version = None;
    for source in sources.iter_mut() {
        if let Some(Ok((_, Some(found)))) = source.next_if(|row| row.as_ref().is_ok_and(|(other, _)| *other == key)) {
            version = Some(found);
        }
    }
    Ok(Some((key, version)))
}

/// A checked range and what was found in it before the stage was locked. The search may be long, and under the lock
/// every other commit would wait for it.
pub(super) struct Looked {
    range: Range,
    since: Generation,
    found: Result<Found>,
}

enum Found {
    /// This key was written after `since`, at this generation or later.
    Changed(Key, Generation),
    /// Nothing was written after `since` and up to this generation.
    UnchangedUntil(Generation),
}

/// How many commits may be left to search under the lock.
const LEFT_FOR_STAGE: u64 = 64;

impl Looked {
    /// A range that was not searched yet.
    pub(super) fn not_yet(range: &Range, since: Generation) -> Looked {
        Looked { range: range.clone(), since, found: Ok(Found::UnchangedUntil(since)) }
    }

    /// True if too much was committed or folded since the range was searched.
    pub(super) fn is_behind(&self, layers: &Layers, latest: Generation) -> bool {
        let Ok(Found::UnchangedUntil(until)) = self.found else { return false };
        until < layers.index.progress.applied || until.0.saturating_add(LEFT_FOR_STAGE) < latest.0
    }

    /// Searches the range up to the newest generation in the layers. Other commits continue meanwhile.
    pub(super) fn look(&mut self, layers: &Layers, retention: &Retention) {
        // Read before the search, because the search may or may not see commits that are made meanwhile.
        let latest = layers.latest();
        let Ok(Found::UnchangedUntil(until)) = self.found else { return };
        if !self.is_behind(layers, latest) {
            return;
        }
        let changed = retention.check(self.range.space(), self.since);
        self.found = changed.and_then(|()| layers.changed_since(&self.range, until)).map(|changed| match changed {
            Some((key, generation)) => Found::Changed(key, generation),
            None => Found::UnchangedUntil(latest),
        });
    }
}

/// The layers as checks see them: every decided commit, durable or not. It caches the heads that it looks up.
pub(super) struct NewestLayers<'a> {
    pub(super) layers: &'a Layers,
    pub(super) retention: &'a Retention,
    pub(super) generation: Generation,
    pub(super) heads: RefCell<&'a mut Heads>,
    /// The ranges that the commit checks, already searched.
    pub(super) looked: &'a [Looked],
}

impl Present for NewestLayers<'_> {
    fn generation(&self) -> Generation {
        self.generation
    }

    fn head(&self, key: &Key) -> Result<Option<Head>> {
        let mut heads = self.heads.borrow_mut();
        if let Some(head) = heads.get(key) {
            return Ok(head);
        }
        let head = self.layers.newest(key)?.as_ref().map(Version::head);
        heads.set(key, head);
        Ok(head)
    }

    fn version(&self, key: &Key) -> Result<Option<Version>> {
        self.layers.newest(key)
    }

    fn changed_since(&self, range: &Range, since: Generation) -> Result<Option<(Key, Generation)>> {
        self.retention.check(range.space(), since)?;
        let looked = self.looked.iter().find(|looked| looked.since == since && looked.range == *range);
        let looked = looked.expect("every checked range was searched before the stage was locked");
        match &looked.found {
            Err(error) => Err(error.clone()),
            Ok(Found::UnchangedUntil(until)) => {
                Ok(self.layers.overlays().find_map(|overlay| overlay.changed_after(range, *until)))
            }
            // The key may have been written again meanwhile.
            Ok(Found::Changed(key, generation)) => {
                let last = self.head(key)?.map_or(*generation, |head| head.generation.max(*generation));
                Ok(Some((key.clone(), last)))
            }
        }
    }
}
