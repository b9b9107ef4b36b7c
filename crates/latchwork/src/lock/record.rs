//! The record of a lock and the rules that change it, as pure functions of the record and a time. They do not know
//! where the record is stored, and they read no clock.

use serde::{Deserialize, Serialize};

use crate::store::Timestamp;

/// The holders and waiters of a lock.
///
/// There are never more holders than permits, whatever the times say: expired entries are removed before anything is
/// granted, and nothing else makes room. An expiry is inclusive: a lease that ends at `now` is over.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
pub struct LockRecord {
    /// The holders, in the order of grants.
    pub holders: Vec<Holder>,
    /// The waiters, the first in the queue first.
    pub waiters: Vec<Waiter>,
    /// The number of the last grant's fencing token, which outlives the grant; 0 before the first.
    pub last_token: u64,
}

/// A holder of a permit.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Holder {
    /// Its name.
    pub holder_id: String,
    /// From this time on, the permit can be granted to another holder. As JSON, microseconds since 1970.
    pub lease_expires_at: Timestamp,
    /// The number of the grant's fencing token, larger than those of all earlier grants. If the protected resource
    /// refuses numbers smaller than the largest it has seen, it refuses a holder that has lost its lease without
    /// noticing.
    pub token: u64,
    /// When it was granted. As JSON, microseconds since 1970.
    pub since: Timestamp,
}

/// A waiter for a permit.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Waiter {
    /// Its name.
    pub holder_id: String,
    /// From this time on, its position is lost. As JSON, microseconds since 1970.
    pub lease_expires_at: Timestamp,
    /// When it joined the queue. As JSON, microseconds since 1970.
    pub since: Timestamp,
}

/// The result of an attempt to acquire.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AcquireOutcome {
    /// True if a permit is held.
    pub acquired: bool,
    /// The number of waiters before it, `Some(0)` for the next in the queue; `None` if it was acquired.
    pub position: Option<usize>,
    /// The number of the grant's fencing token, if it was acquired.
    pub token: Option<u64>,
}

/// No larger token is left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("no token is left for another grant")]
pub struct TokensSpent;

/// The record of a free lock. Use it as the initial value of the slot.
///
/// ```
/// # use latchwork::lock::initial_lock_record;
/// assert!(initial_lock_record().holders.is_empty());
/// ```
pub fn initial_lock_record() -> LockRecord {
    LockRecord::default()
}

impl LockRecord {
    /// Takes a permit for `holder` if one is free for it, otherwise a position at the end of the queue. A holder keeps
    /// its token, and its lease is extended. A waiter keeps its position, and its lease is extended, too.
    ///
    /// A permit is free for a contender if there are more free permits than live waiters before it.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::lock::initial_lock_record;
    /// # use latchwork::store::Timestamp;
    /// # let (mut record, now, lease) = (initial_lock_record(), Timestamp(0), Duration::from_secs(30));
    /// assert_eq!(record.try_acquire(1, "a", now, lease)?.token, Some(1));
    /// assert_eq!(record.try_acquire(1, "b", now, lease)?.position, Some(0));
    /// # Ok::<(), latchwork::lock::TokensSpent>(())
    /// ```
    pub fn try_acquire(
        &mut self,
        permits: u32,
        holder: &str,
        now: Timestamp,
        lease: std::time::Duration,
    ) -> Result<AcquireOutcome, TokensSpent> {
        self.drop_expired(now);
        let until = now.plus(lease);
        if let Some(held) = self.holders.iter_mut().find(|held| held.holder_id == holder) {
            held.lease_expires_at = held.lease_expires_at.max(until);
            return Ok(AcquireOutcome::granted(held.token));
        }
        let place = self.waiters.iter().position(|waiter| waiter.holder_id == holder);
        let position = place.unwrap_or(self.waiters.len());
        let free = usize::try_from(permits).unwrap_or(usize::MAX).saturating_sub(self.holders.len());
        if position < free {
            let token = self.next_token()?;
            self.waiters.retain(|waiter| waiter.holder_id != holder);
            self.holders.push(Holder { holder_id: holder.into(), lease_expires_at: until, token, since: now });
            return Ok(AcquireOutcome::granted(token));
        }
        match place.and_then(|place| self.waiters.get_mut(place)) {
            Some(waiter) => waiter.lease_expires_at = waiter.lease_expires_at.max(until),
            None => self.waiters.push(Waiter { holder_id: holder.into(), lease_expires_at: until, since: now }),
        }
        Ok(AcquireOutcome::waits(position))
    }

