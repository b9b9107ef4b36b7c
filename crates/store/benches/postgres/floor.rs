//! pgbench on the same server: a row is inserted, or read by its key, with statements that are prepared.

use std::process::Command;

use crate::server::binary;
use crate::{Bench, VALUE_BYTES};

/// How many rows the table has that is read.
pub(crate) const ROWS: usize = 100_000;

/// What pgbench says of a run.
pub(crate) struct Run {
    pub(crate) latency_us: f64,
    pub(crate) rate: f64,
}

/// Makes the tables of the floor.
pub(crate) fn prepare(bench: &Bench) {
    let value = "x".repeat(VALUE_BYTES);
    let tables = format!(
        "CREATE TABLE inserted (id bigint PRIMARY KEY, value text);
         CREATE TABLE kept (id bigint PRIMARY KEY, value text);
         INSERT INTO kept SELECT id, '{value}' FROM generate_series(1, {ROWS}) AS id;
         VACUUM ANALYZE kept"
    );
    bench.runtime.block_on(async {
        let client = connect(bench).await;
        for statement in tables.split(';') {
            client.batch_execute(statement).await.expect("a table");
        }
    });
}

/// A connection beside the store.
pub(crate) async fn connect(bench: &Bench) -> tokio_postgres::Client {
    let connected = tokio_postgres::connect(&bench.server.url, tokio_postgres::NoTls).await;
    let (client, connection) = connected.expect("the server answers");
    tokio::spawn(connection);
    client
}

pub(crate) fn insert(bench: &Bench, clients: usize, seconds: u64) -> Run {
    let value = "x".repeat(VALUE_BYTES);
    let script = format!("\\set id random(1, 1000000000000000)\nINSERT INTO inserted VALUES (:id, '{value}');\n");
    run(bench, &script, clients, seconds)
}

pub(crate) fn select(bench: &Bench, seconds: u64) -> Run {
    let script = format!("\\set id random(1, {ROWS})\nSELECT value FROM kept WHERE id = :id;\n");
    run(bench, &script, 1, seconds)
}

fn run(bench: &Bench, script: &str, clients: usize, seconds: u64) -> Run {
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), script).expect("a script");
    let (count, threads, seconds) = (clients.to_string(), clients.min(2).to_string(), seconds.to_string());
    let mut command = Command::new(binary("pgbench"));
    command.args(["-n", "-M", "prepared", "-c", &count, "-j", &threads, "-T", &seconds, "-U", "postgres", "-h"]);
    command.arg(bench.server.home()).arg("-f").arg(file.path()).arg("postgres");
    let output = command.output().expect("pgbench starts");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    let number = |name: &str| {
        let line = said.lines().find_map(|line| line.strip_prefix(name)).expect("pgbench says it");
        line.split_whitespace().next().and_then(|number| number.parse::<f64>().ok()).expect("a number")
    };
    // It rounds its average latency to a microsecond, which is much of a select.
    let rate = number("tps = ");
    Run { latency_us: clients as f64 * 1e6 / rate, rate }
}
