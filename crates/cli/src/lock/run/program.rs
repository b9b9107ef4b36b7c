//! Finds the program of a command before a lock is acquired, and says clearly why it cannot be run.

use std::ffi::{OsStr, OsString};
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::unistd::{AccessFlags, access};

use crate::output::{Exit, Problem, plain};

/// Where programs are if `PATH` is not set, as for `execvp`.
const PATH: &str = "/bin:/usr/bin";

/// Checks that there is such a program, and that this user may execute it.
pub(crate) fn find(command: &OsStr) -> Result<(), Problem> {
    find_in(command, &std::env::var_os("PATH").unwrap_or_else(|| PATH.into()))
}

fn find_in(command: &OsStr, path: &OsStr) -> Result<(), Problem> {
    if command.as_bytes().contains(&b'/') {
        return executable(Path::new(command)).map_err(|why| refused(command, why));
    }
    if command.is_empty() {
        return Err(missing(command, "its name is empty"));
    }
    let mut found: Option<(PathBuf, &str)> = None;
    for folder in std::env::split_paths(path) {
        let file = folder.join(command);
        match executable(&file) {
            Ok(()) => return Ok(()),
            Err(None) => {}
            Err(Some(why)) => found = found.or(Some((file, why))),
        }
    }
    match found {
        Some((file, why)) => Err(refused(file.as_os_str(), Some(why))),
        None => Err(missing(command, "no folder of PATH has it")),
    }
}

/// `Err(None)` if there is no such file.
fn executable(file: &Path) -> Result<(), Option<&'static str>> {
    match std::fs::metadata(file) {
        Err(error) if error.kind() == ErrorKind::PermissionDenied => Err(Some("you may not look there")),
        Err(_) => Err(None),
        Ok(found) if found.is_dir() => Err(Some("it is a directory")),
        Ok(_) if access(file, AccessFlags::X_OK).is_err() => Err(Some("you may not execute it")),
        Ok(_) => Ok(()),
    }
}

fn refused(command: &OsStr, why: Option<&str>) -> Problem {
    match why {
        Some(why) => problem(Exit::NotExecutable, command, why),
        None => missing(command, "there is no such file"),
    }
}

fn missing(command: &OsStr, why: &str) -> Problem {
    problem(Exit::NoCommand, command, why)
}

fn problem(exit: Exit, command: &OsStr, why: &str) -> Problem {
    let command = command.to_string_lossy();
    Problem::new(exit, format!("cannot run {:?}: {why}", plain(&command))).with("command", command.as_ref())
}

/// The program with its arguments.
pub(crate) fn command(words: &[OsString]) -> Command {
    let mut command = Command::new(&words[0]);
    command.args(&words[1..]);
    command
}

/// Why the system did not start a program that was found.
pub(crate) fn not_started(command: &OsStr, error: &std::io::Error) -> Problem {
    match error.kind() {
        // The file is there: its interpreter is not.
        ErrorKind::NotFound if find(command).is_ok() => {
            problem(Exit::NotExecutable, command, "the interpreter that its first line names does not exist")
        }
        ErrorKind::NotFound => missing(command, "it does not exist any more"),
        ErrorKind::PermissionDenied => problem(Exit::NotExecutable, command, "you may not execute it"),
        _ => problem(Exit::NotExecutable, command, &error.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_program_is_found_or_it_is_said_why_not() {
        let directory = tempfile::tempdir().unwrap();
        let folder = directory.path();
        for (name, mode) in [("runs", 0o755), ("text", 0o644)] {
            std::fs::write(folder.join(name), "#!/bin/sh\n").unwrap();
            std::fs::set_permissions(folder.join(name), std::fs::Permissions::from_mode(mode)).unwrap();
        }
        let path = std::env::join_paths([Path::new("/nowhere"), folder]).unwrap();
        let check = |command: &str| {
            let found = find_in(OsStr::new(command), &path);
            found.map_err(|problem| (problem.exit, problem.message))
        };
        let absolute = |name: &str| folder.join(name).display().to_string();
        assert_eq!(check("runs"), Ok(()));
        assert_eq!(check(&absolute("runs")), Ok(()));
        for (command, exit, says) in [
            ("nothing".to_string(), Exit::NoCommand, "cannot run \"nothing\": no folder of PATH has it"),
            (String::new(), Exit::NoCommand, "its name is empty"),
            (absolute("nothing"), Exit::NoCommand, "there is no such file"),
            (absolute("text"), Exit::NotExecutable, "you may not execute it"),
            ("text".into(), Exit::NotExecutable, "you may not execute it"),
            (format!("{}/", folder.display()), Exit::NotExecutable, "it is a directory"),
        ] {
            let (given, message) = check(&command).unwrap_err();
            assert_eq!((given, message.contains(says)), (exit, true), "{command}: {message}");
        }
    }
}
