//! Children of one parent, against executions that callers start.

use std::time::{Duration, Instant};

use latchwork::workflow::{Ctx, Engine, workflow};
use tokio::runtime::Runtime;

use crate::rates;
use crate::report::{Figure, Report, median};
use crate::steps_of;

/// How many children run at once.
const AT_ONCE: usize = 1024;

pub(crate) fn children(runtime: &Runtime, report: &Report) {
    if !report.wants("messages.children") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let child = steps_of("child", 1);
    let parent = {
        let child = child.clone();
        workflow("parent").run(move |ctx: Ctx, count: u64| {
            let child = child.clone();
            async move {
                let child = &child;
                let sums = ctx.try_map(0..count, AT_ONCE, async |ctx: Ctx, number| ctx.child(child, number).await);
                Ok(sums.await?.into_iter().sum::<u64>())
            }
        })
    };
    let opened = Engine::open(directory.path()).register(&child).register(&parent).start();
    let engine = runtime.block_on(opened).expect("an engine");
    let (rounds, seconds, count) = if report.quick { (1, 1, 5_000) } else { (5, 3, 50_000) };
    let duration = Duration::from_secs(seconds);
    let best = rates::best_in_flight(runtime, &engine, &child, duration / 2);
    let (mut ours, mut floors) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        rates::settle(&engine);
        floors.push(rates::run(runtime, &engine, &child, best, duration));
        rates::settle(&engine);
        let begin = Instant::now();
        let sum = runtime
            .block_on(async { engine.start(&parent, count).await.expect("a start").result().await.expect("a result") });
        assert_eq!(sum, count * (count + 1) / 2);
        ours.push(count as f64 / begin.elapsed().as_secs_f64());
    }
    let (value, floor) = (median(ours), median(floors));
    report.add(Figure { name: "messages.children", value, unit: "children/s", floor, target: "≥ 0.7" });
}
