//! Children: executions that an execution starts, in the commit that records it; and what the end of one means for the
//! other.

use std::collections::BTreeSet;
use std::future::IntoFuture;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::json;
use crate::lane::{Part, Turn};
use crate::lock::Owner;
use crate::lock::free::Freed;
use crate::lock::lane::Ask;
use crate::record::Record;
use crate::store::{Commit, ErrorKind, Order, Outcome, Timestamp, Write};
use crate::workflow::admission::{Asked, EndLane};
use crate::workflow::ctx::{Ctx, hash};
use crate::workflow::definition::{Definition, Workflow};
use crate::workflow::engine::{Inner, check_name};
use crate::workflow::kept::{self, Letter};
use crate::workflow::place::Place;
use crate::workflow::post::Mail;
use crate::workflow::record::{
    Attribute, Close, Entry, EntryState, Execution, Kind, Labels, Parent, Status, WaitsFor, failure_text,
};
use crate::workflow::replay::{Call, Journaled};
use crate::workflow::run::{Doing, Effect, Listed, Next, Run, Sent, Stop, hash_text, turn};
use crate::workflow::step::read_failure;
use crate::workflow::{Boxed, ExecutionId, Failure, Result, WorkflowError};

/// A child that is about to be started.
#[must_use = "nothing starts until this is awaited"]
pub struct StartChild<'a, I, O> {
    ctx: &'a Ctx,
    workflow: Workflow<I, O>,
    input: I,
    id: Option<ExecutionId>,
    close: Close,
    labels: Labels,
}

/// A child that was started.
pub struct Child<O> {
    ctx: Ctx,
    id: ExecutionId,
    birth: u64,
    /// Whether an execution has started it that this is a fork of: its end is told to that one.
    is_of_source: bool,
    /// Whether it gives a list of one output.
    is_batch: bool,
    close: Close,
    output: PhantomData<fn() -> O>,
}

/// How long a fork waits until it looks again whether a child of its source has ended.
const LOOKS_AGAIN: Duration = Duration::from_secs(10);

/// Why a child has no result: it took longer than it may.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, serde::Deserialize, thiserror::Error)]
#[error("child {id:?} timed out")]
pub struct ChildTimedOut {
    /// The child.
    pub id: String,
}

/// Why a child has no result: it was cancelled.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, serde::Deserialize, thiserror::Error)]
#[error("child {id:?} was cancelled: {reason}")]
pub struct ChildCancelled {
    /// The child.
    pub id: String,
    /// What was said when it was.
    pub reason: String,
}

impl Ctx {
    /// A child: another execution that this one starts. Await it for its result, or [`StartChild::start`] it and go on.
    pub fn child<I, O>(&self, workflow: &Workflow<I, O>, input: I) -> StartChild<'_, I, O> {
        let (workflow, labels) = (workflow.clone(), Labels::default());
        StartChild { ctx: self, workflow, input, id: None, close: Close::default(), labels }
    }
}

impl<I, O> StartChild<'_, I, O> {
    /// Under this id; without one, one is made of the parent's.
    pub fn id(mut self, id: impl Into<ExecutionId>) -> Self {
        self.id = Some(id.into());
        self
    }

    /// What becomes of the child when this execution ends before it: it is cancelled, unless this is said.
    pub fn close(mut self, close: Close) -> Self {
        self.close = close;
        self
    }

    /// With this tag.
    pub fn tag(mut self, tag: impl Into<String>) -> Self {
        self.labels.tags.insert(tag.into());
        self
    }

    /// With this search attribute.
    pub fn attribute(mut self, name: impl Into<String>, value: impl Into<Attribute>) -> Self {
        self.labels.attributes.insert(name.into(), value.into());
        self
    }
}

