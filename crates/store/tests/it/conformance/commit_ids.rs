//! Commits that are sent more than once.

use std::time::Duration;

use latchwork_store::{Commit, CommitId, History, Receipt, Rev, StoreError};

use super::{apply, assert_fails, found, get, put, refuse, settle, space};
use crate::backends::{Bench, on_every_backend};

const ID: CommitId = CommitId([7; 16]);

on_every_backend!(
    a_commit_sent_twice_is_applied_once,
    a_repeated_commit_is_answered_before_its_checks_are_made,
    an_id_with_other_contents_is_an_error,
    a_refused_commit_does_not_use_up_its_id,
    a_commit_that_changed_nothing_changes_nothing_when_it_is_sent_again,
    a_receipt_survives_folding_and_reopening,
    concurrent_sends_of_one_commit_apply_it_once,
    a_receipt_is_forgotten_after_a_day_and_not_before,
    a_receipt_that_was_never_folded_is_forgotten_too,
    ids_from_the_store_differ,
);

async fn a_commit_sent_twice_is_applied_once(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    let (one, two) = (space.key("1"), space.key("2"));
    put(&store, &one, "0").await;
    let commit = Commit::new().id(ID).meta("m").put(&one, "1").delete(&two).put(&space.key("3"), "3");
    let first = apply(&store, commit.clone()).await;
    assert!(!first.repeated);
    bench.clock.advance(Duration::from_secs(60));
    let after = put(&store, &one, "2").await;
    for _ in 0..3 {
        assert_eq!(apply(&store, commit.clone()).await, Receipt { repeated: true, ..first.clone() });
        settle(&store).await;
    }
    assert_eq!(store.generation().await.unwrap(), after);
    assert_eq!(get(&store, &one).await, found(3, "2"));
}

async fn a_repeated_commit_is_answered_before_its_checks_are_made(bench: Bench) {
    let store = bench.open().await;
    let key = space(&store, "a", History::None).await.key("k");
    let commit = Commit::new().id(ID).absent(&key).put(&key, "1");
    let first = apply(&store, commit.clone()).await;
    assert_eq!(apply(&store, commit).await, Receipt { repeated: true, ..first });
}

async fn an_id_with_other_contents_is_an_error(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    let (key, other) = (space.key("k"), space.key("l"));
    let commit = || Commit::new().id(ID);
    let before = apply(&store, commit().at_generation(space_generation(&store).await).put(&key, "1")).await;
    let others = [
        commit().put(&key, "1"),
        commit().put(&key, "2"),
        commit().put(&other, "1"),
        commit().delete(&key),
        commit().put(&key, "1").put(&other, "1"),
        commit().absent(&key).put(&key, "1"),
        commit().at_rev(&key, Rev(1)).put(&key, "1"),
        commit().unchanged(&space.all(), before.generation).put(&key, "1"),
        commit().at_generation(before.generation).put(&key, "1"),
        commit().meta("m").put(&key, "1"),
        commit(),
    ];
    for other in others {
        assert_fails!(store.commit(other).await, StoreError::CommitIdReused { id } if id == ID);
    }
    assert_eq!(store.generation().await.unwrap(), before.generation);
}

async fn space_generation(store: &latchwork_store::Store) -> latchwork_store::Generation {
    store.generation().await.unwrap()
}

async fn a_refused_commit_does_not_use_up_its_id(bench: Bench) {
    let store = bench.open().await;
    let key = space(&store, "a", History::None).await.key("k");
    put(&store, &key, "1").await;
    let commit = Commit::new().id(ID).absent(&key).put(&key, "2");
    refuse(&store, commit.clone()).await;
    apply(&store, Commit::new().delete(&key)).await;
    assert!(!apply(&store, commit).await.repeated);
    assert_eq!(get(&store, &key).await, found(3, "2"));
}

