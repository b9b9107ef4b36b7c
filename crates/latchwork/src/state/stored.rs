//! Stored containers: the queue in front, a commit checked on the rev behind. One worker a busy container takes what
//! is in its queue, runs it on the state and commits the result of all of it at once.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use crate::backoff::{doubled, jittered};
use crate::record::Record as _;
use crate::state::batch::{Batch, CameTo, Done, Known};
use crate::state::once::{Answer, Answers};
use crate::state::queue::{Body, Changed, Identity, Job, Ran, Retry, Running, Settled, drive};
use crate::state::watch::Told;
use crate::state::{Result, StateError};
use crate::store::{Actual, Commit, Env, ErrorKind, Key, Outcome, Rev, Space, Store};

/// How many mutations share a commit at the most.
const BATCH: usize = 1024;

/// The longest pause between attempts, unless the first is longer. Whoever was outrun often has the same prospects at
/// the next attempt as those who were not; with pauses that go on growing it would hardly come to try.
const LONGEST: Duration = Duration::from_millis(40);

/// The stored containers of a store.
pub(crate) struct Shelf {
    pub(crate) store: Store,
    pub(crate) space: Space,
    pub(crate) answers: Answers,
    /// Containers that a worker is at, with what waits there.
    busy: Mutex<HashMap<Key, VecDeque<Job>>>,
}

impl Shelf {
    pub(crate) fn new(store: Store, space: Space, answers: Answers) -> Shelf {
        Shelf { store, space, answers, busy: Mutex::default() }
    }

    /// Puts a job into a container's queue.
    pub(crate) fn submit(self: &Arc<Shelf>, key: &Key, name: &Arc<str>, job: Job) -> Result<()> {
        let runtime = tokio::runtime::Handle::try_current().map_err(|_| StateError::NoRuntime)?;
        let mut busy = self.busy.lock();
        if let Some(queue) = busy.get_mut(key) {
            queue.push_back(job);
            return Ok(());
        }
        busy.insert(key.clone(), VecDeque::from([job]));
        drop(busy);
        let worker = Worker {
            shelf: self.clone(),
            key: key.clone(),
            name: name.clone(),
            known: None,
            most: BATCH,
            ended: false,
        };
        runtime.spawn(worker.run());
        Ok(())
    }

    /// What a container holds.
    pub(crate) async fn read(&self, key: &Key, name: &str) -> Result<Known> {
        Known::at(&self.store.view().await?, key, name).await
    }

    #[cfg(test)]
    pub(crate) fn is_idle(&self) -> bool {
        self.busy.lock().is_empty()
    }
}

struct Worker {
    shelf: Arc<Shelf>,
    key: Key,
    name: Arc<str>,
    /// The state that the last commit left, if that was ours.
    known: Option<Known>,
    /// How many jobs the next batch may have.
    most: usize,
    /// Whether the queue was let go of. One that is there from then on is another worker's.
    ended: bool,
}

/// A job that is to run, or has been run up to where it waits.
enum Item {
    Fresh(Job),
    Started(Job, Running),
}

impl Drop for Worker {
    /// A worker ends by itself when nothing is left. If it ends because the runtime does, those who wait are told by
    /// the end of their jobs.
    fn drop(&mut self) {
        if !self.ended {
            // Jobs hold what is the callers' own; it is not to be dropped under the lock.
            let left = self.shelf.busy.lock().remove(&self.key);
            drop(left);
        }
    }
}

impl Worker {
    async fn run(mut self) {
        let mut next = VecDeque::new();
        loop {
            if !self.fill(&mut next) {
                return;
            }
            self.round(&mut next).await;
        }
    }

    /// Takes what waits. When there is nothing, the container is idle and the queue is gone.
    fn fill(&mut self, next: &mut VecDeque<Item>) -> bool {
        let mut withdrawn = Vec::new();
        let mut busy = self.shelf.busy.lock();
        let queue = busy.get_mut(&self.key).expect("a worker has a queue until it lets go of it");
        while next.len() < self.most
            && let Some(job) = queue.pop_front()
        {
            if job.progress.is_withdrawn() {
                withdrawn.push(job);
            } else {
                next.push_back(Item::Fresh(job));
            }
        }
        if next.is_empty() {
            busy.remove(&self.key);
            self.ended = true;
        }
        drop(busy);
        !next.is_empty()
    }

    fn env(&self) -> &Env {
        self.shelf.store.env()
    }

    async fn known(&mut self) -> Result<Known> {
        if let Some(known) = self.known.take() {
            return Ok(known);
        }
        self.shelf.read(&self.key, &self.name).await
    }

