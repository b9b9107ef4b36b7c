//! Nodes: engines on one store.
//!
//! Engines that share a store, such as processes on one PostgreSQL database, divide the work among them. Each engine is
//! a *node*. Executions, locks and schedules are spread over 64 shards, and each shard belongs to one node. When a node
//! starts, the others give it its share; when it stops or dies, its shards move to the others. Everything can be called
//! on every node. See docs/nodes.md.
//!
//! ```
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> Result<(), Box<dyn std::error::Error>> {
//! use latchwork::node::{NodeOptions, Nodes};
//! use latchwork::store::Store;
//! use latchwork::workflow::{Ctx, Engine, workflow};
//!
//! let double = workflow("double").run(async |_: Ctx, n: u64| Ok(n * 2));
//! let store = Store::memory().await?; // or Store::connect("postgres://…"), in several processes
//! let first = Engine::on(&store).register(&double).node(NodeOptions::new().name("first")).start().await?;
//! let second = Engine::on(&store).register(&double).node(NodeOptions::new().name("second")).start().await?;
//! assert_eq!(second.start(&double, 21).id("a").await?.result().await?, 42);
//! assert_eq!(Nodes::on(&store).list().await?.len(), 2);
//! # second.shutdown().await?;
//! # first.shutdown().await?;
//! # Ok(()) }
//! ```

// A node is one process on a store that other processes may share. It has a runtime that all its tasks run on, sessions
// and alarms, and it notifies its engine when a commit had no answer. The layers above reach the owners of other shards
// only through this module. A node knows no lock and no workflow.

pub(crate) mod alarm;
mod balance;
mod key;
mod lease;
mod member;
mod membership;
mod nodes;
mod notice;
mod plan;
pub(crate) mod session;
mod shard;

use std::collections::BTreeMap;
use std::fmt::Display;
use std::future::Future;
use std::pin::pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use futures_util::future::select;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::task::AbortHandle;

use crate::id::text_id;
use crate::lane::{Part, Runtime, Tag};
use crate::record::{BadRecord, Record};
use crate::store::{Commit, Env, ErrorKind, Rev, Space, Store, StoreError, Timestamp, Uuid, Watch, Write};

use alarm::Alarms;
pub(crate) use key::{read_text, write_text};
pub(crate) use member::KnownWorkflow;
use member::NodeSpaces;
pub use member::{MoveReason, NodeOptions};
use membership::Membership;
pub(crate) use membership::{NodeEvents, NodeWork};
pub use nodes::{NodeInfo, Nodes, NodesError, ShardMove};
pub(crate) use notice::NodeNotice;
use notice::StoredNotices;
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
    /// Another live node has the name.
    #[error("another live node has the name {name:?}: give each node a name of its own, or none")]
    NameTaken { name: String },
    /// The name cannot be used.
    #[error("a node cannot be named {name:?}: a name has 1 to 128 bytes and no control characters")]
    Name { name: String },
    /// The lease is too short.
    #[error("a node cannot have a lease of {lease:?}: the shortest is {shortest:?}")]
    Lease { lease: Duration, shortest: Duration },
    /// The node has stopped, or has lost the shard.
    #[error("the node has stopped, or another node has taken over")]
    Stopped,
}

