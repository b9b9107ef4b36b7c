//! Many callers, one key, few commits. A lane is the queue of one key: jobs that come while a commit is on its way
//! share the next one. This file owns the queue, the turn and the commit; the plan decides what a job does to the key.
//!
//! A task of the lane does the jobs in the order in which they came, so a caller that is dropped or not polled delays
//! no other caller. A lane without jobs is removed.

mod kept;
mod once;
mod part;
mod rider;
mod runtime;

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::hash::Hash;
use std::sync::Arc;
use std::task::{Poll, Waker};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::store::{Commit, ErrorKind, Outcome, Receipt, Refusal, Sleep, Store, StoreError};

pub(crate) use kept::KeptAnswers;
pub(crate) use once::{ONCE, OnceCall, OnceFound, OnceSpace};
pub use once::{Once, OnceError};
pub(crate) use part::{Landing, Part, Placed, Tag, as_found};
pub(crate) use rider::Rider;
pub(crate) use runtime::Runtime;

/// How jobs on keys of one kind become commits.
pub(crate) trait LanePlan: Send + Sync + Sized + 'static {
    type Key: Clone + Eq + Hash + Send + Sync + 'static;
    type Job: Send + 'static;
    /// What a busy lane remembers of its key from one commit to the next. It is dropped when the lane is idle.
    type Known: Default + Send + 'static;
    /// Jobs that share a commit.
    type Batch: Send + 'static;

    /// The most jobs that share a commit.
    const MOST: usize;

    fn lanes(&self) -> &Lanes<Self>;
    fn runtime(&self) -> &Runtime;
    fn store(&self) -> &Store;

    /// Makes a commit of the first jobs, at most `most` of them. Jobs that need no commit are answered here. Returns
    /// `None` if no job needs a commit.
    fn plan(
        self: &Arc<Self>,
        key: &Self::Key,
        known: &mut Self::Known,
        jobs: &mut VecDeque<Self::Job>,
        most: usize,
    ) -> impl Future<Output = Option<(Commit, Self::Batch)>> + Send;

    /// How long jobs are held back so that they share a commit with the next jobs. A lane with `MOST` jobs is not held
    /// back.
    fn holds_back(self: &Arc<Self>, _known: &Self::Known, _jobs: &VecDeque<Self::Job>) -> Option<Duration> {
        None
    }

    /// The number of jobs in a batch.
    fn size(batch: &Self::Batch) -> usize;

    /// The commit has landed. Answers the jobs.
    fn landed(self: &Arc<Self>, key: &Self::Key, known: &mut Self::Known, batch: Self::Batch, receipt: &Receipt);

    /// The commit was refused. Puts the jobs that are tried again back to the front of the queue.
    fn refused(
        self: &Arc<Self>,
        key: &Self::Key,
        known: &mut Self::Known,
        batch: Self::Batch,
        refusal: Refusal,
        jobs: &mut VecDeque<Self::Job>,
    ) -> impl Future<Output = ()> + Send;

    /// The commit was larger than the store accepts, and nothing of it was written. Puts all jobs back to the front of
    /// the queue; the next commit has fewer of them.
    fn split(self: &Arc<Self>, known: &mut Self::Known, batch: Self::Batch, jobs: &mut VecDeque<Self::Job>);

    /// Makes the next commit of a single job smaller. Returns false if that is not possible.
    fn shrink(self: &Arc<Self>, _known: &mut Self::Known) -> bool {
        false
    }

    /// The store failed the commit, or it is unknown whether the commit was applied. `jobs` are the jobs behind it.
    fn failed(
        self: &Arc<Self>,
        known: &mut Self::Known,
        batch: Self::Batch,
        error: StoreError,
        jobs: &mut VecDeque<Self::Job>,
    );
}

/// The busy lanes of one kind.
pub(crate) struct Lanes<P: LanePlan> {
    busy: Mutex<HashMap<P::Key, LaneQueue<P::Job>>>,
}

struct LaneQueue<J> {
    entries: VecDeque<LaneEntry<J>>,
    /// Woken by the next job while the jobs of the lane are held back.
    held_back: Option<Waker>,
}

/// An entry of a lane's queue.
enum LaneEntry<J> {
    Job(J),
    /// A commit that is made elsewhere. It has the key to itself as long as the turn lasts.
    Turn(oneshot::Sender<Turn>),
}

