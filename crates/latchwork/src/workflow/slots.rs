//! Slots from within a workflow: the change of the slot and the record that it was made are one commit. Changes stand
//! in the slot's queue with those from outside, and share commits with their neighbours there.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::state::{Batch, Changed, Held, Job, Known, Place, Settled, Slot, Slots, StateError, Steward, name_within};
use crate::store::Rev;
use crate::workflow::Failure;
use crate::workflow::ctx::{Call, Ctx};
use crate::workflow::place::Place as Spot;
use crate::workflow::record::{Entry, EntryState, Kind, WaitsFor};
use crate::workflow::run::{Doing, Listed, Note, Run, Seat};
use crate::workflow::step::read_failure;

/// The slots that a workflow can reach.
#[derive(Clone)]
pub struct CtxState {
    run: Arc<Run>,
    steward: Arc<dyn Steward>,
}

impl CtxState {
    pub(crate) fn new(ctx: Ctx) -> CtxState {
        let run = ctx.run.clone();
        CtxState { run, steward: Arc::new(Journal { ctx }) }
    }

    pub(crate) fn with(run: Arc<Run>, steward: Arc<dyn Steward>) -> CtxState {
        CtxState { run, steward }
    }

    fn slot<T: Serialize + DeserializeOwned>(&self, slots: Slots, key: &str) -> Slot<T> {
        slots.slot(key).by(self.steward.clone())
    }

    /// A slot that everybody shares.
    pub fn global<T: Serialize + DeserializeOwned>(&self, key: &str) -> Slot<T> {
        self.slot(self.run.engine.states.global(), key)
    }

    /// A slot that all executions of this workflow share.
    pub fn workflow<T: Serialize + DeserializeOwned>(&self, key: &str) -> Slot<T> {
        self.slot(self.run.engine.states.workflow(&self.run.definition.name), key)
    }

    /// A slot of this execution. It is removed with the execution.
    pub fn execution<T: Serialize + DeserializeOwned>(&self, key: &str) -> Slot<T> {
        self.slot(self.run.engine.states.execution(&self.run.id), key)
    }
}

impl std::fmt::Debug for CtxState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CtxState").field("id", &self.run.id).finish_non_exhaustive()
    }
}

/// Has every read and change of a slot recorded in the execution's journal.
struct Journal {
    ctx: Ctx,
}

/// What a change answered, as it is recorded.
type Recorded = (Value, u64, bool);

impl Steward for Journal {
    fn read<'a>(&'a self, place: &'a Place) -> Pin<Box<dyn Future<Output = Result<Known, StateError>> + Send + 'a>> {
        Box::pin(async move {
            let (run, name) = (&self.ctx.run, self.label("get", place));
            let call = Call { kind: Kind::Slot, name: &name, argument: 0 };
            let (spot, found) = self.ctx.take(&call).await;
            if let Some(found) = found {
                return Ok(self.seen(&spot, found.state).await);
            }
            let doing = Doing::begin(run, WaitsFor::Store, None);
            let _listed = Listed(&doing);
            let known = match place.shelf.read(&place.key, &place.name).await {
                Err(error @ (StateError::Store(_) | StateError::UnknownVersion { .. })) => {
                    return Err(self.failed(error).await);
                }
                known => known?,
            };
            run.put(&spot, call.entry(run.env().now(), saw(&known)));
            Ok(known)
        })
    }

    fn change<'a>(
        &'a self,
        place: &'a Place,
        mut job: Job,
    ) -> Pin<Box<dyn Future<Output = Result<(), StateError>> + Send + 'a>> {
        Box::pin(async move {
            let (name, argument) = (self.label(job.operation, place), job.fingerprint());
            let call = Call { kind: Kind::Slot, name: &name, argument };
            let (spot, found) = self.ctx.take(&call).await;
            match found.map(|found| found.state) {
                None => {
                    let run = self.ctx.run.clone();
                    let entry = call.entry(run.env().now(), EntryState::Begun);
                    if run.with(|state| state.lost_lock().is_some()) {
                        let failure = self.ctx.cancelled(&spot, entry);
                        job.settle(fenced(place, &failure));
                        return Ok(());
                    }
                    let doing = Doing::begin(&run, WaitsFor::Store, None);
                    let seat = Seat::new(doing, Recording { spot, entry });
                    seat.doing.carry().await;
                    job.rider = Some(Box::new(seat));
                    place.shelf.submit(&place.key, job)
                }
                Some(EntryState::Done(text)) => match serde_json::from_str::<Recorded>(&text) {
                    Ok((value, rev, changed)) => {
                        job.settle(Settled::Done(Changed { value, rev: Rev(rev), changed, repeated: false }));
                        Ok(())
                    }
                    Err(_) => self.unreadable(&spot).await,
                },
                Some(EntryState::Gave(text)) => {
                    job.settle(fenced(place, &read_failure(&text)));
                    Ok(())
                }
                // What it came to on that state, it comes to again.
                Some(state) => {
                    let known = self.seen(&spot, state).await;
                    let mut batch = Batch::new(known, place.name.clone());
                    let limit = self.ctx.run.engine.store.limits().value_bytes;
                    if let Some(done) = batch.run_alone(job, Held::default()).await {
                        done.within(limit, &batch).settle(batch.rev());
                    }
                    Ok(())
                }
            }
        })
    }

    fn failed(&self, error: StateError) -> Pin<Box<dyn Future<Output = StateError> + Send + '_>> {
        let run = &self.ctx.run;
        Box::pin(async move { run.stop_for(run.stops(error.into())).await })
    }
}

impl Journal {
    /// What an operation is called in the journal, and in that of a fork.
    fn label(&self, operation: &str, place: &Place) -> String {
        format!("{operation} {}", name_within(&place.name, &self.ctx.run.id))
    }

    async fn unreadable<T>(&self, spot: &Spot) -> T {
        self.ctx.run.park(format!("what operation {spot} did cannot be read")).await
    }

    /// The state that an operation saw.
    async fn seen(&self, spot: &Spot, recorded: EntryState) -> Known {
        let EntryState::Saw { rev, state } = recorded else { return self.unreadable(spot).await };
        match state.map(|text| serde_json::from_str(&text)).transpose() {
            Ok(state) => Known { rev: rev.map(Rev), state },
            Err(_) => self.unreadable(spot).await,
        }
    }
}

/// A change that was not made because a lock was taken away.
fn fenced(place: &Place, why: &Failure) -> Settled {
    Settled::Failed(StateError::Fenced { key: place.name.to_string(), reason: why.message().into() })
}

fn saw(known: &Known) -> EntryState {
    EntryState::Saw { rev: known.rev.map(|rev| rev.0), state: known.state.as_ref().map(Value::to_string) }
}

/// The record of a change, which goes with the change.
struct Recording {
    /// The operation's place in the journal.
    spot: Spot,
    entry: Entry,
}

impl Recording {
    fn record(&self, run: &Run, state: EntryState) {
        run.put_for_carrier(&self.spot, Entry { state, ..self.entry.clone() }, None);
    }
}

impl Note<Changed, (Known, Option<Changed>)> for Recording {
    fn answered(&mut self, run: &Run, changed: &Changed) {
        let recorded: Recorded = (changed.value.clone(), changed.rev.0, changed.changed);
        let text = serde_json::to_string(&recorded).expect("a value can be written as JSON");
        self.record(run, EntryState::Done(text));
    }

    fn rests(&mut self, run: &Run, (seen, changed): (Known, Option<Changed>)) {
        match changed {
            Some(changed) => self.answered(run, &changed),
            None => self.record(run, saw(&seen)),
        }
    }
}
