//! Entities: conditions, pages, time, transactions.

use latchwork::json;

use crate::client::{add, ask, start};

#[tokio::test]
async fn an_entity_is_read_with_its_rev() {
    let running = start().await;
    add(&running, "ada", json!({"age": 36})).await;
    let read = ask("GET", "/v1/entities/ada").of(&running).await;
    assert_eq!((read.status, read.header("etag")), (200, Some("\"r1\"")));
    let entity = read.json();
    assert_eq!((&entity["id"], &entity["data"]["age"], &entity["_rev"]), (&json!("ada"), &json!(36), &json!(1)));
    for known in ["\"r1\"", "W/\"r1\"", "\"x\", \"r1\"", "*"] {
        let read = ask("GET", "/v1/entities/ada").header("if-none-match", known).of(&running).await;
        assert_eq!((read.status, read.text.as_str(), read.header("etag")), (304, "", Some("\"r1\"")));
    }
    let read = ask("GET", "/v1/entities/ada").header("if-none-match", "\"r2\"").of(&running).await;
    assert_eq!(read.status, 200);
    ask("GET", "/v1/entities/alan").of(&running).await.is_problem(404, "not-found");
}

#[tokio::test]
async fn a_change_names_the_rev_that_was_read() {
    let running = start().await;
    add(&running, "ada", json!({"age": 36})).await;
    let patch = |condition: Option<&'static str>, body| {
        let ask = ask("PATCH", "/v1/entities/ada").json(body);
        match condition {
            Some(condition) => ask.header("if-match", condition),
            None => ask,
        }
    };
    patch(None, json!({})).of(&running).await.is_problem(428, "precondition-required");
    for wrong in ["\"r2\"", "W/\"r1\"", "\"r2\", \"r3\"", "\"other\""] {
        let refused = patch(Some(wrong), json!({"data": 1})).of(&running).await;
        assert_eq!(refused.is_problem(412, "revision-conflict")["current_rev"], 1, "{wrong}");
    }
    let changed = patch(Some("\"r1\""), json!({"data": {"age": 37}, "metadata": {"a": 1}})).of(&running).await;
    assert_eq!((changed.status, changed.header("etag")), (200, Some("\"r2\"")));
    assert_eq!(changed.json(), json!({"id": "ada", "rev": 2, "effect": "updated"}));
    let changed = patch(Some("\"r1\", \"r2\""), json!({"metadata": {"b": 2}, "subtype": "author"})).of(&running).await;
    assert_eq!(changed.json()["rev"], 3);
    let changed = patch(Some("*"), json!({"metadata": {"a": null}, "subtype": null})).of(&running).await;
    assert_eq!(changed.json()["rev"], 4);
    let entity = ask("GET", "/v1/entities/ada").of(&running).await.json();
    assert_eq!((&entity["data"], &entity["metadata"]), (&json!({"age": 37}), &json!({"b": 2})));
    assert!(entity.get("subtype").is_none());
}

#[tokio::test]
async fn a_put_adds_or_replaces_as_its_condition_says() {
    let running = start().await;
    let put = |name: &'static str, value: &'static str, data: i64| {
        ask("PUT", "/v1/entities/ada").header(name, value).json(json!({"type": "person", "data": data}))
    };
    let missing = put("if-match", "\"r1\"", 0).of(&running).await;
    assert_eq!(missing.is_problem(412, "revision-conflict")["current_rev"], json!(null));
    put("if-match", "*", 0).of(&running).await.is_problem(412, "revision-conflict");
    let added = put("if-none-match", "*", 1).of(&running).await;
    assert_eq!((added.status, added.header("etag")), (201, Some("\"r1\"")));
    let again = put("if-none-match", "*", 2).of(&running).await;
    assert_eq!(again.is_problem(412, "already-exists")["current_rev"], 1);
    put("if-none-match", "\"r1\"", 2).of(&running).await.is_problem(400, "invalid-header");
    assert_eq!(put("if-match", "\"r1\"", 3).of(&running).await.json()["rev"], 2);
    assert_eq!(put("if-match", "*", 4).of(&running).await.json()["rev"], 3);
    let other = ask("PUT", "/v1/entities/ada").header("if-match", "*").json(json!({"type": "city"})).of(&running).await;
    assert_eq!(other.is_problem(409, "conflict")["entity_type"], "person");
}

#[tokio::test]
async fn a_removed_entity_continues_above_its_revs() {
    let running = start().await;
    add(&running, "ada", json!(1)).await;
    let remove = || ask("DELETE", "/v1/entities/ada");
    remove().of(&running).await.is_problem(428, "precondition-required");
    remove().header("if-match", "\"r7\"").of(&running).await.is_problem(412, "revision-conflict");
    let removed = remove().header("if-match", "\"r1\"").of(&running).await;
    assert_eq!(removed.json(), json!({"id": "ada", "rev": 2, "effect": "removed"}));
    remove().header("if-match", "*").of(&running).await.is_problem(404, "not-found");
    let added = ask("POST", "/v1/entities").json(json!({"id": "ada", "type": "person"})).of(&running).await;
    assert_eq!(added.json()["rev"], 3);
    let history = ask("GET", "/v1/entities/ada/history?limit=2").of(&running).await;
    let page = history.json();
    assert_eq!((&page["items"][0]["rev"], &page["items"][1]["entity"]), (&json!(3), &json!(null)));
    let link = history.header("link").unwrap();
    let query = link.strip_prefix('<').and_then(|link| link.strip_suffix(">; rel=\"next\"")).unwrap();
    let rest = ask("GET", &format!("/v1/entities/ada/history{query}")).of(&running).await;
    assert_eq!((&rest.json()["items"][0]["rev"], &rest.json()["next"]), (&json!(1), &json!(null)));
    assert!(rest.header("link").is_none());
}

