//! Forks: new executions that keep what another has recorded before a place, and run the rest again.

use std::collections::{BTreeMap, BTreeSet};
use std::future::IntoFuture;
use std::sync::Arc;

use serde::Serialize;

use crate::json;
use crate::lane::Part;
use crate::record::Record;
use crate::state::{Slots, States};
use crate::store::{Bytes, Generation, Item, Key, Range, Rev, StoreError, Timestamp, Uuid, View, Write};
use crate::workflow::ctx::child::keep_birth;
use crate::workflow::ctx::locks::Unlocked;
use crate::workflow::ctx::step::read_failure;
use crate::workflow::definition::Definition;
use crate::workflow::engine::{Engine, EngineInner, check_name};
use crate::workflow::journal::place::{BranchPath, Place};
use crate::workflow::operate::history::{RecordedEntry, entries};
use crate::workflow::run::{CALLED_OFF, with_record};
use crate::workflow::stored::kept::{ReviewRecord, Token};
use crate::workflow::stored::keys::{journal_key, review_key};
use crate::workflow::stored::record::{
    ANYTHING, Entry, EntryState, Execution, Kind, StoredStatus, fetch, fetch_execution, next_page,
};
use crate::workflow::{Boxed, Cancelled, ExecutionId, Result, WorkflowError};

/// How many writes of a fork one commit holds at most.
const WRITES: usize = 1000;

/// A fork that is about to be started. Await it: it returns the id of the new execution, which is then stored and
/// survives a crash.
#[must_use = "nothing is forked until this is awaited"]
pub struct Fork {
    engine: Arc<EngineInner>,
    source: ExecutionId,
    at: At,
    id: Option<ExecutionId>,
    input: Option<Result<String, json::JsonError>>,
}

/// Where an execution is forked.
enum At {
    Start,
    Place(String),
    Step(String),
}

/// The execution that is forked, in one view.
struct ForkSource {
    execution: Execution,
    /// In the order of the code.
    entries: Vec<(Place, RecordedEntry)>,
}

impl Engine {
    /// Forks an execution. The new execution keeps what the source has recorded before a place, and runs the rest
    /// again, with the code that is registered now. Messages that the source has not received stay with the source. The
    /// fork has its own slots, with the values that the slots of the source had at that place.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// let id = engine.fork("order-7").at_step("ship").id("order-7-again").await?;
    /// # Ok(()) }
    /// ```
    pub fn fork(&self, id: impl Into<ExecutionId>) -> Fork {
        Fork { engine: self.inner.clone(), source: id.into(), at: At::Start, id: None, input: None }
    }
}

impl Fork {
    /// Forks at the operation of this place, which is the first to run again: `3`, or `3.1/0` for the first operation
    /// in the second branch of the fork at place 3. The branches beside that one keep what they have recorded. Without
    /// a place, nothing is kept.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// let id = engine.fork("order-7").at("3").await?;
    /// # Ok(()) }
    /// ```
    pub fn at(mut self, place: impl Into<String>) -> Fork {
        self.at = At::Place(place.into());
        self
    }

    /// Forks at the first step of this name.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// let id = engine.fork("order-7").at_step("ship").await?;
    /// # Ok(()) }
    /// ```
    pub fn at_step(mut self, name: impl Into<String>) -> Fork {
        self.at = At::Step(name.into());
        self
    }

    /// Sets the id; without this, the id is a new UUIDv7. An id that is in use is refused.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// engine.fork("order-7").at_step("ship").id("order-7-again").await?;
    /// # Ok(()) }
    /// ```
    pub fn id(mut self, id: impl Into<ExecutionId>) -> Fork {
        self.id = Some(id.into());
        self
    }

    /// Sets another input. Kept results stay, though they may come from the old input.
    ///
    /// ```
    /// # use latchwork::workflow::{Engine, Result};
    /// # async fn example(engine: Engine) -> Result<()> {
    /// let id = engine.fork("order-7").input(&8).await?;
    /// # Ok(()) }
    /// ```
    pub fn input(mut self, input: &(impl Serialize + ?Sized)) -> Fork {
        self.input = Some(json::to_value(input).map(|input| input.to_string()));
        self
    }

