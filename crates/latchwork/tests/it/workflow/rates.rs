//! Rate limits inside workflows and from outside: exact over crashes, in order, and given up by waits that are
//! cancelled.

use std::time::Duration;

use latchwork::store::Timestamp;
use latchwork::testing::{Crashes, TestEngine};
use latchwork::workflow::{Ctx, ExecutionState, Kind, RateLimitError, WaitsFor, Workflow, WorkflowError, workflow};

const SECOND: Duration = Duration::from_secs(1);

/// Acquires so often, two per ten seconds, and returns the times.
fn caller() -> Workflow<u32, Vec<u64>> {
    workflow("caller").run(async |ctx: Ctx, times: u32| {
        let limit = ctx.rate_limit("vendor", 2, 10 * SECOND);
        let mut seen = Vec::new();
        for _ in 0..times {
            limit.acquire().await?;
            seen.push(ctx.now().await.0);
        }
        Ok(seen)
    })
}

/// Checks that no window holds more than the burst and what was refilled meanwhile.
fn check_windows(mut times: Vec<u64>, max: u64, per: Duration) {
    times.sort_unstable();
    let interval = per.as_micros() as u64 / max;
    for (first, start) in times.iter().enumerate() {
        for (count, end) in times[first..].iter().enumerate().map(|(more, end)| (more as u64 + 1, end)) {
            let allowed = max + (end - start) / interval;
            assert!(count <= allowed, "{count} from {start} to {end}, where {allowed} are allowed: {times:?}");
        }
    }
}

#[tokio::test]
async fn a_burst_is_let_through_and_then_one_each_interval_out_of_memory() {
    let caller = caller();
    let test = TestEngine::new(&caller, 1).await.unwrap();
    let handle = test.engine().start(&caller, 5).id("c").await.unwrap();
    for _ in 0..500 {
        tokio::task::yield_now().await;
    }
    assert_eq!(test.engine().residents(), 0, "it waits out of memory");
    let why = test.engine().why("c").await.unwrap();
    assert_eq!(why.waits.iter().map(|wait| &wait.what).collect::<Vec<_>>(), [&WaitsFor::Timer]);
    let times = test.run(handle.result()).await.unwrap();
    let waited: Vec<u64> = times.iter().map(|time| (time - times[0]) / 1_000_000).collect();
    assert_eq!(waited, [0, 0, 5, 10, 15]);
    let history = test.history("c").await.unwrap();
    let taken = history.operations.iter().filter(|operation| operation.kind == Kind::Slot).count();
    assert_eq!(taken, 5, "one change of one slot each");
}

/// The process ends right before and right after each commit, also between the reservation and the wait. A replay that
/// acquires again would make the bucket full later; a replay that does not wait would exceed the rate.
#[tokio::test]
async fn a_crash_at_any_commit_takes_nothing_twice_and_lets_nothing_through_early() {
    let told = workflow("told").run(async |ctx: Ctx, times: u32| {
        let limit = ctx.rate_limit("vendor", 2, 10 * SECOND);
        let mut seen = Vec::new();
        for _ in 0..times {
            limit.acquire().await?;
            seen.push(ctx.now().await.0);
        }
        // The time when the bucket is full again shows how many tokens were taken.
        let bucket = ctx.state().global::<serde_json::Value>("rate:vendor").get().await?.unwrap_or_default();
        let full_us = bucket["full_ns"].as_u64().unwrap_or_default() / 1000;
        Ok((seen, full_us))
    });
    let crashes = Crashes::of(|| told.clone(), 5).run(async |outcome| {
        let (times, full_us) = outcome.result.as_ref().unwrap();
        check_windows(times.clone(), 2, 10 * SECOND);
        let taken = (full_us - times[0]).div_ceil(5_000_000);
        assert_eq!(taken, 5, "{:?}: the first at {}, full at {full_us}", outcome.crash, times[0]);
    });
    let crashes = crashes.await;
    assert!(crashes >= 16, "{crashes}");
}

