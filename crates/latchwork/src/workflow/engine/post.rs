//! Messages to executions: from outside, and from other executions in the commit that records the sending.
//!
//! A message is a record under the execution's id, and a count that is written with it. If the execution waits for the
//! message, the same commit makes it running; an execution that runs is notified in memory. When an execution goes to
//! wait, its commit checks that the count is the known one: so no message between the two is missed.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::future::Future;
use std::sync::Arc;

use tokio::sync::oneshot;

use crate::lane::{Landing, LanePlan, Lanes, Part, Placed, Runtime, Tag};
use crate::lock::owners::{Notice, Notices, OwningExecutions, Telling};
use crate::lock::{LockError, LockName};
use crate::node::SHARD;
use crate::record::Record;
use crate::store::{
    Check, Commit, Env, ErrorKind, Key, Outcome, Receipt, Refusal, Rev, Store, StoreError, Uuid, Write,
};
use crate::workflow::engine::EngineInner;
use crate::workflow::run::with_record;
use crate::workflow::stored::kept::{Delivered, Message, MessageBody, grant_id};
use crate::workflow::stored::record::{Execution, StoredStatus, Wait};
use crate::workflow::{ExecutionId, Result, WorkflowError};

/// A check that the caller of a delivery has added.
const ASKED: Tag = Tag("asked");

/// What is known of an execution that receives a message.
pub(crate) enum Target {
    /// It is running.
    Running(Rev),
    Resting(Box<Execution>, Rev),
}

impl Target {
    /// An execution that was read. One that has ended receives nothing.
    pub(crate) fn of(id: &ExecutionId, execution: Execution, rev: Rev) -> Result<Target> {
        match execution.status {
            StoredStatus::Running => Ok(Target::Running(rev)),
            ref status if status.is_terminal() => Err(WorkflowError::Ended { id: id.clone() }),
            _ => Ok(Target::Resting(Box::new(execution), rev)),
        }
    }

    fn rev(&self) -> Rev {
        match self {
            Target::Running(rev) | Target::Resting(_, rev) => *rev,
        }
    }
}

impl EngineInner {
    /// An execution that can receive messages. A resident execution answers from memory, unless that was out of date.
    pub(crate) async fn target(&self, id: &ExecutionId, from_store: bool) -> Result<Target> {
        let resident = if from_store { None } else { self.resident(id) };
        let known = resident.and_then(|run| {
            run.with(|state| match (&state.known.stored().status, state.known.rev()) {
                (StoredStatus::Running, Some(rev)) => Some(Target::Running(rev)),
                _ => None,
            })
        });
        if let Some(known) = known {
            return Ok(known);
        }
        let (execution, rev) = self.known(id).await?;
        Target::of(id, execution, rev)
    }

