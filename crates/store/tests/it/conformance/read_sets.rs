//! The check that a range has not changed: a commit is refused if something in the range changed, and only then.

use latchwork_store::{Actual, Commit, Generation, History, Order, Range, Space, Store, StoreError};

use super::{apply, assert_fails, delete, put, refuse, settle, space};
use crate::backends::{Bench, on_every_backend};

on_every_backend!(
    any_write_in_the_range_refuses,
    writes_outside_of_the_range_do_not_refuse,
    a_delete_of_an_absent_key_is_not_a_change,
    an_empty_range_never_changes,
    a_read_set_below_the_floor_is_history_dropped,
    a_read_set_of_the_future_is_an_error,
    a_large_range_is_followed_through_folds,
    a_large_range_names_the_last_write_of_the_key_it_found,
    a_read_set_in_a_space_without_history_can_be_checked_while_its_view_is_open,
);

/// Returns whether the range is unchanged. If not, asserts that the reported key has changed, last at the reported
/// generation.
async fn unchanged(store: &Store, range: &Range, since: Generation) -> bool {
    let outcome = store.commit(Commit::new().unchanged(range, since)).await.unwrap();
    let Err(refusal) = outcome.applied() else { return true };
    let Actual::Changed(key, generation) = &refusal.failed[0].actual else { panic!("{refusal}") };
    assert!(range.contains(key) && *generation > since, "{refusal}");
    let last = store.view().await.unwrap().history(key, 1).await.unwrap();
    assert_eq!(last[0].generation, *generation, "{refusal}");
    false
}

async fn fill(store: &Store, space: &Space, count: usize) -> Generation {
    let mut commit = Commit::new();
    for number in 0..count {
        commit = commit.put(&space.key(format!("{number:05}")), "0");
    }
    apply(store, commit).await.generation
}

async fn any_write_in_the_range_refuses(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    let range = space.range("b".."d");
    put(&store, &space.key("b"), "1").await;
    put(&store, &space.key("c"), "1").await;
    for folded in [false, true] {
        for commit in [
            Commit::new().put(&space.key(if folded { "bx" } else { "by" }), "new"),
            Commit::new().put(&space.key("c"), "other"),
            Commit::new().put(&space.key("c"), "other"),
            Commit::new().put(&space.key("b"), "1").delete(&space.key("c")),
            Commit::new().put(&space.key("c"), "back"),
        ] {
            let before = store.generation().await.unwrap();
            assert!(unchanged(&store, &range, before).await);
            apply(&store, commit).await;
            if folded {
                settle(&store).await;
            }
            assert!(!unchanged(&store, &range, before).await);
            assert!(unchanged(&store, &range, before.next()).await);
        }
    }
}

async fn writes_outside_of_the_range_do_not_refuse(bench: Bench) {
    let store = bench.open().await;
    let (space, other) = (space(&store, "a", History::Forever).await, space(&store, "b", History::Forever).await);
    let since = put(&store, &space.key("b"), "1").await;
    for key in [space.key("a\u{7f}"), space.key("d"), space.key("e"), other.key("b"), other.key("c")] {
        put(&store, &key, "1").await;
        delete(&store, &key).await;
    }
    for _ in 0..2 {
        assert!(unchanged(&store, &space.range("b".."d"), since).await);
        assert!(unchanged(&store, &space.range("b"..="c"), since).await);
        assert!(unchanged(&store, &space.prefix("b"), since).await);
        assert!(!unchanged(&store, &space.range("b"..="d"), since).await);
        assert!(!unchanged(&store, &space.range("a".."b"), since).await);
        assert!(!unchanged(&store, &space.all(), since).await);
        settle(&store).await;
    }
}

async fn a_delete_of_an_absent_key_is_not_a_change(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    let since = put(&store, &space.key("z"), "1").await;
    apply(&store, Commit::new().delete(&space.key("b")).put(&space.key("z"), "2")).await;
    assert!(unchanged(&store, &space.prefix("b"), since).await);
}

