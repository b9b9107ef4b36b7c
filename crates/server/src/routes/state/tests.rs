//! Changes whose process dies between the effect and the answer: the next attempt gets the answer of the first.

use axum::body::to_bytes;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::response::Response;
use latchwork::store::Store;
use latchwork::workflow::Engine;
use latchwork::{Value, json};

use super::change::StateChange;
use crate::access::Access;
use crate::api::{Api, Closing, Namespace};
use crate::calls::Call;
use crate::limits::Limits;
use crate::wire::problem::Problem;
use crate::wire::state::FenceQuery;

async fn namespace() -> Namespace {
    let engine = Engine::on(&Store::memory().await.unwrap()).start().await.unwrap();
    let closing = Closing::new(tokio::sync::watch::Sender::new(false));
    Api::on(&engine).into_namespace("default", Access::local(), Limits::default(), closing)
}

fn headers(name: &'static str, value: &str) -> HeaderMap {
    HeaderMap::from_iter([(HeaderName::from_static(name), HeaderValue::from_str(value).unwrap())])
}

async fn shown(answer: Result<Response, Problem>) -> (u16, Value) {
    let answer = answer.unwrap();
    let status = answer.status().as_u16();
    let bytes = to_bytes(answer.into_body(), 1 << 20).await.unwrap();
    (status, serde_json::from_slice(&bytes).unwrap())
}

fn change<'a>(namespace: &Namespace, call: &'a Call) -> StateChange<'a> {
    let container = namespace.engine().states().session("s");
    StateChange::new(namespace, container, call, &FenceQuery::default()).unwrap()
}

#[tokio::test]
async fn a_change_that_landed_before_its_process_died_is_not_repeated() {
    let namespace = namespace().await;
    let session = namespace.engine().states().session("s");
    let put = async |call: &Call, name, value: &str, state| {
        shown(change(&namespace, call).put(&headers(name, value), state).await).await
    };
    for (key, name, value, state, status) in [
        (1, "if-none-match", "*", json!({"n": 0}), 201),
        (2, "if-match", "\"r2\"", json!({"n": 10}), 200),
        (3, "if-match", "*", json!({"n": 20}), 200),
        (4, "if-match", "\"r9\", \"r6\"", json!({"n": 30}), 200),
    ] {
        let (call, attempt) = Call::begin(namespace.calls(), key).await;
        let first = put(&call, name, value, state.clone()).await;
        assert_eq!(first.0, status, "{key}");
        drop(attempt);
        // Another caller changes it in between.
        session.inc_state("others", 1).await.unwrap();
        let (call, _attempt) = Call::begin(namespace.calls(), key).await;
        assert_eq!(put(&call, name, value, state).await, first, "{key}");
        assert_eq!(session.get().await.unwrap().unwrap()["others"], 1, "{key}: the other change is lost");
    }
    let (call, attempt) = Call::begin(namespace.calls(), 5).await;
    let inc = async |call: &Call| {
        shown(change(&namespace, call).operate(&HeaderMap::new(), |it| it.inc_state("n", 1)).await).await
    };
    let first = inc(&call).await;
    assert_eq!(first.1["value"], 31);
    drop(attempt);
    session.inc_state("n", 100).await.unwrap();
    let (call, _attempt) = Call::begin(namespace.calls(), 5).await;
    assert_eq!(inc(&call).await, first);
    assert_eq!(session.get().await.unwrap().unwrap()["n"], 131);

    // What it has replaced is gone when it is repeated.
    let (call, attempt) = Call::begin(namespace.calls(), 7).await;
    let first = put(&call, "if-match", "*", json!({"n": 1})).await;
    drop(attempt);
    session.delete_state().await.unwrap();
    let (call, _attempt) = Call::begin(namespace.calls(), 7).await;
    assert_eq!(put(&call, "if-match", "*", json!({"n": 1})).await, first);
    assert_eq!(session.get().await.unwrap(), None, "a repeated change has made a state anew");
    session.set_state(json!({"n": 1})).await.unwrap();

    let remove = async |call: &Call| shown(change(&namespace, call).remove(&headers("if-match", "*")).await).await;
    let (call, attempt) = Call::begin(namespace.calls(), 6).await;
    let first = remove(&call).await;
    drop(attempt);
    session.set_state(json!({"n": 1})).await.unwrap();
    let (call, _attempt) = Call::begin(namespace.calls(), 6).await;
    assert_eq!(remove(&call).await, first);
    assert_eq!(session.get().await.unwrap(), Some(json!({"n": 1})), "a repeated removal has removed a later state");
}

#[tokio::test]
async fn a_repeated_change_with_a_false_condition_is_refused() {
    let namespace = namespace().await;
    namespace.engine().states().session("s").set_state(json!({})).await.unwrap();
    let (call, attempt) = Call::begin(namespace.calls(), 1).await;
    drop((call, attempt));
    let (call, _attempt) = Call::begin(namespace.calls(), 1).await;
    for tags in ["\"r2\", \"r3\"", "W/\"r1\"", "\"r2\""] {
        let refused = change(&namespace, &call).put(&headers("if-match", tags), json!(1)).await.unwrap_err();
        assert_eq!((refused.status(), refused.code().slug()), (412, "revision-conflict"), "{tags}");
        assert_eq!(refused.document()["current_rev"], 1, "{tags}");
    }
}
