//! Each rule, tested with a configuration that breaks only this rule, and files that are not configurations.

use latchwork::claim::{self, ClaimStep, ClaimWorkflow, Each, Finding, Position, Rule};
use proptest::prelude::*;
use serde_json::{Value, json};

/// The invoices of the example. They have no findings.
fn invoices() -> Value {
    json!({
        "workflow": "invoice",
        "meta": { "owning_module": "billing", "entity_type": "invoice", "status_field": "status" },
        "status_types": ["sent", "overdue", "paying_sent", "paying_overdue", "paid", "closed"],
        "requesters": ["admin", "system"],
        "actions": { "ApplyPayment": { "non_idempotent": true }, "Remind": {} },
        "steps": [
            {
                "step_id": 10, "step_key": "mark_overdue", "status": "sent",
                "successful_state": { "system": "overdue" }, "action": { "system": "Remind" },
                "timer": { "after": "30d", "requester": "system" }
            },
            {
                "step_id": 20, "step_key": "apply_payment", "status": "sent",
                "successful_claim_state": { "admin": ["paying_sent", "sent"] },
                "successful_state": { "admin": "paid" }, "action": { "admin": "ApplyPayment" },
                "success_after_effect": { "admin": ["SendReceipt"] },
                "guards": { "admin": ["has_amount", { "guard": "is_open", "reason": "the period is closed" }] },
                "lease": "30s", "recovery": "needs_review", "attempts": 3, "non_idempotent": true
            },
            {
                "step_id": 21, "step_key": "apply_payment", "status": "overdue",
                "claim_state": { "admin": ["paying_overdue", "overdue"] },
                "successful_state": { "admin": "paid" }, "action": { "admin": "ApplyPayment" }
            },
            { "step_id": 30, "step_key": "close", "status": "paid", "successful_state": "closed" }
        ]
    })
}

fn findings(config: &Value) -> Vec<Finding> {
    claim::check_json(&serde_json::to_string_pretty(config).unwrap()).findings
}

/// The rules that the invoices break when one value in them is replaced.
fn broken(pointer: &str, value: Value) -> Vec<Rule> {
    let mut config = invoices();
    let (parent, field) = pointer.rsplit_once('/').unwrap();
    match config.pointer_mut(parent).unwrap() {
        Value::Object(fields) => drop(fields.insert(field.into(), value)),
        Value::Array(items) if field == "-" => items.push(value),
        Value::Array(items) => items[field.parse::<usize>().unwrap()] = value,
        _ => panic!("{pointer} does not exist"),
    }
    findings(&config).into_iter().map(|finding| finding.rule).collect()
}

fn without(pointer: &str) -> Vec<Rule> {
    let mut config = invoices();
    let (parent, field) = pointer.rsplit_once('/').unwrap();
    config.pointer_mut(parent).unwrap().as_object_mut().unwrap().remove(field).unwrap();
    findings(&config).into_iter().map(|finding| finding.rule).collect()
}

const CLAIM: &str = "/steps/1/successful_claim_state/admin";

#[test]
fn a_good_configuration_has_no_findings() {
    assert_eq!(findings(&invoices()), []);
    let list = json!([invoices()]);
    let checked = claim::check_json(&list.to_string());
    assert!(checked.is_valid() && checked.findings.is_empty());
    assert_eq!(checked.workflows.len(), 1);
}

/// A written workflow is read back as the same value.
#[test]
fn a_written_workflow_is_read_back_unchanged() {
    let read = claim::check_json(&invoices().to_string()).workflows.remove(0);
    let again = claim::check_json(&serde_json::to_string(&read).unwrap());
    assert_eq!(again.findings, []);
    assert_eq!(again.workflows, [read]);
}

