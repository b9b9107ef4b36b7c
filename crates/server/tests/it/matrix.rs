//! Every route of the document with no token, a bad token, a role that is too low, and a token of another namespace.

use latchwork::store::{Env, Store};
use latchwork::workflow::Engine;
use latchwork::{Value, json};
use latchwork_server::{Access, Api, NewToken, Role};

use crate::client::{Ask, Running, ask, start_with};

/// A route of the document.
struct Route {
    method: String,
    path: String,
    role: String,
}

async fn routes(running: &Running) -> Vec<Route> {
    let document = ask("GET", "/openapi.json").of(running).await.json();
    let mut found = Vec::new();
    for (path, item) in document["paths"].as_object().unwrap() {
        for (method, operation) in item.as_object().unwrap() {
            if let Some(role) = operation["x-latchwork-role"].as_str() {
                let path = path.split('/').map(|part| if part.starts_with('{') { "x" } else { part });
                let path = path.collect::<Vec<_>>().join("/");
                found.push(Route { method: method.to_uppercase(), path, role: role.into() });
            } else {
                assert!(operation.get("responses").is_none(), "{method} {path} has no role");
            }
        }
    }
    found
}

struct Tokens {
    read: NewToken,
    operate: NewToken,
    admin: NewToken,
    other: NewToken,
}

async fn guarded() -> (Running, Tokens) {
    let env = Env::system();
    let new = |name, role| NewToken::generate(name, role, &env);
    let tokens = Tokens {
        read: new("reader", Role::Read),
        operate: new("operator", Role::Operate),
        admin: new("admin", Role::Admin),
        other: new("other", Role::Admin).namespaces(["other"]),
    };
    let access = [&tokens.read, &tokens.operate, &tokens.admin, &tokens.other]
        .into_iter()
        .try_fold(Access::local(), |access, new| access.token(new.token()))
        .unwrap();
    let other = Engine::on(&Store::memory().await.unwrap()).start().await.unwrap();
    let running = start_with(|server| server.access(access).namespace("other", Api::on(&other))).await;
    (running, tokens)
}

fn asked(route: &Route, prefix: &str, token: Option<&str>) -> Ask {
    let path = format!("{prefix}{}", route.path);
    let asked = ask(&route.method, &path).header("if-match", "*").json(json!({"type": "t", "ops": []}));
    match token {
        Some(token) => asked.header("authorization", &format!("Bearer {token}")),
        None => asked,
    }
}

async fn status(running: &Running, route: &Route, prefix: &str, token: Option<&str>) -> (u16, Value) {
    let answer = asked(route, prefix, token).of(running).await;
    let document = serde_json::from_str(&answer.text).unwrap_or_default();
    (answer.status, document)
}

#[tokio::test]
async fn no_route_answers_without_the_right_token() {
    let (running, tokens) = guarded().await;
    let routes = routes(&running).await;
    assert!(routes.len() >= 10);
    for route in routes.iter().filter(|route| route.role != "public") {
        let shown = format!("{} {}", route.method, route.path);
        let bad = NewToken::generate("reader", Role::Admin, &Env::system());
        for prefix in ["/v1", "/v1/ns/default", "/v1/ns/other", "/v1/ns/missing"] {
            for token in [None, Some(bad.secret()), Some(""), Some(&tokens.admin.secret()[1..])] {
                let (status, problem) = status(&running, route, prefix, token).await;
                assert_eq!((status, &problem["code"]), (401, &json!("unauthenticated")), "{shown} at {prefix}");
            }
        }
        for prefix in ["/v1", "/v1/ns/default", "/v1/ns/missing"] {
            let (status, problem) = status(&running, route, prefix, Some(tokens.other.secret())).await;
            assert_eq!((status, &problem["code"]), (403, &json!("forbidden")), "{shown} at {prefix}");
        }
        let low = match route.role.as_str() {
            "admin" => vec![&tokens.read, &tokens.operate],
            "operate" => vec![&tokens.read],
            _ => Vec::new(),
        };
        for token in low {
            let (status, problem) = status(&running, route, "/v1", Some(token.secret())).await;
            assert_eq!((status, &problem["role"]), (403, &json!(route.role)), "{shown}");
        }
        for prefix in ["/v1", "/v1/ns/other"] {
            let status = asked(route, prefix, Some(tokens.admin.secret())).status_of(&running).await;
            assert!(![401, 403].contains(&status), "{shown} at {prefix}: {status}");
        }
    }
    // Nothing of all this has left a trace in the other namespace.
    let found = ask("POST", "/v1/ns/other/entities:find")
        .header("authorization", &format!("Bearer {}", tokens.other.secret()))
        .json(json!({}))
        .of(&running)
        .await;
    assert_eq!(found.status, 200, "{found:?}");
}

#[tokio::test]
async fn namespaces_share_nothing() {
    let (running, tokens) = guarded().await;
    let bearer = format!("Bearer {}", tokens.admin.secret());
    let added = ask("POST", "/v1/entities").header("authorization", &bearer).json(json!({"id": "a", "type": "t"}));
    assert_eq!(added.of(&running).await.status, 201);
    for (path, status) in
        [("/v1/entities/a", 200), ("/v1/ns/default/entities/a", 200), ("/v1/ns/other/entities/a", 404)]
    {
        assert_eq!(ask("GET", path).header("authorization", &bearer).of(&running).await.status, status, "{path}");
    }
    let missing = ask("GET", "/v1/ns/missing/entities/a").header("authorization", &bearer).of(&running).await;
    missing.is_problem(404, "namespace-not-found");
    // The same key of two subjects is two calls.
    for new in [&tokens.admin, &tokens.operate] {
        let bearer = format!("Bearer {}", new.secret());
        let call = ask("POST", "/v1/entities").header("authorization", &bearer).header("idempotency-key", "k");
        let answer = call.json(json!({"type": "t"})).of(&running).await;
        assert_eq!((answer.status, answer.header("idempotent-replayed")), (201, None));
    }
}

#[tokio::test]
async fn the_token_that_writes_is_kept_by_history() {
    let (running, tokens) = guarded().await;
    let bearer = format!("Bearer {}", tokens.operate.secret());
    let added = ask("POST", "/v1/entities").header("authorization", &bearer).header("idempotency-key", "k");
    assert_eq!(added.json(json!({"id": "a", "type": "t"})).of(&running).await.status, 201);
    let history = ask("GET", "/v1/entities/a/history").header("authorization", &bearer).of(&running).await.json();
    assert_eq!(history["items"][0]["author"], "operator");
    assert!(history["items"][0].get("reason").is_none(), "the mark of the call is not shown: {history}");
}