    async fn start(self) -> Result<ExecutionId> {
        let Fork { engine, source: source_id, at, id, input } = self;
        if let Some(id) = &id {
            check_name("the id of an execution", id)?;
        }
        if engine.is_stopped() {
            return Err(WorkflowError::Stopped);
        }
        let view = engine.store.view().await?;
        let source = ForkSource::read(&engine, &view, &source_id).await?;
        let name = source.execution.workflow.clone();
        let input = match input {
            Some(input) => input,
            None if source.execution.is_batch() => Ok(engine.gathered(&source_id).await?),
            None => Ok(source.execution.input.clone()),
        };
        let (definition, input) = engine.accept(&name, None, input)?;
        definition.check_whole(&input)?;
        let id = id.unwrap_or_else(|| engine.store.env().uuid().to_string().into());
        if view.get(&engine.record_of(&id)).await?.is_some() {
            return Err(WorkflowError::AlreadyStarted { id });
        }
        let place = source.place(&source_id, &at)?;
        let mut kept = source.kept(place.as_ref());
        let mut slots = Vec::new();
        for (its, own) in source.scopes(&engine.states, &source_id, &id) {
            let found = source.slots(&engine, &view, &source_id, its.all(), place.as_ref(), &kept).await?;
            slots.extend(found.into_iter().map(|(key, value)| Write::Put(its.namesake(&key, &own), value)));
        }
        for (place, entry) in &mut kept {
            // The arguments of an operation may depend on the input or on the execution's id.
            entry.argument = ANYTHING;
            keep_birth(entry, &source_id, &source.execution, place);
        }
        let (now, labels) = (engine.store.env().now(), source.execution.labels.clone());
        let first = definition.first_record(input, labels, now, now);
        let reviews = source.reviews(&engine, &view, &source_id, &id, &kept).await?;
        let (forked, has_reviews) = (Some(source_id.to_string()), !reviews.is_empty());
        let execution = Execution { forked, has_reviews, ..first };
        let mut writes = source.writes(&engine, &view, &source_id, &id, &kept).await?;
        writes.extend(reviews);
        writes.extend(slots);
        // The fork is loaded even if the caller is dropped.
        let (inner, forked) = (engine.clone(), id.clone());
        let stored = engine.node.runtime.run(async move {
            store(&inner, &forked, execution, writes, &definition).await?;
            inner.metrics.started(&definition.name);
            inner.spawn_load(&forked);
            Ok(())
        });
        stored.await.unwrap_or(Err(WorkflowError::Stopped))?;
        Ok(id)
    }
}

impl IntoFuture for Fork {
    type Output = Result<ExecutionId>;
    type IntoFuture = Boxed<'static, Self::Output>;

    fn into_future(self) -> Self::IntoFuture {
        Box::pin(self.start())
    }
}

impl ForkSource {
    async fn read(engine: &EngineInner, view: &View, id: &ExecutionId) -> Result<ForkSource> {
        let found = fetch_execution(view, &engine.spaces.executions, id).await?;
        let (execution, item) = found.ok_or_else(|| WorkflowError::NotFound { id: id.clone() })?;
        let entries = entries(view, &engine.spaces.journal, id, &execution, &item).await?;
        Ok(ForkSource { execution, entries })
    }

    /// The place of the first operation that runs again. None if everything does.
    fn place(&self, id: &ExecutionId, at: &At) -> Result<Option<Place>> {
        let (at, found) = match at {
            At::Start => return Ok(None),
            At::Place(text) => {
                let place = text.parse::<Place>().ok();
                (text.clone(), place.filter(|place| self.entries.iter().any(|(known, _)| known == place)))
            }
            At::Step(name) => {
                let is_it = |entry: &Entry| entry.kind == Kind::Step && *entry.name == **name;
                let found = self.entries.iter().find(|(_, it)| is_it(&it.entry)).map(|(place, _)| place.clone());
                (format!("step {name:?}"), found)
            }
        };
        let reason = || "it has not reached such an operation".to_string();
        if found.as_ref().is_some_and(|place| place.branch.is_named()) {
            // Of the states of its blocks only the latest versions are stored.
            let reason = "a flow is forked from its start only".to_string();
            return Err(WorkflowError::Fork { id: id.clone(), at, reason });
        }
        found.map(Some).ok_or_else(|| WorkflowError::Fork { id: id.clone(), at, reason: reason() })
    }

