//! The record of a lock, and the rules by which it changes, as pure functions of the record and a time. They do not
//! know where the record is kept, nor what the time really is.

use serde::{Deserialize, Serialize};

use crate::store::Timestamp;

/// Who holds a lock, and who waits for it.
///
/// There are never more holders than permits, whatever the times say: what has expired is dropped before anything is
/// granted, and nothing else makes room. An expiry is inclusive: a lease that ends at `now` is over.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct LockRecord {
    /// Those that were granted a permit, in the order of grants.
    pub holders: Vec<Holder>,
    /// Those that wait for one, the first in line first.
    pub waiters: Vec<Waiter>,
    /// The number of the last grant's fencing token, which outlives the grant; 0 before the first.
    pub last_token: u64,
}

/// One that holds a permit.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Holder {
    /// Its name.
    pub holder_id: String,
    /// From then on the permit can be granted to others. As JSON, microseconds since 1970.
    pub lease_expires_at: Timestamp,
    /// The number of the grant's fencing token: larger than those of all grants before. What the lock protects can
    /// refuse smaller numbers than the largest it has seen, and so a holder that lost its lease and does not know it.
    pub token: u64,
    /// When it was granted. As JSON, microseconds since 1970.
    pub since: Timestamp,
}

/// One that waits for a permit.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Waiter {
    /// Its name.
    pub holder_id: String,
    /// From then on its place is lost. As JSON, microseconds since 1970.
    pub lease_expires_at: Timestamp,
    /// When it came. As JSON, microseconds since 1970.
    pub since: Timestamp,
}

/// What an attempt to acquire came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Attempt {
    /// Whether a permit is held.
    pub acquired: bool,
    /// How many wait in front, `Some(0)` for the next in line; `None` if it was acquired.
    pub position: Option<usize>,
    /// The number of the grant's fencing token, if it was acquired.
    pub token: Option<u64>,
}

/// There is no token left that would be larger than all before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no token is left for another grant")]
pub struct TokensSpent;

/// A lock that nobody holds: what a slot of one should read as before it is first written.
pub fn initial_lock_record() -> LockRecord {
    LockRecord::default()
}

impl LockRecord {
    /// Takes a permit for `holder` if one is free for it, or else a place at the end of the line. Whoever holds one has
    /// its lease extended and keeps its token; whoever waits keeps its place, and is not taken for dead for another
    /// lease.
    ///
    /// A permit is free for a contender if there are more of them than live waiters in front of it.
    pub fn try_acquire(
        &mut self,
        permits: u32,
        holder: &str,
        now: Timestamp,
        lease: std::time::Duration,
    ) -> Result<Attempt, TokensSpent> {
        self.drop_expired(now);
        let until = now.plus(lease);
        if let Some(held) = self.holders.iter_mut().find(|held| held.holder_id == holder) {
            held.lease_expires_at = held.lease_expires_at.max(until);
            return Ok(Attempt::granted(held.token));
        }
        let place = self.waiters.iter().position(|waiter| waiter.holder_id == holder);
        let position = place.unwrap_or(self.waiters.len());
        let free = usize::try_from(permits).unwrap_or(usize::MAX).saturating_sub(self.holders.len());
        if position < free {
            let token = self.next_token()?;
            self.waiters.retain(|waiter| waiter.holder_id != holder);
            self.holders.push(Holder { holder_id: holder.into(), lease_expires_at: until, token, since: now });
            return Ok(Attempt::granted(token));
        }
        match place.and_then(|place| self.waiters.get_mut(place)) {
            Some(waiter) => waiter.lease_expires_at = waiter.lease_expires_at.max(until),
            None => self.waiters.push(Waiter { holder_id: holder.into(), lease_expires_at: until, since: now }),
        }
        Ok(Attempt::waits(position))
    }

    /// Takes `holder` out, whether it holds a permit or waits for one, and whatever has expired with it. Gives whether
    /// it was there; if not, nothing changes.
    pub fn release(&mut self, holder: &str, now: Timestamp) -> bool {
        if self.standing(holder).is_none() {
            return false;
        }
        self.holders.retain(|held| held.holder_id != holder);
        self.waiters.retain(|waiter| waiter.holder_id != holder);
        self.drop_expired(now);
        true
    }

    /// Extends a lease that is not over. Gives whether there was one; if not, nothing changes.
    pub fn renew(&mut self, holder: &str, now: Timestamp, lease: std::time::Duration) -> bool {
        let held = self.holders.iter_mut().find(|held| held.holder_id == holder && held.lease_expires_at > now);
        let Some(held) = held else { return false };
        held.lease_expires_at = held.lease_expires_at.max(now.plus(lease));
        true
    }

    /// Whether `holder` has a lease that is not over.
    pub fn is_held_by(&self, holder: &str, now: Timestamp) -> bool {
        self.holders.iter().any(|held| held.holder_id == holder && held.lease_expires_at > now)
    }

    /// What an attempt of `holder` that left this record has come to; `None` if there was none.
    pub(crate) fn standing(&self, holder: &str) -> Option<Attempt> {
        if let Some(held) = self.holders.iter().find(|held| held.holder_id == holder) {
            return Some(Attempt::granted(held.token));
        }
        self.waiters.iter().position(|waiter| waiter.holder_id == holder).map(Attempt::waits)
    }

    fn drop_expired(&mut self, now: Timestamp) {
        self.holders.retain(|held| held.lease_expires_at > now);
        self.waiters.retain(|waiter| waiter.lease_expires_at > now);
    }

    fn next_token(&mut self) -> Result<u64, TokensSpent> {
        self.last_token = self.last_token.checked_add(1).ok_or(TokensSpent)?;
        Ok(self.last_token)
    }
}

impl Attempt {
    fn granted(token: u64) -> Attempt {
        Attempt { acquired: true, position: None, token: Some(token) }
    }

    fn waits(position: usize) -> Attempt {
        Attempt { acquired: false, position: Some(position), token: None }
    }
}
