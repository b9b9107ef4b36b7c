//! Every noun of the API on `latch serve` with a store in PostgreSQL, which other processes use at the same time.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use latchwork::store::PostgresOptions;
use latchwork::workflow::{Ctx, Engine, Schedule, workflow};
use serde_json::{Value, json};

use crate::server::Server;
use crate::serving::Serving;

/// What a request is answered: the status, the ETag and the body.
struct Answer(u16, String, Value);

fn ask(serving: &Serving, line: &str, headers: &str, body: Option<Value>) -> Answer {
    let place = serving.url.strip_prefix("http://").unwrap();
    let mut stream = TcpStream::connect(place).unwrap();
    let body = body.map(|body| body.to_string()).unwrap_or_default();
    let kind = if body.is_empty() { "" } else { "Content-Type: application/json\r\n" };
    let length = body.len();
    write!(
        stream,
        "{line} HTTP/1.1\r\nHost: {place}\r\nConnection: close\r\n{kind}{headers}Content-Length: {length}\r\n\r\n{body}"
    )
    .unwrap();
    let mut answer = Vec::new();
    stream.read_to_end(&mut answer).unwrap();
    let answer = String::from_utf8_lossy(&answer).into_owned();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let tag = head.lines().find_map(|line| line.strip_prefix("etag: ")).unwrap_or_default().to_string();
    Answer(head[9..12].parse().unwrap(), tag, serde_json::from_str(body).unwrap_or_default())
}

/// A program with a workflow on the same database: an execution waits for a signal and then for a review.
struct Program {
    engine: Engine,
    runtime: tokio::runtime::Runtime,
}

impl Program {
    fn start(url: &str, schema: &str) -> Program {
        let waits = workflow("waits").run(async |ctx: Ctx, n: u32| {
            let more: u32 = ctx.receive("more").await?;
            let decision = ctx.review("go", &"Go on?", ["yes", "no"]).await?;
            Ok(format!("{}: {}", n + more, decision.option))
        });
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let engine = runtime.block_on(async {
            let store = PostgresOptions::new().schema(schema).connect(url).await.unwrap();
            let engine = Engine::on(&store).register(&waits).start().await.unwrap();
            engine.start(&waits, 7).id("one").await.unwrap();
            let nightly = Schedule::every("nightly", Duration::from_secs(3600)).workflow(&waits, 1);
            engine.schedules().put(nightly).await.unwrap();
            engine
        });
        Program { engine, runtime }
    }

    fn end(self) {
        self.runtime.block_on(async {
            self.engine.shutdown().await.unwrap();
            self.engine.store().close().await.unwrap();
        });
    }
}

fn check(serving: &Serving, line: &str, headers: &str, body: Option<Value>, status: u16) -> Answer {
    let answer = ask(serving, line, headers, body);
    assert_eq!(answer.0, status, "{line}: {}", answer.2);
    answer
}

/// Entities, state and locks.
fn data(one: &Serving, two: &Serving) {
    // Entities, under conditions and keys.
    let new = json!({"id": "a", "type": "thing", "data": {"n": 1}});
    for _ in 0..2 {
        check(one, "POST /v1/entities", "Idempotency-Key: k\r\n", Some(new.clone()), 201);
    }
    let Answer(_, tag, found) = check(two, "GET /v1/entities/a", "", None, 200);
    assert_eq!((tag.as_str(), &found["data"]["n"]), ("\"r1\"", &json!(1)));
    let change = Some(json!({"data": {"n": 2}}));
    check(two, "PATCH /v1/entities/a", "If-Match: \"r1\"\r\n", change.clone(), 200);
    check(one, "PATCH /v1/entities/a", "If-Match: \"r1\"\r\n", change, 412);
    let Answer(_, _, past) = check(one, "GET /v1/entities/a/history", "", None, 200);
    assert_eq!(past["items"].as_array().unwrap().len(), 2);
    let Answer(_, _, found) = check(one, "POST /v1/entities:find", "", Some(json!({"type": "thing"})), 200);
    assert_eq!(found["items"].as_array().unwrap().len(), 1);
    // State and slots.
    for serving in [one, two] {
        check(serving, "POST /v1/state/org/o/increment", "", Some(json!({"path": "n"})), 200);
        check(serving, "POST /v1/slots/s/increment", "", Some(json!({})), 200);
    }
    assert_eq!(check(one, "GET /v1/state/org/o", "", None, 200).2["state"]["n"], 2);
    assert_eq!(check(two, "GET /v1/slots/s", "", None, 200).2["value"], 2);
    // Locks: a session of one server is used at the other.
    let Answer(_, _, session) = check(one, "POST /v1/sessions", "", Some(json!({"lease": "60s"})), 201);
    let asked = json!({"session": session["id"]});
    let Answer(_, _, held) = check(two, "POST /v1/locks/m/acquire", "", Some(asked), 200);
    let Answer(_, _, other) = check(one, "POST /v1/sessions", "", Some(json!({})), 201);
    check(one, "POST /v1/locks/m/acquire", "", Some(json!({"session": other["id"]})), 409);
    assert_eq!(check(one, "GET /v1/locks/m", "", None, 200).2["used"], 1);
    let asked = json!({"session": session["id"], "token": held["token"]});
    assert_eq!(check(one, "POST /v1/locks/m/release", "", Some(asked), 200).2["released"], true);
}

