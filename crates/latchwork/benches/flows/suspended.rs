//! The memory of requests that wait for answers, against that of executions that sleep.

use latchwork::flow::{Flow, handler, sequencer};
use latchwork::workflow::Engine;

use crate::asleep::idle;
use crate::one::only;
use crate::report::{Figure, Report};
use crate::{child, given, measured};

fn asks() -> Flow {
    let asks = handler("asks").run(async |ctx, value: u64| {
        let answer = ctx.suspend("approve").message("Is this right?").data(value).await?;
        Ok(value + u64::from(answer.is_approved()))
    });
    only(sequencer("chain").step(&asks).build().expect("a sequencer"))
}

/// Measures the memory of a process that has opened a store with many suspended requests, and of one that has opened a
/// store with as many sleeping executions.
pub(crate) fn suspended(report: &Report) {
    if !report.wants("flows.suspended") {
        return;
    }
    let count = if report.quick { 20_000 } else { 1_000_000 };
    let resident = |first: &str, second: &str| {
        let directory = tempfile::tempdir().expect("a directory");
        let [started, _] = measured::<2>(child(first, directory.path(), count));
        let [opened, _] = measured::<2>(child(second, directory.path(), count));
        (started, opened)
    };
    let (floor_started, floor) = resident("child-fall-asleep", "child-asleep");
    let (started, value) = resident("child-suspend", "child-suspended");
    let figure = |name, value, floor| report.add(Figure { name, value, unit: "MB resident", floor, target: "≤ 1.2" });
    figure("flows.suspended", value, floor);
    figure("flows.suspended.started", started, floor_started);
}

/// Starts requests that ask a question.
pub(crate) fn child_suspend<'a>(words: impl Iterator<Item = &'a str>) {
    let (directory, count) = given(words);
    let flow = asks();
    crate::runtime().block_on(async {
        let engine = Engine::open(directory).flow(&flow).start().await.expect("an engine");
        let tasks: Vec<_> = (0..256)
            .map(|task| {
                let (engine, flow) = (engine.clone(), flow.clone());
                tokio::spawn(async move {
                    for number in (task..count).step_by(256) {
                        engine.flow(&flow).run("run", number).await.expect("a request");
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await.expect("a task");
        }
        while engine.residents() > 0 {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
        idle(&engine).await;
        engine.store().close().await.expect("a close");
    });
}

/// Opens a store with suspended requests.
pub(crate) fn child_suspended<'a>(words: impl Iterator<Item = &'a str>) {
    let (directory, _) = given(words);
    let flow = asks();
    crate::runtime().block_on(async {
        let engine = Engine::open(directory).flow(&flow).start().await.expect("an engine");
        idle(&engine).await;
    });
}
