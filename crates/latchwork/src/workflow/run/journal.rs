//! The machine of the journal: the entries that no commit holds yet, those that commits in flight hold, and which of
//! them have to become durable. While the code is polled, its entries are a draft: a commit of another thread must not
//! hold half of the entries that belong together. It knows nothing of the record, of messages or of what operations
//! wait for.

use std::collections::{BTreeMap, HashSet};

use crate::lane::Part;
use crate::store::{Commit, Key, Write};
use crate::workflow::journal::place::{BranchPath, Place, TRACE};
use crate::workflow::run::inbox::Address;
use crate::workflow::run::{OpEffect, Submitted};
use crate::workflow::stored::record::{Entry, Kind};

/// How many entries, and how many bytes of entries, may wait for the next commit before a commit is made for them.
const MOST_PENDING: usize = 256;
const MOST_PENDING_BYTES: usize = 1 << 20;

/// An entry that no commit holds yet.
pub(super) struct Pending {
    pub(super) place: Place,
    pub(super) entry: Entry,
    /// The number of the entry, in the order in which the code made them.
    pub(super) stamp: u64,
    pub(super) effect: Option<OpEffect>,
    /// True if the entry is not stored, because its block has ended; its effect still counts.
    pub(super) is_dropped: bool,
}

impl Pending {
    /// The message that is received with this entry. If the entry is dropped, the message was not received.
    fn received(self) -> Option<Address> {
        self.effect.and_then(|effect| effect.receives)
    }
}

pub(crate) struct Journal {
    /// In the order of their places, one for each place.
    pending: Vec<Pending>,
    /// Entries of the present poll, in the same way.
    draft: Vec<Pending>,
    bytes: usize,
    /// No entry that waits for a commit has a lower stamp.
    first: u64,
    /// The last stamp that was assigned, and the last one that has to become durable.
    stamps: u64,
    wanted: u64,
    /// The commits in flight by number, and the first stamp of each.
    flights: Vec<(u64, u64)>,
    last_flight: u64,
    /// The branches that were dropped while commits were in flight.
    lost: Vec<BranchPath>,
    /// The operation whose own commit is in flight. Meanwhile there is no other commit.
    carrier: Option<u64>,
    /// Commits of operations' own that the driver has to send.
    submitted: Vec<Submitted>,
    /// The entries within blocks that have not ended, and whether a commit has held them.
    within: BTreeMap<Place, bool>,
}

impl Default for Journal {
    fn default() -> Journal {
        Journal {
            pending: Vec::new(),
            draft: Vec::new(),
            bytes: 0,
            first: u64::MAX,
            stamps: 0,
            wanted: 0,
            flights: Vec::new(),
            last_flight: 0,
            lost: Vec::new(),
            carrier: None,
            submitted: Vec::new(),
            within: BTreeMap::new(),
        }
    }
}

impl Journal {
    /// Keeps an entry of the present poll.
    pub(super) fn draft(&mut self, place: &Place, entry: Entry, effect: Option<OpEffect>) {
        let pending = self.stamped(place, entry, effect);
        keep(&mut self.draft, pending);
    }

    /// Keeps an entry for the next commit.
    pub(super) fn put(&mut self, place: &Place, entry: Entry, effect: Option<OpEffect>) {
        let pending = self.stamped(place, entry, effect);
        keep(&mut self.pending, pending);
    }

    fn stamped(&mut self, place: &Place, entry: Entry, effect: Option<OpEffect>) -> Pending {
        self.stamps += 1;
        self.bytes += entry.bytes() + effect.as_ref().map_or(0, |effect| effect.part.bytes());
        self.first = self.first.min(self.stamps);
        if place.branch.is_named() {
            self.within.entry(place.clone()).or_default();
        }
        Pending { place: place.clone(), entry, stamp: self.stamps, effect, is_dropped: false }
    }

