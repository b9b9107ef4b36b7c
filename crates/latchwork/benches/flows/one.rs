//! One request at a time: the time of a step, its commits, the room of a loop, and the time to resume.

use std::path::Path;
use std::time::{Duration, Instant};

use latchwork::flow::{Block, Flow, SequencerBuilder, flow, handler, sequencer};
use latchwork::json;
use latchwork::workflow::{Ctx, Engine, Workflow, workflow};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::runtime::Runtime;

use crate::report::{Figure, Report, median};
use crate::steps_of;

/// The state of the loop.
#[derive(Default, Serialize, Deserialize, JsonSchema)]
struct Counted {
    round: u64,
    text: String,
}

/// Adds one.
pub(crate) fn add(name: &str) -> Block<u64, u64> {
    handler(name).run(async |_, value: u64| Ok(value + 1))
}

/// A sequencer of so many blocks that only add numbers.
pub(crate) fn chain(count: usize) -> SequencerBuilder<(), u64, u64> {
    (0..count).fold(sequencer("chain"), |chain, number| chain.step(&add(&format!("add-{number}"))))
}

/// A flow of one action, `run`.
pub(crate) fn only(block: Block<u64, u64>) -> Flow {
    flow("bench").action("run", block).build().expect("a flow")
}

pub(crate) async fn open(directory: &Path, flow: &Flow, workflow: &Workflow<u64, u64>) -> Engine {
    Engine::open(directory).flow(flow).register(workflow).start().await.expect("an engine")
}

async fn request(engine: &Engine, flow: &Flow) -> u64 {
    let request = engine.flow(flow).run("run", 0).await.expect("a request");
    request.result().await.expect("a result")
}

/// Ten steps of a sequencer and ten steps of a workflow, in turn.
pub(crate) fn sequencer_of_ten(runtime: &Runtime, report: &Report) -> (f64, f64) {
    const STEPS: u32 = 10;
    let directory = tempfile::tempdir().expect("a directory");
    let rounds = if report.quick { 50 } else { 1000 };
    runtime.block_on(async {
        let (flow, ten) = (only(chain(STEPS as usize).build().expect("a sequencer")), steps_of("ten", STEPS.into()));
        let engine = open(directory.path(), &flow, &ten).await;
        let (mut ours, mut floors) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            let begin = Instant::now();
            assert_eq!(request(&engine, &flow).await, u64::from(STEPS));
            ours.push((begin.elapsed() / STEPS).as_secs_f64() * 1e6);
            let begin = Instant::now();
            let handle = engine.start(&ten, 0).await.expect("a start");
            assert_eq!(handle.result().await.expect("a result"), u64::from(STEPS));
            floors.push((begin.elapsed() / STEPS).as_secs_f64() * 1e6);
        }
        (median(ours), median(floors))
    })
}

pub(crate) fn steps(runtime: &Runtime, report: &Report) {
    if report.wants("flows.sequencer") {
        let (value, floor) = sequencer_of_ten(runtime, report);
        report.add(Figure { name: "flows.sequencer", value, unit: "µs/step", floor, target: "≤ 1.3" });
    }
}

/// The commits of a hundred more steps.
pub(crate) fn boundary(runtime: &Runtime, report: &Report) {
    if !report.wants("flows.boundary") {
        return;
    }
    let commits = [10, 110].map(|steps| {
        let directory = tempfile::tempdir().expect("a directory");
        runtime.block_on(async {
            let (flow, none) = (only(chain(steps).build().expect("a sequencer")), steps_of("none", 0));
            let engine = open(directory.path(), &flow, &none).await;
            let before = engine.store().generation().await.expect("a generation");
            assert_eq!(request(&engine, &flow).await, steps as u64);
            (engine.store().generation().await.expect("a generation").0 - before.0) as f64
        })
    });
    let value = (commits[1] - commits[0]) / 100.0;
    report.add(Figure { name: "flows.boundary", value, unit: "commits/step", floor: 1.0, target: "1" });
}

/// The bytes of the checkpoints after many rounds of a loop, against after ten.
pub(crate) fn rounds(runtime: &Runtime, report: &Report) {
    if !report.wants("flows.loop") {
        return;
    }
    let sizes = [10, if report.quick { 500 } else { 10_000 }].map(|rounds: u64| {
        let directory = tempfile::tempdir().expect("a directory");
        runtime.block_on(async {
            let body = handler("body").needs::<Counted>().run(async |ctx, value: u64| {
                ctx.sequencer().patch(json!({"round": value, "text": "x".repeat(150)})).await?;
                Ok(value + 1)
            });
            let looped = sequencer_with_state().do_while(move |value, _| *value < rounds, &body);
            let (flow, none) = (only(looped.build().expect("a sequencer")), steps_of("none", 0));
            let engine = open(directory.path(), &flow, &none).await;
            let request = engine.flow(&flow).run("run", 0).await.expect("a request");
            assert_eq!(request.result::<u64>().await.expect("a result"), rounds);
            json!(request.checkpoints().await.expect("checkpoints")).to_string().len() as f64
        })
    });
    let [floor, value] = sizes;
    report.add(Figure { name: "flows.loop", value, unit: "bytes", floor, target: "≤ 1.1" });
}

fn sequencer_with_state() -> SequencerBuilder<Counted, u64, u64> {
    sequencer("chain").state::<Counted>()
}

/// From a signal to the end of a request and of an execution that have done a thousand steps and wait, out of memory.
pub(crate) fn resume(runtime: &Runtime, report: &Report) {
    const STEPS: usize = 1000;
    if !report.wants("flows.resume") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let rounds = if report.quick { 2 } else { 21 };
    let waits = handler("waits").run(async |ctx, value: u64| {
        ctx.receive::<()>("go").await?;
        Ok(value)
    });
    let flow = only(chain(STEPS).step(&waits).build().expect("a sequencer"));
    let steps = workflow("steps").run(async |ctx: Ctx, input: u64| {
        let mut sum = input;
        for _ in 0..STEPS {
            sum = ctx.run("add", async || Ok(sum + 1)).await?;
        }
        ctx.receive::<()>("go").await?;
        Ok(sum)
    });
    let (value, floor) = runtime.block_on(async {
        let engine = open(directory.path(), &flow, &steps).await;
        let (mut ours, mut floors) = (Vec::new(), Vec::new());
        for round in 0..rounds {
            let id = format!("flow-{round}");
            let request = engine.flow(&flow).run("run", 0).id(id.clone()).await.expect("a request");
            let begin = resumed(&engine, &id).await;
            assert_eq!(request.result::<u64>().await.expect("a result"), STEPS as u64);
            ours.push(begin.elapsed().as_secs_f64() * 1e3);
            let id = format!("workflow-{round}");
            let handle = engine.start(&steps, 0).id(id.clone()).await.expect("a start");
            let begin = resumed(&engine, &id).await;
            assert_eq!(handle.result().await.expect("a result"), STEPS as u64);
            floors.push(begin.elapsed().as_secs_f64() * 1e3);
        }
        (median(ours), median(floors))
    });
    report.add(Figure { name: "flows.resume", value, unit: "ms", floor, target: "≤ 1.2" });
}

/// Waits until the execution has left memory, and sends what it waits for.
async fn resumed(engine: &Engine, id: &str) -> Instant {
    while engine.residents() > 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let begin = Instant::now();
    engine.signal(id, "go", &()).await.expect("a signal");
    begin
}