    /// Removes `holder`, whether it holds a permit or waits for one, and every expired entry with it. Returns true if
    /// it was there; if not, nothing changes.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::lock::initial_lock_record;
    /// # use latchwork::store::Timestamp;
    /// # let (mut record, now, lease) = (initial_lock_record(), Timestamp(0), Duration::from_secs(30));
    /// record.try_acquire(1, "a", now, lease)?;
    /// assert!(record.release("a", now));
    /// assert!(!record.release("a", now));
    /// # Ok::<(), latchwork::lock::TokensSpent>(())
    /// ```
    pub fn release(&mut self, holder: &str, now: Timestamp) -> bool {
        if self.standing(holder).is_none() {
            return false;
        }
        self.holders.retain(|held| held.holder_id != holder);
        self.waiters.retain(|waiter| waiter.holder_id != holder);
        self.drop_expired(now);
        true
    }

    /// Extends a lease that is not over. Returns true if there was one; if not, nothing changes.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::lock::initial_lock_record;
    /// # use latchwork::store::Timestamp;
    /// # let (mut record, now, lease) = (initial_lock_record(), Timestamp(0), Duration::from_secs(30));
    /// record.try_acquire(1, "a", now, lease)?;
    /// assert!(record.renew("a", now, Duration::from_secs(60)));
    /// assert!(!record.renew("b", now, lease));
    /// # Ok::<(), latchwork::lock::TokensSpent>(())
    /// ```
    pub fn renew(&mut self, holder: &str, now: Timestamp, lease: std::time::Duration) -> bool {
        let held = self.holders.iter_mut().find(|held| held.holder_id == holder && held.lease_expires_at > now);
        let Some(held) = held else { return false };
        held.lease_expires_at = held.lease_expires_at.max(now.plus(lease));
        true
    }

    /// True if `holder` has a lease that is not over.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::lock::initial_lock_record;
    /// # use latchwork::store::Timestamp;
    /// # let (mut record, now, lease) = (initial_lock_record(), Timestamp(0), Duration::from_secs(30));
    /// record.try_acquire(1, "a", now, lease)?;
    /// assert!(record.is_held_by("a", now));
    /// assert!(!record.is_held_by("a", now.plus(lease)));
    /// # Ok::<(), latchwork::lock::TokensSpent>(())
    /// ```
    pub fn is_held_by(&self, holder: &str, now: Timestamp) -> bool {
        self.holders.iter().any(|held| held.holder_id == holder && held.lease_expires_at > now)
    }

    /// The result of the attempt of `holder` that left this record; `None` if the record has no such holder or waiter.
    pub(crate) fn standing(&self, holder: &str) -> Option<AcquireOutcome> {
        if let Some(held) = self.holders.iter().find(|held| held.holder_id == holder) {
            return Some(AcquireOutcome::granted(held.token));
        }
        self.waiters.iter().position(|waiter| waiter.holder_id == holder).map(AcquireOutcome::waits)
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

impl AcquireOutcome {
    fn granted(token: u64) -> AcquireOutcome {
        AcquireOutcome { acquired: true, position: None, token: Some(token) }
    }

    fn waits(position: usize) -> AcquireOutcome {
        AcquireOutcome { acquired: false, position: Some(position), token: None }
    }
}
