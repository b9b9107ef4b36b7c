//! Commits: what they hold of an execution, and what becomes of it.

use std::collections::VecDeque;

use crate::store::{Check, Commit, Key, Receipt, Refusal, Rev, Timestamp};
use crate::workflow::record::{
    Entry, EntryState, Execution, Intent, Keyed, Removal, Status, TAIL, alarm_key, journal_key, keyed_key,
};
use crate::workflow::run::{Next, Run, State, Stop, hash_text};

/// What a commit holds of an execution.
pub(crate) struct Boarded {
    entries: Vec<(u32, Entry)>,
    /// The record from then on, and the place of its write.
    after: Option<(Execution, usize)>,
    /// The places of its checks.
    checks: std::ops::Range<usize>,
    is_first: bool,
    /// Whether the execution has come to something with it.
    progress: bool,
    /// When something of it is to be removed.
    removal: Option<Timestamp>,
}

impl Run {
    /// Adds to a commit that the execution is this engine's and as it was, everything pending, and, if that changes,
    /// its record.
    pub(crate) fn board(&self, mut commit: Commit, next: Next) -> (Commit, Boarded) {
        let spaces = &self.engine.spaces;
        let mut state = self.state.lock();
        let first_check = commit.checks().len();
        commit = commit.check(self.engine.shard_check(&self.id));
        let is_over = state.stop.is_some() && !matches!(next, Next::Rests(_));
        commit = match state.rev {
            // It was to stop; whatever was on its way to be done is not.
            _ if is_over => commit.check(Check::AtRev(self.key.clone(), Rev(u64::MAX))),
            Some(rev) => commit.check(Check::AtRev(self.key.clone(), rev)),
            None => commit.check(Check::Absent(self.key.clone())),
        };
        let is_first = state.rev.is_none();
        let mut entries = std::mem::take(&mut state.pending);
        let (mut status, mut timer_us, mut input) = (Status::Running, None, None);
        match next {
            Next::Runs => {}
            Next::Waits(timer) => (status, timer_us) = (Status::Waiting, Some(timer.0)),
            Next::Rests(rests) => status = rests,
            Next::Continues(continued) => {
                input = Some(continued);
                entries.clear();
            }
        }
        let in_record =
            status.is_terminal() && entries.len() <= TAIL && entries.iter().all(|(_, entry)| entry.is_small());
        if !in_record {
            commit = self.journaled(commit, state.execution.run, &entries, is_first);
        }
        let progress = is_progress(&entries) || input.is_some() || status != Status::Running;
        let count = if progress { Vec::new() } else { state.taken_up.to_be_bytes().to_vec() };
        let (mut after, mut removal) = (None, None);
        let before = &state.execution;
        if is_first || status != before.status || timer_us != before.timer_us || input.is_some() {
            let mut execution = Execution { status, timer_us, ..before.clone() };
            if in_record {
                execution.tail = entries.clone();
            }
            if is_first {
                let first = entries.first().filter(|(place, entry)| *place == 0 && entry.is_intent());
                execution.intent = first.map(|(_, first)| Intent::of(first));
            }
            if let Some(input) = input {
                (execution.input, execution.run, execution.intent) = (input, execution.run + 1, None);
            }
            (commit, removal) = self.turns(commit, &state, &execution, count);
            let write = commit.writes().len();
            commit = commit.put(&self.key, execution.encode());
            after = Some((execution, write));
        } else if state.taken_up > 0 && progress {
            // It was counted where it was found.
            let counted = match timer_us {
                Some(timer) => spaces.timers.key(alarm_key(Timestamp(timer), &self.id)),
                None => spaces.active.key(self.id.as_bytes()),
            };
            commit = commit.put(&counted, count);
        }
        let checks = first_check..commit.checks().len();
        (commit, Boarded { entries, after, checks, is_first, progress, removal })
    }

    /// Adds the records of operations. A step that is begun for the first time is told of by the record before it.
    fn journaled(&self, mut commit: Commit, run: u32, entries: &[(u32, Entry)], is_first: bool) -> Commit {
        let mut key = journal_key(&self.id, run, 0);
        let prefix = key.len() - size_of::<u32>();
        let is_next = |place: u32, next: &(u32, Entry)| next.1.is_intent() && place + 1 == next.0;
        for (index, (place, entry)) in entries.iter().enumerate() {
            let before = index.checked_sub(1).map(|before| entries[before].0);
            let is_told = match before {
                Some(before) => is_next(before, &entries[index]),
                // The execution's own record tells of the very first.
                None => is_first && *place == 0 && entry.is_intent(),
            };
            if !is_told {
                let next = entries.get(index + 1).filter(|next| is_next(*place, next));
                key.truncate(prefix);
                key.extend_from_slice(&place.to_be_bytes());
                let record = entry.encode_with(next.map(|(_, next)| next));
                commit = commit.put(&self.engine.spaces.journal.key(&key), record);
            }
        }
        commit
    }

