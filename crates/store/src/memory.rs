//! The store in memory: one ordered map of versions behind one lock. It has no threads, so it is deterministic on
//! virtual time. Every few commits drop a small slice of old versions.

use std::collections::{BTreeMap, BTreeSet};
use std::future::ready;
use std::ops::Bound;
use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;

use crate::backend::{
    Answer, Backend, Before, Changes, Contents, Damage, Order, Pin, Retention, Rules, Scan, Stats, is_readable,
};
use crate::commit::Head;
use crate::evaluate::{Decision, Present, evaluate, restored, restored_receipt};
use crate::space::SPACES;
use crate::{Commit, Committed, Env, Generation, Key, Outcome, Range, Result, SpaceId, StoreError, Timestamp, Version};

/// After this many commits a slice of old history is dropped.
const COMMITS_PER_SLICE: u64 = 64;
/// How many changes one slice reads.
const CHANGES_PER_SLICE: usize = 256;

/// The backend of a store in memory.
pub struct MemoryBackend {
    env: Env,
    identity: u128,
    retention: Arc<Retention>,
    state: Mutex<MemoryState>,
    /// The latest generation, for callers that wait for a newer one. `None` once the store is closed.
    latest: Mutex<Option<watch::Sender<Generation>>>,
}

#[derive(Default)]
struct MemoryState {
    closed: bool,
    generation: Generation,
    time: Timestamp,
    /// The versions of each key, oldest first.
    keys: BTreeMap<Key, Vec<Version>>,
    /// The commits above each space's floor that changed the space.
    touched: BTreeMap<(SpaceId, Generation), Arc<Committed>>,
    stats: Stats,
}

/// The state as checks see it.
struct NewestInMemory<'a> {
    state: &'a MemoryState,
    retention: &'a Retention,
}

impl MemoryBackend {
    /// Resolves to the latest generation once it is larger than `than`.
    fn later(&self, than: Generation) -> Answer<'_, Generation> {
        let receiver = self.latest.lock().as_ref().map(watch::Sender::subscribe);
        Box::pin(async move {
            let mut receiver = receiver.ok_or(StoreError::Closed)?;
            receiver.wait_for(|latest| *latest > than).await.map(|latest| *latest).map_err(|_| StoreError::Closed)
        })
    }

    /// An empty store.
    ///
    /// ```
    /// # use latchwork_store::Env;
    /// # use latchwork_store::backend::MemoryBackend;
    /// let backend = MemoryBackend::new(Env::system());
    /// ```
    pub fn new(env: Env) -> MemoryBackend {
        let identity = u128::from(env.random()) << 64 | u128::from(env.random());
        MemoryBackend {
            env,
            identity,
            retention: Retention::new(BTreeMap::new()),
            state: Mutex::default(),
            latest: Mutex::new(Some(watch::Sender::new(Generation(0)))),
        }
    }

    fn state(&self) -> Result<MutexGuard<'_, MemoryState>> {
        let state = self.state.lock();
        if state.closed { Err(StoreError::Closed) } else { Ok(state) }
    }

    fn commit_now(&self, commit: Commit) -> Result<Outcome> {
        let mut state = self.state()?;
        let now = self.env.now().max(state.time);
        let (committed, receipt) =
            match evaluate(commit, &NewestInMemory { state: &state, retention: &self.retention }, now)? {
                Decision::Refuse(refusal) => {
                    state.stats.refused += 1;
                    return Ok(Outcome::Refused(refusal));
                }
                Decision::Answer(receipt) => return Ok(Outcome::Applied(receipt)),
                Decision::Apply(committed, receipt) => (committed, receipt),
            };
        if committed.changes.iter().any(|change| change.key.space() == SPACES) {
            self.retention.declared(committed.generation);
        }
        state.apply(committed);
        if state.stats.applied.is_multiple_of(COMMITS_PER_SLICE) {
            self.clean(&mut state)?;
        }
        self.announce(state.generation);
        Ok(Outcome::Applied(receipt))
    }

    fn announce(&self, generation: Generation) {
        if let Some(latest) = &*self.latest.lock() {
            latest.send_replace(generation);
        }
    }

    fn clean(&self, state: &mut MemoryState) -> Result<bool> {
        self.retention
            .advance(state.generation, self.env.now().max(state.time), |time, spaces| Ok(state.before(time, spaces)))?;
        Ok(state.drop_below(&self.retention))
    }

    fn replace_now(&self, contents: Contents) -> Result<Generation> {
        let mut state = self.state()?;
        if state.generation > Generation(0) && contents.identity != self.identity && state.has_user_keys() {
            return Err(StoreError::ForeignSnapshot);
        }
        self.retention.check_unpinned()?;
        let wanted: BTreeMap<Key, Version> = contents.records.collect::<Result<_>>()?;
        let generation = state.generation.max(contents.generation).next();
        let time = self.env.now().max(state.time).max(contents.time);
        let keys: BTreeSet<Key> = state.keys.keys().chain(wanted.keys()).cloned().collect();
        self.retention.begin_anew(generation, keys.iter().map(Key::space))?;
        let mut current = std::mem::take(&mut state.keys);
        state.touched.clear();
        for key in keys {
            let (old, new) = (current.remove(&key).and_then(|mut versions| versions.pop()), wanted.get(&key));
            let rules = self.retention.rules(key.space()).unwrap_or_default();
            let Some(version) = restored(&key, old.as_ref(), new, (generation, time), rules) else { continue };
            if let Some(receipt) = restored_receipt(&key, &version) {
                state.touched.insert((key.space(), version.generation), Arc::new(receipt));
            }
            state.keys.insert(key, vec![version]);
        }
        (state.generation, state.time) = (generation, time);
        self.retention.declared(generation);
        self.announce(generation);
        Ok(generation)
    }
}

