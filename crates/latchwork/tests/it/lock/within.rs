//! Locks inside workflows, each under a crash at every commit and on its own.

use std::time::Duration;

use latchwork::lock::{LockName, LockRefused};
use latchwork::testing::{Crashes, TestEngine, crash_everywhere};
use latchwork::workflow::{
    Ctx, Engine, ExecutionFilter, ExecutionState, Failure, First2, Retry, WaitsFor, Workflow, WorkflowError, workflow,
};

const HOUR: Duration = Duration::from_secs(3600);

fn often() -> Retry {
    Retry::exponential().max_attempts(100)
}

/// Holds a mutex while it reads and writes a value that no other execution may change meanwhile.
fn careful() -> Workflow<u32, u64> {
    workflow("careful").run(async |ctx: Ctx, pause: u32| {
        let guard = ctx.mutex("m").acquire().await?;
        let busy = ctx.state().global::<u32>("busy");
        let before = busy.update(|busy| busy.unwrap_or(0) + 1).await?.value;
        assert_eq!(before, 1, "two hold the mutex");
        ctx.run("work", async || Ok(())).retry(often()).await?;
        ctx.sleep(Duration::from_secs(pause.into())).await?;
        busy.update(|busy| busy.unwrap_or(0) - 1).await?;
        let token = guard.token().number();
        guard.release().await?;
        Ok(token)
    })
}

#[tokio::test]
async fn executions_take_turns_in_the_order_in_which_they_came() {
    let careful = careful();
    let test = TestEngine::new(&careful, 1).await.unwrap();
    let engine = test.engine();
    let mut handles = Vec::new();
    for number in 0..10 {
        handles.push(engine.start(&careful, 5).id(format!("c{number}")).await.unwrap());
        test.run(test.env().sleep(Duration::from_millis(10))).await;
    }
    // All executions are out of memory, and one of them holds the mutex.
    test.run(test.env().sleep(Duration::from_secs(3))).await;
    assert_eq!(engine.residents(), 0);
    let why = engine.why("c3").await.unwrap();
    assert_eq!(why.waits[0].what, WaitsFor::Lock("m".into()));
    let mut last = 0;
    for handle in handles {
        let token = test.run(handle.result()).await.unwrap();
        assert!(token > last);
        last = token;
    }
}

#[tokio::test]
async fn a_crash_at_any_commit_loses_no_lock_and_grants_none_twice() {
    let careful = careful();
    let crashes = Crashes::of(|| careful.clone(), 1).outside({
        let careful = careful.clone();
        move |engine: Engine| {
            let careful = careful.clone();
            async move {
                for number in 0..2 {
                    let _ = engine.start(&careful, 2).id(format!("other{number}")).or_join().await;
                }
            }
        }
    });
    let crashes = crashes.run(async |outcome| {
        assert!(outcome.result.is_ok(), "{:?}: {:?}", outcome.crash, outcome.result);
    });
    assert!(crashes.await >= 10);
}

#[tokio::test]
async fn a_wait_for_a_lock_can_have_a_time_limit() {
    let waits = workflow("waits").run(async |ctx: Ctx, ()| {
        let at_once = ctx.mutex("m").try_acquire().await?.is_some();
        let in_time = ctx.mutex("m").acquire_within(HOUR).await?.is_some();
        let longer = ctx.mutex("m").acquire_within(10 * HOUR).await?;
        Ok((at_once, in_time, longer.is_some()))
    });
    let test = TestEngine::new(&waits, 1).await.unwrap();
    let engine = test.engine();
    let held = engine.mutex("m").acquire().await.unwrap();
    let handle = engine.start(&waits, ()).id("w").await.unwrap();
    test.run(test.env().sleep(2 * HOUR)).await;
    held.release().await.unwrap();
    assert_eq!(test.run(handle.result()).await.unwrap(), (false, false, true));
    let state = engine.locks().inspect("m").await.unwrap();
    assert!(state.holders.is_empty() && state.waiters.is_empty(), "{state:?}");
}

#[tokio::test]
async fn a_limit_and_a_grant_at_the_same_time_under_crashes() {
    let waits = workflow("waits").run(async |ctx: Ctx, ()| {
        let guard = ctx.mutex("m").acquire_within(Duration::from_secs(2)).await?;
        let got = guard.is_some();
        ctx.run("work", async || Ok(())).retry(often()).await?;
        Ok(got)
    });
    let crashes = Crashes::of(|| waits.clone(), ()).outside(async |engine: Engine| {
        if let Ok(Some(held)) = engine.mutex("m").try_acquire().await {
            engine.store().env().sleep(Duration::from_secs(2)).await;
            let _ = held.release().await;
        }
    });
    crashes.run(async |outcome| assert!(outcome.result.is_ok(), "{:?}: {:?}", outcome.crash, outcome.result)).await;
}

