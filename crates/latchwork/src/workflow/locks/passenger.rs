//! An execution that has the record of what it does to a lock go into the same commit; and what becomes of locks that
//! its code has let go of without waiting for that.

use std::sync::Arc;

use crate::lock::lane::{Answer, Ask, Rider};
use crate::lock::{LockError, LockName, LockRefused, Owner};
use crate::store::{Commit, Receipt, Refusal, StoreError, Timestamp};
use crate::workflow::ExecutionId;
use crate::workflow::locks::{Unlocked, refused};
use crate::workflow::place::Place;
use crate::workflow::record::{Entry, EntryState, WaitsFor, failure_text};
use crate::workflow::run::{Address, Doing, Effect, Listed, Run, Seat};

/// The execution's own name for a request: the run and the place of the operation.
pub(super) fn request_id(run: &Run, place: &Place) -> Vec<u8> {
    let mut id = run.number().1.to_be_bytes().to_vec();
    place.branch.write(&mut id);
    id.extend_from_slice(&place.number.to_be_bytes());
    id
}

/// The place that a request's name tells, if it is of this run.
fn read_request_id(run: &Run, id: &[u8]) -> Option<Place> {
    let (number, place) = id.split_first_chunk::<4>()?;
    (u32::from_be_bytes(*number) == run.number().1).then(|| Place::read(place)).flatten()
}

/// Something that was let go of without waiting for it: what is to be asked of the lock.
pub(crate) type Dropped = (LockName, Ask);

impl Run {
    /// A request that nobody waits for any more is taken back, unless it is to be there when the execution goes on.
    pub(super) fn let_go(&self, lock: &LockName, id: Vec<u8>) {
        let owner = Owner::Execution(self.id.clone());
        self.drop_lock((lock.clone(), Ask::Abandon { owner, id, ear: None }));
    }

    pub(super) fn release_soon(&self, lock: &LockName, ticket: u64, place: &Place) {
        self.drop_lock((lock.clone(), Ask::Release { ticket, id: Some(request_id(self, place)) }));
    }

    fn drop_lock(&self, dropped: Dropped) {
        let is_noted = self.with(|state| {
            // What it holds it holds on, wherever it goes on.
            let is_noted = !state.is_over() && !state.has_left();
            if is_noted {
                state.dropped.push(dropped);
            }
            is_noted
        });
        if is_noted {
            self.nudge();
        }
    }

    /// Releases what was dropped, with everything that came before.
    pub(crate) fn release_dropped(self: &Arc<Run>) {
        for (lock, ask) in self.with(|state| std::mem::take(&mut state.dropped)) {
            let seat = Seat::new(Doing::aside(self));
            let passenger = Passenger { seat, entry: None, unlocks: None, receives: None };
            self.with(|state| state.leaving.push(lock.clone()));
            let run = self.clone();
            self.engine.node.runtime.spawn(async move {
                if let Err(error) = passenger.send(&lock, ask).await {
                    run.set_stop(run.stops(error.into()));
                }
                run.with(|state| {
                    if let Some(place) = state.leaving.iter().position(|leaving| *leaving == lock) {
                        state.leaving.swap_remove(place);
                    }
                    state.wake(|_, waits| !waits);
                });
            });
        }
    }

    /// Waits until what its code has dropped of a lock is released.
    pub(super) async fn until_left(self: &Arc<Run>, lock: &LockName) {
        if self.with(|state| state.dropped.iter().any(|(other, _)| other == lock)) {
            self.release_dropped();
        }
        if self.with(|state| state.leaving.contains(lock)) {
            let doing = Listed::begin(self, WaitsFor::Store);
            doing.until(|state| (!state.leaving.contains(lock)).then_some(())).await;
        }
    }

    /// Takes back what branches have asked for that were given up. They may have been so just before a crash.
    pub(crate) async fn release_lost(self: &Arc<Run>, fork: &Place, first: usize) {
        if self.engine.rehearsal.is_replay() || !self.with(|state| state.has_locks) {
            return;
        }
        let owned = self.or_stop(self.engine.locks.requests_of(&Owner::Execution(self.id.clone())).await).await;
        for (lock, requests) in owned {
            for (_, id) in requests {
                let place = read_request_id(self, &id);
                let beside = place.and_then(|place| fork.beside(&place.branch));
                let is_lost = beside.is_some_and(|beside| beside != first);
                if is_lost {
                    self.let_go(&lock, id);
                }
            }
        }
    }
}

