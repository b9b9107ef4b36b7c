//! Which history is dropped, when, and what is kept.

use std::time::Duration;

use latchwork_store::{Commit, Generation, History, Rev, Space, SpaceSpec, Store, StoreError};

use super::{apply, assert_fails, delete, found, get, put, settle, space};
use crate::backends::{Bench, on_every_backend};

on_every_backend!(
    a_space_without_history_keeps_only_the_newest_versions,
    a_space_keeps_its_number_of_generations,
    a_space_keeps_history_for_a_time,
    a_space_with_history_forever_forgets_nothing,
    an_open_view_holds_the_floors_of_every_space,
    a_view_of_the_past_keeps_what_it_can_read,
    a_view_below_the_floor_fails_in_that_space_only,
    a_key_used_once_leaves_no_tombstone,
    an_ordinary_delete_leaves_a_tombstone,
    a_space_may_change_its_history,
    a_floor_never_falls,
    past_versions_are_dropped_from_storage,
);

async fn write(store: &Store, space: &Space, count: u32) {
    for number in 0..count {
        put(store, &space.key("k"), &format!("{number}")).await;
    }
}

/// Returns the floor, and asserts that reads below it fail and name it, and that reads from it on succeed.
async fn floor(store: &Store, space: &Space) -> Generation {
    let (oldest, key) = (store.oldest(space), space.key("k"));
    for below in [0, oldest.0.saturating_sub(1)].into_iter().filter(|below| *below < oldest.0) {
        let view = store.view_at(Generation(below)).await.unwrap();
        let dropped = |error: &StoreError| {
            let expected = (space.id(), Generation(below), oldest);
            matches!(error, StoreError::HistoryDropped { space, asked, oldest: o } if (*space, *asked, *o) == expected)
        };
        let scanned = view.scan(&space.all(), latchwork_store::Order::Ascending, 9).await.unwrap_err();
        let changes = store.view().await.unwrap().changes_since(&space.all(), Generation(below), 9).await.unwrap_err();
        let errors = [view.get(&key).await.unwrap_err(), view.history(&key, 9).await.unwrap_err(), scanned, changes];
        assert!(errors.iter().all(dropped), "{errors:?}");
    }
    let view = store.view_at(oldest).await.unwrap();
    view.get(&key).await.unwrap();
    view.changes_since(&space.all(), oldest, 9).await.unwrap();
    oldest
}

async fn a_space_without_history_keeps_only_the_newest_versions(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::None).await;
    write(&store, &space, 20).await;
    settle(&store).await;
    assert_eq!(floor(&store, &space).await, store.generation().await.unwrap());
    let view = store.view().await.unwrap();
    assert_eq!(view.get(&space.key("k")).await.unwrap().unwrap().value, "19");
    assert_eq!(view.history(&space.key("k"), 9).await.unwrap().len(), 1);
}

async fn a_space_keeps_its_number_of_generations(bench: Bench) {
    let store = bench.open().await;
    let (space, other) =
        (space(&store, "a", History::Generations(7)).await, space(&store, "b", History::Forever).await);
    write(&store, &space, 20).await;
    write(&store, &other, 3).await;
    settle(&store).await;
    let now = store.generation().await.unwrap();
    assert_eq!(floor(&store, &space).await, Generation(now.0 - 7), "the generations of all spaces count");
    let view = store.view().await.unwrap();
    assert_eq!(view.history(&space.key("k"), 99).await.unwrap().len(), 5);
    assert_eq!(view.history(&other.key("k"), 99).await.unwrap().len(), 3);
    let past = store.view_at(Generation(now.0 - 5)).await.unwrap();
    assert_eq!(past.get(&space.key("k")).await.unwrap().unwrap().value, "17");
}

async fn a_space_keeps_history_for_a_time(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::For(Duration::from_secs(10))).await;
    let mut written = Vec::new();
    for number in 0..30 {
        bench.clock.advance(Duration::from_secs(1));
        written.push(put(&store, &space.key("k"), &format!("{number}")).await);
    }
    settle(&store).await;
    // Ten seconds ago the twentieth write was current. It and the later ones can be read.
    assert_eq!(floor(&store, &space).await, written[19]);
    let view = store.view().await.unwrap();
    assert_eq!(view.history(&space.key("k"), 99).await.unwrap().len(), 11);
    drop(view);
    bench.clock.advance(Duration::from_secs(100));
    settle(&store).await;
    assert_eq!(floor(&store, &space).await, written[29]);
    assert_eq!(get(&store, &space.key("k")).await, found(30, "29"));
}

async fn a_space_with_history_forever_forgets_nothing(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    write(&store, &space, 100).await;
    bench.clock.advance(Duration::from_secs(1 << 30));
    settle(&store).await;
    assert_eq!(floor(&store, &space).await, Generation(0));
    assert_eq!(store.view().await.unwrap().history(&space.key("k"), 999).await.unwrap().len(), 100);
}

async fn an_open_view_holds_the_floors_of_every_space(bench: Bench) {
    let store = bench.open().await;
    let spaces = [
        space(&store, "a", History::None).await,
        space(&store, "b", History::Generations(2)).await,
        space(&store, "c", History::For(Duration::from_secs(1))).await,
    ];
    for space in &spaces {
        write(&store, space, 5).await;
    }
    let view = store.view().await.unwrap();
    for space in &spaces {
        bench.clock.advance(Duration::from_secs(2));
        write(&store, space, 5).await;
        delete(&store, &space.key("k")).await;
    }
    settle(&store).await;
    for space in &spaces {
        assert!(store.oldest(space) <= view.generation());
        assert_eq!(view.get(&space.key("k")).await.unwrap().unwrap().rev, Rev(5));
    }
    let pinned = view.generation();
    drop(view);
    bench.clock.advance(Duration::from_secs(2));
    settle(&store).await;
    for space in &spaces {
        assert!(floor(&store, space).await > pinned);
    }
}