    /// Entries within blocks that have not ended are stored. The places are in order.
    pub(super) fn found<'a>(&mut self, places: impl Iterator<Item = &'a Place>) {
        self.within.append(&mut places.map(|place| (place.clone(), true)).collect());
    }

    /// A trace is not needed any more. Returns whether a commit has held it, and what it removes that no commit has
    /// removed yet.
    pub(super) fn forget(&mut self, trace: &Place) -> (bool, Vec<Part>) {
        let mut parts = Vec::new();
        for kept in [&mut self.pending, &mut self.draft] {
            let forgotten = kept.extract_if(.., |pending| pending.place == *trace);
            parts.extend(forgotten.filter_map(|pending| Some(pending.effect?.part)));
        }
        (self.within.remove(trace) == Some(true), parts)
    }

    /// A block has ended: the entries within it are not needed any more, except for its trace. Returns the places of
    /// those that a commit has held. The effects of the others still count.
    pub(super) fn settle(&mut self, block: &BranchPath) -> Vec<Place> {
        let trace = block.trace();
        let is_over = |place: &Place| place.branch.is_within(block) && *place != trace;
        for kept in [&mut self.pending, &mut self.draft] {
            kept.retain(|pending| !is_over(&pending.place) || pending.effect.is_some());
            kept.iter_mut().filter(|pending| is_over(&pending.place)).for_each(|pending| pending.is_dropped = true);
        }
        let over = self.within.range(block.at(0)..).map(|(place, _)| place);
        let over: Vec<Place> = over.take_while(|place| place.branch.is_within(block)).cloned().collect();
        let over = over.into_iter().filter(|place| is_over(place));
        over.filter(|place| self.within.remove(place) == Some(true)).collect()
    }

    /// The entries of one poll belong together: the next commit takes them all.
    pub(super) fn release(&mut self) {
        if self.pending.is_empty() {
            // The usual case. Both keep their memory.
            return std::mem::swap(&mut self.pending, &mut self.draft);
        }
        for pending in self.draft.drain(..) {
            keep(&mut self.pending, pending);
        }
    }

    /// Drops an entry whose commit failed.
    pub(super) fn take_back(&mut self, place: &Place) {
        self.pending.retain(|pending| pending.place != *place);
    }

    /// Asks for everything so far to become durable. Returns its last stamp.
    pub(super) fn want_all(&mut self) -> u64 {
        self.wanted = self.stamps;
        self.stamps
    }

    /// The last stamp that was assigned.
    pub(crate) fn stamps(&self) -> u64 {
        self.stamps
    }

    /// True if everything up to a stamp is durable.
    pub(super) fn is_durable(&self, stamp: u64) -> bool {
        let is_empty = self.pending.is_empty() && self.draft.is_empty();
        (is_empty || self.first > stamp) && self.flights.iter().all(|(_, first)| *first > stamp)
    }

    /// True if an entry has to become durable and no commit holds it.
    pub(super) fn is_wanted(&self) -> bool {
        !self.pending.is_empty() && self.first <= self.wanted
    }

    pub(super) fn is_empty(&self) -> bool {
        self.pending.is_empty()
    }

    /// True if a body has begun and no commit records that.
    pub(super) fn has_intent(&self) -> bool {
        self.pending.iter().any(|pending| pending.entry.is_intent())
    }

    /// True if enough is pending to make a commit now.
    pub(super) fn is_full(&self) -> bool {
        self.pending.len() + self.draft.len() >= MOST_PENDING || self.bytes >= MOST_PENDING_BYTES
    }

    /// How many writes the effects of pending entries have.
    pub(super) fn effect_writes(&self) -> usize {
        let effects = self.pending.iter().chain(&self.draft).filter_map(|pending| pending.effect.as_ref());
        effects.map(|effect| effect.part.writes().len()).sum()
    }

    /// True if a pending entry has an effect on other records.
    pub(super) fn has_effects(&self) -> bool {
        self.pending.iter().chain(&self.draft).any(|pending| pending.effect.is_some())
    }

    /// Takes the pending entries for a commit, except for entries that would write a key that the commit writes
    /// already. The caller then calls [`Journal::fly`].
    pub(super) fn take(&mut self, commit: &Commit) -> Vec<Pending> {
        let first = self.draft.iter().map(|pending| pending.stamp).min();
        (self.bytes, self.first) = (0, first.unwrap_or(u64::MAX));
        let all = std::mem::take(&mut self.pending);
        if all.iter().all(|pending| pending.effect.is_none()) {
            all.iter().for_each(|pending| self.hold(&pending.place));
            return all;
        }
        let mut written: HashSet<Key> = commit.writes().iter().map(|write| write.key().clone()).collect();
        let mut taken = Vec::with_capacity(all.len());
        for pending in all {
            let keys = || pending.effect.iter().flat_map(|effect| effect.part.writes()).map(Write::key);
            if keys().any(|key| written.contains(key)) {
                self.first = self.first.min(pending.stamp);
                self.pending.push(pending);
            } else {
                written.extend(keys().cloned());
                self.hold(&pending.place);
                taken.push(pending);
            }
        }
        taken
    }

    /// A commit holds the entry at this place.
    fn hold(&mut self, place: &Place) {
        if place.branch.is_named()
            && let Some(is_held) = self.within.get_mut(place)
        {
            *is_held = true;
        }
    }

    /// A commit with these entries is in flight. Returns its number.
    pub(super) fn fly(&mut self, taken: &[Pending]) -> u64 {
        self.last_flight += 1;
        let first = taken.iter().map(|pending| pending.stamp).min().unwrap_or(u64::MAX);
        self.flights.push((self.last_flight, first));
        self.last_flight
    }

    /// A commit has landed, or has failed and its entries were put back.
    pub(super) fn arrive(&mut self, flight: u64) {
        self.flights.retain(|(number, _)| *number != flight);
        if self.flights.is_empty() {
            self.lost.clear();
        }
    }

    /// Puts the entries of a failed commit back, except for entries of branches that were dropped meanwhile. Returns
    /// the messages of those entries: they were not received.
    pub(super) fn put_back(&mut self, taken: Vec<Pending>) -> Vec<Address> {
        let mut given_back = Vec::new();
        for mut pending in taken {
            if pending.place.branch.is_named() && !self.within.contains_key(&pending.place) {
                // Its block has ended meanwhile.
                if pending.effect.is_none() {
                    continue;
                }
                pending.is_dropped = true;
            }
            if self.lost.iter().any(|lost| pending.place.branch.is_within(lost)) {
                given_back.extend(pending.received());
                continue;
            }
            self.first = self.first.min(pending.stamp);
            match position(&self.pending, &pending.place) {
                Err(index) => self.pending.insert(index, pending),
                // A newer entry at the same place stays. What the older trace removes is still to be removed.
                Ok(index) if pending.place.number == TRACE => {
                    let newer = &mut self.pending[index];
                    newer.effect = match (pending.effect.take(), newer.effect.take()) {
                        (Some(before), Some(effect)) => Some(OpEffect { part: before.part.and(effect.part), ..effect }),
                        (before, effect) => effect.or(before),
                    };
                }
                Ok(_) => {}
            }
        }
        given_back
    }

    /// A branch was dropped: its entries are dropped too. Entries of commits in flight become durable unless their
    /// commit is refused. Returns the messages of the dropped entries: they were not received.
    pub(super) fn give_up(&mut self, branch: &BranchPath) -> Vec<Address> {
        let mut given_back = Vec::new();
        for kept in [&mut self.pending, &mut self.draft] {
            let lost = kept.extract_if(.., |pending| pending.place.branch.is_within(branch));
            given_back.extend(lost.filter_map(Pending::received));
        }
        if !self.flights.is_empty() {
            self.lost.push(branch.clone());
        }
        given_back
    }

    /// Drops pending entries with effects on keys that the end of the execution writes: a commit writes a key once.
    pub(super) fn forget_effects_on(&mut self, closing: &[Part]) {
        let written = closing.iter().flat_map(|part| part.writes());
        let written: HashSet<&Key> =
            written.filter(|write| !matches!(write, Write::Delete(_))).map(Write::key).collect();
        let is_on = |effect: &OpEffect| effect.part.writes().iter().any(|write| written.contains(write.key()));
        self.pending.retain(|pending| !pending.effect.as_ref().is_some_and(is_on));
    }

    /// Drops reviews that no commit has opened. The commit that ends the execution or continues as new does not open
    /// them.
    pub(super) fn forget_reviews(&mut self) {
        let is_review = |pending: &Pending| pending.entry.kind == Kind::Review && pending.effect.is_some();
        self.pending.retain(|pending| !is_review(pending));
    }

    /// Drops all pending entries.
    pub(super) fn forget_pending(&mut self) {
        self.pending.clear();
    }

    /// True if no commit is in flight and none is submitted: the next one may be made.
    pub(super) fn is_idle(&self) -> bool {
        self.carrier.is_none() && self.flights.is_empty() && self.submitted.is_empty()
    }

    /// True if no commit is in flight.
    pub(super) fn has_arrived(&self) -> bool {
        self.flights.is_empty()
    }

    /// True if a commit of an operation's own is in flight.
    pub(super) fn is_carried(&self) -> bool {
        self.carrier.is_some()
    }

    /// Makes an operation the carrier, unless a commit is in flight. Returns whether it is.
    pub(super) fn carry(&mut self, op: u64) -> bool {
        let is_free = self.flights.is_empty() && self.carrier.is_none();
        if is_free {
            self.carrier = Some(op);
        }
        is_free
    }

    /// The operation's own commit is finished. Returns whether the operation was the carrier.
    pub(super) fn stop_carrying(&mut self, op: u64) -> bool {
        let is_it = self.carrier == Some(op);
        if is_it {
            self.carrier = None;
        }
        is_it
    }

    /// The code begins anew: no operation of the earlier run is the carrier.
    pub(super) fn begin_anew(&mut self) {
        self.carrier = None;
    }

    /// Keeps an operation's own commit until the driver sends it.
    pub(super) fn submit(&mut self, submitted: Submitted) {
        self.submitted.push(submitted);
    }

    pub(super) fn take_submitted(&mut self) -> Vec<Submitted> {
        std::mem::take(&mut self.submitted)
    }
}

/// Keeps an entry in place of an earlier one. The effect of the earlier one is kept if the new one has none.
fn keep(kept: &mut Vec<Pending>, mut pending: Pending) {
    match position(kept, &pending.place) {
        Ok(index) => {
            let before = kept[index].effect.take();
            pending.effect = match (pending.effect, before) {
                // The traces of a loop: each round removes what it has recorded.
                (Some(effect), Some(before)) if pending.place.number == TRACE => {
                    Some(OpEffect { part: before.part.and(effect.part), ..effect })
                }
                (effect, before) => effect.or(before),
            };
            kept[index] = pending;
        }
        Err(index) => kept.insert(index, pending),
    }
}

/// The index of the entry at this place, or the index where it has to be inserted.
fn position(kept: &[Pending], place: &Place) -> Result<usize, usize> {
    kept.binary_search_by(|pending| pending.place.cmp(place))
}

#[cfg(test)]
#[path = "journal_tests.rs"]
mod tests;
