//! Locks that an execution acquires several times, that it releases while it gives up or is cancelled, and locks that a
//! fork must acquire again.

use std::time::Duration;

use latchwork::lock::LockRefused;
use latchwork::testing::{Crashes, Side, TestEngine};
use latchwork::workflow::{Ctx, Engine, Failure, First2, First3, WaitsFor, Workflow, WorkflowError, workflow};

use super::letting_go::within_an_hour;
use super::turnstile::{Stage, tokens};

const SECOND: Duration = Duration::from_secs(1);

/// The branch that acquires the lock first loses the race. The other branch keeps the lock, even after the execution
/// was out of memory.
fn winner() -> Workflow<u64, bool> {
    workflow("winner").run(async |ctx: Ctx, nap: u64| {
        let first = ctx.select((
            async |ctx: Ctx| {
                let _first = ctx.mutex("m").reentrant().acquire().await?;
                ctx.sleep(1000 * SECOND).await
            },
            async |ctx: Ctx| {
                ctx.sleep(SECOND / 2).await?;
                let again = ctx.mutex("m").reentrant().acquire().await?;
                ctx.sleep(SECOND / 4).await?;
                Ok::<_, Failure>(again)
            },
        ));
        let First2::Second(again) = first.await else { return Err(Failure::new("the wrong one")) };
        let again = again?;
        ctx.sleep(Duration::from_secs(nap)).await?;
        again.release().await
    })
}

#[tokio::test]
async fn a_lock_that_the_winning_branch_acquired_again_stays_held() {
    let winner = winner();
    for nap in [0, 10] {
        let test = TestEngine::new(&winner, 1).await.unwrap();
        let handle = test.engine().start(&winner, nap).await.unwrap();
        assert!(within_an_hour(&test, handle.result()).await.unwrap(), "after {nap} s");
        assert_eq!(test.engine().locks().inspect("m").await.unwrap().used, 0);
    }
    let crashes = Crashes::of(|| winner.clone(), 10).run(async |outcome| {
        assert!(matches!(outcome.result, Ok(true)), "{:?}: {:?}", outcome.crash, outcome.result);
    });
    assert!(crashes.await > 5);
}

/// Runs the branch that releases beside the branch that acquires. `order` says which of them is the first branch.
async fn in_order<L, E>(
    ctx: &Ctx,
    order: u64,
    leaves: impl FnOnce(Ctx) -> L + Send,
    enters: impl FnOnce(Ctx) -> E + Send,
) -> Result<(bool, bool), Failure>
where
    L: Future<Output = Result<bool, Failure>> + Send,
    E: Future<Output = Result<bool, Failure>> + Send,
{
    if order & 1 == 0 {
        let (left, entered) = ctx.join((leaves, enters)).await;
        return Ok((left?, entered?));
    }
    let (entered, left) = ctx.join((enters, leaves)).await;
    Ok((left?, entered?))
}

/// Two branches: one releases the lock, by a release or a drop, and the other acquires it.
fn both(order: u64) -> Workflow<(), (bool, bool)> {
    workflow("both").run(move |ctx: Ctx, ()| async move {
        let leaves = async |ctx: Ctx| {
            let guard = ctx.mutex("m").reentrant().acquire().await?;
            ctx.receive::<()>("leave").await?;
            if order & 2 == 0 {
                return guard.release().await;
            }
            drop(guard);
            Ok(true)
        };
        let enters = async |ctx: Ctx| {
            ctx.receive::<()>("enter").await?;
            let guard = ctx.mutex("m").reentrant().acquire().await?;
            ctx.receive::<()>("end").await?;
            guard.release().await
        };
        in_order(&ctx, order, leaves, enters).await
    })
}

/// The commit of a request from outside is on its way when one branch releases the lock and the other acquires it.
#[tokio::test]
async fn a_branch_that_acquires_while_another_releases_holds_the_lock_or_waits() {
    for order in 0..4 {
        let both = both(order);
        let stage = Stage::new(|builder| builder.register(&both)).await;
        let handle = stage.engine.start(&both, ()).id("both").await.unwrap();
        stage.pass(SECOND / 10).await;
        stage.hold(Side::Before);
        let mutex = stage.engine.mutex("m");
        let other = stage.begins(async move { mutex.acquire().await }).await;
        for what in ["enter", "leave"] {
            stage.engine.signal("both", what, &()).await.unwrap();
            stage.turns().await;
        }
        stage.open();
        stage.pass(SECOND).await;
        let waits = stage.engine.why("both").await.unwrap().waits;
        let is_in = waits.iter().any(|wait| wait.what == WaitsFor::Signal("end".into()));
        assert_ne!(is_in, other.is_finished(), "order {order}: exactly one holds the lock, at {waits:?}");
        stage.engine.signal("both", "end", &()).await.unwrap();
        stage.pass(SECOND).await;
        drop(stage.done(other).await.unwrap());
        stage.pass(SECOND).await;
        let result = stage.begins(async move { handle.result().await }).await;
        assert_eq!(stage.done(result).await.unwrap(), (true, true), "order {order}");
        assert_eq!(tokens(&stage.state("m").await), (vec![], vec![]));
    }
}

