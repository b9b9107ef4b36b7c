//! What directory 2 holds: limits, queues and buckets in use, gathered starts, and what else came with them. As in
//! `play`, operations that a directory has recorded must not change.

use latchwork::claim::{ActionCtx, Claims, Outcome, StoredClaims};
use latchwork::entity::Add;
use latchwork::store::{Store, VirtualClock};
use latchwork::workflow::{
    Batch, Ctx, Debounce, Engine, ExecutionFilter, ExecutionState, Executions, Finished, Queue, RateLimit, Schedule,
    Supersede, WaitsFor, Workflow, WorkflowError,
};
use latchwork::{Value, json};

use super::as_time_goes_by;
use super::play::{DAY, SECOND, kept, pause, until_all_wait, waits_for};

/// One at a time, and the others in a queue.
fn lined() -> Workflow<u32, u32> {
    kept("lined").concurrency(1).when_full(Queue::new()).run(async |ctx: Ctx, n: u32| {
        let on: u32 = ctx.receive("on").await?;
        Ok(on + n)
    })
}

/// Two in total and one for each key; keys are served in turn.
fn fair() -> Workflow<String, String> {
    let key = |name: &String| name[..1].to_string();
    let both = kept("fair").concurrency(2).concurrency_by(1, key).when_full(Queue::new().fair(key));
    both.run(async |ctx: Ctx, name: String| ctx.receive::<()>("on").await.map(|()| name))
}

/// Two at a time; further starts are rejected.
fn rejecting() -> Workflow<(), ()> {
    kept("rejecting").concurrency(2).run(async |ctx: Ctx, ()| ctx.receive("on").await)
}

fn debounced() -> Workflow<u32, u32> {
    kept("debounced").debounce(Debounce::new(DAY)).run(async |_: Ctx, n: u32| Ok(n))
}

/// The finalizer stores the inputs that it was given.
fn batched() -> Workflow<u32, u32> {
    let batched = kept("batched").batch(Batch::new(10, DAY).by(|n: &u32| (n % 2).to_string()));
    let batched = batched.run(async |_: Ctx, all: Vec<u32>| Ok(all.iter().map(|n| n * 2).collect()));
    batched.finally_batch(async |ctx: Ctx, finished: Finished<Vec<u32>>| {
        ctx.sleep(DAY).await?;
        ctx.state().global::<Vec<Vec<u32>>>("finished").append(finished.input).await?;
        Ok(())
    })
}

/// Once in a hundred days.
fn rated() -> Workflow<(), ()> {
    kept("rated").rate_limit(RateLimit::new(1, 100 * DAY)).run(async |_: Ctx, ()| Ok(()))
}

/// Once a day; further starts are delayed.
fn delayed() -> Workflow<(), u64> {
    kept("delayed").rate_limit(RateLimit::new(1, DAY).delay()).run(async |ctx: Ctx, ()| Ok(ctx.now().await.0))
}

fn asks() -> Workflow<u32, String> {
    kept("asks").run(async |ctx: Ctx, amount: u32| {
        let decision = ctx.review("refund", &json!({"amount": amount}), ["yes", "no"]).await?;
        Ok(format!("{} by {}", decision.option, decision.by))
    })
}

/// Cleans up for a day when it is cancelled.
fn superseded() -> Workflow<u32, u32> {
    kept("superseded").concurrency(1).run(async |ctx: Ctx, n: u32| {
        ctx.state().tree::<u32>("sum").increment(n).await?;
        if n > 1 {
            return Ok(ctx.state().tree::<u32>("sum").get().await?.unwrap_or_default());
        }
        let failure = ctx.receive::<()>("never").await.unwrap_err();
        ctx.shielded().sleep(DAY).await?;
        Err(failure)
    })
}

/// The workflow that the schedule starts.
fn scheduled() -> Workflow<u32, u32> {
    kept("scheduled").run(async |_: Ctx, n: u32| Ok(n))
}

const INVOICES: &str = r#"{
  "workflow": "invoice",
  "meta": { "owning_module": "billing", "entity_type": "invoice", "status_field": "status" },
  "status_types": ["sent", "paying", "paid"],
  "initial": ["sent"],
  "requesters": ["admin"],
  "steps": [
    { "step_id": 10, "step_key": "pay", "status": "sent", "lease": "60s", "action": "Pay",
      "successful_claim_state": ["paying", "sent"], "successful_state": "paid" }
  ]
}"#;

