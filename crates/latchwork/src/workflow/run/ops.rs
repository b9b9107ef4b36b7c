//! The machine of operations: what the branches of an execution do and wait for, and which of them are woken. It does
//! not know where the awaited things come from, nor what is committed.

use std::collections::BTreeMap;
use std::task::Waker;

use crate::store::Timestamp;
use crate::workflow::journal::place::{BranchPath, Place};
use crate::workflow::stored::record::{Wait, WaitsFor};

/// The reason why operations are cancelled in the branches beside a failed one.
pub(crate) const CALLED_OFF: &str = "a branch beside it has failed";

#[derive(Default)]
pub(crate) struct OpTable {
    ops: BTreeMap<u64, OpState>,
    last: u64,
    /// The operations that only wait, by what they wait for; and how many there are.
    waiting: BTreeMap<WaitsFor, Vec<u64>>,
    waits: usize,
    /// The operations beside the code that are woken after the code was polled.
    asides: Vec<u64>,
    /// The forks with a failed branch, and the index of that branch: the branches beside it are cancelled.
    called_off: Vec<(Place, usize)>,
}

/// An operation in progress.
struct OpState {
    what: WaitsFor,
    since: Timestamp,
    until: Option<Timestamp>,
    /// True if it only waits, for something that the store records.
    waits: bool,
    /// True if its part of a commit was refused.
    refused: bool,
    waker: Option<Waker>,
}

impl OpTable {
    /// An operation begins. Returns its number.
    pub(super) fn begin(&mut self, what: WaitsFor, since: Timestamp) -> u64 {
        self.last += 1;
        let op = OpState { what, since, until: None, waits: false, refused: false, waker: None };
        self.ops.insert(self.last, op);
        self.last
    }

    pub(super) fn end(&mut self, number: u64) {
        self.stop_waiting(number);
        self.ops.remove(&number);
    }

    /// The operation does something else now.
    pub(super) fn does(&mut self, number: u64, what: WaitsFor, since: Timestamp) {
        if let Some(op) = self.ops.get_mut(&number) {
            (op.what, op.since) = (what, since);
        }
    }

    /// The operation only waits from now on.
    pub(super) fn start_waiting(&mut self, number: u64, what: &WaitsFor, since: Timestamp, until: Option<Timestamp>) {
        self.stop_waiting(number);
        let Some(op) = self.ops.get_mut(&number) else { return };
        (op.what, op.since, op.until, op.waits) = (what.clone(), since, until, true);
        self.waits += 1;
        self.waiting.entry(what.without_name()).or_default().push(number);
    }

    pub(super) fn stop_waiting(&mut self, number: u64) {
        let Some(op) = self.ops.get_mut(&number).filter(|op| op.waits) else { return };
        (op.waits, op.until) = (false, None);
        self.waits -= 1;
        let what = op.what.without_name();
        if let Some(waiting) = self.waiting.get_mut(&what) {
            waiting.retain(|waits| *waits != number);
            if waiting.is_empty() {
                self.waiting.remove(&what);
            }
        }
    }

    /// Sets the waker of an operation that was polled.
    pub(super) fn set_waker(&mut self, number: u64, waker: &Waker) {
        if let Some(op) = self.ops.get_mut(&number) {
            op.waker = Some(waker.clone());
        }
    }

    /// An operation beside the code waits until the code was polled.
    pub(super) fn wait_for_poll(&mut self, number: u64) {
        self.asides.push(number);
    }

    /// The operation's part of a commit was refused.
    pub(super) fn refuse(&mut self, number: u64) {
        if let Some(op) = self.ops.get_mut(&number) {
            op.refused = true;
            op.waker.iter().for_each(Waker::wake_by_ref);
        }
    }

    /// Returns whether the operation's part was refused, and clears that.
    pub(super) fn take_refused(&mut self, number: u64) -> bool {
        self.ops.get_mut(&number).is_some_and(|op| std::mem::take(&mut op.refused))
    }

    /// Wakes the operations that wait for this.
    pub(crate) fn wake_waiting(&self, what: &WaitsFor) {
        let waiting = self.waiting.get(what).into_iter().flatten().filter_map(|op| self.ops.get(op));
        waiting.filter_map(|op| op.waker.as_ref()).for_each(Waker::wake_by_ref);
    }

    /// Wakes the operations that wait for a message, or for a retry that a message can start early.
    pub(super) fn wake_for_messages(&self) {
        self.wake(|op| op.waits && (op.what.is_message() || matches!(op.what, WaitsFor::Retry(_))));
    }

    /// Wakes the operations that wait for a commit of their own or of another operation.
    pub(crate) fn wake_busy(&self) {
        self.wake(|op| !op.waits);
    }

    pub(super) fn wake_all(&self) {
        self.wake(|_| true);
    }

    /// The code was polled: wakes the operations beside it.
    pub(super) fn wake_asides(&mut self) {
        let asides = std::mem::take(&mut self.asides);
        let asides = asides.into_iter().filter_map(|op| self.ops.get(&op));
        asides.filter_map(|op| op.waker.as_ref()).for_each(Waker::wake_by_ref);
    }

    fn wake(&self, which: impl Fn(&OpState) -> bool) {
        self.ops.values().filter(|op| which(op)).filter_map(|op| op.waker.as_ref()).for_each(Waker::wake_by_ref);
    }

