//! `latch claim` on configuration files, and on directories that the library has written.

use std::future::pending;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::Duration;

use latchwork::claim::{ActionCtx, ClaimStep, ClaimWorkflow, Claims, Outcome, Recovery};
use latchwork::entity::Add;
use latchwork::workflow::Engine;
use serde_json::{Value, json};

use crate::{latch, succeeded, text};

fn config() -> Value {
    json!({
        "workflow": "invoice",
        "meta": { "owning_module": "billing", "entity_type": "invoice", "status_field": "status" },
        "status_types": ["sent", "paying", "paid"],
        "steps": [{
            "step_id": 20, "step_key": "apply_payment", "status": "sent", "action": { "admin": "ApplyPayment" },
            "successful_claim_state": { "admin": ["paying", "sent"] }, "successful_state": { "admin": "paid" }
        }]
    })
}

fn written(directory: &tempfile::TempDir, name: &str, config: &Value) -> PathBuf {
    let file = directory.path().join(name);
    std::fs::write(&file, serde_json::to_string_pretty(config).unwrap()).unwrap();
    file
}

fn run(arguments: &[&str], files: &[&PathBuf]) -> Output {
    let directory = tempfile::tempdir().unwrap();
    latch(arguments, directory.path()).args(files).output().unwrap()
}

#[test]
fn files_are_validated_without_a_store() {
    let directory = tempfile::tempdir().unwrap();
    let good = written(&directory, "good.json", &config());
    let output = run(&["claim", "validate"], &[&good]);
    assert_eq!((succeeded(output).as_str(), good.exists()), ("", true));
    let mut config = config();
    config["steps"][0]["successful_claim_state"]["admin"] = json!(["nowhere", "sent"]);
    config["steps"][0]["step_key"] = json!(7);
    let bad = written(&directory, "bad.json", &config);
    let output = run(&["claim", "validate", "--output", "json"], &[&good, &bad]);
    assert_eq!(output.status.code(), Some(1));
    let told: Value = serde_json::from_slice(&output.stdout).unwrap();
    let findings = told["findings"].as_array().unwrap();
    assert!(findings.iter().all(|finding| finding["file"] == bad.display().to_string()), "{told}");
    assert_eq!((&findings[0]["rule"], &findings[0]["severity"]), (&json!("format"), &json!("error")));
    assert!(findings.iter().all(|finding| finding["position"]["line"].as_u64().unwrap() > 1), "{told}");
    let table = text(&run(&["claim", "validate"], &[&bad]).stdout);
    assert!(table.contains("bad.json:") && table.contains("RULE"), "{table}");
    let missing = run(&["claim", "validate"], &[&directory.path().join("missing.json")]);
    assert!(!missing.status.success() && text(&missing.stderr).contains("missing.json"));
}

#[test]
fn a_workflow_is_drawn() {
    let directory = tempfile::tempdir().unwrap();
    let file = written(&directory, "invoice.json", &config());
    let drawn = succeeded(run(&["claim", "diagram"], &[&file]));
    assert!(drawn.starts_with("stateDiagram-v2\n"), "{drawn}");
    assert!(drawn.contains("state \"paying\" as s1:::claiming"), "{drawn}");
    let mut other = config();
    other["workflow"] = json!("credit note");
    let two = written(&directory, "two.json", &json!([config(), other]));
    let asked = run(&["claim", "diagram"], &[&two]);
    assert!(!asked.status.success() && text(&asked.stderr).contains("invoice, credit note"));
    succeeded(run(&["claim", "diagram", "--workflow", "credit note"], &[&two]));
}

#[test]
fn editors_are_given_a_schema() {
    let schema: Value = serde_json::from_str(&succeeded(run(&["claim", "schema"], &[]))).unwrap();
    assert!(schema["$defs"]["Step"]["properties"]["claim_state"].is_object(), "{schema}");
}

/// Invoices whose actions wait until their process ends, if their input says so.
async fn invoices(engine: &Engine, can_send: bool) -> Claims {
    let act = async |ctx: ActionCtx| {
        if ctx.input()["waits"] == true && ctx.attempt() == 1 {
            pending::<()>().await;
        }
        ctx.add(Add::new("payment"));
        Ok::<_, std::io::Error>(Outcome::done())
    };
    let mut settle =
        ClaimStep::new(30, "settle", "sent", "settled").claimed("settling").action("Settle").after("SendReceipt");
    settle.recovery = Recovery::NeedsReview;
    let workflow = ClaimWorkflow::new("invoice", "billing", "invoice")
        .statuses(["sent", "paying", "paid", "settling", "settled"])
        .step(ClaimStep::new(20, "pay", "sent", "paid").claimed("paying").action("Pay").after("SendReceipt"))
        .step(settle);
    Claims::on(engine)
        .workflow(workflow)
        .action("Pay", act)
        .action("Settle", act)
        .after_effect(
            "SendReceipt",
            move |_| async move { if can_send { Ok(()) } else { Err("the mail server is away") } },
        )
        .after_effect_attempts(1)
        .start()
        .await
        .unwrap()
}

