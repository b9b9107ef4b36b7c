//! Claims over HTTP.

use std::sync::Arc;
use std::time::Duration;

use latchwork::claim::{
    ActionCtx, ActionError, AfterEffect, ClaimStep, ClaimWorkflow, Claims, Outcome, Recovery, Rejection,
};
use latchwork::entity::Add;
use latchwork::store::Store;
use latchwork::workflow::Engine;
use latchwork::{Value, json};
use latchwork_server::Api;
use tokio::sync::Semaphore;

use crate::client::{Answer, Running, ask, start, start_api};

fn invoice() -> ClaimWorkflow {
    let mut pay = ClaimStep::new(10, "pay", "sent", "paid").claimed("paying").action("Pay").after("Print");
    (pay.lease, pay.recovery) = (Some(Duration::from_millis(200)), Recovery::NeedsReview);
    let book = ClaimStep::new(20, "book", "paid", "booked").action("Pay");
    ClaimWorkflow::new("invoice", "billing", "invoice")
        .statuses(["sent", "paying", "paid", "booked"])
        .step(pay)
        .step(book)
}

/// Pays as the input says. With `wait`, the action waits for a permit.
async fn pay(ctx: ActionCtx, gate: Arc<Semaphore>) -> Result<Outcome, ActionError> {
    let input = ctx.input().clone();
    if input["wait"] == true {
        gate.acquire().await?.forget();
    }
    match input["end"].as_str() {
        Some("failure") => Ok(Outcome::failure("the card was refused")),
        Some("rejection") => {
            let field = Some("amount".into());
            Ok(Outcome::Rejection(Rejection { message: "not positive".into(), field }))
        }
        Some("error") => Err("secret: /etc/passwords".into()),
        _ => {
            ctx.merge_data(json!({"amount": input["amount"], "actor": ctx.actor()}));
            Ok(Outcome::output(json!({"paid": input["amount"]})))
        }
    }
}

/// Claims whose after-effects fail.
async fn claims_on(engine: &Engine, gate: &Arc<Semaphore>) -> Claims {
    let gate = gate.clone();
    Claims::on(engine)
        .workflow(invoice())
        .action("Pay", move |ctx: ActionCtx| pay(ctx, gate.clone()))
        .after_effect("Print", async |_: AfterEffect| Err("no paper"))
        .after_effect_attempts(1)
        .sweep_every(Duration::from_millis(50))
        .start()
        .await
        .unwrap()
}

struct Served {
    running: Running,
    claims: Claims,
    gate: Arc<Semaphore>,
}

async fn served() -> Served {
    let (engine, gate) =
        (Engine::on(&Store::memory().await.unwrap()).start().await.unwrap(), Arc::new(Semaphore::new(0)));
    let claims = claims_on(&engine, &gate).await;
    let running = start_api(engine.clone(), Api::on(&engine).claims(&claims)).await;
    Served { running, claims, gate }
}

impl Served {
    async fn add(&self, id: &str) {
        let add = Add::new("invoice").id(id).data(json!({"status": "sent"}));
        self.claims.add("invoice", add).await.unwrap();
    }

    async fn fire(&self, entity: &str, input: Value) -> Answer {
        self.fire_step(entity, "", json!({"workflow": "invoice", "step": "pay", "input": input})).await
    }

    async fn fire_step(&self, entity: &str, query: &str, body: Value) -> Answer {
        ask("POST", &format!("/v1/claims/{entity}/fire{query}")).json(body).of(&self.running).await
    }

    async fn get(&self, path: &str) -> Answer {
        ask("GET", &format!("/v1{path}")).of(&self.running).await
    }

    /// Waits until a page has this many items.
    async fn until(&self, path: &str, count: usize) -> Value {
        loop {
            let items = self.get(path).await.json()["items"].clone();
            if items.as_array().unwrap().len() == count {
                return items;
            }
            tokio::task::yield_now().await;
        }
    }
}

