//! The spaces that watches of this process wait for, as other processes have to know them: they tell of a large group
//! of commits only if it touches one of them. Knows no statement.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::SpaceId;
use crate::postgres::known::Spaces;

#[derive(Default)]
pub(super) struct Watched {
    /// How many watches wait for a space.
    waiting: BTreeMap<SpaceId, usize>,
    /// What was waited for lately, and in the time before: a watch that reads soon waits again.
    lately: Spaces,
    before: Spaces,
    /// When the one became the other, on the monotonic clock.
    turned: Duration,
    /// What other processes know.
    known: Spaces,
}

/// How long a watch may read before other processes forget it.
const READS: Duration = Duration::from_secs(10);

impl Watched {
    /// A watch begins to wait. Gives whether other processes know.
    pub(super) fn begin(&mut self, space: SpaceId) -> bool {
        *self.waiting.entry(space).or_default() += 1;
        self.lately.add(Spaces::of(space));
        self.known.may_hold(space)
    }

    /// A watch no longer waits.
    pub(super) fn end(&mut self, space: SpaceId) {
        let Some(count) = self.waiting.get_mut(&space) else { return };
        *count -= 1;
        if *count == 0 {
            self.waiting.remove(&space);
        }
    }

    /// Whether a watch waits of which other processes do not know.
    pub(super) fn has_unknown(&self) -> bool {
        self.waiting.keys().any(|space| !self.known.may_hold(*space))
    }

    /// The row of this process is written next. Gives what it has to say.
    pub(super) fn renew(&mut self, now: Duration) -> Spaces {
        let mut all = self.lately;
        all.add(self.before);
        self.waiting.keys().for_each(|space| all.add(Spaces::of(*space)));
        if now.saturating_sub(self.turned) >= READS {
            (self.before, self.lately, self.turned) = (self.lately, Spaces::default(), now);
        }
        // From now on, a watch on a space that the row no longer names does not count on it.
        self.known = self.known.and(all);
        all
    }

    /// The row of this process was removed meanwhile.
    pub(super) fn was_removed(&mut self) {
        self.known = Spaces::default();
    }

    /// The row of this process was written, and then the head was locked: all later groups are told.
    pub(super) fn make_known(&mut self, said: Spaces) {
        self.known = said;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(renewal: u32) -> Duration {
        READS * renewal
    }

    #[test]
    fn a_space_is_named_while_a_watch_waits_for_it_and_for_some_time_after() {
        let (mut watched, space, other) = (Watched::default(), SpaceId(20), SpaceId(21));
        assert!(!watched.begin(space) && watched.has_unknown(), "no other process knows yet");
        let said = watched.renew(at(1));
        assert!(said.may_hold(space) && watched.has_unknown(), "a group on its way may not be told");
        watched.make_known(said);
        assert!(watched.begin(space) && !watched.has_unknown());
        assert!(!watched.begin(other));
        watched.end(space);
        for renewal in 2..6 {
            let said = watched.renew(at(renewal));
            assert!(said.may_hold(space) && said.may_hold(other), "both are waited for");
            watched.make_known(said);
        }
        watched.end(space);
        watched.end(other);
        assert!(watched.begin(other), "the watch has read, and waits again");
        watched.end(other);
        for _ in 0..9 {
            assert!(watched.renew(at(6)).may_hold(other), "no time has passed");
        }
        assert!(watched.renew(at(7)).may_hold(other));
        assert!(!watched.renew(at(8)).may_hold(other));
        assert!(!watched.begin(other));
    }

    /// The row is written without the space, and at this moment a watch begins to wait for it.
    #[test]
    fn a_watch_does_not_count_on_what_the_next_row_leaves_out() {
        let (mut watched, space) = (Watched::default(), SpaceId(20));
        watched.begin(space);
        let said = watched.renew(at(1));
        watched.make_known(said);
        watched.end(space);
        watched.renew(at(2));
        watched.renew(at(3));
        let said = watched.renew(at(4));
        assert!(!said.may_hold(space));
        assert!(!watched.begin(space) && watched.has_unknown());
        assert!(watched.renew(at(4)).may_hold(space));
    }

    /// A process was suspended for longer than its lease. Groups were told to others only.
    #[test]
    fn a_row_that_was_removed_makes_every_watch_unknown() {
        let (mut watched, space) = (Watched::default(), SpaceId(20));
        watched.begin(space);
        let said = watched.renew(at(1));
        watched.make_known(said);
        assert!(!watched.has_unknown());
        assert!(watched.renew(at(1)).may_hold(space));
        watched.was_removed();
        assert!(watched.has_unknown());
    }
}
