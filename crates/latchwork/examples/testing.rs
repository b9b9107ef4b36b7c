//! The guide of docs/workflows/testing.md as one program: `cargo run -p latchwork --example testing`. In your own
//! project these are tests.

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use latchwork::testing::{Crashes, Faults, Simulation, TestEngine, TraceKind, crash_everywhere, replay};
use latchwork::workflow::{Attempt, Ctx, Engine, ExecutionState, Failure, History, Kind, Retry, Workflow, workflow};

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

/// Makes the order in a child, and waits for an approval.
fn approval() -> Workflow<u64, String> {
    workflow("approval").run(async |ctx: Ctx, price: u64| {
        let made = ctx.child(&order(), price).await?;
        let by = ctx.receive::<String>("approve").await?;
        Ok(format!("{made}, approved by {by}"))
    })
}

/// The same after a change that puts a step before everything else.
fn changed_order() -> Workflow<u64, String> {
    workflow("order").run(async |ctx: Ctx, price: u64| {
        ctx.run("check", async || Ok(())).await?;
        ctx.run("charge", async || Ok(price)).await?;
        Ok("order 1 for 7".to_string())
    })
}

fn main() -> Result {
    // Runs on one thread always take the same path. Simulations make their own runtime.
    let runtime = tokio::runtime::Builder::new_current_thread().build()?;
    runtime.block_on(crashes());
    runtime.block_on(crashes_with_a_fake());
    runtime.block_on(crashes_with_messages());
    let history = runtime.block_on(virtual_time())?;
    runtime.block_on(replays(&history))?;
    simulations()
}

/// A crash right before and right after every commit.
async fn crashes() {
    let mut again = 0;
    let crashes = crash_everywhere(order, 7, async |outcome| {
        let result = outcome.result.as_ref().expect("it completes after every crash");
        assert_eq!(result, "order 1 for 7", "{}", outcome.crash);
        let orders = outcome.states().global().slot::<u64>("orders").get().await;
        assert_eq!(orders.expect("the slot can be read"), Some(1), "{}", outcome.crash);
        again += outcome.bodies.len() - 2;
    });
    let crashes = crashes.await;
    println!("{crashes} crashes, always the same outcome; {again} bodies ran a second time");
}

/// A client that is busy twice. It charges once for each idempotency key.
#[derive(Default)]
struct Bank {
    calls: AtomicU32,
    charged: Mutex<BTreeSet<String>>,
}

impl Bank {
    fn charge(&self, key: &str, price: u64) -> std::result::Result<u64, Failure> {
        if self.calls.fetch_add(1, Ordering::SeqCst) < 2 {
            return Err(Failure::new("busy"));
        }
        self.charged.lock().expect("no charge panics").insert(key.to_string());
        Ok(price)
    }

    fn charges(&self) -> usize {
        self.charged.lock().expect("no charge panics").len()
    }
}

fn charged_order(bank: Arc<Bank>) -> Workflow<u64, u64> {
    workflow("charged").run(move |ctx: Ctx, price: u64| {
        let bank = bank.clone();
        async move {
            ctx.run_with("charge", async |attempt: Attempt| bank.charge(&attempt.idempotency_key.to_string(), price))
                .await
        }
    })
}

/// Every run makes its own bank, so the bank is busy twice in each run.
async fn crashes_with_a_fake() {
    let banks = RefCell::new(Vec::new());
    let order = || {
        let bank = Arc::new(Bank::default());
        banks.borrow_mut().push(bank.clone());
        charged_order(bank)
    };
    let crashes = crash_everywhere(order, 7, async |outcome| {
        assert_eq!(outcome.result.as_ref().ok(), Some(&7), "{}", outcome.crash);
        let bank = banks.borrow().last().cloned().expect("every run makes a bank");
        assert_eq!(bank.charges(), 1, "the bank knows the idempotency key: {}", outcome.crash);
    });
    println!("{} crashes of a workflow whose bank is busy at first", crashes.await);
}

/// The same for a workflow that starts another workflow, gets a signal and needs data.
async fn crashes_with_messages() {
    let crashes = Crashes::of(approval, 7)
        .register(order)
        .set_up(async |engine: Engine| {
            engine.states().global().slot::<u64>("orders").set(41).await.expect("the slot can be written");
        })
        .outside(async |engine: Engine| {
            // The life before may have sent it.
            let _ = engine.signal("execution", "approve", "Ada").id("click-1").await;
        });
    let crashes = crashes.run(async |outcome| {
        let result = outcome.result.as_ref().expect("it completes after every crash");
        assert_eq!(result, "order 42 for 7, approved by Ada", "{}", outcome.crash);
    });
    println!("{} crashes of a workflow that gets messages", crashes.await);
}

/// An hour takes no time, and the bank is not called.
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
    println!("the first attempt of the charge failed: {}", charge.failures[0].message);
    Ok(history)
}

/// Checks new code against a history that the old code recorded.
async fn replays(history: &History) -> Result {
    // As `latch workflow history` writes it.
    let text = serde_json::to_string_pretty(history)?;
    let history: History = serde_json::from_str(&text)?;
    replay(&history, &order()).await?;
    println!("the code fits its history");
    let mismatch = replay(&history, &changed_order()).await.err().ok_or("the change was not found")?;
    println!("the changed code does not: {}", mismatch.reason);
    Ok(())
}

/// Whole engines with faults from seeds.
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

    // Only one kind of fault, until it happens.
    let mut faults = Faults::none();
    (faults.lives, faults.crashes) = (3, true);
    for seed in 0.. {
        let report = Simulation::new(seed).faults(faults.clone()).register(&order).start(&order, "a", 7).run();
        report.assert_settled();
        if report.events.iter().any(|event| matches!(event.what, TraceKind::Crash(_))) {
            println!("{report}");
            break;
        }
    }
    Ok(())
}
