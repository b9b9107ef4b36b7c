//! Group commit. A caller decides its own commit under one short lock and adds it to the waiting group. A caller that
//! is alone and finds no sync in progress writes and syncs the group itself, without a change of threads. The sync
//! thread writes larger groups, and every group if syncs are slow. The next group forms while one is synced.
//!
//! Invariants: generations follow the order of the log. No read and no answer is based on anything above `visible`.
//! `visible` rises only after the sync that covers it. After the first failure it does not rise any more.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::Poll;
use std::time::Duration;

use arc_swap::ArcSwap;
use parking_lot::{Condvar, Mutex, MutexGuard};
use tokio::sync::{Notify, oneshot, watch};

use super::frame::{Frame, HEADER};
use super::heads::Heads;
use super::index::Progress;
use super::layers::{Layers, Looked, NewestLayers};
use super::log::Log;
use super::overlay::Overlay;
use crate::backend::Retention;
use crate::commit::Head;
use crate::evaluate::{Decision, evaluate};
use crate::space::SPACES;
use crate::{Check, Commit, Committed, Env, Generation, Outcome, Result, Stats, StoreError, Timestamp};

/// If syncs take longer than this, the sync thread makes them, so that they do not block the other tasks of a caller's
/// thread. Changing to another thread and back costs 50 to 100 µs, less than a tenth of such a sync.
const SLOW_SYNC: Duration = Duration::from_millis(1);

pub(super) struct FileWriter {
    pub(super) env: Env,
    pub(super) retention: Arc<Retention>,
    pub(super) layers: ArcSwap<Layers>,
    pub(super) log: Mutex<Log>,
    pub(super) overlay_bytes: u64,
    group_bytes: usize,
    /// True if the store's own threads sync groups and fold overlays; otherwise callers do it.
    pub(super) background: bool,
    stage: Mutex<Stage>,
    /// Notified when a group waits for the sync thread.
    group_waits: Condvar,
    /// Notified when an overlay gets its first commit or is full, and when the store ends. The fold thread waits.
    pub(super) fold_waits: Condvar,
    /// Notified when a sync has ended.
    synced: Condvar,
    /// Notified when commits that found no room may try again.
    room: Notify,
    visible: AtomicU64,
    /// The running average of the time that a write and its sync take, in microseconds. `u64::MAX` before the first.
    sync_us: AtomicU64,
    latest: watch::Sender<Generation>,
    stopped: OnceLock<StoreError>,
    closed: AtomicBool,
    /// Notified when the store was closed or has stopped.
    ended: Notify,
    #[cfg(feature = "testing")]
    pub(super) sabotage: Option<super::Sabotage>,
}

/// The commits that are decided but not durable yet, and the state that the next commit is decided on.
pub(super) struct Stage {
    generation: Generation,
    pub(super) time: Timestamp,
    frame: Frame,
    /// An empty frame whose memory is reused.
    spare: Option<Frame>,
    /// The callers that wait for a generation to become visible, in the order of generations.
    waiting: VecDeque<(Generation, oneshot::Sender<Result<()>>)>,
    syncing: bool,
    pub(super) closing: bool,
    /// The number of [`Held`] guards. Commits wait while there is one.
    held: usize,
    stats: Stats,
    heads: Heads,
}

impl Stage {
    /// Adds a commit to the waiting group and to the overlay.
    fn add(&mut self, commit: Arc<Committed>, overlay: &Overlay, retention: &Retention) {
        self.generation = commit.generation;
        self.time = commit.time;
        self.stats.applied += 1;
        self.frame.push(&commit);
        for change in &commit.changes {
            let head = Head { rev: change.rev, generation: commit.generation, live: change.value.is_some() };
            self.heads.set(&change.key, Some(head));
            if change.key.space() == SPACES {
                retention.declared(commit.generation);
            }
        }
        overlay.insert(commit);
    }
}

/// The result of staging a commit. A decided commit has an answer, which may have to wait for a sync.
enum Staged {
    /// There is no room. The caller waits and stages the commit again.
    Full,
    /// Too much was committed since the checked ranges were searched. The caller searches them again.
    Behind,
    Ready(Result<Outcome>),
    Waits(Result<Outcome>, oneshot::Receiver<Result<()>>),
}

