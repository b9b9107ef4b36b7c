//! An execution that goes along in a commit of somebody else's.

use std::sync::Arc;

use crate::store::{Commit, Receipt, Refusal, StoreError};
use crate::workflow::run::{Boarded, Doing, Next, Run, Verdict};

/// Keeps all other commits of the execution waiting until it is dropped, once it is its carrier.
pub(crate) struct Seat {
    pub(crate) run: Arc<Run>,
    pub(crate) doing: Doing,
    boarded: Option<Boarded>,
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.doing.ends();
    }
}

impl Seat {
    pub(crate) fn new(doing: Doing) -> Seat {
        Seat { run: doing.run.clone(), doing, boarded: None }
    }

    /// The last commit was more than the store takes at once, and nobody was told.
    pub(crate) fn rise(&mut self) {
        if let Some(boarded) = self.boarded.take() {
            self.run.put_back(boarded);
        }
    }

    /// Adds everything that the execution has to say to a commit.
    pub(crate) fn board(&mut self, commit: Commit) -> Commit {
        let (commit, boarded) = self.run.board(commit, Next::Runs);
        self.boarded = Some(boarded);
        commit
    }

    pub(crate) fn landed(&mut self, receipt: &Receipt) {
        if let Some(boarded) = self.boarded.take() {
            self.run.landed(boarded, receipt);
        }
    }

    /// Whether the commit was refused for a reason of the execution's own, which then stops.
    pub(crate) fn refused(&mut self, refusal: &Refusal) -> bool {
        match self.boarded.take().map(|boarded| self.run.refused(boarded, refusal)) {
            Some(Verdict::Stop(stop)) => {
                self.run.set_stop(stop);
                true
            }
            _ => false,
        }
    }

    pub(crate) fn failed(&mut self, error: &StoreError) {
        if let Some(boarded) = self.boarded.take() {
            self.run.put_back(boarded);
            self.run.engine.node.doubt();
            // The branch that it is of may have been given up meanwhile, and nobody there be told.
            self.run.set_stop(self.run.failed(error.clone()));
        }
    }
}
