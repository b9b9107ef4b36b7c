//! An execution's record of an operation on a lock, which lands in the same commit as the operation. Also the release
//! of locks that the code has dropped without waiting.

use std::sync::Arc;

use crate::lock::lane::{Ask, LockAnswer};
use crate::lock::{LockError, LockName, LockRefused, Owner};
use crate::store::Timestamp;
use crate::workflow::ctx::locks::{Unlocked, refused};
use crate::workflow::journal::place::{BranchPath, Place};
use crate::workflow::run::{Address, Doing, Note, OpEffect, OpInProgress, Run, Seat};
use crate::workflow::stored::record::{Entry, EntryState, WaitsFor, failure_text};

/// The execution's id of a request: the run and the place of the operation.
pub(super) fn request_id(run: &Run, place: &Place) -> Vec<u8> {
    let mut id = run.number().1.to_be_bytes().to_vec();
    place.branch.write(&mut id);
    id.extend_from_slice(&place.number.to_be_bytes());
    id
}

/// Reads the place from a request's id, if it is of this run.
fn read_request_id(run: &Run, id: &[u8]) -> Option<Place> {
    let (number, place) = id.split_first_chunk::<4>()?;
    (u32::from_be_bytes(*number) == run.number().1).then(|| Place::read(place)).flatten()
}

/// A lock that the code has dropped without waiting: the operation that releases it.
pub(crate) type Dropped = (LockName, Ask);

impl Run {
    /// Abandons a request that no branch waits for any more, unless the execution is about to leave memory.
    pub(super) fn let_go(&self, lock: &LockName, id: Vec<u8>) {
        let owner = Owner::Execution(self.id.clone());
        self.drop_lock((lock.clone(), Ask::Abandon { owner, id, ear: None }));
    }

    pub(super) fn release_soon(&self, lock: &LockName, ticket: u64, place: &Place) {
        self.drop_lock((lock.clone(), Ask::Release { ticket, id: Some(request_id(self, place)) }));
    }

    fn drop_lock(&self, dropped: Dropped) {
        let is_noted = self.with(|state| {
            // An execution that leaves memory keeps its locks and requests.
            let is_noted = !state.residency.is_stopping() && !state.residency.has_left();
            if is_noted {
                state.guards.let_go(dropped);
            }
            is_noted
        });
        if is_noted {
            self.nudge();
        }
    }

    /// Releases what was dropped, with everything that was recorded before.
    pub(crate) fn release_dropped(self: &Arc<Run>) {
        for (lock, ask) in self.with(|state| state.guards.take_dropped()) {
            let note = LockRecording { entry: None, unlocks: None, receives: None };
            let passenger = Passenger(Seat::new(Doing::aside(self), note));
            let run = self.clone();
            self.engine.node.runtime.spawn(async move {
                if let Err(error) = passenger.send(&lock, ask).await {
                    run.set_stop(run.stops(error.into()));
                }
                run.with(|state| {
                    state.guards.released(&lock);
                    state.ops.wake_busy();
                });
            });
        }
    }

    /// Waits until everything that the code has dropped of a lock is released.
    pub(super) async fn until_left(self: &Arc<Run>, lock: &LockName) {
        if self.with(|state| state.guards.has_dropped(lock)) {
            self.release_dropped();
        }
        if self.with(|state| state.guards.is_leaving(lock)) {
            let doing = OpInProgress::begin(self, WaitsFor::Store);
            doing.until(|state| (!state.guards.is_leaving(lock)).then_some(())).await;
        }
    }

    /// Abandons the requests of branches that were given up. They may have been given up just before a crash.
    pub(crate) async fn release_lost(self: &Arc<Run>, fork: &Place, first: usize) {
        self.release_where(|branch| fork.beside(branch).is_some_and(|beside| beside != first)).await;
    }

    /// Abandons the requests and closes the reviews of these branches.
    pub(crate) async fn release_where(self: &Arc<Run>, is_lost: impl Fn(&BranchPath) -> bool + Send + Sync) {
        self.close_lost_reviews(&is_lost).await;
        if self.engine.rehearsal.is_replay() || !self.with(|state| state.known.has_locks()) {
            return;
        }
        let owned = self.or_stop(self.engine.locks.requests_of(&Owner::Execution(self.id.clone())).await).await;
        for (lock, requests) in owned {
            for (_, id) in requests {
                if read_request_id(self, &id).is_some_and(|place| is_lost(&place.branch)) {
                    self.let_go(&lock, id);
                }
            }
        }
    }
}

