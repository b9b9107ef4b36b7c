//! An execution that has the record of what it does to a lock go into the same commit; and what becomes of locks that
//! its code has let go of without waiting for that.

use std::sync::Arc;

use crate::lock::lane::{Answer, Ask, Rider};
use crate::lock::{LockError, LockName, LockRefused, Owner};
use crate::store::{Commit, Receipt, Refusal, StoreError, Timestamp};
use crate::workflow::locks::refused;
use crate::workflow::place::{Path, Place};
use crate::workflow::record::{Entry, EntryState, WaitsFor, failure_text};
use crate::workflow::run::{Boarded, Doing, Next, Run, Stop, Verdict};

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

/// Something that was let go of without waiting for it.
pub(crate) enum Dropped {
    Guard(LockName, u64),
    Request(LockName, Vec<u8>),
}

impl Run {
    /// A request that nobody waits for any more is taken back, unless it is to be there when the execution goes on.
    pub(super) fn let_go(&self, lock: &LockName, id: Vec<u8>) {
        self.drop_lock(Dropped::Request(lock.clone(), id));
    }

    pub(super) fn release_soon(&self, lock: &LockName, ticket: u64) {
        self.drop_lock(Dropped::Guard(lock.clone(), ticket));
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
        for dropped in self.with(|state| std::mem::take(&mut state.dropped)) {
            let passenger =
                Passenger { doing: Doing::aside(self), run: self.clone(), entry: None, ticket: None, boarded: None };
            let (lock, ask) = match dropped {
                Dropped::Guard(lock, ticket) => (lock, Ask::Release { ticket }),
                Dropped::Request(lock, id) => (lock, Ask::Abandon { owner: Owner::Execution(self.id.clone()), id }),
            };
            tokio::spawn(async move { passenger.ask(&lock, ask).await.map(drop) });
        }
    }

    /// Takes back what branches have asked for that were given up. They may have been so just before a crash.
    pub(crate) async fn release_lost(self: &Arc<Run>, path: &Path, fork: u32, first: usize) {
        if self.engine.replays || !self.with(|state| state.has_locks) {
            return;
        }
        let owned = match self.engine.requests_of(&Owner::Execution(self.id.clone())).await {
            Ok(owned) => owned,
            Err(error) => return self.stop_for(self.failed(error)).await,
        };
        let winner = path.fork(fork, first as u32);
        for (lock, requests) in owned {
            for (_, id) in requests {
                let place = read_request_id(self, &id);
                let is_lost = place.is_some_and(|place| {
                    let steps = place.branch.steps();
                    let is_of_it = steps.starts_with(path.steps())
                        && steps.get(path.steps().len()).is_some_and(|(number, _)| *number == fork);
                    is_of_it && !place.branch.is_within(&winner)
                });
                if is_lost {
                    self.let_go(&lock, id);
                }
            }
        }
    }
}

/// An execution that has the record of what it does to a lock go with it.
pub(super) struct Passenger {
    run: Arc<Run>,
    doing: Doing,
    /// What is recorded, and until when it waits at the most. Nothing if that is not for the code to know.
    entry: Option<(Place, Entry, Option<Timestamp>)>,
    /// What is released.
    ticket: Option<u64>,
    boarded: Option<Boarded>,
}

impl Drop for Passenger {
    fn drop(&mut self) {
        self.doing.ends();
    }
}

impl Passenger {
    pub(super) fn new(
        run: &Arc<Run>,
        entry: Option<(Place, Entry, Option<Timestamp>)>,
        ticket: Option<u64>,
    ) -> Passenger {
        let doing = Doing::begin(run, WaitsFor::Store, true);
        Passenger { run: run.clone(), doing, entry, ticket, boarded: None }
    }

    /// Has something done to a lock, in a commit with the execution. What the lock refuses is given back.
    pub(super) async fn ask(self, lock: &LockName, ask: Ask) -> std::result::Result<Answer, LockRefused> {
        let run = self.run.clone();
        self.doing.carry().await;
        match run.engine.ask(lock, ask, Some(Box::new(self))).await {
            Ok(answer) => Ok(answer),
            Err(LockError::Refused(why)) => Err(why),
            Err(LockError::Store(error)) => run.stop_for(run.failed(error)).await,
            Err(LockError::Stopped) => run.stop_for(Stop::Fenced).await,
            Err(error) => run.park(error.to_string()).await,
        }
    }

    fn record(&mut self, state: EntryState) {
        if let Some((place, entry, _)) = &self.entry {
            self.run.put_for_carrier(place, Entry { state, ..entry.clone() });
        }
    }

    fn answered(&mut self, answer: &Answer) {
        let until_us = self.entry.as_ref().and_then(|(_, _, until)| until.map(|until| until.0));
        match answer {
            Answer::Granted(ticket) => self.record(EntryState::Done(ticket.to_string())),
            Answer::Queued(ticket) => self.record(EntryState::Queued { ticket: *ticket, until_us }),
            Answer::Busy => self.record(EntryState::Done("null".into())),
            Answer::Released(was_held) => {
                let ticket = self.ticket.unwrap_or_default();
                self.record(EntryState::Done(format!("[{ticket},{was_held}]")));
            }
            Answer::Withdrawn => {
                if let Some((place, entry, _)) = self.entry.clone() {
                    self.run.put_for_carrier(&place, entry);
                }
            }
            Answer::Gone => {}
        }
    }
}

impl Rider for Passenger {
    fn board(&mut self, commit: Commit, answer: &Answer) -> Commit {
        // The last commit was more than the store takes at once, and nobody was told.
        if let Some(boarded) = self.boarded.take() {
            self.run.put_back(boarded);
        }
        self.answered(answer);
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
        match self.boarded.take().map(|boarded| self.run.refused(boarded, refusal)) {
            Some(Verdict::Stop(stop)) => {
                self.run.set_stop(stop);
                true
            }
            _ => {
                // The next time it may come to something else.
                self.entry.iter().for_each(|(place, ..)| self.run.take_back(place));
                false
            }
        }
    }

    fn failed(&mut self, error: &StoreError) {
        if let Some(boarded) = self.boarded.take() {
            self.run.put_back(boarded);
        }
        self.run.engine.doubt();
        // The branch that it is of may have been given up meanwhile, and nobody there be told.
        self.run.set_stop(self.run.failed(error.clone()));
    }

    fn rests(&mut self, answer: &std::result::Result<Answer, LockError>) {
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