impl MemoryState {
    fn apply(&mut self, committed: Committed) {
        let committed = Arc::new(committed);
        let Committed { generation, time, .. } = *committed;
        (self.generation, self.time) = (generation, time);
        self.stats.applied += 1;
        for change in &committed.changes {
            let version = Version { rev: change.rev, generation, time, value: change.value.clone() };
            self.keys.entry(change.key.clone()).or_default().push(version);
            self.touched.insert((change.key.space(), generation), committed.clone());
        }
    }

    fn range(&self, range: &Range) -> impl DoubleEndedIterator<Item = (&Key, &Vec<Version>)> {
        let bounds = (Bound::Included(range.start()), Bound::Excluded(range.end().max(range.start())));
        self.keys.range::<[u8], _>(bounds)
    }

    fn has_user_keys(&self) -> bool {
        self.keys.keys().any(|key| key.space() != SPACES)
    }

    fn before(&self, time: Timestamp, spaces: &[(SpaceId, Generation)]) -> Before {
        if time >= self.time {
            return Before::Latest(self.generation);
        }
        let last_in = |(space, floor): &(SpaceId, Generation)| {
            let rows = (Bound::Excluded((*space, *floor)), Bound::Included((*space, Generation(u64::MAX))));
            let early = self.touched.range(rows).take_while(|(_, committed)| committed.time <= time);
            early.last().map(|((_, generation), _)| *generation)
        };
        Before::Touched(spaces.iter().filter_map(last_in).max())
    }

    /// Drops a slice of what lies below the floors. Returns whether more is left.
    fn drop_below(&mut self, retention: &Retention) -> bool {
        let mut budget = CHANGES_PER_SLICE;
        for (space, floor) in retention.floors() {
            let rules = retention.rules(space).unwrap_or_default();
            while let Some((row, committed)) = self.touched.range((space, Generation(0))..=(space, floor)).next() {
                if budget == 0 {
                    return true;
                }
                let (row, committed) = (*row, committed.clone());
                self.touched.remove(&row);
                for change in committed.changes.iter().filter(|change| change.key.space() == space) {
                    budget = budget.saturating_sub(1);
                    let Some(versions) = self.keys.get_mut(&change.key) else { continue };
                    let later = versions.iter().skip(1);
                    let superseded = later.take_while(|later| !is_readable(later.generation, floor)).count();
                    versions.drain(..superseded);
                    let gone = versions
                        .first()
                        .is_some_and(|version| version.generation <= floor && rules.forgets(version.value.is_some()));
                    if gone && versions.len() == 1 {
                        self.keys.remove(&change.key);
                    }
                }
            }
        }
        false
    }
}

fn at(versions: &[Version], generation: Generation) -> Option<&Version> {
    versions[..versions.partition_point(|version| version.generation <= generation)].last()
}

impl Present for NewestInMemory<'_> {
    fn generation(&self) -> Generation {
        self.state.generation
    }

    fn head(&self, key: &Key) -> Result<Option<Head>> {
        Ok(self.state.keys.get(key).and_then(|versions| versions.last()).map(Version::head))
    }

    fn version(&self, key: &Key) -> Result<Option<Version>> {
        Ok(self.state.keys.get(key).and_then(|versions| versions.last()).cloned())
    }

    fn changed_since(&self, range: &Range, since: Generation) -> Result<Option<(Key, Generation)>> {
        self.retention.check(range.space(), since)?;
        let newest = self.state.range(range).filter_map(|(key, versions)| Some((key, versions.last()?.generation)));
        Ok(newest
            .filter(|(_, generation)| *generation > since)
            .map(|(key, generation)| (key.clone(), generation))
            .next())
    }
}

