//! Slots inside a workflow: one commit changes the slot and records the change in the journal. Changes wait in the
//! slot's queue together with changes from outside, and share commits with them.

use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::state::{
    Changed, Container, ContainerPlace, Event, HeldContainers, KnownState, Settled, Slot, Slots, StateBatch,
    StateError, StateJob, Steward, ToldEvent, name_within,
};
use crate::store::{Bytes, Rev};
use crate::workflow::ctx::Ctx;
use crate::workflow::ctx::step::read_failure;
use crate::workflow::journal::place::Place;
use crate::workflow::journal::replay::{Journaled, OpCall};
use crate::workflow::run::{Doing, Note, OpInProgress, Run, Seat};
use crate::workflow::stored::record::{Entry, EntryState, Kind, WaitsFor};
use crate::workflow::{Boxed, Failure};

/// The slots that a workflow can reach.
#[derive(Clone)]
pub struct CtxState {
    run: Arc<Run>,
    steward: Arc<dyn Steward>,
}

impl CtxState {
    pub(crate) fn new(ctx: Ctx) -> CtxState {
        let run = ctx.run.clone();
        CtxState { run, steward: Arc::new(SlotJournal { ctx, tells: None }) }
    }

    pub(crate) fn with(run: Arc<Run>, steward: Arc<dyn Steward>) -> CtxState {
        CtxState { run, steward }
    }

    fn slot<T: Serialize + DeserializeOwned>(&self, slots: Slots, key: &str) -> Slot<T> {
        slots.slot(key).by(self.steward.clone())
    }

    /// A slot that all code on the store shares.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// let number = ctx.state().global::<u64>("orders").increment(1).await?.value;
    /// # Ok(()) }
    /// ```
    pub fn global<T: Serialize + DeserializeOwned>(&self, key: &str) -> Slot<T> {
        self.slot(self.run.engine.states.global(), key)
    }

    /// A slot that all executions of this workflow share.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// ctx.state().workflow::<u64>("sold").increment(1).await?;
    /// # Ok(()) }
    /// ```
    pub fn workflow<T: Serialize + DeserializeOwned>(&self, key: &str) -> Slot<T> {
        self.slot(self.run.engine.states.workflow(&self.run.definition.name), key)
    }

    /// A slot of this execution. It is removed with the execution.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// ctx.state().execution::<String>("stage").set("paid".into()).await?;
    /// # Ok(()) }
    /// ```
    pub fn execution<T: Serialize + DeserializeOwned>(&self, key: &str) -> Slot<T> {
        self.slot(self.run.engine.states.execution(&self.run.id), key)
    }

    /// A slot that this execution shares with its tree: the root, its children and theirs. It is removed with the root.
    ///
    /// ```
    /// # use latchwork::workflow::{Ctx, Failure};
    /// # async fn example(ctx: Ctx) -> Result<(), Failure> {
    /// let budget = ctx.state().tree::<u64>("budget").initial(100);
    /// budget.increment(-7).await?;
    /// # Ok(()) }
    /// ```
    pub fn tree<T: Serialize + DeserializeOwned>(&self, key: &str) -> Slot<T> {
        self.slot(self.run.engine.states.tree(&self.run.root()), key)
    }
}

shown!(CtxState, it => id: it.run.id);

/// Records every read and change of a slot in the execution's journal.
struct SlotJournal {
    ctx: Ctx,
    tells: Option<TellsChange>,
}

/// Makes an event of the execution's stream of a change, which is at this rev then.
pub(crate) type TellsChange = Arc<dyn Fn(Event, Rev) -> Bytes + Send + Sync>;

/// The recorded answer of a change.
type RecordedAnswer = (Value, u64, bool);

impl Steward for SlotJournal {
    fn read<'a>(&'a self, place: &'a ContainerPlace) -> Boxed<'a, Result<KnownState, StateError>> {
        Box::pin(async move {
            let (run, name) = (&self.ctx.run, self.label("get", place));
            let call = OpCall { kind: Kind::Slot, name: &name, argument: 0 };
            let doing = OpInProgress::begin(run, WaitsFor::Store);
            let operation = self.ctx.journaled(&call, doing.clone()).await;
            if !operation.is_new {
                return Ok(self.seen(&operation).await);
            }
            let known = match place.shelf.read(&place.key, &place.name).await {
                Err(error @ (StateError::Store(_) | StateError::UnknownVersion { .. })) => {
                    return Err(self.failed(error).await);
                }
                known => known?,
            };
            operation.ends(saw(&known), None);
            Ok(known)
        })
    }

