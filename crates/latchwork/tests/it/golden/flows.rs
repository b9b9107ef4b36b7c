//! What directory 3 holds: requests of a flow, one half-way and one that has ended, a task board with tasks in every
//! state, entities with subtypes, and a gate with its marker. As in `play`, what a directory has recorded must not
//! change.

use std::collections::BTreeMap;
use std::time::Duration;

use latchwork::entity::{Add, Entities, Query};
use latchwork::flow::{
    AnswerKind, Board, BoardState, Dispatch, Flow, FlowEvent, NewTask, TaskState, Transient, flow, handler, sequencer,
};
use latchwork::store::{Store, VirtualClock};
use latchwork::workflow::{Ctx, Engine, Failure, Queue, Workflow, WorkflowError};
use latchwork::{Value, json};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::as_time_goes_by;
use super::play::{DAY, kept, until_all_wait};

#[derive(Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
struct Research {
    plan: Vec<String>,
    round: u32,
    findings: BTreeMap<String, String>,
    seen: Transient<bool>,
}

#[derive(Default, Serialize, Deserialize, JsonSchema)]
struct Inner {
    sum: u64,
}

/// Counts the run of a body.
async fn ran(ctx: &Ctx, name: &str) -> Result<(), Failure> {
    ctx.state().global::<u64>(&format!("ran {name}")).increment(1).await?;
    Ok(())
}

/// A tap, a loop, items in a sequencer with a state of its own, a question to a person, and what follows the answer.
/// Each body adds one to a slot, so a body that runs again is seen.
fn research() -> Flow {
    let plan = handler("plan").needs::<Research>().tap(async |ctx, topic: String| {
        ran(&ctx, "plan").await?;
        ctx.sequencer().patch(json!({"plan": ["a", "b", "c"], "seen": true})).await?;
        ctx.session()?.patch_state(json!({"topic": topic})).await?;
        Ok(())
    });
    let add = handler("add").needs::<Inner>().run(async |ctx, value: u64| {
        ran(&ctx, "add").await?;
        ctx.sequencer().inc([("sum", value)]).await?;
        Ok(ctx.sequencer().state().sum)
    });
    let items = sequencer("items").state::<Inner>().for_each(2, &add).build().unwrap();
    let find = handler("find").needs::<Research>().tap(async |ctx, topic: String| {
        let Research { plan, round, .. } = ctx.sequencer().state();
        let found = ctx.run_once("look", async || Ok(format!("{topic} by {}", plan[round as usize]))).await?;
        ran(&ctx, "find").await?;
        ctx.sequencer().patch(json!({"findings": {round.to_string(): found}})).await?;
        ctx.sequencer().inc([("round", 1)]).await
    });
    let ask = handler("ask").run(async |ctx, sums: Vec<u64>| {
        ran(&ctx, "ask").await?;
        let answer =
            ctx.suspend("publish").message("Publish?").allow([AnswerKind::Approve, AnswerKind::Reject]).await?;
        Ok((sums, answer.is_approved()))
    });
    let close = handler("close").needs::<Research>().run(async |ctx, (sums, is_good): (Vec<u64>, bool)| {
        ran(&ctx, "close").await?;
        Ok(json!([sums, is_good, ctx.sequencer().state().findings]))
    });
    let whole = sequencer("research")
        .state::<Research>()
        .tap(&plan)
        .do_while(|_, ctx| ctx.state().round < 3, &find)
        .map(|_, _| vec![1_u64, 2, 3])
        .step(&items)
        .step(&ask)
        .step(&close);
    flow("golden").keep(100 * 365 * DAY).action("run", whole.build().unwrap()).build().unwrap()
}

/// One at a time, and the others in a queue: a gate and its marker.
fn gated() -> Workflow<u32, u32> {
    kept("gated").concurrency(1).when_full(Queue::new()).run(async |ctx: Ctx, n: u32| {
        let on: u32 = ctx.receive("on").await?;
        Ok(on + n)
    })
}

async fn engine(store: &Store) -> Engine {
    Engine::on(store).register(&gated()).flow(&research()).start().await.unwrap()
}

async fn board(store: &Store) -> Board {
    Board::open(store, "golden").await.unwrap().dispatch(Dispatch::Topology).attempts(1)
}

