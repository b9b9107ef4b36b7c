//! Limits under faults from a seed: crashes, restarts, pauses with a second engine, lost answers, slow commits and
//! jumps of the clock. Executions complete, fail, continue as new, time out, are cancelled, terminated and forked, as
//! children and from outside.
//!
//! `testing/admitted.rs` audits the store's commits one by one: no limit is exceeded at any generation, a gate counts
//! exactly the executions that hold a permit, and queues are served in order. This file judges from outside that every
//! start got an answer that came true, and that nothing is left in the end.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use latchwork::store::ErrorKind;
use latchwork::testing::{Caller, Faults, Report, Simulation};
use latchwork::workflow::{
    Batch, Ctx, Debounce, Engine, ExecutionFilter, ExecutionId, Failure, Queue, RateLimit, Result, Retry, Workflow,
    WorkflowBuilder, WorkflowError, workflow,
};
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use crate::workflow::simulation::campaign_of;

const CLIENTS: u64 = 4;

/// What an execution does.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Job {
    key: String,
    pause_ms: u64,
    how: u64,
}

/// What callers saw.
#[derive(Default)]
struct Seen {
    /// The batches that callers got, with their inputs.
    items: BTreeMap<(ExecutionId, u32), u64>,
    /// The executions that gathered starts became.
    gathered: BTreeSet<ExecutionId>,
    complaints: Vec<String>,
    scenes: BTreeMap<&'static str, u32>,
}

#[derive(Clone)]
struct Play {
    seen: Arc<Mutex<Seen>>,
    rejecting: Workflow<Job, u64>,
    queueing: Workflow<Job, u64>,
    fair: Workflow<Job, u64>,
    parent: Workflow<Job, u64>,
    debounced: Workflow<u64, u64>,
    batched: Workflow<u64, u64>,
}

/// A crash counts as an attempt, and must not be the last one.
fn often() -> Retry {
    Retry::exponential().max_attempts(1000)
}

/// Does what the job says.
async fn work(ctx: Ctx, job: Job) -> Result<u64, Failure> {
    ctx.run("begin", async || Ok(())).retry(often()).await?;
    ctx.sleep(Duration::from_millis(job.pause_ms)).await?;
    match job.how % 8 {
        0 => Err(Failure::new("no luck").not_retryable()),
        1 => ctx.continue_as_new(&Job { how: 7, ..job }).await,
        // Longer than the time limit of the workflow.
        2 => ctx.sleep(Duration::from_secs(100)).await.map(|()| 0),
        _ => ctx.run("end", async || Ok(job.how)).retry(often()).await,
    }
}

fn working(builder: WorkflowBuilder) -> Workflow<Job, u64> {
    builder.timeout(Duration::from_secs(60)).keep(Duration::from_secs(3600)).run(work)
}

impl Play {
    fn new() -> Play {
        Play::with(|rejecting| rejecting)
    }

    fn with(rejecting: impl FnOnce(WorkflowBuilder) -> WorkflowBuilder) -> Play {
        let key = |job: &Job| job.key.clone();
        let rejecting = working(rejecting(workflow("rejecting").concurrency_by(2, key)));
        let queue = Queue::new().timeout(Duration::from_secs(40)).depth(12);
        let queueing = workflow("queueing").concurrency(3).concurrency_by(2, key).when_full(queue);
        let queue = Queue::new().priority(Duration::from_secs(2), |job: &Job| (job.how % 3) as i32).fair(key);
        let rate = RateLimit::new(20, Duration::from_secs(1)).delay();
        let fair = workflow("fair").concurrency(2).rate_limit(rate).when_full(queue);
        let (queueing, fair) = (working(queueing), working(fair));
        let child = queueing.clone();
        let parent = workflow("parent").timeout(Duration::from_secs(300)).run(move |ctx: Ctx, job: Job| {
            let child = child.clone();
            async move {
                let first = ctx.child(&child, job.clone()).start().await;
                ctx.sleep(Duration::from_millis(job.pause_ms)).await?;
                match first {
                    // The other child is cancelled with the end of its parent.
                    Ok(first) if job.how.is_multiple_of(2) => Ok(first.result().await.unwrap_or_default()),
                    _ => Ok(0),
                }
            }
        });
        let debounce = Debounce::new(Duration::from_secs(1)).max_wait(Duration::from_secs(3));
        let debounce = debounce.by(|n: &u64| (n % 2).to_string());
        let debounced = workflow("debounced")
            .debounce(debounce)
            .run(async |ctx: Ctx, n: u64| ctx.run("end", async || Ok(n)).retry(often()).await);
        let batched = workflow("batched").concurrency(2).when_full(Queue::new());
        let batched = batched.batch(Batch::new(3, Duration::from_secs(2)));
        let batched = batched.run(async |ctx: Ctx, numbers: Vec<u64>| {
            let doubled = || Ok(numbers.iter().map(|n| n * 2).collect());
            ctx.run("double", async || doubled()).retry(often()).await
        });
        Play { seen: Arc::default(), rejecting, queueing, fair, parent, debounced, batched }
    }

