//! What the suites on workflows share.

use std::path::Path;

use latchwork::store::{Space, SpaceSpec, Store};
use latchwork::workflow::{Ctx, Failure, Workflow, workflow};
use tokio::runtime::Runtime;

pub(crate) fn runtime() -> Runtime {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.expect("a runtime can be started")
}

/// A store for the callers of the suite `store`.
pub(crate) async fn store(directory: &Path) -> (Store, Space) {
    let store = Store::open(directory).await.expect("a store");
    let space = store.space(SpaceSpec::new("bench")).await.expect("a space");
    (store, space)
}

/// A workflow of so many steps that do nothing but add up.
pub(crate) fn steps_of(name: &str, count: u64) -> Workflow<u64, u64> {
    workflow(name).run(move |ctx: Ctx, input: u64| async move {
        let mut sum = input;
        for _ in 0..count {
            sum = ctx.run("add", async || Ok::<_, Failure>(sum + 1)).await?;
        }
        Ok(sum)
    })
}
