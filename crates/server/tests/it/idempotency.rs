//! `Idempotency-Key`: repeated calls, calls that are cut off, and keys that are used for something else.

use latchwork::json;

use crate::client::{add, ask, start};

#[tokio::test]
async fn a_repeated_call_takes_effect_once_and_has_the_same_answer() {
    let running = start().await;
    let call = || ask("POST", "/v1/entities").header("idempotency-key", "k1").json(json!({"type": "person"}));
    let first = call().of(&running).await;
    assert_eq!((first.status, first.header("idempotent-replayed")), (201, None));
    let again = call().of(&running).await;
    assert_eq!((again.status, &again.text), (201, &first.text));
    assert_eq!(again.header("idempotent-replayed"), Some("true"));
    for name in ["etag", "location", "content-type"] {
        assert_eq!(again.header(name), first.header(name), "{name}");
    }
    let other = ask("POST", "/v1/entities").header("idempotency-key", "k1").json(json!({"type": "city"}));
    other.of(&running).await.is_problem(422, "idempotency-key-reused");
    let found = ask("POST", "/v1/entities:find").json(json!({"type": "person"})).of(&running).await;
    assert_eq!(found.json()["items"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn a_condition_is_a_part_of_the_call() {
    let running = start().await;
    add(&running, "ada", json!(1)).await;
    let call = |tag: &str| {
        let ask = ask("PATCH", "/v1/entities/ada").header("idempotency-key", "k1").header("if-match", tag);
        ask.json(json!({"data": 2}))
    };
    assert_eq!(call("\"r1\"").of(&running).await.status, 200);
    let again = call("\"r1\"").of(&running).await;
    assert_eq!((again.status, again.header("idempotent-replayed")), (200, Some("true")));
    call("\"r2\"").of(&running).await.is_problem(422, "idempotency-key-reused");
    // Without the key, the condition does not hold any more.
    let late = ask("PATCH", "/v1/entities/ada").header("if-match", "\"r1\"").json(json!({"data": 2}));
    late.of(&running).await.is_problem(412, "revision-conflict");
}

#[tokio::test]
async fn an_answer_that_refuses_is_given_again_too() {
    let running = start().await;
    let call = || {
        let ask = ask("PATCH", "/v1/entities/ada").header("idempotency-key", "k1").header("if-match", "*");
        ask.json(json!({"data": 2}))
    };
    call().of(&running).await.is_problem(404, "not-found");
    add(&running, "ada", json!(1)).await;
    let again = call().of(&running).await;
    again.is_problem(404, "not-found");
    assert_eq!(again.header("idempotent-replayed"), Some("true"));
}

#[tokio::test]
async fn a_key_has_visible_characters() {
    let running = start().await;
    for key in ["", "a b", "é", &"x".repeat(256)] {
        let call = ask("POST", "/v1/entities").header("idempotency-key", key).json(json!({"type": "person"}));
        call.of(&running).await.is_problem(400, "invalid-header");
    }
    let longest = "x".repeat(255);
    let call = ask("POST", "/v1/entities").header("idempotency-key", &longest).json(json!({"type": "person"}));
    assert_eq!(call.of(&running).await.status, 201);
}

#[tokio::test]
async fn many_requests_under_one_key_take_effect_once() {
    let running = start().await;
    let calls = (0..32).map(|_| {
        let call = ask("POST", "/v1/entities").header("idempotency-key", "k1").json(json!({"type": "person"}));
        let place = running.place.clone();
        tokio::spawn(async move { call.at(&place).await })
    });
    let mut added = 0;
    for call in calls.collect::<Vec<_>>() {
        let answer = call.await.unwrap();
        match answer.status {
            201 => added += 1,
            _ => {
                let problem = answer.is_problem(409, "idempotency-key-in-use");
                assert!(problem["retry_after_ms"].is_u64() && answer.header("retry-after").is_some());
            }
        }
    }
    assert!(added >= 1);
    let found = ask("POST", "/v1/entities:find").json(json!({"type": "person"})).of(&running).await;
    assert_eq!(found.json()["items"].as_array().unwrap().len(), 1);
}
