//! Everything that is done to a lock goes by its lane: operations that come while a commit is on its way share the next
//! one. A lock that nothing is done to has no lane.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::{OwnedMutexGuard, oneshot, watch};

use crate::errand::{Awaited, Errand};
use crate::lock::error::{LockError, LockRefused, Result};
use crate::lock::table::{MOST_GRANTS, Plan, Table, Told};
use crate::lock::{LockKind, LockName, Owner};
use crate::store::{Check, Commit, ErrorKind, Outcome, Receipt, Refusal, StoreError, Write};
use crate::workflow::engine::Inner;
use crate::workflow::post::Mail;
use crate::workflow::run::Effect;
use crate::workflow::{ExecutionId, WorkflowError};

/// How many operations share a commit.
const MOST: usize = 128;

/// How many lanes are kept that nobody uses.
const MOST_LANES: usize = 1024;

/// Who has to wait for a lock anyway may wait so long for others to share a commit with, if the lock is busy.
const COMPANY: Duration = Duration::from_millis(1);

/// Something to be done to a lock.
#[derive(Debug, Clone)]
pub(crate) enum Ask {
    Acquire(Want),
    /// Lets go of a lock, or of a place in its queue; with a name of the owner's, only of what was entered by that.
    Release {
        ticket: u64,
        id: Option<Vec<u8>>,
    },
    /// The same, by the owner's own name for it, and with the message that may tell of it. Nothing is let go of while
    /// somebody else hears of it who has made the same request.
    Abandon {
        owner: Owner,
        id: Vec<u8>,
        ear: Option<Ear>,
    },
    /// Lets go of a place in the queue, unless it was granted by now.
    Withdraw {
        ticket: u64,
    },
    /// An operator has somebody let go.
    Force {
        ticket: u64,
        reason: String,
    },
    /// Somebody who waits is not to.
    Refuse {
        ticket: u64,
        why: LockRefused,
    },
    /// Nobody uses it any more.
    Remove,
    /// Goes on with what one commit could not hold.
    Grant,
}

/// A request for a lock.
#[derive(Debug, Clone)]
pub(crate) struct Want {
    pub(crate) owner: Owner,
    pub(crate) kind: LockKind,
    pub(crate) permits: u32,
    /// The owner's own name for the request.
    pub(crate) id: Vec<u8>,
    /// Whether it may have been made before.
    pub(crate) is_known: bool,
    pub(crate) waits: bool,
    pub(crate) is_reentrant: bool,
    /// Told of what becomes of it, if a session has made it.
    pub(crate) ear: Option<Ear>,
}

/// What became of an operation.
#[derive(Debug, Clone)]
pub(crate) enum Answer {
    Granted(u64),
    Queued(u64),
    /// It would have had to wait.
    Busy,
    /// Whether there was anything to release.
    Released(bool),
    Withdrawn,
    /// There is no such request.
    Gone,
}

/// What becomes of a session's request.
#[derive(Debug, Clone)]
pub(crate) enum Heard {
    Waits,
    Granted,
    Gone(Gone),
}

/// Why a request is no more.
#[derive(Debug, Clone)]
pub(crate) enum Gone {
    Refused(LockRefused),
    SessionLost,
    /// Its owner has let go of it.
    LetGo,
}

/// Hears what becomes of a request.
pub(crate) type Ear = Arc<watch::Sender<Heard>>;

/// Somebody whose own record goes into the same commit.
pub(crate) trait Rider: Send {
    /// The execution that it is.
    fn execution(&self) -> &ExecutionId;

    /// Adds itself to the commit.
    fn board(&mut self, commit: Commit, answer: &Answer) -> Commit;

    /// The commit has landed.
    fn landed(&mut self, receipt: &Receipt);

    /// The commit was refused. Tells whether that was for a reason of its own: then the operation is dropped.
    fn refused(&mut self, refusal: &Refusal) -> bool;

    /// The store did not take the commit, or did not tell whether it did.
    fn failed(&mut self, error: &StoreError);

    /// Nothing is to be written for it.
    fn rests(&mut self, answer: &Result<Answer>);
}

pub(crate) struct Job {
    ask: Ask,
    rider: Option<Box<dyn Rider>>,
    answer: oneshot::Sender<Result<Answer>>,
}