#[tokio::test]
async fn a_cancelled_execution_leaves_the_queue_and_releases_what_it_holds() {
    let waits = workflow("waits").run(async |ctx: Ctx, ()| {
        let _first = ctx.mutex("first").acquire().await?;
        let _second = ctx.mutex("second").acquire().await?;
        Ok(())
    });
    let test = TestEngine::new(&waits, 1).await.unwrap();
    let engine = test.engine();
    let held = engine.mutex("second").acquire().await.unwrap();
    for (number, terminates) in [(0, false), (1, true)] {
        let id = format!("w{number}");
        let handle = engine.start(&waits, ()).id(id.clone()).await.unwrap();
        test.run(test.env().sleep(HOUR)).await;
        assert!(engine.mutex("first").try_acquire().await.unwrap().is_none());
        if terminates { engine.terminate(&*id, "enough").await } else { engine.cancel(&*id, "enough").await }.unwrap();
        let result = test.run(handle.result()).await;
        assert!(matches!(result, Err(WorkflowError::Cancelled { .. } | WorkflowError::Failed { .. })), "{result:?}");
        let state = engine.locks().inspect("second").await.unwrap();
        assert_eq!((state.holders.len(), state.waiters.len()), (1, 0));
        assert!(engine.locks().inspect("first").await.unwrap().holders.is_empty());
    }
    held.release().await.unwrap();
}

#[tokio::test]
async fn a_branch_that_loses_a_race_holds_nothing_and_waits_for_nothing() {
    let races = workflow("races").run(async |ctx: Ctx, ()| {
        let raced = ctx
            .select((
                async |ctx: Ctx| {
                    let _held = ctx.mutex("free").acquire().await?;
                    ctx.mutex("taken").acquire().await?.release().await
                },
                async |ctx: Ctx| ctx.sleep(Duration::from_secs(30)).await,
            ))
            .await;
        let is_late = matches!(raced, First2::Second(_));
        ctx.run("after", async || Ok(())).retry(often()).await?;
        // If the lock were still held, this would be refused or would wait forever.
        ctx.mutex("free").acquire().await?.release().await?;
        Ok(is_late)
    });
    let crashes = Crashes::of(|| races.clone(), ()).outside(async |engine: Engine| {
        let Ok(held) = engine.mutex("taken").acquire().await else { return };
        engine.store().env().sleep(HOUR).await;
        drop(held);
    });
    let crashes = crashes.run(async |outcome| {
        assert!(outcome.result.is_ok(), "{:?}: {:?}", outcome.crash, outcome.result);
    });
    assert!(crashes.await >= 5);
}

#[tokio::test]
async fn the_same_execution_may_hold_a_mutex_twice_only_if_it_says_so() {
    let nests = workflow("nests").run(async |ctx: Ctx, says_so: bool| {
        let outer = ctx.mutex("m").acquire().await?;
        let mutex = ctx.mutex("m");
        let mutex = if says_so { mutex.reentrant() } else { mutex };
        let inner = mutex.acquire().await?;
        let is_same = inner.token() == outer.token();
        inner.release().await?;
        ctx.sleep(Duration::from_secs(10)).await?;
        outer.release().await?;
        Ok(is_same)
    });
    crash_everywhere(
        || nests.clone(),
        true,
        async |outcome| assert!(outcome.result.as_ref().unwrap(), "{:?}", outcome.crash),
    )
    .await;
    let test = TestEngine::new(&nests, 1).await.unwrap();
    let handle = test.engine().start(&nests, false).id("n").await.unwrap();
    let Err(WorkflowError::Failed { failure, .. }) = test.run(handle.result()).await else { panic!("it may") };
    assert!(matches!(failure.get::<LockRefused>(), Some(LockRefused::AlreadyHeld { .. })), "{failure}");
    // With a reentrant lock, the mutex is held until its last guard is gone.
    let handle = test.engine().start(&nests, true).id("n2").await.unwrap();
    test.run(test.env().sleep(Duration::from_secs(5))).await;
    assert!(test.engine().mutex("m").try_acquire().await.unwrap().is_none());
    assert!(test.run(handle.result()).await.unwrap());
    test.engine().mutex("m").try_acquire().await.unwrap().unwrap().release().await.unwrap();
}

