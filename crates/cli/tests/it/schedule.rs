//! `latch schedule` on directories: an engine of the library continues with what the command writes.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use latchwork::workflow::{Ctx, Engine, Workflow, workflow};
use serde_json::{Value, json};

use crate::{latch, succeeded, text};

fn report() -> Workflow<Value, Value> {
    workflow("report").run(async |_: Ctx, region: Value| Ok(region))
}

/// Runs code with an engine on a directory, in place of a process.
fn process<T>(store: &Path, does: impl AsyncFnOnce(&Engine) -> T) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let engine = Engine::open(store).register(&report()).start().await.unwrap();
        let done = does(&engine).await;
        engine.stop();
        engine.store().close().await.unwrap();
        done
    })
}

fn run(store: &Path, arguments: &[&str]) -> String {
    succeeded(latch(&[&["schedule"], arguments].concat(), store).output().unwrap())
}

fn json(store: &Path, arguments: &[&str]) -> Value {
    serde_json::from_str(&run(store, &[arguments, &["-o", "json"]].concat())).unwrap()
}

#[test]
fn a_schedule_is_created_looked_at_operated_and_deleted() {
    let directory = tempfile::tempdir().unwrap();
    let store = &directory.path().join("data");
    process(store, async |_| ());
    let nightly = ["create", "nightly", "--cron", "30 2 * * *", "--zone", "Europe/Berlin"];
    let target = ["--workflow", "report", "--input", "{\"region\":\"eu\"}", "--overlap", "queue-one", "--jitter", "1m"];
    let made = json(store, &[&nightly[..], &target[..]].concat());
    assert_eq!((&made["cron"], &made["zone"]), (&json!("30 2 * * *"), &json!("Europe/Berlin")));
    assert_eq!((&made["overlap"], &made["jitter_ms"]), (&json!("queue_one"), &json!(60_000)));
    assert_eq!(made["input"], json!({"region": "eu"}));
    let said = run(store, &["create", "often", "--every", "1h", "--workflow", "report"]);
    assert!(said.contains("every 1h 0m") && said.contains("It fires in "), "{said}");
    let table = run(store, &["list"]);
    assert!(table.contains("nightly") && table.contains("30 2 * * * (Europe/Berlin)"), "{table}");
    let paused = run(store, &["pause", "nightly", "--reason", "the books are closed"]);
    assert!(paused.contains("is paused"), "{paused}");
    let listed = json(store, &["list", "--paused"]);
    assert_eq!((listed["schedules"].as_array().unwrap().len(), &listed["next"]), (1, &Value::Null));
    assert_eq!(listed["schedules"][0]["paused"], "the books are closed");
    assert!(run(store, &["show", "nightly"]).contains("the books are closed"));
    assert!(json(store, &["resume", "nightly"])["next"].is_string());
    let page = json(store, &["list", "--limit", "1"]);
    let rest = json(store, &["list", "--after", page["next"].as_str().unwrap()]);
    assert_eq!((&page["schedules"][0]["name"], &rest["schedules"][0]["name"]), (&json!("nightly"), &json!("often")));
    let lines = run(store, &["list", "-o", "jsonl"]);
    assert_eq!(lines.lines().count(), 2);
    let shown = json(store, &["show", "nightly", "--next", "3"]);
    assert_eq!((shown["next"].as_array().unwrap().len(), &shown["runs"]), (3, &json!([])));
    // The next engine that has the workflow fires it.
    let triggered = json(store, &["trigger", "nightly"]);
    let id = triggered["id"].as_str().unwrap();
    assert!(id.starts_with("nightly@") && id.ends_with("~1"), "{id}");
    let output = process(store, async |engine| {
        while engine.describe(id).await.is_err() {
            engine.store().env().sleep(Duration::from_millis(5)).await;
        }
        engine.handle_by_id(id).result().await.unwrap()
    });
    assert_eq!(output, json!({"region": "eu"}));
    let shown = json(store, &["show", "nightly"]);
    assert_eq!((&shown["runs"][0]["id"], &shown["runs"][0]["outcome"]), (&json!(id), &json!("started")));
    assert_eq!(shown["runs"][0]["cause"], "trigger");
    assert!(run(store, &["show", "nightly"]).contains("1 started"));
    run(store, &["delete", "nightly"]);
    let gone = latch(&["schedule", "show", "nightly"], store).output().unwrap();
    assert_eq!(gone.status.code(), Some(3), "{}", text(&gone.stderr));
}

/// True for a time as RFC 3339, in UTC, with microseconds.
fn is_time(value: &Value) -> bool {
    let digits = |text: &str| text.replace(|symbol: char| symbol.is_ascii_digit(), "0");
    value.as_str().is_some_and(|text| digits(text) == "0000-00-00T00:00:00.000000Z")
}

/// Collects the keys of values of one kind, at any depth. A list counts as what it holds.
fn collect_keys(value: &Value, is_it: fn(&Value) -> bool, found: &mut BTreeSet<String>) {
    match value {
        Value::Object(fields) => {
            for (key, value) in fields {
                let items = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
                if items.iter().any(is_it) {
                    found.insert(key.clone());
                }
                collect_keys(value, is_it, found);
            }
        }
        Value::Array(items) => items.iter().for_each(|item| collect_keys(item, is_it, found)),
        _ => {}
    }
}

