//! Removals that somebody interferes with, or that a crash interrupts: everything that is to go goes, the next time at
//! the latest.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};
use std::time::Duration;

use latchwork::store::backend::{Answer, Backend, Changes, Contents, Damage, MemoryBackend, Retention, Scan, Stats};
use latchwork::store::disk::RealDisk;
use latchwork::store::{
    Commit, Env, Generation, Key, Limits, Outcome, Range, Store, StoreError, Timestamp, Version, VirtualClock,
};
use latchwork::workflow::{Ctx, Engine, Failure, workflow};

const SECOND: Duration = Duration::from_secs(1);

/// Memory that takes a turn for every read, and whose process ends after so many commits.
struct Slow {
    memory: Arc<MemoryBackend>,
    left: AtomicI64,
}

impl Slow {
    fn check(&self) -> latchwork::store::Result<()> {
        if self.left.load(Ordering::SeqCst) < 0 { Err(StoreError::Closed) } else { Ok(()) }
    }

    async fn turn(&self) -> latchwork::store::Result<()> {
        tokio::task::yield_now().await;
        self.check()
    }
}

impl Backend for Slow {
    fn commit(&self, commit: Commit) -> Answer<'_, Outcome> {
        Box::pin(async move {
            self.left.fetch_sub(1, Ordering::SeqCst);
            self.check()?;
            self.memory.commit(commit).await
        })
    }

    fn latest(&self) -> Answer<'_, Generation> {
        Box::pin(async move {
            self.turn().await?;
            self.memory.latest().await
        })
    }

    fn get<'a>(&'a self, key: &'a Key, at: Generation) -> Answer<'a, Option<Version>> {
        Box::pin(async move {
            self.turn().await?;
            self.memory.get(key, at).await
        })
    }

    fn scan(&self, scan: Scan, at: Generation) -> Answer<'_, Vec<(Key, Version)>> {
        Box::pin(async move {
            self.turn().await?;
            self.memory.scan(scan, at).await
        })
    }

    fn versions<'a>(&'a self, key: &'a Key, at: Generation, limit: usize) -> Answer<'a, Vec<Version>> {
        self.memory.versions(key, at, limit)
    }

    fn changes(&self, range: Range, after: Generation, limit: usize) -> Answer<'_, Changes> {
        self.memory.changes(range, after, limit)
    }

    fn newer(&self, than: Generation) -> Answer<'_, Generation> {
        self.memory.newer(than)
    }

    fn generation_at(&self, time: Timestamp) -> Answer<'_, Generation> {
        self.memory.generation_at(time)
    }

    fn retention(&self) -> &Arc<Retention> {
        self.memory.retention()
    }

    fn maintain(&self) -> Answer<'_, bool> {
        self.memory.maintain()
    }

    fn replace(&self, contents: Contents) -> Answer<'_, Generation> {
        self.memory.replace(contents)
    }

    fn verify(&self) -> Answer<'_, Vec<Damage>> {
        self.memory.verify()
    }

    fn stats(&self) -> Answer<'_, Stats> {
        self.memory.stats()
    }

    fn identity(&self) -> u128 {
        self.memory.identity()
    }

    fn close(&self) -> Answer<'_, ()> {
        Box::pin(std::future::ready(Ok(())))
    }
}

struct Stage {
    env: Env,
    clock: Arc<VirtualClock>,
    memory: Arc<MemoryBackend>,
}

impl Stage {
    fn new() -> Stage {
        let (env, clock) = Env::seeded(1);
        let memory = Arc::new(MemoryBackend::new(env.clone()));
        Stage { env, clock, memory }
    }

    /// What a process sees of it.
    async fn store(&self) -> (Store, Arc<Slow>) {
        let slow = Arc::new(Slow { memory: self.memory.clone(), left: AtomicI64::new(i64::MAX) });
        let (env, limits) = (self.env.clone(), Limits::default());
        (Store::with_backend(slow.clone(), env, limits, Arc::new(RealDisk)).await.unwrap(), slow)
    }

    async fn pass(&self, time: Duration) {
        turns(3000).await;
        self.clock.advance(time);
        turns(3000).await;
    }
}

async fn turns(count: usize) {
    for _ in 0..count {
        tokio::task::yield_now().await;
    }
}

/// Ten are due when an engine starts; somebody has one of them start anew at the same time.
#[tokio::test]
async fn one_that_is_started_anew_keeps_no_other_from_being_removed() {
    let short = workflow("short").keep(SECOND).run(async |_: Ctx, number: u32| Ok(number));
    for count in (0..80).step_by(4) {
        let stage = Stage::new();
        let engine = Engine::on(&stage.store().await.0).register(&short).start().await.unwrap();
        for id in 0..10 {
            engine.start(&short, 1).id(format!("e{id}")).await.unwrap().result().await.unwrap();
        }
        engine.stop();
        stage.clock.advance(2 * SECOND);
        let engine = Engine::on(&stage.store().await.0).register(&short).start().await.unwrap();
        turns(count).await;
        engine.start(&short, 2).id("e3").or_restart().await.unwrap();
        for _ in 0..3 {
            stage.pass(SECOND).await;
        }
        for id in 0..10 {
            assert!(engine.describe(format!("e{id}")).await.is_err(), "after {count} turns: e{id}");
        }
    }
}

/// What one execution has left is more than a commit removes, and the process ends between the two.
#[tokio::test]
async fn what_is_left_of_a_removal_is_removed_the_next_time() {
    let many = workflow("many").keep(SECOND).run(async |ctx: Ctx, count: u64| {
        for slot in 0..count / 2 {
            ctx.state().execution::<u64>(&format!("{slot}")).set(1).await?;
        }
        if count % 2 == 1 {
            ctx.run("one more", async || Ok::<_, Failure>(())).await?;
        }
        Ok(())
    });
    for count in 994..1003 {
        let stage = Stage::new();
        let (store, slow) = stage.store().await;
        let engine = Engine::on(&store).register(&many).start().await.unwrap();
        engine.start(&many, count).id("m").await.unwrap().result().await.unwrap();
        slow.left.store(1, Ordering::SeqCst);
        stage.pass(2 * SECOND).await;
        engine.stop();
        let engine = Engine::on(&stage.store().await.0).register(&many).start().await.unwrap();
        stage.pass(SECOND).await;
        assert!(engine.describe("m").await.is_err(), "of {count}");
        engine.stop();
    }
}
