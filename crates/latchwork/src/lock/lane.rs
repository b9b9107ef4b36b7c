//! Every operation on a lock goes through the lock's lane: operations that come while a commit is on its way share the
//! next one. This file makes commits of operations; `table.rs` decides what an operation changes.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{oneshot, watch};

use crate::lane::{LanePlan, Lanes, ONCE, OnceCall, OnceError, Part, Placed, Rider, Runtime};
use crate::lock::error::{LockError, LockRefused, Result};
use crate::lock::service::Service;
use crate::lock::table::{CallerNotice, MOST_GRANTS, Planned, SESSION, Table};
use crate::lock::{LockKind, LockName, Owner};
use crate::node::{ExecutionId, SHARD};
use crate::store::{Check, Commit, Receipt, Refusal, Store, StoreError};

/// How long a waiting request is held back so that it can share the next commit; and how long a lock counts as hot.
const COMPANY: Duration = Duration::from_millis(1);

/// An operation on a lock.
#[derive(Debug, Clone)]
pub(crate) enum Ask {
    Acquire(Want),
    /// Releases a lock or removes a waiting request. With an id, only the acquisition under that id is released.
    Release {
        ticket: u64,
        id: Option<Vec<u8>>,
    },
    /// Releases or removes a request, if it is one of this owner.
    LetGo {
        owner: Owner,
        ticket: u64,
    },
    /// Releases or removes the request with this id of the owner, and its message. Does nothing while another caller of
    /// the same request still listens.
    Abandon {
        owner: Owner,
        id: Vec<u8>,
        ear: Option<Ear>,
    },
    /// Removes a waiting request, unless it is granted by now.
    Withdraw {
        ticket: u64,
    },
    /// An operator releases or removes a request.
    Force {
        ticket: u64,
        reason: String,
    },
    /// Refuses a waiting request.
    Refuse {
        ticket: u64,
        why: LockRefused,
    },
    /// Removes a lock that is not in use.
    Remove(OnceCall),
    /// Continues granting where one commit could not hold all grants.
    Grant,
}

/// A request for a lock.
#[derive(Debug, Clone)]
pub(crate) struct Want {
    pub(crate) owner: Owner,
    pub(crate) kind: LockKind,
    pub(crate) permits: u32,
    /// The owner's id of the request.
    pub(crate) id: Vec<u8>,
    /// True if the request may have been made before.
    pub(crate) is_known: bool,
    pub(crate) waits: bool,
    pub(crate) is_reentrant: bool,
    /// Notified of what becomes of the request, if a session has made it.
    pub(crate) ear: Option<Ear>,
}

/// The answer to an operation.
#[derive(Debug, Clone)]
pub(crate) enum LockAnswer {
    Granted(u64),
    Queued(u64),
    /// The request would have to wait, and must not.
    Busy,
    /// True if there was anything to release.
    Released(bool),
    Withdrawn,
    /// The request does not exist.
    Gone,
}

/// The state of a session's request, as its caller is notified.
#[derive(Debug, Clone)]
pub(crate) enum Heard {
    Waits,
    Granted,
    Gone(Gone),
}

/// Why a request no longer exists.
#[derive(Debug, Clone)]
pub(crate) enum Gone {
    Refused(LockRefused),
    SessionLost,
    /// Its owner has released it.
    LetGo,
}

/// Through this, a caller is notified of what becomes of its request.
pub(crate) type Ear = Arc<watch::Sender<Heard>>;

/// An execution, and its record, which goes into the same commit as its operation on a lock.
pub(crate) type LockRider = (ExecutionId, Box<dyn Rider<LockAnswer, Result<LockAnswer>>>);

pub(crate) struct LockJob {
    ask: Ask,
    rider: Option<LockRider>,
    answer: oneshot::Sender<Result<LockAnswer>>,
}

impl LockJob {
    fn settle(self, answer: Result<LockAnswer>) {
        let _ = self.answer.send(answer);
    }

