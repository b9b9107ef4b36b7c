//! Changes that rest on those of a block beside them, and how often a state was changed, over interruptions.

use std::collections::BTreeMap;
use std::time::Duration;

use latchwork::flow::{FlowEvent, RequestHandle, handler, sequencer};
use latchwork::store::Store;
use latchwork::workflow::Engine;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::{Log, only};

#[derive(Default, Serialize, Deserialize, JsonSchema)]
struct Stock {
    shelves: BTreeMap<String, Shelf>,
    counted: u32,
}

/// Without defaults: a shelf is there as a whole, or not at all.
#[derive(Serialize, Deserialize, JsonSchema)]
struct Shelf {
    place: String,
    pieces: i64,
    labels: Vec<String>,
}

async fn checkpoint(request: &RequestHandle) -> serde_json::Value {
    request.checkpoints().await.unwrap().remove("chain").unwrap_or_default()
}

/// One block puts up a shelf and waits; the block beside it fills that shelf and ends. The engine stops in between.
#[tokio::test]
async fn a_change_that_rests_on_one_of_a_block_that_has_not_ended_is_kept_until_that_has() {
    let bodies = Log::default();
    let (builds, fills) = (bodies.clone(), bodies.clone());
    let builds = handler("builds").needs::<Stock>().run(move |ctx, value: i64| {
        let bodies = builds.clone();
        async move {
            bodies.add("builds");
            let shelf = json!({"place": "left", "pieces": 1, "labels": []});
            ctx.sequencer().set_record("shelves", "a", shelf).await?;
            ctx.receive::<()>("go").await?;
            ctx.sequencer().inc([("counted", 1)]).await?;
            Ok(value)
        }
    });
    let fills = handler("fills").needs::<Stock>().run(move |ctx, value: i64| {
        let bodies = fills.clone();
        async move {
            while ctx.sequencer().state().shelves.is_empty() {
                tokio::task::yield_now().await;
            }
            bodies.add("fills");
            ctx.sequencer().inc([("shelves.a.pieces", 5)]).await?;
            ctx.sequencer().push("shelves.a.labels", "full").await?;
            Ok(value)
        }
    });
    let chain = sequencer("chain").state::<Stock>().parallel((&builds, &fills));
    let chain = chain.map(|_, ctx| ctx.state().shelves["a"].pieces * 10 + i64::from(ctx.state().counted));
    let flow = only(chain.build().unwrap());
    let store = Store::memory().await.unwrap();
    let engine = Engine::on(&store).flow(&flow).start().await.unwrap();
    let request = engine.flow(&flow).run("run", 1).id("r").await.unwrap();
    while checkpoint(&request).await.is_null() {
        store.env().sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(checkpoint(&request).await, json!({"shelves": {}, "counted": 0}), "it fits the type");
    engine.stop();
    drop(engine);

    let engine = Engine::on(&store).flow(&flow).start().await.unwrap();
    let request = engine.flow(&flow).request("r");
    engine.signal("r", "go", &()).await.unwrap();
    let output = tokio::time::timeout(Duration::from_secs(20), request.result::<i64>()).await.expect("it ends");
    assert_eq!(output.unwrap(), 61, "one piece, and the five of the block that had ended");
    assert_eq!((bodies.count("fills"), bodies.count("builds") > 1), (1, true), "{:?}", bodies.all());
    let shelf = json!({"place": "left", "pieces": 6, "labels": ["full"]});
    assert_eq!(checkpoint(&request).await, json!({"shelves": {"a": shelf}, "counted": 1}));
}

#[tokio::test]
async fn the_rev_of_a_state_rises_over_interruptions() {
    let log = Log::default();
    let counts = |name: &str| {
        let log = log.clone();
        handler(name).needs::<Stock>().run(move |ctx, value: i64| {
            let log = log.clone();
            async move {
                ctx.sequencer().inc([("counted", 1)]).await?;
                log.add(&format!("rev {}", ctx.sequencer().rev()));
                // Out of memory: the next block runs in another stay.
                ctx.sleep(Duration::from_secs(3600)).await?;
                Ok(value + 1)
            }
        })
    };
    let chain = sequencer("chain").state::<Stock>().step(&counts("a")).step(&counts("b")).step(&counts("c"));
    let flow = only(chain.build().unwrap());
    let test = super::test_engine(&flow).await;
    let engine = test.engine().clone();
    let revs = test.run(async {
        let request = engine.flow(&flow).run("run", 1).id("r").await.unwrap();
        request.result::<i64>().await.unwrap();
        let (mut revs, mut events) = (Vec::new(), request.events());
        while let Some(event) = events.next().await.unwrap() {
            if let FlowEvent::StateChange { rev, .. } = event.event {
                revs.push(rev);
            }
        }
        revs
    });
    assert_eq!(revs.await, [1, 2, 3]);
    assert_eq!(log.all().last().unwrap(), "rev 3", "{:?}", log.all());
}

/// Events and checkpoints that a newer program has stored.
#[tokio::test]
async fn events_and_checkpoints_of_a_newer_version_are_refused() {
    let counts = handler("counts").needs::<Stock>().run(async |ctx, value: i64| {
        ctx.sequencer().inc([("counted", 1)]).await?;
        Ok(value)
    });
    let waits = handler("waits").run(async |ctx, value: i64| {
        ctx.receive::<()>("go").await?;
        Ok(value)
    });
    let flow = only(sequencer("chain").state::<Stock>().step(&counts).step(&waits).build().unwrap());
    let store = Store::memory().await.unwrap();
    let engine = Engine::on(&store).flow(&flow).start().await.unwrap();
    let request = engine.flow(&flow).run("run", 1).id("r").await.unwrap();
    while checkpoint(&request).await.is_null() || engine.residents() > 0 {
        store.env().sleep(Duration::from_millis(1)).await;
    }
    engine.stop();
    assert!(super::newer(&store, "workflow.kept", b"{\"type\"").await > 2, "events");
    assert_eq!(super::newer(&store, "workflow.kept", b"{\"state\"").await, 1, "a checkpoint");

    let engine = Engine::on(&store).flow(&flow).start().await.unwrap();
    let request = engine.flow(&flow).request("r");
    let told = "has version 2; this program reads versions 1 to 1: use a newer program";
    let refused = request.events().next().await.unwrap_err();
    assert!(refused.to_string().contains(told), "{refused}");
    let refused = request.checkpoints().await.unwrap_err();
    assert!(refused.to_string().contains(told), "{refused}");
    engine.signal("r", "go", &()).await.unwrap();
    let reason = loop {
        match engine.parked().await.unwrap().pop() {
            Some((_, reason)) => break reason,
            None => tokio::task::yield_now().await,
        }
    };
    assert!(reason.contains("checkpoint chain/ of") && reason.contains(told), "{reason}");
}
