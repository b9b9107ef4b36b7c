//! What may be forgotten. Each space has a floor: the oldest generation at which it can be read. Floors follow the
//! spaces' rules, never pass a pinned view, and never go back. Backends store them and drop what lies below.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use crate::backend::Rules;
use crate::space::{RECEIPTS, SPACES};
use crate::{Generation, History, Result, SpaceId, StoreError, Timestamp};

/// How long the answer to a commit id is remembered.
pub(crate) const RECEIPTS_KEPT: Duration = Duration::from_secs(24 * 60 * 60);

/// Pins, rules and floors of one store.
#[derive(Debug)]
pub struct Retention {
    state: Mutex<State>,
    /// The highest floor, so that a view of the present needs no lock to know that all is there.
    highest: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    pins: BTreeMap<Generation, usize>,
    rules: BTreeMap<SpaceId, Rules>,
    floors: BTreeMap<SpaceId, Generation>,
}

/// Holds a generation: what can be read at it now stays readable until this is dropped.
#[derive(Debug)]
pub struct Pin {
    generation: Generation,
    retention: Arc<Retention>,
}

impl Retention {
    /// Retention with the floors found in storage.
    pub fn new(floors: BTreeMap<SpaceId, Generation>) -> Arc<Retention> {
        let highest = AtomicU64::new(floors.values().max().map_or(0, |floor| floor.0));
        let receipts = Rules { history: History::For(RECEIPTS_KEPT), used_once: true, expires: true };
        let declarations = Rules { history: History::Forever, ..Rules::default() };
        let rules = BTreeMap::from([(SPACES, declarations), (RECEIPTS, receipts)]);
        Arc::new(Retention { state: Mutex::new(State { pins: BTreeMap::new(), rules, floors }), highest })
    }

    /// Makes a space's rules known. A space that was never declared here keeps everything.
    pub fn declare(&self, space: SpaceId, rules: Rules) {
        self.state.lock().rules.insert(space, rules);
    }

    /// The rules of a space.
    pub fn rules(&self, space: SpaceId) -> Option<Rules> {
        self.state.lock().rules.get(&space).copied()
    }

    /// Whether the space keeps history by its rules, not only for open views.
    pub fn keeps_history(&self, space: SpaceId) -> bool {
        self.rules(space).is_none_or(|rules| rules.history != History::None)
    }

    /// The spaces that keep history by their rules, with their floors.
    pub fn with_history(&self) -> Vec<(SpaceId, Generation)> {
        let state = self.state.lock();
        let spaces = state.rules.iter().filter(|(_, rules)| rules.history != History::None);
        spaces.map(|(space, _)| (*space, state.floors.get(space).copied().unwrap_or_default())).collect()
    }

    /// Pins a generation. What lay below a floor before stays unreadable.
    pub fn pin(self: &Arc<Self>, generation: Generation) -> Pin {
        *self.state.lock().pins.entry(generation).or_default() += 1;
        Pin { generation, retention: self.clone() }
    }

    /// Whether every space can be read at `generation`.
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

    /// How many pins there are.
    pub fn pins(&self) -> usize {
        self.state.lock().pinned()
    }

    /// Raises the floors to what the rules allow at `latest`. `at_time` tells the newest generation not later than
    /// a time, or `None` if it is not known.
    pub fn advance(
        &self,
        latest: Generation,
        now: Timestamp,
        mut at_time: impl FnMut(Timestamp) -> Result<Option<Generation>>,
    ) -> Result<()> {
        let rules = self.state.lock().rules.clone();
        let mut wanted = Vec::with_capacity(rules.len());
        for (space, rules) in rules {
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

    /// Refuses while views are open: what a restore must know before it begins.
    pub(crate) fn check_unpinned(&self) -> Result<()> {
        self.state.lock().check_unpinned()
    }

    /// Raises the floors for a restore as `generation`, which starts history anew in every space, and gives them. Only
    /// receipts go on: they keep the generations of their commits. Fails if a view was opened meanwhile; who opens one
    /// from now on sees nothing from before the restore.
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

    fn remember_highest(&self, state: &State) {
        let highest = state.floors.values().max().map_or(0, |floor| floor.0);
        self.highest.fetch_max(highest, Ordering::SeqCst);
    }
}

impl State {
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
    /// The pinned generation.
    pub fn generation(&self) -> Generation {
        self.generation
    }
}

impl Drop for Pin {
    fn drop(&mut self) {
        let mut state = self.retention.state.lock();
        if let Some(count) = state.pins.get_mut(&self.generation) {
            *count -= 1;
            if *count == 0 {
                state.pins.remove(&self.generation);
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
        retention.declare(SPACE, Rules { history, ..Rules::default() });
        let _pin = pinned.map(|generation| retention.pin(Generation(generation)));
        retention
            .advance(Generation(latest), Timestamp(1_000_000), |time| Ok(Some(Generation(time.0 / 100_000))))
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
    fn a_floor_never_goes_back_and_a_read_below_it_names_it() {
        let retention = Retention::new(BTreeMap::from([(SPACE, Generation(9))]));
        retention.declare(SPACE, Rules { history: History::Generations(100), ..Rules::default() });
        retention.advance(Generation(10), Timestamp(0), |_| Ok(None)).unwrap();
        assert!(retention.check(SPACE, Generation(9)).is_ok());
        let error = retention.check(SPACE, Generation(8)).unwrap_err();
        assert!(matches!(error, StoreError::HistoryDropped { oldest: Generation(9), .. }), "{error}");
        assert!(retention.check(SpaceId(21), Generation(1)).is_ok(), "floors are per space");
    }

    #[test]
    fn history_begins_anew_only_where_nobody_looks() {
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
