//! Every developer command: `cargo xtask test` runs all tests, and the other commands are parts and campaigns of it.

// Developer tools measure the machine's own time.
#![allow(clippy::disallowed_methods)]

mod peers;
#[path = "../../crates/server/tests/it/schemathesis.rs"]
#[allow(dead_code)]
mod schemathesis;
#[path = "../../crates/store/tests/it/server.rs"]
#[allow(dead_code)]
mod server;
mod tidy;
mod words;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::{Parser, Subcommand};

#[derive(Parser)]
struct Xtask {
    #[command(subcommand)]
    command: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Installs what tests need, checks style and runs every test.
    Test,
    /// Runs a suite of benchmarks and prints its figures.
    Bench {
        /// The suite: store, postgres, entities, state, workflows, messages, locks, claims, admission, flows, nodes,
        /// server, or peers, which installs other engines and runs them beside this one.
        suite: String,
        /// One JSON object per line instead of a table.
        #[arg(long)]
        json: bool,
        /// Short runs to try the suite; not for figures.
        #[arg(long)]
        quick: bool,
        /// Only figures whose names start with this.
        only: Vec<String>,
    },
    /// Runs the crash tests for longer than `test` does.
    Crash {
        /// Crash images of the simulated disk to open.
        #[arg(long)]
        images: Option<u64>,
        /// Times to kill a process under load.
        #[arg(long)]
        kill: Option<u64>,
        /// The seed of the random numbers.
        #[arg(long)]
        seed: Option<u64>,
    },
    /// Runs the comparison with the reference model for longer than `test` does.
    Model {
        /// Random command sequences.
        #[arg(long, default_value_t = 200_000)]
        cases: u64,
        /// Concurrent histories.
        #[arg(long, default_value_t = 10_000)]
        histories: u64,
    },
    /// Runs the tests of stores in PostgreSQL for longer than `test` does. Without an option, it says which there are.
    Postgres {
        /// Connections to cut: before something is sent, in the middle, after it, before its answer, in the answer.
        #[arg(long)]
        faults: Option<u64>,
        /// Times to kill the server under load.
        #[arg(long)]
        kills: Option<u64>,
        /// Commits of 32 writers in four processes, beside a watch.
        #[arg(long)]
        commits: Option<u64>,
        /// Random command sequences to compare with the reference model.
        #[arg(long)]
        cases: Option<u64>,
        /// Concurrent histories.
        #[arg(long)]
        histories: Option<u64>,
        /// The seed of the random numbers.
        #[arg(long)]
        seed: Option<u64>,
    },
    /// Runs the tests of the server under load for longer than `test` does. Without an option, it says which there are.
    Server {
        /// Times to kill a server whose clients repeat their calls under an Idempotency-Key.
        #[arg(long)]
        kills: Option<u64>,
        /// Seconds in which 1,000 clients watch what 256 write.
        #[arg(long)]
        load: Option<u64>,
    },
    /// Sends random requests, made from the OpenAPI document, with schemathesis, and installs it if it is missing.
    FuzzApi {
        /// Requests.
        #[arg(long, default_value_t = 10_000)]
        cases: u64,
        /// The seed of the random numbers.
        #[arg(long)]
        seed: Option<u64>,
    },
    /// Simulates whole workflow engines under faults, for longer than `test` does.
    Sim {
        /// How many seeds, from 1 on: 10000 by default.
        #[arg(long)]
        seeds: Option<u64>,
        /// Runs this seed alone and prints its trace.
        #[arg(long, conflicts_with_all = ["seeds", "grants"])]
        seed: Option<u64>,
        /// Grants of one semaphore to callers that all want it at once, in the order of their requests.
        #[arg(long)]
        grants: Option<u64>,
    },
    /// Checks the style rules that no other tool checks, and the order of the layers.
    Tidy {
        /// Counts words that hide the subject of a sentence, file by file, and fails if there are any.
        #[arg(long)]
        words: bool,
    },
    /// Checks licences, sources and duplicates of dependencies with cargo-deny, and installs it if it is missing.
    Deny,
}

fn main() -> ExitCode {
    match work(Xtask::parse().command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error:#}");
            ExitCode::FAILURE
        }
    }
}

