//! `latch workflow` on directories that the library has written.

use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use latchwork::store::Store;
use latchwork::workflow::{Ctx, Engine, ExecutionState, Failure, Queue, Retry, workflow};
use serde_json::{Value, json};

use crate::{latch, succeeded, text};

const HOUR: Duration = Duration::from_secs(3600);

/// One execution of each kind that the commands must show.
async fn executions(directory: &Path) {
    let order = workflow("order").run(async |ctx: Ctx, end: String| match end.as_str() {
        "complete" => {
            ctx.publish("progress", &json!({"percent": 100})).await?;
            ctx.run("charge", async || Ok(42)).await
        }
        "sleep" => ctx.sleep(HOUR).await.map(|()| 0),
        "signal" => ctx.receive::<u32>("approve").await,
        "retry" => {
            let retry = Retry::exponential().first_pause(HOUR).longest_pause(HOUR);
            ctx.run("ship", async || Err::<u32, _>(Failure::new("no ship"))).retry(retry).await
        }
        "panic" => panic!("cause unknown\n\u{1b}[31mwhy"),
        "stuck" => ctx.run("wait", async || std::future::pending::<Result<u32, Failure>>().await).await,
        _ => Err(Failure::new("the card was refused").not_retryable()),
    });
    let parent = workflow("parent").run({
        let order = order.clone();
        move |ctx: Ctx, ()| {
            let order = order.clone();
            async move { ctx.child(&order, "signal".to_string()).id("child").await }
        }
    });
    let engine = Engine::open(directory).register(&order).register(&parent).start().await.unwrap();
    let start = |id: &str, end: &str| engine.start(&order, end.to_string()).id(id);
    start("done", "complete").tag("vip").attribute("price", 42).attribute("shop", "north").await.unwrap();
    start("refused", "fail").tag("vip").attribute("price", 7).await.unwrap();
    start("asleep", "sleep").idempotency_key("monday").await.unwrap();
    start("waiting", "signal").tag("big").tag("vip").await.unwrap();
    start("retrying", "retry").await.unwrap();
    start("later", "complete").delay(HOUR).await.unwrap();
    engine.start(&parent, ()).id("parent").await.unwrap();
    start("parked", "panic").await.unwrap();
    start("stuck", "stuck").await.unwrap();
    for id in ["done", "refused", "asleep", "waiting", "retrying", "later", "parent", "child", "parked", "stuck"] {
        loop {
            let is_there = match engine.why(id).await {
                Ok(why) if id == "stuck" => !why.waits.is_empty(),
                Ok(why) => !why.resident && why.state != ExecutionState::Running,
                Err(_) => false,
            };
            if is_there {
                break;
            }
            engine.store().env().sleep(Duration::from_millis(5)).await;
        }
    }
    // The operation that it is in is durable with its first commit.
    while engine.history("stuck").await.unwrap().operations.is_empty() {
        engine.store().env().sleep(Duration::from_millis(5)).await;
    }
    engine.stop();
    engine.store().close().await.unwrap();
}

/// A directory with executions, made once for all tests of a process. No test may change it.
fn directory() -> &'static Path {
    static MADE: std::sync::OnceLock<PathBuf> = std::sync::OnceLock::new();
    MADE.get_or_init(|| {
        // Some test runners start a process for each test.
        let name = format!("executions-{}", std::process::id());
        let directory = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
        // A directory that another process with the same number has left.
        let _ = std::fs::remove_dir_all(&directory);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(executions(&directory));
        directory
    })
}

fn run(arguments: &[&str]) -> Output {
    latch(&[&["workflow"], arguments].concat(), directory()).output().unwrap()
}

fn said(arguments: &[&str]) -> String {
    succeeded(run(arguments))
}

fn json(arguments: &[&str]) -> Value {
    serde_json::from_str(&said(&[arguments, &["-o", "json"]].concat())).unwrap()
}

