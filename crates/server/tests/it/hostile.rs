//! Text of clients that the server evaluates: filters, cron expressions, paths, configurations, conditions, and values
//! that are held against a JSON schema with patterns and references. Whatever it is, the answer comes soon, and the
//! server goes on.

use std::time::Duration;

use latchwork::flow::{AnswerKind, Flow, flow, handler};
use latchwork::store::{Env, Store};
use latchwork::workflow::{Ctx, Engine, workflow};
use latchwork::{Value, json};
use latchwork_server::Api;

use crate::client::{Answer, Ask, Running, ask, start_api};

/// No answer may take longer, in a build for tests on a busy machine. A hostile request that is not bounded takes
/// minutes or for ever.
const SOON: Duration = Duration::from_secs(10);

/// Patterns that take exponential time in an engine that tries all ways, with and without what only such an engine can
/// do.
const PATTERNS: [&str; 4] = ["^(a+)+$", "^(a|a)*$", "^(?=(a+)+$)a*b", "^((a+)+)\\1$"];

/// A schema whose references are a chain, and which refers to itself for each level of its value.
fn references(length: usize) -> Value {
    let mut definitions = serde_json::Map::new();
    for number in 0..length {
        definitions.insert(format!("d{number}"), json!({"$ref": format!("#/$defs/d{}", number + 1)}));
    }
    let last = json!({"type": "object", "properties": {"n": {"$ref": "#/$defs/d0"}}});
    definitions.insert(format!("d{length}"), last);
    json!({"$defs": definitions, "$ref": "#/$defs/d0"})
}

/// Asks a question whose value has to fit a schema.
fn asks() -> Flow {
    let asks = handler("asks").run(async |ctx, which: usize| {
        let schema = match PATTERNS.get(which) {
            Some(pattern) => json!({"type": "string", "pattern": pattern}),
            None => references(which),
        };
        ctx.suspend("why").schema(schema).allow([AnswerKind::Submit]).await?.read::<Value>()
    });
    flow("texts").action("asks", asks).build().unwrap()
}

async fn served() -> Running {
    let texts = asks();
    let double = workflow("double").run(async |_: Ctx, number: u64| Ok(number.wrapping_mul(2)));
    let store = Store::memory().await.unwrap();
    let engine = Engine::on(&store).register(&double).flow(&texts).start().await.unwrap();
    let running = start_api(engine.clone(), Api::on(&engine).flow(&texts)).await;
    for number in 0..50 {
        let data = json!({"n": number, "text": "a".repeat(1000), "list": (0..100).collect::<Vec<_>>()});
        let new = json!({"id": format!("e{number}"), "type": "thing", "data": data});
        assert_eq!(ask("POST", "/v1/entities").json(new).of(&running).await.status, 201);
    }
    running
}

/// The answer, which has to come soon.
async fn soon(running: &Running, what: &str, asked: Ask) -> Answer {
    let env = Env::system();
    let began = env.monotonic();
    let answer = asked.of(running).await;
    let took = env.monotonic() - began;
    assert!(took < SOON, "{what} took {took:?}");
    assert!(answer.status < 500, "{what}: {answer:?}");
    assert_eq!(ask("GET", "/healthz").of(running).await.status, 200);
    answer
}

async fn post(running: &Running, what: &str, path: &str, body: Value) -> Answer {
    soon(running, what, ask("POST", &format!("/v1{path}")).json(body)).await
}

/// A filter with many levels of one operator.
fn nested(operator: &str, levels: usize) -> Value {
    (0..levels).fold(json!({"data.n": 1}), |inner, _| match operator {
        "not" => json!({"not": inner}),
        operator => json!({operator: [inner]}),
    })
}