/// Writes everything.
pub(super) async fn begin(store: &Store, clock: &VirtualClock) {
    let engine = engine(store).await;
    for id in ["asks", "has ended"] {
        engine.flow(&research()).run("run", "locks").session("s").id(id).await.unwrap();
    }
    for (id, n) in [("holds", 1), ("waits", 2)] {
        engine.start(&gated(), n).id(id).await.unwrap();
    }
    until_all_wait(&engine, clock).await;
    answer(&engine, "has ended", AnswerKind::Approve).await;
    engine.flow(&research()).request("has ended").result::<Value>().await.unwrap();
    until_all_wait(&engine, clock).await;
    engine.stop();
    let board = board(store).await;
    let tasks = ["done", "failed", "claimed", "ready"].map(|id| NewTask::new(id, json!({"task": id})));
    board.add(tasks).await.unwrap();
    board.add([NewTask::new("blocked", 1).after("failed"), NewTask::new("next", 2).after("claimed")]).await.unwrap();
    let lease = Duration::from_secs(600);
    let done = board.claim("ann", lease).await.unwrap().unwrap();
    board.complete(done, json!("well")).await.unwrap();
    let failed = board.claim("bob", lease).await.unwrap().unwrap();
    board.fail(failed, "it broke").await.unwrap();
    board.claim("cid", lease).await.unwrap().unwrap();
    let entities = Entities::on(store).await.unwrap();
    for (id, subtype) in [("one", "invoice"), ("two", "letter")] {
        entities.add(Add::new("document").subtype(subtype).id(id).data(json!({"title": id}))).await.unwrap();
    }
}

async fn answer(engine: &Engine, id: &str, kind: AnswerKind) {
    let flows = engine.flow(&research());
    let questions = flows.request(id).suspensions().await.unwrap();
    assert_eq!(questions.iter().map(|it| &*it.message).collect::<Vec<_>>(), ["Publish?"]);
    flows.answer(&questions[0].id, kind, (), "ann").await.unwrap();
}

async fn states_of_tasks(board: &Board) -> Vec<(String, &'static str)> {
    let word = |state: &TaskState| match state {
        TaskState::Waiting => "waiting",
        TaskState::Ready => "ready",
        TaskState::Claimed { .. } => "claimed",
        TaskState::Completed(_) => "completed",
        TaskState::Failed(_) => "failed",
        _ => "unknown",
    };
    board.tasks().await.unwrap().into_iter().map(|task| (task.id, word(&task.state))).collect()
}

/// Checks what is stored before anything continues.
pub(super) async fn look(store: &Store) {
    let of = |id: &str, state| (id.to_string(), state);
    let expected = [
        of("blocked", "waiting"),
        of("claimed", "claimed"),
        of("done", "completed"),
        of("failed", "failed"),
        of("next", "waiting"),
        of("ready", "ready"),
    ];
    assert_eq!(states_of_tasks(&board(store).await).await, expected);
    let entities = Entities::on(store).await.unwrap();
    let found = entities.find(Query::of("document").subtype("letter")).await.unwrap();
    assert_eq!(found.items.iter().map(|it| &*it.id).collect::<Vec<_>>(), ["two"]);
}

/// Continues everything to its end.
pub(super) async fn go_on(store: &Store, clock: &VirtualClock) {
    let engine = engine(store).await;
    let flows = engine.flow(&research());
    let ended: Value = flows.request("has ended").result().await.unwrap();
    let findings = json!({"0": "locks by a", "1": "locks by b", "2": "locks by c"});
    assert_eq!(ended, json!([[1, 3, 6], true, findings]));
    answer(&engine, "asks", AnswerKind::Reject).await;
    let request = flows.request("asks");
    let result: Value = as_time_goes_by(clock, request.result()).await.unwrap();
    assert_eq!(result, json!([[1, 3, 6], false, findings]));
    // Blocks that had ended did not run again.
    for (name, count) in [("plan", 2), ("find", 6), ("add", 6), ("close", 2)] {
        let slot = engine.states().global().slot::<u64>(&format!("ran {name}"));
        assert_eq!(slot.get().await.unwrap(), Some(count), "{name}");
    }
    for id in ["asks", "has ended"] {
        let (mut events, mut next) = (flows.request(id).events(), 0);
        while let Some(event) = events.next().await.unwrap() {
            assert_eq!(event.number, next, "{id}");
            next += 1;
            if matches!(event.event, FlowEvent::RequestEnded { .. }) {
                break;
            }
        }
        assert!(next > 20, "{id} has {next} events");
        assert!(!flows.request(id).checkpoints().await.unwrap().is_empty());
    }
    for (id, sum) in [("holds", 11), ("waits", 12)] {
        engine.signal(id, "on", &10_u32).await.unwrap();
        let result: Result<u32, WorkflowError> = as_time_goes_by(clock, engine.handle(&gated(), id).result()).await;
        assert_eq!(result.unwrap(), sum);
    }
    let board = board(store).await;
    clock.advance(DAY);
    // The lease of the claimed task is over, and it was its only attempt.
    let ready = board.claim("ann", DAY).await.unwrap().unwrap();
    assert_eq!(ready.task.id, "ready");
    board.complete(ready, ()).await.unwrap();
    assert!(board.claim("ann", DAY).await.unwrap().is_none());
    assert_eq!(board.state().await.unwrap(), BoardState::BlockedByFailures);
    engine.stop();
}