/// The ids in a list.
fn ids(arguments: &[&str]) -> Vec<String> {
    let list = json(&[&["list"], arguments].concat());
    let id = |execution: &Value| execution["id"].as_str().unwrap().to_string();
    list["executions"].as_array().unwrap().iter().map(id).collect()
}

fn check_ids(arguments: &[&str], expected: &[&str]) {
    let (mut found, mut expected) = (ids(arguments), expected.to_vec());
    found.sort();
    expected.sort();
    assert_eq!(found, expected, "{arguments:?}");
}

#[test]
fn a_list_is_a_table() {
    let list = said(&["list"]);
    let lines: Vec<&str> = list.lines().collect();
    assert_eq!(lines.len(), 11, "{list}");
    let words: Vec<&str> = lines[0].split_whitespace().collect();
    assert_eq!(words, ["ID", "WORKFLOW", "STATUS", "STARTED", "DETAIL", "TAGS"]);
    let line = |id: &str| *lines.iter().find(|line| line.starts_with(&format!("{id} "))).unwrap();
    for (id, parts) in [
        ("done", &["order", "completed", "vip"][..]),
        ("refused", &["failed", "the card was refused"]),
        ("asleep", &["asleep", "timer in 59m"]),
        ("waiting", &["waiting", "signal:approve", "big, vip"]),
        ("retrying", &["asleep", "retry:ship in "]),
        ("parent", &["parent", "waiting", "child:child"]),
        ("parked", &["parked", "cause unknown\\n\\u{1b}[31mwhy"]),
        ("stuck", &["running", "was in step \"wait\""]),
    ] {
        parts.iter().for_each(|part| assert!(line(id).contains(part), "{part:?} is missing in {:?}", line(id)));
    }
    assert!(line("done").contains("just now") || line("done").contains("s ago"), "{list}");
    assert!(!list.contains('\u{1b}'), "no colour without a terminal, and none from texts: {list:?}");
}

#[test]
fn a_list_is_json() {
    let list = json(&["list", "--status", "completed"]);
    let done = &list["executions"][0];
    let started = done["started_at"].as_str().unwrap();
    assert!(started.len() == 27 && started.ends_with('Z'), "{started}");
    assert_eq!(
        *done,
        json!({
            "id": "done", "workflow": "order", "status": "completed", "reason": null, "output": 42, "failure": null,
            "started_at": started, "waits": [], "tags": ["vip"], "attributes": {"price": 42, "shop": "north"},
            "parent": null, "forked_from": null, "cancel_reason": null,
        })
    );
    assert_eq!(list["next"], Value::Null);
    let refused = &json(&["list", "--status", "failed"])["executions"][0]["failure"];
    let expected = json!({"message": "the card was refused", "code": "", "retryable": false, "details": null});
    assert_eq!(*refused, expected);
    let lines = said(&["list", "-o", "jsonl"]);
    let lines: Vec<Value> = lines.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 10);
    assert!(lines.contains(done));
    let waiting = lines.iter().find(|line| line["id"] == "waiting").unwrap();
    let since = &waiting["waits"][0]["since"];
    assert_eq!(waiting["waits"], json!([{"for": "signal", "name": "approve", "since": since, "until": null}]));
}

