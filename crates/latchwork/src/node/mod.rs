//! A node: what one process is to a store that others may share. It owns shards, and with them executions; it has a
//! runtime that all its work is done on, sessions, and alarms; and it is told when a commit had no answer.
//!
//! The layers above reach other owners through here alone. A node knows no lock and no workflow.

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

/// This node owns the shard.
pub(crate) const SHARD: Tag = Tag("shard");

/// How long to wait after the store did not serve.
pub(crate) const AGAIN: Duration = Duration::from_millis(200);

/// Why a node could not do something.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NodeError {
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A record of a newer program.
    #[error("{} is of a newer program", .0.place)]
    Record(BadRecord),
    /// The node has stopped, or has lost the shard.
    #[error("the node has stopped, or another one has taken over")]
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

/// Waits until it is woken, or so long at the most.
pub(crate) async fn woken_or_after(woken: &Notify, env: &Env, pause: Option<Duration>) {
    match pause {
        Some(pause) => drop(select(pin!(woken.notified()), env.sleep(pause)).await),
        None => woken.notified().await,
    }
}

pub(crate) struct Node {
    pub(crate) store: Store,
    /// Where the node was started: all that it does is done there, wherever it is asked for.
    pub(crate) runtime: Runtime,
    shards: Shards,
    /// Told when a shard was found to be another node's.
    lost: Arc<Notify>,
    /// Told when a commit had no answer.
    doubted: Arc<Notify>,
    /// What the node does beside what it is asked for.
    chores: Mutex<Vec<AbortHandle>>,
    stopped: AtomicBool,
}

impl Node {
    /// A node that owns everything: the owner before it is replaced.
    pub(crate) async fn owner(store: &Store) -> Result<Arc<Node>, NodeError> {
        Ok(Node::new(store, Shards::all(store).await?))
    }

    /// A node that owns nothing, and replaces no other.
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

    /// Does something beside, until the node stops.
    pub(crate) fn chore(&self, chore: impl Future<Output = ()> + Send + 'static) {
        let Some(runtime) = self.runtime.handle() else { return };
        self.chores.lock().push(runtime.spawn(chore).abort_handle());
    }

    /// Does nothing more.
    pub(crate) fn stop(&self) {
        self.stopped.store(true, Ordering::SeqCst);
        self.chores.lock().drain(..).for_each(|chore| chore.abort());
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::SeqCst)
    }

    /// Does something, however long the store does not serve. What else fails is told of, and left.
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

    /// A commit had no answer: what it has set running, if it has landed, is to be looked for.
    pub(crate) fn doubt(&self) {
        self.doubted.notify_one();
    }

    /// Where to wait for that.
    pub(crate) fn doubted(&self) -> Arc<Notify> {
        self.doubted.clone()
    }

    /// A part of what is done for an execution by its owner. On a node that is not the owner it never lands.
    pub(crate) fn for_owner(&self, id: &ExecutionId) -> Part {
        Part::default().check(SHARD, self.shards.check(id.as_bytes()).unwrap_or(NEVER))
    }

    /// A part of what is done by any node to what has a name: an execution, a lock, a session. Callers that it is about
    /// are told in this memory, so a node that owned it must still do so; what a node that never did has done is found
    /// in the store.
    pub(crate) fn for_any(self: &Arc<Node>, name: &[u8]) -> Part {
        let Some(check) = self.shards.check(name) else { return Part::default() };
        let (node, name) = (self.clone(), name.to_vec());
        Part::default().check_or(SHARD, check, move || node.lose(&name))
    }

    /// The shard of what has a name was found to be another node's.
    pub(crate) fn lose(&self, name: &[u8]) {
        if self.shards.lose(name) {
            self.lost.notify_one();
        }
    }

    /// Returns when a shard was found to be another node's, after it was looked which others are. Gives whether any is
    /// left.
    pub(crate) async fn has_lost(&self) -> bool {
        self.lost.notified().await;
        self.shards.look(&self.store).await.unwrap_or_else(|error| {
            tracing::warn!(%error, "it cannot be told which shards are another node's");
            true
        })
    }

    /// The shards that this node owns, as far as it knows.
    pub(crate) fn owned(&self) -> Vec<u16> {
        self.shards.owned()
    }

    /// The shards in which this node goes on with what others have left half done to locks. Any node may do that; where
    /// it owns nothing, there may be no other that does.
    pub(crate) fn served(&self) -> Vec<u16> {
        if self.shards.is_owner() { self.owned() } else { (0..COUNT).collect() }
    }

    /// Whether this node owns an execution, as far as it knows.
    pub(crate) fn owns(&self, id: &ExecutionId) -> bool {
        self.owns_name(id.as_bytes())
    }

    /// Whether this node owns what has a name, as far as it knows.
    pub(crate) fn owns_name(&self, name: &[u8]) -> bool {
        self.shards.owns(name)
    }
}
