//! What the directories hold: one execution of every kind, half-way, and the records around it. The code here must
//! continue every directory, so operations that a directory has recorded must not change.

use std::time::Duration;

use latchwork::entity::{Add, Entities, EntityError, Query, TypeSpec, Update};
use latchwork::lock::{LockRefused, StoredLocks};
use latchwork::store::{Store, VirtualClock};
use latchwork::workflow::{
    Cancelled, ChildTimedOut, Close, Ctx, Engine, ExecutionState, Executions, Failure, Kind, Retry, WaitsFor, Workflow,
    WorkflowBuilder, WorkflowError, workflow,
};
use latchwork::{Value, json};
use serde::{Deserialize, Serialize};

use super::as_time_goes_by;

pub(super) const SECOND: Duration = Duration::from_secs(1);
pub(super) const DAY: Duration = Duration::from_secs(24 * 60 * 60);

#[derive(Debug, PartialEq, Serialize, Deserialize, thiserror::Error)]
#[error("{missing} is missing")]
struct Broke {
    missing: u32,
}

/// Keeps ended executions for longer than a test takes.
pub(super) fn kept(name: &str) -> WorkflowBuilder {
    workflow(name).keep(100 * 365 * DAY)
}

fn sleeper() -> Workflow<u32, u32> {
    kept("sleeper").run(async |ctx: Ctx, n: u32| {
        let once = ctx.run("once", async || Ok(n)).await?;
        ctx.sleep(DAY).await?;
        Ok(once + 1)
    })
}

/// Communicates in every possible way, and waits for messages that were sent before and for messages that were not.
fn talker() -> Workflow<(), Value> {
    kept("talker").run(async |ctx: Ctx, ()| {
        ctx.tag("golden").await?;
        ctx.set_attribute("size", 3).await?;
        let asked = ctx.receive_update::<u32, u32>("add").await?;
        let sum = asked.value + 1;
        asked.answer(&sum).await?;
        let token = ctx.completion::<u32>("done").await;
        ctx.publish("token", &token.token()).await?;
        let on: u32 = ctx.receive("on").await?;
        let early: u32 = ctx.receive("early").await?;
        Ok(json!([sum, on, early, token.wait().await?]))
    })
}

/// Holds a lock until it is signalled.
fn holder() -> Workflow<String, u32> {
    kept("holder").run(async |ctx: Ctx, lock: String| {
        let guard = ctx.mutex(lock.as_str()).acquire().await?;
        let on: u32 = ctx.receive("on").await?;
        guard.release().await?;
        Ok(on)
    })
}

/// Takes longer than its time limit.
fn late() -> Workflow<(), ()> {
    kept("late").timeout(SECOND).run(async |ctx: Ctx, ()| ctx.receive("never").await)
}

fn parent() -> Workflow<(), u32> {
    kept("parent").run(async |ctx: Ctx, ()| {
        let child = ctx.child(&holder(), "child's".into()).id("child").close(Close::Await).start().await?;
        Ok(child.result().await? + 1)
    })
}

/// Fails in every possible way, and returns the failures after it has been replayed.
fn failures() -> Workflow<(), Vec<String>> {
    kept("failures").run(async |ctx: Ctx, ()| {
        let timeout = ctx.receive::<u32>("never").timeout(SECOND).await?;
        let broke = ctx.run("broke", async || Err::<(), _>(Failure::typed(Broke { missing: 7 })));
        let broke = broke.retry(Retry::never()).await.unwrap_err();
        let coded = ctx.run("coded", async || Err::<(), _>(Failure::new("no").with_code("golden.no")));
        let coded = coded.retry(Retry::never()).await.unwrap_err();
        let parsed = ctx.run("parse", async || Ok("x".parse::<u32>()?)).retry(Retry::never()).await.unwrap_err();
        let _guard = ctx.mutex("refused").acquire().await?;
        let refused = ctx.mutex("refused").acquire().await.unwrap_err();
        let child = ctx.child(&late(), ()).id("late child").start().await?.result().await.unwrap_err();
        ctx.receive::<u32>("on").await?;
        assert_eq!(timeout, None);
        assert_eq!(broke.get(), Some(Broke { missing: 7 }));
        assert!(matches!(refused.get(), Some(LockRefused::AlreadyHeld { .. })));
        assert_eq!(child.get::<ChildTimedOut>().unwrap().id, "late child");
        Ok([&broke, &coded, &parsed, &refused, &child].map(|failure| failure.code().to_string()).to_vec())
    })
}

