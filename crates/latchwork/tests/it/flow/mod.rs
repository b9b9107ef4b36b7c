//! Tests of flows: verbs, states, traces, suspensions and streams.

mod bad_input;
mod board;
mod changes;
mod crash;
mod failures;
mod held;
mod kill;
mod large;
mod postgres;
mod rounds;
mod sabotage;
mod state;
mod stream;
mod suspensions;
mod verbs;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use latchwork::flow::{Block, Flow, NoOutput, RequestInput, Transient, flow, handler};
use latchwork::store::{Commit, Order, Store};
use latchwork::testing::TestEngine;
use latchwork::workflow::{Engine, Failure};
use parking_lot::Mutex;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// The state of most sequencers here.
#[derive(Debug, Default, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct Tally {
    pub total: i64,
    pub seen: Vec<String>,
    pub by: BTreeMap<String, i64>,
    pub scratch: Transient<u32>,
}

/// The part of it that most handlers need.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
pub struct TotalPart {
    pub total: i64,
}

/// The bodies that have begun, in order.
#[derive(Clone, Default)]
pub struct Log(Arc<Mutex<Vec<String>>>);

impl Log {
    pub fn add(&self, name: &str) {
        self.0.lock().push(name.into());
    }

    pub fn all(&self) -> Vec<String> {
        self.0.lock().clone()
    }

    pub fn count(&self, name: &str) -> usize {
        self.0.lock().iter().filter(|it| *it == name).count()
    }
}

/// Counts itself in the state, and adds one to the value.
pub fn add(name: &str, log: &Log) -> Block<i64, i64> {
    let (own, log) = (name.to_string(), log.clone());
    handler(name).needs::<TotalPart>().run(move |ctx, value: i64| {
        let (own, log) = (own.clone(), log.clone());
        async move {
            log.add(&own);
            ctx.sequencer().inc([("total", 1), (&*format!("by.{own}"), 1)]).await?;
            ctx.sequencer().push("seen", &own).await?;
            Ok(value + 1)
        }
    })
}

/// The same without an output.
pub fn note(name: &str, log: &Log) -> Block<i64, NoOutput> {
    let (own, log) = (name.to_string(), log.clone());
    handler(name).needs::<TotalPart>().tap(move |ctx, _: i64| {
        let (own, log) = (own.clone(), log.clone());
        async move {
            log.add(&own);
            ctx.sequencer().inc([("total", 1), (&*format!("by.{own}"), 1)]).await?;
            ctx.sequencer().push("seen", &own).await
        }
    })
}

/// Fails.
pub fn fails(name: &str, log: &Log) -> Block<i64, i64> {
    let (own, log) = (name.to_string(), log.clone());
    handler(name).run(move |_, _: i64| {
        log.add(&own);
        std::future::ready(Err(Failure::new("it is broken").with_code("broken")))
    })
}

/// Sleeps an hour, and then does what `add` does.
pub fn sleeps(name: &str, log: &Log) -> Block<i64, i64> {
    let (own, log) = (name.to_string(), log.clone());
    handler(name).needs::<TotalPart>().run(move |ctx, value: i64| {
        let (own, log) = (own.clone(), log.clone());
        async move {
            log.add(&own);
            ctx.sequencer().inc([("total", 1)]).await?;
            ctx.sleep(Duration::from_secs(3600)).await?;
            ctx.sequencer().push("seen", &own).await?;
            Ok(value + 1)
        }
    })
}

/// A flow with one action, `run`.
pub fn only(block: Block<i64, i64>) -> Flow {
    flow("test").action("run", block).build().unwrap()
}

pub async fn test_engine(flow: &Flow) -> TestEngine {
    TestEngine::build(1).register(&flow.workflow::<i64, i64>("run").unwrap()).start().await.unwrap()
}

/// Runs a request of the only action, with an engine of its own.
pub async fn requested(flow: &Flow, input: i64) -> (latchwork::flow::Result<i64>, BTreeMap<String, Value>, Engine) {
    let test = test_engine(flow).await;
    let engine = test.engine().clone();
    let done = test.run(async {
        let request = engine.flow(flow).run("run", input).id("r").await.unwrap();
        (request.result::<i64>().await, request.checkpoints().await.unwrap())
    });
    let (result, checkpoints) = done.await;
    (result, checkpoints, engine)
}

/// The failure that a request has ended with.
pub fn failure<T: std::fmt::Debug>(result: latchwork::flow::Result<T>) -> Failure {
    match result {
        Err(latchwork::flow::FlowError::Workflow(latchwork::workflow::WorkflowError::Failed { failure, .. })) => {
            failure
        }
        other => panic!("it has not failed: {other:?}"),
    }
}

/// The state in a checkpoint.
pub fn tally(checkpoints: &BTreeMap<String, Value>, path: &str) -> Tally {
    let mut state = checkpoints.get(path).unwrap_or_else(|| panic!("no {path:?} in {checkpoints:?}")).clone();
    assert!(state.get("scratch").is_none(), "transient fields are not in checkpoints");
    state["scratch"] = json!(0);
    serde_json::from_value(state).unwrap()
}

pub fn input(value: i64) -> RequestInput<i64> {
    RequestInput::new(value)
}

/// Gives the records of a space whose content begins so a newer version. Returns how many.
pub async fn newer(store: &Store, space: &str, begin: &[u8]) -> usize {
    let space = store.spaces().await.unwrap().into_iter().find(|found| found.name() == space).unwrap();
    let mut count = 0;
    for (key, item) in store.view().await.unwrap().scan(&space.all(), Order::Ascending, usize::MAX).await.unwrap() {
        if item.value.len() > 1 && item.value[1..].starts_with(begin) {
            let value = [&[2][..], &item.value[1..]].concat();
            store.commit(Commit::new().put(&key, value)).await.unwrap().applied().unwrap();
            count += 1;
        }
    }
    count
}
