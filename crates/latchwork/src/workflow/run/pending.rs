//! What an execution has come to and no commit holds yet. While its code is polled, that is a draft: another thread
//! that commits just then must not see one half of what belongs together.

use std::collections::{BTreeMap, HashSet};
use std::sync::Weak;

use crate::lane::Part;
use crate::store::{Commit, Key, Write};
use crate::workflow::journal::place::{Path, Place};
use crate::workflow::run::{Effect, Run, State};
use crate::workflow::stored::record::{Entry, Kind, Labels};

/// How many operations, and how many bytes of them, are left to the next commit before one is made for them.
const MOST_PENDING: usize = 256;
const MOST_PENDING_BYTES: usize = 1 << 20;

/// An operation that no commit holds yet.
pub(super) struct Pending {
    pub(super) place: Place,
    pub(super) entry: Entry,
    pub(super) stamp: u64,
    pub(super) effect: Option<Effect>,
}

/// What code has come to while it is polled. Half of what belongs together may be there: what the winner of a race has
/// received without the record that it has won, or that a value was published without the value.
#[derive(Default)]
pub(super) struct Draft {
    entries: BTreeMap<Place, Pending>,
    labels: Option<Labels>,
    published: BTreeMap<String, String>,
    /// Reviews that were given up, with the branches that had opened them.
    closed: Vec<Key>,
}

impl Draft {
    pub(super) fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }
}

impl Run {
    /// Keeps an entry for the next commit.
    pub(crate) fn put(&self, place: &Place, entry: Entry) {
        self.put_with(place, entry, None);
    }

    /// Keeps an entry for the next commit, with what is to be done in it.
    pub(crate) fn put_with(&self, place: &Place, entry: Entry, effect: Option<Effect>) {
        self.state.lock().put(place, entry, effect);
    }

    /// Keeps an entry for a commit that the code waits for, which holds everything the code came to before it.
    pub(crate) fn put_for_carrier(&self, place: &Place, entry: Entry, effect: Option<Effect>) {
        let mut state = self.state.lock();
        let pending = state.stamped(place, entry, effect);
        state.keep(pending);
    }

    /// The code is about to be polled.
    pub(crate) fn begin_poll(&self) {
        self.state.lock().is_polled = true;
    }

    /// The code has been polled, and waits.
    pub(crate) fn end_poll(&self) {
        let mut state = self.state.lock();
        state.is_polled = false;
        state.release();
        state.wake_asides();
    }

    /// Keeps an entry no longer.
    pub(crate) fn take_back(&self, place: &Place) {
        self.state.lock().pending.remove(place);
    }

    /// A branch was given up: what it has not committed is not to be.
    pub(crate) fn give_up(&self, branch: &Path) {
        // Neither will a replay come by its compensations.
        let sagas: Vec<_> = self.with(|state| state.sagas.iter().filter_map(Weak::upgrade).collect());
        for undos in sagas {
            let forgotten: Vec<_> = undos.lock().extract_if(.., |undo| undo.place.branch.is_within(branch)).collect();
            drop(forgotten);
        }
        let mut state = self.state.lock();
        let mut lost: Vec<Pending> = Vec::new();
        let State { pending, draft, .. } = &mut *state;
        for kept in [pending, &mut draft.entries] {
            lost.extend(kept.extract_if(.., |place, _| place.branch.is_within(branch)).map(|(_, pending)| pending));
        }
        lost.into_iter().for_each(|pending| state.give_back(pending));
        let reviews: Vec<Key> =
            state.reviews.extract_if(.., |place, _| place.branch.is_within(branch)).map(|(_, key)| key).collect();
        reviews.into_iter().for_each(|key| state.close_review(key));
        // What is on its way is done, unless it is refused.
        if !state.flying.is_empty() {
            state.lost.push(branch.clone());
        }
    }

    /// Whether so much is pending that it is time for a commit.
    pub(crate) fn is_full(&self) -> bool {
        self.state.lock().is_full()
    }

    /// What it was about to do to somebody who is told of its end does not go with an end that comes before it: a
    /// commit writes everything once.
    pub(crate) fn forget_effects_on(&self, closing: &[Part]) {
        let written = closing.iter().flat_map(|part| part.writes());
        let written: HashSet<&Key> =
            written.filter(|write| !matches!(write, Write::Delete(_))).map(Write::key).collect();
        let is_on = |effect: &Effect| effect.part.writes().iter().any(|write| written.contains(write.key()));
        self.state.lock().pending.retain(|_, pending| !pending.effect.as_ref().is_some_and(is_on));
    }

    /// A review that no commit holds is not opened by one that ends the execution, or has it begin anew.
    pub(crate) fn forget_reviews(&self) {
        let is_review = |pending: &Pending| pending.entry.kind == Kind::Review && pending.effect.is_some();
        self.state.lock().pending.retain(|_, pending| !is_review(pending));
    }

    /// What no commit holds is not to be.
    pub(crate) fn forget_pending(&self) {
        self.state.lock().pending.clear();
    }
}

