//! Removals that a start interferes with, or that a crash interrupts: everything that is to be removed is removed, at
//! the next start at the latest.

use std::time::Duration;

use latchwork::testing::Side;
use latchwork::workflow::{Ctx, Engine, workflow};

use crate::lock::turnstile::Stage;

const SECOND: Duration = Duration::from_secs(1);

/// Ten executions are due for removal when an engine starts; a caller restarts one of them at the same time.
#[tokio::test]
async fn an_execution_that_is_restarted_keeps_no_other_from_being_removed() {
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

/// An execution has more records than one commit removes, and the process ends between two of these commits.
#[tokio::test]
async fn the_rest_of_an_interrupted_removal_is_removed_the_next_time() {
    let many = workflow("many").keep(SECOND).run(async |ctx: Ctx, count: u64| {
        for slot in 0..count / 2 {
            ctx.state().execution::<u64>(&format!("{slot}")).set(1).await?;
        }
        if count % 2 == 1 {
            ctx.run("one more", async || Ok(())).await?;
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

/// The race: the commit that removes an execution is in flight when another execution is started under its id, and
/// ends.
#[tokio::test]
async fn a_new_execution_under_the_id_of_a_removed_one_is_kept() {
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
