//! Locks that survive crashes, in two forms.
//!
//! A mutex, a semaphore and a read-write lock by name, given in the order of asking, with fencing tokens: this is the form
//! to use. [`Engine::mutex`] and its neighbours are for plain code, [`Ctx::mutex`] and its neighbours for workflows. Whoever
//! waits is woken by the very commit that releases the lock.
//!
//! And [`DurableMutex`] and [`DurableSemaphore`] on any slot, with the caller's own names, leases and time: one record, and
//! callers who try again.
//!
//! [`Engine::mutex`]: crate::workflow::Engine::mutex
//! [`Ctx::mutex`]: crate::workflow::Ctx::mutex

pub(crate) mod deadlock;
mod durable;
mod error;
pub(crate) mod lane;
mod locks;
pub(crate) mod name;
mod operate;
mod record;
pub(crate) mod service;
pub(crate) mod session;
pub(crate) mod stored;
pub(crate) mod table;

pub use durable::{DurableMutex, DurableSemaphore, LockSetupError, SlotLockError};
pub use error::{DeadlockLink, LockError, LockKind, LockRefused, Result};
pub use locks::{Lock, LockGuard, LockWithin, Locks, ReadWriteLock, ReadWriteLockWithin};
pub use name::{LockName, LockScope, Owner, Token};
pub use operate::{ForcedRelease, LockPage, LockState, LockSummary, Requested};
pub use record::{Attempt, FencingToken, Holder, LockRecord, TokensSpent, Waiter, initial_lock_record};
pub use session::{Session, SessionBuilder};
