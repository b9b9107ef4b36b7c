//! Children: executions that an execution starts, in the commit that records the start, and waits for.

use std::future::IntoFuture;
use std::marker::PhantomData;
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::json;
use crate::lane::Part;
use crate::record::Record;
use crate::store::Timestamp;
use crate::workflow::admission::StartNeeds;
use crate::workflow::ctx::step::read_failure;
use crate::workflow::ctx::{Ctx, hash};
use crate::workflow::definition::{Definition, Workflow};
use crate::workflow::engine::check_name;
use crate::workflow::journal::place::Place;
use crate::workflow::journal::replay::{Journaled, OpCall};
use crate::workflow::run::{Doing, OpEffect, OpInProgress, Run, hash_text, with_record};
use crate::workflow::stored::kept::{self, MessageBody};
use crate::workflow::stored::record::{
    Attribute, Close, Entry, EntryState, Execution, Kind, Labels, Parent, StoredStatus, WaitsFor, failure_text,
};
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
    /// True if this execution is a fork and its source started the child: the child notifies the source of its end.
    is_of_source: bool,
    /// True if its output is a list with one element.
    is_batch: bool,
    close: Close,
    output: PhantomData<fn() -> O>,
}

/// How often a fork checks whether a child of its source has ended.
const LOOKS_AGAIN: Duration = Duration::from_secs(10);

/// The error of a child without a result: it exceeded its time limit.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, serde::Deserialize, thiserror::Error)]
#[error("child {id:?} timed out")]
pub struct ChildTimedOut {
    /// The child.
    pub id: String,
}

/// The error of a child without a result: it was cancelled.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, serde::Deserialize, thiserror::Error)]
#[error("child {id:?} was cancelled: {reason}")]
pub struct ChildCancelled {
    /// The child.
    pub id: String,
    /// The reason of the cancellation.
    pub reason: String,
}

impl Ctx {
    /// A child: another execution that this one starts. Await it for its result, or call [`StartChild::start`] and
    /// continue.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure, Workflow};
    /// # async fn example(ctx: Ctx, pack: Workflow<u64, String>) -> Result<(), Failure> {
    /// let parcel = ctx.child(&pack, 7).await?;
    /// # Ok(()) }
    /// ```
    pub fn child<I, O>(&self, workflow: &Workflow<I, O>, input: I) -> StartChild<'_, I, O> {
        let (workflow, labels) = (workflow.clone(), Labels::default());
        StartChild { ctx: self, workflow, input, id: None, close: Close::default(), labels }
    }
}

impl<I, O> StartChild<'_, I, O> {
    /// Sets the id; without this, the id is derived from the parent's.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure, Workflow};
    /// # async fn example(ctx: Ctx, pack: Workflow<u64, String>) -> Result<(), Failure> {
    /// let parcel = ctx.child(&pack, 7).id("pack-7").await?;
    /// # Ok(()) }
    /// ```
    pub fn id(mut self, id: impl Into<ExecutionId>) -> Self {
        self.id = Some(id.into());
        self
    }

    /// What happens to the child when this execution ends first; without this, the child is cancelled.
    ///
    /// ```
    /// # use latchwork::workflow::{Close, Ctx, Failure, Workflow};
    /// # async fn example(ctx: Ctx, pack: Workflow<u64, String>) -> Result<(), Failure> {
    /// ctx.child(&pack, 7).close(Close::Abandon).start().await?;
    /// # Ok(()) }
    /// ```
    pub fn close(mut self, close: Close) -> Self {
        self.close = close;
        self
    }

    /// Adds a tag.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure, Workflow};
    /// # async fn example(ctx: Ctx, pack: Workflow<u64, String>) -> Result<(), Failure> {
    /// let parcel = ctx.child(&pack, 7).tag("urgent").await?;
    /// # Ok(()) }
    /// ```
    pub fn tag(mut self, tag: impl Into<String>) -> Self {
        self.labels.tags.insert(tag.into());
        self
    }

    /// Adds a search attribute.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure, Workflow};
    /// # async fn example(ctx: Ctx, pack: Workflow<u64, String>) -> Result<(), Failure> {
    /// let parcel = ctx.child(&pack, 7).attribute("customer", "Ada").await?;
    /// # Ok(()) }
    /// ```
    pub fn attribute(mut self, name: impl Into<String>, value: impl Into<Attribute>) -> Self {
        self.labels.attributes.insert(name.into(), value.into());
        self
    }
}

