//! Commits: what they hold of an execution, and what becomes of it.

use std::ops::Range;
use std::sync::Arc;

use crate::record::Record;
use crate::store::{Check, Commit, Generation, Key, Receipt, Refusal, Rev, Timestamp, Write};
use crate::workflow::ExecutionId;
use crate::workflow::definition::DEFAULT_KEEP;
use crate::workflow::engine::Inner;
use crate::workflow::listed::{list, status_key};
use crate::workflow::place::Path;
use crate::workflow::record::{
    Entry, EntryState, Execution, Intent, Keyed, Removal, Status, TAIL, alarm_key, branch_key, keyed_key,
};
use crate::workflow::run::inbox::Address;
use crate::workflow::run::{Next, Pending, Run, State, Stop, hash_text};

/// What is done in the commit that records an operation.
#[derive(Default)]
pub(crate) struct Effect {
    /// The operation, which is told if a check has failed.
    pub(crate) op: u64,
    pub(crate) checks: Vec<Check>,
    pub(crate) writes: Vec<Write>,
    /// The message that is received with it.
    pub(crate) receives: Option<Address>,
    /// Told when it is done, with the revs of the writes.
    pub(crate) landed: Option<Landed>,
}

type Landed = Box<dyn FnOnce(&Arc<Inner>, Generation, &[Option<Rev>]) + Send>;

impl Effect {
    /// The receipt of a message.
    pub(crate) fn receipt(address: Address) -> Effect {
        Effect { writes: vec![Write::Delete(address.1.clone())], receives: Some(address), ..Effect::default() }
    }

    /// How many bytes it adds to a commit, about.
    pub(crate) fn bytes(&self) -> usize {
        let value = |write: &Write| if let Write::Put(_, value) = write { value.len() } else { 0 };
        self.writes.iter().map(|write| value(write) + 64).sum()
    }
}

/// What a commit holds of an execution.
pub(crate) struct Boarded {
    number: u64,
    pending: Vec<Pending>,
    /// The checks and writes of effects, by the place in `pending`.
    effects: Vec<(usize, Range<usize>, Range<usize>)>,
    /// The record from then on, and the place of its write.
    after: Option<(Execution, usize)>,
    /// The places of its own checks, and of that on its messages.
    checks: Range<usize>,
    /// That nobody was started under its key.
    keyed: Range<usize>,
    inbox: Option<usize>,
    /// Whether it tells what was published.
    publishes: bool,
    is_first: bool,
    /// Whether the record was to be written.
    wants_record: bool,
    /// Whether the execution has come to something with it.
    progress: bool,
    /// When something of it is to be removed.
    removal: Option<Timestamp>,
}

/// What a refusal means.
pub(crate) enum Verdict {
    Stop(Stop),
    /// It is nothing that the execution would have to stop for.
    Again,
}

