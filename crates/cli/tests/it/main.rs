//! The command as its users run it: the real binary, real directories, exit codes and output.

// A test ends where something unexpected happens.
#![allow(clippy::unwrap_used)]

mod claim;
mod clients;
mod database;
mod dev;
mod endure;
mod golden;
mod guides;
mod load;
mod lock;
mod lock_run;
mod node;
mod nouns;
mod program;
mod remote;
mod review;
mod schedule;
mod serve;
#[path = "../../../store/tests/it/server.rs"]
#[allow(dead_code)]
mod server;
mod serving;
mod store;
mod traces;
mod workflow;

use std::path::Path;
use std::process::{Command, Output};

fn latch(arguments: &[&str], store: &Path) -> Command {
    let mut command = serving::command();
    command.args(arguments).arg("--store").arg(store);
    command
}

/// Sends a signal to a process of the test.
fn signal(process: u32, signal: &str) {
    let sent = Command::new("kill").args([&format!("-{signal}"), &process.to_string()]).status().unwrap();
    assert!(sent.success(), "{signal} to {process}");
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn succeeded(output: Output) -> String {
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout)
}

#[test]
fn a_directory_in_use_is_busy_and_its_owner_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let store = runtime.block_on(latchwork::store::Store::open(directory.path())).unwrap();
    let output = latch(&["dev"], directory.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(75), "busy: try again later");
    let said = text(&output.stderr);
    let owner = format!("in use by process {}", std::process::id());
    assert!(said.contains(&owner) && said.contains(&directory.path().display().to_string()), "{said}");
    drop(store);
}

#[test]
fn a_file_in_place_of_the_directory_is_an_error_that_names_it() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("file");
    std::fs::write(&file, "not a directory").unwrap();
    let output = latch(&["dev"], &file.join("data")).output().unwrap();
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output.stderr);
    assert!(said.starts_with("latch: cannot ") && said.contains("file"), "{said}");
}

#[test]
fn a_wrong_command_line_is_a_usage_error() {
    let output = Command::new(env!("CARGO_BIN_EXE_latch")).arg("nonsense").output().unwrap();
    assert_eq!(output.status.code(), Some(2));
}

#[test]
fn histories_are_written_to_files_and_to_the_output() {
    use latchwork::workflow::{Ctx, Engine, History, workflow};

    let directory = tempfile::tempdir().unwrap();
    let (store, out) = (directory.path().join("data"), directory.path().join("histories"));
    let add = workflow("add").run(async |ctx: Ctx, n: u32| ctx.run("add", async || Ok(n + 1)).await);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let engine = Engine::open(&store).register(&add).start().await.unwrap();
        for (id, n) in [("one", 1), ("a/b", 2)] {
            engine.start(&add, n).id(id).await.unwrap().result().await.unwrap();
        }
        engine.stop();
        engine.store().close().await.unwrap();
    });
    drop(runtime);
    let mut command = latch(&["workflow", "history"], &store);
    let said = succeeded(command.arg("--out").arg(&out).output().unwrap());
    assert!(said.starts_with("2 histories in "), "{said}");
    let file = std::fs::read_to_string(out.join("a%2fb.json")).unwrap();
    let history: History = serde_json::from_str(&file).unwrap();
    assert_eq!((history.id.as_str(), history.steps()), ("a/b", vec!["add"]));
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    assert_eq!(runtime.block_on(latchwork::testing::replay(&history, &add)), Ok(()));
    let printed = succeeded(latch(&["workflow", "history", "one"], &store).output().unwrap());
    let history: History = serde_json::from_str(printed.trim()).unwrap();
    assert_eq!(history.operations[0].value::<u32>(), Some(2));
    let none = succeeded(latch(&["workflow", "history", "--workflow", "other"], &store).output().unwrap());
    assert_eq!(none, "");
    let missing = latch(&["workflow", "history", "missing"], &store).output().unwrap();
    assert_eq!((missing.status.code(), missing.stdout.len()), (Some(3), 0), "not found");
    let nowhere = latch(&["workflow", "history"], &directory.path().join("nowhere")).output().unwrap();
    assert_eq!(nowhere.status.code(), Some(3));
    assert!(text(&nowhere.stderr).contains("there is no such directory"), "{}", text(&nowhere.stderr));
    assert!(!directory.path().join("nowhere").exists(), "looking creates nothing");
}
