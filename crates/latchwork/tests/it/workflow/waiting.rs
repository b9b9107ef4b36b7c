//! Waiting: sleeps, deadlines, and values that are chosen once.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use latchwork::store::Timestamp;
use latchwork::testing::TestEngine;
use latchwork::workflow::{Ctx, Failure, WorkflowError, workflow};
use tokio::sync::Semaphore;

#[tokio::test]
async fn sleeps_end_when_they_are_due_and_long_ones_leave_memory() {
    let sleeper = workflow("sleeper").run(async |ctx: Ctx, ms: u64| {
        let before = ctx.now().await;
        ctx.sleep(Duration::from_millis(ms)).await?;
        let after = ctx.run("after", async || Ok(())).await.map(|()| ctx.clone())?.now().await;
        Ok(after.0 - before.0)
    });
    let test = TestEngine::new(&sleeper, 1).await.unwrap();
    for ms in [0, 1, 999, 1_001, 60_000, 86_400_000] {
        assert_eq!(test.complete(&sleeper, ms).await.unwrap(), ms * 1000, "exactly when due");
    }
    assert_eq!(test.engine().residents(), 0);
    let handle = test.engine().start(&sleeper, 3_600_000).await.unwrap();
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert_eq!(test.engine().residents(), 0, "it is asleep on disk");
    assert_eq!(test.run(handle.result()).await.unwrap(), 3_600_000_000);
}

#[tokio::test]
async fn many_timers_in_any_order_fire_in_the_order_they_are_due() {
    let sleeper = workflow("sleeper").run(async |ctx: Ctx, seconds: u64| {
        ctx.sleep(Duration::from_secs(seconds)).await?;
        ctx.run("woke", async || Ok(())).await?;
        Ok(ctx.now().await.0)
    });
    let test = TestEngine::new(&sleeper, 1).await.unwrap();
    let began = test.env().now();
    let mut handles = Vec::new();
    for n in 0..500u64 {
        let seconds = 2 + (n * 7919) % 1000;
        handles.push((seconds, test.engine().start(&sleeper, seconds).await.unwrap()));
    }
    for (seconds, handle) in handles {
        assert_eq!(test.run(handle.result()).await.unwrap(), began.0 + seconds * 1_000_000);
    }
}

/// All timers at once: all executions wake in that second, and none before its time.
#[tokio::test]
async fn a_hundred_thousand_timers_are_due_in_the_same_second() {
    const SLEEPERS: u64 = 100_000;
    let woken = Arc::new(AtomicU64::new(0));
    let counted = woken.clone();
    let sleeper = workflow("sleeper").run(move |ctx: Ctx, until: u64| {
        let woken = counted.clone();
        async move {
            ctx.sleep_until(Timestamp(until)).await?;
            woken.fetch_add(1, Ordering::SeqCst);
            Ok(ctx.now().await.0 >= until)
        }
    });
    let test = TestEngine::new(&sleeper, 1).await.unwrap();
    let noon = test.env().now().0 + 3_600_000_000;
    let mut ids = Vec::new();
    for number in 0..SLEEPERS {
        let until = noon + number * 7919 % 1_000_000;
        ids.push(test.engine().start(&sleeper, until).await.unwrap().id().clone());
    }
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    assert_eq!((test.engine().residents(), woken.load(Ordering::SeqCst)), (0, 0));
    let to_noon = Duration::from_micros(noon - test.env().now().0);
    test.run(test.env().sleep(to_noon - Duration::from_micros(1))).await;
    assert_eq!(woken.load(Ordering::SeqCst), 0, "none before its time");
    for id in ids {
        assert!(test.run(test.engine().handle(&sleeper, &id).result()).await.unwrap());
    }
    assert_eq!(woken.load(Ordering::SeqCst), SLEEPERS);
    let late = test.env().now().0 - noon;
    assert!(late <= 1_000_000, "the last was there {late} µs after noon");
}

/// The timer task sleeps until the first timer is due, by a clock that is never set. If the time of day is set forward
/// meanwhile, close to that timer or past it, the task sleeps too long. A timer that is set after the jump must still
/// be on time.
#[tokio::test]
async fn a_timer_that_is_set_after_time_has_jumped_ahead_is_not_overslept() {
    let sleeper = workflow("sleeper").run(async |ctx: Ctx, seconds: u64| {
        ctx.sleep(Duration::from_secs(seconds)).await?;
        Ok(())
    });
    for jump in [490, 600, 100_000] {
        let test = TestEngine::new(&sleeper, 1).await.unwrap();
        let first = test.engine().start(&sleeper, 500).await.unwrap();
        test.run(test.env().sleep(Duration::from_secs(1))).await;
        test.set_time(test.env().now().plus(Duration::from_secs(jump)));
        let began = test.env().monotonic();
        let second = test.engine().start(&sleeper, 20).await.unwrap();
        test.run(second.result()).await.unwrap();
        assert_eq!(test.env().monotonic() - began, Duration::from_secs(20), "after {jump} s");
        test.run(first.result()).await.unwrap();
        assert_eq!(test.env().monotonic() - began, Duration::from_secs(20), "the first was due before");
    }
}

