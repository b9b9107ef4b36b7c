//! Many at once: the readers of a stream, the workers of a board, and requests that record nothing of their blocks.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use latchwork::flow::{Board, BoardState, Flow, FlowEvent, NewTask, flow, handler, sequencer};
use latchwork::workflow::Engine;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::runtime::Runtime;

use crate::load::{self, callers};
use crate::one::{chain, only, open};
use crate::rates::{best_in_flight, run, settle};
use crate::report::{Figure, Report, median};
use crate::{steps_of, store};

#[derive(Default, Serialize, Deserialize, JsonSchema)]
struct Counted {
    total: u64,
}

/// The store's rate with 256 callers, measured for a while.
fn store_rate(runtime: &Runtime, directory: &Path, duration: Duration) -> f64 {
    let (store, space) = runtime.block_on(store(directory));
    let mut callers = callers(&space, 256);
    load::run(runtime, &store, &mut callers, duration / 2, &Arc::default());
    load::run(runtime, &store, &mut callers, duration, &Arc::default())
}

fn seconds(report: &Report) -> Duration {
    Duration::from_secs(if report.quick { 1 } else { 3 })
}

/// A request whose blocks change the state ten times each, for ever.
fn busy() -> Flow {
    let body = handler("body").needs::<Counted>().run(async |ctx, value: u64| {
        for _ in 0..10 {
            ctx.sequencer().inc([("total", 1)]).await?;
        }
        Ok(value + 1)
    });
    let busy = sequencer("busy").state::<Counted>().most_rounds(u32::MAX).do_while(|_, _| true, &body);
    flow("busy").action("run", busy.build().expect("a sequencer")).build().expect("a flow")
}

/// Events per second that 64 readers of one request have got, together. Each reader checks that no number is missing.
pub(crate) fn stream(runtime: &Runtime, report: &Report) {
    const READERS: usize = 64;
    if !report.wants("flows.stream") {
        return;
    }
    let (mut ours, mut floors) = (Vec::new(), Vec::new());
    for _ in 0..if report.quick { 1 } else { 3 } {
        let directory = tempfile::tempdir().expect("a directory");
        floors.push(store_rate(runtime, &directory.path().join("store"), seconds(report)));
        let flow = busy();
        let engine = runtime.block_on(open(&directory.path().join("engine"), &flow, &steps_of("none", 0)));
        let (stop, seen) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let request = runtime.block_on(async { engine.flow(&flow).run("run", 0).id("r").await.expect("a request") });
        let readers: Vec<_> = (0..READERS)
            .map(|_| {
                let (mut events, stop, seen) = (request.events(), stop.clone(), seen.clone());
                runtime.spawn(async move {
                    let mut next = 0;
                    while let Some(event) = events.next().await.expect("an event") {
                        assert_eq!(event.number, next, "no number is missing");
                        next += 1;
                        if !stop.load(Ordering::Relaxed) {
                            seen.fetch_add(1, Ordering::Relaxed);
                        }
                        if matches!(event.event, FlowEvent::RequestEnded { .. }) {
                            break;
                        }
                    }
                })
            })
            .collect();
        let begin = Instant::now();
        std::thread::sleep(seconds(report));
        stop.store(true, Ordering::Relaxed);
        ours.push(seen.load(Ordering::Relaxed) as f64 / begin.elapsed().as_secs_f64());
        runtime.block_on(async {
            engine.terminate("r", "measured").await.expect("a termination");
            for reader in readers {
                reader.await.expect("a reader");
            }
        });
    }
    let (value, floor) = (median(ours), median(floors));
    report.add(Figure { name: "flows.stream", value, unit: "events/s", floor, target: "≥ 1" });
}

/// Tasks per second that 32 workers have done: each is claimed and completed.
pub(crate) fn board(runtime: &Runtime, report: &Report) {
    const WORKERS: usize = 32;
    if !report.wants("flows.board") {
        return;
    }
    let count = if report.quick { 2_000 } else { 50_000 };
    let (mut ours, mut floors) = (Vec::new(), Vec::new());
    for _ in 0..if report.quick { 1 } else { 3 } {
        let directory = tempfile::tempdir().expect("a directory");
        floors.push(store_rate(runtime, &directory.path().join("store"), seconds(report)));
        let (board, _store) = runtime.block_on(async {
            let (store, _) = store(&directory.path().join("board")).await;
            let board = Board::open(&store, "tasks").await.expect("a board");
            board.add((0..count).map(|number| NewTask::new(format!("t{number}"), number))).await.expect("tasks");
            (board, store)
        });
        let begin = Instant::now();
        let workers: Vec<_> = (0..WORKERS)
            .map(|worker| {
                let board = board.clone();
                runtime.spawn(async move {
                    let worker = worker.to_string();
                    while let Some(task) = board.claim(&worker, Duration::from_secs(60)).await.expect("a claim") {
                        board.complete(task, 1).await.expect("a completion");
                    }
                })
            })
            .collect();
        runtime.block_on(async {
            for worker in workers {
                worker.await.expect("a worker");
            }
        });
        ours.push(f64::from(count) / begin.elapsed().as_secs_f64());
        let state = runtime.block_on(board.state()).expect("a state");
        assert_eq!(state, BoardState::AllCompleted);
    }
    let (value, floor) = (median(ours), median(floors));
    report.add(Figure { name: "flows.board", value, unit: "tasks/s", floor, target: "≥ 0.2" });
}

/// Steps per second of requests that record nothing of their blocks, against those of workflows: of ten steps as the
/// workflows, and of a hundred.
pub(crate) fn ephemeral(runtime: &Runtime, report: &Report) {
    if !report.wants("flows.ephemeral") {
        return;
    }
    let (rounds, duration) = (if report.quick { 1 } else { 5 }, seconds(report));
    for (name, steps) in [("flows.ephemeral", 10), ("flows.ephemeral.100", 100)] {
        let directory = tempfile::tempdir().expect("a directory");
        let block = sequencer("whole").step(&chain(steps).ephemeral().build().expect("a sequencer"));
        let (flow, ten) = (only(block.build().expect("a sequencer")), steps_of("ten", 10));
        let engine = runtime.block_on(open(directory.path(), &flow, &ten));
        let best = best_in_flight(runtime, &engine, &ten, duration / 2);
        let (mut ours, mut floors) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            settle(&engine);
            floors.push(run(runtime, &engine, &ten, best, duration) * 10.0);
            settle(&engine);
            ours.push(requests(runtime, &engine, &flow, best, duration) * steps as f64);
        }
        let (value, floor) = (median(ours), median(floors));
        report.add(Figure { name, value, unit: "steps/s", floor, target: "≥ 5" });
    }
}

/// Keeps a number of requests running for a while. Returns how many ended per second.
fn requests(runtime: &Runtime, engine: &Engine, flow: &Flow, in_flight: usize, duration: Duration) -> f64 {
    let (stop, seen) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let begin = Instant::now();
    let tasks: Vec<_> = (0..in_flight)
        .map(|_| {
            let (engine, flow, stop, seen) = (engine.clone(), flow.clone(), stop.clone(), seen.clone());
            runtime.spawn(async move {
                while !stop.load(Ordering::Relaxed) {
                    let request = engine.flow(&flow).run("run", 0).await.expect("a request");
                    request.result::<u64>().await.expect("a result");
                    seen.fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    std::thread::sleep(duration);
    stop.store(true, Ordering::Relaxed);
    runtime.block_on(async {
        for task in tasks {
            task.await.expect("a task");
        }
    });
    seen.load(Ordering::Relaxed) as f64 / begin.elapsed().as_secs_f64()
}
