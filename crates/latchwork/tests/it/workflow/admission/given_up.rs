//! An execution that gathers starts is cancelled or terminated before it begins: every caller gets the error, and no
//! input is used.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use latchwork::testing::TestEngine;
use latchwork::workflow::{
    Batch, Ctx, Debounce, Engine, Queue, Supersede, Workflow, WorkflowBuilder, WorkflowError, workflow,
};
use parking_lot::Mutex;

use super::settle;

const SECOND: Duration = Duration::from_secs(1);

/// The inputs that the workflows' functions got.
type Given = Arc<Mutex<BTreeSet<u64>>>;

fn batches(builder: WorkflowBuilder, given: &Given) -> Workflow<u64, u64> {
    let given = given.clone();
    builder.batch(Batch::new(10, 60 * SECOND)).run(move |ctx: Ctx, numbers: Vec<u64>| {
        let given = given.clone();
        async move {
            given.lock().extend(&numbers);
            // A function must not run without inputs.
            given.lock().extend(numbers.is_empty().then_some(0));
            ctx.sleep(SECOND).await?;
            Ok(numbers)
        }
    })
}

async fn end(engine: &Engine, id: &str, how: &str) {
    match how {
        "cancelled" => engine.cancel(id, "not needed").await.unwrap(),
        _ => engine.terminate(id, "not needed").await.unwrap(),
    }
}

/// The batch is alone, or waits in a queue.
#[tokio::test]
async fn every_caller_of_a_batch_that_never_begins_gets_an_error() {
    for (how, is_queued) in [("cancelled", false), ("terminated", false), ("cancelled", true), ("terminated", true)] {
        let given = Given::default();
        let builder = workflow("batch").concurrency(1).when_full(Queue::new());
        let batch = batches(builder, &given);
        let test = TestEngine::new(&batch, 1).await.unwrap();
        let engine = test.engine();
        if is_queued {
            for n in 100..110 {
                engine.start(&batch, n).id("full").await.unwrap();
            }
        }
        let mut handles = Vec::new();
        for n in 1..5 {
            handles.push(engine.start(&batch, n).id("b").await.unwrap());
        }
        let waits = handles.pop().unwrap();
        let waits = tokio::spawn(async move { waits.result().await });
        settle().await;
        end(engine, "b", how).await;
        // Callers that already wait, and callers that ask later.
        let mut told = vec![test.run(waits).await.unwrap()];
        for handle in &handles {
            told.push(test.run(handle.result()).await);
        }
        for told in told {
            match (how, &told) {
                ("cancelled", Err(WorkflowError::Cancelled { id, reason })) => {
                    assert_eq!((&**id, &**reason), ("b", "not needed"));
                }
                ("terminated", Err(WorkflowError::Failed { failure, .. })) => {
                    assert_eq!(failure.message(), "it was terminated: not needed");
                }
                other => panic!("{other:?}"),
            }
        }
        // The next start begins another batch.
        let next = engine.start(&batch, 5).id("c").await.unwrap();
        assert_eq!((&**next.id(), next.item()), ("c", Some(0)), "{how}");
        assert_eq!(test.run(next.result()).await.unwrap(), 5);
        given.lock().retain(|n| *n < 100);
        assert_eq!(*given.lock(), [5].into(), "{how}: no input of the other was used");
        let left = engine.limit_use("batch", None).await.unwrap();
        assert_eq!((left.used, left.waiting), (0, 0), "{how}");
    }
}

