//! A request in memory: what the blocks of one execution share. It finds traces by the paths of blocks, and makes step
//! boundaries: the trace of a block, the checkpoints of the states it has changed and its events are one commit. It
//! does not know what blocks do.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::flow::checkpoint::Checkpoint;
use crate::flow::found::{Found, forget_within, load};
use crate::flow::schema::Shape;
use crate::flow::state::StateCell;
use crate::flow::stream::{FlowEvent, StepState};
use crate::flow::untold::Untold;
use crate::lane::Part;
use crate::record::Record;
use crate::store::{Bytes, Key, Timestamp};
use crate::workflow::Failure;
use crate::workflow::ctx::Ctx;
use crate::workflow::ctx::step::read_failure;
use crate::workflow::journal::place::{BranchPath, Place};
use crate::workflow::journal::replay::shown_call;
use crate::workflow::run::{MOST_BESIDE, OpInProgress, Run, largest};
use crate::workflow::stored::keys::journal_key;
use crate::workflow::stored::record::{Entry, EntryState, Kind, WaitsFor, failure_text};

/// Who a request is for. It is part of the execution's input.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Asker {
    /// The session that the request belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
    /// The user.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
    /// The organisation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub org: Option<String>,
}

/// The settings of requests.
#[derive(Debug, Clone)]
pub(crate) struct Settings {
    pub(crate) mutation_timeout: Option<Duration>,
    pub(crate) cleanup_checkpoints: bool,
    pub(crate) sabotage: Option<FlowSabotage>,
}

/// Breaks flows on purpose, to show that their tests notice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
#[cfg_attr(not(feature = "testing"), allow(dead_code, unreachable_pub))]
pub enum FlowSabotage {
    /// A checkpoint is stored after the trace of its block, in another commit.
    CheckpointLater,
    /// A trace is found by the position of its block, and not by its name.
    TraceByPosition,
}

/// The blocks that run, with what they have not told yet.
type RunningBlocks = BTreeMap<BranchPath, (Kind, Arc<Mutex<Untold>>)>;

pub(crate) struct FlowRequest {
    pub(crate) ctx: Ctx,
    pub(crate) asker: Asker,
    pub(crate) settings: Settings,
    /// The entries of the journal that no block has asked for, as an earlier life has left them.
    entries: Mutex<BTreeMap<Place, Entry>>,
    /// The checkpoints of an earlier life.
    checkpoints: Mutex<BTreeMap<BranchPath, Checkpoint>>,
    /// The states of blocks that run or have run, and the paths of those that may have a checkpoint.
    cells: Mutex<BTreeMap<BranchPath, Weak<StateCell>>>,
    stored: Mutex<BTreeSet<BranchPath>>,
    /// The kinds of the blocks that run, and what no boundary has told of them.
    running: Mutex<RunningBlocks>,
    /// The keys of what was recorded inside blocks that have ended, as far as it is not removed.
    litter: Mutex<Vec<Key>>,
    /// Checkpoints that sabotage keeps from the commits of their traces.
    late: Mutex<Vec<(Key, Option<Bytes>)>>,
    /// Why a recorded state cannot be used.
    misfit: Mutex<Option<String>>,
}

/// What the journal holds of a block.
pub(crate) enum FoundTrace {
    Nothing,
    /// It has begun; a loop has the progress of its last round.
    Begun(Option<String>),
    /// It has ended with this output, as JSON text.
    Done(String),
    Gave(Failure),
}

impl FlowRequest {
    /// Loads what an earlier life of the request has left.
    pub(crate) async fn load(ctx: Ctx, asker: Asker, settings: Settings) -> FlowRequest {
        let run = ctx.run.clone();
        let found = match run.with(|state| state.residency.is_fresh()) {
            true => Found::default(),
            false => {
                let loaded = load(&run).await;
                run.or_stop(loaded).await
            }
        };
        FlowRequest {
            ctx,
            asker,
            settings,
            entries: Mutex::new(found.entries),
            stored: Mutex::new(found.checkpoints.keys().cloned().collect()),
            checkpoints: Mutex::new(found.checkpoints),
            cells: Mutex::default(),
            running: Mutex::default(),
            litter: Mutex::new(found.litter),
            late: Mutex::default(),
            misfit: Mutex::default(),
        }
    }

