//! Executions over HTTP: starts, messages, waits, operators, lists.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use latchwork::workflow::{Ctx, Engine, Failure, Retry, workflow};
use latchwork::{Value, json};
use latchwork_server::{Api, Server};
use tempfile::TempDir;

use crate::client::{Answer, address, ask, free};

/// A server with workflows.
pub(crate) struct Shop {
    pub(crate) server: Server,
    pub(crate) engine: Engine,
    pub(crate) place: String,
    _directory: TempDir,
}

pub(crate) async fn shop() -> Shop {
    let double = workflow("double").run(async |ctx: Ctx, number: u64| {
        let doubled = ctx.run("multiply", async || Ok(number * 2)).await?;
        Ok(doubled)
    });
    let account = workflow("account");
    let account = account.validate("add", |_, amount: &i64| match amount {
        0 => Err(Failure::new("nothing to add").with_code("account.nothing")),
        _ => Ok(()),
    });
    let account = account.run(async |ctx: Ctx, mut sum: i64| {
        ctx.publish("sum", &sum).await?;
        loop {
            let add = ctx.receive_update::<i64, i64>("add").await?;
            sum += add.value;
            ctx.publish("sum", &sum).await?;
            add.answer(&sum).await?;
            if sum >= 100 {
                return Ok(sum);
            }
        }
    });
    let order = workflow("order").run(async |ctx: Ctx, item: String| {
        let cents: u64 = ctx.receive("paid").await?;
        let decision = ctx.review("ship", &format!("Ship {item}?"), ["yes", "no"]).await?;
        Ok(format!("{item} for {cents}: {}", decision.option))
    });
    let sold_out = workflow("sold-out")
        .run(async |_: Ctx, _: ()| Err::<(), _>(Failure::new("sold out").with_code("shop.sold_out")));
    let tries = Arc::new(AtomicU32::new(0));
    let flaky = workflow("flaky").run(move |ctx: Ctx, _: ()| {
        let tries = tries.clone();
        async move {
            let step = ctx.run("call", || {
                let tried = tries.fetch_add(1, Ordering::SeqCst);
                std::future::ready(if tried == 0 { Err(Failure::new("the line is busy")) } else { Ok(tried) })
            });
            let hour = Duration::from_secs(3600);
            step.retry(Retry::exponential().first_pause(hour).longest_pause(hour)).await
        }
    });
    let runs = Arc::new(AtomicU32::new(0));
    let brittle = workflow("brittle").run(move |_: Ctx, _: ()| {
        let runs = runs.clone();
        async move {
            assert!(runs.fetch_add(1, Ordering::SeqCst) > 0, "the first run breaks");
            Ok("mended".to_string())
        }
    });
    let single = workflow("single").concurrency(1).run(async |ctx: Ctx, _: ()| ctx.receive::<()>("go").await);
    let guarded = workflow("guarded").run(async |ctx: Ctx, _: ()| {
        let _till = ctx.mutex("till").acquire().await?;
        ctx.receive::<()>("go").await
    });
    let directory = tempfile::tempdir().unwrap();
    let engine = Engine::open(directory.path()).register(&double).register(&account).register(&order);
    let engine = engine.register(&sold_out).register(&flaky).register(&brittle).register(&single).register(&guarded);
    let engine = engine.start().await.unwrap();
    let server = Server::builder().namespace("default", Api::on(&engine)).listen(free()).start().await.unwrap();
    let place = address(&server);
    Shop { server, engine, place, _directory: directory }
}

impl Shop {
    pub(crate) async fn get(&self, path: &str) -> Answer {
        ask("GET", path).at(&self.place).await
    }

    pub(crate) async fn post(&self, path: &str, body: Value) -> Answer {
        ask("POST", path).json(body).at(&self.place).await
    }

    pub(crate) async fn start(&self, body: Value) -> String {
        let started = self.post("/v1/workflows", body).await;
        assert_eq!(started.status, 201, "{started:?}");
        started.json()["id"].as_str().unwrap().to_string()
    }

    /// Waits until an execution waits for something.
    pub(crate) async fn waits(&self, id: &str, what: &str) {
        for _ in 0..1000 {
            let found = self.get(&format!("/v1/workflows/{id}?events=0")).await.json();
            let waits = found["waits"].as_array().unwrap().clone();
            if waits.iter().any(|wait| wait["for"] == what) {
                return;
            }
            self.engine.store().env().sleep(Duration::from_millis(10)).await;
        }
        panic!("execution {id} does not wait for {what}");
    }
}

