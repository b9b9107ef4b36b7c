//! SIGKILL of a program that mounts the API, under load, with clients that send a call again under its Idempotency-Key
//! until it is answered: no execution is started twice, no signal is lost or received twice, no claim is made twice,
//! and no schedule is triggered twice.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use latchwork::claim::{ActionCtx, ActionError, ClaimStep, ClaimWorkflow, Claims, Outcome, StoredClaims};
use latchwork::store::Env;
use latchwork::workflow::{Ctx, Engine, Workflow, workflow};
use latchwork::{Value, json};
use latchwork_server::{Api, Listen, Server};
use tokio::net::TcpStream;

use crate::client::{Answer, Ask, address, ask};

const DIRECTORY: &str = "LATCHWORK_SERVER_DIRECTORY";
const PLACE: &str = "LATCHWORK_SERVER_PLACE";
/// The signals that each execution receives.
const SIGNALS: u64 = 5;
/// The clients that start executions, and those that fire claims.
const CLIENTS: usize = 8;

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// Returns the numbers that it was sent, in the order in which they came.
fn tally() -> Workflow<u64, Vec<u64>> {
    workflow("tally").run(async |ctx: Ctx, _: u64| {
        let mut numbers = Vec::new();
        for _ in 0..SIGNALS {
            numbers.push(ctx.receive::<u64>("number").await?);
        }
        ctx.state().global::<u64>("ended").increment(1).await?;
        Ok(numbers)
    })
}

/// Counts how often it was started.
fn count() -> Workflow<(), ()> {
    workflow("count").run(async |ctx: Ctx, ()| {
        ctx.state().global::<u64>("counted").increment(1).await?;
        Ok(())
    })
}

async fn claims(engine: &Engine) -> Claims {
    let mut pay = ClaimStep::new(10, "pay", "sent", "paid").claimed("paying").action("Pay");
    pay.lease = Some(Duration::from_millis(500));
    let invoice = ClaimWorkflow::new("invoice", "billing", "invoice").statuses(["sent", "paying", "paid"]).step(pay);
    let action = async |ctx: ActionCtx| {
        ctx.merge_data(json!({"amount": ctx.input()["amount"]}));
        Ok::<_, ActionError>(Outcome::output(ctx.input().clone()))
    };
    let claims = Claims::on(engine).workflow(invoice).action("Pay", action);
    claims.sweep_every(Duration::from_millis(100)).start().await.unwrap()
}

/// Not a test by itself: this is the process that is killed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_process_that_is_killed() {
    let Ok(directory) = std::env::var(DIRECTORY) else { return };
    let engine = Engine::open(directory).register(&tally()).register(&count()).start().await.unwrap();
    let api = Api::on(&engine).claims(&claims(&engine).await);
    let listen = Listen::Tcp(std::env::var(PLACE).unwrap().parse().unwrap());
    let server = Server::builder().namespace("default", api).listen(listen).start().await.unwrap();
    println!("\nlistening {}", address(&server));
    std::future::pending::<()>().await;
}

/// Starts the process, and waits until it listens.
fn started(directory: &Path, place: &str) -> (Child, String) {
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "kill::the_process_that_is_killed", "--nocapture"])
        .env(DIRECTORY, directory)
        .env(PLACE, place)
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let lines = BufReader::new(child.stdout.take().unwrap()).lines().map_while(Result::ok);
    let listening = lines.filter_map(|line| line.strip_prefix("listening ").map(String::from)).next();
    (child, listening.expect("the process listens"))
}

/// Sends a call until it is answered for good: connections that break and answers that ask to try again are not the
/// end of it.
async fn insist(place: &str, again: &AtomicU64, call: impl Fn() -> Ask) -> Answer {
    for _ in 0..3000 {
        if let Ok(stream) = TcpStream::connect(place).await
            && let Some(answer) = call().try_on(stream, place).await
        {
            let goes_on = answer.status == 202 || answer.status == 503 || answer.header("retry-after").is_some();
            if !goes_on {
                return answer;
            }
        }
        again.fetch_add(1, Ordering::Relaxed);
        Env::system().sleep(Duration::from_millis(20)).await;
    }
    panic!("a call was never answered");
}

fn keyed(method: &str, path: &str, key: &str, body: &Value) -> Ask {
    ask(method, path).header("idempotency-key", key).json(body.clone())
}

/// What the clients share.
#[derive(Clone)]
struct Load {
    place: String,
    again: Arc<AtomicU64>,
    stop: Arc<AtomicBool>,
}

impl Load {
    async fn call(&self, path: &str, key: &str, status: u16, body: Value) -> Answer {
        let answer = insist(&self.place, &self.again, || keyed("POST", path, key, &body)).await;
        assert_eq!(answer.status, status, "{path} under {key}: {answer:?}");
        answer
    }

    /// Starts executions and sends them their signals. Returns their ids.
    async fn starts(self, client: usize) -> Vec<String> {
        let mut ids = Vec::new();
        while !self.stop.load(Ordering::Relaxed) {
            let key = format!("start-{client}-{}", ids.len());
            let new = json!({"workflow": "tally", "input": 0});
            let id = self.call("/v1/workflows", &key, 201, new).await.json()["id"].as_str().unwrap().to_string();
            for number in 0..SIGNALS {
                let path = format!("/v1/workflows/{id}/signals");
                let signal = json!({"name": "number", "payload": number});
                self.call(&path, &format!("{key}-{number}"), 204, signal).await;
            }
            ids.push(id);
        }
        ids
    }

