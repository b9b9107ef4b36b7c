//! Calls that are cut off between their effect and their answer: the next attempt has the same answer, and no effect of
//! its own.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use axum::extract::State;
use axum::response::Response;
use latchwork::store::Store;
use latchwork::workflow::{Ctx, Engine, Failure, Retry, Status, WaitsFor, workflow};
use latchwork::{Value, json};
use serde::de::DeserializeOwned;

use super::messages::{signal_execution, update_execution};
use super::start_execution;
use super::steer::{cancel_execution, fork_execution, resume_execution, retry_execution, terminate_execution};
use crate::access::Access;
use crate::api::{Api, Closing, Namespace};
use crate::calls::Call;
use crate::limits::Limits;
use crate::wire::problem::{Problem, ProblemCode};
use crate::wire::request::{JsonBody, PathParams, QueryParams};
use crate::wire::wait::WaitQuery;

const HOUR: Duration = Duration::from_secs(3600);

/// A namespace with workflows, and how often the step of `count` has run.
pub(crate) async fn namespace() -> (Namespace, Arc<AtomicU32>) {
    let steps = Arc::new(AtomicU32::new(0));
    let counted = steps.clone();
    let count = workflow("count").run(move |ctx: Ctx, input: u32| {
        let counted = counted.clone();
        async move {
            ctx.run("step", || std::future::ready(Ok(counted.fetch_add(1, Ordering::SeqCst)))).await?;
            Ok(input)
        }
    });
    let wait = workflow("wait").run(async |ctx: Ctx, input: u32| {
        let more: u32 = ctx.receive("go").await?;
        Ok(input + more)
    });
    let sum = workflow("sum").run(async |ctx: Ctx, _: ()| {
        let mut sum = 0_u64;
        loop {
            let add = ctx.receive_update::<u64, u64>("add").await?;
            sum += add.value;
            add.answer(&sum).await?;
        }
        #[allow(unreachable_code)]
        Ok(())
    });
    let first = Arc::new(AtomicU32::new(0));
    let brittle = workflow("brittle").run(move |_: Ctx, _: ()| {
        let first = first.clone();
        async move {
            assert!(first.fetch_add(1, Ordering::SeqCst) > 0, "the first run breaks");
            Ok(())
        }
    });
    let broken = workflow("broken").run(async |_: Ctx, _: ()| {
        assert!(std::hint::black_box(false), "every run breaks");
        Ok(())
    });
    let pauses = workflow("pauses").run(async |ctx: Ctx, _: ()| {
        let slow = Retry::exponential().max_attempts(9).first_pause(HOUR).longest_pause(HOUR);
        ctx.run("fails", async || Err::<(), _>(Failure::new("no"))).retry(slow).await
    });
    let ask = workflow("ask").run(async |ctx: Ctx, _: ()| {
        let decision = ctx.review("sure", &"Are you sure?", ["yes", "no"]).await?;
        Ok(decision.option)
    });
    let brief = workflow("brief").keep(Duration::ZERO).run(async |_: Ctx, input: u32| Ok(input));
    let engine = Engine::on(&Store::memory().await.unwrap()).register(&ask).register(&broken).register(&pauses);
    let engine = engine.register(&brief);
    let engine = engine.register(&count).register(&wait).register(&sum).register(&brittle).start().await.unwrap();
    let closing = Closing::new(tokio::sync::watch::Sender::new(false));
    (Api::on(&engine).into_namespace("default", Access::local(), Limits::default(), closing), steps)
}

pub(crate) fn body<T: DeserializeOwned>(value: Value) -> JsonBody<T> {
    JsonBody(serde_json::from_value(value).unwrap())
}

pub(crate) async fn read(answer: Result<Response, Problem>) -> (u16, Value) {
    let answer = answer.unwrap_or_else(|problem| panic!("{problem:?}"));
    let status = answer.status().as_u16();
    let bytes = axum::body::to_bytes(answer.into_body(), 1 << 20).await.unwrap();
    (status, serde_json::from_slice(&bytes).unwrap_or_default())
}

/// Makes a call twice, as if its process had died before the first answer was stored. Returns both answers.
pub(crate) async fn cut_off<F>(namespace: &Namespace, key: u8, call: impl Fn(Call) -> F) -> [(u16, Value); 2]
where
    F: Future<Output = Result<Response, Problem>>,
{
    let (first, attempt) = Call::begin(namespace.calls(), key).await;
    let answer = read(call(first).await).await;
    drop(attempt);
    let (second, _attempt) = Call::begin(namespace.calls(), key).await;
    assert!(second.repeated_since().is_some());
    [answer, read(call(second).await).await]
}

