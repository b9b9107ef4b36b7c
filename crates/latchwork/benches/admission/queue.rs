//! Starts that wait in a queue: many callers of one key, a long queue that is drained, and one admission with a long
//! queue behind it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use latchwork::workflow::{Ctx, Engine, Queue, Workflow, workflow};
use tokio::runtime::Runtime;
use tokio::sync::{Semaphore, mpsc};

use crate::report::{Figure, Report, median};
use crate::turns::{take_turns, takes};
use crate::{commits, rates, steps_in, steps_of, tell_commits};

/// Callers that each start an execution under one key and wait for it, again and again; in turn with executions that
/// acquire one mutex.
pub(crate) fn hot(runtime: &Runtime, report: &Report) {
    const CALLERS: usize = 256;
    if !report.wants("admission.hot.256") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let limited = workflow("hot").concurrency_by(2, |_: &u64| "key").when_full(Queue::new());
    let (hot, takes) = (steps_in(limited, 1), takes());
    let opened = Engine::open(directory.path()).register(&hot).register(&takes).start();
    let engine = runtime.block_on(opened).expect("an engine");
    let (rounds, seconds, sections) = if report.quick { (2, 1, 50) } else { (7, 2, 100) };
    let (mut ours, mut floors) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        rates::settle(&engine);
        floors.push(runtime.block_on(take_turns(&engine, &takes, sections)));
        rates::settle(&engine);
        let (before, begin) = (runtime.block_on(commits(&engine)), Instant::now());
        ours.push(rates::run(runtime, &engine, &hot, CALLERS, Duration::from_secs(seconds)));
        let count = ours[ours.len() - 1] * begin.elapsed().as_secs_f64();
        tell_commits("admission.hot.256", "execution", runtime.block_on(commits(&engine)) - before, count);
    }
    let (value, floor) = (median(ours), median(floors));
    report.add(Figure { name: "admission.hot.256", value, unit: "executions/s", floor, target: "≥ 1" });
}

/// A one-step workflow with a limit. Its executions stay in their step if the input is at least `HELD`.
fn held(limit: u32, gate: &Arc<Semaphore>) -> Workflow<u64, u64> {
    let gate = gate.clone();
    workflow("queued").concurrency(limit).when_full(Queue::new()).run(move |ctx: Ctx, input: u64| {
        let gate = gate.clone();
        async move {
            let add = async || {
                if input >= HELD {
                    gate.acquire().await.expect("the gate is open").forget();
                }
                Ok(input % HELD + 1)
            };
            ctx.run("add", add).await
        }
    })
}

/// Executions with this input or a larger one are held.
const HELD: u64 = 1 << 40;

/// Starts an execution for each input, by `callers` callers.
pub(crate) async fn start_all(
    engine: &Engine,
    workflow: &Workflow<u64, u64>,
    inputs: std::ops::Range<u64>,
    callers: usize,
) {
    let tasks: Vec<_> = (0..callers)
        .map(|task| {
            let (engine, workflow, inputs) = (engine.clone(), workflow.clone(), inputs.clone());
            tokio::spawn(async move {
                for input in inputs.skip(task).step_by(callers) {
                    engine.start(&workflow, input).await.expect("a start");
                }
            })
        })
        .collect();
    for task in tasks {
        task.await.expect("a task");
    }
}