impl<I: Serialize, O> StartChild<'_, I, O> {
    /// Starts the child. That and the record of it are one commit. An id that is taken is a failure.
    pub async fn start(self) -> Result<Child<O>, Failure> {
        let StartChild { ctx, workflow, input, id, close, labels } = self;
        let name = workflow.name();
        let json =
            json::to_value(&input).map_err(|error| Failure::no_json(format!("the input of {name:?}"), &error))?;
        let input = json.to_string();
        ctx.run.fits("the input", input.len())?;
        labels.check()?;
        if let Some(id) = &id {
            check_name("the id of an execution", id)?;
        }
        let call = Call { kind: Kind::Child, name, argument: hash(&(&id, &input, close)) };
        let birth = |operation: &Journaled<'_>| match birth_at_source(&operation.entry) {
            Some(birth) => (birth, true),
            None => (born_at(&ctx.run.id, ctx.run.number(), &operation.place), false),
        };
        let again = |operation: &Journaled<'_>, text: &str| Ok((serde_json::from_str(text)?, birth(operation)));
        let started = ctx.replay_as(WaitsFor::Store, call, again, |operation| async move {
            let (run, doing) = (&ctx.run, &operation.doing);
            operation.unless_cancelled()?;
            let Some(definition) = run.engine.definition(name).cloned() else {
                return run.park(format!("workflow {name:?} is not registered with this engine")).await;
            };
            if !definition.policy.is_empty() {
                // Its own first commit may go through the lane that is kept for the child's.
                doing.stored().await;
            }
            let born = birth(&operation);
            let id = id.unwrap_or_else(|| derived(run, &operation.place));
            let asked = definition.asked(&input).map_err(|error| operation.gave(error.into()))?.map(Asked::alone);
            let now = run.env().now();
            let parent = Some(Parent { id: run.id.clone(), close, root: run.root(), birth: born.0 });
            let child = Execution { parent, ..definition.first_record(definition.alone(input), labels, now, now) };
            loop {
                while run.is_full() {
                    let _ = doing.flush().await;
                }
                let mut child = child.clone();
                // Until its commit is answered, no other start is decided by the same limits.
                let (part, _turn) = match &asked {
                    Some(asked) => match run.engine.admitting(&definition, asked, &id, &mut child).await {
                        Ok(admitting) => admitting,
                        Err(error) if error.is_rejection() => return Err(operation.gave(Failure::rejected(error))),
                        Err(error) => return run.stop_for(run.stops(error)).await,
                    },
                    None => Default::default(),
                };
                let effect = first_commit(run, doing, &id, child, definition.clone(), part);
                run.with(|state| state.has_children = true);
                operation.done_with(&id, Some(effect));
                if doing.flush().await.is_ok() {
                    return Ok((id, born));
                }
                let is_taken = asked.is_none() || run.or_stop(run.engine.read(&id).await).await.is_some();
                if is_taken {
                    return Err(operation.gave(WorkflowError::AlreadyStarted { id }.into()));
                }
            }
        });
        let (id, (birth, is_of_source)) = started.await?;
        let is_batch = workflow.definition.policy.batch.is_some();
        Ok(Child { ctx: ctx.clone(), id, birth, is_of_source, is_batch, close, output: PhantomData })
    }
}

/// The id of a child that was given none: the same on every replay, and nobody else's.
fn derived(run: &Run, place: &Place) -> ExecutionId {
    let hash = born_at(&run.id, run.number(), place);
    let parent = crate::workflow::record::shortened(&run.id, 400);
    format!("{parent}.{place}-{hash:016x}").chars().take(512).collect::<String>().into()
}

/// The same on every replay, and no other's of all children that executions of this id ever start.
fn born_at(parent: &ExecutionId, (started, number): (u64, u32), place: &Place) -> u64 {
    hash_text(&format!("{parent}/{started}/{number}/{place}"))
}

/// Notes in an entry that a fork keeps which child it tells of: that of its source.
pub(crate) fn keep_birth(entry: &mut Entry, source: &ExecutionId, execution: &Execution, place: &Place) {
    // The source may be a fork itself.
    if entry.kind == Kind::Child && entry.progress.is_none() {
        entry.progress = Some(born_at(source, (execution.started_us, execution.run), place).to_string());
    }
}

/// Which child an entry tells of, if a fork has kept it.
fn birth_at_source(entry: &Entry) -> Option<u64> {
    entry.progress.as_ref()?.parse().ok()
}

