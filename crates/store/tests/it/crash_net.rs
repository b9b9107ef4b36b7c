//! Tests of the power-loss tests: they must find a store that is broken on purpose, and find it by an image, not by
//! another failure on the way.

use latchwork_store::Sabotage;

use crate::crowd::crowd;
use crate::power_loss::{Plan, examine};
use crate::workload::{Run, alone};

async fn check(run: Run) {
    let plan = Plan { seed: 1, images: 500, again: 50, point: None };
    let violation = examine(&run, plan).await.expect_err("the power-loss tests find a broken store");
    println!("{violation}");
    assert!(violation.point.is_some());
}

async fn check_both(sabotage: Sabotage) {
    // A few steps only: a longer run would itself notice the wrong answers.
    check(alone(1, 12, Some(sabotage)).await.unwrap()).await;
    check(crowd(1, 10, Some(sabotage)).await.unwrap()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_does_not_sync_is_caught() {
    check_both(Sabotage::SkipSync).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_store_that_answers_before_it_syncs_is_caught() {
    check_both(Sabotage::AnswerBeforeSync).await;
}
