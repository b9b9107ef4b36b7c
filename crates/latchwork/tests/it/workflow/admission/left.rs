//! The records that an engine leaves of unused limits: the next engine finds them by their markers and deletes them.

use std::time::Duration;

use latchwork::store::{Commit, Order, SpaceSpec, Store};
use latchwork::workflow::{Ctx, Queue, RateLimit, Workflow, workflow};

use super::{Lives, settle};

/// A limit for each key, and a bucket for each key that is full again after a second. An end shares a commit with the
/// next start, so it leaves no note.
fn limited() -> Workflow<u32, u32> {
    let rate = RateLimit::new(1, Duration::from_secs(1)).by(|n: &u32| format!("rate {n}"));
    let limited = workflow("limited").concurrency_by(1, |n: &u32| format!("key {n}")).when_full(Queue::new());
    limited.rate_limit(rate).run(async |_: Ctx, n: u32| Ok(n))
}

/// The keys of a space.
async fn keys(store: &Store, name: &str) -> Vec<Vec<u8>> {
    let spaces = store.spaces().await.unwrap();
    let space = spaces.iter().find(|space| space.name() == name).unwrap();
    let found = store.view().await.unwrap().scan(&space.all(), Order::Ascending, usize::MAX).await.unwrap();
    found.into_iter().map(|(key, _)| key.bytes().to_vec()).collect()
}

/// The markers that gates and buckets should have.
async fn expected(store: &Store) -> Vec<Vec<u8>> {
    let stored = keys(store, "workflow.gates").await;
    stored.iter().map(|key| [&key[..2], b"m", &key[2..]].concat()).collect()
}

async fn markers(store: &Store) -> Vec<Vec<u8>> {
    keys(store, "workflow.admission").await.into_iter().filter(|key| key[2] == b'm').collect()
}

/// Uses five keys, and stops before their records are deleted.
async fn used_keys() -> Lives {
    let (lives, limited) = (Lives::new().await, limited());
    let engine = lives.begin(&limited).await;
    for n in 0..5 {
        engine.start(&limited, n).await.unwrap().result().await.unwrap();
    }
    settle().await;
    engine.stop();
    lives
}

#[tokio::test]
async fn the_next_engine_finds_unused_limits_by_their_markers_and_deletes_them() {
    let (lives, limited) = (used_keys().await, limited());
    assert_eq!(keys(&lives.store, "workflow.gates").await.len(), 10, "a gate and a bucket for each key");
    assert_eq!(markers(&lives.store).await, expected(&lives.store).await);
    let engine = lives.begin(&limited).await;
    lives.pass(60).await;
    assert_eq!(lives.records().await, 0);
    // A key that is used again is marked again.
    engine.start(&limited, 3).await.unwrap().result().await.unwrap();
    assert_eq!(markers(&lives.store).await.len(), 2);
    assert_eq!(markers(&lives.store).await, expected(&lives.store).await);
    lives.pass(60).await;
    assert_eq!(lives.records().await, 0);
    engine.stop();
}

/// An earlier program has stored gates and buckets without markers.
#[tokio::test]
async fn gates_without_markers_get_them_once_and_are_deleted_like_others() {
    let (before, lives, limited) = (used_keys().await, Lives::new().await, limited());
    let spaces = before.store.spaces().await.unwrap();
    let gates = spaces.iter().find(|space| space.name() == "workflow.gates").unwrap();
    let stored = before.store.view().await.unwrap().scan(&gates.all(), Order::Ascending, usize::MAX).await.unwrap();
    let old = lives.store.space(SpaceSpec::new("workflow.gates")).await.unwrap();
    let all =
        stored.iter().fold(Commit::new(), |commit, (key, item)| commit.put(&old.key(key.bytes()), item.value.clone()));
    assert!(lives.store.commit(all).await.unwrap().is_applied());
    let engine = lives.begin(&limited).await;
    assert_eq!(keys(&lives.store, "workflow.gates").await.len(), 10);
    assert_eq!(markers(&lives.store).await, expected(&lives.store).await);
    lives.pass(60).await;
    assert_eq!(lives.records().await, 0);
    engine.stop();
}
