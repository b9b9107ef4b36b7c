//! The first page of a list, among many executions against few.

use std::time::Instant;

use futures_util::StreamExt;
use latchwork::workflow::{Ctx, Engine, ExecutionFilter, Status, workflow};
use tokio::runtime::Runtime;

use crate::report::{Figure, Report, median};

pub(crate) fn list(runtime: &Runtime, report: &Report) {
    if !report.wants("messages.list") {
        return;
    }
    let (few, many) = if report.quick { (1_000, 20_000) } else { (1_000, 1_000_000) };
    let (floor, value) = (pages(runtime, few), pages(runtime, many));
    report.add(Figure { name: "messages.list", value, unit: "µs", floor, target: "≤ 3" });
}

/// Returns the time of a first page among `count` executions. One in ten has a tag, and one in a hundred another
/// status. The filters are used alone and together.
fn pages(runtime: &Runtime, count: u32) -> f64 {
    let directory = tempfile::tempdir().expect("a directory");
    runtime.block_on(async {
        let ends = workflow("ends").run(async |ctx: Ctx, number: u32| {
            if number.is_multiple_of(100) {
                ctx.receive::<u32>("never").await?;
            }
            Ok(number)
        });
        let engine = Engine::open(directory.path()).register(&ends).start().await.expect("an engine");
        let starts = (0..count).map(|number| {
            let start = engine.start(&ends, number).attribute("number", number);
            let start = if number.is_multiple_of(10) { start.tag("tenth") } else { start };
            async move { start.await.map(|_| ()) }
        });
        let mut starts = futures_util::stream::iter(starts).buffer_unordered(512);
        while let Some(started) = starts.next().await {
            started.expect("a start");
        }
        // Waiting executions leave memory, and commits are folded into the index.
        tokio::time::sleep(std::time::Duration::from_secs(3)).await;
        let filters = || {
            let ends = || ExecutionFilter::new().workflow("ends");
            let waits = ends().is(Status::Waiting);
            [ends(), ends().is(Status::Completed), waits, ends().tag("tenth"), ends().tag("tenth").is(Status::Waiting)]
        };
        let mut times = Vec::new();
        for _ in 0..20 {
            for filter in filters() {
                let begin = Instant::now();
                let page = engine.list(filter).limit(10).await.expect("a page");
                times.push(begin.elapsed().as_secs_f64() * 1e6);
                assert_eq!(page.items.len(), 10);
            }
        }
        median(times)
    })
}
