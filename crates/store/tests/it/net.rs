//! Tests of the tests: the comparison with the reference and the check of histories must find a store that is broken on
//! purpose. A check that misses these defects would also miss others.

use latchwork_store::disk::sim::SimDisk;
use latchwork_store::{Generation, Outcome, Sabotage, Store};

use crate::histories::check::{Violation, check};
use crate::histories::record::{Event, Recorded, What, record};
use crate::histories::{history, options, runtime};
use crate::model::{Kept, compare};

/// Records histories of a store that is broken in this way. Returns the first violation found.
fn caught(sabotage: Sabotage) -> Option<Violation> {
    let runtime = runtime();
    (0..20).find_map(|seed| {
        runtime.block_on(async {
            let store = options(Some(sabotage)).disk(SimDisk::new()).open("/store").await.unwrap();
            history(store, seed, 2000).await.err()
        })
    })
}

fn check_caught(sabotage: Sabotage, expected: &str) {
    match caught(sabotage) {
        Some(Violation::Broken(why)) => assert!(why.contains(expected), "caught for another reason: {why}"),
        other => panic!("{sabotage:?} was not caught: {other:?}"),
    }
}

#[test]
fn histories_notice_that_checks_are_skipped() {
    check_caught(Sabotage::SkipChecks, "was applied, but");
}

#[test]
fn histories_notice_answers_before_the_commit_is_visible() {
    check_caught(Sabotage::AnswerBeforeSeen, "has not seen it");
}

#[test]
fn the_reference_notices_that_checks_are_skipped() {
    let difference = compare(Kept::Files(Some(Sabotage::SkipChecks)), 200).unwrap_err();
    assert!(difference.contains("the answer: store Ok(Applied"), "{difference}");
    let commits = difference.matches("Commit {").count();
    assert!(commits <= 4, "the sequence shrinks to very few commits: {difference}");
}

#[test]
fn a_history_without_lost_races_is_void() {
    let mut recorded = honest();
    recorded.events.retain(|event| !matches!(&event.what, What::Commit { outcome: Outcome::Refused(_), .. }));
    assert!(matches!(check(&recorded), Err(Violation::Void { refused: 0, .. })));
}

/// A history that was not changed after its recording.
fn honest() -> Recorded {
    runtime().block_on(async {
        let store = Store::memory().await.unwrap();
        let recorded = record(&store, 1, 400).await.unwrap();
        assert!(check(&recorded).is_ok());
        recorded
    })
}

#[test]
fn a_history_that_was_tampered_with_is_caught() {
    let check = |tamper: fn(&mut Recorded), expected: &str| {
        let mut recorded = honest();
        tamper(&mut recorded);
        match check(&recorded) {
            Err(Violation::Broken(why)) => assert!(why.contains(expected), "{why} does not say {expected:?}"),
            other => panic!("{other:?} instead of {expected:?}"),
        }
    };
    check(|recorded| drop(recorded.deliveries[0].remove(3)), "a watch returned something else");
    check(|recorded| drop(recorded.deliveries[1].pop()), "commits of");
    check(|recorded| recorded.deliveries[0].swap(4, 5), "a watch returned something else");
    check(|recorded| drop(recorded.events.pop()), "commits of");
    check(|recorded| recorded.events.retain(|event| !takes(event, 7)), "generations have gaps");
    check(|recorded| answers(recorded).for_each(forget_a_check), "refused at generation");
    check(|recorded| reads(recorded).for_each(|generation| generation.0 += 1), " was ");
    check(stale_read, "has not seen it");
}

fn takes(event: &Event, after: u64) -> bool {
    let What::Commit { id, outcome: Outcome::Applied(receipt), .. } = &event.what else { return false };
    receipt.generation == Generation(after) && (receipt.changed() || id.is_some()) && !receipt.repeated
}

fn answers(recorded: &mut Recorded) -> impl Iterator<Item = &mut Outcome> {
    recorded.events.iter_mut().filter_map(|event| match &mut event.what {
        What::Commit { outcome, .. } => Some(outcome),
        What::Read { .. } => None,
    })
}

fn reads(recorded: &mut Recorded) -> impl Iterator<Item = &mut Generation> {
    recorded.events.iter_mut().filter_map(|event| match &mut event.what {
        What::Read { generation, .. } => Some(generation),
        What::Commit { .. } => None,
    })
}

fn forget_a_check(outcome: &mut Outcome) {
    if let Outcome::Refused(refusal) = outcome {
        refusal.failed.pop();
    }
}

/// Repeats the answer of the first read at the end.
fn stale_read(recorded: &mut Recorded) {
    let last = recorded.events.iter().map(|event| event.ended).max().unwrap();
    let read = recorded.events.iter_mut().find(|event| matches!(event.what, What::Read { .. })).unwrap();
    (read.began, read.ended) = (last + 1, last + 2);
}