    fn fail(mut self, error: LockError) {
        if let (Some((_, rider)), LockError::Store(error)) = (&mut self.rider, &error) {
            rider.failed(error);
        }
        self.settle(Err(error));
    }
}

/// The state of a busy lane.
pub(crate) struct KnownLock {
    /// The lock as the last commit has left it.
    table: Option<Table>,
    /// The number of requests that the next commit may grant.
    most_grants: usize,
    /// True if the executions in memory were out of date.
    from_store: bool,
    /// The time of the last applied commit, by the monotonic clock.
    landed: Option<Duration>,
}

impl Default for KnownLock {
    fn default() -> KnownLock {
        KnownLock { table: None, most_grants: MOST_GRANTS, from_store: false, landed: None }
    }
}

/// Operations that share one commit.
pub(crate) struct LockBatch {
    jobs: Vec<AnsweredJob>,
    table: Table,
    own: Placed,
    rest: Part,
    /// Notifies executions in memory when the commit has landed.
    told_executions: Vec<(Part, Placed)>,
    told: Vec<CallerNotice>,
    is_unfinished: bool,
    /// How many notices of other processes had been heard when the commit was planned.
    heard: u64,
}

/// An operation and its answer.
struct AnsweredJob {
    job: LockJob,
    answer: Result<LockAnswer>,
    /// True if the operation changes anything.
    changes: bool,
}

impl Service {
    /// Does an operation on a lock. It is done even if its caller gives up.
    pub(crate) async fn ask(
        self: &Arc<Service>,
        lock: &LockName,
        ask: Ask,
        rider: Option<LockRider>,
    ) -> Result<LockAnswer> {
        let (answer, answered) = oneshot::channel();
        Lanes::submit(self, lock, LockJob { ask, rider, answer }).map_err(|_| LockError::Stopped)?;
        answered.await.unwrap_or(Err(LockError::Stopped))
    }

    /// Plans the jobs. Returns `None` if an execution that is to be notified has ended meanwhile.
    async fn planned(
        &self,
        lock: &LockName,
        known: &KnownLock,
        table: &mut Table,
        asks: Vec<(Ask, Option<ExecutionId>)>,
    ) -> Result<Option<Came>> {
        let mut plan = Planned::new(self, lock, table, known.from_store);
        plan.most_grants = known.most_grants;
        let mut answers = Vec::with_capacity(asks.len());
        let mut is_changed = false;
        for (ask, _) in &asks {
            plan.is_changed = false;
            let answer = match plan.ask(ask).await {
                Err(LockError::Store(error)) => return Err(error.into()),
                answer => answer,
            };
            answers.push((answer, plan.is_changed));
            is_changed |= plan.is_changed;
        }
        plan.is_changed = is_changed;
        let closed = plan.close();
        let riders = asks.into_iter().zip(&answers).filter(|(_, (answer, changes))| *changes && answer.is_ok());
        let riders = riders.filter_map(|((_, rider), _)| rider).collect();
        let Some(parts) = self.tell_executions(closed.notices, known.from_store, &riders).await? else {
            return Ok(None);
        };
        Ok(Some(Came { answers, part: closed.part, parts, told: closed.told, is_unfinished: closed.is_unfinished }))
    }

    /// Answers an operation. The ear of a waiting caller is registered here, before anything else can be granted.
    fn answered(&self, lock: &LockName, done: AnsweredJob) {
        let AnsweredJob { mut job, answer, .. } = done;
        if let Ask::Acquire(want) = &job.ask {
            match &answer {
                Ok(LockAnswer::Granted(ticket)) => self.hears(lock, *ticket, want, true),
                Ok(LockAnswer::Queued(ticket)) => self.hears(lock, *ticket, want, false),
                _ => {}
            }
        }
        if let Some((_, rider)) = &mut job.rider {
            rider.rests(answer.clone());
        }
        job.settle(answer);
    }
}

