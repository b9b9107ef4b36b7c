//! `latch serve`, `latch config` and `latch token`, as their users run them.

use std::path::Path;
use std::process::Stdio;

use serde_json::{Value, json};

use crate::serving::{Serving, command, get};
use crate::{succeeded, text};

/// The hash of a token.
pub(crate) fn hash_of(secret: &str) -> String {
    let mut process = command();
    process.args(["token", "hash", "--name", "a", "-o", "json"]);
    process.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut process = process.spawn().unwrap();
    std::io::Write::write_all(&mut process.stdin.take().unwrap(), secret.as_bytes()).unwrap();
    let printed: Value = serde_json::from_str(&succeeded(process.wait_with_output().unwrap())).unwrap();
    printed["hash"].as_str().unwrap().into()
}

/// Runs a command to its end in a directory.
pub(crate) fn run_in(directory: &Path, arguments: &[&str], variables: &[(&str, &str)]) -> std::process::Output {
    let mut command = command();
    command.current_dir(directory).envs(variables.iter().copied());
    command.args(arguments).stdin(Stdio::null()).output().unwrap()
}

pub(crate) fn settings(directory: &Path, arguments: &[&str], variables: &[(&str, &str)]) -> Value {
    let arguments = [&["config", "-o", "json"], arguments].concat();
    serde_json::from_str(&succeeded(run_in(directory, &arguments, variables))).unwrap()
}

pub(crate) fn setting(shown: &Value, name: &str) -> Value {
    let found = shown["settings"].as_array().unwrap().iter().find(|setting| setting["name"] == name);
    found.unwrap_or_else(|| panic!("{name} is missing in {shown}")).clone()
}

#[test]
fn a_server_serves_its_stores_and_ends_gracefully() {
    let directory = tempfile::tempdir().unwrap();
    let (store, billing) = (directory.path().join("data"), directory.path().join("billing"));
    let second = format!("billing={}", billing.display());
    let serving = Serving::start(&["--store", store.to_str().unwrap(), "--add-namespace", &second]);
    let addresses: Vec<&str> =
        serving.started["addresses"].as_array().unwrap().iter().filter_map(Value::as_str).collect();
    assert_eq!(addresses.len(), 3, "{addresses:?}");
    assert_eq!(
        addresses[1..],
        [format!("unix:{}/api.sock", billing.display()), format!("unix:{}/api.sock", store.display())]
    );
    assert_eq!(serving.started["namespaces"], json!(["billing", "default"]));
    assert_eq!(serving.started["pid"], serving.process.id());
    assert_eq!(get(&serving.url, "/healthz", "").0, 200);
    assert_eq!(get(&serving.url, "/readyz", "").0, 200);
    assert_eq!(get(&serving.url, "/v1/ns/billing/entities/a", "").0, 404);
    let (status, metrics) = get(&serving.url, "/metrics", "");
    assert_eq!(status, 200);
    for name in ["latchwork_build_info", "latchwork_http_requests_total", "latchwork_http_request_seconds_bucket"] {
        assert!(metrics.contains(name), "{name} is missing in {metrics}");
    }
    // Another server cannot have the directory at the same time.
    let arguments = ["serve", "--store", store.to_str().unwrap(), "--listen", "127.0.0.1:0"];
    let refused = run_in(directory.path(), &arguments, &[]);
    assert_eq!(refused.status.code(), Some(75), "{}", text(&refused.stderr));
    assert_eq!(serving.end(), Some(0));
    assert!(!store.join("api.sock").exists() && !billing.join("api.sock").exists());
    // The store was closed, so another process has it at once.
    let stats = run_in(directory.path(), &["store", "stats", "--store", store.to_str().unwrap()], &[]);
    assert!(succeeded(stats).contains("generation"));
}

#[test]
fn what_a_server_refuses_has_an_exit_code() {
    let directory = tempfile::tempdir().unwrap();
    std::fs::write(directory.path().join("bad.toml"), "listen = 7\n").unwrap();
    for (arguments, code, says) in [
        (&["--listen", "0.0.0.0:0"][..], 2, "it needs a token and TLS"),
        (&["--listen", "here"], 2, "not an address to listen on"),
        (&["--host", "latch.example.org"], 2, "a public host is served without a token"),
        (&["--host", "a/b"], 2, "not a host"),
        (&["--tls-cert", "cert.pem"], 2, "--tls-key"),
        (&["--tls-cert", "none.pem", "--tls-key", "none.pem", "--listen", "127.0.0.1:0"], 2, "none.pem"),
        (&["--limit", "waits=3"], 2, "there is no limit \"waits\""),
        (&["--log-level", "loud"], 2, "is not a level"),
        (&["--config", "none.toml"], 3, "cannot read none.toml"),
        (&["--config", "bad.toml"], 2, "bad.toml, line 1"),
        (&["--add-namespace", "Billing=./b", "--listen", "127.0.0.1:0"], 2, "cannot name a namespace"),
    ] {
        let output = run_in(directory.path(), &[&["serve", "--store", "data"], arguments].concat(), &[]);
        let said = text(&output.stderr);
        assert_eq!((output.status.code(), said.contains(says)), (Some(code), true), "{arguments:?}: {said}");
    }
}

