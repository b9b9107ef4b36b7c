//! Commits of an execution: what a commit holds of it, and how the outcome changes it.

use parking_lot::MutexGuard;

use crate::lane::{Part, Placed, Tag};
use crate::node::SHARD;
use crate::node::alarm::alarm_key;
use crate::record::Record;
use crate::store::{Check, Commit, Key, Receipt, Refusal, Rev, Timestamp};
use crate::workflow::ExecutionId;
use crate::workflow::admission::stored::Partition;
use crate::workflow::definition::DEFAULT_KEEP;
use crate::workflow::engine::EngineInner;
use crate::workflow::engine::listen::News;
use crate::workflow::journal::place::BranchPath;
use crate::workflow::run::beside::TakenBeside;
use crate::workflow::run::inbox::Address;
use crate::workflow::run::journal::Pending;
use crate::workflow::run::{NextState, Run, RunState, Stop, hash_text};
use crate::workflow::stored::keys::{branch_key, keyed_key};
use crate::workflow::stored::record::{Entry, EntryState, Execution, Intent, Keyed, Removal, StoredStatus, TAIL};

/// The record of the execution is as the engine knows it.
pub(crate) const RECORD: Tag = Tag("record");
/// The execution still holds the locks that its code has guards of.
const HELD: Tag = Tag("held");
/// No execution was started under the idempotency key.
pub(crate) const KEYED: Tag = Tag("keyed");
/// The inbox holds no message that the execution does not know.
const INBOX: Tag = Tag("inbox");

/// What the commit that records an operation does in addition.
#[derive(Default)]
pub(crate) struct OpEffect {
    /// The operation, which is notified if a check of the part fails.
    pub(crate) op: u64,
    pub(crate) part: Part,
    /// The message that the operation receives with this commit.
    pub(crate) receives: Option<Address>,
}

impl From<Part> for OpEffect {
    fn from(part: Part) -> OpEffect {
        OpEffect { part, ..OpEffect::default() }
    }
}

impl OpEffect {
    /// Receives a message.
    pub(crate) fn receipt(address: Address) -> OpEffect {
        OpEffect { part: Part::default().delete(&address.1), receives: Some(address), ..OpEffect::default() }
    }
}

/// What a commit holds of an execution.
#[derive(Default)]
pub(crate) struct Boarded {
    /// The number of this commit among those in flight.
    flight: u64,
    pending: Vec<Pending>,
    /// Where the commit holds the execution's own part, and the parts of effects by their index in `pending`.
    own: Placed,
    effects: Vec<(usize, Placed)>,
    /// The record after the commit, and the index of its write.
    after: Option<(Execution, usize)>,
    /// True if the commit writes published values.
    publishes: bool,
    /// True if the commit tells callers on other nodes that there is news.
    is_told: bool,
    is_first: bool,
    /// The reviews that the commit closes because they were given up.
    closed: Vec<Key>,
    /// The records and events beside the journal that the commit writes.
    beside: TakenBeside,
    /// How many of the checked locks the code has already let go of.
    left: usize,
    /// True if the record was to be written.
    wants_record: bool,
    /// True if the execution makes progress with this commit.
    progress: bool,
    /// When the stored data of the execution, or of earlier runs, is due for removal.
    removal: Option<Timestamp>,
    /// The status that the execution ends with, if another takes its place.
    succeeded: Option<StoredStatus>,
}

/// What a refusal means for the execution.
pub(crate) enum RefusalVerdict {
    Stop(Stop),
    /// The refusal is no reason for the execution to stop.
    Again,
}