fn no_wait() -> QueryParams<WaitQuery> {
    QueryParams(WaitQuery::default())
}

async fn start(namespace: &Namespace, new: Value) -> Result<Response, Problem> {
    start_execution(State(namespace.clone()), Call::default(), no_wait(), body(new)).await
}

#[tokio::test]
async fn a_start_is_one_execution() {
    let (namespace, steps) = namespace().await;
    for (key, new) in [
        (1, json!({"workflow": "count", "input": 1})),
        (2, json!({"workflow": "count", "input": 2, "id": "mine"})),
        (3, json!({"workflow": "count", "input": 3, "idempotency_key": "cart-9"})),
        (4, json!({"workflow": "count", "input": 4, "id": "mine", "join": true, "restart": true})),
    ] {
        let before = steps.load(Ordering::SeqCst);
        let call = |call| start_execution(State(namespace.clone()), call, no_wait(), body(new.clone()));
        let [first, again] = cut_off(&namespace, key, call).await;
        assert_eq!((first.0, &first), (201, &again));
        let id = first.1["id"].as_str().unwrap();
        namespace.engine().handle_by_id(id).result().await.unwrap();
        assert_eq!(steps.load(Ordering::SeqCst), before + 1, "{new}");
    }
    let new = json!({"workflow": "count", "input": 5});
    let wait = || QueryParams(WaitQuery { wait: Some("30s".into()) });
    let call = |call| start_execution(State(namespace.clone()), call, wait(), body(new.clone()));
    let [first, again] = cut_off(&namespace, 5, call).await;
    assert_eq!((&first.1["result"]["output"], &first), (&json!(5), &again));
    // Another caller's id stays taken.
    let (call, _attempt) = Call::begin(namespace.calls(), 9).await;
    let taken = json!({"workflow": "count", "input": 9, "id": "mine"});
    let refused = start_execution(State(namespace.clone()), call, no_wait(), body(taken)).await.unwrap_err();
    assert_eq!(refused.code(), ProblemCode::AlreadyExists);
}

#[tokio::test]
async fn an_execution_that_was_removed_is_not_started_again() {
    let (namespace, _) = namespace().await;
    let brief = |call| {
        start_execution(State(namespace.clone()), call, no_wait(), body(json!({"workflow": "brief", "input": 1})))
    };
    let (call, attempt) = Call::begin(namespace.calls(), 1).await;
    let id = read(brief(call).await).await.1["id"].as_str().unwrap().to_string();
    drop(attempt);
    while namespace.engine().describe(id.as_str()).await.is_ok() {
        tokio::task::yield_now().await;
    }
    let (call, _attempt) = Call::begin(namespace.calls(), 1).await;
    assert_eq!(brief(call).await.unwrap_err().code(), ProblemCode::OutcomeUnknown);
}

#[tokio::test]
async fn an_execution_takes_the_place_of_another_once() {
    let (namespace, steps) = namespace().await;
    let later = json!({"workflow": "count", "id": "report", "input": 1, "delay_ms": 3_600_000});
    read(start(&namespace, later).await).await;
    let new = json!({"workflow": "count", "id": "report", "input": 2, "supersede": "terminate"});
    let (call, attempt) = Call::begin(namespace.calls(), 1).await;
    read(start_execution(State(namespace.clone()), call, no_wait(), body(new.clone())).await).await;
    let result = namespace.engine().handle_by_id("report").result_through_parks().await.unwrap();
    assert_eq!(result, json!(2));
    drop(attempt);
    let (call, _attempt) = Call::begin(namespace.calls(), 1).await;
    let again = read(start_execution(State(namespace.clone()), call, no_wait(), body(new)).await).await;
    assert_eq!(again, (201, json!({"id": "report", "item": null, "result": null})));
    assert_eq!(steps.load(Ordering::SeqCst), 1);
}

