//! Flows over HTTP.

use std::time::Duration;

use latchwork::flow::{AnswerKind, Busy, Flow, flow, handler, sequencer};
use latchwork::store::Store;
use latchwork::workflow::{Engine, Failure};
use latchwork::{Value, json};
use latchwork_server::Api;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::client::{Answer, Running, ask, start_api};

#[derive(Default, Serialize, Deserialize, JsonSchema)]
struct Counted {
    words: u64,
}

/// Counts words; asks for a price; fails; and runs one request of a session at a time.
fn texts() -> Flow {
    let count = handler("count")
        .needs::<Counted>()
        .tap(async |ctx, text: String| ctx.sequencer().inc([("words", text.split_whitespace().count() as u64)]).await);
    let counting = sequencer("counting").state::<Counted>().tap(&count).map(|_, look| look.state().words).build();
    let price = handler("price").run(async |ctx, _: Value| {
        let question = ctx.suspend("price").message("How much?").schema(json!({"type": "integer"}));
        question.allow([AnswerKind::Submit, AnswerKind::Reject]).await?.read::<u64>()
    });
    let fails = handler("fails").run(async |_, _: Value| Err::<u64, _>(Failure::new("no").not_retryable()));
    let alone = handler("alone").run(async |ctx, _: Value| Ok(ctx.suspend("go").await?.is_approved()));
    flow("texts")
        .action("count", counting.unwrap())
        .action("price", price)
        .action("fails", fails)
        .action("alone", alone)
        .when_busy(Busy::Reject)
        .build()
        .unwrap()
}

async fn served() -> Running {
    let texts = texts();
    let engine = Engine::on(&Store::memory().await.unwrap()).flow(&texts).start().await.unwrap();
    start_api(engine.clone(), Api::on(&engine).flow(&texts)).await
}

async fn get(running: &Running, path: &str) -> Answer {
    ask("GET", &format!("/v1/flows/texts{path}")).of(running).await
}

async fn post(running: &Running, path: &str, body: Value) -> Answer {
    ask("POST", &format!("/v1/flows/texts{path}")).json(body).of(running).await
}

async fn made(running: &Running, action: &str, body: Value) -> String {
    let made = post(running, &format!("/actions/{action}"), body).await;
    assert_eq!(made.status, 201, "{made:?}");
    made.json()["id"].as_str().unwrap().to_string()
}

/// Waits for the question of a request, and returns its id, encoded.
async fn question(running: &Running, request: &str) -> String {
    loop {
        let open = get(running, &format!("/requests/{request}/suspensions")).await.json();
        if let Some(id) = open["items"][0]["id"].as_str() {
            return id.replace('/', "%2F");
        }
        tokio::task::yield_now().await;
    }
}

/// The events of a stream that has ended: id, name and data.
fn events(answer: &Answer) -> Vec<(u64, String, Value)> {
    assert_eq!((answer.status, answer.header("content-type")), (200, Some("text/event-stream")), "{answer:?}");
    let events = answer.text.split("\n\n").filter(|event| event.contains("id:"));
    let field =
        |event: &str, name: &str| event.lines().find_map(|line| line.strip_prefix(name)).unwrap().trim().to_string();
    let read = |event| {
        let (id, name): (String, String) = (field(event, "id:"), field(event, "event:"));
        (id.parse().unwrap(), name, serde_json::from_str(&field(event, "data:")).unwrap())
    };
    events.map(read).collect()
}

#[tokio::test]
async fn a_request_runs_and_has_a_result_events_and_checkpoints() {
    let running = served().await;
    let listed = ask("GET", "/v1/flows").of(&running).await.json();
    assert_eq!(listed["items"], json!([{"name": "texts", "actions": ["alone", "count", "fails", "price"]}]));
    let asked = json!({"input": "a few words", "id": "r/1", "session": "s", "user": "u", "org": "o"});
    let made = post(&running, "/actions/count", asked.clone()).await;
    assert_eq!((made.status, made.header("location")), (201, Some("../requests/r%2F1")), "{made:?}");
    assert_eq!(made.json(), json!({"id": "r/1", "flow": "texts", "action": "count"}));
    post(&running, "/actions/count", asked).await.is_problem(409, "already-exists");

    let result = get(&running, "/requests/r%2F1/result?wait=30s").await;
    assert_eq!(
        (result.status, &result.json()["status"], &result.json()["output"]),
        (200, &json!("completed"), &json!(3))
    );
    let shown = get(&running, "/requests/r%2F1").await.json();
    for (field, value) in [
        ("flow", json!("texts")),
        ("action", json!("count")),
        ("session", json!("s")),
        ("user", json!("u")),
        ("org", json!("o")),
        ("input", json!("a few words")),
        ("output", json!(3)),
        ("failure", json!(null)),
    ] {
        assert_eq!(shown[field], value, "{field}");
    }
    assert!(shown["started_at"].as_str().unwrap().ends_with('Z'), "{shown}");
    let checkpoints = get(&running, "/requests/r%2F1/checkpoints").await.json();
    assert_eq!(checkpoints["checkpoints"], json!({"counting": {"words": 3}}));

    let all = events(&get(&running, "/requests/r%2F1/events").await);
    assert!(all.iter().map(|(number, ..)| *number).eq(0..all.len() as u64), "{all:?}");
    assert_eq!((all[0].1.as_str(), &all[0].2["action"]), ("request_started", &json!("texts/count")));
    let (last, name, end) = all.last().unwrap();
    assert_eq!((name.as_str(), &end["number"]), ("request_ended", &json!(last)));
    assert!(all.iter().any(|(_, name, data)| name == "state_change" && data["scope"] == "counting"), "{all:?}");
}

