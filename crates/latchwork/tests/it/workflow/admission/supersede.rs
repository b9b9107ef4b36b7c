//! Starts that supersede another execution of the same id.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use latchwork::store::Order;
use latchwork::testing::{Crashes, TestEngine};
use latchwork::workflow::{
    Ctx, Engine, ExecutionState, Failure, Queue, Retry, Supersede, Workflow, WorkflowBuilder, WorkflowError, workflow,
};

use super::{settle, used};

/// Waits for a signal; if it is cancelled, it takes ten seconds to clean up. Counts in a slot of its own.
fn report(builder: WorkflowBuilder) -> Workflow<u32, (u32, u64, String)> {
    builder.run(async |ctx: Ctx, n: u32| {
        let count = ctx.state().execution::<u64>("count").increment(1).await?.value;
        match ctx.receive::<String>("end").await {
            Ok(told) => Ok((n, count, told)),
            Err(failure) => {
                let cleaning = ctx.shielded();
                cleaning.sleep(Duration::from_secs(10)).await?;
                Err(failure)
            }
        }
    })
}

#[tokio::test]
async fn a_start_cancels_the_running_execution_and_follows_it() {
    let report = report(workflow("import").concurrency(1));
    let test = TestEngine::new(&report, 1).await.unwrap();
    let engine = test.engine();
    let first = engine.start(&report, 1).id("r").await.unwrap();
    engine.signal("r", "other", &"for the first").await.unwrap();
    settle().await;
    let second = engine.start(&report, 2).id("r").supersede(Supersede::Cancel).await.unwrap();
    assert_eq!(used(engine, None).await, (1, 0), "the permit passes to the second");
    // The first execution cleans up, and its callers get the error.
    let began = test.env().now();
    let ended = test.run(first.result()).await;
    assert!(
        matches!(&ended, Err(WorkflowError::Cancelled { reason, .. }) if reason.contains("taken its place")),
        "{ended:?}"
    );
    assert!(test.env().now().0 - began.0 >= 10_000_000);
    settle().await;
    assert_eq!(used(engine, None).await, (1, 0), "the second holds it");
    assert!(matches!(engine.start(&report, 9).await, Err(WorkflowError::LimitReached { .. })));
    engine.signal("r", "end", &"second").await.unwrap();
    assert_eq!(test.run(second.result()).await.unwrap(), (2, 1, "second".into()), "its slots are its own");
    assert_eq!(used(engine, None).await, (0, 0));
    // An execution that has ended is replaced, too; if there is none, the start is a plain start.
    let third = engine.start(&report, 3).id("r").supersede(Supersede::Cancel).await.unwrap();
    settle().await;
    engine.signal("r", "end", &"third").await.unwrap();
    assert_eq!(test.run(third.result()).await.unwrap().0, 3);
    engine.start(&report, 4).id("new").supersede(Supersede::Terminate).await.unwrap();
}

#[tokio::test]
async fn a_start_terminates_the_execution_that_runs_waits_or_is_parked() {
    let report = report(workflow("import"));
    let parks = workflow("parks").run(async |_: Ctx, n: u32| if n == 1 { panic!("it panics") } else { Ok(n) });
    let test = TestEngine::build(1).register(&report).register(&parks).start().await.unwrap();
    let engine = test.engine();
    let first = engine.start(&report, 1).id("r").await.unwrap();
    let waits = tokio::spawn(async move { first.result().await });
    settle().await;
    let began = test.env().now();
    let second = engine.start(&report, 2).id("r").supersede(Supersede::Terminate).await.unwrap();
    let ended = waits.await.unwrap().unwrap_err().to_string();
    assert!(ended.contains("it was terminated: another start has taken its place"), "{ended}");
    assert!(test.env().now().0 - began.0 < 10_000_000, "nothing was cleaned up");
    // The execution is out of memory by now.
    let waits = tokio::spawn(async move { second.result().await });
    test.run(test.env().sleep(Duration::from_secs(100))).await;
    let third = engine.start(&report, 3).id("r").supersede(Supersede::Terminate).await.unwrap();
    assert!(waits.await.unwrap().is_err());
    settle().await;
    engine.signal("r", "end", &"x").await.unwrap();
    assert_eq!(test.run(third.result()).await.unwrap(), (3, 1, "x".into()));
    engine.start(&parks, 1).id("p").await.unwrap();
    settle().await;
    assert_eq!(engine.parked().await.unwrap().len(), 1);
    let unparked = engine.start(&parks, 2).id("p").supersede(Supersede::Terminate).await.unwrap();
    assert_eq!(test.run(unparked.result()).await.unwrap(), 2);
}

