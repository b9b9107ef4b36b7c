//! The records of an execution beside its record and its journal, all under its id: messages, delivered ids and
//! answers, tokens, published values, children.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::lock::{LockName, LockRefused};
use crate::record::stored;
use crate::store::{Item, Key, Range, Rev, Space, Uuid, View};
use crate::workflow::journal::place::{BranchPath, Place};
use crate::workflow::run::hash_text;
use crate::workflow::stored::keys::id_key;
use crate::workflow::stored::record::{Close, StoredStatus, WaitsFor, fetch};
use crate::workflow::{Decision, ExecutionId, WorkflowError};

/// A message to an execution, in its inbox until it is received.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Message {
    pub(crate) at_us: u64,
    pub(crate) body: MessageBody,
}

/// The content of a message. Payloads are JSON text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum MessageBody {
    Signal {
        name: String,
        payload: String,
    },
    Update {
        name: String,
        id: String,
        payload: String,
    },
    /// A child has ended with this status.
    Ended {
        child: ExecutionId,
        birth: u64,
        status: StoredStatus,
    },
    /// A token was completed. The failure is JSON text, too.
    Completed {
        token: u128,
        result: Result<String, String>,
    },
    /// A step that waits for its next attempt retries at once.
    RetryNow,
    /// A lock was granted, or will not be.
    Lock {
        lock: LockName,
        ticket: u64,
        refused: Option<LockRefused>,
    },
}

impl MessageBody {
    /// Approximately how many bytes it takes.
    pub(crate) fn bytes(&self) -> usize {
        let text = match self {
            MessageBody::Signal { payload, .. } | MessageBody::Update { payload, .. } => payload.len(),
            MessageBody::Completed { result: Ok(text) | Err(text), .. } => text.len(),
            MessageBody::Ended { .. } | MessageBody::RetryNow | MessageBody::Lock { .. } => 0,
        };
        text + 128
    }

    /// What the operations wait for that can receive this message. A message to a token does not carry the token's
    /// name.
    pub(crate) fn waited(&self) -> WaitsFor {
        match self {
            MessageBody::Signal { name, .. } => WaitsFor::Signal(name.clone()),
            MessageBody::Update { name, .. } => WaitsFor::Update(name.clone()),
            MessageBody::Ended { child, .. } => WaitsFor::Child(child.to_string()),
            MessageBody::Completed { .. } => WaitsFor::Completion(String::new()),
            MessageBody::RetryNow => WaitsFor::Retry(String::new()),
            MessageBody::Lock { lock, .. } => WaitsFor::Lock(lock.to_string()),
        }
    }
}

/// The id of the message about a lock. It is derived, so that the removal of a request can also delete its message.
pub(crate) fn grant_id(lock: &LockName, ticket: u64) -> Uuid {
    let bytes = [lock.bytes(), ticket.to_be_bytes().to_vec()].concat();
    Uuid::from_u128(xxhash_rust::xxh3::xxh3_128(&bytes))
}

/// What was sent under an id, so that it counts once.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) enum Delivered {
    /// A signal, with a hash of its name and payload.
    Signal(u64),
    /// An update, with a hash of its name and payload. Older programs stored the answer here.
    Update(u64, Option<UpdateAnswer>),
}

/// The answer to an update: JSON text, or a failure as JSON text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct UpdateAnswer(pub(crate) Result<String, String>);

impl Delivered {
    pub(crate) fn signal(name: &str, payload: &str) -> Delivered {
        Delivered::Signal(hash_text(&format!("{name}\0{payload}")))
    }

    pub(crate) fn update(name: &str, payload: &str) -> Delivered {
        Delivered::Update(hash_text(&format!("{name}\0{payload}")), None)
    }

