//! Workers: endpoints that are called, slow, broken or hostile, and workers that take tasks, for steps of workflows,
//! claim actions and after-effects.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::{HeaderMap, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use latchwork::claim::{ClaimStep, ClaimWorkflow, Claims};
use latchwork::entity::Add;
use latchwork::store::Store;
use latchwork::workflow::Engine;
use latchwork::{Value, json};
use latchwork_server::{Api, Endpoint, EndpointLimits, Workers};
use parking_lot::Mutex;

use crate::client::{Answer, Running, ask, start_api};

const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

/// A call as an endpoint got it.
#[derive(Clone)]
struct Got {
    headers: HeaderMap,
    body: Bytes,
}

impl Got {
    fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }

    fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }
}

/// An endpoint of the test: what it answers to the call of this number, counted from 1.
struct Fake {
    url: String,
    got: Arc<Mutex<Vec<Got>>>,
}

enum Says {
    Status(u16, Value),
    With(u16, &'static str, String),
    Text(&'static str),
    Hangs,
}

async fn fake(says: impl Fn(usize, &Got) -> Says + Send + Sync + 'static) -> Fake {
    let got: Arc<Mutex<Vec<Got>>> = Arc::default();
    let (kept, says) = (got.clone(), Arc::new(says));
    let handler = move |headers: HeaderMap, body: Bytes| {
        let (kept, says) = (kept.clone(), says.clone());
        async move {
            let got = Got { headers, body };
            let number = {
                let mut all = kept.lock();
                all.push(got.clone());
                all.len()
            };
            match says(number, &got) {
                Says::Status(status, body) => answer(status, body.to_string()),
                Says::With(status, name, value) => {
                    Response::builder().status(status).header(name, value).body(Body::empty()).unwrap()
                }
                Says::Text(text) => answer(200, text.into()),
                Says::Hangs => std::future::pending().await,
            }
        }
    };
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/work?x=1", listener.local_addr().unwrap());
    let app = Router::new().fallback(handler);
    tokio::spawn(async move { axum::serve(listener, app).await });
    Fake { url, got }
}

fn answer(status: u16, text: String) -> Response<Body> {
    Response::builder().status(status).body(Body::from(text)).unwrap()
}

fn endpoint(url: &str) -> Endpoint {
    let mut limits = EndpointLimits::default();
    (limits.timeout, limits.attempts) = (Duration::from_millis(400), 4);
    (limits.pause, limits.answer_bytes) = (Duration::from_millis(10), 2000);
    Endpoint::builder(url).secret(SECRET).limits(limits).build().unwrap()
}

/// A server whose workflow `order` has one step, done at this address.
async fn with_step(url: &str) -> Running {
    let store = Store::memory().await.unwrap();
    let workers = Workers::on(&store);
    let worker = workers.endpoint(&endpoint(url));
    let workers = workers.workflow("order", [("charge", worker)]);
    let engine = workers.register(Engine::on(&store)).start().await.unwrap();
    start_api(engine.clone(), Api::on(&engine).workers(&workers)).await
}

async fn post(running: &Running, path: &str, body: Value) -> Answer {
    ask("POST", &format!("/v1{path}")).json(body).of(running).await
}

/// Starts an execution, and waits for its end.
async fn result(running: &Running, workflow: &str, input: Value) -> Value {
    let started = post(running, "/workflows", json!({"workflow": workflow, "id": "x", "input": input})).await;
    assert_eq!(started.status, 201, "{started:?}");
    ask("GET", "/v1/workflows/x/result?wait=30s").of(running).await.json()
}

/// Whether the signature is right, as a receiver checks it, apart from the code that signs.
fn is_signed(got: &Got) -> bool {
    let key = STANDARD.decode(SECRET.strip_prefix("whsec_").unwrap()).unwrap();
    let mut mac = <Hmac<sha2::Sha256>>::new_from_slice(&key).unwrap();
    mac.update(got.header("webhook-id").as_bytes());
    mac.update(b".");
    mac.update(got.header("webhook-timestamp").as_bytes());
    mac.update(b".");
    mac.update(&got.body);
    let given = got.header("webhook-signature").strip_prefix("v1,").unwrap();
    mac.verify_slice(&STANDARD.decode(given).unwrap()).is_ok()
}

#[tokio::test]
async fn an_endpoint_that_fails_twice_is_called_three_times_under_one_key() {
    let fake = fake(|number, _| match number {
        1 => Says::Status(500, json!({})),
        2 => Says::With(503, "retry-after", "0".into()),
        _ => Says::Status(200, json!({"receipt": 7})),
    });
    let fake = fake.await;
    let running = with_step(&fake.url).await;
    let ended = result(&running, "order", json!({"price": 5})).await;
    assert_eq!((&ended["status"], &ended["output"]), (&json!("completed"), &json!({"receipt": 7})), "{ended}");
    let got = fake.got.lock().clone();
    let attempts: Vec<&str> = got.iter().map(|got| got.header("latchwork-attempt")).collect();
    let tokens: Vec<&str> = got.iter().map(|got| got.header("latchwork-token")).collect();
    assert_eq!((attempts, tokens), (vec!["1", "2", "3"], vec!["1", "2", "3"]));
    for call in &got {
        assert!(is_signed(call));
        assert_eq!(call.header("idempotency-key"), got[0].header("idempotency-key"));
        assert_eq!(call.header("webhook-id"), got[0].header("webhook-id"));
        let body = call.json();
        assert_eq!((&body["kind"], &body["input"]), (&json!("charge"), &json!({"input": {"price": 5}, "results": {}})));
        assert_eq!(body["key"], call.header("idempotency-key"));
    }
    let mut changed = got[0].clone();
    changed.body = Bytes::from_static(b"{}");
    assert!(!is_signed(&changed), "another body has another signature");
}

#[tokio::test]
async fn an_endpoint_that_hangs_is_called_again() {
    let fake = fake(|number, _| if number == 1 { Says::Hangs } else { Says::Status(200, json!(1)) }).await;
    let running = with_step(&fake.url).await;
    assert_eq!(result(&running, "order", json!(null)).await["output"], 1);
    assert_eq!(fake.got.lock().len(), 2);
}

#[tokio::test]
async fn what_an_endpoint_refuses_has_failed_for_good() {
    let fake = fake(|_, _| Says::Status(422, json!({"detail": "the card was refused", "code": "E7"}))).await;
    let running = with_step(&fake.url).await;
    let ended = result(&running, "order", json!(null)).await;
    let failure = &ended["failure"];
    assert_eq!((&failure["code"], &ended["status"]), (&json!("E7"), &json!("failed")), "{ended}");
    assert!(failure["message"].as_str().unwrap().contains("the card was refused"), "{ended}");
    assert_eq!(fake.got.lock().len(), 1);
}

#[tokio::test]
async fn garbage_is_no_result() {
    let fake = fake(|number, _| if number < 3 { Says::Text("<html>") } else { Says::Text(" ") }).await;
    let running = with_step(&fake.url).await;
    let ended = result(&running, "order", json!(null)).await;
    assert_eq!((&ended["status"], &ended["output"]), (&json!("completed"), &json!(null)));
    assert_eq!(fake.got.lock().len(), 3);
}

#[tokio::test]
async fn an_answer_over_the_limit_is_refused() {
    let fake = fake(|_, _| Says::Status(200, json!("x".repeat(3000)))).await;
    let running = with_step(&fake.url).await;
    assert_eq!(result(&running, "order", json!(null)).await["failure"]["code"], "endpoint-answer");
    assert_eq!(fake.got.lock().len(), 1);
}

#[tokio::test]
async fn a_redirect_is_not_followed() {
    let other = fake(|_, _| Says::Status(200, json!("elsewhere"))).await;
    let place = other.url.clone();
    let fake = fake(move |_, _| Says::With(307, "location", place.clone())).await;
    let running = with_step(&fake.url).await;
    let ended = result(&running, "order", json!(null)).await;
    assert_eq!((&ended["status"], &ended["failure"]["code"]), (&json!("failed"), &json!("endpoint-307")), "{ended}");
    assert_eq!((fake.got.lock().len(), other.got.lock().len()), (4, 0));
}

#[tokio::test]
async fn an_endpoint_that_is_gone_fails_after_its_attempts() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/", listener.local_addr().unwrap());
    drop(listener);
    let ended = result(&with_step(&url).await, "order", json!(null)).await;
    assert_eq!(ended["failure"]["code"], "endpoint-unreachable", "{ended}");
}

/// A server with a workflow whose steps are done by workers that take tasks.
async fn with_tasks(store: &Store) -> Running {
    let workers = Workers::on(store);
    let (charge, ship) = (workers.tasks("charge"), workers.tasks("ship"));
    let workers = workers.workflow("order", [("charge", charge), ("ship", ship)]);
    let engine = workers.register(Engine::on(store)).start().await.unwrap();
    start_api(engine.clone(), Api::on(&engine).workers(&workers)).await
}

async fn take(running: &Running, kind: &str) -> Value {
    let taken = post(running, "/tasks:take?wait=30s", json!({"kinds": [kind]})).await;
    taken.json()["tasks"][0].clone()
}

fn path(task: &Value, verb: &str) -> String {
    format!("/tasks/{}/{verb}", task["id"].as_str().unwrap())
}

#[tokio::test]
async fn a_workflow_without_rust_is_done_by_workers_across_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let store = Store::open(directory.path()).await.unwrap();
    let running = with_tasks(&store).await;
    let new = json!({"workflow": "order", "id": "x", "input": {"price": 5}});
    assert_eq!(post(&running, "/workflows", new).await.status, 201);
    let first = take(&running, "charge").await;
    assert_eq!(first["input"], json!({"input": {"price": 5}, "results": {}}));
    while ask("GET", "/v1/workflows/x").of(&running).await.json()["waits"][0]["for"] != "completion" {
        tokio::task::yield_now().await;
    }
    // The server ends while the worker is at it.
    running.server.shutdown().await.unwrap();
    store.close().await.unwrap();
    drop((store, running.engine));
    let store = Store::open(directory.path()).await.unwrap();
    let running = with_tasks(&store).await;
    let done = json!({"token": first["token"], "output": {"receipt": 7}});
    assert_eq!(post(&running, &path(&first, "complete"), done).await.status, 200);
    let second = take(&running, "ship").await;
    assert_eq!(second["input"]["results"], json!({"charge": {"receipt": 7}}));
    post(&running, &path(&second, "complete"), json!({"token": second["token"], "output": "sent"})).await;
    let ended = ask("GET", "/v1/workflows/x/result?wait=30s").of(&running).await.json();
    assert_eq!((&ended["status"], &ended["output"]), (&json!("completed"), &json!("sent")));
}

