//! One node among others on a store that they share: it joins, renews its lease, and follows the notices and the
//! records of the others. Who owns what is decided by the records alone. `balance.rs` moves shards.
//!
//! Nothing here knows an execution; [`NodeEvents`] is all that this file sees of what is above.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::balance::NodeBoard;
use super::lease::LeaseVerdict;
use super::member::{
    KnownWorkflow, LEASE, Member, MemberChange, Members, NODES, NodeOptions, NodeRecord, NodeSpaces, SHORTEST,
    read_member, read_name,
};
use super::notice::{NOTICES, NodeNotice, StoredNotices, moved, noticed};
use super::plan::Candidate;
use super::shard::FoundShard;
use super::{AGAIN, ExecutionId, Node, NodeError, shard_of};
use crate::lane::Part;
use crate::record::Record;
use crate::store::{Change, Check, Commit, Env, Generation, Outcome, Rev, Store, StoreError, Uuid, Watch, Write};

/// What the layers above do when something happens to the node.
pub(crate) trait NodeEvents: Send + Sync {
    /// A notice of any node, and the generation of its commit. The receiver decides whether it concerns this node.
    fn heard(self: Arc<Self>, notice: NodeNotice, at: Generation);

    /// This node owns more shards.
    fn taken(self: Arc<Self>, shards: Vec<u16>) -> NodeWork<'static>;

    /// Executions that belong to no shard of this node leave memory.
    fn evict(self: Arc<Self>);

    /// This node owns fewer shards: everything that it remembers of others leaves memory.
    fn lost(self: Arc<Self>);

    /// True if an execution of one of these shards is still in memory.
    fn has_any_in(&self, shards: &[u16]) -> bool;

    /// Executions that are in memory, were loaded after a crash and have made no progress since, lose the mark of it:
    /// they leave memory because the node gives them away.
    fn clear_marks<'a>(self: Arc<Self>, shards: &'a [u16]) -> NodeWork<'a>;

    /// Shards, of this node or others, have other owners.
    fn moved(self: Arc<Self>);

    /// A node is new, or serves differently.
    fn joined(self: Arc<Self>);

    /// A node is gone.
    fn left(self: Arc<Self>, life: Uuid);

    /// Notices were missed.
    fn behind(self: Arc<Self>);

    /// How many executions are in memory.
    fn residents(&self) -> u64;
}

pub(crate) type NodeWork<'a> = Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

/// What a node knows of itself and of the others.
pub(crate) struct Membership {
    pub(super) spaces: NodeSpaces,
    pub(super) name: String,
    lease: Duration,
    since_us: u64,
    /// The workflows that it can run, with their versions.
    workflows: BTreeMap<String, KnownWorkflow>,
    own: Mutex<OwnRecord>,
    members: Mutex<Members>,
    /// The owners of all shards, as last read.
    owners: Mutex<Vec<FoundShard>>,
    /// True once the node leaves: it does not join again.
    pub(super) is_leaving: AtomicBool,
    /// Held while the records of shards are read, so that an older reading never replaces a newer one.
    reading: tokio::sync::Mutex<()>,
    /// Notified when shards may have to move.
    pub(super) changed: Notify,
    events: OnceLock<Weak<dyn NodeEvents>>,
    /// How many commits were refused because another node had taken the shard.
    refused: AtomicU64,
    /// Executions that this node owns and that run on other nodes, with those nodes' lives.
    lent: Mutex<BTreeMap<ExecutionId, Uuid>>,
    /// Executions that run here and that another node owns.
    guests: Mutex<BTreeSet<ExecutionId>>,
}

/// The node's own record as this process knows it.
#[derive(Clone, Copy)]
struct OwnRecord {
    life: Uuid,
    rev: Rev,
    is_draining: bool,
}

impl Membership {
    pub(super) fn life(&self) -> Uuid {
        self.own.lock().life
    }

