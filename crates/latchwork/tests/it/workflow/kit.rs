//! The test kit: mocks, histories, and code that is checked against histories.

use std::time::Duration;

use latchwork::testing::{Simulation, TestEngine, replay};
use latchwork::workflow::{
    Ctx, ExecutionId, ExecutionState, Failure, History, Kind, OperationState, Retry, Workflow, WorkflowError, workflow,
};

fn order() -> Workflow<u64, String> {
    workflow("order").run(async |ctx: Ctx, price: u64| {
        let paid = ctx.run("charge", async || Err::<u64, _>(Failure::new("no bank here"))).input(&price);
        let paid = paid.retry(Retry::exponential().max_attempts(3)).await?;
        ctx.sleep(Duration::from_secs(3600)).await?;
        let count = ctx.state().global::<u64>("orders").increment(1).await?.value;
        ctx.run("ship", async || Ok(format!("{paid} for order {count}"))).await
    })
}

#[tokio::test]
async fn mocks_stand_in_for_bodies() {
    let order = order();
    let test = TestEngine::build(1).register(&order).mock("charge", |attempt| match attempt {
        1 => Err(Failure::new("busy")),
        _ => Ok(u64::from(attempt) * 100),
    });
    let test = test.start().await.unwrap();
    let handle = test.engine().start(&order, 7).id("o").await.unwrap();
    assert_eq!(test.run(handle.result()).await.unwrap(), "200 for order 1");
    assert_eq!(test.bodies(), ["charge", "charge", "ship"]);
    let history = test.history("o").await.unwrap();
    assert_eq!(history.steps(), ["charge", "ship"]);
    let charge = history.find(Kind::Step, "charge").unwrap();
    assert_eq!((charge.attempts, charge.value::<u64>()), (2, Some(200)));
    assert_eq!(charge.failures[0].message, "busy");
    assert!(charge.recorded.since(charge.since) > Duration::from_millis(700), "there was a pause");
    let kinds: Vec<Kind> = history.operations.iter().map(|operation| operation.kind).collect();
    assert_eq!(kinds, [Kind::Step, Kind::Sleep, Kind::Slot, Kind::Step]);
    assert_eq!(history.state, ExecutionState::Completed("200 for order 1".into()));
    // A mock that returns another type than the step is a failure, not a panic.
    let test = TestEngine::build(1).register(&order).mock("charge", |_| Ok("text")).start().await.unwrap();
    match test.complete(&order, 7).await {
        Err(WorkflowError::Failed { failure, .. }) => assert!(failure.message().contains("the mock's result")),
        other => panic!("{other:?}"),
    }
    assert!(matches!(test.history("missing").await, Err(WorkflowError::NotFound { .. })));
}

/// Histories of an execution at every stage, as files would hold them.
async fn histories() -> Vec<History> {
    let order = order();
    let test = TestEngine::build(1).register(&order).mock("charge", |_| Ok(5u64)).start().await.unwrap();
    let handle = test.engine().start(&order, 7).id("o").await.unwrap();
    let mut histories = Vec::new();
    for _ in 0..1000 {
        tokio::task::yield_now().await;
    }
    histories.push(test.history("o").await.unwrap());
    test.run(handle.result()).await.unwrap();
    histories.push(test.history("o").await.unwrap());
    let failing = TestEngine::new(&order, 1).await.unwrap();
    let handle = failing.engine().start(&order, 7).id("f").await.unwrap();
    histories.push(failing.history("f").await.unwrap());
    let _ = failing.run(handle.result()).await;
    histories.push(failing.history("f").await.unwrap());
    let as_files = histories.iter().map(|history| serde_json::to_string_pretty(history).unwrap());
    let read: Vec<History> = as_files.map(|text| serde_json::from_str(&text).unwrap()).collect();
    assert_eq!(read, histories);
    read
}

