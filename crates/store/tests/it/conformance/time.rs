//! Commit times, and views by time.

use std::collections::BTreeMap;
use std::time::Duration;

use latchwork_store::{
    Commit, Generation, History, Item, Key, Order, Receipt, Rev, Space, SpaceSpec, Store, StoreError, Timestamp,
};

use super::snapshots::{persist, restore};
use super::{apply, assert_fails, delete, put, settle, space};
use crate::backends::{Bench, on_every_backend};

on_every_backend!(
    a_commit_carries_the_time_of_the_clock,
    commit_time_does_not_go_back_with_the_clock,
    commit_time_does_not_go_back_after_reopening,
    a_view_at_a_time_shows_what_was_committed_until_then,
    a_view_before_the_first_commit_is_empty,
    a_time_that_is_no_longer_kept_is_an_error,
    a_view_at_the_current_time_is_a_view_of_the_newest_generation,
    every_version_has_the_time_of_its_commit,
    a_snapshot_keeps_the_times_of_its_versions,
    changed_versions_get_the_time_of_the_restore_and_others_keep_theirs,
    a_restore_into_an_empty_store_sets_the_time_of_all_but_receipts,
    time_does_not_go_back_with_a_snapshot,
    a_time_before_a_restore_is_no_longer_kept,
    a_stamped_value_holds_the_generation_and_time_of_its_commit,
);

/// This includes a commit that is sent again under its id, and a commit in a group with others.
async fn a_stamped_value_holds_the_generation_and_time_of_its_commit(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    let key = space.key("k");
    for offset in [0, 3, 8] {
        bench.clock.advance(Duration::from_secs(1));
        let commit = Commit::new().put_stamped(&key, vec![7; 24], offset).id(store.commit_id());
        let (other, first) = tokio::join!(apply(&store, Commit::new().put(&space.key("o"), "x")), async {
            store.commit(commit.clone()).await.unwrap().applied().unwrap()
        });
        assert_ne!(other.generation, first.generation);
        let again = apply(&store, commit.clone()).await;
        assert!(again.repeated && again.generation == first.generation);
        let value = store.view().await.unwrap().get(&key).await.unwrap().unwrap().value;
        let stamp = [first.generation.0.to_be_bytes(), first.time.0.to_be_bytes()].concat();
        assert_eq!(value[offset..offset + 16], stamp);
        assert_eq!(value.iter().filter(|byte| **byte == 7).count(), 8 + stamp.iter().filter(|b| **b == 7).count());
    }
    let before = store.generation().await.unwrap();
    for (length, offset) in [(15, 0), (24, 9), (24, usize::MAX), (0, 0)] {
        let commit = Commit::new().put_stamped(&key, vec![7; length], offset);
        assert_fails!(store.commit(commit).await, StoreError::Stamp { .. });
    }
    assert_eq!(store.generation().await.unwrap(), before);
}

/// The times of commits by their generations.
type Times = BTreeMap<Generation, Timestamp>;

/// Reads the space at every kept generation with every read method, and asserts that each version has the time of its
/// commit.
async fn check_times(store: &Store, space: &Space, times: &Times) {
    // While this view is open, nothing more is dropped.
    let held = loop {
        let view = store.view_at(store.oldest(space)).await.unwrap();
        if store.oldest(space) == view.generation() {
            break view;
        }
    };
    let mut seen = 0;
    for at in held.generation().0..=store.generation().await.unwrap().0 {
        let view = store.view_at(Generation(at)).await.unwrap();
        let right = |item: &Item| assert_eq!(Some(&item.time), times.get(&item.generation), "{item:?} at {at}");
        for order in [Order::Ascending, Order::Descending] {
            let found = view.scan(&space.all(), order, usize::MAX).await.unwrap();
            for (key, item) in &found {
                right(item);
                assert_eq!(view.get(key).await.unwrap().as_ref(), Some(item));
            }
        }
        for key in ["a", "b", "c"].map(|name| space.key(name)) {
            for version in view.history(&key, usize::MAX).await.unwrap() {
                assert_eq!(Some(&version.time), times.get(&version.generation), "{version:?} at {at}");
                seen += 1;
            }
        }
        let changes = view.changes_since(&space.all(), held.generation(), 999).await.unwrap();
        assert!(changes.commits.iter().all(|commit| times.get(&commit.generation) == Some(&commit.time)));
    }
    assert!(seen > 0);
}

