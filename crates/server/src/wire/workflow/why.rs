//! Why an execution does not continue, on the wire: what it waits for with all that is known of it, and the sentences
//! for people. It is the JSON that `latch workflow why` prints.

use latchwork::lock::{LockName, LockScope, LockState, Owner, Requested};
use latchwork::store::Timestamp;
use latchwork::words::{relative, time};
use latchwork::workflow::{Operation, OperationState, QueuePosition, Status, Wait, Why};
use serde::Serialize;
use utoipa::ToSchema;

use crate::wire::lock::{LockNameWire, LockRequestWire};
use crate::wire::workflow::event::EventWire;
use crate::wire::workflow::{OutcomeWire, WaitWire, waited};

/// Why an execution does not continue.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = Why)]
pub(crate) struct WhyWire {
    id: String,
    workflow: String,
    /// `running`, `asleep`, `waiting`, `parked`, `completed`, `failed`, `timed_out` or `cancelled`.
    status: &'static str,
    #[serde(flatten)]
    outcome: OutcomeWire,
    /// Why its cancellation was requested.
    #[schema(required)]
    cancel_reason: Option<String>,
    waits: Vec<ToldWait>,
    /// Operations without a result, if the execution is running.
    begun: Vec<EventWire>,
    /// All of this for people.
    sentences: Vec<String>,
}

impl WhyWire {
    pub(crate) fn new(found: Why, waits: Vec<ToldWait>, begun: &[Operation], sentences: Vec<String>) -> WhyWire {
        WhyWire {
            status: found.status().name(),
            outcome: OutcomeWire::of(&found.state),
            id: found.id.to_string(),
            workflow: found.workflow,
            cancel_reason: found.cancel,
            waits,
            begun: begun.iter().map(EventWire::from).collect(),
            sentences,
        }
    }
}

/// A wait, with what is known of the thing that is waited for.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = WhyWait)]
pub(crate) struct ToldWait {
    #[serde(flatten)]
    wait: WaitWire,
    /// How many attempts a step has had that will be tried again.
    #[schema(required)]
    attempts: Option<u32>,
    #[schema(required)]
    last_failure: Option<String>,
    /// The status of the child that it waits for.
    #[schema(required)]
    child_status: Option<&'static str>,
    /// The lock that it waits for.
    #[schema(required)]
    lock: Option<ToldLock>,
    /// The limit whose permit it waits for, and its position in the queue.
    #[schema(required)]
    queue: Option<QueueWire>,
    sentence: String,
}

/// A lock, and a request that waits for it.
pub(crate) struct LockWait {
    pub(crate) lock: LockState,
    pub(crate) token: u64,
    /// The position in the queue, unless it is too far back to count.
    pub(crate) position: Option<u64>,
}

/// What is known of a wait beside the wait itself.
#[derive(Default)]
pub(crate) struct WaitFacts {
    /// The step that will be tried again.
    pub(crate) retried: Option<Operation>,
    /// The child that it waits for; `Some(None)` if that was removed.
    pub(crate) child: Option<Option<Status>>,
    pub(crate) lock: Option<LockWait>,
    pub(crate) queue: Option<QueuePosition>,
}

impl ToldWait {
    pub(crate) fn new(wait: &Wait, facts: WaitFacts, sentence: &str, now: Timestamp) -> ToldWait {
        let last_failure = facts.retried.as_ref().and_then(|operation| match &operation.state {
            OperationState::Retrying { failure, .. } => Some(failure.message().to_string()),
            _ => None,
        });
        let attempts = facts.retried.as_ref().map(|operation| operation.attempts);
        let mut sentence = sentence.to_string();
        if let (Some(attempts), Some(failure)) = (attempts, &last_failure) {
            sentence += &format!(" Attempt {attempts} failed: {failure}");
        }
        if let Some(child) = facts.child {
            let status = child.map_or("removed".into(), |status| status.to_string());
            sentence += &format!(" The child is {status}.");
        }
        if let Some(lock) = &facts.lock {
            sentence += &lock.sentence(now);
        }
        ToldWait {
            wait: wait.into(),
            attempts,
            last_failure,
            child_status: facts.child.flatten().map(Status::name),
            lock: facts.lock.as_ref().map(ToldLock::from),
            queue: facts.queue.map(QueueWire::from),
            sentence,
        }
    }

    pub(crate) fn sentence(&self) -> &str {
        &self.sentence
    }
}

