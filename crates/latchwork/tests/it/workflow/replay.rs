//! Replay is checked: code that does not fit the journal parks its execution before any body runs, and no other.

use std::time::Duration;

use latchwork::store::{Env, Limits, Store};
use latchwork::workflow::{Ctx, Engine, Failure, Workflow, WorkflowError, workflow};

type Plan = Workflow<(), String>;

/// Three steps, a sleep during which the code is changed, and a step after it.
fn recorded() -> Plan {
    workflow("plan").run(async |ctx: Ctx, ()| {
        let a = ctx.run("a", async || Ok(1)).input(&1).await?;
        let b = ctx.run("b", async || Ok(2)).await?;
        ctx.sleep(Duration::from_secs(3600)).await?;
        let c = ctx.run("c", async || Ok(3)).await?;
        Ok(format!("{}", a + b + c))
    })
}

/// The same workflow with one thing changed.
fn mutated(number: u32) -> Plan {
    workflow("plan").run(move |ctx: Ctx, ()| async move {
        let step = async |name: &str, value: i32| ctx.run(name, async || Ok(value)).await;
        match number {
            // Renamed, reordered, inserted, dropped, another input, another kind, another length, ended early.
            0 => drop(ctx.run("x", async || Ok(1)).input(&1).await?),
            1 => drop(step("b", 2).await?),
            2 => drop(ctx.now().await),
            3 => ctx.sleep(Duration::from_secs(3600)).await?,
            4 => drop(ctx.run("a", async || Ok(1)).input(&2).await?),
            5 => drop(ctx.random().await),
            6 => return Ok("early".into()),
            7 => drop(ctx.version("v", 1..=1).await),
            _ => drop(ctx.run("a", async || Ok(1)).input(&1).await?),
        }
        match number {
            8 => drop(step("bb", 2).await?),
            9 => ctx.sleep(Duration::from_secs(3600)).await?,
            10 => drop(ctx.uuid().await),
            11 => return Ok("early".into()),
            12 => drop(ctx.run("b", async || Ok(2)).input(&9).await?),
            _ => drop(step("b", 2).await?),
        }
        match number {
            13 => ctx.sleep(Duration::from_secs(60)).await?,
            14 => drop(step("c", 3).await?),
            15 => return Ok("early".into()),
            16 => ctx.sleep_until(latchwork::store::Timestamp(7)).await?,
            17 => drop(ctx.now().await),
            18 => drop(step("b", 2).await?),
            _ => drop(ctx.run("extra", async || Ok(0)).await?),
        }
        Ok("the end".into())
    })
}

