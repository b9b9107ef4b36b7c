//! A crash right before and right after every commit of executions under limits.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use latchwork::testing::Crashes;
use latchwork::workflow::{
    Batch, Ctx, Debounce, ExecutionFilter, Queue, RateLimit, Retry, Workflow, WorkflowError, workflow,
};
use parking_lot::Mutex;

fn often() -> Retry {
    Retry::exponential().max_attempts(100)
}

/// The last start is admitted after all earlier executions have ended, in whichever process: no permit is lost or left
/// over.
#[tokio::test]
async fn permits_and_positions_in_the_queue_survive_a_crash_at_any_commit() {
    let limited: Workflow<u32, u32> =
        workflow("limited").concurrency(1).when_full(Queue::new()).run(async |ctx: Ctx, n: u32| {
            ctx.run("one", async || Ok(())).retry(often()).await?;
            ctx.sleep(Duration::from_secs(5)).await?;
            ctx.run("two", async || Ok(n)).retry(often()).await
        });
    let others = limited.clone();
    let crashes = Crashes::of(|| limited.clone(), 1).outside(move |engine| {
        let limited = others.clone();
        async move {
            for n in 2..=3 {
                if engine.start(&limited, n).id(format!("e{n}")).or_join().await.is_err() {
                    return;
                }
            }
        }
    });
    let mut ended = 0;
    let crashes = crashes.run(async |outcome| {
        assert_eq!(outcome.result.as_ref().ok(), Some(&1), "{:?}", outcome.crash);
        ended += 1;
    });
    assert_eq!(crashes.await, ended);
    assert!(ended >= 10, "{ended}");
}

/// The callers of a batch send their starts again after a crash. Each accepted input is used once.
#[tokio::test]
async fn batches_survive_a_crash_at_any_commit() {
    let summed: Workflow<u32, u32> =
        workflow("summed").batch(Batch::new(3, Duration::from_secs(1))).run(async |ctx: Ctx, inputs: Vec<u32>| {
            ctx.run("sum", async || Ok(inputs.iter().map(|n| n * 10).collect())).retry(often()).await
        });
    let gathers = summed.clone();
    let drives = workflow("drives").run(async |ctx: Ctx, (): ()| {
        let sums: Vec<u32> = ctx.receive("sums").await?;
        ctx.run("end", async || Ok(sums.clone())).retry(often()).await
    });
    let crashes = Crashes::of(|| drives.clone(), ()).register(|| summed.clone()).outside(move |engine| {
        let summed = gathers.clone();
        async move {
            let mut handles = Vec::new();
            for n in 1..=5 {
                match engine.start(&summed, n).await {
                    Ok(handle) => handles.push(handle),
                    Err(_) => return,
                }
            }
            let mut sums = Vec::new();
            for handle in handles {
                match handle.result().await {
                    Ok(sum) => sums.push(sum),
                    Err(_) => return,
                }
            }
            let _ = engine.signal("execution", "sums", &sums).id("sums").await;
        }
    });
    let mut ended = 0;
    let crashes = crashes.run(async |outcome| {
        assert_eq!(outcome.result.as_ref().ok(), Some(&vec![10, 20, 30, 40, 50]), "{:?}", outcome.crash);
        ended += 1;
    });
    assert_eq!(crashes.await, ended);
    assert!(ended >= 10, "{ended}");
}

/// Waits for the word of its callers that all is done.
fn driven() -> Workflow<(), ()> {
    workflow("drives").run(async |ctx: Ctx, (): ()| {
        ctx.receive::<()>("done").await?;
        ctx.run("end", async || Ok(())).retry(often()).await
    })
}