#[test]
fn log_lines_are_json_if_that_is_wanted_and_hold_no_secret() {
    let directory = tempfile::tempdir().unwrap();
    let created = succeeded(run_in(directory.path(), &["token", "create", "--name", "ci", "-o", "json"], &[]));
    let created: Value = serde_json::from_str(&created).unwrap();
    let (secret, hash) = (created["token"].as_str().unwrap(), created["hash"].as_str().unwrap());
    let file = format!("[[tokens]]\nname = \"ci\"\nhash = \"{hash}\"\nrole = \"operate\"\n");
    let tokens = directory.path().join("tokens.toml");
    std::fs::write(&tokens, file).unwrap();
    let store = directory.path().join("data");
    let log = std::fs::File::create(directory.path().join("log")).unwrap();
    let tokens = ["--store", store.to_str().unwrap(), "--token-file", tokens.to_str().unwrap()];
    let serving =
        Serving::start_with(&[&tokens[..], &["--log-format", "json", "--log-level", "debug"]].concat(), |command| {
            command.stderr(log);
        });
    assert_eq!(get(&serving.url, "/v1/locks", "").0, 401);
    assert_eq!(get(&serving.url, "/metrics", "").0, 401);
    let bearer = format!("Authorization: Bearer {secret}\r\n");
    assert_eq!(get(&serving.url, "/v1/locks?held=true", &bearer).0, 200);
    assert_eq!(get(&serving.url, "/metrics", &bearer).0, 200);
    assert_eq!(serving.end(), Some(0));
    let log = std::fs::read_to_string(directory.path().join("log")).unwrap();
    let lines: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let messages: Vec<&str> = lines.iter().filter_map(|line| line["message"].as_str()).collect();
    for message in ["created and opened", "listening", "answered", "a signal asks for the end", "ended"] {
        assert!(messages.contains(&message), "{message} is missing in {log}");
    }
    assert!(!log.contains(secret) && !log.contains(hash) && !log.contains("held=true"), "{log}");
}

#[test]
fn a_token_is_shown_once_and_its_hash_is_what_a_server_stores() {
    let directory = tempfile::tempdir().unwrap();
    let run = |arguments: &[&str]| run_in(directory.path(), arguments, &[]);
    let create = ["token", "create", "--name", "billing \"x\"", "--role", "read", "--in", "default", "--in", "b"];
    let created = succeeded(run(&create));
    let secret = created.lines().find_map(|line| line.strip_prefix("# lw_")).unwrap();
    assert_eq!(secret.len(), 64);
    let lines: Vec<&str> = created.lines().skip(3).collect();
    assert_eq!(lines[..2], ["[[tokens]]", "name = \"billing \\\"x\\\"\""]);
    assert_eq!(lines[3..], ["role = \"read\"", "namespaces = [\"default\",\"b\"]"]);
    // What is printed is a token file.
    std::fs::write(directory.path().join("tokens.toml"), &created).unwrap();
    let shown = settings(directory.path(), &["--token-file", "tokens.toml"], &[]);
    let token = setting(&shown, "tokens.billing \"x\"");
    assert_eq!(token["value"]["role"], "read");
    assert_eq!(token["source"], "tokens.toml");

    let hash = |secret: &str| {
        let mut process = command();
        process.args(["token", "hash", "--name", "a", "-o", "json"]);
        process.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = process.spawn().unwrap();
        std::io::Write::write_all(&mut process.stdin.take().unwrap(), secret.as_bytes()).unwrap();
        process.wait_with_output().unwrap()
    };
    let printed: Value = serde_json::from_str(&succeeded(hash(&format!("lw_{secret}\n")))).unwrap();
    assert_eq!(Some(printed["hash"].as_str().unwrap()), lines[2].strip_prefix("hash = \"").map(|h| &h[..64]));
    assert!(printed.get("token").is_none());
    for weak in ["", "hunter2", "two words that are long enough to pass"] {
        let refused = hash(weak);
        assert_eq!(refused.status.code(), Some(2), "{weak}");
        assert!(weak.is_empty() || !text(&refused.stderr).contains(weak));
    }
    assert_eq!(run(&["token", "create", "--name", "local"]).status.code(), Some(2), "it stands for no token");
    assert_eq!(run(&["token", "create"]).status.code(), Some(2));
}

const FILE: &str = r#"
listen = ["127.0.0.1:7001"]
hosts = ["latch.example.org"]
token_file = "tokens.toml"

[log]
format = "json"

[limits]
wait = "20s"
body_bytes = 2048

[namespaces]
default = "./data"

