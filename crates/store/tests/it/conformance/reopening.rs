//! What a store contains when its directory is opened again, after a close and without one.

use latchwork_store::{Commit, ErrorKind, Generation, History, Rev, SpaceSpec, StoreError};

use super::{apply, assert_fails, delete, found, get, put, settle, space};
use crate::backends::Bench;

/// Runs a test on the durable backends only.
macro_rules! on_durable_backends {
    ($($test:ident),* $(,)?) => {$(
        mod $test {
            use crate::backends::{Bench, run};

            #[test]
            fn simulated() {
                run(Bench::simulated(), super::$test);
            }

            #[test]
            fn file() {
                run(Bench::file(), super::$test);
            }
        }
    )*};
}

on_durable_backends!(
    everything_can_be_read_after_reopening,
    history_continues_after_reopening,
    floors_do_not_change_by_reopening,
    a_directory_is_opened_once_at_a_time,
    a_directory_opens_again_when_its_last_handle_is_gone,
    a_view_keeps_the_directory_open,
    limits_may_change_between_openings,
);

async fn everything_can_be_read_after_reopening(bench: Bench) {
    let mut store = bench.open().await;
    let (bare, full) = (space(&store, "1", History::None).await, space(&store, "2", History::Forever).await);
    let mut last = store.generation().await.unwrap();
    for round in 1..=8_u64 {
        let receipt =
            apply(&store, Commit::new().put(&bare.key("k"), format!("{round}")).put(&full.key("k"), "x")).await;
        assert_eq!(receipt.generation, last.next());
        assert_eq!(receipt.revs, [Some(Rev(2 * round - 1)); 2]);
        last = apply(&store, Commit::new().delete(&bare.key("k")).delete(&full.key("k"))).await.generation;
        put(&store, &bare.key(format!("{round}")), "stays").await;
        last = last.next();
        match round % 4 {
            0 => store.close().await.unwrap(),
            1 => settle(&store).await,
            _ => {}
        }
        drop(store);
        store = bench.open().await;
        assert_eq!(store.generation().await.unwrap(), last);
        assert_eq!(get(&store, &bare.key("k")).await, None);
        for earlier in 1..=round {
            assert_eq!(get(&store, &bare.key(format!("{earlier}"))).await, found(1, "stays"));
        }
        let names: Vec<_> = store.spaces().await.unwrap().iter().map(|space| space.name().to_owned()).collect();
        assert_eq!(names, ["1", "2"]);
        assert_eq!(store.verify().await.unwrap(), []);
    }
}

async fn history_continues_after_reopening(bench: Bench) {
    let mut store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    let mut written = Vec::new();
    for round in 0..6 {
        written.push(put(&store, &space.key("k"), &format!("{round}")).await);
        if round % 2 == 0 {
            settle(&store).await;
        }
        drop(store);
        store = bench.open().await;
    }
    let view = store.view().await.unwrap();
    let changes = view.changes_since(&space.all(), Generation(0), 99).await.unwrap();
    let rest = view.changes_since(&space.all(), changes.through, 99).await.unwrap();
    let seen: Vec<_> = changes.commits.iter().chain(&rest.commits).map(|commit| commit.generation).collect();
    assert_eq!(seen, written);
    assert_eq!(view.history(&space.key("k"), 99).await.unwrap().len(), 6);
    for (round, generation) in written.iter().enumerate() {
        let item = store.view_at(*generation).await.unwrap().get(&space.key("k")).await.unwrap().unwrap();
        assert_eq!(item.value, round.to_string());
    }
}

async fn floors_do_not_change_by_reopening(bench: Bench) {
    let store = bench.open().await;
    let spaces = [
        space(&store, "a", History::None).await,
        space(&store, "b", History::Generations(4)).await,
        space(&store, "c", History::Forever).await,
    ];
    let view = store.view().await.unwrap();
    for round in 0..5 {
        put(&store, &spaces[round % 3].key("k"), "1").await;
    }
    settle(&store).await;
    drop(view);
    for _ in 0..7 {
        put(&store, &spaces[2].key("k"), "1").await;
        settle(&store).await;
    }
    let floors = spaces.each_ref().map(|space| store.oldest(space));
    store.close().await.unwrap();
    let store = bench.open().await;
    assert_eq!(spaces.each_ref().map(|space| store.oldest(space)), floors);
    let below = store.view_at(Generation(floors[0].0 - 1)).await.unwrap();
    assert_fails!(below.get(&spaces[0].key("k")).await, StoreError::HistoryDropped { .. });
}

async fn a_directory_is_opened_once_at_a_time(bench: Bench) {
    let store = bench.open().await;
    let second = bench.options().open(bench.path("store")).await;
    assert_eq!(second.as_ref().unwrap_err().kind(), ErrorKind::Conflict);
    assert_fails!(second, StoreError::Locked { .. });
    put(&store, &space(&store, "a", History::None).await.key("k"), "1").await;
    store.close().await.unwrap();
    bench.open().await;
}

async fn a_directory_opens_again_when_its_last_handle_is_gone(bench: Bench) {
    for round in 0..5 {
        let store = bench.open().await;
        let handle = store.clone();
        drop(store);
        let space = space(&handle, "a", History::None).await;
        assert_eq!(get(&handle, &space.key("k")).await, (round > 0).then(|| (round, "1".to_owned())));
        put(&handle, &space.key("k"), "1").await;
    }
}

async fn a_view_keeps_the_directory_open(bench: Bench) {
    let store = bench.open().await;
    let key = space(&store, "a", History::None).await.key("k");
    put(&store, &key, "1").await;
    let view = store.view().await.unwrap();
    drop(store);
    assert_eq!(view.get(&key).await.unwrap().unwrap().value, "1");
    assert_fails!(bench.options().open(bench.path("store")).await, StoreError::Locked { .. });
    drop(view);
    assert_eq!(get(&bench.open().await, &key).await, found(1, "1"));
}

async fn limits_may_change_between_openings(mut bench: Bench) {
    let store = bench.open().await;
    let space = store.space(SpaceSpec::new("a")).await.unwrap();
    let key = space.key("k".repeat(60));
    put(&store, &key, "1").await;
    delete(&store, &space.key("none")).await;
    drop(store);
    bench.limits.key_bytes = 10;
    let store = bench.open().await;
    assert_fails!(store.commit(Commit::new().put(&key, "2")).await, StoreError::KeyTooLong { limit: 10, .. });
    let view = store.view().await.unwrap();
    let kept = view.scan(&space.all(), latchwork_store::Order::Ascending, 9).await.unwrap();
    assert_eq!(kept[0].1.value, "1", "a value over the new limit can still be read");
}
