//! The suite `peers`: workflows of this library beside those of other engines, in one run. Installs the other engines,
//! runs each in turn, round after round, and prints a table. `benches/peers`, a workspace of its own, decides what an
//! engine does in its turn. Everything listens on loopback, and lives in a scratch folder that is removed at the end.

use std::fs::File;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};

use crate::server::Server as Postgres;
use crate::{cargo, install, install_postgres, install_unless, root, works};

/// The version of Restate's server; the lock file of `benches/peers` has those of crates.
const RESTATE: &str = "1.7.12";

/// The name of our engine.
const OURS: &str = "latchwork";

/// An engine with settings: its name in the binary, its description, its settings, and the server that it needs.
struct Entrant {
    turn: &'static str,
    engine: &'static str,
    settings: &'static str,
    server: Needs,
}

/// The server that an engine needs. Each turn has a new one.
enum Needs {
    Nothing,
    /// Restate's, with these options.
    Restate(&'static [(&'static str, &'static str)]),
    /// PostgreSQL with its default durability. The engine also takes these arguments.
    Postgres(&'static [&'static str]),
}

const ENTRANTS: [Entrant; 8] = [
    Entrant { turn: "latchwork", engine: OURS, settings: "files", server: Needs::Nothing },
    Entrant { turn: "restate", engine: "Restate", settings: "defaults", server: Needs::Restate(&[]) },
    Entrant {
        turn: "restate",
        engine: "Restate",
        settings: "1 partition",
        server: Needs::Restate(&[("RESTATE_DEFAULT_NUM_PARTITIONS", "1")]),
    },
    Entrant { turn: "duroxide", engine: "duroxide", settings: "full sync", server: Needs::Nothing },
    Entrant { turn: "duroxide-tuned", engine: "duroxide", settings: "full sync, 1 ms poll", server: Needs::Nothing },
    Entrant { turn: "latchwork-postgres", engine: OURS, settings: "PostgreSQL", server: Needs::Postgres(&[]) },
    Entrant { turn: "dbos", engine: "dbos", settings: "10 connections", server: Needs::Postgres(&["10"]) },
    Entrant { turn: "dbos", engine: "dbos", settings: "32 connections", server: Needs::Postgres(&["32"]) },
];

/// A rate per second, and the number of workflows in flight that reached it.
#[derive(Clone, Copy)]
struct Best {
    rate: f64,
    in_flight: u64,
}

/// What an entrant reached: medians over the rounds, and the best of these over the numbers in flight.
struct Row {
    entrant: &'static Entrant,
    version: String,
    step_us: f64,
    workflow_us: f64,
    steps: Best,
    starts: Best,
    /// Workflows that ended without a result, in all rounds.
    lost: u64,
}

/// Runs the suite.
pub(crate) fn bench(json: bool, quick: bool) -> Result<()> {
    let folder = target().join("peers");
    let scratch = Scratch::new(folder.join("run"))?;
    let server = install_restate(&folder)?;
    install_postgres()?;
    let binary = build(&folder)?;
    let rounds = if quick { 1 } else { 3 };
    let mut turns: Vec<Vec<Value>> = ENTRANTS.iter().map(|_| Vec::new()).collect();
    for round in 1..=rounds {
        for (entrant, turns) in ENTRANTS.iter().zip(&mut turns) {
            eprintln!("── round {round} of {rounds}: {}, {}", entrant.engine, entrant.settings);
            turns.push(turn(entrant, &scratch, &binary, &server, quick)?);
        }
    }
    let lock = std::fs::read_to_string(root().join("benches/peers/Cargo.lock")).context("benches/peers/Cargo.lock")?;
    let rows = ENTRANTS.iter().zip(&turns).map(|(entrant, turns)| row(entrant, turns, &lock));
    let rows: Vec<Row> = rows.collect::<Result<_>>()?;
    if json {
        print_json(&rows)
    } else {
        print_table(&rows, quick)
    }
    Ok(())
}

/// The folder that cargo builds into.
fn target() -> PathBuf {
    root().join(std::env::var_os("CARGO_TARGET_DIR").unwrap_or("target".into()))
}

/// Downloads the server, and returns its path.
fn install_restate(folder: &Path) -> Result<PathBuf> {
    install("npm", "npm")?;
    let place = folder.join(format!("restate-{RESTATE}"));
    std::fs::create_dir_all(&place).with_context(|| place.display().to_string())?;
    let platform = match (std::env::consts::OS, std::env::consts::ARCH) {
        ("linux", "x86_64") => "linux-x64",
        ("linux", "aarch64") => "linux-arm64",
        ("macos", "x86_64") => "darwin-x64",
        ("macos", "aarch64") => "darwin-arm64",
        (os, arch) => bail!("there is no Restate server for {os} on {arch}"),
    };
    let server = place.join(format!("node_modules/@restatedev/restate-server-{platform}/bin/restate-server"));
    if !works(Command::new(&server).arg("--version")) {
        eprintln!("── installing Restate {RESTATE}");
        let mut npm = Command::new("npm");
        npm.args(["install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix"]).arg(&place);
        npm.arg(format!("@restatedev/restate-server@{RESTATE}")).current_dir(&place).stdout(Stdio::null());
        if !npm.status().context("npm cannot be started")?.success() || !works(Command::new(&server).arg("--version")) {
            bail!("Restate's server cannot be installed: {npm:?}");
        }
    }
    Ok(server)
}