[namespaces.billing]
store = "postgres://me:hunter2@db/app?password=hunter3"
schema = "billing"
password_file = "password"

[[tokens]]
name = "ops"
hash = "2cf24dba5fb0a30e26e83b2ac5b9e29e1b161e5c1fa7425e73043362938b9824"
role = "admin"
"#;

#[test]
fn the_configuration_is_that_of_file_environment_and_flags_in_rising_order() {
    let directory = tempfile::tempdir().unwrap();
    let (elsewhere, home) = (tempfile::tempdir().unwrap(), directory.path());
    std::fs::write(home.join("latchwork.toml"), FILE).unwrap();
    std::fs::write(home.join("tokens.toml"), "").unwrap();
    let shown = settings(
        home,
        &["--limit", "body_bytes=4096,headers=9"],
        &[("LATCH_LISTEN", "127.0.0.1:7002,[::1]:7002"), ("LATCH_LIMITS", "wait=1s"), ("LATCH_LOG_FORMAT", "text")],
    );
    assert_eq!(shown["file"], "latchwork.toml");
    let check = |shown: &Value, name: &str, value: Value, from: &str, source: Value| {
        let expected = json!({"name": name, "value": value, "from": from, "source": source});
        assert_eq!(setting(shown, name), expected);
    };
    let file = json!("latchwork.toml");
    check(&shown, "listen", json!(["127.0.0.1:7002", "[::1]:7002"]), "environment", json!("LATCH_LISTEN"));
    check(&shown, "hosts", json!(["latch.example.org"]), "file", file.clone());
    check(&shown, "origins", json!([]), "default", Value::Null);
    check(&shown, "log.format", json!("text"), "environment", json!("LATCH_LOG_FORMAT"));
    check(&shown, "log.level", json!("info"), "default", Value::Null);
    check(&shown, "limits.body_bytes", json!(4096), "flag", json!("--limit"));
    check(&shown, "limits.headers", json!(9), "flag", json!("--limit"));
    check(&shown, "limits.wait", json!("1s"), "environment", json!("LATCH_LIMITS"));
    check(&shown, "limits.connections", json!(4096), "default", Value::Null);
    check(&shown, "namespaces.default.store", json!("./data"), "file", file.clone());
    let database = json!("postgres://me@db/app");
    check(&shown, "namespaces.billing.store", database, "file", file.clone());
    check(&shown, "namespaces.billing.schema", json!("billing"), "file", file);
    assert_eq!(setting(&shown, "tokens.ops")["value"]["hash"], "(not shown)");
    let said = shown.to_string();
    assert!(!said.contains("hunter") && !said.contains("2cf24dba"), "{said}");

    // Paths in a file are relative to it, whatever directory the command runs in.
    let config = home.join("latchwork.toml").display().to_string();
    let flags = ["--config", &config, "--store", "./other", "--no-socket", "--insecure"];
    let shown = settings(elsewhere.path(), &flags, &[("LATCH_STORE", "./third"), ("LATCH_NO_METRICS", "true")]);
    check(&shown, "namespaces.default.store", json!("./other"), "flag", json!("--store"));
    check(&shown, "token_file", json!(home.join("tokens.toml").display().to_string()), "file", json!(config));
    check(&shown, "socket", json!(false), "flag", json!("--no-socket"));
    check(&shown, "metrics", json!(false), "environment", json!("LATCH_NO_METRICS"));
    check(&shown, "insecure", json!(true), "flag", json!("--insecure"));
    let shown = settings(elsewhere.path(), &[], &[("LATCH_STORE", "./third"), ("LATCH_INSECURE", "false")]);
    check(&shown, "namespaces.default.store", json!("./third"), "environment", json!("LATCH_STORE"));
    check(&shown, "insecure", json!(false), "environment", json!("LATCH_INSECURE"));
    assert_eq!(shown["file"], Value::Null);
}

#[test]
fn the_configuration_is_shown_as_a_table() {
    let directory = tempfile::tempdir().unwrap();
    let shown = succeeded(run_in(directory.path(), &["config", "--limit", "wait=1500ms"], &[]));
    let expected = "\
Configuration file: none

SETTING                   VALUE             FROM
namespaces.default.store  ./latchwork-data  default
listen                    127.0.0.1:7420    default
hosts                     none              default
origins                   none              default
insecure                  no                default
socket                    yes               default
metrics                   yes               default
tls.certificate           none              default
tls.key                   none              default
token_file                none              default
log.format                text              default
log.level                 info              default
traces.endpoint           none              default
traces.service            latch             default
traces.ratio              1.0               default
traces.headers_file       none              default
limits.body_bytes         1048576           default
limits.body_time          30s               default
limits.json_depth         127               default
limits.header_bytes       32768             default
limits.headers            64                default
limits.header_time        30s               default
limits.connections        4096              default
limits.wait               1500ms            flag --limit
limits.drain_time         10s               default
";
    assert_eq!(shown, expected);
}
