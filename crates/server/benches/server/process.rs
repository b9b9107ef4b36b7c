//! The real command: the memory of `latch serve`, and how long `latch` takes to start.

use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tokio::runtime::Runtime;

use crate::report::{Figure, Report, median};
use crate::streams::CLIENTS;
use crate::wire::Connection;

/// The command, which `cargo xtask bench` has built.
fn latch() -> PathBuf {
    let latch = std::env::var_os("LATCHWORK_LATCH").map(PathBuf::from);
    latch.expect("LATCHWORK_LATCH names the command: run `cargo xtask bench server`")
}

/// `latch serve` on a new store.
struct Serving {
    process: Child,
    place: String,
}

impl Serving {
    fn start(store: &std::path::Path) -> Serving {
        let mut command = Command::new(latch());
        command.args(["serve", "--listen", "127.0.0.1:0", "--log-level", "error", "-o", "jsonl", "--store"]).arg(store);
        let mut process = command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().expect("a server");
        let mut line = String::new();
        BufReader::new(process.stdout.take().expect("its output")).read_line(&mut line).expect("a line");
        let started: serde_json::Value = serde_json::from_str(&line).expect("the line of a server");
        let url = started["addresses"][0].as_str().expect("an address");
        let place = url.strip_prefix("http://").expect("without TLS").to_string();
        Serving { process, place }
    }

    /// Its resident memory in bytes.
    fn resident(&self) -> f64 {
        let statm = std::fs::read_to_string(format!("/proc/{}/statm", self.process.id())).expect("it runs");
        let pages: f64 = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok()).expect("a number");
        pages * 4096.0
    }
}

impl Drop for Serving {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// The bounds of [`memory`], in MB and KB.
const IDLE: f64 = 60.0;
const CLIENT: f64 = 32.0;
/// The events that each client gets before memory is measured.
const EVENTS: usize = 10;

/// The memory of a server that has started and does nothing, and what a thousand clients that watch a state add.
pub(crate) fn memory(runtime: &Runtime, report: &Report) {
    if !report.wants("server.memory") {
        return;
    }
    let directory = tempfile::tempdir().expect("a directory");
    let serving = Serving::start(&directory.path().join("data"));
    std::thread::sleep(Duration::from_secs(2));
    let idle = serving.resident();
    report.add(Figure { name: "server.memory", value: idle / 1e6, unit: "MB", floor: IDLE, target: "≤ 1" });
    let with_clients = runtime.block_on(async {
        let mut writer = Connection::open(&serving.place).await;
        let mut streams = Vec::new();
        for _ in 0..CLIENTS {
            let connection = Connection::open(&serving.place).await;
            streams.push(connection.follow("/v1/state/session/s/watch").await);
        }
        for _ in 0..EVENTS {
            writer.ask(200, "POST /v1/state/session/s/increment", "", "{\"path\":\"n\"}").await;
        }
        for stream in &mut streams {
            let mut seen = 0;
            // The first event is the state as it was.
            loop {
                assert!(stream.look(|_| seen += 1), "a stream has ended");
                if seen > EVENTS {
                    break;
                }
                stream.more().await;
            }
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
        serving.resident()
    });
    let value = (with_clients - idle) / CLIENTS as f64 / 1024.0;
    report.add(Figure { name: "server.memory.client", value, unit: "KB", floor: CLIENT, target: "≤ 1" });
}

/// The bound of [`start`], in milliseconds.
const START: f64 = 20.0;

/// The time of `latch --version`, less that of `/bin/true`, which is started in turn with it.
pub(crate) fn start(report: &Report) {
    if !report.wants("cli.start") {
        return;
    }
    let (latch, rounds) = (latch(), if report.quick { 10 } else { 200 });
    let (mut ours, mut nothing) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        nothing.push(run(Command::new("/bin/true")));
        let mut version = Command::new(&latch);
        version.arg("--version");
        ours.push(run(version));
    }
    let (took, nothing) = (median(ours), median(nothing));
    let figure = |name, value, floor, target| Figure { name, value, unit: "ms", floor, target };
    report.add(figure("cli.start", took - nothing, START, "≤ 1"));
    report.add(figure("cli.start.true", took, nothing, "report"));
}

/// Runs a command to its end. Returns the time in milliseconds.
fn run(mut command: Command) -> f64 {
    let begin = Instant::now();
    let status = command.stdin(Stdio::null()).stdout(Stdio::null()).status().expect("a process");
    assert!(status.success());
    begin.elapsed().as_secs_f64() * 1e3
}