impl Run {
    /// Adds to a commit: the checks that this engine owns the execution and that its record is unchanged, everything
    /// pending, and the record if it changes.
    pub(crate) fn board(&self, commit: Commit, next: NextState) -> (Commit, Boarded) {
        let mut state = self.state.lock();
        let mut part = self.as_it_was(&state, &next);
        let mut boarded = Boarded {
            pending: state.journal.take(&commit),
            is_first: !state.known.is_stored(),
            left: state.guards.left(),
            wants_record: state.known.take_wanted(),
            ..Boarded::default()
        };
        // In most commits the record stays as it is, and is not copied.
        if !boarded.is_first && matches!(next, NextState::Runs) && !state.is_changed() {
            part = self.journaled(part, &state, None, &boarded);
            boarded.progress = boarded.pending.iter().any(|pending| is_progress(&pending.entry));
            part = self.counted(part, &state, &boarded);
            return self.placed(commit, part, state, boarded);
        }
        let mut after = state.known.running();
        let mut continues = false;
        match next {
            NextState::Runs => {}
            NextState::Waits(timer, waits) => {
                (after.status, after.timer_us, after.waits) =
                    (StoredStatus::Waiting, timer.map(|timer| timer.0), waits);
                if let Some(count) = state.inbox.count() {
                    part = part.check(INBOX, at_count(self.kept().count(), count));
                }
            }
            NextState::Rests(status) => after.status = status,
            NextState::Continues(input) => {
                let first = Intent::of_first(self.env().now());
                (after.input, after.run, after.intent) = (input, after.run + 1, Some(first));
                continues = true;
                boarded.pending.retain(|pending| pending.effect.is_some());
            }
            NextState::Succeeds(status, first) => {
                after = *first;
                (continues, boarded.succeeded) = (true, Some(status));
                boarded.pending.retain(|pending| pending.effect.is_some());
            }
        }
        if !continues {
            part = self.journaled(part, &state, Some(&mut after), &boarded);
        }
        let is_progress = boarded.pending.iter().any(|pending| is_progress(&pending.entry));
        boarded.progress = is_progress || continues || after.status != StoredStatus::Running;
        part = self.recorded(part, &state, after, &mut boarded);
        self.placed(commit, part, state, boarded)
    }

    /// Checks that this engine owns the execution, that its record is unchanged, and that it holds the locks that its
    /// code has guards of.
    fn as_it_was(&self, state: &RunState, next: &NextState) -> Part {
        let part = self.engine.node.for_owner(&self.id);
        let residency = &state.residency;
        let is_gone = residency.is_stopping() || residency.has_left() || state.known.stored().status.is_terminal();
        let part = match state.known.rev() {
            // The execution has stopped: this check can never pass, so its other commits are refused.
            _ if is_gone && !matches!(next, NextState::Rests(_) | NextState::Succeeds(..)) => {
                part.at_rev(RECORD, &self.key, Rev(u64::MAX))
            }
            Some(rev) => part.at_rev(RECORD, &self.key, rev),
            None => part.absent(RECORD, &self.key),
        };
        state.guards.checked().fold(part, |part, key| part.check(HELD, Check::Present(key.clone())))
    }

    /// Adds the published values to the execution's own part, and then this part and the parts of operations to the
    /// commit.
    fn placed(
        &self,
        commit: Commit,
        mut part: Part,
        mut state: MutexGuard<'_, RunState>,
        mut boarded: Boarded,
    ) -> (Commit, Boarded) {
        if let Some(published) = state.published.take() {
            boarded.publishes = true;
            part = part.put(&self.kept().published(), published.encode());
        }
        boarded.closed = state.reviews.take();
        part = boarded.closed.iter().fold(part, Part::delete);
        boarded.beside = state.beside.take();
        part = boarded.beside.add_to(part, &self.kept());
        let ends = boarded.after.as_ref().is_some_and(|(after, _)| after.status.is_terminal());
        if boarded.publishes || boarded.beside.has_events() || ends || boarded.succeeded.is_some() {
            (part, boarded.is_told) = self.engine.with_news(part, &self.id);
        }
        boarded.flight = state.journal.fly(&boarded.pending);
        let mut commit = commit;
        (commit, boarded.own, _) = part.place_whole(commit);
        for (index, pending) in boarded.pending.iter().enumerate() {
            if let Some(effect) = &pending.effect {
                let placed;
                (commit, placed) = effect.part.place(commit);
                boarded.effects.push((index, placed));
            }
        }
        (commit, boarded)
    }

    /// Clears the stored count of loads once the execution has made progress.
    fn counted(&self, part: Part, state: &RunState, boarded: &Boarded) -> Part {
        if state.residency.loads() == 0 || !boarded.progress {
            return part;
        }
        part.put(&self.engine.counted_at(&self.id, state.known.stored()), Vec::new())
    }

    /// Adds the execution's record, if it changes.
    fn recorded(&self, mut part: Part, state: &RunState, mut after: Execution, boarded: &mut Boarded) -> Part {
        let (before, loads) = ((!boarded.is_first).then_some(state.known.stored()), state.residency.loads());
        let count = if boarded.progress { Vec::new() } else { loads.to_be_bytes().to_vec() };
        if before == Some(&after) {
            return self.counted(part, state, boarded);
        }
        let note = match &after.status {
            StoredStatus::Running if loads > 0 || boarded.is_first => Some(count),
            _ => None,
        };
        (part, boarded.removal) = with_record(&self.engine, part, &self.id, before, &mut after, note);
        let write = part.writes().len() - 1;
        let timer = before.and_then(|before| before.timer_us);
        if let Some(timer) = timer.filter(|_| loads > 0 && boarded.progress && timer == after.timer_us) {
            part = part.put(&self.engine.spaces.timers.key(alarm_key(Timestamp(timer), &self.id)), Vec::new());
        }
        boarded.after = Some((after, write));
        part
    }