#[test]
fn filters_choose() {
    check_ids(&["--type", "parent"], &["parent"]);
    check_ids(&["--workflow", "parent", "--type", "missing"], &["parent"]);
    check_ids(&["--status", "parked,failed"], &["parked", "refused"]);
    check_ids(&["--status", "asleep"], &["asleep", "later", "retrying"]);
    check_ids(&["--status", "waiting"], &["asleep", "later", "retrying", "waiting", "child", "parent"]);
    check_ids(&["--status", "running"], &["stuck"]);
    check_ids(&["--status", "timed_out", "--status", "cancelled"], &[]);
    check_ids(&["--waits-for", "signal:approve"], &["waiting", "child"]);
    check_ids(&["--waits-for", "retry:ship", "--waits-for", "child:child"], &["retrying", "parent"]);
    check_ids(&["--tag", "vip"], &["done", "refused", "waiting"]);
    check_ids(&["--tag", "vip", "--tag", "big"], &["waiting"]);
    check_ids(&["--attribute", "price=42"], &["done"]);
    check_ids(&["--attribute", "price=\"42\""], &[]);
    check_ids(&["--attribute", "shop=north", "--status", "completed"], &["done"]);
    assert_eq!(ids(&["--attribute", "price>=7"]), ["refused", "done"], "in the order of the attribute");
    assert_eq!(ids(&["--attribute", "price>7"]), ["done"]);
    assert_eq!(ids(&["--attribute", "price>1", "--descending"]), ["done", "refused"]);
    assert_eq!(ids(&["--since", "1h"]).len(), 10);
    check_ids(&["--until", "1h"], &[]);
    check_ids(&["--since", "2100-01-01"], &[]);
    assert_eq!(ids(&["--since", "2020-01-01T00:00:00Z", "--until", "2100-01-01", "--tag", "big"]), ["waiting"]);
    let none = run(&["list", "--tag", "missing"]);
    assert_eq!(
        (text(&none.stdout), text(&none.stderr), none.status.code()),
        ("".into(), "no executions\n".into(), Some(0))
    );
}

#[test]
fn pages_follow_each_other() {
    let all = ids(&["--ascending"]);
    assert_eq!((all.len(), ids(&["--all", "--ascending"])), (10, all.clone()));
    let (mut found, mut after) = (Vec::new(), None::<String>);
    loop {
        let mut arguments = vec!["list", "--ascending", "--limit", "4"];
        after.iter().for_each(|after| arguments.extend(["--after", after]));
        let page = json(&arguments);
        let page_ids = page["executions"].as_array().unwrap().iter();
        found.extend(page_ids.map(|execution| execution["id"].as_str().unwrap().to_string()));
        match page["next"].as_str() {
            Some(next) => after = Some(next.into()),
            None => break,
        }
    }
    assert_eq!(found, all);
    let first = run(&["list", "--limit", "1"]);
    assert_eq!(text(&first.stdout).lines().count(), 2);
    let hint = text(&first.stderr);
    assert!(hint.starts_with("there are more: ") && hint.contains("--after") && hint.len() < 100, "{hint}");
    let first = run(&["list", "--limit", "1", "-o", "jsonl"]);
    let hint: Value = serde_json::from_slice(&first.stderr).unwrap();
    let cursor = hint["next"].as_str().unwrap();
    assert_eq!(
        (json(&["list", "--limit", "1"])["next"].as_str(), text(&first.stdout).lines().count()),
        (Some(cursor), 1)
    );
    assert_eq!(ids(&["--after", cursor]).len(), 9);
    let other_order = run(&["list", "--ascending", "--after", cursor]);
    assert_eq!(other_order.status.code(), Some(2), "{}", text(&other_order.stderr));
}

#[test]
fn show_shows_all_details() {
    let done = json(&["show", "done"]);
    let fields = ["id", "workflow", "status", "input", "output", "run", "published", "event_count"];
    let expected = json!(["done", "order", "completed", "complete", 42, 0, {"progress": {"percent": 100}}, 2]);
    assert_eq!(json!(fields.map(|field| done[field].clone())), expected);
    assert!(done["ended_at"].is_string() && done["removal_at"].is_string() && done["deadline_at"].is_null());
    let step = &done["events"][1];
    let parts = ["place", "kind", "name", "state", "attempts", "value"].map(|field| step[field].clone());
    assert_eq!(json!(parts), json!(["1", "step", "charge", "done", 1, 42]));
    assert_eq!(json(&["show", "done", "--events", "1"])["events"], json!([step]));
    assert_eq!(json(&["show", "done", "--events", "0"])["events"], json!([]));
    assert_eq!(json(&["show", "asleep"])["idempotency_key"], "monday");
    assert_eq!(json(&["show", "parent"])["children"], json!(["child"]));
    let child = json(&["show", "child"]);
    assert_eq!((&child["parent"], &child["on_parent_end"]), (&json!("parent"), &json!("cancel")));
    let retrying = json(&["show", "retrying"])["events"][0].clone();
    assert_eq!((&retrying["state"], &retrying["attempts"]), (&json!("retrying"), &json!(1)));
    assert_eq!(retrying["attempt_failures"][0]["message"], "no ship");
    let table = said(&["show", "done"]);
    for part in ["input     \"complete\"", "output    42", "published  ", "The last 2 of 2 events:", "step \"charge\""]
    {
        let part = part.split_whitespace().collect::<Vec<_>>().join(" ");
        let table = table.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(table.contains(&part), "{part:?} is missing in {table}");
    }
    let line = said(&["show", "done", "-o", "jsonl"]);
    assert_eq!((line.lines().count(), serde_json::from_str::<Value>(&line).unwrap()), (1, done));
}

