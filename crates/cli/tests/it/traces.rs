//! Traces of a server as a process: what a collector of the test gets, what it must never see, and a collector that
//! hangs or is not there.

mod collector;
mod settings;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::Router;
use axum::body::Bytes;
use axum::http::{HeaderMap, StatusCode};
use latchwork::store::Env;
use serde_json::{Value, json};

use crate::serving::{Serving, get};
use collector::{Collector, Seen, apart};

/// A request, and the JSON of its answer.
fn send(url: &str, method: &str, path: &str, headers: &str, body: &Value) -> (u16, Value) {
    let place = url.strip_prefix("http://").unwrap();
    let (mut stream, body) = (TcpStream::connect(place).unwrap(), body.to_string());
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    let head = format!("{method} {path} HTTP/1.1\r\nHost: {place}\r\nConnection: close\r\n{headers}");
    write!(stream, "{head}Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}", body.len()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    (head[9..12].parse().unwrap(), serde_json::from_str(body).unwrap_or_default())
}

/// What an endpoint of the test has got: the kind of each call, and its `traceparent`.
type Calls = Arc<Mutex<Vec<(String, Option<String>)>>>;

/// An endpoint: the first charge fails, every refusal is final.
fn endpoint() -> (String, Calls) {
    let calls = Calls::default();
    let kept = calls.clone();
    let handler = async move |headers: HeaderMap, body: Bytes| {
        let work: Value = serde_json::from_slice(&body).unwrap();
        let kind = work["kind"].as_str().unwrap().to_string();
        let traceparent = headers.get("traceparent").map(|it| it.to_str().unwrap().to_string());
        kept.lock().unwrap().push((kind.clone(), traceparent));
        match (kind.as_str(), work["attempt"].as_u64()) {
            ("charge", Some(1)) => (StatusCode::SERVICE_UNAVAILABLE, "{\"message\": \"the bank is closed\"}"),
            ("refuse", _) => (StatusCode::UNPROCESSABLE_ENTITY, "{\"message\": \"no such card\"}"),
            _ => (StatusCode::OK, "{}"),
        }
    };
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}/work/hunter4", listener.local_addr().unwrap());
    apart(listener, Router::new().fallback(handler));
    (url, calls)
}

const CLAIMS: &str = r#"{
  "workflow": "invoice",
  "meta": { "owning_module": "billing", "entity_type": "invoice", "status_field": "status" },
  "status_types": ["sent", "paying", "paid"],
  "steps": [{
    "step_id": 10, "step_key": "pay", "status": "sent", "action": "Pay",
    "successful_claim_state": ["paying", "sent"], "successful_state": "paid", "success_after_effect": ["Receipt"]
  }]
}"#;

/// The flags of a server whose work is done by an endpoint and by tasks.
fn configured(home: &Path, endpoint: &str, more: &str) -> Vec<String> {
    std::fs::write(home.join("invoices.json"), CLAIMS).unwrap();
    let text = format!(
        "{more}\n[namespaces]\ndefault = \"data\"\n\
         [workers.bank]\nurl = \"{endpoint}\"\npause = \"10ms\"\n\
         [work.default]\nclaims = [\"invoices.json\"]\n\
         actions.Pay = {{ worker = \"bank\" }}\nafter_effects.Receipt = {{ worker = \"bank\" }}\n\
         workflows.order = [{{ step = \"charge\", worker = \"bank\" }}, {{ step = \"pack\", tasks = \"pack\" }}]\n\
         workflows.doomed = [{{ step = \"refuse\", worker = \"bank\" }}]\n"
    );
    std::fs::write(home.join("latchwork.toml"), text).unwrap();
    vec!["--config".into(), home.join("latchwork.toml").display().to_string()]
}

fn start(arguments: &[String], log: &Path) -> Serving {
    let log = std::fs::OpenOptions::new().append(true).create(true).open(log).unwrap();
    let mut arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    arguments.extend(["--log-level", "debug"]);
    Serving::start_with(&arguments, |command| {
        command.stderr(log);
    })
}

/// Does the task of the kind `pack`, and returns it as the worker got it.
fn pack(url: &str, headers: &str) -> Value {
    let take = json!({"kinds": ["pack"], "worker": "w"});
    let (status, taken) = send(url, "POST", "/v1/tasks:take?wait=30s", headers, &take);
    assert_eq!(status, 200, "{taken}");
    let task = taken["tasks"][0].clone();
    let (path, done) =
        (format!("/v1/tasks/{}/complete", task["id"].as_str().unwrap()), json!({"token": task["token"]}));
    assert_eq!(send(url, "POST", &path, headers, &done).0, 200, "{task}");
    task
}

