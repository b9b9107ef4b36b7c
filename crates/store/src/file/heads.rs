//! A cache of the heads of keys that were checked or written recently. All writes of a store go through one stage, so
//! every cached head is current; that a key does not exist is cached, too. The cache forgets only to bound its memory.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher};

use crate::Key;
use crate::commit::Head;

/// How many of the newest entries are always kept. The cache holds up to twice as many.
const REMEMBERED: usize = 1 << 17;

pub(super) struct Heads {
    young: Map,
    old: Map,
}

/// The value is `None` for a key that was never written.
type Map = HashMap<Key, Option<Head>, KeyHashes>;

impl Heads {
    pub(super) fn new(seed: u64) -> Heads {
        Heads { young: Map::with_hasher(KeyHashes(seed)), old: Map::with_hasher(KeyHashes(seed)) }
    }

    pub(super) fn get(&self, key: &Key) -> Option<Option<Head>> {
        self.young.get(key).or_else(|| self.old.get(key)).copied()
    }

    /// Stores a head. Entries that were not set for a long time are dropped to make room.
    pub(super) fn set(&mut self, key: &Key, head: Option<Head>) {
        if let Some(known) = self.young.get_mut(key) {
            *known = head;
            return;
        }
        if self.young.len() >= REMEMBERED {
            self.old.clear();
            std::mem::swap(&mut self.old, &mut self.young);
        }
        self.young.insert(key.clone(), head);
    }

    pub(super) fn clear(&mut self) {
        self.young.clear();
        self.old.clear();
    }
}

/// Hashes keys. The seed prevents a user who chooses keys from choosing keys that collide.
#[derive(Debug, Clone)]
pub(super) struct KeyHashes(pub(super) u64);

impl KeyHashes {
    pub(super) fn hash(&self, key: &Key) -> u64 {
        xxhash_rust::xxh3::xxh3_64_with_seed(key.encoded(), self.0)
    }
}

impl BuildHasher for KeyHashes {
    type Hasher = KeyHasher;

    fn build_hasher(&self) -> KeyHasher {
        KeyHasher(self.0)
    }
}

pub(super) struct KeyHasher(u64);

impl Hasher for KeyHasher {
    fn write(&mut self, bytes: &[u8]) {
        self.0 = xxhash_rust::xxh3::xxh3_64_with_seed(bytes, self.0);
    }

    // The hash of a slice starts with its length, which the bytes already determine.
    fn write_usize(&mut self, _length: usize) {}

    fn finish(&self) -> u64 {
        self.0
    }
}
