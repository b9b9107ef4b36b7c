//! Views: what they show. What a view shows never changes.

use std::time::Duration;

use latchwork_store::{
    Commit, Committed, Generation, History, Key, Order, Range, Receipt, Rev, Space, Store, StoreError, Version, View,
};

use super::{apply, assert_fails, delete, put, settle, space, text};
use crate::backends::{Bench, on_every_backend};

on_every_backend!(
    a_view_never_changes_while_writers_continue,
    a_view_of_the_past_shows_the_past,
    a_view_of_the_future_is_an_error,
    a_scan_runs_in_both_directions_and_stops_at_its_limit,
    a_scan_continues_where_it_stopped,
    a_scan_merges_what_is_folded_and_what_is_not,
    a_scan_skips_deleted_keys_and_does_not_count_them,
    a_scan_stays_in_its_range,
    history_lists_versions_newest_first_with_deletes,
    history_ends_at_the_view,
    changes_are_listed_commit_by_commit,
    changes_end_at_the_view_and_continue_from_through,
    there_are_no_changes_after_the_view,
    an_item_carries_the_generation_and_the_time_of_its_last_write,
    views_are_counted_while_they_are_open,
    a_very_old_view_shows_the_past,
    the_newest_value_of_a_key_needs_no_view,
);

async fn everything(view: &View, space: &Space) -> Vec<(Key, u64, String)> {
    let items = view.scan(&space.all(), Order::Ascending, usize::MAX).await.unwrap();
    items.into_iter().map(|(key, item)| (key, item.rev.0, text(&item.value))).collect()
}

async fn scanned(store: &Store, range: &Range, order: Order, limit: usize) -> Vec<String> {
    let view = store.view().await.unwrap();
    let found = view.scan(range, order, limit).await.unwrap();
    found.into_iter().map(|(key, item)| format!("{}={}", text(key.bytes()), text(&item.value))).collect()
}

async fn a_view_never_changes_while_writers_continue(bench: Bench) {
    let store = bench.open().await;
    for history in [History::None, History::Generations(2), History::Forever] {
        let space = space(&store, &format!("{history:?}"), history).await;
        let key = |number: u32| space.key(format!("{number:02}"));
        for number in 0..10 {
            put(&store, &key(number), "old").await;
        }
        delete(&store, &key(3)).await;
        let view = store.view().await.unwrap();
        let seen = everything(&view, &space).await;
        assert_eq!(seen.len(), 9);
        for round in 0..30_u32 {
            let commit = Commit::new().put(&key(round % 12), format!("{round}")).delete(&key((round + 5) % 12));
            apply(&store, commit).await;
            if round % 4 == 0 {
                settle(&store).await;
            }
            assert_eq!(everything(&view, &space).await, seen, "{history:?} in round {round}");
            assert_eq!(view.get(&key(3)).await.unwrap(), None);
            assert_eq!(view.get(&key(4)).await.unwrap().unwrap().value, "old");
            assert_eq!(view.history(&key(4), 1).await.unwrap()[0].rev, Rev(1));
        }
    }
}

async fn a_view_of_the_past_shows_the_past(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    let mut pictures = Vec::new();
    for round in 0..25_u32 {
        let commit = Commit::new()
            .put(&space.key(format!("{}", round % 5)), format!("{round}"))
            .delete(&space.key(format!("{}", (round + 2) % 5)));
        apply(&store, commit).await;
        let view = store.view().await.unwrap();
        pictures.push((view.generation(), everything(&view, &space).await));
        if round % 10 == 9 {
            settle(&store).await;
        }
    }
    for (generation, picture) in pictures {
        let view = store.view_at(generation).await.unwrap();
        assert_eq!(view.generation(), generation);
        assert_eq!(everything(&view, &space).await, picture);
        for (key, rev, value) in picture {
            let item = view.get(&key).await.unwrap().unwrap();
            assert_eq!((item.rev.0, text(&item.value)), (rev, value));
        }
    }
    let empty = store.view_at(Generation(0)).await.unwrap();
    assert_eq!(everything(&empty, &space).await, []);
}

async fn a_view_of_the_future_is_an_error(bench: Bench) {
    let store = bench.open().await;
    let now = put(&store, &space(&store, "a", History::None).await.key("k"), "1").await;
    assert_fails!(
        store.view_at(now.next()).await,
        StoreError::FutureGeneration { asked, latest } if (asked, latest) == (now.next(), now)
    );
    assert_eq!(store.stats().await.unwrap().pins, 0, "nothing stays pinned");
}