/// The last start wins, and the callers of all others get the error.
#[tokio::test]
async fn a_start_replaces_an_earlier_start_that_waits_to_supersede() {
    let report = report(workflow("import"));
    let test = TestEngine::new(&report, 1).await.unwrap();
    let engine = test.engine();
    engine.start(&report, 1).id("r").await.unwrap();
    settle().await;
    for n in 2..=4 {
        engine.start(&report, n).id("r").supersede(Supersede::Cancel).await.unwrap();
        settle().await;
    }
    test.run(test.env().sleep(Duration::from_secs(20))).await;
    engine.signal("r", "end", &"x").await.unwrap();
    let handle = engine.handle(&report, "r");
    assert_eq!(test.run(handle.result()).await.unwrap().0, 4);
}

/// None of its code has run, so it gets the new input at its position in the queue.
#[tokio::test]
async fn a_queued_execution_that_is_superseded_keeps_its_position() {
    let report = report(workflow("import").concurrency(1).when_full(Queue::new()));
    let test = TestEngine::new(&report, 1).await.unwrap();
    let engine = test.engine();
    for (n, id) in [(1, "a"), (2, "b"), (3, "c")] {
        engine.start(&report, n).id(id).await.unwrap();
    }
    for how in [Supersede::Cancel, Supersede::Terminate] {
        engine.start(&report, 20).id("b").supersede(how).await.unwrap();
        assert_eq!(used(engine, None).await, (1, 2), "{how:?}");
    }
    for id in ["a", "b"] {
        engine.signal(id, "end", &"x").await.unwrap();
    }
    assert_eq!(test.run(engine.handle(&report, "b").result()).await.unwrap().0, 20);
    assert_eq!(used(engine, None).await, (1, 0));
}

#[tokio::test]
async fn a_start_that_cannot_supersede_is_refused() {
    let report = report(workflow("import").concurrency_by(1, |n: &u32| (n % 2).to_string()));
    let other = workflow("other").run(async |ctx: Ctx, n: u32| ctx.receive::<u32>("x").await.map(|x| x + n));
    let test = TestEngine::build(1).register(&report).register(&other).start().await.unwrap();
    let engine = test.engine();
    engine.start(&report, 1).id("r").await.unwrap();
    let start = |n| engine.start(&report, n).id("r").supersede(Supersede::Cancel);
    assert!(matches!(start(2).await, Err(WorkflowError::Start { .. })), "another key");
    assert!(matches!(start(3).idempotency_key("k").await, Err(WorkflowError::Start { .. })));
    assert!(matches!(start(3).or_join().await, Err(WorkflowError::Start { .. })));
    let taken = engine.start(&other, 1).id("r").supersede(Supersede::Terminate).await;
    assert!(matches!(taken, Err(WorkflowError::OtherWorkflow { .. })), "{taken:?}");
    start(3).await.unwrap();
}

/// Before and after each commit: in the end the second execution has replaced the first, once.
#[tokio::test]
async fn no_crash_leaves_both_or_none() {
    for how in [Supersede::Cancel, Supersede::Terminate] {
        let report: Workflow<u32, u32> = workflow("report").concurrency(1).run(async |ctx: Ctx, n: u32| {
            let often = Retry::exponential().max_attempts(100);
            ctx.run("begin", async || Ok(())).retry(often.clone()).await?;
            if n == 1 {
                ctx.receive::<()>("never").await?;
            }
            ctx.run("end", async || Ok(n)).retry(often).await
        });
        let second = report.clone();
        let drives = workflow("drives").run(async |ctx: Ctx, (): ()| {
            let n: u32 = ctx.receive("done").await?;
            Ok(n)
        });
        let crashes = Crashes::of(|| drives.clone(), ()).register(|| report.clone()).outside(move |engine| {
            let report = second.clone();
            async move {
                let first = engine.start(&report, 1).id("r").or_join().await;
                if first.is_err() {
                    return;
                }
                // A caller that got no answer asks again: the second execution supersedes itself.
                if engine.start(&report, 2).id("r").supersede(how).await.is_err() {
                    return;
                }
                // Callers of a superseded execution get an error.
                let mut result = engine.handle(&report, "r").result().await;
                for _ in 0..10 {
                    if let Err(WorkflowError::Cancelled { .. } | WorkflowError::Failed { .. }) = result {
                        result = engine.handle(&report, "r").result().await;
                    }
                }
                let is_lost = matches!(result, Err(WorkflowError::Cancelled { .. } | WorkflowError::Failed { .. }));
                assert!(!is_lost, "{result:?}");
                if let Ok(n) = result {
                    let _ = engine.signal("execution", "done", &n).id("done").await;
                }
            }
        });
        let mut ended = 0;
        let crashes = crashes.run(async |outcome| {
            assert_eq!(outcome.result.as_ref().ok(), Some(&2), "{how:?} {:?}", outcome.crash);
            ended += 1;
        });
        assert_eq!(crashes.await, ended);
        assert!(ended >= 10, "{ended}");
    }
}

