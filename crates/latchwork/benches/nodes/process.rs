//! The processes of the suite: this program again, with a role. A process prints a line when it is ready, and ends when
//! its input is closed.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use latchwork::node::NodeOptions;
use latchwork::store::{Commit, PostgresOptions, SpaceSpec, Store};
use latchwork::workflow::{Ctx, Engine, EngineBuilder, Workflow, workflow};

const ROLE: &str = "LATCHWORK_BENCH_ROLE";
const URL: &str = "LATCHWORK_BENCH_URL";
const SCHEMA: &str = "LATCHWORK_BENCH_SCHEMA";
const COUNT: &str = "LATCHWORK_BENCH_COUNT";

/// The lease of all nodes here.
pub(crate) const LEASE: Duration = Duration::from_secs(2);

pub(crate) async fn store(url: &str, schema: &str) -> Store {
    PostgresOptions::new().schema(schema).connect(url).await.expect("a store")
}

pub(crate) fn node(store: &Store, name: &str) -> EngineBuilder {
    Engine::on(store).most_crashes(1000).node(NodeOptions::new().name(name).lease(LEASE))
}

/// Ten steps that do nothing.
pub(crate) fn ten() -> Workflow<u64, u64> {
    workflow("ten").run(async |ctx: Ctx, n: u64| {
        for _ in 0..10 {
            ctx.run("step", async || Ok(())).await?;
        }
        Ok(n)
    })
}

/// Answers updates for ever.
pub(crate) fn answers() -> Workflow<u64, u64> {
    workflow("answers").run(async |ctx: Ctx, n: u64| {
        loop {
            let asked = ctx.receive_update::<u64, u64>("add").await?;
            let sum = n + asked.value;
            asked.answer(&sum).await?;
        }
    })
}

/// Told of every body that begins.
pub(crate) type Told = Arc<dyn Fn(u64) + Send + Sync>;

/// Beats: a step every twentieth of a second.
pub(crate) fn beats(told: Told) -> Workflow<u64, u64> {
    workflow("beats").with(told).run(async |ctx: Ctx, told: Told, n: u64| {
        for _ in 0..10_000 {
            ctx.run("beat", async || {
                told(n);
                Ok(())
            })
            .await?;
            ctx.sleep(Duration::from_millis(50)).await?;
        }
        Ok(n)
    })
}

/// Is in the middle of a step for as long as its process lives.
pub(crate) fn hangs(told: Told) -> Workflow<u64, u64> {
    workflow("hangs").with(told).run(async |ctx: Ctx, told: Told, n: u64| {
        ctx.run("first", async || Ok(())).await?;
        ctx.run("hang", async || {
            told(n);
            std::future::pending::<Result<(), latchwork::workflow::Failure>>().await
        })
        .await?;
        Ok(n)
    })
}

/// Another process.
pub(crate) struct Process(Child);

impl Process {
    pub(crate) fn start(role: &str, url: &str, schema: &str, count: u64) -> Process {
        let program = std::env::current_exe().expect("this program");
        let child = Command::new(program)
            .envs([(ROLE, role), (URL, url), (SCHEMA, schema), (COUNT, &count.to_string())])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        Process(child.expect("a process can be started"))
    }

    /// Waits until the process is ready.
    pub(crate) fn ready(mut self) -> Process {
        let mut line = String::new();
        let out = self.0.stdout.take().expect("its output");
        let mut out = BufReader::new(out);
        out.read_line(&mut line).expect("a line");
        self.0.stdout = Some(out.into_inner());
        self
    }

    pub(crate) fn kill(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }

    /// Closes its input, and waits for its end if asked. Returns what it has printed since it was ready.
    pub(crate) fn end(mut self) -> String {
        drop(self.0.stdin.take());
        let mut said = String::new();
        let _ = self.0.stdout.take().expect("its output").read_to_string(&mut said);
        let _ = self.0.wait();
        said
    }

