//! Locks on slots: each operation is one change of the slot's record, so a workflow journals it like every other change
//! of a slot. The answer to the caller is computed from the record that the change has left, because a replay gets only
//! that record.

use std::time::Duration;

use serde_json::Value;

use crate::lock::record::{AcquireOutcome, LockRecord, TokensSpent};
use crate::state::{Changed, MutationError, Slot, StateError, to_json, typed};
use crate::store::{ErrorKind, Timestamp};

/// The length of a lease if the caller does not set one.
const LEASE: Duration = Duration::from_secs(30);

/// A number of permits, held under leases, and a queue of waiters.
///
/// The value itself holds nothing: all state is in the [`LockRecord`] of the slot that each call gets. It reads no
/// clock either; every call gets the time. Within a workflow that is `ctx.now().await`, outside of one it is the time
/// of the store's environment.
///
/// All contenders must use the same slot, and should use the same number of permits. Do not delete the slot while its
/// tokens are in use: the tokens would start again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DurableSemaphore {
    permits: u32,
    lease: Duration,
}

/// A semaphore with one permit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct DurableMutex(DurableSemaphore);

/// Why a lock cannot be set up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LockSetupError {
    /// With zero permits no caller could ever acquire it.
    #[error("a semaphore must have at least one permit")]
    NoPermits,
    /// The clock counts microseconds, and this lease is shorter than one.
    #[error("a lease of {0:?} is shorter than a microsecond")]
    LeaseTooShort(Duration),
    /// The lease has more microseconds than a timestamp can hold.
    #[error("a lease of {0:?} is longer than the clock can represent")]
    LeaseTooLong(Duration),
}