/// The old execution continues as new again and again, also while it cleans up. The mark moves to each new run, and the
/// new execution replaces the last run. The process ends right before and right after each of these commits.
#[tokio::test]
async fn an_execution_that_continues_as_new_is_still_superseded() {
    for how in [Supersede::Cancel, Supersede::Terminate] {
        let report: Workflow<u32, u32> = workflow("import").concurrency(1).run(async |ctx: Ctx, n: u32| {
            let often = Retry::exponential().max_attempts(100);
            ctx.run("begin", async || Ok(())).retry(often.clone()).await?;
            match n {
                2 => ctx.run("end", async || Ok(n)).retry(often).await,
                // It cleans up in three further runs.
                10..13 => {
                    let cleans = ctx.shielded();
                    cleans.run("clean", async || Ok(())).retry(often).await?;
                    cleans.continue_as_new(n + 1).await
                }
                13 => Err(Failure::new("it has cleaned up")),
                _ => match ctx.sleep(Duration::from_millis(100)).await {
                    Ok(()) => ctx.continue_as_new(1).await,
                    Err(_) => ctx.shielded().continue_as_new(10).await,
                },
            }
        });
        let second = report.clone();
        let drives = workflow("drives").run(async |ctx: Ctx, (): ()| ctx.receive::<(u32, u64)>("done").await);
        let crashes = Crashes::of(|| drives.clone(), ()).register(|| report.clone()).outside(move |engine| {
            let report = second.clone();
            async move {
                // If the second execution has already ended in an earlier process, there is nothing more to do.
                let is_second = |n: &u32| *n == 2;
                let known = engine.describe("r").await.ok().and_then(|it| match it.state {
                    ExecutionState::Completed(n) => n.as_u64(),
                    _ => None,
                });
                if known.is_none() {
                    if engine.start(&report, 1).id("r").or_join().await.is_err() {
                        return;
                    }
                    engine.store().env().sleep(Duration::from_millis(250)).await;
                    if engine.start(&report, 2).id("r").supersede(how).await.is_err() {
                        return;
                    }
                }
                let mut result = engine.handle(&report, "r").result().await;
                for _ in 0..10 {
                    if !result.as_ref().is_ok_and(is_second) {
                        result = engine.handle(&report, "r").result().await;
                    }
                }
                let Ok(n) = result else { return };
                let Ok(left) = engine.limit_use("import", None).await else { return };
                let _ = engine.signal("execution", "done", &(n, left.used + left.waiting)).id("done").await;
            }
        });
        let mut ended = 0;
        let crashes = crashes.run(async |outcome| {
            assert_eq!(outcome.result.as_ref().ok(), Some(&(2, 0)), "{how:?} {:?}", outcome.crash);
            ended += 1;
        });
        assert_eq!(crashes.await, ended);
        assert!(ended >= 30, "{ended}");
    }
}

/// True if the first record of another execution is kept beside this one, as it is while this one is marked.
async fn is_marked(engine: &Engine, id: &str) -> bool {
    let spaces = engine.store().spaces().await.unwrap();
    let kept = spaces.into_iter().find(|space| space.name() == "workflow.kept").unwrap();
    let found = engine.store().view().await.unwrap().scan(&kept.all(), Order::Ascending, 1000).await.unwrap();
    found.iter().any(|(key, _)| key.bytes().windows(id.len()).any(|bytes| bytes == id.as_bytes()))
}

