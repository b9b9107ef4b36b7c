//! The machine of guards: the locks that the code of an execution has guards of, and the guards that it has dropped. It
//! knows grants by the keys of their requests. It knows no queues, lanes or commits.

use std::collections::{BTreeMap, btree_map};

use crate::lock::{LockName, LockRefused};
use crate::store::Key;
use crate::workflow::ctx::locks::{Dropped, Grant};

#[derive(Default)]
pub(crate) struct Guards {
    /// By the key of the request.
    held: BTreeMap<Key, Holding>,
    /// Locks whose guards the code has dropped, but under which it did something that is not committed yet.
    left: Vec<Key>,
    /// Guards that were dropped and whose locks are not released yet.
    dropped: Vec<Dropped>,
    /// The locks of dropped guards whose release is in progress, once for each guard.
    leaving: Vec<LockName>,
}

/// The guards that the code has of one grant.
struct Holding {
    guards: usize,
    /// The last stamp of the journal before the first guard.
    since: u64,
    grant: Grant,
}

impl Guards {
    /// The code has one more guard of a grant.
    pub(crate) fn hold(&mut self, request: &Key, grant: Grant, stamp: u64) {
        let holding = || Holding { guards: 0, since: stamp, grant };
        self.held.entry(request.clone()).or_insert_with(holding).guards += 1;
    }

    /// The code has one guard less. Entries that it made under the lock, by their stamps, must not become durable
    /// unless the execution still holds the lock.
    pub(crate) fn leave(&mut self, request: &Key, stamp: u64) {
        let btree_map::Entry::Occupied(mut holding) = self.held.entry(request.clone()) else { return };
        holding.get_mut().guards -= 1;
        if holding.get().guards == 0 {
            let Holding { since, grant, .. } = holding.remove();
            if matches!(grant, Grant::Held) && stamp > since {
                self.left.push(request.clone());
            }
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    /// The requests that the next commit checks.
    pub(super) fn checked(&self) -> impl Iterator<Item = &Key> {
        let held = self.held.iter().filter(|(_, holding)| matches!(holding.grant, Grant::Held));
        held.map(|(request, _)| request).chain(&self.left)
    }

    /// How many of the checked requests have no guard any more.
    pub(super) fn left(&self) -> usize {
        self.left.len()
    }

    /// A commit has landed that checked this many requests without a guard.
    pub(super) fn landed(&mut self, left: usize) {
        let left = left.min(self.left.len());
        self.left.drain(..left);
    }

    /// Why a lock was taken away while the code has a guard of it, if one was.
    pub(crate) fn lost(&self) -> Option<&LockRefused> {
        self.held.values().find_map(|holding| match &holding.grant {
            Grant::Lost(why) => Some(why),
            Grant::Held | Grant::Past => None,
        })
    }

    /// A guard was dropped. The driver releases it.
    pub(crate) fn let_go(&mut self, dropped: Dropped) {
        self.dropped.push(dropped);
    }

    /// Takes the dropped guards. Their release is in progress until [`Guards::released`].
    pub(crate) fn take_dropped(&mut self) -> Vec<Dropped> {
        let dropped = std::mem::take(&mut self.dropped);
        self.leaving.extend(dropped.iter().map(|(lock, _)| lock.clone()));
        dropped
    }

    pub(crate) fn has_dropped(&self, lock: &LockName) -> bool {
        self.dropped.iter().any(|(other, _)| other == lock)
    }

    pub(crate) fn is_leaving(&self, lock: &LockName) -> bool {
        self.leaving.contains(lock)
    }

    /// One dropped guard of the lock is released.
    pub(crate) fn released(&mut self, lock: &LockName) {
        if let Some(place) = self.leaving.iter().position(|leaving| leaving == lock) {
            self.leaving.swap_remove(place);
        }
    }

    /// The code begins anew, without any guard. Releases in progress continue.
    pub(super) fn begin_anew(&mut self) {
        self.held.clear();
        self.left.clear();
        self.dropped.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{SpaceSpec, Store};

    /// Each row: what the code does, the requests that a commit then checks, and those it checks after a commit has
    /// landed.
    #[tokio::test]
    async fn a_commit_checks_the_locks_that_the_code_holds_or_held_when_it_made_an_entry() {
        let space = Store::memory().await.unwrap().space(SpaceSpec::new("locks")).await.unwrap();
        let (a, b) = (&space.key("a"), &space.key("b"));
        type Event<'a> = (&'a str, &'a Key, u64);
        let table: &[(&[Event<'_>], &[&Key], &[&Key])] = &[
            (&[], &[], &[]),
            (&[("hold", a, 1)], &[a], &[a]),
            (&[("hold", a, 1), ("leave", a, 1)], &[], &[]),
            (&[("hold", a, 1), ("leave", a, 2)], &[a], &[]),
            (&[("hold", a, 1), ("hold", a, 2), ("leave", a, 3)], &[a], &[a]),
            (&[("hold", a, 1), ("hold", b, 1), ("leave", a, 2)], &[b, a], &[b]),
            (&[("hold past", a, 1), ("leave", a, 2)], &[], &[]),
            (&[("leave", a, 2)], &[], &[]),
        ];
        for (number, (events, before, after)) in table.iter().enumerate() {
            let mut guards = Guards::default();
            for (event, request, stamp) in *events {
                match *event {
                    "hold" => guards.hold(request, Grant::Held, *stamp),
                    "hold past" => guards.hold(request, Grant::Past, *stamp),
                    _ => guards.leave(request, *stamp),
                }
            }
            assert_eq!(guards.checked().collect::<Vec<_>>(), *before, "row {number}, before a commit");
            guards.landed(guards.left());
            assert_eq!(guards.checked().collect::<Vec<_>>(), *after, "row {number}, after a commit");
        }
    }

    #[tokio::test]
    async fn a_lock_that_the_code_leaves_during_a_commit_is_checked_by_the_next_commit() {
        let space = Store::memory().await.unwrap().space(SpaceSpec::new("locks")).await.unwrap();
        let (a, b) = (space.key("a"), space.key("b"));
        let mut guards = Guards::default();
        guards.hold(&a, Grant::Held, 1);
        guards.hold(&b, Grant::Held, 1);
        guards.leave(&a, 2);
        let left = guards.left();
        guards.leave(&b, 3);
        guards.landed(left);
        assert_eq!(guards.checked().collect::<Vec<_>>(), [&b]);
    }
}
