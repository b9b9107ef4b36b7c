//! More than a commit can hold: blocks inside one, changes of one body, checkpoints.

// Bodies take real time.
#![allow(clippy::disallowed_methods)]

use std::time::Duration;

use latchwork::flow::{Block, Flow, FlowEvent, RequestHandle, flow, handler, sequencer};
use latchwork::store::Store;
use latchwork::workflow::Engine;
use serde_json::{Value, json};

use super::{Log, Tally, TotalPart, add, only, tally};

/// More than a commit can hold.
const MANY: i64 = 11_000;

/// Runs a request to its end, and fails if it is parked.
async fn run(flow: &Flow) -> (i64, RequestHandle, Engine) {
    let engine = Engine::on(&Store::memory().await.unwrap()).flow(flow).start().await.unwrap();
    let request = engine.flow(flow).run("run", MANY).id("r").await.unwrap();
    let parked = async {
        loop {
            if let Some((_, reason)) = engine.parked().await.unwrap().into_iter().next() {
                panic!("it is parked: {reason}");
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let output = tokio::select! {
        output = request.result::<i64>() => output.unwrap(),
        () = parked => 0,
    };
    (output, request, engine)
}

/// A block for each of many items, each with a state of its own, inside a sequencer.
fn crowd(name: &str) -> Block<i64, i64> {
    let item = handler("item").state::<Tally>().run(async |ctx, value: i64| {
        ctx.own::<TotalPart>().inc([("total", value)]).await?;
        Ok(value)
    });
    let crowd = sequencer(name).map(|many: i64, _| (0..many).collect::<Vec<i64>>()).for_each(1000, &item);
    crowd.map(|list: Vec<i64>, _| list.len() as i64).build().unwrap()
}

#[tokio::test]
async fn a_sequencer_that_holds_more_than_a_commit_can_remove_ends_and_is_cleared_away() {
    let log = Log::default();
    let chain = sequencer("chain").state::<Tally>().step(&crowd("crowd")).step(&add("after", &log));
    let flow = flow("test").action("run", chain.build().unwrap()).cleanup_checkpoints_on_terminal().build().unwrap();
    let (output, request, engine) = run(&flow).await;
    assert_eq!(output, MANY + 1);
    let left = engine.history("r").await.unwrap().operations.len();
    assert!(left < 10, "{left} entries are left");
    assert!(request.checkpoints().await.unwrap().is_empty());
}

#[tokio::test]
async fn a_round_that_holds_more_than_a_commit_can_remove_ends_and_is_cleared_away() {
    let log = Log::default();
    let round = sequencer("round").step(&crowd("crowd")).step(&add("counts", &log)).build().unwrap();
    let chain = sequencer("chain").state::<Tally>().do_while(|_, ctx| ctx.state().total < 2, &round);
    let (output, request, engine) = run(&only(chain.step(&add("after", &log)).build().unwrap())).await;
    assert_eq!((output, log.all()), (MANY + 3, ["counts", "counts", "after"].map(String::from).to_vec()));
    let left = engine.history("r").await.unwrap().operations.len();
    assert!(left < 10, "{left} entries are left");
    assert_eq!(request.checkpoints().await.unwrap().keys().collect::<Vec<_>>(), ["chain"]);
}

/// Applies a JSON merge patch (RFC 7396).
fn merge(target: &mut Value, patch: Value) {
    let Value::Object(fields) = patch else { return *target = patch };
    for (key, value) in fields {
        match value {
            Value::Null => drop(target.as_object_mut().unwrap().remove(&key)),
            value => merge(&mut target[key], value),
        }
    }
}

#[tokio::test]
async fn a_body_may_change_its_state_more_often_than_a_commit_can_tell() {
    let counts = handler("counts").needs::<TotalPart>().run(async |ctx, many: i64| {
        for number in 0..many {
            ctx.sequencer().inc([(&*format!("by.{}", number % 7), 1), ("total", 1)]).await?;
        }
        ctx.sequencer().delete_record("by", "3").await?;
        Ok(ctx.sequencer().state().total)
    });
    let chain = sequencer("chain").state::<Tally>().step(&counts).build().unwrap();
    let (output, request, _) = run(&only(chain)).await;
    assert_eq!(output, MANY);
    let state = tally(&request.checkpoints().await.unwrap(), "chain");
    assert_eq!((state.total, state.by.len(), state.by["0"]), (MANY, 6, 1572));
    // The stream tells of the same state, in fewer events.
    let (mut told, mut count, mut last, mut events) =
        (json!({"total": 0, "seen": [], "by": {}}), 0, 0, request.events());
    while let Some(event) = events.next().await.unwrap() {
        if let FlowEvent::StateChange { operation, delta, rev, path, .. } = event.event {
            assert!(path.is_empty() && rev > last, "{operation} {rev}");
            merge(&mut told, delta);
            (count, last) = (count + 1, rev);
        }
    }
    assert!((2..600).contains(&count), "{count} events");
    assert_eq!((told, last), (json!({"total": MANY, "seen": [], "by": state.by}), MANY as u64 + 1));
}

#[tokio::test]
async fn an_ephemeral_sequencer_may_change_states_more_often_than_a_commit_can_tell() {
    let log = Log::default();
    let inner = sequencer("inner").state::<Tally>().step(&add("a", &log)).build().unwrap();
    let quick = sequencer("quick").ephemeral().do_until(|v, _| *v >= 2 * MANY, &inner).tap(&add("b", &log));
    let outer =
        handler("counts").needs::<TotalPart>().tap(async |ctx, _: i64| ctx.sequencer().inc([("total", 1)]).await);
    let quick = quick.do_while(|v, _| *v < 0, &add("never", &log)).tap(&outer).build().unwrap();
    let (output, request, _) = run(&only(sequencer("chain").state::<Tally>().step(&quick).build().unwrap())).await;
    assert_eq!(output, 2 * MANY);
    assert_eq!(tally(&request.checkpoints().await.unwrap(), "chain").total, 2);
    let (mut count, mut events) = (0, request.events());
    while events.next().await.unwrap().is_some() {
        count += 1;
    }
    assert!(count < 20, "{count} events");
}
