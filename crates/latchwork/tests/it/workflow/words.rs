//! What executions say of themselves when they are printed.

use std::collections::BTreeMap;
use std::time::Duration;

use latchwork::Value;
use latchwork::store::Timestamp;
use latchwork::testing::TestEngine;
use latchwork::workflow::{
    Attribute, Ctx, Description, ExecutionFilter, Failure, Kind, Queue, Retry, Schedule, ScheduleDescription, Workflow,
    workflow,
};

const HOUR: Duration = Duration::from_secs(3600);

/// An engine whose day begins at noon.
async fn at_noon<I: 'static, O: 'static>(workflow: &Workflow<I, O>) -> TestEngine {
    let test = TestEngine::new(workflow, 1).await.unwrap();
    test.set_time(Timestamp(1_780_315_200_000_000));
    test
}

fn order() -> Workflow<String, u32> {
    workflow("order").run(async |ctx: Ctx, how: String| match how.as_str() {
        "sleep" => ctx.sleep(HOUR).await.map(|()| 0),
        "signal" => Ok(ctx.receive::<u32>("approve").timeout(HOUR).await?.unwrap_or(0)),
        "retry" => {
            let retry = Retry::exponential().first_pause(HOUR).longest_pause(HOUR);
            ctx.run("ship", async || Err::<u32, _>(Failure::new("no ship"))).retry(retry).await
        }
        "fail" => Err(Failure::new("the card was refused").not_retryable()),
        _ => Ok(42),
    })
}

#[tokio::test]
async fn why_and_waits_are_sentences() {
    let order = order();
    let test = at_noon(&order).await;
    for how in ["sleep", "signal", "retry", "fail", "complete"] {
        test.engine().start(&order, how.to_string()).id(how).await.unwrap();
    }
    test.engine().start(&order, "complete".to_string()).id("later").delay(HOUR).await.unwrap();
    test.run(test.env().sleep(Duration::from_secs(60))).await;
    let now = test.env().now();
    for (id, display, sentences) in [
        (
            "signal",
            "Execution \"signal\" of workflow \"order\" is waiting, out of memory.\nIt waits for signal \"approve\", \
             since 2026-06-01 12:00:00 UTC, until 2026-06-01 13:00:00 UTC at most.",
            "It waits for signal \"approve\", since 2026-06-01 12:00:00 UTC (1m 0s ago), until \
             2026-06-01 13:00:00 UTC at most (in 59m 0s).",
        ),
        (
            "sleep",
            "Execution \"sleep\" of workflow \"order\" is asleep, out of memory.\nIt waits for the end of a sleep, \
             due at 2026-06-01 13:00:00 UTC.",
            "It waits for the end of a sleep, which is due in 59m 0s, at 2026-06-01 13:00:00 UTC.",
        ),
        (
            "later",
            "Execution \"later\" of workflow \"order\" is asleep, out of memory.\nIt waits for its beginning, \
             due at 2026-06-01 13:00:00 UTC.",
            "It waits for its beginning, which is due in 59m 0s, at 2026-06-01 13:00:00 UTC.",
        ),
        (
            "fail",
            "Execution \"fail\" of workflow \"order\" waits for nothing: it failed at 2026-06-01 12:00:00 UTC: \
             the card was refused",
            "Execution \"fail\" of workflow \"order\" waits for nothing: it failed 1m 0s ago: the card was refused",
        ),
        (
            "complete",
            "Execution \"complete\" of workflow \"order\" waits for nothing: it completed at \
             2026-06-01 12:00:00 UTC.",
            "Execution \"complete\" of workflow \"order\" waits for nothing: it completed 1m 0s ago.",
        ),
    ] {
        let why = test.engine().why(id).await.unwrap();
        assert_eq!(why.to_string(), display);
        assert_eq!(why.sentences(now).last().unwrap(), sentences);
    }
    let why = test.engine().why("retry").await.unwrap();
    assert!(why.to_string().contains("It waits for the next attempt at step \"ship\", due at 2026-06-01"), "{why}");
    // An hour too late, and out of memory all the same.
    let late = why.sentences(now.plus(2 * HOUR));
    assert!(late[1].contains(", which was due "), "{late:?}");
}

#[tokio::test]
async fn a_position_in_a_queue_is_part_of_the_sentence() {
    let limited = workflow("import").concurrency(1).when_full(Queue::new());
    let limited = limited.run(async |ctx: Ctx, ()| ctx.receive::<u32>("end").await);
    let test = at_noon(&limited).await;
    for id in ["first", "second"] {
        test.engine().start(&limited, ()).id(id).await.unwrap();
    }
    let why = test.engine().why("second").await.unwrap().to_string();
    assert!(why.contains("It waits for a permit of the limit for \"import\", since "), "{why}");
    assert!(why.ends_with(" 1 of 1 permits are taken, and 0 starts are before it in the queue."), "{why}");
    test.engine().cancel("first", "enough").await.unwrap();
}

#[tokio::test]
async fn a_list_is_a_line_for_each_execution() {
    let order = order();
    let test = at_noon(&order).await;
    for how in ["fail", "signal", "complete"] {
        test.engine().start(&order, how.to_string()).id(how).await.unwrap();
    }
    test.run(test.env().sleep(Duration::from_secs(60))).await;
    let page = test.engine().list(ExecutionFilter::new()).await.unwrap();
    let mut lines: Vec<String> = page.items.iter().map(ToString::to_string).collect();
    lines.sort();
    assert_eq!(
        lines,
        [
            "complete of workflow \"order\": completed",
            "fail of workflow \"order\": failed: the card was refused",
            "signal of workflow \"order\": waiting for signal \"approve\", since 2026-06-01 12:00:00 UTC, until \
             2026-06-01 13:00:00 UTC at most",
        ]
    );
}

