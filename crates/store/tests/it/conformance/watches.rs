//! Watches: a watch returns every commit that touches a range, once, in order, from any generation on.

use std::future::Future;
use std::pin::pin;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use latchwork_store::{Commit, Committed, Generation, History, Space, Store, StoreError, Watch};
use tokio::task::coop::unconstrained;

use super::{apply, assert_fails, delete, put, settle, space, text};
use crate::backends::{Bench, on_every_backend, patience};

on_every_backend!(
    a_watch_from_the_start_delivers_everything_once,
    a_watch_from_the_middle_delivers_the_rest,
    a_watch_delivers_what_happens_while_it_waits,
    a_watch_resumes_from_the_position_of_another,
    a_watch_delivers_only_its_range,
    a_position_moves_past_commits_outside_of_the_range,
    a_watch_delivers_values_as_they_were_written_after_folding,
    dropping_a_waiting_watch_future_loses_nothing,
    a_space_without_history_cannot_be_watched,
    a_watch_of_the_future_is_an_error,
    the_error_of_a_watch_that_fell_behind_names_the_oldest_generation,
    a_watch_of_an_unknown_space_is_an_error,
    a_watch_reads_far_more_than_it_reads_ahead,
);

/// The result of one poll, independent of the task's budget.
fn once<T>(future: impl Future<Output = T>) -> Option<T> {
    match pin!(unconstrained(future)).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => Some(value),
        Poll::Pending => None,
    }
}

/// The result of a future that needs no further commit. It is polled several times, because a remote backend does not
/// answer at the first poll.
async fn ready<T>(future: impl Future<Output = T>) -> Option<T> {
    let mut future = pin!(unconstrained(future));
    for _ in 0..8 {
        if let Poll::Ready(value) = std::future::poll_fn(|context| Poll::Ready(future.as_mut().poll(context))).await {
            return Some(value);
        }
        tokio::task::yield_now().await;
    }
    match patience() {
        Duration::ZERO => None,
        patience => tokio::time::timeout(patience, future).await.ok(),
    }
}

/// Returns all commits that the watch can return without waiting.
async fn drain(watch: &mut Watch) -> Vec<Committed> {
    let mut commits = Vec::new();
    while let Some(next) = ready(watch.next()).await {
        commits.push(next.unwrap());
    }
    commits
}

fn generations(commits: &[Committed]) -> Vec<Generation> {
    commits.iter().map(|commit| commit.generation).collect()
}

async fn write(store: &Store, space: &Space, count: u32) -> Vec<Generation> {
    let mut written = Vec::new();
    for number in 0..count {
        written.push(put(store, &space.key(format!("{}", number % 4)), &format!("{number}")).await);
        if number % 9 == 8 {
            settle(store).await;
        }
    }
    written
}

async fn a_watch_from_the_start_delivers_everything_once(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    let mut early = store.watch(space.all(), Generation(0)).await.unwrap();
    assert_eq!(early.position(), Generation(0));
    let written = write(&store, &space, 40).await;
    let mut late = store.watch(space.all(), Generation(0)).await.unwrap();
    for watch in [&mut early, &mut late] {
        let delivered = drain(watch).await;
        assert_eq!(generations(&delivered), written);
        for (number, commit) in delivered.iter().enumerate() {
            assert_eq!(text(commit.changes[0].value.as_ref().unwrap()), number.to_string());
        }
        assert_eq!(watch.position(), *written.last().unwrap());
        assert_eq!(drain(watch).await, []);
    }
}

async fn a_watch_from_the_middle_delivers_the_rest(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    let written = write(&store, &space, 30).await;
    for start in [0, 7, 8, 9, 28, 29] {
        let mut watch = store.watch(space.all(), written[start]).await.unwrap();
        assert_eq!(generations(&drain(&mut watch).await), written[start + 1..]);
    }
}

async fn a_watch_delivers_what_happens_while_it_waits(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    let now = store.generation().await.unwrap();
    let mut watch = store.watch(space.all(), now).await.unwrap();
    let watching = tokio::spawn(async move {
        let mut seen = Vec::new();
        while seen.len() < 20 {
            seen.push(watch.next().await.unwrap().generation);
        }
        seen
    });
    let mut written = Vec::new();
    for number in 0..20 {
        written.push(put(&store, &space.key("k"), &format!("{number}")).await);
        tokio::task::yield_now().await;
    }
    assert_eq!(watching.await.unwrap(), written);
}

async fn a_watch_resumes_from_the_position_of_another(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    let written = write(&store, &space, 25).await;
    let (mut position, mut seen) = (Generation(0), Vec::new());
    for _ in 0..25 {
        let mut watch = store.watch(space.all(), position).await.unwrap();
        seen.push(watch.next().await.unwrap().generation);
        position = watch.position();
    }
    assert_eq!(seen, written);
}

async fn a_watch_delivers_only_its_range(bench: Bench) {
    let store = bench.open().await;
    let (space, other) = (space(&store, "a", History::Forever).await, space(&store, "b", History::Forever).await);
    let mut watch = store.watch(space.prefix("b"), Generation(0)).await.unwrap();
    let (inside, outside) = (space.key("b1"), space.key("c"));
    put(&store, &outside, "1").await;
    let both = apply(&store, Commit::new().put(&outside, "2").put(&inside, "2").put(&other.key("b1"), "2")).await;
    put(&store, &other.key("b"), "3").await;
    let gone = delete(&store, &inside).await;
    for folded in [false, true] {
        let seen = drain(&mut watch).await;
        assert_eq!(generations(&seen), [both.generation, gone]);
        assert!(seen.iter().all(|commit| commit.changes.len() == 1 && commit.changes[0].key == inside));
        assert_eq!(seen[1].changes[0].value, None);
        if !folded {
            settle(&store).await;
            watch = store.watch(space.prefix("b"), Generation(0)).await.unwrap();
        }
    }
}