impl Job {
    fn settle(self, answer: Result<Answer>) {
        let _ = self.answer.send(answer);
    }
}

/// What is done to one lock.
pub(crate) struct Lane {
    lock: LockName,
    queue: Mutex<Queue>,
    /// Held by whoever changes the lock.
    pub(super) table: Arc<tokio::sync::Mutex<Option<Table>>>,
}

#[derive(Default)]
struct Queue {
    jobs: VecDeque<Job>,
    is_working: bool,
    /// The work of somebody outside, who may not be polled as long as he likes: whoever comes has it go on by itself.
    errand: Option<Errand>,
    /// Whether somebody sees to it that nobody is left behind.
    is_guarded: bool,
    /// How many operations the next commit may have, and how many may be granted the lock by it.
    most: usize,
    most_grants: usize,
    /// When the last commit landed, by the clock that only goes forward.
    landed: Option<Duration>,
}

/// Keeps everybody else from changing a lock.
pub(crate) type Held = OwnedMutexGuard<Option<Table>>;

/// The lanes of locks that something is done to.
pub(crate) type Lanes = HashMap<LockName, Arc<Lane>>;

impl Inner {
    pub(super) fn lane(&self, lock: &LockName) -> Arc<Lane> {
        let mut lanes = self.locks.lanes.lock();
        if let Some(lane) = lanes.get(lock) {
            return lane.clone();
        }
        if lanes.len() >= MOST_LANES {
            lanes.retain(|_, lane| Arc::strong_count(lane) > 1);
        }
        let queue = Queue { most: MOST, most_grants: MOST_GRANTS, ..Queue::default() };
        let lane = Arc::new(Lane { lock: lock.clone(), queue: Mutex::new(queue), table: Arc::default() });
        lanes.insert(lock.clone(), lane.clone());
        lane
    }

    /// Has something done to a lock. It is done though nobody waits for the answer.
    pub(crate) async fn ask(
        self: &Arc<Inner>,
        lock: &LockName,
        ask: Ask,
        rider: Option<Box<dyn Rider>>,
    ) -> Result<Answer> {
        self.asked(lock, ask, rider).await.unwrap_or(Err(LockError::Stopped))
    }

    /// Puts it into the lane. Whoever finds that idle works for it, until he has his own answer.
    fn asked(self: &Arc<Inner>, lock: &LockName, ask: Ask, rider: Option<Box<dyn Rider>>) -> Awaited<Result<Answer>> {
        let (answer, answered) = oneshot::channel();
        let (lane, is_outside) = (self.lane(lock), rider.is_none());
        let mut queue = lane.queue.lock();
        queue.jobs.push_back(Job { ask, rider, answer });
        if std::mem::replace(&mut queue.is_working, true) {
            let errand = queue.errand.take();
            drop(queue);
            errand.iter().for_each(Errand::leave);
            return Awaited::new(None, answered);
        }
        let errand = Errand::new(&self.runtime, Worker::on(self, &lane, true).work());
        queue.errand = is_outside.then(|| errand.clone());
        Awaited::new(Some(errand), answered)
    }
}

/// Sees to it that those whom workers leave behind, because they have to wait anyway, are not left for long.
struct Guard {
    engine: Arc<Inner>,
    lane: Arc<Lane>,
    /// Whether it is still for it to see to them.
    is_on: bool,
}

impl Guard {
    async fn keep(mut self) {
        self.engine.store.env().sleep(COMPANY).await;
        let is_wanted = {
            let mut queue = self.lane.queue.lock();
            (queue.is_guarded, self.is_on) = (false, false);
            // Whoever works sees to them, or leaves them to the next guard.
            let is_wanted = !queue.is_working && !queue.jobs.is_empty();
            queue.is_working |= is_wanted;
            is_wanted
        };
        if is_wanted {
            Worker::on(&self.engine, &self.lane, false).work().await;
        }
    }
}

impl Drop for Guard {
    /// If it ends because the runtime does, those who wait are told by the end of their jobs.
    fn drop(&mut self) {
        if !self.is_on {
            return;
        }
        let left = {
            let mut queue = self.lane.queue.lock();
            queue.is_guarded = false;
            if queue.is_working { VecDeque::new() } else { std::mem::take(&mut queue.jobs) }
        };
        drop(left);
    }
}

