//! What a process remembers of a board so that a claim need not look at the keys of all earlier tasks: below which key
//! no task is ready, and before which time no lease ends. A machine without a store or a clock.
//!
//! It is a hint. Writers of other processes do not move it, so all keys are looked at every 100 ms, and before a claim
//! is answered with nothing.

use std::time::Duration;

use crate::store::{Key, Timestamp};

/// After this time all keys are looked at again.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

#[derive(Debug, Default)]
pub(super) struct BoardHeads {
    /// No task below this key is ready.
    ready: Option<Key>,
    /// How often a task became ready. A view that is older than the last time says nothing about that task.
    became_ready: u64,
    /// No lease ends before this.
    lease: Timestamp,
    /// When all keys were looked at.
    looked: Option<Duration>,
}

/// What a look at a view has found. It counts only once the changes that it led to are stored.
#[derive(Debug)]
pub(super) struct HeadLook {
    became_ready: u64,
    /// No task below this key is ready, after the changes.
    pub(super) ready: Option<Key>,
    /// No lease that is in the view ends before this, after the changes.
    pub(super) lease: Option<Timestamp>,
    /// When all keys were looked at, if they were.
    pub(super) looked: Option<Duration>,
}

impl BoardHeads {
    /// Begins a look. Call it before the view is taken.
    pub(super) fn look(&self) -> HeadLook {
        HeadLook { became_ready: self.became_ready, ready: None, lease: None, looked: None }
    }

    /// True if all keys have to be looked at.
    pub(super) fn is_stale(&self, now: Duration) -> bool {
        self.looked.is_none_or(|looked| now.saturating_sub(looked) >= LOOK_AGAIN)
    }

    /// The first key that a ready task can have. `None` stands for any key.
    pub(super) fn ready(&self) -> Option<&Key> {
        self.ready.as_ref()
    }

    /// The earliest time at which a lease can end.
    pub(super) fn lease(&self) -> Timestamp {
        self.lease
    }

    /// A look is over, and the changes that it led to are stored.
    pub(super) fn looked(&mut self, look: HeadLook) {
        if look.became_ready == self.became_ready && look.ready.is_some() {
            self.ready = look.ready;
        }
        self.lease = look.lease.unwrap_or(self.lease);
        self.looked = look.looked.or(self.looked);
    }

    /// A task is ready under this key: the commit that made it so has landed.
    pub(super) fn became_ready(&mut self, key: &Key) {
        self.became_ready += 1;
        if self.ready.as_ref().is_some_and(|ready| ready > key) {
            self.ready = Some(key.clone());
        }
    }

    /// It is unknown what was stored: all keys are looked at again.
    pub(super) fn forget(&mut self) {
        self.looked = None;
    }

    /// A task is claimed until then.
    pub(super) fn leased(&mut self, until: Timestamp) {
        self.lease = self.lease.min(until);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::SpaceId;

    fn key(number: u8) -> Key {
        Key::from_parts(SpaceId(16), [number])
    }

    fn raised(heads: &mut BoardHeads, number: u8) {
        let mut look = heads.look();
        look.ready = Some(key(number));
        heads.looked(look);
    }

    #[test]
    fn the_head_of_ready_tasks_rises_with_claims_and_falls_to_a_task_that_becomes_ready() {
        let mut heads = BoardHeads::default();
        assert_eq!(heads.ready(), None);
        raised(&mut heads, 5);
        heads.became_ready(&key(9));
        assert_eq!(heads.ready(), Some(&key(5)));
        heads.became_ready(&key(3));
        assert_eq!(heads.ready(), Some(&key(3)));
        raised(&mut heads, 7);
        assert_eq!(heads.ready(), Some(&key(7)));
    }

    #[test]
    fn a_look_does_not_pass_a_task_that_became_ready_after_its_view() {
        let mut heads = BoardHeads::default();
        raised(&mut heads, 2);
        let mut look = heads.look();
        look.ready = Some(key(8));
        heads.became_ready(&key(4));
        heads.looked(look);
        assert_eq!(heads.ready(), Some(&key(2)));
    }

    #[test]
    fn all_keys_are_looked_at_after_a_while_and_leases_from_the_earliest_on() {
        let mut heads = BoardHeads::default();
        let at = |millis| Duration::from_millis(millis);
        assert!(heads.is_stale(at(0)));
        let look = HeadLook { lease: Some(Timestamp(50)), looked: Some(at(10)), ..heads.look() };
        heads.looked(look);
        assert!(!heads.is_stale(at(109)) && heads.is_stale(at(110)));
        for (until, expected) in [(70, 50), (30, 30), (40, 30)] {
            heads.leased(Timestamp(until));
            assert_eq!(heads.lease(), Timestamp(expected));
        }
    }
}
