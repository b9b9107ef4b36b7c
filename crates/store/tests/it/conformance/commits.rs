//! Checks, writes, revs and generations.

use latchwork_store::{Actual, Check, Commit, FailedCheck, Generation, History, Rev};

use super::{apply, delete, found, get, put, refuse, settle, space};
use crate::backends::{Bench, on_every_backend};

on_every_backend!(
    a_failed_check_reports_what_was_expected_and_what_was_found,
    every_failed_check_is_reported_in_order,
    a_commit_whose_checks_hold_is_applied,
    a_refused_commit_takes_no_generation_and_changes_nothing,
    generations_are_dense,
    revs_start_at_one_and_count_deletes,
    a_rev_is_never_reused,
    deleting_an_absent_key_changes_nothing,
    other_writes_are_applied_beside_a_delete_of_an_absent_key,
    a_commit_of_checks_only_returns_the_generation_they_held_at,
    an_empty_commit_is_applied,
    a_receipt_lists_revs_in_the_order_of_the_writes,
    a_commit_sees_the_state_before_it_and_not_its_own_writes,
    equal_keys_of_different_spaces_are_different_keys,
    an_empty_value_is_not_an_absent_one,
    a_refusal_reads_as_a_sentence,
    concurrent_commits_on_one_rev_have_one_winner,
);

async fn a_failed_check_reports_what_was_expected_and_what_was_found(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    let (here, gone, never) = (space.key("here"), space.key("gone"), space.key("never"));
    put(&store, &here, "1").await;
    put(&store, &here, "2").await;
    put(&store, &gone, "1").await;
    delete(&store, &gone).await;
    let now = store.generation().await.unwrap();
    let check = async |check: Check, actual: Actual| {
        let refusal = refuse(&store, Commit::new().check(check.clone()).put(&never, "x")).await;
        assert_eq!(refusal.generation, now);
        assert_eq!(refusal.failed, [FailedCheck { index: 0, check, actual, right: None }]);
    };
    for folded in [false, true] {
        if folded {
            settle(&store).await;
        }
        check(Check::AtRev(here.clone(), Rev(1)), Actual::AtRev(Rev(2))).await;
        check(Check::AtRev(here.clone(), Rev(3)), Actual::AtRev(Rev(2))).await;
        check(Check::AtRev(gone.clone(), Rev(1)), Actual::Absent).await;
        check(Check::AtRev(gone.clone(), Rev(2)), Actual::Absent).await;
        check(Check::AtRev(never.clone(), Rev(1)), Actual::Absent).await;
        check(Check::Present(gone.clone()), Actual::Absent).await;
        check(Check::Present(never.clone()), Actual::Absent).await;
        check(Check::Absent(here.clone()), Actual::AtRev(Rev(2))).await;
        check(Check::AtGeneration(Generation(now.0 - 1)), Actual::AtGeneration(now)).await;
        check(Check::AtGeneration(now.next()), Actual::AtGeneration(now)).await;
        let changed = Actual::Changed(gone.clone(), now);
        check(Check::Unchanged(space.prefix("g"), Generation(now.0 - 1)), changed).await;
    }
}

async fn every_failed_check_is_reported_in_order(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    let (one, two) = (space.key("1"), space.key("2"));
    let first = put(&store, &one, "x").await;
    let refusal = refuse(
        &store,
        Commit::new()
            .at_rev(&two, Rev(1))
            .at_rev(&one, Rev(1))
            .absent(&one)
            .absent(&two)
            .at_generation(Generation(0))
            .unchanged(&space.all(), first)
            .unchanged(&space.all(), Generation(0))
            .put(&two, "x"),
    )
    .await;
    let found: Vec<_> = refusal.failed.iter().map(|failed| (failed.index, failed.actual.clone())).collect();
    let expected = [
        (0, Actual::Absent),
        (2, Actual::AtRev(Rev(1))),
        (4, Actual::AtGeneration(first)),
        (6, Actual::Changed(one, first)),
    ];
    assert_eq!(found, expected);
}

async fn a_commit_whose_checks_hold_is_applied(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::None).await;
    let (one, two) = (space.key("1"), space.key("2"));
    let first = put(&store, &one, "x").await;
    let receipt = apply(
        &store,
        Commit::new()
            .at_rev(&one, Rev(1))
            .absent(&two)
            .at_generation(first)
            .unchanged(&space.all(), first)
            .put(&two, "y")
            .delete(&one),
    )
    .await;
    assert_eq!(receipt.generation, first.next());
    assert_eq!((get(&store, &one).await, get(&store, &two).await), (None, found(1, "y")));
    apply(&store, Commit::new().absent(&one).put(&one, "again")).await;
}

