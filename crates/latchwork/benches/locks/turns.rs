//! Acquiring and releasing a lock: alone, in turn with others, and with a long queue.

use std::time::{Duration, Instant};

use latchwork::lock::LockGuard;
use latchwork::workflow::{Ctx, Engine, Workflow, workflow};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;

use crate::load::callers;
use crate::report::{Figure, Report, median};
use crate::{as_task, in_turns, store};

/// Acquires and releases a mutex without waiters, by code outside of a workflow.
pub(crate) fn uncontended(runtime: &Runtime, report: &Report) {
    if !report.wants("locks.uncontended") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let rounds = if report.quick { 10 } else { 100 };
    let path = directory.path().to_path_buf();
    let (value, floor) = as_task(runtime, async move {
        let engine = Engine::open(path.join("engine")).start().await.expect("an engine");
        in_turns(&path.join("store"), rounds, 20, |number| {
            let mutex = engine.mutex(format!("m{}", number % 10));
            async move {
                let begin = Instant::now();
                let guard = mutex.acquire().await.expect("a lock");
                guard.release().await.expect("a release");
                begin.elapsed()
            }
        })
        .await
    });
    report.add(Figure { name: "locks.uncontended", value, unit: "µs", floor, target: "≤ 2.5" });
}

/// How many executions acquire one mutex in turn.
const EXECUTIONS: u64 = 64;

/// A workflow that acquires one mutex again and again.
pub(crate) fn takes() -> Workflow<u64, ()> {
    workflow("takes").run(async |ctx: Ctx, sections: u64| {
        for _ in 0..sections {
            let guard = ctx.mutex("m").acquire().await?;
            guard.release().await?;
        }
        Ok(())
    })
}

/// Starts executions that each acquire the mutex `sections` times. Returns critical sections per second.
pub(crate) async fn take_turns(engine: &Engine, takes: &Workflow<u64, ()>, sections: u64) -> f64 {
    let begin = Instant::now();
    let mut handles = Vec::new();
    for _ in 0..EXECUTIONS {
        handles.push(engine.start(takes, sections).await.expect("a start"));
    }
    for handle in handles {
        handle.result().await.expect("a result");
    }
    (EXECUTIONS * sections) as f64 / begin.elapsed().as_secs_f64()
}

/// Executions that acquire one mutex again and again: critical sections per second, against one caller's commits per
/// second.
pub(crate) fn contended(runtime: &Runtime, report: &Report) {
    if !report.wants("locks.contended.64") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let (rounds, sections) = if report.quick { (4, 50) } else { (10, 100) };
    let takes = takes();
    let (ours, floors) = runtime.block_on(async {
        let builder = Engine::open(directory.path().join("engine")).register(&takes);
        let engine = builder.start().await.expect("an engine");
        let (store, space) = store(&directory.path().join("store")).await;
        let mut caller = callers(&space, 1).remove(0);
        let (mut ours, mut floors) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            ours.push(take_turns(&engine, &takes, sections).await);
            let (begin, count) = (Instant::now(), EXECUTIONS * sections / 4);
            for _ in 0..count {
                caller.commit(&store).await;
            }
            floors.push(count as f64 / begin.elapsed().as_secs_f64());
        }
        if std::env::var_os("LATCHWORK_STATS").is_some() {
            let commits = engine.store().generation().await.expect("a generation").0;
            let each = commits as f64 / (rounds * EXECUTIONS * sections) as f64;
            eprintln!("locks.contended.64: {each:.2} commits a section");
        }
        (ours, floors)
    });
    let (value, floor) = (median(ours), median(floors));
    report.add(Figure { name: "locks.contended.64", value, unit: "sections/s", floor, target: "≥ 0.7" });
}

/// Measures from the release until the next waiter has the lock, with ten thousand waiters and with ten, in turn.
pub(crate) fn waiters(runtime: &Runtime, report: &Report) {
    if !report.wants("locks.waiters") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let (many, rounds) = if report.quick { (1_000, 100) } else { (10_000, 2_000) };
    let (ours, floors) = runtime.block_on(async {
        let engine = Engine::open(directory.path()).start().await.expect("an engine");
        let mut long = Queue::new(&engine, "many", many).await;
        let mut short = Queue::new(&engine, "ten", 10).await;
        let (mut ours, mut floors) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            ours.push(long.hand_over().await);
            floors.push(short.hand_over().await);
        }
        (ours, floors)
    });
    let (value, floor) = (median(ours), median(floors));
    report.add(Figure { name: "locks.waiters", value, unit: "µs", floor, target: "≤ 1.5" });
}

/// A mutex with a holder and a number of waiters.
struct Queue {
    engine: Engine,
    name: &'static str,
    count: u64,
    granted: mpsc::UnboundedSender<LockGuard>,
    grants: mpsc::UnboundedReceiver<LockGuard>,
    held: Option<LockGuard>,
}

impl Queue {
    async fn new(engine: &Engine, name: &'static str, count: u64) -> Queue {
        let (granted, grants) = mpsc::unbounded_channel();
        let held = Some(engine.mutex(name).acquire().await.expect("a lock"));
        let queue = Queue { engine: engine.clone(), name, count, granted, grants, held };
        (0..count).for_each(|_| queue.join());
        queue.filled().await;
        queue
    }

    /// Adds a waiter.
    fn join(&self) {
        let (mutex, granted) = (self.engine.mutex(self.name), self.granted.clone());
        tokio::spawn(async move {
            // Some waiters still wait when the measurement ends.
            if let Ok(guard) = mutex.acquire().await {
                let _ = granted.send(guard);
            }
        });
    }

    async fn filled(&self) {
        loop {
            let page = self.engine.locks().list().limit(10).await.expect("a list");
            let is_full = page.items.iter().any(|lock| lock.name.name == self.name && lock.waiting == self.count);
            if is_full {
                return;
            }
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Releases the lock and returns the time until the next waiter has it, in microseconds. A new waiter joins the
    /// queue.
    async fn hand_over(&mut self) -> f64 {
        let held = self.held.take().expect("it is held");
        let begin = Instant::now();
        held.release().await.expect("a release");
        self.held = self.grants.recv().await;
        let took = begin.elapsed().as_secs_f64() * 1e6;
        self.join();
        self.filled().await;
        took
    }
}
