//! Real processes on a real PostgreSQL: three nodes under load while one of them is killed, paused for longer than its
//! lease, stopped, or cut off from the database, and while the database is restarted. The user's own tables show
//! whether anything was done twice: every write there is in the transaction of the step that makes it.

use std::collections::BTreeMap;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use latchwork::node::{NodeOptions, Nodes};
use latchwork::store::tokio_postgres::Client;
use latchwork::store::{SqlTx, Store};
use latchwork::workflow::{Ctx, Engine, Failure, Overlap, Queue, Retry, Schedule, Workflow, workflow};

use crate::server::{Server, VARIABLE};
use crate::workflow::own::kit::{Place, number};

const SCHEMA: &str = "LATCHWORK_NODES_SCHEMA";
const NAME: &str = "LATCHWORK_NODES_NAME";
const LEASE: Duration = Duration::from_millis(1500);
const LOCKS: u64 = 5;
const KEYS: u64 = 4;

/// The names of the user's tables.
#[derive(Clone)]
struct Tables {
    /// Each lock, and the execution that holds it.
    locks: String,
    /// How many executions of a key run.
    limits: String,
    /// What each execution has done.
    lines: String,
}

impl Tables {
    fn of(place: &Place) -> Tables {
        Tables { locks: place.table("locks"), limits: place.table("limits"), lines: place.table("lines") }
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

/// Not a test by itself: this is a node. It stops in order when its input is closed.
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
    let read = tokio::task::spawn_blocking(|| std::io::stdin().read_line(&mut String::new()));
    read.await.unwrap().unwrap();
    engine.shutdown().await.unwrap();
}

struct NodeProcess {
    name: String,
    child: Child,
}

impl NodeProcess {
    fn start(place: &Place, name: &str) -> NodeProcess {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "node::processes::the_node_that_meets_the_faults", "--nocapture"])
            .env(SCHEMA, &place.schema)
            .env(VARIABLE, &place.url)
            .env(NAME, name)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        NodeProcess { name: name.into(), child }
    }

    fn signal(&self, signal: &str) {
        assert!(Command::new("kill").args([signal, &self.child.id().to_string()]).status().unwrap().success());
    }

    fn kill(&mut self) {
        let _ = self.child.kill();
        self.child.wait().unwrap();
    }

    async fn stop_in_order(&mut self) {
        drop(self.child.stdin.take());
        let began = Instant::now();
        while self.child.try_wait().unwrap().is_none() {
            assert!(began.elapsed() < Duration::from_secs(60), "{} does not stop", self.name);
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

/// Ends every connection of a node for longer than its lease.
async fn cut_off(client: &Client, name: &str) {
    let cut = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE application_name = $1";
    let began = Instant::now();
    while began.elapsed() < LEASE * 2 {
        client.query_one(cut, &[&name]).await.unwrap();
        tokio::time::sleep(Duration::from_millis(3)).await;
    }
}

async fn create(place: &Place) -> Client {
    let (client, Tables { locks, limits, lines }) = (place.client().await, Tables::of(place));
    let create = format!(
        "CREATE TABLE {locks} (name bigint PRIMARY KEY, held bool NOT NULL);
         INSERT INTO {locks} SELECT n, false FROM generate_series(0, {LOCKS} - 1) AS n;
         CREATE TABLE {limits} (key bigint PRIMARY KEY, running bigint NOT NULL);
         INSERT INTO {limits} SELECT n, 0 FROM generate_series(0, {KEYS} - 1) AS n;
         CREATE TABLE {lines} (id text, what text, PRIMARY KEY (id, what))"
    );
    client.batch_execute(&create).await.unwrap();
    client
}

/// Starts jobs until it is told to stop, and waits for all results. Returns how many there were.
async fn load(store: Store, tables: Tables, stop: std::sync::Arc<std::sync::atomic::AtomicBool>) -> u64 {
    let (job, mut all, mut count) = (job(&tables), tokio::task::JoinSet::new(), 0);
    // A fourth node, which meets no fault but those of the database.
    let options = NodeOptions::new().name("client").lease(LEASE);
    let client = Engine::on(&store).register(&job).register(&tick(&tables)).node(options);
    let client = client.most_crashes(1000).start().await.unwrap();
    while !stop.load(std::sync::atomic::Ordering::SeqCst) {
        let (client, job, n) = (client.clone(), job.clone(), count);
        count += 1;
        all.spawn(async move {
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
    tokio::time::timeout(Duration::from_secs(180), all.join_all()).await.expect("not every execution completes");
    client.shutdown().await.unwrap();
    count
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_is_lost_or_done_twice_while_nodes_and_the_database_fail() {
    let events: u64 = std::env::var("LATCHWORK_NODE_EVENTS").ok().and_then(|text| text.parse().ok()).unwrap_or(6);
    let seed = std::env::var("LATCHWORK_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    let (mut server, mut random) = (Server::start_own(), fastrand::Rng::with_seed(seed));
    let place = Place::new(&server, "nodes");
    let mut client = create(&place).await;
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
    for event in 0..events {
        let victim = random.usize(0..nodes.len());
        let name = nodes[victim].name.clone();
        let fault = ["killed", "paused", "stopped", "cut off", "restarted", "paused"][(event % 6) as usize];
        println!("event {event}: {name} is {fault}");
        match fault {
            "killed" => {
                nodes[victim].kill();
                nodes[victim] = NodeProcess::start(&place, &name);
            }
            "paused" => {
                nodes[victim].signal("-STOP");
                tokio::time::sleep(LEASE * 2).await;
                nodes[victim].signal("-CONT");
            }
            "stopped" => {
                nodes[victim].stop_in_order().await;
                nodes[victim] = NodeProcess::start(&place, &name);
            }
            "cut off" => cut_off(&client, &name).await,
            _ => {
                server.kill_and_start();
                tokio::time::sleep(Duration::from_secs(1)).await;
                client = place.client().await;
            }
        }
        tokio::time::sleep(Duration::from_millis(random.u64(500..2500))).await;
        if let Ok(listed) = Nodes::on(&store).list().await {
            refused.extend(listed.into_iter().map(|it| ((it.name, it.since.0), it.refused)));
        }
    }
    stop.store(true, std::sync::atomic::Ordering::SeqCst);
    let jobs = loading.await.unwrap();
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
    let refused: u64 = refused.values().sum();
    println!("{jobs} jobs, {} ticks, {refused} writes of zombies refused", count("tick").await);
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