/// The first commit of a child, as a part of one of its parent's.
fn first_commit(
    run: &Run,
    doing: &Doing,
    id: &ExecutionId,
    mut child: Execution,
    definition: Arc<Definition>,
    admission: Part,
) -> Effect {
    let engine = &run.engine;
    let (close, birth) = child.parent.as_ref().map(|parent| (parent.close, parent.birth)).unwrap_or_default();
    let running = (child.status == Status::Running).then(|| engine.set_running(id, &mut child));
    let part = admission.put(&run.kept().child(id), kept::Child { close, birth }.encode());
    let (part, _) = turn(engine, engine.at_record(id, None).and(part), id, None, &mut child, None);
    let (engine, id) = (engine.clone(), id.clone());
    let part = part.then(move |landing| {
        engine.metrics.started(&definition.name);
        let Some(running) = running else {
            return child.timer_us.into_iter().for_each(|timer| engine.timers.set(&id, Timestamp(timer)));
        };
        running.begin(Run::new(engine, definition, id, child, landing.last()).fresh());
    });
    Effect { op: doing.op, ..part.into() }
}

impl<'a, I: Serialize + Send + 'a, O: DeserializeOwned + Send + 'a> IntoFuture for StartChild<'a, I, O> {
    type Output = Result<O, Failure>;
    type IntoFuture = Boxed<'a, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(async move { self.start().await?.result().await })
    }
}

impl<O> Child<O> {
    /// The child's id.
    pub fn id(&self) -> &ExecutionId {
        &self.id
    }

    /// Sends a signal to the child: it is stored in the same commit as the record that it was sent.
    pub async fn signal(&self, name: &str, payload: &impl Serialize) -> Result<(), Failure> {
        self.ctx.signal(&self.id, name, payload).await
    }

    /// Has the child cancelled.
    pub async fn cancel(&self, reason: &str) -> Result<(), Failure> {
        self.ctx.cancel(&self.id, reason).await
    }
}

impl Ctx {
    /// Has another execution cancelled, in the commit that records it. One that has ended is a failure.
    pub async fn cancel(&self, id: impl Into<ExecutionId>, reason: &str) -> Result<(), Failure> {
        let id = &id.into();
        let what = format!("cancel {id}");
        self.send(&what, hash(&reason), |engine| async move {
            if *id == self.run.id {
                self.run.ask_cancel(reason);
                return Ok(None);
            }
            engine.cancelling(id, reason, true).await
        })
        .await
    }
}

/// Whether a message tells of the end of this very child.
fn is_end_of(letter: &Letter, id: &ExecutionId, born: u64) -> bool {
    matches!(letter, Letter::Ended { child, birth, .. } if child == id && *birth == born)
}

/// What a child has come to, as its parent records it.
pub(crate) fn outcome(id: &ExecutionId, status: &Status) -> Result<String, String> {
    match status {
        Status::Completed(output) => Ok(output.clone()),
        Status::Failed(failure) => Err(failure.clone()),
        Status::Cancelled(reason) => {
            let error = ChildCancelled { id: id.to_string(), reason: reason.clone() };
            Err(failure_text(&Failure::typed(error).not_retryable()))
        }
        _ => Err(failure_text(&Failure::typed(ChildTimedOut { id: id.to_string() }).not_retryable())),
    }
}

impl<O: DeserializeOwned> Child<O> {
    /// Waits for the child's end: its output, or why there is none. Of one that was abandoned, its parent is not told.
    pub async fn result(self) -> Result<O, Failure> {
        let id = &self.id;
        if self.close == Close::Abandon {
            let message = format!("child {id:?} was started to be abandoned, and its end cannot be waited for here");
            return Err(Failure::new(message).with_code("latchwork.child.abandoned").not_retryable());
        }
        let call = Call { kind: Kind::ChildEnd, name: id, argument: 0 };
        let wrong = |error| Failure::new(format!("the output of child {id:?} does not fit: {error}"));
        if self.is_of_source {
            let text = self.ctx.end_of_another(call, id, self.birth).await?;
            return self.read(&text).map_err(wrong);
        }
        let is_it = |letter: &Letter| is_end_of(letter, id, self.birth);
        let what = WaitsFor::Child(id.to_string());
        let text = self.ctx.await_text(call, what, None, is_it).await?.ok_or_else(Failure::time)?;
        self.read(&text).map_err(wrong)
    }