#[test]
fn a_trace_shows_requests_executions_steps_claims_and_calls() {
    let (home, collector, (bank, calls)) = (tempfile::tempdir().unwrap(), Collector::start(), endpoint());
    let secret = "lw_00000000000000000000000000000000000000000000000000000000hunter22";
    let hash = crate::serve::hash_of(secret);
    std::fs::write(home.path().join("headers"), "X-Api-Key: hunter3\n").unwrap();
    let tokens = format!("[[tokens]]\nname = \"ci\"\nhash = \"{hash}\"\nrole = \"admin\"\n");
    std::fs::write(home.path().join("tokens.toml"), tokens).unwrap();
    let more = format!(
        "token_file = \"tokens.toml\"\n[traces]\nendpoint = \"{}\"\nservice = \"shop\"\nheaders_file = \"headers\"\n",
        collector.url
    );
    let log = home.path().join("log");
    let serving = start(&configured(home.path(), &bank, &more), &log);
    let (url, bearer) = (serving.url.clone(), format!("Authorization: Bearer {secret}\r\n"));
    let incoming = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    let order = json!({"workflow": "order", "id": "order-7"});
    let headers = format!("{bearer}traceparent: {incoming}\r\n");
    assert_eq!(send(&url, "POST", "/v1/workflows", &headers, &order).0, 201);
    let task = pack(&url, &bearer);
    assert_eq!(get(&url, "/v1/workflows/order-7/result?wait=30s", &bearer).0, 200);
    send(&url, "POST", "/v1/ns/default/workflows", &bearer, &json!({"workflow": "doomed", "id": "doomed-1"}));
    get(&url, "/v1/workflows/doomed-1/result?wait=30s", &bearer);
    let invoice = json!({"id": "i-1", "type": "invoice", "data": {"status": "sent"}});
    assert_eq!(send(&url, "POST", "/v1/entities", &bearer, &invoice).0, 201);
    let pay = json!({"workflow": "invoice", "step": "pay", "input": {"card": "hunter5"}});
    assert_eq!(send(&url, "POST", "/v1/claims/i-1/fire?wait=30s", &bearer, &pay).0, 200);
    assert_eq!(get(&url, "/v1/locks?held=hunter6", "").0, 401);
    assert_eq!((get(&url, "/healthz", "").0, get(&url, "/hunter7", "").0), (200, 404));
    collector.until(|seen| seen.named("after-effect Receipt").count() == 1);
    assert_eq!(serving.end(), Some(0));

    let seen = collector.seen();
    assert_eq!(seen.services(), ["shop"]);
    the_execution_has_one_trace(&seen, incoming, &task, &calls.lock().unwrap());
    the_claim_and_the_request_have_links(&seen, &calls.lock().unwrap());
    let doomed = seen.one("workflow doomed");
    assert_eq!((doomed.error.as_deref(), doomed.text("latchwork.status")), (Some("no such card"), "failed"));
    assert_eq!(seen.one("step refuse").error.as_deref(), Some("no such card"));
    let refused = seen.one("GET /v1/locks");
    assert_eq!((refused.number("http.response.status_code"), refused.error.as_deref()), (401, None));
    assert_eq!(seen.named("GET").count(), 1, "a path that no route has is not told");
    assert!(seen.spans.iter().all(|span| !span.name.contains("healthz")), "probes have no span");

    // What is secret is nowhere but in the header for the collector.
    assert!(collector.headers().iter().all(|headers| headers["x-api-key"] == "hunter3"));
    let log = std::fs::read_to_string(log).unwrap();
    let sent = String::from_utf8_lossy(&collector.bytes()).into_owned();
    for secret in ["hunter", &hash] {
        assert!(!sent.contains(secret), "{secret} was sent");
    }
    for secret in ["hunter2", "hunter3", "hunter4", "hunter5", "hunter6", &hash] {
        assert!(!log.contains(secret), "{secret} is in {log}");
    }
}