#[tokio::test]
async fn a_signal_and_an_update_count_once() {
    let (namespace, _) = namespace().await;
    read(start(&namespace, json!({"workflow": "wait", "id": "w", "input": 1})).await).await;
    let signal = |call| {
        let signal = body(json!({"name": "go", "payload": 2}));
        signal_execution(State(namespace.clone()), PathParams("w".into()), call, signal)
    };
    // The second attempt finds that the execution has ended, and that its signal was sent before.
    let [first, again] = cut_off(&namespace, 1, signal).await;
    assert_eq!((first.0, again.0), (204, 204));
    assert_eq!(namespace.engine().handle_by_id("w").result().await.unwrap(), json!(3));

    read(start(&namespace, json!({"workflow": "sum", "id": "s"})).await).await;
    let update = |call| {
        let wait = QueryParams(WaitQuery { wait: Some("30s".into()) });
        let update = body(json!({"name": "add", "request": 5}));
        update_execution(State(namespace.clone()), PathParams("s".into()), wait, call, update)
    };
    let [first, again] = cut_off(&namespace, 2, update).await;
    assert_eq!((&first.1["answer"], &first), (&json!(5), &again));
    let sum = namespace.engine().update::<u64>("s", "add", &1).await.unwrap();
    assert_eq!(sum, 6);
}

#[tokio::test]
async fn what_operators_do_is_found_again() {
    let (namespace, _) = namespace().await;
    let because = || body(json!({"reason": "it was a test"}));
    for id in ["a", "b"] {
        read(start(&namespace, json!({"workflow": "wait", "id": id, "input": 1})).await).await;
    }
    let (call, attempt) = Call::begin(namespace.calls(), 1).await;
    read(cancel_execution(State(namespace.clone()), PathParams("a".into()), call, because()).await).await;
    let _ = namespace.engine().handle_by_id("a").result().await.unwrap_err();
    drop(attempt);
    let (call, _attempt) = Call::begin(namespace.calls(), 1).await;
    let again = cancel_execution(State(namespace.clone()), PathParams("a".into()), call, because()).await;
    assert_eq!(read(again).await.0, 204);
    let terminate = |call| terminate_execution(State(namespace.clone()), PathParams("b".into()), call, because());
    let [first, again] = cut_off(&namespace, 2, terminate).await;
    assert_eq!((first.0, again.0), (204, 204));
    // Another call is told that it comes too late.
    let (call, _attempt) = Call::begin(namespace.calls(), 3).await;
    let late = terminate_execution(State(namespace.clone()), PathParams("b".into()), call, because()).await;
    assert_eq!(late.unwrap_err().code(), ProblemCode::Ended);
    let (call, attempt) = Call::begin(namespace.calls(), 4).await;
    drop((call, attempt));
    let (call, _attempt) = Call::begin(namespace.calls(), 4).await;
    let other = body(json!({"reason": "another one"}));
    let late = terminate_execution(State(namespace.clone()), PathParams("b".into()), call, other).await;
    assert_eq!(late.unwrap_err().code(), ProblemCode::Ended);
}

#[tokio::test]
async fn a_resumed_execution_is_resumed_once() {
    let (namespace, _) = namespace().await;
    read(start(&namespace, json!({"workflow": "brittle", "id": "b"})).await).await;
    let _ = namespace.engine().handle_by_id("b").result().await.unwrap_err();
    assert_eq!(namespace.engine().describe("b").await.unwrap().status(), Status::Parked);
    let resume = |call| resume_execution(State(namespace.clone()), PathParams("b".into()), call);
    let [first, again] = cut_off(&namespace, 1, resume).await;
    assert_eq!((first.0, again.0), (204, 204));
    namespace.engine().handle_by_id("b").result().await.unwrap();
    assert_eq!(namespace.engine().describe("b").await.unwrap().resumes, 1);
    let late = resume(Call::default()).await.unwrap_err();
    assert_eq!(late.code(), ProblemCode::NotParked);
}

#[tokio::test]
async fn an_execution_that_is_parked_again_is_not_resumed_by_a_repeated_call() {
    let (namespace, _) = namespace().await;
    read(start(&namespace, json!({"workflow": "broken", "id": "b"})).await).await;
    let _ = namespace.engine().handle_by_id("b").result().await.unwrap_err();
    let is_parked = async |resumes| {
        let found = namespace.engine().describe("b").await.unwrap();
        found.status() == Status::Parked && found.resumes == resumes
    };
    let (call, attempt) = Call::begin(namespace.calls(), 1).await;
    read(resume_execution(State(namespace.clone()), PathParams("b".into()), call).await).await;
    drop(attempt);
    while !is_parked(1).await {
        tokio::task::yield_now().await;
    }
    // A retry of a parked execution is a resume.
    let (call, attempt) = Call::begin(namespace.calls(), 2).await;
    read(retry_execution(State(namespace.clone()), PathParams("b".into()), call).await).await;
    drop(attempt);
    while !is_parked(2).await {
        tokio::task::yield_now().await;
    }
    let (call, _attempt) = Call::begin(namespace.calls(), 1).await;
    assert_eq!(read(resume_execution(State(namespace.clone()), PathParams("b".into()), call).await).await.0, 204);
    let (call, _attempt) = Call::begin(namespace.calls(), 2).await;
    assert_eq!(read(retry_execution(State(namespace.clone()), PathParams("b".into()), call).await).await.0, 204);
    assert!(is_parked(2).await, "it was resumed once more");
}