#[tokio::test]
async fn operations_are_told_with_names_for_their_parts() {
    let notes = workflow("notes").run(async |ctx: Ctx, ()| {
        let nothing = ctx.receive::<u32>("never").timeout(Duration::from_secs(5)).await?;
        let guard = ctx.mutex("m").acquire().await?;
        ctx.state().global::<u64>("count").increment(3).await?;
        guard.release().await?;
        let slow = ctx.run("slow", async || Err::<(), _>(Failure::new("no").not_retryable())).await;
        Ok((nothing, slow.is_err(), ctx.uuid().await.to_string()))
    });
    let test = at_noon(&notes).await;
    let handle = test.engine().start(&notes, ()).id("n").await.unwrap();
    let (nothing, has_failed, uuid) = test.run(handle.result()).await.unwrap();
    assert_eq!((nothing, has_failed), (None, true));
    let history = test.history("n").await.unwrap();
    let of = |kind: Kind| history.operations.iter().find(|operation| operation.kind == kind).unwrap();
    assert!(of(Kind::Signal).is_timed_out());
    assert!(!of(Kind::Step).is_timed_out());
    assert_eq!(of(Kind::Step).state.to_string(), "failed: no");
    assert_eq!(of(Kind::Uuid).labelled(), Some(uuid.into()));
    let token = of(Kind::Lock).labelled().unwrap()["token"].clone();
    assert!(token.is_u64());
    let parts = latchwork::json!({"token": token, "was_held": true, "acquired_at": "1"});
    assert_eq!(of(Kind::Unlock).labelled(), Some(parts));
    let parts = latchwork::json!({"value": 3, "rev": 1, "changed": true});
    assert_eq!(of(Kind::Slot).labelled(), Some(parts));
}

/// The paths of all numbers that are times or lengths of time, by their keys.
fn times(value: &Value, path: &str, found: &mut BTreeMap<String, u64>) {
    let parts: Vec<(String, &Value)> = match value {
        Value::Object(fields) => fields.iter().map(|(key, value)| (key.clone(), value)).collect(),
        Value::Array(items) => items.iter().map(|item| ("*".into(), item)).collect(),
        _ => Vec::new(),
    };
    for (key, value) in parts {
        let path = format!("{path}{}{key}", if path.is_empty() { "" } else { "." });
        if key.ends_with("_us") {
            found.extend(value.as_u64().map(|us| (path.clone(), us)));
        }
        times(value, &path, found);
    }
}

#[tokio::test]
async fn times_are_microseconds_in_json_and_their_keys_say_so() {
    const NOON: u64 = 1_780_315_200_000_000;
    let order = order();
    let test = at_noon(&order).await;
    let engine = test.engine();
    engine.start(&order, "signal".into()).id("o").await.unwrap();
    test.run(test.env().sleep(Duration::from_secs(1))).await;
    let schedule = Schedule::every("s", HOUR).jitter(Duration::from_secs(5)).workflow(&order, "complete".into());
    let schedule = engine.schedules().put(schedule).await.unwrap();
    let described = engine.describe("o").await.unwrap();
    assert_eq!((described.started, described.waits[0].until), (Timestamp(NOON), Some(Timestamp(NOON).plus(HOUR))));
    let listed = engine.list(ExecutionFilter::new()).await.unwrap().items.remove(0);
    let told = latchwork::json!({
        "described": described,
        "listed": listed,
        "why": engine.why("o").await.unwrap(),
        "history": engine.history("o").await.unwrap(),
        "schedule": schedule,
        "attribute": Attribute::Time(Timestamp(NOON)),
    });
    let mut found = BTreeMap::new();
    times(&told, "", &mut found);
    let keys: Vec<&str> = found.keys().map(String::as_str).collect();
    assert_eq!(
        keys,
        [
            "described.changed_us",
            "described.started_us",
            "described.waits.*.since_us",
            "described.waits.*.until_us",
            "history.changed_us",
            "history.operations.*.recorded_us",
            "history.operations.*.since_us",
            "history.started_us",
            "listed.started_us",
            "listed.waits.*.since_us",
            "listed.waits.*.until_us",
            "schedule.catch_up_us",
            "schedule.changed_us",
            "schedule.created_us",
            "schedule.fires.every.interval_us",
            "schedule.jitter_us",
            "schedule.next_us",
            "why.changed_us",
            "why.waits.*.since_us",
            "why.waits.*.until_us",
        ]
    );
    assert_eq!((found["listed.started_us"], found["listed.waits.*.until_us"]), (NOON, NOON + 3_600_000_000));
    assert_eq!((found["schedule.fires.every.interval_us"], found["schedule.jitter_us"]), (3_600_000_000, 5_000_000));
    assert_eq!(told["attribute"], latchwork::json!({"time": NOON}));
    // And they are read again.
    assert_eq!(serde_json::from_value::<Description>(told["described"].clone()).unwrap(), described);
    assert_eq!(serde_json::from_value::<ScheduleDescription>(told["schedule"].clone()).unwrap(), schedule);
}
