//! Workflows that are written with types, used by their names and with JSON only, as a server or a schedule does.

use std::future::IntoFuture;
use std::time::Duration;

use latchwork::JsonError;
use latchwork::store::{ErrorKind, Store};
use latchwork::testing::TestEngine;
use latchwork::workflow::{Ctx, Engine, ExecutionFilter, Failure, Result, Workflow, WorkflowError, workflow};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

#[derive(Serialize, Deserialize)]
struct Order {
    items: Vec<Item>,
}

#[derive(Serialize, Deserialize)]
struct Item {
    name: String,
    price: u64,
}

#[derive(Serialize, Deserialize)]
struct Receipt {
    left: u64,
}

/// Is paid by updates, and shipped by a signal.
fn order() -> Workflow<Order, Vec<String>> {
    let order = workflow("order").validate("pay", |_, amount: &u64| match amount {
        0 => Err(Failure::new("nothing is no payment").with_code("order.nothing")),
        _ => Ok(()),
    });
    order.run(async |ctx: Ctx, order: Order| {
        let mut left = order.items.iter().map(|item| item.price).sum::<u64>();
        ctx.publish("receipt", &Receipt { left }).await?;
        while left > 0 {
            let request = ctx.receive_update::<u64, Receipt>("pay").await?;
            if request.value > left {
                request.refuse(Failure::new("too much").with_code("order.too_much")).await;
                continue;
            }
            left -= request.value;
            ctx.publish("receipt", &Receipt { left }).await?;
            request.answer(&Receipt { left }).await?;
        }
        let address = ctx.receive::<String>("address").await?;
        if address.is_empty() {
            return Err(Failure::new("no address").with_code("order.address"));
        }
        Ok(order.items.iter().map(|item| format!("{} to {address}", item.name)).collect())
    })
}

fn tea(price: u64) -> Value {
    json!({"items": [{"name": "tea", "price": price}]})
}