impl FileWriter {
    pub(super) fn new(parts: Parts) -> FileWriter {
        let Parts { env, retention, layers, log, overlay_bytes, group_bytes, background, generation, time } = parts;
        let stage = Stage {
            generation,
            time,
            frame: Frame::new(),
            spare: None,
            waiting: VecDeque::new(),
            syncing: false,
            closing: false,
            held: 0,
            stats: Stats::default(),
            heads: Heads::new(env.random()),
        };
        FileWriter {
            env,
            retention,
            layers: ArcSwap::from_pointee(layers),
            log: Mutex::new(log),
            overlay_bytes,
            group_bytes,
            background,
            stage: Mutex::new(stage),
            group_waits: Condvar::new(),
            fold_waits: Condvar::new(),
            synced: Condvar::new(),
            room: Notify::new(),
            visible: AtomicU64::new(generation.0),
            sync_us: AtomicU64::new(u64::MAX),
            latest: watch::Sender::new(generation),
            stopped: OnceLock::new(),
            closed: AtomicBool::new(false),
            ended: Notify::new(),
            #[cfg(feature = "testing")]
            sabotage: None,
        }
    }

    pub(super) async fn commit(&self, mut commit: Commit) -> Result<Outcome> {
        #[cfg(feature = "testing")]
        if self.sabotage == Some(super::Sabotage::AnswerBeforeSync) {
            // Writes the commits that were answered earlier.
            self.lead();
        }
        let ranges = commit.checks.iter().filter_map(|check| match check {
            Check::Unchanged(range, since) => Some(Looked::not_yet(range, *since)),
            _ => None,
        });
        let mut looked: Vec<Looked> = ranges.collect();
        let (outcome, mut receiver) = loop {
            looked.iter_mut().for_each(|looked| looked.look(&self.layers.load(), &self.retention));
            let room = self.room.notified();
            match self.stage(&mut commit, &looked)? {
                Staged::Behind => {}
                Staged::Ready(outcome) => return outcome,
                Staged::Waits(outcome, receiver) => break (outcome, receiver),
                Staged::Full => room.await,
            }
        };
        // Other tasks of this thread that are ready to commit join the group before it is written.
        let lead = LeadOnDrop(self);
        yield_once().await;
        drop(lead);
        let synced = match receiver.try_recv() {
            Ok(synced) => synced,
            Err(_) => receiver.await.unwrap_or_else(|_| Err(self.stop_cause())),
        };
        synced.and(outcome)
    }

    fn stage(&self, commit: &mut Commit, looked: &[Looked]) -> Result<Staged> {
        let mut stage = self.stage.lock();
        self.check()?;
        if stage.closing {
            return Err(StoreError::Closed);
        }
        if !self.has_room(&mut stage) {
            return Ok(Staged::Full);
        }
        let now = self.env.now().max(stage.time);
        let layers = self.layers.load();
        if looked.iter().any(|looked| looked.is_behind(&layers, stage.generation)) {
            return Ok(Staged::Behind);
        }
        let stage = &mut *stage;
        let newest = NewestLayers {
            layers: &layers,
            retention: &self.retention,
            generation: stage.generation,
            heads: RefCell::new(&mut stage.heads),
            looked,
        };
        let decided = commit.decided.take();
        // An error may also be based on a commit that is not durable yet: a commit id that was used before.
        let outcome = self.decide(commit, &newest, now).map(|decision| match decision {
            Decision::Refuse(refusal) => {
                stage.stats.refused += 1;
                Outcome::Refused(refusal)
            }
            Decision::Answer(receipt) => Outcome::Applied(receipt),
            Decision::Apply(committed, receipt) => {
                if layers.active.is_empty() {
                    self.fold_waits.notify_all();
                }
                stage.add(Arc::new(committed), &layers.active, &self.retention);
                Outcome::Applied(receipt)
            }
        });
        if let (Some(decided), Ok(outcome)) = (decided, &outcome) {
            decided.tell(outcome.is_applied());
        }
        if stage.generation <= self.visible() {
            return Ok(Staged::Ready(outcome));
        }
        #[cfg(feature = "testing")]
        match self.sabotage {
            Some(super::Sabotage::AnswerBeforeSync) => {
                self.visible.fetch_max(stage.generation.0, Ordering::SeqCst);
                return Ok(Staged::Ready(outcome));
            }
            Some(super::Sabotage::AnswerBeforeSeen) => {
                self.group_waits.notify_one();
                return Ok(Staged::Ready(outcome));
            }
            _ => {}
        }
        let (sender, receiver) = oneshot::channel();
        let decided_on = stage.generation;
        stage.waiting.push_back((decided_on, sender));
        Ok(Staged::Waits(outcome, receiver))
    }