    fn change<'a>(&'a self, place: &'a ContainerPlace, mut job: StateJob) -> Boxed<'a, Result<(), StateError>> {
        Box::pin(async move {
            let (name, argument) = (self.label(job.operation, place), job.fingerprint());
            let call = OpCall { kind: Kind::Slot, name: &name, argument };
            let run = &self.ctx.run;
            let mut seat = Seat::new(Doing::begin(run, WaitsFor::Store, None), None::<SlotRecording>);
            let operation = self.ctx.journaled(&call, seat.doing.clone()).await;
            match &operation.entry.state {
                _ if operation.is_new => {
                    if run.with(|state| state.guards.lost().is_some()) {
                        job.settle(fenced(place, &operation.cancelled()));
                        return Ok(());
                    }
                    seat.doing.carry().await;
                    let tells = self.tells.clone().map(|tells| (tells, ToldEvent::default()));
                    job.told = tells.as_ref().map(|(_, told)| told.clone());
                    seat.note = Some(SlotRecording { place: operation.place, entry: operation.entry, tells });
                    job.rider = Some(Box::new(seat));
                    return place.shelf.submit(&place.key, job);
                }
                EntryState::Done(text) => {
                    let (value, rev, changed): RecordedAnswer = self.readable(&operation, text).await;
                    job.settle(Settled::Done(Changed { value, rev: Rev(rev), changed, repeated: false }));
                }
                EntryState::Gave(text) => job.settle(fenced(place, &read_failure(text))),
                // On the same state, the change has the same outcome again.
                _ => {
                    let known = self.seen(&operation).await;
                    let mut batch = StateBatch::new(known, place.name.clone());
                    let limit = run.engine.store.limits().value_bytes;
                    if let Some(done) = batch.run_alone(job, HeldContainers::default()).await {
                        done.within(limit, &batch).settle(batch.rev());
                    }
                }
            }
            Ok(())
        })
    }

    fn failed(&self, error: StateError) -> Boxed<'_, StateError> {
        let run = &self.ctx.run;
        Box::pin(async move { run.stop_for(run.stops(error.into())).await })
    }
}

impl SlotJournal {
    /// The name of an operation in the journal. It is the same in the journal of a fork.
    fn label(&self, operation: &str, place: &ContainerPlace) -> String {
        let run = &self.ctx.run;
        format!("{operation} {}", name_within(&place.name, &run.id, &run.root()))
    }

    async fn unreadable<T>(&self, operation: &Journaled<'_>) -> T {
        self.ctx.run.park(format!("the record of operation {} cannot be read", operation.place)).await
    }

    async fn readable<T: DeserializeOwned>(&self, operation: &Journaled<'_>, text: &str) -> T {
        match serde_json::from_str(text) {
            Ok(value) => value,
            Err(_) => self.unreadable(operation).await,
        }
    }

    /// The state that an operation read.
    async fn seen(&self, operation: &Journaled<'_>) -> KnownState {
        let EntryState::Saw { rev, state } = &operation.entry.state else { return self.unreadable(operation).await };
        let state = match state {
            Some(text) => Some(self.readable(operation, text).await),
            None => None,
        };
        KnownState { rev: rev.map(Rev), state }
    }
}

/// A change that was not made because the execution lost a lock.
fn fenced(place: &ContainerPlace, why: &Failure) -> Settled {
    Settled::Failed(StateError::Fenced { key: place.name.to_string(), reason: why.message().into() })
}

fn saw(known: &KnownState) -> EntryState {
    EntryState::Saw { rev: known.rev.map(|rev| rev.0), state: known.state.as_ref().map(Value::to_string) }
}

/// The journal entry of a change, which is written in the same commit as the change.
struct SlotRecording {
    /// The operation's place in the journal.
    place: Place,
    entry: Entry,
    /// What the stream tells of the change.
    tells: Option<(TellsChange, ToldEvent)>,
}

impl SlotRecording {
    fn done(&self, run: &Run, changed: &Changed) {
        let recorded: RecordedAnswer = (changed.value.clone(), changed.rev.0, changed.changed);
        let text = serde_json::to_string(&recorded).expect("a value can be written as JSON");
        self.record(run, EntryState::Done(text));
    }

    fn record(&self, run: &Run, state: EntryState) {
        run.put_for_carrier(&self.place, Entry { state, ..self.entry.clone() }, None);
    }
}

impl Note<Changed, (KnownState, Option<Changed>)> for SlotRecording {
    fn answered(&mut self, run: &Run, changed: &Changed) {
        self.done(run, changed);
        if let Some((tells, told)) = &self.tells
            && let Some(event) = told.lock().clone()
        {
            run.with(|state| state.beside.carry(tells(event, changed.rev)));
        }
    }

    fn rests(&mut self, run: &Run, (seen, changed): (KnownState, Option<Changed>)) {
        match changed {
            // Nothing is written here: another caller has made the change, or it changes nothing.
            Some(changed) => self.done(run, &changed),
            None => self.record(run, saw(&seen)),
        }
    }
}

impl Ctx {
    /// A stored container whose changes from here are recorded, as those of slots are, and told on the stream.
    pub(crate) fn entrust(&self, container: Container, tells: TellsChange) -> Container {
        container.by(Arc::new(SlotJournal { ctx: self.clone(), tells: Some(tells) }))
    }
}
