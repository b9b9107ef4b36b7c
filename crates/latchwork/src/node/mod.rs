//! A node: one process on a store that other processes may share. It owns shards, and with them executions. It has a
//! runtime that all its tasks run on, sessions and alarms, and it notifies its engine when a commit had no answer.
//!
//! The layers above reach the owners of other shards only through this module. A node knows no lock and no workflow.

pub(crate) mod alarm;
mod key;
mod lease;
pub(crate) mod session;
mod shard;

use std::fmt::Display;
use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::select;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::task::AbortHandle;

use crate::id::text_id;
use crate::lane::{Part, Runtime, Tag};
use crate::record::BadRecord;
use crate::store::{Env, ErrorKind, Store, StoreError};

pub(crate) use key::{read_text, write_text};
pub(crate) use shard::{COUNT, shard_key, shard_of};
use shard::{NEVER, Shards};

text_id!(
    /// Names an execution: any text of 1 to 512 bytes.
    ExecutionId
);

/// Tag of the check that this node still owns the shard.
pub(crate) const SHARD: Tag = Tag("shard");

/// The pause before a retry after the store was unavailable.
pub(crate) const AGAIN: Duration = Duration::from_millis(200);

/// Why a node could not do something.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NodeError {
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A newer version of the program has written the record.
    #[error("{} was written by a newer version of the program", .0.place)]
    Record(BadRecord),
    /// The node has stopped, or has lost the shard.
    #[error("the node has stopped, or another node has taken over")]
    Stopped,
}

impl NodeError {
    pub(crate) fn kind(&self) -> ErrorKind {
        match self {
            NodeError::Store(error) => error.kind(),
            NodeError::Record(_) => ErrorKind::Invalid,
            NodeError::Stopped => ErrorKind::Unavailable,
        }
    }
}

/// Waits for a notification, but not longer than `pause`.
pub(crate) async fn woken_or_after(woken: &Notify, env: &Env, pause: Option<Duration>) {
    match pause {
        Some(pause) => drop(select(pin!(woken.notified()), env.sleep(pause)).await),
        None => woken.notified().await,
    }
}

pub(crate) struct Node {
    pub(crate) store: Store,
    /// The runtime on which the node was started. All its work runs there, also if the caller is on another runtime.
    pub(crate) runtime: Runtime,
    shards: Shards,
    /// Notified when a commit shows that another node owns a shard.
    lost: Arc<Notify>,
    /// Notified when a commit had no answer.
    doubted: Arc<Notify>,
    /// The background tasks of the node.
    chores: Mutex<Vec<AbortHandle>>,
    stopped: AtomicBool,
}

impl Node {
    /// Returns a node that owns all shards. It replaces the owner before it.
    pub(crate) async fn owner(store: &Store) -> Result<Arc<Node>, NodeError> {
        Ok(Node::new(store, Shards::all(store).await?))
    }

    /// Returns a node that owns no shard and replaces no other node.
    pub(crate) fn idle(store: &Store) -> Arc<Node> {
        Node::new(store, Shards::none())
    }

    fn new(store: &Store, shards: Shards) -> Arc<Node> {
        Arc::new(Node {
            store: store.clone(),
            runtime: Runtime::here(),
            shards,
            lost: Arc::default(),
            doubted: Arc::default(),
            chores: Mutex::default(),
            stopped: AtomicBool::new(false),
        })
    }

    /// Runs a background task until the node stops.
    pub(crate) fn chore(&self, chore: impl Future<Output = ()> + Send + 'static) {
        let Some(runtime) = self.runtime.handle() else { return };
        self.chores.lock().push(runtime.spawn(chore).abort_handle());
    }

    /// Stops the background tasks. The node does nothing more.
    pub(crate) fn stop(&self) {
        self.stopped.store(true, Ordering::SeqCst);
        self.chores.lock().drain(..).for_each(|chore| chore.abort());
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::SeqCst)
    }

    /// Retries `attempt` for as long as the store is unavailable. Any other error is logged, and ends the retries.
    pub(crate) async fn at_last<T, E, F>(&self, what: &str, kind: fn(&E) -> ErrorKind, mut attempt: impl FnMut() -> F)
    where
        F: Future<Output = Result<T, E>>,
        E: Display,
    {
        while let Err(error) = attempt().await {
            if self.is_stopped() {
                return;
            }
            if kind(&error) != ErrorKind::Unavailable {
                return tracing::warn!(%error, "{what}");
            }
            self.store.env().sleep(AGAIN).await;
        }
    }

    /// A commit had no answer. If it has landed, the executions that it started or woke must be looked for in the
    /// store.
    pub(crate) fn doubt(&self) {
        self.doubted.notify_one();
    }

    /// Returns the notification that [`Node::doubt`] sends.
    pub(crate) fn doubted(&self) -> Arc<Notify> {
        self.doubted.clone()
    }

    /// Returns a part for a commit that only the owner of the execution may make. On any other node it is always
    /// refused.
    pub(crate) fn for_owner(&self, id: &ExecutionId) -> Part {
        Part::default().check(SHARD, self.shards.check(id.as_bytes()).unwrap_or(NEVER))
    }

    /// Returns a part for a commit that any node may make about a name: an execution, a lock, a session. The callers
    /// that wait for the name are notified in the memory of its owner. So a node that has owned the name must still own
    /// it. A node that never owned it needs no check: the owner finds the change in the store.
    pub(crate) fn for_any(self: &Arc<Node>, name: &[u8]) -> Part {
        let Some(check) = self.shards.check(name) else { return Part::default() };
        let (node, name) = (self.clone(), name.to_vec());
        Part::default().check_or(SHARD, check, move || node.lose(&name))
    }

    /// Another node was found to own the shard of the name.
    pub(crate) fn lose(&self, name: &[u8]) {
        if self.shards.lose(name) {
            self.lost.notify_one();
        }
    }

    /// Waits until another node was found to own a shard, then looks which other shards are lost. Returns true if this
    /// node still owns any.
    pub(crate) async fn has_lost(&self) -> bool {
        self.lost.notified().await;
        self.shards.look(&self.store).await.unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot read which shards another node has taken over");
            true
        })
    }

    /// The shards that this node owns, as far as it knows.
    pub(crate) fn owned(&self) -> Vec<u16> {
        self.shards.owned()
    }

    /// The shards in which this node finishes what other nodes have left half done to locks. Any node may do that. A
    /// node that owns no shard does it in all of them, because there may be no owner.
    pub(crate) fn served(&self) -> Vec<u16> {
        if self.shards.is_owner() { self.owned() } else { (0..COUNT).collect() }
    }

    /// True if this node owns the execution, as far as it knows.
    pub(crate) fn owns(&self, id: &ExecutionId) -> bool {
        self.owns_name(id.as_bytes())
    }

    /// True if this node owns the name, as far as it knows.
    pub(crate) fn owns_name(&self, name: &[u8]) -> bool {
        self.shards.owns(name)
    }
}
