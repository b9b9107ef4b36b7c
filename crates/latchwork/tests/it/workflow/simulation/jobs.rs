//! What is simulated: jobs with a plan drawn from the seed, and callers that start them, some under the same id.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use latchwork::testing::{Caller, Report, Simulation};
use latchwork::workflow::{Ctx, Failure, Handle, Result, Retry, Tx, Workflow, WorkflowError, workflow};
use latchwork::{Value, json};
use serde::{Deserialize, Serialize};

use super::oracle::{End, Oracle};

/// One operation of a job.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum Op {
    /// A step whose body takes so long, and fails or hangs so many times before it succeeds.
    Step {
        ms: u64,
        fails: u32,
        hangs: u32,
    },
    /// A step that fails for good; the job continues.
    Refused,
    /// Below a second it stays in memory; above, it leaves memory.
    Sleep {
        ms: u64,
    },
    Now,
    Uuid,
    Random,
    Version,
    /// Counts in a slot of the execution's own and in a slot that all share; by itself or in a transaction.
    Count {
        in_transaction: bool,
    },
}

/// A job: its number, its operations, and whether it fails in the end.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Job {
    pub n: u64,
    plan: Vec<Op>,
    fails: bool,
}

impl Job {
    fn drawn(n: u64, random: &mut fastrand::Rng) -> Job {
        let mut op = || match random.u8(..24) {
            0..10 => {
                let often = random.u8(..4) == 0;
                let (fails, hangs) = if often { (random.u32(..4), random.u32(..2)) } else { (0, 0) };
                Op::Step { ms: [0, 0, random.u64(..50), random.u64(..3000)][random.usize(..4)], fails, hangs }
            }
            10 => Op::Refused,
            11..13 => Op::Sleep { ms: random.u64(1..1000) },
            13..16 => Op::Sleep { ms: random.u64(1..100) << random.u8(..20) },
            16 => Op::Now,
            17 => Op::Uuid,
            18 => Op::Random,
            19 => Op::Version,
            _ => Op::Count { in_transaction: random.bool() },
        };
        let mut plan: Vec<Op> = Vec::new();
        for _ in 0..2 + n % 7 {
            plan.push(op());
        }
        // A later operation reads the chosen value.
        plan.push(Op::Step { ms: 0, fails: 0, hangs: 0 });
        Job { n, plan, fails: random.u8(..8) == 0 }
    }

    /// The job's expected result, as far as the input decides it: chosen values are left out.
    pub fn expected(&self) -> (Vec<Value>, bool) {
        let place = |(place, op): (usize, &Op)| match op {
            Op::Step { .. } => json!(self.n * 1000 + place as u64),
            Op::Refused => json!("refused"),
            Op::Version => json!(2),
            // Each is counted once.
            Op::Count { .. } => {
                json!(self.plan[..=place].iter().filter(|op| matches!(op, Op::Count { .. })).count())
            }
            Op::Sleep { .. } | Op::Now | Op::Uuid | Op::Random => Value::Null,
        };
        (self.plan.iter().enumerate().map(place).collect(), self.fails)
    }

    fn bodies(&self) -> usize {
        let bodies = self.plan.iter().map(|op| match op {
            Op::Step { fails, hangs, .. } => 1 + (*fails + *hangs) as usize,
            Op::Refused => 1,
            _ => 0,
        });
        bodies.sum()
    }
}

/// What a job returns: its number, and for each operation the value that its place implies or that was chosen.
pub type Output = (u64, Vec<Value>);

fn retry() -> Retry {
    // Every crash counts as an attempt, and so does a commit whose answer was lost.
    Retry::exponential().max_attempts(10_000).longest_pause(Duration::from_secs(8))
}

async fn work(oracle: Arc<Oracle>, ctx: Ctx, job: Job) -> std::result::Result<Output, Failure> {
    let mut got: Vec<Value> = Vec::new();
    for (place, op) in job.plan.iter().enumerate() {
        let name = format!("s{place}");
        let (oracle, id, seen) = (&oracle, ctx.id(), &got);
        let value = match op {
            Op::Step { ms, fails, hangs } => {
                let step = ctx.run(&name, async || {
                    let run = oracle.body(id, place, seen);
                    if run <= *hangs {
                        std::future::pending::<()>().await;
                    }
                    oracle.env().sleep(Duration::from_millis(*ms)).await;
                    if run <= *hangs + *fails {
                        return Err(Failure::new("not yet"));
                    }
                    // Two runs never return the same value.
                    Ok(json!([job.n * 1000 + place as u64, run]))
                });
                step.input(&place).timeout(Duration::from_secs(10)).retry(retry()).await?
            }
            Op::Refused => {
                let step = ctx.run(&name, async || {
                    oracle.body(id, place, seen);
                    Err::<(), _>(Failure::new("refused").not_retryable())
                });
                match step.retry(retry()).await {
                    Ok(()) => json!("not refused"),
                    Err(failure) => json!(failure.message()),
                }
            }
            Op::Sleep { ms } => {
                let (began, length) = (ctx.now().await, Duration::from_millis(*ms));
                oracle.asleep(id, place, began);
                ctx.sleep(length).await?;
                oracle.awake(id, place, began, length);
                json!(began.0)
            }
            Op::Now => json!(ctx.now().await.0),
            Op::Uuid => json!(ctx.uuid().await.to_string()),
            Op::Random => json!(ctx.random().await),
            Op::Version => json!(ctx.version("change", 1..=2).await),
            Op::Count { in_transaction: false } => {
                ctx.state().global::<u64>("all").increment(1).await?;
                json!(ctx.state().execution::<u64>("own").increment(1).await?.value)
            }
            Op::Count { in_transaction: true } => {
                let counted = ctx.transaction(&name, async |tx: Tx| {
                    tx.global::<u64>("all").increment(1).await?;
                    Ok(tx.execution::<u64>("own").increment(1).await?.value)
                });
                json!(counted.await?)
            }
        };
        got.push(value);
    }
    if job.fails { Err(Failure::new(json!((job.n, got)).to_string())) } else { Ok((job.n, got)) }
}