    /// True if the same name and payload were sent; an answer does not matter.
    pub(crate) fn is_same(&self, other: &Delivered) -> bool {
        match (self, other) {
            (Delivered::Signal(a), Delivered::Signal(b)) | (Delivered::Update(a, _), Delivered::Update(b, _)) => a == b,
            _ => false,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Token {
    pub(crate) name: String,
    pub(crate) is_used: bool,
}

/// A review. A separate key exists while it is open.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct ReviewRecord {
    pub(crate) workflow: String,
    pub(crate) name: String,
    /// JSON text.
    pub(crate) question: String,
    pub(crate) options: Vec<String>,
    pub(crate) opened_us: u64,
    /// Until when the execution waits for the decision.
    pub(crate) until_us: Option<u64>,
    /// The operation that opened it.
    pub(crate) place: Place,
    pub(crate) decision: Option<Decision>,
    /// What the value of the decision has to fit: a `ValueSchema` as JSON text.
    pub(crate) takes: Option<String>,
}

/// The published values of an execution, by name; JSON text.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub(crate) struct Published(pub(crate) BTreeMap<String, String>);

/// A child that has not ended.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct ChildRecord {
    pub(crate) close: Close,
    /// The same as in the child's own record.
    pub(crate) birth: u64,
}

/// Inputs of a batch that has not begun, each JSON text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Inputs(pub(crate) Vec<String>);

stored!(Message, Delivered, UpdateAnswer, Token, Published, ChildRecord, ReviewRecord => [b"\0"], Inputs);

/// What a key stores.
#[derive(Clone, Copy)]
#[repr(u8)]
enum KeptKind {
    /// Written with every delivery, so its rev is the number of deliveries.
    Count,
    Message,
    Signal,
    Update,
    Token,
    Published,
    Child,
    Review,
    Inputs = 16,
    Successor,
    /// The idempotency key of a start that was gathered.
    StartKey,
    /// The state of a block of a flow.
    Checkpoint,
    /// An event of its stream, under its number.
    Event,
    Answer,
}

/// The keys of an execution's other records.
pub(crate) struct Kept<'a> {
    space: &'a Space,
    id: &'a ExecutionId,
    prefix: Vec<u8>,
}

