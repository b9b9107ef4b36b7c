//! Up to five nodes on one store, on virtual time and from a seed: nodes crash, pause for longer than their leases,
//! lose answers, stop and join, and their clocks run at different speeds. A failing seed replays exactly.
//!
//! `LATCHWORK_SEEDS` is the number of seeds, `LATCHWORK_SEED` the first one.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use latchwork::store::backend::{
    Answer, Backend, Before, Changes, Contents, Damage, MemoryBackend, Pin, Rules, Scan, Stats,
};
use latchwork::store::disk::RealDisk;
use latchwork::store::{
    Clock, Commit, Env, Generation, Key, Limits, Outcome, Random, Range, Sleep, SpaceId, StoreError, Timestamp,
    Version, VirtualClock,
};
use latchwork::workflow::{Failure, Queue, Retry};
use tokio::sync::watch;

use super::*;

type Answered<T> = Result<T, StoreError>;

/// How many turns all tasks get before time advances.
const TURNS: usize = 40;
const JOBS: u64 = 40;
const SHORT: Duration = Duration::from_secs(3);

/// A clock that runs at its own speed and shows its own time of day.
struct OwnClock {
    base: Arc<VirtualClock>,
    /// In percent.
    speed: u32,
    ahead: Duration,
}

impl Clock for OwnClock {
    fn now(&self) -> Timestamp {
        let base = Timestamp(1_767_225_600_000_000);
        base.plus(self.monotonic()).plus(self.ahead)
    }

    fn monotonic(&self) -> Duration {
        self.base.monotonic() * self.speed / 100
    }

    fn sleep(&self, duration: Duration) -> Sleep {
        // Never too short: time does not pass by itself.
        self.base.sleep(duration.saturating_mul(100) / self.speed + Duration::from_nanos(2))
    }
}

struct OwnRandom(std::sync::Mutex<fastrand::Rng>);

impl Random for OwnRandom {
    fn fill(&self, bytes: &mut [u8]) {
        self.0.lock().unwrap().fill(bytes);
    }
}

/// What a node can do with the store.
#[derive(Clone, Copy, PartialEq)]
enum Access {
    Open,
    /// Nothing is answered.
    Paused,
    /// The process is dead.
    Dead,
}

/// The store as one life of a node sees it.
struct Seen {
    memory: Arc<MemoryBackend>,
    access: watch::Sender<Access>,
    chance: std::sync::Mutex<fastrand::Rng>,
    /// How many of a thousand commits get no answer.
    lost: u32,
    is_calm: Arc<AtomicBool>,
    refused: Arc<AtomicU64>,
}

impl Seen {
    async fn pass(&self) -> Answered<()> {
        let mut access = self.access.subscribe();
        loop {
            match *access.borrow_and_update() {
                Access::Open => return Ok(()),
                Access::Dead => return Err(StoreError::Closed),
                Access::Paused => {}
            }
            access.changed().await.map_err(|_| StoreError::Closed)?;
        }
    }

    async fn commit(&self, commit: Commit) -> Answered<Outcome> {
        self.pass().await?;
        let draw = |chance: &std::sync::Mutex<fastrand::Rng>| chance.lock().unwrap().u32(0..1000);
        let (lost, lands) = (draw(&self.chance), draw(&self.chance) % 2 == 0);
        let is_lost = lost < self.lost && !self.is_calm.load(Ordering::SeqCst);
        if is_lost && !lands {
            return Err(StoreError::Uncertain { cause: "the commit was lost".into() });
        }
        let outcome = self.memory.commit(commit).await?;
        // A pause may begin while the commit is on its way.
        self.pass().await?;
        if is_lost {
            return Err(StoreError::Uncertain { cause: "the answer was lost".into() });
        }
        if matches!(outcome, Outcome::Refused(_)) {
            self.refused.fetch_add(1, Ordering::SeqCst);
        }
        Ok(outcome)
    }
}

macro_rules! read {
    ($self:ident, $read:expr) => {
        Box::pin(async move {
            $self.pass().await?;
            $read.await
        })
    };
}

