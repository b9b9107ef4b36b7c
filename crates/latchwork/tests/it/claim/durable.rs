//! Actions that are durable workflows: the execution owns the claim.

use std::time::Duration;

use latchwork::claim::{
    ClaimError, ClaimStep, ClaimWorkflow, Claims, DurableAction, DurableCall, Fired, Outcome, durable_action,
};
use latchwork::entity::Add;
use latchwork::json;
use latchwork::store::Store;
use latchwork::workflow::{Ctx, Engine, Failure};

use super::kit::sleep;

fn close() -> DurableAction {
    durable_action("Close", async |ctx: Ctx, call: DurableCall| {
        ctx.run("collect", async || Ok(())).await?;
        let pause = call.input["pause_ms"].as_u64().unwrap_or_default();
        ctx.sleep(Duration::from_millis(pause)).await?;
        match call.input["does"].as_str() {
            Some("fail") => Ok(Outcome::failure("something is open")),
            Some("reject") => Ok(Outcome::rejection("there is no such period")),
            Some("error") => Err(Failure::new("the books are gone")),
            _ => Ok(Outcome::output(call.entity.data["month"].clone())),
        }
    })
}

fn periods() -> ClaimWorkflow {
    ClaimWorkflow::new("billing", "billing", "period")
        .statuses(["approved", "closing", "closed"])
        .step(ClaimStep::new(20, "close", "approved", "closed").claimed("closing").action("Close").after("Tell"))
}

async fn claims(engine: &Engine, close: &DurableAction) -> Claims {
    let claims = Claims::on(engine).workflow(periods()).durable_action(close);
    claims.after_effect("Tell", async |_| Ok::<_, String>(())).start().await.unwrap()
}

fn may() -> Add {
    Add::new("period").id("may").data(json!({"status": "approved", "month": 5}))
}

#[tokio::test]
async fn the_execution_of_an_action_owns_the_claim_and_ends_it() {
    let close = close();
    let engine = Engine::on(&Store::memory().await.unwrap()).register(close.workflow()).start().await.unwrap();
    let claims = claims(&engine, &close).await;
    claims.add("billing", may()).await.unwrap();
    let fire = |does: &str| claims.fire("billing", "close", "may").input(json!({"does": does}));
    assert!(matches!(fire("fail").await.unwrap(), Fired::Failure(failure) if failure.message == "something is open"));
    assert!(matches!(fire("reject").await.unwrap(), Fired::Rejection(_)));
    let Err(ClaimError::Action { error, .. }) = fire("error").await else { panic!("an error") };
    assert_eq!(error.to_string(), "the books are gone");
    let done = fire("succeed").await.unwrap().done().unwrap();
    assert_eq!((done.to.as_str(), &done.output), ("closed", &json!(5)));
    assert_eq!(engine.entities().get("may").await.unwrap().unwrap().data["status"], "closed");
    assert_eq!(claims.operate().await.unwrap().stored().list().await.unwrap().items, []);
}

// A restart in the middle: the next process continues the execution, and the claim does not revert.
#[tokio::test]
async fn a_durable_action_continues_after_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let first = close();
    let store = Store::open(directory.path()).await.unwrap();
    let engine = Engine::on(&store).register(first.workflow()).start().await.unwrap();
    let before = claims(&engine, &first).await;
    before.add("billing", may()).await.unwrap();
    let fire = before.fire("billing", "close", "may").input(json!({"pause_ms": 300}));
    let fired = tokio::spawn(async move { fire.await });
    let stored = loop {
        let stored = latchwork::claim::StoredClaims::on(&store).await.unwrap();
        if stored.get("may").await.unwrap().is_some() {
            break stored;
        }
        sleep(Duration::from_millis(1)).await;
    };
    let open = stored.get("may").await.unwrap().unwrap();
    assert!(open.holder.owner.starts_with("execution \"Close:") && open.holder.lease_left.is_none());
    engine.stop();
    assert!(matches!(fired.await.unwrap(), Err(ClaimError::Stopped)));
    store.close().await.unwrap();
    drop((before, engine, stored, store));
    let second = close();
    let engine = Engine::open(directory.path()).register(second.workflow()).start().await.unwrap();
    let after = claims(&engine, &second).await;
    while engine.entities().get("may").await.unwrap().unwrap().data["status"] != "closed" {
        sleep(Duration::from_millis(5)).await;
    }
    let history = after.operate().await.unwrap().stored().history("may").limit(9).await.unwrap().items;
    assert_eq!(history.len(), 1);
}