#[test]
fn why_is_a_sentence_for_each_wait() {
    for (id, parts) in [
        ("done", &["Execution \"done\" of workflow \"order\" waits for nothing: it completed "][..]),
        ("refused", &["waits for nothing: it failed ", "the card was refused"]),
        ("asleep", &["is asleep", "It waits for the end of a sleep, which is due in 59m ", " UTC."]),
        ("later", &["It waits for its beginning, which is due in 59m "]),
        ("waiting", &["It waits for signal \"approve\", since "]),
        (
            "retrying",
            &["It waits for the next attempt at step \"ship\", which is due in ", ". Attempt 1 failed: no ship"],
        ),
        ("parent", &["It waits for the end of child \"child\", since ", "). The child is waiting."]),
        ("parked", &["is parked and waits for an operator: ", "cause unknown"]),
        ("stuck", &["continues as soon as a process", "It was in step \"wait\", attempt 1, begun "]),
    ] {
        let why = said(&["why", id]);
        parts.iter().for_each(|part| assert!(why.contains(part), "{part:?} is missing in {why}"));
        let sentences = &json(&["why", id])["sentences"];
        assert_eq!(sentences.as_array().unwrap().len(), why.lines().count(), "{why}");
    }
    let why = json(&["why", "retrying"]);
    let wait = &why["waits"][0];
    let parts = ["for", "name", "attempts", "last_failure", "child_status"].map(|field| wait[field].clone());
    assert_eq!(json!(parts), json!(["retry", "ship", 1, "no ship", null]));
    assert!(wait["until"].is_string() && wait["sentence"] == why["sentences"][1]);
    assert_eq!(json(&["why", "parent"])["waits"][0]["child_status"], "waiting");
    assert_eq!(json(&["why", "stuck"])["begun"][0]["name"], "wait");
    assert_eq!(json(&["why", "parked"])["status"], "parked");
}

#[test]
fn missing_executions_and_directories_are_not_found() {
    for command in ["show", "why", "history"] {
        let missing = run(&[command, "missing"]);
        assert_eq!((missing.status.code(), missing.stdout.len()), (Some(3), 0), "{command}");
        assert_eq!(text(&missing.stderr), "latch: there is no execution \"missing\"\n");
        let missing = run(&[command, "missing", "-o", "json"]);
        let error: Value = serde_json::from_slice(&missing.stderr).unwrap();
        let message = "there is no execution \"missing\"";
        assert_eq!(error, json!({"error": {"code": "not_found", "exit": 3, "message": message}}));
    }
    let home = tempfile::tempdir().unwrap();
    let (missing, empty, foreign) = (home.path().join("missing"), home.path().join("empty"), home.path().join("other"));
    std::fs::create_dir(&empty).unwrap();
    std::fs::create_dir(&foreign).unwrap();
    std::fs::write(foreign.join("thesis.tex"), "years of work").unwrap();
    for store in [&missing, &empty, &foreign] {
        for arguments in [&["list"][..], &["show", "a"], &["why", "a"], &["history"]] {
            let output = latch(&[&["workflow"], arguments].concat(), store).output().unwrap();
            assert_eq!(output.status.code(), Some(3), "{arguments:?}");
            let said = text(&output.stderr);
            assert!(said.contains("is not a Latchwork data directory"), "{said}");
        }
        let output = latch(&["workflow", "list", "-o", "json"], store).output().unwrap();
        let error: Value = serde_json::from_slice(&output.stderr).unwrap();
        assert_eq!(error["error"]["directory"], store.display().to_string());
    }
    let count = |directory: &Path| std::fs::read_dir(directory).unwrap().count();
    assert_eq!((count(home.path()), count(&empty), count(&foreign)), (2, 0, 1), "looking creates nothing");
}

