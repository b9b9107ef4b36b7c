//! The ledger of calls under an `Idempotency-Key`: which attempt may run, and what it answered. Every decision is one
//! commit on the store, so it holds for all processes that share it. This file knows no HTTP but the stored answer.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use latchwork::store::{
    Bytes, Commit, Generation, Item, Key, Order, SpaceSpec, Store, StoreError, Timestamp, Uuid, View,
};
use parking_lot::Mutex;
use tokio::sync::OnceCell;

use crate::calls::stored::{AttemptRight, CALLS, CallKeys, CallState, Digest, StoredAnswer, StoredCall};
use crate::wire::problem::{Problem, ProblemCode};

/// How long an answer is kept.
const KEPT: Duration = Duration::from_secs(24 * 60 * 60);
/// How long an attempt of another process is taken to run after the last sign of life.
const LEASE: Duration = Duration::from_secs(15);
/// The pause between signs of life.
const BEAT: Duration = Duration::from_secs(5);
/// The number of outdated records that each new one removes.
const SWEPT: usize = 8;
/// How often a lost race is run again.
const TRIES: usize = 16;

/// The calls of a namespace.
#[derive(Clone)]
pub(crate) struct Calls(Arc<Inner>);

struct Inner {
    store: Store,
    keys: OnceCell<CallKeys>,
    /// Of this process, from its start to its end.
    life: Uuid,
    /// What runs in this process.
    running: Mutex<BTreeSet<Digest>>,
}

/// What is to be done with a call.
#[derive(Debug)]
pub(crate) enum Begun {
    /// It runs now.
    Run(Attempt),
    /// It was answered before.
    Answered(StoredAnswer),
}

/// An attempt at a call, which runs in this process. Dropping it leaves the call to the next attempt.
pub(crate) struct Attempt {
    calls: Calls,
    digest: Digest,
    call: StoredCall,
    right: AttemptRight,
    ending: Ending,
}

/// How an attempt ends in the commit of its change.
#[derive(Clone)]
pub(crate) struct Ending(Arc<EndingAttempt>);

struct EndingAttempt {
    record: Key,
    mark: Key,
    call: StoredCall,
    /// True once a commit with the answer has landed.
    is_over: AtomicBool,
}

impl std::fmt::Debug for Ending {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ending").field("call", &self.0.call).finish_non_exhaustive()
    }
}

impl Ending {
    /// Adds the answer to a commit. `None` if it cannot be written.
    pub(crate) fn finish(&self, commit: Commit, answer: StoredAnswer) -> Option<Commit> {
        let EndingAttempt { record, mark, call, .. } = &*self.0;
        let call = StoredCall { state: CallState::Finished(answer), ..call.clone() };
        Some(commit.present(mark).delete(mark).put(record, call.encode()?))
    }

    /// The commit has landed.
    pub(crate) fn has_landed(&self) {
        self.0.is_over.store(true, Ordering::Relaxed);
    }

    /// True if the answer is stored.
    pub(crate) fn is_over(&self) -> bool {
        self.0.is_over.load(Ordering::Relaxed)
    }
}

impl std::fmt::Debug for Attempt {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Attempt").field("call", &self.call).finish_non_exhaustive()
    }
}

impl Drop for Attempt {
    fn drop(&mut self) {
        self.calls.0.running.lock().remove(&self.digest);
    }
}

/// What is found of a call before an attempt.
enum Found {
    Nothing,
    Outdated(StoredCall, Item),
    Answered(StoredAnswer),
    Runs,
    CutOff(StoredCall),
}

impl Calls {
    pub(crate) fn on(store: &Store) -> Calls {
        let (life, running) = (store.env().uuid(), Mutex::default());
        Calls(Arc::new(Inner { store: store.clone(), keys: OnceCell::new(), life, running }))
    }

