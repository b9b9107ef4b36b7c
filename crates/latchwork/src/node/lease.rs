//! Leases as other processes see them. A process decides that a lease of another process has expired after it has seen
//! the same rev of its record for as long as the lease, by a clock that only goes forward. So a jump of the time of day
//! never ends a lease early, and after a restart every holder has a full lease again.
//!
//! This file reads no store and no clock: its callers pass in what they saw, and when.

use std::collections::HashMap;
use std::time::Duration;

use crate::store::{Rev, Uuid};

/// The records that are watched, by the ids of their holders.
#[derive(Default)]
pub(crate) struct Watch {
    seen: HashMap<Uuid, Seen>,
}

/// A record as it was last seen.
struct Seen {
    rev: Rev,
    lease: Duration,
    /// When it was first seen at that rev.
    since: Duration,
}

/// The result of a look at a record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LeaseVerdict {
    /// The lease was renewed, has time left, or is not watched.
    Holds,
    /// The lease was not renewed for its full length. The record is still at this rev.
    Over(Rev),
    /// The record does not exist.
    Gone,
}

impl Watch {
    /// Watches a record that was seen at `rev` at the time `since`.
    pub(crate) fn see(&mut self, id: Uuid, rev: Rev, lease: Duration, since: Duration) {
        self.seen.insert(id, Seen { rev, lease, since });
    }

    /// A lease was renewed. Does nothing if the record is not watched.
    pub(crate) fn renew(&mut self, id: Uuid, rev: Rev, now: Duration) {
        if let Some(seen) = self.seen.get_mut(&id) {
            (seen.rev, seen.since) = (rev, now);
        }
    }

    pub(crate) fn has(&self, id: Uuid) -> bool {
        self.seen.contains_key(&id)
    }

    pub(crate) fn forget(&mut self, id: Uuid) {
        self.seen.remove(&id);
    }

    /// When the lease of a record is over, unless it is renewed.
    pub(crate) fn due(&self, id: Uuid) -> Option<Duration> {
        self.seen.get(&id).map(|seen| seen.since + seen.lease)
    }

    /// Returns the record to look at next, and when.
    pub(crate) fn next(&self) -> Option<(Duration, Uuid)> {
        self.seen.iter().map(|(id, seen)| (seen.since + seen.lease, *id)).min()
    }

    /// Judges a record that was found at this rev.
    pub(crate) fn judge(&mut self, id: Uuid, found: Option<Rev>, now: Duration) -> LeaseVerdict {
        let Some(seen) = self.seen.get_mut(&id) else { return LeaseVerdict::Holds };
        match found {
            None => LeaseVerdict::Gone,
            Some(rev) if rev != seen.rev => {
                (seen.rev, seen.since) = (rev, now);
                LeaseVerdict::Holds
            }
            // This process may have renewed the lease while the record was read.
            Some(rev) if seen.since + seen.lease <= now => LeaseVerdict::Over(rev),
            Some(_) => LeaseVerdict::Holds,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: Uuid = Uuid::nil();
    const LEASE: u64 = 30;

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// Watches a record from second 0 at rev 1. Then looks at each of these seconds, and finds the given rev.
    #[track_caller]
    fn check(looks: &[(u64, Option<u64>, LeaseVerdict)]) {
        let mut watch = Watch::default();
        watch.see(ID, Rev(1), at(LEASE), at(0));
        for (second, rev, verdict) in looks {
            assert_eq!(watch.judge(ID, rev.map(Rev), at(*second)), *verdict, "at second {second}");
        }
    }

    #[test]
    fn a_lease_expires_when_its_record_was_seen_unchanged_for_its_length() {
        check(&[(LEASE - 1, Some(1), LeaseVerdict::Holds), (LEASE, Some(1), LeaseVerdict::Over(Rev(1)))]);
    }

    #[test]
    fn a_renewal_gives_a_full_lease_from_when_it_was_seen() {
        let late = LEASE + 10;
        check(&[
            (late, Some(2), LeaseVerdict::Holds),
            (late + LEASE - 1, Some(2), LeaseVerdict::Holds),
            (late + LEASE, Some(2), LeaseVerdict::Over(Rev(2))),
        ]);
    }

    #[test]
    fn a_record_that_is_gone_is_gone_at_any_time() {
        check(&[(1, None, LeaseVerdict::Gone), (LEASE, None, LeaseVerdict::Gone)]);
    }

    #[test]
    fn the_record_whose_lease_ends_first_is_looked_at_first() {
        let (other, mut watch) = (Uuid::from_u128(1), Watch::default());
        assert_eq!(
            (watch.next(), watch.judge(ID, Some(Rev(1)), at(LEASE))),
            (None, LeaseVerdict::Holds),
            "not watched"
        );
        watch.see(ID, Rev(1), at(LEASE), at(0));
        watch.see(other, Rev(1), at(1), at(10));
        assert_eq!(watch.next(), Some((at(11), other)));
        watch.renew(other, Rev(2), at(LEASE));
        assert_eq!(watch.next(), Some((at(LEASE), ID)));
        watch.forget(ID);
        assert_eq!((watch.has(ID), watch.next()), (false, Some((at(LEASE + 1), other))));
    }
}
