//! The state that a commit is decided on, as data. A backend with remote state reads what all commits of a group need
//! in a few round trips. Then it decides them one after the other without reading again.

use std::collections::BTreeMap;

use crate::commit::Head;
use crate::evaluate::{Present, receipt_key};
use crate::space::RECEIPTS;
use crate::{Check, Commit, Committed, Generation, Key, Range, Result, StoreError, Version, Write};

/// The parts of the newest state that are needed to decide a commit.
#[derive(Debug, Clone, Copy)]
pub struct Needs<'a>(&'a Commit);

impl<'a> Needs<'a> {
    /// The needs of a commit.
    pub fn of(commit: &'a Commit) -> Needs<'a> {
        Needs(commit)
    }

    /// The keys whose heads are needed. A key may appear twice.
    pub fn heads(&self) -> impl Iterator<Item = &'a Key> + use<'a> {
        let checked = self.0.checks.iter().filter_map(|check| match check {
            Check::AtRev(key, _) | Check::Absent(key) | Check::Present(key) => Some(key),
            Check::AtGeneration(_) | Check::Unchanged(..) => None,
        });
        checked.chain(self.0.writes.iter().map(Write::key))
    }

    /// The key whose whole version is needed: the receipt of a commit with an id.
    pub fn receipt(&self) -> Option<Key> {
        self.0.id.map(receipt_key)
    }

    /// The checked ranges, each with the generation after which nothing in it may have been written.
    pub fn ranges(&self) -> impl Iterator<Item = (&'a Range, Generation)> + use<'a> {
        self.0.checks.iter().filter_map(|check| match check {
            Check::Unchanged(range, since) => Some((range, *since)),
            _ => None,
        })
    }
}

/// The state that a group of commits is decided on. It includes the effects of the group's earlier commits.
#[derive(Debug, Default)]
pub struct Facts {
    generation: Generation,
    heads: BTreeMap<Key, Option<Head>>,
    receipts: BTreeMap<Key, Option<Version>>,
    ranges: Vec<Checked>,
}

/// What is known of a range since a generation.
#[derive(Debug)]
struct Checked {
    range: Range,
    since: Generation,
    changed: Result<Option<(Key, Generation)>>,
}

impl Facts {
    /// Creates facts at the store's newest generation. No other writer may commit while they are in use.
    pub fn new(generation: Generation) -> Facts {
        Facts { generation, ..Facts::default() }
    }

    /// Adds the head of a key, tombstones included; `None` if the key was never written.
    pub fn add_head(&mut self, key: Key, head: Option<Head>) {
        self.heads.insert(key, head);
    }

    /// Adds the stored version of a receipt's key.
    pub fn add_receipt(&mut self, key: Key, version: Option<Version>) {
        self.receipts.insert(key, version);
    }

    /// Adds some key of the range that was written after `since`, with its last generation; or the error that this
    /// history is no longer kept.
    pub fn add_range(&mut self, range: Range, since: Generation, changed: Result<Option<(Key, Generation)>>) {
        self.ranges.push(Checked { range, since, changed });
    }

    /// Adds the effects of a commit that will be applied. The next commit of the group is decided on them.
    pub fn apply(&mut self, commit: &Committed) {
        let Committed { generation, time, ref changes, .. } = *commit;
        self.generation = generation;
        for change in changes {
            let head = Head { rev: change.rev, generation, live: change.value.is_some() };
            self.heads.insert(change.key.clone(), Some(head));
            if change.key.space() == RECEIPTS {
                let version = Version { rev: change.rev, generation, time, value: change.value.clone() };
                self.receipts.insert(change.key.clone(), Some(version));
            }
            for checked in self.ranges.iter_mut().filter(|checked| checked.range.contains(&change.key)) {
                if checked.changed.is_ok() {
                    checked.changed = Ok(Some((change.key.clone(), generation)));
                }
            }
        }
    }
}

fn unknown(what: impl std::fmt::Display) -> StoreError {
    StoreError::corrupt("the backend", format!("{what} is needed to decide a commit but was not read"))
}

impl Present for Facts {
    fn generation(&self) -> Generation {
        self.generation
    }

    fn head(&self, key: &Key) -> Result<Option<Head>> {
        self.heads.get(key).copied().ok_or_else(|| unknown(key))
    }

    fn version(&self, key: &Key) -> Result<Option<Version>> {
        self.receipts.get(key).cloned().ok_or_else(|| unknown(key))
    }

    fn changed_since(&self, range: &Range, since: Generation) -> Result<Option<(Key, Generation)>> {
        let checked = self.ranges.iter().find(|checked| checked.since == since && checked.range == *range);
        checked.map_or_else(|| Err(unknown(range)), |checked| checked.changed.clone())
    }
}