fn the_execution_has_one_trace(seen: &Seen, incoming: &str, task: &Value, calls: &[(String, Option<String>)]) {
    // The request is a part of the trace of its client, and has a link to that of the execution.
    let request = seen.one_with("POST /v1/workflows", "latchwork.execution.id", "order-7");
    assert_eq!(format!("00-{}-{}-01", request.trace, request.parent), incoming);
    assert_eq!((request.kind, request.number("http.response.status_code")), ("server", 201));
    assert_eq!((request.text("http.route"), request.text("url.path")), ("/v1/workflows", "/v1/workflows"));
    assert_eq!((request.text("latchwork.namespace"), request.text("http.request.method")), ("default", "POST"));
    let order = seen.one("workflow order");
    assert_eq!((order.parent.as_str(), order.text("latchwork.execution.id")), ("", "order-7"));
    assert_eq!((order.text("latchwork.status"), &order.error), ("completed", &None));
    assert_eq!(request.links, [(order.trace.clone(), order.id.clone())]);
    assert_ne!(order.trace, request.trace);

    let mut charges: Vec<_> = seen.named("step charge").collect();
    charges.sort_by_key(|step| step.number("latchwork.attempt"));
    assert_eq!(charges.len(), 2);
    for (index, step) in charges.iter().enumerate() {
        assert_eq!((&step.trace, &step.parent), (&order.trace, &order.id), "a step belongs to its execution");
        assert_eq!((step.text("latchwork.workflow"), step.text("latchwork.execution.id")), ("order", "order-7"));
        assert_eq!((step.number("latchwork.attempt"), step.text("latchwork.step")), (index as i64 + 1, "charge"));
        assert!(step.began >= order.began && step.ended <= order.ended && step.began <= step.ended);
        let call = seen.spans.iter().find(|call| call.parent == step.id).unwrap();
        assert_eq!((call.name.as_str(), call.kind, &call.trace), ("POST", "client", &order.trace));
        // The endpoint was told the call.
        let told = calls.iter().filter(|(kind, _)| kind == "charge").nth(index).unwrap();
        assert_eq!(told.1, Some(format!("00-{}-{}-01", call.trace, call.id)));
        assert_eq!(call.number("http.response.status_code"), [503, 200][index]);
        assert_eq!(call.text("server.address"), "127.0.0.1");
    }
    assert_eq!((charges[0].error.as_deref(), &charges[1].error), (Some("the bank is closed"), &None));

    let packed = seen.one("task pack");
    assert_eq!((&packed.trace, &packed.parent), (&order.trace, &order.id));
    assert_eq!(task["traceparent"], format!("00-{}-{}-01", packed.trace, packed.id));
    assert_eq!((packed.text("latchwork.status"), packed.number("latchwork.attempt")), ("done", 1));
}

fn the_claim_and_the_request_have_links(seen: &Seen, calls: &[(String, Option<String>)]) {
    let (request, action) = (seen.one("POST /v1/claims/{entity}/fire"), seen.one("action Pay"));
    assert_eq!(request.text("url.path"), "/v1/claims/i-1/fire");
    assert_eq!(request.links, [(action.trace.clone(), action.id.clone())]);
    assert_eq!(action.links, [(request.trace.clone(), request.id.clone())]);
    assert_eq!((action.parent.as_str(), action.text("latchwork.claim.workflow")), ("", "invoice"));
    assert_eq!((action.text("latchwork.entity.id"), action.text("latchwork.claim.step")), ("i-1", "pay"));
    let effect = seen.one("after-effect Receipt");
    assert_eq!((effect.parent.as_str(), effect.text("latchwork.entity.id")), ("", "i-1"));
    for (outer, kind) in [(action, "Pay"), (effect, "Receipt")] {
        let call = seen.spans.iter().find(|call| call.parent == outer.id).unwrap();
        assert_eq!((&call.trace, call.kind), (&outer.trace, "client"));
        let told = calls.iter().find(|(called, _)| called == kind).unwrap();
        assert_eq!(told.1, Some(format!("00-{}-{}-01", call.trace, call.id)));
    }
}

#[test]
fn an_execution_keeps_its_trace_when_the_server_is_killed() {
    let (home, collector, (bank, _)) = (tempfile::tempdir().unwrap(), Collector::start(), endpoint());
    let more = format!("[traces]\nendpoint = \"{}\"\n", collector.url);
    let (arguments, log) = (configured(home.path(), &bank, &more), home.path().join("log"));
    let serving = start(&arguments, &log);
    let order = json!({"workflow": "order", "id": "order-8"});
    assert_eq!(send(&serving.url, "POST", "/v1/workflows", "", &order).0, 201);
    collector.until(|seen| seen.named("step charge").count() == 2);
    drop(serving);
    let serving = start(&arguments, &log);
    pack(&serving.url, "");
    assert_eq!(get(&serving.url, "/v1/workflows/order-8/result?wait=30s", "").0, 200);
    assert_eq!(serving.end(), Some(0));
    let seen = collector.seen();
    let order = seen.one("workflow order");
    let of_order: Vec<_> = ["step charge", "step pack", "task pack"].iter().flat_map(|name| seen.named(name)).collect();
    assert_eq!(of_order.len(), 4);
    assert!(of_order.iter().all(|span| span.trace == order.trace && span.parent == order.id));
    assert_eq!(seen.one("POST /v1/workflows").links, [(order.trace.clone(), order.id.clone())]);
}