    /// The delivery of messages, as a part of a commit.
    pub(crate) fn deliveries(
        self: &Arc<EngineInner>,
        id: &ExecutionId,
        target: Target,
        bodies: Vec<MessageBody>,
    ) -> Part {
        let (kept, env) = (self.kept(id), self.store.env());
        let at_us = env.now().0;
        let messages: Vec<(Key, Message)> =
            bodies.into_iter().map(|body| (kept.message(message_id(env, &body)), Message { at_us, body })).collect();
        let mut part = self.at_record(id, Some(target.rev())).put(&kept.count(), Vec::new());
        part = messages.iter().fold(part, |part, (key, message)| part.put(key, message.encode()));
        let mut is_woken = false;
        if let Target::Resting(before, _) = target
            && before.status == StoredStatus::Waiting
        {
            let is_for = |wait: &Wait, message: &Message| wait.what.without_name() == message.body.waited();
            is_woken = before.waits.iter().any(|wait| messages.iter().any(|(_, message)| is_for(wait, message)));
            if is_woken {
                part = self.running_again(part, id, &before, None).0;
            }
        }
        let (engine, id) = (self.clone(), id.clone());
        part.then(move |landing: Landing<'_>| {
            if is_woken {
                // The execution may be in memory again because its time has come, and may not have written that yet.
                engine.resident(&id).iter().for_each(|run| run.doubt());
                engine.spawn_load(&id);
            } else if let (Some(run), Some(count)) = (engine.resident(&id), landing.rev(0)) {
                run.delivered(count.0, landing.generation, messages);
            }
        })
    }

    /// Adds to a part that a resting execution runs from now on, and is cancelled if there is a reason. Also returns
    /// its record after the commit.
    pub(crate) fn running_again(
        &self,
        part: Part,
        id: &ExecutionId,
        before: &Execution,
        cancel: Option<&str>,
    ) -> (Part, Execution) {
        let mut after = before.clone();
        if after.status == StoredStatus::Waiting {
            (after.status, after.waits) = (StoredStatus::Running, Vec::new());
        }
        after.cancel = after.cancel.or(cancel.map(str::to_string));
        let (part, _) = with_record(self, part, id, Some(before), &mut after, None);
        (part, after)
    }

    /// The cancellation of an execution, as a part of a commit. None if it is already being cancelled.
    pub(crate) async fn cancelling(
        self: &Arc<EngineInner>,
        id: &ExecutionId,
        reason: &str,
        tells_parent: bool,
    ) -> Result<Option<Part>> {
        let (before, rev) = self.known(id).await?;
        if before.status.is_terminal() {
            return Err(WorkflowError::Ended { id: id.clone() });
        }
        if before.cancel.is_some() {
            return Ok(None);
        }
        // No code of the execution has run.
        if before.is_queued() || before.gathers().is_some() {
            let left = self.leave_queue(id, before, rev, StoredStatus::Cancelled(reason.into()), tells_parent);
            return Box::pin(left).await.map(Some);
        }
        let (part, after) = self.running_again(self.at_record(id, Some(rev)), id, &before, Some(reason));
        let (engine, id) = (self.clone(), id.clone());
        Ok(Some(part.then(move |landing| {
            if let Some(run) = engine.resident(&id) {
                run.cancelled(rev, landing.last(), after);
            }
            // The resident may be about to leave memory because it does not know of this commit.
            if before.status == StoredStatus::Waiting {
                engine.spawn_load(&id);
            }
        })))
    }

    /// Makes an execution check its record, as a part of a commit.
    async fn looking(self: &Arc<EngineInner>, id: &ExecutionId) -> Result<Part> {
        let (before, rev) = self.known(id).await?;
        let part = match before.status {
            StoredStatus::Waiting => self.running_again(self.at_record(id, Some(rev)), id, &before, None).0,
            _ => self.node.for_execution(id),
        };
        let (engine, id) = (self.clone(), id.clone());
        Ok(part.then(move |_| {
            engine.resident(&id).iter().for_each(|run| run.doubt());
            engine.spawn_load(&id);
        }))
    }

    /// Adds to a part that the execution is loaded when the commit has landed.
    pub(crate) fn waking(self: &Arc<EngineInner>, part: Part, id: &ExecutionId) -> Part {
        let (engine, id) = (self.clone(), id.clone());
        part.then(move |_| engine.spawn_load(&id))
    }

    /// Sends a part in its own commit, to the end, even if the caller is dropped. Returns whether the checks passed.
    pub(crate) async fn perform(self: &Arc<EngineInner>, part: Part) -> Result<bool> {
        let engine = self.clone();
        let performed = self.node.runtime.run(async move { engine.send(part).await.map(|sent| sent.is_some()) });
        performed.await.unwrap_or(Err(WorkflowError::Stopped))
    }

    /// Sends a commit that holds only this part. None if a check failed.
    pub(crate) async fn send(&self, part: Part) -> Result<Option<Receipt>> {
        let (commit, placed, rest) = part.place_whole(Commit::new());
        match self.store.commit(commit).await.inspect_err(|_| self.node.doubt())? {
            Outcome::Applied(receipt) => {
                rest.land(placed.landing(&receipt));
                Ok(Some(receipt))
            }
            Outcome::Refused(refusal) => {
                let is_fenced = placed.has_failed(&refusal, SHARD);
                rest.refuse(&placed, &refusal);
                // On a shared store, the operation is tried again as that of a node that does not own the shard.
                if is_fenced && !self.node.is_shared() { Err(WorkflowError::Stopped) } else { Ok(None) }
            }
        }
    }

    /// Delivers a message. Returns whether the checks passed. Messages that arrive while a commit to the same execution
    /// is in flight share the next commit.
    pub(crate) async fn deliver(
        self: &Arc<EngineInner>,
        id: &ExecutionId,
        body: MessageBody,
        along: Along,
    ) -> Result<bool> {
        let (answer, answered) = oneshot::channel();
        Lanes::submit(self, id, Delivery { body, along, answer }).map_err(|_| WorkflowError::Stopped)?;
        answered.await.unwrap_or(Err(WorkflowError::Stopped))
    }
}