/// Why an operation on a lock in a slot did not happen. Nothing was written.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
pub enum SlotLockError {
    /// The holder's name is empty.
    #[error("the holder's name is empty")]
    NoHolder,
    /// The lease is invalid.
    #[error(transparent)]
    Lease(#[from] LockSetupError),
    /// The record's tokens are used up. This happens only if the record was tampered with.
    #[error(transparent)]
    TokensSpent(#[from] TokensSpent),
    /// The slot's idempotency key was used before, for the attempt of another holder.
    #[error("{holder:?} is not in the answer that is kept under this idempotency key")]
    NotInAnswer {
        /// The holder of this attempt.
        holder: String,
    },
    /// An error of the slot: its value is not the record of a lock ([`StateError::Mismatch`]), or it could not be
    /// changed.
    #[error(transparent)]
    State(#[from] StateError),
}

impl SlotLockError {
    /// The class of the failure.
    ///
    /// ```
    /// # use latchwork::lock::SlotLockError;
    /// # use latchwork::store::ErrorKind;
    /// assert_eq!(SlotLockError::NoHolder.kind(), ErrorKind::Invalid);
    /// ```
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
    /// A semaphore with this number of permits. `lease` is used where a call does not set one.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::lock::DurableSemaphore;
    /// let semaphore = DurableSemaphore::new(3, Duration::from_secs(10))?;
    /// assert!(DurableSemaphore::new(0, Duration::from_secs(10)).is_err());
    /// # Ok::<(), latchwork::lock::LockSetupError>(())
    /// ```
    pub fn new(permits: u32, lease: Duration) -> Result<DurableSemaphore, LockSetupError> {
        if permits == 0 {
            return Err(LockSetupError::NoPermits);
        }
        Ok(DurableSemaphore { permits, lease: checked(lease)? })
    }

    /// The number of permits.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::lock::DurableSemaphore;
    /// assert_eq!(DurableSemaphore::new(3, Duration::from_secs(10))?.permits(), 3);
    /// # Ok::<(), latchwork::lock::LockSetupError>(())
    /// ```
    pub fn permits(&self) -> u32 {
        self.permits
    }

    /// The length of a lease if a call does not set one.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::lock::DurableSemaphore;
    /// assert_eq!(DurableSemaphore::default().lease(), Duration::from_secs(30));
    /// ```
    pub fn lease(&self) -> Duration {
        self.lease
    }

    /// One attempt to acquire a permit. A holder that is not granted a permit stands in the queue from then on. It must
    /// try again well within its lease, or it loses its position. If it has a permit already, its lease is extended.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use std::time::Duration;
    /// # use latchwork::lock::{DurableSemaphore, initial_lock_record};
    /// # use latchwork::state::States;
    /// # use latchwork::store::Store;
    /// # let states = States::on(&Store::memory().await?).await?;
    /// # let slot = states.global().slot("vendor").initial(initial_lock_record());
    /// # let now = states.store().env().now();
    /// let semaphore = DurableSemaphore::new(2, Duration::from_secs(10))?;
    /// assert!(semaphore.try_acquire(&slot, "a", now, None).await?.acquired);
    /// assert!(semaphore.try_acquire(&slot, "b", now, None).await?.acquired);
    /// assert_eq!(semaphore.try_acquire(&slot, "c", now, None).await?.position, Some(0));
    /// # Ok(()) }
    /// ```
    pub fn try_acquire(
        &self,
        slot: &Slot<LockRecord>,
        holder: &str,
        now: Timestamp,
        lease: Option<Duration>,
    ) -> impl Future<Output = Result<AcquireOutcome, SlotLockError>> + Send + use<> {
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

    /// Gives back a permit or a position in the queue. Returns true if there was either; if not, nothing is written.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::lock::{DurableSemaphore, initial_lock_record};
    /// # use latchwork::state::States;
    /// # use latchwork::store::Store;
    /// # let states = States::on(&Store::memory().await?).await?;
    /// # let slot = states.global().slot("vendor").initial(initial_lock_record());
    /// # let now = states.store().env().now();
    /// # let semaphore = DurableSemaphore::default();
    /// semaphore.try_acquire(&slot, "a", now, None).await?;
    /// assert!(semaphore.release(&slot, "a", now).await?);
    /// assert!(!semaphore.release(&slot, "a", now).await?);
    /// # Ok(()) }
    /// ```
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

    /// Extends a lease. Returns true if there was one to extend. A lease that is over is not extended, even if no other
    /// holder has the permit yet. Never shortens a lease, and never enqueues.
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use std::time::Duration;
    /// # use latchwork::lock::{DurableSemaphore, initial_lock_record};
    /// # use latchwork::state::States;
    /// # use latchwork::store::Store;
    /// # let states = States::on(&Store::memory().await?).await?;
    /// # let slot = states.global().slot("vendor").initial(initial_lock_record());
    /// # let now = states.store().env().now();
    /// # let semaphore = DurableSemaphore::default();
    /// semaphore.try_acquire(&slot, "a", now, None).await?;
    /// assert!(semaphore.renew(&slot, "a", now, Some(Duration::from_secs(60))).await?);
    /// assert!(!semaphore.renew(&slot, "b", now, None).await?);
    /// # Ok(()) }
    /// ```
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
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::lock::{DurableSemaphore, initial_lock_record};
    /// # use latchwork::state::States;
    /// # use latchwork::store::Store;
    /// # let states = States::on(&Store::memory().await?).await?;
    /// # let slot = states.global().slot("vendor").initial(initial_lock_record());
    /// # let now = states.store().env().now();
    /// # let semaphore = DurableSemaphore::default();
    /// semaphore.try_acquire(&slot, "a", now, None).await?;
    /// assert_eq!(semaphore.inspect(&slot).await?.unwrap().holders[0].holder_id, "a");
    /// # Ok(()) }
    /// ```
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
    /// A mutex. `lease` is used where a call does not set one.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::lock::DurableMutex;
    /// let mutex = DurableMutex::new(Duration::from_secs(10))?;
    /// # Ok::<(), latchwork::lock::LockSetupError>(())
    /// ```
    pub fn new(lease: Duration) -> Result<DurableMutex, LockSetupError> {
        DurableSemaphore::new(1, lease).map(DurableMutex)
    }

    /// The length of a lease if a call does not set one.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use latchwork::lock::DurableMutex;
    /// assert_eq!(DurableMutex::default().lease(), Duration::from_secs(30));
    /// ```
    pub fn lease(&self) -> Duration {
        self.0.lease
    }

    /// As [`DurableSemaphore::try_acquire`].
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::lock::{DurableMutex, initial_lock_record};
    /// # use latchwork::state::States;
    /// # use latchwork::store::Store;
    /// # let states = States::on(&Store::memory().await?).await?;
    /// # let slot = states.global().slot("vendor").initial(initial_lock_record());
    /// # let now = states.store().env().now();
    /// # let mutex = DurableMutex::default();
    /// assert!(mutex.try_acquire(&slot, "a", now, None).await?.acquired);
    /// assert_eq!(mutex.try_acquire(&slot, "b", now, None).await?.position, Some(0));
    /// # Ok(()) }
    /// ```
    pub fn try_acquire(
        &self,
        slot: &Slot<LockRecord>,
        holder: &str,
        now: Timestamp,
        lease: Option<Duration>,
    ) -> impl Future<Output = Result<AcquireOutcome, SlotLockError>> + Send + use<> {
        self.0.try_acquire(slot, holder, now, lease)
    }

    /// As [`DurableSemaphore::release`].
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::lock::{DurableMutex, initial_lock_record};
    /// # use latchwork::state::States;
    /// # use latchwork::store::Store;
    /// # let states = States::on(&Store::memory().await?).await?;
    /// # let slot = states.global().slot("vendor").initial(initial_lock_record());
    /// # let now = states.store().env().now();
    /// # let mutex = DurableMutex::default();
    /// mutex.try_acquire(&slot, "a", now, None).await?;
    /// assert!(mutex.release(&slot, "a", now).await?);
    /// # Ok(()) }
    /// ```
    pub fn release(
        &self,
        slot: &Slot<LockRecord>,
        holder: &str,
        now: Timestamp,
    ) -> impl Future<Output = Result<bool, SlotLockError>> + Send + use<> {
        self.0.release(slot, holder, now)
    }

    /// As [`DurableSemaphore::renew`].
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use std::time::Duration;
    /// # use latchwork::lock::{DurableMutex, initial_lock_record};
    /// # use latchwork::state::States;
    /// # use latchwork::store::Store;
    /// # let states = States::on(&Store::memory().await?).await?;
    /// # let slot = states.global().slot("vendor").initial(initial_lock_record());
    /// # let now = states.store().env().now();
    /// # let mutex = DurableMutex::default();
    /// mutex.try_acquire(&slot, "a", now, None).await?;
    /// assert!(mutex.renew(&slot, "a", now, Some(Duration::from_secs(60))).await?);
    /// # Ok(()) }
    /// ```
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
    ///
    /// ```
    /// # #[tokio::main(flavor = "current_thread")]
    /// # async fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use latchwork::lock::{DurableMutex, initial_lock_record};
    /// # use latchwork::state::States;
    /// # use latchwork::store::Store;
    /// # let states = States::on(&Store::memory().await?).await?;
    /// # let slot = states.global().slot("vendor").initial(initial_lock_record());
    /// # let now = states.store().env().now();
    /// # let mutex = DurableMutex::default();
    /// mutex.try_acquire(&slot, "a", now, None).await?;
    /// assert_eq!(mutex.inspect(&slot).await?.unwrap().holders[0].holder_id, "a");
    /// # Ok(()) }
    /// ```
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

/// Changes the record in a slot. A slot without a record starts from an empty one. If the rules change nothing, the
/// stored value stays as it is, with any fields that this program does not know, and nothing is written.
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