    fn scene(&self, scene: &'static str) {
        *self.seen.lock().scenes.entry(scene).or_default() += 1;
    }

    /// Starts, cancels, terminates and forks at random. In the next process it continues where it was.
    async fn client(self, number: u64, done: Arc<Mutex<u64>>, caller: Caller) -> Result<()> {
        let (env, engine) = (caller.env().clone(), caller.engine().clone());
        loop {
            let turn = *done.lock();
            // The client in the process before may have counted its last turn as well.
            if turn >= 14 {
                return Ok(());
            }
            let id = format!("{number}-{turn}");
            let job = Job {
                key: ["a", "b", "c"][(env.random() % 3) as usize].into(),
                pause_ms: [0, 0, 100, 3000][(env.random() % 4) as usize],
                how: env.random() % 16,
            };
            let started = match env.random() % 8 {
                0 | 1 => engine.start(&self.rejecting, job).id(&*id).or_join().await.map(drop),
                2 | 3 => engine.start(&self.queueing, job).id(&*id).or_join().await.map(drop),
                4 => engine.start(&self.fair, job).id(&*id).or_join().await.map(drop),
                5 => engine.start(&self.parent, job).id(&*id).or_join().await.map(drop),
                6 => engine.start(&self.debounced, number * 100 + turn).idempotency_key(&*id).await.map(|handle| {
                    self.seen.lock().gathered.insert(handle.id().clone());
                }),
                _ => {
                    let n = number * 100 + turn;
                    // An earlier process may have started it, and the answer was lost.
                    engine.start(&self.batched, n).idempotency_key(&*id).await.map(|handle| {
                        let place = (handle.id().clone(), handle.item().unwrap_or(u32::MAX));
                        let taken = self.seen.lock().items.insert(place.clone(), n);
                        if let Some(other) = taken.filter(|other| *other != n) {
                            self.seen.lock().complaints.push(format!("{place:?} is {other} and {n}"));
                        }
                    })
                }
            };
            match started {
                Ok(()) => self.scene("started"),
                Err(WorkflowError::LimitReached { .. }) => self.scene("rejected"),
                Err(WorkflowError::QueueFull { .. }) => self.scene("queue full"),
                // An earlier process started it as another workflow.
                Err(WorkflowError::OtherWorkflow { .. }) => {}
                Err(error) => return Err(error),
            }
            self.meddle(&engine, env.random(), &id).await?;
            *done.lock() += 1;
            env.sleep(Duration::from_millis(env.random() % 900)).await;
        }
    }

    async fn meddle(&self, engine: &Engine, chance: u64, id: &str) -> Result<()> {
        let scene = match chance % 10 {
            0 => ("cancelled", engine.cancel(id, "not needed").await),
            1 => ("terminated", engine.terminate(id, "enough").await),
            2 => ("forked", engine.fork(id).id(format!("{id}-fork")).await.map(drop)),
            _ => return Ok(()),
        };
        match scene {
            (scene, Ok(())) => self.scene(scene),
            (_, Err(error)) if error.kind() == ErrorKind::Unavailable => return Err(error),
            _ => {}
        }
        Ok(())
    }

