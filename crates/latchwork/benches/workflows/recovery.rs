//! Recovery after SIGKILL: a child is killed while its executions are in the middle of a step. This process recovers
//! them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use latchwork::workflow::{Ctx, Engine, Workflow, workflow};
use parking_lot::Mutex;
use tokio::runtime::Runtime;

use crate::report::{Figure, Report};
use crate::{child, given, kill_when_ready, ready};

/// When the bodies of the second steps ran.
#[derive(Default)]
struct Seen {
    first: Mutex<Option<Instant>>,
    last: Mutex<Option<Instant>>,
    count: AtomicUsize,
}

/// A workflow of two steps. The second one ends only if `ends` is true.
fn two_steps(seen: Arc<Seen>, ends: bool) -> Workflow<u64, u64> {
    workflow("two-steps").run(move |ctx: Ctx, input: u64| {
        let seen = seen.clone();
        async move {
            let first = ctx.run("first", async || Ok(input + 1)).await?;
            ctx.run("second", async || {
                let now = Instant::now();
                seen.first.lock().get_or_insert(now);
                *seen.last.lock() = Some(now);
                seen.count.fetch_add(1, Ordering::SeqCst);
                if !ends {
                    std::future::pending::<()>().await;
                }
                Ok(first + 1)
            })
            .await
        }
    })
}

/// Measures from the opening of the store and the start of the engine until every body has run again, and until the
/// first one has.
pub(crate) fn recovery(runtime: &Runtime, report: &Report, steps: Option<f64>) {
    let Some(steps) = steps.filter(|_| report.wants("workflows.recovery")) else { return };
    let count = if report.quick { 2_000 } else { 100_000 };
    let directory = tempfile::tempdir().expect("a directory");
    kill_when_ready(child("child-unfinished", directory.path(), count));
    let seen = Arc::new(Seen::default());
    let two_steps = two_steps(seen.clone(), true);
    let begin = Instant::now();
    runtime.block_on(async {
        let engine = Engine::open(directory.path()).register(&two_steps).start().await.expect("an engine");
        if std::env::var_os("LATCHWORK_STATS").is_some() {
            eprintln!("the engine has started after {:.2} s", begin.elapsed().as_secs_f64());
        }
        while engine.residents() > 0 || seen.count.load(Ordering::SeqCst) < count {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    });
    assert_eq!(seen.count.load(Ordering::SeqCst), count, "every execution continued once");
    let since_begin = |time: &Mutex<Option<Instant>>| time.lock().map_or(f64::NAN, |time| (time - begin).as_secs_f64());
    let (first, last) = (since_begin(&seen.first), since_begin(&seen.last));
    let value = count as f64 / last;
    report.add(Figure { name: "workflows.recovery", value, unit: "executions/s", floor: steps, target: "≥ 0.3" });
    let (value, floor) = (first * 1e3, 1e3);
    report.add(Figure { name: "workflows.recovery.first", value, unit: "ms", floor, target: "≤ 1" });
}

/// Starts executions, prints a line when all of them are in their second step, and waits to be killed.
pub(crate) fn child_unfinished<'a>(words: impl Iterator<Item = &'a str>) {
    let (directory, count) = given(words);
    let seen = Arc::new(Seen::default());
    let two_steps = two_steps(seen.clone(), false);
    crate::runtime().block_on(async {
        let engine = Engine::open(directory).register(&two_steps).start().await.expect("an engine");
        let tasks: Vec<_> = (0..256)
            .map(|task| {
                let (engine, two_steps) = (engine.clone(), two_steps.clone());
                tokio::spawn(async move {
                    for number in (task..count).step_by(256) {
                        engine.start(&two_steps, number as u64).await.expect("a start");
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.expect("a task");
        }
        while seen.count.load(Ordering::SeqCst) < count {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        ready().await;
    });
}