impl Run {
    /// Adds to a commit that the execution is this engine's and as it was, everything pending, and, if that changes,
    /// its record.
    pub(crate) fn board(&self, mut commit: Commit, next: Next) -> (Commit, Boarded) {
        let mut state = self.state.lock();
        let first_check = commit.checks().len();
        commit = commit.check(self.engine.shard_check(&self.id));
        let is_gone = state.stop.is_some() || state.has_left || state.execution.status.is_terminal();
        let is_over = is_gone && !matches!(next, Next::Rests(_));
        commit = match state.rev {
            // It was to stop; whatever was on its way to be done is not.
            _ if is_over => commit.check(Check::AtRev(self.key.clone(), Rev(u64::MAX))),
            Some(rev) => commit.check(Check::AtRev(self.key.clone(), rev)),
            None => commit.check(Check::Absent(self.key.clone())),
        };
        let checks = first_check..commit.checks().len();
        let is_first = state.rev.is_none();
        state.boardings += 1;
        let mut boarded = Boarded {
            number: state.boardings,
            pending: state.take_pending(&commit),
            effects: Vec::new(),
            after: None,
            checks,
            keyed: 0..0,
            inbox: None,
            publishes: false,
            is_first,
            // Whoever wants that from now on wants another commit.
            wants_record: std::mem::take(&mut state.wants_record),
            progress: false,
            removal: None,
        };
        // Most often the record stays as it is, and is not copied.
        if !is_first && matches!(next, Next::Runs) && !state.is_to_be_written() {
            commit = self.journaled(commit, &state, None, &boarded);
            boarded.progress = boarded.pending.iter().any(|pending| is_progress(&pending.entry));
            commit = self.rest(commit, &mut state, &mut boarded);
            return (self.counted(commit, &state, &boarded), boarded);
        }
        let mut after = Execution {
            status: Status::Running,
            timer_us: None,
            waits: Vec::new(),
            labels: state.labels.clone(),
            cancel: state.cancel.clone(),
            has_children: state.has_children,
            has_locks: state.has_locks,
            ..state.execution.clone()
        };
        let mut continues = false;
        match next {
            Next::Runs => {}
            Next::Waits(timer, waits) => {
                (after.status, after.timer_us, after.waits) = (Status::Waiting, timer.map(|timer| timer.0), waits);
                if let Some(inbox) = &state.inbox {
                    boarded.inbox = Some(commit.checks().len());
                    commit = commit.check(at_count(self.kept().count(), inbox.count()));
                }
            }
            Next::Rests(status) => after.status = status,
            Next::Continues(input) => {
                (after.input, after.run, after.intent) = (input, after.run + 1, None);
                continues = true;
                boarded.pending.retain(|pending| pending.effect.is_some());
            }
        }
        if !continues {
            commit = self.journaled(commit, &state, Some(&mut after), &boarded);
        }
        let is_progress = boarded.pending.iter().any(|pending| is_progress(&pending.entry));
        boarded.progress = is_progress || continues || after.status != Status::Running;
        commit = self.rest(commit, &mut state, &mut boarded);
        (self.recorded(commit, &state, after, &mut boarded), boarded)
    }

    /// Adds what is done with the operations, and what is published.
    fn rest(&self, mut commit: Commit, state: &mut State, boarded: &mut Boarded) -> Commit {
        commit = effects(commit, boarded);
        if let Some(published) = state.published.as_mut().filter(|published| published.is_new) {
            (published.is_new, boarded.publishes) = (false, true);
            commit = commit.put(&self.kept().published(), published.values.encode());
        }
        let first = boarded.pending.iter().map(|pending| pending.stamp).min().unwrap_or(u64::MAX);
        state.flying.insert(boarded.number, first);
        commit
    }

    /// Takes back, where the execution was found, how often it was taken up, once it has come to something.
    fn counted(&self, commit: Commit, state: &State, boarded: &Boarded) -> Commit {
        if state.taken_up == 0 || !boarded.progress {
            return commit;
        }
        let counted = match state.execution.timer_us {
            Some(timer) => self.engine.spaces.timers.key(alarm_key(Timestamp(timer), &self.id)),
            None => self.engine.spaces.listed.key(status_key(&self.id, &state.execution)),
        };
        commit.put(&counted, Vec::new())
    }

    /// Adds the execution's record, if it changes.
    fn recorded(&self, mut commit: Commit, state: &State, mut after: Execution, boarded: &mut Boarded) -> Commit {
        let before = (!boarded.is_first).then_some(&state.execution);
        let count = if boarded.progress { Vec::new() } else { state.taken_up.to_be_bytes().to_vec() };
        if before == Some(&after) {
            return self.counted(commit, state, boarded);
        }
        let note = match &after.status {
            Status::Running if state.taken_up > 0 || boarded.is_first => Some(count),
            _ => None,
        };
        let keyed = commit.checks().len();
        (commit, boarded.removal) = turn(&self.engine, commit, &self.id, before, &mut after, note);
        boarded.keyed = keyed..commit.checks().len();
        let timer = before.and_then(|before| before.timer_us);
        if let Some(timer) = timer.filter(|_| state.taken_up > 0 && boarded.progress && timer == after.timer_us) {
            commit = commit.put(&self.engine.spaces.timers.key(alarm_key(Timestamp(timer), &self.id)), Vec::new());
        }
        let write = commit.writes().len();
        commit = commit.put(&self.key, after.encode());
        boarded.after = Some((after, write));
        commit
    }

