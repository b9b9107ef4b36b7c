//! One execution at a time: the time of a step, and whether a step takes longer in a long execution.

use std::sync::Arc;
use std::time::Instant;

use latchwork::workflow::{Ctx, Engine, workflow};
use parking_lot::Mutex;
use tokio::runtime::Runtime;

use crate::report::{Figure, Report, median};
use crate::{as_task, in_turns, steps_of};

/// Executions of ten steps, one after the other, against the latency of one caller's commits.
pub(crate) fn sequential(runtime: &Runtime, report: &Report) {
    const STEPS: u64 = 10;
    if !report.wants("workflows.sequential") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let rounds = if report.quick { 10 } else { 100 };
    let path = directory.path().to_path_buf();
    let (value, floor) = as_task(runtime, async move {
        let ten = steps_of("ten", STEPS);
        let engine = Engine::open(path.join("engine")).register(&ten).start().await.expect("an engine");
        in_turns(&path.join("store"), rounds, 10, |_| {
            let (engine, ten) = (engine.clone(), ten.clone());
            async move {
                let begin = Instant::now();
                let handle = engine.start(&ten, 0).await.expect("a start");
                assert_eq!(handle.result().await.expect("a result"), STEPS);
                begin.elapsed() / STEPS as u32
            }
        })
        .await
    });
    report.add(Figure { name: "workflows.sequential", value, unit: "µs/step", floor, target: "≤ 1.2" });
}

/// The last thousand steps of one execution, against its first thousand.
pub(crate) fn long(runtime: &Runtime, report: &Report) {
    if !report.wants("workflows.long") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let (count, ends) = if report.quick { (5_000, 500) } else { (100_000, 1_000) };
    let times: Arc<Mutex<Vec<Instant>>> = Arc::default();
    let long = workflow("long").run({
        let times = times.clone();
        move |ctx: Ctx, count: usize| {
            let times = times.clone();
            async move {
                for number in 0..count {
                    ctx.run("note", async || Ok(number)).await?;
                    times.lock().push(Instant::now());
                }
                Ok(())
            }
        }
    });
    runtime.block_on(async {
        let engine = Engine::open(directory.path()).register(&long).start().await.expect("an engine");
        engine.start(&long, count).await.expect("a start").result().await.expect("an end");
    });
    let times = times.lock();
    assert_eq!(times.len(), count, "every step was run once");
    let costs: Vec<f64> = times.windows(2).map(|pair| (pair[1] - pair[0]).as_secs_f64() * 1e6).collect();
    let (value, floor) = (median(costs[costs.len() - ends..].to_vec()), median(costs[..ends].to_vec()));
    report.add(Figure { name: "workflows.long", value, unit: "µs/step", floor, target: "≤ 1.2" });
}
