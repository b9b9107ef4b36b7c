//! Shards: what is owned by a node. Executions are spread over them; every commit that a node makes for an execution
//! checks that it still owns the shard, so a node that was replaced changes nothing more.

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::NodeError;
use crate::record::{Record, stored};
use crate::store::{Check, Commit, Generation, Key, Order, Result, Rev, Space, SpaceSpec, Store};

/// How many shards there are.
pub(crate) const COUNT: u16 = 64;

/// Tells which node owns a shard.
#[derive(Serialize, Deserialize)]
struct Shard {
    /// Another one for each node.
    owner: String,
}

stored!(Shard);

/// number → owner
const SHARDS: &str = "node.shards";

/// The shards of a node. One that only operates never owns any.
pub(super) struct Shards {
    space: Option<Space>,
    owned: Mutex<Vec<Owned>>,
}

/// What a node knows of its ownership of a shard.
#[derive(Clone)]
enum Owned {
    Never,
    /// The rev of the shard's record is its epoch: the next owner moves it.
    At(Key, Rev),
    /// It was found to be another node's.
    Lost,
}

impl Shards {
    /// Owns none.
    pub(super) fn none() -> Shards {
        Shards { space: None, owned: Mutex::new(vec![Owned::Never; usize::from(COUNT)]) }
    }

    /// Becomes the owner of all shards: the node that was it before is refused from now on.
    pub(super) async fn all(store: &Store) -> Result<Shards, NodeError> {
        let space = store.space(SpaceSpec::new(SHARDS)).await?;
        let keys: Vec<Key> = (0..u64::from(COUNT)).map(|shard| space.key(shard.to_be_bytes())).collect();
        for (key, item) in store.view().await?.scan(&space.all(), Order::Ascending, usize::MAX).await? {
            // What a newer program owns is not taken from it: it may mean something else by owning it.
            if let Some(why) = Shard::decode(&item.value).err().filter(|why| why.is_version()) {
                return Err(NodeError::Record(why.at(format!("shard {key}"))));
            }
        }
        let owner = Shard { owner: store.env().uuid().to_string() }.encode();
        let commit = keys.iter().fold(Commit::new(), |commit, key| commit.put(key, owner.clone()));
        let revs = store.commit(commit).await?.applied().map(|receipt| receipt.revs).unwrap_or_default();
        let owned = keys.into_iter().zip(revs).map(|(key, rev)| rev.map_or(Owned::Lost, |rev| Owned::At(key, rev)));
        Ok(Shards { space: Some(space), owned: Mutex::new(owned.collect()) })
    }

    /// What tells that this node owns what has a name. A node that has lost it cannot tell that; one that never owned
    /// it need not.
    pub(super) fn check(&self, name: &[u8]) -> Option<Check> {
        match &self.owned.lock()[usize::from(shard_of(name))] {
            Owned::Never => None,
            Owned::At(key, rev) => Some(Check::AtRev(key.clone(), *rev)),
            Owned::Lost => Some(NEVER),
        }
    }

    /// The shard of what has a name was found to be another node's. Gives whether this node has thought it its own.
    pub(super) fn lose(&self, name: &[u8]) -> bool {
        let mut owned = self.owned.lock();
        let shard = &mut owned[usize::from(shard_of(name))];
        let was_owned = matches!(shard, Owned::At(..));
        if was_owned {
            *shard = Owned::Lost;
        }
        was_owned
    }

    /// Whether this node owns what has a name, as far as it knows.
    pub(super) fn owns(&self, name: &[u8]) -> bool {
        matches!(self.owned.lock()[usize::from(shard_of(name))], Owned::At(..))
    }

    /// Whether this node owns shards, or has.
    pub(super) fn is_owner(&self) -> bool {
        self.space.is_some()
    }

    /// The shards that this node owns, as far as it knows.
    pub(super) fn owned(&self) -> Vec<u16> {
        let owned = self.owned.lock();
        (0..COUNT).zip(&*owned).filter(|(_, owned)| matches!(owned, Owned::At(..))).map(|(shard, _)| shard).collect()
    }

    /// Finds out which shards are still this node's. Gives whether any is.
    pub(super) async fn look(&self, store: &Store) -> Result<bool> {
        let Some(space) = &self.space else { return Ok(false) };
        let found = store.view().await?.scan(&space.all(), Order::Ascending, usize::MAX).await?;
        let mut owns_any = false;
        for shard in self.owned.lock().iter_mut() {
            let Owned::At(key, rev) = &*shard else { continue };
            if found.iter().any(|(at, item)| at == key && item.rev == *rev) {
                owns_any = true;
            } else {
                *shard = Owned::Lost;
            }
        }
        Ok(owns_any)
    }
}

/// What never holds.
pub(super) const NEVER: Check = Check::AtGeneration(Generation(u64::MAX));

/// The shard of what has a name.
pub(crate) fn shard_of(name: &[u8]) -> u16 {
    (xxhash_rust::xxh3::xxh3_64(name) % u64::from(COUNT)) as u16
}

/// What keys start with that the owner of a shard scans.
pub(crate) fn shard_key(shard: u16) -> [u8; 2] {
    shard.to_be_bytes()
}