#[tokio::test]
async fn an_execution_is_started_and_has_a_result() {
    let shop = shop().await;
    let new = json!({
        "workflow": "double", "input": 21, "id": "d/1", "tags": ["vip"],
        "attributes": {"shop": "north", "price": 4.5, "due": {"time": "2026-11-30T12:00:00Z"}},
    });
    let started = shop.post("/v1/workflows", new.clone()).await;
    assert_eq!((started.status, started.json()), (201, json!({"id": "d/1", "item": null, "result": null})));
    assert_eq!(started.header("location"), Some("workflows/d%2F1"));
    let result = shop.get("/v1/workflows/d%2F1/result?wait=30s").await;
    let ended = json!({
        "id": "d/1", "workflow": "double", "status": "completed", "output": 42, "reason": null, "failure": null,
    });
    assert_eq!((result.status, result.json()), (200, ended));
    let found = shop.get("/v1/workflows/d%2F1").await.json();
    assert_eq!((&found["event_count"], &found["events"][0]["name"]), (&json!(1), &json!("multiply")));
    assert_eq!((&found["input"], &found["tags"]), (&json!(21), &json!(["vip"])));
    assert_eq!(found["attributes"], json!({"shop": "north", "price": 4.5, "due": "2026-11-30T12:00:00.000000Z"}));
    assert_eq!(shop.get("/v1/workflows/d%2F1?events=0").await.json()["event_count"], json!(null));
    let taken = shop.post("/v1/workflows", new).await;
    assert_eq!(taken.is_problem(409, "already-exists")["id"], "d/1");
    let unknown = shop.post("/v1/workflows", json!({"workflow": "triple"})).await;
    assert_eq!(unknown.is_problem(404, "workflow-not-registered")["workflow"], "triple");
    let wrong = shop.post("/v1/workflows", json!({"workflow": "double", "input": "x"})).await;
    wrong.is_problem(400, "invalid");
    let both = json!({"workflow": "double", "input": 1, "delay_ms": 5, "begins_at": "2026-11-30"});
    shop.post("/v1/workflows", both).await.is_problem(400, "invalid-body");
    shop.get("/v1/workflows/none").await.is_problem(404, "not-found");
    shop.get("/v1/workflows/none/result?wait=1s").await.is_problem(404, "not-found");
    shop.get("/v1/workflows/d%2F1?events=1001").await.is_problem(400, "invalid-query");
}

#[tokio::test]
async fn a_repeated_start_has_one_execution() {
    let shop = shop().await;
    let start = || ask("POST", "/v1/workflows").header("idempotency-key", "k1").json(json!({"workflow": "order"}));
    let wrong = start().at(&shop.place).await;
    wrong.is_problem(400, "invalid");
    let start = || {
        let start = ask("POST", "/v1/workflows").header("idempotency-key", "k2");
        start.json(json!({"workflow": "order", "input": "tea"}))
    };
    let (first, again) = (start().at(&shop.place).await, start().at(&shop.place).await);
    assert_eq!((first.status, &first.text), (201, &again.text));
    assert_eq!(again.header("idempotent-replayed"), Some("true"));
    let key = json!({"workflow": "double", "input": 1, "idempotency_key": "cart-9"});
    let other = json!({"workflow": "double", "input": 2, "idempotency_key": "cart-9"});
    assert_eq!(shop.start(key.clone()).await, shop.start(key).await);
    assert_eq!(shop.post("/v1/workflows", other).await.is_problem(409, "start-key-reused")["key"], "cart-9");
}

#[tokio::test]
async fn a_result_that_is_not_there_in_time_is_accepted() {
    let shop = shop().await;
    shop.start(json!({"workflow": "order", "input": "tea", "id": "o", "delay_ms": 1})).await;
    for query in ["", "?wait=50ms", "?wait=0s", "?wait=50ms&through_parks=true"] {
        let result = shop.get(&format!("/v1/workflows/o/result{query}")).await;
        assert_eq!((result.status, result.header("retry-after")), (202, Some("1")), "{query}");
        assert_eq!(result.json()["output"], json!(null));
    }
    for query in ["?wait=61s", "?wait=5", "?wait=-1s", "?moon=full"] {
        shop.get(&format!("/v1/workflows/o/result{query}")).await.is_problem(400, "invalid-query");
    }
    shop.start(json!({"workflow": "sold-out", "id": "s"})).await;
    let failed = shop.get("/v1/workflows/s/result?wait=30s").await;
    assert_eq!((failed.status, &failed.json()["status"]), (200, &json!("failed")));
    assert_eq!(failed.json()["failure"]["code"], "shop.sold_out");
}

