//! Real processes on a real PostgreSQL: three nodes under load while one of them is killed, paused for longer than its
//! lease, stopped by SIGTERM, or cut off from the database, and while the database is restarted. The user's own tables
//! show whether anything was done twice: every write there is in the transaction of the step or of the claim that makes
//! it.

use std::collections::BTreeMap;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use latchwork::claim::{ActionCtx, ClaimStep, ClaimWorkflow, Claims, Outcome};
use latchwork::entity::Add;
use latchwork::json;
use latchwork::node::{NodeOptions, Nodes};
use latchwork::store::tokio_postgres::Client;
use latchwork::store::{SqlTx, Store};
use latchwork::workflow::{Ctx, Engine, Failure, Overlap, Queue, Retry, Schedule, Status, Workflow, workflow};

use super::wire::Wire;
use crate::server::{Server, VARIABLE};
use crate::workflow::own::kit::{Place, number};

const SCHEMA: &str = "LATCHWORK_NODES_SCHEMA";
const NAME: &str = "LATCHWORK_NODES_NAME";
const LEASE: Duration = Duration::from_millis(1500);
const LOCKS: u64 = 5;
const KEYS: u64 = 4;

/// How many jobs are not completed at most: a slow machine gets no more to do than it can end in time.
const IN_FLIGHT: usize = 300;

/// The names of the user's tables.
#[derive(Clone)]
struct Tables {
    /// Each lock, and the execution that holds it.
    locks: String,
    /// How many executions of a key run.
    limits: String,
    /// What each execution has done.
    lines: String,
    /// The bills that were paid: a row for each action that has taken effect.
    paid: String,
}

impl Tables {
    fn of(place: &Place) -> Tables {
        let [locks, limits, lines, paid] = ["locks", "limits", "lines", "paid"].map(|name| place.table(name));
        Tables { locks, limits, lines, paid }
    }
}

/// One write of an execution: it must find exactly one row. Each leaves a line.
async fn write(ctx: &Ctx, tables: &Tables, what: &'static str, sql: String, at: i64) -> Result<(), Failure> {
    let (line, id) = (format!("INSERT INTO {} (id, what) VALUES ($1, $2)", tables.lines), ctx.id().to_string());
    let step = ctx.sql(what, async |tx: SqlTx| {
        if tx.execute(&sql, &[&at]).await? != 1 {
            return Err(Failure::new(format!("{what} {at}: another execution is inside")).not_retryable());
        }
        tx.execute(&line, &[&id, &what]).await?;
        Ok(())
    });
    step.retry(Retry::exponential()).await
}

/// Under a limit of two for each key, and under a lock: both are shown in the user's tables.
fn job(tables: &Tables) -> Workflow<u64, u64> {
    let limited = workflow("job").concurrency_by(2, |n: &u64| (n % KEYS).to_string()).when_full(Queue::new());
    limited.with(tables.clone()).run(async |ctx: Ctx, tables: Tables, n: u64| {
        let (key, at) = ((n % KEYS) as i64, (n % LOCKS) as i64);
        let enter = format!("UPDATE {} SET running = running + 1 WHERE key = $1 AND running < 2", tables.limits);
        write(&ctx, &tables, "enter", enter, key).await?;
        let guard = ctx.mutex(format!("lock-{at}")).acquire().await?;
        let take = format!("UPDATE {} SET held = true WHERE name = $1 AND NOT held", tables.locks);
        write(&ctx, &tables, "take", take, at).await?;
        ctx.sleep(Duration::from_millis(5)).await?;
        let give = format!("UPDATE {} SET held = false WHERE name = $1 AND held", tables.locks);
        write(&ctx, &tables, "give", give, at).await?;
        guard.release().await?;
        let leave = format!("UPDATE {} SET running = running - 1 WHERE key = $1", tables.limits);
        write(&ctx, &tables, "leave", leave, key).await?;
        Ok(n)
    })
}