struct Worker {
    engine: Arc<Inner>,
    lane: Arc<Lane>,
    /// Whether it may wait for company.
    is_patient: bool,
    /// Whether the lane is left to others.
    is_idle: bool,
}

impl Drop for Worker {
    /// A worker ends by itself when nothing is left. If it ends because the runtime does, those who wait are told by
    /// the end of their jobs.
    fn drop(&mut self) {
        if self.is_idle {
            return;
        }
        let left = {
            let mut queue = self.lane.queue.lock();
            queue.is_working = false;
            std::mem::take(&mut queue.jobs)
        };
        drop(left);
    }
}

impl Worker {
    /// One that begins; whoever starts it has seen to it that it is the only one.
    fn on(engine: &Arc<Inner>, lane: &Arc<Lane>, is_patient: bool) -> Worker {
        Worker { engine: engine.clone(), lane: lane.clone(), is_patient, is_idle: false }
    }

    /// Works until there is nothing to do, or only what can wait for company.
    async fn work(mut self) {
        let mut jobs = Vec::new();
        let mut from_store = false;
        loop {
            if !self.take(&mut jobs) {
                return;
            }
            let mut held = self.lane.table.clone().lock_owned().await;
            if self.wants_company(&jobs, &held) {
                drop(held);
                if self.put_back(&mut jobs) {
                    return;
                }
                continue;
            }
            let count = jobs.len();
            // If this ends in the middle, what was planned is not taken for what is.
            let mut table = held.take();
            jobs = self.round(&mut table, std::mem::take(&mut jobs), from_store).await;
            *held = table;
            (from_store, self.is_patient) = (!jobs.is_empty(), true);
            if held.is_none() && jobs.len() == count {
                // Somebody else was faster, who may be in another process.
                tokio::task::yield_now().await;
            }
        }
    }

    /// Leaves what it has taken to others, unless some have come meanwhile: they rely on it.
    fn put_back(&mut self, jobs: &mut Vec<Job>) -> bool {
        let mut queue = self.lane.queue.lock();
        if !queue.jobs.is_empty() {
            return false;
        }
        queue.jobs.extend(jobs.drain(..));
        (queue.is_working, self.is_idle) = (false, true);
        let is_guarded = std::mem::replace(&mut queue.is_guarded, true);
        drop(queue);
        if !is_guarded {
            let guard = Guard { engine: self.engine.clone(), lane: self.lane.clone(), is_on: true };
            self.engine.runtime.spawn(guard.keep());
        }
        true
    }

    /// Takes what waits. When there is nothing, the lane is idle.
    fn take(&mut self, jobs: &mut Vec<Job>) -> bool {
        let mut queue = self.lane.queue.lock();
        let free = queue.most.saturating_sub(jobs.len()).min(queue.jobs.len());
        jobs.extend(queue.jobs.drain(..free));
        if jobs.is_empty() {
            (queue.is_working, self.is_idle) = (false, true);
        }
        !jobs.is_empty()
    }

    /// Whether all that is asked for is to wait, on a lock that others are at.
    fn wants_company(&self, jobs: &[Job], table: &Option<Table>) -> bool {
        let Some(table) = table.as_ref().filter(|_| self.is_patient) else { return false };
        let is_patient = |job: &Job| match &job.ask {
            Ask::Acquire(want) => want.waits && table.is_busy(want.permits),
            _ => false,
        };
        let now = self.engine.store.env().monotonic();
        let is_hot = self.lane.queue.lock().landed.is_some_and(|landed| now.saturating_sub(landed) < COMPANY);
        is_hot && jobs.len() < MOST && jobs.iter().all(is_patient)
    }

    /// Does what is asked in one commit. Gives back what is to be tried again.
    async fn round(&self, held: &mut Option<Table>, jobs: Vec<Job>, from_store: bool) -> Vec<Job> {
        if self.engine.is_stopped() {
            jobs.into_iter().for_each(|job| job.settle(Err(LockError::Stopped)));
            return Vec::new();
        }
        let mut jobs = jobs;
        match self.planned(held, &mut jobs, from_store).await {
            Ok(Some(batch)) => self.commit(held, batch).await,
            // Somebody has ended meanwhile.
            Ok(None) => {
                *held = None;
                jobs
            }
            Err(error) => {
                *held = None;
                for mut job in jobs {
                    if let (Some(rider), LockError::Store(error)) = (&mut job.rider, &error) {
                        rider.failed(error);
                    }
                    job.settle(Err(error.clone()));
                }
                Vec::new()
            }
        }
    }

