//! Jobs that run on one state, one after the other, before anything is committed.

use std::sync::Arc;

use serde_json::Value;

use crate::record::Record as _;
use crate::state::once::KeptAnswer;
use crate::state::op::{Event, StateOp, difference};
use crate::state::queue::{
    Changed, HeldContainers, JobWork, Ran, Refusal, RunningMutator, Settled, StateJob, drive, start,
};
use crate::state::record::StateRecord;
use crate::state::watch::ContainerEvents;
use crate::state::{Result, StateError};
use crate::store::{Key, Rev, View};

/// A container as it was read, or as a commit has left it.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct KnownState {
    /// `None` if it was never written.
    pub(crate) rev: Option<Rev>,
    pub(crate) state: Option<Value>,
}

impl KnownState {
    /// The container as a view shows it.
    pub(crate) async fn at(view: &View, key: &Key, name: &str) -> Result<KnownState> {
        let Some(item) = view.get(key).await? else { return Ok(KnownState { rev: None, state: None }) };
        let record = StateRecord::decode(&item.value).map_err(|why| why.at(name))?;
        Ok(KnownState { rev: Some(item.rev), state: record.into_state() })
    }
}

/// The rules of a change, the same for stored containers and those in memory.
impl StateJob {
    /// Applies an operation to a state. Returns the value, and true if the state must be written. On an error the state
    /// stays as it was.
    pub(crate) fn apply(
        &self,
        op: &StateOp,
        name: &str,
        was_written: bool,
        state: &mut Option<Value>,
    ) -> Result<(Value, bool)> {
        let before = self.definition.may_refuse().then(|| state.clone());
        let (value, changes) = op.apply(name, state)?;
        // The first set or delete is written even if the state reads the same as before.
        let changed = changes || !was_written && op.writes_always();
        if changed && let Err(error) = self.definition.check(name, state.as_ref()) {
            *state = before.flatten();
            return Err(error);
        }
        Ok((value, changed))
    }

    /// Returns true if the result of a mutator must be written. Fails if it must not be stored.
    pub(crate) fn may_become(&self, name: &str, before: Option<&Value>, after: Option<&Value>) -> Result<bool> {
        if before == after {
            return Ok(false);
        }
        if let Some(after) = after {
            crate::json::check(after).map_err(|cause| StateError::Value { key: name.into(), cause })?;
        }
        self.definition.check(name, after)?;
        Ok(true)
    }

    /// The event of a mutator's change, for watchers.
    pub(crate) fn event(&self, before: Option<&Value>, after: Option<&Value>) -> Event {
        let delta = difference(before, after);
        Event { operation: self.operation.into(), path: String::new(), delta, times: 1 }
    }
}

/// A job that has run, and its result if the commit lands.
pub(crate) struct FinishedJob {
    pub(crate) job: StateJob,
    pub(crate) came_to: CameTo,
    pub(crate) answer: Option<(Key, KeptAnswer)>,
    /// The state that it was run on, if it has a rider.
    pub(crate) seen: Option<KnownState>,
}

pub(crate) enum CameTo {
    Change { value: Value, changed: bool },
    Refusal(Refusal),
    Failure(StateError),
}

impl CameTo {
    /// True if the commit must contain it, and its rider, too.
    pub(crate) fn boards(&self) -> bool {
        matches!(self, CameTo::Change { changed: true, .. })
    }
}

/// Jobs that are run on one state, for one commit.
pub(crate) struct StateBatch {
    name: Arc<str>,
    /// The state that the commit starts from.
    pub(crate) known: KnownState,
    /// The state that the jobs so far have left.
    pub(crate) state: Option<Value>,
    /// True if the state was ever written; otherwise the initial value is read instead.
    written: bool,
    pub(crate) changed: bool,
    pub(crate) done: Vec<FinishedJob>,
    pub(crate) events: Vec<Event>,
}

impl StateBatch {
    pub(crate) fn new(known: KnownState, name: Arc<str>) -> StateBatch {
        let (state, written) = (known.state.clone(), known.rev.is_some());
        StateBatch { name, known, state, written, changed: false, done: Vec::new(), events: Vec::new() }
    }

    /// The state as the jobs so far have left it.
    pub(crate) fn now(&self) -> KnownState {
        KnownState { rev: self.written.then(|| self.rev()), state: self.state.clone() }
    }

    /// The state as it will be stored.
    pub(crate) fn record(&self) -> StateRecord {
        StateRecord::of(self.state.clone())
    }

    /// The events for watchers.
    pub(crate) fn told(&self) -> ContainerEvents {
        ContainerEvents { container: self.name.to_string(), events: self.events.clone() }
    }

    /// The rev after the commit.
    pub(crate) fn rev(&self) -> Rev {
        let before = self.known.rev.unwrap_or_default();
        if self.changed { before.next() } else { before }
    }

    pub(crate) fn run_op(&mut self, job: StateJob, answer_key: Option<Key>) {
        let JobWork::Op(op, _) = &job.body else { return };
        let seen = self.seen(&job);
        if let Err(error) = self.permits(&job) {
            return self.done(job, CameTo::Failure(error), answer_key, seen);
        }
        let mut state = if self.written { self.state.take() } else { job.definition.initial.clone() };
        let came_to = match job.apply(op, &self.name, self.written, &mut state) {
            Ok((value, changed)) => {
                if changed {
                    self.tell(&job, op.event(job.operation));
                }
                CameTo::Change { value, changed }
            }
            Err(error) => CameTo::Failure(error),
        };
        self.keep(state, came_to.boards());
        self.done(job, came_to, answer_key, seen);
    }