    /// The entries that the fork keeps.
    fn kept(&self, at: Option<&Place>) -> BTreeMap<Place, Entry> {
        let Some(at) = at else { return BTreeMap::new() };
        let mut kept = BTreeMap::new();
        for (place, RecordedEntry { entry, .. }) in &self.entries {
            match fate(place, at) {
                EntryFate::Kept => kept.insert(place.clone(), entry.clone()),
                EntryFate::Reset => kept.insert(place.clone(), Entry { state: EntryState::Begun, ..entry.clone() }),
                EntryFate::Dropped => None,
            };
        }
        // In a branch that runs again nothing has failed yet: the branches beside it continue where they were
        // cancelled.
        let is_reset = |place: &Place| {
            kept.iter().any(|(fork, it): (&Place, &Entry)| {
                is_fork(it) && it.state == EntryState::Begun && fork.beside(&place.branch).is_some()
            })
        };
        let called_off = kept.iter().filter(|(place, entry)| is_called_off(entry) && is_reset(place));
        let called_off: Vec<Place> = called_off.map(|(place, _)| place.clone()).collect();
        let is_after = |place: &Place, cut: &Place| place.branch.is_within(&cut.branch) && place.along() >= cut.along();
        kept.retain(|place, _| !called_off.iter().any(|cut| is_after(place, cut)));
        // Finished operations are kept, and also unfinished ones before them: the code dropped those and continued.
        let mut last: BTreeMap<BranchPath, u32> = BTreeMap::new();
        for (place, entry) in &kept {
            let is_kept = is_fork(entry) || is_finished(entry);
            if is_kept {
                let last = last.entry(place.branch.clone()).or_default();
                *last = (*last).max(place.number);
            }
        }
        kept.retain(|place, _| last.get(&place.branch).is_some_and(|last| place.number <= *last));
        acquire_anew(&mut kept);
        kept
    }

    /// The slots that the fork copies, and their copies: the slots of the source and those of its tree. A fork is the
    /// root of its own tree.
    fn scopes(&self, states: &States, id: &ExecutionId, fork: &ExecutionId) -> [(Slots, Slots); 2] {
        let root = self.execution.parent.as_ref().map_or(id, |parent| &parent.root);
        [(states.execution(id), states.execution(fork)), (states.tree(root), states.tree(fork))]
    }

    /// The values of slots after the kept operations, by the keys of the source.
    async fn slots(
        &self,
        engine: &EngineInner,
        view: &View,
        id: &ExecutionId,
        mut rest: Range,
        at: Option<&Place>,
        kept: &BTreeMap<Place, Entry>,
    ) -> Result<Vec<(Key, Bytes)>> {
        let is_kept = |place: &Place| kept.get(place).is_some_and(is_finished);
        let (kept, dropped): (Vec<_>, Vec<_>) = self.entries.iter().partition(|(place, _)| is_kept(place));
        let Some(last) = kept.iter().map(|(_, it)| it.generation).max() else { return Ok(Vec::new()) };
        let changes = dropped.iter().filter(|(_, it)| changes_slots(&it.entry)).map(|(_, it)| it.generation);
        let undone: BTreeSet<Generation> = changes.collect();
        let mut slots = Vec::new();
        while let Some(found) = next_page(view, &mut rest, WRITES).await? {
            for (key, item) in found {
                let was = match slot_at(engine, &key, item, last, &undone).await {
                    Err(WorkflowError::Store(StoreError::HistoryDropped { .. })) => {
                        let reason = "a slot of the execution was changed after that, and what it held then is no \
                                      longer in the history of `state`";
                        let at = at.map(Place::to_string).unwrap_or_default();
                        return Err(WorkflowError::Fork { id: id.clone(), at, reason: reason.into() });
                    }
                    was => was?,
                };
                slots.extend(was.map(|value| (key, value)));
            }
        }
        Ok(slots)
    }