/// The race: a start comes at the moment when its batch ends. Its caller gets that end, or the start is in the next
/// batch. It is never lost.
#[tokio::test]
async fn a_start_that_races_with_the_end_of_its_batch_has_an_answer() {
    let mut places = BTreeSet::new();
    for how in ["cancelled", "terminated"] {
        for turns in -24..24 {
            let given = Given::default();
            let batch = batches(workflow("batch"), &given);
            let test = TestEngine::new(&batch, 1).await.unwrap();
            let engine = test.engine();
            engine.start(&batch, 1).id("b").await.unwrap();
            let pause = async |turns: i32| {
                for _ in 0..turns {
                    tokio::task::yield_now().await;
                }
            };
            let ends = async {
                pause(turns).await;
                end(engine, "b", how).await;
            };
            let starts = async {
                pause(-turns).await;
                engine.start(&batch, 2).id("c").await
            };
            let (started, ()) = tokio::join!(starts, ends);
            let started = started.unwrap();
            let is_first = &**started.id() == "b";
            places.insert((how, is_first));
            match (is_first, test.run(started.result()).await) {
                (true, Err(WorkflowError::Cancelled { .. } | WorkflowError::Failed { .. })) | (false, Ok(2)) => {}
                other => panic!("{how} after {turns} turns: {other:?}"),
            }
            let expected: BTreeSet<u64> = if is_first { [].into() } else { [2].into() };
            assert_eq!(*given.lock(), expected);
        }
    }
    assert_eq!(places.len(), 4, "both happen: {places:?}");
}

#[tokio::test]
async fn a_gathered_start_supersedes_no_execution() {
    let given = Given::default();
    let batch = batches(workflow("batch"), &given);
    let debounced = workflow("d").debounce(Debounce::new(SECOND)).run(async |_: Ctx, n: u64| Ok(n));
    let test = TestEngine::build(1).register(&batch).register(&debounced).start().await.unwrap();
    for how in [Supersede::Cancel, Supersede::Terminate] {
        let starts = [
            test.engine().start(&batch, 1).id("b").supersede(how).await,
            test.engine().start(&debounced, 1).id("d").supersede(how).await,
        ];
        for refused in starts {
            assert!(matches!(refused, Err(WorkflowError::Start { .. })), "{refused:?}");
        }
    }
    assert!(test.engine().describe("b").await.is_err());
}

/// Five inputs of more than a megabyte each do not fit in one record: a batch begins before the input that does not
/// fit.
#[tokio::test]
async fn inputs_that_together_are_more_than_a_record_holds_are_several_batches() {
    let lengths = workflow("lengths").batch(Batch::new(100, SECOND));
    let lengths = lengths.run(async |ctx: Ctx, texts: Vec<String>| {
        let all: Vec<usize> = texts.iter().map(String::len).collect();
        ctx.run("measure", async || Ok(all.clone())).await
    });
    let test = TestEngine::new(&lengths, 1).await.unwrap();
    let engine = test.engine();
    // One after the other, and all at once.
    for at_once in [false, true] {
        let start = |n: usize| engine.start(&lengths, "x".repeat((1 << 20) + n)).into_future();
        let handles = match at_once {
            true => futures_util::future::join_all((0..8).map(start)).await,
            false => {
                let mut handles = Vec::new();
                for n in 0..8 {
                    handles.push(start(n).await);
                }
                handles
            }
        };
        let mut batches = BTreeSet::new();
        for (n, handle) in handles.into_iter().enumerate() {
            let handle = handle.unwrap();
            assert_eq!(test.run(handle.result()).await.unwrap(), (1 << 20) + n, "at once: {at_once}");
            assert!(batches.insert((handle.id().clone(), handle.item().unwrap())), "each start has its own item");
        }
        let ids: BTreeSet<_> = batches.iter().map(|(id, _)| id).collect();
        assert_eq!(ids.len(), 3, "three at a time");
    }
    // The largest possible input is a batch by itself; an input that is one byte larger is refused.
    let largest = (4 << 20) - (256 << 10) - 2;
    let whole = engine.start(&lengths, "x".repeat(largest)).await;
    let beside = engine.start(&lengths, "y".into()).await.unwrap();
    assert_eq!(test.run(beside.result()).await.unwrap(), 1);
    assert_eq!(test.run(whole.unwrap().result()).await.unwrap(), largest);
    let more = engine.start(&lengths, "x".repeat(largest + 1)).await;
    assert!(matches!(more, Err(WorkflowError::InputTooLong { .. })), "{more:?}");
}
