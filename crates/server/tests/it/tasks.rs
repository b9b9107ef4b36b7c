//! Tasks over HTTP: workers that take by long poll, die, come back too late, or ask wrongly.

use std::time::Duration;

use latchwork::{Value, json};
use latchwork_server::Limits;
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;

use crate::client::{Answer, Running, ask, start, start_with, with_limits};

async fn post(running: &Running, path: &str, body: Value) -> Answer {
    ask("POST", &format!("/v1{path}")).json(body).of(running).await
}

async fn put(running: &Running, id: &str) -> Answer {
    post(running, "/tasks", json!({"kind": "charge", "id": id, "input": {"amount": 7}})).await
}

async fn take(running: &Running, query: &str, lease: &str) -> Vec<Value> {
    let body = json!({"kinds": ["charge"], "max": 9, "lease": lease});
    let taken = post(running, &format!("/tasks:take{query}"), body).await;
    assert_eq!(taken.status, 200, "{taken:?}");
    taken.json()["tasks"].as_array().unwrap().clone()
}

#[tokio::test]
async fn a_task_is_put_taken_and_completed() {
    let running = start().await;
    let made = put(&running, "t/1").await;
    assert_eq!((made.status, made.header("location")), (201, Some("tasks/t%2F1")));
    assert_eq!((&made.json()["state"], &made.json()["token"]), (&json!("open"), &json!(0)));
    assert_eq!(put(&running, "t/1").await.status, 200);
    let other = post(&running, "/tasks", json!({"kind": "charge", "id": "t/1", "input": 8})).await;
    other.is_problem(409, "already-exists");
    let taken = take(&running, "", "30s").await;
    let task = &taken[0];
    assert_eq!(
        (taken.len(), &task["id"], &task["attempt"], &task["key"]),
        (1, &json!("t/1"), &json!(1), &json!("t/1"))
    );
    assert_eq!(
        (&task["state"], &task["worker"], &task["lease_ms"]),
        (&json!("leased"), &json!("local"), &json!(30000))
    );
    assert_eq!(take(&running, "", "30s").await, Vec::<Value>::new());
    let done = json!({"token": task["token"], "output": {"receipt": 1}});
    let completed = post(&running, "/tasks/t%2F1/complete", done.clone()).await;
    assert_eq!((completed.status, &completed.json()["state"]), (200, &json!("done")));
    // The answer was lost, and the worker asks again: it finds what is recorded.
    assert_eq!(post(&running, "/tasks/t%2F1/complete", done).await.json(), completed.json());
    let other = json!({"token": task["token"], "output": "other"});
    assert_eq!(post(&running, "/tasks/t%2F1/complete", other).await.json()["output"], json!({"receipt": 1}));
    let shown = ask("GET", "/v1/tasks/t%2F1?wait=1s").of(&running).await.json();
    assert_eq!(shown, completed.json());
    ask("GET", "/v1/tasks/t2").of(&running).await.is_problem(404, "not-found");
    let late = post(&running, "/tasks/t%2F1/cancel", json!({"reason": "late"})).await;
    assert_eq!(late.is_problem(409, "task-ended")["state"], "done");
}

#[tokio::test]
async fn a_worker_that_dies_is_followed_by_another_with_a_larger_token() {
    let running = start().await;
    put(&running, "a").await;
    let first = take(&running, "", "200ms").await.remove(0);
    // The wait of the second worker ends when the lease of the first is over.
    let second = take(&running, "?wait=20s", "30s").await.remove(0);
    assert!(second["token"].as_u64() > first["token"].as_u64(), "{first} {second}");
    assert_eq!((&second["attempt"], &second["failure"]["code"]), (&json!(2), &json!("lease-over")));
    for verb in ["complete", "fail", "heartbeat"] {
        let mut body = json!({"token": first["token"]});
        if verb == "fail" {
            body["message"] = json!("late");
        }
        let late = post(&running, &format!("/tasks/a/{verb}"), body).await;
        assert_eq!(late.is_problem(409, "lease-lost")["state"], "leased", "{verb}");
    }
    let done = post(&running, "/tasks/a/complete", json!({"token": second["token"]})).await;
    assert_eq!(done.json()["output"], json!(null));
}

#[tokio::test]
async fn a_heartbeat_keeps_the_lease() {
    let running = start().await;
    put(&running, "a").await;
    let task = take(&running, "", "1s").await.remove(0);
    for _ in 0..4 {
        assert_eq!(take(&running, "?wait=400ms", "1s").await, Vec::<Value>::new());
        let beat = post(&running, "/tasks/a/heartbeat", json!({"token": task["token"]})).await;
        assert_eq!((beat.status, &beat.json()["lease_ms"]), (200, &json!(1000)), "{beat:?}");
    }
    let longer = post(&running, "/tasks/a/heartbeat", json!({"token": task["token"], "lease": "1h"})).await;
    assert_eq!(longer.json()["lease_ms"], json!(3_600_000));
    assert_eq!(post(&running, "/tasks/a/complete", json!({"token": task["token"]})).await.status, 200);
}