    /// Keeps a state. An initial value that was only read stays unwritten.
    fn keep(&mut self, state: Option<Value>, changed: bool) {
        self.written |= changed;
        self.changed |= changed;
        self.state = if self.written { state } else { None };
    }

    /// Refuses a job whose condition is false for the state that the jobs so far have left.
    pub(crate) fn permits(&self, job: &StateJob) -> Result<()> {
        let rev = self.written.then(|| self.rev());
        job.permits(&self.name, rev, self.written && self.state.is_some())
    }

    /// Adds a job that is not run, because its condition is false.
    pub(crate) fn refuse(&mut self, job: StateJob, error: StateError) {
        let seen = self.seen(&job);
        self.done(job, CameTo::Failure(error), None, seen);
    }

    fn reads(&self, job: &StateJob) -> Option<Value> {
        if self.written { self.state.clone() } else { job.definition.initial.clone() }
    }

    pub(crate) fn start(&self, job: &mut StateJob, held: &HeldContainers) -> Result<RunningMutator, String> {
        let state = self.reads(job);
        match &mut job.body {
            JobWork::Mutator(mutator) => start(&mut **mutator, state, held),
            JobWork::Op(..) => Err("an operation is not a mutator".into()),
        }
    }

    /// The state as the next job finds it, if that job has a rider.
    fn seen(&self, job: &StateJob) -> Option<KnownState> {
        job.rider.is_some().then(|| self.now())
    }

    /// Runs a job to its end, including its waits, and removes it from the batch.
    pub(crate) async fn run_alone(&mut self, mut job: StateJob, held: HeldContainers) -> Option<FinishedJob> {
        if let JobWork::Op(..) = job.body {
            self.run_op(job, None);
            return self.done.pop();
        }
        if let Err(error) = self.permits(&job) {
            self.refuse(job, error);
            return self.done.pop();
        }
        let ran = match self.start(&mut job, &held) {
            Ok(mut running) => drive(&mut running, held, false).await,
            Err(message) => Ran::Panicked(message),
        };
        self.ran(job, ran, None);
        self.done.pop()
    }

    pub(crate) fn ran(&mut self, job: StateJob, ran: Ran, answer_key: Option<Key>) {
        let seen = self.seen(&job);
        let key = self.name.to_string();
        let came_to = match ran {
            Ran::Ended(Ok(after)) => self.take_over(&job, after),
            Ran::Ended(Err(refusal)) => CameTo::Refusal(refusal),
            Ran::Panicked(message) => CameTo::Failure(StateError::Panicked { key, message }),
            Ran::Waits => CameTo::Failure(StateError::Abandoned { key }),
        };
        self.done(job, came_to, answer_key, seen);
    }

    fn take_over(&mut self, job: &StateJob, after: Option<Value>) -> CameTo {
        let before = self.reads(job);
        let value = after.clone().unwrap_or_default();
        match job.may_become(&self.name, before.as_ref(), after.as_ref()) {
            Ok(false) => return CameTo::Change { value, changed: false },
            Ok(true) => {}
            Err(error) => return CameTo::Failure(error),
        }
        self.tell(job, job.event(before.as_ref(), after.as_ref()));
        self.keep(after, true);
        CameTo::Change { value, changed: true }
    }

    fn tell(&mut self, job: &StateJob, event: Event) {
        if let Some(told) = &job.told {
            *told.lock() = Some(event.clone());
        }
        match self.events.last_mut() {
            Some(last) if last.is_like(&event) => last.times += 1,
            _ => self.events.push(event),
        }
    }

    fn done(&mut self, job: StateJob, came_to: CameTo, answer_key: Option<Key>, seen: Option<KnownState>) {
        let answer = match (&came_to, answer_key) {
            (CameTo::Change { value, changed }, Some(key)) => {
                let (operation, fingerprint) = (job.operation.into(), job.fingerprint());
                Some((key, KeptAnswer { operation, fingerprint, value: value.clone(), rev: 0, changed: *changed }))
            }
            _ => None,
        };
        self.done.push(FinishedJob { job, came_to, answer, seen });
    }
}

impl FinishedJob {
    /// The answer, if the job is a change.
    pub(crate) fn answers(&self, rev: Rev) -> Option<Changed> {
        match &self.came_to {
            CameTo::Change { value, changed } => {
                Some(Changed { value: value.clone(), rev, changed: *changed, repeated: false })
            }
            CameTo::Refusal(_) | CameTo::Failure(_) => None,
        }
    }

    /// The same job, or a failure if the state that it leaves is too large to store.
    pub(crate) fn within(mut self, limit: usize, batch: &StateBatch) -> FinishedJob {
        if self.came_to.boards() {
            let length = batch.record().encode().len();
            if length > limit {
                let error = StateError::TooLarge { key: batch.name.to_string(), length, limit };
                self.came_to = CameTo::Failure(error);
            }
        }
        self
    }

    /// Notifies the rider that nothing is written for the job.
    pub(crate) fn rests(&mut self, rev: Rev) {
        let changed = self.answers(rev);
        if let (Some(rider), Some(seen)) = (&mut self.job.rider, self.seen.take()) {
            rider.rests((seen, changed));
        }
    }

    /// Notifies the rider that the store failed.
    pub(crate) fn failed(&mut self, error: &StateError) {
        if let (Some(rider), StateError::Store(error)) = (&mut self.job.rider, error) {
            rider.failed(error);
        }
    }

    pub(crate) fn settle(self, rev: Rev) {
        self.job.settle(match self.came_to {
            CameTo::Change { value, changed } => Settled::Done(Changed { value, rev, changed, repeated: false }),
            CameTo::Refusal(refusal) => Settled::Refused(refusal),
            CameTo::Failure(error) => Settled::Failed(error),
        });
    }
}
