//! A tiny store to compare the real ones with: every version of every key in one map, and nothing is ever dropped. It
//! does not share code with the rules that it checks. It uses nothing of the store except its floors.

use std::collections::BTreeMap;

use bytes::Bytes;
use latchwork_store::{
    Actual, Change, Check, Commit, CommitId, Committed, FailedCheck, Generation, Item, Key, Outcome, Range, Receipt,
    Refusal, Rev, SpaceId, Timestamp, Version, Write,
};

#[derive(Debug, Default)]
pub(crate) struct Reference {
    /// Every version of every key, oldest first.
    keys: BTreeMap<Key, Vec<Version>>,
    commits: Vec<Committed>,
    answered: BTreeMap<CommitId, (String, Receipt)>,
}

/// An outcome, or the message of an error.
pub(crate) type Answer = Result<Outcome, String>;

impl Reference {
    /// Starts at `generation`. Earlier commits, such as declarations of spaces, are not compared.
    pub(crate) fn at(generation: Generation) -> Reference {
        let unseen = |number| Committed {
            generation: Generation(number),
            time: Timestamp(0),
            meta: Bytes::new(),
            changes: Vec::new(),
        };
        Reference { commits: (1..=generation.0).map(unseen).collect(), ..Reference::default() }
    }

    pub(crate) fn generation(&self) -> Generation {
        Generation(self.commits.len() as u64)
    }

    /// The version of a key at a generation, tombstones included.
    pub(crate) fn version(&self, key: &Key, at: Generation) -> Option<&Version> {
        self.keys.get(key)?.iter().rfind(|version| version.generation <= at)
    }

    /// The version of a key at a generation, if it has a value.
    pub(crate) fn live(&self, key: &Key, at: Generation) -> Option<&Version> {
        self.version(key, at).filter(|version| version.value.is_some())
    }

    /// The value of a key at a generation, as a view returns it.
    pub(crate) fn item(&self, key: &Key, at: Generation) -> Option<Item> {
        let Version { rev, generation, time, value } = self.version(key, at)?.clone();
        value.map(|value| Item { rev, generation, time, value })
    }

    /// The versions of a key up to `at` that a space with this floor still keeps, newest first.
    pub(crate) fn history(&self, key: &Key, at: Generation, floor: Generation) -> Vec<Version> {
        let mut known = Vec::new();
        for version in self.keys.get(key).into_iter().flatten().rev().filter(|version| version.generation <= at) {
            known.push(version.clone());
            if version.generation <= floor {
                break;
            }
        }
        known
    }

    /// The keys of a range with their values, in order.
    pub(crate) fn scan(&self, range: &Range, at: Generation) -> Vec<(Key, Item)> {
        let keys = self.keys.keys().filter(|key| range.contains(key));
        keys.filter_map(|key| Some((key.clone(), self.item(key, at)?))).collect()
    }

    /// The commits in (`after`, `up_to`] that touched a range, with their changes in it.
    pub(crate) fn changes(&self, range: &Range, after: Generation, up_to: Generation) -> Vec<Committed> {
        let between = self.commits.iter().filter(|commit| commit.generation > after && commit.generation <= up_to);
        let inside = between.map(|commit| {
            let changes = commit.changes.iter().filter(|change| range.contains(&change.key)).cloned().collect();
            Committed { changes, ..commit.clone() }
        });
        inside.filter(|commit| !commit.changes.is_empty()).collect()
    }

    /// The newest generation that was committed at or before `time`.
    pub(crate) fn newest_at(&self, time: Timestamp) -> Generation {
        self.commits.iter().rfind(|commit| commit.time <= time).map_or(Generation(0), |commit| commit.generation)
    }

    /// Returns the checks that do not hold at a generation, or the error if that cannot be decided.
    pub(crate) fn failed(
        &self,
        checks: &[Check],
        at: Generation,
        floor: impl Fn(SpaceId) -> Generation,
    ) -> Result<Vec<FailedCheck>, String> {
        let mut failed = Vec::new();
        for (index, check) in checks.iter().enumerate() {
            let actual = match check {
                Check::AtRev(key, rev) => match self.live(key, at) {
                    None => Some(Actual::Absent),
                    Some(version) => (version.rev != *rev).then_some(Actual::AtRev(version.rev)),
                },
                Check::Absent(key) => self.live(key, at).map(|version| Actual::AtRev(version.rev)),
                Check::Present(key) => self.live(key, at).is_none().then_some(Actual::Absent),
                Check::AtGeneration(wanted) => (*wanted != at).then_some(Actual::AtGeneration(at)),
                Check::Unchanged(_, since) if *since > at => {
                    return Err(format!("generation {since} does not exist yet; the store is at {at}"));
                }
                Check::Unchanged(range, since) if *since < floor(range.space()) => {
                    return Err(dropped(range.space(), *since, floor(range.space())));
                }
                Check::Unchanged(range, since) => self.changed(range, *since, at).into_iter().next(),
            };
            failed.extend(actual.map(|actual| FailedCheck { index, check: check.clone(), actual, right: None }));
        }
        Ok(failed)
    }