fn place(result: Result<impl std::fmt::Debug>) -> String {
    match result {
        Err(WorkflowError::Input { workflow, cause: JsonError::Misfit { path, .. } }) => format!("{workflow}: {path}"),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn everything_is_done_by_names_and_json() {
    let test = TestEngine::new(&order(), 1).await.unwrap();
    let engine = test.engine();
    let start = engine.start_by_name("order", tea(5)).id("o").delay(Duration::from_secs(3600));
    let handle = start.tag("vip").attribute("shop", "north").signal("address", &json!("Ada")).await.unwrap();
    let listed =
        engine.list(ExecutionFilter::new().workflow("order").tag("vip").attribute("shop", "north")).await.unwrap();
    assert_eq!(listed.items.len(), 1);
    assert_eq!(engine.query::<Value>("o", "receipt").await.unwrap(), None, "it has not begun");
    let published = handle.wait_until("receipt", |receipt: &Value| receipt["left"] == 5);
    assert_eq!(test.run(published).await.unwrap(), json!({"left": 5}));
    for _ in 0..2 {
        let paid = engine.update::<Value>("o", "pay", &json!(2)).id("first");
        assert_eq!(test.run(paid.into_future()).await.unwrap(), json!({"left": 3}));
    }
    // The validator refuses the first and the last update, the workflow the second.
    for (amount, code) in
        [(json!(0), "order.nothing"), (json!(9), "order.too_much"), (json!("3"), "latchwork.mismatch")]
    {
        match test.run(handle.update::<Value>("pay", &amount).into_future()).await {
            Err(WorkflowError::UpdateRefused { failure, .. }) => assert_eq!(failure.code(), code),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(engine.query::<Value>("o", "receipt").await.unwrap(), Some(json!({"left": 3})));
    test.run(handle.update::<Value>("pay", &json!(3)).into_future()).await.unwrap();
    assert_eq!(test.run(handle.result()).await.unwrap(), json!(["tea to Ada"]));
    // By its id, and by its type as well.
    assert_eq!(engine.handle_by_id("o").result().await.unwrap(), json!(["tea to Ada"]));
    assert_eq!(engine.handle(&order(), "o").result().await.unwrap(), ["tea to Ada"]);
    let ended = engine.signal("o", "address", &json!("Eve")).await;
    assert!(matches!(ended, Err(WorkflowError::Ended { .. })), "{ended:?}");
}

/// A client sends an input that the workflow cannot take: the client gets an error at once, and no execution fails
/// later.
#[tokio::test]
async fn an_input_that_does_not_fit_starts_nothing_and_removes_nothing() {
    let test = TestEngine::new(&order(), 1).await.unwrap();
    let engine = test.engine();
    let bad = json!({"items": [{"name": "tea", "price": 1}, {"name": "milk", "price": "1"}]});
    assert_eq!(place(engine.start_by_name("order", json!({})).id("o").await), "order: ");
    let start = engine.start_by_name("order", &bad).id("o").idempotency_key("k").or_join().or_restart();
    let refused = start.signal("address", &"Ada").await.unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::Invalid);
    let message = "the input of workflow \"order\": the value at items[1].price does not fit: \
                   invalid type: string \"1\", expected u64";
    assert_eq!(refused.to_string(), message);
    let missing = engine.handle_by_id("o").result().await;
    assert!(matches!(missing, Err(WorkflowError::NotFound { .. })), "{missing:?}");
    assert!(engine.list(ExecutionFilter::new()).await.unwrap().items.is_empty());
    // Neither the id nor the key is taken.
    let handle = engine.start_by_name("order", tea(0)).id("o").idempotency_key("k").await.unwrap();
    handle.signal("address", &"Ada").await.unwrap();
    assert_eq!(test.run(handle.result()).await.unwrap(), json!(["tea to Ada"]));
    // A refused start does not remove an execution that has ended; nor is the execution forked.
    assert_eq!(place(engine.start_by_name("order", &bad).id("o").or_restart().await), "order: items[1].price");
    assert_eq!(place(engine.fork("o").input(&bad).await), "order: items[1].price");
    assert_eq!(handle.result().await.unwrap(), json!(["tea to Ada"]));
    // The code that starts the workflow has other types than the registered code.
    let namesake = workflow("order").run(async |_: Ctx, number: u64| Ok(number));
    assert_eq!(place(engine.start(&namesake, 1).await), "order: ");
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Parcel {
    items: Vec<Part>,
    note: Option<String>,
}

#[derive(Serialize, Deserialize)]
struct Part {
    price: u8,
    #[serde(default)]
    sizes: Vec<(u8, u8)>,
}

#[tokio::test]
async fn a_misfit_says_where_it_is() {
    let parcel = workflow("parcel").run(async |_: Ctx, _: Parcel| Ok(()));
    let test = TestEngine::new(&parcel, 1).await.unwrap();
    let start = |value: &Value| test.engine().start_by_name("parcel", value);
    let item = |item: Value| json!({"items": [{"price": 1, "sizes": [[1, 2]]}, item], "note": "], }\" {["});
    for (value, path, message) in [
        (json!(3), "", "invalid type: integer `3`"),
        (json!({}), "", "missing field `items`"),
        (json!({"items": {}}), "items", "invalid type: map"),
        (json!({"items": [], "note": 1}), "note", "invalid type: integer"),
        (json!({"a\"}": "],{", "items": []}), r#"["a\"}"]"#, "unknown field"),
        (item(json!({})), "items[1]", "missing field `price`"),
        (item(json!({"price": "[{ at line 7"})), "items[1].price", "invalid type: string \"[{ at line 7\""),
        (item(json!({"price": 256})), "items[1].price", "invalid value: integer `256`"),
        (item(json!({"price": [1]})), "items[1].price", "invalid type: sequence"),
        (item(json!({"price": 1, "sizes": [[1, 2], [3, -4]]})), "items[1].sizes[1][1]", "invalid value"),
        (item(json!({"price": 1, "sizes": [[1, 2], [3]]})), "items[1].sizes[1]", "invalid length 1"),
    ] {
        match start(&value).await {
            Err(WorkflowError::Input { cause: JsonError::Misfit { path: at, message: why }, .. }) => {
                assert_eq!(at, path, "{value}: {why}");
                assert!(why.starts_with(message) && !why.contains("column"), "{value}: {why}");
            }
            other => panic!("{value}: {other:?}"),
        }
    }
    assert!(start(&item(json!({"price": 2}))).await.is_ok());
}

#[tokio::test]
async fn an_unknown_name_is_an_error_that_says_what_to_do() {
    let test = TestEngine::new(&order(), 1).await.unwrap();
    let engine = test.engine();
    for name in ["Order", "", "orders"] {
        let unknown = engine.start_by_name(name, tea(1)).id("o").await.unwrap_err();
        assert!(matches!(&unknown, WorkflowError::NotRegistered { name: told } if told == name), "{unknown:?}");
        let message = "is not registered with this engine; register it before the engine starts";
        assert_eq!(unknown.to_string(), format!("workflow {name:?} {message}"));
    }
    let missing = WorkflowError::NotFound { id: "o".into() }.to_string();
    assert_eq!(engine.signal("o", "address", &json!("Ada")).await.unwrap_err().to_string(), missing);
    assert_eq!(engine.update::<Value>("o", "pay", &json!(1)).await.unwrap_err().to_string(), missing);
    assert_eq!(engine.query::<Value>("o", "receipt").await.unwrap_err().to_string(), missing);
    assert_eq!(engine.handle_by_id("o").result().await.unwrap_err().to_string(), missing);
}

/// A client that got no answer sends its start again; typed code is another client of the same execution.
#[tokio::test]
async fn starts_by_name_and_by_type_are_the_same_starts() {
    let other = workflow("other").run(async |_: Ctx, input: Value| Ok(input));
    let test = TestEngine::build(1).register(&order()).register(&other).start().await.unwrap();
    let engine = test.engine();
    let typed = || Order { items: vec![Item { name: "tea".into(), price: 0 }] };
    let first = engine.start_by_name("order", tea(0)).idempotency_key("k").await.unwrap();
    let second = engine.start(&order(), typed()).idempotency_key("k").await.unwrap();
    assert_eq!(first.id(), second.id());
    let reused = engine.start_by_name("order", tea(1)).idempotency_key("k").await;
    assert!(matches!(reused, Err(WorkflowError::KeyReused { .. })), "{reused:?}");
    let taken = engine.start_by_name("order", tea(0)).id(first.id()).await;
    assert!(matches!(taken, Err(WorkflowError::AlreadyStarted { .. })), "{taken:?}");
    let joined = engine.start_by_name("order", tea(7)).id(first.id()).or_join().await.unwrap();
    let elsewhere = engine.start_by_name("other", tea(0)).id(first.id()).or_join().await;
    assert!(matches!(elsewhere, Err(WorkflowError::OtherWorkflow { .. })), "{elsewhere:?}");
    // If the execution exists, the signal is sent to it.
    engine.start_by_name("order", tea(0)).id(first.id()).signal("address", &"Ada").await.unwrap();
    assert_eq!(test.run(joined.result()).await.unwrap(), json!(["tea to Ada"]));
    assert_eq!(second.result().await.unwrap(), ["tea to Ada"]);
    let again = engine.start_by_name("order", tea(0)).id(first.id()).or_restart().await.unwrap();
    again.signal("address", &"Eve").await.unwrap();
    assert_eq!(test.run(again.result()).await.unwrap(), json!(["tea to Eve"]));
}

/// The answer to a start is lost, a deployment changes the workflow's input type, and the client sends the start again.
#[tokio::test]
async fn a_repeated_start_finds_its_execution_though_the_input_type_has_changed() {
    let store = Store::memory().await.unwrap();
    let before = Engine::on(&store).register(&order()).start().await.unwrap();
    let id = before.start_by_name("order", tea(0)).id("o").idempotency_key("k").await.unwrap().id().clone();
    before.handle_by_id(&id).signal("address", &"Ada").await.unwrap();
    assert_eq!(before.handle_by_id(&id).result().await.unwrap(), json!(["tea to Ada"]));
    before.stop();
    let changed = workflow("order").run(async |_: Ctx, number: u64| Ok(number));
    let after = Engine::on(&store).register(&changed).start().await.unwrap();
    let repeated = after.start_by_name("order", tea(0)).idempotency_key("k").await.unwrap();
    assert_eq!(repeated.result().await.unwrap(), json!(["tea to Ada"]));
    let joined = after.start_by_name("order", tea(0)).id("o").or_join().await.unwrap();
    assert_eq!(joined.result().await.unwrap(), json!(["tea to Ada"]));
    assert_eq!(place(after.start_by_name("order", tea(0)).await), "order: ");
}

#[tokio::test]
async fn the_result_of_an_execution_that_failed_or_was_cancelled_says_so() {
    let test = TestEngine::new(&order(), 1).await.unwrap();
    let engine = test.engine();
    let fails = engine.start_by_name("order", tea(0)).id("fails").signal("address", &json!("")).await.unwrap();
    let wrong = engine.start_by_name("order", tea(0)).id("wrong").signal("address", &json!(1)).await.unwrap();
    let waits = engine.start_by_name("order", tea(1)).id("waits").await.unwrap();
    engine.cancel("waits", "out of tea").await.unwrap();
    for (handle, code) in [(fails, "order.address"), (wrong, "latchwork.mismatch")] {
        // While a caller waits for it, and after its end.
        for handle in [&handle, &engine.handle_by_id(handle.id())] {
            match test.run(handle.result()).await {
                Err(WorkflowError::Failed { failure, .. }) => assert_eq!(failure.code(), code),
                other => panic!("{other:?}"),
            }
        }
    }
    for handle in [&waits, &engine.handle_by_id("waits")] {
        match test.run(handle.result()).await {
            Err(WorkflowError::Cancelled { reason, .. }) => assert_eq!(reason, "out of tea"),
            other => panic!("{other:?}"),
        }
    }
}