    /// A branch of a fork has failed: the branches beside it are cancelled.
    pub(super) fn call_off(&mut self, fork: &Place, failed: usize) {
        self.called_off.push((fork.clone(), failed));
        self.wake_all();
    }

    /// The branches of a fork have ended or were dropped.
    pub(super) fn pass(&mut self, fork: &Place) {
        self.called_off.retain(|(other, _)| other != fork);
    }

    /// Why the operations of a branch are cancelled, if a branch beside it has failed.
    pub(super) fn called_off(&self, branch: &BranchPath) -> Option<&'static str> {
        let is_called_off =
            |(fork, failed): &(Place, usize)| fork.beside(branch).is_some_and(|beside| beside != *failed);
        self.called_off.iter().any(is_called_off).then_some(CALLED_OFF)
    }

    /// True if there are operations and all of them only wait.
    pub(crate) fn only_wait(&self) -> bool {
        !self.ops.is_empty() && self.waits == self.ops.len()
    }

    /// The earliest time that an operation waits for.
    pub(super) fn until(&self) -> Option<Timestamp> {
        self.ops.values().filter_map(|op| op.until).min()
    }

    /// True if an operation waits for a message.
    pub(super) fn wait_for_message(&self) -> bool {
        self.ops.values().any(|op| op.what.is_message())
    }

    /// What the operations do or wait for.
    pub(crate) fn doing(&self) -> Vec<Wait> {
        let wait = |op: &OpState| Wait { what: op.what.clone(), since: op.since, until: op.until };
        self.ops.values().map(wait).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    use super::*;

    #[derive(Default)]
    struct Counted(AtomicUsize);

    impl Wake for Counted {
        fn wake(self: Arc<Counted>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[derive(Debug, Clone, Copy)]
    enum Event {
        Message,
        Signal,
        Commit,
        Poll,
        Anything,
        Refused(u64),
    }

    /// Four operations: 1 runs a step, 2 waits for a signal, 3 waits for a timer, 4 is beside the code. Each row is an
    /// event and how often it wakes each operation.
    #[test]
    fn an_event_wakes_the_operations_that_it_is_for() {
        use Event::*;
        let table = [
            (Message, [0, 1, 0, 0]),
            (Signal, [0, 1, 0, 0]),
            (Commit, [1, 0, 0, 1]),
            (Poll, [0, 0, 0, 1]),
            (Anything, [1, 1, 1, 1]),
            (Refused(3), [0, 0, 1, 0]),
        ];
        for (event, expected) in table {
            let mut ops = OpTable::default();
            let woken: Vec<Arc<Counted>> = (0..4).map(|_| Arc::default()).collect();
            let signal = WaitsFor::Signal("s".into());
            ops.begin(WaitsFor::Step("charge".into()), Timestamp(1));
            let waiting = ops.begin(signal.clone(), Timestamp(1));
            ops.start_waiting(waiting, &signal, Timestamp(1), None);
            let timer = ops.begin(WaitsFor::Timer, Timestamp(1));
            ops.start_waiting(timer, &WaitsFor::Timer, Timestamp(1), Some(Timestamp(9)));
            let aside = ops.begin(WaitsFor::Store, Timestamp(1));
            ops.wait_for_poll(aside);
            for (number, woken) in woken.iter().enumerate() {
                ops.set_waker(number as u64 + 1, &woken.clone().into());
            }
            assert!(!ops.only_wait() && ops.until() == Some(Timestamp(9)) && ops.wait_for_message());
            match event {
                Message => ops.wake_for_messages(),
                Signal => ops.wake_waiting(&signal.without_name()),
                Commit => ops.wake_busy(),
                Poll => ops.wake_asides(),
                Anything => ops.wake_all(),
                Refused(number) => {
                    ops.refuse(number);
                    assert!(ops.take_refused(number) && !ops.take_refused(number), "it is reported once");
                }
            }
            let woken: Vec<usize> = woken.iter().map(|woken| woken.0.load(Ordering::SeqCst)).collect();
            assert_eq!(woken, expected, "{event:?}");
        }
    }

    /// Each row: what happens to the operations, and whether all of them only wait afterwards.
    #[test]
    fn an_execution_only_waits_if_each_of_its_operations_does() {
        type Do = fn(&mut OpTable);
        let (begin, wait): (Do, Do) = (
            |ops| _ = ops.begin(WaitsFor::Timer, Timestamp(1)),
            |ops| ops.start_waiting(ops.last, &WaitsFor::Timer, Timestamp(1), None),
        );
        let (stop, end): (Do, Do) = (|ops| ops.stop_waiting(ops.last), |ops| ops.end(ops.last));
        let table: &[(&[Do], bool)] = &[
            (&[], false),
            (&[begin], false),
            (&[begin, wait], true),
            (&[begin, wait, wait], true),
            (&[begin, wait, stop], false),
            (&[begin, wait, begin], false),
            (&[begin, wait, begin, wait], true),
            (&[begin, wait, begin, end], true),
            (&[begin, wait, end], false),
        ];
        for (number, (events, only_wait)) in table.iter().enumerate() {
            let mut ops = OpTable::default();
            events.iter().for_each(|event| event(&mut ops));
            assert_eq!(ops.only_wait(), *only_wait, "row {number}");
            assert_eq!(ops.waiting.values().map(Vec::len).sum::<usize>(), ops.waits, "row {number}");
        }
    }
}
