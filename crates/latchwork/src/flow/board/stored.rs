//! Where the records of a board are: its keys, and reading one task. It decides nothing about tasks.

use std::sync::Arc;

use parking_lot::Mutex;

use crate::flow::board::head::BoardHeads;
use crate::flow::board::task::{Task, TaskState};
use crate::flow::error::{BoardError, BoardResult};
use crate::lane::{Lanes, Runtime};
use crate::node::write_text;
use crate::record::Record;
use crate::store::{Item, Key, Range, Rev, Space, SpaceSpec, Store, Timestamp, View};

/// The kinds of keys of a board.
#[derive(Clone, Copy)]
#[repr(u8)]
pub(super) enum What {
    /// id → task
    Task,
    /// rank, number, id → nothing: a task that can be claimed
    Ready,
    /// end of the lease, id → nothing: a task that is claimed
    Leased,
    /// The number of the next task.
    Next,
}

/// A board as its handles share it.
pub(super) struct StoredBoard {
    pub(super) store: Store,
    pub(super) space: Space,
    pub(super) name: Arc<str>,
    pub(super) runtime: Runtime,
    pub(super) lanes: Lanes<StoredBoard>,
    pub(super) heads: Mutex<BoardHeads>,
}

impl StoredBoard {
    pub(super) async fn open(store: &Store, name: &str) -> BoardResult<StoredBoard> {
        // Tasks and the counter are never deleted, and no check uses the rev of another key. So tombstones of ready and
        // leased tasks, which scans would have to pass over, need not stay.
        let space = store.space(SpaceSpec::new("flow.board").keys_used_once()).await?;
        if name.is_empty() || name.len() > 256 {
            return Err(BoardError::Name { name: name.into() });
        }
        let (store, name, heads) = (store.clone(), name.into(), Mutex::default());
        Ok(StoredBoard { store, space, name, runtime: Runtime::here(), lanes: Lanes::default(), heads })
    }

    fn bytes(&self, what: What, rest: &[u8]) -> Vec<u8> {
        let mut key = Vec::new();
        write_text(&mut key, &self.name);
        key.push(what as u8);
        key.extend_from_slice(rest);
        key
    }

    pub(super) fn range(&self, what: What) -> Range {
        self.space.prefix(self.bytes(what, &[]))
    }

    /// The leases that end at this time or later.
    pub(super) fn leased_from(&self, until: Timestamp) -> Range {
        self.range(What::Leased).from(&self.leased_key(until, ""))
    }

    pub(super) fn counter(&self) -> Key {
        self.space.key(self.bytes(What::Next, &[]))
    }

    pub(super) fn task_key(&self, id: &str) -> Key {
        self.space.key(self.bytes(What::Task, id.as_bytes()))
    }

    pub(super) fn ready_key(&self, task: &Task) -> Key {
        let order = [task.rank.to_be_bytes(), task.number.to_be_bytes()].concat();
        self.space.key(self.bytes(What::Ready, &[&order[..], task.id.as_bytes()].concat()))
    }

    fn leased_key(&self, until: Timestamp, id: &str) -> Key {
        self.space.key(self.bytes(What::Leased, &[&until.0.to_be_bytes()[..], id.as_bytes()].concat()))
    }

    /// The key besides its own under which a task is found in its state.
    pub(super) fn listed_key(&self, task: &Task) -> Option<Key> {
        match &task.state {
            TaskState::Ready => Some(self.ready_key(task)),
            TaskState::Claimed { until, .. } => Some(self.leased_key(*until, &task.id)),
            _ => None,
        }
    }

    /// The id in the key of a ready task.
    pub(super) fn ready_id(&self, key: &Key) -> String {
        let id = key.bytes().get(self.bytes(What::Ready, &[]).len() + 16..).unwrap_or_default();
        String::from_utf8_lossy(id).into_owned()
    }

    /// The end of the lease and the id in the key of a leased task.
    pub(super) fn lease(&self, key: &Key) -> Option<(Timestamp, String)> {
        let rest = key.bytes().get(self.bytes(What::Leased, &[]).len()..)?;
        let (until, id) = rest.split_first_chunk::<8>()?;
        Some((Timestamp(u64::from_be_bytes(*until)), String::from_utf8_lossy(id).into_owned()))
    }

    pub(super) async fn find(&self, view: &View, id: &str) -> BoardResult<Option<(Task, Rev)>> {
        let Some(item) = view.get(&self.task_key(id)).await? else { return Ok(None) };
        let task = Task::decode(&item.value).map_err(|why| why.at(format!("task {id:?}")))?;
        Ok(Some((task, item.rev)))
    }

    pub(super) async fn known(&self, view: &View, id: &str) -> BoardResult<(Task, Rev)> {
        self.find(view, id).await?.ok_or_else(|| BoardError::UnknownTask { task: id.into() })
    }
}

pub(super) fn read_task(key: &Key, item: &Item) -> BoardResult<Task> {
    Task::decode(&item.value).map_err(|why| why.at(format!("task {key}")).into())
}