fn work(task: Task) -> Result<()> {
    match task {
        Task::Test => test(),
        Task::Bench { suite, json, quick, only } => bench(&suite, json, quick, only),
        Task::Crash { images, kill, seed } => crash(images, kill, seed),
        Task::Model { cases, histories } => {
            let parts = [
                (STORE, "model::", "LATCHWORK_CASES", cases),
                (STORE, "histories::", "LATCHWORK_HISTORIES", histories),
                (LIBRARY, "::model::", "LATCHWORK_CASES", cases),
            ];
            campaign(&parts, None)
        }
        Task::Postgres { faults, kills, commits, cases, histories, seed } => {
            let parts = [
                ("postgres::no_commit_is_lost_or_doubled_when_connections", "LATCHWORK_FAULTS", faults),
                ("postgres::no_commit_is_lost_or_doubled_when_the_server", "LATCHWORK_KILLS", kills),
                ("processes::a_watch", "LATCHWORK_COMMITS", commits),
                ("model::postgres", "LATCHWORK_POSTGRES_CASES", cases),
                // One of 200 histories is on PostgreSQL.
                ("saw_of_postgres", "LATCHWORK_HISTORIES", histories.map(|histories| histories.saturating_mul(200))),
            ];
            let asked = |(filter, variable, count): (_, _, Option<u64>)| Some((STORE, filter, variable, count?));
            let parts: Vec<_> = parts.into_iter().filter_map(asked).collect();
            if parts.is_empty() {
                bail!("say how much: --faults N, --kills N, --commits N, --cases N, --histories N or several of them");
            }
            campaign(&parts, seed)
        }
        Task::Server { kills, load } => {
            let parts = [
                (SERVER, "kill::", "LATCHWORK_KILLS", kills),
                (COMMAND, "endure::nothing_is_lost", "LATCHWORK_KILLS", kills),
                (COMMAND, "load::", "LATCHWORK_LOAD_SECONDS", load),
            ];
            let asked =
                |(package, filter, variable, count): (_, _, _, Option<u64>)| Some((package, filter, variable, count?));
            let parts: Vec<_> = parts.into_iter().filter_map(asked).collect();
            if parts.is_empty() {
                bail!("say how much: --kills N, --load SECONDS or both");
            }
            campaign(&parts, None)
        }
        Task::FuzzApi { cases, seed } => campaign(&[(SERVER, "fuzz::", "LATCHWORK_API_CASES", cases)], seed),
        Task::Sim { seeds, seed, grants } => sim(seeds, seed, grants),
        Task::Tidy { words } => {
            tidy::check(&root()).and(if words || words::IS_ON { words::check(&root()) } else { Ok(()) })
        }
        Task::Deny => deny(),
    }
}

/// The workspace that this was started in. It is read at run time: clones that share a target folder share this
/// program.
fn root() -> PathBuf {
    let package = std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_else(|| env!("CARGO_MANIFEST_DIR").into());
    Path::new(&package).parent().map(Path::to_path_buf).unwrap_or_default()
}

fn cargo(arguments: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or("cargo".into()));
    command.args(arguments).current_dir(root());
    command
}

fn run(title: &str, mut command: Command) -> Result<()> {
    println!("── {title}");
    let begin = Instant::now();
    let status = command.status().with_context(|| format!("{title}: {command:?} cannot be started"))?;
    if !status.success() {
        bail!("{title} failed: {command:?}");
    }
    println!("── {title}: {:.0} s", begin.elapsed().as_secs_f64());
    Ok(())
}

fn works(command: &mut Command) -> bool {
    command.stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok_and(|status| status.success())
}

fn test() -> Result<()> {
    install("cc", "gcc")?;
    install_postgres()?;
    // The examples of the clients run as tests.
    install("python3", "python3")?;
    install("node", "nodejs")?;
    // Style errors should not hide test failures.
    let tidy = tidy::check(&root());
    let words = if words::IS_ON { words::check(&root()) } else { Ok(()) };
    if works(&mut cargo(&["fmt", "--version"])) {
        run("format", cargo(&["fmt", "--all", "--check"]))?;
    } else {
        println!("── format: skipped, rustfmt is not installed (rustup component add rustfmt)");
    }
    // Clippy checks examples and benchmarks: building all of them would take minutes, and no test runs them.
    if works(&mut cargo(&["clippy", "--version"])) {
        let lints = ["clippy", "--quiet", "--workspace", "--all-targets", "--all-features", "--", "-D", "warnings"];
        run("lints", cargo(&lints))?;
    } else {
        println!("── lints: skipped, clippy is not installed (rustup component add clippy)");
        run("check", cargo(&["check", "--quiet", "--workspace", "--all-targets", "--all-features"]))?;
    }
    let peers = ["update", "--workspace", "--locked", "--manifest-path", "benches/peers/Cargo.toml"];
    if !cargo(&peers).stderr(Stdio::null()).status().is_ok_and(|status| status.success()) {
        bail!(
            "benches/peers/Cargo.lock is stale; run: cargo update --workspace --manifest-path benches/peers/Cargo.toml"
        );
    }
    // One server for all tests: each has schemas of its own.
    let server = server::Server::start();
    let mut tests = cargo(&["test", "--workspace", "--all-features", "--lib", "--bins", "--tests"]);
    tests.env(server::VARIABLE, &server.url);
    tests.env(schemathesis::VARIABLE, schemathesis());
    run("tests", tests)?;
    drop(server);
    run("examples in documents", cargo(&["test", "--workspace", "--all-features", "--doc"]))?;
    tidy.and(words)
}