#[tokio::test]
async fn filters_end_soon() {
    let running = served().await;
    let find = async |what: &str, filter: Value| {
        post(&running, what, "/entities:find", json!({"type": "thing", "filter": filter})).await.status
    };
    for operator in ["not", "and", "or"] {
        // A list is one more level of JSON.
        let levels = if operator == "not" { 120 } else { 60 };
        assert_eq!(find(operator, nested(operator, levels)).await, 200, "{operator}");
        assert_eq!(find(operator, nested(operator, 500)).await, 400, "{operator}");
    }
    let many: Vec<Value> = (0..60_000).map(|number| json!({"data.n": number})).collect();
    find("a wide or", json!({"or": many})).await;
    find("a long list", json!({"data.list": {"one_of": (0..100_000).collect::<Vec<_>>()}})).await;
    find("many elements", json!({"data.list": {"has_all": (0..100_000).collect::<Vec<_>>()}})).await;
    find("a long text", json!({"data.text": {"contains": "a".repeat(900_000)}})).await;
    find("an almost matching text", json!({"data.text": {"contains": format!("{}b", "a".repeat(500))}})).await;
    find("a long path", json!({format!("data{}", ".a".repeat(300_000)): 1})).await;
    find("many indexes", json!({format!("data.list{}", "[0]".repeat(200_000)): 1})).await;
    let attributes: Vec<String> = (0..800).map(|number| format!("attribute=a%3E%3D{number}")).collect();
    soon(&running, "attributes", ask("GET", &format!("/v1/workflows?{}", attributes.join("&")))).await;
    let tags: Vec<String> = (0..2000).map(|number| format!("tag=t{number}")).collect();
    soon(&running, "tags", ask("GET", &format!("/v1/workflows?{}", tags.join("&")))).await;
    soon(&running, "a date", ask("GET", &format!("/v1/workflows?since={}", "9".repeat(20_000)))).await;
}

#[tokio::test]
async fn schedules_end_soon() {
    let running = served().await;
    let put = async |what: &str, more: Value| {
        let mut new = json!({"workflow": "double", "input": 1});
        new.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        soon(&running, what, ask("PUT", "/v1/schedules/s").json(new)).await.status
    };
    let many = (0..300_000).map(|_| "*").collect::<Vec<_>>().join(",");
    for (what, cron, status) in [
        ("a day that never is", "0 0 31 2 *", 400),
        ("a long list", &*format!("{many} * * * *"), 200),
        ("many fields", &"* ".repeat(400_000), 400),
        ("a large number", &format!("{} * * * *", "9".repeat(900_000)), 400),
        ("a large step", "*/99999999999999999999 * * * *", 400),
    ] {
        assert!([status, 201].contains(&put(what, json!({"cron": cron})).await), "{what}");
    }
    // Each of them has few occurrences, far away.
    for (what, more) in [
        ("the end of the calendar", json!({"cron": "0 0 29 2 *", "start": "9990-01-01", "end": "9999-12-30"})),
        ("an open hour", json!({"cron": "* * 29 2 1", "zone": "Europe/Berlin", "start": "9900-01-01"})),
        ("every second", json!({"cron": "* * * * * *", "zone": "America/New_York", "start": "9999-12-01"})),
        ("a long interval", json!({"every_ms": u64::MAX / 1000, "start": "9999-01-01"})),
        ("a long jitter", json!({"cron": "0 0 29 2 *", "jitter_ms": u64::MAX / 1000})),
    ] {
        let status = put(what, more).await;
        assert!([200, 201, 400].contains(&status), "{what}: {status}");
        soon(&running, what, ask("GET", "/v1/schedules/s?next=1000")).await;
    }
    put("every second", json!({"cron": "* * * * * *", "zone": "Europe/Berlin"})).await;
    let backfill = json!({"from": "1970-01-01", "to": "2026-01-01"});
    assert_eq!(post(&running, "a backfill", "/schedules/s/backfill", backfill.clone()).await.status, 400);
    put("leap days", json!({"cron": "0 0 29 2 *", "zone": "Europe/Berlin"})).await;
    assert_eq!(post(&running, "a sparse backfill", "/schedules/s/backfill", backfill).await.status, 200);
}

#[tokio::test]
async fn values_are_held_against_patterns_and_references_soon() {
    let running = served().await;
    let question = async |which: usize| {
        let asked = post(&running, "a question", "/flows/texts/actions/asks", json!({"input": which})).await.json();
        let path = format!("/v1/flows/texts/requests/{}/suspensions", asked["id"].as_str().unwrap());
        loop {
            let open = ask("GET", &path).of(&running).await.json();
            if let Some(id) = open["items"][0]["id"].as_str() {
                return format!("/flows/texts/suspensions/{}/answer", id.replace('/', "%2F"));
            }
            tokio::task::yield_now().await;
        }
    };
    for (which, pattern) in PATTERNS.iter().enumerate() {
        let path = question(which).await;
        for length in [30, 1000, 100_000] {
            let answer = json!({"answer": "submit", "value": format!("{}!", "a".repeat(length))});
            let refused = post(&running, pattern, &path, answer).await;
            assert_eq!(refused.status, 400, "{pattern}: {refused:?}");
        }
    }
    let path = question(11).await;
    // The deepest value that a body may hold.
    let deep = |inner: Value| (0..120).fold(inner, |inner, _| json!({"n": inner}));
    let refused = post(&running, "references", &path, json!({"answer": "submit", "value": deep(json!(1))})).await;
    assert_eq!(refused.status, 400, "{refused:?}");
    let taken = post(&running, "references", &path, json!({"answer": "submit", "value": deep(json!({}))})).await;
    assert_eq!(taken.status, 200, "{taken:?}");
    // A longer chain would overflow the stack: the question is not asked.
    let asked = post(&running, "a chain", "/flows/texts/actions/asks", json!({"input": 1000})).await.json();
    let path = format!("/v1/flows/texts/requests/{}/result?wait=10s", asked["id"].as_str().unwrap());
    let ended = soon(&running, "a chain", ask("GET", &path)).await.json();
    assert_eq!(ended["status"], "failed", "{ended}");
}