    fn simulation(&self, seed: u64) -> Simulation {
        let simulation = Simulation::new(seed).register(&self.rejecting).register(&self.queueing).register(&self.fair);
        let simulation = simulation.register(&self.parent).register(&self.debounced).register(&self.batched);
        let simulation = (0..CLIENTS).fold(simulation, |simulation, number| {
            let (play, done) = (self.clone(), Arc::default());
            simulation.client(move |caller| play.clone().client(number, Arc::clone(&done), caller))
        });
        let play = self.clone();
        simulation.afterwards(move |engine| async move { play.judge(&engine).await })
    }

    /// Checks the store when nothing runs any more.
    async fn judge(&self, engine: &Engine) -> Result<()> {
        let mut complaints = Vec::new();
        for name in ["rejecting", "queueing", "fair", "batched"] {
            for key in [None, Some("a"), Some("b"), Some("c")] {
                let left = engine.limit_use(name, key).await?;
                if (left.used, left.waiting) != (0, 0) {
                    complaints.push(format!("{name} {key:?}: {left:?} in the end"));
                }
            }
        }
        let (items, gathered) = {
            let seen = self.seen.lock();
            (seen.items.clone(), seen.gathered.clone())
        };
        for ((id, item), n) in items {
            let given = engine.handle_by_id(&id).of_item(item).result().await;
            if given.as_ref().ok().and_then(|given| given.as_u64()) != Some(n * 2) {
                complaints.push(format!("input {n}, which is {item} of {id}, gave {given:?}"));
            }
        }
        let mut used = BTreeSet::new();
        for listed in engine.list(ExecutionFilter::new().workflow("batched")).limit(1000).await?.items {
            let inputs = engine.history(&listed.id).await?.input;
            for n in inputs.as_array().into_iter().flatten().filter_map(|n| n.as_u64()) {
                if !used.insert(n) {
                    complaints.push(format!("input {n} was used twice"));
                }
            }
        }
        for id in gathered {
            let given = engine.handle_by_id(&id).result().await;
            if given.is_err() {
                complaints.push(format!("the execution of a gathered start, {id}, gave {given:?}"));
            }
        }
        self.seen.lock().complaints.extend(complaints);
        Ok(())
    }
}

fn simulate(seed: u64, faults: Faults) -> (Report, Vec<String>) {
    simulate_play(&Play::new(), seed, faults)
}

fn simulate_play(play: &Play, seed: u64, faults: Faults) -> (Report, Vec<String>) {
    let report = play.simulation(seed).faults(faults).timeout(Duration::from_secs(3 * 86_400)).run();
    let mut complaints = play.seen.lock().complaints.clone();
    complaints.extend(report.stuck.clone());
    complaints.extend(report.errors.iter().map(ToString::to_string));
    complaints.extend(report.misfiled.iter().cloned());
    complaints.extend(report.parked.iter().map(|parked| format!("parked: {parked:?}")));
    (report, complaints)
}

#[test]
fn limits_keep_their_promises_under_any_faults() {
    campaign_of(simulate, 100);
}

/// If a permit is taken in another commit than that of its run, a crash or another start can come in between.
#[test]
fn permits_in_a_commit_of_their_own_are_noticed() {
    let noticed = (1..=20).filter(|seed| {
        let broken = Play::with(WorkflowBuilder::sabotage_permits);
        !simulate_play(&broken, *seed, Faults::default()).1.is_empty()
    });
    let noticed = noticed.count();
    assert!(noticed >= 10, "{noticed} of 20 seeds complain");
}

/// Checks that every kind of event happens, since a simulation without events proves nothing.
#[test]
fn every_scene_of_limits_is_played() {
    let mut played = BTreeMap::<&str, u32>::new();
    for seed in 1..=40 {
        let play = Play::new();
        play.simulation(seed).timeout(Duration::from_secs(3 * 86_400)).run();
        let scenes = std::mem::take(&mut play.seen.lock().scenes);
        scenes.into_iter().for_each(|(scene, times)| *played.entry(scene).or_default() += times);
    }
    for scene in ["started", "rejected", "cancelled", "terminated", "forked"] {
        assert!(played.contains_key(scene), "{scene}: {played:?}");
    }
}
