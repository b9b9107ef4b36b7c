//! Writing a view as a snapshot, and replacing the contents of a store with it.

use std::time::Duration;

use latchwork_store::{
    Commit, Confirm, ErrorKind, Generation, History, Order, Rev, Space, SpaceSpec, Store, StoreError,
};

use super::{apply, assert_fails, delete, found, get, put, settle, space};
use crate::backends::{Bench, on_every_backend};

on_every_backend!(
    a_snapshot_opens_as_a_store_with_everything_in_it,
    a_snapshot_of_a_past_view_holds_the_past,
    a_snapshot_has_no_history_before_itself,
    a_snapshot_does_not_overwrite_files,
    of_two_concurrent_snapshots_to_one_directory_one_is_complete,
    a_snapshot_may_be_larger_than_a_batch,
    a_restore_brings_back_values_with_higher_revs_and_generations,
    a_restore_starts_history_again,
    a_restore_brings_back_the_receipts_of_the_snapshot,
    a_restore_fails_while_views_are_open,
    a_restore_of_another_store_is_refused,
    a_restore_into_an_empty_store_brings_everything,
    a_restore_never_gives_one_number_to_two_spaces,
    spaces_declared_after_the_snapshot_stay_declared_and_empty,
    a_restore_from_a_missing_directory_is_an_error,
    a_restore_survives_reopening,
    a_failed_snapshot_leaves_no_files,
    restored_receipts_answer_as_before_and_expire_on_time,
    a_restore_leaves_no_tombstones_of_keys_that_are_used_once,
    a_key_without_tombstone_is_restored_above_every_rev_it_had,
);

async fn contents(store: &Store, space: &Space) -> Vec<(String, u64, String)> {
    let view = store.view().await.unwrap();
    let items = view.scan(&space.all(), Order::Ascending, usize::MAX).await.unwrap();
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    items.into_iter().map(|(key, item)| (text(key.bytes()), item.rev.0, text(&item.value))).collect()
}

pub(super) async fn persist(bench: &Bench, store: &Store, name: &str) -> Generation {
    let view = store.view().await.unwrap();
    view.persist(bench.path(name)).await.unwrap();
    view.generation()
}

pub(super) async fn restore(bench: &Bench, store: &Store, name: &str) -> Generation {
    store.restore(bench.path(name), Confirm::ReplaceEverything).await.unwrap()
}

async fn a_snapshot_opens_as_a_store_with_everything_in_it(bench: Bench) {
    let store = bench.open().await;
    let (one, two) = (space(&store, "1", History::None).await, space(&store, "2", History::Forever).await);
    let once = store.space(SpaceSpec::new("3").keys_used_once()).await.unwrap();
    for number in 0..20 {
        put(&store, &one.key(format!("{}", number % 6)), &format!("{number}")).await;
        put(&store, &two.key(format!("{number}")), "2").await;
    }
    delete(&store, &one.key("3")).await;
    put(&store, &once.key("k"), "3").await;
    let id = store.commit_id();
    let receipt = apply(&store, Commit::new().id(id).put(&two.key("id"), "1")).await;
    let at = persist(&bench, &store, "snapshot").await;
    put(&store, &one.key("later"), "1").await;

    let copy = bench.open_at(&bench.path("snapshot")).await;
    assert_eq!(copy.generation().await.unwrap(), at);
    assert_eq!(copy.verify().await.unwrap(), []);
    let names: Vec<_> =
        copy.spaces().await.unwrap().iter().map(|space| (space.name().to_owned(), space.id())).collect();
    assert_eq!(names, [("1".into(), one.id()), ("2".into(), two.id()), ("3".into(), once.id())]);
    delete(&store, &one.key("later")).await;
    for space in [&one, &two, &once] {
        assert_eq!(contents(&copy, space).await, contents(&store, space).await);
    }
    let repeated = apply(&copy, Commit::new().id(id).put(&two.key("id"), "1")).await;
    assert_eq!((repeated.generation, repeated.repeated), (receipt.generation, true));
    let back = apply(&copy, Commit::new().absent(&one.key("3")).put(&one.key("3"), "x")).await;
    assert_eq!((back.generation, back.revs[0]), (at.next(), Some(Rev(5))));
}

