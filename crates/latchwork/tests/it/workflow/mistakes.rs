//! What the compiler says of the mistakes of a first workflow: in words that help, at the place of the mistake. The
//! mistakes are in tests/mistakes.rs.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The library as it was compiled last, which is what these tests are linked with.
fn library(directory: &Path) -> PathBuf {
    let found = std::fs::read_dir(directory).unwrap().map(|found| found.unwrap().path());
    let is_library = |path: &PathBuf| {
        let name = path.file_name().unwrap().to_string_lossy();
        name.starts_with("liblatchwork-") && name.ends_with(".rlib")
    };
    found.filter(is_library).max_by_key(|path| path.metadata().unwrap().modified().unwrap()).expect("the library")
}

/// What the compiler says of one of the mistakes.
fn compiled(mistake: &str) -> String {
    let tests = std::env::current_exe().unwrap();
    let (dependencies, out) = (tests.parent().unwrap(), tempfile::tempdir().unwrap());
    let mut rustc = Command::new("rustc");
    rustc.args(["--edition", "2024", "--emit", "metadata", "--out-dir"]).arg(out.path());
    rustc.arg("-L").arg(format!("dependency={}", dependencies.display()));
    rustc.arg("--extern").arg(format!("latchwork={}", library(dependencies).display()));
    rustc.arg("--cfg").arg(format!("mistake={mistake:?}"));
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("mistakes.rs");
    let compiled = rustc.arg(source).output().expect("rustc runs");
    String::from_utf8_lossy(&compiled.stderr).into_owned()
}

#[test]
fn mistakes_are_told_where_they_were_made_and_in_words_that_help() {
    let source = std::fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("mistakes.rs")).unwrap();
    for (mistake, words) in [
        ("none", &[][..]),
        ("not_serializable", &["`Opaque: serde::Serialize` is not satisfied", "derive(serde::Serialize)"]),
        ("not_serializable_transaction", &["`Opaque: serde::Serialize` is not satisfied", "derive(serde::Serialize)"]),
        ("not_send", &["future cannot be sent between threads safely", "has type `Rc<u64>` which is not `Send`"]),
        ("other_error", &["expected `latchwork::workflow::Failure`, found `std::io::Error`"]),
        ("no_await", &["a step does nothing until it is awaited"]),
        ("no_await_in_body", &["consider `await`ing on the `Future`"]),
        ("no_output", &["`NoOutput` is not a value that can pass from block to block", "is used in `tap` or `work`"]),
        ("other_value", &["expected `&Block<String, _>`, found `&Block<u64, u64>`"]),
        ("input", &["`Opaque: serde::Serialize` is not satisfied", "derive(serde::Serialize)"]),
    ] {
        let told = compiled(mistake);
        for word in words {
            assert!(told.contains(word), "{mistake}: {word:?} is not in:\n{told}");
        }
        let line = source.lines().position(|line| line.ends_with(&format!("// {mistake}")));
        match line {
            Some(line) => assert!(told.contains(&format!("mistakes.rs:{}:", line + 1)), "{mistake}:\n{told}"),
            None => assert_eq!(told, "", "{mistake} is none"),
        }
    }
}