#[tokio::test]
async fn a_task_that_fails_for_good_fails_its_step() {
    let running = with_tasks(&Store::memory().await.unwrap()).await;
    post(&running, "/workflows", json!({"workflow": "order", "id": "x"})).await;
    let task = take(&running, "charge").await;
    let failed = json!({"token": task["token"], "message": "no such card", "code": "E7", "retryable": false});
    assert_eq!(post(&running, &path(&task, "fail"), failed).await.json()["state"], "failed");
    let ended = ask("GET", "/v1/workflows/x/result?wait=30s").of(&running).await.json();
    assert_eq!((&ended["status"], &ended["failure"]["code"]), (&json!("failed"), &json!("E7")), "{ended}");
}

#[tokio::test]
async fn a_cancelled_execution_withdraws_its_task() {
    let running = with_tasks(&Store::memory().await.unwrap()).await;
    post(&running, "/workflows", json!({"workflow": "order", "id": "x"})).await;
    let task = take(&running, "charge").await;
    assert!(post(&running, "/workflows/x/cancel", json!({"reason": "why"})).await.status < 300);
    let ended = ask("GET", "/v1/workflows/x/result?wait=30s").of(&running).await.json();
    assert_eq!(ended["status"], "cancelled", "{ended}");
    let late = post(&running, &path(&task, "complete"), json!({"token": task["token"]})).await;
    assert_eq!(late.is_problem(409, "lease-lost")["state"], "cancelled");
}