#[tokio::test]
async fn a_step_is_fired_and_shown() {
    let served = served().await;
    served.add("i-1").await;
    let permitted = served.get("/claims/i-1/permitted?workflow=invoice&requester=admin").await.json();
    assert_eq!((&permitted["status"], &permitted["steps"]), (&json!("sent"), &json!(["pay"])));
    assert_eq!(permitted["others"], json!([{"step": "book", "reasons": [{"reason": "status", "expected": ["paid"]}]}]));
    let body =
        json!({"workflow": "invoice", "step": "pay", "requester": "admin", "actor": "ada", "input": {"amount": 7}});
    let fired = served.fire_step("i-1", "", body).await;
    assert_eq!(fired.status, 200, "{fired:?}");
    assert_eq!(
        fired.json(),
        json!({"outcome": "done", "from": "sent", "to": "paid", "rev": 3, "output": {"paid": 7}, "is_recovered": false})
    );
    let entity = served.get("/entities/i-1").await.json();
    assert_eq!(entity["data"], json!({"status": "paid", "amount": 7, "actor": "ada"}));
    let shown = served.get("/claims/i-1").await.json();
    assert_eq!((&shown["entity"], &shown["claim"]), (&json!("i-1"), &json!(null)));
    let history = served.get("/claims/i-1/history").await.json();
    assert_eq!(history["items"], shown["history"]);
    let change = &history["items"][0];
    assert_eq!(
        (&change["kind"], &change["requester"], &change["actor"]),
        (&json!("done"), &json!("admin"), &json!("ada"))
    );
    assert!(change["at"].as_str().unwrap().ends_with('Z'), "{change}");
    assert_eq!(served.get("/claims/i-1?events=0").await.json()["history"], json!([]));
    served.get("/claims/i-1?events=1001").await.is_problem(400, "invalid-query");
    served.get("/claims/i-2").await.is_problem(404, "not-found");
}

#[tokio::test]
async fn what_an_action_says_is_answered() {
    let served = served().await;
    served.add("i-1").await;
    let failed = served.fire("i-1", json!({"end": "failure"})).await;
    assert_eq!(failed.is_problem(422, "action-failed")["detail"], "the card was refused");
    let rejected = served.fire("i-1", json!({"end": "rejection"})).await;
    assert_eq!(rejected.is_problem(422, "action-rejected")["field"], "amount");
    let wrong = served.fire("i-1", json!({"end": "error"})).await;
    assert_eq!(wrong.is_problem(500, "action-error")["action"], "Pay");
    assert!(!wrong.text.contains("passwords"), "{wrong:?}");
    assert_eq!(served.get("/entities/i-1").await.json()["data"], json!({"status": "sent"}));
    let step = |step: &str| json!({"workflow": "invoice", "step": step});
    let refused = served.fire_step("i-1", "", step("book")).await;
    let refused = refused.is_problem(409, "not-permitted");
    assert_eq!((&refused["entity_status"], &refused["reasons"][0]["reason"]), (&json!("sent"), &json!("status")));
    let unknown = served.fire_step("i-1", "", step("burn")).await;
    assert_eq!(unknown.is_problem(404, "not-found")["known"], json!(["book", "pay"]));
    let unknown = served.fire_step("i-1", "", json!({"workflow": "x", "step": "pay"})).await;
    assert_eq!(unknown.is_problem(404, "not-found")["known"], json!(["invoice"]));
    assert_eq!(served.fire("i-2", json!({})).await.is_problem(404, "not-found")["id"], "i-2");
    // A program without claims has no workflows.
    let running = start().await;
    let fire = ask("POST", "/v1/claims/i-1/fire").json(step("pay")).of(&running).await;
    fire.is_problem(404, "not-found");
    assert_eq!(ask("GET", "/v1/claims").of(&running).await.json(), json!({"items": [], "next": null}));
}

