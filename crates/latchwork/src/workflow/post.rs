//! Messages to executions: from outside, and from other executions, in the commit that records the sending.
//!
//! A message is a record under the execution's id, and a count that is written with it. An execution that waits for it
//! is set running by the same commit; one that runs learns of it in memory. When an execution goes to wait, it checks
//! that the count is what it knows: so no message is overlooked between the two.

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use tokio::sync::oneshot;

use crate::errand::{Awaited, Errand};
use crate::record::Record;
use crate::store::{Check, Commit, Env, Key, Outcome, Refusal, Rev, Uuid, Write};
use crate::workflow::engine::Inner;
use crate::workflow::kept::{Letter, Message, grant_id};
use crate::workflow::record::{Execution, Status, Wait};
use crate::workflow::run::{Effect, turn};
use crate::workflow::{ExecutionId, Result, WorkflowError};

/// What is known of an execution that something is sent to.
pub(crate) enum Target {
    /// It is at work, or about to be.
    Running(Rev),
    Resting(Box<Execution>, Rev),
}

impl Target {
    fn rev(&self) -> Rev {
        match self {
            Target::Running(rev) | Target::Resting(_, rev) => *rev,
        }
    }
}

impl Inner {
    /// An execution that something can be sent to. What is in memory is asked there, unless that was out of date.
    pub(crate) async fn target(&self, id: &ExecutionId, from_store: bool) -> Result<Target> {
        let resident = if from_store { None } else { self.resident(id) };
        let known = resident.and_then(|run| {
            run.with(|state| match (&state.execution.status, state.rev) {
                (Status::Running, Some(rev)) => Some(Target::Running(rev)),
                _ => None,
            })
        });
        if let Some(known) = known {
            return Ok(known);
        }
        let (execution, rev) = self.read(id).await?.ok_or_else(|| WorkflowError::NotFound { id: id.clone() })?;
        match execution.status {
            Status::Running => Ok(Target::Running(rev)),
            ref status if status.is_terminal() => Err(WorkflowError::Ended { id: id.clone() }),
            _ => Ok(Target::Resting(Box::new(execution), rev)),
        }
    }

    /// The delivery of a message, as a part of a commit.
    pub(crate) fn delivery(&self, id: &ExecutionId, target: Target, letter: Letter) -> Effect {
        self.deliveries(id, target, vec![letter])
    }

    /// The delivery of messages, as a part of a commit.
    fn deliveries(&self, id: &ExecutionId, target: Target, letters: Vec<Letter>) -> Effect {
        let (kept, env) = (self.kept(id), self.store.env());
        let at_us = env.now().0;
        let messages: Vec<(Key, Message)> =
            letters.into_iter().map(|body| (kept.message(letter_id(env, &body)), Message { at_us, body })).collect();
        let record: Key = self.spaces.executions.key(id.as_bytes());
        let mut commit = Commit::new().at_rev(&record, target.rev()).put(&kept.count(), Vec::new());
        commit = messages.iter().fold(commit, |commit, (key, message)| commit.put(key, message.encode()));
        let mut is_woken = false;
        if let Target::Resting(before, _) = target
            && before.status == Status::Waiting
        {
            let is_for = |wait: &Wait, message: &Message| wait.what.without_name() == message.body.waited();
            is_woken = before.waits.iter().any(|wait| messages.iter().any(|(_, message)| is_for(wait, message)));
            if is_woken {
                commit = self.woken(commit, id, &before, None).0;
            }
        }
        let id = id.clone();
        let landed = move |engine: &Arc<Inner>, generation, revs: &[Option<Rev>]| {
            if is_woken {
                // It may be in memory again, for its time is up, and has not written that yet.
                engine.resident(&id).iter().for_each(|run| run.doubt());
                engine.wake_up(&id);
            } else if let (Some(run), Some(Some(count))) = (engine.resident(&id), revs.first()) {
                run.delivered(count.0, generation, messages);
            }
        };
        Effect { landed: Some(Box::new(landed)), ..Effect::of(commit) }
    }

