//! An execution as the rider of a job in the lane of a slot or a lock.

use std::sync::Arc;

use crate::lane::Rider;
use crate::store::{Commit, Receipt, Refusal, StoreError};
use crate::workflow::run::{Boarded, Doing, NextState, RefusalVerdict, Run};

/// What an execution records of a job that it rides with.
pub(crate) trait Note<A, R>: Send {
    /// Records the job's answer, in the same commit.
    fn answered(&mut self, run: &Run, answer: &A);

    /// Nothing is written for the job.
    fn rests(&mut self, run: &Run, rest: R);

    /// The job is tried again, and may have another answer.
    fn again(&mut self, _run: &Run) {}
}

impl<A, R, N: Note<A, R>> Note<A, R> for Option<N> {
    fn answered(&mut self, run: &Run, answer: &A) {
        self.iter_mut().for_each(|note| note.answered(run, answer));
    }

    fn rests(&mut self, run: &Run, rest: R) {
        if let Some(note) = self {
            note.rests(run, rest);
        }
    }

    fn again(&mut self, run: &Run) {
        self.iter_mut().for_each(|note| note.again(run));
    }
}

/// Keeps all other commits of the execution waiting until it is dropped, if its operation is the carrier.
pub(crate) struct Seat<N> {
    pub(crate) doing: Doing,
    pub(crate) note: N,
    boarded: Option<Boarded>,
}

impl<N> Drop for Seat<N> {
    fn drop(&mut self) {
        self.doing.ends();
    }
}

impl<N> Seat<N> {
    pub(crate) fn new(doing: Doing, note: N) -> Seat<N> {
        Seat { doing, note, boarded: None }
    }

    pub(crate) fn run(&self) -> &Arc<Run> {
        &self.doing.run
    }

    /// Puts back what the last commit held. It was too large for the store, and the lane did not notify the rider.
    fn rise(&mut self) {
        if let Some(boarded) = self.boarded.take() {
            self.doing.run.put_back(boarded);
        }
    }
}

impl<A, R, N: Note<A, R>> Rider<A, R> for Seat<N> {
    /// Adds everything that is pending in the execution.
    fn board(&mut self, commit: Commit, answer: &A) -> Commit {
        self.rise();
        self.note.answered(&self.doing.run, answer);
        let (commit, boarded) = self.doing.run.board(commit, NextState::Runs);
        self.boarded = Some(boarded);
        commit
    }

    fn landed(&mut self, receipt: &Receipt) {
        if let Some(boarded) = self.boarded.take() {
            self.doing.run.landed(boarded, receipt);
        }
    }

    fn refused(&mut self, refusal: &Refusal) -> bool {
        let run = &self.doing.run;
        if let Some(RefusalVerdict::Stop(stop)) = self.boarded.take().map(|boarded| run.refused(boarded, refusal)) {
            run.set_stop(stop);
            return true;
        }
        self.note.again(run);
        false
    }

    fn failed(&mut self, error: &StoreError) {
        if let Some(boarded) = self.boarded.take() {
            let run = &self.doing.run;
            run.put_back(boarded);
            run.engine.node.doubt();
            // The branch of this operation may have been dropped, so the operation cannot report the error itself.
            run.set_stop(run.failed(error.clone()));
        }
    }

    fn rests(&mut self, rest: R) {
        self.rise();
        self.note.rests(&self.doing.run, rest);
    }
}
