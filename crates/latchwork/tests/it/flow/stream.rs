//! The stream of a request: numbers without gaps, whatever happens, and every reader sees the same events.

use std::time::Duration;

use latchwork::flow::{FlowEvent, NumberedEvent, RequestHandle, RequestInput, StepState, flow, handler, sequencer};
use latchwork::store::Store;
use latchwork::testing::Crashes;
use latchwork::workflow::{Engine, ExecutionState};
use serde_json::json;

use super::{Log, Tally, add, fails, only, sleeps, test_engine};

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

/// Each event of a request to a flow, as JSON.
async fn told(flow: &latchwork::flow::Flow) -> Vec<serde_json::Value> {
    let test = test_engine(flow).await;
    let engine = test.engine().clone();
    let events = test.run(async {
        let request = engine.flow(flow).run("run", 1).id("r").await.unwrap();
        let _ = request.result::<i64>().await;
        all(&request).await
    });
    events.await.into_iter().map(|event| json!(event.event)).collect()
}

fn step(path: &str, kind: &str, state: &str) -> serde_json::Value {
    json!({"type": "step", "path": path, "kind": kind, "state": state})
}

#[tokio::test]
async fn a_failure_is_told_with_its_words() {
    let inner = sequencer("inner").step(&fails("breaks", &Log::default())).build().unwrap();
    let told = told(&only(sequencer("chain").step(&inner).build().unwrap())).await;
    let failed = |path: &str, kind: &str| {
        let mut failed = step(path, kind, "failed");
        failed["error"] = json!("it is broken");
        failed
    };
    let expected = [
        json!({"type": "request_started", "action": "test/run"}),
        step("chain/inner", "sequencer", "begun"),
        step("chain/inner/breaks", "handler", "begun"),
        failed("chain/inner/breaks", "handler"),
        failed("chain/inner", "sequencer"),
        json!({"type": "error", "path": "chain/inner/breaks", "code": "broken", "message": "it is broken"}),
    ];
    assert_eq!(&told[..told.len() - 1], &expected);
    assert_eq!(told.last().unwrap()["type"], json!("request_ended"));
}

#[tokio::test]
async fn what_a_block_has_changed_before_it_was_given_up_is_told() {
    let log = Log::default();
    let chain = sequencer("chain").state::<Tally>().race(&[&sleeps("slow", &log), &add("quick", &log)]);
    let told = told(&only(chain.build().unwrap())).await;
    let slow = json!({"type": "state_change", "scope": "chain", "operation": "inc_state",
        "path": "total", "delta": 1, "rev": 1});
    let place = told.iter().position(|event| *event == slow).unwrap_or_else(|| panic!("{told:?}"));
    assert_eq!(told[place + 1], step("chain/slow", "handler", "given_up"));
    assert_eq!(told[place - 1], step("chain/quick", "handler", "completed"));
    let snapshot = json!({"type": "state_snapshot", "scope": "chain",
        "state": {"total": 2, "seen": ["quick"], "by": {"quick": 1}}});
    assert_eq!(told[place + 2], snapshot);
}

/// The stream is removed with its request.
#[tokio::test]
async fn a_stream_is_kept_as_long_as_its_request() {
    let block = sequencer("chain").step(&handler("a").run(async |_, value: i64| Ok(value))).build().unwrap();
    let flow = flow("test").action("run", block).keep(Duration::from_secs(3600)).build().unwrap();
    let test = test_engine(&flow).await;
    let engine = test.engine().clone();
    test.run(async {
        let request = engine.flow(&flow).run("run", 1).id("r").await.unwrap();
        request.result::<i64>().await.unwrap();
        engine.store().env().sleep(Duration::from_secs(3000)).await;
        assert_eq!(all(&request).await.len(), 4);
        engine.store().env().sleep(Duration::from_secs(3000)).await;
        while engine.describe("r").await.is_ok() {
            engine.store().env().sleep(Duration::from_secs(60)).await;
        }
        assert!(request.events().next().await.is_err(), "the request is not known any more");
        let again = engine.flow(&flow).run("run", 2).id("r").await.unwrap();
        again.result::<i64>().await.unwrap();
        let events = all(&again).await;
        assert_eq!((events.len(), events[0].number), (4, 0), "nothing is left of the old stream");
    })
    .await;
}

