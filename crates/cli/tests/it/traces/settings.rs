//! The settings of traces: where each value comes from, and what is wrong with a bad one.

use std::path::Path;

use serde_json::{Value, json};

use crate::serve::{run_in, setting, settings};
use crate::text;

/// Variables.
type Variables<'a> = [(&'a str, &'a str)];

#[test]
fn traces_are_configured_by_file_environment_and_flags() {
    let (plain, directory) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let home = directory.path();
    std::fs::write(home.join("headers"), "authorization: Bearer hunter2\n").unwrap();
    let file =
        "[traces]\nendpoint = \"https://a.example.org\"\nservice = \"a\"\nratio = 1\nheaders_file = \"headers\"\n";
    std::fs::write(home.join("latchwork.toml"), file).unwrap();
    let check = |home: &Path, flags: &[&str], variables: &Variables, name: &str, value: Value, from: &str| {
        let shown = settings(home, flags, variables);
        let found = setting(&shown, name);
        let source = found["source"].as_str().map(|source| format!(" {source}")).unwrap_or_default();
        let origin = format!("{}{source}", found["from"].as_str().unwrap());
        assert_eq!((&found["value"], origin.as_str()), (&value, from), "{name}");
        assert!(!shown.to_string().contains("hunter2"), "{shown}");
    };
    let endpoint = "traces.endpoint";
    check(plain.path(), &[], &[], endpoint, Value::Null, "default");
    check(plain.path(), &[], &[], "traces.service", json!("latch"), "default");
    let in_file = "file latchwork.toml";
    check(home, &[], &[], endpoint, json!("https://a.example.org/v1/traces"), in_file);
    check(home, &[], &[], "traces.ratio", json!(1.0), in_file);
    check(home, &[], &[], "traces.headers_file", json!("headers"), in_file);
    // The variables of OpenTelemetry go before the file, and those of the command before them.
    let base = ("OTEL_EXPORTER_OTLP_ENDPOINT", "https://b.example.org/otlp/");
    let whole = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "https://c.example.org/spans");
    let own = ("LATCH_TRACES_ENDPOINT", "https://d.example.org");
    let (b, c) = ("https://b.example.org/otlp/v1/traces", "https://c.example.org/spans");
    check(home, &[], &[base], endpoint, json!(b), "environment OTEL_EXPORTER_OTLP_ENDPOINT");
    check(home, &[], &[base, whole], endpoint, json!(c), "environment OTEL_EXPORTER_OTLP_TRACES_ENDPOINT");
    let d = json!("https://d.example.org/v1/traces");
    check(home, &[], &[base, whole, own], endpoint, d, "environment LATCH_TRACES_ENDPOINT");
    check(home, &["--traces-endpoint", ""], &[base, own], endpoint, Value::Null, "flag --traces-endpoint");
    check(home, &[], &[("OTEL_EXPORTER_OTLP_ENDPOINT", "")], "traces.service", json!("a"), in_file);
    let name = ("OTEL_SERVICE_NAME", "b");
    check(home, &[], &[name], "traces.service", json!("b"), "environment OTEL_SERVICE_NAME");
    check(home, &["--traces-service", "c"], &[name], "traces.service", json!("c"), "flag --traces-service");
    let ratio = ("LATCH_TRACES_RATIO", "0.25");
    check(home, &[], &[ratio], "traces.ratio", json!(0.25), "environment LATCH_TRACES_RATIO");
}

#[test]
fn a_mistake_in_traces_is_named_with_its_place_and_without_values() {
    let directory = tempfile::tempdir().unwrap();
    let home = directory.path();
    std::fs::write(home.join("headers"), "authorization: Bearer hunter2\n\nhunter3\n").unwrap();
    std::fs::write(home.join("good"), "authorization: Bearer hunter2\n").unwrap();
    std::fs::write(home.join("a.toml"), "[traces]\nratio = 7\n").unwrap();
    std::fs::write(home.join("b.toml"), "[traces]\nendpont = \"http://h\"\n").unwrap();
    std::fs::write(home.join("c.toml"), "[traces]\nratio = \"hunter2\"\n").unwrap();
    let local = "http://127.0.0.1:4318";
    for (flags, variables, code, says) in [
        (&["--config", "a.toml"][..], &[][..], 2, "traces.ratio (file a.toml): it is a number from 0 to 1"),
        (&["--config", "b.toml"], &[], 2, "b.toml, line 2: unknown field `endpont`"),
        (&["--config", "c.toml"], &[], 2, "c.toml, line 2: invalid type: a string"),
        (&["--traces-ratio=-1"], &[], 2, "traces.ratio (flag --traces-ratio): it is a number from 0 to 1"),
        (&["--traces-ratio", "NaN"], &[], 2, "traces.ratio (flag --traces-ratio): it is a number from 0 to 1"),
        (&["--traces-service", " "], &[], 2, "traces.service (flag --traces-service): it is empty"),
        (&["--traces-endpoint", "collector:4318"], &[], 2, "traces.endpoint (flag --traces-endpoint): write http://"),
        (
            &[],
            &[("OTEL_EXPORTER_OTLP_ENDPOINT", "http://me:hunter2@h")],
            2,
            "traces.endpoint (environment OTEL_EXPORTER_OTLP_ENDPOINT): it has a user or a query",
        ),
        (
            &["--traces-endpoint", local],
            &[("LATCH_TRACES_HEADERS_FILE", "headers")],
            2,
            "traces.headers_file (environment LATCH_TRACES_HEADERS_FILE): headers, line 3: write Name: value",
        ),
        (&["--traces-endpoint", local, "--traces-headers-file", "none"], &[], 3, "cannot read none"),
        (
            &["--traces-endpoint", "http://collector:4318", "--traces-headers-file", "good"],
            &[],
            2,
            "traces.endpoint (flag --traces-endpoint): the headers in good would be sent to another machine",
        ),
    ] {
        for command in ["config", "serve"] {
            let output = run_in(home, &[&[command], flags].concat(), variables);
            let said = text(&output.stderr);
            assert_eq!((output.status.code(), said.contains(says)), (Some(code), true), "{flags:?}: {said}");
            assert!(!said.contains("hunter"), "{said}");
        }
    }
}