/// The plan of some jobs.
struct Came {
    /// The answers, each with true if the job changes anything.
    answers: Vec<(Result<LockAnswer>, bool)>,
    part: Part,
    parts: Vec<Part>,
    told: Vec<CallerNotice>,
    is_unfinished: bool,
}

impl LanePlan for Service {
    type Key = LockName;
    type Job = LockJob;
    type Known = KnownLock;
    type Batch = LockBatch;

    const MOST: usize = 128;

    fn lanes(&self) -> &Lanes<Service> {
        &self.lanes
    }

    fn runtime(&self) -> &Runtime {
        &self.node.runtime
    }

    fn store(&self) -> &Store {
        &self.node.store
    }

    async fn plan(
        self: &Arc<Service>,
        lock: &LockName,
        known: &mut KnownLock,
        jobs: &mut VecDeque<LockJob>,
        most: usize,
    ) -> Option<(Commit, LockBatch)> {
        let taken: Vec<LockJob> = jobs.drain(..most.min(jobs.len())).collect();
        if self.node.is_stopped() {
            taken.into_iter().for_each(|job| job.settle(Err(LockError::Stopped)));
            return None;
        }
        let heard = self.heard();
        let mut table = match known.table.take() {
            Some(table) => Ok(table),
            None => Table::read(self, lock).await,
        };
        let came = match &mut table {
            Ok(table) => {
                let rider = |job: &LockJob| job.rider.as_ref().map(|(execution, _)| execution.clone());
                let asks = taken.iter().map(|job| (job.ask.clone(), rider(job))).collect();
                self.planned(lock, known, table, asks).await
            }
            Err(error) => Err(error.clone()),
        };
        match (came, table) {
            (Ok(Some(came)), Ok(table)) => {
                let jobs = taken.into_iter().zip(came.answers);
                let mut jobs: Vec<AnsweredJob> =
                    jobs.map(|(job, (answer, changes))| AnsweredJob { job, answer, changes }).collect();
                if came.part.writes().is_empty() {
                    known.table = Some(table);
                    jobs.into_iter().for_each(|done| self.answered(lock, done));
                    return None;
                }
                let part = self.node.for_any(&lock.bytes()).and(came.part);
                let (mut commit, own, rest) = part.place_whole(Commit::new());
                let mut told_executions = Vec::with_capacity(came.parts.len());
                for part in came.parts {
                    let (placed, rest);
                    (commit, placed, rest) = part.place_whole(commit);
                    told_executions.push((rest, placed));
                }
                for done in &mut jobs {
                    if let (true, Ok(answer), Some((_, rider))) = (done.changes, &done.answer, &mut done.job.rider) {
                        commit = rider.board(commit, answer);
                    }
                }
                let (told, is_unfinished) = (came.told, came.is_unfinished);
                Some((commit, LockBatch { jobs, table, own, rest, told_executions, told, is_unfinished, heard }))
            }
            (Err(error), _) | (_, Err(error)) => {
                taken.into_iter().for_each(|job| job.fail(error.clone()));
                None
            }
            (Ok(None), _) => {
                known.from_store = true;
                taken.into_iter().rev().for_each(|job| jobs.push_front(job));
                tokio::task::yield_now().await;
                None
            }
        }
    }

    /// Requests that must wait anyway are held back while the lock is hot: the next release comes soon and then shares
    /// their commit. Without this, a hand-over of a contended lock takes two commits.
    fn holds_back(self: &Arc<Service>, known: &KnownLock, jobs: &VecDeque<LockJob>) -> Option<Duration> {
        let (table, landed) = (known.table.as_ref()?, known.landed?);
        let is_hot = self.node.store.env().monotonic().saturating_sub(landed) < COMPANY;
        let waits = |job: &LockJob| matches!(&job.ask, Ask::Acquire(want) if want.waits && table.is_busy(want.permits));
        (is_hot && jobs.len() < Service::MOST && jobs.iter().all(waits)).then_some(COMPANY)
    }