async fn a_scan_runs_in_both_directions_and_stops_at_its_limit(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::None).await;
    for name in ["b", "a", "d", "c"] {
        put(&store, &space.key(name), "1").await;
    }
    for _ in 0..2 {
        let all = space.all();
        assert_eq!(scanned(&store, &all, Order::Ascending, 9).await, ["a=1", "b=1", "c=1", "d=1"]);
        assert_eq!(scanned(&store, &all, Order::Ascending, 3).await, ["a=1", "b=1", "c=1"]);
        assert_eq!(scanned(&store, &all, Order::Descending, 9).await, ["d=1", "c=1", "b=1", "a=1"]);
        assert_eq!(scanned(&store, &all, Order::Descending, 2).await, ["d=1", "c=1"]);
        assert_eq!(scanned(&store, &all, Order::Ascending, 0).await, [""; 0]);
        settle(&store).await;
    }
}

async fn a_scan_continues_where_it_stopped(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::None).await;
    for number in 0..23 {
        put(&store, &space.key(format!("{number:02}")), "1").await;
        if number == 11 {
            settle(&store).await;
        }
    }
    let view = store.view().await.unwrap();
    for order in [Order::Ascending, Order::Descending] {
        let whole = view.scan(&space.all(), order, 99).await.unwrap();
        let (mut range, mut parts) = (space.all(), Vec::new());
        loop {
            let part = view.scan(&range, order, 5).await.unwrap();
            let Some((last, _)) = part.last() else { break };
            range = if order == Order::Ascending { range.after(last) } else { range.before(last) };
            parts.extend(part);
        }
        assert_eq!(parts, whole);
        assert_eq!(parts.len(), 23);
    }
}

async fn a_scan_merges_what_is_folded_and_what_is_not(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::None).await;
    let write = async |number: u32, value: &str| {
        let key = space.key(format!("{number}"));
        if value.is_empty() { delete(&store, &key).await } else { put(&store, &key, value).await }
    };
    for number in 0..6 {
        write(number, "folded").await;
    }
    write(5, "").await;
    settle(&store).await;
    for (number, value) in [(1, "new"), (2, ""), (4, "x"), (4, ""), (5, "back"), (6, "new"), (7, "x"), (7, "")] {
        write(number, value).await;
    }
    let mut expected = vec!["0=folded", "1=new", "3=folded", "5=back", "6=new"];
    for _ in 0..2 {
        assert_eq!(scanned(&store, &space.all(), Order::Ascending, 99).await, expected);
        assert_eq!(scanned(&store, &space.all(), Order::Ascending, 3).await, expected[..3]);
        expected.reverse();
        assert_eq!(scanned(&store, &space.all(), Order::Descending, 99).await, expected);
        expected.reverse();
        settle(&store).await;
    }
}

async fn a_scan_skips_deleted_keys_and_does_not_count_them(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    for number in 0..20 {
        put(&store, &space.key(format!("{number:02}")), "1").await;
    }
    let full = store.generation().await.unwrap();
    for number in (0..20).filter(|number| number % 5 != 4) {
        delete(&store, &space.key(format!("{number:02}"))).await;
    }
    for _ in 0..2 {
        assert_eq!(scanned(&store, &space.all(), Order::Ascending, 3).await, ["04=1", "09=1", "14=1"]);
        assert_eq!(scanned(&store, &space.all(), Order::Descending, 3).await, ["19=1", "14=1", "09=1"]);
        let past = store.view_at(full).await.unwrap();
        assert_eq!(past.scan(&space.all(), Order::Descending, 99).await.unwrap().len(), 20);
        settle(&store).await;
    }
}

async fn a_scan_stays_in_its_range(bench: Bench) {
    let store = bench.open().await;
    let (before, space) = (space(&store, "1", History::None).await, space(&store, "2", History::None).await);
    let after = super::space(&store, "3", History::None).await;
    for other in [&before, &after] {
        put(&store, &other.key("b"), "other").await;
    }
    for name in ["a", "b", "ba", "bb", "c"] {
        put(&store, &space.key(name), "1").await;
    }
    let check = async |range: Range, expected: &[&str]| {
        let found = scanned(&store, &range, Order::Ascending, 99).await;
        let names: Vec<_> = found.iter().map(|found| found.trim_end_matches("=1")).collect();
        assert_eq!(names, expected, "{range}");
    };
    for _ in 0..2 {
        check(space.all(), &["a", "b", "ba", "bb", "c"]).await;
        check(space.prefix("b"), &["b", "ba", "bb"]).await;
        check(space.range("b".."bb"), &["b", "ba"]).await;
        check(space.range("b"..="bb"), &["b", "ba", "bb"]).await;
        check(space.range("bb"..), &["bb", "c"]).await;
        check(space.range(..="b"), &["a", "b"]).await;
        check(space.prefix("x"), &[]).await;
        settle(&store).await;
    }
}

