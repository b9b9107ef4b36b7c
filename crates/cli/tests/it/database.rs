//! The command on a PostgreSQL database: it looks while another process has the store open, makes an operator's
//! changes, and never prints a password.

use std::process::{Command, Output, Stdio};
use std::time::Duration;

use latchwork::store::PostgresOptions;
use latchwork::workflow::{Ctx, Engine, Workflow, workflow};
use serde_json::Value;

use crate::server::Server;
use crate::{succeeded, text};

/// A connection string for the command.
fn url(server: &Server) -> String {
    let socket = server.socket();
    let host = socket.parent().unwrap().display().to_string().replace('/', "%2F");
    format!("postgres:///postgres?user=postgres&host={host}")
}

fn schema(name: &str) -> String {
    format!("cli_{}_{name}", std::process::id())
}

fn run(arguments: &[&str], url: &str, schema: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_latch"));
    command.args(arguments).args(["--store", url, "--schema", schema]).stdin(Stdio::null()).output().unwrap()
}

fn json(arguments: &[&str], url: &str, schema: &str) -> Value {
    serde_json::from_str(&succeeded(run(&[arguments, &["-o", "json"]].concat(), url, schema))).unwrap()
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap().block_on(future)
}

/// Holds a lock and waits for a message.
fn waits() -> Workflow<u32, u32> {
    workflow("waits").run(async |ctx: Ctx, n: u32| {
        let _guard = ctx.mutex("account-42").acquire().await?;
        ctx.receive::<()>("end").await?;
        Ok(n)
    })
}

/// Takes a lock that an operator releases by force.
fn configures() -> Workflow<u32, u32> {
    workflow("configures").run(async |ctx: Ctx, n: u32| {
        let _guard = ctx.mutex("config").acquire().await?;
        Ok(n)
    })
}

#[test]
fn a_database_is_looked_at_and_changed_while_an_engine_uses_it() {
    let (server, name) = (Server::start(), schema("used"));
    let at = url(&server);
    block_on(async {
        let store = PostgresOptions::new().schema(&name).connect(&server.url).await.unwrap();
        let engine = Engine::on(&store).register(&waits()).register(&configures()).start().await.unwrap();
        engine.start(&waits(), 7).id("one").await.unwrap();
        let session = engine.locks().session().label("nightly").await.unwrap();
        let guard = engine.locks().mutex("config").by(&session).acquire().await.unwrap();
        let second = engine.start(&configures(), 8).id("two").await.unwrap();
        while engine.locks().inspect("account-42").await.is_err() || engine.residents() > 0 {
            engine.store().env().sleep(Duration::from_millis(5)).await;
        }
        let (at, name) = (at.clone(), name.clone());
        let looked = tokio::task::spawn_blocking(move || {
            let list = json(&["workflow", "list"], &at, &name);
            let listed = list["executions"].as_array().unwrap();
            assert!(listed.len() == 2 && listed.iter().any(|it| it["id"] == "one"), "{list}");
            assert!(succeeded(run(&["workflow", "why", "one"], &at, &name)).contains("\"end\""));
            assert_eq!(json(&["lock", "show", "account-42"], &at, &name)["holders"][0]["execution"], "one");
            for empty in ["schedule", "claim", "review"] {
                succeeded(run(&[empty, "list"], &at, &name));
            }
            // What an operator changes. The engine that has the store open owns its shards, and goes on.
            let create = ["schedule", "create", "nightly", "--workflow", "waits", "--input", "1", "--every", "1h"];
            assert_eq!(json(&create, &at, &name)["name"], "nightly");
            succeeded(run(&["schedule", "pause", "nightly", "--reason", "holidays"], &at, &name));
            let token = json(&["lock", "show", "config"], &at, &name)["holders"][0]["token"].to_string();
            let release = ["lock", "release", "config", "--token", &token, "--reason", "it hangs", "--yes"];
            assert_eq!(json(&release, &at, &name)["released"]["label"], "nightly");
        });
        looked.await.unwrap();
        let schedule = engine.schedules().get("nightly").await.unwrap().unwrap();
        assert_eq!(schedule.paused.as_deref(), Some("holidays"), "the engine sees the change");
        assert_eq!(second.result().await.unwrap(), 8, "the release has set it running, and its engine has noticed");
        drop(guard);
        engine.handle(&waits(), "one").signal("end", &()).await.unwrap();
        assert_eq!(engine.handle(&waits(), "one").result().await.unwrap(), 7, "the engine still owns its shards");
        engine.stop();
        store.close().await.unwrap();
    });
}

#[test]
fn a_schema_without_a_store_is_not_found_and_not_created() {
    let (server, name) = (Server::start(), schema("nowhere"));
    for command in [
        &["workflow", "list"][..],
        &["schedule", "pause", "x", "--reason", "y"],
        &["lock", "release", "x", "--token", "1", "--reason", "y", "--yes"],
        &["review", "decide", "x", "y", "--by", "z"],
        &["claim", "release", "x", "--reason", "y", "--yes"],
    ] {
        let output = run(&[command, &["-o", "json"]].concat(), &url(&server), &name);
        assert_eq!(output.status.code(), Some(3), "{command:?}: {}", text(&output.stderr));
        let error: Value = serde_json::from_str(&text(&output.stderr)).unwrap();
        assert_eq!((&error["error"]["schema"], &error["error"]["code"]), (&name.as_str().into(), &"not_found".into()));
    }
}

#[test]
fn a_password_is_not_printed_and_errors_say_what_to_do() {
    for (url, schema, exit, says) in [
        ("postgres://me:hunter2@127.0.0.1:1/app", "a", 1, "cannot connect to the database"),
        ("postgres://me:hunter2@127.0.0.1:1/app?sslmode=verify-full", "a", 2, "sslrootcert: name the file"),
        ("postgres://me:hunter2@127.0.0.1:1/app?sslmode=maybe", "a", 2, "sslmode is disable, prefer"),
        ("postgres://me:hunter2@127.0.0.1:one/app", "a", 2, "connection string"),
        ("postgres://me@127.0.0.1:1/app?password=hunter2&x=hunter2", "a", 2, "setting 2 is not known"),
        ("postgres://me:hunter2@127.0.0.1:1/app", "a\"b", 2, "schema name"),
        ("./data", "a", 2, "--schema needs a database"),
    ] {
        for command in [&["workflow", "list"][..], &["lock", "list", "-o", "json"], &["dev"]] {
            let output = run(command, url, schema);
            let said = text(&output.stderr) + &text(&output.stdout);
            assert!(!said.contains("hunter2"), "{command:?} {url}: {said}");
            let plain = said.replace("\\\"", "\"");
            assert!(plain.contains(says), "{command:?} {url}: {said}");
            assert_eq!(output.status.code(), Some(exit), "{command:?} {url}: {said}");
        }
    }
}

#[test]
fn the_demonstration_runs_on_a_database() {
    let (server, name) = (Server::start(), schema("dev"));
    let arguments = ["dev", "--transfers", "30", "--invoices", "3", "--crash-every", "20s", "-o", "json"];
    let summary: Value = serde_json::from_str(&succeeded(run(&arguments, &url(&server), &name))).unwrap();
    assert_eq!((&summary["ok"], &summary["lost"], &summary["doubled"]), (&true.into(), &0.into(), &0.into()));
}