fn install_postgres() -> Result<()> {
    install_unless(|| server::binary("postgres").is_absolute(), "PostgreSQL", "postgresql")
}

/// The tester of the API, installed if that is possible. Without a way to the package index of Python, random requests
/// are left out.
fn schemathesis() -> std::ffi::OsString {
    let python = ["-c", "import ensurepip, venv"];
    let _ = install_unless(|| works(Command::new("python3").args(python)), "Python with venv", "python3-venv");
    let folder = std::env::var_os("CARGO_TARGET_DIR").map_or_else(|| root().join("target"), PathBuf::from).join("tmp");
    match schemathesis::program(&folder) {
        Ok(Some(program)) => program.into(),
        Ok(None) => "off".into(),
        Err(error) => {
            println!("── random requests to the API: skipped, schemathesis cannot be installed: {error}");
            "off".into()
        }
    }
}

/// Makes sure that `program` is installed, by Debian's `package` if this process may install it.
fn install(program: &str, package: &str) -> Result<()> {
    install_unless(|| works(Command::new(program).arg("--version")), program, package)
}

fn install_unless(there: impl Fn() -> bool, what: &str, package: &str) -> Result<()> {
    if there() {
        return Ok(());
    }
    let apt = |arguments: &[&str]| {
        let mut command = Command::new("apt-get");
        command.args(arguments).env("DEBIAN_FRONTEND", "noninteractive");
        command
    };
    let installed = works(&mut apt(&["update"])) && works(&mut apt(&["install", "-y", package]));
    if !installed {
        bail!("{what} is missing; install it with: apt-get install {package}");
    }
    Ok(())
}

fn bench(suite: &str, json: bool, quick: bool, only: Vec<String>) -> Result<()> {
    let package = match suite {
        "store" => "latchwork-store",
        "postgres" => return bench_postgres(json, quick, &only),
        "admission" | "claims" | "entities" | "flows" | "locks" | "messages" | "nodes" | "state" | "workflows" => {
            "latchwork"
        }
        "server" => "latchwork-server",
        "peers" if !only.is_empty() => bail!("the suite peers runs as a whole"),
        "peers" => return peers::bench(json, quick),
        other => {
            let suites = "store, postgres, entities, state, workflows, messages, locks, claims, admission, flows, \
                          nodes, server, peers";
            bail!("there is no suite {other}; there are: {suites}")
        }
    };
    bench_of(package, suite, json, quick, &only)
}

/// The figures of the suite `postgres` that need an engine. The others are the store's own.
const OF_ENGINES: [&str; 4] = ["postgres.steps", "postgres.sql_step", "postgres.claim", "postgres.idle"];

/// Runs the store's part and the engine's part, or only the part with the wanted figures.
fn bench_postgres(json: bool, quick: bool, only: &[String]) -> Result<()> {
    let of_engine = |name: &String| OF_ENGINES.iter().any(|figure| figure.starts_with(name.as_str()));
    let of_store = |name: &String| !OF_ENGINES.iter().any(|figure| name.starts_with(figure));
    if only.is_empty() || only.iter().any(of_store) {
        bench_of("latchwork-store", "postgres", json, quick, only)?;
    }
    if only.is_empty() || only.iter().any(of_engine) {
        bench_of("latchwork", "postgres", json, quick, only)?;
    }
    Ok(())
}