    pub(crate) fn run(&self) -> &Arc<Run> {
        &self.ctx.run
    }

    /// True if no earlier life has told anything.
    pub(crate) fn is_new(&self) -> bool {
        self.run().with(|state| state.beside.is_new())
    }

    /// True if a block has begun in an earlier life.
    pub(crate) fn has_begun(&self, path: &BranchPath) -> bool {
        self.entries.lock().contains_key(&path.trace())
    }

    /// True if an operation at this place has ended in an earlier life.
    pub(crate) fn has_ended(&self, place: &Place) -> bool {
        let entries = self.entries.lock();
        entries.get(place).is_some_and(|entry| matches!(entry.state, EntryState::Done(_) | EntryState::Gave(_)))
    }

    /// What the journal holds of a block. A trace of another kind or name parks the request.
    pub(crate) async fn found(&self, path: &BranchPath, kind: Kind, name: &str) -> FoundTrace {
        let found = self.entries.lock().get(&path.trace()).cloned();
        let Some(entry) = found else { return FoundTrace::Nothing };
        let is_named = *entry.name == *name || self.breaks(FlowSabotage::TraceByPosition);
        if entry.kind != kind || !is_named {
            let Entry { kind: other, name: its, .. } = &entry;
            let reason = format!("block {path} is {kind} {name:?} in the flow, and {other} {its:?} in its trace");
            let (journal, code) = (shown_call(*other, its), shown_call(kind, name));
            return self.run().park_at(&path.trace(), journal, code, reason).await;
        }
        match entry.state {
            EntryState::Done(text) => FoundTrace::Done(text),
            EntryState::Gave(text) => FoundTrace::Gave(read_failure(&text)),
            _ => FoundTrace::Begun(entry.progress),
        }
    }

    /// Parks the request because a recorded output does not fit the type that the flow has now.
    pub(crate) async fn misfit<T>(&self, path: &BranchPath, error: &serde_json::Error) -> T {
        self.run().park(format!("the recorded output of block {path} does not fit its type: {error}")).await
    }

    /// Parks the request if a recorded state does not fit the type that the flow has now.
    pub(crate) async fn expect_fit(&self) {
        let misfit = self.misfit.lock().clone();
        if let Some(reason) = misfit {
            self.run().park(reason).await
        }
    }

    /// True if the journal holds operations of the code of a block, in its own branch.
    pub(crate) fn has_operations(&self, path: &BranchPath) -> bool {
        self.entries.lock().range(path.at(0)..path.trace()).next().is_some()
    }

    /// The state of a block instance, from its checkpoint or with its defaults. A checkpoint that does not fit the type
    /// parks the request when the block begins: see [`FlowRequest::expect_fit`].
    /// The second flag says whether the stream tells of it.
    pub(crate) fn cell(
        &self,
        path: &BranchPath,
        shape: &Arc<Shape>,
        (is_durable, is_told): (bool, bool),
    ) -> Arc<StateCell> {
        let checkpoint = self.checkpoints.lock().get(path).filter(|_| is_durable).cloned();
        let restored = |it: Checkpoint| Checkpoint { state: shape.restored(it.state), ..it };
        let restored = checkpoint.map(restored);
        if let Some(why) = restored.as_ref().and_then(|it| shape.check(&it.state).err()) {
            let reason = || format!("the recorded state of block {path} does not fit its type: {why}");
            self.misfit.lock().get_or_insert_with(reason);
        }
        let new = || Checkpoint { state: (shape.defaults)(), rev: 0, held: Vec::new() };
        let state = restored.unwrap_or_else(new);
        let limit = largest(&self.run().engine);
        let cell = Arc::new(StateCell::new(path.clone(), shape, (is_durable, is_told), state, limit));
        self.cells.lock().insert(path.clone(), Arc::downgrade(&cell));
        cell
    }

    /// An entry at the place of a trace.
    pub(crate) fn entry(&self, kind: Kind, name: &Arc<str>, state: EntryState) -> Entry {
        Entry::new(kind, name.clone(), 0, self.now(), state)
    }

    fn now(&self) -> Timestamp {
        self.run().env().now()
    }

    /// Keeps an entry for the next commit: a block begins, or a function has chosen something.
    pub(crate) fn note(&self, path: &BranchPath, entry: Entry) {
        self.run().put(&path.trace(), entry);
    }