    fn read(&self, text: &str) -> serde_json::Result<O> {
        match self.is_batch {
            true => serde_json::from_str::<[O; 1]>(text).map(|[output]| output),
            false => serde_json::from_str(text),
        }
    }
}

impl Ctx {
    /// Waits for the end of a child that another execution has started, of which this is a fork. Only that one is told
    /// of the end, so it is looked for in the child's record, now and then.
    async fn end_of_another(&self, call: Call<'_>, id: &ExecutionId, birth: u64) -> Result<String, Failure> {
        let what = WaitsFor::Child(id.to_string());
        let again = |_: &Journaled<'_>, text: &str| Ok(text.to_string());
        let ended = self.replay_as(what.clone(), call, again, |operation| async move {
            let run = &self.run;
            run.effect().await;
            loop {
                operation.unless_cancelled()?;
                let found = run.or_stop(run.engine.read(id).await).await;
                let found = found.filter(|(child, _)| child.parent.as_ref().is_some_and(|it| it.birth == birth));
                let Some((Execution { status, .. }, _)) = found else {
                    let why = "was started by an execution that this is a fork of, and is no longer kept";
                    return run.park(format!("child {id:?}, whose end it waits for, {why}")).await;
                };
                if status.is_terminal() {
                    let ended = outcome(id, &status);
                    operation.ends(ended.clone().map_or_else(EntryState::Gave, EntryState::Done), None);
                    return ended.map_err(|text| read_failure(&text));
                }
                let until = run.env().now().plus(LOOKS_AGAIN);
                operation.doing.wait(what.clone(), operation.since(), Some(until), |_| None::<()>).await;
            }
        });
        ended.await
    }
}

impl Run {
    /// Waits for the children that are to have ended before it does.
    pub(crate) async fn until_children_ended(self: &Arc<Run>) {
        if self.engine.rehearsal.is_replay() || !self.with(|state| state.has_children) {
            return;
        }
        let doing = Listed::begin(self, WaitsFor::Store);
        self.ensure_inbox().await;
        // Also one that a branch has started which was then given up.
        doing.arrived().await;
        let children = self.or_stop(self.engine.children(&self.id).await).await;
        for (child, kept::Child { birth, .. }) in children.into_iter().filter(|(_, it)| it.close == Close::Await) {
            let now = self.env().now();
            let is_it = |letter: &Letter| is_end_of(letter, &child, birth);
            let what = WaitsFor::Child(child.to_string());
            doing.wait(what, now, None, |state| state.inbox().holds(is_it).then_some(())).await;
        }
    }

    /// Has it admitted that comes to something with its first commit. One that is terminated before that never begins.
    /// Gives whether that is all there is to do.
    async fn admitted_with(self: &Arc<Run>, next: &Next) -> Result<bool, Stop> {
        let asked = self.with(|state| state.asked.take());
        let is_parked = matches!(next, Next::Rests(Status::Parked(_)));
        let Some(asked) = asked.filter(|_| is_parked || self.stop().is_none()) else { return Ok(false) };
        let first = if is_parked { next.clone() } else { Next::Runs };
        match self.send_admitted(asked, first).await {
            Sent::Stopped(stop) => Err(stop),
            _ => Ok(is_parked),
        }
    }

    /// What `Inner::closing` goes by.
    fn as_it_ends(&self) -> Execution {
        let has_finalizer = self.definition.finalizer.get().is_some();
        self.with(|state| Execution {
            workflow: state.execution.workflow.clone(),
            input: if has_finalizer { state.execution.input.clone() } else { String::new() },
            started_us: state.execution.started_us,
            has_children: state.has_children,
            has_locks: state.has_locks,
            has_reviews: state.has_reviews,
            parent: state.execution.parent.clone(),
            schedule: state.execution.schedule.clone(),
            admission: state.execution.admission.clone(),
            superseded: state.execution.superseded,
            run: state.execution.run,
            key: state.execution.key.clone(),
            ..Execution::default()
        })
    }