/// A lock that an execution waits for.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = WhyLock)]
struct ToldLock {
    #[serde(flatten)]
    name: LockNameWire,
    /// The token that the grant will have.
    token: u64,
    /// The position in the queue, unless it is too far back to count.
    #[schema(required)]
    position: Option<u64>,
    holders: Vec<LockRequestWire>,
}

impl From<&LockWait> for ToldLock {
    fn from(LockWait { lock, token, position }: &LockWait) -> ToldLock {
        let holders = lock.holders.iter().map(|holder| LockRequestWire::of(holder, lock.kind)).collect();
        ToldLock { name: (&lock.name).into(), token: *token, position: *position, holders }
    }
}

/// The position of an execution in the queue of a limit.
#[derive(Debug, Serialize, ToSchema)]
#[schema(as = QueuePosition)]
struct QueueWire {
    /// The limit's key, or the workflow's name.
    key: String,
    /// How many executions are before it, at most 10,000.
    ahead: u64,
    /// How many executions hold a permit.
    used: u64,
    /// How many may hold one.
    limit: u32,
}

impl From<QueuePosition> for QueueWire {
    fn from(queue: QueuePosition) -> QueueWire {
        let QueuePosition { key, ahead, used, limit, .. } = queue;
        QueueWire { key, ahead, used, limit }
    }
}

impl LockWait {
    /// For example `lock "account-42" of workflow "order"`.
    pub(crate) fn words(&self) -> String {
        let LockName { name, scope, .. } = &self.lock.name;
        match scope {
            LockScope::Workflow(workflow) => format!("lock {name:?} of workflow {workflow:?}"),
            LockScope::Tree(root) => format!("lock {name:?} of execution {:?}", &**root),
            _ => format!("lock {name:?}"),
        }
    }

    /// The holders of the lock, and the position of the request in its queue.
    pub(crate) fn sentence(&self, now: Timestamp) -> String {
        let holders: Vec<String> = self.lock.holders.iter().map(|holder| holder_words(holder, now)).collect();
        let held = match holders.is_empty() {
            true => " The lock is free.".into(),
            false => format!(" It is held by {}.", holders.join(" and ")),
        };
        let before = match self.position {
            Some(0) => "it is the first in the queue".into(),
            Some(1) => "1 request is before it in the queue".into(),
            Some(before) => format!("{before} requests are before it in the queue"),
            None => "many requests are before it in the queue".to_string(),
        };
        format!("{held} It has token {}, and {before}.", self.token)
    }
}

/// For example `execution "order-7" (token 12, for 3m 2s)`.
fn holder_words(holder: &Requested, now: Timestamp) -> String {
    let since = relative(holder.granted.unwrap_or(holder.since), now);
    let since = since.strip_suffix(" ago").map_or(since.clone(), |long| format!("for {long}"));
    let owner = match (&holder.owner, &holder.label) {
        (Owner::Execution(id), _) => format!("execution {:?}", &**id),
        (Owner::Session(id), Some(label)) if !label.is_empty() => format!("session {label:?} ({id})"),
        (Owner::Session(id), _) => format!("session {id}"),
        _ => "an unknown owner".into(),
    };
    format!("{owner} (token {}, {since})", holder.token)
}

/// What the execution does, or did when its process ended.
pub(crate) fn at_work(operation: &Operation, now: Timestamp) -> String {
    let kind = operation.kind.to_string();
    let what = if operation.name.is_empty() { kind } else { format!("{kind} {:?}", operation.name) };
    match &operation.state {
        OperationState::Retrying { failure, next } => {
            let (attempt, message) = (operation.attempts + 1, failure.message());
            format!("Attempt {attempt} of {what} is next, {}. The last one failed: {message}", relative(*next, now))
        }
        OperationState::Until(until) if *until <= now => {
            format!("It was in {what}, which was due at {} ({}).", time(*until), relative(*until, now))
        }
        OperationState::Until(until) => {
            format!("It was in {what}, until {} ({}).", time(*until), relative(*until, now))
        }
        _ if operation.attempts > 0 => {
            let since = relative(operation.since, now);
            format!("It was in {what}, attempt {}, begun {since}.", operation.attempts)
        }
        _ => format!("It was in {what}, begun {}.", relative(operation.since, now)),
    }
}

/// The word for a wait for a lock, and its label.
pub(crate) fn waited_lock(wait: &Wait) -> Option<&str> {
    match waited(&wait.what) {
        ("lock", name) => name,
        _ => None,
    }
}
