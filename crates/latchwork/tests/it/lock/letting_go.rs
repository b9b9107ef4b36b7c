//! Locks that are released without a call to `release`: by losing a race, by dropping a guard, at the end of a program.
//! And a parent that can never release its lock, because it waits for the child that requests it.

use std::time::Duration;

use latchwork::lock::{LockKind, LockRefused};
use latchwork::store::Store;
use latchwork::testing::{Crashes, TestEngine};
use latchwork::workflow::{Ctx, Engine, Failure, Workflow, workflow};

const SECOND: Duration = Duration::from_secs(1);

async fn used(engine: &Engine, name: &str) -> u32 {
    engine.locks().inspect(name).await.unwrap().used
}

/// Holds the mutex, and sleeps for longer than any test waits.
async fn holds(ctx: Ctx) -> Result<(), Failure> {
    let _guard = ctx.mutex("m").acquire().await?;
    ctx.sleep(60 * SECOND).await
}

async fn wins(ctx: Ctx) -> Result<(), Failure> {
    ctx.sleep(2 * SECOND).await
}

async fn fails(ctx: Ctx) -> Result<(), Failure> {
    ctx.sleep(2 * SECOND).await?;
    Err(Failure::new("lost"))
}

/// Gives up a branch that holds a lock, in each possible way; then the execution sleeps for a while.
fn loser() -> Workflow<u64, ()> {
    workflow("loser").run(async |ctx: Ctx, way: u64| {
        match way {
            0 => drop(
                ctx.race([0, 1], async |ctx: Ctx, n| if n == 0 { wins(ctx).await } else { holds(ctx).await }).await,
            ),
            1 => drop(
                ctx.race([0, 1], async |ctx: Ctx, n| if n == 1 { wins(ctx).await } else { holds(ctx).await }).await,
            ),
            2 => drop(ctx.select((wins, holds)).await),
            3 => drop(ctx.try_join((fails, holds)).await),
            _ => {
                let way = async |ctx: Ctx, n| if n == 0 { fails(ctx).await } else { holds(ctx).await };
                drop(ctx.try_map([0, 1], 2, way).await);
            }
        }
        ctx.sleep(5 * SECOND).await
    })
}

/// The execution was out of memory. When it is loaded, the winner ends before the loser has run again, so there is no
/// guard to drop.
#[tokio::test]
async fn a_branch_that_loses_while_it_is_out_of_memory_holds_nothing() {
    for way in 0..5 {
        let loser = loser();
        let test = TestEngine::new(&loser, 1).await.unwrap();
        let handle = test.engine().start(&loser, way).await.unwrap();
        test.run(test.env().sleep(SECOND)).await;
        assert_eq!(used(test.engine(), "m").await, 1, "way {way}");
        test.run(test.env().sleep(3 * SECOND)).await;
        assert_eq!(used(test.engine(), "m").await, 0, "way {way}");
        test.run(handle.result()).await.unwrap();
    }
}

/// The same with a crash at every commit: the lock is free after the race.
#[tokio::test]
async fn the_lock_of_a_lost_branch_can_be_acquired_after_any_crash() {
    let again = workflow("again").run(async |ctx: Ctx, way: u64| {
        if way == 0 {
            drop(ctx.select((wins, holds)).await);
        } else {
            drop(ctx.try_join((fails, holds)).await);
        }
        let guard = ctx.mutex("m").acquire().await?;
        guard.release().await
    });
    for way in 0..2 {
        let crashes = Crashes::of(|| again.clone(), way).run(async |outcome| {
            assert!(matches!(outcome.result, Ok(true)), "{:?}: {:?}", outcome.crash, outcome.result);
        });
        assert!(crashes.await > 5);
    }
}

