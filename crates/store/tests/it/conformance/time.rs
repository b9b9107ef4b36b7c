//! Commit times, and views by time.

use std::time::Duration;

use latchwork_store::{Commit, Generation, History, StoreError, Timestamp};

use super::{apply, assert_fails, put, settle, space};
use crate::backends::{Bench, on_every_backend};

on_every_backend!(
    a_commit_carries_the_time_of_the_clock,
    commit_time_does_not_go_back_with_the_clock,
    commit_time_does_not_go_back_after_reopening,
    a_view_at_a_time_shows_what_was_committed_by_then,
    a_view_before_all_time_is_empty,
    a_time_that_is_no_longer_kept_is_an_error,
    a_view_at_this_time_is_a_view_of_the_present,
);

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

async fn a_view_at_a_time_shows_what_was_committed_by_then(bench: Bench) {
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

async fn a_view_before_all_time_is_empty(bench: Bench) {
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

async fn a_view_at_this_time_is_a_view_of_the_present(bench: Bench) {
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