async fn history_lists_versions_newest_first_with_deletes(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    let key = space.key("k");
    let mut expected = Vec::new();
    for (rev, value) in (1..).zip([Some("a"), Some("b"), None, Some("c"), None]) {
        bench.clock.advance(Duration::from_secs(rev));
        let commit = match value {
            Some(value) => Commit::new().put(&key, value),
            None => Commit::new().delete(&key),
        };
        let Receipt { generation, time, .. } = apply(&store, commit).await;
        expected.insert(0, Version { rev: Rev(rev), generation, time, value: value.map(Into::into) });
        if rev % 2 == 0 {
            settle(&store).await;
        }
        put(&store, &space.key("kk"), "other").await;
    }
    for _ in 0..2 {
        let view = store.view().await.unwrap();
        assert_eq!(view.history(&key, 99).await.unwrap(), expected);
        assert_eq!(view.history(&key, 2).await.unwrap(), expected[..2]);
        assert_eq!(view.history(&key, 0).await.unwrap(), []);
        assert_eq!(view.history(&space.key("never"), 9).await.unwrap(), []);
        settle(&store).await;
    }
}

async fn history_ends_at_the_view(bench: Bench) {
    let store = bench.open().await;
    let key = space(&store, "a", History::Forever).await.key("k");
    let mut generations = Vec::new();
    for value in ["1", "2", "3", "4"] {
        generations.push(put(&store, &key, value).await);
    }
    for _ in 0..2 {
        let view = store.view_at(generations[1]).await.unwrap();
        let seen: Vec<_> = view.history(&key, 9).await.unwrap().iter().map(|version| version.generation).collect();
        assert_eq!(seen, [generations[1], generations[0]]);
        settle(&store).await;
    }
}

async fn changes_are_listed_commit_by_commit(bench: Bench) {
    let store = bench.open().await;
    let (space, other) = (space(&store, "a", History::Forever).await, space(&store, "b", History::Forever).await);
    let start = store.generation().await.unwrap();
    let (a, b) = (space.key("a"), space.key("b"));
    apply(&store, Commit::new().meta("one").put(&b, "1").put(&a, "1").put(&other.key("a"), "1")).await;
    put(&store, &other.key("x"), "1").await;
    apply(&store, Commit::new().meta("three").delete(&a).put(&b, "2")).await;
    for _ in 0..2 {
        let view = store.view().await.unwrap();
        let changes = all_changes(&view, &space.all(), start).await;
        let described: Vec<_> = changes.iter().map(describe).collect();
        assert_eq!(described, ["1 one: b1=1 a1=1", "3 three: a2 b2=2"].map(|said| bump(said, start)));
        let only_a = all_changes(&view, &space.prefix("a"), start).await;
        let described: Vec<_> = only_a.iter().map(describe).collect();
        assert_eq!(described, ["1 one: a1=1", "3 three: a2"].map(|said| bump(said, start)));
        assert_eq!(all_changes(&view, &space.all(), start.next()).await, changes[1..]);
        settle(&store).await;
    }
}

async fn all_changes(view: &View, range: &Range, mut since: Generation) -> Vec<Committed> {
    let mut commits = Vec::new();
    while since < view.generation() {
        let changes = view.changes_since(range, since, 99).await.unwrap();
        commits.extend(changes.commits);
        since = changes.through;
    }
    commits
}

fn describe(commit: &Committed) -> String {
    let mut said = format!("{} {}:", commit.generation, text(&commit.meta));
    for change in &commit.changes {
        said += &format!(" {}{}", text(change.key.bytes()), change.rev);
        said += &change.value.as_ref().map(|value| format!("={}", text(value))).unwrap_or_default();
    }
    said
}

fn bump(said: &str, start: Generation) -> String {
    let (generation, rest) = said.split_once(' ').unwrap();
    format!("{} {rest}", generation.parse::<u64>().unwrap() + start.0)
}

async fn changes_end_at_the_view_and_continue_from_through(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    let mut written = Vec::new();
    let mut view = store.view().await.unwrap();
    for round in 0..40_u32 {
        written.push(put(&store, &space.key(format!("{}", round % 3)), &format!("{round}")).await);
        match round {
            12 => settle(&store).await,
            25 => view = store.view().await.unwrap(),
            _ => {}
        }
    }
    for limit in [1, 7, 99] {
        let (mut since, mut seen) = (Generation(0), Vec::new());
        while since < view.generation() {
            let changes = view.changes_since(&space.all(), since, limit).await.unwrap();
            assert!(changes.through > since && changes.through <= view.generation());
            assert!(changes.commits.len() <= limit);
            seen.extend(changes.commits.iter().map(|commit| commit.generation));
            since = changes.through;
        }
        assert_eq!(seen, written[..26]);
    }
}