    fn record(&self, env: &Env, life: Uuid, is_draining: bool) -> NodeRecord {
        NodeRecord {
            life,
            lease_us: self.lease.as_micros() as u64,
            since_us: self.since_us,
            renewed_us: env.now().0,
            is_draining,
            workflows: self.workflows.clone(),
            residents: self.events().map_or(0, |events| events.residents()),
            refused: self.refused.load(Ordering::Relaxed),
            program: env!("CARGO_PKG_VERSION").into(),
        }
    }

    pub(super) fn events(&self) -> Option<Arc<dyn NodeEvents>> {
        self.events.get().and_then(Weak::upgrade)
    }

    pub(super) fn serve(&self, events: Weak<dyn NodeEvents>) {
        let _ = self.events.set(events);
    }

    pub(super) fn notice(&self, part: Part, notice: NodeNotice) -> Part {
        noticed(part, &self.spaces.board, self.life(), notice)
    }

    pub(super) fn moved(&self, commit: Commit, write: Write) -> Commit {
        moved(commit, write, &self.spaces.board, self.life())
    }

    /// A commit was refused because another node had taken the shard.
    pub(super) fn count_refused(&self) {
        self.refused.fetch_add(1, Ordering::Relaxed);
    }

    /// The owner and the epoch of the shard of a name, as last read.
    pub(super) fn epoch(&self, name: &[u8]) -> Option<Rev> {
        self.owners.lock().get(usize::from(shard_of(name))).and_then(|shard| shard.rev)
    }

    /// A live node that can run executions of a workflow that were started under this version. Prefers nodes that
    /// have few executions in memory.
    pub(super) fn able(&self, workflow: &str, version: u32) -> Option<Uuid> {
        let (own, members) = (self.life(), self.members.lock());
        let able = members.known.values().filter(|it| it.record.life != own && it.record.runs(workflow, version));
        able.min_by_key(|it| (it.record.is_draining, it.record.residents, it.record.life)).map(|it| it.record.life)
    }

    pub(super) fn has_others(&self) -> bool {
        let (own, members) = (self.life(), self.members.lock());
        members.known.values().any(|it| it.record.life != own)
    }

    /// True if the shard belongs to another live node, which does not have this workflow.
    #[cfg(feature = "postgres")]
    pub(super) fn owner_lacks(&self, shard: u16, workflow: &str) -> bool {
        let (own, members, owners) = (self.life(), self.members.lock(), self.owners.lock());
        let owner = owners.get(usize::from(shard)).and_then(|shard| shard.owner).filter(|life| *life != own);
        let member = owner.and_then(|life| members.known.get(&life));
        member.is_some_and(|member| !member.record.workflows.contains_key(workflow))
    }

    /// What another live node tells of a workflow: the node with the newest version.
    pub(super) fn known_elsewhere(&self, workflow: &str) -> Option<KnownWorkflow> {
        let (own, members) = (self.life(), self.members.lock());
        let others = members.known.values().filter(|it| it.record.life != own);
        others.filter_map(|it| it.record.workflows.get(workflow)).max_by_key(|known| known.newest).cloned()
    }

    pub(super) fn is_alive(&self, life: Uuid) -> bool {
        self.members.lock().known.contains_key(&life)
    }

    pub(super) fn lend(&self, id: &ExecutionId, life: Uuid) {
        self.lent.lock().insert(id.clone(), life);
    }

    /// An execution no longer runs on another node.
    pub(super) fn returned(&self, id: &ExecutionId) {
        self.lent.lock().remove(id);
    }

    /// Forgets the executions that this node has lent and no longer owns.
    pub(super) fn forget_lent(&self, keep: impl Fn(&ExecutionId) -> bool) {
        self.lent.lock().retain(|id, _| keep(id));
    }

    /// True if the record of the name's shard, as last read, names this node.
    pub(super) fn is_named(&self, name: &[u8]) -> bool {
        let owner = self.owners.lock().get(usize::from(shard_of(name))).and_then(|shard| shard.owner);
        owner == Some(self.life())
    }

    pub(super) fn is_lent(&self, id: &ExecutionId) -> bool {
        self.lent.lock().contains_key(id)
    }

    pub(super) fn lent_to(&self, life: Uuid) -> Vec<ExecutionId> {
        self.lent.lock().iter().filter(|(_, to)| **to == life).map(|(id, _)| id.clone()).collect()
    }

