//! The lists of executions: keys in the order of start times, for everything that executions can be found by. The keys
//! of an execution follow from its record alone, so lists and records cannot diverge. Running executions have a list of
//! their own, by shard: the owner of a shard reads it.

use crate::json;
use crate::lane::Part;
use crate::node::{read_text, shard_key, shard_of, write_text};
use crate::store::{Key, Range, Space};
use crate::workflow::ExecutionId;
use crate::workflow::operate::status::Status;
use crate::workflow::stored::record::{Attribute, Execution, WaitsFor};

/// The names of the spaces.
pub(crate) const LISTED: &str = "workflow.listed";
pub(crate) const RUNNING: &str = "workflow.running";

/// The spaces in which executions are listed.
#[derive(Clone)]
pub(crate) struct Lists {
    /// what it is found by, start time, id → the reason if it is parked
    pub(crate) listed: Space,
    /// shard, workflow, start time, id → how often it was loaded without making progress
    pub(crate) running: Space,
}

/// The first byte of a key: what the key lists by.
const BY_STATUS: u8 = b's';
const BY_TAG: u8 = b't';
const BY_ATTRIBUTE: u8 = b'a';
const BY_WAIT: u8 = b'w';

/// The prefix of keys that list by a name.
fn named(what: &[u8], name: &str) -> Vec<u8> {
    let mut key = what.to_vec();
    write_text(&mut key, name);
    key
}

/// The prefix of keys that list the executions of one workflow and one status. Running executions are listed by shard.
pub(crate) fn by_status(status: Status, workflow: &str) -> Vec<u8> {
    debug_assert!(status != Status::Running, "running executions are listed by shard");
    named(&[BY_STATUS, status as u8], workflow)
}

/// The prefix of keys that list the running executions of one workflow in a shard.
pub(crate) fn by_shard(shard: u16, workflow: &str) -> Vec<u8> {
    named(&shard_key(shard), workflow)
}

/// The workflow and the rest of a key that lists by status or by shard: both have two bytes before the workflow.
pub(crate) fn read_by_status(key: &[u8]) -> Option<(&str, &[u8])> {
    read_text(key.get(2..)?)
}

pub(crate) fn by_tag(tag: &str) -> Vec<u8> {
    named(&[BY_TAG], tag)
}

/// The prefix of keys that list by an attribute, with any value.
pub(crate) fn by_attribute(name: &str) -> Vec<u8> {
    named(&[BY_ATTRIBUTE], name)
}

/// The prefix of keys that list by this value of an attribute. Keys are in the order of the values.
pub(crate) fn by_value(name: &str, value: &Attribute) -> Vec<u8> {
    let mut key = by_attribute(name);
    let (kind, value) = match value {
        Attribute::Boolean(value) => (0, (*value).into()),
        Attribute::Integer(value) => (1, (*value).into()),
        Attribute::Real(value) => (1, (*value).into()),
        Attribute::Text(value) => (2, value.as_str().into()),
        Attribute::Time(value) => (3, value.0.into()),
    };
    key.push(kind);
    json::encode(&mut key, Some(&value));
    key
}

impl WaitsFor {
    /// The byte and the name that keys have for this wait. `None` for a wait that is not listed.
    pub(crate) fn listed(&self) -> Option<(u8, &str)> {
        match self {
            WaitsFor::Retry(name) => Some((0, name)),
            WaitsFor::Signal(name) => Some((1, name)),
            WaitsFor::Update(name) => Some((2, name)),
            WaitsFor::Child(name) => Some((3, name)),
            WaitsFor::Completion(name) => Some((4, name)),
            WaitsFor::Published(name) => Some((5, name)),
            WaitsFor::Lock(name) => Some((6, name)),
            WaitsFor::Admission(name) => Some((7, name)),
            WaitsFor::Review(name) => Some((8, name)),
            // A timer has a shelf of its own. Steps and the store are not waited for out of memory.
            WaitsFor::Timer | WaitsFor::Step(_) | WaitsFor::Store => None,
        }
    }
}

