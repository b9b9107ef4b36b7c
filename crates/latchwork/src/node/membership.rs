//! One node among others on a store that they share: it renews its lease, follows the notices, takes over from nodes
//! that have died, and gives shards to nodes that have less than their share. Who owns what is decided by the records
//! alone, each written under a check of its rev, so two nodes that act at once do not both succeed.
//!
//! Nothing here knows an execution; [`NodeEvents`] is all that this file sees of what is above.

use std::collections::{BTreeMap, BTreeSet};
use std::future::Future;
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::lease::LeaseVerdict;
use super::member::{
    LEASE, Member, Members, MoveReason, NODES, NodeOptions, NodeRecord, SHORTEST, MemberChange, NodeSpaces, StoredMove,
    StoredMoves, read_member, read_name,
};
use super::notice::{NOTICES, NodeNotice, StoredNotices, noticed};
use super::plan::{Candidate, plan};
use super::shard::{FoundShard, Shards};
use super::{AGAIN, ExecutionId, Node, NodeError, shard_of, woken_or_after};
use crate::lane::Part;
use crate::record::Record;
use crate::store::{Change, Check, Commit, Env, Key, Order, Outcome, Rev, Store, StoreError, Uuid, View, Watch};

/// How many shards a node gives away at once, and the pause before the next ones.
const STEP: usize = 8;
const BETWEEN_STEPS: Duration = Duration::from_millis(100);

/// How long to wait until executions have left memory before their shard is given away.
const PATIENCE: Duration = Duration::from_millis(500);
const LOOK: Duration = Duration::from_millis(2);

/// How often shards are given away at the end of a node while other nodes change the records, too.
const TRIES: u32 = 100;

/// What the layers above do when something happens to the node.
pub(crate) trait NodeEvents: Send + Sync {
    /// A notice of any node. The receiver decides whether it concerns this node.
    fn heard(self: Arc<Self>, notice: NodeNotice);

    /// This node owns more shards.
    fn taken(self: Arc<Self>, shards: Vec<u16>) -> Doing<'static>;

    /// This node owns fewer shards: everything in memory that belongs to no owned shard leaves it.
    fn lost(self: Arc<Self>);

    /// True if an execution of one of these shards is still in memory.
    fn has_any_in(&self, shards: &[u16]) -> bool;

    /// Executions that are in memory, were loaded after a crash and have made no progress since, lose the mark of it:
    /// they leave memory because the node gives them away.
    fn clear_marks<'a>(self: Arc<Self>, shards: &'a [u16]) -> Doing<'a>;

    /// Shards, of this node or others, have other owners.
    fn moved(self: Arc<Self>);

    /// A node is new, or serves differently.
    fn joined(self: Arc<Self>);

    /// A node is gone.
    fn left(self: Arc<Self>, life: Uuid);

    /// StoredNotices were missed.
    fn behind(self: Arc<Self>);

    /// How many executions are in memory.
    fn residents(&self) -> u64;
}

pub(crate) type Doing<'a> = Pin<Box<dyn Future<Output = ()> + Send + 'a>>;

/// What a node knows of itself and of the others.
pub(crate) struct Membership {
    pub(super) spaces: NodeSpaces,
    pub(super) name: String,
    lease: Duration,
    since_us: u64,
    /// The workflows that it can run, with their versions.
    workflows: BTreeMap<String, Vec<u32>>,
    own: Mutex<OwnRecord>,
    members: Mutex<Members>,
    /// The owners of all shards, as last read.
    owners: Mutex<Vec<FoundShard>>,
    /// Held while the records of shards are read, so that an older reading never replaces a newer one.
    reading: tokio::sync::Mutex<()>,
    /// Notified when shards may have to move.
    changed: Notify,
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

/// All records of nodes and shards in one view.
struct NodeBoard {
    members: BTreeMap<Uuid, Member>,
    shards: Vec<FoundShard>,
}

impl NodeBoard {
    async fn read(view: &View, spaces: &NodeSpaces, shards: &Shards) -> Result<NodeBoard, NodeError> {
        let found = view.scan(&spaces.board.prefix([NODES]), Order::Ascending, usize::MAX).await?;
        let members = found.iter().filter_map(|(key, item)| read_member(key, item.rev, &item.value));
        let members = members.map(|member| (member.record.life, member)).collect();
        Ok(NodeBoard { members, shards: shards.read(view).await? })
    }