/// Writes and deletes a few keys of a space while the clock moves forward, stands still and goes back.
async fn write(bench: &Bench, store: &Store, space: &Space, times: &mut Times) {
    for round in 0..12_u64 {
        match round % 4 {
            0 => bench.clock.advance(Duration::from_secs(7 + round)),
            3 => bench.clock.jump_to(bench.env.now().minus(Duration::from_secs(1))),
            _ => bench.clock.advance(Duration::from_micros(round)),
        }
        let key = |number: u64| space.key(["a", "b", "c"][(number % 3) as usize]);
        let commit = Commit::new().put(&key(round), format!("{round}")).delete(&key(round + 2));
        let receipt = apply(store, commit).await;
        times.insert(receipt.generation, receipt.time);
        if round % 5 == 4 {
            settle(store).await;
        }
    }
}

async fn every_version_has_the_time_of_its_commit(bench: Bench) {
    let mut store = bench.open().await;
    for history in [History::None, History::Generations(5), History::Forever] {
        let space = space(&store, &format!("{history:?}"), history).await;
        let mut times = Times::new();
        write(&bench, &store, &space, &mut times).await;
        check_times(&store, &space, &times).await;
        settle(&store).await;
        check_times(&store, &space, &times).await;
        if !bench.is_durable() {
            continue;
        }
        for close in [false, true] {
            write(&bench, &store, &space, &mut times).await;
            if close {
                store.close().await.unwrap();
            }
            drop(store);
            store = bench.open().await;
            check_times(&store, &space, &times).await;
        }
    }
}

async fn a_snapshot_keeps_the_times_of_its_versions(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    let mut times = Times::new();
    write(&bench, &store, &space, &mut times).await;
    let past = store.generation().await.unwrap();
    write(&bench, &store, &space, &mut times).await;
    bench.clock.advance(Duration::from_secs(60));
    persist(&bench, &store, "snapshot").await;
    store.view_at(past).await.unwrap().persist(bench.path("past")).await.unwrap();
    for name in ["snapshot", "past"] {
        let copy = bench.open_at(&bench.path(name)).await;
        let mut times = times.clone();
        times.retain(|generation, _| *generation <= copy.oldest(&space));
        check_times(&copy, &space, &times).await;
        write(&bench, &copy, &space, &mut times).await;
        check_times(&copy, &space, &times).await;
    }
}

/// Returns the rev and time of the last write or delete of a key, and asserts that all read methods return the same.
async fn written(store: &Store, key: &Key) -> (Rev, Timestamp) {
    let view = store.view().await.unwrap();
    let last = view.history(key, 1).await.unwrap().remove(0);
    let item = view.get(key).await.unwrap();
    assert_eq!(item.map(|item| item.time), last.value.map(|_| last.time));
    (last.rev, last.time)
}