async fn engine(store: &Store) -> Engine {
    let engine = Engine::on(store).register(&lined()).register(&fair()).register(&rejecting()).register(&debounced());
    let engine = engine.register(&batched()).register(&rated()).register(&delayed()).register(&asks());
    engine.register(&superseded()).register(&scheduled()).start().await.unwrap()
}

/// Claims whose action never ends, or ends at once.
async fn claims(engine: &Engine, ends: bool) -> Claims {
    let claims = Claims::on(engine).configure(INVOICES).action("Pay", move |_: ActionCtx| async move {
        if ends { Ok::<_, std::convert::Infallible>(Outcome::output("done")) } else { std::future::pending().await }
    });
    claims.cover("billing", async |claim| claim.recovery).start().await.unwrap()
}

/// Writes everything.
pub(super) async fn begin(store: &Store, clock: &VirtualClock) {
    let engine = engine(store).await;
    for (id, n) in [("holds", 1), ("waits first", 2), ("waits second", 3), ("left the line", 4)] {
        engine.start(&lined(), n).id(id).await.unwrap();
    }
    engine.cancel("left the line", "enough").await.unwrap();
    for name in ["a1", "a2", "a3", "b1", "c1"] {
        engine.start(&fair(), name.into()).id(name).await.unwrap();
    }
    for id in ["has ended", "runs"] {
        engine.start(&rejecting(), ()).id(id).await.unwrap();
    }
    for n in [1, 2, 3] {
        engine.start(&debounced(), n).id("debounced").await.unwrap();
        engine.start(&batched(), n).id(format!("batch {}", n % 2)).await.unwrap();
    }
    // A batch that has ended, and whose finalizer waits.
    engine.start(&batched(), 10).id("batch 0").await.unwrap();
    engine.terminate("batch 0", "enough").await.unwrap();
    engine.start(&rated(), ()).id("rated").await.unwrap();
    for id in ["at once", "a day later"] {
        engine.start(&delayed(), ()).id(id).await.unwrap();
    }
    engine.start(&asks(), 80).id("asks").await.unwrap();
    engine.start(&superseded(), 1).id("superseded").await.unwrap();
    until_all_wait(&engine, clock).await;
    engine.signal("has ended", "on", &()).await.unwrap();
    engine.start(&superseded(), 10).id("superseded").supersede(Supersede::Cancel).await.unwrap();
    assert!(engine.rate_limit("vendor", 1, 100 * DAY).try_acquire().await.unwrap());
    engine.schedules().put(Schedule::every("daily", DAY).workflow(&scheduled(), 7)).await.unwrap();
    let claims = claims(&engine, false).await;
    claims.add("invoice", Add::new("invoice").id("i").data(json!({"status": "sent"}))).await.unwrap();
    let fires = claims.clone();
    let firing = tokio::spawn(async move { fires.fire("invoice", "pay", "i").by("admin").actor("ann").await });
    while StoredClaims::on(store).await.unwrap().get("i").await.unwrap().is_none() {
        pause(clock).await;
    }
    until_all_wait(&engine, clock).await;
    engine.stop();
    firing.abort();
    std::mem::forget(claims);
}

/// Checks what is stored before any execution continues.
pub(super) async fn look(store: &Store) {
    let executions = Executions::on(store).await.unwrap();
    let admission = |of: &str| ExecutionFilter::new().waits_for(WaitsFor::Admission(of.into()));
    for (key, count) in [("lined", 2), ("fair", 1), ("a", 2)] {
        assert_eq!(executions.list(admission(key)).await.unwrap().items.len(), count, "{key}");
    }
    for (id, is_open) in [("holds", true), ("left the line", false), ("has ended", false), ("debounced", true)] {
        let state = executions.describe(id).await.unwrap().state;
        assert_eq!(matches!(state, ExecutionState::Waiting), is_open, "{id}: {state:?}");
    }
    let claim = StoredClaims::on(store).await.unwrap().get("i").await.unwrap().unwrap();
    assert_eq!((&*claim.step, &*claim.claim_into, claim.attempts), ("pay", "paying", 1));
}

