//! The command with a program that has code: workflows, a flow and a claim workflow, which serves its API beside them.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Stdio};

use latchwork::claim::{ActionCtx, ActionError, ClaimStep, ClaimWorkflow, Claims, Outcome};
use latchwork::entity::Add;
use latchwork::flow::{AnswerKind, Flow, flow, handler};
use latchwork::workflow::{Ctx, Engine, Failure, Workflow, workflow};
use latchwork_server::{Address, Api, Listen, Server};
use serde_json::{Value, json};
use tokio::runtime::Runtime;

use crate::serving::command;
use crate::{golden, signal, succeeded, text};

/// Pays, waits for a parcel, and ends; or fails.
fn order() -> Workflow<u64, String> {
    workflow("order").run(async |ctx: Ctx, cents: u64| {
        if cents == 0 {
            return Err(Failure::new("nothing to pay").not_retryable());
        }
        let paid = ctx.run("charge", async || Ok::<_, Failure>(format!("{cents} cents paid"))).await?;
        let parcel: String = ctx.receive("shipped").await?;
        Ok(format!("{paid}, parcel {parcel}"))
    })
}

/// Answers with the sum of what it was given, until it is given nothing.
fn sums() -> Workflow<(), u64> {
    workflow("sums").run(async |ctx: Ctx, ()| {
        let mut sum = 0;
        loop {
            let add = ctx.receive_update::<u64, u64>("add").await?;
            let more = add.value;
            sum += more;
            add.answer(&sum).await?;
            if more == 0 {
                return Ok(sum);
            }
        }
    })
}

fn prices() -> Flow {
    let asks = handler("asks").run(async |ctx, _: u64| {
        let schema = json!({"type": "object", "required": ["cents"], "properties": {"cents": {"type": "integer"}}});
        let answer = ctx.suspend("price").schema(schema).allow([AnswerKind::Submit, AnswerKind::Skip]).await?;
        Ok(answer.value["cents"].as_u64())
    });
    flow("prices").action("ask", asks).build().unwrap()
}

fn invoice() -> ClaimWorkflow {
    let pay = ClaimStep::new(10, "pay", "sent", "paid").claimed("paying").action("Pay");
    ClaimWorkflow::new("invoice", "billing", "invoice").statuses(["sent", "paying", "paid"]).step(pay)
}

async fn pay(ctx: ActionCtx) -> Result<Outcome, ActionError> {
    Ok(Outcome::output(ctx.input().clone()))
}

/// The program, with its own threads.
struct Program {
    runtime: Runtime,
    server: Server,
    address: SocketAddr,
}

impl Program {
    fn start(store: &Path, address: &str) -> Program {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
        let server = runtime.block_on(async {
            let prices = prices();
            let engine = Engine::open(store).register(&order()).register(&sums()).flow(&prices).start().await.unwrap();
            let claims = Claims::on(&engine).workflow(invoice()).action("Pay", pay).start().await.unwrap();
            let sent = Add::new("invoice").id("i-1").data(json!({"status": "sent"})).if_absent(true);
            engine.entities().add(sent).await.unwrap();
            let api = Api::on(&engine).claims(&claims).flow(&prices);
            let server = Server::builder().namespace("default", api).listen(Listen::Tcp(address.parse().unwrap()));
            server.listen(Listen::Socket(store.into())).start().await.unwrap()
        });
        let found = server.addresses().iter().find_map(|address| match address {
            Address::Tcp(address) => Some(*address),
            _ => None,
        });
        Program { runtime, server, address: found.unwrap() }
    }

    fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    fn end(self) {
        let Program { runtime, server, .. } = self;
        runtime.block_on(server.shutdown()).unwrap();
    }
}

#[test]
fn a_program_is_used_through_its_server_and_through_its_socket() {
    let home = tempfile::tempdir().unwrap();
    for (name, by_socket) in [("served", false), ("live", true)] {
        let store = home.path().join(name);
        let program = Program::start(&store, "127.0.0.1:0");
        let url = program.url();
        match by_socket {
            false => golden::check("program", &["--server", &url]),
            true => golden::check("program", &["--store", store.to_str().unwrap()]),
        }
        program.end();
    }
}