    /// Adds to a commit that an execution that rests runs from now on, and is to be cancelled if there is a reason.
    /// Gives also its record from then on.
    pub(crate) fn woken(
        &self,
        commit: Commit,
        id: &ExecutionId,
        before: &Execution,
        cancel: Option<&str>,
    ) -> (Commit, Execution) {
        let mut after = before.clone();
        if after.status == Status::Waiting {
            (after.status, after.waits) = (Status::Running, Vec::new());
        }
        after.cancel = after.cancel.or(cancel.map(str::to_string));
        let (commit, _) = turn(self, commit, id, Some(before), &mut after, None);
        (commit.put(&self.spaces.executions.key(id.as_bytes()), after.encode()), after)
    }

    /// The cancellation of an execution, as a part of a commit. Nothing if that is on its way already.
    pub(crate) async fn cancelling(&self, id: &ExecutionId, reason: &str) -> Result<Option<Effect>> {
        let (before, rev) = self.read(id).await?.ok_or_else(|| WorkflowError::NotFound { id: id.clone() })?;
        if before.status.is_terminal() {
            return Err(WorkflowError::Ended { id: id.clone() });
        }
        if before.cancel.is_some() {
            return Ok(None);
        }
        let commit = Commit::new().at_rev(&self.spaces.executions.key(id.as_bytes()), rev);
        // The record is what is written last.
        let (commit, after) = self.woken(commit, id, &before, Some(reason));
        let id = id.clone();
        let landed = move |engine: &Arc<Inner>, _, revs: &[Option<Rev>]| {
            if let Some(run) = engine.resident(&id) {
                run.cancelled(rev, revs.last().copied().flatten(), after);
            }
            // It may be about to leave memory, if it does not know yet that it waits.
            if before.status == Status::Waiting {
                engine.wake_up(&id);
            }
        };
        Ok(Some(Effect { landed: Some(Box::new(landed)), ..Effect::of(commit) }))
    }

    /// Does something in a commit of its own. Gives the refusal if there was one. Whoever is to be told is, though the
    /// caller may have given up.
    pub(crate) async fn perform(
        self: &Arc<Inner>,
        id: &ExecutionId,
        effect: Effect,
    ) -> Result<std::result::Result<(), Refusal>> {
        let (engine, id) = (self.clone(), id.clone());
        let performed = Awaited::to_its_end(&self.runtime, async move { engine.performed(&id, effect).await });
        performed.await.unwrap_or(Err(WorkflowError::Stopped))
    }

    async fn performed(
        self: &Arc<Inner>,
        id: &ExecutionId,
        effect: Effect,
    ) -> Result<std::result::Result<(), Refusal>> {
        let commit = Commit::new();
        let commit = effect.checks.into_iter().fold(commit, Commit::check);
        let commit = effect.writes.into_iter().fold(commit, Commit::write);
        // Last, so that the others are at their places.
        let owner = commit.checks().len();
        let commit = commit.check(self.shard_check(id));
        let outcome = self.store.commit(commit).await;
        match outcome.inspect_err(|_| self.doubt())? {
            Outcome::Applied(receipt) => {
                if let Some(landed) = effect.landed {
                    landed(self, receipt.generation, &receipt.revs);
                }
                Ok(Ok(()))
            }
            Outcome::Refused(refusal) if refusal.failed.iter().any(|failed| failed.index == owner) => {
                self.fenced();
                Err(WorkflowError::Stopped)
            }
            Outcome::Refused(refusal) => Ok(Err(refusal)),
        }
    }

    /// Delivers a message, with whatever else is checked and written in the same commit. If a check of that fails, that
    /// is given.
    pub(crate) async fn deliver(
        self: &Arc<Inner>,
        id: &ExecutionId,
        letter: Letter,
        checks: &[Check],
        writes: &[Write],
    ) -> Result<std::result::Result<(), Refusal>> {
        let (engine, id, checks, writes) = (self.clone(), id.clone(), checks.to_vec(), writes.to_vec());
        let delivered =
            Awaited::to_its_end(
                &self.runtime,
                async move { engine.deliver_all(&id, vec![letter], &checks, &writes).await },
            );
        delivered.await.unwrap_or(Err(WorkflowError::Stopped))
    }