/// Runs code with the invoices in a directory, and then ends as a crashed process does.
fn process<T>(store: &Path, can_send: bool, does: impl AsyncFnOnce(&Engine, &Claims) -> T) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let engine = Engine::open(store).start().await.unwrap();
        let claims = invoices(&engine, can_send).await;
        let done = does(&engine, &claims).await;
        engine.stop();
        engine.store().close().await.unwrap();
        done
    })
}

async fn fire_and_wait(engine: &Engine, claims: &Claims, step: &str, id: &str) {
    claims.add("invoice", Add::new("invoice").id(id).data(json!({"status": "sent"}))).await.unwrap();
    let fire = claims.fire("invoice", step, id).by("admin").actor("ann").input(json!({"waits": true}));
    tokio::spawn(async move { fire.await });
    until(engine, async || claims.operate().await.unwrap().stored().get(id).await.unwrap().is_some()).await;
}

async fn until(engine: &Engine, is_so: impl AsyncFn() -> bool) {
    while !is_so().await {
        engine.store().env().sleep(Duration::from_millis(5)).await;
    }
}

/// Two claims that need review (`r-1`, `r-2`), a claim whose process is gone (`p-1`), and a dead letter of `d-1`.
pub(crate) fn made(directory: &Path) -> PathBuf {
    let store = directory.join("data");
    process(&store, false, async |engine, claims| {
        fire_and_wait(engine, claims, "settle", "r-1").await;
        fire_and_wait(engine, claims, "settle", "r-2").await;
    });
    process(&store, false, async |engine, claims| {
        let stored = claims.operate().await.unwrap().stored().clone();
        for id in ["r-1", "r-2"] {
            until(engine, async || stored.get(id).await.unwrap().unwrap().holder.needs_review.is_some()).await;
        }
        fire_and_wait(engine, claims, "pay", "p-1").await;
        claims.add("invoice", Add::new("invoice").id("d-1").data(json!({"status": "sent"}))).await.unwrap();
        assert!(claims.fire("invoice", "pay", "d-1").by("admin").await.unwrap().is_done());
        until(engine, async || !stored.dead_letters().await.unwrap().items.is_empty()).await;
    });
    store
}

fn on(store: &Path, arguments: &[&str]) -> Output {
    latch(&[&["claim"], arguments].concat(), store).stdin(Stdio::null()).output().unwrap()
}

fn told(store: &Path, arguments: &[&str]) -> Value {
    serde_json::from_str(&succeeded(on(store, &[arguments, &["-o", "json"]].concat()))).unwrap()
}

fn failed(store: &Path, arguments: &[&str]) -> (Option<i32>, String) {
    let output = on(store, arguments);
    (output.status.code(), text(&output.stderr))
}

#[test]
fn claims_are_listed_and_shown() {
    let directory = tempfile::tempdir().unwrap();
    let store = made(directory.path());
    let entities = |list: Value| -> Vec<String> {
        list["claims"].as_array().unwrap().iter().map(|it| it["entity"].as_str().unwrap().to_string()).collect()
    };
    assert_eq!(entities(told(&store, &["list"])), ["p-1", "r-1", "r-2"]);
    assert_eq!(entities(told(&store, &["list", "--needs-review"])), ["r-1", "r-2"]);
    let first = told(&store, &["list", "--limit", "2"]);
    assert_eq!(entities(first.clone()), ["p-1", "r-1"]);
    assert_eq!(entities(told(&store, &["list", "--after", first["next"].as_str().unwrap(), "--all"])), ["r-2"]);
    let lines = succeeded(on(&store, &["list", "-o", "jsonl"]));
    assert_eq!(lines.lines().count(), 3, "{lines}");
    let table = succeeded(on(&store, &["list"]));
    assert!(table.starts_with("ENTITY") && table.contains("needs review") && table.contains("paying"), "{table}");

    let shown = told(&store, &["show", "p-1"]);
    let claim = &shown["claim"];
    let expected = json!({"entity": "p-1", "workflow": "invoice", "step": "pay", "action": "Pay",
        "claim_into": "paying", "revert_to": "sent", "successful_state": "paid", "token": 2, "attempts": 1,
        "requester": "admin", "actor": "ann", "needs_review": null});
    for (name, value) in expected.as_object().unwrap() {
        assert_eq!(claim[name], *value, "{name} in {claim}");
    }
    assert!(claim["lease_left_ms"].as_u64().is_some_and(|left| left <= 30_000), "{claim}");
    let said = succeeded(on(&store, &["show", "p-1"]));
    assert!(said.starts_with("Entity \"p-1\" is claimed by step \"pay\" of workflow \"invoice\".\n"), "{said}");
    let said = succeeded(on(&store, &["show", "r-1"]));
    assert!(said.contains("It needs review: its process is gone.") && said.contains("janitor"), "{said}");
    let done = told(&store, &["show", "d-1"]);
    assert_eq!((&done["claim"], &done["history"][0]["kind"]), (&Value::Null, &json!("done")));
    assert!(succeeded(on(&store, &["show", "d-1"])).starts_with("No claim is on entity \"d-1\"."));
    assert_eq!(failed(&store, &["show", "missing"]).0, Some(3));
    for looks in
        [&["list"][..], &["dead", "list"], &["dead", "retry", "a:1:0"], &["release", "a", "--reason", "b", "--yes"]]
    {
        assert_eq!(failed(&directory.path().join("nowhere"), looks).0, Some(3), "{looks:?}");
    }
    assert!(!directory.path().join("nowhere").exists(), "looking creates nothing");
}

