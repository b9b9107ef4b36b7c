//! Random requests, made from the OpenAPI document: no answer is a failure of the server, and each is as the document
//! tells: its status, its media type, its headers and its body.

use std::path::Path;
use std::process::Command;
use std::time::Duration;

use latchwork::claim::{ActionCtx, ActionError, AfterEffect, ClaimStep, ClaimWorkflow, Claims, Outcome};
use latchwork::flow::{Flow, flow, handler, sequencer};
use latchwork::workflow::{Ctx, Engine, workflow};
use latchwork::{Value, json};
use latchwork_server::{Api, Limits, Server};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::client::{Running, ask, free};
use crate::schemathesis;

/// The operations whose answers are streams without an end. They are asked below.
const STREAMS: &str = "watch_state|watch_slot|follow_execution|stream_events";

/// What is looked at of each answer.
const CHECKS: &str = "not_a_server_error,status_code_conformance,content_type_conformance,\
                      response_headers_conformance,response_schema_conformance";

fn number(variable: &str, default: u64) -> u64 {
    std::env::var(variable).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

#[derive(Default, Serialize, Deserialize, JsonSchema)]
struct Counted {
    words: u64,
}

/// Counts words, and asks whether that is right.
fn texts() -> Flow {
    let count = handler("count")
        .needs::<Counted>()
        .tap(async |ctx, text: String| ctx.sequencer().inc([("words", text.split_whitespace().count() as u64)]).await);
    let asks = handler("ask").run(async |ctx, _: Value| Ok(ctx.suspend("right").await?.is_approved()));
    let counting = sequencer("counting").state::<Counted>().tap(&count).map(|_, look| look.state().words);
    flow("texts").action("count", counting.build().unwrap()).action("ask", asks).build().unwrap()
}

async fn claims(engine: &Engine) -> Claims {
    let pay = ClaimStep::new(10, "pay", "sent", "paid").claimed("paying").action("Pay").after("Print");
    let invoice = ClaimWorkflow::new("invoice", "billing", "invoice").statuses(["sent", "paying", "paid"]).step(pay);
    let action = async |ctx: ActionCtx| Ok::<_, ActionError>(Outcome::output(ctx.input().clone()));
    Claims::on(engine)
        .workflow(invoice)
        .action("Pay", action)
        .after_effect("Print", async |_: AfterEffect| Err("no paper"))
        .after_effect_attempts(1)
        .start()
        .await
        .unwrap()
}

/// A server that has something of every noun.
async fn served() -> Running {
    let directory = tempfile::tempdir().unwrap();
    let double = workflow("double").run(async |ctx: Ctx, n: i64| ctx.run("add", async || Ok(n.wrapping_mul(2))).await);
    let order = workflow("order").run(async |ctx: Ctx, item: String| {
        ctx.publish("item", &item).await?;
        let cents: u64 = ctx.receive("paid").await?;
        let decision = ctx.review("ship", &format!("Ship {item}?"), ["yes", "no"]).await?;
        let add = ctx.receive_update::<i64, i64>("add").await?;
        add.answer(&1).await?;
        Ok(format!("{item} for {cents}: {}", decision.option))
    });
    let texts = texts();
    let engine = Engine::open(directory.path()).register(&double).register(&order).flow(&texts).start().await.unwrap();
    let api = Api::on(&engine).flow(&texts).claims(&claims(&engine).await);
    let mut limits = Limits::default();
    // A case is not worth waiting for.
    limits.wait = Duration::from_millis(20);
    let server = Server::builder().namespace("default", api).limits(limits).listen(free()).start().await.unwrap();
    let running = Running::on(server, engine, directory);
    filled(&running).await;
    running
}

async fn filled(running: &Running) {
    let sent = json!({"status": "sent"});
    for (path, body) in [
        ("entities", json!({"id": "a", "type": "thing", "data": {"n": 1}})),
        ("entities", json!({"id": "i", "type": "invoice", "data": sent})),
        ("entities", json!({"id": "j", "type": "invoice", "data": sent})),
        ("claims/i/fire", json!({"workflow": "invoice", "step": "pay"})),
        ("workflows", json!({"workflow": "order", "input": "tea", "id": "o"})),
        ("workflows", json!({"workflow": "double", "input": 7, "id": "d"})),
        ("flows/texts/actions/count", json!({"input": "a b", "id": "r"})),
        ("flows/texts/actions/ask", json!({"input": 1, "id": "q"})),
        ("state/user/u/increment", json!({"path": "n"})),
        ("slots/s/increment", json!({})),
    ] {
        let answer = ask("POST", &format!("/v1/{path}")).json(body).of(running).await;
        assert!((200..300).contains(&answer.status), "{path}: {answer:?}");
    }
    let schedule = json!({"workflow": "double", "cron": "0 3 * * *", "input": 1});
    let put = ask("PUT", "/v1/schedules/nightly").header("if-none-match", "*").json(schedule).of(running).await;
    assert_eq!(put.status, 201, "{put:?}");
}

/// The document, in which every parameter of a path may also be one that exists: random ones hardly ever do.
async fn document(running: &Running) -> Value {
    let begun = ask("POST", "/v1/sessions").json(json!({"lease": "1h"})).of(running).await.json();
    let mut document = ask("GET", "/openapi.json").of(running).await.json();
    // They are not below the address that the requests are sent to.
    document["paths"].as_object_mut().unwrap().retain(|_, item| item.get("servers").is_none());
    for (path, item) in document["paths"].as_object_mut().unwrap() {
        let noun = path[1..].split(['/', ':']).next().unwrap().to_string();
        for (method, operation) in item.as_object_mut().unwrap() {
            let is_end = method == "delete" || ["terminate", "cancel"].iter().any(|end| path.ends_with(end));
            let parameters = operation.get_mut("parameters").and_then(Value::as_array_mut);
            for parameter in parameters.into_iter().flatten().filter(|parameter| parameter["in"] == "path") {
                let known = match (noun.as_str(), parameter["name"].as_str().unwrap()) {
                    // What is ended is another one each time.
                    _ if is_end => continue,
                    ("entities", "id") => json!(["a", "i"]),
                    ("claims", _) => json!(["i", "j"]),
                    ("workflows", "id") => json!(["o", "d"]),
                    ("workflows", _) => json!(["item"]),
                    ("workflow-limits", _) => json!(["double"]),
                    ("flows", "flow") => json!(["texts"]),
                    ("flows", "action") => json!(["count", "ask"]),
                    ("flows", _) => json!(["r", "q"]),
                    ("sessions", _) => json!([begun["id"]]),
                    ("schedules", _) => json!(["nightly"]),
                    ("slots", _) => json!(["s"]),
                    ("state", "id") => json!(["u"]),
                    ("locks", _) => json!(["m"]),
                    ("entity-types", _) => json!(["thing"]),
                    _ => continue,
                };
                let random = parameter["schema"].take();
                parameter["schema"] = json!({"anyOf": [{"enum": known}, random]});
            }
        }
    }
    document
}

/// What schemathesis says about a server.
fn examine(program: &Path, home: &Path, place: &str, document: &Value, each: u64) -> String {
    let file = home.join("openapi.json");
    std::fs::write(&file, document.to_string()).unwrap();
    let mut command = Command::new(program);
    command.arg("run").arg(&file).current_dir(home);
    command.args(["--url", &format!("http://{place}/v1"), "--checks", CHECKS, "--no-color"]);
    command.args(["--phases", "examples,coverage,fuzzing", "--max-examples", &each.to_string()]);
    command.args(["--exclude-operation-id-regex", STREAMS, "--suppress-health-check", "all", "--warnings", "off"]);
    command.args(["--continue-on-failure", "--request-timeout", "60", "--generation-database", "none"]);
    if let Ok(seed) = std::env::var("LATCHWORK_SEED") {
        command.args(["--seed", &seed]);
    }
    let output = command.output().unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}");
    said
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_answer_is_as_the_document_tells() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR"));
    let program = schemathesis::program(folder).unwrap_or_else(|error| {
        panic!("{error}; schemathesis needs Python with venv and pip, or {}=off", schemathesis::VARIABLE)
    });
    let Some(program) = program else { return println!("schemathesis is off") };
    let (running, home) = (served().await, tempfile::tempdir().unwrap());
    let document = document(&running).await;
    let paths = document["paths"].as_object().unwrap().values();
    let operations = paths.flat_map(|item| item.as_object().unwrap().values());
    let operations = operations.filter(|operation| operation.get("responses").is_some()).count() as u64;
    let each = number("LATCHWORK_API_CASES", 300).div_ceil(operations);
    let place = running.place.clone();
    let said = tokio::task::spawn_blocking(move || examine(&program, home.path(), &place, &document, each));
    let said = said.await.unwrap();
    // Nothing was refused because the server had failed before.
    assert_eq!(ask("GET", "/readyz").of(&running).await.status, 200);
    println!("{}", said.split_once("SUMMARY").map_or(&*said, |(_, summary)| summary));
}

#[tokio::test]
async fn no_position_makes_a_stream_fail() {
    let running = served().await;
    let long = "9".repeat(400);
    let positions = ["0", "1", "18446744073709551615", "18446744073709551616", "-1", "", "x", "1e3", "0x1", &long];
    for path in ["/state/user/u/watch", "/state/user/none/watch", "/slots/s/watch", "/slots/%00/watch"]
        .into_iter()
        .chain(["/workflows/o/events", "/workflows/d/events", "/workflows/none/events"])
        .chain(["/flows/texts/requests/r/events", "/flows/texts/requests/none/events", "/flows/x/requests/r/events"])
    {
        for position in positions {
            for query in [format!("after={position}"), format!("after={position}&execution=o"), "color=red".into()] {
                let asked = ask("GET", &format!("/v1{path}?{query}")).status_of(&running).await;
                assert!(asked < 500, "{path}?{query}: {asked}");
            }
            let asked = ask("GET", &format!("/v1{path}")).header("last-event-id", position);
            let asked = asked.status_of(&running).await;
            assert!(asked < 500, "{path} after {position}: {asked}");
        }
    }
}