async fn changed_versions_get_the_time_of_the_restore_and_others_keep_theirs(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    let once = store.space(SpaceSpec::new("b").keys_used_once()).await.unwrap();
    let key = |name: &str| space.key(name);
    let then = apply(&store, Commit::new().put(&key("same"), "1").put(&key("changed"), "1").put(&once.key("k"), "1"));
    let then = then.await.time;
    put(&store, &key("gone"), "1").await;
    delete(&store, &key("gone")).await;
    persist(&bench, &store, "snapshot").await;
    bench.clock.advance(Duration::from_secs(60));
    apply(&store, Commit::new().put(&key("changed"), "2").put(&key("created"), "2").delete(&once.key("k"))).await;
    settle(&store).await;
    bench.clock.advance(Duration::from_secs(60));
    let now = bench.env.now();
    restore(&bench, &store, "snapshot").await;
    let check = async |store: &Store| {
        bench.clock.advance(Duration::from_secs(60));
        assert_eq!(written(store, &key("same")).await, (Rev(1), then));
        assert_eq!(written(store, &key("gone")).await, (Rev(2), then));
        assert_eq!(written(store, &key("changed")).await, (Rev(3), now));
        assert_eq!(written(store, &key("created")).await, (Rev(2), now));
        assert_eq!(written(store, &once.key("k")).await.1, now);
    };
    check(&store).await;
    settle(&store).await;
    check(&store).await;
    if bench.is_durable() {
        drop(store);
        check(&bench.open().await).await;
    }
}

async fn a_restore_into_an_empty_store_sets_the_time_of_all_but_receipts(bench: Bench) {
    let (store, fresh) = (bench.open().await, bench.open_other().await);
    let space = space(&store, "a", History::None).await;
    let commit = Commit::new().id(store.commit_id()).put(&space.key("k"), "1");
    let first = apply(&store, commit.clone()).await;
    persist(&bench, &store, "snapshot").await;
    bench.clock.advance(Duration::from_secs(60));
    let now = bench.env.now();
    restore(&bench, &fresh, "snapshot").await;
    bench.clock.advance(Duration::from_secs(60));
    assert_eq!(written(&fresh, &space.key("k")).await, (Rev(1), now));
    assert_eq!(apply(&fresh, commit).await, Receipt { repeated: true, ..first });
}

async fn time_does_not_go_back_with_a_snapshot(bench: Bench) {
    let (store, fresh) = (bench.open().await, bench.open_other().await);
    let key = space(&store, "a", History::Forever).await.key("k");
    bench.clock.advance(Duration::from_secs(3600));
    let last = apply(&store, Commit::new().put(&key, "1")).await.time;
    bench.clock.jump_to(last.minus(Duration::from_secs(1800)));
    persist(&bench, &store, "snapshot").await;
    restore(&bench, &fresh, "snapshot").await;
    assert_eq!(written(&fresh, &key).await.1, last);
    for store in [&fresh, &bench.open_at(&bench.path("snapshot")).await] {
        assert_eq!(apply(store, Commit::new().put(&key, "2")).await.time, last);
    }
}

async fn a_time_before_a_restore_is_no_longer_kept(bench: Bench) {
    let mut store = bench.open().await;
    let key = space(&store, "a", History::Forever).await.key("k");
    put(&store, &key, "1").await;
    persist(&bench, &store, "snapshot").await;
    put(&store, &key, "2").await;
    bench.clock.advance(Duration::from_secs(60));
    let (restored, now) = (restore(&bench, &store, "snapshot").await, bench.env.now());
    for _ in 0..2 {
        assert_eq!(store.view_at_time(now).await.unwrap().generation(), restored);
        let before = store.view_at_time(now.minus(Duration::from_secs(1))).await;
        assert_fails!(before, StoreError::TimeDropped { oldest, .. } if oldest == restored);
        if bench.is_durable() {
            drop(store);
            store = bench.open().await;
        }
    }
}

async fn a_commit_carries_the_time_of_the_clock(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    bench.clock.advance(Duration::from_secs(5));
    let receipt = apply(&store, Commit::new().put(&space.key("k"), "1")).await;
    assert_eq!(receipt.time, bench.env.now());
    for _ in 0..2 {
        let mut watch = store.watch(space.all(), Generation(0)).await.unwrap();
        assert_eq!(watch.next().await.unwrap().time, receipt.time);
        bench.clock.advance(Duration::from_secs(5));
        settle(&store).await;
    }
}