#[test]
fn the_six_rules_of_a_claim() {
    for pair in [json!("paying_sent"), json!(["paying_sent"]), json!(["paying_sent", "sent", "x"]), json!([1, 2])] {
        let found = broken(CLAIM, pair);
        // Without a valid claim, other rules are broken as well.
        assert!(found.contains(&Rule::ClaimPair), "{found:?}");
    }
    let found = broken(CLAIM, json!(["nowhere", "sent"]));
    assert_eq!(
        found.iter().filter(|rule| **rule != Rule::UnreachableStatus).collect::<Vec<_>>(),
        [&Rule::ClaimStatuses]
    );
    let alone = |rule: Rule, found: Vec<Rule>| {
        // A claiming status that no step claims into any more is unreachable.
        let found: Vec<Rule> = found.into_iter().filter(|rule| *rule != Rule::UnreachableStatus).collect();
        assert_eq!(found, [rule]);
    };
    alone(Rule::ClaimNoOp, broken(CLAIM, json!(["paying_sent", "paying_sent"])));
    alone(Rule::ClaimIntoFinal, broken("/steps/1/successful_state/admin", json!("paying_sent")));
    alone(Rule::ClaimAmbiguous, broken("/steps/2/claim_state/admin", json!(["paying_sent", "overdue"])));
    // A claim into the status of a step also makes that status a claiming status.
    let found = broken(CLAIM, json!(["sent", "sent"]));
    assert!(found.contains(&Rule::ClaimFromItself), "{found:?}");
}

#[test]
fn a_workflow_may_share_claiming_statuses() {
    let mut config = invoices();
    config["steps"][2]["claim_state"]["admin"] = json!(["paying_sent", "overdue"]);
    config["status_types"].as_array_mut().unwrap().retain(|status| status != "paying_overdue");
    assert_eq!(findings(&config).iter().map(|finding| finding.rule).collect::<Vec<_>>(), [Rule::ClaimAmbiguous]);
    config["shared_claiming"] = json!(true);
    assert_eq!(findings(&config), []);
}

#[test]
fn every_other_rule() {
    assert_eq!(broken(CLAIM, json!(["paying_sent", "overdue"])), [Rule::RevertElsewhere]);
    let step = json!({ "step_id": 40, "step_key": "x", "status": "paying_sent", "successful_state": "closed" });
    assert_eq!(broken("/steps/-", step), [Rule::StartsClaiming]);
    assert_eq!(broken("/steps/0/action/system", json!("Unknown")), [Rule::UnknownAction]);
    assert_eq!(broken("/steps/0/action/guest", json!("Remind")), [Rule::UnknownRequester, Rule::NoSuccessfulState]);
    assert_eq!(broken("/steps/0/successful_state/guest", json!("overdue")), [Rule::UnknownRequester]);
    assert_eq!(broken("/steps/0/action/admin", json!("Remind")), [Rule::NoSuccessfulState]);
    assert_eq!(broken("/status_types/-", json!("lost")), [Rule::UnreachableStatus]);
    assert_eq!(broken("/status_types/-", json!("sent")), [Rule::DuplicateId]);
    assert_eq!(broken("/steps/2/step_id", json!(20)), [Rule::DuplicateId]);
    let step = json!({ "step_id": 40, "step_key": "close", "status": "paid", "successful_state": "closed" });
    assert_eq!(broken("/steps/-", step), [Rule::DuplicateId]);
    assert_eq!(broken("/steps/3/successful_state", json!("gone")), [Rule::UnreachableStatus, Rule::UnknownStatus]);
    assert_eq!(broken("/initial", json!(["sent", "nowhere"])), [Rule::UnknownStatus]);
    let step = json!({ "step_id": 40, "step_key": "x", "status": "nowhere", "successful_state": "closed" });
    assert_eq!(broken("/steps/-", step), [Rule::UnknownStatus]);
    assert_eq!(broken("/steps/0/non_idempotent", json!(true)), [Rule::Unclaimed]);
    assert_eq!(broken("/actions/Remind", json!({ "non_idempotent": true })), [Rule::Unclaimed]);
    assert_eq!(broken("/steps/1/lease", json!("1ms")), [Rule::Limits]);
    assert_eq!(broken("/steps/1/attempts", json!(0)), [Rule::Limits]);
    assert_eq!(broken("/steps/0/timer/after", json!("99999999d")), [Rule::Limits]);
    assert_eq!(broken("/steps/1/claim_state", json!({ "admin": ["paying_sent", "sent"] })), [Rule::TwoClaimNames]);
    assert_eq!(broken("/meta/status_field", json!("a..b")), [Rule::Format]);
    let two = json!([invoices(), invoices()]);
    assert_eq!(findings(&two).into_iter().map(|finding| finding.rule).collect::<Vec<_>>(), [Rule::DuplicateId]);
}

