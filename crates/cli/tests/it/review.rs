//! `latch review` on directories that the library has written.

use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::Duration;

use latchwork::flow::{AnswerKind, flow, handler};
use latchwork::workflow::{Ctx, Engine, Workflow, workflow};
use serde_json::{Value, json};

use crate::{latch, succeeded, text};

fn refund() -> Workflow<u64, String> {
    workflow("refund").run(async |ctx: Ctx, amount: u64| {
        let name = if amount < 100 { "small" } else { "large" };
        let review = ctx.review(name, &format!("Refund {amount} EUR?"), ["approve", "reject"]);
        let decision = review.timeout(Duration::from_secs(3600)).await?;
        Ok(decision.map_or("undecided".into(), |decision| format!("{}: {}", decision.by, decision.option)))
    })
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(future)
}

/// Three executions that wait for decisions.
pub(crate) fn made(directory: &Path) -> PathBuf {
    let store = directory.join("data");
    block_on(async {
        let engine = Engine::open(&store).register(&refund()).start().await.unwrap();
        for (open, (id, amount)) in [("a", 10), ("b", 20), ("c", 200)].into_iter().enumerate() {
            engine.start(&refund(), amount).id(id).await.unwrap();
            // One after the other, as the lists show them: ids of one millisecond are in no order.
            engine.store().env().sleep(Duration::from_millis(5)).await;
            while engine.reviews().await.unwrap().items.len() <= open {
                engine.store().env().sleep(Duration::from_millis(5)).await;
            }
        }
        // They are stored as waiting when they leave memory.
        while engine.residents() > 0 {
            engine.store().env().sleep(Duration::from_millis(5)).await;
        }
        engine.stop();
        engine.store().close().await.unwrap();
    });
    store
}

fn run(arguments: &[&str], store: &Path) -> Output {
    latch(arguments, store).output().unwrap()
}

fn json(arguments: &[&str], store: &Path) -> Value {
    serde_json::from_str(&succeeded(run(&[arguments, &["-o", "json"]].concat(), store))).unwrap()
}

fn failed(arguments: &[&str], store: &Path) -> (Option<i32>, String) {
    let output = run(arguments, store);
    (output.status.code(), text(&output.stderr))
}

#[test]
fn open_reviews_are_listed_and_shown() {
    let directory = tempfile::tempdir().unwrap();
    let store = made(directory.path());
    let all = json(&["review", "list"], &store);
    let executions: Vec<&str> =
        all["reviews"].as_array().unwrap().iter().map(|it| it["execution"].as_str().unwrap()).collect();
    assert_eq!(executions, ["c", "a", "b"], "by name, the oldest first");
    let first = json(&["review", "list", "--limit", "2"], &store);
    let next = first["next"].as_str().unwrap();
    let rest = json(&["review", "list", "--after", next], &store);
    assert_eq!((rest["reviews"][0]["execution"].as_str(), &rest["next"]), (Some("b"), &Value::Null));
    let small = json(&["review", "list", "--name", "small", "--workflow", "refund"], &store);
    assert_eq!(small["reviews"].as_array().unwrap().len(), 2);
    assert_eq!(json(&["review", "list", "--workflow", "other"], &store)["reviews"], json!([]));
    let table = succeeded(run(&["review", "list"], &store));
    assert!(table.starts_with("REVIEW") && table.contains("approve, reject") && table.contains("Refund 200 EUR?"));
    let id = all["reviews"][0]["id"].as_str().unwrap();
    let shown = json(&["review", "show", id], &store);
    assert_eq!((&shown["state"], &shown["decision"]), (&json!("open"), &Value::Null));
    let shown = succeeded(run(&["review", "show", id], &store));
    assert!(shown.contains("Review \"large\" of execution \"c\", workflow \"refund\": open."), "{shown}");
    let (code, said) = failed(&["review", "show", "nothing/c"], &store);
    assert_eq!(code, Some(3), "{said}");
    let why = succeeded(run(&["workflow", "why", "c"], &store));
    assert!(why.contains("\"large\"") && why.contains("review"), "{why}");
}