/// The prefix of keys that list by what is waited for. `None` for a wait that is not listed.
pub(crate) fn by_wait(what: &WaitsFor) -> Option<Vec<u8>> {
    let (kind, name) = what.listed()?;
    Some(named(&[BY_WAIT, kind], name))
}

/// Appends the end of every key: the start time of the execution and its id.
pub(crate) fn write_end(key: &mut Vec<u8>, started_us: u64, id: &str) {
    key.extend_from_slice(&started_us.to_be_bytes());
    key.extend_from_slice(id.as_bytes());
}

/// Reads the start time and the id of an execution from the end of a key.
pub(crate) fn read_end(rest: &[u8]) -> Option<(u64, ExecutionId)> {
    let (started, id) = rest.split_first_chunk::<8>()?;
    Some((u64::from_be_bytes(*started), std::str::from_utf8(id).ok()?.into()))
}

/// All keys of an execution except the one by status.
fn other_keys(id: &ExecutionId, execution: &Execution) -> Vec<Vec<u8>> {
    let waits = execution.waits.iter().filter_map(|wait| by_wait(&wait.what));
    let tags = execution.labels.tags.iter().map(|tag| by_tag(tag));
    let attributes = execution.labels.attributes.iter().map(|(name, value)| by_value(name, value));
    let mut keys: Vec<_> = waits.chain(tags).chain(attributes).collect();
    keys.iter_mut().for_each(|key| write_end(key, execution.started_us, id));
    // Two branches may wait for the same thing.
    keys.sort();
    keys.dedup();
    keys
}

impl Lists {
    /// All executions of a status.
    pub(crate) fn with_status(&self, status: Status) -> (&Space, Range) {
        match status {
            Status::Running => (&self.running, self.running.all()),
            other => (&self.listed, self.listed.prefix([BY_STATUS, other as u8])),
        }
    }

    /// The key that lists an execution by its status.
    pub(crate) fn status(&self, id: &ExecutionId, execution: &Execution) -> Key {
        let (space, mut key) = match Status::of(execution) {
            Status::Running => (&self.running, by_shard(shard_of(id.as_bytes()), &execution.workflow)),
            other => (&self.listed, by_status(other, &execution.workflow)),
        };
        write_end(&mut key, execution.started_us, id);
        space.key(key)
    }

    /// All keys of an execution.
    #[cfg(feature = "testing")]
    pub(crate) fn keys(&self, id: &ExecutionId, execution: &Execution) -> Vec<Key> {
        let mut keys: Vec<Key> = other_keys(id, execution).iter().map(|key| self.listed.key(key)).collect();
        keys.push(self.status(id, execution));
        keys
    }

    /// Adds the change of an execution's list keys to a part. `note` is the value of the key by status.
    pub(crate) fn list(
        &self,
        mut part: Part,
        id: &ExecutionId,
        before: Option<&Execution>,
        after: Option<&Execution>,
        note: Option<Vec<u8>>,
    ) -> Part {
        let status = |execution: Option<&Execution>| execution.map(|it| self.status(id, it));
        let (was, is) = (status(before), status(after));
        if let Some(was) = was.as_ref().filter(|was| Some(*was) != is.as_ref()) {
            part = part.delete(was);
        }
        if let Some(is) = is.as_ref().filter(|is| Some(*is) != was.as_ref() || note.is_some()) {
            part = part.put(is, note.unwrap_or_default());
        }
        let keys = |execution: Option<&Execution>| execution.map(|it| other_keys(id, it)).unwrap_or_default();
        let (were, are) = (keys(before), keys(after));
        for key in were.iter().filter(|key| are.binary_search(key).is_err()) {
            part = part.delete(&self.listed.key(key));
        }
        for key in are.iter().filter(|key| were.binary_search(key).is_err()) {
            part = part.put(&self.listed.key(key), Vec::new());
        }
        part
    }
}