#[tokio::test]
async fn a_dropped_guard_does_not_block_its_own_execution() {
    let drops = workflow("drops").run(async |ctx: Ctx, steps: u64| {
        for step in 0..steps {
            drop(ctx.mutex("m").acquire().await?);
            if step % 2 == 1 {
                ctx.run("between", async || Ok(())).await?;
            }
        }
        let taken = ctx.mutex("m").try_acquire().await?.is_some();
        drop(ctx.rw_lock("rw").write().await?);
        Ok((taken, ctx.rw_lock("rw").try_read().await?.is_some()))
    });
    let test = TestEngine::new(&drops, 1).await.unwrap();
    assert_eq!(test.complete(&drops, 5).await.unwrap(), (true, true));
    let crashes = Crashes::of(|| drops.clone(), 3).run(async |outcome| {
        assert!(matches!(outcome.result, Ok((true, true))), "{:?}: {:?}", outcome.crash, outcome.result);
    });
    assert!(crashes.await > 10);
}

/// A semaphore is not a mutex, even with one permit: the branches of an execution hold it one after the other.
#[tokio::test]
async fn branches_take_turns_at_a_semaphore_of_one_permit() {
    let turns = workflow("turns").run(async |ctx: Ctx, ()| {
        let takes = async |ctx: Ctx, n: u64| {
            let guard = ctx.semaphore("one", 1).acquire().await?;
            ctx.sleep(SECOND).await?;
            guard.release().await?;
            Ok(n)
        };
        ctx.try_map(0..3, 3, takes).await
    });
    let test = TestEngine::new(&turns, 1).await.unwrap();
    let began = test.env().now();
    assert_eq!(test.complete(&turns, ()).await.unwrap(), [0, 1, 2]);
    assert!(test.env().now().0 - began.0 >= 3_000_000, "one at a time");
    let refused = test.engine().mutex("one").acquire().await.unwrap_err();
    assert_eq!(refused.to_string(), "lock \"one\" is a semaphore of one permit, but was requested as a mutex");
    let state = test.engine().locks().inspect("one").await.unwrap();
    assert_eq!(state.kind, LockKind::Semaphore { permits: 1 });
}

/// Requests the lock. Returns the number of executions in the reported deadlock, or 0 if the lock is granted.
fn kid() -> Workflow<(), usize> {
    workflow("kid").run(async |ctx: Ctx, ()| match ctx.mutex("held").acquire().await {
        Ok(_) => Ok(0),
        Err(failure) => match failure.get() {
            Some(LockRefused::Deadlock { cycle, .. }) => Ok(cycle.len()),
            _ => Err(failure),
        },
    })
}

/// Holds the lock, and waits for a child that requests it: at once, or after the child has waited for a long time.
fn dad(kid: Workflow<(), usize>) -> Workflow<u64, usize> {
    workflow("dad").run(move |ctx: Ctx, seconds: u64| {
        let kid = kid.clone();
        async move {
            let _held = ctx.mutex("held").acquire().await?;
            let kid = ctx.child(&kid, ()).start().await?;
            ctx.sleep(Duration::from_secs(seconds)).await?;
            kid.result().await
        }
    })
}

/// Makes a deadlock that is not found a test failure.
pub(crate) async fn within_an_hour<T>(test: &TestEngine, future: impl Future<Output = T>) -> T {
    let future = std::pin::pin!(future);
    match test.run(futures_util::future::select(future, test.env().sleep(3600 * SECOND))).await {
        futures_util::future::Either::Left((done, _)) => done,
        futures_util::future::Either::Right(_) => panic!("it still waits after an hour"),
    }
}