impl Backend for Seen {
    fn commit(&self, commit: Commit) -> Answer<'_, Outcome> {
        Box::pin(self.commit(commit))
    }
    fn latest(&self) -> Answer<'_, Generation> {
        read!(self, self.memory.latest())
    }
    fn get<'a>(&'a self, key: &'a Key, at: Generation) -> Answer<'a, Option<Version>> {
        read!(self, self.memory.get(key, at))
    }
    fn scan(&self, scan: Scan, at: Generation) -> Answer<'_, Vec<(Key, Version)>> {
        read!(self, self.memory.scan(scan, at))
    }
    fn versions<'a>(&'a self, key: &'a Key, at: Generation, limit: usize) -> Answer<'a, Vec<Version>> {
        read!(self, self.memory.versions(key, at, limit))
    }
    fn changes(&self, range: Range, after: Generation, limit: usize) -> Answer<'_, Changes> {
        read!(self, self.memory.changes(range, after, limit))
    }
    fn newer(&self, than: Generation, space: SpaceId) -> Answer<'_, Generation> {
        Box::pin(async move {
            let newer = self.memory.newer(than, space).await?;
            self.pass().await?;
            Ok(newer)
        })
    }
    fn before(&self, time: Timestamp, spaces: Vec<(SpaceId, Generation)>) -> Answer<'_, Before> {
        read!(self, self.memory.before(time, spaces))
    }
    fn pin(&self, at: Option<Generation>) -> Answer<'_, Pin> {
        read!(self, self.memory.pin(at))
    }
    fn floor(&self, space: SpaceId) -> Generation {
        self.memory.floor(space)
    }
    fn declare(&self, space: SpaceId, rules: Rules, at: Generation) {
        self.memory.declare(space, rules, at);
    }
    fn maintain(&self) -> Answer<'_, bool> {
        read!(self, self.memory.maintain())
    }
    fn replace(&self, contents: Contents) -> Answer<'_, Generation> {
        read!(self, self.memory.replace(contents))
    }
    fn verify(&self) -> Answer<'_, Vec<Damage>> {
        read!(self, self.memory.verify())
    }
    fn stats(&self) -> Answer<'_, Stats> {
        read!(self, self.memory.stats())
    }
    fn identity(&self) -> u128 {
        self.memory.identity()
    }
    fn close(&self) -> Answer<'_, ()> {
        Box::pin(async { Ok(()) })
    }
}

/// What all nodes share.
struct World {
    clock: Arc<VirtualClock>,
    memory: Arc<MemoryBackend>,
    random: fastrand::Rng,
    is_calm: Arc<AtomicBool>,
    refused: Arc<AtomicU64>,
    lost: u32,
    /// Time is needed for timers, so their clocks are close; without timers they are up to a day apart.
    naps: bool,
}

struct NodeLife {
    engine: Engine,
    seen: Arc<Seen>,
}

fn counted(value: i64, most: i64, what: &str) -> Result<(), Failure> {
    match (1..=most).contains(&value) {
        true => Ok(()),
        false => Err(Failure::new(format!("{value} executions are inside {what}")).not_retryable()),
    }
}

/// A change of a slot and its record are one commit, so the counts are exact whatever crashes.
fn job(naps: bool) -> Workflow<u64, u64> {
    let limited = workflow("job").concurrency_by(2, |n: &u64| (n % 3).to_string()).when_full(Queue::new());
    limited.with(naps).run(async |ctx: Ctx, naps: bool, n: u64| {
        let running = ctx.state().global::<i64>(&format!("running-{}", n % 3));
        counted(running.increment(1).await?.value, 2, "a limit of 2")?;
        let guard = ctx.mutex(format!("lock-{}", n % 4)).acquire().await?;
        let held = ctx.state().global::<i64>(&format!("held-{}", n % 4));
        counted(held.increment(1).await?.value, 1, "a mutex")?;
        // An attempt that a crash ends counts, and there are many crashes.
        ctx.run("step", async || Ok(())).retry(Retry::exponential()).await?;
        if naps {
            ctx.sleep(Duration::from_millis(200 * (n % 5))).await?;
        }
        held.increment(-1).await?;
        guard.release().await?;
        let extra = ctx.receive::<u64>("go").await?;
        ctx.state().global::<i64>("done").increment(1).await?;
        running.increment(-1).await?;
        Ok(n + extra)
    })
}

