//! `latch workflow why`: explains what an execution waits for, with a sentence for each wait.

use std::collections::BTreeMap;

use anyhow::Result;
use clap::Args;
use latchwork::Cursor;
use latchwork::lock::{LockName, Owner, Requested, StoredLocks};
use latchwork::store::Timestamp;
use latchwork::workflow::{
    ExecutionId, Executions, Kind, Operation, OperationState, QueuePosition, Status, Wait, WaitsFor, WorkflowError,
};
use serde::{Deserialize, Serialize};

use crate::client::{Client, encoded};
use crate::lock::fields::{NameFields, RequestFields};
use crate::output::Output;
use crate::paging::PAGE;
use crate::workflow::fields::{EventFields, Outcome, WaitFields};

#[derive(Args)]
pub(crate) struct Why {
    /// The execution's id.
    #[arg(value_parser = clap::builder::NonEmptyStringValueParser::new())]
    id: String,
}

#[derive(Serialize, Deserialize)]
struct Told {
    id: ExecutionId,
    workflow: String,
    status: Status,
    #[serde(flatten)]
    outcome: Outcome,
    cancel_reason: Option<String>,
    waits: Vec<ToldWait>,
    /// Operations without a result, if the execution was running when its process ended.
    begun: Vec<EventFields>,
    /// The sentences for people.
    sentences: Vec<String>,
}

#[derive(Serialize, Deserialize)]
struct ToldWait {
    #[serde(flatten)]
    wait: WaitFields,
    /// How many attempts a step has had that will be tried again.
    attempts: Option<u32>,
    last_failure: Option<String>,
    /// The status of the child that it waits for.
    child_status: Option<Status>,
    lock: Option<ToldLock>,
    /// The limit whose permit it waits for, and its position in the queue.
    queue: Option<QueuePosition>,
    sentence: String,
}

/// The lock that it waits for.
#[derive(Serialize, Deserialize)]
struct ToldLock {
    #[serde(flatten)]
    name: NameFields,
    /// The token that the grant will have.
    token: u64,
    /// The position in the queue, unless it is too far back to count.
    position: Option<u64>,
    holders: Vec<RequestFields>,
}

pub(crate) async fn run(
    why: Why,
    executions: &Executions,
    locks: &StoredLocks,
    now: Timestamp,
    output: &mut Output<'_>,
) -> Result<()> {
    let found = executions.why(why.id).await?;
    let status = found.status();
    let open = open(executions, &found.id).await?;
    let mut sentences = found.sentences(now);
    let each = sentences.split_off(sentences.len() - found.waits.len());
    let mut waits = Vec::new();
    for (wait, sentence) in found.waits.iter().zip(each) {
        let mut told = told(executions, &open, wait).await?;
        if let WaitsFor::Lock(label) = &wait.what {
            let found = standing(locks, &found.id, |name, _| name.to_string() == *label).await?;
            told.lock = if let Standing::Waits(lock) = found { Some(lock) } else { None };
        }
        if let WaitsFor::Admission(_) = &wait.what {
            told.queue.clone_from(&found.queue);
        }
        told.sentence = format!("{sentence}{}", told.details(now));
        waits.push(told);
    }
    let begun: Vec<EventFields> = match status {
        Status::Running => open.iter().map(EventFields::of).collect(),
        _ => Vec::new(),
    };
    sentences.extend(waits.iter().map(|wait| wait.sentence.clone()));
    for (event, operation) in begun.iter().zip(&open) {
        sentences.push(match &operation.state {
            OperationState::Queued { token, .. } => {
                let label = &operation.name;
                match standing(locks, &found.id, |_, its| its == *token).await? {
                    Standing::Waits(lock) => format!("It waits for {}.{}", lock.name.words(), lock.sentence(now)),
                    Standing::Holds => format!("It waited for lock {label:?}, and holds it now."),
                    Standing::Gone => format!("It waited for lock {label:?}, but the request was removed."),
                }
            }
            _ => at_work(event, now),
        });
    }
    let outcome = Outcome::of(&found.state);
    let (id, workflow, cancel_reason) = (found.id, found.workflow, found.cancel);
    let told = Told { id, workflow, status, outcome, cancel_reason, waits, begun, sentences };
    output.one(&told, |text| told.sentences.iter().for_each(|sentence| text.line(sentence)))
}

/// The same from a server.
pub(crate) async fn ask(why: Why, client: &Client, output: &mut Output<'_>) -> Result<()> {
    let told: Told = client.get(&format!("/workflows/{}/why", encoded(&why.id)), &[]).await?;
    output.one(&told, |text| told.sentences.iter().for_each(|sentence| text.line(sentence)))
}