    pub(super) fn host(&self, id: &ExecutionId) {
        self.guests.lock().insert(id.clone());
    }

    pub(super) fn dismiss(&self, id: &ExecutionId) {
        self.guests.lock().remove(id);
    }

    pub(super) fn is_guest(&self, id: &ExecutionId) -> bool {
        self.guests.lock().contains(id)
    }
}

/// Makes a node take part in a store: its record is stored under its name. Waits for the lease of a dead node of the
/// same name. Also returns the watch that the node follows from now on.
pub(super) async fn join(
    store: &Store,
    options: NodeOptions,
    workflows: BTreeMap<String, KnownWorkflow>,
) -> Result<(Membership, Watch), NodeError> {
    let env = store.env();
    let lease = options.lease.unwrap_or(LEASE);
    if lease < SHORTEST {
        return Err(NodeError::Lease { lease, shortest: SHORTEST });
    }
    let life = env.uuid();
    let name = options.name.unwrap_or_else(|| format!("node-{:08x}", life.as_u128() as u32));
    if name.is_empty() || name.len() > 128 || name.chars().any(char::is_control) {
        return Err(NodeError::Name { name });
    }
    let spaces = NodeSpaces::declare(store).await?;
    let watch = store.watch(spaces.board.all(), store.generation().await?).await?;
    let own = OwnRecord { life, rev: Rev::default(), is_draining: false };
    let membership = Membership {
        spaces,
        name,
        lease,
        since_us: env.now().0,
        workflows,
        own: Mutex::new(own),
        members: Mutex::default(),
        owners: Mutex::default(),
        is_leaving: AtomicBool::new(false),
        reading: tokio::sync::Mutex::default(),
        changed: Notify::new(),
        events: OnceLock::new(),
        refused: AtomicU64::new(0),
        lent: Mutex::default(),
        guests: Mutex::default(),
    };
    membership.enter(store).await?;
    Ok((membership, watch))
}

impl Membership {
    /// Stores the node's record. If another record has the name, waits until the lease of that record is over.
    async fn enter(&self, store: &Store) -> Result<(), NodeError> {
        let (env, key) = (store.env(), self.spaces.node(&self.name));
        let mut seen: Option<(Rev, Duration)> = None;
        loop {
            let life = self.life();
            let record = self.record(env, life, false);
            let found = store.get(&key).await?;
            let check = match &found {
                None => Check::Absent(key.clone()),
                Some(item) => {
                    let now = env.monotonic();
                    let lease = NodeRecord::decode(&item.value).map_or(LEASE, |record| record.lease());
                    match seen {
                        Some((rev, _)) if rev != item.rev => {
                            return Err(NodeError::NameTaken { name: self.name.clone() });
                        }
                        Some((rev, since)) if now >= since + lease => Check::AtRev(key.clone(), rev),
                        seen_before => {
                            let since = seen_before.map_or(now, |(_, since)| since);
                            seen = Some((item.rev, since));
                            env.sleep((since + lease).saturating_sub(now).min(lease / 4)).await;
                            continue;
                        }
                    }
                }
            };
            let commit = Commit::new().urgent().check(check).put(&key, record.encode());
            if let Outcome::Applied(receipt) = store.commit(commit).await? {
                let rev = receipt.revs.first().copied().flatten().unwrap_or_default();
                *self.own.lock() = OwnRecord { life, rev, is_draining: false };
                self.see(&self.name, Some((rev, record)), env.monotonic());
                return Ok(());
            }
        }
    }

    /// A record of a node was seen.
    fn see(&self, name: &str, found: Option<(Rev, NodeRecord)>, now: Duration) {
        let (seen, gone) = self.members.lock().see(name, found, now);
        for life in gone {
            self.events().into_iter().for_each(|events| events.left(life));
        }
        if seen == MemberChange::Changed {
            self.events().into_iter().for_each(|events| events.joined());
            self.changed.notify_one();
        }
    }

