//! Why an execution does not continue: what it waits for, looked up in the locks, the children and its own history.

use std::collections::BTreeMap;

use axum::extract::State;
use axum::response::Response;
use latchwork::Cursor;
use latchwork::lock::{LockName, Owner, Requested, StoredLocks};
use latchwork::workflow::{
    Engine, ExecutionId, Kind, Operation, OperationState, Status, Wait, WaitsFor, WorkflowError,
};

use crate::api::Namespace;
use crate::wire::answers::NoSuchExecution;
use crate::wire::problem::Problem;
use crate::wire::request::{PathParams, json_answer};
use crate::wire::workflow::why::{LockWait, ToldWait, WaitFacts, WhyWire, at_work, waited_lock};

/// How many operations are read at once.
const READ: usize = 1000;

/// Explains exactly what an execution waits for.
#[utoipa::path(
    get,
    path = "/workflows/{id}/why",
    params(("id" = String, Path)),
    responses(
        (status = 200, description = "What it waits for, with a sentence for each wait.", body = WhyWire),
        NoSuchExecution,
    )
)]
pub(super) async fn why_execution(
    State(namespace): State<Namespace>,
    PathParams(id): PathParams<String>,
) -> Result<Response, Problem> {
    let (engine, now) = (namespace.engine(), namespace.env().now());
    let found = engine.why(id).await?;
    let locks = StoredLocks::on(engine.store()).await?;
    let open = if found.status().is_end() { Vec::new() } else { open(engine, &found.id).await? };
    let mut sentences = found.sentences(now);
    let each = sentences.split_off(sentences.len().saturating_sub(found.waits.len()));
    let mut waits = Vec::new();
    for (wait, sentence) in found.waits.iter().zip(&each) {
        let mut facts = facts(engine, &open, wait).await?;
        if let Some(label) = waited_lock(wait) {
            let found = standing(&locks, &found.id, |name, _| name.to_string() == *label).await?;
            facts.lock = if let StandingOutcome::Waits(lock) = found { Some(*lock) } else { None };
        }
        if let WaitsFor::Admission(_) = &wait.what {
            facts.queue.clone_from(&found.queue);
        }
        waits.push(ToldWait::new(wait, facts, sentence, now));
    }
    sentences.extend(waits.iter().map(|wait| wait.sentence().to_string()));
    let begun = if found.status() == Status::Running { open } else { Vec::new() };
    // An execution in memory tells itself what it does.
    for operation in begun.iter().filter(|_| !found.resident) {
        sentences.push(match &operation.state {
            OperationState::Queued { token, .. } => {
                let label = &operation.name;
                match standing(&locks, &found.id, |_, its| its == *token).await? {
                    StandingOutcome::Waits(wait) => format!("It waits for {}.{}", wait.words(), wait.sentence(now)),
                    StandingOutcome::Holds => format!("It waited for lock {label:?}, and holds it now."),
                    StandingOutcome::Gone => format!("It waited for lock {label:?}, but the request was removed."),
                }
            }
            _ => at_work(operation, now),
        });
    }
    Ok(json_answer(&WhyWire::new(found, waits, &begun, sentences)))
}

/// The operations that the code is in: the last of each branch that has not ended, if it has no result yet.
async fn open(engine: &Engine, id: &ExecutionId) -> Result<Vec<Operation>, Problem> {
    let (mut last, mut after): (BTreeMap<String, Operation>, Option<Cursor>) = (BTreeMap::new(), None);
    loop {
        let page = engine.operations(id).limit(READ).after(after.take()).await?;
        // The operations of a branch come in the order of their places.
        last.extend(page.items.into_iter().map(|operation| (operation.branch.clone(), operation)));
        after = page.next;
        if after.is_none() {
            break;
        }
    }
    let is_open = |operation: &&Operation| match operation.state {
        // A fork is not shown: its branches are.
        OperationState::Begun => !matches!(operation.kind, Kind::Join | Kind::Race),
        OperationState::Retrying { .. } | OperationState::Queued { .. } | OperationState::Until(_) => true,
        _ => false,
    };
    let open = last.values().filter(is_open).filter(|operation| runs(&last, &operation.branch));
    Ok(open.cloned().collect())
}

/// True if a branch has not ended: its fork is the last operation of a branch that has not ended.
fn runs(last: &BTreeMap<String, Operation>, branch: &str) -> bool {
    let Some(inner) = branch.strip_suffix('/') else { return true };
    let (outer, fork) = inner.rfind('/').map_or(("", inner), |slash| inner.split_at(slash + 1));
    let place = fork.split('.').next().and_then(|place| place.parse().ok());
    let is_last = |it: &Operation| Some(it.place) == place && it.state == OperationState::Begun;
    last.get(outer).is_some_and(is_last) && runs(last, outer)
}

async fn facts(engine: &Engine, open: &[Operation], wait: &Wait) -> Result<WaitFacts, Problem> {
    let mut facts = WaitFacts::default();
    match &wait.what {
        WaitsFor::Retry(step) => {
            let its = |operation: &&Operation| {
                let is_due = |next| wait.until.is_none_or(|until| until == next);
                let is_retrying = matches!(operation.state, OperationState::Retrying { next, .. } if is_due(next));
                operation.kind == Kind::Step && operation.name == *step && is_retrying
            };
            facts.retried = open.iter().find(its).cloned();
        }
        WaitsFor::Child(child) => {
            facts.child = match engine.describe(child.as_str()).await {
                Ok(child) => Some(Some(child.status())),
                Err(WorkflowError::NotFound { .. }) => Some(None),
                Err(error) => return Err(error.into()),
            };
        }
        _ => {}
    }
    Ok(facts)
}

/// The relation of an execution to a lock.
enum StandingOutcome {
    Waits(Box<LockWait>),
    Holds,
    /// The execution neither holds nor requests it.
    Gone,
}

/// The relation of an execution to a lock, which is found by its name or its token.
async fn standing(
    locks: &StoredLocks,
    id: &ExecutionId,
    is_it: impl Fn(&LockName, u64) -> bool,
) -> Result<StandingOutcome, Problem> {
    let owned = locks.of(&Owner::Execution(id.clone())).await?;
    let mut standing = StandingOutcome::Gone;
    for (name, token) in owned.into_iter().filter(|(name, token)| is_it(name, *token)) {
        let state = locks.inspect(&name).await?;
        let is_its = |request: &&Requested| request.token == token;
        if state.holders.iter().any(|holder| is_its(&holder)) {
            standing = StandingOutcome::Holds;
            continue;
        }
        let position = state.waiters.iter().find(is_its).and_then(|waiter| waiter.position);
        return Ok(StandingOutcome::Waits(Box::new(LockWait { lock: state, token, position })));
    }
    Ok(standing)
}
