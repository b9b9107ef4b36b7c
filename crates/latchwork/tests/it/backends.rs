//! The backends that the tests run on: memory, files on a simulated disk without threads, and files in a real directory
//! with threads. Logs and overlays are small, so that commits are folded and segments switched all the time.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use latchwork::entity::Entities;
use latchwork::store::disk::sim::SimDisk;
use latchwork::store::{Env, FileOptions, Limits, Store, VirtualClock};

/// The place of one store, with its disk and clock.
pub(crate) struct Bench {
    kind: Kind,
    pub(crate) env: Env,
    pub(crate) clock: Arc<VirtualClock>,
    pub(crate) limits: Limits,
    disk: SimDisk,
    directory: tempfile::TempDir,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Memory,
    Simulated,
    File,
}

impl Bench {
    pub(crate) fn memory() -> Bench {
        Bench::new(Kind::Memory)
    }

    pub(crate) fn simulated() -> Bench {
        Bench::new(Kind::Simulated)
    }

    pub(crate) fn file() -> Bench {
        Bench::new(Kind::File)
    }

    fn new(kind: Kind) -> Bench {
        let (env, clock) = Env::seeded(7);
        let mut limits = Limits::default();
        (limits.value_bytes, limits.operations, limits.commit_bytes) = (32 << 10, 4000, 256 << 10);
        let directory = tempfile::tempdir().expect("a temporary directory");
        Bench { kind, env, clock, limits, disk: SimDisk::new(), directory }
    }

    /// True if commits survive the last handle of the store.
    pub(crate) fn is_durable(&self) -> bool {
        self.kind != Kind::Memory
    }

    /// Opens the store of this bench, or opens it again.
    pub(crate) async fn open(&self) -> Store {
        match self.kind {
            Kind::Memory => Store::memory_with(self.env.clone(), self.limits).await.expect("a store in memory"),
            Kind::Simulated | Kind::File => self.open_at(&self.path("store")).await,
        }
    }

    /// The entities of a new store.
    pub(crate) async fn entities(&self) -> Entities {
        Entities::on(&self.open().await).await.expect("the entities of the store")
    }

    /// Opens a data directory on the disk of this bench's snapshots.
    pub(crate) async fn open_at(&self, path: &Path) -> Store {
        self.options().open(path).await.expect("the directory opens")
    }

    /// The options with which this bench opens directories.
    pub(crate) fn options(&self) -> FileOptions {
        let options = FileOptions::new()
            .env(self.env.clone())
            .limits(self.limits)
            .segment_bytes(512 << 10)
            .overlay_bytes(64 << 10)
            .fold_interval(Duration::from_millis(2));
        match self.kind {
            Kind::Simulated => options.disk(self.disk.clone()).without_threads(),
            Kind::Memory | Kind::File => options,
        }
    }

    /// A path on this bench's disk.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        match self.kind {
            Kind::Simulated => Path::new("/").join(name),
            Kind::Memory | Kind::File => self.directory.path().join(name),
        }
    }
}

/// Runs one test to its end, or fails it if it hangs.
#[allow(clippy::disallowed_methods)] // Real time moves the virtual clock.
pub(crate) fn run<F: Future<Output = ()>>(bench: Bench, test: impl FnOnce(Bench) -> F) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().expect("a runtime");
    runtime.block_on(async {
        // When no task has anything to do, virtual time moves to the next deadline.
        let (clock, env) = (bench.clock.clone(), bench.env.clone());
        let waking = async move {
            loop {
                tokio::time::sleep(Duration::from_millis(1)).await;
                if let Some(deadline) = clock.next_deadline() {
                    clock.advance(deadline.saturating_sub(env.monotonic()));
                }
            }
        };
        tokio::select! {
            ended = tokio::time::timeout(Duration::from_secs(120), test(bench)) => assert!(ended.is_ok(), "it hangs"),
            () = waking => {}
        }
    });
}

/// Makes a test of each function for each backend: `the_function::memory` and so on. An attribute before a name, such
/// as `#[ignore]`, applies to all of its tests.
macro_rules! on_every_backend {
    ($($(#[$attribute:meta])* $test:ident),* $(,)?) => {$(
        mod $test {
            use crate::backends::{Bench, run};

            #[test]
            $(#[$attribute])*
            fn memory() {
                run(Bench::memory(), super::$test);
            }

            #[test]
            $(#[$attribute])*
            fn simulated() {
                run(Bench::simulated(), super::$test);
            }

            #[test]
            $(#[$attribute])*
            fn file() {
                run(Bench::file(), super::$test);
            }
        }
    )*};
}
pub(crate) use on_every_backend;