    /// The reviews that kept operations opened, under the fork's id. Reviews that the fork still has to wait for are
    /// open: each execution gets a decision of its own.
    async fn reviews(
        &self,
        engine: &EngineInner,
        view: &View,
        source: &ExecutionId,
        id: &ExecutionId,
        kept: &BTreeMap<Place, Entry>,
    ) -> Result<Vec<Write>> {
        let mut waited: BTreeMap<&str, usize> = BTreeMap::new();
        let decisions = kept.values().filter(|entry| entry.kind == Kind::Decision && is_finished(entry));
        decisions.for_each(|entry| *waited.entry(&entry.name).or_default() += 1);
        let mut writes = Vec::new();
        for (place, entry) in kept.iter().filter(|(_, entry)| entry.kind == Kind::Review) {
            let EntryState::Done(text) = &entry.state else { continue };
            let Ok((token, _)) = serde_json::from_str::<(Uuid, Option<u64>)>(text) else { continue };
            let key = engine.kept(source).review(token, &entry.name);
            let found = fetch::<ReviewRecord>(view, &key, || format!("review {token} of {source:?}")).await?;
            let Some((mut record, _)) = found else { continue };
            let left = waited.get_mut(&*entry.name).filter(|left| **left > 0);
            let is_over = left.map(|left| *left -= 1).is_some();
            if !is_over {
                record.decision = None;
            }
            if !is_over && !is_given_up(place, kept) {
                let open = review_key(&record.workflow, &record.name, token, id);
                writes.push(Write::Put(engine.open_reviews().key(open), Bytes::new()));
            }
            writes.push(Write::Put(engine.kept(id).review(token, &entry.name), record.encode()));
        }
        Ok(writes)
    }

    /// All records of the fork except its execution record, its slots and its reviews.
    async fn writes(
        &self,
        engine: &EngineInner,
        view: &View,
        source: &ExecutionId,
        id: &ExecutionId,
        kept: &BTreeMap<Place, Entry>,
    ) -> Result<Vec<Write>> {
        let journal = &engine.spaces.journal;
        let mut writes = Vec::with_capacity(kept.len() + 1);
        for (place, entry) in kept {
            writes.push(Write::Put(journal.key(journal_key(id, 0, place)), entry.encode_with(None)));
        }
        let of_kind = |kind: Kind| kept.values().filter(move |entry| entry.kind == kind && is_finished(entry));
        let names: BTreeSet<&str> = of_kind(Kind::Publish).map(|entry| &*entry.name).collect();
        if !names.is_empty()
            && let Some((mut published, _)) = engine.kept(source).fetch_published(view).await?
        {
            published.0.retain(|name, _| names.contains(&**name));
            writes.push(Write::Put(engine.kept(id).published(), published.encode()));
        }
        let mut completed: BTreeMap<&str, usize> = BTreeMap::new();
        of_kind(Kind::Completion).filter(|entry| is_completed(entry)).for_each(|entry| {
            *completed.entry(&entry.name).or_default() += 1;
        });
        for entry in of_kind(Kind::Token) {
            let EntryState::Done(text) = &entry.state else { continue };
            let Ok(token) = text.trim_matches('"').parse::<Uuid>() else { continue };
            // The token also exists under the fork's id, so that the wait of the fork can be completed, too.
            let left = completed.get_mut(&*entry.name).filter(|left| **left > 0);
            let is_used = left.map(|left| *left -= 1).is_some();
            let record = Token { name: entry.name.to_string(), is_used };
            writes.push(Write::Put(engine.kept(id).token(token), record.encode()));
        }
        Ok(writes)
    }
}

/// Stores a fork, in one commit if it fits. Otherwise the fork is parked until everything is stored.
async fn store(
    engine: &Arc<EngineInner>,
    id: &ExecutionId,
    execution: Execution,
    writes: Vec<Write>,
    definition: &Definition,
) -> Result<()> {
    let asked = definition.asked_by_fork(&execution.input)?;
    let limits = engine.store.limits();
    // The list keys are written with the record and need room, too.
    let most = limits.commit_bytes.saturating_sub(execution.encode().len() + (limits.commit_bytes >> 2));
    let mut chunks = chunks(writes, most, WRITES.min(limits.operations / 2));
    let last = chunks.pop().unwrap_or_default();
    let mut before = None;
    if !chunks.is_empty() {
        // If a limit rejects the fork, that happens before anything is stored.
        if let Some(asked) = &asked {
            engine.would_run(definition, asked).await?;
        }
        let reason = "the fork is incomplete; terminate it and fork again".to_string();
        let mut parked = Execution { status: StoredStatus::Parked(reason), ..execution.clone() };
        let (part, _) = with_record(engine, engine.at_record(id, None), id, None, &mut parked, None);
        let rev = landed(engine, id, part).await?;
        for chunk in chunks {
            landed(engine, id, chunk.into_iter().fold(engine.at_record(id, Some(rev)), Part::write)).await?;
        }
        before = Some((parked, rev));
    }
    let (before, rev) = before.unzip();
    loop {
        let mut first = execution.clone();
        let (admission, _turn) = match &asked {
            Some(asked) => match engine.admitting(definition, asked, id, &mut first).await {
                Err(error) if error.is_rejection() => {
                    discard(engine, id, before.as_ref().zip(rev)).await?;
                    return Err(error);
                }
                admitting => admitting?,
            },
            None => Default::default(),
        };
        let part = last.iter().cloned().fold(engine.at_record(id, rev).and(admission), Part::write);
        let timer = first.timer_us.filter(|_| first.status == StoredStatus::Waiting);
        let (part, _) = with_record(engine, part, id, before.as_ref(), &mut first, None);
        let sent = engine.send(part).await?;
        if sent.is_some() {
            timer.into_iter().for_each(|timer| engine.timers.set(id, Timestamp(timer)));
            return Ok(());
        }
        // Refused because the id is in use, or because other starts were faster.
        if asked.is_none() || engine.read(id).await?.map(|(_, rev)| rev) != rev {
            return Err(WorkflowError::AlreadyStarted { id: id.clone() });
        }
    }
}

