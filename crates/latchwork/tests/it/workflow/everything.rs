//! One workflow that uses every operation, under a crash at every commit: each result is recorded once, the output is
//! always the same, every message is received once, and lists agree with the executions at every commit.

use std::time::Duration;

use latchwork::entity::{Add, Update};
use latchwork::json;
use latchwork::testing::Crashes;
use latchwork::workflow::{Close, Ctx, Engine, Failure, First2, Retry, Workflow, workflow};

const MINUTE: Duration = Duration::from_secs(60);

/// A crash counts as an attempt, and there may be many.
fn often() -> Retry {
    Retry::exponential().max_attempts(100)
}

async fn step(ctx: &Ctx, name: &str, value: u32) -> Result<u32, Failure> {
    ctx.run(name, async || Ok(value)).retry(often()).await
}

/// Doubles the number that it receives by a signal.
fn child() -> Workflow<u32, u32> {
    workflow("child").run(async |ctx: Ctx, factor: u32| {
        let number = ctx.receive::<u32>("number").await?;
        ctx.state().global::<u32>("children").increment(1).await?;
        step(&ctx, "multiply", factor * number).await
    })
}

/// Runs apart from its parent.
fn detached() -> Workflow<(), ()> {
    workflow("detached").run(async |ctx: Ctx, ()| {
        ctx.sleep(MINUTE).await?;
        ctx.state().global::<u32>("detached").increment(1).await?;
        Ok(())
    })
}

/// Waits for ever, unless it is cancelled.
fn waits() -> Workflow<(), ()> {
    workflow("waits").run(async |ctx: Ctx, ()| {
        let waited = ctx.receive::<()>("never").await;
        ctx.shielded().state().global::<u32>("cancelled").increment(1).await?;
        waited
    })
}

async fn with_children(ctx: &Ctx) -> Result<u32, Failure> {
    let started = ctx.child(&child(), 2).close(Close::Await).tag("two").start().await?;
    started.signal("number", &21u32).await?;
    ctx.child(&detached(), ()).id("detached").close(Close::Abandon).start().await?;
    let cancelled = ctx.child(&waits(), ()).id("cancelled").start().await?;
    ctx.child(&waits(), ()).id("left").start().await?;
    let product = started.result().await?;
    cancelled.cancel("enough").await?;
    let failure = cancelled.result().await.unwrap_err();
    assert!(failure.message().contains("enough"), "{failure}");
    Ok(product)
}

async fn side_by_side(ctx: &Ctx) -> Result<Vec<u32>, Failure> {
    let (one, seen) = ctx
        .join((
            async |ctx: Ctx| {
                let one = step(&ctx, "one", 1).await?;
                ctx.publish("one", &one).await?;
                Ok::<_, Failure>(one)
            },
            async |ctx: Ctx| ctx.wait_until("one", |one: &u32| *one == 1).await,
        ))
        .await;
    let selected = ctx
        .select((async |ctx: Ctx| ctx.sleep(10 * MINUTE).await, async |ctx: Ctx| ctx.receive::<u32>("first").await))
        .await;
    let First2::Second(first) = selected else { return Err(Failure::new("the signal was to be first")) };
    let (raced, _) = ctx.race([9u64, 3, 6], async |ctx: Ctx, n| ctx.sleep(Duration::from_secs(n)).await).await;
    let mapped = ctx.try_map([4u32, 5, 6], 2, async |ctx: Ctx, n| step(&ctx, "map", n).await).await?;
    Ok([vec![one?, seen?, first?, raced as u32], mapped].concat())
}

