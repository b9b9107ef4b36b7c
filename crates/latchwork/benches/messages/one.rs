//! One message at a time to an execution that waits for it, against the latency of one caller's commits.

use std::sync::Arc;
use std::time::Instant;

use latchwork::workflow::{Ctx, Engine, workflow};
use tokio::runtime::Runtime;
use tokio::sync::mpsc;

use crate::report::{Figure, Report};
use crate::{as_task, in_turns};

/// Measures from the call of `signal` until the journal records that it was received. The body of the next step runs
/// only then.
pub(crate) fn signal(runtime: &Runtime, report: &Report) {
    if !report.wants("messages.signal") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let (recorded, is_recorded) = mpsc::unbounded_channel();
    let is_recorded = Arc::new(tokio::sync::Mutex::new(is_recorded));
    let receives = workflow("receives").run(move |ctx: Ctx, ()| {
        let recorded = recorded.clone();
        async move {
            loop {
                let number = ctx.receive::<u64>("number").await?;
                let tell = ctx.run("tell", async || {
                    let _ = recorded.send((number, Instant::now()));
                    Ok(())
                });
                tell.await?;
                if number == u64::MAX {
                    return Ok(());
                }
            }
        }
    });
    let rounds = if report.quick { 10 } else { 100 };
    let path = directory.path().to_path_buf();
    let (value, floor) = as_task(runtime, async move {
        let builder = Engine::open(path.join("engine")).register(&receives);
        let engine = builder.start().await.expect("an engine");
        let handle = engine.start(&receives, ()).id("r").await.expect("a start");
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        let first = engine.store().generation().await.expect("a generation").0;
        in_turns(&path.join("store"), rounds, 20, |number| {
            let (engine, handle, is_recorded) = (engine.clone(), handle.clone(), is_recorded.clone());
            async move {
                // The execution waits again when three commits are stored: the delivery, the receive and the step.
                while engine.store().generation().await.expect("a generation").0 < first + 3 * number as u64 {
                    tokio::task::yield_now().await;
                }
                let begin = Instant::now();
                handle.signal("number", &(number as u64)).await.expect("a signal");
                let (seen, at) = is_recorded.lock().await.recv().await.expect("a receipt");
                assert_eq!(seen, number as u64);
                at - begin
            }
        })
        .await
    });
    report.add(Figure { name: "messages.signal", value, unit: "µs", floor, target: "≤ 2.5" });
}

/// Measures from the call of `update` until the caller has the answer.
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
    let path = directory.path().to_path_buf();
    let (value, floor) = as_task(runtime, async move {
        let builder = Engine::open(path.join("engine")).register(&adds);
        let engine = builder.start().await.expect("an engine");
        let handle = engine.start(&adds, ()).id("a").await.expect("a start");
        in_turns(&path.join("store"), rounds, 20, |number| {
            let handle = handle.clone();
            async move {
                let begin = Instant::now();
                assert_eq!(handle.update::<u64>("add", &1).await.expect("an answer"), number as u64 + 1);
                begin.elapsed()
            }
        })
        .await
    });
    report.add(Figure { name: "messages.update", value, unit: "µs", floor, target: "≤ 3" });
}