/// Removes what is stored of a fork that a limit has rejected after all. It has never begun, so its end notifies no
/// one.
async fn discard(engine: &Arc<EngineInner>, id: &ExecutionId, parked: Option<(&Execution, Rev)>) -> Result<()> {
    let Some((parked, rev)) = parked else { return Ok(()) };
    let mut ended =
        Execution { status: StoredStatus::Cancelled("a limit has rejected the fork".into()), ..parked.clone() };
    let (part, _) = with_record(engine, engine.at_record(id, Some(rev)), id, Some(parked), &mut ended, None);
    if engine.send(part).await?.is_some() {
        engine.purge(id).await?;
    }
    Ok(())
}

/// Commits a part, and returns the rev of its last write.
async fn landed(engine: &EngineInner, id: &ExecutionId, part: Part) -> Result<Rev> {
    let receipt = engine.send(part).await?.ok_or_else(|| WorkflowError::AlreadyStarted { id: id.clone() })?;
    Ok(receipt.revs.last().copied().flatten().unwrap_or_default())
}

/// Splits writes into chunks of at most this many bytes and writes.
fn chunks(writes: Vec<Write>, bytes: usize, count: usize) -> Vec<Vec<Write>> {
    let (mut chunks, mut length): (Vec<Vec<Write>>, usize) = (Vec::new(), 0);
    for write in writes {
        let value = if let Write::Put(_, value) = &write { value.len() } else { 0 };
        let size = write.key().bytes().len() + value;
        length += size;
        match chunks.last_mut() {
            Some(last) if length <= bytes && last.len() < count => last.push(write),
            _ => {
                length = size;
                chunks.push(vec![write]);
            }
        }
    }
    chunks
}

/// What happens to a recorded operation in a fork.
#[derive(Debug, PartialEq, Eq)]
enum EntryFate {
    Kept,
    /// A fork of the code on the way to the place: which of its branches was first is forgotten.
    Reset,
    Dropped,
}

/// What happens to an operation when an execution is forked at a place.
fn fate(place: &Place, at: &Place) -> EntryFate {
    let (its, way) = (place.branch.steps(), at.branch.steps());
    let mut depth = 0;
    loop {
        let cut = way.get(depth).map_or(at.number, |(number, _)| *number);
        let number = its.get(depth).map_or(place.number, |(number, _)| *number);
        match number.cmp(&cut) {
            std::cmp::Ordering::Less => return EntryFate::Kept,
            std::cmp::Ordering::Greater => return EntryFate::Dropped,
            std::cmp::Ordering::Equal => {}
        }
        match (its.get(depth), way.get(depth)) {
            // At the place, or forked from there.
            (_, None) => return EntryFate::Dropped,
            (None, Some(_)) => return EntryFate::Reset,
            (Some((_, its)), Some((_, way))) if its != way => return EntryFate::Kept,
            (Some(_), Some(_)) => depth += 1,
        }
    }
}

