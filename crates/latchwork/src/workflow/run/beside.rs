//! The machine of what an execution stores beside its journal, in the same commits: records of which only the latest
//! version counts, and the events of its stream, numbered without gaps. It does not know what the records and events
//! mean.

use std::collections::BTreeMap;

use crate::lane::Part;
use crate::store::{Bytes, Key};
use crate::workflow::stored::kept::Kept;

/// How many records and events may wait for the next commit before a commit is made for them.
pub(crate) const MOST_BESIDE: usize = 1000;

#[derive(Default)]
pub(crate) struct Beside {
    waiting: BesideBatch,
    /// The records and events of the present poll.
    draft: BesideBatch,
    /// The event of an operation whose own commit is about to be made.
    carried: Option<Bytes>,
    /// The number of the next event.
    next: u64,
}

#[derive(Default)]
struct BesideBatch {
    /// Without a value, the record is deleted.
    records: BTreeMap<Key, Option<Bytes>>,
    events: Vec<Bytes>,
}

/// What a commit holds of it.
#[derive(Default)]
pub(super) struct TakenBeside {
    batch: BesideBatch,
    /// The number of the first event.
    first: u64,
    /// True if the last event is that of the operation whose commit this is.
    is_carrier: bool,
}

impl Beside {
    /// The stream holds events below this number.
    pub(crate) fn continue_at(&mut self, next: u64) {
        self.next = next;
    }

    /// True if the stream is empty.
    pub(crate) fn is_new(&self) -> bool {
        self.next == 0 && self.waiting.events.is_empty() && self.draft.events.is_empty()
    }

    /// Stores a record with the next commit, or deletes it.
    pub(crate) fn put(&mut self, key: Key, value: Option<Bytes>) {
        self.draft.records.insert(key, value);
    }

    /// Adds an event to the stream.
    pub(crate) fn append(&mut self, event: Bytes) {
        self.draft.events.push(event);
    }

    /// Adds an event to the next commit, which is the own one of an operation. If that fails, the event is dropped: the
    /// operation may come to something else when it is tried again.
    pub(crate) fn carry(&mut self, event: Bytes) {
        self.carried = Some(event);
    }

    /// True if enough waits to make a commit now.
    pub(crate) fn is_full(&self) -> bool {
        let count = |batch: &BesideBatch| batch.records.len() + batch.events.len();
        count(&self.waiting) + count(&self.draft) >= MOST_BESIDE
    }

    /// The poll is over: the next commit takes what was put in it.
    pub(super) fn release(&mut self) {
        let BesideBatch { records, events } = std::mem::take(&mut self.draft);
        self.waiting.records.extend(records);
        self.waiting.events.extend(events);
    }

    /// Drops what no commit has taken.
    pub(super) fn forget(&mut self) {
        self.carried = None;
        self.waiting = BesideBatch::default();
    }

    pub(super) fn take(&mut self) -> TakenBeside {
        let (mut batch, first) = (std::mem::take(&mut self.waiting), self.next);
        let carried = self.carried.take();
        let is_carrier = carried.is_some();
        batch.events.extend(carried);
        self.next += batch.events.len() as u64;
        TakenBeside { batch, first, is_carrier }
    }

    /// The commit failed: the next one takes it. A newer version of a record stays. One commit is in flight at a time,
    /// so the numbers are free again.
    pub(super) fn put_back(&mut self, taken: TakenBeside) {
        let BesideBatch { records, mut events } = taken.batch;
        if taken.is_carrier {
            events.pop();
            self.next = taken.first;
        }
        for (key, value) in records {
            self.waiting.records.entry(key).or_insert(value);
        }
        if !events.is_empty() {
            self.next = taken.first;
            events.append(&mut self.waiting.events);
            self.waiting.events = events;
        }
    }
}

impl TakenBeside {
    pub(super) fn has_events(&self) -> bool {
        !self.batch.events.is_empty()
    }

    pub(super) fn add_to(&self, mut part: Part, kept: &Kept<'_>) -> Part {
        for (key, value) in &self.batch.records {
            part = match value {
                Some(value) => part.put(key, value.clone()),
                None => part.delete(key),
            };
        }
        for (number, event) in (self.first..).zip(&self.batch.events) {
            part = part.put(&kept.event(number), event.clone());
        }
        part
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_are_numbered_without_gaps_whatever_becomes_of_their_commits() {
        let mut beside = Beside::default();
        beside.continue_at(7);
        beside.append(Bytes::from_static(b"a"));
        assert!(!beside.take().has_events(), "the poll is not over");
        beside.release();
        let failed = beside.take();
        assert_eq!((failed.first, failed.batch.events.len()), (7, 1));
        beside.append(Bytes::from_static(b"b"));
        beside.release();
        beside.put_back(failed);
        let again = beside.take();
        assert_eq!((again.first, again.batch.events.len()), (7, 2));
        assert_eq!(again.batch.events[0], Bytes::from_static(b"a"), "the order stays");
        assert_eq!(beside.take().first, 9);
    }

    #[test]
    fn the_event_of_an_operation_is_in_its_own_commit_only() {
        let mut beside = Beside::default();
        for (waits, expected) in [(true, 2), (false, 1)] {
            if waits {
                beside.append(Bytes::from_static(b"a"));
                beside.release();
            }
            beside.carry(Bytes::from_static(b"b"));
            let failed = beside.take();
            assert_eq!((failed.first, failed.batch.events.len()), (0, expected));
            beside.put_back(failed);
            beside.carry(Bytes::from_static(b"c"));
            let again = beside.take();
            assert_eq!((again.first, again.batch.events.len()), (0, expected));
            assert_eq!(again.batch.events.last().map(|event| &event[..]), Some(&b"c"[..]));
            beside.put_back(again);
            let rest = beside.take();
            assert_eq!((rest.first, rest.batch.events.len()), (0, expected - 1), "the operation is not tried again");
            beside.next = 0;
        }
    }
}
