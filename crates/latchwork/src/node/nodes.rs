//! What operators see and do of nodes, in a process with or without an engine.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

use super::member::{Member, MoveReason, NODES, NodeRecord, NodeSpaces, StoredMoves, read_member};
use super::shard::{FoundShard, read_owners};
use super::{NodeError, notice};
use crate::lane::{Once, OnceError, OnceFound, OnceSpace, Part};
use crate::record::Record;
use crate::store::{Check, Commit, ErrorKind, Order, Store, StoreError, Timestamp, Uuid};

/// A node of a store.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct NodeInfo {
    /// Its name.
    pub name: String,
    /// When it started.
    #[serde(rename = "since_us")]
    pub since: Timestamp,
    /// When it last renewed its lease, by its own clock.
    #[serde(rename = "renewed_us")]
    pub renewed: Timestamp,
    /// How long the others wait for a sign of life before they take over its work.
    #[serde(rename = "lease_us", serialize_with = "crate::micros::serialize")]
    pub lease: Duration,
    /// True if it gives its shards to other nodes and gets no more.
    pub is_draining: bool,
    /// The shards that it owns.
    pub shards: Vec<u16>,
    /// How many executions it had in memory when it last renewed its lease.
    pub residents: u64,
    /// How many of its commits were refused because another node had taken the shard.
    pub refused: u64,
    /// The workflows that it can run, each with the versions whose executions it continues.
    pub workflows: BTreeMap<String, Vec<u32>>,
    /// The version of the library that it was built with.
    pub program: String,
}

/// Shards that got another owner together.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[non_exhaustive]
pub struct ShardMove {
    /// When.
    #[serde(rename = "at_us")]
    pub at: Timestamp,
    /// The shards.
    pub shards: Vec<u16>,
    /// The name of the owner before, if there was one.
    pub from: Option<String>,
    /// The name of the owner after it. `None` if no node was left.
    pub to: Option<String>,
    /// Why.
    pub why: MoveReason,
}

/// Why something of the nodes could not be read or changed.
#[derive(Debug, Clone, thiserror::Error)]
#[non_exhaustive]
#[allow(missing_docs)] // The fields are what the messages say.
pub enum NodesError {
    /// There is no node of this name.
    #[error("there is no node {name:?}; it has stopped, has died, or never was")]
    NotFound { name: String },
    /// No other node could take over.
    #[error(
        "node {name:?} cannot be drained: no other node can take over its work; start another node, or stop this one"
    )]
    LastNode { name: String },
    /// The record of a node or a shard was written by a newer program.
    #[error("{place} was written by a newer version of the program")]
    Newer { place: String },
    /// The idempotency key does not allow the change.
    #[error(transparent)]
    Once(OnceError),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl From<OnceError> for NodesError {
    fn from(error: OnceError) -> NodesError {
        match error {
            OnceError::Store(error) => error.into(),
            error => NodesError::Once(error),
        }
    }
}

impl NodesError {
    /// What kind of error it is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            NodesError::NotFound { .. } => ErrorKind::NotFound,
            NodesError::LastNode { .. } => ErrorKind::Conflict,
            NodesError::Newer { .. } => ErrorKind::Invalid,
            NodesError::Once(error) => error.kind(),
            NodesError::Store(error) => error.kind(),
        }
    }
}

impl From<NodeError> for NodesError {
    fn from(error: NodeError) -> NodesError {
        match error {
            NodeError::Store(error) => error.into(),
            NodeError::Record(record) => NodesError::Newer { place: record.place },
            _ => NodesError::Store(StoreError::Closed),
        }
    }
}

type Result<T, E = NodesError> = std::result::Result<T, E>;

/// The nodes of a store.
#[derive(Clone)]
pub struct Nodes {
    store: Store,
    once: Option<Once>,
}

impl Nodes {
    /// The nodes of this store.
    ///
    /// ```
    /// # use latchwork::node::{Nodes, NodesError};
    /// # use latchwork::store::Store;
    /// # async fn example(store: &Store) -> Result<(), NodesError> {
    /// for node in Nodes::on(store).list().await? {
    ///     println!("{} owns {} shards", node.name, node.shards.len());
    /// }
    /// # Ok(()) }
    /// ```
    pub fn on(store: &Store) -> Nodes {
        Nodes { store: store.clone(), once: None }
    }

    /// Sets the idempotency key of the change that is made through the returned handle: take one handle for each
    /// change.
    ///
    /// ```
    /// # use latchwork::node::{Nodes, NodesError};
    /// # async fn example(nodes: Nodes) -> Result<(), NodesError> {
    /// nodes.once("request-7").drain("billing-1", true).await?;
    /// # Ok(()) }
    /// ```
    pub fn once(mut self, once: impl Into<Once>) -> Nodes {
        self.once = Some(once.into());
        self
    }

    /// All nodes, in the order of their names. A node that has died is listed until its lease is over. The engine of a
    /// store that is not shared is not listed.
    ///
    /// ```
    /// # use latchwork::node::{Nodes, NodesError};
    /// # async fn example(nodes: Nodes) -> Result<(), NodesError> {
    /// let drained = nodes.list().await?.into_iter().filter(|node| node.is_draining);
    /// # Ok(()) }
    /// ```
    pub async fn list(&self) -> Result<Vec<NodeInfo>> {
        let Some((members, shards)) = self.read().await? else { return Ok(Vec::new()) };
        let mut listed: Vec<NodeInfo> = members.into_iter().map(|member| info(member, &shards)).collect();
        listed.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(listed)
    }

