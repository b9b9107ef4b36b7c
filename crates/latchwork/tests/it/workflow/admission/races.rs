//! Queues at critical moments: limits of several kinds at once, and races of ends, time limits and admissions.

use std::collections::BTreeSet;
use std::time::Duration;

use latchwork::testing::{Side, TestEngine};
use latchwork::workflow::{Ctx, ExecutionState, Queue, RateLimit, Workflow, WorkflowError, workflow};

use super::{engine_of, held, import, judge, settle, used};
use crate::lock::turnstile::Stage;

const SECOND: Duration = Duration::from_secs(1);

/// Takes the given number of seconds. Returns when it began and ended, in seconds from a given time.
fn timed(limit: u32, rate: RateLimit) -> Workflow<u64, (u64, u64)> {
    let both = workflow("import").concurrency(limit).when_full(Queue::new()).rate_limit(rate.delay());
    both.run(async |ctx: Ctx, seconds: u64| {
        let began = ctx.now().await.0;
        ctx.sleep(Duration::from_secs(seconds)).await?;
        Ok((began, ctx.now().await.0))
    })
}

/// The start takes the token at once, and the permit when one is free. The execution begins when it has both.
#[tokio::test]
async fn a_start_that_is_delayed_and_queued_begins_when_both_limits_allow_it() {
    // How many run at once, how long each takes, and when they begin if there is one token each ten seconds.
    for (limit, takes, begins) in [
        (1, 2, [0, 10, 20, 30, 40]),
        (1, 15, [0, 15, 30, 45, 60]),
        (2, 15, [0, 10, 20, 30, 40]),
        (2, 25, [0, 10, 25, 35, 50]),
    ] {
        let timed = timed(limit, RateLimit::new(1, 10 * SECOND));
        let test = TestEngine::new(&timed, 1).await.unwrap();
        let mut handles = Vec::new();
        for _ in 0..begins.len() {
            handles.push(test.engine().start(&timed, takes).await.unwrap());
        }
        let mut times = Vec::new();
        for handle in handles {
            times.push(test.run(handle.result()).await.unwrap());
        }
        let first = times[0].0;
        let seconds: Vec<u64> = times.iter().map(|(began, _)| (began - first) / 1_000_000).collect();
        assert_eq!(seconds, begins, "{limit} at once, {takes} seconds each");
        for (began, _) in &times {
            let at_once = times.iter().filter(|(other, ended)| other <= began && began < ended).count();
            assert!(at_once <= limit as usize, "{times:?}");
        }
        assert_eq!(used(test.engine(), None).await, (0, 0));
    }
}

/// An execution that holds its permit and waits for its time returns the permit when it is cancelled.
#[tokio::test]
async fn a_delayed_execution_that_is_cancelled_admits_the_next_in_the_queue() {
    let timed = timed(1, RateLimit::new(1, 10 * SECOND));
    let test = TestEngine::new(&timed, 1).await.unwrap();
    let engine = test.engine();
    let began = test.env().now().0;
    let mut handles = Vec::new();
    for id in ["a", "b", "c"] {
        handles.push(engine.start(&timed, 2).id(id).await.unwrap());
    }
    test.run(handles[0].result()).await.unwrap();
    settle().await;
    // The second is admitted and waits until second ten; the third is in the queue.
    assert_eq!(used(engine, None).await, (1, 1));
    engine.cancel("b", "not needed").await.unwrap();
    assert!(matches!(test.run(handles[1].result()).await, Err(WorkflowError::Cancelled { .. })));
    settle().await;
    assert_eq!(used(engine, None).await, (1, 0));
    let (third, _) = test.run(handles[2].result()).await.unwrap();
    assert_eq!((third - began) / 1_000_000, 20, "its token is its own");
    assert_eq!(used(engine, None).await, (0, 0));
}