/// What an execution records of an operation on a lock, in the same commit.
pub(super) struct LockRecording {
    /// The entry, and until when the operation waits. `None` if nothing is recorded in the journal.
    entry: Option<(Place, Entry, Option<Timestamp>)>,
    /// The ticket that is released, and the place where it was acquired.
    unlocks: Option<(u64, String)>,
    /// The message that is received in the same commit.
    receives: Option<Address>,
}

/// The rider that puts the record of an operation on a lock into the operation's commit.
pub(super) struct Passenger(Seat<LockRecording>);

impl Passenger {
    pub(super) fn new(
        run: &Arc<Run>,
        entry: Option<(Place, Entry, Option<Timestamp>)>,
        unlocks: Option<(u64, String)>,
    ) -> Passenger {
        let doing = Doing::begin(run, WaitsFor::Store, None);
        Passenger(Seat::new(doing, LockRecording { entry, unlocks, receives: None }))
    }

    /// The same, with the receipt of a message.
    pub(super) fn receiving(mut self, address: Address) -> Passenger {
        self.0.note.receives = Some(address);
        self
    }

    async fn send(self, lock: &LockName, ask: Ask) -> Result<LockAnswer, LockError> {
        let run = self.0.run().clone();
        self.0.doing.carry().await;
        run.engine.locks.ask(lock, ask, Some((run.id.clone(), Box::new(self.0)))).await
    }

    /// Does an operation on a lock, in one commit with its record. Returns the refusal of the lock.
    pub(super) async fn ask(self, lock: &LockName, ask: Ask) -> Result<LockAnswer, LockRefused> {
        let run = self.0.run().clone();
        match self.send(lock, ask).await {
            Ok(answer) => Ok(answer),
            Err(LockError::Refused(why)) => Err(why),
            Err(error) => run.stop_for(run.stops(error.into())).await,
        }
    }
}

impl LockRecording {
    fn record(&self, run: &Run, state: EntryState) {
        if let Some((place, entry, _)) = &self.entry {
            let receipt = self.receives.clone().map(OpEffect::receipt);
            run.put_for_carrier(place, Entry { state, ..entry.clone() }, receipt);
        }
    }

    fn record_as_it_is(&self, run: &Run) {
        if let Some((_, entry, _)) = &self.entry {
            self.record(run, entry.state.clone());
        }
    }
}

impl Note<LockAnswer, Result<LockAnswer, LockError>> for LockRecording {
    fn answered(&mut self, run: &Run, answer: &LockAnswer) {
        let until_us = self.entry.as_ref().and_then(|(_, _, until)| until.map(|until| until.0));
        match answer {
            LockAnswer::Granted(ticket) => self.record(run, EntryState::Done(ticket.to_string())),
            LockAnswer::Queued(ticket) => self.record(run, EntryState::Queued { ticket: *ticket, until_us }),
            LockAnswer::Busy => self.record(run, EntryState::Done("null".into())),
            LockAnswer::Released(was_held) => match self.unlocks.clone() {
                Some((ticket, acquired)) => {
                    let unlocked: Unlocked = (ticket, *was_held, acquired);
                    self.record(run, EntryState::Done(serde_json::to_string(&unlocked).unwrap_or_default()));
                }
                None => self.record_as_it_is(run),
            },
            LockAnswer::Withdrawn => self.record_as_it_is(run),
            LockAnswer::Gone => {}
        }
    }

    fn again(&mut self, run: &Run) {
        self.entry.iter().for_each(|(place, ..)| run.take_back(place));
    }

    fn rests(&mut self, run: &Run, answer: Result<LockAnswer, LockError>) {
        match answer {
            // A withdrawal came too late: a message about the grant exists and is received next.
            Ok(LockAnswer::Granted(_)) if self.entry.as_ref().is_some_and(|(_, entry, _)| is_given(entry)) => {}
            Ok(answer) => self.answered(run, &answer),
            Err(LockError::Refused(why)) => self.record(run, EntryState::Gave(failure_text(&refused(why.into())))),
            Err(_) => {}
        }
    }
}

fn is_given(entry: &Entry) -> bool {
    matches!(entry.state, EntryState::Gave(_))
}
