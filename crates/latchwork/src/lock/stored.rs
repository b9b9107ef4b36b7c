//! The stored records of locks.

use serde::{Deserialize, Serialize};

use crate::lock::{LockKind, LockName, Owner};
use crate::record::{Record, stored};
use crate::store::Bytes;

/// The head of a lock. Every change of the lock writes it, so its rev tells whether the lock in memory is up to date.
/// New tickets are made from its rev.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub(crate) struct Head {
    /// `None` if the lock was removed.
    pub(crate) kind: Option<LockKind>,
    /// The number of permits that are taken.
    pub(crate) used: u32,
    /// The last ticket that was granted. All waiters have larger tickets.
    pub(crate) granted: u64,
    /// The number of waiters.
    pub(crate) waiting: u64,
    /// When it was created, or last removed; microseconds.
    pub(crate) since_us: u64,
}

/// A request of an owner that holds the lock or waits for it. It exists exactly that long.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct LockRequest {
    pub(crate) owner: Owner,
    pub(crate) permits: u32,
    /// The owner's id of the request.
    pub(crate) id: Vec<u8>,
    /// The ids under which its owner has entered it again. The lock is held until all of them are released.
    pub(crate) again: Vec<Vec<u8>>,
    /// When it was made; microseconds.
    pub(crate) since_us: u64,
    /// When it was granted, if it was; microseconds.
    pub(crate) granted_us: Option<u64>,
}

impl LockRequest {
    /// All ids that its owner has for it.
    pub(crate) fn names(&self) -> impl Iterator<Item = &[u8]> {
        std::iter::once(&*self.id).chain(self.again.iter().map(Vec::as_slice))
    }
}

/// A request that an operator has released.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Forced {
    pub(crate) request: LockRequest,
    pub(crate) at_us: u64,
    pub(crate) reason: String,
}

/// The requests of ended executions that had more locks than one commit could release.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct UnreleasedRequests {
    pub(crate) requests: Vec<(LockName, u64)>,
}

stored!(Head, LockRequest, Forced, UnreleasedRequests);

/// The ticket of a request, under its owner's id.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Ticket(pub(crate) u64);

impl Record for Ticket {
    fn encode(&self) -> Bytes {
        let mut out = [Self::VERSION; 9];
        out[1..].copy_from_slice(&self.0.to_be_bytes());
        Bytes::copy_from_slice(&out)
    }

    fn read(_: u8, fields: &[u8]) -> Option<Ticket> {
        fields.try_into().ok().map(|ticket| Ticket(u64::from_be_bytes(ticket)))
    }
}