    /// Adds the entries of operations. A step that begins for the first time is stored in the entry before it.
    fn journaled(
        &self,
        mut part: Part,
        state: &RunState,
        mut after: Option<&mut Execution>,
        boarded: &Boarded,
    ) -> Part {
        let entries: Vec<&Pending> = boarded.pending.iter().filter(|pending| !pending.is_dropped).collect();
        let is_small = entries.len() <= TAIL && entries.iter().all(|pending| pending.entry.is_small());
        if let Some(after) = after.as_mut().filter(|after| is_small && after.status.is_terminal()) {
            after.tail = entries.iter().map(|pending| (pending.place.clone(), pending.entry.clone())).collect();
            return part;
        }
        let is_very_first = |pending: &Pending| {
            boarded.is_first && pending.place == BranchPath::default().at(0) && pending.entry.is_intent()
        };
        // The execution's own record stores the first step of all.
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
                Some(before) => is_next(entries[before], pending),
                None => is_very_first(pending),
            };
            if is_told {
                continue;
            }
            if branch != Some(&pending.place.branch) {
                key = branch_key(&self.id, state.known.stored().run, &pending.place.branch);
                (prefix, branch) = (key.len(), Some(&pending.place.branch));
            }
            let next = entries.get(index + 1).filter(|next| is_next(pending, next));
            key.truncate(prefix);
            key.extend_from_slice(&pending.place.number.to_be_bytes());
            let record = pending.entry.encode_with(next.map(|next| &next.entry));
            part = part.put(&self.engine.spaces.journal.key(&key), record);
        }
        part
    }

    /// A commit that holds the execution has landed.
    pub(crate) fn landed(&self, boarded: Boarded, receipt: &Receipt) {
        let mut state = self.state.lock();
        state.journal.arrive(boarded.flight);
        state.guards.landed(boarded.left);
        let started = state.residency.landed(boarded.progress, boarded.succeeded, boarded.is_told);
        if let Some((execution, write)) = boarded.after {
            state.known.landed(execution, boarded.own.landing(receipt).rev(write));
        }
        let mut pending = boarded.pending;
        let mut effects = Vec::new();
        for (index, placed) in boarded.effects {
            let Some(effect) = pending[index].effect.take() else { continue };
            effect.receives.iter().for_each(|received| state.inbox.receive(received));
            effects.push((effect.part, placed));
        }
        if let Some(due) = boarded.removal {
            self.engine.removals.set(&self.id, due);
        }
        // Operations that wait for a commit check whether it was theirs.
        state.ops.wake_busy();
        if let Some(started) = started {
            let _ = started.send(Ok(()));
            self.engine.begun.notify_waiters();
        }
        drop(state);
        if boarded.publishes {
            self.engine.tell(&self.id, News::Published, boarded.is_told);
        }
        if boarded.beside.has_events() {
            self.engine.tell(&self.id, News::Stream, boarded.is_told);
        }
        effects.into_iter().for_each(|(part, placed)| part.land(placed.landing(receipt)));
    }

    /// A commit that holds the execution was refused. If one of the execution's own checks failed, it has to stop.
    pub(crate) fn refused(&self, mut boarded: Boarded, refusal: &Refusal) -> RefusalVerdict {
        let mut stop = None;
        for (_, tag, _) in boarded.own.failed(refusal) {
            stop = match tag {
                SHARD => Some(Stop::Fenced),
                RECORD | KEYED if boarded.is_first => Some(Stop::Taken),
                RECORD => Some(Stop::Changed),
                HELD => {
                    // The execution is replayed, and checks which of its locks were taken away.
                    self.engine.forced.lock().insert(self.id.clone());
                    Some(Stop::Changed)
                }
                _ => None,
            };
            if stop.is_some() {
                break;
            }
        }
        let is_undone = |(_, placed): &(usize, Placed)| placed.failed(refusal).next().is_some();
        let undone: Vec<(usize, Placed)> = boarded.effects.extract_if(.., |placed| is_undone(placed)).collect();
        let mut state = self.state.lock();
        for (index, placed) in undone.into_iter().rev() {
            if let Some(effect) = boarded.pending.remove(index).effect {
                state.ops.refuse(effect.op);
                effect.part.refuse(&placed, refusal);
            }
        }
        if boarded.own.has_failed(refusal, INBOX) {
            state.inbox.set_stale();
        }
        drop(state);
        boarded.effects.clear();
        self.put_back(boarded);
        stop.map_or(RefusalVerdict::Again, RefusalVerdict::Stop)
    }

    /// Puts everything back that a commit held and did not make durable.
    pub(crate) fn put_back(&self, boarded: Boarded) {
        let mut state = self.state.lock();
        if boarded.wants_record {
            state.known.want();
        }
        state.reviews.put_back(boarded.closed);
        state.beside.put_back(boarded.beside);
        if boarded.publishes {
            state.published.put_back();
        }
        let given_back = state.journal.put_back(boarded.pending);
        state.give_back(given_back);
        state.journal.arrive(boarded.flight);
        state.ops.wake_busy();
    }
}