#[tokio::test]
async fn one_of_several_callers_runs_the_action() {
    let served = served().await;
    served.add("i-1").await;
    served.add("i-2").await;
    let body = json!({"workflow": "invoice", "step": "pay", "actor": "ada", "input": {"wait": true, "amount": 1}});
    for entity in ["i-1", "i-2"] {
        let running = served.fire_step(entity, "?wait=50ms", body.clone()).await;
        assert_eq!((running.status, running.header("retry-after")), (202, Some("1")), "{running:?}");
        assert_eq!(
            running.json(),
            json!({"outcome": "running", "entity": entity, "workflow": "invoice", "step": "pay"})
        );
    }
    let loser = served.fire("i-1", json!({})).await;
    let problem = loser.is_problem(409, "claimed");
    assert_eq!((&problem["entity_status"], &problem["holder"]["actor"]), (&json!("paying"), &json!("ada")));
    assert!(problem["holder"]["lease_left_ms"].is_u64() && loser.header("retry-after").is_some(), "{problem}");
    let shown = served.get("/claims/i-1").await.json()["claim"].clone();
    for (field, value) in [
        ("entity", json!("i-1")),
        ("action", json!("Pay")),
        ("claim_into", json!("paying")),
        ("revert_to", json!("sent")),
        ("successful_state", json!("paid")),
        ("attempts", json!(1)),
        ("needs_review", json!(null)),
    ] {
        assert_eq!(shown[field], value, "{field}");
    }
    let first = served.get("/claims?limit=1").await;
    assert_eq!(first.json()["items"][0]["entity"], "i-1");
    let next = first.json()["next"].as_str().unwrap().to_string();
    assert_eq!(first.header("link"), Some(format!("<?limit=1&after={next}>; rel=\"next\"").as_str()));
    let second = served.get(&format!("/claims?limit=1&after={next}")).await.json();
    assert_eq!(second["items"][0]["entity"], "i-2");
    served.get(&format!("/claims/i-1/history?after={next}")).await.is_problem(400, "invalid-cursor");
    served.gate.add_permits(2);
    served.until("/claims/i-1/history", 1).await;
    served.until("/claims/i-2/history", 1).await;
}

#[tokio::test]
async fn a_firing_under_a_key_is_made_once_and_asked_for_again() {
    let served = served().await;
    served.add("i-1").await;
    let call = |wait: &str| {
        let body = json!({"workflow": "invoice", "step": "pay", "input": {"wait": true, "amount": 1}});
        let path = format!("/v1/claims/i-1/fire?wait={wait}");
        ask("POST", &path).header("idempotency-key", "k").json(body)
    };
    // The time is a part of the request.
    let running = call("100ms").of(&served.running).await;
    assert_eq!(running.status, 202, "{running:?}");
    assert_eq!(served.get("/claims/i-1").await.json()["claim"]["actor"], json!(null), "the mark is not shown");
    let again = call("100ms").of(&served.running).await;
    assert_eq!((again.status, again.header("idempotent-replayed")), (202, None), "{again:?}");
    served.gate.add_permits(1);
    served.until("/claims/i-1/history", 1).await;
    let done = call("100ms").of(&served.running).await.json();
    let expected = json!({
        "outcome": "done", "from": "sent", "to": "paid", "rev": 3, "output": {"paid": 1}, "is_recovered": true,
    });
    assert_eq!(done, expected);
    let replayed = call("100ms").of(&served.running).await;
    assert_eq!((replayed.json(), replayed.header("idempotent-replayed")), (expected, Some("true")));
    assert_eq!(served.get("/claims/i-1/history").await.json()["items"].as_array().unwrap().len(), 1);
    assert_eq!(served.get("/claims/i-1/history").await.json()["items"][0]["actor"], json!(null));
}