/// Executions, their reviews, and schedules.
fn executions(one: &Serving, two: &Serving) {
    // What the program runs: each server reaches it.
    assert_eq!(check(one, "GET /v1/workflows/one", "", None, 200).2["workflow"], "waits");
    check(two, "POST /v1/workflows/one/signals", "", Some(json!({"name": "more", "payload": 5})), 204);
    let review = loop {
        let Answer(_, _, open) = check(one, "GET /v1/reviews", "", None, 200);
        if let Some(id) = open["items"][0]["id"].as_str() {
            break id.replace('/', "%2F");
        }
    };
    let decision = json!({"option": "yes", "by": "ada"});
    check(two, &format!("POST /v1/reviews/{review}/decision"), "", Some(decision), 200);
    let Answer(_, _, ended) = check(one, "GET /v1/workflows/one/result?wait=30s", "", None, 200);
    assert_eq!(ended["output"], "12: yes");
    assert_eq!(check(two, "GET /v1/workflows?status=completed", "", None, 200).2["items"][0]["id"], "one");
    let Answer(_, _, history) = check(two, "GET /v1/workflows/one/history", "", None, 200);
    let kinds: Vec<&Value> = history["items"].as_array().unwrap().iter().map(|item| &item["kind"]).collect();
    assert_eq!(kinds, ["signal", "review", "decision"]);
    assert_eq!(check(one, "GET /v1/schedules/nightly", "", None, 200).2["schedule"]["workflow"], "waits");
    check(two, "POST /v1/schedules/nightly/pause", "", Some(json!({"reason": "holidays"})), 200);
    assert_eq!(check(one, "GET /v1/schedules/nightly", "", None, 200).2["schedule"]["paused"], "holidays");
    check(one, "DELETE /v1/schedules/nightly", "", None, 200);
    check(two, "GET /v1/schedules/nightly", "", None, 404);
}

fn others(one: &Serving, two: &Serving) {
    // Flows, claims, nodes, and the store.
    for list in ["workflows", "locks", "schedules", "reviews", "flows", "claims", "claim-outbox", "claim-outbox/dead"] {
        let Answer(_, _, page) = check(two, &format!("GET /v1/{list}"), "", None, 200);
        assert!(page["items"].is_array(), "{list}: {page}");
    }
    check(one, "GET /v1/workflows/none", "", None, 404);
    let Answer(_, _, nodes) = check(one, "GET /v1/nodes", "", None, 200);
    assert!(nodes["items"].is_array(), "{nodes}");
    check(one, "GET /v1/store", "", None, 200);
    let Answer(_, _, verified) = check(one, "POST /v1/store:verify", "", None, 200);
    assert_eq!(verified["is_sound"], true, "{verified}");
    check(one, "GET /v1/store/backup", "", None, 200);
}

#[test]
fn every_noun_works_on_a_server_whose_store_is_in_postgresql() {
    let (server, schema) = (Server::start(), format!("cli_{}_nouns", std::process::id()));
    let host = server.socket().parent().unwrap().display().to_string().replace('/', "%2F");
    let url = format!("postgres:///postgres?user=postgres&host={host}");
    // Two servers share the store: what one has written, the other has read.
    let program = Program::start(&server.url, &schema);
    let start = || Serving::start(&["--store", &url, "--schema", &schema]);
    let (one, two) = (start(), start());
    data(&one, &two);
    executions(&one, &two);
    others(&one, &two);
    assert_eq!((one.end(), two.end()), (Some(0), Some(0)));
    program.end();
}
