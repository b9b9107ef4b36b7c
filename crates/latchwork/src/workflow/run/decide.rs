//! Decides what to do for an execution whose code waits: a pure function of what the machines say. The driver does it.

use std::time::Duration;

use crate::store::Timestamp;
use crate::workflow::run::inbox::Need;
use crate::workflow::run::{IDLE, NextState, RunState};
use crate::workflow::stored::record::StoredStatus;

/// What to do for an execution whose code waits.
#[derive(Debug, Clone)]
pub(crate) enum Todo {
    Nothing,
    Commit(NextState),
    /// Look again after this pause.
    Later(Duration),
    /// Read the messages again.
    Read,
    /// Let other tasks run, because they may wake the code.
    MakeSure,
}

/// What the machines say, and what the driver knows.
#[derive(Debug, Clone, Default)]
pub(super) struct Situation {
    /// How long the code has waited; and whether it is certain that the code has nothing to do.
    pub(super) idle: Duration,
    pub(super) is_sure: bool,
    pub(super) now: Timestamp,
    pub(super) is_stopping: bool,
    /// True if a commit is in flight, or submitted.
    pub(super) is_committing: bool,
    pub(super) continues: bool,
    pub(super) is_stored: bool,
    /// True if the record or an entry has to become durable.
    pub(super) is_wanted: bool,
    /// Whether entries wait for a commit; and whether one of them is a body that has begun.
    pub(super) is_pending: bool,
    pub(super) has_intent: bool,
    /// True if the stored record differs from what it has to be.
    pub(super) is_changed: bool,
    /// True if the stored status is waiting.
    pub(super) is_stored_waiting: bool,
    /// True if the execution was loaded after a crash and has not made progress.
    pub(super) is_suspect: bool,
    /// Whether all operations only wait; the earliest time that one waits for; and whether one waits for a message.
    pub(super) only_waits: bool,
    pub(super) until: Option<Timestamp>,
    pub(super) waits_for_message: bool,
}

/// What to do. The caller adds the next run's input and the waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RunAction {
    Nothing,
    /// The code continues as new.
    Continue,
    /// A commit of an execution that keeps running.
    Commit,
    /// A commit with which the execution leaves memory.
    Suspend,
    Later(Duration),
    MakeSure,
}

pub(super) fn decide(it: &Situation) -> RunAction {
    // One commit at a time.
    if it.is_stopping || it.is_committing {
        return RunAction::Nothing;
    }
    if it.continues {
        return RunAction::Continue;
    }
    if !it.only_waits {
        return while_busy(it);
    }
    if !it.is_sure {
        return RunAction::MakeSure;
    }
    let is_soon = it.until.is_some_and(|until| until <= it.now.plus(IDLE));
    let is_timer = it.until.is_some() && !it.waits_for_message;
    let is_settled = it.is_stored && !it.is_pending && !it.is_changed;
    // An execution that was woken for nothing waits again as before.
    let has_waited = it.is_stored && !it.is_pending && it.is_stored_waiting;
    // An execution that was loaded after a crash records at once that it waits: until then it is suspected of the
    // crash.
    let has_idled = it.idle >= IDLE || it.is_suspect;
    if !is_soon && (is_timer || has_waited || is_settled && has_idled) {
        return RunAction::Suspend;
    }
    match is_settled {
        false => RunAction::Commit,
        true if is_soon => RunAction::Nothing,
        true => RunAction::Later(IDLE.saturating_sub(it.idle)),
    }
}

/// Decides for an execution with an operation that does more than wait.
fn while_busy(it: &Situation) -> RunAction {
    match (it.is_wanted, it.is_stored) {
        (true, _) => RunAction::Commit,
        // A first step that takes long has to be visible from outside, though it needs no commit to run.
        (false, true) if it.has_intent && it.idle < IDLE => RunAction::Later(IDLE.saturating_sub(it.idle)),
        (false, true) if it.has_intent => RunAction::Commit,
        (false, true) => RunAction::Nothing,
        // The code waits for something that the engine does not know. The caller of the start does not have to wait for
        // it.
        (false, false) if it.is_sure => RunAction::Commit,
        (false, false) => RunAction::MakeSure,
    }
}

impl RunState {
    fn situation(&self, now: Timestamp, idle: Duration, is_sure: bool) -> Situation {
        Situation {
            idle,
            is_sure,
            now,
            is_stopping: self.residency.is_stopping(),
            is_committing: !self.journal.is_idle(),
            continues: self.residency.continues(),
            is_stored: self.known.is_stored(),
            is_wanted: self.known.is_wanted() || self.journal.is_wanted(),
            is_pending: !self.journal.is_empty(),
            has_intent: self.journal.has_intent(),
            is_changed: self.is_changed(),
            is_stored_waiting: self.known.stored().status == StoredStatus::Waiting,
            is_suspect: self.residency.loads() > 0,
            only_waits: self.ops.only_wait(),
            until: self.ops.until(),
            waits_for_message: self.ops.wait_for_message(),
        }
    }

    /// What to do while the code waits. `idle` is how long it has waited; `is_sure` says whether it is certain that the
    /// code has nothing to do.
    pub(super) fn todo(&mut self, now: Timestamp, monotonic: Duration, idle: Duration, is_sure: bool) -> Todo {
        if self.residency.is_stopping() || !self.journal.is_idle() {
            return Todo::Nothing;
        }
        let need = self.inbox.need(monotonic);
        if need == Need::Read {
            return Todo::Read;
        }
        let todo = match decide(&self.situation(now, idle, is_sure)) {
            RunAction::Nothing => Todo::Nothing,
            RunAction::Continue => match self.residency.take_continuation() {
                Some(input) => Todo::Commit(NextState::Continues(input)),
                None => Todo::Nothing,
            },
            RunAction::Commit => Todo::Commit(NextState::Runs),
            RunAction::Suspend => {
                let until = self.ops.until().into_iter().chain(self.known.deadline()).min();
                Todo::Commit(NextState::Waits(until, self.ops.doing()))
            }
            RunAction::Later(pause) => Todo::Later(pause),
            RunAction::MakeSure => Todo::MakeSure,
        };
        match (todo, need) {
            (Todo::Nothing, Need::Patience(left)) => Todo::Later(left),
            (Todo::Later(pause), Need::Patience(left)) => Todo::Later(pause.min(left)),
            (todo, _) => todo,
        }
    }
}

#[cfg(test)]
#[path = "decide_tests.rs"]
mod tests;