#[test]
fn a_store_without_workflows_has_no_executions() {
    let home = tempfile::tempdir().unwrap();
    let store = home.path().join("data");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async { Store::open(&store).await.unwrap().close().await.unwrap() });
    let list = succeeded(latch(&["workflow", "list", "-o", "json"], &store).output().unwrap());
    let list: Value = serde_json::from_str(&list).unwrap();
    assert_eq!(list, json!({"executions": [], "next": null}));
    assert_eq!(latch(&["workflow", "show", "a"], &store).output().unwrap().status.code(), Some(3));
    assert_eq!(latch(&["workflow", "why", "a"], &store).output().unwrap().status.code(), Some(3));
    let locks = succeeded(latch(&["lock", "list", "-o", "json"], &store).output().unwrap());
    assert_eq!(serde_json::from_str::<Value>(&locks).unwrap(), json!({"locks": [], "next": null}));
    assert_eq!(latch(&["lock", "show", "a"], &store).output().unwrap().status.code(), Some(3));
}

#[test]
fn a_directory_in_use_is_busy() {
    let home = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let store = runtime.block_on(latchwork::store::Store::open(home.path())).unwrap();
    for arguments in [&["list"][..], &["show", "a"], &["why", "a"], &["history"]] {
        let output = latch(&[&["workflow"], arguments].concat(), home.path()).output().unwrap();
        assert_eq!((output.status.code(), output.stdout.len()), (Some(75), 0));
        let said = text(&output.stderr);
        assert!(said.contains(&format!("is in use by process {};", std::process::id())), "{said}");
    }
    let output = latch(&["workflow", "list", "-o", "jsonl"], home.path()).output().unwrap();
    let error: Value = serde_json::from_slice(&output.stderr).unwrap();
    assert_eq!((&error["error"]["code"], &error["error"]["pid"]), (&json!("busy"), &json!(std::process::id())));
    drop(store);
}

#[test]
fn looking_changes_nothing() {
    let files = || {
        let files = std::fs::read_dir(directory()).unwrap().map(|file| file.unwrap().path());
        let mut files: Vec<_> = files.map(|file| (std::fs::read(&file).unwrap(), file)).collect();
        files.sort_by(|a, b| a.1.cmp(&b.1));
        files
    };
    let before = files();
    for arguments in [&["list", "--all"][..], &["show", "stuck"], &["why", "stuck"], &["history"]] {
        said(arguments);
    }
    assert!(files() == before, "the directory was changed");
    assert_eq!(json(&["show", "stuck"])["events"][0]["attempts"], 1, "nothing has run");
}

#[test]
fn bad_arguments_are_usage_errors() {
    for arguments in [
        &["list", "--status", "happy"][..],
        &["list", "--waits-for", "godot"],
        &["list", "--attribute", "price"],
        &["list", "--limit", "0"],
        &["list", "--limit", "many"],
        &["list", "--limit", "1", "--all"],
        &["list", "--after", "xyz"],
        &["list", "--since", "yesterday"],
        &["show"],
        &["why"],
        &["nonsense"],
    ] {
        let output = run(arguments);
        assert_eq!((output.status.code(), output.stdout.len()), (Some(2), 0), "{arguments:?}");
        assert!(!output.stderr.is_empty());
        let output = run(&[arguments, &["--output=json"]].concat());
        let error: Value = serde_json::from_slice(&output.stderr).unwrap();
        assert_eq!((output.status.code(), &error["error"]["code"]), (Some(2), &json!("usage")), "{arguments:?}");
    }
    let help = run(&["list", "--help"]);
    assert!(help.status.success() && text(&help.stdout).contains("--waits-for"));
}

