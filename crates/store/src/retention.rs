//! Decides which history may be dropped. Each space has a floor: the oldest generation at which it can be read. Floors
//! follow the spaces' rules, never pass a pinned view, and never fall. Backends store them and drop what lies below.
//!
//! The rules are functions here: which generation a time means, which version can still be read, which key leaves no
//! tombstone. [`Retention`] keeps pins, rules and floors for a backend that is the only user of its storage.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::backend::{Answer, Rules};
use crate::space::{RECEIPTS, SPACES};
use crate::{Generation, History, Result, SpaceId, StoreError, Timestamp};

/// How long the receipt of a commit with an id is kept.
pub(crate) const RECEIPTS_KEPT: Duration = Duration::from_secs(24 * 60 * 60);

/// The newest commit that is not later than a time, as a backend found it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Before {
    /// Nothing was committed after the time; this is the newest generation.
    Latest(Generation),
    /// The newest generation up to the time that touched one of the requested spaces above its floor.
    Touched(Option<Generation>),
}

/// Returns the generation at a time: the newest generation if nothing was committed later, otherwise the newest one up
/// to the time that a space with history remembers. `spaces` are the spaces and floors that the backend was asked for.
pub fn generation_at(time: Timestamp, spaces: &[(SpaceId, Generation)], before: Before) -> Result<Generation> {
    match before {
        Before::Latest(found) | Before::Touched(Some(found)) => Ok(found),
        Before::Touched(None) => {
            // The commits of the store's own spaces also show which generation a time means, but their past is not
            // read.
            let floors =
                spaces.iter().filter(|(space, _)| ![SPACES, RECEIPTS].contains(space)).map(|(_, floor)| *floor);
            match floors.min() {
                None | Some(Generation(0)) => Ok(Generation(0)),
                Some(oldest) => Err(StoreError::TimeDropped { asked: time, oldest }),
            }
        }
    }
}

/// True if a version that was overwritten or deleted at `until` can still be read in a space with this floor.
pub fn is_readable(until: Generation, floor: Generation) -> bool {
    until > floor
}

impl Rules {
    /// True if nothing of a key is kept once its last version lies at or below the floor. `live` says whether that
    /// version is a value.
    pub fn forgets(&self, live: bool) -> bool {
        self.expires || (self.used_once && !live)
    }

    /// The rules of the store's own spaces.
    pub fn own() -> [(SpaceId, Rules); 2] {
        let receipts = Rules { history: History::For(RECEIPTS_KEPT), used_once: true, expires: true };
        let declarations = Rules { history: History::Forever, ..Rules::default() };
        [(SPACES, declarations), (RECEIPTS, receipts)]
    }
}

/// Pins, rules and floors of one store, for a backend that is the only user of its storage.
#[derive(Debug)]
pub struct Retention {
    state: Mutex<RetentionState>,
    /// The highest floor. A view of the newest generation compares with it and needs no lock.
    highest: AtomicU64,
    /// The generation of the newest declaration of a space.
    declared: AtomicU64,
}

#[derive(Debug, Default)]
struct RetentionState {
    pins: BTreeMap<Generation, usize>,
    /// The rules, with the generation of the declaration that they come from.
    rules: BTreeMap<SpaceId, (Rules, Generation)>,
    floors: BTreeMap<SpaceId, Generation>,
}

/// Holds a generation: what is readable at it stays readable until the pin is dropped.
#[derive(Debug)]
pub struct Pin {
    generation: Generation,
    declared: Generation,
    _hold: Hold,
}

/// Ends the pin when it is dropped.
#[derive(Debug)]
enum Hold {
    Here { _pin: LocalPin },
    Elsewhere { _lease: Box<dyn Any + Send + Sync> },
}

#[derive(Debug)]
struct LocalPin(Generation, Arc<Retention>);

impl Retention {
    /// Creates the retention of a store with the floors that were found in its storage.
    pub fn new(floors: BTreeMap<SpaceId, Generation>) -> Arc<Retention> {
        let highest = AtomicU64::new(floors.values().max().map_or(0, |floor| floor.0));
        let rules = Rules::own().into_iter().map(|(space, rules)| (space, (rules, Generation(0)))).collect();
        let state = Mutex::new(RetentionState { pins: BTreeMap::new(), rules, floors });
        Arc::new(Retention { state, highest, declared: AtomicU64::new(0) })
    }

    /// Sets a space's rules, unless the rules of a newer declaration are known. A space that was never declared here
    /// keeps everything.
    pub fn declare(&self, space: SpaceId, rules: Rules, at: Generation) {
        let mut state = self.state.lock();
        if state.rules.get(&space).is_none_or(|(_, known)| *known <= at) {
            state.rules.insert(space, (rules, at));
        }
    }

    /// Notes that a commit has declared a space, or that a restore has declared all of them. Handles that have read the
    /// declarations earlier read them again.
    pub fn declared(&self, at: Generation) {
        self.declared.fetch_max(at.0, Ordering::SeqCst);
    }

    /// The rules of a space.
    pub fn rules(&self, space: SpaceId) -> Option<Rules> {
        self.state.lock().rules.get(&space).map(|(rules, _)| *rules)
    }