async fn commit_time_does_not_go_back_with_the_clock(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    let first = apply(&store, Commit::new().put(&space.key("k"), "1")).await.time;
    bench.clock.jump_to(first.minus(Duration::from_secs(3600)));
    let second = apply(&store, Commit::new().put(&space.key("k"), "2")).await.time;
    assert_eq!(second, first);
    bench.clock.jump_to(first.plus(Duration::from_secs(1)));
    let third = apply(&store, Commit::new().put(&space.key("k"), "3")).await.time;
    assert_eq!(third, first.plus(Duration::from_secs(1)));
}

async fn commit_time_does_not_go_back_after_reopening(bench: Bench) {
    if !bench.is_durable() {
        return;
    }
    for folded in [false, true] {
        let store = bench.open().await;
        let space = space(&store, "a", History::Forever).await;
        bench.clock.advance(Duration::from_secs(60));
        let first = apply(&store, Commit::new().put(&space.key("k"), "1")).await.time;
        if folded {
            settle(&store).await;
        }
        drop(store);
        bench.clock.jump_to(Timestamp(1));
        let store = bench.open().await;
        assert_eq!(apply(&store, Commit::new().put(&space.key("k"), "2")).await.time, first);
        bench.clock.jump_to(first);
    }
}

async fn a_view_at_a_time_shows_what_was_committed_until_then(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    let mut written = Vec::new();
    for number in 0..30 {
        bench.clock.advance(Duration::from_secs(10));
        let generation = put(&store, &space.key("k"), &format!("{number}")).await;
        written.push((bench.env.now(), generation));
        if number % 8 == 7 {
            settle(&store).await;
        }
    }
    for _ in 0..2 {
        for (number, (time, generation)) in written.iter().enumerate() {
            for late in [0, 1, 9] {
                let view = store.view_at_time(time.plus(Duration::from_secs(late))).await.unwrap();
                assert_eq!(view.generation(), *generation);
                let item = view.get(&space.key("k")).await.unwrap().unwrap();
                assert_eq!(item.value, number.to_string());
            }
        }
        let far = store.view_at_time(Timestamp(u64::MAX)).await.unwrap();
        assert_eq!(far.generation(), store.generation().await.unwrap());
        settle(&store).await;
    }
}

async fn a_view_before_the_first_commit_is_empty(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    put(&store, &space.key("k"), "1").await;
    for _ in 0..2 {
        let view = store.view_at_time(Timestamp(0)).await.unwrap();
        assert_eq!(view.generation(), Generation(0));
        assert_eq!(view.get(&space.key("k")).await.unwrap(), None);
        settle(&store).await;
    }
}

async fn a_time_that_is_no_longer_kept_is_an_error(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Generations(3)).await;
    for number in 0..20 {
        bench.clock.advance(Duration::from_secs(10));
        put(&store, &space.key("k"), &format!("{number}")).await;
    }
    settle(&store).await;
    let oldest = store.oldest(&space);
    let asked = Timestamp(1);
    assert_fails!(
        store.view_at_time(asked).await,
        StoreError::TimeDropped { asked: a, oldest: o } if (a, o) == (asked, oldest)
    );
}

async fn a_view_at_the_current_time_is_a_view_of_the_newest_generation(bench: Bench) {
    let store = bench.open().await;
    space(&store, "a", History::Forever).await;
    let forgetful = space(&store, "b", History::None).await;
    bench.clock.advance(Duration::from_secs(10));
    let last = put(&store, &forgetful.key("k"), "1").await;
    for _ in 0..2 {
        for time in [bench.env.now(), Timestamp(u64::MAX)] {
            let view = store.view_at_time(time).await.unwrap();
            assert_eq!(view.generation(), last);
            assert!(view.get(&forgetful.key("k")).await.unwrap().is_some());
        }
        settle(&store).await;
    }
}
