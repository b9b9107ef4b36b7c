//! The three scenarios, the same for every engine. Callers are tasks; each starts a workflow, waits for its result and
//! starts the next. What is counted is counted here: steps by their bodies, workflows by the results callers got.

use std::future::Future;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

/// Steps of a workflow where it is steps that are measured.
pub const STEPS: u32 = 10;

/// An engine may lose a workflow under load. One that loses so many does not work.
const TOO_MANY: u64 = 1000;

/// How long a caller waits at most for one workflow.
const PATIENCE: Duration = Duration::from_secs(120);

/// What runs workflows durably.
pub trait Engine: Send + Sync + 'static {
    /// Runs a workflow of so many steps, each of which calls [`step`], to its end. Gives the number of steps it made.
    fn workflow(&self, steps: u32) -> impl Future<Output = Result<u32>> + Send;
}

/// How much to measure.
pub struct Plan {
    warm_up: Duration,
    window: Duration,
    /// How long the sequential scenario goes on.
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

/// A rate, and how many workflows were in flight.
type Point = (usize, f64);

/// What one turn of an engine gives.
#[derive(Default)]
pub struct Figures {
    /// From the body of a step to that of the next, in microseconds.
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
        NOTED.lock().expect("nobody panics while noting").push(Instant::now());
    }
}

/// One workflow of ten steps at a time: the medians of the time from step to step, and of whole workflows per step.
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
        let noted = std::mem::take(&mut *NOTED.lock().expect("nobody panics while noting"));
        // A body may run twice; then it cannot be told which gap is a step's.
        if ended && noted.len() == STEPS as usize {
            wholes.push(took);
            gaps.extend(noted.windows(2).map(|pair| micros(pair[1] - pair[0])));
        }
    }
    NOTING.store(false, Ordering::Relaxed);
    Ok((median(gaps), median(wholes)))
}

/// What becomes of the workflows that are in flight when enough was measured.
#[derive(Clone, Copy, PartialEq)]
pub enum Rest {
    /// They are waited for, so that what is measured next has the engine for itself.
    Await,
    /// They are left behind, with the engine.
    Drop,
}

/// So many callers at once, each with workflows of so many steps: steps and workflows per second.
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
        // Those that failed have ended before.
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

/// One workflow. Whether it came to its end; if not, it is counted as lost.
async fn whole<E: Engine>(engine: &E, steps: u32) -> Result<bool> {
    match tokio::time::timeout(PATIENCE, engine.workflow(steps)).await.context("a workflow does not end")? {
        Ok(made) => {
            ensure!(made == steps, "a workflow of {steps} steps says that it made {made}");
            Ok(true)
        }
        Err(error) => {
            let lost = LOST.fetch_add(1, Ordering::Relaxed) + 1;
            ensure!(lost < TOO_MANY, "{lost} workflows were lost, the last by this: {error:#}");
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