/// The fork must acquire the locks that the source held at that place, and requests again what the source waited for.
fn acquire_anew(kept: &mut BTreeMap<Place, Entry>) {
    let released = |entry: &Entry| match &entry.state {
        EntryState::Done(text) if entry.kind == Kind::Unlock => serde_json::from_str::<Unlocked>(text).ok(),
        _ => None,
    };
    let released: BTreeSet<String> = kept.values().filter_map(released).map(|(_, _, acquired)| acquired).collect();
    for (place, entry) in kept.iter_mut().filter(|(_, entry)| entry.kind == Kind::Lock) {
        match &entry.state {
            EntryState::Done(text) => {
                let ticket: Option<u64> = serde_json::from_str(text).ok().flatten();
                if ticket.is_some() && !released.contains(&place.to_string()) {
                    entry.state = EntryState::Anew;
                }
            }
            EntryState::Queued { .. } => entry.state = EntryState::Begun,
            _ => {}
        }
    }
}

/// The value of a slot at a generation, without the changes of the `undone` commits.
async fn slot_at(
    engine: &EngineInner,
    key: &Key,
    mut item: Item,
    last: Generation,
    undone: &BTreeSet<Generation>,
) -> Result<Option<Bytes>> {
    while item.generation > last || undone.contains(&item.generation) {
        if item.rev == Rev(1) {
            return Ok(None);
        }
        let before = Generation(last.0.min(item.generation.0 - 1));
        match engine.store.view_at(before).await?.get(key).await? {
            Some(earlier) => item = earlier,
            None => return Ok(None),
        }
    }
    Ok(Some(item.value))
}

/// True if the commit that recorded this entry may have changed slots.
fn changes_slots(entry: &Entry) -> bool {
    matches!(entry.kind, Kind::Slot | Kind::Transaction) && matches!(entry.state, EntryState::Done(_))
}

fn is_fork(entry: &Entry) -> bool {
    matches!(entry.kind, Kind::Join | Kind::Race)
}

/// True if a place is in a branch that was dropped because another branch was first.
fn is_given_up(place: &Place, kept: &BTreeMap<Place, Entry>) -> bool {
    kept.iter().filter(|(_, entry)| is_fork(entry)).any(|(fork, entry)| {
        let EntryState::Done(text) = &entry.state else { return false };
        let first = serde_json::from_str::<(usize, usize)>(text).map(|(first, _)| first);
        fork.beside(&place.branch).is_some_and(|branch| first.is_ok_and(|first| first != branch))
    })
}

/// True if it was cancelled because a branch beside it has failed.
fn is_called_off(entry: &Entry) -> bool {
    let EntryState::Gave(text) = &entry.state else { return false };
    read_failure(text).get::<Cancelled>().is_some_and(|cancelled| cancelled.reason == CALLED_OFF)
}

/// True if the token was completed or failed; false if the wait timed out or was cancelled.
fn is_completed(entry: &Entry) -> bool {
    match &entry.state {
        EntryState::Gave(text) => {
            let failure = read_failure(text);
            !failure.is_time() && !failure.is_cancelled()
        }
        _ => is_finished(entry),
    }
}

fn is_finished(entry: &Entry) -> bool {
    matches!(entry.state, EntryState::Done(_) | EntryState::Gave(_) | EntryState::Saw { .. })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn operations_before_the_place_are_kept_in_every_branch_on_the_way() {
        let all =
            ["0", "3", "4", "2.0/5", "3.0/0", "3.0/9", "3.1/0", "3.1/1", "3.1/2", "3.1/1.0/0", "3.1/0.1/7", "4.0/0"];
        let cases: [(&str, &[&str], &[&str]); 4] = [
            ("0", &[], &[]),
            ("3", &["0", "2.0/5"], &[]),
            ("4", &["0", "3", "2.0/5", "3.0/0", "3.0/9", "3.1/0", "3.1/1", "3.1/2", "3.1/1.0/0", "3.1/0.1/7"], &[]),
            ("3.1/1", &["0", "2.0/5", "3.0/0", "3.0/9", "3.1/0", "3.1/0.1/7"], &["3"]),
        ];
        for (at, kept, reset) in cases {
            for text in all {
                let expected = match (kept.contains(&text), reset.contains(&text)) {
                    (true, _) => EntryFate::Kept,
                    (_, true) => EntryFate::Reset,
                    _ => EntryFate::Dropped,
                };
                let (place, at): (Place, Place) = (text.parse().unwrap(), at.parse().unwrap());
                assert_eq!(fate(&place, &at), expected, "{place} of a fork at {at}");
            }
        }
    }
}