fn invoice() -> ClaimWorkflow {
    let mut pay = ClaimStep::new(10, "pay", "sent", "paid").claimed("paying").action("Pay").after("Print");
    pay.lease = Some(Duration::from_millis(300));
    ClaimWorkflow::new("invoice", "billing", "invoice").statuses(["sent", "paying", "paid"]).step(pay)
}

/// A server with invoice `i`, which is paid and printed by workers.
async fn with_claims(pay: Option<&str>, print: Option<&str>) -> (Running, Claims) {
    let store = Store::memory().await.unwrap();
    let workers = Workers::on(&store);
    let worker = |url: Option<&str>, kind: &str| match url {
        Some(url) => workers.endpoint(&endpoint(url)),
        None => workers.tasks(kind),
    };
    let (pay, print) = (worker(pay, "pay"), worker(print, "print"));
    let workers = workers.action("Pay", pay).after_effect("Print", print);
    let engine = workers.register(Engine::on(&store)).start().await.unwrap();
    let claims = workers.serve(Claims::on(&engine).workflow(invoice()).sweep_every(Duration::from_millis(50)));
    let claims = claims.start().await.unwrap();
    claims.add("invoice", Add::new("invoice").id("i").data(json!({"status": "sent", "n": 1}))).await.unwrap();
    let running = start_api(engine.clone(), Api::on(&engine).workers(&workers).claims(&claims)).await;
    (running, claims)
}

fn fire(running: &Running) -> impl Future<Output = Answer> + Send + use<> {
    let body = json!({"workflow": "invoice", "step": "pay", "requester": "admin", "input": {"amount": 7}});
    let (place, fire) = (running.place.clone(), ask("POST", "/v1/claims/i/fire").json(body));
    async move { fire.at(&place).await }
}