/// Builds the binary that runs the engines, and returns its path.
fn build(folder: &Path) -> Result<PathBuf> {
    install("cc", "gcc")?;
    install("pkg-config", "pkg-config")?;
    let openssl = || works(Command::new("pkg-config").args(["--exists", "openssl"]));
    install_unless(openssl, "the headers of OpenSSL", "libssl-dev")?;
    let manifest = root().join("benches/peers/Cargo.toml");
    let mut command = cargo(&["build", "--release", "--locked", "--manifest-path"]);
    command.arg(manifest).arg("--target-dir").arg(folder.join("build"));
    if !command.status().context("cargo build cannot be started")?.success() {
        bail!("benches/peers cannot be built");
    }
    Ok(folder.join("build/release/peers"))
}

/// One turn of one entrant, on new data.
fn turn(entrant: &Entrant, scratch: &Scratch, binary: &Path, server: &Path, quick: bool) -> Result<Value> {
    let data = scratch.empty()?;
    let mut command = Command::new(binary);
    command.arg(entrant.turn).arg(&data).stdin(Stdio::null()).env("RUST_BACKTRACE", "0");
    let log = scratch.0.join("log");
    command.stderr(File::create(&log)?);
    let (mut restate, mut postgres) = (None, None);
    match entrant.server {
        Needs::Nothing => {}
        Needs::Restate(settings) => {
            let server = restate.insert(Server::start(server, &scratch.0, settings)?);
            command.args([&server.ingress, &server.admin]);
        }
        Needs::Postgres(arguments) => {
            command.arg(postgres.insert(Postgres::start_own()).home()).args(arguments);
        }
    }
    if quick {
        command.arg("--quick");
    }
    let output = command.output().with_context(|| format!("{} cannot be started", binary.display()))?;
    drop((restate, postgres));
    if !output.status.success() {
        let said = std::fs::read_to_string(&log).unwrap_or_default();
        let server = std::fs::read_to_string(scratch.0.join("server.log")).unwrap_or_default();
        bail!("{}, {}, has failed:\n{}\n{}", entrant.engine, entrant.settings, tail(&said), tail(&server));
    }
    // Engines may write lines of their own before.
    let said = String::from_utf8_lossy(&output.stdout);
    let figures = said.lines().rev().find(|line| line.starts_with('{')).context("a turn gave no figures")?;
    serde_json::from_str(figures).context("a turn's figures")
}

fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(10)..].join("\n")
}

/// A folder that is removed when this is dropped.
struct Scratch(PathBuf);

impl Scratch {
    fn new(path: PathBuf) -> Result<Scratch> {
        let scratch = Scratch(path);
        scratch.empty()?;
        Ok(scratch)
    }

