//! Slots of a tree: shared by an execution and all its descendants, and by no other execution.

use std::sync::Arc;
use std::time::Duration;

use latchwork::lock::{DurableMutex, LockRecord, initial_lock_record};
use latchwork::testing::{Crashes, TestEngine};
use latchwork::workflow::{Close, Ctx, ExecutionId, Failure, Workflow, workflow};
use parking_lot::Mutex;

use crate::lock::turnstile::Stage;

const SECOND: Duration = Duration::from_secs(1);

/// Adds to a slot of its tree, and starts a child that does the same, so many generations deep.
fn family() -> Workflow<u64, u64> {
    workflow("family").run(async |ctx: Ctx, depth: u64| {
        ctx.state().tree::<u64>("sum").increment(1).await?;
        if depth > 0 {
            let family = workflow("family").run(async |_: Ctx, depth: u64| Ok(depth));
            ctx.child(&family, depth - 1).id(format!("{}-{depth}", ctx.id())).await?;
        }
        ctx.transaction("tx", async |tx| Ok(tx.tree::<u64>("sum").increment(10).await?.value)).await
    })
}

#[tokio::test]
async fn executions_of_a_tree_share_its_slots_and_another_tree_has_its_own() {
    let family = family();
    let test = TestEngine::new(&family, 1).await.unwrap();
    for root in ["a", "b"] {
        let handle = test.engine().start(&family, 2).id(root).await.unwrap();
        assert_eq!(test.run(handle.result()).await.unwrap(), 33, "each of three has added 11 to one slot");
        let states = test.engine().states();
        assert_eq!(states.tree(root).slot::<u64>("sum").get().await.unwrap(), Some(33), "read from outside");
        let child = format!("{root}-2");
        assert_eq!(states.tree(&child).slot::<u64>("sum").get().await.unwrap(), None, "a child has no tree of its own");
        assert_eq!(states.execution(root).slot::<u64>("sum").get().await.unwrap(), None, "nor is it the root's own");
    }
}

/// The execution that runs the body under the lock.
type Within = Mutex<Option<ExecutionId>>;

/// Waits for the mutex in the slot of the tree, adds to a number in two steps, and releases the mutex.
async fn add_under_lock(ctx: &Ctx, within: &Within) -> Result<u64, Failure> {
    let mutex = DurableMutex::new(Duration::from_secs(3600)).map_err(|error| Failure::new(error.to_string()))?;
    let lock = ctx.state().tree::<LockRecord>("lock").initial(initial_lock_record());
    let number = ctx.state().tree::<u64>("number");
    let failed = |error: latchwork::lock::SlotLockError| Failure::new(error.to_string());
    while !mutex.try_acquire(&lock, ctx.id(), ctx.now().await, None).await.map_err(failed)?.acquired {
        ctx.sleep(Duration::from_millis(700)).await?;
    }
    let seen = number.get().await?.unwrap_or_default();
    ctx.run("alone", async || {
        // A crash may have interrupted it here before.
        let before = within.lock().replace(ctx.id().clone());
        assert!(before.as_ref().is_none_or(|id| id == ctx.id()), "{before:?} holds the lock");
        tokio::task::yield_now().await;
        *within.lock() = None;
        Ok(())
    })
    .await?;
    number.set(seen + 1).await?;
    mutex.release(&lock, ctx.id(), ctx.now().await).await.map_err(failed)?;
    Ok(seen + 1)
}

/// A parent and its durable children contend for a lock in a slot of their tree; the process ends at every commit. A
/// lock with two holders, or a slot that is not shared, would lose an addition.
#[tokio::test]
async fn a_parent_and_its_children_contend_for_a_lock_in_a_slot_of_their_tree() {
    let within = Arc::new(Within::default());
    let child = {
        let within = within.clone();
        workflow("child").run(move |ctx: Ctx, ()| {
            let within = within.clone();
            async move { add_under_lock(&ctx, &within).await }
        })
    };
    let parent = {
        let (within, child) = (within.clone(), child.clone());
        workflow("parent").run(move |ctx: Ctx, children: usize| {
            let (within, child) = (within.clone(), child.clone());
            async move {
                let mut started = Vec::new();
                for _ in 0..children {
                    started.push(ctx.child(&child, ()).start().await?);
                }
                let mut numbers = vec![add_under_lock(&ctx, &within).await?];
                for child in started {
                    numbers.push(child.result().await?);
                }
                numbers.sort_unstable();
                Ok(numbers)
            }
        })
    };
    let reset = within.clone();
    let crashes = Crashes::of(|| parent.clone(), 3).register(|| child.clone()).run(async |outcome| {
        *reset.lock() = None;
        assert_eq!(outcome.result.as_ref().unwrap(), &[1, 2, 3, 4], "{:?}", outcome.crash);
    });
    let crashes = crashes.await;
    assert!(crashes >= 40, "{crashes}");
}