/// How a caller starts a job.
#[derive(Debug, Clone, Copy)]
pub enum Manner {
    /// Joins whatever runs under the id, and waits.
    Join,
    /// Wants to be the caller that starts it; waits in any case.
    Refuse,
    /// Ends when the start is acknowledged.
    Forget,
    /// The same, without an id.
    Unnamed,
}

#[derive(Clone)]
pub struct Start {
    pub caller: usize,
    pub id: String,
    pub job: Job,
    pub manner: Manner,
    pub is_limited: bool,
    delay: Duration,
}

pub struct Workload {
    pub starts: Vec<Start>,
    pub oracle: Arc<Oracle>,
    /// The time limit of a limited job: sometimes no longer than a slow commit takes.
    limit: Duration,
    jobs: Workflow<Job, Output>,
    limited: Workflow<Job, Output>,
}

impl Workload {
    pub fn drawn(seed: u64) -> Workload {
        let mut random = fastrand::Rng::with_seed(seed);
        let oracle = Arc::new(Oracle::default());
        let mut starts = Vec::new();
        let limit = Duration::from_millis([2_000, 5_000, 40_000][random.usize(..3)]);
        for execution in 0..random.u64(2..9) {
            let is_limited = random.u8(..3) == 0;
            for _ in 0..[1, 1, 2, 4][random.usize(..4)] {
                let manner = [Manner::Join, Manner::Join, Manner::Refuse, Manner::Forget, Manner::Unnamed];
                let caller = starts.len();
                let delay = Duration::from_millis(random.u64(..20) << random.u8(..10));
                starts.push(Start {
                    caller,
                    id: format!("x{execution}"),
                    job: Job::drawn(caller as u64, &mut random),
                    manner: manner[random.usize(..5)],
                    is_limited,
                    delay,
                });
            }
        }
        let (in_jobs, in_limited) = (oracle.clone(), oracle.clone());
        let jobs = workflow("jobs").run(move |ctx, job| work(in_jobs.clone(), ctx, job));
        let limited = workflow("limited").timeout(limit).run(move |ctx, job| work(in_limited.clone(), ctx, job));
        Workload { starts, oracle, limit, jobs, limited }
    }

    pub fn simulation(&self, seed: u64) -> Simulation {
        let simulation = Simulation::new(seed).register(&self.jobs).register(&self.limited);
        self.starts.iter().cloned().fold(simulation, |simulation, start| {
            let workflow = if start.is_limited { self.limited.clone() } else { self.jobs.clone() };
            let oracle = self.oracle.clone();
            simulation.client(move |caller| call(oracle.clone(), workflow.clone(), start.clone(), caller))
        })
    }

    /// The largest number of bodies that have to run without faults.
    pub fn most_bodies(&self) -> usize {
        self.starts.iter().map(|start| start.job.bodies()).sum()
    }

    pub fn judge(&self, report: &Report) -> Vec<String> {
        let jobs: BTreeMap<u64, &Start> = self.starts.iter().map(|start| (start.job.n, start)).collect();
        self.oracle.judge(report, &jobs, self.limit)
    }
}

async fn call(oracle: Arc<Oracle>, workflow: Workflow<Job, Output>, start: Start, caller: Caller) -> Result<()> {
    oracle.meet(caller.env());
    caller.env().sleep(start.delay).await;
    let asked = caller.engine().start(&workflow, start.job.clone());
    let asked = match start.manner {
        Manner::Join | Manner::Forget => asked.id(start.id.as_str()).or_join(),
        Manner::Refuse => asked.id(start.id.as_str()),
        Manner::Unnamed => asked,
    };
    oracle.asks(caller.life(), &start);
    let answer = asked.await;
    oracle.answered(caller.life(), &start, answer.as_ref().map(|handle| handle.id().clone()));
    let handle = match answer {
        Err(WorkflowError::AlreadyStarted { .. }) => caller.engine().handle(&workflow, start.id.as_str()),
        answer => answer?,
    };
    caller.started(handle.id());
    if matches!(start.manner, Manner::Forget | Manner::Unnamed) {
        return Ok(());
    }
    wait(&oracle, &caller, handle).await
}

async fn wait(oracle: &Oracle, caller: &Caller, handle: Handle<Output>) -> Result<()> {
    let end = match handle.result().await {
        Ok(output) => End::Completed(output),
        Err(WorkflowError::Failed { failure, .. }) => End::Failed(failure.message().into()),
        Err(WorkflowError::TimedOut { .. }) => End::TimedOut,
        Err(error) => return Err(error),
    };
    caller.note(format!("caller sees {} {end:?}", handle.id()));
    oracle.sees(handle.id(), end);
    Ok(())
}