#[tokio::test]
async fn workers_that_wait_get_one_task_each() {
    let running = start().await;
    let waits: Vec<_> = (0..8)
        .map(|_| {
            let place = running.place.clone();
            let wait = ask("POST", "/v1/tasks:take?wait=20s").json(json!({"kinds": ["other", "charge"]}));
            tokio::spawn(async move { wait.at(&place).await.json()["tasks"][0]["id"].as_str().unwrap().to_string() })
        })
        .collect();
    for number in 0..8 {
        put(&running, &format!("t{number}")).await;
    }
    let mut ids = Vec::new();
    for wait in waits {
        ids.push(wait.await.unwrap());
    }
    ids.sort();
    assert_eq!(ids, (0..8).map(|number| format!("t{number}")).collect::<Vec<_>>());
}

#[tokio::test]
async fn a_failed_attempt_is_followed_by_a_pause_or_by_the_end() {
    let running = start().await;
    let new = json!({"kind": "charge", "id": "a", "attempts": 3, "pause": "300ms"});
    post(&running, "/tasks", new).await;
    let task = take(&running, "", "30s").await.remove(0);
    let failed = json!({"token": task["token"], "message": "busy", "code": "E1", "details": [1]});
    let failed = post(&running, "/tasks/a/fail", failed).await.json();
    assert_eq!((&failed["state"], &failed["failure"]["message"]), (&json!("open"), &json!("busy")));
    assert_eq!(take(&running, "", "30s").await, Vec::<Value>::new(), "the pause is not over");
    // A worker that waits gets it after the pause.
    let task = take(&running, "?wait=20s", "30s").await.remove(0);
    let failed = json!({"token": task["token"], "message": "busy", "pause": "0s"});
    assert_eq!(post(&running, "/tasks/a/fail", failed).await.json()["state"], "open");
    let task = take(&running, "", "30s").await.remove(0);
    let failed = post(&running, "/tasks/a/fail", json!({"token": task["token"], "message": "no"})).await.json();
    assert_eq!((&failed["state"], &failed["attempt"]), (&json!("failed"), &json!(3)), "three attempts");
    put(&running, "b").await;
    let task = take(&running, "", "30s").await.remove(0);
    let body = json!({"token": task["token"], "message": "no", "retryable": false});
    assert_eq!(post(&running, "/tasks/b/fail", body).await.json()["state"], "failed");
}

#[tokio::test]
async fn a_task_of_an_unknown_kind_waits_and_can_be_cancelled() {
    let running = start().await;
    post(&running, "/tasks", json!({"kind": "unknown", "id": "a"})).await;
    assert_eq!(take(&running, "?wait=300ms", "30s").await, Vec::<Value>::new());
    let shown = ask("GET", "/v1/tasks/a?wait=100ms").of(&running).await.json();
    assert_eq!(shown["state"], "open");
    let cancelled = post(&running, "/tasks/a/cancel", json!({"reason": "no worker does this"})).await.json();
    assert_eq!((&cancelled["state"], &cancelled["reason"]), (&json!("cancelled"), &json!("no worker does this")));
}

#[tokio::test]
async fn a_caller_waits_for_the_end_of_its_task() {
    let running = start().await;
    put(&running, "a").await;
    let place = running.place.clone();
    let wait = tokio::spawn(async move { ask("GET", "/v1/tasks/a?wait=20s").at(&place).await.json() });
    let task = take(&running, "", "30s").await.remove(0);
    post(&running, "/tasks/a/complete", json!({"token": task["token"], "output": 7})).await;
    assert_eq!(wait.await.unwrap()["output"], 7);
}

#[tokio::test]
async fn a_take_that_is_repeated_under_its_key_has_the_same_tasks() {
    let running = start().await;
    put(&running, "a").await;
    put(&running, "b").await;
    let take = || {
        let take = ask("POST", "/v1/tasks:take").header("idempotency-key", "k1");
        take.json(json!({"kinds": ["charge"]}))
    };
    let first = take().of(&running).await;
    let again = take().of(&running).await;
    assert_eq!((again.header("idempotent-replayed"), again.json()), (Some("true"), first.json()));
    let new = || ask("POST", "/v1/tasks").header("idempotency-key", "k2").json(json!({"kind": "x"}));
    let (first, again) = (new().of(&running).await, new().of(&running).await);
    assert_eq!((first.status, again.status, first.json()["id"].clone()), (201, 201, again.json()["id"].clone()));
}