    /// One node.
    ///
    /// ```
    /// # use latchwork::node::{Nodes, NodesError};
    /// # async fn example(nodes: Nodes) -> Result<(), NodesError> {
    /// println!("{:?}", nodes.get("billing-1").await?.shards);
    /// # Ok(()) }
    /// ```
    pub async fn get(&self, name: &str) -> Result<NodeInfo> {
        let found = self.list().await?.into_iter().find(|node| node.name == name);
        found.ok_or_else(|| NodesError::NotFound { name: name.into() })
    }

    /// Drains a node: it gives its shards to other nodes and gets no more, but continues to serve its callers. With
    /// `false`, it gets its share again.
    ///
    /// ```
    /// # use latchwork::node::{Nodes, NodesError};
    /// # async fn example(nodes: Nodes) -> Result<(), NodesError> {
    /// nodes.drain("billing-1", true).await?;
    /// # Ok(()) }
    /// ```
    pub async fn drain(&self, name: &str, is_draining: bool) -> Result<()> {
        let not_found = || NodesError::NotFound { name: name.into() };
        let spaces = NodeSpaces::find(&self.store).await?.ok_or_else(not_found)?;
        let (key, answers) = (spaces.node(name), OnceSpace::default());
        loop {
            let change = ("node.drain", name, is_draining);
            let call = match answers.find(&self.store, self.once.as_ref(), &change).await? {
                OnceFound::Answered(()) => return Ok(()),
                OnceFound::Anew(call) => call,
            };
            let (members, _) = self.read().await?.ok_or_else(not_found)?;
            let member = members.iter().find(|member| member.name == name).ok_or_else(not_found)?;
            if member.record.is_draining == is_draining && self.once.is_none() {
                return Ok(());
            }
            let others = members.iter().filter(|member| member.name != name);
            if is_draining && !others.into_iter().any(|member| member.record.serves()) {
                return Err(NodesError::LastNode { name: name.into() });
            }
            let record = NodeRecord { is_draining, ..member.record.clone() };
            let commit = Commit::new().check(Check::AtRev(key.clone(), member.rev)).put(&key, record.encode());
            // The node renews its lease from the new record when it sees that the old one has changed.
            let told = notice::noticed(Part::default(), &spaces.board, Uuid::nil(), notice::NodeNotice::Shards);
            let part = told.and(call.answered(&()));
            if self.store.commit(part.place(commit).0).await?.is_applied() {
                return Ok(());
            }
        }
    }

    /// The last moves of shards, newest first. They are kept for 30 days.
    ///
    /// ```
    /// # use latchwork::node::{Nodes, NodesError};
    /// # async fn example(nodes: Nodes) -> Result<(), NodesError> {
    /// for moved in nodes.moves(20).await? {
    ///     println!("{:?}: {:?} → {:?}, {} shards", moved.at, moved.from, moved.to, moved.shards.len());
    /// }
    /// # Ok(()) }
    /// ```
    pub async fn moves(&self, limit: usize) -> Result<Vec<ShardMove>> {
        let Some(spaces) = NodeSpaces::find(&self.store).await? else { return Ok(Vec::new()) };
        let versions = self.store.view().await?.history(&spaces.log(), limit).await?;
        let mut moves = Vec::new();
        for version in versions {
            let Some(value) = version.value else { continue };
            let Ok(StoredMoves(stored)) = StoredMoves::decode(&value) else { continue };
            moves.extend(stored.into_iter().map(|it| ShardMove {
                at: version.time,
                shards: it.shards,
                from: it.from,
                to: it.to,
                why: it.why,
            }));
        }
        moves.truncate(limit);
        Ok(moves)
    }

    async fn read(&self) -> Result<Option<(Vec<Member>, Vec<FoundShard>)>> {
        let Some(spaces) = NodeSpaces::find(&self.store).await? else { return Ok(None) };
        let found = self.store.view().await?.scan(&spaces.board.prefix([NODES]), Order::Ascending, usize::MAX).await?;
        let members = found.iter().filter_map(|(key, item)| read_member(key, item.rev, &item.value)).collect();
        Ok(Some((members, read_owners(&self.store).await?.unwrap_or_default())))
    }
}

shown!(Nodes, _it => );

fn info(Member { name, record, .. }: Member, shards: &[FoundShard]) -> NodeInfo {
    let is_its = |(_, shard): &(u16, &FoundShard)| shard.owner == Some(record.life);
    NodeInfo {
        shards: (0..).zip(shards).filter(is_its).map(|(shard, _)| shard).collect(),
        since: Timestamp(record.since_us),
        renewed: Timestamp(record.renewed_us),
        lease: record.lease(),
        is_draining: record.is_draining,
        residents: record.residents,
        refused: record.refused,
        workflows: record.workflows.into_iter().map(|(name, known)| (name, known.versions)).collect(),
        program: record.program,
        name,
    }
}