impl Backend for MemoryBackend {
    fn commit(&self, commit: Commit) -> Answer<'_, Outcome> {
        Box::pin(async move { self.commit_now(commit) })
    }

    fn latest(&self) -> Answer<'_, Generation> {
        Box::pin(ready(self.state().map(|state| state.generation)))
    }

    fn get<'a>(&'a self, key: &'a Key, generation: Generation) -> Answer<'a, Option<Version>> {
        let found = self.state().and_then(|state| {
            self.retention.check(key.space(), generation)?;
            Ok(state.keys.get(key).and_then(|versions| at(versions, generation)).cloned())
        });
        Box::pin(ready(found))
    }

    fn scan(&self, scan: Scan, generation: Generation) -> Answer<'_, Vec<(Key, Version)>> {
        let found = self.state().and_then(|state| {
            self.retention.check(scan.range.space(), generation)?;
            let found = state.range(&scan.range).filter_map(|(key, versions)| Some((key, at(versions, generation)?)));
            let found = found.filter(|(_, version)| scan.with_deleted || version.value.is_some());
            let mut room = scan.room();
            let mut fill = |rows: &mut dyn Iterator<Item = (&Key, &Version)>| {
                let mut batch = Vec::new();
                while room.is_left()
                    && let Some((key, version)) = rows.next()
                {
                    room.take(key, version);
                    batch.push((key.clone(), version.clone()));
                }
                batch
            };
            Ok(match scan.order {
                Order::Ascending => fill(&mut { found }),
                Order::Descending => fill(&mut found.rev()),
            })
        });
        Box::pin(ready(found))
    }

    fn versions<'a>(&'a self, key: &'a Key, generation: Generation, limit: usize) -> Answer<'a, Vec<Version>> {
        let found = self.state().and_then(|state| {
            self.retention.check(key.space(), generation)?;
            let floor = self.retention.floor(key.space());
            let versions = state.keys.get(key).map(Vec::as_slice).unwrap_or_default();
            let seen = &versions[..versions.partition_point(|version| version.generation <= generation)];
            let kept = seen.partition_point(|version| version.generation <= floor).saturating_sub(1);
            Ok(seen[kept..].iter().rev().take(limit).cloned().collect())
        });
        Box::pin(ready(found))
    }

    fn changes(&self, range: Range, after: Generation, limit: usize) -> Answer<'_, Changes> {
        let found = self.state().and_then(|state| {
            self.retention.check(range.space(), after)?;
            let rows = (Bound::Excluded((range.space(), after)), Bound::Included((range.space(), state.generation)));
            let mut changes = Changes { commits: Vec::new(), through: state.generation };
            if after >= state.generation || limit == 0 {
                changes.through = after;
                return Ok(changes);
            }
            for (_, committed) in state.touched.range(rows) {
                let touched: Vec<_> = committed.changes.iter().filter(|change| range.contains(&change.key)).collect();
                if touched.is_empty() {
                    continue;
                }
                let changes_here = touched.into_iter().cloned().collect();
                changes.commits.push(Committed { changes: changes_here, ..(**committed).clone() });
                if changes.commits.len() >= limit {
                    changes.through = committed.generation;
                    break;
                }
            }
            Ok(changes)
        });
        Box::pin(ready(found))
    }

    fn newer(&self, than: Generation, _: SpaceId) -> Answer<'_, Generation> {
        self.later(than)
    }

    fn before(&self, time: Timestamp, spaces: Vec<(SpaceId, Generation)>) -> Answer<'_, Before> {
        Box::pin(ready(self.state().map(|state| state.before(time, &spaces))))
    }

    fn pin(&self, at: Option<Generation>) -> Answer<'_, Pin> {
        let latest = || self.state().map(|state| state.generation);
        Box::pin(self.retention.pin_at(at, latest, |than| self.later(than)))
    }

    fn floor(&self, space: SpaceId) -> Generation {
        self.retention.floor(space)
    }

    fn declare(&self, space: SpaceId, rules: Rules, at: Generation) {
        self.retention.declare(space, rules, at);
    }

    fn maintain(&self) -> Answer<'_, bool> {
        Box::pin(ready(self.state().and_then(|mut state| self.clean(&mut state))))
    }

    fn replace(&self, contents: Contents) -> Answer<'_, Generation> {
        Box::pin(ready(self.replace_now(contents)))
    }

    fn verify(&self) -> Answer<'_, Vec<Damage>> {
        Box::pin(ready(self.state().map(|_| Vec::new())))
    }

    fn stats(&self) -> Answer<'_, Stats> {
        let stats = self.state().map(|state| Stats {
            generation: state.generation,
            keys: state.keys.len() as u64,
            past_versions: state.keys.values().map(|versions| versions.len() as u64 - 1).sum(),
            pins: self.retention.pins() as u64,
            ..state.stats
        });
        Box::pin(ready(stats))
    }

    fn identity(&self) -> u128 {
        self.identity
    }

    fn close(&self) -> Answer<'_, ()> {
        let mut state = self.state.lock();
        let open = if state.closed { Err(StoreError::Closed) } else { Ok(()) };
        state.closed = true;
        self.latest.lock().take();
        Box::pin(ready(open))
    }
}
