//! The types of the client for TypeScript, looked at by TypeScript's own compiler. A test that is run by itself
//! installs it from npm; `LATCHWORK_TSC` names an installed `node_modules`, or is `off`.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const VARIABLE: &str = "LATCHWORK_TSC";
/// Other versions find other mistakes.
const PACKAGES: [&str; 2] = ["typescript@5.9.3", "@types/node@22.19.0"];

const OPTIONS: [&str; 10] =
    ["--noEmit", "--strict", "--target", "es2022", "--module", "nodenext", "--allowJs", "--checkJs", "--types", "node"];

fn client() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../clients/typescript").canonicalize().unwrap()
}

/// The folder with the compiler. `None` if it is off.
fn modules() -> Option<PathBuf> {
    if let Some(given) = std::env::var_os(VARIABLE) {
        return (given != "off").then(|| given.into());
    }
    let target = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let home = target.join("typescript-5.9.3-whole");
    if !home.exists() {
        // Tests run side by side, and an installation may be ended halfway: only a whole one gets the name.
        let part = tempfile::tempdir_in(target).unwrap();
        let mut npm = Command::new("npm");
        npm.args(["install", "--silent", "--no-fund", "--no-audit", "--prefix"]).arg(part.path()).args(PACKAGES);
        let output = npm.output().unwrap_or_else(|error| panic!("npm: {error}; set {VARIABLE}=off to do without"));
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "{said}\nthe types are checked with {PACKAGES:?}; {VARIABLE}=off skips this");
        let named = std::fs::rename(part.path(), &home);
        assert!(named.is_ok() || home.exists(), "{named:?}");
    }
    let modules = home.join("node_modules");
    Some(modules)
}

fn compile(modules: &Path, files: &[PathBuf]) -> Output {
    let mut node = Command::new("node");
    node.arg(modules.join("typescript/bin/tsc")).args(OPTIONS).arg("--typeRoots").arg(modules.join("@types"));
    node.args(files).output().unwrap()
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

#[test]
fn the_examples_fit_the_types() {
    let Some(modules) = modules() else { return println!("the compiler is off") };
    let examples = std::fs::read_dir(client().join("examples")).unwrap();
    let mut files: Vec<PathBuf> = examples.map(|entry| entry.unwrap().path()).collect();
    assert_eq!(files.len(), 3);
    files.push(client().join("latchwork.d.ts"));
    let output = compile(&modules, &files);
    assert!(output.status.success(), "{}", said(&output));
}

#[test]
fn a_program_that_uses_the_client_wrongly_is_refused() {
    let Some(modules) = modules() else { return println!("the compiler is off") };
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("wrong.mts");
    let client = client().join("latchwork.js").display().to_string();
    let program = format!(
        "import {{ Failed, Latchwork, Problem, Worker }} from {client:?};\n\
         const server = new Latchwork(\"http://localhost:7420\", {{ token: \"t\" }});\n\
         await server.lock(\"a\", {{ waitMs: 1 }}, async (held) => held.token);\n\
         await server.lock(\"a\", {{ waitMs: \"1\" }}, async () => 1);\n\
         await server.lock(\"a\", {{}}, async (held) => held.nothing);\n\
         throw new Failed(7);\n"
    );
    std::fs::write(&file, program).unwrap();
    let output = compile(&modules, &[file]);
    let lines: Vec<String> = said(&output).lines().map(str::to_string).collect();
    assert_eq!(lines.len(), 3, "{lines:?}");
    for (line, place) in lines.iter().zip(["(4,", "(5,", "(6,"]) {
        assert!(line.contains(place), "{lines:?}");
    }
}

#[test]
fn what_the_types_declare_is_there() {
    let types = std::fs::read_to_string(client().join("latchwork.d.ts")).unwrap();
    let declared = types.lines().filter_map(|line| {
        let rest = line.strip_prefix("export class ").or(line.strip_prefix("export function "))?;
        rest.split([' ', '(', '<']).next()
    });
    let mut declared: Vec<&str> = declared.collect();
    declared.sort_unstable();
    let script = "import * as all from './latchwork.js'; console.log(Object.keys(all).sort().join(' '))";
    let mut node = Command::new("node");
    let output = node.current_dir(client()).args(["--input-type=module", "-e", script]).output().unwrap();
    assert_eq!(said(&output).trim(), declared.join(" "));
}