#[tokio::test]
async fn code_is_checked_against_histories_and_no_body_runs() {
    let histories = histories().await;
    assert!(matches!(histories[0].state, ExecutionState::Waiting), "{:?}", histories[0].state);
    assert!(matches!(histories[3].state, ExecutionState::Failed(_)), "{:?}", histories[3].state);
    for history in &histories {
        assert_eq!(replay(history, &order()).await, Ok(()));
    }
    let renamed = workflow("order").run(async |ctx: Ctx, price: u64| {
        let paid = ctx.run("pay", async || Err::<u64, _>(Failure::new("a body ran"))).input(&price).await?;
        Ok(paid.to_string())
    });
    let longer = workflow("order").run(async |ctx: Ctx, price: u64| {
        let paid = ctx.run("charge", async || Err::<u64, _>(Failure::new("a body ran"))).input(&price).await?;
        ctx.sleep(Duration::from_secs(3600)).await?;
        let count = ctx.state().global::<u64>("orders").increment(1).await?.value;
        let text = ctx.run("ship", async || Err::<String, _>(Failure::new("a body ran"))).await?;
        ctx.run("thank", async || Err::<(), _>(Failure::new("a body ran"))).await?;
        Ok(format!("{text} {paid} {count}"))
    });
    let other_end = workflow("order").run(async |ctx: Ctx, price: u64| {
        let paid = ctx.run("charge", async || Err::<u64, _>(Failure::new("a body ran"))).input(&price).await?;
        ctx.sleep(Duration::from_secs(3600)).await?;
        ctx.state().global::<u64>("orders").increment(1).await?;
        ctx.run("ship", async || Err::<String, _>(Failure::new("a body ran"))).await?;
        Ok(format!("paid {paid}"))
    });
    let reasons = |workflow: Workflow<u64, String>| {
        let histories = histories.clone();
        async move {
            let mut reasons = Vec::new();
            for history in &histories {
                reasons.push(replay(history, &workflow).await.err().map(|mismatch| mismatch.reason));
            }
            reasons
        }
    };
    let renamed = reasons(renamed).await;
    let both = "operation 0 is step \"pay\" in the code, and step \"charge\" in the journal";
    assert!(renamed.iter().all(|reason| reason.as_deref() == Some(both)), "{renamed:?}");
    let longer = reasons(longer).await;
    assert_eq!(longer[0], None, "it still sleeps, and what comes later may change");
    assert_eq!(longer[1].as_deref(), Some("the code continues where the execution completed"));
    let other_end = reasons(other_end).await;
    let gives = "the code returns \"paid 5\", but the execution returned \"5 for order 1\"";
    assert_eq!(other_end[1].as_deref(), Some(gives));
    let foreign = workflow("other").run(async |_: Ctx, price: u64| Ok(price));
    assert!(replay(&histories[0], &foreign).await.unwrap_err().reason.contains("not \"other\""));
}

#[tokio::test]
async fn a_history_shows_attempts_that_are_still_to_come() {
    let order = order();
    let test = TestEngine::new(&order, 1).await.unwrap();
    test.engine().start(&order, 7).id("o").await.unwrap();
    for _ in 0..1000 {
        tokio::task::yield_now().await;
    }
    let history = test.history("o").await.unwrap();
    let charge = history.find(Kind::Step, "charge").unwrap();
    assert!(matches!(charge.state, OperationState::Retrying { .. }), "{charge:?}");
    assert_eq!(charge.failures.len(), 1);
}

/// It would never come to an end: the test would hang until something kills it.
#[tokio::test]
#[should_panic(expected = "test.run(handle.result()).await")]
async fn a_result_that_is_waited_for_while_time_stands_still_is_a_panic() {
    let sleeps = workflow("sleeps").run(async |ctx: Ctx, ()| ctx.sleep(Duration::from_secs(60)).await);
    let test = TestEngine::new(&sleeps, 1).await.unwrap();
    let handle = test.engine().start(&sleeps, ()).await.unwrap();
    let _ = handle.result().await;
}

#[tokio::test]
async fn a_result_that_needs_no_time_can_be_waited_for_anywhere() {
    let adds = workflow("adds").run(async |ctx: Ctx, n: u32| ctx.run("add", async || Ok::<_, Failure>(n + 1)).await);
    let test = TestEngine::new(&adds, 1).await.unwrap();
    let handle = test.engine().start(&adds, 1).await.unwrap();
    assert_eq!(handle.result().await.unwrap(), 2);
}

#[test]
fn a_simulation_takes_the_ids_that_a_start_takes() {
    let adds = workflow("adds").run(async |_: Ctx, n: u32| Ok(n + 1));
    let id = ExecutionId::from("c");
    let simulation = Simulation::new(1).register(&adds).start(&adds, "a", 1);
    let report = simulation.start(&adds, format!("b-{}", 1), 2).start(&adds, &id, 3).run();
    report.assert_settled();
    assert_eq!(report.output::<u32>("a").unwrap(), 2);
    assert_eq!(report.output::<u32>(String::from("b-1")).unwrap(), 3);
    assert_eq!(report.output::<u32>(&id).unwrap(), 4);
}
