//! The spaces that watches of this process wait for, as other processes have to know them: they tell of a large group of
//! commits only if it touches one of them. Knows no statement.

use std::collections::BTreeMap;

use crate::SpaceId;
use crate::postgres::known::Spaces;

#[derive(Default)]
pub(super) struct Watched {
    /// How many watches wait for a space.
    waiting: BTreeMap<SpaceId, usize>,
    /// What was waited for since the last renewal, and between the last two: a watch that reads soon waits again.
    lately: Spaces,
    before: Spaces,
    /// What the row of this process says.
    stored: Spaces,
}

impl Watched {
    /// A watch begins to wait. Gives whether other processes know.
    pub(super) fn begin(&mut self, space: SpaceId) -> bool {
        *self.waiting.entry(space).or_default() += 1;
        self.lately.add(Spaces::of(space));
        self.stored.may_hold(space)
    }

    /// A watch no longer waits.
    pub(super) fn end(&mut self, space: SpaceId) {
        let Some(count) = self.waiting.get_mut(&space) else { return };
        *count -= 1;
        if *count == 0 {
            self.waiting.remove(&space);
        }
    }

    /// The row of this process is written next. Gives what it has to say.
    pub(super) fn renew(&mut self) -> Spaces {
        let mut all = self.lately;
        all.add(self.before);
        self.waiting.keys().for_each(|space| all.add(Spaces::of(*space)));
        (self.before, self.lately) = (self.lately, Spaces::default());
        // From now on, a watch on a space that the row no longer names does not count on it.
        self.stored = self.stored.and(all);
        all
    }

    /// The row of this process was written.
    pub(super) fn renewed(&mut self, said: Spaces) {
        self.stored = said;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(watched: &mut Watched) -> Spaces {
        let said = watched.renew();
        watched.renewed(said);
        said
    }

    #[test]
    fn a_space_is_named_while_a_watch_waits_for_it_and_for_two_renewals_after() {
        let (mut watched, space, other) = (Watched::default(), SpaceId(20), SpaceId(21));
        assert!(!watched.begin(space), "no other process knows yet");
        assert!(written(&mut watched).may_hold(space));
        assert!(watched.begin(space), "it is known");
        assert!(!watched.begin(other));
        watched.end(space);
        for _ in 0..5 {
            let said = written(&mut watched);
            assert!(said.may_hold(space) && said.may_hold(other), "both are waited for");
        }
        watched.end(space);
        watched.end(other);
        assert!(watched.begin(other), "the watch has read, and waits again");
        watched.end(other);
        assert!(written(&mut watched).may_hold(other));
        assert!(written(&mut watched).may_hold(other));
        assert!(!written(&mut watched).may_hold(other));
        assert!(!watched.begin(other));
    }

    /// The row is written without the space, and at this moment a watch begins to wait for it.
    #[test]
    fn a_watch_does_not_count_on_what_the_next_row_leaves_out() {
        let (mut watched, space) = (Watched::default(), SpaceId(20));
        watched.begin(space);
        written(&mut watched);
        watched.end(space);
        written(&mut watched);
        written(&mut watched);
        let said = watched.renew();
        assert!(!said.may_hold(space));
        assert!(!watched.begin(space));
        watched.renewed(said);
        assert!(!watched.begin(space));
        assert!(written(&mut watched).may_hold(space));
    }
}