impl NodeError {
    pub(crate) fn kind(&self) -> ErrorKind {
        match self {
            NodeError::Store(error) => error.kind(),
            NodeError::Record(_) | NodeError::Name { .. } | NodeError::Lease { .. } => ErrorKind::Invalid,
            NodeError::NameTaken { .. } => ErrorKind::Conflict,
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
    /// `None` if this node does not share the store with others.
    membership: Option<Arc<Membership>>,
    /// Where a node that takes no part finds and leaves notices.
    board: Option<Space>,
    /// The watch that the node follows, until it does.
    watch: Mutex<Option<Watch>>,
    /// The keepers of alarms: they look at shards that the node takes.
    alarms: Mutex<Vec<Weak<Alarms>>>,
    /// Counts how often shards were taken, or after-effects were written in one by another node.
    pub(crate) gained: tokio::sync::watch::Sender<u64>,
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
        Ok(Node::new(store, Shards::all(store).await?, None))
    }

    /// Returns a node that shares the store with others. It takes part from [`Node::take_part`] on.
    pub(crate) async fn member(
        store: &Store,
        options: NodeOptions,
        workflows: BTreeMap<String, KnownWorkflow>,
    ) -> Result<Arc<Node>, NodeError> {
        let shards = Shards::shared(store).await?;
        let (membership, watch) = membership::join(store, options, workflows).await?;
        let node = Node::new(store, shards, Some(Arc::new(membership)));
        *node.watch.lock() = Some(watch);
        Ok(node)
    }

    /// Owns shards from now on, if they have no other owner, and does everything that the other nodes rely on.
    pub(crate) async fn take_part(self: &Arc<Node>, events: Weak<dyn NodeEvents>) -> Result<(), NodeError> {
        let (Some(membership), Some(watch)) = (self.membership.clone(), self.watch.lock().take()) else {
            return Ok(());
        };
        membership.serve(events);
        self.chore(self.clone().renew());
        self.read_members(&membership).await?;
        self.reread().await?;
        self.adopt(&membership).await?;
        self.chore(self.clone().follow(watch));
        self.chore(self.clone().balance());
        Ok(())
    }

    /// Returns a node that owns no shard and replaces no other node. On a shared store it notifies the others.
    pub(crate) async fn idle(store: &Store) -> Result<Arc<Node>, NodeError> {
        let spaces = match store.is_shared() {
            true => Some(NodeSpaces::declare(store).await?),
            false => NodeSpaces::find(store).await?,
        };
        let mut node = Node::new(store, Shards::none(), None);
        if let (Some(spaces), Some(node)) = (spaces, Arc::get_mut(&mut node)) {
            node.board = Some(spaces.board);
        }
        Ok(node)
    }

    /// Follows the notices of a node that owns nothing, until it stops. `heard` gets each notice, and `None` whenever
    /// some were missed.
    pub(crate) async fn overhear(self: Arc<Node>, heard: impl Fn(Option<NodeNotice>) + Send) {
        let Some(board) = self.board.clone() else { return };
        let env = self.store.env().clone();
        loop {
            let watch = async { self.store.watch(board.all(), self.store.generation().await?).await };
            if let Ok(mut watch) = watch.await {
                heard(None);
                while let Ok(committed) = watch.next().await {
                    let values = committed.changes.into_iter().filter_map(|change| change.value);
                    let notices = values.filter_map(|value| StoredNotices::decode(&value).ok());
                    notices.flat_map(|StoredNotices(notices)| notices).for_each(|notice| heard(Some(notice)));
                }
            }
            env.sleep(AGAIN).await;
        }
    }

    fn new(store: &Store, shards: Shards, membership: Option<Arc<Membership>>) -> Arc<Node> {
        Arc::new(Node {
            store: store.clone(),
            runtime: Runtime::here(),
            shards,
            membership,
            board: None,
            watch: Mutex::default(),
            alarms: Mutex::default(),
            gained: tokio::sync::watch::Sender::new(0),
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

    /// Returns a part for a commit that only the owner of the execution may make, or the node that the owner has lent
    /// it to. On any other node it is always refused.
    pub(crate) fn for_owner(self: &Arc<Node>, id: &ExecutionId) -> Part {
        match self.membership.as_deref().filter(|membership| membership.is_guest(id)) {
            // The owner takes it back by a write of its record, whose rev the commit checks.
            Some(membership) => membership.notice(Part::default(), NodeNotice::Execution(id.clone())),
            None => Part::default().check(SHARD, self.shards.check(id.as_bytes()).unwrap_or(NEVER)),
        }
    }

    /// Returns a part for a commit that any node may make about a name: a lock, a session, a limit. A node alone must
    /// not have been replaced, because callers are notified in its memory. Nodes that share the store notify each
    /// other.
    pub(crate) fn for_any(self: &Arc<Node>, name: &[u8]) -> Part {
        if self.is_shared() { Part::default() } else { self.if_still_ours(name) }
    }

    /// Returns a part with the check that this node still owns the name, if it does.
    fn if_still_ours(self: &Arc<Node>, name: &[u8]) -> Part {
        let Some(check) = self.shards.check(name) else { return Part::default() };
        let (node, name) = (self.clone(), name.to_vec());
        Part::default().check_or(SHARD, check, move || node.lose(&name))
    }

    /// The same for an execution. If it belongs to another node, or runs on another one, that node is notified.
    pub(crate) fn for_execution(self: &Arc<Node>, id: &ExecutionId) -> Part {
        let part = self.if_still_ours(id.as_bytes());
        if self.is_lent(id) || !self.owns(id) { self.noticed(part, || NodeNotice::Execution(id.clone())) } else { part }
    }

    /// The same for a schedule.
    pub(crate) fn for_schedule(self: &Arc<Node>, name: &str) -> Part {
        let part = self.if_still_ours(name.as_bytes());
        if self.owns_name(name.as_bytes()) { part } else { self.noticed(part, || NodeNotice::Schedule(name.into())) }
    }

    /// Adds a notice for the other nodes, if there can be any.
    pub(crate) fn noticed(&self, part: Part, notice: impl FnOnce() -> NodeNotice) -> Part {
        match (&self.membership, &self.board) {
            (Some(membership), _) => membership.notice(part, notice()),
            (None, Some(board)) => notice::noticed(part, board, Uuid::nil(), notice()),
            (None, None) => part,
        }
    }

    /// Adds a write of one commit of this node to another one.
    pub(crate) fn moved(&self, commit: Commit, write: Write) -> Commit {
        match &self.membership {
            Some(membership) => membership.moved(commit, write),
            None => commit.write(write),
        }
    }

    /// True if other nodes own shards at the same time. Then a refused check of a shard means that the operation is
    /// tried again, and not that this node is at its end.
    pub(crate) fn is_shared(&self) -> bool {
        self.membership.is_some()
    }

    /// The life of this node, if it shares the store.
    pub(crate) fn life(&self) -> Option<Uuid> {
        self.membership.as_deref().map(Membership::life)
    }

    /// The epoch of the shard of a name, as last read. It changes with the owner.
    pub(crate) fn epoch(&self, name: &[u8]) -> Option<Rev> {
        self.membership.as_deref().and_then(|membership| membership.epoch(name))
    }

    /// A live node that can run an execution of this workflow and version.
    pub(crate) fn able(&self, workflow: &str, version: u32) -> Option<Uuid> {
        self.membership.as_deref().and_then(|membership| membership.able(workflow, version))
    }

    /// True if other live nodes share the store.
    pub(crate) fn has_others(&self) -> bool {
        self.membership.as_deref().is_some_and(|membership| membership.has_others())
    }

    /// The shards of other live nodes that lack one of these workflows.
    #[cfg(feature = "postgres")]
    pub(crate) fn shards_lacking<'a>(&self, workflows: impl Iterator<Item = &'a String>) -> Vec<u16> {
        let workflows: Vec<&String> = workflows.collect();
        let lacks = |shard: &u16| workflows.iter().any(|workflow| self.owner_lacks(*shard, workflow));
        (0..COUNT).filter(lacks).collect()
    }

    /// True if the shard belongs to another live node, which does not have this workflow.
    #[cfg(feature = "postgres")]
    pub(crate) fn owner_lacks(&self, shard: u16, workflow: &str) -> bool {
        self.membership.as_deref().is_some_and(|membership| membership.owner_lacks(shard, workflow))
    }

    /// What another live node tells of a workflow that it can run.
    pub(crate) fn known_elsewhere(&self, workflow: &str) -> Option<KnownWorkflow> {
        self.membership.as_deref().and_then(|membership| membership.known_elsewhere(workflow))
    }

    /// True if the node of this life has not left, as far as this node knows.
    pub(crate) fn is_alive(&self, life: Uuid) -> bool {
        self.membership.as_deref().is_some_and(|membership| membership.is_alive(life))
    }

    /// The execution runs on another node, which is not its owner; or no longer does.
    pub(crate) fn lend(&self, id: &ExecutionId, to: Option<Uuid>) {
        let Some(membership) = &self.membership else { return };
        match to {
            Some(life) => membership.lend(id, life),
            None => membership.returned(id),
        }
    }

    /// True if this node owns the execution, or does not act for it only because its shard is about to move.
    pub(crate) fn is_named(&self, id: &ExecutionId) -> bool {
        self.membership.as_deref().is_some_and(|membership| membership.is_named(id.as_bytes()))
    }

    /// Forgets what it has lent and no longer owns.
    pub(crate) fn forget_lent(&self) {
        self.membership.iter().for_each(|membership| membership.forget_lent(|id| self.owns(id)));
    }

    /// True if the execution belongs to this node and is lent to another one.
    pub(crate) fn is_lent(&self, id: &ExecutionId) -> bool {
        self.membership.as_deref().is_some_and(|membership| membership.is_lent(id))
    }

    /// The executions that are lent to the node of this life.
    pub(crate) fn lent_to(&self, life: Uuid) -> Vec<ExecutionId> {
        self.membership.as_deref().map_or(Vec::new(), |membership| membership.lent_to(life))
    }

    /// The execution runs here, and belongs to another node; or no longer does.
    pub(crate) fn host(&self, id: &ExecutionId, is_here: bool) {
        let Some(membership) = &self.membership else { return };
        if is_here { membership.host(id) } else { membership.dismiss(id) }
    }

    /// True if the execution runs here and belongs to another node.
    pub(crate) fn is_guest(&self, id: &ExecutionId) -> bool {
        self.membership.as_deref().is_some_and(|membership| membership.is_guest(id))
    }

    /// The keeper of these alarms looks at every shard that the node takes.
    fn keeps(&self, alarms: &Arc<Alarms>) {
        self.alarms.lock().push(Arc::downgrade(alarms));
    }

    /// Makes the keepers of alarms look at these shards again.
    pub(crate) fn look_at_alarms(&self, shards: &[u16]) {
        self.alarms.lock().iter().filter_map(Weak::upgrade).for_each(|alarms| alarms.taken(shards));
    }

    /// The node has taken shards.
    fn tell_taken(&self, shards: &[u16]) {
        self.look_at_alarms(shards);
        self.gained.send_modify(|gained| *gained += 1);
    }

    /// When this node took the shard.
    pub(crate) fn since(&self, shard: u16) -> Option<Timestamp> {
        self.shards.since(shard)
    }

    /// Another node was found to own the shard of the name.
    pub(crate) fn lose(&self, name: &[u8]) {
        if let Some(membership) = &self.membership {
            membership.count_refused();
        }
        if self.shards.lose(name) {
            self.lost.notify_one();
        }
    }

    /// Waits until another node was found to own a shard, then looks which other shards are lost. Returns true if this
    /// node continues.
    pub(crate) async fn has_lost(&self) -> bool {
        self.lost.notified().await;
        if self.is_shared() {
            self.at_last("who owns the shards could not be read", NodeError::kind, || self.reread()).await;
            return true;
        }
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