#[test]
fn a_ratio_of_zero_records_what_a_client_asks_for() {
    let (home, collector) = (tempfile::tempdir().unwrap(), Collector::start());
    let store = home.path().join("data").display().to_string();
    let flags = ["--store", &store, "--traces-endpoint", &collector.url, "--traces-ratio", "0"].map(String::from);
    let serving = start(&flags, &home.path().join("log"));
    assert_eq!(get(&serving.url, "/v1/locks", "").0, 200);
    let trace = |flag| format!("traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-{flag}\r\n");
    assert_eq!(get(&serving.url, "/v1/locks", &trace("00")).0, 200);
    assert_eq!(get(&serving.url, "/v1/locks", &trace("01")).0, 200);
    assert_eq!(serving.end(), Some(0));
    let seen = collector.seen();
    assert_eq!(seen.spans.len(), 1);
    assert_eq!(seen.one("GET /v1/locks").trace, "0af7651916cd43dd8448eb211c80319c");
}

#[test]
fn a_collector_that_hangs_delays_neither_requests_nor_the_end() {
    let home = tempfile::tempdir().unwrap();
    // It accepts connections, and never answers.
    let hanging = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", hanging.local_addr().unwrap());
    let (store, log) = (home.path().join("data").display().to_string(), home.path().join("log"));
    let serving = start(&["--store", &store, "--traces-endpoint", &url].map(String::from), &log);
    // More than the queue and a batch.
    let mut stream = TcpStream::connect(serving.url.strip_prefix("http://").unwrap()).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let env = Env::system();
    let (mut longest, mut answer) = (Duration::ZERO, vec![0; 64 << 10]);
    for _ in 0..3000 {
        let began = env.monotonic();
        write!(stream, "GET /v1/locks HTTP/1.1\r\nHost: localhost\r\n\r\n").unwrap();
        let mut text = String::new();
        while !text.ends_with("}") {
            let read = stream.read(&mut answer).unwrap();
            assert!(read > 0);
            text.push_str(&String::from_utf8_lossy(&answer[..read]));
        }
        assert!(text.starts_with("HTTP/1.1 200"), "{text}");
        longest = longest.max(env.monotonic() - began);
    }
    assert!(longest < Duration::from_secs(4), "a request took {longest:?}");
    let metrics = get(&serving.url, "/metrics", "").1;
    let dropped =
        metrics.lines().find_map(|line| line.strip_prefix("latchwork_trace_spans_total{outcome=\"dropped\"} "));
    let dropped: u64 = dropped.unwrap_or_else(|| panic!("nothing was dropped: {metrics}")).parse().unwrap();
    assert!((1..1000).contains(&dropped), "{dropped}");
    let began = env.monotonic();
    assert_eq!(serving.end(), Some(0));
    let took = env.monotonic() - began;
    assert!(took > Duration::from_secs(4) && took < Duration::from_secs(9), "the end took {took:?}");
    assert!(std::fs::read_to_string(&log).unwrap().contains("they are lost"));
    drop(hanging);
}

#[test]
fn a_collector_that_is_not_there_does_not_delay_the_end() {
    let home = tempfile::tempdir().unwrap();
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", free.local_addr().unwrap());
    drop(free);
    let (store, log) = (home.path().join("data").display().to_string(), home.path().join("log"));
    let serving = start(&["--store", &store, "--traces-endpoint", &url].map(String::from), &log);
    assert_eq!(get(&serving.url, "/v1/locks", "").0, 200);
    let env = Env::system();
    let began = env.monotonic();
    assert_eq!(serving.end(), Some(0));
    let took = env.monotonic() - began;
    assert!(took < Duration::from_secs(4), "the end took {took:?}");
    let log = std::fs::read_to_string(&log).unwrap();
    assert!(log.contains("spans were dropped") && log.contains("Connection refused"), "{log}");
}