async fn settle() {
    for _ in 0..200 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn twenty_mutations_of_the_code_are_parked_and_no_body_runs() {
    for number in 0..20 {
        let store = Store::memory().await.unwrap();
        let engine = Engine::on(&store).register(&recorded()).start().await.unwrap();
        engine.start(&recorded(), ()).id("e").await.unwrap();
        settle().await;
        engine.stop();
        drop(engine);
        // `wake` stands for the timer: it makes the engine load the waiting execution.
        let bodies = std::sync::Arc::new(parking_lot::Mutex::new(Vec::new()));
        let seen = bodies.clone();
        let changed = mutated(number);
        let builder = Engine::on(&store).register(&changed);
        let engine = builder.on_step(move |_, name| seen.lock().push(name.to_string())).start().await.unwrap();
        engine.wake("e").await.unwrap();
        settle().await;
        let parked = engine.parked().await.unwrap();
        let [(id, reason)] = &parked[..] else { panic!("mutation {number}: {parked:?}") };
        assert!(&**id == "e" && reason.contains("journal"), "mutation {number}: {reason}");
        assert!(bodies.lock().is_empty(), "mutation {number} ran {:?}", bodies.lock());
        // It is parked once: the next process leaves it parked.
        engine.stop();
        let engine = Engine::on(&store).register(&changed).start().await.unwrap();
        settle().await;
        assert_eq!(engine.parked().await.unwrap().len(), 1);
        assert_eq!(engine.residents(), 0);
        // With the code that wrote the journal, the execution can continue.
        engine.stop();
        let engine = Engine::on(&store).register(&recorded()).start().await.unwrap();
        engine.resume("e").await.unwrap();
        settle().await;
        assert!(engine.parked().await.unwrap().is_empty());
    }
}

#[tokio::test]
async fn a_workflow_that_panics_is_parked_and_the_engine_continues() {
    let panics = workflow("panics").run(async |ctx: Ctx, when: u32| {
        assert!(when != 0, "at once");
        ctx.run("a", async || Ok(())).await?;
        assert!(when != 1, "later");
        Ok(when)
    });
    let store = Store::memory().await.unwrap();
    let engine = Engine::on(&store).register(&panics).start().await.unwrap();
    for when in 0..2 {
        engine.start(&panics, when).id(format!("{when}")).await.unwrap();
    }
    assert_eq!(engine.start(&panics, 2).await.unwrap().result().await.unwrap(), 2);
    settle().await;
    let parked = engine.parked().await.unwrap();
    let reasons: Vec<&str> = parked.iter().map(|(_, reason)| reason.as_str()).collect();
    assert_eq!(reasons, ["it panicked: at once", "it panicked: later"]);
    engine.terminate("0", "a bug").await.unwrap();
    let ended = engine.handle(&panics, "0").result().await.unwrap_err();
    assert_eq!(ended.to_string(), "execution \"0\" failed: it was terminated: a bug");
    let removals = store.space(latchwork::store::SpaceSpec::new("workflow.removals").keys_used_once()).await.unwrap();
    let view = store.view().await.unwrap();
    let ended = view.scan(&removals.all(), latchwork::store::Order::Ascending, 10).await.unwrap();
    assert_eq!(ended.len(), 2, "a completed and a terminated execution");
    assert!(matches!(engine.resume("0").await, Err(WorkflowError::NotParked { .. })));
    assert!(matches!(engine.resume("x").await, Err(WorkflowError::NotFound { .. })));
}

#[tokio::test]
async fn versions_let_code_change_under_running_executions() {
    let old: Workflow<(), String> = workflow("w").run(async |ctx: Ctx, ()| {
        let version = ctx.version("fee", 1..=1).await;
        ctx.sleep(Duration::from_secs(3600)).await?;
        Ok(format!("{version}"))
    });
    let new: Workflow<(), String> = workflow("w").run(async |ctx: Ctx, ()| {
        let version = ctx.version("fee", 1..=2).await;
        if version >= 2 {
            ctx.run("fee", async || Ok(())).await?;
        }
        ctx.sleep(Duration::from_secs(3600)).await?;
        Ok(format!("{version}"))
    });
    let newest: Workflow<(), String> = workflow("w").run(async |ctx: Ctx, ()| {
        ctx.version("fee", 2..=3).await;
        Ok("x".into())
    });
    let (env, clock) = latchwork::store::Env::seeded(1);
    let store = Store::memory_with(env, latchwork::store::Limits::default()).await.unwrap();
    let engine = Engine::on(&store).register(&old).start().await.unwrap();
    engine.start(&old, ()).id("old").await.unwrap();
    engine.start(&old, ()).id("left").await.unwrap();
    settle().await;
    engine.stop();
    let engine = Engine::on(&store).register(&new).start().await.unwrap();
    engine.start(&new, ()).id("new").await.unwrap();
    settle().await;
    clock.advance(Duration::from_secs(3600));
    settle().await;
    assert_eq!(engine.handle(&new, "old").result().await.unwrap(), "1");
    assert_eq!(engine.handle(&new, "new").result().await.unwrap(), "2");
    engine.stop();
    let engine = Engine::on(&store).register(&newest).start().await.unwrap();
    engine.start(&newest, ()).id("newest").await.unwrap().result().await.unwrap();
}

/// A version marker is added to code that had none: an execution that passed the place before is on the first version.
#[tokio::test]
async fn a_version_can_be_asked_where_nothing_was_asked_before() {
    let before: Workflow<u64, u32> = workflow("w").run(async |ctx: Ctx, hours: u64| {
        ctx.run("a", async || Ok(())).await?;
        ctx.sleep(Duration::from_secs(3600 * hours)).await?;
        ctx.run("b", async || Ok(0)).await
    });
    let after: Workflow<u64, u32> = workflow("w").run(async |ctx: Ctx, hours: u64| {
        ctx.run("a", async || Ok(())).await?;
        let early = ctx.version("fee", 0..=1).await;
        if early == 1 {
            ctx.run("fee", async || Ok(())).await?;
        }
        ctx.sleep(Duration::from_secs(3600 * hours)).await?;
        // No execution has reached this place yet.
        let late = ctx.version("tip", 0..=1).await;
        ctx.run("b", async || Ok(10 * early + late)).await
    });
    let (env, clock) = latchwork::store::Env::seeded(1);
    let store = Store::memory_with(env, latchwork::store::Limits::default()).await.unwrap();
    let engine = Engine::on(&store).register(&before).start().await.unwrap();
    engine.start(&before, 1).id("old").await.unwrap();
    settle().await;
    engine.stop();
    let engine = Engine::on(&store).register(&after).start().await.unwrap();
    engine.start(&after, 1).id("new").await.unwrap();
    settle().await;
    clock.advance(Duration::from_secs(3600));
    settle().await;
    assert!(engine.parked().await.unwrap().is_empty(), "{:?}", engine.parked().await);
    assert_eq!(engine.handle(&after, "old").result().await.unwrap(), 1);
    assert_eq!(engine.handle(&after, "new").result().await.unwrap(), 11);
}

/// A branch has failed by the journal, but would not fail with the current code.
#[tokio::test]
async fn a_branch_that_no_longer_fails_is_parked() {
    let made = |is_new: bool, maps: bool| {
        workflow("w").run(move |ctx: Ctx, ()| async move {
            let one = move |ctx: Ctx, number: u64| async move {
                let done = ctx.run("step", async || Err::<u64, _>(Failure::new("no").not_retryable())).await;
                if is_new || number == 0 { Ok(0) } else { done }
            };
            let done = match maps {
                true => ctx.try_map(0..3, 3, one).await.map(|all| all.len()),
                false => {
                    let second = async |ctx: Ctx| one(ctx, 1).await;
                    ctx.try_join((async |ctx: Ctx| one(ctx, 0).await, second)).await.map(|_| 2)
                }
            };
            ctx.sleep(Duration::from_secs(10)).await?;
            Ok(done.unwrap_or_default())
        })
    };
    for maps in [true, false] {
        let (env, clock) = Env::seeded(1);
        let store = Store::memory_with(env, Limits::default()).await.unwrap();
        let engine = Engine::on(&store).register(&made(false, maps)).start().await.unwrap();
        engine.start(&made(false, maps), ()).id("w").await.unwrap();
        settle().await;
        engine.stop();
        let engine = Engine::on(&store).register(&made(true, maps)).start().await.unwrap();
        clock.advance(Duration::from_secs(60));
        settle().await;
        let parked = engine.parked().await.unwrap();
        assert!(parked[0].1.contains("failed in the journal"), "{parked:?}");
    }
}