#[tokio::test]
async fn a_start_that_waits_has_the_result() {
    let shop = shop().await;
    let start = async |query: &str, new: Value| shop.post(&format!("/v1/workflows{query}"), new).await;
    let done = start("?wait=30s", json!({"workflow": "double", "input": 21, "id": "d"})).await;
    let result = shop.get("/v1/workflows/d/result").await.json();
    assert_eq!((done.status, &done.json()["result"], &result["output"]), (201, &result, &json!(42)));
    let failed = start("?wait=30s", json!({"workflow": "sold-out", "id": "s"})).await;
    let result = shop.get("/v1/workflows/s/result").await.json();
    assert_eq!((failed.status, &failed.json()["result"], &result["status"]), (201, &result, &json!("failed")));
    // It is parked, and can be resumed: there is no result yet.
    let parked = start("?wait=30s", json!({"workflow": "brittle", "id": "b"})).await;
    assert_eq!((parked.status, &parked.json()["result"]), (201, &json!(null)));
    let waits = start("?wait=50ms", json!({"workflow": "order", "input": "tea", "id": "o"})).await;
    assert_eq!((waits.status, &waits.json()["result"]), (201, &json!(null)));
    // What is wrong with the wait is told before anything is started.
    for wrong in ["?wait=61s", "?wait=5", "?moon=full"] {
        start(wrong, json!({"workflow": "double", "input": 1, "id": "w"})).await.is_problem(400, "invalid-query");
    }
    shop.get("/v1/workflows/w").await.is_problem(404, "not-found");
    let again = || {
        let start = ask("POST", "/v1/workflows?wait=30s").header("idempotency-key", "k");
        start.json(json!({"workflow": "double", "input": 4})).at(&shop.place)
    };
    let (first, again) = (again().await, again().await);
    assert_eq!((&first.json()["result"]["output"], &first.text), (&json!(8), &again.text));
}

#[tokio::test]
async fn a_wait_ends_when_the_server_shuts_down() {
    let shop = shop().await;
    shop.start(json!({"workflow": "order", "input": "tea", "id": "o"})).await;
    let place = shop.place.clone();
    let wait = tokio::spawn(async move { ask("GET", "/v1/workflows/o/result?wait=60s").at(&place).await });
    shop.engine.store().env().sleep(Duration::from_millis(200)).await;
    let Shop { server, .. } = shop;
    server.shutdown().await.unwrap();
    assert_eq!(wait.await.unwrap().status, 202);
}

#[tokio::test]
async fn signals_are_received_once() {
    let shop = shop().await;
    shop.start(json!({"workflow": "order", "input": "tea", "id": "o"})).await;
    let paid = |cents: u64| shop.post("/v1/workflows/o/signals", json!({"name": "paid", "payload": cents, "id": "p1"}));
    assert_eq!(paid(42).await.status, 204);
    assert_eq!(paid(42).await.status, 204);
    paid(43).await.is_problem(409, "message-reused");
    shop.post("/v1/workflows/none/signals", json!({"name": "paid"})).await.is_problem(404, "not-found");
    shop.post("/v1/workflows/o/signals", json!({"name": ""})).await.is_problem(400, "invalid");
    shop.start(json!({"workflow": "double", "input": 1, "id": "d"})).await;
    assert_eq!(shop.get("/v1/workflows/d/result?wait=30s").await.status, 200);
    shop.post("/v1/workflows/d/signals", json!({"name": "paid"})).await.is_problem(409, "execution-ended");
}

