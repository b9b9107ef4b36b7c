//! The OpenAPI document and the page.

use std::collections::BTreeSet;

use latchwork::Value;

use crate::client::{ask, start};

#[tokio::test]
async fn the_document_names_every_operation_once() {
    let running = start().await;
    let document = ask("GET", "/openapi.json").of(&running).await.json();
    assert_eq!(document["openapi"], "3.1.0");
    assert_eq!(document["servers"][0]["url"], "/v1");
    let mut ids = BTreeSet::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        let operations = item.as_object().unwrap().iter().filter(|(_, operation)| operation.get("responses").is_some());
        for (method, operation) in operations {
            let id = operation["operationId"].as_str().unwrap().to_string();
            assert!(ids.insert(id.clone()), "{id} stands twice");
            assert!(operation["summary"].is_string(), "{method} {path} has no summary");
            let public = operation["x-latchwork-role"] == "public";
            assert!(public || operation["responses"]["default"].is_object(), "{method} {path}");
        }
    }
    let text = document.to_string();
    for part in text.split("\"$ref\":\"#").skip(1) {
        let pointer = part.split('"').next().unwrap();
        assert_ne!(document.pointer(pointer), None, "{pointer} is missing");
    }
}

#[tokio::test]
async fn the_page_shows_every_route_and_loads_nothing() {
    let running = start().await;
    let page = ask("GET", "/docs").of(&running).await;
    assert_eq!(page.header("content-type"), Some("text/html; charset=utf-8"));
    let document: Value = ask("GET", "/openapi.json").of(&running).await.json();
    for path in document["paths"].as_object().unwrap().keys() {
        assert!(page.text.contains(path), "{path}");
    }
    for word in ["<script", "http://", "https://", "src="] {
        assert!(!page.text.contains(word), "{word}");
    }
}