async fn a_snapshot_of_a_past_view_holds_the_past(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    put(&store, &space.key("a"), "1").await;
    let then = put(&store, &space.key("b"), "1").await;
    put(&store, &space.key("a"), "2").await;
    settle(&store).await;
    delete(&store, &space.key("b")).await;
    put(&store, &space.key("c"), "1").await;
    let view = store.view_at(then).await.unwrap();
    view.persist(bench.path("past")).await.unwrap();
    let copy = bench.open_at(&bench.path("past")).await;
    assert_eq!(copy.generation().await.unwrap(), then);
    let expected = [("a".to_owned(), 1, "1".to_owned()), ("b".to_owned(), 1, "1".to_owned())];
    assert_eq!(contents(&copy, &space).await, expected);
}

async fn a_snapshot_has_no_history_before_itself(bench: Bench) {
    let store = bench.open().await;
    let (full, empty) = (space(&store, "1", History::Forever).await, space(&store, "2", History::Forever).await);
    put(&store, &full.key("k"), "1").await;
    let at = persist(&bench, &store, "snapshot").await;
    let copy = bench.open_at(&bench.path("snapshot")).await;
    for space in [&full, &empty] {
        assert_eq!(copy.oldest(space), at, "{space:?}");
        let mut watch = copy.watch(space.all(), Generation(0)).await.unwrap();
        let next = tokio::select! {
            biased;
            next = watch.next() => next,
            () = tokio::task::yield_now() => panic!("the watch of {space:?} waits"),
        };
        assert_fails!(next, StoreError::HistoryDropped { oldest, .. } if oldest == at);
    }
}

async fn a_snapshot_does_not_overwrite_files(bench: Bench) {
    let store = bench.open().await;
    put(&store, &space(&store, "a", History::None).await.key("k"), "1").await;
    persist(&bench, &store, "snapshot").await;
    let again = store.view().await.unwrap().persist(bench.path("snapshot")).await;
    assert_eq!(again.as_ref().unwrap_err().kind(), ErrorKind::Invalid);
    assert_fails!(again, StoreError::NotEmpty { path } if path == bench.path("snapshot"));
}

async fn of_two_concurrent_snapshots_to_one_directory_one_is_complete(bench: Bench) {
    let store = bench.open().await;
    put(&store, &space(&store, "a", History::None).await.key("k"), "1").await;
    for round in 0..20 {
        let (view, path) = (store.view().await.unwrap(), bench.path(&format!("snapshot {round}")));
        let (one, other) = tokio::join!(view.persist(&path), view.persist(&path));
        let failure = match (one, other) {
            (Ok(()), Err(error)) | (Err(error), Ok(())) => error,
            both => panic!("{both:?}"),
        };
        assert!(matches!(failure, StoreError::Locked { .. } | StoreError::NotEmpty { .. }), "{failure}");
        assert_eq!(bench.open_at(&path).await.verify().await.unwrap(), []);
    }
}

async fn a_snapshot_may_be_larger_than_a_batch(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::None).await;
    for part in 0..3 {
        let keys = (0..900).map(|number| space.key(format!("{part}/{number}")));
        apply(&store, keys.fold(Commit::new(), |commit, key| commit.put(&key, "1"))).await;
    }
    let before = contents(&store, &space).await;
    assert_eq!(before.len(), 2700);
    persist(&bench, &store, "snapshot").await;
    for number in 0..900 {
        if number % 100 == 0 {
            delete(&store, &space.key(format!("1/{number}"))).await;
        }
    }
    restore(&bench, &store, "snapshot").await;
    let after = contents(&store, &space).await;
    let values = |contents: Vec<(String, u64, String)>| contents.into_iter().map(|(key, _, value)| (key, value));
    assert!(values(before).eq(values(after)));
}