    /// Triggers a schedule. Returns the ids of the executions that it starts.
    async fn triggers(self, client: usize) -> Vec<String> {
        let mut ids = Vec::new();
        while !self.stop.load(Ordering::Relaxed) {
            let key = format!("trigger-{client}-{}", ids.len());
            let fired = self.call("/v1/schedules/tick/trigger", &key, 200, json!({})).await.json();
            ids.push(fired["id"].as_str().unwrap().to_string());
        }
        ids
    }

    /// Adds invoices and pays them. Returns their ids.
    async fn pays(self, client: usize) -> Vec<String> {
        let mut ids = Vec::new();
        while !self.stop.load(Ordering::Relaxed) {
            let id = format!("i-{client}-{}", ids.len());
            let data = json!({"status": "sent"});
            let new = json!({"id": id, "type": "invoice", "data": data});
            self.call("/v1/entities", &format!("add-{id}"), 201, new).await;
            let fire = json!({"workflow": "invoice", "step": "pay", "input": {"amount": ids.len()}});
            let fired = self.call(&format!("/v1/claims/{id}/fire"), &format!("pay-{id}"), 200, fire).await;
            assert_eq!(fired.json()["to"], "paid");
            ids.push(id);
        }
        ids
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn calls_under_a_key_are_made_once_whenever_the_server_is_killed() {
    let home = tempfile::tempdir().unwrap();
    let directory = home.path().join("data");
    let (mut child, place) = started(&directory, "127.0.0.1:0");
    let load = Load { place: place.clone(), again: Arc::default(), stop: Arc::default() };
    let starters: Vec<_> = (0..CLIENTS).map(|client| tokio::spawn(load.clone().starts(client))).collect();
    let tick = json!({"workflow": "count", "input": null, "every_ms": 3_600_000_000_u64, "overlap": "allow"});
    let put = ask("PUT", "/v1/schedules/tick").json(tick).at(&place).await;
    assert_eq!(put.status, 201, "{put:?}");
    let triggerers: Vec<_> = (0..2).map(|client| tokio::spawn(load.clone().triggers(client))).collect();
    let payers: Vec<_> = (0..CLIENTS).map(|client| tokio::spawn(load.clone().pays(client))).collect();
    let (env, kills) = (Env::system(), number("LATCHWORK_KILLS", 5));
    for _ in 0..kills {
        env.sleep(Duration::from_millis(150 + env.random() % 500)).await;
        child.kill().unwrap();
        child.wait().unwrap();
        (child, _) = started(&directory, &place);
    }
    load.stop.store(true, Ordering::Relaxed);
    let (mut executions, mut invoices) = (Vec::new(), Vec::new());
    for starter in starters {
        executions.extend(starter.await.unwrap());
    }
    for payer in payers {
        invoices.extend(payer.await.unwrap());
    }
    let mut triggered = std::collections::BTreeSet::new();
    for triggerer in triggerers {
        for id in triggerer.await.unwrap() {
            assert!(triggered.insert(id.clone()), "{id} is the answer to two calls");
        }
    }
    for id in &executions {
        let ended = ask("GET", &format!("/v1/workflows/{id}/result?wait=30s")).at(&place).await.json();
        assert_eq!(ended["output"], json!((0..SIGNALS).collect::<Vec<_>>()), "{id}");
    }
    child.kill().unwrap();
    child.wait().unwrap();

    let engine = Engine::open(&directory).register(&tally()).register(&count()).start().await.unwrap();
    for id in &triggered {
        // The engine that starts last starts what was triggered and not started yet.
        while engine.describe(id.as_str()).await.is_err() {
            Env::system().sleep(Duration::from_millis(10)).await;
        }
        engine.handle_by_id(id.as_str()).result_through_parks().await.unwrap();
    }
    let counted = engine.states().global().slot::<u64>("counted").get().await.unwrap();
    assert_eq!(counted, Some(triggered.len() as u64), "a schedule was triggered twice");
    let claims = StoredClaims::on(engine.store()).await.unwrap();
    let all = latchwork::workflow::History::ids(engine.store()).await.unwrap();
    assert_eq!(all.len(), executions.len() + triggered.len(), "no execution was started twice");
    let ended = engine.states().global().slot::<u64>("ended").get().await.unwrap();
    assert_eq!(ended, Some(executions.len() as u64));
    for id in &invoices {
        let changes = claims.history(id.as_str()).await.unwrap().items;
        assert_eq!(changes.iter().filter(|change| change.to == "paid").count(), 1, "{changes:?}");
    }
    let again = load.again.load(Ordering::Relaxed);
    let (count, fired) = (executions.len(), triggered.len());
    println!("{kills} kills, {count} executions, {} invoices, {fired} triggers, {again} calls again", invoices.len());
    assert!(count > 0 && fired > 0 && !invoices.is_empty() && again > 0, "the kills hit calls");
    assert_eq!(engine.store().verify().await.unwrap(), []);
}