/// Twenty executions and code from outside acquire at the same moment.
#[tokio::test]
async fn executions_and_code_outside_share_a_bucket_in_the_order_in_which_they_came() {
    let caller = caller();
    let test = TestEngine::new(&caller, 1).await.unwrap();
    let engine = test.engine().clone();
    let mut handles = Vec::new();
    for number in 0..20 {
        handles.push(engine.start(&caller, 1).id(format!("c{number:02}")).await.unwrap());
        for _ in 0..200 {
            tokio::task::yield_now().await;
        }
        if number == 9 {
            let outside = engine.rate_limit("vendor", 2, 10 * SECOND);
            assert!(!outside.try_acquire().await.unwrap(), "all of the burst is gone");
            let engine = engine.clone();
            tokio::spawn(async move { engine.rate_limit("vendor", 2, 10 * SECOND).acquire_many(2).await });
        }
    }
    let mut times = Vec::new();
    for handle in &handles {
        times.push(test.run(handle.result()).await.unwrap()[0]);
    }
    assert!(times.is_sorted(), "{times:?}");
    check_windows(times.clone(), 2, 10 * SECOND);
    let seconds = |from: usize, to: usize| (times[to] - times[from]) / 1_000_000;
    assert_eq!((seconds(8, 9), seconds(9, 10), seconds(10, 11)), (5, 15, 5), "two from outside are in between");
}

#[tokio::test]
async fn each_scope_has_a_bucket_of_its_own() {
    let scoped = workflow("scoped").run(async |ctx: Ctx, ()| {
        let limit = || ctx.rate_limit("vendor", 1, 10 * SECOND);
        let mut got = Vec::new();
        for limit in [limit(), limit().of_workflow(), limit().of_tree(), limit()] {
            got.push(limit.try_acquire().await?);
        }
        ctx.sleep(2 * SECOND).await?;
        Ok(got)
    });
    let test = TestEngine::new(&scoped, 1).await.unwrap();
    assert_eq!(test.complete(&scoped, ()).await.unwrap(), [true, true, true, false]);
    let engine = test.engine();
    let limit = || engine.rate_limit("vendor", 1, 10 * SECOND);
    assert!(!limit().try_acquire().await.unwrap());
    assert!(!limit().of_workflow("scoped").try_acquire().await.unwrap());
    assert!(limit().of_workflow("other").try_acquire().await.unwrap());
    assert!(limit().of_tree("another").try_acquire().await.unwrap());
}

/// A replay long after: an acquire that was refused then is refused again, though there is room by now.
#[tokio::test]
async fn a_refused_acquire_is_the_same_on_every_replay() {
    let tries = workflow("tries").run(async |ctx: Ctx, ()| {
        let limit = ctx.rate_limit("vendor", 1, SECOND);
        let first = (limit.try_acquire().await?, limit.try_acquire().await?);
        ctx.sleep(3600 * SECOND).await?;
        Ok((first, limit.try_acquire().await?))
    });
    let crashes = Crashes::of(|| tries.clone(), ()).run(async |outcome| {
        let ((first, _), last) = outcome.result.as_ref().unwrap();
        assert!(*first && *last, "{outcome:?}");
    });
    assert!(crashes.await >= 8);
    let test = TestEngine::new(&tries, 1).await.unwrap();
    assert_eq!(test.complete(&tries, ()).await.unwrap(), ((true, false), true));
}

#[tokio::test]
async fn a_wait_that_is_cancelled_fails_and_a_cancelled_execution_takes_nothing() {
    let waits = workflow("waits").run(async |ctx: Ctx, ()| {
        let limit = ctx.rate_limit("vendor", 1, 3600 * SECOND);
        limit.acquire().await?;
        let failed = limit.acquire().await.unwrap_err();
        assert!(failed.is_cancelled(), "{failed:?}");
        // The execution is cancelled by now, so the call does not reach the bucket.
        let again = limit.try_acquire().await.unwrap_err();
        assert!(again.is_cancelled(), "{again:?}");
        ctx.shielded().sleep(3 * SECOND).await?;
        Err::<(), _>(failed)
    });
    let test = TestEngine::new(&waits, 1).await.unwrap();
    let handle = test.engine().start(&waits, ()).id("w").await.unwrap();
    for _ in 0..500 {
        tokio::task::yield_now().await;
    }
    handle.cancel("enough").await.unwrap();
    let ended = test.run(handle.result()).await;
    assert!(matches!(ended, Err(WorkflowError::Cancelled { .. })), "{ended:?}");
    let history = test.history("w").await.unwrap();
    let changes = history.operations.iter().filter(|operation| operation.kind == Kind::Slot).count();
    assert_eq!((changes, history.state), (2, ExecutionState::Cancelled("enough".into())));
}

