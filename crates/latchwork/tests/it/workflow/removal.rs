//! Removals that somebody interferes with, or that a crash interrupts: everything that is to go goes, the next time at
//! the latest.

use std::time::Duration;

use latchwork::testing::Side;
use latchwork::workflow::{Ctx, Engine, Failure, workflow};

use crate::lock::turnstile::Stage;

const SECOND: Duration = Duration::from_secs(1);

/// Ten are due when an engine starts; somebody has one of them start anew at the same time.
#[tokio::test]
async fn one_that_is_started_anew_keeps_no_other_from_being_removed() {
    let short = workflow("short").keep(SECOND).run(async |_: Ctx, number: u32| Ok(number));
    for count in (0..80).step_by(4) {
        let stage = Stage::new(|builder| builder.register(&short)).await;
        stage.slow_down();
        for id in 0..10 {
            stage.engine.start(&short, 1).id(format!("e{id}")).await.unwrap().result().await.unwrap();
        }
        stage.engine.stop();
        stage.clock.advance(2 * SECOND);
        let engine = Engine::on(stage.engine.store()).register(&short).start().await.unwrap();
        for _ in 0..count {
            tokio::task::yield_now().await;
        }
        engine.start(&short, 2).id("e3").or_restart().await.unwrap();
        for _ in 0..5 {
            stage.pass(SECOND).await;
        }
        for id in 0..10 {
            assert!(engine.describe(format!("e{id}")).await.is_err(), "after {count} turns: e{id}");
        }
    }
}

/// What one execution has left is more than a commit removes, and the process ends between the two.
#[tokio::test]
async fn what_is_left_of_a_removal_is_removed_the_next_time() {
    let many = workflow("many").keep(SECOND).run(async |ctx: Ctx, count: u64| {
        for slot in 0..count / 2 {
            ctx.state().execution::<u64>(&format!("{slot}")).set(1).await?;
        }
        if count % 2 == 1 {
            ctx.run("one more", async || Ok::<_, Failure>(())).await?;
        }
        Ok(())
    });
    for count in 994..1003 {
        let stage = Stage::new(|builder| builder.register(&many)).await;
        stage.engine.start(&many, count).id("m").await.unwrap().result().await.unwrap();
        stage.end_after(Some(1));
        stage.pass(2 * SECOND).await;
        stage.engine.stop();
        stage.end_after(None);
        let engine = Engine::on(stage.engine.store()).register(&many).start().await.unwrap();
        stage.pass(SECOND).await;
        assert!(engine.describe("m").await.is_err(), "of {count}");
    }
}

/// The commit that removes an execution is on its way when another one is started under its id, and ends.
#[tokio::test]
async fn whoever_has_the_id_of_one_that_was_removed_is_kept() {
    let short = workflow("short").keep(100 * SECOND).run(async |_: Ctx, number: u32| Ok(number));
    let stage = Stage::new(|builder| builder.register(&short)).await;
    stage.engine.start(&short, 1).id("w").await.unwrap().result().await.unwrap();
    stage.hold_to("workflow.removals", Side::Before).await;
    stage.pass(101 * SECOND).await;
    let (engine, short) = (stage.engine.clone(), short.clone());
    let again = async move { engine.start(&short, 2).id("w").or_restart().await.unwrap().result().await.unwrap() };
    let again = tokio::spawn(again);
    assert_eq!(stage.done(again).await, 2);
    stage.open();
    stage.pass(SECOND).await;
    assert!(stage.engine.describe("w").await.is_ok());
    stage.pass(101 * SECOND).await;
    assert!(stage.engine.describe("w").await.is_err());
}
