//! Stored containers: a lane, and commits that check the container's rev. The jobs in a lane run on the state one after
//! the other, and one commit holds the result of all of them.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use crate::backoff::{doubled, jittered};
use crate::lane::{LanePlan, Lanes, Part, Placed, Runtime, Tag, as_found};
use crate::record::Record;
use crate::state::batch::{CameTo, FinishedJob, KnownState, StateBatch};
use crate::state::once::{Answers, KeptAnswer};
use crate::state::queue::{
    Changed, Condition, Identity, JobWork, MutationRetry, Ran, RunningMutator, Settled, StateJob, drive,
};
use crate::state::watch::ContainerEvents;
use crate::state::{Result, StateError};
use crate::store::{Actual, Commit, Env, ErrorKind, Key, Receipt, Refusal, Rev, Space, Store, StoreError};

/// The longest pause between attempts, unless the first is longer. A caller that has lost many races has the same
/// chance at the next attempt as any other. With pauses that always grow, it would hardly ever try.
const LONGEST: Duration = Duration::from_millis(40);

/// The container is at the rev that the jobs were run on.
const CONTAINER: Tag = Tag("container");
/// The right that guards a job still exists.
const GUARD: Tag = Tag("guard");

/// The stored containers of a store.
pub(crate) struct Shelf {
    pub(crate) store: Store,
    pub(crate) space: Space,
    pub(crate) answers: Answers,
    runtime: Runtime,
    lanes: Lanes<Shelf>,
}

/// A job that has not started, or that has run up to its first wait.
pub(crate) struct Item {
    job: StateJob,
    started: Option<RunningMutator>,
}

impl From<StateJob> for Item {
    fn from(job: StateJob) -> Item {
        Item { job, started: None }
    }
}

impl Shelf {
    pub(crate) fn new(store: Store, space: Space, answers: Answers) -> Shelf {
        Shelf { store, space, answers, runtime: Runtime::here(), lanes: Lanes::default() }
    }

    /// Puts a job into a container's lane.
    pub(crate) fn submit(self: &Arc<Shelf>, key: &Key, job: StateJob) -> Result<()> {
        Lanes::submit(self, key, job.into()).map_err(|_| StateError::NoRuntime)
    }

    /// Reads a container.
    pub(crate) async fn read(&self, key: &Key, name: &str) -> Result<KnownState> {
        KnownState::at(&self.store.view().await?, key, name).await
    }

    #[cfg(test)]
    pub(crate) fn is_idle(&self) -> bool {
        self.lanes.is_idle()
    }

    fn env(&self) -> &Env {
        self.store.env()
    }

    /// Runs jobs on the state of a batch, until one of them must wait.
    async fn run(&self, key: &Key, batch: &mut StateBatch, jobs: &mut VecDeque<Item>, most: usize) {
        let held_here = Identity::Stored(self.store.clone(), key.clone());
        let mut is_full = false;
        while !is_full
            && batch.done.len() < most
            && let Some(Item { mut job, started }) = jobs.pop_front()
        {
            let answer_key = job.once.as_ref().map(|once| self.answers.key(key, once));
            if let Some(key) = &answer_key {
                if batch.done.iter().any(|done| done.answer.as_ref().is_some_and(|(known, _)| known == key)) {
                    // Another job of this batch is about to write the answer under the same key.
                    jobs.push_front(job.into());
                    break;
                }
                match self.answers.get(&self.store, key).await {
                    Ok(None) => {}
                    Ok(Some(answer)) => {
                        settle_again(job, answer);
                        continue;
                    }
                    Err(error) => {
                        job.settle(Settled::Failed(error));
                        continue;
                    }
                }
            }
            // The rev of this commit is not final yet. A caller could guess it, but the state that it names is not
            // complete.
            if batch.changed && job.condition == Some(Condition::AtRev(batch.rev())) {
                jobs.push_front(Item { job, started });
                break;
            }
            if !job.progress.start(self.env()) {
                continue;
            }
            if let Err(error) = batch.permits(&job) {
                batch.refuse(job, error);
                continue;
            }
            // The answer must name the state at its rev, so no other change follows in this commit.
            is_full = job.condition.is_some();
            if let JobWork::Op(..) = job.body {
                batch.run_op(job, answer_key);
                continue;
            }
            let held = job.held.and(held_here.clone());
            let mut running = match started.map_or_else(|| batch.start(&mut job, &held), Ok) {
                Ok(running) => running,
                Err(message) => {
                    batch.ran(job, Ran::Panicked(message), answer_key);
                    continue;
                }
            };
            match drive(&mut running, held.clone(), true).await {
                // Jobs that ran before it do not wait for it.
                Ran::Waits if !batch.done.is_empty() => {
                    jobs.push_front(Item { job, started: Some(running) });
                    break;
                }
                Ran::Waits => {
                    let ran = drive(&mut running, held, false).await;
                    batch.ran(job, ran, answer_key);
                    break;
                }
                ran => batch.ran(job, ran, answer_key),
            }
        }
    }

