//! Locks that an operator releases by force while executions hold them: no further write under such a lock lands, and
//! the execution fails wherever it is. Each test stands for the race between a forced release and the holder's next
//! commit.

use std::sync::Arc;
use std::time::Duration;

use latchwork::lock::LockRefused;
use latchwork::testing::TestEngine;
use latchwork::workflow::{Ctx, Engine, Failure, Workflow, WorkflowError, workflow};
use tokio::sync::Semaphore;

use super::letting_go::within_an_hour;

const SECOND: Duration = Duration::from_secs(1);

/// Releases the lock of its holder by force, and acquires it for a session.
async fn taken_over(engine: &Engine) -> latchwork::lock::LockGuard {
    let state = engine.locks().inspect("m").await.unwrap();
    engine.locks().force_release("m", state.holders[0].token, "it is needed").await.unwrap();
    engine.mutex("m").try_acquire().await.unwrap().expect("no other request waits")
}

fn assert_forced<T: std::fmt::Debug>(ended: Result<T, WorkflowError>) {
    let WorkflowError::Failed { failure, .. } = ended.unwrap_err() else { panic!("it has failed") };
    assert!(
        matches!(failure.get(), Some(LockRefused::Forced { reason, .. }) if reason == "it is needed"),
        "{failure:?}"
    );
}

async fn count(engine: &Engine) -> Option<u64> {
    engine.states().global().slot::<u64>("count").get().await.unwrap()
}

/// A step under the lock, whose body continues when the test lets it; then a change of a slot under the lock.
fn guarded(gate: Arc<Semaphore>, pause: Duration) -> Workflow<(), u64> {
    workflow("guarded").run(move |ctx: Ctx, ()| {
        let gate = gate.clone();
        async move {
            let guard = ctx.mutex("m").acquire().await?;
            ctx.run("work", async || {
                gate.acquire().await.map_err(|_| Failure::new("closed"))?.forget();
                Ok(())
            })
            .await?;
            ctx.sleep(pause).await?;
            let count = ctx.state().global::<u64>("count").increment(1).await?.value;
            guard.release().await?;
            Ok(count)
        }
    })
}

/// The body of a step is running when the lock is released by force. Its result is not recorded, since another holder
/// may have the lock.
#[tokio::test]
async fn a_step_under_a_lock_that_was_taken_away_is_not_recorded() {
    let gate = Arc::new(Semaphore::new(0));
    let guarded = guarded(gate.clone(), Duration::ZERO);
    let test = TestEngine::new(&guarded, 1).await.unwrap();
    let engine = test.engine();
    let handle = engine.start(&guarded, ()).id("g").await.unwrap();
    test.run(test.env().sleep(SECOND)).await;
    let mine = taken_over(engine).await;
    gate.add_permits(1);
    assert_forced(within_an_hour(&test, handle.result()).await);
    assert_eq!(count(engine).await, None);
    assert!(!mine.is_lost() && mine.release().await.unwrap());
}

/// The execution is asleep and out of memory when its lock is released by force. The engine loads it, and its sleep
/// fails.
#[tokio::test]
async fn an_execution_that_sleeps_under_a_lock_that_was_taken_away_fails() {
    let guarded = guarded(Arc::new(Semaphore::new(1)), 1000 * SECOND);
    let test = TestEngine::new(&guarded, 1).await.unwrap();
    let engine = test.engine();
    let handle = engine.start(&guarded, ()).id("g").await.unwrap();
    test.run(test.env().sleep(10 * SECOND)).await;
    assert_eq!(engine.residents(), 0);
    let began = test.env().now();
    let mine = taken_over(engine).await;
    assert_forced(within_an_hour(&test, handle.result()).await);
    assert!(test.env().now() < began.plus(100 * SECOND), "it failed only after its sleep");
    assert_eq!(count(engine).await, None);
    assert!(!mine.is_lost() && mine.release().await.unwrap());
}

/// The failure ends with the guard: code that handles the failure can request the lock again, waits in the queue and
/// continues.
#[tokio::test]
async fn code_that_handles_a_forced_release_can_acquire_the_lock_again() {
    let again = workflow("again").run(async |ctx: Ctx, ()| {
        let within = async |ctx: &Ctx, pause: u32| {
            let guard = ctx.mutex("m").acquire().await?;
            ctx.sleep(pause * SECOND).await?;
            let changed = ctx.state().global::<u64>("count").increment(1).await?;
            guard.release().await?;
            Ok::<_, Failure>(changed.value)
        };
        match within(&ctx, 10).await {
            Err(failure) if matches!(failure.get(), Some(LockRefused::Forced { .. })) => within(&ctx, 1).await,
            other => other,
        }
    });
    let test = TestEngine::new(&again, 1).await.unwrap();
    let engine = test.engine();
    let handle = engine.start(&again, ()).id("a").await.unwrap();
    test.run(test.env().sleep(SECOND / 2)).await;
    let mine = taken_over(engine).await;
    test.run(test.env().sleep(100 * SECOND)).await;
    assert_eq!(engine.locks().inspect("m").await.unwrap().waiting, 1);
    assert_eq!(count(engine).await, None);
    mine.release().await.unwrap();
    assert_eq!(within_an_hour(&test, handle.result()).await.unwrap(), 1);
}

/// The code changes a slot under the lock and ignores failures: none of the changes lands.
#[tokio::test]
async fn no_slot_is_changed_under_a_lock_that_was_taken_away() {
    let stubborn = workflow("stubborn").run(async |ctx: Ctx, ()| {
        let _guard = ctx.mutex("m").acquire().await?;
        let _ = ctx.sleep(10 * SECOND).await;
        let slot = ctx.state().global::<u64>("count");
        let mut failed = 0;
        for _ in 0..3 {
            failed += u32::from(slot.increment(1).await.is_err());
        }
        Ok(failed)
    });
    let test = TestEngine::new(&stubborn, 1).await.unwrap();
    let engine = test.engine();
    let handle = engine.start(&stubborn, ()).id("s").await.unwrap();
    test.run(test.env().sleep(SECOND)).await;
    let mine = taken_over(engine).await;
    assert_eq!(within_an_hour(&test, handle.result()).await.unwrap(), 3);
    assert_eq!(count(engine).await, None);
    assert!(!mine.is_lost());
}