#[tokio::test]
async fn a_stream_continues_after_the_last_event_that_was_seen() {
    let running = served().await;
    let id = made(&running, "count", json!({"input": "a b"})).await;
    assert_eq!(get(&running, &format!("/requests/{id}/result?wait=30s")).await.status, 200);
    let path = format!("/v1/flows/texts/requests/{id}/events");
    let all = events(&ask("GET", &path).of(&running).await);
    let last = all.len() as u64 - 1;
    for seen in 0..last {
        let rest = ask("GET", &path).header("last-event-id", &seen.to_string()).of(&running).await;
        assert_eq!(events(&rest), all[seen as usize + 1..], "after {seen}");
    }
    let rest = ask("GET", &format!("{path}?after=1")).of(&running).await;
    assert_eq!(events(&rest), all[2..]);
    // The header wins: a browser that connects again keeps the address.
    let rest = ask("GET", &format!("{path}?after=0")).header("last-event-id", "1").of(&running).await;
    assert_eq!(events(&rest), all[2..]);

    let over = ask("GET", &path).header("last-event-id", &last.to_string()).of(&running).await;
    assert_eq!((over.status, over.text.as_str()), (204, ""), "{over:?}");
    for future in [last + 1, u64::MAX] {
        let future = ask("GET", &path).header("last-event-id", &future.to_string()).of(&running).await;
        assert_eq!(future.is_problem(400, "future-event")["last_event"], last);
    }
    ask("GET", &path).header("last-event-id", "x").of(&running).await.is_problem(400, "invalid-header");
    let missing = ask("GET", "/v1/flows/texts/requests/none/events").header("last-event-id", "0");
    missing.of(&running).await.is_problem(404, "not-found");
}

#[tokio::test]
async fn a_stream_goes_on_while_the_request_runs() {
    let running = served().await;
    let id = made(&running, "price", json!({})).await;
    let question = question(&running, &id).await;
    let path = format!("/v1/flows/texts/requests/{id}/events");
    let waiting = ask("GET", &path).header("last-event-id", "99").of(&running).await;
    waiting.is_problem(400, "future-event");
    let seen = running.engine.clone();
    let place = running.place.clone();
    let stream = tokio::spawn(async move { ask("GET", &path).at(&place).await });
    let result = get(&running, &format!("/requests/{id}/result?wait=100ms")).await;
    assert_eq!((result.status, result.header("retry-after")), (202, Some("1")), "{result:?}");
    let status = result.json()["status"].clone();
    assert!(status == "waiting" || status == "running", "{status}");
    let answer_path = format!("/suspensions/{question}/answer");
    let answered = post(&running, &answer_path, json!({"answer": "submit", "value": 7})).await;
    assert_eq!(answered.status, 200, "{answered:?}");
    let told = events(&stream.await.unwrap());
    let names: Vec<&str> = told.iter().map(|(_, name, _)| name.as_str()).collect();
    assert!(names.contains(&"suspension") && names.contains(&"answer"), "{names:?}");
    assert_eq!(names.last(), Some(&"request_ended"));
    assert_eq!(seen.describe(id.as_str()).await.unwrap().status().name(), "completed");
}