/// Keeps a lane from making commits until it is dropped.
pub(crate) struct Turn(#[allow(dead_code)] oneshot::Sender<()>);

impl<P: LanePlan> Default for Lanes<P> {
    fn default() -> Lanes<P> {
        Lanes { busy: Mutex::default() }
    }
}

impl<P: LanePlan> Lanes<P> {
    /// Puts a job into the lane of a key. Returns the job if there is no runtime to do it.
    pub(crate) fn submit(plan: &Arc<P>, key: &P::Key, job: P::Job) -> Result<(), P::Job> {
        Lanes::enter(plan, key, LaneEntry::Job(job)).map_err(|entry| match entry {
            LaneEntry::Job(job) => job,
            LaneEntry::Turn(_) => unreachable!("a rejected entry is returned unchanged"),
        })
    }

    /// Waits for a turn in the lane of a key. Returns `None` if the lane's runtime has ended.
    pub(crate) async fn turn(plan: &Arc<P>, key: &P::Key) -> Option<Turn> {
        let (turn, given) = oneshot::channel();
        Lanes::enter(plan, key, LaneEntry::Turn(turn)).ok()?;
        given.await.ok()
    }

    fn enter(plan: &Arc<P>, key: &P::Key, entry: LaneEntry<P::Job>) -> Result<(), LaneEntry<P::Job>> {
        let mut busy = plan.lanes().busy.lock();
        if let Some(queue) = busy.get_mut(key) {
            queue.entries.push_back(entry);
            queue.held_back.take().into_iter().for_each(Waker::wake);
            return Ok(());
        }
        let Some(runtime) = plan.runtime().handle() else { return Err(entry) };
        busy.insert(key.clone(), LaneQueue { entries: VecDeque::from([entry]), held_back: None });
        drop(busy);
        runtime.spawn(Worker { plan: plan.clone(), key: key.clone(), is_idle: false }.work());
        Ok(())
    }

    #[cfg(test)]
    pub(crate) fn is_idle(&self) -> bool {
        self.busy.lock().is_empty()
    }
}

struct Worker<P: LanePlan> {
    plan: Arc<P>,
    key: P::Key,
    /// True if the worker has removed its queue. A queue that exists after that is another worker's.
    is_idle: bool,
}

impl<P: LanePlan> Drop for Worker<P> {
    /// A worker ends when no job is left. If the runtime ends it earlier, its jobs are dropped, and callers notice
    /// that.
    fn drop(&mut self) {
        if !self.is_idle {
            // Jobs hold values of the callers, which must not be dropped while the mutex is held.
            let left = self.plan.lanes().busy.lock().remove(&self.key);
            drop(left);
        }
    }
}

impl<P: LanePlan> Worker<P> {
    async fn work(mut self) {
        let (mut known, mut jobs, mut most) = (P::Known::default(), VecDeque::new(), P::MOST);
        let (mut patience, mut has_landed) = (None, false);
        loop {
            if let Some(turn) = self.fill(&mut jobs, has_landed) {
                // The other commit may change the key.
                known = P::Known::default();
                let (held, given_back) = oneshot::channel();
                if turn.send(Turn(held)).is_ok() {
                    let _ = given_back.await;
                }
                continue;
            }
            if jobs.is_empty() && std::mem::take(&mut has_landed) {
                // The callers that were just answered run first. Often one of them has the next job for this key.
                tokio::task::yield_now().await;
                continue;
            }
            if jobs.is_empty() {
                return;
            }
            if let Some(pause) = self.plan.holds_back(&known, &jobs) {
                let sleep = patience.get_or_insert_with(|| self.plan.store().env().sleep(pause));
                if self.has_company(sleep).await {
                    continue;
                }
            }
            patience = None;
            let Some((commit, batch)) = self.plan.plan(&self.key, &mut known, &mut jobs, most).await else {
                continue;
            };
            let (size, behind) = (P::size(&batch), jobs.len());
            match self.plan.store().commit(commit).await {
                Ok(Outcome::Applied(receipt)) => {
                    (most, has_landed) = (P::MOST.min(most.saturating_mul(2)), true);
                    self.plan.landed(&self.key, &mut known, batch, &receipt);
                }
                Ok(Outcome::Refused(refusal)) => {
                    self.plan.refused(&self.key, &mut known, batch, refusal, &mut jobs).await;
                    if jobs.len() == behind + size {
                        // Another writer was faster. It may need this very thread.
                        tokio::task::yield_now().await;
                    }
                }
                // The commit is too large, or a record of one of the jobs is damaged. Nothing was written.
                Err(error) if matches!(error.kind(), ErrorKind::Invalid | ErrorKind::Corrupt) && size > 1 => {
                    most = (size / 2).max(1);
                    self.plan.split(&mut known, batch, &mut jobs);
                }
                Err(error) if error.kind() == ErrorKind::Invalid && self.plan.shrink(&mut known) => {
                    self.plan.split(&mut known, batch, &mut jobs);
                }
                Err(error) => self.plan.failed(&mut known, batch, error, &mut jobs),
            }
        }
    }

    /// Waits until `sleep` is over, and returns true if another job came. A turn ends the wait.
    async fn has_company(&self, sleep: &mut Sleep) -> bool {
        std::future::poll_fn(|context| {
            let mut busy = self.plan.lanes().busy.lock();
            let queue = busy.get_mut(&self.key).expect("a worker has a queue until it removes it");
            match queue.entries.front() {
                Some(entry) => Poll::Ready(matches!(entry, LaneEntry::Job(_))),
                None => {
                    queue.held_back = Some(context.waker().clone());
                    drop(busy);
                    sleep.as_mut().poll(context).map(|()| false)
                }
            }
        })
        .await
    }

    /// Takes the waiting jobs up to the next turn. Returns the turn if no job is before it. Without either, the lane is
    /// removed, unless it `stays`.
    fn fill(&mut self, jobs: &mut VecDeque<P::Job>, stays: bool) -> Option<oneshot::Sender<Turn>> {
        let mut busy = self.plan.lanes().busy.lock();
        let queue = busy.get_mut(&self.key).expect("a worker has a queue until it removes it");
        while jobs.len() < P::MOST && matches!(queue.entries.front(), Some(LaneEntry::Job(_))) {
            if let Some(LaneEntry::Job(job)) = queue.entries.pop_front() {
                jobs.push_back(job);
            }
        }
        if !jobs.is_empty() {
            return None;
        }
        match queue.entries.pop_front() {
            Some(LaneEntry::Turn(turn)) => return Some(turn),
            Some(LaneEntry::Job(_)) => unreachable!("all jobs at the front were taken"),
            None if stays => return None,
            None => {}
        }
        busy.remove(&self.key);
        self.is_idle = true;
        None
    }
}
