//! Data directories of released formats, which every later build must open, verify and continue. Each is a folder in
//! `golden/`, named by its number. A new one is written when stored bytes change in a release:
//!
//!     LATCHWORK_GOLDEN=write cargo test -p latchwork-tests --test it golden
//!
//! writes the last of them again. To keep the existing ones, raise `LAST` first, and write a file that says what the
//! new directory holds, as `limits` does for 2: the code of each directory must be able to continue it.

mod flows;
mod limits;
mod pack;
mod play;

use std::path::{Path, PathBuf};
use std::time::Duration;

use latchwork::store::{Env, FileOptions, Limits, Store, VirtualClock};

/// The number of the newest directory.
const LAST: u32 = 3;

/// A directory opens with any options that fit its segments. These options keep it small.
async fn open(directory: &Path, env: Env) -> Store {
    let mut limits = Limits::default();
    (limits.value_bytes, limits.operations, limits.commit_bytes) = (1 << 20, 4000, 2 << 20);
    let options = FileOptions::new().env(env).limits(limits).segment_bytes(4 << 20);
    options.open(directory).await.unwrap()
}

fn folder(number: u32) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("it/golden").join(number.to_string())
}

/// Waits for a future while virtual time passes, an hour at a time.
#[allow(clippy::disallowed_methods)] // Real time moves the virtual clock.
async fn as_time_goes_by<T>(clock: &VirtualClock, future: impl Future<Output = T>) -> T {
    let passing = async {
        loop {
            tokio::time::sleep(Duration::from_millis(2)).await;
            clock.advance(Duration::from_secs(3600));
        }
    };
    tokio::select! {
        done = future => done,
        () = passing => unreachable!("time has no end"),
    }
}

/// Checks that nothing in the store, or in the library's records, is damaged.
async fn verify(store: &Store) {
    assert_eq!(store.verify().await.unwrap(), []);
    assert_eq!(latchwork::entity::Entities::on(store).await.unwrap().verify().await.unwrap(), []);
}

/// Stands for every future upgrade: what an older program stored is complete, and its executions continue.
#[tokio::test]
async fn every_directory_that_was_ever_written_opens_and_its_executions_continue() {
    if std::env::var("LATCHWORK_GOLDEN").is_ok_and(|what| what == "write") {
        let directory = tempfile::tempdir().unwrap();
        let (env, clock) = Env::seeded(7);
        let store = open(directory.path(), env).await;
        match LAST {
            1 => play::begin(&store, &clock).await,
            3 => flows::begin(&store, &clock).await,
            _ => limits::begin(&store, &clock).await,
        }
        store.close().await.unwrap();
        drop(store);
        pack::write(directory.path(), &folder(LAST));
    }
    for number in 1..=LAST {
        let directory = tempfile::tempdir().unwrap();
        pack::read(&folder(number), directory.path());
        let (env, clock) = Env::seeded(u64::from(number));
        clock.advance(Duration::from_secs(3600));
        let store = open(directory.path(), env).await;
        verify(&store).await;
        match number {
            1 => {
                play::look(&store).await;
                play::go_on(&store, &clock).await;
            }
            3 => {
                flows::look(&store).await;
                flows::go_on(&store, &clock).await;
            }
            _ => {
                limits::look(&store).await;
                limits::go_on(&store, &clock).await;
            }
        }
        verify(&store).await;
        store.close().await.unwrap();
    }
}