    /// A block runs: if it is given up, this is told of it.
    pub(crate) fn runs(&self, path: &BranchPath, kind: Kind, untold: &Arc<Mutex<Untold>>) {
        self.running.lock().insert(path.clone(), (kind, untold.clone()));
    }

    pub(crate) fn tell(&self, event: &FlowEvent) {
        self.run().with(|state| state.beside.append(event.encode()));
    }

    /// A step boundary: the trace, the checkpoints of what the block has changed, the removal of what was recorded
    /// inside it and its events go into one commit, because nothing in here waits.
    pub(crate) fn boundary(&self, block: &BranchPath, at: &BranchPath, entry: Entry, events: Vec<FlowEvent>) {
        let (run, kept) = (self.run(), self.run().kept());
        self.running.lock().remove(block);
        let changed = self.settled(|cell| cell.settle(block));
        let mut part = self.remove(block, Part::default());
        if block != at {
            // The round of a loop leaves nothing behind but the loop's own entry.
            part = self.forget(block, part);
        }
        forget_within(&mut self.entries.lock(), block);
        run.put_with(&at.trace(), entry, (!part.writes().is_empty()).then(|| part.into()));
        for (path, value) in changed {
            let is_gone = block != at && path.is_within(block);
            let value = (!is_gone).then(|| value.encode());
            self.put_checkpoint(kept.checkpoint(&path), value);
        }
        events.iter().for_each(|event| self.tell(event));
    }

    fn put_checkpoint(&self, key: Key, value: Option<Bytes>) {
        match self.breaks(FlowSabotage::CheckpointLater) {
            true => self.late.lock().push((key, value)),
            false => self.run().with(|state| state.beside.put(key, value)),
        }
    }

    pub(crate) fn breaks(&self, sabotage: FlowSabotage) -> bool {
        self.settings.sabotage == Some(sabotage)
    }

    /// The key of an entry of the journal.
    fn key(&self, place: &Place) -> Key {
        let run = self.run();
        run.engine.spaces.journal.key(journal_key(&run.id, run.number().1, place))
    }

    /// Removes what was recorded inside a block that ends. A commit removes only so much: its trace hides the rest,
    /// which later commits remove.
    fn remove(&self, block: &BranchPath, part: Part) -> Part {
        let over = self.run().with(|state| state.settle(block));
        let room = MOST_BESIDE.saturating_sub(part.writes().len());
        let (first, rest) = over.split_at(over.len().min(room));
        self.litter.lock().extend(rest.iter().map(|place| self.key(place)));
        first.iter().fold(part, |part, place| part.delete(&self.key(place)))
    }

    /// Removes the trace and the checkpoints of a round.
    fn forget(&self, block: &BranchPath, mut part: Part) -> Part {
        let (run, kept) = (self.run(), self.run().kept());
        let (is_stored, rest) = run.with(|state| state.forget(&block.trace()));
        part = rest.into_iter().fold(part, Part::and);
        if is_stored {
            part = part.delete(&self.key(&block.trace()));
        }
        self.cells.lock().retain(|path, _| !path.is_within(block));
        let gone = self.stored.lock().extract_if(.., |path| path.is_within(block)).collect::<Vec<_>>();
        let mut keys: Vec<Key> = gone.iter().map(|path| kept.checkpoint(path)).collect();
        let room = if run.with(|state| state.beside.is_full()) { 0 } else { MOST_BESIDE };
        self.litter.lock().extend(keys.split_off(keys.len().min(room)));
        run.with(|state| keys.into_iter().for_each(|key| state.beside.put(key, None)));
        part
    }

    /// The chain goes back: what its blocks have recorded in this round is removed by the commit that records it.
    pub(crate) fn go_back(&self, at: &BranchPath, entry: Entry, round: &[BranchPath]) {
        let (run, mut part) = (self.run(), Part::default());
        for block in round {
            part = self.remove(block, part);
            part = self.forget(block, part);
            forget_within(&mut self.entries.lock(), block);
        }
        run.put_with(&at.trace(), entry, (!part.writes().is_empty()).then(|| part.into()));
    }

