//! The moves of shards: from dead nodes, from nodes that have more than their share, and from a node that leaves. Each
//! move is written under a check of the record's rev, so two nodes that act at once do not both succeed.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::member::{Member, MoveReason, NODES, NodeSpaces, StoredMove, StoredMoves, read_member};
use super::membership::Membership;
use super::notice::{NodeNotice, noticed};
use super::plan::{Candidate, plan};
use super::shard::{FoundShard, Shards};
use super::{AGAIN, Node, NodeError, woken_or_after};
use crate::lane::Part;
use crate::record::Record;
use crate::store::{Check, Commit, Key, Order, Rev, Uuid, View};

/// How many shards a node gives away at once, and the pause before the next ones.
const STEP: usize = 8;
const BETWEEN_STEPS: Duration = Duration::from_millis(100);

/// How long to wait until executions have left memory before their shard is given away.
const PATIENCE: Duration = Duration::from_millis(500);
const LOOK: Duration = Duration::from_millis(2);

/// How often shards are given away at the end of a node while other nodes change the records, too.
const TRIES: u32 = 100;

/// All records of nodes and shards in one view.
pub(super) struct NodeBoard {
    pub(super) members: BTreeMap<Uuid, Member>,
    shards: Vec<FoundShard>,
}

impl NodeBoard {
    pub(super) async fn read(view: &View, spaces: &NodeSpaces, shards: &Shards) -> Result<NodeBoard, NodeError> {
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

impl Node {
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
        let (_, owners) = membership.known();
        if !owners.is_empty() && owners.iter().all(Option::is_some) {
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
        let (nodes, owners) = membership.known();
        if surplus(&nodes, &owners).is_empty() {
            return Ok(false);
        }
        let view = self.store.view().await?;
        let board = NodeBoard::read(&view, &membership.spaces, &self.shards).await?;
        drop(view);
        let all = surplus(&board.candidates(), &board.owners());
        let some: Vec<(u16, Uuid)> = all.iter().take(STEP).copied().collect();
        let shards: Vec<u16> = some.iter().map(|(shard, _)| *shard).collect();
        let why = if membership.is_draining() { MoveReason::Left } else { MoveReason::Balanced };
        let mut moving = ShardMoves::new(&self.shards, &board);
        for (shard, to) in some {
            moving.give(shard, Some(membership.name.clone()), Some(to), why);
        }
        self.clear(membership, &shards).await;
        let moved = self.send_moves(membership, moving).await;
        self.shards.end_leaving();
        self.at_last("who owns the shards could not be read", NodeError::kind, || self.reread()).await;
        moved.map(|()| all.len() > STEP)
    }

    /// Stops everything that this node does for shards, because they are about to belong to another one.
    async fn clear(&self, membership: &Membership, shards: &[u16]) {
        let (env, Some(events)) = (self.store.env(), membership.events()) else { return };
        events.clone().clear_marks(shards).await;
        self.shards.begin_leaving(shards);
        events.clone().evict();
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

    /// Leaves in a task of its own, as far as the process lives long enough.
    pub(crate) fn abandon(self: &Arc<Node>) {
        if self.is_shared() {
            let node = self.clone();
            self.runtime.spawn(async move {
                if let Err(error) = node.leave().await {
                    tracing::debug!(%error, "the node could not give its work to the others; its lease ends later");
                }
            });
        }
    }

    /// Gives everything away and leaves: the end of a node that other nodes need not wait for.
    pub(crate) async fn leave(&self) -> Result<(), NodeError> {
        let Some(membership) = self.shared() else { return Ok(()) };
        membership.is_leaving.store(true, Ordering::SeqCst);
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