#[tokio::test]
async fn a_step_is_retried_once_by_a_call_that_was_cut_off() {
    let (namespace, _) = namespace().await;
    read(start(&namespace, json!({"workflow": "pauses", "id": "p"})).await).await;
    let attempts = async || {
        let history = namespace.engine().history("p").await.unwrap();
        history.operations.first().map_or(0, |step| step.attempts)
    };
    let pauses = async |after| {
        let waits = async || {
            let waits = namespace.engine().why("p").await.unwrap().waits;
            waits.iter().any(|wait| matches!(wait.what, WaitsFor::Retry(_)))
        };
        while attempts().await != after || !waits().await {
            tokio::task::yield_now().await;
        }
    };
    pauses(1).await;
    let retry = |call| retry_execution(State(namespace.clone()), PathParams("p".into()), call);
    let (call, attempt) = Call::begin(namespace.calls(), 1).await;
    assert_eq!(read(retry(call).await).await.0, 204);
    drop(attempt);
    pauses(2).await;
    let (call, _attempt) = Call::begin(namespace.calls(), 1).await;
    assert_eq!(read(retry(call).await).await.0, 204);
    namespace.env().sleep(Duration::from_millis(50)).await;
    assert_eq!(attempts().await, 2, "the step was retried once more");
}

#[tokio::test]
async fn an_execution_that_took_the_id_of_another_is_not_ended_by_a_repeated_call() {
    let (namespace, _) = namespace().await;
    let because = || body(json!({"reason": "it was a test"}));
    for (key, id) in [(1, "a"), (2, "b")] {
        read(start(&namespace, json!({"workflow": "wait", "id": id, "input": 1})).await).await;
        let end = |call| async {
            let (state, path) = (State(namespace.clone()), PathParams(id.to_string()));
            match id {
                "a" => cancel_execution(state, path, call, because()).await,
                _ => terminate_execution(state, path, call, because()).await,
            }
        };
        let (call, attempt) = Call::begin(namespace.calls(), key).await;
        read(end(call).await).await;
        drop(attempt);
        let _ = namespace.engine().handle_by_id(id).result().await.unwrap_err();
        let new = json!({"workflow": "wait", "id": id, "input": 1, "join": true, "restart": true});
        read(start(&namespace, new).await).await;
        let (call, _attempt) = Call::begin(namespace.calls(), key).await;
        assert_eq!(end(call).await.unwrap_err().code(), ProblemCode::OutcomeUnknown, "{id}");
        let found = namespace.engine().describe(id).await.unwrap();
        assert!(!found.status().is_end() && found.cancel.is_none(), "{found:?}");
    }
}

#[tokio::test]
async fn a_fork_is_one_execution() {
    let (namespace, steps) = namespace().await;
    read(start(&namespace, json!({"workflow": "count", "id": "c", "input": 1})).await).await;
    namespace.engine().handle_by_id("c").result().await.unwrap();
    for (key, fork) in [(1, json!({})), (2, json!({"id": "c2", "at_step": "step", "input": 7}))] {
        let before = steps.load(Ordering::SeqCst);
        let call = |call| fork_execution(State(namespace.clone()), PathParams("c".into()), call, body(fork.clone()));
        let [first, again] = cut_off(&namespace, key, call).await;
        assert_eq!((first.0, &first), (201, &again));
        namespace.engine().handle_by_id(first.1["id"].as_str().unwrap()).result().await.unwrap();
        assert_eq!(steps.load(Ordering::SeqCst), before + 1);
    }
    let (call, _attempt) = Call::begin(namespace.calls(), 3).await;
    let taken = fork_execution(State(namespace.clone()), PathParams("c".into()), call, body(json!({"id": "c2"}))).await;
    assert_eq!(taken.unwrap_err().code(), ProblemCode::AlreadyExists);
}