/// A block that changes stored states, waits out of memory, and changes them again.
fn changes_stored_states() -> latchwork::flow::Flow {
    let visits = handler("visits").run(async |ctx, value: i64| {
        ctx.session()?.inc_state("visits", 1).await?;
        ctx.session()?.inc_state("visits", 0).await?;
        ctx.user()?.patch_state(json!({"name": "ada"})).await?;
        ctx.sleep(Duration::from_secs(3600)).await?;
        let twice = |state: Option<serde_json::Value>| async move {
            let visits = state.unwrap_or_default()["visits"].as_u64().unwrap_or_default();
            Ok::<_, std::convert::Infallible>(Some(json!({"visits": visits * 2})))
        };
        ctx.session()?.atomic_state(twice).await?;
        ctx.request().set_state(json!({"seen": value})).await?;
        Ok(value)
    });
    only(sequencer("chain").step(&visits).build().unwrap())
}

/// What the stream tells of stored states: scope, id, operation, path, delta and rev.
fn stored_changes(events: &[NumberedEvent]) -> Vec<serde_json::Value> {
    let changes = events.iter().filter_map(|event| match &event.event {
        FlowEvent::StateChange { scope, of: Some(of), operation, path, delta, rev, .. } => {
            Some(json!([scope, of, operation, path, delta, rev]))
        }
        _ => None,
    });
    changes.collect()
}

fn expected_stored_changes(request: &str) -> Vec<serde_json::Value> {
    vec![
        json!(["session", "s", "inc_state", "visits", 1, 1]),
        json!(["user", "u", "patch_state", "", {"name": "ada"}, 1]),
        json!(["session", "s", "atomic_state", "", {"visits": 2}, 2]),
        json!(["request", request, "set_state", "", {"seen": 1}, 1]),
    ]
}

/// A change and its event are one commit: wherever a crash comes, each change is told once, at its place.
#[tokio::test]
async fn a_change_of_a_stored_state_is_told_by_the_commit_that_makes_it() {
    let make = || changes_stored_states().workflow::<i64, i64>("run").unwrap();
    let mut input = RequestInput::new(1);
    (input.asker.session, input.asker.user) = (Some("s".into()), Some("u".into()));
    let count = Crashes::of(make, input)
        .run(async |outcome| {
            let crash = &outcome.crash;
            assert_eq!(outcome.result.as_ref().unwrap(), &1, "{crash}");
            let request = outcome.engine().flow(&changes_stored_states()).request("execution");
            let events = all(&request).await;
            assert!(events.iter().zip(0..).all(|(event, number)| event.number == number), "{crash}");
            assert_eq!(stored_changes(&events), expected_stored_changes("execution"), "{crash}");
            let visits = outcome.engine().states().session("s").get().await.unwrap();
            assert_eq!(visits, Some(json!({"visits": 2})), "{crash}");
        })
        .await;
    assert!(count > 8, "{count} crashes");
}

/// Other processes change the same state, so commits are refused and tried again: each change is told once, at the rev
/// that it has landed at.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_that_is_tried_again_is_told_once() {
    const REQUESTS: usize = 20;
    let store = Store::memory().await.unwrap();
    let visits = handler("visits").run(async |ctx, value: i64| {
        for _ in 0..5 {
            ctx.session()?.inc_state("visits", 1).await?;
        }
        Ok(value)
    });
    let flow = only(sequencer("chain").step(&visits).build().unwrap());
    let engine = Engine::on(&store).flow(&flow).start().await.unwrap();
    let other = latchwork::state::States::on(&store).await.unwrap();
    let rival = tokio::spawn(async move {
        for _ in 0..200 {
            while other.session("s").inc_state("visits", 1).await.is_err() {}
        }
    });
    let requests = (0..REQUESTS).map(async |number| {
        let request = engine.flow(&flow).run("run", number as i64).session("s").await.unwrap();
        request.result::<i64>().await.unwrap();
        stored_changes(&all(&request).await)
    });
    let told: Vec<_> = futures_util::future::join_all(requests).await;
    rival.await.unwrap();
    for told in told {
        let revs: Vec<u64> = told.iter().map(|change| change[5].as_u64().unwrap()).collect();
        assert_eq!(revs.len(), 5);
        assert!(revs.is_sorted_by(|a, b| a < b), "{revs:?}");
    }
    let visits = engine.states().session("s").get().await.unwrap();
    assert_eq!(visits, Some(json!({"visits": 200 + REQUESTS * 5})));
}