/// Callers start as fast as they are let, and send again after a crash. A token that a lost start has taken may be
/// gone, but in no span of time are there more starts than the bucket holds and gets.
#[tokio::test]
async fn a_rate_is_not_exceeded_over_all_lives_with_a_crash_at_any_commit() {
    const MAX: u64 = 3;
    const STARTS: usize = 9;
    let second = Duration::from_secs(1);
    let rated: Workflow<u32, u32> =
        workflow("rated").rate_limit(RateLimit::new(MAX as u32, MAX as u32 * second)).run(async |_: Ctx, n: u32| Ok(n));
    let starts = rated.clone();
    let crashes = Crashes::of(driven, ()).register(|| rated.clone()).outside(move |engine| {
        let rated = starts.clone();
        async move {
            for n in 0..STARTS as u32 {
                loop {
                    match engine.start(&rated, n).id(format!("r{n}")).or_join().await {
                        Ok(_) => break,
                        Err(WorkflowError::RateLimited { retry_after, .. }) => {
                            engine.store().env().sleep(retry_after).await;
                        }
                        Err(_) => return,
                    }
                }
            }
            let _ = engine.signal("execution", "done", &()).id("done").await;
        }
    });
    let mut ended = 0;
    let crashes = crashes.run(async |outcome| {
        assert!(outcome.result.is_ok(), "{:?}", outcome.crash);
        let filter = ExecutionFilter::new().workflow("rated");
        let all = outcome.engine().list(filter).limit(100).await.unwrap().items;
        let mut times: Vec<u64> = all.iter().map(|it| it.started.0).collect();
        times.sort_unstable();
        assert_eq!(times.len(), STARTS, "each start is one execution: {:?}", outcome.crash);
        for (first, from) in times.iter().enumerate() {
            for (last, until) in times.iter().enumerate().skip(first) {
                let (count, most) = ((last - first + 1) as u64, MAX + (until - from) / 1_000_000);
                assert!(count <= most, "{count} starts in {} µs: {:?}", until - from, outcome.crash);
            }
        }
        ended += 1;
    });
    assert_eq!(crashes.await, ended);
    assert!(ended >= 20, "{ended}");
}

/// Each caller that was told of its start has the handle of an execution, which has the last input that was accepted.
#[tokio::test]
async fn a_debounced_execution_has_the_last_accepted_input_with_a_crash_at_any_commit() {
    let debounced: Workflow<u32, u32> = workflow("debounced")
        .debounce(Debounce::new(Duration::from_secs(5)))
        .run(async |ctx: Ctx, n: u32| ctx.run("one", async || Ok(n)).retry(often()).await);
    let starts = debounced.clone();
    // The execution and the input of each start that was accepted, over both lives of a run.
    let accepted: Arc<Mutex<Vec<(String, u32)>>> = Arc::default();
    let accepts = accepted.clone();
    let crashes = Crashes::of(driven, ()).register(|| debounced.clone()).outside(move |engine| {
        let (debounced, accepted) = (starts.clone(), accepts.clone());
        async move {
            let known = engine.list(ExecutionFilter::new().workflow("debounced")).await;
            if known.is_ok_and(|known| known.items.is_empty()) {
                accepted.lock().clear();
            }
            let mut handles = Vec::new();
            for _ in 0..4 {
                let n = accepted.lock().len() as u32 + 1;
                let Ok(handle) = engine.start(&debounced, n).await else { return };
                accepted.lock().push((handle.id().to_string(), n));
                handles.push(handle);
                engine.store().env().sleep(Duration::from_secs(1)).await;
            }
            for handle in handles {
                if handle.result().await.is_err() {
                    return;
                }
            }
            let _ = engine.signal("execution", "done", &()).id("done").await;
        }
    });
    let mut ended = 0;
    let crashes = crashes.run(async |outcome| {
        assert!(outcome.result.is_ok(), "{:?}", outcome.crash);
        let last: BTreeMap<String, u32> = accepted.lock().iter().cloned().collect();
        assert!(!last.is_empty());
        for (id, n) in last {
            let result = outcome.engine().handle(&debounced, &*id).result().await;
            assert_eq!(result.ok(), Some(n), "{id}: {:?}", outcome.crash);
        }
        ended += 1;
    });
    assert_eq!(crashes.await, ended);
    assert!(ended >= 10, "{ended}");
}