async fn a_restore_brings_back_values_with_higher_revs_and_generations(bench: Bench) {
    let store = bench.open().await;
    for history in [History::None, History::Forever] {
        let space = space(&store, &format!("{history:?}"), history).await;
        let key = |name: &str| space.key(name);
        for name in ["same", "changed", "deleted", "twice"] {
            put(&store, &key(name), "then").await;
        }
        put(&store, &key("gone"), "x").await;
        delete(&store, &key("gone")).await;
        let name = format!("{history:?}");
        persist(&bench, &store, &name).await;
        put(&store, &key("changed"), "now").await;
        delete(&store, &key("deleted")).await;
        put(&store, &key("twice"), "now").await;
        put(&store, &key("twice"), "then").await;
        put(&store, &key("created"), "now").await;
        put(&store, &key("gone"), "back").await;
        let last = store.generation().await.unwrap();

        let generation = restore(&bench, &store, &name).await;
        assert_eq!(generation, last.next());
        assert_eq!(store.generation().await.unwrap(), generation);
        let check = async |name: &str, expected: Option<(u64, String)>, next: u64| {
            assert_eq!(get(&store, &key(name)).await, expected, "{name}");
            let receipt = apply(&store, Commit::new().put(&key(name), "next")).await;
            assert_eq!(receipt.revs, [Some(Rev(next))], "{name}");
        };
        check("same", found(1, "then"), 2).await;
        check("changed", found(3, "then"), 4).await;
        check("deleted", found(3, "then"), 4).await;
        check("twice", found(4, "then"), 5).await;
        check("created", None, 3).await;
        check("gone", None, 5).await;
        settle(&store).await;
        assert_eq!(store.verify().await.unwrap(), []);
    }
}

async fn a_restore_starts_history_again(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    let key = space.key("k");
    put(&store, &key, "1").await;
    let mut watch = store.watch(space.all(), Generation(0)).await.unwrap();
    persist(&bench, &store, "snapshot").await;
    put(&store, &key, "2").await;
    let generation = restore(&bench, &store, "snapshot").await;
    assert_eq!(store.oldest(&space), generation);
    assert_fails!(watch.next().await, StoreError::HistoryDropped { oldest, .. } if oldest == generation);
    let view = store.view_at(Generation(generation.0 - 1)).await.unwrap();
    assert_fails!(view.get(&key).await, StoreError::HistoryDropped { oldest, .. } if oldest == generation);
    drop(view);
    let next = put(&store, &key, "3").await;
    let mut watch = store.watch(space.all(), generation).await.unwrap();
    assert_eq!(watch.next().await.unwrap().generation, next);
    assert_eq!(store.view().await.unwrap().history(&key, 9).await.unwrap().len(), 2);
}

async fn a_restore_brings_back_the_receipts_of_the_snapshot(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::None).await;
    let (before, after) = (store.commit_id(), store.commit_id());
    let commit = |id, name: &str| Commit::new().id(id).put(&space.key(name), "1");
    apply(&store, commit(before, "before")).await;
    persist(&bench, &store, "snapshot").await;
    apply(&store, commit(after, "after")).await;
    restore(&bench, &store, "snapshot").await;
    assert!(apply(&store, commit(before, "before")).await.repeated);
    let again = apply(&store, commit(after, "after")).await;
    assert!(!again.repeated, "a commit that the restore undid can be sent again");
    assert!(apply(&store, commit(after, "after")).await.repeated);
    assert_eq!(get(&store, &space.key("after")).await, found(3, "1"));
}

async fn a_restore_fails_while_views_are_open(bench: Bench) {
    let store = bench.open().await;
    let key = space(&store, "a", History::None).await.key("k");
    put(&store, &key, "1").await;
    persist(&bench, &store, "snapshot").await;
    let last = put(&store, &key, "2").await;
    let views = [store.view().await.unwrap(), store.view_at(Generation(1)).await.unwrap()];
    let refused = store.restore(bench.path("snapshot"), Confirm::ReplaceEverything).await;
    assert_eq!(refused.as_ref().unwrap_err().kind(), ErrorKind::Conflict);
    assert_fails!(refused, StoreError::ViewsOpen { views: 2 });
    assert_eq!(views[0].get(&key).await.unwrap().unwrap().value, "2");
    drop(views);
    assert_eq!(get(&store, &key).await, found(2, "2"));
    assert_eq!(restore(&bench, &store, "snapshot").await, last.next());
}

