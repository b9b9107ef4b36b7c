//! Waiting for the result of an execution that is parked or set aside: the caller is told, unless it asks to wait on.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use latchwork::store::Store;
use latchwork::workflow::{Ctx, Engine, Failure, Workflow, WorkflowError, workflow};
use serde_json::{Value, json};

const LONG: Duration = Duration::from_secs(20);

/// Panics between its steps until it is repaired. It waits for a signal before.
fn broken(repaired: &Arc<AtomicBool>) -> Workflow<u32, u32> {
    workflow("broken").with(repaired.clone()).run(async |ctx: Ctx, repaired: Arc<AtomicBool>, number: u32| {
        ctx.receive::<()>("go").await?;
        assert!(repaired.load(Ordering::SeqCst), "a bug");
        Ok(number)
    })
}

fn reason_of<T: std::fmt::Debug>(result: Result<T, WorkflowError>) -> String {
    match result {
        Err(WorkflowError::Parked { reason, .. }) => reason,
        other => panic!("the caller is not told that it is parked: {other:?}"),
    }
}

// Callers begin to wait before the execution is parked and after it, with and without the type of the output.
#[tokio::test]
async fn a_result_tells_that_its_execution_is_parked_and_why() {
    let repaired = Arc::new(AtomicBool::new(false));
    let broken = broken(&repaired);
    let engine = Engine::on(&Store::memory().await.unwrap()).register(&broken).start().await.unwrap();
    let handle = engine.start(&broken, 7).id("b").await.unwrap();
    let before = tokio::spawn(tokio::time::timeout(LONG, handle.result()));
    let through = tokio::spawn(tokio::time::timeout(LONG, handle.result_through_parks()));
    let untyped = tokio::spawn(tokio::time::timeout(LONG, engine.handle_by_id("b").result()));
    tokio::task::yield_now().await;
    engine.signal("b", "go", &()).await.unwrap();
    assert_eq!(reason_of(before.await.unwrap().expect("it hangs")), "it panicked: a bug");
    assert_eq!(reason_of(untyped.await.unwrap().expect("it hangs")), "it panicked: a bug");
    for handle in [handle.clone(), engine.handle(&broken, "b")] {
        let after = tokio::time::timeout(LONG, handle.result()).await.expect("it hangs");
        assert_eq!(reason_of(after), "it panicked: a bug");
    }
    repaired.store(true, Ordering::SeqCst);
    engine.resume("b").await.unwrap();
    assert_eq!(through.await.unwrap().expect("it hangs").unwrap(), 7, "a wait through parks goes on");
    assert_eq!(handle.result().await.unwrap(), 7);
    let untyped: Value = engine.handle_by_id("b").result_through_parks().await.unwrap();
    assert_eq!(untyped, json!(7));
}

// The next deployment does not know the workflow.
#[tokio::test]
async fn a_result_tells_that_its_execution_is_set_aside() {
    let broken = broken(&Arc::default());
    let store = Store::memory().await.unwrap();
    let engine = Engine::on(&store).register(&broken).start().await.unwrap();
    engine.start(&broken, 7).id("b").await.unwrap();
    engine.signal("b", "go", &()).await.unwrap();
    engine.stop();
    let other = workflow("other").run(async |_, ()| Ok(()));
    let engine = Engine::on(&store).register(&other).start().await.unwrap();
    let result = tokio::time::timeout(LONG, engine.handle_by_id("b").result()).await.expect("it hangs");
    let reason = reason_of(result);
    assert!(reason == "workflow \"broken\" is not registered" || reason == "it panicked: a bug", "{reason}");
    engine.terminate("b", "the workflow is gone").await.unwrap();
    assert!(matches!(engine.handle_by_id("b").result().await, Err(WorkflowError::Failed { .. })));
}

// Its parent waits as long as the operator takes.
#[tokio::test]
async fn a_parent_waits_durably_for_a_parked_child() {
    let repaired = Arc::new(AtomicBool::new(false));
    let child = broken(&repaired);
    let called = child.clone();
    let parent = workflow("parent").with(called).run(async |ctx: Ctx, child: Workflow<u32, u32>, number: u32| {
        let child = ctx.child(&child, number).id("c").start().await?;
        child.result().await
    });
    let engine = Engine::on(&Store::memory().await.unwrap()).register(&child).register(&parent).start().await.unwrap();
    let handle = engine.start(&parent, 7).id("p").await.unwrap();
    engine.start(&child, 7).id("c").or_join().await.unwrap();
    engine.signal("c", "go", &()).await.unwrap();
    let told = tokio::time::timeout(LONG, engine.handle(&child, "c").result()).await.expect("it hangs");
    assert_eq!(reason_of(told), "it panicked: a bug");
    let waits = tokio::time::timeout(Duration::from_millis(200), handle.result()).await;
    assert!(waits.is_err(), "the parent is not parked: {waits:?}");
    repaired.store(true, Ordering::SeqCst);
    engine.resume("c").await.unwrap();
    assert_eq!(tokio::time::timeout(LONG, handle.result()).await.expect("it hangs").unwrap(), 7);
}

// A function that is parked before it has recorded anything, as after two operations at once.
#[tokio::test]
async fn two_operations_at_once_are_told_as_parked() {
    let joins = workflow("joins").run(async |ctx: Ctx, ()| {
        let (a, b) = (async || ctx.run("a", async || Ok(1)).await, async || ctx.run("b", async || Ok(2)).await);
        let (a, b): (Result<u32, Failure>, Result<u32, Failure>) = tokio::join!(a(), b());
        Ok(a? + b?)
    });
    let engine = Engine::on(&Store::memory().await.unwrap()).register(&joins).start().await.unwrap();
    let handle = engine.start(&joins, ()).await.unwrap();
    let told = tokio::time::timeout(LONG, handle.result()).await.expect("it hangs");
    assert!(reason_of(told).contains("await one before the next"));
}