fn keys(value: &Value, is_it: fn(&Value) -> bool) -> Vec<String> {
    let mut found = BTreeSet::new();
    collect_keys(value, is_it, &mut found);
    found.into_iter().collect()
}

/// Times are texts in JSON, and their keys have no unit. Lengths of time are numbers, and their keys have one. All
/// other numbers are counts.
#[test]
fn times_are_written_as_times_and_lengths_of_time_with_their_unit() {
    const COUNTS: [&str; 6] = ["backfills", "missed", "rejected", "skipped", "started", "waiting"];
    let directory = tempfile::tempdir().unwrap();
    let store = &directory.path().join("data");
    process(store, async |_| ());
    let create = ["create", "hourly", "--every", "1h", "--workflow", "report", "--catch-up", "15m"];
    let create = [&create[..], &["--start", "2035-01-01T00:00:00Z", "--end", "2035-01-02"]].concat();
    let said = run(store, &create);
    assert!(said.contains("It fires in ") && said.contains(", at 2035-01-01 00:00:00 UTC."), "{said}");
    let made = json(store, &create);
    assert_eq!(keys(&made, is_time), ["changed", "created", "end", "next", "start"], "{made}");
    let mut numbers = [&["catch_up_ms", "every_ms", "jitter_ms"], &COUNTS[..]].concat();
    numbers.sort_unstable();
    assert_eq!(keys(&made, Value::is_number), numbers, "{made}");
    assert_eq!((&made["every_ms"], &made["jitter_ms"]), (&json!(3_600_000), &json!(0)));
    assert_eq!(made["catch_up_ms"], 900_000);
    let (first, second) = ("2035-01-01T00:00:00.000000Z", "2035-01-01T01:00:00.000000Z");
    assert_eq!((&made["start"], &made["next"]), (&json!(first), &json!(first)));
    assert_eq!(made["end"], "2035-01-02T00:00:00.000000Z");

    run(store, &["pause", "hourly", "--reason", "a holiday"]);
    let listed = json(store, &["list"]);
    assert_eq!(keys(&listed, is_time), ["changed", "created", "end", "paused_since", "start"], "{listed}");
    assert_eq!(keys(&listed, Value::is_number), numbers, "{listed}");
    let shown = run(store, &["show", "hourly"]);
    let is_told = |told: &str| shown.contains(&format!("It was paused {told} and starts nothing: a holiday"));
    assert!(is_told("just now") || (1..60).any(|seconds| is_told(&format!("{seconds}s ago"))), "{shown}");
    assert_eq!(json(store, &["resume", "hourly"]), json!({"name": "hourly", "next": first}));
    assert!(run(store, &["resume", "hourly"]).contains("fires next at 2035-01-01 00:00:00 UTC"));

    let triggered = json(store, &["trigger", "hourly"]);
    let id = triggered["id"].as_str().unwrap();
    process(store, async |engine| {
        while engine.describe(id).await.is_err() {
            engine.store().env().sleep(Duration::from_millis(5)).await;
        }
        engine.handle_by_id(id).result().await.unwrap()
    });
    let shown = json(store, &["show", "hourly", "--next", "2"]);
    assert_eq!(shown["next"], json!([first, second]));
    assert_eq!(keys(&shown, is_time), ["at", "changed", "created", "end", "next", "start", "time"], "{shown}");
    assert_eq!(keys(&shown, Value::is_number), numbers, "{shown}");
    let shown = run(store, &["show", "hourly", "--next", "2"]);
    assert!(shown.contains("Next: 2035-01-01 00:00:00 UTC, 2035-01-01 01:00:00 UTC."), "{shown}");
}

#[test]
fn bad_arguments_are_usage_errors_and_a_missing_schedule_is_not_found() {
    let directory = tempfile::tempdir().unwrap();
    let store = &directory.path().join("data");
    let missing = latch(&["schedule", "list"], store).output().unwrap();
    assert_eq!((missing.status.code(), store.exists()), (Some(3), false));
    process(store, async |_| ());
    for (arguments, code) in [
        (&["create", "s", "--cron", "0 25 * * *", "--workflow", "report"][..], 2),
        (&["create", "s", "--cron", "0 0 31 2 *", "--workflow", "report"], 2),
        (&["create", "s", "--cron", "0 2 * * *", "--zone", "Europe/Atlantis", "--workflow", "report"], 2),
        (&["create", "s", "--every", "0s", "--workflow", "report"], 2),
        (&["create", "s", "--every", "1h", "--workflow", "report", "--input", "{"], 2),
        (&["create", "s", "--workflow", "report"], 2),
        (&["create", "s", "--every", "1h"], 2),
        (&["pause", "s"], 2),
        (&["pause", "s", "--reason", "?"], 3),
        (&["resume", "s"], 3),
        (&["trigger", "s"], 3),
        (&["delete", "s"], 3),
        (&["show", "s"], 3),
    ] {
        let output = latch(&[&["schedule"], arguments].concat(), store).output().unwrap();
        assert_eq!(output.status.code(), Some(code), "{arguments:?}: {}", text(&output.stderr));
    }
    assert_eq!(run(store, &["list", "-o", "jsonl"]), "");
}
