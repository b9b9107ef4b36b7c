//! Many callers, one key, few commits. A lane is the queue of one key: jobs that come while a commit is on its way
//! share the next one. This file owns the queue, the turn and the commit; what a job does to the key is the plan's.
//!
//! Jobs are done in the order in which they came, by a task of the lane's: a caller that is dropped or not polled
//! delays no other caller. A lane that has nothing to do is gone.

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

pub(crate) use part::{Landing, Part, Placed, Tag, as_found};
pub(crate) use rider::Rider;
pub(crate) use runtime::Runtime;

/// What is done to the keys of a kind, and how jobs become commits.
pub(crate) trait Plan: Send + Sync + Sized + 'static {
    type Key: Clone + Eq + Hash + Send + Sync + 'static;
    type Job: Send + 'static;
    /// What a busy lane knows of its key from one commit to the next. It is forgotten when the lane is idle.
    type Known: Default + Send + 'static;
    /// Jobs that share a commit.
    type Batch: Send + 'static;

    /// How many jobs share a commit at the most.
    const MOST: usize;

    fn lanes(&self) -> &Lanes<Self>;
    fn runtime(&self) -> &Runtime;
    fn store(&self) -> &Store;

    /// Makes a commit of the first jobs, of which it may take `most`. Jobs that need no commit are answered here;
    /// without any that need one, there is nothing to commit.
    fn plan(
        self: &Arc<Self>,
        key: &Self::Key,
        known: &mut Self::Known,
        jobs: &mut VecDeque<Self::Job>,
        most: usize,
    ) -> impl Future<Output = Option<(Commit, Self::Batch)>> + Send;

    /// For how long jobs are held back so that they share a commit with the next that come. Not for `MOST` of them.
    fn holds_back(self: &Arc<Self>, _known: &Self::Known, _jobs: &VecDeque<Self::Job>) -> Option<Duration> {
        None
    }

    /// How many jobs a batch holds.
    fn size(batch: &Self::Batch) -> usize;

    /// The commit has landed: the jobs are answered.
    fn landed(self: &Arc<Self>, key: &Self::Key, known: &mut Self::Known, batch: Self::Batch, receipt: &Receipt);

    /// The commit was refused: jobs that are to be tried again go back to the front of the queue.
    fn refused(
        self: &Arc<Self>,
        key: &Self::Key,
        known: &mut Self::Known,
        batch: Self::Batch,
        refusal: Refusal,
        jobs: &mut VecDeque<Self::Job>,
    ) -> impl Future<Output = ()> + Send;

    /// The commit was more than the store takes at once, and nothing of it was written: all jobs go back to the front,
    /// and are tried with fewer beside them.
    fn split(self: &Arc<Self>, known: &mut Self::Known, batch: Self::Batch, jobs: &mut VecDeque<Self::Job>);

    /// Makes the next commit of a single job smaller, if that is possible.
    fn shrink(self: &Arc<Self>, _known: &mut Self::Known) -> bool {
        false
    }

    /// The store did not take the commit, or did not say whether it has. `jobs` are those behind it.
    fn failed(
        self: &Arc<Self>,
        known: &mut Self::Known,
        batch: Self::Batch,
        error: StoreError,
        jobs: &mut VecDeque<Self::Job>,
    );
}

/// The lanes of a kind that have something to do.
pub(crate) struct Lanes<P: Plan> {
    busy: Mutex<HashMap<P::Key, Queue<P::Job>>>,
}

struct Queue<J> {
    entries: VecDeque<Entry<J>>,
    /// Woken when a job comes for which others are held back.
    held_back: Option<Waker>,
}

/// What waits in a lane.
enum Entry<J> {
    Job(J),
    /// A commit that is made elsewhere, and has the key to itself as long as the turn lasts.
    Turn(oneshot::Sender<Turn>),
}

