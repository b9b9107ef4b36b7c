//! The user's own tables: a step with SQL, and a claimed transition of a row, as ratios to pgbench on the same server
//! in the same run. One caller at a time, as pgbench has one client.

use std::process::Command;
use std::time::{Duration, Instant};

use latchwork::claim::{ActionCtx, ClaimStep, ClaimWorkflow, Claims, Outcome};
use latchwork::store::tokio_postgres::{Client, NoTls, connect};
use latchwork::store::{SqlTx, Store};
use latchwork::workflow::{Ctx, Engine, workflow};
use tokio::runtime::Runtime;

use crate::report::{Figure, Report, median};
use crate::server::{Server, binary};

/// How many rows can be claimed, each once.
const ROWS: i64 = 200_000;

/// How many steps an execution has.
const STEPS: u64 = 100;

pub(crate) fn own(runtime: &Runtime, report: &Report) {
    let names = ["postgres.sql_step", "postgres.claim"];
    if !names.iter().any(|name| report.wants(name)) {
        return;
    }
    let server = Server::start_own();
    let (rounds, seconds) = if report.quick { (1, 1) } else { (5, 4) };
    let store = runtime.block_on(async {
        prepare(&server).await;
        Store::connect(&server.url).await.expect("a store")
    });
    if report.wants(names[0]) {
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            theirs.push(pgbench(&server, "INSERT INTO inserted VALUES (:id, 'x');", seconds));
            ours.push(runtime.block_on(steps(&store, Duration::from_secs(seconds))));
        }
        let (value, floor) = (median(ours), median(theirs));
        report.add(Figure { name: names[0], value, unit: "µs", floor, target: "≤ 3" });
    }
    if report.wants(names[1]) {
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        let mut next = 1;
        for _ in 0..rounds {
            theirs.push(pgbench(
                &server,
                "UPDATE changed SET version = version + 1 WHERE id = :id::bigint % 1000 + 1;",
                seconds,
            ));
            ours.push(runtime.block_on(transitions(&store, &mut next, Duration::from_secs(seconds))));
        }
        let (value, floor) = (median(ours), median(theirs));
        report.add(Figure { name: names[1], value, unit: "µs", floor, target: "≤ 3" });
    }
    runtime.block_on(store.close()).expect("it closes");
}

async fn client(server: &Server) -> Client {
    let (client, connection) = connect(&server.url, NoTls).await.expect("the server answers");
    tokio::spawn(connection);
    client
}

async fn prepare(server: &Server) {
    let tables = format!(
        "CREATE TABLE inserted (id bigint PRIMARY KEY, value text);
         CREATE TABLE stepped (id bigserial PRIMARY KEY, value text);
         CREATE TABLE changed (id bigint PRIMARY KEY, status text NOT NULL, version bigint NOT NULL);
         CREATE TABLE claimed (id bigint PRIMARY KEY, status text NOT NULL, version bigint NOT NULL);
         INSERT INTO changed SELECT n, 'sent', 1 FROM generate_series(1, 1000) AS n;
         INSERT INTO claimed SELECT n, 'sent', 1 FROM generate_series(1, {ROWS}) AS n"
    );
    client(server).await.batch_execute(&tables).await.expect("tables");
}

/// The average latency of a statement, in microseconds.
fn pgbench(server: &Server, statement: &str, seconds: u64) -> f64 {
    let file = tempfile::NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), format!("\\set id random(1, 1000000000000000)\n{statement}\n")).expect("a script");
    let home = server.socket();
    let mut command = Command::new(binary("pgbench"));
    command.args(["-n", "-M", "prepared", "-c", "1", "-j", "1", "-T", &seconds.to_string(), "-U", "postgres", "-h"]);
    command.arg(home.parent().expect("a folder")).arg("-f").arg(file.path()).arg("postgres");
    let output = command.output().expect("pgbench starts");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    let average = said.lines().find_map(|line| line.strip_prefix("latency average = ")).expect("pgbench says it");
    let number = average.split_whitespace().next().and_then(|number| number.parse::<f64>().ok());
    number.expect("a number") * 1000.0
}

/// Microseconds per step with one insert, in executions of many such steps.
async fn steps(store: &Store, time: Duration) -> f64 {
    let inserts = workflow("inserts").run(async |ctx: Ctx, steps: u64| {
        for _ in 0..steps {
            let insert = ctx.sql("insert", async |tx: SqlTx| {
                Ok(tx.execute("INSERT INTO stepped (value) VALUES ($1)", &[&"x"]).await?)
            });
            insert.await?;
        }
        Ok(())
    });
    let engine = Engine::on(store).register(&inserts).start().await.expect("an engine");
    engine.start(&inserts, STEPS).await.expect("a start").result().await.expect("a result");
    let (began, mut made) = (Instant::now(), 0);
    while began.elapsed() < time {
        engine.start(&inserts, STEPS).await.expect("a start").result().await.expect("a result");
        made += STEPS;
    }
    let took = began.elapsed().as_secs_f64() * 1e6 / made as f64;
    engine.stop();
    took
}

/// Microseconds per claimed transition of a row: the claim, an action that does nothing, and the final status.
async fn transitions(store: &Store, next: &mut i64, time: Duration) -> f64 {
    let config = ClaimWorkflow::new("row", "bench", "row")
        .table("claimed", "id", "version")
        .statuses(["sent", "paying", "paid"])
        .step(ClaimStep::new(1, "pay", "sent", "paid").claimed("paying").action("Pay"));
    let engine = Engine::on(store).start().await.expect("an engine");
    let pay = async |_: ActionCtx| Ok::<_, std::convert::Infallible>(Outcome::done());
    let claims = Claims::on(&engine).workflow(config).action("Pay", pay).start().await.expect("claims");
    let (began, mut made) = (Instant::now(), 0);
    while began.elapsed() < time && *next <= ROWS {
        assert!(claims.fire("row", "pay", next.to_string()).await.expect("a firing").is_done());
        (*next, made) = (*next + 1, made + 1);
    }
    let took = began.elapsed().as_secs_f64() * 1e6 / f64::from(made);
    engine.stop();
    took
}
