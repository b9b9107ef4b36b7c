//! What is stored of tasks, and its keys. Space `server.tasks` holds the records, space `server.tasks.by` their orders:
//! open tasks by kind and due time, leased ones by the end of the lease, ended ones by time, and ends that an execution
//! is still to be told of. All orders follow from the record. Nothing here decides anything.

use latchwork::Value;
use latchwork::store::{Bytes, Check, Key, Range, Rev, Space, SpaceId, SpaceSpec, Store, StoreError, Timestamp};
use serde::{Deserialize, Serialize};

/// The names of the spaces.
const RECORDS: &str = "server.tasks";
const ORDERS: &str = "server.tasks.by";

const OPEN: u8 = 0;
const LEASED: u8 = 1;
const ENDED: u8 = 2;
const UNTOLD: u8 = 3;

/// The version of the record.
const VERSION: u8 = 1;

/// A task.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Task {
    pub(crate) id: String,
    /// What a worker has to be able to do.
    pub(crate) kind: String,
    pub(crate) input: Value,
    /// The same for each attempt: for receivers that accept an idempotency key.
    pub(crate) key: String,
    #[serde(rename = "put_at_us")]
    pub(crate) put_at: Timestamp,
    pub(crate) retry: TaskRetry,
    /// How often it was leased.
    pub(crate) attempt: u32,
    /// The fencing token of the last lease; 0 before the first. It is the generation of the view in which the task was
    /// found: the lease before was committed later than the view of its own token, so each token is larger.
    pub(crate) token: u64,
    pub(crate) state: TaskState,
    /// The failure of the attempt that has failed last.
    pub(crate) failure: Option<TaskFailure>,
    /// The token of the execution that waits for the end.
    pub(crate) completion: Option<String>,
    /// True if that execution knows the end.
    pub(crate) told: bool,
    /// As long as this holds, the task is worth doing.
    pub(crate) guard: Option<StoredGuard>,
}

/// How far a task is.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "state", rename_all = "snake_case")]
pub(crate) enum TaskState {
    /// It can be taken, from this time on.
    Open {
        #[serde(rename = "due_us")]
        due: Timestamp,
    },
    /// A worker has taken it.
    Leased {
        worker: String,
        #[serde(rename = "until_us")]
        until: Timestamp,
        lease_us: u64,
    },
    Done {
        output: Value,
        #[serde(rename = "at_us")]
        at: Timestamp,
    },
    /// It has failed for good: the failure is that of the last attempt.
    Failed {
        #[serde(rename = "at_us")]
        at: Timestamp,
    },
    Cancelled {
        reason: String,
        #[serde(rename = "at_us")]
        at: Timestamp,
    },
}

/// How often a task is tried, and the pauses between attempts, which double.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TaskRetry {
    pub(crate) attempts: u32,
    pub(crate) pause_us: u64,
    pub(crate) longest_us: u64,
}

/// Why an attempt has failed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct TaskFailure {
    pub(crate) message: String,
    pub(crate) code: Option<String>,
    pub(crate) details: Value,
}

/// A check that a task depends on: a right that can be lost, such as a claim.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct StoredGuard {
    space: u32,
    key: Vec<u8>,
    rev: u64,
}

impl StoredGuard {
    /// A right whose record has a rev. There are no others that outlive a process.
    pub(crate) fn of(check: &Check) -> Option<StoredGuard> {
        match check {
            Check::AtRev(key, rev) => Some(StoredGuard { space: key.space().0, key: key.bytes().to_vec(), rev: rev.0 }),
            _ => None,
        }
    }

    pub(crate) fn key(&self) -> Key {
        Key::from_parts(SpaceId(self.space), &self.key)
    }

    pub(crate) fn rev(&self) -> Rev {
        Rev(self.rev)
    }
}

impl Task {
    /// A byte for the version, then JSON.
    pub(crate) fn encode(&self) -> Result<Bytes, serde_json::Error> {
        let mut bytes = vec![VERSION];
        serde_json::to_writer(&mut bytes, self)?;
        Ok(bytes.into())
    }

    /// `None` if the record is damaged, or of a newer program.
    pub(crate) fn decode(stored: &Bytes) -> Option<Task> {
        let fields = stored.strip_prefix(&[VERSION])?;
        // The depth of what is stored was checked when it was received.
        let mut json = serde_json::Deserializer::from_slice(fields);
        json.disable_recursion_limit();
        Task::deserialize(&mut json).ok()
    }

