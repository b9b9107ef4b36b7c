//! A server that is run as a process, and plain requests to it.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use serde_json::Value;

/// `latch serve` on a free port. It is killed when this is dropped.
pub(crate) struct Serving {
    pub(crate) process: Child,
    /// `http://127.0.0.1:PORT`.
    pub(crate) url: String,
    pub(crate) started: Value,
}

impl Serving {
    /// Starts a server, and waits until it listens.
    pub(crate) fn start(arguments: &[&str]) -> Serving {
        Serving::start_with(arguments, |_| {})
    }

    pub(crate) fn start_with(arguments: &[&str], change: impl FnOnce(&mut Command)) -> Serving {
        let mut command = command();
        command.arg("serve").args(arguments).args(["-o", "jsonl"]);
        if !arguments.contains(&"--log-level") {
            command.args(["--log-level", "error"]);
        }
        if !arguments.contains(&"--listen") {
            command.args(["--listen", "127.0.0.1:0"]);
        }
        change(&mut command);
        let mut process = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let started: Value = serde_json::from_str(&line).unwrap_or_else(|error| panic!("{error}: {line:?}"));
        let url = started["addresses"][0].as_str().unwrap_or_default().to_string();
        Serving { process, url, started }
    }

    pub(crate) fn on(store: &Path) -> Serving {
        Serving::start(&["--store", store.to_str().unwrap()])
    }

    pub(crate) fn signal(&self, signal: &str) {
        crate::signal(self.process.id(), signal);
    }

    /// Asks the server to end, and returns its exit code.
    pub(crate) fn end(self) -> Option<i32> {
        self.signal("TERM");
        self.end_of_signalled()
    }

    /// The exit code of a server that was asked to end.
    pub(crate) fn end_of_signalled(mut self) -> Option<i32> {
        self.process.wait().unwrap().code()
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The command, without what the environment of the tests says.
pub(crate) fn command() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_latch"));
    for (name, _) in std::env::vars_os() {
        if ["LATCH_", "OTEL_"].iter().any(|start| name.to_string_lossy().starts_with(start)) {
            command.env_remove(name);
        }
    }
    command
}

/// Sends a request without a body. Returns the status and the body.
pub(crate) fn get(url: &str, path: &str, headers: &str) -> (u16, String) {
    let place = url.strip_prefix("http://").unwrap();
    let mut stream = TcpStream::connect(place).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {place}\r\nConnection: close\r\n{headers}\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_else(|| panic!("{answer:?}"));
    (head[9..12].parse().unwrap(), body.to_string())
}