#[tokio::test]
async fn configurations_end_soon() {
    let running = served().await;
    let names: Vec<String> = (0..3000).map(|number| format!("s{number}")).collect();
    let step = |number: usize| {
        let (from, to) = (&names[number], &names[(number * 7 + 1) % names.len()]);
        json!({
            "step_id": number, "step_key": format!("k{number}"), "status": from, "successful_state": to,
            "action": "A", "successful_claim_state": [format!("c{number}"), from],
        })
    };
    let meta = json!({"owning_module": "m", "entity_type": "t", "status_field": "status"});
    let workflow = |name: &str, steps: usize| {
        let steps: Vec<Value> = (0..steps).map(step).collect();
        json!({"workflow": name, "meta": meta, "status_types": names, "steps": steps})
    };
    let large = workflow("large", 3000);
    let many: Vec<Value> = (0..20).map(|number| workflow(&format!("w{number}"), 20)).collect();
    let same: Vec<Value> = (0..20).map(|_| workflow("same", 20)).collect();
    for (what, configuration) in [("large", large), ("many", json!(many)), ("the same", json!(same))] {
        let text = configuration.to_string();
        assert!(text.len() < 1 << 20, "{what}: {}", text.len());
        let validate = ask("POST", "/v1/claim-configurations:validate").header("content-type", "application/json");
        assert_eq!(soon(&running, what, validate.body(text.into_bytes())).await.status, 200, "{what}");
        let draw = json!({"configuration": configuration, "workflow": "large"});
        post(&running, what, "/claim-configurations:diagram", draw).await;
    }
}

#[tokio::test]
async fn large_batches_and_long_names_end_soon() {
    let running = served().await;
    let ops: Vec<Value> = (0..20_000).map(|number| json!({"add": {"id": format!("b{number}"), "type": "t"}})).collect();
    let added = post(&running, "a batch", "/entities:transact", json!({"ops": ops})).await;
    assert!([200, 400, 413].contains(&added.status), "{added:?}");
    let same: Vec<Value> = (0..20_000).map(|_| json!({"add": {"id": "same", "type": "t"}})).collect();
    post(&running, "one entity many times", "/entities:transact", json!({"ops": same})).await;
    let kinds: Vec<String> = (0..80_000).map(|number| format!("k{number}")).collect();
    assert_eq!(post(&running, "kinds", "/tasks:take", json!({"kinds": kinds})).await.status, 400);
    let path = format!("a{}", ".a".repeat(300_000));
    for (verb, body) in [
        ("increment", json!({"path": path})),
        ("push", json!({"path": path, "value": 1})),
        ("set-record", json!({"path": path, "entry": "x", "value": 1})),
    ] {
        let refused = post(&running, verb, &format!("/state/user/u/{verb}"), body).await;
        assert_eq!(refused.status, 400, "{verb}: {refused:?}");
    }
    let wide: serde_json::Map<String, Value> = (0..60_000).map(|number| (format!("f{number}"), json!(1))).collect();
    soon(&running, "a wide patch", ask("PATCH", "/v1/state/user/u").json(json!(wide))).await;
    let tags: Vec<String> = (0..4000).map(|number| format!("\"r{number}\"")).collect();
    let many = ask("GET", "/v1/entities/e1").header("if-none-match", &tags.join(", ")[..30_000]);
    soon(&running, "many tags", many).await;
    let name = "%F0%9F%98%80".repeat(2000);
    for path in ["entities", "locks", "workflows", "schedules", "tasks", "slots", "state/user"] {
        soon(&running, path, ask("GET", &format!("/v1/{path}/{name}"))).await;
    }
}