// An operator terminates the execution. Only the janitor can end the claim then.
#[tokio::test]
async fn the_claim_of_a_terminated_execution_is_reverted() {
    let close = close();
    // In a directory only the claim itself wakes the janitor.
    let directory = tempfile::tempdir().unwrap();
    let engine = Engine::open(directory.path()).register(close.workflow()).start().await.unwrap();
    let claims = Claims::on(&engine).workflow(periods()).durable_action(&close).sweep_every(Duration::from_millis(10));
    let claims = claims.after_effect("Tell", async |_| Ok::<_, String>(())).start().await.unwrap();
    claims.add("billing", may()).await.unwrap();
    let fire = claims.fire("billing", "close", "may").input(json!({"pause_ms": 600_000}));
    let fired = tokio::spawn(async move { fire.await });
    let operator = claims.operate().await.unwrap();
    let owner = loop {
        if let Some(open) = operator.stored().get("may").await.unwrap() {
            break open.holder.owner;
        }
        sleep(Duration::from_millis(1)).await;
    };
    let id = owner.trim_start_matches("execution \"").trim_end_matches('"').to_string();
    engine.terminate(&*id, "it takes too long").await.unwrap();
    assert!(matches!(fired.await.unwrap(), Err(ClaimError::Execution { .. })));
    while engine.entities().get("may").await.unwrap().unwrap().data["status"] != "approved" {
        sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(operator.stored().list().await.unwrap().items, []);
}

#[tokio::test]
async fn a_durable_action_must_be_claimed_and_registered_with_the_engine() {
    let close = close();
    let engine = Engine::on(&Store::memory().await.unwrap()).start().await.unwrap();
    let mut unclaimed = periods();
    unclaimed.steps[0].claim_state = None;
    unclaimed.status_types.retain(|status| status != "closing");
    let claims = Claims::on(&engine).workflow(unclaimed).durable_action(&close);
    let claims = claims.after_effect("Tell", async |_| Ok::<_, String>(()));
    let Err(ClaimError::Config { findings }) = claims.start().await else { panic!("findings") };
    let rules: Vec<String> = findings.iter().map(|finding| finding.rule.to_string()).collect();
    assert_eq!(rules, ["unclaimed", "unknown_action"]);
}

#[tokio::test]
async fn a_cancelled_execution_ends_its_claim() {
    let close = close();
    let directory = tempfile::tempdir().unwrap();
    let engine = Engine::open(directory.path()).register(close.workflow()).start().await.unwrap();
    let claims = claims(&engine, &close).await;
    claims.add("billing", may()).await.unwrap();
    let fire = claims.fire("billing", "close", "may").input(json!({"pause_ms": 600_000}));
    let fired = tokio::spawn(async move { fire.await });
    let operator = claims.operate().await.unwrap();
    let owner = loop {
        if let Some(open) = operator.stored().get("may").await.unwrap() {
            break open.holder.owner;
        }
        sleep(Duration::from_millis(1)).await;
    };
    let id = owner.trim_start_matches("execution \"").trim_end_matches('"').to_string();
    engine.cancel(&*id, "enough").await.unwrap();
    assert!(fired.await.unwrap().is_err());
    assert_eq!(engine.entities().get("may").await.unwrap().unwrap().data["status"], "approved");
    assert_eq!(operator.stored().list().await.unwrap().items, []);
}