    async fn keys(&self) -> Result<&CallKeys, StoreError> {
        let declare = async || Ok(CallKeys(self.0.store.space(SpaceSpec::new(CALLS).keys_used_once()).await?));
        self.0.keys.get_or_try_init(declare).await
    }

    /// Begins a call, or finds its answer.
    pub(crate) async fn begin(&self, digest: Digest, request: Digest) -> Result<Begun, Problem> {
        let keys = self.keys().await?;
        for _ in 0..TRIES {
            let view = self.0.store.view().await?;
            let begun = match self.find(keys, &view, &digest, &request).await? {
                Found::Answered(answer) => return Ok(Begun::Answered(answer)),
                Found::Runs => return Err(in_use()),
                Found::Nothing => self.first(keys, &view, None, digest, request).await?,
                Found::Outdated(old, item) => self.first(keys, &view, Some((old, item)), digest, request).await?,
                Found::CutOff(call) => self.take_over(keys, digest, call).await?,
            };
            if let Some(attempt) = begun {
                return Ok(Begun::Run(attempt));
            }
        }
        Err(Problem::new(ProblemCode::Contended, "other requests under this Idempotency-Key were faster each time"))
    }

    async fn find(&self, keys: &CallKeys, view: &View, digest: &Digest, request: &Digest) -> Result<Found, Problem> {
        let Some(item) = view.get(&keys.record(digest)).await? else { return Ok(Found::Nothing) };
        let call = decoded(&item)?;
        let is_outdated = call.began.plus(KEPT) <= self.0.store.env().now();
        let runs = matches!(call.state, CallState::Running) && self.runs(keys, view, digest, &call).await?;
        if is_outdated && !runs {
            return Ok(Found::Outdated(call, item));
        }
        if call.request != *request {
            let detail = "this Idempotency-Key was used for a request with another method, path, condition or body";
            return Err(Problem::new(ProblemCode::KeyReused, detail));
        }
        Ok(match call.state {
            CallState::Finished(answer) => Found::Answered(answer),
            CallState::Running if runs => Found::Runs,
            CallState::Running | CallState::Undecided => Found::CutOff(call),
        })
    }

    /// Whether an attempt that is recorded as running still runs.
    async fn runs(&self, keys: &CallKeys, view: &View, digest: &Digest, call: &StoredCall) -> Result<bool, Problem> {
        if call.life == self.0.life {
            return Ok(self.0.running.lock().contains(digest));
        }
        let opening = self.0.store.opening();
        if opening.is_some() && call.opening != opening {
            return Ok(false);
        }
        let mark = view.get(&keys.attempt(call.id, call.attempt)).await?;
        let now = self.0.store.env().now();
        Ok(mark.is_some_and(|mark| mark.time.plus(LEASE) > now))
    }

    /// Commits the first attempt. `None` if another request was faster.
    async fn first(
        &self,
        keys: &CallKeys,
        view: &View,
        outdated: Option<(StoredCall, Item)>,
        digest: Digest,
        request: Digest,
    ) -> Result<Option<Attempt>, Problem> {
        let env = self.0.store.env();
        let call = StoredCall {
            id: env.uuid(),
            request,
            began: env.now(),
            since: view.generation().0,
            attempt: 1,
            life: self.0.life,
            opening: self.0.store.opening(),
            state: CallState::Running,
        };
        let record = keys.record(&digest);
        let mut commit = Commit::new().put(&keys.place(call.began, &digest), Bytes::new());
        commit = match &outdated {
            Some((old, item)) => {
                let mark = keys.attempt(old.id, old.attempt);
                let place = keys.place(old.began, &digest);
                let commit = commit.at_rev(&record, item.rev).delete(&mark);
                if old.began == call.began { commit } else { commit.delete(&place) }
            }
            None => commit.absent(&record),
        };
        commit = self.sweep(keys, view, commit, &digest).await?;
        self.run(keys, commit, digest, call).await
    }

