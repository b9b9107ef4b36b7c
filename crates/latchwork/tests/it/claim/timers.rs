//! Timers: a step fires when an entity has been at its status for a given time.

use std::time::Duration;

use latchwork::claim::{ClaimStep, ClaimWorkflow, Claims, StoredClaims, Timer};
use latchwork::entity::{Add, Update};
use latchwork::json;
use latchwork::store::Store;
use latchwork::workflow::Engine;

use super::kit::sleep;

fn tickets() -> ClaimWorkflow {
    let timer = Some(Timer { after: Duration::from_millis(150), requester: "system".into() });
    ClaimWorkflow::new("ticket", "desk", "ticket")
        .statuses(["open", "late", "solved"])
        .step(ClaimStep { timer, ..ClaimStep::new(1, "escalate", "open", "late") })
        .step(ClaimStep::new(2, "solve", "open", "solved"))
        .step(ClaimStep::new(3, "reopen", "solved", "open"))
        .step(ClaimStep::new(4, "solve", "late", "solved"))
}

async fn until(engine: &Engine, id: &str, status: &str) {
    for _ in 0..5_000 {
        if engine.entities().get(id).await.unwrap().unwrap().data["status"] == status {
            return;
        }
        sleep(Duration::from_millis(2)).await;
    }
    panic!("{id} does not reach {status}");
}

#[tokio::test]
async fn a_step_with_a_timer_fires_after_its_time_at_the_status() {
    let engine = Engine::on(&Store::memory().await.unwrap()).start().await.unwrap();
    // A ticket that was added before the claims started gets its timer, too.
    engine.entities().add(Add::new("ticket").id("old").data(json!({"status": "open"}))).await.unwrap();
    let claims = Claims::on(&engine).workflow(tickets()).start().await.unwrap();
    for id in ["a", "b"] {
        claims.add("ticket", Add::new("ticket").id(id).data(json!({"status": "open"}))).await.unwrap();
    }
    assert!(claims.fire("ticket", "solve", "b").await.unwrap().is_done());
    until(&engine, "old", "late").await;
    until(&engine, "a", "late").await;
    // An edit does not restart the timer. A ticket that has left the status in time is not touched.
    sleep(Duration::from_millis(200)).await;
    until(&engine, "b", "solved").await;
    assert!(claims.fire("ticket", "reopen", "b").await.unwrap().is_done());
    sleep(Duration::from_millis(100)).await;
    engine.entities().update(Update::new("b").metadata(json!({"read": true}))).await.unwrap();
    until(&engine, "b", "late").await;
    let history = StoredClaims::on(engine.store()).await.unwrap().history("b").limit(1).await.unwrap().items.remove(0);
    assert_eq!((history.step.as_str(), history.actor.as_deref()), ("escalate", Some("timer")));
    let waited = history.at.0
        - StoredClaims::on(engine.store()).await.unwrap().history("b").limit(2).await.unwrap().items[1].at.0;
    assert!(waited >= 150_000, "{waited}");
}

#[tokio::test]
async fn a_timer_fires_in_the_next_process_if_this_one_ends_before() {
    let directory = tempfile::tempdir().unwrap();
    let engine = Engine::open(directory.path()).start().await.unwrap();
    let claims = Claims::on(&engine).workflow(tickets()).start().await.unwrap();
    claims.add("ticket", Add::new("ticket").id("a").data(json!({"status": "open"}))).await.unwrap();
    engine.shutdown().await.unwrap();
    drop((claims, engine));
    let engine = Engine::open(directory.path()).start().await.unwrap();
    let _claims = Claims::on(&engine).workflow(tickets()).start().await.unwrap();
    until(&engine, "a", "late").await;
}