#[tokio::test]
async fn updates_are_answered_or_refused() {
    let shop = shop().await;
    shop.start(json!({"workflow": "account", "input": 10, "id": "a"})).await;
    let update = |query: &'static str, body: Value| {
        let place = &shop.place;
        async move { ask("POST", &format!("/v1/workflows/a/updates{query}")).json(body).at(place).await }
    };
    let answered = update("?wait=30s", json!({"name": "add", "request": 5, "id": "u1"})).await;
    assert_eq!((answered.status, answered.json()), (200, json!({"id": "u1", "answered": true, "answer": 15})));
    let again = update("?wait=30s", json!({"name": "add", "request": 5, "id": "u1"})).await;
    assert_eq!(again.json()["answer"], 15);
    update("", json!({"name": "add", "request": 6, "id": "u1"})).await.is_problem(409, "message-reused");
    let refused = update("?wait=30s", json!({"name": "add", "request": 0})).await;
    assert_eq!(refused.is_problem(409, "update-refused")["failure"]["code"], "account.nothing");

    // An update that is not received yet is accepted, and the answer under an Idempotency-Key is not kept.
    shop.start(json!({"workflow": "order", "input": "tea", "id": "o"})).await;
    let send = |query: &str| {
        let send = ask("POST", &format!("/v1/workflows/o/updates{query}")).header("idempotency-key", "k");
        send.json(json!({"name": "add", "request": 1}))
    };
    let sent = send("?wait=50ms").at(&shop.place).await;
    assert_eq!((sent.status, sent.header("retry-after"), &sent.json()["answered"]), (202, Some("1"), &json!(false)));
    let again = send("?wait=50ms").at(&shop.place).await;
    assert_eq!((again.status, &again.text, again.header("idempotent-replayed")), (202, &sent.text, None));
    shop.post("/v1/workflows/none/updates", json!({"name": "add"})).await.is_problem(404, "not-found");
}

#[tokio::test]
async fn published_values_are_read_and_waited_for() {
    let shop = shop().await;
    shop.start(json!({"workflow": "account", "input": 10, "id": "a"})).await;
    let value = shop.get("/v1/workflows/a/published/sum?wait=30s").await;
    assert_eq!((value.status, value.json()), (200, json!({"name": "sum", "value": 10})));
    assert_eq!(shop.get("/v1/workflows/a/published").await.json(), json!({"sum": 10}));
    let same = shop.get("/v1/workflows/a/published/sum?wait=50ms&other_than=10").await;
    assert_eq!((same.status, &same.json()["id"]), (202, &json!("a")));
    let place = shop.place.clone();
    let path = "/v1/workflows/a/published/sum?wait=30s&other_than=10";
    let other = tokio::spawn(async move { ask("GET", path).at(&place).await });
    shop.post("/v1/workflows/a/updates?wait=30s", json!({"name": "add", "request": 90})).await;
    assert_eq!(other.await.unwrap().json()["value"], 100);
    assert_eq!(shop.get("/v1/workflows/a/result?wait=30s").await.json()["output"], 100);
    shop.get("/v1/workflows/a/published/moon").await.is_problem(404, "not-found");
    shop.get("/v1/workflows/a/published/moon?wait=1s").await.is_problem(409, "execution-ended");
    shop.get("/v1/workflows/a/published/sum?wait=1s&other_than=x").await.is_problem(400, "invalid-query");
    shop.get("/v1/workflows/none/published/sum").await.is_problem(404, "not-found");
}

#[tokio::test]
async fn operators_cancel_and_terminate() {
    let shop = shop().await;
    for (id, verb, status) in [("a", "cancel", "cancelled"), ("b", "terminate", "failed")] {
        shop.start(json!({"workflow": "order", "input": "tea", "id": id})).await;
        let path = format!("/v1/workflows/{id}/{verb}");
        shop.post(&path, json!({"reason": " "})).await.is_problem(400, "invalid-body");
        assert_eq!(shop.post(&path, json!({"reason": "a test"})).await.status, 204);
        let result = shop.get(&format!("/v1/workflows/{id}/result?wait=30s")).await;
        assert_eq!((result.status, &result.json()["status"]), (200, &json!(status)));
        shop.post(&path, json!({"reason": "a test"})).await.is_problem(409, "execution-ended");
        let missing = shop.post(&format!("/v1/workflows/none/{verb}"), json!({"reason": "a test"})).await;
        missing.is_problem(404, "not-found");
    }
}

