//! The queue of a container: jobs that run one at a time, in the order of the calls. This file defines what a job is
//! and how its caller waits; `stored.rs` and `memory.rs` run them.

use std::any::Any;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicU64, Ordering};
use std::task::Poll;
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::Value;
use tokio::sync::oneshot;

use crate::lane::Rider;
use crate::panic::message_of;
use crate::state::batch::KnownState;
use crate::state::definition::ContainerDefinition;
use crate::state::op::{Event, StateOp};
use crate::state::{MutationError, Result, StateError, TimeoutOutcome};
use crate::store::{Check, Env, Key, Rev, Store};

/// The answer of a mutation.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Changed<T = Value> {
    /// The result of the operation: for a change the new value, for a removal the removed value.
    pub value: T,
    /// The container's rev, which rises with every commit. Callers whose changes share a commit get the same rev.
    pub rev: Rev,
    /// True if it changed anything. A mutation that changes nothing writes nothing.
    pub changed: bool,
    /// True if this is the kept answer of a mutation that was applied before under the same idempotency key.
    pub repeated: bool,
}

impl<T> Changed<T> {
    /// The same answer with another value.
    pub(crate) fn with<U>(&self, value: U) -> Changed<U> {
        Changed { value, rev: self.rev, changed: self.changed, repeated: self.repeated }
    }
}

/// A mutation in a queue.
pub(crate) struct StateJob {
    pub(crate) body: JobWork,
    /// The method's name.
    pub(crate) operation: &'static str,
    /// The container's name.
    pub(crate) name: Arc<str>,
    pub(crate) once: Option<Arc<str>>,
    pub(crate) definition: Arc<ContainerDefinition>,
    /// The condition of the change.
    pub(crate) condition: Option<Condition>,
    /// The check that must pass when the change lands.
    pub(crate) guard: Option<GuardCheck>,
    pub(crate) retry: MutationRetry,
    /// How often it was run on a state that was out of date.
    pub(crate) tried: u32,
    /// The containers that the calling task is mutating.
    pub(crate) held: HeldContainers,
    pub(crate) progress: Arc<Progress>,
    pub(crate) rider: Option<StateRider>,
    /// Where the event of the change is put when the job has run.
    pub(crate) told: Option<ToldEvent>,
}

/// The event of a change, for what rides with the job.
pub(crate) type ToldEvent = Arc<Mutex<Option<Event>>>;

/// A caller's condition on a container before it is changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Condition {
    /// It is at this rev. Zero stands for a container that was never written.
    AtRev(Rev),
    /// It has no state: it was never written, or was deleted.
    Absent,
}

impl Condition {
    /// Refuses a container at this rev, `None` if it was never written, if the condition is false.
    pub(crate) fn check(self, key: &str, rev: Option<Rev>, has_state: bool) -> Result<()> {
        let actual = rev.unwrap_or_default();
        match self {
            Condition::AtRev(expected) if expected != actual => {
                Err(StateError::RevisionConflict { key: key.into(), expected, actual })
            }
            Condition::Absent if has_state => Err(StateError::AlreadyExists { key: key.into(), rev: actual }),
            Condition::AtRev(_) | Condition::Absent => Ok(()),
        }
    }
}

/// A check that must pass, and the error text if it fails.
pub(crate) type GuardCheck = (Check, Arc<str>);

/// The rider of a mutation. If nothing is written, the rider gets the state that the mutation saw, and the answer if
/// the mutation did not fail on that state.
pub(crate) type StateRider = Box<dyn Rider<Changed, (KnownState, Option<Changed>)>>;

/// The work of a job.
pub(crate) enum JobWork {
    Op(StateOp, oneshot::Sender<Result<Changed>>),
    Mutator(Box<dyn Mutator>),
}

/// Code of a caller, which may run again on newer state.
pub(crate) trait Mutator: Send {
    fn run(&mut self, state: Option<Value>) -> RunningMutator;
    fn settle(self: Box<Self>, settled: Settled);
}

/// A running mutator. Its error is of the caller's own type.
pub(crate) type RunningMutator =
    Quiet<Pin<Box<dyn Future<Output = std::result::Result<Option<Value>, Refusal>> + Send>>>;
pub(crate) type Refusal = Box<dyn Any + Send>;

/// A value of a caller. If its drop panics, no other caller is affected.
pub(crate) struct Quiet<T>(Option<T>);

