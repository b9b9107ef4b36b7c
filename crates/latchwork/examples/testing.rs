//! The guide of docs/workflows/testing.md as one program: `cargo run -p latchwork --example testing`. In a project of
//! your own these are tests.

use std::time::Duration;

use latchwork::testing::{Crashes, Faults, Simulation, TestEngine, What, crash_everywhere, replay};
use latchwork::workflow::{Ctx, Engine, ExecutionState, Failure, History, Kind, Retry, Workflow, workflow};

type Result<T = ()> = std::result::Result<T, Box<dyn std::error::Error>>;

/// Charges, waits for an hour, counts in a slot and ships.
fn order() -> Workflow<u64, String> {
    workflow("order").run(async |ctx: Ctx, price: u64| {
        // A crash counts as an attempt, and a simulation may crash often.
        let often = Retry::exponential().max_attempts(100);
        let paid = ctx.run("charge", async || Ok(price)).retry(often.clone()).await?;
        ctx.sleep(Duration::from_secs(3600)).await?;
        let number = ctx.state().global::<u64>("orders").increment(1).await?.value;
        ctx.run("ship", async || Ok(format!("order {number} for {paid}"))).retry(often).await
    })
}

/// Has a child make the order, and waits for somebody to approve it.
fn approval() -> Workflow<u64, String> {
    workflow("approval").run(async |ctx: Ctx, price: u64| {
        let made = ctx.child(&order(), price).await?;
        let by = ctx.receive::<String>("approve").await?;
        Ok(format!("{made}, approved by {by}"))
    })
}

/// The same after somebody has put a step in front of everything.
fn changed_order() -> Workflow<u64, String> {
    workflow("order").run(async |ctx: Ctx, price: u64| {
        ctx.run("check", async || Ok(())).await?;
        ctx.run("charge", async || Ok(price)).await?;
        Ok("order 1 for 7".to_string())
    })
}

fn main() -> Result {
    // Runs on one thread are the same every time. Simulations bring their own.
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    runtime.block_on(crashes());
    runtime.block_on(crashes_of_those_who_talk());
    let history = runtime.block_on(virtual_time())?;
    runtime.block_on(replays(&history))?;
    simulations()
}

/// A crash right before and right after every commit.
async fn crashes() {
    let (order, mut again) = (order(), 0);
    let crashes = crash_everywhere(&order, 7, |outcome| {
        let result = outcome.result.as_ref().expect("no crash keeps it from its end");
        assert_eq!(result, "order 1 for 7", "{:?}", outcome.crash);
        again += outcome.bodies.len() - 2;
    });
    let crashes = crashes.await;
    println!("{crashes} crashes, always the same outcome; {again} bodies ran a second time");
}

/// The same for a workflow that starts another and is sent a signal.
async fn crashes_of_those_who_talk() {
    let (approval, order) = (approval(), order());
    let crashes = Crashes::of(&approval, 7).register(&order).outside(async |engine: Engine| {
        // It may have been sent in the life before.
        let _ = engine.signal("execution", "approve", &"Ada").id("click-1").await;
    });
    let crashes = crashes.run(|outcome| {
        let result = outcome.result.as_ref().expect("no crash keeps it from its end");
        assert_eq!(result, "order 1 for 7, approved by Ada", "{:?}", outcome.crash);
    });
    println!("{} crashes of one that others talk to", crashes.await);
}

/// An hour takes no time, and the bank is not asked.
async fn virtual_time() -> Result<History> {
    let order = order();
    let test = TestEngine::build(1).register(&order).mock("charge", |attempt| match attempt {
        1 => Err(Failure::new("busy")),
        _ => Ok(7u64),
    });
    let test = test.start().await?;
    let began = test.env().now();
    let handle = test.engine().start(&order, 7).id("o").await?;
    assert_eq!(test.run(handle.result()).await?, "order 1 for 7");
    println!("it took {} virtual seconds", (test.env().now().0 - began.0) / 1_000_000);
    assert_eq!(test.bodies(), ["charge", "charge", "ship"]);

    let history = test.history("o").await?;
    assert_eq!(history.steps(), ["charge", "ship"]);
    assert_eq!(history.state, ExecutionState::Completed("order 1 for 7".into()));
    let charge = history.find(Kind::Step, "charge").ok_or("it was charged")?;
    assert_eq!((charge.attempts, charge.value::<u64>()), (2, Some(7)));
    println!("the first attempt at the charge failed: {}", charge.failures[0].message);
    Ok(history)
}

/// New code against what the old has recorded.
async fn replays(history: &History) -> Result {
    // As `latch workflow history` writes it.
    let text = serde_json::to_string_pretty(history)?;
    let history: History = serde_json::from_str(&text)?;
    replay(&history, &order()).await?;
    println!("the code fits its history");
    let mismatch = replay(&history, &changed_order()).await.err().ok_or("the change is not seen")?;
    println!("the changed code does not: {}", mismatch.reason);
    Ok(())
}

/// Whole lives of engines, with faults from seeds.
fn simulations() -> Result {
    let order = order();
    let (mut lives, mut events) = (0, 0);
    for seed in 0..50 {
        let simulation = Simulation::new(seed).register(&order).start(&order, "a", 7).start(&order, "b", 8);
        let report = simulation.run();
        report.assert_settled();
        let outputs = [report.output::<String>("a")?, report.output::<String>("b")?];
        let either = [["order 1 for 7", "order 2 for 8"], ["order 2 for 7", "order 1 for 8"]];
        assert!(either.iter().any(|either| outputs == *either), "{report}");
        (lives, events) = (lives + report.lives, events + report.events.len());
    }
    println!("50 seeds: {lives} engines, {events} events, both orders counted and shipped each time");

    // One kind of fault alone, until it strikes.
    let mut faults = Faults::none();
    (faults.lives, faults.crashes) = (3, true);
    for seed in 0.. {
        let report = Simulation::new(seed).faults(faults.clone()).register(&order).start(&order, "a", 7).run();
        report.assert_settled();
        if report.events.iter().any(|event| matches!(event.what, What::Crash(_))) {
            println!("{report}");
            break;
        }
    }
    Ok(())
}