async fn a_refused_commit_takes_no_generation_and_changes_nothing(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    let (one, two) = (space.key("1"), space.key("2"));
    let before = put(&store, &one, "x").await;
    let refused = store.stats().await.unwrap().refused;
    refuse(&store, Commit::new().absent(&one).put(&one, "y").put(&two, "y")).await;
    assert_eq!(store.generation().await.unwrap(), before);
    assert_eq!(store.stats().await.unwrap().refused, refused + 1);
    assert_eq!((get(&store, &one).await, get(&store, &two).await), (found(1, "x"), None));
    assert_eq!(put(&store, &two, "z").await, before.next());
    assert_eq!(get(&store, &two).await, found(1, "z"));
}

async fn generations_are_dense(bench: Bench) {
    let store = bench.open().await;
    assert_eq!(store.generation().await.unwrap(), Generation(0));
    let space = space(&store, "a", History::None).await;
    let mut last = store.generation().await.unwrap();
    for round in 0..40 {
        let receipt = apply(&store, Commit::new().put(&space.key(format!("{}", round % 7)), "x")).await;
        assert_eq!(receipt.generation, last.next());
        assert_eq!(store.generation().await.unwrap(), receipt.generation);
        last = receipt.generation;
        if round % 10 == 0 {
            settle(&store).await;
        }
    }
}

async fn revs_start_at_one_and_count_deletes(bench: Bench) {
    let store = bench.open().await;
    let key = space(&store, "a", History::None).await.key("k");
    let mut revs = Vec::new();
    for commit in [
        Commit::new().put(&key, "a"),
        Commit::new().put(&key, "a"),
        Commit::new().delete(&key),
        Commit::new().put(&key, "a"),
    ] {
        revs.extend(apply(&store, commit).await.revs);
    }
    assert_eq!(revs, [1, 2, 3, 4].map(|rev| Some(Rev(rev))));
}

async fn a_rev_is_never_reused(bench: Bench) {
    let store = bench.open().await;
    for history in [History::None, History::Generations(1), History::Forever] {
        let space = space(&store, &format!("{history:?}"), history).await;
        let key = space.key("k");
        for round in 0..6 {
            let receipt = apply(&store, Commit::new().put(&key, "x")).await;
            assert_eq!(receipt.revs, [Some(Rev(2 * round + 1))], "{history:?}");
            let receipt = apply(&store, Commit::new().delete(&key)).await;
            assert_eq!(receipt.revs, [Some(Rev(2 * round + 2))], "{history:?}");
            put(&store, &space.key("other"), "x").await;
            if round % 2 == 0 {
                settle(&store).await;
            }
        }
    }
}

async fn deleting_an_absent_key_changes_nothing(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    let (gone, never) = (space.key("gone"), space.key("never"));
    put(&store, &gone, "x").await;
    let before = delete(&store, &gone).await;
    let receipt = apply(&store, Commit::new().delete(&gone).delete(&never)).await;
    assert_eq!((receipt.generation, receipt.revs.clone()), (before, vec![None, None]));
    assert!(!receipt.changed() && !receipt.repeated);
    assert_eq!(store.generation().await.unwrap(), before);
    assert_eq!(apply(&store, Commit::new().put(&gone, "y")).await.revs, [Some(Rev(3))]);
}

async fn other_writes_are_applied_beside_a_delete_of_an_absent_key(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    let (here, never) = (space.key("here"), space.key("never"));
    let receipt = apply(&store, Commit::new().delete(&never).put(&here, "x")).await;
    assert_eq!(receipt.revs, [None, Some(Rev(1))]);
    let view = store.view().await.unwrap();
    // An answer may end before the view does: a part of the commits may be in the index, the rest in memory.
    let (mut keys, mut after) = (Vec::new(), Generation(0));
    while after < view.generation() {
        let changes = view.changes_since(&space.all(), after, 9).await.unwrap();
        keys.extend(changes.commits.into_iter().flat_map(|commit| commit.changes).map(|change| change.key));
        after = changes.through;
    }
    assert_eq!(keys, [here]);
    assert_eq!(view.history(&never, 9).await.unwrap(), []);
}