/// The operations that the code is in: the last of each branch that has not ended, if it has no result yet. A wait
/// whose time is up is one of them, because nothing comes after it.
pub(crate) async fn open(executions: &Executions, id: &ExecutionId) -> Result<Vec<Operation>> {
    let (mut last, mut after): (BTreeMap<String, Operation>, Option<Cursor>) = (BTreeMap::new(), None);
    loop {
        let page = executions.operations(id).limit(PAGE).after(after.take()).await?;
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

async fn told(executions: &Executions, open: &[Operation], wait: &Wait) -> Result<ToldWait> {
    let (mut attempts, mut last_failure, mut child_status) = (None, None, None);
    match &wait.what {
        WaitsFor::Retry(step) => {
            let its = |operation: &&Operation| {
                let is_due = |next: Timestamp| wait.until.is_none_or(|until| until == next);
                let is_retrying = matches!(operation.state, OperationState::Retrying { next, .. } if is_due(next));
                operation.kind == Kind::Step && operation.name == *step && is_retrying
            };
            let operation = open.iter().find(its);
            attempts = operation.map(|operation| operation.attempts);
            last_failure = operation.and_then(|operation| match &operation.state {
                OperationState::Retrying { failure, .. } => Some(failure.message().to_string()),
                _ => None,
            });
        }
        WaitsFor::Child(child) => match executions.describe(child.as_str()).await {
            Ok(child) => child_status = Some(child.status()),
            Err(WorkflowError::NotFound { .. }) => {}
            Err(error) => return Err(error.into()),
        },
        _ => {}
    }
    let (wait, lock, queue, sentence) = (WaitFields::of(wait), None, None, String::new());
    Ok(ToldWait { wait, attempts, last_failure, child_status, lock, queue, sentence })
}

/// The relation of an execution to a lock.
enum Standing {
    Waits(ToldLock),
    Holds,
    /// The execution neither holds nor requests it.
    Gone,
}

/// The relation of an execution to a lock, which is found by its name or its token.
async fn standing(locks: &StoredLocks, id: &ExecutionId, is_it: impl Fn(&LockName, u64) -> bool) -> Result<Standing> {
    let owned = locks.of(&Owner::Execution(id.clone())).await?;
    let mut standing = Standing::Gone;
    for (name, token) in owned.into_iter().filter(|(name, token)| is_it(name, *token)) {
        let state = locks.inspect(&name).await?;
        let is_its = |request: &&Requested| request.token == token;
        if state.holders.iter().any(|holder| is_its(&holder)) {
            standing = Standing::Holds;
            continue;
        }
        let position = state.waiters.iter().find(is_its).and_then(|waiter| waiter.position);
        let holders = state.holders.iter().map(|holder| RequestFields::of(holder, state.kind)).collect();
        return Ok(Standing::Waits(ToldLock { name: NameFields::of(&name), token, position, holders }));
    }
    Ok(standing)
}

impl ToldLock {
    /// The holders, and the execution's position in the queue.
    fn sentence(&self, now: Timestamp) -> String {
        let holders: Vec<String> = self.holders.iter().map(|holder| holder.words(now)).collect();
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

impl ToldWait {
    /// What the wait itself does not say: the attempts so far, the child, the lock.
    fn details(&self, now: Timestamp) -> String {
        let mut details = String::new();
        if let (Some(attempts), Some(failure)) = (self.attempts, &self.last_failure) {
            details += &format!(" Attempt {attempts} failed: {failure}");
        }
        if self.wait.what == "child" {
            let status = self.child_status.map_or("removed".into(), |status| status.to_string());
            details += &format!(" The child is {status}.");
        }
        details + &self.lock.as_ref().map(|lock| lock.sentence(now)).unwrap_or_default()
    }
}

/// What the execution did when the process ended.
fn at_work(event: &EventFields, now: Timestamp) -> String {
    let (what, since) = (event.words(), event.since.relative_to(now));
    match (&*event.state, event.due_at) {
        ("retrying", Some(due)) => {
            let failure = event.failure.as_ref().map_or("", |failure| &failure.message);
            let next = event.attempts + 1;
            format!("Attempt {next} of {what} is next, {}. The last one failed: {failure}", due.relative_to(now))
        }
        ("until", Some(due)) if due.0 <= now => {
            format!("It was in {what}, which was due at {} ({}).", due.short(), due.relative_to(now))
        }
        ("until", Some(due)) => format!("It was in {what}, until {} ({}).", due.short(), due.relative_to(now)),
        _ if event.attempts > 0 => format!("It was in {what}, attempt {}, begun {since}.", event.attempts),
        _ => format!("It was in {what}, begun {since}."),
    }
}