    /// True if this node is drained, also if it has only seen that in its record so far.
    pub(super) fn is_draining(&self) -> bool {
        let OwnRecord { life, is_draining, .. } = *self.own.lock();
        is_draining || self.members.lock().known.get(&life).is_some_and(|member| member.record.is_draining)
    }

    /// The nodes, and the owner of each shard, as far as this node knows.
    pub(super) fn known(&self) -> (Vec<Candidate>, Vec<Option<Uuid>>) {
        let (members, owners) = (self.members.lock(), self.owners.lock());
        let owners = owners.iter().map(|shard| shard.owner.filter(|life| members.known.contains_key(life)));
        (members.candidates(), owners.collect())
    }

    /// When the next lease of another node may be over.
    pub(super) fn next_lease(&self) -> Option<Duration> {
        let own = self.life();
        let members = self.members.lock();
        members.known.keys().filter(|life| **life != own).filter_map(|life| members.leases.due(*life)).min()
    }

    /// The nodes whose leases are over as far as this node knows, with the revs of their records.
    pub(super) fn overdue(&self, now: Duration) -> Vec<(Uuid, String, Rev)> {
        let own = self.life();
        let mut members = self.members.lock();
        let known: Vec<(Uuid, String, Rev)> =
            members.known.values().map(|it| (it.record.life, it.name.clone(), it.rev)).collect();
        let others = known.into_iter().filter(|(life, ..)| *life != own);
        others
            .filter(|(life, _, rev)| matches!(members.leases.judge(*life, Some(*rev), now), LeaseVerdict::Over(_)))
            .collect()
    }
}

impl Node {
    pub(super) fn shared(&self) -> Option<&Membership> {
        self.membership.as_deref()
    }

    /// Reads who owns the shards, takes over what this node owns, and lets go of what it has lost.
    pub(super) async fn reread(&self) -> Result<(), NodeError> {
        let Some(membership) = self.shared() else { return Ok(()) };
        let reading = membership.reading.lock().await;
        let view = self.store.view().await?;
        let found = self.shards.read(&view).await?;
        drop(view);
        let changes = self.shards.update(&found, membership.life(), self.store.env().now());
        let has_moved = {
            let mut owners = membership.owners.lock();
            let has_moved = *owners != found;
            *owners = found;
            has_moved
        };
        drop(reading);
        let Some(events) = membership.events() else { return Ok(()) };
        if !changes.lost.is_empty() {
            tracing::info!(node = membership.name, shards = ?changes.lost, "shards now belong to another node");
            events.clone().lost();
        }
        if !changes.taken.is_empty() {
            tracing::info!(node = membership.name, shards = ?changes.taken, "took shards");
            self.tell_taken(&changes.taken);
            events.clone().taken(changes.taken).await;
        }
        if has_moved {
            events.moved();
            membership.changed.notify_one();
        }
        Ok(())
    }

    /// Follows the notices and the records of nodes, in the order of commits.
    pub(super) async fn follow(self: Arc<Node>, mut watch: Watch) {
        let Some(membership) = self.membership.clone() else { return };
        let env = self.store.env().clone();
        loop {
            match watch.next().await {
                Ok(committed) => {
                    for change in committed.changes {
                        self.see_change(&membership, change, committed.generation).await;
                    }
                }
                Err(error) if error.is_final() => return,
                Err(StoreError::HistoryDropped { .. }) => {
                    tracing::warn!(node = membership.name, "notices were missed: everything is looked at again");
                    match self.follow_anew(&membership).await {
                        Ok(new) => watch = new,
                        Err(error) => {
                            tracing::warn!(node = membership.name, %error, "the nodes could not be read");
                            env.sleep(AGAIN).await;
                        }
                    }
                }
                Err(error) => {
                    tracing::debug!(%error, "notices could not be read");
                    env.sleep(AGAIN).await;
                }
            }
        }
    }

    /// Reads everything again, for a node that has missed notices.
    async fn follow_anew(&self, membership: &Membership) -> Result<Watch, NodeError> {
        let board = &membership.spaces.board;
        let watch = self.store.watch(board.all(), self.store.generation().await?).await?;
        self.read_members(membership).await?;
        self.reread().await?;
        membership.events().into_iter().for_each(|events| events.behind());
        Ok(watch)
    }