impl<'a> Kept<'a> {
    pub(crate) fn new(space: &'a Space, id: &'a ExecutionId) -> Kept<'a> {
        Kept { space, id, prefix: id_key(id) }
    }

    fn bytes(&self, what: KeptKind, rest: &[u8]) -> Vec<u8> {
        [&self.prefix, &[what as u8][..], rest].concat()
    }

    fn key(&self, what: KeptKind, rest: &[u8]) -> Key {
        self.space.key(self.bytes(what, rest))
    }

    pub(crate) fn count(&self) -> Key {
        self.key(KeptKind::Count, &[])
    }

    /// A message, under the id that was created for it.
    pub(crate) fn message(&self, id: Uuid) -> Key {
        self.key(KeptKind::Message, id.as_bytes())
    }

    pub(crate) fn messages(&self) -> Range {
        self.space.prefix(self.bytes(KeptKind::Message, &[]))
    }

    pub(crate) fn signal(&self, id: &str) -> Key {
        self.key(KeptKind::Signal, id.as_bytes())
    }

    pub(crate) fn update(&self, id: &str) -> Key {
        self.key(KeptKind::Update, id.as_bytes())
    }

    /// The answer to the update of an id.
    pub(crate) fn answer(&self, id: &str) -> Key {
        self.key(KeptKind::Answer, id.as_bytes())
    }

    pub(crate) fn token(&self, token: Uuid) -> Key {
        self.key(KeptKind::Token, token.as_bytes())
    }

    pub(crate) fn published(&self) -> Key {
        self.key(KeptKind::Published, &[])
    }

    /// The published values, in a view.
    pub(crate) async fn fetch_published(&self, view: &View) -> Result<Option<(Published, Item)>, WorkflowError> {
        fetch(view, &self.published(), || format!("the published values of execution {:?}", self.id)).await
    }

    pub(crate) fn child(&self, id: &ExecutionId) -> Key {
        self.key(KeptKind::Child, id.as_bytes())
    }

    pub(crate) fn children(&self) -> Range {
        self.space.prefix(self.bytes(KeptKind::Child, &[]))
    }

    /// The first record of the execution that takes its place.
    pub(crate) fn successor(&self) -> Key {
        self.key(KeptKind::Successor, &[])
    }

    /// Inputs of a batch, beginning with this one.
    pub(crate) fn inputs_from(&self, number: u32) -> Key {
        self.key(KeptKind::Inputs, &number.to_be_bytes())
    }

    pub(crate) fn inputs(&self) -> Range {
        self.space.prefix(self.bytes(KeptKind::Inputs, &[]))
    }

    /// Records that a gathered start had this idempotency key.
    pub(crate) fn start_key(&self, key: &str) -> Key {
        self.key(KeptKind::StartKey, key.as_bytes())
    }

    pub(crate) fn start_keys(&self) -> Range {
        self.space.prefix(self.bytes(KeptKind::StartKey, &[]))
    }

    /// Reads the idempotency key from a key.
    pub(crate) fn read_start_key<'k>(&self, key: &'k Key) -> Option<&'k str> {
        std::str::from_utf8(key.bytes().get(self.prefix.len() + 1..)?).ok()
    }

    /// True if a key, of any execution, stores a child.
    #[cfg(feature = "testing")]
    pub(crate) fn is_child(key: &Key) -> bool {
        crate::node::read_text(key.bytes()).is_some_and(|(_, rest)| rest.first() == Some(&(KeptKind::Child as u8)))
    }

    /// Reads the id of the child from a key.
    pub(crate) fn read_child(&self, key: &Key) -> Option<ExecutionId> {
        std::str::from_utf8(key.bytes().get(self.prefix.len() + 1..)?).ok().map(Into::into)
    }

    pub(crate) fn review(&self, token: Uuid, name: &str) -> Key {
        self.key(KeptKind::Review, &[token.as_bytes(), name.as_bytes()].concat())
    }

    /// The review of a token, with any name.
    pub(crate) fn review_of(&self, token: Uuid) -> Range {
        self.space.prefix(self.bytes(KeptKind::Review, token.as_bytes()))
    }

    pub(crate) fn reviews(&self) -> Range {
        self.space.prefix(self.bytes(KeptKind::Review, &[]))
    }

    /// Reads the token and the name of a review from a key.
    pub(crate) fn read_review<'k>(&self, key: &'k Key) -> Option<(Uuid, &'k str)> {
        let (token, name) = key.bytes().get(self.prefix.len() + 1..)?.split_first_chunk::<16>()?;
        Some((Uuid::from_bytes(*token), std::str::from_utf8(name).ok()?))
    }

    /// The checkpoint of a block.
    pub(crate) fn checkpoint(&self, block: &BranchPath) -> Key {
        let mut path = Vec::new();
        block.write(&mut path);
        self.key(KeptKind::Checkpoint, &path)
    }

    pub(crate) fn checkpoints(&self) -> Range {
        self.space.prefix(self.bytes(KeptKind::Checkpoint, &[]))
    }

    /// Reads the path of the block from the key of a checkpoint.
    pub(crate) fn read_checkpoint(&self, key: &Key) -> Option<BranchPath> {
        let path = key.bytes().get(self.prefix.len() + 1..)?;
        Place::read(&[path, &[0; 4]].concat()).map(|place| place.branch)
    }

    /// An event of the stream.
    pub(crate) fn event(&self, number: u64) -> Key {
        self.key(KeptKind::Event, &number.to_be_bytes())
    }

    /// The events of the stream from a number on.
    pub(crate) fn events(&self, from: u64) -> Range {
        let all = self.space.prefix(self.bytes(KeptKind::Event, &[]));
        match from.checked_sub(1) {
            Some(before) => all.after(&self.event(before)),
            None => all,
        }
    }

    /// Reads the number of an event from its key.
    pub(crate) fn read_event(&self, key: &Key) -> Option<u64> {
        key.bytes().get(self.prefix.len() + 1..)?.try_into().ok().map(u64::from_be_bytes)
    }

    /// All of these records.
    pub(crate) fn all(&self) -> Range {
        self.space.prefix(&self.prefix)
    }
}

/// The number of deliveries, from the rev of the count.
pub(crate) fn counted(rev: Option<Rev>) -> u64 {
    rev.map_or(0, |rev| rev.0)
}