/// Lets everything continue to its end.
pub(super) async fn go_on(store: &Store, clock: &VirtualClock) {
    let engine = engine(store).await;
    for (workflow, key, expected) in [
        ("lined", None, (1, 2)),
        ("fair", None, (2, 1)),
        ("fair", Some("a"), (1, 2)),
        ("fair", Some("c"), (1, 0)),
        ("rejecting", None, (1, 0)),
        ("superseded", None, (1, 0)),
    ] {
        let limit = engine.limit_use(workflow, key).await.unwrap();
        assert_eq!((limit.used, limit.waiting), expected, "{workflow} {key:?}");
    }
    let limited = engine.start(&rated(), ()).await;
    assert!(matches!(limited, Err(WorkflowError::RateLimited { .. })), "{limited:?}");
    assert!(!engine.rate_limit("vendor", 1, 100 * DAY).try_acquire().await.unwrap());
    engine.start(&rejecting(), ()).id("fits").await.unwrap();
    assert!(matches!(engine.start(&rejecting(), ()).await, Err(WorkflowError::LimitReached { .. })));
    // Executions that gather take further starts.
    assert_eq!(&**engine.start(&debounced(), 4).await.unwrap().id(), "debounced");
    let third = engine.start(&batched(), 5).await.unwrap();
    assert_eq!((&**third.id(), third.item()), ("batch 1", Some(2)));
    assert_eq!(waits_for(&engine, "asks").await, [WaitsFor::Review("refund".into())]);
    let reviews = engine.reviews().await.unwrap().items;
    assert_eq!((reviews.len(), &reviews[0].question), (1, &json!({"amount": 80})));
    engine.review(&reviews[0].id).decide("yes", "ada", "").await.unwrap();
    for id in ["holds", "waits first", "waits second"] {
        engine.signal(id, "on", &10_u32).await.unwrap();
    }
    for id in ["a1", "a2", "a3", "b1", "c1", "runs", "fits"] {
        engine.signal(id, "on", &()).await.unwrap();
    }
    let claims = claims(&engine, true).await;
    as_time_goes_by(clock, ends(&engine, &claims)).await;
    engine.stop();
}

/// Checks how each execution ends.
async fn ends(engine: &Engine, claims: &Claims) {
    for (id, output) in [("holds", 11), ("waits first", 12), ("waits second", 13)] {
        assert_eq!(engine.handle(&lined(), id).result().await.unwrap(), output, "{id}");
    }
    for name in ["a1", "a2", "a3", "b1", "c1"] {
        assert_eq!(engine.handle(&fair(), name).result().await.unwrap(), name);
    }
    for id in ["has ended", "runs", "fits"] {
        engine.handle(&rejecting(), id).result().await.unwrap();
    }
    assert_eq!(engine.handle(&debounced(), "debounced").result().await.unwrap(), 4);
    for (item, output) in [(0, 2), (1, 6), (2, 10)] {
        assert_eq!(engine.handle(&batched(), "batch 1").of_item(item).result().await.unwrap(), output);
    }
    let first = engine.handle(&delayed(), "at once").result().await.unwrap();
    assert!(engine.handle(&delayed(), "a day later").result().await.unwrap() >= first + DAY.as_micros() as u64);
    assert_eq!(engine.handle(&asks(), "asks").result().await.unwrap(), "yes by ada");
    let result = engine.handle(&superseded(), "superseded").result().await;
    let result = if result.is_err() { engine.handle(&superseded(), "superseded").result().await } else { result };
    assert_eq!(result.unwrap(), 10, "with slots of a tree of its own");
    let env = engine.store().env();
    while engine.schedules().runs("daily").limit(10).await.unwrap().items.is_empty() {
        env.sleep(SECOND).await;
    }
    assert!(!engine.list(ExecutionFilter::new().workflow("scheduled")).await.unwrap().items.is_empty());
    let slot = engine.states().global().slot::<Vec<Vec<u32>>>("finished");
    let mut finished = slot.get().await.unwrap().unwrap_or_default();
    while finished.len() < 2 {
        env.sleep(SECOND).await;
        finished = slot.get().await.unwrap().unwrap_or_default();
    }
    finished.sort();
    assert_eq!(finished, [vec![1, 3, 5], vec![2, 10]]);
    // The process that held the claim is gone: the invoice returns to its earlier status, and is paid now.
    let status = async || -> Value { engine.entities().get("i").await.unwrap().unwrap().data["status"].clone() };
    while status().await != "sent" {
        env.sleep(SECOND).await;
    }
    claims.fire("invoice", "pay", "i").by("admin").actor("ann").await.unwrap();
    assert_eq!(status().await, "paid");
    for (workflow, key) in [("lined", None), ("fair", None), ("fair", Some("a")), ("rejecting", None)] {
        let limit = engine.limit_use(workflow, key).await.unwrap();
        assert_eq!((limit.used, limit.waiting), (0, 0), "{workflow} {key:?}");
    }
    assert_eq!(engine.parked().await.unwrap(), []);
}