#[test]
fn warnings_leave_a_configuration_valid() {
    assert_eq!(broken("/steps/1/successful_state/system", json!("paid")), [Rule::PartlyClaimed]);
    let nothing = json!({ "non_idempotent": true, "writes_nothing": true });
    assert_eq!(broken("/actions/ApplyPayment", nothing), [Rule::ClaimedForNothing, Rule::ClaimedForNothing]);
    let mut config = invoices();
    config["steps"][1]["successful_state"]["system"] = json!("paid");
    assert!(claim::check_json(&config.to_string()).is_valid());
}

#[test]
fn values_of_the_wrong_type_are_reported_with_all_other_findings() {
    for field in ["workflow", "meta", "status_types", "steps"] {
        assert!(without(&format!("/{field}")).contains(&Rule::Format), "{field}");
    }
    for field in ["step_id", "step_key", "status", "successful_state"] {
        assert!(without(&format!("/steps/0/{field}")).contains(&Rule::Format), "{field}");
    }
    for field in ["owning_module", "entity_type", "status_field"] {
        assert!(without(&format!("/meta/{field}")).contains(&Rule::Format), "{field}");
        assert!(broken(&format!("/meta/{field}"), json!("")).contains(&Rule::Format), "{field}");
    }
    let shapes = [
        ("/steps/0/step_id", json!("ten")),
        ("/steps/0/step_id", json!(-1)),
        ("/steps/1/lease", json!("a while")),
        ("/steps/1/lease", json!(30)),
        ("/steps/1/recovery", json!("forget")),
        ("/steps/1/guards/admin/0", json!(7)),
        ("/steps/1/unheard_of", json!(7)),
        ("/steps/0/timer", json!("30d")),
        ("/meta/janitor", json!("cron")),
        ("/shared_claiming", json!("yes")),
        ("/requesters", json!({})),
    ];
    for (pointer, value) in shapes {
        assert_eq!(broken(pointer, value.clone()), [Rule::Format], "{pointer}: {value}");
    }
    assert_eq!(broken("/steps/-", json!([])), [Rule::Format]);
}

#[test]
fn a_finding_has_its_position() {
    let text = r#"{
  "workflow": "w",
  "meta": { "owning_module": "m", "entity_type": "t", "status_field": "status" },
  "status_types": ["a", "b"],
  "steps": [
    { "step_id": 1, "step_key": "go", "status": "a",
      "successful_state": { "admin": "c", "admin": "b" }, "successful_claim_state": { "admin": ["x", "a"] } }
  ]
}"#;
    let found = claim::check_json(text).findings;
    let [twice, claim] = found.as_slice() else { panic!("{found:?}") };
    assert_eq!((twice.rule, twice.position), (Rule::DuplicateField, Some(Position { line: 7, column: 52 })));
    assert_eq!((claim.rule, claim.position), (Rule::ClaimStatuses, Some(Position { line: 7, column: 96 })));
    let places = [&claim.workflow, &claim.step, &claim.requester].map(|place| place.as_deref().unwrap());
    assert_eq!(places, ["w", "go (1)", "admin"]);
    let told =
        "7:96: error: workflow w: step go (1): requester admin: status \"x\" is not in status_types [claim_statuses]";
    assert_eq!(claim.to_string(), told);
    let found = claim::check_json("{\n  \"workflow\": ]").findings;
    assert_eq!(found[0].position, Some(Position { line: 2, column: 15 }));
}