    /// Reads the records of all nodes.
    pub(super) async fn read_members(&self, membership: &Membership) -> Result<(), NodeError> {
        let view = self.store.view().await?;
        let board = NodeBoard::read(&view, &membership.spaces, &self.shards).await?;
        drop(view);
        let now = self.store.env().monotonic();
        let gone: Vec<String> = {
            let members = membership.members.lock();
            let is_gone = |it: &&Member| !board.members.contains_key(&it.record.life);
            members.known.values().filter(is_gone).map(|it| it.name.clone()).collect()
        };
        gone.iter().for_each(|name| membership.see(name, None, now));
        for member in board.members.into_values() {
            membership.see(&member.name, Some((member.rev, member.record)), now);
        }
        Ok(())
    }

    async fn see_change(&self, membership: &Membership, change: Change, at: Generation) {
        let Change { key, rev, value } = change;
        match key.bytes().first() {
            Some(&NODES) => {
                let Some(name) = read_name(&key) else { return };
                let found = value.and_then(|value| read_member(&key, rev, &value));
                membership.see(name, found.map(|it| (it.rev, it.record)), self.store.env().monotonic());
            }
            Some(&NOTICES) => {
                let Some(value) = value else { return };
                let Some(events) = membership.events() else { return };
                let Ok(StoredNotices(notices)) = StoredNotices::decode(&value) else {
                    // A newer program has something new to tell. What it means is in the store.
                    return events.behind();
                };
                for notice in notices {
                    if notice == NodeNotice::Shards {
                        self.at_last("who owns the shards could not be read", NodeError::kind, || self.reread()).await;
                    } else {
                        events.clone().heard(notice, at);
                    }
                }
            }
            _ => {}
        }
    }

    /// Renews the lease of this node, until it stops.
    pub(super) async fn renew(self: Arc<Node>) {
        let Some(membership) = self.membership.clone() else { return };
        let env = self.store.env().clone();
        loop {
            env.sleep(membership.lease / 3).await;
            while let Err(error) = self.renew_once(&membership).await {
                if self.is_stopped() || matches!(&error, NodeError::Store(error) if error.is_final()) {
                    return;
                }
                tracing::warn!(node = membership.name, %error, "the lease of the node could not be renewed yet");
                env.sleep(AGAIN.min(membership.lease / 10)).await;
            }
        }
    }

    async fn renew_once(&self, membership: &Membership) -> Result<(), NodeError> {
        let (env, key) = (self.store.env(), membership.spaces.node(&membership.name));
        let own = *membership.own.lock();
        let record = membership.record(env, own.life, own.is_draining);
        let commit = Commit::new().urgent().check(Check::AtRev(key.clone(), own.rev)).put(&key, record.encode());
        if let Outcome::Applied(receipt) = self.store.commit(commit).await? {
            membership.own.lock().rev = receipt.revs.first().copied().flatten().unwrap_or_default();
            return Ok(());
        }
        let found = self.store.get(&key).await?;
        let found = found.and_then(|item| Some((item.rev, NodeRecord::decode(&item.value).ok()?)));
        match found.filter(|(_, record)| record.life == own.life) {
            // An operator has changed the record, or the answer to an earlier renewal was lost.
            Some((rev, record)) => {
                *membership.own.lock() = OwnRecord { rev, is_draining: record.is_draining, ..own };
                membership.changed.notify_one();
                Ok(())
            }
            None => self.join_again(membership).await,
        }
    }

    /// The other nodes have taken this one for dead. It drops what it holds and joins under a new life.
    async fn join_again(&self, membership: &Membership) -> Result<(), NodeError> {
        if membership.is_leaving.load(Ordering::SeqCst) {
            return Ok(());
        }
        tracing::warn!(node = membership.name, "the lease of the node was over; it joins again");
        membership.own.lock().life = self.store.env().uuid();
        self.reread().await?;
        membership.enter(&self.store).await?;
        membership.changed.notify_one();
        Ok(())
    }
}
