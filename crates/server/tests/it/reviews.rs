//! Reviews over HTTP.

use latchwork::json;

use crate::client::ask;
use crate::workflows::shop;

/// An id as a segment of a path.
fn segment(id: &str) -> String {
    id.replace('/', "%2F")
}

#[tokio::test]
async fn a_review_is_listed_and_decided_once() {
    let shop = shop().await;
    for id in ["o1", "o2"] {
        shop.start(json!({"workflow": "order", "input": id, "id": id, "signal": {"name": "paid", "payload": 42}}))
            .await;
        shop.waits(id, "review").await;
    }
    let page = shop.get("/v1/reviews?workflow=order&name=ship&limit=1").await.json();
    let review = &page["items"][0];
    assert_eq!((&review["execution"], &review["state"]), (&json!("o1"), &json!("open")));
    assert_eq!((&review["question"], &review["options"]), (&json!("Ship o1?"), &json!(["yes", "no"])));
    let next = page["next"].as_str().unwrap();
    let rest = shop.get(&format!("/v1/reviews?workflow=order&name=ship&after={next}")).await.json();
    assert_eq!(rest["items"][0]["execution"], "o2");
    assert_eq!(shop.get("/v1/reviews?name=other").await.json()["items"], json!([]));

    let id = segment(review["id"].as_str().unwrap());
    assert_eq!(shop.get(&format!("/v1/reviews/{id}")).await.json(), *review);
    let path = format!("/v1/reviews/{id}/decision");
    let wrong = shop.post(&path, json!({"option": "maybe"})).await;
    assert_eq!(wrong.is_problem(400, "invalid")["offered"], json!(["yes", "no"]));
    let decide = || {
        let decide = ask("POST", &path).header("idempotency-key", "k");
        decide.json(json!({"option": "yes", "by": "ada", "reason": "paid"}))
    };
    let decided = decide().at(&shop.place).await;
    assert_eq!((decided.status, &decided.json()["state"]), (200, &json!("decided")));
    let decision = &decided.json()["decision"];
    assert_eq!((&decision["option"], &decision["by"]), (&json!("yes"), &json!("ada")));
    assert_eq!(decide().at(&shop.place).await.text, decided.text);
    let late = shop.post(&path, json!({"option": "no"})).await;
    assert_eq!(late.is_problem(409, "review-decided")["decision"]["by"], "ada");
    assert_eq!(shop.get("/v1/workflows/o1/result?wait=30s").await.json()["output"], "o1 for 42: yes");

    let id = segment(rest["items"][0]["id"].as_str().unwrap());
    shop.post("/v1/workflows/o2/terminate", json!({"reason": "a test"})).await;
    let closed = shop.post(&format!("/v1/reviews/{id}/decision"), json!({"option": "yes"})).await;
    closed.is_problem(409, "review-closed");
    shop.get("/v1/reviews/none").await.is_problem(404, "not-found");
    shop.post("/v1/reviews/none/decision", json!({"option": "yes"})).await.is_problem(404, "not-found");
}
