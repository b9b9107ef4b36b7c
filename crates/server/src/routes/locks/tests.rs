//! Calls of locks whose process dies between the effect and the answer: the next attempt finds what the first has done.

use std::sync::Arc;
use std::time::Duration;

use axum::Extension;
use axum::body::to_bytes;
use axum::extract::State;
use axum::response::Response;
use latchwork::lock::{LockKind, StandingOutcome, StandingRequest};
use latchwork::store::{Store, Uuid};
use latchwork::workflow::Engine;
use latchwork::{Value, json};

use super::acquire::{AcquireQuery, acquire_lock, release_lock};
use super::sessions::begin_session;
use super::{force_release_lock, remove_lock};
use crate::access::{Access, Caller};
use crate::api::{Api, Closing, Namespace};
use crate::calls::Call;
use crate::limits::Limits;
use crate::wire::lock::ScopeQuery;
use crate::wire::problem::{Problem, ProblemCode};
use crate::wire::request::{JsonBody, PathParams, QueryParams};

async fn namespace() -> Namespace {
    let engine = Engine::on(&Store::memory().await.unwrap()).start().await.unwrap();
    let closing = Closing::new(tokio::sync::watch::Sender::new(false));
    Api::on(&engine).into_namespace("default", Access::local(), Limits::default(), closing)
}

async fn shown(answer: Result<Response, Problem>) -> Value {
    let bytes = to_bytes(answer.unwrap().into_body(), 1 << 20).await.unwrap();
    serde_json::from_slice(&bytes).unwrap_or_default()
}

fn body<T: serde::de::DeserializeOwned>(value: Value) -> JsonBody<T> {
    JsonBody(serde_json::from_value(value).unwrap())
}

async fn begin(namespace: &Namespace, call: Call) -> Uuid {
    let caller = Extension(Caller { subject: Arc::from("importer") });
    let begun = shown(begin_session(State(namespace.clone()), caller, call, body(json!({}))).await).await;
    assert_eq!(begun["label"], "importer");
    begun["id"].as_str().unwrap().parse().unwrap()
}

async fn acquire(namespace: &Namespace, call: Call, session: Uuid) -> Result<Response, Problem> {
    let path = PathParams("m".to_string());
    let query = QueryParams(AcquireQuery::default());
    acquire_lock(State(namespace.clone()), path, query, call, body(json!({"session": session}))).await
}

async fn release(namespace: &Namespace, call: Call, session: Uuid, token: &Value) -> Result<Response, Problem> {
    let (path, query) = (PathParams("m".to_string()), QueryParams(ScopeQuery::default()));
    let asked = body(json!({"session": session, "token": token}));
    release_lock(State(namespace.clone()), path, query, call, asked).await
}

#[tokio::test]
async fn a_session_is_begun_once() {
    let namespace = namespace().await;
    let (call, attempt) = Call::begin(namespace.calls(), 1).await;
    let first = begin(&namespace, call).await;
    drop(attempt);
    let (call, attempt) = Call::begin(namespace.calls(), 1).await;
    assert_eq!(begin(&namespace, call).await, first);
    // The session of a call may end before the call is sent again: its id is not used a second time.
    namespace.engine().locks().lasting_session(first).await.unwrap().unwrap().end().await.unwrap();
    drop(attempt);
    let (call, _attempt) = Call::begin(namespace.calls(), 1).await;
    assert_ne!(begin(&namespace, call).await, first);
}

#[tokio::test]
async fn a_lock_is_acquired_and_released_once() {
    let namespace = namespace().await;
    let session = begin(&namespace, Call::default()).await;
    let (call, attempt) = Call::begin(namespace.calls(), 1).await;
    let first = shown(acquire(&namespace, call, session).await).await;
    assert_eq!(first["granted"], true);
    drop(attempt);
    let (call, _attempt) = Call::begin(namespace.calls(), 1).await;
    assert_eq!(shown(acquire(&namespace, call, session).await).await, first);

    let token = &first["token"];
    let (call, attempt) = Call::begin(namespace.calls(), 2).await;
    assert_eq!(shown(release(&namespace, call, session, token).await).await["released"], true);
    drop(attempt);
    // The same request holds the lock again when the release is repeated.
    let (locks, again) = (namespace.engine().locks(), StandingRequest::new(first["request"].as_str().unwrap()));
    let holder = locks.lasting_session(session).await.unwrap().unwrap();
    let again = locks.stand(&holder, "m", LockKind::Mutex, again).await.unwrap();
    assert!(matches!(again, StandingOutcome::Granted(_)));
    let (call, _attempt) = Call::begin(namespace.calls(), 2).await;
    assert_eq!(shown(release(&namespace, call, session, token).await).await["released"], true);
    assert_eq!(locks.inspect("m").await.unwrap().used, 1, "a repeated release has released a later grant");
}

