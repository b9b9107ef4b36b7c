//! Tasks on PostgreSQL, with two servers on one database: each task is done once, whichever server a worker asks.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use latchwork::node::NodeOptions;
use latchwork::store::{Env, PostgresOptions};
use latchwork::workflow::Engine;
use latchwork::{Value, json};
use latchwork_server::Api;
use parking_lot::Mutex;

use crate::client::{Running, ask, start_api};
use crate::server;

const TASKS: usize = 60;

async fn served(url: &str, schema: &str, name: &str) -> Running {
    let store = PostgresOptions::new().schema(schema).connect(url).await.unwrap();
    let node = NodeOptions::new().name(name).lease(Duration::from_secs(5));
    let engine = Engine::on(&store).node(node).start().await.unwrap();
    start_api(engine.clone(), Api::on(&engine)).await
}

/// A schema of this run alone.
fn schema() -> String {
    format!("server_{}", Env::system().uuid().simple())
}

async fn take(place: &str, worker: &str, wait: &str) -> Vec<Value> {
    let body = json!({"kinds": ["charge"], "max": 3, "lease": "2s", "worker": worker});
    let taken = ask("POST", &format!("/v1/tasks:take?wait={wait}")).json(body).at(place).await;
    assert_eq!(taken.status, 200, "{taken:?}");
    taken.json()["tasks"].as_array().unwrap().clone()
}

/// Works until no task comes any more. Every seventh task it takes and leaves, as a worker that dies.
async fn work(place: String, name: String, done: Arc<Mutex<BTreeMap<String, usize>>>) {
    loop {
        let taken = take(&place, &name, "4s").await;
        if taken.is_empty() {
            return;
        }
        for task in taken {
            let id = task["id"].as_str().unwrap();
            let number: usize = id.trim_start_matches('t').parse().unwrap();
            if number.is_multiple_of(7) && task["attempt"] == 1 {
                continue;
            }
            let complete = json!({"token": task["token"], "output": name});
            let key = format!("{id}-{}", task["token"]);
            let asked = ask("POST", &format!("/v1/tasks/{id}/complete")).header("idempotency-key", &key).json(complete);
            let answer = asked.at(&place).await;
            assert_eq!(answer.status, 200, "{answer:?}");
            *done.lock().entry(id.into()).or_default() += 1;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_servers_on_one_database_do_each_task_once() {
    let database = server::Server::start();
    let schema = schema();
    let (one, two) = (served(&database.url, &schema, "one").await, served(&database.url, &schema, "two").await);
    let places = [one.place.clone(), two.place.clone()];
    // A worker that waits at one server gets what is put at the other.
    let waits = tokio::spawn({
        let place = places[1].clone();
        async move { take(&place, "waits", "20s").await }
    });
    Env::system().sleep(Duration::from_millis(200)).await;
    let put = |place: &str, id: &str| {
        let new = ask("POST", "/v1/tasks").json(json!({"kind": "charge", "id": id, "input": 1}));
        let place = place.to_string();
        async move { new.at(&place).await }
    };
    assert_eq!(put(&places[0], "first").await.status, 201);
    let first = waits.await.unwrap().remove(0);
    assert_eq!(first["id"], "first");
    // Its lease holds at both servers, and so does its end.
    assert_eq!(take(&places[0], "other", "0s").await, Vec::<Value>::new());
    let complete = json!({"token": first["token"], "output": 1});
    let completed = ask("POST", "/v1/tasks/first/complete").json(complete).at(&places[0]).await;
    assert_eq!(completed.status, 200, "{completed:?}");
    assert_eq!(ask("GET", "/v1/tasks/first").at(&places[1]).await.json()["state"], "done");

    for number in 0..TASKS {
        // The same id at both servers is one task.
        let id = format!("t{number}");
        let statuses = [put(&places[0], &id).await.status, put(&places[1], &id).await.status];
        assert_eq!(statuses, [201, 200]);
    }
    let done = Arc::new(Mutex::new(BTreeMap::new()));
    let workers: Vec<_> = (0..6)
        .map(|number| tokio::spawn(work(places[number % 2].clone(), format!("w{number}"), done.clone())))
        .collect();
    for worker in workers {
        worker.await.unwrap();
    }
    let done = done.lock().clone();
    assert_eq!(done.len(), TASKS);
    assert!(done.values().all(|times| *times == 1), "{done:?}");
    let left = ask("GET", "/v1/tasks?limit=1000").at(&places[0]).await.json();
    let tasks = left["items"].as_array().unwrap();
    assert!(tasks.iter().all(|task| task["state"] == "done"), "{left}");
    let again = tasks.iter().filter(|task| task["attempt"] == 2).count();
    assert_eq!(again, TASKS.div_ceil(7), "those that were left were done by a second attempt");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_key_holds_at_both_servers() {
    let database = server::Server::start();
    let schema = schema();
    let (one, two) = (served(&database.url, &schema, "one").await, served(&database.url, &schema, "two").await);
    let call = || {
        let ask = ask("POST", "/v1/tasks").header("idempotency-key", "k");
        ask.json(json!({"kind": "charge", "input": 1}))
    };
    let first = call().at(&one.place).await;
    let again = call().at(&two.place).await;
    assert_eq!((first.status, &again.text, again.header("idempotent-replayed")), (201, &first.text, Some("true")));
}