async fn an_empty_range_never_changes(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    put(&store, &space.key("b"), "1").await;
    settle(&store).await;
    put(&store, &space.key("c"), "1").await;
    for range in
        [space.range("b".."b"), space.range("c".."b"), space.all().after(&space.key("x")).before(&space.key("b"))]
    {
        assert!(range.is_empty());
        assert!(unchanged(&store, &range, Generation(0)).await);
        let view = store.view().await.unwrap();
        assert_eq!(view.scan(&range, Order::Ascending, 9).await.unwrap(), []);
        assert_eq!(view.scan(&range, Order::Descending, 9).await.unwrap(), []);
    }
}

async fn a_read_set_below_the_floor_is_history_dropped(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Generations(3)).await;
    for _ in 0..10 {
        put(&store, &space.key("k"), "1").await;
    }
    settle(&store).await;
    let oldest = store.oldest(&space);
    let before = store.generation().await.unwrap();
    assert_eq!(oldest, Generation(before.0 - 3));
    let asked = Generation(oldest.0 - 1);
    let commit = |since| Commit::new().unchanged(&space.prefix("other"), since).put(&space.key("other"), "1");
    assert_fails!(
        store.commit(commit(asked)).await,
        StoreError::HistoryDropped { space: s, asked: a, oldest: o } if (s, a, o) == (space.id(), asked, oldest)
    );
    assert_eq!(store.generation().await.unwrap(), before);
    apply(&store, commit(oldest)).await;
}

async fn a_read_set_of_the_future_is_an_error(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    let now = put(&store, &space.key("k"), "1").await;
    let commit = Commit::new().unchanged(&space.all(), now.next()).put(&space.key("k"), "2");
    assert_fails!(
        store.commit(commit).await,
        StoreError::FutureGeneration { asked, latest } if (asked, latest) == (now.next(), now)
    );
    assert_eq!(store.generation().await.unwrap(), now);
}

async fn a_large_range_is_followed_through_folds(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    let since = fill(&store, &space, 900).await;
    let (range, outside) = (space.range("00100".."00800"), space.key("00850"));
    let inside = [space.key("00799"), space.key("00600x"), space.key("00100")];
    for folds in 0..4 {
        put(&store, &outside, "1").await;
        if folds & 1 != 0 {
            settle(&store).await;
        }
        assert!(unchanged(&store, &range, since).await, "{folds}");
    }
    for key in inside {
        for commit in [Commit::new().put(&key, "1"), Commit::new().delete(&key)] {
            let before = apply(&store, Commit::new().put(&outside, "2")).await.generation;
            apply(&store, commit).await;
            put(&store, &outside, "3").await;
            assert!(!unchanged(&store, &range, before).await);
            settle(&store).await;
            assert!(!unchanged(&store, &range, before).await);
            assert!(!unchanged(&store, &range, since).await);
            assert!(unchanged(&store, &range, before.next()).await);
        }
    }
}

async fn a_large_range_names_the_last_write_of_the_key_it_found(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    let since = fill(&store, &space, 900).await;
    settle(&store).await;
    put(&store, &space.key("00890"), "1").await;
    put(&store, &space.key("00890"), "2").await;
    settle(&store).await;
    assert!(!unchanged(&store, &space.all(), since).await);
}

async fn a_read_set_in_a_space_without_history_can_be_checked_while_its_view_is_open(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::None).await;
    fill(&store, &space, 700).await;
    let view = store.view().await.unwrap();
    let since = view.generation();
    put(&store, &space.key("00000x"), "1").await;
    delete(&store, &space.key("00699")).await;
    settle(&store).await;
    assert!(unchanged(&store, &space.range("00001".."00699"), since).await);
    refuse(&store, Commit::new().unchanged(&space.prefix("00000"), since)).await;
    refuse(&store, Commit::new().unchanged(&space.prefix("00699"), since)).await;
    drop(view);
    settle(&store).await;
    let commit = Commit::new().unchanged(&space.prefix("00001"), since);
    assert_fails!(store.commit(commit).await, StoreError::HistoryDropped { .. });
}
