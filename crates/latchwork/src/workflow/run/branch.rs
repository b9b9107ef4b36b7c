//! A branch of an execution: how far its code has replayed the branch's journal.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::store::Order;
use crate::workflow::journal::place::{BranchPath, Place};
use crate::workflow::run::{Run, Stop};
use crate::workflow::stored::keys::{branch_key, read_place};
use crate::workflow::stored::record::{Entry, Intent};

/// How many entries are read ahead in a replay.
const READ_AHEAD: usize = 64;

pub(crate) struct Branch {
    pub(crate) path: BranchPath,
    cursor: Mutex<JournalCursor>,
}

thread_local! {
    static POLLED: RefCell<Option<Polled>> = const { RefCell::new(None) };
}

/// The execution and branch whose code a thread polls.
struct Polled {
    run: *const Run,
    /// The innermost branch.
    branch: Arc<Branch>,
    in_saga: bool,
}

/// What the thread polled before; restored on drop.
struct Before(Option<Polled>);

impl Drop for Before {
    fn drop(&mut self) {
        POLLED.set(self.0.take());
    }
}

struct JournalCursor {
    /// The number of the next operation.
    next: u32,
    /// The entries from there on that were read.
    read: VecDeque<Entry>,
    /// True if the store may hold more entries.
    more: bool,
    /// The entry after the last one, if there are no more.
    intent: Option<Entry>,
    /// True if an operation is in progress, or was dropped before it ended.
    operates: bool,
    /// The step that has to be the next operation, because the code has asked for its key.
    announced: Option<Box<str>>,
}

impl Branch {
    /// The branch of the workflow function itself.
    pub(crate) fn root(run: &Run) -> Arc<Branch> {
        let (more, intent) = run.with(|state| (!state.residency.is_fresh(), state.known.stored().intent.clone()));
        Branch::new(BranchPath::default(), more, intent.filter(|_| more).and_then(Intent::into_entry))
    }

    /// A forked branch. `more` says whether the journal may hold entries of it.
    pub(crate) fn forked(path: BranchPath, more: bool) -> Arc<Branch> {
        Branch::new(path, more, None)
    }

    fn new(path: BranchPath, more: bool, intent: Option<Entry>) -> Arc<Branch> {
        let cursor = JournalCursor { next: 0, read: VecDeque::new(), more, intent, operates: false, announced: None };
        Arc::new(Branch { path, cursor: Mutex::new(cursor) })
    }

    /// Polls code of this branch.
    pub(crate) fn poll<T>(self: &Arc<Branch>, run: &Run, in_saga: bool, poll: impl FnOnce() -> T) -> T {
        let _before = Before(POLLED.replace(Some(Polled { run, branch: self.clone(), in_saga })));
        poll()
    }

    /// The branch of this execution whose code this thread polls, and whether that is the code of a saga. None if the
    /// thread polls something else, such as a task that the code has spawned.
    pub(crate) fn polled(run: &Run) -> Option<(Arc<Branch>, bool)> {
        POLLED.with_borrow(|polled| {
            let Polled { run: of, branch, in_saga } = polled.as_ref()?;
            std::ptr::eq(*of, run).then(|| (branch.clone(), *in_saga))
        })
    }

    /// False if this thread polls another branch of the same execution.
    pub(crate) fn is_polled(self: &Arc<Branch>, run: &Run) -> bool {
        POLLED.with_borrow(|polled| match polled {
            Some(polled) if std::ptr::eq(polled.run, run) => Arc::ptr_eq(&polled.branch, self),
            _ => true,
        })
    }

    /// The place of the next operation; none while one is in progress.
    pub(crate) fn upcoming(&self) -> Option<Place> {
        let cursor = self.cursor.lock();
        (!cursor.operates).then(|| self.path.at(cursor.next))
    }

    /// The place that the code has come to.
    pub(crate) fn reached(&self) -> Place {
        self.path.at(self.cursor.lock().next)
    }

    /// Announces the next operation: a step of this name. Gives its place; none while an operation is under way.
    pub(crate) fn announce(&self, step: &str) -> Option<Place> {
        let place = self.upcoming()?;
        self.cursor.lock().announced = Some(step.into());
        Some(place)
    }

    /// The step that was announced as the next operation, if there is one.
    pub(crate) fn announced(&self) -> Option<Box<str>> {
        self.cursor.lock().announced.take()
    }

    /// Marks an operation as in progress, and returns whether that is allowed. A branch does one operation at a time: a
    /// replay could reach two of them in another order.
    pub(crate) fn begins(&self) -> bool {
        !std::mem::replace(&mut self.cursor.lock().operates, true)
    }

    /// True if an operation is in progress.
    pub(crate) fn operates(&self) -> bool {
        self.cursor.lock().operates
    }

    pub(crate) fn ends(&self) {
        self.cursor.lock().operates = false;
    }

    /// The place of the next operation, and its entry in the journal.
    pub(crate) fn next(&self) -> (Place, Option<Entry>) {
        let mut cursor = self.cursor.lock();
        let number = cursor.next;
        cursor.next += 1;
        (self.path.at(number), cursor.read.pop_front())
    }

    /// The next entry of the journal that the code has not reached.
    pub(crate) async fn peek(&self, run: &Run) -> Result<Option<Entry>, Stop> {
        self.read_ahead(run).await?;
        Ok(self.cursor.lock().read.front().cloned())
    }

    /// Loads the next entry of the journal, if there is one.
    pub(crate) async fn read_ahead(&self, run: &Run) -> Result<(), Stop> {
        let from = {
            let cursor = self.cursor.lock();
            if !cursor.read.is_empty() || !cursor.more {
                return Ok(());
            }
            cursor.next
        };
        let prefix = branch_key(&run.id, run.number().1, &self.path);
        let key = |number: u32| [&prefix[..], &number.to_be_bytes()].concat();
        let range = run.engine.spaces.journal.range(key(from)..key(u32::MAX));
        let view = run.engine.store.view().await.map_err(|error| run.failed(error))?;
        let found = view.scan(&range, Order::Ascending, READ_AHEAD).await.map_err(|error| run.failed(error))?;
        let mut cursor = self.cursor.lock();
        cursor.more = found.len() == READ_AHEAD;
        let (mut intent, mut expected) = (cursor.intent.take(), from);
        for (key, item) in found {
            let place = read_place(&run.id, key.bytes());
            let decoded = Entry::decode_with(&item.value);
            let (number, entry, next) = match (place, decoded) {
                (Some(place), Ok((entry, next))) => (place.number, entry, next),
                (Some(place), Err(why)) if why.is_version() => {
                    return Err(Stop::unknown_version(why.at(format!("operation {place} of its journal"))));
                }
                _ => return Err(Stop::Parked(format!("the journal is damaged from operation {}{from} on", self.path))),
            };
            // A step that began and never ended, because the code has dropped it.
            if expected < number
                && let Some(begun) = intent.take()
            {
                cursor.read.push_back(begun);
                expected += 1;
            }
            if expected < number {
                // The entries before the gap can still be read.
                if expected == from {
                    let at = self.path.at(from);
                    let reason = format!("the journal has no entry for operation {at}, which the code has dropped");
                    return Err(Stop::Parked(reason));
                }
                cursor.more = true;
                return Ok(());
            }
            cursor.read.push_back(entry);
            (intent, expected) = (next, number + 1);
        }
        match cursor.more {
            true => cursor.intent = intent,
            // Everything after the intent would have an entry of its own.
            false => cursor.read.extend(intent),
        }
        Ok(())
    }
}
