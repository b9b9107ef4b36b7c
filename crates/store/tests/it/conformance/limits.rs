//! Input that fails before it reaches the backend: sizes, empty keys, keys of other stores, keys written twice.

use latchwork_store::{Commit, ErrorKind, History, Order, Space, Store, StoreError};

use super::{apply, assert_fails, settle, space};
use crate::backends::{Bench, on_every_backend};

on_every_backend!(
    a_key_may_be_as_long_as_the_limit,
    a_value_may_be_as_long_as_the_limit,
    meta_may_be_as_long_as_the_limit_of_values,
    a_commit_may_have_as_many_operations_as_the_limit,
    a_commit_may_be_as_large_as_the_limit,
    a_range_may_be_bounded_by_any_key_that_is_allowed,
    a_limit_may_be_the_largest_possible_number,
    an_empty_key_is_an_error_everywhere,
    a_key_of_an_undeclared_space_is_an_error_everywhere,
    a_key_written_twice_is_an_error,
    input_over_a_limit_changes_nothing,
);

async fn check(store: &Store, commit: Commit, expected: Result<(), &str>) {
    let before = store.generation().await.unwrap();
    match (store.commit(commit).await, expected) {
        (Ok(outcome), Ok(())) => assert!(outcome.is_applied()),
        (Err(error), Err(said)) => {
            assert!(error.to_string().contains(said), "{error} does not say {said:?}");
            assert_eq!(error.kind(), ErrorKind::Invalid);
            assert_eq!(store.generation().await.unwrap(), before);
        }
        (result, expected) => panic!("{result:?} instead of {expected:?}"),
    }
}

async fn a_key_may_be_as_long_as_the_limit(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    let limit = store.limits().key_bytes;
    let (longest, longer) = (space.key(vec![0xff; limit]), space.key(vec![0xff; limit + 1]));
    apply(&store, Commit::new().absent(&longest).put(&longest, "1")).await;
    let said = format!("has {} bytes; the limit is {limit}", limit + 1);
    for commit in [
        Commit::new().put(&longer, "1"),
        Commit::new().delete(&longer),
        Commit::new().absent(&longer),
        Commit::new().at_rev(&longer, latchwork_store::Rev(1)),
    ] {
        check(&store, commit, Err(&said)).await;
    }
    settle(&store).await;
    let view = store.view().await.unwrap();
    assert_eq!(view.get(&longest).await.unwrap().unwrap().value, "1");
    assert_eq!(view.scan(&space.all(), Order::Descending, 9).await.unwrap().len(), 1);
    let expected = (limit + 1, limit);
    assert_fails!(view.get(&longer).await, StoreError::KeyTooLong { length, limit, .. } if (length, limit) == expected);
    assert_fails!(view.history(&longer, 1).await, StoreError::KeyTooLong { .. });
}

async fn a_value_may_be_as_long_as_the_limit(bench: Bench) {
    let store = bench.open().await;
    let key = space(&store, "a", History::Forever).await.key("k");
    let limit = store.limits().value_bytes;
    check(&store, Commit::new().put(&key, vec![1; limit]), Ok(())).await;
    let said = format!("has {} bytes; the limit is {limit}", limit + 1);
    check(&store, Commit::new().put(&key, vec![1; limit + 1]), Err(&said)).await;
    settle(&store).await;
    let item = store.view().await.unwrap().get(&key).await.unwrap().unwrap();
    assert_eq!(item.value, vec![1; limit]);
}

async fn meta_may_be_as_long_as_the_limit_of_values(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    let (key, limit) = (space.key("k"), store.limits().value_bytes);
    check(&store, Commit::new().meta(vec![1; limit]).put(&key, "1"), Ok(())).await;
    let longer = Commit::new().meta(vec![1; limit + 1]).put(&key, "1");
    assert_fails!(
        store.commit(longer).await,
        StoreError::MetaTooLong { length, limit: l } if (length, l) == (limit + 1, limit)
    );
    settle(&store).await;
    let mut watch = store.watch(space.all(), latchwork_store::Generation(0)).await.unwrap();
    assert_eq!(watch.next().await.unwrap().meta, vec![1; limit]);
}

async fn a_commit_may_have_as_many_operations_as_the_limit(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::None).await;
    let limit = store.limits().operations;
    let commit = |count: usize, checks: usize| {
        let key = |number: usize| space.key(format!("{checks}/{number}"));
        let commit = (0..checks).fold(Commit::new(), |commit, number| commit.absent(&key(number)));
        (checks..count).fold(commit, |commit, number| commit.put(&key(number), ""))
    };
    let said = format!("has {} checks and writes; the limit is {limit}", limit + 1);
    for checks in [0, limit / 2, limit] {
        check(&store, commit(limit, checks), Ok(())).await;
        check(&store, commit(limit + 1, checks), Err(&said)).await;
    }
}

fn of_size(space: &Space, size: usize) -> Commit {
    let (keys, meta) = (8, 100);
    let each = (size - meta) / keys;
    let rest = size - meta - each * keys;
    (0..keys).fold(Commit::new().meta(vec![0; meta]), |commit, number| {
        let length = each - 1 + if number == 0 { rest } else { 0 };
        commit.put(&space.key(format!("{number}")), vec![2; length])
    })
}

