//! What can go wrong with locks.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::lock::Owner;
use crate::node::NodeError;
use crate::record::unreadable;
use crate::store::{ErrorKind, StoreError};

/// The result of an operation on locks.
pub type Result<T, E = LockError> = std::result::Result<T, E>;

/// Why a lock was not given, or not let go of.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // The fields are what the messages say.
pub enum LockError {
    /// A name that cannot be.
    #[error("{name:?} cannot be the name of a lock: {reason}")]
    Name { name: String, reason: &'static str },
    /// What the lock itself refuses.
    #[error(transparent)]
    Refused(#[from] LockRefused),
    /// Neither a holder nor a waiter has such a token.
    #[error("nobody holds or waits for lock {lock:?} under token {token}")]
    NoSuchToken { lock: String, token: u64 },
    /// There is no lock of that name.
    #[error("there is no lock {lock:?}")]
    NotFound { lock: String },
    /// A lock that somebody holds or waits for cannot be removed.
    #[error("lock {lock:?} is in use by {owners} and cannot be removed")]
    InUse { lock: String, owners: u64 },
    /// A lease that cannot be.
    #[error("a lease of {lease:?} cannot be: {reason}")]
    Lease { lease: std::time::Duration, reason: &'static str },
    /// The session was lost: its lease was not renewed in time.
    #[error("session {session} has lost its lease, and with it every lock")]
    SessionLost { session: String },
    /// A stored record that cannot be read.
    #[error("{place} is damaged: it cannot be read")]
    Corrupt { place: String },
    /// A request of an execution, which only an engine can tell.
    #[error(
        "the request for lock {lock:?} is an execution's: it is told through an engine; use one, which may be idle"
    )]
    NeedsEngine { lock: String },
    /// Locks outside of a runtime that could serve them.
    #[error("locks are served on a tokio runtime; call this from within one")]
    NoRuntime,
    /// A stored record of a version that this program does not know.
    #[error("{place} has version {found}; this program reads versions 1 to {supported}: use a newer one")]
    UnknownVersion { place: String, found: u8, supported: u8 },
    /// The engine was stopped.
    #[error("the engine has stopped, or another one has taken over; ask the one that runs now")]
    Stopped,
    /// The store below.
    #[error(transparent)]
    Store(#[from] StoreError),
}

unreadable!(LockError);

impl From<NodeError> for LockError {
    fn from(error: NodeError) -> LockError {
        match error {
            NodeError::Store(error) => error.into(),
            NodeError::Record(record) => record.into(),
            NodeError::Stopped => LockError::Stopped,
        }
    }
}

impl LockError {
    /// The class of the failure.
    pub fn kind(&self) -> ErrorKind {
        match self {
            LockError::Name { .. } | LockError::Lease { .. } | LockError::UnknownVersion { .. } => ErrorKind::Invalid,
            LockError::NeedsEngine { .. } | LockError::NoRuntime => ErrorKind::Invalid,
            LockError::Refused(LockRefused::Capacity { .. } | LockRefused::TooMany { .. }) => ErrorKind::Invalid,
            LockError::NoSuchToken { .. } | LockError::NotFound { .. } => ErrorKind::NotFound,
            LockError::Refused(_) | LockError::InUse { .. } | LockError::SessionLost { .. } => ErrorKind::Conflict,
            LockError::Corrupt { .. } => ErrorKind::Corrupt,
            LockError::Stopped => ErrorKind::Unavailable,
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
    /// The lock is one of another kind.
    #[error("lock {lock:?} is {stored}, and was asked for as {asked}")]
    Capacity { lock: String, stored: LockKind, asked: LockKind },
    /// More permits than there are.
    #[error("{asked} permits of lock {lock:?} were asked for; one can have 1 to {capacity}")]
    TooMany { lock: String, asked: u32, capacity: u32 },
    /// The same request was made for another number of permits: a read-write lock's writer wants all of them.
    #[error("the request was made before, for {before} permits of lock {lock:?}; now it is made for {asked}")]
    Reused { lock: String, before: u32, asked: u32 },
    /// The same execution holds it already, and has not said that it may acquire it again.
    #[error(
        "lock {lock:?} is held by the same execution already, under token {token}; if that is meant, say reentrant()"
    )]
    AlreadyHeld { lock: String, token: u64 },
    /// Executions wait for each other.
    #[error("waiting for lock {lock:?} would never end: {}", links(.cycle))]
    Deadlock { lock: String, cycle: Vec<DeadlockLink> },
    /// An operator has taken the request away.
    #[error("the request for lock {lock:?} was taken away: {reason}")]
    Forced { lock: String, reason: String },
}

/// One who waits, and for whom.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DeadlockLink {
    /// Who waits.
    pub waiter: Owner,
    /// For which lock; `None` if it waits for the end of a child.
    pub lock: Option<String>,
    /// Who holds it, or waits for it before; or the child.
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

/// What a lock is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum LockKind {
    /// One at a time.
    Mutex,
    /// So many permits.
    Semaphore {
        /// How many.
        permits: u32,
    },
    /// Any number of readers, or one writer.
    ReadWrite,
}

impl LockKind {
    /// How many permits there are. A writer takes all of them.
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
    fn a_record_of_a_newer_version_is_refused_and_is_no_damage() {
        let error = LockError::from(Unreadable::Version { found: 2, supported: 1 }.at("lock \"m\""));
        assert_eq!(error.to_string(), "lock \"m\" has version 2; this program reads versions 1 to 1: use a newer one");
        assert_eq!(error.kind(), ErrorKind::Invalid);
    }
}
