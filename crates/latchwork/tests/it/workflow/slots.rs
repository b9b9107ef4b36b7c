//! Slots inside workflows: each change is one commit together with its journal entry.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use latchwork::json;
use latchwork::state::{MutationError, StateError};
use latchwork::store::Store;
use latchwork::testing::{TestEngine, crash_everywhere};
use latchwork::workflow::{Ctx, Engine, Workflow, workflow};
use serde_json::Value;
use tokio::sync::Notify;

/// Every operation on slots of every scope, and what they leave.
fn every_operation() -> Workflow<u64, Value> {
    workflow("every").run(async |ctx: Ctx, by: u64| {
        let state = ctx.state();
        let count = state.global::<u64>("count").initial(100);
        let before = count.get().await?;
        let sum = count.increment(by).await?.value;
        let doubled = count.update(|count| count.unwrap_or(0) * 2).await?.value;
        let list = state.workflow::<Vec<String>>("list");
        let length = list.append("a".into()).await?.value;
        list.append("b".into()).await?;
        let first = list.remove_first().await?.value;
        let own = state.execution::<Value>("own");
        own.set(json!({"x": 1})).await?;
        let merged = own.merge(json!({"y": 2})).await?.value;
        ctx.sleep(Duration::from_secs(60)).await?;
        let last = list.remove_last().await?.value;
        let nothing = list.remove_last().await?;
        assert!(!nothing.changed);
        let gone = state.global::<u64>("gone");
        gone.set(7).await?;
        gone.delete().await?;
        let gone = gone.get().await?;
        let numbers = json!([before, sum, doubled, length, count.get().await?, gone, nothing.value]);
        Ok(json!({"numbers": numbers, "texts": [first, last], "own": merged}))
    })
}

fn expected() -> Value {
    json!({"numbers": [100, 105, 210, 1, 210, null, null], "texts": ["a", "b"], "own": {"x": 1, "y": 2}})
}

#[tokio::test]
async fn every_operation_of_slots_works_and_is_visible_from_outside() {
    let every = every_operation();
    let test = TestEngine::new(&every, 1).await.unwrap();
    let handle = test.engine().start(&every, 5).id("e").await.unwrap();
    assert_eq!(test.run(handle.result()).await.unwrap(), expected());
    let states = test.engine().states();
    assert_eq!(states.global().slot::<u64>("count").get().await.unwrap(), Some(210));
    assert_eq!(states.workflow("every").slot::<Vec<String>>("list").get().await.unwrap(), Some(vec![]));
    let own = states.execution("e").slot::<Value>("own").get().await.unwrap();
    assert_eq!(own, Some(json!({"x": 1, "y": 2})));
    let watched = states.global().slot::<u64>("count").watch(latchwork::store::Generation(0)).await;
    assert!(watched.is_ok());
}

/// A crash right before and right after each commit: the numbers would show a change that was applied twice or not at
/// all.
#[tokio::test]
async fn a_crash_at_any_commit_applies_no_change_twice() {
    let crashes = crash_everywhere(every_operation, 5, async |outcome| {
        assert_eq!(outcome.result.as_ref().unwrap(), &expected(), "{:?}", outcome.crash);
    })
    .await;
    assert!(crashes >= 20, "{crashes}");
}

/// Executions and callers outside share one queue: no change loses a race, and no change is lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn executions_and_callers_outside_share_a_slot_without_conflicts() {
    let adds = workflow("adds").run(async |ctx: Ctx, times: u64| {
        for _ in 0..times {
            ctx.state().global::<u64>("sum").increment(1).await?;
        }
        Ok(())
    });
    let engine = Engine::on(&Store::memory().await.unwrap()).register(&adds).start().await.unwrap();
    let mut tasks = tokio::task::JoinSet::new();
    for number in 0..80 {
        let (engine, adds) = (engine.clone(), adds.clone());
        tasks.spawn(async move {
            if number % 2 == 0 {
                return engine.start(&adds, 25).await.unwrap().result().await.unwrap();
            }
            let sum = engine.states().global().slot::<u64>("sum");
            for _ in 0..25 {
                sum.increment(1).await.unwrap();
            }
        });
    }
    tasks.join_all().await;
    assert_eq!(engine.states().global().slot::<u64>("sum").get().await.unwrap(), Some(2000));
}