    /// Commits another attempt at a call whose last attempt was cut off.
    async fn take_over(
        &self,
        keys: &CallKeys,
        digest: Digest,
        mut call: StoredCall,
    ) -> Result<Option<Attempt>, Problem> {
        let before = keys.attempt(call.id, call.attempt);
        call.attempt = call.attempt.saturating_add(1);
        (call.life, call.opening, call.state) = (self.0.life, self.0.store.opening(), CallState::Running);
        // From this commit on, the attempt before can change nothing.
        let commit = Commit::new().present(&before).delete(&before);
        self.run(keys, commit, digest, call).await
    }

    async fn run(
        &self,
        keys: &CallKeys,
        commit: Commit,
        digest: Digest,
        call: StoredCall,
    ) -> Result<Option<Attempt>, Problem> {
        let mark = keys.attempt(call.id, call.attempt);
        let commit = commit.put(&mark, Bytes::new()).put(&keys.record(&digest), encoded(&call)?);
        // Noted before the commit: another request of this process may find the record at once.
        if !self.0.running.lock().insert(digest) {
            return Err(in_use());
        }
        let (record, is_over) = (keys.record(&digest), AtomicBool::new(false));
        let ending = Ending(Arc::new(EndingAttempt { record, mark: mark.clone(), call: call.clone(), is_over }));
        let attempt = Attempt { calls: self.clone(), digest, call, right: AttemptRight(mark), ending };
        let outcome = self.0.store.commit(commit).await?;
        Ok(outcome.is_applied().then_some(attempt))
    }

    /// Adds the removal of some outdated records to a commit.
    async fn sweep(&self, keys: &CallKeys, view: &View, mut commit: Commit, new: &Digest) -> Result<Commit, Problem> {
        let end = keys.places_before(Timestamp(self.0.store.env().now().minus(KEPT).0));
        for (place, _) in view.scan(&end, Order::Ascending, SWEPT).await? {
            let Some(digest) = CallKeys::digest_of(&place).filter(|digest| digest != new) else { continue };
            let record = keys.record(&digest);
            if let Some(item) = view.get(&record).await? {
                let Some(call) = StoredCall::decode(&item.value) else { continue };
                if keys.place(call.began, &digest) == place {
                    if matches!(call.state, CallState::Running) && self.runs(keys, view, &digest, &call).await? {
                        continue;
                    }
                    let mark = keys.attempt(call.id, call.attempt);
                    commit = commit.at_rev(&record, item.rev).delete(&record).delete(&mark);
                }
            }
            commit = commit.delete(&place);
        }
        Ok(commit)
    }
}

fn in_use() -> Problem {
    let detail = "the first request under this Idempotency-Key is still running; try again later";
    Problem::new(ProblemCode::KeyInUse, detail).retry_after(Duration::from_secs(1))
}

fn decoded(item: &Item) -> Result<StoredCall, Problem> {
    // An unreadable record is an error: to run the call again could double its effect.
    StoredCall::decode(&item.value).ok_or_else(|| Problem::internal("the record of an Idempotency-Key is damaged"))
}

fn encoded(call: &StoredCall) -> Result<Bytes, Problem> {
    call.encode().ok_or_else(|| Problem::internal("the record of an Idempotency-Key cannot be written"))
}

impl Attempt {
    /// The id of the call: the same for all attempts.
    pub(crate) fn id(&self) -> Uuid {
        self.call.id
    }

    /// True if an attempt before may have taken effect.
    pub(crate) fn is_repeated(&self) -> bool {
        self.call.attempt > 1
    }

    /// What the call did is later than this generation.
    pub(crate) fn since(&self) -> Generation {
        Generation(self.call.since)
    }

    /// When the first attempt began.
    pub(crate) fn began(&self) -> Timestamp {
        self.call.began
    }

    /// How the attempt ends in the commit of its change.
    pub(crate) fn ending(&self) -> &Ending {
        &self.ending
    }