/// A message that counts once under an id of its sender, however often it is sent.
pub(crate) struct SendOnce<'a> {
    pub(crate) message: &'a str,
    pub(crate) delivered: Delivered,
    pub(crate) body: MessageBody,
    /// True if the id was made for this call, so that nothing was sent under it.
    pub(crate) is_new: bool,
    pub(crate) listens: bool,
}

/// What the sender of a message has found before a try.
#[derive(Default)]
pub(crate) struct BeforeTry {
    /// A further check of the delivery.
    pub(crate) check: Option<Check>,
    pub(crate) target: Option<Target>,
}

impl EngineInner {
    /// Delivers a message that counts once. Each try calls `look` for a further check. Returns whether the message was
    /// delivered by this call.
    pub(crate) async fn deliver_once<F>(
        self: &Arc<EngineInner>,
        id: &ExecutionId,
        SendOnce { message, delivered, body, mut is_new, listens }: SendOnce<'_>,
        look: impl Fn() -> F,
    ) -> Result<bool>
    where
        F: Future<Output = Result<BeforeTry>>,
    {
        let kept = self.kept(id);
        let (kind, key, answer) = match &delivered {
            Delivered::Signal(_) => ("signal", kept.signal(message), None),
            // A fork may have answered an update that its original has received.
            Delivered::Update(..) => ("update", kept.update(message), Some(kept.answer(message))),
        };
        let keys = || [&key].into_iter().chain(&answer);
        loop {
            if !std::mem::take(&mut is_new) {
                match self.get(&key).await?.map(|item| Delivered::decode(&item.value)) {
                    None => {}
                    Some(Ok(sent)) if sent.is_same(&delivered) => return Ok(false),
                    Some(Err(why)) if why.is_version() => return Err(why.at(format!("{kind} {message:?}")).into()),
                    Some(_) => return Err(WorkflowError::MessageReused { id: id.clone(), message: message.into() }),
                }
                if let Some(answer) = &answer
                    && self.get(answer).await?.is_some()
                {
                    return Ok(false);
                }
            }
            let BeforeTry { check, target } = look().await?;
            let checks = keys().cloned().map(Check::Absent).chain(check).collect();
            let writes = vec![Write::Put(key.clone(), delivered.encode())];
            // A refusal means that another caller has sent the message, or that the further check failed.
            match self.deliver(id, body.clone(), Along { checks, writes, target, listens }).await {
                Ok(true) => return Ok(true),
                Ok(false) => {}
                // Another caller may have sent it before the execution ended.
                Err(error) if !self.has_any(keys()).await? => return Err(error),
                Err(_) => {}
            }
        }
    }

