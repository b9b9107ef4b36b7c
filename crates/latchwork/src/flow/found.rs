//! What an earlier life of a request has left: the entries of its blocks, their checkpoints, and what a crash has kept
//! from being removed. It does not know what blocks do.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::flow::checkpoint::Checkpoint;
use crate::record::Record;
use crate::store::{Key, Order};
use crate::workflow::WorkflowError;
use crate::workflow::journal::place::{BranchPath, Place, TRACE};
use crate::workflow::operate::history::read_entry;
use crate::workflow::run::Run;
use crate::workflow::stored::keys::{journal_key, run_key};
use crate::workflow::stored::record::{Entry, EntryState, Kind, next_page};

/// How many records are read at once.
const PAGE: usize = 1000;

/// What an earlier life of a request has left.
#[derive(Default)]
pub(crate) struct Found {
    pub(crate) entries: BTreeMap<Place, Entry>,
    pub(crate) checkpoints: BTreeMap<BranchPath, Checkpoint>,
    /// The keys of what later commits were to remove.
    pub(crate) litter: Vec<Key>,
}

/// Forgets the entries of a block and of what lies in it.
pub(crate) fn forget_within(entries: &mut BTreeMap<Place, Entry>, block: &BranchPath) {
    let within = entries.range(block.at(0)..).map(|(place, _)| place);
    let within: Vec<Place> = within.take_while(|place| place.branch.is_within(block)).cloned().collect();
    within.iter().for_each(|place| drop(entries.remove(place)));
}

/// Reads what an earlier life has left. The entries of blocks are known to the run from now on.
pub(crate) async fn load(run: &Arc<Run>) -> Result<Found, WorkflowError> {
    let (engine, kept, mut found) = (&run.engine, run.kept(), Found::default());
    let view = engine.store.view().await?;
    let mut entries = Vec::new();
    let mut rest = engine.spaces.journal.prefix(run_key(&run.id, run.number().1));
    while let Some(page) = next_page(&view, &mut rest, PAGE).await? {
        for (key, item) in page {
            let (place, entry, _) = read_entry(&run.id, &key, &item.value)?;
            if place.branch.is_named() {
                entries.push((place, entry));
            }
        }
    }
    // They are almost in order, so this is much faster than to insert each.
    found.entries = entries.into_iter().collect();
    let mut rest = kept.checkpoints();
    while let Some(page) = next_page(&view, &mut rest, PAGE).await? {
        for (key, item) in page {
            let damaged = || WorkflowError::corrupt(format!("a checkpoint of execution {:?}", run.id));
            let path = kept.read_checkpoint(&key).ok_or_else(damaged)?;
            let checkpoint = Checkpoint::decode(&item.value);
            let checkpoint =
                checkpoint.map_err(|why| why.at(format!("checkpoint {path} of execution {:?}", run.id)))?;
            found.checkpoints.insert(path, checkpoint);
        }
    }
    let last = view.scan(&kept.events(0), Order::Descending, 1).await?;
    let next = last.first().and_then(|(key, _)| kept.read_event(key)).map_or(0, |last| last + 1);
    let (over, past) = left_behind(&found.entries, &found.checkpoints);
    let key = |place: &Place| engine.spaces.journal.key(journal_key(&run.id, run.number().1, place));
    found.litter.extend(over.iter().map(key));
    found.litter.extend(past.iter().map(|path| kept.checkpoint(path)));
    over.iter().for_each(|place| drop(found.entries.remove(place)));
    past.iter().for_each(|path| drop(found.checkpoints.remove(path)));
    run.with(|state| {
        state.found(found.entries.keys());
        state.beside.continue_at(next);
    });
    Ok(found)
}

