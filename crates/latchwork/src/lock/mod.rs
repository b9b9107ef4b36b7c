//! Locks that survive crashes: a mutex, a semaphore and a read-write lock by name, given in the order of asking, with
//! fencing tokens. [`Engine::mutex`](crate::workflow::Engine::mutex) and its neighbours are for plain code, `ctx.mutex`
//! and its neighbours for workflows.

pub(crate) mod deadlock;
mod error;
pub(crate) mod lane;
mod locks;
pub(crate) mod name;
mod operate;
pub(crate) mod service;
pub(crate) mod session;
pub(crate) mod stored;
pub(crate) mod table;

pub use error::{DeadlockLink, LockError, LockKind, LockRefused, Result};
pub use locks::{Lock, LockGuard, LockWithin, Locks, ReadWriteLock, ReadWriteLockWithin};
pub use name::{LockName, LockScope, Owner, Token};
pub use operate::{ForcedRelease, LockPage, LockState, LockSummary, Requested};
pub use session::{Session, SessionBuilder};