    async fn has_any(&self, keys: impl Iterator<Item = &Key>) -> Result<bool> {
        for key in keys {
            if self.get(key).await?.is_some() {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// What goes along with a message, in the same commit.
#[derive(Default)]
pub(crate) struct Along {
    pub(crate) checks: Vec<Check>,
    pub(crate) writes: Vec<Write>,
    /// The execution as the sender has found it, which may be out of date.
    pub(crate) target: Option<Target>,
    /// True if the sender listens for news. If another node owns the execution, the commit asks that node for them.
    pub(crate) listens: bool,
}

impl Along {
    pub(crate) fn with((checks, writes): (Vec<Check>, Vec<Write>)) -> Along {
        Along { checks, writes, ..Along::default() }
    }
}

/// A message to deliver, and the channel to its caller.
pub(crate) struct Delivery {
    body: MessageBody,
    along: Along,
    answer: oneshot::Sender<Result<bool>>,
}

impl Delivery {
    fn settle(self, answer: Result<bool>) {
        let _ = self.answer.send(answer);
    }
}

/// Messages that share a commit.
pub(crate) struct Deliveries {
    jobs: Vec<(Delivery, Placed)>,
    rest: Part,
    placed: Placed,
}

/// Approximately how many bytes of messages share a commit.
const MOST_BYTES: usize = 1 << 20;

impl LanePlan for EngineInner {
    type Key = ExecutionId;
    type Job = Delivery;
    /// True if the resident execution was out of date.
    type Known = bool;
    type Batch = Deliveries;

    const MOST: usize = 256;

    fn lanes(&self) -> &Lanes<EngineInner> {
        &self.lanes
    }

    fn runtime(&self) -> &Runtime {
        &self.node.runtime
    }

    fn store(&self) -> &Store {
        &self.store
    }

    async fn plan(
        self: &Arc<EngineInner>,
        id: &ExecutionId,
        from_store: &mut bool,
        jobs: &mut VecDeque<Delivery>,
        most: usize,
    ) -> Option<(Commit, Deliveries)> {
        let mut bytes = 0;
        let fits = jobs.iter().take(most).take_while(|job| {
            bytes += job.body.bytes();
            bytes <= MOST_BYTES
        });
        let count = fits.count().max(1);
        let mut taken: Vec<Delivery> = jobs.drain(..count).collect();
        let found = taken.iter_mut().filter_map(|job| job.along.target.take()).last();
        let target = match found {
            _ if self.is_stopped() => Err(WorkflowError::Stopped),
            Some(found) => Ok(found),
            None => self.target(id, *from_store).await,
        };
        let target = match target {
            Ok(target) => target,
            Err(error) => {
                taken.into_iter().for_each(|job| job.settle(Err(error.clone())));
                return None;
            }
        };
        let bodies = taken.iter().map(|job| job.body.clone()).collect();
        let mut part = self.deliveries(id, target, bodies);
        if taken.iter().any(|job| job.along.listens) {
            part = self.listens(part, id);
        }
        let (mut commit, placed, rest) = part.place_whole(Commit::new());
        let mut jobs = Vec::with_capacity(taken.len());
        for job in taken {
            let Along { checks, writes, .. } = &job.along;
            let part = checks.iter().cloned().fold(Part::default(), |part, check| part.check(ASKED, check));
            let asked;
            (commit, asked, _) = writes.iter().cloned().fold(part, Part::write).place_whole(commit);
            jobs.push((job, asked));
        }
        Some((commit, Deliveries { jobs, rest, placed }))
    }

    fn size(batch: &Deliveries) -> usize {
        batch.jobs.len()
    }

    fn landed(self: &Arc<EngineInner>, _: &ExecutionId, from_store: &mut bool, batch: Deliveries, receipt: &Receipt) {
        *from_store = false;
        batch.rest.land(batch.placed.landing(receipt));
        batch.jobs.into_iter().for_each(|(job, _)| job.settle(Ok(true)));
    }

    async fn refused(
        self: &Arc<EngineInner>,
        _: &ExecutionId,
        from_store: &mut bool,
        batch: Deliveries,
        refusal: Refusal,
        jobs: &mut VecDeque<Delivery>,
    ) {
        *from_store = true;
        let is_fenced = batch.placed.has_failed(&refusal, SHARD) && !self.node.is_shared();
        batch.rest.refuse(&batch.placed, &refusal);
        for (job, asked) in batch.jobs.into_iter().rev() {
            match asked {
                _ if is_fenced => job.settle(Err(WorkflowError::Stopped)),
                asked if asked.has_failed(&refusal, ASKED) => job.settle(Ok(false)),
                _ => jobs.push_front(job),
            }
        }
    }

    fn split(self: &Arc<EngineInner>, _: &mut bool, batch: Deliveries, jobs: &mut VecDeque<Delivery>) {
        batch.jobs.into_iter().rev().for_each(|(job, _)| jobs.push_front(job));
    }

    fn failed(self: &Arc<EngineInner>, _: &mut bool, batch: Deliveries, error: StoreError, _: &mut VecDeque<Delivery>) {
        self.node.doubt();
        batch.jobs.into_iter().for_each(|(job, _)| job.settle(Err(error.clone().into())));
    }
}

impl OwningExecutions for EngineInner {
    fn is_alive<'a>(self: Arc<Self>, id: &'a ExecutionId, from_store: bool) -> Telling<'a, bool> {
        Box::pin(async move {
            match self.target(id, from_store).await {
                Ok(_) => Ok(true),
                Err(WorkflowError::Ended { .. } | WorkflowError::NotFound { .. }) => Ok(false),
                Err(error) if error.kind() == ErrorKind::Corrupt => {
                    tracing::error!(%id, %error, "a damaged execution is skipped");
                    Ok(false)
                }
                Err(WorkflowError::Store(error)) => Err(error.into()),
                Err(WorkflowError::UnknownVersion { place, found, supported }) => {
                    Err(LockError::UnknownVersion { place, found, supported })
                }
                Err(error) => Err(LockError::Corrupt { place: error.to_string() }),
            }
        })
    }

    fn told<'a>(
        self: Arc<Self>,
        notices: Notices,
        from_store: bool,
        riders: &'a BTreeSet<ExecutionId>,
    ) -> Telling<'a, Option<Vec<Part>>> {
        Box::pin(async move {
            let mut mail = Mail::default();
            mail.notices(notices);
            match mail.parts(&self, from_store, riders).await {
                Ok(parts) => Ok(Some(parts)),
                Err(WorkflowError::Store(error)) => Err(error.into()),
                Err(_) => Ok(None),
            }
        })
    }