#[tokio::test]
async fn tasks_are_listed_by_kind_and_state() {
    let running = start().await;
    for number in 0..5 {
        put(&running, &format!("t{number}")).await;
        post(&running, "/tasks", json!({"kind": "other", "id": format!("o{number}")})).await;
    }
    take(&running, "", "30s").await;
    let list = async |query: String| ask("GET", &format!("/v1/tasks?{query}")).of(&running).await;
    let mut ids = Vec::new();
    let mut after = String::new();
    loop {
        let page = list(format!("kind=charge&state=leased&limit=2{after}")).await;
        let page = page.json();
        ids.extend(page["items"].as_array().unwrap().iter().map(|task| task["id"].as_str().unwrap().to_string()));
        match page["next"].as_str() {
            Some(next) => after = format!("&after={next}"),
            None => break,
        }
    }
    assert_eq!(ids, ["t0", "t1", "t2", "t3", "t4"]);
    assert_eq!(list("state=open".into()).await.json()["items"].as_array().unwrap().len(), 5);
    list(format!("kind=other{after}")).await.is_problem(400, "invalid-cursor");
    list("state=lost".into()).await.is_problem(400, "invalid-query");
}

#[tokio::test]
async fn what_is_asked_wrongly_is_refused() {
    let running = start_with(with_limits(|limits: &mut Limits| limits.body_bytes = 2000)).await;
    for body in [
        json!({}),
        json!({"kind": ""}),
        json!({"kind": "x".repeat(201)}),
        json!({"kind": "a", "id": ""}),
        json!({"kind": "a", "id": "x".repeat(513)}),
        json!({"kind": "a", "key": "a b"}),
        json!({"kind": "a", "attempts": 0}),
        json!({"kind": "a", "pause": "soon"}),
        json!({"kind": "a", "delay": "9999d"}),
    ] {
        post(&running, "/tasks", body).await.is_problem(400, "invalid-body");
    }
    for body in [
        json!({"kinds": []}),
        json!({"kinds": ["a"], "max": 0}),
        json!({"kinds": ["a"], "max": 101}),
        json!({"kinds": ["a"], "lease": "1ms"}),
        json!({"kinds": ["a"], "lease": "2000h"}),
        json!({"kinds": ["a"], "worker": ""}),
    ] {
        post(&running, "/tasks:take", body).await.is_problem(400, "invalid-body");
    }
    post(&running, "/tasks:take?wait=2h", json!({"kinds": ["a"]})).await.is_problem(400, "invalid-query");
    let large = post(&running, "/tasks", json!({"kind": "a", "input": "x".repeat(3000)})).await;
    large.is_problem(413, "too-large");
    put(&running, "a").await;
    let task = take(&running, "", "30s").await.remove(0);
    let large = json!({"token": task["token"], "output": "x".repeat(3000)});
    post(&running, "/tasks/a/complete", large).await.is_problem(413, "too-large");
    post(&running, "/tasks/a/cancel", json!({"reason": ""})).await.is_problem(400, "invalid-body");
    post(&running, "/tasks/nope/complete", json!({"token": 1})).await.is_problem(404, "not-found");
}

#[tokio::test]
async fn a_worker_that_hangs_up_gets_no_task() {
    let running = start().await;
    for _ in 0..5 {
        let mut stream = TcpStream::connect(&running.place).await.unwrap();
        let body = json!({"kinds": ["charge"]}).to_string();
        let head = format!(
            "POST /v1/tasks:take?wait=60s HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(head.as_bytes()).await.unwrap();
        running.engine.store().env().sleep(Duration::from_millis(50)).await;
    }
    running.engine.store().env().sleep(Duration::from_millis(200)).await;
    put(&running, "a").await;
    let taken = take(&running, "?wait=20s", "30s").await;
    assert_eq!((taken.len(), &taken[0]["attempt"]), (1, &json!(1)));
}

#[tokio::test]
async fn a_wait_ends_with_the_server() {
    let running = start().await;
    let place = running.place.clone();
    let wait = ask("POST", "/v1/tasks:take?wait=60s").json(json!({"kinds": ["a"]}));
    let wait = tokio::spawn(async move { wait.at(&place).await });
    // The wait has begun when a worker is registered; until then the shutdown would refuse the connection.
    running.engine.store().env().sleep(Duration::from_millis(300)).await;
    running.server.shutdown().await.unwrap();
    assert_eq!(wait.await.unwrap().json()["tasks"], json!([]));
}
