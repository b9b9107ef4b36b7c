//! Nodes over HTTP.

use std::time::Duration;

use latchwork::node::NodeOptions;
use latchwork::store::Store;
use latchwork::workflow::{Ctx, Engine, EngineBuilder, workflow};
use latchwork::{Value, json};
use latchwork_server::Api;

use crate::client::{Running, ask, start, start_api};

const LEASE: Duration = Duration::from_secs(2);

fn node(store: &Store, name: &str) -> EngineBuilder {
    let echo = workflow("echo").run(async |_: Ctx, value: u64| Ok(value));
    Engine::on(store).node(NodeOptions::new().name(name).lease(LEASE)).register(&echo)
}

/// Waits until a node is as asked.
async fn until(running: &Running, path: &str, holds: impl Fn(&Value) -> bool) -> Value {
    loop {
        let found = ask("GET", path).of(running).await.json();
        if holds(&found) {
            return found;
        }
        running.engine.store().env().sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test]
async fn nodes_are_listed_shown_and_drained() {
    let store = Store::memory().await.unwrap();
    let engine = node(&store, "one").start().await.unwrap();
    let running = start_api(engine.clone(), Api::on(&engine)).await;
    let alone = ask("PUT", "/v1/nodes/one/drain").of(&running).await;
    assert_eq!(alone.is_problem(409, "conflict")["node"], "one");
    let other = node(&store, "two").start().await.unwrap();
    let listed = until(&running, "/v1/nodes", |listed| listed["items"].as_array().unwrap().len() == 2).await;
    assert_eq!((&listed["items"][0]["name"], &listed["next"]), (&json!("one"), &json!(null)));
    let shown = ask("GET", "/v1/nodes/one").of(&running).await.json();
    assert_eq!((&shown["lease_s"], &shown["draining"]), (&json!(2.0), &json!(false)));
    assert_eq!(shown["workflows"]["echo"].as_array().map(Vec::len), Some(1), "{shown}");
    assert!(shown["since"].as_str().unwrap().ends_with('Z') && shown["shards"].is_array(), "{shown}");

    let call = || ask("PUT", "/v1/nodes/two/drain").header("idempotency-key", "k");
    let drained = call().of(&running).await;
    assert_eq!((drained.status, &drained.json()["draining"]), (200, &json!(true)), "{drained:?}");
    let again = call().of(&running).await;
    assert_eq!((&again.text, again.header("idempotent-replayed")), (&drained.text, Some("true")));
    until(&running, "/v1/nodes/two", |node| node["shards"] == json!([])).await;
    let undone = ask("DELETE", "/v1/nodes/two/drain").of(&running).await;
    assert_eq!((undone.status, &undone.json()["draining"]), (200, &json!(false)));
    until(&running, "/v1/nodes/two", |node| node["shards"] != json!([])).await;

    let moves = ask("GET", "/v1/nodes:moves").of(&running).await.json();
    let moved = &moves["items"][0];
    assert!(moved["at"].is_string() && moved["shards"].is_array() && moved["why"].is_string(), "{moves}");
    let one = ask("GET", "/v1/nodes:moves?limit=1").of(&running).await.json();
    assert_eq!(one["items"].as_array().unwrap().len(), 1);
    ask("GET", "/v1/nodes:moves?limit=0").of(&running).await.is_problem(400, "invalid-query");
    for (method, path) in
        [("GET", "/v1/nodes/none"), ("PUT", "/v1/nodes/none/drain"), ("DELETE", "/v1/nodes/none/drain")]
    {
        assert_eq!(ask(method, path).of(&running).await.is_problem(404, "not-found")["node"], "none");
    }
    other.shutdown().await.unwrap();
}

#[tokio::test]
async fn executions_that_no_node_can_run_are_listed() {
    let store = Store::memory().await.unwrap();
    let gone = workflow("gone").run(async |ctx: Ctx, _: u64| ctx.receive::<u64>("never").await);
    let first = node(&store, "one").register(&gone).start().await.unwrap();
    let id = first.start(&gone, 1).await.unwrap().id().to_string();
    first.shutdown().await.unwrap();
    let engine = node(&store, "two").start().await.unwrap();
    let running = start_api(engine.clone(), Api::on(&engine)).await;
    let holds = |left: &Value| left["items"].as_array().is_some_and(|items| !items.is_empty());
    engine.signal(id.as_str(), "never", &7_u64).await.unwrap();
    let left = until(&running, "/v1/nodes:unrunnable", holds).await;
    assert_eq!((&left["items"][0]["id"], &left["items"][0]["workflow"]), (&json!(id), &json!("gone")));
    assert!(left["items"][0]["started_at"].is_string(), "{left}");
}

#[tokio::test]
async fn a_store_that_is_not_shared_has_no_nodes() {
    let running = start().await;
    for path in ["/v1/nodes", "/v1/nodes:moves", "/v1/nodes:unrunnable"] {
        assert_eq!(ask("GET", path).of(&running).await.json(), json!({"items": [], "next": null}), "{path}");
    }
}