#[tokio::test]
async fn questions_are_listed_and_answered_once() {
    let running = served().await;
    let id = made(&running, "price", json!({"session": "s"})).await;
    let question = question(&running, &id).await;
    let listed = get(&running, "/actions/price/suspensions?limit=1").await.json();
    let shown = get(&running, &format!("/suspensions/{question}")).await.json();
    assert_eq!(listed["items"], json!([shown]));
    assert_eq!(
        (&shown["request"], &shown["message"], &shown["is_open"]),
        (&json!(id), &json!("How much?"), &json!(true))
    );
    assert_eq!((&shown["allow"], &shown["schema"]), (&json!(["submit", "reject"]), &json!({"type": "integer"})));

    let answer_path = format!("/suspensions/{question}/answer");
    let not_offered = post(&running, &answer_path, json!({"answer": "approve"})).await;
    assert_eq!(not_offered.is_problem(400, "invalid")["offered"], json!(["submit", "reject"]));
    post(&running, &answer_path, json!({"answer": "submit", "value": "x"})).await.is_problem(400, "invalid");
    post(&running, &answer_path, json!({"answer": "perhaps"})).await.is_problem(400, "invalid-body");
    let call = || {
        let answer = json!({"answer": "submit", "value": 7, "by": "ada", "reason": "a guess"});
        ask("POST", &format!("/v1/flows/texts{answer_path}")).header("idempotency-key", "k").json(answer)
    };
    let answered = call().of(&running).await;
    assert_eq!(answered.status, 200, "{answered:?}");
    let decision = &answered.json()["decision"];
    assert_eq!(
        (&decision["option"], &decision["by"], &decision["reason"]),
        (&json!("submit"), &json!("ada"), &json!("a guess"))
    );
    let again = call().of(&running).await;
    assert_eq!((again.status, again.header("idempotent-replayed"), &again.text), (200, Some("true"), &answered.text));
    let late = post(&running, &answer_path, json!({"answer": "reject"})).await;
    assert_eq!(late.is_problem(409, "review-decided")["decision"]["by"], "ada");
    let result = get(&running, &format!("/requests/{id}/result?wait=30s")).await.json();
    assert_eq!(result["output"], 7);
    assert_eq!(get(&running, "/actions/price/suspensions").await.json()["items"], json!([]));
}

#[tokio::test]
async fn a_failed_request_has_a_result_too() {
    let running = served().await;
    let id = made(&running, "fails", json!({})).await;
    let result = get(&running, &format!("/requests/{id}/result?wait=30s")).await;
    assert_eq!((result.status, &result.json()["status"]), (200, &json!("failed")));
    assert_eq!(result.json()["failure"]["message"], "no");
    get(&running, &format!("/requests/{id}/result?wait=61s")).await.is_problem(400, "invalid-query");
}

#[tokio::test]
async fn a_request_is_made_once_under_a_key() {
    let running = served().await;
    let call =
        || ask("POST", "/v1/flows/texts/actions/count").header("idempotency-key", "k").json(json!({"input": "a"}));
    let first = call().of(&running).await;
    let again = call().of(&running).await;
    assert_eq!((again.status, &again.text), (201, &first.text));
    assert_eq!(again.header("idempotent-replayed"), Some("true"));
    assert_eq!(again.header("location"), first.header("location"));
}

#[tokio::test]
async fn what_does_not_exist_or_does_not_fit_is_refused() {
    let running = served().await;
    let missing = ask("POST", "/v1/flows/none/actions/count").json(json!({"input": "a"})).of(&running).await;
    assert_eq!(missing.is_problem(404, "not-found")["known"], json!(["texts"]));
    let missing = post(&running, "/actions/none", json!({})).await;
    assert_eq!(missing.is_problem(404, "not-found")["known"], json!(["alone", "count", "fails", "price"]));
    get(&running, "/actions/none/suspensions").await.is_problem(404, "not-found");
    get(&running, "/suspensions/none").await.is_problem(404, "not-found");
    post(&running, "/suspensions/none/answer", json!({"answer": "approve"})).await.is_problem(404, "not-found");
    post(&running, "/actions/count", json!({"input": 7})).await.is_problem(400, "invalid");
    post(&running, "/actions/count", json!({"inptu": 7})).await.is_problem(400, "invalid-body");
    for path in ["", "/result", "/checkpoints", "/suspensions", "/events"] {
        get(&running, &format!("/requests/none{path}")).await.is_problem(404, "not-found");
    }
    // One session has one request of this action at a time.
    made(&running, "alone", json!({"session": "s"})).await;
    let busy = post(&running, "/actions/alone", json!({"session": "s"})).await;
    busy.is_problem(429, "limit-reached");
    made(&running, "alone", json!({"session": "t"})).await;
}

#[tokio::test]
async fn a_wait_ends_with_the_server() {
    let running = served().await;
    let id = made(&running, "price", json!({})).await;
    question(&running, &id).await;
    let (place, path) = (running.place.clone(), format!("/v1/flows/texts/requests/{id}/result?wait=60s"));
    let waiting = tokio::spawn(async move { ask("GET", &path).at(&place).await });
    let stream = {
        let (place, path) = (running.place.clone(), format!("/v1/flows/texts/requests/{id}/events"));
        tokio::spawn(async move { ask("GET", &path).at(&place).await })
    };
    // Both requests are under way.
    running.engine.store().env().sleep(Duration::from_millis(300)).await;
    running.server.shutdown().await.unwrap();
    assert_eq!(waiting.await.unwrap().status, 202);
    let told = events(&stream.await.unwrap());
    assert!(told.iter().any(|(_, name, _)| name == "suspension"), "{told:?}");
}