#[tokio::test]
async fn l8_a_parent_that_holds_what_its_child_wants_is_a_deadlock() {
    let kid = kid();
    let dad = dad(kid.clone());
    let grandpa = {
        let dad = workflow("between").run({
            let kid = kid.clone();
            move |ctx: Ctx, ()| {
                let kid = kid.clone();
                async move { ctx.child(&kid, ()).await }
            }
        });
        let between = dad.clone();
        let grandpa = workflow("grandpa").run(move |ctx: Ctx, ()| {
            let between = between.clone();
            async move {
                let _held = ctx.mutex("held").acquire().await?;
                ctx.child(&between, ()).await
            }
        });
        (dad, grandpa)
    };
    let build = || TestEngine::build(1).register(&kid).register(&dad).register(&grandpa.0).register(&grandpa.1);
    for seconds in [0, 3, 100] {
        let test = build().start().await.unwrap();
        let handle = test.engine().start(&dad, seconds).await.unwrap();
        assert_eq!(within_an_hour(&test, handle.result()).await.unwrap(), 2, "after {seconds} s");
    }
    let test = build().start().await.unwrap();
    let handle = test.engine().start(&grandpa.1, ()).await.unwrap();
    assert_eq!(within_an_hour(&test, handle.result()).await.unwrap(), 3);
    let crashes = Crashes::of(|| dad.clone(), 0).register(|| kid.clone()).run(async |outcome| {
        assert!(matches!(outcome.result, Ok(2)), "{:?}: {:?}", outcome.crash, outcome.result);
    });
    assert!(crashes.await > 5);
}

/// L8: one execution holds two of three permits and requests two more, behind an execution that holds nothing and
/// requests two. That is a cycle as soon as the second execution has nothing else to do.
#[tokio::test]
async fn l8_an_execution_that_holds_nothing_may_close_a_cycle() {
    let waits = workflow("waits").run(async |ctx: Ctx, ()| {
        let (_, taken) = ctx
            .join((
                async |ctx: Ctx| ctx.sleep(10 * SECOND).await,
                async |ctx: Ctx| ctx.semaphore("s", 3).acquire_many(2).await.map(drop),
            ))
            .await;
        taken
    });
    let wants = workflow("wants").run(async |ctx: Ctx, ()| {
        let _held = ctx.semaphore("s", 3).acquire_many(2).await?;
        ctx.sleep(3 * SECOND).await?;
        ctx.semaphore("s", 3).acquire_many(2).await.map(drop)
    });
    let test = TestEngine::build(1).register(&waits).register(&wants).start().await.unwrap();
    let wants = test.engine().start(&wants, ()).await.unwrap();
    test.run(test.env().sleep(SECOND)).await;
    let waits = test.engine().start(&waits, ()).await.unwrap();
    let ends = [within_an_hour(&test, waits.result()).await, within_an_hour(&test, wants.result()).await];
    let told = ends.iter().filter_map(|end| end.as_ref().err()).filter(|error| error.to_string().contains("never end"));
    assert_eq!(told.count(), 1, "{ends:?}");
}

/// After a shutdown, the directory of the engine can be opened at once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_directory_of_an_engine_that_was_shut_down_can_be_opened_at_once() {
    let directory = tempfile::tempdir().unwrap();
    let naps = workflow("naps").run(async |ctx: Ctx, ()| ctx.sleep(Duration::from_secs(3600)).await);
    for _ in 0..10 {
        let engine = Engine::open(directory.path()).register(&naps).start().await.unwrap();
        engine.start(&naps, ()).id("n").or_join().await.unwrap();
        engine.shutdown().await.unwrap();
    }
}

/// A program ends: after `shutdown`, no request has to wait for the end of a lease.
#[tokio::test]
async fn shutdown_releases_locks_that_are_held_or_whose_guards_were_dropped() {
    let store = Store::memory().await.unwrap();
    let first = Engine::on(&store).start().await.unwrap();
    let held = first.mutex("held").acquire().await.unwrap();
    let session = first.locks().session().await.unwrap();
    let other = first.semaphore("other", 2).by(&session).acquire_many(2).await.unwrap();
    drop(first.mutex("dropped").acquire().await.unwrap());
    first.shutdown().await.unwrap();
    assert!(held.is_lost() && other.is_lost());
    let second = Engine::on(&store).start().await.unwrap();
    for name in ["held", "dropped"] {
        assert!(second.mutex(name).try_acquire().await.unwrap().is_some(), "{name}");
    }
    assert!(second.semaphore("other", 2).try_acquire_many(2).await.unwrap().is_some());
}
