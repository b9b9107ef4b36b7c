//! `latch store` on directories that the library has written; completions and manual pages.

use std::path::Path;
use std::process::{Output, Stdio};

use latchwork::entity::{Add, Entities};
use latchwork::store::Store;
use serde_json::{Value, json};

use crate::serving::{Serving, command};
use crate::{latch, succeeded, text};

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

/// A store with some entities.
fn made(directory: &Path, entities: u32) {
    add(directory, 0..entities);
}

fn add(directory: &Path, entities: std::ops::Range<u32>) {
    block_on(async {
        let store = Store::open(directory).await.unwrap();
        let all = Entities::on(&store).await.unwrap();
        for number in entities {
            all.add(Add::new("t").id(format!("e{number}")).data(number)).await.unwrap();
        }
        drop(all);
        store.close().await.unwrap();
    });
}

fn count(directory: &Path) -> usize {
    block_on(async {
        let store = Store::open(directory).await.unwrap();
        let entities = Entities::on(&store).await.unwrap();
        let mut found = 0;
        for number in 0..100 {
            found += usize::from(entities.get(format!("e{number}").as_str()).await.unwrap().is_some());
        }
        drop(entities);
        store.close().await.unwrap();
        found
    })
}

fn run(arguments: &[&str], store: &Path) -> Output {
    latch(arguments, store).stdin(Stdio::null()).output().unwrap()
}

fn printed(arguments: &[&str], store: &Path) -> Value {
    serde_json::from_str(&succeeded(run(&[arguments, &["-o", "json"]].concat(), store))).unwrap()
}

#[test]
fn a_store_is_backed_up_and_restored() {
    let directory = tempfile::tempdir().unwrap();
    let (store, backup) = (directory.path().join("data"), directory.path().join("backup"));
    made(&store, 3);
    let place = backup.to_str().unwrap();
    let done = printed(&["store", "backup", place, "--verify"], &store);
    assert_eq!((&done["directory"], &done["verified"]), (&place.into(), &true.into()));
    assert!(done["bytes"].as_u64() > Some(0) && done["generation"].as_u64() > Some(3), "{done}");
    assert_eq!(count(&backup), 3, "a backup is a store");
    let again = run(&["store", "backup", place], &store);
    assert_eq!(again.status.code(), Some(2), "{}", text(&again.stderr));
    let other = directory.path().join("backup-2");
    let said = succeeded(run(&["store", "backup", other.to_str().unwrap()], &store));
    assert!(said.starts_with("Generation ") && said.contains(&format!(" is in {}: ", other.display())), "{said}");

    // A restore replaces everything, so it wants a confirmation.
    add(&store, 3..5);
    let asked = run(&["store", "restore", other.to_str().unwrap()], &store);
    assert_eq!(asked.status.code(), Some(2), "{}", text(&asked.stderr));
    assert_eq!(count(&store), 5);
    let done = printed(&["store", "restore", other.to_str().unwrap(), "--yes"], &store);
    assert!(done["generation"].as_u64() > done["snapshot_generation"].as_u64(), "{done}");
    assert_eq!(count(&store), 3);
    // A store with other content keeps it: its items have other spaces.
    let foreign = directory.path().join("foreign");
    made(&foreign, 5);
    let refused = run(&["store", "restore", other.to_str().unwrap(), "--yes"], &foreign);
    assert_eq!((refused.status.code(), count(&foreign)), (Some(2), 5), "{}", text(&refused.stderr));
    // A new store needs none.
    let new = directory.path().join("new");
    let said = succeeded(run(&["store", "restore", other.to_str().unwrap()], &new));
    assert!(said.starts_with(&format!("{} holds what {} holds", new.display(), other.display())), "{said}");
    assert_eq!(count(&new), 3);
    let missing = run(&["store", "restore", "/nowhere"], &directory.path().join("never"));
    assert_eq!(missing.status.code(), Some(3), "{}", text(&missing.stderr));
    assert!(!directory.path().join("never").exists(), "a wrong snapshot creates no store");
}