/// Waits until a limit has these counts.
async fn until(engine: &Engine, key: Option<&str>, (used, waiting): (u64, u64)) {
    loop {
        let limit = engine.limit_use("queued", key).await.expect("a limit");
        if (limit.used, limit.waiting) == (used, waiting) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Measures from the end of the executions that hold all permits until the last of a long queue has ended, in turn with
/// executions without limits.
pub(crate) fn queue(runtime: &Runtime, report: &Report) {
    const LIMIT: u64 = 64;
    if !report.wants("admission.queue") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let gate = Arc::new(Semaphore::new(0));
    let (free, queued) = (steps_of("free", 1), held(LIMIT as u32, &gate));
    let opened = Engine::open(directory.path()).register(&free).register(&queued).start();
    let engine = runtime.block_on(opened).expect("an engine");
    let (rounds, seconds, count) = if report.quick { (1, 1, 5_000) } else { (3, 3, 100_000) };
    let duration = Duration::from_secs(seconds);
    let best = rates::best_in_flight(runtime, &engine, &free, duration / 2);
    let (mut ours, mut floors) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        rates::settle(&engine);
        floors.push(rates::run(runtime, &engine, &free, best, duration));
        let (took, made) = runtime.block_on(async {
            start_all(&engine, &queued, HELD..HELD + LIMIT, 256).await;
            start_all(&engine, &queued, 0..count, 256).await;
            until(&engine, None, (LIMIT, count)).await;
            // The index takes in the commits while neither side is measured.
            tokio::time::sleep(Duration::from_millis(1500)).await;
            let (before, begin) = (commits(&engine).await, Instant::now());
            gate.add_permits(LIMIT as usize);
            until(&engine, None, (0, 0)).await;
            let took = begin.elapsed();
            let made = commits(&engine).await - before;
            while engine.residents() > 0 {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
            (took, made)
        });
        tell_commits("admission.queue", "execution", made, count as f64);
        ours.push(count as f64 / took.as_secs_f64());
    }
    let (value, floor) = (median(ours), median(floors));
    report.add(Figure { name: "admission.queue", value, unit: "executions/s", floor, target: "≥ 0.5" });
}

/// Measures from the release of the running execution until the next one has begun, with a long queue and with ten, in
/// turn.
pub(crate) fn depth(runtime: &Runtime, report: &Report) {
    if !report.wants("admission.depth") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let (many, rounds) = if report.quick { (5_000, 100) } else { (100_000, 2_000) };
    let (ours, floors) = runtime.block_on(async {
        let ((long, mut long_queue), (short, mut short_queue)) =
            (FilledQueue::new("many", many), FilledQueue::new("ten", 10));
        let queued = in_queues([long, short]);
        let engine = Engine::open(directory.path()).register(&queued).start().await.expect("an engine");
        for (number, queue) in [&mut long_queue, &mut short_queue].into_iter().enumerate() {
            queue.fill(&engine, &queued, number as u64).await;
        }
        tokio::time::sleep(Duration::from_secs(2)).await;
        let (mut ours, mut floors) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            ours.push(long_queue.hand_over(&engine, &queued, 0).await);
            floors.push(short_queue.hand_over(&engine, &queued, 1).await);
        }
        (ours, floors)
    });
    let (value, floor) = (median(ours), median(floors));
    report.add(Figure { name: "admission.depth", value, unit: "µs", floor, target: "≤ 1.5" });
}

/// The part of a queue that its executions use.
#[derive(Clone)]
struct Inside {
    name: &'static str,
    begun: mpsc::UnboundedSender<()>,
    gate: Arc<Semaphore>,
}

/// A running execution, and a number of executions that wait behind it.
struct FilledQueue {
    inside: Inside,
    begun: mpsc::UnboundedReceiver<()>,
    count: u64,
}

/// Executions of two queues, one of each at a time. The input is the number of the queue.
fn in_queues(queues: [Inside; 2]) -> Workflow<u64, u64> {
    let names = queues.each_ref().map(|queue| queue.name);
    let limited = workflow("queued").concurrency_by(1, move |number: &u64| names[*number as usize]);
    limited.when_full(Queue::new()).run(move |ctx: Ctx, number: u64| {
        let queue = queues[number as usize].clone();
        async move {
            let wait = async || {
                let _ = queue.begun.send(());
                queue.gate.acquire().await.expect("the gate is open").forget();
                Ok(number)
            };
            ctx.run("wait", wait).await
        }
    })
}

impl FilledQueue {
    fn new(name: &'static str, count: u64) -> (Inside, FilledQueue) {
        let (sender, begun) = mpsc::unbounded_channel();
        let inside = Inside { name, begun: sender, gate: Arc::new(Semaphore::new(0)) };
        (inside.clone(), FilledQueue { inside, begun, count })
    }

    async fn fill(&mut self, engine: &Engine, queued: &Workflow<u64, u64>, number: u64) {
        let starts = (0..256u64).map(|task| {
            let (engine, queued, count) = (engine.clone(), queued.clone(), self.count + 1);
            tokio::spawn(async move {
                for _ in (task..count).step_by(256) {
                    engine.start(&queued, number).await.expect("a start");
                }
            })
        });
        for start in starts.collect::<Vec<_>>() {
            start.await.expect("a task");
        }
        until(engine, Some(self.inside.name), (1, self.count)).await;
        self.begun.recv().await.expect("the first execution runs");
    }

    /// Returns the time in microseconds. For each execution that ends, a new one joins the end of the queue.
    async fn hand_over(&mut self, engine: &Engine, queued: &Workflow<u64, u64>, number: u64) -> f64 {
        let begin = Instant::now();
        self.inside.gate.add_permits(1);
        self.begun.recv().await.expect("the next execution runs");
        let took = begin.elapsed().as_secs_f64() * 1e6;
        engine.start(queued, number).await.expect("a start");
        until(engine, Some(self.inside.name), (1, self.count)).await;
        took
    }
}