#[tokio::test]
async fn an_id_may_hold_any_character() {
    let running = start().await;
    let added = ask("POST", "/v1/entities").json(json!({"id": "a/b c?é", "type": "t"})).of(&running).await;
    let location = added.header("location").unwrap();
    assert_eq!(location, "entities/a%2Fb%20c%3F%C3%A9");
    let read = ask("GET", &format!("/v1/{location}")).of(&running).await;
    assert_eq!(read.json()["id"], "a/b c?é");
    let long = "x".repeat(513);
    ask("GET", &format!("/v1/entities/{long}")).of(&running).await.is_problem(400, "invalid");
}

#[tokio::test]
async fn entities_are_found_page_by_page_and_as_they_were() {
    let running = start().await;
    let declared = ask("PUT", "/v1/entity-types/person")
        .json(json!({"unique": [["data.email"]], "index": [["data.age"]]}))
        .of(&running)
        .await;
    assert_eq!(declared.status, 204, "{declared:?}");
    for age in 0..5 {
        add(&running, &format!("p{age}"), json!({"age": age, "email": format!("p{age}@example.org")})).await;
    }
    let taken = json!({"type": "person", "data": {"email": "p1@example.org"}});
    let refused = ask("POST", "/v1/entities").json(taken).of(&running).await;
    assert_eq!(refused.is_problem(409, "unique-violation")["owner"], "p1");
    let query = json!({
        "type": "person", "filter": {"data.age": {"at_least": 1}}, "order": [{"path": "data.age", "descending": true}],
    });
    let plan = ask("POST", "/v1/entities:explain").json(query.clone()).of(&running).await.json();
    assert_eq!(plan["scans"], false, "{plan}");
    let (mut found, mut after) = (Vec::new(), String::new());
    loop {
        let page = ask("POST", &format!("/v1/entities:find?limit=2{after}")).json(query.clone()).of(&running).await;
        let page = page.json();
        found.extend(page["items"].as_array().unwrap().iter().map(|entity| entity["id"].as_str().unwrap().to_string()));
        match page["next"].as_str() {
            Some(next) => after = format!("&after={next}"),
            None => break,
        }
    }
    assert_eq!(found, ["p4", "p3", "p2", "p1"]);
    let first = ask("POST", "/v1/entities:find?limit=1").json(query).of(&running).await.json();
    let next = first["next"].as_str().unwrap();
    let other = ask("POST", &format!("/v1/entities:find?after={next}")).json(json!({"type": "person"}));
    other.of(&running).await.is_problem(400, "invalid-cursor");

    let before = first["items"][0]["changed"]["generation"].as_u64().unwrap();
    ask("PATCH", "/v1/entities/p4").header("if-match", "*").json(json!({"data": 0})).of(&running).await;
    let then = ask("GET", &format!("/v1/entities/p4?as_of={before}")).of(&running).await;
    assert_eq!((&then.json()["data"]["age"], then.header("etag")), (&json!(4), Some("\"r1\"")));
    let future = ask("GET", "/v1/entities/p4?as_of=999999").of(&running).await;
    assert!(future.is_problem(400, "future-generation")["latest_generation"].is_u64());
    ask("GET", "/v1/entities/p4?as_of=1&as_of_us=1").of(&running).await.is_problem(400, "invalid-query");
}

#[tokio::test]
async fn a_transaction_lands_whole_or_names_every_failed_check() {
    let running = start().await;
    add(&running, "a", json!(1)).await;
    let transact = |body| ask("POST", "/v1/entities:transact").json(body);
    let landed = transact(json!({
        "ops": [
            {"add": {"id": "b", "type": "person"}},
            {"update": {"id": "a", "data": 2, "if_rev": 1}},
            {"require_absent": {"id": "c"}},
        ],
        "author": "grace", "reason": "first",
    }));
    let landed = landed.of(&running).await;
    assert_eq!(landed.status, 200, "{landed:?}");
    let effects = landed.json()["ops"].clone();
    assert_eq!(effects[0], json!({"id": "b", "rev": 1, "effect": "added"}));
    assert_eq!(effects[1], json!({"id": "a", "rev": 2, "effect": "updated"}));
    assert_eq!(effects[2], json!({"id": "c", "rev": 0, "effect": "checked"}));
    let newest = ask("GET", "/v1/entities/a/history?limit=1").of(&running).await.json()["items"][0].clone();
    assert_eq!((&newest["author"], &newest["reason"]), (&json!("grace"), &json!("first")));
    let refused = transact(json!({"ops": [
        {"remove": {"id": "a", "if_rev": 1}}, {"require_rev": {"id": "b", "rev": 9}}, {"remove": {"id": "b"}},
    ]}));
    let failed = refused.of(&running).await.is_problem(409, "transaction-rejected")["failed"].clone();
    assert_eq!(failed[0]["code"], "revision-conflict");
    assert_eq!((&failed[0]["op"], &failed[0]["current_rev"]), (&json!(0), &json!(2)));
    assert_eq!((&failed[1]["op"], &failed[1]["current_rev"]), (&json!(1), &json!(1)));
    let missing = transact(json!({"ops": [{"update": {"id": "missing", "data": 1}}]})).of(&running).await;
    missing.is_problem(404, "transaction-rejected");
    let unknown = transact(json!({"ops": [{"upsert": {"id": "a"}}]})).of(&running).await;
    let problem = unknown.is_problem(400, "invalid-body");
    assert!(problem["detail"].as_str().unwrap().starts_with("ops[0]"), "{problem}");
}