    /// Makes a commit of a batch.
    async fn prepared(&self, key: &Key, batch: &mut StateBatch) -> Result<(Commit, Placed, Vec<Option<Placed>>)> {
        let part = Part::default().check(CONTAINER, as_found(key.clone(), batch.known.rev));
        let part = if batch.changed { part.put(key, batch.record().encode()) } else { part };
        let (mut commit, own, _) = part.place_whole(Commit::new());
        if batch.changed {
            commit = commit.meta(ContainerEvents::encode(vec![batch.told()]));
        }
        for (key, answer) in batch.done.iter().filter_map(|done| done.answer.as_ref()) {
            let answer = KeptAnswer { rev: batch.rev().0, ..answer.clone() };
            commit = self.answers.put(commit, key, self.env().now(), &answer);
        }
        if batch.done.iter().any(|done| done.answer.is_some()) {
            commit = self.answers.sweep(&self.store, commit).await?;
        }
        let rev = batch.rev();
        let mut guards = Vec::with_capacity(batch.done.len());
        for done in &mut batch.done {
            guards.push(done.job.guard.clone().map(|(guard, _)| {
                let placed;
                let part = Part::default().check(GUARD, guard);
                (commit, placed, _) = part.place_whole(std::mem::take(&mut commit));
                placed
            }));
            let changed = if done.came_to.boards() { done.answers(rev) } else { None };
            if let (Some(rider), Some(changed)) = (&mut done.job.rider, changed) {
                commit = rider.board(std::mem::take(&mut commit), &changed);
            }
        }
        Ok((commit, own, guards))
    }
}

/// Jobs that share a commit.
pub(crate) struct SentBatch {
    batch: StateBatch,
    own: Placed,
    /// One for each job.
    guards: Vec<Option<Placed>>,
}

/// Answers a job with the kept answer of its idempotency key.
fn settle_again(mut job: StateJob, answer: KeptAnswer) {
    let KeptAnswer { operation, fingerprint, value, rev, changed } = answer;
    if fingerprint == job.fingerprint() {
        if let Some(rider) = &mut job.rider {
            let changed = Changed { value: value.clone(), rev: Rev(rev), changed, repeated: true };
            rider.rests((KnownState { rev: None, state: None }, Some(changed)));
        }
        job.settle(Settled::Done(Changed { value, rev: Rev(rev), changed, repeated: true }));
        return;
    }
    let once = job.once.as_deref().unwrap_or_default().to_string();
    let key = job.name.to_string();
    job.settle(Settled::Failed(StateError::OnceReused { key, once, operation }));
}

impl LanePlan for Shelf {
    type Key = Key;
    type Job = Item;
    /// The state that the last commit has left.
    type Known = Option<KnownState>;
    type Batch = SentBatch;

    const MOST: usize = 1024;

    fn lanes(&self) -> &Lanes<Shelf> {
        &self.lanes
    }

    fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    fn store(&self) -> &Store {
        &self.store
    }

    async fn plan(
        self: &Arc<Shelf>,
        key: &Key,
        known: &mut Option<KnownState>,
        jobs: &mut VecDeque<Item>,
        most: usize,
    ) -> Option<(Commit, SentBatch)> {
        let name = jobs.front()?.job.name.clone();
        let state = match known.take() {
            Some(known) => Ok(known),
            None => self.read(key, &name).await,
        };
        let state = match state {
            Ok(state) => state,
            Err(error) => {
                // The store does not serve. The callers behind this one get the same error.
                jobs.drain(..).for_each(|item| item.job.settle(Settled::Failed(error.clone())));
                return None;
            }
        };
        let mut batch = StateBatch::new(state, name);
        self.run(key, &mut batch, jobs, most).await;
        if batch.done.is_empty() {
            *known = Some(batch.known);
            return None;
        }
        match self.prepared(key, &mut batch).await {
            Ok((commit, own, guards)) => Some((commit, SentBatch { batch, own, guards })),
            Err(error) => {
                fail(batch, error);
                None
            }
        }
    }

    fn size(sent: &SentBatch) -> usize {
        sent.batch.done.len()
    }

    fn landed(self: &Arc<Shelf>, _: &Key, known: &mut Option<KnownState>, sent: SentBatch, receipt: &Receipt) {
        let batch = sent.batch;
        let rev = batch.rev();
        let written = batch.changed || batch.known.rev.is_some();
        *known = Some(KnownState { rev: written.then_some(rev), state: batch.state });
        for mut done in batch.done {
            match &mut done.job.rider {
                Some(rider) if done.came_to.boards() => rider.landed(receipt),
                _ => done.rests(rev),
            }
            done.settle(rev);
        }
    }

    async fn refused(
        self: &Arc<Shelf>,
        _: &Key,
        _: &mut Option<KnownState>,
        sent: SentBatch,
        refusal: Refusal,
        jobs: &mut VecDeque<Item>,
    ) {
        let SentBatch { batch, own, guards } = sent;
        let moved =
            own.failed(&refusal).find(|(_, tag, _)| *tag == CONTAINER).map(|(_, _, failed)| match &failed.actual {
                Actual::AtRev(rev) => Some(*rev),
                _ => None,
            });
        let expected = batch.known.rev;
        let (mut again, mut pause) = (Vec::new(), Duration::ZERO);
        for (FinishedJob { mut job, came_to, answer, .. }, guard) in batch.done.into_iter().zip(guards) {
            if guard.is_some_and(|guard| guard.has_failed(&refusal, GUARD)) {
                let lost = job.guard.as_ref().map_or("the right to write is lost", |(_, lost)| &**lost);
                let (key, reason) = (job.name.to_string(), lost.to_string());
                job.settle(Settled::Failed(StateError::Fenced { key, reason }));
                continue;
            }
            // If a rider's own check failed, its job is dropped, and the others are tried again.
            if came_to.boards() && job.rider.as_mut().is_some_and(|rider| rider.refused(&refusal)) {
                continue;
            }
            // A rev never comes back: when the job runs again, its condition refuses it.
            let is_refused = matches!(job.condition, Some(Condition::AtRev(_)));
            if let Some(actual) = moved.filter(|_| !is_refused) {
                job.tried += 1;
                if job.tried >= job.retry.attempts {
                    // Another process may have sent the same mutation under this key.
                    if let Some((key, _)) = &answer
                        && let Ok(Some(answer)) = self.answers.get(&self.store, key).await
                    {
                        settle_again(job, answer);
                        continue;
                    }
                    let (key, attempts) = (job.name.to_string(), job.tried);
                    let error = StateError::ConcurrentModification { key, attempts, expected, actual };
                    job.settle(Settled::Failed(error));
                    continue;
                }
                pause = pause.max(job.retry.pause_after(job.tried, self.env()));
            }
            again.push(job);
        }
        put_back(again.into_iter(), jobs);
        if !pause.is_zero() {
            self.env().sleep(pause).await;
        }
    }

