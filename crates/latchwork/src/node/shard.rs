//! Shards: each is owned by one node at a time. Executions are spread over them. Every commit that a node makes for an
//! execution checks that the node still owns the shard, so a node that was replaced changes nothing more.
//!
//! A node alone owns all shards from its start on, until another one replaces it. Nodes that share a store own what the
//! records say: `membership.rs` reads them, and `balance.rs` writes them.

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::NodeError;
use crate::record::{Record, stored};
use crate::store::{
    Check, Commit, Generation, Item, Key, Order, Result, Rev, Space, SpaceSpec, Store, Timestamp, Uuid, View,
};

/// The number of shards.
pub(crate) const COUNT: u16 = 64;

/// The stored record of a shard: its owner.
#[derive(Serialize, Deserialize)]
struct Shard {
    /// A new id for each node, and for each of its lives. Empty if the shard has no owner.
    owner: String,
}

stored!(Shard);

/// number → owner
const SHARDS: &str = "node.shards";

/// The shards of a node. An idle node never owns any.
pub(super) struct Shards {
    space: Option<Space>,
    /// True if other nodes own shards at the same time.
    is_shared: bool,
    owned: Mutex<Vec<ShardOwnership>>,
}

/// A shard's record as it was read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct FoundShard {
    /// `None` if there is no record yet.
    pub(super) rev: Option<Rev>,
    pub(super) owner: Option<Uuid>,
}

/// What has changed for a node when the records of shards were read.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct ShardChanges {
    pub(super) taken: Vec<u16>,
    pub(super) lost: Vec<u16>,
}

/// What a node knows of its ownership of a shard.
#[derive(Clone)]
enum ShardOwnership {
    Never,
    /// The rev of the shard's record is its epoch: the next owner moves it. With the time of taking it.
    At(Key, Rev, Timestamp),
    /// Another node was found to own it.
    Lost,
    /// The node owns it and is about to give it to another one.
    Leaving(Rev),
}

impl Shards {
    /// Owns no shard.
    pub(super) fn none() -> Shards {
        Shards { space: None, is_shared: false, owned: Mutex::new(vec![ShardOwnership::Never; usize::from(COUNT)]) }
    }

    /// Becomes the owner of all shards. From now on every commit of the owner before is refused.
    pub(super) async fn all(store: &Store) -> Result<Shards, NodeError> {
        let space = store.space(SpaceSpec::new(SHARDS)).await?;
        let keys: Vec<Key> = (0..u64::from(COUNT)).map(|shard| space.key(shard.to_be_bytes())).collect();
        for (key, item) in store.view().await?.scan(&space.all(), Order::Ascending, usize::MAX).await? {
            // A shard of a newer program is not taken over: to that program, ownership may mean something else.
            if let Some(why) = Shard::decode(&item.value).err().filter(|why| why.is_version()) {
                return Err(NodeError::Record(why.at(format!("shard {key}"))));
            }
        }
        let owner = Shard { owner: store.env().uuid().to_string() }.encode();
        let commit = keys.iter().fold(Commit::new(), |commit, key| commit.put(key, owner.clone()));
        let revs = store.commit(commit).await?.applied().map(|receipt| receipt.revs).unwrap_or_default();
        let now = store.env().now();
        let owned = keys
            .into_iter()
            .zip(revs)
            .map(|(key, rev)| rev.map_or(ShardOwnership::Lost, |rev| ShardOwnership::At(key, rev, now)));
        Ok(Shards { space: Some(space), is_shared: false, owned: Mutex::new(owned.collect()) })
    }

    /// Shares the shards with other nodes. Owns none yet.
    pub(super) async fn shared(store: &Store) -> Result<Shards, NodeError> {
        let space = store.space(SpaceSpec::new(SHARDS)).await?;
        let owned = Mutex::new(vec![ShardOwnership::Never; usize::from(COUNT)]);
        Ok(Shards { space: Some(space), is_shared: true, owned })
    }

    fn key(space: &Space, shard: u16) -> Key {
        space.key(u64::from(shard).to_be_bytes())
    }

    /// Reads the records of all shards.
    pub(super) async fn read(&self, view: &View) -> Result<Vec<FoundShard>, NodeError> {
        match &self.space {
            Some(space) => read_shards(view, space).await,
            None => Ok(vec![FoundShard::default(); usize::from(COUNT)]),
        }
    }

    /// Adds to a commit that a shard gets another owner, if its record is still as it was read.
    pub(super) fn give(&self, commit: Commit, shard: u16, found: FoundShard, to: Option<Uuid>) -> Commit {
        let Some(space) = &self.space else { return commit };
        let key = Shards::key(space, shard);
        let owner = Shard { owner: to.map_or(String::new(), |life| life.to_string()) };
        let check = match found.rev {
            Some(rev) => Check::AtRev(key.clone(), rev),
            None => Check::Absent(key.clone()),
        };
        commit.check(check).put(&key, owner.encode())
    }

    /// Takes over what the records say. `life` is the present life of this node.
    pub(super) fn update(&self, found: &[FoundShard], life: Uuid, now: Timestamp) -> ShardChanges {
        let Some(space) = &self.space else { return ShardChanges::default() };
        let mut changes = ShardChanges::default();
        for ((shard, known), found) in (0..).zip(self.owned.lock().iter_mut()).zip(found) {
            let own = found.rev.filter(|_| found.owner == Some(life));
            match (&*known, own) {
                (ShardOwnership::At(_, rev, _) | ShardOwnership::Leaving(rev), Some(own)) if *rev == own => continue,
                (ShardOwnership::Never | ShardOwnership::Lost, None) => continue,
                (ShardOwnership::At(..) | ShardOwnership::Leaving(_), _) => changes.lost.push(shard),
                _ => {}
            }
            *known = match own {
                Some(rev) => {
                    changes.taken.push(shard);
                    ShardOwnership::At(Shards::key(space, shard), rev, now)
                }
                None => ShardOwnership::Never,
            };
        }
        changes
    }

