//! Shards: each is owned by one node at a time. Executions are spread over them. Every commit that a node makes for an
//! execution checks that the node still owns the shard, so a node that was replaced changes nothing more.

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::NodeError;
use crate::record::{Record, stored};
use crate::store::{Check, Commit, Generation, Key, Order, Result, Rev, Space, SpaceSpec, Store};

/// The number of shards.
pub(crate) const COUNT: u16 = 64;

/// The stored record of a shard: its owner.
#[derive(Serialize, Deserialize)]
struct Shard {
    /// A new id for each node.
    owner: String,
}

stored!(Shard);

/// number → owner
const SHARDS: &str = "node.shards";

/// The shards of a node. An idle node never owns any.
pub(super) struct Shards {
    space: Option<Space>,
    owned: Mutex<Vec<ShardOwnership>>,
}

/// What a node knows of its ownership of a shard.
#[derive(Clone)]
enum ShardOwnership {
    Never,
    /// The rev of the shard's record is its epoch: the next owner moves it.
    At(Key, Rev),
    /// Another node was found to own it.
    Lost,
}

impl Shards {
    /// Owns no shard.
    pub(super) fn none() -> Shards {
        Shards { space: None, owned: Mutex::new(vec![ShardOwnership::Never; usize::from(COUNT)]) }
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
        let owned = keys
            .into_iter()
            .zip(revs)
            .map(|(key, rev)| rev.map_or(ShardOwnership::Lost, |rev| ShardOwnership::At(key, rev)));
        Ok(Shards { space: Some(space), owned: Mutex::new(owned.collect()) })
    }

    /// Returns the check that this node owns the name. If the node has lost the name, the check always fails. If it
    /// never owned the name, there is no check.
    pub(super) fn check(&self, name: &[u8]) -> Option<Check> {
        match &self.owned.lock()[usize::from(shard_of(name))] {
            ShardOwnership::Never => None,
            ShardOwnership::At(key, rev) => Some(Check::AtRev(key.clone(), *rev)),
            ShardOwnership::Lost => Some(NEVER),
        }
    }

    /// Another node was found to own the shard of the name. Returns true if it was known as this node's.
    pub(super) fn lose(&self, name: &[u8]) -> bool {
        let mut owned = self.owned.lock();
        let shard = &mut owned[usize::from(shard_of(name))];
        let was_owned = matches!(shard, ShardOwnership::At(..));
        if was_owned {
            *shard = ShardOwnership::Lost;
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
            let ShardOwnership::At(key, rev) = &*shard else { continue };
            if found.iter().any(|(at, item)| at == key && item.rev == *rev) {
                owns_any = true;
            } else {
                *shard = ShardOwnership::Lost;
            }
        }
        Ok(owns_any)
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