/// What a schedule starts.
fn tick(tables: &Tables) -> Workflow<i64, i64> {
    workflow("tick").with(tables.clone()).run(async |ctx: Ctx, tables: Tables, at: i64| {
        let touch = format!("UPDATE {} SET held = held WHERE name = $1", tables.locks);
        write(&ctx, &tables, "tick", touch, at).await?;
        Ok(at)
    })
}

/// How far ahead of the first open bill a process fires.
const AHEAD: u64 = 4;

/// A bill is paid by a row in the user's table, in the commit that ends the claim. A claim of a process that is gone is
/// reverted, and any process may fire again.
async fn claims(engine: &Engine, tables: &Tables) -> Claims {
    let pay = ClaimStep { lease: Some(LEASE), ..ClaimStep::new(1, "pay", "open", "paid") };
    let bill = ClaimWorkflow::new("bill", "billing", "bill").statuses(["open", "paying", "paid"]);
    let insert = format!("INSERT INTO {} (bill) VALUES ($1)", tables.paid);
    let action = move |ctx: ActionCtx| {
        let insert = insert.clone();
        async move {
            let bill = ctx.entity().id.to_string();
            tokio::time::sleep(Duration::from_millis(fastrand::u64(0..40))).await;
            ctx.sql(move |tx: SqlTx| {
                let (insert, bill) = (insert.clone(), bill.clone());
                async move {
                    tx.execute(&insert, &[&bill]).await?;
                    Ok(())
                }
            });
            Ok::<_, String>(Outcome::done())
        }
    };
    let claims = Claims::on(engine).workflow(bill.step(pay.claimed("paying").action("Pay"))).action("Pay", action);
    claims.sweep_every(Duration::from_millis(200)).start().await.unwrap()
}

/// Fires the step of open bills until it is told to stop, against all other processes that do the same.
async fn pay_bills(engine: Engine, claims: Claims) {
    let mut first = 0;
    loop {
        let bill = first + fastrand::u64(0..AHEAD);
        let found = match engine.entities().get(format!("bill-{bill}")).await {
            Ok(found) => found.map(|found| found.data["status"].clone()),
            Err(_) => None,
        };
        match found {
            Some(status) if status == "paid" && bill == first => first += 1,
            Some(status) if status == "open" => drop(claims.fire("bill", "pay", format!("bill-{bill}")).await),
            _ => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
}

/// True once SIGTERM was sent to this process. It was started with that signal blocked, so the signal stays pending.
fn is_terminated() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let pending = status.lines().find_map(|line| line.strip_prefix("ShdPnd:")).unwrap();
    u64::from_str_radix(pending.trim(), 16).unwrap() & (1 << 14) != 0
}

/// Not a test by itself: this is a node. It stops in order on SIGTERM, and when the test has ended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_node_that_meets_the_faults() {
    let (Ok(schema), Ok(url), Ok(name)) = (std::env::var(SCHEMA), std::env::var(VARIABLE), std::env::var(NAME)) else {
        return;
    };
    let place = Place { url: format!("{url} application_name={name}"), schema };
    let tables = Tables::of(&place);
    let engine = loop {
        // The server may be starting, and the node of this name may still have its lease.
        if let Ok(store) = place.options().connect(&place.url).await {
            let options = NodeOptions::new().name(&name).lease(LEASE);
            let builder = Engine::on(&store).register(&job(&tables)).register(&tick(&tables)).node(options);
            match builder.most_crashes(1000).start().await {
                Ok(engine) => break engine,
                Err(error) => eprintln!("{name}: {error}"),
            }
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    println!("open");
    let paying = tokio::spawn(pay_bills(engine.clone(), claims(&engine, &tables).await));
    let (ended, has_ended) =
        (std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false)), std::sync::atomic::Ordering::SeqCst);
    let end = ended.clone();
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_line(&mut String::new());
        end.store(true, has_ended);
    });
    while !is_terminated() && !ended.load(has_ended) {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    paying.abort();
    engine.shutdown().await.unwrap();
}

