//! Locks on slots: each operation is one change of the slot's record, so that within a workflow it is journaled with
//! whatever else changes a slot. What a caller is answered follows from the record that the change has left, because
//! that is what a replay is given.

use std::time::Duration;

use serde_json::Value;

use crate::lock::record::{Attempt, LockRecord, TokensSpent};
use crate::state::{Changed, MutationError, Slot, StateError, to_json, typed};
use crate::store::{ErrorKind, Timestamp};

/// How long a lease is unless it is said.
const LEASE: Duration = Duration::from_secs(30);

/// So many permits that are held under leases, and a line of those that wait for one.
///
/// It holds nothing itself: all that is known is the [`LockRecord`] in the slot that each call is given. It reads no
/// clock either; every call is told the time. Within a workflow that is `ctx.now().await`, outside that of the store's
/// environment.
///
/// Those that contend must use the same slot, and should agree about permits. The slot is not to be deleted while
/// tokens of it are in use: they would start again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DurableSemaphore {
    permits: u32,
    lease: Duration,
}

/// A semaphore with one permit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DurableMutex(DurableSemaphore);

/// Why there is no such lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LockSetupError {
    /// Nobody could ever acquire it.
    #[error("a semaphore has at least one permit")]
    NoPermits,
    /// The clock counts microseconds, and this is less than one.
    #[error("a lease of {0:?} is over at once")]
    LeaseTooShort(Duration),
    /// Longer than there are microseconds in a timestamp.
    #[error("a lease of {0:?} is longer than the clock can tell")]
    LeaseTooLong(Duration),
}

