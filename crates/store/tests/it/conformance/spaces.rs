//! Declaring spaces.

use std::time::Duration;

use latchwork_store::{ErrorKind, History, SpaceSpec, StoreError};

use super::{assert_fails, found, get, put, settle, space};
use crate::backends::{Bench, on_every_backend};

on_every_backend!(
    a_space_is_declared_once_and_opened_after_that,
    declaring_with_the_same_history_takes_no_generation,
    the_name_of_a_space_has_bounds,
    whether_keys_are_used_once_cannot_change,
    spaces_are_listed_by_name,
    spaces_declared_concurrently_get_different_numbers,
    a_space_that_is_opened_by_name_keeps_its_history,
);

async fn a_space_is_declared_once_and_opened_after_that(bench: Bench) {
    let store = bench.open().await;
    let first = space(&store, "a", History::Forever).await;
    put(&store, &first.key("k"), "1").await;
    let again = space(&store, "a", History::Forever).await;
    assert_eq!((again.id(), again.name()), (first.id(), "a"));
    assert_eq!(get(&store, &again.key("k")).await, found(1, "1"));
    assert_ne!(space(&store, "b", History::Forever).await.id(), first.id());
}

async fn declaring_with_the_same_history_takes_no_generation(bench: Bench) {
    let store = bench.open().await;
    for history in [
        History::None,
        History::Generations(3),
        History::For(Duration::from_secs(3)),
        History::For(Duration::from_nanos(1500)),
        History::For(Duration::MAX),
        History::Forever,
    ] {
        space(&store, "a", history).await;
        let declared = store.generation().await.unwrap();
        space(&store, "a", history).await;
        assert_eq!(store.generation().await.unwrap(), declared, "{history:?}");
        settle(&store).await;
    }
}

async fn the_name_of_a_space_has_bounds(bench: Bench) {
    let store = bench.open().await;
    let named = async |name: String| store.space(SpaceSpec::new(name)).await;
    named("x".repeat(64)).await.unwrap();
    named("ä/ 1".into()).await.unwrap();
    let long = named("x".repeat(65)).await;
    assert_eq!(long.as_ref().unwrap_err().kind(), ErrorKind::Invalid);
    assert_fails!(long, StoreError::SpaceName { reason: "it is longer than 64 bytes", .. });
    assert_fails!(named(String::new()).await, StoreError::SpaceName { reason: "it is empty", .. });
}

async fn whether_keys_are_used_once_cannot_change(bench: Bench) {
    let store = bench.open().await;
    let (once, many) = (|| SpaceSpec::new("once").keys_used_once(), || SpaceSpec::new("many"));
    store.space(once()).await.unwrap();
    store.space(many()).await.unwrap();
    let before = store.generation().await.unwrap();
    assert_fails!(
        store.space(SpaceSpec::new("once")).await,
        StoreError::SpaceMismatch { name, stored: "keys used once", asked: "keys that may come back" } if name == "once"
    );
    assert_fails!(
        store.space(many().keys_used_once().history(History::Forever)).await,
        StoreError::SpaceMismatch { stored: "keys that may come back", asked: "keys used once", .. }
    );
    assert_eq!(store.generation().await.unwrap(), before);
    store.space(once().history(History::Forever)).await.unwrap();
}

async fn spaces_are_listed_by_name(bench: Bench) {
    let store = bench.open().await;
    assert!(store.spaces().await.unwrap().is_empty());
    for name in ["b", "c", "a"] {
        space(&store, name, History::None).await;
    }
    let names: Vec<_> = store.spaces().await.unwrap().iter().map(|space| space.name().to_owned()).collect();
    assert_eq!(names, ["a", "b", "c"]);
}

async fn spaces_declared_concurrently_get_different_numbers(bench: Bench) {
    let store = bench.open().await;
    let mut declaring = tokio::task::JoinSet::new();
    for number in 0..30 {
        let store = store.clone();
        declaring.spawn(async move { space(&store, &format!("{}", number % 15), History::None).await.id() });
    }
    let mut numbers = declaring.join_all().await;
    numbers.sort();
    numbers.dedup();
    assert_eq!(numbers.len(), 15);
    assert_eq!(store.spaces().await.unwrap().len(), 15);
}

async fn a_space_that_is_opened_by_name_keeps_its_history(bench: Bench) {
    let store = bench.open().await;
    let declared = space(&store, "a", History::Forever).await;
    let first = put(&store, &declared.key("k"), "1").await;
    let opened = store.space(SpaceSpec::new("a")).await.unwrap();
    assert_eq!((opened.id(), store.generation().await.unwrap()), (declared.id(), first));
    put(&store, &declared.key("k"), "2").await;
    settle(&store).await;
    let past = store.view_at(first).await.unwrap();
    assert_eq!(past.get(&opened.key("k")).await.unwrap().unwrap().value, "1");
}
