//! Who waits in this process: workers for tasks of their kinds, callers for the end of a task, and the keeper for
//! something to do. It holds no truth: a wake-up only makes its receiver look at the store again.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::{Notify, watch};

/// Those who wait.
#[derive(Default)]
pub(crate) struct Waiting {
    workers: Mutex<WaitingWorkers>,
    ends: Mutex<BTreeMap<String, watch::Sender<u64>>>,
    keeper: Notify,
    urgent: Notify,
}

#[derive(Default)]
struct WaitingWorkers {
    next: u64,
    /// In the order in which they began to wait.
    waiting: BTreeMap<u64, WaitingWorker>,
}

struct WaitingWorker {
    kinds: BTreeSet<String>,
    wake: Arc<Notify>,
    is_woken: bool,
}

/// A worker's wait. Dropping it ends the wait.
pub(crate) struct WorkerWait<'a> {
    waiting: &'a Waiting,
    number: u64,
    wake: Arc<Notify>,
}

impl Waiting {
    /// Begins the wait of a worker. What arrives from now on wakes it.
    pub(crate) fn worker(&self, kinds: &[String]) -> WorkerWait<'_> {
        let (mut workers, wake) = (self.workers.lock(), Arc::new(Notify::new()));
        let number = workers.next;
        workers.next += 1;
        let kinds = kinds.iter().cloned().collect();
        workers.waiting.insert(number, WaitingWorker { kinds, wake: wake.clone(), is_woken: false });
        drop(workers);
        self.look_soon();
        WorkerWait { waiting: self, number, wake }
    }

    /// A task of the kind can be taken: wakes the worker that has waited longest.
    pub(crate) fn arrived(&self, kind: &str) {
        self.wake(kind);
        self.look_soon();
    }

    /// Wakes the worker that has waited longest for the kind, if one sleeps.
    pub(crate) fn wake(&self, kind: &str) {
        let mut workers = self.workers.lock();
        let first = workers.waiting.values_mut().find(|worker| !worker.is_woken && worker.kinds.contains(kind));
        if let Some(worker) = first {
            worker.is_woken = true;
            worker.wake.notify_one();
        }
    }

    /// The kinds that workers wait for.
    pub(crate) fn kinds(&self) -> BTreeSet<String> {
        let workers = self.workers.lock();
        workers.waiting.values().flat_map(|worker| worker.kinds.iter().cloned()).collect()
    }

    /// Follows one task.
    pub(crate) fn watch(&self, id: &str) -> EndWait<'_> {
        let seen = self.ends.lock().entry(id.into()).or_default().subscribe();
        self.look_soon();
        EndWait { waiting: self, id: id.into(), seen: Some(seen) }
    }

    /// A task has ended. If an execution is to be told, the keeper does it now.
    pub(crate) fn has_ended(&self, id: &str, is_untold: bool) {
        self.wake_callers(id);
        if is_untold {
            self.urgent.notify_one();
        }
    }

    /// Resolves when an execution is to be told.
    pub(crate) async fn asked_to_tell(&self) {
        self.urgent.notified().await;
    }

    /// Wakes those who wait for the end of a task.
    pub(crate) fn wake_callers(&self, id: &str) {
        if let Some(sender) = self.ends.lock().get(id) {
            sender.send_modify(|count| *count += 1);
        }
    }

    /// The tasks whose ends callers wait for.
    pub(crate) fn watched(&self) -> Vec<String> {
        self.ends.lock().keys().cloned().collect()
    }

    /// Something may be due.
    pub(crate) fn look_soon(&self) {
        self.keeper.notify_one();
    }

    pub(crate) async fn asked_to_look(&self) {
        self.keeper.notified().await;
    }
}

impl WorkerWait<'_> {
    /// Resolves when it is worth looking again.
    pub(crate) async fn woken(&self) {
        self.wake.notified().await;
        if let Some(worker) = self.waiting.workers.lock().waiting.get_mut(&self.number) {
            worker.is_woken = false;
        }
    }
}

impl Drop for WorkerWait<'_> {
    fn drop(&mut self) {
        self.waiting.workers.lock().waiting.remove(&self.number);
    }
}

/// A wait for the end of a task.
pub(crate) struct EndWait<'a> {
    waiting: &'a Waiting,
    id: String,
    seen: Option<watch::Receiver<u64>>,
}

impl EndWait<'_> {
    pub(crate) async fn next(&mut self) {
        // The sender lives as long as one of its receivers.
        if let Some(seen) = &mut self.seen {
            let _ = seen.changed().await;
        }
    }
}

impl Drop for EndWait<'_> {
    fn drop(&mut self) {
        self.seen = None;
        let mut ends = self.waiting.ends.lock();
        if ends.get(&self.id).is_some_and(|sender| sender.receiver_count() == 0) {
            ends.remove(&self.id);
        }
    }
}
