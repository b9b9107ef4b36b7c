//! The command as its users run it: the real binary, real directories, exit codes and what it prints.

// A test ends where something unexpected happens.
#![allow(clippy::unwrap_used)]

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::Duration;

fn latch(arguments: &[&str], store: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_latch"));
    command.args(arguments).arg("--store").arg(store);
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn succeeded(output: Output) -> String {
    assert!(output.status.success(), "{}", text(&output.stderr));
    text(&output.stdout)
}

#[test]
fn dev_shows_every_part_and_goes_on_from_where_it_was() {
    let directory = tempfile::tempdir().unwrap();
    let store = directory.path().join("data");
    let first = succeeded(latch(&["dev"], &store).output().unwrap());
    for part in ["Commits:", "Conflicts:", "Many at once:", "Time travel:", "Watch:", "nothing is damaged"] {
        assert!(first.contains(part), "{part} is missing in:\n{first}");
    }
    assert!(first.contains("the sum is 1600") && !first.contains("It was here before"));
    let second = succeeded(latch(&["dev"], &store).output().unwrap());
    assert!(second.contains("It was here before"));
}

#[test]
fn dev_survives_being_killed() {
    let directory = tempfile::tempdir().unwrap();
    let store = directory.path().join("data");
    for milliseconds in [5, 20, 40, 60] {
        let mut child = latch(&["dev"], &store).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        // Not a wait for something, but a moment to be killed in.
        #[allow(clippy::disallowed_methods)]
        std::thread::sleep(Duration::from_millis(milliseconds));
        child.kill().unwrap();
        child.wait().unwrap();
    }
    let output = succeeded(latch(&["dev"], &store).output().unwrap());
    assert!(output.contains("nothing is damaged"));
}

#[test]
fn a_directory_in_use_is_busy_and_its_owner_is_named() {
    let directory = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let store = runtime.block_on(latchwork_store::Store::open(directory.path())).unwrap();
    let output = latch(&["dev"], directory.path()).output().unwrap();
    assert_eq!(output.status.code(), Some(75), "busy: try again later");
    let said = text(&output.stderr);
    let owner = format!("in use by process {}", std::process::id());
    assert!(said.contains(&owner) && said.contains(&directory.path().display().to_string()), "{said}");
    drop(store);
}

#[test]
fn what_cannot_be_a_directory_is_an_error_that_names_it() {
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
