//! What is stored of locks.

use serde::{Deserialize, Serialize};

use crate::lock::{LockKind, LockName, Owner};
use crate::record::{Record, stored};
use crate::store::Bytes;

/// A lock as a whole. It is written with every change of anything of the lock, so its rev tells whether what is known
/// of the lock is up to date, and new tickets are made of it.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub(crate) struct Head {
    /// `None` if the lock was removed.
    pub(crate) kind: Option<LockKind>,
    /// How many permits are taken.
    pub(crate) used: u32,
    /// The last ticket that was granted. All that wait have larger ones.
    pub(crate) granted: u64,
    /// How many wait.
    pub(crate) waiting: u64,
    /// When it was created, or last removed; microseconds.
    pub(crate) since_us: u64,
}

/// Somebody who holds a lock or waits for it. It is there exactly as long as that is so.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Request {
    pub(crate) owner: Owner,
    pub(crate) permits: u32,
    /// The owner's own name for it.
    pub(crate) id: Vec<u8>,
    /// The names under which its owner has entered it again. It is held until all of them are gone.
    pub(crate) again: Vec<Vec<u8>>,
    /// When it was made; microseconds.
    pub(crate) since_us: u64,
    /// When it was granted, if it was; microseconds.
    pub(crate) granted_us: Option<u64>,
}

impl Request {
    /// All names that its owner has for it.
    pub(crate) fn names(&self) -> impl Iterator<Item = &[u8]> {
        std::iter::once(&*self.id).chain(self.again.iter().map(Vec::as_slice))
    }
}

/// Somebody who was made to let go of a lock.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Forced {
    pub(crate) request: Request,
    pub(crate) at_us: u64,
    pub(crate) reason: String,
}

/// What executions have left that had more when they ended than a commit could release.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Left {
    pub(crate) requests: Vec<(LockName, u64)>,
}

stored!(Head, Request, Forced, Left);

/// The ticket of a request, as its owner's entry tells it.
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
