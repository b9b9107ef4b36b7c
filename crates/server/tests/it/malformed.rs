//! Requests that no good client sends. Each gets a documented answer, and the server goes on.

use std::time::Duration;

use latchwork::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::client::{ask, raw, start, start_with, with_limits};

#[tokio::test]
async fn a_request_for_another_host_is_refused_on_every_route() {
    let running = start().await;
    for path in ["/v1/entities/a", "/healthz", "/readyz", "/openapi.json", "/docs", "/nowhere"] {
        let answer = ask("GET", path).header("host", "evil.example").of(&running).await;
        answer.is_problem(421, "host-not-allowed");
        let two = format!("GET {path} HTTP/1.1\r\nHost: localhost\r\nHost: localhost\r\nConnection: close\r\n\r\n");
        raw(&running.place, two.as_bytes()).await.is_problem(400, "invalid-header");
        let none = format!("GET {path} HTTP/1.0\r\n\r\n");
        raw(&running.place, none.as_bytes()).await.is_problem(400, "invalid-header");
    }
    let absolute = b"GET http://evil.example/healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n";
    raw(&running.place, absolute).await.is_problem(400, "invalid-header");
}

#[tokio::test]
async fn a_page_of_another_origin_is_refused() {
    let running = start().await;
    let own = format!("http://{}", running.place);
    for (name, value, status) in [
        ("origin", own.as_str(), 404),
        ("origin", "https://evil.example", 403),
        ("origin", "null", 403),
        ("sec-fetch-site", "cross-site", 403),
        ("sec-fetch-site", "same-origin", 404),
    ] {
        let answer = ask("GET", "/v1/entities/a").header(name, value).of(&running).await;
        assert_eq!(answer.status, status, "{name}: {value}");
        assert!(answer.header("access-control-allow-origin").is_none());
    }
}

#[tokio::test]
async fn headers_that_are_too_large_are_refused() {
    let running = start().await;
    let large = format!("GET /healthz HTTP/1.1\r\nHost: localhost\r\nX: {}\r\n\r\n", "x".repeat(1 << 20));
    assert_eq!(raw(&running.place, large.as_bytes()).await.status, 431);
    let many: String = (0..200).map(|number| format!("X-{number}: 1\r\n")).collect();
    let many = format!("GET /healthz HTTP/1.1\r\nHost: localhost\r\n{many}\r\n");
    assert_eq!(raw(&running.place, many.as_bytes()).await.status, 431);
    assert_eq!(ask("GET", "/healthz").of(&running).await.status, 200);
}

#[tokio::test]
async fn a_body_that_is_too_large_is_refused() {
    let running = start_with(with_limits(|limits| limits.body_bytes = 1000)).await;
    let body = json!({"type": "person", "data": "x".repeat(2000)});
    let refused = ask("POST", "/v1/entities").json(body).of(&running).await;
    assert_eq!(refused.is_problem(413, "too-large")["limit_bytes"], 1000);
    let chunk = format!("{:x}\r\n{}\r\n", 600, "x".repeat(600));
    let chunked = format!(
        "POST /v1/entities HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nConnection: close\r\n\
         Transfer-Encoding: chunked\r\n\r\n{chunk}{chunk}0\r\n\r\n"
    );
    raw(&running.place, chunked.as_bytes()).await.is_problem(413, "too-large");
}

#[tokio::test]
async fn a_body_that_is_sent_too_slowly_is_refused() {
    let running = start_with(with_limits(|limits| limits.body_time = Duration::from_millis(200))).await;
    let mut stream = TcpStream::connect(&running.place).await.unwrap();
    let head = "POST /v1/entities HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
                Content-Length: 100\r\n\r\n{\"type\"";
    stream.write_all(head.as_bytes()).await.unwrap();
    let mut read = String::new();
    stream.read_to_string(&mut read).await.unwrap();
    assert!(read.starts_with("HTTP/1.1 408") && read.contains("\"body-timeout\""), "{read}");
}

#[tokio::test]
async fn headers_that_are_sent_too_slowly_end_the_connection() {
    let running = start_with(with_limits(|limits| limits.header_time = Duration::from_millis(200))).await;
    let mut stream = TcpStream::connect(&running.place).await.unwrap();
    stream.write_all(b"GET /healthz HTTP/1.1\r\nHost: loc").await.unwrap();
    let mut read = Vec::new();
    stream.read_to_end(&mut read).await.unwrap();
    assert!(!String::from_utf8_lossy(&read).contains("200 OK"));
}

#[tokio::test]
async fn text_that_is_not_utf_8_is_refused() {
    let running = start().await;
    ask("GET", "/v1/entities/%FF").of(&running).await.is_problem(400, "invalid-path");
    ask("GET", "/v1/entities/a?as_of=%FF").of(&running).await.is_problem(400, "invalid-query");
    let body =
        ask("POST", "/v1/entities").header("content-type", "application/json").body(b"{\"type\": \"\xff\"}".to_vec());
    body.of(&running).await.is_problem(400, "invalid-body");
    let header =
        b"GET /v1/entities/a HTTP/1.1\r\nHost: localhost\r\nIf-None-Match: \"\xff\"\r\nConnection: close\r\n\r\n";
    let answer = raw(&running.place, header).await;
    assert_eq!(answer.status, 404, "a condition matters only to what exists: {answer:?}");
}

#[tokio::test]
async fn a_body_that_is_not_the_json_of_the_route_is_refused() {
    let running = start().await;
    let send = |kind: &str, body: &str| {
        ask("POST", "/v1/entities").header("content-type", kind).body(body.as_bytes().to_vec())
    };
    send("text/plain", "{}").of(&running).await.is_problem(415, "media-type");
    ask("POST", "/v1/entities").of(&running).await.is_problem(415, "media-type");
    for wrong in ["", "{", "[]", "{}", "{\"type\": 1}", "{\"type\": \"t\", \"dat\": 1}", "{\"type\": \"t\"} x"] {
        send("application/json", wrong).of(&running).await.is_problem(400, "invalid-body");
    }
    let deep = format!("{{\"type\": \"t\", \"data\": {}{}}}", "[".repeat(200), "]".repeat(200));
    send("application/json; charset=utf-8", &deep).of(&running).await.is_problem(400, "too-deep");
    send("application/json", "{\"type\": \"\"}").of(&running).await.is_problem(400, "invalid");
}

#[tokio::test]
async fn what_does_not_exist_is_a_problem_too() {
    let running = start().await;
    for path in ["/", "/nowhere", "/v1", "/v1/", "/v1/nowhere", "/v1/ns/default/nowhere", "/v1/ns/default"] {
        ask("GET", path).of(&running).await.is_problem(404, "no-route");
    }
    ask("GET", "/v1/ns/other/entities/a").of(&running).await.is_problem(404, "namespace-not-found");
    let wrong = ask("POST", "/v1/entities/a").of(&running).await;
    wrong.is_problem(405, "method-not-allowed");
    assert!(wrong.header("allow").unwrap().contains("PATCH"), "{wrong:?}");
    ask("GET", "/v1/entities/a?color=red").of(&running).await.is_problem(400, "invalid-query");
    for limit in ["0", "1001", "-1", "x"] {
        let page = ask("GET", &format!("/v1/entities/a/history?limit={limit}")).of(&running).await;
        page.is_problem(400, "invalid-query");
    }
    ask("GET", "/v1/entities/a/history?after=zz").of(&running).await.is_problem(400, "invalid-cursor");
}