/// Is cancelled, and takes a day to clean up.
fn cleaner() -> Workflow<(), ()> {
    kept("cleaner").run(async |ctx: Ctx, ()| {
        let failure = ctx.receive::<()>("never").await.unwrap_err();
        ctx.shielded().sleep(DAY).await?;
        assert_eq!(failure.get::<Cancelled>().unwrap().reason, "enough");
        Err(failure)
    })
}

/// Changes something that a compensation undoes when it ends.
fn journey() -> Workflow<(), ()> {
    kept("journey").run(async |ctx: Ctx, ()| {
        let booked = ctx.saga(async |saga| {
            saga.compensate("undo", async || Ok(()));
            ctx.state().global::<i64>("booked").increment(1).await?;
            ctx.receive::<()>("on").await?;
            Err::<(), _>(Failure::new("no car"))
        });
        booked.await
    })
}

/// Changes entities and slots, fails the first attempt of a step, and continues as new.
fn worker() -> Workflow<u32, u32> {
    kept("worker").run(async |ctx: Ctx, run: u32| {
        if run == 0 {
            return ctx.continue_as_new(1_u32).await;
        }
        let done = ctx.transaction("paid", async |tx| {
            tx.update(Update::new("b").data(json!({"email": "b", "age": 31})));
            tx.global::<u32>("paid").increment(run).await?;
            Ok(1_u32)
        });
        let done = done.await?;
        ctx.state().execution::<Value>("own").set(json!({"x": [1, null]})).await?;
        let tried = ctx.run_with("tried", async |attempt| match attempt.number {
            1 => Err(Failure::new("not yet")),
            number => Ok(number),
        });
        Ok(done + tried.retry(Retry::exponential().first_pause(DAY)).await?)
    })
}

/// Parks at an operation that only the repaired code can do.
fn parks(is_mended: bool) -> Workflow<(), u32> {
    kept("parks").run(move |ctx: Ctx, ()| async move {
        let n = ctx.run("first", async || Ok(1)).await?;
        assert!(is_mended, "it is not mended");
        Ok(n)
    })
}

async fn engine(store: &Store, is_mended: bool) -> Engine {
    let engine = Engine::on(store).register(&sleeper()).register(&talker()).register(&holder()).register(&late());
    let engine = engine.register(&parent()).register(&failures()).register(&cleaner()).register(&journey());
    engine.register(&worker()).register(&parks(is_mended)).start().await.unwrap()
}

/// Lets other tasks run, and a little time pass.
pub(super) async fn pause(clock: &VirtualClock) {
    for _ in 0..100 {
        tokio::task::yield_now().await;
    }
    clock.advance(Duration::from_micros(100));
}

/// Waits until every started execution waits for something that does not come, or for a day.
pub(super) async fn until_all_wait(engine: &Engine, clock: &VirtualClock) {
    while engine.residents() > 0 {
        pause(clock).await;
    }
}

pub(super) async fn waits_for(engine: &Engine, id: &str) -> Vec<WaitsFor> {
    engine.why(id).await.unwrap().waits.into_iter().map(|wait| wait.what).collect()
}

