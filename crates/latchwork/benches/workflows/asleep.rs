//! The cost of sleeping executions: in the process that started them, and in a process that opens their store.

use std::time::Duration;

use latchwork::workflow::{Ctx, Engine, Workflow, workflow};

use crate::report::{Figure, Report, resident_mb};
use crate::{child, given, measured, processor_seconds};

const IDLE: Duration = Duration::from_secs(5);

fn sleeper() -> Workflow<u64, u64> {
    workflow("sleeper").run(async |ctx: Ctx, input: u64| {
        ctx.sleep(Duration::from_secs(365 * 24 * 3600)).await?;
        Ok(input)
    })
}

/// Measures the memory with many sleeping executions, in a process that has opened their store and in the process that
/// has started them, and the processor time of an idle engine.
pub(crate) fn asleep(report: &Report) {
    if !report.wants("workflows.asleep") {
        return;
    }
    let count = if report.quick { 20_000 } else { 1_000_000 };
    let directory = tempfile::tempdir().expect("a directory");
    let [started, started_cpu] = measured(child("child-fall-asleep", directory.path(), count));
    let [opened, opened_cpu] = measured(child("child-asleep", directory.path(), count));
    let figure = |name, value, unit, floor, target| report.add(Figure { name, value, unit, floor, target });
    figure("workflows.asleep", opened, "MB resident", 300.0, "≤ 1");
    figure("workflows.asleep.started", started, "MB resident", 300.0, "≤ 1");
    let idle = IDLE.as_secs_f64();
    figure("workflows.asleep.cpu", opened_cpu.max(started_cpu), "s in 5 s", idle, "about 0");
}

/// Starts executions that sleep.
pub(crate) fn child_fall_asleep<'a>(words: impl Iterator<Item = &'a str>) {
    let (directory, count) = given(words);
    let sleeper = sleeper();
    crate::runtime().block_on(async {
        let engine = Engine::open(directory).register(&sleeper).start().await.expect("an engine");
        let tasks: Vec<_> = (0..256)
            .map(|task| {
                let (engine, sleeper) = (engine.clone(), sleeper.clone());
                tokio::spawn(async move {
                    for number in (task..count).step_by(256) {
                        engine.start(&sleeper, number as u64).await.expect("a start");
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.expect("a task");
        }
        idle(&engine).await;
        engine.store().close().await.expect("a close");
    });
}

/// Opens a store with sleeping executions.
pub(crate) fn child_asleep<'a>(words: impl Iterator<Item = &'a str>) {
    let (directory, _) = given(words);
    let sleeper = sleeper();
    crate::runtime().block_on(async {
        let engine = Engine::open(directory).register(&sleeper).start().await.expect("an engine");
        idle(&engine).await;
    });
}

/// Prints the memory and the processor time of this process while it is idle.
pub(crate) async fn idle(engine: &Engine) {
    // The last commits are not folded into the index yet.
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(engine.residents(), 0, "sleeping executions are not in memory");
    let before = processor_seconds();
    tokio::time::sleep(IDLE).await;
    println!("{} {}", resident_mb(), processor_seconds() - before);
}