/// What lies in blocks that have ended, and in earlier rounds of loops: entries, and checkpoints of rounds. A crash has
/// come before the commits that were to remove it.
fn left_behind(
    entries: &BTreeMap<Place, Entry>,
    checkpoints: &BTreeMap<BranchPath, Checkpoint>,
) -> (BTreeSet<Place>, BTreeSet<BranchPath>) {
    let (mut over, mut past) = (BTreeSet::new(), BTreeSet::new());
    let (mut rest, mut last) = (entries.iter().peekable(), None);
    while let Some((trace, entry)) = rest.next() {
        // In the order of places, what lies in a block is around its trace.
        let beside = [last.replace(trace), rest.peek().map(|(place, _)| *place)];
        if trace.number != TRACE {
            continue;
        }
        let block = &trace.branch;
        let round = match (&entry.state, &entry.progress) {
            (EntryState::Done(_) | EntryState::Gave(_), _) => u32::MAX,
            (_, Some(progress)) if entry.kind == Kind::Loop => {
                serde_json::from_str(progress).map_or(0, |(round, _): (u32, serde::de::IgnoredAny)| round)
            }
            _ => continue,
        };
        let is_past = |path: &BranchPath| path.nth_after(block).is_none_or(|nth| nth < round);
        if beside.into_iter().flatten().any(|place| place.branch.is_within(block)) {
            let within = entries.range(block.at(0)..).map(|(place, _)| place);
            let within = within.take_while(|place| place.branch.is_within(block));
            over.extend(within.filter(|place| *place != trace && is_past(&place.branch)).cloned());
        }
        if entry.kind == Kind::Loop {
            let within = checkpoints.range(block.clone()..).map(|(path, _)| path);
            let within = within.take_while(|path| path.is_within(block)).filter(|path| *path != block);
            past.extend(within.filter(|path| is_past(path)).cloned());
        }
    }
    (over, past)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::store::Timestamp;

    fn entry(kind: Kind, state: EntryState, progress: Option<&str>) -> Entry {
        let entry = Entry::new(kind, "x", 0, Timestamp(1), state);
        Entry { progress: progress.map(Into::into), ..entry }
    }

    /// A sequencer that has ended, a loop in its third round, and a loop that has ended: each has left something.
    #[test]
    fn what_lies_in_ended_blocks_and_earlier_rounds_is_left_behind() {
        let chain = BranchPath::default().named("chain", 0);
        let (ended, runs) = (chain.named("ended", 0), chain.named("runs", 0));
        let (loops, over) = (chain.named("loops", 0), chain.named("over", 0));
        let done = || EntryState::Done("1".into());
        let round = |at: &BranchPath, nth: u32| at.named("loops", nth).named("a", 0);
        let entries = BTreeMap::from([
            (ended.trace(), entry(Kind::Sequencer, done(), None)),
            (ended.named("a", 0).trace(), entry(Kind::Handler, done(), None)),
            (ended.named("a", 0).at(0), entry(Kind::Step, done(), None)),
            (runs.trace(), entry(Kind::Sequencer, EntryState::Begun, None)),
            (runs.named("a", 0).at(0), entry(Kind::Step, done(), None)),
            (loops.trace(), entry(Kind::Loop, EntryState::Begun, Some("[2,7]"))),
            (round(&loops, 1).trace(), entry(Kind::Handler, EntryState::Begun, None)),
            (round(&loops, 2).trace(), entry(Kind::Handler, EntryState::Begun, None)),
            (over.trace(), entry(Kind::Loop, done(), None)),
        ]);
        let new = || Checkpoint { state: json!({}), rev: 1, held: Vec::new() };
        let paths = [&chain, &ended, &round(&loops, 1), &round(&loops, 2), &round(&over, 5)];
        let checkpoints = paths.into_iter().map(|path| (path.clone(), new())).collect();
        let (left, past) = left_behind(&entries, &checkpoints);
        let expected = [ended.named("a", 0).at(0), ended.named("a", 0).trace(), round(&loops, 1).trace()];
        assert_eq!(left, expected.into());
        assert_eq!(past, [round(&loops, 1), round(&over, 5)].into(), "of other blocks the last one is kept");
    }
}