/// Why an operation on a lock in a slot did not happen. Nothing was written.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum SlotLockError {
    /// No holder was given.
    #[error("a holder has a name")]
    NoHolder,
    /// A lease that cannot be.
    #[error(transparent)]
    Lease(#[from] LockSetupError),
    /// The record's tokens are at their end, which only a record that was tampered with can be.
    #[error(transparent)]
    TokensSpent(#[from] TokensSpent),
    /// The slot was given an idempotency key under which somebody else's attempt is kept.
    #[error("{holder:?} is not in the answer that is kept under this idempotency key")]
    NotInAnswer {
        /// Whose attempt this was.
        holder: String,
    },
    /// The slot: what it holds is no record of a lock ([`StateError::Mismatch`]), or it could not be changed.
    #[error(transparent)]
    State(#[from] StateError),
}

impl SlotLockError {
    /// The class of the failure.
    pub fn kind(&self) -> ErrorKind {
        match self {
            SlotLockError::State(error) => error.kind(),
            SlotLockError::NoHolder | SlotLockError::Lease(_) | SlotLockError::NotInAnswer { .. } => ErrorKind::Invalid,
            SlotLockError::TokensSpent(_) => ErrorKind::Corrupt,
        }
    }
}

impl Default for DurableSemaphore {
    /// One permit, and leases of 30 s.
    fn default() -> DurableSemaphore {
        DurableSemaphore { permits: 1, lease: LEASE }
    }
}

impl DurableSemaphore {
    /// So many permits, and leases that are so long unless a call says otherwise.
    pub fn new(permits: u32, lease: Duration) -> Result<DurableSemaphore, LockSetupError> {
        if permits == 0 {
            return Err(LockSetupError::NoPermits);
        }
        Ok(DurableSemaphore { permits, lease: checked(lease)? })
    }

    /// How many can hold it at once.
    pub fn permits(&self) -> u32 {
        self.permits
    }

    /// How long a lease is unless a call says otherwise.
    pub fn lease(&self) -> Duration {
        self.lease
    }

    /// One attempt to acquire a permit. Whoever is not granted one stands in line from then on, and is to try again
    /// well within its lease, or its place is lost. Whoever holds one already has its lease extended.
    pub fn try_acquire(
        &self,
        slot: &Slot<LockRecord>,
        holder: &str,
        now: Timestamp,
        lease: Option<Duration>,
    ) -> impl Future<Output = Result<Attempt, SlotLockError>> + Send + use<> {
        let (permits, lease) = (self.permits, self.lease_or(lease));
        let (slot, holder) = (slot.clone(), holder.to_string());
        async move {
            let (lease, name) = (lease?, named(&holder)?.to_string());
            let attempt = move |record: &mut LockRecord| record.try_acquire(permits, &name, now, lease).map(drop);
            let changed = change(&slot, "try_acquire", attempt).await?;
            let standing = changed.value.and_then(|record| record.standing(&holder));
            standing.ok_or(SlotLockError::NotInAnswer { holder })
        }
    }

    /// Gives back a permit, or a place in line. Gives whether there was either; if not, nothing is written.
    pub fn release(
        &self,
        slot: &Slot<LockRecord>,
        holder: &str,
        now: Timestamp,
    ) -> impl Future<Output = Result<bool, SlotLockError>> + Send + use<> {
        let (slot, holder) = (slot.clone(), holder.to_string());
        async move {
            named(&holder)?;
            let changed = change(&slot, "release", move |record| {
                record.release(&holder, now);
                Ok(())
            });
            Ok(changed.await?.changed)
        }
    }

    /// Extends a lease, and gives whether there was one to extend: not if it is over, even if no other holder has the
    /// permit yet. It never shortens one, and never enqueues.
    pub fn renew(
        &self,
        slot: &Slot<LockRecord>,
        holder: &str,
        now: Timestamp,
        lease: Option<Duration>,
    ) -> impl Future<Output = Result<bool, SlotLockError>> + Send + use<> {
        let (lease, slot, holder) = (self.lease_or(lease), slot.clone(), holder.to_string());
        async move {
            let (lease, name) = (lease?, named(&holder)?.to_string());
            let changed = change(&slot, "renew", move |record| {
                record.renew(&name, now, lease);
                Ok(())
            });
            Ok(changed.await?.value.is_some_and(|record| record.is_held_by(&holder, now)))
        }
    }

    /// The record as it is; `None` if the slot has no value.
    pub fn inspect(
        &self,
        slot: &Slot<LockRecord>,
    ) -> impl Future<Output = Result<Option<LockRecord>, SlotLockError>> + Send + use<> {
        let read = slot.get();
        async move { Ok(read.await?) }
    }

    fn lease_or(&self, lease: Option<Duration>) -> Result<Duration, LockSetupError> {
        lease.map_or(Ok(self.lease), checked)
    }
}

impl DurableMutex {
    /// Leases that are so long unless a call says otherwise.
    pub fn new(lease: Duration) -> Result<DurableMutex, LockSetupError> {
        DurableSemaphore::new(1, lease).map(DurableMutex)
    }

    /// How long a lease is unless a call says otherwise.
    pub fn lease(&self) -> Duration {
        self.0.lease
    }

    /// As [`DurableSemaphore::try_acquire`].
    pub fn try_acquire(
        &self,
        slot: &Slot<LockRecord>,
        holder: &str,
        now: Timestamp,
        lease: Option<Duration>,
    ) -> impl Future<Output = Result<Attempt, SlotLockError>> + Send + use<> {
        self.0.try_acquire(slot, holder, now, lease)
    }

    /// As [`DurableSemaphore::release`].
    pub fn release(
        &self,
        slot: &Slot<LockRecord>,
        holder: &str,
        now: Timestamp,
    ) -> impl Future<Output = Result<bool, SlotLockError>> + Send + use<> {
        self.0.release(slot, holder, now)
    }

    /// As [`DurableSemaphore::renew`].
    pub fn renew(
        &self,
        slot: &Slot<LockRecord>,
        holder: &str,
        now: Timestamp,
        lease: Option<Duration>,
    ) -> impl Future<Output = Result<bool, SlotLockError>> + Send + use<> {
        self.0.renew(slot, holder, now, lease)
    }

    /// As [`DurableSemaphore::inspect`].
    pub fn inspect(
        &self,
        slot: &Slot<LockRecord>,
    ) -> impl Future<Output = Result<Option<LockRecord>, SlotLockError>> + Send + use<> {
        self.0.inspect(slot)
    }
}

fn named(holder: &str) -> Result<&str, SlotLockError> {
    if holder.is_empty() { Err(SlotLockError::NoHolder) } else { Ok(holder) }
}

fn checked(lease: Duration) -> Result<Duration, LockSetupError> {
    match lease.as_micros() {
        0 => Err(LockSetupError::LeaseTooShort(lease)),
        micros if micros > u128::from(u64::MAX) => Err(LockSetupError::LeaseTooLong(lease)),
        _ => Ok(lease),
    }
}

/// Changes the record in a slot; one that has none starts from an empty one. A record that the rules left alone stays
/// as it is stored, whatever else it may hold there, and so nothing is written.
async fn change<F>(
    slot: &Slot<LockRecord>,
    operation: &'static str,
    mut rules: F,
) -> Result<Changed<Option<LockRecord>>, SlotLockError>
where
    F: FnMut(&mut LockRecord) -> Result<(), TokensSpent> + Send + 'static,
{
    let key = slot.container().name().to_string();
    let name = key.clone();
    let changed = slot
        .container()
        .clone()
        .mutate(operation, move |stored: Option<Value>| std::future::ready(changed_by(&mut rules, stored, &name)));
    let changed = changed.await.map_err(|error| match error {
        MutationError::State(error) => error.into(),
        MutationError::Refused(error) => error,
    })?;
    let record = typed(&key, &changed.value)?;
    Ok(changed.with(record))
}

fn changed_by(
    rules: &mut impl FnMut(&mut LockRecord) -> Result<(), TokensSpent>,
    stored: Option<Value>,
    key: &str,
) -> Result<Option<Value>, SlotLockError> {
    let before: LockRecord = stored.as_ref().map(|stored| typed(key, stored)).transpose()?.unwrap_or_default();
    let mut after = before.clone();
    rules(&mut after)?;
    if after == before {
        return Ok(stored);
    }
    Ok(Some(to_json(key, &after)?))
}