    fn untold(&self, id: &ExecutionId, lock: &LockName, ticket: u64) -> Write {
        Write::Delete(self.kept(id).message(grant_id(lock, ticket)))
    }
}

/// The id that a message is stored under.
fn message_id(env: &Env, body: &MessageBody) -> Uuid {
    match body {
        MessageBody::Lock { lock, ticket, .. } => grant_id(lock, *ticket),
        _ => env.uuid(),
    }
}

/// What a commit does to other executions, each at most once.
#[derive(Default)]
pub(crate) struct Mail(BTreeMap<ExecutionId, Post>);

#[derive(Default)]
struct Post {
    bodies: Vec<MessageBody>,
    cancel: Option<String>,
    /// True if the execution has to check its record, because it has changed.
    looks: bool,
    /// True if the commit must fail when the execution has ended.
    is_needed: bool,
}

impl Mail {
    /// Adds a message.
    pub(crate) fn message(&mut self, id: &ExecutionId, body: MessageBody) {
        let post = self.0.entry(id.clone()).or_default();
        post.bodies.push(body);
        post.is_needed = true;
    }

    /// Adds a message that is dropped if the execution has ended.
    pub(crate) fn notice(&mut self, id: &ExecutionId, body: MessageBody) {
        self.0.entry(id.clone()).or_default().bodies.push(body);
    }

    /// Makes an execution commit soon, so that it notices that a lock was taken away. A waiting execution runs for
    /// that.
    pub(crate) fn look(&mut self, id: &ExecutionId) {
        self.0.entry(id.clone()).or_default().looks = true;
    }

    /// Adds the notices about a lock.
    pub(crate) fn notices(&mut self, Notices { lock, to }: Notices) {
        for (id, notice) in to {
            let body = |ticket, refused| MessageBody::Lock { lock: lock.clone(), ticket, refused };
            match notice {
                Notice::Granted(ticket) => self.message(&id, body(ticket, None)),
                Notice::Refused(ticket, why) => self.message(&id, body(ticket, Some(why))),
                Notice::TakenAway => self.look(&id),
            }
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds a cancellation.
    pub(crate) fn cancel(&mut self, id: &ExecutionId, reason: String) {
        self.0.entry(id.clone()).or_default().cancel = Some(reason);
    }

    /// The parts that the commit has to hold. Resident executions answer from memory, unless that was out of date. The
    /// records of executions that ride on the commit are left to those executions.
    pub(crate) async fn parts(
        self,
        engine: &Arc<EngineInner>,
        from_store: bool,
        boards: &BTreeSet<ExecutionId>,
    ) -> Result<Vec<Part>> {
        let mut parts = Vec::new();
        for (id, post) in self.0 {
            let boarding = engine.resident(&id).filter(|_| boards.contains(&id));
            if let Some(rev) = boarding.and_then(|run| run.with(|state| state.known.rev())) {
                if !post.bodies.is_empty() {
                    parts.push(engine.deliveries(&id, Target::Running(rev), post.bodies));
                }
                continue;
            }
            match engine.posted(&id, &post, from_store).await {
                Ok(posted) => parts.extend(posted),
                Err(WorkflowError::Ended { .. } | WorkflowError::NotFound { .. }) if !post.is_needed => {}
                Err(error) if error.kind() == ErrorKind::Corrupt && !post.is_needed => {
                    tracing::error!(%id, %error, "a damaged execution is not notified of an end");
                }
                Err(error) => return Err(error),
            }
        }
        Ok(parts)
    }
}

impl EngineInner {
    async fn posted(self: &Arc<EngineInner>, id: &ExecutionId, post: &Post, from_store: bool) -> Result<Vec<Part>> {
        let mut parts = Vec::new();
        if post.looks && post.cancel.is_none() {
            parts.push(self.looking(id).await?);
        }
        if let Some(reason) = &post.cancel {
            // The end of the parent cancels it, so the parent is not notified.
            parts.extend(self.cancelling(id, reason, false).await?);
        }
        if !post.bodies.is_empty() {
            let target = match self.target(id, from_store || !parts.is_empty()).await? {
                // An earlier part makes it running already.
                Target::Resting(_, rev) if !parts.is_empty() => Target::Running(rev),
                target => target,
            };
            parts.push(self.deliveries(id, target, post.bodies.clone()));
        }
        Ok(parts)
    }
}