impl<I: Serialize, O> StartChild<'_, I, O> {
    /// Starts the child. The start and the record of it are one commit. An id that is in use is a failure.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure, Workflow};
    /// # async fn example(ctx: Ctx, pack: Workflow<u64, String>) -> Result<(), Failure> {
    /// let child = ctx.child(&pack, 7).start().await?;
    /// ctx.run("print the label", async || Ok(())).await?;
    /// let parcel = child.result().await?;
    /// # Ok(()) }
    /// ```
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
        let call = OpCall { kind: Kind::Child, name, argument: hash(&(&id, &input, close)) };
        let birth = |operation: &Journaled<'_>| match birth_at_source(&operation.entry) {
            Some(birth) => (birth, true),
            None => (born_at(&ctx.run.id, ctx.run.number(), &operation.place), false),
        };
        let again = |operation: &Journaled<'_>, text: &str| Ok((serde_json::from_str(text)?, birth(operation)));
        let given = &workflow.definition;
        let started = ctx.replay_as(WaitsFor::Store, call, again, |operation| async move {
            let (run, doing) = (&ctx.run, &operation.doing);
            operation.unless_cancelled()?;
            let definition = match run.engine.accepted(name, Some(given)) {
                Ok(definition) => definition,
                Err(error) => return run.park(error.to_string()).await,
            };
            if !definition.policy.is_empty() {
                // The first commit of this execution may need the lane that is held for the child.
                doing.stored().await;
            }
            let born = birth(&operation);
            let id = id.unwrap_or_else(|| derived(run, &operation.place));
            let asked = definition.asked(&input).map_err(|error| operation.gave(error.into()))?.map(StartNeeds::alone);
            let now = run.env().now();
            let parent = Some(Parent { id: run.id.clone(), close, root: run.root(), birth: born.0 });
            let child = Execution { parent, ..definition.first_record(definition.alone(input), labels, now, now) };
            loop {
                while run.is_full() {
                    let _ = doing.flush().await;
                }
                let mut child = child.clone();
                // Until the outcome of this commit is known, no other start is decided under the same limits.
                let (part, _turn) = match &asked {
                    Some(asked) => match run.engine.admitting(&definition, asked, &id, &mut child).await {
                        Ok(admitting) => admitting,
                        Err(error) if error.is_rejection() => return Err(operation.gave(Failure::rejected(error))),
                        Err(error) => return run.stop_for(run.stops(error)).await,
                    },
                    None => Default::default(),
                };
                let effect = first_commit(run, doing, &id, child, definition.clone(), part);
                run.with(|state| state.known.start_child());
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

/// The id of a child without an explicit id: the same on every replay, and unique.
fn derived(run: &Run, place: &Place) -> ExecutionId {
    let hash = born_at(&run.id, run.number(), place);
    let parent = crate::workflow::stored::record::shortened(&run.id, 400);
    format!("{parent}.{place}-{hash:016x}").chars().take(512).collect::<String>().into()
}

/// The same on every replay, and unique among all children that executions with this id ever start.
fn born_at(parent: &ExecutionId, (started, number): (u64, u32), place: &Place) -> u64 {
    hash_text(&format!("{parent}/{started}/{number}/{place}"))
}

/// Records in an entry that a fork keeps which child it is about: the child of its source.
pub(crate) fn keep_birth(entry: &mut Entry, source: &ExecutionId, execution: &Execution, place: &Place) {
    // The source may be a fork itself.
    if entry.kind == Kind::Child && entry.progress.is_none() {
        entry.progress = Some(born_at(source, (execution.started_us, execution.run), place).to_string());
    }
}

/// The child that an entry is about, if a fork has kept the entry.
fn birth_at_source(entry: &Entry) -> Option<u64> {
    entry.progress.as_ref()?.parse().ok()
}

/// The first commit of a child, as a part of a commit of its parent.
fn first_commit(
    run: &Run,
    doing: &Doing,
    id: &ExecutionId,
    mut child: Execution,
    definition: Arc<Definition>,
    admission: Part,
) -> OpEffect {
    let engine = &run.engine;
    let (close, birth) = child.parent.as_ref().map(|parent| (parent.close, parent.birth)).unwrap_or_default();
    // First the part, then the question who owns it: so the part either checks the shard or notifies its owner.
    let first = engine.at_record(id, None);
    let is_here = child.status == StoredStatus::Running && engine.node.owns(id);
    let running = is_here.then(|| engine.set_running(id, &mut child));
    let part = admission.put(&run.kept().child(id), kept::ChildRecord { close, birth }.encode());
    let (part, _) = with_record(engine, first.and(part), id, None, &mut child, None);
    let (engine, id) = (engine.clone(), id.clone());
    let part = part.then(move |landing| {
        engine.metrics.started(&definition.name);
        let Some(running) = running else {
            if child.status == StoredStatus::Running {
                engine.spawn_load(&id);
            }
            return child.timer_us.into_iter().for_each(|timer| engine.timers.set(&id, Timestamp(timer)));
        };
        running.begin(Run::new(engine, definition, id, child, landing.last()).fresh());
    });
    OpEffect { op: doing.op, ..part.into() }
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
    ///
    /// ```
    /// # use latchwork::workflow::{Child, Failure};
    /// # async fn example(child: Child<String>) -> Result<(), Failure> {
    /// println!("{} packs", child.id());
    /// # Ok(()) }
    /// ```
    pub fn id(&self) -> &ExecutionId {
        &self.id
    }

    /// Sends a signal to the child. The signal and the record that it was sent are one commit.
    ///
    /// ```
    /// # use latchwork::workflow::{Child, Failure};
    /// # async fn example(child: Child<String>) -> Result<(), Failure> {
    /// child.signal("address", "1 Main Street").await?;
    /// # Ok(()) }
    /// ```
    pub async fn signal(&self, name: &str, payload: &(impl Serialize + ?Sized)) -> Result<(), Failure> {
        self.ctx.signal(&self.id, name, payload).await
    }

    /// Cancels the child.
    ///
    /// ```
    /// # use latchwork::workflow::{Child, Failure};
    /// # async fn example(child: Child<String>) -> Result<(), Failure> {
    /// child.cancel("there is nothing to pack").await?;
    /// # Ok(()) }
    /// ```
    pub async fn cancel(&self, reason: &str) -> Result<(), Failure> {
        self.ctx.cancel(&self.id, reason).await
    }
}

impl Ctx {
    /// Cancels another execution, in the commit that records this. If that execution has ended, this is a failure.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// ctx.cancel("order-7", "the customer has left").await?;
    /// # Ok(()) }
    /// ```
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

/// True if a message reports the end of this very child.
fn is_end_of(body: &MessageBody, id: &ExecutionId, born: u64) -> bool {
    matches!(body, MessageBody::Ended { child, birth, .. } if child == id && *birth == born)
}

/// The result of a child, as its parent records it.
pub(crate) fn outcome(id: &ExecutionId, status: &StoredStatus) -> Result<String, String> {
    match status {
        StoredStatus::Completed(output) => Ok(output.clone()),
        StoredStatus::Failed(failure) => Err(failure.clone()),
        StoredStatus::Cancelled(reason) => {
            let error = ChildCancelled { id: id.to_string(), reason: reason.clone() };
            Err(failure_text(&Failure::typed(error).not_retryable()))
        }
        _ => Err(failure_text(&Failure::typed(ChildTimedOut { id: id.to_string() }).not_retryable())),
    }
}

impl<O: DeserializeOwned> Child<O> {
    /// Waits for the child's end and returns its output or failure. An abandoned child does not notify its parent.
    ///
    /// ```
    /// # use latchwork::workflow::{Child, Failure};
    /// # async fn example(child: Child<String>) -> Result<(), Failure> {
    /// let parcel: String = child.result().await?;
    /// # Ok(()) }
    /// ```
    pub async fn result(self) -> Result<O, Failure> {
        let id = &self.id;
        if self.close == Close::Abandon {
            let message = format!("child {id:?} was started to be abandoned, so its end cannot be awaited here");
            return Err(Failure::new(message).with_code("latchwork.child.abandoned").not_retryable());
        }
        let call = OpCall { kind: Kind::ChildEnd, name: id, argument: 0 };
        let wrong = |error| Failure::new(format!("the output of child {id:?} does not fit: {error}"));
        if self.is_of_source {
            let text = self.ctx.end_of_another(call, id, self.birth).await?;
            return self.read(&text).map_err(wrong);
        }
        let is_it = |body: &MessageBody| is_end_of(body, id, self.birth);
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
    /// Waits for the end of a child that the source of this fork has started. The child notifies only the source, so
    /// this reads the child's record from time to time.
    async fn end_of_another(&self, call: OpCall<'_>, id: &ExecutionId, birth: u64) -> Result<String, Failure> {
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
                    let why = "was started by the source of this fork, and is no longer kept";
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
    /// Waits for the children that have to end before this execution.
    pub(crate) async fn until_children_ended(self: &Arc<Run>) {
        if self.engine.rehearsal.is_replay() || !self.with(|state| state.known.has_children()) {
            return;
        }
        let doing = OpInProgress::begin(self, WaitsFor::Store);
        self.ensure_inbox().await;
        // This includes children of branches that were dropped.
        doing.arrived().await;
        let children = self.or_stop(self.engine.children(&self.id).await).await;
        for (child, kept::ChildRecord { birth, .. }) in children.into_iter().filter(|(_, it)| it.close == Close::Await)
        {
            let now = self.env().now();
            let is_it = |body: &MessageBody| is_end_of(body, &child, birth);
            let what = WaitsFor::Child(child.to_string());
            doing.wait(what, now, None, |state| state.inbox.holds(is_it).then_some(())).await;
        }
    }
}