async fn a_commit_that_changed_nothing_changes_nothing_when_it_is_sent_again(bench: Bench) {
    let store = bench.open().await;
    let key = space(&store, "a", History::None).await.key("k");
    let commit = Commit::new().id(ID).delete(&key);
    let before = store.generation().await.unwrap();
    let first = apply(&store, commit.clone()).await;
    assert!(!first.changed());
    assert_eq!(first.generation, before.next(), "storing the receipt takes a generation");
    put(&store, &key, "1").await;
    assert_eq!(apply(&store, commit).await, Receipt { repeated: true, ..first });
    assert_eq!(get(&store, &key).await, found(1, "1"));
    let only_checks = Commit::new().id(store.commit_id()).at_rev(&key, Rev(1));
    assert!(!apply(&store, only_checks.clone()).await.repeated);
    put(&store, &key, "2").await;
    assert!(apply(&store, only_checks).await.repeated, "its checks held when it was sent first");
}

async fn a_receipt_survives_folding_and_reopening(bench: Bench) {
    let mut store = bench.open().await;
    let key = space(&store, "a", History::None).await.key("k");
    let commit = Commit::new().id(ID).absent(&key).put(&key, "1");
    let first = apply(&store, commit.clone()).await;
    for round in 0..4 {
        if bench.is_durable() {
            if round % 2 == 0 {
                store.close().await.unwrap();
            }
            drop(store);
            store = bench.open().await;
        } else {
            settle(&store).await;
        }
        assert_eq!(apply(&store, commit.clone()).await, Receipt { repeated: true, ..first.clone() });
        assert_fails!(store.commit(Commit::new().id(ID).put(&key, "2")).await, StoreError::CommitIdReused { .. });
    }
    assert_eq!(store.generation().await.unwrap(), first.generation);
}

async fn concurrent_sends_of_one_commit_apply_it_once(bench: Bench) {
    let store = bench.open().await;
    let key = space(&store, "a", History::Forever).await.key("k");
    for round in 1..=10 {
        let id = store.commit_id();
        let mut sends = tokio::task::JoinSet::new();
        for _ in 0..8 {
            let (store, commit) = (store.clone(), Commit::new().id(id).put(&key, "x"));
            sends.spawn(async move { apply(&store, commit).await });
        }
        let receipts = sends.join_all().await;
        assert_eq!(receipts.iter().filter(|receipt| !receipt.repeated).count(), 1);
        assert!(receipts.iter().all(|receipt| receipt.revs == [Some(Rev(round))]), "{receipts:?}");
        assert!(receipts.iter().all(|receipt| receipt.generation == receipts[0].generation));
    }
}

async fn a_receipt_is_forgotten_after_a_day_and_not_before(bench: Bench) {
    let store = bench.open().await;
    let key = space(&store, "a", History::None).await.key("k");
    let commit = Commit::new().id(ID).put(&key, "1");
    apply(&store, commit.clone()).await;
    settle(&store).await;
    let stored = store.stats().await.unwrap().keys;
    bench.clock.advance(Duration::from_secs(23 * 3600));
    apply(&store, Commit::new().id(store.commit_id()).put(&key, "2")).await;
    settle(&store).await;
    assert!(apply(&store, commit.clone()).await.repeated, "a day has not passed");
    bench.clock.advance(Duration::from_secs(2 * 3600));
    apply(&store, Commit::new().id(store.commit_id()).put(&key, "3")).await;
    settle(&store).await;
    settle(&store).await;
    assert_eq!(store.stats().await.unwrap().keys, stored + 1, "the first receipt was removed, two are left");
    assert!(!apply(&store, commit).await.repeated);
}

async fn a_receipt_that_was_never_folded_is_forgotten_too(bench: Bench) {
    let store = bench.open().await;
    let key = space(&store, "a", History::None).await.key("k");
    put(&store, &key, "0").await;
    settle(&store).await;
    let stored = store.stats().await.unwrap().keys;
    apply(&store, Commit::new().id(ID).put(&key, "1")).await;
    bench.clock.advance(Duration::from_secs(25 * 3600));
    settle(&store).await;
    settle(&store).await;
    assert_eq!(store.stats().await.unwrap().keys, stored);
}

async fn ids_from_the_store_differ(bench: Bench) {
    let store = bench.open().await;
    let mut ids: Vec<_> = (0..100).map(|_| store.commit_id()).collect();
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), 100);
}