/// A child outlives the root of its tree, finds the slots removed with the root, and writes to one of them: nothing is
/// left when the child is removed as well.
#[tokio::test]
async fn slots_of_a_tree_are_removed_with_its_root_or_with_the_child_that_outlives_it() {
    let late = workflow("late").keep(SECOND).run(async |ctx: Ctx, ()| {
        ctx.sleep(10 * SECOND).await?;
        let slot = ctx.state().tree::<u64>("n");
        let seen = slot.get().await?;
        slot.set(2).await?;
        Ok(seen)
    });
    let root = {
        let late = late.clone();
        workflow("root").keep(SECOND).run(move |ctx: Ctx, ()| {
            let late = late.clone();
            async move {
                ctx.state().tree::<u64>("n").set(1).await?;
                ctx.child(&late, ()).id("late").close(Close::Abandon).start().await?;
                Ok(())
            }
        })
    };
    let stage = Stage::new(|builder| builder.register(&root).register(&late)).await;
    stage.engine.start(&root, ()).id("root").await.unwrap().result().await.unwrap();
    let slot = stage.engine.states().tree("root").slot::<u64>("n");
    assert_eq!(slot.get().await.unwrap(), Some(1));
    stage.pass(2 * SECOND).await;
    assert!(stage.engine.describe("root").await.is_err());
    assert_eq!(slot.get().await.unwrap(), None, "gone with the root");
    stage.pass(9 * SECOND).await;
    assert_eq!(slot.get().await.unwrap(), Some(2), "the child continues");
    let saw = stage.engine.handle(&late, "late").result().await.unwrap();
    assert_eq!(saw, None);
    stage.pass(2 * SECOND).await;
    assert!(stage.engine.describe("late").await.is_err());
    assert_eq!(slot.get().await.unwrap(), None, "gone with the child");
}

/// A fork of the root, and a fork of a child: each is the root of a tree of its own. The slots of that tree hold what
/// those of the source's tree held at the place.
#[tokio::test]
async fn a_fork_has_copies_of_the_slots_of_the_tree_as_they_were_at_that_place() {
    let family = family();
    let test = TestEngine::new(&family, 1).await.unwrap();
    let handle = test.engine().start(&family, 1).id("root").await.unwrap();
    test.run(handle.result()).await.unwrap();
    let states = test.engine().states();
    let sum = |id: &str| states.tree(id).slot::<u64>("sum");
    // The root adds 1, starts the child, waits for its end, and adds 10. The child has added 11 before that last
    // addition.
    for (source, at, result) in [("root", "3", 22), ("root-1", "1", 12), ("root-1", "0", 11)] {
        let id = test.engine().fork(source).at(at).await.unwrap();
        let handle = test.engine().handle(&family, &id);
        assert_eq!(test.run(handle.result()).await.unwrap(), result, "{source} at {at}");
        assert_eq!(sum(&id).get().await.unwrap(), Some(result), "{source} at {at}");
    }
    assert_eq!(sum("root").get().await.unwrap(), Some(22), "the source's stay as they were");
}

/// A child is removed while the root still exists: the slots stay.
#[tokio::test]
async fn slots_of_a_tree_stay_when_a_child_is_removed() {
    let child = workflow("child")
        .keep(SECOND)
        .run(async |ctx: Ctx, ()| Ok(ctx.state().tree::<u64>("n").increment(1).await?.value));
    let root = {
        let child = child.clone();
        workflow("root").run(move |ctx: Ctx, ()| {
            let child = child.clone();
            async move {
                ctx.child(&child, ()).id("child").await?;
                ctx.sleep(10 * SECOND).await?;
                Ok(ctx.state().tree::<u64>("n").get().await?)
            }
        })
    };
    let stage = Stage::new(|builder| builder.register(&root).register(&child)).await;
    let handle = stage.engine.start(&root, ()).id("root").await.unwrap();
    for _ in 0..5 {
        stage.pass(SECOND).await;
    }
    assert!(stage.engine.describe("child").await.is_err(), "it is removed");
    assert_eq!(stage.engine.states().tree("root").slot::<u64>("n").get().await.unwrap(), Some(1));
    stage.pass(10 * SECOND).await;
    assert_eq!(handle.result().await.unwrap(), Some(1));
}
