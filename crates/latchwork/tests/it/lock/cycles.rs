//! Deadlocks on locks with many holders or waiters: a cycle is found however long the queue is.

use std::time::Duration;

use latchwork::lock::LockRefused;
use latchwork::testing::TestEngine;
use latchwork::workflow::{Ctx, Failure, Handle, Workflow, WorkflowError, workflow};

use crate::lock::letting_go::within_an_hour;

const SECOND: Duration = Duration::from_secs(1);

/// How the workflows below acquire the lock that many requests compete for.
#[derive(Clone, Copy)]
enum Takes {
    Mutex,
    Read,
    Permits(u32),
}

const PERMITS: u32 = 1002;

async fn take(ctx: &Ctx, takes: Takes) -> Result<Box<dyn Send>, Failure> {
    Ok(match takes {
        Takes::Mutex => Box::new(ctx.mutex("crowded").acquire().await?),
        Takes::Read => Box::new(ctx.rw_lock("crowded").read().await?),
        Takes::Permits(count) => Box::new(ctx.semaphore("crowded", PERMITS).acquire_many(count).await?),
    })
}

/// Holds the crowded lock, and requests the other lock after 100 seconds.
fn first(takes: Takes) -> Workflow<(), ()> {
    workflow("first").run(move |ctx: Ctx, ()| async move {
        let _crowded = take(&ctx, takes).await?;
        ctx.sleep(100 * SECOND).await?;
        ctx.mutex("other").acquire().await.map(drop)
    })
}

/// Holds the other lock, and requests the crowded lock after 10 seconds.
fn second(takes: Takes) -> Workflow<(), ()> {
    workflow("second").run(move |ctx: Ctx, ()| async move {
        let _other = ctx.mutex("other").acquire().await?;
        ctx.sleep(10 * SECOND).await?;
        take(&ctx, takes).await.map(drop)
    })
}

/// Exactly one of the two executions fails with the deadlock, so the other one can finish.
async fn one_is_told(test: &TestEngine, handles: [Handle<()>; 2]) {
    let mut told = 0;
    for handle in handles {
        match within_an_hour(test, handle.result()).await {
            Ok(()) => {}
            Err(WorkflowError::Failed { failure, .. }) => {
                assert!(matches!(failure.get(), Some(LockRefused::Deadlock { .. })), "{failure}");
                told += 1;
            }
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(told, 1);
}

/// L8: seventy requests for a mutex wait before the request that closes the cycle.
#[tokio::test]
async fn l8_a_cycle_behind_seventy_waiters_is_found() {
    let waits = workflow("waits").run(async |ctx: Ctx, ()| ctx.mutex("crowded").acquire().await.map(drop));
    a_cycle_behind(&waits, Takes::Mutex).await;
}

/// L8: seventy write requests wait before a read request. A reader makes the first of these writers wait.
#[tokio::test]
async fn l8_a_cycle_through_one_of_seventy_writers_is_found() {
    let waits = workflow("waits").run(async |ctx: Ctx, ()| ctx.rw_lock("crowded").write().await.map(drop));
    a_cycle_behind(&waits, Takes::Read).await;
}

async fn a_cycle_behind(waits: &Workflow<(), ()>, takes: Takes) {
    let (first, second) = (first(takes), second(takes));
    let test = TestEngine::build(1).register(waits).register(&first).register(&second).start().await.unwrap();
    let handles = [test.engine().start(&first, ()).await.unwrap(), test.engine().start(&second, ()).await.unwrap()];
    test.run(test.env().sleep(SECOND)).await;
    for _ in 0..70 {
        test.engine().start(waits, ()).await.unwrap();
    }
    one_is_told(&test, handles).await;
}

/// L8: a semaphore has so many holders that the search does not look at all of them. The cycle is found after most of
/// them have released it.
#[tokio::test]
async fn l8_a_cycle_on_a_lock_with_too_many_holders_is_found_later() {
    let (first, second) = (first(Takes::Permits(1)), second(Takes::Permits(PERMITS)));
    let test = TestEngine::build(1).register(&first).register(&second).start().await.unwrap();
    let handles = [test.engine().start(&first, ()).await.unwrap(), test.engine().start(&second, ()).await.unwrap()];
    let semaphore = test.engine().semaphore("crowded", PERMITS);
    test.run(test.env().sleep(SECOND)).await;
    let mut held = Vec::new();
    for _ in 1..PERMITS {
        held.push(test.run(semaphore.acquire()).await.unwrap());
    }
    test.run(test.env().sleep(200 * SECOND)).await;
    for guard in held {
        test.run(guard.release()).await.unwrap();
    }
    one_is_told(&test, handles).await;
}