impl<T> Quiet<T> {
    pub(crate) fn new(own: T) -> Quiet<T> {
        Quiet(Some(own))
    }

    pub(crate) fn get(&mut self) -> &mut T {
        self.0.as_mut().expect("the value exists until the drop")
    }
}

impl<T> Drop for Quiet<T> {
    fn drop(&mut self) {
        let own = self.0.take();
        // The panic hook has shown the panic, and no caller is left to notify.
        let _ = std::panic::catch_unwind(AssertUnwindSafe(|| drop(own)));
    }
}

/// How a mutation ended.
pub(crate) enum Settled {
    Done(Changed),
    Refused(Refusal),
    Failed(StateError),
}

/// How often, and with which pauses, a mutation is tried if other writers are faster.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct MutationRetry {
    pub(crate) attempts: u32,
    /// Doubles after each attempt.
    pub(crate) pause: Duration,
}

impl StateJob {
    /// Identifies a call by its operation and arguments, as far as they are known.
    pub(crate) fn fingerprint(&self) -> u64 {
        let mut arguments = match &self.body {
            JobWork::Op(op, _) => serde_json::to_vec(&op.event(self.operation)).unwrap_or_default(),
            JobWork::Mutator(_) => self.operation.as_bytes().to_vec(),
        };
        // A call without a condition keeps the fingerprint that is already in stored answers and journals.
        match self.condition {
            None => {}
            Some(Condition::Absent) => arguments.push(0),
            Some(Condition::AtRev(rev)) => arguments.extend([&[1], &rev.0.to_be_bytes()[..]].concat()),
        }
        xxhash_rust::xxh3::xxh3_64(&arguments)
    }

    /// Refuses the container if the caller's condition is false.
    pub(crate) fn permits(&self, key: &str, rev: Option<Rev>, has_state: bool) -> Result<()> {
        self.condition.map_or(Ok(()), |condition| condition.check(key, rev, has_state))
    }

    pub(crate) fn settle(self, settled: Settled) {
        match (self.body, settled) {
            (JobWork::Mutator(mutator), settled) => mutator.settle(settled),
            (JobWork::Op(_, reply), Settled::Done(changed)) => drop(reply.send(Ok(changed))),
            (JobWork::Op(_, reply), Settled::Failed(error)) => drop(reply.send(Err(error))),
            // An operation has no error type of the caller.
            (JobWork::Op(..), Settled::Refused(_)) => {}
        }
    }
}

/// Whether a job has started. Until then its caller can withdraw it.
#[derive(Default)]
pub(crate) struct Progress {
    stage: AtomicU8,
    started_us: AtomicU64,
}

const QUEUED: u8 = 0;
const STARTED: u8 = 1;
const WITHDRAWN: u8 = 2;

impl Progress {
    /// Starts the job, or starts it again. Returns `false` if it was withdrawn.
    pub(crate) fn start(&self, env: &Env) -> bool {
        if self.stage.load(Ordering::SeqCst) == QUEUED {
            let now = u64::try_from(env.monotonic().as_micros()).unwrap_or(u64::MAX);
            self.started_us.store(now, Ordering::SeqCst);
        }
        match self.stage.compare_exchange(QUEUED, STARTED, Ordering::SeqCst, Ordering::SeqCst) {
            Ok(_) => true,
            Err(stage) => stage == STARTED,
        }
    }

    /// Withdraws the job if it has not started.
    fn withdraw(&self) -> bool {
        self.stage.compare_exchange(QUEUED, WITHDRAWN, Ordering::SeqCst, Ordering::SeqCst).is_ok()
    }
}

/// Identifies a container within this process.
#[derive(Clone)]
pub(crate) enum Identity {
    Stored(Store, Key),
    /// By its address, which is unique while it exists.
    Memory(usize),
}

impl PartialEq for Identity {
    fn eq(&self, other: &Identity) -> bool {
        match (self, other) {
            (Identity::Stored(store, key), Identity::Stored(others, other)) => key == other && store.is_same(others),
            (Identity::Memory(address), Identity::Memory(other)) => address == other,
            _ => false,
        }
    }
}

/// The containers that a task is mutating, outermost first.
#[derive(Clone, Default)]
pub(crate) struct HeldContainers(Option<Arc<Hold>>);