    fn candidates(&self) -> Vec<Candidate> {
        let of = |member: &Member| Candidate { life: member.record.life, serves: member.record.serves() };
        self.members.values().map(of).collect()
    }

    /// The owners among the nodes that are alive.
    fn owners(&self) -> Vec<Option<Uuid>> {
        self.shards.iter().map(|shard| shard.owner.filter(|life| self.members.contains_key(life))).collect()
    }

    fn name(&self, life: Uuid) -> Option<String> {
        self.members.get(&life).map(|member| member.name.clone())
    }
}

/// Moves of shards, until they are a commit.
struct ShardMoves<'a> {
    shards: &'a Shards,
    board: &'a NodeBoard,
    commit: Commit,
    log: Vec<StoredMove>,
}

impl<'a> ShardMoves<'a> {
    fn new(shards: &'a Shards, board: &'a NodeBoard) -> ShardMoves<'a> {
        ShardMoves { shards, board, commit: Commit::new().urgent(), log: Vec::new() }
    }

    /// Gives a shard to a node, if nothing of it has changed since it was read.
    fn give(&mut self, shard: u16, from: Option<String>, to: Option<Uuid>, why: MoveReason) {
        let found = self.board.shards[usize::from(shard)];
        self.commit = self.shards.give(std::mem::take(&mut self.commit), shard, found, to);
        let to = to.and_then(|life| self.board.name(life));
        match self.log.iter_mut().find(|it| (&it.from, &it.to, it.why) == (&from, &to, why)) {
            Some(known) => known.shards.push(shard),
            None => self.log.push(StoredMove { from, to, shards: vec![shard], why }),
        }
    }
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
    workflows: BTreeMap<String, Vec<u32>>,
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
            let found = store.view().await?.get(&key).await?;
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

    /// When the next lease of another node may be over.
    fn next_lease(&self) -> Option<Duration> {
        let own = self.life();
        let members = self.members.lock();
        members.known.keys().filter(|life| **life != own).filter_map(|life| members.leases.due(*life)).min()
    }

    /// The nodes whose leases are over as far as this node knows, with the revs of their records.
    fn overdue(&self, now: Duration) -> Vec<(Uuid, String, Rev)> {
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
    fn shared(&self) -> Option<&Membership> {
        self.membership.as_deref()
    }

    /// Reads who owns the shards, and takes over what this node owns. Returns true if the node has lost shards.
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
                        self.see_change(&membership, change).await;
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

    async fn see_change(&self, membership: &Membership, change: Change) {
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
                        events.clone().heard(notice);
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
        let found = self.store.view().await?.get(&key).await?;
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
        tracing::warn!(node = membership.name, "the lease of the node was over; it joins again");
        membership.own.lock().life = self.store.env().uuid();
        self.reread().await?;
        membership.enter(&self.store).await?;
        membership.changed.notify_one();
        Ok(())
    }

    /// Takes over from dead nodes and balances the shards, until the node stops.
    pub(super) async fn balance(self: Arc<Node>) {
        let Some(membership) = self.membership.clone() else { return };
        let env = self.store.env().clone();
        loop {
            let pause = match self.balance_once(&membership).await {
                Ok(true) => Some(BETWEEN_STEPS),
                Ok(false) => membership.next_lease().map(|due| due.saturating_sub(env.monotonic())),
                Err(NodeError::Store(error)) if error.is_final() => return,
                Err(error) => {
                    tracing::warn!(node = membership.name, %error, "shards could not be moved yet");
                    Some(AGAIN)
                }
            };
            woken_or_after(&membership.changed, &env, pause).await;
        }
    }

    /// Makes the next step. Returns true if there is more to do soon.
    async fn balance_once(&self, membership: &Membership) -> Result<bool, NodeError> {
        let now = self.store.env().monotonic();
        for (life, name, rev) in membership.overdue(now) {
            self.bury(membership, life, &name, rev).await?;
        }
        self.adopt(membership).await?;
        self.give_surplus(membership).await
    }

    /// Removes the record of a dead node, and gives its shards to the others, in one commit.
    async fn bury(&self, membership: &Membership, life: Uuid, name: &str, rev: Rev) -> Result<(), NodeError> {
        let view = self.store.view().await?;
        let key = membership.spaces.node(name);
        let found = view.get(&key).await?.map(|item| item.rev);
        if found != Some(rev) {
            // It was renewed, or another node was faster. The watch tells.
            drop(view);
            return self.read_members(membership).await;
        }
        let mut board = NodeBoard::read(&view, &membership.spaces, &self.shards).await?;
        let notices: Vec<Key> = view
            .scan(&membership.spaces.notices(life), Order::Ascending, usize::MAX)
            .await?
            .into_iter()
            .map(|(key, _)| key)
            .collect();
        drop(view);
        board.members.remove(&life);
        tracing::warn!(by = membership.name, node = name, "a node has not renewed its lease: its work is taken over");
        let mut moving = ShardMoves::new(&self.shards, &board);
        moving.commit = notices.iter().take(1000).fold(std::mem::take(&mut moving.commit), Commit::delete);
        moving.commit = std::mem::take(&mut moving.commit).check(Check::AtRev(key.clone(), rev)).delete(&key);
        if let Some(planned) = plan(&board.candidates(), &board.owners()) {
            for (shard, (to, found)) in (0..).zip(planned.iter().zip(&board.shards)) {
                if found.owner == Some(life) {
                    moving.give(shard, Some(name.into()), Some(*to), MoveReason::Dead);
                }
            }
        }
        self.send_moves(membership, moving).await?;
        self.read_members(membership).await
    }

    /// Gives shards without a live owner to the nodes that should own them.
    pub(super) async fn adopt(&self, membership: &Membership) -> Result<(), NodeError> {
        let has_all = {
            let (members, owners) = (membership.members.lock(), membership.owners.lock());
            let is_owned = |it: &FoundShard| it.owner.is_some_and(|life| members.known.contains_key(&life));
            !owners.is_empty() && owners.iter().all(is_owned)
        };
        if has_all {
            return Ok(());
        }
        let view = self.store.view().await?;
        let board = NodeBoard::read(&view, &membership.spaces, &self.shards).await?;
        drop(view);
        let (owners, mut moving) = (board.owners(), ShardMoves::new(&self.shards, &board));
        let Some(planned) = plan(&board.candidates(), &owners) else { return Ok(()) };
        for (shard, (to, owner)) in (0..).zip(planned.iter().zip(&owners)) {
            if owner.is_none() {
                moving.give(shard, None, Some(*to), MoveReason::Free);
            }
        }
        self.send_moves(membership, moving).await
    }

    /// Gives some of the shards away of which this node has too many. Returns true if there are more.
    async fn give_surplus(&self, membership: &Membership) -> Result<bool, NodeError> {
        let life = membership.life();
        let surplus = |candidates: &[Candidate], owners: &[Option<Uuid>]| -> Vec<(u16, Uuid)> {
            let planned = plan(candidates, owners).unwrap_or_default();
            let moves = (0..).zip(planned).zip(owners);
            moves.filter(|((_, to), from)| **from == Some(life) && *to != life).map(|(it, _)| it).collect()
        };
        let known = {
            let (members, owners) = (membership.members.lock(), membership.owners.lock());
            let owners: Vec<Option<Uuid>> = owners.iter().map(|it| it.owner).collect();
            (members.candidates(), owners)
        };
        if surplus(&known.0, &known.1).is_empty() {
            return Ok(false);
        }
        let view = self.store.view().await?;
        let board = NodeBoard::read(&view, &membership.spaces, &self.shards).await?;
        drop(view);
        let all = surplus(&board.candidates(), &board.owners());
        let some: Vec<(u16, Uuid)> = all.iter().take(STEP).copied().collect();
        let shards: Vec<u16> = some.iter().map(|(shard, _)| *shard).collect();
        let is_draining = membership.own.lock().is_draining;
        let why = if is_draining { MoveReason::Left } else { MoveReason::Balanced };
        let mut moving = ShardMoves::new(&self.shards, &board);
        for (shard, to) in some {
            moving.give(shard, Some(membership.name.clone()), Some(to), why);
        }
        self.clear(membership, &shards).await;
        let moved = self.send_moves(membership, moving).await;
        self.shards.end_leaving();
        if moved.is_err() {
            self.reread().await?;
        }
        moved.map(|()| all.len() > STEP)
    }

    /// Stops everything that this node does for shards, because they are about to belong to another one.
    async fn clear(&self, membership: &Membership, shards: &[u16]) {
        let (env, Some(events)) = (self.store.env(), membership.events()) else { return };
        events.clone().clear_marks(shards).await;
        self.shards.begin_leaving(shards);
        events.clone().lost();
        let until = env.monotonic() + PATIENCE;
        while events.has_any_in(shards) && env.monotonic() < until {
            env.sleep(LOOK).await;
        }
    }

    /// Sends moves, with a line for the log and a notice. If another commit was faster, nothing moves.
    async fn send_moves(&self, membership: &Membership, moving: ShardMoves<'_>) -> Result<(), NodeError> {
        let ShardMoves { mut commit, log, .. } = moving;
        if !log.is_empty() {
            commit = commit.put(&membership.spaces.log(), StoredMoves(log).encode());
        }
        let commit = membership.notice(Part::default(), NodeNotice::Shards).place(commit).0;
        if !self.store.commit(commit).await?.is_applied() {
            tracing::debug!(node = membership.name, "another node has moved the shards meanwhile");
        }
        self.reread().await
    }

    /// Gives everything away and leaves: the end of a node that other nodes need not wait for.
    pub(crate) async fn leave(&self) -> Result<(), NodeError> {
        let Some(membership) = self.shared() else { return Ok(()) };
        self.clear(membership, &self.owned()).await;
        let key = membership.spaces.node(&membership.name);
        for _ in 0..TRIES {
            let life = membership.life();
            let view = self.store.view().await?;
            let Some(item) = view.get(&key).await? else { return Ok(()) };
            let mut board = NodeBoard::read(&view, &membership.spaces, &self.shards).await?;
            let notices = view.scan(&membership.spaces.notices(life), Order::Ascending, 1000).await?;
            drop(view);
            if !board.members.contains_key(&life) {
                return Ok(());
            }
            board.members.remove(&life);
            let mut moving = ShardMoves::new(&self.shards, &board);
            let deleted = |commit: Commit, (key, _): &(Key, _)| commit.delete(key);
            moving.commit = notices.iter().fold(std::mem::take(&mut moving.commit), deleted);
            moving.commit = std::mem::take(&mut moving.commit).check(Check::AtRev(key.clone(), item.rev)).delete(&key);
            let planned = plan(&board.candidates(), &board.owners());
            for (shard, found) in (0..).zip(&board.shards) {
                if found.owner == Some(life) {
                    let to = planned.as_ref().map(|planned| planned[usize::from(shard)]);
                    moving.give(shard, Some(membership.name.clone()), to, MoveReason::Left);
                }
            }
            let ShardMoves { mut commit, log, .. } = moving;
            if !log.is_empty() {
                commit = commit.put(&membership.spaces.log(), StoredMoves(log).encode());
            }
            // Not among its own notices: they are deleted.
            let told = noticed(Part::default(), &membership.spaces.board, Uuid::nil(), NodeNotice::Shards);
            if self.store.commit(told.place(commit).0).await?.is_applied() {
                return Ok(());
            }
        }
        Err(NodeError::Stopped)
    }
}