#[test]
fn workflows_can_be_written_in_rust() {
    let workflow = |claim: &str| {
        ClaimWorkflow::new("order", "shop", "order").statuses(["new", "paying", "paid"]).step(
            ClaimStep::new(1, "pay", "new", Each::by([("admin", "paid".to_string())]))
                .action("Pay")
                .claimed_for("admin", claim)
                .after("SendReceipt")
                .guard("has_amount"),
        )
    };
    assert_eq!(claim::check(&[workflow("paying")]), []);
    let found = claim::check(&[workflow("new")]);
    assert!(found.iter().any(|finding| finding.rule == Rule::ClaimFromItself && finding.position.is_none()));
    let diagram = workflow("paying").diagram();
    assert!(diagram.contains("state \"paying\" as s1:::claiming"), "{diagram}");
    assert!(diagram.contains("s0 --> s1: pay (admin)") && diagram.contains("s1 --> s0: reverts"), "{diagram}");
    assert!(diagram.contains("s1 --> s2: success") && diagram.contains("s2 --> [*]"), "{diagram}");
}

/// The schema and the reader accept the same files.
#[test]
fn the_schema_accepts_what_the_reader_accepts() {
    let schema = claim::json_schema();
    let validator = jsonschema::validator_for(&schema).unwrap();
    assert!(validator.is_valid(&invoices()) && validator.is_valid(&json!([invoices()])));
    for (pointer, value) in [("/steps/0/step_id", json!("ten")), ("/steps/1/recovery", json!("forget"))] {
        let mut config = invoices();
        *config.pointer_mut(pointer).unwrap() = value;
        assert!(!validator.is_valid(&config), "{pointer}");
    }
}

#[test]
fn large_and_deep_files_are_rejected_without_harm() {
    let deep = |levels: usize| format!("{}1{}", "[".repeat(levels), "]".repeat(levels));
    for levels in [200, 10_000, 1_000_000] {
        assert!(!claim::check_json(&deep(levels)).is_valid());
        let config = json!({ "steps": 1 }).to_string().replace('1', &deep(levels));
        assert!(!claim::check_json(&config).is_valid());
    }
    let statuses: Vec<String> = (0..400_000).map(|number| format!("status number {number}")).collect();
    let mut config = invoices();
    config["status_types"].as_array_mut().unwrap().extend(statuses.into_iter().map(Value::String));
    let text = config.to_string();
    assert!(text.len() > 8_000_000);
    assert_eq!(claim::check_json(&text).findings.len(), 400_000, "none of the added statuses can be reached");
}

/// JSON in which the fields of a configuration occur anywhere, also twice, with any value.
fn json_text() -> impl Strategy<Value = String> {
    let fields = [
        "workflow",
        "meta",
        "status_types",
        "steps",
        "step_id",
        "status",
        "action",
        "successful_state",
        "claim_state",
        "successful_claim_state",
        "guards",
        "timer",
        "lease",
        "requesters",
        "actions",
        "initial",
        "owning_module",
    ];
    let leaf = prop_oneof![
        Just("null".to_string()),
        Just("\"a\"".to_string()),
        Just("\"1s\"".to_string()),
        Just("[\"a\",\"b\"]".to_string()),
        any::<i64>().prop_map(|number| number.to_string()),
        ".{0,8}".prop_map(|text| Value::String(text).to_string()),
    ];
    leaf.prop_recursive(6, 64, 6, move |inner| {
        let field = prop::sample::select(fields.to_vec());
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(|items| format!("[{}]", items.join(","))),
            prop::collection::vec((field, inner), 0..6).prop_map(|pairs| {
                let pairs = pairs.iter().map(|(name, value)| format!("\"{name}\":{value}"));
                format!("{{{}}}", pairs.collect::<Vec<_>>().join(","))
            }),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn no_file_makes_the_check_panic(text in prop_oneof![json_text(), ".{0,200}"]) {
        let checked = claim::check_json(&text);
        prop_assert!(checked.workflows.is_empty() || !checked.workflows[0].diagram().is_empty());
        for finding in checked.findings {
            prop_assert!(!finding.to_string().is_empty());
        }
    }

    /// Inserts other text into the invoices. The check reports it or ignores it, but does not panic.
    #[test]
    fn no_change_makes_the_check_panic(text in json_text(), place in 0usize..2000) {
        let config = serde_json::to_string(&invoices()).unwrap();
        let place = place % config.len();
        let cut = (place..config.len()).find(|at| config.is_char_boundary(*at)).unwrap();
        claim::check_json(&format!("{}{text}{}", &config[..cut], &config[cut..]));
        claim::check_json(&format!("{}{text}", &config[..cut]));
    }
}
