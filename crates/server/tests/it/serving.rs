//! Starting, ending, sockets, and routers in other applications.

use std::net::SocketAddr;
use std::time::Duration;

use latchwork::json;
use latchwork::store::{Env, Store};
use latchwork::workflow::Engine;
use latchwork_server::{Access, Address, Api, Listen, NewToken, Role, Server, ServerError};

use crate::client::{address, ask, free, start, start_with, with_access};

async fn engine() -> Engine {
    Engine::on(&Store::memory().await.unwrap()).start().await.unwrap()
}

#[tokio::test]
async fn a_server_is_healthy_and_ready_until_it_ends() {
    let running = start().await;
    assert_eq!(ask("GET", "/healthz").of(&running).await.json(), json!({"status": "ok"}));
    assert_eq!(ask("GET", "/readyz").of(&running).await.json(), json!({"status": "ready"}));
    running.engine.store().close().await.unwrap();
    ask("GET", "/readyz").of(&running).await.is_problem(503, "unavailable");
    let refused = ask("GET", "/v1/entities/a").of(&running).await;
    let problem = refused.is_problem(503, "unavailable");
    assert!(refused.header("retry-after").is_some() && problem["retry_after_ms"].is_u64());
    let place = running.place.clone();
    let _ = running.server.shutdown().await;
    assert!(tokio::net::TcpStream::connect(place).await.is_err());
}

#[tokio::test]
async fn many_clients_connect_at_the_same_time() {
    let running = start().await;
    let address: SocketAddr = running.place.parse().unwrap();
    // The server runs on this thread, and accepts none before all have connected.
    let connect = |_| std::net::TcpStream::connect_timeout(&address, Duration::from_millis(500)).unwrap();
    let clients: Vec<_> = (0..500).map(connect).collect();
    assert_eq!(ask("GET", "/healthz").of(&running).await.status, 200);
    drop(clients);
}

#[tokio::test]
async fn the_socket_serves_its_owner_without_a_token() {
    let directory = tempfile::tempdir().unwrap();
    let new = NewToken::generate("a", Role::Read, &Env::system());
    let access = Access::local().token(new.token()).unwrap();
    let server = Server::builder().namespace("default", Api::on(&engine().await)).access(access);
    let server = server.listen(free()).listen(Listen::Socket(directory.path().into())).start().await.unwrap();
    let Address::Socket(path) = &server.addresses()[1] else { panic!("{:?}", server.addresses()) };
    let path = path.clone();
    let added = ask("POST", "/v1/entities").json(json!({"type": "t"})).at_socket(&path).await;
    assert_eq!(added.status, 201, "{added:?}");
    let foreign = ask("POST", "/v1/entities").header("origin", "https://evil.example").json(json!({"type": "t"}));
    foreign.at_socket(&path).await.is_problem(403, "origin-not-allowed");
    let refused = ask("POST", "/v1/entities").json(json!({"type": "t"})).at(&address(&server)).await;
    refused.is_problem(401, "unauthenticated");
    assert_eq!(refused.header("www-authenticate"), Some("Bearer"));
    server.shutdown().await.unwrap();
    assert!(!path.exists());
}

#[tokio::test]
async fn the_socket_of_a_namespace_serves_that_namespace() {
    let directory = tempfile::tempdir().unwrap();
    let server = Server::builder()
        .namespace("default", Api::on(&engine().await))
        .namespace("billing", Api::on(&engine().await))
        .listen(free())
        .listen(Listen::SocketOf(directory.path().into(), "billing".into()))
        .start()
        .await
        .unwrap();
    let Address::Socket(path) = &server.addresses()[1] else { panic!("{:?}", server.addresses()) };
    let path = path.clone();
    let added = ask("POST", "/v1/entities").json(json!({"id": "a", "type": "t"})).at_socket(&path).await;
    assert_eq!(added.status, 201, "{added:?}");
    assert_eq!(ask("GET", "/v1/ns/billing/entities/a").at_socket(&path).await.status, 200);
    assert_eq!(ask("GET", "/v1/ns/default/entities/a").at_socket(&path).await.status, 404);
    assert_eq!(ask("GET", "/v1/ns/billing/entities/a").at(&address(&server)).await.status, 200);
    assert_eq!(ask("GET", "/v1/entities/a").at(&address(&server)).await.status, 404);
    server.shutdown().await.unwrap();
    let unknown = Listen::SocketOf(directory.path().into(), "billing".into());
    let refused = Server::builder().namespace("default", Api::on(&engine().await)).listen(unknown).start().await;
    assert!(matches!(refused.err(), Some(ServerError::NoSuchNamespace { .. })));
}