#[tokio::test]
async fn names_are_shared_by_all_executions_or_by_a_workflow_or_a_tree() {
    let child = workflow("child").run(async |ctx: Ctx, ()| {
        let tree = ctx.mutex("m").of_tree().try_acquire().await?.is_some();
        let workflow = ctx.mutex("m").of_workflow().try_acquire().await?.is_some();
        let all = ctx.mutex("m").try_acquire().await?.is_some();
        Ok((tree, workflow, all))
    });
    let parent = workflow("parent").run({
        let child = child.clone();
        move |ctx: Ctx, id: String| {
            let child = child.clone();
            async move {
                let held = (
                    ctx.mutex("m").of_tree().acquire().await?,
                    ctx.mutex("m").of_workflow().try_acquire().await?,
                    ctx.mutex("m").try_acquire().await?,
                );
                let seen = ctx.child(&child, ()).id(format!("{id}-child")).await?;
                ctx.sleep(HOUR).await?;
                drop(held);
                Ok(seen)
            }
        }
    });
    let test = TestEngine::build(1).register(&child).register(&parent).start().await.unwrap();
    let engine = test.engine();
    let a = engine.start(&parent, "a".into()).id("a").await.unwrap();
    test.run(test.env().sleep(Duration::from_secs(60))).await;
    // The first parent holds all three locks. A child can acquire only the lock of its own workflow.
    let b = engine.start(&parent, "b".into()).id("b").await.unwrap();
    assert_eq!(test.run(a.result()).await.unwrap(), (false, true, false));
    assert_eq!(test.run(b.result()).await.unwrap(), (false, true, false));
    assert!(engine.mutex(LockName::of_tree("a", "m")).try_acquire().await.unwrap().is_some());
}

#[tokio::test]
async fn an_execution_that_continues_as_new_or_fails_holds_nothing() {
    let again = workflow("again").run(async |ctx: Ctx, round: u32| {
        let _guard = ctx.mutex("m").acquire().await?;
        match round {
            0 => ctx.continue_as_new(1).await,
            1 => Err::<(), _>(Failure::new("it has failed")),
            _ => Ok(()),
        }
    });
    let crashes = crash_everywhere(
        || again.clone(),
        0,
        async |outcome| {
            let Err(WorkflowError::Failed { failure, .. }) = &outcome.result else { panic!("{:?}", outcome.result) };
            assert!(failure.to_string().contains("it has failed"), "{:?}: {failure}", outcome.crash);
        },
    );
    crashes.await;
    let test = TestEngine::new(&again, 1).await.unwrap();
    let handle = test.engine().start(&again, 0).id("a").await.unwrap();
    assert!(test.run(handle.result()).await.is_err());
    test.engine().mutex("m").try_acquire().await.unwrap().unwrap().release().await.unwrap();
}

#[tokio::test]
async fn a_fork_acquires_what_the_source_held() {
    let holds = workflow("holds").run(async |ctx: Ctx, ()| {
        ctx.mutex("before").acquire().await?.release().await?;
        let guard = ctx.mutex("m").acquire().await?;
        ctx.run("work", async || Ok(())).await?;
        Ok(guard.token().number())
    });
    let test = TestEngine::new(&holds, 1).await.unwrap();
    let engine = test.engine();
    let token = test.complete(&holds, ()).await.unwrap();
    let id = engine.list(ExecutionFilter::new()).await.unwrap().items[0].id.clone();
    let held = engine.mutex("m").acquire().await.unwrap();
    let fork = engine.fork(id).at_step("work").await.unwrap();
    test.run(test.env().sleep(HOUR)).await;
    let why = engine.why(&fork).await.unwrap();
    assert_eq!((why.state, why.waits[0].what.clone()), (ExecutionState::Waiting, WaitsFor::Lock("m".into())));
    held.release().await.unwrap();
    let handle = engine.handle(&holds, fork);
    assert!(test.run(handle.result()).await.unwrap() > token);
}

#[tokio::test]
async fn the_commit_that_terminates_an_execution_grants_its_lock_to_the_next() {
    let holds = workflow("holds").run(async |ctx: Ctx, nap: u64| {
        let _guard = ctx.semaphore("s", 2).acquire_many(2).await?;
        ctx.sleep(Duration::from_secs(nap)).await?;
        Ok(ctx.now().await.0)
    });
    let test = TestEngine::new(&holds, 1).await.unwrap();
    let engine = test.engine();
    engine.start(&holds, 100_000).id("first").await.unwrap();
    test.run(test.env().sleep(Duration::from_secs(5))).await;
    let second = engine.start(&holds, 1).id("second").await.unwrap();
    test.run(test.env().sleep(Duration::from_secs(60))).await;
    let before = engine.store().generation().await.unwrap();
    engine.terminate("first", "stuck").await.unwrap();
    let state = engine.locks().inspect("s").await.unwrap();
    assert_eq!(state.holders[0].owner.to_string(), "execution second");
    assert!(engine.store().generation().await.unwrap().0 <= before.0 + 2);
    test.run(second.result()).await.unwrap();
}