#[tokio::test]
async fn an_operator_ends_claims() {
    // A program that dies while its action runs, without a word.
    let (store, gate) = (Store::memory().await.unwrap(), Arc::new(Semaphore::new(0)));
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let dead = {
        let (store, gate) = (store.clone(), gate.clone());
        let started = runtime.spawn(async move {
            let engine = Engine::on(&store).start().await.unwrap();
            let claims = claims_on(&engine, &gate).await;
            for id in ["a", "b", "c", "d"] {
                claims.add("invoice", Add::new("invoice").id(id).data(json!({"status": "sent"}))).await.unwrap();
                let fire = claims.fire("invoice", "pay", id).input(json!({"wait": true}));
                tokio::spawn(std::future::IntoFuture::into_future(fire));
            }
            while claims.operate().await.unwrap().stored().list().await.unwrap().items.len() < 4 {
                tokio::task::yield_now().await;
            }
            (engine, claims)
        });
        started.await.unwrap()
    };
    runtime.shutdown_background();
    let engine = Engine::on(&store).start().await.unwrap();
    std::mem::forget(dead);
    gate.add_permits(100);
    let claims = claims_on(&engine, &gate).await;
    let running = start_api(engine.clone(), Api::on(&engine).claims(&claims)).await;
    let served = Served { running, claims, gate };
    let open = served.until("/claims?needs_review=true", 4).await;
    assert_eq!(open[0]["needs_review"], "its process is gone");

    let change = |entity: &str, verb: &str, key: &str| {
        let path = format!("/v1/claims/{entity}/{verb}");
        ask("POST", &path).header("idempotency-key", key).json(json!({"reason": "the bank says so", "actor": "ada"}))
    };
    for (entity, verb, status) in [("a", "release", "sent"), ("b", "complete", "paid"), ("c", "retry", "paying")] {
        let changed = change(entity, verb, verb).of(&served.running).await;
        assert_eq!(changed.status, 200, "{changed:?}");
        let told = changed.json();
        assert_eq!((&told["status"], &told["claim"]["entity"]), (&json!(status), &json!(entity)), "{told}");
        assert_eq!((&told["actor"], &told["reason"]), (&json!("ada"), &json!("the bank says so")));
        let again = change(entity, verb, verb).of(&served.running).await;
        assert_eq!((again.header("idempotent-replayed"), &again.text), (Some("true"), &changed.text));
    }
    let history = served.get("/claims/a/history").await.json()["items"][0].clone();
    assert_eq!((&history["kind"], &history["reason"]), (&json!("released"), &json!("the bank says so")));
    // The action of the claim on c runs again, and ends.
    served.until("/claims", 1).await;
    assert_eq!(served.get("/entities/c").await.json()["data"]["status"], "paid");
    change("a", "release", "other").of(&served.running).await.is_problem(404, "not-found");
    let no_reason = ask("POST", "/v1/claims/d/release").json(json!({"reason": ""})).of(&served.running).await;
    no_reason.is_problem(400, "invalid");
    let by_name = ask("POST", "/v1/claims/d/release").json(json!({"reason": "x"})).of(&served.running).await;
    assert_eq!(by_name.json()["actor"], "operator");
    assert_eq!(served.fire("d", json!({"wait": true, "amount": 1})).await.status, 200);
}

#[tokio::test]
async fn a_claim_that_runs_cannot_be_completed() {
    let served = served().await;
    served.add("i-1").await;
    let body = json!({"workflow": "invoice", "step": "pay", "input": {"wait": true}});
    assert_eq!(served.fire_step("i-1", "?wait=50ms", body).await.status, 202);
    for verb in ["complete", "retry"] {
        let path = format!("/v1/claims/i-1/{verb}");
        let refused = ask("POST", &path).json(json!({"reason": "x"})).of(&served.running).await;
        refused.is_problem(409, "conflict");
    }
    served.gate.add_permits(1);
}