    fn decide(&self, commit: &mut Commit, newest: &NewestLayers<'_>, now: Timestamp) -> Result<Decision> {
        #[cfg(feature = "testing")]
        if self.sabotage == Some(super::Sabotage::SkipChecks) {
            commit.checks.clear();
        }
        evaluate(std::mem::take(commit), newest, now)
    }

    /// Returns whether another commit may be staged. Freezes a full overlay, unless another one is still frozen.
    fn has_room(&self, stage: &mut MutexGuard<'_, Stage>) -> bool {
        if stage.held > 0 || stage.frame.length() > self.group_bytes.max(HEADER) {
            return false;
        }
        if !self.background || self.layers.load().active.bytes() < self.overlay_bytes {
            return true;
        }
        let frozen = self.freeze(stage);
        self.fold_waits.notify_all();
        frozen
    }

    /// Freezes the active overlay for the next fold and starts a new one. Returns `false` if another is still frozen.
    pub(super) fn freeze(&self, _stage: &mut MutexGuard<'_, Stage>) -> bool {
        let layers = self.layers.load();
        if layers.frozen.is_some() {
            return false;
        }
        self.layers.store(Arc::new(Layers {
            active: Arc::new(Overlay::new(self.env.random(), 0)),
            frozen: Some(layers.active.clone()),
            index: layers.index.clone(),
        }));
        true
    }

    /// Writes the waiting group, unless a sync is in progress. If the group has several commits, or if syncs are slow,
    /// the sync thread writes it instead, so that the thread of a caller is not blocked for others.
    fn lead(&self) {
        let stage = self.stage.lock();
        if stage.syncing || stage.frame.count() == 0 {
            return;
        }
        let is_slow = u128::from(self.sync_us.load(Ordering::Relaxed)) > SLOW_SYNC.as_micros();
        if self.background && (stage.frame.count() > 1 || is_slow) {
            self.group_waits.notify_one();
            return;
        }
        self.sync_group(stage);
        if self.background {
            return;
        }
        // Without a sync thread, this caller also writes the groups that formed meanwhile.
        loop {
            let stage = self.stage.lock();
            if stage.syncing || stage.frame.count() == 0 || self.stopped.get().is_some() {
                return;
            }
            self.sync_group(stage);
        }
    }

    /// The loop of the sync thread. It ends when the store closes.
    pub(super) fn sync_groups(&self) {
        let mut last = 0;
        loop {
            let mut stage = self.stage.lock();
            while stage.syncing || stage.frame.count() == 0 {
                if stage.closing && !stage.syncing {
                    return;
                }
                self.group_waits.wait(&mut stage);
            }
            if self.stopped.get().is_some() {
                return;
            }
            // The callers of the last group are about to commit again. Let them join this group: on a busy machine a
            // sync for a few commits costs more than it gains.
            if stage.frame.count() < last / 2 {
                drop(stage);
                std::thread::yield_now();
                stage = self.stage.lock();
            }
            last = stage.frame.count();
            if last > 0 && !stage.syncing {
                self.sync_group(stage);
            }
        }
    }

