//! Tests of what every backend must do, through the public API only. Everything that is built on the store works on a
//! backend that passes this suite.

mod closing;
mod commit_ids;
mod commits;
mod limits;
mod read_sets;
mod reopening;
mod retention;
mod snapshots;
mod spaces;
mod time;
mod views;
mod watches;

use latchwork_store::{Commit, Generation, History, Key, Receipt, Refusal, Space, SpaceSpec, Store, StoreError};

/// Declares a space.
async fn space(store: &Store, name: &str, history: History) -> Space {
    store.space(SpaceSpec::new(name).history(history)).await.unwrap()
}

/// Sends a commit that must be applied.
async fn apply(store: &Store, commit: Commit) -> Receipt {
    store.commit(commit).await.unwrap().applied().unwrap()
}

/// Sends a commit that must be refused.
async fn refuse(store: &Store, commit: Commit) -> Refusal {
    store.commit(commit).await.unwrap().applied().unwrap_err()
}

async fn put(store: &Store, key: &Key, value: &str) -> Generation {
    apply(store, Commit::new().put(key, value.to_owned())).await.generation
}

async fn delete(store: &Store, key: &Key) -> Generation {
    apply(store, Commit::new().delete(key)).await.generation
}

/// The current rev and value of a key.
async fn get(store: &Store, key: &Key) -> Option<(u64, String)> {
    let item = store.view().await.unwrap().get(key).await.unwrap();
    item.map(|item| (item.rev.0, text(&item.value)))
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

fn found(rev: u64, value: &str) -> Option<(u64, String)> {
    Some((rev, value.to_owned()))
}

/// Does all the work that would otherwise happen in the background.
async fn settle(store: &Store) {
    while store.maintain().await.unwrap() {}
}

/// The error of a call that must fail.
fn error_of<T: std::fmt::Debug>(result: Result<T, StoreError>) -> StoreError {
    result.expect_err("the call must fail")
}

/// Asserts that a result is an error that matches a pattern.
macro_rules! assert_fails {
    ($result:expr, $pattern:pat $(if $guard:expr)?) => {{
        let error = $crate::conformance::error_of($result);
        let said = format!("{error:?}");
        assert!(matches!(error, $pattern $(if $guard)?), "{said}");
    }};
}
use assert_fails;