async fn a_commit_may_be_as_large_as_the_limit(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::None).await;
    let limit = store.limits().commit_bytes;
    for _ in 0..6 {
        check(&store, of_size(&space, limit), Ok(())).await;
        check(&store, of_size(&space, limit).id(store.commit_id()), Ok(())).await;
    }
    let said = format!("has {} bytes of keys, values and meta; the limit is {limit}", limit + 1);
    check(&store, of_size(&space, limit + 1), Err(&said)).await;
}

async fn a_range_may_be_bounded_by_any_key_that_is_allowed(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    let now = store.generation().await.unwrap();
    let key = |length: usize| vec![b'k'; length];
    let limit = store.limits().key_bytes;
    let commit = |range| Commit::new().unchanged(&range, now);
    check(&store, commit(space.range(key(limit)..=key(limit))), Ok(())).await;
    check(&store, commit(space.prefix(key(limit))), Ok(())).await;
    check(&store, commit(space.range(key(limit + 2)..)), Err(&format!("the limit is {limit}"))).await;
}

async fn a_limit_may_be_the_largest_possible_number(mut bench: Bench) {
    (bench.limits.key_bytes, bench.limits.value_bytes) = (usize::MAX, usize::MAX);
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    let now = store.generation().await.unwrap();
    check(&store, Commit::new().unchanged(&space.all(), now).put(&space.key("k"), "1"), Ok(())).await;
}

async fn an_empty_key_is_an_error_everywhere(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    let empty = space.key("");
    for commit in [
        Commit::new().put(&empty, "1"),
        Commit::new().delete(&empty),
        Commit::new().absent(&empty),
        Commit::new().at_rev(&empty, latchwork_store::Rev(1)),
    ] {
        check(&store, commit, Err("is empty; a key has at least one byte")).await;
    }
    let view = store.view().await.unwrap();
    assert_fails!(view.get(&empty).await, StoreError::EmptyKey { space: named } if named == space.id());
    assert_fails!(view.history(&empty, 1).await, StoreError::EmptyKey { .. });
}

async fn a_key_of_an_undeclared_space_is_an_error_everywhere(bench: Bench) {
    let (store, other) = (bench.open().await, bench.open_other().await);
    let known = space(&store, "a", History::Forever).await;
    space(&other, "b", History::Forever).await;
    let foreign = space(&other, "c", History::Forever).await;
    assert_ne!(known.id(), foreign.id());
    let (key, unknown) = (known.key("k"), foreign.key("k"));
    let now = store.generation().await.unwrap();
    for commit in [
        Commit::new().put(&key, "1").put(&unknown, "1"),
        Commit::new().put(&key, "1").delete(&unknown),
        Commit::new().put(&key, "1").absent(&unknown),
        Commit::new().put(&key, "1").at_rev(&unknown, latchwork_store::Rev(1)),
        Commit::new().put(&key, "1").unchanged(&foreign.all(), now),
    ] {
        let failed = store.commit(commit).await;
        assert_eq!(failed.as_ref().unwrap_err().kind(), ErrorKind::NotFound);
        assert_fails!(failed, StoreError::UnknownSpace { space } if space == foreign.id());
    }
    let view = store.view().await.unwrap();
    assert_fails!(view.get(&unknown).await, StoreError::UnknownSpace { .. });
    assert_fails!(view.history(&unknown, 1).await, StoreError::UnknownSpace { .. });
    assert_fails!(view.scan(&foreign.all(), Order::Ascending, 1).await, StoreError::UnknownSpace { .. });
    assert_fails!(view.changes_since(&foreign.all(), now, 1).await, StoreError::UnknownSpace { .. });
    assert_eq!(store.generation().await.unwrap(), now);
}

async fn a_key_written_twice_is_an_error(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    let twice = space.key("twice");
    for others in [0, 3, 20] {
        let commit = || (0..others).fold(Commit::new().put(&twice, "1"), |c, n| c.put(&space.key(format!("{n}")), "1"));
        for commit in [commit().put(&twice, "1"), commit().delete(&twice)] {
            let failed = store.commit(commit).await;
            assert_fails!(failed, StoreError::WrittenTwice { key } if key == twice);
        }
    }
    apply(&store, Commit::new().absent(&twice).absent(&twice).put(&twice, "1")).await;
}

async fn input_over_a_limit_changes_nothing(bench: Bench) {
    let store = bench.open().await;
    let space = space(&store, "a", History::Forever).await;
    let id = store.commit_id();
    let large = vec![0; store.limits().value_bytes + 1];
    let before = store.stats().await.unwrap();
    store.commit(Commit::new().id(id).put(&space.key("a"), "1").put(&space.key("b"), large)).await.unwrap_err();
    let after = store.stats().await.unwrap();
    assert_eq!((after.generation, after.applied, after.refused), (before.generation, before.applied, before.refused));
    assert!(!apply(&store, Commit::new().id(id).put(&space.key("a"), "1")).await.repeated);
}