/// Keeps a lane from making commits as long as it is there.
pub(crate) struct Turn(#[allow(dead_code)] oneshot::Sender<()>);

impl<P: Plan> Default for Lanes<P> {
    fn default() -> Lanes<P> {
        Lanes { busy: Mutex::default() }
    }
}

impl<P: Plan> Lanes<P> {
    /// Puts a job into the lane of a key. Without a runtime that could do it, the job is given back.
    pub(crate) fn submit(plan: &Arc<P>, key: &P::Key, job: P::Job) -> Result<(), P::Job> {
        Lanes::enter(plan, key, Entry::Job(job)).map_err(|entry| match entry {
            Entry::Job(job) => job,
            Entry::Turn(_) => unreachable!("what comes back is what was put in"),
        })
    }

    /// Waits for a turn of its own in the lane of a key. None if the lane's runtime has ended.
    pub(crate) async fn turn(plan: &Arc<P>, key: &P::Key) -> Option<Turn> {
        let (turn, given) = oneshot::channel();
        Lanes::enter(plan, key, Entry::Turn(turn)).ok()?;
        given.await.ok()
    }

    fn enter(plan: &Arc<P>, key: &P::Key, entry: Entry<P::Job>) -> Result<(), Entry<P::Job>> {
        let mut busy = plan.lanes().busy.lock();
        if let Some(queue) = busy.get_mut(key) {
            queue.entries.push_back(entry);
            queue.held_back.take().into_iter().for_each(Waker::wake);
            return Ok(());
        }
        let Some(runtime) = plan.runtime().handle() else { return Err(entry) };
        busy.insert(key.clone(), Queue { entries: VecDeque::from([entry]), held_back: None });
        drop(busy);
        runtime.spawn(Worker { plan: plan.clone(), key: key.clone(), is_idle: false }.work());
        Ok(())
    }

    #[cfg(test)]
    pub(crate) fn is_idle(&self) -> bool {
        self.busy.lock().is_empty()
    }
}

struct Worker<P: Plan> {
    plan: Arc<P>,
    key: P::Key,
    /// Whether the queue is gone. One that is there from then on is another worker's.
    is_idle: bool,
}

impl<P: Plan> Drop for Worker<P> {
    /// A worker ends by itself when nothing is left. If it ends because the runtime does, callers are told by the end
    /// of their jobs.
    fn drop(&mut self) {
        if !self.is_idle {
            // Jobs hold what is the callers' own; it is not to be dropped under the lock.
            let left = self.plan.lanes().busy.lock().remove(&self.key);
            drop(left);
        }
    }
}

impl<P: Plan> Worker<P> {
    async fn work(mut self) {
        let (mut known, mut jobs, mut most) = (P::Known::default(), VecDeque::new(), P::MOST);
        let mut patience = None;
        loop {
            if let Some(turn) = self.fill(&mut jobs) {
                // What another commit leaves is not known here.
                known = P::Known::default();
                let (held, given_back) = oneshot::channel();
                if turn.send(Turn(held)).is_ok() {
                    let _ = given_back.await;
                }
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
                    most = P::MOST.min(most.saturating_mul(2));
                    self.plan.landed(&self.key, &mut known, batch, &receipt);
                }
                Ok(Outcome::Refused(refusal)) => {
                    self.plan.refused(&self.key, &mut known, batch, refusal, &mut jobs).await;
                    if jobs.len() == behind + size {
                        // Another process was faster: it may be on this very thread.
                        tokio::task::yield_now().await;
                    }
                }
                // More than a commit can hold, or a damaged record of one of them. Nothing was written.
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

    /// Waits for another job, for so long at the most. A turn is not kept waiting.
    async fn has_company(&self, sleep: &mut Sleep) -> bool {
        std::future::poll_fn(|context| {
            let mut busy = self.plan.lanes().busy.lock();
            let queue = busy.get_mut(&self.key).expect("a worker has a queue until it lets go of it");
            match queue.entries.front() {
                Some(entry) => Poll::Ready(matches!(entry, Entry::Job(_))),
                None => {
                    queue.held_back = Some(context.waker().clone());
                    drop(busy);
                    sleep.as_mut().poll(context).map(|()| false)
                }
            }
        })
        .await
    }

    /// Takes the jobs that wait, up to the next turn; that is given if nothing is before it. When there is neither, the
    /// lane is gone.
    fn fill(&mut self, jobs: &mut VecDeque<P::Job>) -> Option<oneshot::Sender<Turn>> {
        let mut busy = self.plan.lanes().busy.lock();
        let queue = busy.get_mut(&self.key).expect("a worker has a queue until it lets go of it");
        while jobs.len() < P::MOST && matches!(queue.entries.front(), Some(Entry::Job(_))) {
            if let Some(Entry::Job(job)) = queue.entries.pop_front() {
                jobs.push_back(job);
            }
        }
        if !jobs.is_empty() {
            return None;
        }
        match queue.entries.pop_front() {
            Some(Entry::Turn(turn)) => return Some(turn),
            Some(Entry::Job(_)) => unreachable!("all jobs at the front were taken"),
            None => {}
        }
        busy.remove(&self.key);
        self.is_idle = true;
        None
    }
}
