//! A bank in the user's own tables: transfers by `ctx.sql` while the process and the server are killed. Money is
//! neither made nor lost, and every transfer is done once.

// Kills come after real time.
#![allow(clippy::disallowed_methods)]

use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use latchwork::node::NodeOptions;
use latchwork::store::SqlTx;
use latchwork::workflow::{Ctx, Engine, Retry, Workflow, workflow};

use super::kit::{Place, number};
use crate::server::{Server, VARIABLE};

const SCHEMA: &str = "LATCHWORK_BANK_SCHEMA";
const ACCOUNTS: i64 = 8;
const TRANSFERS: i64 = 300;
const CENTS: i64 = 1000;

fn setting(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// Two steps: a transfer, and its way back of one cent less. Each writes a line, which is unique.
fn transfer(place: &Place) -> Workflow<i64, i64> {
    let (accounts, lines) = (place.table("accounts"), place.table("lines"));
    workflow("transfer").run(move |ctx: Ctx, number: i64| {
        let (accounts, lines) = (accounts.clone(), lines.clone());
        async move {
            let (from, to) = (number % ACCOUNTS, (number * 3 + 1) % ACCOUNTS);
            for (leg, from, to, cents) in [(0_i64, from, to, 5_i64), (1, to, from, 4)] {
                let take = format!("UPDATE {accounts} SET cents = cents - $2 WHERE id = $1");
                let give = format!("UPDATE {accounts} SET cents = cents + $2 WHERE id = $1");
                let line = format!("INSERT INTO {lines} (transfer, leg) VALUES ($1, $2)");
                let step = ctx.sql("transfer", async |tx: SqlTx| {
                    tx.execute(&take, &[&from, &cents]).await?;
                    tx.execute(&give, &[&to, &cents]).await?;
                    // No key: a second run would leave a second line.
                    tx.execute(&line, &[&number, &leg]).await?;
                    Ok(())
                });
                step.input(&leg).retry(Retry::exponential()).await?;
            }
            Ok(number)
        }
    })
}

/// Not a test by itself: this is the process that is killed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_bank_that_is_killed() {
    let (Ok(schema), Ok(url)) = (std::env::var(SCHEMA), std::env::var(VARIABLE)) else { return };
    let place = Place { url, schema };
    let transfer = transfer(&place);
    // The server may be starting.
    let store = loop {
        match place.options().connect(&place.url).await {
            Ok(store) => break store,
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    };
    // The next process takes over from one that was killed when the lease is over.
    let node = NodeOptions::new().name("bank").lease(Duration::from_millis(200));
    let Ok(engine) = Engine::on(&store).register(&transfer).most_crashes(1000).node(node).start().await else { return };
    println!("open");
    let mut all = tokio::task::JoinSet::new();
    for number in 0..TRANSFERS {
        let (engine, transfer) = (engine.clone(), transfer.clone());
        all.spawn(async move {
            loop {
                let start = engine.start(&transfer, number).id(format!("{number}")).or_join();
                match start.await {
                    Ok(handle) => match handle.result().await {
                        Ok(_) => return,
                        Err(error) => eprintln!("{number}: {error}"),
                    },
                    Err(error) => eprintln!("{number}: {error}"),
                }
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        });
    }
    all.join_all().await;
    println!("done");
}

fn bank(place: &Place) -> std::process::Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "workflow::own::bank::the_bank_that_is_killed", "--nocapture"])
        .env(SCHEMA, &place.schema)
        .env(VARIABLE, &place.url)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn money_is_conserved_while_the_process_and_the_server_are_killed() {
    let mut server = Server::start_own();
    let place = Place::new(&server, "bank");
    let client = place.client().await;
    let (accounts, lines) = (place.table("accounts"), place.table("lines"));
    let create = format!(
        "CREATE TABLE {accounts} (id bigint PRIMARY KEY, cents bigint NOT NULL);
         CREATE TABLE {lines} (transfer bigint, leg bigint);
         INSERT INTO {accounts} SELECT n, {CENTS} FROM generate_series(0, {ACCOUNTS} - 1) AS n"
    );
    client.batch_execute(&create).await.unwrap();
    let mut random = fastrand::Rng::with_seed(setting("LATCHWORK_SEED", 1));
    let (mut process_kills, mut server_kills, mut landed, mut between) = (0, 0, 0, 0);
    for kill in 0..setting("LATCHWORK_KILLS", 10) {
        let mut child = bank(&place);
        let began = Instant::now();
        let life = Duration::from_millis(random.u64(300..1500));
        while began.elapsed() < life && child.try_wait().unwrap().is_none() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        if kill % 2 == 1 {
            server.kill_and_start();
            server_kills += 1;
            tokio::time::sleep(Duration::from_millis(random.u64(100..500))).await;
        }
        if child.try_wait().unwrap().is_none() {
            child.kill().unwrap();
            process_kills += 1;
        }
        child.wait().unwrap();
        let lines = number(&place.client().await, &format!("SELECT count(*) FROM {lines}")).await;
        between += u32::from(lines > landed && lines < 2 * TRANSFERS);
        landed = lines;
    }
    // The last life is not killed.
    assert!(bank(&place).wait_with_output().unwrap().status.success());
    let client = place.client().await;
    let sum = number(&client, &format!("SELECT sum(cents)::bigint FROM {accounts}")).await;
    let all = number(&client, &format!("SELECT count(*) FROM {lines}")).await;
    let different = number(&client, &format!("SELECT count(DISTINCT (transfer, leg)) FROM {lines}")).await;
    println!(
        "{process_kills} kills of the process, {server_kills} of the server, {between} amid transfers; {all} lines"
    );
    assert_eq!(sum, ACCOUNTS * CENTS, "money is conserved");
    assert_eq!((all, different), (2 * TRANSFERS, 2 * TRANSFERS), "each step has taken effect once");
    assert!(process_kills > 0 && server_kills > 0);
    assert!(between >= 2, "kills before the first transfer and after the last show nothing");
    let store = place.store().await;
    assert_eq!(store.verify().await.unwrap(), []);
}