    /// What goes with its end, and what it is from then on: another may take its place.
    async fn closing_as(&self, next: Next, status: Option<&Status>, how: How) -> Result<(Closing, Next)> {
        let before = self.as_it_ends();
        let mut closing = self.engine.closing(&self.id, &before, status, how).await?;
        let Some(status) = status else { return Ok((closing, next)) };
        let first = self.engine.succession(&self.id, &before, &mut closing.parts, None).await?;
        Ok((closing, first.map_or(next, |first| Next::Succeeds(status.clone(), Box::new(first)))))
    }

    /// Commits what it has come to. With an end, its parent is told, its children are cancelled that are to be, and its
    /// locks are released; with a beginning anew, only these.
    pub(crate) async fn close(self: &Arc<Run>, next: Next) -> Result<(), Stop> {
        if self.admitted_with(&next).await? {
            return Ok(());
        }
        let status = match &next {
            Next::Rests(status) if status.is_terminal() => Some(status.clone()),
            Next::Rests(status) => {
                let status = status.clone();
                self.commit(next).await?;
                self.engine.metrics.ended(&self.definition.name, &status);
                return Ok(());
            }
            Next::Continues(_) => None,
            _ => return self.commit(next).await,
        };
        // What it is about to do to others may keep the lane of its end waiting.
        let mut how = How { is_alone: self.with(|state| state.has_effects()), ..How::default() };
        loop {
            let closed = self.closing_as(next.clone(), status.as_ref(), how).await;
            let (mut closing, next) = closed.map_err(|error| self.stops(error))?;
            self.forget_effects_on(&closing.parts);
            self.forget_reviews();
            let (mut commit, boarded) = self.board(Commit::new(), next);
            // A message that is taken away with a lock may be among those that are received.
            let is_written = |write: &Write| commit.writes().iter().any(|other| other.key() == write.key());
            let is_new = |write: &Write| !matches!(write, Write::Delete(_)) || !is_written(write);
            closing.parts.iter_mut().for_each(|part| part.retain_writes(is_new));
            let mut placed = Vec::with_capacity(closing.parts.len());
            for part in std::mem::take(&mut closing.parts) {
                let (place, rest);
                (commit, place, rest) = part.place_whole(commit);
                placed.push((rest, place));
            }
            let outcome = match closing.lane.take() {
                None => self.measured(commit).await,
                Some(lane) => match self.engine.admissions.end(lane, commit).await {
                    Some(outcome) => outcome,
                    None => {
                        self.put_back(boarded);
                        how.is_alone = true;
                        continue;
                    }
                },
            };
            match outcome {
                Ok(Outcome::Applied(receipt)) => {
                    self.landed(boarded, &receipt);
                    status.iter().for_each(|status| self.engine.metrics.ended(&self.definition.name, status));
                    placed.into_iter().for_each(|(rest, place)| rest.land(place.landing(&receipt)));
                    return Ok(());
                }
                // Somebody else has changed meanwhile, or is to be told otherwise.
                Ok(Outcome::Refused(refusal)) => {
                    placed.into_iter().for_each(|(rest, place)| rest.refuse(&place, &refusal));
                    if let crate::workflow::run::Verdict::Stop(stop) = self.refused(boarded, &refusal) {
                        return Err(stop);
                    }
                    how.from_store = true;
                }
                Err(error) if error.kind() == ErrorKind::Invalid && !how.is_large => {
                    self.put_back(boarded);
                    drop(closing);
                    how.is_large = true;
                    match self.stop() {
                        None => self.commit(Next::Runs).await?,
                        // Nothing is committed any more but how it ended.
                        Some(_) => self.forget_pending(),
                    }
                }
                Err(error) => {
                    self.put_back(boarded);
                    self.engine.node.doubt();
                    return Err(self.failed(error));
                }
            }
        }
    }
}

/// How an end is made a commit.
#[derive(Clone, Copy, Default)]
pub(crate) struct How {
    /// Whether what is known in memory was out of date.
    pub(crate) from_store: bool,
    /// Whether it was more than a commit can hold: what can be done before or afterwards is.
    pub(crate) is_large: bool,
    /// Whether it is committed by itself, and not with the admission of those that wait for its permits.
    pub(crate) is_alone: bool,
}

/// What goes with the end of an execution. As long as it is there, no other commit changes the locks in it.
pub(crate) struct Closing {
    pub(crate) parts: Vec<Part>,
    /// Where it is committed, if those that wait for its permits are to be admitted with it.
    pub(crate) lane: Option<EndLane>,
    _turns: Vec<Turn>,
}

