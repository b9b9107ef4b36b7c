//! Children, guards and contexts that are passed into branches and out of them: each use is recorded in the branch that
//! makes it, and replayed there.

use std::time::Duration;

use latchwork::testing::{Crashes, TestEngine};
use latchwork::workflow::{Ctx, Failure, First2, Workflow, workflow};

use super::namesakes::kid;
use crate::lock::letting_go::within_an_hour;

const SECOND: Duration = Duration::from_secs(1);

/// A child, a lock and the context itself are used after the branch that they come from has ended: each use is recorded
/// where it happens, and replayed there.
#[tokio::test]
async fn what_is_taken_out_of_a_branch_can_be_used_outside() {
    let dad = workflow("dad").run(async |ctx: Ctx, ()| {
        let begins = async |ctx: Ctx| ctx.child(&kid(), (7, 3)).start().await;
        let takes = async |ctx: Ctx| {
            let inner = async |ctx: Ctx| Ok((ctx.mutex("m").acquire().await?, ctx));
            let (taken, slept) = ctx.join((inner, async |ctx: Ctx| ctx.sleep(SECOND).await)).await;
            slept?;
            taken
        };
        let (begun, taken) = ctx.try_join((begins, takes)).await?;
        let (guard, inner) = taken;
        let number = begun.result().await?;
        inner.sleep(2 * SECOND).await?;
        let more = inner.run("more", async || Ok(1)).await?;
        ctx.sleep(2 * SECOND).await?;
        Ok((number + more, guard.release().await?))
    });
    let test = TestEngine::build(1).register(&kid()).register(&dad).start().await.unwrap();
    let handle = test.engine().start(&dad, ()).await.unwrap();
    assert_eq!(within_an_hour(&test, handle.result()).await.unwrap(), (8, true));
    let crashes = Crashes::of(|| dad.clone(), ()).register(kid).run(async |outcome| {
        assert!(matches!(outcome.result, Ok((8, true))), "{:?}: {:?}", outcome.crash, outcome.result);
    });
    assert!(crashes.await > 10);
}

/// Waits for a child with a time limit: the handle is used in a branch, beside a branch that sleeps.
fn at_most() -> Workflow<u64, Option<u64>> {
    workflow("at most").run(async |ctx: Ctx, limit: u64| {
        let child = ctx.child(&kid(), (7, 3)).start().await?;
        let first = ctx.select((
            async |_: Ctx| child.result().await,
            async |ctx: Ctx| ctx.sleep(Duration::from_secs(limit)).await,
        ));
        let number = match first.await {
            First2::First(number) => Some(number?),
            First2::Second(slept) => slept.map(|()| None)?,
        };
        ctx.sleep(SECOND).await?;
        Ok(number)
    })
}

#[tokio::test]
async fn a_child_is_waited_for_in_a_branch() {
    for (limit, expected) in [(10, Some(7)), (2, None)] {
        let test = TestEngine::build(1).register(&kid()).register(&at_most()).start().await.unwrap();
        let handle = test.engine().start(&at_most(), limit).await.unwrap();
        assert_eq!(within_an_hour(&test, handle.result()).await.unwrap(), expected);
        let crashes = Crashes::of(at_most, limit).register(kid).run(async |outcome| {
            assert!(matches!(&outcome.result, Ok(it) if *it == expected), "{:?}: {:?}", outcome.crash, outcome.result);
        });
        assert!(crashes.await > 5);
    }
}

/// Guards from outside of branches: one is released in a branch, one is dropped with a branch that loses, and one
/// stays.
fn guards() -> Workflow<(), (bool, bool)> {
    workflow("guards").run(async |ctx: Ctx, ()| {
        let (a, b, c) =
            (ctx.mutex("a").acquire().await?, ctx.mutex("b").acquire().await?, ctx.mutex("c").acquire().await?);
        let (released, slept) = ctx
            .join((
                async |ctx: Ctx| {
                    ctx.sleep(SECOND).await?;
                    a.release().await
                },
                async |ctx: Ctx| ctx.sleep(3 * SECOND).await,
            ))
            .await;
        slept?;
        let first = ctx.select((
            async |ctx: Ctx| {
                ctx.sleep(100 * SECOND).await?;
                b.release().await.map(drop)
            },
            async |ctx: Ctx| ctx.sleep(SECOND).await,
        ));
        let First2::Second(Ok(())) = first.await else { return Err(Failure::new("the wrong one")) };
        ctx.sleep(3 * SECOND).await?;
        // Both locks are free again.
        drop((ctx.mutex("a").acquire().await?, ctx.mutex("b").acquire().await?));
        Ok((released?, c.release().await?))
    })
}

#[tokio::test]
async fn a_guard_is_released_in_a_branch() {
    let test = TestEngine::new(&guards(), 1).await.unwrap();
    let handle = test.engine().start(&guards(), ()).await.unwrap();
    assert_eq!(within_an_hour(&test, handle.result()).await.unwrap(), (true, true));
    let crashes = Crashes::of(guards, ()).run(async |outcome| {
        assert!(matches!(outcome.result, Ok((true, true))), "{:?}: {:?}", outcome.crash, outcome.result);
    });
    assert!(crashes.await > 10);
}

/// Only the outer context is used, in branches of branches, and in a task that polls them in turn.
fn outer() -> Workflow<(), Vec<u64>> {
    workflow("outer").run(async |ctx: Ctx, ()| {
        let outer = &ctx;
        let number = async |name: &str, number: u64| {
            outer.sleep(SECOND * number as u32).await?;
            outer.run(name, async || Ok(number)).await
        };
        let (a, (b, c)) = outer
            .try_join((
                async |_: Ctx| number("a", 3).await,
                async |_: Ctx| {
                    let both =
                        outer.try_join((async |_: Ctx| number("b", 2).await, async |_: Ctx| number("c", 1).await));
                    let both = both.await?;
                    number("d", 1).await?;
                    Ok(both)
                },
            ))
            .await?;
        let mut numbers = outer.try_map(4..8, 2, async |_: Ctx, it| number("e", it).await).await?;
        numbers.extend([a, b, c, number("f", 8).await?]);
        Ok(numbers)
    })
}

#[tokio::test]
async fn a_branch_may_use_the_context_around_it() {
    let expected = vec![4, 5, 6, 7, 3, 2, 1, 8];
    let test = TestEngine::new(&outer(), 1).await.unwrap();
    let handle = test.engine().start(&outer(), ()).await.unwrap();
    assert_eq!(within_an_hour(&test, handle.result()).await.unwrap(), expected);
    let crashes = Crashes::of(outer, ()).run(async |outcome| {
        assert_eq!(outcome.result.as_ref().ok(), Some(&expected), "{:?}: {:?}", outcome.crash, outcome.result);
    });
    assert!(crashes.await > 10);
}

/// An operation is begun in a branch that loses, and awaited further outside: a replay would find it elsewhere.
#[tokio::test]
async fn an_operation_that_changes_its_branch_parks_the_execution() {
    let moves = workflow("moves").run(async |ctx: Ctx, ()| {
        let mut receives = Box::pin(ctx.receive::<u64>("s").into_future());
        let first = {
            let receives = &mut receives;
            ctx.select((async move |_: Ctx| receives.await, async |ctx: Ctx| ctx.run("quick", async || Ok(())).await))
                .await
        };
        if let First2::First(number) = first {
            return number;
        }
        receives.await
    });
    let test = TestEngine::new(&moves, 1).await.unwrap();
    let error = test.complete(&moves, ()).await.unwrap_err().to_string();
    assert!(error.contains("begun in one branch and awaited on in another"), "{error}");
}
