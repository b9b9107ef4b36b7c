//! Slots from within a workflow: the change of the slot and the record that it was made are one commit. Changes stand
//! in the slot's queue with those from outside, and share commits with their neighbours there.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::state::{Batch, Changed, Held, Job, Known, Place, Rider, Settled, Slot, Slots, StateError, Steward};
use crate::store::{Commit, Receipt, Refusal, Rev, StoreError};
use crate::workflow::record::{Entry, EntryState, Kind};
use crate::workflow::run::{Boarded, Next, Run, Stop};

/// The slots that a workflow can reach.
#[derive(Clone)]
pub struct CtxState {
    run: Arc<Run>,
    steward: Arc<dyn Steward>,
}

impl CtxState {
    pub(crate) fn new(run: Arc<Run>) -> CtxState {
        let steward = Arc::new(Journal { run: run.clone() });
        CtxState { run, steward }
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
    run: Arc<Run>,
}

/// What a change answered, as it is recorded.
type Recorded = (Value, u64, bool);

impl Steward for Journal {
    fn read<'a>(&'a self, place: &'a Place) -> Pin<Box<dyn Future<Output = Result<Known, StateError>> + Send + 'a>> {
        Box::pin(async move {
            let name = format!("get {}", place.name);
            let (number, found) = self.run.take(Kind::Slot, &name, 0).await;
            if let Some(found) = found {
                return Ok(self.seen(number, found.state).await);
            }
            let known = match place.shelf.read(&place.key, &place.name).await {
                Err(StateError::Store(error)) => return Err(self.failed(error).await),
                known => known?,
            };
            self.run.put(number, Entry::new(Kind::Slot, &*name, 0, self.run.env().now(), saw(&known)));
            Ok(known)
        })
    }

    fn change<'a>(
        &'a self,
        place: &'a Place,
        mut job: Job,
    ) -> Pin<Box<dyn Future<Output = Result<(), StateError>> + Send + 'a>> {
        Box::pin(async move {
            let (name, argument) = (format!("{} {}", job.operation, place.name), job.fingerprint());
            let (number, found) = self.run.take(Kind::Slot, &name, argument).await;
            match found.map(|found| found.state) {
                None => {
                    self.run.ensure_stored().await;
                    let run = self.run.clone();
                    let entry = Entry::new(Kind::Slot, &*name, argument, run.env().now(), EntryState::Begun);
                    job.rider = Some(Box::new(Passenger { run, place: number, entry, boarded: None }));
                    place.shelf.submit(&place.key, &place.name, job)
                }
                Some(EntryState::Done(text)) => match serde_json::from_str::<Recorded>(&text) {
                    Ok((value, rev, changed)) => {
                        job.settle(Settled::Done(Changed { value, rev: Rev(rev), changed, repeated: false }));
                        Ok(())
                    }
                    Err(_) => self.unreadable(number).await,
                },
                // What it came to on that state, it comes to again.
                Some(state) => {
                    let known = self.seen(number, state).await;
                    let mut batch = Batch::new(known, place.name.clone());
                    let limit = self.run.engine.store.limits().value_bytes;
                    if let Some(done) = batch.run_alone(job, Held::default()).await {
                        done.within(limit, &batch).settle(batch.rev());
                    }
                    Ok(())
                }
            }
        })
    }

    fn failed(&self, error: StoreError) -> Pin<Box<dyn Future<Output = StateError> + Send + '_>> {
        Box::pin(async move { self.run.stop_for(self.run.failed(error)).await })
    }
}

impl Journal {
    async fn unreadable<T>(&self, place: u32) -> T {
        self.run.stop_for(Stop::Parked(format!("what operation {place} did cannot be read"))).await
    }

    /// The state that an operation saw.
    async fn seen(&self, place: u32, recorded: EntryState) -> Known {
        let EntryState::Saw { rev, state } = recorded else { return self.unreadable(place).await };
        match state.map(|text| serde_json::from_str(&text)).transpose() {
            Ok(state) => Known { rev: rev.map(Rev), state },
            Err(_) => self.unreadable(place).await,
        }
    }
}

fn saw(known: &Known) -> EntryState {
    EntryState::Saw { rev: known.rev.map(|rev| rev.0), state: known.state.as_ref().map(Value::to_string) }
}

/// An execution that has the record of a change go with the change.
struct Passenger {
    run: Arc<Run>,
    /// The operation's place in the journal.
    place: u32,
    entry: Entry,
    boarded: Option<Boarded>,
}

impl Passenger {
    fn record(&mut self, state: EntryState) {
        self.run.put(self.place, Entry { state, ..self.entry.clone() });
    }

    fn answered(&mut self, changed: &Changed) {
        let recorded: Recorded = (changed.value.clone(), changed.rev.0, changed.changed);
        let text = serde_json::to_string(&recorded).expect("a value can be written as JSON");
        self.record(EntryState::Done(text));
    }
}

impl Rider for Passenger {
    fn board(&mut self, commit: Commit, changed: &Changed) -> Commit {
        // The last commit was more than the store takes at once, and nobody was told.
        if let Some(boarded) = self.boarded.take() {
            self.run.put_back(boarded);
        }
        self.answered(changed);
        let (commit, boarded) = self.run.board(commit, Next::Runs);
        self.boarded = Some(boarded);
        commit
    }

    fn landed(&mut self, receipt: &Receipt) {
        if let Some(boarded) = self.boarded.take() {
            self.run.landed(boarded, receipt);
        }
    }

    fn refused(&mut self, refusal: &Refusal) -> bool {
        let stop = self.boarded.take().and_then(|boarded| self.run.refused(boarded, refusal));
        let refused = stop.is_some();
        if let Some(stop) = stop {
            self.run.set_stop(stop);
        }
        refused
    }

    fn rests(&mut self, seen: Known, changed: Option<Changed>) {
        match changed {
            Some(changed) => self.answered(&changed),
            None => self.record(saw(&seen)),
        }
    }
}