#[tokio::test]
async fn operators_resume_retry_and_fork() {
    let shop = shop().await;
    shop.start(json!({"workflow": "brittle", "id": "b"})).await;
    for _ in 0..2 {
        let parked = shop.get("/v1/workflows/b/result?wait=30s").await;
        assert_eq!((parked.status, &parked.json()["status"]), (202, &json!("parked")));
        assert!(parked.json()["reason"].as_str().unwrap().contains("the first run breaks"), "{parked:?}");
    }
    assert_eq!(shop.post("/v1/workflows/b/resume", json!(null)).await.status, 204);
    assert_eq!(shop.get("/v1/workflows/b/result?wait=30s").await.json()["output"], "mended");
    shop.post("/v1/workflows/b/resume", json!(null)).await.is_problem(409, "not-parked");

    shop.start(json!({"workflow": "flaky", "id": "f"})).await;
    shop.waits("f", "retry").await;
    assert_eq!(shop.post("/v1/workflows/f/retry", json!(null)).await.status, 204);
    assert_eq!(shop.get("/v1/workflows/f/result?wait=30s").await.json()["output"], 1);
    shop.post("/v1/workflows/f/retry", json!(null)).await.is_problem(409, "execution-ended");
    shop.start(json!({"workflow": "order", "input": "tea", "id": "o"})).await;
    shop.post("/v1/workflows/o/retry", json!(null)).await.is_problem(409, "not-retrying");

    shop.start(json!({"workflow": "double", "input": 1, "id": "d"})).await;
    assert_eq!(shop.get("/v1/workflows/d/result?wait=30s").await.json()["output"], 2);
    let fork = shop.post("/v1/workflows/d/fork", json!({"at_step": "multiply", "input": 5, "id": "d2"})).await;
    assert_eq!((fork.status, fork.header("location")), (201, Some("../d2")));
    assert_eq!(shop.get("/v1/workflows/d2/result?wait=30s").await.json()["output"], 10);
    assert_eq!(shop.get("/v1/workflows/d2").await.json()["forked_from"], "d");
    shop.post("/v1/workflows/d/fork", json!({"id": "d2"})).await.is_problem(409, "already-exists");
    shop.post("/v1/workflows/d/fork", json!({"at": "99"})).await.is_problem(409, "cannot-fork");
    shop.post("/v1/workflows/d/fork", json!({"at": "0", "at_step": "x"})).await.is_problem(400, "invalid-body");
    shop.post("/v1/workflows/none/fork", json!({})).await.is_problem(404, "not-found");
}

#[tokio::test]
async fn executions_are_listed_by_filters_and_in_pages() {
    let shop = shop().await;
    for number in 0..5 {
        let (id, tag) = (format!("o{number}"), if number % 2 == 0 { "even" } else { "odd" });
        let attributes = json!({"number": number});
        let new = json!({"workflow": "order", "input": "tea", "id": id, "tags": [tag], "attributes": attributes});
        shop.start(new).await;
        shop.waits(&id, "signal").await;
    }
    let ids = |page: &Value| -> Vec<String> {
        page["items"].as_array().unwrap().iter().map(|item| item["id"].as_str().unwrap().to_string()).collect()
    };
    let list = async |query: &str| shop.get(&format!("/v1/workflows?{query}")).await;
    assert_eq!(ids(&list("tag=even&order=ascending").await.json()), ["o0", "o2", "o4"]);
    assert_eq!(ids(&list("attribute=number%3E%3D3&order=descending").await.json()), ["o4", "o3"]);
    assert_eq!(ids(&list("status=waiting,parked&waits_for=signal:paid&limit=2").await.json()), ["o4", "o3"]);
    assert_eq!(ids(&list("workflow=double&workflow=flaky").await.json()), Vec::<String>::new());
    assert_eq!(ids(&list("since=1h&until=2100-01-01").await.json()).len(), 5);
    let first = list("workflow=order&limit=3").await;
    let link = first.header("link").unwrap();
    let query = link.strip_prefix("<?").and_then(|link| link.strip_suffix(">; rel=\"next\"")).unwrap();
    assert_eq!(ids(&list(query).await.json()), ["o1", "o0"]);
    let next = first.json()["next"].as_str().unwrap().to_string();
    list(&format!("workflow=double&after={next}")).await.is_problem(400, "invalid-cursor");
    list("status=sleepy").await.is_problem(400, "invalid-query");
    list("moon=full").await.is_problem(400, "invalid-query");
}