impl Inner {
    /// The children of an execution that have not ended, and what its end means for them.
    async fn children(&self, id: &ExecutionId) -> Result<Vec<(ExecutionId, kept::Child)>> {
        let kept = self.kept(id);
        let found = self.store.view().await?.scan(&kept.children(), Order::Ascending, usize::MAX).await?;
        let mut children = Vec::with_capacity(found.len());
        for (key, item) in found {
            let Some(child) = kept.read_child(&key) else { continue };
            let how = match kept::Child::decode(&item.value) {
                Err(why) if why.is_version() => return Err(why.at(format!("child {child:?} of {id:?}")).into()),
                how => how.unwrap_or(kept::Child { close: Close::Cancel, birth: 0 }),
            };
            children.push((child, how));
        }
        Ok(children)
    }

    /// What goes with the end of an execution: its parent and its schedule are told, its children are cancelled that
    /// are to be, the locks that it holds are released, its permits given back, its reviews closed, and its finalizer
    /// started.
    /// Without a status it begins anew: then it is only locks and reviews.
    pub(crate) async fn closing(
        self: &Arc<Inner>,
        id: &ExecutionId,
        before: &Execution,
        status: Option<&Status>,
        how: How,
    ) -> Result<Closing> {
        let mut mail = Mail::default();
        let parent = before.parent.as_ref().filter(|parent| parent.close != Close::Abandon);
        if let (Some(parent), Some(status)) = (parent, status) {
            let (child, birth, status) = (id.clone(), parent.birth, status.clone());
            mail.notice(&parent.id, Letter::Ended { child, birth, status });
        }
        if before.has_children && status.is_some() {
            let children = self.children(id).await?.into_iter().filter(|(_, it)| it.close == Close::Cancel);
            let reason = format!("its parent {id:?} has ended");
            for (child, _) in children {
                if !how.is_large {
                    mail.cancel(&child, reason.clone());
                    continue;
                }
                match self.cancel(&child, &reason).await {
                    Err(WorkflowError::Ended { .. } | WorkflowError::NotFound { .. }) => {}
                    Err(error) if error.kind() == ErrorKind::Corrupt => {
                        tracing::error!(id = %child, %error, "a damaged child is not cancelled");
                    }
                    cancelled => cancelled?,
                }
            }
        }
        let owner = Owner::Execution(id.clone());
        if how.is_large && before.has_locks && status.is_none() {
            // The next run may want them.
            for (lock, requests) in self.locks.requests_of(&owner).await? {
                for (ticket, _) in requests {
                    let ask = Ask::Release { ticket, id: None };
                    self.locks.ask(&lock, ask, None).await?;
                }
            }
        }
        let freed = match (before.has_locks, how.is_large) {
            (false, _) => Freed::default(),
            (true, true) => self.locks.freed_later(&owner).await?,
            (true, false) => self.locks.freed(&owner, how.from_store).await?,
        };
        freed.notices.into_iter().for_each(|notices| mail.notices(notices));
        // A commit writes each key once: ends that change others do not share one.
        let is_alone = how.is_alone || how.is_large || before.has_locks || !mail.is_empty();
        let mut parts = mail.parts(self, how.from_store, &BTreeSet::new()).await?;
        parts.extend(freed.parts);
        // The permits of one whose place is taken go over to the other.
        let gives_back = status.is_some() && before.superseded.is_none();
        let lane = (gives_back && !is_alone).then(|| self.admissions.lane_of_end(before)).flatten();
        parts.extend((gives_back && lane.is_none()).then(|| self.giving_back(id, before)).flatten());
        if let (Some(schedule), Some(_)) = (&before.schedule, status) {
            parts.push(self.ending_scheduled(schedule, id));
        }
        if before.has_reviews {
            parts.extend(self.closing_reviews(id, &before.workflow, status.is_some(), how).await?);
        }
        if let Some(status) = status {
            parts.extend(self.finalizing(id, before, status, how).await?);
        }
        Ok(Closing { parts, lane, _turns: freed.turns })
    }
}