#[tokio::test]
async fn an_action_and_an_after_effect_are_done_at_endpoints() {
    let pay = fake(|number, _| match number {
        1 => Says::Status(500, json!({})),
        _ => Says::Status(200, json!({"output": {"receipt": 1}, "data": {"n": 2}})),
    });
    let print = fake(|_, _| Says::Status(200, json!(null)));
    let (pay, print) = (pay.await, print.await);
    let (running, _claims) = with_claims(Some(&pay.url), Some(&print.url)).await;
    let fired = fire(&running).await;
    assert_eq!((fired.status, &fired.json()["output"]), (200, &json!({"receipt": 1})), "{fired:?}");
    let entity = ask("GET", "/v1/entities/i").of(&running).await.json();
    assert_eq!(entity["data"], json!({"status": "paid", "n": 2}));
    let paid = pay.got.lock().clone();
    assert_eq!((paid.len(), paid[0].header("idempotency-key")), (2, paid[1].header("idempotency-key")));
    // The claim's token is the rev of the claimed entity.
    assert_eq!((paid[1].header("latchwork-token"), paid[1].header("latchwork-attempt")), ("2", "2"));
    let asked = paid[0].json();
    assert_eq!((&asked["kind"], &asked["input"]["input"]), (&json!("Pay"), &json!({"amount": 7})));
    let entity = json!({"id": "i", "type": "invoice", "data": {"status": "paying", "n": 1}});
    assert_eq!((&asked["input"]["entity"], &asked["input"]["requester"]), (&entity, &json!("admin")));
    let printed = loop {
        let first = print.got.lock().first().cloned();
        match first {
            Some(printed) => break printed,
            None => tokio::task::yield_now().await,
        }
    };
    assert!(is_signed(&printed));
    let told = printed.json();
    assert_eq!((&told["kind"], &told["input"]["to"]), (&json!("Print"), &json!("paid")));
    assert_eq!(told["input"]["output"], json!({"receipt": 1}));
}

#[tokio::test]
async fn what_an_action_answers_decides() {
    for (says, status, code) in [
        (json!({"outcome": "failure", "message": "no money"}), 422, "action-failed"),
        (json!({"outcome": "rejection", "message": "wrong", "field": "amount"}), 422, "action-rejected"),
        (json!({"outcme": "failure"}), 500, "action-error"),
    ] {
        let pay = fake(move |_, _| Says::Status(200, says.clone())).await;
        let (running, _claims) = with_claims(Some(&pay.url), None).await;
        fire(&running).await.is_problem(status, code);
        assert_eq!(ask("GET", "/v1/entities/i").of(&running).await.json()["data"]["status"], "sent");
    }
    let pay = fake(|_, _| Says::Status(403, json!({"message": "not you"}))).await;
    let (running, _claims) = with_claims(Some(&pay.url), None).await;
    assert_eq!(fire(&running).await.is_problem(422, "action-failed")["detail"], "not you");
}

#[tokio::test]
async fn an_action_and_an_after_effect_are_done_by_workers_that_take_tasks() {
    let (running, _claims) = with_claims(None, None).await;
    let fired = tokio::spawn(fire(&running));
    let task = take(&running, "pay").await;
    assert_eq!((&task["input"]["step"], &task["input"]["input"]), (&json!("pay"), &json!({"amount": 7})));
    // Longer than the lease of the claim: the claim is renewed while the worker is at it.
    running.engine.store().env().sleep(Duration::from_millis(700)).await;
    let output = json!({"output": "paid", "data": {"n": 9}});
    let done = post(&running, &path(&task, "complete"), json!({"token": task["token"], "output": output})).await;
    assert_eq!(done.status, 200, "{done:?}");
    let fired = fired.await.unwrap();
    assert_eq!((fired.status, &fired.json()["output"]), (200, &json!("paid")), "{fired:?}");
    assert_eq!(ask("GET", "/v1/entities/i").of(&running).await.json()["data"], json!({"status": "paid", "n": 9}));
    let effect = take(&running, "print").await;
    assert_eq!((&effect["input"]["to"], &effect["input"]["entity"]), (&json!("paid"), &json!("i")));
}

#[tokio::test]
async fn a_worker_whose_claim_was_released_is_refused() {
    let (running, _claims) = with_claims(None, None).await;
    let fired = tokio::spawn(fire(&running));
    let task = take(&running, "pay").await;
    let released = post(&running, "/claims/i/release", json!({"reason": "the bank is closed"})).await;
    assert_eq!(released.status, 200, "{released:?}");
    let late = post(&running, &path(&task, "complete"), json!({"token": task["token"], "output": {}})).await;
    late.is_problem(409, "lease-lost");
    assert_ne!(fired.await.unwrap().status, 200);
    assert_eq!(ask("GET", "/v1/entities/i").of(&running).await.json()["data"]["status"], "sent");
    // Another firing is another task.
    let fired = tokio::spawn(fire(&running));
    let again = take(&running, "pay").await;
    assert_ne!(again["id"], task["id"]);
    post(&running, &path(&again, "complete"), json!({"token": again["token"]})).await;
    assert_eq!(fired.await.unwrap().status, 200);
}