/// Both branches act at the same moment, with a crash at every commit.
#[tokio::test]
async fn acquiring_and_releasing_at_one_moment_survives_crashes() {
    for order in 0..4u64 {
        let meets = workflow("meets").run(move |ctx: Ctx, ()| async move {
            let leaves = async |ctx: Ctx| {
                let guard = ctx.mutex("m").reentrant().acquire().await?;
                ctx.sleep(3 * SECOND).await?;
                if order & 2 == 0 {
                    return guard.release().await;
                }
                drop(guard);
                Ok(true)
            };
            let enters = async |ctx: Ctx| {
                ctx.sleep(3 * SECOND).await?;
                let guard = ctx.mutex("m").reentrant().acquire().await?;
                ctx.sleep(5 * SECOND).await?;
                guard.release().await
            };
            in_order(&ctx, order, leaves, enters).await
        });
        let test = TestEngine::new(&meets, 1).await.unwrap();
        let handle = test.engine().start(&meets, ()).await.unwrap();
        assert_eq!(within_an_hour(&test, handle.result()).await.unwrap(), (true, true), "order {order}");
        let crashes = Crashes::of(|| meets.clone(), ()).run(async |outcome| {
            assert!(matches!(outcome.result, Ok((true, true))), "{order} {:?}: {:?}", outcome.crash, outcome.result);
        });
        assert!(crashes.await > 5);
    }
}

/// A branch loses its race while its release waits behind a commit of another branch.
#[tokio::test]
async fn a_branch_that_loses_while_it_releases_holds_nothing() {
    for wants_again in [false, true] {
        let loses = workflow("loses").run(move |ctx: Ctx, ()| async move {
            let first = ctx.select((
                async |ctx: Ctx| {
                    let guard = ctx.mutex("m").acquire().await?;
                    ctx.receive::<()>("release").await?;
                    guard.release().await.map(drop)
                },
                async |ctx: Ctx| {
                    ctx.receive::<()>("commit").await?;
                    let _other = ctx.mutex("n").acquire().await?;
                    ctx.sleep(1000 * SECOND).await
                },
                async |ctx: Ctx| ctx.receive::<()>("win").await,
            ));
            let has_won = matches!(first.await, First3::Third(_));
            if wants_again {
                drop(ctx.mutex("m").acquire().await?);
            }
            ctx.receive::<()>("end").await?;
            Ok(has_won)
        });
        let stage = Stage::new(|builder| builder.register(&loses)).await;
        let handle = stage.engine.start(&loses, ()).id("loses").await.unwrap();
        stage.pass(SECOND / 10).await;
        stage.hold(Side::Before);
        for what in ["commit", "release", "win"] {
            stage.engine.signal("loses", what, &()).await.unwrap();
            stage.pass(SECOND / 10).await;
        }
        stage.open();
        stage.pass(10 * SECOND).await;
        for lock in ["m", "n"] {
            assert_eq!(tokens(&stage.state(lock).await), (vec![], vec![]), "{lock}, again: {wants_again}");
        }
        stage.engine.signal("loses", "end", &()).await.unwrap();
        let result = stage.begins(async move { handle.result().await }).await;
        assert!(stage.done(result).await.unwrap());
    }
}