async fn a_view_of_the_past_keeps_what_it_can_read(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Generations(10)).await;
    write(&store, &space, 15).await;
    settle(&store).await;
    let now = store.generation().await.unwrap();
    let view = store.view_at(Generation(now.0 - 8)).await.unwrap();
    write(&store, &space, 30).await;
    settle(&store).await;
    assert!(store.oldest(&space) <= view.generation());
    assert_eq!(view.get(&space.key("k")).await.unwrap().unwrap().value, "6");
}

async fn a_view_below_the_floor_fails_in_that_space_only(bench: Bench) {
    let store = bench.open().await;
    let (bare, full) = (space(&store, "a", History::None).await, space(&store, "b", History::Forever).await);
    let first = apply(&store, Commit::new().put(&bare.key("k"), "1").put(&full.key("k"), "1")).await;
    apply(&store, Commit::new().put(&bare.key("k"), "2").put(&full.key("k"), "2")).await;
    settle(&store).await;
    let view = store.view_at(first.generation).await.unwrap();
    assert_fails!(view.get(&bare.key("k")).await, StoreError::HistoryDropped { space, .. } if space == bare.id());
    assert_eq!(view.get(&full.key("k")).await.unwrap().unwrap().value, "1");
}

async fn a_key_used_once_leaves_no_tombstone(bench: Bench) {
    let store = bench.open().await;
    for history in [History::None, History::Generations(3)] {
        let spec = SpaceSpec::new(format!("{history:?}")).history(history).keys_used_once();
        let space = store.space(spec).await.unwrap();
        put(&store, &space.key("stays"), "1").await;
        settle(&store).await;
        let before = store.stats().await.unwrap().keys;
        for number in 0..50 {
            let key = space.key(format!("{number}"));
            put(&store, &key, "1").await;
            if number % 3 == 0 {
                settle(&store).await;
            }
            delete(&store, &key).await;
        }
        for _ in 0..4 {
            put(&store, &space.key("stays"), "1").await;
        }
        settle(&store).await;
        settle(&store).await;
        let after = store.stats().await.unwrap();
        assert_eq!(after.keys, before, "{history:?}");
        assert!(after.past_versions <= 4, "{after:?}");
        assert_eq!(get(&store, &space.key("stays")).await, found(5, "1"));
        assert_eq!(get(&store, &space.key("7")).await, None);
    }
}

async fn an_ordinary_delete_leaves_a_tombstone(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::None).await;
    settle(&store).await;
    let before = store.stats().await.unwrap().keys;
    for number in 0..20 {
        put(&store, &space.key(format!("{number}")), "1").await;
        delete(&store, &space.key(format!("{number}"))).await;
    }
    settle(&store).await;
    let after = store.stats().await.unwrap();
    assert_eq!((after.keys, after.past_versions), (before + 20, 0));
    assert_eq!(apply(&store, Commit::new().put(&space.key("7"), "1")).await.revs, [Some(Rev(3))]);
}

async fn a_space_may_change_its_history(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    write(&store, &space, 10).await;
    settle(&store).await;
    assert_eq!(store.oldest(&space), Generation(0));
    let shorter = super::space(&store, "a", History::Generations(3)).await;
    assert_eq!(shorter.id(), space.id());
    settle(&store).await;
    let dropped = Generation(store.generation().await.unwrap().0 - 3);
    assert_eq!(floor(&store, &space).await, dropped);
    super::space(&store, "a", History::Forever).await;
    write(&store, &space, 10).await;
    settle(&store).await;
    // The old rule may be applied once more between the commit of the declaration and its effect.
    let kept = floor(&store, &space).await;
    assert!(kept == dropped || kept == dropped.next(), "{kept}: dropped history does not come back");
}

async fn a_floor_never_falls(bench: Bench) {
    let mut store = bench.open().await;
    let space = space(&store, "a", History::For(Duration::from_secs(5))).await;
    let bare = super::space(&store, "b", History::None).await;
    let mut last = [Generation(0); 2];
    for round in 0..12_u32 {
        let view = store.view().await.unwrap();
        write(&store, &space, 3).await;
        bench.clock.advance(Duration::from_secs(u64::from(round % 4)));
        write(&store, &bare, round % 2).await;
        settle(&store).await;
        drop(view);
        settle(&store).await;
        if round % 3 == 0 {
            bench.clock.jump_to(latchwork_store::Timestamp(1_767_225_600_000_000));
        }
        if round % 5 == 4 && bench.is_durable() {
            last = [&space, &bare].map(|space| store.oldest(space));
            store.close().await.unwrap();
            store = bench.open().await;
        }
        let now = [&space, &bare].map(|space| store.oldest(space));
        assert!(now[0] >= last[0] && now[1] >= last[1], "{last:?} then {now:?} in round {round}");
        last = now;
    }
}

async fn past_versions_are_dropped_from_storage(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Generations(10)).await;
    let before = store.stats().await.unwrap().keys;
    for round in 0..5 {
        write(&store, &space, 60).await;
        settle(&store).await;
        let stats = store.stats().await.unwrap();
        assert_eq!(stats.past_versions, 10, "in round {round}");
        assert!(stats.keys <= before + 2);
    }
}
