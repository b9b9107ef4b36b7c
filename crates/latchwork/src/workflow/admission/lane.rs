//! Turns starts and ends of executions into commits. The jobs of a partition that arrive while a commit is on its way
//! share the next one. In a commit, ended executions first return their permits, then executions in the queue are
//! admitted, then starts are decided.

use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

use tokio::sync::oneshot;

use crate::lane::{LanePlan, Lanes, Part, Placed, Rider, Runtime};
use crate::node::{Node, SHARD};
use crate::store::{Commit, ErrorKind, FailedCheck, Outcome, Receipt, Refusal, Store, StoreError};
use crate::workflow::admission::book::{Book, Ruling};
use crate::workflow::admission::policy::{Policy, StartNeeds};
use crate::workflow::admission::stored::Partition;
use crate::workflow::admission::{Admissions, Started};
use crate::workflow::stored::record::Execution;
use crate::workflow::{ExecutionId, Result, WorkflowError};

/// How many executions one commit admits from a queue.
const MOST_ADMITTED: usize = 256;

/// Stores the execution of a start with the record that was decided.
pub(crate) type Starter = Box<dyn Rider<Execution, ()>>;

/// The work of a lane.
pub(crate) enum AdmissionJob {
    Start(Box<StartJob>),
    End(Box<EndJob>),
    /// The queue may have room for its next execution.
    Next(Partition),
}

/// A start, and its caller.
pub(crate) struct StartJob {
    pub(super) asked: StartNeeds,
    pub(super) id: ExecutionId,
    /// The record without any limits.
    pub(super) first: Execution,
    /// The record that was decided.
    pub(super) decided: Option<Execution>,
    pub(super) starter: Starter,
    pub(super) answer: oneshot::Sender<Result<Started>>,
}

/// The end of an execution that holds permits, with the rest of the commit that ends it.
pub(crate) struct EndJob {
    pub(super) permits: Vec<Partition>,
    pub(super) commit: Commit,
    /// The indexes of its first check and its first write in the commit of the lane.
    pub(super) first: (usize, usize),
    /// Gets the outcome. It is dropped without one if the lane cannot serve.
    pub(super) answer: oneshot::Sender<Result<Outcome, StoreError>>,
}

impl EndJob {
    fn board(&mut self, commit: Commit, node: &Node) -> Commit {
        self.first = (commit.checks().len(), commit.writes().len());
        let commit = self.commit.checks().iter().cloned().fold(commit, Commit::check);
        self.commit.writes().iter().cloned().fold(commit, |commit, write| node.moved(commit, write))
    }

    fn landed(self, receipt: &Receipt) {
        let writes = self.first.1..self.first.1 + self.commit.writes().len();
        let revs = receipt.revs.get(writes).unwrap_or_default().to_vec();
        let _ = self.answer.send(Ok(Outcome::Applied(Receipt { revs, ..receipt.clone() })));
    }

    /// Called when the commit is refused. Returns the job if none of its own checks failed.
    fn refused(self, refusal: &Refusal) -> Option<EndJob> {
        let its = self.first.0..self.first.0 + self.commit.checks().len();
        let failed = refusal.failed.iter().filter(|failed| its.contains(&failed.index));
        let failed: Vec<_> = failed.map(|it| FailedCheck { index: it.index - its.start, ..it.clone() }).collect();
        if failed.is_empty() {
            return Some(self);
        }
        let _ = self.answer.send(Ok(Outcome::Refused(Refusal { failed, ..refusal.clone() })));
        None
    }
}

impl AdmissionJob {
    fn fail(self, error: &WorkflowError) {
        // The answer of an end is dropped here. The caller then commits the end without the lane.
        if let AdmissionJob::Start(mut start) = self {
            if let WorkflowError::Store(error) = error {
                start.starter.failed(error);
            }
            let _ = start.answer.send(Err(error.clone()));
        }
    }

    /// The limits of the permits that the job returns.
    fn given_back(&self) -> &[Partition] {
        if let AdmissionJob::End(end) = self { &end.permits } else { &[] }
    }

    /// The queues that are looked at before the job.
    fn queues(&self) -> Vec<Partition> {
        match self {
            AdmissionJob::Next(queue) => vec![queue.clone()],
            AdmissionJob::End(end) => end.permits.clone(),
            AdmissionJob::Start(start) => {
                let gate = |key: &Option<String>| Partition::new(&start.first.workflow, key.as_deref());
                start.asked.gates.iter().map(gate).collect()
            }
        }
    }
}

/// Jobs that share a commit, and their decisions.
pub(crate) struct AdmissionBatch {
    jobs: Vec<(AdmissionJob, Ruling)>,
    placed: Placed,
    rest: Part,
    /// The queues to look at again after the commit.
    next: BTreeSet<Partition>,
}

/// How many executions the next commit may admit from queues.
pub(crate) struct MostAdmitted(usize);

impl Default for MostAdmitted {
    fn default() -> MostAdmitted {
        MostAdmitted(MOST_ADMITTED)
    }
}