#[test]
fn damage_is_found_and_figures_are_shown() {
    let directory = tempfile::tempdir().unwrap();
    let store = directory.path().join("data");
    made(&store, 3);
    assert_eq!(succeeded(run(&["store", "verify"], &store)), "Nothing is damaged.\n");
    assert_eq!(printed(&["store", "verify"], &store), json!({"is_sound": true, "damage": []}));
    let stats = printed(&["store", "stats"], &store);
    let names: Vec<&str> = stats.as_object().unwrap().keys().map(String::as_str).collect();
    let expected = [
        "applied",
        "generation",
        "groups",
        "index_bytes",
        "keys",
        "log_bytes",
        "overlay_bytes",
        "past_versions",
        "pins",
        "refused",
    ];
    assert_eq!(names, expected);
    let shown = succeeded(run(&["store", "stats"], &store));
    let labels: Vec<&str> = shown.lines().map(|line| line.split("  ").next().unwrap()).collect();
    assert_eq!(labels, ["generation", "keys", "past versions", "index", "not in the index yet"]);

    let index = store.join("index.redb");
    let mut bytes = std::fs::read(&index).unwrap();
    let at = bytes
        .windows(3)
        .position(|window| window == b"e1\"" || window == b"\"e1")
        .or_else(|| bytes.windows(2).position(|window| window == b"e1"));
    let at = at.expect("the entity is in the index");
    bytes[at] ^= 1;
    std::fs::write(&index, bytes).unwrap();
    let verified = run(&["store", "verify", "-o", "json"], &store);
    assert_eq!(verified.status.code(), Some(1), "{}", text(&verified.stdout));
    let said = text(&verified.stdout);
    // The file may be too damaged to be opened, which is an error that names it.
    if said.is_empty() {
        assert!(text(&verified.stderr).contains("index"), "{}", text(&verified.stderr));
    } else {
        let found: Value = serde_json::from_str(&said).unwrap();
        assert_eq!(found["is_sound"], false);
        assert!(found["damage"][0]["place"].is_string() && found["damage"][0]["detail"].is_string(), "{found}");
    }
}

#[test]
fn a_live_store_is_backed_up_and_measured_through_its_socket() {
    let directory = tempfile::tempdir().unwrap();
    let (store, backup) = (directory.path().join("data"), directory.path().join("backup"));
    made(&store, 4);
    let serving = Serving::on(&store);
    let done = printed(&["store", "backup", backup.to_str().unwrap(), "--verify"], &store);
    assert_eq!(done["verified"], true);
    assert_eq!(printed(&["store", "verify"], &store)["is_sound"], true);
    let stats = succeeded(run(&["store", "stats"], &store));
    assert!(stats.contains("commits applied"), "{stats}");
    let full = run(&["store", "backup", backup.to_str().unwrap()], &store);
    assert_eq!(full.status.code(), Some(2), "{}", text(&full.stderr));
    let restore = run(&["store", "restore", backup.to_str().unwrap(), "--yes"], &store);
    assert_eq!(restore.status.code(), Some(75), "{}", text(&restore.stderr));
    assert_eq!(serving.end(), Some(0));
    assert_eq!(count(&backup), 4);
}

#[test]
fn shells_get_completions_and_readers_get_pages() {
    let printed = |arguments: &[&str]| {
        let output = command().args(arguments).stdin(Stdio::null()).output().unwrap();
        (output.status.code(), text(&output.stdout))
    };
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let (code, script) = printed(&["completions", shell]);
        assert_eq!(code, Some(0));
        assert!(script.contains("latch") && script.contains("schedule"), "{shell}");
    }
    let checked = std::process::Command::new("bash").arg("-n").stdin(Stdio::piped()).spawn();
    let mut checked = checked.unwrap();
    let script = printed(&["completions", "bash"]).1;
    std::io::Write::write_all(&mut checked.stdin.take().unwrap(), script.as_bytes()).unwrap();
    assert!(checked.wait().unwrap().success(), "bash does not read the script");
    assert_eq!(printed(&["completions", "tcsh"]).0, Some(2));

    let (code, page) = printed(&["man", "lock", "run"]);
    assert_eq!(code, Some(0));
    for part in [".TH latch-lock-run 1", ".SH NAME", "\\-\\-on\\-lost", "128 and the number of the signal"] {
        assert!(page.contains(part), "{part} is missing in {page}");
    }
    for (command, synopsis) in [
        (&["man", "workflow", "show"][..], "\\fBlatch workflow show\\fR [OPTIONS] <ID>"),
        (&["man", "task"], "\\fBlatch task\\fR take [OPTIONS] <KINDS>..."),
        (&["man"], "\\fBlatch\\fR lock run [OPTIONS] <NAME>"),
    ] {
        let page = printed(command).1;
        assert!(page.contains(".SH SYNOPSIS") && page.contains(synopsis), "{synopsis} is missing in {page}");
    }
    assert_eq!(printed(&["man", "lock", "nonsense"]).0, Some(3));
    let folder = tempfile::tempdir().unwrap();
    assert_eq!(printed(&["man", "--out", folder.path().to_str().unwrap()]).0, Some(0));
    for name in ["latch.1", "latch-serve.1", "latch-lock-run.1", "latch-claim-dead-list.1"] {
        assert!(folder.path().join(name).exists(), "{name} is missing");
    }
}
