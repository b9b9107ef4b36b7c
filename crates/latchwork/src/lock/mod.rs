//! Locks that survive crashes, in two forms.
//!
//! A mutex, a semaphore and a read-write lock by name, granted in the order of the requests, with fencing tokens: use
//! this form if you can. [`Engine::mutex`] and its neighbours are for plain code, [`Ctx::mutex`] and its neighbours for
//! workflows. The commit that releases the lock wakes the next waiter.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use latchwork::store::Store;
//! use latchwork::workflow::Engine;
//!
//! let engine = Engine::on(&Store::memory().await?).start().await?;
//! let guard = engine.mutex("account-42").acquire().await?;
//! assert!(engine.mutex("account-42").try_acquire().await?.is_none());
//! println!("token {}", guard.token());
//! guard.release().await?;
//! # Ok(()) }
//! ```
//!
//! And [`DurableMutex`] and [`DurableSemaphore`] on any slot, with the caller's own names, leases and time: one record,
//! and callers that try again.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use latchwork::lock::{DurableMutex, initial_lock_record};
//! use latchwork::state::States;
//! use latchwork::store::Store;
//!
//! let states = States::on(&Store::memory().await?).await?;
//! let slot = states.global().slot("account-42").initial(initial_lock_record());
//! let (mutex, now) = (DurableMutex::default(), states.store().env().now());
//!
//! assert!(mutex.try_acquire(&slot, "a", now, None).await?.acquired);
//! assert_eq!(mutex.try_acquire(&slot, "b", now, None).await?.position, Some(0)); // next in the queue
//! mutex.release(&slot, "a", now).await?;
//! assert!(mutex.try_acquire(&slot, "b", now, None).await?.acquired);
//! # Ok(()) }
//! ```
//!
//! [`Engine::mutex`]: crate::workflow::Engine::mutex
//! [`Ctx::mutex`]: crate::workflow::Ctx::mutex

mod durable;
mod error;
pub(crate) mod free;
pub(crate) mod lane;
mod locks;
pub(crate) mod name;
mod operate;
pub(crate) mod owners;
mod record;
pub(crate) mod service;
mod session;
mod standing;
pub(crate) mod stored;
pub(crate) mod table;

pub use durable::{DurableMutex, DurableSemaphore, LockSetupError, SlotLockError};
pub use error::{DeadlockLink, LockError, LockKind, LockRefused, Result};
pub(crate) use locks::Patience;
pub use locks::{Lock, LockGuard, Locks, ReadWriteLock};
pub use name::{FencingToken, LockName, LockScope, Owner};
pub use operate::{ForcedRelease, LeaseState, LockList, LockState, LockSummary, Requested, StoredLocks};
pub use record::{AcquireOutcome, Holder, LockRecord, TokensSpent, Waiter, initial_lock_record};
pub use session::{Session, SessionBuilder};
pub use standing::{SessionState, StandingOutcome, StandingRequest};