impl World {
    fn new(seed: u64) -> World {
        let (env, clock) = Env::seeded(seed);
        let mut random = fastrand::Rng::with_seed(seed);
        let (memory, lost) = (Arc::new(MemoryBackend::new(env)), [0, 5, 30, 80][random.usize(0..4)]);
        let (is_calm, refused, naps) = (Arc::default(), Arc::default(), random.bool());
        World { clock, memory, random, is_calm, refused, lost, naps }
    }

    /// Lets everything run until the future is done.
    async fn done<T: Send + 'static>(&self, future: impl Future<Output = T> + Send + 'static) -> T {
        let task = tokio::spawn(future);
        let mut rounds = 0;
        while !task.is_finished() {
            self.round().await;
            rounds += 1;
            assert!(rounds < 300_000, "it hangs");
        }
        task.await.unwrap()
    }

    async fn round(&self) {
        for _ in 0..TURNS {
            tokio::task::yield_now().await;
        }
        let now = self.clock.monotonic();
        if let Some(next) = self.clock.next_deadline().filter(|next| *next < now + Duration::from_secs(3600)) {
            self.clock.advance(next.saturating_sub(now));
        }
    }

    async fn pass(&self, time: Duration) {
        let until = self.clock.monotonic() + time;
        while self.clock.monotonic() < until {
            for _ in 0..TURNS {
                tokio::task::yield_now().await;
            }
            let now = self.clock.monotonic();
            let next = self.clock.next_deadline().unwrap_or(until).min(until);
            self.clock.advance(next.saturating_sub(now));
        }
    }

    async fn start(&mut self, name: String) -> Option<NodeLife> {
        let (speed, day) = (self.random.u32(50..=200), 24 * 3600);
        let ahead = Duration::from_secs(if self.naps { self.random.u64(0..3) } else { self.random.u64(0..day) });
        let clock = Arc::new(OwnClock { base: self.clock.clone(), speed, ahead });
        let random = OwnRandom(std::sync::Mutex::new(self.random.fork()));
        let seen = Arc::new(Seen {
            memory: self.memory.clone(),
            access: watch::Sender::new(Access::Open),
            chance: std::sync::Mutex::new(self.random.fork()),
            lost: self.lost,
            is_calm: self.is_calm.clone(),
            refused: self.refused.clone(),
        });
        let (backend, env, naps) = (seen.clone(), Env::new(clock, Arc::new(random)), self.naps);
        let engine = self.done(async move {
            let store = Store::with_backend(backend, env, Limits::default(), Arc::new(RealDisk)).await.ok()?;
            let options = NodeOptions::new().name(name).lease(SHORT);
            Engine::on(&store).register(&job(naps)).most_crashes(1000).node(options).start().await.ok()
        });
        let engine = engine.await?;
        Some(NodeLife { engine, seen })
    }
}

/// One fault of a random node.
async fn fault(world: &mut World, nodes: &mut Vec<NodeLife>, lives: &mut u32) {
    let victim = world.random.usize(0..nodes.len());
    match world.random.u32(0..6) {
        // A crash; the process is started again under another name.
        0 | 1 => {
            nodes.remove(victim).seen.access.send_replace(Access::Dead);
        }
        // A pause, for longer than the lease or not.
        2 | 3 => {
            nodes[victim].seen.access.send_replace(Access::Paused);
            let pause = SHORT * world.random.u32(1..6);
            world.pass(pause).await;
            nodes[victim].seen.access.send_replace(Access::Open);
        }
        4 if nodes.len() > 1 => {
            let engine = nodes.remove(victim).engine;
            let _ = world.done(async move { engine.shutdown().await }).await;
        }
        _ => {}
    }
    let at_least = if nodes.len() < 5 { nodes.len() + usize::from(world.random.bool()) } else { 0 };
    // A start fails if an answer to it is lost; the process is started again.
    while nodes.len() < at_least.max(1) {
        *lives += 1;
        nodes.extend(world.start(format!("n{lives}")).await);
    }
}