    async fn planned(&self, held: &mut Option<Table>, jobs: &mut Vec<Job>, from_store: bool) -> Result<Option<Batch>> {
        let (engine, lock) = (&*self.engine, &self.lane.lock);
        let table = match held {
            Some(table) => table,
            None => held.insert(Table::read(engine, lock).await?),
        };
        let mut mail = Mail::default();
        let mut plan = Plan::new(engine, lock, table, from_store);
        plan.most_grants = self.lane.queue.lock().most_grants;
        let mut answers = Vec::with_capacity(jobs.len());
        let mut is_changed = false;
        let asks: Vec<Ask> = jobs.iter().map(|job| job.ask.clone()).collect();
        for ask in &asks {
            plan.is_changed = false;
            let answer = match plan.ask(ask, &mut mail).await {
                Err(LockError::Store(error)) => return Err(error.into()),
                answer => answer,
            };
            answers.push((answer, plan.is_changed));
            is_changed |= plan.is_changed;
        }
        plan.is_changed = is_changed;
        let (checks, writes, told, is_unfinished) = plan.close();
        let boards = jobs.iter().zip(&answers).filter(|(_, (answer, changes))| *changes && answer.is_ok());
        let boards = boards.filter_map(|(job, _)| Some(job.rider.as_ref()?.execution().clone())).collect();
        let posted = match mail.effects(engine, from_store, &boards).await {
            Ok(posted) => posted,
            Err(WorkflowError::Store(error)) => return Err(error.into()),
            Err(_) => return Ok(None),
        };
        let jobs = std::mem::take(jobs).into_iter().zip(answers);
        let jobs = jobs.map(|(job, (answer, changes))| Done { job, answer, changes }).collect();
        Ok(Some(Batch { jobs, checks, writes, posted, told, is_unfinished }))
    }

    async fn commit(&self, held: &mut Option<Table>, mut batch: Batch) -> Vec<Job> {
        let engine = &self.engine;
        if batch.writes.is_empty() {
            batch.jobs.into_iter().for_each(|done| self.answered(done));
            return Vec::new();
        }
        let commit = batch.checks.drain(..).fold(Commit::new(), Commit::check);
        let owner = commit.checks().len();
        let commit = commit.check(engine.lock_check(&self.lane.lock));
        let mut commit = batch.writes.drain(..).fold(commit, Commit::write);
        let mut from = commit.writes().len();
        for effect in &batch.posted {
            commit = effect.checks.iter().cloned().fold(commit, Commit::check);
            commit = effect.writes.iter().cloned().fold(commit, Commit::write);
        }
        for done in &mut batch.jobs {
            if let (true, Ok(answer), Some(rider)) = (done.changes, &done.answer, &mut done.job.rider) {
                commit = rider.board(commit, answer);
            }
        }
        match engine.store.commit(commit).await {
            Ok(Outcome::Applied(receipt)) => {
                held.iter_mut().for_each(Table::landed);
                // Who has come and been granted it in one commit has to be listened to first. Who has it now goes on
                // first: the one who is told last.
                self.settled(batch.jobs, &receipt);
                engine.tell_requests(&self.lane.lock, batch.told);
                batch.posted.into_iter().for_each(|effect| effect.tell(engine, &mut from, &receipt));
                if batch.is_unfinished {
                    engine.grant_on(&self.lane.lock);
                }
                Vec::new()
            }
            Ok(Outcome::Refused(refusal)) => {
                *held = None;
                self.refused(batch.jobs, &refusal, owner)
            }
            Err(error) => {
                *held = None;
                self.failed(batch.jobs, error)
            }
        }
    }

    fn settled(&self, jobs: Vec<Done>, receipt: &Receipt) {
        {
            let mut queue = self.lane.queue.lock();
            (queue.most, queue.most_grants) = (MOST, MOST_GRANTS);
            queue.landed = Some(self.engine.store.env().monotonic());
        }
        for mut done in jobs {
            if let Some(mut rider) = done.job.rider.take_if(|_| done.changes) {
                rider.landed(receipt);
            }
            self.answered(done);
        }
    }