    /// The checkpoints that have changed. States of blocks that are gone are forgotten.
    fn settled(&self, settle: impl Fn(&StateCell) -> Option<Checkpoint>) -> Vec<(BranchPath, Checkpoint)> {
        let mut cells = Vec::new();
        self.cells.lock().retain(|_, cell| {
            let cell = cell.upgrade();
            cells.extend(cell.clone());
            cell.is_some()
        });
        let changed = cells.iter().filter_map(|cell| Some((cell.path.clone(), settle(cell)?)));
        let changed: Vec<_> = changed.collect();
        self.stored.lock().extend(changed.iter().map(|(path, _)| path.clone()));
        changed
    }

    /// Blocks were given up and do not run again. What they have changed of the states of others stays.
    pub(crate) fn give_up(&self, paths: &BTreeSet<BranchPath>) {
        let run = self.run();
        paths.iter().for_each(|path| run.give_up(path));
        let is_lost = |path: &BranchPath| paths.range(..=path).next_back().is_some_and(|lost| path.is_within(lost));
        let changed = self.settled(|cell| cell.settle_where(is_lost));
        for (owner, value) in &changed {
            run.with(|state| state.beside.put(run.kept().checkpoint(owner), Some(value.encode())));
        }
        let lost: Vec<_> = self.running.lock().extract_if(.., |path, _| is_lost(path)).collect();
        let mut events: Vec<FlowEvent> = lost.iter().flat_map(|(_, (_, untold))| untold.lock().take()).collect();
        if events.len() > MOST_BESIDE {
            // More than a commit can tell.
            let snapshot = |(owner, value): &(BranchPath, Checkpoint)| FlowEvent::StateSnapshot {
                scope: shown(owner),
                state: value.state.clone(),
            };
            events = changed.iter().map(snapshot).collect();
        }
        let steps = lost.iter().filter(|(path, _)| paths.contains(path)).take(MOST_BESIDE);
        events.extend(steps.map(|(path, (kind, _))| FlowEvent::step(path, *kind, StepState::GivenUp)));
        events.iter().for_each(|event| self.tell(event));
    }

    /// Waits until the next commit has room: many blocks may begin or end side by side, and the end of one may have
    /// left more behind than a commit can remove.
    pub(crate) async fn room(&self) {
        let run = self.run();
        while run.is_full() || run.with(|state| state.is_full_beside()) || self.sweeps() {
            OpInProgress::begin(run, WaitsFor::Store).make_room().await;
        }
    }

    /// Removes some of the litter with the next commit. False if there is none.
    fn sweeps(&self) -> bool {
        let mut litter = self.litter.lock();
        let left = litter.len().saturating_sub(MOST_BESIDE);
        let some = litter.split_off(left);
        let is_some = !some.is_empty();
        self.run().with(|state| some.into_iter().for_each(|key| state.beside.put(key, None)));
        is_some
    }

    /// Makes everything so far durable.
    pub(crate) async fn flush(&self) {
        // This operation has nothing pending that could be refused.
        let _ = OpInProgress::begin(self.run(), WaitsFor::Store).flush().await;
        self.put_late();
    }

    fn put_late(&self) {
        let late = std::mem::take(&mut *self.late.lock());
        self.run().with(|state| late.into_iter().for_each(|(key, value)| state.beside.put(key, value)));
    }

    /// Fails if the request is cancelled.
    pub(crate) fn unless_cancelled(&self, path: &BranchPath) -> Result<(), Failure> {
        let reason = self.run().with(|state| state.cancelled(path).map(str::to_string));
        reason.map_or(Ok(()), |reason| Err(Failure::from_cancel(reason)))
    }

    /// The request ends: its checkpoints go if its flow says so.
    pub(crate) async fn end(&self) {
        self.put_late();
        if !self.settings.cleanup_checkpoints {
            return;
        }
        let (run, kept) = (self.run(), self.run().kept());
        let mut paths = std::mem::take(&mut *self.stored.lock());
        // The last commit removes the outermost ones.
        while let Some(path) = paths.pop_last() {
            run.with(|state| state.beside.put(kept.checkpoint(&path), None));
            self.room().await;
        }
    }
}

/// A path as messages show it.
pub(crate) fn shown(path: &BranchPath) -> String {
    path.to_string().trim_end_matches('/').into()
}

pub(crate) fn gave(failure: &Failure) -> EntryState {
    EntryState::Gave(failure_text(failure))
}
