//! Explains a history by one order of its commits, or reports why that is impossible. The generations are the order.
//! The reference replays it. The ticks show whether a call that began after another had ended also comes after it.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::AddAssign;

use bytes::Bytes;
use latchwork_store::{Commit, CommitId, Generation, Outcome, Receipt, Timestamp};

use super::record::{Event, Recorded, What};
use crate::reference::Reference;

/// The counts of an explained history.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Summary {
    pub(crate) applied: usize,
    pub(crate) refused: usize,
    pub(crate) reads: usize,
    pub(crate) delivered: usize,
}

impl AddAssign for Summary {
    fn add_assign(&mut self, other: Summary) {
        self.applied += other.applied;
        self.refused += other.refused;
        self.reads += other.reads;
        self.delivered += other.delivered;
    }
}

/// Why a history does not count.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Violation {
    /// No order explains it.
    Broken(String),
    /// Fewer than one commit in ten was refused, so the history proves little about races.
    Void { commits: usize, refused: usize },
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Violation::Broken(why) => f.write_str(why),
            Violation::Void { commits, refused } => {
                write!(f, "the history is void: {refused} of {commits} commits were refused, which is less than 10%")
            }
        }
    }
}

type Checked = Result<(), Violation>;

fn ensure(holds: bool, why: impl FnOnce() -> String) -> Checked {
    if holds { Ok(()) } else { Err(Violation::Broken(why())) }
}

/// An applied commit that got a generation.
struct Applied<'a> {
    id: Option<CommitId>,
    commit: &'a Commit,
    receipt: &'a Receipt,
}

pub(crate) fn check(recorded: &Recorded) -> Result<Summary, Violation> {
    let order = order(recorded)?;
    let reference = replay(recorded.start, &order)?;
    let mut summary = Summary::default();
    for event in &recorded.events {
        match &event.what {
            What::Commit { outcome: Outcome::Applied(_), .. } => summary.applied += 1,
            What::Commit { outcome: Outcome::Refused(_), .. } => summary.refused += 1,
            What::Read { .. } => summary.reads += 1,
        }
        check_answer(&reference, &order, event)?;
    }
    check_real_time(&recorded.events)?;
    for delivered in &recorded.deliveries {
        let expected = reference.changes(&recorded.watched, recorded.start, reference.generation());
        let difference = delivered.iter().zip(&expected).find(|(got, wanted)| got != wanted);
        ensure(difference.is_none(), || format!("a watch returned something else: {difference:?}"))?;
        let (got, wanted) = (delivered.len(), expected.len());
        ensure(got == wanted, || format!("a watch returned {got} commits of {wanted}"))?;
        summary.delivered += delivered.len();
    }
    let commits = summary.applied + summary.refused;
    if summary.refused * 10 < commits {
        return Err(Violation::Void { commits, refused: summary.refused });
    }
    Ok(summary)
}

/// Returns the commits by generation. The generations must be different and without gaps.
fn order(recorded: &Recorded) -> Result<BTreeMap<Generation, Applied<'_>>, Violation> {
    let mut order = BTreeMap::new();
    for event in &recorded.events {
        let What::Commit { id, commit, outcome: Outcome::Applied(receipt) } = &event.what else { continue };
        if receipt.repeated || !(receipt.changed() || id.is_some()) {
            continue;
        }
        let twice = order.insert(receipt.generation, Applied { id: *id, commit, receipt });
        ensure(twice.is_none(), || format!("generation {} was given to two commits", receipt.generation))?;
    }
    let dense = order.keys().copied().eq((recorded.start.0 + 1..).take(order.len()).map(Generation));
    ensure(dense, || "generations have gaps".into())?;
    Ok(order)
}