    fn size(batch: &LockBatch) -> usize {
        batch.jobs.len()
    }

    fn landed(self: &Arc<Service>, lock: &LockName, known: &mut KnownLock, batch: LockBatch, receipt: &Receipt) {
        let LockBatch { jobs, mut table, told_executions, told, is_unfinished, heard, .. } = batch;
        table.landed();
        let landed = Some(self.node.store.env().monotonic());
        *known = KnownLock { table: Some(table), landed, ..KnownLock::default() };
        // A request that was made and granted in one commit must be registered first. The new holder is notified last:
        // the scheduler runs it first.
        for mut done in jobs {
            if let Some((_, mut rider)) = done.job.rider.take_if(|_| done.changes) {
                rider.landed(receipt);
            }
            self.answered(lock, done);
        }
        if heard != self.heard() {
            // A notice came before these callers were known here: it may have been about them.
            let service = self.clone();
            self.node.runtime.spawn(async move { service.listen_at_last().await });
        }
        self.tell_requests(lock, told);
        told_executions.into_iter().for_each(|(rest, placed)| rest.land(placed.landing(receipt)));
        if is_unfinished {
            self.grant_on(lock);
        }
    }

    async fn refused(
        self: &Arc<Service>,
        _: &LockName,
        known: &mut KnownLock,
        batch: LockBatch,
        refusal: Refusal,
        jobs: &mut VecDeque<LockJob>,
    ) {
        known.from_store = true;
        batch.rest.refuse(&batch.own, &refusal);
        batch.told_executions.into_iter().for_each(|(rest, placed)| rest.refuse(&placed, &refusal));
        let is_fenced = batch.own.has_failed(&refusal, SHARD) && !self.node.is_shared();
        let lost: Vec<&Check> =
            batch.own.failed(&refusal).filter(|(_, tag, _)| *tag == SESSION).map(|it| &it.2.check).collect();
        let is_over = batch.own.has_failed(&refusal, ONCE);
        let lost_session = |ask: &Ask| match ask {
            Ask::Acquire(Want { owner: Owner::Session(session), .. }) => {
                let check = Check::Present(self.spaces.session(*session));
                lost.contains(&&check).then(|| LockError::SessionLost { session: session.to_string() })
            }
            // Its caller looks whether it was done before.
            Ask::Remove(call) if is_over && call.has_key() => {
                let reason = "another caller has taken over the idempotency key".into();
                Some(OnceError::Fenced { reason }.into())
            }
            _ => None,
        };
        let mut again = Vec::new();
        for mut done in batch.jobs {
            if let (true, Some((_, rider))) = (done.changes, &mut done.job.rider)
                && rider.refused(&refusal)
            {
                continue;
            }
            match lost_session(&done.job.ask) {
                _ if is_fenced => done.job.settle(Err(LockError::Stopped)),
                Some(error) => done.job.settle(Err(error)),
                None => again.push(done.job),
            }
        }
        again.into_iter().rev().for_each(|job| jobs.push_front(job));
    }

    fn split(self: &Arc<Service>, _: &mut KnownLock, batch: LockBatch, jobs: &mut VecDeque<LockJob>) {
        batch.jobs.into_iter().rev().for_each(|done| jobs.push_front(done.job));
    }

    /// The commit is too large: grant fewer requests in one commit, because their records may be large.
    fn shrink(self: &Arc<Service>, known: &mut KnownLock) -> bool {
        let can_be = known.most_grants > 1;
        known.most_grants = (known.most_grants / 8).max(1);
        can_be
    }

    fn failed(self: &Arc<Service>, _: &mut KnownLock, batch: LockBatch, error: StoreError, _: &mut VecDeque<LockJob>) {
        self.node.doubt();
        batch.jobs.into_iter().for_each(|done| done.job.fail(error.clone().into()));
    }
}