    /// Runs some jobs and commits what they came to.
    async fn round(&mut self, next: &mut VecDeque<Item>) {
        let batch = match self.known().await {
            Ok(known) => Ok(self.run_batch(known, next).await),
            Err(error) => Err(error),
        };
        let ended = match batch {
            Ok(batch) if batch.done.is_empty() => {
                self.known = Some(batch.known);
                Ok(())
            }
            Ok(batch) => self.commit(batch, next).await,
            Err(error) => Err(error),
        };
        if let Err(error) = ended {
            // The store does not serve. Whoever waits behind finds out by trying.
            for item in next.drain(..) {
                let (Item::Fresh(job) | Item::Started(job, _)) = item;
                job.settle(Settled::Failed(error.clone()));
            }
        }
    }

    async fn run_batch(&mut self, known: Known, next: &mut VecDeque<Item>) -> Batch {
        let mut batch = Batch::new(known, self.name.clone());
        let held_here = Identity::Stored(self.shelf.store.clone(), self.key.clone());
        while batch.done.len() < self.most
            && let Some(item) = next.pop_front()
        {
            let (mut job, started) = match item {
                Item::Fresh(job) => (job, None),
                Item::Started(job, running) => (job, Some(running)),
            };
            let answer_key = job.once.as_ref().map(|once| self.shelf.answers.key(&self.key, once));
            if let Some(key) = &answer_key {
                if batch.done.iter().any(|done| done.answer.as_ref().is_some_and(|(known, _)| known == key)) {
                    // Its answer is about to be written.
                    next.push_front(Item::Fresh(job));
                    break;
                }
                match self.shelf.answers.get(&self.shelf.store, key).await {
                    Ok(None) => {}
                    Ok(Some(answer)) => {
                        settle_again(job, answer, &self.name);
                        continue;
                    }
                    Err(error) => {
                        job.settle(Settled::Failed(error));
                        continue;
                    }
                }
            }
            if !job.progress.start(self.env()) {
                continue;
            }
            if let Body::Op(..) = job.body {
                batch.run_op(job, answer_key);
                continue;
            }
            let held = job.held.and(held_here.clone());
            let running = match started {
                Some(running) => Ok(running),
                None => batch.start(&mut job, &held),
            };
            let mut running = match running {
                Ok(running) => running,
                Err(message) => {
                    batch.ran(job, Ran::Panicked(message), answer_key);
                    continue;
                }
            };
            match drive(&mut running, held.clone(), true).await {
                // What ran before it is not to wait for it.
                Ran::Waits if !batch.done.is_empty() => {
                    next.push_front(Item::Started(job, running));
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
        batch
    }
}

/// What was answered before is answered again.
fn settle_again(mut job: Job, answer: Answer, name: &str) {
    let Answer { operation, fingerprint, value, rev, changed } = answer;
    if fingerprint == job.fingerprint() {
        if let Some(rider) = &mut job.rider {
            let changed = Changed { value: value.clone(), rev: Rev(rev), changed, repeated: true };
            rider.rests(Known { rev: None, state: None }, Some(changed));
        }
        job.settle(Settled::Done(Changed { value, rev: Rev(rev), changed, repeated: true }));
        return;
    }
    let once = job.once.as_deref().unwrap_or_default().to_string();
    job.settle(Settled::Failed(StateError::OnceReused { key: name.into(), once, operation }));
}

impl Worker {
    /// Commits a batch and settles its jobs, or gives back those that are to be tried again.
    async fn commit(&mut self, mut batch: Batch, next: &mut VecDeque<Item>) -> Result<()> {
        let value = batch.record().encode();
        let limit = self.shelf.store.limits().value_bytes;
        if batch.changed && value.len() > limit {
            let error = StateError::TooLarge { key: self.name.to_string(), length: value.len(), limit };
            self.too_much(batch, error, next);
            return Ok(());
        }
        let mut commit = self.prepared(&mut batch, value);
        if batch.done.iter().any(|done| done.answer.is_some()) {
            commit = match self.shelf.answers.sweep(&self.shelf.store, commit).await {
                Ok(commit) => commit,
                Err(error) => return Err(fail(batch, error)),
            };
        }
        match self.shelf.store.commit(commit).await {
            Ok(Outcome::Applied(receipt)) => {
                let rev = batch.rev();
                let written = batch.changed || batch.known.rev.is_some();
                self.known = Some(Known { rev: written.then_some(rev), state: batch.state });
                self.most = BATCH.min(self.most * 2);
                for mut done in batch.done {
                    match &mut done.job.rider {
                        Some(rider) if done.came_to.boards() => rider.landed(&receipt),
                        _ => done.rests(rev),
                    }
                    done.settle(rev);
                }
                Ok(())
            }
            Ok(Outcome::Refused(refusal)) => {
                // Whoever rides may have lost the right to; the others go without it.
                batch.done.retain_mut(|done| match &mut done.job.rider {
                    Some(rider) if done.came_to.boards() => !rider.refused(&refusal),
                    _ => true,
                });
                let moved = refusal.failed.iter().find(|failed| failed.index == 0);
                let actual = moved.map(|moved| match &moved.actual {
                    Actual::AtRev(rev) => Some(*rev),
                    _ => None,
                });
                self.again(batch, actual, next).await;
                Ok(())
            }
            // More than a commit can hold, of which nothing was written.
            Err(error) if error.kind() == ErrorKind::Invalid => {
                self.too_much(batch, error.into(), next);
                Ok(())
            }
            Err(error) => Err(fail(batch, error.into())),
        }
    }

    /// The first check is that on the container itself.
    fn prepared(&self, batch: &mut Batch, value: crate::store::Bytes) -> Commit {
        let mut commit = match batch.known.rev {
            Some(rev) => Commit::new().at_rev(&self.key, rev),
            None => Commit::new().absent(&self.key),
        };
        if batch.changed {
            commit = commit.put(&self.key, value).meta(Told::encode(vec![batch.told()]));
        }
        for (key, answer) in batch.done.iter().filter_map(|done| done.answer.as_ref()) {
            let answer = Answer { rev: batch.rev().0, ..answer.clone() };
            commit = self.shelf.answers.put(commit, key, self.env().now(), &answer);
        }
        let rev = batch.rev();
        for done in batch.done.iter_mut().filter(|done| done.came_to.boards()) {
            let changed = done.answers(rev);
            if let (Some(rider), Some(changed)) = (&mut done.job.rider, changed) {
                commit = rider.board(commit, &changed);
            }
        }
        commit
    }

    /// Somebody else has moved the container, or given the answer. `moved` tells where it is now, if it moved.
    async fn again(&mut self, batch: Batch, moved: Option<Option<Rev>>, next: &mut VecDeque<Item>) {
        let expected = batch.known.rev;
        let mut rest = VecDeque::new();
        let mut pause = Duration::ZERO;
        for Done { mut job, answer, .. } in batch.done {
            if let Some(actual) = moved {
                job.tried += 1;
                if job.tried >= job.retry.attempts {
                    // Whoever was faster may have sent the very same.
                    if let Some((key, _)) = &answer
                        && let Ok(Some(answer)) = self.shelf.answers.get(&self.shelf.store, key).await
                    {
                        settle_again(job, answer, &self.name);
                        continue;
                    }
                    let (key, attempts) = (self.name.to_string(), job.tried);
                    let error = StateError::ConcurrentModification { key, attempts, expected, actual };
                    job.settle(Settled::Failed(error));
                    continue;
                }
                pause = pause.max(job.retry.pause_after(job.tried, self.env()));
            }
            rest.push_back(Item::Fresh(job));
        }
        // One that had begun has seen a state that was not the last.
        for item in next.drain(..) {
            let (Item::Fresh(job) | Item::Started(job, _)) = item;
            rest.push_back(Item::Fresh(job));
        }
        *next = rest;
        if !pause.is_zero() {
            self.env().sleep(pause).await;
        }
    }

    /// Of several, half are tried, and so on, so that only those fail that are too much by themselves.
    fn too_much(&mut self, mut batch: Batch, error: StateError, next: &mut VecDeque<Item>) {
        self.known = Some(batch.known);
        self.most = (batch.done.len() / 2).max(1);
        if batch.done.len() == 1
            && let Some(mut done) = batch.done.pop()
        {
            if let StateError::TooLarge { .. } = error {
                done.came_to = CameTo::Failure(error.clone());
                done.rests(Rev(0));
            }
            done.failed(&error);
            done.job.settle(Settled::Failed(error));
        }
        // One that had begun has seen a state that will not be.
        let behind = next.drain(..).map(|(Item::Fresh(job) | Item::Started(job, _))| Item::Fresh(job));
        *next = batch.done.into_iter().map(|Done { job, .. }| Item::Fresh(job)).chain(behind).collect();
    }
}

/// Tells the jobs of a batch that the store failed, and gives the error back for those behind them.
fn fail(batch: Batch, error: StateError) -> StateError {
    for mut done in batch.done {
        done.failed(&error);
        done.job.settle(Settled::Failed(error.clone()));
    }
    error
}

impl Retry {
    /// The pauses double up to a limit; a part of each, up to a half, is left to chance. After that every other attempt
    /// follows at once: one that has paused is slower than those who never do, and would lose to them again.
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
    async fn the_queue_goes_away_when_a_container_is_idle() {
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

    /// The runtime that ran the queue ends in the middle of a mutation; the next one starts afresh.
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
