//! Rows of a user's table are claimed and paid while the process and the server are killed: each is paid once, and its
//! after-effect is delivered for what has landed, and for nothing else.

// Kills come after real time.
#![allow(clippy::disallowed_methods)]

use std::process::{Child, Command, Stdio};
use std::time::Duration;

use latchwork::claim::{ActionCtx, AfterEffect, ClaimError, ClaimStep, Claims, StoredClaims};
use latchwork::json;
use latchwork::node::NodeOptions;
use latchwork::workflow::Engine;

use super::table::{act, create, invoices, pay};
use crate::server::{Server, VARIABLE};
use crate::workflow::own::kit::{Place, number};

const SCHEMA: &str = "LATCHWORK_TABLE_KILLS_SCHEMA";
const INVOICES: i64 = 20;
const LANES: i64 = 2;

fn here(place: &Place) -> Place {
    Place { url: place.url.clone(), schema: place.schema.clone() }
}

async fn claims(engine: &Engine, place: &Place) -> Result<Claims, ClaimError> {
    let step = ClaimStep { lease: Some(Duration::from_secs(1)), ..pay() };
    let mut workflow = invoices(place);
    workflow.steps[0] = step;
    let (acting, receiving) = (here(place), here(place));
    let receipt = move |effect: AfterEffect| {
        let place = here(&receiving);
        async move {
            let insert = format!("INSERT INTO {} VALUES ($1, $2)", place.table("receipts"));
            let client = place.client().await;
            let sent = client.execute(&insert, &[&effect.key, &effect.entity.to_string()]).await;
            sent.map(drop).map_err(|error| error.to_string())
        }
    };
    let action = move |ctx: ActionCtx| act(ctx, here(&acting));
    let builder = Claims::on(engine).workflow(workflow).action("Pay", action).after_effect("Receipt", receipt);
    builder.sweep_every(Duration::from_millis(50)).start().await
}

async fn is_paid(claims: &Claims, invoice: i64) -> bool {
    let permitted = claims.permitted("invoice", invoice.to_string(), "system").await;
    permitted.is_ok_and(|permitted| permitted.status == "paid")
}

/// Not a test by itself: this is the process that is killed. It pays the invoices that are not paid yet.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_process_that_is_killed_while_it_pays() {
    let (Ok(schema), Ok(url)) = (std::env::var(SCHEMA), std::env::var(VARIABLE)) else { return };
    let place = Place { url, schema };
    // The server may be starting.
    let store = loop {
        match place.options().connect(&place.url).await {
            Ok(store) => break store,
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    };
    // The name is free when the lease of the life before is over.
    let engine = loop {
        let node = NodeOptions::new().name("pays").lease(Duration::from_millis(200));
        match Engine::on(&store).node(node).start().await {
            Ok(engine) => break engine,
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    };
    let claims = claims(&engine, &place).await.unwrap();
    let mut lanes = tokio::task::JoinSet::new();
    for lane in 0..LANES {
        let claims = claims.clone();
        lanes.spawn(async move {
            for invoice in (1..=INVOICES).filter(|invoice| invoice % LANES == lane) {
                // Another life has paid it, or its claim is held until the lease is over.
                while !is_paid(&claims, invoice).await {
                    let fire = claims.fire("invoice", "pay", invoice.to_string()).input(json!({"ms": 250}));
                    if !fire.await.is_ok_and(|fired| fired.is_done()) {
                        tokio::time::sleep(Duration::from_millis(20)).await;
                    }
                }
            }
        });
    }
    lanes.join_all().await;
    let delivered = format!("SELECT count(DISTINCT invoice) FROM {}", place.table("receipts"));
    let client = place.client().await;
    while number(&client, &delivered).await < INVOICES {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    println!("done");
}

fn process(place: &Place) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "claim::table_kills::the_process_that_is_killed_while_it_pays", "--nocapture"])
        .env(SCHEMA, &place.schema)
        .env(VARIABLE, &place.url)
        .stdout(Stdio::null())
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap()
}

/// `LATCHWORK_KILLS` sets how often.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_row_is_paid_once_while_the_process_and_the_server_are_killed() {
    let mut server = Server::start_own();
    let place = Place::new(&server, "kills");
    let client = create(&place).await;
    let receipts = place.table("receipts");
    client.batch_execute(&format!("CREATE TABLE {receipts} (key text, invoice text)")).await.unwrap();
    let mut random = fastrand::Rng::with_seed(1);
    let kills = std::env::var("LATCHWORK_KILLS").ok().and_then(|text| text.parse().ok()).unwrap_or(6);
    let mut between = 0;
    let paid = format!("SELECT count(*) FROM {} WHERE status = 'paid'", place.table("invoices"));
    for kill in 0..kills {
        let mut child = process(&place);
        tokio::time::sleep(Duration::from_millis(random.u64(500..1000))).await;
        if kill % 2 == 1 {
            server.kill_and_start();
            tokio::time::sleep(Duration::from_millis(random.u64(100..500))).await;
        }
        child.kill().unwrap();
        child.wait().unwrap();
        between += u32::from((1..INVOICES).contains(&number(&place.client().await, &paid).await));
    }
    // The last life is not killed.
    assert!(process(&place).wait().unwrap().success());
    let client = place.client().await;
    let [payments, bodies] = ["payments", "bodies"].map(|name| place.table(name));
    let all = number(&client, &format!("SELECT count(*) FROM {payments}")).await;
    let different = number(&client, &format!("SELECT count(DISTINCT invoice) FROM {payments}")).await;
    assert_eq!((all, different), (INVOICES, INVOICES), "each is paid once");
    assert_eq!(number(&client, &paid).await, INVOICES);
    let keys = number(&client, &format!("SELECT count(DISTINCT key) FROM {receipts}")).await;
    let told = number(&client, &format!("SELECT count(DISTINCT invoice) FROM {receipts}")).await;
    assert_eq!((keys, told), (INVOICES, INVOICES), "one after-effect for each, delivered at least once under its key");
    let bodies = number(&client, &format!("SELECT count(*) FROM {bodies}")).await;
    println!("{kills} kills, {between} amid payments; {bodies} bodies for {INVOICES} payments");
    assert!(between > 0 && bodies > INVOICES, "kills amid no payment show nothing: {between}, {bodies} bodies");
    let store = place.store().await;
    assert_eq!(StoredClaims::on(&store).await.unwrap().list().await.unwrap().items.len(), 0);
    assert_eq!(store.verify().await.unwrap(), []);
}