async fn a_restore_of_another_store_is_refused(bench: Bench) {
    let (store, other) = (bench.open().await, bench.open_other().await);
    for store in [&store, &other] {
        put(store, &space(store, "a", History::None).await.key("k"), "1").await;
    }
    persist(&bench, &other, "snapshot").await;
    let refused = store.restore(bench.path("snapshot"), Confirm::ReplaceEverything).await;
    assert_fails!(refused, StoreError::ForeignSnapshot);
    let space = space(&store, "a", History::None).await;
    assert_eq!(put(&store, &space.key("k"), "2").await, store.generation().await.unwrap());
}

async fn a_restore_into_an_empty_store_brings_everything(bench: Bench) {
    let (store, fresh) = (bench.open().await, bench.open_other().await);
    let (one, two) = (space(&store, "1", History::None).await, space(&store, "2", History::Forever).await);
    for number in 0..10 {
        put(&store, &one.key("k"), &format!("{number}")).await;
        put(&store, &two.key(format!("{number}")), "1").await;
    }
    delete(&store, &two.key("3")).await;
    let at = persist(&bench, &store, "snapshot").await;
    let generation = restore(&bench, &fresh, "snapshot").await;
    assert_eq!(generation, at.next());
    for space in [&one, &two] {
        assert_eq!(contents(&fresh, space).await, contents(&store, space).await);
        assert_eq!(fresh.oldest(space), generation);
    }
    assert_eq!(apply(&fresh, Commit::new().put(&two.key("3"), "1")).await.revs, [Some(Rev(3))]);
    let three = space(&fresh, "3", History::None).await;
    assert!(three.id() != one.id() && three.id() != two.id());
    assert_eq!(fresh.verify().await.unwrap(), []);
}

async fn a_restore_never_gives_one_number_to_two_spaces(bench: Bench) {
    let (store, fresh) = (bench.open().await, bench.open_other().await);
    let (theirs, ours) = (space(&store, "theirs", History::None).await, space(&fresh, "ours", History::None).await);
    assert_eq!(theirs.id(), ours.id());
    put(&store, &theirs.key("k"), "1").await;
    persist(&bench, &store, "snapshot").await;
    let refused = fresh.restore(bench.path("snapshot"), Confirm::ReplaceEverything).await;
    assert_fails!(refused, StoreError::ForeignSnapshot);
    assert_eq!(fresh.spaces().await.unwrap().len(), 1);

    // A copy that was written independently has the same identity, and may have given a number to another name.
    let copy = bench.open_at(&bench.path("snapshot")).await;
    space(&copy, "there", History::None).await;
    persist(&bench, &copy, "diverged").await;
    space(&store, "here", History::None).await;
    let refused = store.restore(bench.path("diverged"), Confirm::ReplaceEverything).await;
    assert_fails!(refused, StoreError::ForeignSnapshot);
}

async fn spaces_declared_after_the_snapshot_stay_declared_and_empty(bench: Bench) {
    let store = bench.open().await;
    let old = space(&store, "old", History::None).await;
    put(&store, &old.key("k"), "1").await;
    persist(&bench, &store, "snapshot").await;
    let new = space(&store, "new", History::Forever).await;
    put(&store, &new.key("k"), "1").await;
    restore(&bench, &store, "snapshot").await;
    assert_eq!(space(&store, "new", History::Forever).await.id(), new.id());
    assert_eq!(contents(&store, &new).await, []);
    assert_eq!(apply(&store, Commit::new().put(&new.key("k"), "2")).await.revs, [Some(Rev(3))]);
    assert_eq!(contents(&store, &old).await.len(), 1);
}

async fn a_restore_from_a_missing_directory_is_an_error(bench: Bench) {
    let store = bench.open().await;
    let key = space(&store, "a", History::None).await.key("k");
    put(&store, &key, "1").await;
    store.restore(bench.path("missing"), Confirm::ReplaceEverything).await.unwrap_err();
    assert_eq!(get(&store, &key).await, found(1, "1"));
    put(&store, &key, "2").await;
}