/// An execution that has the record of what it does to a lock go with it.
pub(super) struct Passenger {
    seat: Seat,
    /// What is recorded, and until when it waits at the most. Nothing if that is not for the code to know.
    entry: Option<(Place, Entry, Option<Timestamp>)>,
    /// What is released, and where it was acquired.
    unlocks: Option<(u64, String)>,
    /// The message that is received with it.
    receives: Option<Address>,
}

impl Passenger {
    pub(super) fn new(
        run: &Arc<Run>,
        entry: Option<(Place, Entry, Option<Timestamp>)>,
        unlocks: Option<(u64, String)>,
    ) -> Passenger {
        let seat = Seat::new(Doing::begin(run, WaitsFor::Store, None));
        Passenger { seat, entry, unlocks, receives: None }
    }

    /// The same, with the receipt of a message.
    pub(super) fn receiving(mut self, address: Address) -> Passenger {
        self.receives = Some(address);
        self
    }

    async fn send(self, lock: &LockName, ask: Ask) -> Result<Answer, LockError> {
        let engine = self.seat.run.engine.clone();
        self.seat.doing.carry().await;
        engine.locks.ask(lock, ask, Some(Box::new(self))).await
    }

    /// Has something done to a lock, in a commit with the execution. What the lock refuses is given back.
    pub(super) async fn ask(self, lock: &LockName, ask: Ask) -> Result<Answer, LockRefused> {
        let run = self.seat.run.clone();
        match self.send(lock, ask).await {
            Ok(answer) => Ok(answer),
            Err(LockError::Refused(why)) => Err(why),
            Err(error) => run.stop_for(run.stops(error.into())).await,
        }
    }

    fn record(&mut self, state: EntryState) {
        if let Some((place, entry, _)) = &self.entry {
            let receipt = self.receives.clone().map(Effect::receipt);
            self.seat.run.put_for_carrier(place, Entry { state, ..entry.clone() }, receipt);
        }
    }

    fn record_as_it_is(&mut self) {
        if let Some((_, entry, _)) = &self.entry {
            self.record(entry.state.clone());
        }
    }

    fn answered(&mut self, answer: &Answer) {
        let until_us = self.entry.as_ref().and_then(|(_, _, until)| until.map(|until| until.0));
        match answer {
            Answer::Granted(ticket) => self.record(EntryState::Done(ticket.to_string())),
            Answer::Queued(ticket) => self.record(EntryState::Queued { ticket: *ticket, until_us }),
            Answer::Busy => self.record(EntryState::Done("null".into())),
            Answer::Released(was_held) => match self.unlocks.clone() {
                Some((ticket, acquired)) => {
                    let unlocked: Unlocked = (ticket, *was_held, acquired);
                    self.record(EntryState::Done(serde_json::to_string(&unlocked).unwrap_or_default()));
                }
                None => self.record_as_it_is(),
            },
            Answer::Withdrawn => self.record_as_it_is(),
            Answer::Gone => {}
        }
    }
}

impl Rider for Passenger {
    fn execution(&self) -> &ExecutionId {
        &self.seat.run.id
    }

    fn board(&mut self, commit: Commit, answer: &Answer) -> Commit {
        self.seat.rise();
        self.answered(answer);
        self.seat.board(commit)
    }

    fn landed(&mut self, receipt: &Receipt) {
        self.seat.landed(receipt);
    }

    fn refused(&mut self, refusal: &Refusal) -> bool {
        let is_own = self.seat.refused(refusal);
        if !is_own {
            // The next time it may come to something else.
            self.entry.iter().for_each(|(place, ..)| self.seat.run.take_back(place));
        }
        is_own
    }

    fn failed(&mut self, error: &StoreError) {
        self.seat.failed(error);
    }

    fn rests(&mut self, answer: &Result<Answer, LockError>) {
        self.seat.rise();
        match answer {
            // Of a withdrawal that came too late, there is a message.
            Ok(Answer::Granted(_)) if self.entry.as_ref().is_some_and(|(_, entry, _)| is_given(entry)) => {}
            Ok(answer) => self.answered(answer),
            Err(LockError::Refused(why)) => {
                self.record(EntryState::Gave(failure_text(&refused(why.clone().into()))));
            }
            Err(_) => {}
        }
    }
}

fn is_given(entry: &Entry) -> bool {
    matches!(entry.state, EntryState::Gave(_))
}