struct Hold {
    container: Identity,
    outer: HeldContainers,
}

tokio::task_local! {
    static HELD: HeldContainers;
}

impl HeldContainers {
    /// The containers that the current task is mutating.
    pub(crate) fn by_this_task() -> HeldContainers {
        HELD.try_with(HeldContainers::clone).unwrap_or_default()
    }

    pub(crate) fn has(&self, container: &Identity) -> bool {
        let mut here = self;
        while let Some(hold) = &here.0 {
            if hold.container == *container {
                return true;
            }
            here = &hold.outer;
        }
        false
    }

    /// Runs code that mutates these containers.
    pub(crate) async fn during<T>(self, code: impl Future<Output = T>) -> T {
        HELD.scope(self, code).await
    }

    pub(crate) fn and(&self, container: Identity) -> HeldContainers {
        HeldContainers(Some(Arc::new(Hold { container, outer: self.clone() })))
    }
}

/// The result of driving a mutator.
pub(crate) enum Ran {
    Ended(std::result::Result<Option<Value>, Refusal>),
    Panicked(String),
    /// It waits for something.
    Waits,
}

/// Runs a mutator until it ends, or with `once` until it must wait. Everything that it calls can see `held`.
pub(crate) async fn drive(running: &mut RunningMutator, held: HeldContainers, once: bool) -> Ran {
    let step = std::future::poll_fn(|context| {
        match std::panic::catch_unwind(AssertUnwindSafe(|| running.get().as_mut().poll(context))) {
            Ok(Poll::Ready(ended)) => Poll::Ready(Ran::Ended(ended)),
            Ok(Poll::Pending) if once => Poll::Ready(Ran::Waits),
            Ok(Poll::Pending) => Poll::Pending,
            Err(panic) => Poll::Ready(Ran::Panicked(message_of(&*panic))),
        }
    });
    HELD.scope(held, step).await
}

/// Starts a mutator. It may panic before it returns a future.
pub(crate) fn start(
    mutator: &mut dyn Mutator,
    state: Option<Value>,
    held: &HeldContainers,
) -> Result<RunningMutator, String> {
    let run = || HELD.sync_scope(held.clone(), || mutator.run(state));
    std::panic::catch_unwind(AssertUnwindSafe(run)).map_err(|panic| message_of(&*panic))
}

/// A caller that waits for its job. Dropping it withdraws the job if it has not started.
pub(crate) struct JobWaiter<'a, R> {
    pub(crate) answer: oneshot::Receiver<R>,
    pub(crate) progress: Arc<Progress>,
    pub(crate) env: &'a Env,
    pub(crate) key: &'a str,
    pub(crate) timeout: Option<Duration>,
}

impl<R> Drop for JobWaiter<'_, R> {
    fn drop(&mut self) {
        self.progress.withdraw();
    }
}

impl<R> JobWaiter<'_, R> {
    pub(crate) async fn answered<E>(mut self) -> Result<R, MutationError<E>> {
        let begin = self.env.monotonic();
        let mut sleep = None;
        let answered = std::future::poll_fn(|context| {
            if let Poll::Ready(answer) = Pin::new(&mut self.answer).poll(context) {
                return Poll::Ready(Some(answer));
            }
            let Some(timeout) = self.timeout else { return Poll::Pending };
            let sleep = sleep.get_or_insert_with(|| self.env.sleep(timeout));
            sleep.as_mut().poll(context).map(|()| None)
        });
        match answered.await {
            Some(Ok(answer)) => Ok(answer),
            Some(Err(_)) => Err(StateError::Abandoned { key: self.key.into() }.into()),
            None => Err(self.timed_out(begin).into()),
        }
    }

    fn timed_out(&self, begin: Duration) -> StateError {
        let (key, now) = (self.key.to_string(), self.env.monotonic());
        if self.progress.withdraw() {
            let (waited, ran, outcome) = (now - begin, Duration::ZERO, TimeoutOutcome::Withdrawn);
            return StateError::ScopeMutationTimeout { key, waited, ran, outcome };
        }
        let started = Duration::from_micros(self.progress.started_us.load(Ordering::SeqCst));
        let (waited, ran) = (started.saturating_sub(begin), now.saturating_sub(started.max(begin)));
        StateError::ScopeMutationTimeout { key, waited, ran, outcome: TimeoutOutcome::MayCommit }
    }
}