/// `latch tail`, whose lines are read while it runs.
struct Tail {
    process: Child,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

impl Tail {
    fn start(id: &str, more: &[&str], url: &str) -> Tail {
        let mut command = command();
        command.args(["tail", id, "-o", "jsonl", "--server", url]).args(more);
        let mut process = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(process.stdout.take().unwrap()).lines();
        Tail { process, lines }
    }

    fn next(&mut self) -> Option<Value> {
        self.lines.next().map(|line| serde_json::from_str(&line.unwrap()).unwrap())
    }

    /// Reads until the execution has this status.
    fn until(&mut self, status: &str) -> Vec<Value> {
        let mut found = Vec::new();
        loop {
            let event = self.next().unwrap_or_else(|| panic!("no status {status:?}: {found:?}"));
            let is_it = event["event"] == "status" && event["data"]["status"] == status;
            found.push(event);
            if is_it {
                return found;
            }
        }
    }

    /// What it has said at its end, and its exit code.
    fn end(self) -> (Option<i32>, String) {
        let output = self.process.wait_with_output().unwrap();
        (output.status.code(), text(&output.stderr))
    }
}

fn latch(arguments: &[&str], url: &str) -> String {
    succeeded(command().args(arguments).args(["--server", url]).stdin(Stdio::null()).output().unwrap())
}

#[test]
fn a_tail_goes_on_after_the_server_was_away_and_tells_everything_once() {
    let home = tempfile::tempdir().unwrap();
    let program = Program::start(home.path(), "127.0.0.1:0");
    let (url, address) = (program.url(), program.address.to_string());
    latch(&["workflow", "start", "order", "--id", "o", "--input", "5"], &url);
    let mut tail = Tail::start("o", &[], &url);
    let mut all = tail.until("waiting");
    program.end();
    let program = Program::start(home.path(), &address);
    latch(&["workflow", "signal", "o", "shipped", "\"p-1\""], &url);
    all.extend(tail.until("completed"));
    let told = |kind: &str, state: &str| {
        let is_it = |event: &&Value| event["data"]["kind"] == kind && event["data"]["state"] == state;
        all.iter().filter(is_it).count()
    };
    assert_eq!((told("step", "done"), told("signal", "done")), (1, 1), "{all:?}");
    assert_eq!(all.last().unwrap()["data"]["output"], "5 cents paid, parcel p-1");
    assert_eq!(tail.next(), None);
    assert_eq!(tail.end(), (Some(0), String::new()));
    // Another one begins at a position in between.
    let position = all[0]["position"].to_string();
    let mut later = Tail::start("o", &["--from", &position], &url);
    let rest = later.until("completed");
    assert!(rest.len() <= all.len() && later.end().0 == Some(0), "{rest:?}");
    program.end();
}

#[test]
fn a_tail_ends_with_the_signal_that_it_gets_and_says_where_to_continue() {
    let home = tempfile::tempdir().unwrap();
    let program = Program::start(home.path(), "127.0.0.1:0");
    let url = program.url();
    latch(&["workflow", "start", "order", "--id", "o", "--input", "5"], &url);
    for (name, code) in [("INT", 130), ("TERM", 143)] {
        let mut tail = Tail::start("o", &[], &url);
        let last = tail.until("waiting").pop().unwrap();
        signal(tail.process.id(), name);
        let (ended, said) = tail.end();
        assert_eq!((ended, said), (Some(code), format!("to continue: --from {}\n", last["position"])));
    }
    program.end();
}

#[test]
fn a_question_of_a_flow_is_answered_and_the_stream_of_the_request_ends() {
    let home = tempfile::tempdir().unwrap();
    let program = Program::start(home.path(), "127.0.0.1:0");
    let url = program.url();
    let json = |arguments: &[&str]| -> Value {
        serde_json::from_str(&latch(&[arguments, &["-o", "json"]].concat(), &url)).unwrap()
    };
    assert_eq!(json(&["flow", "run", "prices", "ask", "--input", "1", "--id", "r", "--user", "ada"])["id"], "r");
    let mut tail = Tail::start("r", &[], &url);
    let question = loop {
        let found = json(&["flow", "questions", "prices", "--action", "ask"]);
        if let Some(id) = found["questions"][0]["id"].as_str() {
            break id.to_string();
        }
    };
    assert_eq!(json(&["flow", "questions", "prices", "--request", "r"])["questions"][0]["id"], question.as_str());
    assert_eq!(json(&["flow", "question", "prices", &question])["is_open"], true);
    assert_eq!(json(&["flow", "show", "prices", "r"])["user"], "ada");
    let answer = ["flow", "answer", "prices", &question, "submit", "--by", "eve"];
    let wrong = command().args(answer).args(["--value", "7", "--server", &url]).output().unwrap();
    assert_eq!(wrong.status.code(), Some(2), "{}", text(&wrong.stderr));
    let answered = json(&[&answer[..], &["--value", "{\"cents\": 50}"]].concat());
    assert_eq!((&answered["is_open"], &answered["decision"]["by"]), (&json!(false), &json!("eve")));
    assert_eq!(latch(&["flow", "result", "prices", "r", "--wait", "30s"], &url), "50\n");
    json(&["flow", "checkpoints", "prices", "r"]);
    let mut told = Vec::new();
    while let Some(event) = tail.next() {
        told.push(event["event"].as_str().unwrap().to_string());
    }
    assert_eq!(tail.end().0, Some(0), "{told:?}");
    assert!(told.contains(&"suspension".into()) && told.contains(&"answer".into()), "{told:?}");
    assert_eq!((told.first().unwrap().as_str(), told.last().unwrap().as_str()), ("request_started", "request_ended"));
    let lines = latch(&["tail", "r"], &url);
    assert!(lines.contains("suspension") && lines.contains("request ended"), "{lines}");
    let operations = latch(&["tail", "r", "--operations"], &url);
    assert!(operations.contains("the execution is completed: 50"), "{operations}");
    program.end();
}

#[test]
fn a_failure_of_the_workflow_is_an_exit_code_of_its_own() {
    let home = tempfile::tempdir().unwrap();
    let program = Program::start(home.path(), "127.0.0.1:0");
    let url = program.url();
    let run = |arguments: &[&str]| {
        let output = command().args(arguments).args(["--server", &url]).stdin(Stdio::null()).output().unwrap();
        (output.status.code(), text(&output.stderr))
    };
    let (code, said) = run(&["workflow", "start", "order", "--id", "f", "--input", "0", "--wait", "30s"]);
    assert_eq!((code, said.as_str()), (Some(6), "latch: \"f\" has failed: nothing to pay\n"));
    let (code, said) = run(&["tail", "f", "-o", "json"]);
    let error: Value = serde_json::from_str(&said).unwrap();
    assert_eq!((code, &error["error"]["code"]), (Some(6), &json!("workflow_failed")));
    program.end();
}

#[test]
fn a_state_is_watched_while_others_change_it() {
    let home = tempfile::tempdir().unwrap();
    let program = Program::start(home.path(), "127.0.0.1:0");
    let url = program.url();
    latch(&["state", "put", "user/1", "{\"n\": 1}", "--new"], &url);
    let mut watch = command();
    watch.args(["state", "watch", "user/1", "--limit", "3", "-o", "jsonl", "--server", &url]);
    let mut watch = watch.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().unwrap();
    let mut lines = BufReader::new(watch.stdout.take().unwrap()).lines();
    let mut next = || serde_json::from_str::<Value>(&lines.next().unwrap().unwrap()).unwrap();
    assert_eq!(next()["change"]["state"], json!({"n": 1}));
    latch(&["state", "increment", "user/1", "n"], &url);
    assert_eq!(next()["change"]["state"], json!({"n": 2}));
    latch(&["state", "remove", "user/1", "--yes"], &url);
    assert_eq!(next()["change"]["state"], Value::Null);
    assert_eq!(watch.wait().unwrap().code(), Some(0));
    program.end();
}
