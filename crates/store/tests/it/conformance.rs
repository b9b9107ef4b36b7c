//! What every backend must do, through the public API alone. A backend that passes this suite can stand behind
//! everything that is built on the store.

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

/// A space of that name and history.
async fn space(store: &Store, name: &str, history: History) -> Space {
    store.space(SpaceSpec::new(name).history(history)).await.unwrap()
}

/// A commit that must land.
async fn apply(store: &Store, commit: Commit) -> Receipt {
    store.commit(commit).await.unwrap().applied().unwrap()
}

/// A commit that must be refused.
async fn refuse(store: &Store, commit: Commit) -> Refusal {
    store.commit(commit).await.unwrap().applied().unwrap_err()
}

async fn put(store: &Store, key: &Key, value: &str) -> Generation {
    apply(store, Commit::new().put(key, value.to_owned())).await.generation
}

async fn delete(store: &Store, key: &Key) -> Generation {
    apply(store, Commit::new().delete(key)).await.generation
}

/// Rev and value of a key now.
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

/// The error of a call that must fail, as its variant's name and fields.
fn error_of<T: std::fmt::Debug>(result: Result<T, StoreError>) -> StoreError {
    result.expect_err("the call must fail")
}

/// Asserts that a result is an error of a shape.
macro_rules! assert_fails {
    ($result:expr, $pattern:pat $(if $guard:expr)?) => {{
        let error = $crate::conformance::error_of($result);
        let said = format!("{error:?}");
        assert!(matches!(error, $pattern $(if $guard)?), "{said}");
    }};
}
use assert_fails;