async fn a_restore_survives_reopening(bench: Bench) {
    if !bench.is_durable() {
        return;
    }
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    put(&store, &space.key("k"), "1").await;
    persist(&bench, &store, "snapshot").await;
    put(&store, &space.key("k"), "2").await;
    let generation = restore(&bench, &store, "snapshot").await;
    drop(store);
    let store = bench.open().await;
    assert_eq!(store.generation().await.unwrap(), generation);
    assert_eq!(store.oldest(&space), generation);
    assert_eq!(get(&store, &space.key("k")).await, found(3, "1"));
    assert_eq!(put(&store, &space.key("k"), "3").await, generation.next());
    drop(store);
    assert_eq!(get(&bench.open().await, &space.key("k")).await, found(4, "3"));
}

async fn a_failed_snapshot_leaves_no_files(bench: Bench) {
    let store = bench.open().await;
    let (kept, dropped) = (space(&store, "a", History::Forever).await, space(&store, "b", History::None).await);
    let then = put(&store, &kept.key("k"), "1").await;
    for _ in 0..3 {
        put(&store, &dropped.key("k"), "1").await;
        settle(&store).await;
    }
    let past = store.view_at(then).await.unwrap();
    assert_fails!(past.persist(bench.path("snapshot")).await, StoreError::HistoryDropped { .. });
    drop(past);
    // The same directory can be used again, and the snapshot in it is complete.
    let at = persist(&bench, &store, "snapshot").await;
    assert_eq!(bench.open_at(&bench.path("snapshot")).await.generation().await.unwrap(), at);
}

async fn restored_receipts_answer_as_before_and_expire_on_time(bench: Bench) {
    let store = bench.open().await;
    let key = space(&store, "a", History::None).await.key("k");
    let (kept, undone) = (Commit::new().id(store.commit_id()), Commit::new().id(store.commit_id()));
    let (kept, undone) = (kept.put(&key, "1"), undone.put(&key, "2"));
    let first = apply(&store, kept.clone()).await;
    settle(&store).await;
    let stored = store.stats().await.unwrap().keys;
    persist(&bench, &store, "snapshot").await;
    apply(&store, undone.clone()).await;
    bench.clock.advance(Duration::from_secs(3600));
    restore(&bench, &store, "snapshot").await;
    for store in [&store, &bench.open_at(&bench.path("snapshot")).await] {
        settle(store).await;
        let again = apply(store, kept.clone()).await;
        assert_eq!((again.generation, again.time, again.repeated), (first.generation, first.time, true));
        assert!(!apply(store, undone.clone()).await.repeated, "a commit that the restore undid can be sent again");
    }
    bench.clock.advance(Duration::from_secs(24 * 3600));
    for store in [&store, &bench.open_at(&bench.path("snapshot")).await] {
        apply(store, Commit::new().put(&key, "3")).await;
        settle(store).await;
        settle(store).await;
        assert!(store.stats().await.unwrap().keys <= stored, "at most the last receipt is left");
        assert!(!apply(store, kept.clone()).await.repeated);
    }
}

async fn a_restore_leaves_no_tombstones_of_keys_that_are_used_once(bench: Bench) {
    let store = bench.open().await;
    let once = store.space(SpaceSpec::new("a").keys_used_once()).await.unwrap();
    put(&store, &once.key("kept"), "1").await;
    settle(&store).await;
    let stored = store.stats().await.unwrap().keys;
    persist(&bench, &store, "snapshot").await;
    for number in 0..10 {
        put(&store, &once.key(format!("{number}")), "1").await;
    }
    restore(&bench, &store, "snapshot").await;
    settle(&store).await;
    assert_eq!(store.stats().await.unwrap().keys, stored);
    assert_eq!(contents(&store, &once).await, [("kept".into(), 1, "1".into())]);
}

async fn a_key_without_tombstone_is_restored_above_every_rev_it_had(bench: Bench) {
    let store = bench.open().await;
    let key = store.space(SpaceSpec::new("a").keys_used_once()).await.unwrap().key("k");
    put(&store, &key, "1").await;
    persist(&bench, &store, "snapshot").await;
    for _ in 0..4 {
        put(&store, &key, "2").await;
    }
    delete(&store, &key).await;
    settle(&store).await;
    restore(&bench, &store, "snapshot").await;
    let (rev, value) = get(&store, &key).await.unwrap();
    assert_eq!(value, "1");
    assert!(rev > 6, "rev {rev} was used before");
}