/// Applies the commits in their order. The checks of each commit must hold at its position.
fn replay(start: Generation, order: &BTreeMap<Generation, Applied<'_>>) -> Result<Reference, Violation> {
    let mut reference = Reference::at(start);
    let mut time = Timestamp(0);
    for (generation, Applied { id, commit, receipt }) in order {
        let failed = reference.failed(commit.checks(), reference.generation(), |_| Generation(0));
        let holds = failed.as_ref().is_ok_and(Vec::is_empty);
        ensure(holds, || format!("commit {generation} was applied, but {failed:?}"))?;
        let expected = reference.apply(&Bytes::new(), commit.writes(), receipt.time, id.is_some());
        ensure(expected == **receipt, || format!("commit {generation} got {receipt:?} instead of {expected:?}"))?;
        ensure(receipt.time >= time, || format!("time went back at generation {generation}"))?;
        time = receipt.time;
    }
    Ok(reference)
}

/// Compares an answer with the state at the generation that it names.
fn check_answer(reference: &Reference, order: &BTreeMap<Generation, Applied<'_>>, event: &Event) -> Checked {
    let latest = reference.generation();
    let seen = event.what.generation();
    ensure(seen <= latest, || format!("{event:?} has a generation that no commit got"))?;
    match &event.what {
        What::Read { generation, found } => {
            for (key, item) in found {
                let expected = reference.item(key, *generation);
                ensure(*item == expected, || format!("{key} at {generation} was {item:?} and not {expected:?}"))?;
            }
            Ok(())
        }
        What::Commit { commit, outcome: Outcome::Refused(refusal), .. } => {
            let expected = reference.failed(commit.checks(), refusal.generation, |_| Generation(0));
            let refusal = reference.canonical(refusal.clone());
            let right = !refusal.failed.is_empty() && expected.as_ref() == Ok(&refusal.failed);
            ensure(right, || format!("{refusal}, but {expected:?}"))
        }
        What::Commit { id, commit, outcome: Outcome::Applied(receipt) } if receipt.repeated => {
            let first = order.get(&receipt.generation);
            let right = first.is_some_and(|first| {
                let again = Receipt { repeated: true, ..first.receipt.clone() };
                first.id == *id && id.is_some() && first.commit.writes() == commit.writes() && again == *receipt
            });
            ensure(right, || format!("{receipt:?} repeats a receipt that was never returned"))
        }
        What::Commit { id: None, commit, outcome: Outcome::Applied(receipt) } if !receipt.changed() => {
            let failed = reference.failed(commit.checks(), receipt.generation, |_| Generation(0));
            let idle = commit.writes().iter().all(|write| reference.live(write.key(), receipt.generation).is_none());
            let right = idle && failed.as_ref().is_ok_and(Vec::is_empty);
            ensure(right, || format!("{receipt:?} changed nothing, but {failed:?}"))
        }
        What::Commit { .. } => Ok(()),
    }
}

/// A call that began after another had ended must not answer from an older state, and a commit must get a newer
/// generation.
fn check_real_time(events: &[Event]) -> Checked {
    let mut by_start: Vec<&Event> = events.iter().collect();
    let mut by_end = by_start.clone();
    by_start.sort_by_key(|event| event.began);
    by_end.sort_by_key(|event| event.ended);
    let mut ended = by_end.into_iter().peekable();
    let mut newest: Option<&Event> = None;
    for event in by_start {
        while let Some(over) = ended.next_if(|over| over.ended < event.began) {
            if newest.is_none_or(|newest| over.what.generation() > newest.what.generation()) {
                newest = Some(over);
            }
        }
        let Some(newest) = newest else { continue };
        let (seen, before) = (event.what.generation(), newest.what.generation());
        let right = match &event.what {
            What::Commit { outcome: Outcome::Applied(receipt), .. } if receipt.repeated => true,
            What::Commit { id, outcome: Outcome::Applied(receipt), .. } if receipt.changed() || id.is_some() => {
                seen > before
            }
            What::Commit { .. } | What::Read { .. } => seen >= before,
        };
        ensure(right, || format!("{event:?} began after this had ended, but has not seen it: {newest:?}"))?;
    }
    Ok(())
}

impl What {
    /// The generation of the answer.
    fn generation(&self) -> Generation {
        match self {
            What::Commit { outcome: Outcome::Applied(receipt), .. } => receipt.generation,
            What::Commit { outcome: Outcome::Refused(refusal), .. } => refusal.generation,
            What::Read { generation, .. } => *generation,
        }
    }
}