async fn a_commit_of_checks_only_returns_the_generation_they_held_at(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::None).await;
    let key = space.key("k");
    let now = put(&store, &key, "x").await;
    let receipt = apply(&store, Commit::new().at_rev(&key, Rev(1)).absent(&space.key("other"))).await;
    assert_eq!((receipt.generation, receipt.revs.len()), (now, 0));
    assert_eq!(refuse(&store, Commit::new().absent(&key)).await.generation, now);
    assert_eq!(store.generation().await.unwrap(), now);
}

async fn an_empty_commit_is_applied(bench: Bench) {
    let store = bench.open().await;
    let receipt = apply(&store, Commit::new().meta("nothing")).await;
    assert_eq!((receipt.generation, receipt.changed()), (Generation(0), false));
}

async fn a_receipt_lists_revs_in_the_order_of_the_writes(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::None).await;
    let key = |name: &str| space.key(name);
    apply(&store, Commit::new().put(&key("b"), "x")).await;
    apply(&store, Commit::new().put(&key("b"), "x").put(&key("c"), "x")).await;
    let mixed = Commit::new().delete(&key("b")).put(&key("a"), "x").delete(&key("z")).put(&key("c"), "x");
    assert_eq!(apply(&store, mixed).await.revs, [Some(Rev(3)), Some(Rev(1)), None, Some(Rev(2))]);
}

async fn a_commit_sees_the_state_before_it_and_not_its_own_writes(bench: Bench) {
    let store = bench.open().await;
    let key = space(&store, "a", History::None).await.key("k");
    apply(&store, Commit::new().put(&key, "x").absent(&key)).await;
    apply(&store, Commit::new().delete(&key).at_rev(&key, Rev(1))).await;
}

async fn equal_keys_of_different_spaces_are_different_keys(bench: Bench) {
    let store = bench.open().await;
    let (one, two) = (space(&store, "1", History::None).await, space(&store, "2", History::Forever).await);
    let receipt = apply(&store, Commit::new().put(&one.key("k"), "1").put(&two.key("k"), "2")).await;
    assert_eq!(receipt.revs, [Some(Rev(1)); 2]);
    delete(&store, &one.key("k")).await;
    assert_eq!(get(&store, &two.key("k")).await, found(1, "2"));
}

async fn an_empty_value_is_not_an_absent_one(bench: Bench) {
    let store = bench.open().await;
    let key = space(&store, "a", History::None).await.key("k");
    put(&store, &key, "").await;
    settle(&store).await;
    assert_eq!(get(&store, &key).await, found(1, ""));
    refuse(&store, Commit::new().absent(&key)).await;
}

async fn a_refusal_reads_as_a_sentence(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    let key = space.key("k");
    let now = put(&store, &key, "x").await;
    let commit = Commit::new().absent(&key).at_rev(&key, Rev(9)).unchanged(&space.prefix("k"), Generation(0));
    let (said, id) = (refuse(&store, commit.at_generation(Generation(0))).await.to_string(), space.id());
    let expected = format!(
        "refused at generation {now}: {id}/k expected absent, is at rev 1; {id}/k expected at rev 9, is at rev 1; \
         {id}/[k .. l) expected unchanged since generation 0, {id}/k was written at generation {now}; \
         store expected at generation 0, is at generation {now}"
    );
    assert_eq!(said, expected);
}

async fn concurrent_commits_on_one_rev_have_one_winner(bench: Bench) {
    let store = bench.open().await;
    let key = space(&store, "a", History::None).await.key("k");
    put(&store, &key, "x").await;
    let before = store.generation().await.unwrap();
    let mut racers = tokio::task::JoinSet::new();
    for _ in 0..20 {
        let (store, key) = (store.clone(), key.clone());
        racers.spawn(async move { store.commit(Commit::new().at_rev(&key, Rev(1)).put(&key, "y")).await.unwrap() });
    }
    let outcomes = racers.join_all().await;
    assert_eq!(outcomes.iter().filter(|outcome| outcome.is_applied()).count(), 1);
    for refusal in outcomes.into_iter().filter_map(|outcome| outcome.applied().err()) {
        assert_eq!(refusal.failed[0].actual, Actual::AtRev(Rev(2)));
        assert_eq!(refusal.generation, before.next());
    }
}