    /// Adds the records of operations. A step that is begun for the first time is told of by the record before it.
    fn journaled(
        &self,
        mut commit: Commit,
        state: &State,
        mut after: Option<&mut Execution>,
        boarded: &Boarded,
    ) -> Commit {
        let entries = &boarded.pending;
        let is_small = entries.len() <= TAIL && entries.iter().all(|pending| pending.entry.is_small());
        if let Some(after) = after.as_mut().filter(|after| is_small && after.status.is_terminal()) {
            after.tail = entries.iter().map(|pending| (pending.place.clone(), pending.entry.clone())).collect();
            return commit;
        }
        let is_very_first =
            |pending: &Pending| boarded.is_first && pending.place == Path::default().at(0) && pending.entry.is_intent();
        // The execution's own record tells of the very first.
        if let (Some(first), Some(after)) = (entries.first().filter(|first| is_very_first(first)), &mut after) {
            after.intent = Some(Intent::of(&first.entry));
        }
        let is_next = |before: &Pending, next: &Pending| {
            let (this, then) = (&before.place, &next.place);
            next.entry.is_intent() && this.branch == then.branch && this.number + 1 == then.number
        };
        let (mut key, mut prefix, mut branch) = (Vec::new(), 0, None);
        for (index, pending) in entries.iter().enumerate() {
            let is_told = match index.checked_sub(1) {
                Some(before) => is_next(&entries[before], pending),
                None => is_very_first(pending),
            };
            if is_told {
                continue;
            }
            if branch != Some(&pending.place.branch) {
                key = branch_key(&self.id, state.execution.run, &pending.place.branch);
                (prefix, branch) = (key.len(), Some(&pending.place.branch));
            }
            let next = entries.get(index + 1).filter(|next| is_next(pending, next));
            key.truncate(prefix);
            key.extend_from_slice(&pending.place.number.to_be_bytes());
            let record = pending.entry.encode_with(next.map(|next| &next.entry));
            commit = commit.put(&self.engine.spaces.journal.key(&key), record);
        }
        commit
    }

    /// A commit with the execution in it has landed.
    pub(crate) fn landed(&self, boarded: Boarded, receipt: &Receipt) {
        let mut state = self.state.lock();
        state.flying.remove(&boarded.number);
        state.arrived();
        if boarded.progress {
            (state.taken_up, state.probation) = (0, None);
        }
        if let Some((execution, write)) = boarded.after {
            state.execution = execution;
            state.rev = receipt.revs.get(write).copied().flatten();
        }
        let mut pending = boarded.pending;
        let mut effects = Vec::new();
        for (index, _, writes) in boarded.effects {
            let Some(effect) = pending[index].effect.take() else { continue };
            if let Some(received) = &effect.receives {
                state.receipts += 1;
                state.inbox.iter_mut().for_each(|inbox| inbox.remove(received));
            }
            effects.push((effect, writes));
        }
        if let Some(due) = boarded.removal {
            self.engine.removals.set(due, self.env());
        }
        // Those who wait for a commit look whether it was theirs.
        state.wake(|_, waits| !waits);
        if let Some(started) = state.started.take() {
            let _ = started.send(Ok(()));
            self.engine.begun().notify_waiters();
        }
        drop(state);
        if boarded.publishes {
            self.engine.published(&self.id);
        }
        self.told(effects, receipt);
    }

    /// A commit with the execution in it was refused. If that was for a reason of the execution's own, it has to stop.
    pub(crate) fn refused(&self, mut boarded: Boarded, refusal: &Refusal) -> Verdict {
        let has_failed = |checks: &Range<usize>| refusal.failed.iter().any(|failed| checks.contains(&failed.index));
        let own = refusal.failed.iter().find(|failed| boarded.checks.contains(&failed.index));
        // The first of its checks is that of the owner.
        let stop = own.map(|failed| match (failed.index == boarded.checks.start, boarded.is_first) {
            (true, _) => Stop::Fenced,
            (false, true) => Stop::Taken,
            (false, false) => Stop::Changed,
        });
        // Somebody else was started under its key.
        let stop = stop.or_else(|| has_failed(&boarded.keyed).then_some(Stop::Taken));
        let mut undone: Vec<usize> = Vec::new();
        for (index, checks, _) in &boarded.effects {
            if has_failed(checks) {
                undone.push(*index);
            }
        }
        let mut state = self.state.lock();
        for index in undone.into_iter().rev() {
            let pending = boarded.pending.remove(index);
            pending.effect.into_iter().for_each(|effect| state.refuse(effect.op));
        }
        if let Some(inbox) = boarded.inbox
            && has_failed(&(inbox..inbox + 1))
        {
            state.inbox().set_stale();
        }
        drop(state);
        boarded.effects.clear();
        self.put_back(boarded);
        stop.map_or(Verdict::Again, Verdict::Stop)
    }

