//! A request in memory: what the blocks of one execution share. It finds traces by the paths of blocks, and makes step
//! boundaries: the trace of a block, the checkpoints of the states it has changed and its events are one commit. It
//! does not know what blocks do.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::flow::schema::Shape;
use crate::flow::state::StateCell;
use crate::flow::stream::FlowEvent;
use crate::lane::Part;
use crate::store::{Bytes, Order, Timestamp};
use crate::workflow::ctx::Ctx;
use crate::workflow::ctx::step::read_failure;
use crate::workflow::journal::place::{BranchPath, Place};
use crate::workflow::operate::history::read_entry;
use crate::workflow::run::{OpInProgress, Run, largest};
use crate::workflow::stored::keys::{journal_key, run_key};
use crate::workflow::stored::record::{Entry, EntryState, Kind, WaitsFor, failure_text, next_page};
use crate::workflow::{Failure, WorkflowError};

/// How many records are read at once.
const PAGE: usize = 1000;

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
}

pub(crate) struct FlowRequest {
    pub(crate) ctx: Ctx,
    pub(crate) asker: Asker,
    pub(crate) settings: Settings,
    /// The entries of the journal that no block has asked for, as an earlier life has left them.
    entries: Mutex<BTreeMap<Place, Entry>>,
    /// The checkpoints of an earlier life.
    checkpoints: Mutex<BTreeMap<BranchPath, Value>>,
    /// The states of blocks that run or have run.
    cells: Mutex<BTreeMap<BranchPath, Weak<StateCell>>>,
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
        let (mut entries, mut checkpoints) = (BTreeMap::new(), BTreeMap::new());
        if !run.with(|state| state.residency.is_fresh()) {
            let loaded = load(&run, &mut entries, &mut checkpoints).await;
            run.or_stop(loaded).await;
        }
        let (entries, checkpoints) = (Mutex::new(entries), Mutex::new(checkpoints));
        let (cells, misfit) = (Mutex::default(), Mutex::default());
        FlowRequest { ctx, asker, settings, entries, checkpoints, cells, misfit }
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
        if entry.kind != kind || *entry.name != *name {
            let Entry { kind: other, name: its, .. } = &entry;
            let reason = format!("block {path} is {kind} {name:?} in the flow, and {other} {its:?} in its trace");
            return self.run().park(reason).await;
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
    pub(crate) fn cell(&self, path: &BranchPath, shape: &Arc<Shape>, is_durable: bool) -> Arc<StateCell> {
        let checkpoint = self.checkpoints.lock().get(path).filter(|_| is_durable).cloned();
        let restored = checkpoint.map(|checkpoint| shape.restored(checkpoint));
        if let Some(why) = restored.as_ref().and_then(|state| shape.check(state).err()) {
            let reason = || format!("the recorded state of block {path} does not fit its type: {why}");
            self.misfit.lock().get_or_insert_with(reason);
        }
        let state = restored.unwrap_or_else(|| (shape.defaults)());
        let limit = largest(&self.run().engine);
        let cell = Arc::new(StateCell::new(path.clone(), shape, is_durable, state, limit));
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

    pub(crate) fn tell(&self, event: &FlowEvent) {
        let text = serde_json::to_vec(event).expect("an event can be written as JSON");
        self.run().with(|state| state.beside.append(Bytes::from(text)));
    }

    /// A step boundary: the trace, the checkpoints of what the block has changed, the removal of what was recorded
    /// inside it and its events go into one commit, because nothing in here waits.
    pub(crate) fn boundary(&self, block: &BranchPath, at: &BranchPath, entry: Entry, events: Vec<FlowEvent>) {
        let (run, kept) = (self.run(), self.run().kept());
        let changed: Vec<(BranchPath, Value)> = self.settled(|cell| cell.settle(block));
        let over = run.with(|state| state.settle(block));
        let (id, number) = (&run.id, run.number().1);
        let key = |place: &Place| run.engine.spaces.journal.key(journal_key(id, number, place));
        let mut part = over.iter().fold(Part::default(), |part, place| part.delete(&key(place)));
        if block != at {
            // The round of a loop leaves nothing behind but the loop's own entry.
            part = self.forget(block, part, &key);
        }
        self.entries.lock().retain(|place, _| !place.branch.is_within(block));
        run.put_with(&at.trace(), entry, (!part.writes().is_empty()).then(|| part.into()));
        for (path, value) in changed {
            let is_gone = block != at && path.is_within(block);
            let value = (!is_gone).then(|| Bytes::from(value.to_string().into_bytes()));
            run.with(|state| state.beside.put(kept.checkpoint(&path), value));
        }
        events.iter().for_each(|event| self.tell(event));
    }

    /// Removes the trace and the checkpoints of a round.
    fn forget(&self, block: &BranchPath, mut part: Part, key: &impl Fn(&Place) -> crate::store::Key) -> Part {
        let (run, kept) = (self.run(), self.run().kept());
        let (is_stored, rest) = run.with(|state| state.forget(&block.trace()));
        part = rest.into_iter().fold(part, Part::and);
        if is_stored {
            part = part.delete(&key(&block.trace()));
        }
        let mut cells = self.cells.lock();
        let mut gone: Vec<BranchPath> = cells.keys().filter(|path| path.is_within(block)).cloned().collect();
        cells.retain(|path, _| !path.is_within(block));
        gone.extend(self.checkpoints.lock().keys().filter(|path| path.is_within(block)).cloned());
        gone.sort();
        gone.dedup();
        gone.iter().for_each(|path| run.with(|state| state.beside.put(kept.checkpoint(path), None)));
        part
    }

    /// The chain goes back: what its blocks have recorded in this round is removed by the commit that records it.
    pub(crate) fn go_back(&self, at: &BranchPath, entry: Entry, round: &[BranchPath]) {
        let (run, mut part) = (self.run(), Part::default());
        let (id, number) = (&run.id, run.number().1);
        let key = |place: &Place| run.engine.spaces.journal.key(journal_key(id, number, place));
        for block in round {
            let over = run.with(|state| state.settle(block));
            part = over.iter().fold(part, |part, place| part.delete(&key(place)));
            part = self.forget(block, part, &key);
            self.entries.lock().retain(|place, _| !place.branch.is_within(block));
        }
        run.put_with(&at.trace(), entry, (!part.writes().is_empty()).then(|| part.into()));
    }

    fn settled(&self, settle: impl Fn(&StateCell) -> Option<Value>) -> Vec<(BranchPath, Value)> {
        let cells: Vec<Arc<StateCell>> = self.cells.lock().values().filter_map(Weak::upgrade).collect();
        cells.iter().filter_map(|cell| Some((cell.path.clone(), settle(cell)?))).collect()
    }

    /// Blocks were given up and do not run again. What they have changed of the states of others stays.
    pub(crate) fn give_up(&self, path: &BranchPath) {
        let run = self.run();
        run.give_up(path);
        for (owner, value) in self.settled(|cell| cell.settle_within(path)) {
            let value = Bytes::from(value.to_string().into_bytes());
            run.with(|state| state.beside.put(run.kept().checkpoint(&owner), Some(value)));
        }
    }

    /// Waits until the next commit has room: many blocks may begin or end side by side.
    pub(crate) async fn room(&self) {
        while self.run().is_full() {
            self.flush().await;
        }
    }

    /// Makes everything so far durable.
    pub(crate) async fn flush(&self) {
        // This operation has nothing pending that could be refused.
        let _ = OpInProgress::begin(self.run(), WaitsFor::Store).flush().await;
    }

    /// Fails if the request is cancelled.
    pub(crate) fn unless_cancelled(&self, path: &BranchPath) -> Result<(), Failure> {
        let reason = self.run().with(|state| state.cancelled(path).map(str::to_string));
        reason.map_or(Ok(()), |reason| Err(Failure::from_cancel(reason)))
    }

    /// The request ends: its checkpoints go if its flow says so.
    pub(crate) fn end(&self) {
        if !self.settings.cleanup_checkpoints {
            return;
        }
        let (run, kept) = (self.run(), self.run().kept());
        let mut paths: Vec<BranchPath> = self.cells.lock().keys().cloned().collect();
        paths.extend(self.checkpoints.lock().keys().cloned());
        paths.iter().for_each(|path| run.with(|state| state.beside.put(kept.checkpoint(path), None)));
    }
}

/// A path as messages show it.
pub(crate) fn shown(path: &BranchPath) -> String {
    path.to_string().trim_end_matches('/').into()
}

pub(crate) fn gave(failure: &Failure) -> EntryState {
    EntryState::Gave(failure_text(failure))
}

async fn load(
    run: &Arc<Run>,
    entries: &mut BTreeMap<Place, Entry>,
    checkpoints: &mut BTreeMap<BranchPath, Value>,
) -> Result<(), WorkflowError> {
    let (engine, kept) = (&run.engine, run.kept());
    let view = engine.store.view().await?;
    let mut rest = engine.spaces.journal.prefix(run_key(&run.id, run.number().1));
    while let Some(page) = next_page(&view, &mut rest, PAGE).await? {
        for (key, item) in page {
            let (place, entry, _) = read_entry(&run.id, &key, &item.value)?;
            if place.branch.is_named() {
                run.with(|state| state.found(&place));
                entries.insert(place, entry);
            }
        }
    }
    let mut rest = kept.checkpoints();
    while let Some(page) = next_page(&view, &mut rest, PAGE).await? {
        for (key, item) in page {
            let damaged = || WorkflowError::corrupt(format!("a checkpoint of execution {:?}", run.id));
            let path = kept.read_checkpoint(&key).ok_or_else(damaged)?;
            checkpoints.insert(path, crate::json::parse_stored(&item.value).ok_or_else(damaged)?);
        }
    }
    let last = view.scan(&kept.events(0), Order::Descending, 1).await?;
    let next = last.first().and_then(|(key, _)| kept.read_event(key)).map_or(0, |last| last + 1);
    run.with(|state| state.beside.continue_at(next));
    Ok(())
}
