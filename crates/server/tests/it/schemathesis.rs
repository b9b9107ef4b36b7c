//! Schemathesis, which makes requests from an OpenAPI document, in a virtual environment of Python. A test that is run
//! by itself installs it; `cargo xtask test` installs it for the whole suite, or says that it cannot.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Names the program that is to be used, or is `off`.
pub(crate) const VARIABLE: &str = "LATCHWORK_SCHEMATHESIS";
/// Other versions make other requests.
const VERSION: &str = "4.32.5";

/// The program. It is installed below this folder if it is missing. `None` if it is off.
pub(crate) fn program(folder: &Path) -> Result<Option<PathBuf>, String> {
    match std::env::var_os(VARIABLE) {
        Some(off) if off == "off" => Ok(None),
        Some(program) => Ok(Some(program.into())),
        None => install(folder).map(Some),
    }
}

/// Installs the program into a virtual environment, unless it is there.
pub(crate) fn install(folder: &Path) -> Result<PathBuf, String> {
    let home = folder.join(format!("schemathesis-{VERSION}"));
    let program = home.join("bin/schemathesis");
    if run(Command::new(&program).arg("--version")).is_ok() {
        return Ok(program);
    }
    run(Command::new("python3").args(["-m", "venv", "--clear"]).arg(&home))?;
    let package = format!("schemathesis=={VERSION}");
    let pip = ["install", "--quiet", "--disable-pip-version-check", &package];
    run(Command::new(home.join("bin/pip")).args(pip))?;
    Ok(program)
}

fn run(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|error| format!("{command:?}: {error}"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(format!("{command:?}: {}", String::from_utf8_lossy(&output.stderr).trim())),
    }
}
