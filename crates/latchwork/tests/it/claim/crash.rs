//! A crash right before and right after every commit of a firing: claim, action, finish, after-effect and its removal.
//! The next life recovers, and the test checks the result.

use std::sync::Arc;
use std::time::Duration;

use latchwork::claim::{
    ActionCtx, AfterEffect, ClaimStep, ClaimWorkflow, Claims, Fired, Outcome, Recovery, StoredClaims,
};
use latchwork::entity::{Add, Query};
use latchwork::json;
use latchwork::testing::Crashes;
use latchwork::workflow::{Ctx, Engine, Retry, workflow};
use parking_lot::Mutex;

/// What the bodies and handlers of all lives saw.
#[derive(Default)]
struct Seen {
    bodies: u32,
    effects: Vec<String>,
}

fn config(recovery: Recovery) -> ClaimWorkflow {
    let pay = ClaimStep::new(1, "pay", "sent", "paid").action("Pay").claimed("paying").after("Receipt").after("Books");
    let pay = ClaimStep { recovery, lease: Some(Duration::from_secs(2)), attempts: Some(100), ..pay };
    ClaimWorkflow::new("invoice", "billing", "invoice").statuses(["sent", "paying", "paid"]).step(pay)
}

async fn claims(engine: &Engine, seen: &Arc<Mutex<Seen>>, recovery: Recovery) -> latchwork::claim::Result<Claims> {
    let (acts, told) = (seen.clone(), seen.clone());
    let handler = move |effect: AfterEffect| {
        told.lock().effects.push(effect.key);
        std::future::ready(Ok::<_, String>(()))
    };
    let claims = Claims::on(engine).workflow(config(recovery)).after_effect("Receipt", handler.clone());
    let claims = claims.after_effect("Books", handler).action("Pay", move |ctx: ActionCtx| {
        acts.lock().bodies += 1;
        ctx.add(Add::new("payment").data(json!({"of": ctx.entity().id})));
        std::future::ready(Ok::<_, String>(Outcome::done()))
    });
    claims.sweep_every(Duration::from_millis(100)).start().await
}

/// Fires in every life until the invoice is paid and everything is delivered. `Crashes` needs a workflow, so one waits
/// for the end; the firing runs outside of it.
async fn crash(recovery: Recovery) {
    let seen: Arc<Mutex<Seen>> = Arc::default();
    let looked: Arc<Mutex<Vec<String>>> = Arc::default();
    let waits = workflow("waits").run(async |ctx: Ctx, (): ()| {
        ctx.receive::<()>("done").await?;
        let often = Retry::exponential().max_attempts(100);
        ctx.run("end", async || Ok(())).retry(often).await
    });
    let (fires, told) = (seen.clone(), looked.clone());
    let crashes = Crashes::of(|| waits.clone(), ()).outside(move |engine| {
        let (seen, looked) = (fires.clone(), told.clone());
        async move {
            let Some(paid) = fire(&engine, &seen, recovery).await else { return };
            looked.lock().push(paid);
            let _ = engine.signal("execution", "done", &()).id("done").await;
        }
    });
    let mut checked = 0;
    let crashes = crashes.run(async |outcome| {
        assert!(outcome.result.is_ok(), "{:?}: {:?}", outcome.crash, outcome.result);
        let Seen { bodies, mut effects } = std::mem::take(&mut *seen.lock());
        // One body, or two: a life may crash after its body has begun.
        assert!((1..=2).contains(&bodies), "{:?}: {bodies} bodies", outcome.crash);
        effects.sort();
        let all = effects.clone();
        effects.dedup();
        let rev = effects[0].split(':').nth(1).unwrap();
        assert_eq!(effects, [format!("i:{rev}:0"), format!("i:{rev}:1")], "{:?}", outcome.crash);
        assert!(all.len() <= 4, "{:?}: {all:?}", outcome.crash);
        let looked = std::mem::take(&mut *looked.lock());
        assert_eq!(looked.last().map(String::as_str), Some("paid, 1 payments, 0 claims"), "{:?}", outcome.crash);
        checked += 1;
    });
    assert_eq!(crashes.await, checked);
    assert!(checked > 20, "{checked}");
}

/// Returns what is stored in the end. `None` if this life is over.
async fn fire(engine: &Engine, seen: &Arc<Mutex<Seen>>, recovery: Recovery) -> Option<String> {
    let claims = claims(engine, seen, recovery).await.ok()?;
    let env = engine.store().env().clone();
    let invoice = Add::new("invoice").id("i").data(json!({"status": "sent"})).if_absent(true);
    claims.add("invoice", invoice).await.ok()?;
    while engine.entities().get("i").await.ok()??.data["status"] != "paid" {
        match claims.fire("invoice", "pay", "i").await {
            Ok(Fired::Done(_)) => break,
            Ok(_) => env.sleep(Duration::from_millis(500)).await,
            Err(_) => return None,
        }
    }
    let stored = StoredClaims::on(engine.store()).await.ok()?;
    while !stored.undelivered().limit(10).await.ok()?.items.is_empty() {
        env.sleep(Duration::from_millis(50)).await;
    }
    let payments = engine.entities().find(&Query::of("payment")).await.ok()?.items.len();
    let open = stored.list().await.ok()?.items.len();
    let status = engine.entities().get("i").await.ok()??.data["status"].as_str()?.to_string();
    Some(format!("{status}, {payments} payments, {open} claims"))
}

#[tokio::test]
async fn a_crash_at_any_commit_leaves_one_transition_with_its_writes_and_its_after_effects() {
    crash(Recovery::Revert).await;
}

#[tokio::test]
async fn a_retry_after_a_crash_at_any_commit_has_the_same_result() {
    crash(Recovery::Retry).await;
}