#[tokio::test]
async fn a_history_is_read_in_pages_and_as_a_whole() {
    let shop = shop().await;
    shop.start(json!({"workflow": "account", "input": 0, "id": "a"})).await;
    for _ in 0..3 {
        shop.post("/v1/workflows/a/updates?wait=30s", json!({"name": "add", "request": 1})).await;
    }
    shop.waits("a", "update").await;
    let (mut places, mut path) = (Vec::new(), "/v1/workflows/a/history?limit=2".to_string());
    loop {
        let page = shop.get(&path).await.json();
        places
            .extend(page["items"].as_array().unwrap().iter().map(|event| event["place"].as_str().unwrap().to_string()));
        match page["next"].as_str() {
            Some(next) => path = format!("/v1/workflows/a/history?limit=2&after={next}"),
            None => break,
        }
    }
    let whole = shop.get("/v1/workflows/a/history/export").await.json();
    assert_eq!(places.len(), whole["operations"].as_array().unwrap().len());
    assert_eq!(places, (0..places.len()).map(|place| place.to_string()).collect::<Vec<_>>());
    assert_eq!(shop.get("/v1/workflows/a").await.json()["event_count"], places.len());
    for path in ["none/history", "none/history/export", "none/events", "none/published"] {
        shop.get(&format!("/v1/workflows/{path}")).await.is_problem(404, "not-found");
    }
}

#[tokio::test]
async fn limits_refuse_with_a_time_to_try_again() {
    let shop = shop().await;
    shop.start(json!({"workflow": "single", "id": "s"})).await;
    let used = shop.get("/v1/workflow-limits/single").await;
    assert_eq!(used.json(), json!({"workflow": "single", "key": null, "used": 1, "waiting": 0}));
    let start = || ask("POST", "/v1/workflows").header("idempotency-key", "k").json(json!({"workflow": "single"}));
    let refused = start().at(&shop.place).await;
    assert_eq!(refused.is_problem(429, "limit-reached")["limit"], 1);
    assert!(refused.header("retry-after").is_some());
    shop.post("/v1/workflows/s/signals", json!({"name": "go"})).await;
    assert_eq!(shop.get("/v1/workflows/s/result?wait=30s").await.status, 200);
    // The refusal is not kept for the key.
    assert_eq!(start().at(&shop.place).await.status, 201);
}

#[tokio::test]
async fn why_names_what_is_waited_for() {
    let shop = shop().await;
    shop.start(json!({"workflow": "order", "input": "tea", "id": "o"})).await;
    shop.waits("o", "signal").await;
    let why = shop.get("/v1/workflows/o/why").await.json();
    assert_eq!((&why["waits"][0]["for"], &why["waits"][0]["name"]), (&json!("signal"), &json!("paid")));
    assert!(why["waits"][0]["sentence"].as_str().unwrap().contains("signal \"paid\""), "{why}");
    let sentences = why["sentences"].as_array().unwrap();
    assert_eq!(sentences.last(), Some(&why["waits"][0]["sentence"]));

    shop.start(json!({"workflow": "flaky", "id": "f"})).await;
    shop.waits("f", "retry").await;
    let wait = shop.get("/v1/workflows/f/why").await.json()["waits"][0].clone();
    assert_eq!((&wait["attempts"], &wait["last_failure"]), (&json!(1), &json!("the line is busy")), "{wait}");

    shop.start(json!({"workflow": "guarded", "id": "g1"})).await;
    shop.waits("g1", "signal").await;
    shop.start(json!({"workflow": "guarded", "id": "g2"})).await;
    shop.waits("g2", "lock").await;
    let wait = shop.get("/v1/workflows/g2/why").await.json()["waits"][0].clone();
    assert_eq!((&wait["lock"]["name"], &wait["lock"]["position"]), (&json!("till"), &json!(0)), "{wait}");
    assert_eq!(wait["lock"]["holders"][0]["execution"], "g1");
    assert!(wait["sentence"].as_str().unwrap().contains("It is held by execution \"g1\""), "{wait}");

    shop.start(json!({"workflow": "sold-out", "id": "s"})).await;
    shop.get("/v1/workflows/s/result?wait=30s").await;
    let why = shop.get("/v1/workflows/s/why").await.json();
    assert_eq!((&why["status"], &why["waits"]), (&json!("failed"), &json!([])));
    shop.get("/v1/workflows/none/why").await.is_problem(404, "not-found");
}
