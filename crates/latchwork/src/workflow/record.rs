//! What is stored of executions: the records and their keys.

use serde::{Deserialize, Serialize};

use crate::store::{Bytes, Timestamp};
use crate::workflow::{ExecutionId, Failure};

/// An execution.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Execution {
    /// The name of the definition.
    pub(crate) workflow: String,
    pub(crate) status: Status,
    /// JSON text.
    pub(crate) input: String,
    /// When it is to be ended for having taken too long; microseconds.
    pub(crate) deadline_us: Option<u64>,
    /// The timer that is set for it, which goes with the next commit.
    pub(crate) timer_us: Option<u64>,
    pub(crate) started_us: u64,
}

/// How an execution is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum Status {
    Running,
    /// Out of memory until the timer fires.
    Waiting,
    /// Waits for an operator. The reason is text.
    Parked(String),
    /// JSON text.
    Completed(String),
    /// JSON text of a [`Failure`].
    Failed(String),
    TimedOut,
}

impl Status {
    pub(crate) fn is_terminal(&self) -> bool {
        matches!(self, Status::Completed(_) | Status::Failed(_) | Status::TimedOut)
    }
}

/// An operation in an execution's journal.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Entry {
    pub(crate) kind: Kind,
    pub(crate) name: String,
    /// A hash of what the operation was given.
    pub(crate) argument: u64,
    /// How often the body was begun.
    pub(crate) attempts: u32,
    pub(crate) state: EntryState,
}

/// What an operation is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Kind {
    Step,
    Sleep,
    Now,
    Uuid,
    Random,
    Version,
}

impl std::fmt::Display for Kind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Kind::Step => "step",
            Kind::Sleep => "sleep",
            Kind::Now => "now",
            Kind::Uuid => "uuid",
            Kind::Random => "random",
            Kind::Version => "version",
        })
    }
}

/// How far an operation is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum EntryState {
    /// The body was begun, as often as is counted.
    Begun,
    /// The last attempt failed; the next is due then, in microseconds. The failure is JSON text.
    Failed { failure: String, next_us: u64 },
    /// Waits until then, in microseconds.
    Until(u64),
    /// JSON text.
    Done(String),
    /// The failure is JSON text.
    Gave(String),
}

const VERSION: u8 = 1;

fn encode<T: Serialize>(record: &T) -> Bytes {
    postcard::to_extend(record, vec![VERSION]).expect("a record can be written to memory").into()
}

fn decode<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Option<T> {
    let (&VERSION, rest) = bytes.split_first()? else { return None };
    postcard::from_bytes(rest).ok()
}

impl Execution {
    pub(crate) fn encode(&self) -> Bytes {
        encode(self)
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Execution> {
        decode(bytes)
    }
}

impl Entry {
    pub(crate) fn encode(&self) -> Bytes {
        encode(self)
    }

    pub(crate) fn decode(bytes: &[u8]) -> Option<Entry> {
        decode(bytes)
    }
}

pub(crate) fn failure_text(failure: &Failure) -> String {
    serde_json::to_string(failure).expect("a failure can be written as JSON")
}

/// The key of a journal entry: the id's length and the id, then the place.
pub(crate) fn journal_key(id: &ExecutionId, place: u32) -> Vec<u8> {
    let mut key = journal_prefix(id);
    key.extend_from_slice(&place.to_be_bytes());
    key
}

pub(crate) fn journal_prefix(id: &ExecutionId) -> Vec<u8> {
    let mut key = Vec::with_capacity(id.len() + 6);
    key.extend_from_slice(&(id.len() as u16).to_be_bytes());
    key.extend_from_slice(id.as_bytes());
    key
}

/// The key of a timer: when it is due, and whose it is.
pub(crate) fn timer_key(due: Timestamp, id: &ExecutionId) -> Vec<u8> {
    let mut key = due.0.to_be_bytes().to_vec();
    key.extend_from_slice(id.as_bytes());
    key
}

/// When a timer is due, and whose it is.
pub(crate) fn read_timer_key(key: &[u8]) -> Option<(Timestamp, ExecutionId)> {
    let (due, id) = key.split_first_chunk::<8>()?;
    Some((Timestamp(u64::from_be_bytes(*due)), std::str::from_utf8(id).ok()?.into()))
}