impl State {
    /// Whether so much is pending that it is time for a commit.
    pub(crate) fn is_full(&self) -> bool {
        self.pending.len() + self.draft.entries.len() >= MOST_PENDING || self.pending_bytes >= MOST_PENDING_BYTES
    }

    /// Whether what is pending changes others.
    pub(crate) fn has_effects(&self) -> bool {
        self.pending.values().chain(self.draft.entries.values()).any(|pending| pending.effect.is_some())
    }

    pub(super) fn put(&mut self, place: &Place, entry: Entry, effect: Option<Effect>) {
        let pending = self.stamped(place, entry, effect);
        if self.is_polled {
            keep(&mut self.draft.entries, pending);
        } else {
            self.keep(pending);
        }
    }

    fn stamped(&mut self, place: &Place, entry: Entry, effect: Option<Effect>) -> Pending {
        self.stamps += 1;
        self.pending_bytes += entry.bytes() + effect.as_ref().map_or(0, |effect| effect.part.bytes());
        self.first_pending = self.first_pending.min(self.stamps);
        Pending { place: place.clone(), entry, stamp: self.stamps, effect }
    }

    fn keep(&mut self, pending: Pending) {
        keep(&mut self.pending, pending);
    }

    /// What the code has come to by now belongs together: whoever commits next takes it.
    pub(super) fn release(&mut self) {
        let Draft { entries, labels, published, closed } = std::mem::take(&mut self.draft);
        self.closed.extend(closed);
        entries.into_values().for_each(|pending| self.keep(pending));
        self.labels = labels.unwrap_or_else(|| std::mem::take(&mut self.labels));
        if !published.is_empty() {
            let before = self.published.get_or_insert_default();
            before.values.0.extend(published);
            before.is_new = true;
        }
    }

    /// Closes a review with the next commit, which holds that it was given up.
    pub(crate) fn close_review(&mut self, key: Key) {
        let closed = if self.is_polled { &mut self.draft.closed } else { &mut self.closed };
        closed.push(key);
    }

    /// How it is to be found.
    pub(crate) fn labels(&self) -> &Labels {
        self.draft.labels.as_ref().unwrap_or(&self.labels)
    }

    pub(crate) fn label(&mut self, labels: Labels) {
        self.draft.labels = Some(labels);
        if !self.is_polled {
            self.release();
        }
    }

    /// What it has published under a name.
    pub(crate) fn published(&self, name: &str) -> Option<&String> {
        let before = || self.published.as_ref().and_then(|published| published.values.0.get(name));
        self.draft.published.get(name).or_else(before)
    }

    pub(crate) fn publish(&mut self, name: &str, text: String) {
        self.draft.published.insert(name.into(), text);
        if !self.is_polled {
            self.release();
        }
    }

    /// How many bytes everything that it has published takes, with this.
    pub(crate) fn published_bytes(&self, name: &str, text: &str) -> usize {
        let bytes = |(name, text): (&String, &String)| name.len() + text.len() + 8;
        let draft = &self.draft.published;
        let before = self.published.iter().flat_map(|published| &published.values.0);
        let before = before.filter(|(other, _)| *other != name && !draft.contains_key(*other)).map(bytes);
        let since = draft.iter().filter(|(other, _)| *other != name).map(bytes);
        before.chain(since).sum::<usize>() + name.len() + text.len() + 8
    }

    /// What was received with an operation that is not to be was not.
    pub(super) fn give_back(&mut self, pending: Pending) {
        if let (Some(received), Some(inbox)) = (pending.effect.and_then(|effect| effect.receives), &mut self.inbox) {
            inbox.give_back(received);
        }
    }

    /// Takes what is pending, except for what would write something that is written already.
    pub(super) fn take_pending(&mut self, commit: &Commit) -> Vec<Pending> {
        let first = self.draft.entries.values().map(|pending| pending.stamp).min();
        (self.pending_bytes, self.first_pending) = (0, first.unwrap_or(u64::MAX));
        let all = std::mem::take(&mut self.pending).into_values();
        let mut written: HashSet<Key> = commit.writes().iter().map(|write| write.key().clone()).collect();
        let mut taken = Vec::with_capacity(all.len());
        for pending in all {
            let keys = || pending.effect.iter().flat_map(|effect| effect.part.writes()).map(Write::key);
            if keys().any(|key| written.contains(key)) {
                self.first_pending = self.first_pending.min(pending.stamp);
                self.pending.insert(pending.place.clone(), pending);
            } else {
                written.extend(keys().cloned());
                taken.push(pending);
            }
        }
        taken
    }
}

/// Keeps an entry in place of the one before. What was to be done with that still is.
fn keep(kept: &mut BTreeMap<Place, Pending>, mut pending: Pending) {
    let before = kept.remove(&pending.place);
    pending.effect = pending.effect.or(before.and_then(|before| before.effect));
    kept.insert(pending.place.clone(), pending);
}