fn bench_of(package: &str, suite: &str, json: bool, quick: bool, only: &[String]) -> Result<()> {
    let mut command = cargo(&["bench", "--quiet", "--package", package, "--bench", suite]);
    // The same features for every suite of a package, so that all of them are built once.
    for (of, features) in [("latchwork-store", "postgres"), ("latchwork", "flow,postgres")] {
        if of == package {
            command.args(["--features", features]);
        }
    }
    if suite == "server" {
        command.env("LATCHWORK_LATCH", latch()?);
    }
    command.arg("--").args(only);
    if json {
        command.arg("--json");
    }
    if quick {
        command.arg("--quick");
    }
    let status = command.status().context("cargo bench cannot be started")?;
    if status.success() { Ok(()) } else { bail!("the suite {suite} failed") }
}

/// Builds the command as users have it. Returns where it is.
fn latch() -> Result<PathBuf> {
    let build = ["build", "--release", "--package", "latch", "--message-format", "json-render-diagnostics"];
    let output = cargo(&build).stderr(Stdio::inherit()).output().context("cargo build cannot be started")?;
    let built = output.stdout.split(|byte| *byte == b'\n').find_map(|line| {
        let message: serde_json::Value = serde_json::from_slice(line).ok()?;
        message["executable"].as_str().map(PathBuf::from)
    });
    match built {
        Some(latch) if output.status.success() => Ok(latch),
        _ => bail!("the command latch was not built"),
    }
}

fn crash(images: Option<u64>, kill: Option<u64>, seed: Option<u64>) -> Result<()> {
    if images.is_none() && kill.is_none() {
        bail!("say how much: --images N, --kill N or both");
    }
    if let Some(seed) = seed {
        println!("── seed {seed}");
    }
    let images = images.into_iter().flat_map(|images| {
        [(STORE, "power_loss::", "LATCHWORK_IMAGES", images), (LIBRARY, "::crash::", "LATCHWORK_IMAGES", images)]
    });
    let kills = kill.into_iter().flat_map(|kills| {
        [(STORE, "kill::", "LATCHWORK_KILLS", kills), (LIBRARY, "::kill::", "LATCHWORK_KILLS", kills)]
    });
    campaign(&images.chain(kills).collect::<Vec<_>>(), seed)
}

fn sim(seeds: Option<u64>, seed: Option<u64>, grants: Option<u64>) -> Result<()> {
    let seeds = seeds.or(grants.is_none().then_some(10_000));
    let seeds = seeds.into_iter().flat_map(|seeds| SIMULATIONS.map(|part| (LIBRARY, part, "LATCHWORK_SEEDS", seeds)));
    let grants = grants.map(|grants| (LIBRARY, "lock::grants::", "LATCHWORK_GRANTS", grants));
    campaign(&seeds.chain(grants).collect::<Vec<_>>(), seed)
}

/// The packages that have campaigns. The integration tests of the library are a package of their own.
const STORE: &str = "latchwork-store";
const LIBRARY: &str = "latchwork-tests";
const SERVER: &str = "latchwork-server";
const COMMAND: &str = "latch";

/// The tests that take a seed, and print what happens.
const SIMULATIONS: [&str; 7] = [
    "workflow::simulation::engines_keep_their_promises",
    "workflow::talk::conversations_hold_under_any_faults",
    "lock::simulation::locks_keep_their_promises_under_any_faults",
    "claim::simulation::claims_keep_their_promises_under_any_faults",
    "workflow::admission::simulation::limits_keep_their_promises_under_any_faults",
    "workflow::schedules::simulation::schedules_keep_their_promises_under_any_faults",
    "node::simulation::nodes_lose_and_double_nothing_whatever_happens_to_them",
];

/// Runs tests of packages with a larger number in the environment.
fn campaign(parts: &[(&str, &str, &str, u64)], seed: Option<u64>) -> Result<()> {
    for (package, filter, variable, count) in parts {
        let test = ["test", "--release", "--package", package, "--test", "it", filter, "--", "--nocapture"];
        let mut command = cargo(&test);
        command.env(variable, count.to_string());
        if let Some(seed) = seed {
            command.env("LATCHWORK_SEED", seed.to_string());
        }
        run(&format!("{package} {filter} {count}"), command)?;
    }
    Ok(())
}

fn deny() -> Result<()> {
    if !works(&mut cargo(&["deny", "--version"])) {
        run("install cargo-deny", cargo(&["install", "--locked", "cargo-deny"]))?;
    }
    run("dependencies", cargo(&["deny", "check", "bans", "licenses", "sources"]))
}
