//! The errors of locks.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::lane::OnceError;
use crate::lock::Owner;
use crate::node::NodeError;
use crate::page::CursorError;
use crate::record::unreadable;
use crate::store::{ErrorKind, StoreError};

/// The result of an operation on locks.
pub type Result<T, E = LockError> = std::result::Result<T, E>;

/// Why an operation on a lock failed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // The fields are what the messages say.
pub enum LockError {
    /// The name is invalid.
    #[error("{name:?} cannot be the name of a lock: {reason}")]
    Name { name: String, reason: &'static str },
    /// The lock refused the request.
    #[error(transparent)]
    Refused(#[from] LockRefused),
    /// Neither a holder nor a waiter has such a token.
    #[error("no holder or waiter of lock {lock:?} has token {token}")]
    NoSuchToken { lock: String, token: u64 },
    /// There is no lock of that name.
    #[error("there is no lock {lock:?}")]
    NotFound { lock: String },
    /// A lock that has a holder or a waiter cannot be removed.
    #[error("lock {lock:?} is in use ({owners} permits and waiters) and cannot be removed")]
    InUse { lock: String, owners: u64 },
    /// The lease is invalid.
    #[error("a lease of {lease:?} is invalid: {reason}")]
    Lease { lease: std::time::Duration, reason: &'static str },
    /// The session was lost: its lease was not renewed in time.
    #[error("session {session} has lost its lease, and with it every lock")]
    SessionLost { session: String },
    /// The cursor does not continue this list.
    #[error(transparent)]
    Cursor(#[from] CursorError),
    /// A stored record cannot be read.
    #[error("{place} is damaged: it cannot be read")]
    Corrupt { place: String },
    /// The request is an execution's. Only an engine can notify the execution.
    #[error("the request for lock {lock:?} belongs to an execution, which only an engine can notify; use an engine")]
    NeedsEngine { lock: String },
    /// The call was made outside of a tokio runtime.
    #[error("locks are served on a tokio runtime; call this from within one")]
    NoRuntime,
    /// A stored record has a version that this program does not know.
    #[error("{place} has version {found}; this program reads versions 1 to {supported}: use a newer program")]
    UnknownVersion { place: String, found: u8, supported: u8 },
    /// The engine has stopped.
    #[error("the engine has stopped, or another engine has taken over; use the engine that runs now")]
    Stopped,
    /// The idempotency key does not allow the change.
    #[error(transparent)]
    Once(OnceError),
    /// The store below.
    #[error(transparent)]
    Store(#[from] StoreError),
}

unreadable!(LockError);

impl From<OnceError> for LockError {
    fn from(error: OnceError) -> LockError {
        match error {
            OnceError::Store(error) => error.into(),
            error => LockError::Once(error),
        }
    }
}

impl From<NodeError> for LockError {
    fn from(error: NodeError) -> LockError {
        match error {
            NodeError::Store(error) => error.into(),
            NodeError::Record(record) => record.into(),
            // Only an engine joins as a node, and it reports these errors itself.
            NodeError::Stopped | NodeError::NameTaken { .. } | NodeError::Name { .. } | NodeError::Lease { .. } => {
                LockError::Stopped
            }
        }
    }
}

impl LockError {
    /// The class of the failure.
    ///
    /// ```
    /// # use latchwork::lock::LockError;
    /// # use latchwork::store::ErrorKind;
    /// let error = LockError::NotFound { lock: "nightly".into() };
    /// assert_eq!(error.kind(), ErrorKind::NotFound);
    /// ```
    pub fn kind(&self) -> ErrorKind {
        match self {
            LockError::Name { .. } | LockError::Lease { .. } | LockError::UnknownVersion { .. } => ErrorKind::Invalid,
            LockError::NeedsEngine { .. } | LockError::NoRuntime | LockError::Cursor(_) => ErrorKind::Invalid,
            LockError::Refused(LockRefused::Capacity { .. } | LockRefused::TooMany { .. }) => ErrorKind::Invalid,
            LockError::NoSuchToken { .. } | LockError::NotFound { .. } => ErrorKind::NotFound,
            LockError::Refused(_) | LockError::InUse { .. } | LockError::SessionLost { .. } => ErrorKind::Conflict,
            LockError::Corrupt { .. } => ErrorKind::Corrupt,
            LockError::Stopped => ErrorKind::Unavailable,
            LockError::Once(error) => error.kind(),
            LockError::Store(error) => error.kind(),
        }
    }
}

/// Why a request for a lock was refused. In a workflow, the failure of an acquisition holds one of these; see
/// [`Failure::get`](crate::workflow::Failure::get).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
#[allow(missing_docs)] // The fields are what the messages say.
pub enum LockRefused {
    /// The lock is of another kind.
    #[error("lock {lock:?} is {stored}, but was requested as {asked}")]
    Capacity { lock: String, stored: LockKind, asked: LockKind },
    /// Zero permits, or more permits than there are.
    #[error("{asked} permits of lock {lock:?} were requested; 1 to {capacity} are possible")]
    TooMany { lock: String, asked: u32, capacity: u32 },
    /// The same request was made before, for another number of permits. (The writer of a read-write lock requests all
    /// of them.)
    #[error("the request was made before for {before} permits of lock {lock:?}, and now for {asked}")]
    Reused { lock: String, before: u32, asked: u32 },
    /// The same execution holds the lock already, and the request is not reentrant.
    #[error("lock {lock:?} is already held by the same execution, under token {token}; use reentrant() to allow this")]
    AlreadyHeld { lock: String, token: u64 },
    /// Executions wait for each other in a cycle.
    #[error("waiting for lock {lock:?} would never end: {}", links(.cycle))]
    Deadlock { lock: String, cycle: Vec<DeadlockLink> },
    /// An operator has removed the request.
    #[error("the request for lock {lock:?} was removed by an operator: {reason}")]
    Forced { lock: String, reason: String },
}

/// A waiter, and what it waits for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DeadlockLink {
    /// The owner that waits.
    pub waiter: Owner,
    /// The lock that it waits for; `None` if it waits for the end of a child.
    pub lock: Option<String>,
    /// The holders of the lock and the waiters before this one; or the child.
    pub holders: Vec<Owner>,
}

fn links(cycle: &[DeadlockLink]) -> String {
    let link = |link: &DeadlockLink| {
        let holders = link.holders.iter().map(Owner::to_string).collect::<Vec<_>>().join(" and ");
        match &link.lock {
            Some(lock) => format!("{} waits for {lock:?} held by {holders}", link.waiter),
            None => format!("{} waits for the end of {holders}", link.waiter),
        }
    };
    cycle.iter().map(link).collect::<Vec<_>>().join("; ")
}

/// The kind of a lock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum LockKind {
    /// One holder at a time.
    Mutex,
    /// A number of permits.
    Semaphore {
        /// The number of permits.
        permits: u32,
    },
    /// Any number of readers, or one writer.
    ReadWrite,
}

impl LockKind {
    /// The number of permits. A writer takes all of them.
    pub(crate) fn capacity(self) -> u32 {
        match self {
            LockKind::Mutex => 1,
            LockKind::Semaphore { permits } => permits,
            LockKind::ReadWrite => u32::MAX,
        }
    }
}

impl fmt::Display for LockKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            LockKind::Mutex => f.write_str("a mutex"),
            LockKind::Semaphore { permits: 1 } => f.write_str("a semaphore of one permit"),
            LockKind::Semaphore { permits } => write!(f, "a semaphore of {permits} permits"),
            LockKind::ReadWrite => f.write_str("a read-write lock"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::Unreadable;

    #[test]
    fn a_record_of_a_newer_version_is_refused_and_is_not_damage() {
        let error = LockError::from(Unreadable::Version { found: 2, supported: 1 }.at("lock \"m\""));
        assert_eq!(
            error.to_string(),
            "lock \"m\" has version 2; this program reads versions 1 to 1: use a newer program"
        );
        assert_eq!(error.kind(), ErrorKind::Invalid);
    }
}