#[test]
fn a_review_is_decided_once_and_the_execution_continues_with_it() {
    let directory = tempfile::tempdir().unwrap();
    let store = made(directory.path());
    let all = json(&["review", "list"], &store);
    let id = all["reviews"][0]["id"].as_str().unwrap();
    let (code, said) = failed(&["review", "decide", id, "perhaps", "--by", "ada"], &store);
    assert_eq!(code, Some(2), "{said}");
    assert!(said.contains("offers approve, reject"), "{said}");
    assert_eq!(failed(&["review", "decide", id, "approve"], &store).0, Some(2), "--by is required");
    assert_eq!(failed(&["review", "decide", id, "approve", "--by", ""], &store).0, Some(2));
    let (code, said) = failed(&["review", "decide", "nothing/c", "approve", "--by", "ada"], &store);
    assert_eq!(code, Some(3), "{said}");
    let decided = json(&["review", "decide", id, "approve", "--by", "ada", "--reason", "it was lost"], &store);
    assert_eq!((&decided["state"], &decided["decision"]["by"]), (&json!("decided"), &json!("ada")));
    let (code, said) = failed(&["review", "decide", id, "reject", "--by", "bob"], &store);
    assert_eq!(code, Some(5), "{said}");
    assert!(said.contains("decided before: \"approve\", by ada"), "{said}");
    assert_eq!(json(&["review", "list"], &store)["reviews"].as_array().unwrap().len(), 2);
    let shown = succeeded(run(&["review", "show", id], &store));
    assert!(shown.contains("by ada: \"approve\": it was lost"), "{shown}");
    let result = block_on(async {
        let engine = Engine::open(&store).register(&refund()).start().await.unwrap();
        let result = engine.handle(&refund(), "c").result().await.unwrap();
        engine.shutdown().await.unwrap();
        result
    });
    assert_eq!(result, "ada: approve");
}

/// The schema of a question is stored with it: a value that does not fit leaves it open.
#[test]
fn a_question_of_a_flow_is_answered_with_a_value() {
    let asks = handler("asks").run(async |ctx, _: u64| {
        let schema = json!({"type": "object", "required": ["cents"], "properties": {"cents": {"type": "integer"}}});
        let answer = ctx.suspend("price").schema(schema).allow([AnswerKind::Submit, AnswerKind::Skip]).await?;
        Ok(answer.value["cents"].as_u64())
    });
    let prices = flow("prices").action("ask", asks).build().unwrap();
    let directory = tempfile::tempdir().unwrap();
    let store = directory.path().join("data");
    let id = block_on(async {
        let engine = Engine::open(&store).flow(&prices).start().await.unwrap();
        let request = engine.flow(&prices).run("ask", 1).id("r").await.unwrap();
        while request.suspensions().await.unwrap().is_empty() || engine.residents() > 0 {
            engine.store().env().sleep(Duration::from_millis(5)).await;
        }
        let id = request.suspensions().await.unwrap().remove(0).id;
        engine.shutdown().await.unwrap();
        id
    });
    let decide = ["review", "decide", &id, "submit", "--by", "ada"];
    for wrong in [&[][..], &["--value", "7"], &["--value", r#"{"cents": "many"}"#], &["--value", "{"]] {
        let (code, said) = failed(&[&decide[..], wrong].concat(), &store);
        assert_eq!(code, Some(2), "{said}");
    }
    assert_eq!(json(&["review", "show", &id], &store)["state"], json!("open"));
    let decided = json(&[&decide[..], &["--value", r#"{"cents": 50}"#]].concat(), &store);
    assert_eq!(decided["state"], json!("decided"));
    let output = block_on(async {
        let engine = Engine::open(&store).flow(&prices).start().await.unwrap();
        let output: Option<u64> = engine.flow(&prices).request("r").result().await.unwrap();
        engine.shutdown().await.unwrap();
        output
    });
    assert_eq!(output, Some(50));
}
