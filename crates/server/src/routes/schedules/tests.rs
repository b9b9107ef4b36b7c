//! Changes of schedules whose process dies between the effect and the answer. Another caller does the opposite before
//! the call is repeated: the repeated call has the first answer, and changes nothing.

use super::*;

use crate::routes::workflows::tests::{body, namespace, read};
use latchwork::{Value, json};

type Answered = Result<Response, Problem>;

async fn hourly() -> Namespace {
    let (namespace, _) = namespace().await;
    assert_eq!(read(put(&namespace, Call::default(), 3_600_000).await).await.0, 201);
    namespace
}

fn path() -> PathParams<String> {
    PathParams("hourly".into())
}

fn put(namespace: &Namespace, call: Call, every_ms: u64) -> impl Future<Output = Answered> + use<> {
    let new = json!({"workflow": "count", "input": 1, "every_ms": every_ms, "overlap": "allow"});
    put_schedule(State(namespace.clone()), path(), call, body(new))
}

fn pause(namespace: &Namespace, call: Call) -> impl Future<Output = Answered> + use<> {
    pause_schedule(State(namespace.clone()), path(), call, body(json!({"reason": "it was a test"})))
}

fn resume(namespace: &Namespace, call: Call) -> impl Future<Output = Answered> + use<> {
    resume_schedule(State(namespace.clone()), path(), call)
}

fn delete(namespace: &Namespace, call: Call) -> impl Future<Output = Answered> + use<> {
    delete_schedule(State(namespace.clone()), path(), call)
}

/// Makes a call, and what another caller does after it; then the call again, as if its process had died before the
/// first answer was stored. Both answers must be the same. Returns it.
async fn cut_off<F>(
    namespace: &Namespace,
    call: impl Fn(Call) -> F,
    other: impl Future<Output = Answered>,
) -> (u16, Value)
where
    F: Future<Output = Answered>,
{
    let (first, attempt) = Call::begin(namespace.calls(), 1).await;
    let answer = read(call(first).await).await;
    drop(attempt);
    assert_eq!(read(other.await).await.0 / 100, 2);
    let (second, _attempt) = Call::begin(namespace.calls(), 1).await;
    assert!(second.repeated_since().is_some());
    assert_eq!(read(call(second).await).await, answer);
    answer
}

async fn shown(namespace: &Namespace) -> latchwork::workflow::ScheduleDescription {
    namespace.engine().schedules().get("hourly").await.unwrap().unwrap()
}

#[tokio::test]
async fn a_trigger_that_was_cut_off_fires_once() {
    let namespace = hourly().await;
    let schedules = namespace.engine().schedules();
    let trigger = |call| trigger_schedule(State(namespace.clone()), path(), call);
    let fired = cut_off(&namespace, trigger, trigger(Call::default())).await.1;
    while shown(&namespace).await.counts.started < 2 {
        tokio::task::yield_now().await;
    }
    let runs = schedules.runs("hourly").await.unwrap().items;
    assert_eq!(runs.len(), 2, "one of the call and one of the other caller: {runs:?}");
    assert!(runs.iter().any(|run| fired["id"] == *run.id));
}

#[tokio::test]
async fn a_schedule_that_was_put_is_not_put_over_a_later_change() {
    let (namespace, _) = namespace().await;
    let first = |call| put(&namespace, call, 3_600_000);
    let (status, put_first) = cut_off(&namespace, first, put(&namespace, Call::default(), 60_000)).await;
    assert_eq!((status, &put_first["every_ms"]), (201, &json!(3_600_000)), "{put_first}");
    let minutely = latchwork::workflow::Fires::Every { interval: std::time::Duration::from_secs(60) };
    assert_eq!(shown(&namespace).await.fires, minutely);
}

#[tokio::test]
async fn a_pause_and_a_resume_do_not_undo_what_came_later() {
    let namespace = hourly().await;
    let answer = cut_off(&namespace, |call| pause(&namespace, call), resume(&namespace, Call::default())).await.1;
    assert_eq!(answer["paused"], "it was a test");
    assert_eq!(shown(&namespace).await.paused, None);

    let namespace = hourly().await;
    read(pause(&namespace, Call::default()).await).await;
    let answer = cut_off(&namespace, |call| resume(&namespace, call), pause(&namespace, Call::default())).await.1;
    assert!(answer["next"].is_string(), "{answer}");
    assert!(shown(&namespace).await.paused.is_some());
}

#[tokio::test]
async fn a_backfill_that_was_cut_off_is_made_once() {
    let namespace = hourly().await;
    let (from, to) = ("2026-01-01T00:00:00Z", "2026-01-01T03:00:00Z");
    let range = || body(json!({"from": from, "to": to}));
    let backfill = |call| backfill_schedule(State(namespace.clone()), path(), call, range());
    let (first, attempt) = Call::begin(namespace.calls(), 1).await;
    assert_eq!(read(backfill(first).await).await.1["occurrences"], 3);
    drop(attempt);
    while shown(&namespace).await.counts.started < 3 {
        tokio::task::yield_now().await;
    }
    let (second, _attempt) = Call::begin(namespace.calls(), 1).await;
    assert_eq!(read(backfill(second).await).await.1["occurrences"], 3);
    let found = shown(&namespace).await;
    assert_eq!((found.backfills, found.counts.skipped), (0, 0), "the occurrences were looked at again");
}

#[tokio::test]
async fn a_deletion_that_was_cut_off_does_not_delete_a_later_schedule() {
    let namespace = hourly().await;
    let other = put(&namespace, Call::default(), 60_000);
    assert_eq!(cut_off(&namespace, |call| delete(&namespace, call), other).await.0, 200);
    shown(&namespace).await;
    // A call that found nothing finds nothing when it is repeated.
    read(delete(&namespace, Call::default()).await).await;
    for _ in 0..2 {
        let (call, _attempt) = Call::begin(namespace.calls(), 2).await;
        assert_eq!(delete(&namespace, call).await.unwrap_err().code(), ProblemCode::NotFound);
    }
}

#[tokio::test]
async fn an_attempt_that_was_taken_over_changes_nothing() {
    let namespace = hourly().await;
    let (old, attempt) = Call::begin(namespace.calls(), 1).await;
    drop(attempt);
    let (_new, _attempt) = Call::begin(namespace.calls(), 1).await;
    assert_eq!(pause(&namespace, old).await.unwrap_err().code(), ProblemCode::KeyInUse);
    assert_eq!(shown(&namespace).await.paused, None);
}