/// Writes everything.
pub(super) async fn begin(store: &Store, clock: &VirtualClock) {
    let engine = engine(store, false).await;
    let entities = engine.entities();
    entities.declare(TypeSpec::new("person").unique(["data.email"]).index(["data.age"])).await.unwrap();
    for (id, age) in [("a", 20), ("b", 30), ("c", 40)] {
        entities.add(Add::new("person").id(id).data(json!({"email": id, "age": age}))).await.unwrap();
    }
    entities.remove("c").await.unwrap();
    let user = engine.states().user("u").once("first");
    user.set_state(json!({"visits": 1})).await.unwrap();
    engine.states().org("gone").set_state(json!(1)).await.unwrap();
    engine.states().org("gone").delete_state().await.unwrap();
    // A session that ends with the process: it holds a lock and waits for another.
    let session = engine.locks().session().lease(60 * SECOND).label("golden").await.unwrap();
    let guard = engine.mutex("held").by(&session).acquire().await.unwrap();
    let taken = engine.semaphore("taken", 3).by(&session).acquire_many(2).await.unwrap();
    engine.locks().force_release("taken", taken.token().number(), "golden").await.unwrap();
    engine.start(&holder(), "execution's".into()).id("holds").await.unwrap();
    until_all_wait(&engine, clock).await;
    {
        let lock = engine.mutex("execution's").by(&session);
        let mut waits = Box::pin(async move { lock.acquire().await });
        while engine.locks().inspect("execution's").await.unwrap().waiting == 0 {
            tokio::select! {
                biased;
                _ = &mut waits => unreachable!("it is held"),
                () = pause(clock) => {}
            }
        }
        std::mem::forget(waits);
    }
    engine.start(&sleeper(), 1).id("sleeps").idempotency_key("k").await.unwrap();
    engine.start(&sleeper(), 5).id("begins later").delay(DAY).await.unwrap();
    engine.start(&talker(), ()).id("talks").tag("started").await.unwrap();
    engine.start(&holder(), "held".into()).id("waits for a session").await.unwrap();
    engine.start(&holder(), "execution's".into()).id("waits for an execution").await.unwrap();
    engine.start(&parent(), ()).id("parent").await.unwrap();
    engine.start(&late(), ()).id("late").await.unwrap();
    engine.start(&failures(), ()).id("fails").await.unwrap();
    engine.start(&cleaner(), ()).id("cleans").await.unwrap();
    engine.start(&holder(), "free".into()).id("cancelled").await.unwrap();
    engine.start(&journey(), ()).id("journey").await.unwrap();
    engine.start(&worker(), 0).id("works").await.unwrap();
    engine.start(&parks(false), ()).id("parked").await.unwrap();
    engine.start(&holder(), "done".into()).id("completed").signal("on", &9_u32).await.unwrap();
    until_all_wait(&engine, clock).await;
    assert_eq!(engine.update::<u32>("talks", "add", &1_u32).id("u").await.unwrap(), 2);
    engine.signal("talks", "early", &4_u32).id("s").await.unwrap();
    engine.cancel("cleans", "enough").await.unwrap();
    engine.cancel("cancelled", "enough").await.unwrap();
    // Everything with a limit of a second times out.
    while waits_for(&engine, "fails").await != [WaitsFor::Signal("on".into())] {
        clock.advance(SECOND / 100);
        pause(clock).await;
    }
    until_all_wait(&engine, clock).await;
    std::mem::forget((guard, taken, session));
    engine.stop();
}

/// Checks what is stored before any execution continues.
pub(super) async fn look(store: &Store) {
    let executions = Executions::on(store).await.unwrap();
    for (id, expected) in [
        ("sleeps", "waiting"),
        ("begins later", "waiting"),
        ("talks", "waiting"),
        ("holds", "waiting"),
        ("waits for a session", "waiting"),
        ("waits for an execution", "waiting"),
        ("parent", "waiting"),
        ("child", "waiting"),
        ("late", "timed_out"),
        ("late child", "timed_out"),
        ("fails", "waiting"),
        ("cleans", "waiting"),
        ("cancelled", "cancelled"),
        ("journey", "waiting"),
        ("works", "waiting"),
        ("parked", "parked"),
        ("completed", "completed"),
    ] {
        let state = match executions.describe(id).await.unwrap().state {
            ExecutionState::Waiting => "waiting",
            ExecutionState::Parked(_) => "parked",
            ExecutionState::Completed(_) => "completed",
            ExecutionState::TimedOut => "timed_out",
            ExecutionState::Cancelled(_) => "cancelled",
            _ => "something else",
        };
        assert_eq!(state, expected, "{id}");
    }
    let talks = executions.describe("talks").await.unwrap();
    assert_eq!(talks.tags.into_iter().collect::<Vec<_>>(), ["golden", "started"]);
    assert_eq!(executions.describe("sleeps").await.unwrap().idempotency_key.as_deref(), Some("k"));
    let locks = StoredLocks::on(store).await.unwrap();
    let held = locks.inspect("held").await.unwrap();
    assert_eq!((held.holders.len(), held.waiters.len()), (1, 1));
    assert_eq!(held.holders[0].label.as_deref(), Some("golden"));
    let held = locks.inspect("execution's").await.unwrap();
    assert_eq!((held.holders.len(), held.waiters.len()), (1, 2));
    assert_eq!(locks.inspect("taken").await.unwrap().forced.len(), 1);
    let entities = Entities::on(store).await.unwrap();
    let found = entities.find(&Query::of("person").filter(json!({"data.age": 31}))).await.unwrap();
    assert_eq!(found.items.iter().map(|found| found.id.as_str()).collect::<Vec<_>>(), ["b"]);
    assert_eq!(entities.get("c").await.unwrap(), None);
    let twice = entities.add(Add::new("person").id("d").data(json!({"email": "a"}))).await;
    assert!(matches!(twice, Err(EntityError::UniqueViolation { .. })), "{twice:?}");
}

