//! `latch claim` on configuration files.

use std::path::PathBuf;
use std::process::Output;

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
