//! Many starts at once: under limits that they do not reach, and gathered into batches; against plain starts.

use std::time::{Duration, Instant};

use latchwork::workflow::{Batch, Ctx, Engine, Workflow, workflow};
use tokio::runtime::Runtime;

use crate::report::{Figure, Report, median};
use crate::{commits, rates, steps_in, steps_of, tell_commits};

/// Starts of a one-step workflow, each under the limit of one of a thousand keys.
pub(crate) fn limit(runtime: &Runtime, report: &Report) {
    const KEYS: u64 = 1000;
    if report.wants("admission.limit") {
        // At most a few executions of each key run at once.
        let limited = workflow("limited").concurrency_by(64, |number: &u64| (number % KEYS).to_string());
        let figure = ("admission.limit", "executions/s", "≥ 0.7");
        against_starts(runtime, report, &steps_in(limited, 1), figure);
    }
}

/// Starts that become batches of a hundred, of one step each. Every caller waits for the result of its own input.
pub(crate) fn batch(runtime: &Runtime, report: &Report) {
    if report.wants("admission.batch") {
        let batch = Batch::new(100, Duration::from_millis(50));
        let batched = workflow("batched").batch(batch).run(async |ctx: Ctx, numbers: Vec<u64>| {
            let add = async || Ok(numbers.iter().map(|number| number + 1).collect());
            ctx.run("add", add).await
        });
        against_starts(runtime, report, &batched, ("admission.batch", "inputs/s", "≥ 3"));
    }
}

/// Starts of this workflow, in turn with starts of a one-step workflow without limits.
fn against_starts(
    runtime: &Runtime,
    report: &Report,
    workflow: &Workflow<u64, u64>,
    (name, unit, target): (&str, &str, &str),
) {
    let directory = tempfile::tempdir().expect("a directory");
    let free = steps_of("free", 1);
    let opened = Engine::open(directory.path()).register(&free).register(workflow).start();
    let engine = runtime.block_on(opened).expect("an engine");
    let (rounds, seconds) = if report.quick { (1, 1) } else { (5, 3) };
    let duration = Duration::from_secs(seconds);
    let both = [&free, workflow].map(|it| (it, rates::best_in_flight(runtime, &engine, it, duration / 2)));
    let mut measured = [Vec::new(), Vec::new()];
    for _ in 0..rounds {
        for ((it, in_flight), found) in both.iter().zip(&mut measured) {
            rates::settle(&engine);
            let (before, begin) = (runtime.block_on(commits(&engine)), Instant::now());
            found.push(rates::run(runtime, &engine, it, *in_flight, duration));
            let count = found[found.len() - 1] * begin.elapsed().as_secs_f64();
            tell_commits(name, it.name(), runtime.block_on(commits(&engine)) - before, count);
        }
    }
    let [floor, value] = measured.map(median);
    report.add(Figure { name, value, unit, floor, target });
}