async fn there_are_no_changes_after_the_view(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    let first = put(&store, &space.key("k"), "1").await;
    put(&store, &space.key("k"), "2").await;
    let view = store.view_at(first).await.unwrap();
    for since in [first, first.next()] {
        assert_eq!(view.changes_since(&space.all(), since, 9).await.unwrap().commits, []);
    }
    let none = view.changes_since(&space.all(), Generation(0), 0).await.unwrap();
    assert_eq!((none.commits.len(), none.through), (0, Generation(0)));
}

async fn an_item_carries_the_generation_and_the_time_of_its_last_write(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::None).await;
    bench.clock.advance(Duration::from_secs(5));
    let written = apply(&store, Commit::new().put(&space.key("k"), "1")).await;
    for _ in 0..3 {
        bench.clock.advance(Duration::from_secs(5));
        put(&store, &space.key("other"), "1").await;
        settle(&store).await;
        let item = store.view().await.unwrap().get(&space.key("k")).await.unwrap().unwrap();
        assert_eq!((item.rev, item.generation, item.time), (Rev(1), written.generation, written.time));
    }
}

async fn views_are_counted_while_they_are_open(bench: Bench) {
    let store = bench.open().await;
    put(&store, &space(&store, "a", History::None).await.key("k"), "1").await;
    let pins = async || store.stats().await.unwrap().pins;
    assert_eq!(pins().await, 0);
    let views = (store.view().await.unwrap(), store.view().await.unwrap(), store.view_at(Generation(1)).await.unwrap());
    assert_eq!(pins().await, 3);
    views.0.release();
    assert_eq!(pins().await, 2);
    drop((views.1, views.2));
    assert_eq!(pins().await, 0);
}

async fn a_very_old_view_shows_the_past(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    for name in ["unchanged", "changed", "deleted", "gone before"] {
        put(&store, &space.key(name), "then").await;
    }
    let then = delete(&store, &space.key("gone before")).await;
    put(&store, &space.key("changed"), "since").await;
    delete(&store, &space.key("deleted")).await;
    put(&store, &space.key("gone before"), "back").await;
    put(&store, &space.key("created"), "since").await;
    put(&store, &space.key("created"), "and changed").await;
    let others: Vec<_> = (0..100)
        .map(|task| {
            let (store, key) = (store.clone(), space.key(format!("other {task}")));
            tokio::spawn(async move {
                for number in 0..180 {
                    put(&store, &key, &format!("{number}")).await;
                }
            })
        })
        .collect();
    for other in others {
        other.await.unwrap();
    }
    settle(&store).await;
    let past = store.view_at(then).await.unwrap();
    let found = past.scan(&space.all(), Order::Ascending, usize::MAX).await.unwrap();
    let names: Vec<&[u8]> = found.iter().map(|(key, _)| key.bytes()).collect();
    assert_eq!(names, [b"changed".as_slice(), b"deleted", b"unchanged"]);
    for (key, item) in &found {
        assert_eq!(past.get(key).await.unwrap().as_ref(), Some(item));
        assert_eq!(item.value, "then");
    }
    for name in ["created", "gone before", "other 7", "never"] {
        assert_eq!(past.get(&space.key(name)).await.unwrap(), None, "{name}");
    }
    let history = past.history(&space.key("gone before"), 10).await.unwrap();
    assert_eq!(history.iter().map(|version| version.value.is_some()).collect::<Vec<_>>(), [false, true]);
}

async fn the_newest_value_of_a_key_needs_no_view(bench: Bench) {
    let store = bench.open().await;
    for history in [History::None, History::Generations(2), History::Forever] {
        let space = space(&store, &format!("{history:?}"), history).await;
        let key = space.key("k");
        let newest = async || store.get(&key).await.unwrap().map(|item| (item.rev.0, text(&item.value)));
        assert_eq!(newest().await, None);
        for round in 0..6_u64 {
            put(&store, &key, &format!("{round}")).await;
            let seen = super::get(&store, &key).await;
            assert_eq!((newest().await, seen.is_some()), (seen, true), "{history:?}");
            delete(&store, &key).await;
            assert_eq!(newest().await, None);
            settle(&store).await;
        }
        let generation = put(&store, &key, "x").await;
        assert_eq!(store.get(&key).await.unwrap().unwrap().generation, generation);
    }
    let long = space(&store, "long", History::None).await.key("k".repeat(100_000));
    assert_fails!(store.get(&long).await, StoreError::KeyTooLong { .. });
}
