//! Children of one id, one after the other: each has its own end. And time limits that hold whatever comes meanwhile.

use std::time::Duration;

use latchwork::testing::{Side, TestEngine};
use latchwork::workflow::{ChildTimedOut, Close, Ctx, Workflow, WorkflowError, workflow};

use crate::lock::letting_go::within_an_hour;
use crate::lock::turnstile::Stage;

const SECOND: Duration = Duration::from_secs(1);

/// Is removed soon after its end, so that another execution may have its id.
pub(super) fn kid() -> Workflow<(u64, u64), u64> {
    workflow("kid").keep(SECOND).run(async |ctx: Ctx, (number, nap): (u64, u64)| {
        ctx.sleep(Duration::from_secs(nap)).await?;
        Ok(number)
    })
}

#[tokio::test]
async fn a_child_has_its_own_result_and_not_that_of_an_earlier_child() {
    let dad = workflow("dad").run(async |ctx: Ctx, (is_new_run, round): (bool, u64)| {
        if round == 0 {
            ctx.child(&kid(), (1, 1)).id("kid").start().await?;
            ctx.sleep(10 * SECOND).await?;
            if is_new_run {
                return ctx.continue_as_new((is_new_run, 1)).await;
            }
        }
        ctx.child(&kid(), (2, 1)).id("kid").await
    });
    for is_new_run in [false, true] {
        let test = TestEngine::build(1).register(&kid()).register(&dad).start().await.unwrap();
        let handle = test.engine().start(&dad, (is_new_run, 0)).await.unwrap();
        assert_eq!(within_an_hour(&test, handle.result()).await.unwrap(), 2, "in a new run: {is_new_run}");
    }
}

#[tokio::test]
async fn the_end_of_a_parent_waits_for_the_child_that_is_there() {
    let dad = workflow("dad").run(async |ctx: Ctx, ()| {
        ctx.child(&kid(), (1, 1)).id("kid").close(Close::Await).start().await?;
        ctx.sleep(10 * SECOND).await?;
        ctx.child(&kid(), (2, 100)).id("kid").close(Close::Await).start().await?;
        Ok(())
    });
    let test = TestEngine::build(1).register(&kid()).register(&dad).start().await.unwrap();
    let (handle, began) = (test.engine().start(&dad, ()).await.unwrap(), test.env().now());
    within_an_hour(&test, handle.result()).await.unwrap();
    assert!(test.env().now().0 - began.0 >= 110_000_000);
}

/// An execution was terminated, and its child ends after another execution has taken the parent's id.
#[tokio::test]
async fn an_execution_is_not_notified_of_children_of_an_earlier_execution_of_its_id() {
    let dad = workflow("dad").run(async |ctx: Ctx, number: u64| {
        if number == 2 {
            ctx.sleep(30 * SECOND).await?;
        }
        ctx.child(&kid(), (number, 10)).id("kid").close(Close::Await).await
    });
    let test = TestEngine::build(1).register(&kid()).register(&dad).start().await.unwrap();
    test.engine().start(&dad, 1).id("dad").await.unwrap();
    test.run(test.env().sleep(3 * SECOND)).await;
    test.engine().terminate("dad", "it is to begin anew").await.unwrap();
    let handle = test.engine().start(&dad, 2).id("dad").or_restart().await.unwrap();
    assert_eq!(within_an_hour(&test, handle.result()).await.unwrap(), 2);
}

/// Updates that do not fit are refused, and do not extend the time limit.
#[tokio::test]
async fn a_time_limit_for_updates_covers_all_of_them() {
    let waits = workflow("waits").run(async |ctx: Ctx, ()| {
        let began = ctx.now().await;
        let is_there = ctx.receive_update::<u64, u64>("u").timeout(5 * SECOND).await?.is_some();
        Ok((is_there, (ctx.now().await.0 - began.0) / 1_000_000))
    });
    let test = TestEngine::new(&waits, 1).await.unwrap();
    let handle = test.engine().start(&waits, ()).id("waits").await.unwrap();
    for is_in_time in [true, false] {
        test.run(test.env().sleep(3 * SECOND)).await;
        let sent = test.engine().update::<u64>("waits", "u", &"no number").send().await;
        assert_eq!(sent.is_ok(), is_in_time);
    }
    assert_eq!(within_an_hour(&test, handle.result()).await.unwrap(), (false, 5));
}

/// Its time limit ends as it sends.
fn late() -> Workflow<String, ()> {
    workflow("late").timeout(SECOND).run(async |ctx: Ctx, parent: String| {
        ctx.sleep(SECOND).await?;
        ctx.signal(parent, "hello", &()).await
    })
}

/// The message that it was about to send and the notice of its end go to the same parent.
#[tokio::test]
async fn an_execution_that_times_out_as_it_sends_has_timed_out() {
    let dad = workflow("dad").run(async |ctx: Ctx, ()| {
        let failure = ctx.child(&late(), ctx.id().to_string()).await.unwrap_err();
        Ok(failure.get::<ChildTimedOut>().is_some())
    });
    let test = TestEngine::build(1).register(&late()).register(&dad).start().await.unwrap();
    let handle = test.engine().start(&dad, ()).await.unwrap();
    assert!(within_an_hour(&test, handle.result()).await.unwrap());
}

/// The race: a start from outside is under way, and in memory, when a parent stores a child of the same id. The start
/// is refused, and the child still runs.
#[tokio::test]
async fn a_child_runs_though_its_id_was_in_memory_for_a_start_that_is_refused() {
    let dad = workflow("dad").run(async |ctx: Ctx, ()| {
        ctx.receive::<()>("go").await?;
        ctx.child(&kid(), (1, 0)).id("kid").await
    });
    let stage = Stage::new(|engine| engine.register(&kid()).register(&dad)).await;
    let handle = stage.engine.start(&dad, ()).id("dad").await.unwrap();
    stage.turns().await;
    stage.hold_to("workflow.executions", Side::Before).await;
    let engine = stage.engine.clone();
    let outside = tokio::spawn(async move { engine.start(&kid(), (2, 0)).id("kid").await });
    stage.turns().await;
    stage.engine.signal("dad", "go", &()).await.unwrap();
    stage.turns().await;
    let children = stage.engine.describe("dad").await.unwrap().children;
    assert_eq!(children, ["kid".into()], "the child is stored while the other start is held up");
    stage.open();
    let refused = stage.done(outside).await;
    assert!(matches!(refused, Err(WorkflowError::AlreadyStarted { .. })), "{refused:?}");
    let result = tokio::spawn(async move { handle.result().await });
    stage.pass(SECOND).await;
    assert_eq!(stage.done(result).await.unwrap(), 1);
}