async fn from_outside(ctx: &Ctx) -> Result<Vec<u32>, Failure> {
    let mut numbers = vec![ctx.receive::<u32>("number").await?, ctx.receive::<u32>("number").await?];
    let none = ctx.receive::<u32>("none").timeout(MINUTE).await?;
    numbers.push(none.unwrap_or(0));
    for _ in 0..2 {
        let request = ctx.receive_update::<u32, u32>("add").await?;
        let sum = ctx.state().execution::<u32>("sum").increment(request.value).await?.value;
        numbers.push(sum);
        request.answer(&sum).await?;
    }
    let completion = ctx.completion::<u32>("answer").await;
    ctx.publish("token", &completion.token()).await?;
    numbers.push(completion.wait().await?);
    Ok(numbers)
}

async fn long_and_undone(ctx: &Ctx) -> Result<u32, Failure> {
    let from = ctx.run_with("long", async |attempt| {
        let from = attempt.progress::<u32>().unwrap_or(0);
        for part in from..3 {
            attempt.heartbeat(&(part + 1)).await?;
        }
        Ok(3u32)
    });
    let parts = from.heartbeat_timeout(MINUTE).retry(often()).await?;
    let undone = ctx.saga(async |saga| {
        saga.compensate("undo", async || Ok(()));
        step(ctx, "do", 1).await?;
        Err::<(), _>(Failure::new("not this time"))
    });
    assert_eq!(undone.await.unwrap_err().message(), "not this time");
    Ok(parts)
}

fn everything() -> Workflow<u32, Vec<u32>> {
    workflow("everything").run(async |ctx: Ctx, run: u32| {
        if run == 0 {
            ctx.tag("everything").await?;
            return ctx.continue_as_new(1u32).await;
        }
        ctx.set_attribute("amount", 7).await?;
        assert_eq!(ctx.now().await, ctx.now().await.min(ctx.now().await));
        assert_eq!((ctx.version("new", 0..=1).await, ctx.is_cancelled().await), (1, false));
        let _ = (ctx.uuid().await, ctx.random().await);
        let mut numbers = from_outside(&ctx).await?;
        numbers.push(with_children(&ctx).await?);
        numbers.extend(side_by_side(&ctx).await?);
        numbers.push(long_and_undone(&ctx).await?);
        let added = ctx.transaction("add", async |tx| {
            tx.add(Add::new("thing").data(json!({"size": 1})).id("thing"));
            tx.global::<u32>("added").increment(1).await.map(|changed| changed.value).map_err(Failure::from)
        });
        numbers.push(added.await?);
        ctx.transaction("change", async |tx| {
            tx.update(Update::new("thing").data(json!({"size": 2})));
            Ok(())
        })
        .await?;
        ctx.untag("everything").await?;
        ctx.remove_attribute("amount").await?;
        let cancelled = ctx.state().global::<u32>("cancelled").get().await?;
        numbers.push(cancelled.unwrap_or(0));
        Ok(numbers)
    })
}

/// The callers outside, in every process: what they send counts once.
async fn outside(engine: Engine) {
    for number in [1u32, 2] {
        let _ = engine.signal("execution", "number", &number).id(format!("n{number}")).await;
    }
    for number in [10u32, 20] {
        let _ = engine.update::<u32>("execution", "add", &number).id(format!("u{number}")).await;
    }
    let handle = engine.handle(&everything(), "execution");
    if let Ok(token) = handle.wait_until("token", |_: &String| true).await {
        let _ = engine.complete(&token, &5u32).await;
    }
    let _ = engine.signal("execution", "first", &8u32).id("f").await;
}

#[tokio::test]
async fn every_operation_survives_a_crash_at_every_commit() {
    let crashes = Crashes::of(everything, 0).register(child).register(detached).register(waits);
    let crashes = crashes.outside(outside).run(async |outcome| {
        let expected = [1, 2, 0, 10, 30, 5, 42, 1, 1, 8, 1, 4, 5, 6, 3, 1, 1];
        assert_eq!(outcome.result.as_ref().unwrap(), &expected, "{:?} {:?}", outcome.crash, outcome.bodies);
    });
    let crashes = crashes.await;
    assert!(crashes > 80, "{crashes} crashes");
}