/// Lets everything continue to its end.
pub(super) async fn go_on(store: &Store, clock: &VirtualClock) {
    let engine = engine(store, true).await;
    let again = engine.start(&sleeper(), 1).idempotency_key("k").await.unwrap();
    assert_eq!(&**again.id(), "sleeps");
    for id in ["talks", "holds", "waits for a session", "waits for an execution", "child", "fails"] {
        engine.signal(id, "on", &3_u32).await.unwrap();
    }
    engine.signal("journey", "on", &()).await.unwrap();
    engine.signal("talks", "early", &4_u32).id("s").await.unwrap();
    assert_eq!(engine.update::<u32>("talks", "add", &1_u32).id("u").await.unwrap(), 2, "it was answered before");
    let token: String = engine.query("talks", "token").await.unwrap().unwrap();
    engine.complete(&token, &8_u32).await.unwrap();
    engine.resume("parked").await.unwrap();
    as_time_goes_by(clock, ends(&engine)).await;
    let states = engine.states();
    let user = states.user("u").once("first").set_state(json!({"visits": 1})).await.unwrap();
    assert!(user.repeated, "the answer was kept");
    assert_eq!(states.org("gone").get().await.unwrap(), None);
    assert_eq!(states.global().slot::<u32>("paid").get().await.unwrap(), Some(1));
    assert_eq!(states.execution("works").slot::<Value>("own").get().await.unwrap(), Some(json!({"x": [1, null]})));
    let locks = engine.locks().list().limit(100).await.unwrap().items;
    let used: Vec<_> = locks.iter().filter(|lock| lock.used + u32::try_from(lock.waiting).unwrap() > 0).collect();
    assert!(locks.len() >= 6 && used.is_empty(), "{used:?}");
    assert_eq!(engine.parked().await.unwrap(), []);
    engine.stop();
}

/// Checks how each execution ends.
async fn ends(engine: &Engine) {
    for (id, output) in [("sleeps", 2), ("begins later", 6)] {
        assert_eq!(engine.handle(&sleeper(), id).result().await.unwrap(), output, "{id}");
    }
    assert_eq!(engine.handle(&talker(), "talks").result().await.unwrap(), json!([2, 3, 4, 8]));
    for id in ["holds", "waits for a session", "waits for an execution", "child"] {
        assert_eq!(engine.handle(&holder(), id).result().await.unwrap(), 3, "{id}");
    }
    assert_eq!(engine.handle(&holder(), "completed").result().await.unwrap(), 9);
    assert_eq!(engine.handle(&parent(), "parent").result().await.unwrap(), 4);
    assert_eq!(engine.handle(&worker(), "works").result().await.unwrap(), 3);
    assert_eq!(engine.handle(&parks(true), "parked").result().await.unwrap(), 1);
    let codes = ["Broke", "golden.no", "ParseIntError", "latchwork.lock.refused", "latchwork.child.timed_out"];
    assert_eq!(engine.handle(&failures(), "fails").result().await.unwrap(), codes);
    let late = engine.handle(&late(), "late").result().await;
    assert!(matches!(late, Err(WorkflowError::TimedOut { .. })), "{late:?}");
    let cleaned = engine.handle(&cleaner(), "cleans").result().await;
    assert!(matches!(cleaned, Err(WorkflowError::Cancelled { .. })), "{cleaned:?}");
    let cancelled = engine.handle(&holder(), "cancelled").result().await;
    assert!(matches!(cancelled, Err(WorkflowError::Cancelled { .. })), "{cancelled:?}");
    let journey = engine.handle(&journey(), "journey").result().await;
    assert!(
        matches!(&journey, Err(WorkflowError::Failed { failure, .. }) if failure.message() == "no car"),
        "{journey:?}"
    );
    assert!(engine.history("journey").await.unwrap().find(Kind::Step, "undo").is_some());
}