    /// Removes everything in it, and returns a folder for data.
    fn empty(&self) -> Result<PathBuf> {
        if self.0.exists() {
            std::fs::remove_dir_all(&self.0).with_context(|| self.0.display().to_string())?;
        }
        let data = self.0.join("data");
        std::fs::create_dir_all(&data).with_context(|| data.display().to_string())?;
        Ok(data)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// A Restate server of our own, which is stopped when this is dropped.
struct Server {
    child: Child,
    ingress: String,
    admin: String,
}

impl Server {
    fn start(binary: &Path, folder: &Path, settings: &[(&str, &str)]) -> Result<Server> {
        // All ports are held at once, so that they differ.
        let free = [(); 3].map(|()| TcpListener::bind("127.0.0.1:0"));
        let ports: Vec<u16> =
            free.into_iter().map(|listener| Ok(listener?.local_addr()?.port())).collect::<Result<_>>()?;
        let [node, ingress, admin] = ports[..] else { bail!("three ports are needed") };
        let log = File::create(folder.join("server.log"))?;
        let mut command = Command::new(binary);
        command
            .args(["--no-logo", "--base-dir"])
            .arg(folder.join("server"))
            .current_dir(folder)
            .env("RESTATE_BIND_IP", "127.0.0.1")
            .env("RESTATE_LISTEN_MODE", "tcp")
            .env("RESTATE_BIND_PORT", node.to_string())
            .env("RESTATE_INGRESS__BIND_PORT", ingress.to_string())
            .env("RESTATE_ADMIN__BIND_PORT", admin.to_string())
            .env("RESTATE_DISABLE_TELEMETRY", "true")
            .envs(settings.iter().copied())
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log);
        let child = command.spawn().with_context(|| format!("{} cannot be started", binary.display()))?;
        let address = |port: u16| format!("http://127.0.0.1:{port}");
        Ok(Server { child, ingress: address(ingress), admin: address(admin) })
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn row(entrant: &'static Entrant, turns: &[Value], lock: &str) -> Result<Row> {
    let version = match entrant.engine {
        OURS => env!("CARGO_PKG_VERSION").to_string(),
        "Restate" => format!("{RESTATE}, SDK {}", locked(lock, "restate-sdk")?),
        _ => locked(lock, entrant.engine)?,
    };
    let one = |name: &str| median(turns.iter().filter_map(|turn| turn[name].as_f64()).collect());
    Ok(Row {
        entrant,
        version,
        step_us: one("step_us"),
        workflow_us: one("workflow_us"),
        steps: best(turns, "steps").context("a turn gave no rate of steps")?,
        starts: best(turns, "starts").context("a turn gave no rate of starts")?,
        lost: turns.iter().filter_map(|turn| turn["lost"].as_u64()).sum(),
    })
}

/// The version of a crate in a lock file.
fn locked(lock: &str, name: &str) -> Result<String> {
    let begin = format!("name = \"{name}\"\nversion = \"");
    let version = lock.split_once(&begin).and_then(|(_, rest)| rest.split('"').next());
    Ok(version.with_context(|| format!("{name} is not locked"))?.to_string())
}

/// The best number in flight by the medians of all turns.
fn best(turns: &[Value], name: &str) -> Option<Best> {
    let points = turns.first()?[name].as_array()?.len();
    let medians = (0..points).filter_map(|point| {
        let rate = median(turns.iter().filter_map(|turn| turn[name][point][1].as_f64()).collect());
        Some(Best { rate, in_flight: turns[0][name][point][0].as_u64()? })
    });
    medians.max_by(|a, b| a.rate.total_cmp(&b.rate))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// Ours against the best of the others, and in PostgreSQL against the others there: name, value, the other's value,
/// unit, and the target.
fn ratios(rows: &[Row]) -> Vec<(&'static str, f64, f64, &'static str, &'static str)> {
    let is_ours = |row: &&Row| row.entrant.engine == OURS;
    let in_postgres = |row: &&Row| matches!(row.entrant.server, Needs::Postgres(_));
    let peers: Vec<&Row> = rows.iter().filter(|row| !is_ours(row)).collect();
    let Some(ours) = rows.iter().find(is_ours) else { return Vec::new() };
    let Some(ours_there) = rows.iter().filter(is_ours).find(in_postgres) else { return Vec::new() };
    let least = |value: fn(&Row) -> f64| peers.iter().map(|row| value(row)).fold(f64::INFINITY, f64::min);
    let most = |value: fn(&Row) -> f64| peers.iter().map(|row| value(row)).fold(0.0, f64::max);
    let most_there = peers.iter().copied().filter(in_postgres).map(|row| row.steps.rate).fold(0.0, f64::max);
    vec![
        ("peers.latency.step", ours.step_us, least(|row| row.step_us), "µs", "≤ 0.33"),
        ("peers.latency.workflow", ours.workflow_us, least(|row| row.workflow_us), "µs", "≤ 0.33"),
        ("peers.steps", ours.steps.rate, most(|row| row.steps.rate), "steps/s", "≥ 10"),
        ("peers.starts", ours.starts.rate, most(|row| row.starts.rate), "workflows/s", "≥ 6"),
        ("postgres.steps", ours_there.steps.rate, most_there, "steps/s", "≥ 5"),
    ]
}

fn print_table(rows: &[Row], quick: bool) {
    println!(
        "{:<10} {:<20} {:<21} {:>12} {:>12} {:>14} {:>14} {:>5}",
        "engine", "version", "settings", "step to step", "workflow/10", "steps/s", "one-step/s", "lost"
    );
    for Row { entrant, version, step_us, workflow_us, steps, starts, lost } in rows {
        let [steps, starts] = [steps, starts].map(|best| format!("{:.0} ({})", best.rate, best.in_flight));
        let (engine, settings) = (entrant.engine, entrant.settings);
        print!("{engine:<10} {version:<20} {settings:<21} {step_us:>9.0} µs {workflow_us:>9.0} µs ");
        println!("{steps:>14} {starts:>14} {lost:>5}");
    }
    println!("\n{:<28} {:>14} {:>14} {:>8}  to reach", "name", "value", "best peer", "ratio");
    for (name, value, peer, unit, target) in ratios(rows) {
        println!("{name:<28} {value:>14.1} {peer:>14.1} {:>8.2}  {target} ({unit})", value / peer);
    }
    if quick {
        println!("quick run: these are no figures to quote");
    }
}

fn print_json(rows: &[Row]) {
    for Row { entrant, version, step_us, workflow_us, steps, starts, lost } in rows {
        let line = json!({
            "engine": entrant.engine, "version": version, "settings": entrant.settings,
            "step_us": step_us, "workflow_us": workflow_us,
            "steps": steps.rate, "steps_in_flight": steps.in_flight,
            "starts": starts.rate, "starts_in_flight": starts.in_flight, "lost": lost,
        });
        println!("{line}");
    }
    for (name, value, peer, unit, _) in ratios(rows) {
        println!("{}", json!({"name": name, "value": value, "unit": unit, "floor": peer, "ratio": value / peer}));
    }
}