#[test]
fn a_closed_output_is_not_an_error() {
    for arguments in [&["list", "--all"][..], &["list", "-o", "jsonl"], &["show", "done", "-o", "json"], &["history"]] {
        let mut command = latch(&[&["workflow"], arguments].concat(), directory());
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        assert_eq!((output.status.code(), text(&output.stderr)), (Some(0), String::new()), "{arguments:?}");
    }
}

#[test]
fn histories_are_json_in_every_format() {
    let all = json(&["history"]);
    assert_eq!(all["histories"].as_array().unwrap().len(), 10);
    let lines = said(&["history", "-o", "jsonl", "--type", "parent"]);
    assert_eq!(lines, said(&["history", "--workflow", "parent"]));
    let history: Value = serde_json::from_str(&lines).unwrap();
    assert_eq!(history["id"], "parent");
    let out = tempfile::tempdir().unwrap();
    let written = json(&["history", "done", "--out", out.path().to_str().unwrap()]);
    assert_eq!(written, json!({"histories": 1, "directory": out.path().display().to_string()}));
}

#[test]
fn the_data_directory_is_accepted_before_and_after_the_command() {
    let latch = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_latch"));
        succeeded(command.args(arguments).output().unwrap())
    };
    let store = directory().to_str().unwrap();
    let expected = said(&["list", "-o", "jsonl"]);
    assert_eq!(latch(&["--store", store, "-o", "jsonl", "workflow", "list"]), expected);
    assert_eq!(latch(&["workflow", "--store", store, "list", "-ojsonl"]), expected);
}

/// A start that waits for a permit is listed, and `why` shows its position.
#[tokio::test]
async fn a_queued_start_is_listed_with_its_position() {
    let directory = tempfile::tempdir().unwrap();
    let limited = workflow("import").concurrency_by(1, |key: &String| key.clone()).when_full(Queue::new());
    let limited = limited.run(async |ctx: Ctx, _: String| ctx.receive::<u32>("end").await);
    let engine = Engine::open(directory.path()).register(&limited).start().await.unwrap();
    for id in ["first", "second", "third"] {
        engine.start(&limited, "c-1".to_string()).id(id).await.unwrap();
    }
    engine.shutdown().await.unwrap();
    let said = |arguments: &[&str]| {
        let arguments = [&["workflow"], arguments].concat();
        succeeded(latch(&arguments, directory.path()).output().unwrap())
    };
    let listed = said(&["list", "--waits-for", "admission:c-1", "-o", "jsonl"]);
    assert_eq!(listed.lines().count(), 2, "{listed}");
    let why = said(&["why", "third"]);
    assert!(why.contains("It waits for a permit of the limit for \"c-1\", since"), "{why}");
    assert!(why.contains("1 of 1 permits are taken, and 1 starts are before it in the queue."), "{why}");
    let why: Value = serde_json::from_str(&said(&["why", "third", "-o", "json"])).unwrap();
    assert_eq!(why["waits"][0]["queue"], json!({"key": "c-1", "ahead": 1, "used": 1, "limit": 1}));
}