struct NodeProcess {
    name: String,
    child: Child,
    wire: Wire,
}

impl NodeProcess {
    fn start(place: &Place, name: &str) -> NodeProcess {
        let wire = Wire::to(&place.url);
        NodeProcess { name: name.into(), child: NodeProcess::spawn(place, name, &wire), wire }
    }

    /// Starts it again, after it has ended.
    fn start_again(&mut self, place: &Place) {
        self.child = NodeProcess::spawn(place, &self.name, &self.wire);
    }

    fn spawn(place: &Place, name: &str, wire: &Wire) -> Child {
        Command::new("env")
            .arg("--block-signal=TERM")
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "node::processes::the_node_that_meets_the_faults", "--nocapture"])
            .env(SCHEMA, &place.schema)
            .env(VARIABLE, wire.url())
            .env(NAME, name)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    }

    fn signal(&self, signal: &str) {
        assert!(Command::new("kill").args([signal, &self.child.id().to_string()]).status().unwrap().success());
    }

    fn kill(&mut self) {
        let _ = self.child.kill();
        self.child.wait().unwrap();
    }

    async fn stop_in_order(&mut self) {
        self.signal("-TERM");
        let began = Instant::now();
        while self.child.try_wait().unwrap().is_none() {
            assert!(began.elapsed() < Duration::from_secs(60), "{} does not stop", self.name);
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

/// Cuts a node off from the database until the others have taken it for dead, or for some leases. Returns whether they
/// have.
async fn cut_off(node: &NodeProcess, store: &Store) -> bool {
    node.wire.cut();
    let (began, mut is_dead) = (Instant::now(), false);
    while !is_dead && began.elapsed() < LEASE * 4 {
        tokio::time::sleep(Duration::from_millis(50)).await;
        let listed = Nodes::on(store).list().await;
        is_dead = listed.is_ok_and(|listed| listed.iter().all(|it| it.name != node.name));
    }
    node.wire.mend();
    is_dead
}

/// One fault of a node. Returns whether a cut has lasted until the node was taken for dead.
async fn strike(node: &mut NodeProcess, fault: &str, place: &Place, store: &Store) -> Option<bool> {
    match fault {
        "killed" => {
            node.kill();
            node.start_again(place);
        }
        "paused" => {
            node.signal("-STOP");
            tokio::time::sleep(LEASE * 2).await;
            node.signal("-CONT");
        }
        "stopped" => {
            node.stop_in_order().await;
            node.start_again(place);
        }
        _ => return Some(cut_off(node, store).await),
    }
    None
}

async fn create(place: &Place) -> Client {
    let (client, Tables { locks, limits, lines, paid }) = (place.client().await, Tables::of(place));
    let create = format!(
        "CREATE TABLE {locks} (name bigint PRIMARY KEY, held bool NOT NULL);
         INSERT INTO {locks} SELECT n, false FROM generate_series(0, {LOCKS} - 1) AS n;
         CREATE TABLE {limits} (key bigint PRIMARY KEY, running bigint NOT NULL);
         INSERT INTO {limits} SELECT n, 0 FROM generate_series(0, {KEYS} - 1) AS n;
         CREATE TABLE {paid} (bill text NOT NULL);
         CREATE TABLE {lines} (id text, what text, PRIMARY KEY (id, what))"
    );
    client.batch_execute(&create).await.unwrap();
    client
}

/// Adds a bill, until it is there. A commit without an answer may have landed.
async fn add_bill(claims: &Claims, engine: &Engine, number: u64) {
    let id = format!("bill-{number}");
    loop {
        let bill = Add::new("bill").id(id.clone()).data(json!({"status": "open"}));
        let added = claims.add("bill", bill).await;
        if added.is_ok() || matches!(engine.entities().get(id.clone()).await, Ok(Some(_))) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// The jobs that are not completed, and why, for the message of a failure.
async fn unfinished(client: &Engine, jobs: u64) -> String {
    let mut said = String::new();
    for n in 0..jobs {
        match client.describe(format!("job-{n}")).await {
            Ok(job) if job.status() == Status::Completed => {}
            Ok(job) => said += &format!("\n{:?}; {}", job.state, client.why(format!("job-{n}")).await.unwrap()),
            Err(error) => said += &format!("\njob-{n}: {error}"),
        }
    }
    if said.is_empty() { "all are stored as completed, and a caller has not heard of it".into() } else { said }
}

/// Starts jobs and adds bills until it is told to stop, and waits for all results. Returns how many jobs and bills
/// there were.
async fn load(store: Store, tables: Tables, stop: std::sync::Arc<std::sync::atomic::AtomicBool>) -> (u64, u64) {
    let (job, mut all, mut count) = (job(&tables), tokio::task::JoinSet::new(), 0);
    // A fourth node, which meets no fault but those of the database.
    let options = NodeOptions::new().name("client").lease(LEASE);
    let client = Engine::on(&store).register(&job).register(&tick(&tables)).node(options);
    let client = client.most_crashes(1000).start().await.unwrap();
    let claims = claims(&client, &tables).await;
    let paying = tokio::spawn(pay_bills(client.clone(), claims.clone()));
    let (mut bills, in_flight) = (0, std::sync::Arc::new(tokio::sync::Semaphore::new(IN_FLIGHT)));
    while !stop.load(std::sync::atomic::Ordering::SeqCst) {
        if count % 6 == 0 {
            let (client, claims, number) = (client.clone(), claims.clone(), bills);
            bills += 1;
            all.spawn(async move { add_bill(&claims, &client, number).await });
        }
        let room = in_flight.clone().acquire_owned().await.unwrap();
        let (client, job, n) = (client.clone(), job.clone(), count);
        count += 1;
        all.spawn(async move {
            let _room = room;
            loop {
                let start = client.start(&job, n).id(format!("job-{n}")).or_join();
                let done = match start.await {
                    Ok(_) => client.handle(&job, format!("job-{n}")).result_through_parks().await,
                    Err(error) => Err(error),
                };
                match done {
                    Ok(found) => return assert_eq!(found, n),
                    Err(error) if error.kind() == latchwork::store::ErrorKind::Conflict => panic!("job {n}: {error}"),
                    // The database is not there.
                    Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
                }
            }
        });
        tokio::time::sleep(Duration::from_millis(15)).await;
    }
    if tokio::time::timeout(Duration::from_secs(180), all.join_all()).await.is_err() {
        panic!("not every execution completes: {}", unfinished(&client, count).await);
    }
    let all_paid = async {
        for bill in 0..bills {
            while client.entities().get(format!("bill-{bill}")).await.unwrap().unwrap().data["status"] != "paid" {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(180), all_paid).await.expect("not every bill is paid");
    paying.abort();
    client.shutdown().await.unwrap();
    (count, bills)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_or_done_twice_while_nodes_and_the_database_fail() {
    let events: u64 = std::env::var("LATCHWORK_NODE_EVENTS").ok().and_then(|text| text.parse().ok()).unwrap_or(6);
    let seed = std::env::var("LATCHWORK_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    let (mut server, mut random) = (Server::start_own(), fastrand::Rng::with_seed(seed));
    let place = Place::new(&server, "nodes");
    create(&place).await;
    let (tables, store) = (Tables::of(&place), place.store().await);
    let mut nodes: Vec<NodeProcess> = ["one", "two", "three"].map(|name| NodeProcess::start(&place, name)).into();
    let stop = std::sync::Arc::new(std::sync::atomic::AtomicBool::new(false));
    super::until(&store, "three nodes", |nodes| nodes.len() == 3 && nodes.iter().all(|it| it.shards.len() > 20)).await;
    let operator = Engine::on(&store).idle().start().await.unwrap();
    let every = Schedule::every("ticks", Duration::from_secs(1)).workflow_by_name("tick", 0);
    let every = every.overlap(Overlap::Allow).catch_up(Duration::from_secs(3600));
    operator.schedules().put(every).await.unwrap();
    let loading = tokio::spawn(load(place.store().await, tables.clone(), stop.clone()));
    let mut refused: BTreeMap<(String, u64), u64> = BTreeMap::new();
    let mut cuts = Vec::new();
    for event in 0..events {
        let victim = random.usize(0..nodes.len());
        let name = nodes[victim].name.clone();
        let fault = ["killed", "paused", "stopped", "cut off", "restarted", "paused"][(event % 6) as usize];
        println!("event {event}: {name} is {fault}");
        if fault == "restarted" {
            server.kill_and_start();
            tokio::time::sleep(Duration::from_secs(1)).await;
        } else if let Some(is_dead) = strike(&mut nodes[victim], fault, &place, &store).await {
            cuts.push(is_dead);
        }
        tokio::time::sleep(Duration::from_millis(random.u64(500..2500))).await;
        if let Ok(listed) = Nodes::on(&store).list().await {
            refused.extend(listed.into_iter().map(|it| ((it.name, it.since.0), it.refused)));
        }
    }
    stop.store(true, std::sync::atomic::Ordering::SeqCst);
    let (jobs, bills) = loading.await.unwrap();
    let client = place.client().await;
    let count = async |what: &str| {
        number(&client, &format!("SELECT count(*) FROM {} WHERE what = '{what}'", tables.lines)).await
    };
    for what in ["enter", "take", "give", "leave"] {
        assert_eq!(count(what).await, jobs as i64, "each job has its line {what}, and the key keeps it from a second");
    }
    let inside = format!(
        "SELECT (SELECT count(*) FROM {} WHERE held) + (SELECT sum(running)::bigint FROM {})",
        tables.locks, tables.limits
    );
    assert_eq!(number(&client, &inside).await, 0, "all locks and permits are given back");
    let paid = format!("SELECT count(*) FROM {}", tables.paid);
    let once = format!("SELECT count(DISTINCT bill) FROM {}", tables.paid);
    let paid = (number(&client, &paid).await, number(&client, &once).await);
    assert_eq!(paid, (bills as i64, bills as i64), "each claim has the effect of one body");
    let refused: u64 = refused.values().sum();
    let ticks = count("tick").await;
    println!("{jobs} jobs, {bills} bills, {ticks} ticks, {refused} writes of zombies refused");
    println!(
        "{} of {} cuts lasted until the node was taken for dead",
        cuts.iter().filter(|it| **it).count(),
        cuts.len()
    );
    assert!(cuts.is_empty() || cuts.contains(&true), "no cut has lasted longer than a lease");
    assert!(refused > 0, "no zombie has tried to write: this run proves nothing");
    assert_ticks(&operator).await;
    for node in &mut nodes {
        node.stop_in_order().await;
    }
    assert_eq!(store.verify().await.unwrap(), []);
}

/// Every occurrence of the schedule was started once, and none is left out.
async fn assert_ticks(operator: &Engine) {
    let (mut times, mut cursor) = (Vec::new(), None);
    loop {
        let page = operator.schedules().runs("ticks").limit(1000).after(cursor).await.unwrap();
        times.extend(page.items.iter().filter(|run| run.outcome.is_start()).map(|run| run.time.0 / 1_000_000));
        cursor = page.next;
        if cursor.is_none() {
            break;
        }
    }
    times.sort_unstable();
    assert!(times.len() > 3 && times.windows(2).all(|pair| pair[1] == pair[0] + 1), "{times:?}");
}