    /// Answers an operation that has come to something. Who waits is listened to from here on, before anything else can
    /// be granted.
    fn answered(&self, done: Done) {
        let Done { mut job, answer, .. } = done;
        if let Ask::Acquire(want) = &job.ask {
            match &answer {
                Ok(Answer::Granted(ticket)) => self.engine.hears(&self.lane.lock, *ticket, want, true),
                Ok(Answer::Queued(ticket)) => self.engine.hears(&self.lane.lock, *ticket, want, false),
                _ => {}
            }
        }
        if let Some(rider) = &mut job.rider {
            rider.rests(&answer);
        }
        job.settle(answer);
    }

    fn refused(&self, jobs: Vec<Done>, refusal: &Refusal, owner: usize) -> Vec<Job> {
        let is_fenced = refusal.failed.iter().any(|failed| failed.index == owner);
        let lost = |want: &Want| match &want.owner {
            Owner::Session(session) => {
                let key = self.engine.locks.spaces.session(*session);
                let is_lost = refusal.failed.iter().any(|failed| failed.check == Check::Present(key.clone()));
                is_lost.then(|| LockError::SessionLost { session: session.to_string() })
            }
            Owner::Execution(_) => None,
        };
        let mut again = Vec::new();
        for mut done in jobs {
            if let (true, Some(rider)) = (done.changes, &mut done.job.rider)
                && rider.refused(refusal)
            {
                continue;
            }
            match &done.job.ask {
                _ if is_fenced => {
                    self.engine.fenced();
                    done.job.settle(Err(LockError::Stopped));
                }
                Ask::Acquire(want) => match lost(want) {
                    Some(error) => done.job.settle(Err(error)),
                    None => again.push(done.job),
                },
                _ => again.push(done.job),
            }
        }
        again
    }

    /// Has the next commit grant the lock to fewer, whose records may be large; whether that can be.
    fn grants_fewer(&self) -> bool {
        let mut queue = self.lane.queue.lock();
        let can_be = queue.most_grants > 1;
        queue.most_grants = (queue.most_grants / 8).max(1);
        can_be
    }

    fn failed(&self, jobs: Vec<Done>, error: StoreError) -> Vec<Job> {
        // More than a commit can hold, or a damaged record of one of them. Nothing was written, and half of it may fit.
        if matches!(error.kind(), ErrorKind::Invalid | ErrorKind::Corrupt) && jobs.len() > 1 {
            self.lane.queue.lock().most = jobs.len() / 2;
            let mut jobs: VecDeque<Job> = jobs.into_iter().map(|done| done.job).collect();
            let rest = jobs.split_off(jobs.len() / 2);
            let mut queue = self.lane.queue.lock();
            rest.into_iter().rev().for_each(|job| queue.jobs.push_front(job));
            return jobs.into();
        }
        if error.kind() == ErrorKind::Invalid && self.grants_fewer() {
            return jobs.into_iter().map(|done| done.job).collect();
        }
        self.engine.doubt();
        for mut done in jobs {
            if let Some(rider) = &mut done.job.rider {
                rider.failed(&error);
            }
            done.job.settle(Err(error.clone().into()));
        }
        Vec::new()
    }
}

/// Operations that are to be one commit.
struct Batch {
    jobs: Vec<Done>,
    checks: Vec<Check>,
    writes: Vec<Write>,
    posted: Vec<Effect>,
    told: Vec<Told>,
    is_unfinished: bool,
}

/// An operation and what it came to.
struct Done {
    job: Job,
    answer: Result<Answer>,
    /// Whether it changes anything.
    changes: bool,
}

impl Effect {
    /// Tells whoever is to be told that it has landed. The writes of it begin at `from`, which is moved behind them.
    pub(crate) fn tell(self, engine: &Arc<Inner>, from: &mut usize, receipt: &Receipt) {
        let writes = *from..*from + self.writes.len();
        *from = writes.end;
        if let Some(landed) = self.landed {
            landed(engine, receipt.generation, &receipt.revs[writes]);
        }
    }
}
