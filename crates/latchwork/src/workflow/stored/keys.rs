//! The keys of what is stored of executions, as bytes. Nothing here reads or writes a record.

use uuid::Uuid;

use crate::node::write_text;
use crate::workflow::ExecutionId;
use crate::workflow::journal::place::{BranchPath, Place};

/// The key of a journal entry: the id's length and the id, the run, the place.
pub(crate) fn journal_key(id: &ExecutionId, run: u32, place: &Place) -> Vec<u8> {
    let mut key = branch_key(id, run, &place.branch);
    key.extend_from_slice(&place.number.to_be_bytes());
    key
}

/// The prefix of the journal keys of a branch.
pub(crate) fn branch_key(id: &ExecutionId, run: u32, branch: &BranchPath) -> Vec<u8> {
    let mut key = run_key(id, run);
    branch.write(&mut key);
    key
}

/// The prefix of the journal keys of a run.
pub(crate) fn run_key(id: &ExecutionId, run: u32) -> Vec<u8> {
    let mut key = id_key(id);
    key.extend_from_slice(&run.to_be_bytes());
    key
}

/// Reads the place from the key of a journal entry of this execution.
pub(crate) fn read_place(id: &ExecutionId, key: &[u8]) -> Option<Place> {
    Place::read(key.get(id.len() + 6..)?)
}

/// The prefix of all keys that start with the id of an execution.
pub(crate) fn id_key(id: &ExecutionId) -> Vec<u8> {
    let mut key = Vec::with_capacity(id.len() + 32);
    write_text(&mut key, id);
    key
}

/// The key of a start under an idempotency key.
pub(crate) fn keyed_key(workflow: &str, key: &str) -> Vec<u8> {
    let mut out = Vec::with_capacity(workflow.len() + key.len() + 2);
    write_text(&mut out, workflow);
    out.extend_from_slice(key.as_bytes());
    out
}

/// The key of an open review: the workflow, the name of the review, its token, the execution's id.
pub(crate) fn review_key(workflow: &str, name: &str, token: Uuid, id: &ExecutionId) -> Vec<u8> {
    let mut key = Vec::with_capacity(workflow.len() + name.len() + id.len() + 20);
    write_text(&mut key, workflow);
    write_text(&mut key, name);
    key.extend_from_slice(token.as_bytes());
    key.extend_from_slice(id.as_bytes());
    key
}

/// How often an execution was loaded without making progress: the value of an alarm or of a key in the running list.
pub(crate) fn read_count(value: &[u8]) -> u32 {
    value.try_into().map_or(0, u32::from_be_bytes)
}