/// The race: the execution is cancelled at the moment of the grant, another branch of it commits, and then the process
/// ends. The lock is not held if the journal says that it was not granted.
#[tokio::test]
async fn an_execution_cancelled_at_its_grant_holds_nothing_after_a_crash() {
    let cancelled = workflow("cancelled").run(async |ctx: Ctx, ()| {
        let beside = async |ctx: Ctx| {
            let told = ctx.receive::<()>("never").await;
            let ctx = ctx.shielded();
            ctx.sleep(SECOND / 2).await?;
            let _other = ctx.semaphore("n", 5).acquire().await?;
            ctx.sleep(10_000 * SECOND).await?;
            told
        };
        let waits = async |ctx: Ctx| {
            let told = ctx.mutex("m").acquire().await.map(drop);
            ctx.shielded().sleep(10_000 * SECOND).await?;
            told
        };
        let (beside, waits) = ctx.join((beside, waits)).await;
        beside.and(waits)
    });
    let stage = Stage::new(|builder| builder.register(&cancelled)).await;
    let held = stage.engine.mutex("m").acquire().await.unwrap();
    stage.engine.start(&cancelled, ()).id("c").await.unwrap();
    stage.pass(SECOND / 10).await;
    stage.hold(Side::Before);
    let _released = tokio::spawn(held.release());
    stage.pass(SECOND / 10).await;
    // The lane of the other lock is busy, too.
    stage.hold(Side::Before);
    let other = stage.engine.semaphore("n", 5);
    let _other = tokio::spawn(async move { other.acquire().await });
    stage.pass(SECOND / 10).await;
    let engine = stage.engine.clone();
    let _cancelled = tokio::spawn(async move { engine.cancel("c", "enough").await });
    stage.pass(SECOND / 10).await;
    stage.pass(SECOND).await;
    stage.open();
    stage.turns().await;
    stage.hold(Side::After);
    stage.open_next();
    stage.turns().await;
    let next = Engine::on(stage.engine.store()).register(&cancelled).start().await.unwrap();
    stage.pass(10 * SECOND).await;
    stage.pass(10 * SECOND).await;
    assert_eq!(tokens(&next.locks().inspect("m").await.unwrap()), (vec![], vec![]));
}

/// An operator releases the lock of a waiting execution by force. The operation that the execution waits in fails with
/// that.
#[tokio::test]
async fn a_wait_under_a_lock_that_was_taken_away_fails() {
    let twice = workflow("twice").run(async |ctx: Ctx, ()| {
        let first = ctx.mutex("m").acquire().await?;
        let again = ctx.mutex("m").reentrant().acquire().await?;
        assert_eq!(first.token().number(), again.token().number());
        ctx.receive::<()>("go").await?;
        Ok((again.release().await?, first.release().await?))
    });
    for is_forced in [false, true] {
        let test = TestEngine::new(&twice, 1).await.unwrap();
        let engine = test.engine();
        let handle = engine.start(&twice, ()).id("twice").await.unwrap();
        test.run(test.env().sleep(SECOND)).await;
        let state = engine.locks().inspect("m").await.unwrap();
        assert_eq!((state.holders.len(), state.used), (1, 1));
        if is_forced {
            engine.locks().force_release("m", state.holders[0].token, "it is needed").await.unwrap();
        }
        engine.signal("twice", "go", &()).await.unwrap();
        let ended = within_an_hour(&test, handle.result()).await;
        if is_forced {
            let WorkflowError::Failed { failure, .. } = ended.unwrap_err() else { panic!("it has failed") };
            assert!(matches!(failure.get(), Some(LockRefused::Forced { reason, .. }) if reason == "it is needed"));
        } else {
            assert_eq!(ended.unwrap(), (true, true));
        }
    }
}

/// A fork waits for each lock that its source held at the place, whether the source got it at once or after a wait. It
/// does not wait for a lock that the source had released.
#[tokio::test]
async fn a_fork_acquires_the_locks_that_its_source_held() {
    let source = workflow("source").run(async |ctx: Ctx, way: u64| {
        let held = match way {
            0 => ctx.mutex("m").try_acquire().await?,
            1 => ctx.mutex("m").acquire_within(5 * SECOND).await?,
            2 => {
                // The first of two guards is released, the second is held.
                let first = ctx.mutex("m").reentrant().acquire().await?;
                let again = ctx.mutex("m").reentrant().acquire().await?;
                first.release().await?;
                Some(again)
            }
            _ => {
                ctx.mutex("m").acquire().await?.release().await?;
                None
            }
        };
        if held.is_none() && way < 3 {
            ctx.run("another way", async || Ok(())).await?;
            return Ok(0);
        }
        ctx.run("a", async || Ok(())).await?;
        ctx.run("b", async || Ok(())).await?;
        Ok(1)
    });
    for way in 0..4 {
        let test = TestEngine::new(&source, 1).await.unwrap();
        let handle = test.engine().start(&source, way).id("source").await.unwrap();
        assert_eq!(within_an_hour(&test, handle.result()).await.unwrap(), 1);
        let held = test.engine().mutex("m").acquire().await.unwrap();
        let id = test.engine().fork("source").at_step("b").await.unwrap();
        test.run(test.env().sleep(60 * SECOND)).await;
        let waiting = test.engine().locks().inspect("m").await.unwrap().waiting;
        assert_eq!(waiting, u64::from(way < 3), "way {way}: {:?}", test.engine().why(&id).await.unwrap());
        assert!(held.release().await.unwrap());
        let fork = test.engine().handle(&source, &id);
        assert_eq!(within_an_hour(&test, fork.result()).await.unwrap(), 1, "way {way}");
    }
}
