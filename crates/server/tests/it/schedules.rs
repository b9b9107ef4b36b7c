//! Schedules over HTTP.

use std::time::Duration;

use latchwork::{Value, json};

use crate::client::{Answer, ask};
use crate::workflows::{Shop, shop};

async fn put(shop: &Shop, name: &str, body: Value) -> Answer {
    ask("PUT", &format!("/v1/schedules/{name}")).json(body).at(&shop.place).await
}

#[tokio::test]
async fn a_schedule_is_put_shown_and_deleted() {
    let shop = shop().await;
    let nightly = json!({
        "workflow": "double", "input": 1, "cron": "0 2 * * *", "zone": "Europe/Berlin", "jitter_ms": 1000,
        "overlap": "queue_one", "catch_up_ms": 3_600_000, "start": "2026-01-01", "end": "2100-01-01T00:00:00Z",
    });
    let created = put(&shop, "nightly", nightly.clone()).await;
    assert_eq!(created.status, 201, "{created:?}");
    let schedule = created.json();
    assert_eq!((&schedule["cron"], &schedule["zone"]), (&json!("0 2 * * *"), &json!("Europe/Berlin")));
    assert_eq!((&schedule["overlap"], &schedule["every_ms"]), (&json!("queue_one"), &json!(null)));
    assert_eq!(schedule["start"], "2026-01-01T00:00:00.000000Z");
    assert_eq!(put(&shop, "nightly", nightly).await.status, 200);
    let shown = shop.get("/v1/schedules/nightly?next=3").await.json();
    assert_eq!((shown["next"].as_array().unwrap().len(), &shown["runs"]), (3, &json!([])));
    assert_eq!(shown["schedule"]["next"], shown["next"][0]);

    for (wrong, status, code) in [
        (json!({"workflow": "double", "input": 1}), 400, "invalid-body"),
        (json!({"workflow": "double", "input": 1, "cron": "x", "every_ms": 5}), 400, "invalid-body"),
        (json!({"workflow": "double", "input": 1, "cron": "61 * * * *"}), 400, "invalid"),
        (json!({"workflow": "double", "input": 1, "every_ms": 5}), 400, "invalid"),
        (json!({"workflow": "double", "input": "x", "every_ms": 5000}), 400, "invalid"),
        (json!({"workflow": "moon", "every_ms": 5000}), 404, "workflow-not-registered"),
    ] {
        put(&shop, "wrong", wrong).await.is_problem(status, code);
    }
    shop.get("/v1/schedules/wrong").await.is_problem(404, "not-found");
    shop.get("/v1/schedules/nightly?next=1001").await.is_problem(400, "invalid-query");
    let delete = || ask("DELETE", "/v1/schedules/nightly");
    assert_eq!(delete().at(&shop.place).await.json(), json!({"name": "nightly"}));
    delete().at(&shop.place).await.is_problem(404, "not-found");
}

#[tokio::test]
async fn a_schedule_is_paused_and_resumed() {
    let shop = shop().await;
    for name in ["a", "b", "c"] {
        put(&shop, name, json!({"workflow": "double", "input": 1, "every_ms": 3_600_000})).await;
    }
    let paused = shop.post("/v1/schedules/b/pause", json!({"reason": "the disk is full"})).await;
    assert_eq!((paused.status, paused.json()), (200, json!({"name": "b", "paused": "the disk is full"})));
    let names = |page: Value| -> Vec<String> {
        page["items"].as_array().unwrap().iter().map(|item| item["name"].as_str().unwrap().to_string()).collect()
    };
    assert_eq!(names(shop.get("/v1/schedules?paused=true").await.json()), ["b"]);
    let first = shop.get("/v1/schedules?limit=2").await.json();
    let next = first["next"].as_str().unwrap().to_string();
    assert_eq!(names(first), ["a", "b"]);
    assert_eq!(names(shop.get(&format!("/v1/schedules?after={next}")).await.json()), ["c"]);
    let resumed = shop.post("/v1/schedules/b/resume", json!(null)).await.json();
    assert!(resumed["next"].is_string(), "{resumed}");
    shop.post("/v1/schedules/b/pause", json!({"reason": ""})).await.is_problem(400, "invalid-body");
    for verb in ["pause", "resume", "trigger"] {
        let missing = shop.post(&format!("/v1/schedules/none/{verb}"), json!({"reason": "x"})).await;
        assert_eq!(missing.is_problem(404, "not-found")["schedule"], "none");
    }
    shop.get("/v1/schedules/none/runs").await.is_problem(404, "not-found");
}

#[tokio::test]
async fn a_schedule_is_triggered_once_under_a_key_and_backfilled() {
    let shop = shop().await;
    put(&shop, "hourly", json!({"workflow": "double", "input": 4, "every_ms": 3_600_000, "overlap": "allow"})).await;
    let trigger = || ask("POST", "/v1/schedules/hourly/trigger").header("idempotency-key", "k");
    let fired = trigger().at(&shop.place).await;
    assert_eq!((fired.status, &fired.json()["name"]), (200, &json!("hourly")));
    let id = fired.json()["id"].as_str().unwrap().to_string();
    assert_eq!(trigger().at(&shop.place).await.text, fired.text);
    let mut runs = Value::Null;
    for _ in 0..500 {
        runs = shop.get("/v1/schedules/hourly/runs").await.json();
        if runs["items"][0]["outcome"] == "started" {
            break;
        }
        shop.engine.store().env().sleep(Duration::from_millis(20)).await;
    }
    assert_eq!((&runs["items"][0]["id"], runs["items"].as_array().unwrap().len()), (&json!(id), 1), "{runs}");
    assert_eq!(runs["items"][0]["cause"], "trigger");

    let range = json!({"from": "2026-01-01T00:30:00Z", "to": "2026-01-01T03:30:00Z"});
    let backfill = shop.post("/v1/schedules/hourly/backfill", range).await;
    assert_eq!(backfill.json(), json!({"name": "hourly", "occurrences": 3}));
    for wrong in [("2026-01-02", "2026-01-01"), ("2026-01-01", "2999-01-01"), ("1990-01-01", "2026-01-01")] {
        let range = json!({"from": wrong.0, "to": wrong.1});
        shop.post("/v1/schedules/hourly/backfill", range).await.is_problem(400, "invalid");
    }
    let soon = shop.post("/v1/schedules/hourly/backfill", json!({"from": "soon", "to": "2026-01-01"})).await;
    soon.is_problem(400, "invalid-body");
}