    /// Every change of a range between two generations that a refusal may report.
    fn changed(&self, range: &Range, since: Generation, at: Generation) -> Vec<Actual> {
        let keys = self.keys.keys().filter(|key| range.contains(key));
        let last = keys.filter_map(|key| Some((key, self.version(key, at)?.generation)));
        last.filter(|(_, written)| *written > since)
            .map(|(key, written)| Actual::Changed(key.clone(), written))
            .collect()
    }

    /// A refusal may name any changed key of a range. If it names one of them, this replaces it with the first.
    pub(crate) fn canonical(&self, mut refusal: Refusal) -> Refusal {
        for failed in &mut refusal.failed {
            if let Check::Unchanged(range, since) = &failed.check {
                let changed = self.changed(range, *since, refusal.generation);
                if changed.contains(&failed.actual) {
                    failed.actual = changed[0].clone();
                }
            }
        }
        refusal
    }

    /// Decides a commit at the newest generation and applies it.
    pub(crate) fn commit(
        &mut self,
        (id, meta, commit): (Option<CommitId>, &Bytes, &Commit),
        time: Timestamp,
        floor: impl Fn(SpaceId) -> Generation,
    ) -> Answer {
        let contents = format!("{meta:?} {:?} {:?}", commit.checks(), commit.writes());
        if let Some((id, (first, receipt))) = id.and_then(|id| Some((id, self.answered.get(&id)?))) {
            return if *first == contents {
                Ok(Outcome::Applied(Receipt { repeated: true, ..receipt.clone() }))
            } else {
                Err(format!("commit id {id} was used before for a commit with other contents"))
            };
        }
        let generation = self.generation();
        let failed = self.failed(commit.checks(), generation, floor)?;
        if !failed.is_empty() {
            return Ok(Outcome::Refused(Refusal { generation, failed }));
        }
        let receipt = self.apply(meta, commit.writes(), time, id.is_some());
        if let Some(id) = id {
            self.answered.insert(id, (contents, receipt.clone()));
        }
        Ok(Outcome::Applied(receipt))
    }

    /// Applies writes without checks. A commit that is `named`, with an id, gets a generation even if it changes
    /// nothing.
    pub(crate) fn apply(&mut self, meta: &Bytes, writes: &[Write], time: Timestamp, named: bool) -> Receipt {
        let now = self.generation();
        let mut receipt = Receipt { generation: now, time, revs: Vec::new(), repeated: false };
        let mut changes = Vec::new();
        for write in writes {
            let (key, value) = match write {
                Write::Put(key, value) => (key, Some(value.clone())),
                Write::PutStamped(key, value, offset) => {
                    let stamp = [(now.0 + 1).to_be_bytes(), time.0.to_be_bytes()].concat();
                    let (before, after) = (&value[..*offset], &value[offset + 16..]);
                    (key, Some([before, &stamp, after].concat().into()))
                }
                Write::Delete(key) => (key, None),
            };
            if value.is_none() && self.live(key, now).is_none() {
                receipt.revs.push(None);
                continue;
            }
            let rev = Rev(self.keys.get(key).map_or(0, Vec::len) as u64 + 1);
            receipt.revs.push(Some(rev));
            changes.push(Change { key: key.clone(), rev, value });
        }
        if !changes.is_empty() || named {
            let generation = Generation(now.0 + 1);
            receipt.generation = generation;
            for Change { key, rev, value } in changes.iter().cloned() {
                self.keys.entry(key).or_default().push(Version { rev, generation, time, value });
            }
            self.commits.push(Committed { generation, time, meta: meta.clone(), changes });
        }
        receipt
    }
}

/// The error message for history that is no longer kept.
pub(crate) fn dropped(space: SpaceId, asked: Generation, oldest: Generation) -> String {
    format!("generation {asked} of space {space} is no longer kept; the oldest left is {oldest}")
}
