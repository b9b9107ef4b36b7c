//! One message at a time, to an execution that waits for it: against the latency of one caller's commits.

use std::time::Instant;

use latchwork::workflow::{Ctx, Engine, Failure, workflow};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;

use crate::in_turns;
use crate::report::{Figure, Report};

/// From the call of `signal` until its receipt is recorded: the body of a step that follows runs only then.
pub(crate) fn signal(runtime: &Runtime, report: &Report) {
    if !report.wants("messages.signal") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let (recorded, mut is_recorded) = mpsc::unbounded_channel();
    let receives = workflow("receives").run(move |ctx: Ctx, ()| {
        let recorded = recorded.clone();
        async move {
            loop {
                let number = ctx.receive::<u64>("number").await?;
                let tell = ctx.run("tell", async || {
                    let _ = recorded.send((number, Instant::now()));
                    Ok::<_, Failure>(())
                });
                tell.await?;
                if number == u64::MAX {
                    return Ok(());
                }
            }
        }
    });
    let rounds = if report.quick { 10 } else { 100 };
    let (value, floor) = runtime.block_on(async {
        let builder = Engine::open(directory.path().join("engine")).register(&receives);
        let engine = builder.start().await.expect("an engine");
        let handle = engine.start(&receives, ()).id("r").await.expect("a start");
        in_turns(&directory.path().join("store"), rounds, 20, async |number| {
            // It waits again before the next.
            tokio::time::sleep(std::time::Duration::from_millis(1)).await;
            let begin = Instant::now();
            handle.signal("number", &(number as u64)).await.expect("a signal");
            let (seen, at) = is_recorded.recv().await.expect("a receipt");
            assert_eq!(seen, number as u64);
            at - begin
        })
        .await
    });
    report.add(Figure { name: "messages.signal", value, unit: "µs", floor, target: "≤ 2.5" });
}

/// From the call of `update` until the caller has the answer.
pub(crate) fn update(runtime: &Runtime, report: &Report) {
    if !report.wants("messages.update") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let adds = workflow("adds").run(async |ctx: Ctx, ()| {
        let mut sum = 0u64;
        while sum < u64::MAX {
            let request = ctx.receive_update::<u64, u64>("add").await?;
            sum += request.value;
            request.answer(&sum).await?;
        }
        Ok(())
    });
    let rounds = if report.quick { 10 } else { 100 };
    let (value, floor) = runtime.block_on(async {
        let builder = Engine::open(directory.path().join("engine")).register(&adds);
        let engine = builder.start().await.expect("an engine");
        let handle = engine.start(&adds, ()).id("a").await.expect("a start");
        in_turns(&directory.path().join("store"), rounds, 20, async |number| {
            let begin = Instant::now();
            assert_eq!(handle.update::<u64>("add", &1).await.expect("an answer"), number as u64 + 1);
            begin.elapsed()
        })
        .await
    });
    report.add(Figure { name: "messages.update", value, unit: "µs", floor, target: "≤ 3" });
}