    async fn deliver_all(
        self: &Arc<Inner>,
        id: &ExecutionId,
        letters: Vec<Letter>,
        checks: &[Check],
        writes: &[Write],
    ) -> Result<std::result::Result<(), Refusal>> {
        let mut from_store = false;
        loop {
            let target = self.target(id, from_store).await?;
            let mut effect = self.deliveries(id, target, letters.clone());
            // The record's check comes first.
            effect.checks.extend_from_slice(checks);
            effect.writes.extend_from_slice(writes);
            match self.performed(id, effect).await? {
                Err(refusal) if refusal.failed.iter().any(|failed| failed.index > 0) => return Ok(Err(refusal)),
                Err(_) => from_store = true,
                Ok(()) => return Ok(Ok(())),
            }
        }
    }

    /// Delivers a message that nothing else goes with. Those that come while one to the same execution is on its way
    /// share the next commit.
    pub(crate) async fn deliver_shared(self: &Arc<Inner>, id: &ExecutionId, letter: Letter) -> Result<()> {
        if self.is_stopped() {
            return Err(WorkflowError::Stopped);
        }
        self.delivered(id, letter).await.unwrap_or(Err(WorkflowError::Stopped))
    }

    fn delivered(self: &Arc<Inner>, id: &ExecutionId, letter: Letter) -> Awaited<Result<()>> {
        let (answer, answered) = oneshot::channel();
        let mut lanes = self.lanes.lock();
        let lane = match lanes.entry(id.clone()) {
            Entry::Occupied(mut lane) => {
                let lane = lane.get_mut();
                lane.waiting.push((letter, answer));
                // Whoever has begun it may not be polled as long as he likes.
                let errand = lane.errand.take();
                drop(lanes);
                errand.iter().for_each(Errand::leave);
                return Awaited::new(None, answered);
            }
            Entry::Vacant(vacant) => vacant.insert(Lane::default()),
        };
        let ends = Ends { engine: self.clone(), id: id.clone() };
        let errand = Errand::new(&self.runtime, async move {
            let Ends { engine, id } = &ends;
            let delivered = engine.deliver_all(id, vec![letter], &[], &[]).await;
            let _ = answer.send(delivered.and_then(|delivered| delivered.map_err(|_| WorkflowError::Stopped)));
        });
        lane.errand = Some(errand.clone());
        Awaited::new(Some(errand), answered)
    }
}

/// Under which a message is kept.
fn letter_id(env: &Env, letter: &Letter) -> Uuid {
    match letter {
        Letter::Lock { lock, ticket, .. } => grant_id(lock, *ticket),
        _ => env.uuid(),
    }
}

/// What a commit is to do to executions beside its own, each of them once.
#[derive(Default)]
pub(crate) struct Mail(BTreeMap<ExecutionId, Post>);

#[derive(Default)]
struct Post {
    letters: Vec<Letter>,
    cancel: Option<String>,
    /// Whether it matters that the execution has not ended.
    is_needed: bool,
}

impl Mail {
    /// Adds a message.
    pub(crate) fn letter(&mut self, id: &ExecutionId, letter: Letter) {
        let post = self.0.entry(id.clone()).or_default();
        post.letters.push(letter);
        post.is_needed = true;
    }

    /// Adds a message that need not be delivered if the execution has ended.
    pub(crate) fn notice(&mut self, id: &ExecutionId, letter: Letter) {
        self.0.entry(id.clone()).or_default().letters.push(letter);
    }

    /// Adds a cancellation.
    pub(crate) fn cancel(&mut self, id: &ExecutionId, reason: String) {
        self.0.entry(id.clone()).or_default().cancel = Some(reason);
    }