    /// Closes its input: it stops in order.
    pub(crate) fn dismiss(&mut self) {
        drop(self.0.stdin.take());
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

/// Plays the role of this process, if it has one.
pub(crate) async fn play() -> bool {
    let read = |name: &str| std::env::var(name).unwrap_or_default();
    let (Ok(role), url, schema) = (std::env::var(ROLE), read(URL), read(SCHEMA)) else { return false };
    let count = read(COUNT).parse().unwrap_or_default();
    let (store, name) = (store(&url, &schema).await, format!("bench-{}", std::process::id()));
    match role.as_str() {
        "commits" => commits(&store, count).await,
        "steps" => steps(&store, &name, count).await,
        "locks" => locks(&store, &name).await,
        "hangs" => start_hanging(&store, &name, count).await,
        _ => {
            let quiet: Told = Arc::new(|_| {});
            let engine = node(&store, &name).register(&beats(quiet)).register(&answers()).start().await;
            let engine = engine.expect("an engine");
            println!("ready");
            until_dismissed().await;
            engine.shutdown().await.expect("it stops");
        }
    }
    true
}

async fn until_dismissed() {
    let read = || std::io::stdin().read_line(&mut String::new());
    let _ = tokio::task::spawn_blocking(read).await;
}

/// Commits of 64 callers for some seconds.
async fn commits(store: &Store, seconds: u64) {
    let space = store.space(SpaceSpec::new("bench").keys_used_once()).await.expect("a space");
    println!("ready");
    let (until, done) = (Instant::now() + Duration::from_secs(seconds), Arc::new(AtomicU64::new(0)));
    let mut callers = tokio::task::JoinSet::new();
    for _ in 0..64 {
        let (store, space, done) = (store.clone(), space.clone(), done.clone());
        callers.spawn(async move {
            while Instant::now() < until {
                let key = space.key(store.env().uuid().as_bytes());
                let commit = Commit::new().absent(&key).put(&key, vec![7; 150]);
                assert!(store.commit(commit).await.expect("a commit").is_applied());
                done.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
    callers.join_all().await;
    println!("{}", done.load(Ordering::Relaxed));
}

/// Executions of ten steps by 64 callers for some seconds.
async fn steps(store: &Store, name: &str, seconds: u64) {
    let ten = ten();
    let engine = node(store, name).register(&ten).start().await.expect("an engine");
    println!("ready");
    // All processes have their share by then.
    tokio::time::sleep(LEASE).await;
    let (until, done) = (Instant::now() + Duration::from_secs(seconds), Arc::new(AtomicU64::new(0)));
    let mut callers = tokio::task::JoinSet::new();
    for _ in 0..64 {
        let (engine, ten, done) = (engine.clone(), ten.clone(), done.clone());
        callers.spawn(async move {
            while Instant::now() < until {
                engine.start(&ten, 1).await.expect("a start").result().await.expect("a result");
                done.fetch_add(10, Ordering::Relaxed);
            }
        });
    }
    callers.join_all().await;
    println!("{}", done.load(Ordering::Relaxed));
    engine.shutdown().await.expect("it stops");
}

/// Takes the lock again and again.
async fn locks(store: &Store, name: &str) {
    let engine = node(store, name).register(&ten()).start().await.expect("an engine");
    println!("ready");
    let lock = engine.mutex("bench");
    tokio::spawn(async move {
        loop {
            let guard = lock.clone().acquire().await.expect("the lock");
            guard.release().await.expect("a release");
        }
    });
    until_dismissed().await;
}

/// Starts executions that hang, and waits to be killed.
async fn start_hanging(store: &Store, name: &str, count: u64) {
    let hangs = hangs(Arc::new(|_| {}));
    let engine = node(store, name).register(&hangs).start().await.expect("an engine");
    let mut callers = tokio::task::JoinSet::new();
    for caller in 0..64 {
        let (engine, hangs) = (engine.clone(), hangs.clone());
        callers.spawn(async move {
            for n in (caller..count).step_by(64) {
                engine.start(&hangs, n).id(format!("h{n}")).await.expect("a start");
            }
        });
    }
    callers.join_all().await;
    println!("ready");
    until_dismissed().await;
}