    /// What was not committed is still to be.
    pub(crate) fn put_back(&self, boarded: Boarded) {
        let mut state = self.state.lock();
        state.flying.remove(&boarded.number);
        state.wants_record |= boarded.wants_record;
        if boarded.publishes
            && let Some(published) = &mut state.published
        {
            published.is_new = true;
        }
        for pending in boarded.pending {
            if state.lost.iter().any(|lost| pending.place.branch.is_within(lost)) {
                state.give_back(pending);
                continue;
            }
            // What is newer stays.
            state.first_pending = state.first_pending.min(pending.stamp);
            state.pending.entry(pending.place.clone()).or_insert(pending);
        }
        state.arrived();
    }
}

impl State {
    /// Nothing is on its way of the branches that were given up, if nothing is at all.
    fn arrived(&mut self) {
        if self.flying.is_empty() {
            self.lost.clear();
        }
        self.wake(|_, waits| !waits);
    }
}

/// Adds what operations do.
fn effects(mut commit: Commit, boarded: &mut Boarded) -> Commit {
    for (index, pending) in boarded.pending.iter_mut().enumerate() {
        let Some(effect) = &mut pending.effect else { continue };
        let (checks, writes) = (commit.checks().len(), commit.writes().len());
        commit = effect.checks.iter().cloned().fold(commit, Commit::check);
        commit = effect.writes.iter().cloned().fold(commit, Commit::write);
        boarded.effects.push((index, checks..commit.checks().len(), writes..commit.writes().len()));
    }
    commit
}

/// That there were so many messages and no more.
pub(crate) fn at_count(key: Key, count: u64) -> Check {
    if count == 0 { Check::Absent(key) } else { Check::AtRev(key, Rev(count)) }
}

/// Adds to a commit what goes with a change of an execution's record, which is then to be written as it is left. Gives
/// when something of the execution is to be removed.
pub(crate) fn turn(
    engine: &Inner,
    mut commit: Commit,
    id: &ExecutionId,
    before: Option<&Execution>,
    after: &mut Execution,
    note: Option<Vec<u8>>,
) -> (Commit, Option<Timestamp>) {
    let spaces = &engine.spaces;
    let note = match &after.status {
        Status::Parked(reason) => Some(reason.clone().into_bytes()),
        _ => note,
    };
    commit = list(commit, &spaces.listed, id, before, Some(after), note);
    let timer = before.and_then(|before| before.timer_us);
    if timer != after.timer_us {
        if let Some(old) = timer {
            commit = commit.delete(&spaces.timers.key(alarm_key(Timestamp(old), id)));
        }
        if let Some(timer) = after.timer_us {
            commit = commit.put(&spaces.timers.key(alarm_key(Timestamp(timer), id)), Vec::new());
        }
    }
    if let (None, Some(key)) = (before, &after.key) {
        let place = spaces.keys.key(keyed_key(&after.workflow, key));
        let keyed = Keyed { id: id.to_string(), input: hash_text(&after.input) };
        commit = commit.absent(&place).put(&place, keyed.encode());
    }
    let now = engine.store.env().now();
    let removal = match after.status.is_terminal() {
        true => {
            if let Some(parent) = &after.parent {
                commit = commit.delete(&engine.kept(&parent.id).child(id));
            }
            let keep = engine.definition(&after.workflow).map_or(DEFAULT_KEEP, |definition| definition.keep);
            after.removal_us = Some(now.plus(keep).0);
            Some((now.plus(keep), Removal::Execution))
        }
        false => before.filter(|before| before.run != after.run).map(|_| (now, Removal::Before(after.run))),
    };
    let Some((due, removal)) = removal else { return (commit, None) };
    (commit.put(&spaces.removals.key(alarm_key(due, id)), removal.encode()), Some(due))
}

/// Whether an entry tells of anything but of a body that is begun once more.
fn is_progress(entry: &Entry) -> bool {
    entry.state != EntryState::Begun || entry.attempts <= 1
}
