//! The three scenarios, the same for every engine. Callers are tasks. Each starts a workflow, waits for its result and
//! starts the next. All counts are made here: steps by their bodies, workflows by the results that callers got.

use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

/// Steps of a workflow in the scenarios that measure steps.
pub const STEPS: u32 = 10;

/// An engine may lose a workflow under load. An engine that loses this many does not work.
const TOO_MANY: u64 = 1000;

/// How long a caller waits at most for one workflow.
const PATIENCE: Duration = Duration::from_secs(120);

/// An engine that runs workflows durably.
pub trait Engine: Send + Sync + 'static {
    /// Runs a workflow of `steps` steps to its end. Each step calls [`step`]. Returns the number of steps that it made.
    fn workflow(&self, steps: u32) -> impl Future<Output = Result<u32>> + Send;
}

/// How much to measure.
pub struct Plan {
    warm_up: Duration,
    window: Duration,
    /// The length of the sequential scenario.
    sequential: Duration,
}

impl Plan {
    pub fn full() -> Plan {
        let seconds = Duration::from_secs;
        Plan { warm_up: seconds(2), window: seconds(3), sequential: seconds(8) }
    }

    pub fn quick() -> Plan {
        let seconds = Duration::from_secs;
        Plan { warm_up: seconds(1), window: seconds(2), sequential: seconds(3) }
    }
}

/// A rate, and how many workflows ran at once.
type Point = (usize, f64);

/// The figures of one engine.
#[derive(Default)]
pub struct Figures {
    /// From the body of a step to the body of the next, in microseconds.
    pub step_us: f64,
    /// From the start of a workflow of ten steps to its result, in microseconds, divided by ten.
    pub workflow_us: f64,
    pub steps: Vec<Point>,
    pub starts: Vec<Point>,
}

impl Figures {
    pub fn to_json(&self) -> Value {
        json!({"step_us": self.step_us, "workflow_us": self.workflow_us, "steps": self.steps, "starts": self.starts,
            "lost": LOST.load(Ordering::Relaxed)})
    }
}

static BODIES: AtomicU64 = AtomicU64::new(0);
/// Workflows that ended without a result, in all scenarios.
static LOST: AtomicU64 = AtomicU64::new(0);
static NOTING: AtomicBool = AtomicBool::new(false);
static NOTED: Mutex<Vec<Instant>> = Mutex::new(Vec::new());

/// The body of every step of every engine.
pub fn step() {
    BODIES.fetch_add(1, Ordering::Relaxed);
    if NOTING.load(Ordering::Relaxed) {
        NOTED.lock().expect("no panic while the lock is held").push(Instant::now());
    }
}

/// One workflow of ten steps at a time. Returns two medians: the time from step to step, and the time of a workflow per
/// step.
pub async fn sequential<E: Engine>(plan: &Plan, engine: &E) -> Result<(f64, f64)> {
    let begin = Instant::now();
    while begin.elapsed() < plan.warm_up {
        whole(engine, STEPS).await?;
    }
    let (mut gaps, mut wholes) = (Vec::new(), Vec::new());
    NOTING.store(true, Ordering::Relaxed);
    let begin = Instant::now();
    while begin.elapsed() < plan.sequential {
        let start = Instant::now();
        let ended = whole(engine, STEPS).await?;
        let took = micros(start.elapsed()) / f64::from(STEPS);
        let noted = std::mem::take(&mut *NOTED.lock().expect("no panic while the lock is held"));
        // A body may run twice. Then the gaps cannot be matched with steps.
        if ended && noted.len() == STEPS as usize {
            wholes.push(took);
            gaps.extend(noted.windows(2).map(|pair| micros(pair[1] - pair[0])));
        }
    }
    NOTING.store(false, Ordering::Relaxed);
    Ok((median(gaps), median(wholes)))
}

/// What happens to the workflows that still run after the measurement.
#[derive(Clone, Copy, PartialEq)]
pub enum Rest {
    /// The measurement waits for them, so that the next one has the engine for itself.
    Await,
    /// They are left behind, with the engine.
    Drop,
}

/// Runs `callers` callers at once, each with workflows of `steps` steps. Returns steps and workflows per second.
pub async fn rate<E>(plan: &Plan, engine: &Arc<E>, steps: u32, callers: usize, rest: Rest) -> Result<(f64, f64)>
where
    E: Engine,
{
    let stop = Arc::new(AtomicBool::new(false));
    let done = Arc::new(AtomicU64::new(0));
    let mut tasks = tokio::task::JoinSet::new();
    for _ in 0..callers {
        let (engine, stop, done) = (engine.clone(), stop.clone(), done.clone());
        tasks.spawn(async move {
            while !stop.load(Ordering::Relaxed) {
                if whole(&*engine, steps).await? {
                    done.fetch_add(1, Ordering::Relaxed);
                }
            }
            anyhow::Ok(())
        });
    }
    let look = || (BODIES.load(Ordering::Relaxed), done.load(Ordering::Relaxed), Instant::now());
    tokio::time::sleep(plan.warm_up).await;
    let before = look();
    tokio::time::sleep(plan.window).await;
    let after = look();
    stop.store(true, Ordering::Relaxed);
    if rest == Rest::Drop {
        // Callers that failed have ended already.
        while let Some(ended) = tasks.try_join_next() {
            ended.context("a caller panicked")??;
        }
        tasks.shutdown().await;
    }
    while let Some(ended) = tasks.join_next().await {
        ended.context("a caller panicked")??;
    }
    let seconds = (after.2 - before.2).as_secs_f64();
    Ok(((after.0 - before.0) as f64 / seconds, (after.1 - before.1) as f64 / seconds))
}

/// Runs one workflow. Returns true if it has ended with a result; otherwise it counts as lost.
async fn whole<E: Engine>(engine: &E, steps: u32) -> Result<bool> {
    match tokio::time::timeout(PATIENCE, engine.workflow(steps)).await.context("a workflow did not end in time")? {
        Ok(made) => {
            ensure!(made == steps, "a workflow of {steps} steps made {made} steps");
            Ok(true)
        }
        Err(error) => {
            let lost = LOST.fetch_add(1, Ordering::Relaxed) + 1;
            ensure!(lost < TOO_MANY, "{lost} workflows were lost, the last with: {error:#}");
            eprintln!("lost: {error:#}");
            Ok(false)
        }
    }
}

fn micros(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1e6
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