#[test]
fn operators_end_claims_in_three_ways() {
    let directory = tempfile::tempdir().unwrap();
    let store = made(directory.path());
    let before = told(&store, &["list"]);
    let (code, said) = failed(&store, &["release", "p-1", "--reason", "it hangs"]);
    assert!(code == Some(2) && said.contains("--yes"), "{said}");
    assert_eq!(failed(&store, &["release", "p-1", "--yes"]).0, Some(2), "a reason is needed");
    for change in ["retry", "complete"] {
        let (code, said) = failed(&store, &[change, "p-1", "--reason", "it hangs", "--yes"]);
        assert!(code == Some(5) && said.contains("does not wait for an operator"), "{said}");
    }
    assert_eq!(failed(&store, &["release", "missing", "--reason", "it hangs", "--yes"]).0, Some(3));
    let claims = |list: &Value| list["claims"].as_array().unwrap().len();
    assert_eq!(claims(&told(&store, &["list"])), claims(&before), "nothing has changed so far");

    let released = told(&store, &["release", "p-1", "--reason", "it hangs", "--yes", "--actor", "eve"]);
    assert_eq!((&released["status"], &released["claim"]["token"]), (&json!("sent"), &json!(2)));
    let history = &told(&store, &["show", "p-1"])["history"][0];
    let expected = json!({"kind": "released", "from": "paying", "to": "sent", "actor": "eve", "reason": "it hangs"});
    for (name, value) in expected.as_object().unwrap() {
        assert_eq!(history[name], *value, "{name} in {history}");
    }
    assert_eq!(failed(&store, &["release", "p-1", "--reason", "again", "--yes"]).0, Some(3), "it is released once");
    let said = succeeded(on(&store, &["retry", "r-1", "--reason", "the bank has no trace of it", "--yes"]));
    assert_eq!(said, "The next program that has action \"Settle\" runs it again for entity \"r-1\".\n");
    let completed = told(&store, &["complete", "r-2", "--reason", "the bank has it", "--yes"]);
    assert_eq!(completed["status"], "settled");
    let (statuses, payments) = process(&store, true, async |engine, claims| {
        let stored = claims.operate().await.unwrap().stored().clone();
        until(engine, async || stored.list().await.unwrap().items.is_empty()).await;
        until(engine, async || claims.undelivered() == 0).await;
        let mut statuses = Vec::new();
        for id in ["p-1", "r-1", "r-2"] {
            statuses.push(engine.entities().get(id).await.unwrap().unwrap().data["status"].clone());
        }
        let payments = engine.entities().find(&latchwork::entity::Query::of("payment")).await.unwrap().items.len();
        (statuses, payments)
    });
    assert_eq!(statuses, ["sent", "settled", "settled"]);
    assert_eq!(payments, 2, "of d-1, and of r-1, whose action has run again");
    assert_eq!(told(&store, &["show", "r-1"])["history"][0]["kind"], "done");
    assert_eq!(told(&store, &["show", "r-2"])["history"][0]["reason"], "the bank has it");
}

#[test]
fn dead_letters_are_listed_and_delivered_again() {
    let directory = tempfile::tempdir().unwrap();
    let store = made(directory.path());
    let list = told(&store, &["dead", "list"]);
    let letter = &list["dead_letters"][0];
    let expected = json!({"name": "SendReceipt", "entity": "d-1", "from": "sent", "to": "paid", "attempts": 1,
        "error": "the mail server is away"});
    for (name, value) in expected.as_object().unwrap() {
        assert_eq!(letter[name], *value, "{name} in {letter}");
    }
    let table = succeeded(on(&store, &["dead", "list"]));
    assert!(table.starts_with("KEY") && table.contains("the mail server is away"), "{table}");
    let key = letter["key"].as_str().unwrap();
    assert_eq!(failed(&store, &["dead", "retry", "d-1:99:0"]).0, Some(3));
    assert_eq!(told(&store, &["dead", "retry", key]), json!({"key": key}));
    assert_eq!(failed(&store, &["dead", "retry", key]).0, Some(3), "it is no longer in the list");
    process(&store, true, async |engine, claims| until(engine, async || claims.undelivered() == 0).await);
    assert_eq!(told(&store, &["dead", "list"])["dead_letters"], json!([]));
}

#[test]
fn the_configuration_of_the_example_has_no_findings() {
    let file = PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../latchwork/examples/invoices.json"));
    let output = run(&["claim", "validate"], &[&file]);
    assert_eq!(text(&output.stderr), "no findings\n");
    assert_eq!(succeeded(output), "");
}