#[tokio::test]
async fn a_repeated_release_does_not_hide_that_the_lock_was_lost() {
    let namespace = namespace().await;
    let session = begin(&namespace, Call::default()).await;
    let held = shown(acquire(&namespace, Call::default(), session).await).await;
    let locks = namespace.engine().locks();
    locks.force_release("m", held["token"].as_u64().unwrap(), "test").await.unwrap();
    let (call, attempt) = Call::begin(namespace.calls(), 1).await;
    assert_eq!(shown(release(&namespace, call, session, &held["token"]).await).await["released"], false);
    drop(attempt);
    let (call, attempt) = Call::begin(namespace.calls(), 1).await;
    assert_eq!(shown(release(&namespace, call, session, &held["token"]).await).await["released"], false);
    drop(attempt);
    let other = begin(&namespace, Call::default()).await;
    let held = shown(acquire(&namespace, Call::default(), other).await).await;
    let (call, attempt) = Call::begin(namespace.calls(), 2).await;
    drop((call, attempt));
    let (call, attempt) = Call::begin(namespace.calls(), 2).await;
    let foreign = release(&namespace, call, session, &held["token"]).await;
    assert_eq!(shown(foreign).await["released"], false, "it belongs to another session");
    drop(attempt);
    locks.lasting_session(session).await.unwrap().unwrap().end().await.unwrap();
    let (call, _attempt) = Call::begin(namespace.calls(), 1).await;
    let lost = release(&namespace, call, session, &held["token"]).await.unwrap_err();
    assert_eq!(lost.code(), ProblemCode::SessionLost);
}

#[tokio::test]
async fn operators_release_and_remove_once() {
    let namespace = namespace().await;
    let session = begin(&namespace, Call::default()).await;
    let held = shown(acquire(&namespace, Call::default(), session).await).await;
    let force = async |call| {
        let (path, query) = (PathParams("m".to_string()), QueryParams(ScopeQuery::default()));
        let asked = body(json!({"token": held["token"], "reason": "it hangs"}));
        force_release_lock(State(namespace.clone()), path, query, call, asked).await
    };
    let (call, attempt) = Call::begin(namespace.calls(), 1).await;
    let first = shown(force(call).await).await;
    assert_eq!((&first["reason"], &first["released"]["label"]), (&json!("it hangs"), &json!("importer")));
    drop(attempt);
    let (call, _attempt) = Call::begin(namespace.calls(), 1).await;
    let again = shown(force(call).await).await;
    for field in ["token", "session", "since", "granted_at", "exclusive", "permits"] {
        assert_eq!(again["released"][field], first["released"][field], "{field}");
    }
    let forced = namespace.engine().locks().inspect("m").await.unwrap().forced;
    assert_eq!(forced.len(), 1);
    assert_eq!(force(Call::default()).await.unwrap_err().code(), ProblemCode::NotFound);

    let remove = async |call| {
        let (path, query) = (PathParams("m".to_string()), QueryParams(ScopeQuery::default()));
        remove_lock(State(namespace.clone()), path, query, call).await
    };
    let (call, attempt) = Call::begin(namespace.calls(), 2).await;
    assert_eq!(remove(call).await.unwrap().status(), 204);
    drop(attempt);
    assert_eq!(remove(Call::default()).await.unwrap_err().code(), ProblemCode::NotFound);
    // Another caller uses the lock again. The repeated call does not remove it.
    let session = begin(&namespace, Call::default()).await;
    let held = shown(acquire(&namespace, Call::default(), session).await).await;
    shown(release(&namespace, Call::default(), session, &held["token"]).await).await;
    let (call, _attempt) = Call::begin(namespace.calls(), 2).await;
    assert_eq!(remove(call).await.unwrap().status(), 204);
    assert!(namespace.engine().locks().inspect("m").await.is_ok());
    // A call that was cut off before its effect takes effect when it is repeated.
    let (old, attempt) = Call::begin(namespace.calls(), 3).await;
    drop(attempt);
    let (call, _attempt) = Call::begin(namespace.calls(), 3).await;
    assert_eq!(remove(old).await.unwrap_err().code(), ProblemCode::KeyInUse);
    assert_eq!(remove(call).await.unwrap().status(), 204);
    assert_eq!(remove(Call::default()).await.unwrap_err().code(), ProblemCode::NotFound);
}

#[tokio::test]
async fn a_waiting_call_is_answered_when_the_server_shuts_down() {
    let engine = Engine::on(&Store::memory().await.unwrap()).start().await.unwrap();
    let closing = Closing::new(tokio::sync::watch::Sender::new(false));
    let (access, limits) = (Access::local(), Limits::default());
    let namespace = Api::on(&engine).into_namespace("default", access, limits, closing.clone());
    let (holder, session) = (begin(&namespace, Call::default()).await, begin(&namespace, Call::default()).await);
    assert_eq!(acquire(&namespace, Call::default(), holder).await.unwrap().status(), 200);
    let begun = engine.store().env().monotonic();
    let call = tokio::spawn({
        let namespace = namespace.clone();
        async move {
            let query = QueryParams(AcquireQuery::waiting("60s"));
            let asked = body(json!({"session": session}));
            acquire_lock(State(namespace), PathParams("m".into()), query, Call::default(), asked).await
        }
    });
    while engine.locks().inspect("m").await.unwrap().waiting == 0 {
        tokio::task::yield_now().await;
    }
    closing.send_replace(true);
    assert_eq!(call.await.unwrap().unwrap().status(), 202);
    assert!(engine.store().env().monotonic() - begun < Duration::from_secs(30));
    assert_eq!(engine.locks().inspect("m").await.unwrap().waiting, 1, "it keeps its place");
}