    /// The spaces that keep history by their rules, with their floors.
    pub fn with_history(&self) -> Vec<(SpaceId, Generation)> {
        let state = self.state.lock();
        let spaces = state.rules.iter().filter(|(_, (rules, _))| rules.history != History::None);
        spaces.map(|(space, _)| (*space, state.floors.get(space).copied().unwrap_or_default())).collect()
    }

    /// Pins a generation. What is already below a floor stays unreadable.
    pub fn pin(self: &Arc<Self>, generation: Generation) -> Pin {
        *self.state.lock().pins.entry(generation).or_default() += 1;
        let declared = Generation(self.declared.load(Ordering::SeqCst));
        Pin { generation, declared, _hold: Hold::Here { _pin: LocalPin(generation, self.clone()) } }
    }

    /// Pins a generation, or the newest: see [`crate::backend::Backend::pin`].
    pub async fn pin_at<'a>(
        self: &'a Arc<Self>,
        at: Option<Generation>,
        latest: impl Fn() -> Result<Generation> + Send,
        newer: impl Fn(Generation) -> Answer<'a, Generation> + Send,
    ) -> Result<Pin> {
        if let Some(at) = at {
            return Ok(self.pin(at));
        }
        loop {
            let latest = latest()?;
            let pin = self.pin(latest);
            // A floor may have passed `latest` between the two lines above. Then a newer generation exists, or a
            // restore is about to create one.
            if self.is_whole(latest) {
                return Ok(pin);
            }
            drop(pin);
            newer(latest).await?;
        }
    }

    /// True if every space can be read at `generation`.
    pub fn is_whole(&self, generation: Generation) -> bool {
        generation.0 >= self.highest.load(Ordering::SeqCst)
    }

    /// The oldest generation at which the space can be read.
    pub fn floor(&self, space: SpaceId) -> Generation {
        self.state.lock().floors.get(&space).copied().unwrap_or_default()
    }

    /// Every floor that is not zero.
    pub fn floors(&self) -> BTreeMap<SpaceId, Generation> {
        self.state.lock().floors.clone()
    }

    /// Refuses a read of `space` at a generation below its floor.
    pub fn check(&self, space: SpaceId, asked: Generation) -> Result<()> {
        if self.is_whole(asked) {
            return Ok(());
        }
        let oldest = self.floor(space);
        if asked >= oldest { Ok(()) } else { Err(StoreError::HistoryDropped { space, asked, oldest }) }
    }

    /// The number of pins.
    pub fn pins(&self) -> usize {
        self.state.lock().pinned()
    }

    /// Raises the floors as far as the rules and pins allow at `latest`. `before` answers like
    /// [`crate::backend::Backend::before`].
    pub fn advance(
        &self,
        latest: Generation,
        now: Timestamp,
        mut before: impl FnMut(Timestamp, &[(SpaceId, Generation)]) -> Result<Before>,
    ) -> Result<()> {
        let rules = self.state.lock().rules.clone();
        let remember = self.with_history();
        let mut at_time = |time| match before(time, &remember) {
            Ok(before) => Ok(generation_at(time, &remember, before).ok()),
            Err(error) => Err(error),
        };
        let mut wanted = Vec::with_capacity(rules.len());
        for (space, (rules, _)) in rules {
            let floor = match rules.history {
                History::None => latest,
                History::Generations(count) => Generation(latest.0.saturating_sub(count)),
                History::For(duration) => at_time(now.minus(duration))?.unwrap_or_default(),
                History::Forever => continue,
            };
            wanted.push((space, floor));
        }
        let mut state = self.state.lock();
        let pinned = state.pins.keys().next().copied();
        for (space, floor) in wanted {
            let floor = pinned.map_or(floor, |pinned| floor.min(pinned));
            let entry = state.floors.entry(space).or_default();
            *entry = (*entry).max(floor);
        }
        self.remember_highest(&state);
        Ok(())
    }

    /// Fails while views are open. A restore calls it before it begins.
    pub(crate) fn check_unpinned(&self) -> Result<()> {
        self.state.lock().check_unpinned()
    }

    /// Raises the floors for a restore, which is the commit `generation`, and returns them. History starts again in
    /// every space, except that receipts keep the generations of their commits. Fails if a view was opened meanwhile. A
    /// view that is opened from now on sees nothing from before the restore.
    pub(crate) fn begin_anew(
        &self,
        generation: Generation,
        spaces: impl IntoIterator<Item = SpaceId>,
    ) -> Result<BTreeMap<SpaceId, Generation>> {
        let mut state = self.state.lock();
        state.check_unpinned()?;
        let known = state.rules.keys().copied().chain(spaces).filter(|space| *space != RECEIPTS);
        let floors: BTreeMap<_, _> = known.map(|space| (space, generation)).collect();
        state.floors.extend(&floors);
        self.remember_highest(&state);
        Ok(floors)
    }

    fn remember_highest(&self, state: &RetentionState) {
        let highest = state.floors.values().max().map_or(0, |floor| floor.0);
        self.highest.fetch_max(highest, Ordering::SeqCst);
    }
}