/// The decisions about the first jobs of a lane. Without a part there is nothing to commit.
struct Decided {
    jobs: Vec<(AdmissionJob, Ruling)>,
    part: Option<Part>,
    next: BTreeSet<Partition>,
}

impl Admissions {
    /// Decides the jobs of one lane. A job that cannot be decided in this commit stays queued with the jobs behind it.
    async fn decide(&self, policy: &Policy, jobs: &mut VecDeque<AdmissionJob>, most: usize) -> Result<Decided> {
        let engine = self.engine().ok_or(WorkflowError::Stopped)?;
        let mut book = Book::new(&engine).await?;
        let (mut decided, mut next) = (Vec::with_capacity(jobs.len()), BTreeSet::new());
        let given_back: Vec<Partition> = jobs.iter().flat_map(AdmissionJob::given_back).cloned().collect();
        for partition in &given_back {
            book.give_back(partition).await?;
        }
        // The queue of the whole workflow is first in this order. Executions admitted by a key are then behind it.
        let queues: BTreeSet<Partition> = jobs.iter().flat_map(AdmissionJob::queues).collect();
        for queue in &queues {
            if book.admit_next(policy, queue, most).await? {
                next.insert(queue.clone());
            }
        }
        while let Some(mut job) = jobs.pop_front() {
            let decision = match &mut job {
                AdmissionJob::Next(_) | AdmissionJob::End(_) => Ruling::Starts(None),
                AdmissionJob::Start(start) => {
                    let mut first = start.first.clone();
                    let decision = match book.decide(policy, &start.asked, &start.id, &mut first).await {
                        Ok(decision) => decision,
                        Err(error) => {
                            jobs.push_front(job);
                            decided.into_iter().rev().for_each(|(job, _)| jobs.push_front(job));
                            return Err(error);
                        }
                    };
                    start.decided = Some(first);
                    decision
                }
            };
            if let Ruling::Later = decision {
                // The permits of these ends are already counted as returned.
                let (ends, later): (Vec<AdmissionJob>, Vec<AdmissionJob>) =
                    jobs.drain(..).partition(|job| matches!(job, AdmissionJob::End(_)));
                decided.extend(ends.into_iter().map(|end| (end, Ruling::Starts(None))));
                jobs.extend([job].into_iter().chain(later));
                break;
            }
            decided.push((job, decision));
        }
        next.extend(book.queued.iter().cloned());
        let part = (!book.is_unchanged()).then(|| book.into_part());
        Ok(Decided { jobs: decided, part, next })
    }

    /// True if the workflow is sabotaged for a test: what takes the permits is a commit of its own.
    fn takes_permits_apart(&self, lane: &Partition) -> bool {
        let engine = self.engine();
        engine.is_some_and(|engine| engine.definition(lane.workflow()).is_some_and(|it| it.policy.permits_apart))
    }

    /// A sabotage: sends what belongs into the commit of the starts by itself.
    fn send_apart(&self, part: Option<Part>) {
        let (Some(part), Some(engine), Some(runtime)) = (part, self.engine(), self.node.runtime.handle()) else {
            return;
        };
        runtime.spawn(async move { engine.send(part).await.map(drop) });
    }

    /// Answers a start whose decision is stored, or needs no commit.
    fn answer(&self, start: StartJob, decision: Ruling) {
        self.note_used(&start.first.workflow, &start.asked);
        let _ = start.answer.send(match decision {
            Ruling::Starts(item) => Ok(Started { id: start.id, item }),
            Ruling::Later => Err(WorkflowError::Stopped),
            Ruling::Joins(id, item) => Ok(Started { id, item }),
            Ruling::Rejected(error) => Err(error),
        });
    }
}

impl LanePlan for Admissions {
    type Key = Partition;
    type Job = AdmissionJob;
    type Known = MostAdmitted;
    type Batch = AdmissionBatch;

    const MOST: usize = 256;

    fn lanes(&self) -> &Lanes<Admissions> {
        &self.lanes
    }

    fn runtime(&self) -> &Runtime {
        &self.node.runtime
    }

    fn store(&self) -> &Store {
        &self.node.store
    }

