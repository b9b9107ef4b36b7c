//! `latch lock` on directories that the library has written, and what other commands show about locks.

use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::Duration;

use latchwork::workflow::{Ctx, Engine, Workflow, workflow};
use serde_json::Value;

use crate::{latch, succeeded, text};

/// Acquires the lock. The holder holds it until a message ends it.
fn transfer() -> Workflow<bool, u64> {
    workflow("transfer").run(async |ctx: Ctx, holds: bool| {
        let guard = ctx.mutex("account-42").acquire().await?;
        let _permit = ctx.semaphore("vendor", 3).of_workflow().acquire_many(2).await?;
        if holds {
            ctx.receive::<()>("end").await?;
        }
        Ok(guard.token().number())
    })
}

async fn until(engine: &Engine, waiters: usize) {
    loop {
        let state = engine.locks().inspect("account-42").await;
        if state.is_ok_and(|state| state.waiters.len() == waiters) && engine.residents() == 0 {
            return;
        }
        engine.store().env().sleep(Duration::from_millis(5)).await;
    }
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

/// An execution that holds a lock, two that wait for it, and a session whose process is gone.
fn made(directory: &Path) -> PathBuf {
    let store = directory.join("data");
    block_on(async {
        let engine = Engine::open(&store).register(&transfer()).start().await.unwrap();
        for (id, holds, waiters) in [("holder", true, 0), ("first", false, 1), ("second", false, 2)] {
            engine.start(&transfer(), holds).id(id).await.unwrap();
            until(&engine, waiters).await;
        }
        let session = engine.locks().session().label("nightly").await.unwrap();
        // The guard must not release anything, because its process is killed.
        std::mem::forget(engine.locks().rw_lock("config").by(&session).write().await.unwrap());
        engine.stop();
        engine.store().close().await.unwrap();
        std::mem::forget(session);
    });
    store
}

fn run(arguments: &[&str], store: &Path) -> Output {
    latch(arguments, store).stdin(Stdio::null()).output().unwrap()
}

fn json(arguments: &[&str], store: &Path) -> Value {
    serde_json::from_str(&succeeded(run(&[arguments, &["-o", "json"]].concat(), store))).unwrap()
}

fn failed(arguments: &[&str], store: &Path) -> (Option<i32>, String) {
    let output = run(arguments, store);
    (output.status.code(), text(&output.stderr))
}

#[test]
fn locks_are_listed_and_shown() {
    let directory = tempfile::tempdir().unwrap();
    let store = made(directory.path());
    let list = succeeded(run(&["lock", "list"], &store));
    let lines: Vec<Vec<&str>> = list.lines().map(|line| line.split_whitespace().collect()).collect();
    assert_eq!(lines[0], ["NAME", "SHARED", "BY", "KIND", "HELD", "WAITING"]);
    assert_eq!(lines[1], ["account-42", "mutex", "held", "2"]);
    assert_eq!(lines[2], ["config", "read-write", "lock", "a", "writer", "0"]);
    assert_eq!(lines[3], ["vendor", "workflow", "transfer", "semaphore", "of", "3", "2", "of", "3", "0"]);
    let first = json(&["lock", "list", "--limit", "2", "--held"], &store);
    let next = first["next"].as_str().unwrap();
    assert_eq!(first["locks"].as_array().unwrap().len(), 2);
    let rest = json(&["lock", "list", "--held", "--after", next], &store);
    assert_eq!((&rest["locks"][0]["name"], &rest["next"]), (&"vendor".into(), &Value::Null));
    // A cursor continues the same list with the same filters only.
    for other in [&["lock", "list", "--after", next][..], &["review", "list", "--after", next]] {
        let (code, said) = failed(other, &store);
        assert_eq!((code, said.contains("this cursor continues a list of locks")), (Some(2), true), "{said}");
    }
    let scoped = json(&["lock", "list", "--workflow", "transfer"], &store);
    let expected = serde_json::json!([{"name": "vendor", "workflow": "transfer", "tree": null, "kind": "semaphore",
        "permits": 3, "used": 2, "exclusive": false, "waiting": 0}]);
    assert_eq!(scoped["locks"], expected);
    assert_eq!(json(&["lock", "list", "--tree", "holder"], &store)["locks"], serde_json::json!([]));
    let shown = json(&["lock", "show", "account-42"], &store);
    assert_eq!((&shown["kind"], &shown["holders"][0]["execution"]), (&"mutex".into(), &"holder".into()));
    let waiters: Vec<_> =
        (0..2).map(|i| (&shown["waiters"][i]["execution"], &shown["waiters"][i]["position"])).collect();
    assert_eq!(waiters, [(&"first".into(), &0.into()), (&"second".into(), &1.into())]);
    let shown = succeeded(run(&["lock", "show", "account-42"], &store));
    assert!(shown.starts_with("Lock \"account-42\", a mutex: held, 2 waiting.\n"), "{shown}");
    let shown = succeeded(run(&["lock", "show", "config"], &store));
    assert!(
        shown.contains("session \"nightly\"") && shown.contains("to write") && shown.contains("ends in "),
        "{shown}"
    );
    assert!(succeeded(run(&["lock", "show", "vendor", "--workflow", "transfer"], &store)).contains("2 of 3"));
    assert_eq!(failed(&["lock", "show", "vendor"], &store).0, Some(3));
    assert_eq!(failed(&["lock", "show", ""], &store).0, Some(2));
    assert_eq!(failed(&["lock", "list"], &directory.path().join("nowhere")).0, Some(3));
}

#[test]
fn why_and_list_explain_a_wait_for_a_lock() {
    let directory = tempfile::tempdir().unwrap();
    let store = made(directory.path());
    let why = succeeded(run(&["workflow", "why", "second"], &store));
    for part in
        ["It waits for lock \"account-42\"", "It is held by execution \"holder\" (token ", "1 request is before it"]
    {
        assert!(why.contains(part), "{part} is missing in {why}");
    }
    let why = json(&["workflow", "why", "first"], &store);
    let lock = &why["waits"][0]["lock"];
    assert_eq!((&lock["name"], &lock["position"]), (&"account-42".into(), &0.into()));
    assert_eq!(lock["holders"][0]["execution"], "holder");
    let list = json(&["workflow", "list", "--waits-for", "lock:account-42", "--ascending"], &store);
    let ids: Vec<&Value> = list["executions"].as_array().unwrap().iter().map(|listed| &listed["id"]).collect();
    assert_eq!(ids, ["first", "second"]);
    let none = json(&["workflow", "list", "--waits-for", "lock:account"], &store);
    assert_eq!(none["executions"], serde_json::json!([]));
}

#[test]
fn a_release_grants_the_lock_to_the_next_request_and_runs_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let store = made(directory.path());
    let shown = json(&["lock", "show", "account-42"], &store);
    let token = |list: &str| shown[list][0]["token"].to_string();
    let release = |token: &str, more: &[&str]| {
        let arguments = ["lock", "release", "account-42", "--token", token, "--reason", "it hangs"];
        [&arguments[..], more].concat().into_iter().map(str::to_string).collect::<Vec<String>>()
    };
    let refused = |arguments: Vec<String>| {
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        failed(&arguments, &store)
    };
    let (code, said) = refused(release(&token("holders"), &[]));
    assert!(code == Some(2) && said.contains("--yes"), "{said}");
    assert_eq!(refused(release("987654321", &["--yes"])).0, Some(3));
    assert_eq!(json(&["lock", "show", "account-42"], &store), shown, "nothing has changed so far");
    let arguments = release(&token("holders"), &["--yes"]);
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let released = json(&arguments, &store);
    assert_eq!((&released["released"]["execution"], &released["waiting"]), (&"holder".into(), &1.into()));
    assert_eq!(released["granted"][0]["execution"], "first");
    assert_eq!(released["granted"][0]["token"], shown["waiters"][0]["token"]);
    let after = json(&["lock", "show", "account-42"], &store);
    assert_eq!((&after["forced"][0]["reason"], &after["forced"][0]["was_held"]), (&"it hangs".into(), &true.into()));
    let why = succeeded(run(&["workflow", "why", "first"], &store));
    assert!(why.contains("It waited for lock \"account-42\", and holds it now."), "{why}");
    let events = json(&["workflow", "show", "second"], &store)["events"].clone();
    assert_eq!((&events[0]["kind"], &events[0]["state"]), (&"lock".into(), &"queued".into()));
    let status = |id: &str| json(&["workflow", "show", id], &store)["status"].clone();
    assert_eq!((status("first"), status("second")), ("running".into(), "waiting".into()));
    let (code, _) = refused(release(&token("holders"), &["--yes"]));
    assert_eq!(code, Some(3), "it is released once");
    let given = block_on(async {
        let engine = Engine::open(&store).register(&transfer()).start().await.unwrap();
        let first = engine.handle(&transfer(), "first").result().await.unwrap();
        let second = engine.handle(&transfer(), "second").result().await.unwrap();
        let told = engine.handle(&transfer(), "holder").result().await.unwrap_err();
        assert!(told.to_string().contains("it hangs"), "the holder gets the reason: {told}");
        engine.stop();
        engine.store().close().await.unwrap();
        [first, second]
    });
    assert_eq!(given[0].to_string(), token("waiters"), "it has the lock that the release granted");
    assert!(given[1] > given[0]);
    let said = succeeded(run(&["lock", "show", "account-42"], &store));
    assert!(said.contains("free, 0 waiting") && said.contains("it hangs"), "{said}");
}

#[test]
fn a_waiting_request_can_be_released_too() {
    let directory = tempfile::tempdir().unwrap();
    let store = made(directory.path());
    let token = json(&["lock", "show", "account-42"], &store)["waiters"][0]["token"].to_string();
    let release = ["lock", "release", "account-42", "--token", &token, "--reason", "not needed", "--yes"];
    let said = succeeded(run(&release, &store));
    assert!(said.starts_with("Execution \"first\"") && said.contains("no longer waits for lock"), "{said}");
    assert!(said.ends_with("Requests that wait for it: 1.\n"), "{said}");
    let why = succeeded(run(&["workflow", "why", "first"], &store));
    assert!(why.contains("It waited for lock \"account-42\", but the request was removed."), "{why}");
    block_on(async {
        let engine = Engine::open(&store).register(&transfer()).start().await.unwrap();
        let refused = engine.handle(&transfer(), "first").result().await.unwrap_err();
        assert!(refused.to_string().contains("not needed"), "{refused}");
        engine.signal("holder", "end", &()).await.unwrap();
        engine.handle(&transfer(), "second").result().await.unwrap();
        engine.stop();
        engine.store().close().await.unwrap();
    });
}