    fn split(self: &Arc<Shelf>, known: &mut Option<KnownState>, sent: SentBatch, jobs: &mut VecDeque<Item>) {
        *known = Some(sent.batch.known);
        put_back(sent.batch.done.into_iter().map(|done| done.job), jobs);
    }

    fn failed(
        self: &Arc<Shelf>,
        known: &mut Option<KnownState>,
        sent: SentBatch,
        error: StoreError,
        jobs: &mut VecDeque<Item>,
    ) {
        put_back(std::iter::empty(), jobs);
        let (mut batch, limit) = (sent.batch, self.store.limits().value_bytes);
        let length = batch.record().encode().len();
        if error.kind() != ErrorKind::Invalid || !batch.changed || length <= limit {
            return fail(batch, error.into());
        }
        // The state alone is too large. Nothing was written.
        *known = Some(batch.known.clone());
        for mut done in std::mem::take(&mut batch.done) {
            let error = StateError::TooLarge { key: done.job.name.to_string(), length, limit };
            done.came_to = CameTo::Failure(error.clone());
            done.rests(Rev(0));
            done.job.settle(Settled::Failed(error));
        }
    }
}

/// Puts jobs back to the front of the queue. Jobs that have begun start again, because the state they have seen is out
/// of date.
fn put_back(again: impl DoubleEndedIterator<Item = StateJob>, jobs: &mut VecDeque<Item>) {
    jobs.iter_mut().for_each(|item| item.started = None);
    again.rev().for_each(|job| jobs.push_front(job.into()));
}

/// Answers the jobs of a batch with an error of the store.
fn fail(batch: StateBatch, error: StateError) {
    for mut done in batch.done {
        done.failed(&error);
        done.job.settle(Settled::Failed(error.clone()));
    }
}

impl MutationRetry {
    /// The pauses double up to a limit; up to a half of each is random. After that every other attempt follows at once:
    /// a caller that pauses is slower than callers that never pause, and would lose to them again.
    fn pause_after(self, tried: u32, env: &Env) -> Duration {
        let (pause, longest) = (doubled(self.pause, tried), LONGEST.max(self.pause));
        if pause > longest && tried % 2 == 1 {
            return Duration::ZERO;
        }
        jittered(pause.min(longest), 0.5, env)
    }
}

#[cfg(test)]
mod tests {
    use crate::state::States;
    use crate::store::Store;

    #[tokio::test]
    async fn the_queue_of_an_idle_container_is_removed() {
        let states = States::on(&Store::memory().await.unwrap()).await.unwrap();
        let calls = (0..100).map(|number| {
            let session = states.session(&format!("{}", number % 10));
            async move { session.inc_state("n", 1).await.map(|_| ()) }
        });
        let done = calls.collect::<tokio::task::JoinSet<_>>().join_all().await;
        assert!(done.iter().all(Result::is_ok));
        while !states.shelf.is_idle() {
            tokio::task::yield_now().await;
        }
    }

    /// The runtime of the queue ends in the middle of a mutation; the next mutation starts again from the beginning.
    #[test]
    fn a_queue_does_not_outlive_its_runtime() {
        let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        let first = runtime();
        let states = first.block_on(async { States::on(&Store::memory().await.unwrap()).await.unwrap() });
        let session = states.session("s").mutation_timeout(None);
        first.block_on(async {
            let session = session.clone();
            tokio::spawn(async move {
                let stuck = session.atomic_state(|_| std::future::pending::<Result<_, ()>>());
                stuck.await.map(|_| ())
            });
            for _ in 0..10 {
                tokio::task::yield_now().await;
            }
        });
        drop(first);
        assert!(states.shelf.is_idle());
        assert!(runtime().block_on(session.inc_state("n", 1)).unwrap().changed);
    }
}