    /// Makes the waiting group durable and answers the callers that wait for it.
    fn sync_group(&self, mut stage: MutexGuard<'_, Stage>) {
        if self.stopped.get().is_some() {
            return;
        }
        let _watched = self.stop_on_panic();
        let empty = stage.spare.take().unwrap_or_else(Frame::new);
        let mut frame = std::mem::replace(&mut stage.frame, empty);
        stage.syncing = true;
        drop(stage);
        let (last, length) = (frame.last(), frame.length());
        let began = self.env.monotonic();
        let synced = self.log.lock().append(&mut frame, self.visible());
        self.measured(self.env.monotonic().saturating_sub(began));
        frame.clear();

        let written = match synced {
            Ok(written) => written,
            Err(error) => return self.stop(&error),
        };
        let mut stage = self.stage.lock();
        stage.syncing = false;
        if self.stopped.get().is_some() {
            return;
        }
        stage.spare = Some(frame);
        stage.stats.groups += 1;
        self.layers.load().active.charge(written - length);
        self.visible.store(last.0, Ordering::SeqCst);
        let count = stage.waiting.partition_point(|(generation, _)| *generation <= last);
        let answered: Vec<_> = stage.waiting.drain(..count).collect();
        if stage.frame.count() > 0 || stage.closing {
            self.group_waits.notify_one();
        }
        drop(stage);
        self.synced.notify_all();
        announce(&self.latest, last);
        for (_, waiting) in answered {
            // The caller may have stopped waiting.
            let _ = waiting.send(Ok(()));
        }
        self.room.notify_waiters();
    }

    /// Adds the duration of a sync to the average. Only one sync runs at a time.
    fn measured(&self, sync: Duration) {
        let sync = u64::try_from(sync.as_micros()).unwrap_or(u64::MAX / 8);
        let average = match self.sync_us.load(Ordering::Relaxed) {
            u64::MAX => sync,
            average => average - average / 8 + sync / 8,
        };
        self.sync_us.store(average, Ordering::Relaxed);
    }

    /// Stops the store after a failure. All waiting and all later callers get the same error, with the first cause.
    pub(super) fn stop(&self, error: &StoreError) {
        let cause = match error {
            StoreError::Stopped { cause, .. } => cause.clone(),
            other => other.to_string().into(),
        };
        let _ = self.stopped.set(StoreError::Stopped { cause, io: error.io_kind() });
        // A commit that was staged before that line is in `waiting`. A commit that comes later fails in `check`.
        let mut stage = self.stage.lock();
        stage.syncing = false;
        let waiting: Vec<_> = stage.waiting.drain(..).collect();
        drop(stage);
        for (_, waiting) in waiting {
            let _ = waiting.send(Err(self.stop_cause()));
        }
        self.ended.notify_waiters();
        self.latest.send_modify(|_| {});
        self.synced.notify_all();
        self.fold_waits.notify_all();
        self.group_waits.notify_all();
        self.room.notify_waiters();
    }