    /// When it has ended.
    pub(crate) fn ended(&self) -> Option<Timestamp> {
        match &self.state {
            TaskState::Open { .. } | TaskState::Leased { .. } => None,
            TaskState::Done { at, .. } | TaskState::Failed { at } | TaskState::Cancelled { at, .. } => Some(*at),
        }
    }
}

/// The keys of both spaces.
#[derive(Debug, Clone)]
pub(crate) struct TaskKeys {
    records: Space,
    orders: Space,
}

impl TaskKeys {
    pub(crate) async fn declare(store: &Store) -> Result<TaskKeys, StoreError> {
        // No check is ever made of a rev across the removal of a record, so that no tombstones are needed.
        let records = store.space(SpaceSpec::new(RECORDS).keys_used_once()).await?;
        let orders = store.space(SpaceSpec::new(ORDERS).keys_used_once()).await?;
        Ok(TaskKeys { records, orders })
    }

    /// Whether the store has ever had tasks.
    pub(crate) async fn are_declared(store: &Store) -> Result<bool, StoreError> {
        Ok(store.spaces().await?.iter().any(|space| space.name() == ORDERS))
    }

    pub(crate) fn record(&self, id: &str) -> Key {
        self.records.key(id)
    }

    pub(crate) fn records(&self) -> Range {
        self.records.all()
    }

    /// Every task of an order, or all of all orders.
    pub(crate) fn orders(&self) -> Range {
        self.orders.all()
    }

    /// The places of a task in the orders.
    pub(crate) fn places(&self, task: &Task) -> Vec<Key> {
        let timed = |order: u8, time: Timestamp| {
            self.orders.key([&[order][..], &time.0.to_be_bytes(), task.id.as_bytes()].concat())
        };
        match &task.state {
            TaskState::Open { due } => {
                vec![self.orders.key([&open(&task.kind)[..], &due.0.to_be_bytes(), task.id.as_bytes()].concat())]
            }
            TaskState::Leased { until, .. } => vec![timed(LEASED, *until)],
            TaskState::Done { at, .. } | TaskState::Failed { at } | TaskState::Cancelled { at, .. } => {
                let is_untold = task.completion.is_some() && !task.told;
                let untold = is_untold.then(|| self.orders.key([&[UNTOLD][..], task.id.as_bytes()].concat()));
                [timed(ENDED, *at)].into_iter().chain(untold).collect()
            }
        }
    }

    /// The open tasks of a kind that are due.
    pub(crate) fn due(&self, kind: &str, now: Timestamp) -> Range {
        let (first, end) = (open(kind), [&open(kind)[..], &now.0.saturating_add(1).to_be_bytes()].concat());
        self.orders.range(&first[..]..&end[..])
    }

    /// The due time and the id of an open task of the kind.
    pub(crate) fn open_at(kind: &str, place: &Key) -> Option<(Timestamp, String)> {
        timed(place.bytes().get(open(kind).len()..)?)
    }

    /// The leases that are over.
    pub(crate) fn over(&self, now: Timestamp) -> Range {
        self.before(LEASED, Timestamp(now.0.saturating_add(1)))
    }

    /// The tasks that ended before a time.
    pub(crate) fn ended_before(&self, time: Timestamp) -> Range {
        self.before(ENDED, time)
    }

    fn before(&self, order: u8, time: Timestamp) -> Range {
        self.orders.range(&[order][..]..&[&[order][..], &time.0.to_be_bytes()].concat()[..])
    }

    /// The id in a place of the orders by time.
    pub(crate) fn timed_id(place: &Key) -> Option<String> {
        timed(place.bytes().get(1..)?).map(|(_, id)| id)
    }

    pub(crate) fn untold(&self) -> Range {
        self.orders.prefix([UNTOLD])
    }

    pub(crate) fn untold_id(place: &Key) -> Option<String> {
        String::from_utf8(place.bytes().get(1..)?.to_vec()).ok()
    }

    /// True if something is to be done for a task of this place sooner or later.
    pub(crate) fn is_pending(place: &Key) -> bool {
        place.bytes().first().is_some_and(|order| *order != ENDED)
    }
}

/// What the places of open tasks of a kind start with. A kind has at most 200 bytes.
fn open(kind: &str) -> Vec<u8> {
    [&[OPEN, kind.len() as u8][..], kind.as_bytes()].concat()
}

fn timed(rest: &[u8]) -> Option<(Timestamp, String)> {
    let (time, id) = rest.split_first_chunk::<8>()?;
    Some((Timestamp(u64::from_be_bytes(*time)), String::from_utf8(id.to_vec()).ok()?))
}