/// Calls a node until it answers.
async fn call<T, F>(world: &World, what: &str, mut attempt: impl FnMut() -> F) -> T
where
    T: Send + 'static,
    F: Future<Output = Result<T, latchwork::workflow::WorkflowError>> + Send + 'static,
{
    for _ in 0..10_000 {
        match world.done(attempt()).await {
            Ok(done) => return done,
            Err(error) if error.kind() == latchwork::store::ErrorKind::Unavailable => {
                world.pass(Duration::from_millis(100)).await;
            }
            Err(error) => panic!("{what}: {error}"),
        }
    }
    panic!("{what}: the store never answers");
}

async fn simulate(seed: u64) {
    let mut world = World::new(seed);
    let (mut nodes, mut lives) = (Vec::new(), 0);
    let at_first = world.random.usize(1..4);
    // A start fails if an answer to it is lost; the process is started again.
    while nodes.len() < at_first {
        lives += 1;
        nodes.extend(world.start(format!("n{lives}")).await);
    }
    let (job, mut n) = (job(world.naps), 0);
    while n < JOBS {
        for _ in 0..world.random.u64(1..10).min(JOBS - n) {
            let caller = world.random.usize(0..nodes.len());
            let (engine, job) = (nodes[caller].engine.clone(), job.clone());
            // A call that is made while its node is cut off ends with the node.
            tokio::spawn(async move {
                for _ in 0..100 {
                    let start = engine.start(&job, n).id(format!("j{n}")).or_join();
                    if start.await.is_ok()
                        && engine.signal(format!("j{n}"), "go", &1_u64).id(format!("s{n}")).await.is_ok()
                    {
                        return;
                    }
                    engine.store().env().sleep(Duration::from_millis(300)).await;
                }
            });
            n += 1;
        }
        let time = Duration::from_millis(world.random.u64(10..2000));
        world.pass(time).await;
        fault(&mut world, &mut nodes, &mut lives).await;
    }
    world.is_calm.store(true, Ordering::SeqCst);
    lives += 1;
    let last = world.start(format!("n{lives}")).await.expect("a node starts when there are no faults");
    for n in 0..JOBS {
        let engine = &last.engine;
        let started = || {
            let start = engine.start(&job, n).id(format!("j{n}")).or_join();
            async move { start.await }
        };
        call(&world, &format!("seed {seed}: start of {n}"), started).await;
        let signalled = || {
            let sent = engine.signal(format!("j{n}"), "go", &1_u64).id(format!("s{n}")).into_future();
            async move {
                match sent.await {
                    Err(latchwork::workflow::WorkflowError::Ended { .. }) => Ok(()),
                    sent => sent,
                }
            }
        };
        call(&world, &format!("seed {seed}: signal of {n}"), signalled).await;
    }
    for n in 0..JOBS {
        let handle = last.engine.handle(&job, format!("j{n}"));
        let result = call(&world, &format!("seed {seed}: result of {n}"), || handle.result()).await;
        assert_eq!(result, n + 1, "seed {seed}");
    }
    let states = last.engine.states().global();
    let mut slots: Vec<(String, i64)> = vec![("done".into(), JOBS as i64)];
    slots.extend((0..3).map(|key| (format!("running-{key}"), 0)));
    slots.extend((0..4).map(|lock| (format!("held-{lock}"), 0)));
    for (slot, expected) in slots {
        let read = states.slot::<i64>(&slot).get();
        let found = world.done(read).await.unwrap();
        assert_eq!(found.unwrap_or_default(), expected, "seed {seed}: {slot}");
    }
}

fn number(variable: &str) -> Option<u64> {
    std::env::var(variable).ok().and_then(|text| text.parse().ok())
}

#[test]
fn nodes_lose_and_double_nothing_whatever_happens_to_them() {
    let (first, seeds) = (number("LATCHWORK_SEED").unwrap_or(1), number("LATCHWORK_SEEDS").unwrap_or(20));
    for seed in first..first + seeds {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(simulate(seed));
    }
    println!("{seeds} seeds from {first}: no violation");
}