/// A refusal of a change, and the error of a change, are the same on every replay, though the slot has changed by then.
#[tokio::test]
async fn refusals_and_errors_are_the_same_after_a_replay() {
    let picky = workflow("picky").run(async |ctx: Ctx, ()| {
        let slot = ctx.state().global::<Value>("slot");
        let refused = slot.try_update(|value| match value.and_then(|value| value.as_u64()) {
            Some(number) if number < 3 => Ok(json!(number + 1)),
            other => Err(format!("{other:?} is too much")),
        });
        let refused = match refused.await {
            Err(MutationError::Refused(message)) => message,
            other => format!("{other:?}"),
        };
        let wrong = match slot.merge(json!({"a": 1})).await {
            Err(StateError::NotAnObject { found, .. }) => found.to_string(),
            other => format!("{other:?}"),
        };
        ctx.sleep(Duration::from_secs(3600)).await?;
        Ok((refused, wrong))
    });
    let test = TestEngine::new(&picky, 1).await.unwrap();
    let slot = test.engine().states().global().slot::<Value>("slot");
    slot.set(json!(5)).await.unwrap();
    let handle = test.engine().start(&picky, ()).await.unwrap();
    for _ in 0..1000 {
        tokio::task::yield_now().await;
    }
    assert_eq!(test.engine().residents(), 0, "it sleeps");
    slot.set(json!({"now": "an object"})).await.unwrap();
    let (refused, wrong) = test.run(handle.result()).await.unwrap();
    assert_eq!((refused.as_str(), wrong.as_str()), ("Some(5) is too much", "a number"));
    assert_eq!(slot.get().await.unwrap(), Some(json!({"now": "an object"})));
}

/// An engine was paused for so long that another engine took over: its next writes are refused.
#[tokio::test]
async fn an_engine_that_was_replaced_changes_nothing() {
    let release = Arc::new(Notify::new());
    let is_first = Arc::new(AtomicBool::new(true));
    let slow = {
        let (release, is_first) = (release.clone(), is_first.clone());
        workflow("slow").run(move |ctx: Ctx, ()| {
            let (release, is_first) = (release.clone(), is_first.clone());
            async move {
                let body = ctx.run("pause", async || {
                    if is_first.swap(false, Ordering::SeqCst) {
                        release.notified().await;
                    }
                    Ok(())
                });
                body.await?;
                Ok(ctx.state().global::<u64>("count").increment(1).await?.value)
            }
        })
    };
    let store = Store::memory().await.unwrap();
    let first = Engine::on(&store).register(&slow).start().await.unwrap();
    first.start(&slow, ()).id("s").await.unwrap();
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    let second = Engine::on(&store).register(&slow).start().await.unwrap();
    assert_eq!(second.handle(&slow, "s").result().await.unwrap(), 1);
    release.notify_one();
    for _ in 0..1000 {
        tokio::task::yield_now().await;
    }
    assert_eq!(first.residents(), 0, "it has stopped quietly");
    assert_eq!(second.states().global().slot::<u64>("count").get().await.unwrap(), Some(1));
}

/// Changes under a condition: one that is made, two that are refused, and what each has answered.
fn conditional() -> Workflow<(), Value> {
    workflow("conditional").run(async |ctx: Ctx, ()| {
        let slot = ctx.state().global::<u64>("n");
        let (_, rev) = slot.read().await?;
        let made = slot.clone().if_rev(rev).set(1).await?;
        let late = match slot.clone().if_rev(rev).set(2).await {
            Err(StateError::RevisionConflict { expected, actual, .. }) => json!([expected, actual]),
            other => json!(format!("{other:?}")),
        };
        ctx.sleep(Duration::from_secs(60)).await?;
        let absent = match slot.clone().if_absent().set(3).await {
            Err(StateError::AlreadyExists { rev, .. }) => json!(rev),
            other => json!(format!("{other:?}")),
        };
        ctx.sleep(Duration::from_secs(60)).await?;
        let again = slot.clone().if_rev(made.rev).increment(1).await?;
        Ok(json!([rev, made.rev, late, absent, again.value, again.rev]))
    })
}

#[tokio::test]
async fn a_refused_condition_is_recorded_and_the_same_after_a_crash() {
    let expected = json!([0, 1, [0, 1], 1, 2, 2]);
    let crashes = crash_everywhere(conditional, (), async |outcome| {
        assert_eq!(outcome.result.as_ref().unwrap(), &expected, "{:?}", outcome.crash);
    })
    .await;
    assert!(crashes >= 5, "{crashes}");
}

#[tokio::test]
async fn a_refusal_that_was_recorded_stays_one_though_the_slot_has_moved() {
    let conditional = conditional();
    let test = TestEngine::new(&conditional, 1).await.unwrap();
    let handle = test.engine().start(&conditional, ()).id("c").await.unwrap();
    test.run(test.env().sleep(Duration::from_secs(90))).await;
    // Both refusals are recorded. From outside the slot is removed, and written as if it had never moved on.
    let slot = test.engine().states().global().slot::<u64>("n");
    slot.delete().await.unwrap();
    let failed = test.run(handle.result()).await.unwrap_err().to_string();
    assert!(failed.contains("is at rev 2, not at 1"), "{failed}");
    let history = test.history("c").await.unwrap();
    assert_eq!(latchwork::testing::replay(&history, &conditional).await, Ok(()));
}
