//! Recovery: the next engine continues all executions by itself; a former owner can no longer change anything.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use latchwork::store::{Clock, Env, Limits, Random, Sleep, Store, Timestamp, VirtualClock};
use latchwork::workflow::{
    Attempt, Ctx, Engine, ExecutionFilter, ExecutionState, Failure, Queue, Retry, Status, workflow,
};

async fn settle() {
    for _ in 0..200 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn an_execution_of_an_unregistered_workflow_is_set_aside_and_does_not_stop_others() {
    let known = workflow("known").run(async |ctx: Ctx, n: u32| {
        ctx.run("wait", async || {
            tokio::task::yield_now().await;
            Ok(())
        })
        .await?;
        Ok(n)
    });
    let unknown = workflow("unknown").run(async |ctx: Ctx, n: u32| {
        ctx.run("stuck", async || std::future::pending::<Result<(), Failure>>().await).await?;
        Ok(n)
    });
    let store = Store::memory().await.unwrap();
    let engine = Engine::on(&store).register(&known).register(&unknown).start().await.unwrap();
    engine.start(&unknown, 1).id("u").await.unwrap();
    engine.start(&known, 2).id("k").await.unwrap();
    engine.stop();
    let engine = Engine::on(&store).register(&known).start().await.unwrap();
    assert_eq!(engine.handle(&known, "k").result().await.unwrap(), 2);
    let parked = engine.parked().await.unwrap();
    assert_eq!(parked, [("u".into(), "workflow \"unknown\" is not registered".to_string())]);
    assert!(engine.resume("u").await.is_err(), "there is nothing to go on by");
    engine.terminate("u", "the workflow is gone").await.unwrap();
    assert_eq!(engine.parked().await.unwrap(), []);
    assert!(matches!(engine.history("u").await.unwrap().state, ExecutionState::Failed(_)));
}

/// A process was deployed without a workflow and restarted often: the workflow's executions did not run, so there is no
/// reason to park them.
#[tokio::test]
async fn an_execution_that_is_set_aside_counts_no_crash() {
    let is_let_go = Arc::new(AtomicU32::new(0));
    let asked = is_let_go.clone();
    let late = workflow("late").run(move |ctx: Ctx, n: u32| {
        let asked = asked.clone();
        async move {
            let wait = ctx.run("wait", async || match asked.load(Ordering::SeqCst) {
                0 => std::future::pending().await,
                _ => Ok(n),
            });
            wait.await
        }
    });
    let store = Store::memory().await.unwrap();
    let engine = Engine::on(&store).register(&late).start().await.unwrap();
    engine.start(&late, 7).id("l").await.unwrap();
    engine.stop();
    for _ in 0..12 {
        let engine = Engine::on(&store).start().await.unwrap();
        assert_eq!(engine.parked().await.unwrap().len(), 1);
        engine.stop();
    }
    is_let_go.store(1, Ordering::SeqCst);
    let engine = Engine::on(&store).register(&late).start().await.unwrap();
    assert_eq!(engine.handle(&late, "l").result().await.unwrap(), 7);
}

/// A body that ends the process, again and again.
#[tokio::test]
async fn a_step_that_never_ends_is_parked_at_its_cap() {
    let bodies = Arc::new(AtomicU32::new(0));
    let counted = bodies.clone();
    let poison = workflow("poison").run(move |ctx: Ctx, ()| {
        let bodies = counted.clone();
        async move {
            ctx.run("first", async || Ok(())).await?;
            let step = ctx.run("poison", async || {
                bodies.fetch_add(1, Ordering::SeqCst);
                std::future::pending::<Result<(), Failure>>().await
            });
            step.retry(Retry::exponential().max_attempts(3)).await
        }
    });
    let store = Store::memory().await.unwrap();
    for life in 0..6 {
        let engine = Engine::on(&store).register(&poison).start().await.unwrap();
        if life == 0 {
            engine.start(&poison, ()).id("p").await.unwrap();
        }
        settle().await;
        engine.stop();
        settle().await;
    }
    assert_eq!(bodies.load(Ordering::SeqCst), 3);
    let engine = Engine::on(&store).register(&poison).start().await.unwrap();
    let parked = engine.parked().await.unwrap();
    assert_eq!(parked, [("p".into(), "step \"poison\" was begun 3 times and did not end".to_string())]);
    // An operator lets it try once more.
    engine.resume("p").await.unwrap();
    settle().await;
    assert_eq!(bodies.load(Ordering::SeqCst), 4);
}

/// The same for a first step without a commit of its own before its first attempt, since another commit set the
/// execution running: its parent's, that of the run before, or that of the execution before it in a queue.
#[tokio::test]
async fn a_first_step_is_parked_at_its_cap_however_the_execution_was_set_running() {
    for how in ["child", "next run", "queue"] {
        let attempts = Arc::new(Mutex::new(Vec::new()));
        let seen = attempts.clone();
        let builder = workflow("poison").concurrency(1).when_full(Queue::new());
        let poison = builder.run(move |ctx: Ctx, (is_poison, again): (bool, bool)| {
            let seen = seen.clone();
            async move {
                if again {
                    ctx.sleep(Duration::from_millis(1)).await?;
                    return ctx.continue_as_new(&(is_poison, false)).await;
                }
                let step = ctx.run_with("first", async |attempt: Attempt| {
                    if is_poison {
                        seen.lock().unwrap().push(attempt.number);
                        std::future::pending::<()>().await;
                    }
                    Ok(())
                });
                step.retry(Retry::exponential().max_attempts(3)).await
            }
        });
        let child = poison.clone();
        let parent = workflow("parent").run(move |ctx: Ctx, ()| {
            let child = child.clone();
            async move { ctx.child(&child, (true, false)).id("p").await }
        });
        let store = Store::memory().await.unwrap();
        for life in 0..6 {
            let engine = Engine::on(&store).register(&poison).register(&parent).start().await.unwrap();
            match (life, how) {
                (0, "child") => drop(engine.start(&parent, ()).id("parent").await.unwrap()),
                (0, "queue") => {
                    engine.start(&poison, (false, false)).id("before").await.unwrap();
                    engine.start(&poison, (true, false)).id("p").await.unwrap();
                }
                (0, _) => drop(engine.start(&poison, (true, true)).id("p").await.unwrap()),
                _ => {}
            }
            store.env().sleep(Duration::from_millis(20)).await;
            settle().await;
            engine.stop();
            settle().await;
        }
        assert_eq!(*attempts.lock().unwrap(), [1, 2, 3], "{how}");
        let engine = Engine::on(&store).register(&poison).register(&parent).start().await.unwrap();
        let parked = engine.parked().await.unwrap();
        assert_eq!(parked, [("p".into(), "step \"first\" was begun 3 times and did not end".to_string())], "{how}");
    }
}

/// Code that ends the process: in a step that may be tried for ever, outside of steps, or after a sleep. The engine
/// counts each load, and parks the execution after too many loads without progress.
#[tokio::test]
async fn an_execution_that_ends_the_process_is_parked() {
    for how in ["step", "code", "asleep"] {
        let loads = Arc::new(AtomicU32::new(0));
        let counted = loads.clone();
        let poison = workflow("poison").run(move |ctx: Ctx, ()| {
            let loads = counted.clone();
            async move {
                ctx.run("first", async || Ok(())).await?;
                match how {
                    "asleep" => ctx.sleep(Duration::from_secs(5)).await?,
                    "code" => ctx.sleep(Duration::from_millis(1)).await?,
                    _ => {
                        let poison = ctx.run("poison", async || {
                            loads.fetch_add(1, Ordering::SeqCst);
                            std::future::pending::<Result<(), Failure>>().await
                        });
                        return poison.retry(Retry::exponential()).await;
                    }
                }
                loads.fetch_add(1, Ordering::SeqCst);
                std::future::pending::<Result<(), Failure>>().await
            }
        });
        let (env, clock) = Env::seeded(1);
        let store = Store::memory_with(env, Limits::default()).await.unwrap();
        for life in 0..8 {
            let engine = Engine::on(&store).register(&poison).most_crashes(4).start().await.unwrap();
            if life == 0 {
                engine.start(&poison, ()).id("p").await.unwrap();
            }
            for _ in 0..4 {
                settle().await;
                clock.advance(Duration::from_secs(2));
            }
            settle().await;
            engine.stop();
            settle().await;
        }
        assert_eq!(loads.load(Ordering::SeqCst), 5, "the first time, and four after a restart");
        let engine = Engine::on(&store).register(&poison).start().await.unwrap();
        let parked = engine.parked().await.unwrap();
        let reason = "it was loaded 4 times, and each time the process ended before it made progress";
        assert_eq!(parked, [("p".into(), reason.to_string())], "{how}");
        // An operator lets it try again, and the count begins anew.
        engine.resume("p").await.unwrap();
        settle().await;
        assert_eq!(loads.load(Ordering::SeqCst), 6);
    }
}

/// An execution that only waits is not the reason why the process ends, however soon after each start that is.
#[tokio::test]
async fn an_execution_that_only_waits_counts_no_crash() {
    let waits = workflow("waits").run(async |ctx: Ctx, ()| ctx.receive::<u32>("number").await);
    let (env, clock) = Env::seeded(1);
    let store = Store::memory_with(env, Limits::default()).await.unwrap();
    for life in 0..8 {
        let engine = Engine::on(&store).register(&waits).most_crashes(4).start().await.unwrap();
        if life == 0 {
            engine.start(&waits, ()).id("w").await.unwrap();
        }
        settle().await;
        clock.advance(Duration::from_millis(100));
        settle().await;
        assert_eq!(engine.parked().await.unwrap(), [], "life {life}");
        engine.stop();
        settle().await;
    }
    let engine = Engine::on(&store).register(&waits).start().await.unwrap();
    engine.signal("w", "number", &7u32).await.unwrap();
    assert_eq!(engine.handle(&waits, "w").result().await.unwrap(), 7);
}

/// A process was paused, and continues when another process owns its executions.
#[tokio::test]
async fn a_former_owner_can_change_nothing() {
    let (gate, open) = tokio::sync::watch::channel(false);
    let bodies = Arc::new(AtomicU32::new(0));
    let counted = bodies.clone();
    let paused = workflow("paused").run(move |ctx: Ctx, ()| {
        let (mut open, bodies) = (open.clone(), counted.clone());
        async move {
            let first = ctx.run("first", {
                let open = &open;
                async move || {
                    let mut open = open.clone();
                    open.wait_for(|open| *open).await.map(|_| ()).map_err(Failure::from)
                }
            });
            first.await?;
            let _ = open.borrow_and_update();
            ctx.run("second", async || Ok(bodies.fetch_add(1, Ordering::SeqCst))).await
        }
    });
    let store = Store::memory().await.unwrap();
    let zombie = Engine::on(&store).register(&paused).start().await.unwrap();
    zombie.start(&paused, ()).id("p").await.unwrap();
    settle().await;
    let owner = Engine::on(&store).register(&paused).start().await.unwrap();
    settle().await;
    gate.send_replace(true);
    assert_eq!(owner.handle(&paused, "p").result().await.unwrap(), 0);
    settle().await;
    assert_eq!(bodies.load(Ordering::SeqCst), 1, "the former owner ran the second step");
    assert_eq!(zombie.residents(), 0, "the former owner has evicted it");
}

#[tokio::test]
async fn a_long_journal_is_read_as_it_is_needed() {
    let long = workflow("long").run(async |ctx: Ctx, steps: u32| {
        let mut sum = 0u64;
        for number in 0..steps {
            sum += ctx.run("step", async || Ok(u64::from(number))).input(&number).await?;
            if number == steps / 2 {
                ctx.sleep(Duration::from_secs(60)).await?;
            }
        }
        Ok(sum)
    });
    let test = latchwork::testing::TestEngine::new(&long, 1).await.unwrap();
    assert_eq!(test.complete(&long, 1000).await.unwrap(), 499_500);
    assert_eq!(test.bodies().len(), 1000, "each body once, though half of them were replayed");
}

/// Stands for a bad disk under one record.
#[tokio::test]
async fn a_damaged_execution_is_set_aside_and_does_not_stop_the_others() {
    let known = workflow("known").run(async |ctx: Ctx, n: u32| ctx.run("a", async || Ok(n)).await);
    let store = Store::memory().await.unwrap();
    drop(Engine::on(&store).register(&known).start().await.unwrap());
    let space = |name: &'static str| store.space(latchwork::store::SpaceSpec::new(name).keys_used_once());
    let executions = space("workflow.executions").await.unwrap();
    let running = space("workflow.running").await.unwrap();
    // Listed as running, in any shard: the engine owns all of them.
    let running = running.key([&b"\x00\x00\x00\x05known"[..], &[0; 8], b"bad"].concat());
    let damage = latchwork::store::Commit::new().put(&executions.key("bad"), "?").put(&running, "");
    store.commit(damage).await.unwrap().applied().unwrap();
    let engine = Engine::on(&store).register(&known).start().await.unwrap();
    assert_eq!(engine.start(&known, 7).await.unwrap().result().await.unwrap(), 7);
    let parked = engine.parked().await.unwrap();
    assert_eq!(parked, [("bad".into(), "execution \"bad\" is damaged: it cannot be read".to_string())]);
}

/// A clock whose time of day moves whenever it is read: each moment of a start is at a time of its own.
struct ReadingTakesTime(Arc<VirtualClock>, AtomicU32);

/// How far the time of day moves at each reading.
const TICK: Duration = Duration::from_millis(10);

impl Clock for ReadingTakesTime {
    fn now(&self) -> Timestamp {
        self.0.now().plus(TICK * self.1.fetch_add(1, Ordering::SeqCst))
    }

    fn monotonic(&self) -> Duration {
        self.0.monotonic()
    }

    fn sleep(&self, duration: Duration) -> Sleep {
        self.0.sleep(duration)
    }
}

/// A new engine takes the shards, reads what was left, and starts to ring timers. A timer that becomes due between two
/// of these moments must ring, too.
#[tokio::test]
async fn a_timer_rings_whenever_it_becomes_due_during_the_start_of_an_engine() {
    struct Bytes(std::sync::Mutex<fastrand::Rng>);
    impl Random for Bytes {
        fn fill(&self, bytes: &mut [u8]) {
            self.0.lock().unwrap().fill(bytes);
        }
    }
    let (_, clock) = Env::seeded(1);
    let reading = Arc::new(ReadingTakesTime(clock.clone(), AtomicU32::new(0)));
    let env = Env::new(reading.clone(), Arc::new(Bytes(fastrand::Rng::with_seed(1).into())));
    let store = Store::memory_with(env, Limits::default()).await.unwrap();
    let nap = workflow("nap").run(async |ctx: Ctx, until: u64| {
        ctx.sleep_until(Timestamp(until)).await?;
        Ok(until)
    });
    let engine = Engine::on(&store).register(&nap).start().await.unwrap();
    let begin = clock.now().plus(Duration::from_secs(3600));
    let naps: Vec<u64> = (0..1000).map(|n| begin.plus(TICK * n / 2).0).collect();
    for nap_until in &naps {
        engine.start(&nap, *nap_until).id(nap_until.to_string()).await.unwrap();
    }
    while engine.residents() > 0 {
        settle().await;
        clock.advance(Duration::from_millis(1100));
    }
    engine.stop();
    settle().await;
    // The time of day is a second into the naps when the next engine starts.
    clock.jump_to(begin.plus(Duration::from_secs(1)));
    reading.1.store(0, Ordering::SeqCst);
    let engine = Engine::on(&store).register(&nap).start().await.unwrap();
    for _ in 0..100 {
        settle().await;
        clock.advance(Duration::from_millis(500));
    }
    let sleeping = engine.list(ExecutionFilter::new().is(Status::Asleep)).await.unwrap();
    assert_eq!(sleeping.items.iter().map(|it| it.id.to_string()).collect::<Vec<_>>(), Vec::<String>::new());
}