/// The time of day is set back while callers wait: no caller is let through early.
#[tokio::test]
async fn a_clock_that_is_set_back_lets_nothing_through() {
    let one = workflow("one").run(async |ctx: Ctx, ()| ctx.rate_limit("vendor", 1, 10 * SECOND).try_acquire().await);
    let test = TestEngine::new(&one, 1).await.unwrap();
    test.set_time(Timestamp(1_000_000_000_000));
    assert!(test.complete(&one, ()).await.unwrap());
    test.set_time(Timestamp(900_000_000_000));
    assert!(!test.complete(&one, ()).await.unwrap());
    test.set_time(Timestamp(1_000_010_000_000));
    assert!(test.complete(&one, ()).await.unwrap());
}

#[tokio::test]
async fn an_impossible_rate_is_a_typed_failure() {
    let wrong = workflow("wrong").run(async |ctx: Ctx, (name, max, millis, count): (String, u32, u64, u32)| {
        let limit = ctx.rate_limit(&name, max, Duration::from_millis(millis));
        let refused = limit.try_acquire_many(count).await.unwrap_err();
        if name != "taken" {
            assert_eq!(refused.code(), "latchwork.rate_limit");
            assert_eq!(refused.get::<RateLimitError>().unwrap().to_string(), refused.message());
            assert!(!refused.is_retryable());
        }
        limit.acquire_many(count).await
    });
    let test = TestEngine::new(&wrong, 1).await.unwrap();
    for (name, max, millis, count, why) in [
        ("v", 0, 1000, 1, "allows no acquisition"),
        ("v", 1, 0, 1, "has a period of 0ns"),
        ("v", 1, u64::MAX, 1, "at most 100 years"),
        ("v", 3, 1000, 4, "4 cannot be acquired at once from rate limit \"v\", only 1 to 3"),
        ("v", 3, 1000, 0, "0 cannot be acquired at once"),
        ("", 3, 1000, 1, "must have 1 to 256 bytes"),
        (&"n".repeat(257), 3, 1000, 1, "must have 1 to 256 bytes"),
    ] {
        match test.complete(&wrong, (name.into(), max, millis, count)).await {
            Err(WorkflowError::Failed { failure, .. }) => assert!(failure.message().contains(why), "{failure:?}"),
            other => panic!("{why}: {other:?}"),
        }
        let outside = test.engine().rate_limit(name, max, Duration::from_millis(millis));
        match outside.try_acquire_many(count).await {
            Err(WorkflowError::RateLimit(error)) => assert!(error.to_string().contains(why), "{error}"),
            other => panic!("{why}: {other:?}"),
        }
    }
    let slot = test.engine().states().global().slot::<String>("rate:taken");
    slot.set("something else".into()).await.unwrap();
    let failed = test.complete(&wrong, ("taken".into(), 1, 1000, 1)).await;
    assert!(matches!(failed, Err(WorkflowError::Failed { .. })), "{failed:?}");
}

/// A tree shares one bucket, also with code outside that names its root; another tree has its own.
#[tokio::test]
async fn executions_of_a_tree_share_its_bucket() {
    let child = workflow("child")
        .run(async |ctx: Ctx, ()| ctx.rate_limit("vendor", 2, 100 * SECOND).of_tree().try_acquire().await);
    let root = {
        let child = child.clone();
        workflow("root").run(move |ctx: Ctx, ()| {
            let child = child.clone();
            async move {
                let own = ctx.rate_limit("vendor", 2, 100 * SECOND).of_tree().try_acquire().await?;
                Ok((own, ctx.child(&child, ()).await?, ctx.child(&child, ()).await?))
            }
        })
    };
    let test = TestEngine::build(1).register(&root).register(&child).start().await.unwrap();
    let engine = test.engine();
    let outside = |id: &str| engine.rate_limit("vendor", 2, 100 * SECOND).of_tree(id);
    assert!(outside("b").try_acquire().await.unwrap());
    for (id, expected) in [("a", (true, true, false)), ("b", (true, false, false))] {
        let handle = engine.start(&root, ()).id(id).await.unwrap();
        assert_eq!(test.run(handle.result()).await.unwrap(), expected, "{id}");
        assert!(!outside(id).try_acquire().await.unwrap(), "{id}");
    }
}

/// Each call waits for its time, and the time of day may be set meanwhile.
#[tokio::test]
async fn code_outside_waits_for_its_time() {
    let test = TestEngine::build(1).start().await.unwrap();
    let limit = test.engine().rate_limit("vendor", 2, 10 * SECOND);
    let began = test.env().now().0;
    let mut waited = Vec::new();
    for count in [1, 1, 1, 2, 1] {
        test.run(limit.acquire_many(count)).await.unwrap();
        waited.push((test.env().now().0 - began) / 1_000_000);
    }
    assert_eq!(waited, [0, 0, 5, 15, 20]);
}
