//! The machines of an execution together, under one lock: what an event means for several of them. It decides nothing
//! that one machine can decide alone.

use std::sync::{Arc, Weak};

use crate::lane::Part;
use crate::store::Key;
use crate::workflow::ctx::beats::Attempts;
use crate::workflow::ctx::locks::Grant;
use crate::workflow::ctx::saga::Undos;
use crate::workflow::journal::place::{BranchPath, Place};
use crate::workflow::run::OpEffect;
use crate::workflow::run::beside::{Beside, MOST_BESIDE};
use crate::workflow::run::guards::Guards;
use crate::workflow::run::inbox::{Address, Inbox};
use crate::workflow::run::journal::Journal;
use crate::workflow::run::known::KnownRecord;
use crate::workflow::run::ops::OpTable;
use crate::workflow::run::published::{OpenReviews, Publishing};
use crate::workflow::run::residency::Residency;
use crate::workflow::stored::record::{Entry, Labels};

/// The machines of an execution. No machine knows another one; this type applies an event to all machines it concerns.
#[derive(Default)]
pub(crate) struct RunState {
    pub(crate) known: KnownRecord,
    pub(super) journal: Journal,
    pub(crate) ops: OpTable,
    pub(crate) inbox: Inbox,
    pub(crate) guards: Guards,
    pub(crate) published: Publishing,
    pub(crate) reviews: OpenReviews,
    pub(crate) beside: Beside,
    pub(crate) attempts: Attempts,
    pub(crate) residency: Residency,
    /// The sagas that are running.
    pub(super) sagas: Vec<Weak<Undos>>,
    /// True while the code is polled. Everything that the code does in that time is a draft in each machine.
    pub(super) is_polled: bool,
}

impl RunState {
    /// Keeps an entry for the next commit; while the code is polled, for the first commit after the poll.
    pub(super) fn put(&mut self, place: &Place, entry: Entry, effect: Option<OpEffect>) {
        if self.is_polled {
            self.journal.draft(place, entry, effect);
        } else {
            self.journal.put(place, entry, effect);
        }
    }

    /// The entries of one poll belong together: the next commit takes them all.
    pub(super) fn release(&mut self) {
        self.journal.release();
        self.known.release();
        self.published.release();
        self.reviews.release();
        self.beside.release();
    }

    /// Releases the drafts, unless the code is being polled.
    pub(super) fn release_unless_polled(&mut self) {
        if !self.is_polled {
            self.release();
        }
    }

    /// Sets the labels of the execution.
    pub(crate) fn label(&mut self, labels: Labels) {
        self.known.label(labels);
        self.release_unless_polled();
    }

    /// Publishes a value.
    pub(crate) fn publish(&mut self, name: &str, text: String) {
        self.published.publish(name, text);
        self.release_unless_polled();
    }

    /// Entries within blocks are stored. The places are in order.
    pub(crate) fn found<'a>(&mut self, places: impl Iterator<Item = &'a Place>) {
        self.journal.found(places);
    }

    /// A trace is not needed any more. Returns whether it is stored, and what it still has to remove.
    pub(crate) fn forget(&mut self, trace: &Place) -> (bool, Vec<Part>) {
        self.journal.forget(trace)
    }

    /// A block has ended. Returns the entries within it that are stored.
    pub(crate) fn settle(&mut self, block: &BranchPath) -> Vec<Place> {
        self.journal.settle(block)
    }

    /// Closes a review that was given up, with the next commit.
    pub(crate) fn close_review(&mut self, key: Key) {
        self.reviews.close(key);
        self.release_unless_polled();
    }

    /// A branch was dropped: its uncommitted entries are dropped too.
    pub(super) fn give_up(&mut self, branch: &BranchPath) {
        let given_back = self.journal.give_up(branch);
        self.give_back(given_back);
        self.reviews.give_up(branch);
        self.release_unless_polled();
    }

    /// Returns messages to the inbox that were not received after all.
    pub(super) fn give_back(&mut self, messages: Vec<Address>) {
        messages.into_iter().for_each(|address| self.inbox.give_back(address));
    }

    /// Remembers a running saga.
    pub(crate) fn begin_saga(&mut self, undos: &Arc<Undos>) {
        self.sagas.retain(|undos| undos.strong_count() > 0);
        self.sagas.push(Arc::downgrade(undos));
    }

    /// Asks for everything so far to become durable. Returns its last stamp.
    pub(crate) fn want_all(&mut self) -> u64 {
        self.journal.want_all()
    }

    /// True if the execution is stored, with everything up to a stamp.
    pub(super) fn is_durable(&self, stamp: u64) -> bool {
        self.known.is_stored() && self.journal.is_durable(stamp)
    }

    /// Returns `Some` if the execution is stored; otherwise asks for its first commit.
    pub(super) fn is_stored_or_wants(&mut self) -> Option<()> {
        if !self.known.is_stored() {
            self.known.want();
        }
        self.known.is_stored().then_some(())
    }

    /// True if enough is pending to make a commit now.
    pub(crate) fn is_full(&self) -> bool {
        self.journal.is_full()
    }

    /// True if enough is to be written beside the entries of the journal to make a commit now.
    pub(crate) fn is_full_beside(&self) -> bool {
        self.beside.is_full() || self.journal.effect_writes() >= MOST_BESIDE
    }

    /// True if a pending entry has an effect on other records.
    pub(crate) fn has_effects(&self) -> bool {
        self.journal.has_effects()
    }

    /// True if the stored record differs from what it has to be.
    pub(super) fn is_changed(&self) -> bool {
        self.known.is_changed() || self.reviews.is_closing()
    }

    /// Why the operations of a branch are cancelled, if they are.
    pub(crate) fn cancelled(&self, branch: &BranchPath) -> Option<&str> {
        self.known.cancel().or_else(|| self.ops.called_off(branch))
    }

    /// The code has one more guard of a grant.
    pub(crate) fn hold(&mut self, request: &Key, grant: Grant) {
        self.guards.hold(request, grant, self.journal.stamps());
    }

    /// The code has one guard of a grant less.
    pub(crate) fn leave(&mut self, request: &Key) {
        self.guards.leave(request, self.journal.stamps());
    }

    /// Records the progress of an attempt, unless the attempt is over.
    pub(crate) fn beat(&mut self, place: &Place, run: u32, begun: &Entry, progress: String) -> bool {
        if self.known.stored().run != run || !self.attempts.beat(place, begun.attempts, &progress) {
            return false;
        }
        self.put(place, Entry { progress: Some(progress), ..begun.clone() }, None);
        // The driver may look for work before the attempt waits for this commit.
        self.want_all();
        true
    }

    /// Continues with an empty journal. The code's operations are gone; only operations from outside are left.
    pub(super) fn begin_anew(&mut self) {
        self.residency.begin_anew();
        self.journal.begin_anew();
        self.guards.begin_anew();
        self.reviews.begin_anew();
        self.attempts.begin_anew();
    }
}
