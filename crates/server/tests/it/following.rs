//! Streams of what happens to an execution.

use std::time::Duration;

use latchwork::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::client::ask;
use crate::workflows::shop;

/// Reads a stream of events until its end, or until a text is in it.
async fn stream(place: &str, query: &str, position: Option<u64>, until: Option<&str>) -> String {
    let mut stream = TcpStream::connect(place).await.unwrap();
    let position = position.map(|position| format!("last-event-id: {position}\r\n")).unwrap_or_default();
    let head = format!("GET {query} HTTP/1.1\r\nhost: {place}\r\nconnection: close\r\n{position}\r\n");
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut read = Vec::new();
    let mut part = [0; 4096];
    loop {
        let text = String::from_utf8_lossy(&read).into_owned();
        if until.is_some_and(|until| text.contains(until)) {
            return text;
        }
        match stream.read(&mut part).await.unwrap() {
            0 => return text,
            length => read.extend_from_slice(&part[..length]),
        }
    }
}

/// The positions, types and data of the events in a stream.
fn events(text: &str) -> Vec<(u64, String, Value)> {
    let field = |event: &str, name: &str| event.lines().find_map(|line| line.strip_prefix(name).map(String::from));
    let read = |event: &str| {
        let data = serde_json::from_str(&field(event, "data: ")?).unwrap();
        Some((field(event, "id: ")?.parse().unwrap(), field(event, "event: ")?, data))
    };
    text.split("\n\n").filter_map(read).collect()
}

#[tokio::test]
async fn a_stream_tells_what_happens_until_the_end() {
    let shop = shop().await;
    shop.start(json!({"workflow": "account", "input": 0, "id": "a"})).await;
    shop.waits("a", "update").await;
    let (place, first) = (shop.place.clone(), "/v1/workflows/a/events");
    let live = tokio::spawn(async move { stream(&place, first, None, None).await });
    shop.engine.store().env().sleep(Duration::from_millis(300)).await;
    for amount in [1, 99] {
        shop.post("/v1/workflows/a/updates?wait=30s", json!({"name": "add", "request": amount})).await;
    }
    let text = live.await.unwrap();
    let told = events(&text);
    let (end, _, standing) = told.last().unwrap().clone();
    assert_eq!((&standing["status"], &standing["output"]), (&json!("completed"), &json!(100)), "{text}");
    let operations = shop.get("/v1/workflows/a/history?limit=1000").await.json();
    for operation in operations["items"].as_array().unwrap() {
        let is_told = told.iter().any(|(_, name, data)| name == "event" && data == operation);
        assert!(is_told, "{operation} is missing in {text}");
    }
    assert!(told.windows(2).all(|pair| pair[0].0 <= pair[1].0), "{text}");

    // A client that knows the end has nothing to expect; one that does not is told the rest.
    let known = stream(&shop.place, first, Some(end), None).await;
    assert!(known.starts_with("HTTP/1.1 204 "), "{known}");
    let rest = events(&stream(&shop.place, first, Some(told[told.len() - 2].0), None).await);
    assert_eq!(rest.last(), told.last());
    assert!(rest.len() < told.len(), "{rest:?}");
    let future = ask("GET", "/v1/workflows/a/events?after=99999999999999999").at(&shop.place).await;
    assert!(future.is_problem(400, "future-event")["latest_us"].is_u64());
    let wrong = ask("GET", first).header("last-event-id", "soon").at(&shop.place).await;
    wrong.is_problem(400, "invalid-header");
}

#[tokio::test]
async fn a_stream_ends_with_the_server() {
    let shop = shop().await;
    shop.start(json!({"workflow": "order", "input": "tea", "id": "o"})).await;
    let text = stream(&shop.place, "/v1/workflows/o/events", None, Some("event: status")).await;
    assert!(text.contains("text/event-stream"), "{text}");
    let place = shop.place.clone();
    let live = tokio::spawn(async move { stream(&place, "/v1/workflows/o/events", None, None).await });
    shop.engine.store().env().sleep(Duration::from_millis(300)).await;
    shop.server.shutdown().await.unwrap();
    assert!(live.await.unwrap().contains("event: status"));
}