/// What the journal holds, in words: waits whose time is up, ids, and records of the library itself.
#[tokio::test]
async fn the_parts_of_recorded_values_are_named() {
    let directory = tempfile::tempdir().unwrap();
    let notes = workflow("notes").run(async |ctx: Ctx, ()| {
        let nothing = ctx.receive::<u32>("never").timeout(Duration::from_millis(5)).await?;
        let guard = ctx.mutex("m").acquire().await?;
        ctx.state().global::<u64>("count").increment(3).await?;
        guard.release().await?;
        ctx.now().await;
        Ok((nothing, ctx.uuid().await.to_string()))
    });
    let engine = Engine::open(directory.path()).register(&notes).start().await.unwrap();
    let (nothing, uuid) = engine.start(&notes, ()).id("n").await.unwrap().result().await.unwrap();
    assert_eq!(nothing, None);
    engine.shutdown().await.unwrap();
    let said = |arguments: &[&str]| {
        let arguments = [&["workflow", "show", "n"], arguments].concat();
        succeeded(latch(&arguments, directory.path()).output().unwrap())
    };
    let shown: Value = serde_json::from_str(&said(&["-o", "json"])).unwrap();
    let event = |kind: &str| shown["events"].as_array().unwrap().iter().find(|event| event["kind"] == kind).unwrap();
    assert_eq!((&event("signal")["state"], &event("signal")["failure"]), (&json!("timed_out"), &Value::Null));
    assert_eq!(event("uuid")["value"], json!(uuid));
    let token = &event("lock")["value"]["token"];
    assert!(token.is_u64(), "{shown}");
    assert_eq!(event("unlock")["value"], json!({"token": token, "was_held": true, "acquired_at": "1"}));
    assert_eq!(event("slot")["value"], json!({"value": 3, "rev": 1, "changed": true}));
    let table = said(&[]);
    for part in ["timed out".to_string(), uuid, "value 3, rev 1, changed true".to_string()] {
        assert!(table.contains(&part), "{part:?} is missing in {table}");
    }
    let is_release = |line: &str| line.contains("unlock") && line.ends_with(&format!("  token {token}"));
    assert!(table.lines().any(is_release) && !table.contains("was held"), "{table}");
    assert!(table.lines().any(|line| line.contains(" now ") && line.contains(" UTC")), "{table}");
}

/// The process is killed while they wait in memory. The commands look when the time is long up.
#[tokio::test]
async fn why_and_list_show_what_a_killed_process_did_even_much_later() {
    let directory = tempfile::tempdir().unwrap();
    let (data, left) = (directory.path().join("data"), directory.path().join("left"));
    let waits = workflow("waits").run(async |ctx: Ctx, branches: bool| {
        if !branches {
            ctx.sleep(Duration::from_millis(50)).await?;
            return ctx.run("wait", async || std::future::pending::<Result<u32, Failure>>().await).await;
        }
        let first = async |ctx: Ctx| ctx.sleep(Duration::from_millis(300)).await;
        let second = async |ctx: Ctx| ctx.receive::<u32>("go").timeout(Duration::from_millis(400)).await;
        let (slept, received) = ctx.join((first, second)).await;
        slept.and(received.map(|received| received.unwrap_or(0)))
    });
    let engine = Engine::open(&data).register(&waits).start().await.unwrap();
    engine.start(&waits, true).id("branches").await.unwrap();
    engine.start(&waits, false).id("step").await.unwrap();
    while engine.history("branches").await.unwrap().operations.len() < 3
        || engine.history("step").await.unwrap().operations.len() < 2
    {
        engine.store().env().sleep(Duration::from_millis(1)).await;
    }
    // What the process leaves if it is killed now.
    engine.store().view().await.unwrap().persist(&left).await.unwrap();
    engine.store().env().sleep(Duration::from_millis(500)).await;
    engine.shutdown().await.unwrap();
    let said = |arguments: &[&str]| {
        let arguments = [&["workflow"], arguments].concat();
        succeeded(latch(&arguments, &left).output().unwrap())
    };
    let why = said(&["why", "branches"]);
    for part in ["It was in sleep, which was due at ", "It was in signal \"go\", which was due at "] {
        assert!(why.contains(part), "{part:?} is missing in {why}");
    }
    let why = said(&["why", "step"]);
    assert!(why.contains("It was in step \"wait\", attempt 1") && !why.contains("sleep"), "{why}");
    let list = said(&["list"]);
    assert!(list.contains("was in sleep, signal \"go\"") && list.contains("was in step \"wait\""), "{list}");
}
