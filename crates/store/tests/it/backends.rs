//! The backends that every test of the suite runs on: memory, a remote backend, files on a simulated disk without
//! threads, files in a real directory with threads, and PostgreSQL. Limits are small, so that folds and new log
//! segments happen all the time.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use latchwork_store::disk::sim::SimDisk;
use latchwork_store::{Env, FileOptions, Limits, PostgresOptions, Store, VirtualClock};

use crate::remote::Remote;
use crate::server::Server;

/// The environment of one store: backend, disk, clock and limits.
pub(crate) struct Bench {
    kind: Kind,
    pub(crate) env: Env,
    pub(crate) clock: Arc<VirtualClock>,
    pub(crate) limits: Limits,
    disk: SimDisk,
    directory: tempfile::TempDir,
    server: Option<Server>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Memory,
    Remote,
    Simulated,
    File,
    Postgres,
}

impl Bench {
    pub(crate) fn memory() -> Bench {
        Bench::new(Kind::Memory)
    }

    pub(crate) fn remote() -> Bench {
        Bench::new(Kind::Remote)
    }

    pub(crate) fn simulated() -> Bench {
        Bench::new(Kind::Simulated)
    }

    pub(crate) fn file() -> Bench {
        Bench::new(Kind::File)
    }

    pub(crate) fn postgres() -> Bench {
        Bench::new(Kind::Postgres)
    }

    fn new(kind: Kind) -> Bench {
        let (env, clock) = Env::seeded(7);
        let directory = tempfile::tempdir().expect("a temporary directory");
        let server = (kind == Kind::Postgres).then(Server::start);
        Bench { kind, env, clock, limits: small_limits(), disk: SimDisk::new(), directory, server }
    }

    /// True if commits are kept after the last handle is dropped.
    pub(crate) fn is_durable(&self) -> bool {
        !matches!(self.kind, Kind::Memory | Kind::Remote)
    }

    /// Whether every answer takes a round trip to a server.
    pub(crate) fn is_remote(&self) -> bool {
        self.kind == Kind::Postgres
    }

    /// Opens the store of this bench, or opens it again.
    pub(crate) async fn open(&self) -> Store {
        match self.kind {
            Kind::Memory => Store::memory_with(self.env.clone(), self.limits).await.expect("a store in memory"),
            Kind::Remote => {
                let (remote, disk) = (Remote::new(self.env.clone()), Arc::new(latchwork_store::disk::RealDisk));
                let store = Store::with_backend(Arc::new(remote), self.env.clone(), self.limits, disk).await;
                store.expect("a store on a remote backend")
            }
            Kind::Simulated | Kind::File => self.open_at(&self.path("store")).await,
            Kind::Postgres => self.connect("store").await,
        }
    }

    /// Opens the store of a schema that is this bench's own.
    async fn connect(&self, name: &str) -> Store {
        let own = self.directory.path().file_name().expect("a name").to_string_lossy().to_lowercase();
        let own: String = own.chars().filter(char::is_ascii_alphanumeric).collect();
        let options = PostgresOptions::new().schema(format!("t_{}_{own}_{name}", std::process::id()));
        let options = options.env(self.env.clone()).limits(self.limits).connections(2);
        let url = &self.server.as_ref().expect("a server").url;
        options.connect(url).await.expect("a store in PostgreSQL")
    }

    /// Another store in memory or another directory: nothing of this one is in it.
    pub(crate) async fn open_other(&self) -> Store {
        match self.kind {
            Kind::Memory | Kind::Remote => self.open().await,
            Kind::Simulated | Kind::File => self.open_at(&self.path("other")).await,
            Kind::Postgres => self.connect("other").await,
        }
    }

    /// Opens a data directory on the disk to which this bench writes snapshots.
    pub(crate) async fn open_at(&self, path: &Path) -> Store {
        self.options().open(path).await.expect("the directory opens")
    }

    /// The options with which this bench opens directories.
    pub(crate) fn options(&self) -> FileOptions {
        let options = FileOptions::new()
            .env(self.env.clone())
            .limits(self.limits)
            .segment_bytes(256 << 10)
            .overlay_bytes(16 << 10)
            .fold_interval(Duration::from_millis(2));
        match self.kind {
            Kind::Simulated => options.disk(self.disk.clone()).without_threads(),
            Kind::Memory | Kind::Remote | Kind::File | Kind::Postgres => options,
        }
    }

    /// A path on this bench's disk.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        match self.kind {
            Kind::Simulated => Path::new("/").join(name),
            Kind::Memory | Kind::Remote | Kind::File | Kind::Postgres => self.directory.path().join(name),
        }
    }
}

/// Limits that fit a small log segment.
pub(crate) fn small_limits() -> Limits {
    let mut limits = Limits::default();
    limits.key_bytes = 64;
    limits.value_bytes = 16 << 10;
    limits.operations = 1000;
    limits.commit_bytes = 64 << 10;
    limits
}

thread_local! {
    /// How long an answer that is there may take, on the backend of the present test.
    static PATIENCE: std::cell::Cell<Duration> = const { std::cell::Cell::new(Duration::ZERO) };
}

/// How long an answer that is there may take.
pub(crate) fn patience() -> Duration {
    PATIENCE.get()
}

/// Runs one test to its end, or fails it if it hangs.
pub(crate) fn run<F: Future<Output = ()>>(bench: Bench, test: impl FnOnce(Bench) -> F) {
    PATIENCE.set(if bench.is_remote() { Duration::from_millis(500) } else { Duration::ZERO });
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let ended = tokio::time::timeout(Duration::from_secs(60), test(bench)).await;
        assert!(ended.is_ok(), "the test hangs");
    });
}

/// Creates a test of each function for each backend: `the_function::memory` and so on.
macro_rules! on_every_backend {
    ($($test:ident),* $(,)?) => {$(
        mod $test {
            use crate::backends::{Bench, run};

            #[test]
            fn memory() {
                run(Bench::memory(), super::$test);
            }

            #[test]
            fn remote() {
                run(Bench::remote(), super::$test);
            }

            #[test]
            fn simulated() {
                run(Bench::simulated(), super::$test);
            }

            #[test]
            fn file() {
                run(Bench::file(), super::$test);
            }

            #[test]
            fn postgres() {
                run(Bench::postgres(), super::$test);
            }
        }
    )*};
}
pub(crate) use on_every_backend;