/// The race: a permit becomes free and the first in the queue is cancelled, in either order and at the same time.
#[tokio::test]
async fn the_first_in_the_queue_is_cancelled_while_it_is_admitted() {
    let mut seen = BTreeSet::new();
    for turns in 0..60 {
        let import = held(import().concurrency(1).when_full(Queue::new()));
        let test = engine_of(&import).await;
        let engine = test.engine();
        for id in ["a", "b", "c"] {
            engine.start(&import, id.into()).id(id).await.unwrap();
        }
        settle().await;
        let cancels = async {
            for _ in 0..turns {
                tokio::task::yield_now().await;
            }
            engine.cancel("b", "not needed").await
        };
        let (ended, cancelled) = tokio::join!(engine.signal("a", "end", &()), cancels);
        ended.unwrap();
        cancelled.unwrap();
        let told = test.run(engine.handle(&import, "b").result()).await;
        assert!(matches!(told, Err(WorkflowError::Cancelled { .. })), "{told:?}");
        seen.insert(engine.history("b").await.unwrap().operations.is_empty());
        test.run(test.env().sleep(3 * SECOND)).await;
        settle().await;
        judge(engine, None, 1).await;
        assert_eq!(used(engine, None).await, (1, 0), "after {turns} turns");
        engine.signal("c", "end", &()).await.unwrap();
        assert_eq!(test.run(engine.handle(&import, "c").result()).await.unwrap(), "c");
        assert_eq!(used(engine, None).await, (0, 0));
    }
    assert_eq!(seen.len(), 2, "it is cancelled in the queue, and after it has begun");
}

/// The race: the permit becomes free at the very moment when the time limit in the queue ends.
#[tokio::test]
async fn the_time_limit_of_a_queue_ends_while_its_first_start_is_admitted() {
    let mut seen = BTreeSet::new();
    for turns in 0..60 {
        let import = held(import().concurrency(1).when_full(Queue::new().timeout(60 * SECOND)));
        let test = engine_of(&import).await;
        let engine = test.engine();
        for id in ["a", "b"] {
            engine.start(&import, id.into()).id(id).await.unwrap();
        }
        test.run(test.env().sleep(30 * SECOND)).await;
        engine.start(&import, "c".into()).id("c").await.unwrap();
        let began = test.env().now();
        let ends = async {
            test.env().sleep(30 * SECOND - Duration::from_micros(200)).await;
            while test.env().now().0 < began.0 + 29_990_000 {
                tokio::task::yield_now().await;
            }
            // Virtual time moves after 64 turns in which no task does anything, and again after as many.
            for _ in 0..40 + turns {
                tokio::task::yield_now().await;
            }
            engine.terminate("a", "enough").await
        };
        test.run(ends).await.unwrap();
        test.run(test.env().sleep(SECOND)).await;
        settle().await;
        judge(engine, None, 1).await;
        let state = engine.describe("b").await.unwrap().state;
        seen.insert(state == ExecutionState::TimedOut);
        match state {
            ExecutionState::TimedOut => assert_eq!(used(engine, None).await, (1, 0), "c is admitted"),
            _ => {
                assert_eq!(used(engine, None).await, (1, 1), "b runs");
                engine.signal("b", "end", &()).await.unwrap();
                assert_eq!(test.run(engine.handle(&import, "b").result()).await.unwrap(), "b");
            }
        }
        engine.signal("c", "end", &()).await.unwrap();
        assert_eq!(test.run(engine.handle(&import, "c").result()).await.unwrap(), "c");
        assert_eq!(used(engine, None).await, (0, 0));
    }
    assert_eq!(seen.len(), 2, "it was admitted, and it timed out");
}

/// The race: the commit that cancels a queued execution is on its way when the execution is admitted. That commit is
/// refused, and the execution is cancelled like a running one.
#[tokio::test]
async fn an_execution_that_is_admitted_meanwhile_does_not_leave_the_queue() {
    let import = held(import().concurrency(1).when_full(Queue::new()));
    let stage = Stage::new(|builder| builder.register(&import)).await;
    let engine = stage.engine.clone();
    for id in ["a", "b", "c"] {
        engine.start(&import, id.into()).id(id).await.unwrap();
    }
    stage.turns().await;
    stage.hold_to("workflow.admission", Side::Before).await;
    let cancels = engine.clone();
    let cancels = stage.begins(async move { cancels.cancel("b", "not needed").await }).await;
    engine.terminate("a", "enough").await.unwrap();
    stage.turns().await;
    assert_eq!(used(&engine, None).await, (1, 1), "b is admitted");
    stage.open();
    stage.turns().await;
    stage.done(cancels).await.unwrap();
    let told = engine.handle(&import, "b").result().await;
    assert!(matches!(told, Err(WorkflowError::Cancelled { .. })), "{told:?}");
    stage.turns().await;
    judge(&engine, None, 1).await;
    engine.signal("c", "end", &()).await.unwrap();
    assert_eq!(engine.handle(&import, "c").result().await.unwrap(), "c");
    assert_eq!(used(&engine, None).await, (0, 0));
}