    /// Is about to give shards to other nodes: from now on this node does nothing more for them as their owner.
    pub(super) fn begin_leaving(&self, shards: &[u16]) {
        let mut owned = self.owned.lock();
        for shard in shards {
            let known = &mut owned[usize::from(*shard)];
            if let ShardOwnership::At(_, rev, _) = known {
                *known = ShardOwnership::Leaving(*rev);
            }
        }
    }

    /// The shards are not given away after all. The next update takes them again if they still belong to this node.
    pub(super) fn end_leaving(&self) {
        for known in self.owned.lock().iter_mut().filter(|known| matches!(known, ShardOwnership::Leaving(_))) {
            *known = ShardOwnership::Never;
        }
    }

    /// When this node took a shard that it owns.
    pub(super) fn since(&self, shard: u16) -> Option<Timestamp> {
        match &self.owned.lock()[usize::from(shard)] {
            ShardOwnership::At(_, _, since) => Some(*since),
            _ => None,
        }
    }

    /// Returns the check that this node owns the name. If the node has lost the name, the check always fails. If it
    /// never owned the name, there is no check.
    pub(super) fn check(&self, name: &[u8]) -> Option<Check> {
        match &self.owned.lock()[usize::from(shard_of(name))] {
            ShardOwnership::Never | ShardOwnership::Leaving(_) => None,
            ShardOwnership::At(key, rev, _) => Some(Check::AtRev(key.clone(), *rev)),
            ShardOwnership::Lost => Some(NEVER),
        }
    }

    /// Another node was found to own the shard of the name. Returns true if it was known as this node's.
    pub(super) fn lose(&self, name: &[u8]) -> bool {
        let mut owned = self.owned.lock();
        let shard = &mut owned[usize::from(shard_of(name))];
        let was_owned = matches!(shard, ShardOwnership::At(..));
        if was_owned {
            *shard = if self.is_shared { ShardOwnership::Never } else { ShardOwnership::Lost };
        }
        was_owned
    }

    /// True if this node owns the name, as far as it knows.
    pub(super) fn owns(&self, name: &[u8]) -> bool {
        matches!(self.owned.lock()[usize::from(shard_of(name))], ShardOwnership::At(..))
    }

    /// True if this node owns shards, or has owned some.
    pub(super) fn is_owner(&self) -> bool {
        self.space.is_some()
    }

    /// The shards that this node owns, as far as it knows.
    pub(super) fn owned(&self) -> Vec<u16> {
        let owned = self.owned.lock();
        (0..COUNT)
            .zip(&*owned)
            .filter(|(_, owned)| matches!(owned, ShardOwnership::At(..)))
            .map(|(shard, _)| shard)
            .collect()
    }

    /// Looks which shards this node still owns. Returns true if there are any.
    pub(super) async fn look(&self, store: &Store) -> Result<bool> {
        let Some(space) = &self.space else { return Ok(false) };
        let found = store.view().await?.scan(&space.all(), Order::Ascending, usize::MAX).await?;
        let mut owns_any = false;
        for shard in self.owned.lock().iter_mut() {
            let ShardOwnership::At(key, rev, _) = &*shard else { continue };
            if found.iter().any(|(at, item)| at == key && item.rev == *rev) {
                owns_any = true;
            } else {
                *shard = ShardOwnership::Lost;
            }
        }
        Ok(owns_any)
    }
}

/// Reads the records of all shards. A shard of a newer program is not taken over: to that program, ownership may mean
/// something else.
async fn read_shards(view: &View, space: &Space) -> Result<Vec<FoundShard>, NodeError> {
    let mut shards = vec![FoundShard::default(); usize::from(COUNT)];
    for (key, Item { rev, value, .. }) in view.scan(&space.all(), Order::Ascending, usize::MAX).await? {
        let number = key.bytes().try_into().map(u64::from_be_bytes).ok();
        let Some(found) = number.and_then(|number| shards.get_mut(number as usize)) else { continue };
        let owner = match Shard::decode(&value) {
            Ok(shard) => shard.owner.parse().ok(),
            Err(why) if why.is_version() => return Err(NodeError::Record(why.at(format!("shard {key}")))),
            // A damaged record names no owner. The next owner writes it anew.
            Err(_) => None,
        };
        *found = FoundShard { rev: Some(rev), owner };
    }
    Ok(shards)
}

/// Reads the owners of all shards of a store. `None` if no engine has ever used the store.
pub(super) async fn read_owners(store: &Store) -> Result<Option<Vec<FoundShard>>, NodeError> {
    let space = store.spaces().await?.into_iter().find(|space| space.name() == SHARDS);
    match space {
        Some(space) => read_shards(&store.view().await?, &space).await.map(Some),
        None => Ok(None),
    }
}

/// A check that always fails.
pub(super) const NEVER: Check = Check::AtGeneration(Generation(u64::MAX));

/// The shard of a name.
pub(crate) fn shard_of(name: &[u8]) -> u16 {
    (xxhash_rust::xxh3::xxh3_64(name) % u64::from(COUNT)) as u16
}

/// The prefix of the keys that the owner of a shard scans.
pub(crate) fn shard_key(shard: u16) -> [u8; 2] {
    shard.to_be_bytes()
}