    async fn plan(
        self: &Arc<Admissions>,
        lane: &Partition,
        known: &mut MostAdmitted,
        jobs: &mut VecDeque<AdmissionJob>,
        most: usize,
    ) -> Option<(Commit, AdmissionBatch)> {
        let mut taken: VecDeque<AdmissionJob> = jobs.drain(..most.min(jobs.len())).collect();
        let definition = self.engine().and_then(|engine| engine.definition(lane.workflow()).cloned());
        let decided = match definition {
            _ if self.node.is_stopped() => Err(WorkflowError::Stopped),
            Some(definition) => self.decide(&definition.policy, &mut taken, known.0).await,
            None => Err(WorkflowError::NotRegistered { name: lane.workflow().into() }),
        };
        let Decided { jobs: mut decided, mut part, next } = match decided {
            Ok(decided) => decided,
            Err(error) => {
                if !matches!(error, WorkflowError::Stopped | WorkflowError::NotRegistered { .. }) {
                    tracing::warn!(workflow = lane.workflow(), %error, "starts could not be decided");
                }
                if error.kind() == ErrorKind::Unavailable {
                    // The queues are looked at again when the store serves again.
                    self.node.doubt();
                }
                taken.into_iter().for_each(|job| job.fail(&error));
                return None;
            }
        };
        taken.into_iter().rev().for_each(|job| jobs.push_front(job));
        let starts = |(_, decision): &(AdmissionJob, Ruling)| matches!(decision, Ruling::Starts(_));
        let is_written = |it: &(AdmissionJob, Ruling)| !matches!(it.0, AdmissionJob::Next(_)) && starts(it);
        if part.is_none() && !decided.iter().any(is_written) {
            for (job, decision) in decided {
                if let AdmissionJob::Start(start) = job {
                    self.answer(*start, decision);
                }
            }
            return None;
        }
        if self.takes_permits_apart(lane) {
            self.send_apart(part.take());
        }
        let part = self.node.for_any(lane.as_bytes()).and(part.unwrap_or_default());
        let (mut commit, placed, rest) = part.place_whole(Commit::new());
        for (job, decision) in &mut decided {
            match (job, decision) {
                (AdmissionJob::Start(start), Ruling::Starts(_)) => {
                    let Some(first) = &start.decided else { continue };
                    commit = start.starter.board(commit, first);
                }
                (AdmissionJob::End(end), _) => commit = end.board(commit, &self.node),
                _ => {}
            }
        }
        Some((commit, AdmissionBatch { jobs: decided, placed, rest, next }))
    }

    fn size(batch: &AdmissionBatch) -> usize {
        batch.jobs.len()
    }

    fn landed(
        self: &Arc<Admissions>,
        _: &Partition,
        known: &mut MostAdmitted,
        batch: AdmissionBatch,
        receipt: &Receipt,
    ) {
        *known = MostAdmitted::default();
        batch.rest.land(batch.placed.landing(receipt));
        for (job, decision) in batch.jobs {
            match job {
                AdmissionJob::Start(mut start) => {
                    if let Ruling::Starts(_) = decision {
                        start.starter.landed(receipt);
                    }
                    self.answer(*start, decision);
                }
                AdmissionJob::End(end) => {
                    end.permits.iter().for_each(|partition| self.note(partition.clone()));
                    end.landed(receipt);
                }
                AdmissionJob::Next(_) => {}
            }
        }
        // A start that entered a queue may have missed a permit that was returned meanwhile.
        batch.next.iter().for_each(|queue| self.look_at(queue));
    }

    async fn refused(
        self: &Arc<Admissions>,
        _: &Partition,
        _: &mut MostAdmitted,
        batch: AdmissionBatch,
        refusal: Refusal,
        jobs: &mut VecDeque<AdmissionJob>,
    ) {
        let is_fenced = batch.placed.has_failed(&refusal, SHARD) && !self.node.is_shared();
        batch.rest.refuse(&batch.placed, &refusal);
        let mut again = Vec::with_capacity(batch.jobs.len());
        for (mut job, decision) in batch.jobs {
            job = match job {
                AdmissionJob::Start(mut start) if matches!(decision, Ruling::Starts(_)) => {
                    if start.starter.refused(&refusal) {
                        continue;
                    }
                    AdmissionJob::Start(start)
                }
                AdmissionJob::End(end) => match end.refused(&refusal) {
                    Some(end) => AdmissionJob::End(Box::new(end)),
                    None => continue,
                },
                job => job,
            };
            if is_fenced {
                job.fail(&WorkflowError::Stopped);
            } else {
                again.push(job);
            }
        }
        again.into_iter().rev().for_each(|job| jobs.push_front(job));
    }

    fn split(self: &Arc<Admissions>, _: &mut MostAdmitted, batch: AdmissionBatch, jobs: &mut VecDeque<AdmissionJob>) {
        batch.jobs.into_iter().rev().for_each(|(job, _)| jobs.push_front(job));
    }

    /// Admits fewer executions per commit: their records may be large.
    fn shrink(self: &Arc<Admissions>, known: &mut MostAdmitted) -> bool {
        let can_be = known.0 > 1;
        known.0 = (known.0 / 8).max(1);
        can_be
    }

    fn failed(
        self: &Arc<Admissions>,
        _: &mut MostAdmitted,
        batch: AdmissionBatch,
        error: StoreError,
        _: &mut VecDeque<AdmissionJob>,
    ) {
        self.node.doubt();
        // A commit that is too large or touches a damaged record has written nothing, and another job may be the
        // reason. So the end is committed without the lane.
        let is_whole = matches!(error.kind(), ErrorKind::Invalid | ErrorKind::Corrupt);
        for (job, _) in batch.jobs {
            match job {
                AdmissionJob::End(end) if !is_whole => drop(end.answer.send(Err(error.clone()))),
                job => job.fail(&WorkflowError::Store(error.clone())),
            }
        }
    }
}