impl RetentionState {
    fn pinned(&self) -> usize {
        self.pins.values().sum()
    }

    fn check_unpinned(&self) -> Result<()> {
        match self.pinned() {
            0 => Ok(()),
            views => Err(StoreError::ViewsOpen { views }),
        }
    }
}

impl Pin {
    /// A pin that is stored elsewhere, for example as a row with a lease. The backend renews it until `lease` is
    /// dropped. `declared` is the current generation of the newest declaration of a space.
    pub fn leased(generation: Generation, declared: Generation, lease: impl Any + Send + Sync) -> Pin {
        Pin { generation, declared, _hold: Hold::Elsewhere { _lease: Box::new(lease) } }
    }

    /// The pinned generation.
    pub fn generation(&self) -> Generation {
        self.generation
    }

    /// The generation of the newest declaration of a space at the time of pinning. Rules that were read at an older
    /// generation may be out of date, because another process has changed them.
    pub fn declared(&self) -> Generation {
        self.declared
    }
}

impl Drop for LocalPin {
    fn drop(&mut self) {
        let LocalPin(generation, retention) = self;
        let mut state = retention.state.lock();
        if let Some(count) = state.pins.get_mut(generation) {
            *count -= 1;
            if *count == 0 {
                state.pins.remove(generation);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPACE: SpaceId = SpaceId(20);

    fn advanced(history: History, pinned: Option<u64>, latest: u64) -> Generation {
        let retention = Retention::new(BTreeMap::new());
        retention.declare(SPACE, Rules { history, ..Rules::default() }, Generation(1));
        let _pin = pinned.map(|generation| retention.pin(Generation(generation)));
        retention
            .advance(Generation(latest), Timestamp(1_000_000), |time, _| {
                Ok(Before::Touched(Some(Generation(time.0 / 100_000))))
            })
            .unwrap();
        retention.floor(SPACE)
    }

    #[test]
    fn floors_follow_the_rules_and_stop_at_pins() {
        assert_eq!(advanced(History::None, None, 50), Generation(50));
        assert_eq!(advanced(History::None, Some(20), 50), Generation(20));
        assert_eq!(advanced(History::Generations(10), None, 50), Generation(40));
        assert_eq!(advanced(History::Generations(10), Some(45), 50), Generation(40));
        assert_eq!(advanced(History::Generations(100), None, 50), Generation(0));
        assert_eq!(advanced(History::For(Duration::from_millis(300)), None, 50), Generation(7));
        assert_eq!(advanced(History::Forever, None, 50), Generation(0));
    }

    #[test]
    fn a_floor_never_falls_and_the_error_of_a_read_below_names_it() {
        let retention = Retention::new(BTreeMap::from([(SPACE, Generation(9))]));
        let rules = Rules { history: History::Generations(100), ..Rules::default() };
        retention.declare(SPACE, rules, Generation(2));
        retention.declare(SPACE, Rules::default(), Generation(1));
        assert_eq!(retention.rules(SPACE), Some(rules), "an older declaration is ignored");
        retention.advance(Generation(10), Timestamp(0), |_, _| Ok(Before::Touched(None))).unwrap();
        assert!(retention.check(SPACE, Generation(9)).is_ok());
        let error = retention.check(SPACE, Generation(8)).unwrap_err();
        assert!(matches!(error, StoreError::HistoryDropped { oldest: Generation(9), .. }), "{error}");
        assert!(retention.check(SpaceId(21), Generation(1)).is_ok(), "floors are per space");
    }

    #[test]
    fn a_time_means_the_newest_generation_that_a_space_with_history_remembers() {
        let check = |spaces: &[(SpaceId, u64)], before, expected: Option<u64>| {
            let spaces: Vec<_> = spaces.iter().map(|(space, floor)| (*space, Generation(*floor))).collect();
            let found = generation_at(Timestamp(5), &spaces, before);
            assert_eq!(found.ok(), expected.map(Generation), "{spaces:?} {before:?}");
        };
        check(&[(SPACE, 7)], Before::Latest(Generation(9)), Some(9));
        check(&[(SPACE, 7)], Before::Touched(Some(Generation(8))), Some(8));
        check(&[(SPACE, 7)], Before::Touched(None), None);
        check(&[(SPACE, 7), (SpaceId(21), 0)], Before::Touched(None), Some(0));
        check(&[(RECEIPTS, 7), (SPACES, 3)], Before::Touched(None), Some(0));
    }

    #[test]
    fn history_starts_again_only_while_no_view_is_open() {
        let retention = Retention::new(BTreeMap::new());
        let pin = retention.pin(Generation(5));
        let refused = retention.begin_anew(Generation(9), [SPACE]);
        assert!(matches!(refused, Err(StoreError::ViewsOpen { views: 1 })), "{refused:?}");
        assert!(retention.check(SPACE, Generation(5)).is_ok());
        drop(pin);
        assert_eq!(retention.begin_anew(Generation(9), [SPACE]).unwrap().get(&SPACE), Some(&Generation(9)));
        assert!(!retention.is_whole(Generation(8)) && retention.check(SPACE, Generation(8)).is_err());
    }
}