/// The process also ends between the commit that marks the old execution and the commit that ends it. The start is not
/// sent again: the next engine ends the old execution by itself.
#[tokio::test]
async fn a_marked_execution_is_ended_by_the_next_engine() {
    const ID: &str = "superseded one";
    let stands = workflow("import").concurrency(1).run(async |ctx: Ctx, n: u32| {
        // The body of a step keeps the execution in memory.
        let stays = ctx.run("stay", async || if n == 1 { std::future::pending().await } else { Ok(n) });
        stays.retry(Retry::exponential().max_attempts(100)).await
    });
    let (second, seen) = (stands.clone(), Arc::new(AtomicU32::new(0)));
    let marked = seen.clone();
    let drives = workflow("drives").run(async |ctx: Ctx, (): ()| ctx.receive::<bool>("done").await);
    let crashes = Crashes::of(|| drives.clone(), ()).register(|| stands.clone()).outside(move |engine| {
        let (stands, marked) = (second.clone(), marked.clone());
        async move {
            let was_marked = is_marked(&engine, ID).await;
            let sent = engine.states().global().slot::<bool>("sent");
            if !sent.get().await.is_ok_and(|sent| sent == Some(true)) {
                let started = engine.start(&stands, 1).id(ID).or_join().await;
                if started.is_err() || sent.set(true).await.is_err() {
                    return;
                }
                let _ = engine.start(&stands, 2).id(ID).supersede(Supersede::Terminate).await;
            }
            engine.store().env().sleep(Duration::from_secs(100)).await;
            let Ok(it) = engine.describe(ID).await else { return };
            let is_second = it.state == ExecutionState::Completed(2.into());
            marked.fetch_add(u32::from(was_marked), Ordering::SeqCst);
            let _ = engine.signal("execution", "done", &(is_second || !was_marked)).id("done").await;
        }
    });
    crashes.run(async |outcome| assert_eq!(outcome.result.as_ref().ok(), Some(&true), "{:?}", outcome.crash)).await;
    assert!(seen.load(Ordering::SeqCst) >= 2, "it is marked after one crash and before another");
}

/// The slots of its tree would otherwise be those of the superseded root.
#[tokio::test]
async fn nothing_is_left_of_the_tree_of_a_superseded_execution() {
    for how in [Supersede::Cancel, Supersede::Terminate] {
        let root = workflow("import").run(async |ctx: Ctx, n: u64| {
            let sum = ctx.state().tree::<u64>("sum").increment(n).await?.value;
            ctx.receive::<()>("end").await?;
            Ok(sum)
        });
        let test = TestEngine::new(&root, 1).await.unwrap();
        let engine = test.engine();
        engine.start(&root, 1).id("r").await.unwrap();
        settle().await;
        engine.start(&root, 10).id("r").supersede(how).await.unwrap();
        test.run(test.env().sleep(Duration::from_secs(5))).await;
        engine.signal("r", "end", &()).await.unwrap();
        assert_eq!(test.run(engine.handle(&root, "r").result()).await.unwrap(), 10, "{how:?}");
    }
}

/// A parked execution runs no code, so it has no cleanup to wait for: it is cancelled, and the other execution follows
/// at once.
#[tokio::test]
async fn a_parked_execution_is_cancelled_at_once() {
    let parks = workflow("import").concurrency(1).run(async |ctx: Ctx, n: u32| {
        let count = ctx.state().execution::<u32>("count").increment(1).await?.value;
        assert!(n > 1, "it is not repaired");
        Ok(n * 10 + count)
    });
    let test = TestEngine::new(&parks, 1).await.unwrap();
    let engine = test.engine();
    let first = engine.start(&parks, 1).id("p").await.unwrap();
    let waits = tokio::spawn(async move { first.result_through_parks().await });
    settle().await;
    assert_eq!(engine.parked().await.unwrap().len(), 1);
    let second = engine.start(&parks, 2).id("p").supersede(Supersede::Cancel).await.unwrap();
    let told = test.run(waits).await.unwrap();
    assert!(matches!(&told, Err(WorkflowError::Cancelled { reason, .. }) if reason.contains("its place")), "{told:?}");
    assert_eq!(test.run(second.result()).await.unwrap(), 21, "with slots of its own");
    assert_eq!((engine.parked().await.unwrap(), used(engine, None).await), (vec![], (0, 0)));
    // The process ends right before and right after each commit.
    let (second, drives) = (parks.clone(), workflow("drives"));
    let drives = drives.run(async |ctx: Ctx, (): ()| ctx.receive::<(u32, u64)>("done").await);
    let crashes = Crashes::of(|| drives.clone(), ()).register(|| parks.clone()).outside(move |engine| {
        let parks = second.clone();
        async move {
            if engine.start(&parks, 1).id("p").or_join().await.is_err() {
                return;
            }
            while engine.parked().await.is_ok_and(|parked| parked.is_empty())
                && engine.describe("p").await.is_ok_and(|it| !matches!(it.state, ExecutionState::Completed(_)))
            {
                tokio::task::yield_now().await;
            }
            if engine.start(&parks, 2).id("p").supersede(Supersede::Cancel).await.is_err() {
                return;
            }
            let Ok(n) = engine.handle(&parks, "p").result().await else { return };
            let Ok(left) = engine.limit_use("import", None).await else { return };
            let _ = engine.signal("execution", "done", &(n, left.used)).id("done").await;
        }
    });
    let crashes =
        crashes.run(async |outcome| assert_eq!(outcome.result.as_ref().ok(), Some(&(21, 0)), "{:?}", outcome.crash));
    assert!(crashes.await >= 6);
}