#[tokio::test]
async fn metrics_are_shown_to_readers_of_all_namespaces() {
    let env = Env::system();
    let (all, one) = (NewToken::generate("all", Role::Read, &env), NewToken::generate("one", Role::Read, &env));
    let one = one.namespaces(["default"]);
    let access = Access::local().token(all.token()).unwrap().token(one.token()).unwrap();
    let running = start_with(|server| {
        let server = server.metrics(|| "latchwork_steps_total 7\n".into());
        server.access(access)
    })
    .await;
    let asked =
        |token: &NewToken| ask("GET", "/metrics").header("authorization", &format!("Bearer {}", token.secret()));
    let shown = asked(&all).of(&running).await;
    assert_eq!((shown.status, shown.text.as_str()), (200, "latchwork_steps_total 7\n"));
    assert_eq!(shown.header("content-type"), Some("text/plain; version=0.0.4; charset=utf-8"));
    assert_eq!(asked(&one).of(&running).await.status, 200, "there is one namespace");
    ask("GET", "/metrics").of(&running).await.is_problem(401, "unauthenticated");
    asked(&all).header("host", "evil.example").of(&running).await.is_problem(421, "host-not-allowed");
    running.server.shutdown().await.unwrap();

    let access = Access::local().token(one.token()).unwrap();
    let second = Api::on(&engine().await);
    let running = start_with(|server| server.namespace("billing", second).metrics(String::new).access(access)).await;
    asked(&one).of(&running).await.is_problem(403, "forbidden");
    let without = start().await;
    ask("GET", "/metrics").of(&without).await.is_problem(404, "no-route");
}

#[tokio::test]
async fn an_address_that_others_can_reach_needs_protection() {
    let token = NewToken::generate("a", Role::Read, &Env::system()).token();
    let with_token = Access::local().token(token).unwrap();
    let everywhere = || Listen::Tcp("0.0.0.0:0".parse().unwrap());
    for access in [Access::local(), with_token.clone()] {
        let server = Server::builder().namespace("default", Api::on(&engine().await)).access(access);
        let refused = server.listen(everywhere()).start().await.err();
        assert!(matches!(refused, Some(ServerError::Exposed { .. })), "{refused:?}");
    }
    let public = Access::local().host("latch.example.org").unwrap();
    let server = Server::builder().namespace("default", Api::on(&engine().await)).access(public).listen(free());
    assert!(matches!(server.start().await.err(), Some(ServerError::PublicHost)));
    let server = Server::builder().namespace("default", Api::on(&engine().await)).access(with_token.insecure());
    server.listen(everywhere()).start().await.unwrap().shutdown().await.unwrap();
    for name in ["", "A", "a/b", "é"] {
        let server = Server::builder().namespace(name, Api::on(&engine().await)).listen(free());
        assert!(matches!(server.start().await.err(), Some(ServerError::NamespaceName { .. })), "{name:?}");
    }
    assert!(matches!(Server::builder().start().await.err(), Some(ServerError::NoNamespace)));
}

#[tokio::test]
async fn pages_of_an_allowed_origin_may_use_a_token() {
    let new = NewToken::generate("a", Role::Read, &Env::system());
    let access = Access::local().token(new.token()).unwrap().origin("https://console.example").unwrap();
    let running = start_with(with_access(access)).await;
    let asked = |origin: &str| ask("GET", "/v1/entities/a").header("origin", origin);
    let bearer = format!("Bearer {}", new.secret());
    let answer = asked("https://console.example").header("authorization", &bearer).of(&running).await;
    answer.is_problem(404, "not-found");
    assert_eq!(answer.header("access-control-allow-origin"), Some("https://console.example"));
    let other = asked("https://evil.example").header("authorization", &bearer).of(&running).await;
    assert!(other.header("access-control-allow-origin").is_none());
    asked("https://console.example").of(&running).await.is_problem(403, "origin-not-allowed");
    let preflight = ask("OPTIONS", "/v1/entities/a").header("origin", "https://console.example");
    let preflight = preflight.header("access-control-request-method", "PATCH").of(&running).await;
    assert_eq!(preflight.status, 200, "{preflight:?}");
    assert!(preflight.header("access-control-allow-methods").unwrap().contains("PATCH"));
}

#[tokio::test]
async fn the_router_serves_in_another_application() {
    let engine = engine().await;
    let application = axum::Router::new()
        .route("/own", axum::routing::get(async || "own"))
        .nest("/latchwork", Api::on(&engine).router());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let place = listener.local_addr().unwrap().to_string();
    let service = application.into_make_service_with_connect_info::<SocketAddr>();
    let serving = tokio::spawn(async move { axum::serve(listener, service).await });
    assert_eq!(ask("GET", "/own").at(&place).await.text, "own");
    let added = ask("POST", "/latchwork/v1/entities").json(json!({"id": "a", "type": "t"})).at(&place).await;
    assert_eq!((added.status, added.header("location")), (201, Some("entities/a")));
    assert_eq!(ask("GET", "/latchwork/v1/ns/default/entities/a").at(&place).await.status, 200);
    let document = ask("GET", "/latchwork/openapi.json").at(&place).await.json();
    assert_eq!(document["servers"][0]["url"], "/latchwork/v1");
    ask("GET", "/latchwork/v1/entities/a")
        .header("host", "evil.example")
        .at(&place)
        .await
        .is_problem(421, "host-not-allowed");
    serving.abort();

    // Without the address of the peer, no request is admitted.
    let application = axum::Router::new().merge(Api::on(&engine).router());
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let place = listener.local_addr().unwrap().to_string();
    let serving = tokio::spawn(async move { axum::serve(listener, application).await });
    ask("GET", "/v1/entities/a").at(&place).await.is_problem(401, "unauthenticated");
    serving.abort();
}
