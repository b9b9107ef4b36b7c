//! What this process knows of the newest state without reading: where the last transaction left the head, and the newest
//! versions of keys that were read or written lately. A group of commits can be decided on it at once. That is a guess:
//! the statement that writes the group compares it with the tables, and writes nothing if it is wrong.

use std::collections::HashMap;

use crate::backend::{Facts, Needs};
use crate::commit::Head;
use crate::postgres::read::signed;
use crate::postgres::writer::{Job, Last};
use crate::space::RECEIPTS;
use crate::{Change, Committed, Key};

/// How many keys are remembered, in two halves: when the newer one is full, the older one is forgotten.
const HALF: usize = 8192;

/// How many transactions go without a guess after many wrong ones.
const LONGEST_PAUSE: u32 = 64;

#[derive(Default)]
pub(super) struct Known {
    last: Option<Last>,
    newer: HashMap<Key, Head>,
    older: HashMap<Key, Head>,
    /// How many transactions still go without a guess.
    pause: u32,
    /// How many go without one after the next wrong guess.
    next_pause: u32,
}

/// What a group of commits is decided on, without a look at the tables.
pub(super) struct Guess {
    pub(super) facts: Facts,
    pub(super) last: Last,
    pub(super) versions: Guessed,
}

/// The newest versions of keys, as they are guessed: at which generation each was written, and 0 if it was never.
#[derive(Default)]
pub(super) struct Guessed {
    pub(super) keys: Vec<Key>,
    pub(super) generations: Vec<i64>,
}

impl Known {
    /// A guess of what a group is decided on. None if a range is checked, or if a guess would probably be wrong.
    pub(super) fn guess(&mut self, group: &[Job]) -> Option<Guess> {
        if self.pause > 0 {
            self.pause -= 1;
            return None;
        }
        let last = self.last?;
        let (mut keys, mut receipts) = (Vec::new(), Vec::new());
        for needs in group.iter().map(|job| Needs::of(&job.commit)) {
            if needs.ranges().next().is_some() {
                return None;
            }
            keys.extend(needs.heads().cloned());
            receipts.extend(needs.receipt());
        }
        keys.sort_unstable();
        keys.dedup();
        let mut facts = Facts::new(last.generation);
        let mut generations = Vec::with_capacity(keys.len() + receipts.len());
        for key in &keys {
            let head = self.head(key);
            generations.push(head.map_or(0, |head| signed(head.generation)));
            facts.add_head(key.clone(), head);
        }
        // No commit with the same id has landed before.
        for receipt in receipts {
            facts.add_receipt(receipt.clone(), None);
            generations.push(0);
            keys.push(receipt);
        }
        Some(Guess { facts, last, versions: Guessed { keys, generations } })
    }

    fn head(&mut self, key: &Key) -> Option<Head> {
        if let Some(head) = self.newer.get(key) {
            return Some(*head);
        }
        let (key, head) = self.older.remove_entry(key)?;
        self.remember(key, head);
        Some(head)
    }

    fn remember(&mut self, key: Key, head: Head) {
        if self.newer.len() >= HALF {
            self.older = std::mem::take(&mut self.newer);
        }
        self.newer.insert(key, head);
    }

    /// A transaction has read the head, which it has locked, and versions of keys. As long as other processes or
    /// transactions of users move the head, a guess is worth nothing.
    pub(super) fn read(&mut self, last: Last, heads: impl Iterator<Item = (Key, Option<Head>)>) {
        if self.last.is_none_or(|known| known.generation != last.generation) {
            self.pause = self.pause.max(1);
        }
        self.last = Some(last);
        for (key, head) in heads {
            match head {
                Some(head) => self.remember(key, head),
                None => {
                    self.newer.remove(&key);
                    self.older.remove(&key);
                }
            }
        }
    }

    /// A group has landed, with which the head is as given.
    pub(super) fn landed(&mut self, applied: &[Committed], last: Last) {
        if self.last.is_none_or(|known| known.generation < last.generation) {
            self.last = Some(last);
        }
        for Committed { generation, changes, .. } in applied {
            for Change { key, rev, value } in changes.iter().filter(|change| change.key.space() != RECEIPTS) {
                self.remember(key.clone(), Head { rev: *rev, generation: *generation, live: value.is_some() });
            }
        }
    }

    pub(super) fn guessed_right(&mut self) {
        self.next_pause = 1;
    }

    /// A guess was wrong: the next transaction looks.
    pub(super) fn guessed_wrong(&mut self) {
        self.last = None;
        self.pause = self.next_pause;
        self.next_pause = (self.next_pause * 2).clamp(1, LONGEST_PAUSE);
    }
}

impl Guessed {
    /// The keys, as a parameter of a statement.
    pub(super) fn encoded(&self) -> Vec<&[u8]> {
        self.keys.iter().map(Key::encoded).collect()
    }
}
