//! Concurrent histories: tasks compete for a few keys, all their answers are recorded, and a check proves that one
//! order of commits explains all of them. A history in which few commits were refused proves nothing and does not
//! count.

pub(crate) mod check;
pub(crate) mod record;

use std::time::Duration;

use latchwork_store::disk::sim::SimDisk;
use latchwork_store::{FileOptions, Sabotage, Store};

use self::check::{Summary, Violation, check};
use crate::backends::small_limits;

const OPERATIONS: usize = 2000;

/// The number of histories on all backends together.
fn histories() -> u64 {
    std::env::var("LATCHWORK_HISTORIES").ok().and_then(|count| count.parse().ok()).unwrap_or(1000)
}

pub(crate) fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap()
}

/// A store on files whose threads have work all the time.
pub(crate) fn options(sabotage: Option<Sabotage>) -> FileOptions {
    let options = FileOptions::new()
        .limits(small_limits())
        .segment_bytes(256 << 10)
        .overlay_bytes(256 << 10)
        .cache_bytes(1 << 20)
        .fold_interval(Duration::from_millis(3));
    sabotage.into_iter().fold(options, FileOptions::sabotage)
}

/// Records one history on a new store and checks it.
pub(crate) async fn history(store: Store, seed: u64, operations: usize) -> Result<Summary, Violation> {
    let recorded = record::record(&store, seed, operations).await?;
    let summary = check(&recorded)?;
    store.close().await.map_err(|error| Violation::Broken(format!("the store does not close: {error}")))?;
    Ok(summary)
}

/// Checks `count` histories that are not void. A void history is repeated with another seed. The test fails on a
/// machine on which too many are void.
fn explain(count: u64, open: impl AsyncFn() -> Store) {
    let runtime = runtime();
    let mut total = Summary::default();
    let (mut counted, mut void) = (0, 0);
    for seed in 0.. {
        match runtime.block_on(async { history(open().await, seed, OPERATIONS).await }) {
            Ok(summary) => {
                total += summary;
                counted += 1;
            }
            Err(violation @ Violation::Void { .. }) => {
                void += 1;
                assert!(void <= 1 + count / 10, "history {seed}: {violation}; {void} of {} were void", seed + 1);
            }
            Err(violation) => panic!("history {seed}: {violation}"),
        }
        if counted >= count {
            break;
        }
    }
    println!("{counted} histories; {void} others were void: {total:?}");
}

#[test]
fn one_order_explains_what_tasks_saw_of_a_store_in_memory() {
    explain(histories() * 50 / 100, async || Store::memory().await.unwrap());
}

#[test]
fn one_order_explains_what_tasks_saw_of_simulated_files() {
    explain(histories() * 48 / 100, async || options(None).disk(SimDisk::new()).open("/store").await.unwrap());
}

#[test]
fn one_order_explains_what_tasks_saw_of_real_files() {
    let directory = tempfile::tempdir().unwrap();
    let number = std::cell::Cell::new(0);
    explain(histories().div_ceil(50), async || {
        number.set(number.get() + 1);
        options(None).open(directory.path().join(number.get().to_string())).await.unwrap()
    });
}

#[test]
fn one_order_explains_what_tasks_saw_of_postgres() {
    let (server, number) = (crate::server::Server::start(), std::cell::Cell::new(0));
    explain(histories().div_ceil(200), async || {
        number.set(number.get() + 1);
        let schema = format!("t_{}_history_{}", std::process::id(), number.get());
        let options = latchwork_store::PostgresOptions::new().schema(schema).limits(small_limits());
        options.connect(&server.url).await.unwrap()
    });
}