#[tokio::test]
async fn dead_letters_are_listed_and_delivered_again() {
    let served = served().await;
    served.add("i-1").await;
    assert_eq!(served.fire("i-1", json!({"amount": 7})).await.status, 200);
    let letter = served.until("/claim-outbox/dead", 1).await[0].clone();
    for (field, value) in [
        ("name", json!("Print")),
        ("workflow", json!("invoice")),
        ("entity", json!("i-1")),
        ("from", json!("sent")),
        ("to", json!("paid")),
        ("input", json!({"amount": 7})),
        ("output", json!({"paid": 7})),
        ("attempts", json!(1)),
        ("error", json!("no paper")),
    ] {
        assert_eq!(letter[field], value, "{field}");
    }
    assert_eq!(served.get("/claim-outbox").await.json()["items"], json!([]));
    let key = letter["key"].as_str().unwrap();
    let encoded: String = key.bytes().map(|byte| format!("%{byte:02X}")).collect();
    let path = format!("/v1/claim-outbox/dead/{encoded}/retry");
    let retried = ask("POST", &path).header("idempotency-key", "k").of(&served.running).await;
    assert_eq!((retried.status, retried.json()), (200, json!({"key": key})), "{retried:?}");
    let again = ask("POST", &path).header("idempotency-key", "k").of(&served.running).await;
    assert_eq!((again.status, again.header("idempotent-replayed")), (200, Some("true")));
    // There is no paper yet.
    served.until("/claim-outbox/dead", 1).await;
    let missing = ask("POST", "/v1/claim-outbox/dead/none/retry").of(&served.running).await;
    missing.is_problem(404, "not-found");
}

#[tokio::test]
async fn configurations_are_checked_and_drawn() {
    let running = start().await;
    let validate = |text: String| {
        let ask = ask("POST", "/v1/claim-configurations:validate").header("content-type", "application/json");
        ask.body(text.into_bytes())
    };
    let good = json!(invoice());
    let checked = validate(good.to_string()).of(&running).await;
    assert_eq!((checked.status, &checked.json()["is_valid"]), (200, &json!(true)), "{checked:?}");
    let wrong =
        format!("\n{}", good.to_string().replace("\"successful_state\":\"paid\"", "\"successful_state\":\"payed\""));
    let checked = validate(wrong.clone()).of(&running).await.json();
    assert_eq!(checked["is_valid"], false);
    let mut findings = checked["findings"].as_array().unwrap().iter();
    let finding = findings.find(|finding| finding["rule"] == "unknown_status").unwrap();
    assert_eq!((&finding["severity"], &finding["position"]["line"]), (&json!("error"), &json!(2)), "{finding}");
    let no_json = validate("this is not JSON".into()).of(&running).await;
    assert_eq!((no_json.status, &no_json.json()["findings"][0]["rule"]), (200, &json!("format")));
    validate("[".repeat(200)).of(&running).await.is_problem(400, "too-deep");
    let text = ask("POST", "/v1/claim-configurations:validate").body(b"{}".to_vec()).of(&running).await;
    text.is_problem(415, "media-type");

    let draw = |body: Value| ask("POST", "/v1/claim-configurations:diagram").json(body);
    let drawn = draw(json!({"configuration": good})).of(&running).await.json();
    assert_eq!(drawn["workflow"], "invoice");
    assert!(drawn["mermaid"].as_str().unwrap().contains("state \"paying\" as s1:::claiming"), "{drawn}");
    let mut other = good.clone();
    other["workflow"] = json!("credit note");
    let two = json!([good, other]);
    let choose = draw(json!({"configuration": two})).of(&running).await;
    assert_eq!(choose.is_problem(400, "invalid")["known"], json!(["invoice", "credit note"]));
    let chosen = draw(json!({"configuration": two, "workflow": "credit note"})).of(&running).await.json();
    assert_eq!(chosen["workflow"], "credit note");
    draw(json!({"configuration": two, "workflow": "x"})).of(&running).await.is_problem(404, "not-found");
    let wrong: Value = serde_json::from_str(&wrong).unwrap();
    let refused = draw(json!({"configuration": wrong})).of(&running).await;
    assert_eq!(refused.is_problem(400, "invalid")["findings"][0]["severity"], "error");
    let schema = ask("GET", "/v1/claim-configurations/schema").of(&running).await.json();
    assert!(schema["$defs"]["Step"].is_object(), "{schema}");
}