    /// Stops the store if the current thread panics, so that callers do not wait forever after a broken invariant.
    pub(super) fn stop_on_panic(&self) -> StopOnPanic<'_> {
        StopOnPanic(self)
    }

    fn stop_cause(&self) -> StoreError {
        self.stopped.get().cloned().unwrap_or(StoreError::Closed)
    }

    /// Fails once the store has stopped or closed.
    pub(super) fn check(&self) -> Result<()> {
        if let Some(stopped) = self.stopped.get() {
            return Err(stopped.clone());
        }
        if self.closed.load(Ordering::SeqCst) { Err(StoreError::Closed) } else { Ok(()) }
    }

    /// Every call fails from now on. Wakes the callers that wait.
    pub(super) fn set_closed(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.ended.notify_waiters();
        self.latest.send_modify(|_| {});
    }

    /// Accepts no more commits. Fails if it was called before.
    pub(super) fn begin_closing(&self) -> Result<()> {
        let mut stage = self.stage.lock();
        if std::mem::replace(&mut stage.closing, true) {
            return Err(StoreError::Closed);
        }
        drop(stage);
        self.group_waits.notify_all();
        self.fold_waits.notify_all();
        self.room.notify_waiters();
        Ok(())
    }

    pub(super) fn visible(&self) -> Generation {
        Generation(self.visible.load(Ordering::SeqCst))
    }

    /// Makes the generation of a restored index visible. The caller holds commits back, and nothing is staged.
    pub(super) fn publish(&self, layers: Layers) {
        let Progress { applied: generation, time, .. } = layers.index.progress;
        let mut stage = self.stage.lock();
        (stage.generation, stage.time) = (generation, time);
        stage.heads.clear();
        self.retention.declared(generation);
        self.layers.store(Arc::new(layers));
        self.visible.store(generation.0, Ordering::SeqCst);
        announce(&self.latest, generation);
    }

    pub(super) async fn newer(&self, than: Generation) -> Result<Generation> {
        let mut receiver = self.latest.subscribe();
        let newer = receiver.wait_for(|latest| *latest > than || self.check().is_err()).await.map(|latest| *latest);
        self.check()?;
        newer.map_err(|_| StoreError::Closed)
    }

    /// Returns when the store was closed or has stopped.
    pub(super) async fn ended(&self) {
        let mut ended = std::pin::pin!(self.ended.notified());
        ended.as_mut().enable();
        if self.check().is_ok() {
            ended.await;
        }
    }

    /// Makes commits wait until the returned guard is dropped.
    pub(super) fn hold_commits(&self) -> Held<'_> {
        self.stage.lock().held += 1;
        Held(self)
    }

    pub(super) fn lock_stage(&self) -> MutexGuard<'_, Stage> {
        self.stage.lock()
    }

    pub(super) fn stats(&self) -> Stats {
        let stats = self.stage.lock().stats;
        let layers = self.layers.load();
        let frozen = layers.frozen.as_ref().map_or(0, |overlay| overlay.bytes());
        let log_bytes = self.log.lock().bytes_written;
        Stats { overlay_bytes: layers.active.bytes() + frozen, log_bytes, generation: self.visible(), ..stats }
    }

    /// Blocks the thread until `generation` is durable.
    pub(super) fn wait_visible(&self, generation: Generation) -> Result<()> {
        let mut stage = self.stage.lock();
        while self.visible() < generation {
            self.check()?;
            if stage.frame.count() > 0 && !stage.syncing {
                self.sync_group(stage);
                stage = self.stage.lock();
            } else {
                self.synced.wait(&mut stage);
            }
        }
        Ok(())
    }

    /// Replaces the layers after a fold and wakes the commits that found no room.
    pub(super) fn swap_layers(&self, change: impl FnOnce(&Layers) -> Layers) {
        let stage = self.stage.lock();
        let layers = change(&self.layers.load());
        self.layers.store(Arc::new(layers));
        drop(stage);
        self.room.notify_waiters();
    }
}

/// The arguments of [`FileWriter::new`].
pub(super) struct Parts {
    pub(super) env: Env,
    pub(super) retention: Arc<Retention>,
    pub(super) layers: Layers,
    pub(super) log: Log,
    pub(super) overlay_bytes: u64,
    pub(super) group_bytes: usize,
    pub(super) background: bool,
    pub(super) generation: Generation,
    pub(super) time: Timestamp,
}

/// Makes sure that a staged commit is written, even if its caller stops waiting.
struct LeadOnDrop<'a>(&'a FileWriter);

impl Drop for LeadOnDrop<'_> {
    fn drop(&mut self) {
        self.0.lead();
    }
}

/// Commits wait while this guard exists.
pub(super) struct Held<'a>(&'a FileWriter);

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.stage.lock().held -= 1;
        self.0.room.notify_waiters();
    }
}

pub(super) struct StopOnPanic<'a>(&'a FileWriter);

impl Drop for StopOnPanic<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            self.0.stop(&StoreError::corrupt("the store in memory", "an invariant was broken"));
        }
    }
}

/// Notifies callers that wait for a newer generation. This happens without the lock, so a newer generation may have
/// been announced already; the announced generation never falls.
fn announce(latest: &watch::Sender<Generation>, generation: Generation) {
    latest.send_if_modified(|latest| {
        let newer = generation > *latest;
        *latest = generation.max(*latest);
        newer
    });
}

/// Lets other tasks of this thread run once.
async fn yield_once() {
    let mut yielded = false;
    std::future::poll_fn(|context| {
        if std::mem::replace(&mut yielded, true) {
            return Poll::Ready(());
        }
        context.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_late_announcement_does_not_replace_a_newer_generation() {
        let latest = watch::Sender::new(Generation(1));
        let waiting = latest.subscribe();
        for generation in [2, 4, 3] {
            announce(&latest, Generation(generation));
        }
        assert_eq!(*waiting.borrow(), Generation(4));
    }
}
