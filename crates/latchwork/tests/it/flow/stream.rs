//! The stream of a request: numbers without gaps, whatever happens, and every reader sees the same events.

use latchwork::flow::{FlowEvent, NumberedEvent, RequestHandle, StepState, handler, sequencer};
use latchwork::store::Store;
use latchwork::workflow::{Engine, ExecutionState};
use serde_json::json;

use super::{Log, Tally, add, only, sleeps, test_engine};

async fn all(request: &RequestHandle) -> Vec<NumberedEvent> {
    let (mut events, mut reader) = (Vec::new(), request.events());
    while let Some(event) = reader.next().await.unwrap() {
        events.push(event);
    }
    events
}

#[tokio::test]
async fn a_stream_tells_what_happened_in_order_and_without_transient_fields() {
    let log = Log::default();
    let mixed = handler("mixed").tap(async |ctx, _: i64| {
        ctx.sequencer().patch(json!({"total": 5, "scratch": 1})).await?;
        ctx.sequencer().patch(json!({"scratch": 2})).await
    });
    let flow = only(sequencer("chain").state::<Tally>().tap(&mixed).step(&add("a", &log)).build().unwrap());
    let test = test_engine(&flow).await;
    let engine = test.engine().clone();
    let events = test.run(async {
        let request = engine.flow(&flow).run("run", 1).id("r").await.unwrap();
        request.result::<i64>().await.unwrap();
        all(&request).await
    });
    let events = events.await;
    let numbers: Vec<u64> = events.iter().map(|event| event.number).collect();
    assert_eq!(numbers, (0..events.len() as u64).collect::<Vec<_>>());
    let told: Vec<serde_json::Value> = events.into_iter().map(|event| json!(event.event)).collect();
    let step = |name: &str, state: &str| json!({"type": "step", "path": name, "kind": "handler", "state": state});
    let change = |operation: &str, path: &str, delta: serde_json::Value, rev: u64| {
        let mut change =
            json!({"type": "state_change", "scope": "chain", "operation": operation, "delta": delta, "rev": rev});
        if !path.is_empty() {
            change["path"] = json!(path);
        }
        change
    };
    let expected = [
        json!({"type": "request_started", "action": "test/run"}),
        step("chain/mixed", "begun"),
        change("patch_state", "", json!({"total": 5}), 1),
        step("chain/mixed", "completed"),
        step("chain/a", "begun"),
        change("inc_state", "", json!({"total": 6, "by": {"a": 1}}), 3),
        change("push_state", "seen", json!(["a"]), 4),
        step("chain/a", "completed"),
        json!({"type": "state_snapshot", "scope": "chain", "state": {"total": 6, "seen": ["a"], "by": {"a": 1}}}),
        json!({"type": "request_ended", "state": {"completed": 2}}),
    ];
    assert_eq!(told, expected);
}

#[tokio::test]
async fn readers_from_any_position_see_the_same_events_during_the_run_and_after_it() {
    let log = Log::default();
    let chain = sequencer("chain").state::<Tally>().do_while(|v, _| *v < 200, &add("a", &log)).build().unwrap();
    let flow = only(chain);
    let engine = Engine::on(&Store::memory().await.unwrap()).flow(&flow).start().await.unwrap();
    let request = engine.flow(&flow).run("run", 0).id("r").await.unwrap();
    let readers = (0..16_u64).map(|reader| {
        let request = request.clone();
        tokio::spawn(async move {
            let (mut seen, mut events): (Vec<NumberedEvent>, _) = (Vec::new(), request.events());
            loop {
                let Some(event) = events.next().await.unwrap() else { return seen };
                seen.push(event);
                // Some readers are slow, and some are interrupted and continue after the last number.
                if reader % 3 == 1 {
                    tokio::task::yield_now().await;
                }
                if reader % 3 == 2 && (seen.len() as u64).is_multiple_of(reader + 5) {
                    events = request.events_after(seen.last().unwrap().number);
                }
            }
        })
    });
    let readers = futures_util::future::join_all(readers).await;
    let after = all(&request).await;
    assert!(matches!(after.last().unwrap().event, FlowEvent::RequestEnded { state: ExecutionState::Completed(_) }));
    for seen in readers {
        assert_eq!(seen.unwrap(), after);
    }
    assert_eq!(request.events_after(after.last().unwrap().number).next().await.unwrap(), None);
}

/// A block that was interrupted tells of its changes once: when it has ended.
#[tokio::test]
async fn a_block_that_runs_again_is_told_of_once() {
    let log = Log::default();
    let chain = sequencer("chain").state::<Tally>().step(&add("a", &log)).step(&sleeps("b", &log)).build().unwrap();
    let flow = only(chain);
    let test = test_engine(&flow).await;
    let engine = test.engine().clone();
    let events = test.run(async {
        let request = engine.flow(&flow).run("run", 1).id("r").await.unwrap();
        request.result::<i64>().await.unwrap();
        all(&request).await
    });
    let events = events.await;
    assert_eq!(log.all(), ["a", "b", "b"], "it was out of memory while it slept");
    let of = |path: &str, state: StepState| {
        let is_it = |event: &FlowEvent| match event {
            FlowEvent::Step { path: its, state: was, .. } => its == path && *was == state,
            _ => false,
        };
        events.iter().filter(|event| is_it(&event.event)).count()
    };
    assert_eq!((of("chain/b", StepState::Begun), of("chain/b", StepState::Completed)), (1, 1));
    let changes = events.iter().filter(|event| matches!(event.event, FlowEvent::StateChange { .. })).count();
    assert_eq!(changes, 4);
}