    /// What the commit has to hold for that. What is known in memory is asked there, unless that was out of date. The
    /// records of executions that board the commit are left to them.
    pub(crate) async fn effects(
        self,
        engine: &Inner,
        from_store: bool,
        boards: &BTreeSet<ExecutionId>,
    ) -> Result<Vec<Effect>> {
        let mut effects = Vec::new();
        for (id, post) in self.0 {
            let boarding = engine.resident(&id).filter(|_| boards.contains(&id));
            if let Some(rev) = boarding.and_then(|run| run.with(|state| state.rev)) {
                effects.push(engine.deliveries(&id, Target::Running(rev), post.letters));
                continue;
            }
            match engine.posted(&id, post.letters, post.cancel, from_store).await {
                Ok(posted) => effects.extend(posted),
                Err(WorkflowError::Ended { .. } | WorkflowError::NotFound { .. }) if !post.is_needed => {}
                Err(error) => return Err(error),
            }
        }
        Ok(effects)
    }
}

impl Inner {
    async fn posted(
        &self,
        id: &ExecutionId,
        letters: Vec<Letter>,
        cancel: Option<String>,
        from_store: bool,
    ) -> Result<Vec<Effect>> {
        let mut effects = Vec::new();
        if let Some(reason) = &cancel {
            effects.extend(self.cancelling(id, reason).await?);
        }
        if !letters.is_empty() {
            let target = match self.target(id, from_store || cancel.is_some()).await? {
                // Its cancellation sets it running.
                Target::Resting(_, rev) if !effects.is_empty() => Target::Running(rev),
                target => target,
            };
            effects.push(self.deliveries(id, target, letters));
        }
        Ok(effects)
    }
}

/// What is on its way to an execution.
#[derive(Default)]
pub(crate) struct Lane {
    /// The delivery of the first message.
    errand: Option<Errand>,
    /// Those that have come meanwhile, and who waits for the answer.
    waiting: Vec<(Letter, oneshot::Sender<Result<()>>)>,
}

pub(crate) type Lanes = HashMap<ExecutionId, Lane>;

/// How many messages share a commit, and how many bytes of them, about.
const MOST: usize = 256;
const MOST_BYTES: usize = 1 << 20;

/// A message is on its way. When it is not any more, those that have come meanwhile go.
struct Ends {
    engine: Arc<Inner>,
    id: ExecutionId,
}

impl Drop for Ends {
    fn drop(&mut self) {
        let mut lanes = self.engine.lanes.lock();
        // None if the engine was stopped.
        let Some(lane) = lanes.get_mut(&self.id) else { return };
        lane.errand = None;
        if lane.waiting.is_empty() {
            lanes.remove(&self.id);
            return;
        }
        drop(lanes);
        self.engine.runtime.spawn(go_on(self.engine.clone(), self.id.clone()));
    }
}

/// Delivers what has come, until there is no more.
async fn go_on(engine: Arc<Inner>, id: ExecutionId) {
    loop {
        let batch: Vec<_> = {
            let mut lanes = engine.lanes.lock();
            let Some(lane) = lanes.get_mut(&id).map(|lane| &mut lane.waiting).filter(|lane| !lane.is_empty()) else {
                lanes.remove(&id);
                return;
            };
            let mut bytes = 0;
            let fits = lane.iter().take(MOST).take_while(|(letter, _)| {
                bytes += letter.bytes();
                bytes <= MOST_BYTES
            });
            let count = fits.count().max(1);
            lane.drain(..count).collect()
        };
        let letters = batch.iter().map(|(letter, _)| letter.clone()).collect();
        let delivered = engine.deliver_all(&id, letters, &[], &[]).await;
        let delivered = delivered.and_then(|delivered| delivered.map_err(|_| WorkflowError::Stopped));
        for (_, answer) in batch {
            let _ = answer.send(delivered.clone());
        }
    }
}

impl Effect {
    /// The same, with which an execution is to be taken into memory.
    pub(crate) fn waking(self, id: &ExecutionId) -> Effect {
        let id = id.clone();
        Effect { landed: Some(Box::new(move |engine, _, _| engine.wake_up(&id))), ..self }
    }

    /// What a commit holds.
    pub(crate) fn of(commit: Commit) -> Effect {
        let (checks, writes) = (commit.checks().to_vec(), commit.writes().to_vec());
        Effect { checks, writes, ..Effect::default() }
    }
}