/// The reverse: a timer that is set after the time of day was set back is due before timers that have already fired.
#[tokio::test]
async fn a_timer_that_is_set_after_time_has_gone_back_is_not_overlooked() {
    let sleeper = workflow("sleeper").run(async |ctx: Ctx, seconds: u64| {
        ctx.sleep(Duration::from_secs(seconds)).await?;
        Ok(())
    });
    let test = TestEngine::new(&sleeper, 1).await.unwrap();
    test.complete(&sleeper, 5000).await.unwrap();
    let last = test.engine().start(&sleeper, 30).await.unwrap();
    test.run(test.env().sleep(Duration::from_secs(1))).await;
    test.set_time(test.env().now().minus(Duration::from_secs(1000)));
    let began = test.env().monotonic();
    // By either clock, the timer task wakes before this timer is due.
    let early = test.engine().start(&sleeper, 60).await.unwrap();
    test.run(early.result()).await.unwrap();
    assert_eq!(test.env().monotonic() - began, Duration::from_secs(60));
    test.run(last.result()).await.unwrap();
}

#[tokio::test]
async fn an_execution_that_takes_too_long_is_timed_out_awake_or_asleep() {
    let slow = workflow("slow").timeout(Duration::from_secs(100)).run(async |ctx: Ctx, asleep: bool| {
        if asleep {
            ctx.sleep(Duration::from_secs(1000)).await?;
        } else {
            ctx.run("stuck", async || std::future::pending::<Result<(), Failure>>().await).await?;
        }
        Ok(())
    });
    for asleep in [false, true] {
        let test = TestEngine::new(&slow, 1).await.unwrap();
        let began = test.env().now();
        let ended = test.complete(&slow, asleep).await;
        assert!(matches!(ended, Err(WorkflowError::TimedOut { .. })), "{ended:?}");
        assert_eq!(test.env().now().0 - began.0, 100_000_000);
    }
}

#[tokio::test]
async fn a_value_that_is_chosen_once_stays() {
    let chooser = workflow("chooser").run(async |ctx: Ctx, ()| {
        let first = (ctx.now().await.0, ctx.uuid().await.to_string(), ctx.random().await);
        let other = (ctx.now().await.0, ctx.uuid().await.to_string(), ctx.random().await);
        // The execution leaves memory and is loaded again: everything above is replayed.
        ctx.sleep(Duration::from_secs(60)).await?;
        let recorded = ctx.run("look", async || Ok(first.clone())).await?;
        Ok((recorded == first, first.1 != other.1, first.2 != other.2, ctx.version("change", 1..=3).await))
    });
    let test = TestEngine::new(&chooser, 1).await.unwrap();
    assert_eq!(test.complete(&chooser, ()).await.unwrap(), (true, true, true, 3));
}

/// What is asked of an execution is asked of all its runs.
#[tokio::test]
async fn an_execution_that_is_to_be_cancelled_still_is_after_it_has_continued_as_new() {
    let (begun, goes_on) = (Arc::new(Semaphore::new(0)), Arc::new(Semaphore::new(0)));
    let gates = (begun.clone(), goes_on.clone());
    let anew = workflow("anew").run(move |ctx: Ctx, run: u32| {
        let (begun, goes_on) = gates.clone();
        async move {
            if run > 0 {
                ctx.sleep(Duration::from_secs(3600)).await?;
                return Ok(run);
            }
            let clean_up = async || {
                begun.add_permits(1);
                goes_on.acquire().await.unwrap().forget();
                Ok::<_, Failure>(())
            };
            ctx.shielded().run("clean up", clean_up).await?;
            ctx.shielded().continue_as_new(1).await
        }
    });
    let test = TestEngine::new(&anew, 1).await.unwrap();
    let handle = test.engine().start(&anew, 0).id("a").await.unwrap();
    begun.acquire().await.unwrap().forget();
    test.engine().cancel("a", "enough").await.unwrap();
    goes_on.add_permits(1);
    let result = test.run(handle.result()).await;
    assert!(matches!(&result, Err(WorkflowError::Cancelled { reason, .. }) if reason == "enough"), "{result:?}");
}