    /// The right that guards what this attempt writes.
    pub(crate) fn right(&self) -> &AttemptRight {
        &self.right
    }

    /// Gives signs of life, until it is dropped.
    pub(crate) async fn keep_alive(&self) -> Infallible {
        let store = self.calls.0.store.clone();
        loop {
            store.env().sleep(BEAT).await;
            let mark = &self.right.0;
            let sign = Commit::new().present(mark).put(mark, Bytes::new());
            if let Err(error) = store.commit(sign).await {
                tracing::warn!(%error, "no sign of life was written for a request with an Idempotency-Key");
            }
        }
    }

    /// Stores the answer. `false` if another attempt has taken over: then its answer counts.
    pub(crate) async fn finish(self, answer: StoredAnswer) -> Result<bool, Problem> {
        self.end(CallState::Finished(answer)).await
    }

    /// Leaves the call to the next attempt, which begins at once.
    pub(crate) async fn leave(self) -> Result<bool, Problem> {
        self.end(CallState::Undecided).await
    }

    async fn end(self, state: CallState) -> Result<bool, Problem> {
        let keys = self.calls.keys().await?;
        let mark = &self.right.0;
        // The mark of an undecided call stays, for the next attempt to take.
        let commit = match &state {
            CallState::Finished(_) => Commit::new().present(mark).delete(mark),
            CallState::Running | CallState::Undecided => Commit::new().present(mark),
        };
        let call = StoredCall { state, ..self.call.clone() };
        let commit = commit.put(&keys.record(&self.digest), encoded(&call)?);
        Ok(self.calls.0.store.commit(commit).await?.is_applied())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt as _;
    use latchwork::store::{Env, Limits, VirtualClock};

    const KEY: Digest = [1; 32];
    const REQUEST: Digest = [2; 32];

    async fn store() -> (Store, Arc<VirtualClock>) {
        let (env, clock) = Env::seeded(7);
        (Store::memory_with(env, Limits::default()).await.unwrap(), clock)
    }

    fn answer(body: &'static str) -> StoredAnswer {
        StoredAnswer { status: 200, headers: Vec::new(), body: Bytes::from_static(body.as_bytes()) }
    }

    async fn attempt(calls: &Calls) -> Attempt {
        match calls.begin(KEY, REQUEST).await.unwrap() {
            Begun::Run(attempt) => attempt,
            Begun::Answered(answer) => panic!("answered: {answer:?}"),
        }
    }

    async fn refused(calls: &Calls, request: Digest) -> ProblemCode {
        calls.begin(KEY, request).await.unwrap_err().code()
    }

    #[tokio::test]
    async fn a_call_runs_once_and_is_answered_again() {
        let calls = Calls::on(&store().await.0);
        let first = attempt(&calls).await;
        assert!(!first.is_repeated());
        assert_eq!(refused(&calls, REQUEST).await, ProblemCode::KeyInUse);
        assert_eq!(refused(&calls, [3; 32]).await, ProblemCode::KeyReused);
        assert!(first.finish(answer("one")).await.unwrap());
        let Begun::Answered(again) = calls.begin(KEY, REQUEST).await.unwrap() else { panic!("it ran again") };
        assert_eq!(again, answer("one"));
        assert_eq!(refused(&calls, [3; 32]).await, ProblemCode::KeyReused);
    }

    #[tokio::test]
    async fn an_attempt_that_was_dropped_or_left_is_followed_by_another_of_the_same_id() {
        let calls = Calls::on(&store().await.0);
        let first = attempt(&calls).await;
        let (id, since) = (first.id(), first.since());
        drop(first);
        let second = attempt(&calls).await;
        assert!(second.is_repeated());
        assert_eq!((second.id(), second.since()), (id, since));
        assert!(second.leave().await.unwrap());
        let third = attempt(&calls).await;
        assert_eq!((third.id(), third.since()), (id, since));
    }

    #[tokio::test]
    async fn the_attempt_of_a_dead_process_blocks_for_one_lease() {
        let (store, clock) = store().await;
        let dead = attempt(&Calls::on(&store)).await;
        let calls = Calls::on(&store);
        assert_eq!(refused(&calls, REQUEST).await, ProblemCode::KeyInUse);
        clock.advance(LEASE);
        let next = attempt(&calls).await;
        assert!(next.is_repeated());
        // The process was only slow. Its answer comes too late, and what it writes under its right is refused.
        let space = store.space(SpaceSpec::new("other")).await.unwrap();
        let late = Commit::new().guard(dead.right()).put(&space.key("a"), "late");
        assert!(!store.commit(late).await.unwrap().is_applied());
        assert!(!dead.finish(answer("late")).await.unwrap());
        assert!(next.finish(answer("next")).await.unwrap());
        let Begun::Answered(kept) = calls.begin(KEY, REQUEST).await.unwrap() else { panic!("it ran again") };
        assert_eq!(kept, answer("next"));
    }

    #[tokio::test]
    async fn of_processes_that_decide_on_the_same_view_one_runs_the_attempt() {
        let store = store().await.0;
        let processes = [Calls::on(&store), Calls::on(&store)];
        let view = store.view().await.unwrap();
        let mut attempts = Vec::new();
        for calls in &processes {
            attempts.extend(calls.first(calls.keys().await.unwrap(), &view, None, KEY, REQUEST).await.unwrap());
        }
        assert_eq!(attempts.len(), 1);
        let cut_off = attempts.remove(0);
        let mut attempts = Vec::new();
        for _ in 0..2 {
            let calls = Calls::on(&store);
            attempts.extend(calls.take_over(calls.keys().await.unwrap(), KEY, cut_off.call.clone()).await.unwrap());
        }
        assert_eq!(attempts.len(), 1);
        assert!(!cut_off.finish(answer("late")).await.unwrap());
    }

    #[tokio::test]
    async fn signs_of_life_keep_an_attempt() {
        let (store, clock) = store().await;
        let slow = attempt(&Calls::on(&store)).await;
        let calls = Calls::on(&store);
        let mut beats = Box::pin(slow.keep_alive());
        for _ in 0..12 {
            assert!((&mut beats).now_or_never().is_none());
            clock.advance(BEAT);
            // The sleep is over; the sign is written while other tasks run.
            for _ in 0..10 {
                assert!((&mut beats).now_or_never().is_none());
                tokio::task::yield_now().await;
            }
            assert_eq!(refused(&calls, REQUEST).await, ProblemCode::KeyInUse);
        }
    }

    #[tokio::test]
    async fn an_outdated_record_is_replaced_and_others_are_swept() {
        let (store, clock) = store().await;
        let calls = Calls::on(&store);
        for key in 10..20 {
            let Begun::Run(attempt) = calls.begin([key; 32], REQUEST).await.unwrap() else { panic!("answered") };
            attempt.finish(answer("old")).await.unwrap();
        }
        let first = attempt(&calls).await;
        let id = first.id();
        first.finish(answer("one")).await.unwrap();
        clock.advance(KEPT);
        let Begun::Run(again) = calls.begin(KEY, [3; 32]).await.unwrap() else { panic!("answered") };
        assert!(!again.is_repeated());
        assert_ne!(again.id(), id);
        again.finish(answer("two")).await.unwrap();
        clock.advance(Duration::from_secs(1));
        for key in 30..32 {
            let Begun::Run(other) = calls.begin([key; 32], REQUEST).await.unwrap() else { panic!("answered") };
            other.finish(answer("other")).await.unwrap();
        }
        let space = &calls.keys().await.unwrap().0;
        let left = store.view().await.unwrap().scan(&space.all(), Order::Ascending, 100).await.unwrap();
        assert_eq!(left.len(), 6, "three records and their places: {left:?}");
    }
}