async fn a_position_moves_past_commits_outside_of_the_range(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Generations(5)).await;
    let mut watch = store.watch(space.prefix("b"), Generation(0)).await.unwrap();
    for round in 0..40 {
        let last = put(&store, &space.key("a"), &format!("{round}")).await;
        assert_eq!(drain(&mut watch).await, []);
        assert_eq!(watch.position(), last, "a watch of a quiet range does not fall behind");
        settle(&store).await;
    }
}

async fn a_watch_delivers_values_as_they_were_written_after_folding(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    let (a, b) = (space.key("a"), space.key("b"));
    let mut expected = Vec::new();
    for round in 0..12 {
        let value = format!("{round}");
        let commit = if round % 3 == 2 {
            Commit::new().delete(&a).put(&b, value.clone())
        } else {
            Commit::new().put(&a, value.clone()).put(&b, value.clone())
        };
        let receipt = apply(&store, commit).await;
        let a = (round % 3 != 2).then(|| value.clone());
        expected
            .push((receipt.generation, vec![(receipt.revs[0].unwrap(), a), (receipt.revs[1].unwrap(), Some(value))]));
    }
    for _ in 0..2 {
        let seen = drain(&mut store.watch(space.all(), Generation(0)).await.unwrap()).await;
        let seen: Vec<_> = seen
            .into_iter()
            .map(|commit| {
                let changes = commit.changes.into_iter();
                let changes = changes.map(|change| (change.rev, change.value.map(|value| text(&value))));
                (commit.generation, changes.collect::<Vec<_>>())
            })
            .collect();
        assert_eq!(seen, expected);
        settle(&store).await;
    }
}

async fn dropping_a_waiting_watch_future_loses_nothing(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    let mut watch = store.watch(space.all(), Generation(0)).await.unwrap();
    let (mut written, mut seen) = (Vec::new(), Vec::new());
    for round in 0..30_u32 {
        for _ in 0..round % 3 {
            written.push(put(&store, &space.key("k"), &format!("{round}")).await);
        }
        // Polled once and dropped, ready or not.
        seen.extend(once(watch.next()).map(|next| next.unwrap().generation));
        tokio::select! {
            biased;
            next = watch.next() => seen.push(next.unwrap().generation),
            () = tokio::task::yield_now() => {}
        }
    }
    seen.extend(generations(&drain(&mut watch).await));
    assert_eq!(seen, written);
}

async fn a_space_without_history_cannot_be_watched(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::None).await;
    let watch = store.watch(space.all(), Generation(0)).await;
    assert_fails!(watch, StoreError::NotWatchable { space: named } if named == space.id());
}

async fn a_watch_of_the_future_is_an_error(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    let now = store.generation().await.unwrap();
    let watch = store.watch(space.all(), now.next()).await;
    assert_fails!(watch, StoreError::FutureGeneration { asked, latest } if (asked, latest) == (now.next(), now));
}

async fn the_error_of_a_watch_that_fell_behind_names_the_oldest_generation(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Generations(4)).await;
    let mut watch = store.watch(space.all(), Generation(0)).await.unwrap();
    let written = write(&store, &space, 20).await;
    settle(&store).await;
    let oldest = store.oldest(&space);
    for _ in 0..2 {
        assert_fails!(
            watch.next().await,
            StoreError::HistoryDropped { space: s, asked: Generation(0), oldest: o } if (s, o) == (space.id(), oldest)
        );
    }
    let mut watch = store.watch(space.all(), oldest).await.unwrap();
    let kept: Vec<_> = written.into_iter().filter(|generation| *generation > oldest).collect();
    assert_eq!(kept.len(), 4);
    assert_eq!(generations(&drain(&mut watch).await), kept);
}

async fn a_watch_of_an_unknown_space_is_an_error(bench: Bench) {
    let (store, other) = (bench.open().await, bench.open_other().await);
    let foreign = space(&other, "foreign", History::Forever).await;
    let watch = store.watch(foreign.all(), Generation(0)).await;
    assert_fails!(watch, StoreError::UnknownSpace { space } if space == foreign.id());
}

async fn a_watch_reads_far_more_than_it_reads_ahead(bench: Bench) {
    let store = bench.open().await;
    let (space, other) = (space(&store, "a", History::Forever).await, space(&store, "b", History::Forever).await);
    let mut written = Vec::new();
    let mut writes = tokio::task::JoinSet::new();
    for number in 0..700 {
        let (store, commit) = (store.clone(), Commit::new().put(&space.key(format!("{number}")), "1"));
        let commit = if number % 2 == 0 { commit } else { Commit::new().put(&other.key("x"), "1") };
        writes.spawn(async move { (number, apply(&store, commit).await.generation) });
    }
    for (number, generation) in writes.join_all().await {
        if number % 2 == 0 {
            written.push(generation);
        }
    }
    written.sort();
    assert_eq!(generations(&drain(&mut store.watch(space.all(), Generation(0)).await.unwrap()).await), written);
}