    /// What goes with a change of the execution's record.
    fn turns(
        &self,
        mut commit: Commit,
        state: &State,
        after: &Execution,
        count: Vec<u8>,
    ) -> (Commit, Option<Timestamp>) {
        let spaces = &self.engine.spaces;
        let (id, before) = (self.id.as_bytes(), &state.execution);
        let is_first = state.rev.is_none();
        let was_active = !is_first && before.status == Status::Running;
        let is_active = after.status == Status::Running;
        let active: Key = spaces.active.key(id);
        commit = match (was_active, is_active) {
            (false, true) => commit.put(&active, count),
            (true, true) if state.taken_up > 0 => commit.put(&active, count),
            (true, false) => commit.delete(&active),
            _ => commit,
        };
        if let Some(old) = before.timer_us {
            commit = commit.delete(&spaces.timers.key(alarm_key(Timestamp(old), &self.id)));
        }
        if let Some(timer) = after.timer_us {
            commit = commit.put(&spaces.timers.key(alarm_key(Timestamp(timer), &self.id)), Vec::new());
        }
        if let (true, Some(key)) = (is_first, &after.key) {
            let place = spaces.keys.key(keyed_key(&after.workflow, key));
            let keyed = Keyed { id: self.id.to_string(), input: hash_text(&after.input) };
            commit = commit.absent(&place).put(&place, keyed.encode());
        }
        let now = self.env().now();
        if let Status::Parked(reason) = &after.status {
            commit = commit.put(&spaces.parked.key(id), reason.clone());
        }
        let removal = match after.status.is_terminal() {
            true => Some((now.plus(self.definition.keep), Removal::Execution)),
            false => (after.run != before.run).then_some((now, Removal::Before(after.run))),
        };
        let Some((due, removal)) = removal else { return (commit, None) };
        (commit.put(&spaces.removals.key(alarm_key(due, &self.id)), removal.encode()), Some(due))
    }

    /// A commit with the execution in it has landed.
    pub(crate) fn landed(&self, boarded: Boarded, receipt: &Receipt) {
        let mut state = self.state.lock();
        if boarded.progress {
            (state.taken_up, state.probation) = (0, None);
        }
        if let Some((execution, write)) = boarded.after {
            if execution.run != state.execution.run {
                state.next = 0;
                (state.read, state.more, state.intent) = (VecDeque::new(), false, None);
            }
            state.execution = execution;
            state.rev = receipt.revs.get(write).copied().flatten();
        }
        if let Some(due) = boarded.removal {
            self.engine.removals.set(due);
        }
        if boarded.is_first {
            self.stored.notify_waiters();
        }
        if let Some(started) = state.started.take() {
            let _ = started.send(Ok(()));
            self.engine.begun().notify_waiters();
        }
    }

    /// A commit with the execution in it was refused. If that was for a reason of the execution's own, it has to stop.
    pub(crate) fn refused(&self, boarded: Boarded, refusal: &Refusal) -> Option<Stop> {
        let own = refusal.failed.iter().find(|failed| boarded.checks.contains(&failed.index));
        // The first of its checks is that of the owner.
        let stop = own.map(|failed| match (failed.index == boarded.checks.start, boarded.is_first) {
            (true, _) => Stop::Fenced,
            (false, true) => Stop::Taken,
            (false, false) => Stop::Changed,
        });
        self.put_back(boarded);
        stop
    }

    /// What was not committed is still to be.
    pub(crate) fn put_back(&self, boarded: Boarded) {
        let newer = std::mem::replace(&mut self.state.lock().pending, boarded.entries);
        newer.into_iter().for_each(|(place, entry)| self.put(place, entry));
    }
}

/// Whether these entries tell of anything but of bodies that are begun once more.
fn is_progress(entries: &[(u32, Entry)]) -> bool {
    entries.iter().any(|(_, entry)| entry.state != EntryState::Begun || entry.attempts <= 1)
}