/// Checks that the inbox has had exactly this many deliveries.
pub(crate) fn at_count(key: Key, count: u64) -> Check {
    if count == 0 { Check::Absent(key) } else { Check::AtRev(key, Rev(count)) }
}

impl EngineInner {
    /// The key of an execution's record.
    pub(crate) fn record_of(&self, id: &ExecutionId) -> Key {
        self.spaces.executions.key(id.as_bytes())
    }

    /// The key whose value counts how often an execution was loaded without making progress.
    pub(crate) fn counted_at(&self, id: &ExecutionId, stored: &Execution) -> Key {
        match stored.timer_us {
            Some(timer) => self.spaces.timers.key(alarm_key(Timestamp(timer), id)),
            None => self.spaces.lists.status(id, stored),
        }
    }

    /// A part for any node, with the check that the record is at this rev; without a rev, that there is no record.
    pub(crate) fn at_record(&self, id: &ExecutionId, rev: Option<Rev>) -> Part {
        let (part, key) = (self.node.for_execution(id), self.record_of(id));
        match rev {
            Some(rev) => part.at_rev(RECORD, &key, rev),
            None => part.absent(RECORD, &key),
        }
    }
}

/// Adds the change of an execution's record to a part, with everything that follows from the change. The write of the
/// record is the last one. Returns when stored data of the execution is due for removal.
pub(crate) fn with_record(
    engine: &EngineInner,
    mut part: Part,
    id: &ExecutionId,
    before: Option<&Execution>,
    after: &mut Execution,
    note: Option<Vec<u8>>,
) -> (Part, Option<Timestamp>) {
    let spaces = &engine.spaces;
    let note = match &after.status {
        StoredStatus::Parked(reason) => Some(reason.clone().into_bytes()),
        _ => note,
    };
    part = spaces.lists.list(part, id, before, Some(after), note);
    let timer = before.and_then(|before| before.timer_us);
    if timer != after.timer_us {
        if let Some(old) = timer {
            part = part.delete(&spaces.timers.key(alarm_key(Timestamp(old), id)));
        }
        if let Some(timer) = after.timer_us {
            part = part.put(&spaces.timers.key(alarm_key(Timestamp(timer), id)), Vec::new());
        }
    }
    if let (None, Some(key)) = (before, &after.key) {
        let place = spaces.keys.key(keyed_key(&after.workflow, key));
        let keyed = Keyed { id: id.to_string(), input: hash_text(&after.input), item: None };
        part = part.absent(KEYED, &place).put(&place, keyed.encode());
    }
    if after.status != StoredStatus::Waiting {
        after.admission.iter_mut().for_each(|admission| admission.gathers = None);
    }
    // An execution that has begun gathers no more.
    if let Some(gathers) = before.and_then(Execution::gathers).filter(|_| after.gathers().is_none()) {
        let partition = Partition::new(&after.workflow, gathers.key.as_deref());
        part = part.delete(&spaces.gates().gathering(&partition, gathers.batch.is_some()));
    }
    if after.status != StoredStatus::Running {
        after.runner = None;
    }
    let now = engine.store.env().now();
    let removal = match after.status.is_terminal() {
        true => {
            if let Some(parent) = &after.parent {
                part = part.delete(&engine.kept(&parent.id).child(id));
            }
            let keep = engine.definition(&after.workflow).map_or(DEFAULT_KEEP, |definition| definition.keep);
            after.removal_us = Some(now.plus(keep).0);
            Some((now.plus(keep), Removal::Execution))
        }
        false => before.filter(|before| before.run != after.run).map(|_| (now, Removal::Before(after.run))),
    };
    if let Some((due, removal)) = &removal {
        part = part.put(&spaces.removals.key(alarm_key(*due, id)), removal.encode());
    }
    (part.put(&engine.record_of(id), after.encode()), removal.map(|(due, _)| due))
}

/// False only for an entry that begins another attempt of the same body.
fn is_progress(entry: &Entry) -> bool {
    entry.state != EntryState::Begun || entry.attempts <= 1
}
